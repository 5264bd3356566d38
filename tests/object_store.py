"""An S3 server on the loopback interface, and a way to it that breaks off, for tests of datasets in a store."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from reclaim.data.core.stores import transfer
from reclaim.data.core.stores.places import opened


@dataclass(frozen=True)
class Bucket:
    """An empty bucket of a running server.

    Attributes
    ----------
    url : str
        ``s3://`` and its name.
    address : tuple
        Host and port of the server.
    """

    url: str
    address: tuple[str, int]

    def files(self) -> Any:
        """Return the file system, without what it remembers of earlier calls."""
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        return s3fs.S3FileSystem()

    def put(self, folder: Path, name: str) -> str:
        """Copy a folder into the bucket and return its place there."""
        place = f"{self.url}/{name}"
        self.files().put(f"{folder}/", place, recursive=True)
        return place

    def contents(self, name: str = "") -> dict[str, bytes]:
        """Return the objects below a folder of the bucket."""
        files = self.files()
        folder = f"{self.url}/{name}".rstrip("/").removeprefix("s3://")
        return {path.removeprefix(folder + "/"): files.cat_file(path) for path in files.find(folder)}


class Killed(Exception):
    """A kill, as far as a test can make one in its own process."""


def dies_after(patch: pytest.MonkeyPatch, survive: int) -> None:
    """Raise ``Killed`` at a write to a store or a removal after the first ``survive``."""
    calls = [0]
    known: list[Any] = []

    def counted(write: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > survive:
                raise Killed
            return write(*args, **options)

        return call

    def dying(path: Path) -> tuple[Any, str]:
        files, name = opened(path)
        if files not in known:
            known.append(files)
            for method in ("put_file", "pipe_file", "rm_file", "rm"):
                patch.setattr(files, method, counted(getattr(files, method)))
        return files, name

    patch.setattr(transfer, "opened", dying)


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """Run an S3 server and yield its host and port."""
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        yield running.get_host_and_port()
    finally:
        running.stop()
        assert running._server is not None
        running._server.server_close()


@contextmanager
def breaking_off(address: tuple[str, int], after: int) -> Iterator[tuple[str, int]]:
    """Yield an address that leads to a server and, once ``after`` bytes have come from there, answers no more."""
    left = after
    gone = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def begin(target: Any, *args: Any) -> None:
        threads.append(threading.Thread(target=target, args=args))
        threads[-1].start()

    def close(*ends: socket.socket) -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def pass_on(source: socket.socket, target: socket.socket, *, counted: bool) -> None:
        nonlocal left
        with suppress(OSError):
            while not gone.is_set() and (content := source.recv(1 << 12)):
                if counted:
                    left -= len(content)
                if left < 0:
                    gone.set()
                    close(listener)
                    break
                target.sendall(content)
        close(source, target)

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection(address) as upstream:
            back = threading.Thread(target=pass_on, args=(upstream, client), kwargs={"counted": True})
            back.start()
            pass_on(client, upstream, counted=False)
            back.join()

    def accept() -> None:
        with suppress(OSError):
            while not gone.is_set():
                begin(serve, listener.accept()[0])

    begin(accept)
    try:
        yield listener.getsockname()[:2]
    finally:
        gone.set()
        close(listener)
        listener.close()
        for thread in threads:
            thread.join()
