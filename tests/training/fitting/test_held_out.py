"""Tests of what is said of prices that were set on rows held out, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, empty_windows
from reclaim.features.groups import RowKeys
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.fitting.held_out import HeldOut, less_reclaimed, own_price_notes
from reclaim.training.margins.calibrate import Calibration
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.online import own_prices
from reclaim.training.margins.own_price import FAR
from reclaim.training.margins.price import Price
from reclaim.training.models.estimator import ladder_at, risk_at
from reclaim.training.models.survival import N_BELOW, N_THRESHOLDS
from reclaim.training.settings import TrainConfig

N, H = 200, len(HORIZONS_S)


def calibration(reclaimed: Mapping[str, tuple[float, ...]], settings: Mapping[str, Price] | None = None) -> Calibration:
    """Return a calibration of which only one part is looked at."""
    return Calibration(settings or {}, {}, {}, reclaimed, (N, N), ())


def valid() -> HeldOut:
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
    return HeldOut(windows, np.zeros((N, 1), np.float32), forecast, y, y[:, 0], keys, [N], (1.0, 1.0))


def test_a_model_reclaims_less_where_it_is_behind_at_the_same_budget_by_more_than_two_seeds_differ() -> None:
    mine = {"baseline": (0.50, 0.20), "medium": (0.50, np.nan), "aggressive": (0.70, 0.40)}
    other = {"baseline": (0.505, 0.22), "medium": (0.40, 0.30), "aggressive": (0.90, 0.409)}
    budgets = Budgets(baseline=0.001, aggressive=0.01)  # medium has none
    assert less_reclaimed(calibration(mine), calibration(other), budgets) == [
        "memory at 0.001: 20.0% for 22.0%",
        "cpu at 0.01: 70.0% for 90.0%",
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
    at = f"memory, aggressive: the price set on validation rows is {times:.2g} times"
    assert all(note.startswith(at) for note in notes)
    given = {name: replace(price, given=(False, True)) for name, price in off.items()}
    assert own_price_notes(rows, config, calibration({}, given)) == []
    rows.y[:, 1] = np.nan
    assert own_price_notes(rows, config, calibration({}, off)) == []
