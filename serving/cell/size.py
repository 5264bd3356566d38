"""Keeps the age of a cell and the mean limit of its tasks, for models that were trained on other cells."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.schema import RESOURCES

_APART: Final = 1.5
"""Factor by which the mean limit must differ from the one in use: every task is scored again when it changes."""


class CellSize:
    """The first window, and the mean limit by resource, updated once an hour, rounded to a power of two.

    Tasks inside an alloc instance are left out of the mean, as in a feature set: the alloc instance has the limit.

    The age belongs to the cell: models come and go, and a young cell is one of little history. The mean limit only
    matters up to a factor: it says which tasks are much larger or smaller than others. Nothing here depends on the
    machine's clock: the same writes in the same order end in the same bits.
    """

    def __init__(self) -> None:
        self.memory = np.concatenate([[-1.0, -1.0], np.full(len(RESOURCES), np.nan)])
        """Begin of the cell in µs, exact up to 285 years (2^53), the last hour looked at, and the mean limits."""

    @property
    def begun_us(self) -> int:
        """The latest end in the first write; -1 before."""
        return int(self.memory[0])

    @property
    def mean_limit(self) -> tuple[float, ...]:
        """The mean limits in use; NaN where no task has a limit yet."""
        return tuple(self.memory[2:].tolist())

    def recall(self, memory: NDArray[np.float64]) -> None:
        """Go on from a copy of ``memory``."""
        self.memory = np.array(memory, np.float64)

    def reach(
        self, end_us: int, limit: NDArray[np.float64], tasks: NDArray[Any], written: NDArray[np.int64]
    ) -> tuple[float, ...] | None:
        """Return the mean limits where a write of a new hour changes them; None where they stay.

        Parameters
        ----------
        end_us : int
            Latest end of the write's windows.
        limit : float64, shape (n, n_resources)
            Of the tasks that were written, outside alloc instances.
        tasks : structured array of ``task_record.TASK``
            All that was kept before.
        written : int64, shape (k,)
            Slots of the tasks that were written, which count by their new limits alone.
        """
        if self.memory[0] < 0:
            self.memory[0] = end_us
        hour, of_limits = float(end_us // s.HOUR_US), self.memory[2:]
        if hour <= self.memory[1] and not (np.isnan(of_limits) & (limit > 0).any(axis=0)).any():
            return None
        self.memory[1] = max(hour, self.memory[1])
        before, changed = of_limits.copy(), False
        others = (tasks[s.END_US] >= 0) & ~tasks["in_alloc"]
        others[written] = False
        kept = tasks["limit"][others]
        for r, of in enumerate(np.concatenate([kept, limit]).T):
            granted = of[of > 0]
            if len(granted) == 0:
                continue
            mean = float(granted.mean())
            if math.isnan(before[r]) or not 1 / _APART < mean / before[r] < _APART:
                of_limits[r] = 2.0 ** round(math.log2(mean))
                changed |= of_limits[r] != before[r]
        return self.mean_limit if changed else None
