"""Scores a forecast on rows of known future: its curves, their quantiles and its out-of-memory probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.style import INK, STYLE
from reclaim.features.groups import AGES, TIER_LABELS, RowKeys
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.evaluation.alerts import score_alerts, sorted_rows
from reclaim.training.margins.violation import violates
from reclaim.training.models.survival import crps, log_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scores = Mapping[str, Any]
"""Nested: target or ``oom``, then horizon as ``3600s``, then score by name; the same of each group, under its name,
under ``tiers`` and ``ages``."""

SPLITS: Final = ("tiers", "ages")
"""Names under which the scores of groups stand."""

BIN_EDGES: Final = np.concatenate([[0.0], 10.0 ** np.arange(-5.0, 0.0, 0.5)])
"""Lower edges of the bins of the reliability curve, the last of which ends at 1. They are even in the logarithm and
the same for every model: for rare events, bins of equal width or of equal rows put everything relevant into one bin."""

_SMALLEST: Final = 1e-15
"""Probabilities are taken no nearer to 0 or 1 than this where their logarithm is asked for."""


def score_forecast(
    forecast: Forecast,
    y: NDArray[np.float32],
    oom: NDArray[np.float32],
    levels: tuple[float, ...],
    *,
    keys: RowKeys | None = None,
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
        Last axis of the forecast's quantiles, increasing.
    keys : RowKeys or None
        Of the rows. With them there are alert scores, and every score of each tier and age that has rows.

    Returns
    -------
    Scores
        Of a target: ``rows``; ``log_loss``, in nats, and ``crps``, in shares of the limit, of the curve (see
        ``models.survival``); ``pinball``, the mean over rows and levels in shares of the limit;
        ``pinball_over_usage``, the same over the mean of the target; for each level ``pinball_over_usage_0.98``,
        ``coverage_0.98`` (share of rows at or below that quantile) and ``coverage_error_0.98`` (that less the level);
        ``coverage_error``, the mean of their sizes; ``width``, the mean distance of the highest from the lowest
        quantile in shares of the limit. Quantiles end at the limit, so a demand above it counts as the limit.

        Of ``oom``: ``rows``, ``positives`` and ``base_rate`` of the label; ``brier``; ``brier_skill``, 1 less the
        Brier score over that of always saying the base rate; ``log_loss`` in nats; ``ece``, the expected calibration
        error over the bins of ``reliability``; ``average_precision``; with keys those of ``alerts.score_alerts``.
        What has no denominator is left out.
    """
    n_ages = len(AGES)
    cell = np.zeros(len(y), np.int64) if keys is None else keys.tier * n_ages + keys.age
    cells = np.arange(len(TIER_LABELS) * n_ages).reshape(-1, n_ages)
    sums = {
        (target, f"{horizon_s}s"): _curve_sums(forecast, y, levels, (t, h), cell, cells.size)
        for t, target in enumerate(TARGETS)
        for h, horizon_s in enumerate(HORIZONS_S)
    }

    def of(group: NDArray[np.int64]) -> dict[str, Any]:
        """Return the scores of the rows in some of the cells; an empty mapping where there are none."""
        scores: dict[str, Any] = {}
        for (target, horizon), by_cell in sums.items():
            of_group = by_cell.of(group)
            if of_group.rows:
                scores.setdefault(target, {})[horizon] = _curve_scores(of_group, levels)
        inside = np.isin(np.arange(cells.size), group)[cell]
        for h, horizon_s in enumerate(HORIZONS_S):
            probability = forecast.oom_probability[:, h]
            known = inside & np.isfinite(oom[:, h]) & np.isfinite(probability)
            if known.any():
                label = oom[known, h] > 0.5
                values = _score_oom(probability[known], label)
                if keys is not None:
                    values |= score_alerts(sorted_rows(probability[known], label, keys.take(known)), horizon_s)
                scores.setdefault("oom", {})[f"{horizon_s}s"] = _finite(values)
        return scores

    scores = of(cells.ravel())
    if keys is not None:
        for split, labels, groups in zip(SPLITS, (TIER_LABELS, AGES), (cells, cells.T), strict=True):
            found = {label: of(group) for label, group in zip(labels, groups, strict=True)}
            scores[split] = {label: of_group for label, of_group in found.items() if of_group}
    return scores


