"""Computes what the page of recommendations, the console table and the recorded runs show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from reclaim.data.core.prose import duration, interval, number, percent
from reclaim.data.core.style import RESOURCE_TITLES, RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import Column, Results, Run, judged
from reclaim.replay.experiments.recommend.lines import is_over
from reclaim.replay.experiments.recommend.picture import svg_of
from reclaim.replay.experiments.recommend.policy import OVER, RULES
from reclaim.replay.open_loop.bootstrap import FEWEST
from reclaim.replay.open_loop.paired import EXCEEDS, NOISE, UNKNOWN

WITHIN: Final = "within the budget"
_MIB: Final = 2.0**20
_MOST_BY_MEAN: Final = 0.1
"""Share of windows without a percentile or a maximum up to which no note is given: the first and last windows lack
them."""
_LACKING: Final = {"cpu": "the 90th percentile", "memory": "the largest usage"}
"""Measure that the mean stands in for, by resource (``data.windows.demand``)."""
_NAME: Final = 30
"""Characters of a workload's name on a console of 80 columns; names differ at their end."""
_CONSOLE_ROWS: Final = 12
_PAGE_ROWS: Final = 2_000
"""Workloads in a table of the page: 2 MB, which a browser filters and sorts at once."""

COLUMNS: Final = tuple(
    Column(f"{RESOURCE_WORDS[r]} {heading}", f"{r}.{key}", percent=True)
    for r in RESOURCES
    for heading, key in (("reclaimed", "reclaimed_share"), ("violation", "violation_rate"))
)


def page(results: Results) -> dict[str, Any]:
    """Return the values of ``page.html``."""
    shown = judged(results)
    return {
        "judged": shown,
        "units": {r: unit(results, r) for r in shown},
        "winners": {r: winner(results, r) for r in shown},
        "verdicts": {r: verdict_of(results, r) for r in shown},
        "workloads": {RESOURCE_TITLES[r]: workload_table(results, r, _PAGE_ROWS) for r in shown},
        "estimators": {RESOURCE_TITLES[r]: estimator_table(results, r) for r in shown},
        "kills": sum(line["oom_kills"] for line in results["workloads"]),
        "autoscaled": sum(line["autoscaler"] is not None for line in results["workloads"]),
        "not_shown": max(len(results["workloads"]) - _PAGE_ROWS, 0),
        "changes": sum(results["totals"][r]["changes"] for r in shown),
        "raises": sum(results["totals"][r]["raises"] for r in shown),
        "findings": findings(results),
        "notes": [f"{e['name']}: {note}" for e in results["estimators"] for note in e["notes"]
                  if any(e["resources"][r]["won"] for r in shown)],
    }  # fmt: skip


def verdict_of(results: Results, resource: str) -> str:
    """Return whether the back-test violates more than the budget, beyond the noise; empty where nothing is known."""
    rate, budget = results["test"]["recommendation"]["violation_rate"][resource], results["budget"][resource]
    if rate["value"] is None:
        return ""
    if rate["value"] <= budget:
        return WITHIN
    if rate["low"] is None:
        return UNKNOWN
    return EXCEEDS if rate["low"] > budget else NOISE


def findings(results: Results) -> list[str]:
    """Return the notes to read before requests are set.

    Sums of the requests, workloads that do not run, those of unequal requests, windows of means, verdicts of the
    back-test, its length, requests held back, and pods that leave their class.
    """
    found = [_sums(results, r) for r in judged(results)]
    found += _not_running(results)
    counted = [line for line in results["workloads"] if not is_over(line)]
    uneven = sum(any(line[r]["requested"] != line[r]["request"] for r in judged(results)) for line in counted)
    if uneven:
        found.append(
            f"{uneven:,} workload{'s have' if uneven != 1 else ' has'} tasks with requests of their own: the largest "
            "is shown, and the sums count each"
        )
    more = "; a scrape every minute shows more" if results["kubernetes"] else ""
    for r in judged(results):
        if (by_mean := results["dataset"]["measured_by_mean"][r]) > _MOST_BY_MEAN:
            found.append(
                f"{RESOURCE_TITLES[r]}: in {percent(by_mean, 0)} of the windows the mean stands in for {_LACKING[r]}, "
                f"so requests and violations are lower bounds{more}"
            )
    for r in judged(results):
        rate, verdict = results["test"]["recommendation"]["violation_rate"][r], verdict_of(results, r)
        said = {
            "": "no window of the back-test is known, so nothing says how often requests would be too low",
            NOISE: f"the back-test is {NOISE} of the budget",
            UNKNOWN: "the back-test violates more than the budget, and of a single workload no noise is known",
            EXCEEDS: f"the back-test {EXCEEDS}",
            WITHIN: f"the back-test is {WITHIN}",
        }[verdict]
        numbers = f" ({percent(rate['value'])} violate, {percent(results['budget'][r])} may)" if verdict else ""
        found.append(f"{RESOURCE_TITLES[r]}: {said}{numbers}")
        held = sum(line[r]["rule"] == RULES[OVER] for line in counted)
        if held:
            config = results["inputs"]["config"]
            why = (
                f"as all together violate above {config['most_over_in_all']:g} budgets"
                if results["failed"][r]
                else f"of workloads that violate above {config['most_over']:g} budgets"
            )
            found.append(f"{RESOURCE_TITLES[r]}: {held:,} not lowered, {why}")
    days = max((line[r]["violation"]["days"] for line in results["workloads"] for r in judged(results)), default=0)
    if days < FEWEST:
        found.append(
            "no workload has more than one day of back-test, and so none an interval: a longer history says more"
        )
    if leave := sum(map(_leaves_guaranteed, counted)) if results["kubernetes"] else 0:
        found.append(
            f"Guaranteed: {leave:,} of the workloads whose requests are their limits would request less; such pods "
            "become Burstable and are evicted sooner"
        )
    return found


