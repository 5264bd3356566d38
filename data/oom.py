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
"""Share of the limit that memory must reach in a failed task's last window for the failure to count as OOM."""

OOM_ENDS: Final = (s.EventType.FAIL,)
"""Ends that may be an OOM. An eviction is not one: a machine out of memory evicts the least important task."""

OOM_COLUMNS: Final = [*s.TASK_KEY, s.TIME_US, s.EVENT_TYPE]
"""The columns of events that the label looks at."""

OOM_DEFINITION: Final = (
    f"OOM is a derived label (no public trace records it): a FAIL of the task whose last window before it has a "
    f"maximum memory of at least {OOM_SHARE:.0%} of the limit"
)
"""Printed with every number that rests on the derived label."""
OOM_RECORDED: Final = (
    "OOM is a recorded label: a FAIL of the task, after its first window, of which the history says that it was out of "
    "memory; of which it says nothing: a FAIL of the task whose last window before it has a maximum memory of at least "
    f"{OOM_SHARE:.0%} of the limit"
)
"""Printed with every number that rests on records, as kube-state-metrics has them (``OOMKilled``)."""

LAST_WINDOW_US: Final = 600_000_000
"""Largest time from the end of the last window to a failure: one missing window is forgiven."""


def near_limit(memory: Any, limit: Any, share: float = OOM_SHARE) -> Any:
    """Return whether memory is so near its limit that a failure right after it is derived to be an OOM.

    The only definition of this rule, for numbers or arrays; kernels compile it. False where one of them is NaN.
    """
    return memory >= share * limit


def is_last(start_us: Any, end_us: Any, time_us: Any) -> Any:
    """Return whether a window, the last that began before a failure, is recent enough to judge it."""
    return (start_us < time_us) & (end_us >= time_us - LAST_WINDOW_US)


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

    For events that record whether they were out of memory, the record decides (``OOM_RECORDED``); for others it is
    derived (``OOM_DEFINITION``).

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
    number, time_us, said = _failures(windows, events, ends)
    if len(windows) == 0 or len(number) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    row = _last_row_before(windows, number, time_us)
    seen = row >= windows.task_starts()[number]  # else there is no window of this task before
    memory = windows.usage[row, MEMORY_MAX]
    memory = np.where(np.isnan(memory), windows.usage[row, MEMORY_MEAN], memory)
    full = is_last(windows.start_us[row], windows.end_us[row], time_us) & near_limit(
        memory, windows.limit[row, s.MEMORY_AT], share
    )
    oom = seen & np.where(said < 0, full, said > 0)
    number, time_us = number[oom], time_us[oom]
    by_task = np.lexsort((time_us, number))
    return number[by_task], time_us[by_task]


def recorded_failures(windows: Windows, events: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the columns ``failed_us`` and ``failed_oom`` of windows: the last failure of known cause by each end.

    Of two failures of a task at one time, the one that was out of memory counts.

    Parameters
    ----------
    windows : Windows
        ``n`` rows, sorted by task, then time.
    events : pyarrow.Table
        Of the same bucket: at least ``oom_columns``, with ``out_of_memory``.
    """
    failed_us, failed_oom = np.full(len(windows), s.UNKNOWN_ID, np.int64), np.zeros(len(windows), np.bool_)
    number, time_us, said = _failures(windows, events)
    rows = np.flatnonzero(np.isin(windows.task_numbers(), number[said >= 0]))
    if len(rows) == 0:
        return failed_us, failed_oom
    number, time_us, said = number[said >= 0], time_us[said >= 0], said[said >= 0]
    of = np.concatenate([number, windows.task_numbers()[rows]])
    at_us = np.concatenate([time_us, windows.end_us[rows]])
    order = np.lexsort((np.append(said, np.full(len(rows), 2)), at_us, of))  # of one time, windows behind failures
    event = np.maximum.accumulate(np.where(order < len(number), np.arange(len(order)), -1))
    place = order[event]  # the last failure at or before each, of any task; the first row is that of no task
    there = (event >= 0) & (order >= len(number)) & (of[place] == of[order])
    row = rows[order[there] - len(number)]
    failed_us[row], failed_oom[row] = time_us[place[there]], said[place[there]] > 0
    return failed_us, failed_oom


def _failures(
    windows: Windows, events: pa.Table, ends: tuple[int, ...] = OOM_ENDS
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int8]]:
    """Return task number and time of the ends that may be an OOM, and whether they were: -1 where it is not recorded.

    Shape (n_events,) each, in the order of the events.
    """
    fails = events.filter(pc.is_in(events[s.EVENT_TYPE], array_of(np.array(ends, np.int8))))
    starts = windows.task_starts()[:-1]
    number = _number_of(
        (windows.collection_id[starts], windows.instance_index[starts]),
        tuple(values_of(fails[key]) for key in s.TASK_KEY),
    )
    time_us = values_of(fails[s.TIME_US])
    said = np.full(len(fails), -1, np.int8)
    if s.OUT_OF_MEMORY in events.column_names:
        said = values_of(fails[s.OUT_OF_MEMORY].cast(pa.int8()), -1)
    known = (number >= 0) & (time_us > s.BEFORE_TRACE_US) & (time_us < s.AFTER_TRACE_US)
    return number[known], time_us[known], said[known]


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
    while (searched := low < high).any():  # all events at once: the rows from ``high`` on did not begin earlier
        middle = (low + high) // 2
        began = windows.start_us[np.where(searched, middle, 0)] < time_us
        low, high = np.where(searched & began, middle + 1, low), np.where(searched & ~began, middle, high)
    return low - 1
