"""Tests the guard in this process, and over a real socket where only that shows the behaviour."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import logging
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.serving.http import guard as guarding
from reclaim.serving.http.guard import ARROW, Guard
from reclaim.serving.wire.readiness import Readiness
from reclaim.serving.wire.schemas import ErrorResponse
from tests.serving.http.guarded import LIMIT, TOKEN, FakeService, Message, answer, ask, guarded, make_api
from tests.serving.patience import PATIENCE_S, soon
from tests.serving.virtual_time import run_timeless


def takes(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the guard find that each request takes so long."""
    now_s = itertools.count(7.0, seconds)
    monkeypatch.setattr(guarding, "time", SimpleNamespace(perf_counter=lambda: next(now_s)))


def test_a_request_passes_with_an_id_and_is_noted_under_its_route(monkeypatch: pytest.MonkeyPatch) -> None:
    takes(0.25, monkeypatch)
    guard, fake = guarded()
    reply = answer(guard, "POST", "/v1/echo/someone", parts=(b"ab", b"c"))
    assert (reply.status, reply.body) == (200, b"someone 3")
    assert len(reply.headers["x-request-id"]) == 16
    assert fake.done == [("/v1/echo/{name}", "POST", 200, 0.25)]


def test_livez_needs_no_service_and_readyz_needs_one() -> None:
    fake = FakeService()
    there: list[FakeService] = []
    guard = Guard(make_api(fake), lambda: there[0] if there else None)
    assert answer(guard, "GET", "/livez").body == b'{"alive": true}'
    for path in ("/readyz", "/healthz"):
        reply = answer(guard, "GET", path)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert json.loads(reply.body) == {"ready": False, "why": "starting"}
    reply = answer(guard, "GET", "/v1/stream")
    assert (reply.status, reply.code) == (503, "starting")
    there.append(fake)
    assert json.loads(answer(guard, "GET", "/readyz").body) == {"ready": True}
    fake.ready = Readiness(False, {"ready": False, "store": "disk full"})
    reply = answer(guard, "HEAD", "/healthz")
    assert (reply.status, json.loads(reply.body)) == (503, fake.ready.about)
    assert answer(guard, "GET", "/livez").status == 200
    assert answer(guard, "POST", "/livez").code == "method_not_allowed"


def test_a_websocket_is_turned_away() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    run_timeless(guarded()[0]({"type": "websocket", "path": "/livez"}, receive, send))
    assert sent == [{"type": "websocket.close"}]


def test_one_request_too_many_is_refused_with_retry_after() -> None:
    guard, fake = guarded(max_requests=2)

    async def request(path: str, query: str = "") -> int:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": query.encode(), "headers": []}
        if path in ("/livez", "/metrics"):
            scope["method"] = "GET"
        await guard(scope, receive, send)
        if sent[0]["status"] == 429:
            assert (b"retry-after", b"1") in sent[0]["headers"]
            assert ErrorResponse.model_validate_json(sent[1]["body"]).error.code == "busy"
        return int(sent[0]["status"])

    async def run() -> list[int]:
        slow = [asyncio.create_task(request("/v1/slow", "seconds=2")) for _ in range(2)]
        await asyncio.sleep(1)
        meanwhile = [await request(path) for path in ("/v1/echo/x", "/livez", "/metrics")]
        ended = await asyncio.gather(*slow)
        return [*meanwhile, *ended, await request("/v1/echo/x")]

    assert run_timeless(run()) == [429, 200, 404, 200, 200, 200]
    assert sorted(status for *_, status, _ in fake.done) == [200, 200, 200, 200, 404, 429]


def test_a_body_announced_too_large_is_refused_unread() -> None:
    guard, _ = guarded()
    reply = answer(guard, "POST", "/v1/echo/x", headers={"content-length": str(LIMIT + 1)}, parts=(b"never read",))
    assert (reply.status, reply.code) == (413, "body_too_large")
    assert str(LIMIT) in ErrorResponse.model_validate_json(reply.body).error.message
    huge = answer(guard, "POST", "/v1/echo/x", headers={"content-length": "9" * 5_000})
    assert huge.status == 413


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("application/json", LIMIT),
        ("", LIMIT),
        (f"{ARROW.decode()}; x=1", 2 * LIMIT),
        (ARROW.decode().upper(), 2 * LIMIT),
    ],
)
def test_an_unannounced_body_is_counted_while_it_comes(kind: str, most: int) -> None:
    guard, _ = guarded()
    headers = {"content-type": kind} if kind else {}
    fits = answer(guard, "POST", "/v1/echo/x", headers=headers, parts=(b"a" * (most - 1), b"b"))
    assert (fits.status, fits.body) == (200, f"x {most}".encode())
    reply = answer(guard, "POST", "/v1/echo/x", headers=headers, parts=(b"a" * most, b"b", b"c" * 10**6))
    assert (reply.status, reply.code) == (413, "body_too_large")


