"""Makes an estimator of a forecaster: features of each window, then what two plans reserve of its forecast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Cell, Windows
from reclaim.features.state import FeatureState
from reclaim.features.targets import HORIZONS_S
from reclaim.training.estimators.base import MODEL, UNKNOWN, Estimate, Estimator, Forecast
from reclaim.training.estimators.margin import NO_MARGIN, Margin, under
from reclaim.training.estimators.plan import Plan, reserved_share, size_weight

if TYPE_CHECKING:  # a protocol; the network behind it needs torch, this file does not
    from reclaim.training.forecaster import Forecaster

UNKNOWN_LIMITS = (float("nan"),) * len(RESOURCES)
"""Mean limits of a cell of which nothing is known: every task weighs the same."""


class ForecastEstimator(Estimator):
    """Reserves what a plan says of the forecast over a horizon, or half way between two plans.

    Parameters
    ----------
    forecaster : Forecaster
    horizon_s : int
        The horizon the reservation is promised for, in seconds.
    plans : mapping of margin name to Plan
        For ``baseline`` and ``aggressive``.
    margins : mapping of margin name to Margin, or None
        What is added to the reservation of each; None adds nothing.
    margin : str
        One of ``MARGIN_NAMES``; see ``margin.under``.
    mean_limit : tuple of float in the order ``schema.RESOURCES``, unit of the limit
        Mean limit of the cell's tasks, beside which a task is large or small (``plan.size_weight``).
    cell : Cell
        What is known of the cell that the tasks run in.

    Raises
    ------
    ConfigError
        The forecaster has no such level or horizon.
    """

    def __init__(
        self,
        forecaster: Forecaster,
        horizon_s: int,
        plans: Mapping[str, Plan],
        margins: Mapping[str, Margin] | None = None,
        margin: str = "baseline",
        mean_limit: tuple[float, ...] = UNKNOWN_LIMITS,
        cell: Cell = Cell(),  # noqa: B008 - frozen
    ) -> None:
        for plan in plans.values():
            for basis in plan:
                basis.check(forecaster.quantile_levels)
        if horizon_s not in forecaster.horizons_s:
            raise ConfigError(f"horizon_s must be one of {forecaster.horizons_s} for this model, got {horizon_s}")
        self.forecaster = forecaster
        self.horizon_s = horizon_s
        self.plans = dict(plans)
        self.margins = (
            {name: NO_MARGIN for name in plans} if margins is None else {name: margins[name] for name in plans}
        )
        self.margin = margin
        self.mean_limit = mean_limit
        self._horizon = HORIZONS_S.index(horizon_s)
        self._state = FeatureState(cell)

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each; the forecast goes with the answer."""
        return self.answer(self._state.advance(slot, windows), windows)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the features remember; a forecaster remembers nothing, so any model may go on from it."""
        return self._state.state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Let the features go on from there; ``ConfigError`` where it is of another cell, or other code saved it."""
        self._state.restore(state)

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
        bare = self._bare(forecast, x, windows)
        for name, margin in self.margins.items():
            bare[name] *= margin.factor(windows)
        return _estimate(under(self.margin, bare), forecast)

    def answer_each(self, x: NDArray[np.float32], windows: Windows) -> dict[str, Estimate]:
        """Return what each plan reserves, before any margin and without the forecast; arguments as for ``answer``."""
        bare = self._bare(self.forecaster.predict(x), x, windows)
        return {name: _estimate(reservation, None) for name, reservation in bare.items()}

    def _bare(self, forecast: Forecast, x: NDArray[np.float32], windows: Windows) -> dict[str, NDArray[np.float64]]:
        quantiles = forecast.quantiles[:, : len(RESOURCES), self._horizon]  # the first targets are the resources
        weight = size_weight(windows.limit, self.mean_limit)
        levels = self.forecaster.quantile_levels
        return {
            name: reserved_share(plan, quantiles, levels, x, weight) * windows.limit
            for name, plan in self.plans.items()
        }


def _estimate(reservation: NDArray[np.float64], forecast: Forecast | None) -> Estimate:
    return Estimate(reservation, np.where(np.isnan(reservation), np.uint8(UNKNOWN), np.uint8(MODEL)), forecast)
