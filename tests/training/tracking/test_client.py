"""Messages of a tracking store name it, and hold no password of it."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from reclaim.data.errors import ReclaimError
from reclaim.training.tracking import client, runs
from reclaim.training.tracking.aliases import RegistryReader
from reclaim.training.tracking.client import store_client, without_credentials

URI = "http://me:secret@127.0.0.1:9"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URI, "http://127.0.0.1:9"),
        ("postgresql+psycopg://a:b%40c@host/db", "postgresql+psycopg://host/db"),
        ("from http://a@b/c to ftp://d:e@f (g@h)", "from http://b/c to ftp://f (g@h)"),
        ("sqlite:////data/mail@home/mlflow.db", "sqlite:////data/mail@home/mlflow.db"),
        ("sqlite:///mail@home/mlflow.db", "sqlite:///mail@home/mlflow.db"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)
def test_the_user_and_password_of_a_uri_are_left_out_and_nothing_else(text: str, shown: str) -> None:
    assert without_credentials(text) == shown


def test_no_error_of_a_store_holds_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)

    def failing() -> None:
        with runs._store_named("does not find it"):
            raise MlflowException(f"no answer from {URI}/api")

    def asking() -> None:
        reader = RegistryReader()
        monkeypatch.setattr(runs, "version_of", None)
        reader.find("reclaim@champion")

    for call in (store_client, failing, asking):
        with pytest.raises(ReclaimError, match=r"http://127\.0\.0\.1:9") as raised:
            call()
        assert "secret" not in str(raised.value)


def test_the_page_of_a_store_gets_its_uri_by_the_environment_and_not_by_words_that_every_user_can_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = "postgresql://me:secret@127.0.0.1:9/db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setattr(client, "store_reader", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    seen: list[tuple[list[str], Any]] = []

    class Server:
        def __init__(self, words: list[str], *, env: Any, **_: Any) -> None:
            seen.append((words, env))

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None: ...

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Server)
    client.run_interface(0, lambda: None)
    ((words, environment),) = seen
    assert not any("secret" in word for word in words)
    assert environment["MLFLOW_BACKEND_STORE_URI"] == uri
