"""Fits the location of machine peaks by quantile regression, and chooses between it and bounds without a fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # it has no type information

from reclaim.training.machines.curve import INPUTS, N_INPUTS, MachineCurve, inputs_of
from reclaim.training.machines.terms import PAST, T_HELD, T_LIMIT

Floats = NDArray[np.float64]

LEVEL: Final = 0.98
"""Level of the quantile that the location is fitted at. Nearer to the budgets it would rest on few peaks and transfer
badly to other cells; the margin covers the rest."""
FEWEST: Final = 3_000
"""Snapshots of the machines themselves below which nothing is fitted: four machines over three days still gain by it a
day ahead (``benchmarks/LOG.md``, 2026-11-27)."""
MOST: Final = 60_000
"""Largest number of snapshots that are fitted to, evenly drawn: neighbours in time are much alike."""
_SMOOTH: Final = (0.02, 0.004, 0.001)
"""Half widths, in limits, within which the pinball loss is rounded off, one fit after another."""
_STOP: Final = {"ftol": 1e-12, "gtol": 1e-8, "maxiter": 5_000, "maxfun": 20_000}
"""End of the search for the least loss. The loss is some thousandths and flat near its least: at the tolerances
that SciPy starts with, sums that differ in the sixth digit gave other weights (``benchmarks/LOG.md``, 2026-11-29)."""
_RIDGE: Final = 1e-4
"""Weight of the squared weights of standardised inputs, next to a loss of some thousandths."""
TOGETHER: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of peaks together that are tried."""
_GAIN: Final = 0.002
"""Share of the limits that a bound must reclaim more than that of independent tasks, and a fit than the best bound,
on average over the budgets."""
_PLACED_GAIN: Final = 0.02
"""The same for a fit at the horizon that tasks are placed by. A packing picks sets of tasks that look small, and with a
fit more of these are wrong: a fit that gained a point or two on the machines as recorded needed up to a fifth more
machines (``benchmarks/LOG.md``, 2026-11-27)."""


@dataclass(frozen=True)
class MachineRows:
    """Snapshots of machines with known peaks, one resource.

    Attributes
    ----------
    sums : float64, shape (n, N_TERMS)
    peak : float64, shape (n,)
    machine : int64, shape (n,)
        Those of even numbers are one half of the machines, those of odd ones the other: a location that is fitted to
        either sets margins on the other.
    mean_limit : float
        Of the cell's tasks, which the sums were made with.
    """

    sums: Floats
    peak: Floats
    machine: NDArray[np.int64]
    mean_limit: float

    def __len__(self) -> int:
        return len(self.peak)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> MachineRows:
        """Return the chosen snapshots."""
        return MachineRows(self.sums[rows], self.peak[rows], self.machine[rows], self.mean_limit)

    def scores(self, curve: MachineCurve) -> Floats:
        """Return the margin at which each peak would have been reserved; shape (n,)."""
        return curve.score(self.sums, self.peak, self.mean_limit)

    def reclaimed(self, curve: MachineCurve, margin: float) -> float:
        """Return the share of the limits that is reclaimed at a margin."""
        limit = self.sums[:, T_LIMIT] + self.sums[:, T_HELD]
        return 1.0 - float(curve.peak(self.sums, margin, self.mean_limit).sum() / limit.sum())


