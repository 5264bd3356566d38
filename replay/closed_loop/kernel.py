"""Compiled mechanics of the cell: time passes, runs arrive, are placed, preempted, killed, throttled, and end.

A run is named by its row ``i`` of ``loop.runs``, a machine by its row ``m`` of ``loop.machines``.
"""

from __future__ import annotations

import heapq
from typing import Any, Final

import numba
import numpy as np

from reclaim.data.core.jit import LENT
from reclaim.replay.closed_loop.foreseen import add_terms, adds_at_least, count_run, foresee
from reclaim.replay.closed_loop.placement import draw, find_machine
from reclaim.replay.closed_loop.preemption import find_preemption, first_victim, is_killed_before, is_preempted_before
from reclaim.replay.closed_loop.records import (
    BLOCKED,
    DONE,
    IN_TURN,
    MACHINE,
    MACHINE_GONE,
    MAKING,
    NO_REASON,
    NON_PRODUCTION,
    OWN_LIMIT,
    PENDING,
    PREEMPTED,
    RANKS,
    RUNNING,
)
from reclaim.replay.closed_loop.rooms import has_room, largest_room, update_room
from reclaim.replay.closed_loop.waiting import (
    count_lacks,
    fails_again,
    failure_of,
    in_turn,
    needs_no_less,
    remember_failure,
    waiting_reason,
)
from reclaim.training.margins.margin import guard
from reclaim.training.margins.violation import overruns_in_kernel, violates_in_kernel

_REMEMBERED: Final = 64
"""Number of failed runs remembered while others are tried; comparing with more costs more than it saves."""
_END, _CHANGE, _ARRIVAL, _LAST = range(4)


@numba.njit(**LENT)
def _leave(i: int, loop: Any, now_us: int) -> None:
    """Take a run off its machine."""
    runs = loop.runs
    run = runs[i]
    machine = loop.machines[run.machine]
    if run.previous >= 0:
        runs[run.previous].next = run.next
    else:
        machine.head = run.next
    if run.next >= 0:
        runs[run.next].previous = run.previous
    together = len(loop.foreseen.terms) > 0
    _add_to_sums(machine, run, loop.foreseen, together, -1.0, now_us)
    if together:
        count_run(np.int64(run.machine), machine, run, loop.foreseen, -1.0)
    update_room(np.int64(run.machine), loop)
    run.ran_us += now_us - run.placed_us
    run.machine = -1


@numba.njit(**LENT)
def _chain(i: int, machine: Any, runs: Any) -> None:
    """Insert a run into its machine's chain, which is in the order of preemption."""
    run = runs[i]
    run.previous, run.next = -1, machine.head
    while run.next >= 0 and is_preempted_before(runs, run.next, i):
        run.previous, run.next = run.next, runs[run.next].next
    if run.next >= 0:
        runs[run.next].previous = i
    if run.previous >= 0:
        runs[run.previous].next = i
    else:
        machine.head = i


@numba.njit(**LENT)
def _wait(i: int, runs: Any, pending: Any, now_us: int, not_before_us: int) -> None:
    """Add a run to those that wait; it is tried from ``not_before_us`` on."""
    run = runs[i]
    run.state = PENDING
    run.waiting_us = now_us
    pending[0].run += 1
    entry = pending[pending[0].run]
    entry.turn = now_us - (np.int64(run.rank) << 44)  # by priority, then time; 2^44 µs are half a year
    entry.until_us = run.arrival_us + run.duration_us if run.service else np.int64(2**62)
    entry.not_before_us, entry.collection, entry.per_machine = not_before_us, run.collection, run.per_machine
    entry.run, entry.mask, entry.rank, entry.band, entry.reason = i, run.mask, run.rank, run.band, run.reason
    entry.user = run.user
    entry.special = run.carried or run.varies
    for r in range(2):
        entry.first_limit[r] = run.first_limit[r]


