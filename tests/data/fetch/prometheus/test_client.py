"""Client of a Prometheus: credentials, answers in part, failures that pass, redirections."""

from __future__ import annotations

import base64
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.fetch.prometheus import client as client_module
from reclaim.data.fetch.prometheus import transports
from reclaim.data.fetch.prometheus.client import Access, Client, RefusedError, TooMuchError
from reclaim.data.fetch.prometheus.transports import read_query
from reclaim.data.traces.dialect import Metric
from tests.data.fetch.prometheus.answering import SECRET, Answer, always, ok, serving


@pytest.mark.parametrize(
    ("more", "message"),
    [({"warnings": ["store b is down"]}, "store b is down"), ({"isPartial": True}, "isPartial")],
)
def test_an_answer_in_part_is_a_failed_read(more: dict[str, Any], message: str) -> None:
    """Half a cluster's usage is an underestimate; Thanos says so by warnings, VictoriaMetrics by a mark."""
    answer = ok({"resultType": "vector", "result": []}, **more)
    with (
        serving(lambda *_: answer) as (url, _),
        Client(Access(url)) as client,
        pytest.raises(TraceError, match=f"answers only in part: {message};"),
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


def test_a_token_that_is_refused_at_the_last_try_is_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)

    def respond(_: str, __: dict[str, str], number: int) -> Answer:
        return (503, {}, b"starting") if number < client_module.TRIES else (401, {}, b"expired")

    with serving(respond) as (url, _):
        access = Access(url, token_file=tmp_path / "token", pause_s=0.001)
        with Client(access) as client, pytest.raises(ConfigError, match="HTTP 401: expired; check --token-file"):
            client.json("/api/v1/query", {})


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


def test_a_choice_of_addresses_that_names_none_is_no_api() -> None:
    with (
        serving(lambda *_: (300, {"Location": "http://host:port/api/v1/query"}, b"")) as (url, _),
        Client(Access(url)) as client,
        pytest.raises(RefusedError, match="redirects to another address, which is not the API"),
    ):
        client.json("/api/v1/query", {})


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://user:pw@prometheus.example", "holds a password"),
        ("https://prometheus.example?token=pw", "without \\? and #"),
        ("https://prometheus.example#pw", "without \\? and #"),
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
        (413, {}, b""),
        (503, {}, b"timed out"),
        (400, {}, b"exceeded sample limit (5)"),
        (504, {}, b""),
    ]
    for answer in refusals:
        with serving(partial(always, answer)) as (url, came), Client(Access(url)) as client:
            with pytest.raises(TooMuchError):
                client.json("/api/v1/query", {})
            assert len(came) == 1
    with serving(lambda *_: (500, {}, b"")) as (url, came), Client(Access(url, pause_s=0.001)) as client:
        with pytest.raises(TraceError, match=f"given up after {client_module.TRIES} tries"):
            client.json("/api/v1/query", {})
        assert len(came) == client_module.TRIES


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503])
def test_a_status_that_passes_is_tried_again(status: int) -> None:
    with (
        serving(lambda _, __, n: ok(7) if n == 2 else (status, {}, b"")) as (url, _),
        Client(Access(url, pause_s=0.001)) as client,
    ):
        assert client.json("/api/v1/query", {}) == 7


def test_a_server_that_forbids_a_request_is_answered_with_the_options_of_credentials() -> None:
    with serving(lambda *_: (403, {}, b"")) as (url, came), Client(Access(url)) as client:
        with pytest.raises(ConfigError, match="HTTP 403: Forbidden; check --token-file and --header-file"):
            client.json("/api/v1/query", {})
        assert len(came) == 1


def test_a_server_that_does_not_answer_in_time_is_asked_for_less() -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("silent", request=request)

    with Client(Access("https://prometheus.example")) as client:
        client._client = httpx.Client(transport=httpx.MockTransport(silent))
        with pytest.raises(TooMuchError, match="no answer within 150 s"):
            client.json("/api/v1/query", {})
        assert client.requests == 1


def test_a_long_line_of_a_server_is_cut_to_200_characters() -> None:
    with Client(Access("https://prometheus.example")) as client:
        assert client.said("x" * 200) == "x" * 200
        assert client.said(" \n " + "x" * 201) == "x" * 199 + "…"


def test_an_address_may_end_in_a_slash_and_the_bytes_of_its_answers_are_added_up() -> None:
    """A server answers a path of two slashes with a redirection."""
    answer = json.dumps({"status": "success", "data": 1}).encode()

    def respond(path: str, *_: object) -> Answer:
        return (200, {}, answer) if path == "/api/v1/query" else (404, {}, b"")

    with serving(respond) as (url, _), Client(Access(f"{url}/")) as client:
        assert [client.json("/api/v1/query", {}) for _ in range(2)] == [1, 1]
        assert client.bytes == 2 * len(answer)
        assert client.url == url


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


def test_an_answer_is_not_read_past_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LARGEST_ANSWER", 1000)
    with (
        serving(lambda *_: (200, {}, b"x" * 2000)) as (url, _),
        Client(Access(url)) as client,
        pytest.raises(TooMuchError, match="an answer of more than"),
    ):
        client.post("/api/v1/read")


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
            serving(partial(always, answer)) as (url, _),
            Client(Access(url, token_file=tmp_path / "token")) as client,
            failed as error,
        ):
            read_query(client, Metric("cpu", "m"), 0, 1000)
        assert SECRET not in str(error.value)


def test_only_one_login_is_sent(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "headers").write_text("Authorization: Basic abcd\n")
    with pytest.raises(ConfigError, match=r"--token-file and Authorization of .*only one can be sent"):
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


def test_plain_http_has_no_certificates(tmp_path: Path) -> None:
    without = pytest.raises(ConfigError, match="has no effect, plain HTTP has no certificates")
    with without:
        Access("http://127.0.0.1:9090", ca=tmp_path)
    with without:
        Access("http://127.0.0.1:9090", cert=tmp_path, key=tmp_path)
