"""The yardstick: gradient-boosted trees, one model for each target and quantile level, at one horizon."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.errors import HistoryTooShortError, ModelError
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.settings import TreeConfig

if TYPE_CHECKING:
    from reclaim.training.resident import Rows

logger = logging.getLogger(__name__)

_TRUSTED: Final = ("sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",)
"""What a fitted model is made of beside the types that skops trusts by itself."""


def _threads(n: int) -> AbstractContextManager[Any]:
    """Let scikit-learn use ``n`` threads inside the block; more than one wait for each other where cores are shared."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # it has no type information

    limits: AbstractContextManager[Any] = threadpool_limits(n)
    return limits


class TreeForecaster:
    """Gradient-boosted quantiles behind the same interface as the network.

    Targets are fitted at one horizon; the forecast is NaN at the others. Quantiles are made monotone by a running
    maximum over levels.

    Parameters
    ----------
    regressors : sequence over targets of sequence over levels of HistGradientBoostingRegressor or None
        None where no row was known.
    classifier : HistGradientBoostingClassifier, float or None
        A number where the training rows had one class only, None where no row was known.
    levels : tuple of float
    horizon_s : int

    Attributes
    ----------
    threads : int
        Of no use here: trees are walked on one.
    """

    threads: int = 1
    _FILE: Final = "trees.skops"
    _FACTS: Final = "trees.json"

    def __init__(
        self, regressors: Sequence[Sequence[Any]], classifier: Any, *, levels: tuple[float, ...], horizon_s: int
    ) -> None:
        self.regressors = [list(row) for row in regressors]
        self.classifier = classifier
        self.quantile_levels = levels
        self.horizons_s: tuple[int, ...] = (horizon_s,)

    def input_ranges(self) -> None:
        """Return None: trees split, they do not standardise."""

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the forecast of each row, or of one horizon of each; NaN for what was not fitted."""
        n = len(x)
        horizons_s = HORIZONS_S if horizon_s is None else (horizon_s,)
        quantiles = np.full((n, len(TARGETS), len(horizons_s), len(self.quantile_levels)), np.nan)
        probability = np.full((n, len(horizons_s)), np.nan)
        if n == 0 or self.horizons_s[0] not in horizons_s:
            return Forecast(quantiles, probability, horizons_s)
        h = horizons_s.index(self.horizons_s[0])
        with _threads(1):
            for t, row in enumerate(self.regressors):
                for q, model in enumerate(row):
                    if model is not None:
                        quantiles[:, t, h, q] = np.maximum(model.predict(x), 0.0)
            if isinstance(self.classifier, float):
                probability[:, h] = self.classifier
            elif self.classifier is not None:
                probability[:, h] = self.classifier.predict_proba(x)[:, 1]
        np.maximum.accumulate(quantiles, axis=-1, out=quantiles)
        return Forecast(quantiles, probability, horizons_s)

    def save(self, folder: Path) -> None:
        """Write the models with skops, which holds data and type names, no code."""
        import skops.io

        facts = {"levels": self.quantile_levels, "horizon_s": self.horizons_s[0]}
        (folder / self._FACTS).write_text(json.dumps(facts))
        skops.io.dump({"regressors": self.regressors, "classifier": self.classifier}, folder / self._FILE)

    @classmethod
    def load(cls, folder: Path) -> TreeForecaster:
        """Read what ``save`` wrote; a file that names any other type is refused.

        Raises
        ------
        ModelError
            The file holds types beyond the trusted ones.
        """
        import skops.io

        facts = json.loads((folder / cls._FACTS).read_text())
        strange = sorted(set(skops.io.get_untrusted_types(file=folder / cls._FILE)) - set(_TRUSTED))
        if strange:
            raise ModelError(f"{folder / cls._FILE} holds types that no tree model has: {', '.join(strange)}")
        models = skops.io.load(folder / cls._FILE, trusted=list(_TRUSTED))
        return cls(
            models["regressors"], models["classifier"], levels=tuple(facts["levels"]), horizon_s=facts["horizon_s"]
        )


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
    with _threads(config.threads):
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
        logger.info("trees: %s fitted on %d rows in %.1f s", target, len(y), time.perf_counter() - started)
    label = train.oom[:, h]
    known = np.isfinite(label)
    classes = np.unique(label[known])
    classifier: Any = float(classes[0]) if len(classes) == 1 else None
    if len(classes) > 1:
        classifier = HistGradientBoostingClassifier(**shared).fit(every[known], label[known].astype(np.int8))
    bar.close()
    return TreeForecaster(regressors, classifier, levels=config.levels, horizon_s=horizon_s)
