"""Tests of bearer tokens: what opens, what may only read, and what happens when a file is replaced."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from reclaim.data.errors import ConfigError
from reclaim.serving.http.tokens import Tokens, read_token
from tests.serving.http.guarded import TOKEN, FakeService, Message, answer, guarded
from tests.serving.virtual_time import run_timeless


@pytest.mark.parametrize("path", ["/v1/stream", "/metrics", "/docs.json", "/", "//livez", "/livez/", "/readyz?x"])
@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer 0123456789abcdeF",
        "Basic 0123456789abcdef",
        "Bearer 0123456789abcdef0",
        "Bearer é",
    ],
)
def test_without_the_token_nothing_but_probes_answers(token_file: Path, path: str, given: str) -> None:
    guard, _ = guarded(token_file=token_file)
    reply = answer(guard, "GET", path, headers={"authorization": given} if given else {})
    assert (reply.status, reply.code, reply.headers["www-authenticate"]) == (401, "unauthorized", "Bearer")
    for probe in ("/livez", "/readyz", "/healthz"):
        assert answer(guard, "GET", probe).status == 200


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
def test_the_token_opens_and_is_never_logged(token_file: Path, scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    guard, _ = guarded(token_file=token_file)
    right = {"authorization": scheme + TOKEN.decode()}
    assert answer(guard, "POST", "/v1/echo/x", headers=right).status == 200
    assert answer(guard, "POST", "/v1/slow", headers=right).status == 422
    assert answer(guard, "POST", "/v1/echo/x", headers={"authorization": "Bearer 0123456789abcdeX"}).status == 401
    written = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert "0123456789abcde" not in written


def test_a_token_that_is_replaced_opens_and_the_one_before_does_not(
    token_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("reclaim.serving.http.tokens._LOOK_S", 0.0)
    caplog.set_level(logging.INFO, "reclaim.serving.http.tokens")
    guard, _ = guarded(token_file=token_file)
    new = b"fedcba9876543210fedcba9876543210"

    def statuses() -> list[int]:
        given = [{"authorization": f"Bearer {token.decode()}"} for token in (TOKEN, new)]
        return [answer(guard, "POST", "/v1/echo/x", headers=headers).status for headers in given]

    assert statuses() == [200, 401]
    token_file.write_bytes(b"short")  # half written, or a mistake: the service stays open to those that it knows
    assert statuses() == [200, 401]
    token_file.write_bytes(new)
    assert statuses() == [401, 200]
    token_file.unlink()
    assert statuses() == [401, 200]
    assert [record.levelname for record in caplog.records if "token" in record.message] == ["ERROR", "INFO", "ERROR"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/stream", 422), ("GET", "/metrics", 404), ("POST", "/v1/echo/x", 403), ("POST", "/v1/usage", 403),
     ("POST", "/v1/tasks", 403), ("POST", "/v1/tasks/", 403), ("DELETE", "/v1/stream", 403),
     ("POST", "/v1/cell/reservations", 404)],
)  # fmt: skip
def test_a_token_that_may_only_read_stores_nothing(
    token_file: Path, tmp_path: Path, method: str, path: str, status: int
) -> None:
    reads = tmp_path / "reads"
    reads.write_bytes(b"a-token-of-readers")
    guard, _ = guarded(token_file=token_file, read_token_file=reads)
    reply = answer(guard, method, path, headers={"authorization": "Bearer a-token-of-readers"})
    assert reply.status == status
    assert reply.status != 403 or reply.code == "read_only"
    right = answer(guard, method, path, headers={"authorization": f"Bearer {TOKEN.decode()}"})
    assert right.status not in (401, 403)
    assert answer(guard, method, path, headers={"authorization": "Bearer a-token-of-readerz"}).status == 401


def test_a_token_of_readers_without_one_of_writers_is_refused(tmp_path: Path) -> None:
    reads = tmp_path / "reads"
    reads.write_bytes(b"a-token-of-readers")
    settings = FakeService(read_token_file=reads).settings
    with pytest.raises(ConfigError, match=r"without --token-file every caller may write"):
        Tokens(settings)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two words are no token", "tökentökentöken".encode(), b"x" * 2_000]
)
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"must hold one token of 16 to 1024 visible ASCII characters"):
        read_token(file)
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_token(tmp_path / "none")


def test_a_bad_token_file_ends_the_start(tmp_path: Path) -> None:
    guard, _ = guarded(token_file=tmp_path / "none")
    sent: list[Message] = []

    async def run() -> None:
        async def receive() -> Message:
            return {"type": "lifespan.startup"}

        async def send(message: Message) -> None:
            sent.append(message)

        await guard({"type": "lifespan", "state": {}}, receive, send)

    with pytest.raises(ConfigError, match="cannot be read"):
        run_timeless(run())
    assert sent[-1]["type"] == "lifespan.startup.failed"
