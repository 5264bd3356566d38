"""Describes the five tables of the Google cluster-usage traces v3 (2019), as JSON lines or as a parquet export.

Quirks: 64-bit integers and enums may be strings; enums may be names; ``alloc_collection_id`` 0 means top level and
``machine_id`` 0 means no machine (-1, a dedicated machine, is kept); ``alloc_instance_index`` -1 means null, as does
a missing type of 0 or an empty one, and a maximum usage of 0 with a mean above 0 ("it may be omitted or 0"); event
times 0 and 2^63-1 mean before and after the trace; ``resource_request`` may be an empty object; a repeated field
without an element is left out of JSON and an empty list in parquet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.traces.source import ZERO_MAXIMUM, Field, RawTable, Source, code_sql, maximum_sql, present, tier_sql
from reclaim.data.windows import VECTORS

_RESOURCES: Final = "STRUCT(cpus DOUBLE, memory DOUBLE)"
_CONSTRAINTS: Final = "STRUCT(name VARCHAR, value VARCHAR, relation VARCHAR)[]"
_EVENT_NAMES: Final = (
    "SUBMIT", "QUEUE", "ENABLE", "SCHEDULE", "EVICT", "FAIL", "FINISH", "KILL", "LOST", "UPDATE_PENDING",
    "UPDATE_RUNNING",
)  # fmt: skip


def _or_none(column: str) -> str:
    """Return SQL for an enum; an empty one means ``NONE``, by the format's description."""
    return f"coalesce(nullif({column}, ''), 'NONE')"


_ENUMS: Final = {
    "type": code_sql("type", _EVENT_NAMES),
    "collection_type": code_sql("collection_type", ("JOB", "ALLOC_SET")),
    "missing_type": code_sql(_or_none("missing_type"), s.MISSING_TYPES, prefix="MISSING_TYPE_"),
    "scheduling_class": code_sql(
        "scheduling_class", ("MOST_INSENSITIVE", "INSENSITIVE", "SENSITIVE", "MOST_SENSITIVE")
    ),
    "vertical_scaling": code_sql(
        "replace(vertical_scaling, 'SCALING_SETTING_UNKNOWN', 'SCALING_UNKNOWN')",
        s.VERTICAL_SCALINGS, prefix="VERTICAL_SCALING_",
    ),
    "scheduler": code_sql("scheduler", s.SCHEDULERS, prefix="SCHEDULER_"),
    "machine type": code_sql("type", ("EVENT_TYPE_UNKNOWN", "ADD", "REMOVE", "UPDATE")),
    "missing_data_reason": code_sql(
        _or_none("missing_data_reason"), s.MISSING_TYPES[:2], prefix="MISSING_DATA_REASON_"
    ),
}  # fmt: skip
"""The trace's enums → SQL of their codes; names and numbers are those of its protocol buffer definition."""


def _known(*enums: str) -> dict[str, str]:
    """Return the checks that each enum is null or one of its values."""
    return {f"{name.split()[-1]} is no known value": f"{name.split()[-1]} IS NULL OR {_ENUMS[name]} IS NOT NULL"
            for name in enums}  # fmt: skip


_RELATION: Final = code_sql("c.relation", s.RELATIONS)
_CONSTRAINTS_LIST: Final = f"""
    list_transform("constraint", lambda c: struct_pack(
        {s.ATTRIBUTE_NAME} := c.name, {s.ATTRIBUTE_VALUE} := c.value, {s.RELATION} := {_RELATION}
    )) AS {s.CONSTRAINTS_LIST}
"""
_TIME: Final = f"CAST(least(time, {s.AFTER_TRACE_US}) AS BIGINT)"
"""Event time. Published rows hold 2^63, one more than documented and than a signed integer holds: after the trace."""


def _files(table: str) -> tuple[str, ...]:
    """Return globs of a table's files: numbered shards, or the one file of a small table."""
    return tuple(f"{table}{shard}.{kind}" for shard in ("-*", "") for kind in ("json.gz", "json", "parquet"))


