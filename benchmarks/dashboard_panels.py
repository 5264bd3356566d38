"""Draws the panels of the Grafana dashboard from Prometheus' answers to their expressions; ``dashboard.py draw``."""

from __future__ import annotations

import argparse
import json
import math
import re
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from reclaim.data.style import INK, STYLE

Json = dict[str, Any]

DASHBOARD: Json = json.loads((files("reclaim.serving") / "deploy" / "grafana-dashboard.json").read_text())
UNIT_WORDS = {"s": "seconds", "reqps": "a second", "percentunit": "share", "bytes": "bytes", "short": ""}
MOST_STEPS = 400
"""Points of a line, at most: more than a panel has pixels for."""
SCRAPE_S = 15
"""Longer than it takes until a model that is loaded is seen, in seconds."""
INCH_X, INCH_Y, GAP = 0.66, 0.30, 0.12
"""Inches of a column and of a line of the dashboard's grid, and of the space around a panel."""
LINE = 0.125
"""Inches of a line of small print."""
GREY, RED, GREEN, BLUE = "#888888", "#C0392B", "#2E7D4F", "#3B6FB6"


class Prometheus:
    """Asks a Prometheus server about one run.

    Parameters
    ----------
    url : str
    first, last : float
        The run, seconds since 1970.
    variables : dict of str to str
        What stands for the dashboard's variables.
    """

    def __init__(self, url: str, first: float, last: float, variables: dict[str, str]) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        self.first, self.last, self._variables = first, last, variables

    def over_time(self, expression: str) -> list[tuple[dict[str, str], Any, Any]]:
        """Return labels, minutes since the run began and values (NaN where there is none) of every series."""
        step = max(math.ceil((self.last - self.first) / MOST_STEPS), 5)
        asked = {"query": self._filled(expression), "start": self.first, "end": self.last, "step": step}
        grid = np.arange(self.first, self.last + 1e-6, step)
        out = []
        for series in self._ask("query_range", asked):
            values = np.full(len(grid), np.nan)
            for when, value in series["values"]:
                values[round((float(when) - self.first) / step)] = float(value)
            out.append((series["metric"], (grid - self.first) / 60, values))
        return out

    def at_the_end(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of every series at the end of the run."""
        found = self._ask("query", {"query": self._filled(expression), "time": self.last})
        return [(series["metric"], float(series["value"][1])) for series in found]

    @cached_property
    def model_loads(self) -> list[float]:
        """The minutes at which the dashboard marks that a model was loaded."""
        out: list[float] = []
        for note in DASHBOARD["annotations"]["list"]:
            for _, minutes, values in self.over_time(note["expr"]):
                there = ~np.isnan(values)
                out += minutes[1:][there[1:] & ~there[:-1]].tolist()
        return out

    def _ask(self, what: str, asked: Json) -> list[Json]:
        response = self._http.post(f"/api/v1/{what}", data=asked)
        answer = response.json()
        if answer["status"] != "success":
            raise SystemExit(f"Prometheus refuses {asked['query']}: {answer['error']}")
        found: list[Json] = answer["data"]["result"]
        return found

    def _filled(self, expression: str) -> str:
        for name, value in self._variables.items():
            expression = expression.replace(name, value)
        return expression


def draw(args: argparse.Namespace) -> None:
    """Write the figure, and beside it a JSON of what was fed and what Prometheus says of it."""
    fed: Json = json.loads(args.feed.read_text())
    ranges = {"$__rate_interval": f"{args.rate_s}s", "$range": f"{args.range_s}s"}
    variables = {**ranges, "$instance": ".*", "$margin": args.margin}
    asked = Prometheus(args.prometheus, fed["began"], fed["ended"], variables)
    per_second = fed["cell_hours"] / (fed["ended"] - fed["began"])
    about = (
        f"{fed['cell_hours']:.0f} h of a cell in {(fed['ended'] - fed['began']) / 60:.0f} min: {fed['slots']} slots of "
        f"5 min, one every {fed['seconds_a_slot']:.2g} s, {fed['tasks_tracked_at_end']:,} tasks at the end. "
        f"Rates are over {args.rate_s} s; quality over {args.range_s} s, {args.range_s * per_second:.0f} h of the "
        f"cell. Data: {fed['dataset']['nature']}."
    )
    empty = _figure(asked, about, args.out)
    edges = [asked.first, *(asked.first + 60 * minute for minute in asked.model_loads), asked.last]
    stretches = [Prometheus(args.prometheus, a, b - SCRAPE_S, variables) for a, b in pairwise(edges)]
    found = {
        "fed": fed, "ranges": ranges, "panels_without_data": empty, "alert_minutes": alert_minutes(asked),
        "whole_run": numbers(asked), "model_by_model": [numbers(stretch) for stretch in stretches],
    }  # fmt: skip
    args.out.with_suffix(".json").write_text(json.dumps(_finite(found), indent=2) + "\n")
    print(json.dumps(_finite({k: v for k, v in found.items() if k != "fed"}), indent=2))


def numbers(asked: Prometheus) -> Json:
    """Return what Prometheus says of a run: windows, promotions, and by role quality and drift."""
    over = f"[{round(asked.last - asked.first)}s]"

    def share(above: str, below: str, by: str) -> Json:
        told = asked.at_the_end(
            f"sum by ({by}, resource, role) (increase(reclaim_quality_{above}_total{over})) / on (resource, role) "
            f"group_left () sum by (resource, role) (increase(reclaim_quality_{below}_total{over}))"
        )
        out: Json = {}
        for labels, value in sorted(told, key=lambda series: sorted(series[0].items())):
            out.setdefault(labels["role"], {}).setdefault(labels["resource"], {})[labels[by]] = round(value, 5)
        return out

    def counted(name: str, by: str = "role") -> Json:
        told = asked.at_the_end(f"sum by ({by}) (increase(reclaim_{name}_total{over}))")
        return {labels[by]: round(value, 2) for labels, value in told}

    reserved = share("reserved", "limit", "margin")
    return {
        "minutes": round((asked.last - asked.first) / 60, 1),
        "served_version": [la["version"] for la, _ in asked.at_the_end('reclaim_model_info{role="served"}')],
        "answers_judged": counted("quality_answers"),
        "covered_by_level": share("covered", "forecasts", "level"),
        "violated_by_margin": share("violations", "answers", "margin"),
        "budget": {labels["margin"]: value for labels, value in asked.at_the_end("reclaim_margin_budget_ratio")},
        "reclaimed_by_margin": {
            role: {of: {m: round(1 - v, 5) for m, v in by.items()} for of, by in resources.items()}
            for role, resources in reserved.items()
        },
        "oom": {name: counted(f"quality_oom_{name}") for name in ("answers", "predicted", "events", "brier")},
        "drift_outside": {la["role"]: round(v, 5) for la, v in asked.at_the_end("reclaim_drift_outside_ratio")},
        "drift_of_means": {la["role"]: round(v, 3) for la, v in asked.at_the_end("reclaim_drift_mean_deviations")},
        "windows": counted("windows", "outcome"),
        "promotions": counted("promotions", "outcome"),
    }


def alert_minutes(asked: Prometheus) -> Json:
    """Return for how many minutes of the run each alert that was not quiet was pending, or fired."""
    alerts: dict[str, dict[str, float]] = {}
    for labels, minutes, values in asked.over_time("ALERTS"):
        held = float(np.count_nonzero(~np.isnan(values)) * (minutes[1] - minutes[0]))
        name = " ".join(labels[n] for n in ("alertname", "margin", "resource", "endpoint", "outcome") if n in labels)
        alerts.setdefault(labels["alertstate"], {})[name] = round(held, 1)
    return alerts


def _figure(asked: Prometheus, about: str, path: Path) -> list[str]:
    """Draw all panels where the dashboard has them; return the titles of those without data."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    boxes = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    lines = max(box["y"] + box["h"] for box in boxes)
    top, empty = 0.75, []
    width, height = 24 * INCH_X, lines * INCH_Y + top
    style = {**STYLE, "font.size": 7, "axes.titlesize": 8.5, "axes.linewidth": 0.6}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(width, height))

        def axes(x: float, y: float, w: float, h: float) -> Any:
            """Return axes at a place in inches from the upper left corner."""
            return figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))

        figure.text(GAP / width, 1 - 0.28 / height, "The panels of the service's dashboard, drawn from Prometheus' "
                    "answers", fontsize=13, weight="bold", color=INK)  # fmt: skip
        figure.text(GAP / width, 1 - 0.52 / height, about, fontsize=8.5, color=GREY)
        for panel, box in zip(DASHBOARD["panels"], boxes, strict=True):
            x, y = box["x"] * INCH_X + GAP, box["y"] * INCH_Y + top
            w, h = box["w"] * INCH_X - 2 * GAP, box["h"] * INCH_Y - GAP
            if panel["type"] == "row":
                figure.text(x / width, 1 - (y + 0.2) / height, panel["title"], fontsize=11, weight="bold", color=BLUE)
                continue
            drawn = {"timeseries": _lines, "stat": _stat, "table": _table, "bargauge": _bars}[panel["type"]]
            if not drawn(panel, asked, axes, (x, y, w, h)):
                empty.append(panel["title"])
        figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})
        plt.close(figure)
    return empty


