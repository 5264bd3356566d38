"""Large answers: few at a time, equal to small ones, given up when the client leaves, cut off when it does not read."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.responses import Response
from uvicorn.protocols.http import auto

from reclaim.serving.answers.stateful import one_task
from reclaim.serving.http import protocol, routes
from reclaim.serving.http.large import LargeAnswers
from reclaim.serving.wire.errors import ClientLeftError, RequestError
from tests.serving.descriptors import windows
from tests.serving.patience import PATIENCE_S

"""Time limit for what must happen; a test waits this long only where it fails."""


async def _receive(left: asyncio.Event) -> dict[str, str]:
    await left.wait()
    return {"type": "http.disconnect"}


async def _send(message: Any) -> None:
    pass


def test_one_large_answer_too_many_is_refused_until_another_is_read() -> None:
    async def run() -> None:
        large, free, stays = LargeAnswers(1), threading.Event(), asyncio.Event()

        def make(left: threading.Event) -> Response:
            assert not left.is_set()
            free.wait(PATIENCE_S)
            return Response("made")

        first = asyncio.create_task(large.answer(make)({"type": "http"}, lambda: _receive(stays), _send))
        waiting = asyncio.create_task(large.answer(make, wait=True)({"type": "http"}, lambda: _receive(stays), _send))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="RECLAIM_MAX_LARGE_ANSWERS") as refused:
            large.answer(make)
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
        free.set()
        await asyncio.gather(first, waiting)
        large.answer(make)

    asyncio.run(run())


def test_work_for_a_client_that_left_ends_and_gives_its_place_back() -> None:
    async def run() -> None:
        large, gone, ended = LargeAnswers(1), asyncio.Event(), threading.Event()

        def make(left: threading.Event) -> Response:
            assert left.wait(PATIENCE_S)
            ended.set()
            raise ClientLeftError

        answer = asyncio.create_task(large.answer(make)({"type": "http"}, lambda: _receive(gone), _send))
        await asyncio.sleep(0.01)
        gone.set()
        await answer
        assert ended.is_set()
        large.answer(make)

    asyncio.run(run())


@pytest.fixture(scope="module")
def url(make_app: Any, at_url: Any) -> Iterator[str]:
    was = auto.AutoHTTPProtocol
    protocol.bound_heads()
    try:
        with make_app(clock="unix", max_large_answers=2) as (app, _), at_url(app) as url:
            told = {"windows": windows(60, *range(2_000))}
            assert httpx.post(f"{url}/v1/usage", json=told, timeout=PATIENCE_S).json()["taken"] == 2_000
            yield url
    finally:
        auto.AutoHTTPProtocol = was  # as it was


def test_a_large_page_is_that_of_small_ones(url: str) -> None:
    path = f"{url}/v1/cell/reservations"
    large = httpx.get(path, params={"page_size": 700}, timeout=PATIENCE_S).json()
    small: list[Any] = []
    after: dict[str, str] = {}
    for _ in range(7):
        page = httpx.get(path, params={"page_size": 100, **after}, timeout=PATIENCE_S).json()
        small += page["tasks"]
        after = {"after": page["next"]}
    assert large["tasks"] == small
    assert {**large, "tasks": 0} == {**page, "tasks": 0}
    some = httpx.get(path, params={"collection_id": list(range(700))}, timeout=PATIENCE_S).json()
    assert some["tasks"] == small


def test_a_write_is_answered_with_a_large_page(url: str) -> None:
    told = {"windows": windows(60, 1)}
    answer = httpx.post(f"{url}/v1/usage?answer=cell", json=told, timeout=PATIENCE_S).json()
    assert (answer["repeated"], len(answer["reservations"]["tasks"])) == (1, 1_000)


def test_a_bad_cursor_of_a_large_page_is_refused_as_ever(url: str) -> None:
    assert httpx.get(f"{url}/v1/cell/reservations?after=1:2:3", timeout=PATIENCE_S).status_code == 422


def test_readers_that_stall_are_cut_off_and_others_are_answered_meanwhile(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol.BoundedProtocol, "reading_s", 1.0)
    size = len(httpx.get(f"{url}/v1/cell/reservations?page_size=10000", timeout=PATIENCE_S).content)
    ask = b"GET /v1/cell/reservations?page_size=10000 HTTP/1.1\r\nhost: localhost\r\n\r\n"
    address = ("127.0.0.1", urlsplit(url).port or 0)
    seen: set[int] = set()
    begun = time.monotonic()
    with ExitStack() as open_lines:
        stalled: list[socket.socket] = []
        while seen < {200, 503} or time.monotonic() < begun + 8:
            assert time.monotonic() < begun + PATIENCE_S
            if 503 not in seen:  # a line that finds both places taken is refused at once, and stalls no more
                stalled.append(open_lines.enter_context(socket.create_connection(address)))
                stalled[-1].sendall(ask * 40)  # more than the system keeps for a reader
            assert httpx.get(f"{url}/livez", timeout=PATIENCE_S).status_code == 200
            answer = httpx.get(f"{url}/v1/cell/reservations", timeout=PATIENCE_S)
            assert answer.status_code == 200 or answer.headers["retry-after"] == "1"
            seen.add(answer.status_code)
            time.sleep(0.05)
        for line in stalled:
            read = 0
            with suppress(ConnectionResetError):
                while more := len(line.recv(2**20)):
                    read += more
            assert read < 40 * size
    assert httpx.get(f"{url}/v1/cell/reservations", timeout=PATIENCE_S).status_code == 200


def test_a_piece_of_work_stops_between_two_tasks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client leaves after the first task; no more than some are made after it."""
    made: list[int] = []
    begun = threading.Event()

    def slow(found: Any, row: int, quantiles: bool) -> Any:
        made.append(row)
        begun.set()
        time.sleep(0.01)
        return one_task(found, row, quantiles)

    monkeypatch.setattr(routes, "one_task", slow)
    with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as line:
        line.sendall(b"GET /v1/cell/reservations HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert begun.wait(PATIENCE_S)
    time.sleep(1.0)
    count = len(made)
    time.sleep(0.2)
    assert len(made) == count < 1_000
