"""Describes the six tables of the Alibaba cluster trace 2017, as CSV with the columns of its schema.csv.

Online services run in containers, each with an id of its own; batch work comes as jobs of tasks of instances. A
container becomes a task, a batch task a collection, each run of a batch instance a task of it.

Quirks: files come without a header line, or with one; ``schema.csv`` alone says the order of the columns; times are
seconds, and 0 or less means before the trace; utilisation is in percent of the request; ids are missing here and there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from reclaim.data import schema as s
from reclaim.data.traces.alibaba_2017_batch import BATCH_TABLES, CPU_PER_CORE, UNKNOWN_COLLECTION
from reclaim.data.traces.alibaba_2017_columns import (
    COLUMNS,
    IDS,
    LAST_S,
    codes,
    columns,
    files,
    ids,
    nothing,
    possible,
    seconds,
)
from reclaim.data.traces.schema_csv import read_schema_csv
from reclaim.data.traces.source import RawTable, Source, find_files, good, measured, present

WINDOW_S: Final = 300
"""Length of a container's window: a start and an average over 300 s, says the document."""
_PROD: Final = s.TIERS.index("prod")

_SHARES: Final = {"cpu_util": s.CPU_SHARE, "mem_util": s.MEMORY_SHARE, "disk_util": s.DISK_SHARE}
_LOADS: Final = {"load1": s.LOAD_1, "load5": s.LOAD_5, "load15": s.LOAD_15}
_RATES: Final = {"avg_cpi": s.CPI, "max_cpi": s.CPI_MAX}
_MISSES: Final = {"avg_mpki": s.MAI, "max_mpki": s.MAI_MAX}


def _plausible(columns: Mapping[str, str], unit: str = "") -> str:
    """Return SQL of secondary measurements: an impossible load or rate becomes null, and its row stays."""
    return ", ".join(f"CASE WHEN {good(raw)} THEN {raw}{unit} END AS {name}" for raw, name in columns.items())


def _utilisation(raw: str, *others: str) -> dict[str, str]:
    """Return the defects of a table of utilisations; ``others`` are its further measurements."""
    return {
        f"{raw}: negative time, taken as before the trace": "ts < 0",
        f"{raw}: utilisation above 100 %, kept": " OR ".join(f"{name} > 100" for name in _SHARES),
        f"{raw}: cpu_util or mem_util is missing": "cpu_util IS NULL OR mem_util IS NULL",
        f"{raw}: a load, CPI or MPKI that cannot be, made null": " OR ".join(f"NOT ({good(c)})" for c in others),
    }


_SHARED: Final = f"""{", ".join(f"{raw} / 100 AS {name}" for raw, name in _SHARES.items())}, {_plausible(_LOADS)}"""
_MACHINE_EVENTS: Final = codes("event", {
    "add": s.MachineEventType.ADD, "softerror": s.MachineEventType.SOFT_ERROR,
    "harderror": s.MachineEventType.HARD_ERROR,
})  # fmt: skip

SERVER_EVENT: Final = RawTable(
    name="machines",
    raw="server_event",
    patterns=files("server_event"),
    columns=columns("server_event"),
    select=f"""
        {seconds("ts")} AS {s.TIME_US}, machine_id AS {s.MACHINE_ID}, {_MACHINE_EVENTS} AS {s.EVENT_TYPE},
        cpus AS {s.CPU_CAPACITY}, memory AS {s.MEMORY_CAPACITY}, disk AS {s.DISK_CAPACITY},
        event_detail AS {s.EVENT_DETAIL}
    """,
    checks={
        **present("ts", "machine_id"), **possible("ts"),
        "event is not add, softerror or harderror": f"{_MACHINE_EVENTS} IS NOT NULL",
        **measured("cpus", "memory", "disk"),
    },
    defects={"server_event: negative time, taken as before the trace": "ts < 0"},
)  # fmt: skip

SERVER_USAGE: Final = RawTable(
    name="machine_usage",
    raw="server_usage",
    patterns=files("server_usage"),
    columns=columns("server_usage"),
    select=f"{seconds('ts')} AS {s.TIME_US}, machine_id AS {s.MACHINE_ID}, {_SHARED}",
    checks={**present("ts", "machine_id"), **possible("ts"), **measured(*_SHARES)},
    defects=_utilisation("server_usage", *_LOADS),
)

# A service runs until it is removed: it is killed, it does not finish.
_CONTAINER_EVENTS: Final = codes("event", {"Create": s.EventType.SCHEDULE, "Remove": s.EventType.KILL})
_CONTAINER: Final = f"""
    instance_id AS {s.COLLECTION_ID}, CAST(0 AS BIGINT) AS {s.INSTANCE_INDEX}, CAST(0 AS TINYINT) AS {s.COLLECTION_TYPE}
"""

