"""Defines the columns of a dataset: name, type, unit and meaning of each, stated here alone.

A dataset is a folder (see ``dataset.py``)::

    manifest.json
    usage/bucket=000.parquet …     one row per (task, measurement window), sorted by (task, start)
    events/bucket=000.parquet …    lifecycle and limit changes of each task, same buckets
    constraints/bucket=000.parquet placement constraints of each task, same buckets
    tasks.parquet                  one row per task
    collections.parquet            lifecycle, names and settings of jobs and alloc sets
    machines.parquet               capacity changes;  attributes.parquet  machine attributes
    machine_usage.parquet          usage of whole machines, where a trace has it
    names.parquet                  names of tasks that people gave them, only where a trace has some
    rejects/                       every rejected input line, with file, line number and reason

Anything a trace lacks is null, never zero. Resources keep the trace's unit (normalised compute units and bytes for
Google, MHz and MiB for Bitbrains …): later stages divide by the limit, so only the ratio matters. Columns that only one
trace has come after a table's own (``EXTRAS``), in datasets of that trace alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import pyarrow as pa

RESOURCES: Final = ("cpu", "memory")
"""The resource axis, always the last one, in this order."""
MEMORY_AT: Final = RESOURCES.index("memory")
"""Position of memory among ``RESOURCES``."""

TIERS: Final = ("free", "beb", "mid", "prod", "mon")
"""Priority tiers, lowest first; a tier is stored as its position here. ``beb`` is best-effort batch."""

TIER_FLOORS: Final = (0, 100, 116, 120, 360)
"""Lowest priority of each tier (Google cluster-usage traces v3, section "Priority"). 120-359 is production."""

BEFORE_TRACE_US: Final = 0
"""The time a v3 event carries when it happened before the trace began: a flag, not a time."""
AFTER_TRACE_US: Final = 2**63 - 1
"""The time a v3 event carries when it happened after the trace ended: a flag, not a time."""
LATEST_US: Final = 2**59
"""The largest time that settings and requests take, in µs: 18 thousand years, whose slots of 5 minutes are counted in
32 bits. Nanoseconds since 1970 are beyond it, and so are refused."""
UNKNOWN_ID: Final = -1
"""Means a null id, time, tier or class in numpy arrays, which have no nulls."""

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

# Extra columns of usage and events: what only some trace has.
PAGE_CACHE_UNMAPPED: Final = "page_cache_unmapped"
MEMORY_ASSIGNED_USAGE: Final = "memory_assigned_usage"
DISK_MEAN: Final = "disk_mean"
DISK_IO_MEAN: Final = "disk_io_mean"
DISK_IO_MAX: Final = "disk_io_max"
SAMPLE_PORTION: Final = "sample_portion"
AGGREGATION_TYPE: Final = "aggregation_type"
CPU_SHARE: Final = "cpu_share"
MEMORY_SHARE: Final = "memory_share"
DISK_SHARE: Final = "disk_share"
LOAD_1: Final = "load_1"
LOAD_5: Final = "load_5"
LOAD_15: Final = "load_15"
CPI_MAX: Final = "cpi_max"
MAI_MAX: Final = "mai_max"
DISK_LIMIT: Final = "disk_limit"
DIFFERENT_MACHINES: Final = "different_machines"
CPUSET: Final = "cpuset"
CPU_REQUEST: Final = "cpu_request"
MEMORY_REQUEST: Final = "memory_request"
CPU_ENFORCED: Final = "cpu_enforced"
MEMORY_ENFORCED: Final = "memory_enforced"
OUT_OF_MEMORY: Final = "out_of_memory"

# Columns of collections and constraints.
NAME_ID: Final = "name_id"
PARENT_COLLECTION_ID: Final = "parent_collection_id"
START_AFTER: Final = "start_after"
MAX_PER_MACHINE: Final = "max_per_machine"
MAX_PER_SWITCH: Final = "max_per_switch"
VERTICAL_SCALING: Final = "vertical_scaling"
SCHEDULER: Final = "scheduler"
INSTANCES: Final = "instances"
CONSTRAINTS_LIST: Final = "constraints"
RELATION: Final = "relation"

# Columns of tasks, machines and attributes.
USER_ID: Final = "user_id"
LOGICAL_NAME_ID: Final = "logical_name_id"
FIRST_SEEN_US: Final = "first_seen_us"
LAST_SEEN_US: Final = "last_seen_us"
CPU_CAPACITY: Final = "cpu_capacity"
MEMORY_CAPACITY: Final = "memory_capacity"
PLATFORM: Final = "platform"
SWITCH_ID: Final = "switch_id"
EVENT_DETAIL: Final = "event_detail"
DISK_CAPACITY: Final = "disk_capacity"
ATTRIBUTE_NAME: Final = "name"
ATTRIBUTE_VALUE: Final = "value"
ATTRIBUTE_DELETED: Final = "deleted"

MACHINE_NAME: Final = "machine_name"

# Columns of names.
CLUSTER: Final = "cluster_name"
NAMESPACE: Final = "namespace_name"
WORKLOAD_KIND: Final = "workload_kind"
WORKLOAD: Final = "workload_name"
CONTAINER: Final = "container_name"
POD: Final = "pod_name"
AUTOSCALER: Final = "autoscaler_name"
AUTOSCALED: Final = "autoscaled_resources"
CONTAINER_KIND: Final = "container_kind"
INIT: Final = "init"
"""Kind of a container that runs once, before the others of its pod."""
SIDECAR: Final = "sidecar"
"""Kind of an init container that runs next to the others: its restart policy is ``Always``."""

# Columns of rejects.
REJECT_FILE: Final = "file"
REJECT_LINE: Final = "line"
REJECT_REASON: Final = "reason"

TASK_KEY: Final = (COLLECTION_ID, INSTANCE_INDEX)
"""Columns that identify a task."""


class EventType:
    """Codes of instance events, as in the v3 trace."""

    SUBMIT, QUEUE, ENABLE, SCHEDULE, EVICT, FAIL, FINISH, KILL, LOST, UPDATE_PENDING, UPDATE_RUNNING = range(11)
    ENDS = (EVICT, FAIL, FINISH, KILL, LOST)
    """The codes after which a task no longer runs."""


class MachineEventType:
    """Codes of machine events: the first three as in the v3 trace, the errors as in Alibaba's (no new work there)."""

    ADD, REMOVE, UPDATE, SOFT_ERROR, HARD_ERROR = 1, 2, 3, 4, 5


