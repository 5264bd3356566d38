"""The label of out-of-memory ends: which failures of tasks count as out of memory, recorded or derived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.columns import array_of, values_of
from reclaim.data.core.arrays import is_first
from reclaim.data.windows import MEMORY_MAX, MEMORY_MEAN, Windows

OOM_SHARE: Final = 0.98
"""Share of the limit that memory must reach in a failed task's last window for the failure to be called OOM."""

OOM_ENDS: Final = (s.EventType.FAIL,)
"""Ends that may be an OOM. An eviction is none: a machine out of memory evicts the least important task."""

OOM_COLUMNS: Final = [*s.TASK_KEY, s.TIME_US, s.EVENT_TYPE]
"""The columns of events that the label looks at."""

OOM_DEFINITION: Final = (
    f"OOM is a derived label (no public trace records it): a FAIL of the task whose last window before it has a "
    f"maximum memory of at least {OOM_SHARE:.0%} of the limit"
)
"""Printed with every number that rests on the derived label."""
OOM_RECORDED: Final = (
    "OOM is a recorded label: a FAIL of the task, after its first window, of which the history says that it was out of "
    "memory"
)
"""Printed with every number that rests on records, as kube-state-metrics has them (``OOMKilled``)."""

_LAST_WINDOW_US: Final = 600_000_000
"""Largest time from the end of the last window to a failure: one missing window is forgiven."""


def oom_is_recorded(manifest: Mapping[str, Any]) -> bool:
    """Return whether a dataset's events say which of them were out of memory."""
    return s.OUT_OF_MEMORY in manifest.get("extras", {}).get("events", ())


def oom_definition(manifest: Mapping[str, Any]) -> str:
    """Return the definition of the label in a dataset."""
    return OOM_RECORDED if oom_is_recorded(manifest) else OOM_DEFINITION


def oom_columns(manifest: Mapping[str, Any]) -> list[str]:
    """Return the columns of a dataset's events that the label looks at."""
    return [*OOM_COLUMNS, s.OUT_OF_MEMORY] if oom_is_recorded(manifest) else OOM_COLUMNS


def oom_events(
    windows: Windows, events: pa.Table, *, share: float = OOM_SHARE, ends: tuple[int, ...] = OOM_ENDS
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return task number and time of each OOM event, sorted. Two int64 arrays, (n_events,).

    Events that say which of them were out of memory are taken at their word (``OOM_RECORDED``); of others it is derived
    (``OOM_DEFINITION``).

    Parameters
    ----------
    windows : Windows
        Sorted by task, then time.
    events : pyarrow.Table
        Of the same bucket: at least ``oom_columns``.
    share : float
        Of the limit, that memory must have reached where the label is derived.
    ends : tuple of int
        Event types that may be an OOM.
    """
    may_be = pc.is_in(events[s.EVENT_TYPE], array_of(np.array(ends, np.int8)))
    recorded = s.OUT_OF_MEMORY in events.column_names
    if recorded:
        may_be = pc.and_(may_be, pc.fill_null(events[s.OUT_OF_MEMORY], False))
    fails = events.select(OOM_COLUMNS).filter(may_be)
    starts = windows.task_starts()[:-1]
    number = _number_of(
        (windows.collection_id[starts], windows.instance_index[starts]),
        tuple(values_of(fails[key]) for key in s.TASK_KEY),
    )
    time_us = values_of(fails[s.TIME_US])
    known = (number >= 0) & (time_us > s.BEFORE_TRACE_US) & (time_us < s.AFTER_TRACE_US)
    number, time_us = number[known], time_us[known]
    if len(windows) == 0 or len(number) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    row = _last_row_before(windows, number, time_us)
    seen = row >= starts[number]  # else there is no window of this task before
    memory = windows.usage[row, MEMORY_MAX]
    memory = np.where(np.isnan(memory), windows.usage[row, MEMORY_MEAN], memory)
    full = (windows.end_us[row] >= time_us - _LAST_WINDOW_US) & (
        memory >= share * windows.limit[row, s.RESOURCES.index("memory")]
    )
    oom = seen if recorded else seen & full
    number, time_us = number[oom], time_us[oom]
    by_task = np.lexsort((time_us, number))
    return number[by_task], time_us[by_task]


def _number_of(tasks: tuple[NDArray[np.int64], ...], asked: tuple[NDArray[np.int64], ...]) -> NDArray[np.int64]:
    """Return the place of each task asked for among tasks, given by their ids; -1 for one that is not there."""
    n = len(tasks[0])
    keys = [np.concatenate(column) for column in zip(tasks, asked, strict=True)]
    order = np.lexsort(keys[::-1])  # stable: of equal ids the one among the tasks stands first
    starts = np.flatnonzero(is_first(*(key[order] for key in keys)))
    first = np.repeat(order[starts], np.diff(starts, append=len(order)))
    number = np.empty(len(order), np.int64)
    number[order] = np.where(first < n, first, -1)
    return number[n:]


def _last_row_before(windows: Windows, task: NDArray[np.int64], time_us: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the last row of (task, a window that began before ``time_us``); the row before the task's first for none.

    Shape (n_events,).
    """
    starts = windows.task_starts()
    low, high = starts[task], starts[task + 1]
    while (searched := low < high).any():  # all events at once: the rows from ``high`` on did not begin before
        middle = (low + high) // 2
        began = windows.start_us[np.where(searched, middle, 0)] < time_us
        low, high = np.where(searched & began, middle + 1, low), np.where(searched & ~began, middle, high)
    return low - 1
