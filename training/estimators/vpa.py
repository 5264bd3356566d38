"""The recommender of Kubernetes' Vertical Pod Autoscaler: target, lower and upper bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.histogram import bucket_of
from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.oom import near_limit
from reclaim.data.schema import DAY_US
from reclaim.data.windows import Windows, demand
from reclaim.training.estimators.base import (
    Estimate,
    Estimator,
    for_each_resource,
    grid,
    known_statistic,
    over_limit,
)
from reclaim.training.estimators.histogram import RELATIVE, TIE, DecayingHistograms, Grid

_LEVELS: Final = {"target": 0.9, "lower": 0.5, "upper": 0.95}
_GRIDS: Final = (Grid(0.01, 1_000.0), Grid(1e7, 1e12))
"""VPA's own buckets, 176 of each: of CPU in cores, of memory in bytes."""
_MINIMUM: Final = (0.025, 250 * 2.0**20)
"""Least recommendation of VPA for a pod of one container, in cores and bytes."""
_near_limit: Final = numba.njit(inline="always")(near_limit)
_DAYS: Final = 8
"""Intervals of a day whose memory peaks count."""
_BUMP_BYTES: Final = 100 * 2.0**20

_TASK: Final = np.dtype(
    [
        ("end_us", "i8"),
        ("until_us", "i8"),  # end of the interval that is being filled
        ("run_us", "i8"),  # start of the current run; -1 unknown
        ("bound", "f4"),  # the limit of memory in the last window
        ("full", "?"),  # whether memory reached it
        ("peak", "f4", _DAYS),  # largest memory by interval, the current one first; -1 unknown
    ],
    align=True,
)


class VpaEstimator(Estimator):
    """A percentile of a decaying histogram of usage, plus a margin; the limit until anything is known.

    CPU: one sample of weight 1 per window (VPA: one a minute, all of equal weight). Memory: one sample per day, the
    largest of it, of the last eight days; a day begins at the task's age of whole days. The lower and the upper bound
    are widened while confidence is small: the lesser of the days since the first sample and the samples over those of
    a day. After an out-of-memory kill the day's memory peak becomes the larger of it and of the limit, times
    ``oom_bump``. An estimator receives no kills, so one is derived, as in ``KrrEstimator``: a new run
    (``scheduled_us`` rises) after a window whose memory came as near its limit as in the label (``data.oom``).

    All constants are those of the recommender's source. Histograms hold usage over the limit in
    ``histogram.RELATIVE`` buckets, unless ``unit`` gives the unit of usage; its bucket weight below which VPA takes a
    bucket to be empty (0.0001) is left out.

    Parameters
    ----------
    bound : str
        ``target`` (p90), ``lower`` (p50) or ``upper`` (p95).
    margin : float
        Share added to the percentile.
    half_life_s : float
        Of both resources, in seconds.
    level : float or None
        The percentile as a share, in place of the bound's own: the recommender's ``--target-cpu-percentile``.
    samples_per_day : float
        Windows that make a day's confidence; 1,440 in VPA, whose samples come every minute.
    oom_bump : float
        Factor of the peak after a kill; it adds at least 100 MiB, where ``unit`` is given.
    unit : sequence of float, in the order ``schema.RESOURCES``, or None
        Cores and bytes that one unit of usage is: gives VPA's own buckets, and its least recommendation of 0.025 cores
        and 250 MiB.
    """

    CANDIDATES = grid(half_life_s=(86_400.0, 10_800.0, 345_600.0), level=(None, 0.8, 0.95, 0.99))

    def __init__(
        self,
        bound: str = "target",
        margin: float = 0.15,
        half_life_s: float = 86_400.0,
        level: float | None = None,
        samples_per_day: float = 288.0,
        oom_bump: float = 1.2,
        unit: Sequence[float] | None = None,
    ) -> None:
        if bound not in _LEVELS:
            raise ConfigError(f"bound must be one of {', '.join(_LEVELS)}, got {bound!r}")
        if not (margin > -1 and samples_per_day > 0 and oom_bump >= 1):
            raise ConfigError(
                "expected margin > -1, samples_per_day > 0 and oom_bump >= 1, "
                f"got {margin=}, {samples_per_day=}, {oom_bump=}"
            )
        self.bound = bound
        self.margin = margin
        self.half_life_s = half_life_s
        self.level = _LEVELS[bound] if level is None else level
        self.samples_per_day = samples_per_day
        self.oom_bump = oom_bump
        self.unit = None if unit is None else for_each_resource("unit", unit)
        cpu, self._memory_grid = (RELATIVE, RELATIVE) if unit is None else _GRIDS
        self._cpu = DecayingHistograms("cpu", cpu, half_life_s, self.level)
        self._weights = 0.5 ** (np.arange(_DAYS) * DAY_US / (half_life_s * 1e6))
        self._memory = {**self._cpu.blank, "memory": np.zeros(0, _TASK)}

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._make_room(slot)
        unit = self.unit
        value = over_limit(windows) if unit is None else demand(windows) * unit
        limit = np.ones(len(slot)) if unit is None else windows.limit[:, 1] * unit[1]
        bump_by = 0.0 if unit is None else _BUMP_BYTES
        written, grid = np.empty((len(slot), 4)), self._memory_grid

        def fold(slot: Any, start_us: Any, end_us: Any, scheduled_us: Any, value: Any, shape: Any, limit: Any,
                 out: Any) -> None:  # fmt: skip
            self._cpu.fold(self._memory, 0, slot, start_us, end_us, scheduled_us, value, shape, value, out)
            _fold_peaks(
                self._memory["memory"], self._weights, self.level, self.oom_bump, bump_by,
                grid.start, grid.end, slot, end_us, scheduled_us, value, limit, out,
            )  # fmt: skip

        columns = (windows.start_us, windows.end_us, windows.scheduled_us, value, windows.percentiles[:, :0], limit)
        self._in_parts(fold, slot, columns, written)
        out, age_us, samples = written[:, :2], written[:, 2], written[:, 3]
        out *= 1 + self.margin
        confidence = np.minimum(age_us / DAY_US, samples / self.samples_per_day)[:, None]
        if self.bound == "upper":
            out *= 1 + _over(1.0, confidence)
        elif self.bound == "lower":
            out /= np.square(1 + _over(0.001, confidence))
        out = out * windows.limit if unit is None else np.maximum(out, _MINIMUM) / unit
        return known_statistic(out)


