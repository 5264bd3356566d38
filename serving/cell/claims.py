"""Counts of tasks whose windows were refused recently, for their time or as too late, and of those taken."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import is_first, room_for

Ids = NDArray[np.int64]

PERIOD_S: Final = 600.0
"""Tasks are counted for one to two of these (s): all tasks of a cell send in two windows."""
MOST_CLAIMS: Final = 10_000
"""Number of tasks whose common time is believed in a cell of any size: no machine or rack has as many."""


class Claims:
    """Counts the tasks whose windows were refused recently, for either reason, and taken, each once; from any thread.

    Parameters
    ----------
    passed_s : callable
        Monotonic seconds.
    """

    def __init__(self, passed_s: Callable[[], float]) -> None:
        self._passed_s = passed_s
        self._began_s = passed_s()
        # of this period and of the one before; a task is in one of them
        self._refused: list[dict[tuple[int, ...], tuple[int, int]]] = [{}, {}]
        self._taken = [np.zeros(0, np.bool_), np.zeros(0, np.bool_)]
        self._too_late = [np.zeros(0, np.bool_), np.zeros(0, np.bool_)]
        self._since_s: float | None = None
        self._lock = threading.RLock()

    @property
    def refused(self) -> int:
        """Number of tasks that were refused as in the future or before any cell, four times ``MOST_CLAIMS`` at most."""
        with self._lock:
            self._turn()
            return sum(len(claims) for claims in self._refused)

    @property
    def taken(self) -> int:
        """Number of tasks of which a window was taken."""
        with self._lock:
            self._turn()
            return _count(self._taken)

    @property
    def too_late(self) -> int:
        """Number of tasks that sent a window too late, and had none taken since."""
        with self._lock:
            self._turn()
            return _count(self._too_late)

    @property
    def refused_share(self) -> float:
        """Share of the tasks refused for their time among these and those taken; NaN where there are none."""
        refused, taken = self.refused, self.taken
        return refused / (refused + taken) if refused + taken else math.nan

    @property
    def majority(self) -> bool:
        """True if more tasks were refused for their time than had a window taken."""
        return self.refused > self.taken

    @property
    def lasting(self) -> bool:
        """True if that has been so for a whole period without a break."""
        with self._lock:
            self._judge()
            return self._since_s is not None and self._passed_s() - self._since_s >= PERIOD_S

    def take(self, slot: Ids) -> None:
        """Record the slots of tasks whose windows were taken."""
        with self._lock:
            self._turn()
            self._taken = _marked(self._taken, slot)
            for marks in self._too_late:
                marks[slot[slot < len(marks)]] = False
            if self._since_s is not None:  # seldom, for it counts all tasks
                self._judge()

    def miss(self, slot: Ids) -> None:
        """Record the slots of tasks whose windows came too late."""
        with self._lock:
            self._turn()
            self._too_late = _marked(self._too_late, slot)

    def refuse(self, key: Ids, end_us: Ids, had_us: Ids) -> None:
        """Record windows refused for their time; the latest call about a task stays, and of it the latest window.

        Parameters
        ----------
        key : int64, shape (n, 2)
            Collection and instance index.
        end_us, had_us : int64, shape (n,)
            Its end, and that of the last window taken of its task, -1 without one.
        """
        most = 2 * MOST_CLAIMS  # of some tasks no window was taken before, and their claims do not count
        order = np.lexsort((-end_us, key[:, 1], key[:, 0]))
        rows = order[is_first(*key[order].T)][:most]
        with self._lock:
            self._turn()
            now, before = self._refused
            ends = zip(end_us[rows].tolist(), had_us[rows].tolist(), strict=True)
            for task, claim in zip(map(tuple, key[rows].tolist()), ends, strict=True):
                before.pop(task, None)
                if len(now) < most or task in now:
                    now[task] = claim
            self._judge()

    def claims(self) -> tuple[Ids, Ids, Ids]:
        """Return key, end_us and had_us of the refused windows, as ``refuse`` was given them."""
        with self._lock:
            self._turn()
            both = self._refused[0] | self._refused[1]
            ends = np.array(list(both.values()), np.int64).reshape(-1, 2)
            return np.array(list(both), np.int64).reshape(-1, 2), ends[:, 0], ends[:, 1]

    def clear(self) -> None:
        """Forget the refusals for their time: the clock has moved."""
        with self._lock:
            self._refused, self._since_s = [{}, {}], None

    def _judge(self) -> None:
        """Note since when more are refused than taken; not at all where they no longer are."""
        if not self.majority:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = self._passed_s()

    def _turn(self) -> None:
        """Begin a new period where the current one is over."""
        periods = int((self._passed_s() - self._began_s) // PERIOD_S)
        for _ in range(min(periods, 2)):
            self._refused = [{}, self._refused[0]]
            self._taken = [np.zeros_like(self._taken[0]), self._taken[0]]
            self._too_late = [np.zeros_like(self._too_late[0]), self._too_late[0]]
        self._began_s += periods * PERIOD_S


def _marked(periods: list[NDArray[np.bool_]], slot: Ids) -> list[NDArray[np.bool_]]:
    """Return the marks of this period and of the one before, with some slots marked in this one alone."""
    need = int(slot.max(initial=-1)) + 1
    now, before = (room_for(marks, need) for marks in periods)
    now[slot], before[slot] = True, False
    return [now, before]


def _count(periods: list[NDArray[np.bool_]]) -> int:
    return sum(int(np.count_nonzero(marks)) for marks in periods)
