"""Tables that are written whole or not at all, on a full disk and after a power cut, and always to the same bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data.core.parquet import ROW_GROUP_ROWS, TableWriter

ROWS = pa.table({"a": [1, 2, 3]})


def write(path: Path) -> None:
    with TableWriter(path, ROWS.schema) as writer:
        writer.write(ROWS)


def test_a_table_whose_last_rows_find_no_room_leaves_nothing_and_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(OSError, match=r"No space left on device: .*a\.parquet"):
            write(tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())
    write(tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet") == ROWS


def test_a_durable_table_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = dict[int, int](), os.fsync

    def spy(fd: int) -> None:
        assert not (tmp_path / "a.parquet").exists()
        synced[os.fstat(fd).st_ino] = os.fstat(fd).st_size
        sync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    with TableWriter(tmp_path / "a.parquet", ROWS.schema, durable=True) as writer:
        writer.write(ROWS)
    found = (tmp_path / "a.parquet").stat()
    assert synced == {found.st_ino: found.st_size}


def test_the_same_rows_give_the_same_bytes_in_batches_of_any_size(tmp_path: Path) -> None:
    rows = 2 * ROW_GROUP_ROWS + 5
    table, path, written = pa.table({"a": range(rows)}), tmp_path / "a.parquet", set[bytes]()
    for size in (rows, 40_000, 7_001):
        with TableWriter(path, table.schema) as writer:
            for batch in table.to_batches(size):
                writer.write(batch)
        assert writer.rows == rows
        written.add(path.read_bytes())
    assert len(written) == 1
    groups = pq.read_metadata(path)
    assert [groups.row_group(k).num_rows for k in range(3)] == [ROW_GROUP_ROWS, ROW_GROUP_ROWS, 5]
    with TableWriter(path, table.schema):
        pass
    assert pq.read_table(path) == table[:0]


def test_vectors_and_numbers_that_hardly_repeat_give_the_same_bytes_too_without_a_dictionary(tmp_path: Path) -> None:
    rows, path, written = ROW_GROUP_ROWS + 5, tmp_path / "a.parquet", set[bytes]()
    table = pa.table({
        "key": [k // 3 for k in range(rows)], "name": [f"n{k % 9}" for k in range(rows)],
        "cpu": pa.array([k / 7 if k % 5 else None for k in range(rows)], pa.float32()),
        "levels": pa.array([[k / 7] * 11 if k % 4 else None for k in range(rows)], pa.list_(pa.float32())),
    })  # fmt: skip
    for size in (rows, 40_000, 7_001):
        with TableWriter(path, table.schema, statistics=("key",), unlike=("cpu",)) as writer:
            for batch in table.to_batches(size):
                writer.write(batch)
        written.add(path.read_bytes())
    assert len(written) == 1
    assert pq.read_table(path) == table
    group = pq.read_metadata(path).row_group(0)
    columns = {group.column(k).path_in_schema.split(".")[0]: group.column(k) for k in range(group.num_columns)}
    assert {name: column.is_stats_set for name, column in columns.items()} == {
        "key": True, "name": False, "cpu": False, "levels": False,
    }  # fmt: skip
    assert (columns["key"].statistics.min, columns["key"].statistics.max) == (0, (ROW_GROUP_ROWS - 1) // 3)
    split = {name for name, column in columns.items() if "BYTE_STREAM_SPLIT" in column.encodings}
    assert split == {"cpu", "levels"}
    assert {name for name, column in columns.items() if column.has_dictionary_page} == {"key", "name"}
