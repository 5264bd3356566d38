"""The Alibaba reader: golden rows of all six tables, each known defect counted, columns by schema.csv, real data."""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.errors import SchemaError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.traces.alibaba_2017 import alibaba_2017
from reclaim.data.traces.alibaba_2017_batch import UNKNOWN_COLLECTION
from reclaim.data.traces.alibaba_2017_columns import COLUMNS

Tables = Mapping[str, Sequence[str]]
PROD, BEB = s.TIERS.index("prod"), s.TIERS.index("beb")
SYNTHESISED = s.MISSING_TYPES.index("SNAPSHOT_BUT_NO_TRANSITION")
EVENT = s.EventType
JOB_5_TASK_9 = 6 * 2**32 + 9

CREATED = "0,Create,8,7,4,0.25,0.125,0|1|32|33"
USED = "39600,8,12.5,50,25,0.5,0.25,0.125,1.5,4,3,8"
TASK = "100,900,5,9,3,Terminated,50,0.008"
RUN = "200,700,5,9,7,Terminated,1,2,0.75,0.5,0.004,0.003"
GOLDEN: Tables = {
    "server_event": ["0,7,add,,64,0.69,1", "50000,7,softerror,agent_check,64,0.69,1", "60000,7,harderror,disk,,,"],
    "server_usage": ["39600,7,25,50,75,16,8,4"],
    "batch_task": [TASK],
    "batch_instance": [RUN],
    "container_event": [CREATED, "50000,Remove,8,7,4,0.25,0.125,0|1|32|33"],
    "container_usage": [USED],
}


def schema_text(turned: Sequence[str] = ()) -> str:
    """Return a schema file as the trace has it, stray spaces and all; the named tables have their columns backwards."""
    lines = ["file name,field number,content,format,mandatory"]
    for raw, contents in COLUMNS.items():
        ordered = list(contents)[::-1] if raw in turned else list(contents)
        lines += [f"{raw}.csv,{k + 1}, {content}, ANY, YES" for k, content in enumerate(ordered)]
    return "\n".join(lines) + "\n"


def write(folder: Path, tables: Tables, schema: str | None = None) -> Path:
    folder.mkdir()
    (folder / "schema.csv").write_text(schema or schema_text())
    for name, lines in tables.items():
        (folder / f"{name}.csv").write_text("".join(line + "\n" for line in lines))
    return folder


def take(folder: Path, tables: Tables, schema: str | None = None, buckets: int = 1) -> Dataset:
    """Return the dataset of a hand-made trace."""
    config = IngestConfig(trace="alibaba-2017", buckets=buckets, max_reject_share=1)
    return ingest(write(folder, tables, schema), folder.with_name(folder.name + "-out"), config).dataset


def contents(dataset: Dataset) -> dict[str, list[dict[str, Any]]]:
    """Return every row of every table but the rejects."""
    usage = pa.concat_tables([dataset.usage(b) for b in range(dataset.n_buckets)]).to_pylist()
    events = pa.concat_tables([dataset.events(b) for b in range(dataset.n_buckets)]).to_pylist()
    small = {name: dataset.table(name).to_pylist() for name in ("tasks", "collections", "machines", "machine_usage")}
    return {"usage": usage, "events": events, **small}