@numba.njit(**LENT)
def _stop(i: int, cause: int, loop: Any, now_us: int) -> None:
    """Stop a run before its end. Batch work goes back to its last checkpoint; a service continues at the clock."""
    run, settings, kills = loop.runs[i], loop.settings, loop.kills
    entry = kills[kills[0].run]
    kills[0].run += 1
    entry.at_us, entry.run, entry.machine, entry.cause, entry.lost_us = now_us, i, run.machine, cause, 0
    _leave(i, loop, now_us)
    if not run.service:
        done_us = run.offset_us + now_us - run.placed_us
        run.offset_us = done_us - done_us % settings.checkpoint_us if settings.checkpoint_us > 0 else 0
        entry.lost_us = done_us - run.offset_us
        run.cursor = run.first
    run.lost_us += entry.lost_us
    run.carried = False
    run.kills[cause] += 1
    loop.tick.kills[cause] += 1
    _wait(i, loop.runs, loop.pending, now_us, now_us + 1)  # not in the same slot


@numba.njit(**LENT)
def _finish(i: int, loop: Any, now_us: int) -> Any:
    """End a run, placed or not; return the task's next run if it was blocked by this one, else -1."""
    runs = loop.runs
    run = runs[i]
    if run.state == RUNNING:
        _leave(i, loop, now_us)
    elif run.state == PENDING:
        run.waited_us += now_us - run.waiting_us
    run.state = DONE
    run.ended_us = now_us
    loop.left[run.collection] -= 1
    loop.tick.ended += 1
    return run.then if run.then >= 0 and runs[run.then].state == BLOCKED else -1


@numba.njit(**LENT)
def _must_wait(run: Any, loop: Any) -> bool:
    """Say whether a collection that must end before the run's own has not; a run that ran before is not held."""
    if not run.carried:
        for k in range(loop.before_of[run.collection], loop.before_of[run.collection + 1]):
            if loop.left[loop.before[k]] > 0:
                return True
    return False


@numba.njit(**LENT)
def _hold(i: int, loop: Any) -> bool:
    """Hold back a run that must wait for another collection; say whether it must."""
    if not _must_wait(loop.runs[i], loop):
        return False
    loop.runs[i].state = BLOCKED
    loop.held[0] += 1
    loop.held[loop.held[0]] = i
    return True


@numba.njit(**LENT)
def _release(loop: Any, now_us: int) -> None:
    """Queue the runs whose collections no longer have to wait for another."""
    held, kept = loop.held, 0
    for k in range(1, held[0] + 1):
        run = loop.runs[held[k]]
        if _must_wait(run, loop):
            kept += 1
            held[kept] = held[k]
        else:
            run.ready_us = now_us
            _wait(held[k], loop.runs, loop.pending, now_us, now_us)
    held[0] = kept


@numba.njit(**LENT)
def _relieve_memory(m: int, loop: Any, now_us: int) -> None:
    """Stop runs on a machine out of memory until it can meet the reservations of the rest.

    Runs above their own limit are stopped first, then from the lowest priority up (EuroSys'15, sections 5.5 and 6.2).
    Production is stopped last, and only while usage itself does not fit.
    """
    runs, machine = loop.runs, loop.machines[m]
    if not overruns_in_kernel(machine.use[1], machine.capacity[1]):
        return
    loop.tick.out_of_memory += 1
    while overruns_in_kernel(machine.reserved[1], machine.capacity[1]):
        full = overruns_in_kernel(machine.use[1], machine.capacity[1])
        found, cause = -1, MACHINE
        i = machine.head
        while i >= 0:
            run = runs[i]
            if full or run.band == NON_PRODUCTION:
                over = run.limit[1] > 0 and violates_in_kernel(run.use[1], run.limit[1])  # 0 is unknown
                if found < 0 or over > (cause == OWN_LIMIT):
                    found, cause = i, OWN_LIMIT if over else MACHINE
                elif over == (cause == OWN_LIMIT) and is_killed_before(runs, i, found):
                    found = i
            i = run.next
        if found < 0:
            return
        _stop(found, cause, loop, now_us)


@numba.njit(**LENT)
def _give_way(m: int, loop: Any, now_us: int) -> None:
    """Preempt non-production, from the lowest priority up, while more memory is reserved than the machine has."""
    runs, machine = loop.runs, loop.machines[m]
    while overruns_in_kernel(machine.reserved[1], machine.capacity[1]):
        i = machine.head
        while i >= 0 and runs[i].band != NON_PRODUCTION:
            i = runs[i].next
        if i < 0:
            return
        _stop(np.int64(i), np.int64(PREEMPTED), loop, now_us)


