"""Runs that wait for a machine: their order, why no machine takes them, and searches that must fail again; compiled."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from reclaim.data.core.jit import LENT
from reclaim.replay.closed_loop.records import (
    BOTH,
    CAPACITY,
    CONSTRAINTS,
    CPU,
    FREE,
    FREED,
    MAKING,
    MEMORY,
    NON_PRODUCTION,
    PRODUCTION,
    SPREAD,
    TOO_LARGE,
    UNPROMISED,
)
from reclaim.replay.closed_loop.rooms import may_fit, ranks_of

_RADIX_BITS: Final = 11
"""Bits of a sort's pass: its counts stay in the nearest cache."""


@numba.njit(**MAKING)
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


@numba.njit(**MAKING)
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


@numba.njit(**LENT)
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


@numba.njit(**LENT)
def _recount(rooms: Any, upper: bool, failure: Any, sign: int) -> None:
    """Count one machine as ``count_lacks`` does, by its first ``LOWEST`` rooms; ``sign`` -1 removes it."""
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


@numba.njit(**LENT)
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


@numba.njit(**LENT)
def failure_of(run: Any, need: Any, loop: Any) -> Any:
    """Return the place in ``loop.failures`` of searches for a run's request; the first one for any that is not kept.

    A failure is not kept where it depends on which runs a machine holds: its collection's, or all of them.
    """
    if run.per_machine > 0 or run.band > PRODUCTION:
        return 0
    parts = need.view(np.uint64)
    mixed = parts[0] * np.uint64(0x9E3779B97F4A7C15) + parts[1] * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed += np.uint64(run.mask * 64 + run.rank * 4 + run.band)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return 1 + np.int64((mixed >> np.uint64(33)) % np.uint64(len(loop.failures) - 1))


@numba.njit(**LENT)
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


@numba.njit(**LENT)
def needs_no_less(entry: Any, other: Any) -> Any:
    """Say whether an entry fits nowhere because another one, of no lower rank, does not.

    A failure of production says nothing of monitoring, which may preempt production.
    """
    return (
        other.mask == entry.mask and (other.band > NON_PRODUCTION) == (entry.band > NON_PRODUCTION)
        and other.band >= entry.band
        and other.first_limit[0] <= entry.first_limit[0] and other.first_limit[1] <= entry.first_limit[1]
        and (other.per_machine <= 0 or other.collection == entry.collection)
    )  # fmt: skip


@numba.njit(**LENT)
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
