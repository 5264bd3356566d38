"""The baseline model: survival curves by gradient-boosted trees, one model for each target, at one horizon."""

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
from reclaim.training.models.forecaster import Heads
from reclaim.training.models.survival import N_THRESHOLDS, forecast_of, thresholds_of
from reclaim.training.settings import QUANTILE_LEVELS

_ROWS_AT_ONCE: Final = 8_192
"""Rows that are evaluated together, each at all thresholds, to bound memory: 100 MB."""


@dataclass(frozen=True)
class Rows:
    """Samples held in memory, each with its own copy of everything: for a few of them, or for code that needs numpy.

    Attributes
    ----------
    x : float32, shape (n, n_features)
    y : float32, shape (n, n_targets, n_horizons)
        Over the limit; NaN unknown.
    oom : float32, shape (n, n_horizons)
        0 or 1; NaN unknown.
    weight : float32, shape (n,), or None
        How much each counts; None: all alike.
    """

    x: NDArray[np.float32]
    y: NDArray[np.float32]
    oom: NDArray[np.float32]
    weight: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.x)


_TRUSTED: Final = ("sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",)
"""Types of a fitted model that skops does not trust by default."""


def thread_limit(n: int) -> AbstractContextManager[Any]:
    """Let scikit-learn use ``n`` threads inside the block; several threads wait for each other where cores are shared.

    The limit is that of the calling thread: blocks of several threads do not disturb each other.
    """
    limits: AbstractContextManager[Any] = _thread_pools().select(user_api="openmp").limit(limits=n)
    return limits


@cache
def _thread_pools() -> Any:
    """Return the thread pools of this process, searched once: each search opens ``/proc/self/maps``."""
    import sklearn.ensemble  # noqa: F401 - its pools must be there to be found
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # it has no type information

    return ThreadpoolController()


class TreeForecaster:
    """Boosted survival curves behind the same interface as the network: for each target one model of its steps.

    A model answers P(demand > r_k | demand > r_k-1) from the features of a row, the position k and the logarithm of the
    threshold. It is evaluated at every threshold of every row, which takes too long to serve a large cell: it is the
    baseline model. Targets are fitted at one horizon; the forecast is NaN at the others.

    Parameters
    ----------
    steps : sequence over targets of HistGradientBoostingClassifier or None
        None where no row was known.
    classifier : HistGradientBoostingClassifier, float or None
        A number where the training rows had one class only, None where no row was known.
    horizon_s : int

    Attributes
    ----------
    threads : int
        Not used: trees run on one thread.
    """

    threads: int = 1
    _FILE: Final = "trees.skops"
    _FACTS: Final = "trees.json"

    def __init__(self, steps: Sequence[Any], classifier: Any, *, horizon_s: int) -> None:
        self.steps = list(steps)
        self.classifier = classifier
        self.horizons_s: tuple[int, ...] = (horizon_s,)

    @property
    def quantile_levels(self) -> tuple[float, ...]:
        """Levels that are read off the curves."""
        return QUANTILE_LEVELS

    @property
    def heads(self) -> Heads:
        """The targets that have a model, at its horizon."""
        at = np.array(HORIZONS_S) == self.horizons_s[0]
        fitted = np.array([model is not None for model in self.steps])
        return Heads(fitted[:, None] & at, at & (self.classifier is not None))

    def input_ranges(self) -> None:
        """Return None: trees do not standardise their inputs."""

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the forecast of each row, or of one horizon of each; NaN for what was not fitted."""
        n = len(x)
        horizons_s = HORIZONS_S if horizon_s is None else (horizon_s,)
        survival = np.full((n, len(TARGETS), len(horizons_s), N_THRESHOLDS), np.nan, np.float32)
        probability = np.full((n, len(horizons_s)), np.nan)
        if n > 0 and self.horizons_s[0] in horizons_s:
            h = horizons_s.index(self.horizons_s[0])
            thresholds = thresholds_of(x)
            with thread_limit(1):
                for t, model in enumerate(self.steps):
                    if model is not None:
                        survival[:, t, h] = _curves(model, x, thresholds[:, t])
                if isinstance(self.classifier, float):
                    probability[:, h] = self.classifier
                elif self.classifier is not None:
                    probability[:, h] = self.classifier.predict_proba(x)[:, 1]
        return forecast_of(survival, x, probability, horizons_s, QUANTILE_LEVELS)

    def save(self, folder: Path) -> None:
        """Write the models with skops, which holds data and type names, no code."""
        import skops.io

        (folder / self._FACTS).write_text(json.dumps({"horizon_s": self.horizons_s[0]}))
        skops.io.dump({"steps": self.steps, "classifier": self.classifier}, folder / self._FILE)

    @classmethod
    def load(cls, folder: Path) -> TreeForecaster:
        """Read what ``save`` wrote; a file that names any other type is refused.

        Raises
        ------
        ModelError
            The file holds types beyond the trusted ones.
        """
        import skops.io

        facts = json.loads((folder / cls._FACTS).read_text(encoding="utf-8"))
        strange = sorted(set(skops.io.get_untrusted_types(file=folder / cls._FILE)) - set(_TRUSTED))
        if strange:
            raise ModelError(f"{folder / cls._FILE} holds types that no tree model has: {', '.join(strange)}")
        models = skops.io.load(folder / cls._FILE, trusted=list(_TRUSTED))
        return cls(models["steps"], models["classifier"], horizon_s=facts["horizon_s"])


def step_inputs(
    x: NDArray[np.float32], thresholds: NDArray[np.float32], step: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return what a model of steps reads: features, position of the step, logarithm of its threshold; (n, F + 2).

    ``x`` (n, F), ``thresholds`` (n, N_THRESHOLDS) and ``step`` (n,) are of the same rows.
    """
    own = np.take_along_axis(thresholds, step[:, None], axis=1)
    return np.concatenate([x, step[:, None].astype(np.float32), np.log(own)], axis=1)


def _curves(model: Any, x: NDArray[np.float32], thresholds: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the survival of each row at its thresholds: the product of its steps so far; (n, N_THRESHOLDS)."""
    out = np.empty(thresholds.shape, np.float32)
    for start in range(0, len(x), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        n = len(x[rows])
        step = np.tile(np.arange(N_THRESHOLDS), n)
        every = np.repeat(x[rows], N_THRESHOLDS, axis=0), np.repeat(thresholds[rows], N_THRESHOLDS, axis=0)
        passed = model.predict_proba(step_inputs(*every, step))[:, 1]
        out[rows] = np.cumprod(passed.reshape(n, N_THRESHOLDS), axis=1)
    return out
