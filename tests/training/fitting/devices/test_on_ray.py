"""Workers of Ray that fit together: GPUs or cores, the interface they talk over, and whose error is raised."""

from __future__ import annotations

import pytest

from reclaim.data.errors import ConfigError
from reclaim.training.fitting.devices.distributed import loopback
from reclaim.training.fitting.devices.on_ray import _claimed, _loss_of, _variables


@pytest.mark.parametrize(
    ("workers", "device", "claimed"),
    [
        (0, "auto", (True, 2)),
        (1, "cuda", (True, 1)),
        (0, "cpu", (False, 8)),
        (3, "cpu", (False, 3)),
    ],
)
def test_workers_have_a_gpu_each_where_the_cluster_has_one_and_the_fit_may_use_it(
    workers: int, device: str, claimed: tuple[bool, int]
) -> None:
    assert _claimed({"CPU": 8.0, "GPU": 2.0}, workers, device) == claimed


def test_more_workers_than_gpus_or_cores_are_an_error_that_says_how_many_there_are() -> None:
    assert _claimed({"CPU": 8.0}, 0, "auto") == (False, 8)
    for present, workers, device, message in (
        ({"CPU": 8.0, "GPU": 2.0}, 3, "auto", "--workers 3: the Ray cluster has 2 GPUs"),
        ({"CPU": 8.0}, 9, "auto", "--workers 9: the Ray cluster has 8 CPUs"),
        ({"CPU": 8.0}, 0, "cuda", "--workers 0: the Ray cluster has 0 GPUs"),
    ):
        with pytest.raises(ConfigError, match=message):
            _claimed(present, workers, device)


def test_workers_of_one_machine_talk_over_its_loopback_interface_and_see_no_gpu_that_is_not_theirs() -> None:
    here, gone = {"NodeManagerAddress": "10.0.0.1", "Alive": True}, {"NodeManagerAddress": "10.0.0.2", "Alive": False}
    over = {"GLOO_SOCKET_IFNAME": loopback(), "NCCL_SOCKET_IFNAME": loopback()}
    assert _variables([here, here, gone], gpu=True) == over
    assert _variables([here], gpu=False) == {"CUDA_VISIBLE_DEVICES": "", **over}
    assert _variables([here, {**gone, "Alive": True}], gpu=True) == {}


class _LostError(Exception):
    """As Ray raises it where a worker is lost."""

    __module__ = "ray.exceptions"


class _FailedError(Exception):
    """As Ray Train raises it, with the errors of the workers by rank."""

    def __init__(self, worker_failures: dict[int, Exception]) -> None:
        super().__init__("workers failed")
        self.worker_failures = worker_failures


def test_a_lost_worker_counts_as_lost_whatever_the_others_then_say_but_an_error_of_a_fit_is_raised() -> None:
    silent = RuntimeError("Connection closed by peer")
    lost = _LostError("A worker health check failed.\nThe actor died.\nactor_id: 7")
    assert _loss_of(_FailedError({0: silent, 1: lost})) == "A worker health check failed. The actor died."
    assert _loss_of(_FailedError({0: silent})) == "Connection closed by peer"
    with pytest.raises(ConfigError, match="no GPU"):
        _loss_of(_FailedError({0: silent, 1: ConfigError("no GPU")}))
    with pytest.raises(ZeroDivisionError):
        _loss_of(_FailedError({0: lost, 1: ZeroDivisionError()}))
