"""Autopilot's ensemble of argmin models (Rzadca et al., EuroSys'20, "recommenders based on machine learning")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np

from reclaim.data.core.histogram import bucket_of
from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.training.estimators.autopilot.moving_window import AutopilotEstimator
from reclaim.training.estimators.base import grid
from reclaim.training.estimators.histogram import SHARES, Grid

_GRID: Final = Grid(0.005, 1.0, 1.1)
"""Candidate limits are the ends of these buckets of usage over the limit: 0.5 % apart, each step 10 % wider. A choice:
evenly spaced ones as fine as that at the lower end would be 200, and the state six times as large."""
_LEAST: Final = np.float32(1e-6)
"""Share of a window's time below which a bucket is taken to be empty."""
_LANES: Final = 4
"""Number of models that are folded side by side, each in its lane of a register: must be a constant, or the loops are
not vectorised."""

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
    """Of many simple models, the one that would have cost least recently sets the limit.

    A model is a decay d_m and a margin M_m. With s[j] the share of the window in bucket j, it keeps, for each candidate
    limit L, the overrun o(L) <- (1-d_m) o(L) + d_m sum of s[j] above L, and the underrun u(L) likewise below; it picks
    L' = argmin of w_o o(L) + w_u u(L) + w_dl [L differs from the last L'], and recommends L = L' + M_m, at most the
    last bucket. Its own cost is c <- d (w_o o(L) + w_u u(L) + w_dl [L' differs from its last]) + (1-d) c, and the model
    with the least c + w_dm [differs from the last model] + w_dl [L differs from the last limit] decides. Changes cost
    nothing for a new task. Equal costs go to the smaller limit, and to the earlier model. Costs are sums of float32, so
    two that tie in exact arithmetic may differ by rounding.

    The formulas are the paper's, by published notes. Google does not publish the weights. The defaults of the weights,
    of ``rate`` and of ``margins`` are those of a student's re-implementation, and ``decays`` are three of its ten: none
    of them is tuned, so results here do not apply to Autopilot in production.

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

    CANDIDATES = grid(overrun=(0.5, 2.0, 8.0), hold=(12, 1))

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
        buckets, blocks = len(_GRID.start), -(-len(decays) // _LANES)
        decay = np.zeros((blocks, _LANES), np.float32)
        decay.reshape(-1)[: len(decays)] = decays
        keep = np.repeat(np.float32(1) - decay, buckets, axis=0).reshape(blocks, -1)
        spike = np.zeros((blocks, 2 * buckets - 1, _LANES), np.float32)  # a window in one bucket, wherever that is
        spike[:, buckets - 1] = decay
        weights = np.array((overrun, underrun, limit_change, model_change, rate), np.float32)
        self._constants = (
            _GRID.start, _GRID.end, decay, keep, spike.reshape(blocks, -1), np.array(margins, np.int64), weights
        )  # fmt: skip
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
        buckets, (blocks, width) = len(_GRID.start), self._constants[3].shape
        sums = np.zeros((buckets + 1, _LANES), np.float32)
        _fold(
            self._memory["task"], self._memory["histogram"], self._memory["limit"], self._memory["cost"], SHARES,
            *self._constants, np.zeros((len(RESOURCES), blocks, width), np.float32),
            np.zeros((blocks, width), np.float32), sums, sums.reshape(-1), np.full(sums.size, np.inf, np.float32),
            np.zeros(sums.size, np.int32), slot, end_us, signal, shape, limit, out,
        )  # fmt: skip


@numba.njit(**LENT)
def _spread(shape: Any, over: float, shares: Any, start: Any, decay: Any, gain: Any, i: int) -> tuple[int, int]:
    """Write what a window adds to each bucket; return the first and the last bucket with any, -1 for none.

    It does where two levels or more are known: the time between any two is at the middle.
    """
    last, b, known, low, per_limit, share = len(start) - 1, 0, -1, -1, 0.5 / over, np.float32(0)
    for k in range(shape.shape[1] if over > 0 else 0):
        if np.isnan(shape[i, k]):
            continue
        if known >= 0:
            middle = (np.float64(shape[i, known]) + shape[i, k]) * per_limit
            at = b
            while at < last and middle >= start[at + 1]:
                at += 1
            if at > b:
                if low >= 0:
                    _put(gain, b, decay, share)
                b, share = at, np.float32(0)
            share += np.float32(shares[k] - shares[known])
            low = b if low < 0 else low
        known = k
    if low >= 0:
        _put(gain, b, decay, share)
    return low, b


@numba.njit(**LENT)
def _put(gain: Any, b: int, decay: Any, share: float) -> None:
    for block in range(len(decay)):
        for lane in range(_LANES):
            gain[block, b * _LANES + lane] = decay[block, lane] * share


@numba.njit(**LENT)
def _scan(
    histogram: Any, keep: Any, gain: Any, below: Any, least: Any, picked: Any, w_o: float, w_u: float, change: float
) -> None:
    """Add the window to the models of a block; find the sums below each bucket and the cheapest candidate so far.

    Lane by lane, bucket after bucket, so that what goes on from bucket to bucket stands ``_LANES`` apart. Costs are
    less w_o times the sum of all, which all candidates share, and each is taken for a change of the limit. Sums are
    added in the order of the buckets, and of equal costs the first counts.
    """
    for k in range(len(histogram)):
        h = keep[k] * histogram[k] + gain[k]
        h = h if h > _LEAST else np.float32(0)
        histogram[k] = h
        below[k + _LANES] = below[k] + h
    for k in range(len(histogram)):  # one chain to a loop: the compiler keeps no more of them in registers
        cost = w_u * below[k] - w_o * below[k + _LANES] + change
        lowest = least[k]
        least[k + _LANES] = cost if cost < lowest else lowest
    for k in range(len(histogram)):
        before = picked[k]
        picked[k + _LANES] = np.int32(k) if least[k + _LANES] < least[k] else before


@numba.njit(**LENT)
def _load(lanes: Any, histogram: Any, task: int) -> None:
    for r in range(histogram.shape[1]):
        for m in range(histogram.shape[2]):
            theirs, mine = histogram[task, r, m], lanes[r, m // _LANES][m % _LANES :]
            for k in range(len(theirs)):
                mine[k * _LANES] = theirs[k]


@numba.njit(**LENT)
def _store(lanes: Any, histogram: Any, task: int) -> None:
    for r in range(histogram.shape[1]):
        for m in range(histogram.shape[2]):
            theirs, mine = histogram[task, r, m], lanes[r, m // _LANES][m % _LANES :]
            for k in range(len(theirs)):
                theirs[k] = mine[k * _LANES]


@numba.njit(**LENT)
def _fold(
    state: Any, histogram: Any, limit: Any, cost: Any, shares: Any, start: Any, end: Any, decay: Any, keep: Any,
    spike: Any, steps: Any, weights: Any, lanes: Any, gain: Any, sums: Any, below: Any, least: Any, picks: Any,
    slot: Any, end_us: Any, signal: Any, shape: Any, over: Any, out: Any,
) -> None:  # fmt: skip
    w_o, w_u, w_dl, w_dm, rate = weights[0], weights[1], weights[2], weights[3], weights[4]
    last, nothing, held = len(start) - 1, np.float32(0), -1  # whose histograms are in the lanes
    for i in range(len(slot)):
        task = slot[i]
        s = state[task]
        new = end_us[i] > s.end_us  # a repeated or late window changes nothing
        if new:
            s.end_us = end_us[i]
            if task != held:
                if held >= 0:
                    _store(lanes, histogram, held)
                _load(lanes, histogram, task)
                held = task
        for r in range(signal.shape[1]):
            if new and not np.isnan(signal[i, r]):
                first = s.model[r] == 0
                begin, stop = -1, -1
                if r == 0:
                    begin, stop = _spread(shape, over[i, 0], shares, start, decay, gain, i)
                spread = begin >= 0
                if not spread:
                    begin = stop = max(bucket_of(signal[i, r], start), 0)
                low, high = begin, stop
                if not first:
                    low, high = min(low, s.low[r]), max(high, s.high[r])
                width = high - low + 1
                limits, costs = limit[task, r], cost[task, r]
                model, chosen, cheapest = 0, 0, np.float32(np.inf)
                last_model, last_limit = s.model[r], s.limit[r]
                change, other = (nothing, nothing) if first else (w_dl, w_dm)
                s.low[r], s.high[r] = high, low
                for block in range(len(keep)):
                    h = lanes[r, block][low * _LANES : (high + 1) * _LANES]
                    if spread:
                        _scan(h, keep[block], gain[block][low * _LANES :], below, least, picks, w_o, w_u, change)
                    else:
                        added = spike[block][(last - begin + low) * _LANES :]
                        _scan(h, keep[block], added, below, least, picks, w_o, w_u, change)
                    number = block * _LANES
                    their_limit, their_cost = limits[number:], costs[number:]
                    their_least, their_pick = least[width * _LANES :], picks[width * _LANES :]
                    for lane in range(min(_LANES, len(limits) - number)):
                        total, lowest, picked = sums[width, lane], their_least[lane], low + their_pick[lane] // _LANES
                        changed = nothing
                        if not first:  # staying costs no change; it may pay even outside all weight
                            previous = their_limit[lane]
                            at = previous - low
                            if 0 <= at < width:
                                stay = w_u * sums[at, lane] - w_o * sums[at + 1, lane]
                            else:
                                stay = nothing if at < 0 else (w_u - w_o) * total
                            if stay < lowest or (stay == lowest and previous < picked):
                                picked = previous
                            changed = w_dl if picked != previous else nothing
                        their_limit[lane] = picked
                        for j in range(len(steps)):
                            named = min(picked + steps[j], last)
                            at = named - low
                            under = sums[max(min(at, width), 0), lane]
                            above = total - sums[max(min(at + 1, width), 0), lane]
                            c = their_cost[lane, j]
                            c += rate * (w_o * above + w_u * under + changed - c)
                            their_cost[lane, j] = c
                            name = (number + lane) * len(steps) + j + 1
                            c += other if name != last_model else nothing
                            c += change if named != last_limit else nothing
                            if c < cheapest:
                                cheapest, model, chosen = c, name, named
                    for k in range(low, s.low[r]):
                        if h[(k - low) * _LANES : (k - low + 1) * _LANES].any():
                            s.low[r] = k
                            break
                    for k in range(high, s.high[r], -1):
                        if h[(k - low) * _LANES : (k - low + 1) * _LANES].any():
                            s.high[r] = k
                            break
                s.model[r], s.limit[r] = model, chosen
                if spread:
                    gain[:, begin * _LANES : (stop + 1) * _LANES] = 0
            out[i, r] = end[s.limit[r]] if s.model[r] > 0 else np.nan
    if held >= 0:
        _store(lanes, histogram, held)
