"""Ingest into an object store: a dataset appears whole or not at all, wherever a run is killed."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from reclaim.data.core.stores.places import home_of, location, opened
from reclaim.data.dataset import MANIFEST, Dataset
from reclaim.data.errors import ConfigError, DataError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from tests.folders import contents
from tests.object_store import Bucket, Killed, breaking_off, dies_after

CONFIG = IngestConfig(buckets=2)
DATASET = "cells/dataset"


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small synthetic cell."""
    folder = tmp_path_factory.mktemp("local") / "cell"
    write_cell(folder, SyntheticCellConfig(machines=3, days=0.25, seed=5))
    return folder


@pytest.fixture(scope="module")
def plain(cell: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of its dataset."""
    out = tmp_path_factory.mktemp("plain") / "dataset"
    ingest(cell, out, CONFIG)
    return contents(out)


def test_a_dataset_written_to_a_store_has_the_bytes_of_one_here_and_leaves_nothing_else(
    cell: Path, plain: dict[str, bytes], bucket: Bucket, tmp_path: Path
) -> None:
    source = location(bucket.put(cell, "traces/cell"))
    out = location(f"{bucket.url}/{DATASET}/")
    report = ingest(source, out, CONFIG)
    assert report.dataset.n_windows > 0
    assert bucket.contents("cells") == {f"dataset/{name}": content for name, content in plain.items()}
    assert contents(tmp_path / "cache") == {}
    assert ingest(source, out, CONFIG).already_there
    with pytest.raises(ConfigError, match=rf"{bucket.url}/{DATASET}: holds a dataset made from other files or options"):
        ingest(source, out, IngestConfig(buckets=3))


@pytest.mark.slow
def test_killed_at_any_write_there_is_no_dataset_and_the_next_run_makes_it(
    cell: Path, plain: dict[str, bytes], bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = location(f"{bucket.url}/{DATASET}")
    seen = set()
    for survive in count():
        with monkeypatch.context() as patch:
            dies_after(patch, survive)
            try:
                ingest(cell, out, CONFIG)
                break
            except Killed:
                pass
        whole = f"dataset/{MANIFEST}" in bucket.contents("cells")
        seen.add(whole)
        if not whole:
            with pytest.raises(
                ConfigError, match=rf"{out}: no manifest\.json in it; `reclaim ingest SOURCE {out}` makes"
            ):
                Dataset.open(str(out))
    assert survive > 12
    assert seen == {False, True}
    assert bucket.contents("cells") == {f"dataset/{name}": content for name, content in plain.items()}
    assert contents(tmp_path / "cache") == {}


def test_another_machine_clears_what_a_killed_run_left_and_nothing_that_is_not_its_own(
    cell: Path, plain: dict[str, bytes], bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = location(f"{bucket.url}/{DATASET}")
    with monkeypatch.context() as patch:
        dies_after(patch, 8)
        with pytest.raises(Killed):
            ingest(cell, out, CONFIG)
    assert "dataset.partial" in bucket.contents("cells")
    bucket.files().pipe(f"{out}/usage/bucket=009.parquet", b"of a run with more buckets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    ingest(cell, out, CONFIG)
    assert bucket.contents("cells") == {f"dataset/{name}": content for name, content in plain.items()}
    bucket.files().pipe(f"{bucket.url}/mine/letter", b"dear")
    with pytest.raises(ConfigError, match=rf"{bucket.url}/mine: exists and is no dataset; choose another folder"):
        ingest(cell, location(f"{bucket.url}/mine"), CONFIG)
    assert bucket.contents("mine") == {"letter": b"dear"}


def test_a_bucket_that_cannot_be_written_to_is_found_before_the_trace_is_read(
    cell: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("Access Denied")

    out = location(f"{bucket.url}/{DATASET}")
    with monkeypatch.context() as patch:
        patch.setattr(opened(out)[0], "pipe_file", refuse)
        with pytest.raises(ConfigError, match=rf"{out}: no permission \(Access Denied\)"):
            ingest(cell, out, CONFIG)
    assert not list(home_of(out).rglob("done.json"))
    out = location("s3://no-such-bucket-here/dataset")
    with pytest.raises(ConfigError, match=r"s3://no-such-bucket-here/dataset: no such object, folder or bucket"):
        ingest(cell, out, CONFIG)
    assert not list(home_of(out).rglob("done.json"))
    with pytest.raises(ConfigError, match="no place for a dataset; name a folder in it"):
        ingest(cell, location(bucket.url), CONFIG)


def test_a_store_that_stops_while_it_is_written_to_is_one_error_and_the_next_run_ends_the_work(
    cell: Path, plain: dict[str, bytes], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with breaking_off(bucket.address, after=12_000) as (host, port):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        bucket.files()
        with pytest.raises(DataError, match=rf"{bucket.url}/{DATASET}: the store could not .*; run again"):
            ingest(cell, location(f"{bucket.url}/{DATASET}"), CONFIG)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*bucket.address))
    bucket.files()
    assert f"dataset/{MANIFEST}" not in bucket.contents("cells")
    ingest(cell, location(f"{bucket.url}/{DATASET}"), CONFIG)
    assert bucket.contents("cells") == {f"dataset/{name}": content for name, content in plain.items()}