@numba.njit(**LENT)
def _end_us(run: Any) -> Any:
    """Return when a placed run ends if nothing stops it; a service ends by the clock."""
    if run.service:
        return run.arrival_us + run.duration_us
    return run.placed_us + run.duration_us - run.offset_us


@numba.njit(**LENT)
def _goes_on(run: Any) -> Any:
    """Say whether a run ends at ``_end_us``: one that is placed, or a service that waits."""
    return run.state == RUNNING or (run.service and run.state == PENDING)


@numba.njit(**LENT)
def _note_end(i: int, runs: Any, due: Any, until_us: int) -> None:
    """Note a placed run that ends by ``until_us`` if nothing stops it, or a service that waits until then."""
    if _end_us(runs[i]) <= until_us:
        due[0] += 1
        due[due[0]] = i


@numba.njit(**LENT)
def _play(run: Any, tape: Any, now_us: int) -> None:
    """Move a placed run to its window of now, and take usage and limit from there."""
    at_us = now_us - run.arrival_us if run.service else run.offset_us + now_us - run.placed_us
    cursor = run.cursor
    while cursor + 1 < run.stop and tape[cursor + 1].from_us <= at_us:
        cursor += 1
    run.cursor = cursor
    for r in range(2):
        run.use[r] = tape[cursor].use[r]
        run.limit[r] = tape[cursor].limit[r]


@numba.njit(**LENT)
def _raise_to_usage(run: Any) -> None:
    """Raise the reservation to the usage, as Borg does at once (EuroSys'15, section 5.5).

    CPU is capped at the limit, as it can be throttled; memory is not.
    """
    run.reservation[0] = max(run.reservation[0], min(run.use[0], run.limit[0]))
    run.reservation[1] = max(run.reservation[1], run.use[1])


@numba.njit(**LENT)
def _add_to_sums(machine: Any, run: Any, foreseen: Any, together: bool, sign: float, now_us: int) -> None:
    """Add a run to its machine's sums; ``sign`` -1 removes it."""
    for r in range(2):
        machine.use[r] += sign * run.use[r]
        machine.limit[r] += sign * run.limit[r]
        machine.reserved[r] += sign * run.reservation[r]
        least = adds_at_least(r, run, foreseen) if together else run.reservation[r]
        machine.least[r] += sign * least
        if run.band > NON_PRODUCTION:
            machine.production[r] += sign * run.limit[r]
        else:
            for k in range(min(run.rank, RANKS - 1), RANKS):
                machine.up_to_rank[k, r] += sign * least
    machine.busy_us += machine.count * (now_us - machine.changed_us)
    machine.changed_us = now_us
    machine.count += 1 if sign > 0 else -1


@numba.njit(**LENT)
def _place(i: int, loop: Any, now_us: int) -> Any:
    """Place a run if a machine can take it: by its limit, or by its reservation if it is ``carried``."""
    runs, tape = loop.runs, loop.tape
    run = runs[i]
    row, need = run.cursor, loop.need
    if run.service or run.offset_us > 0:
        at_us = now_us - run.arrival_us if run.service else run.offset_us
        while row + 1 < run.stop and tape[row + 1].from_us <= at_us:
            row += 1
    for r in range(2):
        run.reservation[r] = loop.reserved[row, r] if run.carried else tape[row].limit[r]
        need[r] = tape[row].limit[r] if run.band > NON_PRODUCTION else run.reservation[r]
    k = failure_of(run, need, loop)
    failure = loop.failures[k]
    if fails_again(run, need, loop, k):
        draw(loop.random)
        run.reason = waiting_reason(run, failure)
        return False
    before = loop.n_changed[0]
    m = find_machine(run, need, loop)
    if m < 0:
        m = find_preemption(run, need, loop, now_us)
        while m >= 0 and not has_room(run, loop.machines[m], need):  # from the lowest rank up
            gone = first_victim(run, loop.machines[m], runs)
            if gone >= 0:
                _stop(np.int64(gone), np.int64(PREEMPTED), loop, now_us)
            else:  # rounding: by the sums it just fits
                m = -1
    if m < 0:
        count_lacks(run, need, loop, failure)
        run.reason = waiting_reason(run, failure)
        failure.mask, failure.rank, failure.band = run.mask, run.rank, run.band
        failure.need[0], failure.need[1] = need[0], need[1]
        failure.at = before if loop.n_changed[0] == before else 0
        return False
    machine = loop.machines[m]
    run.state, run.machine, run.placed_us, run.reason = RUNNING, m, now_us, NO_REASON
    run.waited_us += now_us - run.waiting_us
    if run.first_placed_us < 0:
        run.first_placed_us = now_us
    _chain(i, machine, runs)
    _play(run, tape, now_us)
    _raise_to_usage(run)
    run.held = not run.carried
    together = len(loop.foreseen.terms) > 0
    _add_to_sums(machine, run, loop.foreseen, together, 1.0, now_us)
    if together:
        count_run(m, machine, run, loop.foreseen, 1.0)
    machine.lowest = min(machine.lowest, run.rank)
    update_room(m, loop)
    _relieve_memory(m, loop, now_us)
    return True


