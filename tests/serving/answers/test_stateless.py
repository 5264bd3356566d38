"""Stateless answers are the reservations that a replay measures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.serving.answers.stateless import (
    answer,
    cell_from_request,
    model_info,
    other_units,
    under_current_limit,
    windows_from_request,
)
from reclaim.serving.models.loader import LoadedModel
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.errors import RequestError, parse_request
from reclaim.training.bundle import Bundle
from reclaim.training.estimators.base import CAP, JUMP, MODEL, RULES, STARTUP, UNKNOWN, Estimate
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from tests.serving.conftest import History

Json = dict[str, Any]

SETTINGS = ServingSettings()


@pytest.fixture(scope="module")
def model(bundle: Bundle) -> LoadedModel:
    return LoadedModel("reclaim", "3", "reclaim@champion", bundle)


def ask(model: LoadedModel, tasks: Sequence[Json], **fields: Any) -> list[Json]:
    """Send a request through JSON and back, as HTTP does."""
    request = parse_request(json.dumps({"tasks": tasks, **fields}).encode())
    answered: list[Json] = json.loads(answer(model, request, SETTINGS).model_dump_json())["tasks"]
    return answered


def reservations(tasks: Sequence[Json]) -> NDArray[np.float64]:
    return np.array([[task["reservation"][r] for r in RESOURCES] for task in tasks])


def test_a_request_holds_exactly_the_windows_that_a_dataset_holds(history: History) -> None:
    slot, windows = windows_from_request(parse_request(json.dumps({"tasks": history.tasks}).encode()))
    np.testing.assert_array_equal(slot, history.windows.task_numbers())
    for field in fields(windows):
        ours, theirs = getattr(windows, field.name), getattr(history.windows, field.name)
        np.testing.assert_array_equal(ours, theirs, err_msg=field.name)
        assert ours.dtype == theirs.dtype, field.name


def test_memory_whose_maximum_is_0_beside_its_mean_is_reserved_by_the_mean(model: LoadedModel) -> None:
    window = {"start_us": 0, "end_us": 300_000_000, "cpu_mean": 0.4, "memory_mean": 3.0}
    task = {"collection_id": 1, "limit": {"cpu": 2.0, "memory": 4.0}}
    (without,) = ask(model, [task | {"windows": [window]}])
    (with_0,) = ask(model, [task | {"windows": [window | {"memory_max": 0.0}]}])
    assert with_0 == without


@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_served_reservations_are_the_replayed_ones_to_the_bit(
    model: LoadedModel, history: History, margin: str
) -> None:
    slot = history.windows.task_numbers()
    by_time = np.argsort(history.windows.end_us, kind="stable")  # a replay sees the tasks interleaved
    replayed = model.bundle.estimator(margin, history.cell).update(slot[by_time], history.windows.take(by_time))
    assert replayed.forecast is not None
    row_of = np.argsort(by_time)  # row of each window in the replay
    rules = set()
    for now_us in np.quantile(history.windows.end_us, np.linspace(0, 1, 40)).astype(np.int64).tolist():
        tasks = history.at(now_us)  # the whole cell as it is known then
        known = np.array([len(task["windows"]) for task in tasks])
        begun = np.flatnonzero(known)
        last = row_of[begun * 40 + known[begun] - 1]
        served = [ask(model, tasks, margin=margin, cell=history.facts)[row] for row in begun]
        np.testing.assert_array_equal(reservations(served), replayed.reservation[last])
        expected = [[RULES[number] for number in row] for row in replayed.rule[last]]
        assert [[task["rule"][r] for r in RESOURCES] for task in served] == expected
        oom = [[h["oom_probability"] for h in task["forecast"]] for task in served]
        np.testing.assert_array_equal(oom, replayed.forecast.oom_probability[last])
        rules |= {rule for row in expected for rule in row}
    assert {"model", "startup"} <= rules  # or the comparison would say little


def test_the_order_of_the_tasks_makes_no_difference(model: LoadedModel, history: History) -> None:
    assert ask(model, history.tasks[::-1]) == ask(model, history.tasks)[::-1]


def test_a_single_task_is_answered_as_it_is_among_others(model: LoadedModel, history: History) -> None:
    together = ask(model, history.tasks)
    alone = [ask(model, [task])[0] for task in history.tasks]
    for task, other in zip(alone, together, strict=True):
        assert task["rule"]["cpu"] != "unknown"
        assert 0 < task["reservation"]["cpu"] <= task["limit"]["cpu"]
        assert task["history"] == other["history"]
        assert task["forecast"] == other["forecast"]


def test_who_submitted_a_task_and_its_name_are_taken_and_change_no_answer(model: LoadedModel, history: History) -> None:
    nameless = [{k: v for k, v in task.items() if k not in ("user", "logical_name")} for task in history.tasks]
    assert ask(model, nameless) == ask(model, history.tasks)


def test_the_cell_reaches_the_features(model: LoadedModel, history: History) -> None:
    assert cell_from_request(parse_request(json.dumps({"tasks": history.tasks, "cell": history.facts}).encode())) == (
        history.cell
    )
    unsaid = cell_from_request(parse_request(json.dumps({"tasks": history.tasks}).encode()))
    assert np.isnan(unsaid.largest_machine).all()
    assert unsaid.monday_us == 0
    plain = ask(model, history.tasks)
    for name, value in history.facts.items():
        assert ask(model, history.tasks, cell={name: value}) != plain, name


def test_the_forecast_is_in_the_unit_of_the_limit(model: LoadedModel, history: History) -> None:
    task = history.tasks[0]
    (served,) = ask(model, [task])
    estimate = model.bundle.estimator("baseline").update(np.zeros(40, np.int64), history.windows.take(slice(0, 40)))
    assert estimate.forecast is not None
    limit = task["limit"]
    for h, horizon_s in enumerate(HORIZONS_S):
        foreseen = served["forecast"][h]
        assert foreseen["horizon_s"] == horizon_s
        for t, name in enumerate(TARGETS):
            scale = limit["memory" if name == "memory" else "cpu"]
            expected = estimate.forecast.quantiles[-1, t, h].astype(np.float64) * scale
            np.testing.assert_array_equal(foreseen["quantiles"][name], expected)
            assert (np.diff(expected) >= 0).all()
        at_level = model.bundle.forecaster.quantile_levels.index(0.99)
        assert foreseen["peak_cpu"] == foreseen["quantiles"]["peak_cpu"][at_level]


def test_a_task_without_windows_keeps_its_limit_with_the_reason(model: LoadedModel, history: History) -> None:
    unknown = {"collection_id": 5, "limit": {"cpu": 0.1, "memory": 3e9}}
    alone = ask(model, [unknown])
    assert ask(model, [history.tasks[0], unknown, history.tasks[1]])[1:2] == alone
    assert alone[0]["reservation"] == unknown["limit"]
    assert alone[0]["rule"] == {"cpu": "unknown", "memory": "unknown"}
    assert alone[0]["history"] == {"windows": 0, "age_s": 0.0, "end_us": None}
    assert alone[0]["forecast"] == []


def test_windows_in_which_nothing_was_measured_are_answered_within_the_limit(model: LoadedModel) -> None:
    empty = {"collection_id": 5, "limit": {"cpu": 0.1, "memory": 3e9}, "windows": [{"start_us": 0, "end_us": 1}]}
    (task,) = ask(model, [empty])
    assert 0 <= task["reservation"]["cpu"] <= 0.1
    assert 0 <= task["reservation"]["memory"] <= 3e9


def test_the_history_is_counted_and_timed(model: LoadedModel, history: History) -> None:
    windows = history.tasks[0]["windows"]
    (task,) = ask(model, history.tasks[:1])
    seconds = (windows[-1]["end_us"] - windows[0]["start_us"]) / 1e6
    assert task["history"] == {"windows": 40, "age_s": seconds, "end_us": windows[-1]["end_us"]}


def test_a_wider_margin_never_reserves_less(model: LoadedModel, history: History) -> None:
    baseline, medium, aggressive = (reservations(ask(model, history.tasks, margin=m)) for m in MARGIN_NAMES)
    assert (baseline >= medium).all()
    assert (medium >= aggressive).all()
    assert (baseline > aggressive).any()
    np.testing.assert_array_equal(baseline, reservations(ask(model, history.tasks)))  # the default


def test_any_unit_gives_the_same_share_of_the_limit(model: LoadedModel, history: History) -> None:
    """Where tasks count alike, whatever their limit: a model of several datasets has no mean limit."""
    model = replace(model, bundle=replace(model.bundle, mean_limit=(np.nan, np.nan)))

    def scaled(task: Json) -> Json:
        def times(limit: dict[str, float]) -> dict[str, float]:
            return {"cpu": limit["cpu"] * 1024, "memory": limit["memory"] / 2**20}

        def window(w: Json) -> Json:
            out = dict(w, limit=times(w["limit"]))
            for name, value in w.items():
                if name.startswith("cpu_"):
                    out[name] = [v * 1024 for v in value] if isinstance(value, list) else value * 1024
                elif name.startswith("memory_") or name == "page_cache":
                    out[name] = value / 2**20
            return out

        return dict(task, limit=times(task["limit"]), windows=[window(w) for w in task["windows"]])

    plain = reservations(ask(model, history.tasks, cell=history.facts))
    units = {"cpu": "milli-something", "memory": "MiB"}
    cell = {**history.facts, "largest_machine": {"cpu": 8.0 * 1024, "memory": 16e9 / 2**20}}
    other = reservations(ask(model, [scaled(t) for t in history.tasks], units=units, cell=cell))
    np.testing.assert_allclose(other / [1024, 2**-20], plain, rtol=1e-6)


def test_a_limit_changed_after_the_last_window_binds_the_answer() -> None:
    reservation = np.array([[2.0, 2.0], [2.0, 1.0], [1.5, 0.5], [1.5, 0.5]])
    rule = np.array([[STARTUP, CAP], [UNKNOWN, JUMP], [MODEL, MODEL], [MODEL, JUMP]], np.uint8)
    granted = np.full((4, 2), 2.0)
    raised = under_current_limit(Estimate(reservation, rule), granted, np.full((4, 2), 3.0))
    # what was the limit is the new limit; what was a prediction stays
    np.testing.assert_array_equal(raised.reservation, [[3, 3], [3, 1], [1.5, 0.5], [1.5, 0.5]])
    np.testing.assert_array_equal(raised.rule, rule)
    lowered = under_current_limit(Estimate(reservation, rule), granted, np.full((4, 2), 1.0))
    np.testing.assert_array_equal(lowered.reservation, [[1, 1], [1, 1], [1, 0.5], [1, 0.5]])
    np.testing.assert_array_equal(lowered.rule, [[STARTUP, CAP], [UNKNOWN, JUMP], [CAP, MODEL], [CAP, JUMP]])


def test_a_prediction_of_all_of_the_last_windows_limit_says_nothing_of_a_raised_one() -> None:
    reservation, rule = np.array([[2.0, 1.999], [2.0, 2.0]]), np.array([[MODEL, MODEL], [JUMP, MODEL]], np.uint8)
    found, granted = Estimate(reservation, rule), np.full((2, 2), 2.0)
    raised = under_current_limit(found, granted, np.array([[8.0, 8.0], [8.0, np.nan]]))
    np.testing.assert_array_equal(raised.reservation, [[8.0, 1.999], [8.0, 2.0]])
    np.testing.assert_array_equal(raised.rule, [[UNKNOWN, MODEL], [UNKNOWN, MODEL]])
    same = under_current_limit(found, granted, granted)
    np.testing.assert_array_equal(same.reservation, reservation)
    np.testing.assert_array_equal(same.rule, rule)


def test_a_missing_forecast_is_null_and_its_task_keeps_the_limit(model: LoadedModel, history: History) -> None:
    from reclaim.training.models.trees import TreeForecaster

    nothing = TreeForecaster([None] * len(TARGETS), 0.25, horizon_s=3_600)
    trees = replace(model, bundle=replace(model.bundle, kind="trees", forecaster=nothing))
    (task,) = ask(trees, history.tasks[:1])
    (foreseen,) = task["forecast"]
    nulls = dict.fromkeys(TARGETS)
    assert foreseen == {"horizon_s": 3_600, "oom_probability": 0.25, "peak_cpu": None, "quantiles": nulls}
    assert task["rule"]["memory"] in ("unknown", "startup", "jump")


def test_a_target_without_a_fit_is_null_and_its_resource_keeps_the_limit(model: LoadedModel, history: History) -> None:
    from reclaim.training.models.forecaster import Heads
    from reclaim.training.models.network_forecaster import NetworkForecaster

    whole = model.bundle.forecaster
    assert isinstance(whole, NetworkForecaster)
    heads = Heads(np.array([[True] * 3, [False] * 3, [True] * 3]), np.zeros(3, np.bool_))
    partly = NetworkForecaster(whole.tensors, heads)
    tasks = [dict(task, scheduled_us=None, windows=_without(task["windows"])) for task in history.tasks]
    before = ask(model, tasks)
    after = ask(replace(model, bundle=replace(model.bundle, forecaster=partly)), tasks)
    for task, old in zip(after, before, strict=True):
        assert old["rule"]["memory"] != "unknown"
        assert task["rule"] == {"cpu": old["rule"]["cpu"], "memory": "unknown"}
        assert task["reservation"] == {"cpu": old["reservation"]["cpu"], "memory": task["limit"]["memory"]}
        for foreseen in task["forecast"]:
            assert foreseen["oom_probability"] is None
            assert foreseen["quantiles"]["memory"] is None
            assert foreseen["quantiles"]["cpu"] is not None


def _without(windows: list[Json]) -> list[Json]:
    """Return the windows without what the guards hold or raise a reservation by."""
    return [{k: v for k, v in w.items() if k not in ("scheduled_us", "memory_max", "memory_mean")} for w in windows]


def test_units_are_compared_from_thirty_tasks_on() -> None:
    told: list[Any] = []

    def other(mean: Any) -> str:
        told.append(mean)
        return "other"

    bundle: Any = SimpleNamespace(other_units=other)
    assert [other_units(bundle, np.full((n, 2), 3.0)) for n in (29, 30)] == [None, "other"]
    assert told == [(3.0, 3.0)]


def test_an_answer_names_model_margin_and_levels(model: LoadedModel, history: History) -> None:
    request = parse_request(json.dumps({"tasks": history.tasks[:1], "margin": "medium"}).encode())
    response = answer(model, request, SETTINGS).model_dump()
    del response["tasks"]
    assert response == {
        "model": {"name": "reclaim", "version": "3"},
        "margin": {
            "name": "medium",
            "price": {"cpu": 18.0**0.5, "memory": 4.5**0.5},  # the geometric mean of the two others
            "by_tier": None,
        },
        "horizon_s": 3_600,
        "levels": list(model.bundle.forecaster.quantile_levels),
        "units": {"cpu": "cores", "memory": "bytes"},
    }


def test_the_model_info_names_what_the_numbers_mean(model: LoadedModel) -> None:
    info = model_info(model, SETTINGS)
    assert "OOM" in info.oom_definition
    assert info.pipeline_version == model.bundle.pipeline_version
    assert [m.name for m in info.margins] == list(MARGIN_NAMES)


def test_an_unknown_margin_is_refused_with_a_list_of_the_known_ones(model: LoadedModel, history: History) -> None:
    with pytest.raises(RequestError, match="one of baseline, medium, aggressive, got 'brave'") as refusal:
        ask(model, history.tasks, margin="brave")
    assert (refusal.value.status, refusal.value.body.error.field) == (422, "margin")


def test_too_many_tasks_are_refused_with_both_numbers(model: LoadedModel, history: History) -> None:
    request = parse_request(json.dumps({"tasks": history.tasks}).encode())
    with pytest.raises(RequestError, match="at most 5 in one request, got 6") as refusal:
        answer(model, request, SETTINGS.model_copy(update={"max_tasks": 5}))
    assert refusal.value.status == 413
    assert len(answer(model, request, SETTINGS.model_copy(update={"max_tasks": 6})).tasks) == 6
