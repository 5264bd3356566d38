"""Checks every request before any route, BentoML's included: source, token, sizes, times, concurrency; logs access.

Each of these has a library's counterpart that does less. uvicorn's ``limit_concurrency`` counts idle connections and
probes, and answers in plain text; Starlette's body limit is one size for all content types and no sum over requests;
neither bounds the time of a body or of an answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final, Protocol

from starlette.middleware.cors import CORSMiddleware

from reclaim.serving.http.tokens import Tokens
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.errors import (
    BAD_REQUEST,
    BUSY,
    FORBIDDEN,
    INTERNAL,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    RETRY_S,
    TIMEOUT,
    TOO_LARGE,
    UNAUTHORIZED,
    UNAVAILABLE,
    UNKNOWN_TYPE,
    RequestError,
)
from reclaim.serving.wire.readiness import Readiness

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)
_access_log = logging.getLogger("reclaim.access")

ALIVE: Final = "/livez"
READY: Final = ("/readyz", "/healthz")
METRICS: Final = "/metrics"
PROBES: Final = (ALIVE, *READY)
"""Paths of the process supervisor: they need no token and are never refused for concurrency."""
_FIXED: Final = frozenset({*PROBES, METRICS, "/", "/docs.json", "/schema.json"})
"""Paths that are their own endpoint in the metrics; a route is its template, and all else is ``other``."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

ARROW: Final = b"application/vnd.apache.arrow.stream"
_TYPES: Final = (b"application/json", ARROW, b"")
"""Types of a body: a browser sends the first two to another origin only after asking it, and names the page's origin in
any case."""
_NO_SUCH: Final = {
    NOT_FOUND: ("not_found", "no such path"), METHOD_NOT_ALLOWED: ("method_not_allowed", "no such method here"),
}  # fmt: skip
_PART_BYTES: Final = 2**20
"""Bytes of an answer that are handed to the connection at once; ``settings.reading_timeout_s`` is the time for them."""
_PAGES: Final[dict[str, Any]] = {
    "allow_methods": ("GET", "POST"), "allow_headers": ("content-type", "accept", "x-request-id"),
    "expose_headers": ("retry-after", "x-request-id"),
}  # fmt: skip
"""Requests that a page of a listed origin may send, and headers of an answer that it may read."""
_SINGLE: Final = (b"authorization", b"content-type", b"origin")
"""Headers that may come only once: of two, the guard would check one, and a route read the other. The server checks
``Host``."""
_HOSTS_KEPT: Final = 64
"""Values of ``Host`` that were checked and are kept; clients use few."""
_PLAIN: Final = (b"content-type", b"text/plain; charset=utf-8")
"""Start of BentoML's answers for paths that it does not know."""
_MALFORMED: Final = "malformed_http"
_GONE: Final = 499
"""Status logged for a client that left before the answer, as in nginx."""
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,64}")
_SHOWN_PATH: Final = 200
"""Longest path in the access log, in characters."""


