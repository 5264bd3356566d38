"""Compiled folds over samples for the predictors of machine peaks.

Samples are in order of (task, snapshot), and ``age`` counts the snapshots in a row that have seen the task: the last
``age[i]`` samples up to ``i`` are its history.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from reclaim.features.targets import future_max


@numba.njit(cache=True, nogil=True)
def add_histories(
    snapshot: Any,  # (n,) int64
    age: Any,  # (n,) int64
    warm: Any,  # (n,) bool
    usage: Any,  # (n,) float64
    limit: Any,  # (n,) float64
    total_usage: Any,  # (T, history) float64, added to
    total_limit: Any,  # (T, history) float64, added to
    counts: Any,  # (T,) int64, written
) -> None:
    """Add the samples of each warm task, oldest first, to its snapshot's sums, (T, history), the newest at the end.

    ``counts``, (T,), becomes the length of the longest history among them.
    """
    for i in range(len(snapshot)):
        if warm[i]:
            t, n = snapshot[i], min(age[i], total_usage.shape[1])
            counts[t] = max(counts[t], n)
            _add(usage[i - n + 1 : i + 1], total_usage[t, total_usage.shape[1] - n :])
            _add(limit[i - n + 1 : i + 1], total_limit[t, total_limit.shape[1] - n :])


@numba.njit(cache=True, nogil=True)
def _add(values: Any, total: Any) -> None:
    for k in range(len(values)):  # forward through both, and apart, so that it is compiled to vector instructions
        total[k] += values[k]


@numba.njit(cache=True, nogil=True)
def mean_and_sigmas(
    ratio: Any,  # (T, history) float64
    counts: Any,  # (T,) int64
    n: float,
    out: Any,  # (T,) float64, written
) -> None:
    """Write mean plus ``n`` sample deviations of the last ``counts`` of each row; rows of none stay as they are."""
    for t in range(len(counts)):
        if counts[t]:  # a warm task has two samples at least
            values = ratio[t, ratio.shape[1] - counts[t] :]
            mean = values.sum() / counts[t]
            square = 0.0
            for value in values:
                square += (value - mean) ** 2
            out[t] = mean + n * np.sqrt(square / (counts[t] - 1))


@numba.njit(cache=True, nogil=True)
def percentiles(
    ratio: Any,  # (T, history) float64
    counts: Any,  # (T,) int64
    percentile: float,  # 0 to 100
    out: Any,  # (T,) float64, written
) -> None:
    """Write a percentile of the last ``counts`` of each row; rows of none stay as they are."""
    for t in range(len(counts)):
        if counts[t]:
            values = ratio[t, ratio.shape[1] - counts[t] :]
            position = percentile / 100 * (counts[t] - 1)
            low = int(position)
            if low == counts[t] - 1:
                out[t] = values.max()
            else:
                parted = np.partition(values, low)
                out[t] = parted[low] + (parted[low + 1 :].min() - parted[low]) * (position - low)


@numba.njit(cache=True, nogil=True)
def _interpolated(ascending: Any, n: int, percentile: float) -> float:
    position = percentile / 100 * (n - 1)
    low = int(position)
    high = min(low + 1, n - 1)
    value: float = ascending[low] + (ascending[high] - ascending[low]) * (position - low)
    return value


@numba.njit(cache=True, nogil=True)
def moving_percentiles(
    age: Any,  # (n,) int64
    value: Any,  # (n,) float64
    percentile: float,  # 0 to 100
    room: Any,  # (history,) float64, changed
    out: Any,  # (n,) float64, written
) -> None:
    """Write a percentile of each task's last samples, as many as ``room`` holds, which keeps them in order."""
    n = 0
    for i in range(len(age)):
        if age[i] == 1:
            n = 0
        if n == len(room):
            gone = np.searchsorted(room, value[i - n])
            n -= 1
            for k in range(gone, n):
                room[k] = room[k + 1]
        k = n
        while k > 0 and room[k - 1] > value[i]:
            room[k] = room[k - 1]
            k -= 1
        room[k] = value[i]
        n += 1
        out[i] = _interpolated(room, n, percentile)


@numba.njit(cache=True, nogil=True)
def so_far(
    age: Any,  # (n,) int64
    value: Any,  # (n,) float64, changed
    mean: bool,
) -> None:
    """Turn each value into the mean, or else the maximum, of its task's values so far."""
    total = 0.0
    for i in range(len(age)):
        total = value[i] if age[i] == 1 else total + value[i] if mean else max(total, value[i])
        value[i] = total / age[i] if mean else total


@numba.njit(cache=True, nogil=True)
def future_peaks(
    times_us: Any,  # (T,) int64
    starts: Any,  # (T + 1,) int64, of each snapshot in by_snapshot
    by_snapshot: Any,  # (n,) int64, samples in order of snapshots
    task: Any,  # (n,) int64
    snapshot: Any,  # (n,) int64
    usage: Any,  # (n,) float64
    limit: Any,  # (n,) float64
    horizon_us: int,
    total: Any,  # (T,) float64, changed
    queue: Any,  # (T,) int64, changed
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
        future_max(first, stop, end, times_us, times_us, total, horizon_us + 1, queue, largest)
        for t in range(first, stop):
            if times_us[t] + horizon_us > times_us[-1]:
                peak[t] = np.nan
            elif not np.isnan(largest[t]):
                peak[t] = largest[t]
        first = stop


@numba.njit(cache=True, nogil=True)
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
