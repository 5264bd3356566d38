"""Usage windows as arrays: the form in which every room after ingest sees a task's measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema
from reclaim.data.core.arrays import is_first
from reclaim.data.schema import PERCENTILES, RESOURCES, TAIL_PERCENTILES, UNKNOWN_ID

CHANNELS: Final = (
    schema.CPU_MEAN,
    schema.CPU_MAX,
    schema.MEMORY_MEAN,
    schema.MEMORY_MAX,
    schema.PAGE_CACHE,
    schema.CPI,
    schema.MAI,
)
"""The measurement axis of ``Windows.usage``; the resource ones in the unit of the limit."""

CPU_MEAN, CPU_MAX, MEMORY_MEAN, MEMORY_MAX, PAGE_CACHE, CPI, MAI = range(len(CHANNELS))
FAR_ABOVE: Final = 2.0
"""Multiple of the limit from which on mean usage and limit seem to be in different units: a task may exceed its limit
by less."""

LEVELS: Final = tuple(sorted((*PERCENTILES, *TAIL_PERCENTILES)))
"""The level axis of ``Windows.percentiles``, in percent: 0, 10 … 90, 91, 92 … 99, 100."""

P0, P10, P50, P90, P99, P100 = (LEVELS.index(level) for level in (0, 10, 50, 90, 99, 100))

VECTORS: Final = {
    schema.CPU_PERCENTILES: [LEVELS.index(level) for level in PERCENTILES],
    schema.CPU_TAIL_PERCENTILES: [LEVELS.index(level) for level in TAIL_PERCENTILES],
}
"""The percentile vectors of the schema, and the places of their values among ``LEVELS``."""


_DEMAND: Final = "_demand"
"""Attribute of windows that have their demand (``with_demand``); ``replace`` leaves it out."""


class Column(NamedTuple):
    """Type of a column of ``Windows``, its value where it is unknown, and the names along its second axis, if any."""

    dtype: Any
    unknown: float
    axis: tuple[str, ...] = ()


def _column(dtype: Any, unknown: float, axis: tuple[str, ...] = ()) -> Mapping[str, Column]:
    return {"column": Column(np.dtype(dtype), unknown, axis)}


@dataclass(frozen=True)
class Cell:
    """Facts of the cell that the tasks run in.

    Attributes
    ----------
    largest_machine : tuple of float, in the order ``schema.RESOURCES``
        The most that one machine supplies, in the unit of the limits; NaN unknown.
    monday_us : int, µs on the trace's clock
        A midnight that begins a Monday, in the cell's own zone.
    """

    largest_machine: tuple[float, float] = (math.nan, math.nan)
    monday_us: int = 0


@dataclass(frozen=True)
class Windows:
    """``n`` measurement windows of any number of tasks; rows of one task stand in time order.

    Columns are defined only here: everything that makes, copies, keeps or writes windows uses ``COLUMNS``.

    Attributes
    ----------
    collection_id, instance_index : int64, shape (n,)
        The task.
    start_us, end_us : int64, shape (n,), µs on the trace's clock
        The measurement window; what it says is known from ``end_us`` on.
    scheduled_us : int64, shape (n,), µs
        Start of the task's current run; 0 before the trace, -1 unknown.
    machine_id : int64, shape (n,)
        -1 unknown.
    user, name : int64, shape (n,)
        Who submitted the collection, and the logical name that its runs share, as ``identities``; -1 unknown.
    usage : float64, shape (n, len(CHANNELS))
        NaN where the trace has nothing.
    percentiles : float32, shape (n, len(LEVELS)), or (n, 1) of ``with_p90_alone``: the 90th
        CPU usage at each of ``LEVELS``, in the unit of the limit; NaN unknown. The tail may be unknown alone.
    limit : float64, shape (n, n_resources)
        What was granted when the window began, or, for a task (re)started in it, by its end; NaN unknown.
    tier, scheduling_class : int8, shape (n,)
        -1 unknown.
    in_alloc : bool, shape (n,)
        Whether the task runs inside an alloc instance.
    failed_us : int64, shape (n,), µs
        The last failure of a run of the task of which it is recorded whether it was out of memory; -1 none.
    failed_oom : bool, shape (n,)
        Whether that one was.
    """

    collection_id: NDArray[np.int64] = field(metadata=_column("i8", 0))
    instance_index: NDArray[np.int64] = field(metadata=_column("i8", 0))
    start_us: NDArray[np.int64] = field(metadata=_column("i8", 0))
    end_us: NDArray[np.int64] = field(metadata=_column("i8", 0))
    scheduled_us: NDArray[np.int64] = field(metadata=_column("i8", UNKNOWN_ID))
    machine_id: NDArray[np.int64] = field(metadata=_column("i8", UNKNOWN_ID))
    user: NDArray[np.int64] = field(metadata=_column("i8", UNKNOWN_ID))
    name: NDArray[np.int64] = field(metadata=_column("i8", UNKNOWN_ID))
    usage: NDArray[np.float64] = field(metadata=_column("f8", math.nan, CHANNELS))
    percentiles: NDArray[np.float32] = field(metadata=_column("f4", math.nan, tuple(f"p{level}" for level in LEVELS)))
    limit: NDArray[np.float64] = field(metadata=_column("f8", math.nan, RESOURCES))
    tier: NDArray[np.int8] = field(metadata=_column("i1", UNKNOWN_ID))
    scheduling_class: NDArray[np.int8] = field(metadata=_column("i1", UNKNOWN_ID))
    in_alloc: NDArray[np.bool_] = field(metadata=_column("?", False))
    failed_us: NDArray[np.int64] = field(metadata=_column("i8", UNKNOWN_ID))
    failed_oom: NDArray[np.bool_] = field(metadata=_column("?", False))

    def __len__(self) -> int:
        return len(self.end_us)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Windows:
        """Return the chosen rows, in the order given."""
        made = Windows(**{name: getattr(self, name)[rows] for name in COLUMNS})
        if _DEMAND in vars(self):
            vars(made)[_DEMAND] = vars(self)[_DEMAND][rows]
        return made

    def task_starts(self) -> NDArray[np.int64]:
        """Return the first row of each run of equal task ids, and ``n``; shape (n_tasks + 1,).

        Assumes the rows of a task stand together, as ``store`` and ``sort_windows`` leave them, and that ids do not
        change after this call.
        """
        return self._task_starts

    @cached_property  # called ten times for a bucket
    def _task_starts(self) -> NDArray[np.int64]:
        return np.append(np.flatnonzero(is_first(self.collection_id, self.instance_index)), len(self))

    def task_numbers(self) -> NDArray[np.int64]:
        """Return for each row the position of its task, 0 for the first; shape (n,). Same assumption."""
        starts = self.task_starts()
        return np.repeat(np.arange(len(starts) - 1, dtype=np.int64), np.diff(starts))

    def tasks_of(self, rows: NDArray[np.int64]) -> tuple[Windows, NDArray[np.int64]]:
        """Return all rows of the tasks that have some of the given ones, and the places of these among them.

        ``rows`` rise. Same assumption.
        """
        starts = self.task_starts()
        asked = np.unique(np.searchsorted(starts, rows, side="right") - 1)
        if len(asked) == len(starts) - 1:
            return self, rows
        length = starts[asked + 1] - starts[asked]
        of_tasks = np.arange(length.sum()) + np.repeat(starts[asked] - np.cumsum(length) + length, length)
        return self.take(of_tasks), np.searchsorted(of_tasks, rows)


COLUMNS: Final[Mapping[str, Column]] = {f.name: f.metadata["column"] for f in fields(Windows)}
"""Every column of ``Windows`` by name, in its order."""


def concatenate(parts: list[Windows]) -> Windows:
    """Return the rows of all parts, in the order given."""
    return Windows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in COLUMNS})


def sort_windows(windows: Windows) -> Windows:
    """Return the rows sorted by task, then start, then end."""
    order = np.lexsort((windows.end_us, windows.start_us, windows.instance_index, windows.collection_id))
    return windows.take(order)


def empty_windows(n: int = 0) -> Windows:
    """Return ``n`` rows of unknown values; for callers that fill in what they have."""
    return Windows(
        **{name: np.full((n, len(c.axis)) if c.axis else n, c.unknown, c.dtype) for name, c in COLUMNS.items()}
    )


def unwritten_windows(n: int) -> Windows:
    """Return ``n`` uninitialised rows; for callers that write every column."""
    return Windows(**{name: np.empty((n, len(c.axis)) if c.axis else n, c.dtype) for name, c in COLUMNS.items()})


def identities(strings: Iterable[str | None]) -> NDArray[np.int64]:
    """Return a number for each string, never negative, the same on every machine and in every run; -1 for None.

    The first 63 bits of BLAKE2b: among a million strings two share a number with a probability below 1e-6.
    """
    known: dict[str, int] = {}
    out = []
    for string in strings:
        if string is None:
            out.append(UNKNOWN_ID)
            continue
        if string not in known:
            digest = blake2b(string.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            known[string] = int.from_bytes(digest, "little") >> 1
        out.append(known[string])
    return np.array(out, np.int64)


def drop_zero_maxima(usage: NDArray[np.float64]) -> None:
    """Make unknown each maximum of 0 whose mean is above 0, as it is no measurement; usage (n, n_channels), changed.

    With it as the demand, a reservation would fall far below what is used.
    """
    for mean, most in ((CPU_MEAN, CPU_MAX), (MEMORY_MEAN, MEMORY_MAX)):
        usage[(usage[:, most] == 0.0) & (usage[:, mean] > 0.0), most] = np.nan


def far_above_limit(windows: Windows) -> NDArray[np.bool_]:
    """Return which mean usages are above ``FAR_ABOVE`` limits, shape (n, n_resources); false where unknown."""
    above: NDArray[np.bool_] = windows.usage[:, (CPU_MEAN, MEMORY_MEAN)] > FAR_ABOVE * windows.limit
    return above


def what_is_judged(windows: Windows) -> Windows:
    """Return the same rows with only the measurements that a replay needs: two fifths of the bytes.

    Left are, of ``CHANNELS``, the four of CPU and memory, and the 90th percentile: ``demand`` and ``peak_cpu`` answer
    as before.
    """
    return replace(with_p90_alone(windows), usage=np.ascontiguousarray(windows.usage[:, : MEMORY_MAX + 1]))


def with_p90_alone(windows: Windows) -> Windows:
    """Return the same rows without the other percentiles: ``demand`` and ``peak_cpu`` answer as before."""
    made = replace(windows, percentiles=np.ascontiguousarray(_p90(windows)[:, None]))
    if _DEMAND in vars(windows):
        vars(made)[_DEMAND] = vars(windows)[_DEMAND]
    return made


def with_demand(windows: Windows) -> Windows:
    """Return the same rows, whose ``demand`` is computed here, once, as is that of rows taken from them.

    No column is to be changed from then on.
    """
    made = replace(windows)
    vars(made)[_DEMAND] = demand(windows)
    return made


def _p90(windows: Windows) -> NDArray[np.float32]:
    return windows.percentiles[:, P90 if windows.percentiles.shape[1] == len(LEVELS) else 0]


def demand(windows: Windows) -> NDArray[np.float64]:
    """Return what a reservation had to cover in each window; shape (n, n_resources), NaN where unknown.

    CPU is compressible, so it is the 90th percentile within the window, capped at the limit (EuroSys'21, "Take it to
    the Limit"); memory is not, so it is the largest usage. Where a source has no percentiles or no maximum, the mean
    stands in: then the number is a lower bound, and reports say so.
    """
    known: NDArray[np.float64] | None = vars(windows).get(_DEMAND)
    if known is not None:
        return known
    u = windows.usage
    cpu = capped(known_or(_p90(windows), u[:, CPU_MEAN], np.where), windows.limit[:, 0], np.where)
    return np.stack([cpu, known_or(u[:, MEMORY_MAX], u[:, MEMORY_MEAN], np.where)], axis=1)


def known_or(best: Any, mean: Any, where: Any) -> Any:
    """Return the mean where the best measurement is NaN.

    Both are arrays, and ``where`` is ``np.where``, or numbers of a kernel, and it chooses one of them.
    """
    return where(best == best, best, mean)


def capped(usage: Any, limit: Any, where: Any) -> Any:
    """Return usage up to its limit, or all of it where that is unknown; arguments as for ``known_or``."""
    return where(usage > limit, limit, usage)


def measured_by_mean(windows: Windows) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return in which windows ``demand`` rests on the mean, and in which on any measurement; (n, n_resources)."""
    u = windows.usage
    best = ~np.isnan(np.stack([_p90(windows), u[:, MEMORY_MAX]], axis=1))
    mean = ~np.isnan(u[:, [CPU_MEAN, MEMORY_MEAN]])
    return ~best & mean, best | mean


def peak_cpu(windows: Windows) -> NDArray[np.float64]:
    """Return the largest CPU usage in each window, not capped; the mean where the source has no maximum; shape (n,)."""
    peak: NDArray[np.float64] = known_or(windows.usage[:, CPU_MAX], windows.usage[:, CPU_MEAN], np.where)
    return peak
