"""What a trial of `reclaim tune` fits, and the validation loss that it is judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import HistoryTooShortError
from reclaim.features.store import FeatureSet
from reclaim.features.targets import HORIZONS_S
from reclaim.training.settings import TrainConfig
from reclaim.training.sources import Source, chosen_rows, hidden_features, resident_samples, rows_in_memory

if TYPE_CHECKING:
    from reclaim.training.resident import Rows
    from reclaim.training.trees import TreeForecaster

Objective = Callable[[TrainConfig, Callable[[int, float], None]], float]
"""Fits settings and returns their validation loss; tells each epoch and its loss where there are epochs."""


def objective_of(sources: Sequence[Source], config: TrainConfig) -> Objective:
    """Return what fits the estimator of the settings; the rows are chosen and made ready once, for all trials.

    Raises
    ------
    ConfigError
        The device of the settings is not here.
    HistoryTooShortError
        No validation row.
    """
    return (_trees if config.estimator == "trees" else _network)(sources, config)


def _network(sources: Sequence[Source], config: TrainConfig) -> Objective:
    """Return what fits the network; the samples are put on the device once."""
    from reclaim.training.fit import choose_device, fit_network

    train = chosen_rows(sources, FeatureSet.train_rows, config.fit.max_samples, config.seed)
    valid = chosen_rows(sources, FeatureSet.valid_rows, config.fit.max_valid_samples, config.seed)
    samples, valid_samples = resident_samples(sources, train, valid, choose_device(config.fit.device))

    def objective(tried: TrainConfig, on_epoch: Callable[[int, float], None]) -> float:
        result = fit_network(
            samples, valid_samples, tried.fit, seed=tried.seed, on_epoch=on_epoch, hidden=hidden_features(sources)
        )
        return min(epoch["valid_loss"] for epoch in result.history)

    return objective


def _trees(sources: Sequence[Source], config: TrainConfig) -> Objective:
    """Return what fits the trees; the rows are copied once."""
    from reclaim.training.trees import fit_trees

    train = rows_in_memory(sources, chosen_rows(sources, FeatureSet.train_rows, config.trees.max_samples, config.seed))
    chosen = chosen_rows(sources, FeatureSet.valid_rows, config.fit.max_valid_samples, config.seed)
    x = np.concatenate([source.features.x[rows] for source, rows in zip(sources, chosen, strict=True)])
    y = np.concatenate([source.features.valid_targets(r)[0] for source, r in zip(sources, chosen, strict=True)])
    if not len(x):
        raise HistoryTooShortError("expected at least 1 validation row, got 0: the trace is too short for the split")

    def objective(tried: TrainConfig, on_epoch: Callable[[int, float], None]) -> float:  # noqa: ARG001 - trees have none
        return _tree_loss(fit_trees(train, tried.trees, horizon_s=tried.horizon_s, seed=tried.seed), train, x, y)

    return objective


def _tree_loss(forest: TreeForecaster, train: Rows, x: NDArray[np.float32], y: NDArray[np.float32]) -> float:
    """Return the pinball loss of the forecasts, averaged over levels, and over targets each in its own spread."""
    h = HORIZONS_S.index(forest.horizons_s[0])
    quantiles, levels = forest.predict(x).quantiles[:, :, h], np.array(forest.quantile_levels)
    losses = []
    for t in range(y.shape[1]):
        known = np.isfinite(y[:, t, h]) & np.isfinite(quantiles[:, t]).all(axis=-1)
        if known.any():
            error = y[known, t, h, None] - quantiles[known, t]
            spread = max(float(np.nanstd(train.y[:, t, h].astype(np.float64))), 1e-3)
            losses.append(float(np.maximum(levels * error, (levels - 1) * error).mean()) / spread)
    return float(np.mean(losses)) if losses else math.nan
