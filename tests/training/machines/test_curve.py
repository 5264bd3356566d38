"""Tests of the curve of a set of tasks: Chernoff's bound by hand, its inverse, its guards, and its sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.training.machines.curve import EXCEEDED, INPUTS, N_INPUTS, MachineCurve, inputs_of, margin_of
from reclaim.training.machines.terms import (
    N_TERMS,
    PASSED,
    RATES,
    T_BAND,
    T_HELD,
    T_LIMIT,
    T_MEAN,
    T_NEW,
    T_PASSED,
    T_PAST,
    T_SQUARES,
    T_USAGE,
)
from reclaim.training.margins.margin import Budgets
from tests.training.machines.curves import terms_of_curves

Floats = NDArray[np.float64]
FITTED = MachineCurve(
    margins=tuple(np.linspace(0.0, 0.5, len(EXCEEDED)).tolist()), weights=(0.0, 0.5, 0.5) + (0.0,) * (N_INPUTS - 3)
)


def tasks(n: int, seed: int = 0) -> Floats:
    """Return the terms of drawn tasks, one resource, mean limit 1."""
    rng = np.random.default_rng(seed)
    survival = np.sort(rng.random((n, 1, 5)).astype(np.float32) ** 3, axis=2)[..., ::-1]
    thresholds = np.sort(rng.random((n, 1, 5)).astype(np.float32), axis=2)
    limit = rng.gamma(2.0, 0.5, (n, 1))
    usage, seen = limit * rng.random((n, 1)) * 0.3, rng.integers(1, 99, n)
    terms = terms_of_curves(survival, thresholds, usage, limit, seen, (1.0,))
    of_tasks: Floats = terms[:, 0]
    return of_tasks


def test_the_bound_by_hand() -> None:
    # two tasks of limit 1 at 0.1 or, in a tenth of the time, at 1; of both together B_t = 2 log(E[exp(tX)]) / t
    survival, thresholds = np.full((2, 1, 1), 0.1, np.float32), np.full((2, 1, 1), 0.1, np.float32)
    terms = terms_of_curves(survival, thresholds, np.full((2, 1), 0.1), np.ones((2, 1)), np.full(2, 99), (1.0,))
    sums = terms.sum(axis=0)
    p = float(np.float32(0.1))
    b = {t: 2 * math.log((1 - p) * math.exp(t * p) + p * math.exp(t)) / t for t in RATES}
    curve = MachineCurve()
    for exponent in (0.5, 2.0):
        expected = min(b[t] + exponent / t for t in RATES)
        assert curve.peak(sums, exponent, 1.0) == pytest.approx(expected)
        assert curve.score(sums, np.array([expected]), 1.0) == pytest.approx(exponent)
    assert curve.margin(0.01) == pytest.approx(math.log(100))
    # the bound holds: both at 1 happens in 1 %, and what is reserved at 1 % is not less than that needs
    assert curve.peak(sums, curve.margin(0.0099), 1.0) >= 1.1


def test_rates_are_over_the_mean_limit_of_the_cell() -> None:
    # at exponent 2 the least of 3 + 2 / t is that of the largest rate, 16 over a mean limit of 4: 3 + 2 * 4 / 16
    sums = np.zeros((1, N_TERMS))
    sums[0, T_LIMIT], sums[0, T_BAND:] = 10.0, 3.0
    assert MachineCurve().peak(sums, 2.0, 4.0) == pytest.approx(3.5)
    assert MachineCurve().score(sums, np.array([3.5]), 4.0) == pytest.approx(2.0)


def test_a_share_of_peaks_that_is_whole_but_for_rounding_may_pass() -> None:
    scores = np.arange(100.0)
    assert 0.29 * 100 < 29  # in floating point; 29 scores are above 70, and may be
    assert margin_of(scores, 0.29) == 70
    assert margin_of(scores, 0.285) == 71


def test_tasks_that_peak_at_the_same_time_by_hand() -> None:
    sums = np.zeros((1, N_TERMS))
    sums[0, T_LIMIT], sums[0, T_PASSED:T_BAND], sums[0, T_BAND:] = 10.0, [2.0, 4.0, 5.0, 6.0, 8.0], 3.0
    curve = MachineCurve(together=1.0)

    def at(probability: float) -> float:
        return float(curve.peak(sums, -math.log(probability), 1.0)[0])

    assert [at(p) for p in PASSED] == pytest.approx([2, 4, 5, 6, 8])
    assert at(0.1) == pytest.approx(3)  # half of the way from 0.2 to 0.05, by the logarithm
    assert at(math.sqrt(0.2)) == pytest.approx(1)  # nothing at a probability of 1
    assert at(math.sqrt(0.0003 * 1e-8)) == pytest.approx(9)  # the limits at 1e-8
    assert at(1e-20) == 10
    # independent tasks: at exponent 2 the least of 3 + 2 / t, which is that of the largest t, 16
    assert MachineCurve().peak(sums, 2.0, 1.0) == pytest.approx(3 + 2 / RATES[-1])
    halfway = (3 - math.log(0.01) / RATES[-1] + 5) / 2
    assert MachineCurve(together=0.5).peak(sums, -math.log(0.01), 1.0) == pytest.approx(halfway)
    assert MachineCurve(together=0.5).score(sums, np.array([halfway]), 1.0) == pytest.approx(-math.log(0.01))


@given(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(1, 30), st.integers(0, 99), st.floats(0.0, 20.0))
def test_the_score_of_an_amount_is_the_least_margin_at_which_it_is_reserved(
    share: float, n: int, seed: int, margin: float
) -> None:
    curve = MachineCurve(together=share)
    sums = tasks(n, seed).sum(axis=0, keepdims=True)
    sums[0, T_USAGE] = 0.0  # no guard
    amount = curve.peak(sums, margin, 1.0)
    score = curve.score(sums, amount, 1.0)
    assert score[0] <= margin + 1e-9
    np.testing.assert_allclose(curve.peak(sums, score[0], 1.0), amount, rtol=1e-9)


def test_a_fitted_location_and_its_spread_by_hand_and_its_guards() -> None:
    sums = np.zeros((3, N_TERMS))
    sums[:, T_LIMIT], sums[:, T_USAGE], sums[:, T_MEAN] = 10.0, [2.0, 2.0, 4.0], [4.0, 4.0, 2.0]
    sums[:, T_HELD] = [0.0, 5.0, 0.0]
    sums[:, T_BAND:] = sums[:, T_MEAN, None] + 1.0
    np.testing.assert_allclose(FITTED.peak(sums, 0.0, 1.0), [3.0, 8.0, 4.0])  # held at the limit; never below usage
    spread = 1.0 + math.log(10_000) / RATES[-1]  # the bound at 1 in 10,000, which is that of the largest rate
    more = 2.0 * spread
    np.testing.assert_allclose(FITTED.peak(sums, 2.0, 1.0), [3.0 + more, 8.0 + more, 3.0 + more])
    np.testing.assert_allclose(FITTED.peak(sums, 9.0, 1.0), [10.0, 15.0, 10.0])  # never above the limits
    np.testing.assert_allclose(FITTED.score(sums, np.array([3.0, 8.0, 3.0]) + more, 1.0), 2.0)


def test_inputs_are_over_the_limits() -> None:
    sums = np.zeros((2, N_TERMS))
    sums[0, [T_LIMIT, T_USAGE, T_MEAN, T_NEW, T_SQUARES]] = [4.0, 1.0, 2.0, 3.0, 4.0]
    sums[0, T_PAST:T_PASSED], sums[0, T_BAND:] = [1.0, 2.0, 3.0], 2.0
    expected = [1.0, 0.25, 0.5, 0.75, 0.5] + [0.25, 0.5, 0.75] + [0.5] * len(RATES)
    np.testing.assert_allclose(inputs_of(sums), [expected, [0.0] * N_INPUTS])  # of no tasks nothing
    assert len(INPUTS) == N_INPUTS


@pytest.mark.parametrize(
    "curve", [MachineCurve(), MachineCurve(together=0.5), MachineCurve(together=1.0), FITTED],
    ids=["independent", "halfway", "together", "fitted"],
)  # fmt: skip
@given(n=st.integers(1, 30), seed=st.integers(0, 99), budgets=st.tuples(st.floats(1e-4, 0.5), st.floats(1e-4, 0.5)))
def test_a_smaller_budget_never_reserves_less_and_the_margin_of_what_it_reserves_is_its_own(
    curve: MachineCurve, n: int, seed: int, budgets: tuple[float, float]
) -> None:
    sums = tasks(n, seed).sum(axis=0, keepdims=True)
    small, large = min(budgets), max(budgets)
    careful, bold = (curve.peak(sums, curve.margin(b), 1.0) for b in (small, large))
    assert careful >= bold
    assert sums[0, T_USAGE] <= bold <= careful <= sums[0, T_LIMIT]
    if sums[0, T_USAGE] < bold < sums[0, T_LIMIT]:  # no guard
        assert curve.score(sums, bold, 1.0) == pytest.approx(curve.margin(large), rel=1e-6)


@given(seed=st.integers(0, 99), cut=st.integers(0, 12))
def test_a_set_and_a_candidate_cost_one_addition(seed: int, cut: int) -> None:
    terms = tasks(12, seed)
    together = MachineCurve().peak(terms.sum(axis=0, keepdims=True), 2.0, 1.0)
    parts = terms[:cut].sum(axis=0, keepdims=True) + terms[cut:].sum(axis=0, keepdims=True)
    np.testing.assert_allclose(MachineCurve().peak(parts, 2.0, 1.0), together, rtol=1e-12)
    # tasks together need no more than each for itself
    alone = sum(MachineCurve().peak(one[None], 2.0, 1.0)[0] for one in terms)
    assert together[0] <= alone * (1 + 1e-12)


@pytest.mark.parametrize("curve", [MachineCurve(), MachineCurve(together=1.0), FITTED])
def test_tasks_without_a_forecast_add_their_limit_to_any_amount(curve: MachineCurve) -> None:
    sums = tasks(5).sum(axis=0, keepdims=True)
    most = sums[0, T_LIMIT]
    amount = sums[0, T_USAGE] + np.array([0.3, 0.6, 0.9]) * (most - sums[0, T_USAGE])
    with_held = np.repeat(sums, 3, axis=0)
    with_held[:, T_HELD] = 2.0 * most
    alone = curve.score(np.repeat(sums, 3, axis=0), amount, 1.0)
    np.testing.assert_allclose(curve.score(with_held, amount + 2.0 * most, 1.0), alone, rtol=1e-9)


def test_margins_let_no_more_than_the_budget_pass() -> None:
    sums = np.stack([tasks(10, seed).sum(axis=0) for seed in range(500)])
    peak = np.random.default_rng(1).uniform(sums[:, T_USAGE], sums[:, T_LIMIT])
    curve = MachineCurve().with_margins(MachineCurve().score(sums, peak, 1.0))
    for budget in EXCEEDED:
        over = peak > curve.peak(sums, curve.margin(budget), 1.0) * (1 + 1e-9)
        assert over.sum() <= math.floor(budget * 500 + 1e-9)


@pytest.mark.parametrize(("budget", "allowed"), [(Budgets().aggressive, 1_000), (Budgets().baseline, 100)])
def test_the_budgets_of_the_margins_are_kept_to_the_last_peak(budget: float, allowed: int) -> None:
    scores = np.arange(100_000.0)
    assert (scores > MachineCurve().with_margins(scores).margin(budget) * (1 + 1e-12)).sum() == allowed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": (1.0,)}, "expected 15 weights, all finite"),
        ({"weights": (math.nan,) * N_INPUTS}, "all finite"),
        ({"together": 1.5}, "expected a share from 0 to 1 of peaks together"),
        ({"together": 0.5, "weights": (1.0,) * N_INPUTS}, "0 with weights, got 0.5"),
        ({"margins": (1.0, 0.5)}, "finite and rising"),
        ({"margins": (*(float(k) for k in range(len(EXCEEDED) - 1)), math.inf)}, "finite and rising"),
        ({"margins": tuple(-float(k) for k in range(len(EXCEEDED)))}, "finite and rising"),
    ],
)
def test_a_curve_that_is_none_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MachineCurve(**arguments)


@pytest.mark.parametrize("probability", [0.0, 1.0, -1.0, math.nan])
def test_a_budget_is_a_probability(probability: float) -> None:
    with pytest.raises(ConfigError, match="a budget of machine peaks must be above 0 and below 1"):
        MachineCurve().margin(probability)
