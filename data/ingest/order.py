"""Orders events of one time: a task that runs or waits ends before it starts again, any other starts before it ends."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.columns import array_of, values_of
from reclaim.data.core.arrays import is_first
from reclaim.data.core.jit import CACHED


def task_events_in_order(events: pa.Table) -> pa.Table:
    """Return the events, sorted by task, time and type, in the order in which they hold.

    Traces of whole seconds have many of one time: a task leaves a machine and starts on another one, or a run is over
    within the second it began in. A task that waits was submitted and has not ended. An update is of what goes on: it
    comes before an end that no start follows.
    """
    return _in_order(events, s.TASK_KEY, s.EventType.ENDS, (s.EventType.UPDATE_PENDING, s.EventType.UPDATE_RUNNING))


def machine_events_in_order(events: pa.Table) -> pa.Table:
    """Return the events, sorted by machine, time and type, by time and in the order in which they hold.

    A machine that is removed and comes back at one time is in service; one that is updated and removed is not.
    """
    kind = s.MachineEventType
    updates = (kind.UPDATE, kind.SOFT_ERROR, kind.HARD_ERROR)
    events = _in_order(events, (s.MACHINE_ID,), (kind.REMOVE,), updates)
    return events.take(array_of(np.argsort(values_of(events[s.TIME_US]), kind="stable")))


def _in_order(events: pa.Table, key: tuple[str, ...], ends: tuple[int, ...], updates: tuple[int, ...]) -> pa.Table:
    first = is_first(*(values_of(events[name]) for name in key))
    kinds = values_of(events[s.EVENT_TYPE], -1)
    order = _order(first, values_of(events[s.TIME_US]), np.isin(kinds, ends), np.isin(kinds, updates))
    return events if order is None else events.take(array_of(order))


def _order(
    first: NDArray[np.bool_], time: NDArray[np.int64], ends: NDArray[np.bool_], updates: NDArray[np.bool_]
) -> NDArray[np.int64] | None:
    """Return the order of rows by key and time, given which begin a key, end it and update it; None where it is theirs.

    Shape (n,) each.
    """
    again = ~first[1:] & (time[1:] == time[:-1])
    if not (again & (ends[1:] != ends[:-1])).any():
        return None
    rank = _ranks(first, np.append(False, again), ends, updates)
    return np.argsort(rank, kind="stable")


@numba.njit(**CACHED)
def _ranks(first: Any, again: Any, ends: Any, updates: Any) -> Any:
    """Return a number of each row that rises in the wanted order; rows that share one stay as they are."""
    rank = np.empty(len(first), np.int64)
    begin, runs = 0, False
    for row in range(1, len(first) + 1):
        if row < len(first) and again[row]:
            continue
        runs &= not first[begin]
        any_end, any_start = False, False
        for k in range(begin, row):
            any_end |= ends[k]
            any_start |= not ends[k] and not updates[k]
        ends_first = runs and any_start  # an end comes first where what runs starts again, else last
        for k in range(begin, row):
            rank[k] = 2 * begin + (ends[k] != ends_first)
        runs = ends_first or not any_end
        begin = row
    return rank
