"""Ratios experiment (EuroSys'15, Figure 11): usage and reservation of each task over its limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import is_first
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import demand
from reclaim.replay.experiment import LEARNED, Experiment, Measured, Source
from reclaim.replay.experiments.ratios.page import COLUMNS, console_table, page, ratios_of_tasks, runs
from reclaim.replay.open_loop.bootstrap import number
from reclaim.replay.open_loop.estimates import LIMIT, estimate_all
from reclaim.replay.open_loop.history import current_reservations, mean_usage, oracle, window_seconds
from reclaim.replay.open_loop.period import Period, period_facts
from reclaim.replay.open_loop.rows import sums_by
from reclaim.replay.settings import ReplayConfig
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]

LEVELS: Final = np.linspace(0.0, 1.0, 201)
"""Shares of the tasks at which a distribution is kept: every half percent."""


@dataclass(frozen=True)
class RatiosConfig(ReplayConfig):
    """Settings of the count."""

    alike: bool = False
    """Counts every task alike, however long it ran; else each by how long it ran, as tasks are seen in a snapshot of a
    cell. Most tasks of a batch cell are short, and hold their limit all their life."""


@dataclass(frozen=True)
class TaskMeans:
    """Means over the test windows of every task, each window weighted by its length.

    Attributes
    ----------
    task : int64, shape (n,)
        Task of each test row, from 0.
    n_tasks : int
    limit, demand : float64, shape (n, n_resources)
        Limit of the row; demand of its own window.
    seconds : float64, shape (n, n_resources)
        Length of the row's window; 0 where its usage is unknown, or its limit unknown or 0.
    usage, granted : float64, shape (n_tasks, n_resources)
        Mean usage over the limit, and mean of usage up to the limit; NaN where nothing is known.
    weight : float64, shape (n_tasks, n_resources)
        Weight of a task.
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
    def lay_out(cls, period: Period, *, alike: bool = True) -> TaskMeans:
        """Lay out the test rows of a cell, which stand task by task; tasks count alike, or by the time they ran."""
        windows, rows = period.history.windows, period.rows
        task = np.cumsum(is_first(windows.collection_id[rows], windows.instance_index[rows])).astype(np.int64) - 1
        usage = mean_usage(windows)[rows]
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

    def over(self, current: Floats) -> NDArray[np.bool_]:
        """Return which tasks' demand ever passed the current reservation, (n, n_resources); (n_tasks, n_resources)."""
        above = (self.seconds > 0) & violates(self.demand, current)
        return self._by_task(above.astype(np.float64)) > 0

    @property
    def total_s(self) -> Floats:
        """Measured seconds of each task; shape (n_tasks, n_resources)."""
        return self._by_task(self.seconds)

    def _by_task(self, values: Floats) -> Floats:
        return sums_by(self.task, values, self.n_tasks)


def measure(source: Source, config: RatiosConfig) -> Measured:
    """Measure the ratios under every margin of every estimator.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    estimates = estimate_all(source, config)
    history, means = estimates.history, TaskMeans.lay_out(estimates.period, alike=config.alike)
    estimators = []
    names = [name for name in estimates.answers if name != LIMIT]
    for name in source.each(names, "ratios", "ratios"):
        margins = {
            margin: describe_reservations(current_reservations(reservation, history)[estimates.period.rows], means)
            for margin, reservation in estimates.reservations(name).items()
        }
        kind = source.kind(name)
        drawn = kind == LEARNED or name == "borg" or (not source.bundles and name == names[0])
        estimators.append({"name": name, "kind": kind, "drawn": drawn, "margins": margins})
    best = describe_reservations(
        current_reservations(oracle(history).reservation, history)[estimates.period.rows], means
    )
    results = {
        "dataset": period_facts(estimates.period),
        "alike": config.alike,
        "levels": LEVELS.tolist(),
        "tasks": {name: int(np.isfinite(means.usage[:, r]).sum()) for r, name in enumerate(RESOURCES)},
        "usage": {
            name: describe_usage(means.usage[:, r], means.granted[:, r], means.weight[:, r])
            for r, name in enumerate(RESOURCES)
        },
        "oracle": best,
        "estimators": estimators,
    }
    return Measured(results, DEFINITIONS)


def describe_reservations(current: Floats, means: TaskMeans) -> dict[str, dict[str, Any]]:
    """Describe current reservations, shape (n, n_resources): distribution, gap to usage, share of tasks over them."""
    ratio, over = means.mean(current), means.over(current)
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


def describe_usage(usage: Floats, granted: Floats, weight: Floats) -> dict[str, Any]:
    """Describe usage, shape (n_tasks,): distribution, mean within the limit, and share of tasks over the limit."""
    known = np.isfinite(usage)
    return _spread(usage, weight) | {
        "within_limit": number(_mean(granted[known], weight[known])),
        "over_limit": number(_mean(violates(usage[known], 1.0).astype(np.float64), weight[known])),
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
    "reservation": "The one that a task had when a window began, over the limit then, in the same mean: the limit in a "
    "task's first window, and afterwards the answer to the window before.",
    "gap": "Mean over tasks, each by its weight, of reservation less usage, over the limit, where usage counts up to "
    "the limit: nothing beyond that is ever reserved. Usage above the reservation takes some of it away.",
    "oracle": "Reserves exactly what will be used within the horizon, and the limit where that is unknown: in the last "
    "horizon of the trace, and in the first window of each task in the test period, because what is used there is kept "
    "from earlier answers. In a short test period its gap can be wider than that of an estimator.",
    "over the limit": "Share of tasks, each by its weight, of which the mean usage is above the limit: CPU that was "
    "free and not granted.",
    "over": "Share of tasks of which in any window the demand (of CPU the 90th percentile, of memory the largest "
    "usage) passed its reservation.",
    "weight": "A task counts by how long it ran in the test period, as often as it is seen at a random "
    "moment; with `--set alike=true` every task counts the same. `Ever over` is of tasks, each the same, in any case.",
}


EXPERIMENT: Final = Experiment(
    name="ratios",
    title="Ratios: usage and reservation over the limit",
    version=7,
    config=RatiosConfig,
    measure=measure,
    page=page,
    summary=console_table,
    figures={"ratios": ratios_of_tasks},
    runs=runs,
    columns=COLUMNS,
)