def _lines(panel: Json, asked: Prometheus, axes: Any, box: tuple[float, ...]) -> bool:
    x, y, w, h = box
    series = [
        (_legend(target, labels), minutes, values)
        for target in panel["targets"]
        for labels, minutes, values in asked.over_time(target["expr"])
        if np.isfinite(values).any()
    ]
    series.sort(key=lambda one: one[0])
    looks = panel["fieldConfig"]["defaults"]
    unit, custom = looks.get("unit", "short"), looks.get("custom", {})
    longest = max((len(name) for name, _, _ in series), default=1)
    columns = max(min(int(w / (0.27 + 0.043 * longest)), 6), 1)
    legend_h = LINE * math.ceil(len(series) / columns) + 0.05
    ax = axes(x + 0.45, y + 0.22, w - 0.5, max(h - 0.22 - 0.2 - legend_h, 0.5))
    ax.set_title(_titled(panel, unit), loc="left", x=-0.4 / max(w - 0.5, 0.5))
    if not series:
        return _nothing(ax, looks)
    colours = _colours(len(series))
    log = custom.get("scaleDistribution", {}).get("type") == "log" and any((v > 0).any() for _, _, v in series)
    if custom.get("stacking", {}).get("mode") == "normal":
        values = [np.nan_to_num(v) for _, _, v in series]
        ax.stackplot(series[0][1], values, labels=[n for n, _, _ in series], colors=colours, alpha=0.75)
    else:
        for colour, (name, minutes, values) in zip(colours, series, strict=True):
            shown = np.where(values > 0, values, np.nan) if log else values
            ax.plot(minutes, shown, color=colour, linewidth=1.0, label=name,
                    linestyle="--" if "budget" in name or "room" in name else "-")  # fmt: skip
    if log:
        ax.set_yscale("log")
    elif "min" in looks:
        ax.set_ylim(bottom=looks["min"])
    for minute in asked.model_loads:
        ax.axvline(minute, color=BLUE, linewidth=0.7, linestyle=":")
    ax.set_xlim(0, (asked.last - asked.first) / 60)
    ax.yaxis.set_major_formatter(lambda value, _: _worded(value, unit))
    ax.yaxis.set_minor_formatter("")
    if unit == "bytes":
        power = int(math.log2(max(ax.get_ylim()[1], 8) / 5))
        ax.set_yticks(np.arange(0, ax.get_ylim()[1], 2.0**power))
    ax.grid(axis="y", color="#DDDDDD", linewidth=0.5)
    ax.tick_params(length=2, width=0.5, labelsize=6.5)
    ax.legend(loc="upper left", bbox_to_anchor=(-0.4 / (w - 0.5), -0.2 / (h - 0.42 - legend_h)), ncols=columns,
              fontsize=6, handlelength=1.0, columnspacing=0.8, labelspacing=0.15, borderpad=0,
              borderaxespad=0)  # fmt: skip
    return True


