"""Order of events of one time: of tasks that run or do not, and of machines in and out of service."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.ingest.order import machine_events_in_order, task_events_in_order

SUBMIT, SCHEDULE, FAIL, UPDATE = (
    s.EventType.SUBMIT, s.EventType.SCHEDULE, s.EventType.FAIL, s.EventType.UPDATE_RUNNING
)  # fmt: skip
ADD, REMOVE, CHANGED = s.MachineEventType.ADD, s.MachineEventType.REMOVE, s.MachineEventType.UPDATE

Row = tuple[int, int, int]


def of_tasks(*rows: Row) -> list[Row]:
    """Return events, (task, time, type) each, in their order."""
    ordered = sorted(rows)
    table = pa.table(
        {
            s.COLLECTION_ID: pa.array([task for task, _, _ in ordered], pa.int64()),
            s.INSTANCE_INDEX: pa.array([0] * len(ordered), pa.int32()),
            s.TIME_US: pa.array([time for _, time, _ in ordered], pa.int64()),
            s.EVENT_TYPE: pa.array([kind for _, _, kind in ordered], pa.int8()),
        }
    )
    found = task_events_in_order(table)
    return list(zip(*(found[n].to_pylist() for n in (s.COLLECTION_ID, s.TIME_US, s.EVENT_TYPE)), strict=True))


def test_a_task_that_runs_ends_before_it_starts_again() -> None:
    found = of_tasks((1, 0, SCHEDULE), (1, 5, SUBMIT), (1, 5, SCHEDULE), (1, 5, FAIL), (1, 5, UPDATE))
    assert [kind for _, _, kind in found] == [SCHEDULE, FAIL, SUBMIT, SCHEDULE, UPDATE]


def test_a_task_that_does_not_run_starts_before_it_ends() -> None:
    ended = [(1, 0, SCHEDULE), (1, 4, FAIL)]
    found = of_tasks(*ended, (1, 5, SUBMIT), (1, 5, FAIL), (2, 5, SCHEDULE), (2, 5, FAIL))
    assert [kind for _, _, kind in found] == [SCHEDULE, FAIL, SUBMIT, FAIL, SCHEDULE, FAIL]


def test_a_run_within_a_second_is_over_for_what_comes_later() -> None:
    found = of_tasks((1, 5, SCHEDULE), (1, 5, FAIL), (1, 6, SCHEDULE), (1, 6, FAIL))
    assert [kind for _, _, kind in found] == [SCHEDULE, FAIL, SCHEDULE, FAIL]
    found = of_tasks((1, 4, SCHEDULE), (1, 5, SCHEDULE), (1, 5, FAIL), (1, 6, SCHEDULE), (1, 6, FAIL))
    assert [kind for _, _, kind in found] == [SCHEDULE, FAIL, SCHEDULE, FAIL, SCHEDULE]


def test_a_task_that_is_updated_and_ends_at_one_time_has_ended() -> None:
    rows = [(1, 0, SCHEDULE), (1, 5, UPDATE), (1, 5, FAIL), (1, 6, SCHEDULE), (1, 6, FAIL)]
    assert [kind for _, _, kind in of_tasks(*rows)] == [SCHEDULE, UPDATE, FAIL, SCHEDULE, FAIL]


@pytest.mark.parametrize("update", [s.EventType.UPDATE_PENDING, s.EventType.UPDATE_RUNNING])
def test_an_update_of_either_kind_starts_no_task(update: int) -> None:
    rows = [(1, 0, SCHEDULE), (1, 5, FAIL), (1, 5, update), (1, 6, SCHEDULE), (1, 6, FAIL)]
    assert [kind for _, _, kind in of_tasks(*rows)] == [SCHEDULE, update, FAIL, SCHEDULE, FAIL]


def test_of_many_events_of_one_time_those_of_one_kind_stay_together_in_their_order() -> None:
    kinds = [SUBMIT, SCHEDULE, FAIL, s.EventType.KILL]
    found = of_tasks((1, 0, SCHEDULE), *((1, 5, kind) for kind in kinds * 25))
    expected = [kind for kind in (FAIL, s.EventType.KILL, SUBMIT, SCHEDULE) for _ in range(25)]
    assert [kind for _, _, kind in found] == [SCHEDULE, *expected]


def test_what_one_task_of_a_collection_does_starts_or_ends_no_other_one() -> None:
    rows = [(0, 0, SCHEDULE), (0, 5, SCHEDULE), (0, 5, FAIL), (1, 5, SCHEDULE), (1, 5, FAIL)]
    table = pa.table(
        {
            s.COLLECTION_ID: pa.array([7] * len(rows), pa.int64()),
            s.INSTANCE_INDEX: pa.array([index for index, _, _ in rows], pa.int32()),
            s.TIME_US: pa.array([time for _, time, _ in rows], pa.int64()),
            s.EVENT_TYPE: pa.array([kind for _, _, kind in rows], pa.int8()),
        }
    )
    found = task_events_in_order(table)
    expected = [(0, SCHEDULE), (0, FAIL), (0, SCHEDULE), (1, SCHEDULE), (1, FAIL)]
    assert list(zip(*(found[n].to_pylist() for n in (s.INSTANCE_INDEX, s.EVENT_TYPE)), strict=True)) == expected


def of_machines(*rows: Row) -> list[Row]:
    """Return events, (machine, time, type) each and sorted, as (time, machine, type) in their order."""
    table = pa.table(
        {
            s.MACHINE_ID: pa.array([machine for machine, _, _ in rows], pa.int64()),
            s.TIME_US: pa.array([time for _, time, _ in rows], pa.int64()),
            s.EVENT_TYPE: pa.array([kind for _, _, kind in rows], pa.int8()),
        }
    )
    found = machine_events_in_order(table)
    return list(zip(*(found[n].to_pylist() for n in (s.TIME_US, s.MACHINE_ID, s.EVENT_TYPE)), strict=True))


def test_a_machine_that_is_removed_and_comes_back_at_one_time_is_in_service() -> None:
    found = of_machines((1, 0, ADD), (1, 5, ADD), (1, 5, REMOVE), (2, 3, ADD), (2, 3, REMOVE), (2, 5, ADD))
    assert found == [(0, 1, ADD), (3, 2, ADD), (3, 2, REMOVE), (5, 1, REMOVE), (5, 1, ADD), (5, 2, ADD)]


def test_a_machine_that_is_updated_and_removed_at_one_time_is_not_in_service() -> None:
    found = of_machines((1, 0, ADD), (1, 5, REMOVE), (1, 5, CHANGED), (1, 6, ADD), (1, 6, CHANGED))
    assert found == [(0, 1, ADD), (5, 1, CHANGED), (5, 1, REMOVE), (6, 1, ADD), (6, 1, CHANGED)]


@pytest.mark.parametrize("update", [CHANGED, s.MachineEventType.SOFT_ERROR, s.MachineEventType.HARD_ERROR])
def test_neither_an_update_nor_an_error_brings_a_machine_back_that_is_removed_at_one_time(update: int) -> None:
    found = of_machines((1, 0, ADD), (1, 5, REMOVE), (1, 5, update))
    assert found == [(0, 1, ADD), (5, 1, update), (5, 1, REMOVE)]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 10)), max_size=30))
def test_events_keep_their_task_and_time_and_those_of_one_kind_their_order(rows: list[Row]) -> None:
    found = of_tasks(*rows)
    assert sorted(found) == sorted(rows)
    assert [row[:2] for row in found] == sorted(row[:2] for row in rows)
    for ends in (True, False):
        kinds = [row for row in found if (row[2] in s.EventType.ENDS) == ends]
        assert kinds == sorted(kinds)
