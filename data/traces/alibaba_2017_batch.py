"""Describes the batch tables of the Alibaba 2017 trace: a task becomes a collection, each run a task of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from reclaim.data import schema as s
from reclaim.data.core.duck import fits_sql, mismatch
from reclaim.data.traces.alibaba_2017_columns import IDS, LAST_S, codes, columns, files, ids, nothing, possible, seconds
from reclaim.data.traces.source import RawTable, good, measured, present

CPU_PER_CORE: Final = 100
"""Unit of a batch task's request, in parts of a core. The schema says "number of cpus", but nearly all ask for 50 or
100 for each of up to 64 486 instances, and some for 800, where an instance runs on one machine and a machine has 64."""
SHORTEST_RUN_S: Final = 1
"""Window of a run that starts and ends in one second: times are whole seconds, and a window must have a length."""
UNKNOWN_COLLECTION: Final = 2**62
"""Collection of the batch instances whose job or task is missing. Every other id is below it."""
INSTANCE_BITS: Final = 62
"""Bits of the hash of a batch record: among 20 million records two collide with a probability of 1 in 20 000."""
_BEST_EFFORT: Final = s.TIERS.index("beb")
_SYNTHESISED: Final = s.MISSING_TYPES.index("SNAPSHOT_BUT_NO_TRANSITION")
"""Marks an event known only from the final state of a record, whose time is missing."""

_REAL: Final = {
    "real_cpu_avg": s.CPU_MEAN, "real_cpu_max": s.CPU_MAX, "real_mem_avg": s.MEMORY_MEAN, "real_mem_max": s.MEMORY_MAX,
}  # fmt: skip

_BATCH_IDS: Final = {**ids("job_id", IDS // 4 - 1), **ids("task_id", IDS)}
_COLLECTION: Final = (
    f"CASE WHEN {' AND '.join(_BATCH_IDS.values())} THEN (job_id + 1) * {IDS} + task_id ELSE {UNKNOWN_COLLECTION} END"
)
"""Job and task id in one: job ``c // 2^32 - 1``, task ``c % 2^32``; never below 2^32, where the containers are."""
_ENDS: Final = {"Terminated": s.EventType.FINISH, "Failed": s.EventType.FAIL, "Cancelled": s.EventType.KILL}
_WAITING: Final = {"Waiting": s.EventType.QUEUE, "Ready": s.EventType.ENABLE}
_LIVE: Final = {**_WAITING, "Running": s.EventType.SCHEDULE}
_RUN_ENDS: Final = {**_ENDS, "Interupted": s.EventType.KILL, "Interrupted": s.EventType.KILL}
"""State → event. A backup instance is interrupted by its starter; the document spells the word both ways."""


def _state(states: Mapping[str, int]) -> str:
    """Return SQL: whether the record was left in one of these states."""
    return f"status IN ({', '.join(map(repr, states))})"


def _known_state(ends: Mapping[str, int]) -> dict[str, str]:
    return {"status is not a known state": f"status IS NOT NULL AND {_state({**ends, **_LIVE})}"}


_EARLY: Final = "greatest(modify_timestamp, 0) < greatest(create_timestamp, 0)"


def _batch_task(time: str, event: str, missing: str) -> str:
    return f"""
        {_COLLECTION} AS {s.COLLECTION_ID}, {seconds(time)} AS {s.TIME_US}, CAST({event} AS TINYINT) AS {s.EVENT_TYPE},
        CAST({missing} AS TINYINT) AS {s.MISSING_TYPE}, CAST(0 AS TINYINT) AS {s.COLLECTION_TYPE},
        CAST({_BEST_EFFORT} AS TINYINT) AS {s.TIER}, plan_cpu / {CPU_PER_CORE} AS {s.CPU_LIMIT},
        plan_mem AS {s.MEMORY_LIMIT}, instance_num AS {s.INSTANCES}
    """


BATCH_TASK: Final = RawTable(
    name="collections",
    raw="batch_task",
    patterns=files("batch_task"),
    columns=columns("batch_task"),
    select=_batch_task("create_timestamp", f"{s.EventType.SUBMIT}", "NULL"),
    checks={
        **present("create_timestamp", "job_id", "task_id"), **possible("create_timestamp", "modify_timestamp"),
        **_BATCH_IDS, **_known_state(_ENDS), **measured("plan_cpu", "plan_mem"),
        "instance_num is negative": "instance_num >= 0",
    },
    defects={
        "batch_task: negative time, taken as before the trace": "create_timestamp < 0 OR modify_timestamp < 0",
        "batch_task: last modified before it was created": _EARLY,
        "batch_task: plan_cpu or plan_mem is missing": "plan_cpu IS NULL OR plan_mem IS NULL",
    },
)  # fmt: skip
BATCH_TASK_STATE: Final = replace(
    BATCH_TASK,
    raw="batch_task state",
    select=_batch_task(
        "greatest(create_timestamp, modify_timestamp)",
        codes("status", {**_ENDS, **_LIVE}),
        f"CASE WHEN {_EARLY} THEN {_SYNTHESISED} END",
    ),
    defects={},
)

