"""Plain series: a user's own CSV or parquet through a small mapping file."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime, timedelta, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reclaim.cli.results import of_ingest
from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, SchemaError, TraceError
from reclaim.data.ingest.job import IngestConfig, ingest, plan_buckets
from reclaim.data.traces.series import _id_sql, series, task_id
from reclaim.data.traces.series_mapping import load_mapping, shipped_mappings

MAPPING = """
task = "vm"
time = "t"
time_unit = "s"
window_s = 300
[columns]
cpu_mean = "used"
cpu_limit = 4.0
"""


MEMORY = {"cpu_limit = 4.0": 'cpu_limit = 4.0\nmemory_mean = "memory"'}
"""Change of the mapping that reads memory, too."""


def given_mapping(folder: Path, text: str = MAPPING) -> str:
    path = folder / "mapping.toml"
    path.write_text(text)
    return str(path)


def config(mapping: str, share: float = 0.001) -> IngestConfig:
    return IngestConfig(trace="series", mapping=mapping, buckets=1, max_reject_share=share)


def test_csv_rows_become_windows_under_a_constant_limit(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n12,600,1.5\n12,300,1\nweb-1,300,2\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path))).dataset
    table = dataset.usage(0).to_pylist()
    twelve = [row for row in table if row[s.COLLECTION_ID] == 12]
    assert [(r[s.START_US], r[s.END_US], r[s.CPU_MEAN], r[s.CPU_LIMIT]) for r in twelve] == [
        (300_000_000, 600_000_000, 1.0, 4.0),
        (600_000_000, 900_000_000, 1.5, 4.0),
    ]
    (named,) = [row for row in table if row[s.COLLECTION_ID] != 12]
    assert named[s.COLLECTION_ID] > 0
    assert s.MEMORY_MAX in dataset.manifest["lacks"]
    assert np.isnan(dataset.windows(0).limit[:, 1]).all()


def test_a_bad_csv_value_is_a_reject_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n1,300,1\n1,600,lots\n1,900,-2\n1,1200,2\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=0.9)).dataset
    rejects = pq.read_table(tmp_path / "out" / "rejects" / "rejects.parquet").to_pylist()
    assert [(r[s.REJECT_LINE], r[s.REJECT_REASON]) for r in rejects] == [
        (3, "used is not a double"),
        (4, "used is negative or not finite"),
    ]
    assert dataset.n_windows == 2


def test_where_a_time_is_a_date_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n1,2026-11-02 00:05,1\n")
    with pytest.raises(
        TraceError,
        match=r"t is not a double \(1\); first a\.csv line 2; .*dates and timestamps are read with time_unit = \"iso\"",
    ):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ("1,300,5%", "plain numbers, not as 5%"),
        ("1,1700000000000000000,1", "divide nanoseconds by 1000 first"),
        ("1,300,NaN", r"a missing value is null or an empty field, not NaN \(in polars `fill_nan\(None\)`\)$"),
    ],
)
def test_where_too_many_values_are_rejected_the_error_says_what_to_do(tmp_path: Path, row: str, remedy: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(f"vm,t,used\n{row}\n")
    with pytest.raises(TraceError, match=remedy):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


@pytest.mark.parametrize(
    "text",
    [
        ",vm,t,used\n0,1,300,1\n1,1,600,2\n",  # as pandas writes an index
        "vm,t,used,\n1,300,1,\n1,600,2,\n",
        "USED,vm,t,used,Used\n9,1,300,1,9\n9,1,600,2,9\n",
        ",column 0,vm,t,used\n0,9,1,300,1\n1,9,1,600,2\n",
    ],
)
def test_columns_that_no_mapping_names_may_have_any_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(text)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path))).dataset
    assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [1.0, 2.0]


def test_columns_that_the_query_engine_cannot_tell_apart_are_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used,USED\n1,300,1,2\n")
    mapping = given_mapping(tmp_path, MAPPING + 'cpu_max = "USED"\n')
    with pytest.raises(SchemaError, match=r"a\.csv: columns USED and used differ by case alone; rename one"):
        ingest(tmp_path / "in", tmp_path / "out", config(mapping))
    (tmp_path / "in" / "a.csv").unlink()
    table = pa.table({"vm": ["1"], "t": [300], "used": [1.0], "file_row_number": [0]})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    with pytest.raises(SchemaError, match=r"a\.parquet: file_row_number is a name of the query engine's own; rename"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


def test_a_number_has_no_underscore(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\na,300,1_0\na,1_0,1\na,600,1e1\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=0.9)).dataset
    assert dataset.manifest["rejects"] == {"used is not a double": 1, "t is not a double": 1}
    assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [10.0]


def test_every_task_name_is_a_task_of_its_own_and_integers_stay_what_they_are(tmp_path: Path) -> None:
    names = [f"web-{k}" for k in range(120)] + [f"1.{k}" for k in range(60)]
    names += ["7", "007", "07", "0", "-0", "+7", "1e3", "1000", "0x10", "16", " 7", "true", "-5", "7.0", "nan"]
    names += [str(2**62 + 1), str(2**63 - 1), str(2**63)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n" + "".join(f"{name},300,1\n" for name in names))
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path))).dataset
    ids = set(dataset.usage(0)[s.COLLECTION_ID].to_pylist())
    assert len(ids) == len(names)
    assert {7, 0, 1000, 16, -5, 2**62 + 1, 2**63 - 1} <= ids


@given(st.text(max_size=30) | st.integers(-(2**64), 2**64).map(str))
@example("007")
@example("-0")
@example(str(2**63))
@example(str(-(2**63)))
@example("１")
def test_the_id_of_a_name_is_that_which_ingest_writes(name: str) -> None:
    found = duckdb.execute(f"SELECT {_id_sql('name')} FROM (SELECT ? AS name)", [name]).fetchone()
    assert found == (task_id(name),)


def test_a_single_file_is_read_without_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("week[1].csv", "week1.csv", "notes.txt"):
        (tmp_path / "in" / name).write_text("vm,t,used\n12,600,1.5\n")
    mapping = config(given_mapping(tmp_path))
    dataset = ingest(tmp_path / "in" / "week[1].csv", tmp_path / "out", mapping).dataset
    manifest = dataset.manifest
    assert (dataset.n_windows, manifest["name"], manifest["not_read"]) == (1, "week[1]", [])
    assert {entry["file"] for entry in manifest["inputs"]} == {"week[1].csv"}
    assert ingest(tmp_path / "in" / "week[1].csv", tmp_path / "out", mapping).already_there
    with pytest.raises(ConfigError, match="holds a dataset made from other files"):
        ingest(tmp_path / "in" / "week1.csv", tmp_path / "out", mapping)
    with pytest.raises(ConfigError, match=r"notes\.txt: a file of a series ends in \.parquet, \.csv or \.csv\.gz"):
        ingest(tmp_path / "in" / "notes.txt", tmp_path / "new", mapping)


def names_of(dataset: Dataset) -> list[tuple[Any, ...]]:
    """Return workload, task, and the key of each row of names."""
    rows = dataset.table("names").to_pylist()
    return [(row[s.WORKLOAD], row[s.POD], row[s.COLLECTION_ID], row[s.INSTANCE_INDEX]) for row in rows]


def test_the_names_of_tasks_are_kept_once_and_numbers_need_none(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\nweb-1,300,1\n17,300,1\nweb-1,600,2\n007,300,1\n")
    (tmp_path / "in" / "b.csv").write_text("vm,t,used\nweb-1,900,1\nweb-2,300,1\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path))).dataset
    assert set(names_of(dataset)) == {(name, name, task_id(name), 0) for name in ("web-1", "web-2", "007")}
    assert len(names_of(dataset)) == 3
    assert dataset.n_windows == 6


def test_a_file_that_is_read_for_names_too_counts_once_among_what_fills_the_buckets(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("wb") as file:
        file.truncate(4_000_000_000)  # of 100 bytes a window, and 100,000 windows a bucket; takes no room
    tables = series(load_mapping(given_mapping(tmp_path))).tables
    assert [table.name for table in tables] == ["usage", "names"]
    assert plan_buckets([(table, tmp_path / "a.csv") for table in tables]) == 400


def test_the_names_of_collections_are_kept_with_those_of_their_tasks(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("service,vm,t,used\nshop,1,300,1\nshop,2,300,1\n5,6,300,1\n5,a,300,1\n")
    mapping = given_mapping(tmp_path, 'collection = "service"' + MAPPING)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping)).dataset
    shop = task_id("shop")
    assert set(names_of(dataset)) == {("shop", "1", shop, 1), ("shop", "2", shop, 2), ("5", "a", 5, task_id("a"))}


def test_a_line_that_is_rejected_counts_once_though_names_are_read_from_it_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\nweb-1,300,1\nweb-1,600\nweb-2,300,lots\n,300,1\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=0.9)).dataset
    assert sum(dataset.manifest["rejects"].values()) == 3
    assert dataset.n_windows == 1


def test_machines_priorities_and_classes_are_exact_integers(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    text = "vm,t,used,host,rank,kind\n1,300,1,9007199254740993,200,2\n1,600,1,,,\n1,900,1,1.5,200,2\n"
    (tmp_path / "in" / "a.csv").write_text(text)
    mapping = MAPPING + 'machine_id = "host"\npriority = "rank"\nscheduling_class = "kind"\n'
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, mapping), share=0.5)).dataset
    assert dataset.usage(0)[s.MACHINE_ID].to_pylist() == [9007199254740993, None]
    assert dataset.usage(0)[s.PRIORITY].to_pylist() == [200, None]
    assert dataset.usage(0)[s.SCHEDULING_CLASS].to_pylist() == [2, None]
    assert dataset.manifest["rejects"] == {"host is not a bigint": 1}


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_rows_with_too_many_or_too_few_fields_are_rejects_with_their_lines(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "in").mkdir()
    text = "vm,t,used\n1,300,1\n1,600,1,7,8\n1,900\n1,1200,1\n1,1500,lots\n"
    (tmp_path / "in" / "a.csv").write_text(text.replace(",", delimiter))
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=0.9)).dataset
    rejects = pq.read_table(tmp_path / "out" / "rejects" / "rejects.parquet").to_pylist()
    assert [(r[s.REJECT_LINE], r[s.REJECT_REASON]) for r in rejects] == [
        (3, "row is malformed: too many columns"),
        (4, "row is malformed: missing columns"),
        (6, "used is not a double"),
    ]
    assert dataset.n_windows == 2


@pytest.mark.parametrize("time", ["1e30", "9.3e12", "9223372036854775807", "inf", "nan"])
@pytest.mark.parametrize("unit", ["s", "us"])
def test_a_time_past_64_bits_is_a_reject(tmp_path: Path, time: str, unit: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(f"vm,t,used\n1,300,1\n1,{time},1\n")
    mapping = given_mapping(tmp_path, MAPPING.replace('"s"', f'"{unit}"'))
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.9)).dataset
    if (time, unit) == ("9.3e12", "us"):  # 107 days
        assert dataset.n_windows == 2
    else:
        assert dataset.manifest["rejects"] == {"t is past the last time there can be": 1}


def test_a_window_that_ends_past_the_last_time_there_can_be_is_a_reject(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n1,300,1\n1,6e11,1\n")  # 2^59 us are 5.8e11 s
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=0.9)).dataset
    assert dataset.manifest["rejects"] == {"t is past the last time there can be": 1}


def test_parquet_and_csv_of_the_same_rows_give_the_same_windows(tmp_path: Path) -> None:
    for name in ("csv", "parquet"):
        (tmp_path / name).mkdir()
    (tmp_path / "csv" / "a.csv").write_text("vm,t,used\n1,300,1.25\n2,300,0.5\n")
    pq.write_table(pa.table({"vm": [1, 2], "t": [300, 300], "used": [1.25, 0.5]}), tmp_path / "parquet" / "a.parquet")
    mapping = given_mapping(tmp_path)
    made = [ingest(tmp_path / n, tmp_path / f"out-{n}", config(mapping)).dataset.usage(0) for n in ("csv", "parquet")]
    assert made[0].equals(made[1])


def test_a_folder_named_key_is_value_adds_no_column(tmp_path: Path) -> None:
    file = tmp_path / "in" / "used=7" / "a.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(pa.table({"vm": [1], "t": [300], "used": [1.25]}), file)
    mapping = given_mapping(tmp_path, 'files = ["*/*.parquet"]\n' + MAPPING)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping)).dataset
    assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [1.25]
    pq.write_table(pa.table({"vm": [1], "t": [300]}), file)
    with pytest.raises(SchemaError, match=r"the mapping names columns used, the file has t, vm$"):
        ingest(tmp_path / "in", tmp_path / "lacks", config(mapping))


def test_a_mapping_that_names_a_column_the_file_lacks_says_which(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,usage\n1,300,1\n")
    with pytest.raises(SchemaError, match="the mapping names columns used, the file has t, usage, vm"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))
    assert not (tmp_path / "out").exists()
    (tmp_path / "in" / "a.csv").write_text("vm, t, used\n1, 300, 1\n")
    mapping = given_mapping(tmp_path, MAPPING.replace('"used"', '"usage"'))
    with pytest.raises(SchemaError, match="the mapping names columns usage, the file has ' used', t, vm"):
        ingest(tmp_path / "in", tmp_path / "out", config(mapping))


NOON_US = 1_795_867_200_000_000
"""2026-11-28 12:00 UTC: 20,785 days after 1970, and a half."""
DATES = MAPPING.replace('"s"', '"iso"')


@pytest.mark.parametrize(
    ("text", "after_us"),
    [
        ("2026-11-28T12:00:00Z", 0),
        ("2026-11-28 12:00:00", 0),  # without a zone it is UTC
        ("2026-11-28T12:00", 0),
        ("2026-11-28 12:00:00 UTC", 0),
        ("2026-11-28T13:00:00+01:00", 0),
        ("2026-11-28 17:30:00+0530", 0),
        ("2026-11-28T04:00:00-08", 0),
        ("2026-11-29 01:00:00.25+13:00", 250_000),
        ("2026-11-28T12:00:00.000001234Z", 1),
        ("2026-11-29", 43_200_000_000),
        ("2026-11-28T24:00:00", 43_200_000_000),
        (" 2026-11-28T12:00:00Z ", 0),
    ],
)
def test_a_time_as_iso_text_is_read_in_its_zone_or_in_utc(tmp_path: Path, text: str, after_us: int) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(f"vm,t,used\n1,{text},1\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, DATES))).dataset
    assert dataset.usage(0)[s.START_US].to_pylist() == [NOON_US + after_us]
    assert dataset.usage(0)[s.END_US].to_pylist() == [NOON_US + after_us + 300_000_000]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2026-02-30T00:00:00Z", "t is not a time by ISO 8601"),
        ("28.11.2026 12:00", "t is not a time by ISO 8601"),
        ("2026-11-28T12:00:00 Europe/Paris", "t is not a time by ISO 8601"),
        ("1795867200", "t is not a time by ISO 8601"),
        ("infinity", "t is not a time by ISO 8601"),
        ("1969-12-31T23:59:59Z", "t is before 1970"),
        ("", "t is missing"),
    ],
)
def test_a_bad_date_is_a_reject_with_its_line_and_the_remedy(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(f"vm,t,used\n1,2026-11-28,1\n1,{text},1\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, DATES), share=0.5)).dataset
    rejects = pq.read_table(dataset.path / "rejects" / "rejects.parquet")
    assert rejects.to_pylist() == [{"file": "a.csv", "line": 3, "reason": reason}]
    remedy = "2026-11-28T02:00:00Z.* one without a zone is UTC" if "ISO" in reason else ""
    with pytest.raises(TraceError, match=rf"{reason} \(1\); first a\.csv line 3; .*{remedy}"):
        ingest(tmp_path / "in", tmp_path / "strict", config(given_mapping(tmp_path, DATES)))


@pytest.mark.parametrize(
    "type_",
    [
        pa.timestamp("s"),
        pa.timestamp("ms"),
        pa.timestamp("us"),
        pa.timestamp("ns"),
        pa.timestamp("us", "UTC"),
        pa.timestamp("ns", "Asia/Kolkata"),
        pa.string(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_a_time_as_a_timestamp_of_parquet_is_read_in_its_zone_or_in_utc(tmp_path: Path, type_: pa.DataType) -> None:
    (tmp_path / "in").mkdir()
    noon = datetime(2026, 11, 28, 12, tzinfo=UTC if getattr(type_, "tz", None) else None)
    times: list[Any] = [noon, noon + timedelta(hours=1)]
    if not pa.types.is_timestamp(type_):
        times = [time.replace(tzinfo=timezone(timedelta(hours=0))).isoformat() for time in times]
    table = pa.table({"vm": [1, 1, 1], "t": pa.array([*times, None], type_), "used": [1.0, 2.0, 3.0]})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, DATES), share=0.5)).dataset
    assert dataset.usage(0)[s.START_US].to_pylist() == [NOON_US, NOON_US + 3_600_000_000]
    assert dataset.manifest["rejects"] == {"t is missing": 1}


def test_a_timestamp_where_a_number_is_expected_is_a_reject_that_names_the_unit_of_dates(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    table = pa.table({"vm": [1], "t": pa.array([datetime(2026, 11, 28)], pa.timestamp("us")), "used": [1.0]})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    with pytest.raises(TraceError, match=r"t is not a double \(1\); .* are read with time_unit = \"iso\"$"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


@pytest.mark.parametrize(
    ("unit", "first", "started", "late"),
    [
        ("s", "600", "120", "901"),
        ("ms", "600000", "120000", "900001"),
        ("iso", "1970-01-01T00:10:00Z", "1970-01-01 00:02:00", "1970-01-01T00:15:00.001Z"),
    ],
)
def test_the_start_of_a_run_is_in_the_unit_of_the_time_and_not_after_its_window(
    tmp_path: Path, unit: str, first: str, started: str, late: str
) -> None:
    (tmp_path / "in").mkdir()
    rows = [f"1,{first},1,{started}", f"2,{first},1,", f"3,{first},1,{late}", f"4,{first},1,-1"]
    (tmp_path / "in" / "a.csv").write_text("\n".join(["vm,t,used,began", *rows]) + "\n")
    mapping = given_mapping(tmp_path, MAPPING.replace('"s"', f'"{unit}"') + 'scheduled_us = "began"\n')
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.5)).dataset
    assert dataset.usage(0)[s.SCHEDULED_US].to_pylist() == [120_000_000, None]
    bad = "began is negative" if unit != "iso" else "began is not a time by ISO 8601"
    assert dataset.manifest["rejects"] == {"began is after the window's end": 1, bad: 1}
    assert s.SCHEDULED_US not in dataset.manifest["lacks"]


@pytest.mark.parametrize(
    ("tier", "tiers", "rejects"),
    [
        ('tier = "prod"', [3, 3, 3, 3], {}),
        ('tier = { column = "class", prod = "prod", batch = "free", "1" = "mid" }', [3, 0, 2, None], {}),
        ('tier = { column = "class", batch = "beb" }', [1, None], {"class is no word of the mapping's tier": 2}),
        ('tier = { column = "class" }', [3, None], {"class is no word of the mapping's tier": 2}),
    ],
)
def test_a_tier_is_that_of_all_tasks_or_that_of_a_word_in_a_column(
    tmp_path: Path, tier: str, tiers: list[int | None], rejects: dict[str, int]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used,class,rank\n1,0,1,prod,0\n2,0,1,batch,0\n3,0,1,1,0\n4,0,1,,0\n")
    mapping = given_mapping(tmp_path, f'{tier}\n{MAPPING}priority = "rank"\n')
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.6)).dataset
    assert dataset.usage(0)[s.TIER].to_pylist() == tiers
    assert dataset.usage(0)[s.PRIORITY].to_pylist() == [0] * len(tiers)
    assert dataset.manifest["rejects"] == rejects
    assert s.TIER not in dataset.manifest["lacks"]
    if rejects:
        with pytest.raises(TraceError, match="give each word its tier: tier = "):
            ingest(tmp_path / "in", tmp_path / "strict", config(mapping))


DECILES = [float(k) for k in range(11)]
TAIL = [9 + k / 16 for k in range(1, 10)]


@pytest.mark.parametrize("kind", ["columns", "lists", "csv"])
def test_percentiles_come_as_columns_or_as_lists(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    bad = [[*DECILES[1:], 0.0], [-1.0, *DECILES[1:]], [*DECILES[:10], float("inf")], [*DECILES[:10], None]]
    vectors: list[Any] = [DECILES, [None] * 11 if kind != "lists" else None, *bad]
    tails: list[Any] = [TAIL, *[[None] * 9] * 5] if kind != "lists" else [TAIL, *[None] * 5]
    rows: dict[str, Any] = {"vm": [*range(6)], "t": [0] * 6, "used": [1.0] * 6}
    if kind == "lists":
        rows |= {"p": vectors, "q": tails}
        text = 'cpu_percentiles = "p"\ncpu_tail_percentiles = "q"\n'
    else:
        p, q = ([f"{letter}{level}" for level in levels] for letter, levels in
                (("p", s.PERCENTILES), ("q", s.TAIL_PERCENTILES)))  # fmt: skip
        rows |= dict(zip(p, zip(*vectors, strict=True), strict=True))
        rows |= dict(zip(q, zip(*tails, strict=True), strict=True))
        text = f"cpu_percentiles = {p}\ncpu_tail_percentiles = {q}\n"
    if kind == "csv":
        pd.DataFrame(rows).to_csv(tmp_path / "in" / "a.csv", index=False)
    else:
        pq.write_table(pa.table(rows), tmp_path / "in" / "a.parquet")
    dataset = ingest(
        tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, MAPPING + text), share=0.9)
    ).dataset
    assert dataset.usage(0)[s.CPU_PERCENTILES].to_pylist() == [DECILES, None]
    assert dataset.usage(0)[s.CPU_TAIL_PERCENTILES].to_pylist() == [TAIL, None]
    assert dataset.windows(0).percentiles[0].tolist() == [*DECILES[:10], *TAIL, DECILES[10]]
    assert sorted((reason.split(": ")[1], n) for reason, n in dataset.manifest["rejects"].items()) == [
        ("a percentile is below a lower one", 1), ("a value is missing", 1), ("a value is negative or not finite", 2)
    ]  # fmt: skip


def test_a_list_of_percentiles_of_another_length_is_a_reject(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    table = pa.table({"vm": [1, 2], "t": [0, 0], "used": [1.0, 1.0], "p": [DECILES, DECILES[1:]]})
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    mapping = given_mapping(tmp_path, MAPPING + 'cpu_percentiles = "p"\n')
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.9)).dataset
    assert dataset.manifest["rejects"] == {"p: has not 11 values": 1}


def machines_of(dataset: Dataset) -> list[tuple[Any, ...]]:
    """Return id, capacities and name of each row of machines."""
    rows = dataset.table("machines").to_pylist()
    assert all(row[s.TIME_US] == 0 and row[s.EVENT_TYPE] == s.MachineEventType.ADD for row in rows)
    return [(row[s.MACHINE_ID], row[s.CPU_CAPACITY], row[s.MEMORY_CAPACITY], row[s.MACHINE_NAME]) for row in rows]


NODES = "vm,t,used,node\n1,300,1,n-1\n2,300,1,7\n3,300,1,\n4,300,1,n-1\n5,300,1,-3\n"
SAME = "[machines]\ncpu_capacity = 64\nmemory_capacity = 256e9\n"


def test_machines_have_names_as_tasks_have_and_one_capacity_or_that_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(NODES)
    mapping = 'machine = "node"\n' + MAPPING
    named = given_mapping(tmp_path, mapping + SAME)
    dataset = ingest(tmp_path / "in", tmp_path / "same", config(named, share=0.5)).dataset
    n = task_id("n-1")
    assert dataset.usage(0)[s.MACHINE_ID].to_pylist() == [n, 7, None, n]
    assert dataset.manifest["rejects"] == {"node is negative, which the id of a machine is not": 1}
    assert s.MACHINE_ID not in dataset.manifest["lacks"]
    assert machines_of(dataset) == [(7, 64.0, 256e9, None), (n, 64.0, 256e9, "n-1")]
    (tmp_path / "in" / "nodes.csv").write_text("memory,name\n1e9,n-1\n2e9,9\n,n-2\n0,n-3\n1e9,\n3e9,-1\n")
    text = SAME.replace("256e9", '"memory"') + 'file = "nodes.csv"\nmachine = "name"\n'
    dataset = ingest(
        tmp_path / "in", tmp_path / "file", config(given_mapping(tmp_path, mapping + text), share=0.7)
    ).dataset
    assert machines_of(dataset) == [(9, 64.0, 2e9, None), (n, 64.0, 1e9, "n-1")]
    assert dataset.manifest["rejects"] == {
        "memory is not a capacity above 0": 2, "name is missing": 1,
        "node is negative, which the id of a machine is not": 1,
        "name is negative, which the id of a machine is not": 1,
    }  # fmt: skip
    assert dataset.n_windows == 4
    alone = ingest(
        tmp_path / "in" / "a.csv", tmp_path / "alone", config(given_mapping(tmp_path, mapping + text), share=0.7)
    )
    assert machines_of(alone.dataset) == machines_of(dataset)


def test_machines_that_a_mapping_names_as_integers_have_the_capacity_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(NODES)
    mapping = given_mapping(tmp_path, MAPPING + 'machine_id = "node"\n' + SAME)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.9)).dataset
    assert machines_of(dataset) == [(7, 64.0, 256e9, None)]
    assert dataset.manifest["rejects"] == {"node is not a bigint": 2, "node is negative or not finite": 1}


def test_a_file_of_machines_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(NODES)
    text = SAME + 'file = "machines/nodes.csv"\nmachine = "name"\n'
    with pytest.raises(
        TraceError, match=r"no files of a series trace \(looked for machines/nodes\.csv; there is a\.csv"
    ):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, MAPPING + text)))


def test_windows_that_are_read_for_machines_too_count_once_among_what_fills_the_buckets(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("wb") as file:
        file.truncate(4_000_000_000)
    tables = series(load_mapping(given_mapping(tmp_path, 'machine = "node"\n' + MAPPING + SAME))).tables
    assert [table.name for table in tables] == ["usage", "names", "machines"]
    assert plan_buckets([(table, tmp_path / "a.csv") for table in tables]) == 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SAME, "machines without a file are those of the windows: name their column by 'machine'"),
        ('file = "a.csv"', "machines.machine must name the column of machines.file"),
        (
            'file = "../a.csv"\nmachine = "m"',
            "below the source folder that ends in .parquet, .csv or .csv.gz, got '../a",
        ),
        ('file = "a.txt"\nmachine = "m"', "got 'a.txt'"),
        ('machine = "m"', "machines.machine is a column of machines.file, which is missing"),
        ("cores = 3", "unknown key 'machines.cores' (known: file, machine, cpu_capacity, memory_capacity)"),
        ('cpu_capacity = "cores"', "machines.cpu_capacity must be a finite number above 0, got 'cores'"),
        ('file = "a.csv"\ncpu_capacity = 0', "must be a column of machines.file or a finite number above 0, got 0"),
        ("cpu_capacity = 1", "machines.memory_capacity must be a finite number above 0, got None"),
    ],
)
def test_a_mistake_in_what_a_mapping_says_of_machines_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_mapping(given_mapping(tmp_path, f"{MAPPING}[machines]\n{text.removeprefix('[machines]')}\n"))
    assert said in str(found.value)


def test_a_mapping_names_the_machine_of_a_window_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"machine and columns\.machine_id both name the machine: keep one"):
        load_mapping(given_mapping(tmp_path, 'machine = "node"\n' + MAPPING + 'machine_id = "node"\n'))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {'task = "vm"': 'task = "vm"\ntier = "class"'},
            "got 'class' (a column that has it is { column = \"class\" })",
        ),
        ({'task = "vm"': 'task = "vm"\ntier = { batch = "free" }'}, "tier.column must name a column"),
        (
            {'task = "vm"': 'task = "vm"\ntier = { column = "c", batch = "low" }'},
            "tier.batch must be one of free, beb, mid, prod, mon, got 'low'",
        ),
        ({"cpu_limit = 4.0": 'tier = "prod"'}, "key 'tier' belongs above [columns]"),
        ({"cpu_limit = 4.0": "scheduled_us = 5"}, "columns.scheduled_us must be a column name, got 5"),
        (
            {"cpu_limit = 4.0": 'cpu_percentiles = ["p50", "p90"]'},
            "must be a column of lists, or 11 columns of the percentiles 0, 10 … 100, got ['p50', 'p90']",
        ),
        ({"cpu_limit = 4.0": "cpu_tail_percentiles = 1.0"}, "or 9 columns of the percentiles 91, 92 … 99, got 1.0"),
        ({"cpu_limit = 4.0": 'cpu_limit = ["a"]'}, "columns.cpu_limit must be a column name or a finite number"),
    ],
)
def test_a_mistake_in_what_a_mapping_says_of_tiers_runs_and_percentiles_is_named(
    tmp_path: Path, change: dict[str, str], said: str
) -> None:
    text = MAPPING
    for old, new in change.items():
        text = text.replace(old, new)
    with pytest.raises(ConfigError) as found:
        load_mapping(given_mapping(tmp_path, text))
    assert said in str(found.value)


def test_every_mistake_in_a_mapping_is_named_at_once(tmp_path: Path) -> None:
    text = MAPPING.replace("window_s = 300", "windows = 300").replace("cpu_limit", "cpu_limits")
    with pytest.raises(ConfigError, match=r"unknown key 'windows'; missing key 'window_s'"):
        load_mapping(given_mapping(tmp_path, text))
    with pytest.raises(ConfigError, match=r"unknown canonical column 'cpu_means'.*columns.cpu_mean is required"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace("cpu_mean", "cpu_means")))
    text = """