def _over(number: float, confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    quotient = np.full(confidence.shape, np.inf)
    np.divide(number, confidence, out=quotient, where=confidence > 0)
    return quotient


@numba.njit(**LENT)
def _percentile(s: Any, weights: Any, level: float) -> float:
    """Return the smallest peak up to which the peaks' weights reach ``level`` of all."""
    total = 0.0
    for k in range(_DAYS):
        if s.peak[k] >= 0:
            total += weights[k]
    best = np.nan
    for k in range(_DAYS):
        value = s.peak[k]
        if value < 0 or value >= best:
            continue
        up_to = 0.0
        for j in range(_DAYS):
            if 0 <= s.peak[j] <= value:
                up_to += weights[j]
        if up_to >= level * total * TIE:
            best = value
    return best


@numba.njit(**LENT)
def _fold_peaks(
    state: Any, weights: Any, level: float, oom_bump: float, bump_by: float, start: Any, end: Any,
    slot: Any, end_us: Any, scheduled_us: Any, value: Any, limit: Any, out: Any,
) -> None:  # fmt: skip
    peak, end_of_peak = np.nan, np.nan
    for i in range(len(slot)):
        s = state[slot[i]]
        if end_us[i] > s.end_us:  # a repeated or late window changes nothing
            if s.end_us == 0:
                s.run_us = -1
                s.until_us = end_us[i]
                for k in range(_DAYS):
                    s.peak[k] = -1
            if s.run_us >= 0 and scheduled_us[i] > s.run_us and s.full:
                used = max(s.bound, s.peak[0])
                s.peak[0] = max(used + bump_by, used * oom_bump)
            if scheduled_us[i] >= 0:
                s.run_us = scheduled_us[i]
            s.end_us = end_us[i]
            if end_us[i] >= s.until_us:
                days = (end_us[i] - s.until_us) // DAY_US + 1
                s.until_us += days * DAY_US
                for k in range(_DAYS - 1, -1, -1):
                    s.peak[k] = s.peak[k - days] if k >= days else -1
            memory = value[i, 1]
            s.full = _near_limit(memory, limit[i])
            s.bound = limit[i]
            if memory > s.peak[0]:
                s.peak[0] = memory
        found = _percentile(s, weights, level)
        if found != peak:  # else it is still in the bucket that was looked for
            peak, end_of_peak = found, np.nan
            if not np.isnan(found):
                end_of_peak = end[max(bucket_of(found, start), 0)]
        out[i, 1] = end_of_peak
