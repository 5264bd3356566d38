"""Tests the bounds on heads of requests, with a real uvicorn behind sockets and with the protocol alone."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import auto
from uvicorn.server import ServerState

from reclaim.serving.http import protocol as wire
from tests.serving.patience import PATIENCE_S
from tests.serving.virtual_time import run_timeless

Message = MutableMapping[str, Any]
BODY = b"well"
"""Time limit for what must happen; a test waits this long only where it fails."""


async def app(scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Any]) -> None:
    """Read the body, and answer how long it was."""
    assert scope["type"] == "http"
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    answer = str(length).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    was, wire.HEAD_S = wire.HEAD_S, PATIENCE_S  # type: ignore[misc]  # a head that comes comes in time
    protocol = auto.AutoHTTPProtocol
    wire.bound_heads()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # or it grows to what would be a flood here
    config = uvicorn.Config(app, http="auto", loop=request.param, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join()
    auto.AutoHTTPProtocol, wire.HEAD_S = protocol, was  # type: ignore[misc]  # as it was


def asked(port: int, *parts: bytes, pause_s: float = 0.0) -> tuple[int, bytes]:
    """Return the status and the body of what is answered to parts sent one after the other; 0 if nothing is."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as wire_to:
        received = b""
        with suppress(ConnectionResetError, BrokenPipeError):  # it was closed while it was sent more
            for part in parts:
                wire_to.sendall(part)
                time.sleep(pause_s)
        with suppress(ConnectionResetError):
            while chunk := wire_to.recv(65_536):
                received += chunk
    if not received:
        return 0, b""
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_a_request_of_usual_size_passes_in_one_part_or_in_many(port: int) -> None:
    request = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\nwell"
    assert asked(port, request) == (200, b"4")
    assert asked(port, request[:7], request[7:40], request[40:], pause_s=0.02) == (200, b"4")


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("lead", "more"),
    [
        (b"GET /", b"x" * 1000), (b"GET / HTTP/1.1\r\n", b"x: " + b"y" * 1000 + b"\r\n"),
        (CHUNKED + b"0\r\n", b"x: " + b"y" * 1000 + b"\r\n"), (CHUNKED + b"0\r\nx: ", b"y" * 1000),
        (CHUNKED + b"5;x=", b"y" * 1000),
    ],
    ids=["url", "headers", "trailers", "one trailer", "chunk extension"],
)  # fmt: skip
def test_heads_and_trailers_without_end_are_cut_off(port: int, lead: bytes, more: bytes) -> None:
    """The connection is closed long before the memory is full."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as wire_to:
        wire_to.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        wire_to.sendall(lead)
        assert taken(wire_to, more * 64, 2**26) < 2**24


def taken(wire_to: socket.socket, part: bytes, most: int) -> int:
    """Return how many bytes of one part after another could be sent."""
    sent = 0
    try:
        while sent < most:
            wire_to.sendall(part)
            sent += len(part)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return sent


def test_a_head_that_is_too_long_is_refused_in_the_one_shape_of_error(port: int) -> None:
    status, body = asked(port, b"GET / HTTP/1.1\r\n" + (b"x: " + b"y" * 1000 + b"\r\n") * 80)
    assert (status, json.loads(body)["error"]["code"]) == (400, "malformed_http")


def test_a_head_that_does_not_arrive_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as wire_to:
        wire_to.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        first = HTTPResponse(wire_to)
        first.begin()
        assert (first.status, first.read()) == (200, b"0")
        monkeypatch.setattr(wire, "HEAD_S", 0.05)
        assert asked(port) == (0, b"")
        wire_to.sendall(b"GET / HTTP/1.1\r\nhost: ")  # its time begins when this is here
        second = HTTPResponse(wire_to)
        second.begin()
        assert (second.status, json.loads(second.read())["error"]["code"]) == (408, "head_timeout")


def test_the_second_request_of_a_connection_is_answered(port: int) -> None:
    first = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    status, body = asked(port, first, first.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), pause_s=0.1)
    assert status == 200
    assert body.count(b"HTTP/1.1 200") == 1  # and the first one's head was cut off from it


@pytest.mark.parametrize(
    "sent", [b"no such thing\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"GET \xff/ HTTP/1.1\r\nhost: x\r\n\r\n"]
)
def test_malformed_http_is_refused_in_the_one_shape_of_error(port: int, sent: bytes) -> None:
    status, body = asked(port, sent)
    assert (status, json.loads(body)["error"]["code"]) == (400, "malformed_http")


class Line(asyncio.Protocol):
    """The client's side of a connection: its received bytes, and when it was closed."""

    def __init__(self) -> None:
        self.heard = b""
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Keep it."""
        self.heard += data

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - a protocol's signature
        """Note the time."""
        self.closed.set_result(asyncio.get_running_loop().time())


async def timed(*parts: tuple[float, bytes]) -> tuple[float, bytes]:
    """Return after how many seconds a line is closed, and all that was said on it, if parts are sent after pauses."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    await loop.create_connection(lambda: wire.BoundedProtocol(config, state, {}, loop), sock=theirs)
    transport, line = await loop.create_connection(Line, sock=ours)
    for pause_s, part in parts:
        await asyncio.sleep(pause_s)
        transport.write(part)
    closed_s = await line.closed
    for task in state.tasks:
        task.cancel()
    return closed_s, line.heard


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 10)


@pytest.mark.usefixtures("ten_seconds")
def test_a_head_has_its_time_from_the_connection_or_its_first_byte_on() -> None:
    assert run_timeless(timed()) == (10, b"")  # an idle connection
    closed_s, heard = run_timeless(timed((3, GET[:9]), (6, GET[9:20])))
    assert (closed_s, heard[:12]) == (10, b"HTTP/1.1 408")
    closed_s, heard = run_timeless(timed((9, GET), (2, GET[:9]), (6, GET[9:20])))
    assert (closed_s, heard.count(b"HTTP/1.1 200")) == (9 + 2 + 10, 1)
    assert b"HTTP/1.1 408" in heard


@pytest.mark.usefixtures("ten_seconds")
def test_a_slow_body_is_not_a_slow_head() -> None:
    head = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\n"
    closed_s, heard = run_timeless(timed((9, head), (11, b"we"), (11, b"ll")))
    assert (closed_s, heard[:12], heard[-1:]) == (9 + 11 + 11, b"HTTP/1.1 200", b"4")


def test_one_connection_too_many_takes_the_place_of_the_longest_idle_one(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire.BoundedProtocol, "most", 2)
    with ExitStack() as all_of_them:
        first, second, third = (
            all_of_them.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            for _ in range(3)
        )
        assert first.recv(1) == b""
        for kept in (second, third):
            kept.sendall(GET)
            assert kept.recv(12) == b"HTTP/1.1 200"


def test_a_connection_too_many_is_refused_where_all_have_requests_under_way(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire.BoundedProtocol, "most", 1)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as busy:
        busy.sendall(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n")
        assert busy.recv(100).startswith(b"HTTP/1.1 100")  # its request is under way
        status, body = asked(port)
        assert (status, json.loads(body)["error"]["code"]) == (503, "busy")
        busy.sendall(b"well")
        assert busy.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("chunk", [b"zz\r\nab\r\n", b"2\r\nabc\r\n", b"-1\r\n", b"\r\n\r\n"])
def test_malformed_chunks_are_refused_in_the_one_shape_of_error(port: int, chunk: bytes) -> None:
    status, body = asked(port, CHUNKED + b"2\r\nab\r\n" + chunk)
    assert (status, json.loads(body)["error"]["code"]) == (400, "malformed_http")
