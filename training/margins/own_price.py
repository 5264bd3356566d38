"""Solves a model's own price: the one at which its curves expect as many violations as a budget allows."""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.schema import DAY_US
from reclaim.training.margins.ladder import N_RUNGS, TOP_RUNG, Ladder

UNIT: Final = 65_534
"""Parts that a probability is counted in. Sums of whole numbers are the same in any order; half of a part is an
hundredth of what a budget of 0.1 % leaves a task-window."""
UNKNOWN: Final = 65_535
"""Count of a task without a forecast."""
CAUTION: Final = ((1.0, 1 / 3), (4.0, 1 / 2))
"""Share of the budget that is spent up to an age of the cell in days: in a cell's first hours, when lags and long
maxima are short, curves are too sure, by a factor of about two in a new cell, and no outcome shows it yet."""
WHOLE: Final = 0.09
"""Budget over which the root of a small one is its share on the first day: a tenth of 0.1 % is spent where a third of
1 % is. The rarer the event, the less curves of a few hours know of it: with a tenth, 35 of 43 cells that begin
later kept to twice the budget, with a third 21 (``benchmarks/LOG.md``, 2026-11-25)."""
LEARNED_DAYS: Final = 1.0
"""Age of the cell in days up to which outcomes decide how much of the budget may be spent; after that the factor that
follows them is enough."""
DOUBT: Final = 20.0
"""Violations that the curves must expect before their outcomes count as much as ``CAUTION`` does. Of 10, 20 and 40 all
did alike on cells that begin later (``benchmarks/LOG.md``, 2026-11-25)."""
MOST: Final = 8.0
"""Largest share of the budget that is spent, where curves are too careful."""
FAR: Final = 4.0
"""Factor between a price that was set and the own one beyond which the model does not fit the cell."""

Risk = NDArray[np.uint16]
"""Probability that the demand exceeds what a task reserves at each rung of its ladder, in parts of ``UNIT``; uint16,
shape (n, n_resources, N_RUNGS), falling; ``UNKNOWN`` where nothing is forecast."""