task = 3
time = { day = 0, slot = "x", hour = true }
time_unit = "ms"
window_s = true
files = [1]
colour = "red"
[columns]
cpu_limit = nan
memory_limit = -1
priority = true
"""
    with pytest.raises(ConfigError) as caught:
        load_mapping(given_mapping(tmp_path, text))
    for part in (
        "unknown key 'colour'", "'task' must be str", "'window_s' must be int", "time_unit must be s where time is",
        "time.day must be a number of seconds above 0, got 0", "time.slot must be", "time.hour must be",
        "files must be globs, got [1]", "columns.cpu_mean is required",
        "columns.cpu_limit must be a column name or a finite number of at least 0, got nan", "columns.memory_limit",
        "columns.priority must be",
    ):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="'time' must be str or dict; time_unit must be one of"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace('"t"', "7").replace('"s"', '"min"')))
    with pytest.raises(ConfigError, match="time names no column"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace('"t"', "{}")))
    with pytest.raises(ConfigError, match="time_unit must be one of s, ms, us, iso, got 'min'"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace('"s"', '"min"')))
    with pytest.raises(
        ConfigError, match="no such file, and shipped are only azure, azure-csv, bitbrains, bitbrains-csv"
    ):
        load_mapping(tmp_path / "none.toml")


def test_a_mapping_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "mapping.toml").write_bytes(b"# caf\xe9\n" + MAPPING.encode())
    with pytest.raises(ConfigError, match=r"mapping .*mapping.toml: not UTF-8 \(.*0xe9 in position 5"):
        load_mapping(tmp_path / "mapping.toml")


@pytest.mark.parametrize("glob", ["", ".", "/etc/*.csv", "../*.csv", "a/../../*.csv"])
def test_a_mapping_names_files_below_the_source_folder_only(tmp_path: Path, glob: str) -> None:
    text = f'files = ["a/*.csv", "{glob}", "..a.csv"]\n' + MAPPING
    with pytest.raises(ConfigError) as caught:
        load_mapping(given_mapping(tmp_path, text))
    assert str(caught.value).endswith(f"mapping.toml: files must be globs below the source folder, got {glob!r}")


def test_series_needs_a_mapping_and_other_traces_take_none() -> None:
    with pytest.raises(ConfigError, match="'series' needs one"):
        IngestConfig(trace="series")
    with pytest.raises(ConfigError, match="a mapping goes with trace 'series'"):
        IngestConfig(mapping="azure")


def test_the_fingerprint_of_a_dataset_by_a_mapping_of_the_first_keys_stays(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n12,600,1.5\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path))).dataset
    assert dataset.manifest["fingerprint"] == ("f718c67d1780523b5b6ec6e5c09d8747090ed3fdb695cf1f68a7eaaa4c5c65cc")
    texts = {name: load_mapping(name).text for name in ("azure", "bitbrains", "google-2011-machines")}
    assert {name: sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()} == {
        "azure": "5eebf1570a292685", "bitbrains": "b04435496686ae09", "google-2011-machines": "eb7ab1dbedb6720c",
    }  # fmt: skip


PUBLISHED_VM = (
    "Timestamp [ms];\tCPU cores;\tCPU capacity provisioned [MHZ];\tCPU usage [MHZ];\tCPU usage [%];\t"
    "Memory capacity provisioned [KB];\tMemory usage [KB];\tDisk read throughput [KB/s];\t"
    "Disk write throughput [KB/s];\tNetwork received throughput [KB/s];\tNetwork transmitted throughput [KB/s]\n"
    "1376314846;\t4;\t11703.998;\t10912.25;\t93.23;\t6.7108864E7;\t6129274.4;\t0.13;\t20.06;\t1.66;\t0.73\n"
    "1376315146;\t4;\t11703.998;\t10890.5;\t93.05;\t6.7108864E7;\t6755624.0;\t13.4;\t26.2;\t2.4;\t0.8\n"
)
"""Rows in the layout of GWA-T-12."""


def test_the_files_of_bitbrains_are_read_as_they_are_published(tmp_path: Path) -> None:
    folder = tmp_path / "2013-8"
    folder.mkdir()
    off = PUBLISHED_VM.splitlines()[0] + "\n1376315446;\t0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0;\t0.0\n"
    for name, text in (("1", PUBLISHED_VM), ("2", PUBLISHED_VM), ("31", off)):
        (folder / f"{name}.csv").write_text(text)
    dataset = ingest(folder, tmp_path / "out", config("bitbrains-csv", share=1)).dataset
    rows = dataset.usage(0).to_pylist()
    assert [row[s.COLLECTION_ID] for row in rows] == [1, 1, 2, 2]  # two files of the same bytes are two VMs
    assert dataset.manifest["repeated"] == []
    first = {s.START_US: 1_376_314_846_000_000, s.CPU_MEAN: 10912.25, s.CPU_LIMIT: 11703.998,
             s.MEMORY_MEAN: 6129274.4, s.MEMORY_LIMIT: 67108864.0}  # fmt: skip
    assert {name: rows[0][name] for name in first} == first
    with pytest.raises(TraceError, match="are left out with a larger --max-reject-share"):
        ingest(folder, tmp_path / "strict", config("bitbrains-csv"))
    with pytest.raises(SchemaError, match=r"the mapping names columns .*; --mapping bitbrains-csv reads the files"):
        ingest(folder, tmp_path / "cut", config("bitbrains"))


def test_the_files_of_azure_are_read_as_they_are_published(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    vm = "yNf/R3X8fyXkOJm3ihXQcT0F52a8cDWPPRzTT6QFW8N+1QPfeKR5//6xyX0VYn7X"
    files = {
        "vm_cpu_readings-file-1-of-125.csv.gz": f"0,{vm},19.1,22.9,20.5\n0,b+/=,0,1.5,0.25\n",
        "trace_data_vm_cpu_readings_vm_cpu_readings-file-2-of-125.csv.gz": f"300,{vm},18,30,21\n",
        "vmtable.csv.gz": f"{vm},s,d,0,2591700,99.36,3.42,10.19,Delay-insensitive,1,1.75\n",
    }
    for name, text in files.items():
        (tmp_path / "in" / name).write_bytes(gzip.compress(text.encode()))
    dataset = ingest(tmp_path / "in", tmp_path / "out", config("azure-csv")).dataset
    rows = {(row[s.COLLECTION_ID], row[s.START_US]): row for row in dataset.usage(0).to_pylist()}
    assert {key: (row[s.CPU_MEAN], row[s.CPU_MAX], row[s.CPU_LIMIT]) for key, row in rows.items()} == {
        (task_id(vm), 0): (20.5, 22.9, 100.0),
        (task_id(vm), 300_000_000): (21.0, 30.0, 100.0),
        (task_id("b+/="), 0): (0.25, 1.5, 100.0),
    }
    assert dataset.manifest["not_read"] == ["vmtable.csv.gz"]
    assert dataset.manifest["rejects"] == {}


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_mapping_names_the_columns_of_files_without_a_header(tmp_path: Path, delimiter: str) -> None:
    (tmp_path / "in").mkdir()
    text = '300,"a,b;c|d\te",1\n600,web,lots\n900,web,2,3\n1200,web,4\n'
    (tmp_path / "in" / "a.csv").write_text("\n".join(
        line if k == 0 else line.replace(",", delimiter) for k, line in enumerate(text.splitlines())
    ).replace('300,"a,b;c|d\te",1', delimiter.join(['300', '"a,b;c|d\te"', '1'])) + "\n")  # fmt: skip
    mapping = given_mapping(tmp_path, 'header = ["t", "vm", "used"]\n' + MAPPING)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.9)).dataset
    rejects = pq.read_table(dataset.path / "rejects" / "rejects.parquet")
    assert list(zip(rejects["line"].to_pylist(), rejects["reason"].to_pylist(), strict=True)) == [
        (2, "used is not a double"), (3, "row is malformed: too many columns")
    ]  # fmt: skip
    assert {row[s.COLLECTION_ID]: row[s.CPU_MEAN] for row in dataset.usage(0).to_pylist()} == {
        task_id("a,b;c|d\te"): 1.0, task_id("web"): 4.0
    }  # fmt: skip


def test_a_header_line_where_the_mapping_says_that_there_is_none_is_a_reject(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("t,vm,used\n300,1,1\n")
    mapping = given_mapping(tmp_path, 'header = ["t", "vm", "used"]\n' + MAPPING)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.5)).dataset
    assert (dataset.n_windows, dataset.manifest["rejects"]) == (1, {"used is not a double": 1})


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet"])
def test_the_name_of_a_file_can_be_a_column(tmp_path: Path, ending: str) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    table = pd.DataFrame({"t": [300, 600], "used": [1.0, 2.0]})
    for path in (tmp_path / "in" / f"web.1.{ending}", tmp_path / "in" / "sub" / f"7.{ending}"):
        table.to_parquet(path) if ending == "parquet" else table.to_csv(path, index=False)
    text = f'file_column = "vm"\nfiles = ["**/*.{ending}"]\n'
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, text + MAPPING))).dataset
    assert dict.fromkeys(dataset.usage(0)[s.COLLECTION_ID].to_pylist()) == dict.fromkeys(sorted([7, task_id("web.1")]))
    assert names_of(dataset) == [("web.1", "web.1", task_id("web.1"), 0)]
    named = given_mapping(tmp_path, text.replace('"vm"', '"used"') + MAPPING)
    with pytest.raises(SchemaError, match="the mapping's file_column used is a column of the file; rename it"):
        ingest(tmp_path / "in", tmp_path / "twice", config(named))


def test_blanks_around_the_names_and_values_of_a_file_are_none_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("t; vm;\tused ;\thost\n300; web;\t1.5 ;\t7\n600; web; 2;\t\n")
    mapping = given_mapping(tmp_path, MAPPING + 'machine_id = "host"\n')
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping)).dataset
    assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [1.5, 2.0]
    assert dataset.usage(0)[s.MACHINE_ID].to_pylist() == [7, None]
    assert set(dataset.usage(0)[s.COLLECTION_ID].to_pylist()) == {task_id("web")}
    exact = given_mapping(tmp_path, MAPPING.replace('"vm"', '" vm"'))  # a mapping may name the blanks
    dataset = ingest(tmp_path / "in", tmp_path / "exact", config(exact)).dataset
    assert set(dataset.usage(0)[s.COLLECTION_ID].to_pylist()) == {task_id(" web")}


@pytest.mark.parametrize("header", ["[]", '["t", "t"]', "[1]"])
def test_a_header_of_a_mapping_names_each_column_once(tmp_path: Path, header: str) -> None:
    with pytest.raises(ConfigError, match="header must name each column once, got"):
        load_mapping(given_mapping(tmp_path, f"header = {header}\n{MAPPING}"))


@pytest.mark.parametrize("name", ["azure", "azure-csv", "bitbrains", "bitbrains-csv", "google-2011-machines"])
def test_shipped_mappings_read(name: str) -> None:
    assert name in shipped_mappings()
    assert load_mapping(name).window_s == 300


def test_a_time_given_as_columns_and_their_seconds_is_their_sum_and_a_gap_stays_one(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    text = "vm,day,slot,used\n1,2,3,1\n1,0,0,2\n1,2,287,3\n1,,3,1\n1,2,,1\n1,-1,3,1\n1,1e30,3,1\n1,nan,1,1\n"
    (tmp_path / "in" / "a.csv").write_text(text)
    for unit in ("", 'time_unit = "s"'):
        mapping = MAPPING.replace('"t"', "{ day = 86400, slot = 300 }").replace('time_unit = "s"', unit)
        out = tmp_path / f"out{bool(unit)}"
        dataset = ingest(tmp_path / "in", out, config(given_mapping(tmp_path, mapping), share=0.9)).dataset
        starts = [0, 2 * 86_400 + 3 * 300, 2 * 86_400 + 287 * 300]
        assert dataset.usage(0)[s.START_US].to_pylist() == [start * 1_000_000 for start in starts]
        assert dataset.usage(0)[s.END_US].to_pylist() == [(start + 300) * 1_000_000 for start in starts]
        assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [2.0, 1.0, 3.0]
        assert dataset.manifest["rejects"] == {"day is missing or negative": 2, "slot is missing or negative": 1,
                                               "day + slot is past the last time there can be": 2}  # fmt: skip


def test_a_series_without_a_limit_has_none_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n1,300,1\n")
    mapping = given_mapping(tmp_path, MAPPING.replace("cpu_limit = 4.0", ""))
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping)).dataset
    assert dataset.usage(0)[s.CPU_LIMIT].to_pylist() == [None]
    assert s.CPU_LIMIT in dataset.manifest["lacks"]
    assert [note.split(":")[0] for note in dataset.manifest["notes"]] == ["no limit"]
    assert dataset.manifest["counts"]["windows_without_limit"] == 1
    limited = ingest(tmp_path / "in", tmp_path / "limited", config(given_mapping(tmp_path))).dataset
    assert limited.manifest["notes"] == []


def test_tasks_of_one_collection_share_its_id_and_keep_their_own(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    text = "service,vm,t,used\nweb,1,300,1\nweb,2,300,2\n7,1,300,3\n7,a,300,4\n,1,300,5\n"
    (tmp_path / "in" / "a.csv").write_text(text)
    mapping = given_mapping(tmp_path, 'collection = "service"\n' + MAPPING)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.5)).dataset
    found = {row[s.CPU_MEAN]: (row[s.COLLECTION_ID], row[s.INSTANCE_INDEX]) for row in dataset.usage(0).to_pylist()}
    assert found[1][0] == found[2][0] != 7
    assert (found[1][1], found[2][1]) == (1, 2)
    assert found[3] == (7, 1)
    assert found[4][0] == 7
    assert found[4][1] not in (0, 1)
    assert dataset.manifest["rejects"] == {"service is missing": 1}
    assert dataset.manifest["counts"]["tasks"] == 4


def test_the_column_that_names_the_task_may_also_be_its_machine(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n9007199254740993,300,1\nhost-7,300,1\n-2,300,1\n")
    mapping = given_mapping(tmp_path, MAPPING + 'machine_id = "vm"\n')
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(mapping, share=0.9)).dataset
    (row,) = dataset.usage(0).to_pylist()
    assert row[s.COLLECTION_ID] == row[s.MACHINE_ID] == 9007199254740993
    assert dataset.manifest["rejects"] == {"vm is not a bigint": 1, "vm is negative or not finite": 1}


GOLDEN_MAPPING = """
task = "vm, name"
time = "t"
time_unit = "ms"
window_s = 60
[columns]
cpu_mean = "used"
cpu_max = "peak"
memory_mean = "rss"
memory_max = "rss max"
page_cache = "cache"
cpi = "cpi"
mai = "mai"
cpu_limit = "cores"
memory_limit = 0.5
priority = "rank"
scheduling_class = "class"
machine_id = "host"
"""
GOLDEN: list[dict[str, Any]] = [
    {"vm, name": "12", "t": 60_000, "used": 0.125, "peak": 0.5, "rss": 0.25, "rss max": 0.375, "cache": 0.0625,
     "cpi": 1.5, "mai": 0.015625, "cores": 2.0, "rank": 119, "class": 3, "host": 2**53 + 1, "odd": 'a "b"'},
    {"vm, name": "12", "t": 240_000, "used": 0.0, "peak": None, "rss": None, "rss max": None, "cache": None,
     "cpi": None, "mai": None, "cores": None, "rank": None, "class": None, "host": None, "odd": "x"},
]  # fmt: skip
GOLDEN_WINDOWS: list[dict[str, Any]] = [
    {"collection_id": 12, "instance_index": 0, "start_us": 60_000_000, "end_us": 120_000_000,
     "machine_id": 2**53 + 1, "collection_type": 0, "cpu_mean": 0.125, "cpu_max": 0.5, "memory_mean": 0.25,
     "memory_max": 0.375, "page_cache": 0.0625, "cpi": 1.5, "mai": 0.015625, "cpu_limit": 2.0, "memory_limit": 0.5,
     "priority": 119, "tier": 2, "scheduling_class": 3},
    {"collection_id": 12, "instance_index": 0, "start_us": 240_000_000, "end_us": 300_000_000, "collection_type": 0,
     "cpu_mean": 0.0, "memory_limit": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("kind", [",", ";", "\t", "quoted", "parquet"])
def test_every_column_a_mapping_can_name_arrives_as_worked_by_hand(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    names = [*GOLDEN[0]]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(GOLDEN).select(names[::-1]), tmp_path / "in" / "a.parquet")
    else:
        delimiter = "," if kind == "quoted" else kind

        def field(value: object) -> str:
            text = "" if value is None else str(value)
            quotes = (kind == "quoted" and bool(text)) or delimiter in text or '"' in text
            return '"' + text.replace('"', '""') + '"' if quotes else text

        lines = [names, *([row[name] for name in names] for row in GOLDEN)]
        text = "\r\n".join(delimiter.join(field(value) for value in line) for line in lines)
        (tmp_path / "in" / "a.csv").write_text(text + "\r\n", newline="")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, GOLDEN_MAPPING))).dataset
    assert dataset.usage(0).schema.equals(s.USAGE)
    assert dataset.usage(0).to_pylist() == [{c: row.get(c) for c in s.USAGE.names} for row in GOLDEN_WINDOWS]
    assert dataset.manifest["lacks"] == sorted({*s.USAGE.names} - {*GOLDEN_WINDOWS[0]})


NAMED = MAPPING.replace("cpu_limit = 4.0", 'cpu_limit = "most"')


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", ["name", "value", "closed far below"])
def test_a_quote_that_is_not_closed_is_a_damaged_file_and_swallows_no_rows(
    place: str, packed: bool, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    good = [f"a,{300 * k},0.5,1" for k in range(200)]
    odd = 'b,0,",1' if place == "value" else '"b,0,0.5,1'
    lines = ["vm,t,used,most", *good, odd, *good, *(['c",0,0.5,1'] if place == "closed far below" else [])]
    text = ("\n".join(lines) + "\n").encode()
    (tmp_path / "in" / f"a.csv{'.gz' * packed}").write_bytes(gzip.compress(text) if packed else text)
    with pytest.raises(TraceError, match=r"1 damaged file: .*a quote in the row that begins in line 202 is not closed"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, NAMED)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param('"b,0,0.5,1', 'b",300,0.5,1', id="both in the name"),
        pytest.param('"b,0,0.5,1', '"b,300,0.5,1', id="both open"),
        pytest.param('b,0,0.5,"1', 'b,300,0.5,1"', id="in the last value"),
        pytest.param('b"c,0,0.5,"1', 'b,300,0.5,1"', id="an even number in each line"),
    ],
)
@pytest.mark.parametrize("between", [0, 50])
def test_a_quote_that_is_closed_in_a_later_row_swallows_no_rows(
    first: str, second: str, between: int, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    lines = ["vm,t,used,most", "a,0,0.5,1", first, *(f"a,{300 * k},0.5,1" for k in range(1, between + 1)), second]
    (tmp_path / "in" / "a.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError, match="a quote in the row that begins in line 3 is not closed in that row"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, NAMED), share=0.9))


@pytest.mark.parametrize("ends", [("\n", "\r\n"), ("\r\n", "\n"), ("\n", "\r")])
def test_a_file_whose_lines_end_in_different_ways_is_named_as_such(ends: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    text = f"vm,t,used{ends[0]}a,0,0.5{ends[0]}a,300,0.5{ends[1]}a,600,0.5{ends[1]}"
    (tmp_path / "in" / "a.csv").write_text(text, newline="")
    with pytest.raises(TraceError, match="some lines end in a carriage return and others do not; end all in a line"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


def test_the_lines_of_rejects_count_line_breaks_within_names(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    text = 'vm,t,used\n"b\nb\n\nb",0,1\na,300,lots\n\na,600\na,900,-1\n"c\nc",0,x\na,1200,x\n'
    (tmp_path / "in" / "a.csv").write_text(text)
    ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=0.9))
    rejects = pq.read_table(tmp_path / "out" / "rejects" / "rejects.parquet")
    assert rejects[s.REJECT_LINE].to_pylist() == [6, 8, 9, 10, 12]


def test_names_with_quotes_and_line_breaks_are_kept(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    long = "\n".join(f"{k}, {k}" for k in range(200))
    text = 'vm,t,used,most\n"a""b",0,0.5,1\n5"disk,0,0.5,1\n"c\nd",0,0.5,1\n"e,f",0,0.5,1\n'
    text += f'"{long}",0,0.5,1\n'
    (tmp_path / "in" / "a.csv").write_text(text)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, NAMED))).dataset
    found = set(dataset.table("tasks")["collection_id"].to_pylist())
    assert found == {task_id(name) for name in ('a"b', '5"disk', "c\nd", "e,f", long)}


MACHINES = "google-2011-machines"
JOBS = """
task = "job_id"
time = { day = 86400, slot = 300 }
window_s = 300
[columns]
cpu_mean = "cpu_pct"
memory_mean = "mem_pct"
"""


@pytest.mark.parametrize(
    ("folder", "mapping"),
    [("google_2011_machines", MACHINES), ("google_2011_jobs", JOBS),
     pytest.param("azure_2017", "azure", marks=pytest.mark.slow),
     pytest.param("bitbrains_faststorage", "bitbrains", marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_real_series_arrives_whole_with_its_gaps_and_the_exact_sums_of_each_task(
    tmp_path: Path, real_data: Path, folder: str, mapping: str
) -> None:
    file = real_data / folder / "usage.parquet"
    if not file.is_file():
        pytest.skip(f"{folder} is not among the real measurements")
    name = given_mapping(tmp_path, mapping) if "\n" in mapping else mapping
    dataset = ingest(file.parent, tmp_path / "out", config(name)).dataset
    columns = {c: raw for c, raw in load_mapping(name).columns.items() if isinstance(raw, str)}
    raw = pd.read_parquet(file)
    task = load_mapping(name).task
    time = (
        raw["time_s"] if "time_s" in raw else raw["day"].astype(np.int64) * 86_400 + raw["slot"].astype(np.int64) * 300
    )
    expected = pd.DataFrame({s.COLLECTION_ID: raw[task].astype(np.int64), s.START_US: time * 1_000_000})
    expected = expected.assign(**{c: raw[column].astype(np.float64) for c, column in columns.items()})
    expected = expected.sort_values([s.COLLECTION_ID, s.START_US], ignore_index=True)
    found = dataset.usage(0, [s.COLLECTION_ID, s.START_US, *columns]).to_pandas()
    assert dataset.manifest["rejects"] == {}
    assert dataset.manifest["counts"]["duplicate_windows"] == 0
    for column in (s.COLLECTION_ID, s.START_US):  # so every gap is where it was, too
        assert np.array_equal(found[column], expected[column])
    sums = [frame.groupby(s.COLLECTION_ID)[[*columns]].sum() for frame in (found, expected)]
    assert sums[0].astype(np.float64).equals(sums[1])
    limits = expected[s.CPU_LIMIT] if s.CPU_LIMIT in columns else pd.Series(100.0 if folder == "azure_2017" else np.nan,
                                                                           expected.index)  # fmt: skip
    arrived = dataset.usage(0, [s.CPU_LIMIT])[s.CPU_LIMIT].to_pandas().astype(np.float64)
    assert np.array_equal(arrived, limits, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "rows", "warning"),
    [
        ({"window_s = 300": "window_s = 600"}, "1,{t},0.1,0\n", "a window begins before an earlier one"),
        ({}, "1,{t}000,0.1,0\n", "finer unit than the mapping says"),
        ({"cpu_limit = 4.0": "cpu_limit = 0.01"}, "1,{t},0.1,0\n", "cpu_mean is more than twice its limit"),
        ({"cpu_mean =": "cpu_max = 0.05\ncpu_mean ="}, "1,{t},0.1,0\n", "cpu_mean and cpu_max are swapped"),
        ({}, "1,{t},0.1,0\n", None),
        (
            MEMORY | {"cpu_mean =": "memory_limit = 100\ncpu_mean ="},
            "1,{t},0.1,5224\n",
            "memory_mean is more than twice",
        ),
        (
            MEMORY | {"cpu_mean =": "memory_max = 7\ncpu_mean ="},
            "1,{t},0.1,9\n",
            "memory_mean and memory_max are swapped",
        ),
    ],
)
def test_a_wrong_mapping_is_warned_of_with_its_share_and_likely_cause(
    changes: dict[str, str], rows: str, warning: str | None, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    text = "vm,t,used,memory\n" + "".join(rows.format(t=300 * k) for k in range(1, 40))
    (tmp_path / "in" / "a.csv").write_text(text)
    mapping = MAPPING
    for old, new in changes.items():
        mapping = mapping.replace(old, new)
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, mapping))).dataset
    warnings = dataset.manifest["warnings"]
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


def test_ingest_says_why_windows_have_no_limit_by_whether_there_are_events(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n1,300,0.5\n")
    mapping = given_mapping(tmp_path, MAPPING.replace("cpu_limit = 4.0", ""))
    report = ingest(tmp_path / "in", tmp_path / "out", config(mapping))
    _, lines = of_ingest(report, tmp_path / "out")
    assert "1 windows have no CPU limit: the trace gives them none above 0" in lines
    report.dataset.manifest["counts"]["events"] = 3
    _, lines = of_ingest(report, tmp_path / "out")
    assert "1 windows have no CPU limit: no event gives them one above 0" in lines


def test_ingest_says_how_many_windows_came_twice(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n1,300,0.5\n1,300,0.6\n2,300,0.5\n")
    _, lines = of_ingest(
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path, MAPPING))), tmp_path / "out"
    )
    assert "1 windows repeat a task and a time of others; one of each is kept" in lines


def test_ingest_names_the_first_files_that_were_not_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n1,300,0.5\n")
    for number, said in ((1, "not read: 0.zip"), (5, "not read: 0.zip, 1.zip, 2.zip and 2 more")):
        for name in range(number):
            (tmp_path / "in" / f"{name}.zip").touch()
        report = ingest(tmp_path / "in", tmp_path / f"out-{number}", config(given_mapping(tmp_path, MAPPING)))
        assert said in of_ingest(report, tmp_path / "out")[1]