def codes_of(kind: type[EventType | MachineEventType]) -> dict[str, int]:
    """Return the codes of a kind of events by their names."""
    return {name: code for name, code in vars(kind).items() if name.isupper() and isinstance(code, int)}


RELATIONS: Final = (
    "EQUAL", "NOT_EQUAL", "LESS_THAN", "GREATER_THAN", "LESS_THAN_EQUAL", "GREATER_THAN_EQUAL", "PRESENT",
    "NOT_PRESENT",
)  # fmt: skip
"""Comparison operators of a constraint; stored as the position here, as in the v3 trace."""
VERTICAL_SCALINGS: Final = ("UNKNOWN", "OFF", "CONSTRAINED", "FULLY_AUTOMATED")
"""Settings of vertical scaling; stored as the position here, as in the v3 trace."""
SCHEDULERS: Final = ("DEFAULT", "BATCH")
"""Schedulers of a collection; stored as the position here, as in the v3 trace."""
MISSING_TYPES: Final = (
    "NONE", "SNAPSHOT_BUT_NO_TRANSITION", "NO_SNAPSHOT_OR_TRANSITION", "EXISTS_BUT_NO_CREATION",
    "TRANSITION_MISSING_STEP", "TOO_MANY_EVENTS",
)  # fmt: skip
"""Reasons for which a record is synthesised or incomplete; stored as the position here, null where it is neither, as in
the v3 trace."""


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
        _field(MISSING_TYPE, pa.int8(), "MISSING_TYPES", "why the record is synthesised; null for a real one"),
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
        _field(MISSING_TYPE, pa.int8(), "MISSING_TYPES", "why the record is synthesised; null for a real one"),
    ]
)

