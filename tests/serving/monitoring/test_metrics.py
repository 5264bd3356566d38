"""Tests that the metrics' text follows the rules of Prometheus and that each number is as it was counted."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reclaim.serving.monitoring.drift import DriftNumbers, FeatureDrift
from reclaim.serving.monitoring.metrics import (
    ANSWER_PHASES,
    BUCKETS_S,
    OUTCOMES,
    PHASES,
    PREFIX,
    PROMOTIONS,
    RECORDINGS,
    ROLES,
    SHOWN,
    Metrics,
    Shown,
    drift_shown,
    machine_margins_shown,
    machines_shown,
    prices_shown,
    quality_shown,
)
from reclaim.serving.monitoring.quality import LiveQuality
from reclaim.serving.wire.cell_schemas import CellPrice, MachineMargin
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
    for status, seconds in ((200, 0.0005), (201, 0.0011), (400, 0.1), (429, 99.0), (500, 0.2), (503, 0.1)):
        metrics.request("/v1/usage", "POST", status, seconds)
    labels = {"endpoint": "/v1/usage", "method": "POST", "status": "2xx"}
    assert _value(metrics, "request_duration_seconds_count", **labels) == 2
    assert _value(metrics, "request_duration_seconds_sum", **labels) == pytest.approx(0.0016)
    within = {le: _value(metrics, "request_duration_seconds_bucket", le=le, **labels) for le in ("0.0005", "0.002")}
    assert within == {"0.0005": 1, "0.002": 2}  # an edge belongs to its bucket
    labels["status"] = "4xx"
    assert _value(metrics, "request_duration_seconds_bucket", le="30.0", **labels) == 1
    assert _value(metrics, "request_duration_seconds_bucket", le="+Inf", **labels) == 2
    codes = {"201": None, "400": 1, "429": 1, "500": None, "503": 1}
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
    assert {o: _value(metrics, "recorded_windows_total", outcome=o) for o in RECORDINGS} == {"written": 0, "dropped": 0}
    metrics.recorded("dropped", 7)
    metrics.recorded("dropped", 2)
    assert _value(metrics, "recorded_windows_total", outcome="dropped") == 9
    metrics.above_limit([3, 0])
    above = {r: _value(metrics, "windows_above_limit_total", resource=r) for r in ("cpu", "memory")}
    assert above == {"cpu": 3, "memory": 0}


def test_a_part_of_an_answer_is_timed_unless_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, clock = Metrics(), iter([10.0, 10.25, 20.0])
    monkeypatch.setattr("reclaim.serving.monitoring.metrics.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with metrics.answering("features"):
        pass
    with pytest.raises(ValueError, match="no answer"), metrics.answering("encode"):
        raise ValueError("no answer")
    counts = [_value(metrics, "answer_phase_duration_seconds_count", phase=p) for p in ANSWER_PHASES]
    assert dict(zip(ANSWER_PHASES, counts, strict=True)) == {"decode": 0, "features": 1, "answer": 0, "encode": 0}
    assert _value(metrics, "answer_phase_duration_seconds_sum", phase="features") == 0.25


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
    drift = {"drift_rows": 2.0, "drift_outside_ratio": 0.25, "drift_mean_deviations": 1.5}
    for name, value in drift.items():
        assert {sample.value for sample in families[PREFIX + name].samples} == {value}


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


def test_a_price_is_shown_with_its_factor_of_the_models_own_and_what_it_spent_of_its_budget() -> None:
    of: dict[str, Any] = {"tier": "prod", "resource": "cpu", "own": None}
    prices = (
        CellPrice(**of, margin="baseline", start=4.0, now=6.0, budget=0.01, violated=0.02),
        CellPrice(**of, margin="medium", start=0.0, now=2.0, budget=None, violated=None),
        CellPrice(**of, margin="aggressive", start=2.0, now=1.0, budget=0.1, violated=None),
    )
    baseline, medium, aggressive = ((margin, "prod", "cpu") for margin in MARGIN_NAMES)
    assert prices_shown(prices) == {
        "price_limits": {baseline: 6.0, medium: 2.0, aggressive: 1.0},
        "price_moved_ratio": {baseline: 1.5, aggressive: 0.5},
        "price_budget_spent_ratio": {baseline: pytest.approx(2.0)},
    }


def test_totals_of_machines_are_by_margin_and_resource() -> None:
    shown = machines_shown(np.array([8.0, 9.0]), np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert shown["machines_limit_amount"] == {("cpu",): 8.0, ("memory",): 9.0}
    assert shown["machines_reclaimable_amount"] == {
        ("baseline", "cpu"): 1.0, ("baseline", "memory"): 2.0, ("medium", "cpu"): 3.0, ("medium", "memory"): 4.0,
        ("aggressive", "cpu"): 5.0, ("aggressive", "memory"): 6.0,
    }  # fmt: skip


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
