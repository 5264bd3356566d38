"""Times the next window of every task of a large cell, for every estimator that needs no model, and weighs its state.

    python -m benchmarks.speed.estimators                       # 250,000 tasks, two threads, some minutes
    python -m benchmarks.speed.estimators --tasks 20000 --only vpa krr

Each estimator first takes 48 windows of every task, then the next ones, each a call with one window of every task: in
the order of the tasks, as a service has them whose tasks come again in the same order, and shuffled, the worst there
is. The median call is reported, with the processor time of all threads: on a machine that others use too, half
of that is nearer to what a call takes. Demand wanders by 20 % from window to window around a level of each task's own,
and jumps to four times that in one window out of fifty. The state is that of the estimator's arrays; what a call needs
besides is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import made_by
from reclaim.data.windows import CPU_MAX, CPU_MEAN, LEVELS, MEMORY_MAX, MEMORY_MEAN, Windows, empty_windows
from reclaim.training.estimators.base import Estimator
from reclaim.training.estimators.registry import ESTIMATORS, build_estimator

TASKS = 250_000
"""Tasks of a large cell: 10,000 machines with 25 tasks each."""
WARM = 48
"""Windows that each task has had: four hours."""
TICKS = 7
THREADS = 2
_WINDOW_US = 300_000_000


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--only", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS), metavar="ESTIMATOR")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "estimators.json")
    arguments = parser.parse_args()
    in_order, shuffled = np.arange(arguments.tasks), np.random.default_rng(0).permutation(arguments.tasks)
    ticks = [_windows(arguments.tasks, tick) for tick in range(WARM, WARM + 2 * TICKS)]
    lines = []
    for name in arguments.only:
        estimator = build_estimator(name)
        estimator.threads = THREADS
        for tick in range(WARM):
            estimator.update(in_order, _windows(arguments.tasks, tick))
        line: dict[str, object] = {"estimator": name}
        for way, order, calls in (("in_order", in_order, ticks[:TICKS]), ("shuffled", shuffled, ticks[TICKS:])):
            line |= {f"{way}_{key}": value for key, value in _time(estimator, order, calls).items()}
        line["state_bytes_per_task"] = round(sum(a.nbytes for a in estimator.state().values()) / arguments.tasks)
        lines.append(line)
        print(*(f"{key} {value}" for key, value in line.items() if not isinstance(value, list)), flush=True)
    content = {
        **made_by(
            "python -m benchmarks.speed.estimators"
            + f" --tasks {arguments.tasks}" * (arguments.tasks != TASKS)
            + f" --only {' '.join(arguments.only)}" * (arguments.only != list(ESTIMATORS))
        ),
        "threads": THREADS,
        "tasks": arguments.tasks,
        "warm_windows": WARM,
        "estimators": lines,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {arguments.out}")


def _time(estimator: Estimator, order: NDArray[np.int64], calls: list[Windows]) -> dict[str, object]:
    """Return the durations of the calls, rows in the given order, in milliseconds."""
    wall, processor = [], []
    for windows in calls:
        rows = windows.take(order)
        started, worked = time.perf_counter(), time.process_time()
        estimator.update(order, rows)
        wall.append(round(1000 * (time.perf_counter() - started), 1))
        processor.append(round(1000 * (time.process_time() - worked), 1))
    return {"ms": statistics.median(wall), "all_ms": wall, "processor_ms": statistics.median(processor)}


def _windows(tasks: int, tick: int) -> Windows:
    """Return the window of that number of every task, the same whenever it is asked for."""
    level = np.random.default_rng(1).uniform(0.02, 0.4, (2, tasks))
    rng = np.random.default_rng((2, tick))
    cpu, memory = level * rng.lognormal(0.0, 0.2, level.shape) * rng.choice([1.0, 4.0], level.shape, p=[0.98, 0.02])
    usage = empty_windows(tasks).usage
    usage[:, CPU_MEAN], usage[:, CPU_MAX] = cpu, 1.6 * cpu
    usage[:, MEMORY_MEAN], usage[:, MEMORY_MAX] = memory, 1.1 * memory
    end_us = np.full(tasks, (tick + 2) * _WINDOW_US)
    return replace(
        empty_windows(tasks), start_us=end_us - _WINDOW_US, end_us=end_us, usage=usage, limit=np.ones((tasks, 2)),
        percentiles=cpu[:, None].astype(np.float32) * np.linspace(0.4, 1.6, len(LEVELS), dtype=np.float32),
    )  # fmt: skip


if __name__ == "__main__":
    main()
