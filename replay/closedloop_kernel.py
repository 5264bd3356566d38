"""The cell's mechanics, compiled: time passes, tasks come, are placed, preempted, killed, throttled, and end."""

from __future__ import annotations

import heapq
from typing import Any, Final

import numba
import numpy as np

from reclaim.replay.closedloop_state import (
    BLOCKED,
    COMPILED,
    DONE,
    FREED,
    MACHINE_GONE,
    NO_REASON,
    NON_PRODUCTION,
    PREEMPTED,
    PRODUCTION,
    RANKS,
    RUNNING,
    UNPROMISED,
)
from reclaim.replay.closedloop_sums import count_in, end_us, jump, read
from reclaim.replay.closedloop_turns import chain, finish, relieve, stop, wait
from reclaim.replay.constants import SUM_ROUNDING
from reclaim.replay.placement import (
    TOGETHER,
    asks_no_less,
    could_fit,
    find,
    first,
    fits,
    held_back,
    may,
    most_room,
    note,
    price,
    remember,
    some_may,
    victim,
    why,
)

_REMEMBERED: Final = 64
"""Failures that are remembered while those that wait are tried; more take longer to look through than they save."""
_END, _CHANGE, _ARRIVAL, _LAST = range(4)


@numba.njit(**COMPILED)
def _make_room(i: int, asked: Any, board: Any, now_us: int) -> int:
    """Preempt for a run on the machine where that costs least, and return it; -1 where it helps nowhere.

    Least is the lowest rank of the highest victim, then the least work lost, among the first ``how.enough`` machines
    that can make room. Victims go from the lowest rank up, until the run fits.
    """
    runs, machines, how = board.runs, board.machines, board.how
    run = runs[i]
    best, best_rank, best_lost, seen = -1, 2**31 - 1, 2**62, 0
    if run.rank <= 0:
        return best
    n = len(machines)
    start = first(board)
    row = FREED + 2 * (min(run.rank, RANKS) - 1)  # production cannot be freed of production
    k = 0
    while k < n and seen < how.enough:
        m = start + k - n if start + k >= n else start + k
        if run.band <= PRODUCTION and (k == 0 or m % TOGETHER == 0):
            until = min(n, m - m % TOGETHER + TOGETHER)
            if not some_may(board.rooms, row, m, until, asked) or (
                run.band == PRODUCTION and not some_may(board.rooms, UNPROMISED, m, until, asked)
            ):
                k += until - m
                continue
        k += 1
        if run.band <= PRODUCTION and not may(board.rooms, row, m, asked):
            continue
        machine = machines[m]
        if not (machine.up and machine.open and board.masks[run.mask, m]) or machine.lowest >= run.rank:
            continue
        if asked[0] > machine.capacity[0] * (1 + SUM_ROUNDING) or asked[1] > machine.capacity[1] * (1 + SUM_ROUNDING):
            continue
        if not (could_fit(run, machine, 0, asked[0]) and could_fit(run, machine, 1, asked[1])):
            continue
        if held_back(run, machine, runs):
            continue
        rank, lost_us = price(run, machine, runs, asked, how, now_us)
        if rank >= 0 and (rank < best_rank or (rank == best_rank and lost_us < best_lost)):
            best, best_rank, best_lost = m, rank, lost_us
        seen += rank >= 0
    if best >= 0:
        machine = machines[best]
        while not (fits(run, machine, 0, asked[0], 0.0, 0.0) and fits(run, machine, 1, asked[1], 0.0, 0.0)):
            gone = victim(run, machine, runs)
            if gone < 0:  # sums of many tasks, rounded: it was a hair's breadth
                return -1
            stop(gone, PREEMPTED, board, now_us)
    return best


