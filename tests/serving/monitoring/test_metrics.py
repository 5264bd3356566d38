"""Tests that the metrics' text follows the rules of Prometheus and that each number is as it was counted."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reclaim.serving.monitoring.drift import DriftNumbers, FeatureDrift
from reclaim.serving.monitoring.metrics import (
    BUCKETS_S,
    OUTCOMES,
    PHASES,
    PREFIX,
    PROMOTIONS,
    ROLES,
    SHOWN,
    Metrics,
    Shown,
    drift_shown,
    machine_margins_shown,
    quality_shown,
)
from reclaim.serving.monitoring.quality import LiveQuality
from reclaim.serving.wire.cell_schemas import MachineMargin
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LEVELS = (0.5, 0.9995)
COUNTED = {
    "request_duration_seconds", "write_phase_duration_seconds", "answer_phase_duration_seconds", "requests_refused",
    "windows", "windows_above_limit", "recorded_windows", "promotions",
}  # fmt: skip
UNITS = ("seconds", "bytes", "ratio", "info", "deviations", "limits", "amount")
COUNTS = ("_rows", "_tracked", "_stale", "_room", "_under_way", "_waiting", "_notes", "_groups")
"""Ends of the names of gauges that count things, which have no unit."""
STATES = ("_ready", "_ok", "_reachable", "_fallback", "_in_use")
"""Of those that are 0 or 1."""


def _quality() -> LiveQuality:
    """Return counts of one answer: limit 1, reserved 0.5, 0.375, 0.25; CPU 0.3, memory 0.1; quantiles 0.2 and 0.4."""
    from reclaim.data.windows import MEMORY_MAX, P90, empty_windows

    live, slot, windows = LiveQuality(LEVELS, 300), np.zeros(1, np.int64), empty_windows(1)
    windows.percentiles[:, P90], windows.usage[:, MEMORY_MAX], windows.limit[:] = 0.3, 0.1, 1.0
    windows.start_us[:], windows.end_us[:] = 600_000_000, 900_000_000
    reservation = np.array([[[0.5, 0.5], [0.375, 0.375], [0.25, 0.25]]])
    live.expect(
        slot, windows.start_us, np.array([3], np.int8), windows.limit, np.full((1, 2, 2), (0.2, 0.4)), reservation,
        np.array([0.25]),
    )  # fmt: skip
    live.observe(slot, windows)
    live.failed(slot, np.array([10**12]), np.array([-1]))
    live.forget(slot)
    return live


def fully_shown() -> Metrics:
    """Return metrics with every family shown."""
    metrics = Metrics()
    metrics.request("/v1/usage", "POST", 200, 0.0012)
    metrics.request("/v1/usage", "POST", 429, 0.0001)
    one: dict[str, Any] = {
        name: 1.0 if not family.labels else {tuple(f"{label}-1" for label in family.labels): 1.0}
        for name, family in SHOWN.items()
        if not name.startswith(("quality", "drift"))
    }
    metrics.show(lambda: one)
    drift = DriftNumbers(2.0, 0.25, 1.5, (FeatureDrift("cpu_last", -1.5, 0.5), FeatureDrift("age", 0.25, 0.0)))
    for role in ROLES:
        metrics.show(lambda role=role: quality_shown(role, _quality().numbers()))  # type: ignore[misc]  # a default
        metrics.show(lambda role=role: drift_shown(role, drift))  # type: ignore[misc]  # the same
    return metrics


def _families(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.text())}


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(PREFIX + name, labels)


def test_every_name_is_as_prometheus_wants_it() -> None:
    families = _families(fully_shown())
    ours = {name.removeprefix(PREFIX): family for name, family in families.items() if name.startswith(PREFIX)}
    assert set(ours) == COUNTED | {name.removesuffix("_total") for name in SHOWN}
    for name, family in ours.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", name), name
        assert family.documentation.endswith("."), name
        if family.type == "gauge":
            assert name == "ready" or name.endswith((*UNITS, *COUNTS, *STATES)), name
            assert not name.endswith(("_total", "_count", "_sum", "_bucket")), name
        elif family.type == "histogram":
            assert name.endswith("_seconds"), name
        else:
            assert family.type == "counter", name
            assert {sample.name for sample in family.samples} == {PREFIX + name + "_total"}, name
        for sample in family.samples:
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels), name
            assert not set(sample.labels) & {"job", "instance", "quantile"}, name


def test_help_and_type_stand_once_before_the_samples_of_each_family() -> None:
    lines = fully_shown().text().splitlines()
    heads = [line.split()[:3] for line in lines if line.startswith("#")]
    assert len({tuple(head) for head in heads}) == len(heads)
    assert [head[1] for head in heads] == ["HELP", "TYPE"] * (len(heads) // 2)
    assert len(set(lines)) == len(lines)  # no sample twice


def test_metrics_of_the_process_are_shown() -> None:
    assert (Metrics().registry.get_sample_value("process_resident_memory_bytes") or 0) > 1e6


def test_requests_are_timed_by_route_method_and_class_and_refusals_counted_by_code() -> None:
    metrics = Metrics()
    for status, seconds in ((200, 0.0005), (201, 0.0011), (422, 0.1), (429, 99.0), (500, 0.2)):
        metrics.request("/v1/usage", "POST", status, seconds)
    labels = {"endpoint": "/v1/usage", "method": "POST", "status": "2xx"}
    assert _value(metrics, "request_duration_seconds_count", **labels) == 2
    assert _value(metrics, "request_duration_seconds_sum", **labels) == pytest.approx(0.0016)
    within = {le: _value(metrics, "request_duration_seconds_bucket", le=le, **labels) for le in ("0.0005", "0.002")}
    assert within == {"0.0005": 1, "0.002": 2}  # an edge belongs to its bucket
    labels["status"] = "4xx"
    assert _value(metrics, "request_duration_seconds_bucket", le="30.0", **labels) == 1
    assert _value(metrics, "request_duration_seconds_bucket", le="+Inf", **labels) == 2
    codes = {"422": 1, "429": 1, "500": None}
    assert {code: _value(metrics, "requests_refused_total", code=code) for code in codes} == codes


def test_buckets_rise_from_half_a_millisecond_to_half_a_minute() -> None:
    assert (BUCKETS_S[0], BUCKETS_S[-1]) == (0.0005, 30.0)
    assert list(BUCKETS_S) == sorted(set(BUCKETS_S))


def test_callers_cannot_make_series_without_bound() -> None:
    metrics = Metrics()
    for k in range(1_000):
        metrics.request(f"/{k}", "GET", 404, 0.001)
    (family,) = [f for f in _families(metrics).values() if f.name == "reclaim_request_duration_seconds"]
    assert len({tuple(sample.labels.values())[:2] for sample in family.samples if sample.name.endswith("_sum")}) == 201
    labels = {"endpoint": "other", "method": "other", "status": "4xx"}
    assert _value(metrics, "request_duration_seconds_count", **labels) == 800


def test_windows_phases_and_promotions_are_there_from_the_start_and_add_up() -> None:
    metrics = Metrics()
    assert {o: _value(metrics, "windows_total", outcome=o) for o in OUTCOMES} == dict.fromkeys(OUTCOMES, 0)
    assert {p: _value(metrics, "promotions_total", outcome=p) for p in PROMOTIONS} == dict.fromkeys(PROMOTIONS, 0)
    metrics.windows("taken", 250_000)
    metrics.windows("taken")
    metrics.phase("fold", 0.25)
    metrics.promotion("refused")
    assert _value(metrics, "windows_total", outcome="taken") == 250_001
    assert _value(metrics, "write_phase_duration_seconds_sum", phase="fold") == 0.25
    assert [_value(metrics, "write_phase_duration_seconds_count", phase=p) for p in PHASES] == [0, 0, 0, 1, 0, 0]
    assert _value(metrics, "promotions_total", outcome="refused") == 1


def test_values_are_asked_for_only_when_prometheus_asks() -> None:
    metrics, asked = Metrics(), []

    def read() -> Shown:
        asked.append(1)
        return {"tasks_tracked": float(len(asked)), "snapshot_age_seconds": float("nan")}

    metrics.show(read)
    assert asked == []
    assert _value(metrics, "tasks_tracked") == 1
    assert _value(metrics, "tasks_tracked") == 2
    assert "snapshot_age" not in metrics.text()  # not known yet: NaN would be an alert's trap


def test_a_name_that_is_not_listed_is_no_metric() -> None:
    metrics = Metrics()
    metrics.show(lambda: {"made_up": 1.0})
    with pytest.raises(KeyError, match="made_up"):
        metrics.text()


def test_quality_is_shown_as_it_was_counted() -> None:
    metrics = Metrics()
    metrics.show(lambda: quality_shown("served", _quality().numbers()))
    at = {"role": "served", "tier": "prod", "resource": "cpu"}
    assert _value(metrics, "quality_answers_total", **at) == 1
    assert _value(metrics, "quality_answers_total", **at | {"tier": "free"}) == 0
    assert [_value(metrics, "quality_covered_total", level=level, **at) for level in ("0.5", "0.9995")] == [0, 1]
    violated = {m: _value(metrics, "quality_violations_total", margin=m, **at) for m in MARGIN_NAMES}
    assert violated == {"baseline": 0, "medium": 0, "aggressive": 1}
    assert _value(metrics, "quality_reserved_total", margin="medium", **at) == 0.375
    reclaimed = {"role": "served", "margin": "aggressive", "resource": "memory"}
    assert _value(metrics, "quality_reclaimed_ratio", **reclaimed) == 0.75
    assert _value(metrics, "quality_oom_answers_total", role="served", tier="prod") == 1
    assert _value(metrics, "quality_oom_brier_total", role="served", tier="prod") == 0.0625
    assert _value(metrics, "quality_failures_total", role="served") == 1


def test_the_shadow_is_shown_next_to_the_served_model() -> None:
    families = _families(fully_shown())
    for name in ("quality_answers", "drift_outside_ratio", "drift_feature_deviations"):
        assert {sample.labels["role"] for sample in families[PREFIX + name].samples} == set(ROLES)
    features = {s.labels["feature"]: s.value for s in families[f"{PREFIX}drift_feature_deviations"].samples}
    assert features == {"cpu_last": -1.5, "age": 0.25}


def test_nothing_is_lost_between_threads() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(2_000):
            metrics.request("/v1/usage", "POST", 200, 0.001)
            metrics.windows("taken", 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    metrics.text()
    for thread in threads:
        thread.join()
    labels = {"endpoint": "/v1/usage", "method": "POST", "status": "2xx"}
    assert _value(metrics, "request_duration_seconds_count", **labels) == 8_000
    assert _value(metrics, "windows_total", outcome="taken") == 24_000


def test_outcomes_of_machines_are_told_apart_by_horizon_margin_and_resource() -> None:
    of: dict[str, Any] = {
        "margin": "medium", "resource": "cpu", "budget": 0.01, "lowered": 1.0, "at_once": 0.5, "most_at_once": None,
    }  # fmt: skip
    an_hour = MachineMargin(**of, horizon_s=3_600, asked=0.02, judged=10, violated=3, recent=0.05)
    a_day = MachineMargin(**of, horizon_s=86_400, asked=0.005, judged=7, violated=2, recent=None)
    hour, day = ("3600", "medium", "cpu"), ("86400", "medium", "cpu")
    assert machine_margins_shown([an_hour, a_day]) == {
        "machines_answers_total": {("3600", "cpu"): 10, ("86400", "cpu"): 7},
        "machines_violations_total": {hour: 3, day: 2},
        "machines_budget_spent_ratio": {hour: pytest.approx(5.0)},
        "machines_asked_ratio": {hour: 2.0, day: 0.5},
        "machines_at_once_ratio": {hour: 0.5, day: 0.5},
        "machines_most_at_once_ratio": {},
    }
