"""Compiled part of ``live``: takes windows in any order within the bound into the records of their tasks."""

from __future__ import annotations

from typing import Any, Final

import numba

from reclaim.data.core.jit import LENT, copy_row
from reclaim.features.fold.live_record import MOST_ROWS, fetch, fetch_rows, pack, unpack
from reclaim.features.fold.task_read import write
from reclaim.features.fold.task_update import publish, take
from reclaim.features.registry import RECENT_WINDOWS

NEW, LATE, REPEATED, TOO_LATE = range(4)
"""Kinds of windows: see ``live.TolerantState.classify``."""
PENDING: Final = 4
"""Windows of a task that may end after a late one: the default bound, 15 minutes, has three of 5 minutes each, and one
is spare for windows cut short."""

_EARLIEST, _NEVER = -(2**63), 2**63 - 1
"""Before and after any window ends, µs."""


@numba.njit(**LENT)
def classify(
    records: Any,  # (n_tasks,) KEPT
    pending: Any,  # (n_tasks * PENDING,) HELD
    tasks: int,
    slot: Any,  # (n,) int64
    end_us: Any,  # (n,) int64
    lateness_us: int,
    kind: Any,  # (n,) uint8, written
) -> None:
    """Write the kind of each row, as if the call had no other."""
    for i in range(len(slot)):
        kind[i] = NEW
        if slot[i] < tasks:
            kind[i] = _kind(records[slot[i]], pending, slot[i], end_us[i], lateness_us)


@numba.njit(**LENT)
def advance_tasks(
    kept: Any,  # (n_tasks, words of KEPT) int64, changed
    records: Any,  # (n_tasks,) KEPT, the same memory
    rows: Any,  # (n_rows,) ROW, changed
    free: Any,  # (m,) int32: numbers of rows that may be taken
    taken: Any,  # (1,) int64: how many of them have been, changed
    pending: Any,  # (n_tasks * PENDING,) HELD, changed
    room: Any,  # (2,) STATE, to work in: the task after all windows, and without those that are held
    room_words: Any,  # (2, words of STATE) int64, the same memory
    slots: Any,  # (k,) int64, rising
    edges: Any,  # (k + 1,) int64, of each task in order
    order: Any,  # (n,) int64
    low: int,
    high: int,
    columns: Any,  # FoldColumns of n rows
    lateness_us: int,
    largest: Any,  # (R,) float64
    monday_us: int,
    out: Any,  # (k, n_features) float32, written
    last_us: Any,  # (k,) int64, written
    last_row: Any,  # (k,) int64, written
    refused: Any,  # (k,) bool, set
    place: Any,  # (n,) int64, written
    moment: Any,  # (n,) int32, written
    died: Any,  # (n,) int32, written
    shape: Any,  # (N_LEVELS,) float64, written
) -> int:
    """Take the rows of some tasks, each task's in time order, and write its own features after its last window.

    Returns the first task that was not begun, for want of free rows; ``high`` where all are done.
    """
    s, settled = room[0], room[1]
    for k in range(low, high):
        if len(free) - taken[0] < MOST_ROWS:
            return k
        task, last_row[k] = slots[k], -1
        fetch(records[slots[min(k + 2, high - 1)]])
        fetch_rows(records[slots[min(k + 1, high - 1)]], rows)
        unpack(kept, records, rows, task, settled, room_words[1])
        i = order[edges[k]]
        one = edges[k + 1] - edges[k] == 1 and lateness_us > 0
        if one and _kind(settled, pending, task, columns.end_us[i], lateness_us) == NEW:
            # the usual case: one new window, taken without a copy of the record
            _hold(settled, pending, task, columns, i, columns.end_us[i] - lateness_us, shape)
            pack(settled, room_words[1], kept, records, rows, task, free, taken)
            ooms = _take_held(settled, pending, task, shape)
            last_us[k], last_row[k], place[i] = settled.end_us, i, k
            publish(settled, ooms, True, moment, died, i)
            write(settled, columns, i, largest, monday_us, out, k)
            continue
        there = False  # whether s is the state after all windows
        for at in range(edges[k], edges[k + 1]):
            i = order[at]
            kind = _kind(settled, pending, task, columns.end_us[i], lateness_us)
            if not there and (kind != NEW or lateness_us == 0):
                _catch_up(pending, task, room, shape)
                there = True
            ooms = s.ooms
            if kind > LATE:
                refused[k] = True
            elif lateness_us == 0:
                take(s, columns, shape, i)
                room[1] = s
            else:
                until_us = max(_end_of(settled, pending, task), columns.end_us[i])
                _hold(settled, pending, task, columns, i, until_us - lateness_us, shape)
                if kind == NEW and there:
                    take(s, columns, shape, i)
                else:
                    before = _catch_up(pending, task, room, shape)
                    ooms = before if kind == NEW else ooms
                there = True
            if kind == NEW:
                last_row[k] = i
            publish(s, ooms, kind <= LATE, moment, died, i)
            place[i] = k
        pack(settled, room_words[1], kept, records, rows, task, free, taken)
        last_us[k] = s.end_us
        i = last_row[k]
        if i >= 0:
            write(s, columns, i, largest, monday_us, out, k)
        elif not refused[k]:
            i = _held_at(pending, task, s.end_us)
            write(s, pending, i, largest, monday_us, out, k)
    return high


