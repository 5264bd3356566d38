"""Defines, counts and shows the metrics of the service for Prometheus."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import FAR_ABOVE
from reclaim.features.groups import TIER_LABELS
from reclaim.serving.cell import outcomes
from reclaim.serving.monitoring.drift import DriftNumbers
from reclaim.serving.monitoring.quality import QualityNumbers
from reclaim.serving.wire.cell_schemas import CellPrice, MachineMargin
from reclaim.serving.wire.errors import BAD_REQUEST, INTERNAL
from reclaim.training.margins.margin import MARGIN_NAMES

PREFIX: Final = "reclaim_"
ROLES: Final = ("served", "shadow")
"""Roles of a model: the one that answers, and the one that is scored for comparison."""
OUTCOMES: Final = (*outcomes.OUTCOMES, "refused")
"""Outcomes of a window; a late one is taken, too, and a ``refused`` one could not be read."""
PHASES: Final = ("decode", "admit", "log", "fold", "score", "publish")
"""The parts of a write, in their order."""
ANSWER_PHASES: Final = ("decode", "features", "answer", "encode")
"""The parts of an answer for many tasks: the first two only for a request that brings histories, the
third only for others."""
PROMOTIONS: Final = ("promoted", "refused")
RECORDINGS: Final = ("written", "dropped")

BUCKETS_S: Final = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper edges, in seconds; the aims are among them: 1.5 ms, 20 ms, 0.5 s."""
_MOST_SERIES: Final = 200
"""Series of requests at most, so that callers cannot make new ones without end."""

Values = float | Mapping[tuple[str, ...], float]
Shown = Mapping[str, Values]
"""Values by name, as in ``SHOWN``: a number, or one for each combination of labels; NaN is not shown."""


@dataclass(frozen=True)
class Family:
    """A metric whose value is read when Prometheus asks.

    Attributes
    ----------
    kind : ``gauge`` or ``counter``
        A counter counts from the start of the process, and its name ends in ``_total``.
    help : str
    labels : tuple of str
    """

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


_PRICED: Final = ("margin", "tier", "resource")
_OF_MACHINES: Final = ("horizon_s", "margin", "resource")
_BY_TIER: Final = ("role", "tier", "resource")
_JUDGED: Final = "whose horizon has passed with something measured in it"

