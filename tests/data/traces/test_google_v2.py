"""The v2.1 reader: golden rows of all six tables, codes, columns by schema.csv, rejects, and the real folder."""

from __future__ import annotations

import csv
import gzip
import io
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, SchemaError, TraceError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.traces import google_v2 as v2
from reclaim.data.traces.schema_csv import SCHEMA_FILE

COLUMNS = {
    "job_events": ["time", "missing info", "job ID", "event type", "user", "scheduling class", "job name",
                   "logical job name"],
    "task_events": ["time", "missing info", "job ID", "task index", "machine ID", "event type", "user",
                    "scheduling class", "priority", "CPU request", "memory request", "disk space request",
                    "different machines restriction"],
    "machine_events": ["time", "machine ID", "event type", "platform ID", "CPUs", "Memory"],
    "machine_attributes": ["time", "machine ID", "attribute name", "attribute value", "attribute deleted"],
    "task_constraints": ["time", "job ID", "task index", "comparison operator", "attribute name", "attribute value"],
    "task_usage": ["start time", "end time", "job ID", "task index", "machine ID", "CPU rate",
                   "canonical memory usage", "assigned memory usage", "unmapped page cache", "total page cache",
                   "maximum memory usage", "disk I/O time", "local disk space usage", "maximum CPU rate",
                   "maximum disk IO time", "cycles per instruction", "memory accesses per instruction",
                   "sample portion", "aggregation type", "sampled CPU usage"],
}  # fmt: skip
"""The columns of each raw table in the published order."""
JOB, MACHINE = 9007199254740993, 2**62 + 1
"""An id of a job and one of a machine that no double holds."""
END_OF_TIME = 2**63 - 1
USAGE_ROW = (f"900000000,1200000000,{JOB},3,{MACHINE},0.03125,0.06787,0.07778,0.0007629,0.001602,0.06909,0.0001822,"
             "1.907e-06,0.1094,0.008301,2.911,0.004559,0.98,1,0.02856")  # fmt: skip
TASK_ROW = f"600000000,,{JOB},3,{MACHINE},1,dXNlcg==,2,9,0.125,0.07446,0.0004244,1"
ROWS = {
    "job_events": f"600000000,2,{JOB},0,dXNlcg==,3,am9i,bG9naWNhbA==",
    "task_events": TASK_ROW,
    "machine_events": f"0,{MACHINE},0,cGxhdGZvcm0=,0.5,0.2493",
    "machine_attributes": f"700,{MACHINE},bmFtZQ==,42,0",
    "task_constraints": f"600000000,{JOB},3,2,bmFtZQ==,17",
    "task_usage": USAGE_ROW,
}
"""A good row of each raw table."""


def schema_csv(columns: dict[str, list[str]] = COLUMNS) -> str:
    lines = ["file pattern,field number,content,format,mandatory"]
    for table, names in columns.items():
        number = "00000-of-00001" if table.startswith("machine") else "?????-of-?????"
        lines += [f"{table}/part-{number}.csv.gz,{k},{name},ANY,NO" for k, name in enumerate(names, 1)]
    return "\n".join(lines) + "\n"


def write_table(cell: Path, table: str, rows: Sequence[str], part: int = 0) -> Path:
    path = cell / table / f"part-{part:05}-of-00003.csv.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(row + "\n" for row in rows).encode(), mtime=0))
    return path


def write_cell(cell: Path, tables: Mapping[str, Sequence[str]], schema: str | None = None) -> Path:
    cell.mkdir(parents=True, exist_ok=True)
    (cell / SCHEMA_FILE).write_text(schema_csv() if schema is None else schema)
    for table, rows in tables.items():
        write_table(cell, table, rows)
    return cell


def read(cell: Path, out: Path, buckets: int = 1, max_reject_share: float = 1) -> Dataset:
    config = IngestConfig(trace="google-v2.1", buckets=buckets, max_reject_share=max_reject_share)
    return ingest(cell, out, config).dataset


def table_of(dataset: Dataset, table: str) -> pa.Table:
    where = dataset.path / (table if table in (*s.BUCKETED, "rejects") else f"{table}.parquet")
    return pq.read_table(where, partitioning=None)


