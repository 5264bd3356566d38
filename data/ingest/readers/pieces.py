"""Stages rows of every table but usage between reading and sorting, as Arrow record batches, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.columns import array_of, values_of
from reclaim.data.ingest.readers.staging import buckets_of, chunks_of, save_chunks

PIECES_FILE: Final = "pieces.arrow"
_ROWS_OF_A_BUCKET: Final = 50
_FEWEST_ROWS, _MOST_ROWS = 50_000, 200_000
"""Rows spread at once: so many that each of many buckets gets some, at about 0.1 KiB each."""
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


class PiecesWriter:
    """Writes rows into a folder, bucket by bucket; a context manager. Without a row there is no file.

    Parameters
    ----------
    folder : Path
    buckets : int
        1: rows need not be of tasks.
    repeated : bool
        Whether most rows are repeated, as the names in each window of a task: those that are near are kept once.
    """

    def __init__(self, folder: Path, buckets: int, *, repeated: bool = False) -> None:
        self._folder = folder
        self._buckets = buckets
        self._repeated = repeated
        self._at_once = min(max(_ROWS_OF_A_BUCKET * buckets, _FEWEST_ROWS), _MOST_ROWS)
        self._file: pa.ipc.RecordBatchFileWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._n_waiting = 0
        self._chunks: list[tuple[int, int, int]] = []
        self.rows = 0

    def __enter__(self) -> PiecesWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None:
            self._spread()
            save_chunks(self._folder, np.array(self._chunks, np.int64).reshape(-1, 3))
        if self._file is not None:
            self._file.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows; all have the same columns."""
        if not len(batch):
            return
        self._waiting.append(batch)
        self._n_waiting += len(batch)
        self.rows += len(batch)
        if self._n_waiting >= self._at_once:
            self._spread()

    def _spread(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        if self._repeated:
            table = table.group_by(table.column_names, use_threads=False).aggregate([])
        (whole,) = table.combine_chunks().to_batches()
        self._waiting, self._n_waiting = [], 0
        if self._file is None:
            self._file = pa.ipc.new_file(str(self._folder / PIECES_FILE), whole.schema, options=_OPTIONS)
        counts = np.array([len(whole)])
        if self._buckets > 1:
            collection, index = (np.array(values_of(whole.column(name))) for name in s.TASK_KEY)
            bucket = buckets_of(collection, index, self._buckets)
            whole = whole.take(array_of(np.argsort(bucket, kind="stable")))
            counts = np.bincount(bucket, minlength=self._buckets)
        ends = np.cumsum(counts)
        for k in np.flatnonzero(counts).tolist():
            self._file.write_batch(whole.slice(ends[k] - counts[k], counts[k]))
            self._chunks.append((k, len(self._chunks), int(counts[k])))


def read_pieces(folders: Iterable[Path], bucket: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield a bucket's rows out of all folders, in the folders' order, in the columns of the schema.

    A column that a folder's rows lack is null.
    """
    for folder in folders:
        if not len(chunks := chunks_of(folder, bucket)):
            continue
        with pa.memory_map(str(folder / PIECES_FILE)) as content, pa.ipc.open_file(content) as file:
            for number in chunks[:, 1].tolist():
                rows = file.get_batch(number)
                columns = [
                    rows[f.name].cast(f.type) if f.name in rows.schema.names else pa.nulls(len(rows), f.type)
                    for f in schema
                ]
                yield pa.record_batch(columns, schema=schema)
