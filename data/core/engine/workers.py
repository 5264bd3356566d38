"""Runs independent jobs in threads, in a pool of processes or as Ray tasks; the results are the same."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar
from uuid import uuid4

from reclaim.data.core.engine.limits import cores, memory_mib
from reclaim.data.errors import ConfigError, TraceError

ENGINES: Final = ("local", "processes", "ray")
"""``local``: threads of this process, or a pool of processes for a large input; ``processes``: that pool whatever the
input; ``ray``: a Ray cluster, for traces larger than one machine."""
POOL_BYTES: Final = 2 << 30
"""Input from which processes are worth starting. Below it threads finish sooner: most of the jobs' work releases
Python's lock, and a process first has to import and to load compiled code."""
_PROCESS_MIB: Final = 170
"""Memory a process takes before it holds any data, in MiB."""
_WORKING_MIB: Final = 250
"""Least memory a worker needs for data, in MiB."""
_SHARE_MIB: Final = 512
"""Memory for each worker of a stage that states no limit, in MiB: what a worker takes for a bucket of 100,000 windows,
and its part of what the stage holds."""
_QUERIES: Final = 0.45
"""Share of the memory for data that is the query engine's."""
_AHEAD: Final = 2
"""Jobs begun for each worker before a result is taken: one in work, and one that waits for the worker."""
_ANSWERS_S: Final = 10.0
"""Longest that a cluster may take to accept a connection."""
RETRIES: Final = 5
"""Times that a Ray job is run again after its worker was lost."""

Job = TypeVar("Job")
Result = TypeVar("Result")


