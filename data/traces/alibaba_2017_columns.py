"""Columns, ids and times that the tables of the Alibaba 2017 trace share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from reclaim.data import schema as s

IDS: Final = 2**32
"""Container and task ids are below this, and job ids below a quarter of it: so the ids made of them are reversible.
Machine ids of containers are held to it, too."""
_AFTER_S: Final = s.AFTER_TRACE_US // 1_000_000
LAST_S: Final = s.LATEST_US // 1_000_000 - 300
"""The last second there can be: a window of 300 s from there on still ends by ``schema.LATEST_US``."""

COLUMNS: Final = {
    "server_event": {
        "timestamp": "ts BIGINT", "machine id": "machine_id BIGINT", "event type": "event VARCHAR",
        "event detail": "event_detail VARCHAR", "number of cpus": "cpus DOUBLE", "normalized memory": "memory DOUBLE",
        "normalized disk space": "disk DOUBLE",
    },
    "server_usage": {
        "timestamp": "ts BIGINT", "machine id": "machine_id BIGINT", "used percent of cpus(%)": "cpu_util DOUBLE",
        "used percent of memory(%)": "mem_util DOUBLE", "used percent of disk space(%)": "disk_util DOUBLE",
        "linux cpu load average of 1 minute": "load1 DOUBLE", "linux cpu load average of 5 minute": "load5 DOUBLE",
        "linux cpu load average of 15 minute": "load15 DOUBLE",
    },
    "batch_task": {
        "task create time": "create_timestamp BIGINT", "task end time": "modify_timestamp BIGINT",
        "job id": "job_id BIGINT", "task id": "task_id BIGINT", "number of instances": "instance_num BIGINT",
        "status": "status VARCHAR", "number of cpus requested per instance in the task": "plan_cpu DOUBLE",
        "normalized memory requested per instance in the task": "plan_mem DOUBLE",
    },
    "batch_instance": {  # measurements as text: the written text identifies a record
        "start_timestamp": "start_timestamp BIGINT", "end_timestamp": "end_timestamp BIGINT",
        "job id": "job_id BIGINT", "task id": "task_id BIGINT", "machine id": "machine_id BIGINT",
        "status": "status VARCHAR", "sequence number": "seq_no BIGINT", "total sequence number": "total_seq_no BIGINT",
        "maximum real cpu number": "real_cpu_max VARCHAR", "average real cpu number": "real_cpu_avg VARCHAR",
        "maximum normalized memory usage": "real_mem_max VARCHAR",
        "average normalized memory usage": "real_mem_avg VARCHAR",
    },
    "container_event": {
        "timestamp": "ts BIGINT", "event type": "event VARCHAR", "instance id": "instance_id BIGINT",
        "machine id": "machine_id BIGINT", "number of cpu requested": "plan_cpu DOUBLE",
        "normalized memory requested": "plan_mem DOUBLE", "normalized disk space requested": "plan_disk DOUBLE",
        "cpu id of allocated cpus": "cpuset VARCHAR",
    },
    "container_usage": {
        "start time of measurement interval": "ts BIGINT", "online instance id": "instance_id BIGINT",
        "used percent of requested cpus(%)": "cpu_util DOUBLE",
        "used percent of requested memory(%)": "mem_util DOUBLE",
        "used percent of requested disk space(%)": "disk_util DOUBLE",
        "linux cpu load average of 1 minute": "load1 DOUBLE", "linux cpu load average of 5 minute": "load5 DOUBLE",
        "linux cpu load average of 15 minute": "load15 DOUBLE", "averaged cycles per instruction": "avg_cpi DOUBLE",
        "average last-level cache misses per 1000 instructions": "avg_mpki DOUBLE",
        "maximum cycles per instruction": "max_cpi DOUBLE",
        "maximum last-level cache misses per 1000 instructions": "max_mpki DOUBLE",
    },
}  # fmt: skip
"""Table → content of a field, as schema.csv has it → the document's name of the column, and its type."""


def columns(raw: str) -> dict[str, str]:
    """Return a table's columns, by the document's names, and their types."""
    return dict(declared.split() for declared in COLUMNS[raw].values())


def files(raw: str) -> tuple[str, ...]:
    """Return the patterns of a table's files: one, or several where a large one was split."""
    return (f"{raw}.csv", f"{raw}.csv.gz", f"{raw}-*.csv", f"{raw}-*.csv.gz")


def seconds(column: str) -> str:
    """Return SQL for a time in µs; 0 if it is before the trace or missing."""
    return f"CAST(CASE WHEN coalesce({column}, 0) <= {_AFTER_S} THEN greatest({column}, 0) * 1000000 END AS BIGINT)"


def possible(*names: str) -> dict[str, str]:
    """Return the checks that times are not past the last possible one."""
    return {f"{name} is past the last time there can be": f"{name} <= {LAST_S}" for name in names}


def ids(column: str, end: int) -> dict[str, str]:
    """Return the check that an id fits into the ids made of it."""
    return {f"{column} is negative or not below {end}": f"{column} >= 0 AND {column} < {end}"}


def codes(column: str, codes: Mapping[str, int]) -> str:
    """Return SQL that turns the trace's words into canonical codes; any other word is null."""
    cases = " ".join(f"WHEN '{word}' THEN {code}" for word, code in codes.items())
    return f"CAST(CASE {column} {cases} END AS TINYINT)"


def nothing(*names: str) -> str:
    """Return SQL, null, for measurements that this table lacks and another one has: both must have the columns."""
    return ", ".join(f"CAST(NULL AS DOUBLE) AS {name}" for name in names)
