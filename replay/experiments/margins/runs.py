"""Defines the recorded runs of the margins experiment, one per estimator and margin, and their columns in tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from reclaim.data.core.nested import flatten
from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import Column, Results, Run, of_measured
from reclaim.replay.open_loop.paired import RECLAIMED, VIOLATION

_SHOWN: Final = {"reclaimed": RECLAIMED, "violation": VIOLATION, "of oracle": "efficiency"}


def _columns(subset: str) -> tuple[Column, ...]:
    return tuple(
        Column(f"{RESOURCE_WORDS[r]} {heading}", f"{subset}{r}.{metric}", percent=True)
        for r in RESOURCES
        for heading, metric in _SHOWN.items()
    )


COLUMNS: Final = (
    *_columns(""),
    Column("would-be OOM", "oom.events"),
    Column("CPU in reclaimed", "closed_loop.in_reclaimed_cpu", percent=True),
    Column("OOM kills / 1,000 task-days", "closed_loop.oom_kills_per_1000_task_days"),
)
UNSEEN_COLUMNS: Final = _columns("unseen.")
"""The same only for collections kept for the test; without events, which are of whole machines."""


def runs(results: Results) -> list[Run]:
    """Return a run of each estimator and margin, in the order of the results, then those of the closed loop alone."""
    in_cells = results.get("closed_loop", {}).get("estimators", ())
    ran = {e["name"]: e["runs"] for e in in_cells}
    judged = {e["name"] for e in results["estimators"]}
    found = [
        _run(
            estimator,
            margin,
            measured,
            results["against_best"].get(margin, {}).get(estimator["name"], {}),
            results.get("against_first", {}).get(margin, {}).get(estimator["name"], {}),
            ran.get(estimator["name"], {}).get(margin),
            results.get("settings", {}).get(estimator["name"], {}).get(margin, {}),
        )
        for estimator in results["estimators"]
        for margin, measured in estimator["results"].items()
    ] + [
        Run(
            words={"estimator": one["name"], "margin": margin},
            metrics=dict.fromkeys((c.metric for c in COLUMNS), None) | flatten({"closed_loop": summary}),
            tags={"kind": one["kind"]},
        )
        for one in in_cells
        if one["name"] not in judged
        for margin, summary in one["runs"].items()
    ]
    return [replace(run, metrics=of_measured(results, run.metrics)) for run in found]


def _run(
    estimator: Mapping[str, Any],
    margin: str,
    measured: Mapping[str, Any],
    best: Mapping[str, Mapping[str, Any]],
    first: Mapping[str, Mapping[str, Any]],
    ran: Mapping[str, float | None] | None,
    settings: Mapping[str, Any],
) -> Run:
    closed_loop = ran or {"in_reclaimed_cpu": None, "oom_kills_per_1000_task_days": None}
    numbers: dict[str, Any] = {"oom": measured["oom"], "closed_loop": closed_loop}
    for r in RESOURCES:
        numbers[r] = _with_bounds(measured["all"], r)
        numbers[f"unseen.{r}"] = {metric: of[r]["value"] for metric, of in measured["unseen"].items()}
    compared = {f"against_best.{r}": (r, of) for r, of in best.items()}
    compared |= {f"against_first.{r}": (r, of) for r, of in first.items()}
    compared |= {
        f"at_equal_violation.{r}": (r, of["at_equal_violation"])
        for r, of in best.items()
        if of["at_equal_violation"] is not None
    }
    for key, (r, of) in compared.items():
        numbers[key] = _with_bounds({m: {r: of[m]} for m in (RECLAIMED, VIOLATION)}, r)
    verdicts = {key: f"{of['verdict']}, against {of['against']}" for key, (_, of) in compared.items()}
    return Run(
        words={"estimator": estimator["name"], "margin": margin},
        metrics=flatten(numbers),
        params={
            "margin_share": estimator["margins"].get(margin, {}),
            "price": estimator["prices"].get(margin, {}),
            "settings": settings,
        },
        tags={"kind": estimator["kind"], **verdicts},
    )


def _with_bounds(metrics: Mapping[str, Any], resource: str) -> dict[str, float | None]:
    """Return the value of every metric by its name, and its bounds as ``<name>_low`` and ``<name>_high``."""
    numbers: dict[str, float | None] = {}
    for metric, of in metrics.items():
        interval = of[resource]
        numbers |= {metric: interval["value"], f"{metric}_low": interval["low"], f"{metric}_high": interval["high"]}
    return numbers
