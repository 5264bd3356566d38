"""The HTTP protocol of uvicorn with a bound on how long a request's head may take, and the service's shape of error."""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.h11_impl import H11Protocol

from reclaim.serving.errors import BAD_REQUEST, TIMEOUT, RequestError

HEAD_S: Final = 10.0
"""So long may a request's line and headers take to come, in seconds, from the first byte on, or from when the
connection was made: nothing of ours, and no time limit of uvicorn's, sees a request before they are there."""
_REASONS: Final = {BAD_REQUEST: "Bad Request", TIMEOUT: "Request Timeout"}


class BoundedProtocol(H11Protocol):
    """Reads HTTP with h11, which also bounds how long heads and trailers are: httptools bounds no trailers."""

    _late: asyncio.TimerHandle | None = None
    """Set while a head is awaited: what happens when it does not come."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; from when a head is whole, the guard looks after the request."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_is_here()
        elif self._late is None:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(BAD_REQUEST, "malformed_http", msg)

    def _await_head(self) -> None:
        self._late = self.loop.call_later(HEAD_S, self._give_up)

    def _head_is_here(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(TIMEOUT, "head_timeout", f"a request's headers must be here within {HEAD_S:g} s")
        else:  # nobody asked anything
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._head_is_here()
        under_way = self.cycle is not None and not self.cycle.response_complete  # whose answer this would be taken for
        if not under_way and not self.transport.is_closing():
            body = RequestError(status, code, message).body.model_dump_json().encode()
            head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def bound_heads() -> None:
    """Let every server of this process that is started from now on speak this protocol; BentoML lets none be chosen."""
    auto.AutoHTTPProtocol = BoundedProtocol
