"""Features: the same numbers however a history is cut, nothing from the future, and each worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.windows import CHANNELS, Windows
from reclaim.features.registry import FEATURE_NAMES, FEATURES, PIPELINE_VERSION
from reclaim.features.state import STATE, FeatureState

History = Callable[..., Windows]
S = 1_000_000


def features_of(windows: Windows) -> NDArray[np.float32]:
    return FeatureState().advance(windows.task_numbers(), windows)


def value(x: NDArray[np.float32], name: str, row: int = -1) -> float:
    return float(x[row, FEATURE_NAMES.index(name)])


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), cuts=st.lists(st.integers(0, 400), max_size=6), by_time=st.booleans())
def test_a_history_cut_anywhere_and_interleaved_by_time_gives_the_same_bits(
    seed: int, cuts: list[int], by_time: bool, random_histories: History
) -> None:
    windows = random_histories(seed)
    slots = windows.task_numbers()
    whole = FeatureState().advance(slots, windows)
    order = np.argsort(windows.end_us, kind="stable") if by_time else np.arange(len(windows))
    if by_time:  # a task's own rows must stay in their order
        order = order[np.lexsort((np.arange(len(order)), windows.end_us[order]))]
        rank = {task: iter(np.flatnonzero(slots == task)) for task in np.unique(slots)}
        order = np.array([next(rank[slots[row]]) for row in order])
    live, piecewise = FeatureState(), np.empty_like(whole)
    for rows in np.split(order, sorted({c % (len(order) + 1) for c in cuts})):
        piecewise[rows] = live.advance(slots[rows], windows.take(rows))
    assert same_bits(piecewise, whole)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), at=st.integers(0, 400))
def test_changing_anything_after_t_moves_nothing_at_or_before_t(seed: int, at: int, random_histories: History) -> None:
    windows = random_histories(seed, n_tasks=1)
    at %= len(windows)
    other = random_histories(seed + 1, n_tasks=1, longest=len(windows) + 2)
    changed = Windows(
        **{
            f.name: np.concatenate([getattr(windows, f.name)[: at + 1], getattr(other, f.name)])
            for f in fields(Windows)
        }
    )
    n = at + 1
    slots = np.zeros(len(changed), np.int64)
    assert same_bits(FeatureState().advance(slots, changed)[:n], features_of(windows)[:n])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), power=st.integers(-20, 20))
def test_another_unit_of_usage_and_limit_gives_the_same_features(
    seed: int, power: int, random_histories: History
) -> None:
    windows = random_histories(seed)
    scale = 2.0**power  # a power of two: exact in floating point
    usage = windows.usage.copy()
    physical = [CHANNELS.index(c) for c in CHANNELS if c not in ("cpi", "mai")]
    usage[:, physical] *= scale
    scaled = features_of(replace(windows, usage=usage, limit=windows.limit * scale))
    assert same_bits(scaled, features_of(windows))


def test_a_repeated_or_late_window_changes_nothing(history: History) -> None:
    windows = history([0.1, 0.2, 0.3, 0.4])
    late = history([0.9], start_s=600)
    state = FeatureState()
    one = np.zeros(1, np.int64)
    state.advance(np.zeros(4, np.int64), windows)
    state.advance(one, late)
    state.advance(one, windows.take(slice(3, 4)))
    following = history([0.5], start_s=1800)
    undisturbed = features_of(history([0.1, 0.2, 0.3, 0.4, 0.5]))
    assert same_bits(state.advance(one, following), undisturbed[-1:])


def test_means_and_maxima_cover_the_time_they_say(history: History) -> None:
    cpu = [0.9] + [0.1] * 11 + [0.2] * 11 + [0.5]  # 24 windows, 2 hours
    x = features_of(history(cpu))
    assert value(x, "cpu_last") == pytest.approx(0.5)
    assert value(x, "cpu_mean_30m") == pytest.approx((5 * 0.2 + 0.5) / 6)
    assert value(x, "cpu_mean_2h") == pytest.approx(np.mean(cpu))
    assert value(x, "cpu_std_2h") == pytest.approx(np.std(cpu))
    assert value(x, "cpu_max_1h") == pytest.approx(0.5)
    assert value(x, "cpu_max_2h") == pytest.approx(0.9)
    assert value(x, "cpu_max_ever") == pytest.approx(0.9)
    assert value(x, "cpu_change_1h") == pytest.approx(0.5 - 0.1)  # the window that ended an hour before
    later = features_of(history([*cpu, 0.5]))
    assert value(later, "cpu_max_2h") == pytest.approx(0.5)  # the first window has left the two hours


def test_hourly_maxima_reach_back_by_clock_hours(history: History) -> None:
    per_hour = [0.1] * 27
    per_hour[2] = 0.8
    cpu = [v for v in per_hour for _ in range(12)]
    x = features_of(history(cpu, start_s=0))
    six, day, yesterday = (FEATURE_NAMES.index(f"cpu_{n}") for n in ("max_6h", "max_24h", "yesterday"))
    ends = np.arange(12, len(cpu) + 1, 12) - 1  # the last window of each hour
    assert x[ends, six].tolist() == pytest.approx([0.8 if 2 <= h <= 7 else 0.1 for h in range(27)])
    assert x[ends, day].tolist() == pytest.approx([0.8 if 2 <= h <= 25 else 0.1 for h in range(27)])
    assert x[ends[24:], yesterday].tolist() == pytest.approx([0.8] * 3)
    assert x[ends[22], yesterday] == pytest.approx(0.1)
    assert math.isnan(x[ends[21], yesterday])


def test_decayed_statistics_halve_in_their_half_life(history: History) -> None:
    hour = features_of(history([1.0] + [0.0] * 12))
    kept = 0.5 ** (1 / 12)
    weights = kept ** np.arange(12, -1, -1)
    assert value(hour, "cpu_ewm_1h") == pytest.approx(weights[0] / weights.sum())
    half_a_day = features_of(history([1.0] + [0.0] * 144))
    assert value(half_a_day, "cpu_slow_max") == pytest.approx(0.5)


def test_percentiles_come_from_the_histogram_within_a_step(history: History) -> None:
    x = features_of(history([0.1] * 95 + [0.7] * 5))
    assert value(x, "cpu_p90_12h") == pytest.approx(0.1, rel=0.09)
    assert value(x, "cpu_p99_12h") == pytest.approx(0.7, rel=0.09)


def test_a_changed_limit_changes_the_features_and_not_the_history(history: History) -> None:
    windows = history([0.4] * 30)
    windows.limit[20:] = 2.0
    x = features_of(windows)
    for name in ("cpu_last", "cpu_mean_2h", "cpu_max_24h", "cpu_ewm_12h", "memory_max_ever", "peak_cpu_slow_max"):
        assert value(x, name, 19) == pytest.approx(0.4), name
        assert value(x, name, 20) == pytest.approx(0.2), name
    assert value(x, "cpu_p90_12h", 20) == pytest.approx(value(x, "cpu_p90_12h", 19) / 2)


def test_cpu_demand_is_the_90th_percentile_capped_at_the_limit_and_the_peak_is_not(history: History) -> None:
    windows = history([0.2])
    windows.usage[0, CHANNELS.index("cpu_p90")] = 1.7
    windows.usage[0, CHANNELS.index("cpu_max")] = 3.0
    x = features_of(windows)
    assert value(x, "cpu_last") == pytest.approx(1.0)
    assert value(x, "peak_cpu_last") == pytest.approx(3.0)
    assert value(x, "cpu_mean") == pytest.approx(0.2)


def test_age_counts_from_the_run_and_else_from_the_first_window(history: History) -> None:
    windows = history([0.1, 0.1], start_s=7200)
    assert value(features_of(windows), "age") == pytest.approx(math.log2(1 + 600 / 3600))
    windows.scheduled_us[:] = 3600 * S
    assert value(features_of(windows), "age") == pytest.approx(math.log2(1 + (7200 + 600 - 3600) / 3600))


def test_what_is_unknown_is_nan_and_never_zero(history: History) -> None:
    x = features_of(history([0.1]))
    unknown = {"cpu_spread", "cpu_tail", "page_cache", "cpi", "mai", "scheduling_class", "memory_growth_6h",
               "cpu_yesterday", "cpu_change_1h"}  # fmt: skip
    for name in unknown - {"cpu_change_1h"}:
        assert math.isnan(value(x, name)), name
    without_limit = history([0.1], limit=math.nan)
    assert math.isnan(value(features_of(without_limit), "cpu_last"))


def test_the_record_is_bounded_and_the_registry_is_complete() -> None:
    assert STATE.itemsize < 4096
    assert len(set(FEATURE_NAMES)) == len(FEATURES)
    assert all(f.formula and f.unit and f.missing for f in FEATURES)
    assert len(PIPELINE_VERSION) == 12
