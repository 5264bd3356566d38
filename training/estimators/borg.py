"""Borg's own reservation estimator (Verma et al., EuroSys'15, section 5.5)."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.training.estimators.base import Estimate, Estimator, statistic_or_limit

_STATE: Final = np.dtype([("reservation", "f8", len(RESOURCES)), ("end_us", "i8"), ("scheduled_us", "i8")])


class BorgEstimator(Estimator):
    """Hold the limit for a start-up time, then decay slowly towards usage; jump up at once when usage exceeds it.

    The margin of the paper's "usage plus a safety margin" is added outside (``margin.Guarded``): for a margin that
    is a share of usage the recursion is linear, so both give the same reservation once the start has decayed.

    Parameters
    ----------
    half_life_s : float
        Time in which the distance to usage halves, in seconds. The paper publishes no rate: 12 h is a choice
        that has not been tuned.
    startup_s : float
        How long the limit is held, in seconds; 300 in the paper.
    """

    def __init__(self, half_life_s: float = 43_200.0, startup_s: float = 300.0) -> None:
        if not half_life_s > 0:
            raise ConfigError(f"half_life_s must be above 0, got {half_life_s}")
        if not startup_s >= 0:
            raise ConfigError(f"startup_s must be at least 0, got {startup_s}")
        self.half_life_s = half_life_s
        self.startup_s = startup_s
        self._memory = {"task": np.zeros(0, _STATE)}

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._make_room(slot)
        out = np.empty_like(windows.limit)

        def fold(slot: Any, *columns: Any) -> None:
            _fold(self._memory["task"], self.half_life_s * 1e6, self.startup_s * 1e6, slot, *columns)

        columns = (windows.start_us, windows.end_us, windows.scheduled_us, demand(windows), windows.limit)
        self._in_parts(fold, slot, columns, out)
        return statistic_or_limit(out, windows)


@numba.njit(**LENT)
def _fold(
    state: Any, half_life_us: float, startup_us: float, slot: Any, start_us: Any, end_us: Any, scheduled_us: Any,
    demand_: Any, limit: Any, out: Any,
) -> None:  # fmt: skip
    for i in range(len(slot)):
        s = state[slot[i]]
        fresh = s.end_us == 0 or scheduled_us[i] > s.scheduled_us
        if end_us[i] > s.end_us:  # a repeated or late window changes nothing
            run_us = scheduled_us[i]
            if run_us < 0:  # unknown: the run began with the first window
                run_us = start_us[i] if s.end_us == 0 else s.scheduled_us
            decay = 0.5 ** ((end_us[i] - s.end_us) / half_life_us)
            for r in range(out.shape[1]):
                d = demand_[i, r]
                if fresh or (end_us[i] - run_us < startup_us):
                    s.reservation[r] = limit[i, r]
                    if d > limit[i, r]:
                        s.reservation[r] = d
                elif np.isnan(s.reservation[r]):
                    s.reservation[r] = limit[i, r]
                elif d >= s.reservation[r]:
                    s.reservation[r] = d
                elif not np.isnan(d):
                    s.reservation[r] = d + (s.reservation[r] - d) * decay
            s.end_us = end_us[i]
            s.scheduled_us = run_us
        for r in range(out.shape[1]):
            out[i, r] = s.reservation[r]
