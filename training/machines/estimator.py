"""Reserves for machines: terms of tasks in, the peak of their sum out; the same in replay and service."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.features.registry import AT
from reclaim.training.estimators.base import Forecast
from reclaim.training.machines.curve import MachineCurve
from reclaim.training.machines.terms import PAST, shares_of, terms_of

Floats = NDArray[np.float64]
Curves = tuple[MachineCurve, ...]
"""By resource, in the order ``schema.RESOURCES``."""

BOUND: Final[Curves] = (MachineCurve(),) * len(RESOURCES)
"""Curves that need no training and no peaks seen."""
_SEEN: Final = AT["seen"]
_PAST: Final = np.array([[AT[f"{resource}_{name}"] for name in PAST] for resource in RESOURCES])


class MachineEstimator:
    """Predicts the peak of any set of tasks from the sums of their terms.

    Parameters
    ----------
    curves : Curves
    horizon_s : int
        The horizon of the peaks, in seconds.
    mean_limit : tuple of float, in the order ``schema.RESOURCES``, unit of the limit
        Of the cell's tasks; where unknown, 1: too small a one reserves too much.
    """

    def __init__(self, curves: Curves, horizon_s: int, mean_limit: tuple[float, ...]) -> None:
        self.curves = curves
        self.horizon_s = horizon_s
        self.mean_limit = tuple(limit if math.isfinite(limit) and limit > 0 else 1.0 for limit in mean_limit)

    def terms(self, forecast: Forecast, x: NDArray[np.float32], windows: Windows) -> Floats:
        """Return what each of ``n`` tasks adds to the sums of its machine; shape (n, n_resources, N_TERMS).

        Parameters
        ----------
        forecast : Forecast
        x : float32, shape (n, n_features)
            The features that it rests on.
        windows : Windows
            The last windows.
        """
        return terms_of(self.shares(forecast, x, windows), demand(windows), windows.limit)

    def shares(
        self, forecast: Forecast, x: NDArray[np.float32], windows: Windows, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Return the shares that, with demand and limit, give the terms; float32, (n, n_resources, N_SHARES).

        It is written into ``out``, zeros of that shape, where the caller has it.
        """
        seen = np.rint(np.exp2(x[:, _SEEN].astype(np.float64)) - 1.0).astype(np.int64)
        return shares_of(
            forecast.survival, forecast.thresholds, demand(windows), windows.limit, seen, x.take(_PAST, axis=1),
            self.mean_limit, forecast.horizons_s.index(self.horizon_s), out,
        )  # fmt: skip

    def peak(self, sums: Floats, budget: float) -> Floats:
        """Return what is reserved for sets, shape (n, n_resources, N_TERMS), within a budget; shape (n, n_resources).

        The budget is the share of machines' times at which the peak may pass it.
        """
        return self.at([curve.margin(budget) for curve in self.curves], sums)

    def at(self, margins: Sequence[float], sums: Floats) -> Floats:
        """Return what is reserved at margins of the resources; shape (n, n_resources)."""
        each = zip(self.curves, margins, self.mean_limit, strict=True)
        return np.stack([c.peak(sums[:, r], margin, mean) for r, (c, margin, mean) in enumerate(each)], axis=1)
