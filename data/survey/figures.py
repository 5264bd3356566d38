"""Draws the figures of a dataset from its facts; a figure without data is omitted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reclaim.data import schema as s
from reclaim.data.core.pages.figures import figure_bytes
from reclaim.data.core.style import INK, ON_COLOUR, RESOURCE_TITLES, STYLE, USAGE_COLOUR
from reclaim.data.survey.usage import CURVE, null_means

TIER_COLOURS: Final = {
    "free": "#56B4E9", "beb": "#009E73", "mid": "#E69F00", "prod": "#0072B2", "mon": "#CC79A7",
    "unknown": "#7F7F7F", "all": "#222222",
}  # fmt: skip
"""Colours distinguishable with any colour vision (Okabe and Ito)."""
ACCENT: Final = "#D55E00"
BAR: Final = "#0072B2"
_PLAIN: Final = FuncFormatter(lambda value, _: f"{value:,.12g}")
_MOST_BINS: Final = 120
"""Bins of counts over time: with more, neighbours are indistinguishable."""
_SHOWN_COLUMNS = [f.name for f in s.USAGE if f.name not in (*s.TASK_KEY, s.START_US, s.END_US)]


def cell_over_time(facts: Mapping[str, Any]) -> Figure | None:
    """Draw usage, limits and capacity of the whole cell over time, one panel per resource that is known."""
    over_time = facts["timeline"]
    drawn = [r for r in s.RESOURCES if over_time[f"{r}_usage"] or over_time[f"{r}_limit"]]
    if not drawn:
        return None
    figure, axes = _panels(len(drawn), height=2.0)
    x, unit = _times(over_time)
    for ax, r in zip(axes, drawn, strict=True):
        usage, limit, capacity = (over_time[f"{r}_{kind}"] for kind in ("usage", "limit", "capacity"))
        if usage:
            ax.stairs(usage, x, fill=True, color=USAGE_COLOUR, label="usage (mean)")
        if limit:
            ax.stairs(limit, x, color=BAR, linewidth=1.5, label="limits", baseline=None)
        if capacity:
            ax.stairs(capacity, x, color=INK, linewidth=1.4, linestyle=(0, (4, 2)), label="capacity of the machines",
                      baseline=None)  # fmt: skip
        ax.set_ylim(bottom=0)
        ax.set_title(RESOURCE_TITLES[r])
        ax.set_ylabel(f"{RESOURCE_TITLES[r]}, unit of the trace")
        ax.yaxis.set_major_formatter(_PLAIN)
    axes[-1].set_xlabel(unit)
    axes[-1].set_xlim(0, x[-1])
    named: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(list(named.values()), list(named), loc="outside upper center", ncols=3)
    return figure


def usage_of_limit(facts: Mapping[str, Any]) -> Figure | None:
    """Draw the distribution function of mean usage over limit per window, one line per tier."""
    drawn = {r: groups for r, groups in facts["usage_of_limit"].items() if groups}
    if not drawn:
        return None
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(drawn), sharey=True))
    x = np.array(CURVE) / 10
    names: dict[str, Any] = {}
    for ax, (r, groups) in zip(axes, drawn.items(), strict=True):
        ax.axvline(100, color="#BBBBBB", linewidth=0.9)
        for group in groups:
            style = (0, (4, 2)) if group["tier"] == "all" else "-"
            (names[group["tier"]],) = ax.plot(x, 100 * np.array(group["curve"]), color=TIER_COLOURS[group["tier"]],
                                              linewidth=1.7, linestyle=style)  # fmt: skip
        ax.set_xlim(0, x[-1])
        ax.set_ylim(0, 100)
        ax.set_title(RESOURCE_TITLES[r])
        ax.set_xlabel("mean usage of a window, % of its limit")
    axes[0].set_ylabel("share of windows at or below, %")
    if names.keys() != {"unknown"}:
        figure.legend(list(names.values()), list(names), loc="outside upper center", ncols=len(names))
    return figure


def tier_shares(facts: Mapping[str, Any]) -> Figure | None:
    """Draw the tiers' shares of tasks, task-hours, limits and usage; None with at most one tier."""
    tiers = facts["tiers"]
    if len(tiers) < 2:
        return None
    amounts = {"tasks": [t["tasks"] for t in tiers], "task-hours": [t["task_hours"] for t in tiers]}
    for r in s.RESOURCES:
        for kind in ("limit", "usage"):
            amounts[f"{RESOURCE_TITLES[r]} {kind}"] = [t[r][f"{kind}_hours"] or 0.0 for t in tiers]
    amounts = {name: values for name, values in amounts.items() if sum(values) > 0}
    figure = Figure(figsize=(9.5, 0.9 + 0.36 * len(amounts)), layout="constrained")
    ax = figure.subplots()
    left = np.zeros(len(amounts))
    for k, tier in enumerate(tiers):
        width = np.array([100 * values[k] / sum(values) for values in amounts.values()])
        ax.barh(list(amounts), width, left=left, color=TIER_COLOURS[tier["tier"]], label=tier["tier"], height=0.72,
                edgecolor="white", linewidth=0.8)  # fmt: skip
        for row, share in enumerate(width):
            if share >= 4:
                ax.text(left[row] + share / 2, row, f"{share:.0f} %", ha="center", va="center", fontsize=8,
                        color="white" if tier["tier"] in ("beb", "prod") else ON_COLOUR)  # fmt: skip
        left += width
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel("share of the whole, %")
    ax.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=len(tiers))
    return figure


