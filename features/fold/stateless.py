"""Features after the last window of many whole histories; no state is kept."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.windows import Cell, Windows
from reclaim.features.fold.batch import fold_columns
from reclaim.features.fold.collection_ooms import fold_collection_ooms
from reclaim.features.fold.task_read import write
from reclaim.features.fold.task_record import STATE
from reclaim.features.fold.task_update import N_LEVELS, publish, take
from reclaim.features.registry import N_FEATURES

_TASKS_AT_ONCE: Final = 2_048
"""Number of tasks whose columns are prepared before they are folded: some MB, which nearly fit a core's own cache."""


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
        nothing.
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
    x = np.empty((n_tasks, N_FEATURES), np.float32)
    moment, died = np.empty(n, np.int32), np.empty(n, np.int32)
    largest = np.array(cell.largest_machine)

    def fold(part: int, parts: int) -> None:
        state = np.zeros(2, STATE)
        for first in range(part * _TASKS_AT_ONCE, n_tasks, parts * _TASKS_AT_ONCE):
            mine = starts[first : first + _TASKS_AT_ONCE + 1]
            rows = slice(mine[0], mine[-1])
            _fold_to_last(
                state, mine - mine[0], fold_columns(windows.take(rows)), largest, cell.monday_us,
                x[first : first + _TASKS_AT_ONCE], moment[rows], died[rows], np.empty(N_LEVELS),
            )  # fmt: skip

    in_parts(fold, n, threads)
    fold_collection_ooms(windows.collection_id, starts, moment, died, x)
    return x


@numba.njit(**LENT)
def _fold_to_last(
    state: Any,  # (2,) STATE: one to work in, one blank
    starts: Any,  # (n_tasks + 1,) int64
    columns: Any,  # FoldColumns of n rows
    largest: Any,  # (R,) float64
    monday_us: int,
    out: Any,  # (n_tasks, n_features) float32, written
    moment: Any,  # (n,) int32, written
    died: Any,  # (n,) int32, written
    shape: Any,  # (N_LEVELS,) float64, written
) -> None:
    for task in range(len(starts) - 1):
        state[0] = state[1]  # a blank one
        s = state[0]
        for i in range(starts[task], starts[task + 1]):
            taken, ooms = s.count == 0 or columns.end_us[i] > s.end_us, s.ooms
            if taken:
                take(s, columns, shape, i)
            publish(s, ooms, taken, moment, died, i)
        write(s, columns, starts[task + 1] - 1, largest, monday_us, out, task)