def overall(scores: Scores) -> dict[str, Any]:
    """Return the scores of all rows together, without the splits."""
    return {name: of for name, of in scores.items() if name not in SPLITS}


@dataclass(frozen=True)
class _CurveSums:
    """Sums over known rows, of each cell of a split or of all.

    Attributes
    ----------
    rows, usage, width, log_loss, crps : float64, shape (n_cells,) or ()
    pinball, covered : float64, shape (n_cells, n_levels) or (n_levels,)
    """

    rows: NDArray[np.float64]
    usage: NDArray[np.float64]
    width: NDArray[np.float64]
    log_loss: NDArray[np.float64]
    crps: NDArray[np.float64]
    pinball: NDArray[np.float64]
    covered: NDArray[np.float64]

    def of(self, cells: NDArray[np.int64]) -> _CurveSums:
        """Return the sums over some of the cells."""
        return _CurveSums(*(column[cells].sum(axis=0) for column in vars(self).values()))


def _curve_sums(
    forecast: Forecast,
    y: NDArray[np.float32],
    levels: tuple[float, ...],
    at: tuple[int, int],
    cell: NDArray[np.int64],
    n_cells: int,
) -> _CurveSums:
    """Sum level by level at one target and horizon: next to the forecast, only a few numbers a row are held."""
    t, h = at
    target, of = slice(t, t + 1), y[:, t : t + 1, h : h + 1]
    curve = forecast.survival[:, target, h : h + 1], forecast.thresholds[:, target]
    quantiles = forecast.quantiles[:, t, h]
    known = np.isfinite(of[:, 0, 0]) & np.isfinite(quantiles[:, 0])
    key, truth = cell[known], np.minimum(of[known, 0, 0].astype(np.float64), 1.0)

    def summed(values: NDArray[Any]) -> NDArray[np.float64]:
        return np.bincount(key, weights=values, minlength=n_cells).astype(np.float64)

    pinball, covered = [], []
    for i, level in enumerate(levels):
        quantile = quantiles[known, i]
        error = truth - quantile
        pinball.append(summed(np.maximum(level * error, (level - 1) * error)))
        covered.append(summed(~violates(truth, quantile)))
    return _CurveSums(
        rows=np.bincount(key, minlength=n_cells).astype(np.float64),
        usage=summed(truth),
        width=summed(quantiles[known, -1] - quantiles[known, 0]),
        log_loss=summed(log_loss(*curve, of)[known, 0, 0]),
        crps=summed(crps(*curve, of)[known, 0, 0]),
        pinball=np.stack(pinball, axis=1),
        covered=np.stack(covered, axis=1),
    )


def _curve_scores(sums: _CurveSums, levels: tuple[float, ...]) -> dict[str, float]:
    n = float(sums.rows)
    pinball, covered, usage = sums.pinball / n, sums.covered / n, float(sums.usage) / n
    error = covered - np.array(levels)
    with np.errstate(divide="ignore", invalid="ignore"):
        over_usage = pinball / usage
    values = {
        "rows": n,
        "log_loss": float(sums.log_loss) / n,
        "crps": float(sums.crps) / n,
        "pinball": pinball.mean(),
        "pinball_over_usage": over_usage.mean(),
        "coverage_error": np.abs(error).mean(),
        "width": float(sums.width) / n,
    }
    for i, level in enumerate(levels):
        values |= {
            f"pinball_over_usage_{level:g}": over_usage[i],
            f"coverage_{level:g}": covered[i],
            f"coverage_error_{level:g}": error[i],
        }
    return _finite(values)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}


def _score_oom(probability: NDArray[np.float64], label: NDArray[np.bool_]) -> dict[str, float]:
    from sklearn.metrics import average_precision_score

    base = float(label.mean())
    brier = float(np.mean((probability - label) ** 2))
    said = np.clip(np.where(label, probability, 1 - probability), _SMALLEST, 1.0)
    points = reliability(probability, label)
    values = {
        "rows": float(len(label)),
        "positives": float(label.sum()),
        "base_rate": base,
        "brier": brier,
        "log_loss": float(-np.log(said).mean()),
        "ece": float((points[:, 2] * np.abs(points[:, 0] - points[:, 1])).sum() / len(label)),
    }
    if 0 < base < 1:
        values["brier_skill"] = 1 - brier / (base * (1 - base))
    if label.any():
        values["average_precision"] = float(average_precision_score(label, probability))
    return values


