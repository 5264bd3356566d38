"""Settings of statistical estimators: chosen by hand-made rows, and answered by one object."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reclaim.data.windows import P90, Windows, concatenate, empty_windows
from reclaim.training.estimators.registry import build_estimator
from reclaim.training.margins.calibrate import calibrate, guarded_reservations
from reclaim.training.margins.margin import MARGIN_NAMES, NO_MARGIN, Budgets, Guarded, Margin
from reclaim.training.margins.tune import TunedEstimator, choose_settings, tuning_facts

A, B = {"half_life_s": 600.0, "margin": 0.5}, {"half_life_s": 43_200.0}
TUNING = {"baseline": (A, B), "aggressive": (B, B)}


def test_the_candidate_that_reclaims_most_at_the_margin_that_keeps_the_budget_is_chosen_by_resource_and_budget() -> (
    None
):
    # 10 rows of limit 10 in need of 4, but the last one of 8. "level" says 4 for all: with no violation allowed its
    # margin is 100 % and it reserves 8 everywhere; with one allowed it reserves 4. "exact" says 5, and 8 for the last
    # row: it needs a margin of 0 %, or of -20 % where one row may violate, which is 4 for all but 6.4 for the last.
    windows = empty_windows(10)
    windows.limit[:], windows.percentiles[:, P90], windows.end_us[:] = 10.0, 0.0, 1
    target = np.full((10, 2), 0.4)
    target[-1] = 0.8
    level, exact = np.full((10, 2), 4.0), np.full((10, 2), 5.0)
    exact[-1] = 8.0
    exact[:, 1] = 9.0  # of memory it wastes
    tuning = choose_settings([level, exact], [A, B], windows, target, Budgets(0.05, 0.1))
    assert tuning == {"baseline": (B, A), "aggressive": (A, A)}
    assert tuning_facts(tuning)["baseline"] == {"cpu": B, "memory": A}


def test_of_equal_candidates_the_first_is_chosen() -> None:
    windows = empty_windows(10)
    windows.limit[:], windows.percentiles[:, P90], windows.end_us[:] = 10.0, 0.0, 1
    same = np.full((10, 2), 4.0)
    assert choose_settings([same, same], [A, B], windows, same / 10)["baseline"] == (A, A)


def test_a_candidate_that_loses_fewer_rows_than_the_budget_that_is_given_may_be_chosen() -> None:
    # all need 4: "idle" says so for eight of ten and nothing for two, which is more than the default budgets allow
    windows = empty_windows(10)
    windows.limit[:], windows.percentiles[:, P90], windows.end_us[:] = 10.0, 0.0, 1
    idle, level = np.full((10, 2), 4.0), np.full((10, 2), 8.0)
    idle[:2] = 0.0
    target = np.full((10, 2), 0.4)
    assert choose_settings([idle, level], [A, B], windows, target, Budgets(0.3, 0.3))["aggressive"] == (A, A)
    assert choose_settings([idle, level], [A, B], windows, target)["aggressive"] == (B, B)


def test_each_margin_has_the_candidate_that_keeps_its_own_budget() -> None:
    # nine of ten are needed: "level" says so for all, and reclaims a tenth; "idle" says nothing for two of ten rows. Of
    # these the aggressive budget lets three violate, so it reserves nine for the other eight; the baseline allows one,
    # so it would reserve the limit for the other eight, and reclaim a fifth by violating
    windows = empty_windows(10)
    windows.limit[:], windows.percentiles[:, P90], windows.end_us[:] = 10.0, 0.0, 1
    idle, level = np.full((10, 2), 9.0), np.full((10, 2), 9.0)
    idle[:2] = 0.0
    tuning = choose_settings([idle, level], [A, B], windows, np.full((10, 2), 0.9), Budgets(0.1, 0.3))
    assert tuning == {"baseline": (B, B), "aggressive": (A, A)}


def test_facts_of_a_tuning_have_lists_as_json_does() -> None:
    facts = tuning_facts({"baseline": ({"levels": (0.5, 0.9)}, B), "aggressive": (B, B)})
    assert facts["baseline"]["cpu"]["levels"] == [0.5, 0.9]


def test_a_tuned_estimator_continues_where_its_state_was_taken(make_windows: Callable[..., Windows]) -> None:
    windows = make_windows(np.random.default_rng(3).random(30), np.random.default_rng(4).random(30))
    slot, first, rest = np.zeros(15, np.int64), np.arange(15), np.arange(15, 30)
    whole, again = TunedEstimator("borg", TUNING), TunedEstimator("borg", TUNING)
    whole.update(slot, windows.take(first))
    again.restore(whole.state())
    for budget, of in again.answer_each(slot, windows.take(rest)).of.items():
        expected = TunedEstimator("borg", TUNING).answer_each(np.zeros(30, np.int64), windows).of[budget]
        np.testing.assert_array_equal(of.reservation, expected.reservation[rest])


def test_each_resource_is_answered_by_the_settings_chosen_for_it(make_windows: Callable[..., Windows]) -> None:
    rng = np.random.default_rng(1)
    windows = concatenate([make_windows(rng.random(30), rng.random(30), task=task) for task in range(3)])
    slot = windows.task_numbers()
    a, b = (build_estimator("borg", settings).update(slot, windows).reservation for settings in (A, B))
    found = TunedEstimator("borg", TUNING).answer_each(slot, windows).of
    np.testing.assert_array_equal(found["baseline"].reservation, np.stack([a[:, 0], b[:, 1]], axis=1))
    np.testing.assert_array_equal(found["aggressive"].reservation, b)


def test_the_guarded_estimator_under_a_margin_reserves_what_was_calibrated(
    make_windows: Callable[..., Windows],
) -> None:
    rng = np.random.default_rng(2)
    windows = concatenate([make_windows(rng.random(30), rng.random(30), task=task) for task in range(3)])
    slot = windows.task_numbers()
    bases = TunedEstimator("borg", TUNING).answer_each(slot, windows)
    made = calibrate(bases, windows, rng.random((90, 2)), Budgets(0.05, 0.2))
    margins = {name: of for name, of in made.settings.items() if isinstance(of, Margin)}
    replayed = guarded_reservations(bases, windows, margins)
    for name in MARGIN_NAMES:
        served = Guarded(TunedEstimator("borg", TUNING, margins, name), NO_MARGIN)
        np.testing.assert_array_equal(served.update(slot, windows).reservation, replayed[name])
