"""Borg's estimator, the statistical ones and the margins, worked by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.windows import Windows
from reclaim.training.estimators.base import CAP, JUMP, LIMIT, MODEL, STARTUP, STATISTIC, UNKNOWN, Estimate
from reclaim.training.estimators.borg import BorgEstimator
from reclaim.training.estimators.fixed import FixedShareEstimator, LimitEstimator
from reclaim.training.estimators.last_windows import (
    MaxNSigmaPercentileEstimator,
    MovingMaxEstimator,
    NSigmaEstimator,
    PercentileEstimator,
)
from reclaim.training.estimators.seasonal import SeasonalEstimator
from reclaim.training.estimators.so_far import MaxSoFarEstimator, MeanSoFarEstimator
from reclaim.training.margins.answers import Widened
from reclaim.training.margins.margin import MARGIN_NAMES, Guarded, Margin, guarded_amounts, three_margins

MakeWindows = Callable[..., Windows]
WINDOW_S = 300.0


def _slot(windows: Windows) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.zeros(len(windows), np.int64)


def test_borg_holds_the_limit_then_halves_the_distance_to_usage_every_half_life(make_windows: MakeWindows) -> None:
    # usage 0.2 of a limit of 1, half-life one window. The run began with the first window, which ends at an age of
    # exactly 300 s, so the hold is over by then. The distance to usage starts at 0.8 (a first window only sets it).
    windows = make_windows([0.2] * 4)
    estimate = BorgEstimator(half_life_s=WINDOW_S).update(_slot(windows), windows)
    assert estimate.reservation[:, 0].tolist() == pytest.approx([1.0, 0.6, 0.4, 0.3])
    assert (estimate.rule == STATISTIC).all()


def test_borg_holds_for_a_longer_startup_time(make_windows: MakeWindows) -> None:
    windows = make_windows([0.2] * 5)
    estimate = BorgEstimator(half_life_s=WINDOW_S, startup_s=3 * WINDOW_S).update(_slot(windows), windows)
    # ages at the ends: 300, 600 (held), 900 (not below 900: decays), …
    assert estimate.reservation[:, 0].tolist() == pytest.approx([1.0, 1.0, 0.6, 0.4, 0.3])


def test_borg_jumps_up_at_once_and_decays_from_there(make_windows: MakeWindows) -> None:
    windows = make_windows([0.2, 0.2, 0.2, 0.9, 0.1, 0.1])
    reservation = BorgEstimator(half_life_s=WINDOW_S).update(_slot(windows), windows).reservation[:, 0]
    # 0.4 before the burst; 0.9 with it; then 0.1 + 0.8 / 2 and 0.1 + 0.4 / 2
    assert reservation[2:].tolist() == pytest.approx([0.4, 0.9, 0.5, 0.3])


def test_borg_decays_towards_usage_plus_the_margin_and_not_a_decaying_state_times_it(make_windows: MakeWindows) -> None:
    # half-life one window, margin 50 %, limit 1: usage 0.2 decays towards 0.3; usage 0.4 lifts to 0.6, above the 0.3875
    # of then; 0.9 would lift to 1.35, which is the limit. The margin times the state without one would be 1.5 * 0.6 in
    # the second window, 0.9.
    windows = make_windows([0.2, 0.2, 0.2, 0.2, 0.4, 0.2, 0.9, 0.2])
    reservation = BorgEstimator(half_life_s=WINDOW_S, margin=0.5).update(_slot(windows), windows).reservation[:, 0]
    assert reservation.tolist() == pytest.approx([1.0, 0.65, 0.475, 0.3875, 0.6, 0.45, 1.0, 0.65])


def test_a_margin_of_borg_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"margin must be at least 0, got -0\.1"):
        BorgEstimator(margin=-0.1)


def test_borg_decays_by_time_and_not_by_windows(make_windows: MakeWindows) -> None:
    windows = make_windows([0.2, 0.2, 0.2])
    windows.end_us[2] += 600_000_000  # the third window ends three half-lives after the second
    reservation = BorgEstimator(half_life_s=WINDOW_S).update(_slot(windows), windows).reservation[:, 0]
    assert reservation[2] == pytest.approx(0.2 + 0.4 / 8)


def test_borg_starts_over_when_the_task_does(make_windows: MakeWindows) -> None:
    windows = make_windows([0.2] * 6)
    windows.scheduled_us[:3] = windows.start_us[0]
    windows.scheduled_us[3:] = windows.start_us[3]
    reservation = BorgEstimator(half_life_s=WINDOW_S).update(_slot(windows), windows).reservation[:, 0]
    assert reservation.tolist() == pytest.approx([1.0, 0.6, 0.4, 1.0, 0.6, 0.4])


def test_nsigma_is_the_mean_plus_n_sample_deviations_over_the_limit(make_windows: MakeWindows) -> None:
    # ratios 0.1, 0.2, 0.3: mean 0.2, sample deviation 0.1; limit 2, so usage is twice the ratio
    windows = make_windows([0.2, 0.4, 0.6], limit=(2.0, 2.0))
    estimate = NSigmaEstimator(n=2, context=3, min_samples=3).update(_slot(windows), windows)
    assert estimate.reservation[2].tolist() == pytest.approx([(0.2 + 2 * 0.1) * 2] * 2)
    assert np.isnan(estimate.reservation[:2]).all()  # until warm
    assert (estimate.rule[:2] == UNKNOWN).all()


@pytest.mark.parametrize("margin", [-0.5, 0.0, 3.0])
def test_no_margin_moves_the_limit_of_a_task_of_which_an_estimator_says_nothing(
    make_windows: MakeWindows, margin: float
) -> None:
    windows, named = make_windows([0.2, 0.4, 0.6], limit=(2.0, 2.0)), Margin("medium", (margin, margin))
    estimate = NSigmaEstimator(n=2, context=3, min_samples=3).update(_slot(windows), windows)
    answers = Widened.alike(estimate)
    in_force = answers.under(dict.fromkeys(MARGIN_NAMES, named), "medium", windows)
    for reserved in (Guarded(LimitEstimator(), named).adjust(estimate, windows).reservation,
                     guarded_amounts(in_force, windows)):  # fmt: skip
        assert reserved[:2].tolist() == [[2.0, 2.0]] * 2
        assert reserved[2].tolist() == pytest.approx([min(max(0.8 * (1 + margin), 0.6), 2.0)] * 2)


def test_nsigma_forgets_what_is_older_than_its_context(make_windows: MakeWindows) -> None:
    windows = make_windows([0.9, 0.1, 0.2, 0.3])
    estimate = NSigmaEstimator(n=2, context=3, min_samples=3).update(_slot(windows), windows)
    assert estimate.reservation[3, 0] == pytest.approx(0.4)


def test_percentile_interpolates_between_neighbours(make_windows: MakeWindows) -> None:
    # 75 % of 0 … 4 positions of [0.1, 0.2, 0.3, 0.4, 0.5] is the fourth; 90 % is 0.6 of the way to the fifth
    windows = make_windows([0.3, 0.5, 0.1, 0.4, 0.2])
    for level, expected in ((75.0, 0.4), (90.0, 0.46), (100.0, 0.5), (0.0, 0.1)):
        estimate = PercentileEstimator(level, context=5, min_samples=5).update(_slot(windows), windows)
        assert estimate.reservation[4, 0] == pytest.approx(expected)


def test_moving_max_is_the_largest_of_the_last_windows(make_windows: MakeWindows) -> None:
    windows = make_windows([0.1, 0.7, 0.2, 0.3, 0.1])
    estimate = MovingMaxEstimator(context=3, min_samples=1).update(_slot(windows), windows)
    assert estimate.reservation[:, 0].tolist() == pytest.approx([0.1, 0.7, 0.7, 0.7, 0.3])


def test_moving_max_knows_when_the_largest_is_forgotten(make_windows: MakeWindows) -> None:
    rng = np.random.default_rng(1)
    usage = rng.choice([0.1, 0.25, 0.5, 0.75], 200)  # ties, and each exact as a float32 but the first
    windows = make_windows(usage)
    reservation = MovingMaxEstimator(context=5, min_samples=1).update(_slot(windows), windows).reservation[:, 0]
    expected = [usage[max(i - 4, 0) : i + 1].max() for i in range(200)]
    assert reservation.tolist() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("level", [0.0, 30.0, 50.0, 95.0, 99.0, 100.0])
def test_percentiles_and_deviations_are_numpys(make_windows: MakeWindows, level: float) -> None:
    usage = np.random.default_rng(2).random(60)
    windows = make_windows(usage)
    percentile = PercentileEstimator(level, context=30, min_samples=7).update(_slot(windows), windows).reservation
    sigma = NSigmaEstimator(3, context=30, min_samples=7).update(_slot(windows), windows).reservation
    for i in range(6, 60):
        last = usage[max(i - 29, 0) : i + 1]
        assert percentile[i, 1] == pytest.approx(np.percentile(last, level), rel=1e-12)
        assert sigma[i, 1] == pytest.approx(last.mean() + 3 * last.std(ddof=1), rel=1e-12)


def test_the_larger_of_nsigma_and_percentile_wins(make_windows: MakeWindows) -> None:
    # of 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, p100 0.3: 2 deviations make 0.4, half a one 0.25
    windows = make_windows([0.1, 0.2, 0.3])
    for n, expected in ((2.0, 0.4), (0.5, 0.3)):
        estimator = MaxNSigmaPercentileEstimator(n, 100.0, context=3, min_samples=3)
        assert estimator.update(_slot(windows), windows).reservation[2, 0] == pytest.approx(expected)


def test_a_fixed_share_of_the_limit_is_the_limits_rule(make_windows: MakeWindows) -> None:
    windows = make_windows([0.1, 0.2], limit=(3.0, 5.0))
    estimate = FixedShareEstimator().update(_slot(windows), windows)
    assert estimate.reservation.tolist() == [[0.9 * 3.0, 4.5]] * 2
    assert (estimate.rule == LIMIT).all()
    with pytest.raises(ConfigError, match=r"share must be above 0 and at most 1, got 1\.1"):
        FixedShareEstimator(1.1)


def test_so_far_counts_all_windows_capped_to_their_limits(make_windows: MakeWindows) -> None:
    # memory above its limit of 1 counts as 1; usage does not follow the limit: it stays 1 when that becomes 4
    windows = make_windows([0.2] * 4, [0.3, 1.7, 0.5, 0.2])
    windows.limit[3] = 4.0
    largest = MaxSoFarEstimator(min_samples=2).update(_slot(windows), windows).reservation[:, 1]
    mean = MeanSoFarEstimator(min_samples=2).update(_slot(windows), windows).reservation[:, 1]
    assert largest.tolist() == pytest.approx([np.nan, 1.0, 1.0, 1.0], nan_ok=True)
    assert mean.tolist() == pytest.approx([np.nan, 0.65, 0.6, 0.5], nan_ok=True)
    with pytest.raises(ConfigError, match="min_samples must be at least 1, got 0"):
        MaxSoFarEstimator(0)


HOUR_WINDOWS = 12


def _day_by_hours(make_windows: MakeWindows, usage_by_hour: list[float]) -> Windows:
    """Return windows from 00:00 on, all of an hour alike."""
    return make_windows(np.repeat(usage_by_hour, HOUR_WINDOWS), start_us=86_400_000_000)


def test_what_was_used_so_far_counts_neither_unknown_windows_nor_one_twice(make_windows: MakeWindows) -> None:
    windows = make_windows([0.2, np.nan, 0.5, 0.9])
    windows.end_us[3] = windows.end_us[2]  # the same window again
    for estimator, expected in ((MeanSoFarEstimator(2), 0.35), (MaxSoFarEstimator(2), 0.5)):
        reservation = estimator.update(_slot(windows), windows).reservation[:, 0].tolist()
        assert reservation == pytest.approx([np.nan, np.nan, expected, expected], nan_ok=True)


def test_seasonal_reserves_what_the_coming_hour_demanded_yesterday(make_windows: MakeWindows) -> None:
    hours = [0.01 * (1 + h) for h in range(24)]  # 1 % in the first hour, 24 % in the last
    windows = _day_by_hours(make_windows, [*hours, 0.5, 0.5])
    reservation = SeasonalEstimator().update(_slot(windows), windows).reservation[:, 0]
    day = 24 * HOUR_WINDOWS
    assert np.isnan(reservation[: day - 1]).all()  # less than a day of history
    # at 00:00 sharp the coming hour is yesterday's first; at 00:05 it touches the second one too
    assert reservation[day - 1] == pytest.approx(0.01)
    assert reservation[day : day + HOUR_WINDOWS].tolist() == pytest.approx([0.02] * HOUR_WINDOWS)
    assert reservation[day + HOUR_WINDOWS] == pytest.approx(0.03)
    farther = SeasonalEstimator(hours=3).update(_slot(windows), windows).reservation[:, 0]
    assert farther[day] == pytest.approx(0.04)


def test_seasonal_takes_the_hours_since_where_yesterdays_are_a_gap(make_windows: MakeWindows) -> None:
    windows = _day_by_hours(make_windows, [0.1] * 26)
    kept = windows.take(np.r_[0 : HOUR_WINDOWS // 2, 20 * HOUR_WINDOWS : 26 * HOUR_WINDOWS])
    kept.percentiles[HOUR_WINDOWS // 2 :] = 0.3
    # at 01:05 of the second day, nothing is known of 01:00 to 03:00 yesterday: the largest since is 0.3
    reservation = SeasonalEstimator().update(_slot(kept), kept).reservation[:, 0]
    assert reservation[-HOUR_WINDOWS] == pytest.approx(0.3)
    later = kept.take(slice(0, HOUR_WINDOWS // 2 + 1))
    later.start_us[-1] += 3 * 86_400_000_000
    later.end_us[-1] += 3 * 86_400_000_000
    later.percentiles[-1], later.usage[-1] = np.nan, np.nan
    gap = SeasonalEstimator().update(_slot(later), later)
    assert np.isnan(gap.reservation[-1, 0])  # days later nothing is left to go by
    assert gap.rule[-1, 0] == UNKNOWN
    with pytest.raises(ConfigError, match="hours must be between 1 and 23, got 24"):
        SeasonalEstimator(24)


def test_seasonal_forgets_hours_that_are_further_back_than_a_day(make_windows: MakeWindows) -> None:
    windows = _day_by_hours(make_windows, [0.8] * 26 + [0.2] * 50)
    reservation = SeasonalEstimator().update(_slot(windows), windows).reservation[:, 0]
    # one day after the last high hour has passed, all that the coming hour touches of yesterday is low
    since = (26 + 24) * HOUR_WINDOWS
    assert reservation[since - 2] == pytest.approx(0.8)
    assert reservation[since - 1 :].tolist() == pytest.approx([0.2] * (26 * HOUR_WINDOWS + 1))


def test_seasonal_takes_the_largest_of_the_hours_since_a_gap_and_not_the_last(make_windows: MakeWindows) -> None:
    hours = [0.1] * 20 + [0.3, 0.7, 0.5, np.nan, 0.4, 0.2]
    windows = _day_by_hours(make_windows, hours)
    kept = windows.take(np.r_[0 : HOUR_WINDOWS // 2, 20 * HOUR_WINDOWS : 26 * HOUR_WINDOWS])
    reservation = SeasonalEstimator().update(_slot(kept), kept).reservation[:, 0]
    assert reservation[-HOUR_WINDOWS:].tolist() == pytest.approx([0.7] * HOUR_WINDOWS)


def test_ratios_follow_a_changed_limit(make_windows: MakeWindows) -> None:
    windows = make_windows([0.5, 0.5, 0.5])
    windows.limit[2] = 3.0  # the ratio of the past, 0.5, times the limit in force
    estimate = MovingMaxEstimator(context=3, min_samples=1).update(_slot(windows), windows)
    assert estimate.reservation[2, 0] == pytest.approx(1.5)


def test_the_limit_estimator_reclaims_nothing(make_windows: MakeWindows) -> None:
    windows = make_windows([0.1, 0.2], limit=(3.0, 5.0))
    assert LimitEstimator().update(_slot(windows), windows).reservation.tolist() == [[3.0, 5.0]] * 2


def test_estimators_need_a_sensible_context() -> None:
    with pytest.raises(ConfigError, match="min_samples <= context"):
        MovingMaxEstimator(context=3, min_samples=4)
    with pytest.raises(ConfigError, match="level must be between 0 and 100 percent, got 101"):
        PercentileEstimator(101)


def test_medium_is_exactly_half_way() -> None:
    margins = three_margins(Margin("baseline", (0.5, 0.25)), Margin("aggressive", (-0.1, 0.05)))
    assert list(margins) == ["baseline", "medium", "aggressive"]
    assert margins["medium"].share == ((0.5 - 0.1) / 2, (0.25 + 0.05) / 2)


@pytest.mark.parametrize("share", [(0.1,), (-1.5, 0.0), (float("inf"), 0.0), (float("nan"), 0.0)])
def test_impossible_margins_are_refused(share: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="margin 'odd'"):
        Margin("odd", share)


def test_the_guards_apply_in_order_and_say_which_rule_won(make_windows: MakeWindows) -> None:
    # limit 1, margin 50 %: 0.4 becomes 0.6; 0.9 is capped; usage of 0.8 lifts 0.45 to 0.8; unknown keeps the limit;
    # a run of less than 300 s keeps its limit too
    windows = make_windows([0.1, 0.1, 0.8, 0.1, 0.1])
    windows.scheduled_us[:] = 1
    windows.scheduled_us[4] = windows.end_us[4] - 299_000_000
    bare = np.array([0.4, 0.9, 0.3, np.nan, 0.4])[:, None].repeat(2, axis=1)
    estimate = Estimate(bare, np.full(bare.shape, MODEL, np.uint8))
    guarded = Guarded(LimitEstimator(), Margin("medium", (0.5, 0.5))).adjust(estimate, windows)
    assert guarded.reservation[:, 0].tolist() == pytest.approx([0.6, 1.0, 0.8, 1.0, 1.0])
    assert guarded.rule[:, 1].tolist() == [MODEL, CAP, JUMP, UNKNOWN, STARTUP]
