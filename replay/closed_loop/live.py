"""Reservations of the closed loop from an estimator that sees the cell's own windows as they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows
from reclaim.replay.closed_loop.records import RUNNING
from reclaim.training.estimators.base import Estimator


class Live:
    """Feeds an estimator as time passes, as a service does, in place of the answers to the trace on the tape.

    The estimator sees runs as they wait, begin again or are cut off in the cell. Answers to undisturbed tasks equal
    those of the tape to the bit.

    Parameters
    ----------
    estimator : Estimator
        With its margin and guards; fresh, or fed with the windows before the period.
    windows : Windows
        The recorded windows of the tape, row for row.
    tape : structured array of ``records.TAPE``, shape (n_rows,)
    """

    def __init__(self, estimator: Estimator, windows: Windows, tape: NDArray[Any]) -> None:
        self.estimator = estimator
        self._windows = windows
        self._tape = tape
        self._slot = windows.task_numbers()
        self._fed_to: NDArray[np.int64] | None = None
        self._placed: NDArray[np.int64] | None = None
        self._answer = np.zeros((0, 0))

    def answer(self, runs: NDArray[Any], now_us: int) -> None:
        """Feed the estimator the windows that ended since the last call, and set the reservations to its answers.

        Parameters
        ----------
        runs : structured array of ``records.RUN``, shape (n_runs,)
            Already at the windows of now; their reservations are changed.
        now_us : int
            No later window is fed.
        """
        if self._fed_to is None or self._placed is None:
            self._fed_to, self._placed = runs["first"].copy(), np.full(len(runs), -1, np.int64)
            self._answer = np.full((len(runs), self._tape["limit"].shape[1]), np.nan)
        running = np.flatnonzero(runs["state"] == RUNNING)
        started = running[self._placed[running] != runs["placed_us"][running]]
        self._placed[started] = runs["placed_us"][started]
        self._fed_to[started] = np.where(
            runs["service"][started],
            np.maximum(self._fed_to[started], runs["cursor"][started]),
            runs["first"][started],
        )
        self._answer[started] = np.nan
        done = runs["cursor"][running] - self._fed_to[running]
        run = np.repeat(running, done)
        if len(run):
            row = self._fed_to[run] + np.arange(len(run)) - np.repeat(np.cumsum(done) - done, done)
            windows = self._in_the_cell(runs, run, row)
            late = windows.end_us > now_us
            assert not late.any(), "a window was fed before it ended"
            answer = self.estimator.update(self._slot[row], windows).reservation
            self._answer[run] = answer  # of several windows of a run the last one stays
            self._fed_to[running] = runs["cursor"][running]
        limit = runs["limit"][running]
        runs["reservation"][running] = np.fmin(
            np.where(np.isnan(self._answer[running]), limit, self._answer[running]), limit
        )

    def _in_the_cell(self, runs: NDArray[Any], run: NDArray[np.int64], row: NDArray[np.int64]) -> Windows:
        """Return recorded windows at the times at which their runs had them in this cell."""
        windows = self._windows.take(row)
        began_us = np.where(
            runs["service"][run], runs["arrival_us"][run], runs["placed_us"][run] - runs["offset_us"][run]
        )
        start_us = began_us + self._tape["from_us"][row]
        end_us = start_us + windows.end_us - windows.start_us
        scheduled_us = np.where(runs["carried"][run], windows.scheduled_us, runs["placed_us"][run])
        return replace(windows, start_us=start_us, end_us=end_us, scheduled_us=scheduled_us)