_FIELDS: Final = ", ".join(f"coalesce(CAST({name} AS VARCHAR), '')" for name in columns("batch_instance"))
_RUN_TEXT: Final = f"concat_ws(',', {_FIELDS})"
"""SQL of the record as text, in the document's order of columns."""
_START, _END = "coalesce(start_timestamp, 0)", "coalesce(end_timestamp, 0)"
_ENDED: Final = f"({_state(_RUN_ENDS)} AND NOT ({_END} = 0 AND {_START} > 0))"
"""SQL: whether a run is over and its end known; an end of 0 is before the trace only if the start is, too."""
_LATEST: Final = f"greatest({_END}, least({_START}, {LAST_S}) + {SHORTEST_RUN_S})"
_WINDOW: Final = f"{_ENDED} AND {_END} > 0"
_RUN: Final = f"""
    {_COLLECTION} AS {s.COLLECTION_ID},
    CAST(md5_number_lower({_RUN_TEXT}) & {2**INSTANCE_BITS - 1}::UBIGINT AS BIGINT) AS {s.INSTANCE_INDEX},
    CAST(0 AS TINYINT) AS {s.COLLECTION_TYPE}, machine_id AS {s.MACHINE_ID}
"""


def _run_event(time: str, event: str, missing: str) -> str:
    return f"""
        {_RUN}, {time} AS {s.TIME_US}, CAST({event} AS TINYINT) AS {s.EVENT_TYPE},
        CAST(CASE WHEN {missing} THEN {_SYNTHESISED} END AS TINYINT) AS {s.MISSING_TYPE},
        CAST({_BEST_EFFORT} AS TINYINT) AS {s.TIER}
    """


BATCH_INSTANCE: Final = RawTable(
    name="events",
    raw="batch_instance",
    patterns=files("batch_instance"),
    columns=columns("batch_instance"),
    select=_run_event(
        seconds(_START), f"coalesce({codes('status', _WAITING)}, {s.EventType.SCHEDULE})", _state(_WAITING)
    ),
    checks={
        **possible("start_timestamp", "end_timestamp"), **_BATCH_IDS, **_known_state(_RUN_ENDS),
        "start_timestamp is missing": f"start_timestamp IS NOT NULL OR {_state(_WAITING)}",
        "end_timestamp is before start_timestamp": f"NOT ({_ENDED} AND greatest({_END}, 0) < greatest({_START}, 0))",
        **{mismatch(name, "DOUBLE"): fits_sql(name, "DOUBLE") for name in _REAL},
        **{f"{name} is negative or not finite": good(f"TRY_CAST({name} AS DOUBLE)") for name in _REAL},
    },
    defects={
        "batch_instance: negative time, taken as before the trace": "start_timestamp < 0 OR end_timestamp < 0",
        "batch_instance: job_id or task_id is missing": "job_id IS NULL OR task_id IS NULL",
        "batch_instance: never started, no window": _state(_WAITING),
        "batch_instance: no end, no window": f"NOT {_state(_WAITING)} AND NOT {_ENDED}",
        "batch_instance: over before the trace, no window": f"{_ENDED} AND {_END} <= 0",
        "batch_instance: started before the trace, window from 0": f"{_WINDOW} AND {_START} <= 0",
        "batch_instance: start and end in one second, window of a second": f"{_WINDOW} AND {_START} = {_END}",
        "batch_instance: usage is missing": f"{_WINDOW} AND ({' OR '.join(f'{name} IS NULL' for name in _REAL)})",
    },
)  # fmt: skip
BATCH_INSTANCE_END: Final = replace(
    BATCH_INSTANCE,
    raw="batch_instance end",
    select=_run_event(
        f"CASE WHEN {_ENDED} THEN {seconds(_END)} ELSE {seconds(_START)} END",
        codes("status", _RUN_ENDS),
        f"NOT {_ENDED}",
    ),
    where=_state(_RUN_ENDS),
    defects={},
)  # fmt: skip
BATCH_USAGE: Final = replace(
    BATCH_INSTANCE,
    name="usage",
    select=f"""
        {_RUN}, {seconds(_START)} AS {s.START_US}, {seconds(_LATEST)} AS {s.END_US},
        {", ".join(f"TRY_CAST({raw} AS DOUBLE) AS {name}" for raw, name in _REAL.items())},
        {nothing(s.CPU_SHARE, s.MEMORY_SHARE)}
    """,
    where=_WINDOW,
    defects={},
)

BATCH_TABLES: Final = (BATCH_TASK, BATCH_TASK_STATE, BATCH_INSTANCE, BATCH_INSTANCE_END, BATCH_USAGE)