MACHINE_USAGE: Final = pa.schema(
    [
        _field(TIME_US, pa.int64(), "µs, trace clock", "when"),
        _field(MACHINE_ID, pa.int64(), "id", "machine"),
        _field(CPU_SHARE, pa.float64(), "share of capacity", "CPU in use, all work and the system's own"),
        _field(MEMORY_SHARE, pa.float64(), "share of capacity", "memory in use"),
        _field(DISK_SHARE, pa.float64(), "share of capacity", "disk space in use"),
        _field(LOAD_1, pa.float64(), "processes", "load average of 1 minute"),
        _field(LOAD_5, pa.float64(), "processes", "load average of 5 minutes"),
        _field(LOAD_15, pa.float64(), "processes", "load average of 15 minutes"),
    ]
)

COLLECTIONS: Final = pa.schema(
    [
        _field(COLLECTION_ID, pa.int64(), "id", "job or alloc set"),
        _field(TIME_US, pa.int64(), "µs, trace clock", "when; 0 before the trace, 2^63-1 after it"),
        _field(EVENT_TYPE, pa.int8(), "EventType", "what happened"),
        _field(MISSING_TYPE, pa.int8(), "MISSING_TYPES", "why the record is synthesised; null for a real one"),
        _field(COLLECTION_TYPE, pa.int8(), "0 or 1", "0 a job, 1 an alloc set"),
        _field(PRIORITY, pa.int32(), "rank", "higher is more important"),
        _field(TIER, pa.int8(), "position in TIERS", "priority tier"),
        _field(SCHEDULING_CLASS, pa.int8(), "0-3", "3 is the most latency-sensitive"),
        _field(ALLOC_COLLECTION_ID, pa.int64(), "id", "alloc set the job runs in; null at top level"),
        _field(USER_ID, pa.string(), "hash", "who submitted the collection"),
        _field(NAME_ID, pa.string(), "hash", "full name"),
        _field(LOGICAL_NAME_ID, pa.string(), "hash", "normalised name that earlier runs of the program share"),
        _field(PARENT_COLLECTION_ID, pa.int64(), "id", "the collection it ends with; null for none"),
        _field(START_AFTER, pa.list_(pa.int64()), "ids", "collections that must finish first"),
        _field(MAX_PER_MACHINE, pa.int32(), "tasks", "most on one machine; null for no bound"),
        _field(MAX_PER_SWITCH, pa.int32(), "tasks", "most on one switch; null for no bound"),
        _field(VERTICAL_SCALING, pa.int8(), "VERTICAL_SCALINGS", "who sets the limits"),
        _field(SCHEDULER, pa.int8(), "SCHEDULERS", "who places it"),
    ]
)

