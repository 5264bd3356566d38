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
from reclaim.training.margins.violation import SUM_ROUNDING, overruns_in_kernel, room_in_kernel

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
RANK_MAX, LOST_MAX = 2**31 - 1, 2**62
"""Above all costs of preemption."""
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

    Ranks above ``RANKS``, and what monitoring may preempt, are overstated. So is what can be freed on machines that are
    foreseen together, where the other runs reserve at least their part of ``least``.
    """
    freed, production = machine.capacity[r] * SUM_ROUNDING, 0.0  # sums in another order
    if run.band > PRODUCTION:
        production = freed + machine.production[r]
        freed += machine.reserved[r]
    else:
        freed += machine.reserved[r] - machine.least[r] + machine.up_to_rank[min(run.rank, RANKS) - 1, r]
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
    """Update the column of ``loop.rooms`` of a machine that has changed, and note the change."""
    machine, rooms = loop.machines[m], loop.rooms
    loop.n_changed[0] += 1
    change = loop.changed[loop.n_changed[0] % len(loop.changed)]
    change.machine = m
    for row in range(LOWEST):
        change.before[row] = rooms[row, m]
    there = machine.up and machine.open
    rooms[LOWEST, m] = machine.lowest if there else math.inf
    for r in range(2):
        room = machine.capacity[r] * (1 + _SLACK) if there else -math.inf
        rooms[CAPACITY + r, m] = room
        rooms[UNPROMISED + r, m] = room - machine.production[r]
        rooms[FREE + r, m] = room - machine.reserved[r]
        for k in range(RANKS):
            rooms[FREED + 2 * k + r, m] = room - machine.least[r] + machine.up_to_rank[k, r]
    for row in range(LOWEST):
        change.after[row] = rooms[row, m]


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
def must_fit(rooms: Any, row: int, m: int, need: Any) -> Any:
    """Say whether a machine has room for certain, by two neighbouring rows; errs by saying no."""
    for r in range(2):
        if not rooms[row + r, m] - np.float32(4 * _SLACK) * rooms[CAPACITY + r, m] >= np.float32(need[r]):
            return False
    return True


@numba.njit(**COMPILED)
def those_that_may_fit(loop: Any, rows: Any, mask: int, a: int, b: int, need: Any, found: Any) -> int:
    """Write which of the machines ``a`` to ``b`` may fit by two pairs of neighbouring rows; return how many there are.

    The first pass has no branch, so that it is vectorised, and skips machines among which there is none; nor has the
    second one, which would be predicted wrongly as often as a machine has room.
    """
    rooms, allowed = loop.rooms, loop.masks[mask, a:b]
    cpu, memory = rooms[rows[0], a:b], rooms[rows[0] + 1, a:b]
    also_cpu, also_memory = rooms[rows[1], a:b], rooms[rows[1] + 1, a:b]
    need_cpu, need_memory = np.float32(need[0]), np.float32(need[1])
    any_fits = False
    for j in range(len(cpu)):
        any_fits |= (
            (cpu[j] >= need_cpu) & (memory[j] >= need_memory) & (also_cpu[j] >= need_cpu)
            & (also_memory[j] >= need_memory) & allowed[j]
        )  # fmt: skip
    n = 0
    if any_fits:
        for j in range(len(cpu)):
            found[n] = a + j
            n += (
                (cpu[j] >= need_cpu) & (memory[j] >= need_memory) & (also_cpu[j] >= need_cpu)
                & (also_memory[j] >= need_memory) & allowed[j]
            )  # fmt: skip
    return n


@numba.njit(**COMPILED)
def first_machine(loop: Any) -> Any:
    """Return the machine with which a search begins."""
    return np.int64(loop.random[0] % np.uint64(len(loop.machines)))


@numba.njit(**COMPILED)
def draw(random: Any) -> None:
    """Draw the next random number: one for each run that is tried."""
    random[0] ^= random[0] << np.uint64(13)
    random[0] ^= random[0] >> np.uint64(7)
    random[0] ^= random[0] << np.uint64(17)


@numba.njit(**COMPILED)
def find_machine(run: Any, need: Any, loop: Any) -> int:
    """Return the machine of the least ``score`` for a run, -1 where none has room.

    Begins at a random machine and stops at ``settings.enough`` with room (EuroSys'15, 3.4, "relaxed randomization").
    """
    machines, settings = loop.machines, loop.settings
    draw(loop.random)
    n = len(machines)
    rows = np.int64(FREE), np.int64(UNPROMISED if run.band > NON_PRODUCTION else FREE)
    found = np.empty(TOGETHER, np.int64)
    best, best_score, seen = -1, math.inf, 0
    a, left = first_machine(loop), n
    while left > 0 and seen < settings.enough:
        b = min(n, a - a % TOGETHER + TOGETHER, a + left)
        for j in range(those_that_may_fit(loop, rows, run.mask, a, b, need, found)):
            m = found[j]
            machine = machines[m]
            if not has_room(run, machine, need) or holds_its_most(run, machine, loop.runs):
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


@numba.njit(**COMPILED)
def _free_share(run: Any, machine: Any, r: int, need: float) -> Any:
    """Return the share of resource ``r`` that a machine has left after taking a run."""
    taken = machine.reserved[r]
    if run.band > NON_PRODUCTION:
        taken = max(taken, machine.production[r])
    capacity = machine.capacity[r]
    return (capacity - taken - need) / capacity if capacity > 0 else 0.0


@numba.njit(**COMPILED)
def score(free_cpu: float, free_memory: float, stranding: float, leftover: float) -> float:
    """Return the score of a machine of which these shares would be left free; the least is best.

    With the weights of ``POLICIES`` it is ``stranding * |free_cpu - free_memory| + leftover * mean``.
    """
    stranded = stranding * abs(free_cpu - free_memory)
    result: float = stranded + leftover * (free_cpu + free_memory) / 2
    return result


@numba.njit(**COMPILED)
def count_lacks(run: Any, need: Any, loop: Any, failure: Any) -> None:
    """Count what machines lack for a run into a ``FAILURE``; vectorised like ``those_that_may_fit``."""
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
    failure.allowed, failure.large = allowed, large
    failure.cpu, failure.memory, failure.both = cpu, memory, both


@numba.njit(**COMPILED)
def _recount(rooms: Any, upper: bool, failure: Any, sign: int) -> None:
    """Count one machine as ``count_lacks`` does, by its first ``LOWEST`` rooms; ``sign`` -1 takes it out."""
    need_cpu, need_memory = np.float32(failure.need[0]), np.float32(failure.need[1])
    if not rooms[CAPACITY] > 0:
        return
    failure.allowed += sign
    if rooms[CAPACITY] < need_cpu or rooms[CAPACITY + 1] < need_memory:
        return
    failure.large += sign
    lacks_cpu = rooms[FREE] < need_cpu or (upper and rooms[UNPROMISED] < need_cpu)
    lacks_memory = rooms[FREE + 1] < need_memory or (upper and rooms[UNPROMISED + 1] < need_memory)
    if lacks_cpu and lacks_memory:
        failure.both += sign
    elif lacks_cpu:
        failure.cpu += sign
    elif lacks_memory:
        failure.memory += sign


@numba.njit(**COMPILED)
def waiting_reason(run: Any, failure: Any) -> int:
    """Return one of ``records.REASONS``: why no machine has room for a run."""
    if failure.allowed == 0:
        return CONSTRAINTS
    if failure.large == 0:
        return TOO_LARGE
    cpu, memory, both = failure.cpu, failure.memory, failure.both
    if cpu + memory + both < failure.large and run.per_machine > 0:
        return SPREAD  # those with room hold their most of its collection
    return CPU if cpu >= max(memory, both) else MEMORY if memory >= both else BOTH


@numba.njit(**COMPILED)
def failure_of(run: Any, need: Any, loop: Any) -> Any:
    """Return the place in ``loop.failures`` of searches for what a run asks; the first one for any that is not kept.

    A failure is not kept where it depends on which runs a machine holds: its collection's, or all of them.
    """
    if run.per_machine > 0 or run.band > PRODUCTION:
        return 0
    parts = need.view(np.uint64)
    mixed = parts[0] * np.uint64(0x9E3779B97F4A7C15) + parts[1] * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed += np.uint64(run.mask * 64 + run.rank * 4 + run.band)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return 1 + np.int64((mixed >> np.uint64(33)) % np.uint64(len(loop.failures) - 1))


@numba.njit(**COMPILED)
def fails_again(run: Any, need: Any, loop: Any, k: int) -> bool:
    """Say whether failure ``k`` is of the same search and no machine that changed since may fit; update its counts."""
    failure, changed = loop.failures[k], loop.changed
    since, now = failure.at, loop.n_changed[0]
    if k == 0 or since == 0 or now - since > len(changed):
        return False
    same = failure.need[0] == need[0] and failure.need[1] == need[1]
    if not (same and failure.mask == run.mask and failure.rank == run.rank and failure.band == run.band):
        return False
    upper, row = run.band > NON_PRODUCTION, FREED + 2 * (min(run.rank, RANKS) - 1)
    for j in range(since + 1, now + 1):
        m = np.int64(changed[j % len(changed)].machine)
        if not loop.masks[run.mask, m] or (upper and not may_fit(loop.rooms, UNPROMISED, m, need)):
            continue
        if may_fit(loop.rooms, FREE, m, need) or (run.rank > 0 and may_fit(loop.rooms, row, m, need)):
            return False
    for j in range(since + 1, now + 1):
        change = changed[j % len(changed)]
        if loop.masks[run.mask, change.machine]:
            _recount(change.before, upper, failure, -1)
            _recount(change.after, upper, failure, 1)
    failure.at = now
    return True


@numba.njit(**COMPILED)
def is_preemptible(other: Any, run: Any) -> Any:
    """Say whether ``run`` may preempt ``other``: a higher rank may, but production not production."""
    return other.rank < run.rank and (other.band == NON_PRODUCTION or other.band < run.band)


@numba.njit(**COMPILED)
def preemption_cost(
    run: Any, machine: Any, runs: Any, need: Any, settings: Any, now_us: int, m: int, foreseen: Any,
    rank: int, most_us: int,
) -> tuple[int, int]:  # fmt: skip
    """Return the highest victim's rank, and the task-time lost in µs, for a run to fit; rank -1 where it cannot.

    Stops as soon as the costs are no less than ``rank`` and ``most_us``, and returns what they have come to.
    """
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
            freed_cpu = machine.reserved[0] - foresee(np.int64(0), foreseen.spare, used_cpu, foreseen)
            freed_memory = machine.reserved[1] - foresee(np.int64(1), foreseen.spare, used_memory, foreseen)
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
        if gone.rank > rank or (gone.rank == rank and lost_us >= most_us):
            return gone.rank, lost_us
    return -1, 0


@numba.njit(**COMPILED)
def find_preemption(run: Any, need: Any, loop: Any, now_us: int) -> int:
    """Return the machine on which a run costs least to make room for, -1 where no preemption helps.

    Costs are the rank of the highest victim, then the work lost, among the first ``settings.enough`` machines that can
    make room. Runs are not read where sums alone are certain that a machine can, but only above the best one's rank.
    """
    runs, machines, settings = loop.runs, loop.machines, loop.settings
    best, best_rank, best_lost, seen = -1, np.int64(RANK_MAX), np.int64(LOST_MAX), 0
    if run.rank <= 0:
        return best
    row = FREED + 2 * (min(run.rank, RANKS) - 1)  # production does not preempt production
    rows = (
        np.int64(CAPACITY if run.band > PRODUCTION else row),
        np.int64(UNPROMISED if run.band == PRODUCTION else CAPACITY),
    )
    # by sums alone it is certain that a run fits where they tell ranks apart, and freed reservations add up
    adds_up = len(loop.foreseen.terms) == 0 and run.band <= PRODUCTION and run.rank < RANKS and run.per_machine <= 0
    found = np.empty(TOGETHER, np.int64)
    n = len(machines)
    a, left = first_machine(loop), n
    while left > 0 and seen < settings.enough:
        b = min(n, a - a % TOGETHER + TOGETHER, a + left)
        for j in range(those_that_may_fit(loop, rows, run.mask, a, b, need, found)):
            m = found[j]
            machine = machines[m]
            certain = adds_up and must_fit(loop.rooms, row, m, need)
            certain &= run.band < PRODUCTION or must_fit(loop.rooms, UNPROMISED, m, need)
            if certain:
                if best >= 0 and not may_fit(loop.rooms, FREED + 2 * best_rank, m, need):  # its rank is higher
                    seen += 1
                    if seen == settings.enough:
                        break
                    continue
            elif (
                machine.lowest >= run.rank
                or overruns_in_kernel(need[0], machine.capacity[0])
                or overruns_in_kernel(need[1], machine.capacity[1])
                or not could_fit(run, machine, 0, need[0])
                or not could_fit(run, machine, 1, need[1])
                or holds_its_most(run, machine, runs)
            ):
                continue
            rank, lost_us = preemption_cost(
                run, machine, runs, need, settings, now_us, m, loop.foreseen,
                best_rank if certain else RANK_MAX, best_lost if certain else LOST_MAX,
            )  # fmt: skip
            if rank >= 0 and (rank < best_rank or (rank == best_rank and lost_us < best_lost)):
                best, best_rank, best_lost = m, rank, lost_us
            seen += rank >= 0
            if seen == settings.enough:
                break
        left -= b - a
        a = b if b < n else 0
    return best


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
