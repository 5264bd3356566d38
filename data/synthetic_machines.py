"""The machines of the synthetic cell: what they can hold, what they hold, when they are away, and who fits where."""

import numpy as np

from reclaim.data.synthetic_shapes import PROD, FloatArray, IntArray, rounded
from reclaim.data.synthetic_workload import DAY_S, EVICT_PRIORITY, RUNNING, WINDOW_S, TaskArray, end_run

# Machine shapes (CPU, memory; fractions of the largest machine) and their shares: assumed, after the few shapes that
# the v3 traces report.
SHAPES = np.array([[0.386, 0.333], [0.591, 0.333], [0.708, 0.667], [1.0, 1.0]])
SHAPE_SHARE = np.array([0.35, 0.30, 0.25, 0.10])
REMOVALS_PER_DAY, DOWN_MEDIAN_S = 0.05, 2400.0  # of a machine
# A task is placed where the limits, its own included, stay under this multiple of the capacity, by tier of the task:
# best-effort work may pile up on memory that others do not use, and dies when they do.
OVERCOMMIT = np.array([1.50, 1.45, 1.35, 1.25, 1.25])
# Best-effort work is not placed where CPU or memory in use, with its likely own, passes this share of the capacity.
USE_GUARD = np.array([0.85, 0.93])
LIKELY_USE = 0.6  # of its limit, for a task that is not there yet


def machine_capacities(machines: int, rng: np.random.Generator) -> FloatArray:
    """Capacities of the cell's machines, shape (machines, 2): the shapes in their shares, in random order."""
    shape = np.searchsorted(np.cumsum(SHAPE_SHARE), (np.arange(machines) + 0.5) / machines)
    return rounded(SHAPES[rng.permutation(shape)])


class Machines:
    """Loads of the machines, kept up to date by whoever starts and ends tasks."""

    def __init__(self, capacity: FloatArray) -> None:
        self.capacity = capacity  # (machines, 2)
        self.up = np.ones(len(capacity), bool)
        self.used = np.zeros_like(capacity)  # in the last window
        self._load = np.zeros_like(capacity)  # sums of limits
        self._firm = np.zeros_like(capacity)  # of them, production's and above

    def account(self, t: TaskArray, slot: int, sign: int) -> None:
        """Take on (`sign` 1) or give back (-1) the limits of a task; inside an alloc instance they do not count."""
        task = t[slot]
        if task["parent"] < 0:
            limit = sign * _limit(t, slot)
            self._load[task["machine"]] += limit
            if task["tier"] >= PROD:
                self._firm[task["machine"]] += limit

    def _may_hold(self, limit: FloatArray, tier: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        if tier >= PROD:  # production is never overcommitted against itself
            return np.asarray(self.up & (self._firm + limit <= self.capacity).all(axis=1))
        likely = self.used + LIKELY_USE * limit
        return np.asarray(self.up & (likely <= USE_GUARD * self.capacity).all(axis=1))

    def best_fit(self, t: TaskArray, slot: int) -> int:
        """Return the machine with the least room that still takes the task, -1 where none does."""
        limit, tier = _limit(t, slot), int(t["tier"][slot])
        total = self._load + limit
        fits = self._may_hold(limit, tier) & (total <= OVERCOMMIT[tier] * self.capacity).all(axis=1)
        if not fits.any():
            return -1
        room = (1.0 - total / self.capacity).sum(axis=1)
        return int(np.argmin(np.where(fits, room, np.inf)))

    def make_room(self, t: TaskArray, slot: int, at_s: int) -> int:
        """Evict work below production for a task of production or above; returns the machine, -1 where none can do."""
        limit, tier = _limit(t, slot), int(t["tier"][slot])
        excess = self._load + limit - OVERCOMMIT[tier] * self.capacity  # (machines, 2)
        fits = self._may_hold(limit, tier) & (self._load - self._firm >= excess).all(axis=1)
        if not fits.any():
            return -1
        machine = int(np.argmin(np.where(fits, np.maximum(excess, 0).sum(axis=1), np.inf)))
        mine = (t["state"] == RUNNING) & (t["machine"] == machine) & (t["released"] == 0)
        low = np.flatnonzero(mine & (t["tier"] < PROD) & (t["end_s"] > at_s))
        need = excess[machine]
        for victim in low[np.lexsort((-t["memory_limit"][low], t["priority"][low]))].tolist():
            if (need <= 0).all():
                return machine
            need = need - _limit(t, victim)
            end_run(t, np.array([victim]), at_s, EVICT_PRIORITY)
            self.account(t, victim, -1)
            t["released"][victim] = 1  # what comes next in this window may have the room at once
        return machine if (need <= 0).all() else -1


def _limit(t: TaskArray, slot: int) -> FloatArray:
    return np.array([t["cpu_limit"][slot], t["memory_limit"][slot]])


def absences(machines: int, start_s: int, end_s: int, rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """Draw when machines are away: (machine, from, until) in seconds, by time; none where the span is empty."""
    if end_s <= start_s:
        return []
    # At least one: a cell without any would be too easy for whoever tests on it.
    count = max(1, int(rng.poisson(REMOVALS_PER_DAY * machines * (end_s - start_s) / DAY_S)))
    drawn = zip(rng.integers(start_s, end_s, count).tolist(), rng.integers(0, machines, count).tolist(), strict=True)
    back: dict[int, int] = {}
    away = []
    for at, machine in sorted(drawn):
        if at >= back.get(machine, 0):  # a machine that is away cannot leave
            until = int(at + 60 + DOWN_MEDIAN_S * rng.lognormal(0, 1))
            away.append((machine, at, until))
            back[machine] = until + WINDOW_S
    return away


def overfull(t: TaskArray, run: IntArray, capacity: FloatArray) -> list[IntArray]:
    """For each machine whose memory is used up: its running tasks in the order in which they have to go."""
    top = run[(t["parent"][run] < 0)]
    used = np.bincount(t["machine"][top], t["memory"][top], len(capacity))
    return [
        here[np.lexsort((-t["memory"][here], t["priority"][here]))]
        for here in (top[t["machine"][top] == m] for m in np.flatnonzero(used > capacity[:, 1]))
    ]