CONSTRAINTS: Final = pa.schema(
    [
        *_TASK_FIELDS,
        _field(TIME_US, pa.int64(), "µs, trace clock", "of the event that carries it"),
        _field(ATTRIBUTE_NAME, pa.string(), "hash", "machine attribute"),
        _field(ATTRIBUTE_VALUE, pa.string(), "hash or integer", "what it is compared with; empty for the empty string"),
        _field(RELATION, pa.int8(), "position in RELATIONS", "the machine's value must be this to the constraint's"),
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

NAMES: Final = pa.schema(
    [
        *_TASK_FIELDS,
        _field(CLUSTER, pa.string(), "text", "cluster; null where the history does not name one"),
        _field(NAMESPACE, pa.string(), "text", "namespace"),
        _field(WORKLOAD_KIND, pa.string(), "text", "kind of the topmost owner: Deployment, CronJob, Pod for none"),
        _field(WORKLOAD, pa.string(), "text", "its name; of a series the collection's, or the task's without one"),
        _field(CONTAINER, pa.string(), "text", "container"),
        _field(POD, pa.string(), "text", "pod; task of a series"),
        _field(MACHINE_NAME, pa.string(), "text", "node, the last one"),
        _field(AUTOSCALER, pa.string(), "text", "horizontal autoscaler that sets its number of pods; null for none"),
        _field(AUTOSCALED, pa.string(), "text", "resources whose share of the request it holds, as `cpu,memory`"),
    ]
)

REJECTS: Final = pa.schema(
    [
        _field(REJECT_FILE, pa.string(), "name", "input file"),
        _field(REJECT_LINE, pa.int64(), "from 1", "line, or row of a parquet file"),
        _field(REJECT_REASON, pa.string(), "text", "why it was not taken"),
    ]
)

EXTRAS: Final[dict[str, pa.Field]] = {
    field.name: field
    for field in (
        _field(PAGE_CACHE_UNMAPPED, pa.float64(), "trace memory", "page cache mapped by no process"),
        _field(MEMORY_ASSIGNED_USAGE, pa.float64(), "trace memory", "usage by the memory assigned to the container"),
        _field(DISK_MEAN, pa.float64(), "trace disk", "mean local disk space used"),
        _field(DISK_IO_MEAN, pa.float64(), "s/s", "mean disk time"),
        _field(DISK_IO_MAX, pa.float64(), "s/s", "largest disk time"),
        _field(SAMPLE_PORTION, pa.float64(), "ratio", "expected to observed samples behind the window"),
        _field(AGGREGATION_TYPE, pa.int8(), "0 or 1", "1: the maxima are sums of sub-containers' maxima"),
        _field(CPU_SHARE, pa.float64(), "share of limit", "CPU usage as the trace gives it"),
        _field(MEMORY_SHARE, pa.float64(), "share of limit", "memory usage as the trace gives it"),
        _field(DISK_SHARE, pa.float64(), "share of limit", "disk usage as the trace gives it"),
        _field(LOAD_1, pa.float64(), "processes", "load average of 1 minute"),
        _field(LOAD_5, pa.float64(), "processes", "load average of 5 minutes"),
        _field(LOAD_15, pa.float64(), "processes", "load average of 15 minutes"),
        _field(CPI_MAX, pa.float64(), "cycles", "largest cycles per instruction"),
        _field(MAI_MAX, pa.float64(), "accesses", "largest memory accesses per instruction"),
        _field(DISK_LIMIT, pa.float64(), "trace disk", "disk space granted"),
        _field(DIFFERENT_MACHINES, pa.bool_(), "flag", "no two tasks of the collection on one machine"),
        _field(USER_ID, pa.string(), "hash", "who submitted the task"),
        _field(CPUSET, pa.string(), "list", "CPUs assigned, separated by |"),
        _field(CPU_LIMIT, pa.float64(), "trace cpu", "CPU limit of each task"),
        _field(MEMORY_LIMIT, pa.float64(), "trace memory", "memory limit of each task"),
        _field(INSTANCES, pa.int64(), "tasks", "number of tasks"),
        _field(DISK_CAPACITY, pa.float64(), "trace disk", "disk space the machine supplies"),
        _field(EVENT_DETAIL, pa.string(), "text", "the trace's own words on the event"),
        _field(CPU_REQUEST, pa.float64(), "trace cpu", "CPU the scheduler sets aside; null for none"),
        _field(MEMORY_REQUEST, pa.float64(), "trace memory", "memory the scheduler sets aside; null for none"),
        _field(CPU_ENFORCED, pa.float64(), "trace cpu", "CPU limit the machine enforces; null for none"),
        _field(MEMORY_ENFORCED, pa.float64(), "trace memory", "memory limit the machine enforces; null for none"),
        _field(OUT_OF_MEMORY, pa.bool_(), "flag", "whether the trace says that the task was out of memory"),
        _field(MACHINE_NAME, pa.string(), "text", "the machine's name"),
        _field(CONTAINER_KIND, pa.string(), "text", "`init`: runs once; `sidecar`: beside others; null for any other"),
    )
}
"""Columns that only some trace has; a source names those of its own, table by table, and they follow the table's."""

TABLES: Final = {
    "usage": USAGE,
    "events": EVENTS,
    "constraints": CONSTRAINTS,
    "tasks": TASKS,
    "collections": COLLECTIONS,
    "machines": MACHINES,
    "attributes": ATTRIBUTES,
    "machine_usage": MACHINE_USAGE,
    "names": NAMES,
    "rejects": REJECTS,
}
"""Every table of a dataset, by name."""

BUCKETED: Final = ("usage", "events", "constraints")
"""Tables that are folders of buckets; every other one is a file."""

OPTIONAL: Final = ("names",)
"""Tables that are in datasets of those traces alone that have them."""


def has_memory(lacks: Collection[str]) -> bool:
    """Return whether a source measures memory at all, by the columns of usage that it lacks."""
    return not {MEMORY_MEAN, MEMORY_MAX} <= set(lacks)


def with_extras(table: str, extras: Sequence[str]) -> pa.Schema:
    """Return a table's schema followed by the named extra columns."""
    return pa.schema([*TABLES[table], *(EXTRAS[name] for name in extras)])


HOUR_US: Final = 3_600_000_000
DAY_US: Final = 86_400_000_000
"""An hour and a day, in microseconds."""

UNREAD: Final[Mapping[str, str]] = {
    CPU_SAMPLE: "one second of a window, of which mean, maximum and percentiles are known",
    MEMORY_ASSIGNED: (
        "the limit that a machine imposed for the moment; a reservation is compared with the limit granted"
    ),
    SAMPLE_RATE_HZ: "windows are weighted by their length, not by their samples",
    ALLOC_INSTANCE_INDEX: (
        "a task inside an alloc instance is known as such by `alloc_collection_id`; the instance itself is "
        "not modelled, and the closed loop leaves such tasks out"
    ),
    PARENT_COLLECTION_ID: (
        "a collection that its parent ended has that end in its record; in the closed loop, one that runs "
        "late is not ended by its parent"
    ),
    MAX_PER_SWITCH: "the closed loop has no switches",
    VERTICAL_SCALING: (
        "limits that the system scales are followed as any that change; a feature of it has not been tried"
    ),
    SCHEDULER: "the closed loop places all work by one policy",
    NAME_ID: "runs of one program share the logical name",
    PLATFORM: "usage is in normalised units; constraints compare the attributes of machines",
    SWITCH_ID: "the closed loop has no switches",
    PAGE_CACHE_UNMAPPED: "`page_cache` includes it",
    MEMORY_ASSIGNED_USAGE: "memory that was assigned, not necessarily used",
    DISK_MEAN: "resources are CPU and memory",
    DISK_IO_MEAN: "resources are CPU and memory",
    DISK_IO_MAX: "resources are CPU and memory",
    DISK_LIMIT: "resources are CPU and memory",
    DISK_CAPACITY: "resources are CPU and memory",
    SAMPLE_PORTION: "windows are weighted by their length, not by their samples",
    AGGREGATION_TYPE: (
        "where it is 1, the maxima are sums of the maxima of sub-containers, which need not fall together; "
        "they are taken as maxima, so that peaks are overstated"
    ),
    LOAD_1: "a number of processes; CPU usage is known",
    LOAD_5: "a number of processes; CPU usage is known",
    LOAD_15: "a number of processes; CPU usage is known",
    CPI_MAX: "features have the mean",
    MAI_MAX: "features have the mean",
    CPUSET: "CPU is taken as divisible",
    INSTANCES: "tasks are counted as they come",
    EVENT_DETAIL: "the trace's own words",
    MACHINE_NAME: "names are for people",
}
"""Columns that no feature, estimator, replay or service reads, and the reason."""
