"""Copies of a cell's state for its readers, each of one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows
from reclaim.serving.cell.task_record import Ids, last_windows

if TYPE_CHECKING:
    from reclaim.serving.cell.following import Prices
    from reclaim.serving.models.scorer import Scorer, Scores


@dataclass(frozen=True)
class Known:
    """Copies of the state of ``n`` tasks for readers, each task at one moment.

    Attributes
    ----------
    scorer : Scorer
        Model of all scores.
    prices : Prices
        Of the moment.
    key : int64, shape (n, 2)
    there : bool, shape (n,)
        Whether the task is tracked.
    task : structured array of ``TASK``, shape (n,)
    scores : Scores
        Of the requested parts; the others have a length of 0 in every axis but the first.
    x : float32, shape (n, n_features), or None
        Features after the last window, where they were requested.
    opted_out : bool, shape (n,)
    clock_us, present_us : int
        End of the latest window; the time that staleness is judged at. -1 before the first window.
    tracked : int
    """

    scorer: Scorer
    prices: Prices
    key: Ids
    there: NDArray[np.bool_]
    task: NDArray[Any]
    scores: Scores
    x: NDArray[np.float32] | None
    opted_out: NDArray[np.bool_]
    clock_us: int
    present_us: int
    tracked: int

    @property
    def last(self) -> Windows:
        """The last windows, of tasks that have one."""
        return last_windows(self.key, self.task)
