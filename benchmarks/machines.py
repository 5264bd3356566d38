"""Measures what is reclaimed per machine at equal violation: estimator of machines, sums of tasks, EuroSys'21.

    python -m benchmarks.machines --composer TOOLS/compose_cell.py --donors DATA --work WORK [--sets cell-7 azure ...]
    python -m benchmarks.machines --table                                         # of the results that are there

Sets, each replayed one hour and a day ahead by `reclaim replay frontier`:

- `cell-SEED`: a composed cell of 100 machines and 10 days, the model trained on one of 60 machines whose series are of
  other VMs (`replay_cell.halve`). Nothing of the replayed cell is trained on; its first quarter sets margins.
- `together-SEED`: the same where tasks move together (`--common 0.4 --service 0.1` of the composer).
- `bitbrains`, `azure` and `bitbrains-alike`, `azure-alike`: recorded VMs, put on machines of 10 to 40 at random, or
  with those whose load moves like theirs. The movement is real, the grouping is not. Trained on earlier days.

A set's dataset, model and replays are folders below the work folder, each made once: run again after an interruption,
the script makes the missing ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from benchmarks import made_by
from benchmarks.replay_cell import ALL, compose, halve, run
from reclaim.data.core.files import replaced_folder
from reclaim.data.schema import RESOURCES
from reclaim.training.tracking.client import sqlite_uri

RESULTS: Final = Path(__file__).parent / "results" / "machines.json"
HORIZONS: Final = {"1h": 3_600, "24h": 86_400}
SEEDS: Final = (7, 17, 27)
TOGETHER: Final = ("--common", "0.4", "--service", "0.1")
GROUPED: Final = {"bitbrains": ("bitbrains_faststorage", "cpu_used_mhz"), "azure": ("azure_2017", "avg_cpu_pct")}
"""Set → folder of its VMs, and the column that says which move alike."""
SETS: Final = (
    *(f"{kind}-{seed}" for seed in SEEDS for kind in ("cell", "together")),
    *(f"{name}{how}" for name in GROUPED for how in ("", "-alike")),
)
SIZES: Final = (10, 40)
"""VMs of a machine."""
_PLACES: Final = 6
"""Decimals of shares that are kept: a thousandth of the smallest budget."""


def main() -> None:
    """Run the missing steps of the sets asked for, and write their numbers and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--composer", type=Path, help="the script that composes cells")
    parser.add_argument("--donors", type=Path, help="folder of the donors it is to use")
    parser.add_argument("--work", type=Path, help="where everything is made")
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--horizons", nargs="*", choices=HORIZONS, default=list(HORIZONS))
    parser.add_argument("--machines", type=int, default=100, help="of a composed cell that is replayed")
    parser.add_argument("--days", type=int, default=10, help="of each cell")
    parser.add_argument("--train-machines", type=int, default=60)
    parser.add_argument("--draws", type=int, default=200, help="bootstrap resamples behind each interval")
    parser.add_argument("--table", action="store_true", help="print the table and do nothing else")
    asked = parser.parse_args()
    composed = any(name.partition("-")[0] not in GROUPED for name in asked.sets)
    needed = ["donors", "work", *(["composer"] if composed else [])]
    if not asked.table and (missing := [f"--{name}" for name in needed if getattr(asked, name) is None]):
        parser.error(f"{', '.join(missing)}: needed to measure; --table prints the results that are there")
    if not asked.table:
        work = asked.work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        about = made_by("")
        for name in asked.sets:
            dataset, bundle = prepare(asked, work, name)
            for horizon in asked.horizons:
                out = work / f"{name}-{horizon}"
                if not (out / "results.json").is_file():
                    options = {"horizon_s": HORIZONS[horizon], "draws": asked.draws, "estimators": ALL}
                    pairs = [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
                    call(work, "replay", "frontier", dataset, "--out", out.name, "--model", bundle, *pairs)
                keep(name, horizon, json.loads((out / "results.json").read_text()), asked, about)
    print("\n".join(table(json.loads(RESULTS.read_text()))))


def call(work: Path, *words: str) -> None:
    """Run a command of reclaim in the work folder."""
    environment = {**os.environ, "MLFLOW_TRACKING_URI": sqlite_uri(work / "mlruns/mlflow.db")}
    run([str(Path(sys.executable).with_name("reclaim")), *map(str, words)], work, environment)


def prepare(asked: argparse.Namespace, work: Path, name: str) -> tuple[str, str]:
    """Make a set's dataset and model; return their names in the work folder."""
    kind, _, seed = name.partition("-")
    if kind in GROUPED:
        trained = name
        if not (work / name / "features").is_dir():
            ingest_grouped(asked.donors, work, name, alike=seed == "alike")
    else:
        trained = f"{name}-train"
        for half, dataset, machines, offset, role in (
            (0, trained, asked.train_machines, 1, ("split.role=train",)),
            (1, name, asked.machines, 0, ("split.role=test", "split.valid_share=0.25")),
        ):
            if (work / dataset / "features").is_dir():
                continue
            donors = halve(asked.donors, work / f"donors-{half}", half)
            trace = work / f"{dataset}-trace"
            if not (trace / "COMPOSED.json").is_file():
                together = TOGETHER if kind == "together" else ()
                compose(asked, trace, donors, machines, asked.days, int(seed) + offset, *together)
            call(work, "ingest", trace.name, dataset)
            call(work, "features", dataset, *(part for one in role for part in ("--set", one)))
    bundle = f"{name}-model"
    if not (work / bundle).is_dir():
        call(work, "train", trained, "--set", f"model_name={name}", "--set", "prior=none")
        call(work, "bundle", f"{name}@candidate", bundle)
    return name, bundle


def ingest_grouped(donors: Path, work: Path, name: str, *, alike: bool) -> None:
    """Ingest recorded VMs with a column that puts each on a machine."""
    folder, signal = GROUPED[name.partition("-")[0]]
    frame = pd.read_parquet(donors / folder / "usage.parquet")
    trace = work / f"{name}-trace"
    if not trace.is_dir():
        with replaced_folder(trace) as fresh:
            frame["machine"] = frame["vm"].map(on_machines(frame, signal, alike=alike))
            frame.to_parquet(fresh / "usage.parquet", index=False)
            mapping = (
                Path(__file__).parents[1] / "data/traces/mappings" / f"{name.partition('-')[0]}.toml"
            ).read_text()
            (fresh / "mapping.toml").write_text(mapping.replace("[columns]", '[columns]\nmachine_id = "machine"'))
    call(work, "ingest", trace.name, name, "--trace", "series", "--mapping", f"{trace.name}/mapping.toml")
    call(work, "features", name)


def on_machines(frame: pd.DataFrame, signal: str, *, alike: bool) -> dict[Any, int]:
    """Return the machine of each VM, from 0: at random, or along the first axis in which hourly loads differ most."""
    rng = np.random.default_rng(1)
    vms = np.sort(frame["vm"].unique())
    if alike:
        hourly = frame.groupby([frame["time_s"] // 3_600, "vm"])[signal].mean().unstack()[vms].ffill().bfill()
        moved = (hourly - hourly.mean()) / hourly.std().replace(0.0, 1.0)
        axis = np.linalg.svd(moved.to_numpy().T, full_matrices=False)[0][:, 0]
        vms = vms[np.argsort(axis, kind="stable")]
    else:
        vms = rng.permutation(vms)
    machines: dict[Any, int] = {}
    while len(machines) < len(vms):
        some = vms[len(machines) : len(machines) + int(rng.integers(SIZES[0], SIZES[1] + 1))]
        machines |= dict.fromkeys(some.tolist(), len(set(machines.values())))
    return machines


def keep(name: str, horizon: str, results: dict[str, Any], asked: argparse.Namespace, about: dict[str, Any]) -> None:
    """Add the numbers of a replay to the results, and what they were made with before the first changed this file."""
    content = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"sets": {}}
    of, kinds = results["machines"], {one["name"]: one["kind"] for one in results["estimators"]}
    content["sets"][f"{name}-{horizon}"] = {
        **about,
        "command": f"python -m benchmarks.machines --sets {name} --horizons {horizon} --machines {asked.machines} "
        f"--days {asked.days} --train-machines {asked.train_machines} --draws {asked.draws}",
        "dataset": results["dataset"],
        "rates": results["rates"],
        "oracle": of["oracle"],
        "count": of["count"],
        "kinds": kinds,
        "contenders": {who: {r: line["at"] for r, line in by.items()} for who, by in of["contenders"].items()},
        "margins": {who: by for who, by in of["margins"].items() if kinds[who].startswith("learned")},
    }
    exact = json.dumps(content)
    content = json.loads(exact, parse_float=lambda number: round(float(number), _PLACES))
    RESULTS.write_text(json.dumps(content, indent=0, sort_keys=True))  # with indentation it has more than 1 MiB


def table(content: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table: at each rate the estimator of machines, the best sum and the best predictor."""
    yield (
        "| set | horizon | resource | budget | machine | bound | best sum of tasks | best of EuroSys'21 and others "
        "| oracle | machine less the best not of the model | violation, following |"
    )
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name, horizon, r, rate, one, at, ours in comparisons(content):
        sums = [who for who in at if one["kinds"][who] not in ("learned machine", "machine")]
        others = [who for who in at if one["kinds"][who] == "machine"]
        machine = ours.get("machine")
        margin = ("aggressive" if rate == max(one["rates"]) else "baseline") + " following"
        followed = one["margins"].get(machine, {}).get(margin, {}).get(r)
        cells = [
            name, horizon, r, f"{rate:.1%}",
            *(_percent(at.get(ours.get(kind, ""))) for kind in ("machine", "bound")),
            _best(at, sums), _best(at, others), f"{one['oracle'][r]:.1%}",
            _points(at[machine].get("ahead") if machine else None),
            "-" if followed is None else f"{followed['violation_rate']['value']:.2%}",
        ]  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def comparisons(
    content: dict[str, Any],
) -> Iterator[tuple[str, str, str, float, dict[str, Any], dict[str, Any], dict[str, str]]]:
    """Yield set, horizon, resource, rate, the set's results, each contender's line there, and the model's by kind."""
    for key, one in sorted(content["sets"].items()):
        name, _, horizon = key.rpartition("-")
        for r in RESOURCES:
            for k, rate in enumerate(one["rates"]):
                at = {
                    who: by[r][k] for who, by in one["contenders"].items() if r in by and by[r][k]["value"] is not None
                }
                ours = {who.rpartition("(")[2][:-1]: who for who in at if one["kinds"][who] == "learned machine"}
                if at:
                    yield name, horizon, r, rate, one, at, ours


def _percent(line: dict[str, Any] | None) -> str:
    return "-" if line is None else f"{line['value']:.1%}"


def _points(ahead: dict[str, Any] | None) -> str:
    if ahead is None:
        return "-"
    value, low, high = (100 * ahead[k] for k in ("value", "low", "high"))
    return f"{value:+.1f} [{low:.1f}, {high:.1f}]"


def _best(at: dict[str, Any], names: list[str]) -> str:
    if not names:
        return "-"
    best = max(names, key=lambda who: at[who]["value"])
    return f"{at[best]['value']:.1%} ({best})"


if __name__ == "__main__":
    main()
