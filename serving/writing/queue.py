"""Priority queue of the writer thread: commands first, then batched small writes, then one chunk of a bulk write."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.serving.wire.cell_schemas import WriteAnswer
from reclaim.serving.wire.errors import BUSY, RETRY_S, UNAVAILABLE, RequestError
from reclaim.serving.wire.rows import FactRows, UsageRows

_SMALL_ROWS: Final = 4_096
"""Writes of up to so many windows are batched: one sync and one pass of a few milliseconds for all of them."""
_RECENT_S: Final = 1.0
"""A small request counts as recent for this long (s)."""


@dataclass
class UsageWrite:
    """Windows that wait: how many are done, and the outcome of each."""

    usage: UsageRows
    done: Future[WriteAnswer]
    at: int = 0
    outcome: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = np.zeros(len(self.usage.windows), np.uint8)


@dataclass(frozen=True)
class FactWrite:
    """Facts that wait."""

    facts: FactRows
    done: Future[WriteAnswer]


@dataclass(frozen=True)
class Command:
    """A function to call between writes."""

    function: Callable[[], object]
    done: Future[None]


@dataclass(frozen=True)
class Work:
    """The next work of the writer: a command alone, or small writes followed by a chunk of a bulk write.

    Attributes
    ----------
    command : Command or None
    small : tuple
        Facts, and windows that are batched, in the order of arrival.
    bulk : UsageWrite or None
        Stays the first of its kind until it is ``finished``.
    """

    command: Command | None = None
    small: tuple[list[UsageWrite] | FactWrite, ...] = ()
    bulk: UsageWrite | None = None

    @property
    def done(self) -> list[Future[Any]]:
        """Futures of the command and the small writes, which no longer wait in the queue."""
        writes = [w.done for group in self.small for w in ([group] if isinstance(group, FactWrite) else group)]
        return writes if self.command is None else [*writes, self.command.done]


class SmallCallMonitor:
    """Tracks whether small requests have arrived recently; bulk requests use smaller chunks while they do.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._last_s = -float("inf")

    def note(self) -> None:
        """Record a small request."""
        self._last_s = monotonic()

    @property
    def recent(self) -> bool:
        """True if a small request arrived recently, so that another is likely."""
        return monotonic() - self._last_s < _RECENT_S


class WriteQueue:
    """Queue that any thread adds to and the writer thread takes from.

    Parameters
    ----------
    max_waiting : int
        Writes that may wait.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._small: deque[UsageWrite | FactWrite] = deque()
        self._bulk: deque[UsageWrite] = deque()
        self._commands: deque[Command] = deque()
        self._current = Work()
        self._closed = False
        self._small_calls = SmallCallMonitor()

    @property
    def small_writes_recent(self) -> bool:
        """True if small writes arrive at present, which bulk writes should not delay."""
        return bool(self._small) or self._small_calls.recent

    @property
    def waiting(self) -> int:
        """Number of writes that wait."""
        return len(self._small) + len(self._bulk)

    def add(self, rows: UsageRows | FactRows) -> Future[WriteAnswer]:
        """Add a write; return its future answer.

        Raises
        ------
        RequestError
            Too many writes wait already, or the queue is closed.
        """
        done: Future[WriteAnswer] = Future()
        done.set_running_or_notify_cancel()  # a caller that leaves does not withdraw the write
        with self._changed:
            if self._closed:
                raise RequestError(UNAVAILABLE, "stopping", "the service is stopping", retry_after_s=RETRY_S)
            if self.waiting >= self._max_waiting:
                message = f"{self.waiting} writes are waiting already; try again later"
                raise RequestError(BUSY, "busy", message, retry_after_s=RETRY_S)
            if isinstance(rows, FactRows):
                self._small.append(FactWrite(rows, done))
            elif len(rows.windows) <= _SMALL_ROWS:
                self._small.append(UsageWrite(rows, done))
                self._small_calls.note()
            else:
                self._bulk.append(UsageWrite(rows, done))
            self._changed.notify()
        return done

    def command(self, function: Callable[[], object]) -> Future[None]:
        """Add a function to call between writes; a closed queue drops it, and its future is done."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        with self._changed:
            if self._closed:
                done.set_result(None)
            else:
                self._commands.append(Command(function, done))
                self._changed.notify()
        return done

    def next(self, timeout_s: float) -> Work | None:
        """Return the next work, which is empty after the timeout, or None once the queue is closed and empty."""
        with self._changed:
            if not (self.waiting or self._commands or self._closed):
                self._changed.wait(timeout_s)
            if self._commands:
                self._current = Work(self._commands.popleft())
            elif self.waiting:
                self._current = Work(None, self._next_small(), self._bulk[0] if self._bulk else None)
            else:
                self._current = Work()
                return None if self._closed else self._current
            return self._current

    def finished(self, bulk: UsageWrite) -> None:
        """Remove the first bulk write, whose last chunk is done."""
        with self._changed:
            first = self._bulk.popleft()
            assert first is bulk

    def close(self) -> None:
        """Refuse new writes; those that wait are still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def reject_all(self, message: str) -> None:
        """Refuse new writes, those that wait and the current work that is not done."""
        with self._changed:
            self._closed = True
            left = self._current.done + [w.done for w in (*self._small, *self._bulk, *self._commands)]
            for waiting in (self._small, self._bulk, self._commands):
                waiting.clear()
        for done in left:
            if not done.done():
                done.set_exception(RequestError(UNAVAILABLE, "not_ready", message, retry_after_s=RETRY_S))

    def _next_small(self) -> tuple[list[UsageWrite] | FactWrite, ...]:
        out: list[list[UsageWrite] | FactWrite] = []
        rows = 0
        while self._small and rows <= _SMALL_ROWS:
            write = self._small.popleft()
            if isinstance(write, FactWrite):
                rows += len(write.facts.row)
                out.append(write)
                continue
            rows += len(write.usage.row)
            if out and isinstance(batch := out[-1], list):
                batch.append(write)
            else:
                out.append([write])
        return tuple(out)