def reliability(probability: NDArray[np.float64], label: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return predicted and observed shares of rows binned by the prediction (``BIN_EDGES``).

    Returns
    -------
    float64, shape (n_bins, 4)
        Mean probability, share of positives, rows and positives of each bin that has rows.
    """
    key = np.searchsorted(BIN_EDGES, probability, side="right") - 1
    rows = np.bincount(key, minlength=len(BIN_EDGES)).astype(np.float64)
    said = np.bincount(key, weights=probability, minlength=len(BIN_EDGES))
    came = np.bincount(key, weights=label, minlength=len(BIN_EDGES))
    held = rows > 0
    return np.stack([said[held] / rows[held], came[held] / rows[held], rows[held], came[held]], axis=1)


def _panels(draw: Callable[[Any, int], None], xlabel: str, ylabel: str) -> Figure:
    """Return a figure with a panel per horizon, each drawn by ``draw(axes, horizon)``."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4 * len(HORIZONS_S), 4), layout="constrained")
        axes = figure.subplots(1, len(HORIZONS_S), sharey=True)
        for h, (axis, horizon_s) in enumerate(zip(axes, HORIZONS_S, strict=True)):
            draw(axis, h)
            axis.set(xlabel=xlabel, title=f"horizon {horizon_s} s")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(ylabel)
        fullest = max(axes, key=lambda axis: len(axis.get_legend_handles_labels()[1]))
        fullest.legend()
    return figure


def coverage_figure(scores: Scores, levels: tuple[float, ...]) -> Figure:
    """Return a figure of the share of rows above each quantile against the share promised, a panel per horizon."""
    promised = 1 - np.array(levels)

    def draw(axis: Any, h: int) -> None:
        axis.plot(promised, promised, color=INK, linewidth=0.8, label="as promised")
        for target in TARGETS:
            values = scores.get(target, {}).get(f"{HORIZONS_S[h]}s")
            if values is not None:
                above = [1 - values[f"coverage_{level:g}"] for level in levels]
                axis.plot(promised, above, marker="o", markersize=3, label=target.replace("_", " "))
        axis.set_xscale("log")
        axis.set_yscale("symlog", linthresh=1e-4)

    return _panels(draw, "promised share above the quantile", "share of rows above it")


def reliability_figure(forecasts: Mapping[str, NDArray[np.float64]], oom: NDArray[np.float32]) -> Figure:
    """Return a figure of how often an out-of-memory came against how probable it was called, a panel per horizon.

    Parameters
    ----------
    forecasts : mapping of label to float64, shape (n, n_horizons)
        OOM probabilities, say ``before`` and ``after`` calibration.
    oom : float32, shape (n, n_horizons)
        0 or 1; NaN unknown.
    """
    low = float(BIN_EDGES[1])

    def draw(axis: Any, h: int) -> None:
        axis.plot([0, 1], [0, 1], color=INK, linewidth=0.8, label="as said")
        for name, probability in forecasts.items():
            known = np.isfinite(oom[:, h]) & np.isfinite(probability[:, h])
            label = oom[known, h] > 0.5
            said, came, rows, _ = reliability(probability[known, h], label).T
            # of so few events a share is uncertain by about the root of their number, over the rows
            error = np.sqrt(np.maximum(came * (1 - came), 0) / rows)
            axis.errorbar(said, came, yerr=error, marker="o", markersize=3, linewidth=1, capsize=2, label=name)
        if label.any():
            axis.axhline(label.mean(), color=INK, linewidth=0.6, linestyle=":", label="base rate")
        axis.set_xscale("symlog", linthresh=low)
        axis.set_yscale("symlog", linthresh=low)
        axis.set(xlim=(0, 1), ylim=(0, 1))

    return _panels(draw, "probability of out-of-memory, as said", "share of rows that met one")