def plan_workers(engine: str, workers: int, memory_limit_mib: int, n_bytes: int) -> tuple[int, int]:
    """Return how many workers fit, at most ``workers`` (0: one for each core), and memory for a process's query engine.

    The rest of the memory is for what the query engine does not see: rows read, sorted and written. Threads share a
    process and its query engine; with processes, the one that waits for them counts, too.
    """
    wanted = workers or cores()
    fitting = max(1, min(wanted, (memory_limit_mib - _PROCESS_MIB) // (_PROCESS_MIB + _WORKING_MIB)))
    if fitting == 1 or (engine == "local" and n_bytes < POOL_BYTES):
        return fitting, int(_QUERIES * (memory_limit_mib - _PROCESS_MIB))
    return fitting, int(_QUERIES * ((memory_limit_mib - (fitting + 1) * _PROCESS_MIB) // fitting))


@dataclass(frozen=True)
class Engine:
    """Kind and number of the workers that run the jobs of a stage.

    Attributes
    ----------
    name : str
        One of ``ENGINES``.
    workers : int
        0: one for each core that this process may use, as its memory allows.
    """

    name: str = "local"
    workers: int = 0

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, got {self.name!r}")

    @property
    def count(self) -> int:
        """Number of workers."""
        return self.workers or max(1, min(cores(), memory_mib() // _SHARE_MIB))

    def pool(self) -> Workers:
        """Return its workers; threads where it is ``local``, for jobs that mostly release Python's lock."""
        return Workers(self.name, self.count)


HERE: Final = Engine()
"""The default: threads of this process, one for each core."""


class Workers:
    """A pool of workers; a context manager.

    Jobs are pure: what a job gives depends on function and job alone, so one that was lost with its worker is run
    again. What jobs share belongs in the function, a ``functools.partial``: it goes to a worker once, and not with each
    job. Arrays of function and job may be read-only.

    Parameters
    ----------
    engine : str
        One of ``ENGINES``.
    count : int
        Number of workers.
    n_bytes : int
        Size of all the input, which decides between threads and processes.
    preload : str
        Module that worker processes begin with.
    """

    def __init__(self, engine: str, count: int, n_bytes: int = 0, preload: str = "") -> None:
        self._count = count
        self.separate = count > 1 and (engine == "processes" or (engine == "local" and n_bytes >= POOL_BYTES))
        self._pool: Pool
        if engine == "ray":
            self._pool = OnRay(count)
        elif count == 1:
            self._pool = InTurn()
        else:
            self._pool = Local(count, separate=self.separate, preload=preload)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._pool.close(cancel=kind is not None)

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
            A worker was lost, and the engine does not run its job again.
        """
        results: list[Any] = [None] * len(jobs)
        left, places = iter(enumerate(jobs)), dict[Any, int]()
        try:
            while True:
                for place, job in islice(left, _AHEAD * self._count - len(places)):
                    places[self._pool.begin(function, job)] = place
                if not places:
                    break
                begun = self._pool.first_done(list(places))
                place = places.pop(begun)
                results[place] = self._pool.result(begun)
                done(place)
        except BaseException:
            self._pool.cancel(list(places))
            raise
        finally:
            self._pool.release(function)
        return results

    def each(self, function: Callable[[Job], Result], jobs: Iterable[Job]) -> Generator[Result]:
        """Yield the function's result for every job, in the jobs' order; errors as of ``run``.

        No more than ``_AHEAD`` jobs for each worker are ahead of the result that is taken, so that memory holds only
        their results.
        """
        return self.each_call((function, job) for job in jobs)

    def each_call(self, calls: Iterable[tuple[Callable[[Job], Result], Job]]) -> Generator[Result]:
        """Yield the result of every function for its job, as ``each`` does; the jobs of one function stand together."""
        begun: deque[tuple[Callable[[Job], Result], Any]] = deque()

        def taken() -> Result:
            function, first = begun.popleft()
            result: Result = self._pool.result(first)
            if all(other is not function for other, _ in begun):
                self._pool.release(function)
            return result

        try:
            for function, job in calls:
                begun.append((function, self._pool.begin(function, job)))
                if len(begun) >= _AHEAD * self._count:
                    yield taken()
            while begun:
                yield taken()
        finally:
            self._pool.cancel([one for _, one in begun])


class Pool(Protocol):
    """One kind of workers: begins jobs, reports which are done, and returns their results."""

    def begin(self, function: Callable[[Any], Any], job: Any) -> Any:
        """Begin a job as soon as a worker is free, and return a handle on it."""

    def first_done(self, begun: list[Any]) -> Any:
        """Wait until one of the jobs begun has ended, and return it."""

    def result(self, begun: Any) -> Any:
        """Wait for a job and return its result, or raise its error."""

    def cancel(self, begun: list[Any]) -> None:
        """Give up jobs that no worker has begun, or wait for them."""

    def release(self, function: Callable[[Any], Any]) -> None:
        """Drop what is kept of a function, all of whose jobs have ended."""

    def close(self, *, cancel: bool) -> None:
        """Wait for the workers, or, to ``cancel``, for their present jobs alone."""


class InTurn:
    """No worker: jobs run one by one, when their results are asked for."""

    def begin(self, function: Callable[[Any], Any], job: Any) -> Callable[[], Any]:
        """Return the job without beginning it."""
        return partial(function, job)

    def first_done(self, begun: list[Any]) -> Any:
        """Return the first job, which is run when its result is asked for."""
        return begun[0]

    def result(self, begun: Any) -> Any:
        """Run the job."""
        return begun()

    def cancel(self, begun: list[Any]) -> None:
        """Do nothing: none has begun."""

    def release(self, function: Callable[[Any], Any]) -> None:
        """Do nothing: nothing is kept."""

    def close(self, *, cancel: bool) -> None:
        """Do nothing: there is no worker."""


class Local:
    """Threads of this process, or processes that end with it."""

    def __init__(self, count: int, *, separate: bool, preload: str) -> None:
        self._executor: Executor
        self._folder = TemporaryDirectory(prefix="reclaim-") if separate else None
        self._files: dict[Callable[[Any], Any], Path] = {}
        if separate:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([preload] if preload else [])
            self._executor = ProcessPoolExecutor(
                count, mp_context=context, initializer=_begin, initargs=(dict(os.environ),)
            )
        else:
            self._executor = ThreadPoolExecutor(count)

    def begin(self, function: Callable[[Any], Any], job: Any) -> Future[Any]:
        """Begin a job; TraceError where a process was killed."""
        if self._folder is not None and isinstance(function, partial):  # processes read it from a file, each once
            if function not in self._files:
                self._files[function] = Path(self._folder.name) / uuid4().hex
                self._files[function].write_bytes(pickle.dumps(function, pickle.HIGHEST_PROTOCOL))
            function, job = _run_kept, (self._files[function], job)
        with _named_loss():
            return self._executor.submit(function, job)

    def first_done(self, begun: list[Any]) -> Any:
        """Wait for a job to end."""
        return next(as_completed(begun))

    def result(self, begun: Any) -> Any:
        """Return a job's result; TraceError where its process was killed."""
        with _named_loss():
            return begun.result()

    def cancel(self, begun: list[Any]) -> None:
        """Give up jobs that wait."""
        for one in begun:
            one.cancel()

    def release(self, function: Callable[[Any], Any]) -> None:
        """Remove the function's file."""
        if function in self._files:
            self._files.pop(function).unlink()

    def close(self, *, cancel: bool) -> None:
        """Wait for what has begun."""
        self._executor.shutdown(wait=True, cancel_futures=cancel)
        if self._folder is not None:
            self._folder.cleanup()


class OnRay:
    """Tasks of a Ray cluster: of the one that ``RAY_ADDRESS`` names, else of one that begins on this machine.

    A task whose worker or node is lost is run again by Ray, on another one.
    """

    def __init__(self, count: int) -> None:
        self._ray = ray = connected_ray(count)
        self._run = ray.remote(max_retries=RETRIES)(_run)
        self._stored: dict[Callable[[Any], Any], Any] = {}

    def begin(self, function: Callable[[Any], Any], job: Any) -> Any:
        """Begin a job; the function is in Ray's object store, where workers map its arrays."""
        if function not in self._stored:
            self._stored[function] = self._ray.put(function)
        return self._run.remote(self._stored[function], job)

    def first_done(self, begun: list[Any]) -> Any:
        """Wait for a job to end."""
        return self._ray.wait(begun)[0][0]

    def result(self, begun: Any) -> Any:
        """Return a job's result; TraceError where its worker was lost more often than it is run again."""
        try:
            return self._ray.get(begun)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayError as error:
            raise TraceError(f"a Ray worker was lost ({error}); run again") from error

    def cancel(self, begun: list[Any]) -> None:
        """Wait for jobs, at most ``_AHEAD`` for each worker: they end as those of a pool of processes do.

        Ray's own ``cancel`` of a task that is just ending ends this process ("Tried to complete task that was not
        pending", seen with Ray 2.60).
        """
        if begun:
            self._ray.wait(begun, num_returns=len(begun), fetch_local=False)

    def release(self, function: Callable[[Any], Any]) -> None:
        """Let Ray drop the function from its store."""
        self._stored.pop(function, None)

    def close(self, *, cancel: bool) -> None:
        """Leave the cluster up: other stages of this process use it, and it ends with it."""


def connected_ray(count: int) -> Any:
    """Return Ray, connected to the cluster that ``RAY_ADDRESS`` names, else to one of ``count`` cores on this machine.

    The latter listens on its loopback interface alone. Neither reports its use to Ray's makers.

    Raises
    ------
    ConfigError
        Ray is not installed, or nothing listens at ``RAY_ADDRESS``.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--engine ray: Ray is not installed; pip install 'ray[train]'") from error
    if not ray.is_initialized():
        _check_listens(os.environ.get("RAY_ADDRESS", ""))
        here: dict[str, Any] = {"address": "local", "num_cpus": count, "include_dashboard": False}
        ray.init(log_to_driver=False, configure_logging=False, **({} if "RAY_ADDRESS" in os.environ else here))
    return ray


def _check_listens(address: str) -> None:
    """Raise ConfigError where nothing listens at the host and port of a cluster: Ray itself tries for minutes.

    ``auto``, ``local`` and others without a port are left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--engine ray: no cluster answers at RAY_ADDRESS={address} ({error}); start one with `ray start --head`, "
            "or unset the variable for one on this machine"
        ) from error


def _run(function: Callable[[Job], Result], job: Job) -> Result:
    """Run a job."""
    return function(job)


def _run_kept(job: tuple[Path, Any]) -> Any:
    """Run a job of a function in a file."""
    return _read(job[0])(job[1])


@lru_cache(1)
def _read(file: Path) -> Callable[[Any], Any]:
    """Return the function in a file, which is read once: no further jobs come for the function before it."""
    function: Callable[[Any], Any] = pickle.loads(file.read_bytes())
    return function


@contextmanager
def _named_loss() -> Iterator[None]:
    """Raise TraceError where a process of a pool was killed."""
    try:
        yield
    except BrokenProcessPool as error:
        raise TraceError("a worker was killed, most likely for its memory; run again with fewer --workers") from error


def _begin(environment: dict[str, str]) -> None:
    """Begin a process with the parent's current environment, as the server that forks it has an earlier one."""
    os.environ.update(environment)
    _die_with_parent()


def _die_with_parent() -> None:
    """End this process when its parent has ended: a worker of a killed run must not write while the next run does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
