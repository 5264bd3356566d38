"""Fetch under faulty servers and connections: a file has its name with the exact bytes, or not at all."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import reclaim.data.fetch.job as fetch_module
from reclaim.cli import app as cli
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.download import TRIES, TRIES_AT_CHECKSUM, _md5
from reclaim.data.fetch.job import (
    GIVE_UP_AFTER,
    FetchConfig,
    FetchReport,
    fetch,
    first_missing,
    parse_shards,
)
from reclaim.data.fetch.ledger import LEDGER, Ledger
from reclaim.data.fetch.locations import TRACES

PATIENCE_S = 120.0
"""Timeout of events that must happen."""
SHARD = "instance_usage-000000000000.json.gz"
BODY = bytes(i * i // 255 % 256 for i in range(300_000))


@dataclass(frozen=True)
class Fault:
    """One faulty answer of the server."""

    close_after: int | None = None
    """Bytes of the body sent before the connection ends."""
    reset: bool = False
    """End the connection with a reset."""
    status: int | None = None
    retry_after: str = ""
    ignore_range: bool = False
    ignore_version: bool = False
    """Serve the Range without comparing If-Range."""
    wrong_bytes: bool = False
    etag: str | None = None
    span: str | None = None
    """A Content-Range other than the requested one."""
    unsized: bool = False
    """No Content-Length: the body is sent in chunks."""
    location: str = ""
    hold: Callable[[], object] | None = None
    """Called when half of the body has been sent."""


FINE = Fault()


class Server(ThreadingHTTPServer):
    """One daemon thread for each connection."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing: tests disconnect on purpose."""


@dataclass
class Mirror:
    """A mirror on this machine, with its faults to come."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    """Path → one fault for each coming GET; then ``always``, then none."""
    always: dict[str, Fault] = field(default_factory=dict)
    md5: bool = True
    etags: bool = True
    before_answer: Callable[[], object] = lambda: None
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of each request."""
    sent: int = 0
    """Bytes of all bodies."""
    url: str = ""

    def gets(self, path: str = SHARD) -> list[str]:
        """Return the Range of every GET of a path."""
        return [span for method, name, span in self.asked if (method, name) == ("GET", path)]


def _handler(mirror: Mirror) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path, asked = self.path.lstrip("/"), self.headers.get("Range", "")
            mirror.asked.append((self.command, path, asked))
            mirror.before_answer()
            queue = mirror.faults.get(path, []) if with_body else []
            fault = queue.pop(0) if queue else mirror.always.get(path, FINE)
            body = mirror.files.get(path)
            status = fault.status or (404 if body is None else 200)
            if status != 200 or body is None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                if fault.retry_after:
                    self.send_header("Retry-After", fault.retry_after)
                if fault.location:
                    self.send_header("Location", fault.location)
                self.end_headers()
                return
            etag = fault.etag or f'"{hashlib.sha256(body).hexdigest()[:8]}"'
            whole, start = body, 0
            same = fault.ignore_version or self.headers.get("If-Range", etag) == etag
            if asked and same and not fault.ignore_range:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
            self.send_response(416 if start >= len(whole) > 0 else 206 if start else 200)
            if start:
                where = (
                    f"bytes */{len(whole)}" if start >= len(whole) else f"bytes {start}-{len(whole) - 1}/{len(whole)}"
                )
                self.send_header("Content-Range", fault.span or where)
            body = whole[start:]
            if mirror.etags:
                self.send_header("ETag", etag)
            if mirror.md5 and with_body:
                digest = base64.b64encode(hashlib.md5(whole).digest()).decode()
                self.send_header("x-goog-hash", f"crc32c=AAAAAA==,md5={digest}")
            if fault.unsized:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not with_body:
                return
            if fault.wrong_bytes:
                body = bytes([body[0] ^ 1]) + body[1:]
            cut = len(body) if fault.close_after is None else min(fault.close_after, len(body))
            pieces = [body[: cut // 2], body[cut // 2 : cut]]
            for piece in filter(None, pieces):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if fault.unsized else piece)
                mirror.sent += len(piece)
                if fault.hold is not None and piece is pieces[0]:
                    self.wfile.flush()
                    fault.hold()
            if fault.unsized and cut == len(body):
                self.wfile.write(b"0\r\n\r\n")
            if cut < len(body):
                self.close_connection = True
                if fault.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()

    return Handler


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    mirror = Mirror()
    with Server(("127.0.0.1", 0), _handler(mirror)) as server:
        mirror.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield mirror
        server.shutdown()
        thread.join()


def wait_until(met: Callable[[], bool]) -> None:
    """Wait for an action of another thread or process."""
    until = time.monotonic() + PATIENCE_S
    while not met() and time.monotonic() < until:
        time.sleep(0.01)


def shards(n: int, table: str = "instance_usage") -> dict[str, bytes]:
    return {f"{table}-{i:012d}.json.gz": bytes([i % 256]) * (1_000 + i) for i in range(n)}


def config(mirror: Mirror, **changes: Any) -> FetchConfig:
    usual: dict[str, Any] = {
        "trace": "google-v3", "cell": "a", "tables": ("instance_usage",), "shards": "0", "base_url": mirror.url,
        "backoff_s": 0.0, "timeout_s": PATIENCE_S,
    }  # fmt: skip
    return FetchConfig(**(usual | changes))


def run(mirror: Mirror, out: Path, **changes: Any) -> FetchReport:
    return fetch(config(mirror, **changes), out)


def files_in(out: Path) -> dict[str, bytes]:
    """Return path → bytes of every file in the folder except its ledger."""
    files = (p for p in sorted(out.rglob("*")) if p.is_file() and p.name != LEDGER)
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in files}


