"""Money: the price that follows from it is the one that earns most."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reclaim.data.errors import ConfigError
from reclaim.training.margins.value import Value


def test_the_price_is_what_a_violation_costs_in_limits_of_a_mean_task_over_the_horizon() -> None:
    # a mean task of 4 cores earns 4 * 0.05 an hour when all of it is reclaimed; a violation costs 3
    value = Value(core_hour=0.05, violation=3.0)
    cpu, memory = value.prices((4.0, 8.0), 3_600)
    assert cpu == pytest.approx(15.0)
    assert math.isnan(memory)  # a budget sets it
    assert value.prices((4.0, 8.0), 300)[0] == pytest.approx(12 * 15.0)
    assert value.prices((0.25, 8.0), 3_600)[0] == pytest.approx(16 * 15.0)  # tasks of less than a core
    assert value.known
    assert not Value().known


def test_the_reservation_of_that_price_earns_most() -> None:
    rng = np.random.default_rng(0)
    peaks, limit, shares = rng.beta(1, 6, 4_000), 8.0, np.linspace(0, 1, 101)
    value = Value(core_hour=0.05, violation=0.2)
    price = value.prices((2.0, 1.0), 3_600)[0]
    risk = (peaks[:, None] > shares).mean(0)
    chosen = np.argmin(limit / 2.0 * shares + price * risk)
    # a task-window of five minutes: what is left over earns, and of a shortage's twelve answers this is one
    money = limit * (1 - shares) * 0.05 / 12 - risk * 0.2 / 12
    assert chosen == np.argmax(money)


@pytest.mark.parametrize(
    "settings", [{"core_hour": 0.1}, {"violation": 1.0}, {"core_hour": 0.0, "violation": 1.0}, {"memory_hour": -1.0}]
)
def test_half_a_value_and_impossible_ones_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must be above 0, got|violation needs core_hour or memory_hour"):
        Value(**settings)


@pytest.mark.parametrize("unknown", [math.nan, 0.0])
def test_without_a_mean_limit_there_is_no_price(unknown: float) -> None:
    with pytest.raises(ConfigError, match="the mean limit of cpu is unknown"):
        Value(core_hour=1.0, violation=1.0).prices((unknown, 1.0), 3_600)
    assert all(map(math.isnan, Value().prices((math.nan, math.nan), 3_600)))
