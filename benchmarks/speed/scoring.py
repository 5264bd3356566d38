"""Measures how long a learned model takes to answer: one task, and a whole cell at once.

    python -m benchmarks.speed.scoring BUNDLE --tasks 250000 --threads 2
    python -m benchmarks.speed.scoring training/builtin --beside BUNDLE --out benchmarks/results/scoring.json

Drawn tasks stand in for a cell's: the time does not depend on what they did. The best of several tries counts, in
seconds of the clock and of the CPU (all threads). Two models take turns, try by try, so that other work on the machine
meets both: `ratio` is the median over the tries of the first one's time over the second one's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import made_by
from reclaim.data.windows import Cell, Windows, empty_windows
from reclaim.features.fold.stateless import features_of_histories
from reclaim.features.registry import SLOT_S
from reclaim.serving.models.loader import LoadedModel
from reclaim.serving.models.scorer import Scorer
from reclaim.training.bundle import Bundle, load_bundle
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
    windows.start_us[:] = (2 + np.arange(len(task)) - np.repeat(np.cumsum(length) - length, length)) * SLOT_US
    windows.end_us[:] = windows.start_us + SLOT_US
    windows.scheduled_us[:] = SLOT_US
    windows.limit[:] = rng.choice([0.02, 0.05, 0.1, 0.3], windows.limit.shape)
    windows.usage[:] = rng.gamma(0.6, 0.03, windows.usage.shape)
    windows.percentiles[:] = np.sort(rng.gamma(0.6, 0.03, windows.percentiles.shape), axis=1)
    windows.tier[:] = rng.integers(0, 4, n_tasks)[task]
    return windows


def timed(functions: list[Callable[[], object]], tries: int) -> list[NDArray[np.float64]]:
    """Return the times of each function, clock and CPU, shape (tries, 2); they take turns, after one that compiles."""
    for function in functions:
        function()
    times = np.empty((len(functions), tries, 2))
    for k in range(tries):
        for i, function in enumerate(functions):
            clock, cpu = time.perf_counter(), time.process_time()
            function()
            times[i, k] = time.perf_counter() - clock, time.process_time() - cpu
    return list(times)


def cases_of(bundle: Bundle, cell: Windows, threads: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Return what is timed of a model, and how often."""
    bundle.forecaster.threads = threads
    estimator = bundle.estimator("medium").base
    assert isinstance(estimator, ForecastEstimator)
    one = drawn(1, 1)
    x, of_one = (features_of_histories(w, threads=threads) for w in (cell, one))
    scorer, slot = Scorer(LoadedModel("model", "1", "model", bundle), Cell(), threads), np.zeros(1, np.int64)
    return {
        "one task, from its window, by a fresh estimator": (lambda: bundle.estimator("medium").update(slot, one), 300),
        "one task, forecast of its features": (lambda: bundle.forecaster.predict(of_one), 300),
        f"{len(cell)} tasks, every price and the OOM probability at one horizon, from features": (
            lambda: estimator.ladder(x, cell, all_horizons=False), 9,
        ),
        f"{len(cell)} tasks, all that a service keeps of them, from features": (lambda: scorer.score(x, cell), 9),
    }  # fmt: skip


def timing(functions: list[Callable[[], object]], tries: int) -> dict[str, Any]:
    """Return the least times of each function, and the ratio of two."""
    times = timed(functions, tries)
    out: dict[str, Any] = {"seconds": [of[:, 0].min() for of in times], "cpu_seconds": [of[:, 1].min() for of in times]}
    if len(times) > 1:
        out["ratio"] = float(np.median(times[0][:, 0] / times[1][:, 0]))
    return out


def main() -> None:
    """Measure and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--beside", type=Path, help="Bundle of a second model.")
    parser.add_argument("--tasks", type=int, default=250_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file for the results.")
    asked = parser.parse_args()
    folders = [asked.bundle, *([] if asked.beside is None else [asked.beside])]
    bundles, lines = [load_bundle(folder) for folder in folders], []
    cell, histories = drawn(asked.tasks, 1), drawn(asked.tasks, 4)
    cases = [cases_of(bundle, cell, asked.threads) for bundle in bundles]
    for what, (_, tries) in cases[0].items():
        lines.append({"what": what, **timing([of[what][0] for of in cases], tries)})
        print(json.dumps(lines[-1]), flush=True)
    what = f"features after {len(histories)} windows of {asked.tasks} tasks"
    lines.append({"what": what, **timing([lambda: features_of_histories(histories, threads=asked.threads)], 5)})
    print(json.dumps(lines[-1]), flush=True)
    if asked.out is not None:
        results = {
            **made_by(f"python -m benchmarks.speed.scoring {asked.bundle.name}"
            + " --beside MODEL" * (len(bundles) > 1) + f" --tasks {asked.tasks} --threads {asked.threads}"),
            "threads": asked.threads,
            "models": [bundle.kind for bundle in bundles], "lines": lines,
        }  # fmt: skip
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
