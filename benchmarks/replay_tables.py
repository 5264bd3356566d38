"""Writes what finished replays found as one Markdown page: their summaries, their tables, and what they were run on.

python -m benchmarks.replay_tables margins/ frontier/ … > benchmarks/results/replay-NAME.md
python -m benchmarks.replay_tables --fewest cell-117/what-if/ together-117/what-if/ …

With ``--fewest`` it writes one table of the fewest machines of several "what if" replays, a column for each, called
after the folder that the replay is in.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from reclaim.data.schema import RESOURCES
from reclaim.replay.experiments.margins.tables import cells_table
from reclaim.replay.experiments.what_if.page import KILLS
from reclaim.replay.report.page import runs_table
from reclaim.replay.runs.catalogue import load_experiment
from reclaim.replay.runs.run import RESULTS


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders that `reclaim replay` wrote")
    parser.add_argument("--fewest", action="store_true", help="one table of the fewest machines of all")
    asked = parser.parse_args()
    print(fewest([folder.absolute() for folder in asked.folders]) if asked.fewest else replays(asked.folders))


def replays(folders: Iterable[Path]) -> str:
    """Return the page of several replays."""
    parts: list[str] = []
    for number, folder in enumerate(folders):
        results = json.loads((folder / RESULTS).read_text())
        experiment = load_experiment(results["inputs"]["experiment"])
        dataset = results["dataset"]
        if number == 0:
            of = f"{dataset['task_windows']:,} task-windows, {dataset['machines']} machines"
            parts += [f"# Replays of {dataset['name']}\n", f"Data: {dataset['nature']}; {of}."]
        ahead = f"{results['inputs']['config']['horizon_s'] / 3600:g} h ahead"
        parts += [f"\n## {experiment.title}, {ahead}\n\n    {results['command']}\n"]
        parts += [experiment.summary(results).as_markdown()]
        parts += [runs_table(experiment.runs(results), experiment.columns).as_markdown()]
        for name, points in experiment.page(results).get("points", {}).items():
            parts += [f"\n### {name}\n\n{points.as_markdown()}"]
        if loop := results.get("closed_loop", {}).get("estimators"):
            parts += [f"\n### In the closed loop\n\n{cells_table({'estimators': loop}).as_markdown()}"]
    return "\n".join(parts)


def fewest(folders: Sequence[Path]) -> str:
    """Return the fewest machines of contenders of machines, and there CPU and memory peaks passed in %, and kills."""
    cells: dict[str, list[str]] = {}
    for folder in folders:
        results = json.loads((folder / RESULTS).read_text())
        places = 1 - math.floor(math.log10(100 * results["asked"]["peaks_budget"]))  # a tenth of the budget shows
        for of in results["estimators"]:
            there = next((point for point in of["points"] if point["machines"] == of["fewest"]), None)
            if there is None:
                cells.setdefault(of["name"], []).append("-")
                continue
            passed = ", ".join(f"{100 * there[f'machines_over_{r}']:.{places}f}" for r in RESOURCES)
            cells.setdefault(of["name"], []).append(f"{of['fewest']} ({passed}; {there[KILLS]:.1f})")
    lines = [["contender", *(folder.parent.name for folder in folders)], ["---", *("--:" for _ in folders)]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *([name, *of] for name, of in cells.items())])


if __name__ == "__main__":
    main()