def _measured(*values: str) -> str:
    """Return SQL: whether values, each of which may be null, are finite and not negative."""
    return " AND ".join(f"coalesce({v} >= 0 AND isfinite({v}), true)" for v in values)


def _measured_vector(column: str) -> str:
    """Return SQL: whether a vector has no null, and is finite and not negative (the engine sorts NaN last)."""
    return f"list_min({column}) >= 0 AND isfinite(list_max({column})) AND list_count({column}) = len({column})"


LONGEST_WINDOW_US: Final = 300_000_000
"""Longest window there should be, in µs (section "Time and timestamps")."""
_COUNTERS: Final = ("cycles_per_instruction", "memory_accesses_per_instruction", "sample_rate")
"""Fields kept however implausible: not all machines collect them, and no feature depends on one alone."""

_PLACE: Final = (
    Field("machine_id", s.MACHINE_ID, zero_is_null=True),
    Field("alloc_collection_id", s.ALLOC_COLLECTION_ID, zero_is_null=True),
    Field("alloc_instance_index", s.ALLOC_INSTANCE_INDEX, only_with="alloc_collection_id"),
    Field("collection_type", s.COLLECTION_TYPE, most=1),
)
"""Fields that usage and events share."""
_FIELDS: Final = (
    Field("start_time", s.START_US, needed=True),
    Field("end_time", s.END_US, needed=True),
    Field("collection_id", s.COLLECTION_ID, needed=True),
    Field("instance_index", s.INSTANCE_INDEX, needed=True),
    *_PLACE,
    Field("average_usage.cpus", s.CPU_MEAN, needed=True),
    Field("average_usage.memory", s.MEMORY_MEAN),
    Field("maximum_usage.cpus", s.CPU_MAX, mean="average_usage.cpus"),
    Field("maximum_usage.memory", s.MEMORY_MAX, mean="average_usage.memory"),
    Field("random_sample_usage.cpus", s.CPU_SAMPLE),
    Field("assigned_memory", s.MEMORY_ASSIGNED),
    Field("page_cache_memory", s.PAGE_CACHE),
    Field("cycles_per_instruction", s.CPI),
    Field("memory_accesses_per_instruction", s.MAI),
    Field("sample_rate", s.SAMPLE_RATE_HZ),
    Field("cpu_usage_distribution", s.CPU_PERCENTILES),
    Field("tail_cpu_usage_distribution", s.CPU_TAIL_PERCENTILES),
)
"""The usage table, field by field."""


def _raw_type(field: Field) -> str:
    """Return the duckdb type of a raw field."""
    type_ = s.USAGE.field(field.column).type
    if "." in field.path:
        return _RESOURCES
    if field.most is not None:
        return "VARCHAR"
    return "FLOAT[]" if pa.types.is_list(type_) else "DOUBLE" if pa.types.is_floating(type_) else "BIGINT"


def _canonical(fields: Iterable[Field]) -> str:
    """Return SQL, comma-separated, for the columns of fields; a vector is null unless it has the documented length."""

    def value(field: Field) -> str:
        if field.most is not None:
            return _ENUMS[field.path]
        if field.column in VECTORS:
            return f"CASE WHEN len({field.path}) = {len(VECTORS[field.column])} THEN {field.path} END"
        if field.mean:
            return maximum_sql(field.path, field.mean)
        if field.only_with:
            return f"CASE WHEN {field.only_with} <> 0 THEN nullif({field.path}, -1) END"
        return f"nullif({field.path}, 0)" if field.zero_is_null else field.path

    return ", ".join(f"{value(field)} AS {field.column}" for field in fields)


