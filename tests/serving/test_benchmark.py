"""The benchmark of the service, tried quickly: real servers, every kind of call, and none of them fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reclaim.features.fold.live_record import KEPT

ROOT = Path(__file__).parents[2]


def run(bundle_folder: Path, out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Return what the benchmark wrote and printed."""
    command = [sys.executable, "-m", "benchmarks.serving.load", "--quick", "--model", str(bundle_folder)]
    done = subprocess.run(
        [*command, "--out", str(out), *options], capture_output=True, text=True, timeout=1_200, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.mark.slow
def test_every_call_is_measured_and_none_fails(bundle_folder: Path, tmp_path: Path) -> None:
    found, printed = run(bundle_folder, tmp_path / "serving.json")
    assert set(found["singles"]) == {"1", "16", "64"}
    singles = [call for by_call in found["singles"].values() for call in by_call.values()]
    assert len(singles) == 12
    for call in (*singles, *found["beside"].values()):
        assert call["failed"] == 0, call
        assert call["calls"] > 0
        assert call["p50_ms"] <= call["p99_ms"] <= call["max_ms"]
    of_machines = {"machines", "machines_json", "machines_day", "machines_metrics", "fit"}
    assert set(found["bulk"]) == {"reservations", "usage", "usage_cell", "cell", *of_machines}
    written, answered = found["bulk"]["usage"]["seconds_in"], found["bulk"]["reservations"]["seconds_in"]
    assert all(name.startswith("write ") for name in written if name != "transfer, and the rest")
    assert {"answer features", "answer answer"} <= set(answered)
    assert str(bundle_folder) not in json.dumps(found)
    assert "| POST /v1/reservations, one task | 64 |" in printed


@pytest.mark.slow
def test_calls_for_machines_are_measured_alone(bundle_folder: Path, tmp_path: Path) -> None:
    found, printed = run(bundle_folder, tmp_path / "machines.json", "--machines")
    assert set(found["bulk"]) == {"machines", "machines_json", "machines_day", "machines_metrics", "fit"}
    assert {time["least"] > 0 for of in found["sets"]["ns"].values() for time in of.values()} == {True}
    assert "| of the model |" in printed


@pytest.mark.slow
def test_memory_is_watched_under_steady_load(bundle_folder: Path, tmp_path: Path) -> None:
    found, printed = run(bundle_folder, tmp_path / "memory.json", "--soak", "1", "--tasks", "500")
    assert found["failed"] == 0, found["failures"]
    assert found["windows"] >= 500
    assert found["single_calls"] > 0
    assert len(found["minute"]) == len(found["processes_mib"]) > 3
    assert all(len(mib) == 1 for mib in found["processes_mib"])
    assert found["verdict"] == "too short to say"
    assert (tmp_path / "memory.png").stat().st_size > 1_000
    assert "verdict" in printed


@pytest.mark.slow
def test_a_cell_that_is_killed_is_there_again_and_its_memory_is_counted_by_part(
    bundle_folder: Path, tmp_path: Path
) -> None:
    found, printed = run(bundle_folder, tmp_path / "size.json", "--size", "300", "--slots", "2", "--no-snapshots")
    assert found["parts"]["record of its history, without histograms"] == KEPT.itemsize
    assert 0 < found["parts"]["octaves of its histograms"] < 1_728
    (cell,) = found["cells"]
    assert [len(cell["slots"]), cell["windows"]] == [2, 600]
    assert cell["start"]["same_answers"]  # of the log alone
    assert cell["start_from_snapshot"]["same_answers"]
    assert cell["snapshot_bytes_per_task"] > 0
    assert "| all |" in printed
