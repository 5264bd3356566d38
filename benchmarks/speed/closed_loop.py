"""Times the closed loop against the size of the cell: 100, 1,000 and 10,000 machines, each with its tasks.

    python -m benchmarks.speed.closed_loop --work WORK            # a synthetic cell of 100 machines, some minutes
    python -m benchmarks.speed.closed_loop --dataset DATASET      # an ingested one with features

The cell of the dataset is taken several times over: its machines as often as its tasks, all copies on one scheduler,
which sees them as one cell. Smaller ones are some of the machines with as large a share of the collections.
Reservations are those of Borg's estimator at the medium margin, from the tape, and the cell alone is timed, in seconds
of its processor: as experiments run it, with every machine compared with the peaks of its runs within an hour.
Compiled code is loaded before the clock starts. Cells too large to be run whole within a sitting are run for their
first slots, and the line says for how many; what four weeks would take is the time of a slot times 8,064.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import made_by
from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import SplitConfig
from reclaim.replay.closed_loop.outcome import summary
from reclaim.replay.closed_loop.simulate import simulate
from reclaim.replay.closed_loop.workload import CellMachines, Workload, machines_of, workload_of
from reclaim.replay.experiment import Source
from reclaim.replay.open_loop.estimates import estimate_all
from reclaim.replay.open_loop.history import current_reservations
from reclaim.replay.settings import ReplayConfig
from reclaim.training.margins.margin import MARGIN_NAMES

SLOTS_OF_FOUR_WEEKS = 28 * 288
HORIZON_S = 3_600


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="ingested, with features and a test period")
    parser.add_argument("--work", type=Path, default=Path("closed-loop"), help="where the synthetic cell is made")
    parser.add_argument("--days", type=float, default=4.0, help="length of the synthetic cell; a tenth is not tested")
    parser.add_argument("--machines", type=int, nargs="*", default=[100, 1_000, 10_000])
    parser.add_argument("--task-slots", type=float, default=1.5e8, help="most task-slots of one cell, roughly")
    parser.add_argument("--margin", choices=MARGIN_NAMES, default="medium")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "closed-loop.json")
    arguments = parser.parse_args()
    path = arguments.dataset or synthetic(arguments.work, arguments.days)
    dataset = Dataset.open(path)
    source = Source(dataset, FeatureSet.open(path), {})
    estimates = estimate_all(source, ReplayConfig(estimators=("borg",)))
    slots = estimates.period.slots
    machines = machines_of(dataset, slots.first_us, slots.stop_us)
    workload = workload_of(source, estimates.period, machines)
    reserved = estimates.reservations("borg")[arguments.margin]
    held = np.nan_to_num(current_reservations(reserved, estimates.history)[workload.row])[None]
    del estimates, reserved
    simulate(*cut(workload, machines, 0.1, 3), held, horizon_s=HORIZON_S)  # compiles
    lines = []
    for n in arguments.machines:
        line = measure(workload, machines, held, n, arguments.task_slots)
        lines.append(line)
        print(*(f"{key} {value}" for key, value in line.items()), flush=True)
    content = {
        **made_by(command(parser, arguments)),
        "threads": 1,
        "dataset": dataset.manifest.get("nature", "not stated"),
        "machines_of_the_dataset": len(machines),
        "days": slots.count * slots.slot_s / 86_400,
        "reservations": f"borg, {arguments.margin}",
        "cells": lines,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {arguments.out}")


def command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """Return the command of the benchmark: options other than the defaults, paths named as the options."""
    said = ["python -m benchmarks.speed.closed_loop"]
    for name, value in vars(arguments).items():
        if value != parser.get_default(name):
            values = value if isinstance(value, list) else [value]
            shown = (
                name.upper() if isinstance(v, Path) else f"{v:g}" if isinstance(v, float) else str(v) for v in values
            )
            said.append(" ".join([f"--{name.replace('_', '-')}", *shown]))
    return " ".join(said)


def synthetic(work: Path, days: float) -> Path:
    """Make a dataset of a synthetic cell of 100 machines and 1,500 tasks, held out whole."""
    path = work / "dataset"
    write_cell(
        work / "cell", SyntheticCellConfig(machines=100, days=days, seed=1, tasks_per_machine=15.0, format="parquet")
    )
    ingest(work / "cell", path, IngestConfig())
    build_features(Dataset.open(path), FeatureConfig(split=SplitConfig(role="test", valid_share=0.1)))
    return path


def cut(workload: Workload, machines: CellMachines, share: float, slots: int) -> tuple[Workload, CellMachines]:
    """Return some of a cell, or several of it, for its first slots."""
    if share < 1:
        some, kept = machines.subset(max(1, round(len(machines) * share)), seed=1)
        workload, machines = replace(workload.grown(share, seed=1), masks=workload.masks[:, kept]), some
    elif share > 1:
        workload, machines = workload.tiled(round(share)), machines.tiled(round(share))
    stop_us = min(workload.stop_us, workload.start_us + slots * workload.slot_s * 1_000_000)
    return replace(workload, stop_us=stop_us), machines


def measure(
    workload: Workload, machines: CellMachines, held: np.ndarray, n: int, most: float
) -> dict[str, float | int | None]:
    """Run a cell of about ``n`` machines and time it."""
    share = n / len(machines)
    whole = (workload.stop_us - workload.start_us) // (workload.slot_s * 1_000_000)
    per_slot = len(workload.tape) / whole * share
    slots = int(min(whole, max(1, most // per_slot)))
    asked, on = cut(workload, machines, share, slots)
    started = time.process_time()  # one thread, so that others on the machine count for little
    outcome = simulate(asked, on, held, horizon_s=HORIZON_S)
    seconds = time.process_time() - started
    ran = int(outcome.ticks["running"].sum())
    found = summary(outcome)
    return {
        "machines": len(on),
        "slots": slots,
        "mean_running": round(ran / slots),
        "mean_waiting": round(float(outcome.ticks["pending"].sum() / slots)),
        "cpu_seconds": round(seconds, 2),
        "task_windows_per_s": round(ran / seconds),
        "four_weeks_cpu_s": round(seconds / slots * SLOTS_OF_FOUR_WEEKS, 1),
        "oom_kills": int(found["oom_kills"] or 0),
        "preempted_per_1000_task_days": found["preempted_per_1000_task_days"],
        "in_reclaimed_cpu": found["in_reclaimed_cpu"],
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


if __name__ == "__main__":
    main()
