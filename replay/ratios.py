"""The ratios experiment (EuroSys'15, Figure 11): of each task, usage and reservation over the limit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, MEMORY_MEAN, demand
from reclaim.replay.cell import Cell, period_facts
from reclaim.replay.constants import ROUNDING
from reclaim.replay.folded import LIMIT, fold
from reclaim.replay.kinds import LEARNED, STATISTICAL, Experiment, Measured, Source
from reclaim.replay.openloop import in_force, oracle, window_seconds
from reclaim.replay.ratios_figures import ratios_of_tasks
from reclaim.replay.ratios_page import COLUMNS, judged, runs, says, sections
from reclaim.replay.scoring import number
from reclaim.replay.settings import ReplayConfig

Floats = NDArray[np.float64]

LEVELS: Final = np.linspace(0.0, 1.0, 201)
"""Shares of the tasks at which a distribution is kept: every half percent."""


@dataclass(frozen=True)
class RatiosConfig(ReplayConfig):
    """How tasks are counted."""

    alike: bool = False
    """Whether every task counts alike, however long it ran; else by how long, as tasks are met by who looks at a cell
    at some moment. Most tasks of a batch cell are short, and hold their limit all their life."""


@dataclass(frozen=True)
class TaskMeans:
    """Means over the test windows of every task, each window weighted by its length.

    Attributes
    ----------
    task : int64, shape (n,)
        Task of each test row, from 0.
    n_tasks : int
    limit, demand : float64, shape (n, n_resources)
        Of the row; what its own window demanded.
    seconds : float64, shape (n, n_resources)
        Length of the row's window; 0 where its usage or a limit above 0 is not known.
    usage, granted : float64, shape (n_tasks, n_resources)
        Mean usage over the limit, and mean of what of it lay within the limit; NaN for a task of which nothing is
        known.
    weight : float64, shape (n_tasks, n_resources)
        What a task counts.
    """

    task: NDArray[np.int64]
    n_tasks: int
    limit: Floats
    demand: Floats
    seconds: Floats
    usage: Floats
    granted: Floats
    weight: Floats

    @classmethod
    def of(cls, cell: Cell, *, alike: bool = True) -> TaskMeans:
        """Lay out the test rows of a cell, which stand task by task; tasks count alike, or by the time they ran."""
        windows, rows = cell.history.windows, cell.test
        starts = (np.diff(windows.collection_id[rows]) != 0) | (np.diff(windows.instance_index[rows]) != 0)
        task = np.cumsum(np.append(False, starts)).astype(np.int64)
        memory = windows.usage[rows, MEMORY_MEAN]
        memory = np.where(np.isnan(memory), windows.usage[rows, MEMORY_MAX], memory)
        usage = np.stack([windows.usage[rows, CPU_MEAN], memory], axis=1)
        limit, length_s = windows.limit[rows], window_seconds(windows)[rows]
        known = np.isfinite(usage) & np.isfinite(limit) & (limit > 0)
        seconds, none = np.where(known, length_s[:, None], 0.0), usage[:0]
        means = cls(task, int(task[-1]) + 1, limit, demand(windows)[rows], seconds, none, none, none)
        weight = np.where(means.total_s > 0, 1.0, 0.0) if alike else means.total_s
        return replace(means, usage=means.mean(usage), granted=means.mean(np.minimum(usage, limit)), weight=weight)

    def mean(self, values: Floats) -> Floats:
        """Return the mean of values over the limit, (n, n_resources), of each task; (n_tasks, n_resources)."""
        known = self.seconds > 0
        share = np.divide(values, self.limit, out=np.zeros(values.shape), where=known)
        total = self.total_s
        return self._by_task(share * self.seconds) / np.where(total > 0, total, np.nan)

    def over(self, held: Floats) -> NDArray[np.bool_]:
        """Say of each task whether its demand ever passed what was in force, (n, n_resources)."""
        above = (self.seconds > 0) & (self.demand > held * (1 + ROUNDING))
        return self._by_task(above.astype(np.float64)) > 0

    @property
    def total_s(self) -> Floats:
        """How long each task was measured, in seconds; shape (n_tasks, n_resources)."""
        return self._by_task(self.seconds)

    def _by_task(self, values: Floats) -> Floats:
        columns = [np.bincount(self.task, values[:, r], self.n_tasks) for r in range(len(RESOURCES))]
        return np.stack(columns, axis=1).astype(np.float64)


def measure(source: Source, config: RatiosConfig) -> Measured:
    """Measure the ratios under every margin of every estimator.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    folded = fold(source, config)
    history, means = folded.history, TaskMeans.of(folded.cell, alike=config.alike)
    estimators = []
    names = [name for name in folded.bases if name != LIMIT]
    for name in tqdm(names, desc="ratios", unit="estimator", disable=None if source.progress else True):
        started = time.perf_counter()
        margins = {
            margin: held_of(in_force(reservation, history)[folded.cell.test], means)
            for margin, reservation in folded.reservations(name).items()
        }
        kind = LEARNED if name in source.bundles else STATISTICAL
        drawn = kind == LEARNED or name == "borg" or (not source.bundles and name == names[0])
        estimators.append({"name": name, "kind": kind, "drawn": drawn, "margins": margins})
        source.seconds[f"ratios/{name}"] = time.perf_counter() - started
    best = held_of(in_force(oracle(history).reservation, history)[folded.cell.test], means)
    results = {
        "dataset": period_facts(folded.cell),
        "alike": config.alike,
        "levels": LEVELS.tolist(),
        "tasks": {name: int(np.isfinite(means.usage[:, r]).sum()) for r, name in enumerate(RESOURCES)},
        "usage": {
            name: used_of(means.usage[:, r], means.granted[:, r], means.weight[:, r])
            for r, name in enumerate(RESOURCES)
        },
        "oracle": best,
        "estimators": estimators,
    }
    return Measured(results, DEFINITIONS)


