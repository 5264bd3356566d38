"""An event loop whose time passes only while nothing is left to do: what is timed is exact, and takes no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 60.0
"""For a thread that is waited for while no timer runs."""


class TimelessLoop(asyncio.SelectorEventLoop):
    """Its clock starts at 0 s and jumps to the next timer when neither a callback nor a socket is ready.

    A thread is not waited for while a timer runs: to whoever asked it, it takes longer than all of them.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Return the seconds that timers have taken so far."""
        return self.now_s


class _Jumping(selectors.DefaultSelector):
    """Lets the time of a loop pass where another one would wait."""

    def __init__(self, loop: TimelessLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(_PATIENCE_S if timeout is None else 0)
        if not ready:
            assert timeout is not None, "it waits for nothing that could come"
            self._loop.now_s += timeout
        return ready


def run_timeless(main: Coroutine[Any, Any, T]) -> T:
    """Run it to its end, as ``asyncio.run`` does, without waiting for any time to pass."""
    with asyncio.Runner(loop_factory=TimelessLoop) as runner:
        return runner.run(main)
