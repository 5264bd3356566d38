"""What Prometheus is told: the names of all metrics, and what counts and shows them."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from reclaim.data.schema import RESOURCES
from reclaim.features.groups import TIER_LABELS
from reclaim.serving import outcomes
from reclaim.serving.drift import DriftNumbers
from reclaim.serving.errors import BAD_REQUEST, INTERNAL
from reclaim.serving.quality import QualityNumbers

PREFIX: Final = "reclaim_"
ROLES: Final = ("served", "shadow")
"""What a number of a model is of: the model that answers, or the one scored beside it."""
OUTCOMES: Final = (*outcomes.OUTCOMES, "refused")
"""What becomes of a window; a late one is taken, too, and one that is ``refused`` could not be read at all."""
PHASES: Final = ("decode", "admit", "log", "fold", "score", "publish")
"""The parts of a write, in their order."""
ANSWER_PHASES: Final = ("decode", "features", "answer", "encode")
"""The parts of an answer for many tasks; the first two only where histories came with the question, and are scored as
a part of the answer, the third only where not."""
PROMOTIONS: Final = ("promoted", "refused")

BUCKETS_S: Final = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper edges, in seconds; what is aimed at stands among them: 1.5 ms, 20 ms, 0.5 s."""
_MOST_SERIES: Final = 200
"""Of requests: endpoints are our routes and methods are HTTP's, but a caller must not be able to make new ones."""

Values = float | Mapping[tuple[str, ...], float]
Shown = Mapping[str, Values]
"""Values by name, as in ``SHOWN``: a number, or one for each combination of labels. NaN is not shown."""


@dataclass(frozen=True)
class Family:
    """A metric whose value is asked for when Prometheus is.

    Attributes
    ----------
    kind : ``gauge`` or ``counter``
        A counter is shown as counted since the start, and its name ends in ``_total``.
    help : str
    labels : tuple of str
    """

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


_BY_TIER: Final = ("role", "tier", "resource")
_JUDGED: Final = "whose horizon has passed and in it something was measured"

SHOWN: Final[Mapping[str, Family]] = {
    "ready": Family("gauge", "1 while /readyz says so, else 0."),
    "requests_under_way": Family("gauge", "Requests that are being answered."),
    "writes_waiting": Family("gauge", "Writes that wait for their turn."),
    "tasks_tracked": Family("gauge", "Tasks whose windows are remembered."),
    "tasks_room": Family("gauge", "Further tasks that would be taken."),
    "state_bytes": Family("gauge", "Size of what is remembered: memory, log, snapshot.", ("part",)),
    "snapshot_age_seconds": Family("gauge", "Time since the last snapshot was made."),
    "snapshot_duration_seconds": Family("gauge", "How long the last snapshot took."),
    "store_ok": Family("gauge", "1 while writes can be kept, 0 when the store is broken."),
    "recovered_notes": Family("gauge", "Things found damaged or old, and mended, at the start."),
    "model_info": Family("gauge", "The model in each role; always 1.", ("role", "name", "version", "alias")),
    "model_loaded_timestamp_seconds": Family("gauge", "When the model was loaded, since 1970.", ("role",)),
    "registry_reachable": Family("gauge", "1 while the model registry answers, else 0."),
    "margin_budget_ratio": Family("gauge", "Share of answers that may be violated under a margin.", ("margin",)),
    "clock_timestamp_seconds": Family("gauge", "The cell's clock."),
    "clock_lag_seconds": Family("gauge", "How far the cell's clock is behind this machine's."),
    "quality_answers_total": Family("counter", f"Answers {_JUDGED}.", _BY_TIER),
    "quality_forecasts_total": Family("counter", "Those of them that had quantiles.", _BY_TIER),
    "quality_covered_total": Family(
        "counter", "Forecasts whose quantile the demand stayed within.", (*_BY_TIER, "level")
    ),
    "quality_violations_total": Family(
        "counter", "Answers whose reservation the demand exceeded.", ("role", "margin", "tier", "resource")
    ),
    "quality_limit_total": Family("counter", f"Sum of the limits of answers {_JUDGED}, in their unit.", _BY_TIER),
    "quality_reserved_total": Family(
        "counter", "Sum of what was reserved of those limits.", ("role", "margin", "tier", "resource")
    ),
    "quality_reclaimed_ratio": Family(
        "gauge", "Share of the limits that was reclaimed, since the start.", ("role", "margin", "resource")
    ),
    "quality_oom_answers_total": Family(
        "counter", "Answers with an OOM probability and its outcome.", ("role", "tier")
    ),
    "quality_oom_events_total": Family("counter", "Those of them that met an OOM.", ("role", "tier")),
    "quality_oom_predicted_total": Family(
        "counter", "Sum of their probabilities; as many as events where calibrated.", ("role", "tier")
    ),
    "quality_oom_brier_total": Family(
        "counter", "Sum of squared differences between probability and outcome.", ("role", "tier")
    ),
    "quality_failures_total": Family("counter", "Failures told; without any, no OOM can be known.", ("role",)),
    "drift_rows": Family("gauge", "Rows that drift rests on, those of a day ago for less.", ("role",)),
    "drift_outside_ratio": Family("gauge", "Share of feature values outside the range of training.", ("role",)),
    "drift_mean_deviations": Family(
        "gauge", "Of the feature that drifted most, the shift of its mean, in standard deviations.", ("role",)
    ),
    "drift_feature_deviations": Family(
        "gauge", "Shift of the means of the features that drifted most.", ("role", "feature")
    ),
}
"""All that is asked for when Prometheus asks, by name without ``PREFIX``."""


