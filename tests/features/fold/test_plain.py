"""Every feature of a task of random histories, next to its formula computed from all windows at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.schema import DAY_US, HOUR_US, TIERS
from reclaim.data.windows import CHANNELS, LEVELS, P10, P50, P90, P99, P100, Cell, Windows, demand, peak_cpu
from reclaim.features.fold.batch import FeatureState
from reclaim.features.registry import FEATURE_NAMES, LARGEST, RECENT_WINDOWS, SIGNALS

History = Callable[..., Windows]
Floats = NDArray[np.float64]
CELL = Cell((4.0, 8.0), -30 * HOUR_US)
CHANNEL = {name: CHANNELS.index(name) for name in CHANNELS}
EDGES = np.array([2.0 ** (-7 + b // 8) * (1 + b % 8 / 8) for b in range(64)])
ELSEWHERE = ("same_hour", "max_7d", "collection_")
"""Parts of names of features that have such a test of their own."""


@dataclass
class Past:
    """Windows of a task that count at a row, in time order, and the limits of the row.

    ``reference`` are the first limits known; a value counts in a percentile over time from then on, ``from_row``.
    """

    windows: Windows
    signals: Floats
    limit: Floats

    def __post_init__(self) -> None:
        w = self.windows
        self.now_us = int(w.end_us[-1])
        self.length = (w.end_us - w.start_us) / 300e6
        self.weight = np.minimum(self.length, 1.0)
        self.hour = (w.end_us - 1) // HOUR_US
        known = w.limit > 0
        self.from_row = np.where(known.any(axis=0), known.argmax(axis=0), len(w))
        self.reference = np.array([w.limit[k, r] if k < len(w) else math.nan for r, k in enumerate(self.from_row)])

    def faded(self, hours: float) -> Floats:
        """Return the weights of windows, which halve in so many hours."""
        return self.weight * 0.5 ** ((self.now_us - self.windows.end_us) / (hours * HOUR_US))

    def recent(self, hours: float) -> NDArray[np.int64]:
        """Return the recent windows that ended within so many hours."""
        rows = np.arange(max(len(self.windows) - RECENT_WINDOWS, 0), len(self.windows))
        return rows[self.now_us - self.windows.end_us[rows] < hours * HOUR_US]

    def hourly(self, j: int) -> dict[int, float]:
        """Return the largest of a signal by clock hours back."""
        of: dict[int, float] = {}
        for hour, v in zip((self.hour[-1] - self.hour).tolist(), self.signals[:, j].tolist(), strict=True):
            if v == v:
                of[hour] = max(v, of.get(hour, v))
        return of


def mean_of(values: Floats, weight: Floats) -> float:
    known = ~np.isnan(values)
    return float((values[known] * weight[known]).sum() / weight[known].sum()) if known.any() else math.nan


def slope_of(x: Any, y: Any) -> float:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    x, y = x[~np.isnan(y)], y[~np.isnan(y)]
    return float(np.polyfit(x - x[0], y, 1)[0]) if len(np.unique(x)) > 1 else math.nan


def largest_of(values: Any) -> float:
    known = [v for v in values if v == v]
    return max(known, default=math.nan)


def percentile_of(values: Floats, weight: Floats, beyond: float) -> tuple[float, float]:
    """Return the upper edge of the lowest step beyond which no more than a share lies; two where it is a close call."""
    counted = ~np.isnan(values)
    if not counted.any():
        return math.nan, math.nan
    step = np.minimum(np.searchsorted(EDGES, values[counted].astype(np.float32)), len(EDGES) - 1)
    sums = np.bincount(step, weight[counted], len(EDGES))
    above = sums.sum() - np.cumsum(sums)
    low, high = (float(EDGES[np.argmax(above <= beyond * sums.sum() * (1 + e))]) for e in (1e-4, -1e-4))
    return low, high


def shape_of(w: Windows, i: int) -> tuple[Floats, float]:
    """Return the CPU of a window at every level, and how much of it was measured."""
    of, mean = w.percentiles[i].astype(np.float64), w.usage[i, CHANNEL["cpu_mean"]]
    known = not np.isnan(of[[P90, P100]]).any()
    if not known:
        of[:P100], of[P100] = mean, np.fmax(w.usage[i, CHANNEL["cpu_max"]], mean) if mean == mean else mean
    if known and of[P99] == of[P99]:
        return of, 1.0
    for k in range(P90 + 1, P100):
        of[k] = of[P90] + (of[P100] - of[P90]) * ((LEVELS[k] - 90) / 10) ** 2.5
    return of, 0.5 if known else 0.0


def of_signal(past: Past, j: int) -> dict[str, Any]:
    """Return the statistics of a signal."""
    r, values = j % 2, past.signals[:, j]
    limit, hourly = past.limit[r], past.hourly(j)
    slow, end_us = math.nan, 0
    for v, at_us in zip(values.tolist(), past.windows.end_us.tolist(), strict=True):
        if v == v:
            slow = v + (slow - v) * 0.5 ** ((at_us - end_us) / (12 * HOUR_US)) if slow > v else v
        end_us = at_us
    back_us = past.now_us - past.windows.end_us[past.recent(2)]
    far = np.abs(back_us - HOUR_US)
    then = values[past.recent(2)[np.flatnonzero(far == far.min())[0]]]  # the earlier one of two
    over_time = np.where(np.arange(len(values)) < past.from_row[r], np.nan, values) / past.reference[r]
    found: dict[str, Any] = {
        "last": values[-1], "max_6h": largest_of(hourly.get(k, math.nan) for k in range(6)),
        "max_24h": largest_of(hourly.get(k, math.nan) for k in range(24)), "max_ever": largest_of(values),
        "max_1h": largest_of(values[past.recent(1)]), "max_2h": largest_of(values[past.recent(2)]),
        "mean_30m": mean_of(values[past.recent(0.5)], np.ones(len(past.recent(0.5)))),
        "mean_2h": mean_of(values[past.recent(2)], np.ones(len(past.recent(2)))), "slow_max": slow,
        "ewm_1h": mean_of(values, past.faded(1)), "ewm_12h": mean_of(values, past.faded(12)),
        "change_1h": values[-1] - then,
    }  # fmt: skip
    known = values[past.recent(2)][~np.isnan(values[past.recent(2)])]
    found["std_2h"] = float(np.std(known)) if len(known) else math.nan
    found = {name: value / limit for name, value in found.items()}
    for name, beyond in (("p99_12h", 0.01), ("p90_12h", 0.1)):
        edges = percentile_of(over_time, past.faded(12), beyond)
        found[name] = tuple(edge * past.reference[r] / limit for edge in edges)
    if j < 2:
        edges = percentile_of(over_time, past.faded(48), 0.02)
        found["p98_48h"] = tuple(edge * past.reference[r] / limit for edge in edges)
        found["limit"] = math.log2(limit / CELL.largest_machine[r])
        found["limit_change"] = math.log2(limit / past.reference[r])
    return {f"{SIGNALS[j]}_{name}": value for name, value in found.items()}


def of_shape(past: Past) -> dict[str, Any]:
    """Return what the distributions of CPU say."""
    w, limit, n = past.windows, past.limit[0], len(past.windows)
    shapes = [shape_of(w, i) for i in range(n)]
    of, known = shapes[-1]
    own, levels = w.limit[-1, 0], np.array(LEVELS) / 100
    above = 1.0 - np.interp(own, of, levels) if own > 0 and of[P50] == of[P50] else math.nan
    found: dict[str, Any] = {
        "cpu_mean": w.usage[-1, CHANNEL["cpu_mean"]] / limit, "cpu_p50": of[P50] / limit,
        "cpu_low": (of[P50] - of[P10]) / limit, "cpu_spread": (of[P90] - of[P50]) / limit,
        "cpu_tail": (of[P99] - of[P90]) / limit, "cpu_top": (past.signals[-1, 2] - of[P99]) / limit,
        "cpu_tail_weight": min((of[P99] - of[P50]) / (of[P90] - of[P10]), 64.0) if of[P90] > of[P10] else math.nan,
        "cpu_over_limit": above, "shape_known": known,
    }  # fmt: skip
    middles = np.stack([(s[:-1] + s[1:]) / 2 for s, _ in shapes]) / past.reference[0]
    middles[: past.from_row[0]] = np.nan
    weight = past.faded(12)[:, None] * np.diff(levels)
    for name, beyond in (("p99", 0.01), ("p90", 0.1), ("p50", 0.5)):
        edges = percentile_of(middles.ravel(), weight.ravel(), beyond)
        found[f"usage_{name}_12h"] = tuple(edge * past.reference[0] / limit for edge in edges)
    return found


def of_runs(past: Past) -> dict[str, Any]:
    """Return what runs, their ends and the memory of this one say."""
    w, limit, memory = past.windows, past.limit[1], past.signals[:, 1]
    scheduled, first, runs, ends = int(w.scheduled_us[0]), 0, 0, []
    for i in range(1, len(w)):
        if w.scheduled_us[i] > scheduled:
            near = w.limit[i - 1, 1] > 0 and memory[i - 1] >= 0.98 * w.limit[i - 1, 1]
            if scheduled >= 0 and near and (memory[first:i] > w.limit[first:i, 1]).sum() <= 1:
                ends.append((int(w.end_us[i - 1]), max(int(w.end_us[i - 1]) - scheduled, 0), w.limit[i - 1, 1]))
            runs += scheduled >= 0
            scheduled, first = int(w.scheduled_us[i]), i
    began_us = scheduled if scheduled >= 0 else int(w.start_us[0])
    age = math.log2(1 + max(past.now_us - began_us, 0) / HOUR_US)
    two_hours = past.recent(2)
    two_hours = two_hours[w.end_us[two_hours] > began_us]
    half = two_hours[past.now_us - w.end_us[two_hours] < HOUR_US // 2]
    known = two_hours[~np.isnan(memory[two_hours])]
    hours, hourly = w.end_us / HOUR_US, past.hourly(1)
    whole = range(min(int(past.hour[-1]) - -(-began_us // HOUR_US), 5) + 1)  # clock hours back
    slopes = {
        "30m": slope_of(hours[half], memory[half]), "2h": slope_of(hours[two_hours], memory[two_hours]),
        "6h": slope_of([-k for k in whole], [hourly.get(k, math.nan) for k in whole]),
        "run": slope_of(hours[first:], memory[first:]),
    }  # fmt: skip
    if math.isnan(slopes["30m"]):
        slopes["30m"] = slope_of(hours[known[-2:]], memory[known[-2:]])
    if math.isnan(slopes["6h"]):
        slopes["6h"] = slopes["2h"]
    left = max(limit - memory[-1], 0.005 * limit) if memory[-1] == memory[-1] else math.nan
    found = {f"memory_rate_{over}": float(np.clip(slope / left, -64, 64)) for over, slope in slopes.items()}
    mean = np.float32(w.usage[-1, CHANNEL["memory_mean"]])
    found |= {
        "age": age, "restarts": math.log2(1 + runs), "memory_run_max": largest_of(memory[first:]) / limit,
        "memory_above": math.log2(1 + (memory[first:] > w.limit[first:, 1]).sum()), "ooms": math.log2(1 + len(ends)),
        "memory_over_mean": memory[-1] / mean if mean > 0 else math.nan,
        "oom_since": math.nan, "oom_age": math.nan, "oom_age_least": math.nan, "oom_limit": math.nan,
    }  # fmt: skip
    if ends:
        found["oom_since"] = math.log2(1 + (past.now_us - ends[-1][0]) / HOUR_US)
        found["oom_age"] = age - math.log2(1 + ends[-1][1] / HOUR_US)
        found["oom_age_least"] = age - math.log2(1 + min(lasted for _, lasted, _ in ends) / HOUR_US)
        found["oom_limit"] = math.log2(limit / ends[-1][2])
    return found


def of_rest(past: Past, row: Windows) -> dict[str, Any]:
    """Return the features of single numbers and of the clock; ``row`` has the facts of the task."""
    w, limit, last = past.windows, past.limit[1], past.windows.usage[-1]
    hourly, memory = past.hourly(1), past.signals[:, 1]
    cpi, two_hours = w.usage[:, CHANNEL["cpi"]], past.recent(2)
    mean_cpi = mean_of(cpi, past.faded(12))
    least = min((hourly[k] for k in range(1, 7) if k in hourly), default=math.nan)
    page_cache, mean = last[CHANNEL["page_cache"]], last[CHANNEL["memory_mean"]]
    week_us = (past.now_us - CELL.monday_us) % (7 * DAY_US)
    day = 2 * math.pi * (week_us % DAY_US) / DAY_US
    klass = int(row.scheduling_class[0])
    return {
        "memory_mean": mean / limit, "memory_growth_6h": (memory[-1] - least) / limit,
        "memory_slope_2h": slope_of(w.end_us[two_hours] / HOUR_US, memory[two_hours]) / limit,
        "page_cache": page_cache / limit, "page_cache_share": page_cache / mean if mean > 0 else math.nan,
        "cpi": cpi[-1], "cpi_change": cpi[-1] / mean_cpi if mean_cpi > 0 else math.nan, "mai": last[CHANNEL["mai"]],
        "seen": math.log2(1 + len(w)), "length": past.length[-1],
        "gap": math.log2(1 + (w.end_us[-1] - w.end_us[-2]) / 60e6) if len(w) > 1 else 0.0,
        "coverage_2h": min(past.weight[two_hours].sum() / RECENT_WINDOWS, 1.0),
        "hour_sin": math.sin(day), "hour_cos": math.cos(day), "day": week_us / (7 * DAY_US),
        "in_alloc": float(row.in_alloc[0]), "scheduling_class": klass / 3 if klass >= 0 else math.nan,
        **{f"tier_{tier}": float(row.tier[0] == k) for k, tier in enumerate(TIERS)},
    }  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_feature_of_random_histories_is_its_formula_over_all_windows_of_the_task(
    seed: int, random_histories: History
) -> None:
    windows, rng = random_histories(seed, n_tasks=3, longest=100), np.random.default_rng(seed)
    windows.limit[:] = np.where(windows.limit > 0, windows.limit, np.nan)  # 0 is unknown
    windows.usage[:] = np.minimum(windows.usage, 4.0)  # next to huge numbers the last digits of others are lost
    if rng.random() < 0.5:
        windows.scheduled_us[windows.scheduled_us > 0] *= 2  # runs begin with their first windows, not long before
    x = FeatureState(CELL).advance(windows.task_numbers(), windows).astype(np.float64)
    signals, compared = np.column_stack([demand(windows), peak_cpu(windows)]), set[str]()
    for first, stop in zip(windows.task_starts()[:-1], windows.task_starts()[1:], strict=True):
        ends_us = windows.end_us[first:stop]
        later = np.maximum.accumulate(ends_us)
        counts = first + np.flatnonzero(np.append(True, ends_us[1:] > later[:-1]))
        for i in np.unique(np.append(rng.integers(first, stop, 5), stop - 1)).tolist():
            taken, row = counts[counts <= i], windows.take(np.array([i]))
            past = Past(windows.take(taken), signals[taken], windows.limit[i])
            expected = of_shape(past) | of_runs(past) | of_rest(past, row)
            for j in range(len(SIGNALS)):
                expected |= of_signal(past, j)
            for name, formula in expected.items():
                got, of = float(x[i, FEATURE_NAMES.index(name)]), np.clip(formula, -LARGEST, LARGEST)
                nearest = float(np.clip(got, of.min(), of.max())) if got == got else float(of.min())
                assert got == pytest.approx(nearest, rel=1e-4, abs=1e-5, nan_ok=True), (name, i - first)
            compared |= expected.keys()
    left = [name for name in FEATURE_NAMES if name not in compared]
    assert all(any(part in name for part in ELSEWHERE) for name in left), left
