"""Compares settings of the network by what they reclaim of validation rows at each budget, next to their loss.

    python -m benchmarks.choices.networks DATASET ... --way "" --way "fit.width=128 fit.depth=2" --seeds 1 2 --out FILE

Each way is `reclaim train`'s settings with some of them changed. One network per dataset, way and seed is fitted to
training rows and stopped on validation rows. On these one price in hindsight keeps each budget; what is reclaimed at it
is written, of every horizon and resource. The loss alone says little of budgets: it is of all thresholds, and a budget
of 0.1 % rests on the last ones. No row of a test period is read. A file that is there is gone on with.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reclaim.config import load_config
from reclaim.data.schema import RESOURCES
from reclaim.features.targets import HORIZONS_S
from reclaim.training.fitting.sources import Source, open_sources
from reclaim.training.fitting.tune import priced
from reclaim.training.settings import TrainConfig

Line = Mapping[str, Any]
BUDGETS = {"aggressive": "1 %", "baseline": "0.1 %"}


def main() -> None:
    """Fit and measure what is not in the file, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", type=Path, metavar="DATASET")
    parser.add_argument("--way", action="append", required=True, metavar="SETTINGS", help="The first is the baseline.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, required=True, help="File of JSON lines.")
    given = parser.parse_args()
    lines: list[Line] = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(line["dataset"], line["way"], line["seed"]) for line in lines}
    for path in given.datasets:
        (source,) = open_sources([path])
        for seed in given.seeds:
            for way in given.way:
                if (source.name, way, seed) in done:
                    continue
                lines.append(measured(source, way, seed))
                with given.out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    print("\n".join(table(lines, given.way)))


def measured(source: Source, way: str, seed: int) -> Line:
    """Return the least loss of a fit, and what its network reclaims at each budget."""
    fitted, found = priced([source], replace(load_config(TrainConfig, None, ["prior=none", *way.split()]), seed=seed))
    reclaimed = {
        f"{horizon_s} s, {resource}, {budget}": round(100 * float(share), 3)
        for horizon_s, of in found.items()
        for margin, budget in BUDGETS.items()
        for resource, share in zip(RESOURCES, of.reclaimed[margin], strict=True)
        if np.isfinite(share)
    }
    loss = min(epoch["valid_loss"] for epoch in fitted.history)
    return {"dataset": source.name, "way": way, "seed": seed, "loss": loss, "reclaimed": reclaimed}


def table(lines: Sequence[Line], ways: Sequence[str]) -> list[str]:
    """Return points reclaimed more than the first way, by horizon and budget: means over the other keys."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    first = {(line["dataset"], line["seed"]): line for line in lines if line["way"] == ways[0]}
    columns = [f"{horizon_s} s, {budget}" for horizon_s in HORIZONS_S for budget in BUDGETS.values()]
    for line in lines:
        beside = first.get((line["dataset"], line["seed"]))
        if beside is not None:
            found[line["way"], "loss, %"].append(100 * (line["loss"] / beside["loss"] - 1))
            for case, share in line["reclaimed"].items():
                horizon, _, budget = case.split(", ")
                found[line["way"], f"{horizon}, {budget}"].append(share - beside["reclaimed"][case])
    out = [f"| way | {' | '.join(['loss, %', *columns])} |", "|---|" + "--:|" * (1 + len(columns))]
    for way in ways:
        cells = [f"{np.mean(found[way, c]):+.2f}" if found[way, c] else "" for c in ["loss, %", *columns]]
        out.append(f"| {way or 'the defaults'} | {' | '.join(cells)} |")
    return out


if __name__ == "__main__":
    main()