def share_at(
    age_us: int, budget: float, promised: NDArray[np.float64], violated: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the share of the budget at which the curves' own price is solved, in a cell of an age.

    Without outcomes it is that of ``CAUTION``, of small budgets less on the first day (``WHOLE``). Outcomes may only
    raise it: curves that expected more violations than came are too careful by that much. A price that is too low is
    raised by the factor that follows outcomes, and bursts of an hour would raise it twice.

    Parameters
    ----------
    age_us : int
    budget : float
    promised, violated : float64, of one shape
        Violations that the curves expected of answers whose horizon is over, and those that came.
    """
    cautious = next((share for days, share in CAUTION if age_us < days * DAY_US), 1.0)
    if age_us < CAUTION[0][0] * DAY_US:
        cautious = min(cautious, math.sqrt(budget / WHOLE))
    learned = (promised + DOUBT) / (violated + DOUBT / cautious)
    return np.clip(learned, cautious, MOST)


def teaches(age_us: int) -> bool:
    """Return whether outcomes in a cell of an age count for ``share_at``."""
    return age_us < LEARNED_DAYS * DAY_US


def risk_of(
    ladder: Ladder,
    survival: NDArray[np.float32],
    thresholds: NDArray[np.float32],
    now: NDArray[np.float64],
    threads: int = 1,
) -> Risk:
    """Return the risk of each rung.

    Parameters
    ----------
    ladder : Ladder
    survival, thresholds : float32, shape (n, n_resources, n_thresholds)
        As ``ladder_of`` was given them.
    now : float64, shape (n, n_resources)
        What is used now, over the limit: a guard reserves at least that. NaN unknown.
    threads : int
        For large calls; the answers do not depend on it.
    """
    out = np.empty(ladder.shape, np.uint16)

    def fill(part: int, parts: int) -> None:
        rows = slice(len(ladder) * part // parts, len(ladder) * (part + 1) // parts)
        _risk(ladder[rows], survival[rows], thresholds[rows], now[rows], out[rows])

    in_parts(fill, len(ladder), threads)
    return out


@numba.njit(**LENT)
def _risk(ladder: Any, survival: Any, thresholds: Any, now: Any, out: Any) -> None:
    n_thresholds = survival.shape[2]
    for i in range(len(out)):
        for c in range(out.shape[1]):
            s, at, rungs, to, used = survival[i, c], thresholds[i, c], ladder[i, c], out[i, c], now[i, c]
            if np.isnan(s[0]):
                to[:] = UNKNOWN
                continue
            j, before, risk = 1, np.float32(-1.0), 0.0  # the first threshold is the least that a rung reserves
            for k in range(N_RUNGS):
                r = rungs[k]
                if r != before:  # most rungs reserve what the one before them does
                    before = r
                    held = max(np.float64(r), used) if used > 0.0 else np.float64(r)
                    while j < n_thresholds and np.float64(at[j]) <= held:
                        j += 1
                    if held >= 1.0:
                        risk = 0.0
                    elif j == n_thresholds:
                        risk = np.float64(s[n_thresholds - 1])
                    else:
                        r0, r1 = np.float64(at[j - 1]), np.float64(at[j])
                        s0, s1 = np.float64(s[j - 1]), np.float64(s[j])
                        risk = s0 + (held - r0) / (r1 - r0) * (s1 - s0)
                to[k] = np.uint16(risk * UNIT + 0.5)


@numba.njit(**LENT)
def add_risk(risk: Any, rows: Any, tier: Any, expected: Any, answered: Any) -> None:
    """Add the risks of answers to the sums of their tiers.

    Parameters
    ----------
    risk : uint16, shape (m, R, N_RUNGS)
    rows : int64, shape (n,)
        Place of the risk of each answer; negative where no answer was given.
    tier : int64, shape (n,)
    expected : int64, shape (n_tiers, R, N_RUNGS)
    answered : int64, shape (n_tiers, R)
    """
    for i in range(len(rows)):
        if rows[i] < 0:
            continue
        for r in range(risk.shape[1]):
            of = risk[rows[i], r]
            if of[0] == UNKNOWN:
                continue
            answered[tier[i], r] += 1
            to = expected[tier[i], r]
            for k in range(len(of)):
                to[k] += of[k]


def rungs_within(
    expected: NDArray[np.int64] | NDArray[np.float64],
    answered: NDArray[np.int64] | NDArray[np.float64],
    budget: float | NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the lowest place on the ladders at which the mean risk is a budget; NaN where nothing was answered.

    Between two rungs the mean risk is taken to be straight, which is never too low, for a curve's tail is convex.

    Parameters
    ----------
    expected : int64 or float64, shape (..., N_RUNGS)
        Sums of risks, as ``add_risk`` makes them, weighted or not.
    answered : int64 or float64, shape (...)
        Their answers, by the same weights.
    budget : float, or float64 of shape (...)
    """
    mean = mean_risk(expected, answered)
    # falling, so those above are the first ones; at the last rung it is 0
    above = (mean > np.asarray(budget)[..., None]).sum(axis=-1)
    high = np.minimum(above, TOP_RUNG)
    low = np.maximum(high - 1, 0)
    s0, s1 = (np.take_along_axis(mean, k[..., None], axis=-1)[..., 0] for k in (low, high))
    with np.errstate(divide="ignore", invalid="ignore"):
        place = np.where(above > 0, low + (s0 - budget) / (s0 - s1), 0.0)
    return np.where(answered > 0, place, math.nan)


def mean_risk(
    expected: NDArray[np.int64] | NDArray[np.float64], answered: NDArray[np.int64] | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the mean risk of answers at each rung, as ``rungs_within`` takes them; 0 where nothing was answered."""
    return expected / (np.where(answered > 0, answered, 1)[..., None] * float(UNIT))


def risk_at(mean: NDArray[np.float64], rungs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return mean risks at places on ladders, straight between two rungs.

    Parameters
    ----------
    mean : float64, shape (..., N_RUNGS)
        As ``mean_risk`` returns it.
    rungs : float64, shape (...)
        From 0 to ``TOP_RUNG``.
    """
    low = np.minimum(rungs.astype(np.int64), TOP_RUNG - 1)
    s0, s1 = (np.take_along_axis(mean, k[..., None], axis=-1)[..., 0] for k in (low, low + 1))
    between: NDArray[np.float64] = s0 + (rungs - low) * (s1 - s0)
    return between
