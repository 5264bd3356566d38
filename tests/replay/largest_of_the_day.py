"""A ten-line model, for tests that replay a model or promote one and need no fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reclaim.features.registry import FEATURE_NAMES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.bundle import Bundle
from reclaim.training.estimators.base import Forecast
from reclaim.training.margins.price import Price, three_prices
from reclaim.training.models.forecaster import ALL_HEADS, Forecaster
from reclaim.training.models.survival import N_BELOW


class LargestOfTheDay:
    """Nothing exceeds the largest demand of the last day, times a factor drawn for the row, up to 1 + ``noise``."""

    quantile_levels = (0.5, 0.9)
    horizons_s = HORIZONS_S
    heads = ALL_HEADS
    threads = 1

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def predict(self, x: np.ndarray[Any, Any], horizon_s: int | None = None) -> Forecast:  # noqa: D102 - a forecaster's
        largest = x[:, [FEATURE_NAMES.index(f"{t}_max_24h") for t in TARGETS]].astype(np.float64)
        largest *= 1 + self.noise * np.random.default_rng(0).random((len(x), 1))
        horizons_s = HORIZONS_S if horizon_s is None else (horizon_s,)
        times = np.geomspace(0.1, 8.0, N_BELOW + 24)  # of the largest; a higher price goes further beyond it
        survival = np.empty((len(x), len(TARGETS), len(horizons_s), len(times)), np.float32)
        survival[:] = np.geomspace(0.9, 1e-6, len(times))
        shares = np.minimum(times * largest[..., None], 1.0)
        quantiles = np.broadcast_to(largest[:, :, None, None], (*survival.shape[:3], len(self.quantile_levels)))
        oom = np.zeros((len(x), len(horizons_s)))
        return Forecast(survival, shares.astype(np.float32), quantiles.astype(np.float32), oom, horizons_s)

    def input_ranges(self) -> None:
        """Return None: it learned from none."""

    def save(self, folder: Path) -> None:  # noqa: D102 - likewise
        (folder / "model.txt").write_text("largest of the day")


def bundle_of(forecaster: Forecaster, trained: Mapping[str, Any]) -> Bundle:
    """Return a bundle that was made elsewhere, at prices of its own."""
    return Bundle(
        kind="trees", forecaster=forecaster, horizon_s=3600,
        prices=three_prices(Price("baseline", (8.0, 8.0)), Price("aggressive", (0.5, 0.5))),
        dataset_fingerprint="another", trained=trained,
    )  # fmt: skip
