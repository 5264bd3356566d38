"""Placement of runs: the machines that have room, their scores, and what a preemption would cost; compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types

from reclaim.data.core import vectors
from reclaim.data.core.jit import code_field
from reclaim.data.core.vectors import LANES, in_llvm
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
"""Machines looked at together, before those of them that may have room."""
_RADIX_BITS: Final = 11
"""Bits of a pass of a sort: its counts stay in the nearest cache."""
_BOOLS: Final = ir.VectorType(ir.IntType(8), LANES)
RANK_MAX, LOST_MAX = 2**31 - 1, 2**62
"""Above all costs of preemption."""
_AT_ONCE: Final = 8
"""Machines on which the costs of preemption are computed in turn."""
NO_ANCHOR: Final = -(2**62)
"""Value for a machine whose first run loses no work when it is stopped, or is not one that is preempted."""
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
def ranks_of(rooms: Any) -> int:
    """Return the number of ranks that rooms tell apart: those of non-production, up to ``RANKS``."""
    ranks: int = (len(rooms) - FREED) // 2
    return ranks


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
        for k in range(ranks_of(rooms)):
            rooms[FREED + 2 * k + r, m] = room - machine.least[r] + machine.up_to_rank[k, r]
    for row in range(LOWEST):
        change.after[row] = rooms[row, m]
    loop.anchors[m] = NO_ANCHOR
    if machine.head >= 0:
        first = loop.runs[machine.head]
        if first.band == NON_PRODUCTION and not first.service:
            loop.anchors[m] = first.placed_us - first.offset_us


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


@in_llvm
def _sixteen_that_may_fit(
    _: Any, rooms: Any, masks: Any, row: Any, also: Any, mask: Any, first: Any, cpu: Any, memory: Any
) -> tuple[Any, Callable[..., Any]]:
    """Return which of sixteen machines from ``first`` on may fit, a bit each from the lowest up; see the caller."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of, allowed = vectors.arrays(context, builder, signature, args)
        n = vectors.shape_of(builder, of)[1]
        row, also, mask, first = args[2:6]
        needs = [vectors.spread(builder, need) for need in args[6:]]
        begin = builder.add(builder.mul(mask, n), first)
        bools = vectors.at(builder, allowed.data, begin, kind=_BOOLS)
        bits = builder.icmp_unsigned("!=", builder.load(bools, align=1), ir.Constant(_BOOLS, [0] * LANES))
        for one in (row, also):
            for r, need in enumerate(needs):
                place = builder.mul(builder.add(one, one.type(r)), n)
                room = vectors.load(builder, of.data, place, first)
                bits = builder.and_(bits, builder.fcmp_ordered(">=", room, need))
        return builder.zext(builder.bitcast(bits, ir.IntType(LANES)), ir.IntType(64))

    return types.uint64(rooms, masks, row, also, mask, first, cpu, memory), generate


