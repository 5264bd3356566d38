"""Downloads under faulty servers and connections: a file has its name with the exact bytes, or not at all."""

from __future__ import annotations

import socket
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reclaim.data.fetch.job as fetch_module
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.download import TRIES, TRIES_AT_CHECKSUM, _md5
from reclaim.data.fetch.job import FetchConfig, fetch
from tests.data.fetch.mirror import BODY, SHARD, Fault, Mirror, files_in, run, shards, wait_until


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


def test_the_checksum_of_a_packed_file_is_ignored_if_it_is_unpacked_in_transit() -> None:
    sums = {"x-goog-hash": "crc32c=AAAAAA==, md5=rL0Y20zC+Fzt72VPzMSk2A=="}
    assert _md5(httpx.Response(200, headers=sums)) == "rL0Y20zC+Fzt72VPzMSk2A=="
    stored = sums | {"x-goog-stored-content-encoding": "gzip"}
    assert _md5(httpx.Response(200, headers=stored)) is None
    assert _md5(httpx.Response(200, headers=stored | {"Content-Encoding": "gzip"})) == "rL0Y20zC+Fzt72VPzMSk2A=="
