"""What the page of the frontier says, its parts, and what goes on record of each contender."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from reclaim.data.schema import RESOURCES
from reclaim.data.style import RESOURCE_WORDS
from reclaim.data.table import Table, show
from reclaim.replay.kinds import Column, Results, Run, Section

BUDGETS: Final = ("baseline", "aggressive")
"""Names of the rates, in their order: those that ``training.calibrate.Budgets`` gives them."""
AS_PUBLISHED: Final = "as published"
"""In the place of a margin, for a predictor that was given none."""
SIDES: Final = {"tasks": "task-windows", "machines": "machine peaks"}

COLUMNS: Final = tuple(
    Column(f"{RESOURCE_WORDS[r]} at {budget} rate{suffix}", f"{side}.{r}.reclaimed_at_{budget}", percent=True)
    for side, suffix in (("tasks", ""), ("machines", ", machines"))
    for r in RESOURCES
    for budget in BUDGETS
)


def says(results: Results) -> list[str]:
    """Return what the numbers show: who is ahead at each rate and by how much, and who does not get there."""
    known = [side for side in SIDES if results[side] is not None]
    rates = range(len(results["rates"]))
    paragraphs = [_leader(results, side, r, k) for side in known for r in RESOURCES for k in rates]
    if results["machines"] is not None:
        paragraphs.append(_from_tasks_to_machines(results))
    return [paragraph for paragraph in paragraphs if paragraph]


def judged(results: Results) -> str:
    """Return how the numbers came about: curves sweep what was never chosen beforehand."""
    return (
        "The curves sweep the margin over the test period itself: what is reclaimed at a rate compares estimators, as "
        "the margin that leads there is known afterwards only. Every answer is made from the past alone and judged "
        f"against the {results['inputs']['config']['horizon_s']} seconds to come. The marked margins alone, and what "
        "machines show under them, were set beforehand, on the validation period."
    )


def _from_tasks_to_machines(results: Results) -> str:
    """Say how often machines' peaks violate under the aggressive margin, which was set for tasks."""
    sentences = []
    for r in RESOURCES:
        of_tasks, of_machines = (
            {
                name: of["aggressive"][r]
                for name, of in results[side]["margins"].items()
                if r in of.get("aggressive", {})
            }
            for side in SIDES
        )
        rates = {name: of["violation_rate"]["value"] for name, of in of_machines.items()}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        if not any(known.values()):
            sentences += [f"nobody's {RESOURCE_WORDS[r]} reservations"] if known else []
            continue
        worst = max(known, key=lambda name: known[name])
        machines, tasks = (show(rate, percent=True) for rate in (known[worst], of_tasks[worst]["violation_rate"]))
        sentences.append(
            f"the {RESOURCE_WORDS[r]} reservations of `{worst}` most often, by {machines} of the machine peaks "
            f"({tasks} of the task-windows)"
        )
    if not sentences:
        return ""
    return f"Under the aggressive margin, which was set for tasks, machines pass {_listed(sentences)}."


def _leader(results: Results, side: str, resource: str, k: int) -> str:
    """Say who is first with a resource at one rate, whether by more than the noise, and where the learned one is."""
    contenders = results[side]["contenders"]
    at = {name: of[resource]["at"][k] for name, of in contenders.items() if resource in of}
    ranked = sorted((n for n in at if at[n]["rank"]), key=lambda n: at[n]["rank"])
    if not ranked:
        return ""
    first, rate, count = ranked[0], results["rates"][k], results[side]["count"][resource]
    text = (
        f"Where {show(rate, percent=True)} of the {count:,} {SIDES[side]} violate ({rate * count:,.0f} of them), "
        f"`{first}` comes first in {RESOURCE_WORDS[resource]}: it reclaims {_interval(at[first])} of the limits, "
        f"{_percent(at[first]['of_oracle'])} of what the oracle does"
    )
    if lead := at[first].get("lead"):
        text += f". It {_compared(lead)} `{lead['of']}`, the next ({_percent(at[lead['of']]['value'])})"
    for name, line in at.items():
        ahead = line.get("ahead")
        if ahead and {name, ahead["of"]} != set(ranked[:2]):  # which is said already
            text += f". `{name}` {_compared(ahead)} `{ahead['of']}`, the best of the others"
    missing = [f"`{name}`" for name in at if at[name]["rank"] is None]
    if missing:
        text += f". {_listed(missing)} violate{'s' if len(missing) == 1 else ''} more often under any margin"
    return text + "."


