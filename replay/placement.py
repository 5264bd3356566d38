"""Where a task goes: on which machines it fits, how those are scored, and what would have to make room."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numba
import numpy as np

from reclaim.replay.closedloop_state import (
    BOTH,
    COMPILED,
    CONSTRAINTS,
    CPU,
    MEMORY,
    NON_PRODUCTION,
    PRODUCTION,
    RANKS,
    SPREAD,
    TOO_LARGE,
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
def find(i: int, asked: Any, runs: Any, machines: Any, order: Any, masks: Any, how: Any, random: Any) -> int:
    """Return the best machine with room for a run, -1 for none; then its reason says why.

    Looks through the machines from a random one on until ``how.enough`` have room (EuroSys'15, 3.4, "relaxed
    randomization").
    """
    run = runs[i]
    n = len(order)
    random[0] ^= random[0] << np.uint64(13)
    random[0] ^= random[0] >> np.uint64(7)
    random[0] ^= random[0] << np.uint64(17)
    start = int(random[0] % np.uint64(n))
    best, best_score, seen = -1, math.inf, 0
    allowed, large, full = False, False, False
    lacking = np.zeros(3, np.int64)  # machines without CPU alone, memory alone, both
    for k in range(n):
        m = order[start + k - n if start + k >= n else start + k]
        machine = machines[m]
        if not (machine.up and machine.open and masks[run.mask, m]):
            continue
        allowed = True
        if asked[0] > machine.capacity[0] * (1 + SUM_ROUNDING) or asked[1] > machine.capacity[1] * (1 + SUM_ROUNDING):
            continue
        large = True
        cpu, memory = fits(run, machine, 0, asked[0], 0.0, 0.0), fits(run, machine, 1, asked[1], 0.0, 0.0)
        if not cpu or not memory:
            lacking[0 if memory else 1 if cpu else 2] += 1
        elif held_back(run, machine, runs):
            full = True
        else:
            left = 0.0
            apart = 0.0
            for r in range(2):
                taken = machine.reserved[r]
                if run.band > NON_PRODUCTION:
                    taken = max(taken, machine.production[r])
                free = (machine.capacity[r] - taken - asked[r]) / machine.capacity[r]
                left += free / 2
                apart += free if r == 0 else -free
            score = how.stranding * abs(apart) + how.leftover * left
            if score < best_score:
                best, best_score = m, score
            seen += 1
            if seen >= how.enough:
                break
    if best < 0:
        lack = (CPU, MEMORY, BOTH)[np.argmax(lacking)]
        run.reason = CONSTRAINTS if not allowed else TOO_LARGE if not large else SPREAD if full else lack
    return best


@numba.njit(**COMPILED)
def price(run: Any, machine: Any, runs: Any, asked: Any, how: Any, now_us: int) -> tuple[int, int]:
    """Return the highest victim's rank, and the task-time lost, so that a run fits; rank -1 where it cannot."""
    freed_cpu, freed_memory, production_cpu, production_memory = 0.0, 0.0, 0.0, 0.0
    last, lost_us = -1, 0
    while True:
        found = -1
        i = machine.head
        while i >= 0:
            other = runs[i]
            allowed = other.rank < run.rank and (other.band == NON_PRODUCTION or other.band < run.band)
            later = last < 0 or before(runs, last, i)
            if allowed and later and i != last and (found < 0 or before(runs, i, found)):
                found = i
            i = other.next
        if found < 0:
            return -1, 0
        gone = runs[found]
        freed_cpu += gone.reservation[0]
        freed_memory += gone.reservation[1]
        if gone.band > NON_PRODUCTION:
            production_cpu += gone.limit[0]
            production_memory += gone.limit[1]
        last = found
        if not gone.service:
            done_us = gone.offset_us + now_us - gone.placed_us
            lost_us += done_us % how.checkpoint_us if how.checkpoint_us > 0 else done_us
        if fits(run, machine, 0, asked[0], freed_cpu, production_cpu) and fits(
            run, machine, 1, asked[1], freed_memory, production_memory
        ):
            return gone.rank, lost_us


@numba.njit(**COMPILED)
def victim(machine: Any, runs: Any, band: int, rank: int) -> Any:
    """Return the run that one of a band and rank preempts first, -1 for none: the lowest, and of equals the newest.

    Production does not preempt production; everything may be preempted by what is higher otherwise.
    """
    found = -1
    i = machine.head
    while i >= 0:
        run = runs[i]
        allowed = run.rank < rank and (run.band == NON_PRODUCTION or run.band < band)
        if allowed and (found < 0 or before(runs, i, found)):
            found = i
        i = run.next
    return found


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
def most_room(machines: Any, most: Any) -> int:
    """Write the most that any machine has left of each resource, and return the lowest rank that runs on any.

    A run of no higher a rank that asks for more can neither be placed nor make room for itself.
    """
    most[0] = most[1] = -math.inf
    lowest = 2**31 - 1
    for m in range(len(machines)):
        machine = machines[m]
        if machine.up and machine.open:
            lowest = min(lowest, machine.lowest)
            for r in range(2):
                most[r] = max(most[r], machine.capacity[r] * (1 + SUM_ROUNDING) - machine.reserved[r])
    return lowest
