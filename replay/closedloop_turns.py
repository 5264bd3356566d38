"""How runs come to a machine, wait for one, and leave it: ended, stopped, or killed for want of memory; compiled."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from reclaim.replay.closedloop_state import (
    BLOCKED,
    COMPILED,
    DONE,
    MACHINE,
    NO_REASON,
    OWN_LIMIT,
    PENDING,
    RUNNING,
)
from reclaim.replay.closedloop_sums import count_in
from reclaim.replay.constants import ROUNDING, SUM_ROUNDING
from reclaim.replay.placement import before, dies_first, note


@numba.njit(**COMPILED)
def leave(i: int, board: Any, now_us: int) -> None:
    """Take a run off its machine."""
    runs = board.runs
    run = runs[i]
    machine = board.machines[run.machine]
    if run.previous >= 0:
        runs[run.previous].next = run.next
    else:
        machine.head = run.next
    if run.next >= 0:
        runs[run.next].previous = run.previous
    count_in(machine, run, -1.0, now_us)
    note(run.machine, board)
    run.ran_us += now_us - run.placed_us
    run.machine = -1


@numba.njit(**COMPILED)
def chain(i: int, machine: Any, runs: Any) -> None:
    """Put a run among those of a machine, where its turn is to be preempted."""
    run = runs[i]
    run.previous, run.next = -1, machine.head
    while run.next >= 0 and before(runs, run.next, i):
        run.previous, run.next = run.next, runs[run.next].next
    if run.next >= 0:
        runs[run.next].previous = i
    if run.previous >= 0:
        runs[run.previous].next = i
    else:
        machine.head = i


@numba.njit(**COMPILED)
def wait(i: int, runs: Any, pending: Any, now_us: int, not_before_us: int) -> None:
    """Let a run wait for a machine from now on, and be tried from a time on."""
    run = runs[i]
    run.state = PENDING
    run.waiting_us = now_us
    pending[0].run += 1
    entry = pending[pending[0].run]
    entry.turn = now_us - (np.int64(run.rank) << 44)  # by priority, then by time: 2^44 µs are half a year
    entry.until_us = run.arrival_us + run.duration_us if run.service else np.int64(2**62)
    entry.not_before_us, entry.collection, entry.per_machine = not_before_us, run.collection, run.per_machine
    entry.run, entry.mask, entry.rank, entry.band, entry.reason = i, run.mask, run.rank, run.band, run.reason
    entry.special = run.carried or run.varies
    for r in range(2):
        entry.asked[r] = run.asked[r]


@numba.njit(**COMPILED)
def stop(i: int, cause: int, board: Any, now_us: int) -> None:
    """Stop a run before its end: batch work goes back to its last checkpoint, a service goes on where the clock is."""
    run, how, kills = board.runs[i], board.how, board.kills
    entry = kills[kills[0].run]
    kills[0].run += 1
    entry.at_us, entry.run, entry.machine, entry.cause, entry.lost_us = now_us, i, run.machine, cause, 0
    leave(i, board, now_us)
    if not run.service:
        done_us = run.offset_us + now_us - run.placed_us
        run.offset_us = done_us - done_us % how.checkpoint_us if how.checkpoint_us > 0 else 0
        entry.lost_us = done_us - run.offset_us
        run.cursor = run.first
    run.lost_us += entry.lost_us
    run.carried = False
    run.reason = NO_REASON
    run.kills[cause] += 1
    board.tick.kills[cause] += 1
    wait(i, board.runs, board.pending, now_us, now_us + 1)  # what was stopped is not tried again in the same slot


@numba.njit(**COMPILED)
def finish(i: int, board: Any, now_us: int) -> Any:
    """End a run, placed or not, and return the task's next one if it has waited for this end, else -1."""
    runs = board.runs
    run = runs[i]
    if run.state == RUNNING:
        leave(i, board, now_us)
    run.state = DONE
    run.ended_us = now_us
    board.tick.ended += 1
    return run.then if run.then >= 0 and runs[run.then].state == BLOCKED else -1


@numba.njit(**COMPILED)
def relieve(m: int, board: Any, now_us: int) -> None:
    """Stop runs until what the rest uses fits in memory: those above their own limit, then from the lowest priority up.

    Production comes last: never while anything else is left (EuroSys'15, sections 5.5 and 6.2).
    """
    runs, machine = board.runs, board.machines[m]
    if not machine.use[1] > machine.capacity[1] * (1 + SUM_ROUNDING):
        return
    board.tick.out_of_memory += 1
    while machine.head >= 0 and machine.use[1] > machine.capacity[1] * (1 + SUM_ROUNDING):
        found, cause = -1, MACHINE
        i = machine.head
        while i >= 0:
            run = runs[i]
            over = run.limit[1] > 0 and run.use[1] > run.limit[1] * (1 + ROUNDING)  # 0: not known
            if found < 0 or over > (cause == OWN_LIMIT):
                found, cause = i, OWN_LIMIT if over else MACHINE
            elif over == (cause == OWN_LIMIT) and dies_first(runs, i, found):
                found = i
            i = run.next
        stop(found, cause, board, now_us)
