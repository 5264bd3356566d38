"""The tables of the margins page that say more of each estimator than its row among the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from reclaim.data.schema import RESOURCES
from reclaim.data.style import RESOURCE_WORDS
from reclaim.data.table import Cell, Table
from reclaim.replay.kinds import Results
from reclaim.replay.metrics import METRICS

_SPLIT: Final = {"task-windows": "task_windows", "reclaimed": "reclaimed_share", "violation": "violation_rate"}
_DETAIL: Final = {
    "next 5 min violation": "next_violation_rate",
    "violation depth": "violation_depth",
    "severity": "violation_severity",
    "violation lasts, s": "violation_duration_s",
    "time in violation": "under_time",
    "slack": "slack_share",
    "changes a day": "changes_per_day",
    "size of a change": "change_size",
    "overrun": "overrun_share",
    "limit exceeded": "limit_exceeded_rate",
}


def split_table(results: Results, split: str, margin: str) -> Table:
    """Return one row per estimator and group of a split (``tiers`` or ``ages``), at one margin."""
    columns = ("estimator", split.removesuffix("s"), *(f"{RESOURCE_WORDS[r]} {k}" for r in RESOURCES for k in _SPLIT))
    rows: list[tuple[Cell, ...]] = []
    for estimator in results["estimators"]:
        for group, measured in estimator["results"].get(margin, {}).get(split, {}).items():
            values = [measured[metric][r] for r in RESOURCES for metric in _SPLIT.values()]
            rows.append((estimator["name"], group, *(int(v) if i % 3 == 0 else v for i, v in enumerate(values))))
    percent = frozenset(c for c in columns[2:] if not c.endswith("task-windows"))
    return Table(columns, tuple(rows), percent=percent)


def detail_table(results: Results) -> Table:
    """Return the remaining metrics of all test rows, one row per estimator, margin and resource."""
    columns = ("estimator", "margin", "resource", "reclaimed, interval", "violation, interval", *_DETAIL)
    rows: list[tuple[Cell, ...]] = []
    for estimator in results["estimators"]:
        for margin, measured in estimator["results"].items():
            for r in RESOURCES:
                of = {metric: measured["all"][metric][r] for metric in METRICS}
                intervals = (_interval(of["reclaimed_share"]), _interval(of["violation_rate"]))
                rows.append(
                    (
                        estimator["name"],
                        margin,
                        RESOURCE_WORDS[r],
                        *intervals,
                        *(of[m]["value"] for m in _DETAIL.values()),
                    )
                )
    return Table(columns, tuple(rows), percent=frozenset(k for k, metric in _DETAIL.items() if METRICS[metric].share))


def margins_table(results: Results) -> Table:
    """Return the margins that were used, and what they came to on the validation rows they were set on."""
    columns = ["estimator", "margin"]
    columns += [f"{RESOURCE_WORDS[r]} {k}" for r in RESOURCES for k in ("share", "violation", "reclaimed")]
    rows: list[tuple[Cell, ...]] = []
    for e in results["estimators"]:
        for name, share in e["margins"].items():
            seen = e["validation"][name]
            row: list[Cell] = [e["name"], name]
            row += [v for r in RESOURCES for v in (share[r], seen["violation_rate"][r], seen["reclaimed_share"][r])]
            rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), percent=frozenset(columns[2:]))


def sequence_table(results: Results) -> Table:
    """Return one row per estimator and quarter of the test period."""
    columns = ["estimator", "quarter", "margin"]
    columns += [f"{RESOURCE_WORDS[r]} reclaimed" for r in RESOURCES]
    rows: list[tuple[Cell, ...]] = []
    for e in results["estimators"]:
        for i, segment in enumerate(e["sequence"]["segments"] if e["sequence"] else ()):
            reclaimed = (segment["reclaimed_share"][r] for r in RESOURCES)
            rows.append((e["name"], i + 1, segment["margin"], *reclaimed, segment["tasks_over"], segment["events"]))
    return Table((*columns, "tasks over", "would-be OOM"), tuple(rows), percent=frozenset(columns[3:]))


def _interval(cell: Mapping[str, float | None]) -> str:
    low, high = cell["low"], cell["high"]
    return "-" if low is None or high is None else f"{100 * low:.2f} … {100 * high:.2f} %"
