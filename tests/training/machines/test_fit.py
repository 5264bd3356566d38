"""Tests that a location is fitted where it reclaims more on other machines, and the bound kept where it does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.training.machines import fit
from reclaim.training.machines.curve import INPUTS, MachineCurve, inputs_of
from reclaim.training.machines.fit import MachineRows, fit_curve, join_rows
from reclaim.training.machines.terms import (
    N_TERMS,
    PASSED,
    PAST,
    RATES,
    T_BAND,
    T_HELD,
    T_LIMIT,
    T_MEAN,
    T_PASSED,
    T_PAST,
    T_SQUARES,
    T_USAGE,
)
from tests.training.machines.curves import terms_of_curves

BUDGETS = (0.001, 0.01)


def machines(n: int, peak_of: NDArray[np.float64] | None = None, seed: int = 0) -> MachineRows:
    """Return snapshots of ten machines whose peak is 1.3 times the usage and some noise, or as given."""
    rng = np.random.default_rng(seed)
    sums = np.zeros((n, N_TERMS))
    sums[:, T_LIMIT] = rng.uniform(8, 12, n)
    sums[:, T_USAGE] = sums[:, T_LIMIT] * rng.uniform(0.1, 0.5, n)
    sums[:, T_MEAN] = sums[:, T_LIMIT] * 0.6
    sums[:, T_SQUARES] = sums[:, T_LIMIT]
    sums[:, T_PASSED:T_BAND] = sums[:, T_LIMIT, None] * np.linspace(0.6, 0.95, len(PASSED))
    sums[:, T_BAND:] = sums[:, T_LIMIT, None] * np.linspace(0.62, 0.9, len(RATES))
    peak = sums[:, T_USAGE] * 1.3 + rng.uniform(0, 0.2, n) if peak_of is None else peak_of
    return MachineRows(sums, peak, np.arange(n) % 10, 1.0)


def test_a_location_that_the_sums_tell_is_found_and_chosen() -> None:
    rows = machines(8_000)
    curve = fit_curve(rows, BUDGETS)
    assert curve.weights is not None
    unseen = machines(20_000, seed=1)
    for budget in BUDGETS:
        reserved = curve.peak(unseen.sums, curve.margin(budget), 1.0)
        assert (unseen.peak > reserved).mean() <= 2 * budget + 0.002  # eight of 8,000 peaks set the margin
        # the best there is: 1.3 times the usage, and all of the noise
        best = unseen.sums[:, T_USAGE] * 1.3 + 0.2
        assert reserved.sum() < 1.06 * best.sum()
    again = fit_curve(rows, BUDGETS)
    assert again == curve


@pytest.mark.parametrize(
    ("told_by_usage", "placed", "fitted"), [(0.03, False, True), (0.03, True, False), (0.12, True, True)]
)
def test_where_tasks_are_placed_by_it_a_fit_is_taken_only_if_it_gains_more_than_a_packing_loses(
    told_by_usage: float, placed: bool, fitted: bool
) -> None:
    # the bounds know what is used, and not that the peak rises with it by 3 or 12 points of the limits: a fit reclaims
    # some half of that more
    rows, (told, noise) = machines(8_000), np.random.default_rng(4).uniform(0, 1, (2, 8_000))
    rows.sums[:, T_USAGE] = rows.sums[:, T_LIMIT] * 0.3 * told
    peak = rows.sums[:, T_LIMIT] * (0.5 + told_by_usage * (told - 1) + 0.02 * noise)
    curve = fit_curve(MachineRows(rows.sums, peak, rows.machine, 1.0), BUDGETS, placed=placed)
    assert (curve.weights is not None) == fitted


@pytest.mark.parametrize("name", PAST)
def test_a_past_that_tells_the_peak_is_a_fourth_of_the_location_and_none_that_is_not_asked_for(name: str) -> None:
    rows, rng = machines(8_000), np.random.default_rng(4)
    limit, told = rows.sums[:, T_LIMIT], rng.uniform(0, 1, (len(PAST), 8_000))
    rows.sums[:, T_PAST:T_PASSED] = (limit * (0.3 + 0.2 * told)).T
    rows = replace(rows, peak=rows.peak + limit * 0.1 * told[PAST.index(name)])  # half of what that past rises by
    curve, without = fit_curve(rows, BUDGETS, pasts=PAST), fit_curve(rows, BUDGETS)
    assert curve.weights is not None
    weights = dict(zip(INPUTS, curve.weights, strict=True))
    assert weights[name] == pytest.approx(0.5 / 4, abs=0.02)  # one of four fits looks at it
    assert [weights[other] for other in PAST if other != name] == pytest.approx([0.0, 0.0], abs=0.02)
    assert weights["usage"] == pytest.approx(1.3, abs=0.1)
    of_all = [fit._weights(rows), *(fit._weights(rows, past) for past in PAST)]
    np.testing.assert_allclose(curve.weights, np.mean(of_all, axis=0))
    assert without.weights == tuple(of_all[0])
    assert [without.weights[INPUTS.index(past)] for past in PAST] == [0.0] * 3
    for past, of in zip(PAST, of_all[1:], strict=True):
        assert [of[INPUTS.index(other)] for other in PAST if other != past] == [0.0, 0.0]


def test_a_past_that_tells_something_else_on_other_machines_is_not_looked_at() -> None:
    # the peak rises with each past on machines of even numbers, and falls with it on the others
    rows, told = machines(8_000), np.random.default_rng(4).uniform(0, 1, 8_000)
    limit, way = rows.sums[:, T_LIMIT], np.where(rows.machine % 2 == 0, 1, -1)
    rows.sums[:, T_PAST:T_PASSED] = (limit * (0.3 + 0.2 * told))[:, None]
    rows = replace(rows, peak=rows.peak + limit * 0.1 * (0.5 + way * (told - 0.5)))
    curve = fit_curve(rows, BUDGETS, pasts=PAST)
    assert curve == fit_curve(rows, BUDGETS)
    assert curve.weights is not None


def test_a_fit_that_foresees_nothing_on_other_machines_is_not_chosen() -> None:
    # every machine has a peak of its own, which the sums cannot tell
    own = np.random.default_rng(2).uniform(3, 7, 10)[np.arange(8_000) % 10]
    curve = fit_curve(machines(8_000, own), BUDGETS)
    bound = fit_curve(machines(fit.FEWEST - 1, own[: fit.FEWEST - 1]), BUDGETS)
    assert bound.weights is None
    if curve.weights is not None:  # then it reclaims more, margins and all
        rows = machines(8_000, own)
        gain = [rows.reclaimed(curve, curve.margin(b)) - rows.reclaimed(bound, bound.margin(b)) for b in BUDGETS]
        assert sum(gain) > 0


def crowds(n: int, at_once: float) -> MachineRows:
    """Return snapshots of ten machines of some tasks of two kinds, of which a share peaks at once.

    A task has a limit of 1 and a peak that is even between 0.1 and 0.2, or of the second kind one time in ten more than
    that, up to the limit. Those at once are all at the same level of their curves, the others each by itself.
    """
    rng = np.random.default_rng(3)
    survival = np.array([[1.0, 0.0, 0.0], [1.0, 0.1, 0.0]], np.float32)[:, None]
    at = np.tile(np.array([0.1, 0.2, 1.0], np.float32), (2, 1, 1))
    of_kinds = terms_of_curves(survival, at, np.full((2, 1), 0.1), np.ones((2, 1)), np.full(2, 99), (1.0,))[:, 0]
    tasks = rng.integers(1, 20, (n, 2))
    same, own = np.tile(rng.random((n, 1, 1)), (1, 2, 20)), rng.random((n, 2, 20))
    level = np.where(rng.random((n, 1, 1)) < at_once, same, own)
    peak_of = np.where(level > 0.1, 0.1 + 0.1 * (1 - level) / 0.9, 0.2 + 0.8 * (0.1 - level) / 0.1)
    peak_of[:, 0] = 0.1 + 0.1 * (1 - level[:, 0])
    peak = np.where(np.arange(20) < tasks[:, :, None], peak_of, 0.0).sum(axis=(1, 2))
    return MachineRows(tasks @ of_kinds, peak, np.arange(n) % 10, 1.0)


@pytest.mark.parametrize("at_once", [0.0, 1.0])
def test_the_share_of_peaks_together_is_found(at_once: float) -> None:
    curve = fit_curve(crowds(2_900, at_once), BUDGETS)
    assert curve.weights is None
    assert curve.together == at_once


def test_the_share_together_is_the_one_that_reclaims_most_on_average_over_the_budgets_and_none_for_a_little() -> None:
    rows = crowds(1_000, 0.1)
    chosen = [fit_curve(rows, budgets).together for budgets in ((0.01,), (0.001,), (0.01, 0.001))]
    assert chosen == [0.0, 1.0, 0.75]  # of the last 54.3 % against 50.6 and 54.2
    reclaimed = []
    for share in (0.0, 0.25):
        bound = MachineCurve(together=share)
        bound = bound.with_margins(rows.scores(bound))
        reclaimed.append(rows.reclaimed(bound, bound.margin(0.1)))
    assert 0 < reclaimed[1] - reclaimed[0] < 0.001
    assert fit_curve(rows, (0.1,)).together == 0.0


def test_of_many_snapshots_those_that_are_fitted_to_are_drawn_from_all_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "MOST", 500)
    rows = machines(2_000)
    rows.peak[1_000:] += 0.2 * rows.sums[1_000:, T_LIMIT]
    location = MachineCurve(weights=tuple(fit._weights(rows)))
    assert (rows.scores(location) > 0).mean() < 0.05


def test_margins_are_those_that_the_peaks_asked_for() -> None:
    rows = machines(2_000)
    curve = fit_curve(rows, BUDGETS)
    assert curve.weights is None
    for budget in BUDGETS:
        over = rows.peak > curve.peak(rows.sums, curve.margin(budget), 1.0) * (1 + 1e-9)
        assert over.sum() <= budget * 2_000


def test_what_is_reclaimed_is_of_all_limits_those_of_tasks_without_a_forecast_among_them() -> None:
    rows, curve = machines(50), MachineCurve()
    with_held = MachineRows(rows.sums.copy(), rows.peak, rows.machine, 1.0)
    with_held.sums[:, T_HELD] = 3.0  # each is reserved whole
    limit, reclaimed = rows.sums[:, T_LIMIT].sum(), rows.reclaimed(curve, 2.0)
    assert 0 < reclaimed < 1
    assert with_held.reclaimed(curve, 2.0) == pytest.approx(reclaimed * limit / (limit + 50 * 3.0))


def test_scores_and_what_is_reclaimed_are_by_the_mean_limit_of_the_cell() -> None:
    rows, curve = replace(machines(50), mean_limit=3.0), MachineCurve(together=0.5)
    np.testing.assert_allclose(curve.peak(rows.sums, rows.scores(curve), 3.0), rows.peak)
    reserved = curve.peak(rows.sums, 1.0, 3.0).sum()
    assert rows.reclaimed(curve, 1.0) == pytest.approx(1 - reserved / rows.sums[:, T_LIMIT].sum())


def test_with_too_few_peaks_for_the_smallest_budget_the_bound_keeps_its_own_exponents() -> None:
    assert fit_curve(machines(999), BUDGETS) == MachineCurve()
    assert fit_curve(machines(1_000), BUDGETS) != MachineCurve()


def test_machines_of_two_sources_stay_different_ones() -> None:
    both = join_rows([machines(30), machines(20, seed=1)])
    assert both.machine.tolist() == [*(np.arange(30) % 10), *(np.arange(20) % 10 + 10)]
    assert len(both) == 50
    three = machines(3)
    assert join_rows([three, three]).machine.tolist() == [0, 1, 2, 4, 5, 6]  # each in its half
    np.testing.assert_array_equal(both.take(np.arange(30, 50)).peak, machines(20, seed=1).peak)


def test_snapshots_keep_their_mean_limit_and_a_source_without_any_takes_no_number() -> None:
    rows = replace(machines(10), mean_limit=3.0)
    assert rows.take(np.arange(4)).mean_limit == 3.0
    joined = join_rows([rows.take(np.arange(0)), rows])
    assert joined.mean_limit == 3.0
    assert joined.machine.tolist() == list(range(10))


def test_what_tasks_without_a_forecast_hold_is_no_part_of_the_location() -> None:
    rows = machines(2_000)
    held = np.random.default_rng(7).uniform(0, 5, len(rows))
    sums = rows.sums.copy()
    sums[:, T_HELD] = held
    nothing_else = np.zeros((1, N_TERMS))
    nothing_else[0, T_HELD] = 3.0  # a machine of which every task holds its limit
    with_held = MachineRows(
        np.concatenate([sums, nothing_else]), np.append(rows.peak + held, 3.0), np.append(rows.machine, 0), 1.0
    )
    np.testing.assert_allclose(fit._weights(with_held), fit._weights(rows), atol=1e-4)


def test_the_pinball_loss_is_least_where_a_fiftieth_is_above() -> None:
    rows = machines(20_000)
    location = MachineCurve(weights=tuple(fit._weights(rows)))
    assert (rows.scores(location) > 0).mean() == pytest.approx(1 - fit.LEVEL, abs=0.01)  # rounded off


def test_sums_that_differ_in_the_sixth_digit_give_the_same_location() -> None:
    # inputs that are much alike and few peaks that are large: the loss is flat near its least
    rows, rng = machines(8_000), np.random.default_rng(5)
    limit, own = rows.sums[:, T_LIMIT], rng.uniform(0.6, 0.9, 8_000)
    bands = own[:, None] + 0.05 * rng.random((8_000, len(RATES))).cumsum(axis=1)
    rows.sums[:, T_BAND:] = limit[:, None] * bands
    for term, below in ((T_USAGE, 0.3), (T_MEAN, 0.1)):
        rows.sums[:, term] = limit * (own - below + 0.05 * rng.standard_normal(8_000))
    rows = replace(rows, peak=limit * bands[:, 2] * (0.5 + 0.5 * rng.random(8_000) ** 6))
    inputs, weights = inputs_of(rows.sums), fit._weights(rows)
    for _ in range(3):
        other = fit._weights(replace(rows, sums=rows.sums * (1 + 1e-6 * rng.standard_normal(rows.sums.shape))))
        np.testing.assert_allclose(inputs @ other, inputs @ weights, atol=2e-3)  # shares of the limit


def test_a_snapshot_weighs_as_much_as_its_limits() -> None:
    # machines that the inputs do not tell apart: as many of a limit of 99 and a peak of 0.3 as of 1 and 0.6, which are
    # half of the snapshots and a hundredth of the limits, less than the fiftieth that may be above
    limit = np.repeat([99.0, 1.0], 500)
    sums = np.zeros((1_000, N_TERMS))
    sums[:, T_LIMIT], sums[:, T_MEAN], sums[:, T_BAND:] = limit, 0.2 * limit, 0.2 * limit[:, None]
    rows = MachineRows(sums, np.repeat([0.3, 0.6], 500) * limit, np.arange(1_000) % 10, 1.0)
    location = MachineCurve(weights=tuple(fit._weights(rows))).peak(sums, 0.0, 1.0) / limit
    np.testing.assert_allclose(location, 0.3, atol=0.02)


def test_what_regrouped_tasks_tell_is_learned_and_margins_are_those_of_the_machines_themselves() -> None:
    own = machines(8_000)
    few = own.take(np.argsort(np.abs(own.sums[:, T_USAGE] / own.sums[:, T_LIMIT] - 0.3), kind="stable")[:6_000:2])
    alike = join_rows([few, few])  # machines that hardly differ in what they use
    curve, alone = fit_curve(alike, BUDGETS, machines(8_000, seed=4)), fit_curve(alike, BUDGETS)
    assert curve.weights is not None
    of_usage = curve.weights[INPUTS.index("usage")]
    assert of_usage == pytest.approx(1.3, abs=0.05)
    assert alone.weights is None or abs(alone.weights[INPUTS.index("usage")] - 1.3) > abs(of_usage - 1.3)
    over = alike.peak > curve.peak(alike.sums, curve.margin(0.01), 1.0) * (1 + 1e-9)
    assert over.mean() <= 0.012


def test_the_location_that_judges_a_half_has_seen_no_task_of_it() -> None:
    rows, regrouped = machines(8_000), machines(8_000, seed=4)
    even = rows.take(rows.machine % 2 == 0)
    poisoned = MachineRows(
        regrouped.sums, np.where(regrouped.machine % 2 == 0, 0.5, 1.0) * regrouped.peak, regrouped.machine, 1.0
    )
    one, other = (next(fit._fits(even, join_rows([even, more]))) for more in (regrouped, poisoned))
    assert one.margins == other.margins
    assert one.weights != other.weights  # that which is used has seen all


def test_of_machines_of_one_half_alone_nothing_is_fitted() -> None:
    rows = machines(16_000)
    assert fit_curve(rows.take(rows.machine % 2 == 0), BUDGETS).weights is None  # nothing else to judge it by


@pytest.mark.parametrize("halves", [(0, 1), (1,)])
def test_where_no_task_of_a_half_has_a_forecast_nothing_is_fitted(halves: tuple[int, ...]) -> None:
    rows = machines(8_000)
    unforeseen = np.isin(rows.machine % 2, halves)
    rows.sums[unforeseen] = 0.0
    rows.sums[unforeseen, T_HELD] = 10.0  # limits of memory that are known in the validation period alone, say
    assert fit_curve(rows, BUDGETS).weights is None