SHOWN: Final[Mapping[str, Family]] = {
    "ready": Family("gauge", "1 while /readyz is ok, else 0."),
    "requests_under_way": Family("gauge", "Requests under way."),
    "writes_waiting": Family("gauge", "Writes in the queue."),
    "tasks_tracked": Family("gauge", "Tasks in memory."),
    "tasks_stale": Family("gauge", "Tasks whose last window is too old to rest a reservation on."),
    "tasks_room": Family("gauge", "Number of further tasks that the memory has room for."),
    "state_bytes": Family("gauge", "Size of the state: memory, log, snapshot.", ("part",)),
    "snapshot_age_seconds": Family("gauge", "Time since the last snapshot was made."),
    "snapshot_duration_seconds": Family("gauge", "Duration of the last snapshot."),
    "store_ok": Family("gauge", "1 while writes can be kept, 0 when the store is broken."),
    "recovered_notes": Family("gauge", "Damages found and repaired at the start, and a cell that began again there."),
    "model_info": Family("gauge", "The model in each role; always 1.", ("role", "name", "version", "alias")),
    "model_loaded_timestamp_seconds": Family("gauge", "When the model was loaded, since 1970.", ("role",)),
    "model_fallback": Family(
        "gauge", "1 while the built-in model or one kept on disk serves in place of the one that is configured, else 0."
    ),
    "registry_reachable": Family("gauge", "1 while the model registry answers, else 0."),
    "margin_budget_ratio": Family("gauge", "Share of answers that may be violated under a margin.", ("margin",)),
    "margin_in_use": Family(
        "gauge",
        "1 for the default margin and those that reservations of the cell were asked for in the last day, else 0.",
        ("margin",),
    ),
    "price_limits": Family(
        "gauge", "Price of a violation that reservations are made at, in limits of a task of mean size.", _PRICED
    ),
    "price_moved_ratio": Family("gauge", "Price over the model's own one, as it follows the outcomes.", _PRICED),
    "price_budget_spent_ratio": Family(
        "gauge", "Violated share of the answers whose horizon ended in the last day or so, over the budget.", _PRICED
    ),
    "machines_limit_amount": Family(
        "gauge", "Sum of the limits of all tasks on machines, in the cell's unit.", ("resource",)
    ),
    "machines_reclaimable_amount": Family(
        "gauge",
        "Those limits less the peaks of the machines, in the cell's unit; up to ten seconds old.",
        ("margin", "resource"),
    ),
    "machines_answers_total": Family(
        "counter",
        "Answers for machines whose horizon has passed with the machine measured in it.",
        ("horizon_s", "resource"),
    ),
    "machines_violations_total": Family(
        "counter", "Those of them whose peak exceeded what was reserved.", _OF_MACHINES
    ),
    "machines_budget_spent_ratio": Family(
        "gauge", "Violated share of the answers for machines of the last day or so, over the budget.", _OF_MACHINES
    ),
    "machines_asked_ratio": Family(
        "gauge", "Probability that is asked for machines over the budget, as it follows the outcomes.", _OF_MACHINES
    ),
    "machines_at_once_ratio": Family(
        "gauge", "Share of the machines whose peak exceeded what was reserved at the last known time.", _OF_MACHINES
    ),
    "machines_most_at_once_ratio": Family("gauge", "The largest such share of the last day.", _OF_MACHINES),
    "mean_limit_ratio": Family(
        "gauge",
        "Mean limit of the cell's tasks, right to a factor of 1.5, over that of those that the model was trained on; "
        "not of the built-in model.",
        ("resource",),
    ),
    "clock_ok": Family("gauge", "1 while windows and the clock agree, 0 when /readyz names what is wrong."),
    "clock_refused_ratio": Family(
        "gauge",
        "Tasks with windows refused for their time in the last minutes, over these and those with windows taken; a "
        "task may be both.",
    ),
    "clock_timestamp_seconds": Family("gauge", "The cell's clock."),
    "clock_lag_seconds": Family("gauge", "Difference from the cell's clock to this machine's."),
    "quality_answers_total": Family("counter", f"Answers {_JUDGED}.", _BY_TIER),
    "quality_forecasts_total": Family("counter", "Those of them that had quantiles.", _BY_TIER),
    "quality_covered_total": Family(
        "counter", "Forecasts whose quantile the demand did not exceed.", (*_BY_TIER, "level")
    ),
    "quality_violations_total": Family(
        "counter", "Answers whose reservation the demand exceeded.", ("role", "margin", "tier", "resource")
    ),
    "quality_limit_total": Family("counter", f"Sum of the limits of answers {_JUDGED}, in their unit.", _BY_TIER),
    "quality_reserved_total": Family(
        "counter", "Sum of the reservations for those limits.", ("role", "margin", "tier", "resource")
    ),
    "quality_reclaimed_ratio": Family(
        "gauge", "Share of the limits that was reclaimed, since the start.", ("role", "margin", "resource")
    ),
    "quality_oom_answers_total": Family(
        "counter", "Answers with an OOM probability and its outcome.", ("role", "tier")
    ),
    "quality_oom_events_total": Family("counter", "Those of them that met an OOM.", ("role", "tier")),
    "quality_oom_predicted_total": Family(
        "counter", "Sum of their probabilities; equal to the events where calibrated.", ("role", "tier")
    ),
    "quality_oom_brier_total": Family(
        "counter", "Sum of squared differences between probability and outcome.", ("role", "tier")
    ),
    "quality_failures_total": Family("counter", "Failures reported; without any, no OOM can be known.", ("role",)),
    "drift_rows": Family("gauge", "Weight of the rows that drift is computed from; rows fade over a day.", ("role",)),
    "drift_outside_ratio": Family("gauge", "Share of feature values outside the range of training.", ("role",)),
    "drift_mean_deviations": Family(
        "gauge", "Of the feature that drifted most, the shift of its mean, in standard deviations.", ("role",)
    ),
    "drift_feature_deviations": Family(
        "gauge", "Shift of the means of the features that drifted most.", ("role", "feature")
    ),
}
"""All metrics that are read when Prometheus asks, by name without ``PREFIX``."""


