"""Ladders: the reservation of least cost, never less for a higher price, and the price that a need asks for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from reclaim.training.margins import ladder
from reclaim.training.margins.ladder import (
    DOUBLED,
    LOWEST_PRICE,
    N_RUNGS,
    TOP_RUNG,
    ladder_of,
    price_of,
    reserved_at,
    rung_for,
    rung_of,
    size_weight,
)

J = 6
LIMIT = np.array([[2.0, 8.0]])
SHARES = st.floats(2.0**-10, 1, width=32)
RISKS = st.just(0.0) | st.floats(2.0**-30, 1, width=32)


@st.composite
def curves(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return survival, thresholds and weights of one task: falling and rising, not necessarily strictly."""
    survival = draw(arrays(np.float32, (1, 2, J), elements=RISKS))
    thresholds = draw(arrays(np.float32, (1, 2, J), elements=SHARES))
    weight = draw(arrays(np.float64, (1, 2), elements=st.floats(0.03, 30)))
    return -np.sort(-survival, axis=-1), np.sort(thresholds, axis=-1), weight


def _ladder(shares: list[float]) -> np.ndarray:
    """Return the ladder of one task, alike for both resources: these shares, then the limit."""
    rungs = np.array(shares + [1.0] * (N_RUNGS - len(shares)), np.float32)
    return np.broadcast_to(rungs, (1, 2, N_RUNGS)).copy()


def test_the_reservation_of_least_cost_is_found_by_hand() -> None:
    # P(demand > 0.25) = 0.16, P(demand > 0.5) = 0.04
    survival = np.array([[[0.16, 0.04]] * 2], np.float32)
    thresholds = np.array([[[0.25, 0.5]] * 2], np.float32)
    rungs = ladder_of(survival, thresholds, np.array([[1.0, 2.0]]))
    # a step up pays from (0.5 - 0.25) / (0.16 - 0.04) = 2.08, and to the limit from 0.5 / 0.04 = 12.5
    expected = [0.25 if p < 2.08 else 0.5 if p < 12.5 else 1.0 for p in _prices()]
    assert rungs[0, 0, :TOP_RUNG].tolist() == pytest.approx(expected)
    of_twice = [0.25 if p < 4.16 else 0.5 if p < 25 else 1.0 for p in _prices()]
    assert rungs[0, 1, :TOP_RUNG].tolist() == pytest.approx(of_twice)  # what it holds costs twice as much
    assert (rungs[..., TOP_RUNG] == 1.0).all()


def _prices() -> list[float]:
    return [LOWEST_PRICE * 2.0 ** (k / DOUBLED) for k in range(TOP_RUNG)]


