"""Where tasks may run: each relation, constraints and attributes as of a time, bounds on a job's tasks per machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.schema import RELATIONS
from reclaim.replay.closed_loop.constraints import NO_SET, Constraints, most_per_machine, satisfies

EQUAL, NOT_EQUAL, LESS, GREATER, AT_MOST, AT_LEAST, PRESENT, ABSENT = range(len(RELATIONS))


@pytest.mark.parametrize(
    ("machine", "relation", "value", "holds"),
    [
        ("a", EQUAL, "a", True),
        ("a", EQUAL, "b", False),
        (None, EQUAL, "", True),  # an absent attribute is the empty string
        ("", EQUAL, "", True),
        ("2", EQUAL, "02", False),  # strings, not numbers
        ("a", NOT_EQUAL, "b", True),
        ("a", NOT_EQUAL, "a", False),
        (None, NOT_EQUAL, "a", True),
        (None, NOT_EQUAL, "", False),
        ("2", LESS, "3", True),
        ("3", LESS, "3", False),
        ("10", LESS, "9", False),  # numbers, not strings
        (None, LESS, "1", True),  # an absent attribute is 0
        (None, LESS, "0", False),
        ("3", GREATER, "2", True),
        ("3", GREATER, "3", False),
        (None, GREATER, "-1", True),
        ("3", AT_MOST, "3", True),
        ("4", AT_MOST, "3", False),
        ("3", AT_LEAST, "3", True),
        ("2", AT_LEAST, "3", False),
        ("x", LESS, "3", False),  # a hash has no order
        ("3", LESS, "x", False),
        ("0", PRESENT, "", True),
        ("", PRESENT, "", True),
        (None, PRESENT, "", False),
        (None, ABSENT, "", True),
        ("a", ABSENT, "", False),
    ],
)
def test_each_relation_holds_as_the_trace_defines_it(
    machine: str | None, relation: int, value: str, holds: bool
) -> None:
    assert satisfies(machine, relation, value) is holds


Event = Callable[..., dict[str, Any]]
WriteShard = Callable[..., Path]


@pytest.fixture
def cell(tmp_path: Path, window: Event, event: Event, write_shard: WriteShard) -> Dataset:
    """Make three tasks and three machines; what they ask and have changes at 1,000 and at 2,000 s."""
    raw = tmp_path / "raw"

    def needs(*constraints: tuple[str, str, int]) -> list[dict[str, str]]:
        return [{"name": name, "value": value, "relation": str(relation)} for name, value, relation in constraints]

    fast = ("speed", "2", AT_LEAST)
    events = [
        event(600, 3, instance_index="0", constraint=needs(fast, ("zone", "east", EQUAL))),
        event(2000, 10, instance_index="0", constraint=needs(("zone", "west", EQUAL))),
        event(600, 3, instance_index="1", constraint=needs(("zone", "east", EQUAL), fast)),
        event(600, 3, instance_index="2"),
    ]
    write_shard(raw, "instance_events-000000000000", events)
    write_shard(raw, "instance_usage-000000000000", [window(900, instance_index=str(i)) for i in range(3)])
    machine = {"type": "1", "capacity": {"cpus": 1.0, "memory": 1.0}}
    write_shard(raw, "machine_events-000000000000", [{"time": "0", "machine_id": str(i), **machine} for i in (1, 2, 3)])
    attributes = [(0, 1, "zone", "east"), (0, 1, "speed", "2"), (0, 2, "zone", "east"), (0, 3, "zone", "west")]
    attributes += [(1000, 2, "speed", "3")]
    rows: list[dict[str, Any]] = [
        {"time": str(t * 1_000_000), "machine_id": str(m), "name": name, "value": value, "deleted": False}
        for t, m, name, value in attributes
    ]
    rows.append({"time": str(2_000_000_000), "machine_id": "1", "name": "zone", "value": "east", "deleted": True})
    write_shard(raw, "machine_attributes-000000000000", rows)
    jobs = {"type": "0", "priority": "200", "scheduling_class": "2", "collection_type": "0"}
    collections = [
        {"time": "0", "collection_id": "9007199254740993", "max_per_machine": "4", **jobs},
        {"time": "5", "collection_id": "9007199254740993", "max_per_machine": "2", **jobs},
        {"time": "5", "collection_id": "8", "max_per_machine": "0", **jobs},
    ]
    write_shard(raw, "collection_events-000000000000", collections)
    return ingest(raw, tmp_path / "cell", IngestConfig(trace="google-v3", buckets=2)).dataset


def _sets(constraints: Constraints, time_s: int) -> list[int]:
    found = constraints.set_of(np.full(4, 9007199254740993), np.arange(4), time_s * 1_000_000)
    return [int(number) for number in found]


def test_tasks_with_the_same_constraints_share_a_set_whatever_their_order(cell: Dataset) -> None:
    constraints = Constraints.read(cell)
    first, second, free, unknown = _sets(constraints, 700)
    assert first == second != NO_SET
    assert free == unknown == NO_SET
    assert len(constraints.sets) == 3


def test_a_set_is_in_force_from_its_event_until_the_next(cell: Dataset) -> None:
    constraints = Constraints.read(cell)
    assert _sets(constraints, 599) == [NO_SET] * 4
    before, after = _sets(constraints, 1999), _sets(constraints, 2000)
    assert before[0] == before[1]
    assert after[0] not in (before[0], NO_SET)
    assert after[1] == before[1]


def test_machines_are_allowed_by_the_attributes_they_have_at_the_time(cell: Dataset) -> None:
    constraints = Constraints.read(cell)
    machines = np.array([3, 2, 1])
    east_and_fast, west = _sets(constraints, 700)[0], _sets(constraints, 2000)[0]
    expected = {0: [False, False, True], 1000: [False, True, True], 2000: [False, True, False]}
    for time_s, of_east in expected.items():
        allowed = constraints.allowed(machines, time_s * 1_000_000)
        assert allowed[NO_SET].all()
        assert allowed[east_and_fast].tolist() == of_east
        assert allowed[west].tolist() == [True, False, False]


def test_a_value_that_is_unknown_is_the_empty_one_in_constraints_and_of_machines_and_all_of_a_set_must_hold() -> None:
    asked = [(1, "zone", None, EQUAL), (2, "zone", "", EQUAL), (3, "gpu", None, PRESENT), (3, "zone", "", EQUAL)]
    rows = [
        dict(zip(s.CONSTRAINTS.names, (task, 0, 5, name, value, relation), strict=True))
        for task, name, value, relation in asked
    ]
    had = [(7, "gpu", None), (8, "zone", "east"), (8, "gpu", "x")]
    attributes = [
        {s.TIME_US: 0, s.MACHINE_ID: m, s.ATTRIBUTE_NAME: name, s.ATTRIBUTE_VALUE: value, s.ATTRIBUTE_DELETED: False}
        for m, name, value in had
    ]
    cell: Any = SimpleNamespace(
        n_buckets=1, constraints=lambda _: pa.Table.from_pylist(rows, s.CONSTRAINTS),
        table=lambda _: pa.Table.from_pylist(attributes, s.ATTRIBUTES),
    )  # fmt: skip
    constraints = Constraints.read(cell)
    sets = constraints.set_of(np.array([1, 2, 3]), np.zeros(3, np.int64), 5)
    allowed = constraints.allowed(np.array([7, 8, 9]), 5)[sets]
    assert sets[0] == sets[1]
    assert allowed.tolist() == [[True, False, True], [True, False, True], [True, False, False]]


@pytest.mark.parametrize("removed", ["1", "3", None])
def test_an_attribute_that_is_deleted_and_set_at_one_time_is_set_whatever_the_deletion_says(
    tmp_path: Path, window: Event, event: Event, write_shard: WriteShard, removed: str | None
) -> None:
    asked = [{"name": "speed", "value": "2", "relation": "0"}]
    write_shard(tmp_path / "raw", "instance_events-000000000000", [event(600, 3, constraint=asked)])
    write_shard(tmp_path / "raw", "instance_usage-000000000000", [window(900)])
    of = {"machine_id": "7", "name": "speed"}
    rows: list[dict[str, Any]] = [
        {**of, "time": "0", "value": "1", "deleted": False},
        {**of, "time": "5", "value": removed, "deleted": True},
        {**of, "time": "5", "value": "2", "deleted": False},
    ]
    write_shard(tmp_path / "raw", "machine_attributes-000000000000", rows)
    made = ingest(tmp_path / "raw", tmp_path / "cell", IngestConfig(trace="google-v3", buckets=1)).dataset
    assert Constraints.read(made).allowed(np.array([7]), 5).tolist() == [[True], [True]]


def test_the_last_bound_on_a_jobs_tasks_holds(cell: Dataset) -> None:
    assert most_per_machine(cell, np.array([9007199254740993, 8, 7])).tolist() == [2, 0, 0]


def test_tasks_that_want_different_machines_share_no_machine_whatever_else_bounds_their_job(
    cell: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [9007199254740993, 8, 7]
    events = pa.table({s.COLLECTION_ID: jobs, s.DIFFERENT_MACHINES: [True, None, False]})
    monkeypatch.setattr(Dataset, "events", lambda *_: events)
    monkeypatch.setitem(cell.manifest, "extras", {"events": [s.DIFFERENT_MACHINES]})
    assert most_per_machine(cell, np.array(jobs)).tolist() == [1, 0, 0]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 9), st.integers(1, 5)), max_size=30),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 9)), max_size=15),
)
def test_a_set_is_looked_up_as_a_plain_search_would(
    rows: list[tuple[int, int, int, int]], asked: list[tuple[int, int, int]]
) -> None:
    known = {(c, i, t): n for c, i, t, n in rows}
    keys = sorted(known)
    columns = np.array(keys, np.int64).reshape(-1, 3).T
    numbers = np.array([known[key] for key in keys], np.int64)
    constraints = Constraints(columns[0], columns[1], columns[2], numbers, sets=[()], attributes={})
    collection, instance, time = np.array(asked, np.int64).reshape(-1, 3).T
    expected = [next((known[k] for k in reversed(keys) if k[:2] == (c, i) and k[2] <= t), NO_SET) for c, i, t in asked]
    assert constraints.set_of(collection, instance, time).tolist() == expected
