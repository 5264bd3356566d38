"""Fills in what windows do not say of their tasks with what was told before, record by record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.windows import Windows
from reclaim.features.arrays import lent
from reclaim.features.compiled import LENT
from reclaim.serving.tasks import NOBODY

Ids = NDArray[np.int64]

_NOBODY = np.array([NOBODY])
_FILLED: Final = (s.SCHEDULED_US, s.MACHINE_ID, "user", "name", "limit", s.TIER, s.SCHEDULING_CLASS)
"""Fields of windows that may be left open, beside ``in_alloc``."""


def filled(windows: Windows, in_alloc: NDArray[np.int8], slot: Ids, tasks: NDArray[Any]) -> Windows:
    """Return windows with what was told of their tasks before, where they do not say it themselves.

    Before is the last window of the task in the same call that ends earlier, and what is kept of it otherwise; so it
    makes no difference how windows are cut into calls.

    Parameters
    ----------
    windows : Windows
        ``n`` rows. Facts of -1, and a limit of NaN, are not told; a limit that nobody told stays NaN.
    in_alloc : int8, shape (n,)
        -1 where it is not told.
    slot : int64, shape (n,)
        The task of each; of those beyond ``tasks`` nothing is kept.
    tasks : structured array of ``tasks.TASK``
        What is kept.
    """
    w = windows
    order = np.arange(len(slot)) if (np.diff(slot) > 0).all() else np.lexsort((w.end_us, slot))
    told = lent(w.start_us, *(getattr(w, name) for name in _FILLED), in_alloc)
    out = replace(
        w, **{name: np.empty_like(getattr(w, name)) for name in _FILLED}, in_alloc=np.empty(len(slot), np.bool_)
    )
    _fill(order, slot, tasks, _NOBODY, told, (*(getattr(out, name) for name in _FILLED), out.in_alloc))
    return out


@numba.njit(**LENT)
def _fill(order: Any, slot: Any, tasks: Any, nobody: Any, told: Any, out: Any) -> None:
    start_us, scheduled_us, machine, user, name, limit, tier, scheduling_class, in_alloc = told
    to_scheduled, to_machine, to_user, to_name, to_limit, to_tier, to_class, to_alloc = out
    limited = False  # whether a window of the task told a limit
    for k in range(len(order)):
        i = order[k]
        task = tasks[slot[i]] if slot[i] < len(tasks) else nobody[0]
        if k > 0 and slot[order[k - 1]] == slot[i]:
            p = order[k - 1]
            run, place, rank, level, alloc = to_scheduled[p], to_machine[p], to_tier[p], to_class[p], to_alloc[p]
        else:
            p = -1
            run, place, rank = task.scheduled_us, task.machine, task.tier
            level, alloc = task.scheduling_class, task.in_alloc
            limited = False
        to_scheduled[i] = scheduled_us[i] if scheduled_us[i] >= 0 else run
        to_machine[i] = machine[i] if machine[i] >= 0 else place
        to_tier[i] = tier[i] if tier[i] >= 0 else rank
        to_class[i] = scheduling_class[i] if scheduling_class[i] >= 0 else level
        to_alloc[i] = in_alloc[i] > 0 if in_alloc[i] >= 0 else alloc
        to_user[i] = task.user if task.user >= 0 else user[i]
        to_name[i] = task.name if task.name >= 0 else name[i]
        tells = limit[i, 0] == limit[i, 0]  # both, or none
        limited |= tells
        earlier = start_us[i] < task.limit_us and task.granted[0] == task.granted[0]  # another was in force then
        for r in range(limit.shape[1]):
            if tells:
                to_limit[i, r] = limit[i, r]
            elif limited:
                to_limit[i, r] = to_limit[p, r]
            else:
                to_limit[i, r] = task.granted[r] if earlier else task.limit[r]
