"""A process that serves asks a registry with little patience, unless its environment says otherwise."""

from __future__ import annotations

import logging
import os

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from reclaim.data.errors import ModelError
from reclaim.training.tracking import aliases
from reclaim.training.tracking.aliases import RegistryReader, give_up_soon

TIMEOUT, POOL = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_SQLALCHEMYSTORE_POOLCLASS"


@pytest.fixture(autouse=True)
def _settings_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("urllib3.connectionpool"), "level", logging.NOTSET)
    for name in (TIMEOUT, POOL):
        monkeypatch.setenv(name, "")  # noted, so that it is removed at the end
        monkeypatch.delenv(name)


def test_a_request_may_take_ten_seconds_and_no_connection_stays_open_unless_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_up_soon()
    assert (os.environ[TIMEOUT], os.environ[POOL]) == ("10", "NullPool")
    monkeypatch.setenv(TIMEOUT, "45")
    give_up_soon()
    assert (os.environ[TIMEOUT], os.environ[POOL]) == ("45", "NullPool")


def test_a_store_that_does_not_answer_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MlflowException("database is locked\nTraceback")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(aliases, "store_client", MlflowClient)
    monkeypatch.setattr(aliases, "version_of", fails)
    with pytest.raises(ModelError, match=r"^http://127\.0\.0\.1:9 does not answer \(database is locked\)$"):
        RegistryReader().find("reclaim@champion")
