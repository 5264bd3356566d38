"""Holds what machines of a closed loop reserve against what their runs come to, by which the margins follow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

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
        running = np.flatnonzero(runs["state"] == RUNNING)
        if self._online.is_time(slot):
            reserved = np.stack([self._estimator.at(margins, sums) for margins in self._online.margins.tolist()])
            of = runs[running]
            self._waiting.append(
                _Answer(slot, running, of["machine"].astype(np.int64), of["placed_us"].copy(), of["limit"].copy(),
                        reserved, np.zeros(sums.shape[:2]))
            )  # fmt: skip
        for answer in self._waiting:
            now = runs[answer.run]
            there = (now["state"] == RUNNING) & (now["placed_us"] == answer.placed_us)
            there &= now["machine"] == answer.machine
            demand = np.fmin(np.nan_to_num(self._demand[now["cursor"][there]]), answer.limit[there])
            for r in range(demand.shape[1]):
                total = np.bincount(answer.machine[there], demand[:, r], len(answer.peak))
                np.maximum(answer.peak[:, r], total, out=answer.peak[:, r])
        while self._waiting and self._waiting[0].slot + self._online.horizon_slots <= slot + 1:
            self._judge(self._waiting.popleft())

    def _judge(self, answer: _Answer) -> None:
        """Let the machines that had runs count."""
        some = np.unique(answer.machine)
        violated = violates(answer.peak[some], answer.reserved[:, some]).sum(axis=1)
        self._online.count(answer.slot, np.full(answer.peak.shape[1], len(some)), violated)
