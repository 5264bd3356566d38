"""Compares the log-loss of trees with the features of related tasks and without, on validation rows, 1 hour ahead.

    reclaim features DATASET --set related=true
    python -m benchmarks.choices.related DATASET [DATASET ...]

The interval of its rise without them is a bootstrap over tasks. Test rows are not read.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import feature_names
from reclaim.features.targets import HORIZONS_S
from reclaim.training.fitting.trees import fit_trees
from reclaim.training.models.survival import log_loss
from reclaim.training.models.trees import Rows
from reclaim.training.settings import TreeConfig

HORIZON_S = 3_600
ROWS = 40_000
"""Rows of each of training and validation, drawn at random."""
DRAWS = 500


def compare(dataset: str, seed: int) -> dict[str, object]:
    """Return the mean loss with and without, and the relative rise without with its 95 % interval."""
    config = TreeConfig(iterations=60, threads=1)
    features = FeatureSet.open(dataset)
    if not features.related:
        raise SystemExit(f"{dataset}: build its features with --set related=true")
    rng = np.random.default_rng(seed)
    train, valid = (
        np.sort(rng.choice(rows, min(len(rows), ROWS), replace=False))
        for rows in (features.train_rows(), features.valid_rows())
    )
    h = HORIZONS_S.index(HORIZON_S)
    value, oom = features.targets(train)
    actual = features.targets(valid)[0][:, :, h]
    task = np.unique(features.first[valid], return_inverse=True)[1]
    by_task, mean = [], []
    for width in (len(features.names), len(feature_names(related=False))):
        model = fit_trees(
            Rows(features.x[train][:, :width].copy(), value, np.full_like(oom, np.nan)),
            config,
            horizon_s=HORIZON_S,
            seed=seed,
        )
        foreseen = model.predict(features.x[valid][:, :width], HORIZON_S)
        loss = log_loss(foreseen.survival, foreseen.thresholds, actual[:, :, None])[..., 0]
        mean.append(np.nanmean(loss, axis=0).tolist())
        by_task.append(np.bincount(task, np.nansum(loss, axis=1)))
    of, without = by_task
    picks = (rng.integers(0, len(of), len(of)) for _ in range(DRAWS))
    drawn = [without[pick].sum() / of[pick].sum() - 1 for pick in picks]
    return {
        "dataset": dataset,
        "seed": seed,
        "with": mean[0],
        "without": mean[1],
        "rise": without.sum() / of.sum() - 1,
        "interval": np.percentile(drawn, [2.5, 97.5]).tolist(),
    }


def main() -> None:
    """Print one JSON object per dataset and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="+")
    given = parser.parse_args()
    for dataset in given.dataset:
        for seed in (1, 2):
            print(json.dumps(compare(dataset, seed)), flush=True)


if __name__ == "__main__":
    main()
