"""A learned estimator in one file: the survival curve of all training rows, whatever the features say."""

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
from reclaim.training.models.forecaster import Forecaster, Heads
from reclaim.training.models.survival import N_THRESHOLDS, forecast_of, thresholds_of
from reclaim.training.models.trees import Rows
from reclaim.training.settings import TrainConfig


@dataclass(frozen=True)
class ConstantConfig:
    """Settings: the levels, training rows at most, and a share by which every demand is raised."""

    levels: tuple[float, ...] = (0.9, 0.98)
    max_samples: int = 10_000
    raised: float = 0.0


class ConstantForecaster:
    """Answers every row alike."""

    threads: int = 1

    def __init__(self, demands: NDArray[np.float32], oom: NDArray[np.float64], levels: tuple[float, ...]) -> None:
        self.demands, self.oom = demands, oom  # (T, H, N), rising, and (H,)
        self.quantile_levels = levels
        self.heads = Heads(np.logical_and.reduce(np.isfinite(demands), axis=-1), np.isfinite(oom))
        self.horizons_s = tuple(s for h, s in enumerate(HORIZONS_S) if np.isfinite(demands[:, h]).all())

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:
        """Return the share of the demands that exceed each threshold."""
        horizons_s = HORIZONS_S if horizon_s is None else (horizon_s,)
        thresholds = thresholds_of(x)
        survival = np.full((len(x), len(TARGETS), len(horizons_s), N_THRESHOLDS), np.nan, np.float32)
        for place, of_horizon in enumerate(horizons_s):
            for t, demands in enumerate(self.demands[:, HORIZONS_S.index(of_horizon)]):
                if np.isfinite(demands).all():
                    survival[:, t, place] = 1 - np.searchsorted(demands, thresholds[:, t], side="right") / len(demands)
        oom = np.tile(self.oom[[HORIZONS_S.index(s) for s in horizons_s]], (len(x), 1))
        return forecast_of(survival, x, oom, horizons_s, self.quantile_levels)

    def input_ranges(self) -> None:
        """Return None: it looks at no feature."""

    def save(self, folder: Path) -> None:
        """Write all it knows."""
        facts = {"demands": self.demands.tolist(), "oom": self.oom.tolist(), "levels": self.quantile_levels}
        (folder / "constant.json").write_text(json.dumps(facts))

    @classmethod
    def load(cls, folder: Path) -> ConstantForecaster:
        """Read what ``save`` wrote."""
        facts = json.loads((folder / "constant.json").read_text())
        return cls(np.array(facts["demands"], np.float32), np.array(facts["oom"]), tuple(facts["levels"]))


class ConstantLearner(RowsLearner):
    """Takes the demands of the training rows, evenly by rank."""

    settings = ConstantConfig

    def fit_rows(self, rows: Rows, config: TrainConfig) -> Forecaster:
        """Take those of each target and horizon."""
        own = self.own(config)
        demands = np.full((*rows.y.shape[1:], 1_001), np.nan, np.float32)
        oom = np.zeros(len(HORIZONS_S))
        for h in range(len(HORIZONS_S)):
            label = rows.oom[np.isfinite(rows.oom[:, h]), h]
            oom[h] = label.mean() if len(label) else 0.0
            for t in range(len(TARGETS)):
                known = rows.y[np.isfinite(rows.y[:, t, h]), t, h]
                if len(known):
                    demands[t, h] = np.quantile(known, np.linspace(0, 1, 1_001)) * (1 + own.raised)
        return ConstantForecaster(demands, oom, own.levels)

    def space(self) -> Space:
        """Return the settings that are searched."""
        from optuna.distributions import FloatDistribution

        return {"params.raised": (FloatDistribution(0.0, 0.5), "from none to half as much again")}


CONSTANT = Learned(f"{__name__}:ConstantForecaster", f"{__name__}:ConstantLearner")
