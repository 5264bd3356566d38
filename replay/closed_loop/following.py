"""Compares what machines of a closed loop reserve with what their runs need, so that margins may follow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import lent
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


_SEEN: Final = np.dtype([("placed_us", "i8"), ("machine", "i4"), ("since", "i4")])
"""Of a run: when and where it was placed last, and the first slot in which it was seen there."""


@dataclass
class _Answer:
    """Reservations of one time whose horizon is not over.

    Attributes
    ----------
    slot, place : int
        The time, and its place among those that wait.
    reserved : float64, shape (k, n_machines, n_resources)
    """

    slot: int
    place: int
    reserved: Floats


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
    varies : bool, shape (n_runs,)
        Whether the limit of a run varies.
    n_machines, horizon_s, slot_s : int
    by_machine : ByMachine or None
        Places the runs; its margins follow where it requires that.

    Attributes
    ----------
    held : Held
        Counts so far.
    """

    def __init__(
        self, demand: Floats, varies: NDArray[np.bool_], n_machines: int, horizon_s: int, slot_s: int,
        by_machine: ByMachine | None = None,
    ) -> None:  # fmt: skip
        self._online = self._estimator = None
        if by_machine is not None and by_machine.at_once is not None:
            self._estimator = by_machine.estimator
            self._online = OnlineMachines(
                self._estimator.curves, by_machine.budgets, horizon_s, slot_s, at_once=by_machine.at_once, begins=BEGINS
            )
        (self._demand,) = lent(demand)  # read-only where another process has sent it
        self._slots, self._step = times_of(horizon_s, slot_s)
        self._waiting: deque[_Answer] = deque()
        kept, n_vary = -(-self._slots // self._step), int(varies.sum())
        self._places = np.full(kept, -1)  # slots of those that wait
        self._peak = np.zeros((n_machines, len(RESOURCES), kept))  # largest demand of each machine so far
        self._had_runs = np.zeros((n_machines, kept), np.bool_)  # at that time
        self._seen = np.zeros(len(varies), _SEEN)
        self._seen["machine"] = -1
        self._varying = np.where(varies, np.cumsum(varies) - 1, -1)
        self._limits = np.zeros((n_vary, len(RESOURCES), kept))  # at that time, of runs whose limit varies
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
        if slot % self._step == 0:
            held, use = [machines["reserved"].copy()], machines["use"]
            if self._online is not None and self._estimator is not None:
                # as in ``foreseen.foresee``: no less than is used in the slot, which the sums do not include
                held += [np.maximum(self._estimator.at(m, sums), use) for m in self._online.margins.tolist()]
            place = int(np.flatnonzero(self._places < 0)[0])
            self._places[place], self._peak[:, :, place] = slot, 0.0
            self._waiting.append(_Answer(slot, place, np.stack(held)))
        _see(runs, machines, self._demand, slot, self._places, self._seen, self._varying, self._limits, self._had_runs,
             self._peak, np.zeros(self._peak.shape[1:]))  # fmt: skip
        while self._waiting and self._waiting[0].slot + self._slots <= slot + 1:
            ended = self._waiting.popleft()
            self._judge(ended)
            self._places[ended.place] = -1

    def _judge(self, answer: _Answer) -> None:
        """Count the machines that had runs."""
        some = np.flatnonzero(self._had_runs[:, answer.place])
        violated = violates(self._peak[some, :, answer.place], answer.reserved[:, some]).sum(axis=1)
        n = np.full(len(RESOURCES), len(some))
        self.held.judged += len(some)
        self.held.over += violated[0]
        self.held.times += 1
        self.held.crowded += crowded(violated[0], n, AT_ONCE)
        if self._online is not None:
            self._online.count(answer.slot, n, violated[1:])


@numba.njit(**LENT)
def _see(
    runs: Any,  # (n_runs,) RUN
    machines: Any,  # (n_machines,) MACHINE_STATE
    demand: Any,  # (n_rows, R) float64, NaN where unknown
    slot: int,
    places: Any,  # (n,) int64, slots of the answers that wait, -1 where none does
    seen: Any,  # (n_runs,) _SEEN, changed, as all that follows
    varying: Any,  # (n_runs,) int64, place of a run's limits; -1: its limit does not vary
    limits: Any,  # (n_varying, R, n) float64
    had_runs: Any,  # (n_machines, n) bool
    peak: Any,  # (n_machines, R, n) float64
    total: Any,  # (R, n) float64, of one machine
) -> None:
    """Add to each answer the demand of its runs that are still where they were then, each up to its limit of then."""
    for m in range(len(machines)):
        total[:] = 0.0
        i = machines[m].head
        for a in range(len(places)):
            if places[a] == slot:
                had_runs[m, a] = i >= 0
        while i >= 0:
            run, one, own = runs[i], seen[i], varying[i]
            if one.machine != m or one.placed_us != run.placed_us:
                one.placed_us, one.machine, one.since = run.placed_us, m, slot
            for r in range(demand.shape[1]):
                asked = demand[run.cursor, r]
                counted = 0.0 if np.isnan(asked) else min(asked, run.limit[r])
                for a in range(len(places)):
                    if own >= 0:
                        if places[a] == slot:
                            limits[own, r, a] = run.limit[r]
                        counted = 0.0 if np.isnan(asked) else min(asked, limits[own, r, a])
                    total[r, a] += counted if places[a] >= one.since else 0.0
            i = run.next
        for r in range(demand.shape[1]):
            for a in range(len(places)):
                peak[m, r, a] = max(peak[m, r, a], total[r, a])
