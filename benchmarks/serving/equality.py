"""Feeds datasets to the live features slot by slot, and counts the rows equal to those of the batch, to the bit.

    python -m benchmarks.serving.equality DATASET ...

Their features were built by `reclaim features DATASET`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import made_by
from reclaim.data.dataset import Dataset
from reclaim.data.windows import concatenate
from reclaim.features.feature_set import FeatureSet
from reclaim.features.fold.batch import FeatureState
from reclaim.features.registry import PIPELINE_VERSION, SLOT_S
from reclaim.features.targets import known_by


def main() -> None:
    """Compare each dataset and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "equality.json")
    arguments = parser.parse_args()
    lines = []
    for path in arguments.datasets:
        lines.append(compare(path, arguments.threads))
        print("  ".join(f"{key} {value}" for key, value in lines[-1].items()), flush=True)
    content = {
        **made_by("python -m benchmarks.serving.equality " + " ".join(path.name for path in arguments.datasets)),
        "pipeline": PIPELINE_VERSION,
        "datasets": lines,
    }
    arguments.out.write_text(json.dumps(content, indent=2) + "\n")


def _all_rows(features: FeatureSet, number: int, threads: int) -> NDArray[np.float32]:
    bucket = features.bucket(number)
    return bucket.features(np.arange(len(bucket.windows)), threads)


def compare(path: Path, threads: int) -> dict[str, object]:
    """Return the counts of one dataset."""
    dataset, features = Dataset.open(path), FeatureSet.open(path)
    windows = concatenate([dataset.windows(bucket) for bucket in range(dataset.n_buckets)])
    task = windows.task_numbers()
    x_of_batch = np.concatenate([_all_rows(features, bucket, threads) for bucket in range(dataset.n_buckets)])
    state = FeatureState(features.folding.cell, threads)
    slot = (known_by(windows) - 1) // (SLOT_S * 1_000_000)
    order = np.argsort(slot, kind="stable")  # a task's own rows stay in their order
    equal = 0
    for rows in np.split(order, np.flatnonzero(np.diff(slot[order])) + 1):
        x = state.advance(task[rows], windows.take(rows))
        equal += int((x.view(np.uint32) == x_of_batch[rows].view(np.uint32)).all(axis=1).sum())
    return {
        "dataset": dataset.manifest["name"], "nature": dataset.manifest["nature"], "tasks": int(task[-1]) + 1,
        "rows": len(windows), "equal_rows": equal,
    }  # fmt: skip


if __name__ == "__main__":
    main()
