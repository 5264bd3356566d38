"""Where a task goes: on which machines it fits, how those are scored, and what would have to make room."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numba
import numpy as np

from reclaim.replay.closedloop_state import (
    BOTH,
    CAPACITY,
    COMPILED,
    CONSTRAINTS,
    CPU,
    FREE,
    FREED,
    LOWEST,
    MEMORY,
    NON_PRODUCTION,
    PRODUCTION,
    RANKS,
    SPREAD,
    TOO_LARGE,
    UNPROMISED,
)
from reclaim.replay.constants import SUM_ROUNDING

POLICIES: Final[Mapping[str, tuple[float, float]]] = {
    "best-fit": (0.0, 1.0),
    "worst-fit": (0.0, -1.0),
    "hybrid": (1.0, 1.0),
}
"""Weights (stranding, leftover) of each policy. With the free shares of a machine's CPU and memory after the placement,
``a`` and ``b``, its score is ``stranding * |a - b| + leftover * (a + b) / 2``, and the least wins. Best fit fills
machines up; worst fit spreads the load, as E-PVM did; the hybrid fills them up without leaving one resource unusable
for want of the other, as Borg's does by its description (EuroSys'15, section 3.2; the weights are ours)."""

TOGETHER: Final = 128
"""Machines that are passed over together where none of them may have room."""
_GENEROUS: Final = 1e-6
"""By which share of its capacity a machine's room is taken to be larger: more than single precision loses."""


@numba.njit(**COMPILED)
def before(runs: Any, i: int, j: int) -> Any:
    """Whether a run is stopped before another one of the same machine."""
    a, b = runs[i], runs[j]
    if a.rank != b.rank:
        return a.rank < b.rank
    if a.placed_us != b.placed_us:
        return a.placed_us > b.placed_us
    return i > j


@numba.njit(**COMPILED)
def fits(run: Any, machine: Any, r: int, asked: float, freed: float, freed_production: float) -> Any:
    """Whether one resource suffices once some of what is reserved, and of production's limits, has been freed.

    All reservations together fit the machine, and so do, by themselves, the limits of production, which therefore never
    relies on what is lent (EuroSys'15, section 5.5).
    """
    room = machine.capacity[r] * (1 + SUM_ROUNDING)
    if run.band > NON_PRODUCTION and machine.production[r] - freed_production + asked > room:
        return False
    return machine.reserved[r] - freed + asked <= room


@numba.njit(**COMPILED)
def could_fit(run: Any, machine: Any, r: int, asked: float) -> Any:
    """Whether one resource might suffice if all that a run may preempt were gone; asks no task, and errs by saying yes.

    Of what is above the ranks that are counted apart, and of what monitoring may preempt, more is counted than counts.
    """
    freed, production = machine.capacity[r] * SUM_ROUNDING, 0.0  # sums in another order
    if run.band > PRODUCTION:
        production = freed + machine.production[r]
        freed += machine.reserved[r]
    else:
        freed += machine.up_to_rank[min(run.rank, RANKS) - 1, r]
    return fits(run, machine, r, asked, freed, production)


@numba.njit(**COMPILED)
def held_back(run: Any, machine: Any, runs: Any) -> Any:
    """Whether the machine holds as many of the run's collection as may be on one."""
    if run.per_machine <= 0:
        return False
    same = 0
    i = machine.head
    while i >= 0:
        same += runs[i].collection == run.collection
        i = runs[i].next
    return same >= run.per_machine


@numba.njit(**COMPILED)
def note(m: int, board: Any) -> None:
    """Write down what a machine has at most, after anything about it has changed."""
    machine, rooms = board.machines[m], board.rooms
    there = machine.up and machine.open
    rooms[LOWEST, m] = machine.lowest if there else math.inf
    for r in range(2):
        room = machine.capacity[r] * (1 + _GENEROUS) if there else -math.inf
        rooms[CAPACITY + r, m] = room
        rooms[UNPROMISED + r, m] = room - machine.production[r]
        rooms[FREE + r, m] = room - machine.reserved[r]
        for k in range(RANKS):
            rooms[FREED + 2 * k + r, m] = room - machine.reserved[r] + machine.up_to_rank[k, r]


