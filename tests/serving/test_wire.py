"""What comes before a body is bounded: a real uvicorn, asked through bare sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import auto

from reclaim.serving import wire

Message = MutableMapping[str, Any]
BODY = b"well"


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
    was, wire.HEAD_S = wire.HEAD_S, 0.5  # type: ignore[misc]  # a test need not wait for as long as a caller may
    protocol = auto.AutoHTTPProtocol
    wire.bound_heads()
    listening = socket.create_server(("127.0.0.1", 0))
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
    with socket.create_connection(("127.0.0.1", port), timeout=10) as wire_to:
        received = b""
        try:
            for part in parts:
                wire_to.sendall(part)
                time.sleep(pause_s)
            while chunk := wire_to.recv(65_536):
                received += chunk
        except (ConnectionResetError, BrokenPipeError):  # it was closed while it was sent more
            pass
    if not received:
        return 0, b""
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_a_request_of_usual_size_passes_in_one_part_or_in_many(port: int) -> None:
    request = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\nwell"
    assert asked(port, request) == (200, b"4")
    assert asked(port, request[:7], request[7:40], request[40:], pause_s=0.02) == (200, b"4")


def test_a_slow_body_is_not_a_slow_head(port: int) -> None:
    n = 2**18
    head = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % n
    assert asked(port, head, *[bytes(n // 4)] * 4, pause_s=0.25) == (200, str(n).encode())


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
def test_what_is_no_body_cannot_go_on_without_end(port: int, lead: bytes, more: bytes) -> None:
    """Whoever sends it meets a closed connection long before the memory is full."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as wire_to:
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


def test_a_head_that_does_not_come_is_not_awaited(port: int) -> None:
    began = time.monotonic()
    assert asked(port) == (0, b"")
    status, body = asked(port, b"GET / HTTP/1.1\r\nhost: ")
    assert (status, json.loads(body)["error"]["code"]) == (408, "head_timeout")
    assert time.monotonic() - began < 5


def test_the_second_request_of_a_connection_has_the_same_bounds(port: int) -> None:
    first = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    status, body = asked(port, first, b"GET / HTTP/1.1\r\nhost: ", pause_s=0.1)
    assert status == 200
    assert b"HTTP/1.1 408" in body
    again = asked(port, first, first.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), pause_s=0.1)
    assert again[1].count(b"HTTP/1.1 200") == 1  # and the other's head was cut off from it


@pytest.mark.parametrize(
    "sent", [b"no such thing\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n", b"GET \xff/ HTTP/1.1\r\nhost: x\r\n\r\n"]
)
def test_what_is_no_http_is_refused_in_the_one_shape_of_error(port: int, sent: bytes) -> None:
    status, body = asked(port, sent)
    assert (status, json.loads(body)["error"]["code"]) == (400, "malformed_http")
