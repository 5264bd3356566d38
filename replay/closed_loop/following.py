"""Compares what machines of a closed loop reserve with what their runs need, so that margins may follow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.schema import RESOURCES
from reclaim.replay.closed_loop.foreseen import ByMachine
from reclaim.training.machines.following import AT_ONCE, OnlineMachines, crowded, times_of
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

BEGINS: Final = 0.5
"""Share of the budget that margins which follow may spend at first: a packing prefers sets that look smaller than they
are, so that margins of the trace's machines gave two to four times the budget (``benchmarks/LOG.md``, 2026-11-27)."""


@dataclass
class Held:
    """Counts of machines compared with the peaks of their runs.

    Attributes
    ----------
    judged : int
        Answers of machines whose horizon is over.
    over : int64, shape (n_resources,)
        Those of them that were exceeded.
    times : int
        Number of their times.
    crowded : int64, shape (n_resources,)
        Times at which more than ``AT_ONCE`` of the machines exceeded their reservation.
    """

    judged: int = 0
    over: Ids = field(default_factory=lambda: np.zeros(len(RESOURCES), np.int64))
    times: int = 0
    crowded: Ids = field(default_factory=lambda: np.zeros(len(RESOURCES), np.int64))


@dataclass
class _Answer:
    """Reservations of one time whose horizon is not over.

    Attributes
    ----------
    slot : int
    run, machine, placed_us : int64, shape (n,)
        Runs that were there, their machines, and when they were placed there.
    limit : float64, shape (n, n_resources)
        Theirs at that time, up to which they count.
    reserved : float64, shape (k, n_machines, n_resources)
    peak : float64, shape (n_machines, n_resources)
        Largest demand so far.
    """

    slot: int
    run: Ids
    machine: Ids
    placed_us: Ids
    limit: Floats
    reserved: Floats
    peak: Floats


class _Now:
    """Runs that are on machines in the slot under way.

    Attributes
    ----------
    n : int
        Number of them.
    run : int64, shape (n_runs,)
        The first ``n`` are those.
    machine, placed_us : int64, shape (n_runs,)
        By run: its machine, -1 where it is on none, and when it was placed there.
    demand : float64, shape (n_runs, n_resources)
        By run; 0 where unknown.
    """

    def __init__(self, n_runs: int) -> None:
        self.n = 0
        self.run, self.machine, self.placed_us = (np.full(n_runs, -1) for _ in range(3))
        self.demand = np.zeros((n_runs, len(RESOURCES)))


