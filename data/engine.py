"""Runs independent jobs: here, in a pool of processes, or as Ray tasks; what they return does not depend on which."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.connection import wait
from typing import Any, Final, TypeVar

from reclaim.data.errors import ConfigError

ENGINES: Final = ("local", "ray")
"""``local``: this process, or a pool of them; ``ray``: a Ray cluster, for traces larger than one machine."""
_PROCESS_MIB: Final = 150
"""Memory a process takes before it holds any data, in MiB."""
_WORKING_MIB: Final = 250
"""Least memory a worker needs for data, in MiB."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def plan_workers(workers: int, memory_limit_mib: int) -> tuple[int, int]:
    """Return how many workers fit, at most ``workers`` (0: one for each core), and the data memory of each in MiB.

    The processes themselves count: with more than one worker there is also the process that waits for them.
    """
    wanted = workers or len(os.sched_getaffinity(0))
    fitting = max(1, min(wanted, (memory_limit_mib - _PROCESS_MIB) // (_PROCESS_MIB + _WORKING_MIB)))
    processes = fitting + 1 if fitting > 1 else 1
    return fitting, max((memory_limit_mib - processes * _PROCESS_MIB) // fitting, 64)


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    engine: str,
    workers: int,
    done: Callable[[int], object],
) -> list[Result]:
    """Return the function's result for every job, in the jobs' order.

    Jobs begin in their order: the longest should stand first. ``done`` is told each finished job's place. The first
    error ends the run; jobs that have begun are waited for.

    Raises
    ------
    ConfigError
        Ray is asked for and not installed.
    """
    if engine == "ray":
        return _run_on_ray(function, jobs, workers, done)
    results: list[Any] = [None] * len(jobs)
    if workers == 1 or len(jobs) < 2:
        for place, job in enumerate(jobs):
            results[place] = function(job)
            done(place)
        return results
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["reclaim.data.shards", "reclaim.data.buckets"])
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context, initializer=_die_with_parent) as pool:
        places = {pool.submit(function, job): place for place, job in enumerate(jobs)}
        try:
            for future in as_completed(places):
                results[places[future]] = future.result()
                done(places[future])
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return results


def _die_with_parent() -> None:
    """End this process when the one that began it is gone: a killed run must not go on writing behind the next one."""
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
            done(places[reference])
    return results
