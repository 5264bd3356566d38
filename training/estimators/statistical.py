"""Statistical estimators that others run in production: limit, moving maximum, N-sigma, percentile."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.training.estimators.base import LIMIT, STATISTIC, UNKNOWN, Estimate, Estimator, room_for

_MEAN_SIGMA, _PERCENTILE, _MAXIMUM = range(3)


class LimitEstimator(Estimator):
    """Reserve the limit: no reclamation, what everything is measured against."""

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:  # noqa: ARG002 - no state, no task
        """Answer with the limit."""
        return Estimate(windows.limit.copy(), np.full(windows.limit.shape, LIMIT, np.uint8))


class _RingEstimator(Estimator):
    """A statistic of the last ``context`` values of demand over limit, times the limit now; the limit until warm.

    That order (ratio first, then the limit in force) is the one of the EuroSys'21 simulator.
    """

    _statistic: int

    def __init__(self, parameter: float, context: int, min_samples: int) -> None:
        if context < 1 or min_samples < 1 or min_samples > context:
            raise ConfigError(f"expected 1 <= min_samples <= context, got {min_samples=}, {context=}")
        self.context = context
        self.min_samples = min_samples
        self._parameter = parameter
        self._dtype = np.dtype(
            [("ring", "f8", (len(RESOURCES), context)), ("count", "i8", len(RESOURCES)), ("end_us", "i8")]
        )
        self._state = np.zeros(0, self._dtype)

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._state = room_for(self._state, slot)
        out = np.empty_like(windows.limit)
        ratio = demand(windows) / windows.limit
        _fold_ring(
            self._state, slot, windows.end_us, ratio, windows.limit,
            self._statistic, self._parameter, self.min_samples, out,
        )  # fmt: skip
        warm = np.isfinite(out)
        rule = np.where(warm, np.uint8(STATISTIC), np.uint8(UNKNOWN))
        return Estimate(np.where(warm, out, windows.limit), rule)


class NSigmaEstimator(_RingEstimator):
    """Mean plus ``n`` sample standard deviations of the last windows of the task (per-task form of EuroSys'21's)."""

    _statistic = _MEAN_SIGMA

    def __init__(self, n: float = 5.0, context: int = 24, min_samples: int = 24) -> None:
        if not n >= 0:
            raise ConfigError(f"n must be at least 0, got {n}")
        super().__init__(n, context, max(min_samples, 2))


class PercentileEstimator(_RingEstimator):
    """A percentile, linearly interpolated, of the last windows of the task (Resource Central style, EuroSys'21)."""

    _statistic = _PERCENTILE

    def __init__(self, level: float = 99.0, context: int = 24, min_samples: int = 24) -> None:
        if not 0 <= level <= 100:
            raise ConfigError(f"level must be between 0 and 100 percent, got {level}")
        super().__init__(level, context, min_samples)


class MovingMaxEstimator(_RingEstimator):
    """The largest demand over limit of the last ``context`` windows (Autopilot's peak window; 288 are a day)."""

    _statistic = _MAXIMUM

    def __init__(self, context: int = 288, min_samples: int = 24) -> None:
        super().__init__(0.0, context, min_samples)


@numba.njit(cache=True, nogil=True)
def _fold_ring(
    state: Any, slot: Any, end_us: Any, ratio: Any, limit: Any,
    statistic: int, parameter: float, min_samples: int, out: Any,
) -> None:  # fmt: skip
    context = state[0].ring.shape[1] if len(state) else 1
    sorted_ = np.empty(context)
    for i in range(len(slot)):
        s = state[slot[i]]
        new = end_us[i] > s.end_us  # a repeated or late window changes nothing
        if new:
            s.end_us = end_us[i]
        for r in range(out.shape[1]):
            if new and not np.isnan(ratio[i, r]):
                s.ring[r, s.count[r] % context] = ratio[i, r]
                s.count[r] += 1
            n = min(s.count[r], context)
            if n < min_samples:
                out[i, r] = np.nan
                continue
            if statistic == _MAXIMUM:
                top = s.ring[r, 0]
                for k in range(1, n):
                    top = max(top, s.ring[r, k])
                value = top
            elif statistic == _MEAN_SIGMA:
                mean = 0.0
                for k in range(n):
                    mean += s.ring[r, k]
                mean /= n
                square = 0.0
                for k in range(n):
                    square += (s.ring[r, k] - mean) ** 2
                value = mean + parameter * np.sqrt(square / (n - 1))
            else:
                for k in range(n):
                    sorted_[k] = s.ring[r, k]
                sorted_[:n].sort()
                position = parameter / 100 * (n - 1)
                low = int(position)
                high = min(low + 1, n - 1)
                value = sorted_[low] + (sorted_[high] - sorted_[low]) * (position - low)
            out[i, r] = value * limit[i, r]


STATISTICAL: Final = {
    "limit": LimitEstimator,
    "nsigma": NSigmaEstimator,
    "percentile": PercentileEstimator,
    "moving-max": MovingMaxEstimator,
}
"""The estimators of this file by the name that configuration and reports use."""
