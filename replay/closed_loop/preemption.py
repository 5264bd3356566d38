"""Preempts runs: the order of victims, and the machine on which preemption costs least; compiled."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from reclaim.data.core.jit import LENT
from reclaim.replay.closed_loop.foreseen import add_terms, foresee
from reclaim.replay.closed_loop.records import CAPACITY, FREED, NON_PRODUCTION, PRODUCTION, RANKS, TOGETHER, UNPROMISED
from reclaim.replay.closed_loop.rooms import (
    NO_ANCHOR,
    could_fit,
    first_machine,
    fits,
    holds_its_most,
    may_fit,
    must_fit,
    ranks_of,
    those_that_may_fit,
)
from reclaim.training.margins.violation import overruns_in_kernel

RANK_MAX, LOST_MAX = 2**31 - 1, 2**62
"""Larger than every cost of preemption."""


@numba.njit(**LENT)
def is_preempted_before(runs: Any, i: int, j: int) -> Any:
    """Say whether run ``i`` is preempted before run ``j`` of the same machine."""
    a, b = runs[i], runs[j]
    if a.rank != b.rank:
        return a.rank < b.rank
    if a.placed_us != b.placed_us:
        return a.placed_us > b.placed_us
    return i > j


@numba.njit(**LENT)
def is_preemptible(other: Any, run: Any) -> Any:
    """Say whether ``run`` may preempt ``other``: a higher rank may, but production not production."""
    return other.rank < run.rank and (other.band == NON_PRODUCTION or other.band < run.band)


@numba.njit(**LENT)
def first_victim(run: Any, machine: Any, runs: Any) -> Any:
    """Return the run of a machine that ``run`` preempts first, -1 for none."""
    i = machine.head
    while i >= 0 and not is_preemptible(runs[i], run):
        i = runs[i].next
    return i


@numba.njit(**LENT)
def is_killed_before(runs: Any, i: int, j: int) -> Any:
    """Say whether run ``i`` is killed before run ``j`` when memory runs out; production comes last."""
    if runs[i].band != runs[j].band:
        return runs[i].band < runs[j].band
    return is_preempted_before(runs, i, j)


@numba.njit(**LENT)
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
    # sums alone decide that a run fits where they distinguish ranks and freed reservations add up
    adds_up = len(loop.foreseen.terms) == 0 and run.band <= PRODUCTION and run.rank < RANKS and run.per_machine <= 0
    anchors, foreseen = loop.anchors, loop.foreseen
    found, victims, n_certain = loop.found, loop.victims, 0
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
                    victims[n_certain].machine = m
                    n_certain += 1
                    if n_certain == len(victims):
                        best, best_rank, best_lost = cheapest(
                            run, need, victims, n_certain, runs, machines, settings, now_us, best, best_rank, best_lost
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
                run, need, victims, n_certain, runs, machines, settings, now_us, best, best_rank, best_lost
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
        run, need, victims, n_certain, runs, machines, settings, now_us, best, best_rank, best_lost
    )
    return of_all[0]


@numba.njit(**LENT)
def cheapest(
    run: Any, need: Any, victims: Any, n: int, runs: Any, machines: Any, settings: Any, now_us: int,
    best: int, best_rank: int, best_lost: int,
) -> Any:  # fmt: skip
    """Return the cheapest of the best machine so far and ``n`` that are certain to make room, its rank and lost time.

    Gives the result of ``preemption_cost`` for one after the other. Their runs are read in turn, one of each machine,
    so that reads from memory overlap.
    """
    for k in range(n):
        of = victims[k]
        of.at, of.rank, of.lost_us = machines[of.machine].head, -1, 0
        of.freed[0] = of.freed[1] = 0.0
    left = n > 0
    while left:
        left = False
        for k in range(n):
            of = victims[k]
            if of.at < 0:
                continue
            gone, machine = runs[of.at], machines[of.machine]
            of.at = gone.next
            if gone.rank >= run.rank:
                of.at = -1
                continue
            left = True
            if not is_preemptible(gone, run):
                continue
            for r in range(2):
                of.freed[r] += gone.reservation[r]
            if not gone.service:
                of.lost_us += _lost_us(gone.offset_us + now_us - gone.placed_us, settings)
            if fits(run, machine, 0, need[0], of.freed[0], 0.0) and fits(run, machine, 1, need[1], of.freed[1], 0.0):
                of.rank = gone.rank
                of.at = -1
            elif gone.rank > best_rank or (gone.rank == best_rank and of.lost_us >= best_lost):
                of.at = -1
    for k in range(n):
        of = victims[k]
        if of.rank >= 0 and (of.rank < best_rank or (of.rank == best_rank and of.lost_us < best_lost)):
            best, best_rank, best_lost = of.machine, of.rank, of.lost_us
    return best, best_rank, best_lost


@numba.njit(**LENT)
def preemption_cost(
    run: Any, machine: Any, runs: Any, need: Any, settings: Any, now_us: int, m: int, foreseen: Any
) -> tuple[int, int]:
    """Return the highest victim's rank, and the task-time lost in µs, for a run to fit; rank -1 where it cannot."""
    together = len(foreseen.terms) > 0
    used_cpu, used_memory = machine.use[0], machine.use[1]
    if together:
        for r in range(len(foreseen.spare)):  # one by one: copying arrays would count references
            for k in range(foreseen.spare.shape[1]):
                foreseen.spare[r, k] = foreseen.sums[m, r, k]
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


@numba.njit(**LENT)
def costs_no_less(
    anchor_us: int, m: int, rooms: Any, need: Any, rank: int, lost_us: int, settings: Any, now_us: int
) -> Any:
    """Say whether making room on a machine certainly costs no less, without reading its runs; errs by saying no.

    Its highest victim has a higher rank, or the same one, and the first victim alone loses as much work.
    """
    if not may_fit(rooms, FREED + 2 * rank, m, need):
        return True
    if anchor_us == NO_ANCHOR or (rank > 0 and may_fit(rooms, FREED + 2 * (rank - 1), m, need)):
        return False
    return _lost_us(now_us - anchor_us, settings) >= lost_us


@numba.njit(**LENT)
def _lost_us(done_us: int, settings: Any) -> Any:
    """Return the part of batch work done that is lost by a stop: since the last checkpoint."""
    return done_us % settings.checkpoint_us if settings.checkpoint_us > 0 else done_us
