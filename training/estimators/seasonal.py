"""Seasonal naive: the demand in the same hours of yesterday."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.schema import HOUR_US, RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.training.estimators.base import Estimate, Estimator, grid, known_statistic

_DAY_H: Final = 24
_RING: Final = _DAY_H + 1
"""Clock hours of which the maximum is kept: this one, and those back to the same one yesterday."""

_TASK: Final = np.dtype(
    [
        ("end_us", "i8"),
        ("first_us", "i8"),
        ("hour", "i8"),  # clock hour in which the last window ended
        ("largest", "f4", (_RING, len(RESOURCES))),  # by clock hour modulo the ring, in the unit of usage; NaN unknown
    ],
    align=True,
)


class SeasonalEstimator(Estimator):
    """Reserve the largest demand in the clock hours of yesterday that correspond to the next ``hours``.

    The limit until there is a day of history. Where yesterday's hours are a gap, the largest demand of the hours since
    stands in; where that is unknown too, the limit. Maxima are kept as float32: exact to 6e-8 of themselves.

    Parameters
    ----------
    hours : int
        How far to look ahead; 1 to 23.
    """

    CANDIDATES = grid(hours=(1, 3, 6, 23))

    def __init__(self, hours: int = 1) -> None:
        if not 1 <= hours < _DAY_H:
            raise ConfigError(f"hours must be between 1 and {_DAY_H - 1}, got {hours}")
        self.hours = hours
        self._memory = {"task": np.zeros(0, _TASK)}

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._make_room(slot)
        out = np.empty_like(windows.limit)

        def fold(*columns: Any) -> None:
            _fold(self._memory["task"], self.hours, *columns)

        self._in_parts(fold, slot, (windows.start_us, windows.end_us, demand(windows)), out)
        return known_statistic(out)


@numba.njit(**LENT)
def _fold(state: Any, hours: int, slot: Any, start_us: Any, end_us: Any, demand_: Any, out: Any) -> None:
    for i in range(len(slot)):
        s = state[slot[i]]
        if end_us[i] > s.end_us:  # a repeated or late window changes nothing
            hour = end_us[i] // HOUR_US
            first_blank = s.hour + 1
            if s.end_us == 0:
                s.first_us = start_us[i]
                first_blank = hour - _DAY_H
            for h in range(max(first_blank, hour - _DAY_H), hour + 1):
                for r in range(out.shape[1]):
                    s.largest[h % _RING, r] = np.nan
            s.hour = hour
            s.end_us = end_us[i]
            at = max(start_us[i] // HOUR_US, hour - _DAY_H) % _RING
            for r in range(out.shape[1]):
                if not s.largest[at, r] >= demand_[i, r]:  # unknown values are not either
                    s.largest[at, r] = demand_[i, r] if not np.isnan(demand_[i, r]) else s.largest[at, r]
        # from this hour yesterday on; the coming hour touches a second one unless it begins on the hour
        last = hours - (s.end_us % HOUR_US == 0)
        for r in range(out.shape[1]):
            value, since = np.nan, np.nan
            if s.end_us - s.first_us >= _DAY_H * HOUR_US:
                for h in range(_RING):
                    seen = s.largest[(s.hour - _DAY_H + h) % _RING, r]
                    if h <= last and not value >= seen and not np.isnan(seen):
                        value = seen
                    elif not since >= seen and not np.isnan(seen):
                        since = seen
            out[i, r] = since if np.isnan(value) else value
