"""Compares the closed loop with reservations from the tape to one that asks the estimators as time passes.

    python benchmarks/live.py DATASET --out benchmarks/results/live.json

The tape holds what an estimator answered to the trace's own history; asked live, it also learns of waiting and
restarts. Undisturbed tasks get the same to the bit (`tests/replay/closed_loop/test_live.py`); this says what the
disturbed ones make of it, on a dataset with machines, at the aggressive margin.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

from reclaim.data.dataset import Dataset
from reclaim.data.windows import Windows
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.closed_loop.live import Live
from reclaim.replay.closed_loop.outcome import summary
from reclaim.replay.closed_loop.simulate import simulate
from reclaim.replay.closed_loop.workload import machines_of, workload_of
from reclaim.replay.experiment import Source
from reclaim.replay.open_loop.estimates import estimate_all
from reclaim.replay.open_loop.history import current_reservations
from reclaim.replay.settings import ReplayConfig
from reclaim.training.estimators.base import Estimator
from reclaim.training.estimators.registry import build_estimator
from reclaim.training.margins.margin import NO_MARGIN, Guarded, Margin
from reclaim.training.margins.tune import TunedEstimator

MARGIN = "aggressive"
SHOWN = (
    "in_reclaimed_cpu", "in_reclaimed_memory", "reserved_cpu", "reserved_memory", "oom_kills",
    "preempted_per_1000_task_days", "waiting", "wasted",
)  # fmt: skip


def main() -> None:
    """Run both and write the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--estimators", nargs="*", default=["borg", "percentile", "moving-max"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "live.json")
    arguments = parser.parse_args()
    dataset = Dataset.open(arguments.dataset)
    source = Source(dataset, FeatureSet.open(arguments.dataset), {}, progress=False)
    estimates = estimate_all(source, ReplayConfig(estimators=tuple(arguments.estimators)))
    slots = estimates.period.slots
    machines = machines_of(dataset, slots.first_us, slots.stop_us)
    workload = workload_of(source, estimates.period, machines)
    windows = estimates.history.windows.take(workload.row)
    lines = []
    for name in arguments.estimators:
        settings = estimates.calibrations[name].settings
        margins = {margin: of for margin, of in settings.items() if isinstance(of, Margin)}
        estimator = (
            Guarded(TunedEstimator(name, estimates.tunings[name], margins, MARGIN), NO_MARGIN)
            if name in estimates.tunings
            else Guarded(build_estimator(name), margins[MARGIN])
        )
        tell_what_came_before(estimator, dataset, windows)
        held = np.nan_to_num(
            current_reservations(estimates.reservations(name)[MARGIN], estimates.history)[workload.row]
        )[None]
        line: dict[str, object] = {"estimator": name}
        for way, live in (("tape", None), ("live", Live(estimator, windows, workload.tape))):
            started = time.perf_counter()
            found = summary(simulate(workload, machines, held, live=live))
            line[way] = {key: found[key] for key in SHOWN} | {"seconds": round(time.perf_counter() - started, 2)}
        lines.append(line)
        print(json.dumps(line), flush=True)
    content = {
        "command": "python benchmarks/live.py DATASET",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "dataset": {"name": dataset.manifest.get("name"), "nature": dataset.manifest.get("nature")},
        "machines": len(machines),
        "runs": len(workload.runs),
        "margin": MARGIN,
        "versions": {name: version(name) for name in ("reclaim", "numpy", "numba")},
        "estimators": lines,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {arguments.out}")


def tell_what_came_before(estimator: Estimator, dataset: Dataset, windows: Windows) -> None:
    """Let an estimator see each task's windows before its first one on the tape, in the slots that ``Live`` uses."""
    firsts = windows.task_starts()[:-1]
    keys = zip(windows.collection_id[firsts].tolist(), windows.instance_index[firsts].tolist(), strict=True)
    place = {key: k for k, key in enumerate(keys)}
    for bucket in range(dataset.n_buckets):
        seen = dataset.windows(bucket)
        starts = seen.task_starts()[:-1]
        tasks = zip(seen.collection_id[starts].tolist(), seen.instance_index[starts].tolist(), strict=True)
        slot = np.array([place.get(task, -1) for task in tasks], np.int64)[seen.task_numbers()]
        rows = np.flatnonzero(slot >= 0)
        rows = rows[seen.start_us[rows] < windows.start_us[firsts][slot[rows]]]
        if len(rows):
            estimator.update(slot[rows], seen.take(rows))


if __name__ == "__main__":
    main()
