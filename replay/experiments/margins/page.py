"""Computes what the margins page and console table show: the best estimators, their differences, rates of events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from reclaim.data.core.prose import interval
from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import (
    BY_MACHINE,
    COMPARED,
    HEADLINE,
    LEARNED,
    ONLINE,
    ORACLE,
    REFERENCE,
    STATISTICAL,
    Results,
    rests_on,
)
from reclaim.replay.experiments.margins import tables
from reclaim.replay.experiments.margins.following import following_table, parts_table
from reclaim.replay.experiments.margins.models import models_table
from reclaim.replay.experiments.margins.money import money_table
from reclaim.replay.experiments.margins.runs import COLUMNS, UNSEEN_COLUMNS, runs
from reclaim.replay.open_loop.paired import ALONE, BETTER, EXCEEDS, RECLAIMED, VIOLATION, WORSE
from reclaim.replay.report.page import brief, runs_table
from reclaim.training.margins.margin import MARGIN_NAMES

EQUAL: Final = "at equal violation"
"""Heading of the verdict where both violate exactly the budget."""
_CAPTION: Final = f"Best of each kind, {HEADLINE} margin; verdict against the best statistical one"
_RANK: Final = {BETTER: 0, ALONE: 0, WORSE: 2, EXCEEDS: 3}
"""Order of the verdicts when the best estimator is chosen; the others lie between."""


def page(results: Results) -> dict[str, Any]:
    """Return the values of ``page.html``."""
    recorded, loop = runs(results), results.get("closed_loop")
    return {
        "margin": HEADLINE,
        "best": {r: best(results, HEADLINE, r) for r in RESOURCES},
        "reclaiming": in_reclaimed(results) if loop else None,
        "summary": summary_table(results),
        "comparisons": comparisons(results),
        "models": models_table(results),
        "runs": runs_table(recorded, COLUMNS),
        "unseen": runs_table([run for run in recorded if run.tags["kind"] not in BY_MACHINE], UNSEEN_COLUMNS),
        "sequence": tables.sequence_table(results),
        "orders": orders(results),
        "tiers": tables.split_table(results, "tiers", "medium"),
        "ages": tables.split_table(results, "ages", "medium"),
        "detail": tables.detail_table(results),
        "margins": tables.margins_table(results),
        "following": following_table(results),
        "following_parts": parts_table(results),
        "money": money_table(results),
        "cell": loop,
        "cells": tables.cells_table(loop) if loop else None,
        "by_part": tables.parts_table(loop) if loop else None,
        "kills": tables.kills_table(loop) if loop else None,
        "waiting": tables.waiting_table(loop) if loop else None,
    }


def best(results: Results, margin: str, resource: str) -> list[dict[str, Any]]:
    """Return the best estimator of a resource at a margin, and the opponent it is compared with, where there is one.

    The best is learned where a learned one was replayed: of those with the best verdict against the statistical ones,
    the one that reclaims most. Where models follow outcomes, as a service does, only that variant is shown: which of
    the two does better on the test is not known beforehand.
    """
    differences = results["against_best"].get(margin, {})
    shown = [s for e in results["estimators"] if (s := _standing(e, margin, resource, differences)) is not None]
    kinds = {one["kind"] for one in shown}
    kind = LEARNED if LEARNED in kinds else STATISTICAL
    ours = [one for one in shown if one["kind"] == kind]
    ours = [one for one in ours if kind == LEARNED and one["name"].endswith(ONLINE)] or ours
    ranked = sorted(
        ours,
        key=lambda one: (_RANK.get(one["verdict"], 1), -one["reclaimed"]["value"]),
    )
    first = ranked[:1]
    against = next((one for one in shown if first and one["name"] == first[0]["against"]), None)
    return first if against is None else [*first, against]


def summary_table(results: Results) -> Table:
    """Return, of each resource, the best estimator at ``HEADLINE``, its opponent, Borg's and the oracle."""
    rows: list[tuple[Cell, ...]] = []
    differences = results["against_best"].get(HEADLINE, {})
    by_name = {e["name"]: e for e in results["estimators"]}
    for resource in RESOURCES:
        found = best(results, HEADLINE, resource)
        for i, one in enumerate(found):
            again = i > 0 and one["kind"] == found[0]["kind"]
            rows.append(_row("next best" if again else one["kind"], resource, one))
        for role, name, margin in (("Borg", REFERENCE, HEADLINE), (ORACLE, ORACLE, "none")):
            shown = _standing(by_name[name], margin, resource, differences) if name in by_name else None
            if shown is not None and all(shown["name"] != other["name"] for other in found):
                rows.append(_row(role, resource, shown))
    columns = ("resource", "role", "estimator", "reclaimed", "interval", "violation", "compared with", "verdict",
               EQUAL)  # fmt: skip
    return Table(columns, tuple(rows), frozenset({"reclaimed", "violation"}), _CAPTION)


