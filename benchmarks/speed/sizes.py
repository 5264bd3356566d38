"""Takes cells of growing size through every stage, each a command of its own, and writes time, memory and disk.

    python -m benchmarks.speed.sizes --work WORK --cells 30x12 300x12 1000x62-parquet

A cell is MACHINESxDAYS, synthetic, in JSON or, with ``-parquet``, as BigQuery exports the same tables. Memory is the
largest resident set of the command's process; disk is what the stage leaves behind. A stage that is there is not run
again, so the largest cell can be taken in pieces.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import made_by
from reclaim.data.dataset import Dataset
from reclaim.training.tracking.client import sqlite_uri

RESULTS = Path(__file__).parents[1] / "results"
CHEAP = "estimators=['borg', 'limit']"
"""Rivals of the replay: the share of each in its time is measured by ``benchmarks/speed/estimators.py``."""


def stages(machines: str, days: str, form: str, work: Path) -> dict[str, tuple[list[str], Path]]:
    """Return the command of each stage, without ``reclaim``, and what it leaves behind."""
    cell, dataset = work / "cell", work / "dataset"
    size = ["--machines", machines, "--days", days, "--seed", "1", "--format", form]
    return {
        "synth": (["synth", str(cell), *size], cell),
        "ingest": (["ingest", str(cell), str(dataset)], dataset / "usage"),
        "features": (["features", str(dataset)], dataset / "features"),
        "train": (["train", str(dataset)], work / "artifacts"),
        "predict": (["predict", str(dataset), "--out", str(work / "latest.parquet")], work / "latest.parquet"),
        "replay margins": (
            ["replay", "margins", str(dataset), "--out", str(work / "margins"), "--set", CHEAP], work / "margins",
        ),
    }  # fmt: skip


def run(command: list[str], work: Path) -> tuple[float, float]:
    """Run a command; return its seconds and the largest resident set of its process, in MiB."""
    environment = os.environ | {"MLFLOW_TRACKING_URI": sqlite_uri(work / "mlflow.db"), "MLFLOW_ARTIFACT_ROOT": ""}
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "reclaim", *command], env=environment, cwd=work)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"reclaim {' '.join(command)}: exit status {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def bytes_of(path: Path) -> int:
    """Return the size of a file or of all files of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def write(path: Path, cells: list[dict[str, Any]]) -> None:
    """Write the table of the cells that are done."""
    content = {
        **made_by(f"python -m benchmarks.speed.sizes --work WORK --cells {' '.join(cell['cell'] for cell in cells)}"),
        "nature": "synthetic",
        "cells": cells,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {path}", flush=True)


def cell_name(text: str) -> str:
    """Return the name of a cell that ``--cells`` gives."""
    if not re.fullmatch(r"\d+x\d+(\.\d+)?(-parquet)?", text):
        raise argparse.ArgumentTypeError(f"expected MACHINESxDAYS or MACHINESxDAYS-parquet, got {text!r}")
    return text


def main() -> None:
    """Run the stages of every cell and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--cells", nargs="+", type=cell_name, default=["30x12", "300x12"], metavar="MACHINESxDAYS[-parquet]"
    )
    parser.add_argument("--keep", action="store_true", help="Keep what the stages wrote.")
    parser.add_argument("--out", type=Path, default=RESULTS / "sizes.json")
    given = parser.parse_args()
    cells: list[dict[str, Any]] = []
    for name in given.cells:
        size, _, form = name.partition("-")
        machines, _, days = size.partition("x")
        work: Path = given.work.resolve() / name
        work.mkdir(parents=True, exist_ok=True)
        lines: list[dict[str, Any]] = []
        for stage, (command, left) in stages(machines, days, form or "json", work).items():
            note = work / f"{stage.replace(' ', '-')}.json"
            if not note.exists():
                seconds, mib = run(command, work)
                line = {"stage": stage, "seconds": round(seconds, 1), "peak_mib": round(mib), "bytes": bytes_of(left)}
                note.write_text(json.dumps(line))
            lines.append(json.loads(note.read_text()))
            print(name, lines[-1], flush=True)
        windows = Dataset.open(work / "dataset").n_windows
        cells.append(
            {"cell": name, "machines": int(machines), "days": float(days), "windows": windows, "stages": lines}
        )
        if not given.keep:
            shutil.rmtree(work)
        write(given.out, cells)


if __name__ == "__main__":
    main()
