"""How a task's own features are read off its record; compiled as a part of ``state``."""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np

from reclaim.data.schema import RESOURCES, TIERS
from reclaim.features.record import (
    AT_CPI,
    AT_CPU_MEAN,
    AT_CPU_P10,
    AT_CPU_P50,
    AT_CPU_P99,
    AT_LENGTH,
    AT_MAI,
    AT_MEMORY_MEAN,
    AT_PAGE_CACHE,
    BIN_FIRST,
    BINS,
    HOUR_US,
    HOURS,
    LONG,
    N_SIGNALS,
    USAGE,
)
from reclaim.features.registry import (
    CONTEXT_WINDOWS,
    FIRST_KIN,
    FIRST_RESOURCE,
    FIRST_SHAPE,
    FIRST_SINGLE,
    N_RESOURCE,
    N_STATISTICS,
)
from reclaim.features.taking import resource_of

_EDGES: Final = np.array([2.0 ** (BIN_FIRST + b // 8) * (1 + b % 8 / 8) for b in range(BINS)])
_HEAVIEST: Final = 64.0
"""``cpu_tail_weight`` is cut off here: beyond, the denominator is rounding."""
DAY_US: Final = 24 * HOUR_US
WEEK_US: Final = 7 * DAY_US


@numba.njit(cache=True, nogil=True)
def _percentile(s: Any, h: int, beyond: float) -> float:
    """Return the upper edge of the highest bin such that it and those above hold more than the share ``beyond``."""
    total = s.total[h]
    if not total > 0.0:
        return math.nan
    threshold = beyond * total
    above = 0.0
    for b in range(BINS - 1, 0, -1):
        above += s.histogram[h, b]
        if above > threshold:
            return float(_EDGES[b])
    return float(_EDGES[0])


@numba.njit(cache=True, nogil=True)
def write(
    s: Any, limit: Any, tier: int, scheduling_class: int, in_alloc: bool, largest: Any, monday_us: int, out: Any
) -> None:
    """Write a task's own features, in the registry's order."""
    for j in range(N_SIGNALS):
        _statistics(s, j, limit[resource_of(j)], out)
    for r in range(2):
        o = FIRST_RESOURCE + r * N_RESOURCE
        known = limit[r] > 0.0
        out[o] = _percentile(s, LONG + r, 0.02) * s.reference[r] / limit[r] if known else math.nan
        out[o + 1] = math.log2(limit[r] / largest[r]) if known and largest[r] > 0.0 else math.nan
        out[o + 2] = 0.0
        if not known:
            out[o + 2] = math.nan
        elif limit[r] != s.reference[r]:
            out[o + 2] = math.log2(limit[r] / s.reference[r])
    _shape(s, limit[0], out)
    _singles(s, limit[1], tier, scheduling_class, in_alloc, monday_us, out)


@numba.njit(cache=True, nogil=True)
def _statistics(s: Any, j: int, limit: float, out: Any) -> None:
    """Write the statistics of one signal."""
    scale = 1.0 / limit if limit > 0.0 else math.nan
    n = min(s.count, CONTEXT_WINDOWS)
    end_us = s.end_us
    count_30m, sum_30m, count_2h, sum_2h = 0, 0.0, 0, 0.0
    max_1h, max_2h = -1.0, -1.0
    hour_ago, nearest = math.nan, 4_000_000_000
    for k in range(n):
        v = float(s.context[k, j])
        back_us = end_us - s.recent_us[k]
        if v != v or back_us >= 2 * HOUR_US:
            continue
        count_2h += 1
        sum_2h += v
        max_2h = max(max_2h, v)
        if back_us < HOUR_US:
            max_1h = max(max_1h, v)
            if back_us < HOUR_US // 2:
                count_30m += 1
                sum_30m += v
        away = abs(back_us - HOUR_US)
        if away < nearest:
            nearest = away
            hour_ago = v
    mean_2h = sum_2h / count_2h if count_2h else math.nan
    square = 0.0
    for k in range(n):
        v = float(s.context[k, j])
        if v == v and end_us - s.recent_us[k] < 2 * HOUR_US:
            square += (v - mean_2h) ** 2
    last = float(s.context[(s.count - 1) % CONTEXT_WINDOWS, j])
    this_hour = float(s.hour_max[((end_us - 1) // HOUR_US + 1) % HOURS, j])
    max_6h, max_24h = float(s.rest[j, 0]), float(s.rest[j, 1])
    if not max_6h >= this_hour:
        max_6h = this_hour if this_hour == this_hour else max_6h
    if not max_24h >= this_hour:
        max_24h = this_hour if this_hour == this_hour else max_24h
    bin_scale = s.reference[resource_of(j)] * scale
    o = j * N_STATISTICS
    out[o] = last * scale
    out[o + 1] = sum_30m / count_30m * scale if count_30m else math.nan
    out[o + 2] = mean_2h * scale
    out[o + 3] = math.sqrt(square / count_2h) * scale if count_2h else math.nan
    out[o + 4] = max_1h * scale if max_1h >= 0.0 else math.nan
    out[o + 5] = max_2h * scale if max_2h >= 0.0 else math.nan
    out[o + 6] = max_6h * scale
    out[o + 7] = max_24h * scale
    out[o + 8] = s.max_ever[j] * scale
    out[o + 9] = s.slow_max[j] * scale
    out[o + 10] = s.mean_short[j] * scale if s.weight_short[j] > 0.0 else math.nan
    out[o + 11] = s.mean_long[j] * scale if s.weight_long[j] > 0.0 else math.nan
    out[o + 12] = _percentile(s, j, 0.10) * bin_scale
    out[o + 13] = _percentile(s, j, 0.01) * bin_scale
    out[o + 14] = s.rest[j, 2] * scale
    out[o + 15] = (last - hour_ago) * scale


@numba.njit(cache=True, nogil=True)
def _shape(s: Any, limit: float, out: Any) -> None:
    """Write what the distribution of CPU says, of the last window and of half a day."""
    scale = 1.0 / limit if limit > 0.0 else math.nan
    kept = s.context[(s.count - 1) % CONTEXT_WINDOWS]
    p10, p50, p90, p99 = float(kept[AT_CPU_P10]), float(kept[AT_CPU_P50]), float(s.p90), float(kept[AT_CPU_P99])
    o = FIRST_SHAPE
    out[o] = kept[AT_CPU_MEAN] * scale
    out[o + 1] = p50 * scale
    out[o + 2] = (p50 - p10) * scale
    out[o + 3] = (p90 - p50) * scale
    out[o + 4] = (p99 - p90) * scale
    out[o + 5] = (kept[2] - p99) * scale
    out[o + 6] = min((p99 - p50) / (p90 - p10), _HEAVIEST) if p90 > p10 else math.nan
    out[o + 7] = s.over_limit
    out[o + 8] = s.known
    bin_scale = s.reference[0] * scale
    out[o + 9] = _percentile(s, USAGE, 0.50) * bin_scale
    out[o + 10] = _percentile(s, USAGE, 0.10) * bin_scale
    out[o + 11] = _percentile(s, USAGE, 0.01) * bin_scale


@numba.njit(cache=True, nogil=True)
def _singles(s: Any, limit: float, tier: int, scheduling_class: int, in_alloc: bool, monday_us: int, out: Any) -> None:
    """Write the features that are no statistic of a signal."""
    scale = 1.0 / limit if limit > 0.0 else math.nan
    kept = s.context[(s.count - 1) % CONTEXT_WINDOWS]
    hour = (s.end_us - 1) // HOUR_US + 1
    least = math.nan
    for back in range(1, 7):
        b = (hour - back) % HOURS
        v = s.hour_max[b, 1]
        if s.hour[b] == hour - back and v == v and not least <= v:
            least = v
    n, count, covered, sum_x, sum_y, sum_xx, sum_xy = min(s.count, CONTEXT_WINDOWS), 0, 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(n):
        back_us = s.end_us - s.recent_us[k]
        if back_us >= 2 * HOUR_US:
            continue
        covered += min(s.context[k, AT_LENGTH], 1.0)
        v = float(s.context[k, 1])
        if v != v:
            continue
        hours = -back_us / HOUR_US
        count += 1
        sum_x += hours
        sum_y += v
        sum_xx += hours * hours
        sum_xy += hours * v
    around = count * sum_xx - sum_x * sum_x
    began_us = s.run_us if s.run_us >= 0 else s.first_us
    age_h = max(s.end_us - began_us, 0) / HOUR_US
    time_us = (s.end_us - monday_us) % WEEK_US
    day = 2.0 * math.pi * (time_us % DAY_US) / DAY_US
    o = FIRST_SINGLE
    out[o] = kept[AT_MEMORY_MEAN] * scale
    out[o + 1] = (kept[1] - least) * scale
    out[o + 2] = (count * sum_xy - sum_x * sum_y) / around * scale if count > 1 and around > 0.0 else math.nan
    out[o + 3] = kept[AT_PAGE_CACHE] * scale
    out[o + 4] = kept[AT_PAGE_CACHE] / kept[AT_MEMORY_MEAN] if kept[AT_MEMORY_MEAN] > 0.0 else math.nan
    out[o + 5] = kept[AT_CPI]
    out[o + 6] = kept[AT_CPI] / s.cpi_mean if s.cpi_weight > 0.0 and s.cpi_mean > 0.0 else math.nan
    out[o + 7] = kept[AT_MAI]
    out[o + 8] = math.log2(1.0 + age_h)
    out[o + 9] = math.log2(1.0 + s.count)
    out[o + 10] = math.log2(1.0 + s.restarts)
    out[o + 11] = math.log2(1.0 + s.gap_us / 60e6)
    out[o + 12] = min(covered / CONTEXT_WINDOWS, 1.0)
    out[o + 13] = kept[AT_LENGTH]
    out[o + 14] = math.sin(day)
    out[o + 15] = math.cos(day)
    out[o + 16] = time_us / WEEK_US
    out[o + 17] = 1.0 if in_alloc else 0.0
    out[o + 18] = scheduling_class / 3.0 if scheduling_class >= 0 else math.nan
    for k in range(len(TIERS)):
        out[o + 19 + k] = 1.0 if tier == k else 0.0


assert len(RESOURCES) == 2  # the fold writes by position
assert FIRST_SINGLE + 19 + len(TIERS) == FIRST_KIN
