"""Makes an estimator from a forecaster: features of each window, then what a price reserves of its forecast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Cell, Windows, demand
from reclaim.features.fold.batch import FeatureState
from reclaim.training.estimators.base import MODEL, UNKNOWN, Estimate, Estimator, Forecast
from reclaim.training.margins.ladder import Ladder, ladder_of, reserved_at, size_weight
from reclaim.training.margins.own_price import Risk, risk_of
from reclaim.training.margins.price import Price
from reclaim.training.models.steps import Steps, steps_at
from reclaim.training.models.survival import N_BELOW

if TYPE_CHECKING:  # a protocol; the network behind it needs torch, this file does not
    from reclaim.training.models.forecaster import Forecaster

UNKNOWN_LIMITS = (float("nan"),) * len(RESOURCES)
"""Mean limits of an unknown cell: every task weighs the same."""
_FREE = Price("none", (0.0,) * len(RESOURCES))


class Earlier(NamedTuple):
    """Forecaster of rows that another one learned from: of windows that end by ``until_us`` on the trace's clock."""

    until_us: int
    forecaster: Forecaster


class ForecastEstimator(Estimator):
    """Reserves at a price of violations what the forecast over a horizon says (``margins.price``).

    Parameters
    ----------
    forecaster : Forecaster
    horizon_s : int
        The horizon the reservation is promised for, in seconds; one of the forecaster's.
    price : Price
    mean_limit : tuple of float in the order ``schema.RESOURCES``, unit of the limit
        Mean limit of the cell's tasks, compared with which a task is large or small (``ladder.size_weight``).
    cell : Cell
        What is known of the cell that the tasks run in.
    own_price : bool
        Whether the model's price is solved from its curves (``margins.own_price``).
    earlier : Earlier or None
        For a replay of what the forecaster learned from.
    """

    def __init__(
        self,
        forecaster: Forecaster,
        horizon_s: int,
        price: Price = _FREE,
        mean_limit: tuple[float, ...] = UNKNOWN_LIMITS,
        cell: Cell = Cell(),  # noqa: B008 - frozen
        *,
        own_price: bool = False,
        earlier: Earlier | None = None,
    ) -> None:
        self.forecaster = forecaster
        self.horizon_s = horizon_s
        self.price = price
        self.mean_limit = mean_limit
        self.own_price = own_price
        self.earlier = earlier
        self._state = FeatureState(cell)

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each; the forecast goes with the answer."""
        return self.answer(self._state.advance(slot, windows), windows)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the state of the features; a forecaster has none, so any model may continue from it."""
        return self._state.state()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Let the features continue from there; ``ConfigError`` where it is of another cell, or other code saved it."""
        self._state.restore(state)

    def forecast(self, x: NDArray[np.float32], windows: Windows, horizon_s: int | None = None) -> Forecast:
        """Return the forecast after windows, of one horizon or of all; arguments as for ``ladder``."""
        if self.earlier is None:
            return self.forecaster.predict(x, horizon_s)
        before = windows.end_us <= self.earlier.until_us
        if before.all():
            return self.earlier.forecaster.predict(x, horizon_s)
        forecast = self.forecaster.predict(x, horizon_s)
        if before.any():
            forecast.put(np.flatnonzero(before), self.earlier.forecaster.predict(x[before], horizon_s))
        return forecast

    def ladder(self, x: NDArray[np.float32], windows: Windows, *, all_horizons: bool = True) -> tuple[Ladder, Forecast]:
        """Return what is reserved at every price, and the forecast it rests on; remembers nothing.

        A service keeps both and applies a price when it is asked for one.

        Parameters
        ----------
        x : float32, shape (n, n_features)
            What ``FeatureState.advance`` gave after each window, as a feature set stores it.
        windows : Windows
            ``n`` rows.
        all_horizons : bool
            False: the forecast is of the estimator's own horizon alone (``Forecast.horizons_s``), to the same bits
            sooner.
        """
        forecast = self.forecast(x, windows, None if all_horizons else self.horizon_s)
        ladder = ladder_at(forecast, self.horizon_s, windows.limit, self.mean_limit, self.forecaster.threads)
        return ladder, forecast

    def steps(self, x: NDArray[np.float32], windows: Windows, *, risks: bool) -> tuple[Steps, Risk | None, Forecast]:
        """Return what ``ladder`` and ``risk`` say at the estimator's horizon, the ladder as the rungs where it rises.

        Arguments as for ``ladder``; without ``risks`` these are None.
        """
        forecast = self.forecast(x, windows, self.horizon_s)
        used = _used(windows) if risks else None
        steps, risk = steps_at(forecast, self.horizon_s, windows.limit, self.mean_limit, used, self.forecaster.threads)
        return steps, risk, forecast

    def risk(self, ladder: Ladder, forecast: Forecast, windows: Windows) -> Risk:
        """Return the risk at each price of what ``ladder`` gave."""
        return risk_at(forecast, self.horizon_s, ladder, windows, self.forecaster.threads)

    def answer(self, x: NDArray[np.float32], windows: Windows) -> Estimate:
        """Answer for windows whose features are known already; arguments as for ``ladder``, remembers nothing."""
        ladder, forecast = self.ladder(x, windows)
        return at_price(self.price, ladder, windows, forecast)


def ladder_at(
    forecast: Forecast,
    horizon_s: int,
    limit: NDArray[np.float64],
    mean_limit: tuple[float, ...],
    threads: int = 1,
) -> Ladder:
    """Return what is reserved at every price of a forecast over a horizon, of tasks of these limits (n, n_resources).

    Thresholds below what is used now are left out, for a guard lifts to that.
    """
    return ladder_of(*_from_now(forecast, horizon_s), size_weight(limit, mean_limit), threads)


def risk_at(forecast: Forecast, horizon_s: int, ladder: Ladder, windows: Windows, threads: int = 1) -> Risk:
    """Return the risk at each price of what ``ladder_at`` gave."""
    return risk_of(ladder, *_from_now(forecast, horizon_s), _used(windows), threads)


def _used(windows: Windows) -> NDArray[np.float64]:
    """Return the demand of windows over their limits, shape (n, n_resources); NaN where either is unknown."""
    return demand(windows) / np.where(windows.limit > 0, windows.limit, np.nan)


def _from_now(forecast: Forecast, horizon_s: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the curves of the resources, the first targets, over a horizon, and their thresholds from used now on."""
    of_resources = slice(len(RESOURCES))
    survival = forecast.survival[:, of_resources, forecast.horizons_s.index(horizon_s), N_BELOW:]
    return survival, forecast.thresholds[:, of_resources, N_BELOW:]


def at_price(price: Price, ladder: Ladder, windows: Windows, forecast: Forecast | None = None) -> Estimate:
    """Return the estimate of tasks at a price, before the guards; the forecast goes with it as it is.

    Unknown where nothing is forecast or the limit is unknown.
    """
    return as_estimate(reserved_at(ladder, price.rung(windows), windows.limit), forecast)


def as_estimate(reservation: NDArray[np.float64], forecast: Forecast | None = None) -> Estimate:
    """Return reservations of a model, shape (n, n_resources), as an estimate."""
    return Estimate(reservation, np.where(np.isnan(reservation), np.uint8(UNKNOWN), np.uint8(MODEL)), forecast)
