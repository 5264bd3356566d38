"""Makes an estimator of a forecaster: features of each window, a quantile of its forecast, times the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Cell, Windows
from reclaim.features.registry import FEATURE_NAMES
from reclaim.features.state import FeatureState
from reclaim.features.targets import HORIZONS_S
from reclaim.training.estimators.base import MODEL, UNKNOWN, Estimate, Estimator

if TYPE_CHECKING:  # a protocol; the network behind it needs torch, this file does not
    from reclaim.training.forecaster import Forecaster

ANCHORS: Final = (0.0, 0.25, 0.5)
"""Weights that the task's own past may have beside the quantile. Quarters, because square roots are exactly rounded
everywhere and other powers are not: the same history must give the same bits."""

_LARGEST: Final = [FEATURE_NAMES.index(f"{resource}_max_24h") for resource in RESOURCES]
_SEEN: Final = FEATURE_NAMES.index("seen")
_YOUNG_SEEN: Final = 3.7
"""log2(1 + 12 windows): with less than an hour of history, the limit stands in for the largest demand."""


class ForecastEstimator(Estimator):
    """Reserves a quantile of what the forecaster expects over a horizon, drawn towards the task's own past.

    Parameters
    ----------
    forecaster : Forecaster
    horizon_s : int
        The horizon the reservation is promised for, in seconds.
    level : float or tuple of float in the order ``schema.RESOURCES``
        Quantile level; one of the forecaster's.
    anchor : float or tuple of float in the order ``schema.RESOURCES``
        Weight of the largest demand of the last 24 hours, one of ``ANCHORS``; see ``anchored``.
    cell : Cell
        What is known of the cell that the tasks run in.
    """

    def __init__(
        self,
        forecaster: Forecaster,
        horizon_s: int,
        level: float | tuple[float, ...],
        anchor: float | tuple[float, ...] = 0.0,
        cell: Cell = Cell(),  # noqa: B008 - frozen
    ) -> None:
        levels, anchors = _for_each_resource("level", level), _for_each_resource("anchor", anchor)
        for name, values, offered in (("level", levels, forecaster.quantile_levels), ("anchor", anchors, ANCHORS)):
            unknown = [value for value in values if value not in offered]
            if unknown:
                raise ConfigError(f"{name} must be one of {offered}, got {unknown[0]}")
        if horizon_s not in forecaster.horizons_s:
            raise ConfigError(f"horizon_s must be one of {forecaster.horizons_s} for this model, got {horizon_s}")
        self.forecaster = forecaster
        self.horizon_s = horizon_s
        self.levels = levels
        self.anchors = anchors
        self._horizon = HORIZONS_S.index(horizon_s)
        self._level = [forecaster.quantile_levels.index(q) for q in levels]
        self._state = FeatureState(cell)

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each; the forecast goes with the answer."""
        return self.answer(self._state.advance(slot, windows), windows)

    def answer(self, x: NDArray[np.float32], windows: Windows) -> Estimate:
        """Answer for windows whose features are known already; remembers nothing.

        Parameters
        ----------
        x : float32, shape (n, n_features)
            What ``FeatureState.advance`` gave after each window, as a feature set stores it.
        windows : Windows
            ``n`` rows.
        """
        forecast = self.forecaster.predict(x)
        # the first targets are the resources, in the same order
        quantile = np.stack(
            [forecast.quantiles[:, r, self._horizon, self._level[r]] for r in range(len(RESOURCES))], axis=1
        )
        reservation = anchored(quantile, x, self.anchors) * windows.limit
        rule = np.where(np.isnan(reservation), np.uint8(UNKNOWN), np.uint8(MODEL))
        return Estimate(reservation, rule, forecast)


def anchored(quantile: NDArray[np.float64], x: NDArray[np.float32], weights: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the weighted geometric mean of quantiles and the largest demand of the last 24 hours, over the limit.

    A network is too sure of tasks unlike those it learned from, and a margin in proportion to its quantile carries the
    fault on; what the task itself has done does not depend on what was learned.

    Parameters
    ----------
    quantile : float64, shape (n, n_resources)
        Over the limit.
    x : float32, shape (n, n_features)
        The features the quantiles were made from.
    weights : tuple of float
        Of the past, per resource; each one of ``ANCHORS``.
    """
    largest = np.minimum(x[:, _LARGEST].astype(np.float64), 1.0)
    largest = np.where(np.isnan(largest) | (x[:, [_SEEN]] < _YOUNG_SEEN), 1.0, largest)
    half = np.sqrt(quantile * largest)
    return np.stack(
        [{0.0: quantile, 0.25: np.sqrt(quantile * half), 0.5: half}[w][:, r] for r, w in enumerate(weights)], axis=1
    )


def _for_each_resource(name: str, value: float | tuple[float, ...]) -> tuple[float, ...]:
    values = value if isinstance(value, tuple) else (value,) * len(RESOURCES)
    if len(values) != len(RESOURCES):
        raise ConfigError(f"{name} must be one number or one for each of {RESOURCES}, got {value}")
    return values