# which shards


@pytest.mark.parametrize(
    ("text", "shards"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0-3,7", (0, 1, 2, 3, 7)), ("7, 1 - 2,2", (1, 2, 7)), ("00", (0,))],
)
def test_shards_are_numbers_and_ranges(text: str, shards: tuple[int, ...]) -> None:
    assert parse_shards(text) == shards


@pytest.mark.parametrize("text", ["", ",", "3-1", "-1", "1-", "a", "1;2", "1-2-3", "0-99999999999", "1.5"])
def test_shards_that_are_neither_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected numbers and ranges below 1,000,000, such as 0-3,7"):
        parse_shards(text)


@settings(deadline=None)
@given(st.integers(0, 5_000))
def test_the_number_of_shards_is_found_in_few_requests(n: int) -> None:
    asked: list[int] = []
    assert first_missing(lambda shard: asked.append(shard) or shard < n) == n  # type: ignore[func-returns-value]  # on purpose
    assert len(asked) <= 2 + 2 * n.bit_length()


def test_without_shards_all_are_fetched_and_their_number_is_requested_once(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files = shards(11) | shards(1, "machine_events")
    tables = ("instance_usage", "machine_events")
    assert len(run(mirror, tmp_path / "o", tables=tables, shards=None).fetched) == 12
    assert files_in(tmp_path / "o") == mirror.files
    mirror.asked.clear()
    report = run(mirror, tmp_path / "o", tables=tables, shards=None)
    assert (report.fetched, len(report.files), mirror.asked) == ((), 12, [])


def test_of_several_tables_a_shorter_one_yields_the_shards_it_has(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files = shards(5) | shards(2, "machine_events")
    tables = ("instance_usage", "machine_events")
    names = run(mirror, tmp_path / "o", tables=tables, shards="1-3").files
    assert [n[:-8] for n in names] == [
        "instance_usage-000000000001", "instance_usage-000000000002", "instance_usage-000000000003",
        "machine_events-000000000001",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no shard 5 \(instance_usage has 5, machine_events has 2, counted from 0\)"):
        run(mirror, tmp_path / "o", tables=tables, shards="3-5")


def test_an_unpublished_shard_is_named_with_the_options_to_check(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files = shards(2)
    with pytest.raises(
        TraceError, match=r"1 of 2 files not fetched: http.*000007.json.gz: no such object .HTTP 404.*--shards"
    ):
        run(mirror, tmp_path / "o", shards="1,7")
    assert list(files_in(tmp_path / "o")) == ["instance_usage-000000000001.json.gz"]
    assert len(mirror.gets("instance_usage-000000000007.json.gz")) == 1  # it will not come by asking again
    with pytest.raises(TraceError, match=r"machine_events-000000000000.json.gz: no such object; check --base-url"):
        run(mirror, tmp_path / "o", tables=("machine_events",), shards=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace": "google-v9"}, "trace must be one of google-v3, google-v2.1, alibaba-2017, got 'google-v9'"),
        ({"cell": "i"}, "--cell must be one of a, b, c, d, e, f, g, h, got 'i'"),
        ({"trace": "google-v2.1", "tables": ()}, "google-v2.1 has no cells; leave out --cell a"),
        ({"tables": ("usage", "jobs")}, "google-v3: no table jobs, usage; it has collection_events, instance_events"),
        ({"trace": "alibaba-2017", "cell": None, "tables": ()}, "no public address; .* survey: .* --base-url URL"),
        ({"base_url": "http://example.org/x"}, "expected an https:// URL"),
        ({"base_url": "ftp://127.0.0.1/x"}, "expected an https:// URL"),
        ({"base_url": "traces"}, "expected an https:// URL"),
        ({"base_url": "https://"}, "expected an https:// URL"),
        ({"base_url": "http://[::1"}, "not a URL"),
        ({"parallel": 0}, "parallel must be between 1 and 64, got 0"),
        ({"shards": "x"}, "--shards 'x'"),
    ],
)
def test_a_mistake_in_the_options_is_named_before_any_request(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FetchConfig(**({"trace": "google-v3", "cell": "a"} | changes))


def test_published_addresses_are_https_and_name_every_object() -> None:
    assert FetchConfig("google-v3", cell="b").url == "https://storage.googleapis.com/clusterdata_2019_b"
    assert TRACES["google-v3"].objects["machine_events"].format(shard=3, shards=None) == (
        "machine_events-000000000003.json.gz"
    )
    old = TRACES["google-v2.1"]
    assert FetchConfig("google-v2.1").url == "https://storage.googleapis.com/clusterdata-2011-2"
    assert old.objects["task_usage"].format(shard=7, shards=old.shards["task_usage"]) == (
        "task_usage/part-00007-of-00500.csv.gz"
    )
    for host in ("http://localhost:1/x", "http://[::1]:1", "http://127.0.0.2", "https://example.org/x"):
        assert FetchConfig("alibaba-2017", base_url=host + "/").url == host


# breaks


def test_a_broken_connection_is_resumed_where_it_broke(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.faults[SHARD] = BODY, [Fault(close_after=100_000, reset=True)]
    report = run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert len(mirror.gets()) == 2
    assert report.n_bytes == len(BODY)  # nothing that came came twice, though a reset may lose what was on its way


def test_a_short_read_is_resumed_after_its_last_byte(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.faults[SHARD] = BODY, [Fault(close_after=n) for n in (1, 0, 99_999, 7)]
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", "bytes=1-", "bytes=1-", "bytes=100000-", "bytes=100007-"]
    assert mirror.sent == len(BODY)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 4_000),
    breaks=st.lists(
        st.one_of(
            st.builds(Fault, close_after=st.integers(1, 2_000), ignore_range=st.booleans(), unsized=st.booleans()),
            st.builds(Fault, close_after=st.integers(1, 2_000), reset=st.just(True)),
            st.builds(Fault, status=st.sampled_from([429, 500, 503])),
        ),
        max_size=TRIES - 1,
    ),
    etags=st.booleans(),
)
def test_after_any_sequence_of_faults_the_bytes_are_exact(
    mirror: Mirror, size: int, breaks: list[Fault], etags: bool
) -> None:
    body = BODY[-size:] if size else b""
    mirror.files, mirror.faults, mirror.etags = {SHARD: body}, {SHARD: list(breaks)}, etags
    with tempfile.TemporaryDirectory() as folder:
        run(mirror, Path(folder))
        assert files_in(Path(folder)) == {SHARD: body}


def test_any_number_of_breaks_is_retried_while_new_bytes_come(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.always[SHARD] = BODY[:10_000], Fault(close_after=300)
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY[:10_000]}
    assert len(mirror.gets()) == 34 > TRIES  # 33 of 300 bytes, and the rest


def test_a_server_without_new_bytes_is_given_up(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.always[SHARD] = BODY, Fault(close_after=1_000, ignore_range=True)
    with pytest.raises(TraceError, match=r"000000.json.gz: .*given up after 8 tries in a row without a new byte"):
        run(mirror, tmp_path / "o")
    assert list(files_in(tmp_path / "o")) == [SHARD + ".partial"]
    assert len(mirror.gets()) == TRIES


def test_a_server_that_ignores_ranges_is_read_from_the_start(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD] = BODY
    mirror.faults[SHARD] = [Fault(close_after=1_000), Fault(ignore_range=True)]
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", "bytes=1000-"]
    assert mirror.sent == 1_000 + len(BODY)


def test_a_server_without_etags_is_read_from_the_start(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.faults[SHARD], mirror.etags = BODY, [Fault(close_after=1_000)], False
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", ""]


def test_a_weak_etag_names_no_version(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD] = BODY
    mirror.faults[SHARD] = [Fault(close_after=1_000, etag='W/"1"'), Fault(etag='W/"1"')]
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", ""]


def test_a_partial_file_longer_than_the_object_is_thrown_away(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.faults[SHARD] = BODY, [Fault(close_after=0)] * TRIES
    with pytest.raises(TraceError):
        run(mirror, tmp_path / "o")
    (tmp_path / "o" / (SHARD + ".partial")).write_bytes(BODY + b"more")
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets()[-2:] == [f"bytes={len(BODY) + 4}-", ""]


@pytest.mark.parametrize(
    "fault",
    [Fault(span="bytes 0-299999/300000"), Fault(span="bytes 1000-8/9"), Fault(etag='"other"', ignore_version=True)],
)
def test_a_range_other_than_the_requested_one_is_not_appended(tmp_path: Path, mirror: Mirror, fault: Fault) -> None:
    mirror.files[SHARD] = BODY
    mirror.faults[SHARD] = [Fault(close_after=1_000), fault]
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", "bytes=1000-", ""]


def test_a_range_of_unstated_total_is_appended(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD] = BODY
    mirror.faults[SHARD] = [Fault(close_after=1_000), Fault(span="bytes 1000-299999/*")]
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", "bytes=1000-"]


def test_an_object_of_unstated_length_is_read_from_the_start_after_a_break(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.faults[SHARD] = BODY, [Fault(close_after=1_000, unsized=True), Fault(unsized=True)]
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", ""]


def test_an_object_that_changed_in_between_is_never_mixed_with_the_old(tmp_path: Path, mirror: Mirror) -> None:
    new = BODY[::-1]
    mirror.files[SHARD], mirror.md5 = BODY, False  # nothing but the version tells
    mirror.faults[SHARD] = [Fault(close_after=100_000, hold=lambda: mirror.files.update({SHARD: new}))]
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: new}
    assert mirror.gets() == ["", "bytes=100000-"]


def test_another_mirror_does_not_continue_the_partial_file_of_the_first(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= {SHARD: BODY, f"copy/{SHARD}": BODY}
    mirror.faults[SHARD] = [Fault(close_after=9_000), *[Fault(close_after=0)] * TRIES]
    with pytest.raises(TraceError):
        run(mirror, tmp_path / "o")
    run(mirror, tmp_path / "o", base_url=mirror.url + "/copy/")
    assert mirror.gets(f"copy/{SHARD}") == [""]
    assert files_in(tmp_path / "o") == {SHARD: BODY}


class RecordedWaits(threading.Event):
    """An event that records the requested waits and returns at once."""

    waits: list[float]

    def wait(self, timeout: float | None = None) -> bool:
        """Record the timeout and return at once."""
        if timeout is None:
            return super().wait()
        self.waits.append(timeout)
        return False


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(RecordedWaits, "waits", [], raising=False)
    monkeypatch.setattr(fetch_module, "Event", RecordedWaits)
    return RecordedWaits.waits


def test_a_busy_server_is_asked_again_after_the_pause_it_names(
    tmp_path: Path, mirror: Mirror, waits: list[float]
) -> None:
    mirror.files[SHARD] = BODY
    busy = [(503, "7"), (429, "3600"), (500, ""), (503, "Fri, 31 Dec 1999 23:59:59 GMT")]
    mirror.faults[SHARD] = [Fault(status=status, retry_after=after) for status, after in busy]
    run(mirror, tmp_path / "o", backoff_s=1.0)
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert waits[:2] == [7.0, 60.0]  # no server is waited for longer than a minute
    assert 2.0 <= waits[2] <= 4.0  # the third in a row: 4 s, and a random half of it less
    assert 4.0 <= waits[3] <= 8.0


def test_pauses_double_up_to_a_minute_until_the_last_try(tmp_path: Path, mirror: Mirror, waits: list[float]) -> None:
    mirror.files[SHARD], mirror.always[SHARD] = BODY, Fault(status=503)
    with pytest.raises(TraceError, match=r"HTTP 503 Service Unavailable; given up after 8 tries"):
        run(mirror, tmp_path / "o", backoff_s=2.0)
    assert [2**k <= wait <= 2 ** (k + 1) for k, wait in enumerate(waits[:5])] == [True] * 5
    assert len(waits) == TRIES - 1
    assert max(waits) <= 60.0


def test_a_silent_connection_is_broken_off_and_resumed(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD] = BODY
    mirror.always[SHARD] = Fault(close_after=100_000, hold=lambda: wait_until(lambda: any(mirror.gets())))
    run(mirror, tmp_path / "o", timeout_s=0.5)
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    first, *others = mirror.gets()
    rest = next(span for span in others if span)  # on a slow machine half a second may pass before anything comes
    assert (first, 0 < int(rest.removeprefix("bytes=").removesuffix("-")) <= 50_000) == ("", True)


def test_an_unreachable_server_is_named(tmp_path: Path, mirror: Mirror) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TraceError, match=rf"127.0.0.1:{port}/{SHARD}: .*refused.*given up after 8 tries"):
        run(mirror, tmp_path / "o", base_url=f"http://127.0.0.1:{port}")


def test_a_refused_request_is_not_repeated(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.always[SHARD] = BODY, Fault(status=403)
    with pytest.raises(TraceError, match="HTTP 403 Forbidden; check --base-url"):
        run(mirror, tmp_path / "o")
    assert len(mirror.gets()) == 1


def test_a_redirection_is_followed_but_not_to_plain_http(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files["elsewhere"] = mirror.files[SHARD] = BODY
    mirror.always[SHARD] = Fault(status=302, location="/elsewhere")
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    mirror.always[SHARD] = Fault(status=302, location="http://192.0.2.1/x")
    with pytest.raises(ConfigError, match=r"http://192.0.2.1/x: expected an https:// URL"):
        run(mirror, tmp_path / "p")


@pytest.mark.parametrize("hop", ["http://b.test/x", "http://127.0.0.1/x", "https://b.test/x"])
def test_no_hop_of_a_redirection_leaves_https_even_if_the_last_returns_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hop: str
) -> None:
    start, end = f"https://a.test/{SHARD}", "https://c.test/x"
    onward, asked = {start: hop, hop: end}, []

    def answer(_: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        if asked[-1] in onward:
            return httpx.Response(302, headers={"Location": onward[asked[-1]]})
        return httpx.Response(200, stream=httpx.ByteStream(BODY))

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    wanted = FetchConfig(
        "google-v3", cell="a", tables=("instance_usage",), shards="0", base_url="https://a.test", backoff_s=0.0
    )
    if hop.startswith("https"):
        fetch(wanted, tmp_path / "o")
        assert files_in(tmp_path / "o") == {SHARD: BODY}
        assert asked == [start, hop, end]
    else:
        with pytest.raises(ConfigError, match=rf"https://a.test: redirects to {hop}, out of HTTPS"):
            fetch(wanted, tmp_path / "o")
        assert asked == [start]


# checksums


def test_wrong_bytes_are_deleted_and_fetched_again(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.faults[SHARD] = BODY, [Fault(wrong_bytes=True)]
    report = run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", ""]
    assert report.unchecked == ()


def test_bytes_that_stay_wrong_are_deleted_and_the_file_is_named(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(3)
    mirror.always[SHARD] = Fault(wrong_bytes=True)
    with pytest.raises(
        TraceError, match=rf"1 of 3 files not fetched: .*/{SHARD}: wrong md5: expected \S+, got .*, 3 times"
    ):
        run(mirror, tmp_path / "o", shards="0-2")
    assert sorted(files_in(tmp_path / "o")) == sorted(shards(3))[1:]
    assert len(mirror.gets()) == TRIES_AT_CHECKSUM


def test_without_any_checksum_only_the_length_is_checked_and_the_report_says_so(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD], mirror.md5 = BODY, False
    assert run(mirror, tmp_path / "o").unchecked == (SHARD,)


V2_NAMES = ("task_usage/part-00000-of-00500.csv.gz", "task_usage/part-00001-of-00500.csv.gz")


def v2(mirror: Mirror, out: Path) -> FetchReport:
    return run(mirror, out, trace="google-v2.1", cell=None, tables=("task_usage",), shards="0-1")


def publish_v2(mirror: Mirror, **sums: str) -> None:
    mirror.files |= {name: name.encode() * 50 for name in V2_NAMES} | {"schema.csv": b"file pattern,field number\n"}
    lines = {name: hashlib.sha256(mirror.files[name]).hexdigest() for name in V2_NAMES} | sums
    mirror.files["SHA256SUM"] = "".join(f"{digest} *{name}\n" for name, digest in lines.items()).encode()
    mirror.md5 = False


def test_each_file_of_the_2011_trace_is_checked_against_the_published_list(tmp_path: Path, mirror: Mirror) -> None:
    publish_v2(mirror)
    mirror.faults[V2_NAMES[1]] = [Fault(wrong_bytes=True)]
    report = v2(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == mirror.files
    assert mirror.asked[0][1] == "SHA256SUM"
    assert mirror.gets(V2_NAMES[1]) == ["", ""]
    assert report.files == ("schema.csv", *V2_NAMES)
    assert report.unchecked == ("schema.csv",)  # the list made above leaves it out
    mirror.asked.clear()
    assert v2(mirror, tmp_path / "o").fetched == ()
    assert mirror.asked == []


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    publish_v2(mirror, **{V2_NAMES[0]: "0" * 64})
    with pytest.raises(TraceError, match=rf"1 of 3 files not fetched: .*{V2_NAMES[0]}: wrong sha256: expected 0{{64}}"):
        v2(mirror, tmp_path / "o")
    assert V2_NAMES[0] not in files_in(tmp_path / "o")


def test_a_malformed_list_of_checksums_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files["SHA256SUM"] = b"<html>Sign in</html>\n"
    with pytest.raises(TraceError, match="SHA256SUM line 1: not of a sha256sum list"):
        v2(mirror, tmp_path / "o")


def test_a_table_of_known_size_has_no_shard_beyond_it(tmp_path: Path, mirror: Mirror) -> None:
    publish_v2(mirror)
    with pytest.raises(ConfigError, match=r"no shard 500 \(task_usage has 500, counted from 0\)"):
        run(mirror, tmp_path / "o", trace="google-v2.1", cell=None, tables=("task_usage",), shards="0,500")


def test_a_file_copied_by_hand_is_kept_if_its_checksum_is_the_published_one(tmp_path: Path, mirror: Mirror) -> None:
    publish_v2(mirror)
    for name, content in ((V2_NAMES[0], mirror.files[V2_NAMES[0]]), (V2_NAMES[1], b"something else")):
        (tmp_path / "o" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "o" / name).write_bytes(content)
    assert v2(mirror, tmp_path / "o").fetched == ("schema.csv", V2_NAMES[1])
    assert files_in(tmp_path / "o") == mirror.files


def test_the_alibaba_trace_comes_from_the_address_given(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files = {f"{table}.csv": table.encode() for table in TRACES["alibaba-2017"].objects}
    run(mirror, tmp_path / "o", trace="alibaba-2017", cell=None, tables=(), shards=None)
    assert files_in(tmp_path / "o") == mirror.files


def test_the_checksum_of_a_packed_file_is_ignored_if_it_is_unpacked_in_transit() -> None:
    sums = {"x-goog-hash": "crc32c=AAAAAA==, md5=rL0Y20zC+Fzt72VPzMSk2A=="}
    assert _md5(httpx.Response(200, headers=sums)) == "rL0Y20zC+Fzt72VPzMSk2A=="
    stored = sums | {"x-goog-stored-content-encoding": "gzip"}
    assert _md5(httpx.Response(200, headers=stored)) is None
    assert _md5(httpx.Response(200, headers=stored | {"Content-Encoding": "gzip"})) == "rL0Y20zC+Fzt72VPzMSk2A=="


# the folder


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.files[SHARD] = BODY
    run(mirror, tmp_path / "o")
    monkeypatch.setattr("reclaim.data.fetch.download.file_sha256", _interrupt)
    assert run(mirror, tmp_path / "o").fetched == ()


def test_verified_files_are_not_requested_again_and_changed_ones_are(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(3)
    run(mirror, tmp_path / "o", shards="0-2")
    mirror.asked.clear()
    names = sorted(mirror.files)
    os.utime(tmp_path / "o" / names[0])  # touched, and still the same bytes
    (tmp_path / "o" / names[1]).write_bytes(b"spoilt")
    (tmp_path / "o" / names[2]).unlink()
    assert run(mirror, tmp_path / "o", shards="0-2").fetched == tuple(names[1:])
    assert files_in(tmp_path / "o") == mirror.files
    assert sorted(name for _, name, _ in mirror.asked) == names[1:]


def test_one_failure_lets_the_others_finish_and_all_failures_are_named(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(8)
    bad = sorted(mirror.files)[1:3]
    mirror.always |= {bad[0]: Fault(status=410), bad[1]: Fault(wrong_bytes=True)}
    with pytest.raises(TraceError, match=rf"2 of 8 files.*{bad[0]}: HTTP 410.*{bad[1]}: wrong md5.*what came is kept"):
        run(mirror, tmp_path / "o", shards="0-7", parallel=2)
    assert sorted(files_in(tmp_path / "o")) == sorted(set(mirror.files) - set(bad))
    mirror.always.clear()
    assert run(mirror, tmp_path / "o", shards="0-7").fetched == tuple(bad)


def test_when_everything_fails_the_rest_is_not_tried(tmp_path: Path, mirror: Mirror) -> None:
    with pytest.raises(TraceError, match=f"{GIVE_UP_AFTER} of 200 files not fetched; gave up after {GIVE_UP_AFTER}: "):
        run(mirror, tmp_path / "o", shards="0-199", parallel=1)
    assert len(mirror.asked) < 50


def test_several_files_are_on_their_way_at_once(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(8)
    mirror.before_answer = threading.Barrier(4, timeout=PATIENCE_S).wait  # no answer before four have asked
    run(mirror, tmp_path / "o", shards="0-7", parallel=4)
    assert files_in(tmp_path / "o") == mirror.files


def test_a_folder_of_another_cell_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files[SHARD] = BODY
    run(mirror, tmp_path / "o")
    with pytest.raises(ConfigError, match="o: holds google-v3 cell a; choose another folder"):
        run(mirror, tmp_path / "o", cell="b")
    with pytest.raises(ConfigError, match="o: holds google-v3 cell a; choose another folder"):
        v2(mirror, tmp_path / "o")


def test_a_folder_locked_by_another_fetch_is_refused(tmp_path: Path, mirror: Mirror) -> None:
    with Ledger(tmp_path / "o"), pytest.raises(ConfigError, match="another fetch is writing into it"):
        run(mirror, tmp_path / "o")
    assert mirror.asked == []


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path, mirror: Mirror) -> None:
    (tmp_path / "o").write_text("")
    for out in (tmp_path / "o", tmp_path / "o" / "below"):
        with pytest.raises(ConfigError, match="is not a folder; choose another"):
            run(mirror, out)


def test_the_fact_of_a_truncated_ledger_line_is_determined_again(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(2)
    run(mirror, tmp_path / "o", shards="0-1", parallel=1)
    ledger = tmp_path / "o" / LEDGER
    ledger.write_bytes(ledger.read_bytes()[:-20])
    assert run(mirror, tmp_path / "o", shards="0-1").fetched == ("instance_usage-000000000001.json.gz",)
    assert files_in(tmp_path / "o") == mirror.files


def test_a_ledger_line_after_a_truncated_one_is_kept(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.put("done", "a", bytes=1)
        ledger.put("done", "b", bytes=2)
    (tmp_path / LEDGER).write_bytes((tmp_path / LEDGER).read_bytes()[:-3])
    with Ledger(tmp_path) as ledger:
        ledger.put("done", "c", bytes=3)
    with Ledger(tmp_path) as ledger:
        assert [ledger.get("done", name).get("bytes") for name in "abc"] == [1, None, 3]


def test_a_full_disk_ends_the_run_at_once_and_received_bytes_are_kept(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.files |= shards(100)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run(mirror, tmp_path / "o", shards="0-99", parallel=1)
    assert len(mirror.asked) < 50
    assert all(name.endswith(".partial") for name in files_in(tmp_path / "o"))
    run(mirror, tmp_path / "o", shards="0-99")
    assert files_in(tmp_path / "o") == mirror.files


def test_no_file_has_its_name_before_its_check(tmp_path: Path, mirror: Mirror) -> None:
    seen: list[list[str]] = []
    mirror.files[SHARD] = BODY
    mirror.faults[SHARD] = [
        Fault(hold=lambda: seen.append(list(files_in(tmp_path / "o"))), wrong_bytes=wrong) for wrong in (True, False)
    ]
    run(mirror, tmp_path / "o")
    assert all(SHARD not in names for names in seen)
    assert len(seen) == 2


def test_a_run_after_a_kill_requests_only_the_rest(tmp_path: Path, mirror: Mirror) -> None:
    killed = threading.Event()
    mirror.files[SHARD], mirror.faults[SHARD] = BODY, [Fault(hold=lambda: killed.wait(PATIENCE_S))]
    words = ["fetch", "google-v3", "o", "--cell", "a", "--table", "instance_usage", "--shards", "0"]
    code = "from reclaim.cli.app import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *words, "--base-url", mirror.url], cwd=tmp_path)
    partial = tmp_path / "o" / (SHARD + ".partial")
    wait_until(lambda: partial.exists() and partial.stat().st_size > 100_000)
    process.kill()
    process.wait()
    killed.set()
    have = partial.stat().st_size
    assert 100_000 < have <= len(BODY) // 2
    assert run(mirror, tmp_path / "o").n_bytes == len(BODY) - have
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert mirror.gets() == ["", f"bytes={have}-"]


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_run_stopped_just_before_the_end_makes_no_second_request(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    mirror.files[SHARD] = BODY
    with monkeypatch.context() as patch:
        patch.setattr(os, step, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(mirror, tmp_path / "o")
    assert list(files_in(tmp_path / "o")) == [SHARD + ".partial"]
    run(mirror, tmp_path / "o")
    assert files_in(tmp_path / "o") == {SHARD: BODY}
    assert len(mirror.asked) == 1


# the command line


def test_the_command_prints_its_result(tmp_path: Path, mirror: Mirror) -> None:
    mirror.files |= shards(4)
    words = ["fetch", "google-v3", str(tmp_path / "o"), "--cell", "a", "--table", "instance_usage", "--shards", "0-2"]
    words += ["--base-url", mirror.url]
    result = CliRunner().invoke(cli.app, words)
    assert (result.exit_code, result.stdout) == (
        0, f"{tmp_path / 'o'}: 3 files, 3 of them new (3,003 bytes); 0 without a published checksum\n"
    )  # fmt: skip
    facts = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)
    assert facts == {
        "folder": str(tmp_path / "o"), "files": sorted(shards(3)), "fetched": [], "n_bytes": 0, "unchecked": [],
    }  # fmt: skip


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
