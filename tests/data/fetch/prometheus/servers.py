"""Real servers for tests, on loopback: a Prometheus with a backfilled history, a VictoriaMetrics with the same."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

_START_S = 30.0
"""Longest time until a server answers."""


def needs(*programs: str) -> None:
    """Skip a test where programs are not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (`apt-get install prometheus victoria-metrics`)")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def _running(command: list[str], url: str, ready: str, log: Path) -> Iterator[str]:
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            until = time.monotonic() + _START_S
            while True:
                try:
                    if httpx.get(url + ready).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def backfilled(folder: Path, texts: Iterable[Path]) -> Path:
    """Return a folder with the blocks that promtool makes of OpenMetrics files."""
    for text in texts:
        made = subprocess.run(["promtool", "tsdb", "create-blocks-from", "openmetrics", text, folder],
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert made.returncode == 0, made.stderr
    return folder


@contextmanager
def prometheus(folder: Path, blocks: Path, *options: str, labels: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a Prometheus on a copy of blocks, with external labels; yield its address."""
    shutil.copytree(blocks, folder / "data")
    (folder / "prometheus.yml").write_text(json.dumps({"global": {"external_labels": dict(labels or {})}}))
    url = f"http://127.0.0.1:{_free_port()}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
               "--storage.tsdb.retention.time=100y", f"--web.listen-address={url[7:]}", *options]  # fmt: skip
    with _running(command, url, "/-/ready", folder / "log"):
        yield url


@contextmanager
def victoria_metrics(folder: Path, texts: Iterable[Path]) -> Iterator[str]:
    """Run a VictoriaMetrics that has the samples of OpenMetrics files; yield its address."""
    folder.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{_free_port()}"
    command = ["victoria-metrics", f"-storageDataPath={folder / 'data'}", "-retentionPeriod=100y",
               f"-httpListenAddr={url[7:]}"]  # fmt: skip
    with _running(command, url, "/health", folder / "log"):
        for text in texts:
            httpx.post(f"{url}/api/v1/import/prometheus", content=text.read_bytes(), timeout=60).raise_for_status()
        httpx.get(f"{url}/internal/force_flush", timeout=60)
        yield url
