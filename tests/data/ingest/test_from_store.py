"""Ingest of a trace in an object store: the bytes of a local one, and errors that name the object and the remedy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from reclaim.data.core.engine import workers as engine
from reclaim.data.core.stores import transfer
from reclaim.data.core.stores.places import location, opened
from reclaim.data.errors import ConfigError, DataError, TraceError
from reclaim.data.ingest import job
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from tests.folders import contents
from tests.object_store import Bucket, breaking_off

CONFIG = IngestConfig(buckets=3)
NAME = "cell"
"""Name of the trace's folder wherever it lies: the manifest has it."""


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small synthetic cell of a few shards."""
    folder = tmp_path_factory.mktemp("local") / NAME
    write_cell(folder, SyntheticCellConfig(machines=4, days=0.25, shard_hours=2, seed=5))
    return folder


@pytest.fixture(scope="module")
def plain(cell: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return its dataset, read from this machine."""
    out = tmp_path_factory.mktemp("plain") / "dataset"
    ingest(cell, out, CONFIG)
    return out


@pytest.mark.parametrize(("workers", "pool_bytes"), [(1, 1 << 60), (2, 1 << 60), (2, 0)])
def test_a_trace_in_a_store_gives_the_bytes_of_the_same_trace_here_by_any_workers(
    workers: int, pool_bytes: int, cell: Path, plain: Path, bucket: Bucket, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(engine, "POOL_BYTES", pool_bytes)
    source = location(bucket.put(cell, f"traces/{NAME}"))
    out = tmp_path / "out"
    config = IngestConfig(buckets=3, workers=workers, memory_limit_mib=2048)
    ingest(source, out, config)
    assert contents(out) == contents(plain)
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == ["out"]
    assert ingest(source, out, config).already_there


def test_csv_and_parquet_in_a_store_give_the_bytes_of_the_same_files_here(bucket: Bucket, tmp_path: Path) -> None:
    folder = tmp_path / NAME
    write_cell(folder, SyntheticCellConfig(machines=3, days=0.25, seed=5, format="parquet"))
    ingest(folder, tmp_path / "here", CONFIG)
    ingest(location(bucket.put(folder, NAME)), tmp_path / "there", CONFIG)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    series = tmp_path / "series" / NAME
    (series / "old").mkdir(parents=True)
    for name in ("1.csv", "old/2.csv"):
        rows = "".join(f"{name},{300 * k},{k},1.0,9,4\n" for k in range(5))
        (series / name).write_text(f"vm,time_s,cpu_used_mhz,mem_used_mib,cpu_capacity_mhz,mem_capacity_mib\n{rows}")
    mapping = tmp_path / "vms.toml"
    mapping.write_text(
        'task = "vm"\ntime = "time_s"\ntime_unit = "s"\nwindow_s = 300\nfiles = ["**/*.csv"]\n'
        '[columns]\ncpu_mean = "cpu_used_mhz"\ncpu_limit = "cpu_capacity_mhz"\n'
    )
    vms = IngestConfig(trace="series", mapping=str(mapping), buckets=2)
    assert ingest(series, tmp_path / "here-series", vms).dataset.n_windows == 10
    ingest(location(bucket.put(series, f"series/{NAME}")), tmp_path / "there-series", vms)
    assert contents(tmp_path / "there-series") == contents(tmp_path / "here-series")


def test_a_truncated_object_is_named_as_such_and_skipped_on_request_as_a_local_file_is(
    cell: Path, bucket: Bucket, tmp_path: Path
) -> None:
    damaged = tmp_path / NAME
    shutil.copytree(cell, damaged)
    file = sorted(damaged.glob("instance_usage-*"))[1]
    file.write_bytes(file.read_bytes()[:-2_000])
    source = location(bucket.put(damaged, NAME))
    with pytest.raises(TraceError, match=rf"1 damaged file: {source}/{file.name}: truncated or corrupt gzip"):
        ingest(source, tmp_path / "there", CONFIG)
    skipping = IngestConfig(buckets=3, skip_damaged=True)
    ingest(source, tmp_path / "there", skipping)
    ingest(damaged, tmp_path / "here", skipping)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_a_missing_bucket_and_a_missing_folder_are_named(bucket: Bucket, tmp_path: Path) -> None:
    for place in ("s3://no-such-bucket-here/cell", f"{bucket.url}/nowhere"):
        with pytest.raises(ConfigError, match=rf"{place}: no such object, folder or bucket .*; check the name"):
            ingest(location(place), tmp_path / "out", CONFIG)
    assert not (tmp_path / "out").exists()


def test_a_store_that_stops_in_the_middle_of_a_read_is_one_error_and_the_next_run_goes_on_from_there(
    cell: Path, plain: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = location(bucket.put(cell, NAME))
    sizes = sorted((file.stat().st_size for file in cell.glob("instance_usage-*")), reverse=True)
    with breaking_off(bucket.address, after=sizes[0] + sizes[1] // 2 + 20_000) as (host, port):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        bucket.files()
        with pytest.raises(DataError, match=rf"{source}/instance_usage-\d+\.json\.gz: the store .* run again"):
            ingest(location(str(source)), tmp_path / "out", CONFIG)
    done = list((tmp_path / "out.partial" / "shards").rglob("done.json"))
    assert len(done) == 1
    before = done[0].stat().st_mtime_ns
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*bucket.address))
    bucket.files()
    read: list[str] = []
    fetch = transfer.fetch_file

    def noting(path: Path, copy: Path) -> None:
        read.append(path.name)
        assert done[0].stat().st_mtime_ns == before
        fetch(path, copy)

    monkeypatch.setattr(transfer, "fetch_file", noting)
    ingest(location(str(source)), tmp_path / "out", CONFIG)
    assert contents(tmp_path / "out") == contents(plain)
    assert done[0].parent.name not in read
    assert len(read) == len(list(cell.glob("*.json.gz"))) - 1


def test_an_object_that_was_replaced_since_a_killed_run_is_read_again(
    cell: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(*_: object) -> None:
        raise KeyboardInterrupt

    changed = tmp_path / NAME
    shutil.copytree(cell, changed)
    file = sorted(changed.glob("machine_events-*"))[0]
    source = location(bucket.put(changed, NAME))
    with monkeypatch.context() as patch:
        patch.setattr(job, "make_bucket", dying)
        with pytest.raises(KeyboardInterrupt):
            ingest(source, tmp_path / "there", CONFIG)
    content = bytearray(file.read_bytes())
    content[4] ^= 1  # its time of packing, of which no row knows
    file.write_bytes(content)
    bucket.put(changed, NAME)
    ingest(source, tmp_path / "there", CONFIG)
    ingest(changed, tmp_path / "here", CONFIG)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_an_object_that_comes_with_fewer_bytes_than_the_store_lists_is_no_damaged_file(
    cell: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = location(bucket.put(cell, NAME))
    files, _ = opened(source)
    fetch = files.get_file

    def short(name: str, copy: str) -> None:
        fetch(name, copy)
        os.truncate(copy, 20)

    monkeypatch.setattr(files, "get_file", short)
    with pytest.raises(
        DataError, match=rf"{source}/.*: expected \d+ bytes, got 20; it changed while it was read, so run"
    ):
        ingest(source, tmp_path / "out", IngestConfig(buckets=3, skip_damaged=True))


def test_a_history_in_a_store_is_refused_with_the_remedy(cell: Path, bucket: Bucket, tmp_path: Path) -> None:
    source = location(bucket.put(cell, NAME))
    with pytest.raises(ConfigError, match=rf"{source}: a history .*; copy it to this machine"):
        ingest(source, tmp_path / "out", IngestConfig(trace="kubernetes"))
