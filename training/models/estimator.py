"""Makes an estimator of a forecaster: features of each window, then what two plans reserve of its forecast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Cell, Windows
from reclaim.features.fold.batch import FeatureState
from reclaim.features.registry import feature_names
from reclaim.training.estimators.base import MODEL, UNKNOWN, Estimate, Estimator, Forecast
from reclaim.training.margins.margin import NO_MARGIN, Margin, under
from reclaim.training.margins.plan import Plan, reserved

if TYPE_CHECKING:  # a protocol; the network behind it needs torch, this file does not
    from reclaim.training.models.forecaster import Forecaster

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
        Mean limit of the cell's tasks, compared with which a task is large or small (``plan.reserved``).
    cell : Cell
        What is known of the cell that the tasks run in.
    related : bool
        Whether the forecaster reads the features of related tasks, too.

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
        *,
        related: bool = False,
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
        self._names = feature_names(related=related)
        self._state = FeatureState(cell, related=related)

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each; the forecast goes with the answer."""
        return self.answer(self._state.advance(slot, windows), windows)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what the features remember; a forecaster remembers nothing, so any model may go on from it."""
        return self._state.state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Let the features go on from there; ``ConfigError`` where it is of another cell, or other code saved it."""
        self._state.restore(state)

    def bare(
        self, x: NDArray[np.float32], windows: Windows, *, all_horizons: bool = True
    ) -> tuple[NDArray[np.float64], Forecast]:
        """Return what each plan reserves before any margin, and the forecast it rests on; remembers nothing.

        A service keeps both and applies a margin when it is asked for one.

        Parameters
        ----------
        x : float32, shape (n, n_features)
            What ``FeatureState.advance`` gave after each window, as a feature set stores it; may have the features of
            related tasks where the forecaster reads none.
        windows : Windows
            ``n`` rows.
        all_horizons : bool
            False: the forecast is of the estimator's own horizon alone (``Forecast.horizons_s``), to the same bits
            sooner.

        Returns
        -------
        bare : float64, shape (n, n_plans, n_resources), unit of the limit
            In the order of ``plans``; NaN where nothing is forecast or the limit is unknown.
        forecast : Forecast
        """
        forecast = self.forecaster.predict(x[:, : len(self._names)], None if all_horizons else self.horizon_s)
        quantiles, _ = forecast.at(self.horizon_s)
        levels, threads = self.forecaster.quantile_levels, self.forecaster.threads
        plans = tuple(self.plans.values())
        return reserved(plans, quantiles, levels, x, windows.limit, self.mean_limit, threads), forecast

    def under_margin(
        self,
        margin: str,
        bare: NDArray[np.float64],
        windows: Windows,
        forecast: Forecast | None = None,
    ) -> Estimate:
        """Return the estimate under one of ``MARGIN_NAMES``, before the guards; the forecast goes with it as it is.

        Parameters
        ----------
        margin : str
        bare : float64, shape (n, n_plans, n_resources)
            What ``bare`` gave; not changed.
        windows : Windows
            The ``n`` rows it was given for.
        forecast : Forecast or None
        """
        widened = {name: bare[:, k] * self.margins[name].factor(windows) for k, name in enumerate(self.plans)}
        return _estimate(under(margin, widened), forecast)

    def answer(self, x: NDArray[np.float32], windows: Windows) -> Estimate:
        """Answer for windows whose features are known already; arguments as for ``bare``, remembers nothing."""
        bare, forecast = self.bare(x, windows)
        return self.under_margin(self.margin, bare, windows, forecast)

    def answer_each(self, x: NDArray[np.float32], windows: Windows) -> dict[str, Estimate]:
        """Return what each plan reserves, before any margin and without the forecast; arguments as for ``bare``."""
        bare, _ = self.bare(x, windows, all_horizons=False)
        return {name: _estimate(bare[:, k].copy(), None) for k, name in enumerate(self.plans)}


def _estimate(reservation: NDArray[np.float64], forecast: Forecast | None) -> Estimate:
    return Estimate(reservation, np.where(np.isnan(reservation), np.uint8(UNKNOWN), np.uint8(MODEL)), forecast)
