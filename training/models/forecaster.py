"""Defines a forecaster: features in, curves of every target and the OOM probability out, each row for itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast


@dataclass(frozen=True)
class Heads:
    """Outputs that were fitted; the others mean nothing.

    Attributes
    ----------
    targets : bool, shape (n_targets, n_horizons)
    oom : bool, shape (n_horizons,)
    """

    targets: NDArray[np.bool_]
    oom: NDArray[np.bool_]


ALL_HEADS: Final = Heads(np.ones((len(TARGETS), len(HORIZONS_S)), np.bool_), np.ones(len(HORIZONS_S), np.bool_))


class InputRanges(NamedTuple):
    """Spread of the features of the training rows, after ``network.squash``; each float32, shape (n_features,).

    ``mean`` and ``scale`` standardise; ``low`` and ``high`` are the range that training saw, in those units.
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]


class Forecaster(Protocol):
    """Answer of a learned model.

    Attributes
    ----------
    quantile_levels : tuple of float
        Last axis of ``Forecast.quantiles``, increasing.
    horizons_s : tuple of int
        Horizons it was fitted for, in seconds; at the others its answers are NaN.
    heads : Heads
        What it was fitted for; all else is NaN.
    threads : int
        For large calls; the answers do not depend on it.
    """

    threads: int

    @property
    def heads(self) -> Heads: ...  # noqa: D102 - see the class

    @property
    def quantile_levels(self) -> tuple[float, ...]: ...  # noqa: D102 - see the class

    @property
    def horizons_s(self) -> tuple[int, ...]: ...  # noqa: D102 - see the class

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the forecast of each row of features, shape (n, n_features); NaN for what is not fitted.

        The curves are those at the thresholds of ``survival.thresholds_of``, with what ``survival.forecast_of`` reads
        off them.

        With ``horizon_s``, one of ``features.targets.HORIZONS_S``, the forecast is of that horizon alone: the same
        bits, sooner.
        """

    def input_ranges(self) -> InputRanges | None:
        """Return how the features were spread that it was trained on; None where that was not kept."""

    def save(self, folder: Path) -> None:
        """Write what ``load`` of the same class reads, without pickle, into an existing folder."""
