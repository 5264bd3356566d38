"""Reads a task's own features off its record; compiled as a part of ``batch``."""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np

from reclaim.data.core.jit import LENT
from reclaim.data.schema import DAY_US, HOUR_US, RESOURCES, TIERS
from reclaim.features.fold.task_oom import add_to_trend, began_us, slope, write_oom
from reclaim.features.fold.task_record import (
    BIN_FIRST,
    BINS,
    FIRST_SAME_HOUR,
    HOURS,
    LONG,
    N_SIGNALS,
    RECENT_LENGTH,
    USAGE,
    WINDOW_US,
)
from reclaim.features.fold.task_update import hour_of, resource_of
from reclaim.features.registry import (
    AT,
    FIRST_RESOURCE,
    LARGEST,
    N_FEATURES,
    N_RESOURCE,
    N_STATISTICS,
    OF_RESOURCE,
    RECENT_WINDOWS,
    SAME_HOUR_DAYS,
    STATISTIC,
)

_EDGES: Final = np.array([2.0 ** (BIN_FIRST + b // 8) * (1 + b % 8 / 8) for b in range(BINS)])
_BEYOND: Final = np.array([0.01, 0.10])
_BEYOND_AT: Final = np.array([STATISTIC.p99_12h, STATISTIC.p90_12h])
_BEYOND_LONG: Final = np.array([0.02])
_BEYOND_LONG_AT: Final = np.array([OF_RESOURCE.p98_48h])
_BEYOND_USAGE: Final = np.array([0.01, 0.10, 0.50])
_BEYOND_USAGE_AT: Final = np.array([AT.usage_p99_12h, AT.usage_p90_12h, AT.usage_p50_12h])
"""Shares above percentiles, rising, and the positions of those percentiles."""
_SAME_HOUR_AT: Final = np.array([STATISTIC[f"same_hour_{days}d"] for days in SAME_HOUR_DAYS])
_TIER_AT: Final = np.array([AT[f"tier_{tier}"] for tier in TIERS])
_LOG_GAP: Final = math.log2(1.0 + WINDOW_US / 60e6)
_PER_HOUR: Final = 1.0 / HOUR_US
_HEAVIEST: Final = 64.0
"""``cpu_tail_weight`` is cut off here: beyond, the denominator is rounding."""
_LARGEST: Final = np.float32(LARGEST)
_WEEK_US: Final = 7 * DAY_US


@numba.njit(**LENT)
def _percentiles(
    s: Any,  # a record of STATE
    h: int,
    beyond: Any,  # (k,) float64, rising
    at: Any,  # (k,) int64
    scale: float,
    out: Any,  # (n, n_features) float32
    i: int,
    o: int,
) -> None:
    """Write percentiles of histogram ``h`` at ``o + at``.

    Each is the upper edge of the lowest bin beyond which no more than the share lies, by single-precision sums: where
    the share lies beyond an edge exactly, as in a task's first window, it may be that of the next bin that is filled.
    """
    total = s.total[h]
    n = len(beyond)
    if not total > 0.0:
        for k in range(n):
            out[i, o + at[k]] = math.nan
        return
    octave, b, above, above_octave = BINS // 8, 0, 0.0, 0.0
    for k in range(n):
        threshold = beyond[k] * total
        if above > threshold:  # the same bin also holds this one
            out[i, o + at[k]] = _EDGES[b] * scale
            continue
        while octave > 0 and not above_octave > threshold:
            octave -= 1
            b, above = 8 * octave + 8, above_octave
            above_octave += s.octave[octave, h]
        while b > 8 * octave and not above > threshold:
            b -= 1
            above += s.histogram[b, h]
        out[i, o + at[k]] = _EDGES[b] * scale


@numba.njit(forceinline=True, **LENT)
def write(
    s: Any,  # a record of STATE
    w: Any,  # FoldColumns, or records of the same fields
    row: int,
    largest: Any,  # (R,) float64
    monday_us: int,
    out: Any,  # (n, n_features) float32, written
    i: int,
) -> None:
    """Write a task's own features after the window of ``row`` into row ``i`` of ``out``, in the registry's order."""
    place = (s.count - 1) % RECENT_WINDOWS
    of_2h, of_1h, of_30m, hour_ago, covered, trend, slopes = _recent(s, place)
    for j in range(N_SIGNALS):
        then = float(s.recent[(place - hour_ago) % RECENT_WINDOWS, j])
        limit = w.limit[row, resource_of(j)]
        _statistics(s, j, limit, float(s.recent[place, j]), then, of_2h[j], of_1h[j], of_30m[j], out, i)
    for r in range(2):
        o = FIRST_RESOURCE + r * N_RESOURCE
        limit = w.limit[row, r]
        known = limit > 0.0
        scale = s.reference[r] / limit if known else math.nan
        _percentiles(s, LONG + r, _BEYOND_LONG, _BEYOND_LONG_AT, scale, out, i, o)
        out[i, o + OF_RESOURCE.limit] = (
            math.log2(np.float32(limit / largest[r])) if known and largest[r] > 0.0 else math.nan
        )
        out[i, o + OF_RESOURCE.limit_change] = 0.0
        if not known or not s.reference[r] > 0.0:
            out[i, o + OF_RESOURCE.limit_change] = math.nan
        elif limit != s.reference[r]:
            out[i, o + OF_RESOURCE.limit_change] = math.log2(limit / s.reference[r])
    _shape(s, w.limit[row, 0], out, i)
    _singles(
        s, w.limit[row, 1], covered, trend, w.tier[row], w.scheduling_class[row], w.in_alloc[row], monday_us, out, i
    )
    write_oom(s, w.limit[row, 1], slopes, out, i)
    for k in range(N_FEATURES):  # written even if unchanged, many at a time
        v = out[i, k]
        v = _LARGEST if v > _LARGEST else v
        out[i, k] = -_LARGEST if v < -_LARGEST else v


@numba.njit(forceinline=True, **LENT)
def _add_signal(sums: Any, v: float, centre: float) -> Any:
    """Add a value to (number, sum and sum of squares of the distances from the centre, largest); NaN adds nothing."""
    count, total, square, largest = sums
    known = v == v
    away = v - centre if known else 0.0
    return count + known, total + away, square + away * away, max(largest, v if known else -1.0)


@numba.njit(forceinline=True, **LENT)
def _recent(
    s: Any,  # a record of STATE
    place: int,
) -> Any:
    """Go once over the windows of two hours, from the last one, at ``place``, back.

    Returns
    -------
    of_2h, of_1h, of_30m : tuple of tuples
        Of each signal, as of ``_add_signal``, from its last value on.
    hour_ago : int
        Windows back to the one that ended nearest to an hour ago.
    covered : float
        Sum of the lengths, of a window's length and no more each.
    trend : tuple
        Of memory: number of values, and sums of hours, values, squares of hours and products.
    slopes : tuple of float
        Of memory within this run: of 30 minutes, or more where these have too few values, and of two hours.
    """
    cpu, memory, peak = float(s.recent[place, 0]), float(s.recent[place, 1]), float(s.recent[place, 2])
    cpu = cpu if cpu == cpu else 0.0  # centres: sums of small differences lose no digits
    memory = memory if memory == memory else 0.0
    peak = peak if peak == peak else 0.0
    none = (0, 0.0, 0.0, -1.0)
    of_cpu, of_memory, of_peak = none, none, none
    of_30m, of_1h = (none, none, none), (none, none, none)
    began, within_run, slope_30m = began_us(s), True, math.nan
    trend = (0, 0.0, 0.0, 0.0, 0.0)
    of_run = trend
    covered, hour_ago, nearest = 0.0, 0, 4 * HOUR_US
    k, n = 0, min(s.count, RECENT_WINDOWS)
    for part in range(3):
        reach_us = HOUR_US // 2 if part == 0 else HOUR_US if part == 1 else 2 * HOUR_US
        while k < n:
            end_us = s.recent_us[place]
            back_us = s.end_us - end_us
            if back_us >= reach_us:
                break
            if within_run and end_us <= began:
                within_run, of_run = False, trend
            if part > 0 and within_run and slope_30m != slope_30m:
                slope_30m = slope(trend)
            if abs(back_us - HOUR_US) <= nearest:
                nearest, hour_ago = abs(back_us - HOUR_US), k
            v = float(s.recent[place, 1])
            of_cpu = _add_signal(of_cpu, float(s.recent[place, 0]), cpu)
            of_memory = _add_signal(of_memory, v, memory)
            of_peak = _add_signal(of_peak, float(s.recent[place, 2]), peak)
            covered += min(s.recent[place, RECENT_LENGTH], 1.0)
            trend = add_to_trend(trend, -back_us * _PER_HOUR, v)
            place = place - 1 if place > 0 else RECENT_WINDOWS - 1
            k += 1
        if part == 0:
            of_30m = (of_cpu, of_memory, of_peak)
        elif part == 1:
            of_1h = (of_cpu, of_memory, of_peak)
    slope_2h = slope(trend if within_run else of_run)
    slopes = (slope_30m if slope_30m == slope_30m else slope_2h, slope_2h)
    return (of_cpu, of_memory, of_peak), of_1h, of_30m, hour_ago, covered, trend, slopes


@numba.njit(**LENT)
def _statistics(
    s: Any,  # a record of STATE
    j: int,
    limit: float,
    last: float,
    then: float,
    of_2h: Any,  # as of _add_signal
    of_1h: Any,
    of_30m: Any,
    out: Any,  # (n, n_features) float32, written
    i: int,
) -> None:
    """Write the statistics of one signal, given its last value, that of an hour ago, and the sums of recent ones."""
    scale = 1.0 / limit if limit > 0.0 else math.nan
    centre = last if last == last else 0.0
    count, total, square, largest = of_2h
    count_30m, total_30m, max_1h = of_30m[0], of_30m[1], of_1h[3]
    this_hour = float(s.hour_max[hour_of(s.end_us) % HOURS, j])
    max_6h, max_24h, max_7d = float(s.rest[j, 0]), float(s.rest[j, 1]), float(s.rest[j, 2])
    if not max_6h >= this_hour:
        max_6h = this_hour if this_hour == this_hour else max_6h
    if not max_24h >= this_hour:
        max_24h = this_hour if this_hour == this_hour else max_24h
    if not max_7d >= max_24h:
        max_7d = max_24h if max_24h == max_24h else max_7d
    if max_7d > s.max_ever[j]:  # by rounding
        max_7d = s.max_ever[j]
    o = j * N_STATISTICS
    out[i, o + STATISTIC.last] = last * scale
    out[i, o + STATISTIC.mean_30m] = (centre + total_30m / count_30m) * scale if count_30m else math.nan
    out[i, o + STATISTIC.mean_2h] = (centre + total / count) * scale if count else math.nan
    out[i, o + STATISTIC.std_2h] = (
        math.sqrt(max(square - total * total / count, 0.0) / count) * scale if count else math.nan
    )
    out[i, o + STATISTIC.max_1h] = max_1h * scale if max_1h >= 0.0 else math.nan
    out[i, o + STATISTIC.max_2h] = largest * scale if largest >= 0.0 else math.nan
    out[i, o + STATISTIC.max_6h] = max_6h * scale
    out[i, o + STATISTIC.max_24h] = max_24h * scale
    out[i, o + STATISTIC.max_7d] = max_7d * scale
    out[i, o + STATISTIC.max_ever] = s.max_ever[j] * scale
    out[i, o + STATISTIC.slow_max] = s.slow_max[j] * scale
    out[i, o + STATISTIC.ewm_1h] = s.mean_short[j] * scale if s.weight_short[j] > 0.0 else math.nan
    out[i, o + STATISTIC.ewm_12h] = s.mean_long[j] * scale if s.weight_long[j] > 0.0 else math.nan
    _percentiles(s, j, _BEYOND, _BEYOND_AT, s.reference[resource_of(j)] * scale, out, i, o)
    for k in range(len(SAME_HOUR_DAYS)):
        out[i, o + _SAME_HOUR_AT[k]] = s.rest[j, FIRST_SAME_HOUR + k] * scale
    out[i, o + STATISTIC.change_1h] = (last - then) * scale


@numba.njit(**LENT)
def _shape(
    s: Any,  # a record of STATE
    limit: float,
    out: Any,  # (n, n_features) float32, written
    i: int,
) -> None:
    """Write what the distribution of CPU says, of the last window and of half a day."""
    scale = 1.0 / limit if limit > 0.0 else math.nan
    last = s.recent[(s.count - 1) % RECENT_WINDOWS]
    p10, p50, p90, p99 = float(s.p10), float(s.p50), float(s.p90), float(s.p99)
    out[i, AT.cpu_mean] = s.cpu_mean * scale
    out[i, AT.cpu_p50] = p50 * scale
    out[i, AT.cpu_low] = (p50 - p10) * scale
    out[i, AT.cpu_spread] = (p90 - p50) * scale
    out[i, AT.cpu_tail] = (p99 - p90) * scale
    out[i, AT.cpu_top] = (last[2] - p99) * scale
    out[i, AT.cpu_tail_weight] = min((p99 - p50) / (p90 - p10), _HEAVIEST) if p90 > p10 else math.nan
    out[i, AT.cpu_over_limit] = s.over_limit
    out[i, AT.shape_known] = s.known
    _percentiles(s, USAGE, _BEYOND_USAGE, _BEYOND_USAGE_AT, s.reference[0] * scale, out, i, 0)


@numba.njit(**LENT)
def _singles(
    s: Any,  # a record of STATE
    limit: float,
    covered: float,
    trend: Any,  # of memory, within two hours
    tier: int,
    scheduling_class: int,
    in_alloc: bool,
    monday_us: int,
    out: Any,  # (n, n_features) float32, written
    i: int,
) -> None:
    """Write the features that are not a statistic of a signal."""
    scale = 1.0 / limit if limit > 0.0 else math.nan
    last, hour = s.recent[(s.count - 1) % RECENT_WINDOWS], hour_of(s.end_us)
    least = math.nan
    for back in range(1, 7):
        v = s.hour_max[(hour - back) % HOURS, 1]
        if v == v and not least <= v:
            least = v
    age_h = max(s.end_us - began_us(s), 0) / HOUR_US
    time_us = (s.end_us - monday_us) % _WEEK_US
    day = np.float32(2.0 * math.pi * (time_us % DAY_US) / DAY_US)
    out[i, AT.memory_mean] = s.memory_mean * scale
    out[i, AT.memory_growth_6h] = (last[1] - least) * scale
    out[i, AT.memory_slope_2h] = slope(trend) * scale
    out[i, AT.page_cache] = s.page_cache * scale
    out[i, AT.page_cache_share] = s.page_cache / s.memory_mean if s.memory_mean > 0.0 else math.nan
    out[i, AT.cpi] = s.cpi
    out[i, AT.cpi_change] = s.cpi / s.cpi_mean if s.cpi_weight > 0.0 and s.cpi_mean > 0.0 else math.nan
    out[i, AT.mai] = s.mai
    out[i, AT.age] = math.log2(np.float32(1.0 + age_h))
    out[i, AT.seen] = math.log2(np.float32(1.0 + s.count))
    out[i, AT.restarts] = math.log2(1.0 + s.restarts) if s.restarts > 0 else 0.0
    out[i, AT.gap] = math.log2(1.0 + s.gap_us / 60e6) if s.gap_us != WINDOW_US else _LOG_GAP
    out[i, AT.coverage_2h] = min(covered / RECENT_WINDOWS, 1.0)
    out[i, AT.length] = last[RECENT_LENGTH]
    out[i, AT.hour_sin] = math.sin(day)
    out[i, AT.hour_cos] = math.cos(day)
    out[i, AT.day] = time_us / _WEEK_US
    out[i, AT.in_alloc] = 1.0 if in_alloc else 0.0
    out[i, AT.scheduling_class] = scheduling_class / 3.0 if scheduling_class >= 0 else math.nan
    for k in range(len(TIERS)):
        out[i, _TIER_AT[k]] = 1.0 if tier == k else 0.0


assert len(RESOURCES) == 2  # the fold writes by position
