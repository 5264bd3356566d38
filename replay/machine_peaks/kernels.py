"""Compiled folds over samples for the predictors of machine peaks.

Samples are in order of (task, snapshot), and ``age`` counts the snapshots in a row that have seen the task: the last
``age[i]`` samples up to ``i`` are its history.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from reclaim.data.core.jit import CACHED


@numba.njit(**CACHED)
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


@numba.njit(**CACHED)
def _add(values: Any, total: Any) -> None:
    for k in range(len(values)):  # forward through both, and apart, so that it is compiled to vector instructions
        total[k] += values[k]


@numba.njit(**CACHED)
def moments(
    ratio: Any,  # (T, history) float64
    counts: Any,  # (T,) int64
    means: Any,  # (T,) float64, written
    deviations: Any,  # (T,) float64, written
) -> None:
    """Write mean and sample deviation of the last ``counts`` of each row; rows of none stay as they are."""
    for t in range(len(counts)):
        if counts[t]:  # a warm task has two samples at least
            values = ratio[t, ratio.shape[1] - counts[t] :]
            means[t] = values.sum() / counts[t]
            square = 0.0
            for value in values:
                square += (value - means[t]) ** 2
            deviations[t] = np.sqrt(square / (counts[t] - 1))


@numba.njit(**CACHED)
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


@numba.njit(**CACHED)
def _interpolated(ascending: Any, n: int, percentile: float) -> float:
    position = percentile / 100 * (n - 1)
    low = int(position)
    high = min(low + 1, n - 1)
    value: float = ascending[low] + (ascending[high] - ascending[low]) * (position - low)
    return value


@numba.njit(**CACHED)
def _insert(ascending: Any, n: int, value: float) -> None:
    """Insert a value among the first ``n``, which are in order."""
    k = n
    while k > 0 and ascending[k - 1] > value:
        ascending[k] = ascending[k - 1]
        k -= 1
    ascending[k] = value


@numba.njit(**CACHED)
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
        _insert(room, n, value[i])
        n += 1
        out[i] = _interpolated(room, n, percentile)


@numba.njit(**CACHED)
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


@numba.njit(**CACHED)
def needs_by_window(
    age: Any,  # (n,) int64
    window: Any,  # (n,) int64, of the day, from 0
    day: Any,  # (n,) int64
    value: Any,  # (n,) float64
    guaranteed: float,  # 0 to 100
    oversubscribed: float,  # 0 to 100
    room: Any,  # (n_windows + 1, at least max(age)) float64, changed
    out: Any,  # (n_ahead + 1, n) float64, written
) -> None:
    """Write the need of each task in its window of the day and in each of the next ones.

    It is the oversubscribed percentile of the task's values in the window, and at least the guaranteed one of any
    window. A window that the task was not seen in on an earlier day has the percentiles of all the task's values.
    ``room`` keeps the values of each window in order, and in its last row all, as long as there is such a window.
    """
    n_windows = len(room) - 1
    counts = np.zeros(n_windows + 1, np.int64)
    first_day = np.zeros(n_windows, np.int64)
    floor, ceiling = np.zeros(n_windows + 1), np.zeros(n_windows + 1)
    source = np.zeros(n_windows, np.int64)
    for i in range(len(age)):
        if age[i] == 1:
            counts[:] = 0
        for w in range(n_windows):
            source[w] = w if counts[w] and first_day[w] < day[i] else n_windows
        if counts[window[i]] == 0:
            first_day[window[i]] = day[i]
        for w in (window[i], n_windows):
            if w < n_windows or source.max() == n_windows:
                _insert(room[w], counts[w], value[i])
                counts[w] += 1
                floor[w] = _interpolated(room[w], counts[w], guaranteed)
                ceiling[w] = _interpolated(room[w], counts[w], oversubscribed)
        least = 0.0
        for w in range(n_windows):
            least = max(least, floor[source[w]])
        for k in range(len(out)):
            out[k, i] = max(least, ceiling[source[(window[i] + k) % n_windows]])
