"""Builds the tables of the margins page: splits and details of each estimator, and those of the simulated cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from reclaim.data.core.prose import interval
from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.closed_loop.records import REASONS
from reclaim.replay.experiment import Results
from reclaim.replay.open_loop.metrics import METRICS
from reclaim.training.margins.margin import MARGIN_NAMES

_KILLS: Final = "oom_kills_per_1000_task_days"
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
_IN_CELL: Final[Mapping[str, tuple[str, bool]]] = {
    **{f"{RESOURCE_WORDS[r]} in reclaimed": (f"in_reclaimed_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} granted": (f"granted_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} used": (f"utilisation_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} peaks passed": (f"machines_over_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} passed at once": (f"machines_over_at_once_{r}", True) for r in RESOURCES},
    "times out of memory": ("times_out_of_memory", False),
    "OOM kills": ("oom_kills", False),
    "fewest": ("fewest_kills", False),
    "most": ("most_kills", False),
    "runs killed": ("runs_killed", False),
    "of production": ("production_oom_kills", False),
    "machine OOM / 1,000 task-days": ("machine_per_1000_task_days", False),
    "own limit": ("own_limit_per_1000_task_days", False),
    "recorded": ("recorded_oom_per_1000_task_days", False),
    "preempted / 1,000 task-days": ("preempted_per_1000_task_days", False),
    "wasted": ("wasted", True),
    "missed": ("missed", True),
    "waiting": ("waiting", True),
    "never placed": ("never_placed", False),
    "delay p90, production, s": ("delay_p90_s_production", False),
    "delay p90, others, s": ("delay_p90_s_non_production", False),
    "throttled, batch": ("throttled_batch", True),
    "throttled, latency-sensitive": ("throttled_latency_sensitive", True),
    "CPU-hours throttled, batch": ("throttled_cpu_hours_batch", False),
    "latency-sensitive": ("throttled_cpu_hours_latency_sensitive", False),
}
_WHY: Final[Mapping[str, tuple[str, bool]]] = {
    "waiting, production": ("waiting_production", True),
    "waiting, others": ("waiting_non_production", True),
    **{f"for {reason.replace('_', ' ')}": (f"waiting_for_{reason}", True) for reason in REASONS[1:]},
}
_PART: Final[Mapping[str, tuple[str, bool]]] = {
    **{f"{RESOURCE_WORDS[r]} in reclaimed": (f"in_reclaimed_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} reserved": (f"reserved_{r}", True) for r in RESOURCES},
    **{f"{RESOURCE_WORDS[r]} used": (f"utilisation_{r}", True) for r in RESOURCES},
    "OOM kills": ("oom_kills", False),
    "OOM kills / 1,000 task-days": ("oom_kills_per_1000_task_days", False),
    "preempted / 1,000 task-days": ("preempted_per_1000_task_days", False),
    "tasks waiting": ("waiting_tasks", False),
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
                intervals = (interval(of["reclaimed_share"]), interval(of["violation_rate"]))
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
    """Return the margins or prices, and their violation rate and reclaimed share on the rows they were set on."""
    columns = ["estimator", "margin"]
    columns += [f"{RESOURCE_WORDS[r]} {k}" for r in RESOURCES for k in ("share", "price", "violation", "reclaimed")]
    rows: list[tuple[Cell, ...]] = []
    for e in results["estimators"]:
        for name, seen in e["validation"].items():
            row: list[Cell] = [e["name"], name]
            for r in RESOURCES:
                row += [e[kind].get(name, {}).get(r) for kind in ("margins", "prices")]
                row += [seen["violation_rate"][r], seen["reclaimed_share"][r]]
            rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), percent=frozenset(c for c in columns[2:] if not c.endswith("price")))


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


def cells_table(loop: Mapping[str, Any]) -> Table:
    """Return one row per simulation of the cell: an estimator under one margin throughout."""
    return _of_cells(loop, _IN_CELL)


def waiting_table(loop: Mapping[str, Any]) -> Table:
    """Return the task-time spent waiting in each simulation, by its reason."""
    return _of_cells(loop, _WHY)


def parts_table(loop: Mapping[str, Any]) -> Table:
    """Return one row per estimator and part of the sequence of margins."""
    rows: list[tuple[Cell, ...]] = [
        (e["name"], i + 1, part["margin"], *(part[key] for key, _ in _PART.values()))
        for e in loop["estimators"]
        for i, part in enumerate(e["sequence"] or ())
    ]
    return Table(("estimator", "part", "margin", *_PART), tuple(rows), _shares(_PART))


def kills_table(loop: Mapping[str, Any]) -> Table:
    """Return out-of-memory kills per 1,000 task-days under each margin, in each part, and whether they rise."""
    rows: list[tuple[Cell, ...]] = []
    parts = 0
    for e in loop["estimators"]:
        if e["sequence"] is None:
            continue
        rates = [e["runs"][m][_KILLS] or 0.0 for m in MARGIN_NAMES]
        in_turn = [part[_KILLS] or 0.0 for part in e["sequence"]]
        by_order = list(zip(*(e["kills_by_order"][m] for m in MARGIN_NAMES), strict=True))
        low, middle, high = rates
        order = "none" if not any(rates) else "rising" if low < middle < high else "not rising"
        rising = sum(a < b < c for a, b, c in by_order)
        total = sum(sum(kills) for kills in by_order)
        rows.append((e["name"], *rates, order, f"{rising} of {len(by_order)}", total, *in_turn))
        parts = len(in_turn)
    columns = (*MARGIN_NAMES, "order", "rising in simulations", "kills", *(f"part {i + 1}" for i in range(parts)))
    return Table(("estimator", *columns), tuple(rows))


def _of_cells(loop: Mapping[str, Any], shown: Mapping[str, tuple[str, bool]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for e in loop["estimators"]:
        for margin, run in e["runs"].items():
            kills = e["kills_by_order"][margin]
            of = {**run, "fewest_kills": min(kills), "most_kills": max(kills)}
            rows.append((e["name"], margin, *(of[key] for key, _ in shown.values())))
    return Table(("estimator", "margin", *shown), tuple(rows), _shares(shown))


def _shares(shown: Mapping[str, tuple[str, bool]]) -> frozenset[str]:
    return frozenset(heading for heading, (_, percent) in shown.items() if percent)
