"""Fits the baseline model: survival curves by gradient-boosted trees, for each target, at one horizon."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.errors import HistoryTooShortError
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.fitting.learner import RowsLearner, Space
from reclaim.training.fitting.sources import NO_ROWS
from reclaim.training.models.survival import thresholds_of
from reclaim.training.models.trees import Rows, TreeForecaster, step_inputs, thread_limit
from reclaim.training.settings import TrainConfig, TreeConfig

if TYPE_CHECKING:
    from sklearn.ensemble import HistGradientBoostingClassifier

log = logging.getLogger(__name__)

_BIN_ROWS: Final = 200_000
"""Rows by which scikit-learn sets the bins of a feature, at most."""
_BINS: Final = 255
"""Bins of a feature's known values in scikit-learn, at most."""
_KNOWN: Final = 40
"""Least expected number of these rows with a known value of a feature: the chance that none has one is then e**-40."""


class TreeLearner(RowsLearner):
    """Fits the trees."""

    settings = TreeConfig

    def fit_rows(self, rows: Rows, config: TrainConfig) -> TreeForecaster:
        """Fit to rows in memory."""
        return fit_trees(rows, config.trees, horizon_s=config.horizon_s, seed=config.seed)

    def space(self) -> Space:
        """Return the settings that are searched."""
        from optuna.distributions import FloatDistribution, IntDistribution

        return {
            "trees.iterations": (IntDistribution(50, 400, log=True), "the times to fit and to answer go with it"),
            "trees.leaves": (IntDistribution(7, 127, log=True), "the default and a factor of four to each side"),
            "trees.learning_rate": (FloatDistribution(0.02, 0.3, log=True), "goes against the number of trees"),
            "trees.min_leaf": (IntDistribution(20, 2_000, log=True), "the default, a factor of ten to each side"),
        }