@numba.njit(**COMPILED)
def _place(i: int, board: Any, now_us: int) -> Any:
    """Place a waiting run if that can be done; by limit, or, where it was running before all began, by reservation."""
    runs, tape = board.runs, board.tape
    run = runs[i]
    row = run.cursor
    if run.service or run.offset_us > 0:
        at_us = now_us - run.arrival_us if run.service else run.offset_us
        while row + 1 < run.stop and tape[row + 1].from_us <= at_us:
            row += 1
    asked = np.empty(2)
    for r in range(2):
        run.reservation[r] = board.held[row, r] if run.carried else tape[row].limit[r]
        asked[r] = tape[row].limit[r] if run.band > NON_PRODUCTION else run.reservation[r]
    m = find(run, asked, board)
    if m < 0:
        m = _make_room(i, asked, board, now_us)
    if m < 0:
        run.reason = why(run, asked, board)
        return False
    machine = board.machines[m]
    run.state, run.machine, run.placed_us, run.reason = RUNNING, m, now_us, NO_REASON
    run.waited_us += now_us - run.waiting_us
    if run.first_placed_us < 0:
        run.first_placed_us = now_us
    chain(i, machine, runs)
    read(run, tape, now_us)
    jump(run)
    count_in(machine, run, 1.0, now_us)
    machine.lowest = min(machine.lowest, run.rank)
    note(m, board)
    relieve(m, board, now_us)
    return True


@numba.njit(**COMPILED)
def advance(board: Any, live: bool, now_us: int) -> None:
    """Let every placed run go to the window of now, and take the reservation then in force from the tape.

    A run that was placed less than ``how.startup_us`` ago holds its limit.
    """
    runs, machines, held = board.runs, board.machines, board.held
    for m in range(len(machines)):
        i = machines[m].head
        while i >= 0:
            run = runs[i]
            read(run, board.tape, now_us)
            if not live:
                young = not run.carried and now_us - run.placed_us < board.how.startup_us
                for r in range(2):
                    run.reservation[r] = run.limit[r] if young else min(held[run.cursor, r], run.limit[r])
            i = run.next


@numba.njit(**COMPILED)
def settle(board: Any, slot_s: float, now_us: int) -> None:
    """Sum all machines up anew, relieve those out of memory, throttle those out of CPU, write down what is seen."""
    runs, machines, tick = board.runs, board.machines, board.tick
    for m in range(len(machines)):
        machine = machines[m]
        if not machine.up:
            continue
        for r in range(2):
            machine.use[r] = machine.limit[r] = machine.reserved[r] = machine.production[r] = 0.0
            for k in range(RANKS):
                machine.up_to_rank[k, r] = 0.0
        machine.lowest = 2**31 - 1
        busy_us, changed_us, count = machine.busy_us, machine.changed_us, machine.count
        i = machine.head
        while i >= 0:
            jump(runs[i])
            count_in(machine, runs[i], 1.0, now_us)
            machine.lowest = min(machine.lowest, runs[i].rank)
            i = runs[i].next
        machine.busy_us, machine.changed_us, machine.count = busy_us, changed_us, count
        note(m, board)
        relieve(m, board, now_us)
        batch, latency = 0.0, 0.0
        i = machine.head
        while i >= 0:
            if runs[i].latency:
                latency += runs[i].use[0]
            else:
                batch += runs[i].use[0]
            i = runs[i].next
        over = max(0.0, machine.use[0] - machine.capacity[0])
        first = min(over, batch)
        tick.throttled_s[0] += first * slot_s
        tick.throttled_s[1] += (over - first) * slot_s
        tick.cpu_s[0] += batch * slot_s
        tick.cpu_s[1] += latency * slot_s
        tick.running += machine.count
        for r in range(2):
            tick.use[r] += min(machine.use[r], machine.capacity[r])
            tick.reserved[r] += machine.reserved[r]
            tick.limit[r] += machine.limit[r]
            tick.capacity[r] += machine.capacity[r]
            tick.in_reclaimed[r] += max(0.0, machine.limit[r] - machine.capacity[r])


