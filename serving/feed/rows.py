"""Makes the tables of a write from new facts of a live cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from reclaim.data import schema as s
from reclaim.data.traces.kubernetes.fold import Task, TaskKey
from reclaim.data.traces.kubernetes.live import Slot
from reclaim.serving.wire.rows import ENDED_US, FAILED_US, IN_ALLOC, LOGICAL_NAME, USAGE_COLUMNS, USER

_OF_TASK: Final = (USER, LOGICAL_NAME, IN_ALLOC)
"""Columns that usage does not have."""


def usage_of(slot: Slot, tasks: Mapping[TaskKey, Task]) -> pa.Table:
    """Return the windows of a slot in the columns of ``USAGE_COLUMNS``; those without a limit are left out."""
    known = slot.windows.filter(pc.and_(*(pc.is_valid(slot.windows[f"{r}_limit"]) for r in s.RESOURCES)))
    keys = zip(known[s.COLLECTION_ID].to_pylist(), known[s.INSTANCE_INDEX].to_pylist(), strict=True)
    of = [tasks[key] for key in keys]
    columns: dict[str, Any] = {name: known[name] for name in USAGE_COLUMNS if name not in _OF_TASK}
    columns[USER] = pa.array([task.workload.user for task in of], pa.string())
    columns[LOGICAL_NAME] = pa.array([task.workload.logical_name(task.key.container) for task in of], pa.string())
    columns[IN_ALLOC] = pa.array([False] * len(of), pa.bool_())
    return pa.table({name: columns[name] for name in USAGE_COLUMNS})


def failures_of(slot: Slot) -> pa.Table:
    """Return the runs that failed in a slot, in columns of ``TASK_COLUMNS``."""
    said = pa.array([oom for _, _, oom in slot.failed], pa.bool_())
    return _facts([(key, at_us) for key, at_us, _ in slot.failed], FAILED_US).append_column(s.OUT_OF_MEMORY, said)


def ends_of(slot: Slot) -> pa.Table:
    """Return the tasks that ended in a slot, in columns of ``TASK_COLUMNS``."""
    return _facts(slot.ended, ENDED_US)


def _facts(found: list[tuple[TaskKey, int]], column: str) -> pa.Table:
    collection, index, time_us = zip(*((*key, at_us) for key, at_us in found), strict=True) if found else ((), (), ())
    return pa.table(
        {s.COLLECTION_ID: pa.array(collection, pa.int64()), s.INSTANCE_INDEX: pa.array(index, pa.int64()),
         column: pa.array(time_us, pa.int64())}
    )  # fmt: skip
