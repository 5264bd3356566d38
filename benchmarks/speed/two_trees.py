"""Times a command of `reclaim` in two checkouts in turn, and prints user CPU of the second over the first.

    python -m benchmarks.speed.two_trees ../before . --fresh 'out-{tree}' -- ingest cell 'out-{tree}'
    python -m benchmarks.speed.two_trees ../before . --fresh 'set-{tree}/features' -- features 'set-{tree}'

`{tree}` becomes `0` for the first checkout and `1` for the second, so that each keeps its own dataset. The first pair
of runs compiles and is left out. Order alternates; user CPU, children included, differs less than elapsed time where a
machine is shared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path


def run(tree: Path, number: int, command: list[str], fresh: list[str]) -> float:
    """Return the user CPU of one run, in seconds; ``fresh`` are folders removed before it."""
    for folder in fresh:
        shutil.rmtree(folder.format(tree=number), ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run(
        [sys.executable, "-m", "reclaim", *(word.format(tree=number) for word in command)],
        env={**os.environ, "PYTHONPATH": str(tree.resolve() / "src")},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("command", nargs="+", help="arguments of reclaim, after --")
    parser.add_argument("--fresh", action="append", default=[], help="folder to remove before each run")
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    for tree in given.trees:
        if not (tree / "src" / "reclaim").is_dir():  # else the installed package would be timed in its place
            parser.error(f"{tree}: no checkout of reclaim, it holds no src/reclaim")
    seconds: list[list[float]] = [[], []]
    for pair in range(given.pairs + 1):
        for number in (0, 1) if pair % 2 else (1, 0):
            seconds[number].append(run(given.trees[number], number, given.command, given.fresh))
    first, second = (times[1:] for times in seconds)
    report = {
        "command": " ".join(given.command),
        "least_s": [round(min(first), 2), round(min(second), 2)],
        "ratio_of_least": round(min(second) / min(first), 3),
        "median_of_ratios": round(statistics.median(b / a for a, b in zip(first, second, strict=True)), 3),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
