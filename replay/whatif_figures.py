"""The figure of the what-if experiment: kills and waiting against the number of machines, with their budgets."""

from __future__ import annotations

from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reclaim.data.style import INK, STYLE
from reclaim.replay.figures import estimator_colours
from reclaim.replay.folded import LIMIT
from reclaim.replay.kinds import Results
from reclaim.replay.whatif_page import KILLS, PENDING

_GREY: Final = "#777777"


def against_machines(results: Results) -> Figure:
    """Draw tasks killed and task-time spent waiting on every number of machines tried; large: the fewest that fit."""
    asked, cell = results["asked"], results["cell"]["machines"]
    colours = estimator_colours(results)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 6.6), layout="constrained")
        axes = figure.subplots(2, 1, sharex=True)
        panels = (
            (KILLS, 1.0, asked["oom_budget"], "Tasks killed for want of memory", "per 1,000 task-days"),
            (PENDING, 100.0, asked["pending_budget"], "Task-time spent waiting for a machine", "%"),
        )
        for ax, (key, unit, budget, title, label) in zip(axes, panels, strict=True):
            for estimator in results["estimators"]:
                limit = estimator["kind"] == LIMIT
                colour = _GREY if limit else colours[estimator["name"]]
                points = [(p["machines"], unit * p[key], p) for p in estimator["points"] if p[key] is not None]
                name = "no reclamation" if limit else f"{estimator['name']}, {estimator['margin']}"
                ax.plot(
                    [x for x, _, _ in points], [y for _, y, _ in points], color=colour, linewidth=1.9, marker="o",
                    markersize=3.5, linestyle=(0, (4, 2)) if limit else "-", label=name,
                )  # fmt: skip
                for x, y, _ in points:
                    if x == estimator["fewest"]:
                        ax.plot(x, y, "o", color=colour, markersize=10, markeredgecolor="white", zorder=4)
            ax.axhline(unit * budget, color=INK, linewidth=1.0, linestyle=(0, (1, 2)), zorder=1)
            ax.axvline(cell, color=INK, linewidth=0.9, zorder=0)
            top = max((unit * p[key] for e in results["estimators"] for p in e["points"] if p[key]), default=0.0)
            ax.set_yscale("symlog", linthresh=max(unit * budget, 1e-3), linscale=1.0)
            ax.set_ylim(-0.1 * max(unit * budget, 1e-3), max(1.5 * top, 3 * unit * budget, 1e-2))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            ax.set_title(title)
            ax.set_ylabel(label)
            ax.annotate(
                "budget", (1.0, unit * budget), xycoords=("axes fraction", "data"), xytext=(0, 3),
                textcoords="offset points", ha="right", fontsize=8, color="#444444",
            )  # fmt: skip
        axes[0].annotate(
            "the cell", (cell, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -4), textcoords="offset points",
            va="top", fontsize=8, color="#444444",
        )  # fmt: skip
        axes[-1].set_xlabel("machines")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4), fontsize=9)
    return figure
