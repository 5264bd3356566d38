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