def told(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without its nulls."""
    return {name: value for name, value in row.items() if value is not None}


def hashed(line: str) -> int:
    """Return the index of a batch record: 62 bits of the md5 of its text."""
    return int.from_bytes(hashlib.md5(line.encode()).digest()[8:], "little") % 2**62


def rejects(dataset: Dataset) -> set[tuple[str, int, str]]:
    rows = pq.read_table(dataset.path / "rejects" / "rejects.parquet").to_pylist()
    return {(row[s.REJECT_FILE], row[s.REJECT_LINE], row[s.REJECT_REASON]) for row in rows}


def test_every_field_of_a_container_arrives_and_its_percentages_become_usage(tmp_path: Path) -> None:
    dataset = take(tmp_path / "trace", GOLDEN)
    rows = contents(dataset)
    assert "machine_of_a_container" in dataset.manifest["options"]  # so one of before, without machines, is another
    assert told(rows["usage"][0]) == {
        "collection_id": 8, "instance_index": 0, "collection_type": 0, "start_us": 39_600_000_000,
        "end_us": 39_900_000_000, "scheduled_us": 0, "machine_id": 7, "tier": PROD, "cpu_limit": 4.0,
        "memory_limit": 0.25, "cpu_share": 0.125, "memory_share": 0.5, "disk_share": 0.25, "cpu_mean": 0.5,
        "memory_mean": 0.125,
        "load_1": 0.5, "load_5": 0.25, "load_15": 0.125, "cpi": 1.5, "mai": 0.004, "cpi_max": 3.0, "mai_max": 0.008,
    }  # fmt: skip
    common = {
        "collection_id": 8, "instance_index": 0, "collection_type": 0, "machine_id": 7, "tier": PROD, "cpu_limit": 4.0,
        "memory_limit": 0.25, "disk_limit": 0.125, "cpuset": "0|1|32|33",
    }  # fmt: skip
    assert [told(row) for row in rows["events"][:2]] == [
        {**common, "time_us": 0, "event_type": EVENT.SCHEDULE},
        {**common, "time_us": 50_000_000_000, "event_type": EVENT.KILL},
    ]
    assert told(rows["tasks"][0]) == {
        "collection_id": 8, "instance_index": 0, "tier": PROD, "collection_type": 0, "first_seen_us": 39_600_000_000,
        "last_seen_us": 39_900_000_000,
    }  # fmt: skip


def test_every_field_of_a_machine_arrives(tmp_path: Path) -> None:
    rows = contents(take(tmp_path / "trace", GOLDEN))
    capacity = {"machine_id": 7, "cpu_capacity": 64.0, "memory_capacity": 0.69, "disk_capacity": 1.0}
    kinds = s.MachineEventType
    assert [told(row) for row in rows["machines"]] == [
        {**capacity, "time_us": 0, "event_type": kinds.ADD},
        {**capacity, "time_us": 50_000_000_000, "event_type": kinds.SOFT_ERROR, "event_detail": "agent_check"},
        {"machine_id": 7, "time_us": 60_000_000_000, "event_type": kinds.HARD_ERROR, "event_detail": "disk"},
    ]
    assert rows["machine_usage"] == [
        {"time_us": 39_600_000_000, "machine_id": 7, "cpu_share": 0.25, "memory_share": 0.5, "disk_share": 0.75,
         "load_1": 16.0, "load_5": 8.0, "load_15": 4.0}
    ]  # fmt: skip


def test_a_batch_task_is_a_collection_and_a_run_a_task_of_it_with_one_long_window(tmp_path: Path) -> None:
    rows = contents(take(tmp_path / "trace", GOLDEN))
    common = {
        "collection_id": JOB_5_TASK_9, "collection_type": 0, "tier": BEB, "cpu_limit": 0.5, "memory_limit": 0.008,
        "instances": 3,
    }  # fmt: skip
    assert [told(row) for row in rows["collections"]] == [
        {**common, "time_us": 100_000_000, "event_type": EVENT.SUBMIT},
        {**common, "time_us": 900_000_000, "event_type": EVENT.FINISH},
    ]
    task = {"collection_id": JOB_5_TASK_9, "instance_index": hashed(RUN), "collection_type": 0, "tier": BEB}
    assert told(rows["usage"][1]) == {
        **task, "start_us": 200_000_000, "end_us": 700_000_000, "scheduled_us": 200_000_000, "machine_id": 7,
        "cpu_mean": 0.5, "cpu_max": 0.75, "memory_mean": 0.003, "memory_max": 0.004, "cpu_limit": 0.5,
        "memory_limit": 0.008,
    }  # fmt: skip
    assert [told(row) for row in rows["events"][2:]] == [
        {**task, "machine_id": 7, "time_us": 200_000_000, "event_type": EVENT.SCHEDULE},
        {**task, "machine_id": 7, "time_us": 700_000_000, "event_type": EVENT.FINISH},
    ]


def test_a_batch_task_keeps_the_state_it_was_left_in(tmp_path: Path) -> None:
    states = {
        "Terminated": EVENT.FINISH, "Failed": EVENT.FAIL, "Cancelled": EVENT.KILL, "Running": EVENT.SCHEDULE,
        "Waiting": EVENT.QUEUE, "Ready": EVENT.ENABLE,
    }  # fmt: skip
    lines = [TASK.replace("5,9", f"{k},9").replace("Terminated", status) for k, status in enumerate(states)]
    rows = contents(take(tmp_path / "trace", {"batch_task": lines}))["collections"]
    assert [row["event_type"] for row in rows[1::2]] == list(states.values())
    assert {row["event_type"] for row in rows[::2]} == {EVENT.SUBMIT}
    assert {row["missing_type"] for row in rows} == {None}


def test_a_run_that_failed_or_was_stopped_has_its_window_and_its_end(tmp_path: Path) -> None:
    ends = {"Failed": EVENT.FAIL, "Cancelled": EVENT.KILL, "Interupted": EVENT.KILL, "Interrupted": EVENT.KILL}
    lines = [RUN.replace("Terminated", status) for status in ends]
    rows = contents(take(tmp_path / "trace", {"batch_instance": lines}))
    assert len(rows["usage"]) == 4
    got = {(row["instance_index"], row["event_type"]) for row in rows["events"] if row["time_us"] == 700_000_000}
    assert got == {(hashed(line), end) for line, end in zip(lines, ends.values(), strict=True)}


WINDOWLESS = [  # the record, and the event that its state becomes
    ("0,0,5,9,,Waiting,1,1,,,,", EVENT.QUEUE),
    ("0,0,5,9,,Ready,1,1,,,,", EVENT.ENABLE),
    ("200,0,5,9,7,Failed,1,1,,,,", EVENT.FAIL),
    ("200,,5,9,7,Terminated,1,1,,,,", EVENT.FINISH),
    ("200,0,5,9,7,Running,1,1,,,,", None),
    ("-60,-50,5,9,7,Terminated,1,1,1,1,1,1", None),
    ("0,0,5,9,7,Terminated,1,1,1,1,1,1", None),
]


def test_a_run_without_a_span_has_no_window_is_counted_and_keeps_its_state(tmp_path: Path) -> None:
    dataset = take(tmp_path / "trace", {"batch_instance": [RUN, *(line for line, _ in WINDOWLESS)]})
    rows = contents(dataset)
    assert [row["instance_index"] for row in rows["usage"]] == [hashed(RUN)]
    assert dataset.manifest["rejects"] == {}
    assert dataset.manifest["defects"] == {
        "batch_instance: negative time, taken as before the trace": 1,
        "batch_instance: never started, no window": 2,
        "batch_instance: no end, no window": 3,
        "batch_instance: over before the trace, no window": 2,
    }
    marked = {row["instance_index"]: (row["event_type"], row["time_us"]) for row in rows["events"]
              if row["missing_type"] == SYNTHESISED}  # fmt: skip
    assert marked == {
        hashed(line): (event, max(int(line.split(",")[0]), 0) * 1_000_000)
        for line, event in WINDOWLESS
        if event is not None
    }
    over = [
        (row["event_type"], row["time_us"])
        for row in rows["events"]
        if row["instance_index"] == hashed(WINDOWLESS[5][0])
    ]
    assert over == [(EVENT.SCHEDULE, 0), (EVENT.FINISH, 0)]


def test_a_file_in_which_no_run_has_a_window_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    dataset = take(tmp_path / "trace", {"batch_instance": ["0,0,5,9,,Waiting,1,1,,,,"]})
    assert dataset.n_windows == 0
    assert len(contents(dataset)["events"]) == 1


def test_every_known_defect_of_batch_records_is_counted(tmp_path: Path) -> None:
    lines = [
        RUN,
        RUN.replace(",5,9,", ",,9,"),  # no job
        RUN.replace(",5,9,", ",5,,"),  # no task
        RUN.replace("200,", "-30,"),
        RUN.replace("200,", "0,"),
        RUN.replace("200,700", "200,200"),
        RUN.replace("0.75,0.5,", ",,"),
        RUN.replace("200,700", "-30,-20"),
        "0,0,5,9,,Waiting,1,1,,,,",
        "300,0,5,9,7,Running,1,1,,,,",
    ]
    dataset = take(tmp_path / "trace", {"batch_task": [TASK], "batch_instance": lines})
    assert dataset.manifest["rejects"] == {}
    assert dataset.manifest["defects"] == {
        "batch_instance: negative time, taken as before the trace": 2,
        "batch_instance: job_id or task_id is missing": 2,
        "batch_instance: never started, no window": 1,
        "batch_instance: no end, no window": 1,
        "batch_instance: over before the trace, no window": 1,
        "batch_instance: started before the trace, window from 0": 2,
        "batch_instance: start and end in one second, window of a second": 1,
        "batch_instance: usage is missing": 1,
    }
    usage = {row["instance_index"]: row for row in contents(dataset)["usage"]}
    spans = {line: (usage[hashed(line)]["start_us"], usage[hashed(line)]["end_us"]) for line in lines[:7]}
    assert spans[lines[3]] == spans[lines[4]] == (0, 700_000_000)
    assert spans[lines[5]] == (200_000_000, 201_000_000)
    for line in lines[1:3]:
        row = usage[hashed(line)]
        assert row["collection_id"] == UNKNOWN_COLLECTION == 2**62
        assert row["cpu_limit"] is None  # of no collection
        assert row["cpu_mean"] == 0.5
    assert usage[hashed(lines[6])]["cpu_mean"] is None
    assert usage[hashed(lines[6])]["memory_mean"] == 0.003
    assert len(usage) == 7
    assert len(contents(dataset)["events"]) == 10 + 8


def test_every_known_defect_of_batch_tasks_is_counted(tmp_path: Path) -> None:
    lines = [
        TASK,
        "-60,-50,5,10,1,Terminated,50,0.1",
        "-60,110,5,11,1,Terminated,50,0.1",
        "500,0,5,12,1,Running,100,0.1",
        "500,499,5,13,1,Terminated,100,0.1",
        "500,510,5,14,1,Waiting,,",
    ]
    dataset = take(tmp_path / "trace", {"batch_task": lines})
    assert dataset.manifest["defects"] == {
        "batch_task: negative time, taken as before the trace": 2,
        "batch_task: last modified before it was created": 2,
        "batch_task: plan_cpu or plan_mem is missing": 1,
    }
    rows = contents(dataset)["collections"]
    times = defaultdict(list)
    for row in rows:
        times[row["collection_id"] - 6 * 2**32].append((row["time_us"] // 1_000_000, row["missing_type"]))
    assert times[10] == [(0, None), (0, None)]
    assert times[11] == [(0, None), (110, None)]
    assert times[12] == times[13] == [(500, None), (500, SYNTHESISED)]
    assert [row["cpu_limit"] for row in rows[-2:]] == [None, None]
    assert dataset.n_windows == 0


def test_every_known_defect_of_the_other_tables_is_counted(tmp_path: Path) -> None:
    tables = {
        "server_event": ["-5,7,add,,64,1,1"],
        "server_usage": ["-5,7,101,1,1,1,1,1", "300,7,,1,1,-1,1,1"],
        "container_event": [CREATED, CREATED.replace("0,Create", "-5,Create")],
        "container_usage": [
            "-5,8,12.5,50,25,0.5,0.25,0.125,1.5,4,3,8",  # in part before the trace
            "300,8,250,50,25,0.5,0.25,0.125,1.5,4,3,8",
            "600,8,,50,25,0.5,0.25,0.125,nan,4,3,-8",
        ],
    }
    dataset = take(tmp_path / "trace", tables)
    assert dataset.manifest["rejects"] == {}
    assert dataset.manifest["defects"] == {
        "server_event: negative time, taken as before the trace": 1,
        "server_usage: negative time, taken as before the trace": 1,
        "server_usage: utilisation above 100 %, kept": 1,
        "server_usage: cpu_util or mem_util is missing": 1,
        "server_usage: a load, CPI or MPKI that cannot be, made null": 1,
        "container_event: negative time, taken as before the trace": 1,
        "container_usage: negative time, taken as before the trace": 1,
        "container_usage: utilisation above 100 %, kept": 1,
        "container_usage: cpu_util or mem_util is missing": 1,
        "container_usage: a load, CPI or MPKI that cannot be, made null": 1,
    }
    rows = contents(dataset)
    assert [(row["start_us"], row["end_us"]) for row in rows["usage"]] == [
        (0, 295_000_000), (300_000_000, 600_000_000), (600_000_000, 900_000_000),
    ]  # fmt: skip
    assert [row["cpu_mean"] for row in rows["usage"]] == [0.5, 10.0, None]
    assert told(rows["usage"][2]).keys() & {"cpi", "mai", "cpi_max", "mai_max"} == {"mai", "cpi_max"}
    assert rows["machine_usage"][0]["cpu_share"] == 1.01
    assert rows["machine_usage"][1]["load_1"] is None
    assert rows["machines"][0]["time_us"] == 0


BAD = [
    ("server_event", "0,7,gone,,64,1,1", "event is not add, softerror or harderror"),
    ("server_event", "0,,add,,64,1,1", "machine_id is missing"),
    ("server_usage", "300,7,-1,1,1,1,1,1", "cpu_util is negative or not finite"),
    ("server_usage", "300,7,1,inf,1,1,1,1", "mem_util is negative or not finite"),
    ("container_event", "0,Move,8,7,4,0.25,0.125,0", "event is not Create or Remove"),
    ("container_event", "0,Create,4294967296,7,4,0.25,0.125,0", "instance_id is negative or not below 4294967296"),
    ("container_event", "0,Create,8,-1,4,0.25,0.125,0", "machine_id is negative or not below 4294967296"),
    ("container_event", "0,Create,8,7,-4,0.25,0.125,0", "plan_cpu is negative or not finite"),
    ("container_usage", "-300,8,1,1,1,1,1,1,1,1,1,1", "the window ended before the trace"),
    ("container_usage", "300,8,1,1,-0.5,1,1,1,1,1,1,1", "disk_util is negative or not finite"),
    ("container_usage", "3.5,8,1,1,1,1,1,1,1,1,1,1", "ts is not a bigint"),
    ("container_usage", f"{2**63 - 1},8,1,1,1,1,1,1,1,1,1,1", "ts is past the last time there can be"),
    ("container_usage", f"{2**59 // 10**6},8,1,1,1,1,1,1,1,1,1,1", "ts is past the last time there can be"),
    ("batch_task", TASK.replace("5,9", ",9"), "job_id is missing"),
    ("batch_task", TASK.replace("5,9", f"{2**30},9"), f"job_id is negative or not below {2**30 - 1}"),
    ("batch_task", TASK.replace("Terminated", "Gone"), "status is not a known state"),
    ("batch_task", TASK.replace("900", str(2**63 - 1)), "modify_timestamp is past the last time there can be"),
    ("batch_instance", RUN.replace("700", "199"), "end_timestamp is before start_timestamp"),
    ("batch_instance", RUN.replace("700", "-5"), "end_timestamp is before start_timestamp"),
    ("batch_instance", RUN.replace("200,", ","), "start_timestamp is missing"),
    ("batch_instance", RUN.replace("200,", f"{2**63 - 1},"), "start_timestamp is past the last time there can be"),
    ("batch_instance", RUN.replace("Terminated", ""), "status is not a known state"),
    ("batch_instance", RUN.replace("0.75", "-0.75"), "real_cpu_max is negative or not finite"),
    ("batch_instance", RUN.replace("0.75", "much"), "real_cpu_max is not a double"),
    ("batch_instance", RUN.replace("5,9", "5,-9"), "task_id is negative or not below 4294967296"),
]


def test_rows_that_cannot_be_are_rejects_and_cost_no_other_row(tmp_path: Path) -> None:
    bad = {table: [line for name, line, _ in BAD if name == table] for table in GOLDEN}
    dataset = take(tmp_path / "trace", {table: [*bad[table], *lines] for table, lines in GOLDEN.items()})
    assert rejects(dataset) == {
        (f"{table}.csv", bad[table].index(line) + 1, reason) for table, line, reason in BAD
    }  # fmt: skip
    assert dataset.manifest["rejects"] == Counter(reason for _, _, reason in BAD)  # once, however often a file is read
    assert contents(dataset) == contents(take(tmp_path / "good", GOLDEN))


def test_usage_after_a_second_creation_is_by_the_size_and_on_the_machine_then_in_force(tmp_path: Path) -> None:
    grown = "40000,Create,8,9,8,0.5,0.125,0|1|2|3"
    usage = [USED, USED.replace("39600", "39900"), USED.replace("39600", "40200")]
    rows = contents(take(tmp_path / "trace", {"container_event": [CREATED, grown], "container_usage": usage}))["usage"]
    assert [row["cpu_limit"] for row in rows] == [4.0, 8.0, 8.0]  # created again inside the second window
    assert [row["cpu_mean"] for row in rows] == [0.5, 1.0, 1.0]
    assert [row["memory_mean"] for row in rows] == [0.125, 0.25, 0.25]
    assert [row["scheduled_us"] for row in rows] == [0, 40_000_000_000, 40_000_000_000]
    assert [row["machine_id"] for row in rows] == [7, 9, 9]


def test_a_container_without_an_event_keeps_its_shares_and_has_no_usage(tmp_path: Path) -> None:
    row = contents(take(tmp_path / "trace", {"container_usage": [USED.replace(",8,12.5", ",9088,12.5")]}))["usage"][0]
    assert (row["collection_id"], row["cpu_share"], row["memory_share"], row["tier"]) == (9088, 0.125, 0.5, PROD)
    assert [
        row[name] for name in ("cpu_mean", "memory_mean", "cpu_limit", "memory_limit", "scheduled_us", "machine_id")
    ] == [None] * 6


def test_limits_of_a_run_are_those_of_its_own_batch_task(tmp_path: Path) -> None:
    tasks = [TASK, "100,900,5,10,3,Terminated,200,0.02", "100,900,6,9,3,Waiting,,"]
    runs = [RUN, RUN.replace("5,9", "5,10"), RUN.replace("5,9", "6,9"), RUN.replace("5,9", "7,9")]
    rows = contents(take(tmp_path / "trace", {"batch_task": tasks, "batch_instance": runs}))["usage"]
    limits = {row["instance_index"]: (row["cpu_limit"], row["memory_limit"]) for row in rows}
    assert [limits[hashed(run)] for run in runs] == [(0.5, 0.008), (2.0, 0.02), (None, None), (None, None)]


def test_records_that_agree_in_every_column_are_one_and_retries_are_each_their_own(tmp_path: Path) -> None:
    retry = RUN.replace("Terminated,1,2", "Terminated,2,2")
    dataset = take(tmp_path / "trace", {"batch_instance": [RUN, retry, RUN]})
    assert {row["instance_index"] for row in contents(dataset)["usage"]} == {hashed(RUN), hashed(retry)}
    assert dataset.manifest["counts"]["duplicate_windows"] == 1


def test_neither_the_order_of_columns_nor_a_header_nor_gzip_changes_a_row(tmp_path: Path) -> None:
    expected = contents(take(tmp_path / "plain", GOLDEN))
    turned = {name: [",".join(line.split(",")[::-1]) for line in lines] for name, lines in GOLDEN.items()}
    assert contents(take(tmp_path / "turned", turned, schema_text(tuple(COLUMNS)))) == expected
    headed = {name: [", ".join(COLUMNS[name]), *lines] for name, lines in GOLDEN.items()}
    dataset = take(tmp_path / "headed", headed)
    assert contents(dataset) == expected
    assert rejects(dataset) == set()
    folder = write(tmp_path / "packed", GOLDEN)
    for file in folder.glob("[bcs]*_*.csv"):
        (folder / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    config = IngestConfig(trace="alibaba-2017", buckets=3)
    assert contents(ingest(folder, tmp_path / "packed-out", config).dataset).keys() == expected.keys()


def test_a_split_table_in_any_order_gives_the_same_rows(tmp_path: Path) -> None:
    runs = [RUN.replace("700", str(end)) for end in range(300, 340)]
    whole = contents(take(tmp_path / "whole", {"batch_task": [TASK], "batch_instance": runs}))
    parts = {"batch_instance-0": runs[:15:-1], "batch_instance-1": runs[15::-1]}
    assert contents(take(tmp_path / "parts", {"batch_task": [TASK], **parts})) == whole
    assert len(whole["usage"]) == 40


def test_sums_by_task_and_by_machine_are_those_of_the_raw_rows(tmp_path: Path) -> None:
    runs = [
        f"{k},{k + 1 + k % 7},{k % 5},{k % 3},{k % 4},Terminated,1,1,{k / 8},{k / 16},0.5,0.25" for k in range(1, 301)
    ]
    machines = [f"{300 * k},{k % 3},{k % 100},{k % 90},5,1,2,3" for k in range(300)]
    used = [f"{300 * k},{k % 9},{k % 100},{k % 90},5,1,2,3,1,1,1,1" for k in range(300)]
    created = [f"0,Create,{k},7,{k + 1},0.5,1,0|1" for k in range(9)]
    tables = {"batch_instance": runs, "server_usage": machines, "container_usage": used, "container_event": created}
    rows = contents(take(tmp_path / "trace", tables, buckets=4))
    raw: dict[str, dict[Any, list[float]]] = {name: defaultdict(list) for name in ("task", "machine", "share")}
    for fields in (line.split(",") for line in runs):
        raw["task"][(int(fields[2]) + 1) * 2**32 + int(fields[3])].append(float(fields[9]))
        raw["machine"][int(fields[4])].append(float(fields[9]))
    for fields in (line.split(",") for line in used):
        raw["task"][int(fields[1])].append(float(fields[2]) / 100 * (int(fields[1]) + 1))
    for fields in (line.split(",") for line in machines):
        raw["share"][int(fields[1])].append(float(fields[2]) / 100)
    got: dict[str, dict[Any, list[float]]] = {name: defaultdict(list) for name in raw}
    for row in rows["usage"]:
        got["task"][row["collection_id"]].append(row["cpu_mean"])
        if row["tier"] == BEB:
            got["machine"][row["machine_id"]].append(row["cpu_mean"])
    for row in rows["machine_usage"]:
        got["share"][row["machine_id"]].append(row["cpu_share"])
    for name, groups in raw.items():
        assert {key: math.fsum(values) for key, values in got[name].items()} == {
            key: math.fsum(values) for key, values in groups.items()
        }


def test_without_schema_csv_the_error_names_it_and_the_remedy(tmp_path: Path) -> None:
    folder = write(tmp_path / "trace", GOLDEN)
    (folder / "schema.csv").unlink()
    with pytest.raises(SchemaError, match=r"schema\.csv: no such file.*take schema\.csv as published next to the"):
        alibaba_2017(folder)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch_task.csv,6, status", "batch_task.csv,6, mood", "column 'mood' of batch_task .*lacks columns status"),
        (
            "server_event.csv,7, normalized disk space, ANY, YES\n",
            "",
            "server_event lacks columns normalized disk space",
        ),
        ("batch_task.csv,6, status", "batch_task.csv,7, status", "batch_task: field numbers must be 1 to 8, each once"),
        (
            "batch_task.csv,6, status",
            "batch_task.csv,6, status\nbatch_task.csv,6, status",
            "status appears more than once",
        ),
        (
            "server_event.csv,1, t",
            "rack_event.csv,1, t",
            "unknown table 'rack_event.csv'.*server_event lacks columns t",
        ),
        ("file name,field number", "file,number", "the first line must name file name, field number, content"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused_and_every_column_named(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "trace", GOLDEN, schema_text().replace(old, new))
    with pytest.raises(SchemaError, match=message):
        alibaba_2017(folder)


def test_the_schema_decides_the_dataset_and_its_notes_are_kept(tmp_path: Path) -> None:
    dataset = take(tmp_path / "trace", GOLDEN)
    turned = take(tmp_path / "turned", GOLDEN, schema_text().replace("server_event.csv,", "server_event.csv ,"))
    assert dataset.fingerprint != turned.fingerprint
    assert any("percent of its request" in note for note in dataset.manifest["notes"])
    assert "cpu_percentiles" in dataset.manifest["lacks"]


def test_the_published_schema_is_read_in_its_order(real_data: Path) -> None:
    orders = {table.raw: table.order for table in alibaba_2017(real_data / "alibaba_2017").tables}
    assert orders["batch_instance"] == (
        "start_timestamp", "end_timestamp", "job_id", "task_id", "machine_id", "status", "seq_no", "total_seq_no",
        "real_cpu_max", "real_cpu_avg", "real_mem_max", "real_mem_avg",
    )  # fmt: skip
    assert orders["container_usage"] == (
        "ts", "instance_id", "cpu_util", "mem_util", "disk_util", "load1", "load5", "load15", "avg_cpi", "avg_mpki",
        "max_cpi", "max_mpki",
    )  # fmt: skip


def test_the_published_batch_tasks_arrive_whole(real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "alibaba_2017"
    with gzip.open(folder / "batch_task.csv.gz", "rt", newline="") as lines:
        raw = list(csv.reader(lines))[1:]  # published with a header line
    config = IngestConfig(trace="alibaba-2017", buckets=1)
    dataset = ingest(folder, tmp_path / "out", config).dataset
    table = dataset.table("collections")
    assert dataset.n_windows == 0
    assert rejects(dataset) == set()
    submits = {row["collection_id"]: row for row in table.to_pylist() if row["event_type"] == EVENT.SUBMIT}
    states = Counter(row["event_type"] for row in table.to_pylist() if row["event_type"] != EVENT.SUBMIT)
    names = {"Terminated": EVENT.FINISH, "Failed": EVENT.FAIL, "Running": EVENT.SCHEDULE, "Waiting": EVENT.QUEUE}
    assert states == Counter(names[row[5]] for row in raw)
    assert len(submits) == len(raw) == len({(row[2], row[3]) for row in raw})
    for row in raw:
        got = submits[(int(row[2]) + 1) * 2**32 + int(row[3])]
        assert got["time_us"] == max(int(row[0]), 0) * 1_000_000
        assert got["instances"] == int(row[4])
        assert got["cpu_limit"] == (float(row[6]) / 100 if row[6] else None)
        assert got["memory_limit"] == (float(row[7]) if row[7] else None)
    assert dataset.manifest["defects"] == {
        "batch_task: negative time, taken as before the trace": sum(int(row[0]) < 0 or int(row[1]) < 0 for row in raw),
        "batch_task: last modified before it was created": sum(max(int(r[1]), 0) < max(int(r[0]), 0) for r in raw),
        "batch_task: plan_cpu or plan_mem is missing": sum(not row[6] or not row[7] for row in raw),
    }
