"""Tests that terms of tasks are the effective bandwidths of their curves, worked by hand and by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.training.machines.terms import (
    N_TERMS,
    NEWCOMER_WINDOWS,
    RATES,
    T_BAND,
    T_HELD,
    T_LIMIT,
    T_MEAN,
    T_NEW,
    T_SQUARES,
    T_USAGE,
    TERMS,
    terms_of,
)

FLAT = np.array([[[0.5, 0.0]]], np.float32)  # half of the time below a quarter of the limit, else up to a half
THRESHOLDS = np.array([[[0.25, 0.5]]], np.float32)


def one(
    survival: NDArray[np.float32] = FLAT, usage: float = 1.0, limit: float = 4.0, seen: int = 100, mean: float = 2.0
) -> NDArray[np.float64]:
    """Return the terms of one task, one resource."""
    terms = terms_of(
        survival, THRESHOLDS, np.array([[usage]]), np.array([[limit]]), np.array([seen]), (mean,)
    )  # fmt: skip
    of_task: NDArray[np.float64] = terms[0, 0]
    return of_task


def test_the_terms_of_a_task_by_hand() -> None:
    # the peak is 0.25 * 4 = 1 or, in the middle between both thresholds, 0.375 * 4 = 1.5; half of the time each
    terms = one()
    assert terms[T_LIMIT] == 4
    assert terms[T_USAGE] == 1
    assert terms[T_MEAN] == pytest.approx(1.25)
    assert terms[T_SQUARES] == 16
    assert terms[T_NEW] == terms[T_HELD] == 0
    for rate, bandwidth in zip(RATES, terms[T_BAND:], strict=True):
        t = rate / 2.0  # over the mean limit
        assert bandwidth == pytest.approx(math.log((math.exp(t) + math.exp(1.5 * t)) / 2) / t)
    assert len(TERMS) == N_TERMS == T_BAND + len(RATES)


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
        of_task: NDArray[np.float64] = terms_of(survival, thresholds, usage, most, seen, (mean * unit,))[0, 0]
        return of_task

    terms = of(1.0)
    rising = terms[[T_MEAN, *range(T_BAND, N_TERMS)]]
    slack = 1e-6 * limit
    assert (np.diff(rising) >= -slack).all()
    assert rising[-1] <= limit + slack
    linear = np.delete(of(1000.0), T_SQUARES)
    np.testing.assert_allclose(linear, 1000 * np.delete(terms, T_SQUARES), rtol=1e-9, atol=1e-6 * limit * 1000)
