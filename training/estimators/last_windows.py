"""Statistics of the last windows of a task: N-sigma, percentile, the larger of both, moving maximum."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.training.estimators.base import Estimate, Estimator, grid, known_statistic, over_limit

_TASK: Final = np.dtype([("end_us", "i8"), ("count", "i4", len(RESOURCES)), ("top", "f4", len(RESOURCES))], align=True)
"""Record kept next to the ring; only the moving maximum knows the largest value in it."""


class _RingEstimator(Estimator):
    """A statistic of the last ``context`` values of demand over limit, times the limit now; the limit until warm.

    That order (ratio first, then the current limit) is the one of the EuroSys'21 simulator.
    """

    def __init__(self, context: int, min_samples: int, ring: str) -> None:
        if context < 1 or min_samples < 1 or min_samples > context:
            raise ConfigError(f"expected 1 <= min_samples <= context, got {min_samples=}, {context=}")
        self.context = context
        self.min_samples = min_samples
        self._memory = {"task": np.zeros(0, _TASK), "ring": np.zeros((0, len(RESOURCES), context), ring)}

    @abstractmethod
    def _fold(self, slot: Any, end_us: Any, ratio: Any, out: Any) -> None:
        """Take demand over the limit and write the statistic after each window; NaN until warm."""

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._make_room(slot)
        ratio = over_limit(windows)
        out = np.empty_like(ratio)
        self._in_parts(self._fold, slot, (windows.end_us, ratio), out)
        return known_statistic(out * windows.limit)


class _SigmaOrPercentile(_RingEstimator):
    """The larger of N-sigma and a percentile; either may be left out."""

    def __init__(self, n: float | None, level: float | None, context: int, min_samples: int) -> None:
        if n is not None:
            if not n >= 0:
                raise ConfigError(f"n must be at least 0, got {n}")
            self.n = n
            min_samples = max(min_samples, 2)  # for a sample deviation
        if level is not None:
            if not 0 <= level <= 100:
                raise ConfigError(f"level must be between 0 and 100 percent, got {level}")
            self.level = level
        self._statistics = (-1.0 if n is None else n, -1.0 if level is None else level)
        super().__init__(context, min_samples, "f8")

    def _fold(self, slot: Any, end_us: Any, ratio: Any, out: Any) -> None:
        _fold_ring(
            self._memory["task"], self._memory["ring"], *self._statistics, self.min_samples, np.empty(self.context),
            slot, end_us, ratio, out,
        )  # fmt: skip


class NSigmaEstimator(_SigmaOrPercentile):
    """Mean plus ``n`` sample standard deviations of the last windows of the task (per-task form of EuroSys'21's).

    Parameters
    ----------
    n : float
    context : int
        Windows looked at; 24 in the simulator's documented example, 120 in the paper as recalled, not verified.
    min_samples : int
        Windows until it is warm; before, the limit.
    """

    CANDIDATES = grid(context=(24, 72, 288), n=(5.0, 1.0, 2.0, 10.0), min_samples=(24, 6))

    def __init__(self, n: float = 5.0, context: int = 24, min_samples: int = 24) -> None:
        super().__init__(n, None, context, min_samples)


class PercentileEstimator(_SigmaOrPercentile):
    """A percentile, linearly interpolated, of the last windows of the task (Resource Central style, EuroSys'21).

    Parameters
    ----------
    level : float
        In percent.
    context, min_samples : int
        As for ``NSigmaEstimator``.
    """

    CANDIDATES = grid(context=(24, 72, 288, 864), level=(99.0, 90.0, 95.0), min_samples=(24, 6))

    def __init__(self, level: float = 99.0, context: int = 24, min_samples: int = 24) -> None:
        super().__init__(None, level, context, min_samples)


class MaxNSigmaPercentileEstimator(_SigmaOrPercentile):
    """The larger of N-sigma and the percentile, the predictor that EuroSys'21 recommends; parameters as theirs."""

    CANDIDATES = grid(context=(24, 72, 288), n=(5.0, 2.0), level=(99.0, 95.0), min_samples=(24, 6))

    def __init__(self, n: float = 5.0, level: float = 99.0, context: int = 24, min_samples: int = 24) -> None:
        super().__init__(n, level, context, min_samples)


class MovingMaxEstimator(_RingEstimator):
    """The largest demand over limit of the last ``context`` windows (Autopilot's peak window; 288 are a day).

    Ratios are kept as float32, so the answer is exact to 6e-8 of itself.
    """

    CANDIDATES = grid(context=(288, 24, 72, 864), min_samples=(24, 6))

    def __init__(self, context: int = 288, min_samples: int = 24) -> None:
        super().__init__(context, min_samples, "f4")

    def _fold(self, slot: Any, end_us: Any, ratio: Any, out: Any) -> None:
        _fold_max(self._memory["task"], self._memory["ring"], self.min_samples, slot, end_us, ratio, out)


@numba.njit(**LENT)
def _mean_and_sigmas(ring: Any, task: int, r: int, count: int, n_sigma: float) -> Any:
    """Return mean plus deviations; each sum in four parts, so that additions need not wait for each other."""
    a = b = c = d = 0.0
    for k in range(0, count - 3, 4):
        a += ring[task, r, k]
        b += ring[task, r, k + 1]
        c += ring[task, r, k + 2]
        d += ring[task, r, k + 3]
    for k in range(count // 4 * 4, count):
        a += ring[task, r, k]
    mean = ((a + b) + (c + d)) / count
    a = b = c = d = 0.0
    for k in range(0, count - 3, 4):
        a += (ring[task, r, k] - mean) ** 2
        b += (ring[task, r, k + 1] - mean) ** 2
        c += (ring[task, r, k + 2] - mean) ** 2
        d += (ring[task, r, k + 3] - mean) ** 2
    for k in range(count // 4 * 4, count):
        a += (ring[task, r, k] - mean) ** 2
    return mean + n_sigma * np.sqrt(((a + b) + (c + d)) / (count - 1))


@numba.njit(**LENT)
def _percentile(ring: Any, task: int, r: int, count: int, level: float, largest: Any) -> Any:
    """Return the percentile from the largest values alone: one or two, where the level is high."""
    position = level / 100 * (count - 1)
    low = int(position)
    n = count - low
    if n <= 2:
        first = second = -np.inf
        for k in range(count):
            value = ring[task, r, k]
            lesser = value if value < first else first
            second = lesser if lesser > second else second
            first = value if value > first else first
        return first if n == 1 else second + (first - second) * (position - low)
    for k in range(count):
        value = ring[task, r, k]
        if k >= n and value <= largest[n - 1]:
            continue
        at = min(k, n - 1)
        while at > 0 and largest[at - 1] < value:
            largest[at] = largest[at - 1]
            at -= 1
        largest[at] = value
    return largest[n - 1] + (largest[n - 2] - largest[n - 1]) * (position - low)


@numba.njit(**LENT)
def _fold_ring(
    state: Any, ring: Any, n_sigma: float, level: float, min_samples: int, largest: Any, slot: Any, end_us: Any,
    ratio: Any, out: Any,
) -> None:  # fmt: skip
    context = ring.shape[2]
    for i in range(len(slot)):
        task = slot[i]
        s = state[task]
        new = end_us[i] > s.end_us  # a repeated or late window changes nothing
        if new:
            s.end_us = end_us[i]
        for r in range(ratio.shape[1]):
            if new and not np.isnan(ratio[i, r]):
                ring[task, r, s.count[r] % context] = ratio[i, r]
                s.count[r] += 1
            count = min(s.count[r], context)
            value = np.nan
            if count >= min_samples:
                value = -np.inf
                if n_sigma >= 0:
                    value = _mean_and_sigmas(ring, task, r, count, n_sigma)
                if level >= 0:
                    value = max(value, _percentile(ring, task, r, count, level, largest))
            out[i, r] = value


@numba.njit(**LENT)
def _fold_max(state: Any, ring: Any, min_samples: int, slot: Any, end_us: Any, ratio: Any, out: Any) -> None:
    context = ring.shape[2]
    for i in range(len(slot)):
        task = slot[i]
        s = state[task]
        new = end_us[i] > s.end_us  # a repeated or late window changes nothing
        if new:
            s.end_us = end_us[i]
        for r in range(ratio.shape[1]):
            if new and not np.isnan(ratio[i, r]):
                value, at = np.float32(ratio[i, r]), s.count[r] % context
                gone = ring[task, r, at]
                ring[task, r, at] = value
                s.count[r] += 1
                if value >= s.top[r]:
                    s.top[r] = value
                elif s.count[r] > context and gone == s.top[r]:  # the largest value has just left the ring
                    top = value
                    for k in range(context):
                        top = max(top, ring[task, r, k])
                    s.top[r] = top
            out[i, r] = s.top[r] if s.count[r] >= min_samples else np.nan
