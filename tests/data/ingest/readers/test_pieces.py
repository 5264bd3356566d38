"""Staged rows of tables other than usage: they come back by bucket, in their order, in the columns asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from reclaim.data import schema as s
from reclaim.data.ingest.readers import pieces
from reclaim.data.ingest.readers.pieces import PIECES_FILE, PiecesWriter, read_pieces
from reclaim.data.ingest.readers.staging import CHUNKS_FILE, buckets_of

RAW = pa.schema([("other", pa.string()), *((name, pa.int64()) for name in s.TASK_KEY), ("list", pa.list_(pa.int8()))])
ASKED = pa.schema([("list", pa.list_(pa.int64())), (s.INSTANCE_INDEX, pa.int32()), ("lacks", pa.string())])


def batch(first: int, n: int) -> pa.RecordBatch:
    numbers = range(first, first + n)
    columns = [
        [f"row {k}" for k in numbers],
        [k % 7 for k in numbers],
        list(numbers),
        [None if k % 5 == 0 else [k % 3, 1] for k in numbers],
    ]
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, RAW, strict=True)], schema=RAW)


@pytest.mark.parametrize(("at_once", "buckets"), [(1, 3), (100, 2), (50_000, 3)])
def test_rows_of_a_bucket_come_back_in_their_order_with_null_for_what_they_lack(
    at_once: int, buckets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_FEWEST_ROWS", at_once)
    folders = [tmp_path / name for name in ("a", "empty", "b")]
    for folder, parts in zip(folders, ([(0, 150), (150, 0), (150, 50)], [], [(200, 30)]), strict=True):
        folder.mkdir()
        with PiecesWriter(folder, buckets) as writer:
            for first, n in parts:
                writer.add(batch(first, n))
        assert writer.rows == sum(n for _, n in parts)
        assert (folder / PIECES_FILE).exists() == bool(parts)
    index = np.arange(230)
    bucket = buckets_of(index % 7, index, buckets)
    for k in range(buckets):
        found = pa.Table.from_batches(read_pieces(folders, k, ASKED), ASKED)
        assert found[s.INSTANCE_INDEX].to_pylist() == index[bucket == k].tolist()
        assert found["list"].to_pylist() == [None if i % 5 == 0 else [i % 3, 1] for i in index[bucket == k].tolist()]
        assert found["lacks"].null_count == len(found)


def test_rows_are_written_once_there_are_enough_and_do_not_wait_in_memory_for_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_FEWEST_ROWS", 100)
    monkeypatch.setattr(pieces, "_MOST_ROWS", 120)
    for buckets, enough in ((1, 100), (9, 120)):  # for each bucket 50, within the two bounds
        folder = tmp_path / str(buckets)
        folder.mkdir()
        with PiecesWriter(folder, buckets) as writer:
            writer.add(batch(0, enough - 1))
            assert not (folder / PIECES_FILE).exists()
            writer.add(batch(enough - 1, 1))
            assert (folder / PIECES_FILE).exists()


def test_rows_of_no_task_are_one_bucket(tmp_path: Path) -> None:
    names = pa.record_batch([pa.array(["x", "y"])], ["name"])
    with PiecesWriter(tmp_path, 1) as writer:
        writer.add(names)
    found = pa.Table.from_batches(read_pieces([tmp_path], 0, names.schema))
    assert found["name"].to_pylist() == ["x", "y"]


def test_rows_that_are_repeated_near_by_are_kept_once_and_all_are_counted(tmp_path: Path) -> None:
    names = pa.record_batch([pa.array(["x", "y", "x"]), pa.array([1, None, 1])], ["name", "id"])
    with PiecesWriter(tmp_path, 1, repeated=True) as writer:
        for _ in range(4):
            writer.add(names)
    assert writer.rows == 12
    found = pa.Table.from_batches(read_pieces([tmp_path], 0, names.schema))
    assert found.to_pylist() == [{"name": "x", "id": 1}, {"name": "y", "id": None}]


def test_a_writer_that_fails_leaves_no_list_of_chunks(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), PiecesWriter(tmp_path, 3):
        raise KeyboardInterrupt
    assert not (tmp_path / CHUNKS_FILE).exists()
