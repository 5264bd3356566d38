"""Prints the tables of `benchmarks/bar.py` as Markdown, from its results.

    python -m benchmarks.bar_tables benchmarks/results/bar-*.json
    python -m benchmarks.bar_tables --summary 3600 benchmarks/results/bar-*.json

Shares and violations in per cent, differences in points, 95 % intervals in brackets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reclaim.replay.open_loop.paired import EXCEEDS, RECLAIMED, VIOLATION

PUBLISHED = " (published)"
NETWORK, ORACLE, BORG, BEST = "network", "oracle", "borg", "best statistical"
MIXED_IN = "network, others mixed in"
BUDGETS = {"aggressive": "1 %", "baseline": "0.1 %"}
FIXED, ONLINE, HINDSIGHT = "validation", "online", "hindsight"
SETTINGS = (FIXED, ONLINE, HINDSIGHT)
HOURS = {300: "5 minutes", 3_600: "1 hour", 86_400: "24 hours"}


def main() -> None:
    """Print the tables of every file named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="files that benchmarks/bar.py wrote")
    parser.add_argument(
        "--summary", type=int, choices=HOURS, metavar="SECONDS", help="print what this horizon comes to"
    )
    asked = parser.parse_args()
    contents = [json.loads(path.read_text()) for path in asked.results]
    if asked.summary:
        print("\n".join(summary(contents, asked.summary)))
        return
    for content in contents:
        print("\n".join(markdown(content)), end="\n\n")


def summary(contents: Iterable[Mapping[str, Any]], horizon_s: int) -> Iterator[str]:
    """Yield tables of the network at a horizon: as it runs, against Borg's estimator, and where the load drifts."""
    tables: list[list[str]] = [
        _head("Ahead", [
            "dataset", "resource", "budget", "network, at violation", "best statistical, at violation",
            "difference in points", "verdict", "network, equal violation", "best statistical, equal violation",
            "difference in points", "gap closed", "verdict at equal violation", ORACLE,
        ]),
        _head("Against Borg's estimator", [
            "dataset", "resource", "budget", "network", "borg, tuned", "difference in points", "verdict",
        ]),
        _head("Drift", [
            "dataset", "resource", "budget", "violation, price set once", "violation, price that follows",
            "reclaimed, set once", "reclaimed, following", "reclaimed at equal violation, one price in hindsight",
        ]),
    ]  # fmt: skip
    for content in contents:
        of = [d for d in content["differences"] if (d["horizon_s"], d["collections"], d["estimator"]) ==
              (horizon_s, "all", NETWORK)]  # fmt: skip
        found = {(d["resource"], d["budget"], d["margin_set"], d["against"]): d for d in of}
        measured = {
            (e["resource"], e["budget"], e["margin_set"], e["estimator"]): e
            for e in content["estimators"]
            if (e["horizon_s"], e["collections"]) == (horizon_s, "all")
        }
        for resource, budget in dict.fromkeys(key[:2] for key in found):
            row = content["dataset"]["name"], resource, budget
            runs, then, borg = (
                found[resource, budget, setting, against]
                for setting, against in ((ONLINE, BEST), (HINDSIGHT, BEST), (HINDSIGHT, BORG))
            )
            once, own, other = (
                measured[resource, budget, setting, name]
                for setting, name in ((FIXED, NETWORK), (ONLINE, NETWORK), (ONLINE, runs["opponent"]))
            )
            mine, theirs, most = (_text(share) for share in then["reclaims"])
            tables[0].append(_line(
                *row, _at(own), f"{_at(other)} ({runs['opponent']})", _span(runs[RECLAIMED]), runs["verdict"],
                mine, f"{theirs} ({then['opponent']})", _span(then[RECLAIMED]), f"{_text(then['gap_closed'], 0)} %",
                then["verdict"], most,
            ))  # fmt: skip
            tables[1].append(_line(*row, mine, _text(borg["reclaims"][1]), _span(borg[RECLAIMED]), borg["verdict"]))
            tables[2].append(_line(
                *row, *(_text(e[VIOLATION][0], 2) for e in (once, own)),
                *(_text(e[RECLAIMED][0]) for e in (once, own)), mine,
            ))  # fmt: skip
    for table in tables:
        yield from table


def _at(measured: Mapping[str, Any]) -> str:
    return f"{_text(measured[RECLAIMED][0])} at {_text(measured[VIOLATION][0], 2)}"