class Metrics(Collector):
    """Counts and times events of the service, and reads all other values when Prometheus asks.

    All numbers are in a registry of this object and this process: the service has one worker. Methods may be called
    from any thread.

    Attributes
    ----------
    registry : CollectorRegistry
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each, which nothing reads
        self.registry = CollectorRegistry()
        self._requests = self._histogram(
            "request_duration_seconds", "Time to answer, by route.", "endpoint", "method", "status"
        )
        self._refused = self._counter("requests_refused", "Requests refused, by HTTP status.", "code")
        windows = self._counter("windows", "Usage windows, by outcome; refused: could not be read.", "outcome")
        phases = self._histogram("write_phase_duration_seconds", "Time that each part of a write took.", "phase")
        answer_phases = self._histogram(
            "answer_phase_duration_seconds", "Time that each part of an answer for many tasks took.", "phase"
        )
        promotions = self._counter("promotions", "Models that an alias was moved to, by outcome.", "outcome")
        recorded = self._counter(
            "recorded_windows", "Windows for --record, by outcome; dropped: not written.", "outcome"
        )
        above = self._counter(
            "windows_above_limit", f"Windows taken whose mean usage is above {FAR_ABOVE:g} times the limit.", "resource"
        )
        # a series by its label, at 0 from the start: to look one up costs more than to count
        self._windows = {name: windows.labels(name) for name in OUTCOMES}
        self._phases = {name: phases.labels(name) for name in PHASES}
        self._answer_phases = {name: answer_phases.labels(name) for name in ANSWER_PHASES}
        self._promotions = {name: promotions.labels(name) for name in PROMOTIONS}
        self._recorded = {name: recorded.labels(name) for name in RECORDINGS}
        self._above = [above.labels(name) for name in RESOURCES]
        self._series: set[tuple[str, ...]] = set()
        """Labels of requests that were seen."""
        self._shown: list[Callable[[], Shown]] = []
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, registry=self.registry, buckets=BUCKETS_S)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, (label,), registry=self.registry)

    def request(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request; ``endpoint`` is the route's template, never the path of the request."""
        labels = (endpoint, method, f"{status // 100}xx")
        if labels not in self._series:
            if len(self._series) < _MOST_SERIES:
                self._series.add(labels)
            else:
                labels = ("other", "other", labels[2])
        self._requests.labels(*labels).observe(seconds)
        if status >= BAD_REQUEST and status != INTERNAL:
            self._refused.labels(str(status)).inc()

    def windows(self, outcome: str, n: int = 1) -> None:
        """Count windows by outcome, one of ``OUTCOMES``."""
        if n:
            self._windows[outcome].inc(n)

    def above_limit(self, counts: Sequence[int]) -> None:
        """Count windows whose usage is far above the limit, by resource."""
        for series, n in zip(self._above, counts, strict=True):
            if n:
                series.inc(n)

    def phase(self, name: str, seconds: float) -> None:
        """Record the duration of a part of a write, one of ``PHASES``."""
        self._phases[name].observe(seconds)

    @contextmanager
    def answering(self, phase: str) -> Iterator[None]:
        """Record the duration of a part of an answer for many tasks, one of ``ANSWER_PHASES``, unless it fails."""
        began = time.perf_counter()
        yield
        self._answer_phases[phase].observe(time.perf_counter() - began)

    def promotion(self, outcome: str) -> None:
        """Count a model that an alias was moved to, one of ``PROMOTIONS``."""
        self._promotions[outcome].inc()

    def recorded(self, outcome: str, n: int) -> None:
        """Count windows by the outcome of their recording, one of ``RECORDINGS``."""
        self._recorded[outcome].inc(n)

    def show(self, read: Callable[[], Shown]) -> None:
        """Call ``read`` for values when Prometheus asks, in a thread of its own."""
        self._shown.append(read)

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield the families of ``SHOWN`` that have a value."""
        merged: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in SHOWN}
        for read in self._shown:
            for name, values in read().items():
                merged[name].update(values if isinstance(values, Mapping) else {(): values})
        for name, values in merged.items():
            known = {labels: value for labels, value in values.items() if not math.isnan(value)}
            if known:
                yield _shown(name, known)


def _shown(name: str, values: Mapping[tuple[str, ...], float]) -> Metric:
    family = SHOWN[name]
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    made = kind(PREFIX + name.removesuffix("_total"), family.help, labels=family.labels)
    for key, value in values.items():
        made.add_metric(key, value)
    return made


def quality_shown(role: str, numbers: QualityNumbers) -> Shown:
    """Return the quality of a model in a role of ``ROLES``, by metric."""
    n, levels = numbers, [f"{level:g}" for level in numbers.levels]
    return {
        "quality_answers_total": _labelled(role, n.judged, TIER_LABELS, RESOURCES),
        "quality_forecasts_total": _labelled(role, n.forecast, TIER_LABELS, RESOURCES),
        "quality_covered_total": _labelled(role, n.covered, TIER_LABELS, RESOURCES, levels),
        "quality_violations_total": _labelled(role, n.violated.swapaxes(0, 1), n.margins, TIER_LABELS, RESOURCES),
        "quality_limit_total": _labelled(role, n.limit, TIER_LABELS, RESOURCES),
        "quality_reserved_total": _labelled(role, n.reserved.swapaxes(0, 1), n.margins, TIER_LABELS, RESOURCES),
        "quality_reclaimed_ratio": _labelled(role, n.reclaimed, n.margins, RESOURCES),
        "quality_oom_answers_total": _labelled(role, n.oom_judged, TIER_LABELS),
        "quality_oom_events_total": _labelled(role, n.oom_met, TIER_LABELS),
        "quality_oom_predicted_total": _labelled(role, n.oom_predicted, TIER_LABELS),
        "quality_oom_brier_total": _labelled(role, n.oom_brier, TIER_LABELS),
        "quality_failures_total": {(role,): float(n.failures[0])},
    }


def prices_shown(prices: Iterable[CellPrice]) -> Shown:
    """Return the prices of the moment, their ratios to the model's, and the violations over the budgets."""
    out: dict[str, dict[tuple[str, ...], float]] = {
        name: {} for name in ("price_limits", "price_moved_ratio", "price_budget_spent_ratio")
    }
    for price in prices:
        labels = price.margin, price.tier, price.resource
        out["price_limits"][labels] = price.now
        if price.start > 0:
            out["price_moved_ratio"][labels] = price.now / price.start
        if price.violated is not None and price.budget is not None:
            out["price_budget_spent_ratio"][labels] = price.violated / price.budget
    return out


