"""Reservations made of a forecast: worked by hand, against a search by brute force, and never below the floor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.features.registry import FEATURE_NAMES
from reclaim.training.margins.plan import (
    ANCHORS,
    Basis,
    Plan,
    _grid,
    _size_weight,
    plan_for_all,
    reserved,
)

LEVELS = (0.5, 0.9, 0.99)
NO_FEATURES = np.full((1, len(FEATURE_NAMES)), np.nan, np.float32)


def _share(basis: Basis, quantiles: list[float], weight: float = 1.0) -> float:
    share = _shares(plan_for_all(basis), np.array([[quantiles, quantiles]]), NO_FEATURES, 1.0 / weight)
    assert share[0, 0] == share[0, 1] or np.isnan(share).all()
    return float(share[0, 0])


def _shares(
    plan: Plan, quantiles: NDArray[np.float64], x: NDArray[np.float32], mean_limit: float = 1.0
) -> NDArray[np.float64]:
    """Return what a plan reserves of limits of 1."""
    return reserved((plan,), quantiles, LEVELS, x, np.ones((len(x), 2)), (mean_limit, mean_limit))[:, 0]


def test_the_level_is_the_one_at_which_the_next_violation_costs_what_it_saves() -> None:
    # between 0.9 and 0.99 the quantile rises by 0.2 in six steps that are even in -log(1 - level)
    quantiles = [0.1, 0.2, 0.4]
    expected = {}
    for price in (0.1, 1.0, 5.0, 1_000.0):
        steps = [(0.2 + 0.2 * k / 6, 0.1 * 0.1 ** (k / 6)) for k in range(7)]
        expected[price] = min([(q + price * p, q) for q, p in steps] + [(1.0, 1.0)])[1]
        assert _share(Basis(0.9, price), quantiles) == pytest.approx(expected[price])
    assert expected == pytest.approx({0.1: 0.2, 1.0: 0.2, 5.0: 0.2 + 0.2 / 6 * 5, 1_000.0: 1.0})


def test_a_large_task_is_let_violate_for_more_and_never_below_the_floor() -> None:
    quantiles = [0.1, 0.2, 0.4]
    small, mean, large = (_share(Basis(0.9, 5.0), quantiles, weight) for weight in (0.1, 1.0, 30.0))
    assert small == 0.4
    assert small > mean > large == 0.2


def _one_by_one(quantiles: list[float], weight: float, price: float) -> float:
    """Search the points in turn, and stop where the limit is reached, or nothing is known."""
    low, way, violating = _grid(LEVELS)
    best, chosen = weight, 1.0
    for below, part, violation in zip(low, way, violating, strict=True):
        start, end = quantiles[below], quantiles[min(below + 1, len(quantiles) - 1)]
        share = start + part * (end - start)
        if not share < 1.0:
            return np.nan if np.isnan(share) else chosen
        if weight * share + price * violation < best:
            best, chosen = weight * share + price * violation, share
    return chosen


UNUSUAL = st.sampled_from([0.0, 0.3, 1.0, np.inf, np.nan])


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(0.0, 1.2) | UNUSUAL, min_size=3, max_size=3), min_size=1, max_size=40),
    weight=st.floats(0.03, 30.0), price=st.floats(0.01, 300.0),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_searched_together_have_the_bits_of_each_searched_alone_point_by_point(
    rows: list[list[float]], weight: float, price: float
) -> None:
    quantiles = [[row, row] for row in rows]
    x = np.repeat(NO_FEATURES, len(rows), axis=0)
    share = _shares(plan_for_all(Basis(0.5, price)), np.array(quantiles), x, 1.0 / weight)
    for row, found in zip(rows, share[:, 0], strict=True):
        expected = _one_by_one(row, 1.0 / (1.0 / weight), price)
        floor = min(row[0], 1.0)
        assert np.array_equal(found, floor if floor > expected else expected, equal_nan=True)


def test_several_plans_at_once_are_each_plan_alone_and_more_rows_than_a_block() -> None:
    rng = np.random.default_rng(1)
    n = 700
    quantiles = np.sort(rng.random((n, 3, 3)) * 1.1, axis=2)  # memory growth, the third target, is not reserved
    x = rng.random((n, len(FEATURE_NAMES))).astype(np.float32) * 6
    limit = rng.random((n, 2)) * 4
    plans: tuple[Plan, ...] = (
        (Basis(0.9, 3.0, 0.25), Basis(0.5)),
        (Basis(0.5, 0.1), Basis(0.99, 10.0, 1.0, "ever")),
        plan_for_all(Basis(0.9, None, 0.5)),
    )
    together = reserved(plans, quantiles, LEVELS, x, limit, (2.0, np.nan))
    assert together.shape == (n, 3, 2)
    for k, plan in enumerate(plans):
        assert np.array_equal(reserved((plan,), quantiles, LEVELS, x, limit, (2.0, np.nan))[:, 0], together[:, k])
    for i in (0, 255, 256, n - 1):
        one = slice(i, i + 1)
        assert np.array_equal(reserved(plans, quantiles[one], LEVELS, x[one], limit[one], (2.0, np.nan)), together[one])


def test_without_a_price_the_level_is_reserved_and_with_unknown_quantiles_nothing_is() -> None:
    assert _share(Basis(0.99), [0.1, 0.2, 0.4]) == 0.4
    assert np.isnan(_share(Basis(0.9, 1.0), [np.nan] * 3))


def test_a_quantile_at_the_limit_is_the_limit_which_nothing_violates() -> None:
    assert _share(Basis(0.9, 0.01), [0.5, 1.0, 1.5]) == 1.0
    assert _share(Basis(0.9, 0.01), [0.5, 3.0, 7.0]) == 1.0


@settings(max_examples=50, deadline=None)
@given(
    start=st.floats(0.0, 0.9), first=st.floats(0.0, 0.5), second=st.floats(0.0, 0.5), past=st.floats(0.0, 1.0),
    price=st.floats(0.01, 300.0), anchor=st.sampled_from(ANCHORS),
)  # fmt: skip
def test_whatever_the_past_a_priced_task_is_held_at_the_floor_at_least(
    start: float, first: float, second: float, past: float, price: float, anchor: float
) -> None:
    x = NO_FEATURES.copy()
    x[0, FEATURE_NAMES.index("seen")] = 9.0
    x[0, [FEATURE_NAMES.index(f"{r}_max_24h") for r in ("cpu", "memory")]] = past
    quantiles = np.array([[[start, start + first, start + first + second]] * 2])
    plan: Plan = (Basis(0.9, price, anchor), Basis(0.9, None, anchor))
    share = _shares(plan, quantiles, x)
    assert share[0, 0] >= min(start + first, 1.0)


def test_sizes_are_relative_to_the_mean_limit_within_bounds_and_one_where_unknown() -> None:
    limits = (1.0, 4.0, 1e9, np.nan, 1e-9, 2.0)
    assert [_size_weight(limit, 2.0) for limit in limits] == [0.5, 2.0, 30.0, 1.0, 0.03, 1.0]
    assert {_size_weight(limit, np.nan) for limit in limits} == {_size_weight(0.0, 0.0)} == {1.0}


def test_a_price_or_an_anchor_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="price must be above 0, got 0"):
        Basis(0.9, 0.0)
    with pytest.raises(ConfigError, match="anchor must be one of"):
        Basis(0.9, None, 0.3)
    with pytest.raises(ConfigError, match="past must be one of"):
        Basis(0.9, None, 0.5, "week")
    with pytest.raises(ConfigError, match=r"level must be one of .* got 0\.97"):
        Basis(0.97).check(LEVELS)


def test_the_anchor_draws_the_quantile_towards_the_largest_demand_of_the_past() -> None:
    x = np.zeros((4, len(FEATURE_NAMES)), np.float32)
    x[:, FEATURE_NAMES.index("seen")] = [5.0, 5.0, 3.0, 5.0]  # the third has half an hour of history
    x[:, FEATURE_NAMES.index("cpu_max_24h")] = [0.25, 4.0, 0.25, np.nan]
    x[:, FEATURE_NAMES.index("memory_max_24h")] = 0.25
    quantile = np.full((4, 2), 0.04)

    # (0.04 * 0.25) ** 0.5 = 0.1; beyond the limit, early or unknown, the limit stands in: (0.04 * 1) ** 0.5 = 0.2;
    # a quarter of the weight: 0.04 ** 0.75 * 0.25 ** 0.25 = (0.04 * 0.1) ** 0.5
    def anchored(share: NDArray[np.float64], x: NDArray[np.float32], plan: Plan) -> NDArray[np.float64]:
        return _shares(plan, np.repeat(share[:, :, None], len(LEVELS), axis=2), x)

    result = anchored(quantile, x, (Basis(0.9, None, 0.5), Basis(0.9, None, 0.25)))
    assert result[:, 0].tolist() == pytest.approx([0.1, 0.2, 0.2, 0.2])
    assert result[0, 1] == pytest.approx(0.004**0.5)
    assert np.array_equal(anchored(quantile, x, plan_for_all(Basis(0.9))), quantile)
    # three quarters: (0.1 * 0.25) ** 0.5; all of it: 0.25; and since ever, of which the limit is known
    x[:, FEATURE_NAMES.index("cpu_max_ever")] = 1.0
    more = anchored(quantile, x, (Basis(0.9, None, 0.75), Basis(0.9, None, 1.0)))
    assert more[0].tolist() == pytest.approx([0.025**0.5, 0.25])
    assert anchored(quantile, x, plan_for_all(Basis(0.9, None, 0.5, "ever")))[0, 0] == pytest.approx(0.2)
    quantile[0] = np.nan
    assert np.isnan(anchored(quantile, x, plan_for_all(Basis(0.9, None, 1.0)))[0]).all()
