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
from reclaim.training.estimators.base import Estimate, Estimator, grid, known_statistic

_STATE: Final = np.dtype([("reservation", "f8", len(RESOURCES)), ("end_us", "i8"), ("scheduled_us", "i8")])


class BorgEstimator(Estimator):
    """Hold the limit for a start-up time, then decay slowly towards usage plus a margin; jump up to it at once.

    With the target T = (1 + margin) * usage, at most the limit, the reservation R of a window becomes
    max(T, T + (R - T) * 2^(-t / half_life_s)), t being the time since the window before. The paper says "decays slowly
    towards the actual usage plus a safety margin" and "rapidly increased if the usage exceeds it"; it publishes neither
    rate nor margin. The margin that keeps a budget (``margin.Guarded``) comes on top, as with every estimator: 0 where
    the one within suffices.

    Parameters
    ----------
    half_life_s : float
        Time in which the distance to the target halves, in seconds; 12 h is a choice of this project.
    margin : float
        Share of usage that the reservation stays above it; 0 is a choice of this project.
    startup_s : float
        How long the limit is held, in seconds; 300 in the paper.
    """

    CANDIDATES = grid(
        half_life_s=(43_200.0, 900.0, 3_600.0, 10_800.0, 172_800.0), margin=(0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
    )

    def __init__(self, half_life_s: float = 43_200.0, margin: float = 0.0, startup_s: float = 300.0) -> None:
        if not half_life_s > 0:
            raise ConfigError(f"half_life_s must be above 0, got {half_life_s}")
        if not 0 <= margin < float("inf"):
            raise ConfigError(f"margin must be at least 0, got {margin}")
        if not startup_s >= 0:
            raise ConfigError(f"startup_s must be at least 0, got {startup_s}")
        self.half_life_s = half_life_s
        self.margin = margin
        self.startup_s = startup_s
        self._memory = {"task": np.zeros(0, _STATE)}

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._make_room(slot)
        out = np.empty_like(windows.limit)

        def fold(slot: Any, *columns: Any) -> None:
            _fold(self._memory["task"], self.half_life_s * 1e6, 1 + self.margin, self.startup_s * 1e6, slot, *columns)

        columns = (windows.start_us, windows.end_us, windows.scheduled_us, demand(windows), windows.limit)
        self._in_parts(fold, slot, columns, out)
        return known_statistic(out)


@numba.njit(**LENT)
def _fold(
    state: Any, half_life_us: float, above: float, startup_us: float, slot: Any, start_us: Any, end_us: Any,
    scheduled_us: Any, demand_: Any, limit: Any, out: Any,
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
                elif not np.isnan(d):
                    target = d * above
                    if target > limit[i, r]:
                        target = max(d, limit[i, r])
                    s.reservation[r] = max(target, target + (s.reservation[r] - target) * decay)
            s.end_us = end_us[i]
            s.scheduled_us = run_us
        for r in range(out.shape[1]):
            out[i, r] = s.reservation[r]
