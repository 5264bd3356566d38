"""Resolves model references repeatedly, without hanging on a registry that does not answer."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from reclaim.data.errors import ModelError
from reclaim.training.tracking.client import (
    default_tracking_uri,
    missing,
    quiet,
    store_client,
    store_shown,
    without_credentials,
)
from reclaim.training.tracking.runs import ABSENT, ModelVersion, version_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

_SERVING: Final = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds; with MLflow's own 120 a dead server goes unnoticed for minutes
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",  # an open connection would keep reading a file that was replaced
}
"""Settings of MLflow for a process that serves."""


def give_up_soon() -> None:
    """Let MLflow wait less for a store that does not answer, and read its file as it is, from now on.

    For a process that serves; what its environment says already stands. A store that is away is told once by what
    follows it, and not of each attempt as well: two lines every ten seconds.
    """
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    for name, value in _SERVING.items():
        os.environ.setdefault(name, value)


class RegistryReader:
    """Resolves references repeatedly, with one client that gives up on a store that does not answer.

    For a process that serves; not for several threads at once.
    """

    def __init__(self) -> None:
        self._client: MlflowClient | None = None

    def prepare(self) -> None:
        """Import MLflow now, without a request: a second or two in which the other threads of a process hardly run."""
        give_up_soon()
        with quiet():
            import mlflow.artifacts
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - imports what the client needs

    def find(self, reference: str) -> ModelVersion | None:
        """Return which version ``name@alias`` or ``name/version`` means now; None where there is no such thing.

        Raises
        ------
        ModelError
            The store cannot be asked.
        """
        if missing(default_tracking_uri()):
            raise ModelError(f"{store_shown()} does not exist")
        if self._client is None:
            give_up_soon()
            self._client = store_client()
        from mlflow.exceptions import MlflowException

        try:
            return version_of(self._client, reference)
        except MlflowException as error:
            if error.error_code in ABSENT:
                return None
            reason = str(error).strip().partition("\n")[0]
            raise ModelError(f"{store_shown()} does not answer ({without_credentials(reason)})") from error
