"""Autopilot's moving-window recommenders (Rzadca et al., EuroSys'20): decayed mean, load-adjusted percentile."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CPU_MEAN, Windows
from reclaim.training.estimators.base import (
    Estimate,
    Estimator,
    for_each_resource,
    grid,
    known_statistic,
    over_limit,
)
from reclaim.training.estimators.histogram import DecayingHistograms, Grid

_BUCKETS: Final = 400
"""Of the CPU histogram of five minutes, by published notes on the paper; here evenly spaced up to the limit."""

_MEAN: Final = np.dtype([("end_us", "i8"), ("weight", "f8", len(RESOURCES)), ("mean", "f8", len(RESOURCES))])
_HELD: Final = np.dtype([("end_us", "i8"), ("count", "i8")])


class AutopilotEstimator(Estimator):
    """Autopilot's treatment of the answer of any of its recommenders: a margin, then the largest of the last hour.

    Both are recalled from the paper, not verified. Statistics are of usage over the limit of the time, and
    the answer is over the limit now; the margin applies after the largest is taken, which is the same.

    Parameters
    ----------
    margin : float
        Share added; 0.10 to 0.15 in the paper as recalled, less for large limits.
    hold : int
        Windows whose largest recommendation counts; 12 are an hour.
    """

    def __init__(self, margin: float, hold: int) -> None:
        if not (margin > -1 and hold >= 1):
            raise ConfigError(f"expected margin > -1 and hold >= 1, got {margin=}, {hold=}")
        self.margin = margin
        self.hold = hold
        self._memory = {
            "held": np.zeros(0, _HELD),
            "answers": np.zeros((0, hold, len(RESOURCES)), np.float32),
        }

    @abstractmethod
    def recommend(self, slot: Any, end_us: Any, signal: Any, shape: Any, limit: Any, out: Any) -> None:
        """Write what the tasks of some rows need, over the limit; NaN unknown.

        Parameters
        ----------
        slot, end_us : int64, shape (n,)
            As in ``Windows``.
        signal : float64, shape (n, n_resources)
            Mean CPU, and the largest memory, over the limit.
        shape : float32, shape (n, len(LEVELS))
            The percentiles of CPU.
        limit : float64, shape (n, n_resources)
        out : float64, shape (n, n_resources + 2)
            Written: in the first columns; the others are for free use.
        """

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._make_room(slot)
        signal = over_limit(windows)
        mean = windows.usage[:, CPU_MEAN]
        known = ~np.isnan(mean) & (windows.limit[:, 0] > 0)
        np.divide(mean, windows.limit[:, 0], out=signal[:, 0], where=known)
        out = np.empty((len(slot), len(RESOURCES) + 2))

        def fold(slot: Any, end_us: Any, *columns: Any) -> None:
            self.recommend(slot, end_us, *columns)
            _hold(self._memory["held"], self._memory["answers"], slot, end_us, columns[-1])

        self._in_parts(fold, slot, (windows.end_us, signal, windows.percentiles, windows.limit), out)
        return known_statistic(out[:, : len(RESOURCES)] * (1 + self.margin) * windows.limit)


class AutopilotMeanEstimator(AutopilotEstimator):
    """The decayed mean of usage; of memory, of which a window has its peak alone, that of the peaks.

    What Autopilot gives CPU of batch jobs.

    Parameters
    ----------
    half_life_s : sequence of float, in the order ``schema.RESOURCES``
        12 h and 48 h, by published notes on the paper.
    margin, hold
        See ``AutopilotEstimator``.
    """

    CANDIDATES = grid(
        half_life_s=((43_200.0, 172_800.0), (3_600.0, 3_600.0), (10_800.0, 10_800.0), (172_800.0, 43_200.0)),
        hold=(12, 1, 72),
    )

    def __init__(
        self, half_life_s: Sequence[float] = (43_200.0, 172_800.0), margin: float = 0.10, hold: int = 12
    ) -> None:
        super().__init__(margin, hold)
        self.half_life_s = for_each_resource("half_life_s", half_life_s)
        self._half_life_us = np.array(self.half_life_s) * 1e6
        self._memory = {**self._memory, "mean": np.zeros(0, _MEAN)}

    def recommend(
        self,
        slot: Any,
        end_us: Any,
        signal: Any,
        shape: Any,  # noqa: ARG002 - a mean needs no shape
        limit: Any,  # noqa: ARG002 - the signal is over it
        out: Any,
    ) -> None:
        """Write the decayed means; see ``AutopilotEstimator``."""
        _fold_mean(self._memory["mean"], self._half_life_us, slot, end_us, signal, out)


class AutopilotPercentileEstimator(AutopilotEstimator):
    """A load-adjusted percentile: of a decayed histogram in which each bucket's time is weighted with its usage.

    In other words the usage below which the given share of all work was done. The CPU histogram of a window is taken
    from its percentiles where the source has them, else from its mean; of memory only the peak is known.

    Parameters
    ----------
    level : sequence of float, in percent, in the order ``schema.RESOURCES``
        95 for CPU that serves and 98 for memory with a low tolerance of kills: both recalled from the paper, not
        verified.
    half_life_s : sequence of float, in the order ``schema.RESOURCES``
        12 h and 48 h, by published notes on the paper.
    margin, hold
        See ``AutopilotEstimator``.
    """

    CANDIDATES = grid(
        level=((95.0, 98.0), (90.0, 90.0), (99.0, 99.9)),
        half_life_s=((43_200.0, 172_800.0), (10_800.0, 10_800.0), (172_800.0, 43_200.0)),
        hold=(12, 1),
    )

    def __init__(
        self,
        level: Sequence[float] = (95.0, 98.0),
        half_life_s: Sequence[float] = (43_200.0, 172_800.0),
        margin: float = 0.10,
        hold: int = 12,
    ) -> None:
        super().__init__(margin, hold)
        self.level = for_each_resource("level", level)
        self.half_life_s = for_each_resource("half_life_s", half_life_s)
        grid = Grid(1 / _BUCKETS, 1.0, 1.0)
        self._histograms = [
            DecayingHistograms(resource, grid, self.half_life_s[r], self.level[r] / 100, by_value=True)
            for r, resource in enumerate(RESOURCES)
        ]
        histograms = {name: array for h in self._histograms for name, array in h.blank.items()}
        self._memory = {**self._memory, **histograms}

    def recommend(self, slot: Any, end_us: Any, signal: Any, shape: Any, limit: Any, out: Any) -> None:
        """Write the percentiles; see ``AutopilotEstimator``."""
        for r, histograms in enumerate(self._histograms):
            cpu = shape if r == 0 else shape[:, :0]
            histograms.fold(self._memory, r, slot, end_us, end_us, end_us, signal, cpu, limit, out)


@numba.njit(**LENT)
def _fold_mean(state: Any, half_life_us: Any, slot: Any, end_us: Any, signal: Any, out: Any) -> None:
    for i in range(len(slot)):
        s = state[slot[i]]
        new = end_us[i] > s.end_us  # a repeated or late window changes nothing
        for r in range(signal.shape[1]):
            if new:
                s.weight[r] *= 0.5 ** ((end_us[i] - s.end_us) / half_life_us[r])
                if not np.isnan(signal[i, r]):
                    s.weight[r] += 1
                    s.mean[r] += (signal[i, r] - s.mean[r]) / s.weight[r]
            out[i, r] = s.mean[r] if s.weight[r] > 0 else np.nan
        if new:
            s.end_us = end_us[i]


@numba.njit(**LENT)
def _hold(state: Any, answers: Any, slot: Any, end_us: Any, out: Any) -> None:
    """Replace each answer by the largest of the last ones; NaN counts as unknown."""
    hold = answers.shape[1]
    for i in range(len(slot)):
        task = slot[i]
        s = state[task]
        if end_us[i] > s.end_us:
            s.end_us = end_us[i]
            for r in range(answers.shape[2]):
                answers[task, s.count % hold, r] = out[i, r]
            s.count += 1
        for r in range(answers.shape[2]):
            largest = np.float32(-np.inf)
            for k in range(min(s.count, hold)):
                answer = answers[task, k, r]
                largest = answer if answer > largest else largest  # one instruction, and NaN is never the larger
            out[i, r] = largest if largest > -np.inf else np.nan
