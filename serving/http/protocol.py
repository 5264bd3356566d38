"""Extends uvicorn's HTTP protocol by bounds on the number of connections and on the times of heads and of reading.

uvicorn has no such bounds: ``timeout_keep_alive`` runs between requests alone, and ends with the first byte of the
next; ``limit_concurrency`` refuses requests, and keeps their connections. The size of a head is bounded by h11
(``h11_max_incomplete_event_size``).
"""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar, Final

import h11
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.h11_impl import H11Protocol

from reclaim.serving.http.process import backlog_of
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.errors import BAD_REQUEST, RETRY_S, TIMEOUT, UNAVAILABLE, RequestError

log = logging.getLogger(__name__)

HEAD_S: Final = 10.0
"""Longest time for a request's line and headers to arrive, in seconds, from the first byte, or from the start of the
connection. The guard sees a request only after them."""
_OWN_FILES: Final = 128
"""Open files that the process reserves for itself: libraries, the log, snapshots and the model's registry."""
_REASONS: Final = {BAD_REQUEST: "Bad Request", TIMEOUT: "Request Timeout", UNAVAILABLE: "Service Unavailable"}


class BoundedProtocol(H11Protocol):
    """HTTP read by h11, which also bounds the size of heads and trailers; httptools bounds no trailers."""

    most: ClassVar[int] = ServingSettings.model_fields["max_connections"].default
    """Connections of this process at once at most."""
    _idle: dict[BoundedProtocol, None]
    """The server's connections without a request under way, the longest idle first."""
    reading_s: ClassVar[float] = ServingSettings.model_fields["reading_timeout_s"].default
    """Time in seconds within which the client has to read what is in the connection's buffer."""
    _unread: asyncio.TimerHandle | None = None
    """Runs while the client does not read."""
    _timer: asyncio.TimerHandle | None = None
    """Runs while a head is awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start the timer of the first head; where there are too many connections, close an idle one."""
        super().connection_made(transport)
        self._idle = vars(self.server_state).setdefault("idle", {})
        self._start_timer()
        if len(self.connections) > self.most:
            if self._idle:
                next(iter(self._idle))._leave()
            else:
                message = f"{self.most} connections have requests under way, the most that this service takes at once"
                self._refuse(UNAVAILABLE, "busy", message)
                return
        self._idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        self.resume_writing()
        self._idle.pop(self, None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the time in which the client must read."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """Stop the timer: the client has read."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Become idle, unless the next request is here already."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._await_reading()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._idle[self] = None

    def data_received(self, data: bytes) -> None:
        """Read; the timer stops with a complete head, and starts again with the next one."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
            self._idle.pop(self, None)
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

    def _await_reading(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(self.reading_s, self._cut_off)

    def _cut_off(self) -> None:
        """End the connection of a client that does not read; closing would wait for it."""
        self._unread = None
        if self.transport.get_write_buffer_size():
            log.warning("a connection was cut off: its client read nothing for %g s", self.reading_s)
            self.transport.abort()

    def _leave(self) -> None:
        """Give this idle connection's place to another one."""
        self._idle.pop(self, None)
        self.connections.discard(self)
        self._stop_timer()
        self.transport.abort()

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._stop_timer()
        cycle = self.cycle
        under_way = cycle is not None and not cycle.response_complete
        # a client that still sends its body gets this answer; any other would take it for the answer to its request
        if under_way and cycle.more_body and not cycle.response_started:
            cycle.disconnected, under_way = True, False  # the service answers and takes nothing any more
            cycle.message_event.set()
        if not under_way and not self.transport.is_closing():
            body = RequestError(status, code, message).body.model_dump_json().encode()
            head = f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            head += f"retry-after: {RETRY_S}\r\n" if status == UNAVAILABLE else ""
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()


def bound_heads() -> None:
    """Make servers that this process starts from now on use ``BoundedProtocol``; BentoML has no setting for it."""
    auto.AutoHTTPProtocol = BoundedProtocol


def bound_connections(settings: ServingSettings, open_files: int) -> None:
    """Bound connections and their times by the settings, and their number also by the files that may be open."""
    room = max(open_files - _OWN_FILES - backlog_of(open_files), 1)
    if room < settings.max_connections:
        log.warning(
            "at most %d connections at once, and not RECLAIM_MAX_CONNECTIONS=%d: this process may open %d files; raise "
            "its limit (ulimit -Hn, LimitNOFILE)", room, settings.max_connections, open_files,
        )  # fmt: skip
    BoundedProtocol.reading_s = settings.reading_timeout_s
    BoundedProtocol.most = min(settings.max_connections, room)
