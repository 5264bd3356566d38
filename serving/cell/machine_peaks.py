"""Compares what is reserved for machines with the peaks that their tasks reached, and moves the margins by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import blank_rows, copy_of, room_for
from reclaim.data.core.jit import LENT
from reclaim.data.core.state import adopt, part_of
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.features.registry import SLOT_S, SLOT_US
from reclaim.serving.models.scorer import SCORED_AT_ONCE
from reclaim.training.machines.following import AT_ONCE, LARGEST, LATE, OnlineMachines
from reclaim.training.machines.terms import N_TERMS, unknown_shares, write_terms
from reclaim.training.margins.violation import violates_in_kernel

if TYPE_CHECKING:
    from reclaim.serving.cell.task_record import Ids, Taken
    from reclaim.serving.models.scorer import Scorer, Scores
    from reclaim.training.machines.estimator import MachineEstimator

Floats = NDArray[np.float64]

MOST_MACHINES: Final = 100_000
"""Largest number of machines followed; further ones have no outcomes."""
KEPT_SLOTS: Final = 86_400 // SLOT_S
"""Slots without a window after which a machine's place, and its counts, may go to a new one."""
_OPEN: Final = LATE + 1
"""Slots whose windows still count."""
_PLACE_BITS: Final = 17
"""Of the mark of a task's answer: its machine's place, from 1. The rest are the last bits of the answer's number."""
_NUMBERS: Final = 1 << 32 - _PLACE_BITS
"""Numbers that differ in a mark. An answer of a task is overwritten by the next one at its place in the ring, so a mark
could mislead only where there was none for 229,376 slots, over two years."""
assert MOST_MACHINES < 1 << _PLACE_BITS


@dataclass(frozen=True)
class MachineMargins:
    """Margins of machines at one moment, and the outcomes of earlier answers; never changed.

    B margins, in the order ``MARGIN_NAMES``, and R resources.

    Attributes
    ----------
    budgets : mapping of name of margin to float
    margins, asked : float64, shape (B, R)
        For ``MachineEstimator.at``, and the probabilities that they are for.
    lowered : float64, shape (B, R)
        Factor in ``asked`` by which too many machines at once lower it.
    judged : int64, shape (R,)
        Answers whose peak is known, since the model began to answer.
    violated : int64, shape (B, R)
        Those of them whose peak exceeded what was reserved.
    recent : float64, shape (B, R)
        Share of the answers of the last day or so that were; NaN where none is known.
    at_once, most_at_once : float64, shape (B, R)
        Share of the machines whose peak exceeded it at the last known time, and the largest such share of the last day;
        or NaN.
    machine : int64, shape (m,), ascending
    judged_of : int64, shape (m, R)
    violated_of : int64, shape (m, B, R)
    """

    budgets: Mapping[str, float]
    margins: Floats
    asked: Floats
    lowered: Floats
    judged: Ids
    violated: Ids
    recent: Floats
    at_once: Floats
    most_at_once: Floats
    machine: Ids
    judged_of: Ids
    violated_of: Ids

    @classmethod
    def of(cls, estimator: MachineEstimator, budgets: Mapping[str, float]) -> MachineMargins:
        """Return the margins that an estimator was fitted with, which no outcome has moved."""
        online = OnlineMachines(estimator.curves, tuple(budgets.values()), estimator.horizon_s)
        nothing = np.zeros((0, *online.margins.shape), np.int64)
        return cls.published(online, budgets, nothing[:, 0, 0], nothing[:, 0], nothing)

    @classmethod
    def published(
        cls, online: OnlineMachines, budgets: Mapping[str, float], machine: Ids, judged: Ids, violated: Ids
    ) -> MachineMargins:
        """Return the margins of the moment, with the counts of machines."""
        return cls(
            budgets, online.margins, online.asked, online.lowered, online.judged, online.violated, online.recent,
            online.at_once, online.most_at_once, machine, judged, violated,
        )  # fmt: skip

    def probability(self, budget: float) -> tuple[float, ...]:
        """Return the probabilities, by resource, to use for any budget: moved as those of its neighbours were."""
        ours = np.log(list(self.budgets.values()))
        log = np.log(self.asked) - ours[:, None]
        moved = [float(np.interp(np.log(budget), ours, of)) for of in log.T]
        return tuple(min(budget * math.exp(of), LARGEST) if of else budget for of in moved)

    def outcomes_of(self, machine: Ids) -> tuple[Ids, Ids]:
        """Return judged and violated answers of machines, zero for others; shapes (n, R) and (n, B, R)."""
        at = _found((self.machine, np.arange(len(self.machine))), machine)
        judged = np.zeros((len(machine), *self.judged_of.shape[1:]), np.int64)
        violated = np.zeros((len(machine), *self.violated_of.shape[1:]), np.int64)
        judged[at >= 0], violated[at >= 0] = self.judged_of[at[at >= 0]], self.violated_of[at[at >= 0]]
        return judged, violated


