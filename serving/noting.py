"""Keeps what windows tell of their tasks, record by record: column by column, as numpy does it, takes far longer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.features.arrays import raw
from reclaim.features.compiled import LENT
from reclaim.features.kin import in_parts

if TYPE_CHECKING:
    from reclaim.serving.engine import Scores
    from reclaim.serving.tasks import Taken

Ids = NDArray[np.int64]


def keep(
    taken: Taken, scores: Scores | None, tasks: NDArray[Any], x: NDArray[np.float32], into: Scores | None, threads: int
) -> None:
    """Keep of touched tasks the facts, the last windows, the features and, where there are any, the scores.

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
    _count(tasks, taken.slot, taken.windows.start_us)
    w, k = taken.last, len(taken.touched)
    columns = (
        w.start_us, w.end_us, w.tier, w.scheduling_class, w.in_alloc, w.machine_id, w.user, w.name, w.limit,
        w.scheduled_us, w.usage, w.percentiles,
    )  # fmt: skip
    rows: list[tuple[NDArray[Any], NDArray[Any]]] = [(x, taken.x)]
    if scores is not None and into is not None:
        rows += [(into.bare, scores.bare), (into.quantiles, scores.quantiles), (into.oom, scores.oom)]
    as_bytes = [(_bytes_of(old), _bytes_of(np.ascontiguousarray(new, old.dtype))) for old, new in rows]

    def run(part: int, parts: int) -> None:
        low, high = part * k // parts, (part + 1) * k // parts
        _note(tasks, taken.touched, taken.row, columns, low, high)
        at = _run_of(taken.touched[low:high])
        for old, new in as_bytes:
            old[at] = new[low:high]

    in_parts(run, k, threads)


def copy_rows(records: NDArray[Any], rows: Ids) -> NDArray[Any]:
    """Return copies of rows of a contiguous array, made as bytes: numpy copies records field by field."""
    out = np.empty((len(rows), *records.shape[1:]), records.dtype)
    _bytes_of(out)[:] = _bytes_of(records)[_run_of(rows)]
    return out


def _bytes_of(records: NDArray[Any]) -> NDArray[np.uint8]:
    return raw(records).reshape(len(records), records.itemsize * math.prod(records.shape[1:]))


def _run_of(rows: Ids) -> Ids | slice:
    """Return rows that follow one another as a slice, which is copied as one."""
    n = len(rows)
    if n and rows[-1] - rows[0] == n - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[0]) + n)
    return rows


@numba.njit(**LENT)
def _count(tasks: Any, slot: Any, start_us: Any) -> None:
    for i in range(len(slot)):
        task = tasks[slot[i]]
        if task.windows == 0 or start_us[i] < task.first_us:
            task.first_us = start_us[i]
        task.windows += 1


@numba.njit(**LENT)
def _note(tasks: Any, touched: Any, row: Any, columns: Any, low: int, high: int) -> None:
    (
        start_us, end_us, tier, scheduling_class, in_alloc, machine, user, name, limit, scheduled_us, usage, percentiles
    ) = columns  # fmt: skip
    for k in range(low, high):
        if row[k] < 0:
            continue
        task = tasks[touched[k]]
        task.start_us, task.end_us, task.run_us = start_us[k], end_us[k], scheduled_us[k]
        task.tier, task.scheduling_class, task.in_alloc = tier[k], scheduling_class[k], in_alloc[k]
        task.machine, task.user, task.name = machine[k], user[k], name[k]
        task.scheduled_us = max(task.scheduled_us, scheduled_us[k])
        newer = start_us[k] >= task.limit_us
        for r in range(limit.shape[1]):
            task.granted[r] = limit[k, r]
            if newer:
                task.limit[r] = limit[k, r]
        if newer:
            task.limit_us = start_us[k]
        for c in range(usage.shape[1]):
            task.usage[c] = usage[k, c]
        for p in range(percentiles.shape[1]):
            task.percentiles[p] = percentiles[k, p]
