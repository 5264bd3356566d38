"""Features after the last window of many whole histories; no state is kept."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.windows import Cell, Windows
from reclaim.features.fold.batch import fold_columns
from reclaim.features.fold.related import Tasks, fold_everyone
from reclaim.features.fold.task_read import write
from reclaim.features.fold.task_record import STATE
from reclaim.features.fold.task_update import N_LEVELS, publish_to_group, take
from reclaim.features.registry import FEATURE_NAMES, SIGNALS

_TASKS_AT_ONCE: Final = 2_048
"""Tasks whose columns are made ready before they are folded: some MB, which a core's own cache nearly holds."""
_TASK_BITS: Final = 32
"""Of a number that orders tasks by their first slot of the clock, then by their place."""


def features_of_histories(
    windows: Windows,
    cell: Cell = Cell(),  # noqa: B008 - frozen
    threads: int = 1,
) -> NDArray[np.float32]:
    """Return what a fresh ``FeatureState``, fed slot by slot of the clock, gives after the last window of each task.

    Parameters
    ----------
    windows : Windows
        Sorted by task, then time. As ``FeatureState`` does it, one that ends no later than one before it changes
        nothing, and all tasks of a collection have the owner that the earliest of them tells of.
    cell : Cell
    threads : int
        The numbers do not depend on it.

    Returns
    -------
    x : float32, shape (n_tasks, n_features)
        Tasks in the order of ``windows``.
    """
    starts = windows.task_starts()
    n, n_tasks = len(windows), len(starts) - 1
    x = np.empty((n_tasks, len(FEATURE_NAMES)), np.float32)
    moment, share = np.empty(n, np.int32), np.empty((n, len(SIGNALS)), np.int32)
    largest = np.array(cell.largest_machine)

    def fold(part: int, parts: int) -> None:
        state = np.zeros(2, STATE)
        for first in range(part * _TASKS_AT_ONCE, n_tasks, parts * _TASKS_AT_ONCE):
            mine = starts[first : first + _TASKS_AT_ONCE + 1]
            rows = slice(mine[0], mine[-1])
            _fold_to_last(
                state, mine - mine[0], fold_columns(windows.take(rows)), largest, cell.monday_us,
                x[first : first + _TASKS_AT_ONCE], moment[rows], share[rows], np.empty(N_LEVELS),
            )  # fmt: skip

    in_parts(fold, n, threads)
    fold_everyone(_tasks(windows, starts, moment), moment, share, x, threads, last_alone=True)
    return x


def _tasks(windows: Windows, starts: NDArray[np.int64], moment: NDArray[np.int32]) -> Tasks:
    """Return the tasks, all of a collection with the owner that ``KinState`` is told of first."""
    first = starts[:-1]
    collection = windows.collection_id[first]
    number, known = pd.factorize(collection)
    told = (moment[first].astype(np.int64) << _TASK_BITS) + np.arange(len(first))
    earliest = np.full(len(known), np.iinfo(np.int64).max)
    np.minimum.at(earliest, number, told)
    owner = first[(earliest & (2**_TASK_BITS - 1))[number]]
    return Tasks(collection, windows.user[owner], windows.name[owner], first, starts[1:])


@numba.njit(**LENT)
def _fold_to_last(
    state: Any, starts: Any, columns: Any, largest: Any, monday_us: int, out: Any, moment: Any, share: Any,
    shape: Any,
) -> None:  # fmt: skip
    for task in range(len(starts) - 1):
        state[0] = state[1]  # a blank one
        s = state[0]
        for i in range(starts[task], starts[task + 1]):
            taken = s.count == 0 or columns.end_us[i] > s.end_us
            if taken:
                take(s, columns, shape, i)
            publish_to_group(s.end_us, taken, columns, moment, share, i)
        write(s, columns, starts[task + 1] - 1, largest, monday_us, out, task)
