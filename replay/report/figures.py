"""Provides what the figures of all experiments share: colours, markers, segment shades and saving."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from reclaim.data.core.pages.figures import figure_bytes
from reclaim.data.core.tables import Table
from reclaim.replay.experiment import COMPARED, LEARNED, LEARNED_MACHINE, STATISTICAL, SUM_OF_TASKS
from reclaim.replay.open_loop.estimates import LIMIT
from reclaim.training.margins.margin import MARGIN_NAMES

PALETTE: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")
"""Colours that readers with any colour vision can distinguish (Okabe and Ito), in the order estimators are drawn."""

MARGIN_MARKERS: Final = dict(zip(MARGIN_NAMES, ("o", "s", "^"), strict=True))
SEGMENT_SHADES: Final = {"baseline": "#FFFFFF", "medium": "#F3F3F3", "aggressive": "#E7E7E7"}

SHOWN: Final = 9
"""Number of estimators in the first chart of a page: the tables have all."""
KIND_COLOURS: Final = {LEARNED: "#0072B2", STATISTICAL: "#D55E00", LEARNED_MACHINE: "#009E73", SUM_OF_TASKS: "#B5799F"}
_NAMES: Final = {"limit": "no reclamation"}


def estimator_colours(results: Mapping[str, Any]) -> Mapping[str, str]:
    """Return one colour per estimator, the same in every figure; learned ones first, the limit, drawn in grey, last."""
    kinds = {LEARNED: 0, STATISTICAL: 1, LIMIT: 3}
    names = [e["name"] for e in sorted(results["estimators"], key=lambda e: kinds.get(e["kind"], 2))]
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


def leading(
    results: Mapping[str, Any], summary: Table, strength: Callable[[Mapping[str, Any]], float]
) -> list[Mapping[str, Any]]:
    """Return ``SHOWN`` of the compared estimators, the strongest first: those of the summary, and the strongest.

    Parameters
    ----------
    results : mapping
        The content of ``results.json``.
    summary : Table
        Names estimators in its column ``estimator``.
    strength : callable
        From an estimator's results to a number by which they are ranked; NaN where it is unknown.
    """
    named = {row["estimator"] for row in summary.as_records()}
    compared = [e for e in results["estimators"] if e["kind"] in COMPARED]
    ranked = sorted(compared, key=lambda e: -np.nan_to_num(strength(e), nan=-math.inf))
    first = sorted(ranked, key=lambda e: e["name"] not in named)[: max(SHOWN, len(named))]
    return [e for e in ranked if e in first]


def name_estimators(axes: Sequence[Axes], shown: Sequence[Mapping[str, Any]]) -> None:
    """Label the rows of charts side by side with the names of estimators, the learned ones in bold, the first on top.

    Lines part the rows, and the scale is above them.
    """
    for ax in axes:
        for row in range(1, len(shown)):
            ax.axhline(row - 0.5, color="#E4E4E4", linewidth=0.8, zorder=0)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, prune="upper"))
        ax.xaxis.tick_top()
        ax.spines["top"].set_visible(True)
        ax.spines["bottom"].set_visible(False)
    ax = axes[0]
    ax.set_yticks(range(len(shown)), [_NAMES.get(e["name"], e["name"]) for e in shown])
    for label, estimator in zip(ax.get_yticklabels(), shown, strict=True):
        label.set_fontweight("bold" if estimator["kind"] in (LEARNED, LEARNED_MACHINE) else "normal")
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(len(shown), 1) - 0.5, -0.5)


def save_figure(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write a figure as PNG and as SVG, the same bytes for the same figure; returns both paths."""
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    for file in (png, svg):
        file.write_bytes(figure_bytes(figure, file.suffix[1:]))
    return png, svg


def time_unit(hours: float) -> tuple[float, str]:
    """Return the unit for an axis of so many hours: its length in hours and its name."""
    return (24.0, "days") if hours > 72 else (1.0, "hours")


def shade(ax: Axes, segments: Sequence[Mapping[str, Any]], unit: float) -> None:
    """Shade the background of each segment by its margin, with a line between two."""
    for segment in segments:
        start, end = segment["start_hours"] / unit, segment["end_hours"] / unit
        ax.axvspan(start, end, color=SEGMENT_SHADES[segment["margin"]], linewidth=0, zorder=0)
        if start > 0:
            ax.axvline(start, color="#999999", linewidth=0.8, zorder=1)


def label_segments(ax: Axes, segments: Sequence[Mapping[str, Any]], unit: float) -> None:
    """Write the margin at the top of each segment."""
    for segment in segments:
        ax.annotate(
            segment["margin"],
            ((segment["start_hours"] + segment["end_hours"]) / 2 / unit, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -3),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=9,
            color="#444444",
        )


def percent(values: Sequence[float | None]) -> NDArray[np.float64]:
    """Return shares in percent, NaN for unknown ones."""
    return numbers(values) * 100


def numbers(values: Sequence[float | None]) -> NDArray[np.float64]:
    """Return numbers, NaN for unknown ones."""
    return np.array([number(v) for v in values], np.float64)


def number(value: float | None) -> float:
    """Return a number, NaN for an unknown one."""
    return math.nan if value is None else float(value)