def fit_trees(train: Rows, config: TreeConfig, *, horizon_s: int, seed: int) -> TreeForecaster:
    """Fit the steps of every target at one horizon, and the OOM label.

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
        raise HistoryTooShortError(f"expected at least 1 training row, got 0: {NO_ROWS}")
    with thread_limit(config.threads):
        return _fit(train, config, horizon_s, seed)


def _fit(train: Rows, config: TreeConfig, horizon_s: int, seed: int) -> TreeForecaster:
    from sklearn.ensemble import HistGradientBoostingClassifier

    h = HORIZONS_S.index(horizon_s)
    shared = {
        "max_iter": config.iterations, "max_leaf_nodes": config.leaves, "learning_rate": config.learning_rate,
        "min_samples_leaf": config.min_leaf, "early_stopping": False, "random_state": seed,
    }  # fmt: skip
    thresholds = thresholds_of(train.x)
    steps: list[Any] = []
    bar = tqdm(total=len(TARGETS) + 1, desc="fit", unit="model", disable=None, leave=False)
    for t, target in enumerate(TARGETS):
        row, step, passed = step_pairs(train.y[:, t, h], thresholds[:, t], config.max_pairs, seed)
        model: Any = None
        if len(np.unique(passed)) > 1:
            started = time.perf_counter()
            x = binnable(step_inputs(train.x[row], thresholds[row, t], step), config.min_leaf)
            weight = None if train.weight is None else train.weight[row]
            model = boosted(HistGradientBoostingClassifier(**shared), x, passed, weight)
            log.info("trees: %s fitted on %d pairs in %.1f s", target, len(row), time.perf_counter() - started)
        steps.append(model)
        bar.update()
    label = train.oom[:, h]
    known = np.isfinite(label)
    classes = np.unique(label[known])
    classifier: Any = float(classes[0]) if len(classes) == 1 else None
    if len(classes) > 1:
        weight = None if train.weight is None else train.weight[known]
        x = binnable(train.x[known], config.min_leaf)
        classifier = boosted(HistGradientBoostingClassifier(**shared), x, label[known].astype(np.int8), weight)
    bar.close()
    return TreeForecaster(steps, classifier, horizon_s=horizon_s)


def binnable(x: NDArray[np.float32], least: int) -> NDArray[np.float32]:
    """Return features with 0 in the columns that are known in too few rows to be split.

    Scikit-learn sets its bins by ``_BIN_ROWS`` rows at most, drawn at random, and fails where none of them knows a
    feature.

    Parameters
    ----------
    x : float32, shape (n, k)
        NaN unknown.
    least : int
        Rows of a leaf, at least: fewer could not be split off anyway.
    """
    return np.where(np.isfinite(x).sum(axis=0) >= max(least, _KNOWN * len(x) / _BIN_ROWS), x, np.float32(0.0))


def boosted(
    model: HistGradientBoostingClassifier, x: NDArray[np.float32], y: NDArray[Any], weight: NDArray[np.float32] | None
) -> HistGradientBoostingClassifier:
    """Fit trees of scikit-learn, to the bits that ``model.fit`` comes to, with the bins of weighted rows found at once.

    By itself it sorts a feature again for each of its 254 bounds, which takes longer than all trees. Here it is given
    the places of values among these bounds, and the bounds are put into its trees.

    Parameters
    ----------
    model : HistGradientBoostingClassifier
        Not fitted, and returned. It takes all features as numbers.
    x : float32, shape (n, k)
        NaN unknown; each column has a known value.
    y : shape (n,)
    weight : float32, shape (n,), or None
        Above 0.
    """
    if weight is None or len(x) > _BIN_ROWS:  # then it sorts once
        return model.fit(x, y, sample_weight=weight)
    bounds = [_bounds(column, weight) for column in x.T]
    unknown = np.isnan(x)
    places = [np.searchsorted(of, column).astype(np.uint8) for of, column in zip(bounds, x.T, strict=True)]
    model.fit(np.where(unknown, x, np.stack(places, axis=1)), y, sample_weight=weight)
    there = [np.unique(place[~of]) for place, of in zip(places, unknown.T, strict=True)]
    for (tree,) in model._predictors:
        for node in tree.nodes:
            if not node["is_leaf"]:
                of, at = bounds[node["feature_idx"]], there[node["feature_idx"]]
                left = at[np.searchsorted(at, node["num_threshold"]) - 1]
                node["num_threshold"] = of[left] if left < len(of) else np.inf  # known and unknown are parted
    return model


def _bounds(column: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the bounds of a feature's bins, rising: between its values, or of many at equal shares of their weight.

    The formulas are those of ``_find_binning_thresholds`` of scikit-learn.
    """
    known = ~np.isnan(column)
    value, mass = column[known].astype(np.float64), weight[known].astype(np.float64)
    for _ in range(2):  # as there: the order of equal values decides over the last bits of sums
        order = np.argsort(value)
        value, mass = value[order], mass[order]
    distinct = np.unique(value)
    if len(distinct) <= _BINS:
        return (distinct[:-1] + distinct[1:]) / 2
    below = np.cumsum(mass)
    asked = np.linspace(0, 100, _BINS + 1)[1:-1] / 100 * below[-1]
    at = np.minimum(np.searchsorted(below, asked), len(value) - 1)
    between = (value[at] + value[np.minimum(at + 1, len(value) - 1)]) / 2
    return np.unique(np.where(below[at] - asked > np.finfo(np.float64).eps, value[at], between))


def step_pairs(
    y: NDArray[np.float32], thresholds: NDArray[np.float32], most: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int8]]:
    """Return pairs of a row and a step at risk, and whether the step was passed; a seeded choice of ``most`` at most.

    Parameters
    ----------
    y : float32, shape (n,)
        NaN unknown.
    thresholds : float32, shape (n, N_THRESHOLDS)
    most, seed : int
    """
    known = np.flatnonzero(np.isfinite(y))
    above = y[known, None] > thresholds[known]
    at_risk = np.concatenate([np.ones((len(known), 1), np.bool_), above[:, :-1]], axis=1)
    pair = np.flatnonzero(at_risk)
    if len(pair) > most:
        pair = np.sort(np.random.default_rng(seed).choice(pair, most, replace=False))
    row, step = np.divmod(pair, thresholds.shape[1])
    return known[row], step, above.ravel()[pair].astype(np.int8)
