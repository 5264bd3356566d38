"""Stands in front of every route, BentoML's own too: whom it lets in, how much, for how long, and the record of it."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from reclaim.data.errors import ConfigError
from reclaim.serving.errors import (
    BUSY,
    INTERNAL,
    METHOD_NOT_ALLOWED,
    TIMEOUT,
    TOO_LARGE,
    UNAUTHORIZED,
    UNAVAILABLE,
    UNKNOWN_TYPE,
    RequestError,
)
from reclaim.serving.settings import ServingSettings

Json = dict[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOG = logging.getLogger(__name__)
_ACCESS = logging.getLogger("reclaim.access")

ALIVE: Final = "/livez"
READY: Final = ("/readyz", "/healthz")
METRICS: Final = "/metrics"
PROBES: Final = (ALIVE, *READY)
"""Paths that need no token and are never told to come again: who watches over the process asks them."""
_FIXED: Final = frozenset({*PROBES, METRICS, "/", "/docs.json", "/schema.json"})
"""Paths that stand for themselves in the record; a route stands for what it takes, and the rest is ``other``."""
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

ARROW: Final = b"application/vnd.apache.arrow.stream"
_GONE: Final = 499
"""Stands in the record for a client that left before it was answered, as nginx has it."""
_RETRY_S: Final = 1
"""When one who came while all places were taken may come again, in seconds; most requests take milliseconds."""
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,64}")
_TOKEN: Final = re.compile(rb"[!-~]{16,1024}")
"""What a token is: visible ASCII, and of a length that is not guessed."""
_SHOWN_PATH: Final = 200
"""Characters of a path in the record."""


@dataclass(frozen=True)
class Readiness:
    """Whether requests may be sent here, and what that rests on; ``body`` must go into JSON."""

    ok: bool
    body: Json


class Runtime(Protocol):
    """What the guard asks of the service; all of it on the event loop, so nothing here may wait for anything."""

    requests_under_way: int
    """Counted by the guard alone."""

    @property
    def settings(self) -> ServingSettings:
        """The settings, which stay as they are."""

    def readiness(self) -> Readiness:
        """Return whether the service can answer."""

    def request_done(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """Take note of a request: the route's template, its method, its HTTP status and how long it took."""


def read_token(path: Path) -> bytes:
    """Return the bearer token in a file, without the white space around it.

    Raises
    ------
    ConfigError
        The file cannot be read, or holds no token.
    """
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}") from error
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"the token file {path} must hold one token of 16 to 1024 visible ASCII characters; "
            "`openssl rand -hex 32` makes one"
        )
    return token


