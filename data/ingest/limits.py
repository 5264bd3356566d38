"""Joins limits, priority, class and machine to windows: those that a task's events had set by each window's time."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.columns import array_of, values_of
from reclaim.data.core.jit import CACHED
from reclaim.data.ingest.readers.staging import NULL

POLICY: Final = (s.CPU_LIMIT, s.MEMORY_LIMIT, s.PRIORITY, s.TIER, s.SCHEDULING_CLASS)
"""Joined columns, besides the start of the current run."""
_SCHEDULE: Final = s.EventType.SCHEDULE  # compiled code reads no attributes of a class


def policy_of(
    events: pa.Table,
    collection: NDArray[np.int64],
    index: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    *,
    machine: bool = False,
) -> pa.Table:
    """Return limits, priority, tier, class and start of the current run of each window; the window's row order.

    A window carries the last start (SCHEDULE) before its end. Its limit, priority and class are those of the last event
    at or before its start that has them. If there is no such event, or the task was started inside the window (its
    first window, or a restart), they are those of the last event before its end. All are known by the window's end. A
    limit of zero becomes null.

    Parameters
    ----------
    events : pyarrow.Table
        Sorted by task and time; of one time, in the order in which they hold.
    collection, index, start, end : int64, shape (n,)
        The windows, sorted by task.
    machine : bool
        Whether the machine is returned, too, by the rule of the limits; its id must be below 2^53.
    """
    names = (*POLICY, s.MACHINE_ID) if machine else POLICY
    values = np.full((len(events), len(names)), np.nan)
    for k, name in enumerate(names):
        values[:, k] = values_of(events[name].cast(pa.float64()), np.nan)
    task, task_index, time = (values_of(events[name]) for name in (*s.TASK_KEY, s.TIME_US))
    kinds = values_of(events[s.EVENT_TYPE], -1)
    found, scheduled = _as_of(task, task_index, time, kinds, values, collection, index, start, end)
    found[:, :2][found[:, :2] == 0] = np.nan
    policy = [np.ascontiguousarray(column) for column in found.T]
    columns = {name: array_of(column, ~np.isnan(column)) for name, column in zip(names, policy, strict=True)}
    columns[s.SCHEDULED_US] = array_of(scheduled, scheduled != NULL)
    return pa.table({name: column.cast(s.USAGE.field(name).type) for name, column in columns.items()})


@numba.njit(**CACHED)
def _first_from(time: Any, low: Any, high: Any, bound: Any) -> Any:
    """Return the first of the events ``low`` to ``high``, which rise in time, that is at ``bound`` or later."""
    while low < high:
        middle = (low + high) // 2
        if time[middle] < bound:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(**CACHED)
def _as_of(
    task: Any,  # (n_events,) int64, as the next three
    task_index: Any,
    time: Any,
    kind: Any,  # (n_events,) int8
    values: Any,  # (n_events, n_values) float64; written to
    collection: Any,  # (n,) int64, as the next three
    index: Any,
    start: Any,
    end: Any,
) -> Any:
    """Return the values of each window, (n, n_values) float64, and the start of its run, (n,) int64."""
    events, width = values.shape
    run = np.full(events, NULL, np.int64)
    for e in range(events):  # a value holds until an event with another one
        same = e > 0 and task[e] == task[e - 1] and task_index[e] == task_index[e - 1]
        run[e] = time[e] if kind[e] == _SCHEDULE else run[e - 1] if same else NULL
        for k in range(width):
            if same and np.isnan(values[e, k]):
                values[e, k] = values[e - 1, k]
    found = np.full((len(start), width), np.nan)
    scheduled = np.full(len(start), NULL, np.int64)
    first = last = 0  # the events of the window's task
    for w in range(len(start)):
        if w == 0 or collection[w] != collection[w - 1] or index[w] != index[w - 1]:
            first = last
            while first < events and (
                task[first] < collection[w] or (task[first] == collection[w] and task_index[first] < index[w])
            ):
                first += 1
            last = first
            while last < events and task[last] == collection[w] and task_index[last] == index[w]:
                last += 1
        at_start = _first_from(time, first, last, start[w] + 1) - 1  # a time after the trace is above all others
        at_end = _first_from(time, first, last, end[w]) - 1
        if at_end >= first:
            scheduled[w] = run[at_end]
        for k in range(width):
            if at_end >= first and run[at_end] > start[w]:
                found[w, k] = values[at_end, k]
            elif at_start >= first and not np.isnan(values[at_start, k]):
                found[w, k] = values[at_start, k]
            elif at_end >= first:
                found[w, k] = values[at_end, k]
    return found, scheduled
