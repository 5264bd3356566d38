"""Collects rows that a model was not fitted on, with its forecasts, and chooses plans and margins by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.groups import RowKeys, join_keys, row_keys
from reclaim.features.targets import HORIZONS_S
from reclaim.training.estimators.base import MODEL, Estimate, Forecast
from reclaim.training.fitting.sources import Source, windows_of
from reclaim.training.margins.calibrate import Calibration, calibrate, choose_best
from reclaim.training.margins.plan import (
    ANCHORS,
    PASTS,
    PRICES,
    SAFEST,
    Basis,
    Plan,
    plan_for_all,
    reserved,
)
from reclaim.training.models.estimator import UNKNOWN_LIMITS
from reclaim.training.models.oom_calibration import ProbabilityCalibration
from reclaim.training.settings import TrainConfig

if TYPE_CHECKING:
    from reclaim.training.models.forecaster import Forecaster

TEST_ROWS: Final = 200_000
"""Test rows of a source that a model is scored on at the end of training, about; whole tasks are drawn when there are
more, for alerts and their lead time are scored along a task."""
_CHOICE_ROWS: Final = 150_000
"""Validation rows that plans are chosen by, at most: 150 of them may violate at a budget of 0.1 %."""


@dataclass(frozen=True)
class HeldOut:
    """Rows of one period, of all sources one after another.

    Attributes
    ----------
    windows : Windows
        ``n`` rows.
    x : float32, shape (n, n_features)
    forecast : Forecast
    y : float32, shape (n, n_targets, n_horizons)
    oom : float32, shape (n, n_horizons)
    keys : RowKeys
    rows : list of int
        How many of each source.
    mean_limit : tuple of float, in the order ``schema.RESOURCES``, unit of the windows
        Of the sources' validation rows; NaN unknown.
    """

    windows: Windows
    x: NDArray[np.float32]
    forecast: Forecast
    y: NDArray[np.float32]
    oom: NDArray[np.float32]
    keys: RowKeys
    rows: list[int]
    mean_limit: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.x)

    def take(self, rows: NDArray[np.int64]) -> HeldOut:
        """Return the selected rows; ``rows`` (counts per source) is empty in the result."""
        return replace(
            self, windows=self.windows.take(rows), x=self.x[rows], forecast=self.forecast.take(rows), y=self.y[rows],
            oom=self.oom[rows], keys=self.keys.take(rows), rows=[],
        )  # fmt: skip

    def calibrated(self, calibration: ProbabilityCalibration) -> HeldOut:
        """Return the same rows with their OOM probability calibrated."""
        forecast = Forecast(self.forecast.quantiles, calibration.apply(self.forecast.oom_probability))
        return replace(self, forecast=forecast)

    def target(self, horizon_s: int) -> NDArray[np.float64]:
        """Return what a reservation had to cover, over the limit; shape (n, n_resources)."""
        return self.y[:, : len(RESOURCES), HORIZONS_S.index(horizon_s)].astype(np.float64)


def held_out(sources: Sequence[Source], forecaster: Forecaster, rows: Sequence[NDArray[np.int64]]) -> HeldOut:
    """Return chosen rows of each source and the forecasts from their stored features.

    Those are to the bit what the served estimator computes as it goes; so is the estimate made of them.

    Parameters
    ----------
    sources : sequence of Source
    forecaster : Forecaster
    rows : sequence of int64 arrays
        Of each source, in rising order. No target rests on anything measured after a row's own period.
    """
    x = np.concatenate([source.features.x[r] for source, r in zip(sources, rows, strict=True)])
    known = [source.features.targets(r) for source, r in zip(sources, rows, strict=True)]
    y, oom = (np.concatenate(column) for column in zip(*known, strict=True))
    return HeldOut(
        windows=windows_of(sources, rows),
        x=x,
        forecast=forecaster.predict(x),
        y=y,
        oom=oom,
        keys=join_keys([row_keys(source.dataset, source.features, r) for source, r in zip(sources, rows, strict=True)]),
        rows=[len(r) for r in rows],
        mean_limit=mean_limit_of(sources),
    )


def mean_limit_of(sources: Sequence[Source]) -> tuple[float, ...]:
    """Return the mean limit that tasks are compared with; unknown of several sources, whose units differ."""
    return sources[0].features.mean_limit if len(sources) == 1 else UNKNOWN_LIMITS


def sampled_test_rows(sources: Sequence[Source], seed: int) -> list[NDArray[np.int64]]:
    """Return test rows of each source, of whole tasks drawn by the seed: about ``TEST_ROWS`` of each at most."""
    return [_of_whole_tasks(source.features, seed) for source in sources]


def _of_whole_tasks(features: FeatureSet, seed: int) -> NDArray[np.int64]:
    rows = features.test_rows()
    if len(rows) <= TEST_ROWS:
        return rows
    _, task, count = np.unique(features.first[rows], return_inverse=True, return_counts=True)
    drawn = np.random.default_rng(seed).permutation(len(count))
    enough = int(np.searchsorted(np.cumsum(count[drawn]), TEST_ROWS)) + 1  # the one that passes it, too
    return rows[np.isin(task, drawn[:enough])]


def choose_plans(valid: HeldOut, levels: tuple[float, ...], config: TrainConfig) -> tuple[dict[str, Plan], Calibration]:
    """Choose per resource and budget what is reserved of a forecast, then set the margins around it.

    Parameters
    ----------
    valid : HeldOut
        Validation rows.
    levels : tuple of float
        Quantile levels of the forecasts.
    config : TrainConfig
    """
    if config.anchor is None:
        leanings = [(anchor, past) for anchor in ANCHORS for past in (PASTS if anchor else PASTS[:1])]
    else:
        leanings = [(config.anchor, PASTS[0])]
    if config.level is not None:
        offered = [Basis(config.level, None, *leaning) for leaning in leanings]
    else:
        lowest = min(levels, key=lambda level: abs(level - SAFEST))
        # where the past alone is reserved, no price matters
        prices = {leaning: PRICES[-1:] if leaning[0] == 1 else PRICES for leaning in leanings}
        offered = [Basis(lowest, price, *leaning) for leaning in leanings for price in prices[leaning]]
    some = valid
    if len(valid) > _CHOICE_ROWS and len(offered) > 1:
        rows = np.random.default_rng(config.seed).choice(len(valid), _CHOICE_ROWS, replace=False)
        some = valid.take(np.sort(rows))

    def calibrated(rows: HeldOut, plans: dict[str, Plan], *, by_group: bool) -> Calibration:
        bases = {name: _bare(rows, levels, plan, config.horizon_s) for name, plan in plans.items()}
        return calibrate(bases, rows.windows, rows.target(config.horizon_s), config.budgets, by_group=by_group)

    candidates = {
        basis: calibrated(some, dict.fromkeys(("baseline", "aggressive"), plan_for_all(basis)), by_group=False)
        for basis in offered
    }
    plans = {name: tuple(choose_best(candidates, name)) for name in ("baseline", "aggressive")}
    return plans, calibrated(valid, plans, by_group=config.by_group)


def _bare(rows: HeldOut, levels: tuple[float, ...], plan: Plan, horizon_s: int) -> Estimate:
    quantiles = rows.forecast.quantiles[:, : len(RESOURCES), HORIZONS_S.index(horizon_s)]
    reservation = reserved((plan,), quantiles, levels, rows.x, rows.windows.limit, rows.mean_limit)[:, 0]
    return Estimate(reservation, np.full(reservation.shape, MODEL, np.uint8))
