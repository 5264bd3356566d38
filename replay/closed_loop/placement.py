"""Places runs on machines with room: which are looked at, and the score that picks one; compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numba
import numpy as np

from reclaim.data.core.jit import LENT
from reclaim.replay.closed_loop.records import CAPACITY, FREE, NON_PRODUCTION, TOGETHER, UNPROMISED
from reclaim.replay.closed_loop.rooms import (
    SLACK,
    first_machine,
    has_room,
    holds_its_most,
    must_fit,
    those_that_may_fit,
)

POLICIES: Final[Mapping[str, tuple[float, float]]] = {
    "best-fit": (0.0, 1.0),
    "worst-fit": (0.0, -1.0),
    "hybrid": (1.0, 1.0),
}
"""Weights (stranding, leftover) of each policy; see ``score``. Best fit fills machines up. Worst fit spreads the load,
as E-PVM did. The hybrid fills machines up without leaving one resource unusable for want of the other, as Borg's does
by its description (EuroSys'15, section 3.2; the weights are ours)."""
POLICY: Final = np.dtype([("stranding", "f8"), ("leftover", "f8")])
"""A policy's weights, for compiled code elsewhere that calls ``score``."""


@numba.njit(**LENT)
def find_machine(run: Any, need: Any, loop: Any) -> int:
    """Return the machine of the least ``score`` for a run, -1 where none has room.

    Begins at a random machine and stops at ``settings.enough`` with room (EuroSys'15, 3.4, "relaxed randomization").
    """
    runs, machines, rooms, masks, settings = loop.runs, loop.machines, loop.rooms, loop.masks, loop.settings
    found = loop.found
    draw(loop.random)
    n = len(machines)
    rows = np.int64(FREE), np.int64(UNPROMISED if run.band > NON_PRODUCTION else FREE)
    best, best_score, seen = -1, math.inf, 0
    a, left = first_machine(loop), n
    while left > 0 and seen < settings.enough:
        b = min(n, a - a % TOGETHER + TOGETHER, a + left)
        for j in range(those_that_may_fit(rooms, masks, rows, run.mask, a, b, need, found)):
            m = found[j]
            if best >= 0 and run.per_machine <= 0 and scores_no_less(run, m, rooms, need, settings, best_score):
                seen += 1
                if seen == settings.enough:
                    break
                continue
            machine = machines[m]
            if not has_room(run, machine, need) or holds_its_most(run, machine, runs):
                continue
            free_cpu, free_memory = _free_share(run, machine, 0, need[0]), _free_share(run, machine, 1, need[1])
            its_score = score(free_cpu, free_memory, settings.stranding, settings.leftover)
            if its_score < best_score:
                best, best_score = m, its_score
            seen += 1
            if seen == settings.enough:
                break
        left -= b - a
        a = b if b < n else 0
    return best


@numba.njit(**LENT)
def draw(random: Any) -> None:
    """Draw the next random number: one for each run that is tried."""
    random[0] ^= random[0] << np.uint64(13)
    random[0] ^= random[0] >> np.uint64(7)
    random[0] ^= random[0] << np.uint64(17)


@numba.njit(**LENT)
def scores_no_less(run: Any, m: int, rooms: Any, need: Any, settings: Any, least: float) -> bool:
    """Say whether a machine certainly has room and scores no less, by ``rooms`` alone; errs by saying no."""
    upper = run.band > NON_PRODUCTION
    if not must_fit(rooms, FREE, m, need) or (upper and not must_fit(rooms, UNPROMISED, m, need)):
        return False
    cpu, memory = rooms[FREE, m], rooms[FREE + 1, m]
    if upper:
        cpu, memory = min(cpu, rooms[UNPROMISED, m]), min(memory, rooms[UNPROMISED + 1, m])
    free_cpu, free_memory = (cpu - need[0]) / rooms[CAPACITY, m], (memory - need[1]) / rooms[CAPACITY + 1, m]
    stranding, leftover = settings.stranding, settings.leftover
    error = 10 * SLACK * (2 * abs(stranding) + abs(leftover))  # for each share, at most four times the slack
    above: bool = score(free_cpu, free_memory, stranding, leftover) - error >= least
    return above


@numba.njit(**LENT)
def _free_share(run: Any, machine: Any, r: int, need: float) -> Any:
    """Return the share of resource ``r`` that a machine has left after taking a run."""
    taken = machine.reserved[r]
    if run.band > NON_PRODUCTION:
        taken = max(taken, machine.production[r])
    capacity = machine.capacity[r]
    return (capacity - taken - need) / capacity if capacity > 0 else 0.0


@numba.njit(**LENT)
def score(free_cpu: float, free_memory: float, stranding: float, leftover: float) -> float:
    """Return the score of a machine of which these shares would be left free; the least is best.

    With the weights of ``POLICIES`` it is ``stranding * |free_cpu - free_memory| + leftover * mean``.
    """
    stranded = stranding * abs(free_cpu - free_memory)
    result: float = stranded + leftover * (free_cpu + free_memory) / 2
    return result
