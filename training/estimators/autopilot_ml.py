"""Autopilot's ensemble of argmin models (Rzadca et al., EuroSys'20, "recommenders based on machine learning")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import LEVELS
from reclaim.features.compiled import LENT
from reclaim.training.estimators.autopilot import AutopilotEstimator
from reclaim.training.estimators.histogram import Grid

_SHARES: Final = np.array(LEVELS) / 100.0
_GRID: Final = Grid(0.005, 1.0, 1.1)
"""Candidate limits are the ends of these buckets of usage over the limit: 0.5 % apart, each step 10 % wider. A choice:
evenly spaced ones as fine as that at the lower end would be 200, and the state six times as large."""
_LEAST: Final = np.float32(1e-6)
"""Share of a window's time below which a bucket is taken to be empty."""

_TASK: Final = np.dtype(
    [
        ("end_us", "i8"),
        ("model", "i2", len(RESOURCES)),  # the one chosen last, plus one; 0 none
        ("limit", "i2", len(RESOURCES)),  # the bucket it chose
        ("low", "i2", len(RESOURCES)),  # the buckets from which on, and up to which, there is any weight
        ("high", "i2", len(RESOURCES)),
    ],
    align=True,
)


class AutopilotMlEstimator(AutopilotEstimator):
    """Of many simple models the one that would have cost least lately names the limit.

    A model is a decay d_m and a margin M_m. With s[j] the share of the window in bucket j, it keeps, for each candidate
    limit L, the overrun o(L) <- (1-d_m) o(L) + d_m sum of s[j] above L, and the underrun u(L) likewise below; it picks
    L' = argmin of w_o o(L) + w_u u(L) + w_dl [L differs from its last], and says L = L' + M_m. Its own cost is
    c <- d (w_o o(L) + w_u u(L) + w_dl [L differs from its last]) + (1-d) c, and the model with the least
    c + w_dm [differs from the last model] + w_dl [L differs from the last limit] has its way. Changes cost nothing to a
    task that is new. Equal costs go to the smaller limit, and to the earlier model.

    The formulas are the paper's, by published notes. Google does not publish the weights. The defaults of the weights,
    of ``rate`` and of ``margins`` are those of a student's re-implementation, and ``decays`` are three of its ten: none
    of them is tuned, so nothing here speaks for or against Autopilot in production.

    Parameters
    ----------
    decays : sequence of float
        d_m, in (0, 1], per window of five minutes.
    margins : sequence of int
        M_m, in buckets.
    overrun, underrun, limit_change, model_change : float
        w_o, w_u, w_dl, w_dm.
    rate : float
        d, in (0, 1].
    margin, hold
        See ``AutopilotEstimator``.
    """

    def __init__(
        self,
        decays: Sequence[float] = (0.1, 0.5, 1.0),
        margins: Sequence[int] = (0, 1),
        overrun: float = 0.5,
        underrun: float = 0.25,
        limit_change: float = 0.1,
        model_change: float = 0.1,
        rate: float = 0.75,
        margin: float = 0.10,
        hold: int = 12,
    ) -> None:
        super().__init__(margin, hold)
        if not decays or not all(0 < decay <= 1 for decay in (*decays, rate)):
            raise ConfigError(f"decays and rate must be above 0 and at most 1, got {decays=}, {rate=}")
        if not min(overrun, underrun, limit_change, model_change) > 0:
            raise ConfigError(f"weights must be above 0, got {overrun=}, {underrun=}, {limit_change=}, {model_change=}")
        if not margins or not all(step >= 0 for step in margins):
            raise ConfigError(f"margins must be whole numbers from 0 on, got {margins}")
        self.decays = tuple(decays)
        self.margins = tuple(margins)
        self.overrun = overrun
        self.underrun = underrun
        self.limit_change = limit_change
        self.model_change = model_change
        self.rate = rate
        self._d, self._steps = np.array(decays, np.float32), np.array(margins, np.int64)
        models = (len(decays), len(margins))
        self._memory = {
            **self._memory,
            "task": np.zeros(0, _TASK),
            "histogram": np.zeros((0, len(RESOURCES), len(decays), len(_GRID.start)), np.float32),
            "limit": np.zeros((0, len(RESOURCES), len(decays)), np.int16),
            "cost": np.zeros((0, len(RESOURCES), *models), np.float32),
        }

    def recommend(self, slot: Any, end_us: Any, signal: Any, shape: Any, limit: Any, out: Any) -> None:
        """Write the limits that win; see ``AutopilotEstimator``."""
        start = _GRID.start
        weights = (self.overrun, self.underrun, self.limit_change, self.model_change, self.rate)
        _fold(
            self._memory["task"], self._memory["histogram"], self._memory["limit"], self._memory["cost"], _SHARES,
            start, _GRID.end_of(np.arange(len(start))), self._d, self._steps, np.array(weights, np.float32),
            np.zeros(len(start), np.float32), np.zeros(len(start) + 1, np.float32), slot, end_us, signal, shape, limit,
            out,
        )  # fmt: skip