USAGE: Final = RawTable(
    name="usage",
    raw="instance_usage",
    patterns=_files("instance_usage"),
    columns={field.path.split(".")[0]: _raw_type(field) for field in _FIELDS},
    select=_canonical(_FIELDS),
    checks={
        **present("collection_id", "instance_index"),
        "start_time or end_time is missing": "start_time IS NOT NULL AND end_time IS NOT NULL",
        "start_time is negative": "start_time >= 0",
        "end_time is not after start_time": "end_time > start_time",
        "end_time is past the last time there can be": f"end_time <= {s.LATEST_US}",
        "average_usage is missing": "average_usage.cpus IS NOT NULL",
        "average_usage.cpus is negative or not finite": _measured("average_usage.cpus"),
        "average_usage.memory is negative or not finite": _measured("average_usage.memory"),
        "maximum_usage is negative or not finite": _measured("maximum_usage.cpus", "maximum_usage.memory"),
        "cpu_usage_distribution is negative or not finite": _measured_vector("cpu_usage_distribution"),
        "tail_cpu_usage_distribution is negative or not finite": _measured_vector("tail_cpu_usage_distribution"),
        **{f"{c} is negative or not finite": _measured(c)
           for c in ("random_sample_usage.cpus", "assigned_memory", "page_cache_memory")},
        **_known("collection_type"),
    },
    defects={
        "cpu_usage_distribution has not 11 elements": "len(cpu_usage_distribution) NOT IN (0, 11)",
        "tail_cpu_usage_distribution has not 9 elements": "len(tail_cpu_usage_distribution) NOT IN (0, 9)",
        **{f"{c} is negative or not finite": f"NOT ({_measured(c)})" for c in _COUNTERS},
    },
    needs=tuple(dict.fromkeys(field.path.split(".")[0] for field in _FIELDS if field.needed)),
    fields=_FIELDS,
    aliases={"random_sampled_usage": "random_sample_usage"},  # by the document, and by the files
)  # fmt: skip

EVENTS: Final = RawTable(
    name="events",
    raw="instance_events",
    patterns=_files("instance_events"),
    columns={
        "time": "UBIGINT", "type": "VARCHAR", "collection_id": "BIGINT", "scheduling_class": "VARCHAR",
        "missing_type": "VARCHAR", "collection_type": "VARCHAR", "priority": "INTEGER",
        "alloc_collection_id": "BIGINT", "instance_index": "BIGINT", "machine_id": "BIGINT",
        "alloc_instance_index": "BIGINT", "resource_request": _RESOURCES,
        "constraint": _CONSTRAINTS,
    },
    select=f"""
        collection_id AS {s.COLLECTION_ID}, instance_index AS {s.INSTANCE_INDEX}, {_TIME} AS {s.TIME_US},
        {_ENUMS["type"]} AS {s.EVENT_TYPE}, nullif({_ENUMS["missing_type"]}, 0) AS {s.MISSING_TYPE},
        {_canonical(_PLACE)}, resource_request.cpus AS {s.CPU_LIMIT}, resource_request.memory AS {s.MEMORY_LIMIT},
        priority AS {s.PRIORITY}, {tier_sql("priority")} AS {s.TIER},
        {_ENUMS["scheduling_class"]} AS {s.SCHEDULING_CLASS}, {_CONSTRAINTS_LIST}
    """,
    checks={
        **present("collection_id", "instance_index", "time"),
        "type is not an event type": f"{_ENUMS['type']} IS NOT NULL",
        "resource_request is negative or not finite": _measured("resource_request.cpus", "resource_request.memory"),
        **_known("missing_type", "collection_type", "scheduling_class"),
        "constraint has no known relation": f"""len(list_filter("constraint", lambda c: {_RELATION} IS NULL)) = 0""",
    },
    needs=("time", "type", "collection_id", "instance_index", "resource_request"),
)  # fmt: skip