class GuardedService(Protocol):
    """The part of the service that the guard uses, on the event loop: no method may block."""

    requests_under_way: int
    """Written by the guard alone."""

    @property
    def settings(self) -> ServingSettings:
        """The settings, which never change."""

    def readiness(self) -> Readiness:
        """Return whether the service can answer."""

    def request_done(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """Count a request: the template of its route, its method, its HTTP status and its duration."""


class Guard:
    """ASGI middleware, added by ``ReservationService.add_asgi_middleware(Guard, runtime=…)``.

    Parameters
    ----------
    app : App
        The application behind the guard.
    runtime : callable
        Returns the service, or None until it has started.
    """

    def __init__(self, app: App, runtime: Callable[[], GuardedService | None]) -> None:
        self._app = app
        self._find = runtime
        self._bounds: _Bounds | None = None
        self._handle_page: App | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse or forward."""
        if scope["type"] == "http":
            bounds = self._bounds or self._bounds_now()
            handle: App = self._handle
            if self._handle_page is not None and bounds is not None and bounds.is_listed(scope["headers"]):
                handle = self._handle_page
            await handle(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, self._checked_start(send))
        else:
            await send({"type": "websocket.close"})  # no route uses it

    def _checked_start(self, send: Send) -> Send:
        """Return a ``send`` that reads the token file once the service has started: a bad one fails the start."""

        async def checked(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._bounds_now()
            await send(message)

        return checked

    def _bounds_now(self) -> _Bounds | None:
        if self._bounds is None and (service := self._find()) is not None:
            self._bounds = bounds = _Bounds(service)
            if bounds.origins and not bounds.tokens.asked:
                self._handle_page = CORSMiddleware(self._handle, tuple(bounds.origins), **_PAGES)
        return self._bounds

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        headers = dict(scope["headers"])
        reply = _Reply(send, headers.get(b"x-request-id", b""))
        bounds = self._bounds_now()
        try:
            if b"transfer-encoding" in headers and b"content-length" in headers:
                message = "a body has Content-Length or Transfer-Encoding, not both: its end would be ambiguous"
                raise RequestError(BAD_REQUEST, _MALFORMED, message)
            if len(headers) < len(scope["headers"]):
                _check_single(scope["headers"])
            if scope["path"] in PROBES:
                await _probe(scope, bounds, reply)
            elif bounds is None:
                raise RequestError(UNAVAILABLE, "starting", "the service is starting", retry_after_s=RETRY_S)
            else:
                await self._forward(bounds, headers, scope, receive, reply, begin)
        except RequestError as refusal:
            await reply.refuse(refusal)
        except _RequestEnded as end:
            if end.refusal is not None:
                await reply.refuse(end.refusal)
        except Exception:  # the outermost handler: the details go to the log alone
            log.exception("%s %s failed", scope["method"], _shown(scope), extra={"request_id": reply.request_id})
            if not reply.status:
                fault = "a fault of the service, not of the request; its log has the details"
                await reply.refuse(RequestError(INTERNAL, "internal", fault))
        finally:
            if not reply.status:
                await reply.end_unanswered()
            seconds = time.perf_counter() - begin
            if bounds is not None:
                method = scope["method"] if scope["method"] in _METHODS else "other"
                bounds.service.request_done(_endpoint(scope), method, reply.status or _GONE, seconds)
            _log_access(scope, reply, seconds)

    async def _forward(
        self, bounds: _Bounds, headers: Mapping[bytes, bytes], scope: Scope, receive: Receive, reply: _Reply,
        begin: float,
    ) -> None:  # fmt: skip
        counted, under_way = scope["path"] != METRICS, bounds.service.requests_under_way
        if counted:
            bounds.check_source(headers)
        bounds.tokens.check(headers, scope["method"], scope["path"], begin)
        if counted and under_way >= bounds.settings.max_requests:
            message = f"{under_way} requests are under way, the most that this service takes at once"
            raise RequestError(BUSY, "busy", message, retry_after_s=RETRY_S)
        body = _Body(receive, headers, bounds)
        bounds.service.requests_under_way += counted
        try:
            async with asyncio.timeout(body.time_limit_s) as timer:
                body.timer = reply.timer = timer
                reply.time_limit_s = bounds.settings.request_timeout_s
                await self._app(scope, body, reply)
        except TimeoutError:
            if not timer.expired():
                raise
            if reply.status:
                log.warning("%s was cut off: its answer was not made or not read in time", _shown(scope))
            else:
                raise body.timeout_error() from None
        finally:
            bounds.service.requests_under_way -= counted
            body.release()


class _Bounds:
    """The bounds that the service's settings ask for, and its tokens."""

    def __init__(self, service: GuardedService) -> None:
        self.service = service
        self.settings = service.settings
        self.held_bytes = 0
        self.tokens = Tokens(self.settings)
        self._hosts = {"localhost", *_listed(self.settings.allowed_hosts)}
        self.origins = _listed(self.settings.allowed_origins)
        self._good_hosts: set[bytes] = set()

    def hold(self, n_bytes: int) -> None:
        """Reserve memory for a body or a part of one; RequestError where too much is reserved already."""
        if self.held_bytes + n_bytes > self.settings.max_inflight_bytes:
            message = f"{self.held_bytes} bytes are under way, and the service takes no more at once"
            raise RequestError(BUSY, "busy", message, retry_after_s=RETRY_S)
        self.held_bytes += n_bytes

    def is_listed(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether a request comes from a web page of a listed origin, whose browser asks for its headers."""
        return any(name == b"origin" and value.decode("latin-1") in self.origins for name, value in headers)

    def check_source(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a web page without a token: one of another origin, or one that uses a host name of its own."""
        if self.tokens.asked:
            return
        host = headers.get(b"host", b"").lower()
        if host not in self._good_hosts:
            name = _host_name(host)
            if not (name in self._hosts or name.endswith(".localhost") or _is_address(name)):
                raise RequestError(
                    FORBIDDEN, "unknown_host",
                    f"this service answers to localhost or an address, not to {name[:_SHOWN_PATH]!r}: list the name in "
                    "RECLAIM_ALLOWED_HOSTS, or ask for a token with --token-file",
                )  # fmt: skip
            if len(self._good_hosts) < _HOSTS_KEPT:
                self._good_hosts.add(host)
        if b"origin" in headers:
            origin = headers[b"origin"].decode("latin-1").lower()
            if origin.partition("://")[2] != host.decode("latin-1") and origin not in self.origins:
                raise RequestError(
                    FORBIDDEN, "foreign_origin",
                    f"web pages of {origin[:_SHOWN_PATH]!r} may not call this service: list the origin in "
                    "RECLAIM_ALLOWED_ORIGINS",
                )  # fmt: skip


class _RequestEnded(BaseException):
    """Ends a request whose body is too large or whose client left; inner handlers must not report it as a fault."""

    def __init__(self, refusal: RequestError | None) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class _Body:
    """The ``receive`` of a request: counts bytes and, once the body is complete, starts the time limit of the answer.

    Memory for the body is reserved until the request ends, at the start where its length is announced.
    """

    timer: asyncio.Timeout

    def __init__(self, receive: Receive, headers: Mapping[bytes, bytes], bounds: _Bounds) -> None:
        self._receive = receive
        self._bounds = bounds
        self._settings = settings = bounds.settings
        self._held = 0
        self._size = 0
        self._waiting = False
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RequestError(UNKNOWN_TYPE, "content_encoding", "the body must come as it is: no Content-Encoding")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        announced = headers.get(b"content-length", b"0")
        self._complete = announced == b"0" and b"transfer-encoding" not in headers
        if kind not in _TYPES and not self._complete:
            message = "the body must have `Content-Type: application/json` (curl --json), or that of Arrow streams"
            raise RequestError(UNKNOWN_TYPE, "content_type", message)
        most = settings.max_bulk_bytes if kind == ARROW else settings.max_body_bytes
        self._most = min(most, settings.max_inflight_bytes)
        length = int(announced[:20]) if announced.isdigit() else 0
        if length > self._most:
            raise self._too_large()
        self._hold(length)

    @property
    def time_limit_s(self) -> float:
        return self._settings.request_timeout_s if self._complete else self._settings.body_timeout_s

    async def __call__(self) -> MutableMapping[str, Any]:
        self._waiting = True
        message = await self._receive()
        self._waiting = False
        if self._complete:
            return message  # the client left during the answer, which a stream must learn
        if message["type"] == "http.disconnect":
            raise _RequestEnded(None)
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            raise _RequestEnded(self._too_large())
        try:
            self._hold(self._size - self._held)
        except RequestError as busy:
            raise _RequestEnded(busy) from None
        if not message.get("more_body", False):
            self._complete = True
            self.timer.reschedule(asyncio.get_running_loop().time() + self.time_limit_s)
        return message

    def _hold(self, more: int) -> None:
        if more > 0:
            self._bounds.hold(more)
            self._held += more

    def release(self) -> None:
        """Release the reserved memory."""
        self._bounds.held_bytes -= self._held
        self._held = 0

    def _too_large(self) -> RequestError:
        message = f"the body may have at most {self._most} bytes; send the tasks in parts"
        return RequestError(TOO_LARGE, "body_too_large", message)

    def timeout_error(self) -> RequestError:
        """Return the refusal after a time limit: the client's fault only while its body is incomplete."""
        if self._waiting and not self._complete:
            return RequestError(TIMEOUT, "body_timeout", f"the body did not arrive within {self.time_limit_s:g} s")
        message = "there was no answer in time; ask for less at once, or try again"
        return RequestError(UNAVAILABLE, "timeout", message, retry_after_s=RETRY_S)


class _Reply:
    """The ``send`` of a request: adds its id, and records status and size of the answer."""

    timer: asyncio.Timeout
    time_limit_s: float

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._id = request_id if _REQUEST_ID.fullmatch(request_id) else os.urandom(8).hex().encode()
        self.status = 0
        self.n_bytes = 0

    @property
    def request_id(self) -> str:
        return self._id.decode()

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            if message["status"] in _NO_SUCH and _PLAIN in message.get("headers", ()):
                code, problem = _NO_SUCH[message["status"]]
                raise _RequestEnded(RequestError(message["status"], code, f"{problem}; /docs.json describes all"))
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self._id)]}
        else:
            body = message.get("body", b"")
            self.n_bytes += len(body)
            while len(body) > _PART_BYTES:  # the next part waits until the client has read this one
                await self._send_part({**message, "body": body[:_PART_BYTES], "more_body": True})
                body = memoryview(body)[_PART_BYTES:]
            await self._send_part(
                {**message, "body": bytes(body)} if len(body) < len(message.get("body", b"")) else message
            )
            return
        await self._send(message)

    async def _send_part(self, message: MutableMapping[str, Any]) -> None:
        if message.get("more_body", False):  # each part of a stream has the time limit of an answer
            self.timer.reschedule(asyncio.get_running_loop().time() + self.time_limit_s)
        await self._send(message)

    async def refuse(self, error: RequestError) -> None:
        if self.status:
            return
        headers = []
        if error.status == UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.status == TIMEOUT or error.body.error.code == _MALFORMED:
            headers.append((b"connection", b"close"))  # or the server would wait for the rest of the body
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        await self.respond(error.status, error.body.model_dump_json().encode(), headers)

    async def end_unanswered(self) -> None:
        """Send an answer that a client which left never gets: BentoML waits for one until its time limit."""
        await self._send({"type": "http.response.start", "status": _GONE, "headers": [(b"content-length", b"0")]})
        await self._send({"type": "http.response.body", "body": b""})

    async def respond(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


async def _probe(scope: Scope, bounds: _Bounds | None, reply: _Reply) -> None:
    if scope["method"] not in ("GET", "HEAD"):
        raise RequestError(METHOD_NOT_ALLOWED, "method_not_allowed", f"{scope['method']} {scope['path']}: use GET")
    if scope["path"] == ALIVE:  # it reports only that the event loop runs
        state = Readiness(True, {"alive": True})
    elif bounds is None:
        state = Readiness(False, {"ready": False, "why": "starting"})
    else:
        state = bounds.service.readiness()
    headers = [] if state.ready else [(b"retry-after", b"%d" % RETRY_S)]
    await reply.respond(200 if state.ready else UNAVAILABLE, json.dumps(state.about).encode(), headers)


def _check_single(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse a request with one of the headers of ``_SINGLE`` twice."""
    names = [name for name, _ in headers]
    for name in _SINGLE:
        if names.count(name) > 1:
            message = f"{name.decode().title()} comes {names.count(name)} times: send it once"
            raise RequestError(BAD_REQUEST, _MALFORMED, message)


def _listed(names: str) -> frozenset[str]:
    return frozenset(name.strip().rstrip("/").lower() for name in names.split(",") if name.strip())


def _host_name(host: bytes) -> str:
    """Return the name or address in a ``Host``, without its port; a missing one, as of HTTP/1.0, is localhost."""
    text = host.decode("latin-1")
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    return name or "localhost"


def _is_address(name: str) -> bool:
    """Return whether it is an address, which the name server of a web page cannot point elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _endpoint(scope: Scope) -> str:
    """Return the template of the request's route, one of a fixed few."""
    template = getattr(scope.get("route"), "path_format", None)
    if template is not None:
        return f"{scope.get('root_path', '')}{template}"
    return scope["path"] if scope["path"] in _FIXED else "other"


def _shown(scope: Scope) -> str:
    """Return the path as it was sent, escaped so that it cannot forge a log line, and without its query."""
    sent = scope.get("raw_path") or scope["path"].encode("ascii", "backslashreplace")
    return ascii(sent.partition(b"?")[0][:_SHOWN_PATH].decode("latin-1"))[1:-1]


def _log_access(scope: Scope, reply: _Reply, seconds: float) -> None:
    level = logging.DEBUG if scope["path"] in (*PROBES, METRICS) else logging.INFO
    if not _access_log.isEnabledFor(level):
        return
    facts = {
        "method": scope["method"], "path": _shown(scope), "status": reply.status or _GONE,
        "ms": round(seconds * 1e3, 3), "bytes": reply.n_bytes, "request_id": reply.request_id,
    }  # fmt: skip
    _access_log.log(level, "%(method)s %(path)s %(status)d %(ms).1f ms", facts, extra=facts)