@given(curves())
def test_at_each_rung_nothing_costs_less(curve: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    survival, thresholds, weight = curve
    rungs = ladder_of(survival, thresholds, weight).astype(np.float64)
    for r in range(2):
        s, share = survival[0, r].astype(np.float64), thresholds[0, r].astype(np.float64)
        shares, risks = np.append(share, 1.0), np.append(s, 0.0)
        risks[shares >= 1.0] = 0.0
        for k, price in enumerate(_prices()):
            costs = weight[0, r] * shares + price * risks
            chosen = np.isclose(shares, rungs[0, r, k], rtol=1e-6, atol=0)
            assert chosen.any()
            assert costs[chosen].min() <= costs.min() * (1 + 1e-5) + 1e-9


@given(curves(), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_higher_price_never_reserves_less(
    curve: tuple[np.ndarray, np.ndarray, np.ndarray], a: float, b: float
) -> None:
    rungs = ladder_of(*curve)
    low, high = (reserved_at(rungs, rung_of(np.full((1, 2), p)), LIMIT) for p in sorted((a, b)))
    assert (low <= high).all()
    assert (high <= LIMIT).all()


@given(st.lists(st.tuples(st.integers(0, 4_095), st.integers(0, 63)), min_size=J, max_size=J))
@example([(1_614, 2), (2_270, 46), (3_511, 48), (4_000, 60), (4_001, 61), (4_002, 62)])
def test_no_rung_reserves_less_than_a_lower_one_where_points_cost_alike_but_for_rounding(
    points: list[tuple[int, int]],
) -> None:
    above, less = (np.sort(np.array(column)) * 2.0**-24 for column in zip(*points, strict=True))
    survival, thresholds = (np.tile(v.astype(np.float32), (1, 2, 1)) for v in (1 - less, 0.5 + above))
    rungs = ladder_of(survival, thresholds, np.ones((1, 2)))
    assert (np.diff(rungs, axis=-1) >= 0).all()
    assert np.isin(rungs, np.append(thresholds, 1.0)).all()
    assert (rungs[..., TOP_RUNG] == 1.0).all()


@given(
    arrays(np.float32, (1, 2, N_RUNGS), elements=SHARES), arrays(np.float64, (1, 2), elements=st.floats(0, 1.2)),
    st.floats(1e-6, 1),
)  # fmt: skip
def test_the_lowest_price_that_covers_a_need_is_enough_and_nothing_lower_is(
    rungs: np.ndarray, share: np.ndarray, lower: float
) -> None:
    rungs, need = np.sort(rungs, axis=-1), share * LIMIT
    found = rung_for(rungs, need, LIMIT)
    for r in range(2):
        if found[0, r] == np.inf:
            assert need[0, r] > reserved_at(rungs, np.full((1, 2), float(TOP_RUNG)), LIMIT)[0, r]
        elif found[0, r] == -np.inf:
            assert need[0, r] <= reserved_at(rungs, np.zeros((1, 2)), LIMIT)[0, r] * (1 + 1e-12)
        else:
            assert reserved_at(rungs, found, LIMIT)[0, r] == pytest.approx(need[0, r], rel=1e-9)
            below = reserved_at(rungs, np.maximum(found - lower, 0.0), LIMIT)[0, r]
            assert below < need[0, r] or found[0, r] == 0.0 or below == pytest.approx(need[0, r], rel=1e-5)


def test_between_two_rungs_lies_what_is_between_their_reservations_by_the_logarithm_of_the_price() -> None:
    rungs = _ladder([0.2, 0.4, 0.4, 0.8])
    a_rung = 2 ** (1 / DOUBLED)
    between = LOWEST_PRICE * math.sqrt(a_rung)
    assert reserved_at(rungs, rung_of(np.array([[between, LOWEST_PRICE * a_rung**2.5]])), LIMIT) == pytest.approx(
        np.array([[0.3 * 2.0, 0.6 * 8.0]])
    )
    assert rung_for(rungs, np.array([[0.6, 0.5 * 8]]), LIMIT) == pytest.approx(np.array([[0.5, 2.25]]))
    assert reserved_at(rungs, rung_of(np.array([[0.0, 1e12]])), LIMIT) == pytest.approx(np.array([[0.4, 8.0]]))


@given(st.lists(st.sampled_from([1.0, 5.0, 50.0]), min_size=TOP_RUNG, max_size=TOP_RUNG))
@example([1.0] * 47 + [50.0] * 13)  # of the rungs that two vectors share, the last
def test_a_rung_reserves_the_most_of_any_rung_up_to_it(prices: list[float]) -> None:
    # the curve of the first test, at prices in any order
    survival, thresholds = np.array([[[0.16, 0.04]]], np.float32), np.array([[[0.25, 0.5]]], np.float32)
    room, found = np.empty((2, 3), np.float32), np.empty((1, 1, N_RUNGS), np.float32)
    given_prices = np.array([*prices, 0.0], np.float32)
    ladder._fill(survival, thresholds, np.ones((1, 1)), given_prices, room, found)
    alone = [{1.0: 0.25, 5.0: 0.5, 50.0: 1.0}[price] for price in prices]
    assert found[0, 0].tolist() == [*np.maximum.accumulate(alone), 1.0]


def test_a_row_without_a_forecast_has_no_reservation_and_asks_for_no_price() -> None:
    survival = np.array([[[np.nan] * J, [0.5] * J]], np.float32)
    rungs = ladder_of(survival, np.full((1, 2, J), 0.5, np.float32), np.ones((1, 2)))
    assert np.isnan(rungs[0, 0]).all()
    assert np.isnan(reserved_at(rungs, np.full((1, 2), 3.0), LIMIT)).tolist() == [[True, False]]
    assert np.isnan(reserved_at(rungs, np.full((1, 2), 3.0), np.array([[1.0, np.nan]]))).all()
    assert rung_for(rungs, np.array([[1.0, np.nan]]), LIMIT).tolist() == [[-np.inf, -np.inf]]


def test_threads_and_the_size_of_a_call_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 2)
    rng = np.random.default_rng(0)
    survival = -np.sort(-rng.random((50, 2, J), dtype=np.float32), axis=-1)
    thresholds = np.sort(rng.random((50, 2, J), dtype=np.float32), axis=-1)
    weight = rng.uniform(0.1, 3, (50, 2))
    whole = ladder_of(survival, thresholds, weight)
    assert ladder_of(survival, thresholds, weight, threads=3).tobytes() == whole.tobytes()
    for i in range(50):
        one = ladder_of(survival[i : i + 1], thresholds[i : i + 1], weight[i : i + 1])
        assert one.tobytes() == whole[i : i + 1].tobytes()


def test_places_and_prices_say_the_same() -> None:
    rungs = np.linspace(0, TOP_RUNG, 77)
    assert rung_of(price_of(rungs)) == pytest.approx(rungs)
    assert rung_of(np.array([0.0, LOWEST_PRICE / 9, 1e30])).tolist() == [0.0, 0.0, float(TOP_RUNG)]


def test_large_tasks_weigh_more_within_bounds() -> None:
    weight = size_weight(np.array([[2.0, 1e9], [np.nan, 1.0]]), (4.0, 1.0))
    assert weight.tolist() == [[0.5, 30.0], [1.0, 1.0]]
