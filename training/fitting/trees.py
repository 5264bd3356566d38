"""Fits the baseline model: gradient-boosted trees for each target and quantile level, at one horizon."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
from tqdm import tqdm

from reclaim.data.errors import HistoryTooShortError
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.fitting.learner import RowsLearner, Space
from reclaim.training.models.trees import Rows, TreeForecaster, thread_limit
from reclaim.training.settings import TrainConfig, TreeConfig

log = logging.getLogger(__name__)


class TreeLearner(RowsLearner):
    """Fits the trees."""

    settings = TreeConfig

    def fit_rows(self, rows: Rows, config: TrainConfig) -> TreeForecaster:
        """Fit to rows in memory."""
        return fit_trees(rows, config.trees, horizon_s=config.horizon_s, seed=config.seed)

    def space(self) -> Space:
        """Return the settings that are searched; ``levels`` change the meaning of the loss."""
        from optuna.distributions import FloatDistribution, IntDistribution

        return {
            "trees.iterations": (IntDistribution(50, 400, log=True), "the times to fit and to answer go with it"),
            "trees.leaves": (IntDistribution(7, 127, log=True), "the default and a factor of four to each side"),
            "trees.learning_rate": (FloatDistribution(0.02, 0.3, log=True), "goes against the number of trees"),
            "trees.min_leaf": (
                IntDistribution(10, 500, log=True),
                "a leaf's 0.99 quantile wants a hundred rows or more",
            ),
        }


def fit_trees(train: Rows, config: TreeConfig, *, horizon_s: int, seed: int) -> TreeForecaster:
    """Fit every target and level at one horizon, and the OOM label.

    Parameters
    ----------
    train : Rows
        Already cut to ``config.max_samples``.
    config : TreeConfig
    horizon_s : int
        One of ``features.targets.HORIZONS_S``.
    seed : int

    Raises
    ------
    HistoryTooShortError
        No training row.
    """
    if len(train) == 0:
        raise HistoryTooShortError("expected at least 1 training row, got 0: the trace is too short for the split")
    with thread_limit(config.threads):
        return _fit(train, config, horizon_s, seed)


def _fit(train: Rows, config: TreeConfig, horizon_s: int, seed: int) -> TreeForecaster:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    h = HORIZONS_S.index(horizon_s)
    shared = {
        "max_iter": config.iterations, "max_leaf_nodes": config.leaves, "learning_rate": config.learning_rate,
        "min_samples_leaf": config.min_leaf, "early_stopping": False, "random_state": seed,
    }  # fmt: skip
    # scikit-learn cannot bin a feature that is never known (a trace without CPI, say)
    every = np.where(np.isfinite(train.x).any(axis=0), train.x, np.float32(0.0))
    regressors: list[list[Any]] = []
    bar = tqdm(total=len(TARGETS) * len(config.levels) + 1, desc="fit", unit="model", disable=None, leave=False)
    for t, target in enumerate(TARGETS):
        y = train.y[:, t, h].astype(np.float64)
        known = np.isfinite(y)
        if not known.any():
            regressors.append([None] * len(config.levels))
            bar.update(len(config.levels))
            continue
        started = time.perf_counter()
        x, y = every[known], y[known]
        regressors.append([])
        for q in config.levels:
            model = HistGradientBoostingRegressor(loss="quantile", quantile=q, **shared)
            regressors[-1].append(model.fit(x, y))
            bar.update()
        log.info("trees: %s fitted on %d rows in %.1f s", target, len(y), time.perf_counter() - started)
    label = train.oom[:, h]
    known = np.isfinite(label)
    classes = np.unique(label[known])
    classifier: Any = float(classes[0]) if len(classes) == 1 else None
    if len(classes) > 1:
        classifier = HistGradientBoostingClassifier(**shared).fit(every[known], label[known].astype(np.int8))
    bar.close()
    return TreeForecaster(regressors, classifier, levels=config.levels, horizon_s=horizon_s)
