"""Makes large answers a few at a time, outside the event loop, and only for clients that still wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio.to_thread
from starlette.responses import Response

from reclaim.serving.wire.errors import RETRY_S, UNAVAILABLE, ClientLeftError, RequestError

_Made = Callable[[threading.Event], Response]

SMALL_TASKS: Final = 256
"""Answers of up to this many tasks are not large: a few milliseconds of work."""
_THREADS: Final = 2
"""Large answers that are made at once: more threads would not finish sooner, and each would delay the event loop."""


class LargeAnswers:
    """Bounds the large answers that are made or read at once, and with them their memory.

    Parameters
    ----------
    most : int
        ``settings.max_large_answers``.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._places = asyncio.Semaphore(most)
        self._threads: anyio.CapacityLimiter | None = None

    def answer(self, make: _Made, *, wait: bool = False) -> Response:
        """Return a response that makes its content when it is sent.

        Parameters
        ----------
        make : callable
            Returns the response; called in a thread with an event that is set once the client has left, which it
            checks every few milliseconds, and raises ``ClientLeftError``.
        wait : bool
            Whether it waits for its turn, as after a write that is acknowledged with it.

        Raises
        ------
        RequestError
            Too many are under way.
        """
        if self._places.locked() and not wait:
            message = (
                f"{self._most} large answers are under way (RECLAIM_MAX_LARGE_ANSWERS); ask for fewer tasks, or again"
            )
            raise RequestError(UNAVAILABLE, "busy", message, retry_after_s=RETRY_S)
        return _LargeAnswer(self._places, lambda left: self.in_thread(lambda: make(left)))

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function of long work, called in one of few threads."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(_THREADS)
        return await anyio.to_thread.run_sync(function, limiter=self._threads)


class _LargeAnswer(Response):
    """A response that is made when it is sent, and holds its place until it is read or its client has left."""

    def __init__(self, places: asyncio.Semaphore, make: Callable[[threading.Event], Awaitable[Response]]) -> None:
        super().__init__()
        self._places, self._make = places, make

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        left = threading.Event()
        listening = asyncio.create_task(_note_leaving(receive, left))
        try:
            async with self._places:
                response = await self._make(left)
                await response(scope, receive, send)
        except ClientLeftError:
            return
        finally:
            left.set()  # a thread that still works for a request that is out of time ends, too
            listening.cancel()


async def _note_leaving(receive: Any, left: threading.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left.set()