class MachinePeaks:
    """Counts the outcomes of answers for machines, slot by slot of the trace's clock (``features.registry.SLOT_S``).

    An answer is for the tasks of a machine with a window in the slot. It is violated where these tasks, each up to its
    limit then, together demand more, in a later slot within the horizon, than was reserved for them, as in a replay
    (``machines.snapshots``). A task that has left the machine demands nothing of it. An answer counts
    where the machine was seen within the horizon and up to its end, and any of its tasks has estimation: one that keeps
    all limits cannot be violated, and would dilute the budget. A window counts in the slot in which it begins, up to
    ``LATE`` slots after it and before a window of its task in a later slot; others change nothing. Of several windows
    of a task in one slot the largest demand counts, and the forecast of the first one that has an answer. Of several in
    one write the last alone has an answer: the task has no part in those of the slots before.

    Over another horizon than that of the reservations, tasks are scored for the slots whose answers count alone.

    Nothing here depends on the machine's clock: the same writes in the same order end in the same bits.

    Parameters
    ----------
    scorer : Scorer
    horizon_s : int or None
        None: that of the reservations.
    at_once : float
        As for ``OnlineMachines``.
    moves : bool
        Whether the margins follow the outcomes.

    Attributes
    ----------
    horizon_s : int
    margins : MachineMargins
        Of the moment.
    """

    def __init__(
        self, scorer: Scorer, horizon_s: int | None = None, *, at_once: float = AT_ONCE, moves: bool = True
    ) -> None:  # fmt: skip
        self.horizon_s = scorer.machines.horizon_s if horizon_s is None else horizon_s
        self._budgets = scorer.budgets.by_margin
        self.resize(scorer)
        curves, horizon_s = self._estimator.curves, self.horizon_s
        budgets = tuple(self._budgets.values())
        self._online = OnlineMachines(curves, budgets, horizon_s, at_once=at_once, moves=moves)
        self._n_tasks = self._n_machines = 0
        resources, ring = len(RESOURCES), (self._online.horizon_slots + LATE) // self._online.step + 1
        shape = (len(self._budgets), resources)
        of_task = [("last", "i4"), ("used", "f8", resources), ("mark", "u4", ring), ("limit", "f4", (ring, resources))]
        self._tasks = np.zeros(0, np.dtype(of_task))  # last counts from 1; 0 is no mark
        self._machines: dict[str, NDArray[Any]] = {
            "id": np.zeros(0, np.int64),
            "last": np.zeros(0, np.int64),  # slot of the last window
            "judged": np.zeros((0, resources), np.int64), "violated": np.zeros((0, *shape), np.int64),
            # of the open slots: tasks with estimation, the sums of the terms of all, and windows
            "answered": np.zeros((0, _OPEN, resources), np.int64), "sums": np.zeros((0, _OPEN, resources, N_TERMS)),
            "windows": np.zeros((0, _OPEN), np.int64),
            # of the answers that wait: what was reserved, their demand in the open slots, their peak
            "held": np.zeros((0, ring, *shape)), "total": np.zeros((0, ring, _OPEN, resources)),
            "peak": np.zeros((0, ring, resources)), "seen": np.zeros((0, ring), np.uint8),
        }  # fmt: skip
        self._ring: dict[str, NDArray[Any]] = {
            "answer": np.zeros(ring, np.int64),  # number of the time, from 1
            "margins": np.zeros((ring, *shape)),
            "slot": np.full(1, -1, np.int64),  # the latest one begun
        }
        self._sorted: tuple[Ids, Ids] = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.margins = self._published()

    def resize(self, scorer: Scorer) -> None:
        """Continue with the scorer for another mean limit."""
        self._scorer, self._estimator = scorer, scorer.machines_over(self.horizon_s)

    def take(self, taken: Taken, scores: Scores) -> None:
        """Compare windows with earlier answers, and make the answers of their slots from those with scores.

        Parameters
        ----------
        taken : Taken
        scores : Scores
            Of the ``k`` tasks that were touched.
        """
        taken = taken.outside_allocs()
        if len(taken.windows) == 0 or (self._n_machines == 0 and (taken.windows.machine_id < 0).all()):
            return  # a cell of which no task is on a machine needs no memory for it
        slots = taken.windows.start_us // SLOT_US
        answered = taken.row >= 0
        of_row = np.full(len(slots), -1, np.int64)
        of_row[taken.row[answered]] = np.flatnonzero(answered)
        counts = answered & self._online.is_time(slots[taken.row]) & (taken.windows.machine_id[taken.row] >= 0)
        shares = scores.shares
        if counts.any():  # otherwise no answer is made, and they are not read
            shares = self._shares(taken, scores, np.flatnonzero(counts))
            if taken.opted_out.any():  # they keep their limit
                shares = shares.copy()
                shares[taken.opted_out] = unknown_shares(int(taken.opted_out.sum()))
        if (slots == slots[0]).all():
            self._take(int(slots[0]), taken.slot, taken.windows, of_row, shares, taken.opted_out)
            return
        for slot in np.unique(slots).tolist():
            rows = np.flatnonzero(slots == slot)
            self._take(slot, taken.slot[rows], taken.windows.take(rows), of_row[rows], shares, taken.opted_out)

    def _shares(self, taken: Taken, scores: Scores, rows: Ids) -> NDArray[np.float32]:
        """Return the shares of touched tasks over the horizon, (k, n_resources, N_SHARES); ``rows`` are needed."""
        if self.horizon_s == self._scorer.horizon_s:
            return scores.shares
        out = unknown_shares(len(taken.touched))
        for low in range(0, len(rows), SCORED_AT_ONCE):
            some = rows[low : low + SCORED_AT_ONCE]
            out[some] = self._scorer.shares_over(self.horizon_s, taken.x[some], taken.last.take(some))
        return out

    def _take(
        self, slot: int, task: Ids, windows: Windows, of_row: Ids, shares: NDArray[np.float32],
        opted_out: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        self._reach(slot)
        if slot <= self._ring["slot"][0] - _OPEN:
            return
        self._n_tasks = max(self._n_tasks, int(task.max()) + 1)
        self._tasks = room_for(self._tasks, self._n_tasks)
        m, online, answer = self._machines, self._online, self._ring["answer"]
        marks = answer % _NUMBERS << _PLACE_BITS
        _add(
            self._tasks, task, slot, self._places(windows.machine_id, slot), demand(windows),
            np.ascontiguousarray(windows.limit), of_row, shares, opted_out, answer, marks, online.step, slot % _OPEN,
            m["last"], m["windows"], m["answered"], m["sums"], m["total"], np.zeros(N_TERMS),
            *np.zeros((2, len(RESOURCES))),
        )  # fmt: skip

    def forget(self, slots: Ids) -> None:
        """Free the slots of tasks that have ended; what they demanded so far counts."""
        blank_rows(self._tasks, slots[slots < len(self._tasks)])

    def _reach(self, slot: int) -> None:
        """Begin a slot: close those that are no longer open, and let their outcomes move the margins."""
        last, online = int(self._ring["slot"][0]), self._online
        if slot <= last:
            return
        if last < 0:
            steps = [slot]
        elif slot - last > (whole := online.horizon_slots + _OPEN + 1):  # no answer is pending then
            steps = [*range(last + 1, last + 1 + whole), slot]
        else:
            steps = list(range(last + 1, slot + 1))
        moved = [self._begin(now) for now in steps]
        if any(moved):
            self.margins = self._published()

    def _begin(self, slot: int) -> bool:
        online, m, ring, n = self._online, self._machines, self._ring, self._n_machines
        step, closed = online.step, slot - _OPEN
        if closed >= 0:
            _close(
                closed, closed % _OPEN, ring["answer"], step, online.horizon_slots, m["windows"][:n], m["total"][:n],
                m["peak"][:n], m["seen"][:n],
            )  # fmt: skip
            if online.is_time(closed):
                self._reserve(closed)
            m["windows"][:n, closed % _OPEN] = 0
            due = closed - online.horizon_slots
            if due >= 0 and online.is_time(due):
                self._settle(due)
        moved = online.reach(slot)
        ring["slot"][0] = slot
        if online.is_time(slot):
            at = slot // step % len(ring["answer"])
            ring["answer"][at], ring["margins"][at] = slot // step + 1, online.margins
            for name in ("peak", "total", "seen"):
                m[name][:n, at] = 0
            m["held"][:n, at] = np.nan
        return moved

    def _reserve(self, slot: int) -> None:
        """Make the answers of a slot, all of whose windows have come, at the margins with which it began."""
        n, at, now = self._n_machines, slot // self._online.step % len(self._ring["answer"]), slot % _OPEN
        m = self._machines
        if self._ring["answer"][at] == slot // self._online.step + 1:
            rows = np.flatnonzero((m["answered"][:n, now] > 0).any(axis=1))
            sums, known = m["sums"][rows, now], m["answered"][rows, now] > 0
            for b, margins in enumerate(self._ring["margins"][at].tolist()):
                m["held"][rows, at, b] = np.where(known, self._estimator.at(margins, sums), np.nan)
        m["sums"][:n, now], m["answered"][:n, now] = 0.0, 0

    def _settle(self, slot: int) -> None:
        """Count the answers of a slot whose horizon is over."""
        n, m, at = self._n_machines, self._machines, slot // self._online.step % len(self._ring["answer"])
        if self._ring["answer"][at] != slot // self._online.step + 1:
            return
        shape = self._online.margins.shape
        judged, violated = np.zeros(shape[1:], np.int64), np.zeros(shape, np.int64)
        _judge(
            m["last"][:n] >= slot + self._online.horizon_slots, m["seen"][:n, at].copy(), m["peak"][:n, at].copy(),
            m["held"][:n, at].copy(),
            m["judged"][:n], m["violated"][:n], judged, violated,
        )  # fmt: skip
        self._online.count(slot, judged, violated)

    def _places(self, machine: Ids, slot: int) -> Ids:
        """Return the places of machines, -1 for unknown ones and those beyond ``MOST_MACHINES``; new ones get one."""
        place = _found(self._sorted, machine)
        new = np.unique(machine[(place < 0) & (machine >= 0)])
        if len(new) == 0:
            return place
        self._give(new, slot)
        return _found(self._sorted, machine)

    def _give(self, new: Ids, slot: int) -> None:
        m = self._machines
        kept = KEPT_SLOTS + self._online.horizon_slots + _OPEN
        free = np.flatnonzero(m["last"][: self._n_machines] < slot - kept)[: len(new)]
        more = min(len(new) - len(free), MOST_MACHINES - self._n_machines)
        place = np.concatenate([free, np.arange(self._n_machines, self._n_machines + more)])
        self._n_machines += more
        for name, array in m.items():
            m[name] = room_for(array, self._n_machines)
            blank_rows(m[name], place)
        m["held"][place] = np.nan
        m["id"][place], m["last"][place] = new[: len(place)], slot
        self._index()

    def _index(self) -> None:
        ids = self._machines["id"][: self._n_machines]
        order = np.argsort(ids, kind="stable")
        self._sorted = ids[order], order

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return its arrays as they are, for a caller that copies them at once."""
        return {
            "tasks": self._tasks[: self._n_tasks],
            **{f"machine.{name}": array[: self._n_machines] for name, array in self._machines.items()},
            **{f"ring.{name}": array for name, array in self._ring.items()},
            **{f"online.{name}": array for name, array in self._online.memory().items()},
        }

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Resume from copies of ``memory``, to the bit; ``ConfigError`` where other code made it."""
        found = {name: copy_of(adopt(name, array, memory)) for name, array in self.memory().items()}
        self._online.recall(part_of(found, "online."))
        self._tasks, self._machines, self._ring = found["tasks"], part_of(found, "machine."), part_of(found, "ring.")
        self._n_tasks, self._n_machines = len(self._tasks), len(self._machines["id"])
        self._index()
        self.margins = self._published()

    @property
    def bytes_per_task(self) -> int:
        """Memory of a task; none before one is on a machine."""
        return self._tasks.itemsize if self._n_machines else 0

    def _published(self) -> MachineMargins:
        ids, place = self._sorted
        judged, violated = self._machines["judged"][place], self._machines["violated"][place]
        return MachineMargins.published(self._online, self._budgets, ids, judged, violated)


def _found(of: tuple[Ids, Ids], machine: Ids) -> Ids:
    """Return the places of machines, -1 for those that are not there; ids are ascending, each with its place."""
    ids, place = of
    if len(ids) == 0:
        return np.full(len(machine), -1)
    at = np.minimum(np.searchsorted(ids, machine), len(ids) - 1)
    out: Ids = np.where(ids[at] == machine, place[at], -1)
    return out


@numba.njit(**LENT)
def _add(
    tasks: Any,  # (n_tasks,) record of a task
    slot: Any,  # (n,) int64
    now: int,  # slot of the clock
    place: Any,  # (n,) int64, -1 unknown
    used: Any,  # (n, R) float64, demand
    limit: Any,  # (n, R) float64, above 0: a task without a limit is not admitted
    of_row: Any,  # (n,) int64, row of shares, or -1
    shares: Any,  # (k, R, N_SHARES) float32
    opted_out: Any,  # (k,) bool
    answer: Any,  # (A,) int64, numbers of the times whose answers wait
    marks: Any,  # (A,) int64, their marks without a place
    step: int,
    open_at: int,
    last: Any,  # (m,) int64, changed
    windows: Any,  # (m, O) int64, changed
    answered: Any,  # (m, O, R) int64, changed
    sums: Any,  # (m, O, R, N_TERMS) float64, changed
    total: Any,  # (m, A, O, R) float64, changed
    room: Any,  # (N_TERMS,) float64, to work in
    before: Any,  # (R,) float64, to work in
    more: Any,  # (R,) float64, to work in
) -> None:
    """Add windows of one slot to the demand that earlier answers are compared with, and their terms to its answers."""
    for i in range(len(slot)):
        task, p = tasks[slot[i]], place[i]
        if now + 1 < task.last:
            continue
        fresh = now + 1 > task.last
        task.last = now + 1
        if p >= 0:
            windows[p, open_at] += 1
            last[p] = max(last[p], now)
        rises = False
        for r in range(used.shape[1]):
            before[r] = 0.0 if fresh else task.used[r]
            more[r] = used[i, r] if used[i, r] > before[r] else before[r]
            task.used[r] = more[r]
            if more[r] > before[r]:
                rises = True
        if rises and p >= 0:
            for k in range(len(marks)):
                if task.mark[k] != marks[k] + p + 1:
                    continue
                for r in range(used.shape[1]):
                    most = task.limit[k, r]
                    if most > 0.0:
                        total[p, k, open_at, r] += min(more[r], most) - min(before[r], most)
        if p < 0 or of_row[i] < 0 or now % step != 0:
            continue
        k = now // step % len(answer)
        told = task.mark[k] > 0 and task.mark[k] >> _PLACE_BITS == marks[k] >> _PLACE_BITS
        if told or answer[k] != now // step + 1:
            continue
        task.mark[k] = marks[k] + p + 1
        for r in range(used.shape[1]):
            known = not np.isnan(used[i, r])
            task.limit[k, r] = limit[i, r] if known else np.nan
            if known:
                answered[p, open_at, r] += not opted_out[of_row[i]]
                write_terms(shares[of_row[i], r], used[i, r], limit[i, r], room)
                for j in range(sums.shape[3]):
                    sums[p, open_at, r, j] += room[j]


@numba.njit(**LENT)
def _close(
    closed: int,  # slot of the clock
    open_at: int,
    answer: Any,  # (A,) int64
    step: int,
    horizon: int,  # slots
    windows: Any,  # (m, O) int64
    total: Any,  # (m, A, O, R) float64, changed
    peak: Any,  # (m, A, R) float64, changed
    seen: Any,  # (m, A) uint8, changed
) -> None:
    """Let the demand of a slot, all of whose windows have come, raise the peaks of the answers that wait."""
    for p in range(len(total)):
        for k in range(len(answer)):
            begun = (answer[k] - 1) * step
            within = answer[k] > 0 and begun < closed <= begun + horizon
            if within and windows[p, open_at] > 0:
                seen[p, k] = 1
            for r in range(peak.shape[2]):
                if within:
                    peak[p, k, r] = max(peak[p, k, r], total[p, k, open_at, r])
                total[p, k, open_at, r] = 0.0


@numba.njit(**LENT)
def _judge(
    reached: Any,  # (m,) bool, seen up to the end of the horizon
    seen: Any,  # (m,) uint8
    peak: Any,  # (m, R) float64
    held: Any,  # (m, B, R) float64, NaN without an answer
    judged_of: Any,  # (m, R) int64, changed
    violated_of: Any,  # (m, B, R) int64, changed
    judged: Any,  # (R,) int64, changed
    violated: Any,  # (B, R) int64, changed
) -> None:
    for p in range(len(reached)):
        if not reached[p] or not seen[p]:
            continue
        for r in range(peak.shape[1]):
            if np.isnan(held[p, 0, r]):
                continue
            judged[r] += 1
            judged_of[p, r] += 1
            for b in range(held.shape[1]):
                if violates_in_kernel(peak[p, r], held[p, b, r]):
                    violated[b, r] += 1
                    violated_of[p, b, r] += 1
