"""Measures how long a learned model takes to answer: one task, and a whole cell at once.

    python benchmarks/scoring.py BUNDLE --tasks 250000 --threads 2

Drawn tasks stand in for a cell's: the time does not depend on what they did. The best of several tries counts, in
seconds of the clock and of the CPU (all threads).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from reclaim.data.windows import Windows, empty_windows
from reclaim.features.fold.stateless import features_of_histories
from reclaim.features.registry import SLOT_S
from reclaim.training.bundle import load_bundle
from reclaim.training.models.estimator import ForecastEstimator

SLOT_US = SLOT_S * 1_000_000
TASKS_PER_COLLECTION = 10


def drawn(n_tasks: int, longest: int, seed: int = 0) -> Windows:
    """Return up to ``longest`` windows of each task, sorted by task, then time."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, longest + 1, n_tasks)
    task = np.repeat(np.arange(n_tasks), length)
    windows = empty_windows(len(task))
    windows.collection_id[:] = task // TASKS_PER_COLLECTION
    windows.instance_index[:] = task
    windows.user[:] = windows.collection_id * 7_919 % 500
    windows.name[:] = windows.collection_id * 31 % 8_000
    windows.start_us[:] = (2 + np.arange(len(task)) - np.repeat(np.cumsum(length) - length, length)) * SLOT_US
    windows.end_us[:] = windows.start_us + SLOT_US
    windows.scheduled_us[:] = SLOT_US
    windows.limit[:] = rng.choice([0.02, 0.05, 0.1, 0.3], windows.limit.shape)
    windows.usage[:] = rng.gamma(0.6, 0.03, windows.usage.shape)
    windows.percentiles[:] = np.sort(rng.gamma(0.6, 0.03, windows.percentiles.shape), axis=1)
    windows.tier[:] = rng.integers(0, 4, n_tasks)[task]
    return windows


def best(function: Callable[[], object], tries: int) -> dict[str, float]:
    """Return the least time of several tries, after one that compiles."""
    function()
    times = []
    for _ in range(tries):
        clock, cpu = time.perf_counter(), time.process_time()
        function()
        times.append((time.perf_counter() - clock, time.process_time() - cpu))
    return {"seconds": min(t for t, _ in times), "cpu_seconds": min(t for _, t in times)}


def main() -> None:
    """Measure and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tasks", type=int, default=250_000)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    bundle = load_bundle(arguments.bundle)
    bundle.forecaster.threads = arguments.threads
    estimator = bundle.estimator("medium").base
    assert isinstance(estimator, ForecastEstimator)
    one, cell, histories = drawn(1, 1), drawn(arguments.tasks, 1), drawn(arguments.tasks, 4)
    x, of_one = (features_of_histories(w, threads=arguments.threads, related=bundle.related) for w in (cell, one))
    slot = np.zeros(1, np.int64)
    measured: dict[str, tuple[Callable[[], object], int]] = {
        "one task, from its window, by a fresh estimator": (lambda: bundle.estimator("medium").update(slot, one), 300),
        "one task, forecast of its features": (lambda: bundle.forecaster.predict(of_one), 300),
        f"{len(cell)} tasks, every price and the OOM probability at one horizon, from features": (
            lambda: estimator.ladder(x, cell, all_horizons=False), 5,
        ),
        f"features after {len(histories)} windows of {arguments.tasks} tasks": (
            lambda: features_of_histories(histories, threads=arguments.threads, related=bundle.related), 5,
        ),
    }  # fmt: skip
    for what, (function, tries) in measured.items():
        print(json.dumps({"what": what, "threads": arguments.threads} | best(function, tries)), flush=True)


if __name__ == "__main__":
    main()
