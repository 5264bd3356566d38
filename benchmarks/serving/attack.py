"""Attacks a real service on loopback in many ways, and counts its answers: none may be a fault of it.

    python -m benchmarks.serving.attack --model FOLDER

Every attack is drawn from ``--seed``. A write that was acknowledged before or during an attack must be there after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from benchmarks import made_by
from benchmarks.serving.survival import damaged, killed
from reclaim.serving.models.loader import find_model
from reclaim.serving.wire.arrow import MEDIA_TYPE
from reclaim.training.bundle import load_bundle
from tests.serving.cell_fixtures import usage_arrow, windows_of
from tests.serving.kill_harness import Server

Json = dict[str, Any]
W: Final = 300_000_000
"""A window in µs."""
CELL: Final = 5_000
"""Tasks of the cell under attack."""
_JSON: Final = {"content-type": "application/json"}
_WAIT_S: Final = 60.0
_INTENDED: Final = 503
"""The only status from 500 on that a service without a fault gives: it asks the client to come again."""
_ROUTES: Final = ("/v1/usage", "/v1/tasks", "/v1/reservations", "/v1/cell/reservations")
_VALUES: Final = (
    "null", "-1", "1e400", "NaN", "18446744073709551616", '""', "[]", "{}", "true", '"\\u0000"', '"x:y"', "9" * 400,
    "[" * 300 + "]" * 300, '{"a": 1, "a": 2}', "0.1", '"' + "z" * 5_000 + '"',
)  # fmt: skip
_POST: Final = b"POST /v1/usage HTTP/1.1\r\nHost: localhost\r\n"
_GET: Final = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
_HEADS: Final = (
    b"GET / HTTP/1.1\r\n\r\n", b"GET /livez HTTP/9.9\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01",
    b"\0" * 64, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    _POST + b"Content-Length: -1\r\n\r\n", _POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    _POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", _POST + b"Transfer-Encoding: gzip\r\n\r\n{}",
    _POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    _POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    _POST + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
    _POST + b"Origin: https://evil.example\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/usage HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n\r\n{}",
    _GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", _GET + b"X: " + b"y" * 3_000 + b"\r\n\r\n",
    b"DELETE /v1/usage HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
)  # fmt: skip


class Attack:
    """A service under attack.

    Parameters
    ----------
    server : Server
        Started, and ready.
    seed : int
    """

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.random = server, np.random.default_rng(seed)
        self.http = httpx.Client(base_url=server.url, timeout=_WAIT_S)
        self.first = int(time.time()) // 300 - 2
        self.told: list[Json] = []
        """Windows that were acknowledged."""

    def window(self, task: int, slot: int) -> Json:
        """Return a good window."""
        at = (self.first + slot) * W
        limit = {"cpu": 1.0, "memory": 1.0}
        return {"collection_id": task, "limit": limit, "start_us": at, "end_us": at + W, "cpu_mean": 0.1,
                "cpu_max": 0.2, "memory_max": 0.3, "user": "a:b", "logical_name": f"n{task % 9}"}  # fmt: skip

    def fill(self) -> None:
        """Write two windows of each task."""
        for slot in (0, 1):
            self.write([self.window(task, slot) for task in range(CELL)])

    def write(self, windows: list[Json]) -> int:
        """Write windows and keep those that are acknowledged; return the status."""
        answer = httpx.post(f"{self.server.url}/v1/usage", json={"windows": windows}, timeout=_WAIT_S)
        if answer.status_code == httpx.codes.OK and not answer.json()["refused"]:
            self.told += windows
        return answer.status_code

    def lost(self) -> int:
        """Return how many of the acknowledged windows the service no longer knows."""
        lost = 0
        for k in range(0, len(self.told), CELL):
            part = self.told[k : k + CELL]
            answer = self.http.post("/v1/usage", json={"windows": part}).json()
            lost += len(part) - int(answer["repeated"])
        return lost

    def bodies(self, n: int) -> Iterator[int]:
        """Send JSON bodies that are cut, flipped, or hold a strange value."""
        good = {
            "/v1/usage": {"windows": [self.window(9, 1), self.window(8, 1)]},
            "/v1/tasks": {"tasks": [{"collection_id": 7, "limit": {"cpu": 1, "memory": 1}}]},
            "/v1/reservations": {"tasks": [{"collection_id": 1, "limit": {"cpu": 1, "memory": 1}, "windows": [
                {"start_us": 0, "end_us": W, "cpu_mean": 0.1}]}]},
            "/v1/cell/reservations": {"collections": [1, 2], "margins": {"free": "medium"}, "page_size": 3},
        }  # fmt: skip
        for _ in range(n):
            path = _ROUTES[int(self.random.integers(len(_ROUTES)))]
            body = json.dumps(good[path])
            kind = int(self.random.integers(5))
            if kind == 0:
                content = body[: int(self.random.integers(len(body)))].encode()
            elif kind == 1:
                content = _flipped(body.encode(), self.random)
            elif kind == 2:
                content = bytes(self.random.integers(0, 256, int(self.random.integers(200)), np.uint8))
            else:  # some value, or some field's name, is another one
                places = (
                    [k for k, c in enumerate(body) if c == ":"]
                    if kind == 3
                    else [k for k, c in enumerate(body) if c in "{["]
                )
                at = 1 + places[int(self.random.integers(len(places)))]
                value = _VALUES[int(self.random.integers(len(_VALUES)))]
                more = f"{value}, " if kind == 3 else f'"collection_id": {value}, '
                content = (body[:at] + more + body[at:]).encode()
            yield self.http.post(path, content=content, headers=_JSON).status_code

    def streams(self, n: int) -> Iterator[int]:
        """Send Arrow streams that are cut, flipped or continued."""
        good = usage_arrow(windows_of(*({"task": t, "at": self.first, "user": t % 3} for t in range(50))))
        for _ in range(n):
            kind = int(self.random.integers(4))
            content = good
            if kind == 0:
                content = good[: int(self.random.integers(len(good)))]
            elif kind == 1:
                content = good + bytes(self.random.integers(0, 256, int(self.random.integers(1, 40)), np.uint8))
            else:
                for _ in range(kind):
                    content = _flipped(content, self.random)
            path = _ROUTES[2 * int(self.random.integers(2))]
            yield self.http.post(path, content=content, headers={"content-type": MEDIA_TYPE}).status_code

    def raw(self, n: int) -> Iterator[int]:
        """Send bytes that are no request, or one that smuggles another; 0: closed without an answer."""
        for k in range(n):
            sent = _HEADS[k % len(_HEADS)]
            if k >= len(_HEADS):
                sent = _flipped(sent, self.random)
            with socket.create_connection(("127.0.0.1", self.server.port), timeout=0.3) as line:
                head = b""
                with contextlib.suppress(OSError):
                    line.sendall(sent)
                    head = line.recv(65_536)
            yield int(head.split()[1]) if head.startswith(b"HTTP/") else 0

    def descriptors(self, n: int) -> Iterator[int]:
        """Hold idle connections, and write and ask meanwhile."""
        with contextlib.ExitStack() as idle:
            for k in range(n):
                with contextlib.suppress(OSError):
                    idle.enter_context(socket.create_connection(("127.0.0.1", self.server.port), timeout=_WAIT_S))
                if k % 50 == 0:
                    yield self.write([self.window(k, 2)])
                    yield httpx.get(f"{self.server.url}/livez", timeout=_WAIT_S).status_code

    def clocks(self, n: int) -> Iterator[int]:
        """Send windows of wrong times; then a right one must be taken."""
        for _ in range(n):
            window = self.window(int(self.random.integers(CELL)), 1)
            move = int(self.random.choice([-1, 1])) * int(10 ** self.random.uniform(6, 17))
            for name in ("start_us", "end_us"):
                window[name] = max(window[name] + move, 0)
            window["end_us"] = max(window["end_us"], window["start_us"] + 1)
            yield self.http.post("/v1/usage", json={"windows": [window]}).status_code
        before = len(self.told)
        yield self.write([self.window(CELL + n, 2)])
        yield 200 if len(self.told) == before + 1 else 599

    def readers(self, n: int) -> Iterator[int]:
        """Ask for the whole cell from many clients: some stall, some leave; the probe must answer meanwhile."""
        ask = b"GET /v1/cell/reservations?page_size=10000 HTTP/1.1\r\nhost: localhost\r\n\r\n"
        with contextlib.ExitStack() as stalled, ThreadPoolExecutor(32) as pool:
            for _ in range(n // 4):
                line = stalled.enter_context(socket.create_connection(("127.0.0.1", self.server.port)))
                line.sendall(ask * 10)
            for _ in range(n // 4):
                with socket.create_connection(("127.0.0.1", self.server.port)) as leaving:
                    leaving.sendall(ask)

            def read(_: int) -> int:
                status = _INTENDED
                for wait_s in (0.0, 1.0, 2.0, 4.0, 8.0):
                    time.sleep(wait_s * (status == _INTENDED))
                    if status == _INTENDED:
                        path = f"{self.server.url}/v1/cell/reservations?page_size=10000"
                        status = httpx.get(path, timeout=_WAIT_S).status_code
                return status

            answers = [pool.submit(read, k) for k in range(n // 2)]
            while not all(answer.done() for answer in answers):
                began = time.perf_counter()
                yield httpx.get(f"{self.server.url}/livez", timeout=_WAIT_S).status_code
                self.slowest_probe_s = max(self.slowest_probe_s, time.perf_counter() - began)
                time.sleep(0.05)
            yield from (answer.result() for answer in answers)

    slowest_probe_s: float = 0.0


def _flipped(body: bytes, random: np.random.Generator) -> bytes:
    out = bytearray(body)
    for _ in range(int(random.integers(1, 4))):
        out[int(random.integers(len(out)))] ^= 1 << int(random.integers(8))
    return bytes(out)


def counted(name: str, statuses: Iterator[int], attack: Attack) -> Json:
    """Return the count of each kind of answer to an attack, and whether the service is there after it."""
    began, seen = time.monotonic(), Counter[int]()
    for status in statuses:
        seen[status] += 1
    ready = attack.http.get("/readyz").status_code == httpx.codes.OK
    row = {
        "attack": name, "sent": sum(seen.values()), "2xx": sum(n for s, n in seen.items() if 200 <= s < 300),
        "4xx": sum(n for s, n in seen.items() if 400 <= s < 500), "503": seen[_INTENDED],
        "faults": sum(n for s, n in seen.items() if s >= 500 and s != _INTENDED), "closed": seen[0] + seen[100],
        "ready after": ready, "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print(" | ".join(str(value) for value in row.values()), flush=True)
    return row


def main() -> None:
    """Run all attacks and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a bundle")
    counts = {"bodies": 5_000, "streams": 2_000, "raw": 400, "descriptors": 6_000, "clocks": 500, "readers": 300}
    for name, n in counts.items():
        parser.add_argument(f"--{name}", type=int, default=n)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--damages", type=int, default=4, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "attack.json")
    arguments = parser.parse_args()
    model = find_model(arguments.model).folder
    bundle = load_bundle(model)
    began = time.monotonic()
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(model, Path(folder), RECLAIM_CLOCK="unix", RECLAIM_READING_TIMEOUT_S="5")
        with server:
            attack = Attack(server, arguments.seed)
            attack.fill()
            print("attack | sent | 2xx | 4xx | 503 | faults | closed | ready after | seconds")
            run: dict[str, Callable[[int], Iterator[int]]] = {name: getattr(attack, name) for name in counts}
            rows = [counted(name, sends(getattr(arguments, name)), attack) for name, sends in run.items()]
            lost, slowest = attack.lost(), attack.slowest_probe_s
            code = server.stop()
            tracebacks = server.log.read_text(errors="replace").count("Traceback")
    content = {
        **made_by("python -m benchmarks.serving.attack --model FOLDER"),
        "seed": arguments.seed,
        "attacks": rows,
        "acknowledged_windows": len(attack.told),
        "acknowledged_windows_lost": lost,
        "slowest_probe_s_among_readers": round(slowest, 3),
        "exit_code": code,
        "tracebacks_in_the_log": tracebacks,
        "killed": killed(model, bundle, arguments.kills),
        "damaged": damaged(bundle, arguments.damages),
        "seconds": round(time.monotonic() - began, 1),
    }
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"lost {lost}, exit code {code}, tracebacks {tracebacks}; wrote {arguments.out}")


if __name__ == "__main__":
    main()