@numba.njit(**LENT)
def _advance(first: int, loop: Any, now_us: int) -> None:
    """Move the runs of ``IN_TURN`` machines to their windows of now, with the tape's reservations.

    A run that was placed less than ``settings.startup_us`` ago keeps its limit.
    """
    runs, tape, reserved, settings = loop.runs, loop.tape, loop.reserved, loop.settings
    machines, heads = loop.machines, loop.found
    n = min(IN_TURN, len(machines) - first)
    for k in range(n):
        heads[k] = machines[first + k].head
    left = True
    while left:
        left = False
        for k in range(n):
            if heads[k] < 0:
                continue
            run = runs[heads[k]]
            _play(run, tape, now_us)
            run.held = not run.carried and now_us - run.placed_us < settings.startup_us
            for r in range(2):
                run.reservation[r] = guard(reserved[run.cursor, r], -np.inf, run.limit[r], run.held)
            heads[k] = run.next
            left = True


@numba.njit(**LENT)
def settle(loop: Any, slot_s: float, now_us: int, until_us: int) -> None:
    """Recompute every machine's sums, relieve those out of memory, throttle those out of CPU, fill in ``loop.tick``.

    Runs are moved to their windows of now. Those that end by ``until_us`` are noted.
    """
    runs, machines, due, foreseen, tick = loop.runs, loop.machines, loop.due, loop.foreseen, loop.tick
    due[0] = 0
    together = len(foreseen.terms) > 0
    for m in range(len(machines)):
        machine = machines[m]
        if m % IN_TURN == 0:
            _advance(m, loop, now_us)  # just before, so that the records are in the cache
        if not machine.up:
            continue
        for r in range(2):
            machine.use[r] = machine.limit[r] = machine.reserved[r] = machine.production[r] = machine.least[r] = 0.0
            for k in range(RANKS):
                machine.up_to_rank[k, r] = 0.0
        machine.lowest = 2**31 - 1
        count = machine.count
        if together:
            foreseen.sums[m] = 0.0
        i = machine.head
        while i >= 0:
            _raise_to_usage(runs[i])
            _add_to_sums(machine, runs[i], foreseen, together, 1.0, now_us)
            if together:
                add_terms(foreseen.sums[m], runs[i], foreseen, 1.0)
            machine.lowest = min(machine.lowest, runs[i].rank)
            _note_end(i, runs, due, until_us)
            i = runs[i].next
        machine.count = count
        if together:
            for r in range(2):
                machine.reserved[r] = foresee(r, foreseen.sums[m], machine.use[r], foreseen)
        update_room(m, loop)
        _relieve_memory(m, loop, now_us)
        if loop.settings.gives_way:
            _give_way(m, loop, now_us)
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


