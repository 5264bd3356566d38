"""One bounded record per task, from which every feature follows: one fold for whole histories and single windows."""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import (
    CPI,
    CPU_MEAN,
    CPU_P50,
    CPU_P90,
    MAI,
    MEMORY_MEAN,
    PAGE_CACHE,
    Windows,
    demand,
    peak_cpu,
)
from reclaim.features.registry import FEATURES, FIRST_SINGLE, N_STATISTICS, SIGNALS

RECENT: Final = 24
"""Windows kept one by one: 2 hours of 5-minute windows."""
HOURS: Final = 26
"""Clock hours of which the maximum is kept: a day, and the hours around the same time yesterday."""
BINS: Final = 64
"""Bins of the decayed histogram, each 9 % wider than the one before."""
_BIN_FIRST: Final = 0.01
"""Upper edge of the first bin, over the first limit seen. 64 bins of 9 % reach 2.3 times the limit."""
_BIN_GROWTH: Final = 1.09

_N: Final = len(SIGNALS)
_HOUR_US: Final = 3_600_000_000
_DAY_US: Final = 24 * _HOUR_US
_WEEK_US: Final = 7 * _DAY_US
_WINDOW_US: Final = 300_000_000
_HALF_LIFE_SHORT_US: Final = float(_HOUR_US)
_HALF_LIFE_LONG_US: Final = 12.0 * _HOUR_US

STATE: Final = np.dtype(
    [
        ("recent", "f4", (RECENT, _N)),  # ring of values, in the unit of the limit
        ("recent_us", "i8", RECENT),  # their window ends
        ("hour_max", "f4", (HOURS, _N)),  # ring of maxima by clock hour
        ("hour", "i8", HOURS),  # which clock hour each holds, plus one; 0 is none
        ("histogram", "f4", (_N, BINS)),  # decayed weights by value over reference
        ("reference", "f8", _N),  # the first limit seen: what the bins are relative to
        ("weight_short", "f8", _N),
        ("mean_short", "f8", _N),
        ("weight_long", "f8", _N),
        ("mean_long", "f8", _N),
        ("slow_max", "f8", _N),
        ("max_ever", "f8", _N),
        ("count", "i8"),
        ("first_us", "i8"),
        ("end_us", "i8"),
    ]
)
"""The record. Usage is kept in the trace's unit and divided by the limit in force when a feature is asked for, so a
changed limit changes the features and not the history. Its size is ``STATE.itemsize`` bytes."""


class FeatureState:
    """The features of any number of tasks, kept up to date window by window."""

    def __init__(self) -> None:
        self._state = np.zeros(0, STATE)

    def advance(self, slot: NDArray[np.int64], windows: Windows) -> NDArray[np.float32]:
        """Take windows and return the features right after each; float32, shape (n, n_features).

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row, from 0.
        windows : Windows
            Those of one task in time order. One that ends no later than the last one seen is late or repeated: it
            changes nothing, and its row is that of the state as it stands.
        """
        need = int(slot.max()) + 1 if len(slot) else 0
        if need > len(self._state):
            grown = np.zeros(max(need, 2 * len(self._state)), STATE)
            grown[: len(self._state)] = self._state
            self._state = grown
        out = np.empty((len(windows), len(FEATURES)), np.float32)
        signals = np.column_stack([demand(windows), peak_cpu(windows)])
        _advance(
            self._state, slot, windows.start_us, windows.end_us, windows.scheduled_us, signals, windows.usage,
            windows.limit, windows.tier, windows.scheduling_class, windows.in_alloc, out,
        )  # fmt: skip
        return out


@numba.njit(cache=True, nogil=True)
def _advance(
    state: Any, slot: Any, start_us: Any, end_us: Any, scheduled_us: Any, signals: Any, usage: Any, limit: Any,
    tier: Any, scheduling_class: Any, in_alloc: Any, out: Any,
) -> None:  # fmt: skip
    for i in range(len(slot)):
        s = state[slot[i]]
        gap_us = end_us[i] - s.end_us if s.count > 0 else 0
        if s.count == 0 or gap_us > 0:
            _take(s, start_us[i], end_us[i], gap_us, signals[i], limit[i])
        else:
            gap_us = 0
        _statistics(s, limit[i], out[i])
        _singles(
            s, gap_us, start_us[i], scheduled_us[i], signals[i], usage[i], limit[i], tier[i], scheduling_class[i],
            in_alloc[i], out[i],
        )  # fmt: skip


