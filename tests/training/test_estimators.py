"""Borg's estimator, the statistical ones and the margins, worked by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.windows import Windows
from reclaim.training.estimators.base import CAP, JUMP, MODEL, STARTUP, STATISTIC, UNKNOWN, Estimate
from reclaim.training.estimators.borg import BorgEstimator
from reclaim.training.estimators.margin import Guarded, Margin, three_margins
from reclaim.training.estimators.statistical import (
    LimitEstimator,
    MovingMaxEstimator,
    NSigmaEstimator,
    PercentileEstimator,
)

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


def test_borg_holds_for_longer_when_told(make_windows: MakeWindows) -> None:
    windows = make_windows([0.2] * 5)
    estimate = BorgEstimator(half_life_s=WINDOW_S, startup_s=3 * WINDOW_S).update(_slot(windows), windows)
    # ages at the ends: 300, 600 (held), 900 (not below 900: decays), …
    assert estimate.reservation[:, 0].tolist() == pytest.approx([1.0, 1.0, 0.6, 0.4, 0.3])


def test_borg_jumps_up_at_once_and_decays_from_there(make_windows: MakeWindows) -> None:
    windows = make_windows([0.2, 0.2, 0.2, 0.9, 0.1, 0.1])
    reservation = BorgEstimator(half_life_s=WINDOW_S).update(_slot(windows), windows).reservation[:, 0]
    # 0.4 before the burst; 0.9 with it; then 0.1 + 0.8 / 2 and 0.1 + 0.4 / 2
    assert reservation[2:].tolist() == pytest.approx([0.4, 0.9, 0.5, 0.3])


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
    assert estimate.reservation[:2].tolist() == [[2.0, 2.0]] * 2  # the limit until warm
    assert (estimate.rule[:2] == UNKNOWN).all()


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
    margins = three_margins((0.5, 0.25), (-0.1, 0.05))
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
