"""Plain series: a user's own CSV or parquet through a small mapping file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data import schema as s
from reclaim.data.errors import ConfigError, SchemaError
from reclaim.data.ingest import IngestConfig, ingest
from reclaim.data.series import load_mapping, shipped_mappings

MAPPING = """
task = "vm"
time = "t"
time_unit = "s"
window_s = 300
[columns]
cpu_mean = "used"
cpu_limit = 4.0
"""


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


def test_parquet_and_csv_of_the_same_rows_give_the_same_windows(tmp_path: Path) -> None:
    for name in ("csv", "parquet"):
        (tmp_path / name).mkdir()
    (tmp_path / "csv" / "a.csv").write_text("vm,t,used\n1,300,1.25\n2,300,0.5\n")
    pq.write_table(pa.table({"vm": [1, 2], "t": [300, 300], "used": [1.25, 0.5]}), tmp_path / "parquet" / "a.parquet")
    mapping = given_mapping(tmp_path)
    made = [ingest(tmp_path / n, tmp_path / f"out-{n}", config(mapping)).dataset.usage(0) for n in ("csv", "parquet")]
    assert made[0].equals(made[1])


def test_a_mapping_that_names_a_column_the_file_lacks_says_which(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("vm,t,usage\n1,300,1\n")
    with pytest.raises(SchemaError, match="the mapping names columns used, the file has t, usage, vm"):
        ingest(tmp_path / "in", tmp_path / "out", config(given_mapping(tmp_path)))
    assert not (tmp_path / "out").exists()


def test_every_mistake_in_a_mapping_is_named_at_once(tmp_path: Path) -> None:
    text = MAPPING.replace("window_s = 300", "windows = 300").replace("cpu_limit", "cpu_limits")
    with pytest.raises(ConfigError, match=r"unknown key 'windows'; missing key 'window_s'"):
        load_mapping(given_mapping(tmp_path, text))
    with pytest.raises(ConfigError, match=r"unknown canonical column 'cpu_limits'.*columns.cpu_limit is required"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace("cpu_limit", "cpu_limits")))
    with pytest.raises(ConfigError, match="time_unit must be one of s, ms, us, got 'min'"):
        load_mapping(given_mapping(tmp_path, MAPPING.replace('"s"', '"min"')))
    with pytest.raises(ConfigError, match="no such file, and shipped are only azure, bitbrains"):
        load_mapping(tmp_path / "none.toml")


def test_series_needs_a_mapping_and_other_traces_take_none() -> None:
    with pytest.raises(ConfigError, match="'series' needs one"):
        IngestConfig(trace="series")
    with pytest.raises(ConfigError, match="a mapping goes with trace 'series'"):
        IngestConfig(mapping="azure")


@pytest.mark.parametrize("name", ["azure", "bitbrains"])
def test_shipped_mappings_read(name: str) -> None:
    assert name in shipped_mappings()
    assert load_mapping(name).window_s == 300


def test_the_real_azure_series_arrives_whole(tmp_path: Path, real_data: Path) -> None:
    dataset = ingest(real_data / "azure_2017", tmp_path / "out", config("azure")).dataset
    raw = pq.read_table(real_data / "azure_2017" / "usage.parquet")
    assert dataset.n_windows + dataset.manifest["counts"]["duplicate_windows"] == len(raw)
    total = np.sum(dataset.usage(0)[s.CPU_MEAN].to_numpy())
    assert total == pytest.approx(raw["avg_cpu_pct"].to_numpy().astype(np.float64).sum(), rel=1e-9)