def machines_shown(limit: NDArray[np.float64], reclaimable: NDArray[np.float64]) -> Shown:
    """Return totals over all machines; limit (n_resources,), reclaimable (n_margins, n_resources)."""
    margins = dict(zip(MARGIN_NAMES, reclaimable.tolist(), strict=True))
    return {
        "machines_limit_amount": {(r,): value for r, value in zip(RESOURCES, limit.tolist(), strict=True)},
        "machines_reclaimable_amount": {
            (margin, r): value for margin, of in margins.items() for r, value in zip(RESOURCES, of, strict=True)
        },
    }


def machine_margins_shown(margins: Iterable[MachineMargin]) -> Shown:
    """Return the margins of machines of the moment, and the outcomes of earlier answers."""
    names = ("answers_total", "violations_total", "budget_spent_ratio", "asked_ratio", "at_once_ratio",
             "most_at_once_ratio")  # fmt: skip
    out: dict[str, dict[tuple[str, ...], float]] = {f"machines_{name}": {} for name in names}
    for of in margins:
        horizon, spent = str(of.horizon_s), None if of.recent is None else of.recent / of.budget
        out["machines_answers_total"][horizon, of.resource] = of.judged
        values = (of.violated, spent, of.asked / of.budget, of.at_once, of.most_at_once)
        for name, value in zip(names[1:], values, strict=True):
            if value is not None:
                out[f"machines_{name}"][horizon, of.margin, of.resource] = value
    return out


def drift_shown(role: str, numbers: DriftNumbers) -> Shown:
    """Return the drift of the inputs of a model in a role of ``ROLES``, by metric."""
    return {
        "drift_rows": {(role,): numbers.rows},
        "drift_outside_ratio": {(role,): numbers.outside},
        "drift_mean_deviations": {(role,): numbers.mean},
        "drift_feature_deviations": {(role, f.name): f.mean for f in numbers.most},
    }


def _labelled(
    role: str, values: NDArray[np.int64] | NDArray[np.float64], *axes: Iterable[str]
) -> dict[tuple[str, ...], float]:
    names = [list(axis) for axis in axes]
    return {
        (role, *(names[k][i] for k, i in enumerate(place))): float(value) for place, value in np.ndenumerate(values)
    }
