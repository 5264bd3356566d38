"""Clients of the serving benchmark: many small calls in one event loop, and large ones from a thread."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

HOST = "127.0.0.1"
ARROW = "application/vnd.apache.arrow.stream"
_HEAD_END = b"\r\n\r\n"
_LARGE = 2**20
"""Bytes that are asked of the system at once."""
OK = 200

Maker = Callable[[], bytes]
"""Gives the next request, whole; called for each."""


def request(method: str, path: str, body: bytes = b"", kind: str = "application/json", accept: str = "*/*") -> bytes:
    """Return a request as it goes over the wire."""
    head = f"{method} {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: {kind}\r\naccept: {accept}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Calls:
    """Results of calls.

    Attributes
    ----------
    seconds : list of float
        That each answered one took.
    failed : int
    span_s : float
        For how long they were made.
    cpu_s : float
        Processor time that the server took meanwhile, where it was measured.
    first_failure : str
    """

    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    span_s: float = 0.0
    cpu_s: float = 0.0
    first_failure: str = ""

    def add(self, other: Calls) -> None:
        """Take in calls made in another turn."""
        self.seconds += other.seconds
        self.failed += other.failed
        self.span_s += other.span_s
        self.cpu_s += other.cpu_s
        self.first_failure = self.first_failure or other.first_failure

    def summary(self) -> dict[str, float | int | str]:
        """Return the numbers that are written."""
        if not self.seconds:
            return {"calls": 0, "failed": self.failed, "first_failure": self.first_failure}
        p50, p90, p99, most = np.percentile(np.array(self.seconds) * 1e3, (50, 90, 99, 100)).tolist()
        return {
            "calls": len(self.seconds), "failed": self.failed,
            "p50_ms": round(p50, 3), "p90_ms": round(p90, 3), "p99_ms": round(p99, 3), "max_ms": round(most, 3),
            "per_second": round(len(self.seconds) / self.span_s, 1),
            **({"server_cpu_ms": round(self.cpu_s / len(self.seconds) * 1e3, 3)} if self.cpu_s else {}),
            **({"first_failure": self.first_failure} if self.first_failure else {}),
        }  # fmt: skip


class _Answers(asyncio.Protocol):
    """One connection with one call at a time; no streams, which would take longer than the server for small calls."""

    def __init__(self) -> None:
        self._got = b""
        self._need = 0
        self._done: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._need and (end := self._got.find(_HEAD_END)) >= 0:
            self._need = end + len(_HEAD_END) + _length_in(self._got[:end])
        if self._need and len(self._got) >= self._need and self._done is not None:
            self._done.set_result(self._got)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionResetError("the server closed the connection"))

    async def call(self, sent: bytes) -> bytes:
        assert self._transport is not None
        self._got, self._need = b"", 0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(sent)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _length_in(head: bytes) -> int:
    for line in head.lower().split(b"\r\n")[1:]:
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    raise ConnectionError("an answer without a length")


def hammer(port: int, make: Maker, clients: int, seconds: float) -> Calls:
    """Return the results of several clients, each of which calls again once it is answered."""
    end = time.perf_counter() + seconds
    return asyncio.run(keep_calling(port, make, clients, lambda: time.perf_counter() < end))


async def keep_calling(port: int, make: Maker, clients: int, going: Callable[[], bool], pause_s: float = 0) -> Calls:
    """Call from several clients for a time, with a pause after each answer."""
    calls = Calls()

    async def client() -> None:
        _, answers = await asyncio.get_running_loop().create_connection(_Answers, HOST, port)
        try:
            while going():
                sent = make()
                began = time.perf_counter()
                try:
                    got = await answers.call(sent)
                except OSError as error:
                    calls.failed += 1
                    calls.first_failure = calls.first_failure or str(error)
                    _, answers = await asyncio.get_running_loop().create_connection(_Answers, HOST, port)
                    continue
                if int(got[9:12]) == OK:
                    calls.seconds.append(time.perf_counter() - began)
                else:
                    calls.failed += 1
                    calls.first_failure = calls.first_failure or got[:400].decode(errors="replace")
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            answers.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    calls.span_s = time.perf_counter() - began
    return calls


class Caller:
    """A connection for large calls, made from whatever thread: it waits without holding the interpreter."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port), timeout=300)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call(self, sent: bytes) -> tuple[int, bytes, float]:
        """Return status, body and seconds from the first byte sent to the last one got."""
        began = time.perf_counter()
        self._socket.sendall(sent)
        head = b""
        while _HEAD_END not in head:
            if not (got := self._socket.recv(_LARGE)):
                raise ConnectionResetError("the server closed the connection")
            head += got
        head, _, start = head.partition(_HEAD_END)
        body = bytearray(_length_in(head))
        body[: len(start)] = start
        at, view = len(start), memoryview(body)
        while at < len(body):
            at += self._socket.recv_into(view[at : at + _LARGE])
        return int(head[9:12]), bytes(body), time.perf_counter() - began

    def close(self) -> None:
        """Close it."""
        self._socket.close()


def one_after_another(requests: Iterator[bytes] | list[bytes]) -> Maker:
    """Return a function that yields these requests in turn, forever if it is a list."""
    source = itertools.cycle(requests) if isinstance(requests, list) else requests
    return lambda: next(source)
