"""The curl lines of the README and of the page about the HTTP API, run as printed against a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.test_launch import wait_until_ready

ROOT = Path(__file__).resolve().parents[2]


def _lines(page: str) -> list[str]:
    blocks = re.findall(r"```sh\n(curl.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in re.split(r"\n(?=curl)", block.strip())]


LINES = _lines("docs/http-api.md")
PORT = ":3000/"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_every_curl_line_of_the_documents_is_answered(bundle_folder: Path, free_port: int, tmp_path: Path) -> None:
    assert len(LINES) >= 10
    assert set(_lines("README.md")) <= set(LINES)
    command = [sys.executable, "-m", "reclaim", "serve", "--port", str(free_port), "--model", str(bundle_folder)]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        try:
            wait_until_ready(server, free_port)
            answers = [_run(line.replace(PORT, f":{free_port}/")) for line in LINES]
        finally:
            server.terminate()
            server.wait(120)
    stateless, written, told, on_machine, asked, explained, ready, machines, over_a_day, machine, room = answers
    assert stateless["tasks"][0]["history"]["windows"] == 2
    assert (written["taken"], written["durable"], len(written["reservations"]["tasks"])) == (1, True, 1)
    assert (told["taken"], told["refused"]) == (2, {})
    assert [task["collection_id"] for task in on_machine["tasks"]] == [42]
    assert on_machine["tasks"][0]["limit"] == {"cpu": 1.5, "memory": 4e9}
    assert len(asked["tasks"]) == 1
    assert explained["steps"]
    assert ready["ready"] is True
    assert [(one["machine_id"], one["tasks"]) for one in machines["machines"]] == [(7, 1)]
    assert machine["machine"] == machines["machines"][0]
    assert over_a_day["machines"][0]["peak"] == machine["forecast"][-1]["peak"]
    assert room["candidates"][0]["places"][0]["machine_id"] == 7


def _run(line: str) -> dict[str, Any]:
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert "error" not in answer, (line, answer)
    return answer