class Guard:
    """ASGI middleware, put in front by ``ReservationService.add_asgi_middleware(Guard, runtime=…)``.

    Parameters
    ----------
    app : App
        What stands behind.
    runtime : callable
        Returns the service, or None as long as it has not started.
    """

    def __init__(self, app: App, runtime: Callable[[], Runtime | None]) -> None:
        self._app = app
        self._find = runtime
        self._house: _House | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse, or pass on."""
        if scope["type"] == "http":
            await self._take(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, self._opening(send))
        else:
            await send({"type": "websocket.close"})  # nothing here speaks it

    def _opening(self, send: Send) -> Send:
        """Return a ``send`` that looks the service over once it has started, so that a bad token file ends it there."""

        async def opening(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._enter()
            await send(message)

        return opening

    def _enter(self) -> _House | None:
        if self._house is None and (runtime := self._find()) is not None:
            self._house = _House(runtime)
        return self._house

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        headers = dict(scope["headers"])
        reply = _Reply(send, headers.get(b"x-request-id", b""))
        house = self._enter()
        try:
            if scope["path"] in PROBES:
                await _probe(scope, house, reply)
            elif house is None:
                raise RequestError(UNAVAILABLE, "starting", "the service is starting", retry_after_s=_RETRY_S)
            else:
                await self._pass_on(house, headers, scope, receive, reply)
        except RequestError as refusal:
            await reply.refuse(refusal)
        except _EarlyEnd as end:
            if end.refusal is not None:
                await reply.refuse(end.refusal)
        except Exception:  # the last one who can answer; it is logged whole, and the caller told nothing
            _LOG.exception("%s %s failed", scope["method"], _shown(scope), extra={"request_id": reply.request_id})
            if not reply.status:
                fault = "a fault of the service, not of the request; its log has the details"
                await reply.refuse(RequestError(INTERNAL, "internal", fault))
        finally:
            seconds = time.perf_counter() - begin
            if house is not None:
                method = scope["method"] if scope["method"] in _METHODS else "other"
                house.runtime.request_done(_endpoint(scope), method, reply.status or _GONE, seconds)
            _record(scope, reply, seconds)

    async def _pass_on(
        self, house: _House, headers: Mapping[bytes, bytes], scope: Scope, receive: Receive, reply: _Reply
    ) -> None:
        house.check_token(headers)
        counted, under_way = scope["path"] != METRICS, house.runtime.requests_under_way
        if counted and under_way >= house.settings.max_requests:
            message = f"{under_way} requests are under way, which is all this service takes at once"
            raise RequestError(BUSY, "busy", message, retry_after_s=_RETRY_S)
        body = _Body(receive, headers, house)
        house.runtime.requests_under_way += counted
        try:
            async with asyncio.timeout(body.patience_s) as alarm:
                body.alarm = reply.alarm = alarm
                reply.patience_s = house.settings.request_timeout_s
                await self._app(scope, body, reply)
        except TimeoutError:
            if not alarm.expired():
                raise
            if reply.status:
                _LOG.warning("%s was cut off: its answer was not made or read in time", _shown(scope))
            else:
                raise body.too_late() from None
        finally:
            house.runtime.requests_under_way -= counted
            body.let_go()


class _House:
    """The service behind the guard, and its rules: read once, when it has started."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.settings = runtime.settings
        self.held_bytes = 0
        file = self.settings.token_file
        self._token = None if file is None else read_token(file)

    def hold(self, n_bytes: int) -> None:
        """Set room aside for a body, or a part of one; RequestError where there is none."""
        if self.held_bytes + n_bytes > self.settings.max_inflight_bytes:
            message = f"{self.held_bytes} bytes are under way, and this service takes no more at once"
            raise RequestError(BUSY, "busy", message, retry_after_s=_RETRY_S)
        self.held_bytes += n_bytes

    def check_token(self, headers: Mapping[bytes, bytes]) -> None:
        if self._token is None:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            raise RequestError(
                UNAUTHORIZED, "unauthorized", "this service asks for `Authorization: Bearer` and its token"
            )


class _EarlyEnd(BaseException):
    """Ends a request whose body is too large, or whose client left; no handler within may take it for a fault."""

    def __init__(self, refusal: RequestError | None) -> None:
        super().__init__(refusal)
        self.refusal = refusal


