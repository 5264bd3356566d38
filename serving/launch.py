"""Starts the server: everything that a user can have got wrong is checked first, then BentoML takes the process."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Final, NoReturn

from reclaim.data.errors import ConfigError
from reclaim.serving.loader import find_model, load_model
from reclaim.serving.settings import DEFAULT_MODEL, ENV_PREFIX, read_settings

_LOG = logging.getLogger(__name__)

SERVICE: Final = "reclaim.serving.service:ReservationService"
_TORCH_THREADS: Final = "1"
"""Threads inside one pass of the network: a pass takes a millisecond, and on a busy machine waiting for a second thread
takes ten; large requests gain nothing from it either, as most of their time goes into reading JSON."""


def serve(host: str = "127.0.0.1", port: int = 3000, model: str = DEFAULT_MODEL) -> NoReturn:
    """Replace this process by the server, so that its process id and the signals sent to it are the server's.

    Parameters
    ----------
    host : str
        Address to listen on; the loopback address unless the caller says otherwise.
    port : int
        TCP port.
    model : str
        A reference, see ``loader.find_model``.

    Raises
    ------
    ConfigError
        The address, the port or a setting cannot be used.
    ModelError
        There is no such model, or it was made by another feature pipeline.
    """
    address = _checked_address(host, port)
    location = find_model(model)
    settings = {"model": location.source, "model_version": location.version, "bundle": location.folder}
    # what would end a worker in a traceback is refused here, in one line
    load_model(read_settings().model_copy(update=settings))
    environment = os.environ | {ENV_PREFIX + name.upper(): str(value) for name, value in settings.items()}
    environment.setdefault("BENTOML_DO_NOT_TRACK", "True")
    if "BENTOML_HOME" not in environment:
        environment["BENTOML_HOME"] = str(_bentoml_home(port))
    environment.setdefault("OMP_NUM_THREADS", _TORCH_THREADS)
    _LOG.info("serving %s version %s on http://%s:%d", location.name, location.version, _in_url(address), port)
    command = [sys.executable, "-m", "bentoml", "serve", SERVICE, "--host", address, "--port", str(port)]
    os.execve(sys.executable, command, environment)


def _checked_address(host: str, port: int) -> str:
    """Return the numeric address of ``host``, on which ``port`` is free to listen on."""
    if not 1 <= port <= 65_535:
        raise ConfigError(f"--port must be between 1 and 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host: no address for {host!r} ({error.strerror}); 127.0.0.1 is this machine") from error
    family, _, _, _, address = found[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: no wait after a restart
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port} ({error.strerror}); choose another with --port"
            ) from error
    return str(address[0])


def _in_url(address: str) -> str:
    return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address


def _bentoml_home(port: int) -> Path:
    """Return a folder for BentoML's own files, one for each port, because it empties its metrics folder at every start.

    It is in the home folder, or in a new temporary one where that is read-only.
    """
    home = Path.home() / "bentoml" / f"reclaim-{port}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home
    except OSError:
        return Path(tempfile.mkdtemp(prefix="reclaim-bentoml-"))
