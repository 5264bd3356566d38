"""Autopilot's recommenders, worked by hand and against the formulas written out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.windows import LEVELS, Windows
from reclaim.training.estimators.autopilot.argmin import AutopilotMlEstimator
from reclaim.training.estimators.autopilot.moving_window import AutopilotMeanEstimator, AutopilotPercentileEstimator
from reclaim.training.estimators.histogram import Grid

MakeWindows = Callable[..., Windows]
WINDOW_S = 300.0


def _slot(windows: Windows) -> NDArray[np.int64]:
    return np.zeros(len(windows), np.int64)


def _without_shape(windows: Windows) -> Windows:
    windows.percentiles[:] = np.nan
    return windows


def test_the_mean_halves_the_weight_of_a_window_every_half_life(make_windows: MakeWindows) -> None:
    # the fixture's mean CPU is 0.8 of what is asked for. 0.8 and 0.4 with a half-life of one window: (0.5 * 0.8 + 0.4)
    # / 1.5; memory 0.6 and 0.3 with a half-life of two: weights 0.7071 and 1
    windows = make_windows([1.0, 0.5], [0.6, 0.3])
    mean = AutopilotMeanEstimator((WINDOW_S, 2 * WINDOW_S), margin=0.0, hold=1)
    cpu, memory = mean.update(_slot(windows), windows).reservation[1]
    assert cpu == pytest.approx(0.8 / 1.5)
    assert memory == pytest.approx((0.5**0.5 * 0.6 + 0.3) / (1 + 0.5**0.5))


def test_the_margin_is_added_and_the_largest_of_the_last_answers_held(make_windows: MakeWindows) -> None:
    windows = make_windows([0.1, 0.5, 0.1, 0.1], limit=(2.0, 2.0))  # forgotten at once: a half-life of a second
    mean = AutopilotMeanEstimator((1.0, 1.0), margin=0.1, hold=2)
    memory = mean.update(_slot(windows), windows).reservation[:, 1]
    assert memory.tolist() == pytest.approx([0.11, 0.55, 0.55, 0.11])


def test_each_answer_is_the_largest_of_the_last_ones_however_they_rise_and_fall(make_windows: MakeWindows) -> None:
    rng = np.random.default_rng(4)
    windows = make_windows(rng.random(40), rng.random(40))
    alone, held = (
        AutopilotMeanEstimator((600.0, 600.0), margin=0.0, hold=hold).update(_slot(windows), windows).reservation
        for hold in (1, 5)
    )
    largest = [alone[max(k - 4, 0) : k + 1].max(axis=0) for k in range(40)]
    np.testing.assert_array_equal(held, largest)


def test_the_percentile_is_of_the_work_and_not_of_the_time(make_windows: MakeWindows) -> None:
    # Nine windows at a memory of 0.1 and one at 0.9, all of the same weight: ends of buckets 0.1025 and 0.9025, so the
    # work is 9 * 0.1025 = 0.9225 and 0.9025. Up to 50.5 % of it is done at 0.1; of the time it would be 90 %.
    windows = make_windows([0.1] * 10, [0.1] * 9 + [0.9])
    for level, expected in ((50.0, 0.1025), (51.0, 0.9025)):
        percentile = AutopilotPercentileEstimator((95.0, level), (1e12, 1e12), margin=0.0, hold=1)
        assert percentile.update(_slot(windows), windows).reservation[9, 1] == pytest.approx(expected)


def test_a_windows_cpu_is_spread_over_its_known_percentiles(make_windows: MakeWindows) -> None:
    # Known: 0 % at 0.1, 50 % at 0.3, 100 % at 0.5: half the time at 0.2, half at 0.4. Work: 0.2025 and 0.4025 halves,
    # so a third of it, and all of it
    windows = _without_shape(make_windows([0.9]))
    for level, usage in ((0, 0.1), (50, 0.3), (100, 0.5)):
        windows.percentiles[0, LEVELS.index(level)] = usage
    for percent, expected in ((33.0, 0.2025), (34.0, 0.4025)):
        percentile = AutopilotPercentileEstimator((percent, 98.0), margin=0.0, hold=1)
        assert percentile.update(_slot(windows), windows).reservation[0, 0] == pytest.approx(expected)


def test_without_percentiles_all_of_a_window_is_at_its_mean(make_windows: MakeWindows) -> None:
    windows = _without_shape(make_windows([0.5]))  # the mean is 0.4: bucket 160 of 400, which ends at 0.4025
    percentile = AutopilotPercentileEstimator(margin=0.0, hold=1)
    assert percentile.update(_slot(windows), windows).reservation[0, 0] == pytest.approx(0.4025)


def test_the_ensemble_takes_a_windows_percentiles_bucket_by_bucket(make_windows: MakeWindows) -> None:
    # Known: 0 % at 0.1, 50 % at 0.3, 100 % at 0.5: half the time at 0.2, half at 0.4. One model that forgets at once: a
    # limit of 0.2 is overrun for half the time, one of 0.4 has too much for the other half
    windows = _without_shape(make_windows([0.9]))
    for level, usage in ((0, 0.1), (50, 0.3), (100, 0.5)):
        windows.percentiles[0, LEVELS.index(level)] = usage
    low, high = END[np.digitize([0.2, 0.4], GRID.start) - 1]
    for overrun, expected in ((0.2, low), (0.3, high)):
        ml = AutopilotMlEstimator((1.0,), (0,), overrun=overrun, underrun=0.25, margin=0.0, hold=1)
        assert ml.update(_slot(windows), windows).reservation[0, 0] == pytest.approx(expected)


GRID = Grid(0.005, 1.0, 1.1)
END = GRID.end


def test_the_ensemble_names_the_smallest_limit_that_a_steady_task_keeps_to(make_windows: MakeWindows) -> None:
    # all of the time in one bucket: any other limit costs overrun or underrun, and margins too
    windows = make_windows([0.3] * 5)
    memory = AutopilotMlEstimator(margin=0.0, hold=1).update(_slot(windows), windows).reservation[:, 1]
    assert memory.tolist() == pytest.approx([END[np.digitize(0.3, GRID.start) - 1]] * 5)


def test_one_model_weighs_overrun_against_underrun_by_hand(make_windows: MakeWindows) -> None:
    # One model, d_m 0.5; memory at A = 0.2, then B = 0.6. After the first: all mass 0.5 at A, L' = A. After the second:
    # 0.25 at A, 0.5 at B. Cost of A: overrun 0.5 * w_o, of B: underrun 0.25 * w_u + w_dl for the change.
    # With w_o 0.5, w_u 0.25: 0.25 against 0.0625 + w_dl; the ensemble stays at A iff w_dl > 0.1875
    windows = make_windows([0.2, 0.6])
    a, b = END[np.digitize([0.2, 0.6], GRID.start) - 1]
    for change, expected in ((0.18, b), (0.195, a)):
        ml = AutopilotMlEstimator((0.5,), (0,), limit_change=change, margin=0.0, hold=1)
        assert ml.update(_slot(windows), windows).reservation[:, 1].tolist() == pytest.approx([a, expected])


def test_a_model_pays_for_a_move_of_its_candidate_even_where_its_limit_stays_at_the_last_bucket(
    make_windows: MakeWindows,
) -> None:
    # One decay that forgets at once, margins of 0 and 1 buckets; memory in the last bucket Z, the one before it Y, then
    # in X. Both models begin at Z, with costs of 0. At Y a stay would cost w_u 0.5, so L' moves for w_dl 0.4. Margin 0:
    # 0.5 * 0.4 = 0.2, and 0.6 with the new limit. Margin 1, still at Z: 0.5 * (0.5 + 0.4) = 0.45, and 0.75 as another
    # model. Margin 0 stays, and names X: 0.5 * 0.2 + 0.5 * 0.4 against 0.5 * 0.45 + 0.5 * (0.5 + 0.4). Had the move at
    # Y been free, margin 1 would have won with 0.25 + 0.3 there, and with 0.575 + 0.4 against 0.3 + 0.3 + 0.4 at X.
    windows = make_windows([0.5] * 3, [1.02, 0.95, 0.5])
    ml = AutopilotMlEstimator(
        (1.0,), (0, 1), overrun=1.0, underrun=0.5, limit_change=0.4, model_change=0.3, rate=0.5, margin=0.0, hold=1
    )
    memory = ml.update(_slot(windows), windows).reservation[:, 1]
    assert memory.tolist() == pytest.approx([END[-1], END[-1], END[np.digitize(0.5, GRID.start) - 1]])


@pytest.mark.parametrize("w_dl", [0.1, 0.6])  # with 0.6, models stay at limits far from all that they remember
@pytest.mark.parametrize("decays", [(0.5, 1.0), (0.1, 0.2, 0.35, 0.5, 0.75, 1.0)])  # more than are folded at a time
@pytest.mark.parametrize("seed", range(4))
def test_the_ensemble_agrees_with_its_formulas_written_out(
    make_windows: MakeWindows, seed: int, decays: tuple[float, ...], w_dl: float
) -> None:
    rng = np.random.default_rng(seed)
    usage = rng.choice([0.1, 0.25, 0.5, 0.9], 60) * rng.uniform(0.9, 1.1, 60)
    usage[20 + 5 * seed :] = (0.1, 0.9)[seed % 2]
    windows = make_windows(usage.tolist())
    margins, w_o, w_u, w_dm, rate = (0, 1), 0.5, 0.25, 0.1, 0.75
    ours = (
        AutopilotMlEstimator(decays, limit_change=w_dl, margin=0.0, hold=1)
        .update(_slot(windows), windows)
        .reservation[:, 1]
    )
    n = len(END)
    over, under = np.zeros((len(decays), n)), np.zeros((len(decays), n))
    picked: list[int | None] = [None] * len(decays)
    cost = np.zeros((len(decays), len(margins)))
    last: tuple[tuple[int, int], int] | None = None
    for i, value in enumerate(usage):
        bucket = int(np.digitize(value, GRID.start)) - 1
        limits, total = {}, {}
        for m, d in enumerate(decays):
            over[m] = (1 - d) * over[m] + d * (bucket > np.arange(n))
            under[m] = (1 - d) * under[m] + d * (bucket < np.arange(n))
            changes = np.zeros(n) if picked[m] is None else w_dl * (np.arange(n) != picked[m])
            new = int(np.argmin(np.round(w_o * over[m] + w_u * under[m] + changes, 6)))
            moved = 0.0 if picked[m] is None else w_dl * (new != picked[m])
            picked[m] = new
            for j, step in enumerate(margins):
                at = min(new + step, n - 1)
                cost[m, j] = rate * (w_o * over[m, at] + w_u * under[m, at] + moved) + (1 - rate) * cost[m, j]
                limits[m, j] = at
                total[m, j] = cost[m, j]
                if last is not None:
                    total[m, j] += w_dm * ((m, j) != last[0]) + w_dl * (at != last[1])
        least = min(total.values())
        model = next(key for key, value in total.items() if value <= least + 1e-6)
        last = (model, limits[model])
        assert ours[i] == pytest.approx(END[limits[model]]), i


def test_impossible_settings_are_refused_with_the_rule() -> None:
    with pytest.raises(ConfigError, match="expected margin > -1 and hold >= 1"):
        AutopilotMeanEstimator(hold=0)
    with pytest.raises(ConfigError, match="decays and rate must be above 0 and at most 1"):
        AutopilotMlEstimator(decays=(0.0,))
    with pytest.raises(ConfigError, match="margins must be whole numbers from 0 on"):
        AutopilotMlEstimator(margins=(-1,))
    with pytest.raises(ConfigError, match="weights must be above 0"):
        AutopilotMlEstimator(overrun=0.0)
    with pytest.raises(ConfigError, match="level must be one number above 0 for each of"):
        AutopilotPercentileEstimator(level=(95.0,))