@numba.njit(**COMPILED)
def note_all(board: Any) -> None:
    """Write down what every machine has at most."""
    for m in range(len(board.machines)):
        note(m, board)


@numba.njit(**COMPILED)
def may(rooms: Any, row: int, m: int, asked: Any) -> Any:
    """Whether a machine may have what is asked for by two neighbouring rows; errs by saying yes."""
    return rooms[row, m] >= np.float32(asked[0]) and rooms[row + 1, m] >= np.float32(asked[1])


@numba.njit(**COMPILED)
def some_may(rooms: Any, row: int, a: int, b: int, asked: Any) -> Any:
    """Whether one of some machines may have it; without a branch, so that several are compared at once."""
    cpu, memory = rooms[row, a:b], rooms[row + 1, a:b]
    asked_cpu, asked_memory = np.float32(asked[0]), np.float32(asked[1])
    hits = 0
    for j in range(len(cpu)):
        hits += (cpu[j] >= asked_cpu) & (memory[j] >= asked_memory)
    return hits > 0


@numba.njit(**COMPILED)
def first(board: Any) -> int:
    """Return the machine with which a look through all of them begins."""
    return int(board.random[0] % np.uint64(len(board.machines)))


@numba.njit(**COMPILED)
def find(run: Any, asked: Any, board: Any) -> int:
    """Return the best machine with room for a run, -1 for none.

    Looks through the machines from a random one on until ``how.enough`` have room (EuroSys'15, 3.4, "relaxed
    randomization").
    """
    machines, how, random = board.machines, board.how, board.random
    random[0] ^= random[0] << np.uint64(13)
    random[0] ^= random[0] >> np.uint64(7)
    random[0] ^= random[0] << np.uint64(17)
    n = len(machines)
    start = first(board)
    upper = run.band > NON_PRODUCTION
    best, best_score, seen = -1, math.inf, 0
    k = 0
    while k < n and seen < how.enough:
        m = start + k - n if start + k >= n else start + k
        if k == 0 or m % TOGETHER == 0:
            until = min(n, m - m % TOGETHER + TOGETHER)
            if not some_may(board.rooms, FREE, m, until, asked) or (
                upper and not some_may(board.rooms, UNPROMISED, m, until, asked)
            ):
                k += until - m
                continue
        k += 1
        if not (may(board.rooms, FREE, m, asked) and board.masks[run.mask, m]):
            continue
        machine = machines[m]
        if not (fits(run, machine, 0, asked[0], 0.0, 0.0) and fits(run, machine, 1, asked[1], 0.0, 0.0)):
            continue
        if held_back(run, machine, board.runs):
            continue
        left = 0.0
        apart = 0.0
        for r in range(2):
            taken = machine.reserved[r]
            if run.band > NON_PRODUCTION:
                taken = max(taken, machine.production[r])
            capacity = machine.capacity[r]
            free = (capacity - taken - asked[r]) / capacity if capacity > 0 else 0.0
            left += free / 2
            apart += free if r == 0 else -free
        score = how.stranding * abs(apart) + how.leftover * left
        if score < best_score:
            best, best_score = m, score
        seen += 1
    return best


@numba.njit(**COMPILED)
def why(run: Any, asked: Any, board: Any) -> int:
    """Return the reason for which no machine has room for a run; without a branch in its loop, as ``some_may``."""
    rooms, mask = board.rooms, board.masks[run.mask]
    capacity_cpu, capacity_memory = rooms[CAPACITY], rooms[CAPACITY + 1]
    free_cpu, free_memory = rooms[FREE], rooms[FREE + 1]
    unpromised_cpu, unpromised_memory = rooms[UNPROMISED], rooms[UNPROMISED + 1]
    upper = run.band > NON_PRODUCTION
    asked_cpu, asked_memory = np.float32(asked[0]), np.float32(asked[1])
    allowed, large, cpu, memory, both = 0, 0, 0, 0, 0
    for m in range(len(mask)):
        meets = mask[m] & (capacity_cpu[m] > 0)
        holds = meets & (capacity_cpu[m] >= asked_cpu) & (capacity_memory[m] >= asked_memory)
        lacks_cpu = (free_cpu[m] < asked_cpu) | (upper & (unpromised_cpu[m] < asked_cpu))
        lacks_memory = (free_memory[m] < asked_memory) | (upper & (unpromised_memory[m] < asked_memory))
        allowed += meets
        large += holds
        cpu += holds & lacks_cpu & ~lacks_memory
        memory += holds & ~lacks_cpu & lacks_memory
        both += holds & lacks_cpu & lacks_memory
    if allowed == 0:
        return CONSTRAINTS
    if large == 0:
        return TOO_LARGE
    if cpu + memory + both < large and run.per_machine > 0:  # those with room hold as many of its collection as may be
        return SPREAD
    return CPU if cpu >= max(memory, both) else MEMORY if memory >= both else BOTH


