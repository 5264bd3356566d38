"""Statistics of a task's whole usage so far: the largest, the mean."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.training.estimators.base import Estimate, Estimator, grid, known_statistic

_TASK: Final = np.dtype(
    [("value", "f8", len(RESOURCES)), ("end_us", "i8"), ("count", "i4", len(RESOURCES))], align=True
)


class _RunningEstimator(Estimator):
    """A statistic of demand, capped to the current limit, in the unit of usage; the limit until warm.

    Parameters
    ----------
    min_samples : int
        Windows until it is warm, as all predictors of the EuroSys'21 simulator are set.
    """

    CANDIDATES = grid(min_samples=(24, 3, 6, 12))
    _mean: bool

    def __init__(self, min_samples: int = 24) -> None:
        if min_samples < 1:
            raise ConfigError(f"min_samples must be at least 1, got {min_samples}")
        self.min_samples = min_samples
        self._memory = {"task": np.zeros(0, _TASK)}

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._make_room(slot)
        capped, out = np.minimum(demand(windows), windows.limit), np.empty_like(windows.limit)

        def fold(*columns: Any) -> None:
            _fold(self._memory["task"], self._mean, self.min_samples, *columns)

        self._in_parts(fold, slot, (windows.end_us, capped), out)
        return known_statistic(out)


class MaxSoFarEstimator(_RunningEstimator):
    """The largest demand so far (EuroSys'21 simulator)."""

    _mean = False


class MeanSoFarEstimator(_RunningEstimator):
    """The mean demand so far (EuroSys'21 simulator)."""

    _mean = True


@numba.njit(**LENT)
def _fold(state: Any, mean: bool, min_samples: int, slot: Any, end_us: Any, capped: Any, out: Any) -> None:
    for i in range(len(slot)):
        s = state[slot[i]]
        new = end_us[i] > s.end_us  # a repeated or late window changes nothing
        if new:
            s.end_us = end_us[i]
        for r in range(capped.shape[1]):
            if new and not np.isnan(capped[i, r]):
                s.count[r] += 1
                s.value[r] = s.value[r] + capped[i, r] if mean else max(s.value[r], capped[i, r])
            value = s.value[r] / s.count[r] if mean else s.value[r]
            out[i, r] = value if s.count[r] >= min_samples else np.nan
