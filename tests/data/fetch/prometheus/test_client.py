"""Client and job, on a server of this file: credentials, answers in part, failures that pass, redirections."""

from __future__ import annotations

import base64
import json
import logging
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from reclaim.cli.app import app
from reclaim.cli.results import of_history
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus import client as client_module
from reclaim.data.fetch.prometheus import job, transports
from reclaim.data.fetch.prometheus.client import Access, Client, RefusedError, TooMuchError
from reclaim.data.fetch.prometheus.job import HistoryConfig, fetch_history
from reclaim.data.fetch.prometheus.transports import read_query
from reclaim.data.traces.dialect import Metric, load_dialect

Answer = tuple[int, dict[str, str], bytes]
Respond = Callable[[str, dict[str, str], int], Answer]
"""Path, headers and number of the request → status, headers and body."""
SECRET = "s3cr3t-t0ken"


def ok(data: Any, **more: Any) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps({"status": "success", "data": data, **more}).encode()


def _always(answer: Answer, *_: object) -> Answer:
    return answer


@contextmanager
def serving(respond: Respond, context: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Answer requests on loopback, over TLS with a context; yield the address, and the headers that came."""
    came: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode("latin-1")
            self.do_GET()

        def do_GET(self) -> None:
            came.append(dict(self.headers) | {"body": getattr(self, "body", "")})
            status, headers, body = respond(self.path, came[-1], len(came))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", came
        finally:
            server.shutdown()
            thread.join()


def test_an_answer_with_warnings_is_a_failed_read() -> None:
    """Half a cluster's usage is an underestimate."""
    answer = ok({"resultType": "vector", "result": []}, warnings=["store b is down"])
    with (
        serving(lambda *_: answer) as (url, _),
        Client(Access(url)) as client,
        pytest.raises(TraceError, match="answers in part: store b is down"),
    ):
        client.json("/api/v1/query", {"query": "up"})


def test_headers_and_token_go_along_and_never_into_a_log_or_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "headers").write_text("# the tenant\nX-Scope-OrgID: team-a\n\n")
    (tmp_path / "token").write_text(f"{SECRET}\n")
    caplog.set_level(logging.DEBUG)

    def respond(_: str, headers: dict[str, str], number: int) -> Answer:
        return (500, {}, b"later") if number == 1 else ok(headers["Authorization"] == f"Bearer {SECRET}")

    with serving(respond) as (url, came):
        access = Access(url, tmp_path / "headers", tmp_path / "token", pause_s=0.01)
        with Client(access) as client:
            assert client.json("/api/v1/query", {}) is True
            assert "500" in caplog.text or "later" in caplog.text
    assert {headers["X-Scope-OrgID"] for headers in came} == {"team-a"}
    assert SECRET not in caplog.text
    assert SECRET not in repr(access)


