"""Fewest machines of several "what if" replays, as one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.replay_tables import fewest
from reclaim.replay.experiments.what_if.page import KILLS
from reclaim.replay.runs.run import RESULTS


def write(folder: Path, budget: float, *estimators: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / RESULTS).write_text(json.dumps({"asked": {"peaks_budget": budget}, "estimators": estimators}))
    return folder


def test_peaks_passed_show_a_tenth_of_the_budget_and_a_contender_that_fits_nowhere_has_a_dash(tmp_path: Path) -> None:
    point = {"machines": 44, "machines_over_cpu": 0.00123, "machines_over_memory": 0.0456, KILLS: 2.04}
    found, none = {"name": "net", "fewest": 44, "points": [point]}, {"name": "borg", "fewest": None, "points": [point]}
    folders = [write(tmp_path / f"cell-{budget}" / "what-if", budget, found, none) for budget in (0.01, 0.001)]
    assert fewest(folders).splitlines() == [
        "| contender | cell-0.01 | cell-0.001 |",
        "| --- | --: | --: |",
        "| net | 44 (0.1, 4.6; 2.0) | 44 (0.12, 4.56; 2.0) |",
        "| borg | - | - |",
    ]
