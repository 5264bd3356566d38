"""Draws the figures of the margins experiment: the cell over time, reclaimed at each margin, the simulated cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from numpy.typing import NDArray

from reclaim.data.core.style import INK, RESOURCE_TITLES, STYLE, USAGE_COLOUR
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import COMPARED, HEADLINE, ORACLE, Results, judged, measures_memory
from reclaim.replay.experiments.margins.page import summary_table
from reclaim.replay.open_loop.paired import EXCEEDS
from reclaim.replay.report.figures import (
    KIND_COLOURS,
    MARGIN_MARKERS,
    PALETTE,
    estimator_colours,
    label_segments,
    leading,
    name_estimators,
    number,
    numbers,
    percent,
    shade,
    time_unit,
)
from reclaim.training.margins.margin import MARGIN_NAMES

ACROSS: Final = 3
"""Most estimators next to each other in the figure of the cell: as wide as a page."""


def cell_in_turn(results: Results) -> Figure | None:
    """Draw usage, reservation and limit of each cell over time, and below them its kills out of memory so far.

    One column per estimator that went through the sequence of margins, ``ACROSS`` next to each other; shades show the
    current one. None where no cell was run.
    """
    loop = results.get("closed_loop", {"estimators": ()})
    drawn = [e for e in loop["estimators"] if e["sequence"] is not None]
    if not drawn:
        return None
    titles = {resource: RESOURCE_TITLES[resource] for resource in judged(results)}
    titles |= {"oom_kills": "Killed out of memory, so far"} if measures_memory(results) else {}
    titles["waiting"] = "Tasks waiting for a machine"
    rows, heights = tuple(titles), [{"oom_kills": 0.7, "waiting": 0.5}.get(key, 1.0) for key in titles]
    across, blocks = min(len(drawn), ACROSS), -(-len(drawn) // ACROSS)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.6 + 4.1 * across, 9.4 / 3.2 * sum(heights) * blocks), layout="constrained")
        grid = figure.subplots(len(rows) * blocks, across, sharey="row", squeeze=False, height_ratios=heights * blocks)
        unit, name_of_unit = time_unit(loop["length_hours"])
        for k, estimator in enumerate(drawn):
            block, column = divmod(k, across)
            axes = grid[len(rows) * block : len(rows) * (block + 1), column]
            over_time: Mapping[str, Any] = estimator["over_time"]
            x = np.append(np.array(over_time["hours"]), loop["length_hours"]) / unit
            colour = PALETTE[k % len(PALETTE)]
            for ax, key in zip(axes, rows, strict=True):
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
                    values = numbers(over_time[key])
                    ax.stairs(values, x, color=colour, linewidth=1.8, baseline=None)
                    ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=5))
                ax.margins(y=0.12)
                ax.tick_params(labelbottom=ax is axes[-1])
            label_segments(axes[0], loop["segments"], unit)
            for ax, key in zip(axes, rows, strict=True):
                ax.set_title(f"{estimator['name']}: {titles[key]}" if ax is axes[0] else titles[key])
            axes[-1].set_xlabel(f"{name_of_unit} since the test period began")
        for row, ax in enumerate(grid[:, 0]):  # every row has its own scale
            ax.set_ylim(bottom=0)
            ax.set_ylabel("share of capacity" if rows[row % len(rows)] in RESOURCES else "tasks")
        for ax in grid.reshape(blocks, len(rows), across)[-1][:, len(drawn) - across * (blocks - 1) :].flat:
            ax.set_visible(False)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)
    return figure


def margins_over_time(results: Mapping[str, Any]) -> Figure:
    """Draw Borg's experiment (EuroSys'15, Figure 12) for the cell of these results.

    Usage, limit and one reservation per drawn estimator for each resource, and below them the would-be out-of-memory
    events so far; shades and labels show the current margin.
    """
    timeline = results["timeline"]
    drawn = [e for e in results["estimators"] if e["sequence"] is not None and e["sequence"]["drawn"]]
    colours = estimator_colours(results)
    hours = np.array(timeline["hours"])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.5, 8.6), layout="constrained")
        shown = judged(results)
        events = [0.75] if "memory" in shown else []
        heights = [1.0] * len(shown) + events
        axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
        unit, end = time_unit(timeline["length_hours"])
        x = np.append(hours, timeline["length_hours"]) / unit
        for ax in axes:
            shade(ax, timeline["segments"], unit)
        for ax, resource in zip(axes, shown, strict=False):
            usage, limit = (percent(timeline[name][resource]) for name in ("usage", "limit"))
            ax.stairs(usage, x, fill=True, color=USAGE_COLOUR, label="usage (mean)", alpha=0.9)
            ax.stairs(limit, x, color=INK, linewidth=1.4, linestyle=(0, (4, 2)), label="limit", baseline=None)
            for estimator in drawn:
                held = percent(estimator["sequence"]["reservation"][resource])
                ax.stairs(
                    held,
                    x,
                    color=colours[estimator["name"]],
                    linewidth=1.9,
                    label=f"reservation, {estimator['name']}",
                    baseline=None,
                )
            ax.set_ylim(bottom=0, top=1.12 * np.nanmax(limit) if np.isfinite(limit).any() else None)
            ax.set_title(RESOURCE_TITLES.get(resource, resource))
            ax.set_ylabel(timeline["unit"])
            ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %"))
        label_segments(axes[0], timeline["segments"], unit)
        if events:
            _draw_events(axes[-1], drawn, colours, x, on_machines=timeline["machines"] > 0)
        axes[-1].set_xlabel(f"{end} since the test period began")
        axes[-1].set_xlim(0, x[-1])
        if end == "hours" and x[-1] >= 12:
            axes[-1].xaxis.set_major_locator(MultipleLocator(6 if x[-1] <= 48 else 12))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 5), fontsize=9)
    return figure


def reclaimed_at_margins(results: Mapping[str, Any]) -> Figure:
    """Draw what the leading estimators reclaim at each margin, with the interval, and the oracle.

    First comes the one that reclaims most where it keeps the budget. Each point is labelled with the violation rate it
    reached on the test rows, which may differ from the one its margin was set for on the validation rows.
    """
    bound = next(e for e in results["estimators"] if e["kind"] == ORACLE)
    shown = leading(results, summary_table(results), lambda e: _strength(e, results))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 1.1 + 0.39 * max(len(shown), 1)), layout="constrained")
        axes = figure.subplots(1, len(judged(results)), sharey=True, squeeze=False)[0]
        for resource, ax in zip(judged(results), axes, strict=True):
            highest = _reclaimed(bound, "none", resource)["value"]
            ax.axvline(highest, color=INK, linewidth=1.3, linestyle=(0, (4, 2)))
            lowest = 0.0
            for row, estimator in enumerate(shown):
                colour = KIND_COLOURS[estimator["kind"]]
                for step, name in enumerate(MARGIN_NAMES):
                    share, y = _reclaimed(estimator, name, resource), row + (step - 1) * 0.29
                    ax.plot([share["low"], share["high"]], [y, y], color=colour, linewidth=1.2, alpha=0.75)
                    ax.plot(share["value"], y, MARGIN_MARKERS[name], color=colour, markersize=4.6,
                            markeredgecolor="white", markeredgewidth=0.5)  # fmt: skip
                    right = max(share["value"], share["high"])
                    if math.isfinite(right):
                        ax.annotate(_rate(estimator["results"][name]["all"]["violation_rate"][resource]["value"]),
                                    (right, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=6.8,
                                    color="#555555")  # fmt: skip
                    lowest = min(lowest, share["low"]) if math.isfinite(share["low"]) else lowest
            ax.set_xlim(lowest, max(highest * 1.18, 1.0) if math.isfinite(highest) else 100.0)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %"))
            ax.set_title(f"{RESOURCE_TITLES.get(resource, resource)} reclaimed, of the limits")
        name_estimators(axes, shown)
        kinds = [kind for kind in COMPARED if any(e["kind"] == kind for e in shown)]
        marks = [Line2D([], [], color=KIND_COLOURS[kind], linewidth=2.4, label=kind) for kind in kinds]
        marks += [Line2D([], [], marker=MARGIN_MARKERS[name], linestyle="", color="#555555", markersize=5, label=name)
                  for name in MARGIN_NAMES]  # fmt: skip
        marks.append(Line2D([], [], color=INK, linewidth=1.3, linestyle=(0, (4, 2)), label="oracle"))
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=8.5)
    return figure


def _strength(estimator: Mapping[str, Any], results: Mapping[str, Any]) -> float:
    """Return what an estimator reclaims at ``HEADLINE``, of the resources of which it keeps the budget."""
    verdicts = results["against_best"].get(HEADLINE, {}).get(estimator["name"], {})
    kept = (r for r in judged(results) if verdicts.get(r, {}).get("verdict") != EXCEEDS)
    return sum(_reclaimed(estimator, HEADLINE, r)["value"] for r in kept)


def _reclaimed(estimator: Mapping[str, Any], margin: str, resource: str) -> dict[str, float]:
    """Return the reclaimed share and its bounds, in percent."""
    share = estimator["results"][margin]["all"]["reclaimed_share"][resource]
    return {key: 100 * number(share[key]) for key in ("value", "low", "high")}


FIGURES: Final = {"margins_over_time": margins_over_time, "reclaimed_at_margins": reclaimed_at_margins}
"""Every figure by its file name."""


def _draw_events(
    ax: Axes,
    drawn: Sequence[Mapping[str, Any]],
    colours: Mapping[str, str],
    x: NDArray[np.float64],
    *,
    on_machines: bool,
) -> None:
    """Draw the events so far; without machines a task over its reservation is the only kind."""
    kinds: dict[str, tuple[str, Literal["-", ":"]]] = {"cumulative_tasks_over": ("tasks over their reservation", "-")}
    if on_machines:
        kinds["cumulative_events"] = ("would-be out of memory", ":")
    for estimator in drawn:
        for key, (_, dashes) in kinds.items():
            events = estimator["sequence"][key]
            ax.stairs(events, x, color=colours[estimator["name"]], linewidth=1.9, linestyle=dashes, baseline=None)
    ax.set_title("Memory events so far")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_ylabel("events")
    legend = [
        Line2D([], [], color="#555555", linewidth=1.9, linestyle=dashes, label=label)
        for label, dashes in kinds.values()
    ]
    ax.legend(handles=legend, loc="upper left", fontsize=9)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"
