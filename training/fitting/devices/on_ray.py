"""Runs a fit in the workers of a Ray cluster, by Ray Train."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from tqdm import tqdm

from reclaim.data.core.engine.limits import cores
from reclaim.data.core.engine.workers import RETRIES, connected_ray
from reclaim.data.errors import ConfigError, TraceError
from reclaim.training.fitting.devices.distributed import INTERFACES, loopback

log = logging.getLogger(__name__)

Tell = Callable[[int, float], None]
"""Takes an epoch, from 0, and its validation loss."""
Fitted = TypeVar("Fitted")

_CALLS: Final = 3
"""Calls that ``_Attempts`` takes at once: the run, an epoch's end, and the question for the progress."""
_ASK_S: Final = 1.0
"""Seconds between two questions for the progress."""


def fit_on_ray(fit: Callable[[Tell | None], Fitted], workers: int, *, device: str, epochs: int) -> Fitted:
    """Fit in several workers of Ray at once, which are joined over gloo or NCCL, and return what the first one returns.

    Where a worker or its node is lost, all begin again, ``RETRIES`` times at most: a fit goes on from its checkpoint.
    Each time, Ray Train waits a minute for as many GPUs or cores as before.

    Parameters
    ----------
    fit : callable
        Is sent to every worker and called in each, inside a process group of torch. Its argument is to be called after
        each epoch; None in all workers but the first.
    workers : int
        0: one for each GPU of the cluster, or for each core where the fit is on the CPU.
    device : str
        ``fit.device`` of the settings. ``auto`` is on GPUs where the cluster has one.
    epochs : int
        The largest number of epochs, for the bar.

    Raises
    ------
    ConfigError
        Ray is not installed, or its cluster has fewer GPUs or cores than ``workers``.
    ReclaimError
        The error of a worker.
    TraceError
        Workers were lost too often, or Ray itself.
    """
    ray = connected_ray(workers or cores())
    gpu, count = _claimed(ray.cluster_resources(), workers, device)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    attempts = ray.remote(num_cpus=0, max_concurrency=_CALLS, scheduling_strategy=here)(_Attempts).remote()
    running, logged = attempts.run.remote(fit, count, gpu=gpu, variables=_variables(ray.nodes(), gpu=gpu)), 0
    try:
        with tqdm(total=epochs, desc="fit", unit="epoch", disable=None) as bar:
            while not ray.wait([running], timeout=_ASK_S)[0]:
                done, loss, lost = ray.get(attempts.progress.remote())
                for reason in lost[logged:]:
                    log.warning("a worker of Ray was lost, all go on from the last epoch: %s", reason)
                logged = len(lost)
                if done != bar.n:
                    bar.update(done - bar.n)
                    bar.set_postfix(valid=f"{loss:.4f}")
        fitted: Fitted = ray.get(running)
        return fitted
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise TraceError(f"Ray was lost ({_line(error)}); run again") from error
    finally:
        ray.kill(attempts)


def _claimed(present: dict[str, float], workers: int, device: str) -> tuple[bool, int]:
    """Return whether the workers have GPUs, and how many there are."""
    gpu = device.startswith("cuda") or (device == "auto" and present.get("GPU", 0) >= 1)
    kind = "GPU" if gpu else "CPU"
    there = int(present.get(kind, 0))
    if not 1 <= (workers or there) <= there:
        raise ConfigError(f"--workers {workers}: the Ray cluster has {there} {kind}s, and each worker needs one")
    return gpu, workers or there


def _variables(nodes: list[dict[str, Any]], *, gpu: bool) -> dict[str, str]:
    """Return the environment variables of the workers: on one machine they talk over its loopback interface."""
    variables = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    if len({node["NodeManagerAddress"] for node in nodes if node["Alive"]}) == 1:
        variables |= dict.fromkeys(INTERFACES, loopback())
    return variables


class _Attempts:
    """An actor that fits in workers, again where one was lost, and knows how far the fit is."""

    def __init__(self) -> None:
        self._done, self._loss = 0, math.nan
        self._lost: list[str] = []

    def tell(self, epoch: int, loss: float) -> None:
        """Take the validation loss of an epoch."""
        self._done, self._loss = epoch + 1, loss

    def progress(self) -> tuple[int, float, list[str]]:
        """Return how many epochs are done, the last loss, and why workers were lost."""
        return self._done, self._loss, self._lost

    def run(self, fit: Callable[[Tell | None], Fitted], count: int, *, gpu: bool, variables: dict[str, str]) -> Fitted:
        """Fit in ``count`` workers, whose environment has these variables besides."""
        import ray
        from ray.train import ControllerError, FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
        from ray.train.torch import TorchTrainer

        with TemporaryDirectory(prefix="ray-train-") as folder:  # of Ray Train's own records, which nothing here reads
            for _ in range(1 + RETRIES):
                trainer = TorchTrainer(
                    _fit_along,
                    train_loop_config={"fit": fit, "attempts": ray.get_runtime_context().current_actor},
                    scaling_config=ScalingConfig(num_workers=count, use_gpu=gpu),
                    run_config=RunConfig(
                        storage_path=folder,
                        worker_runtime_env={"env_vars": variables},
                        failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
                    ),
                )
                try:
                    fitted: Fitted = trainer.fit().return_value
                    return fitted
                except WorkerGroupError as error:
                    self._lost.append(_loss_of(error))
                except ControllerError as error:
                    self._lost.append(_line(error))
        raise TraceError(f"workers of Ray were lost {len(self._lost)} times ({self._lost[-1]}); run again")


def _loss_of(error: Any) -> str:
    """Return in a line how a worker was lost; raise the error of a fit where that was the reason.

    When one worker is lost, the others fail because it is silent, and that may be all that is known: torch raises a
    plain RuntimeError. A RuntimeError with another reason is therefore tried again, too, and named at the end.
    """
    failures = list(error.worker_failures.values())
    for failure in failures:
        if not isinstance(failure, RuntimeError) and not type(failure).__module__.startswith("ray."):
            raise failure from error
    return _line(min(failures, key=lambda failure: isinstance(failure, RuntimeError)))


def _line(error: Exception) -> str:
    """Return the first two lines of an error's message: of a lost worker, the second says how."""
    return " ".join(str(error).strip().splitlines()[:2])


def _fit_along(shared: dict[str, Any]) -> Any:
    """Fit in one worker, along with the others."""
    import ray
    from ray.train import get_context

    def tell(epoch: int, loss: float) -> None:
        ray.get(shared["attempts"].tell.remote(epoch, loss))

    return shared["fit"](tell if get_context().get_world_rank() == 0 else None)