def markdown(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of all tables."""
    dataset, differences = content["dataset"], content["differences"]
    yield f"## {dataset['name']} ({dataset['nature']}, {dataset['windows']:,} task-windows)"
    for name, against in dict.fromkeys((d["estimator"], d["against"]) for d in differences):
        yield from _of_pair([d for d in differences if (d["estimator"], d["against"]) == (name, against)])
    for rows in content["rows"]:
        if rows["measured"]:
            yield from _of_estimators(rows, content["estimators"])
        else:
            known = f"{rows['valid']:,} validation and {rows['test']:,} test rows"
            yield f"\n{rows['resource']}, {HOURS[rows['horizon_s']]}: left out, the target is known of {known} only."
    yield from _of_settings(content.get("settings", {}))
    yield from _head(
        "Cold start: by the time that a task has been known; reclaimed at violation, set in validation",
        ["horizon", "resource", "budget", "age", "task-windows", "limit", BORG, BEST, NETWORK, ORACLE],
    )
    for a in content["ages"]:
        at = {n: f"{_text(a[n][RECLAIMED])} at {_text(a[n][VIOLATION], 3)}" for n in (BORG, a["best"], NETWORK)}
        cells = ("0.0 at 0.000", at[BORG], f"{at[a['best']]} ({a['best']})", at[NETWORK], _text(a[ORACLE]))
        yield _line(HOURS[a["horizon_s"]], a["resource"], a["budget"], a["age"], f"{a['task_windows']:,}", *cells)


def _of_pair(differences: list[dict[str, Any]]) -> Iterator[str]:
    name, against = differences[0]["estimator"], differences[0]["against"]
    columns = [
        name,
        against,
        ORACLE,
        "gap closed",
        "reclaimed, difference",
        "violation, difference",
        "verdict",
        "at equal violation, difference",
        "at equal violation",
    ]
    yield from _head(
        f"{name} against {against}",
        ["margin set", "horizon", "resource", "budget", *columns, "unseen collections, reclaimed", "verdict"],
    )
    at = ("margin_set", "horizon_s", "resource", "budget")
    unseen = {tuple(d[k] for k in at): d for d in differences if d["collections"] == "unseen"}
    seen = [d for d in differences if d["collections"] == "all"]
    equal = {tuple(d[k] for k in at[1:]): d for d in seen if d["margin_set"] == HINDSIGHT}
    for d in sorted(seen, key=lambda d: SETTINGS.index(d["margin_set"])):
        afterwards = equal[tuple(d[k] for k in at[1:])]
        against_then = f" ({afterwards['opponent']})" if against == BEST else ""
        other = unseen.get(tuple(d[k] for k in at))
        shares = [_text(share) for share in d["reclaims"]]
        if against == BEST:
            shares[1] += f" ({d['opponent']})"
        yield _line(
            d["margin_set"], HOURS[d["horizon_s"]], d["resource"], d["budget"], *shares,
            "-" if d["verdict"] == EXCEEDS else _text(d.get("gap_closed")),
            _span(d[RECLAIMED], 2), _span(d[VIOLATION], 3), d["verdict"],
            _span(afterwards[RECLAIMED], 2) + against_then, afterwards["verdict"],
            *((_span(other[RECLAIMED], 2), other["verdict"]) if other else ("-", "-")),
        )  # fmt: skip
    for setting in SETTINGS:
        verdicts = [d["verdict"] for d in seen if d["margin_set"] == setting]
        counted = ", ".join(f"{verdict} {verdicts.count(verdict)}" for verdict in sorted(set(verdicts)))
        yield f"\nMargin set in {setting}, {len(verdicts)} comparisons: {counted}."


def _of_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    yield from _head("Settings chosen on validation rows", ["estimator", "horizon", "resource", *BUDGETS.values()])
    for key, chosen in settings.items():
        name, _, horizon_s = key.partition("@")
        for resource in chosen["baseline"]:
            told = (", ".join(f"{k} {v}" for k, v in chosen[margin][resource].items()) for margin in BUDGETS)
            yield _line(name, HOURS[int(horizon_s)], resource, *told)


def _of_estimators(rows: Mapping[str, Any], estimators: list[dict[str, Any]]) -> Iterator[str]:
    here = [e for e in estimators if all(e[k] == rows[k] for k in ("horizon_s", "resource"))]
    found = {tuple(e[k] for k in ("collections", "budget", "margin_set", "estimator")): e for e in here}
    columns = [f"{b}, {setting}" for b in BUDGETS.values() for setting in SETTINGS]
    yield from _head(
        f"{rows['resource']}, {HOURS[rows['horizon_s']]}: reclaimed at violation, by budget and where it is set "
        f"({rows['valid']:,} validation and {rows['test']:,} test rows)",
        ["estimator", *columns],
    )
    names = dict.fromkeys(e["estimator"] for e in here if e["margin_set"] == HINDSIGHT)
    for name in sorted(names, key=lambda n: found["all", "1 %", HINDSIGHT, n][RECLAIMED][0] or 0.0):
        of_one = [found.get(("all", budget, setting, name)) for budget in BUDGETS.values() for setting in SETTINGS]
        yield _line(name, *(f"{_span(e[RECLAIMED])} at {_span(e[VIOLATION], 3)}" if e else "-" for e in of_one))


def _head(title: str, columns: list[str]) -> list[str]:
    return ["", f"### {title}", "", _line(*columns), _line(*["---"] * len(columns))]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _text(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}"


def _span(interval: list[float | None], digits: int = 1) -> str:
    value, low, high = (_text(v, digits) for v in interval)
    return f"{value} [{low}, {high}]"


if __name__ == "__main__":
    main()
