"""Extends uvicorn's HTTP protocol by a time limit for a request's head and by the service's shape of error.

uvicorn has no such limit: ``timeout_keep_alive`` runs between requests alone, and ends with the first byte of the next.
The size of a head is bounded by h11 (``h11_max_incomplete_event_size``).
"""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.h11_impl import H11Protocol

from reclaim.serving.wire.errors import BAD_REQUEST, TIMEOUT, RequestError

HEAD_S: Final = 10.0
"""Longest time for a request's line and headers to arrive, in seconds, from the first byte, or from the start of the
connection. The guard sees a request only after them."""
_REASONS: Final = {BAD_REQUEST: "Bad Request", TIMEOUT: "Request Timeout"}


class BoundedProtocol(H11Protocol):
    """HTTP read by h11, which also bounds the size of heads and trailers; httptools bounds no trailers."""

    _timer: asyncio.TimerHandle | None = None
    """Runs while a head is awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read; the timer stops with a complete head, and starts again with the next one."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        self._refuse(BAD_REQUEST, "malformed_http", msg)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(TIMEOUT, "head_timeout", f"a request's headers must arrive within {HEAD_S:g} s")
        else:  # an idle connection
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._stop_timer()
        under_way = (
            self.cycle is not None and not self.cycle.response_complete
        )  # the client would read this as its answer
        if not under_way and not self.transport.is_closing():
            body = RequestError(status, code, message).body.model_dump_json().encode()
            head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def bound_heads() -> None:
    """Make servers that this process starts from now on use ``BoundedProtocol``; BentoML has no setting for it."""
    auto.AutoHTTPProtocol = BoundedProtocol