def rows_of(dataset: Dataset, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table_of(dataset, table).to_pylist()
    return rows


def one_row(dataset: Dataset, table: str) -> dict[str, Any]:
    (row,) = rows_of(dataset, table)
    return row


def with_field(table: str, column: str, value: object) -> str:
    """Return the good row of a table with one field changed."""
    fields = ROWS[table].split(",")
    fields[COLUMNS[table].index(column)] = str(value)
    return ",".join(fields)


def same_tables(one: Dataset, other: Dataset) -> bool:
    return all(rows_of(one, table) == rows_of(other, table) for table in s.TABLES if table not in s.OPTIONAL)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Return a dataset of one good row of each table."""
    folder = tmp_path_factory.mktemp("golden")
    return read(write_cell(folder / "cell", {table: [row] for table, row in ROWS.items()}), folder / "out")


def test_every_field_of_task_usage_arrives_with_the_request_in_force(golden: Dataset) -> None:
    assert one_row(golden, "usage") == {
        s.COLLECTION_ID: JOB, s.INSTANCE_INDEX: 3, s.START_US: 900_000_000, s.END_US: 1_200_000_000,
        s.MACHINE_ID: MACHINE, s.COLLECTION_TYPE: 0, s.ALLOC_COLLECTION_ID: None, s.ALLOC_INSTANCE_INDEX: None,
        s.CPU_MEAN: 0.03125, s.CPU_MAX: 0.1094, s.CPU_SAMPLE: 0.02856, s.CPU_PERCENTILES: None,
        s.CPU_TAIL_PERCENTILES: None, s.MEMORY_MEAN: 0.06787, s.MEMORY_MAX: 0.06909, s.MEMORY_ASSIGNED: None,
        s.PAGE_CACHE: 0.001602, s.CPI: 2.911, s.MAI: 0.004559, s.SAMPLE_RATE_HZ: None,
        s.SCHEDULED_US: 600_000_000, s.CPU_LIMIT: 0.125, s.MEMORY_LIMIT: 0.07446, s.PRIORITY: 9,
        s.TIER: s.TIERS.index("prod"), s.SCHEDULING_CLASS: 2,
        s.PAGE_CACHE_UNMAPPED: 0.0007629, s.MEMORY_ASSIGNED_USAGE: 0.07778, s.DISK_MEAN: 1.907e-06,
        s.DISK_IO_MEAN: 0.0001822, s.DISK_IO_MAX: 0.008301, s.SAMPLE_PORTION: 0.98, s.AGGREGATION_TYPE: 1,
    }  # fmt: skip


def test_every_field_of_task_events_arrives(golden: Dataset) -> None:
    assert one_row(golden, "events") == {
        s.COLLECTION_ID: JOB, s.INSTANCE_INDEX: 3, s.TIME_US: 600_000_000, s.EVENT_TYPE: s.EventType.SCHEDULE,
        s.MISSING_TYPE: None, s.MACHINE_ID: MACHINE, s.COLLECTION_TYPE: 0, s.ALLOC_COLLECTION_ID: None,
        s.ALLOC_INSTANCE_INDEX: None, s.CPU_LIMIT: 0.125, s.MEMORY_LIMIT: 0.07446, s.PRIORITY: 9,
        s.TIER: s.TIERS.index("prod"), s.SCHEDULING_CLASS: 2, s.USER_ID: "dXNlcg==", s.DISK_LIMIT: 0.0004244,
        s.DIFFERENT_MACHINES: True,
    }  # fmt: skip


def test_every_field_of_job_events_arrives_and_names_the_task(golden: Dataset) -> None:
    expected = dict.fromkeys(s.COLLECTIONS.names) | {
        s.COLLECTION_ID: JOB, s.TIME_US: 600_000_000, s.EVENT_TYPE: s.EventType.SUBMIT,
        s.MISSING_TYPE: s.MISSING_TYPES.index("EXISTS_BUT_NO_CREATION"), s.COLLECTION_TYPE: 0,
        s.SCHEDULING_CLASS: 3, s.USER_ID: "dXNlcg==", s.NAME_ID: "am9i", s.LOGICAL_NAME_ID: "bG9naWNhbA==",
    }  # fmt: skip
    assert one_row(golden, "collections") == expected
    assert one_row(golden, "tasks") == {
        s.COLLECTION_ID: JOB, s.INSTANCE_INDEX: 3, s.TIER: s.TIERS.index("prod"), s.SCHEDULING_CLASS: 2,
        s.COLLECTION_TYPE: 0, s.USER_ID: "dXNlcg==", s.LOGICAL_NAME_ID: "bG9naWNhbA==",
        s.FIRST_SEEN_US: 900_000_000, s.LAST_SEEN_US: 1_200_000_000,
    }  # fmt: skip


def test_every_field_of_constraints_machines_and_attributes_arrives(golden: Dataset) -> None:
    assert one_row(golden, "constraints") == {
        s.COLLECTION_ID: JOB, s.INSTANCE_INDEX: 3, s.TIME_US: 600_000_000, s.ATTRIBUTE_NAME: "bmFtZQ==",
        s.ATTRIBUTE_VALUE: "17", s.RELATION: s.RELATIONS.index("LESS_THAN"),
    }  # fmt: skip
    assert one_row(golden, "machines") == {
        s.TIME_US: 0, s.MACHINE_ID: MACHINE, s.EVENT_TYPE: s.MachineEventType.ADD, s.CPU_CAPACITY: 0.5,
        s.MEMORY_CAPACITY: 0.2493, s.PLATFORM: "cGxhdGZvcm0=", s.SWITCH_ID: None, s.MISSING_TYPE: None,
    }  # fmt: skip
    assert one_row(golden, "attributes") == {
        s.TIME_US: 700, s.MACHINE_ID: MACHINE, s.ATTRIBUTE_NAME: "bmFtZQ==", s.ATTRIBUTE_VALUE: "42",
        s.ATTRIBUTE_DELETED: False,
    }  # fmt: skip


def test_the_manifest_says_what_the_trace_lacks_and_nothing_was_lost(golden: Dataset) -> None:
    assert golden.manifest["rejects"] == {}
    assert golden.manifest["defects"] == {}
    usage = one_row(golden, "usage")
    assert set(golden.manifest["lacks"]) == {name for name in s.USAGE.names if usage[name] is None}
    assert golden.manifest["options"][SCHEMA_FILE] == schema_csv()
    assert golden.manifest["notes"]


def test_an_empty_field_is_a_null_and_never_a_zero(tmp_path: Path) -> None:
    cell = write_cell(
        tmp_path / "cell",
        {
            "task_usage": [f"900000000,1200000000,{JOB},3,{MACHINE},0,0,,,,,,,,,,,,,"],
            "task_events": [f"0,2,{JOB},3,,0,,,0,,,,"],
            "job_events": [f"0,,{JOB},0,,,,"],
            "machine_events": [f"5,{MACHINE},0,cGxhdGZvcm0=,,"],
            "machine_attributes": [f"0,{MACHINE},bmFtZQ==,,1"],
            "task_constraints": [f"0,{JOB},3,0,bmFtZQ==,"],
        },
    )
    dataset = read(cell, tmp_path / "out")
    usage, event, job = (one_row(dataset, table) for table in ("usage", "events", "collections"))
    given = {s.COLLECTION_ID, s.INSTANCE_INDEX, s.START_US, s.END_US, s.MACHINE_ID, s.CPU_MEAN, s.MEMORY_MEAN,
             s.COLLECTION_TYPE, s.PRIORITY, s.TIER}  # fmt: skip
    assert {name for name, value in usage.items() if value is not None} == given
    assert (usage[s.CPU_MEAN], usage[s.MEMORY_MEAN]) == (0.0, 0.0)
    given = {s.COLLECTION_ID, s.INSTANCE_INDEX, s.TIME_US, s.EVENT_TYPE, s.MISSING_TYPE, s.COLLECTION_TYPE, s.PRIORITY,
             s.TIER}  # fmt: skip
    assert {name for name, value in event.items() if value is not None} == given
    assert (job[s.SCHEDULING_CLASS], job[s.MISSING_TYPE]) == (None, None)
    machine = one_row(dataset, "machines")
    assert (machine[s.CPU_CAPACITY], machine[s.MEMORY_CAPACITY]) == (None, None)
    attribute = one_row(dataset, "attributes")
    assert (attribute[s.ATTRIBUTE_VALUE], attribute[s.ATTRIBUTE_DELETED]) == (None, True)
    assert one_row(dataset, "constraints")[s.ATTRIBUTE_VALUE] == ""  # here it is the empty string: no such attribute
    assert dataset.manifest["defects"] == {"machine event has no capacity": 1, "task event has no resource request": 1}


def test_event_codes_become_those_of_v3(tmp_path: Path) -> None:
    names = ["SUBMIT", "SCHEDULE", "EVICT", "FAIL", "FINISH", "KILL", "LOST", "UPDATE_PENDING", "UPDATE_RUNNING"]
    cell = write_cell(
        tmp_path / "cell",
        {t: [with_field(t, "event type", k).replace("600000000", str(k), 1) for k in range(len(names))]
         for t in ("task_events", "job_events")},
    )  # fmt: skip
    dataset = read(cell, tmp_path / "out")
    expected = [getattr(s.EventType, name) for name in names]
    for table in ("events", "collections"):
        rows = sorted(rows_of(dataset, table), key=lambda row: row[s.TIME_US])
        assert [row[s.EVENT_TYPE] for row in rows] == expected


def test_at_one_time_a_task_ends_before_it_starts_again_and_a_machine_goes_before_it_comes_back(tmp_path: Path) -> None:
    submit, schedule, fail, update_running = 0, 1, 3, 8
    task_events = [
        (600, schedule, 0.25), (900, schedule, 0.5), (900, submit, 0.5), (900, fail, 0.25), (900, update_running, 1.0),
    ]  # fmt: skip
    cell = write_cell(
        tmp_path / "cell",
        {
            "machine_events": [f"0,{MACHINE},0,,0.5,0.25", f"5,{MACHINE},0,,1.0,0.5", f"5,{MACHINE},1,,,"],
            "task_events": [f"{at}000000,,{JOB},3,,{kind},,,9,{limit},,," for at, kind, limit in task_events],
            "task_usage": [f"{at}000000,{at + 300}000000,{JOB},3,{MACHINE},0.1" + 14 * "," for at in (600, 900)],
        },
    )
    dataset, event, on_machine = read(cell, tmp_path / "out"), s.EventType, s.MachineEventType
    assert [row[s.EVENT_TYPE] for row in rows_of(dataset, "events")] == [
        event.SCHEDULE, event.FAIL, event.SUBMIT, event.SCHEDULE, event.UPDATE_RUNNING,
    ]  # fmt: skip
    assert [row[s.CPU_LIMIT] for row in rows_of(dataset, "usage")] == [0.25, 1.0]
    assert [row[s.EVENT_TYPE] for row in rows_of(dataset, "machines")] == [
        on_machine.ADD, on_machine.REMOVE, on_machine.ADD,
    ]  # fmt: skip


def test_machine_event_codes_operators_and_missing_info_become_those_of_v3(tmp_path: Path) -> None:
    cell = write_cell(
        tmp_path / "cell",
        {
            "machine_events": [f"{k},{MACHINE},{k},,," for k in range(3)],
            "task_constraints": [f"{k},{JOB},3,{k},bmFtZQ==,1" for k in range(4)],
            "task_events": [f"{k},{'' if k == 3 else k},{JOB},3,,0,,,0,,,," for k in range(4)],
        },
    )
    dataset = read(cell, tmp_path / "out")
    assert [row[s.EVENT_TYPE] for row in rows_of(dataset, "machines")] == [
        s.MachineEventType.ADD, s.MachineEventType.REMOVE, s.MachineEventType.UPDATE,
    ]  # fmt: skip
    relations = [s.RELATIONS[row[s.RELATION]] for row in rows_of(dataset, "constraints")]
    assert relations == ["EQUAL", "NOT_EQUAL", "LESS_THAN", "GREATER_THAN"]
    assert [row[s.MISSING_TYPE] for row in rows_of(dataset, "events")] == [1, 2, 3, None]


def test_priorities_are_kept_and_set_in_the_tiers_of_v3(tmp_path: Path) -> None:
    cell = write_cell(tmp_path / "cell", {"task_events": [with_field("task_events", "priority", p) for p in range(12)]})
    rows = sorted(rows_of(read(cell, tmp_path / "out"), "events"), key=lambda row: row[s.PRIORITY])
    tiers = ["free"] * 2 + ["beb"] * 7 + ["prod"] * 2 + ["mon"]
    assert [(row[s.PRIORITY], s.TIERS[row[s.TIER]]) for row in rows] == list(enumerate(tiers))


def test_the_request_in_force_at_a_windows_start_comes_with_the_window(tmp_path: Path) -> None:
    starts = [900, 1200, 1500, 2400]
    usage = [f"{t}000000,{t + 300}000000,{JOB},3,5,0.1,0.1,,,,,,,,,,,,," for t in starts]
    events = [
        f"0,,{JOB},3,,0,u,1,2,0.75,0.25,0,0",  # submitted before the trace with another request: the schedule's holds
        f"0,,{JOB},3,5,1,u,1,2,0.25,0.5,0,0",
        f"1400000000,,{JOB},3,5,8,u,1,2,0.375,0.75,0,0",  # raised in the second window: in force from the third
        f"1900000000,,{JOB},3,5,2,u,1,2,0.375,0.75,0,0",
        f"1900000000,,{JOB},3,,0,u,1,2,0.375,0.75,0,0",
        f"2410000000,,{JOB},3,6,1,u,3,11,0,0.125,0,0",  # restarted in the last window, and with no CPU granted
        f"{END_OF_TIME},1,{JOB},3,6,5,u,0,0,1,1,0,0",
    ]
    rows = rows_of(
        read(write_cell(tmp_path / "cell", {"task_usage": usage, "task_events": events}), tmp_path / "out"), "usage"
    )
    assert [row[s.CPU_LIMIT] for row in rows] == [0.25, 0.25, 0.375, None]
    assert [row[s.MEMORY_LIMIT] for row in rows] == [0.5, 0.5, 0.75, 0.125]
    assert [row[s.PRIORITY] for row in rows] == [2, 2, 2, 11]
    assert [row[s.TIER] for row in rows] == [s.TIERS.index(t) for t in ("beb", "beb", "beb", "mon")]
    assert [row[s.SCHEDULED_US] for row in rows] == [0, 0, 0, 2_410_000_000]


def test_times_before_and_after_the_trace_stay_the_flags_they_are(tmp_path: Path) -> None:
    times = [0, 600_000_001, END_OF_TIME]
    cell = write_cell(
        tmp_path / "cell",
        {t: [with_field(t, "time", time) for time in times] for t in ROWS if t != "task_usage"},
    )
    dataset = read(cell, tmp_path / "out")
    assert dataset.manifest["rejects"] == {}
    for table in ("events", "collections", "constraints", "machines", "attributes"):
        assert sorted(row[s.TIME_US] for row in rows_of(dataset, table)) == [
            s.BEFORE_TRACE_US, 600_000_001, s.AFTER_TRACE_US,
        ]  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_columns_are_found_by_the_schema_whatever_their_order(seed: int, golden: Dataset, tmp_path: Path) -> None:
    order = {table: random.Random(seed).sample(names, len(names)) for table, names in COLUMNS.items()}
    moved = {t: [",".join(ROWS[t].split(",")[COLUMNS[t].index(name)] for name in names)] for t, names in order.items()}
    dataset = read(write_cell(tmp_path / "cell", moved, schema_csv(order)), tmp_path / "out")
    assert dataset.manifest["rejects"] == {}
    assert same_tables(dataset, golden)


def _untidy(text: str) -> bytes:
    header, *lines = text.splitlines()
    random.Random(4).shuffle(lines)
    spaced = [" , ".join(f" {cell}\t" for cell in line.split(",")) for line in [header.title(), *lines]]
    return "\ufeff".encode() + "\r\n\r\n".join(spaced).encode()


def test_an_untidy_schema_file_says_the_same(golden: Dataset, tmp_path: Path) -> None:
    cell = write_cell(tmp_path / "cell", {table: [row] for table, row in ROWS.items()})
    (cell / SCHEMA_FILE).write_bytes(_untidy(schema_csv()))
    assert same_tables(read(cell, tmp_path / "out"), golden)


def test_version_2_0_has_no_sampled_cpu_usage_and_that_becomes_null(tmp_path: Path) -> None:
    older = COLUMNS | {"task_usage": COLUMNS["task_usage"][:-1]}
    row = USAGE_ROW.rsplit(",", 1)[0]
    dataset = read(write_cell(tmp_path / "cell", {"task_usage": [row]}, schema_csv(older)), tmp_path / "out")
    usage = one_row(dataset, "usage")
    assert (usage[s.CPU_SAMPLE], usage[s.CPU_MEAN], usage[s.AGGREGATION_TYPE]) == (None, 0.03125, 1)
    assert s.CPU_SAMPLE in dataset.manifest["lacks"]
    assert dataset.manifest["rejects"] == {}


def test_version_2_0_files_under_the_schema_of_2_1_are_rejects(tmp_path: Path) -> None:
    cell = write_cell(tmp_path / "cell", {"task_usage": [USAGE_ROW.rsplit(",", 1)[0], USAGE_ROW]})
    dataset = read(cell, tmp_path / "out")
    assert [row[s.REJECT_LINE] for row in rows_of(dataset, "rejects")] == [1]
    assert dataset.n_windows == 1


def test_a_cell_without_a_schema_file_says_where_to_find_it(tmp_path: Path) -> None:
    write_table(tmp_path / "cell", "task_usage", [USAGE_ROW])
    with pytest.raises(SchemaError, match=r"cell/schema\.csv: no such file; .*take schema\.csv as published next to"):
        read(tmp_path / "cell", tmp_path / "out")


_PATTERN = "task_usage/part-?????-of-?????.csv.gz"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("19,aggregation type", "19,aggregation kind"), r"line 58: unknown column 'aggregation kind' of task_usage "
         r"\(known: start time, .*aggregation type\)"),
        ((f"{_PATTERN},1,start time,ANY,NO\n", ""), r"field numbers must be 1 to 19, each once, got \[2, 3, .*"
         r"task_usage lacks columns start time \(it has end time, .*; take schema\.csv as published"),
        (("1,start time", "1,end time"), r"task_usage: end time appears more than once; .* lacks columns start"),
        (("7,canonical memory", "6,canonical memory"), r"task_usage: field numbers must be 1 to 20, .*\[.*5, 6, 6, 8,"),
        (("20,sampled", "21,sampled"), r"task_usage: field numbers must be 1 to 20, .*18, 19, 21\]"),
        (("20,sampled", "0,sampled"), r"task_usage: field numbers must be 1 to 20, each once, got \[0, 1"),
        (("20,sampled", "twenty,sampled"), r"line 59: field number must be a whole number, got 'twenty'"),
        (("20,sampled", "²,sampled"), r"line 59: field number must be a whole number, got '²'"),
        ((f"{_PATTERN},20", "gpu/part-*.csv,20"), r"line 59: unknown table 'gpu/part-\*\.csv' \(known: task"),
        (("content,", "column,"), r"the first line must name file pattern, field number, content, got 'file pattern,"),
    ],
)  # fmt: skip
def test_a_schema_that_does_not_fit_names_what_is_wrong(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    text = schema_csv()
    assert change[0] in text
    cell = write_cell(tmp_path / "cell", {"task_usage": [USAGE_ROW]}, text.replace(*change, 1))
    with pytest.raises(SchemaError, match=rf"cell/schema\.csv: .*{message}"):
        read(cell, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe\x00"])
def test_a_schema_file_with_nothing_in_it_is_an_error(content: bytes, tmp_path: Path) -> None:
    cell = write_cell(tmp_path / "cell", {"task_usage": [USAGE_ROW]})
    (cell / SCHEMA_FILE).write_bytes(content)
    with pytest.raises(SchemaError, match=r"schema\.csv: .*take schema\.csv as published"):
        read(cell, tmp_path / "out")


MANDATORY = {
    "job_events": ["time", "job ID", "event type"],
    "task_events": ["time", "job ID", "task index", "event type", "priority"],
    "machine_events": ["time", "machine ID", "event type"],
    "machine_attributes": ["time", "machine ID", "attribute name", "attribute deleted"],
    "task_constraints": ["time", "job ID", "task index", "comparison operator", "attribute name"],
    "task_usage": ["start time", "end time", "job ID", "task index", "machine ID"],
}
"""The columns that the published schema calls mandatory."""


@pytest.mark.parametrize(("raw", "column"), [(raw, column) for raw, names in MANDATORY.items() for column in names])
def test_a_schema_without_a_mandatory_column_names_it(raw: str, column: str, tmp_path: Path) -> None:
    left = [name for name in COLUMNS[raw] if name != column]
    (tmp_path / SCHEMA_FILE).write_text(schema_csv(COLUMNS | {raw: left}))
    with pytest.raises(SchemaError, match=f"{raw} lacks columns {column} "):
        v2.google_v2(tmp_path)


def test_a_schema_may_leave_out_every_other_column(tmp_path: Path) -> None:
    (tmp_path / SCHEMA_FILE).write_text(schema_csv(MANDATORY))
    source = v2.google_v2(tmp_path)
    assert {table.raw: list(table.order) for table in source.tables} == MANDATORY
    assert {s.CPU_MEAN, s.MEMORY_MEAN, s.CPU_MAX, s.CPI} <= set(source.lacks)


def test_a_table_left_out_of_the_schema_is_an_error_only_where_there_are_files_of_it(tmp_path: Path) -> None:
    some = {raw: names for raw, names in COLUMNS.items() if raw != "task_constraints"}
    cell = write_cell(tmp_path / "cell", {"task_usage": [USAGE_ROW]}, schema_csv(some))
    assert read(cell, tmp_path / "out").n_windows == 1
    write_table(cell, "task_constraints", [ROWS["task_constraints"]])
    with pytest.raises(SchemaError, match="task_constraints is left out, but the trace has files of it"):
        v2.google_v2(cell)


def test_another_schema_is_another_dataset(tmp_path: Path) -> None:
    cell = write_cell(tmp_path / "cell", {"machine_events": ["0,7,0,cA==,0.5,0.25"]})
    first = read(cell, tmp_path / "out")
    swapped = [*COLUMNS["machine_events"][:4], "Memory", "CPUs"]
    (cell / SCHEMA_FILE).write_text(schema_csv(COLUMNS | {"machine_events": swapped}))
    with pytest.raises(ConfigError, match="made from other files or options"):
        read(cell, tmp_path / "out")
    second = read(cell, tmp_path / "second")
    assert second.manifest["fingerprint"] != first.manifest["fingerprint"]
    assert (one_row(first, "machines")[s.CPU_CAPACITY], one_row(second, "machines")[s.CPU_CAPACITY]) == (0.5, 0.25)


BAD = [
    ("task_usage", "job ID", "", "job ID is missing"),
    ("task_usage", "job ID", "1.5", "job ID is not a bigint"),
    ("task_usage", "job ID", "9007199254740993.0", "job ID is not a bigint"),
    ("task_usage", "job ID", "6.25e+09", "job ID is not a bigint"),
    ("task_usage", "job ID", str(2**63), "job ID is not a bigint"),
    ("task_usage", "task index", "", "task index is missing"),
    ("task_usage", "start time", "", "start time is missing"),
    ("task_usage", "start time", "-1", "start time is negative"),
    ("task_usage", "end time", "", "end time is missing"),
    ("task_usage", "end time", "900000000", "end time is not after start time"),
    ("task_usage", "end time", str(2**59 + 1), "end time is past the last time there can be"),
    ("task_usage", "end time", str(END_OF_TIME), "end time is past the last time there can be"),
    ("task_usage", "machine ID", "seven", "machine ID is not a bigint"),
    ("task_usage", "CPU rate", "-0.1", "CPU rate is negative or not finite"),
    ("task_usage", "CPU rate", "nan", "CPU rate is negative or not finite"),
    ("task_usage", "CPU rate", "x", "CPU rate is not a double"),
    ("task_usage", "canonical memory usage", "inf", "canonical memory usage is negative or not finite"),
    ("task_usage", "maximum CPU rate", "-inf", "maximum CPU rate is negative or not finite"),
    ("task_usage", "aggregation type", "2", "aggregation type is not 0 to 1"),
    ("task_events", "time", "-1", "time is negative"),
    ("task_events", "time", "", "time is missing"),
    ("task_events", "time", str(2**63), "time is not a bigint"),
    ("task_events", "event type", "9", "event type is not 0 to 8"),
    ("task_events", "event type", "", "event type is missing"),
    ("task_events", "missing info", "3", "missing info is not 0 to 2"),
    ("task_events", "scheduling class", "4", "scheduling class is not 0 to 3"),
    ("task_events", "priority", "-1", "priority is negative"),
    ("task_events", "CPU request", "-0.5", "CPU request is negative or not finite"),
    ("task_events", "disk space request", "nan", "disk space request is negative or not finite"),
    ("task_events", "different machines restriction", "2", "different machines restriction is not 0 to 1"),
    ("job_events", "job ID", "", "job ID is missing"),
    ("job_events", "event type", "-1", "event type is not 0 to 8"),
    ("machine_events", "event type", "3", "event type is not 0 to 2"),
    ("machine_events", "Memory", "-1", "Memory is negative or not finite"),
    ("machine_events", "machine ID", "", "machine ID is missing"),
    ("machine_attributes", "attribute deleted", "", "attribute deleted is missing"),
    ("machine_attributes", "attribute name", "", "attribute name is missing"),
    ("task_constraints", "comparison operator", "4", "comparison operator is not 0 to 3"),
    ("task_constraints", "task index", "-", "task index is not a bigint"),
]


def test_a_bad_field_is_a_reject_with_its_file_line_and_reason(tmp_path: Path) -> None:
    expected: list[tuple[str, int, str]] = []
    tables: defaultdict[str, list[str]] = defaultdict(list)
    for table, column, value, reason in BAD:
        tables[table] += [ROWS[table], with_field(table, column, value)]
        expected.append((f"{table}/part-00000-of-00003.csv.gz", len(tables[table]), reason))
    tables["task_events"].append(TASK_ROW + ",9")
    expected.append(("task_events/part-00000-of-00003.csv.gz", len(tables["task_events"]), "row is malformed"))
    tables["task_events"] += ["", "not,a,row", TASK_ROW]
    dataset = read(write_cell(tmp_path / "cell", dict(tables)), tmp_path / "out")
    got = {(r[s.REJECT_FILE], r[s.REJECT_LINE]): r[s.REJECT_REASON] for r in rows_of(dataset, "rejects")}
    for file, line, reason in expected:
        assert got[file, line].startswith(reason), (file, line, got[file, line])
    taken = {entry["file"]: entry["rows"] for entry in dataset.manifest["inputs"]}
    for table, rows in tables.items():
        file = f"{table}/part-00000-of-00003.csv.gz"
        assert taken[file] == rows.count(ROWS[table])
        assert taken[file] + sum(name == file for name, _ in got) == len([row for row in rows if row])
    with pytest.raises(TraceError, match="lines rejected"):
        read(tmp_path / "cell", tmp_path / "strict", max_reject_share=0.001)


DEFECTS = [
    ("task_usage", "CPU rate", "", "CPU rate is missing"),
    ("task_usage", "maximum CPU rate", "0.03", "cpu_max is below cpu_mean"),
    ("task_usage", "maximum memory usage", "1e-7", "memory_max is below memory_mean"),
    ("task_usage", "maximum memory usage", "0", "maximum memory usage is 0 with a mean above 0, made null"),
    ("task_usage", "end time", "1200000001", "a window is longer than the trace's longest"),
    ("task_usage", "cycles per instruction", "0.1999", "cycles per instruction is outside 0.2 to 300"),
    ("task_usage", "cycles per instruction", "1e+06", "cycles per instruction is outside 0.2 to 300"),
    ("task_usage", "cycles per instruction", "nan", "cycles per instruction is outside 0.2 to 300"),
    ("task_usage", "memory accesses per instruction", "1.01", "memory accesses per instruction is outside 0 to 1"),
    ("task_usage", "sample portion", "1.5", "sample portion is outside 0 to 1"),
    ("task_usage", "job ID", v2.REUSED_JOB, "job ID 6253771429 stands for two jobs"),
    ("task_events", "job ID", v2.REUSED_JOB, "job ID 6253771429 stands for two jobs"),
    ("job_events", "job ID", v2.REUSED_JOB, "job ID 6253771429 stands for two jobs"),
]


def test_known_defects_are_counted_and_the_rows_kept(tmp_path: Path) -> None:
    tables: defaultdict[str, list[str]] = defaultdict(list)
    for k, (table, column, value, _) in enumerate(DEFECTS):
        row = with_field(table, column, value).split(",")
        row[COLUMNS[table].index("task index" if table != "job_events" else "time")] = str(k)
        tables[table].append(",".join(row))
    dataset = read(write_cell(tmp_path / "cell", dict(tables)), tmp_path / "out")
    assert dataset.manifest["rejects"] == {}
    assert dataset.manifest["defects"] == Counter(reason for *_, reason in DEFECTS)
    rows = {row[s.INSTANCE_INDEX]: row for row in rows_of(dataset, "usage")}
    assert len(rows) == sum(table == "task_usage" for table, *_ in DEFECTS)
    assert rows[3][s.MEMORY_MAX] is None
    assert (rows[0][s.CPU_MEAN], rows[6][s.CPI], rows[9][s.SAMPLE_PORTION]) == (None, 1e6, 1.5)


def test_a_plain_csv_and_more_parts_give_the_same_rows(tmp_path: Path) -> None:
    rows = [with_field("task_usage", "task index", k) for k in range(7)]
    whole = read(write_cell(tmp_path / "cell", {"task_usage": rows}), tmp_path / "out")
    parts = write_cell(tmp_path / "parts", {})
    write_table(parts, "task_usage", rows[:3], 2)
    write_table(parts, "task_usage", rows[4:], 0)
    (parts / "task_usage" / "part-00001-of-00003.csv").write_text(rows[3] + "\n")
    dataset = read(parts, tmp_path / "split")
    assert same_tables(dataset, whole)
    assert dataset.n_windows == 7


def test_a_quote_is_a_character_like_any_other_and_swallows_no_lines(tmp_path: Path) -> None:
    rows = [with_field("task_events", "task index", k) for k in range(12)]
    rows[3] = with_field("task_events", "user", '"dXNlcg')  # the trace has no quotes: this one is damage, in one row
    rows[8] = with_field("task_events", "user", 'dXNlcg"')
    dataset = read(write_cell(tmp_path / "cell", {"task_events": rows}), tmp_path / "out")
    (entry,) = dataset.manifest["inputs"]
    assert entry["rows"] + entry["rejects"] == 12
    assert {0, 1, 2, 4, 5, 6, 7, 9, 10, 11} <= {row[s.INSTANCE_INDEX] for row in rows_of(dataset, "events")}


MEASURES = {
    "CPU rate": s.CPU_MEAN, "canonical memory usage": s.MEMORY_MEAN, "assigned memory usage": s.MEMORY_ASSIGNED_USAGE,
    "unmapped page cache": s.PAGE_CACHE_UNMAPPED, "total page cache": s.PAGE_CACHE,
    "maximum memory usage": s.MEMORY_MAX, "disk I/O time": s.DISK_IO_MEAN, "local disk space usage": s.DISK_MEAN,
    "maximum CPU rate": s.CPU_MAX, "maximum disk IO time": s.DISK_IO_MAX, "cycles per instruction": s.CPI,
    "memory accesses per instruction": s.MAI, "sample portion": s.SAMPLE_PORTION, "sampled CPU usage": s.CPU_SAMPLE,
}  # fmt: skip


def drawn_usage(seed: int, rows: int) -> list[str]:
    """Return usage rows of nine tasks on four machines, numbers as C prints them with %g, a quarter of them missing."""
    draw = random.Random(seed)
    return [
        ",".join(
            {
                "start time": f"{seed * rows + k + 600}000000", "end time": f"{seed * rows + k + 900}000000",
                "job ID": str(JOB + k % 3), "task index": str(k % 9), "machine ID": str(MACHINE + draw.randrange(4)),
                "aggregation type": "0",
            }.get(name, draw.choice(["", "0", *(f"{draw.expovariate(scale):g}" for scale in (2, 2e6))]))
            for name in COLUMNS["task_usage"]
        )
        for k in range(rows)
    ]  # fmt: skip


@pytest.mark.parametrize("key", [("job ID", "task index"), ("machine ID",)])
def test_sums_per_task_and_per_machine_equal_those_of_the_raw_rows(key: tuple[str, ...], tmp_path: Path) -> None:
    cell = write_cell(tmp_path / "cell", {})
    for part in range(3):
        write_table(cell, "task_usage", drawn_usage(part, 200), part)
    means = {"maximum CPU rate": "CPU rate", "maximum memory usage": "canonical memory usage"}
    raw: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    for file in cell.glob("task_usage/*.csv.gz"):
        for fields in csv.reader(io.StringIO(gzip.decompress(file.read_bytes()).decode())):
            row = dict(zip(COLUMNS["task_usage"], fields, strict=True))
            for name, column in MEASURES.items():
                mean = row[means[name]] if name in means else ""
                if row[name] and not (float(row[name]) == 0 < float(mean or 0)):  # that is missing
                    raw[column, *(int(row[id_]) for id_ in key)].append(float(row[name]))
    dataset = read(cell, tmp_path / "out", buckets=4)
    ids = [{"job ID": s.COLLECTION_ID, "task index": s.INSTANCE_INDEX, "machine ID": s.MACHINE_ID}[id_] for id_ in key]
    arrived: defaultdict[tuple[object, ...], list[float]] = defaultdict(list)
    for got in rows_of(dataset, "usage"):
        for column in MEASURES.values():
            if got[column] is not None:
                arrived[column, *(got[id_] for id_ in ids)].append(got[column])
    assert dataset.n_windows == 600
    assert {k: len(v) for k, v in arrived.items()} == {k: len(v) for k, v in raw.items()}
    assert {k: math.fsum(v) for k, v in arrived.items()} == {k: math.fsum(v) for k, v in raw.items()}


_JUNK = st.sampled_from(["", "-1", "0", "1e3", "x", "nan", "1e999", "007", " 1", "\ufeff", "1,1", str(2**63), "é" * 99])


@settings(max_examples=10, deadline=None)
@given(hits=st.lists(st.tuples(st.integers(0, 199), st.sampled_from(COLUMNS["task_events"]), _JUNK), max_size=20))
def test_every_line_is_taken_or_rejected_whatever_stands_in_it(
    hits: list[tuple[int, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("hit")
    rows = [with_field("task_events", "task index", k) for k in range(200)]
    for k, column, junk in hits:
        fields = with_field("task_events", "task index", k).split(",")
        fields[COLUMNS["task_events"].index(column)] = junk
        rows[k] = ",".join(fields)
    dataset = read(write_cell(folder / "cell", {"task_events": rows}), folder / "out")
    (entry,) = dataset.manifest["inputs"]
    assert entry["rows"] + entry["rejects"] == 200
    rejected = {row[s.REJECT_LINE] - 1 for row in rows_of(dataset, "rejects")}
    assert rejected <= {k for k, *_ in hits}
    kept = {row[s.INSTANCE_INDEX] for row in rows_of(dataset, "events")}
    assert set(range(200)) - {k for k, *_ in hits} <= kept


def raw_rows(folder: Path, table: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a raw table as the csv module reads them."""
    with (folder / SCHEMA_FILE).open(newline="") as text:
        order = {int(row["field number"]): row["content"] for row in csv.DictReader(text)
                 if row["file pattern"].startswith(f"{table}/")}  # fmt: skip
    names = [order[k] for k in sorted(order)]
    for file in sorted((folder / table).glob("part-*.csv.gz")):
        with gzip.open(file, "rt", newline="") as text:
            for fields in csv.reader(text):
                yield dict(zip(names, fields, strict=True))


def counts_of(dataset: Dataset, table: str, *columns: str) -> Counter[tuple[Any, ...]]:
    """Return how often each combination of the columns' values stands in a table."""
    counted = table_of(dataset, table).group_by(list(columns)).aggregate([([], "count_all")]).to_pydict()
    return Counter(dict(zip(zip(*(counted[name] for name in columns), strict=True), counted["count_all"], strict=True)))


def test_the_real_schema_has_the_columns_of_the_document(real_data: Path) -> None:
    columns: defaultdict[str, list[str]] = defaultdict(list)
    mandatory: defaultdict[str, list[str]] = defaultdict(list)
    with (real_data / "google_2011" / SCHEMA_FILE).open(newline="") as text:
        for row in csv.DictReader(text):
            raw = row["file pattern"].split("/")[0]
            columns[raw].append(row["content"])
            mandatory[raw] += [row["content"]] * (row["mandatory"] == "YES")
    assert columns == COLUMNS
    assert mandatory == MANDATORY


@pytest.mark.slow
def test_the_real_task_events_arrive_one_by_one(real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "google_2011"
    dataset = read(folder, tmp_path / "out", buckets=4, max_reject_share=0)
    codes = dict(enumerate((0, 3, 4, 5, 6, 7, 8, 9, 10)))
    bands = {p: "free" if p < 2 else "beb" if p < 9 else "prod" if p < 11 else "mon" for p in range(12)}
    counted: Counter[tuple[Any, ...]] = Counter()
    requested: defaultdict[str, list[float]] = defaultdict(list)
    whole = set()
    for row in raw_rows(folder, "task_events"):
        counted[codes[int(row["event type"])], s.TIERS.index(bands[int(row["priority"])])] += 1
        whole.add(tuple(row.values()))
        for name in ("CPU request", "memory request", "disk space request"):
            requested[name] += [float(row[name])] if row[name] else []
    # not one row stands twice in these parts: dropping repeated rows drops none
    assert dataset.manifest["counts"]["events"] == len(whole) == counted.total()
    assert dataset.manifest["rejects"] == {}
    assert counts_of(dataset, "events", s.EVENT_TYPE, s.TIER) == counted
    events = table_of(dataset, "events")
    for name, column in (("CPU request", s.CPU_LIMIT), ("memory request", s.MEMORY_LIMIT),
                         ("disk space request", s.DISK_LIMIT)):  # fmt: skip
        got = events[column].drop_null().to_pylist()
        assert (len(got), math.fsum(got)) == (len(requested[name]), math.fsum(requested[name]))
    assert dataset.manifest["counts"]["tasks"] == len({(row[2], row[3]) for row in whole})
    assert dataset.manifest["defects"]["task event has no resource request"] == counted.total() - len(
        requested["CPU request"]
    )


@pytest.mark.slow
def test_the_real_job_and_machine_events_arrive_one_by_one(real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "google_2011"
    dataset = read(folder, tmp_path / "out", buckets=4, max_reject_share=0)
    jobs = Counter(
        (int(row["time"]), int(row["job ID"]), row["user"], int(row["scheduling class"]), row["job name"])
        for row in raw_rows(folder, "job_events")
    )
    of_jobs = (s.TIME_US, s.COLLECTION_ID, s.USER_ID, s.SCHEDULING_CLASS, s.NAME_ID)
    assert counts_of(dataset, "collections", *of_jobs) == jobs
    machines = Counter(
        (int(row["time"]), int(row["machine ID"]), int(row["event type"]) + 1, row["platform ID"],
         float(row["CPUs"]) if row["CPUs"] else None, float(row["Memory"]) if row["Memory"] else None)
        for row in raw_rows(folder, "machine_events")
    )  # fmt: skip
    of_machines = (s.TIME_US, s.MACHINE_ID, s.EVENT_TYPE, s.PLATFORM, s.CPU_CAPACITY, s.MEMORY_CAPACITY)
    assert counts_of(dataset, "machines", *of_machines) == machines
