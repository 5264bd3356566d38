"""Makes clients of the tracking store that log little and give up soon."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import unquote

from reclaim.data.core.files import locked_folder, partial_of, replaced_file
from reclaim.data.errors import ModelAbsentError, ModelError

if TYPE_CHECKING:
    from mlflow import MlflowClient
from contextlib import closing

_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s]+@")
_RETRIES: Final = "2"
"""Further attempts at a tracking server: MLflow's own seven keep the user waiting for minutes."""
_NO_ADDRESS: Final = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"
_RUN: Final = "MLFLOW_RUN_ID"
_FIRST: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""Settings of MLflow for the first request, 5 seconds among them: a missing server is an error soon."""


def default_tracking_uri() -> str:
    """Return ``MLFLOW_TRACKING_URI`` where set, else ``mlruns/mlflow.db`` under the working folder, as SQLite."""
    return os.environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(Path("mlruns/mlflow.db"))


def store_shown() -> str:
    """Return the URI of the current store as messages have it."""
    return without_credentials(default_tracking_uri())


def without_credentials(text: str) -> str:
    """Return a text without the user and password of the URIs in it."""
    return _CREDENTIALS.sub("", text)


def store_reader(wanted: str) -> MlflowClient:
    """Return a client of the current store; ModelAbsentError that names what is wanted where there is no store."""
    if missing(default_tracking_uri()):
        raise ModelAbsentError(f"no {wanted} in {store_shown()}; train one with `reclaim train`")
    return store_client()


def store_client() -> MlflowClient:
    """Return a client of the current store, made where it is SQLite; ModelError where it cannot be made or reached."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow
    from mlflow.exceptions import MlflowException

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints the traceback of what it raises
    uri = default_tracking_uri()
    try:
        with quiet(), _asked_once():
            make_usable(uri)
            client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)
    except (MlflowException, OSError, ImportError, sqlite3.Error) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"the tracking store {store_shown()} cannot be used ({without_credentials(reason)}); "
            "set MLFLOW_TRACKING_URI"
        ) from error
    return client


@contextmanager
def default_store(uri: str) -> Iterator[None]:
    """Let MLflow's functions that take no client use a store; the caller's own store is restored afterwards.

    So is the experiment that the caller has set, with which MLflow refuses to continue a run of another one, and the
    run that the environment names, in whose place MLflow would start none. MLflow keeps the store in variables of the
    environment, too. It prints no address of a run on a server: the output of a command may be JSON.
    """
    import mlflow
    from mlflow.tracking import fluent

    experiment = fluent._active_experiment_id  # there is no public way to unset it
    fluent._active_experiment_id = None
    kept = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", _NO_ADDRESS, _RUN)
    before = {name: os.environ.get(name) for name in kept}
    os.environ.pop(_RUN, None)
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    os.environ.setdefault(_NO_ADDRESS, "true")
    try:
        yield
    finally:
        fluent._active_experiment_id = experiment
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]  # as it is before it is set
        mlflow.set_registry_uri(None)  # type: ignore[arg-type]
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


def run_interface(port: int, begun: Callable[[], None]) -> None:
    """Serve MLflow's own page of the current store on the loopback address until SIGINT, SIGTERM or SIGHUP.

    ``begun`` is called when the start can succeed.

    Raises
    ------
    ModelError
        There is no store, it is a server with a page of its own, or the port is taken.
    """
    uri = default_tracking_uri()
    if uri.startswith(("http://", "https://")):
        raise ModelError(f"the store is a server, with a page of its own: open {store_shown()} in a browser")
    store_reader("record")
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asked.bind(("127.0.0.1", port))
        except OSError as error:
            raise ModelError(f"port {port} cannot be listened on ({error.strerror}); choose another, --port") from error
    words = [
        "server",
        "--uvicorn-opts",
        "--log-level warning",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    artifacts = artifact_folder(uri)
    words += [] if artifacts is None else ["--artifacts-destination", artifacts]
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # workers for tasks that are not used here
    # of a session of its own: at Ctrl-C it is ended in order, where a signal to all its processes prints tracebacks
    command = [sys.executable, "-W", "ignore", "-m", "mlflow", *words]
    for ending in (signal.SIGINT, signal.SIGTERM):  # the first is ignored where a shell began this in the background
        signal.signal(ending, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup lets it go on when its terminal closes
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    begun()
    # every user of the machine can see the words of a command, and a URI may hold a password
    named = os.environ | {"MLFLOW_BACKEND_STORE_URI": uri}
    with subprocess.Popen(command, start_new_session=True, env=named) as server:
        try:
            code = server.wait()
        except KeyboardInterrupt:
            os.killpg(server.pid, signal.SIGTERM)
            return
    if code:
        raise ModelError(f"MLflow's server ended with exit code {code}")


@contextmanager
def _asked_once() -> Iterator[None]:
    """Let MLflow ask a server once and not wait long; variables that the user has set stay."""
    given = {name: value for name, value in _FIRST.items() if name not in os.environ}
    log = logging.getLogger("urllib3.connectionpool")
    before = log.level
    log.setLevel(logging.ERROR)  # it would warn of each attempt, before the error
    os.environ.update(given)
    try:
        yield
    finally:
        log.setLevel(before)
        for name in given:
            del os.environ[name]
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _RETRIES)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep MLflow's warnings about its own parts (SQLAlchemy's ``noload``, type hints, examples) from the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


SQLITE: Final = "sqlite:///"
_PATIENCE_S: Final = 60.0
"""Time to wait, in seconds, for another process that is writing into the store."""


def sqlite_uri(file: Path) -> str:
    """Return the URI of a SQLite file, in which SQLAlchemy takes ``%`` for a quoted character and ``?`` for the end."""
    return SQLITE + str(file.absolute()).replace("%", "%25").replace("?", "%3F")


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a SQLite store, as SQLAlchemy reads its URI; None for a store of another kind."""
    return Path(unquote(uri.removeprefix(SQLITE).partition("?")[0])).absolute() if uri.startswith(SQLITE) else None


def artifact_folder(uri: str) -> str | None:
    """Return the URI of the folder next to the file of a SQLite store, in which its files are kept; else None."""
    file = sqlite_file(uri)
    return None if file is None else (file.parent / "artifacts").as_uri()


def missing(uri: str) -> bool:
    """Return whether the store is a SQLite file that does not exist; reading must not create it."""
    file = sqlite_file(uri)
    return file is not None and not file.exists()


def make_usable(uri: str) -> None:
    """Make a SQLite store that is not there and try to open its file, which MLflow would do for minutes.

    MLflow commits table by table, and cannot go on from some of them. So the file gets its name once it is whole.

    Raises
    ------
    OSError
        The folder cannot be made.
    sqlite3.Error
        The file cannot be opened, or is no database.
    """
    file = sqlite_file(uri)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            _make(file)
        with closing(sqlite3.connect(file, timeout=_PATIENCE_S)) as opened:
            opened.execute("PRAGMA schema_version")


def _make(file: Path) -> None:
    """Make a SQLite store under another name, and rename it; a process that makes one in the folder is waited for."""
    from mlflow.db import upgrade

    make = cast(Callable[[str], None], upgrade.callback)
    with locked_folder(file.parent):
        if file.exists():
            return
        for left in file.parent.glob(f"{partial_of(file).name}*"):  # files of a killed process, a journal among them
            left.unlink()
        with replaced_file(file) as partial:
            make(sqlite_uri(partial))  # with a connection of its own, which MLflow does not keep