def _sums(results: Results, resource: str) -> str:
    """Return what the tasks that run request together, now and as recommended."""
    of, words = results["totals"][resource], f" {unit(results, resource)}".rstrip()
    now, then, first = (
        number(_amount(results, resource, amount))
        for amount in (of["requested"], of["requested"] - of["reclaimable"], of["first"])
    )
    line = f"{RESOURCE_TITLES[resource]}: requests of {now}{words} in all become {then}"
    if of["firsts"]:
        line += f", and {of['firsts']:,} workload{'s' * (of['firsts'] != 1)} without a known request would add {first}"
    return line


def _not_running(results: Results) -> list[str]:
    """Return what the sums hold of workloads that do not run at the end of the history, and how many they leave out."""
    over = sum(is_over(line) for line in results["workloads"])
    found = [
        "Jobs, bare and static pods that are over, and containers that their pods no longer have, count in no sum of "
        f"requests: {over:,}"
    ]
    idle = [line for line in results["workloads"] if not line["running"] and not is_over(line)]
    amounts = []
    for r in judged(results):
        requested = sum(line["tasks"] * line[r]["requested"] for line in idle if line[r]["requested"] is not None)
        amount = f"{number(_amount(results, r, requested))} {unit(results, r)}".rstrip()
        amounts.append(f"{amount} of {RESOURCE_WORDS[r]}")
    subject = f"{len(idle):,} workload{'s do' if len(idle) != 1 else ' does'}"
    said = (
        f"{subject} not run at the end of the history; the requests in all count the tasks that ran last: "
        f"{' and '.join(amounts)}"
    )
    return found * bool(over) + [said] * bool(idle)


def _leaves_guaranteed(line: Mapping[str, Any]) -> bool:
    """Return whether a workload requests both its limits, and is to request less of one."""
    both = [(line[r]["request"], line[r]["limit"], line[r]["recommended"]) for r in RESOURCE_WORDS]
    if any(limit is None or request != limit for request, limit, _ in both):
        return False
    return any(recommended is not None and recommended < limit for _, limit, recommended in both)


def unit(results: Results, resource: str) -> str:
    """Return the unit of a resource in tables; empty where a dataset's units are its own."""
    return {"cpu": "cores", "memory": "MiB"}[resource] if results["kubernetes"] else ""


def winner(results: Results, resource: str) -> str:
    """Return the name of the winning estimator."""
    return next(str(e["name"]) for e in results["estimators"] if e["resources"][resource]["won"])


