"""Draws the figures of the frontier: reclaimed against violations, on tasks and on machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from reclaim.data.core.style import INK, RESOURCE_TITLES, STYLE
from reclaim.replay.experiment import LEARNED, LEARNED_MACHINE, STATISTICAL, Results, judged
from reclaim.replay.experiments.frontier.page import AS_PUBLISHED, SIDES
from reclaim.replay.open_loop.machines import UNFITTED
from reclaim.replay.report.figures import MARGIN_MARKERS, PALETTE, numbers

_OTHER: Final = "#C2C2C2"
_COLOURS: Final = PALETTE[:-1]  # the last is grey
_OURS: Final = (LEARNED, LEARNED_MACHINE)
_MARKERS: Final = {**MARGIN_MARKERS, AS_PUBLISHED: "D"}
_RATES_SHOWN: Final = (1e-5, 0.3)
"""Ends of the axis of violation rates; lower rates are drawn at the left edge."""


def frontier_of_tasks(results: Results) -> Figure:
    """Draw reclaimed share against violation rate of task-windows, every estimator, with the oracle as the bound."""
    return _frontier(results, results["tasks"], "task-windows that pass their reservation")


def frontier_of_machines(results: Results) -> Figure:
    """Draw the same of whole machines, with predictors of a machine's peak; empty without machines."""
    return _frontier(results, results["machines"], "times at which a machine's peak passes what was foreseen")


def _frontier(results: Results, side: Mapping[str, Any] | None, x_label: str) -> Figure:
    with mpl.rc_context(STYLE):
        figure, shown = Figure(figsize=(11.0, 5.4), layout="constrained"), judged(results)
        axes = figure.subplots(1, len(shown), sharey=False, squeeze=False)[0]
        if side is None:
            for ax in axes:
                ax.set_axis_off()
            axes[0].text(0, 0.5, "The trace knows no machines.")
            return figure
        colours = {n: c for n, c in contender_colours(results).items() if n in side["contenders"]}
        for resource, ax in zip(shown, axes, strict=True):
            _draw(ax, results, side, resource, colours)
            ax.set_title(RESOURCE_TITLES.get(resource, resource))
            ax.set_xlabel(x_label)
        axes[0].set_ylabel("reclaimed, % of the limits")
        kinds = {e["name"]: e["kind"] for e in results["estimators"]}
        handles = [
            Line2D(
                [], [], color=colour, linewidth=_width(kinds[name]), linestyle=_dashes(name, kinds[name]), label=name
            )
            for name, colour in colours.items()
        ]
        grey = {kinds[name] for name in side["contenders"] if name not in colours}
        handles += [
            Line2D([], [], color=_OTHER, linewidth=1.2, linestyle=_dashes("", kind), label=f"other {_plural(kind)}")
            for kind in sorted(grey)
        ]
        handles.append(Line2D([], [], color=INK, linewidth=1.3, linestyle=(0, (4, 2)), label="oracle"))
        handles += [
            Line2D([], [], marker=marker, linestyle="", color="#555555", markersize=6, label=name)
            for name, marker in _MARKERS.items()
            if any(name in margins for margins in side["margins"].values())
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=8.5)
    return figure


def contender_colours(results: Results) -> dict[str, str]:
    """Return a colour for each contender of a model, then for the best and the second of each other kind on each side.

    The best reclaim most over the resources and the rates together. A contender has the same colour in both figures;
    the rest are grey, as are the second where colours run out.
    """
    sides = [results[side]["contenders"] for side in SIDES if results[side] is not None]
    kinds = {e["name"]: e["kind"] for e in results["estimators"] if any(e["name"] in side for side in sides)}
    ours = [name for name, kind in kinds.items() if kind in _OURS]
    ranked = [
        sorted((name for name in side if kinds[name] == kind), key=lambda name: -_strength(side[name]))
        for kind in dict.fromkeys(kinds.values())
        if kind not in _OURS
        for side in sides
    ]
    rivals = [names[place] for place in range(2) for names in ranked if place < len(names)]
    chosen = list(dict.fromkeys([*ours, *rivals]))[: max(len(ours), len(_COLOURS))]
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(chosen)}


def _strength(contender: Mapping[str, Any]) -> float:
    return sum(at["of_oracle"] or 0.0 for of_resource in contender.values() for at in of_resource["at"])


def _draw(ax: Axes, results: Results, side: Mapping[str, Any], resource: str, colours: Mapping[str, str]) -> None:
    kinds = {e["name"]: e["kind"] for e in results["estimators"]}
    low, high = _RATES_SHOWN
    bound = side["oracle"][resource]
    if bound is not None:
        ax.axhline(100 * bound, color=INK, linewidth=1.3, linestyle=(0, (4, 2)))
    for rate in results["rates"]:
        ax.axvline(rate, color="#DDDDDD", linewidth=1.0, zorder=0)
    tops = []
    coloured = list(colours)[::-1]  # on top of the rest, the first on top of all
    for name in sorted(side["contenders"], key=lambda n: coloured.index(n) if n in colours else -1):
        of_resource = side["contenders"][name].get(resource)
        if of_resource is None:
            continue
        curve = of_resource["curve"]
        x, y = numbers(curve["violation_rate"]), 100 * numbers(curve["reclaimed_share"])
        colour, width = colours.get(name, _OTHER), _width(kinds[name]) if name in colours else 1.2
        ax.plot(np.maximum(x, low / 2), y, color=colour, linewidth=width, linestyle=_dashes(name, kinds[name]))
        tops.append(np.interp(high, x[::-1], y[::-1]) if len(x) else 0.0)
        for margin, marker in _MARKERS.items():
            point = side["margins"].get(name, {}).get(margin, {}).get(resource)
            if point is not None and name in colours:
                px, py = _point(point)
                ax.plot(
                    max(px, low), 100 * py, marker, color=colour, markersize=6.5, markeredgecolor="white",
                    markeredgewidth=0.7, clip_on=False, zorder=5,
                )  # fmt: skip
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(0, 1.04 * max([100 * (bound or 0.0), *(t for t in tops if np.isfinite(t)), 1.0]))
    ax.xaxis.set_major_locator(LogLocator(numticks=9))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %"))


def _point(point: Mapping[str, Any]) -> tuple[float, float]:
    """Return violation rate and reclaimed share of a margin, of tasks or of machines."""
    if "savings" in point:
        point = {"violation_rate": point["violation_rate"]["value"], "reclaimed_share": point["savings"]["value"]}
    x, y = numbers([point["violation_rate"], point["reclaimed_share"]])
    return float(x), float(y)


def _width(kind: str) -> float:
    return 2.8 if kind == LEARNED else 1.8


def _dashes(name: str, kind: str) -> Any:
    """Return dashes for machines; none for a model's bound, which its estimator of machines often coincides with."""
    unbroken = kind in (LEARNED, STATISTICAL) or name.endswith(f" ({UNFITTED})")
    return "-" if unbroken else (0, (5, 1.5, 1, 1.5))


def _plural(kind: str) -> str:
    return "statistical estimators" if kind == STATISTICAL else "predictors of machines"
