"""A mirror of traces on this machine, whose faults are listed beforehand."""

from __future__ import annotations

import base64
import hashlib
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from reclaim.data.fetch.job import FetchConfig, FetchReport, fetch
from reclaim.data.fetch.ledger import LEDGER

PATIENCE_S = 120.0
"""Timeout of events that must happen."""
SHARD = "instance_usage-000000000000.json.gz"
BODY = bytes(i * i // 255 % 256 for i in range(300_000))


@dataclass(frozen=True)
class Fault:
    """One faulty answer of the server."""

    close_after: int | None = None
    """Bytes of the body sent before the connection ends."""
    reset: bool = False
    """End the connection with a reset."""
    status: int | None = None
    retry_after: str = ""
    ignore_range: bool = False
    ignore_version: bool = False
    """Serve the Range without comparing If-Range."""
    wrong_bytes: bool = False
    etag: str | None = None
    span: str | None = None
    """A Content-Range other than the requested one."""
    unsized: bool = False
    """No Content-Length: the body is sent in chunks."""
    location: str = ""
    hold: Callable[[], object] | None = None
    """Called when half of the body has been sent."""


FINE = Fault()


class Server(ThreadingHTTPServer):
    """One daemon thread for each connection."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print nothing: tests disconnect on purpose."""


@dataclass
class Mirror:
    """A mirror on this machine, with its faults to come."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    """Path → one fault for each coming GET; then ``always``, then none."""
    always: dict[str, Fault] = field(default_factory=dict)
    md5: bool = True
    etags: bool = True
    before_answer: Callable[[], object] = lambda: None
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of each request."""
    sent: int = 0
    """Bytes of all bodies."""
    url: str = ""

    def gets(self, path: str = SHARD) -> list[str]:
        """Return the Range of every GET of a path."""
        return [span for method, name, span in self.asked if (method, name) == ("GET", path)]


def handler_of(mirror: Mirror) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers for a mirror."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path, asked = self.path.lstrip("/"), self.headers.get("Range", "")
            mirror.asked.append((self.command, path, asked))
            mirror.before_answer()
            queue = mirror.faults.get(path, []) if with_body else []
            fault = queue.pop(0) if queue else mirror.always.get(path, FINE)
            body = mirror.files.get(path)
            status = fault.status or (404 if body is None else 200)
            if status != 200 or body is None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                if fault.retry_after:
                    self.send_header("Retry-After", fault.retry_after)
                if fault.location:
                    self.send_header("Location", fault.location)
                self.end_headers()
                return
            etag = fault.etag or f'"{hashlib.sha256(body).hexdigest()[:8]}"'
            whole, start = body, 0
            same = fault.ignore_version or self.headers.get("If-Range", etag) == etag
            if asked and same and not fault.ignore_range:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
            self.send_response(416 if start >= len(whole) > 0 else 206 if start else 200)
            if start:
                where = (
                    f"bytes */{len(whole)}" if start >= len(whole) else f"bytes {start}-{len(whole) - 1}/{len(whole)}"
                )
                self.send_header("Content-Range", fault.span or where)
            body = whole[start:]
            if mirror.etags:
                self.send_header("ETag", etag)
            if mirror.md5 and with_body:
                digest = base64.b64encode(hashlib.md5(whole).digest()).decode()
                self.send_header("x-goog-hash", f"crc32c=AAAAAA==,md5={digest}")
            if fault.unsized:
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not with_body:
                return
            if fault.wrong_bytes:
                body = bytes([body[0] ^ 1]) + body[1:]
            cut = len(body) if fault.close_after is None else min(fault.close_after, len(body))
            pieces = [body[: cut // 2], body[cut // 2 : cut]]
            for piece in filter(None, pieces):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if fault.unsized else piece)
                mirror.sent += len(piece)
                if fault.hold is not None and piece is pieces[0]:
                    self.wfile.flush()
                    fault.hold()
            if fault.unsized and cut == len(body):
                self.wfile.write(b"0\r\n\r\n")
            if cut < len(body):
                self.close_connection = True
                if fault.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()

    return Handler


def wait_until(met: Callable[[], bool]) -> None:
    """Wait for an action of another thread or process."""
    until = time.monotonic() + PATIENCE_S
    while not met() and time.monotonic() < until:
        time.sleep(0.01)


def shards(n: int, table: str = "instance_usage") -> dict[str, bytes]:
    return {f"{table}-{i:012d}.json.gz": bytes([i % 256]) * (1_000 + i) for i in range(n)}


def config(mirror: Mirror, **changes: Any) -> FetchConfig:
    usual: dict[str, Any] = {
        "trace": "google-v3", "cell": "a", "tables": ("instance_usage",), "shards": "0", "base_url": mirror.url,
        "backoff_s": 0.0, "timeout_s": PATIENCE_S,
    }  # fmt: skip
    return FetchConfig(**(usual | changes))


def run(mirror: Mirror, out: Path, **changes: Any) -> FetchReport:
    return fetch(config(mirror, **changes), out)


def files_in(out: Path) -> dict[str, bytes]:
    """Return path → bytes of every file in the folder except its ledger."""
    files = (p for p in sorted(out.rglob("*")) if p.is_file() and p.name != LEDGER)
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in files}
