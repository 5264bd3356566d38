"""Measures how far up the tail of curves should be tempered (`training/models/beyond.py`), on validation rows alone.

    python -m benchmarks.choices.tails DATASET ... --horizon 3600        # with their features built

One network per dataset, fitted to training rows and stopped on validation rows. On these one price in hindsight keeps
each budget; what is reclaimed at it is compared between the bare network and tails of several heights. No row of a test
period is read.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, concatenate, what_is_judged
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import drawn
from reclaim.features.targets import HORIZONS_S
from reclaim.replay.open_loop.fold import answer_folded
from reclaim.training.fitting.network import NetworkLearner
from reclaim.training.fitting.sources import Source, chosen_rows, open_sources
from reclaim.training.margins.calibrate import calibrate
from reclaim.training.models import beyond
from reclaim.training.models.estimator import ForecastEstimator
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.settings import NO_PRIOR, TrainConfig

HEIGHTS: Final = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Largest probabilities that are tempered, tried one by one."""
MEASURED: Final = 300_000
"""Validation rows of whole tasks that are measured, about."""


def main() -> None:
    """Fit and measure the datasets named, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", nargs="+", type=Path, metavar="DATASET")
    parser.add_argument("--horizon", type=int, default=3_600, choices=HORIZONS_S, metavar="S")
    parser.add_argument("--rows", type=int, default=240_000, help="Training rows, by default 240000.")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    print("| dataset | tail | " + " | ".join(f"{r}, {b}" for b in ("1 %", "0.1 %") for r in RESOURCES) + " |")
    print("|---|---|" + "--:|" * (2 * len(RESOURCES)), flush=True)
    for path in given.datasets:
        (source,) = open_sources([path])
        for height, reclaimed in measured(source, given.horizon, given.rows):
            cells = ["-" if np.isnan(share) else f"{100 * share:.1f}" for share in reclaimed]
            print(f"| {path.name} | {height or 'bare'} | {' | '.join(cells)} |", flush=True)


def measured(source: Source, horizon_s: int, n_rows: int) -> list[tuple[float, list[float]]]:
    """Return what is reclaimed at each height, 0 for the bare network: of each resource at 1 %, then at 0.1 %."""
    features, config = source.features, TrainConfig(prior=NO_PRIOR)
    config = replace(config, fit=replace(config.fit, max_samples=n_rows))
    with tempfile.TemporaryDirectory() as folder:
        network = NetworkLearner().fit([source], config, Path(folder)).forecaster
    assert isinstance(network, NetworkForecaster)
    (rows,) = chosen_rows([source], FeatureSet.train_rows, n_rows, config.seed)
    h = HORIZONS_S.index(horizon_s)
    beyond.TAILS = tuple(HEIGHTS[0] if k == h else 0.0 for k in range(len(HORIZONS_S)))  # type: ignore[misc]
    shares = beyond.beyond_of([(features.x[rows], features.targets(rows)[0], features.weight[rows])])
    x, windows, target = validation(features, h)
    found = []
    for height in (0.0, *HEIGHTS):
        beyond.TAILS = tuple(height if k == h else 0.0 for k in range(len(HORIZONS_S)))  # type: ignore[misc]
        tempered = NetworkForecaster(network.tensors, network.heads, shares if height else None)
        estimator = ForecastEstimator(tempered, horizon_s, mean_limit=features.mean_limit)
        reclaimed = calibrate(answer_folded(estimator, x, windows), windows, target).reclaimed
        found.append((height, [*reclaimed["aggressive"], *reclaimed["baseline"]]))
    return found


def validation(features: FeatureSet, h: int) -> tuple[NDArray[np.float32], Windows, NDArray[np.float64]]:
    """Return features, windows and targets of the validation rows of some tasks."""
    rows = features.valid_rows()
    rows = rows[drawn(features.first[rows]) < MEASURED / max(len(rows), 1)]
    windows = concatenate(
        [
            what_is_judged(features.dataset.windows(bucket).take(places))
            for bucket, places in features.by_bucket(features.row[rows])
        ]
    )
    return features.x[rows], windows, features.targets(rows)[0][:, : len(RESOURCES), h].astype(np.float64)


if __name__ == "__main__":
    main()