class _Histogram:
    """Durations of one combination of labels."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        edges = [*map(str, BUCKETS_S), "+Inf"]
        return list(zip(edges, accumulate(self.counts), strict=True))


class Metrics(Collector):
    """Counts what happens, and asks for all else when it is shown.

    The numbers are plain ones of this process, in a registry of its own: prometheus_client's counters would go through
    BentoML's files. So they are the whole truth for one worker only, which is all there is. Any thread may call any
    method.

    Attributes
    ----------
    registry : CollectorRegistry
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = Lock()
        self._requests: dict[tuple[str, ...], _Histogram] = {}
        self._phases: defaultdict[tuple[str, ...], _Histogram] = defaultdict(_Histogram)
        self._answer_phases: dict[tuple[str, ...], _Histogram] = {(name,): _Histogram() for name in ANSWER_PHASES}
        for name in PHASES:
            self._phases[name,] = _Histogram()
        self._refused: Counter[tuple[str, ...]] = Counter()
        self._windows: Counter[tuple[str, ...]] = Counter({(name,): 0 for name in OUTCOMES})
        self._promotions: Counter[tuple[str, ...]] = Counter({(name,): 0 for name in PROMOTIONS})
        self._shown: list[Callable[[], Shown]] = []
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def request(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """Count an answered request; ``endpoint`` is the route's pattern, never the path that was asked for."""
        labels = (endpoint, method, f"{status // 100}xx")
        with self._lock:
            if labels not in self._requests:
                if len(self._requests) >= _MOST_SERIES:
                    labels = ("other", "other", labels[2])
                self._requests.setdefault(labels, _Histogram())
            self._requests[labels].add(seconds)
            if status >= BAD_REQUEST and status != INTERNAL:
                self._refused[str(status),] += 1

    def windows(self, outcome: str, n: int = 1) -> None:
        """Count windows by what became of them, one of ``OUTCOMES``."""
        assert outcome in OUTCOMES, outcome
        with self._lock:
            self._windows[outcome,] += n

    def phase(self, name: str, seconds: float) -> None:
        """Take in how long a part of a write took, one of ``PHASES``."""
        assert name in PHASES, name
        with self._lock:
            self._phases[name,].add(seconds)

    @contextmanager
    def answering(self, phase: str) -> Iterator[None]:
        """Take in how long a part of an answer for many tasks takes, one of ``ANSWER_PHASES``."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        with self._lock:
            self._answer_phases[phase,].add(seconds)

    def promotion(self, outcome: str) -> None:
        """Count a model that an alias was moved to, one of ``PROMOTIONS``."""
        assert outcome in PROMOTIONS, outcome
        with self._lock:
            self._promotions[outcome,] += 1

    def show(self, read: Callable[[], Shown]) -> None:
        """Ask ``read`` for values whenever Prometheus asks for them, in a thread of its own."""
        self._shown.append(read)

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Give the families one by one, as prometheus_client wants them."""
        with self._lock:
            yield _histogram(
                "request_duration_seconds",
                "Time to answer, by route.",
                ("endpoint", "method", "status"),
                self._requests,
            )
            yield _counter("requests_refused", "Requests refused, by HTTP status.", ("code",), self._refused)
            yield _counter(
                "windows",
                "Usage windows, by what became of them; refused: could not be read.",
                ("outcome",),
                self._windows,
            )
            yield _histogram(
                "write_phase_duration_seconds", "Time that each part of a write took.", ("phase",), self._phases
            )
            yield _histogram(
                "answer_phase_duration_seconds",
                "Time that each part of an answer for many tasks took.",
                ("phase",),
                self._answer_phases,
            )
            yield _counter(
                "promotions",
                "Models that an alias was moved to, by what became of them.",
                ("outcome",),
                self._promotions,
            )
        merged: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in SHOWN}
        for read in self._shown:
            for name, values in read().items():
                merged[name].update(values if isinstance(values, Mapping) else {(): values})
        for name, values in merged.items():
            known = {labels: value for labels, value in values.items() if not math.isnan(value)}
            if known:
                yield _shown(name, known)


def _histogram(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], _Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for key, histogram in values.items():
        family.add_metric(key, histogram.buckets(), histogram.total_s)
    return family


def _counter(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _shown(name: str, values: Mapping[tuple[str, ...], float]) -> Metric:
    family = SHOWN[name]
    if family.kind == "counter":
        return _counter(name.removesuffix("_total"), family.help, family.labels, values)
    gauge = GaugeMetricFamily(PREFIX + name, family.help, labels=family.labels)
    for key, value in values.items():
        gauge.add_metric(key, value)
    return gauge


def quality_shown(role: str, numbers: QualityNumbers) -> Shown:
    """Return what is shown of a model's quality, one of ``ROLES``."""
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


def drift_shown(role: str, numbers: DriftNumbers) -> Shown:
    """Return what is shown of the drift of a model's inputs, one of ``ROLES``."""
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
