"""Tasks of a bucket: the same as a slow reading of the rule in plain Python."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.ingest.tasks import tasks_of

SEEN = (s.TIER, s.SCHEDULING_CLASS, s.COLLECTION_TYPE)
SCHEMA = pa.schema([f for f in s.TASKS if f.type != pa.string()])
task = st.sampled_from([(-1, 3), (1, 0), (1, 1), (2, 0), (2**63 - 1, 5)])
seen = st.tuples(*[st.sampled_from([None, 0, 1, 3])] * 3)
windows_of_tasks = st.lists(st.tuples(task, st.integers(0, 4), st.integers(5, 9), seen), max_size=20)
events_of_tasks = st.lists(
    st.tuples(task, st.integers(0, 2), st.sampled_from([0, 3, None]), seen), max_size=20
)  # few times and types, so that many are equal


def last(of: str, windows: list[Any], events: list[Any]) -> int | None:
    """Return a column of the last window that has one, the first of those that start together, else of an event."""
    k = SEEN.index(of)
    found = [(start, -place, values[k]) for place, (_, start, _, values) in enumerate(windows) if values[k] is not None]
    if found:
        return int(max(found)[2])
    said = [
        (time, 99 if kind is None else kind, values[k]) for _, time, kind, values in events if values[k] is not None
    ]
    return int(max(said)[2]) if said else None


@settings(max_examples=200, deadline=None)
@given(windows=windows_of_tasks, events=events_of_tasks)
def test_tasks_are_those_of_windows_and_events_each_as_last_seen(windows: list[Any], events: list[Any]) -> None:
    windows.sort(key=lambda row: row[:3])
    events.sort(key=lambda row: (row[0], row[1], row[2] is None, row[2] or 0))
    usage = pa.table(
        {
            s.COLLECTION_ID: pa.array([t[0] for t, *_ in windows], pa.int64()),
            s.INSTANCE_INDEX: pa.array([t[1] for t, *_ in windows], pa.int64()),
            s.START_US: pa.array([start for _, start, _, _ in windows], pa.int64()),
            s.END_US: pa.array([end for _, _, end, _ in windows], pa.int64()),
            **{name: pa.array([values[k] for *_, values in windows], pa.int8()) for k, name in enumerate(SEEN)},
        }
    )
    told = pa.table(
        {
            s.COLLECTION_ID: pa.array([t[0] for t, *_ in events], pa.int64()),
            s.INSTANCE_INDEX: pa.array([t[1] for t, *_ in events], pa.int64()),
            s.TIME_US: pa.array([time for _, time, _, _ in events], pa.int64()),
            s.EVENT_TYPE: pa.array([kind for _, _, kind, _ in events], pa.int8()),
            **{name: pa.array([values[k] for *_, values in events], pa.int8()) for k, name in enumerate(SEEN)},
        }
    )
    expected = []
    for key in sorted({row[0] for row in (*windows, *events)}):
        of_windows, of_events = ([row for row in rows if row[0] == key] for rows in (windows, events))
        expected.append(
            dict(zip(s.TASK_KEY, key, strict=True))
            | {name: last(name, of_windows, of_events) for name in SEEN}
            | {
                s.FIRST_SEEN_US: min((start for _, start, _, _ in of_windows), default=None),
                s.LAST_SEEN_US: max((end for _, _, end, _ in of_windows), default=None),
            }
        )
    found = tasks_of(usage, told, SCHEMA)
    assert found.schema == SCHEMA
    assert found.to_pylist() == [{name: row[name] for name in SCHEMA.names} for row in expected]