@in_llvm
def _lowest_bit(_: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the place of the lowest bit that is set; one must be."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(bits), generate


@numba.njit(**COMPILED)
def those_that_may_fit(rooms: Any, masks: Any, rows: Any, mask: int, a: int, b: int, need: Any, found: Any) -> int:
    """Write which of the machines ``a`` to ``b`` may fit by two pairs of neighbouring rows; return how many there are.

    Sixteen machines are compared at a time: a branch for each would be predicted wrongly as often as one has room.
    """
    cpu, memory = np.float32(need[0]), np.float32(need[1])
    n = 0
    for first in range(a, b, LANES):
        if first + LANES <= b:
            bits = _sixteen_that_may_fit(rooms, masks, rows[0], rows[1], np.int64(mask), first, cpu, memory)
        else:
            bits = np.uint64(0)
            for m in range(first, b):
                if masks[mask, m] and may_fit(rooms, rows[0], m, need) and may_fit(rooms, rows[1], m, need):
                    bits |= np.uint64(1) << np.uint64(m - first)
        while bits:
            found[n] = first + _lowest_bit(bits)
            n += 1
            bits &= bits - np.uint64(1)
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
    runs, machines, rooms, masks, settings = loop.runs, loop.machines, loop.rooms, loop.masks, loop.settings
    draw(loop.random)
    n = len(machines)
    rows = np.int64(FREE), np.int64(UNPROMISED if run.band > NON_PRODUCTION else FREE)
    found = np.empty(TOGETHER, np.int64)
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


@numba.njit(**COMPILED)
def scores_no_less(run: Any, m: int, rooms: Any, need: Any, settings: Any, least: float) -> bool:
    """Say whether a machine has room, and scores no less, for certain, by ``rooms`` alone; errs by saying no."""
    upper = run.band > NON_PRODUCTION
    if not must_fit(rooms, FREE, m, need) or (upper and not must_fit(rooms, UNPROMISED, m, need)):
        return False
    cpu, memory = rooms[FREE, m], rooms[FREE + 1, m]
    if upper:
        cpu, memory = min(cpu, rooms[UNPROMISED, m]), min(memory, rooms[UNPROMISED + 1, m])
    free_cpu, free_memory = (cpu - need[0]) / rooms[CAPACITY, m], (memory - need[1]) / rooms[CAPACITY + 1, m]
    stranding, leftover = settings.stranding, settings.leftover
    error = 10 * _SLACK * (2 * abs(stranding) + abs(leftover))  # of each share four times the slack at most
    above: bool = score(free_cpu, free_memory, stranding, leftover) - error >= least
    return above


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
    failure, changed, rooms, allowed = loop.failures[k], loop.changed, loop.rooms, loop.masks[run.mask]
    since, now = failure.at, loop.n_changed[0]
    if k == 0 or since == 0 or now - since > len(changed):
        return False
    same = failure.need[0] == need[0] and failure.need[1] == need[1]
    if not (same and failure.mask == run.mask and failure.rank == run.rank and failure.band == run.band):
        return False
    upper, row = run.band > NON_PRODUCTION, FREED + 2 * (min(run.rank, ranks_of(rooms)) - 1)
    for j in range(since + 1, now + 1):
        m = np.int64(changed[j % len(changed)].machine)
        if not allowed[m] or (upper and not may_fit(rooms, UNPROMISED, m, need)):
            continue
        if may_fit(rooms, FREE, m, need) or (run.rank > 0 and may_fit(rooms, row, m, need)):
            return False
    for j in range(since + 1, now + 1):
        change = changed[j % len(changed)]
        if allowed[change.machine]:
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
            freed_cpu = machine.reserved[0] - foresee(np.int64(0), foreseen.spare, used_cpu, foreseen)
            freed_memory = machine.reserved[1] - foresee(np.int64(1), foreseen.spare, used_memory, foreseen)
        else:
            freed_cpu += gone.reservation[0]
            freed_memory += gone.reservation[1]
        if gone.band > NON_PRODUCTION:
            production_cpu += gone.limit[0]
            production_memory += gone.limit[1]
        if not gone.service:
            lost_us += _lost_us(gone.offset_us + now_us - gone.placed_us, settings)
        if fits(run, machine, 0, need[0], freed_cpu, production_cpu) and fits(
            run, machine, 1, need[1], freed_memory, production_memory
        ):
            return gone.rank, lost_us
    return -1, 0


@numba.njit(**COMPILED)
def costs_no_less(
    anchor_us: int, m: int, rooms: Any, need: Any, rank: int, lost_us: int, settings: Any, now_us: int
) -> Any:
    """Say whether making room on a machine is certain to cost no less, without a look at its runs; errs by saying no.

    Its highest victim has a higher rank, or the same one, and the first victim alone loses as much work.
    """
    if not may_fit(rooms, FREED + 2 * rank, m, need):
        return True
    if anchor_us == NO_ANCHOR or (rank > 0 and may_fit(rooms, FREED + 2 * (rank - 1), m, need)):
        return False
    return _lost_us(now_us - anchor_us, settings) >= lost_us


@numba.njit(**COMPILED)
def _lost_us(done_us: int, settings: Any) -> Any:
    """Return the part of batch work done that is lost by a stop: since the last checkpoint."""
    return done_us % settings.checkpoint_us if settings.checkpoint_us > 0 else done_us


@numba.njit(**COMPILED)
def find_preemption(run: Any, need: Any, loop: Any, now_us: int) -> int:
    """Return the machine on which a run costs least to make room for, -1 where no preemption helps.

    Costs are the rank of the highest victim, then the work lost, among the first ``settings.enough`` machines that can
    make room. Runs are not read where sums alone are certain that a machine can, but only above the best one's rank.
    """
    runs, machines, rooms, masks, settings = loop.runs, loop.machines, loop.rooms, loop.masks, loop.settings
    best, best_rank, best_lost, seen = -1, np.int64(RANK_MAX), np.int64(LOST_MAX), 0
    if run.rank <= 0:
        return best
    row = FREED + 2 * (min(run.rank, ranks_of(rooms)) - 1)  # production does not preempt production
    rows = (
        np.int64(CAPACITY if run.band > PRODUCTION else row),
        np.int64(UNPROMISED if run.band == PRODUCTION else CAPACITY),
    )
    # by sums alone it is certain that a run fits where they tell ranks apart, and freed reservations add up
    adds_up = len(loop.foreseen.terms) == 0 and run.band <= PRODUCTION and run.rank < RANKS and run.per_machine <= 0
    anchors, foreseen = loop.anchors, loop.foreseen
    found, certain_ones, n_certain = np.empty(TOGETHER, np.int64), np.empty(_AT_ONCE, np.int64), 0
    n = len(machines)
    a, left = first_machine(loop), n
    while left > 0 and seen < settings.enough:
        b = min(n, a - a % TOGETHER + TOGETHER, a + left)
        for j in range(those_that_may_fit(rooms, masks, rows, run.mask, a, b, need, found)):
            m = found[j]
            certain = adds_up and must_fit(rooms, row, m, need)
            certain &= run.band < PRODUCTION or must_fit(rooms, UNPROMISED, m, need)
            if certain:
                if best < 0 or not costs_no_less(anchors[m], m, rooms, need, best_rank, best_lost, settings, now_us):
                    certain_ones[n_certain] = m
                    n_certain += 1
                    if n_certain == _AT_ONCE:
                        best, best_rank, best_lost = cheapest(
                            run, need, certain_ones, runs, machines, settings, now_us, best, best_rank, best_lost
                        )
                        n_certain = 0
                seen += 1
                if seen == settings.enough:
                    break
                continue
            machine = machines[m]
            if (
                machine.lowest >= run.rank
                or overruns_in_kernel(need[0], machine.capacity[0])
                or overruns_in_kernel(need[1], machine.capacity[1])
                or not could_fit(run, machine, 0, need[0])
                or not could_fit(run, machine, 1, need[1])
                or holds_its_most(run, machine, runs)
            ):
                continue
            best, best_rank, best_lost = cheapest(
                run, need, certain_ones[:n_certain], runs, machines, settings, now_us, best, best_rank, best_lost
            )
            n_certain = 0
            rank, lost_us = preemption_cost(run, machine, runs, need, settings, now_us, m, foreseen)
            if rank >= 0 and (rank < best_rank or (rank == best_rank and lost_us < best_lost)):
                best, best_rank, best_lost = m, rank, lost_us
            seen += rank >= 0
            if seen == settings.enough:
                break
        left -= b - a
        a = b if b < n else 0
    of_all: tuple[int, int, int] = cheapest(
        run, need, certain_ones[:n_certain], runs, machines, settings, now_us, best, best_rank, best_lost
    )
    return of_all[0]


@numba.njit(**COMPILED)
def cheapest(
    run: Any, need: Any, among: Any, runs: Any, machines: Any, settings: Any, now_us: int,
    best: int, best_rank: int, best_lost: int,
) -> Any:  # fmt: skip
    """Return the cheapest of the best machine so far and some that are certain to make room, its rank and lost time.

    As ``preemption_cost`` of one after the other. Their runs are read in turn, one of each machine: the records of one
    are not waited for before those of the next are asked for.
    """
    n = len(among)
    at, ranks, lost_us = np.empty(n, np.int64), np.full(n, -1), np.zeros(n, np.int64)
    freed = np.zeros((n, 2))
    for k in range(n):
        at[k] = machines[among[k]].head
    left = n > 0
    while left:
        left = False
        for k in range(n):
            if at[k] < 0:
                continue
            gone, machine = runs[at[k]], machines[among[k]]
            at[k] = gone.next
            if gone.rank >= run.rank:
                at[k] = -1
                continue
            left = True
            if not is_preemptible(gone, run):
                continue
            for r in range(2):
                freed[k, r] += gone.reservation[r]
            if not gone.service:
                lost_us[k] += _lost_us(gone.offset_us + now_us - gone.placed_us, settings)
            if fits(run, machine, 0, need[0], freed[k, 0], 0.0) and fits(run, machine, 1, need[1], freed[k, 1], 0.0):
                ranks[k] = gone.rank
                at[k] = -1
            elif gone.rank > best_rank or (gone.rank == best_rank and lost_us[k] >= best_lost):
                at[k] = -1
    for k in range(n):
        if ranks[k] >= 0 and (ranks[k] < best_rank or (ranks[k] == best_rank and lost_us[k] < best_lost)):
            best, best_rank, best_lost = among[k], ranks[k], lost_us[k]
    return best, best_rank, best_lost


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
def order_of(keys: Any) -> Any:
    """Return the order that sorts keys, int64; equal ones keep theirs. A radix sort of the bits in which any differ."""
    order, other = np.arange(len(keys)), np.empty(len(keys), np.int64)
    if not len(keys):
        return order
    least, largest = keys.min(), keys.max()
    count = np.empty((1 << _RADIX_BITS) + 1, np.int64)
    for shift in range(0, 64, _RADIX_BITS):
        if np.uint64(largest - least) >> np.uint64(shift) == 0:
            break
        count[:] = 0
        for k in range(len(keys)):
            count[1 + (((keys[k] - least) >> shift) & ((1 << _RADIX_BITS) - 1))] += 1
        if count.max() == len(keys):
            continue
        for k in range(1 << _RADIX_BITS):
            count[k + 1] += count[k]
        for i in order:
            digit = ((keys[i] - least) >> shift) & ((1 << _RADIX_BITS) - 1)
            other[count[digit]] = i
            count[digit] += 1
        order, other = other, order
    return order


@numba.njit(**COMPILED)
def in_turn(waiting: Any, served: Any) -> Any:
    """Return the order in which entries are tried: by rank, then in rounds of one entry of each user.

    Within a round the users come first that were never served, by number, then those that were served longest ago.
    """
    n, users = len(waiting), len(served) - 1
    turns = np.empty(n, np.int64)
    for k in range(n):
        turns[k] = waiting[k].turn
    by_time = order_of(turns)
    if users == 1:
        return by_time
    place, before, of_rank = np.empty(users, np.int64), np.zeros(users, np.int64), np.full(users, -1, np.int64)
    place[order_of(served[1:])] = np.arange(users)  # never served comes first, by number
    for k in range(n):
        i = by_time[k]
        user, rank = waiting[i].user, waiting[i].rank
        if of_rank[user] != rank:
            before[user], of_rank[user] = 0, rank
        turns[k] = (-np.int64(rank) << 48) + (before[user] << 24) + place[user]  # up to 16 million of each
        before[user] += 1
    return by_time[order_of(turns)]


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
    lowest, cpu, memory = np.float32(math.inf), np.float32(-math.inf), np.float32(-math.inf)
    lowest_of, free_cpu, free_memory = loop.rooms[LOWEST], loop.rooms[FREE], loop.rooms[FREE + 1]
    for m in range(len(lowest_of)):
        lowest = min(lowest, lowest_of[m])
        cpu, memory = max(cpu, free_cpu[m]), max(memory, free_memory[m])
    most[0], most[1] = cpu, memory
    return lowest
