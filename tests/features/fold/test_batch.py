"""Features: the same numbers however a history is cut, nothing from the future, and each worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.windows import CHANNELS, LEVELS, P50, P90, P99, P100, Cell, Windows, empty_windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.fold.batch import FeatureState
from reclaim.features.fold.task_record import STATE
from reclaim.features.registry import FEATURE_NAMES, FEATURES, PIPELINE_VERSION

History = Callable[..., Windows]
S = 1_000_000


def features_of(windows: Windows, cell: Cell | None = None) -> NDArray[np.float32]:
    return FeatureState(cell or Cell()).advance(windows.task_numbers(), windows)


def value(x: NDArray[np.float32], name: str, row: int = -1) -> float:
    return float(x[row, FEATURE_NAMES.index(name)])


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))


def _five_minutes(cpu: NDArray[np.float64]) -> Windows:
    windows = empty_windows(len(cpu))
    windows.start_us[:] = 300 * S * np.arange(len(cpu))
    windows.end_us[:] = windows.start_us + 300 * S
    windows.limit[:] = 1.0
    windows.usage[:, CHANNELS.index("cpu_mean")] = cpu
    return windows


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
    percentiles = windows.percentiles * np.float32(scale)
    cell, scaled_cell = (Cell(largest_machine=(k, 2 * k)) for k in (4.0, 4 * scale))
    scaled = replace(windows, usage=usage, percentiles=percentiles, limit=windows.limit * scale)
    assert same_bits(features_of(scaled, scaled_cell), features_of(windows, cell))


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
    six, day = (FEATURE_NAMES.index(f"cpu_{n}") for n in ("max_6h", "max_24h"))
    ends = np.arange(12, len(cpu) + 1, 12) - 1  # the last window of each hour
    assert x[ends, six].tolist() == pytest.approx([0.8 if 2 <= h <= 7 else 0.1 for h in range(27)])
    assert x[ends, day].tolist() == pytest.approx([0.8 if 2 <= h <= 25 else 0.1 for h in range(27)])


def test_decayed_statistics_halve_in_their_half_life(history: History) -> None:
    hour = features_of(history([1.0] + [0.0] * 12))
    kept = 0.5 ** (1 / 12)
    weights = kept ** np.arange(12, -1, -1)
    assert value(hour, "cpu_ewm_1h") == pytest.approx(weights[0] / weights.sum())
    half_a_day = features_of(history([1.0] + [0.0] * 144))
    assert value(half_a_day, "cpu_slow_max") == pytest.approx(0.5)


def test_percentiles_come_from_the_histogram_within_a_step(history: History) -> None:
    x = features_of(history([0.1] * 95 + [0.7] * 5))
    assert value(x, "cpu_p90_12h") == pytest.approx(0.1, rel=0.12)
    assert value(x, "cpu_p99_12h") == pytest.approx(0.7, rel=0.12)
    assert value(x, "cpu_p98_48h") == pytest.approx(0.7, rel=0.12)
    full = features_of(history([1.0] * 30))
    assert value(full, "cpu_p99_12h") == 1.0  # a step's upper edge belongs to it, and the limit is one


def test_percentiles_forget_by_their_half_lives_however_long_the_gap(history: History) -> None:
    cpu = [0.8] * 12 + [0.1] * 12
    windows = history(cpu)
    windows.start_us[12:] += 36 * 3600 * S  # three half-lives: 0.8 keeps a ninth of the weight
    windows.end_us[12:] += 36 * 3600 * S
    x = features_of(windows)
    assert value(x, "cpu_p90_12h") == pytest.approx(0.8, rel=0.12)
    windows.start_us[12:] += 12 * 3600 * S  # four: less than a tenth
    windows.end_us[12:] += 12 * 3600 * S
    x = features_of(windows)
    assert value(x, "cpu_p90_12h") == pytest.approx(0.1, rel=0.12)
    assert value(x, "cpu_p98_48h") == pytest.approx(0.8, rel=0.12)
    windows.start_us[12:] += 1000 * 24 * 3600 * S
    windows.end_us[12:] += 1000 * 24 * 3600 * S
    x = features_of(windows)
    assert value(x, "cpu_p99_12h") == value(x, "cpu_p98_48h") == pytest.approx(0.1, rel=0.12)
    assert value(x, "cpu_max_ever") == pytest.approx(0.8)


def with_gap(windows: Windows, row: int, days: int) -> Windows:
    """Return the windows with so many days before one of them."""
    windows.start_us[row:] += days * 24 * 3600 * S
    windows.end_us[row:] += days * 24 * 3600 * S
    return windows


@pytest.mark.parametrize("days", [100, 1000])  # above and below the least weight that a histogram keeps over two days
def test_after_a_long_gap_percentiles_are_those_of_the_windows_since_alone(history: History, days: int) -> None:
    since = [0.125] * 4 + [0.75]
    x = features_of(with_gap(history([0.875] * 200 + since), 200, days))
    alone = features_of(history(since))
    over_time = [name for name in FEATURE_NAMES if "_p" in name and name.endswith(("_12h", "_48h"))]
    assert len(over_time) == 11
    for name in over_time:
        assert value(x, name) == value(alone, name), name
    assert value(x, "memory_p90_12h") == value(x, "memory_p98_48h") == 0.75


def test_percentiles_of_both_half_lives_and_resources_stay_right_over_half_a_year(history: History) -> None:
    busy, idle = [0.75] * 30, [0.125] * 30
    windows = history(busy + idle)
    for row in range(1, 30):
        with_gap(windows, row, 6)  # half a year: weights grow past the bound at which all are divided
    for row in range(31, 60):
        with_gap(windows, row, 1)
    x = features_of(windows)
    for name in ("cpu_p90_12h", "memory_p90_12h", "cpu_p98_48h", "memory_p98_48h"):
        assert value(x, name, 29) == 0.75, name
        assert value(x, name) == 0.125, name


def test_percentiles_agree_with_sorting_all_there_ever_was() -> None:
    random = np.random.default_rng(5)
    cpu = random.gamma(2.0, 0.1, 600).clip(0.02, 1.0)
    windows = _five_minutes(cpu)
    weight = 0.5 ** ((windows.end_us[-1] - windows.end_us) / (12 * 3600 * S))
    x = features_of(windows)
    for name, level in (("cpu_p90_12h", 0.90), ("cpu_p99_12h", 0.99)):
        order = np.argsort(cpu)
        exact = cpu[order][np.searchsorted(np.cumsum(weight[order]), level * weight.sum())]
        assert exact * 0.999 <= value(x, name) <= exact * 1.13


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
    windows.percentiles[0, : P90 + 1] = 1.7
    windows.percentiles[0, P90 + 1 :] = 3.0
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


def test_a_run_that_begins_after_its_window_by_another_clock_has_the_age_zero(history: History) -> None:
    windows = history([0.1], start_s=7200)
    windows.scheduled_us[:] = windows.end_us + 1800 * S
    assert value(features_of(windows), "age") == 0.0


def test_what_is_unknown_is_nan_and_never_zero(history: History) -> None:
    x = features_of(history([0.1]))
    unknown = ("cpu_tail_weight", "page_cache", "page_cache_share", "cpi", "cpi_change", "mai", "scheduling_class",
               "memory_growth_6h", "memory_slope_2h", "cpu_same_hour_1d", "cpu_limit", "memory_limit")  # fmt: skip
    for name in unknown:
        assert math.isnan(value(x, name)), name
    without_limit = history([0.1], limit=math.nan)
    x = features_of(without_limit)
    for name in ("cpu_last", "cpu_p90_12h", "cpu_limit_change", "usage_p50_12h", "cpu_over_limit", "memory_slope_2h"):
        assert math.isnan(value(x, name)), name
    assert value(x, "seen") == 1.0


def test_the_distribution_of_a_window_is_taken_as_measured(history: History) -> None:
    windows = history([0.3])
    windows.percentiles[0] = [level / 100 for level in LEVELS]
    windows.usage[0, CHANNELS.index("cpu_max")] = 1.5
    x = features_of(windows)
    expected = {"cpu_p50": 0.5, "cpu_low": 0.4, "cpu_spread": 0.4, "cpu_tail": 0.09, "cpu_top": 1.5 - 0.99,
                "cpu_tail_weight": 0.49 / 0.8, "cpu_over_limit": 0.0, "shape_known": 1.0}  # fmt: skip
    for name, expectation in expected.items():
        assert value(x, name) == pytest.approx(expectation, abs=1e-6), name
    windows.limit[:] = 0.75
    assert value(features_of(windows), "cpu_over_limit") == pytest.approx(0.25)
    windows.limit[:] = 0.945  # between two percentiles of the tail
    assert value(features_of(windows), "cpu_over_limit") == pytest.approx(0.055, abs=1e-6)


def test_the_weight_of_a_tail_far_above_the_rest_is_cut_off(history: History) -> None:
    windows = history([0.25])
    windows.percentiles[0] = [0.25 + level / 2**14 if level < 99 else 0.75 for level in LEVELS]
    assert value(features_of(windows), "cpu_tail_weight") == 64.0


def test_usage_at_the_limit_is_not_above_it_for_a_whole_window_or_a_part_of_it(history: History) -> None:
    windows = history([0.5], limit=0.5)
    windows.percentiles[0] = 0.5
    assert value(features_of(windows), "cpu_over_limit") == 0.0
    windows.limit[:] = 0.4375
    assert value(features_of(windows), "cpu_over_limit") == 1.0
    windows.limit[:] = 0.5
    windows.percentiles[0] = [0.5 + max(level - 50, 0) / 100 for level in LEVELS]  # at the limit for half of it
    assert value(features_of(windows), "cpu_over_limit") == pytest.approx(0.5)


def test_what_a_distribution_lacks_is_interpolated_and_the_mask_says_so(history: History) -> None:
    windows = history([0.3])
    windows.percentiles[0] = [level / 100 for level in LEVELS]
    windows.percentiles[0, P90 + 1 : P100] = np.nan
    x = features_of(windows)
    assert value(x, "shape_known") == 0.5
    assert value(x, "cpu_tail") == pytest.approx(0.1 * 0.9**2.5)  # of the way from the 90th to the 100th
    windows.percentiles[0] = np.nan
    windows.usage[0, CHANNELS.index("cpu_max")] = 0.8
    x = features_of(windows)
    assert value(x, "shape_known") == 0.0
    assert value(x, "cpu_p50") == pytest.approx(0.3)
    assert value(x, "cpu_spread") == 0.0
    assert value(x, "cpu_tail") == pytest.approx(0.5 * 0.9**2.5)


def test_usage_over_time_mixes_the_distributions_of_all_windows(history: History) -> None:
    windows = history([0.1] * 40)
    windows.percentiles[:, : P50 + 1] = 0.1  # half of each window idle, the other half busy
    windows.percentiles[:, P50 + 1 : P99] = 0.6
    windows.percentiles[:, P99:] = 0.9
    x = features_of(windows)
    assert value(x, "usage_p50_12h") == pytest.approx(0.35, rel=0.12)  # the part between two levels is at its middle
    assert value(x, "usage_p90_12h") == pytest.approx(0.6, rel=0.12)
    windows.percentiles[20:] = 0.1
    assert value(features_of(windows), "usage_p50_12h") == pytest.approx(0.1, rel=0.12)


def test_a_restart_counts_and_a_limit_change_shows(history: History) -> None:
    windows = history([0.2] * 6)
    windows.scheduled_us[:] = [0, 0, 1200 * S, 1200 * S, 1500 * S, 1500 * S]
    windows.limit[4:] = 4.0
    x = features_of(windows, Cell(largest_machine=(8.0, 8.0)))
    assert x[:, FEATURE_NAMES.index("restarts")].tolist() == pytest.approx([0, 0, 1, 1, np.log2(3), np.log2(3)])
    assert x[:, FEATURE_NAMES.index("cpu_limit_change")].tolist() == [0, 0, 0, 0, 2, 2]
    assert x[:, FEATURE_NAMES.index("memory_limit")].tolist() == [-3, -3, -3, -3, -1, -1]


def test_gaps_and_short_windows_show_in_coverage_gap_and_length(history: History) -> None:
    windows = history([0.2] * 24)
    assert value(features_of(windows), "coverage_2h") == 1.0
    short = windows.take(np.array([0, 20, 21, 23]))
    short.start_us[-1] += 200 * S
    x = features_of(short)
    assert value(x, "length") == pytest.approx(1 / 3)
    assert value(x, "gap") == pytest.approx(math.log2(1 + 10))
    assert value(x, "coverage_2h") == pytest.approx((3 + 1 / 3) / 24)


def test_memory_that_grows_steadily_has_that_slope(history: History) -> None:
    memory = [0.1 + 0.01 * k for k in range(30)]
    x = features_of(history([0.1] * 30, memory))
    assert value(x, "memory_slope_2h") == pytest.approx(0.12)  # of the limit per hour
    assert value(x, "memory_growth_6h") == pytest.approx(memory[-1] - memory[9])  # the first clock hour's


def test_the_calendar_is_the_cells(history: History) -> None:
    windows = history([0.1], start_s=0)  # ends 5 minutes after time 0
    x = features_of(windows, Cell(monday_us=-(2 * 24 + 6) * 3600 * S))  # it is Wednesday, 6:05
    assert value(x, "day") == pytest.approx((2 + (6 * 60 + 5) / 1440) / 7)
    assert value(x, "hour_sin") == pytest.approx(math.sin(2 * math.pi * (6 * 60 + 5) / 1440))


def test_a_late_window_reads_as_the_one_before_it(history: History) -> None:
    windows = history([0.1, 0.2, 0.3])
    late = history([0.9], start_s=650)
    late.percentiles[:] = 0.9
    slot = np.zeros(1, np.int64)
    state = FeatureState()
    before = state.advance(np.zeros(3, np.int64), windows)[-1:]
    assert same_bits(state.advance(slot, late), before)


def test_the_record_is_bounded_and_the_registry_is_complete() -> None:
    assert STATE.itemsize < 4096
    assert len(set(FEATURE_NAMES)) == len(FEATURES)
    assert all(f.formula and f.unit and f.missing for f in FEATURES)
    assert len(PIPELINE_VERSION) == 12


ABSURD = (0.0, 5e-324, 1e-300, 1e-40, 1e-12, 1.0, 1e18, 1e39, 1e300, 1.7e308)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), amounts=st.lists(st.sampled_from(ABSURD), min_size=1, max_size=4))
def test_no_feature_is_infinite_whatever_was_measured(
    seed: int, amounts: list[float], random_histories: History
) -> None:
    windows, random = random_histories(seed), np.random.default_rng(seed)
    for values in (windows.usage, windows.limit, windows.percentiles):
        hit = random.random(values.shape) < 0.3
        with np.errstate(over="ignore"):
            values[hit] = random.choice(amounts, int(hit.sum()))
    with np.errstate(over="ignore", invalid="ignore"):
        x = features_of(windows, Cell(largest_machine=(float(random.choice(amounts)),) * 2))
    assert not np.isinf(x).any(), [FEATURE_NAMES[k] for k in np.flatnonzero(np.isinf(x).any(axis=0))]


def test_times_beyond_any_clock_are_taken_as_the_last_slot(history: History, fold: Callable[..., FeatureSet]) -> None:
    windows = history([0.1, 0.2, 0.3])
    windows.end_us[1:] = (2**62, 2**62 + 1)
    assert np.isfinite(fold(windows).x[:, FEATURE_NAMES.index("cpu_last")]).all()


def test_a_slot_for_each_window_is_asked_for(history: History) -> None:
    for slot in (np.zeros(3, np.int64), np.array([-1])):
        with pytest.raises(ValueError, match="a slot from 0 on for each of 1 windows"):
            FeatureState().advance(slot, history([0.1]))


def test_a_record_is_whole_cache_lines() -> None:
    assert STATE.itemsize % 64 == 0
