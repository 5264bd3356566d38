"""Finds buckets of histograms, compiled: that of a value, and that of a percentile in the cumulative sum."""

from __future__ import annotations

from typing import Any

import numba

from reclaim.data.core.jit import LENT


@numba.njit(**LENT, inline="always")
def bucket_of(
    value: float,
    start: Any,  # (n_buckets,) rising
) -> int:
    """Return the last bucket that begins at or below a value; -1 where none does, or the value is NaN.

    All buckets are compared, many at a time: for a hundred of them that is sooner than a search.
    """
    at = -1
    for k in range(len(start)):
        at += value >= start[k]
    return at


@numba.njit(**LENT, inline="always")
def percentile_at(
    weight: Any,  # (n_tasks, n_buckets)
    task: int,
    at: int,
    below: Any,
    reached: float,
) -> tuple[int, Any]:
    """Return the first bucket of a task at which the sum of weights reaches a given one, and the sum before it.

    The search begins at a bucket ``at`` and the sum ``below`` it: the next percentile is a few steps from the last one.
    """
    while at > 0 and below >= reached:
        at -= 1
        below -= weight[task, at]
    while at < weight.shape[1] - 1 and below + weight[task, at] < reached:
        below += weight[task, at]
        at += 1
    return at, below
