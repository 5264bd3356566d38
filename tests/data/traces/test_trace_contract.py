"""Promises of every trace format, held over a small trace of each: rows, times, units, tiers, pieces and damage."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from reclaim.data import schema as s
from reclaim.data.errors import ReclaimError
from reclaim.data.ingest import job as ingest_module
from reclaim.data.ingest.bucket import BucketJob
from reclaim.data.ingest.job import TRACES, IngestConfig, ingest
from tests.data.traces.small import N_TASKS, N_WINDOWS, SMALL
from tests.folders import contents

US = 1_000_000
KEY = (s.COLLECTION_ID, s.INSTANCE_INDEX, s.START_US)


@pytest.fixture(params=TRACES)
def trace(request: pytest.FixtureRequest) -> str:
    """Return each format in turn."""
    name: str = request.param
    assert name in SMALL, f"tests/data/traces/small.py has no small trace of {name}"
    return name


def write(trace: str, folder: Path, parts: int = 1) -> IngestConfig:
    """Write the small trace; return the settings that read it into one bucket."""
    folder.mkdir()
    return replace(SMALL[trace][0](folder, parts), buckets=1)


def usage(trace: str, tmp_path: Path) -> pa.Table:
    """Return the windows of the small trace."""
    config = write(trace, tmp_path / "in")
    return ingest(tmp_path / "in", tmp_path / "out", config).dataset.usage(0)


def test_every_window_arrives_once_in_the_order_of_tasks_and_times(trace: str, tmp_path: Path) -> None:
    keys = [tuple(row.values()) for row in usage(trace, tmp_path).select(KEY).to_pylist()]
    assert keys == sorted(set(keys))
    assert len(keys) == N_TASKS * N_WINDOWS
    assert len({key[:2] for key in keys}) == N_TASKS


def test_times_are_whole_microseconds_of_utc_or_of_the_trace(trace: str, tmp_path: Path) -> None:
    table = usage(trace, tmp_path)
    assert table.schema.field(s.START_US).type == table.schema.field(s.END_US).type == pa.int64()
    first = SMALL[trace][1]
    assert set(table[s.START_US].to_pylist()) == {(first + 300 * k) * US for k in range(N_WINDOWS)}
    assert set(pc.subtract(table[s.END_US], table[s.START_US]).to_pylist()) == {300 * US}


@pytest.mark.parametrize(
    ("columns", "limit"),
    [((s.CPU_MEAN, s.CPU_MAX), s.CPU_LIMIT), ((s.MEMORY_MEAN, s.MEMORY_MAX), s.MEMORY_LIMIT)],
)
def test_usage_is_not_negative_and_in_the_unit_of_its_limit(
    columns: tuple[str, ...], limit: str, trace: str, tmp_path: Path
) -> None:
    """A limit in other units is a thousand times too large or too small: windows of the small trace are within it."""
    table = usage(trace, tmp_path)
    limits = table[limit].to_numpy()
    assert (limits > 0).all()
    known = {name: values for name in columns if np.isfinite(values := table[name].to_numpy()).any()}
    assert known
    for name, values in known.items():
        assert ((values > limits / 100) & (values <= limits * (1 + 1e-9))).all(), name
    if len(known) == len(columns):
        mean, highest = known.values()
        assert (mean <= highest * (1 + 1e-9)).all()


def test_a_tier_is_one_of_the_schema_or_unknown(trace: str, tmp_path: Path) -> None:
    assert set(usage(trace, tmp_path)[s.TIER].to_pylist()) <= {None, *range(len(s.TIERS))}


def test_rows_do_not_depend_on_files_buckets_and_passes(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = usage(trace, tmp_path)
    config = replace(write(trace, tmp_path / "parts", parts=3), buckets=2)
    monkeypatch.setattr(ingest_module, "BucketJob", lambda *args: replace(BucketJob(*args), rows_at_once=1))
    dataset = ingest(tmp_path / "parts", tmp_path / "pieces", config).dataset
    pieces = pa.concat_tables([dataset.usage(bucket) for bucket in range(2)])
    assert pieces.sort_by([(name, "ascending") for name in KEY]).equals(whole)
    assert dataset.manifest["rejects"] == {}


def test_read_twice_it_gives_the_same_bytes(trace: str, tmp_path: Path) -> None:
    config = write(trace, tmp_path / "in")
    first, second = (ingest(tmp_path / "in", tmp_path / name, config).dataset.path for name in ("one", "two"))
    assert contents(first) == contents(second)


@pytest.mark.parametrize("damage", ["empty", "noise", "cut"])
def test_a_damaged_file_is_named_and_no_dataset_is_left(damage: str, trace: str, tmp_path: Path) -> None:
    config = write(trace, tmp_path / "in", parts=2)
    files = [path for path in (tmp_path / "in").rglob("*") if path.suffix in (".csv", ".gz", ".parquet", ".npz")]
    file = max(files, key=lambda path: (path.stat().st_size, path.name))  # one of usage
    whole = file.read_bytes()
    if damage == "cut" and file.suffix == ".csv":
        pytest.skip("a text that ends early is a reject, or no loss at all")
    file.write_bytes({"empty": b"", "noise": b"\x00\xff\n" * 99, "cut": whole[: len(whole) // 2]}[damage])
    with pytest.raises(ReclaimError, match=re.escape(file.name)):
        ingest(tmp_path / "in", tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
