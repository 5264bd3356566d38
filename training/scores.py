"""How good a forecast is on rows whose future is known: pinball loss, coverage, Brier score, average precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scores = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Nested: target or ``oom``, then horizon as ``3600s``, then score by name."""


def score_forecast(
    forecast: Forecast, y: NDArray[np.float32], oom: NDArray[np.float32], levels: tuple[float, ...]
) -> Scores:
    """Return the scores of every target and horizon that has known rows and was forecast.

    Parameters
    ----------
    forecast : Forecast
        ``n`` rows.
    y : float32, shape (n, n_targets, n_horizons)
        Over the limit; NaN unknown.
    oom : float32, shape (n, n_horizons)
        0 or 1; NaN unknown.
    levels : tuple of float
        Last axis of the forecast's quantiles.

    Returns
    -------
    Scores
        ``pinball`` is the mean over rows and levels, in shares of the limit; ``coverage_0.98`` is the share of rows at
        or below that quantile; ``brier``, ``average_precision`` and ``base_rate`` are those of the OOM label.
    """
    scores: dict[str, dict[str, dict[str, float]]] = {}
    q = np.array(levels)
    for t, target in enumerate(TARGETS):
        for h, horizon_s in enumerate(HORIZONS_S):
            quantiles = forecast.quantiles[:, t, h]
            known = np.isfinite(y[:, t, h]) & np.isfinite(quantiles[:, 0])
            if not known.any():
                continue
            error = y[known, t, h].astype(np.float64)[:, None] - quantiles[known]
            values = {"rows": float(known.sum()), "pinball": float(np.maximum(q * error, (q - 1) * error).mean())}
            # a target that equals its quantile but for float32 rounding is covered
            covered = (error <= 1e-6 * np.abs(quantiles[known])).mean(0)
            values |= {f"coverage_{level:g}": float(c) for level, c in zip(levels, covered, strict=True)}
            scores.setdefault(target, {})[f"{horizon_s}s"] = values
    for h, horizon_s in enumerate(HORIZONS_S):
        probability = forecast.oom_probability[:, h]
        known = np.isfinite(oom[:, h]) & np.isfinite(probability)
        if known.any():
            scores.setdefault("oom", {})[f"{horizon_s}s"] = _score_oom(probability[known], oom[known, h] > 0.5)
    return scores


def _score_oom(probability: NDArray[np.float64], label: NDArray[np.bool_]) -> dict[str, float]:
    from sklearn.metrics import average_precision_score

    values = {
        "rows": float(len(label)),
        "base_rate": float(label.mean()),
        "brier": float(np.mean((probability - label) ** 2)),
    }
    if label.any():
        values["average_precision"] = float(average_precision_score(label, probability))
    return values


def coverage_figure(scores: Scores, levels: tuple[float, ...]) -> Figure:
    """Return a figure of the share of rows above each quantile against the share promised, a panel per horizon."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(HORIZONS_S), 4), layout="constrained")
    axes = figure.subplots(1, len(HORIZONS_S), sharey=True)
    promised = 1 - np.array(levels)
    for axis, horizon_s in zip(axes, HORIZONS_S, strict=True):
        axis.plot(promised, promised, color="black", linewidth=0.8, label="as promised")
        for target in TARGETS:
            values = scores.get(target, {}).get(f"{horizon_s}s")
            if values is not None:
                above = [1 - values[f"coverage_{level:g}"] for level in levels]
                axis.plot(promised, above, marker="o", markersize=3, label=target)
        axis.set(xscale="log", xlabel="promised share above the quantile", title=f"horizon {horizon_s} s")
        axis.set_yscale("symlog", linthresh=1e-4)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of validation rows above it")
    axes[0].legend()
    return figure
