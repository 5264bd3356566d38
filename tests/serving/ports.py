"""Ports for servers that tests start as other processes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Give a port that is free, and that the system gives to nobody else meanwhile.

    It stays bound here, which a server that asks for this very port with SO_REUSEADDR may be too, as long as nobody
    listens: one that were only looked up could be another test's before the server is there.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
