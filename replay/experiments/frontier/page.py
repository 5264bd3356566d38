"""Computes what the frontier's page, console table and MLflow runs show of each contender."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Final

from reclaim.data.core.prose import interval
from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table, show
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import HEADLINE, ORACLE, REFERENCE, Column, Results, Run, judged
from reclaim.replay.report.page import brief, verdict_of

BUDGETS: Final = ("baseline", "aggressive")
"""Names of the rates, in their order: the fields of ``margins.margin.Budgets``."""
AS_PUBLISHED: Final = "as published"
"""Margin of a predictor without one."""
SIDES: Final = {"tasks": "task-windows", "machines": "machine peaks"}
VERDICTS: Final = ("verdict", "at the budget")
"""Headings of the two verdicts: at equal violation, of the curves; and of the margins set on validation rows."""
SHOWN: Final = BUDGETS.index(HEADLINE)
"""Place of the rate that the large figures and the console's table show."""

COLUMNS: Final = tuple(
    Column(f"{RESOURCE_WORDS[r]} at {budget} rate{suffix}", f"{side}.{r}.reclaimed_at_{budget}", percent=True)
    for side, suffix in (("tasks", ""), ("machines", ", machines"))
    for r in RESOURCES
    for budget in BUDGETS
)


def page(results: Results) -> dict[str, Any]:
    """Return the values of ``page.html``."""
    machines = results["machines"] is not None
    return {
        "rate": results["rates"][SHOWN],
        "best": {r: best(results, r) for r in judged(results)},
        "summary": summary_table(results),
        "leaders": leaders(results),
        "learned": learned(results),
        "of_tasks": rates_table(results, "tasks"),
        "of_machines": rates_table(results, "machines") if machines else None,
        "by_margin": {RESOURCE_WORDS[r]: machines_table(results, r) for r in judged(results)} if machines else {},
    }


def ranked(results: Results, side: str, resource: str, k: int = SHOWN) -> list[tuple[str, dict[str, Any]]]:
    """Return the contenders that reach the ``k``-th rate and their numbers there, in the order of their rank."""
    contenders = results[side]["contenders"]
    at = {name: dict(of[resource]["at"][k]) for name, of in contenders.items() if resource in of}
    return sorted(((name, one) for name, one in at.items() if one["rank"]), key=lambda pair: pair[1]["rank"])


def best(results: Results, resource: str) -> list[dict[str, Any]]:
    """Return the first learned estimator and the best other one at the shown rate; else the first two."""
    reached = dict(ranked(results, "tasks", resource))
    first = next((name for name, one in reached.items() if "ahead" in one), next(iter(reached), None))
    if first is None:
        return []
    difference = reached[first].get("ahead", reached[first].get("lead"))
    mine = reached[first] | {"name": first, "difference": difference}
    return (
        [mine]
        if difference is None
        else [mine, reached[difference["of"]] | {"name": difference["of"], "difference": None}]
    )


def summary_table(results: Results) -> Table:
    """Return, of each resource, the best estimator of each kind at the shown rate, Borg's and the oracle."""
    kinds = {e["name"]: e["kind"] for e in results["estimators"]}
    rows: list[tuple[Cell, ...]] = []
    for r in judged(results):
        first: dict[str, str] = {}
        reached = dict(ranked(results, "tasks", r))
        for name in reached:
            first.setdefault(kinds[name], name)
        if REFERENCE in reached and REFERENCE not in first.values():
            first["Borg"] = REFERENCE
        for role, name in first.items():
            one = reached[name]
            against = one.get("ahead") or one.get("lead") or {}
            rows.append((RESOURCE_WORDS[r], role, name, one["value"], interval(one), one["of_oracle"],
                         against.get("of"), brief(verdict_of(against)) if against else None,
                         brief(_at_budget(results, "tasks", name, r, SHOWN))))  # fmt: skip
        bound = results["tasks"]["oracle"][r]
        rows.append((RESOURCE_WORDS[r], ORACLE, ORACLE, bound, "-", None if bound is None else 1.0, None, None, None))
    rate = show(results["rates"][SHOWN], percent=True)
    caption = f"Best of each kind at {rate} violation, Borg's estimator and the oracle"
    columns = ("resource", "role", "estimator", "reclaimed", "interval", "of oracle", "compared with", *VERDICTS)
    return Table(columns, tuple(rows), frozenset({"reclaimed", "of oracle"}), caption)


def leaders(results: Results) -> Table:
    """Return the contender that reclaims most at each rate, and its difference to the next one."""
    rows: list[tuple[Cell, ...]] = []
    for side, r, k in _grid(results):
        for name, one in ranked(results, side, r, k)[:1]:
            lead = one.get("lead", {"of": None, "value": None, "low": None, "high": None})
            rows.append((
                SIDES[side], RESOURCE_WORDS[r], show(results["rates"][k], percent=True),
                round(results["rates"][k] * results[side]["count"][r]), name, one["value"], interval(one),
                one["of_oracle"], lead["of"], lead["value"], interval(lead), verdict_of(lead),
            ))  # fmt: skip
    columns = ("counted", "resource", "violation rate", "violations", "first", "reclaimed", "interval", "of oracle",
               "next", "difference", "its interval", VERDICTS[0])  # fmt: skip
    return Table(columns, tuple(rows), frozenset({"reclaimed", "of oracle", "difference"}))


