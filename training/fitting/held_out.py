"""Collects rows that a model was not fitted on, with its forecasts, and sets prices by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.errors import HistoryTooShortError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.groups import RowKeys, join_keys, row_keys
from reclaim.features.seen import SEEN, holds
from reclaim.features.targets import HORIZONS_S
from reclaim.training.bundle import load_bundle
from reclaim.training.estimators.base import Forecast
from reclaim.training.fitting.sources import NO_ROWS, Source, windows_of
from reclaim.training.margins.answers import Priced, scores_of
from reclaim.training.margins.calibrate import Calibration, calibrate, known_rows
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.online import own_prices
from reclaim.training.margins.own_price import FAR
from reclaim.training.margins.price import Price
from reclaim.training.models.estimator import UNKNOWN_LIMITS, ladder_at, risk_at
from reclaim.training.models.oom_calibration import ProbabilityCalibration
from reclaim.training.settings import TrainConfig
from reclaim.training.tracking.references import BUILTIN_FOLDER

if TYPE_CHECKING:
    from reclaim.training.models.forecaster import Forecaster

NOISE: Final = 0.01
"""Share of the limits by which two seeds of one model differ."""
TEST_ROWS: Final = 200_000
"""Test rows of a source that a model is scored on at the end of training, about; whole tasks are drawn when there are
more, for alerts and their lead time are scored along a task."""


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

    def calibrated(self, calibration: ProbabilityCalibration) -> HeldOut:
        """Return the same rows with their OOM probability calibrated."""
        probability = calibration.apply(self.forecast.oom_probability)
        return replace(self, forecast=replace(self.forecast, oom_probability=probability))

    def target(self, horizon_s: int) -> NDArray[np.float64]:
        """Return what a reservation had to cover, over the limit; shape (n, n_resources)."""
        return self.y[:, : len(RESOURCES), HORIZONS_S.index(horizon_s)].astype(np.float64)


def held_out(sources: Sequence[Source], forecaster: Forecaster, rows: Sequence[NDArray[np.int64]]) -> HeldOut:
    """Return chosen rows of each source and the forecasts from their stored features.

    They equal to the bit what the served estimator computes window by window; so does the estimate made from them.

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


def validation_rows(sources: Sequence[Source], horizon_s: int) -> list[NDArray[np.int64]]:
    """Return the validation rows of each source; HistoryTooShortError where no price can be set on them."""
    rows = [source.features.valid_rows() for source in sources]
    if not sum(map(len, rows)):
        raise HistoryTooShortError(
            f"{', '.join(str(source.dataset.path) for source in sources)}: expected at least 1 validation row, got 0: "
            f"{NO_ROWS}"
        )
    y = np.concatenate([source.features.targets(r)[0] for source, r in zip(sources, rows, strict=True)])
    known_rows(windows_of(sources, rows), y[:, : len(RESOURCES), HORIZONS_S.index(horizon_s)])
    return rows


def mean_limit_of(sources: Sequence[Source]) -> tuple[float, ...]:
    """Return the mean limit that tasks are compared with; unknown of several sources, whose units differ."""
    return sources[0].features.mean_limit if len(sources) == 1 else UNKNOWN_LIMITS


def sampled_test_rows(sources: Sequence[Source], seed: int) -> list[NDArray[np.int64]]:
    """Return test rows of each source, of whole tasks drawn by the seed: about ``TEST_ROWS`` of each at most."""
    return [_of_whole_tasks(source.features, seed) for source in sources]


def _of_whole_tasks(features: FeatureSet, seed: int) -> NDArray[np.int64]:
    rows = features.test_rows()
    _, task, count = np.unique(features.first[rows], return_inverse=True, return_counts=True)
    drawn = np.random.default_rng(seed).permutation(len(count))
    enough = int(np.searchsorted(np.cumsum(count[drawn]), TEST_ROWS)) + 1  # the one that passes it, too
    return rows[np.isin(task, drawn[:enough])]


def builtin_saw(source: Source) -> bool:
    """Return whether the built-in model learned from windows of the validation period of a dataset, by ``SEEN``."""
    learned_from = load_bundle(BUILTIN_FOLDER).trained["datasets"]
    held = holds([facts[SEEN] for facts in learned_from], source.features, [source.features.cuts_us])
    return any(of_validation for (of_validation,) in held)


def builtin_calibration(valid: HeldOut, config: TrainConfig) -> Calibration:
    """Return the prices of the built-in model for the same rows and budgets, and its results at them."""
    forecast = load_bundle(BUILTIN_FOLDER).forecaster.predict(valid.x, config.horizon_s)
    return set_prices(replace(valid, forecast=forecast), config)


def less_reclaimed(calibration: Calibration, other: Calibration, budgets: Budgets) -> list[str]:
    """Return where a model reclaims less than another one at the same budget, in words; beyond ``NOISE``."""
    return [
        f"{100 * mine:.1f} % of {RESOURCE_WORDS[resource]} for {100 * theirs:.1f} % at a budget of {100 * budget:g} %"
        for margin, budget in asdict(budgets).items()
        for resource, mine, theirs in zip(
            RESOURCES, calibration.reclaimed[margin], other.reclaimed[margin], strict=True
        )
        if mine < theirs - NOISE
    ]


def own_price_notes(valid: HeldOut, config: TrainConfig, calibration: Calibration) -> list[str]:
    """Return where the price that was set and the one that the curves expect differ by more than ``FAR``, in words."""
    ladder = ladder_at(valid.forecast, config.horizon_s, valid.windows.limit, valid.mean_limit)
    risk = risk_at(valid.forecast, config.horizon_s, ladder, valid.windows)
    tier = np.zeros(len(valid), np.int64)
    own = own_prices(
        {n: p for n, p in calibration.settings.items() if isinstance(p, Price)}, config.budgets, tier, risk
    )
    notes = []
    for margin in asdict(config.budgets):
        setting = calibration.settings[margin]
        assert isinstance(setting, Price)
        for r, resource in enumerate(RESOURCES):
            ratio = setting.value[r] / own[margin].of_tiers[0][r]
            if (
                not setting.given[r]
                and not 1 / FAR < ratio < FAR
                and np.isfinite(valid.target(config.horizon_s)[:, r]).any()
            ):
                times = f"{ratio:,.0f} times" if ratio > 1 else f"1/{1 / ratio:,.0f} of"
                notes.append(
                    f"{resource}, {margin}: the price set on validation rows is {times} the one at which the model "
                    "itself expects the budget: a sign of drift, or of too little training"
                )
    return notes


def set_prices(valid: HeldOut, config: TrainConfig) -> Calibration:
    """Set, per resource and budget, the price of a violation that keeps the budget on validation rows, or its value."""
    ladder = ladder_at(valid.forecast, config.horizon_s, valid.windows.limit, valid.mean_limit)
    given = scores_of(config.value.prices(valid.mean_limit, config.horizon_s))
    return calibrate(
        Priced(ladder), valid.windows, valid.target(config.horizon_s), config.budgets, by_tier=config.by_tier,
        given=given,
    )  # fmt: skip
