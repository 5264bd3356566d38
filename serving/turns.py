"""Whose turn it is with the thread that writes: commands, then small writes together, then a part of a large one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.serving.cell_schemas import WriteAnswer
from reclaim.serving.company import Company
from reclaim.serving.errors import BUSY, UNAVAILABLE, RequestError
from reclaim.serving.rows import FactRows, UsageRows

_SMALL_ROWS: Final = 4_096
"""Writes of up to so many windows are taken together, in a few milliseconds: one sync and one pass for all of them."""
_RETRY_S: Final = 1
"""When a caller who met a full queue may come again, in seconds: a write takes half of one at most."""


@dataclass
class Write:
    """Windows on their way: which are done, and what became of them."""

    told: UsageRows
    done: Future[WriteAnswer]
    at: int = 0
    outcome: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = np.zeros(len(self.told.windows), np.uint8)


@dataclass(frozen=True)
class Facts:
    """Facts on their way."""

    told: FactRows
    done: Future[WriteAnswer]


@dataclass(frozen=True)
class Command:
    """What is to be done between writes."""

    what: Callable[[], object]
    done: Future[None]


@dataclass(frozen=True)
class Turn:
    """What is done next: a command alone, or small writes and after them a part of a large one, if there are any.

    Attributes
    ----------
    command : Command or None
    small : tuple
        Facts, and windows that are taken together, in the order in which they came.
    large : Write or None
        Stays the first of its kind until it is ``finished``.
    """

    command: Command | None = None
    small: tuple[list[Write] | Facts, ...] = ()
    large: Write | None = None

    @property
    def done(self) -> list[Future[Any]]:
        """What those of it that wait no more are waiting for."""
        groups = [[group] if isinstance(group, Facts) else group for group in self.small]
        return [w.done for w in (*chain(*groups), *(() if self.command is None else (self.command,)))]


class Turns:
    """A queue that any thread adds to and one thread takes from.

    Parameters
    ----------
    max_waiting : int
        Writes that may wait.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._small: deque[Write | Facts] = deque()
        self._large: deque[Write] = deque()
        self._commands: deque[Command] = deque()
        self._current = Turn()
        self._closed = False
        self._company = Company()

    @property
    def in_company(self) -> bool:
        """Whether small writes come at present, which large ones should not hold up."""
        return bool(self._small) or self._company.present

    @property
    def waiting(self) -> int:
        """Writes that wait."""
        return len(self._small) + len(self._large)

    def add(self, told: UsageRows | FactRows) -> Future[WriteAnswer]:
        """Let a write wait for its turn.

        Raises
        ------
        RequestError
            Too many wait already, or no turns are given any more.
        """
        done: Future[WriteAnswer] = Future()
        done.set_running_or_notify_cancel()  # a caller who leaves does not take the write back
        with self._changed:
            if self._closed:
                raise RequestError(UNAVAILABLE, "stopping", "the service is stopping", retry_after_s=_RETRY_S)
            if self.waiting >= self._max_waiting:
                message = f"{self.waiting} writes are waiting already; come again"
                raise RequestError(BUSY, "busy", message, retry_after_s=_RETRY_S)
            if isinstance(told, FactRows):
                self._small.append(Facts(told, done))
            elif len(told.windows) <= _SMALL_ROWS:
                self._small.append(Write(told, done))
                self._company.came()
            else:
                self._large.append(Write(told, done))
            self._changed.notify()
        return done

    def command(self, what: Callable[[], object]) -> Future[None]:
        """Let something be done between writes; nothing is, and it is done, where no turns are given any more."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        with self._changed:
            if self._closed:
                done.set_result(None)
            else:
                self._commands.append(Command(what, done))
                self._changed.notify()
        return done

    def next(self, patience_s: float) -> Turn | None:
        """Return what is done next, which is nothing where nobody came for so long; None: it is all over."""
        with self._changed:
            if not (self.waiting or self._commands or self._closed):
                self._changed.wait(patience_s)
            if self._commands:
                self._current = Turn(self._commands.popleft())
            elif self.waiting:
                self._current = Turn(None, self._next_small(), self._large[0] if self._large else None)
            else:
                self._current = Turn()
                return None if self._closed else self._current
            return self._current

    def finished(self, large: Write) -> None:
        """Let go of a large write, which is the first, when its last part is done."""
        with self._changed:
            first = self._large.popleft()
            assert first is large

    def close(self) -> None:
        """Let nobody come any more; those who wait have their turn."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def turn_away(self, message: str) -> None:
        """Refuse whoever comes, waits, or had a turn that came to no end."""
        with self._changed:
            self._closed = True
            left = self._current.done + [w.done for w in (*self._small, *self._large, *self._commands)]
            for waiting in (self._small, self._large, self._commands):
                waiting.clear()
        for done in left:
            if not done.done():
                done.set_exception(RequestError(UNAVAILABLE, "not_ready", message, retry_after_s=_RETRY_S))

    def _next_small(self) -> tuple[list[Write] | Facts, ...]:
        out: list[list[Write] | Facts] = []
        rows = 0
        while self._small and rows <= _SMALL_ROWS:
            write = self._small.popleft()
            rows += len(write.told.row)
            if isinstance(write, Facts):
                out.append(write)
            elif out and isinstance(together := out[-1], list):
                together.append(write)
            else:
                out.append([write])
        return tuple(out)