@numba.njit(cache=True, nogil=True, inline="always")
def _resource(signal: int) -> int:
    """Return the resource whose limit a signal is over: the peak of CPU belongs to CPU."""
    return signal if signal < 2 else 0


@numba.njit(cache=True, nogil=True)
def _take(s: Any, start_us: int, end_us: int, gap_us: int, value: Any, limit: Any) -> None:
    """Let one window into the record."""
    if s.count == 0:
        s.first_us = start_us
        for j in range(_N):
            s.max_ever[j] = np.nan
            s.slow_max[j] = np.nan
            s.reference[j] = limit[_resource(j)]
    ring = s.count % RECENT
    s.recent_us[ring] = end_us
    hour = (end_us - 1) // _HOUR_US + 1
    block = hour % HOURS
    if s.hour[block] != hour:
        s.hour[block] = hour
        for j in range(_N):
            s.hour_max[block, j] = np.nan
    keep_short = 0.5 ** (gap_us / _HALF_LIFE_SHORT_US)
    keep_long = 0.5 ** (gap_us / _HALF_LIFE_LONG_US)
    length = min((end_us - start_us) / _WINDOW_US, 1.0)
    for j in range(_N):
        v = value[j]
        s.recent[ring, j] = v
        s.weight_short[j] *= keep_short
        s.weight_long[j] *= keep_long
        for b in range(BINS):
            s.histogram[j, b] *= keep_long
        if math.isnan(v):
            continue
        if math.isnan(s.hour_max[block, j]) or v > s.hour_max[block, j]:
            s.hour_max[block, j] = v
        s.weight_short[j] += length
        s.mean_short[j] += (v - s.mean_short[j]) * length / s.weight_short[j]
        s.weight_long[j] += length
        s.mean_long[j] += (v - s.mean_long[j]) * length / s.weight_long[j]
        if math.isnan(s.max_ever[j]) or v > s.max_ever[j]:
            s.max_ever[j] = v
        if math.isnan(s.slow_max[j]) or v > s.slow_max[j]:
            s.slow_max[j] = v
        else:
            s.slow_max[j] = v + (s.slow_max[j] - v) * keep_long
        if not s.reference[j] > 0.0 and limit[_resource(j)] > 0.0:
            s.reference[j] = limit[_resource(j)]
        if s.reference[j] > 0.0:
            s.histogram[j, _bin(v / s.reference[j])] += length
    s.end_us = end_us
    s.count += 1


@numba.njit(cache=True, nogil=True)
def _bin(ratio: float) -> int:
    if ratio <= _BIN_FIRST:
        return 0
    return min(math.ceil(math.log(ratio / _BIN_FIRST) / math.log(_BIN_GROWTH)), BINS - 1)


@numba.njit(cache=True, nogil=True)
def _percentile(histogram: Any, share: float) -> float:
    """Return the upper edge of the bin in which the share of the weight is reached."""
    total = 0.0
    for b in range(BINS):
        total += histogram[b]
    if not total > 0.0:
        return math.nan
    below = 0.0
    for b in range(BINS):
        below += histogram[b]
        if below >= share * total:
            return float(_BIN_FIRST * _BIN_GROWTH**b)
    return float(_BIN_FIRST * _BIN_GROWTH ** (BINS - 1))


