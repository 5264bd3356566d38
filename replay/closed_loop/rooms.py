"""Room on machines: the current room for a run, and bounds that exclude most machines from a search; compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba import types

from reclaim.data.core import vectors
from reclaim.data.core.jit import LENT
from reclaim.data.core.vectors import LANES, in_llvm
from reclaim.replay.closed_loop.records import (
    CAPACITY,
    FREE,
    FREED,
    LOWEST,
    NON_PRODUCTION,
    PRODUCTION,
    RANKS,
    UNPROMISED,
)
from reclaim.training.margins.violation import SUM_ROUNDING, room_in_kernel

_BOOLS: Final = ir.VectorType(ir.IntType(8), LANES)
NO_ANCHOR: Final = -(2**62)
"""Value for a machine whose first run loses no work when it is stopped, or cannot be preempted."""
SLACK: Final = 1e-6
"""Share of its capacity by which a machine's room is overstated: more than the rounding of single precision."""


@numba.njit(**LENT)
def fits(run: Any, machine: Any, r: int, need: float, freed: float, freed_production: float) -> Any:
    """Say whether resource ``r`` suffices once parts of the reservations and of production's limits are freed.

    All reservations together fit the machine, and so do the limits of production alone, which therefore never relies on
    reclaimed resources (EuroSys'15, section 5.5).
    """
    room = room_in_kernel(machine.capacity[r])
    if run.band > NON_PRODUCTION and machine.production[r] - freed_production + need > room:
        return False
    return machine.reserved[r] - freed + need <= room


@numba.njit(**LENT)
def has_room(run: Any, machine: Any, need: Any) -> Any:
    """Say whether both resources suffice as the machine is."""
    return fits(run, machine, 0, need[0], 0.0, 0.0) and fits(run, machine, 1, need[1], 0.0, 0.0)


@numba.njit(**LENT)
def could_fit(run: Any, machine: Any, r: int, need: float) -> Any:
    """Say whether resource ``r`` might suffice without all that a run may preempt; by sums alone, errs towards yes.

    Ranks above ``RANKS``, and what monitoring may preempt, are overstated. So is what can be freed on machines that
    reserve for all runs together, where the other runs reserve at least their part of ``least``.
    """
    freed, production = machine.capacity[r] * SUM_ROUNDING, 0.0  # sums in another order
    if run.band > PRODUCTION:
        production = freed + machine.production[r]
        freed += machine.reserved[r]
    else:
        freed += machine.reserved[r] - machine.least[r] + machine.up_to_rank[min(run.rank, RANKS) - 1, r]
    return fits(run, machine, r, need, freed, production)


@numba.njit(**LENT)
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


@numba.njit(**LENT)
def ranks_of(rooms: Any) -> int:
    """Return the number of ranks that rooms distinguish: those of non-production, up to ``RANKS``."""
    ranks: int = (len(rooms) - FREED) // 2
    return ranks


@numba.njit(**LENT)
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
        room = machine.capacity[r] * (1 + SLACK) if there else -math.inf
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


@numba.njit(**LENT)
def update_all_rooms(loop: Any) -> None:
    """Update ``loop.rooms`` of every machine."""
    for m in range(len(loop.machines)):
        update_room(m, loop)


@numba.njit(**LENT)
def may_fit(rooms: Any, row: int, m: int, need: Any) -> Any:
    """Say whether a machine may have room, by two neighbouring rows; errs by saying yes."""
    return rooms[row, m] >= np.float32(need[0]) and rooms[row + 1, m] >= np.float32(need[1])


@numba.njit(**LENT)
def must_fit(rooms: Any, row: int, m: int, need: Any) -> Any:
    """Say whether a machine certainly has room, by two neighbouring rows; errs by saying no."""
    for r in range(2):
        if not rooms[row + r, m] - np.float32(4 * SLACK) * rooms[CAPACITY + r, m] >= np.float32(need[r]):
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


@numba.njit(**LENT)
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


@numba.njit(**LENT)
def largest_room(loop: Any, most: Any) -> Any:
    """Write the most that any machine has left of each resource into ``most``; return the lowest rank running on any.

    A run of no higher a rank that needs more can neither be placed nor make room for itself.
    """
    lowest, cpu, memory = np.float32(math.inf), np.float32(-math.inf), np.float32(-math.inf)
    lowest_of, free_cpu, free_memory = loop.rooms[LOWEST], loop.rooms[FREE], loop.rooms[FREE + 1]
    for m in range(len(lowest_of)):
        lowest = min(lowest, lowest_of[m])
        cpu, memory = max(cpu, free_cpu[m]), max(memory, free_memory[m])
    most[0], most[1] = cpu, memory
    return lowest


@numba.njit(**LENT)
def first_machine(loop: Any) -> Any:
    """Return the machine with which a search begins."""
    return np.int64(loop.random[0] % np.uint64(len(loop.machines)))
