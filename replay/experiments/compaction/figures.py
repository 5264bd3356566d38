"""Draws the figure of the compaction experiment: machines needed under every estimator and margin, and their risk."""

from __future__ import annotations

from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from reclaim.data.core.style import INK, RESOURCE_TITLES, STYLE, USAGE_COLOUR
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import BY_MACHINE, HEADLINE, ORACLE, Results
from reclaim.replay.experiments.compaction.page import answers, summary_table
from reclaim.replay.open_loop.estimates import LIMIT
from reclaim.replay.report.figures import KIND_COLOURS, leading, name_estimators
from reclaim.training.margins.margin import MARGIN_NAMES

_OPACITY: Final = {**dict(zip(MARGIN_NAMES, (1.0, 0.66, 0.36), strict=True)), "none": 1.0}
"""Opacity of a bar: the narrower the margin, the paler."""
_BAR: Final = 0.26
"""Distance between the bars of an estimator, where estimators are 1 apart."""


def machines_needed(results: Results) -> Figure:
    """Draw machines needed (EuroSys'15, Figure 10), and the tasks and machines over what is reserved or available."""
    fixed_ends = {e["kind"]: e for e in results["estimators"] if e["kind"] in (LIMIT, ORACLE)}
    best = leading(results, summary_table(results), lambda e: -e["results"][HEADLINE]["share"]["value"])
    named = {name for _, name, *_ in answers(results)}
    by_machine = [e for e in results["estimators"] if e["kind"] in BY_MACHINE and e["name"] in named]
    shown = [fixed_ends[LIMIT], fixed_ends[ORACLE], *by_machine, *best]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 1.4 + 0.46 * len(shown)), layout="constrained")
        panels = figure.subplots(1, 1 + len(RESOURCES), sharey=True, width_ratios=[1.8] + [1.0] * len(RESOURCES))
        for row, estimator in enumerate(shown):
            fixed = estimator["kind"] in fixed_ends
            colour = USAGE_COLOUR if fixed else KIND_COLOURS[estimator["kind"]]
            for margin, one in estimator["results"].items():
                y = row if fixed else row + (MARGIN_NAMES.index(margin) - 1) * _BAR
                value, low, high = (100 * one["share"][key] for key in ("value", "low", "high"))
                panels[0].barh(y, value, 0.9 * _BAR, color=colour, alpha=_OPACITY[margin], linewidth=0, zorder=2)
                panels[0].plot([low, high], [y, y], color=INK, linewidth=0.9, marker="|", markersize=4, zorder=3)
                _label(panels[0], max(high, value), y, f"{value:.0f}")
                for ax, resource in zip(panels[1:], RESOURCES, strict=True):
                    share, over = one["beyond"][resource], 100 * one["over"][resource]["value"]
                    beyond = 100 * (share or 0.0)
                    ax.barh(y, beyond, 0.9 * _BAR, color=colour, alpha=_OPACITY[margin], linewidth=0, zorder=2)
                    ax.barh(y, over, 0.5 * _BAR, color=INK, linewidth=0, zorder=3)
                    tasks = (
                        f"{beyond:.1f}" if share is not None else "" if estimator["kind"] in BY_MACHINE else "not known"
                    )
                    machines = f"machines {over:.1f}" if over else ""
                    _label(ax, max(beyond, over), y, ", ".join(part for part in (tasks, machines) if part))
        for estimator in shown:
            if estimator["kind"] in fixed_ends:
                value = 100 * estimator["results"]["none"]["share"]["value"]
                panels[0].axvline(value, color=INK, linewidth=1.1, linestyle=(0, (4, 2)), zorder=1)
        panels[0].axvline(100, color=INK, linewidth=1.0, zorder=1)
        titles = ["Machines needed", *(f"{RESOURCE_TITLES[r]} beyond reserved" for r in RESOURCES)]
        units = ["% of the original cell", *("% of the tasks",) * len(RESOURCES)]
        for ax, title, unit in zip(panels, titles, units, strict=True):
            ax.set_xlim(0, max((1.1 if ax is panels[0] else 1.3) * ax.dataLim.x1, 1.0))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            ax.set_title(title)
            ax.set_xlabel(unit)
            ax.xaxis.set_label_position("top")
        name_estimators(panels, shown)
        patches = [Patch(color="#555555", alpha=_OPACITY[name], label=f"{name} margin") for name in MARGIN_NAMES]
        figure.legend(
            handles=[*patches, Patch(color=INK, label="machines out of it")],
            loc="outside upper center", ncols=len(patches) + 1, fontsize=9, title_fontsize=8.5,
            title="thin lines: the least and the most of any trial; dashed: without reclamation, and the oracle",
        )  # fmt: skip
    return figure


def _label(ax: Axes, x: float, y: float, text: str) -> None:
    ax.annotate(
        text, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7.5, color="#444444", zorder=4,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0},
    )  # fmt: skip
