"""Writes what finished replays found as one Markdown page: their summaries, their tables, and what they were run on.

python benchmarks/replay_tables.py margins/ frontier/ … > benchmarks/results/replay-NAME.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from reclaim.replay.experiments.margins.tables import cells_table
from reclaim.replay.report.page import runs_table
from reclaim.replay.runs.catalogue import load_experiment
from reclaim.replay.runs.run import RESULTS


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders that `reclaim replay` wrote")
    for number, folder in enumerate(parser.parse_args().folders):
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


if __name__ == "__main__":
    main()
