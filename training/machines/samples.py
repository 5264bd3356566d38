"""Lays the tasks of a machine out by time, and finds the peak that they reached together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED
from reclaim.features.targets import future_max

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TaskSamples:
    """Samples of the tasks of one machine, one resource: ``n`` samples in ``T`` snapshots.

    A **snapshot** is all that the machine ran at one time.

    Attributes
    ----------
    times_us : int64, shape (T,)
        Times of the snapshots, ascending.
    task, snapshot : int64, shape (n,)
        Of each sample, in order of (task, snapshot): a task's history stands together.
    usage, limit : float64, shape (n,)
    capped : float64, shape (n,)
        The usage, at most the limit.
    age : int64, shape (n,)
        Snapshots in a row that have seen the task, this one among them.
    """

    times_us: Ids
    task: Ids
    snapshot: Ids
    usage: Floats
    limit: Floats
    capped: Floats
    age: Ids

    @classmethod
    def lay_out(cls, time_us: Ids, task: Ids, usage: Floats, limit: Floats) -> Self:
        """Lay out samples, shape (n,) each.

        They are in order of (task, time), no pair of which is there twice; usage and limit are finite, not negative.
        """
        times_us, snapshot = np.unique(time_us, return_inverse=True)
        here = np.arange(len(task))
        goes_on = np.zeros(len(task), np.bool_)
        goes_on[1:] = (task[1:] == task[:-1]) & (snapshot[1:] == snapshot[:-1] + 1)
        age = here - np.maximum.accumulate(np.where(goes_on, 0, here)) + 1
        return cls(times_us, task, snapshot.astype(np.int64), usage, limit, np.minimum(usage, limit), age)

    def total(self, of_samples: Floats) -> Floats:
        """Sum over the tasks of each snapshot; shape (n,) to (T,)."""
        return np.bincount(self.snapshot, weights=of_samples, minlength=len(self.times_us)).astype(np.float64)

    def peak_within(self, horizon_s: int) -> Floats:
        """Return the largest usage within a horizon of the tasks of each snapshot, each up to its limit now; (T,).

        Tasks that come later do not count. The sum of the limits where the machine has no snapshot within the horizon;
        NaN where its samples end within it.
        """
        n_snapshots = len(self.times_us)
        by_snapshot = np.argsort(self.snapshot, kind="stable")
        starts = np.searchsorted(self.snapshot[by_snapshot], np.arange(n_snapshots + 1))
        peak = self.total(self.limit)
        _future_peaks(
            self.times_us, starts, by_snapshot, self.task, self.snapshot, self.usage, self.limit,
            horizon_s * 1_000_000, np.empty(n_snapshots), np.empty(n_snapshots), np.empty(n_snapshots), peak,
        )  # fmt: skip
        return peak


@numba.njit(**CACHED)
def _future_peaks(
    times_us: Any,  # (T,) int64
    starts: Any,  # (T + 1,) int64, of each snapshot in by_snapshot
    by_snapshot: Any,  # (n,) int64, samples in order of snapshots
    task: Any,  # (n,) int64
    snapshot: Any,  # (n,) int64
    usage: Any,  # (n,) float64
    limit: Any,  # (n,) float64
    horizon_us: int,
    total: Any,  # (T,) float64, changed
    rest: Any,  # (T,) float64, changed
    largest: Any,  # (T,) float64, changed
    peak: Any,  # (T,) float64, written
) -> None:
    """Write each snapshot's clairvoyant peak, NaN where undefined; left as it is where no snapshot follows in time.

    As long as the same tasks stay at the same limits, the usage to come is one series, summed once, and the peak its
    moving maximum: near to linear where tasks live long, samples times horizon at worst.
    """
    n_snapshots = len(times_us)
    first = 0
    while first < n_snapshots:
        stop = first + 1
        while stop < n_snapshots and _goes_on(starts, by_snapshot, task, limit, stop):
            stop += 1
        end = np.searchsorted(times_us, times_us[stop - 1] + horizon_us, side="right")
        total[first:end] = 0.0
        for i in by_snapshot[starts[first] : starts[first + 1]]:
            later = i + 1
            while later < len(task) and task[later] == task[i] and snapshot[later] < end:
                total[snapshot[later]] += min(usage[later], limit[i])
                later += 1
        future_max(first, stop, end, times_us, times_us, total, horizon_us + 1, rest, largest)
        for t in range(first, stop):
            if times_us[t] + horizon_us > times_us[-1]:
                peak[t] = np.nan
            elif not np.isnan(largest[t]):
                peak[t] = largest[t]
        first = stop


@numba.njit(**CACHED)
def _goes_on(starts: Any, by_snapshot: Any, task: Any, limit: Any, t: int) -> bool:
    """Say whether snapshot ``t`` has the tasks and limits of the one before."""
    before, now, n = starts[t - 1], starts[t], starts[t + 1] - starts[t]
    if starts[t] - starts[t - 1] != n:
        return False
    for k in range(n):
        i, j = by_snapshot[before + k], by_snapshot[now + k]
        if task[i] != task[j] or limit[i] != limit[j]:
            return False
    return True
