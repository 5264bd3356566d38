"""Reserves for the machines of a closed loop together, by an estimator of machines; compiled.

A machine reserves what is foreseen of the sums of its runs' terms, and no less than they use. A new run counts its
limit, on top of what is reserved for the others: a machine and a new run reserve what the machine reserved before and
that limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import lent
from reclaim.data.core.jit import LENT
from reclaim.data.schema import RESOURCES
from reclaim.replay.open_loop.machines import MachineContenders, followed_of
from reclaim.training.machines import curve
from reclaim.training.machines.curve import reserve
from reclaim.training.machines.estimator import MachineEstimator
from reclaim.training.machines.terms import N_TERMS, T_HELD, T_LIMIT, T_USAGE

Floats = NDArray[np.float64]


class State(NamedTuple):
    """Predicted needs of the machines, read and changed by compiled code; all empty for sums of reservations."""

    terms: Floats
    """Of each window of the tape, as it begins, shape (n_rows, n_resources, N_TERMS)."""
    sums: Floats
    """Of the runs on each machine, shape (n_machines, n_resources, N_TERMS)."""
    curves: NDArray[Any]
    """Of ``curve.COMPILED``, shape (n_resources,)."""
    margins: Floats
    """Shape (n_resources,)."""
    spare: Floats
    """Room to compute in, shape (n_resources, N_TERMS)."""


@dataclass(frozen=True)
class ByMachine:
    """Places by an estimator of machines in place of sums of reservations.

    Attributes
    ----------
    terms : float64, shape (n_rows, n_resources, N_TERMS)
        Of each window of a workload's tape, as it begins.
    estimator : MachineEstimator
    budgets : sequence of float
        Shares of machines' times that may pass what is reserved, one for each margin.
    at_once : float or None
        Share of the machines that may exceed their reservation at once, where margins follow their peaks; 1: any. None:
        no margin follows.
    """

    terms: Floats
    estimator: MachineEstimator
    budgets: Sequence[float]
    at_once: float | None = None

    def margins(self) -> Floats:
        """Return the margin of each budget; shape (n_margins, n_resources)."""
        return np.array([[c.margin(budget) for c in self.estimator.curves] for budget in self.budgets])

    def alone(self) -> Floats:
        """Return what each run would reserve if it were alone, at each margin; shape (n_margins, n_rows, n_resources).

        A run in progress at the beginning of the period asks for it; a machine reserves no more for it and its other
        runs.
        """
        return np.stack([self.estimator.at(margins, self.terms) for margins in self.margins().tolist()])

    def state(self, n_machines: int) -> State:
        """Return the state before any run is placed."""
        shape = (n_machines, len(RESOURCES))
        curves = [c.compiled(mean) for c, mean in zip(self.estimator.curves, self.estimator.mean_limit, strict=True)]
        return State(
            terms=lent(self.terms)[0], sums=np.zeros((*shape, N_TERMS)), curves=np.concatenate(curves),
            margins=self.margins()[0], spare=np.zeros((len(RESOURCES), N_TERMS)),
        )  # fmt: skip


class Placing:
    """Ways in which contenders of ``MachineContenders.in_a_loop`` place; a model forecasts the tape once for all.

    Parameters
    ----------
    contenders : MachineContenders
    rows : int64, shape (n_rows,)
        Rows of the history that a workload's tape plays.
    budgets : sequence of float
        Shares of machines' times, one for each margin, rising.
    """

    def __init__(self, contenders: MachineContenders, rows: NDArray[np.int64], budgets: Sequence[float]) -> None:
        self._contenders, self._rows, self._budgets = contenders, rows, tuple(budgets)
        self._last: tuple[str, ByMachine, Floats] | None = None

    def by_machine(self, name: str) -> tuple[ByMachine, Floats] | None:
        """Return how a contender places runs, and what that reserves for runs ``alone``; None for sums of tasks."""
        for own, (foreseer, estimator) in self._contenders.machines.items():
            ways = {own: None, **followed_of(own)}
            if name in ways:
                if self._last is None or self._last[0] != own:
                    self._last = None  # one tape at a time
                    made = ByMachine(foreseer.current_terms(self._rows), estimator, self._budgets)
                    self._last = own, made, made.alone()
                _, made, alone = self._last
                return replace(made, at_once=ways[name]), alone
        return None


def no_state() -> State:
    """Return the state of a closed loop that places by sums of reservations."""
    return State(
        terms=lent(np.zeros((0, 0, N_TERMS)))[0], sums=np.zeros((0, 0, N_TERMS)), curves=np.zeros(0, curve.COMPILED),
        margins=np.zeros(0), spare=np.zeros((0, N_TERMS)),
    )  # fmt: skip


@numba.njit(**LENT)
def add_terms(sums: Any, run: Any, foreseen: Any, sign: float) -> None:
    """Add a run to sums, shape (n_resources, N_TERMS); ``sign`` -1 removes it. No sum of terms is below zero."""
    for r in range(len(sums)):
        if run.held:
            sums[r, T_HELD] = max(0.0, sums[r, T_HELD] + sign * run.limit[r])
        else:
            for k in range(sums.shape[1]):
                sums[r, k] = max(0.0, sums[r, k] + sign * foreseen.terms[run.cursor, r, k])


@numba.njit(**LENT)
def adds_at_least(r: int, run: Any, foreseen: Any) -> Any:
    """Return what a run adds to what its machine reserves at least, whatever the other runs: its limit or its usage.

    What it would reserve alone is no bound of what its going frees: curves with weights are not subadditive.
    """
    if run.held:
        return run.limit[r]
    terms = foreseen.terms[run.cursor, r]
    return terms[T_HELD] + min(terms[T_USAGE], terms[T_LIMIT])


@numba.njit(**LENT)
def foresee(r: int, sums: Any, use: float, foreseen: Any) -> Any:
    """Return what a machine reserves of resource ``r`` for runs with these sums, that use this much now."""
    return max(reserve(sums[r], foreseen.margins[r], foreseen.curves[r]), use)


@numba.njit(**LENT)
def count_run(m: int, machine: Any, run: Any, foreseen: Any, sign: float) -> None:
    """Add a run to the sums of its machine, or remove it, and update the machine's reservation."""
    add_terms(foreseen.sums[m], run, foreseen, sign)
    for r in range(len(foreseen.margins)):
        machine.reserved[r] = foresee(r, foreseen.sums[m], machine.use[r], foreseen)
