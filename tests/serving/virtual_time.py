"""Event loop with virtual time: the clock jumps to the next timer when nothing else is ready."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 60.0
"""Timeout for a thread while no timer runs (s)."""


class TimelessLoop(asyncio.SelectorEventLoop):
    """Its clock starts at 0 s and jumps to the next timer when neither a callback nor a socket is ready.

    While a timer runs, threads are not waited for: they seem to take longer than all timers.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Return the seconds that timers have taken so far."""
        return self.now_s


class _Jumping(selectors.DefaultSelector):
    """Advances the loop's clock where another selector would wait."""

    def __init__(self, loop: TimelessLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(_PATIENCE_S if timeout is None else 0)
        if not ready:
            assert timeout is not None, "the loop waits without a timer or an event"
            self._loop.now_s += timeout
        return ready


def run_timeless(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does, in virtual time."""
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        return runner.run(main)