@numba.njit(**MAKING)
def schedule(loop: Any, now_us: int, until_us: int) -> None:
    """Try every waiting run, from the highest priority down, within one round-robin over users (EuroSys'15, 3.2).

    A user's own runs are tried from the longest wait down. A run that needs no less than one that just failed, under
    the same constraints and at no higher a rank, is skipped. One that ended while it waited has its place among its
    user's until the next slot. Runs that are placed and end by ``until_us`` are noted.
    """
    runs, pending, tick = loop.runs, loop.pending, loop.tick
    _release(loop, now_us)
    n = pending[0].run
    waiting = pending[1 : n + 1].copy()
    pending[0].run = 0
    turn = in_turn(waiting, loop.served)
    failed = np.empty(_REMEMBERED, np.int64)
    n_failed = np.int64(0)
    most = np.empty(2)
    lowest = largest_room(loop, most)
    stopped = tick.kills.sum()
    for k in range(n):
        entry = waiting[turn[k]]
        if entry.until_us <= until_us:
            _note_end(entry.run, runs, loop.due, until_us)
        if entry.until_us <= now_us:  # a service that has ended, or was held until its time had passed
            continue
        if tick.kills.sum() != stopped:  # a preemption made room
            stopped = tick.kills.sum()
            lowest = largest_room(loop, most)
        hopeless = entry.not_before_us > now_us
        if not hopeless and not entry.special and entry.rank <= lowest:
            hopeless = entry.first_limit[0] > most[0] or entry.first_limit[1] > most[1]
            if hopeless and entry.reason == NO_REASON:
                count_lacks(runs[entry.run], entry.first_limit, loop, loop.failures[0])
                entry.reason = waiting_reason(runs[entry.run], loop.failures[0])
        for f in range(0 if entry.special or hopeless else n_failed):
            if needs_no_less(entry, waiting[failed[f]]):
                hopeless = True
                entry.reason = waiting[failed[f]].reason
                break
        if not hopeless:
            if _place(entry.run, loop, now_us):
                _note_end(entry.run, runs, loop.due, until_us)
                loop.served[0] += 1
                loop.served[1 + entry.user] = loop.served[0]
                continue
            entry.reason = runs[entry.run].reason
            if not entry.special:
                n_failed = remember_failure(turn[k], waiting, failed, n_failed)
        pending[0].run += 1
        pending[pending[0].run] = entry
    for k in range(1, pending[0].run + 1):
        tick.pending[pending[k].band] += 1
        tick.reasons[pending[k].reason] += 1


@numba.njit(**MAKING)
def pass_slot(loop: Any, changes: Any, at: Any, now_us: int, until_us: int) -> None:
    """Process the events of a slot in the order of time; at one time ends, then changes of machines, then arrivals.

    An end at the start of the next slot belongs to this one. Ends of runs placed before are those noted, of which some
    were stopped since; a service ends by the clock, also while it waits. ``at`` counts the arrivals and changes taken
    so far; runs are in the order of their arrivals.
    """
    runs = loop.runs
    events = [(np.int64(until_us), np.int64(_LAST), np.int64(-1))]
    for k in range(1, loop.due[0] + 1):
        i = loop.due[k]
        events.append((np.int64(max(_end_us(runs[i]), now_us)), np.int64(_END), i))
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
            if _goes_on(runs[i]) and max(_end_us(runs[i]), now_us) == time_us:
                following = _finish(i, loop, time_us)
                if following >= 0:
                    heapq.heappush(events, (time_us, np.int64(_ARRIVAL), np.int64(following)))
        elif kind == _CHANGE:
            _change(changes[i], loop, time_us)
        else:
            run = runs[i]
            if run.after >= 0 and runs[run.after].state != DONE:
                run.state = BLOCKED
                continue
            if _hold(i, loop):
                continue
            run.waiting_us = run.ready_us = time_us
            if run.service and _end_us(run) <= time_us:  # its time has passed while it was blocked
                following = _finish(i, loop, time_us)
                if following >= 0:
                    heapq.heappush(events, (time_us, np.int64(_ARRIVAL), np.int64(following)))
                continue
            if not _place(i, loop, time_us):
                _wait(i, runs, loop.pending, time_us, time_us)
            if _goes_on(run) and _end_us(run) <= until_us:
                heapq.heappush(events, (_end_us(run), np.int64(_END), np.int64(i)))


@numba.njit(**LENT)
def _change(change: Any, loop: Any, now_us: int) -> None:
    """Change a machine: its capacity, whether it takes work, whether it is up. If it is down, its runs are stopped."""
    machine = loop.machines[change.machine]
    machine.up, machine.open = change.up, change.open
    for r in range(2):
        machine.capacity[r] = change.capacity[r]
    if not change.up:
        while machine.head >= 0:
            _stop(np.int64(machine.head), np.int64(MACHINE_GONE), loop, now_us)
    update_room(np.int64(change.machine), loop)
    _relieve_memory(np.int64(change.machine), loop, now_us)