def _stat(panel: Json, asked: Prometheus, axes: Any, box: tuple[float, ...]) -> bool:
    looks = panel["fieldConfig"]["defaults"]
    ax = _blank(axes, box, panel["title"])
    told = [(_legend(t, labels), v) for t in panel["targets"] for labels, v in asked.at_the_end(t["expr"])]
    if not told:
        return _nothing(ax, looks)
    mapped = {k: v for mapping in looks.get("mappings", []) for k, v in mapping["options"].items()}
    for at, (name, value) in enumerate(told):
        said = mapped.get(f"{value:g}", {})
        colour = {"green": GREEN, "red": RED}.get(said.get("color", ""), INK)
        text = said.get("text", _worded(value, looks.get("unit", "short"), looks.get("decimals")))
        place = (at + 0.5) / len(told)
        ax.text(place, 0.5, text, ha="center", va="center", fontsize=15, weight="bold", color=colour)
        ax.text(place, 0.16, name, ha="center", va="center", fontsize=7, color=GREY)
    return True


def _table(panel: Json, asked: Prometheus, axes: Any, box: tuple[float, ...]) -> bool:
    ax = _blank(axes, box, panel["title"])
    rows = [labels for target in panel["targets"] for labels, _ in asked.at_the_end(target["expr"])]
    if not rows:
        return _nothing(ax, {})
    names = [n for n in dict.fromkeys(n for row in rows for n in row) if n not in ("__name__", "instance", "job")]
    for at, line in enumerate([dict(zip(names, names, strict=True)), *rows]):
        for column, name in enumerate(names):
            ax.text(0.02 + column / len(names), 0.78 - 0.2 * at, line.get(name, ""), fontsize=8.5,
                    color=INK if at else GREY, transform=ax.transAxes)  # fmt: skip
    return True