def labels_of(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one text for the names of each workload; with its kind, where one of another kind has its name.

    The kind is at the end, which a console does not cut off.
    """
    kinds: dict[tuple[str | None, ...], set[str | None]] = {}
    for line in lines:
        kinds.setdefault(_place(line), set()).add(line["kind"])
    return [
        "/".join(part for part in (*_place(line), line["container"]) if part)
        + (f" ({line['kind']})" if len(kinds[_place(line)]) > 1 else "")
        for line in lines
    ]


def _place(line: Mapping[str, Any]) -> tuple[str | None, ...]:
    return line["cluster"], line["namespace"], line["name"]


def summary_table(results: Results) -> Table:
    """Return, of each resource, the estimator that won and the result of its requests in the back-test."""
    rows: list[tuple[Cell, ...]] = []
    for r in judged(results):
        of, totals = results["test"]["recommendation"], results["totals"][r]
        rate = of["violation_rate"][r]
        rows.append((
            RESOURCE_WORDS[r], winner(results, r), totals["share"], of["reclaimed_share"][r]["value"], rate["value"],
            interval(rate), results["test"]["set once"]["violation_rate"][r]["value"],
        ))  # fmt: skip
    shares = ("now", "in the test", "violation", "set once")
    caption = f"Reclaimable of the requests, now and in the back-test of {duration(results['dataset']['test_hours'])}"
    return Table(
        ("resource", "estimator", *shares[:3], "interval", "set once"), tuple(rows), frozenset(shares), caption
    )


def console_table(results: Results, most: int | None = _CONSOLE_ROWS) -> Table:
    """Return the requests that are to change, those that reclaim or add most first; the first ``most`` of them."""
    found: list[tuple[float, tuple[Cell, ...]]] = []
    labels = labels_of(results["workloads"])
    for r in judged(results):
        requested = results["totals"][r]["requested"]
        for line, name in zip(results["workloads"], labels, strict=True):
            of = line[r]
            if of["recommended"] is None or of["recommended"] == of["request"] or is_over(line):
                continue
            weight = abs(of["reclaimable"] or 0.0) * line["tasks"] / requested if requested else 0.0
            name = name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"
            amounts = (_amount(results, r, of[key]) for key in ("request", "recommended"))
            found.append((weight, (name, RESOURCE_WORDS[r], line["tasks"], *amounts, of["change"],
                                   of["violation"]["value"])))  # fmt: skip
    found.sort(key=lambda one: -one[0])
    units = ", ".join(f"{RESOURCE_WORDS[r]} in {unit(results, r)}" for r in judged(results) if unit(results, r))
    caption = f"Requests to change{f', {units}' * bool(units)}"
    if not found:
        caption = "Requests to change: none"
    elif most is not None and len(found) > most:
        caption += f": {most} of {len(found):,}, the largest first"
    rows = tuple(row for _, row in found[:most])
    columns = ("workload", "resource", "tasks", "request", "recommended", "change", "violation")
    return Table(columns, rows, frozenset(("change", "violation")), caption)


def workload_table(results: Results, resource: str, most: int | None = None) -> Table:
    """Return one row per workload, those that reclaim or add most first; the first ``most`` of them."""
    named = zip(results["workloads"], labels_of(results["workloads"]), strict=True)
    rows: list[tuple[Cell, ...]] = []
    for line, name in sorted(named, key=lambda one: -abs(_reclaimable(one[0], resource) or 0.0))[:most]:
        of = line[resource]
        amounts = of["request"], of["recommended"], of["limit"], _reclaimable(line, resource)
        request, recommended, limit, all_tasks = (_amount(results, resource, value) for value in amounts)
        rate, known = of["violation"], line["oom_kills"] if resource == "memory" else line["autoscaler"]
        picture = svg_of(of["picture"], f"{line['name']}, {resource}")
        rows.append((
            name, picture, line["tasks"], request, recommended, of["change"], all_tasks, rate["value"],
            interval(rate), of["as_requested"], of["rule"], limit, of["spread"], known, line["kind"], of["words"],
        ))  # fmt: skip
    unit_of = f", {unit(results, resource)}" if unit(results, resource) else ""
    share = round(100 * results["inputs"]["config"]["confidence"])
    columns = (
        "workload", "two weeks", "tasks", f"request{unit_of}", f"recommended{unit_of}", "change",
        f"reclaimable{unit_of}", "violation", f"{share} % interval", "as requested", "rule", f"limit{unit_of}",
        "spread", "out-of-memory ends" if resource == "memory" else "autoscaler", "kind", "in words",
    )  # fmt: skip
    return Table(columns, tuple(rows), frozenset(("change", "violation", "as requested"))).known()


def _reclaimable(line: Mapping[str, Any], resource: str) -> float | None:
    """Return what all tasks of a workload would free; negative where they need more, None unknown."""
    of = line[resource]["reclaimable"]
    return None if of is None else of * line["tasks"]


def estimator_table(results: Results, resource: str) -> Table:
    """Return every estimator on the validation and on the test part, the winner first, and the bounds."""
    rows: list[tuple[Cell, ...]] = []
    ranked = sorted(
        results["estimators"], key=lambda e: -(e["resources"][resource]["chosen_by"]["reclaimed_share"] or -1.0)
    )
    for e in ranked:
        of, test = e["resources"][resource], e["test"]
        rows.append((
            e["name"], e["kind"], "won" if of["won"] else None, of["chosen_by"]["reclaimed_share"],
            of["valid"]["reclaimed_share"],
            of["valid"]["violation_rate"], *_of_test(test, resource), of["margin"], of["settings"] or None,
        ))  # fmt: skip
    for name, test in results["test"].items():
        if name != "recommendation":
            rows.append((name, None, None, None, None, None, *_of_test(test, resource), None, None))
    shares = (
        "validation: of the limit",
        "validation: reclaimed",
        "validation: violation",
        "test: reclaimed",
        "test: violation",
    )
    columns = ("estimator", "kind", "chosen", *shares[:4], "interval", shares[4], "its interval", "margin or price",
               "settings")  # fmt: skip
    return Table(columns, tuple(rows), frozenset(shares))


def _of_test(test: Mapping[str, Any], resource: str) -> tuple[Cell, ...]:
    reclaimed, rate = test["reclaimed_share"][resource], test["violation_rate"][resource]
    return reclaimed["value"], interval(reclaimed), rate["value"], interval(rate)


def runs(results: Results) -> Sequence[Run]:
    """Return a run of each estimator, on the test part."""
    return [
        Run(
            {"estimator": e["name"]},
            {f"{r}.{metric}": e["test"][metric][r]["value"] for r in RESOURCES for metric in e["test"]},
            tags={"kind": e["kind"]},
        )
        for e in results["estimators"]
    ]  # fmt: skip


def _amount(results: Results, resource: str, value: float | None) -> float | None:
    return value / _MIB if value is not None and resource == "memory" and results["kubernetes"] else value
