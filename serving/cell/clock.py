"""Clock of the cell: this machine's time, or that of the windows, which a few tasks cannot move far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import StoreError
from reclaim.data.schema import DAY_US
from reclaim.serving.cell.claims import MOST_CLAIMS, PERIOD_S, Claims

if TYPE_CHECKING:
    from reclaim.serving.settings import ServingSettings

Ids = NDArray[np.int64]

_US: Final = 1_000_000
_MOVES: Final = 10
"""A clock of the windows stands at a time that more than one in this many of the tasks that send have reached. Fewer
may come from one machine or client with a wrong time; in no trace do more than nine tenths of the tasks end at once."""

_EARLIEST_US: Final = 946_684_800 * _US
"""Beginning of the year 2000 in µs since 1970: no window of a running cell is older."""


class Tasks(Protocol):
    """Last windows of the tasks of a cell."""

    def spans(self) -> tuple[Ids, Ids]:
        """Return start and end of those of all tasks that have one; each int64, shape (n,)."""

    def ends_of(self, key: Ids) -> Ids:
        """Return the end of each task's, -1 without one; key (n, 2), result (n,)."""


class CellClock:
    """Clock that shows this machine's time, or that of the windows.

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
        With this machine's clock, the end of the latest window taken. Otherwise the time that more than a tenth of the
        tasks that send have reached. -1 before the first window.
    claims : Claims
        Tasks that are refused, and tasks that are taken.
    """

    def __init__(
        self, settings: ServingSettings, now_us: Callable[[], int], passed_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._unix = settings.clock == "unix"
        self._ahead_us = int(settings.ahead * _US)
        self._now_us, self._passed_s = now_us, passed_s
        self._moved_s = passed_s()
        self._forget_us = int(settings.forget_s * _US)
        self._resumed_s = -math.inf
        self._need = 1  # tasks beyond the clock that move it
        self._beyond = 0  # at most so many tasks are
        self._wanting = 0  # further claims before they are counted again
        self._read_us = -1  # while the log is read: when its record was written
        self.latest_us = -1
        self.claims = Claims(passed_s)

    @property
    def present_us(self) -> int:
        """The time to judge staleness, ends and windows ahead by; -1 unknown.

        A clock of the windows runs on when no more of them arrive, so that the last ones become stale.
        """
        if self._unix and self._read_us >= 0:  # the last window is no time to come, also where this machine's is behind
            return min(self._read_us, max(self._now_us(), self.latest_us))
        if self._unix:
            return self._now_us()
        return -1 if self.latest_us < 0 else self.latest_us + int((self._passed_s() - self._moved_s) * _US)

    @property
    def shown_us(self) -> int:
        """Time shown to callers: ``latest_us``, or now where that is earlier; -1 before the first window."""
        return min(self.latest_us, self._now_us()) if self._unix else self.latest_us

    @property
    def bound_us(self) -> int:
        """The latest time accepted from a single task; -1: any."""
        return -1 if self.present_us < 0 else self.present_us + self._ahead_us

    @property
    def resumes(self) -> bool:
        """True while a cell resumes after a silence long enough to forget tasks: not all have sent again yet."""
        return self._passed_s() - self._resumed_s < PERIOD_S

    @property
    def problem(self) -> str | None:
        """Fault between the clock and the windows that come, and its remedy; None: no fault."""
        claims = self.claims
        if claims.majority:
            refused, taken = claims.refused, claims.taken
            found = f"windows of {refused} tasks were refused recently for their time, and those of {taken} taken"
            if not self._unix:
                return f"{found}: the clock stands at {self.present_us} µs (RECLAIM_AHEAD_S; RECLAIM_CLOCK)"
            moment = datetime.fromtimestamp(self.present_us / _US, UTC)
            return (
                f"{found}. This machine's clock says {moment:%Y-%m-%d %H:%M:%S} UTC; set it, or the sender's, where "
                "it is wrong. Times of a trace need RECLAIM_CLOCK=trace"
            )
        if self._unix and self.latest_us > self.bound_us >= 0:
            return (
                f"the latest window ends {(self.latest_us - self.present_us) / _US:,.0f} s after this machine's time, "
                "which was set back: until then windows of such tasks are refused as too late. Where the time "
                "was wrong before and is right now, start with another --state folder"
            )
        if not self._unix and claims.too_late > claims.taken:
            return (
                f"windows of {claims.too_late} tasks were refused recently as too late, and those of {claims.taken} "
                f"taken: the cell's clock stands at {self.latest_us} µs. Where the trace was sent before, start with "
                "another --state folder"
            )
        behind_us = self.present_us - self.latest_us
        if self._unix and self.latest_us >= 0 and claims.taken and behind_us > DAY_US:
            return (
                f"the latest window ends {behind_us / DAY_US:.0f} days before this machine's time, so that every task "
                "is stale: times are µs since 1970, and windows of a trace need RECLAIM_CLOCK=trace"
            )
        return None

    def past(self, key: Ids, end_us: Ids, tasks: Tasks) -> NDArray[np.bool_]:
        """Return which windows end when no running cell can be, shape (n,); ``key`` and ``tasks`` as in ``ahead``."""
        wrong = self.impossible(end_us)
        if wrong.any():
            self.claims.refuse(key[wrong], end_us[wrong], tasks.ends_of(key[wrong]))
        return wrong

    def impossible(self, at_us: Ids) -> NDArray[np.bool_]:
        """Return which times no running cell has: in another unit, or of a trace; 0 is before any, -1 is unknown."""
        return (at_us > 0) & (at_us < _EARLIEST_US) & (self._unix and self._now_us() >= _EARLIEST_US)

    def ahead(self, key: Ids, end_us: Ids, tasks: Tasks) -> NDArray[np.bool_]:
        """Return which windows end implausibly far ahead, shape (n,).

        A clock of the windows moves to where most of the tasks that send claim to be, in one write or in several: there
        was a gap. It does so, too, when for ten minutes more tasks were refused than taken. At the first write, the
        clock is the median end of its tasks: each may bring a history.

        Parameters
        ----------
        key : int64, shape (n, 2)
            Collection and instance index.
        end_us : int64, shape (n,)
        tasks : Tasks
        """
        bound = self.bound_us
        if bound < 0 and len(end_us):
            _, task = np.unique(key, axis=0, return_inverse=True)
            last_us = np.zeros(int(task.max()) + 1, np.int64)
            np.maximum.at(last_us, task.reshape(-1), end_us)
            bound = int(np.median(last_us)) + self._ahead_us
        wrong = end_us > bound
        if not wrong.any():
            return wrong
        self.claims.refuse(key[wrong], end_us[wrong], tasks.ends_of(key[wrong]))
        self._wanting -= int(np.count_nonzero(wrong))
        if self._unix or self.latest_us < 0 or (self._wanting > 0 and not self.claims.lasting):
            return wrong
        agreed_us = self._agreed_us(tasks)
        if agreed_us < 0:
            return wrong
        self.move(agreed_us)
        self.claims.clear()
        self._wanting = 0
        return np.asarray(end_us > self.bound_us)

    def _agreed_us(self, tasks: Tasks) -> int:
        """Return the time that enough refused tasks claim; -1 where too few do."""
        key, end_us, had_us = self.claims.claims()
        valid = (end_us > self.bound_us) & (had_us == tasks.ends_of(key))  # no window of it was taken since
        if not self.claims.lasting:
            valid &= had_us >= 0
            need = min(self._sending(*tasks.spans()) // 2 + 1, MOST_CLAIMS)
            self._wanting = need - int(np.count_nonzero(valid))
            if self._wanting > 0:
                return -1
        return int(np.median(end_us[valid])) if valid.any() else -1

    def reach(self, end_us: Ids, tasks: Tasks) -> None:
        """Record that windows were taken; ``end_us`` has the end of the last one of each task, shape (n,)."""
        if self._unix:
            self.move(max(self.latest_us, int(end_us.max(initial=-1))))
            return
        self._beyond += int(np.count_nonzero(end_us > self.latest_us))
        if self._beyond < self._need:
            return
        start_us, ends = tasks.spans()
        self._need = self._sending(start_us, ends) // _MOVES + 1
        beyond = ends[ends > self.latest_us]
        if len(beyond) >= self._need:
            self.move(int(np.partition(beyond, len(beyond) - self._need)[len(beyond) - self._need]))
        self._beyond = int(np.count_nonzero(ends > self.latest_us))

    def move(self, to_us: int) -> None:
        """Set ``latest_us``."""
        if 0 <= self.latest_us < to_us - self._forget_us:
            self._resumed_s = self._passed_s()
        self.latest_us, self._moved_s = to_us, self._passed_s()

    def read(self, then_us: int, latest_us: int) -> None:
        """Show this machine's time when a record of the log was written, until ``start``; -1: it is unknown.

        A clock of the windows moves to ``latest_us``, where it stood then: refused windows, which moved it, are not in
        the log.
        """
        self._read_us = then_us
        if not self._unix and self.latest_us < latest_us:
            self.move(latest_us)

    def start(self) -> None:
        """Show the time, and count refusals, from now on: what was restored was not sent now.

        Raises
        ------
        StoreError
            The windows that were restored have times of a trace, and the clock is this machine's: all of their tasks
            would be forgotten.
        """
        if self._unix and 0 <= self.latest_us < _EARLIEST_US <= self._now_us():
            raise StoreError(
                f"its latest window ends {self.latest_us // _US:,} s after the beginning of 1970, a time of a trace; "
                "start the service with --clock trace, or choose another folder with --state"
            )
        self._read_us = -1
        self.claims = Claims(self._passed_s)

    def _sending(self, start_us: Ids, end_us: Ids) -> int:
        """Return how many tasks were sending when it was ``latest_us``: their next window was not over by then."""
        return int(np.count_nonzero(2 * end_us - start_us > self.latest_us))