@numba.njit(**COMPILED)
def yields(other: Any, run: Any) -> Any:
    """Whether one run may be preempted by another: by all that is higher, but production not by production."""
    return other.rank < run.rank and (other.band == NON_PRODUCTION or other.band < run.band)


@numba.njit(**COMPILED)
def price(run: Any, machine: Any, runs: Any, asked: Any, how: Any, now_us: int) -> tuple[int, int]:
    """Return the highest victim's rank, and the task-time lost, so that a run fits; rank -1 where it cannot.

    Runs of a machine are chained in the order in which they are preempted.
    """
    freed_cpu, freed_memory, production_cpu, production_memory = 0.0, 0.0, 0.0, 0.0
    lost_us = 0
    i = machine.head
    while i >= 0 and runs[i].rank < run.rank:
        gone = runs[i]
        i = gone.next
        if not yields(gone, run):
            continue
        freed_cpu += gone.reservation[0]
        freed_memory += gone.reservation[1]
        if gone.band > NON_PRODUCTION:
            production_cpu += gone.limit[0]
            production_memory += gone.limit[1]
        if not gone.service:
            done_us = gone.offset_us + now_us - gone.placed_us
            lost_us += done_us % how.checkpoint_us if how.checkpoint_us > 0 else done_us
        if fits(run, machine, 0, asked[0], freed_cpu, production_cpu) and fits(
            run, machine, 1, asked[1], freed_memory, production_memory
        ):
            return gone.rank, lost_us
    return -1, 0


@numba.njit(**COMPILED)
def victim(run: Any, machine: Any, runs: Any) -> Any:
    """Return the run of a machine that another one preempts first, -1 for none."""
    i = machine.head
    while i >= 0 and not yields(runs[i], run):
        i = runs[i].next
    return i


@numba.njit(**COMPILED)
def dies_first(runs: Any, i: int, j: int) -> Any:
    """Whether memory that runs out costs a run before another one of its machine: production comes last."""
    if runs[i].band != runs[j].band:
        return runs[i].band < runs[j].band
    return before(runs, i, j)


@numba.njit(**COMPILED)
def asks_no_less(entry: Any, other: Any) -> Any:
    """Whether one that waits fits nowhere because one tried before it, of no lower rank, did not."""
    return (
        other.mask == entry.mask and (other.band > NON_PRODUCTION) == (entry.band > NON_PRODUCTION)
        and other.asked[0] <= entry.asked[0] and other.asked[1] <= entry.asked[1]
        and (other.per_machine <= 0 or other.collection == entry.collection)
    )  # fmt: skip


@numba.njit(**COMPILED)
def remember(k: int, waiting: Any, failed: Any, n_failed: int) -> int:
    """Remember that one fits nowhere, and forget those that this implies; return how many are remembered."""
    kept = 0
    for f in range(n_failed):
        if not asks_no_less(waiting[failed[f]], waiting[k]):
            failed[kept] = failed[f]
            kept += 1
    if kept < len(failed):
        failed[kept] = k
        kept += 1
    return kept


@numba.njit(**COMPILED)
def most_room(board: Any, most: Any) -> Any:
    """Write the most that any machine has left of each resource, and return the lowest rank that runs on any.

    A run of no higher a rank that asks for more can neither be placed nor make room for itself.
    """
    most[0] = most[1] = -math.inf
    lowest = np.float32(math.inf)
    for m in range(len(board.machines)):
        lowest = min(lowest, board.rooms[LOWEST, m])
        for r in range(2):
            most[r] = max(most[r], board.rooms[FREE + r, m])
    return lowest
