"""What a dataset holds: every column's name, type, unit and meaning, each spelled once, here.

A dataset is a folder (see ``store.py``)::

    manifest.json
    usage/bucket=000.parquet …     one row per (task, measurement window), sorted by (task, start)
    events/bucket=000.parquet …    lifecycle and limit changes of each task, same buckets
    tasks.parquet                  one row per task
    machines.parquet               capacity changes;  attributes.parquet  machine attributes
    rejects/                       every input line that was not taken, with file, line number and reason

Anything a trace lacks is null, never zero. Resources keep the trace's unit (normalised compute units and bytes for
Google, MHz and MiB for Bitbrains …): everything later divides by the limit, so only the ratio matters.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

RESOURCES: Final = ("cpu", "memory")
"""The resource axis, always the last one, in this order."""

TIERS: Final = ("free", "beb", "mid", "prod", "mon")
"""Priority tiers, lowest first; a tier is stored as its position here. ``beb`` is best-effort batch."""

TIER_FLOORS: Final = (0, 100, 116, 120, 360)
"""Lowest priority of each tier (Google cluster-usage traces v3, section "Priority"). 120-359 is production."""

BEFORE_TRACE_US: Final = 0
"""The time a v3 event carries when it happened before the trace began: a flag, not a time."""
AFTER_TRACE_US: Final = 2**63 - 1
"""The time a v3 event carries when it happened after the trace ended: a flag, not a time."""
UNKNOWN_ID: Final = -1
"""Stands for a null id, time, tier or class in numpy arrays, which have no nulls."""

PERCENTILES: Final = tuple(range(0, 101, 10))
"""Levels, in percent, of the 11 values of ``cpu_percentiles``."""
TAIL_PERCENTILES: Final = tuple(range(91, 100))
"""Levels, in percent, of the 9 values of ``cpu_tail_percentiles``."""

# Columns of more than one table.
COLLECTION_ID: Final = "collection_id"
INSTANCE_INDEX: Final = "instance_index"
MACHINE_ID: Final = "machine_id"
COLLECTION_TYPE: Final = "collection_type"
ALLOC_COLLECTION_ID: Final = "alloc_collection_id"
ALLOC_INSTANCE_INDEX: Final = "alloc_instance_index"
PRIORITY: Final = "priority"
TIER: Final = "tier"
SCHEDULING_CLASS: Final = "scheduling_class"
CPU_LIMIT: Final = "cpu_limit"
MEMORY_LIMIT: Final = "memory_limit"
TIME_US: Final = "time_us"
EVENT_TYPE: Final = "event_type"
MISSING_TYPE: Final = "missing_type"

# Columns of usage.
START_US: Final = "start_us"
END_US: Final = "end_us"
SCHEDULED_US: Final = "scheduled_us"
CPU_MEAN: Final = "cpu_mean"
CPU_MAX: Final = "cpu_max"
CPU_SAMPLE: Final = "cpu_sample"
CPU_PERCENTILES: Final = "cpu_percentiles"
CPU_TAIL_PERCENTILES: Final = "cpu_tail_percentiles"
MEMORY_MEAN: Final = "memory_mean"
MEMORY_MAX: Final = "memory_max"
MEMORY_ASSIGNED: Final = "memory_assigned"
PAGE_CACHE: Final = "page_cache"
CPI: Final = "cpi"
MAI: Final = "mai"
SAMPLE_RATE_HZ: Final = "sample_rate_hz"

# Columns of tasks, machines and attributes.
USER_ID: Final = "user_id"
LOGICAL_NAME_ID: Final = "logical_name_id"
FIRST_SEEN_US: Final = "first_seen_us"
LAST_SEEN_US: Final = "last_seen_us"
CPU_CAPACITY: Final = "cpu_capacity"
MEMORY_CAPACITY: Final = "memory_capacity"
PLATFORM: Final = "platform"
SWITCH_ID: Final = "switch_id"
ATTRIBUTE_NAME: Final = "name"
ATTRIBUTE_VALUE: Final = "value"
ATTRIBUTE_DELETED: Final = "deleted"

# Columns of rejects.
REJECT_FILE: Final = "file"
REJECT_LINE: Final = "line"
REJECT_REASON: Final = "reason"

TASK_KEY: Final = (COLLECTION_ID, INSTANCE_INDEX)
"""What identifies a task."""


class EventType:
    """Codes of instance events, as in the v3 trace."""

    SUBMIT, QUEUE, ENABLE, SCHEDULE, EVICT, FAIL, FINISH, KILL, LOST, UPDATE_PENDING, UPDATE_RUNNING = range(11)
    ENDS = (EVICT, FAIL, FINISH, KILL, LOST)
    """The codes after which a task no longer runs."""


class MachineEventType:
    """Codes of machine events, as in the v3 trace."""

    ADD, REMOVE, UPDATE = 1, 2, 3


def _field(name: str, type_: pa.DataType, unit: str, meaning: str) -> pa.Field:
    return pa.field(name, type_, metadata={"unit": unit, "meaning": meaning})


_VECTOR = pa.list_(pa.float32())
"""A percentile vector: null, or as long as its levels. Not a fixed-size list: parquet readers fail on null ones."""

_TASK_FIELDS = [
    _field(COLLECTION_ID, pa.int64(), "id", "job or alloc set; an exact 64-bit integer"),
    _field(INSTANCE_INDEX, pa.int64(), "index", "position of the task in its collection"),
]
_POLICY_FIELDS = [
    _field(CPU_LIMIT, pa.float64(), "trace cpu", "CPU limit in force"),
    _field(MEMORY_LIMIT, pa.float64(), "trace memory", "memory limit in force"),
    _field(PRIORITY, pa.int32(), "rank", "higher is more important"),
    _field(TIER, pa.int8(), "position in TIERS", "priority tier"),
    _field(SCHEDULING_CLASS, pa.int8(), "0-3", "3 is the most latency-sensitive"),
]

USAGE: Final = pa.schema(
    [
        *_TASK_FIELDS,
        _field(START_US, pa.int64(), "µs, trace clock", "start of the measurement window"),
        _field(END_US, pa.int64(), "µs, trace clock", "end of the measurement window"),
        _field(MACHINE_ID, pa.int64(), "id", "machine the task ran on"),
        _field(COLLECTION_TYPE, pa.int8(), "0 or 1", "0 a task of a job, 1 an alloc instance"),
        _field(ALLOC_COLLECTION_ID, pa.int64(), "id", "alloc set the task runs in; null at top level"),
        _field(ALLOC_INSTANCE_INDEX, pa.int64(), "index", "alloc instance the task runs in; null at top level"),
        _field(CPU_MEAN, pa.float64(), "trace cpu", "mean CPU usage in the window"),
        _field(CPU_MAX, pa.float64(), "trace cpu", "largest CPU usage of any sample in the window"),
        _field(CPU_SAMPLE, pa.float64(), "trace cpu", "CPU usage of one random sample"),
        _field(CPU_PERCENTILES, _VECTOR, "trace cpu", "percentiles 0, 10 … 100 of CPU usage"),
        _field(CPU_TAIL_PERCENTILES, _VECTOR, "trace cpu", "percentiles 91, 92 … 99 of CPU usage"),
        _field(MEMORY_MEAN, pa.float64(), "trace memory", "mean memory usage in the window"),
        _field(MEMORY_MAX, pa.float64(), "trace memory", "largest memory usage in the window"),
        _field(MEMORY_ASSIGNED, pa.float64(), "trace memory", "memory limit actually imposed"),
        _field(PAGE_CACHE, pa.float64(), "trace memory", "page cache, part of memory usage"),
        _field(CPI, pa.float64(), "cycles", "cycles per instruction"),
        _field(MAI, pa.float64(), "accesses", "memory accesses per instruction"),
        _field(SAMPLE_RATE_HZ, pa.float64(), "1/s", "samples per second behind the window"),
        _field(SCHEDULED_US, pa.int64(), "µs, trace clock", "start of the current run; 0 before the trace"),
        *_POLICY_FIELDS,
    ]
)

EVENTS: Final = pa.schema(
    [
        *_TASK_FIELDS,
        _field(TIME_US, pa.int64(), "µs, trace clock", "when; 0 before the trace, 2^63-1 after it"),
        _field(EVENT_TYPE, pa.int8(), "EventType", "what happened"),
        _field(MISSING_TYPE, pa.int8(), "1-4", "why the record is synthesised or incomplete; null for a real one"),
        _field(MACHINE_ID, pa.int64(), "id", "machine, where one is assigned"),
        _field(COLLECTION_TYPE, pa.int8(), "0 or 1", "0 a task of a job, 1 an alloc instance"),
        _field(ALLOC_COLLECTION_ID, pa.int64(), "id", "alloc set the task runs in; null at top level"),
        _field(ALLOC_INSTANCE_INDEX, pa.int64(), "index", "alloc instance the task runs in; null at top level"),
        *_POLICY_FIELDS,
    ]
)

TASKS: Final = pa.schema(
    [
        *_TASK_FIELDS,
        _field(TIER, pa.int8(), "position in TIERS", "priority tier when last seen"),
        _field(SCHEDULING_CLASS, pa.int8(), "0-3", "scheduling class when last seen"),
        _field(COLLECTION_TYPE, pa.int8(), "0 or 1", "0 a task of a job, 1 an alloc instance"),
        _field(USER_ID, pa.string(), "hash", "who submitted the collection"),
        _field(LOGICAL_NAME_ID, pa.string(), "hash", "normalised name that earlier runs of the program share"),
        _field(FIRST_SEEN_US, pa.int64(), "µs, trace clock", "start of the first window"),
        _field(LAST_SEEN_US, pa.int64(), "µs, trace clock", "end of the last window"),
    ]
)

MACHINES: Final = pa.schema(
    [
        _field(TIME_US, pa.int64(), "µs, trace clock", "when; 0 before the trace"),
        _field(MACHINE_ID, pa.int64(), "id", "machine"),
        _field(EVENT_TYPE, pa.int8(), "MachineEventType", "what happened"),
        _field(CPU_CAPACITY, pa.float64(), "trace cpu", "CPU the machine supplies"),
        _field(MEMORY_CAPACITY, pa.float64(), "trace memory", "memory the machine supplies"),
        _field(PLATFORM, pa.string(), "hash", "microarchitecture and chipset"),
        _field(SWITCH_ID, pa.string(), "hash", "network switch"),
    ]
)

ATTRIBUTES: Final = pa.schema(
    [
        _field(TIME_US, pa.int64(), "µs, trace clock", "when; 0 before the trace"),
        _field(MACHINE_ID, pa.int64(), "id", "machine"),
        _field(ATTRIBUTE_NAME, pa.string(), "hash", "attribute"),
        _field(ATTRIBUTE_VALUE, pa.string(), "hash", "its value"),
        _field(ATTRIBUTE_DELETED, pa.bool_(), "flag", "whether the attribute was removed"),
    ]
)

REJECTS: Final = pa.schema(
    [
        _field(REJECT_FILE, pa.string(), "name", "input file"),
        _field(REJECT_LINE, pa.int64(), "from 1", "line, or row of a parquet file"),
        _field(REJECT_REASON, pa.string(), "text", "why it was not taken"),
    ]
)

TABLES: Final = {
    "usage": USAGE,
    "events": EVENTS,
    "tasks": TASKS,
    "machines": MACHINES,
    "attributes": ATTRIBUTES,
    "rejects": REJECTS,
}
"""Every table of a dataset, by name."""