COLLECTIONS: Final = RawTable(
    name="collections",
    raw="collection_events",
    patterns=_files("collection_events"),
    columns={
        "time": "UBIGINT", "type": "VARCHAR", "collection_id": "BIGINT", "scheduling_class": "VARCHAR",
        "missing_type": "VARCHAR", "collection_type": "VARCHAR", "priority": "INTEGER",
        "alloc_collection_id": "BIGINT", "user": "VARCHAR", "collection_name": "VARCHAR",
        "collection_logical_name": "VARCHAR", "parent_collection_id": "BIGINT",
        "start_after_collection_ids": "BIGINT[]", "max_per_machine": "INTEGER", "max_per_switch": "INTEGER",
        "vertical_scaling": "VARCHAR", "scheduler": "VARCHAR",
    },
    select=f"""
        collection_id AS {s.COLLECTION_ID}, {_TIME} AS {s.TIME_US}, {_ENUMS["type"]} AS {s.EVENT_TYPE},
        nullif({_ENUMS["missing_type"]}, 0) AS {s.MISSING_TYPE}, {_ENUMS["collection_type"]} AS {s.COLLECTION_TYPE},
        priority AS {s.PRIORITY}, {tier_sql("priority")} AS {s.TIER},
        {_ENUMS["scheduling_class"]} AS {s.SCHEDULING_CLASS}, nullif(alloc_collection_id, 0) AS {s.ALLOC_COLLECTION_ID},
        "user" AS {s.USER_ID}, collection_name AS {s.NAME_ID}, collection_logical_name AS {s.LOGICAL_NAME_ID},
        nullif(parent_collection_id, 0) AS {s.PARENT_COLLECTION_ID},
        CASE WHEN len(start_after_collection_ids) > 0 THEN start_after_collection_ids END AS {s.START_AFTER},
        nullif(max_per_machine, 0) AS {s.MAX_PER_MACHINE}, nullif(max_per_switch, 0) AS {s.MAX_PER_SWITCH},
        {_ENUMS["vertical_scaling"]} AS {s.VERTICAL_SCALING}, {_ENUMS["scheduler"]} AS {s.SCHEDULER}
    """,
    checks={
        **present("collection_id", "time"),
        **_known("type", "missing_type", "collection_type", "scheduling_class", "vertical_scaling", "scheduler"),
    },
    needs=("time", "collection_id"),
)  # fmt: skip

MACHINES: Final = RawTable(
    name="machines",
    raw="machine_events",
    patterns=_files("machine_events"),
    columns={
        "time": "UBIGINT", "machine_id": "BIGINT", "type": "VARCHAR", "switch_id": "VARCHAR", "capacity": _RESOURCES,
        "platform_id": "VARCHAR", "missing_data_reason": "VARCHAR",
    },
    select=f"""
        {_TIME} AS {s.TIME_US}, machine_id AS {s.MACHINE_ID},
        {_ENUMS["machine type"]} AS {s.EVENT_TYPE}, nullif({_ENUMS["missing_data_reason"]}, 0) AS {s.MISSING_TYPE},
        capacity.cpus AS {s.CPU_CAPACITY}, capacity.memory AS {s.MEMORY_CAPACITY},
        platform_id AS {s.PLATFORM}, switch_id AS {s.SWITCH_ID}
    """,
    checks={
        **present("machine_id", "time"),
        "capacity is negative or not finite": _measured("capacity.cpus", "capacity.memory"),
        **_known("machine type", "missing_data_reason"),
    },
    needs=("time", "machine_id"),
)  # fmt: skip

ATTRIBUTES: Final = RawTable(
    name="attributes",
    raw="machine_attributes",
    patterns=_files("machine_attributes"),
    columns={
        "time": "UBIGINT", "machine_id": "BIGINT", "name": "VARCHAR", "value": "VARCHAR", "deleted": "BOOLEAN",
    },
    select=f"""
        {_TIME} AS {s.TIME_US}, machine_id AS {s.MACHINE_ID}, name AS {s.ATTRIBUTE_NAME}, value AS {s.ATTRIBUTE_VALUE},
        deleted AS {s.ATTRIBUTE_DELETED}
    """,
    checks=present("machine_id", "time"),
    needs=("time", "machine_id"),
)  # fmt: skip


def google_v3() -> Source:
    """Return the v3 source."""
    return Source(
        trace="google-v3",
        tables=(USAGE, EVENTS, COLLECTIONS, MACHINES, ATTRIBUTES),
        options=ZERO_MAXIMUM,
        longest_window_us=LONGEST_WINDOW_US,
    )
