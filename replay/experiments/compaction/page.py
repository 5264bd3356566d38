"""Computes what the compaction page, console table and MLflow runs show."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import sqrt
from typing import Any, Final

from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import (
    BY_MACHINE,
    COMPARED,
    HEADLINE,
    LEARNED_MACHINE,
    ORACLE,
    REFERENCE,
    Column,
    Results,
    Run,
    of_measured,
    rests_on,
)
from reclaim.replay.open_loop.estimates import LIMIT
from reclaim.replay.report.page import runs_table
from reclaim.training.margins.margin import MARGIN_NAMES

COLUMNS: Final = (
    Column("machines", "machines"),
    Column("of the cell", "machines_share", percent=True),
    Column("saved", "saved_share", percent=True),
    Column("out of memory", "over_memory", percent=True),
    Column("over CPU", "over_cpu", percent=True),
    Column("machines beyond, memory", "passed_memory", percent=True),
    Column("machines beyond, CPU", "passed_cpu", percent=True),
    Column("tasks beyond, memory", "beyond_memory", percent=True),
    Column("tasks beyond, CPU", "beyond_cpu", percent=True),
    Column("memory used", "used_memory", percent=True),
    Column("CPU used", "used_cpu", percent=True),
)
_CAPTION: Final = f"Fewest machines at the {HEADLINE} margin, Borg's estimator and the oracle"
CHANCE: Final = 2.0
"""Standard deviations by which two estimators must differ in the tasks that only one of them fails, for one to risk
more (McNemar's test: the deviation is the square root of the number of such tasks)."""
SAME_SHARE: Final = 0.005
"""Share of the machines by which two estimators may differ and count as equal: one of 200 machines."""


def runs(results: Results) -> list[Run]:
    """Return the recorded run of every estimator at every margin."""
    return [
        Run(
            words={"estimator": name, "margin": margin},
            metrics=of_measured(
                results,
                {
                    "machines": one["machines"]["value"],
                    "machines_share": one["share"]["value"],
                    "machines_share_low": one["share"]["low"],
                    "machines_share_high": one["share"]["high"],
                    "saved_share": one["saved_share"],
                    "additional_share": one["additional_share"],
                    **{f"{key}_{r}": one[key][r]["value"] for key in ("over", "passed", "used") for r in RESOURCES},
                    **{f"beyond_{r}": one["beyond"][r] for r in RESOURCES},
                },
            ),
            tags={"kind": kind},
        )
        for name, kind, margin, one in _contenders(results)
    ]


def page(results: Results) -> dict[str, Any]:
    """Return the values of ``page.html``."""
    return {
        "margin": HEADLINE,
        "kinds": COMPARED,
        "by_machine_kinds": BY_MACHINE,
        "answers": answers(results),
        "tasks": sum(c["tasks"] for c in results["checkpoints"]),
        "copies": max(c["clones"] for c in results["checkpoints"]),
        "summary": summary_table(results),
        "fewest": fewest_table(results),
        "by_machine": by_machine_table(results),
        "runs": runs_table(runs(results), COLUMNS),
        "unexpected": unexpected(results),
        "checkpoints": _checkpoints(results),
        "needed": _each_checkpoint(results),
    }


def summary_table(results: Results) -> Table:
    """Return machines needed without reclamation, by the best of each kind at ``HEADLINE``, Borg's and the oracle."""
    columns = ("role", "estimator", "machines", "of the cell", "saved", "machines out of memory",
               "tasks beyond, memory", f"compared with {REFERENCE}")  # fmt: skip
    rows = tuple(
        (role, rests_on(name) if role in BY_MACHINE else name, *_needed(one), one["over"]["memory"]["value"],
         one["beyond"]["memory"], verdict)
        for role, name, one, verdict in answers(results)
    )  # fmt: skip
    return Table(columns, rows, frozenset(columns[3:7]), _CAPTION)


def answers(results: Results) -> list[tuple[str, str, Mapping[str, Any], str | None]]:
    """Return role, name, results and verdict of what the console and the large figures show."""
    found: list[tuple[str, str, Mapping[str, Any], str | None]] = [
        ("no reclamation", LIMIT, _of(results, LIMIT)["none"], None)
    ]
    at = {name: (kind, one) for name, kind, margin, one in _contenders(results) if margin == HEADLINE}
    reference = at.get(REFERENCE, (None, None))[1]
    for kind in (*COMPARED, *BY_MACHINE):
        mine = {name: one for name, (of, one) in at.items() if of == kind}
        if mine:
            name = min(mine, key=lambda n: _rank(mine[n]))
            found.append((kind, name, mine[name], risk_verdict(mine[name], reference, tasks=kind in COMPARED)))
    if reference is not None and all(name != REFERENCE for _, name, *_ in found):
        found.append(("Borg", REFERENCE, reference, None))
    return [*found, (ORACLE, ORACLE, _of(results, ORACLE)["none"], None)]


def fewest_table(results: Results) -> Table:
    """Return at each margin the fewest machines, the fewest at no more risk than under Borg's estimator, and Borg's.

    The trials compare the same orders of removal with Borg's estimator.
    """
    tasks = sum(c["tasks"] for c in results["checkpoints"])
    rows: list[tuple[Cell, ...]] = []
    for margin in MARGIN_NAMES:
        found = {name: one for name, kind, m, one in _contenders(results) if m == margin and kind in COMPARED}
        reference = found.get(REFERENCE)
        safe = {n: one for n, one in found.items() if reference is not None and _no_riskier(one, reference)}
        for role, of in (("fewest", found), ("fewest at no more risk", safe)):
            if of:
                name = min(of, key=lambda n: _rank(of[n]))
                rows.append(_row(margin, role, name, of[name], reference, tasks))
        if reference is not None:
            rows.append(_row(margin, "Borg", REFERENCE, reference, None, tasks))
    columns = ("margin", "role", "estimator", "machines", "of the cell", "saved",
               *(f"machines out of {RESOURCE_WORDS[r]}" for r in RESOURCES),
               *(f"tasks beyond, {RESOURCE_WORDS[r]}" for r in RESOURCES), "of the tasks", "trials with fewer",
               "trials with more", "trials", f"compared with {REFERENCE}")  # fmt: skip
    return Table(columns, tuple(rows), frozenset(columns[4 : 6 + len(RESOURCES)]))


def by_machine_table(results: Results) -> Table:
    """Return the contenders that keep a budget of machine peaks, at each budget the fewest machines first.

    The trials compare the same orders of removal with the first model's estimator of machines.
    """
    rows: list[tuple[Cell, ...]] = []
    for margin in MARGIN_NAMES:
        found = [(name, kind, one) for name, kind, m, one in _contenders(results) if m == margin and kind in BY_MACHINE]
        model = next((one for _, kind, one in found if kind == LEARNED_MACHINE), None)
        for name, kind, one in sorted(found, key=lambda of: _rank(of[2])):
            trials = (None, None, None) if model in (None, one) else _paired(one, model)
            risks = (one[key][r]["value"] for key in ("passed", "over") for r in RESOURCES)
            rows.append((margin, kind, name, *_needed(one), *risks, *trials))
    columns = ("budget of", "role", "estimator", "machines", "of the cell", "saved",
               *(f"machines beyond, {RESOURCE_WORDS[r]}" for r in RESOURCES),
               *(f"machines out of {RESOURCE_WORDS[r]}" for r in RESOURCES),
               "trials with fewer", "trials with more", "trials")  # fmt: skip
    return Table(columns, tuple(rows), frozenset(columns[4 : 6 + 2 * len(RESOURCES)]))


def _row(
    margin: str, role: str, name: str, one: Mapping[str, Any], reference: Mapping[str, Any] | None, tasks: int
) -> tuple[Cell, ...]:
    trials = (None, None, None) if reference is None else _paired(one, reference)
    return (margin, role, name, *_needed(one), *(one["over"][r]["value"] for r in RESOURCES),
            *(one["beyond_tasks"][r] if one["beyond"][r] is not None else None for r in RESOURCES), tasks, *trials,
            risk_verdict(one, reference))  # fmt: skip


def _needed(one: Mapping[str, Any]) -> tuple[Cell, ...]:
    return one["machines"]["value"], one["share"]["value"], one["saved_share"]


def risk_verdict(one: Mapping[str, Any], reference: Mapping[str, Any] | None, *, tasks: bool = True) -> str | None:
    """Return whether one risks more than the reference beyond chance; None without a reference.

    Without ``tasks`` machines alone are judged.
    """
    if reference is None:
        return None
    return "no more risk" if _no_riskier(one, reference, tasks=tasks) else "more risk"


def _paired(one: Mapping[str, Any], reference: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the number of trials in which one needs fewer machines than the reference, more, and of all."""
    pairs = [
        (mine, theirs)
        for at, of in zip(one["checkpoints"], reference["checkpoints"], strict=True)
        for mine, theirs in zip(at["trials"], of["trials"], strict=True)
    ]
    return sum(a < b for a, b in pairs), sum(a > b for a, b in pairs), len(pairs)


def unexpected(results: Results) -> Table:
    """Return the estimators whose narrower margin does not need fewer machines, or does not risk more."""
    rows: list[tuple[Cell, ...]] = []
    for e in results["estimators"]:
        if e["kind"] in COMPARED:
            of = [e["results"][m] for m in MARGIN_NAMES]
            more = any(a["share"]["value"] < b["share"]["value"] for a, b in pairwise(of))
            safer = any(a["over"]["memory"]["value"] > b["over"]["memory"]["value"] for a, b in pairwise(of))
            if more or safer:
                rows.append((e["name"], "yes" if more else "no", "yes" if safer else "no"))
    return Table(("estimator", "needs more machines at a narrower margin",
                  "has fewer machines out of memory at a narrower margin"), tuple(rows))  # fmt: skip


def _checkpoints(results: Results) -> Table:
    columns = ("hours into the test period", "tasks", "production", "constrained", "picky", "left out", "machines",
               "copies of the cell", *(f"no {RESOURCE_WORDS[r]} limit" for r in RESOURCES),
               *(f"{RESOURCE_WORDS[r]} limits of capacity" for r in RESOURCES))  # fmt: skip
    keys = ("hours", "tasks", "production", "constrained", "picky", "too_large", "machines", "clones")
    rows = tuple(
        (*(c[key] for key in keys), *(c["tasks"] - c["limit_known"][r] for r in RESOURCES), *c["limit_share"].values())
        for c in results["checkpoints"]
    )
    return Table(columns, rows, percent=frozenset(columns[-len(RESOURCES) :]))


def _each_checkpoint(results: Results) -> Table:
    hours = [f"after {c['hours']:.0f} h" for c in results["checkpoints"]]
    columns = ("estimator", "margin", *(f"{h}{of}" for h in hours for of in ("", ", least", ", most")))
    rows = tuple(
        (name, margin, *(at["machines"][key] for at in one["checkpoints"] for key in ("value", "low", "high")))
        for name, _, margin, one in _contenders(results)
    )
    return Table(columns, rows)


def _contenders(results: Results) -> list[tuple[str, str, str, Mapping[str, Any]]]:
    """Return name, kind, margin and results of every contender."""
    return [(e["name"], e["kind"], margin, one) for e in results["estimators"] for margin, one in e["results"].items()]


def _of(results: Results, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(e["results"] for e in results["estimators"] if e["name"] == name)
    return found


def _rank(one: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the order of the estimators: fewer machines first, then less risk."""
    over, beyond = ([one[key][r] for r in RESOURCES[::-1]] for key in ("over", "beyond"))
    return one["share"]["value"], *(of["value"] for of in over), *(share or 0.0 for share in beyond)


def _no_riskier(one: Mapping[str, Any], reference: Mapping[str, Any], *, tasks: bool = True) -> bool:
    """Return whether one fails no more tasks than the reference beyond chance, nor machines beyond ``SAME_SHARE``."""
    for r in RESOURCES:
        if tasks:
            mine, its = one["beyond_alone"][r]
            if mine - its > CHANCE * sqrt(mine + its):
                return False
        if one["over"][r]["value"] - reference["over"][r]["value"] > SAME_SHARE:
            return False
    return True
