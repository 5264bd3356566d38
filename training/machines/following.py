"""Moves the probability that is asked of a curve of machines, so that the share of peaks that pass it is the budget."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.training.machines.curve import EXCEEDED, MachineCurve
from reclaim.training.machines.fit import MachineRows
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]

RATE: Final = 4.0
"""By how much the logarithm of the probability falls for a day's budget of violations that are too many: that of the
prices of tasks (``margins.price.Price.rate``)."""
LOOP: Final = 0.5
"""Largest rate, per horizon in days: outcomes are a horizon late, and a faster one overshoots."""
FEWEST: Final = 40.0
"""Violations a day by which those of a smaller budget are measured: violations of one machine come together."""
LARGEST: Final = 0.5
"""Largest probability that is asked: that of the first of ``EXCEEDED``."""
SMALLEST: Final = 1e-24
"""Smallest probability that is asked, far beyond the peaks seen: the margin goes on straight in its logarithm."""
_DAY_US: Final = 86_400_000_000


def margin_beyond(curve: MachineCurve, probability: float) -> float:
    """Return the margin at a probability; below the last of ``EXCEEDED`` straight on in the logarithm.

    As steeply as from the first to the last, on average: the end of a curve may be flat, where peaks had a bound that
    those to come need not have.
    """
    first, last = EXCEEDED[0], EXCEEDED[-1]
    if probability >= last:
        return curve.margin(probability)
    slope = (curve.margins[-1] - curve.margins[0]) / math.log(first / last)
    return curve.margins[-1] + slope * math.log(last / probability)


def follow(
    curve: MachineCurve, rows: MachineRows, time_us: NDArray[np.int64], horizon_s: int, slot_us: int, budget: float
) -> Floats:
    """Return what is reserved at each machine's time as the probability follows the peaks that came; shape (n,).

    What is reserved at a time rests on the outcomes of answers whose horizon was over before it. The logarithm of the
    probability falls by ``rate * (violated - budget * answers) / (budget * answers a day)``: adaptive conformal
    inference (Gibbs and Candes, NeurIPS 2021), as the prices of tasks do (``margins.online``).

    Parameters
    ----------
    curve : MachineCurve
        Where it begins: at the margin of the budget.
    rows : MachineRows
        ``n`` snapshots.
    time_us : int64, shape (n,)
        Their times.
    horizon_s : int
    slot_us : int
        Time from one snapshot to the next.
    budget : float
        Share of the times that may be violated.
    """
    order = np.argsort(time_us, kind="stable")
    moments, first = np.unique(time_us[order], return_index=True)
    ends = [*first[1:].tolist(), len(order)]
    rate = min(RATE, LOOP * 86_400 / horizon_s)
    a_day = len(order) / max(len(moments), 1) * _DAY_US / slot_us
    reserved, log, settled = np.empty(len(order)), math.log(budget), 0
    exceeded: list[tuple[int, int]] = []
    for now, start, end in zip(moments.tolist(), first.tolist(), ends, strict=True):
        while settled < len(exceeded) and moments[settled] + horizon_s * 1_000_000 + slot_us <= now:
            violated, answers = exceeded[settled]
            log -= rate * (violated - budget * answers) / max(budget * a_day, FEWEST)
            log = min(max(log, math.log(SMALLEST)), math.log(LARGEST))
            settled += 1
        here = order[start:end]
        peak = curve.peak(rows.sums[here], margin_beyond(curve, math.exp(log)), rows.mean_limit)
        reserved[here] = peak
        exceeded.append((int(violates(rows.peak[here], peak).sum()), len(here)))
    return reserved
