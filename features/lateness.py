"""How windows that come late get into a task's records: the compiled part of ``tolerant``."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CHANNELS
from reclaim.features.compiled import LENT, fetch_line
from reclaim.features.reading import write
from reclaim.features.record import N_SIGNALS, READ_FROM, STATE, TAKEN_FROM
from reclaim.features.registry import CONTEXT_WINDOWS
from reclaim.features.taking import N_LEVELS, take, tell

NEW, LATE, REPEATED, TOO_LATE = range(4)
"""What a window is to its task: see ``tolerant.TolerantState.sort_out``."""
PENDING: Final = 4
"""Windows of a task that one which comes late may still come before: those of the default bound, 15 minutes, are three
of 5 minutes each, and one is to spare for windows cut short."""

_LINE: Final = 64
"""Bytes of a cache line."""
_RECORD_BYTES: Final = STATE.itemsize
_N_CHANNELS: Final = len(CHANNELS)
_N_RESOURCES: Final = len(RESOURCES)
_EARLIEST, _NEVER = -(2**63), 2**63 - 1
"""Before and after any window ends, µs."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def sort_out(
    live: Any, settled: Any, tasks: int, slot: Any, end_us: Any, lateness_us: int, kind: Any
) -> None:  # fmt: skip
    """Write what each row is to its task, the other rows of the call left aside."""
    for i in range(len(slot)):
        kind[i] = _kind(live, settled, slot[i], end_us[i], lateness_us) if slot[i] < tasks else NEW


@numba.njit(cache=True, nogil=True, error_model="numpy")
def advance_tasks(
    live: Any, settled: Any, held: Any, pending: Any, kept: Any, slots: Any, edges: Any, order: Any, low: int,
    high: int, columns: Any, lateness_us: int, largest: Any, monday_us: int, out: Any, last_us: Any, last_row: Any,
    refused: Any, place: Any, moment: Any, share: Any,
) -> None:  # fmt: skip
    """Take the rows of some tasks, each task's in time order, and write its own features after its last window.

    ``pending`` are the columns of the windows held, ``PENDING`` rows for each task, and ``kept`` the same to be read.
    """
    start_us, end_us, scheduled_us, signals, usage, percentiles, limit, tier, scheduling_class, in_alloc = columns
    _, kept_us, _, _, _, _, kept_limit, kept_tier, kept_class, kept_alloc = kept
    shape = np.empty(N_LEVELS)
    for k in range(low, high):
        task, last_row[k] = slots[k], -1
        s = live[task]
        following = slots[min(k + 1, high - 1)]
        if lateness_us > 0:
            _fetch(settled[following], READ_FROM)
        for at in range(edges[k], edges[k + 1]):
            i = order[at]
            kind = _kind(live, settled, task, end_us[i], lateness_us)
            taken = kind <= LATE
            if not taken:
                refused[k] = True
            elif lateness_us > 0:
                _hold(
                    settled[task], held, pending, kept, task, columns, i, max(s.end_us, end_us[i]) - lateness_us, shape
                )
            if kind == NEW:
                take(s, start_us, end_us, scheduled_us, signals, usage, percentiles, limit, shape, i)
                last_row[k] = i
            elif kind == LATE:
                _catch_up(live, settled, held, kept, task, shape)
            tell(s.end_us, taken, signals, limit, moment, share, i)
            place[i] = k
        last_us[k] = s.end_us
        _fetch(live[following], _RECORD_BYTES)
        i = last_row[k]
        if i >= 0:
            write(s, limit, tier, scheduling_class, in_alloc, i, largest, monday_us, out, k)
        elif not refused[k]:
            i = _held_at(held, kept_us, task, s.end_us)
            write(s, kept_limit, kept_tier, kept_class, kept_alloc, i, largest, monday_us, out, k)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def catch_up(live: Any, settled: Any, held: Any, kept: Any, tasks: int) -> None:
    """Make the records that stand after all windows from those without the windows held."""
    shape = np.empty(N_LEVELS)
    for task in range(tasks):
        _catch_up(live, settled, held, kept, task, shape)


