"""Decaying histograms and the estimators that rest on them, by hand and against a plain oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.windows import Windows
from reclaim.training.estimators.histogram import RELATIVE, DecayingHistograms, Grid
from reclaim.training.estimators.koordinator import KoordinatorEstimator
from reclaim.training.estimators.krr import KrrEstimator
from reclaim.training.estimators.vpa import VpaEstimator

MakeWindows = Callable[..., Windows]
DAY_US = 86_400_000_000
HALF_LIFE_S = 600.0


def _slot(windows: Windows) -> NDArray[np.int64]:
    return np.zeros(len(windows), np.int64)


def test_the_grids_have_as_many_buckets_as_the_originals() -> None:
    # first (ratio^i - 1) / (ratio - 1) first reaches the largest at i = 175 (VPA), 157 and 204 (Koordinator); one more
    grids = [Grid(0.01, 1_000.0), Grid(1e7, 1e12), Grid(0.025, 1_024.0), Grid(5 * 2.0**20, 2.0**41)]
    assert [len(grid.start) for grid in grids] == [176, 176, 158, 205]
    assert Grid(0.01, 1_000.0).start[:4].tolist() == pytest.approx([0, 0.01, 0.0205, 0.031525])
    assert Grid(0.25, 1.0, 1.0).start.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_bucket_holds_its_beginning_and_not_its_end_and_the_last_one_is_open() -> None:
    grid = Grid(0.25, 1.0, 1.0)
    assert grid.end.tolist() == [0.25, 0.5, 0.75, 1.0, 1.0]
    whole, at_us = DecayingHistograms("h", grid, 3_600.0, 1.0), np.array([300_000_000])
    ends = [_fold(whole, at_us, np.array([value]))[0][0, 0] for value in (0.0, 0.24, 0.25, 0.99, 1.0, 7.0)]
    assert ends == [0.25, 0.25, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("bad", [{"first": 0.0}, {"first": 2.0}, {"ratio": 0.9}])
def test_an_impossible_grid_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a grid needs 0 < first < largest"):
        Grid(**{"first": 0.1, "largest": 1.0, **bad})


def _fold(
    histograms: DecayingHistograms, end_us: NDArray[np.int64], value: NDArray[np.float64]
) -> tuple[NDArray[np.float64], dict[str, NDArray[Any]]]:
    n = len(value)
    memory = {name: np.zeros((1, *blank.shape[1:]), blank.dtype) for name, blank in histograms.blank.items()}
    out, both = np.empty((n, 3)), np.repeat(value[:, None], 2, axis=1)
    none, scheduled_us = np.empty((n, 0), np.float32), np.full(n, -1)
    histograms.fold(memory, 0, np.zeros(n, np.int64), end_us, end_us, scheduled_us, both, none, both, out)
    return out, memory


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10), st.floats(0, 3) | st.just(np.nan)), min_size=1, max_size=60),
    st.sampled_from([0.5, 0.9, 0.95, 1.0]),
    st.booleans(),
    st.sampled_from([60.0, 3_600.0, 1e6]),
    st.sampled_from([RELATIVE, Grid(0.05, 1.0, 1.0)]),
)
@example([(1, 2.0), (2, 1.0), (7, 0.0), (1, 0.0)], 1.0, False, 3_600.0, RELATIVE)
def test_percentiles_agree_with_a_plain_histogram(
    steps: list[tuple[int, float]], level: float, by_value: bool, half_life_s: float, grid: Grid
) -> None:
    end_us = 300_000_000 * np.cumsum([gap**3 for gap, _ in steps])  # a minute's half-life is re-based many times
    values = np.array([value for _, value in steps])
    out, _ = _fold(DecayingHistograms("h", grid, half_life_s, level, by_value=by_value), end_us, values)
    ends = grid.end
    for i in range(len(steps)):
        weights = [0.0] * len(grid.start)
        for t, v in zip(end_us[: i + 1], values[: i + 1], strict=True):
            if not np.isnan(v):
                bucket = int(np.digitize(v, grid.start)) - 1
                weight = 0.5 ** ((end_us[i] - t) / (half_life_s * 1e6))
                weights[bucket] += weight * (ends[bucket] if by_value else 1.0)
        if sum(weights) < 1e-25:  # nothing, or nothing that a float32 still holds
            continue
        reached = level * sum(weights)
        first, last = (
            next(k for k in range(len(weights)) if sum(weights[: k + 1]) >= reached * (1 + slack))
            for slack in (-1e-5, 1e-6 if level < 1.0 else 0.0)
        )
        # between the two lie buckets that weigh too little to be told from rounding
        assert out[i, 0] in ends[first : last + 1]


def test_rebasing_changes_no_percentile() -> None:
    # 101 half-lives: what is old weighs 2^-101 of what is new, and its bucket is not empty for that
    histograms = DecayingHistograms("h", Grid(0.25, 1.0, 1.0), 1.0, 0.5)
    out, memory = _fold(histograms, np.array([1_000_000, 2_000_000, 103_000_000]), np.array([0.1, 0.1, 0.6]))
    # the second weighs 2 and the first 1, both in the first bucket; 102 half-lives on, the third weighs 1
    assert out[:, 0].tolist() == [0.25, 0.25, 0.75]
    assert memory["h task"]["reference_us"][0] == 103_000_000
    assert memory["h weight"][0].tolist() == [3.0 * 2.0**-102, 0.0, 1.0, 0.0, 0.0]


def test_vpa_reserves_the_end_of_the_percentiles_bucket_plus_its_margin(make_windows: MakeWindows) -> None:
    # Cores and bytes: 0.005 is in the first bucket (to 0.01), 0.02 in the second (0.01 to 0.0205). With a half-life so
    # long that all weigh the same, of 0.005 nine times and 0.02 once p90 is the first bucket; with 0.02 twice of eleven
    # it is the second. Memory: one peak a day, 1.5e7, in the second bucket (1e7 to 2.05e7).
    windows = make_windows([0.005] * 9 + [0.02] * 2, [1.5e7] * 11, limit=(1.0, 1e9))
    vpa = VpaEstimator(half_life_s=1e12, unit=(1.0, 1.0))
    cpu, memory = vpa.update(_slot(windows), windows).reservation.T
    assert cpu[9] == 0.025  # 0.01 * 1.15 is less than VPA ever recommends
    assert cpu[10] == 0.025  # and so is 0.0205 * 1.15
    assert memory[10] == 250 * 2**20
    thousandth = VpaEstimator(half_life_s=1e12, unit=(1_000.0, 1_000.0))  # the same usage in thousands
    windows = make_windows([0.00001] * 9 + [0.0001] * 2, [1e6] * 11, limit=(1.0, 1e9))
    cpu, memory = thousandth.update(_slot(windows), windows).reservation.T
    grid_cpu, grid_memory = Grid(0.01, 1_000.0), Grid(1e7, 1e12)
    assert cpu[10] == pytest.approx(grid_cpu.end[np.digitize(0.1, grid_cpu.start) - 1] * 1.15 / 1_000)
    assert memory[10] == pytest.approx(grid_memory.end[np.digitize(1e9, grid_memory.start) - 1] * 1.15 / 1_000)


def test_vpa_without_a_unit_goes_by_the_limit(make_windows: MakeWindows) -> None:
    # 0.002 of a limit of 2 is the end of the first bucket, so in the second, which ends at 0.1 % * (1 + 1.05)
    windows = make_windows([0.002], limit=(2.0, 2.0))
    estimate = VpaEstimator().update(_slot(windows), windows)
    assert estimate.reservation[0].tolist() == pytest.approx([0.00205 * 1.15 * 2] * 2)


def test_vpa_takes_one_memory_peak_a_day_of_the_last_eight(make_windows: MakeWindows) -> None:
    # Peaks of 0.5, then 0.2 daily, with no decay to speak of: p50 of two peaks is the lesser, 0.2; p95 is 0.5, until
    # eight days have gone by
    windows = make_windows([0.1] * 10, [0.5] + [0.2] * 9)
    windows.end_us[:] = windows.end_us[0] + DAY_US * np.arange(10)
    grid = RELATIVE
    half, fifth = grid.end[np.digitize([0.5, 0.2], grid.start) - 1]
    upper = VpaEstimator("upper", margin=0.0, half_life_s=1e12, samples_per_day=1e-9)
    memory = upper.update(_slot(windows), windows).reservation[:, 1]
    days = np.arange(10.0)
    assert np.isnan(memory[0])  # no confidence yet
    assert memory[1:8].tolist() == pytest.approx((half * (1 + 1 / days[1:8])).tolist())
    assert memory[8:].tolist() == pytest.approx((fifth * (1 + 1 / days[8:])).tolist())
    lower = VpaEstimator("lower", margin=0.0, half_life_s=1e12, samples_per_day=1e-9)
    memory = lower.update(_slot(windows), windows).reservation[:, 1]
    assert memory[0] == 0.0
    assert memory[1:].tolist() == pytest.approx((fifth * (1 + 0.001 / days[1:]) ** -2).tolist())


def test_vpa_is_no_more_confident_than_its_samples_allow(make_windows: MakeWindows) -> None:
    windows = make_windows([0.1, 0.1])
    windows.end_us[1] = windows.end_us[0] + 4 * DAY_US  # four days, but two samples of 288: 1 + 288 / 2
    cpu = VpaEstimator("upper", margin=0.0).update(_slot(windows), windows).reservation[1, 0]
    assert cpu == pytest.approx(RELATIVE.end[np.digitize(0.1, RELATIVE.start) - 1] * 145)


def test_vpa_bumps_memory_after_a_kill_and_not_after_any_new_run(make_windows: MakeWindows) -> None:
    # 0.99 of the limit, then a new run: the day's peak becomes the limit times 1.2. At 0.9 it was no kill.
    for last, peak in ((0.99, 1.2), (0.9, 0.9)):
        windows = make_windows([0.1] * 4, [0.5, last, 0.3, 0.3], scheduled_us=1)
        windows.scheduled_us[2:] = windows.start_us[2]
        memory = VpaEstimator(margin=0.0).update(_slot(windows), windows).reservation[:, 1]
        expected = RELATIVE.end[np.digitize([last, peak, peak], RELATIVE.start) - 1]
        assert memory[1:].tolist() == pytest.approx(expected.tolist())


def test_vpa_bumps_by_100_mib_at_least_where_bytes_are_known(make_windows: MakeWindows) -> None:
    gib = 2.0**30
    windows = make_windows([0.1] * 3, [0.3 * gib, 0.3 * gib, 0.1 * gib], limit=(1.0, 0.3 * gib), scheduled_us=1)
    windows.scheduled_us[2:] = windows.start_us[2]
    memory = VpaEstimator(margin=0.0, unit=(1.0, 1.0)).update(_slot(windows), windows).reservation[2, 1]
    grid = Grid(1e7, 1e12)  # 0.3 GiB is 307.2 MiB: a fifth of it is less than 100 MiB
    assert memory == pytest.approx(grid.end[np.digitize(407.2 * 2**20, grid.start) - 1])


def test_koordinator_keeps_the_limit_for_a_day_and_then_adds_a_tenth(make_windows: MakeWindows) -> None:
    windows = make_windows([0.2] * 19 + [0.4], [0.3] * 20, scheduled_us=600_000_000)
    windows.end_us[-1] = windows.scheduled_us[0] + DAY_US
    cold = KoordinatorEstimator().update(_slot(windows), windows).reservation
    assert np.isnan(cold).all()  # a day old and no older
    windows.end_us[-1] += 1
    warm = KoordinatorEstimator().update(_slot(windows), windows).reservation[-1]
    # half-lives of 12 h: 22.5 h on, the last of CPU outweighs a sample of before by 3.6, and is 16 % of all: above p95
    assert warm.tolist() == pytest.approx((RELATIVE.end[np.digitize([0.4, 0.3], RELATIVE.start) - 1] * 1.1).tolist())


def test_koordinator_takes_a_new_run_for_a_new_pod(make_windows: MakeWindows) -> None:
    windows = make_windows([0.9, 0.9, 0.2, 0.2], scheduled_us=600_000_000)
    windows.scheduled_us[2:] = windows.start_us[2]
    cpu = KoordinatorEstimator(margin=0.0, cold_s=1.0).update(_slot(windows), windows).reservation[:, 0]
    high, low = RELATIVE.end[np.digitize([0.9, 0.2], RELATIVE.start) - 1]
    assert cpu.tolist() == [high, high, low, low]


def test_koordinators_own_buckets_need_to_know_the_unit(make_windows: MakeWindows) -> None:
    windows = make_windows([0.0005], [0.0005], limit=(1.0, 1.0))
    estimate = KoordinatorEstimator(margin=0.0, cold_s=1.0, unit=(100.0, 2.0**33)).update(_slot(windows), windows)
    # 0.05 cores: buckets at 0.025, 0.05125; 4.096 MiB: the first bucket, to 5 MiB
    assert estimate.reservation[0].tolist() == pytest.approx([0.05125 / 100, 5 * 2**20 / 2**33])
    with pytest.raises(ConfigError, match="unit must be one number above 0 for each of"):
        KoordinatorEstimator(unit=(1.0,))


def test_krr_takes_p95_of_cpu_and_the_largest_memory_plus_15_percent(make_windows: MakeWindows) -> None:
    # 19 of 20 windows at 0.1: exactly 95 %; of 21 with two at 0.5, p95 is among those
    windows = make_windows([0.1] * 19 + [0.5] * 2, [0.2] * 20 + [0.4])
    grid = Grid(0.001, 1.0)
    low, high = grid.end[np.digitize([0.1, 0.5], grid.start) - 1]
    reservation = KrrEstimator(min_samples=20).update(_slot(windows), windows).reservation
    assert np.isnan(reservation[:19]).all()
    assert reservation[19:, 0].tolist() == [low, high]
    assert reservation[19:, 1].tolist() == pytest.approx([0.2 * 1.15, 0.4 * 1.15])


def test_krr_forgets_after_two_weeks(make_windows: MakeWindows) -> None:
    windows = make_windows([0.9] + [0.1] * 44, [0.8] + [0.1] * 44)
    windows.end_us[:] = windows.end_us[0] + DAY_US * np.arange(45)
    cpu, memory = KrrEstimator(level=100.0, min_samples=1).update(_slot(windows), windows).reservation.T
    grid = Grid(0.001, 1.0)
    low, high = grid.end[np.digitize([0.1, 0.9], grid.start) - 1]
    assert cpu.tolist() == [high] * 14 + [low] * 31
    assert memory.tolist() == pytest.approx([0.8 * 1.15] * 14 + [0.1 * 1.15] * 31)


@pytest.mark.parametrize("length_s", [1, 2])
def test_krr_forgets_windows_of_a_second_as_others(length_s: int, make_windows: MakeWindows) -> None:
    """A day has more of them than 16 bits count."""
    day = 86_400 // length_s
    windows = make_windows([0.9] * day + [0.1] * 100, [0.8] * day + [0.1] * 100)
    windows.end_us[:] = length_s * 1_000_000 * np.arange(1, day + 101)
    windows.end_us[day:] += 14 * DAY_US
    cpu, memory = KrrEstimator(min_samples=100).update(_slot(windows), windows).reservation.T
    grid = Grid(0.001, 1.0)
    low, high = grid.end[np.digitize([0.1, 0.9], grid.start) - 1]
    # two weeks later nothing is known until there are enough
    assert cpu[[day - 1, -2, -1]].tolist() == pytest.approx([high, np.nan, low], nan_ok=True)
    assert memory[[day - 1, -2, -1]].tolist() == pytest.approx([0.8 * 1.15, np.nan, 0.1 * 1.15], nan_ok=True)


def test_krr_reserves_a_quarter_more_than_the_limit_that_killed(make_windows: MakeWindows) -> None:
    windows = make_windows([0.1] * 3, [0.5, 0.99, 0.2], scheduled_us=1)
    windows.scheduled_us[2] = windows.start_us[2]
    memory = KrrEstimator(min_samples=1).update(_slot(windows), windows).reservation[:, 1]
    assert memory.tolist() == pytest.approx([0.5 * 1.15, 0.99 * 1.15, 1.25])


def test_krr_takes_a_new_run_for_a_kill_only_after_memory_at_the_limit_and_remembers_it_for_two_weeks(
    make_windows: MakeWindows,
) -> None:
    def memory(at: list[float], runs: list[int]) -> NDArray[np.float64]:
        """Return what is reserved of memory over its limit, a window a day."""
        windows = make_windows([0.1] * len(at), [4 * share for share in at], limit=(1.0, 4.0))
        windows.end_us[:] = windows.end_us[0] + DAY_US * np.arange(len(at))
        windows.scheduled_us[:] = runs
        return KrrEstimator(min_samples=1).update(_slot(windows), windows).reservation[:, 1] / 4

    low, largest, killed = 0.2 * 1.15, 0.99 * 1.15, 1.25
    n = 16
    assert memory([0.99, *[0.2] * n], [1, *[2] * n]) == pytest.approx([largest, *[killed] * 14, low, low])
    assert memory([0.97, *[0.2] * 2], [1, 2, 2]) == pytest.approx([0.97 * 1.15] * 3)  # not near enough to the limit
    assert memory([0.99, *[0.2] * 2], [1, 1, 2]) == pytest.approx([largest] * 3)  # the last window was far from it
    assert memory([0.99, *[0.2] * 2], [-1, 2, 2]) == pytest.approx([largest] * 3)  # no earlier run is known
    assert memory([0.2, 0.99, 0.2], [2, -1, 1]) == pytest.approx([low, largest, largest])  # an earlier one is none
    assert memory([0.2, 0.99, 0.2], [1, -1, 2]) == pytest.approx([low, largest, killed])  # one unknown in between


def test_impossible_settings_are_refused_with_the_rule() -> None:
    with pytest.raises(ConfigError, match="bound must be one of target, lower, upper, got 'middle'"):
        VpaEstimator("middle")
    with pytest.raises(ConfigError, match="expected margin > -1"):
        VpaEstimator(margin=-2)
    with pytest.raises(ConfigError, match="margin must be above -1, got -1"):
        KoordinatorEstimator(margin=-1)
    with pytest.raises(ConfigError, match="level must be above 0 and at most 100 percent, got 0"):
        KrrEstimator(level=0)
    with pytest.raises(ConfigError, match="min_samples >= 1"):
        KrrEstimator(min_samples=0)
    with pytest.raises(ConfigError, match="half_life_s must be above 0, got 0"):
        VpaEstimator(half_life_s=0)
    with pytest.raises(ConfigError, match=r"level must be above 0 and at most 1, got 1\.5"):
        KoordinatorEstimator(level=(0.5, 1.5))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 5, 24, 100, 400]), st.sampled_from([0.0, 0.2, 0.5, 0.98, 1.3, np.nan]), st.booleans()
        ),
        min_size=1,
        max_size=60,
    )
)
def test_memory_of_the_last_days_is_that_of_a_plain_look_at_all_windows(
    make_windows: MakeWindows, steps: list[tuple[int, float, bool]]
) -> None:
    """Each window ends some hours after the one before, has a share of memory, and may be the first of a new run."""
    gaps_h, shares, begins = zip(*steps, strict=True)
    windows = make_windows([0.1] * len(steps), list(shares))
    windows.end_us[:] = DAY_US // 24 * np.cumsum(gaps_h)
    windows.scheduled_us[:] = np.cumsum(begins)
    krr = KrrEstimator(min_samples=1).update(_slot(windows), windows).reservation[:, 1]
    vpa = VpaEstimator(margin=0.0).update(_slot(windows), windows).reservation[:, 1]
    end_us = windows.end_us.tolist()
    killed = [begins[k] and k > 0 and shares[k - 1] >= 0.98 for k in range(len(steps))]
    peaks: dict[int, float] = {}  # by day of the task's age
    age = 0
    for i, now_us in enumerate(end_us):
        lately = [k for k in range(i + 1) if now_us // DAY_US - end_us[k] // DAY_US < 14]
        known = [shares[k] * 1.15 for k in lately if not np.isnan(shares[k])]
        if any(killed[k] for k in lately):
            known += [1.25] * bool(known)
        assert krr[i] == pytest.approx(max(known, default=np.nan), rel=1e-6, nan_ok=True)
        if killed[i]:
            peaks[age] = 1.2 * max(1.0, peaks[age])
        age = (now_us - end_us[0]) // DAY_US
        if not np.isnan(shares[i]):
            peaks[age] = max(shares[i], peaks.get(age, 0.0))
        weight = {peak: 0.0 for peak in peaks.values()}
        for day, peak in peaks.items():
            weight[peak] += 0.5 ** (age - day) * (age - day < 8)
        rising = np.array(sorted(weight))
        up_to = np.cumsum([weight[peak] for peak in rising])
        if len(rising) and up_to[-1] > 0:
            peak = rising[np.argmax(up_to >= 0.9 * up_to[-1] * (1 - 1e-9))]
            assert vpa[i] == pytest.approx(RELATIVE.end[np.digitize(peak, RELATIVE.start) - 1])
        else:
            assert np.isnan(vpa[i])
