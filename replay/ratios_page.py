"""What the page of the ratios says, its parts, and what goes on record of each estimator and margin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from reclaim.data.schema import RESOURCES
from reclaim.data.style import RESOURCE_TITLES, RESOURCE_WORDS
from reclaim.data.table import Cell, Table, show
from reclaim.replay.kinds import Column, Results, Run, Section

SHOWN_UP_TO: Final = 1.3
"""Share of the limit at which the figure's axis ends, so that tasks far over their limit do not flatten the others."""
_SHOWN: Final = {"median": "median", "mean gap": "gap", "ever over": "over"}

COLUMNS: Final = tuple(
    Column(f"{RESOURCE_WORDS[r]} {heading}", f"{r}.{key}", percent=True)
    for r in RESOURCES
    for heading, key in _SHOWN.items()
)


def says(results: Results) -> list[str]:
    """Return what the numbers show: how far reservations lie above usage, and what narrowing them costs."""
    paragraphs = []
    for r in RESOURCES:
        usage = results["usage"][r]
        if usage["median"] is None:
            continue
        tasks = f"{results['tasks'][r]:,} tasks" + ("" if results["alike"] else ", by the time they ran,")
        text = f"Half of the {tasks} use at most {_percent(usage['median'])} of their "
        text += f"{RESOURCE_WORDS[r]} limit, on average over tasks {_percent(usage['mean'])}."
        if usage["over_limit"]:
            text += f" On average over their time {_percent(usage['over_limit'])} of them use more than their limit."
        for estimator in (e for e in results["estimators"] if e["drawn"]):
            steps = [f"{_points(of[r]['gap'])} points ({margin})" for margin, of in estimator["margins"].items()]
            over = [f"{_percent(of[r]['over'])} ({margin})" for margin, of in estimator["margins"].items()]
            text += (
                f" Under `{estimator['name']}` the reservation lies {_listed(steps)} above usage, and "
                f"{_listed(over)} of the tasks pass it at least once."
            )
        text += f" The oracle's reservation lies {_points(results['oracle'][r]['gap'])} points above usage."
        narrowest = _narrowest(results, r)
        if narrowest is not None:
            name, margin, of = narrowest
            text += (
                f" The smallest gap of all is that of `{name}` at {margin}: {_points(of['gap'])} points, with "
                f"{_percent(of['over'])} of the tasks ever over."
            )
        paragraphs.append(text)
    return paragraphs


def _narrowest(results: Results, resource: str) -> tuple[str, str, Mapping[str, Any]] | None:
    every = [(e["name"], m, of[resource]) for e in results["estimators"] for m, of in e["margins"].items()]
    known = [one for one in every if one[2]["gap"] is not None]
    return min(known, key=lambda one: one[2]["gap"]) if known else None


def judged(results: Results) -> str:
    """Return how the numbers came about: windows, and what was in force when each began."""
    return (
        "Margins are set on the validation period; every number below is measured on the later test period. Each "
        f"reservation is made from the past alone, to last for {results['inputs']['config']['horizon_s']} seconds, "
        "and held against the one window at whose beginning it was in force."
    )


def sections(results: Results) -> list[Section]:
    """Return the parts of the page."""
    return [
        Section(
            "Usage and reservation over the limit",
            figure="ratios",
            caption="Borg's Figure 11 (Verma et al., EuroSys'15) for this cell: of each task the mean over its "
            "windows. The area between a reservation and usage, as far as that lies within the limit, is what the one "
            "keeps beyond the other (the gap); what lies between a reservation and the limit is reclaimed. Usage "
            f"beyond the limit counts for neither. The axis ends at {SHOWN_UP_TO:.0%} of the limit; tasks "
            "that use more lie beyond it.",
            table=spread_table(results, RESOURCES[0]),
        ),
        *(Section(RESOURCE_TITLES[r], table=spread_table(results, r)) for r in RESOURCES[1:]),
    ]


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
            f"{estimator['name']}/{margin}",
            {"estimator": estimator["name"], "margin": margin},
            {f"{r}.{key}": of[r][key] for r in RESOURCES for key in ("q25", "median", "q75", "mean", "gap", "over")},
            tags={"kind": estimator["kind"]},
        )
        for estimator in results["estimators"]
        for margin, of in estimator["margins"].items()
    ]


def _percent(value: float | None) -> str:
    return show(value, percent=True)


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
