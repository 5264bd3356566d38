"""Placement of runs: the machines that have room, their scores, and what a preemption would cost; compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numba
import numpy as np

from reclaim.data.core.jit import code_field
from reclaim.replay.closed_loop.foreseen import add_terms, foresee
from reclaim.replay.closed_loop.records import (
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
from reclaim.training.margins.violation import SUM_ROUNDING, room_in_kernel

POLICIES: Final[Mapping[str, tuple[float, float]]] = {
    "best-fit": (0.0, 1.0),
    "worst-fit": (0.0, -1.0),
    "hybrid": (1.0, 1.0),
}
"""Weights (stranding, leftover) of each policy; see ``score``. Best fit fills machines up. Worst fit spreads the load,
as E-PVM did. The hybrid fills machines up without leaving one resource unusable for want of the other, as Borg's does
by its description (EuroSys'15, section 3.2; the weights are ours)."""

POLICY: Final = np.dtype([("stranding", "f8"), ("leftover", "f8"), code_field("replay/closed_loop/placement.py")])
"""A policy's weights, for compiled code elsewhere that calls ``score``."""

TOGETHER: Final = 128
"""Machines skipped together where none of them can have room."""
_SLACK: Final = 1e-6
"""Share of its capacity by which a machine's room is overstated: more than single precision loses."""


@numba.njit(**COMPILED)
def is_preempted_before(runs: Any, i: int, j: int) -> Any:
    """Say whether run ``i`` is preempted before run ``j`` of the same machine."""
    a, b = runs[i], runs[j]
    if a.rank != b.rank:
        return a.rank < b.rank
    if a.placed_us != b.placed_us:
        return a.placed_us > b.placed_us
    return i > j


@numba.njit(**COMPILED)
def fits(run: Any, machine: Any, r: int, need: float, freed: float, freed_production: float) -> Any:
    """Say whether resource ``r`` suffices once parts of the reservations and of production's limits are freed.

    All reservations together fit the machine, and so do the limits of production alone, which therefore never relies on
    reclaimed resources (EuroSys'15, section 5.5).
    """
    room = room_in_kernel(machine.capacity[r])
    if run.band > NON_PRODUCTION and machine.production[r] - freed_production + need > room:
        return False
    return machine.reserved[r] - freed + need <= room


@numba.njit(**COMPILED)
def has_room(run: Any, machine: Any, need: Any) -> Any:
    """Say whether both resources suffice as the machine is."""
    return fits(run, machine, 0, need[0], 0.0, 0.0) and fits(run, machine, 1, need[1], 0.0, 0.0)


@numba.njit(**COMPILED)
def could_fit(run: Any, machine: Any, r: int, need: float) -> Any:
    """Say whether resource ``r`` might suffice without all that a run may preempt; by sums alone, errs towards yes.

    Ranks above ``RANKS``, and what monitoring may preempt, are overstated.
    """
    freed, production = machine.capacity[r] * SUM_ROUNDING, 0.0  # sums in another order
    if run.band > PRODUCTION:
        production = freed + machine.production[r]
        freed += machine.reserved[r]
    else:
        freed += machine.up_to_rank[min(run.rank, RANKS) - 1, r]
    return fits(run, machine, r, need, freed, production)


@numba.njit(**COMPILED)
def holds_its_most(run: Any, machine: Any, runs: Any) -> Any:
    """Say whether the machine holds as many of the run's collection as may share one."""
    if run.per_machine <= 0:
        return False
    same = 0
    i = machine.head
    while i >= 0:
        same += runs[i].collection == run.collection
        i = runs[i].next
    return same >= run.per_machine


@numba.njit(**COMPILED)
def update_room(m: int, loop: Any) -> None:
    """Update the column of ``loop.rooms`` of a machine that has changed."""
    machine, rooms = loop.machines[m], loop.rooms
    there = machine.up and machine.open
    rooms[LOWEST, m] = machine.lowest if there else math.inf
    for r in range(2):
        room = machine.capacity[r] * (1 + _SLACK) if there else -math.inf
        rooms[CAPACITY + r, m] = room
        rooms[UNPROMISED + r, m] = room - machine.production[r]
        rooms[FREE + r, m] = room - machine.reserved[r]
        for k in range(RANKS):
            rooms[FREED + 2 * k + r, m] = room - machine.reserved[r] + machine.up_to_rank[k, r]


@numba.njit(**COMPILED)
def update_all_rooms(loop: Any) -> None:
    """Update ``loop.rooms`` of every machine."""
    for m in range(len(loop.machines)):
        update_room(m, loop)


@numba.njit(**COMPILED)
def may_fit(rooms: Any, row: int, m: int, need: Any) -> Any:
    """Say whether a machine may have room, by two neighbouring rows; errs by saying yes."""
    return rooms[row, m] >= np.float32(need[0]) and rooms[row + 1, m] >= np.float32(need[1])


@numba.njit(**COMPILED)
def any_may_fit(rooms: Any, row: int, a: int, b: int, need: Any) -> Any:
    """Say whether one of the machines ``a`` to ``b`` may have them; without a branch, so that it is vectorised."""
    cpu, memory = rooms[row, a:b], rooms[row + 1, a:b]
    need_cpu, need_memory = np.float32(need[0]), np.float32(need[1])
    hits = 0
    for j in range(len(cpu)):
        hits += (cpu[j] >= need_cpu) & (memory[j] >= need_memory)
    return hits > 0


@numba.njit(**COMPILED)
def first_machine(loop: Any) -> int:
    """Return the machine with which a search begins."""
    return int(loop.random[0] % np.uint64(len(loop.machines)))


@numba.njit(**COMPILED)
def find_machine(run: Any, need: Any, loop: Any) -> int:
    """Return the machine of the least ``score`` for a run, -1 where none has room.

    Begins at a random machine and stops at ``settings.enough`` with room (EuroSys'15, 3.4, "relaxed randomization").
    """
    machines, settings, random = loop.machines, loop.settings, loop.random
    random[0] ^= random[0] << np.uint64(13)
    random[0] ^= random[0] >> np.uint64(7)
    random[0] ^= random[0] << np.uint64(17)
    n = len(machines)
    start = first_machine(loop)
    upper = run.band > NON_PRODUCTION
    best, best_score, seen = -1, math.inf, 0
    k = 0
    while k < n and seen < settings.enough:
        m = start + k - n if start + k >= n else start + k
        if k == 0 or m % TOGETHER == 0:
            until = min(n, m - m % TOGETHER + TOGETHER)
            if not any_may_fit(loop.rooms, FREE, m, until, need) or (
                upper and not any_may_fit(loop.rooms, UNPROMISED, m, until, need)
            ):
                k += until - m
                continue
        k += 1
        if not (may_fit(loop.rooms, FREE, m, need) and loop.masks[run.mask, m]):
            continue
        machine = machines[m]
        if not has_room(run, machine, need):
            continue
        if holds_its_most(run, machine, loop.runs):
            continue
        its_score = score(_free_share(run, machine, 0, need[0]), _free_share(run, machine, 1, need[1]), settings)
        if its_score < best_score:
            best, best_score = m, its_score
        seen += 1
    return best


@numba.njit(**COMPILED)
def _free_share(run: Any, machine: Any, r: int, need: float) -> Any:
    """Return the share of resource ``r`` that a machine has left after taking a run."""
    taken = machine.reserved[r]
    if run.band > NON_PRODUCTION:
        taken = max(taken, machine.production[r])
    capacity = machine.capacity[r]
    return (capacity - taken - need) / capacity if capacity > 0 else 0.0


@numba.njit(**COMPILED)
def score(free_cpu: float, free_memory: float, policy: Any) -> float:
    """Return the score of a machine of which these shares would be left free; the least is best.

    ``policy`` has the weights of ``POLICIES``: ``stranding * |free_cpu - free_memory| + leftover * mean``.
    """
    stranded = policy.stranding * abs(free_cpu - free_memory)
    result: float = stranded + policy.leftover * (free_cpu + free_memory) / 2
    return result


@numba.njit(**COMPILED)
def waiting_reason(run: Any, need: Any, loop: Any) -> int:
    """Return one of ``records.REASONS``: why no machine has room for a run; vectorised like ``any_may_fit``."""
    rooms, mask = loop.rooms, loop.masks[run.mask]
    capacity_cpu, capacity_memory = rooms[CAPACITY], rooms[CAPACITY + 1]
    free_cpu, free_memory = rooms[FREE], rooms[FREE + 1]
    unpromised_cpu, unpromised_memory = rooms[UNPROMISED], rooms[UNPROMISED + 1]
    upper = run.band > NON_PRODUCTION
    need_cpu, need_memory = np.float32(need[0]), np.float32(need[1])
    allowed, large, cpu, memory, both = 0, 0, 0, 0, 0
    for m in range(len(mask)):
        meets = mask[m] & (capacity_cpu[m] > 0)
        holds = meets & (capacity_cpu[m] >= need_cpu) & (capacity_memory[m] >= need_memory)
        lacks_cpu = (free_cpu[m] < need_cpu) | (upper & (unpromised_cpu[m] < need_cpu))
        lacks_memory = (free_memory[m] < need_memory) | (upper & (unpromised_memory[m] < need_memory))
        allowed += meets
        large += holds
        cpu += holds & lacks_cpu & ~lacks_memory
        memory += holds & ~lacks_cpu & lacks_memory
        both += holds & lacks_cpu & lacks_memory
    if allowed == 0:
        return CONSTRAINTS
    if large == 0:
        return TOO_LARGE
    if cpu + memory + both < large and run.per_machine > 0:  # those with room hold their most of its collection
        return SPREAD
    return CPU if cpu >= max(memory, both) else MEMORY if memory >= both else BOTH


@numba.njit(**COMPILED)
def is_preemptible(other: Any, run: Any) -> Any:
    """Say whether ``run`` may preempt ``other``: a higher rank may, but production not production."""
    return other.rank < run.rank and (other.band == NON_PRODUCTION or other.band < run.band)


@numba.njit(**COMPILED)
def preemption_cost(
    run: Any, machine: Any, runs: Any, need: Any, settings: Any, now_us: int, m: int, foreseen: Any
) -> tuple[int, int]:
    """Return the highest victim's rank, and the task-time lost in µs, for a run to fit; rank -1 where it cannot."""
    together = len(foreseen.terms) > 0
    used_cpu, used_memory = machine.use[0], machine.use[1]
    if together:
        foreseen.spare[:] = foreseen.sums[m]
    freed_cpu, freed_memory, production_cpu, production_memory = 0.0, 0.0, 0.0, 0.0
    lost_us = 0
    i = machine.head
    while i >= 0 and runs[i].rank < run.rank:
        gone = runs[i]
        i = gone.next
        if not is_preemptible(gone, run):
            continue
        if together:
            add_terms(foreseen.spare, gone, foreseen, -1.0)
            used_cpu, used_memory = used_cpu - gone.use[0], used_memory - gone.use[1]
            freed_cpu = machine.reserved[0] - foresee(0, foreseen.spare, used_cpu, foreseen)
            freed_memory = machine.reserved[1] - foresee(1, foreseen.spare, used_memory, foreseen)
        else:
            freed_cpu += gone.reservation[0]
            freed_memory += gone.reservation[1]
        if gone.band > NON_PRODUCTION:
            production_cpu += gone.limit[0]
            production_memory += gone.limit[1]
        if not gone.service:
            done_us = gone.offset_us + now_us - gone.placed_us
            lost_us += done_us % settings.checkpoint_us if settings.checkpoint_us > 0 else done_us
        if fits(run, machine, 0, need[0], freed_cpu, production_cpu) and fits(
            run, machine, 1, need[1], freed_memory, production_memory
        ):
            return gone.rank, lost_us
    return -1, 0


@numba.njit(**COMPILED)
def first_victim(run: Any, machine: Any, runs: Any) -> Any:
    """Return the run of a machine that ``run`` preempts first, -1 for none."""
    i = machine.head
    while i >= 0 and not is_preemptible(runs[i], run):
        i = runs[i].next
    return i


@numba.njit(**COMPILED)
def is_killed_before(runs: Any, i: int, j: int) -> Any:
    """Say whether run ``i`` is killed before run ``j`` when memory runs out; production comes last."""
    if runs[i].band != runs[j].band:
        return runs[i].band < runs[j].band
    return is_preempted_before(runs, i, j)


@numba.njit(**COMPILED)
def in_turn(waiting: Any, served: Any) -> Any:
    """Return the order in which entries are tried: by rank, then in rounds of one entry of each user.

    Within a round the users come first that were never served, by number, then those that were served longest ago.
    """
    n, users = len(waiting), len(served) - 1
    turns = np.empty(n, np.int64)
    for k in range(n):
        turns[k] = waiting[k].turn
    by_time = np.argsort(turns, kind="mergesort")
    if users == 1:
        return by_time
    place, before, of_rank = np.empty(users, np.int64), np.zeros(users, np.int64), np.full(users, -1, np.int64)
    place[np.argsort(served[1:], kind="mergesort")] = np.arange(users)  # never served comes first, by number
    for k in range(n):
        i = by_time[k]
        user, rank = waiting[i].user, waiting[i].rank
        if of_rank[user] != rank:
            before[user], of_rank[user] = 0, rank
        turns[k] = (-np.int64(rank) << 48) + (before[user] << 24) + place[user]  # up to 16 million of each
        before[user] += 1
    return by_time[np.argsort(turns, kind="mergesort")]


@numba.njit(**COMPILED)
def needs_no_less(entry: Any, other: Any) -> Any:
    """Say whether an entry fits nowhere because another one, of no lower rank, does not."""
    return (
        other.mask == entry.mask and (other.band > NON_PRODUCTION) == (entry.band > NON_PRODUCTION)
        and other.first_limit[0] <= entry.first_limit[0] and other.first_limit[1] <= entry.first_limit[1]
        and (other.per_machine <= 0 or other.collection == entry.collection)
    )  # fmt: skip


@numba.njit(**COMPILED)
def remember_failure(k: int, waiting: Any, failed: Any, n_failed: int) -> int:
    """Add entry ``k`` to the failed ones in place of those that it implies; return how many there are."""
    kept = 0
    for f in range(n_failed):
        if not needs_no_less(waiting[failed[f]], waiting[k]):
            failed[kept] = failed[f]
            kept += 1
    if kept < len(failed):
        failed[kept] = k
        kept += 1
    return kept


@numba.njit(**COMPILED)
def largest_room(loop: Any, most: Any) -> Any:
    """Write the most that any machine has left of each resource into ``most``; return the lowest rank that runs on any.

    A run of no higher a rank that needs more can neither be placed nor make room for itself.
    """
    most[0] = most[1] = -math.inf
    lowest = np.float32(math.inf)
    for m in range(len(loop.machines)):
        lowest = min(lowest, loop.rooms[LOWEST, m])
        for r in range(2):
            most[r] = max(most[r], loop.rooms[FREE + r, m])
    return lowest
