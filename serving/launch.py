"""Starts the server: checks address, files, state and model, then turns this process into the server."""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from reclaim.data.core.files import take_lock
from reclaim.data.dataset import MANIFEST
from reclaim.data.errors import ConfigError
from reclaim.serving.http.logs import set_up_logs
from reclaim.serving.http.process import backlog_of, raise_open_files
from reclaim.serving.http.tokens import Tokens
from reclaim.serving.models.cache import start_model
from reclaim.serving.settings import ENV_PREFIX, ServingSettings, cell_folder, read_settings

log = logging.getLogger(__name__)

SERVICE_NAME: Final = "reclaim"
"""Name of the service in BentoML."""
Tls = tuple[Path, Path] | tuple[None, None]
"""Files of a certificate and of its key."""

DEFAULT_STATE: Final = Path("reclaim-state")
"""Default folder of the state: a service should not forget its cell at a restart."""
_KEEP_ALIVE_S: Final = 75
"""Time in seconds for which an idle connection is kept: callers send every few seconds, and a request fails on a
connection that closes just as it is reused."""
_GRACE_S: Final = 20
"""Time in seconds that requests under way have to end after the signal to stop; Kubernetes waits 30."""
_LATER_S: Final = 5.0
"""Difference between BentoML's own time limit and ours, in seconds."""


def serve(
    host: str = "127.0.0.1", port: int = 3000, model: str = "", *,
    shadow: str = "", state: Path | None = DEFAULT_STATE, record: Path | None = None, token_file: Path | None = None,
    tls_cert: Path | None = None, tls_key: Path | None = None, log_json: bool = False, repair: bool = False,
    insecure: bool = False, clock: str = "",
) -> NoReturn:  # fmt: skip
    """Turn this process into the server: the one process that receives signals, with no parent above it.

    The port is bound first, so that requests that arrive while the model loads wait and are not refused. Arguments that
    are not given come from the environment, see ``ServingSettings``.

    Parameters
    ----------
    host : str
        Address to listen on.
    port : int
        TCP port.
    model, shadow : str
        References, see ``loader.find_model``. Empty: the champion, and the built-in model until there is one; no
        shadow.
    state : Path or None
        Folder for all that must outlive the process, made if missing; None keeps it in memory alone.
    record : Path or None
        Folder that every window is recorded in.
    token_file : Path or None
        File with the bearer token.
    tls_cert, tls_key : Path or None
        PEM files of the certificate with its chain, and of its key, which has no password; both or neither.
    log_json : bool
        Whether the log is one JSON object a line.
    repair : bool
        Whether a state that is damaged in the middle is used up to the damage, and the rest moved aside.
    insecure : bool
        Whether other machines may connect without a token.
    clock : str
        Clock of the windows, ``unix`` or ``trace``.

    Raises
    ------
    ConfigError
        The address, the port, a file or a setting cannot be used.
    ModelError
        There is no such model, or it was made by another feature pipeline.
    """
    tls = _checked_tls(tls_cert, tls_key)
    with _listening(host, port) as listening:
        given: dict[str, Any] = {"model": model, "shadow": shadow, "token_file": token_file and token_file.absolute()}
        given |= {"log_json": log_json, "repair": repair, "clock": clock, "record": record and record.absolute()}
        given = {name: value for name, value in given.items() if value}
        given |= {"state": state and state.absolute()}
        settings = read_settings().model_copy(update=given)
        if settings.log_json:
            set_up_logs(as_json=True)  # for warnings of the start, too
        with _leaving_no_empty_folder(settings.state, settings.record):
            if settings.state is not None:
                _check_state(settings.state)
            if settings.record is not None:
                _check_record(settings.record)
            address = str(listening.getsockname()[0])
            Tokens(settings)  # a bad file ends the start here, not in the server
            _check_access(address, settings.token_file, encrypted=tls[0] is not None, insecure=insecure)
            start = start_model(settings)  # a problem is one line here, and would be a traceback later
        given |= {"model_version": start.location.version, "bundle": start.location.folder}
        url = f"{'http' if tls[0] is None else 'https'}://{_in_url(address)}:{port}"
        log.info("serving %s version %s on %s", start.location.name, start.location.version, url)
        _become_the_server(listening, tls, _environment(given, settings))


def _become_the_server(listening: socket.socket, tls: Tls, environment: Mapping[str, str]) -> NoReturn:
    """Serve until a signal, as BentoML's own worker does, but without a supervising process."""
    os.environ.clear()
    os.environ.update(environment)
    import uvicorn

    from reclaim.serving.service import ReservationService

    cert, key = tls
    backlog = backlog_of(raise_open_files())
    config = uvicorn.Config(
        ReservationService.to_asgi(),  # type: ignore[attr-defined]  # the decorator replaces the class
        lifespan="on", ws="none", log_config=None, access_log=False, server_header=False, backlog=backlog,
        timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_GRACE_S, ssl_certfile=cert, ssl_keyfile=key,
    )  # fmt: skip
    server = uvicorn.Server(config)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # uvicorn raises the first two again
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, server.handle_exit)
    server.run(sockets=[listening])
    sys.exit(os.EX_OK if server.started else os.EX_SOFTWARE)


