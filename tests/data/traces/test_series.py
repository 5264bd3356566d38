"""Plain series: a user's own CSV or parquet through a small mapping file."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
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
from reclaim.data.errors import SchemaError, TraceError
from reclaim.data.ingest.job import ingest, plan_buckets
from reclaim.data.traces.series import _id_sql, series, task_id
from reclaim.data.traces.series_mapping import load_mapping
from tests.data.traces.mapped import MAPPING, MEMORY, SAME, config, given_mapping, names_of


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
        ("1,300,5%", "plain numbers, not 5%"),
        ("1,1700000000000000000,1", "a finer unit than the mapping says: time_unit takes s, ms or us"),
        ("1,300,NaN", r"null of parquet or an empty field, not NaN \(in polars `fill_nan\(None\)`\)$"),
    ],
)
def test_where_too_many_values_are_rejected_the_error_says_what_to_do(tmp_path: Path, row: str, remedy: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text(f"vm,t,used\n{row}\n")
    with pytest.raises(TraceError, match=remedy):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))


def test_a_number_has_no_underscore(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\na,300,1_0\na,1_0,1\na,600,1e1\n")
    dataset = ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path), share=0.9)).dataset
    assert dataset.manifest["rejects"] == {"used is not a double": 1, "t is not a double": 1}
    assert dataset.usage(0)[s.CPU_MEAN].to_pylist() == [10.0]


def test_every_task_name_is_a_task_of_its_own_and_integers_stay_what_they_are(tmp_path: Path) -> None:
    names = [f"web-{k}" for k in range(120)] + [f"1.{k}" for k in range(60)]
    names += ["7", "007", "07", "0", "-0", "+7", "1e3", "1000", "0x10", "16", "true", "-5", "7.0", "nan"]
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
        ("2026-11-28T12:00:00+99:00", "t is not a time by ISO 8601"),
        ("2026-11-28T12:00:00-15:00", "t is not a time by ISO 8601"),
        ("2026-11-28T12:00:00+05:60", "t is not a time by ISO 8601"),
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
        ({"window_s = 300": "window_s = 30"}, "1,{t},0.1,0\n", "windows are longer than window_s of the mapping says"),
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


def test_ingest_says_why_lines_were_rejected_and_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,used\n1,300,0.5\n1,soon,0.6\n2,300,nan\n2,never,0.1\n")
    mapping = given_mapping(tmp_path, MAPPING)
    report = ingest(tmp_path / "in", tmp_path / "out", replace(config(mapping), max_reject_share=1.0))
    _, lines = of_ingest(report, tmp_path / "out")
    assert lines[0].endswith("1 windows of 1 tasks, recorded; 3 lines rejected, 0 files damaged")
    assert lines[1] == (
        "rejected: t is not a double (2), used is negative or not finite (1); rejects/rejects.parquet has the file and "
        "number of each line"
    )