@numba.njit(**LENT)
def _fetch(s: Any, stop: int) -> None:
    """Have what most windows use of a record, up to a byte, fetched from memory while another record is worked on."""
    for at in range(TAKEN_FROM, stop, _LINE):
        fetch_line(s, at)  # type: ignore[call-arg]  # numba gives the first itself


@numba.njit(**LENT)
def _kind(live: Any, settled: Any, task: int, end_us: int, lateness_us: int) -> int:
    s = live[task]
    if s.count == 0 or end_us > s.end_us:
        return NEW
    for k in range(min(s.count, CONTEXT_WINDOWS)):
        if s.recent_us[k] == end_us:
            return REPEATED
    if lateness_us == 0 or end_us < s.end_us - lateness_us:
        return TOO_LATE
    old = settled[task]
    if old.count > 0 and end_us <= old.end_us:
        return TOO_LATE
    return LATE


@numba.njit(**LENT)
def _next(held: Any, held_us: Any, task: int, after_us: int) -> int:
    """Return the row of the first window held that ends after a time; -1 none."""
    first, first_us = -1, _NEVER
    for row in range(task * PENDING, task * PENDING + PENDING):
        if held[row] and after_us < held_us[row] < first_us:
            first, first_us = row, held_us[row]
    return first


@numba.njit(**LENT)
def _catch_up(live: Any, settled: Any, held: Any, kept: Any, task: int, shape: Any) -> None:
    """Make a task's record anew: that without the windows held, and these in time order."""
    live[task] = settled[task]
    row = _next(held, kept[1], task, _EARLIEST)
    while row >= 0:
        take(live[task], kept[0], kept[1], kept[2], kept[3], kept[4], kept[5], kept[6], shape, row)
        row = _next(held, kept[1], task, kept[1][row])


@numba.njit(**LENT)
def _hold(
    old: Any, held: Any, pending: Any, kept: Any, task: int, columns: Any, i: int, settle_us: int, shape: Any
) -> None:  # fmt: skip
    """Hold the window of row ``i``; settle, in time order, those that end by ``settle_us`` or are one too many."""
    end_us = columns[1][i]
    count = 1
    for row in range(task * PENDING, task * PENDING + PENDING):
        count += held[row]
    while True:
        first = _next(held, kept[1], task, _EARLIEST)
        mine = first < 0 or end_us < kept[1][first]
        if count <= PENDING and (end_us if mine else kept[1][first]) > settle_us:
            break
        count -= 1
        if mine:
            take(
                old, columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], columns[6], shape, i
            )  # fmt: skip
            return
        take(old, kept[0], kept[1], kept[2], kept[3], kept[4], kept[5], kept[6], shape, first)
        held[first] = False
    free = task * PENDING
    while held[free]:
        free += 1
    held[free] = True
    _copy(columns, i, pending, free)


@numba.njit(**LENT)
def _copy(columns: Any, i: int, pending: Any, row: int) -> None:
    """Copy one row of all columns."""
    start_us, end_us, scheduled_us, signals, usage, percentiles, limit, tier, scheduling_class, in_alloc = columns
    to_start, to_end, to_run, to_signals, to_usage, to_shape, to_limit, to_tier, to_class, to_alloc = pending
    to_start[row] = start_us[i]
    to_end[row] = end_us[i]
    to_run[row] = scheduled_us[i]
    for c in range(N_SIGNALS):
        to_signals[row, c] = signals[i, c]
    for c in range(_N_CHANNELS):
        to_usage[row, c] = usage[i, c]
    for c in range(N_LEVELS):
        to_shape[row, c] = percentiles[i, c]
    for c in range(_N_RESOURCES):
        to_limit[row, c] = limit[i, c]
    to_tier[row] = tier[i]
    to_class[row] = scheduling_class[i]
    to_alloc[row] = in_alloc[i]


@numba.njit(**LENT)
def _held_at(held: Any, held_us: Any, task: int, end_us: int) -> int:
    """Return the row of the window held that ends then: a task's last one is, where any is taken late."""
    row = task * PENDING
    while not (held[row] and held_us[row] == end_us):
        row += 1
    return row
