"""A learned estimator in one file: the quantiles of all training rows, whatever the features say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.estimators.registry import Learned
from reclaim.training.fitting.learner import RowsLearner, Space
from reclaim.training.models.forecaster import Forecaster
from reclaim.training.models.trees import Rows
from reclaim.training.settings import TrainConfig


@dataclass(frozen=True)
class ConstantConfig:
    """Settings: the levels, training rows at most, and a share by which every quantile is raised."""

    levels: tuple[float, ...] = (0.9, 0.98)
    max_samples: int = 10_000
    raised: float = 0.0


class ConstantForecaster:
    """Answers every row alike."""

    threads: int = 1

    def __init__(self, quantiles: NDArray[np.float64], oom: NDArray[np.float64], levels: tuple[float, ...]) -> None:
        self.quantiles, self.oom = quantiles, oom  # (T, H, Q) and (H,)
        self.quantile_levels = levels
        self.horizons_s = tuple(s for h, s in enumerate(HORIZONS_S) if np.isfinite(quantiles[:, h]).all())

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the same quantiles for each row."""
        horizons_s = HORIZONS_S if horizon_s is None else (horizon_s,)
        of = [HORIZONS_S.index(h) for h in horizons_s]
        rows = (len(x), 1, 1, 1)
        return Forecast(np.tile(self.quantiles[:, of], rows), np.tile(self.oom[of], rows[:2]), horizons_s)

    def input_ranges(self) -> None:
        """Return None: it looks at no feature."""

    def save(self, folder: Path) -> None:
        """Write all it knows."""
        facts = {"quantiles": self.quantiles.tolist(), "oom": self.oom.tolist(), "levels": self.quantile_levels}
        (folder / "constant.json").write_text(json.dumps(facts))

    @classmethod
    def load(cls, folder: Path) -> ConstantForecaster:
        """Read what ``save`` wrote."""
        facts = json.loads((folder / "constant.json").read_text())
        return cls(np.array(facts["quantiles"]), np.array(facts["oom"]), tuple(facts["levels"]))


class ConstantLearner(RowsLearner):
    """Takes the quantiles of the training rows."""

    settings = ConstantConfig

    def fit_rows(self, rows: Rows, config: TrainConfig) -> Forecaster:
        """Take the quantiles of each target and horizon."""
        own = self.own(config)
        quantiles = np.full((*rows.y.shape[1:], len(own.levels)), np.nan)
        oom = np.zeros(len(HORIZONS_S))
        for h in range(len(HORIZONS_S)):
            label = rows.oom[np.isfinite(rows.oom[:, h]), h]
            oom[h] = label.mean() if len(label) else 0.0
            for t in range(len(TARGETS)):
                known = rows.y[np.isfinite(rows.y[:, t, h]), t, h]
                if len(known):
                    quantiles[t, h] = np.quantile(known, own.levels) * (1 + own.raised)
        return ConstantForecaster(quantiles, oom, own.levels)

    def space(self) -> Space:
        """Return the settings that are searched."""
        from optuna.distributions import FloatDistribution

        return {"params.raised": (FloatDistribution(0.0, 0.5), "from none to half as much again")}


CONSTANT = Learned(f"{__name__}:ConstantForecaster", f"{__name__}:ConstantLearner")
