"""The baseline model: gradient-boosted trees, one for each target and quantile level, at one horizon."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ModelError
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast


@dataclass(frozen=True)
class Rows:
    """Samples held in memory, each with its own copy of everything: for a few of them, or for what wants numpy.

    Attributes
    ----------
    x : float32, shape (n, n_features)
    y : float32, shape (n, n_targets, n_horizons)
        Over the limit; NaN unknown.
    oom : float32, shape (n, n_horizons)
        0 or 1; NaN unknown.
    """

    x: NDArray[np.float32]
    y: NDArray[np.float32]
    oom: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.x)


_TRUSTED: Final = ("sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",)
"""Types of a fitted model that skops does not trust by itself."""


def thread_limit(n: int) -> AbstractContextManager[Any]:
    """Let scikit-learn use ``n`` threads inside the block; more than one wait for each other where cores are shared."""
    limits: AbstractContextManager[Any] = _thread_pools().limit(limits=n)
    return limits


@cache
def _thread_pools() -> Any:
    """Return the thread pools of this process, searched once: each search opens ``/proc/self/maps``."""
    import sklearn.ensemble  # noqa: F401 - its pools must be there to be found
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # it has no type information

    return ThreadpoolController()


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
        with thread_limit(1):
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
