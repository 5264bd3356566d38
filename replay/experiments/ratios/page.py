"""Computes what the ratios page, console table and MLflow runs show, and draws the figure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from reclaim.data.core.style import INK, RESOURCE_TITLES, RESOURCE_WORDS, STYLE
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import COMPARED, HEADLINE, ORACLE, REFERENCE, Column, Results, Run, judged
from reclaim.replay.report.figures import estimator_colours, numbers

SHOWN_UP_TO: Final = 1.3
"""Share of the limit at which the figure's axis ends, so that tasks far over their limit do not flatten the others."""
_SHOWN: Final = {"median": "median", "mean gap": "gap", "ever over": "over"}

_CAPTION: Final = f"Closest to usage at the {HEADLINE} margin, Borg's estimator and the oracle"

COLUMNS: Final = tuple(
    Column(f"{RESOURCE_WORDS[r]} {heading}", f"{r}.{key}", percent=True)
    for r in RESOURCES
    for heading, key in _SHOWN.items()
)


def page(results: Results) -> dict[str, Any]:
    """Return the values of ``page.html``."""
    return {
        "margin": HEADLINE,
        "best": {r: [one for kind in COMPARED if (one := narrowest(results, r, kind))] for r in judged(results)},
        "shown_up_to": SHOWN_UP_TO,
        "summary": summary_table(results),
        "spread": {RESOURCE_TITLES[r]: spread_table(results, r) for r in judged(results)},
    }


def narrowest(results: Results, resource: str, kind: str) -> dict[str, Any] | None:
    """Return the estimator of a kind whose reservations lie closest above usage at ``HEADLINE``; None without one."""
    found = (
        {"name": e["name"], "kind": kind, **e["margins"][HEADLINE][resource]}
        for e in results["estimators"]
        if e["kind"] == kind and HEADLINE in e["margins"]
    )
    return min((one for one in found if one["gap"] is not None), key=lambda one: one["gap"], default=None)


def summary_table(results: Results) -> Table:
    """Return, of each resource, usage, the closest learned and statistical estimator, Borg's and the oracle."""
    rows: list[tuple[Cell, ...]] = []
    by_name = {e["name"]: e["margins"] for e in results["estimators"]}
    for r in judged(results):
        found = {kind: one for kind in COMPARED if (one := narrowest(results, r, kind))}
        if REFERENCE in by_name and all(one["name"] != REFERENCE for one in found.values()):
            found["Borg"] = {"name": REFERENCE, **by_name[REFERENCE][HEADLINE][r]}
        found = {
            "usage": {"name": None, **results["usage"][r]},
            **found,
            ORACLE: {"name": ORACLE, **results[ORACLE][r]},
        }
        rows += [(RESOURCE_WORDS[r], role, one["name"], one["median"], one["mean"], one.get("gap"), one.get("over"))
                 for role, one in found.items()]  # fmt: skip
    shares = ("median", "mean", "mean gap", "ever over")
    return Table(("resource", "role", "estimator", *shares), tuple(rows), frozenset(shares), _CAPTION)


def console_table(results: Results) -> Table:
    """Return the summary without usage, for a console of 80 columns."""
    table = summary_table(results).without("mean")
    return replace(table, rows=tuple(row for row in table.rows if row[1] != "usage"))


def spread_table(results: Results, resource: str) -> Table:
    """Return quartiles, the gap to usage and the tasks ever over, of every estimator and margin."""
    columns = ("quarter", "median", "three quarters", "mean", "mean gap", "ever over")
    keys = ("q25", "median", "q75", "mean", "gap", "over")
    rows: list[tuple[Cell, ...]] = [("usage", None, *(results["usage"][resource].get(key) for key in keys))]
    for estimator in results["estimators"]:
        for margin, of in estimator["margins"].items():
            rows.append((estimator["name"], margin, *(of[resource][key] for key in keys)))
    rows.append(("oracle", None, *(results["oracle"][resource][key] for key in keys)))
    return Table((RESOURCE_TITLES[resource], "margin", *columns), tuple(rows), frozenset(columns))


def runs(results: Results) -> list[Run]:
    """Return a run of each estimator and margin."""
    return [
        Run(
            {"estimator": estimator["name"], "margin": margin},
            {f"{r}.{key}": of[r][key] for r in RESOURCES for key in ("q25", "median", "q75", "mean", "gap", "over")},
            tags={"kind": estimator["kind"]},
        )
        for estimator in results["estimators"]
        for margin, of in estimator["margins"].items()
    ]


_USAGE: Final = "#8A8A8A"
MARGIN_DASHES: Final[dict[str, Any]] = {"baseline": "-", "medium": (0, (5, 1.5)), "aggressive": (0, (1.2, 1.2))}


def ratios_of_tasks(results: Results) -> Figure:
    """Draw Borg's CDFs (EuroSys'15, Figure 11): usage, the drawn estimators at each margin, and the limit."""
    levels = np.array(results["levels"])
    drawn = [e for e in results["estimators"] if e["drawn"]]
    colours = estimator_colours(results)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 5.0), layout="constrained")
        shown = judged(results)
        for resource, ax in zip(shown, figure.subplots(1, len(shown), squeeze=False)[0], strict=True):
            ax.plot(numbers(results["usage"][resource]["quantiles"]), levels, color=_USAGE, linewidth=3.0)
            for estimator in drawn:
                for margin, of in estimator["margins"].items():
                    ax.plot(
                        numbers(of[resource]["quantiles"]), levels, color=colours[estimator["name"]], linewidth=1.8,
                        linestyle=MARGIN_DASHES[margin],
                    )  # fmt: skip
            ax.axvline(1.0, color=INK, linewidth=1.4, linestyle=(0, (4, 2)))
            ax.set_xlim(0, SHOWN_UP_TO)
            ax.set_ylim(0, 1.0)
            ax.xaxis.set_major_formatter(PercentFormatter(1.0))
            ax.yaxis.set_major_formatter(PercentFormatter(1.0))
            ax.set_title(RESOURCE_TITLES.get(resource, resource))
            ax.set_xlabel("share of the limit")
            ax.set_ylabel("tasks with at most as much" + ("" if results["alike"] else ", by time"))
        handles: list[Any] = [Line2D([], [], color=_USAGE, linewidth=3.0, label="usage")]
        handles += [
            Line2D([], [], color=colours[e["name"]], linewidth=1.8, label=f"reservation, {e['name']}") for e in drawn
        ]
        handles += [
            Line2D([], [], color="#555555", linewidth=1.8, linestyle=dashes, label=margin)
            for margin, dashes in MARGIN_DASHES.items()
        ]
        handles.append(Line2D([], [], color=INK, linewidth=1.4, linestyle=(0, (4, 2)), label="limit"))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9)
    return figure
