"""What the page of the what-if experiment says, its parts, and what goes on record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from reclaim.data.schema import RESOURCES
from reclaim.data.table import Table
from reclaim.replay.folded import LIMIT
from reclaim.replay.kinds import Column, Results, Run, Section
from reclaim.replay.report import runs_table

KILLS: Final = "oom_kills_per_1000_task_days"
PENDING: Final = "waiting"
"""The two of ``outcome.summary`` that are budgeted."""
RECORDED: Final = "recorded_oom_per_1000_task_days"
"""The one that no estimator can change."""

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
    "above own limit per 1,000": "own_limit_per_1000_task_days",
    "ended so in the trace per 1,000": RECORDED,
    "waiting": PENDING,
    "waiting, production": "waiting_production",
    "delay p90, s, production": "delay_p90_s_production",
    "delay p90, s, other": "delay_p90_s_non_production",
    "preemptions per 1,000 task-days": "preempted_per_1000_task_days",
    "throttled batch": "throttled_batch",
    "throttled latency-sensitive": "throttled_latency_sensitive",
    **{f"{r} used": f"utilisation_{r}" for r in RESOURCES},
    "in reclaimed memory": "in_reclaimed_memory",
    "wasted": "wasted",
}
_NO_SHARES: Final = ("machines", "delay", "per 1,000")
"""What stands in the headings that are no shares."""


def runs(results: Results) -> list[Run]:
    """Return what goes on record of every estimator: the fewest machines that fit, and what happens on them."""
    without = _fewest(results, LIMIT) if results["asked"]["searched"] else None  # of numbers named the rest is unknown
    out = []
    for estimator in results["estimators"]:
        name, margin, fewest = estimator["name"], estimator["margin"], estimator["fewest"]
        there = {k: v for k, v in _at(estimator, fewest).items() if k not in ("machines", "share")}
        out.append(
            Run(
                name=name if margin == "none" else f"{name}/{margin}",
                words={"estimator": name, "margin": margin},
                metrics={
                    "fewest": fewest,
                    "fewest_share": None if fewest is None else fewest / results["cell"]["machines"],
                    "saved_share": None if fewest is None or without is None else 1 - fewest / without,
                    **{metric: there.get(metric) for metric in (c.metric for c in COLUMNS[3:])},
                    **there,
                },
                tags={"kind": estimator["kind"]},
            )
        )
    return out


def says(results: Results) -> list[str]:
    """Return the answers: on how many machines the workload fits, first under the first estimator."""
    asked = results["asked"]
    recorded = [p[RECORDED] for e in results["estimators"] for p in e["points"] if p[RECORDED] is not None]
    counts = list(dict.fromkeys(_number(of(recorded)) for of in (min, max))) if recorded else ["none"]
    budgets = (
        f"A workload fits where the replay kills at most {asked['oom_budget']:g} tasks per 1,000 task-days for want of "
        f"memory and at most {_percent(asked['pending_budget'])} of the task-time is spent waiting; runs that the "
        f"trace itself ended out of memory ({' to '.join(counts)} per 1,000 task-days under all) are not counted."
    )
    return [*(_answer(results, e) for e in results["estimators"]), budgets]


def judged(_: Results) -> str:
    """Say what is run, and under which reservations."""
    return (
        "Margins are set on the validation period. The workload of the later test period is then run anew in a closed "
        "loop, each reservation made from the past of the trace's own task alone, and every number below is what "
        "became of the tasks there."
    )


def sections(results: Results) -> list[Section]:
    """Return the parts of the page."""
    return [
        Section(
            "Kills and waiting against machines",
            figure="against_machines",
            caption=(
                "The closed loop on smaller and larger cells: dashed lines are the budgets, large marks the fewest "
                "machines tried that keep both. All machines are the trace's own cell; where the curves begin to rise "
                "to the left is where it has no more to give."
            ),
            table=runs_table(runs(results), COLUMNS),
        ),
        *(
            Section(f"Every size tried, {_called(e)}", table=_points(e))
            for e in results["estimators"]
        ),
    ]  # fmt: skip


def _answer(results: Results, estimator: Mapping[str, Any]) -> str:
    """Say whether and where the workload fits under an estimator, and how many machines that saves."""
    cell, growth = results["cell"]["machines"], results["asked"]["growth"]
    workload = "The workload" if growth == 1 else f"{growth:g} times the workload"
    under, fewest = _called(estimator), estimator["fewest"]
    searched = results["asked"]["searched"]
    if fewest is None:
        most = estimator["points"][-1]
        fits = "does not fit" if searched else "fits on none of the numbers of machines tried"
        return (
            f"{workload} {fits} {under}: even on {most['machines']} machines (the cell has {cell}) "
            f"{_number(most[KILLS])} tasks per 1,000 task-days are killed and {_percent(most[PENDING])} of the "
            "task-time is spent waiting."
        )
    there = _at(estimator, fewest)
    happens = (
        f"{_number(there[KILLS])} kills per 1,000 task-days and {_percent(there[PENDING])} of the task-time spent "
        "waiting"
    )
    if not searched:
        tried = " the fewest of those tried," if len(estimator["points"]) > 1 else ""
        return f"{workload} fits on {fewest} machines {under} (the cell has {cell}),{tried} with {happens}."
    fits = "fits" if fewest <= cell else "does not fit"
    text = (
        f"{workload} {fits} the cell's {cell} machines {under}: it needs {fewest}, {_percent(fewest / cell)} of them, "
        f"with {happens}"
    )
    without = _fewest(results, LIMIT)
    if estimator["kind"] == LIMIT:
        return text + "."
    if without is None:
        return text + "; without reclamation it fits on no number tried."
    words = f"{without - fewest} fewer" if without >= fewest else f"{fewest - without} more"
    return text + f"; that is {words} than the {without} that it needs without reclamation."


def _points(estimator: Mapping[str, Any]) -> Table:
    rows = tuple(tuple(point[key] for key in _POINT.values()) for point in estimator["points"])
    return Table(tuple(_POINT), rows, percent=frozenset(h for h in _POINT if not any(of in h for of in _NO_SHARES)))


def _called(estimator: Mapping[str, Any]) -> str:
    if estimator["kind"] == LIMIT:
        return "without reclamation"
    return f"under `{estimator['name']}` at the {estimator['margin']} margin"


def _fewest(results: Results, name: str) -> int | None:
    found: int | None = next(e["fewest"] for e in results["estimators"] if e["name"] == name)
    return found


def _at(estimator: Mapping[str, Any], machines: int | None) -> Mapping[str, float | None]:
    return next((p for p in estimator["points"] if p["machines"] == machines), {})


def _number(value: float | None) -> str:
    return "no" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2f} %"
