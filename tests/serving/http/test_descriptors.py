"""A service that runs out of file descriptors goes on answering, and takes writes."""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType

import pytest

from reclaim.serving.http import process
from reclaim.serving.http.protocol import BoundedProtocol, bound_connections
from reclaim.serving.settings import ServingSettings
from tests.serving.test_launch import wait_until_ready

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_no_call_opens_a_file_once_the_service_has_started(bundle_folder: Path) -> None:
    """Kernels in memory would hide it, so it runs in a process of its own."""
    command = [sys.executable, "-m", "tests.serving.descriptors", str(bundle_folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-3_000:]


@pytest.mark.slow
def test_idle_connections_beyond_the_limit_of_open_files_stop_neither_writes_nor_probes(
    bundle_folder: Path, free_port: int, tmp_path: Path
) -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))

    command = [sys.executable, "-m", "reclaim", "serve", "--port", str(free_port), "--model", str(bundle_folder)]
    start_us = int(time.time()) // 300 * 300_000_000 - 300_000_000
    window = {"collection_id": 1, "limit": {"cpu": 1, "memory": 1}, "start_us": start_us, "cpu_mean": 0.1}
    body = json.dumps({"windows": [{**window, "end_us": start_us + 300_000_000}]})
    with (tmp_path / "log").open("wb") as log, ExitStack() as idle:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, preexec_fn=few_files)
        try:
            wait_until_ready(server, free_port)
            for n in range(700):
                idle.enter_context(socket.create_connection(("127.0.0.1", free_port), timeout=60))
                if n % 100 == 99:
                    for method, path, content in (("POST", "/v1/usage", body), ("GET", "/livez", None)):
                        connection = HTTPConnection("127.0.0.1", free_port, timeout=60)
                        connection.request(method, path, content, {"content-type": "application/json"})
                        assert connection.getresponse().status == 200
                        connection.close()
            assert server.poll() is None
        finally:
            server.terminate()
            server.wait(120)
    written = (tmp_path / "log").read_text()
    assert "raise its limit" in written  # 320 of 512 files are left for connections
    assert "Too many open files" not in written


def test_the_soft_limit_of_open_files_rises_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        assert process.raise_open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)
        assert process.raise_open_files() == min(hard, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("open_files", "most"), [(1_024, 1_024 - 128 - 128), (20_000, 4_096), (100, 1)])
def test_connections_leave_files_for_the_process_and_for_those_that_wait(
    open_files: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    was = BoundedProtocol.most
    try:
        bound_connections(ServingSettings(), open_files)
        assert BoundedProtocol.most == most
        assert ("raise its limit" in caplog.text) == (most < 4_096)
    finally:
        BoundedProtocol.most = was


def test_a_fault_is_in_the_log_before_the_process_ends(
    service: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(os, "_exit", lambda code: logged.append(f"{code} {caplog.text}"))
    monkeypatch.setattr(logging, "shutdown", lambda: None)

    def write() -> None:
        try:
            raise OSError("no more files")
        finally:
            service._exit_on_fault()

    with pytest.raises(OSError, match="no more files"):
        write()
    assert logged[0].startswith(str(os.EX_SOFTWARE))
    assert "OSError: no more files" in logged[0]