@numba.njit(**LENT)
def _spread(
    value: float, shape: Any, over: float, shares: Any, start: Any, mass: Any, i: int, by_shape: bool
) -> tuple[int, int]:
    """Add the shares of the window by bucket; return the first and the last bucket with any.

    Where two levels or more are known, the time between any two is at the middle, else all is at the value.
    """
    last, b, known, low, per_limit = len(start) - 1, 0, -1, -1, 0.5 / over
    for k in range(shape.shape[1] if by_shape and over > 0 else 0):
        if np.isnan(shape[i, k]):
            continue
        if known >= 0:
            middle = (np.float64(shape[i, known]) + shape[i, k]) * per_limit
            while b < last and middle >= start[b + 1]:
                b += 1
            mass[b] += np.float32(shares[k] - shares[known])
            low = b if low < 0 else low
        known = k
    if low < 0:
        while b < last and value >= start[b + 1]:
            b += 1
        mass[b] = 1
        low = b
    return low, b


@numba.njit(**LENT, inline="always")
def _pick(
    histogram: Any, mass: Any, below: Any, task: int, r: int, m: int, low: int, high: int, previous: int, d: float,
    w_o: float, w_u: float, w_dl: float,
) -> int:  # fmt: skip
    """Let the window into one model; return its L', and leave the sums below each bucket in ``below``.

    Costs are less w_o times the sum of all, which all candidates share. Outside the buckets that hold anything only the
    limit that the model chose before can be worth more than the nearest one inside.
    """
    keep, sum_, picked, lowest = np.float32(1) - d, np.float32(0), low, np.float32(np.inf)
    if 0 <= previous < low:
        lowest, picked = np.float32(0), previous
    for k in range(low, high + 1):  # on its own, so that it is done many at a time
        h = keep * histogram[task, r, m, k] + d * mass[k]
        histogram[task, r, m, k] = h if h > _LEAST else np.float32(0)
    for k in range(low, high + 1):
        h = histogram[task, r, m, k]
        below[k] = sum_
        c = w_u * sum_
        sum_ += h
        c -= w_o * sum_
        if previous >= 0 and k != previous:
            c += w_dl
        if c < lowest:
            lowest, picked = c, k
    below[high + 1] = sum_
    if previous > high and (w_u - w_o) * sum_ < lowest:
        picked = previous
    return picked


@numba.njit(**LENT)
def _fold(
    state: Any, histogram: Any, limit: Any, cost: Any, shares: Any, start: Any, end: Any, decays: Any, steps: Any,
    weights: Any, mass: Any, below: Any, slot: Any, end_us: Any, signal: Any, shape: Any, over: Any, out: Any,
) -> None:  # fmt: skip
    w_o, w_u, w_dl, w_dm, rate = weights[0], weights[1], weights[2], weights[3], weights[4]
    last, nothing = len(start) - 1, np.float32(0)
    for i in range(len(slot)):
        task = slot[i]
        s = state[task]
        new = end_us[i] > s.end_us  # a repeated or late window changes nothing
        if new:
            s.end_us = end_us[i]
        for r in range(signal.shape[1]):
            if new and not np.isnan(signal[i, r]):
                first = s.model[r] == 0
                low, high = _spread(signal[i, r], shape, over[i, 0], shares, start, mass, i, r == 0)
                if not first:
                    low, high = min(low, s.low[r]), max(high, s.high[r])
                model, chosen, least = 0, 0, np.float32(np.inf)
                s.low[r], s.high[r] = high, low
                for m in range(len(decays)):
                    previous = -1 if first else limit[task, r, m]
                    picked = _pick(
                        histogram, mass, below, task, r, m, low, high, previous, decays[m], w_o, w_u, w_dl
                    )  # fmt: skip
                    limit[task, r, m] = picked
                    changed = w_dl if not first and picked != previous else nothing
                    for j in range(len(steps)):
                        at = min(picked + steps[j], last)
                        under = below[min(max(at, low), high + 1)]
                        above = below[high + 1] - below[min(max(at + 1, low), high + 1)]
                        c = cost[task, r, m, j]
                        c += rate * (w_o * above + w_u * under + changed - c)
                        cost[task, r, m, j] = c
                        number = m * len(steps) + j + 1
                        if not first:
                            c += w_dm if number != s.model[r] else nothing
                            c += w_dl if at != s.limit[r] else nothing
                        if c < least:
                            least, model, chosen = c, number, at
                    for k in range(low, s.low[r]):
                        if histogram[task, r, m, k] > 0:
                            s.low[r] = k
                            break
                    for k in range(high, s.high[r], -1):
                        if histogram[task, r, m, k] > 0:
                            s.high[r] = k
                            break
                s.model[r] = model
                s.limit[r] = chosen
                for k in range(low, high + 1):
                    mass[k] = 0
            out[i, r] = end[s.limit[r]] if s.model[r] > 0 else np.nan