def lifetimes(facts: Mapping[str, Any]) -> Figure | None:
    """Draw the number of tasks by band of lifetime."""
    bands = facts["tasks"]["lifetimes"]
    edges = [_duration(band["from_s"]) for band in bands]
    labels = [f"< {edges[1]}", *(f"{a} – {b}" for a, b in itertools.pairwise(edges[1:])), f"≥ {edges[-1]}"]
    filled = [k for k, band in enumerate(bands) if band["tasks"]]
    if len(filled) < 2:
        return None
    shown = slice(filled[0], filled[-1] + 1)
    return _bars(labels[shown], [band["tasks"] for band in bands[shown]], "tasks", "lifetime")


def event_types(facts: Mapping[str, Any]) -> Figure | None:
    """Draw the number of events by type, of tasks, or of collections if tasks have none."""
    of = "tasks" if facts["events"]["types"] else "collections"
    found = facts["events" if of == "tasks" else "collections"]["types"]
    if not found:
        return None
    names = [row["event"].lower().replace("_", " ") for row in found]
    return _bars(names, [row["events"] for row in found], f"events of {of}", "")


def starts_over_time(facts: Mapping[str, Any]) -> Figure | None:
    """Draw the numbers of tasks (or collections) submitted, started and ended over time."""
    over_time = facts["timeline"]
    kinds = {"submitted": "#7F7F7F", "started": BAR, "ended": ACCENT}
    drawn = {k: over_time[k] for k in kinds if over_time[k] and any(over_time[k])}
    if not drawn:
        return None
    figure, (ax,) = _panels(1, height=2.9)
    x, unit = _times(over_time)
    width = -(-over_time["points"] // _MOST_BINS)
    starts = np.arange(0, over_time["points"], width)
    for name, values in drawn.items():
        ax.stairs(
            np.add.reduceat(np.array(values), starts),
            x[[*starts, -1]],
            color=kinds[name],
            linewidth=1.4,
            label=name,
            baseline=None,
        )
    ax.set_ylim(bottom=0)
    ax.set_xlim(0, x[-1])
    ax.set_xlabel(unit)
    ax.set_ylabel(
        f"{'tasks' if over_time['counted'] == 'events' else 'collections'} in {_duration(width * over_time['step_s'])}"
    )
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(_PLAIN)
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def missing_fields(facts: Mapping[str, Any]) -> Figure | None:
    """Draw the share of nulls in each column of usage, or of events if the dataset has no usage."""
    table = "usage" if facts["missing"]["usage"] else "events"
    shares = facts["missing"][table]
    names = [name for name in shares if name in _SHOWN_COLUMNS or table == "events" or name in s.EXTRAS]
    if not names:
        return None
    lacks = facts["quality"]["lacks"]
    figure = Figure(figsize=(9.5, 0.8 + 0.21 * len(names)), layout="constrained")
    ax = figure.subplots()
    width = np.array([100 * shares[name] for name in names])
    never = np.array([name in lacks for name in names])
    meant = ~never & np.array([null_means(table, name) is not None for name in names])
    ax.barh(names, 100, color="#EEEEEE", height=0.8)
    kinds = {"missing": (~never & ~meant, ACCENT, None), "null has a meaning (see the table)": (meant, "#9CC3DB", None),
             "the source never has it": (never, "#D9D9D9", "///")}  # fmt: skip
    for label, (rows, colour, hatch) in kinds.items():
        if width[rows].any():
            ax.barh(names, np.where(rows, width, 0), color=colour, height=0.8, hatch=hatch, edgecolor="white",
                    linewidth=0, label=label)  # fmt: skip
    for row, share in enumerate(width):
        if share and not never[row]:
            inside = share > 88
            ax.text(share + (-0.8 if inside else 0.8), row, _percent(share), va="center", fontsize=8,
                    color=ON_COLOUR if inside else INK, ha="right" if inside else "left")  # fmt: skip
    ax.invert_yaxis()
    ax.margins(y=0.01)
    ax.set_xlim(0, 100)
    ax.tick_params(axis="y", length=0, labelsize=8.5)
    ax.set_xlabel(f"share of rows of {table} without a value, %")
    if width.any():
        figure.legend(loc="outside upper center", ncols=3)
    return figure


FIGURES: Final[dict[str, Callable[[Mapping[str, Any]], Figure | None]]] = {
    figure.__name__: figure
    for figure in (
        cell_over_time, usage_of_limit, tier_shares, lifetimes, event_types, starts_over_time, missing_fields
    )
}  # fmt: skip
"""Figures by name."""


def draw(facts: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the figures with data as SVG; the same bytes for the same facts."""
    drawn = {}
    with mpl.rc_context(STYLE):
        for name, make in FIGURES.items():
            figure = make(facts)
            if figure is not None:
                drawn[name] = figure_bytes(figure, "svg")
    return drawn


def _panels(count: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(9.5, 0.5 + height * count), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(count, 1, sharex=True)))


def _bars(names: Sequence[str], counts: Sequence[int], unit: str, axis: str) -> Figure:
    """Draw labelled horizontal bars, on a logarithmic axis if the longest would hide the others."""
    figure = Figure(figsize=(9.5, 0.75 + 0.27 * len(names)), layout="constrained")
    ax = figure.subplots()
    ax.barh(names, counts, color=BAR, height=0.72)
    least = min((n for n in counts if n), default=1)
    if max(counts) > 200 * least:
        ax.set_xscale("log")
        ax.set_xlim(left=0.7, right=4 * max(counts))
        unit += ", logarithmic"
    else:
        ax.set_xlim(right=1.12 * max(counts))
    for row, n in enumerate(counts):
        ax.annotate(f"{n:,}", (max(n, ax.get_xlim()[0]), row), xytext=(4, 0), textcoords="offset points", va="center",
                    fontsize=8.5)  # fmt: skip
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(_PLAIN)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(unit)
    ax.set_ylabel(axis)
    return figure


def _times(over_time: Mapping[str, Any]) -> tuple[np.ndarray[Any, np.dtype[np.float64]], str]:
    """Return the edges of the steps since the first, and their unit."""
    hours = np.arange(over_time["points"] + 1) * over_time["step_s"] / 3600
    since = f"since {over_time['first_us'] / 1e6:,.0f} s on the trace's clock"
    return (hours / 24, f"days {since}") if hours[-1] > 72 else (hours, f"hours {since}")


def _duration(seconds: int) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _percent(share: float) -> str:
    return f"{share:.0f} %" if share >= 9.5 else f"{share:.1f} %" if share >= 0.05 else "< 0.1 %"
