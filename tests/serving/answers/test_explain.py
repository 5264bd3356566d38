"""Explanations agree with the reservations that they explain."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import httpx
import pytest

from reclaim.data.schema import RESOURCES
from reclaim.features.targets import HORIZONS_S
from reclaim.serving.answers.explain import explain
from reclaim.serving.models.loader import load_model
from reclaim.serving.wire.schemas import ResourceLimit, Resources, Units
from reclaim.training.bundle import Bundle
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.price import Price, three_prices
from tests.serving.cell_fixtures import W, fact_rows, memory_with, windows_of
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
    assert "(cpu)" in explained.steps[1].why
    assert explained.exceedance is not None
    assert explained.exceedance.cpu is None
    assert explained.exceedance.memory is not None
    likely = f"with a probability of {explained.exceedance.memory:.2g} for memory"
    assert explained.steps[0].why.endswith(likely)
    assert explained.steps[-1].amounts == explained.task.reservation


def test_a_task_that_used_all_of_its_limit_counts_all_of_a_raised_one_until_its_next_window() -> None:
    memory = memory_with(load_model("builtin").bundle)
    for at in range(12):
        memory.write(windows_of({"at": at, "limit": 2.0, "cpu": 2.0, "memory": 1.99}))
    memory.tell(fact_rows({"task": 1, "limit": 8.0}))
    explained = explain(memory.answers((1, 0)), Units())
    assert explained.task.reservation == Resources(cpu=8.0, memory=8.0) == explained.by_margin["baseline"]
    assert [step.rule for step in explained.steps] == ["model", "unknown"]
    assert explained.steps[0].amounts == Resources(cpu=2.0, memory=2.0)
    assert explained.steps[1].amounts == explained.task.reservation
    memory.write(windows_of({"at": 12, "limit": 8.0, "cpu": 2.0, "memory": 2.0}))
    assert (memory.answers((1, 0)).estimate.reservation < 8.0).all()


def test_a_limit_that_has_changed_since_changes_no_probability_of_an_amount_and_is_all_that_an_opt_out_leaves() -> None:
    memory = memory_with(load_model("builtin").bundle)
    for at in range(12):
        memory.write(windows_of({"at": at, "limit": 2.0, "cpu": 0.2 + 0.1 * (at % 3), "memory": 0.4}))
    before = explain(memory.answers((1, 0)), Units())
    memory.tell(fact_rows({"task": 1, "limit": 8.0}))
    after = explain(memory.answers((1, 0)), Units())
    assert before.exceedance is not None
    assert after.exceedance is not None
    assert after.task.reservation is not None
    assert after.task.reservation.memory < 2.0  # not all of the earlier limit was reserved
    assert after.exceedance.memory == before.exceedance.memory
    assert after.task.quantiles == before.task.quantiles  # amounts, not shares
    assert after.last_window is not None
    assert after.last_window.limit == ResourceLimit(cpu=2.0, memory=2.0)  # the window's own
    memory.tell(fact_rows(estimation={1: False}))
    explained = explain(memory.answers((1, 0)), Units())
    assert explained.by_margin == dict.fromkeys(MARGIN_NAMES, Resources(cpu=8.0, memory=8.0))
    assert explained.task.reservation == Resources(cpu=8.0, memory=8.0)


def test_a_task_known_by_its_facts_alone_counts_its_limit_and_has_no_step_and_no_forecast() -> None:
    memory = memory_with(load_model("builtin").bundle)
    memory.tell(fact_rows({"task": 1, "limit": 3.0, "scheduling_class": 3}))
    explained = explain(memory.answers((1, 0)), Units())
    assert (explained.task.reservation, explained.scheduling_class) == (Resources(cpu=3.0, memory=3.0), 3)
    assert (explained.steps, explained.by_margin, explained.forecast) == ([], {}, [])
    assert (explained.last_window, explained.exceedance, explained.scheduled_us) == (None, None, None)


def test_the_last_window_is_told_as_it_came_with_what_else_is_known_of_the_task() -> None:
    memory = memory_with(load_model("builtin").bundle, clock="trace")
    memory.write(windows_of({"at": 0, "limit": 2.0}))
    last = {"at": 1, "limit": 3.0, "cpu": 0.25, "memory": nan, "scheduled_us": 7, "scheduling_class": 2}
    memory.write(windows_of({**last, "in_alloc": True}))
    memory.tell(fact_rows(estimation={1: False}))
    explained = explain(memory.answers((1, 0)), Units())
    window = explained.last_window
    assert window is not None
    assert window.limit is not None
    assert (window.start_us, window.end_us, window.limit.memory) == (W, 2 * W, 3.0)
    assert (window.cpu_mean, window.cpu_max, window.memory_mean, window.memory_max) == (0.25, 0.25, None, None)
    assert (explained.clock_us, explained.limit_since_us, explained.scheduled_us) == (2 * W, W, 7)
    assert (explained.scheduling_class, explained.in_alloc, explained.estimation) == (2, True, False)


def test_the_forecast_up_to_each_horizon_is_the_one_of_the_model(bundle: Bundle) -> None:
    memory = memory_with(bundle)
    for at in range(3):
        memory.write(windows_of({"at": at, "limit": 2.0, "cpu": 0.5 * at}))
    answers = memory.answers((1, 0))
    explained = explain(answers, Units())
    x = answers.known.x
    assert x is not None
    whole = bundle.forecaster.predict(x)
    assert [of.horizon_s for of in explained.forecast] == list(bundle.forecaster.horizons_s)
    for of in explained.forecast:
        h = HORIZONS_S.index(of.horizon_s)
        assert of.oom_probability == whole.oom_probability[0, h]
        assert of.quantiles.cpu == pytest.approx((whole.quantiles[0, 0, h] * 2.0).tolist())
        assert of.quantiles.memory == pytest.approx((whole.quantiles[0, 1, h] * 2.0).tolist())
        if of.horizon_s == explained.horizon_s:
            assert of.quantiles == explained.task.quantiles


def test_the_price_of_a_step_is_that_of_the_task_and_says_which_are_given() -> None:
    given = three_prices(*(Price(name, (5.0, 6.0), given=(True, False)) for name in ("baseline", "aggressive")))
    for follow, memory_price in (
        (True, "6 for memory of its training sources, now 6,"),
        (False, "6 for memory (limits of"),
    ):
        memory = memory_with(replace(load_model("builtin").bundle, prices=given), follow=follow)
        memory.write(windows_of({"limit": 2.0}))
        (step,) = explain(memory.answers((1, 0)), Units()).steps
        assert f"the baseline margin, 5 for cpu, as given, and {memory_price}" in step.why


def test_a_price_is_solved_for_the_cell_once_a_slot_is_over_and_of_the_training_sources_before() -> None:
    memory = memory_with(load_model("builtin").bundle, clock="trace")
    for at, how in ((0, "of its training sources"), (3, "solved for this cell")):
        memory.write(windows_of({"at": at, "limit": 2.0}))
        step, *_ = explain(memory.answers((1, 0)), Units()).steps
        assert [f"for {resource} {how}, now" in step.why for resource in RESOURCES] == [True, True]


def test_a_run_that_has_just_begun_is_explained_by_its_forecast_and_then_by_its_limit() -> None:
    memory = memory_with(load_model("builtin").bundle, clock="trace")
    memory.write(windows_of({"limit": 2.0, "scheduled_us": 5}))
    explained = explain(memory.answers((1, 0)), Units())
    assert [step.rule for step in explained.steps] == ["model", "startup"]
    assert explained.steps[0].amounts.cpu < 2.0
    assert explained.steps[1].amounts == explained.task.reservation == explained.task.limit