class _Body:
    """The ``receive`` of a request: counts what comes and, once all of it is here, starts the clock of the answer.

    Room for it is set aside, at once where its length is announced, until the request is over.
    """

    alarm: asyncio.Timeout

    def __init__(self, receive: Receive, headers: Mapping[bytes, bytes], house: _House) -> None:
        self._receive = receive
        self._house = house
        self._settings = settings = house.settings
        self._held = 0
        self._size = 0
        self._waiting = False
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RequestError(UNKNOWN_TYPE, "content_encoding", "the body must come as it is: no Content-Encoding")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        most = settings.max_bulk_bytes if kind == ARROW else settings.max_body_bytes
        self._most = min(most, settings.max_inflight_bytes)
        announced = headers.get(b"content-length", b"0")
        length = int(announced[:20]) if announced.isdigit() else 0
        if length > self._most:
            raise self._too_large()
        self._hold(length)
        self._complete = announced == b"0" and b"transfer-encoding" not in headers

    @property
    def patience_s(self) -> float:
        return self._settings.request_timeout_s if self._complete else self._settings.body_timeout_s

    async def __call__(self) -> MutableMapping[str, Any]:
        self._waiting = True
        message = await self._receive()
        self._waiting = False
        if self._complete:
            return message  # of a client that leaves while it is answered, which a stream wants to know
        if message["type"] == "http.disconnect":
            raise _EarlyEnd(None)
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            raise _EarlyEnd(self._too_large())
        try:
            self._hold(self._size - self._held)
        except RequestError as busy:
            raise _EarlyEnd(busy) from None
        if not message.get("more_body", False):
            self._complete = True
            self.alarm.reschedule(asyncio.get_running_loop().time() + self.patience_s)
        return message

    def _hold(self, more: int) -> None:
        if more > 0:
            self._house.hold(more)
            self._held += more

    def let_go(self) -> None:
        """Give the room back."""
        self._house.held_bytes -= self._held
        self._held = 0

    def _too_large(self) -> RequestError:
        message = f"the body may have at most {self._most} bytes; send the tasks in parts"
        return RequestError(TOO_LARGE, "body_too_large", message)

    def too_late(self) -> RequestError:
        """Return the refusal for when the time is up: the client's fault only while its body is waited for."""
        if self._waiting and not self._complete:
            return RequestError(TIMEOUT, "body_timeout", f"the body was not here within {self.patience_s:g} s")
        message = "there was no answer in time; ask for less at once, or come again"
        return RequestError(UNAVAILABLE, "timeout", message, retry_after_s=_RETRY_S)


class _Reply:
    """The ``send`` of a request: adds its id, and remembers what was said."""

    alarm: asyncio.Timeout
    patience_s: float

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
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self._id)]}
        else:
            self.n_bytes += len(message.get("body", b""))
            if message.get("more_body", False):  # each part of a stream has the time that a whole answer has
                self.alarm.reschedule(asyncio.get_running_loop().time() + self.patience_s)
        await self._send(message)

    async def refuse(self, error: RequestError) -> None:
        if self.status:
            return
        headers = []
        if error.status == UNAUTHORIZED:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.status == TIMEOUT:
            headers.append((b"connection", b"close"))  # or the rest of the body would be waited for
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        await self.say(error.status, error.body.model_dump_json().encode(), headers)

    async def say(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})


async def _probe(scope: Scope, house: _House | None, reply: _Reply) -> None:
    if scope["method"] not in ("GET", "HEAD"):
        raise RequestError(METHOD_NOT_ALLOWED, "method_not_allowed", f"{scope['method']} {scope['path']}: use GET")
    if scope["path"] == ALIVE:  # that the event loop came here is all that it says
        state = Readiness(True, {"alive": True})
    elif house is None:
        state = Readiness(False, {"ready": False, "why": "starting"})
    else:
        state = house.runtime.readiness()
    headers = [] if state.ok else [(b"retry-after", b"%d" % _RETRY_S)]
    await reply.say(200 if state.ok else UNAVAILABLE, json.dumps(state.body).encode(), headers)


def _endpoint(scope: Scope) -> str:
    """Return the template of the route that took the request; one of few, whatever callers ask for."""
    template = getattr(scope.get("route"), "path_format", None)
    if template is not None:
        return f"{scope.get('root_path', '')}{template}"
    return scope["path"] if scope["path"] in _FIXED else "other"


def _shown(scope: Scope) -> str:
    """Return the path as it was sent, so that it cannot write a line of its own, and without its query."""
    sent = scope.get("raw_path") or scope["path"].encode("ascii", "backslashreplace")
    return ascii(sent.partition(b"?")[0][:_SHOWN_PATH].decode("latin-1"))[1:-1]


def _record(scope: Scope, reply: _Reply, seconds: float) -> None:
    level = logging.DEBUG if scope["path"] in (*PROBES, METRICS) else logging.INFO
    if not _ACCESS.isEnabledFor(level):
        return
    facts = {
        "method": scope["method"], "path": _shown(scope), "status": reply.status or _GONE,
        "ms": round(seconds * 1e3, 3), "bytes": reply.n_bytes, "request_id": reply.request_id,
    }  # fmt: skip
    _ACCESS.log(level, "%(method)s %(path)s %(status)d %(ms).1f ms", facts, extra=facts)