def test_two_types_of_one_body_are_refused_so_that_neither_lifts_the_bound_of_the_other() -> None:
    guard, _ = guarded()
    twice = {"content-type": "application/json", "Content-Type": ARROW.decode()}
    reply = answer(guard, "POST", "/v1/echo/x", headers=twice, parts=(b"a" * (LIMIT + 1),))
    assert (reply.status, reply.code) == (400, "malformed_http")
    assert "Content-Type comes 2 times" in ErrorResponse.model_validate_json(reply.body).error.message


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "x"])
def test_a_compressed_body_is_refused(encoding: str) -> None:
    guard, _ = guarded()
    reply = answer(guard, "POST", "/v1/echo/x", headers={"content-encoding": encoding}, parts=(b"x",))
    assert (reply.status, reply.code) == (415, "content_encoding")
    plain = answer(guard, "POST", "/v1/echo/x", headers={"content-encoding": "Identity"}, parts=(b"x",))
    assert plain.status == 200


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    guard, fake = guarded(body_timeout_s=5)
    reply = answer(guard, "POST", "/v1/echo/x", parts=(b"a", b"b", b"c"), pause_s=2)
    assert (reply.status, reply.code, reply.headers["connection"]) == (408, "body_timeout", "close")
    assert reply.after_s == 5
    assert fake.done[0][2] == 408


def test_an_answer_that_takes_too_long_is_not_waited_for() -> None:
    guard, _ = guarded(request_timeout_s=2, body_timeout_s=30)
    assert answer(guard, "POST", "/v1/slow", query="seconds=1.9", parts=(b"x",)).status == 200
    reply = answer(guard, "POST", "/v1/slow", query="seconds=2.1", parts=(b"x",))
    assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "timeout", "1")
    assert reply.after_s == 2


def test_a_thread_that_takes_too_long_goes_on_and_is_not_waited_for() -> None:
    guard, fake = guarded(request_timeout_s=2)
    try:
        reply = answer(guard, "POST", "/v1/thread")
        assert (reply.status, reply.code, reply.after_s) == (503, "timeout", 2)
    finally:
        fake.open.set()


def test_the_time_of_the_body_is_not_the_time_of_the_answer() -> None:
    guard, _ = guarded(request_timeout_s=2, body_timeout_s=6)
    reply = answer(guard, "POST", "/v1/echo/x", parts=(b"a",) * 5, pause_s=1)  # longer than an answer may take
    assert (reply.status, reply.body, reply.after_s) == (200, b"x 5", 5)
    late = answer(guard, "POST", "/v1/slow", query="seconds=3", parts=(b"a",) * 5, pause_s=1)
    assert (late.status, late.code, late.after_s) == (503, "timeout", 5 + 2)  # which counts from the body's end


def test_a_stream_has_its_time_limit_for_each_part() -> None:
    guard, fake = guarded(request_timeout_s=2)
    reply = answer(guard, "GET", "/v1/stream", query="parts=5&seconds=1.5")
    assert (reply.status, reply.body) == (200, b"part" * 5)
    cut = ask(guard, "GET", "/v1/stream", query="parts=2&seconds=2.5")
    assert [message.get("body") for message in cut[1:]] == [b"part"]  # and no end of it
    assert [status for *_, status, _ in fake.done] == [200, 200]


def test_a_client_that_leaves_before_its_body_is_here_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    guard, fake = guarded()
    unheard = ask(guard, "POST", "/v1/echo/x", parts=(b"a",), gone=True)
    assert [message.get("status", message.get("body")) for message in unheard] == [499, b""]  # BentoML waits for it
    assert fake.done[0][:3] == ("/v1/echo/{name}", "POST", 499)
    assert [record.levelname for record in caplog.records if record.name.startswith("reclaim")] == ["INFO"]


