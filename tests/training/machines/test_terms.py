"""Tests that terms of tasks are the effective bandwidths of their curves, worked by hand and by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.training.machines.terms import (
    N_TERMS,
    NEWCOMER_WINDOWS,
    PASSED,
    PAST,
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
    TERMS,
    shares_of,
    terms_of,
)
from reclaim.training.models.survival import N_THRESHOLDS, quantiles_of
from tests.training.machines.curves import terms_of_curves

FLAT = np.array([[[0.5, 0.0]]], np.float32)  # half of the time below a quarter of the limit, else up to a half
THRESHOLDS = np.array([[[0.25, 0.5]]], np.float32)


def one(
    survival: NDArray[np.float32] = FLAT,
    usage: float = 1.0,
    limit: float = 4.0,
    seen: int = 100,
    mean: float = 2.0,
    past: tuple[float, ...] = (0.5,) * len(PAST),
) -> NDArray[np.float64]:
    """Return the terms of one task, one resource."""
    of_task: NDArray[np.float64] = terms_of_curves(
        survival,
        THRESHOLDS,
        np.array([[usage]]),
        np.array([[limit]]),
        np.array([seen]),
        (mean,),
        np.array([[past]], np.float32),
    )[0, 0]
    return of_task


def test_the_terms_of_a_task_by_hand() -> None:
    # the peak is 0.25 * 4 = 1 or, in the middle between both thresholds, 0.375 * 4 = 1.5; half of the time each
    terms = one()
    assert terms[T_LIMIT] == 4
    assert terms[T_USAGE] == 1
    assert terms[T_MEAN] == pytest.approx(1.25)
    assert terms[T_SQUARES] == 16
    assert terms[T_NEW] == terms[T_HELD] == 0
    # 0.2 of the times are above 0.25 + (0.5 - 0.2) / (0.5 - 0) * 0.25 = 0.4 of the limit
    assert terms[T_PASSED] == pytest.approx(4 * 0.4)
    np.testing.assert_allclose(terms[T_PASSED:T_BAND], [4 * (0.5 - p / 2) for p in PASSED], rtol=1e-6)
    for rate, bandwidth in zip(RATES, terms[T_BAND:], strict=True):
        t = rate / 2.0  # over the mean limit
        assert bandwidth == pytest.approx(math.log((math.exp(t) + math.exp(1.5 * t)) / 2) / t, abs=2e-6 * 2)
    assert len(TERMS) == N_TERMS == T_BAND + len(RATES) == T_PASSED + len(PASSED) + len(RATES)
    assert TERMS[T_PAST:T_PASSED] == PAST


def test_the_past_counts_up_to_the_limit_and_one_that_is_unknown_by_the_limit() -> None:
    for past, counts in ((0.25, 1.0), (7.0, 4.0), (math.nan, 4.0), (0.0, 0.0)):
        terms = one(past=(past, 0.5, 0.75))
        np.testing.assert_allclose(terms[T_PAST:T_PASSED], [counts, 2.0, 3.0])


def test_a_task_without_a_forecast_or_usage_holds_its_limit_and_one_without_a_limit_adds_nothing() -> None:
    for terms in (one(np.full_like(FLAT, np.nan)), one(usage=math.nan)):
        assert terms[T_HELD] == 4
        assert np.count_nonzero(terms) == 1
    for limit in (math.nan, 0.0):
        assert not one(limit=limit).any()


def test_usage_counts_up_to_the_limit_and_a_newcomer_by_its_limit() -> None:
    assert one(usage=9.0)[T_USAGE] == 4
    assert one(seen=NEWCOMER_WINDOWS - 1)[T_NEW] == 4
    assert one(seen=NEWCOMER_WINDOWS)[T_NEW] == 0


@given(
    falling=st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3),
    limit=st.floats(1e-3, 1e3),
    mean=st.floats(0.1, 10),
)
def test_bandwidths_rise_with_the_rate_from_the_mean_to_the_limit_and_scale_with_the_unit(
    falling: list[float], limit: float, mean: float
) -> None:
    survival = np.array([[sorted(falling, reverse=True)]], np.float32)
    thresholds = np.array([[[0.1, 0.4, 0.9]]], np.float32)

    def of(unit: float) -> NDArray[np.float64]:
        usage, most, seen = np.array([[0.1 * limit * unit]]), np.array([[limit * unit]]), np.array([99])
        of_task: NDArray[np.float64] = terms_of_curves(survival, thresholds, usage, most, seen, (mean * unit,))[0, 0]
        return of_task

    terms = of(1.0)
    rising = terms[[T_MEAN, *range(T_BAND, N_TERMS)]]
    slack = 2e-6 * (limit + mean)  # single precision
    assert (np.diff(rising) >= -slack).all()
    assert rising[-1] <= limit + slack
    linear = np.delete(of(1000.0), T_SQUARES)
    np.testing.assert_allclose(linear, 1000 * np.delete(terms, T_SQUARES), rtol=1e-7, atol=1000 * slack)


@given(st.integers(0, 2**32 - 1))
def test_terms_are_those_of_double_precision_and_a_task_alone_has_the_same_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    survival = np.sort(rng.random((7, 2, N_THRESHOLDS)) ** rng.integers(2, 20), axis=2)[..., ::-1].astype(np.float32)
    thresholds = np.sort(rng.random((7, 2, N_THRESHOLDS)).astype(np.float32), axis=2)
    limit, seen, mean = rng.gamma(2.0, 1.0, (7, 2)), rng.integers(1, 40, 7), (0.7, 3.0)
    terms = terms_of_curves(survival, thresholds, 0.2 * limit, limit, seen, mean)
    for i in range(7):
        rows = slice(i, i + 1)
        alone = terms_of_curves(survival[rows], thresholds[rows], 0.2 * limit[rows], limit[rows], seen[rows], mean)
        np.testing.assert_array_equal(alone[0], terms[i])
    s, at = survival.astype(np.float64), thresholds.astype(np.float64)
    share = -np.diff(s, axis=2, prepend=1.0, append=0.0)
    place = np.concatenate([at[..., :1], (at[..., 1:] + at[..., :-1]) / 2, np.ones((7, 2, 1))], axis=2)
    for j, rate in enumerate(RATES):
        t = rate / np.array(mean)[:, None] * limit[..., None]
        log = np.log((share * np.exp(t * (place - 1))).sum(axis=2, keepdims=True))
        exact = (limit[..., None] * (1 + np.maximum(log, np.log(1e-37)) / t))[..., 0]  # single precision ends there
        assert (np.abs(terms[..., T_BAND + j] - exact) <= 2e-6 * (limit + np.array(mean))).all()
    np.testing.assert_allclose(terms[..., T_MEAN], limit * (share * place).sum(axis=2), rtol=1e-5)
    quantiles = quantiles_of(survival[:, :, None], thresholds, tuple(1 - p for p in PASSED))[:, :, 0]
    np.testing.assert_allclose(terms[..., T_PASSED:T_BAND], limit[..., None] * quantiles, rtol=1e-7)


def test_a_bandwidth_of_a_giant_that_is_idle_lies_no_further_below_its_limit_than_single_precision_holds() -> None:
    # a limit of 20 times the mean, and a demand that never passes a tenth of it: 2, so that the bandwidths are 2
    survival, thresholds = np.zeros((1, 1, 3), np.float32), np.array([[[0.1, 0.4, 0.9]]], np.float32)
    terms = terms_of_curves(survival, thresholds, np.array([[1.0]]), np.array([[20.0]]), np.array([99]), (1.0,))[0, 0]
    floor = [20.0 + math.log(1e-37) / rate for rate in RATES]
    np.testing.assert_allclose(terms[T_BAND:], np.maximum(2.0, floor), rtol=1e-5)
    assert floor[-1] > 14


def test_a_curve_of_more_thresholds_than_there_is_room_for_is_refused() -> None:
    many = np.full((1, 1, 48), 0.5, np.float32)
    with pytest.raises(ConfigError, match="expected fewer than 48 thresholds, got 48"):
        terms_of_curves(many, many, np.ones((1, 1)), np.ones((1, 1)), np.array([1]), (1.0,))


def test_terms_are_of_the_horizon_asked_for_and_of_each_resources_own_past_and_curve() -> None:
    survival = np.zeros((1, 2, 2, 2), np.float32)  # nothing passes the first threshold,
    survival[0, :, 1, 0] = 0.5  # but half of the times at the second horizon
    thresholds = np.array([[[0.25, 0.5], [0.5, 0.75]]], np.float32)
    past = np.array([[(0.125,) * len(PAST), (0.625,) * len(PAST)]], np.float32)
    usage, limit, seen = np.array([[0.5, 0.5]]), np.array([[4.0, 8.0]]), np.array([99])
    # of the first horizon the peak is the first threshold; of the second, half of the time, an eighth of the limit more
    for horizon, means in ((0, [4 * 0.25, 8 * 0.5]), (1, [4 * 0.3125, 8 * 0.5625])):
        shares = shares_of(survival, thresholds, usage, limit, seen, past, (1.0, 1.0), horizon)
        terms = terms_of(shares, usage, limit)[0]
        assert terms[:, T_MEAN].tolist() == pytest.approx(means)
        assert terms[:, T_PAST:T_PASSED].tolist() == [[0.5] * len(PAST), [5.0] * len(PAST)]
