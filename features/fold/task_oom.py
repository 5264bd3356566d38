"""Keeps a task's out-of-memory ends and how fast its memory nears the limit; compiled as a part of ``batch``."""

from __future__ import annotations

import math
from typing import Any, Final

import numba

from reclaim.data.core.jit import LENT
from reclaim.data.oom import near_limit
from reclaim.data.schema import HOUR_US
from reclaim.features.fold.task_record import HOURS
from reclaim.features.registry import AT, RECENT_WINDOWS

NOT_TAKEN: Final = -2
LIVES: Final = -1
"""Values that are not an age at which a run ended: the window changed nothing; it revealed no end out of memory."""
_MEMORY: Final = 1
"""Position of memory among the signals and the resources."""
_PER_HOUR: Final = 1.0 / HOUR_US
_LEAST_LEFT: Final = 0.005
"""Least share of the limit that counts as left, so that a rate stays finite."""
_FASTEST: Final = 64.0
"""Rates are cut off here: the limit is reached within a minute."""
_near_limit: Final = numba.njit(inline="always")(near_limit)


@numba.njit(**LENT)
def end_run(
    s: Any,  # a record of STATE, changed
    failed_us: int,
    failed_oom: bool,
    end_us: int,
) -> None:
    """Judge the run before a window of a later run, which ends at ``end_us``, then forget it.

    Where a failure since it began is recorded as out of memory or as not, that decides. Else it ended out of memory
    where its last window came near the limit as in ``data.oom``, unless it had lived above the limit before, which then
    does not bind it.
    """
    said = s.run_us < failed_us <= end_us
    if s.run_us >= 0 and (failed_oom if said else s.near and s.above <= 1):
        s.oom_age_us = max(s.end_us - s.run_us, 0)
        s.oom_least_us = s.oom_age_us if s.ooms == 0 else min(s.oom_least_us, s.oom_age_us)
        s.oom_us = s.end_us
        s.oom_limit = s.memory_limit
        s.ooms += 1
    s.above = 0
    s.run_max = 0.0
    s.run_n = s.run_x = s.run_y = s.run_xx = s.run_xy = 0.0


@numba.njit(**LENT)
def add_memory(
    s: Any,  # a record of STATE, changed
    memory: float,
    limit: float,
) -> None:
    """Add the memory of the window that the record ends with."""
    s.near = limit > 0.0 and _near_limit(memory, limit)
    s.memory_limit = limit
    if memory != memory:
        return
    s.above += memory > limit
    s.run_max = max(s.run_max, memory)
    x = (s.end_us - began_us(s)) * _PER_HOUR
    s.run_n += 1.0
    s.run_x += x
    s.run_y += memory
    s.run_xx += x * x
    s.run_xy += x * memory


@numba.njit(inline="always", **LENT)
def began_us(
    s: Any,  # a record of STATE
) -> int:
    """Return when the current run began, or, where that is unknown, when the task was first seen."""
    return int(s.run_us if s.run_us >= 0 else s.first_us)


@numba.njit(**LENT)
def write_oom(
    s: Any,  # a record of STATE
    limit: float,
    slopes: Any,  # of memory within this run: of 30 minutes and of two hours
    out: Any,  # (n, n_features) float32, written
    i: int,
) -> None:
    """Write the features of memory against its limit and of out-of-memory ends, those of the collection as of none."""
    slope_30m, slope_2h = slopes
    last, began = float(s.recent[(s.count - 1) % RECENT_WINDOWS, _MEMORY]), began_us(s)
    n, x, y, xx, xy = 0, 0.0, 0.0, 0.0, 0.0
    hour = (s.end_us - 1) // HOUR_US
    whole = min(hour - (began + HOUR_US - 1) // HOUR_US, 5)  # earlier clock hours that lie within the run
    for back in range(whole + 1):
        v = float(s.hour_max[(hour - back) % HOURS, _MEMORY])
        if v == v:
            n += 1
            x -= back
            y += v
            xx += back * back
            xy -= back * v
    slope_6h = slope((n, x, y, xx, xy))
    per_limit = 1.0 / limit if limit > 0.0 else math.nan
    per_left = 1.0 / max(limit - last, _LEAST_LEFT * limit) if limit > 0.0 else math.nan
    slope_6h = slope_6h if slope_6h == slope_6h else slope_2h
    out[i, AT.memory_rate_30m] = _rate(slope_30m, per_left)
    out[i, AT.memory_rate_2h] = _rate(slope_2h, per_left)
    out[i, AT.memory_rate_6h] = _rate(slope_6h, per_left)
    out[i, AT.memory_rate_run] = _rate(slope((s.run_n, s.run_x, s.run_y, s.run_xx, s.run_xy)), per_left)
    out[i, AT.memory_run_max] = s.run_max * per_limit if s.run_n > 0.0 else math.nan
    out[i, AT.memory_over_mean] = last / s.memory_mean if s.memory_mean > 0.0 else math.nan
    out[i, AT.memory_above] = math.log2(1.0 + s.above) if s.above > 0 else 0.0
    out[i, AT.ooms] = 0.0
    out[i, AT.oom_since] = out[i, AT.oom_age] = out[i, AT.oom_age_least] = out[i, AT.oom_limit] = math.nan
    if s.ooms > 0:
        out[i, AT.ooms] = math.log2(1.0 + s.ooms)
        out[i, AT.oom_since] = math.log2(1.0 + (s.end_us - s.oom_us) * _PER_HOUR)
        out[i, AT.oom_age] = out[i, AT.age] - math.log2(1.0 + s.oom_age_us * _PER_HOUR)
        out[i, AT.oom_age_least] = out[i, AT.age] - math.log2(1.0 + s.oom_least_us * _PER_HOUR)
        out[i, AT.oom_limit] = math.log2(limit / s.oom_limit) if limit > 0.0 and s.oom_limit > 0.0 else math.nan
    write_no_history(out, i)


@numba.njit(inline="always", **LENT)
def write_no_history(
    out: Any,  # (n, n_features) float32, written
    i: int,
) -> None:
    """Write the features of a collection that met no end out of memory."""
    out[i, AT.collection_ooms] = 0.0
    out[i, AT.collection_oom_since] = out[i, AT.collection_oom_rate] = math.nan
    out[i, AT.collection_oom_age] = out[i, AT.collection_oom_age_least] = math.nan


@numba.njit(forceinline=True, **LENT)
def add_to_trend(sums: Any, x: float, y: float) -> Any:
    """Add a point to (number, sums of x, y, squares of x and products); one whose y is NaN adds nothing."""
    if y != y:
        return sums
    n, of_x, of_y, of_xx, of_xy = sums
    return n + 1, of_x + x, of_y + y, of_xx + x * x, of_xy + x * y


@numba.njit(forceinline=True, **LENT)
def slope(sums: Any) -> float:
    """Return the slope of the line nearest to points, of which these are the sums; NaN for fewer than two."""
    n, x, y, xx, xy = sums
    around = n * xx - x * x
    return (n * xy - x * y) / around if n > 1 and around > 0.0 else math.nan


@numba.njit(inline="always", **LENT)
def _rate(slope: float, per_left: float) -> float:
    return min(max(slope * per_left, -_FASTEST), _FASTEST) if slope == slope and per_left == per_left else math.nan
