"""Usage windows as arrays: the form in which every room after ingest sees a task's measurements."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema
from reclaim.data.schema import RESOURCES, UNKNOWN_ID

CHANNELS: Final = (
    schema.CPU_MEAN,
    schema.CPU_MAX,
    "cpu_p50",
    "cpu_p90",
    "cpu_p99",
    schema.MEMORY_MEAN,
    schema.MEMORY_MAX,
    schema.PAGE_CACHE,
    schema.CPI,
    schema.MAI,
)
"""The measurement axis of ``Windows.usage``; the resource ones in the unit of the limit. The percentiles are taken
from the two percentile vectors of the window."""

CPU_MEAN, CPU_MAX, CPU_P50, CPU_P90, CPU_P99, MEMORY_MEAN, MEMORY_MAX, PAGE_CACHE, CPI, MAI = range(len(CHANNELS))


@dataclass(frozen=True)
class Windows:
    """``n`` measurement windows of any number of tasks; rows of one task stand in time order.

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
    usage : float64, shape (n, len(CHANNELS))
        NaN where the trace has nothing.
    limit : float64, shape (n, n_resources)
        What was granted when the window began, or, for a task (re)started in it, by its end; NaN unknown.
    tier, scheduling_class : int8, shape (n,)
        -1 unknown.
    in_alloc : bool, shape (n,)
        Whether the task runs inside an alloc instance.
    """

    collection_id: NDArray[np.int64]
    instance_index: NDArray[np.int64]
    start_us: NDArray[np.int64]
    end_us: NDArray[np.int64]
    scheduled_us: NDArray[np.int64]
    machine_id: NDArray[np.int64]
    usage: NDArray[np.float64]
    limit: NDArray[np.float64]
    tier: NDArray[np.int8]
    scheduling_class: NDArray[np.int8]
    in_alloc: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.end_us)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Windows:
        """Return the chosen rows, in the order given."""
        return Windows(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def task_starts(self) -> NDArray[np.int64]:
        """Return the first row of each run of equal task ids, and ``n``; shape (n_tasks + 1,).

        Assumes the rows of a task stand together, as ``store`` and ``sort_windows`` leave them.
        """
        n = len(self)
        if n == 0:
            return np.zeros(1, np.int64)
        change = (np.diff(self.collection_id) != 0) | (np.diff(self.instance_index) != 0)
        return np.concatenate([[0], np.flatnonzero(change) + 1, [n]]).astype(np.int64)

    def task_numbers(self) -> NDArray[np.int64]:
        """Return for each row the position of its task, 0 for the first; shape (n,). Same assumption."""
        starts = self.task_starts()
        return np.repeat(np.arange(len(starts) - 1, dtype=np.int64), np.diff(starts))


def concatenate(parts: list[Windows]) -> Windows:
    """Return the rows of all parts, in the order given."""
    return Windows(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Windows)})


def sort_windows(windows: Windows) -> Windows:
    """Return the rows sorted by task, then start, then end."""
    order = np.lexsort((windows.end_us, windows.start_us, windows.instance_index, windows.collection_id))
    return windows.take(order)


def empty_windows(n: int = 0) -> Windows:
    """Return ``n`` rows in which nothing is known; for callers that fill in what they have."""
    return Windows(
        collection_id=np.zeros(n, np.int64),
        instance_index=np.zeros(n, np.int64),
        start_us=np.zeros(n, np.int64),
        end_us=np.zeros(n, np.int64),
        scheduled_us=np.full(n, UNKNOWN_ID, np.int64),
        machine_id=np.full(n, UNKNOWN_ID, np.int64),
        usage=np.full((n, len(CHANNELS)), np.nan),
        limit=np.full((n, len(RESOURCES)), np.nan),
        tier=np.full(n, UNKNOWN_ID, np.int8),
        scheduling_class=np.full(n, UNKNOWN_ID, np.int8),
        in_alloc=np.zeros(n, np.bool_),
    )


def demand(windows: Windows) -> NDArray[np.float64]:
    """Return what a reservation had to cover in each window; shape (n, n_resources), NaN where unknown.

    CPU is compressible, so it is the 90th percentile within the window, capped at the limit (EuroSys'21, "Take it to
    the Limit"); memory is not, so it is the largest usage. Where a source has no percentiles or no maximum, the mean
    stands in: then the number is a lower bound, and reports say so.
    """
    u = windows.usage
    cpu = np.where(np.isnan(u[:, CPU_P90]), u[:, CPU_MEAN], u[:, CPU_P90])
    cpu = np.where(cpu > windows.limit[:, 0], windows.limit[:, 0], cpu)
    memory = np.where(np.isnan(u[:, MEMORY_MAX]), u[:, MEMORY_MEAN], u[:, MEMORY_MAX])
    return np.stack([cpu, memory], axis=1)


def measured_by_mean(windows: Windows) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return in which windows ``demand`` had only the mean to go by, and in which it had anything; (n, n_resources)."""
    u = windows.usage
    best, mean = u[:, [CPU_P90, MEMORY_MAX]], u[:, [CPU_MEAN, MEMORY_MEAN]]
    return np.isnan(best) & ~np.isnan(mean), ~np.isnan(best) | ~np.isnan(mean)


def peak_cpu(windows: Windows) -> NDArray[np.float64]:
    """Return the largest CPU usage in each window, not capped; the mean where the source has no maximum; shape (n,)."""
    u = windows.usage
    return np.where(np.isnan(u[:, CPU_MAX]), u[:, CPU_MEAN], u[:, CPU_MAX])