def test_a_fault_is_answered_without_its_details_and_logged_with_them(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - an application's signature
        raise TimeoutError("a secret of its own")

    reply = answer(Guard(broken, lambda: FakeService()), "GET", "/anything")
    assert (reply.status, reply.code) == (500, "internal")
    assert b"secret" not in reply.body
    (record,) = [record for record in caplog.records if record.name == "reclaim.serving.http.guard"]
    assert record.exc_info is not None
    assert "a secret of its own" in caplog.text
    assert record.__dict__["request_id"] == reply.headers["x-request-id"]


def test_a_fault_in_the_middle_of_an_answer_is_logged_and_the_answer_left_open(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def breaks(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - an application's signature
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("in the middle")

    sent = ask(Guard(breaks, lambda: FakeService()), "GET", "/anything")
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert "in the middle" in caplog.text


def test_an_access_line_has_its_facts_and_no_query(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes(0.25, monkeypatch)
    caplog.set_level(logging.INFO, logger="reclaim.access")
    guard, fake = guarded()
    answer(guard, "POST", "/v1/echo/x", query="token=secret", headers={"X-Request-Id": "mine-1"}, parts=(b"body",))
    (record,) = caplog.records
    facts = {name: getattr(record, name) for name in ("method", "path", "status", "bytes", "request_id")}
    assert facts == {"method": "POST", "path": "/v1/echo/x", "status": 200, "bytes": 3, "request_id": "mine-1"}
    assert record.__dict__["ms"] == 250
    assert "secret" not in str(vars(record))
    assert "body" not in str(vars(record))
    caplog.clear()
    answer(guard, "GET", "/livez")
    assert not caplog.records  # it is asked every few seconds
    answer(guard, "GET", "/v1/\nFAKE 200")
    assert "\n" not in caplog.records[0].getMessage()
    answer(guard, "BREW", "/" + "x" * 10_000)
    assert len(caplog.records[1].getMessage()) < 300
    assert fake.done[-1][:2] == ("other", "other")  # whatever callers think of, the record has few labels


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_a_request_id_is_taken_over_only_where_it_is_sane(given_id: bytes) -> None:
    guard, _ = guarded()
    reply = answer(guard, "GET", "/livez", headers={"x-request-id": given_id.decode("latin-1")})
    sane = 1 <= len(given_id) <= 64 and all(33 <= byte <= 126 for byte in given_id)
    assert (reply.headers["x-request-id"].encode() == given_id) == sane


@contextmanager
def served(app: Any) -> Iterator[int]:
    """Serve an application over a socket of this machine for a while; gives its port."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            soon(lambda: server.started)
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)


def talk(port: int, *parts: bytes) -> list[tuple[int, bytes]]:
    """Return status and body of what comes back for the bytes sent: an answer for each part, on one line."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line:
        heard = []
        for part in parts:
            line.sendall(part)
            reply = http.client.HTTPResponse(line)
            reply.begin()
            heard.append((reply.status, reply.read()))
        return heard


POST = b"POST /v1/echo/x HTTP/1.1\r\nHost: localhost\r\n"


def test_over_a_socket_refusals_arrive_and_the_connection_stays_usable() -> None:
    guard, fake = guarded(body_timeout_s=3_600)
    with served(guard) as port:
        too_large = POST + b"Content-Length: 3000\r\n\r\n" + b"a" * 3_000
        refused, taken = talk(port, too_large, POST + b"Content-Length: 2\r\n\r\nab")
        assert (refused[0], taken) == (413, (200, b"x 2"))  # the next request on the same line
        assert talk(port, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n") == [(200, b'{"alive": true}')]
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(POST + b"Content-Length: 9\r\n\r\nab")
        soon(lambda: len(fake.done) == 4)
        chunks = b"".join(b"400\r\n" + b"c" * 1_024 + b"\r\n" for _ in range(3))
        assert talk(port, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)[0][0] == 413
        soon(lambda: len(fake.done) == 5)
    assert [status for *_, status, _ in fake.done] == [413, 200, 200, 499, 413]


def test_over_a_socket_the_rest_of_a_body_is_not_waited_for() -> None:
    guard, fake = guarded(body_timeout_s=0.05)
    with served(guard) as port:
        ((status, _),) = talk(port, POST + b"Content-Length: 9\r\n\r\nab")
        soon(lambda: len(fake.done) == 1)
    assert status == 408
    assert [status for *_, status, _ in fake.done] == [408]


def test_the_paths_of_bentoml_are_guarded_too(service: ModuleType, token_file: Path) -> None:
    import bentoml

    assert service  # BentoML was imported past its warnings

    class Inner:
        pass

    guarded = bentoml.service(name="guarded", workers=1)(Inner)
    guarded.add_asgi_middleware(Guard, runtime=lambda: FakeService(token_file=token_file))
    app = guarded.to_asgi()
    for path in ("/metrics", "/", "/docs.json", "/schema.json"):
        assert answer(app, "GET", path).code == "unauthorized"
    assert json.loads(answer(app, "GET", "/readyz").body) == {"ready": True}
    page = answer(app, "GET", "/schema.json", headers={"authorization": f"Bearer {TOKEN.decode()}"})
    assert json.loads(page.body)["name"] == "guarded"


def test_a_route_that_does_not_read_its_body_is_not_waited_for_either() -> None:
    async def deaf(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - an application's signature
        await asyncio.sleep(5)

    reply = answer(Guard(deaf, lambda: FakeService(body_timeout_s=3)), "POST", "/anything", parts=(b"x",))
    assert (reply.status, reply.code, reply.after_s) == (503, "timeout", 3)


def calls_of(app: Callable[..., Awaitable[None]]) -> int:
    """Return how many functions a request calls, of Python and of C; a second one, when nothing is done for once."""
    headers = [(b"host", b"x"), *((b"x-%d" % k, b"x") for k in range(5))]
    scope = {"type": "http", "method": "GET", "path": "/v1/x", "headers": headers}
    calls: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:  # noqa: ARG001 - a profiler's signature
        if event in ("call", "c_call"):
            calls.append(event)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        pass

    async def run() -> None:
        await app(dict(scope), receive, send)
        sys.setprofile(note)
        try:
            await app(dict(scope), receive, send)
        finally:
            sys.setprofile(None)

    run_timeless(run())
    return len(calls)


def test_the_guard_costs_next_to_nothing(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "reclaim")  # a line of the access log costs more than all checks

    async def bare(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - an application's signature
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    class Quiet(FakeService):
        def request_done(self, endpoint: str, method: str, status: int, seconds: float) -> None:
            """Let it go."""

    fake = Quiet(token_file=token_file)
    guard = Guard(bare, lambda: fake)

    async def with_token(scope: Any, receive: Any, send: Any) -> None:
        await guard({**scope, "headers": [*scope["headers"], (b"authorization", b"Bearer " + TOKEN)]}, receive, send)

    assert calls_of(with_token) - calls_of(bare) < 81  # 80: some 15 µs


def test_bodies_under_way_share_one_bound_and_release_their_part() -> None:
    guard, _ = guarded(max_inflight_bytes=3_000)

    async def request(parts: tuple[bytes, ...], path: str, query: str = "", announced: bool = False) -> int:
        sent, left = list[Message](), list(parts)

        async def receive() -> Message:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        async def send(message: Message) -> None:
            sent.append(message)

        length = [(b"content-length", b"%d" % sum(map(len, parts)))] if announced else []
        scope = {"type": "http", "method": "POST", "path": path, "query_string": query.encode(), "headers": length}
        await guard({**scope, "headers": length or [(b"transfer-encoding", b"chunked")]}, receive, send)
        if sent[0]["status"] == 429:
            assert (b"retry-after", b"1") in sent[0]["headers"]
        return int(sent[0]["status"])

    async def run(announced: bool) -> list[int]:
        slow = asyncio.create_task(request((b"x" * 1_000, b"x" * 1_000), "/v1/slow", "seconds=2", announced))
        await asyncio.sleep(1)
        meanwhile = [await request((b"x" * n, b"x"), "/v1/echo/x", "", announced) for n in (1_000, 999, 999)]
        return [*meanwhile, await slow, await request((b"x" * 2_000, b""), "/v1/echo/x", "", announced)]

    for announced in (True, False):
        assert run_timeless(run(announced)) == [429, 200, 200, 200, 200]


def test_a_body_larger_than_the_shared_bound_is_refused_for_good() -> None:
    guard, _ = guarded(max_inflight_bytes=1_024)
    assert answer(guard, "POST", "/v1/echo/x", headers={"content-length": "1025"}, parts=(b"x",)).status == 413


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:3000", "127.0.0.1:3000", "[::1]:3000", "10.1.2.3", "a.localhost", "me.example:1", ""],
)
def test_a_service_without_a_token_goes_by_localhost_addresses_and_listed_names(host: str) -> None:
    guard, _ = guarded(allowed_hosts="you.example, ME.example")
    for _ in range(2):  # the second time it is known
        assert answer(guard, "POST", "/v1/echo/x", headers={"host": host}, parts=(b"x",)).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:3000", "127.0.0.1.evil.example", "[evil]:1"])
def test_a_name_that_a_page_may_have_resolved_to_this_machine_is_refused_with_the_remedy(host: str) -> None:
    guard, _ = guarded()
    refused = answer(guard, "POST", "/v1/echo/x", headers={"host": host}, parts=(b"x",))
    assert (refused.status, refused.code) == (403, "unknown_host")
    assert b"RECLAIM_ALLOWED_HOSTS" in refused.body


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:8080", "http://localhost"])
def test_a_page_of_another_origin_is_refused_with_the_remedy(origin: str) -> None:
    guard, _ = guarded(allowed_origins="https://tools.example/")
    headers = {"host": "localhost:3000", "content-type": "application/json"}
    refused = answer(guard, "POST", "/v1/echo/x", headers={**headers, "origin": origin}, parts=(b"x",))
    assert (refused.status, refused.code) == (403, "foreign_origin")
    assert b"RECLAIM_ALLOWED_ORIGINS" in refused.body
    for allowed in ("http://localhost:3000", "https://tools.example"):
        assert answer(guard, "POST", "/v1/echo/x", headers={**headers, "origin": allowed}, parts=(b"x",)).status == 200


def test_a_browser_lets_a_page_of_a_listed_origin_call_and_read_and_no_other_page(token_file: Path) -> None:
    ours, other = {"origin": "https://tools.example"}, {"origin": "https://evil.example"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    allowed = "access-control-allow-origin"
    guard, fake = guarded(allowed_origins="https://tools.example")
    first = answer(guard, "OPTIONS", "/v1/echo/x", headers={**ours, **asks})
    assert (first.status, first.headers[allowed]) == (200, "https://tools.example")
    assert "POST" in first.headers["access-control-allow-methods"]
    assert "content-type" in first.headers["access-control-allow-headers"]
    for headers, status in (({}, 200), ({"content-type": "text/plain"}, 415)):  # the page reads a refusal, too
        reply = answer(guard, "POST", "/v1/echo/x", headers={**ours, **headers}, parts=(b"x",))
        assert (reply.status, reply.headers[allowed]) == (status, "https://tools.example")
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert [status for *_, status, _ in fake.done] == [200, 415]
    for headers in (other, {**other, **asks}):
        refused = answer(guard, "OPTIONS", "/v1/echo/x", headers=headers)
        assert refused.status == 403
        assert allowed not in refused.headers
    for bounds in ({}, {"allowed_origins": "https://tools.example", "token_file": token_file}):
        assert allowed not in answer(guarded(**bounds)[0], "POST", "/v1/echo/x", headers=ours, parts=(b"x",)).headers


def test_metrics_and_probes_are_asked_for_under_any_name_and_a_token_is_proof_enough(token_file: Path) -> None:
    foreign = {"host": "reclaim.monitoring.svc:3000", "origin": "https://evil.example"}
    guard, _ = guarded()
    assert answer(guard, "GET", "/metrics", headers=foreign).status == 404  # of this test's application
    assert answer(guard, "GET", "/readyz", headers=foreign).status == 200
    guard, _ = guarded(token_file=token_file)
    headers = {**foreign, "authorization": f"Bearer {TOKEN.decode()}"}
    assert answer(guard, "POST", "/v1/echo/x", headers=headers, parts=(b"x",)).status == 200


def test_a_length_with_a_transfer_encoding_is_refused_and_the_connection_closed() -> None:
    guard, _ = guarded()
    both = b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    with served(guard) as port, socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line:
        line.sendall(POST + both)
        refused = http.client.HTTPResponse(line)
        refused.begin()
        assert (refused.status, json.loads(refused.read())["error"]["code"]) == (400, "malformed_http")
        with suppress(ConnectionResetError):
            assert line.recv(1) == b""
