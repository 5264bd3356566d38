"""Limits joined to windows: the same as a slow reading of the rule in plain Python, on events of every kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.ingest.limits import POLICY, policy_of

TIMES = st.sampled_from([*range(12), s.AFTER_TRACE_US])  # few, so that many are equal
TASKS = st.sampled_from([(1, 0), (1, 1), (2, 0), (2**63 - 1, 5), (-1, 3)])
KINDS = st.sampled_from([None, 0, 3, 3, 4, 5, 10])
LIMITS = st.sampled_from([None, 0.0, 0.25, 0.5, 1.0])


@dataclass(frozen=True)
class Event:
    """An instance event, as far as the join looks at it."""

    task: tuple[int, int]
    time: int
    kind: int | None
    policy: tuple[float | int | None, ...]


policies = st.tuples(
    LIMITS, LIMITS, st.sampled_from([None, 0, 200]), st.sampled_from([None, 0, 4]), st.none() | st.just(2)
)
events_of_tasks = st.lists(st.builds(Event, TASKS, TIMES, KINDS, policies), max_size=25)
windows_of_tasks = st.lists(st.tuples(TASKS, st.integers(0, 11), st.integers(1, 4)), max_size=25)


def slowly(events: list[Event], task: tuple[int, int], start: int, end: int) -> dict[str, Any]:
    """Return what holds in a window, as the docstring of ``policy_of`` says; events hold in the order given."""
    mine = [e for e in events if e.task == task and e.time != s.AFTER_TRACE_US]
    starts = [e.time for e in mine if e.kind == s.EventType.SCHEDULE and e.time < end]
    scheduled = starts[-1] if starts else None
    out: dict[str, Any] = {s.SCHEDULED_US: scheduled}
    for k, name in enumerate(POLICY):
        at_start = [e.policy[k] for e in mine if e.time <= start and e.policy[k] is not None]
        by_end = [e.policy[k] for e in mine if e.time < end and e.policy[k] is not None]
        begun_inside = scheduled is not None and start < scheduled
        told = by_end if begun_inside or not at_start else at_start
        out[name] = told[-1] if told else None
        if name in (s.CPU_LIMIT, s.MEMORY_LIMIT) and out[name] == 0:
            out[name] = None
    return out


def table_of(events: list[Event]) -> pa.Table:
    columns: dict[str, list[Any]] = {
        s.COLLECTION_ID: [e.task[0] for e in events],
        s.INSTANCE_INDEX: [e.task[1] for e in events],
        s.TIME_US: [e.time for e in events],
        s.EVENT_TYPE: [e.kind for e in events],
        **{name: [e.policy[k] for e in events] for k, name in enumerate(POLICY)},
    }
    return pa.table({n: pa.array(v, s.EVENTS.field(n).type) for n, v in columns.items()})


def joined(events: list[Event], windows: list[tuple[tuple[int, int], int, int]]) -> list[dict[str, Any]]:
    keys = [[task[0] for task, *_ in windows], [task[1] for task, *_ in windows], [w[1] for w in windows],
            [w[2] for w in windows]]  # fmt: skip
    table = policy_of(table_of(events), *(np.array(key, np.int64) for key in keys))
    table.validate(full=True)
    return list(table.to_pylist())


@settings(max_examples=100, deadline=None)
@given(events=events_of_tasks, windows=windows_of_tasks)
@example(  # the last of one time holds, though it is an end, where that is the order given
    events=[
        Event((1, 0), 0, s.EventType.SUBMIT, (None, 0.25, None, None, None)),
        Event((1, 0), 0, s.EventType.EVICT, (None, 0.0, None, None, None)),
    ],
    windows=[((1, 0), 0, 1)],
)
def test_the_limits_of_every_window_are_those_that_the_rule_gives_read_slowly(
    events: list[Event], windows: list[tuple[tuple[int, int], int, int]]
) -> None:
    events = sorted(events, key=lambda e: (e.task, e.time, e.kind is None, e.kind))  # nulls last, as SQL has it
    spans = sorted((task, start, start + length) for task, start, length in windows)
    assert joined(events, spans) == [slowly(events, *span) for span in spans]


def test_an_event_at_a_windows_start_holds_in_it_and_one_at_its_end_does_not() -> None:
    task = (7, 0)
    events = [Event(task, 0, 3, (0.1, 0.1, 200, 3, 2)), Event(task, 300, 10, (0.2, 0.2, 200, 3, 2)),
              Event(task, 600, 10, (0.3, 0.3, 200, 3, 2))]  # fmt: skip
    assert [row[s.CPU_LIMIT] for row in joined(events, [(task, 0, 300), (task, 300, 600), (task, 600, 900)])] == [
        0.1, 0.2, 0.3,
    ]  # fmt: skip


def test_of_events_of_one_time_the_last_holds_in_a_window_from_then_on_and_in_one_that_began_before() -> None:
    def event(time: int, kind: int, limit: float) -> Event:
        return Event((1, 0), time, kind, (limit, limit, None, None, None))

    fail, submit, schedule, update = (
        s.EventType.FAIL, s.EventType.SUBMIT, s.EventType.SCHEDULE, s.EventType.UPDATE_RUNNING
    )  # fmt: skip
    windows = [((1, 0), 4, 9), ((1, 0), 5, 9)]  # of which the first is older than the start
    events = [event(0, schedule, 0.25), event(5, fail, 0.25), event(5, submit, 0.5), event(5, schedule, 1.0)]
    assert [(row[s.CPU_LIMIT], row[s.SCHEDULED_US]) for row in joined(events, windows)] == [(1.0, 5), (1.0, 5)]
    events.append(event(5, update, 0.5))
    assert [row[s.CPU_LIMIT] for row in joined(events, windows)] == [0.5, 0.5]
    assert [row[s.CPU_LIMIT] for row in joined([event(0, schedule, 0.25), event(5, fail, 0.5)], windows)] == [0.25, 0.5]


def test_a_start_at_the_very_start_of_a_window_is_not_inside_it() -> None:
    task = (7, 0)
    begun, changed = Event(task, 300, 3, (0.1, 0.1, 200, 3, 2)), Event(task, 450, 10, (0.2, 0.2, 200, 3, 2))
    (row,) = joined([begun, changed], [(task, 300, 600)])
    assert (row[s.SCHEDULED_US], row[s.CPU_LIMIT]) == (300, 0.1)
    (row,) = joined([replace(begun, time=301), changed], [(task, 300, 600)])
    assert (row[s.SCHEDULED_US], row[s.CPU_LIMIT]) == (301, 0.2)


def test_a_limit_of_zero_takes_away_the_limit_before_it_and_a_null_leaves_it() -> None:
    task = (7, 0)
    events = [Event(task, 0, 3, (0.1, 0.1, 200, 3, 2)), Event(task, 5, 10, (None, 0.0, None, None, None))]
    (row,) = joined(events, [(task, 10, 20)])
    assert (row[s.CPU_LIMIT], row[s.MEMORY_LIMIT], row[s.PRIORITY]) == (0.1, None, 200)


@pytest.mark.parametrize("events", [[], [Event((1, 0), s.AFTER_TRACE_US, 3, (0.1, 0.1, 1, 1, 1))]])
def test_a_task_without_an_event_in_the_trace_has_no_limit_and_no_start(events: list[Event]) -> None:
    (row,) = joined(events, [((1, 0), 0, 300)])
    assert set(row.values()) == {None}


def test_no_window_at_all_gives_no_row() -> None:
    assert joined([Event((1, 0), 0, 3, (0.1, 0.1, 1, 1, 1))], []) == []
