"""An estimator at work in the closed loop: fed what the cell's tasks just did, it says what they get next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows
from reclaim.replay.closedloop_state import RUNNING
from reclaim.training.estimators.base import Estimator


class Live:
    """Asks an estimator as time passes, as a service would, where the tape says what it answered to the trace itself.

    It sees what really happens in the cell: runs that wait, begin again, or are cut off. Answers to undisturbed tasks
    are those of the tape, to the bit.

    Parameters
    ----------
    estimator : Estimator
        With its margin and guards, fresh, or having seen what came before.
    windows : Windows
        The recorded windows of the tape, row for row.
    tape : structured array of ``closedloop_state.TAPE``, shape (n_rows,)
    """

    def __init__(self, estimator: Estimator, windows: Windows, tape: NDArray[Any]) -> None:
        self.estimator = estimator
        self._windows = windows
        self._tape = tape
        self._slot = windows.task_numbers()
        self._told: NDArray[np.int64] | None = None
        self._placed: NDArray[np.int64] | None = None
        self._answer = np.zeros((0, 0))

    def answer(self, runs: NDArray[Any], now_us: int) -> None:
        """Tell the estimator what has been measured since the last time, and put its answers in force.

        Parameters
        ----------
        runs : structured array of ``closedloop_state.RUN``, shape (n_runs,)
            Already at the windows of now; their reservations are changed.
        now_us : int
            No window is told before it has ended.
        """
        if self._told is None or self._placed is None:
            self._told, self._placed = runs["first"].copy(), np.full(len(runs), -1, np.int64)
            self._answer = np.full((len(runs), self._tape["limit"].shape[1]), np.nan)
        running = np.flatnonzero(runs["state"] == RUNNING)
        anew = running[self._placed[running] != runs["placed_us"][running]]
        self._placed[anew] = runs["placed_us"][anew]
        self._told[anew] = np.where(
            runs["service"][anew], np.maximum(self._told[anew], runs["cursor"][anew]), runs["first"][anew]
        )
        self._answer[anew] = np.nan
        done = runs["cursor"][running] - self._told[running]
        who = np.repeat(running, done)
        if len(who):
            row = self._told[who] + np.arange(len(who)) - np.repeat(np.cumsum(done) - done, done)
            seen = self._as_lived(runs, who, row)
            late = seen.end_us > now_us
            assert not late.any(), "a window was told before it ended"
            said = self.estimator.update(self._slot[row], seen).reservation
            self._answer[who] = said  # of several windows of a run the last one stays
            self._told[running] = runs["cursor"][running]
        limit = runs["limit"][running]
        runs["reservation"][running] = np.fmin(
            np.where(np.isnan(self._answer[running]), limit, self._answer[running]), limit
        )

    def _as_lived(self, runs: NDArray[Any], who: NDArray[np.int64], row: NDArray[np.int64]) -> Windows:
        """Return the windows as they were lived: at the times they had here, of the run that was placed here."""
        seen = self._windows.take(row)
        began = np.where(runs["service"][who], runs["arrival_us"][who], runs["placed_us"][who] - runs["offset_us"][who])
        start_us = began + self._tape["from_us"][row]
        end_us = start_us + seen.end_us - seen.start_us
        scheduled_us = np.where(runs["carried"][who], seen.scheduled_us, runs["placed_us"][who])
        return replace(seen, start_us=start_us, end_us=end_us, scheduled_us=scheduled_us)
