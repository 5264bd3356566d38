"""Clock of the cell: this machine's time, or the end of the latest window, which no single task can move far."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from reclaim.serving.settings import ServingSettings

_US: Final = 1_000_000
_ENOUGH_TASKS: Final = 10_000
"""Number of tasks whose common time is believed in a cell of any size: no machine or rack has as many."""


class CellClock:
    """Runs from the end of the latest window, or is this machine's clock.

    Parameters
    ----------
    settings : ServingSettings
    now_us : callable
        This machine's time, in µs since 1970.
    passed_s : callable
        Monotonic seconds.

    Attributes
    ----------
    latest_us : int
        End of the latest window taken; -1 before the first.
    """

    def __init__(
        self, settings: ServingSettings, now_us: Callable[[], int], passed_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._unix = settings.clock == "unix"
        self._ahead_us = int(settings.ahead * _US)
        self._now_us, self._passed_s = now_us, passed_s
        self._moved_s = passed_s()
        self.latest_us = -1

    @property
    def present_us(self) -> int:
        """The time to judge staleness, ends and windows ahead by; -1 unknown.

        A clock of the windows runs on when no more of them arrive, so that the last ones become stale.
        """
        if self._unix:
            return self._now_us()
        return -1 if self.latest_us < 0 else self.latest_us + int((self._passed_s() - self._moved_s) * _US)

    @property
    def shown_us(self) -> int:
        """Time shown to callers: the end of the latest window, or now where that is earlier; -1 before the first."""
        return min(self.latest_us, self._now_us()) if self._unix else self.latest_us

    @property
    def bound_us(self) -> int:
        """The latest time accepted from a single task; -1: any."""
        return -1 if self.present_us < 0 else self.present_us + self._ahead_us

    def ahead(self, slot: NDArray[np.int64], end_us: NDArray[np.int64], tracked: int) -> NDArray[np.bool_]:
        """Return which windows end too far ahead to be true, shape (n,).

        Most of the tasks together overrule a clock of the windows: there was a gap. The present of the first write is
        the median of its ends.

        Parameters
        ----------
        slot : int64, shape (n,)
            Slot of each task, -1 where it is unknown.
        end_us : int64, shape (n,)
        tracked : int
            Number of tasks tracked.
        """
        bound = self.bound_us
        if bound < 0 and len(end_us):
            bound = int(np.median(end_us)) + self._ahead_us
        wrong = end_us > bound
        if self._unix or self.latest_us < 0 or not wrong.any():
            return wrong
        agree = len(np.unique(slot[wrong & (slot >= 0)]))
        return wrong & (agree < min(tracked // 2 + 1, _ENOUGH_TASKS))

    def reach(self, end_us: int) -> None:
        """Record that windows up to this end were taken."""
        if end_us > self.latest_us:
            self.latest_us, self._moved_s = end_us, self._passed_s()
