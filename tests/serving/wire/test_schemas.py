"""Bodies that the wire format takes, and those that it refuses."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from reclaim.data import schema as s
from reclaim.serving.answers.encode import SERVED_RULES
from reclaim.serving.wire.schemas import ReservationRequest, RuleName, TierName, Window
from reclaim.training.estimators.base import RULES

Json = dict[str, Any]

LIMIT = {"cpu": 2.0, "memory": 4e9}


def task(**fields: Any) -> Json:
    return {"collection_id": 1, "limit": LIMIT, **fields}


def test_the_words_on_the_wire_are_those_of_the_code() -> None:
    assert get_args(RuleName) == SERVED_RULES
    assert SERVED_RULES[: len(RULES)] == RULES
    assert get_args(TierName) == s.TIERS


def test_every_field_of_a_window_is_a_column_of_a_dataset_except_the_limit() -> None:
    assert set(Window.model_fields) - {"limit"} <= set(s.USAGE.names)


def test_ids_are_exact_64_bit_integers() -> None:
    body = '{"tasks": [{"collection_id": 9223372036854775807, "limit": {"cpu": 1, "memory": 1}}]}'
    assert ReservationRequest.model_validate_json(body).tasks[0].collection_id == 2**63 - 1


def test_a_number_keeps_every_bit_through_json() -> None:
    body = '{"tasks": [{"collection_id": 1, "limit": {"cpu": 0.30000000000000004, "memory": 7856209931.000001}}]}'
    limit = ReservationRequest.model_validate_json(body).tasks[0].limit
    assert (limit.cpu, limit.memory) == (0.1 + 0.2, 7856209931.000001)


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": {"cpu": 0, "memory": 1}},
        {"limit": {"cpu": -1, "memory": 1}},
        {"limit": {"cpu": "1", "memory": 1}},
        {"limit": {"cpu": True, "memory": 1}},
        {"limit": {"cpu": float("inf"), "memory": 1}},
        {"limit": {"cpu": float("nan"), "memory": 1}},
        {"limit": {"cpu": 1e300, "memory": 1}},
        {"limit": {"cpu": 1}},
        {"limit": {"cpu": 1, "memory": 1, "disk": 1}},
        {"collection_id": 1.0},
        {"collection_id": -1},
        {"collection_id": 2**63},
        {"collection_id": None},
        {"tier": "production"},
        {"tier": 3},
        {"scheduling_class": 4},
        {"in_alloc": 1},
        {"user": 7},
        {"user": ""},
        {"logical_name": "x" * 257},
        {"windows": None},
        {"windows": [{"start_us": 0}]},
        {"windows": [{"start_us": 5, "end_us": 5}]},
        {"windows": [{"start_us": 0, "end_us": 2**63 - 1}]},
        {"scheduled_us": 1_700_000_000_000_000_000},  # nanoseconds
        {"windows": [{"start_us": 0, "end_us": 1, "memory_max": -0.5}]},
        {"windows": [{"start_us": 0, "end_us": 1, "cpu_percentiles": [0.0] * 10}]},
        {"windows": [{"start_us": 0, "end_us": 1, "cpu_percentiles": [0.0] * 12}]},
        {"windows": [{"start_us": 0, "end_us": 1, "cpu_percentiles": [0.1] * 10 + [0.0]}]},
        {"windows": [{"start_us": 0, "end_us": 1, "cpu_tail_percentiles": [0.0] * 11}]},
        {"windows": [{"start_us": 1, "end_us": 2}, {"start_us": 0, "end_us": 1}]},
        {"windows": [{"start_us": 1, "end_us": 2}, {"start_us": 1, "end_us": 2}]},
    ],
    ids=repr,
)
def test_what_is_wrong_in_a_task_is_refused(wrong: Json) -> None:
    ReservationRequest.model_validate({"tasks": [task()]})
    with pytest.raises(ValidationError):
        ReservationRequest.model_validate({"tasks": [task(**wrong)]})


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {"monday_us": -1},
        {"monday_us": 0.5},
        {"monday_us": 2**59 + 1},
        {"largest_machine": None},
        {"largest_machine": {"cpu": 0, "memory": 1}},
        {"largest_machine": {"cpu": float("nan")}},
        {"largest_machine": {"disk": 1}},
        {"zone": "UTC"},
    ],
    ids=repr,
)
def test_what_is_wrong_in_a_cell_is_refused(wrong: Json | None) -> None:
    with pytest.raises(ValidationError):
        ReservationRequest.model_validate({"tasks": [task()], "cell": wrong})


def test_of_owners_and_cell_as_little_may_be_said_as_is_known() -> None:
    request = ReservationRequest.model_validate({"tasks": [task(user="x" * 256)], "cell": {"largest_machine": {}}})
    assert (request.tasks[0].logical_name, request.cell.largest_machine.cpu, request.cell.monday_us) == (None, None, 0)


def test_windows_may_overlap_as_they_do_in_a_dataset() -> None:
    windows = [{"start_us": 0, "end_us": 9}, {"start_us": 5, "end_us": 8}, {"start_us": 5, "end_us": 12}]
    assert len(ReservationRequest.model_validate({"tasks": [task(windows=windows)]}).tasks[0].windows) == 3


def test_a_task_may_stand_in_a_request_only_once() -> None:
    other = task(instance_index=1)
    ReservationRequest.model_validate({"tasks": [task(), other]})
    with pytest.raises(ValidationError, match=r"the same task as tasks\[0\]: collection_id 1, instance_index 0"):
        ReservationRequest.model_validate({"tasks": [task(), other, task()]})
