"""Tests of what is said of prices that were set on rows held out, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, empty_windows
from reclaim.features.groups import RowKeys
from reclaim.features.registry import N_FEATURES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.bundle import load_bundle
from reclaim.training.estimators.base import Forecast
from reclaim.training.fitting.held_out import (
    HeldOut,
    builtin_calibration,
    less_reclaimed,
    mean_limit_of,
    own_price_notes,
    set_prices,
)
from reclaim.training.fitting.sources import Source
from reclaim.training.margins.calibrate import Calibration
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.online import own_prices
from reclaim.training.margins.own_price import FAR
from reclaim.training.margins.price import Price
from reclaim.training.margins.value import Value
from reclaim.training.models.estimator import ladder_at, risk_at
from reclaim.training.models.survival import N_BELOW, N_THRESHOLDS
from reclaim.training.settings import TrainConfig
from reclaim.training.tracking.references import BUILTIN_FOLDER

N, H = 200, len(HORIZONS_S)


def calibration(reclaimed: Mapping[str, tuple[float, ...]], settings: Mapping[str, Price] | None = None) -> Calibration:
    """Return a calibration of which only one part is looked at."""
    return Calibration(settings or {}, {}, {}, {}, reclaimed, (N, N), ())


def valid(mean_limit: tuple[float, float] = (1.0, 1.0)) -> HeldOut:
    """Return rows of one sure curve: the peak is anywhere between a fifth of the limit and the limit."""
    windows = empty_windows(N)
    windows.usage[:, [CPU_MEAN, MEMORY_MAX]], windows.limit[:] = 0.1, 1.0
    thresholds = np.sort(np.r_[np.linspace(0, 0.1, N_BELOW), np.linspace(0.2, 1, N_THRESHOLDS - N_BELOW)])
    survival = np.clip((1 - thresholds) / 0.8, 0, 1)
    forecast = Forecast(
        np.tile(survival.astype(np.float32), (N, len(TARGETS), H, 1)),
        np.tile(thresholds.astype(np.float32), (N, len(TARGETS), 1)),
        np.zeros(0, np.float32), np.zeros((N, H)), HORIZONS_S,
    )  # fmt: skip
    none = np.zeros(N, np.int64)
    y = np.full((N, len(TARGETS), H), 0.3, np.float32)
    keys = RowKeys(none, none, none, none, none)
    return HeldOut(windows, np.zeros((N, 1), np.float32), forecast, y, y[:, 0], keys, [N], mean_limit)


def test_the_mean_limit_is_known_of_one_source_alone_for_the_units_of_several_differ() -> None:
    one, other = (cast(Source, SimpleNamespace(features=SimpleNamespace(mean_limit=of))) for of in ((2.0, 8.0), (1, 1)))
    assert mean_limit_of([one]) == (2.0, 8.0)
    assert np.isnan(mean_limit_of([one, other])).tolist() == [True, True]


def test_a_model_reclaims_less_where_it_is_behind_at_the_same_budget_by_more_than_two_seeds_differ() -> None:
    mine = {"baseline": (0.50, 0.20), "medium": (0.50, np.nan), "aggressive": (0.70, 0.40)}
    other = {"baseline": (0.505, 0.22), "medium": (0.40, 0.30), "aggressive": (0.90, 0.409)}
    budgets = Budgets(baseline=0.001, aggressive=0.01)  # medium has none
    assert less_reclaimed(calibration(mine), calibration(other), budgets) == [
        "20.0 % of memory for 22.0 % at a budget of 0.1 %",
        "70.0 % of CPU for 90.0 % at a budget of 1 %",
    ]


@pytest.mark.parametrize(("times", "noted"), [(0.9 * FAR, False), (1.1 * FAR, True), (0.9 / FAR, True)])
def test_a_price_far_from_the_one_that_the_curves_expect_is_noted_unless_it_was_given_or_nothing_is_known_of_it(
    times: float, *, noted: bool
) -> None:
    rows, config = valid(), TrainConfig(budgets=Budgets(baseline=0.02, aggressive=0.1))
    ladder = ladder_at(rows.forecast, config.horizon_s, rows.windows.limit, rows.mean_limit)
    risk = risk_at(rows.forecast, config.horizon_s, ladder, rows.windows)
    prices = {name: Price(name, (1.0, 1.0)) for name in ("baseline", "medium", "aggressive")}
    own = own_prices(prices, config.budgets, np.zeros(N, np.int64), risk)
    prices = {name: Price(name, own[name].of_tiers[0]) for name in prices}
    assert own_price_notes(rows, config, calibration({}, prices)) == []
    cpu, memory = prices["aggressive"].value
    off = {**prices, "aggressive": Price("aggressive", (cpu, memory * times))}
    notes = own_price_notes(rows, config, calibration({}, off))
    assert len(notes) == noted
    said = f"{times:.0f} times" if times > 1 else f"1/{1 / times:.0f} of"
    at = f"memory, aggressive: the price set on validation rows is {said} the one at which"
    assert all(note.startswith(at) for note in notes)
    given = {name: replace(price, given=(False, True)) for name, price in off.items()}
    assert own_price_notes(rows, config, calibration({}, given)) == []
    rows.y[1:, 1] = np.nan
    assert own_price_notes(rows, config, calibration({}, off)) == notes
    rows.y[:, 1] = np.nan
    assert own_price_notes(rows, config, calibration({}, off)) == []


def test_the_price_that_money_gives_is_of_the_horizon_and_the_mean_limit_and_the_rest_keeps_the_budget() -> None:
    money = Value(core_hour=0.5, violation=12.0)
    prices = set_prices(valid((2.0, 8.0)), TrainConfig(horizon_s=86_400, value=money)).settings
    for price in prices.values():
        assert isinstance(price, Price)
        assert price.given == (True, False)
        assert price.value[0] == pytest.approx(0.5)  # 12 / (0.5 * 2 limits * 24 hours)
    several = valid((np.nan, np.nan))
    with pytest.raises(ConfigError, match="the mean limit of cpu is unknown"):
        set_prices(several, TrainConfig(value=money))


@pytest.mark.parametrize("horizon_s", HORIZONS_S)
def test_the_budget_is_kept_over_the_horizon_that_is_promised_and_by_tier_where_each_is_to_keep_it(
    horizon_s: int,
) -> None:
    rows, config = valid(), TrainConfig(horizon_s=horizon_s, budgets=Budgets(baseline=0.3, aggressive=0.3))
    rows.windows.tier[: N // 2] = 4
    rows.y[...] = 0.95  # in no horizon but the promised one can the budget be kept below the limit
    rows.y[..., HORIZONS_S.index(horizon_s)] = 0.3
    rows.y[: N // 2, ..., HORIZONS_S.index(horizon_s)] = 0.6  # half of the rows, of a tier of their own
    (together, _), (apart, by_tier) = (
        (of.reclaimed["baseline"], of.settings["baseline"])
        for of in (set_prices(rows, config), set_prices(rows, replace(config, by_tier=True)))
    )
    assert together == pytest.approx((0.4, 0.4), abs=0.05)
    assert apart == pytest.approx((0.55, 0.55), abs=0.05)
    assert isinstance(by_tier, Price)
    assert len(set(by_tier.of_tiers)) == 2


def test_the_built_in_model_is_priced_on_the_same_rows_as_the_one_that_it_is_compared_with() -> None:
    rows = replace(valid(), x=np.zeros((N, N_FEATURES), np.float32))
    config = TrainConfig(horizon_s=86_400, by_tier=True)
    builtin = load_bundle(BUILTIN_FOLDER).forecaster.predict(rows.x, 86_400)
    found = builtin_calibration(rows, config)
    for other, same in ((set_prices(replace(rows, forecast=builtin), config), True), (set_prices(rows, config), False)):
        assert (found.settings == other.settings) is same
        assert (found.reclaimed == other.reclaimed) is same
