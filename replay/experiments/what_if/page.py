"""Computes what the what-if page, console table and MLflow runs show, and draws the figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reclaim.data.core.style import INK, STYLE
from reclaim.data.core.tables import Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import (
    BY_MACHINE,
    COMPARED,
    REFERENCE,
    Column,
    Results,
    Run,
    measures_memory,
    of_measured,
)
from reclaim.replay.open_loop.estimates import LIMIT
from reclaim.replay.report.figures import estimator_colours
from reclaim.replay.report.page import runs_table

KILLS: Final = "oom_kills_per_1000_task_days"
PENDING: Final = "waiting"
"""Keys of ``outcome.summary`` that have a budget."""
KEPT: Final = 1.25
"""Multiple of a budget of machine peaks up to which it counts as kept: over a few days of a cell, chance alone makes
such differences."""
RECORDED: Final = "recorded_oom_per_1000_task_days"
"""Key of ``outcome.summary`` that no estimator can change."""

COLUMNS: Final = (
    Column("fewest machines", "fewest"),
    Column("of the cell", "fewest_share", percent=True),
    Column("saved", "saved_share", percent=True),
    Column("kills per 1,000 task-days", KILLS),
    Column("waiting", PENDING, percent=True),
    Column("delay p90, s, production", "delay_p90_s_production"),
    Column("other", "delay_p90_s_non_production"),
    Column("throttled batch", "throttled_batch", percent=True),
    Column("memory used", "utilisation_memory", percent=True),
)
_POINT: Final = {
    "machines": "machines",
    "of the cell": "share",
    "kills per 1,000 task-days": KILLS,
    "least per 1,000 in an order": f"{KILLS}_low",
    "most per 1,000": f"{KILLS}_high",
    "above own limit per 1,000": "own_limit_per_1000_task_days",
    "ended so in the trace per 1,000": RECORDED,
    "waiting": PENDING,
    "waiting, production": "waiting_production",
    "delay p90, s, production": "delay_p90_s_production",
    "delay p90, s, other": "delay_p90_s_non_production",
    "preemptions per 1,000 task-days": "preempted_per_1000_task_days",
    "throttled batch": "throttled_batch",
    "throttled latency-sensitive": "throttled_latency_sensitive",
    **{f"{r} peaks passed": f"machines_over_{r}" for r in RESOURCES},
    **{f"{r} passed at once": f"machines_over_at_once_{r}" for r in RESOURCES},
    **{f"{r} used": f"utilisation_{r}" for r in RESOURCES},
    "in reclaimed memory": "in_reclaimed_memory",
    "wasted": "wasted",
}
_NO_SHARES: Final = ("machines", "delay", "per 1,000")
"""Parts of the headings that are not shares."""


def runs(results: Results) -> list[Run]:
    """Return the recorded run of every estimator: the fewest machines that fit, and the outcome on them."""
    without = _fewest(results, LIMIT) if results["asked"]["searched"] else None  # other sizes are unknown
    out = []
    for estimator in results["estimators"]:
        name, margin, fewest = estimator["name"], estimator["margin"], estimator["fewest"]
        there = {k: v for k, v in _at(estimator, fewest).items() if k not in ("machines", "share")}
        out.append(
            Run(
                words={"estimator": name, "margin": margin},
                metrics=of_measured(
                    results,
                    {
                        "fewest": fewest,
                        "fewest_share": None if fewest is None else fewest / results["cell"]["machines"],
                        "saved_share": None if fewest is None or without is None else 1 - fewest / without,
                        **{metric: there.get(metric) for metric in (c.metric for c in COLUMNS[3:])},
                        **there,
                    },
                ),
                tags={"kind": estimator["kind"]},
            )
        )
    return out


def page(results: Results) -> dict[str, Any]:
    """Return the values of ``page.html``."""
    recorded = [p[RECORDED] for e in results["estimators"] for p in e["points"] if p[RECORDED] is not None]
    return {
        "answers": [answer for _, answer in _answers(results)],
        "recorded": (min(recorded), max(recorded)) if recorded else None,
        "summary": summary_table(results),
        "points": {_called(e): _points(e) for e in results["estimators"]},
        "runs": runs_table(runs(results), COLUMNS),
    }


def summary_table(results: Results) -> Table:
    """Return the fewest machines under the best estimator of each kind, Borg's and without reclamation.

    Of estimators with a budget of machine peaks those that kept it come first. Exceeded peaks are those of the resource
    with more of them.
    """
    columns = {"machines": "fewest", "of the cell": "share", "saved": "saved", "kills per 1,000 task-days": KILLS,
               "waiting": PENDING, "peaks passed": "passed", "verdict": "verdict"}  # fmt: skip
    rows = tuple(
        (role, _short(one["name"]) if role in BY_MACHINE else one["name"], one["margin"],
         *map(one.get, columns.values()))
        for role, one in _answers(results)
    )  # fmt: skip
    budgets = "both budgets" if measures_memory(results) else "the budget of waiting"
    caption = f"Fewest machines within {budgets}, of {results['cell']['machines']:,} in the cell"
    return Table(
        ("role", "estimator", "margin", *columns),
        rows,
        frozenset({"of the cell", "saved", "waiting", "peaks passed"}),
        caption,
    )


def _answers(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """Return role and answer of the estimator of each kind with the fewest machines, and of Borg's."""
    every = [_answer(results, e) for e in results["estimators"]]
    ranked = sorted(every, key=lambda one: math.inf if one["fewest"] is None else one["fewest"])
    roles: dict[str, dict[str, Any] | None] = {
        kind: next((one for one in ranked if one["kind"] == kind), None) for kind in COMPARED
    }
    roles["Borg"] = next((one for one in every if one["name"] == REFERENCE), None)
    most = KEPT * results["asked"]["peaks_budget"]
    kept = sorted(ranked, key=lambda one: (one["fewest"] is None, (one["passed"] or 0.0) > most))
    roles |= {kind: next((one for one in kept if one["kind"] == kind), None) for kind in BY_MACHINE}
    roles["no reclamation"] = next((one for one in every if one["kind"] == LIMIT), None)
    shown = {one["name"]: (role, one) for role, one in reversed(roles.items()) if one is not None}
    return list(reversed(shown.values()))


