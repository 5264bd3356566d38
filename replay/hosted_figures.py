"""The figure of the closed loop: Borg's Figure 12 of a cell that was run by the reservations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reclaim.data.schema import RESOURCES
from reclaim.data.style import INK, RESOURCE_TITLES, STYLE, USAGE_COLOUR
from reclaim.replay.figures import PALETTE, label_segments, number, percent, shade, time_unit
from reclaim.replay.kinds import Results


def cell_in_turn(results: Results) -> Figure | None:
    """Draw usage, reservation and limit of each cell over time, and below them its kills out of memory so far.

    One column per estimator that went through the sequence of margins; shades tell which was in force. None where no
    cell was run.
    """
    loop = results.get("closed_loop", {"estimators": ()})
    drawn = [e for e in loop["estimators"] if e["sequence"] is not None]
    if not drawn:
        return None
    rows = (*RESOURCES, "oom_kills", "waiting")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.6 + 4.1 * len(drawn), 9.4), layout="constrained")
        axes = figure.subplots(
            len(rows), len(drawn), sharex=True, sharey="row", squeeze=False, height_ratios=[1.0, 1.0, 0.7, 0.5]
        )
        unit, name_of_unit = time_unit(loop["length_hours"])
        for column, estimator in enumerate(drawn):
            over_time: Mapping[str, Any] = estimator["over_time"]
            x = np.append(np.array(over_time["hours"]), loop["length_hours"]) / unit
            colour = PALETTE[column % len(PALETTE)]
            for row, key in enumerate(rows):
                ax = axes[row, column]
                shade(ax, loop["segments"], unit)
                ax.set_xlim(0, x[-1])
                if key in RESOURCES:
                    used, reserved, limit = (percent(over_time[f"{of}_{key}"]) for of in ("use", "reserved", "limit"))
                    ax.stairs(used, x, fill=True, color=USAGE_COLOUR, label="usage", alpha=0.9)
                    ax.stairs(limit, x, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label="limit", baseline=None)
                    ax.stairs(reserved, x, color=colour, linewidth=1.8, label="reservation", baseline=None)
                    ax.axhline(100, color="#999999", linewidth=0.8)
                    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %"))
                else:
                    values = np.array([number(v) for v in over_time[key]])
                    ax.stairs(values, x, color=colour, linewidth=1.8, baseline=None)
                    ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=5))
            for ax in axes[:, column]:
                ax.margins(y=0.12)
            label_segments(axes[0, column], loop["segments"], unit)
            axes[0, column].set_title(f"{estimator['name']}: {RESOURCE_TITLES[RESOURCES[0]]}")
            axes[1, column].set_title(RESOURCE_TITLES[RESOURCES[1]])
            axes[2, column].set_title("Killed for want of memory, so far")
            axes[3, column].set_title("Tasks waiting for a machine")
            axes[-1, column].set_xlabel(f"{name_of_unit} since the test period began")
        for ax in axes[:, 0]:  # every column has its scale
            ax.set_ylim(bottom=0)
        axes[0, 0].set_ylabel("share of capacity")
        axes[1, 0].set_ylabel("share of capacity")
        axes[2, 0].set_ylabel("tasks")
        axes[3, 0].set_ylabel("tasks")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)
    return figure