def _bars(panel: Json, asked: Prometheus, axes: Any, box: tuple[float, ...]) -> bool:
    x, y, w, h = box
    ax = axes(x + 1.5, y + 0.22, w - 2.0, h - 0.45)
    ax.set_title(panel["title"], loc="left", x=-1.45 / (w - 2.0))
    told = [(_legend(t, labels), v) for t in panel["targets"] for labels, v in asked.at_the_end(t["expr"])]
    if not told:
        return _nothing(ax, {})
    told.sort(key=lambda one: abs(one[1]))
    ax.barh([name for name, _ in told], [v for _, v in told], color=BLUE, height=0.6)
    ax.axvline(0, color=GREY, linewidth=0.6)
    for at, (_, value) in enumerate(told):
        ax.text(value, at, f" {value:.2f} ", va="center", ha="left" if value >= 0 else "right", fontsize=7)
    ax.margins(x=0.2)
    ax.tick_params(length=0)
    return True


def _blank(axes: Any, box: tuple[float, ...], title: str) -> Any:
    x, y, w, h = box
    ax = axes(x, y + 0.22, w, h - 0.3)
    ax.set_title(title)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.patch.set_facecolor("#F6F6F6")
    return ax


def _nothing(ax: Any, looks: Json) -> bool:
    ax.set_xticks([])
    ax.set_yticks([])
    ax.text(0.5, 0.5, looks.get("noValue", "no data in this run"), ha="center", va="center", color=GREY,
            fontsize=9, transform=ax.transAxes)  # fmt: skip
    return False


def _titled(panel: Json, unit: str) -> str:
    words = UNIT_WORDS[unit]
    return f"{panel['title']}{f' [{words}]' if words else ''}"


def _legend(target: Json, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), target.get("legendFormat") or "")


def _colours(n: int) -> list[Any]:
    from matplotlib import colormaps

    few, many = colormaps["tab10"], colormaps["turbo"]
    return [few(k) for k in range(n)] if n <= 10 else [many(0.05 + 0.9 * k / (n - 1)) for k in range(n)]


def _worded(value: float, unit: str, decimals: int | None = None) -> str:
    """Return a value as the dashboard would write it, near enough."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        power = min(int(math.log2(max(value, 1)) / 10), 3)
        return f"{value / 2 ** (10 * power):.3g} {('', 'Ki', 'Mi', 'Gi')[power]}B"
    if unit == "s":
        size = abs(value)
        if size >= 120:
            return f"{value / 60:.3g} min"
        return f"{value:.3g} s" if size >= 1 or not size else f"{1000 * value:.3g} ms"
    if unit == "reqps":
        return f"{value:.3g}/s"
    if decimals is None:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,.{decimals}f}"


def _finite(value: Any) -> Any:
    """Return JSON without NaN."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
