"""Describes the six tables of the Google cluster-usage traces v2.1 (2011), as gzipped CSV with a schema.csv.

Source: "Google cluster-usage traces: format + schema", version of 2014-11-17, and the page of the trace itself,
``clusterdata-2011-2``. Quirks: files have no header line, and schema.csv alone says which column is where; event codes,
missing info and priorities are not those of v3; an empty field is null, except a constraint's value, where it is the
empty string; times 0 and 2^63-1 mean before and after the trace; a usage of 0 is legitimate (no process ran in the
container), and so is a CPU request of 0 (the task lives on what is left); version 2.0 is the same without the sampled
CPU usage; ``assigned memory usage`` is a usage, not the limit that v3 calls assigned memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from reclaim.data import schema as s
from reclaim.data.core.duck import quoted
from reclaim.data.traces.schema_csv import SCHEMA_FILE, read_schema_csv
from reclaim.data.traces.source import (
    ZERO_MAXIMUM,
    RawTable,
    Source,
    find_files,
    maximum_sql,
    measured,
    present,
    recoded_sql,
    tier_sql,
)

TIER_FLOORS: Final = (0, 2, None, 9, 11)
"""Lowest 2011 priority of each of ``schema.TIERS``: free 0-1, beb 2-8, no mid tier, prod 9-10, mon 11.