CONTAINER_EVENT: Final = RawTable(
    name="events",
    raw="container_event",
    patterns=files("container_event"),
    columns=columns("container_event"),
    select=f"""
        {_CONTAINER}, {seconds("ts")} AS {s.TIME_US}, {_CONTAINER_EVENTS} AS {s.EVENT_TYPE},
        machine_id AS {s.MACHINE_ID}, plan_cpu AS {s.CPU_LIMIT}, plan_mem AS {s.MEMORY_LIMIT},
        CAST({_PROD} AS TINYINT) AS {s.TIER}, plan_disk AS {s.DISK_LIMIT}, cpuset AS {s.CPUSET}
    """,
    checks={
        **present("ts", "instance_id"), **possible("ts"), **ids("instance_id", IDS), **ids("machine_id", IDS),
        "event is not Create or Remove": f"{_CONTAINER_EVENTS} IS NOT NULL",
        **measured("plan_cpu", "plan_mem", "plan_disk"),
    },
    defects={"container_event: negative time, taken as before the trace": "ts < 0"},
)  # fmt: skip

CONTAINER_USAGE: Final = RawTable(
    name="usage",
    raw="container_usage",
    patterns=files("container_usage"),
    columns=columns("container_usage"),
    select=f"""
        {_CONTAINER}, {seconds("ts")} AS {s.START_US},
        {seconds(f"(least(ts, {LAST_S}) + {WINDOW_S})")} AS {s.END_US}, {_SHARED},
        {_plausible(_RATES)}, {_plausible(_MISSES, " / 1000")}, {nothing(s.CPU_MEAN, s.MEMORY_MEAN)}
    """,
    checks={
        **present("ts", "instance_id"), **possible("ts"), **ids("instance_id", IDS),
        "the window ended before the trace": f"ts > -{WINDOW_S}",
        **measured(*_SHARES),
    },
    defects=_utilisation("container_usage", *_LOADS, *_RATES, *_MISSES),
)  # fmt: skip

_PLACED: Final = {"machine_of_a_container": "that of its events"}
"""Option that tells datasets apart from those of before, whose containers are on no machine."""

TABLES: Final = (SERVER_EVENT, SERVER_USAGE, CONTAINER_EVENT, CONTAINER_USAGE, *BATCH_TABLES)

NOTES: Final = (
    "A container is a task of a collection of its own, at index 0; its windows are averages over 300 s that start at "
    "the time given.",
    "Usage of a container was published in percent of its request: the shares are kept, and usage is share × limit in "
    "force; it is null, as the limit is, where no container event tells the request.",
    "Containers have usage for 12 of the trace's 24 hours, and are on the machine of their last creation.",
    "A container's removal is a KILL: a service runs until somebody removes it.",
    f"A batch task is the collection (job_id + 1) × 2^32 + task_id; instances whose job or task is not told are in "
    f"collection {UNKNOWN_COLLECTION}.",
    "A record of a batch instance, one per run, is a task with one window from the run's start to its end, with means "
    "and maxima of the whole run; its index is a hash of the record, for instances have no id.",
    "Retries of a batch instance cannot be linked, and its sequence numbers serve in the hash alone; records that "
    "agree in every column are one.",
    f"Limits of a batch instance are those of its collection; the request is taken as 1/{CPU_PER_CORE} of a core.",
    "A batch task has two events: its creation, and the state it was left in, at the time it was last modified.",
    "A run whose end is not told, and an instance still waiting, has no window; the state it was left in is an event "
    "with a missing type, at the start's time.",
)


def alibaba_2017(folder: Path) -> Source:
    """Return the source of the trace in ``folder``, its columns in the order of the ``schema.csv`` there.

    Raises
    ------
    SchemaError
        ``schema.csv`` is missing, or has tables or columns that the trace does not, or lacks some; names them all.
    """
    present = {table.raw.split()[0] for table in TABLES if find_files(folder, table)}
    text, contents = read_schema_csv(folder, "file name", COLUMNS, COLUMNS, present)
    orders = {raw: tuple(COLUMNS[raw][content].split()[0] for content in found) for raw, found in contents.items()}
    tables = [(table, table.raw.split()[0]) for table in TABLES]
    return Source(
        trace="alibaba-2017",
        tables=tuple(replace(table, order=orders[raw]) for table, raw in tables if raw in orders),
        lacks=(
            s.ALLOC_COLLECTION_ID, s.ALLOC_INSTANCE_INDEX, s.CPU_SAMPLE, s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES,
            s.MEMORY_ASSIGNED, s.PAGE_CACHE, s.SAMPLE_RATE_HZ, s.PRIORITY, s.SCHEDULING_CLASS,
        ),
        options={"schema": text, **_PLACED},
        extras={
            "usage": (*_SHARES.values(), *_LOADS.values(), s.CPI_MAX, s.MAI_MAX),
            "events": (s.DISK_LIMIT, s.CPUSET),
            "collections": (s.CPU_LIMIT, s.MEMORY_LIMIT, s.INSTANCES),
            "machines": (s.DISK_CAPACITY, s.EVENT_DETAIL),
        },
        derived={
            s.CPU_MEAN: f"coalesce({s.CPU_MEAN}, {s.CPU_SHARE} * {s.CPU_LIMIT})",
            s.MEMORY_MEAN: f"coalesce({s.MEMORY_MEAN}, {s.MEMORY_SHARE} * {s.MEMORY_LIMIT})",
            # a container without an event has no tier from a join
            s.TIER: f"CAST(coalesce({s.TIER}, CASE WHEN {s.COLLECTION_ID} < {IDS} THEN {_PROD} END) AS TINYINT)",
        },
        collection_limits=True,
        machines_of_events=True,
        notes=NOTES,
    )  # fmt: skip