@numba.njit(cache=True, nogil=True)
def _statistics(s: Any, limit: Any, out: Any) -> None:
    """Write the statistics of every signal, in the registry's order."""
    n = min(s.count, RECENT)
    last = (s.count - 1) % RECENT
    hour = (s.end_us - 1) // _HOUR_US + 1
    for j in range(_N):
        scale = limit[_resource(j)]
        scale = 1.0 / scale if scale > 0.0 else math.nan
        count_30m, sum_30m, count_2h, sum_2h = 0, 0.0, 0, 0.0
        max_1h, max_2h = math.nan, math.nan
        hour_ago, nearest = math.nan, 4_000_000_000
        for k in range(n):
            v = s.recent[k, j]
            back_us = s.end_us - s.recent_us[k]
            if math.isnan(v) or back_us >= 2 * _HOUR_US:
                continue
            count_2h += 1
            sum_2h += v
            if math.isnan(max_2h) or v > max_2h:
                max_2h = v
            if back_us < _HOUR_US and (math.isnan(max_1h) or v > max_1h):
                max_1h = v
            if back_us < _HOUR_US // 2:
                count_30m += 1
                sum_30m += v
            if abs(back_us - _HOUR_US) < nearest:
                nearest = abs(back_us - _HOUR_US)
                hour_ago = v
        mean_2h = sum_2h / count_2h if count_2h else math.nan
        square = 0.0
        for k in range(n):
            v = s.recent[k, j]
            if not math.isnan(v) and s.end_us - s.recent_us[k] < 2 * _HOUR_US:
                square += (v - mean_2h) ** 2
        max_6h, max_24h, yesterday = math.nan, math.nan, math.nan
        for b in range(HOURS):
            v = s.hour_max[b, j]
            back = hour - s.hour[b]
            if s.hour[b] == 0 or back < 0 or math.isnan(v):
                continue
            if back < 6 and (math.isnan(max_6h) or v > max_6h):
                max_6h = v
            if back < 24 and (math.isnan(max_24h) or v > max_24h):
                max_24h = v
            if 22 <= back <= 24 and (math.isnan(yesterday) or v > yesterday):
                yesterday = v
        bin_scale = s.reference[j] * scale
        o = j * N_STATISTICS
        out[o] = s.recent[last, j] * scale
        out[o + 1] = sum_30m / count_30m * scale if count_30m else math.nan
        out[o + 2] = mean_2h * scale
        out[o + 3] = math.sqrt(square / count_2h) * scale if count_2h else math.nan
        out[o + 4] = max_1h * scale
        out[o + 5] = max_2h * scale
        out[o + 6] = max_6h * scale
        out[o + 7] = max_24h * scale
        out[o + 8] = s.max_ever[j] * scale
        out[o + 9] = s.slow_max[j] * scale
        out[o + 10] = s.mean_short[j] * scale if s.weight_short[j] > 0.0 else math.nan
        out[o + 11] = s.mean_long[j] * scale if s.weight_long[j] > 0.0 else math.nan
        out[o + 12] = _percentile(s.histogram[j], 0.90) * bin_scale
        out[o + 13] = _percentile(s.histogram[j], 0.99) * bin_scale
        out[o + 14] = yesterday * scale
        out[o + 15] = (s.recent[last, j] - hour_ago) * scale


@numba.njit(cache=True, nogil=True)
def _singles(
    s: Any, gap_us: int, start_us: int, scheduled_us: int, value: Any, usage: Any, limit: Any, tier: int,
    scheduling_class: int, in_alloc: bool, out: Any,
) -> None:  # fmt: skip
    """Write the features that are no statistic of a signal, in the registry's order."""
    cpu = 1.0 / limit[0] if limit[0] > 0.0 else math.nan
    memory = 1.0 / limit[1] if limit[1] > 0.0 else math.nan
    hour = (s.end_us - 1) // _HOUR_US + 1
    least = math.nan
    for b in range(HOURS):
        v = s.hour_max[b, 1]
        if s.hour[b] > 0 and 0 < hour - s.hour[b] <= 6 and (math.isnan(least) or v < least):
            least = v
    began_us = scheduled_us if scheduled_us >= 0 else s.first_us
    age_h = max(s.end_us - began_us, 0) / _HOUR_US
    day = 2.0 * math.pi * (s.end_us % _DAY_US) / _DAY_US
    o = FIRST_SINGLE
    out[o] = usage[CPU_MEAN] * cpu
    out[o + 1] = (usage[CPU_P90] - usage[CPU_P50]) * cpu
    out[o + 2] = (value[2] - usage[CPU_P90]) * cpu
    out[o + 3] = usage[MEMORY_MEAN] * memory
    out[o + 4] = (value[1] - least) * memory
    out[o + 5] = usage[PAGE_CACHE] * memory
    out[o + 6] = usage[CPI]
    out[o + 7] = usage[MAI]
    out[o + 8] = math.log2(1.0 + age_h)
    out[o + 9] = math.log2(1.0 + s.count)
    out[o + 10] = math.log2(1.0 + gap_us / 60e6)
    out[o + 11] = (s.end_us - start_us) / _WINDOW_US
    out[o + 12] = math.sin(day)
    out[o + 13] = math.cos(day)
    out[o + 14] = (s.end_us % _WEEK_US) / _WEEK_US
    out[o + 15] = 1.0 if in_alloc else 0.0
    out[o + 16] = scheduling_class / 3.0 if scheduling_class >= 0 else math.nan
    for k in range(5):
        out[o + 17 + k] = 1.0 if tier == k else 0.0


assert len(RESOURCES) == 2  # the fold writes by position
assert len(FEATURES) == FIRST_SINGLE + 22
