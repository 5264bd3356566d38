"""Writes what finished replays found as one Markdown page: their summaries, their tables, and what they were run on.

python benchmarks/replay_tables.py margins/ frontier/ … > benchmarks/results/replay-NAME.md
python benchmarks/replay_tables.py --fewest cell-117/what-if/ together-117/what-if/ …

With ``--fewest`` it writes one table of the fewest machines of several "what if" replays, a column for each, called
after the folder that the replay is in.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
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
    if asked.fewest:
        print(fewest([folder.absolute() for folder in asked.folders]))
        return
    for number, folder in enumerate(asked.folders):
        results = json.loads((folder / RESULTS).read_text())
        experiment = load_experiment(results["inputs"]["experiment"])
        dataset = results["dataset"]
        if number == 0:
            print(f"# Replays of {dataset['name']}\n")
            print(
                f"Data: {dataset['nature']}; {dataset['task_windows']:,} task-windows, {dataset['machines']} machines."
            )
        ahead = f"{results['inputs']['config']['horizon_s'] / 3600:g} h ahead"
        print(f"\n## {experiment.title}, {ahead}\n\n    {results['command']}\n")
        print(experiment.summary(results).as_markdown())
        print(runs_table(experiment.runs(results), experiment.columns).as_markdown())
        for name, points in experiment.page(results).get("points", {}).items():
            print(f"\n### {name}\n\n{points.as_markdown()}")
        if loop := results.get("closed_loop", {}).get("estimators"):
            print(f"\n### In the closed loop\n\n{cells_table({'estimators': loop}).as_markdown()}")


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