Priorities were renumbered 0 to 11 for publication. The bands are those by which Tirmazi et al., "Borg: the Next
Generation" (EuroSys 2020, section 2), set the 2011 trace next to the 2019 one. The trace's own page agrees on free
(0-1), but names 9-11 production and, depending on its revision, 10 or 12 monitoring, although no priority is above 11.
"""
EVENT_TYPES: Final = {
    0: s.EventType.SUBMIT, 1: s.EventType.SCHEDULE, 2: s.EventType.EVICT, 3: s.EventType.FAIL, 4: s.EventType.FINISH,
    5: s.EventType.KILL, 6: s.EventType.LOST, 7: s.EventType.UPDATE_PENDING, 8: s.EventType.UPDATE_RUNNING,
}  # fmt: skip
"""Code of a job or task event → canonical code (section "Job and task life cycles and event types")."""
MACHINE_EVENT_TYPES: Final = {
    0: s.MachineEventType.ADD, 1: s.MachineEventType.REMOVE, 2: s.MachineEventType.UPDATE,
}  # fmt: skip
"""Code of a machine event → canonical code (section "Machine events")."""
MISSING_INFO: Final = {
    code: s.MISSING_TYPES.index(name)
    for code, name in enumerate(("SNAPSHOT_BUT_NO_TRANSITION", "NO_SNAPSHOT_OR_TRANSITION", "EXISTS_BUT_NO_CREATION"))
}
"""Code of missing info → canonical code (section "Missing event records"); null in a real record."""
OPERATORS: Final = {
    code: s.RELATIONS.index(name) for code, name in enumerate(("EQUAL", "NOT_EQUAL", "LESS_THAN", "GREATER_THAN"))
}
"""Comparison operator → canonical code (section "Task constraints")."""

LONGEST_WINDOW_US: Final = 300_000_000
"""Longest measurement there should be, in µs (section "Time and timestamps")."""
PLAUSIBLE_CPI: Final = (0.2, 300.0)
"""Cycles per instruction. A core of 2011 retires at most four instructions a cycle, five with a fused pair; a cache
miss costs about 100 ns, or 300 cycles at 3 GHz, so that more would take above one miss per instruction. The trace's
page calls some values clearly inaccurate and names no range."""
PLAUSIBLE_MAI: Final = (0.0, 1.0)
"""Memory accesses, counted as last-level cache misses, per instruction: at most one each, on a mean over a window."""
REUSED_JOB: Final = 6253771429
"""The one job known to have kept its ID when it was stopped, reconfigured and restarted (the trace's page)."""

_MEASURES: Final = {
    "CPU rate": s.CPU_MEAN, "canonical memory usage": s.MEMORY_MEAN, "assigned memory usage": s.MEMORY_ASSIGNED_USAGE,
    "unmapped page cache": s.PAGE_CACHE_UNMAPPED, "total page cache": s.PAGE_CACHE,
    "maximum memory usage": s.MEMORY_MAX, "disk I/O time": s.DISK_IO_MEAN, "local disk space usage": s.DISK_MEAN,
    "maximum CPU rate": s.CPU_MAX, "maximum disk IO time": s.DISK_IO_MAX, "sampled CPU usage": s.CPU_SAMPLE,
}  # fmt: skip
"""Column of task_usage → canonical one; each is a usage, and a row where one is negative or not finite is a reject."""
_COUNTERS: Final = {
    "cycles per instruction": s.CPI, "memory accesses per instruction": s.MAI, "sample portion": s.SAMPLE_PORTION,
}  # fmt: skip
"""Column of task_usage → canonical one; an implausible value is counted and kept: the usages next to it are good."""
_MAXIMA: Final = {
    "maximum memory usage": maximum_sql('"maximum memory usage"', '"canonical memory usage"'),
    "maximum CPU rate": maximum_sql('"maximum CPU rate"', '"CPU rate"'),
}
"""Column of task_usage → SQL; "this value is not available for some tasks" (section "Resource usage")."""
_REUSED: Final = {f"job ID {REUSED_JOB} stands for two jobs": f'"job ID" = {REUSED_JOB}'}


def _files(raw: str) -> tuple[str, ...]:
    return (f"{raw}/part-*.csv.gz", f"{raw}/part-*.csv")


def _between(column: str, low: float, high: float) -> dict[str, str]:
    """Return the check that a column's value, where there is one, is from ``low`` to ``high``."""
    return {f"{column} is not {low} to {high}": f'"{column}" BETWEEN {low} AND {high}'}


def _outside(column: str, low: float, high: float) -> dict[str, str]:
    """Return the defect of a value of a column outside ``low`` to ``high``."""
    return {f"{column} is outside {low:g} to {high:g}": f'"{column}" NOT BETWEEN {low} AND {high}'}


_TIME: Final = {**present("time"), "time is negative": "time >= 0"}
_TASK: Final = f'"job ID" AS {s.COLLECTION_ID}, "task index" AS {s.INSTANCE_INDEX}'
_EVENT: Final = f"""
    time AS {s.TIME_US}, {recoded_sql('"event type"', EVENT_TYPES)} AS {s.EVENT_TYPE},
    {recoded_sql('"missing info"', MISSING_INFO)} AS {s.MISSING_TYPE}, CAST(0 AS TINYINT) AS {s.COLLECTION_TYPE},
    "scheduling class" AS {s.SCHEDULING_CLASS}, "user" AS {s.USER_ID}
"""
_EVENT_CHECKS: Final = {
    **_TIME, **present("job ID", "event type"), **_between("event type", 0, 8), **_between("missing info", 0, 2),
    **_between("scheduling class", 0, 3),
}  # fmt: skip

USAGE: Final = RawTable(
    name="usage",
    raw="task_usage",
    patterns=_files("task_usage"),
    columns={
        "start time": "BIGINT", "end time": "BIGINT", "job ID": "BIGINT", "task index": "BIGINT",
        "machine ID": "BIGINT", **dict.fromkeys([*_MEASURES, *_COUNTERS], "DOUBLE"), "aggregation type": "TINYINT",
    },
    select=f"""
        {_TASK}, "start time" AS {s.START_US}, "end time" AS {s.END_US}, "machine ID" AS {s.MACHINE_ID},
        CAST(0 AS TINYINT) AS {s.COLLECTION_TYPE}, "aggregation type" AS {s.AGGREGATION_TYPE},
        {", ".join(f"{_MAXIMA.get(raw, quoted(raw))} AS {name}" for raw, name in (_MEASURES | _COUNTERS).items())}
    """,
    checks={
        **present("job ID", "task index", "start time", "end time"),
        "start time is negative": '"start time" >= 0',
        "end time is not after start time": '"end time" > "start time"',
        "end time is past the last time there can be": f'"end time" <= {s.LATEST_US}',
        **measured(*_MEASURES),
        **_between("aggregation type", 0, 1),
    },
    needs=("start time", "end time", "job ID", "task index", "machine ID"),
    defects={
        "CPU rate is missing": '"CPU rate" IS NULL',
        **{f"{column} is 0 with a mean above 0, made null": f'"{column}" = 0 AND {sql} IS NULL'
           for column, sql in _MAXIMA.items()},
        **_outside("cycles per instruction", *PLAUSIBLE_CPI),
        **_outside("memory accesses per instruction", *PLAUSIBLE_MAI),
        **_outside("sample portion", 0, 1),
        **_REUSED,
    },
)  # fmt: skip

EVENTS: Final = RawTable(
    name="events",
    raw="task_events",
    patterns=_files("task_events"),
    columns={
        "time": "BIGINT", "missing info": "TINYINT", "job ID": "BIGINT", "task index": "BIGINT",
        "machine ID": "BIGINT", "event type": "TINYINT", "user": "VARCHAR", "scheduling class": "TINYINT",
        "priority": "INTEGER", "CPU request": "DOUBLE", "memory request": "DOUBLE", "disk space request": "DOUBLE",
        "different machines restriction": "TINYINT",
    },
    select=f"""
        {_TASK}, {_EVENT}, "machine ID" AS {s.MACHINE_ID},
        priority AS {s.PRIORITY}, {tier_sql("priority", TIER_FLOORS)} AS {s.TIER},
        "CPU request" AS {s.CPU_LIMIT}, "memory request" AS {s.MEMORY_LIMIT}, "disk space request" AS {s.DISK_LIMIT},
        "different machines restriction" = 1 AS {s.DIFFERENT_MACHINES}
    """,
    checks={
        **_EVENT_CHECKS,
        **present("task index"),
        "priority is negative": "priority >= 0",
        **measured("CPU request", "memory request", "disk space request"),
        **_between("different machines restriction", 0, 1),
    },
    needs=("time", "job ID", "task index", "event type", "priority"),
    defects={"task event has no resource request": '"CPU request" IS NULL AND "memory request" IS NULL', **_REUSED},
)  # fmt: skip

COLLECTIONS: Final = RawTable(
    name="collections",
    raw="job_events",
    patterns=_files("job_events"),
    columns={
        "time": "BIGINT", "missing info": "TINYINT", "job ID": "BIGINT", "event type": "TINYINT", "user": "VARCHAR",
        "scheduling class": "TINYINT", "job name": "VARCHAR", "logical job name": "VARCHAR",
    },
    select=f"""
        "job ID" AS {s.COLLECTION_ID}, {_EVENT}, "job name" AS {s.NAME_ID}, "logical job name" AS {s.LOGICAL_NAME_ID}
    """,
    checks=_EVENT_CHECKS,
    needs=("time", "job ID", "event type"),
    defects=_REUSED,
)  # fmt: skip

CONSTRAINTS: Final = RawTable(
    name="constraints",
    raw="task_constraints",
    patterns=_files("task_constraints"),
    columns={
        "time": "BIGINT", "job ID": "BIGINT", "task index": "BIGINT", "comparison operator": "TINYINT",
        "attribute name": "VARCHAR", "attribute value": "VARCHAR",
    },
    select=f"""
        {_TASK}, time AS {s.TIME_US}, "attribute name" AS {s.ATTRIBUTE_NAME},
        coalesce("attribute value", '') AS {s.ATTRIBUTE_VALUE},
        {recoded_sql('"comparison operator"', OPERATORS)} AS {s.RELATION}
    """,
    checks={
        **_TIME, **present("job ID", "task index", "comparison operator", "attribute name"),
        **_between("comparison operator", 0, 3),
    },
    needs=("time", "job ID", "task index", "comparison operator", "attribute name"),
)  # fmt: skip

MACHINES: Final = RawTable(
    name="machines",
    raw="machine_events",
    patterns=_files("machine_events"),
    columns={
        "time": "BIGINT", "machine ID": "BIGINT", "event type": "TINYINT", "platform ID": "VARCHAR", "CPUs": "DOUBLE",
        "Memory": "DOUBLE",
    },
    select=f"""
        time AS {s.TIME_US}, "machine ID" AS {s.MACHINE_ID},
        {recoded_sql('"event type"', MACHINE_EVENT_TYPES)} AS {s.EVENT_TYPE}, "platform ID" AS {s.PLATFORM},
        "CPUs" AS {s.CPU_CAPACITY}, "Memory" AS {s.MEMORY_CAPACITY}
    """,
    checks={**_TIME, **present("machine ID", "event type"), **_between("event type", 0, 2),
            **measured("CPUs", "Memory")},
    needs=("time", "machine ID", "event type"),
    defects={"machine event has no capacity": '"CPUs" IS NULL AND "Memory" IS NULL'},
)  # fmt: skip

ATTRIBUTES: Final = RawTable(
    name="attributes",
    raw="machine_attributes",
    patterns=_files("machine_attributes"),
    columns={
        "time": "BIGINT", "machine ID": "BIGINT", "attribute name": "VARCHAR", "attribute value": "VARCHAR",
        "attribute deleted": "TINYINT",
    },
    select=f"""
        time AS {s.TIME_US}, "machine ID" AS {s.MACHINE_ID}, "attribute name" AS {s.ATTRIBUTE_NAME},
        "attribute value" AS {s.ATTRIBUTE_VALUE}, "attribute deleted" = 1 AS {s.ATTRIBUTE_DELETED}
    """,
    checks={
        **_TIME, **present("machine ID", "attribute name", "attribute deleted"), **_between("attribute deleted", 0, 1),
    },
    needs=("time", "machine ID", "attribute name", "attribute deleted"),
)  # fmt: skip

TABLES: Final = {table.raw: table for table in (USAGE, EVENTS, COLLECTIONS, CONSTRAINTS, MACHINES, ATTRIBUTES)}

_NEVER: Final = (
    s.ALLOC_COLLECTION_ID, s.ALLOC_INSTANCE_INDEX, s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES, s.MEMORY_ASSIGNED,
    s.SAMPLE_RATE_HZ,
)  # fmt: skip
"""Usage columns that no version of this trace has."""
_EXTRAS: Final = {
    "usage": (
        s.PAGE_CACHE_UNMAPPED, s.MEMORY_ASSIGNED_USAGE, s.DISK_MEAN, s.DISK_IO_MEAN, s.DISK_IO_MAX, s.SAMPLE_PORTION,
        s.AGGREGATION_TYPE,
    ),
    "events": (s.USER_ID, s.DISK_LIMIT, s.DIFFERENT_MACHINES),
}  # fmt: skip
_NOTES: Final = (
    "tiers are bands of the 2011 priorities: free 0-1, beb 2-8, prod 9-10, mon 11; there is no mid tier",
    "a usage of 0 is legitimate: no process ran in the container, as while binaries are copied",
    "a CPU request of 0 is legitimate: the task lives on what others leave; its windows have no CPU limit",
    "SUBMIT and SCHEDULE of time 0 may carry different requests: that of SCHEDULE is in force",
    "disk times are in about the first 14 days only",
    "some CPI and MAI values are implausible: they are counted and kept",
    f"job {REUSED_JOB} kept its ID when it was stopped, reconfigured and restarted",
    "about 70 jobs have job events and no task events",
)


def google_v2(folder: Path) -> Source:
    """Return the source of the trace in ``folder``, its columns in the order that ``schema.csv`` there gives.

    A table that schema.csv leaves out is not read. A column that it leaves out, and the trace may lack, becomes null.

    Raises
    ------
    SchemaError
        There is no schema.csv or it is malformed, names a table or a column that is not the trace's, or leaves out one
        that is needed.
    """
    text, orders = read_schema_csv(
        folder,
        "file pattern",
        {raw: table.columns for raw, table in TABLES.items()},
        {raw: table.needs for raw, table in TABLES.items()},
        {raw for raw, table in TABLES.items() if find_files(folder, table)},
    )
    usage = {*orders.get(USAGE.raw, ())}
    absent = [name for column, name in (_MEASURES | _COUNTERS).items() if usage and column not in usage]
    return Source(
        trace="google-v2.1",
        tables=tuple(replace(table, order=orders[raw]) for raw, table in TABLES.items() if raw in orders),
        lacks=(*_NEVER, *absent),
        options={SCHEMA_FILE: text, **ZERO_MAXIMUM},
        extras=_EXTRAS,
        longest_window_us=LONGEST_WINDOW_US,
        notes=_NOTES,
    )
