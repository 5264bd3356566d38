"""Explanations agree with the reservations that they explain."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import httpx
import pytest

from reclaim.serving.answers.explain import explain
from reclaim.serving.models.loader import load_model
from reclaim.serving.wire.schemas import Units
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.price import Price, three_prices
from tests.serving.cell_fixtures import memory_with, windows_of
from tests.serving.descriptors import windows


@pytest.mark.parametrize("why", ["model", "opt_out", "stale"])
def test_the_reservation_under_each_margin_is_the_one_that_is_answered(make_app: Any, at_url: Any, why: str) -> None:
    settings = {"clock": "unix", "stale_s": 1.0 if why == "stale" else 86_400.0}
    with make_app(**settings) as (app, _), at_url(app) as url, httpx.Client(base_url=url, timeout=120) as client:
        told = [window | {"memory_max": 0.1} for slot in range(10) for window in windows(slot, 1)]
        assert client.post("/v1/usage", json={"windows": told}).json()["taken"] == 10
        if why == "opt_out":
            client.post("/v1/tasks", json={"collections": [{"collection_id": 1, "estimation": False}]})
        explained = client.get("/v1/tasks/1/0").json()
        assert explained["task"]["rule"]["cpu"] == why
        for margin in MARGIN_NAMES:
            answered = client.get(f"/v1/tasks/1/0?margin={margin}").json()["task"]["reservation"]
            assert explained["by_margin"][margin] == answered


def test_a_last_window_that_measured_one_resource_is_explained() -> None:
    cheap = three_prices(Price("baseline", (0.25, 0.25)), Price("aggressive", (0.25, 0.25)))
    memory = memory_with(replace(load_model("builtin").bundle, prices=cheap), follow=False)
    small = [{"task": task, "at": 0, "limit": 1.0} for task in range(2, 40)]  # next to them the limit weighs much
    memory.write(windows_of(*small, {"task": 1, "at": 0, "limit": 1e3}))
    for at in range(1, 6):
        cpu = nan if at == 5 else 200.0
        memory.write(windows_of({"at": at, "limit": 1e3, "cpu": cpu, "memory": 700.0}))  # of 0.7 float32 is less
    explained = explain(memory.answers((1, 0)), Units())
    assert explained.task.rule.memory == "jump"
    assert explained.steps[-1].amounts == explained.task.reservation
    assert "(memory)" in explained.steps[-1].why


def test_a_forecast_of_one_resource_is_explained_though_the_other_has_none() -> None:
    memory = memory_with(load_model("builtin").bundle)
    for at in range(6):
        memory.write(windows_of({"at": at, "cpu": nan, "memory": 0.3}))
    explained = explain(memory.answers((1, 0)), Units())
    assert (explained.task.rule.cpu, explained.task.rule.memory) == ("unknown", "model")
    assert [step.rule for step in explained.steps] == ["model", "unknown"]
    assert "for memory" in explained.steps[0].why
    assert "(cpu)" in explained.steps[1].why
    assert explained.exceedance is not None
    assert explained.exceedance.cpu is None
    assert explained.exceedance.memory is not None
    assert explained.steps[-1].amounts == explained.task.reservation
