"""Machines of the synthetic cell: capacities, loads, absences, and the placement of tasks on them."""

from __future__ import annotations

import numpy as np

from reclaim.data.synthetic.shapes import PROD, FloatArray, IntArray, rounded
from reclaim.data.synthetic.workload import DAY_S, EVICT_PRIORITY, RUNNING, WINDOW_S, TaskArray, end_run

# Machine shapes (CPU, memory; fractions of the largest machine) and their shares: assumed, after the few shapes that
# the v3 traces report.
SHAPES = np.array([[0.386, 0.333], [0.591, 0.333], [0.708, 0.667], [1.0, 1.0]])
SHAPE_SHARE = np.array([0.35, 0.30, 0.25, 0.10])
REMOVALS_PER_DAY, DOWN_MEDIAN_S = 0.05, 2400.0  # of a machine
# A task is placed where the limits, its own included, stay under this multiple of the capacity, by tier of the task:
# best-effort work may occupy memory that others leave unused, and ends when they use it.
OVERCOMMIT = np.array([1.50, 1.45, 1.35, 1.25, 1.25])
# Best-effort work is not placed where CPU or memory in use, with its likely own, passes this share of the capacity.
USE_GUARD = np.array([0.85, 0.93])
LIKELY_USE = 0.6  # of its limit, for a task that has not started


def machine_capacities(machines: int, rng: np.random.Generator) -> FloatArray:
    """Return the machines' capacities, shape (machines, 2): the shapes in their shares, in random order."""
    shape = np.searchsorted(np.cumsum(SHAPE_SHARE), (np.arange(machines) + 0.5) / machines)
    return rounded(SHAPES[rng.permutation(shape)])


class Machines:
    """Loads of the machines, updated by the cell as tasks start and end."""

    def __init__(self, capacity: FloatArray) -> None:
        self.capacity = capacity  # (machines, 2)
        self.up = np.ones(len(capacity), bool)
        self.used = np.zeros_like(capacity)  # in the last window
        self._load = np.zeros_like(capacity)  # sums of limits
        self._firm = np.zeros_like(capacity)  # of them, production's and above

    def account(self, t: TaskArray, slot: int, sign: int) -> None:
        """Add (``sign`` 1) or subtract (-1) a task's limits; tasks inside an alloc instance do not count."""
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
        """Return the machine with the least room that fits the task, or -1."""
        limit, tier = _limit(t, slot), int(t["tier"][slot])
        total = self._load + limit
        fits = self._may_hold(limit, tier) & (total <= OVERCOMMIT[tier] * self.capacity).all(axis=1)
        if not fits.any():
            return -1
        room = (1.0 - total / self.capacity).sum(axis=1)
        return int(np.argmin(np.where(fits, room, np.inf)))

    def make_room(self, t: TaskArray, slot: int, at_s: int) -> int:
        """Evict work below production for a task of production or above; return the machine, or -1."""
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
            t["released"][victim] = 1  # its room is free for the next task of this window
        return machine if (need <= 0).all() else -1


def _limit(t: TaskArray, slot: int) -> FloatArray:
    return np.array([t["cpu_limit"][slot], t["memory_limit"][slot]])


def absences(machines: int, start_s: int, end_s: int, rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """Draw absences of machines, (machine, from, until) in seconds, by time; none if the span is empty."""
    if end_s <= start_s:
        return []
    # At least one: a cell without absences would be too easy a test.
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
    """Return, for each machine with exhausted memory, its running tasks in the order of eviction."""
    top = run[(t["parent"][run] < 0)]
    used = np.bincount(t["machine"][top], t["memory"][top], len(capacity))
    return [
        here[np.lexsort((-t["memory"][here], t["priority"][here]))]
        for here in (top[t["machine"][top] == m] for m in np.flatnonzero(used > capacity[:, 1]))
    ]