def _answer(results: Results, estimator: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether and on how many machines the workload fits under an estimator, and what happens there."""
    cell, fewest, searched = results["cell"]["machines"], estimator["fewest"], results["asked"]["searched"]
    without = _fewest(results, LIMIT) if searched else None
    there = _at(estimator, fewest) or estimator["points"][-1]  # else the largest cell tried
    fits = fewest is not None and (not searched or fewest <= cell)
    return {
        **{key: estimator[key] for key in ("name", "kind", "margin", "fewest")},
        "tried": there["machines"],
        "share": None if fewest is None else fewest / cell,
        "saved": None if fewest is None or without is None else 1 - fewest / without,
        KILLS: there[KILLS],
        PENDING: there[PENDING],
        "passed": max((share for r in RESOURCES if (share := there[f"machines_over_{r}"]) is not None), default=None),
        "verdict": "fits" if fits else "does not fit",
    }


def _short(name: str) -> str:
    """Return ``reclaim/2`` of ``reclaim/2 (machine)``, and ``reclaim/2, held`` of ``reclaim/2 (machine, held)``."""
    of, _, kind = name.removesuffix(")").rpartition(" (")
    return ", ".join([of, *kind.split(", ")[1:]])


def _points(estimator: Mapping[str, Any]) -> Table:
    rows = tuple(tuple(point[key] for key in _POINT.values()) for point in estimator["points"])
    return Table(tuple(_POINT), rows, percent=frozenset(h for h in _POINT if not any(of in h for of in _NO_SHARES)))


def _called(estimator: Mapping[str, Any]) -> str:
    if estimator["kind"] == LIMIT:
        return "without reclamation"
    return f"{estimator['name']}, {estimator['margin']} margin"


def _fewest(results: Results, name: str) -> int | None:
    found: int | None = next(e["fewest"] for e in results["estimators"] if e["name"] == name)
    return found


def _at(estimator: Mapping[str, Any], machines: int | None) -> Mapping[str, float | None]:
    return next((p for p in estimator["points"] if p["machines"] == machines), {})


_GREY: Final = "#777777"


def against_machines(results: Results) -> Figure:
    """Draw tasks killed and task-time spent waiting on every number of machines tried, with the range of the orders.

    A large mark is the fewest machines that fit. Contenders with a budget of machine peaks have squares.
    """
    asked, cell = results["asked"], results["cell"]["machines"]
    colours = estimator_colours(results)
    with mpl.rc_context(STYLE):
        panels = (
            (KILLS, 1.0, asked["oom_budget"], "Tasks killed out of memory", "per 1,000 task-days"),
            (PENDING, 100.0, asked["pending_budget"], "Task-time spent waiting for a machine", "%"),
        )[0 if measures_memory(results) else 1 :]
        figure = Figure(figsize=(9.5, 3.3 * len(panels)), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (key, unit, budget, title, label) in zip(axes, panels, strict=True):
            for estimator in results["estimators"]:
                limit, by_machine = estimator["kind"] == LIMIT, estimator["kind"] in BY_MACHINE
                colour, marker = _GREY if limit else colours[estimator["name"]], "s" if by_machine else "o"
                dashes = (0, (4, 2)) if limit else (0, (6, 1.5, 1, 1.5)) if by_machine else "-"
                points = [(p["machines"], unit * p[key], p) for p in estimator["points"] if p[key] is not None]
                name = "no reclamation" if limit else f"{estimator['name']}, {estimator['margin']}"
                ax.plot(
                    [x for x, _, _ in points], [y for _, y, _ in points], color=colour, linewidth=1.9, marker=marker,
                    markersize=3.5, linestyle=dashes, label=name,
                )  # fmt: skip
                for x, y, p in points:
                    ax.vlines(x, unit * p[f"{key}_low"], unit * p[f"{key}_high"], color=colour, linewidth=0.9)
                    if x == estimator["fewest"]:
                        ax.plot(x, y, marker, color=colour, markersize=9, markeredgecolor="white", zorder=4)
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
        columns = max(1, min(len(labels), 4, 148 // (max(map(len, labels), default=0) + 9)))  # as many as fit
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, fontsize=9)
    return figure
