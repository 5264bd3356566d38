"""The v3 reader: golden rows of all five tables in every published layout, enums, flags, and the real folder."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.windows import demand, peak_cpu

Row = dict[str, Any]
Rows = dict[str, list[Row]]

JOB, ALLOC_SET, PARENT, MACHINE = 2**53 + 1, 2**62 + 1, 2**60 + 3, 2**61 + 1
"""Ids that no double holds."""
END_OF_TIME = 2**63 - 1
SWITCH = "0kdfKLeqkk1sN8xXnJ8f63bMq+ciUu2ztSu53+pf1HM="
PERCENTILES = [0.0, 0.0078125, 0.015625, 0.03125, 0.0625, 0.125, 0.15625, 0.1875, 0.25, 0.3125, 0.5]
TAIL = [0.3125, 0.328125, 0.34375, 0.359375, 0.375, 0.390625, 0.40625, 0.4375, 0.46875]

RESOURCES = pa.struct([("memory", pa.float64()), ("cpus", pa.float64())])


def layout(enum: pa.DataType) -> dict[str, pa.Schema]:
    """Return the five tables as an export to parquet lays them out: lists of three levels, every field nullable."""
    constraint = pa.struct([("relation", enum), ("value", pa.string()), ("name", pa.string())])
    integers, doubles, strings = (dict.fromkeys(names, type_) for names, type_ in (
        (("time", "collection_id", "priority", "alloc_collection_id"), pa.int64()),
        (("assigned_memory", "page_cache_memory", "cycles_per_instruction", "memory_accesses_per_instruction",
          "sample_rate"), pa.float64()),
        (("user", "collection_name", "collection_logical_name"), pa.string()),
    ))  # fmt: skip
    thing = integers | dict.fromkeys(("type", "scheduling_class", "missing_type", "collection_type"), enum)
    fields = {
        "collection_events": thing | strings | {
            "parent_collection_id": pa.int64(), "start_after_collection_ids": pa.list_(pa.int64()),
            "max_per_machine": pa.int64(), "max_per_switch": pa.int64(), "vertical_scaling": enum, "scheduler": enum,
        },
        "instance_events": thing | {
            "instance_index": pa.int64(), "machine_id": pa.int64(), "alloc_instance_index": pa.int64(),
            "resource_request": RESOURCES, "constraint": pa.list_(constraint),
        },
        "machine_events": {
            "time": pa.int64(), "machine_id": pa.int64(), "type": enum, "switch_id": pa.string(),
            "capacity": RESOURCES, "platform_id": pa.string(), "missing_data_reason": enum,
        },
        "machine_attributes": {
            "time": pa.int64(), "machine_id": pa.int64(), "name": pa.string(), "value": pa.string(),
            "deleted": pa.bool_(),
        },
        "instance_usage": doubles | {
            "start_time": pa.int64(), "end_time": pa.int64(), "collection_id": pa.int64(),
            "instance_index": pa.int64(), "machine_id": pa.int64(), "alloc_collection_id": pa.int64(),
            "alloc_instance_index": pa.int64(), "collection_type": enum, "average_usage": RESOURCES,
            "maximum_usage": RESOURCES, "random_sample_usage": RESOURCES,
            "cpu_usage_distribution": pa.list_(pa.float64()), "tail_cpu_usage_distribution": pa.list_(pa.float64()),
        },
    }  # fmt: skip
    shuffled = random.Random(3)
    return {name: pa.schema(shuffled.sample([*columns.items()], len(columns))) for name, columns in fields.items()}


RAW: Rows = {
    "collection_events": [
        {"time": 0, "type": 0, "collection_id": JOB, "scheduling_class": 3, "missing_type": 3, "collection_type": 0,
         "priority": 200, "alloc_collection_id": ALLOC_SET, "user": "u+/=", "collection_name": "n1",
         "collection_logical_name": "l1", "parent_collection_id": PARENT,
         "start_after_collection_ids": [PARENT, 2**62 + 5], "max_per_machine": 2, "max_per_switch": 5,
         "vertical_scaling": 2, "scheduler": 1},
        {"time": 700_000_001, "type": 10, "collection_id": JOB, "scheduling_class": 3, "missing_type": 0,
         "collection_type": 0, "priority": 359, "alloc_collection_id": ALLOC_SET, "user": "u+/=",
         "collection_name": "n1", "collection_logical_name": "l2", "parent_collection_id": 0,
         "start_after_collection_ids": [], "max_per_machine": 0, "max_per_switch": 0, "vertical_scaling": 0,
         "scheduler": 0},
        {"time": END_OF_TIME, "type": 7, "collection_id": ALLOC_SET, "scheduling_class": 0, "collection_type": 1,
         "priority": 0, "alloc_collection_id": 0},
    ],
    "instance_events": [
        {"time": 0, "type": 0, "collection_id": JOB, "scheduling_class": 3, "missing_type": 3, "collection_type": 0,
         "priority": 200, "alloc_collection_id": ALLOC_SET, "instance_index": 0, "machine_id": 0,
         "alloc_instance_index": -1, "resource_request": {"cpus": 0.5, "memory": 0.25},
         "constraint": [{"name": "o/", "value": "2", "relation": 5}, {"name": "o/", "value": "9", "relation": 4},
                        {"name": "o/", "value": "", "relation": 0}, {"name": "p", "value": None, "relation": 6}]},
        {"time": 0, "type": 3, "collection_id": JOB, "scheduling_class": 3, "missing_type": 0, "collection_type": 0,
         "priority": 200, "alloc_collection_id": ALLOC_SET, "instance_index": 0, "machine_id": MACHINE,
         "alloc_instance_index": 4, "resource_request": {"cpus": 0.5, "memory": 0.25}, "constraint": []},
        {"time": 1_100_000_000, "type": 10, "collection_id": JOB, "scheduling_class": 2, "collection_type": 0,
         "priority": 360, "alloc_collection_id": ALLOC_SET, "instance_index": 0, "machine_id": MACHINE,
         "alloc_instance_index": 4, "resource_request": {"cpus": 0.75, "memory": None}},
        {"time": END_OF_TIME, "type": 8, "collection_id": JOB, "scheduling_class": 1, "missing_type": 2,
         "collection_type": 0, "priority": 450, "alloc_collection_id": ALLOC_SET, "instance_index": 0,
         "machine_id": MACHINE, "alloc_instance_index": 4, "resource_request": {"cpus": 1.0, "memory": 1.0}},
        {"time": 650_000_000, "type": 3, "collection_id": ALLOC_SET, "scheduling_class": 0, "collection_type": 1,
         "priority": 116, "alloc_collection_id": 0, "instance_index": 4, "machine_id": -1,
         "alloc_instance_index": -1, "resource_request": {}},
    ],
    "machine_events": [
        {"time": 0, "machine_id": MACHINE, "type": 1, "switch_id": SWITCH, "capacity": {"cpus": 1.0, "memory": 0.5},
         "platform_id": "JQ1t="},
        {"time": 800_000_000, "machine_id": MACHINE, "type": 3, "switch_id": SWITCH,
         "capacity": {"cpus": 0.75, "memory": 0.5}, "platform_id": "JQ1t=", "missing_data_reason": 1},
        {"time": 900_000_000, "machine_id": MACHINE, "type": 2, "switch_id": SWITCH, "capacity": {},
         "missing_data_reason": 0},
        {"time": 950_000_000, "machine_id": 7, "type": 0},
    ],
    "machine_attributes": [
        {"time": 0, "machine_id": MACHINE, "name": "a", "value": "v0=", "deleted": False},
        {"time": 600_000_001, "machine_id": MACHINE, "name": "a", "value": "", "deleted": True},
        {"time": 600_000_001, "machine_id": MACHINE, "name": "b", "value": "12", "deleted": False},
    ],
    "instance_usage": [
        {"start_time": 900_000_000, "end_time": 1_200_000_000, "collection_id": JOB, "instance_index": 0,
         "machine_id": MACHINE, "alloc_collection_id": ALLOC_SET, "alloc_instance_index": 4, "collection_type": 0,
         "average_usage": {"cpus": 0.125, "memory": 0.0625}, "maximum_usage": {"cpus": 0.5, "memory": 0.09375},
         "random_sample_usage": {"cpus": 0.15625}, "assigned_memory": 0.1875, "page_cache_memory": 0.03125,
         "cycles_per_instruction": 1.625, "memory_accesses_per_instruction": 0.0078125, "sample_rate": 0.998,
         "cpu_usage_distribution": PERCENTILES, "tail_cpu_usage_distribution": TAIL},
        {"start_time": 1_200_000_000, "end_time": 1_387_000_000, "collection_id": JOB, "instance_index": 0,
         "machine_id": MACHINE, "alloc_collection_id": ALLOC_SET, "alloc_instance_index": 0, "collection_type": 0,
         "average_usage": {"cpus": 0.0, "memory": 0.0}, "maximum_usage": {"cpus": 0.25}, "random_sample_usage": {},
         "cpu_usage_distribution": [], "tail_cpu_usage_distribution": []},
        {"start_time": 300_000_000, "end_time": 600_000_000, "collection_id": JOB, "instance_index": 12,
         "machine_id": 0, "alloc_collection_id": 0, "alloc_instance_index": -1, "collection_type": 1,
         "average_usage": {"cpus": 0.375}},
    ],
}  # fmt: skip

EXPECTED: Rows = {
    "collections": [
        {"collection_id": JOB, "time_us": 0, "event_type": 0, "missing_type": 3, "collection_type": 0, "priority": 200,
         "tier": 3, "scheduling_class": 3, "alloc_collection_id": ALLOC_SET, "user_id": "u+/=", "name_id": "n1",
         "logical_name_id": "l1", "parent_collection_id": PARENT, "start_after": [PARENT, 2**62 + 5],
         "max_per_machine": 2, "max_per_switch": 5, "vertical_scaling": 2, "scheduler": 1},
        {"collection_id": JOB, "time_us": 700_000_001, "event_type": 10, "collection_type": 0, "priority": 359,
         "tier": 3, "scheduling_class": 3, "alloc_collection_id": ALLOC_SET, "user_id": "u+/=", "name_id": "n1",
         "logical_name_id": "l2", "vertical_scaling": 0, "scheduler": 0},
        {"collection_id": ALLOC_SET, "time_us": END_OF_TIME, "event_type": 7, "collection_type": 1, "priority": 0,
         "tier": 0, "scheduling_class": 0},
    ],
    "events": [
        {"collection_id": JOB, "instance_index": 0, "time_us": 0, "event_type": 0, "missing_type": 3,
         "collection_type": 0, "alloc_collection_id": ALLOC_SET, "cpu_limit": 0.5, "memory_limit": 0.25,
         "priority": 200, "tier": 3, "scheduling_class": 3},
        {"collection_id": JOB, "instance_index": 0, "time_us": 0, "event_type": 3, "machine_id": MACHINE,
         "collection_type": 0, "alloc_collection_id": ALLOC_SET, "alloc_instance_index": 4, "cpu_limit": 0.5,
         "memory_limit": 0.25, "priority": 200, "tier": 3, "scheduling_class": 3},
        {"collection_id": JOB, "instance_index": 0, "time_us": 1_100_000_000, "event_type": 10, "machine_id": MACHINE,
         "collection_type": 0, "alloc_collection_id": ALLOC_SET, "alloc_instance_index": 4, "cpu_limit": 0.75,
         "priority": 360, "tier": 4, "scheduling_class": 2},
        {"collection_id": JOB, "instance_index": 0, "time_us": END_OF_TIME, "event_type": 8, "missing_type": 2,
         "machine_id": MACHINE, "collection_type": 0, "alloc_collection_id": ALLOC_SET, "alloc_instance_index": 4,
         "cpu_limit": 1.0, "memory_limit": 1.0, "priority": 450, "tier": 4, "scheduling_class": 1},
        {"collection_id": ALLOC_SET, "instance_index": 4, "time_us": 650_000_000, "event_type": 3, "machine_id": -1,
         "collection_type": 1, "priority": 116, "tier": 2, "scheduling_class": 0},
    ],
    "constraints": [
        {"collection_id": JOB, "instance_index": 0, "time_us": 0, "name": "o/", "value": "", "relation": 0},
        {"collection_id": JOB, "instance_index": 0, "time_us": 0, "name": "o/", "value": "2", "relation": 5},
        {"collection_id": JOB, "instance_index": 0, "time_us": 0, "name": "o/", "value": "9", "relation": 4},
        {"collection_id": JOB, "instance_index": 0, "time_us": 0, "name": "p", "value": None, "relation": 6},
    ],
    "machines": [
        {"time_us": 0, "machine_id": MACHINE, "event_type": 1, "cpu_capacity": 1.0, "memory_capacity": 0.5,
         "platform": "JQ1t=", "switch_id": SWITCH},
        {"time_us": 800_000_000, "machine_id": MACHINE, "event_type": 3, "cpu_capacity": 0.75, "memory_capacity": 0.5,
         "platform": "JQ1t=", "switch_id": SWITCH, "missing_type": 1},
        {"time_us": 900_000_000, "machine_id": MACHINE, "event_type": 2, "switch_id": SWITCH},
        {"time_us": 950_000_000, "machine_id": 7, "event_type": 0},
    ],
    "attributes": [
        {"time_us": 0, "machine_id": MACHINE, "name": "a", "value": "v0=", "deleted": False},
        {"time_us": 600_000_001, "machine_id": MACHINE, "name": "a", "value": "", "deleted": True},
        {"time_us": 600_000_001, "machine_id": MACHINE, "name": "b", "value": "12", "deleted": False},
    ],
    "usage": [
        {"collection_id": JOB, "instance_index": 0, "start_us": 900_000_000, "end_us": 1_200_000_000,
         "machine_id": MACHINE, "collection_type": 0, "alloc_collection_id": ALLOC_SET, "alloc_instance_index": 4,
         "cpu_mean": 0.125, "cpu_max": 0.5, "cpu_sample": 0.15625, "cpu_percentiles": PERCENTILES,
         "cpu_tail_percentiles": TAIL, "memory_mean": 0.0625, "memory_max": 0.09375, "memory_assigned": 0.1875,
         "page_cache": 0.03125, "cpi": 1.625, "mai": 0.0078125, "sample_rate_hz": 0.998, "scheduled_us": 0,
         "cpu_limit": 0.5, "memory_limit": 0.25, "priority": 200, "tier": 3, "scheduling_class": 3},
        {"collection_id": JOB, "instance_index": 0, "start_us": 1_200_000_000, "end_us": 1_387_000_000,
         "machine_id": MACHINE, "collection_type": 0, "alloc_collection_id": ALLOC_SET, "alloc_instance_index": 0,
         "cpu_mean": 0.0, "cpu_max": 0.25, "memory_mean": 0.0, "scheduled_us": 0, "cpu_limit": 0.75,
         "memory_limit": 0.25, "priority": 360, "tier": 4, "scheduling_class": 2},
        {"collection_id": JOB, "instance_index": 12, "start_us": 300_000_000, "end_us": 600_000_000,
         "collection_type": 1, "cpu_mean": 0.375},
    ],
    "tasks": [
        {"collection_id": JOB, "instance_index": 0, "tier": 4, "scheduling_class": 2, "collection_type": 0,
         "user_id": "u+/=", "logical_name_id": "l2", "first_seen_us": 900_000_000, "last_seen_us": 1_387_000_000},
        {"collection_id": JOB, "instance_index": 12, "collection_type": 1, "user_id": "u+/=", "logical_name_id": "l2",
         "first_seen_us": 300_000_000, "last_seen_us": 600_000_000},
        {"collection_id": ALLOC_SET, "instance_index": 4, "tier": 2, "scheduling_class": 0, "collection_type": 1},
    ],
}  # fmt: skip
"""Rows that the rows above become, by hand; a column left out is null. A limit that an event leaves out holds on."""

EVENT_NAMES = ("SUBMIT", "QUEUE", "ENABLE", "SCHEDULE", "EVICT", "FAIL", "FINISH", "KILL", "LOST", "UPDATE_PENDING",
               "UPDATE_RUNNING")  # fmt: skip
MISSING = ("MISSING_TYPE_NONE", "SNAPSHOT_BUT_NO_TRANSITION", "NO_SNAPSHOT_OR_TRANSITION", "EXISTS_BUT_NO_CREATION",
           "TRANSITION_MISSING_STEP", "TOO_MANY_EVENTS")  # fmt: skip
SCALINGS = ("VERTICAL_SCALING_SETTING_UNKNOWN", "VERTICAL_SCALING_OFF", "VERTICAL_SCALING_CONSTRAINED",
            "VERTICAL_SCALING_FULLY_AUTOMATED")  # fmt: skip
CLASSES = ("MOST_INSENSITIVE", "INSENSITIVE", "SENSITIVE", "MOST_SENSITIVE")
RELATIONS = ("EQUAL", "NOT_EQUAL", "LESS_THAN", "GREATER_THAN", "LESS_THAN_EQUAL", "GREATER_THAN_EQUAL", "PRESENT",
             "NOT_PRESENT")  # fmt: skip
NAMES = {
    "type": EVENT_NAMES, "missing_type": MISSING, "vertical_scaling": SCALINGS, "scheduling_class": CLASSES,
    "scheduler": ("SCHEDULER_DEFAULT", "SCHEDULER_BATCH"), "collection_type": ("JOB", "ALLOC_SET"),
    "missing_data_reason": ("MISSING_DATA_REASON_NONE", "SNAPSHOT_BUT_NO_TRANSITION"), "relation": RELATIONS,
}  # fmt: skip
"""The protocol buffer's names of each enum's values, from 0."""
MACHINE_EVENT_NAMES = ("EVENT_TYPE_UNKNOWN", "ADD", "REMOVE", "UPDATE")


def with_enums(table: str, rows: Sequence[Row], write: Callable[[Sequence[str], int], Any]) -> list[Row]:
    """Return rows with every enum written by ``write`` from its names and its number."""
    names = NAMES | ({"type": MACHINE_EVENT_NAMES} if table == "machine_events" else {})

    def one(row: Row) -> Row:
        out = {k: write(names[k], v) if k in names and v is not None else v for k, v in row.items()}
        if row.get("constraint"):
            out["constraint"] = [one(constraint) for constraint in row["constraint"]]
        return out

    return [one(row) for row in rows]


def as_strings(value: Any) -> Any:
    """Return a value as an export to JSON has it: integers are strings, what is null or empty is left out."""
    if isinstance(value, dict):
        return {k: as_strings(v) for k, v in value.items() if v is not None and v != []}
    if isinstance(value, list):
        return [as_strings(v) for v in value]
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def write_raw(folder: Path, raw: Rows, kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for table, rows in raw.items():
        if kind == "json.gz":
            text = "".join(json.dumps(as_strings(row)) + "\n" for row in rows)
            (folder / f"{table}-000000000000.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        elif kind == "json":  # numbers as numbers, names of enums, explicit nulls, spaces, one file that has no number
            columns = layout(pa.int64())[table].names
            named = with_enums(table, rows, lambda names, number: names[number])
            full = [{name: row.get(name) for name in columns} for row in named]
            (folder / f"{table}.json").write_text("".join(f"  {json.dumps(row)}\r\n" for row in full))
        else:
            by_name = kind == "parquet, enums by name"
            if by_name:
                rows = with_enums(table, rows, lambda names, number: names[number])
            schema = layout(pa.string() if by_name else pa.int64())[table]
            for shard in range(2):
                content = pa.Table.from_pylist(rows[shard::2], schema=schema)
                pq.write_table(content, folder / f"{table}-{shard:012d}.parquet")
    return folder


def read(folder: Path, out: Path, share: float = 0.001, buckets: int = 1) -> Dataset:
    return ingest(folder, out, IngestConfig(buckets=buckets, max_reject_share=share)).dataset


def tables(dataset: Dataset) -> dict[str, pa.Table]:
    bucketed = {"usage": dataset.usage, "events": dataset.events, "constraints": dataset.constraints}
    return {
        **{name: pa.concat_tables(of(b) for b in range(dataset.n_buckets)) for name, of in bucketed.items()},
        **{name: dataset.table(name) for name in ("tasks", "collections", "machines", "attributes")},
    }


def rejects(dataset: Dataset) -> list[tuple[int, str]]:
    found = pq.read_table(dataset.path / "rejects" / "rejects.parquet").to_pylist()
    return [(row[s.REJECT_LINE], row[s.REJECT_REASON]) for row in found]


KINDS = ("json.gz", "json", "parquet", "parquet, enums by name")


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_all_five_tables_arrives_as_worked_by_hand(tmp_path: Path, kind: str) -> None:
    dataset = read(write_raw(tmp_path / "cell", RAW, kind), tmp_path / "out")
    found = tables(dataset)
    assert rejects(dataset) == []
    assert dataset.manifest["defects"] == {}
    for name, rows in EXPECTED.items():
        assert found[name].schema.equals(s.TABLES[name]), name
        assert found[name].to_pylist() == [{column: row.get(column) for column in s.TABLES[name].names}
                                           for row in rows], name  # fmt: skip


def test_the_golden_rows_use_every_field_of_the_format_and_fill_every_column() -> None:
    for table, schema in layout(pa.int64()).items():
        assert set().union(*RAW[table]) == set(schema.names)
    for name, rows in EXPECTED.items():
        assert set().union(*rows) == set(s.TABLES[name].names)


def test_the_three_layouts_give_the_very_same_files_and_another_fingerprint(tmp_path: Path) -> None:
    made = [read(write_raw(tmp_path / kind, RAW, kind), tmp_path / f"{kind} out", buckets=3) for kind in KINDS]
    contents = [
        {p.relative_to(d.path): p.read_bytes() for p in d.path.rglob("*.parquet") if p.name != "rejects.parquet"}
        for d in made
    ]
    assert len(contents[0]) == 3 * 3 + 5
    assert all(content == contents[0] for content in contents)
    assert len({dataset.fingerprint for dataset in made}) == len(made)


ENUMS = [
    *(("collection_events", "type", names, [*range(11)], s.EVENT_TYPE) for names in (EVENT_NAMES,)),
    ("collection_events", "missing_type", MISSING, [None, 1, 2, 3, 4, 5], s.MISSING_TYPE),
    ("collection_events", "missing_type", ["NONE", *(f"MISSING_TYPE_{name}" for name in MISSING[1:])],
     [None, 1, 2, 3, 4, 5], s.MISSING_TYPE),
    ("collection_events", "collection_type", ["JOB", "ALLOC_SET"], [0, 1], s.COLLECTION_TYPE),
    ("collection_events", "scheduling_class", CLASSES, [0, 1, 2, 3], s.SCHEDULING_CLASS),
    ("collection_events", "vertical_scaling", SCALINGS, [0, 1, 2, 3], s.VERTICAL_SCALING),
    ("collection_events", "vertical_scaling", ["UNKNOWN", "OFF", "CONSTRAINED", "FULLY_AUTOMATED"], [0, 1, 2, 3],
     s.VERTICAL_SCALING),
    ("collection_events", "scheduler", ["SCHEDULER_DEFAULT", "SCHEDULER_BATCH"], [0, 1], s.SCHEDULER),
    ("collection_events", "scheduler", ["DEFAULT", "BATCH"], [0, 1], s.SCHEDULER),
    ("machine_events", "type", MACHINE_EVENT_NAMES, [0, 1, 2, 3], s.EVENT_TYPE),
    ("machine_events", "missing_data_reason", NAMES["missing_data_reason"], [None, 1], s.MISSING_TYPE),
    ("machine_events", "missing_data_reason", ["NONE", "MISSING_DATA_REASON_SNAPSHOT_BUT_NO_TRANSITION"], [None, 1],
     s.MISSING_TYPE),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["json.gz", "parquet"])
@pytest.mark.parametrize(("table", "field", "names", "codes", "column"), ENUMS)
def test_an_enum_is_its_number_its_number_in_quotes_or_its_name(
    tmp_path: Path, kind: str, table: str, field: str, names: list[str], codes: list[int | None], column: str
) -> None:
    written: list[Any] = [*range(len(names)), *map(str, range(len(names))), *names, None]
    rows = [{"time": k, "collection_id": 1, "machine_id": 1, field: value} for k, value in enumerate(written)]
    drop = "machine_id" if table == "collection_events" else "collection_id"
    rows = [{k: v for k, v in row.items() if k != drop} for row in rows]
    folder = tmp_path / "cell"
    folder.mkdir()
    if kind == "parquet":
        strings = [row | {field: None if row[field] is None else str(row[field])} for row in rows]
        pq.write_table(pa.Table.from_pylist(strings), folder / f"{table}-000000000000.parquet")
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{table}-000000000000.json.gz").write_bytes(gzip.compress(text.encode()))
    dataset = read(folder, tmp_path / "out")
    name = "collections" if table == "collection_events" else "machines"
    assert dataset.table(name)[column].to_pylist() == [*codes * 3, None]


FIELDS = {
    "collection_events": ("type", "missing_type", "collection_type", "scheduling_class", "vertical_scaling",
                          "scheduler"),
    "instance_events": ("type", "missing_type", "collection_type", "scheduling_class"),
    "machine_events": ("type", "missing_data_reason"),
    "instance_usage": ("collection_type",),
}  # fmt: skip
NONSENSE = ["11", "-1", "3.2", "3.0", "03", " 3", "SUBMITTED", "SCHEDULER_", "true"]


@pytest.mark.parametrize("kind", ["json.gz", "parquet"])
@pytest.mark.parametrize("table", FIELDS)
def test_an_enum_that_does_not_exist_is_a_reject_and_never_null_or_rounded(
    tmp_path: Path, table: str, kind: str
) -> None:
    good = {k: v if not isinstance(v, int) or k not in NAMES else str(v) for k, v in RAW[table][0].items()}
    good.pop("constraint", None)
    bad = [(field, value) for field in FIELDS[table] for value in NONSENSE]
    rows = [good, *(good | {field: value} for field, value in bad)]
    if kind == "json.gz":
        rows += [good | {field: 3.2} for field in FIELDS[table]]
        bad += [(field, "3.2") for field in FIELDS[table]]
        write_raw(tmp_path / "cell", {table: rows}, kind)
    else:
        (tmp_path / "cell").mkdir()
        shape = layout(pa.string())[table]
        pq.write_table(pa.Table.from_pylist(rows, schema=shape), tmp_path / "cell" / f"{table}-000000000000.parquet")
    dataset = read(tmp_path / "cell", tmp_path / "out", share=1.0)

    def reason(field: str) -> str:
        event = table == "instance_events" and field == "type"
        return "type is not an event type" if event else f"{field} is no known value"

    assert rejects(dataset) == [(line, reason(field)) for line, (field, _) in enumerate(bad, start=2)]


def test_a_missing_type_that_is_empty_is_none(tmp_path: Path) -> None:
    raw = {"collection_events": [RAW["collection_events"][0] | {"missing_type": ""}],
           "machine_events": [RAW["machine_events"][1] | {"missing_data_reason": ""}]}  # fmt: skip
    dataset = read(write_raw(tmp_path / "cell", raw, "json.gz"), tmp_path / "out")
    assert dataset.table("collections")[s.MISSING_TYPE].to_pylist() == [None]
    assert dataset.table("machines")[s.MISSING_TYPE].to_pylist() == [None]


@pytest.mark.parametrize("kind", KINDS)
def test_every_relation_of_a_constraint_arrives_and_an_unknown_one_sets_its_event_aside(
    tmp_path: Path, kind: str
) -> None:
    event = RAW["instance_events"][0]
    known = [{"name": "a", "value": f"{k}", "relation": k} for k in range(8)]
    raw = {"instance_events": [event | {"constraint": known}]}
    folder = write_raw(tmp_path / "cell", raw, kind)
    bad = [{"name": "a", "value": "1", "relation": relation} for relation in ("8", "3.2", "LESS", None)]
    text = "".join(json.dumps(as_strings(event | {"constraint": [known[0], one]})) + "\n" for one in bad)
    (folder / "instance_events-000000000009.json").write_text(text)
    dataset = read(folder, tmp_path / "out", share=1.0)
    found = dataset.constraints(0).to_pylist()
    assert [(row[s.ATTRIBUTE_VALUE], row[s.RELATION]) for row in found] == [(f"{k}", k) for k in range(8)]
    assert rejects(dataset) == [(line, "constraint has no known relation") for line in (1, 2, 3, 4)]


def test_an_absent_value_of_a_constraint_is_null_and_an_empty_one_is_empty(tmp_path: Path) -> None:
    constraint = [{"name": "a", "relation": 0}, {"name": "a", "value": "", "relation": 0}]
    raw = {"instance_events": [RAW["instance_events"][0] | {"constraint": constraint}]}
    dataset = read(write_raw(tmp_path / "cell", raw, "json.gz"), tmp_path / "out")
    assert sorted(map(str, dataset.constraints(0)[s.ATTRIBUTE_VALUE].to_pylist())) == ["", "None"]


def test_priorities_fall_into_tiers_at_their_documented_borders(tmp_path: Path) -> None:
    borders = [0, 99, 100, 115, 116, 119, 120, 359, 360, 450]
    first = RAW["collection_events"][0]
    raw = {"collection_events": [first | {"time": k, "priority": p} for k, p in enumerate(borders)]}
    dataset = read(write_raw(tmp_path / "cell", raw, "json.gz"), tmp_path / "out")
    tiers = [s.TIERS[tier] for tier in dataset.table("collections")[s.TIER].to_pylist()]
    assert tiers == ["free", "free", "beb", "beb", "mid", "mid", "prod", "prod", "mon", "mon"]


def test_an_event_at_0_is_in_force_at_any_start_and_one_after_the_trace_in_no_window(tmp_path: Path) -> None:
    window, event = RAW["instance_usage"][0], RAW["instance_events"][1]
    starts = [1, 300_000_000, 2_678_000_000_000]
    late = [END_OF_TIME, 2**63]  # the second is published, though no signed integer holds it
    raw = {
        "instance_usage": [window | {"start_time": t, "end_time": t + 300_000_000} for t in starts]
        + [window | {"instance_index": 1}],
        "instance_events": [event, *(event | {"time": t, "type": 8, "priority": 0, "resource_request":
                                              {"cpus": 0.125, "memory": 0.125}} for t in late),
                            *(event | {"time": t, "instance_index": 1} for t in late)],
    }  # fmt: skip
    dataset = read(write_raw(tmp_path / "cell", raw, "json.gz"), tmp_path / "out")
    usage = dataset.usage(0).to_pylist()
    policy = (s.SCHEDULED_US, s.CPU_LIMIT, s.MEMORY_LIMIT, s.PRIORITY)
    assert [tuple(row[name] for name in policy) for row in usage[:3]] == [(0, 0.5, 0.25, 200)] * 3
    assert [usage[3][name] for name in policy] == [None] * 4
    assert dataset.events(0)[s.TIME_US].to_pylist() == [0, END_OF_TIME, END_OF_TIME]
    assert dataset.manifest["counts"]["duplicate_events"] == 2  # one time now, so one event


def test_a_task_in_an_alloc_set_keeps_its_place_there_and_minus_one_is_none(tmp_path: Path) -> None:
    window = RAW["instance_usage"][0]
    places = [(ALLOC_SET, 0), (ALLOC_SET, 7), (ALLOC_SET, -1), (ALLOC_SET, None), (0, -1), (0, 0), (0, 7), (None, 7)]
    rows = [window | {"alloc_collection_id": set_, "alloc_instance_index": place, "instance_index": k}
            for k, (set_, place) in enumerate(places)]  # fmt: skip
    expected = [(ALLOC_SET, 0), (ALLOC_SET, 7), (ALLOC_SET, None), (ALLOC_SET, None)] + [(None, None)] * 4
    for kind in KINDS:
        usage = read(write_raw(tmp_path / kind, {"instance_usage": rows}, kind), tmp_path / f"{kind} out").usage(0)
        found = zip(usage[s.ALLOC_COLLECTION_ID].to_pylist(), usage[s.ALLOC_INSTANCE_INDEX].to_pylist(), strict=True)
        assert [*found] == expected, kind


def test_a_vector_of_another_length_is_null_and_counted_and_an_empty_one_only_null(tmp_path: Path) -> None:
    window = RAW["instance_usage"][0]
    rows = [window | {"cpu_usage_distribution": PERCENTILES[:10], "instance_index": 1},
            window | {"tail_cpu_usage_distribution": [*TAIL, 0.5], "instance_index": 2},
            window | {"cpu_usage_distribution": [], "instance_index": 3}, window]  # fmt: skip
    for kind in KINDS:
        folder = write_raw(tmp_path / kind, {"instance_usage": rows}, kind)
        dataset = read(folder, tmp_path / f"{kind} out")
        assert dataset.manifest["defects"] == {"cpu_usage_distribution has not 11 elements": 1,
                                               "tail_cpu_usage_distribution has not 9 elements": 1}  # fmt: skip
        assert [v is None for v in dataset.usage(0)[s.CPU_PERCENTILES].to_pylist()] == [False, True, False, True]
        assert [v is None for v in dataset.usage(0)[s.CPU_TAIL_PERCENTILES].to_pylist()] == [False, False, True, False]


def test_windows_that_cannot_be_as_they_say_are_kept_and_counted(tmp_path: Path) -> None:
    window = RAW["instance_usage"][0]
    start, end = int(window["start_time"]), int(window["end_time"])
    usual = {"average_usage": {"cpus": 0.25, "memory": 0.25}, "maximum_usage": {"cpus": 0.5, "memory": 0.5}}
    oddities: tuple[dict[str, Any], ...] = (
        {"end_time": start + 300_000_001},
        {"maximum_usage": {"cpus": 0.125, "memory": 0.5}},
        {"maximum_usage": {"cpus": 0.5, "memory": 0.125}},
        {"cpu_usage_distribution": [*PERCENTILES[:9], PERCENTILES[10] + 1, PERCENTILES[10]]},
        {"tail_cpu_usage_distribution": [TAIL[8] + 1, *TAIL[1:]]},
        {},
    )
    rows = [window | usual | {"instance_index": k} | changes for k, changes in enumerate(oddities)]
    rows += [rows[5] | {"start_time": start + 100_000_000, "end_time": end}]  # inside the last one
    rows += [rows[5] | {"start_time": end, "end_time": end + 300_000_000}]  # right after both
    for kind in KINDS:
        dataset = read(write_raw(tmp_path / kind, {"instance_usage": rows}, kind), tmp_path / f"{kind} out")
        assert dataset.n_windows == len(rows)
        assert dataset.manifest["defects"] == {
            "a window is longer than the trace's longest": 1,
            "a window begins before an earlier one of its task ends": 1,
            "cpu_max is below cpu_mean": 1, "memory_max is below memory_mean": 1, "cpu_percentiles fall": 1,
            "cpu_tail_percentiles fall": 1,
        }  # fmt: skip


def test_a_window_that_ends_after_the_trace_is_a_reject(tmp_path: Path) -> None:
    """The flag of an event is no time of usage: the periods of training and test are parts of all that lies before."""
    window = RAW["instance_usage"][0]
    rows = [window | {"instance_index": k, "end_time": end} for k, end in enumerate((2**59, 2**59 + 1, END_OF_TIME))]
    for kind in KINDS:
        dataset = read(write_raw(tmp_path / kind, {"instance_usage": rows}, kind), tmp_path / f"{kind} out", share=1.0)
        assert dataset.manifest["rejects"] == {"end_time is past the last time there can be": 2}
        assert dataset.usage(0)[s.END_US].to_pylist() == [2**59]


def test_a_window_that_begins_before_zero_is_a_reject(tmp_path: Path) -> None:
    """Times of usage are at least 300 s; one row far below zero would put all others into the test period."""
    window = RAW["instance_usage"][0]
    rows = [window | {"instance_index": k, "start_time": start} for k, start in enumerate((0, -1, -(2**62)))]
    for kind in KINDS:
        dataset = read(write_raw(tmp_path / kind, {"instance_usage": rows}, kind), tmp_path / f"{kind} out", share=1.0)
        assert dataset.manifest["rejects"] == {"start_time is negative": 2}
        assert dataset.usage(0)[s.START_US].to_pylist() == [0]


def test_a_maximum_of_zero_is_missing_where_the_mean_is_above_it(tmp_path: Path) -> None:
    window = RAW["instance_usage"][0]
    rows = [
        window | {"instance_index": 1, "average_usage": {"cpus": 0.25, "memory": 0.5},
                  "maximum_usage": {"cpus": 0.0, "memory": 0}},
        window | {"instance_index": 2, "average_usage": {"cpus": 0.0, "memory": 0.0},
                  "maximum_usage": {"cpus": 0.0, "memory": 0.0}},
        window | {"instance_index": 3, "average_usage": {"cpus": 0.25}, "maximum_usage": {"cpus": 0.5, "memory": 0.0}},
    ]  # fmt: skip
    for kind in KINDS:
        dataset = read(write_raw(tmp_path / kind, {"instance_usage": rows}, kind), tmp_path / f"{kind} out")
        assert dataset.usage(0)[s.CPU_MAX].to_pylist() == [None, 0.0, 0.5]
        assert dataset.usage(0)[s.MEMORY_MAX].to_pylist() == [None, 0.0, 0.0]
        windows = dataset.windows(0)
        windows.percentiles[:] = np.nan
        assert demand(windows).tolist()[:2] == [[0.25, 0.5], [0.0, 0.0]]
        assert peak_cpu(windows).tolist() == [0.25, 0.0, 0.5]


def test_a_measurement_that_is_none_is_a_reject_and_a_counter_that_is_none_is_counted(tmp_path: Path) -> None:
    window = RAW["instance_usage"][0]
    measured = {"assigned_memory": -0.5, "page_cache_memory": "NaN", "random_sample_usage": {"cpus": -1.0}}
    counters = {"cycles_per_instruction": -1.0, "memory_accesses_per_instruction": "Infinity", "sample_rate": -0.5}
    rows = [window | {field: value, "instance_index": k} for k, (field, value) in
            enumerate((measured | counters).items())]  # fmt: skip
    folder = write_raw(tmp_path / "cell", {"instance_usage": rows}, "json.gz")
    dataset = read(folder, tmp_path / "out", share=1.0)
    assert rejects(dataset) == [(1, "assigned_memory is negative or not finite"),
                                (2, "page_cache_memory is negative or not finite"),
                                (3, "random_sample_usage.cpus is negative or not finite")]  # fmt: skip
    assert dataset.manifest["defects"] == {f"{name} is negative or not finite": 1 for name in counters}
    assert dataset.usage(0)[s.CPI].to_pylist()[0] == -1.0


def test_a_column_the_format_does_not_have_is_passed_over_named_and_counted(tmp_path: Path) -> None:
    more = {name: [row | {"colour": ["red", {"x": 2}]} for row in rows] for name, rows in RAW.items()}
    write_raw(tmp_path / "json.gz", more, "json.gz")
    for file in write_raw(tmp_path / "parquet", RAW, "parquet").iterdir():
        content = pq.read_table(file)
        pq.write_table(content.append_column("colour", pa.array(["red"] * len(content))), file)
    for kind in ("json.gz", "parquet"):
        dataset = read(tmp_path / kind, tmp_path / f"{kind} out")
        assert dataset.manifest["rejects"] == {}
        assert dataset.manifest["defects"] == {
            f"{name}: unknown column colour, passed over": len(rows) for name, rows in RAW.items()
        }
        assert tables(dataset) == tables(read(write_raw(tmp_path / f"{kind} plain", RAW, kind), tmp_path / kind[:4]))


def test_sampled_usage_may_have_the_name_of_the_document(tmp_path: Path) -> None:
    def renamed(name: str) -> str:
        return "random_sampled_usage" if name == "random_sample_usage" else name

    other = {name: [{renamed(key): v for key, v in row.items()} for row in rows] for name, rows in RAW.items()}
    write_raw(tmp_path / "json.gz", other, "json.gz")
    for file in write_raw(tmp_path / "parquet", RAW, "parquet").iterdir():
        content = pq.read_table(file)
        pq.write_table(content.rename_columns([renamed(name) for name in content.column_names]), file)
    for kind in ("json.gz", "parquet"):
        dataset = read(tmp_path / kind, tmp_path / f"{kind} out")
        assert dataset.manifest["defects"] == {}
        assert tables(dataset) == tables(read(write_raw(tmp_path / f"{kind} plain", RAW, kind), tmp_path / kind[:4]))
        assert 0.15625 in dataset.usage(0)[s.CPU_SAMPLE].to_pylist()


def test_the_real_folder_arrives_row_by_row_and_code_by_code(tmp_path: Path, real_data: Path) -> None:
    folder = real_data / "google_2019"

    def raw(table: str) -> list[Row]:
        files = sorted(folder.glob(f"{table}-*.json.gz"))
        return [json.loads(line) for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]

    dataset = ingest(folder, tmp_path / "out", IngestConfig()).dataset
    found = tables(dataset)
    usage, events, collections = (raw(name) for name in ("instance_usage", "instance_events", "collection_events"))
    counts = dataset.manifest["counts"]
    keys = Counter((r["collection_id"], r["instance_index"], r["start_time"], r["end_time"]) for r in usage)
    assert counts["usage"] == len(keys)
    assert counts["duplicate_windows"] == len(usage) - len(keys)
    assert counts["events"] + counts["duplicate_events"] == len(events)
    assert counts["duplicate_events"] == 0
    assert counts["collections"] == len(collections)
    tasks = {(r["collection_id"], r["instance_index"]) for r in usage + events}
    assert counts["tasks"] == len(tasks)
    fields = {"type": s.EVENT_TYPE, "scheduling_class": s.SCHEDULING_CLASS, "collection_type": s.COLLECTION_TYPE}
    settings = {"vertical_scaling": s.VERTICAL_SCALING, "scheduler": s.SCHEDULER, "user": s.USER_ID,
                "collection_name": s.NAME_ID, "collection_logical_name": s.LOGICAL_NAME_ID}  # fmt: skip
    for rows, name, columns in ((events, "events", fields), (collections, "collections", fields | settings)):
        for field, column in columns.items():
            counted = Counter(None if row.get(field) is None else str(row[field]) for row in rows)
            arrived = Counter(None if v is None else str(v) for v in found[name][column].to_pylist())
            assert arrived == counted, (name, field)
    for rows, name in ((events, "events"), (collections, "collections")):
        times = Counter(min(int(row["time"]), END_OF_TIME) for row in rows)
        assert Counter(found[name][s.TIME_US].to_pylist()) == times
