"""What a replay found, for people: its tables, and one page with the figures, the definitions and how to repeat it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2

from reclaim.data.schema import RESOURCES
from reclaim.data.table import Cell as Cell
from reclaim.data.table import Table as Table
from reclaim.data.table import show as show
from reclaim.replay.metrics import METRICS

RESOURCE_TITLES: Final = {"cpu": "CPU", "memory": "memory"}
_TEMPLATE: Final = "report.html"


@dataclass(frozen=True)
class ReplayReport:
    """A finished replay.

    Attributes
    ----------
    folder : Path
        Where ``results.json``, ``report.html`` and the figures are.
    results : mapping
        What ``results.json`` holds.
    already_there : bool
        Whether an earlier run had made it, so that this one had nothing to do.
    seconds : mapping of str to float
        Wall time of each estimator's run over the history; empty when there was nothing to do.
    """

    folder: Path
    results: Mapping[str, Any]
    already_there: bool
    seconds: Mapping[str, float]

    @property
    def page(self) -> Path:
        """The page for people."""
        return self.folder / "report.html"


def results_table(report: ReplayReport | Mapping[str, Any], *, subset: str = "all") -> Table:
    """Return one row per estimator and margin, measured on the test rows.

    Parameters
    ----------
    report : ReplayReport or mapping
        A report, or what its ``results.json`` holds.
    subset : str
        ``all`` test rows, or those of collections ``unseen`` in training; events are of whole machines, and so only
        in the former.
    """
    results = report.results if isinstance(report, ReplayReport) else report
    names = {
        "reclaimed": "reclaimed_share",
        "violation": "violation_rate",
        "of oracle": "efficiency",
    }
    columns = ["estimator", "margin"]
    columns += [f"{RESOURCE_TITLES[r]} {label}" for r in RESOURCES for label in names]
    rows: list[tuple[Cell, ...]] = []
    for estimator in results["estimators"]:
        for margin, measured in estimator["results"].items():
            row: list[Cell] = [estimator["name"], margin]
            row += [measured[subset][metric][r]["value"] for r in RESOURCES for metric in names.values()]
            events = [measured["oom"]["events"]] if subset == "all" else []
            rows.append((*row, *events))
    shares = frozenset(columns[2:])
    columns += ["would-be OOM"] if subset == "all" else []
    return Table(tuple(columns), tuple(rows), percent=shares)


def split_table(results: Mapping[str, Any], split: str, margin: str) -> Table:
    """Return one row per estimator and group of a split (``tiers`` or ``ages``), at one margin."""
    columns = ("estimator", split.removesuffix("s"), *(f"{RESOURCE_TITLES[r]} {k}" for r in RESOURCES for k in _SPLIT))
    rows: list[tuple[Cell, ...]] = []
    for estimator in results["estimators"]:
        for group, measured in estimator["results"].get(margin, {}).get(split, {}).items():
            values = [measured[metric][r] for r in RESOURCES for metric in _SPLIT.values()]
            rows.append((estimator["name"], group, *(int(v) if i % 3 == 0 else v for i, v in enumerate(values))))
    percent = frozenset(c for c in columns[2:] if not c.endswith("task-windows"))
    return Table(columns, tuple(rows), percent=percent)


_SPLIT: Final = {"task-windows": "task_windows", "reclaimed": "reclaimed_share", "violation": "violation_rate"}


def detail_table(results: Mapping[str, Any]) -> Table:
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
                        RESOURCE_TITLES[r],
                        *intervals,
                        *(of[m]["value"] for m in _DETAIL.values()),
                    )
                )
    return Table(columns, tuple(rows), percent=frozenset(_DETAIL))


_DETAIL: Final = {
    "next 5 min violation": "next_violation_rate",
    "violation depth": "violation_depth",
    "overrun": "overrun_share",
    "limit exceeded": "limit_exceeded_rate",
}


def margins_table(results: Mapping[str, Any]) -> Table:
    """Return the margins that were used, and what they came to on the validation rows they were set on."""
    columns = ["estimator", "margin"]
    columns += [f"{RESOURCE_TITLES[r]} {k}" for r in RESOURCES for k in ("share", "violation", "reclaimed")]
    rows: list[tuple[Cell, ...]] = []
    for e in results["estimators"]:
        for name, share in e["margins"].items():
            seen = e["validation"][name]
            row: list[Cell] = [e["name"], name]
            row += [v for r in RESOURCES for v in (share[r], seen["violation_rate"][r], seen["reclaimed_share"][r])]
            rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), percent=frozenset(columns[2:]))


def sequence_table(results: Mapping[str, Any]) -> Table:
    """Return one row per estimator and quarter of the test period."""
    columns = ["estimator", "quarter", "margin"]
    columns += [f"{RESOURCE_TITLES[r]} reclaimed" for r in RESOURCES]
    rows: list[tuple[Cell, ...]] = []
    for e in results["estimators"]:
        for i, segment in enumerate(e["sequence"]["segments"] if e["sequence"] else ()):
            reclaimed = (segment["reclaimed_share"][r] for r in RESOURCES)
            rows.append((e["name"], i + 1, segment["margin"], *reclaimed, segment["tasks_over"], segment["events"]))
    return Table((*columns, "tasks over", "would-be OOM"), tuple(rows), percent=frozenset(columns[3:]))


def render_page(results: Mapping[str, Any], figures: Mapping[str, Path]) -> str:
    """Return the page: one file that needs no other, the figures inside it.

    Parameters
    ----------
    results : mapping
        What ``results.json`` holds.
    figures : mapping of str to Path
        SVG file of each figure by its name.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((resources.files("reclaim.replay") / _TEMPLATE).read_text(encoding="utf-8"))
    images = {name: base64.b64encode(path.read_bytes()).decode() for name, path in figures.items()}
    return template.render(
        results=results,
        images=images,
        metrics=METRICS,
        main=results_table(results),
        unseen=results_table(results, subset="unseen"),
        detail=detail_table(results),
        margins=margins_table(results),
        sequence=sequence_table(results),
        tiers=split_table(results, "tiers", "medium"),
        ages=split_table(results, "ages", "medium"),
    )


def _interval(cell: Mapping[str, float | None]) -> str:
    low, high = cell["low"], cell["high"]
    return "-" if low is None or high is None else f"{100 * low:.2f} … {100 * high:.2f} %"
