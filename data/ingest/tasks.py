"""Lists the tasks of a bucket: first and last window, and tier, class and type when last seen."""

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

_SEEN: Final = (s.TIER, s.SCHEDULING_CLASS, s.COLLECTION_TYPE)
_SPAN: Final = (s.FIRST_SEEN_US, s.LAST_SEEN_US)


def tasks_of(usage: pa.Table, events: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the tasks that have a window or an event, in the columns of the schema.

    Tier, class and type are those of the last window that has one, else of the last event that does: the largest of
    the events of that time and type.

    Parameters
    ----------
    usage : pyarrow.Table
        Windows by task, start and end.
    events : pyarrow.Table
        By task, time and type.
    schema : pyarrow.Schema
        The task's key, ``tier``, ``scheduling_class`` and ``collection_type``, first and last time seen.
    """
    windows = [_whole(usage, name) for name in (*s.TASK_KEY, s.START_US, s.END_US)]
    seen = np.stack([_whole(usage, name) for name in _SEEN])
    said = [_whole(events, name) for name in (*s.TASK_KEY, s.TIME_US, s.EVENT_TYPE)]
    found = _tasks(tuple(windows), seen, tuple(said), np.stack([_whole(events, name) for name in _SEEN]))
    columns = dict(zip((*s.TASK_KEY, *_SEEN, *_SPAN), found, strict=True))
    return pa.table([array_of(columns[f.name], columns[f.name] != NULL).cast(f.type) for f in schema], schema=schema)


def _whole(table: pa.Table, name: str) -> NDArray[np.int64]:
    """Return a column of integers, ``NULL`` where it is null."""
    return np.ascontiguousarray(values_of(table[name].cast(pa.int64()), NULL))


@numba.njit(**CACHED)
def _tasks(
    windows: Any,  # collection, index, start, end; (n,) int64 each
    seen: Any,  # (3, n) int64
    events: Any,  # collection, index, time, type; (m,) int64 each
    said: Any,  # (3, m) int64
) -> Any:
    """Return the columns of the tasks, (7, n_tasks) int64."""
    collection, index, start, end = windows
    of, of_index, time, kind = events
    out = np.full((7, len(start) + len(time)), NULL, np.int64)
    n = w = e = 0
    while w < len(start) or e < len(time):
        of_events = w == len(start) or (
            e < len(time) and (of[e] < collection[w] or (of[e] == collection[w] and of_index[e] < index[w]))
        )
        task, task_index = (of[e], of_index[e]) if of_events else (collection[w], index[w])
        out[0, n], out[1, n] = task, task_index
        first_window, first_event = w, e
        while w < len(start) and collection[w] == task and index[w] == task_index:
            w += 1
        while e < len(time) and of[e] == task and of_index[e] == task_index:
            e += 1
        for k in range(3):
            last = -1
            for i in range(first_window, w):
                if seen[k, i] != NULL and (last < 0 or start[i] > start[last]):
                    last = i
            if last >= 0:
                out[2 + k, n] = seen[k, last]
                continue
            for i in range(first_event, e):
                if said[k, i] != NULL:
                    later = last < 0 or time[i] != time[last] or kind[i] != kind[last]  # events are in their order
                    if later or said[k, i] > said[k, last]:
                        last = i
            if last >= 0:
                out[2 + k, n] = said[k, last]
        if w > first_window:
            out[5, n] = start[first_window]
            for i in range(first_window, w):
                out[6, n] = max(out[6, n], end[i])
        n += 1
    return out[:, :n].copy()