def test_a_token_is_read_again_when_it_is_refused_and_only_once(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")

    def respond(_: str, headers: dict[str, str], number: int) -> Answer:
        token.write_text(SECRET)  # something renews the file
        return ok(1) if headers["Authorization"] == f"Bearer {SECRET}" and number > 1 else (401, {}, b"expired")

    with serving(respond) as (url, came), Client(Access(url, token_file=token)) as client:
        assert client.json("/api/v1/query", {}) == 1
        assert len(came) == 2
    with serving(lambda *_: (401, {}, b"no")) as (url, came), Client(Access(url, token_file=token)) as client:
        with pytest.raises(ConfigError, match="HTTP 401: no; check --token-file") as error:
            client.json("/api/v1/query", {})
        assert SECRET not in str(error.value)
        assert len(came) == 2


def test_a_redirection_is_named_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    with (
        serving(lambda *_: ok(1)) as (other, came),
        serving(lambda path, *_: (302, {"Location": other + path}, b"")) as (url, _),
    ):
        redirected = pytest.raises(RefusedError, match=f"redirects to {other}; pass that as --url")
        with Client(Access(url, token_file=tmp_path / "token")) as client, redirected:
            client.json("/api/v1/query", {})
        assert came == []


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("https://prometheus.example/api/v1/query", "redirects to https://prometheus.example; pass that as --url"),
        ("/prom/api/v1/query", "redirects to http://127.0.0.1:[0-9]+/prom; pass that as --url"),
        (
            "https://sso.example/start?rd=/api/v1/query",
            "start.rd=/api/v1/query, which is not the API, but may be a login",
        ),
    ],
)
def test_a_redirection_is_answered_with_the_address_to_pass_or_as_a_login(location: str, message: str) -> None:
    with (
        serving(lambda *_: (301, {"Location": location}, b"")) as (url, _),
        Client(Access(url)) as client,
        pytest.raises(RefusedError, match=message),
    ):
        client.json("/api/v1/query", {})


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://user:pw@prometheus.example", "holds a password"),
        ("https://prometheus.example?token=pw", "without \\? and #"),
        ("ftp://prometheus.example", "expected http"),
        ("prometheus", "expected http"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_and_its_password_not_repeated(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Access(url)
    assert "pw" not in str(error.value)


def test_credentials_go_to_no_other_machine_in_plain_text(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "headers").write_text(f"Authorization: Basic {SECRET}\n")
    (tmp_path / "tenant").write_text("X-Scope-OrgID: a\n")
    (tmp_path / "other").write_text(f"X-Auth-Token: {SECRET}\n")
    for headers, token in ((None, tmp_path / "token"), (tmp_path / "headers", None), (tmp_path / "other", None)):
        with pytest.raises(ConfigError, match="in plain text; use https") as error:
            Access("http://prometheus.monitoring:9090", headers, token)
        assert SECRET not in str(error.value)
    Access("http://prometheus.monitoring:9090", header_file=tmp_path / "tenant")  # a tenant is no secret
    Access("https://prometheus.example", token_file=tmp_path / "token")


def test_a_wrong_header_file_is_named_by_its_line_alone(tmp_path: Path) -> None:
    (tmp_path / "headers").write_text(f"X-Scope-OrgID: a\n{SECRET}\n")
    with pytest.raises(ConfigError, match="headers line 2: expected `Name: value`") as error:
        Client(Access("https://prometheus.example", tmp_path / "headers"))
    assert SECRET not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        Access("https://prometheus.example", token_file=tmp_path / "missing").token()
    with pytest.raises(ConfigError, match="--cert and --key go together"):
        Access("https://prometheus.example", cert=tmp_path / "cert")
    (tmp_path / "ca").write_text("no certificate")
    with pytest.raises(ConfigError, match="not certificates in PEM"):
        Client(Access("https://prometheus.example", ca=tmp_path / "ca"))


def test_failures_that_pass_are_tried_again_and_the_others_are_not() -> None:
    with serving(lambda _, __, n: ok(7) if n == 3 else (502, {}, b"bad gateway")) as (url, came):
        with Client(Access(url, pause_s=0.01)) as client:
            assert client.json("/api/v1/query", {}) == 7
        assert len(came) == 3
    with serving(lambda *_: (404, {}, b"no such page")) as (url, came), Client(Access(url)) as client:
        with pytest.raises(RefusedError, match="HTTP 404: no such page"):
            client.json("/api/v1/query", {})
        assert len(came) == 1
    limit = json.dumps({"status": "error", "errorType": "execution", "error": "query processing would load"}).encode()
    refusals: list[Answer] = [
        (422, {}, limit),
        (503, {}, b"timed out"),
        (400, {}, b"exceeded sample limit (5)"),
        (504, {}, b""),
    ]
    for answer in refusals:
        with serving(partial(_always, answer)) as (url, came), Client(Access(url)) as client:
            with pytest.raises(TooMuchError):
                client.json("/api/v1/query", {})
            assert len(came) == 1
    with serving(lambda *_: (500, {}, b"")) as (url, came), Client(Access(url, pause_s=0.001)) as client:
        with pytest.raises(TraceError, match=f"given up after {client_module.TRIES} tries"):
            client.json("/api/v1/query", {})
        assert len(came) == client_module.TRIES


def test_a_server_is_waited_for_as_long_as_it_asks_and_named_by_status_and_title(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("reclaim.data.fetch.prometheus.client.time.sleep", pauses.append)
    page = b"<html>\r\n<head><title>429 Too Many Requests</title></head>\r\n"
    asked = ["7", "9999", "Fri, 27 Nov 2026 08:00:00 GMT", ""]  # seconds, too many, a date, and none

    def respond(_: str, __: dict[str, str], number: int) -> Answer:
        return (429, {"Retry-After": asked[number - 1]}, page) if number <= len(asked) else ok(7)

    with serving(respond) as (url, _), Client(Access(url, pause_s=0.5)) as client:
        assert client.json("/api/v1/query", {}) == 7
    assert pauses == [7, 120, 2, 4]
    assert "HTTP 429: 429 Too Many Requests; trying again in 7 s" in caplog.text


def test_a_server_that_has_not_started_yet_is_waited_for() -> None:
    with serving(lambda _, __, n: ok(7) if n == 3 else (503, {}, b"Service Unavailable")) as (url, came):
        with Client(Access(url, pause_s=0.01)) as client:
            assert client.json("/api/v1/query", {}) == 7
        assert len(came) == 3


@pytest.mark.parametrize("token", [f"{SECRET}\n{SECRET}", f"{SECRET} {SECRET}", f"{SECRET}\x00", f"{SECRET}é", " \n"])
def test_a_token_that_cannot_be_sent_is_named_by_its_file_alone(
    token: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The HTTP library refuses such a header with an error that repeats it."""
    (tmp_path / "token").write_text(token)
    caplog.set_level(logging.DEBUG)
    named = pytest.raises(ConfigError, match="token: expected one token")
    with serving(lambda *_: ok(1)) as (url, came):
        with Client(Access(url, token_file=tmp_path / "token", pause_s=0.001)) as client, named as error:
            client.json("/api/v1/query", {})
        assert SECRET not in f"{error.value}{caplog.text}"
        assert came == []
    (tmp_path / "headers").write_text(f"X-Api-Key: {SECRET}é\n")
    with pytest.raises(ConfigError, match="headers line 1") as wrong:
        Access(url, header_file=tmp_path / "headers").headers()
    assert SECRET not in str(wrong.value)


def test_requests_to_this_machine_pass_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment would see the token in plain text."""
    (tmp_path / "token").write_text(SECRET)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(lambda *_: ok(2)) as (proxy, came), serving(lambda *_: ok(1)) as (url, _):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        with Client(Access(url, token_file=tmp_path / "token")) as client:
            assert client.json("/api/v1/query", {}) == 1
        assert came == []


def test_an_answer_that_cannot_be_unpacked_is_asked_for_in_parts() -> None:
    with (
        serving(lambda *_: (200, {"Content-Encoding": "gzip"}, b"not packed")) as (url, _),
        Client(Access(url)) as client,
        pytest.raises(TooMuchError, match="the answer broke off"),
    ):
        client.post("/api/v1/read")


def test_a_server_that_answers_no_query_in_time_is_named(tmp_path: Path) -> None:
    late = pytest.raises(TraceError, match=r"does not answer the smallest query.*run again later")
    with serving(lambda *_: (504, {}, b"")) as (url, _), late:
        fetch_history(HistoryConfig(Access(url), end="2026-11-02"), tmp_path / "out")


def test_an_answer_is_not_read_past_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LARGEST_ANSWER", 1000)
    with (
        serving(lambda *_: (200, {}, b"x" * 2000)) as (url, _),
        Client(Access(url)) as client,
        pytest.raises(TooMuchError, match="an answer of more than"),
    ):
        client.post("/api/v1/read")


def test_a_server_that_is_no_prometheus_is_named(tmp_path: Path) -> None:
    none = pytest.raises(ConfigError, match=r"no API of Prometheus there.*check --url")
    with serving(lambda *_: (200, {}, b"<html>login</html>")) as (url, _), none:
        fetch_history(HistoryConfig(Access(url), end="2026-11-02"), tmp_path / "out")


def test_an_answer_in_part_ends_a_fetch_and_keeps_the_pieces_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A querier over many servers, one of which goes down while the second piece is read."""
    monkeypatch.setattr(job, "PIECES_AT_ONCE", 1)
    start_s = 1_793_570_400  # 2026-11-01 22:00 UTC, the second piece of two
    reads: list[str] = []

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if path != "/api/v1/query":
            return 404, {}, b"not here"
        if "count" in headers["body"] or "vector" in headers["body"]:
            return ok({"resultType": "vector", "result": [{"metric": {}, "value": [1, "3"]}]})
        reads.append(headers["body"])
        labels = {"__name__": "x", "pod": "a", "container": "b"}
        down = {"warnings": ["store b is down"]} if "time=1793577599.999" in reads[-1] and len(reads) > 10 else {}
        return ok({"resultType": "matrix", "result": [{"metric": labels, "values": [[start_s - 10, "1"]]}]}, **down)

    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 6, end="2026-11-02", transport="query")
        with pytest.raises(TraceError, match="answers in part: store b is down"):
            fetch_history(config, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "samples").iterdir()] == ["2026-11-01T20.parquet"]


def test_a_history_goes_on_from_no_other_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters with series of the same metric at the same times, and other pods."""
    monkeypatch.setattr(job, "PIECES_AT_ONCE", 1)
    past_s = 1_793_577_600  # 2026-11-02

    def respond(pod: str, path: str, headers: dict[str, str], _: int) -> Answer:
        if path != "/api/v1/query":
            return 404, {}, b"not here"
        if "count" in headers["body"] or "vector" in headers["body"]:
            return ok({"resultType": "vector", "result": [{"metric": {}, "value": [1, "3"]}]})
        values = [[moment, "1"] for moment in range(past_s - 14_400, past_s, 60)]
        return ok({"resultType": "matrix", "result": [{"metric": {"pod": pod, "container": "b"}, "values": values}]})

    out = tmp_path / "out"
    with serving(partial(respond, "a")) as (url, _), serving(partial(respond, "z")) as (other, _):
        config = HistoryConfig(Access(url), days=1 / 6, end="2026-11-02", transport="query")
        fetch_history(config, out)
        first, last = sorted((out / "samples").iterdir())
        expected = last.read_bytes()
        last.unlink()
        named = pytest.raises(
            ConfigError, match=rf"{other}: has no series of container_cpu.*{first.name}.*another server"
        )
        with named:
            fetch_history(replace(config, access=Access(other)), out)
        assert not last.exists()
        fetch_history(config, out)
    assert last.read_bytes() == expected


def test_a_fetch_that_goes_on_says_what_the_whole_history_lacks(tmp_path: Path) -> None:
    past_s = 1_793_577_600  # 2026-11-02

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if path != "/api/v1/query":
            return 404, {}, b"not here"
        if "count" in headers["body"] or "vector" in headers["body"]:
            return ok({"resultType": "vector", "result": [{"metric": {}, "value": [1, "3"]}]})
        first = past_s - 14_400 if "container_" in headers["body"] else past_s  # of kube-state-metrics there is nothing
        first = past_s - 7_200 - 60 if "kube_pod_info" in headers["body"] else first  # and of one in the first piece
        past = past_s - 7_200 if "kube_pod_info" in headers["body"] else past_s
        values = [[moment, "1"] for moment in range(first, past, 60)]
        result = [{"metric": {"pod": "a", "container": "b"}, "values": values}] if values else []
        return ok({"resultType": "matrix", "result": result})

    out = tmp_path / "out"
    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 6, end="2026-11-02", transport="query")
        whole = fetch_history(config, out).missing
        assert "kube_pod_owner" in whole
        assert "kube_pod_info" not in whole
        max((out / "samples").iterdir()).unlink()
        rest = fetch_history(config, out)
        assert (rest.fetched, rest.missing) == (1, whole)
        assert fetch_history(config, out).missing == whole


def test_a_fetch_says_since_when_there_is_usage_and_where_it_is_missing(tmp_path: Path) -> None:
    """Of five pieces the first two are older than what the server keeps, and in the fourth nothing was scraped."""
    past_s = 1_793_577_600  # 2026-11-02
    there = [range(past_s - 21_600, past_s - 14_400, 60), range(past_s - 7_200, past_s, 60)]

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if path != "/api/v1/query":
            return 404, {}, b"not here"
        if "count" in headers["body"] or "vector" in headers["body"]:
            return ok({"resultType": "vector", "result": [{"metric": {}, "value": [1, "3"]}]})
        values = [[moment, "1"] for span in there for moment in span]
        return ok({"resultType": "matrix", "result": [{"metric": {"pod": "a", "container": "b"}, "values": values}]})

    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=5 / 12, end="2026-11-02", transport="query")
        for fetched in (5, 0):
            report = fetch_history(config, tmp_path / "out")
            assert report.fetched == fetched
            assert report.empty_s == (past_s - 36_000, past_s - 28_800, past_s - 14_400)
            lines = of_history(report, tmp_path / "out")[1]
            assert lines[1:] == [
                "no usage before 2026-11-01 18:00 UTC: 0.25 of 0.4167 days are there; the server may keep no more",
                "no usage in 1 of the pieces after that, the first of 2026-11-01 20:00 UTC",
            ]
        there[:] = [range(past_s - 36_000, past_s - 14_400, 60), range(past_s - 7_200, past_s, 60)]
        gap = of_history(fetch_history(config, tmp_path / "gap"), tmp_path / "gap")[1]
        assert gap[1:] == ["no usage in 1 of the pieces, the first of 2026-11-01 20:00 UTC"]
        there[:] = [range(past_s - 36_000, past_s, 60)]
        whole = fetch_history(config, tmp_path / "whole")
        assert (whole.empty_s, of_history(whole, tmp_path)[1][1:]) == ((), [])


@pytest.mark.parametrize(("namespace", "said"), [("shop", True), (None, False)])
def test_a_namespace_under_which_no_pod_is_listed_is_doubted(namespace: str | None, said: bool, tmp_path: Path) -> None:
    """Its labels are `exported_namespace` and so on, and that of its own is not `shop`."""
    past_s = 1_793_577_600  # 2026-11-02

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        body = headers["body"]
        if path != "/api/v1/query" or "kube_" in body:
            return ok({"resultType": "vector", "result": []}) if "kube_" in body else (404, {}, b"not here")
        if "count" in body or "vector" in body:
            return ok({"resultType": "vector", "result": [{"metric": {}, "value": [1, "3"]}]})
        values = [[moment, "1"] for moment in range(past_s - 7_200, past_s, 60)]
        return ok({"resultType": "matrix", "result": [{"metric": {"pod": "a", "container": "b"}, "values": values}]})

    with serving(respond) as (url, _):
        config = HistoryConfig(
            Access(url), days=1 / 12, end="2026-11-02", transport="query", namespace=namespace, probe=True
        )
        lines = of_history(fetch_history(config, tmp_path / "out"), tmp_path / "out")[1]
    assert any("so leave --namespace out" in line for line in lines) == said


def test_options_of_which_the_server_has_nothing_can_be_corrected(tmp_path: Path) -> None:
    """The first run ends before its first piece; the folder is not bound to its options."""

    def respond(path: str, headers: dict[str, str], _: int) -> Answer:
        if path != "/api/v1/query":
            return 404, {}, b"not here"
        there = "vector" in headers["body"] or "nowhere" not in headers["body"]
        result = [{"metric": {}, "value": [1, "3"], "values": [[1_793_577_500, "1"]]}] if there else []
        return ok({"resultType": "matrix", "result": result})

    with serving(respond) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", namespace="nowhere", transport="query")
        with pytest.raises(TraceError, match="no series of"):
            fetch_history(config, tmp_path / "out")
        assert fetch_history(replace(config, namespace="shop"), tmp_path / "out").fetched == 1
        with pytest.raises(ConfigError, match="other --namespace"):
            fetch_history(config, tmp_path / "out")


def test_a_history_goes_on_by_its_own_dialect_where_an_update_added_metrics_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says which it lacks; without a piece yet it begins again with all of them."""

    def respond(path: str, _: dict[str, str], __: int) -> Answer:
        if path != "/api/v1/query":
            return 404, {}, b"not here"
        return ok({"resultType": "matrix", "result": [
            {"metric": {}, "value": [1, "3"], "values": [[1_793_577_500, "1"]]}]})  # fmt: skip

    text = load_dialect("kubernetes").text
    old = "\n".join(line for line in text.splitlines() if not line.startswith("init"))
    for name, content in (("old", old), ("other", old.replace("kube_pod_info", "pod_info"))):
        (tmp_path / f"{name}.toml").write_text(content)
    with serving(respond) as (url, came):
        config = HistoryConfig(Access(url), days=1 / 6, end="2026-11-02", transport="query")
        fetch_history(replace(config, dialect=str(tmp_path / "old.toml")), tmp_path / "out")
        first, last = sorted((tmp_path / "out" / "samples").iterdir())
        first.unlink()
        came.clear()
        assert fetch_history(config, tmp_path / "out").fetched == 1
        assert not any("init_container" in one["body"] for one in came)
        assert "without kube_pod_init_container_info, kube_pod_init_container_resource_limits" in caplog.text
        with pytest.raises(ConfigError, match="other --dialect"):
            fetch_history(replace(config, dialect=str(tmp_path / "other.toml")), tmp_path / "out")
        for piece in (first, last):
            piece.unlink()
        assert fetch_history(config, tmp_path / "out").fetched == 2
        assert any("init_container" in one["body"] for one in came)


def test_pieces_are_asked_for_together_as_far_as_memory_allows() -> None:
    """A request costs a server more than its samples: a week at once of a small cluster, one piece of a large one."""
    assert [job.pieces_at_once(samples) for samples in (0, 1e3, 1e6, 3e6, 1e9)] == [84, 84, 6, 2, 1]


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"status": "error", "error": f"bad login {SECRET}"}).encode(),
        f"Bearer {SECRET} is not known".encode(),
        f"<p>{'x' * 190} {SECRET}".encode(),
    ],
)
@pytest.mark.parametrize("status", [200, 400, 401, 422, 500])
def test_a_credential_that_a_server_repeats_reaches_no_message_and_no_log(
    status: int, body: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(SECRET)
    caplog.set_level(logging.INFO)
    repeated = pytest.raises((ConfigError, TraceError, RefusedError, TooMuchError))
    with (
        serving(lambda *_: (status, {}, body)) as (url, _),
        Client(Access(url, token_file=tmp_path / "token", pause_s=0.001)) as client,
        repeated as error,
    ):
        client.json("/api/v1/query", {})
    assert SECRET[:6] not in f"{error.value}{caplog.text}"


def test_a_password_of_a_header_is_hidden_in_every_form_and_a_tenant_is_not(tmp_path: Path) -> None:
    packed = base64.b64encode(f"user:{SECRET}&?".encode()).decode()
    (tmp_path / "headers").write_text(f"Authorization: Basic {packed}\nX-Scope-OrgID: team-a\nCookie: sid={SECRET}9\n")
    with Client(Access("https://prometheus.example", tmp_path / "headers")) as client:
        for form in (f"Basic {packed}", packed, f"user:{SECRET}&?", f"{SECRET}&?", f"{SECRET}%26%3F", f"x {SECRET}9"):
            assert SECRET not in client.said(form)
            assert packed not in client.said(form)
        assert client.said("no org id team-a") == "no org id team-a"


def test_an_answer_in_part_or_a_redirection_repeats_no_credential(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    warned = ok({}, warnings=[f"store refuses {SECRET}"])
    moved = (302, {"Location": f"http://other.example/?token={SECRET}"}, b"")
    for answer in (warned, moved, ok({"resultType": SECRET})):
        failed = pytest.raises((TraceError, RefusedError))
        with (
            serving(partial(_always, answer)) as (url, _),
            Client(Access(url, token_file=tmp_path / "token")) as client,
            failed as error,
        ):
            read_query(client, Metric("cpu", "m"), 0, 1000)
        assert SECRET not in str(error.value)


def test_only_one_login_is_sent(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "headers").write_text("Authorization: Basic abcd\n")
    with pytest.raises(ConfigError, match=r"--token-file and Authorization of .*one login is sent"):
        Client(Access("https://prometheus.example", tmp_path / "headers", tmp_path / "token"))


def test_an_error_is_read_by_its_beginning_alone() -> None:
    with serving(lambda *_: (404, {}, b"no such page\n" + b"x" * 3_000_000)) as (url, _), Client(Access(url)) as client:
        with pytest.raises(RefusedError, match="no such page"):
            client.json("/api/v1/query", {})
        assert client.bytes == 0


def test_an_answer_that_is_held_whole_has_a_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON takes six times as much memory as text."""
    monkeypatch.setattr(client_module, "LARGEST_WHOLE", 100_000)
    with (
        serving(lambda *_: ok("x" * 200_000)) as (url, _),
        Client(Access(url)) as client,
        pytest.raises(TooMuchError, match="an answer of more than"),
    ):
        client.json("/api/v1/query", {})


def test_samples_are_counted_as_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export of many short lines, each of a series: labels count, too."""
    monkeypatch.setattr(transports, "MOST_HELD", 100_000)
    lines = b"".join(b'{"metric":{"__name__":"m","pod":"%d"},"values":[1],"timestamps":[5]}\n' % k for k in range(1000))
    with serving(lambda *_: (200, {}, lines)) as (url, _), Client(Access(url)) as client:
        with pytest.raises(TooMuchError, match="MiB of samples"):
            transports.read_export(client, Metric("cpu", "m"), 0, 1000)
        assert transports.read_export(client, Metric("cpu", "m"), 6, 1000) == []  # outside of the range


def _of_clusters(values: list[dict[str, str]], path: str, headers: dict[str, str], _: int) -> Answer:
    if path != "/api/v1/query":
        return 404, {}, b"not here"
    chosen = [of for of in values if "cluster%3D%22eu-1%22" not in headers["body"] or of.get("cluster") == "eu-1"]
    if "count+by" in headers["body"]:
        return ok({"resultType": "vector", "result": [{"metric": of, "value": [1, "3"]} for of in chosen]})
    return ok({"resultType": "matrix", "result": [{"metric": {}, "value": [1, "3"], "values": [[1_793_577_500, "1"]]}]})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            [{"cluster": "eu-1"}, {"cluster": "us-2"}],
            r"2 clusters by the label cluster \(eu-1, us-2\).*--cluster cluster=",
        ),
        ([{"cluster_name": "a"}, {}], r"2 clusters by the label cluster_name \(\(none\), a\)"),
    ],
)
def test_several_clusters_behind_one_address_are_refused(
    values: list[dict[str, str]], named: str, tmp_path: Path
) -> None:
    """Pods of the same name in two clusters would be one."""
    with serving(partial(_of_clusters, values)) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", transport="query")
        for asked in (config, replace(config, probe=True)):
            with pytest.raises(ConfigError, match=named):
                fetch_history(asked, tmp_path / "out")
        if "cluster" in values[0]:
            assert fetch_history(replace(config, cluster="cluster=eu-1"), tmp_path / "out").fetched == 1


@pytest.mark.parametrize("values", [[{}], [{"cluster": "eu-1"}], []])
def test_one_cluster_is_fetched_with_and_without_its_label(values: list[dict[str, str]], tmp_path: Path) -> None:
    with serving(partial(_of_clusters, values)) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", transport="query")
        assert fetch_history(config, tmp_path / "out").fetched == 1


def test_a_dialect_that_keeps_clusters_apart_takes_several(tmp_path: Path) -> None:
    text = load_dialect("kubernetes").text.replace('cluster = ""', 'cluster = "cluster"')
    (tmp_path / "own.toml").write_text(text)
    with serving(partial(_of_clusters, [{"cluster": "eu-1"}, {"cluster": "us-2"}])) as (url, _):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", transport="query")
        own = replace(config, dialect=str(tmp_path / "own.toml"))
        assert fetch_history(own, tmp_path / "out").fetched == 1


def test_a_history_of_which_two_hours_are_too_much_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaim.data.fetch.prometheus.probe.LARGEST_PIECE", 16 * 30)
    with serving(partial(_of_clusters, [{}])) as (url, came):
        config = HistoryConfig(Access(url), days=1 / 12, end="2026-11-02", transport="query")
        with pytest.raises(ConfigError, match=r"two hours of the history are about .*fetch it by --namespace"):
            fetch_history(config, tmp_path / "out")
        assert not any("%5B7200000ms%5D" in one["body"] for one in came)


def test_plain_http_has_no_certificates(tmp_path: Path) -> None:
    without = pytest.raises(ConfigError, match="without effect, plain HTTP has no certificates")
    with without:
        Access("http://127.0.0.1:9090", ca=tmp_path)
    with without:
        Access("http://127.0.0.1:9090", cert=tmp_path, key=tmp_path)


def test_a_namespace_needs_a_dialect_that_names_its_label(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        load_dialect("kubernetes").text.replace('namespace = "namespace"', 'namespace = ""')
    )
    config = HistoryConfig(Access("http://127.0.0.1:1"), namespace="shop", dialect=str(tmp_path / "own.toml"))
    with pytest.raises(ConfigError, match=r"--namespace shop: dialect .* names no label"):
        fetch_history(config, tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["prometheus", "--url", "http://127.0.0.1:1", "--parallel", "4"], "--parallel: not an option of"),
        (["prometheus", "--url", "http://127.0.0.1:1", "--cell", "a"], "--cell: not an option of"),
        (["google-v2.1", "--days", "14"], "--days: not an option of"),
        (["google-v2.1", "--dialect", "kubernetes", "--transport", "auto"], "--dialect, --transport: not an option of"),
        (["alibaba-2017", "--probe", "--url", "http://127.0.0.1:1"], "--url, --probe: not an option of"),
    ],
)
def test_an_option_without_effect_is_refused_even_with_its_default(
    words: list[str], named: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, ["fetch", words[0], str(tmp_path / "out"), *words[1:]])
    assert isinstance(done.exception, ConfigError)
    assert f"{named} `reclaim fetch {words[0]}`" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_an_unknown_trace_is_named_before_its_options(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fetch", "prom", str(tmp_path / "out"), "--url", "http://127.0.0.1:1"])
    assert isinstance(done.exception, ConfigError)
    assert "alibaba-2017, prometheus, got 'prom'" in str(done.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"days": 0.01}, "--days must be between"),
        ({"end": "yesterday"}, "--end: expected a time"),
        ({"transport": "pigeon"}, "--transport must be one of"),
        ({"cluster": "eu"}, "--cluster: expected label=value"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HistoryConfig(Access("https://prometheus.example"), **options)