class HeldMachines:
    """Machines of a closed loop, each compared with the largest demand of its runs within a horizon.

    An answer covers the runs that are on a machine at a time, for as long as they stay there, each up to its limit of
    that time. With a horizon of an hour there is an answer in every slot, with a longer one as many per horizon.

    Margins that follow do so by the rule of the service and of replays (``training.machines.following``), on the
    machines as the loop packs them: margins of a trace's machines do not keep their budget there.

    Parameters
    ----------
    demand : float64, shape (n_rows, n_resources)
        Of each window of the tape, as ``data.windows.demand``; NaN where unknown.
    n_runs, horizon_s, slot_s : int
    by_machine : ByMachine or None
        Places the runs; its margins follow where it requires that.

    Attributes
    ----------
    held : Held
        Counts so far.
    """

    def __init__(
        self, demand: Floats, n_runs: int, horizon_s: int, slot_s: int, by_machine: ByMachine | None = None
    ) -> None:
        self._online = self._estimator = None
        if by_machine is not None and by_machine.at_once is not None:
            self._estimator = by_machine.estimator
            self._online = OnlineMachines(
                self._estimator.curves, by_machine.budgets, horizon_s, slot_s, at_once=by_machine.at_once, begins=BEGINS
            )
        self._demand = demand
        self._slots, self._step = times_of(horizon_s, slot_s)
        self._waiting: deque[_Answer] = deque()
        self._now = _Now(n_runs)
        self.held = Held()

    def margins(self, slot: int) -> Floats | None:
        """Return the margins with which a slot begins, (n_budgets, n_resources): of outcomes that are known by then.

        None where none follow.
        """
        if self._online is None:
            return None
        self._online.reach(slot)
        return self._online.margins

    def see(self, slot: int, runs: NDArray[Any], machines: NDArray[Any], sums: Floats) -> None:
        """Add what the runs demand in a slot to the pending answers, those of the slot included.

        Parameters
        ----------
        slot : int
            One more than that of the call before.
        runs : structured array of ``records.RUN``, shape (n_runs,)
            At their windows of the slot.
        machines : structured array of ``records.MACHINE_STATE``, shape (n_machines,)
            What they reserve, and use, in the slot.
        sums : float64, shape (n_machines, n_resources, N_TERMS)
            Terms of the runs on each machine; read where margins follow.
        """
        now = self._now
        now.n = _look(runs, machines, self._demand, now.n, now.run, now.machine, now.placed_us, now.demand)
        if slot % self._step == 0:
            here, held, use = np.sort(now.run[: now.n]), [machines["reserved"].copy()], machines["use"]
            if self._online is not None and self._estimator is not None:
                # as in ``foreseen.foresee``: no less than is used in the slot, which the sums do not include
                held += [np.maximum(self._estimator.at(m, sums), use) for m in self._online.margins.tolist()]
            self._waiting.append(
                _Answer(slot, here, now.machine[here], now.placed_us[here], runs["limit"][here], np.stack(held),
                        np.zeros(use.shape))
            )  # fmt: skip
        for answer in self._waiting:
            total = np.zeros(answer.peak.shape)
            _count(
                answer.run, answer.machine, answer.placed_us, answer.limit,
                now.machine, now.placed_us, now.demand, total,
            )  # fmt: skip
            np.maximum(answer.peak, total, out=answer.peak)
        while self._waiting and self._waiting[0].slot + self._slots <= slot + 1:
            self._judge(self._waiting.popleft())

    def _judge(self, answer: _Answer) -> None:
        """Count the machines that had runs."""
        some = np.flatnonzero(np.bincount(answer.machine))
        violated = violates(answer.peak[some], answer.reserved[:, some]).sum(axis=1)
        n = np.full(answer.peak.shape[1], len(some))
        self.held.judged += len(some)
        self.held.over += violated[0]
        self.held.times += 1
        self.held.crowded += crowded(violated[0], n, AT_ONCE)
        if self._online is not None:
            self._online.count(answer.slot, n, violated[1:])


@numba.njit(**LENT)
def _look(
    runs: Any,  # (n_runs,) RUN
    machines: Any,  # (n_machines,) MACHINE_STATE
    demand: Any,  # (n_rows, R) float64, NaN where unknown
    before: int,  # number of runs in the slot before
    run: Any,  # (n_runs,) int64, the first ``before`` are those; changed, as what follows
    machine: Any,  # (n_runs,) int64
    placed_us: Any,  # (n_runs,) int64
    now: Any,  # (n_runs, R) float64
) -> int:
    """Find the runs on machines along their chains, and return their number; others cost nothing."""
    for k in range(before):
        machine[run[k]] = -1
    n = 0
    for m in range(len(machines)):
        i = machines[m].head
        while i >= 0:
            run[n], machine[i], placed_us[i] = i, m, runs[i].placed_us
            for r in range(now.shape[1]):
                asked = demand[runs[i].cursor, r]
                now[i, r] = 0.0 if np.isnan(asked) else asked
            n, i = n + 1, runs[i].next
    return n


@numba.njit(**LENT)
def _count(
    run: Any,  # (n,) int64
    machine: Any,  # (n,) int64
    placed_us: Any,  # (n,) int64
    limit: Any,  # (n, R) float64
    where: Any,  # (n_runs,) int64, machine of a run, -1 where it does not run
    since_us: Any,  # (n_runs,) int64, when it was placed
    demand: Any,  # (n_runs, R) float64
    total: Any,  # (n_machines, R) float64, changed
) -> None:
    """Add the demand of an answer's runs that are still on their machine, each up to its limit."""
    for k in range(len(run)):
        i = run[k]
        if where[i] == machine[k] and since_us[i] == placed_us[k]:
            for r in range(total.shape[1]):
                total[machine[k], r] += min(demand[i, r], limit[k, r])
