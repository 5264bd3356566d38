"""Holds what machines of a closed loop reserve against what their runs come to, by which the margins follow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.replay.closed_loop.records import RUNNING
from reclaim.training.machines.estimator import MachineEstimator
from reclaim.training.machines.following import OnlineMachines
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


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
    reserved : float64, shape (n_budgets, n_machines, n_resources)
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


class FollowingMargins:
    """Margins of an estimator of machines that follow the peaks of the machines of a closed loop.

    The rule is that of the service and of replays (``training.machines.following``), on the machines as the loop packs
    them: margins of the machines of a trace do not hold there.

    Parameters
    ----------
    estimator : MachineEstimator
    budgets : sequence of float
        Rising: shares of machines' times that may pass what is reserved, one for each margin.
    demand : float64, shape (n_rows, n_resources)
        Of each window of the tape, as ``data.windows.demand``; NaN where unknown.
    slot_s : int
    """

    def __init__(
        self, estimator: MachineEstimator, budgets: tuple[float, ...], demand: Floats, slot_s: int
    ) -> None:  # fmt: skip
        self._online = OnlineMachines(estimator.curves, budgets, estimator.horizon_s, slot_s)
        self._estimator, self._demand = estimator, demand
        self._waiting: deque[_Answer] = deque()

    def margins(self, slot: int) -> Floats:
        """Return the margins with which a slot begins, (n_budgets, n_resources): of outcomes that are known by then."""
        self._online.reach(slot)
        return self._online.margins

    def see(self, slot: int, runs: NDArray[Any], sums: Floats) -> None:
        """Count what the runs demand in a slot for the answers before it, and make the answers of the slot.

        Parameters
        ----------
        slot : int
            One more than that of the call before.
        runs : structured array of ``records.RUN``, shape (n_runs,)
            At their windows of the slot.
        sums : float64, shape (n_machines, n_resources, N_TERMS)
            Terms of the runs on each machine.
        """
        running, machine = runs["state"] == RUNNING, runs["machine"]
        placed_us = np.ascontiguousarray(runs["placed_us"])
        if self._online.is_time(slot):
            here = np.flatnonzero(running)
            reserved = np.stack([self._estimator.at(margins, sums) for margins in self._online.margins.tolist()])
            self._waiting.append(
                _Answer(slot, here, machine[here].astype(np.int64), placed_us[here], runs["limit"][here], reserved,
                        np.zeros(sums.shape[:2]))
            )  # fmt: skip
        where = np.where(running, machine, -1)
        demand = np.nan_to_num(self._demand[np.where(running, runs["cursor"], 0)])
        for answer in self._waiting:
            total = np.zeros(answer.peak.shape)
            _count(answer.run, answer.machine, answer.placed_us, answer.limit, where, placed_us, demand, total)
            np.maximum(answer.peak, total, out=answer.peak)
        while self._waiting and self._waiting[0].slot + self._online.horizon_slots <= slot + 1:
            self._judge(self._waiting.popleft())

    def _judge(self, answer: _Answer) -> None:
        """Let the machines that had runs count."""
        some = np.unique(answer.machine)
        violated = violates(answer.peak[some], answer.reserved[:, some]).sum(axis=1)
        self._online.count(answer.slot, np.full(answer.peak.shape[1], len(some)), violated)


@numba.njit(cache=True, nogil=True)
def _count(
    run: Any,  # (n,) int64
    machine: Any,  # (n,) int64
    placed_us: Any,  # (n,) int64
    limit: Any,  # (n, R) float64
    where: Any,  # (n_runs,) int32, machine of a run, -1 where it does not run
    since_us: Any,  # (n_runs,) int64, when it was placed
    demand: Any,  # (n_runs, R) float64
    total: Any,  # (n_machines, R) float64, changed
) -> None:
    """Add the demand of the runs of an answer that are where they were, each up to its limit."""
    for k in range(len(run)):
        i = run[k]
        if where[i] == machine[k] and since_us[i] == placed_us[k]:
            for r in range(total.shape[1]):
                total[machine[k], r] += min(demand[i, r], limit[k, r])