def held_of(held: Floats, means: TaskMeans) -> dict[str, dict[str, Any]]:
    """Return of what was in force, shape (n, n_resources): its distribution, the gap to usage, who passed it."""
    ratio, over = means.mean(held), means.over(held)
    report = {}
    for r, resource in enumerate(RESOURCES):
        known = np.isfinite(ratio[:, r])
        gap = (ratio[:, r] - means.granted[:, r])[known]
        weight = means.weight[:, r]
        report[resource] = _spread(ratio[:, r], weight) | {
            "gap": number(_mean(gap, weight[known])),
            "over": number(over[known, r].mean() if len(gap) else np.nan),
        }
    return report


def used_of(usage: Floats, granted: Floats, weight: Floats) -> dict[str, Any]:
    """Return of usage, shape (n_tasks,): its distribution, the mean within the limit, and who uses more than that."""
    known = np.isfinite(usage)
    return _spread(usage, weight) | {
        "within_limit": number(_mean(granted[known], weight[known])),
        "over_limit": number(_mean((usage[known] > 1 + ROUNDING).astype(np.float64), weight[known])),
    }


def _mean(values: Floats, weight: Floats) -> float:
    return float(np.average(values, weights=weight)) if weight.sum() > 0 else np.nan


def _spread(ratio: Floats, weight: Floats) -> dict[str, Any]:
    """Return quartiles, mean and the values at ``LEVELS`` of ratios, shape (n_tasks,), and of their weights."""
    finite = np.isfinite(ratio) & (weight > 0)
    known, weight = ratio[finite], weight[finite]
    values = np.full(len(LEVELS), np.nan)
    if len(known):
        values = np.quantile(known, LEVELS, weights=weight, method="inverted_cdf")
    low, median, high = (values[round(q * (len(LEVELS) - 1))] for q in (0.25, 0.5, 0.75))
    return {
        "q25": number(low),
        "median": number(median),
        "q75": number(high),
        "mean": number(_mean(known, weight)),
        "quantiles": [number(v) for v in values],
    }


DEFINITIONS: Final[Mapping[str, str]] = {
    "usage": "Mean usage of a window over the limit then; of a task, the mean over its windows of the test period, "
    "weighted by their length. Above 1 a task used more CPU than it was granted.",
    "reservation": "What was in force when a window began, over the limit then, in the same mean: the limit in a "
    "task's first window, and afterwards the answer to the window before.",
    "gap": "Mean over tasks, each by its weight, of reservation less usage, over the limit, where usage counts up to "
    "the limit: nothing beyond that is ever reserved. Usage above the reservation takes some of it away.",
    "over the limit": "Share of tasks, each by its weight, of which the mean usage is above the limit: CPU that was "
    "free and not granted.",
    "over": "Share of tasks of which in any window the demand (of CPU the 90th percentile, of memory the largest "
    "usage) passed the reservation then in force.",
    "weight": "A task counts by how long it ran in the test period, as tasks are met by who looks at the cell at some "
    "moment; with `--set alike=true` every task counts the same. `Ever over` is of tasks, each the same, in any case.",
}


EXPERIMENT: Final = Experiment(
    name="ratios",
    title="Ratios: usage and reservation over the limit",
    version=3,
    config=RatiosConfig,
    measure=measure,
    says=says,
    sections=sections,
    figures={"ratios": ratios_of_tasks},
    runs=runs,
    columns=COLUMNS,
    judged=judged,
)