@numba.njit(**COMPILED)
def schedule(board: Any, now_us: int) -> None:
    """Try every waiting run, from the highest priority down, of equals the one that waits longest first.

    One that asks for no less than one that just failed, under its constraints and at no higher a rank, is not tried.
    """
    runs, pending, tick = board.runs, board.pending, board.tick
    n = pending[0].run
    waiting = pending[1 : n + 1].copy()
    pending[0].run = 0
    turns = np.empty(n, np.int64)
    for k in range(n):
        turns[k] = waiting[k].turn
    turn = np.argsort(turns, kind="mergesort")
    failed = np.empty(_REMEMBERED, np.int64)
    n_failed = 0
    most = np.empty(2)
    lowest = most_room(board, most)
    stopped = tick.kills.sum()
    for k in range(n):
        entry = waiting[turn[k]]
        if now_us >= entry.until_us:  # a service whose time has passed while it waited
            run = runs[entry.run]
            ended_us = max(run.arrival_us + run.duration_us, run.waiting_us)
            run.waited_us += ended_us - run.waiting_us
            following = finish(entry.run, board, ended_us)
            if following >= 0:
                runs[following].ready_us = now_us
                wait(following, runs, pending, now_us, now_us)
            continue
        if tick.kills.sum() != stopped:  # room was made
            stopped = tick.kills.sum()
            lowest = most_room(board, most)
        hopeless = entry.not_before_us > now_us
        if not hopeless and not entry.special and entry.rank <= lowest:
            hopeless = entry.asked[0] > most[0] or entry.asked[1] > most[1]
            if hopeless and entry.reason == NO_REASON:
                entry.reason = why(runs[entry.run], entry.asked, board)
        for f in range(0 if entry.special or hopeless else n_failed):
            if asks_no_less(entry, waiting[failed[f]]):
                hopeless = True
                entry.reason = waiting[failed[f]].reason
                break
        if not hopeless:
            if _place(entry.run, board, now_us):
                continue
            entry.reason = runs[entry.run].reason
            if not entry.special:
                n_failed = remember(turn[k], waiting, failed, n_failed)
        pending[0].run += 1
        pending[pending[0].run] = entry
    for k in range(1, pending[0].run + 1):
        tick.pending[pending[k].band] += 1
        tick.reasons[pending[k].reason] += 1


@numba.njit(**COMPILED)
def pass_slot(board: Any, changes: Any, at: Any, now_us: int, until_us: int) -> None:
    """Take what happens within a slot in the order of its times: ends, then changes of machines, then arrivals.

    An end at the very moment at which the next slot begins is one of this slot's.

    ``at`` holds how many arrivals and changes have been taken; runs are in the order of their arrivals.
    """
    runs, machines = board.runs, board.machines
    events = [(np.int64(until_us), np.int64(_LAST), np.int64(-1))]
    for m in range(len(machines)):
        i = machines[m].head
        while i >= 0:
            if end_us(runs[i]) <= until_us:
                events.append((np.int64(max(end_us(runs[i]), now_us)), np.int64(_END), np.int64(i)))
            i = runs[i].next
    while at[0] < len(runs) and runs[at[0]].arrival_us < until_us:
        events.append((np.int64(max(runs[at[0]].arrival_us, now_us)), np.int64(_ARRIVAL), np.int64(at[0])))
        at[0] += 1
    while at[1] < len(changes) and changes[at[1]].at_us < until_us:
        events.append((np.int64(max(changes[at[1]].at_us, now_us)), np.int64(_CHANGE), np.int64(at[1])))
        at[1] += 1
    heapq.heapify(events)
    while True:
        time_us, kind, i = heapq.heappop(events)
        if i < 0:
            return
        if kind == _END:
            if runs[i].state == RUNNING and max(end_us(runs[i]), now_us) == time_us:
                following = finish(i, board, time_us)
                if following >= 0:
                    heapq.heappush(events, (time_us, np.int64(_ARRIVAL), np.int64(following)))
        elif kind == _CHANGE:
            _change(changes[i], board, time_us)
        else:
            run = runs[i]
            if run.after >= 0 and runs[run.after].state != DONE:
                run.state = BLOCKED
                continue
            run.waiting_us = run.ready_us = time_us
            if run.service and end_us(run) <= time_us:  # its time has passed while the one before it went on
                following = finish(i, board, time_us)
                if following >= 0:
                    heapq.heappush(events, (time_us, np.int64(_ARRIVAL), np.int64(following)))
            elif not _place(i, board, time_us):
                wait(i, runs, board.pending, time_us, time_us)
            elif run.state == RUNNING and end_us(run) <= until_us:
                heapq.heappush(events, (end_us(run), np.int64(_END), np.int64(i)))


@numba.njit(**COMPILED)
def _change(change: Any, board: Any, now_us: int) -> None:
    """Give a machine another capacity, or take it out of service with all that runs there."""
    machine = board.machines[change.machine]
    machine.up, machine.open = change.up, change.open
    for r in range(2):
        machine.capacity[r] = change.capacity[r]
    if not change.up:
        while machine.head >= 0:
            stop(machine.head, MACHINE_GONE, board, now_us)
    note(change.machine, board)
    relieve(change.machine, board, now_us)