def learned(results: Results) -> Table:
    """Return the difference of each learned estimator to the best of the others at each rate."""
    rows: list[tuple[Cell, ...]] = [
        (SIDES[side], RESOURCE_WORDS[r], show(results["rates"][k], percent=True), name, one["value"], ahead["of"],
         ahead["value"], interval(ahead), verdict_of(ahead), _at_budget(results, side, name, r, k))
        for side, r, k in _grid(results)
        for name, one in ranked(results, side, r, k)
        if (ahead := one.get("ahead")) is not None
    ]  # fmt: skip
    columns = ("counted", "resource", "violation rate", "estimator", "reclaimed", "compared with", "difference",
               "interval", *VERDICTS)  # fmt: skip
    return Table(columns, tuple(rows), frozenset({"reclaimed", "difference"}))


def _at_budget(results: Results, side: str, name: str, resource: str, k: int) -> str | None:
    """Return the verdict on an estimator's margin for the ``k``-th rate; None where there is none."""
    compared = results[side].get("at_budget", {}).get(BUDGETS[k], {}).get(name, {}).get(resource)
    return None if compared is None else str(compared["verdict"])


def _grid(results: Results) -> Iterator[tuple[str, str, int]]:
    """Yield side, resource and place of the rate of all comparisons."""
    sides = [side for side in SIDES if results[side] is not None]
    return product(sides, RESOURCES, range(len(results["rates"])))


def rates_table(results: Results, side: str) -> Table:
    """Return what every contender reclaims at every rate: with its interval, and its rank."""
    names = [
        f"{RESOURCE_WORDS[r]} at {show(rate, percent=True)}{what}"
        for r in RESOURCES
        for rate in results["rates"]
        for what in ("", ", interval", ", rank")
    ]
    kinds = {e["name"]: e["kind"] for e in results["estimators"]}
    rows = []
    for name, of in results[side]["contenders"].items():
        cells: list[Cell] = [name, kinds[name]]
        for r in RESOURCES:
            for k in range(len(results["rates"])):
                line = of[r]["at"][k] if r in of else dict.fromkeys(("value", "low", "high", "rank"))
                cells += [line["value"], interval(line), line["rank"]]
        rows.append(tuple(cells))
    return Table(("estimator", "kind", *names), tuple(rows), frozenset(names[::3]))


def machines_table(results: Results, resource: str) -> Table:
    """Return the violations and savings of every margin, and of every predictor as published, on the machines."""
    columns = {
        "violation rate": ("violation_rate", "value"),
        "median machine": ("violation_rate", "p50"),
        "90th": ("violation_rate", "p90"),
        "99th": ("violation_rate", "p99"),
        "at once": ("at_once", "p99.9"),
        "most at once": ("at_once", "largest"),
        "by over 1 %": ("violation_rate_1pct",),
        "severity": ("severity", "mean"),
        "at violations": ("severity", "at_violation"),
        "severity, 99th": ("severity", "p99"),
        "savings": ("savings", "value"),
        "of oracle": ("efficiency", "value"),
    }
    rows = []
    for name, margins in results["machines"]["margins"].items():
        for margin, of in margins.items():
            if resource in of:
                shares = tuple(_at(of[resource], path) for path in columns.values())
                seconds = of[resource]["violation_s"]
                rows.append((name, margin, *shares, None if seconds is None else seconds / 60))
    return Table(("estimator", "margin", *columns, "minutes"), tuple(rows), frozenset(columns))


def runs(results: Results) -> list[Run]:
    """Return a run of each contender: its reclaimed share at each rate, and the numbers of each of its margins.

    Without machines, predictors of machines have no number and no run.
    """
    recorded = []
    for one in results["estimators"]:
        metrics: dict[str, float | None] = {column.metric: None for column in COLUMNS}
        for side in SIDES:
            of = (results[side] or {"contenders": {}})["contenders"].get(one["name"], {})
            for r, of_resource in of.items():
                for budget, line in zip(BUDGETS, of_resource["at"], strict=True):
                    key = f"{side}.{r}.reclaimed_at_{budget}"
                    metrics |= {key: line["value"], f"{key}_low": line["low"], f"{key}_high": line["high"]}
                    metrics[f"{side}.{r}.of_oracle_at_{budget}"] = line["of_oracle"]
            of_margins = (results[side] or {"margins": {}})["margins"].get(one["name"], {})
            for margin, by_resource in of_margins.items():
                for r, found in by_resource.items():
                    metrics |= {f"{side}.{r}.{margin.replace(' ', '_')}.{k}": v for k, v in _measured(found).items()}
        verdicts = {}
        for budget, at_budget in results["tasks"]["at_budget"].items():
            for r, compared in at_budget.get(one["name"], {}).items():
                verdicts[f"at_budget.{budget}.{r}"] = f"{compared['verdict']}, against {compared['against']}"
        if any(number is not None for number in metrics.values()):
            tags = {"kind": one["kind"], **verdicts}
            recorded.append(Run({"estimator": one["name"]}, metrics, tags=tags))
    return recorded


def _measured(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of one margin under flat names: ``severity`` and ``severity_p99`` for those in groups.

    In a group the value or the mean has the group's own name.
    """
    numbers: dict[str, float | None] = {}
    for name, of in found.items():
        if isinstance(of, Mapping):
            numbers |= {name if k in ("value", "mean") else f"{name}_{k}": v for k, v in of.items()}
        else:
            numbers[name] = of
    return numbers


def _at(of: Any, path: tuple[str, ...]) -> float | None:
    for key in path:
        of = of[key]
    return None if of is None else float(of)
