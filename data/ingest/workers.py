"""Runs independent jobs in threads, in a pool of processes or as Ray tasks; the results are the same."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Final, TypeVar

from reclaim.data.errors import ConfigError, TraceError

ENGINES: Final = ("local", "ray")
"""``local``: threads of this process or a pool of them; ``ray``: a Ray cluster, for traces larger than one machine."""
POOL_BYTES: Final = 2 << 30
"""Input from which processes are worth starting. Below it threads finish sooner: most of the jobs' work releases
Python's lock, and a process first has to import and to load compiled code."""
_PROCESS_MIB: Final = 170
"""Memory a process takes before it holds any data, in MiB."""
_WORKING_MIB: Final = 250
"""Least memory a worker needs for data, in MiB."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def plan_workers(engine: str, workers: int, memory_limit_mib: int, n_bytes: int) -> tuple[int, int]:
    """Return how many workers fit, at most ``workers`` (0: one for each core), and memory for a process's query engine.

    Half of the memory is for what the query engine does not see: rows read, sorted and written. Threads share a process
    and its query engine; with processes, the one that waits for them counts, too.
    """
    wanted = workers or len(os.sched_getaffinity(0))
    fitting = max(1, min(wanted, (memory_limit_mib - _PROCESS_MIB) // (_PROCESS_MIB + _WORKING_MIB)))
    if fitting == 1 or (engine == "local" and n_bytes < POOL_BYTES):
        return fitting, (memory_limit_mib - _PROCESS_MIB) // 2
    return fitting, (memory_limit_mib - (fitting + 1) * _PROCESS_MIB) // fitting // 2


class Workers:
    """A pool of workers; a context manager.

    Parameters
    ----------
    engine : str
        One of ``ENGINES``.
    count : int
        Number of workers.
    n_bytes : int
        Size of all the input, which decides between threads and processes.
    """

    def __init__(self, engine: str, count: int, n_bytes: int) -> None:
        self._engine = engine
        self._count = count
        self._pool: Executor | None = None
        self.separate = engine == "local" and count > 1 and n_bytes >= POOL_BYTES
        if self.separate:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["reclaim.data.ingest.preload"])
            self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_die_with_parent)
        elif engine == "local" and count > 1:
            self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)

    def run(
        self, function: Callable[[Job], Result], jobs: Sequence[Job], done: Callable[[int], object]
    ) -> list[Result]:
        """Return the function's result for every job, in the jobs' order.

        Jobs begin in their order: the longest should stand first. ``done`` gets the place of each finished job.
        The first error ends the run, after the jobs that have begun.

        Raises
        ------
        ConfigError
            Ray is requested and not installed.
        TraceError
            A process was killed.
        """
        if self._engine == "ray":
            return _run_on_ray(function, jobs, self._count, done)
        results: list[Any] = [None] * len(jobs)
        if self._pool is None:
            for place, job in enumerate(jobs):
                results[place] = function(job)
                done(place)
            return results
        places = {self._pool.submit(function, job): place for place, job in enumerate(jobs)}
        try:
            for future in as_completed(places):
                results[places[future]] = future.result()
                done(places[future])
        except BrokenProcessPool as error:
            raise TraceError(
                "a worker was killed, most likely for its memory; run again with fewer --workers, what was done is kept"
            ) from error
        except BaseException:
            for future in places:
                future.cancel()
            raise
        return results


def _die_with_parent() -> None:
    """End this process when its parent has ended: a worker of a killed run must not write while the next run does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_on_ray(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, done: Callable[[int], object]
) -> list[Result]:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--engine ray: Ray is not installed; pip install 'reclaim[ray]'") from error
    if not ray.is_initialized():  # RAY_ADDRESS, where set, names a cluster that runs already
        here = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": workers, "include_dashboard": False}
        ray.init(log_to_driver=False, configure_logging=False, **here)
    task = ray.remote(function)
    places = {task.remote(job): place for place, job in enumerate(jobs)}
    results: list[Any] = [None] * len(jobs)
    waiting = list(places)
    while waiting:
        ready, waiting = ray.wait(waiting)
        for reference in ready:
            try:
                results[places[reference]] = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                for other in waiting:
                    ray.cancel(other)
                raise error.cause from error
            except ray.exceptions.RayError as error:
                raise TraceError(f"a Ray worker was lost ({error}); run again, what was done is kept") from error
            done(places[reference])
    return results
