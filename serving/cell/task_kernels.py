"""Compiled updates of task records, row by row: columnar numpy takes far longer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.arrays import lent, raw
from reclaim.data.core.jit import LENT, copy_row
from reclaim.data.core.parallel import in_parts
from reclaim.data.windows import Windows
from reclaim.serving.cell.task_record import LAST, UNKNOWN_TASK, Ids, LastColumns
from reclaim.serving.wire.rows import FAILED_OOM, FAILED_US

if TYPE_CHECKING:
    from reclaim.serving.cell.task_record import Taken
    from reclaim.serving.models.scorer import Scores


def keep(
    taken: Taken, scores: Scores | None, tasks: NDArray[Any], x: NDArray[np.float32], into: Scores | None, threads: int
) -> None:
    """Store facts, last windows, features and scores, if any, of the touched tasks.

    Parameters
    ----------
    taken : Taken
    scores : Scores or None
        ``k`` rows.
    tasks : structured array of ``TASK``
    x : float32, shape (n, n_features)
    into : Scores or None
        ``n`` rows.
    threads : int
    """
    windows = taken.windows
    limit = np.ascontiguousarray(windows.limit)
    _count(tasks, taken.slot, windows.start_us, windows.end_us, windows.scheduled_us, limit)
    w, k = taken.last, len(taken.touched)
    columns = LastColumns(*(getattr(w, name) for name in LAST))
    rows: list[tuple[NDArray[Any], NDArray[Any]]] = [(x, taken.x)]
    if scores is not None and into is not None:
        rows += list(zip(into.kept, scores.kept, strict=True))
    as_bytes = [(_bytes_of(old), _bytes_of(np.ascontiguousarray(new, old.dtype))) for old, new in rows]

    def run(part: int, parts: int) -> None:
        low, high = part * k // parts, (part + 1) * k // parts
        _note(tasks, taken.touched, taken.row, columns, low, high)
        at = run_of(taken.touched[low:high])
        for old, new in as_bytes:
            old[at] = new[low:high]

    in_parts(run, k, threads)


def copy_rows(records: NDArray[Any], rows: Ids) -> NDArray[Any]:
    """Return copies of rows of a contiguous array, made as bytes: numpy copies records field by field."""
    out = np.empty((len(rows), *records.shape[1:]), records.dtype)
    _bytes_of(out)[:] = _bytes_of(records)[run_of(rows)]
    return out


def _bytes_of(records: NDArray[Any]) -> NDArray[np.uint8]:
    return raw(records).reshape(len(records), records.itemsize * math.prod(records.shape[1:]))


def run_of(rows: Ids) -> Ids | slice:
    """Return rows that follow one another as a slice, which is copied as one."""
    n = len(rows)
    if n and rows[-1] - rows[0] == n - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[0]) + n)
    return rows


@numba.njit(**LENT)
def _count(
    tasks: Any,  # (n_tasks,) TASK
    slot: Any,  # (n,) int64
    start_us: Any,  # (n,) int64, in time order
    end_us: Any,  # (n,) int64
    scheduled_us: Any,  # (n,) int64
    limit: Any,  # (n, R) float64
) -> None:
    """Count windows, and store the runs and limits that they change: a limit that stays keeps its start."""
    for i in range(len(slot)):
        task = tasks[slot[i]]
        if task.windows == 0 or start_us[i] < task.first_us:
            task.first_us = start_us[i]
        task.windows += 1
        if end_us[i] <= task.end_us:  # a late one
            continue
        task.scheduled_us = max(task.scheduled_us, scheduled_us[i])
        if _replaces(limit[i], start_us[i], task.limit, task.limit_us):
            task.limit_us = start_us[i]
            for r in range(limit.shape[1]):
                task.limit[r] = limit[i, r]


@numba.njit(**LENT)
def _replaces(given: Any, start_us: int, now: Any, since_us: int) -> bool:
    """Return whether the limit of a window, shape (R,), replaces one that has held since a time."""
    differs = False
    for r in range(len(now)):
        differs = differs or given[r] != now[r]
    return differs and start_us >= since_us


@numba.njit(**LENT)
def _note(
    tasks: Any,  # (n,) TASK
    touched: Any,  # (k,) int64
    row: Any,  # (k,) int64
    columns: Any,  # LastColumns of k rows
    low: int,
    high: int,
) -> None:
    for k in range(low, high):
        if row[k] < 0:
            continue
        copy_row(columns, k, tasks, touched[k])


_UNKNOWN = np.array([UNKNOWN_TASK])
_FILLED: Final = (
    s.SCHEDULED_US, s.MACHINE_ID, "user", "name", "limit", s.TIER, s.SCHEDULING_CLASS, FAILED_US, FAILED_OOM
)  # fmt: skip
"""Fields of windows that may be missing, in addition to ``in_alloc``."""


def filled(windows: Windows, in_alloc: NDArray[np.int8], slot: Ids, tasks: NDArray[Any]) -> Windows:
    """Return windows with missing facts filled in from earlier windows and facts of their tasks.

    The source is the record of the task, as the windows before it in the same call change it; so the result does not
    depend on how windows are cut into calls.

    Parameters
    ----------
    windows : Windows
        ``n`` rows. Facts of -1, and limits of NaN, are missing; a limit that is unknown everywhere stays NaN.
    in_alloc : int8, shape (n,)
        -1 where it is missing.
    slot : int64, shape (n,)
        Slot of each window's task; those beyond ``tasks`` have no record.
    tasks : structured array of ``TASK``
    """
    w = windows
    order = np.arange(len(slot)) if (np.diff(slot) > 0).all() else np.lexsort((w.end_us, slot))
    given = lent(w.start_us, w.end_us, *(getattr(w, name) for name in _FILLED), in_alloc)
    out = replace(
        w, **{name: np.empty_like(getattr(w, name)) for name in _FILLED}, in_alloc=np.empty(len(slot), np.bool_)
    )
    columns = (*(getattr(out, name) for name in _FILLED), out.in_alloc)
    _fill(order, slot, tasks, _UNKNOWN, given, columns, np.empty((2, w.limit.shape[1])))
    return out


@numba.njit(**LENT)
def _fill(
    order: Any,  # (n,) int64
    slot: Any,  # (n,) int64
    tasks: Any,  # (n_tasks,) TASK
    unknown: Any,  # (1,) TASK
    given: Any,  # columns of n rows
    out: Any,  # columns of n rows
    limits: Any,  # (2, R) float64, to work in
) -> None:
    (
        start_us, end_us, scheduled_us, machine, user, name, limit, tier, scheduling_class, failed_us, failed_oom,
        in_alloc,
    ) = given  # fmt: skip
    to_scheduled, to_machine, to_user, to_name, to_limit, to_tier, to_class, to_failed, to_oom, to_alloc = out
    now, granted = limits[0], limits[1]  # current limit, and that of the last window
    for k in range(len(order)):
        i = order[k]
        task = tasks[slot[i]] if slot[i] < len(tasks) else unknown[0]
        if k == 0 or slot[order[k - 1]] != slot[i]:
            latest, run, place, owner, called = task.scheduled_us, task.run_us, task.machine, task.user, task.name
            rank, level, alloc, since_us = task.tier, task.scheduling_class, task.in_alloc, task.limit_us
            died_us, died_oom = task.failed_us, task.failed_oom
            for r in range(len(now)):
                now[r], granted[r] = task.limit[r], task.granted[r]
        begun = latest if latest < end_us[i] else run  # a window of an earlier run, whose last window is known
        to_scheduled[i] = scheduled_us[i] if scheduled_us[i] >= 0 else begun if begun < end_us[i] else -1
        to_machine[i] = machine[i] if machine[i] >= 0 else place
        to_tier[i] = tier[i] if tier[i] >= 0 else rank
        to_class[i] = scheduling_class[i] if scheduling_class[i] >= 0 else level
        to_alloc[i] = in_alloc[i] > 0 if in_alloc[i] >= 0 else alloc
        to_failed[i], to_oom[i] = died_us, died_oom
        if failed_us[i] > died_us:
            to_failed[i], to_oom[i] = failed_us[i], failed_oom[i]
        to_user[i] = owner if owner >= 0 else user[i]
        to_name[i] = called if called >= 0 else name[i]
        earlier = start_us[i] < since_us and granted[0] == granted[0]  # another limit was current then
        for r in range(limit.shape[1]):
            if limit[i, 0] == limit[i, 0]:  # both, or none
                to_limit[i, r] = limit[i, r]
            else:
                to_limit[i, r] = granted[r] if earlier else now[r]
        if end_us[i] <= task.end_us:  # a late window changes no fact
            continue
        latest, run = max(latest, to_scheduled[i]), to_scheduled[i]
        place, owner, called = to_machine[i], to_user[i], to_name[i]
        died_us, died_oom = to_failed[i], to_oom[i]
        rank, level, alloc = to_tier[i], to_class[i], to_alloc[i]
        replaces = _replaces(to_limit[i], start_us[i], now, since_us)
        since_us = start_us[i] if replaces else since_us
        for r in range(len(now)):
            granted[r] = to_limit[i, r]
            now[r] = granted[r] if replaces else now[r]