def _environment(given: dict[str, Any], settings: ServingSettings) -> dict[str, str]:
    """Return the server's environment: this process's, the given settings, and options of BentoML."""
    variables = {ENV_PREFIX + name.upper(): value for name, value in given.items()}
    environment = os.environ | {name: str(value) for name, value in variables.items() if value is not None}
    for name in (name for name, value in variables.items() if value is None):
        environment.pop(name, None)
    environment.setdefault("BENTOML_DO_NOT_TRACK", "True")
    # BentoML's own time limit spans body and answer, and its error has another shape: it must never expire first
    longest_s = settings.body_timeout_s + settings.request_timeout_s + _LATER_S
    options = f"services.{SERVICE_NAME}.traffic.timeout={longest_s} {environment.get('BENTOML_CONFIG_OPTIONS', '')}"
    environment["BENTOML_CONFIG_OPTIONS"] = options.strip()
    return environment


def _check_access(address: str, token_file: Path | None, *, encrypted: bool, insecure: bool) -> None:
    """Refuse an address that other machines reach without a token, unless ``insecure``."""
    if ipaddress.ip_address(address).is_loopback:
        return
    if token_file is None and not insecure:
        raise ConfigError(
            f"--host {address} lets other machines in without a token; name one with --token-file, or pass --insecure "
            "where something else keeps them out"
        )
    if token_file is None:
        log.warning("other machines may read and write this cell's state at %s: no token is asked for", address)
    elif not encrypted:
        log.warning("tokens travel to %s unencrypted; --tls-cert and --tls-key encrypt them", address)


def _checked_tls(cert: Path | None, key: Path | None) -> Tls:
    """Return the absolute paths of a certificate and its key, after loading them once; None for None."""
    if cert is None and key is None:
        return None, None
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together: a certificate is of no use without its key")
    try:
        # with an empty password a key that needs one fails; without, OpenSSL would ask at the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        reason = error.reason or "not a PEM file, or a key with a password"
        raise ConfigError(f"--tls-cert {cert} and --tls-key {key} cannot be used: {reason}") from error
    except OSError as error:
        unreadable = next((path for path in (cert, key) if not os.access(path, os.R_OK)), cert)
        raise ConfigError(f"{unreadable}: {error.strerror}; --tls-cert and --tls-key name PEM files") from error
    return cert.absolute(), key.absolute()


def _check_record(folder: Path) -> None:
    """Refuse a dataset, and a folder that this process cannot write into: the first file is written an hour later."""
    if (folder / MANIFEST).exists():
        raise ConfigError(f"{folder} is a finished dataset; choose another folder with --record")
    try:
        _make_writable(folder)
    except OSError as error:
        raise ConfigError(
            f"windows cannot be recorded in {folder} ({error.strerror}); choose another folder with --record"
        ) from error


def _make_writable(folder: Path, mode: int = 0o777) -> None:
    """Make a folder where there is none; OSError where this process cannot write into it."""
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _check_state(folder: Path) -> None:
    """Refuse a folder that this process may not write into or another one holds; a new one is private to its user."""
    try:
        _make_writable(folder, mode=0o700)
        if (cell := cell_folder(folder)).exists():
            os.close(take_lock(cell))
    except OSError as error:
        raise ConfigError(
            f"the state cannot be kept in {folder} ({error.strerror}); choose another folder with --state, or "
            "--in-memory to keep nothing"
        ) from error


@contextmanager
def _leaving_no_empty_folder(*folders: Path | None) -> Iterator[None]:
    """Remove folders that are new and empty where an error ends the start."""
    new = [path for of in folders if of is not None for path in (of, *of.parents) if not os.path.exists(path)]
    try:
        yield
    except BaseException:
        for path in new:
            with suppress(OSError):  # it is not empty, or was never made
                path.rmdir()
        raise


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens on ``port`` of the first address of ``host``."""
    if not 1 <= port <= 65_535:
        raise ConfigError(f"--port must be between 1 and 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise ConfigError(f"--host: no address for {host!r} ({why}); 127.0.0.1 is this machine") from error
    family, _, _, _, address = found[0]
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # no wait after a restart
        try:
            listening.bind(address)
            listening.listen(backlog_of(raise_open_files()))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port} ({error.strerror}); choose another with --port"
            ) from error
        yield listening


def _in_url(address: str) -> str:
    return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