@numba.njit(**LENT)
def settle_all(
    kept: Any,  # (n_tasks, words of KEPT) int64, changed
    records: Any,  # (n_tasks,) KEPT, the same memory
    rows: Any,  # (n_rows,) ROW, changed
    free: Any,  # (m,) int32: numbers of rows that may be taken
    taken: Any,  # (1,) int64: how many of them have been, changed
    pending: Any,  # (n_tasks * PENDING,) HELD
    room: Any,  # (2,) STATE, to work in
    room_words: Any,  # (2, words of STATE) int64, the same memory
    shape: Any,  # (N_LEVELS,) float64, written
    low: int,
    high: int,
) -> int:
    """Take the windows held into the records of their tasks; return as ``advance_tasks``."""
    for task in range(low, high):
        if len(free) - taken[0] < MOST_ROWS:
            return task
        unpack(kept, records, rows, task, room[1], room_words[1])
        _take_held(room[1], pending, task, shape)
        pack(room[1], room_words[1], kept, records, rows, task, free, taken)
    return high


@numba.njit(**LENT)
def _kind(
    old: Any,  # a record of KEPT or STATE
    pending: Any,  # (n_tasks * PENDING,) HELD
    task: int,
    end_us: int,
    lateness_us: int,
) -> int:
    last_us = _end_of(old, pending, task)
    if last_us == _EARLIEST or end_us > last_us:
        return NEW
    n_held = 0
    if lateness_us > 0:
        for row in range(task * PENDING, task * PENDING + PENDING):
            if pending[row].held:
                n_held += 1
                if pending[row].end_us == end_us:
                    return REPEATED
    for k in range(min(old.count, RECENT_WINDOWS)):
        again = (k - old.count) % RECENT_WINDOWS < n_held  # it takes the place of a held window
        if old.recent_us[k] == end_us and not again:
            return REPEATED
    if lateness_us == 0 or end_us < last_us - lateness_us:
        return TOO_LATE
    if old.count > 0 and end_us <= old.end_us:
        return TOO_LATE
    return LATE


@numba.njit(**LENT)
def _end_of(
    old: Any,  # a record of KEPT or STATE
    pending: Any,  # (n_tasks * PENDING,) HELD
    task: int,
) -> int:
    """Return the end of the last window of a task; ``_EARLIEST`` without one."""
    last_us = old.end_us if old.count > 0 else _EARLIEST
    if len(pending):
        for row in range(task * PENDING, task * PENDING + PENDING):
            if pending[row].held and pending[row].end_us > last_us:
                last_us = pending[row].end_us
    return int(last_us)


@numba.njit(**LENT)
def _next(
    pending: Any,  # (n_tasks * PENDING,) HELD
    task: int,
    after_us: int,
) -> int:
    """Return the row of the first window held that ends after a time; -1 none."""
    first, first_us = -1, _NEVER
    for row in range(task * PENDING, task * PENDING + PENDING):
        if pending[row].held and after_us < pending[row].end_us < first_us:
            first, first_us = row, pending[row].end_us
    return first


@numba.njit(**LENT)
def _catch_up(
    pending: Any,  # (n_tasks * PENDING,) HELD
    task: int,
    room: Any,  # (2,) STATE, the first one written
    shape: Any,  # (N_LEVELS,) float64, written
) -> int:
    """Make a task's record after all its windows; return its out-of-memory ends before the last one."""
    room[0] = room[1]
    if len(pending) == 0:
        return int(room[0].ooms)
    return int(_take_held(room[0], pending, task, shape))


@numba.njit(**LENT)
def _take_held(
    s: Any,  # a record of STATE, changed
    pending: Any,  # (n_tasks * PENDING,) HELD
    task: int,
    shape: Any,  # (N_LEVELS,) float64, written
) -> int:
    """Take the windows held of a task in time order; return its out-of-memory ends before the last one."""
    ooms = s.ooms
    row = _next(pending, task, _EARLIEST)
    while row >= 0:
        ooms = s.ooms
        take(s, pending, shape, row)
        row = _next(pending, task, pending[row].end_us)
    return int(ooms)


@numba.njit(**LENT)
def _hold(
    old: Any,  # a record of STATE, changed
    pending: Any,  # (n_tasks * PENDING,) HELD, changed
    task: int,
    columns: Any,  # FoldColumns of n rows
    i: int,
    settle_us: int,
    shape: Any,  # (N_LEVELS,) float64, written
) -> None:
    """Hold the window of row ``i``; settle, in time order, those that end by ``settle_us`` or are one too many."""
    end_us = columns.end_us[i]
    count = 1
    for row in range(task * PENDING, task * PENDING + PENDING):
        count += pending[row].held
    while True:
        first = _next(pending, task, _EARLIEST)
        mine = first < 0 or end_us < pending[first].end_us
        if count <= PENDING and (end_us if mine else pending[first].end_us) > settle_us:
            break
        count -= 1
        if mine:
            take(old, columns, shape, i)
            return
        take(old, pending, shape, first)
        pending[first].held = False
    free = task * PENDING
    while pending[free].held:
        free += 1
    pending[free].held = True
    copy_row(columns, i, pending, free)


@numba.njit(**LENT)
def _held_at(
    pending: Any,  # (n_tasks * PENDING,) HELD
    task: int,
    end_us: int,
) -> int:
    """Return the row of the window held that ends then; the last window of a task is held where late ones are taken."""
    row = task * PENDING
    while not (pending[row].held and pending[row].end_us == end_us):
        row += 1
    return row
