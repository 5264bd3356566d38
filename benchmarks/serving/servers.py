"""Starts and ends the servers that the serving benchmark measures, and reads their own measurements."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.serving.callers import HOST, OK

_START_S = 180
_STOP_S = 60
_PHASE = re.compile(r'reclaim_(\w+)_phase_duration_seconds_sum\{phase="(\w+)"\} (\S+)')
MIB = 2**20


class Server:
    """A server process and its children."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.port, self.log = port, log
        self._process = process

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a simple question."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def kill(self) -> None:
        """End it by SIGKILL, with all below it."""
        for process in self.processes()[::-1]:
            process.kill()
        self._process.wait()

    def wait(self, limit_s: float = _START_S) -> None:
        """Return when it is ready."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended while it started:\n{self.log.read_text()[-3000:]}")
            try:
                if self.get("/readyz")[0] == OK:
                    return
            except OSError:  # it does not listen yet
                pass
            time.sleep(0.2)
        raise SystemExit(f"the server was not ready in {limit_s} s:\n{self.log.read_text()[-3000:]}")

    def phases(self) -> dict[tuple[str, str], float]:
        """Return seconds spent in each part of writes and answers so far."""
        text = self.get("/metrics")[1].decode()
        return {(kind, phase): float(seconds) for kind, phase, seconds in _PHASE.findall(text)}

    def state(self) -> dict[str, float]:
        """Return the service's report on its cell."""
        cell: dict[str, float] = json.loads(self.get("/v1/cell")[1])
        return cell

    def processes(self) -> list[psutil.Process]:
        """Return the server's process and all below it."""
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def cpu_s(self) -> float:
        """Return the processor time that all of them have taken."""
        return sum(sum(p.cpu_times()[:2]) for p in self.processes())

    def reset_peak(self) -> None:
        """Let ``peak_mib`` begin at what is resident now."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Return the most memory of the largest process since ``reset_peak`` or its start."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return round(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024, 1)  # type: ignore[index]  # Linux has it

    def rss_mib(self) -> list[float]:
        """Return the resident memory of each process, the largest first."""
        return sorted((round(p.memory_info().rss / MIB, 1) for p in self.processes()), reverse=True)


@contextmanager
def reclaim_server(model: str, folder: Path, **settings: str) -> Iterator[Server]:
    """Give `reclaim serve` with its state on the disk, to be waited for; ``settings`` are of its environment."""
    port = free_port()
    environment = os.environ | {"BENTOML_HOME": str(folder / "bentoml"), "RECLAIM_CLOCK": "trace", **settings}
    command = [sys.executable, "-m", "reclaim", "serve", "--model", model, "--port", str(port)]
    with _running([*command, "--state", str(folder / "state")], port, folder / "reclaim.log", environment) as server:
        yield server


@contextmanager
def bare_server(model: str, folder: Path) -> Iterator[Server]:
    """Start the plain FastAPI route; the caller waits for it."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.serving.bare", "--model", model, "--port", str(port)]
    with _running(command, port, folder / "bare.log", os.environ | {"OMP_NUM_THREADS": "1"}) as server:
        yield server


@contextmanager
def _running(command: list[str], port: int, log: Path, environment: dict[str, str]) -> Iterator[Server]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    server = Server(port, process, log)
    try:
        yield server
    finally:
        family = server.processes() if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        for left in family:
            if left.is_running():
                left.kill()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