def _compared(ahead: Mapping[str, Any]) -> str:
    value, low, high = ahead["value"], ahead["low"], ahead["high"]
    what = "more" if value > 0 else "less"
    if low is None or high is None:
        return f"reclaims {_points(abs(value))} points {what} (with no interval, so it may be noise) than"
    if low <= 0 <= high:
        return f"does not differ beyond the noise ({_points(value)} points, {_points(low)} to {_points(high)}) from"
    return f"reclaims {_points(abs(value))} points {what} ({_points(low)} to {_points(high)}) than"


def sections(results: Results) -> list[Section]:
    """Return the parts of the page."""
    parts = [
        Section(
            "Task by task",
            figure="frontier",
            caption="What each estimator reclaims against how often it is passed, as its margin sweeps from the "
            "narrowest to the widest; higher and further left is better. The marks are the margins that were set on "
            "validation rows. What violates less often than the axis shows stands at its left edge; the grey lines are "
            "the rates compared below, the dashed one the oracle.",
            table=rates_table(results, "tasks"),
        )
    ]
    if results["machines"] is not None:
        parts += [
            Section(
                "Machine by machine",
                figure="frontier_machines",
                caption="The same of whole machines: the sum of the reservations on each, against the largest usage to "
                "come of the tasks that are there. Beside the estimators stand those who predict a machine's peak and "
                "know no task's reservation; the diamonds are those as published.",
                table=rates_table(results, "machines"),
            ),
            *(Section(f"Machines: {RESOURCE_WORDS[r]}", table=machines_table(results, r)) for r in RESOURCES),
        ]
    return parts


def rates_table(results: Results, side: str) -> Table:
    """Return what every contender reclaims at every rate: with its interval, and its rank."""
    names = [
        f"{RESOURCE_WORDS[r]} at {show(rate, percent=True)}{what}"
        for r in RESOURCES
        for rate in results["rates"]
        for what in ("", ", rank")
    ]
    kinds = {e["name"]: e["kind"] for e in results["estimators"]}
    rows = []
    for name, of in results[side]["contenders"].items():
        cells: list[str | float | int | None] = [name, kinds[name]]
        for r in RESOURCES:
            for k in range(len(results["rates"])):
                line = of[r]["at"][k] if r in of else {"value": None, "rank": None}
                cells += [_interval(line), line["rank"]]
        rows.append(tuple(cells))
    return Table(("estimator", "kind", *names), tuple(rows))


def machines_table(results: Results, resource: str) -> Table:
    """Return what came of every margin, and of every predictor as published, on the machines."""
    columns = {
        "violation rate": ("violation_rate", "value"),
        "median machine": ("violation_rate", "p50"),
        "90th": ("violation_rate", "p90"),
        "99th": ("violation_rate", "p99"),
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
    """Return a run of each contender: what it reclaims at each rate, and what came of each of its margins."""
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
        recorded.append(Run(one["name"], {"estimator": one["name"]}, metrics, tags={"kind": one["kind"]}))
    return recorded


def _measured(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Return what came of one margin by plain names: ``severity`` and ``severity_p99`` of what stands in groups.

    Of a group the value or the mean goes by the group's own name.
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


def _interval(line: Mapping[str, Any]) -> str:
    if line["value"] is None:
        return "-"
    if line["low"] is None:
        return f"{_percent(line['value'])} (no interval)"
    return f"{_percent(line['value'])} ({_percent(line['low'])} to {_percent(line['high'])})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else ""