def comparisons(results: Results) -> Table:
    """Return the paired difference of every estimator to the best statistical other one."""
    measured = {e["name"]: e["results"] for e in results["estimators"]}
    rows: list[tuple[Cell, ...]] = [
        (
            margin, RESOURCE_WORDS[r], name,
            *(measured[name][margin]["all"][metric][r]["value"] for metric in (RECLAIMED, VIOLATION)), of["against"],
            *(part for metric in (RECLAIMED, VIOLATION) for part in (of[metric]["value"], interval(of[metric]))),
            of["verdict"], *_at_equal(of["at_equal_violation"]),
        )
        for margin, differences in results["against_best"].items()
        for r in RESOURCES
        for name, by_resource in differences.items()
        if (of := by_resource.get(r)) is not None
    ]  # fmt: skip
    columns = ("margin", "resource", "estimator", "reclaimed", "violation", "compared with", "reclaimed, difference",
               "interval", "violation, difference", "its interval", "verdict", f"{EQUAL}, with",
               f"reclaimed {EQUAL}", f"interval {EQUAL}", EQUAL)  # fmt: skip
    shares = frozenset({"reclaimed", "violation", "reclaimed, difference", "violation, difference",
                         f"reclaimed {EQUAL}"})  # fmt: skip
    return Table(columns, tuple(rows), shares)


def _at_equal(of: Mapping[str, Any] | None) -> tuple[Cell, ...]:
    """Return opponent, difference of what is reclaimed, its interval and the verdict, at equal violation."""
    if of is None:
        return None, None, None, None
    return of["against"], of[RECLAIMED]["value"], interval(of[RECLAIMED]), of["verdict"]


def orders(results: Results) -> Table:
    """Return memory events a day at each margin, within the sequence and throughout, and whether they rise."""
    timeline = results["timeline"]
    kinds = {"tasks_over": "tasks over their reservation"}
    if timeline["machines"]:
        kinds["events"] = "would-be out of memory"
    days = timeline["length_hours"] / 24
    rows: list[tuple[Cell, ...]] = []
    for key, event in kinds.items():
        for e in results["estimators"]:
            if e["kind"] in COMPARED:
                in_turn = _per_day(e["sequence"]["segments"], timeline["segments"], key)
                throughout = [_rate(e["results"][m]["oom"][key], days) for m in MARGIN_NAMES]
                rows.append((event, e["name"], *in_turn, order_of(in_turn), *throughout, order_of(throughout)))
    columns = [f"{m}{where}" for where in (", in turn", ", throughout") for m in (*MARGIN_NAMES, "order")]
    return Table(("events a day", "estimator", *columns), tuple(rows))


def order_of(rates: Sequence[float | None]) -> str:
    """Return whether rates rise from one margin to the next narrower one."""
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return "unknown"
    return "equal" if len(set(known)) == 1 else "rising" if known == sorted(known) else "not rising"


def in_reclaimed(results: Results) -> dict[str, Any] | None:
    """Return the result of the closed loop under the estimator and margin that the page shows first for CPU."""
    runs_of = {e["name"]: e["runs"] for e in results["closed_loop"]["estimators"]}
    for one in best(results, HEADLINE, RESOURCES[0]):
        if (run := runs_of.get(one["name"], {}).get(HEADLINE)) is not None:
            return {"name": one["name"], "margin": HEADLINE, **run}
    return None


def _standing(
    estimator: Mapping[str, Any], margin: str, resource: str, differences: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return what an estimator does at a margin and how it compares; None where that is unknown.

    At equal violation one that follows outcomes is the same as where its margin or price is set once.
    """
    measured = estimator["results"].get(margin, {}).get("all")
    if measured is None or measured[RECLAIMED][resource]["value"] is None:
        return None
    difference, set_once = (
        differences.get(name, {}).get(resource, {}) for name in (estimator["name"], rests_on(estimator["name"]))
    )
    return {
        "name": estimator["name"],
        "kind": estimator["kind"],
        "reclaimed": measured[RECLAIMED][resource],
        "violation": measured[VIOLATION][resource],
        "against": difference.get("against"),
        "difference": difference.get(RECLAIMED),
        "verdict": difference.get("verdict", ""),
        "at_equal_violation": (set_once.get("at_equal_violation") or {}).get("verdict", ""),
    }


def _row(role: str, resource: str, one: Mapping[str, Any]) -> tuple[Cell, ...]:
    bounds = interval(one["reclaimed"])
    return (RESOURCE_WORDS[resource], role, one["name"], one["reclaimed"]["value"], bounds, one["violation"]["value"],
            one["against"], brief(one["verdict"]), brief(one["at_equal_violation"]))  # fmt: skip


def _per_day(
    segments: Iterable[Mapping[str, Any]], bounds: Sequence[Mapping[str, Any]], key: str
) -> list[float | None]:
    """Return the rate of events a day under each margin of the sequence, all parts of a margin together."""
    rates = []
    of_parts = list(zip(segments, bounds, strict=True))
    for margin in MARGIN_NAMES:
        mine = [(s, b) for s, b in of_parts if b["margin"] == margin]
        days = sum(b["end_hours"] - b["start_hours"] for _, b in mine) / 24
        rates.append(_rate(sum(s[key] for s, _ in mine), days))
    return rates


def _rate(events: int | None, days: float) -> float | None:
    return None if events is None or not days else events / days
