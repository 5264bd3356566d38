"""The HTTP protocol of uvicorn with bounds on what comes before a body: how long a request's head is, and how late."""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from reclaim.serving.errors import BAD_REQUEST, TIMEOUT, RequestError

HEAD_BYTES: Final = 64 * 2**10
"""A request's line and headers may be about so long, as with h11: whoever sends more has no good reason to."""
HEAD_S: Final = 10.0
"""So long may they take to come, in seconds, from the first byte on, or from when the connection was made."""
_TOO_LONG: Final = 431
_REASONS: Final = {BAD_REQUEST: "Bad Request", TIMEOUT: "Request Timeout", _TOO_LONG: "Request Header Fields Too Large"}


class BoundedProtocol(HttpToolsProtocol):
    """Refuses, in the service's one shape of error, what would wait or grow before any of our code sees it."""

    _head_bytes = 0
    _asked = False
    """Whether a head has begun to come."""
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
        """Read on, unless the head is too long already."""
        if self._late is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._late is not None and self._head_bytes > HEAD_BYTES:
            self._refuse(_TOO_LONG, "head_too_large", f"a request's headers may take {HEAD_BYTES} bytes at most")

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._asked = True
        if self._late is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """Stop counting: from here on the guard looks after it."""
        self._head_is_here()
        self._asked = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(BAD_REQUEST, "malformed_http", msg)

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._late = self.loop.call_later(HEAD_S, self._give_up)

    def _head_is_here(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if self._asked:
            self._refuse(TIMEOUT, "head_timeout", f"a request's headers must be here within {HEAD_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._head_is_here()
        if self.transport.is_closing():
            return
        body = RequestError(status, code, message).body.model_dump_json().encode()
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def bound_heads() -> None:
    """Let every server of this process that is started from now on speak this protocol; BentoML lets none be chosen."""
    auto.AutoHTTPProtocol = BoundedProtocol
