"""Runtime: what a state, a model and a cell that do not fit are answered with."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from reclaim.data.errors import StoreError
from reclaim.data.schema import RESOURCES
from reclaim.serving import runtime as runtime_module
from reclaim.serving.runtime import Runtime
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import Bundle, save_bundle
from reclaim.training.margins.margin import MARGIN_NAMES
from tests.serving.cell_fixtures import Memory, usage_rows, windows_of


def test_a_refused_majority_is_named_by_readyz_and_a_metric_and_the_service_stays_ready(make_app: Any) -> None:
    with make_app(clock="unix") as (_, runtime):
        runtime.writer.write(usage_rows(windows_of({}))).result()
        assert "RECLAIM_CLOCK=trace" in runtime.readiness().about["clock"]
        assert "reclaim_clock_ok 0.0" in runtime.metrics.text()
    with make_app(clock="trace") as (_, runtime):
        assert runtime.readiness().about["clock"] == "ok"
        told = windows_of(*({"task": task} for task in range(9)))
        runtime.writer.write(usage_rows(told)).result()
        runtime.writer.write(usage_rows(windows_of(*({"task": task, "at": 99} for task in range(20, 30))))).result()
        ready = runtime.readiness()
        assert "windows of 10 tasks were refused recently for their time, and those of 9 taken" in ready.about["clock"]
        assert ready.ready
        shown = runtime.metrics.text()
        assert "reclaim_clock_ok 0.0" in shown
        assert f"reclaim_clock_refused_ratio {10 / 19}" in shown


def test_a_built_in_model_in_place_of_the_champion_is_shown_by_readyz_and_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    for settings, shown in ((ServingSettings(), 1), (ServingSettings(model="builtin"), 0)):
        runtime = Runtime(settings)
        try:
            assert (runtime.readiness().about["model"]["fallback"] is not None) == shown
            assert f"reclaim_model_fallback {shown}.0" in runtime.metrics.text()
        finally:
            runtime.close()


def test_a_state_saved_with_other_features_is_refused_with_what_to_do(bundle: Bundle) -> None:
    tracker = Memory(ServingSettings(), bundle).tracker
    memory = tracker.memory()
    with pytest.raises(StoreError, match="for a model of other features; start afresh with another --state folder"):
        tracker.recall(memory | {"x": np.pad(memory["x"], ((0, 0), (0, 36)))})
    tracker.recall(memory)


@pytest.mark.parametrize("resource", range(len(RESOURCES)))
@pytest.mark.parametrize(("times", "apart"), [(29.0, False), (31.0, True), (1 / 29, False), (1 / 31, True)])
def test_a_cell_in_another_unit_is_named_by_readyz_a_metric_and_once_in_the_log_and_the_service_stays_ready(
    bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture, resource: int, times: float, apart: bool
) -> None:
    trained = [1.0] * len(RESOURCES)
    trained[resource] = 1 / times
    save_bundle(replace(bundle, mean_limit=tuple(trained)), tmp_path / "model")
    runtime = Runtime(ServingSettings(model=str(tmp_path / "model"), bundle=tmp_path / "model"))
    try:
        while runtime.writer.state == "recovering":
            sleep(0.01)
        assert runtime.readiness().about["amounts"] == "ok"
        for at in range(2):
            runtime.writer.write(usage_rows(windows_of({"at": at}, {"at": at, "task": 2}))).result()
        ready = runtime.readiness()
        assert ready.ready
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        if apart:
            assert f"the mean {RESOURCES[resource]} limit is {times:.4g} times" in ready.about["amounts"]
            assert said == [ready.about["amounts"]]
            assert ready.about["amounts"] in runtime.state_info().advice
        else:
            assert ready.about["amounts"] == "ok"
            assert said == []
        shown = runtime.metrics.text()
        assert f'reclaim_mean_limit_ratio{{resource="{RESOURCES[resource]}"}} {1 / trained[resource]}' in shown
    finally:
        runtime.close()


def test_a_state_of_another_format_is_left_and_the_cell_begins_again_next_to_it_ready(
    make_app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(version: int, task: int) -> tuple[dict[str, Any], set[int], str]:
        """Serve in a format, write a window of a task; return readiness before, all tasks after, and metrics."""
        monkeypatch.setattr(runtime_module, "FORMAT", version)
        with make_app(state=tmp_path) as (_, runtime):
            before, shown = runtime.readiness(), runtime.metrics.text()
            assert before.ready
            runtime.writer.write(usage_rows(windows_of({"task": task}))).result()
            return before.about, set(runtime.tracker.names()[:, 0].tolist()), shown

    about, tasks, _ = run(9, 1)
    assert (about["other_formats"], about["notes"], tasks) == ([], [], {1})
    caplog.clear()
    about, tasks, shown = run(10, 2)
    (left,) = about["other_formats"]
    assert left.startswith(
        f"{tmp_path / 'format-9'} has a state of format 9, which this release leaves for the one that wrote it"
    )
    assert "tasks reserve their limit until they have history there, which `reclaim feed` sends by itself" in left
    assert about["notes"] == [f"The cell begins again in {tmp_path / 'format-10'}, as no state of format 10 is there."]
    assert {left, *about["notes"]} <= {record.getMessage() for record in caplog.records}
    assert "reclaim_recovered_notes 1.0" in shown
    assert tasks == {2}
    about, tasks, shown = run(9, 3)  # a rollback
    assert len(about["other_formats"]) == 1
    assert (about["notes"], tasks) == ([], {1, 3})
    assert "reclaim_recovered_notes 0.0" in shown
    about, tasks, _ = run(10, 4)
    assert (about["other_formats"], about["notes"], tasks) == ([left], [], {2, 4})


def test_stateless_requests_in_another_unit_are_named_once_in_the_log(
    make_app: Any, at_url: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def tasks(n: int, limit: float) -> bytes:
        told = [{"collection_id": k, "limit": {"cpu": limit, "memory": 1}} for k in range(n)]
        return json.dumps({"tasks": told}).encode()

    with make_app() as (app, _), at_url(app) as url:
        for body in (tasks(29, 1_000.0), tasks(30, 29.0), tasks(30, 1_000.0), tasks(30, 1_000.0)):
            headers = {"Content-Type": "application/json"}
            assert httpx.post(f"{url}/v1/reservations", content=body, headers=headers).status_code == 200
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "stateless request: the mean cpu limit is 1,000 times" in said[0]


def test_a_margin_is_in_use_where_it_is_the_default_or_was_asked_for_in_the_last_day(
    make_app: Any, at_url: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_use(runtime: Runtime) -> list[str]:
        shown = runtime.metrics.text()
        return [name for name in MARGIN_NAMES if f'reclaim_margin_in_use{{margin="{name}"}} 1.0' in shown]

    arrow = {"Accept": "application/vnd.apache.arrow.stream"}
    with make_app(margin="medium") as (app, runtime), at_url(app) as url:
        assert in_use(runtime) == ["medium"]
        runtime.writer.write(usage_rows(windows_of({}))).result()
        httpx.get(f"{url}/v1/tasks/1/0?margin=baseline").raise_for_status()  # an explanation reserves nothing
        httpx.get(f"{url}/v1/cell/reservations").raise_for_status()
        assert in_use(runtime) == ["medium"]
        query = {"margins": {"free": "aggressive"}}
        httpx.post(f"{url}/v1/cell/reservations", json=query).raise_for_status()
        assert in_use(runtime) == ["medium", "aggressive"]
        httpx.get(f"{url}/v1/cell/reservations?budget=0.002", headers=arrow).raise_for_status()
        assert in_use(runtime) == ["baseline", "medium", "aggressive"]
        now_s = time.monotonic()
        monkeypatch.setattr(runtime_module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now_s + 86_400))
        assert in_use(runtime) == ["medium"]
