"""Prices: between the two that are set stands a third, and each moves, is given and is refused as it must."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.windows import empty_windows
from reclaim.features.groups import TIER_LABELS
from reclaim.training.margins.ladder import DOUBLED, TOP_RUNG, price_of, rung_of
from reclaim.training.margins.price import Price, three_prices


def test_the_baseline_costs_at_least_as_much_and_medium_is_the_geometric_mean() -> None:
    three = three_prices(Price("a", (4.0, 1.0)), Price("b", (1.0, 9.0)))
    assert {name: price.value for name, price in three.items()} == {
        "baseline": (4.0, 9.0), "medium": (2.0, 9.0), "aggressive": (1.0, 9.0),
    }  # fmt: skip


def test_a_price_by_tier_is_that_of_each_rows_tier() -> None:
    windows = empty_windows(2)
    windows.tier[:] = [-1, 1]
    price = Price("baseline", (1.0, 1.0), tuple((2.0**k, 1.0) for k in range(len(TIER_LABELS))))
    place = rung_of(np.ones(1))[0]
    assert price.rung(windows).tolist() == [[place, place], [place + 2 * DOUBLED, place]]


def test_a_price_that_moves_does_so_by_the_logarithm_and_stays_on_the_ladder() -> None:
    log = np.zeros((len(TIER_LABELS), 2))
    log[1] = math.log(3.0), 99.0
    moved = Price("baseline", (4.0, 4.0)).moved(log)
    assert moved.by_tier is not None
    assert moved.by_tier[0] == pytest.approx((4.0, 4.0))
    assert moved.by_tier[1] == pytest.approx((12.0, float(price_of(np.array(float(TOP_RUNG))))))


def test_a_price_that_was_given_does_not_move() -> None:
    given = Price("baseline", (4.0, 4.0), given=(True, False))
    assert (given.bounds[:, :, 0] == 0).all()
    assert given.bounds[:, :, 1].tolist() == Price("baseline", (4.0, 4.0)).bounds[:, :, 1].tolist()
    assert all(price.given == (True, False) for price in three_prices(given, given).values())


def test_a_price_follows_down_to_a_64th_of_it_or_the_first_rung_and_up_to_the_limit() -> None:
    # 4 is 16 times the lowest price, 256 is 1,024 times; the limit is at 2^15 times
    low, high = Price("baseline", (4.0, 256.0)).bounds
    assert low[0] == pytest.approx([-math.log(16), -math.log(64)])
    assert high[0] == pytest.approx([11 * math.log(2), 5 * math.log(2)])


def test_prices_are_by_tier_where_both_are() -> None:
    a, b = (Price(name, of, (of,) * len(TIER_LABELS)) for name, of in (("a", (4.0, 1.0)), ("b", (1.0, 9.0))))
    of_all = {name: price.by_tier for name, price in three_prices(a, b).items()}
    assert of_all == {
        name: (of,) * len(TIER_LABELS)
        for name, of in (("baseline", (4.0, 9.0)), ("medium", (2.0, 9.0)), ("aggressive", (1.0, 9.0)))
    }
    assert [price.by_tier for price in three_prices(a, Price("b", (1.0, 9.0))).values()] == [None] * 3


@pytest.mark.parametrize("value", [(-1.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (1.0,)])
def test_impossible_prices_are_refused(value: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="price 'p'"):
        Price("p", value)
    with pytest.raises(ConfigError, match=r"expected 6 tiers"):
        Price("p", (1.0, 1.0), (value,))
