"""Kills the service under load and damages its files, and counts lost windows and wrong answers.

    python -m benchmarks.serving.survival --model FOLDER --out benchmarks/results/survival.json

Four clients send an invented cell to a real `reclaim serve`, slot by slot, and all its processes are killed by
SIGKILL at random moments, some of them while it starts again. After each restart every window that it acknowledged is
looked for, and in the end all its reservations are compared, to the bit, with those of a memory that was never killed.
Then copies of a store are damaged in many ways: each must be refused by name, or opened with a note and right records.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import made_by
from reclaim.data.errors import StoreError
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.cell.tracker import FORMAT, Tracker
from reclaim.serving.models.loader import find_model
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.monitoring.metrics import Metrics
from reclaim.serving.monitoring.watch import Watch
from reclaim.serving.settings import ServingSettings
from reclaim.serving.storage.store import Store
from reclaim.serving.writing.writer import Writer
from reclaim.training.bundle import Bundle, load_bundle
from tests.serving.cell_fixtures import Told, loaded, told_by, usage_rows
from tests.serving.kill_harness import Cell, Server, made_up, survive

SETTINGS = ServingSettings(clock="trace")
Damage = Callable[[Path, np.random.Generator], None]


def main() -> None:
    """Run both and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a bundle")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--damages", type=int, default=40, help="of each kind")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "survival.json")
    arguments = parser.parse_args()
    model = find_model(arguments.model).folder
    bundle = load_bundle(model)
    began = time.monotonic()
    content = {
        **made_by(
            f"python -m benchmarks.serving.survival --model FOLDER --kills {arguments.kills} "
            f"--damages {arguments.damages}"
        ),
        "killed": killed(model, bundle, arguments.kills),
        "damaged": damaged(bundle, arguments.damages),
        "seconds": 0.0,
    }
    content["seconds"] = round(time.monotonic() - began, 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {arguments.out}")


def killed(model: Path, bundle: Bundle, kills: int) -> dict[str, Any]:
    """Return the lost windows and wrong answers of a server killed repeatedly under load."""
    cell = made_up(tasks=400, slots=40 + 6 * kills, pieces=8)
    with tempfile.TemporaryDirectory() as folder:
        found = survive(
            cell, bundle, Server(model, Path(folder)), kills=kills, while_starting=kills // 5, longest_s=1.0,
            pause_s=0.05,
        )  # fmt: skip
    said = {
        "kills_under_load": found.kills, "kills_while_starting": found.kills_while_starting,
        "windows_told": cell.rows, "windows_acknowledged": found.acknowledged,
        "calls_without_answer": found.refused, "acknowledged_windows_lost": found.lost,
        "unexpected_answers": len(found.failures), "tasks_compared": found.tasks, "wrong_reservations": found.wrong,
        "notes_of_unfinished_records": len(found.notes),
        "restart_s_median": round(statistics.median(found.restart_s), 1),
        "restart_s_longest": round(max(found.restart_s), 1),
    }  # fmt: skip
    print(json.dumps(said), flush=True)
    return said


class Service:
    """A writer over a folder, in this process."""

    def __init__(self, folder: Path, scorer: Scorer, snapshot_mib: int = 2**20) -> None:
        settings = SETTINGS.model_copy(update={"snapshot_mib": snapshot_mib})
        clock = CellClock(settings, lambda: -1, passed_s=lambda: 0.0)
        self.tracker = Tracker(settings, clock)
        self.store = Store.open(folder, state_version=FORMAT, sync=False)
        self.writer = Writer(self.tracker, self.store, Metrics(), Watch(900.0), settings)
        self.writer.start(scorer)
        while self.writer.state == "recovering":
            time.sleep(0.001)

    def tell(self, cell: Cell) -> None:
        """Write all windows of a history, slot by slot."""
        for pieces in cell.slots:
            wait([self.writer.write(usage_rows(piece)) for piece in pieces])


def damaged(bundle: Bundle, times: int) -> dict[str, dict[str, int]]:
    """Return the count of each outcome for each kind of damage to a store."""
    scorer = Scorer(loaded(bundle), SETTINGS.cell)
    cell = made_up(tasks=100, slots=150, pieces=4, seed=2)
    cell = replace(cell, facts=[[] for _ in cell.slots])
    out: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        service = Service(whole, scorer, snapshot_mib=0)
        service.tell(cell)
        service.writer.close()
        print(", ".join(sorted(path.name for path in whole.iterdir())))
        expected = told_by(service.tracker, SETTINGS)
        random = np.random.default_rng(3)
        for name, damage in DAMAGES.items():
            ends: Counter[str] = Counter()
            for number in range(times):
                copy = Path(folder) / f"{name}-{number}"
                shutil.copytree(whole, copy)
                damage(copy, random)
                ends[_end(copy, scorer, cell, expected)] += 1
                shutil.rmtree(copy)
            out[name] = dict(sorted(ends.items()))
            print(name, json.dumps(out[name]), flush=True)
    return out


def _end(folder: Path, scorer: Scorer, cell: Cell, expected: Told) -> str:
    """Return the outcome of opening a damaged store and sending all windows again."""
    try:
        service = Service(folder, scorer)
    except StoreError as error:
        return "refused, and named" if folder.name in str(error) else "WRONG: refused without a name"
    try:
        if service.writer.state != "ok":
            return "refused, and named"
        said = bool(service.store.recovered.notes)
        before = len(service.tracker), service.tracker.clock.latest_us
        service.tell(cell)
        found = told_by(service.tracker, SETTINGS)
    finally:
        service.writer.close()
    if not all(_same(getattr(found, name), getattr(expected, name)) for name in vars(expected)):
        return "WRONG: other answers"
    if said:
        return "noted, and answered alike once the windows cut off were sent again"
    return "answered alike" if before[1] == service.tracker.clock.latest_us else "WRONG: lost in silence"


def _same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


def _logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("log-*.bin"))


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << at % 8
    path.write_bytes(raw)


def _truncate_tail(folder: Path, random: np.random.Generator) -> None:
    log = _logs(folder)[-1]
    os.truncate(log, int(random.integers(0, log.stat().st_size)))


def _flip_in_tail(folder: Path, random: np.random.Generator) -> None:
    log = _logs(folder)[-1]
    size = log.stat().st_size
    _flip(log, int(random.integers(max(size - 1_000, 0), size)))


def _flip_in_log(folder: Path, random: np.random.Generator) -> None:
    log = _logs(folder)[int(random.integers(len(_logs(folder))))]
    _flip(log, int(random.integers(log.stat().st_size)))


def _flip_in_snapshot(folder: Path, random: np.random.Generator) -> None:
    newest = max(folder.glob("snapshot-*"))
    files = [path for path in sorted(newest.iterdir()) if path.stat().st_size]
    path = files[int(random.integers(len(files)))]
    _flip(path, int(random.integers(path.stat().st_size)))


def _delete_segment(folder: Path, random: np.random.Generator) -> None:
    _logs(folder)[int(random.integers(len(_logs(folder))))].unlink()


def _delete_snapshot(folder: Path, random: np.random.Generator) -> None:  # noqa: ARG001 - as the others are called
    shutil.rmtree(max(folder.glob("snapshot-*")))


DAMAGES: dict[str, Damage] = {
    "log cut off": _truncate_tail, "bit in the last kilobyte of the log": _flip_in_tail, "bit in the log": _flip_in_log,
    "bit in the newest snapshot": _flip_in_snapshot, "segment deleted": _delete_segment,
    "newest snapshot deleted": _delete_snapshot,
}  # fmt: skip


if __name__ == "__main__":
    main()
