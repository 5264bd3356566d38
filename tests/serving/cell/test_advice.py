"""Advice: train where the history is long enough, and again where the model and the cell do not go together."""

from __future__ import annotations

import numpy as np
import pytest

from reclaim.features.groups import TIER_LABELS
from reclaim.serving.cell.advice import prices_apart, worth_training
from reclaim.serving.cell.following import Prices
from reclaim.training.bundle import Bundle
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.price import Price, three_prices
from tests.serving.cell.test_following import SETTINGS
from tests.serving.cell_fixtures import Memory


@pytest.mark.parametrize(
    ("days", "tasks", "worth"),
    [(1.9, 5_000, False), (2, 349, False), (2, 350, True), (7, 100, True), (6.9, 100, False)],
)
def test_a_history_is_worth_training_on_from_two_days_and_700_task_days(days: float, tasks: int, worth: bool) -> None:
    assert (worth_training(days, tasks) is not None) == worth


def test_a_price_that_was_given_is_not_said_to_be_one_of_validation(bundle: Bundle) -> None:
    machines = Memory(SETTINGS, bundle).tracker.prices.machines
    own = np.full((2, len(TIER_LABELS), 2), np.nan)
    own[:, 0] = (1.0, 1.0)
    dear = three_prices(*(Price(name, (9.0, 9.0), given=(True, False)) for name in ("baseline", "aggressive")))
    told = prices_apart(Prices(dear, dear, Budgets(), machines, None, own))
    assert [line.partition(":")[0] for line in told] == ["memory, baseline", "memory, aggressive"]


def test_prices_a_factor_of_four_apart_in_every_tier_are_told(bundle: Bundle) -> None:
    prices = three_prices(Price("baseline", (40.0, 200.0)), Price("aggressive", (4.0, 2.0)))
    machines = Memory(SETTINGS, bundle).tracker.prices.machines
    own = np.full((2, len(TIER_LABELS), 2), np.nan)
    own[0, 0], own[1, 0] = (41.0, 210.0), (0.9, 2.0)  # CPU at the aggressive margin: 4 over 0.9
    (told,) = prices_apart(Prices(prices, prices, Budgets(), machines, None, own))
    assert told.startswith("cpu, aggressive: the price of validation is 4.4 times")
    own[1, 1, 0] = 3.9  # another tier agrees
    assert prices_apart(Prices(prices, prices, Budgets(), machines, None, own)) == []
    assert prices_apart(Prices(prices, prices, Budgets(), machines)) == []