def join_rows(parts: Sequence[MachineRows]) -> MachineRows:
    """Return the snapshots of all parts, whose machines are different ones; they share a mean limit.

    Each machine stays in its half.
    """
    firsts = 2 * np.cumsum([0, *(int(part.machine.max(initial=-1)) // 2 + 1 for part in parts)])
    return MachineRows(
        np.concatenate([part.sums for part in parts]),
        np.concatenate([part.peak for part in parts]),
        np.concatenate([part.machine + first for part, first in zip(parts, firsts, strict=False)]),
        parts[0].mean_limit,
    )


def fit_curve(
    rows: MachineRows, budgets: Sequence[float], regrouped: MachineRows | None = None, *, placed: bool = False,
    pasts: Sequence[str] = (),
) -> MachineCurve:  # fmt: skip
    """Return the curve that reclaims most of these machines within the budgets, on average over them.

    Margins of a fit are set on peaks of machines that a location was not fitted to. The amount reclaimed at them is
    counted with the location of all machines, on these. Nothing is fitted with fewer than ``FEWEST`` snapshots, or
    where those with a task that is foreseen are all of one half. With too few for the smallest budget the bound keeps
    its exponents.

    Parameters
    ----------
    rows : MachineRows
        Margins are set on them, and the choice is made by them.
    budgets : sequence of float
    regrouped : MachineRows or None
        Snapshots of the same tasks put on other machines (``regroup``), which the location is also fitted to.
    placed : bool
        Whether tasks are placed by the curve.
    pasts : sequence of str
        Those of ``terms.PAST`` that are looked at, where that reclaims more.
    """
    if len(rows) * min(budgets) < 1:
        return MachineCurve()

    def gain(curve: MachineCurve) -> float:
        return sum(rows.reclaimed(curve, curve.margin(b)) for b in budgets) / len(budgets)

    bounds = [MachineCurve(together=share) for share in TOGETHER]
    bounds = [bound.with_margins(rows.scores(bound)) for bound in bounds]
    gains = [gain(bound) for bound in bounds]
    best = int(np.argmax(gains))
    best = best if gains[best] > gains[0] + _GAIN else 0
    foreseen = rows.sums[:, T_LIMIT] > 0
    if len(rows) >= FEWEST and len(np.unique(rows.machine[foreseen] % 2)) == 2:
        learned = rows if regrouped is None else join_rows([rows, regrouped])
        fitted = max(_fits(rows, learned, pasts), key=gain)  # a past may tell nothing of other machines
        if gain(fitted) > gains[best] + (_PLACED_GAIN if placed else _GAIN):
            return fitted
    return bounds[best]


def _fits(rows: MachineRows, learned: MachineRows, pasts: Sequence[str] = ()) -> Iterator[MachineCurve]:
    """Yield the curve that looks at no past, then that of the mean of its weights and of those with each past alone.

    Each is fitted to all rows, and has margins set on each half by the fit of the other half. A past that is chosen by
    other machines of the same days may be worse than none on later days, and the mean seldom is; all pasts in one fit
    reclaimed no more than one (``benchmarks/LOG.md``, 2026-11-29).
    """
    odd = learned.machine % 2 == 1
    parts = (learned.take(odd), learned.take(~odd), learned)
    without = [_weights(part) for part in parts]
    yield _cross_judged(rows, without)
    if pasts:
        of_each = [
            [alone, *(_weights(part, past) for past in pasts)] for alone, part in zip(without, parts, strict=True)
        ]
        yield _cross_judged(rows, [np.mean(each, axis=0) for each in of_each])


def _cross_judged(rows: MachineRows, weights: Sequence[Floats]) -> MachineCurve:
    """Return the curve of weights of machines of odd numbers, of even ones and of all, with margins of both halves."""
    of_odd, of_even, of_all = (tuple(each.tolist()) for each in weights)
    odd, scores = rows.machine % 2 == 1, np.empty(len(rows))
    for mine, others in ((odd, of_even), (~odd, of_odd)):
        scores[mine] = rows.take(mine).scores(MachineCurve(weights=others))
    return MachineCurve(weights=of_all).with_margins(scores)


def _weights(rows: MachineRows, past: str | None = None) -> Floats:
    """Return the weights of least pinball loss at ``LEVEL`` over the sums of limits, each snapshot by its limits.

    Inputs of ``terms.PAST`` other than the one that is named have none.
    """
    used = [k for k, name in enumerate(INPUTS) if name not in PAST or name == past]
    known = np.flatnonzero(rows.sums[:, T_LIMIT] > 0)
    chosen = rows.take(known[:: -(-len(known) // MOST)])
    limit = chosen.sums[:, T_LIMIT]
    x, y = np.ascontiguousarray(inputs_of(chosen.sums)[:, used]), (chosen.peak - chosen.sums[:, T_HELD]) / limit
    weight = limit / limit.sum()
    scale = x.std(axis=0)
    scale[scale < 1e-6] = 1.0  # of the limit, which is 1 everywhere

    def loss(step: Floats, width: float) -> tuple[float, Floats]:
        error = y - x @ (step / scale)
        inside = np.abs(error) < width
        rounded = error**2 / (4 * width) + width / 4 + (LEVEL - 0.5) * error
        value = np.where(inside, rounded, np.maximum(error * (LEVEL - 1), error * LEVEL))
        slope = np.where(inside, error / (2 * width) + LEVEL - 0.5, np.where(error > 0, LEVEL, LEVEL - 1))
        gradient = -(weight * slope) @ x / scale + 2 * _RIDGE * step
        return float(weight @ value + _RIDGE * step @ step), gradient

    step = np.zeros(len(used))
    # one thread: the same bits on any number of cores, and no waiting of two for each other where cores are shared
    with threadpool_limits(1, "blas"):
        for width in _SMOOTH:
            step = minimize(loss, step, args=(width,), jac=True, method="L-BFGS-B", options=_STOP).x
    weights = np.zeros(N_INPUTS)
    weights[used] = step / scale
    return weights
