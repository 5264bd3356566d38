"""Stages usage rows between reading and sorting, as a matrix of 64-bit words.

A row holds its integers, then its doubles, then its percentile vectors as single floats, two to a word. A null is
``NULL`` among the integers and NaN elsewhere. Rows of one bucket lie together in packed chunks of one file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.columns import array_of, bits_of, flags_of, values_of
from reclaim.data.core.jit import CACHED
from reclaim.data.ingest.readers.packing import SPARE, pack, unpack
from reclaim.data.windows import VECTORS

NULL: Final = -(2**63)
"""The staged form of a null integer."""
ROWS_FILE: Final = "rows"
CHUNKS_FILE: Final = "chunks.npy"
_TILE: Final = 64
"""Rows turned into columns at once, so that their words stay in a processor's cache."""
_FIRST_PRIME, _SECOND_PRIME = 1_000_003, 998_244_353
"""Constants of the hash that gives a task its bucket: a query engine's own may change, and with it every dataset."""


@dataclass(frozen=True)
class Layout:
    """The places of the columns in a row.

    Attributes
    ----------
    schema : pyarrow.Schema
        The columns.
    integers, doubles, vectors : tuple of str
        Columns of each part, in order.
    """

    schema: pa.Schema
    integers: tuple[str, ...]
    doubles: tuple[str, ...]
    vectors: tuple[str, ...]

    @classmethod
    def of(cls, schema: pa.Schema) -> Layout:
        """Return the layout for a schema of integers, flags, doubles and percentile vectors."""
        integers = tuple(f.name for f in schema if pa.types.is_integer(f.type) or pa.types.is_boolean(f.type))
        doubles = tuple(f.name for f in schema if pa.types.is_floating(f.type))
        vectors = tuple(f.name for f in schema if f.name in VECTORS)
        assert len(integers) + len(doubles) + len(vectors) == len(schema)
        return cls(schema, integers, doubles, vectors)

    @property
    def words(self) -> int:
        """Length of a row."""
        return len(self.integers) + len(self.doubles) + (sum(len(VECTORS[name]) for name in self.vectors) + 1) // 2

    @property
    def null_row(self) -> NDArray[np.uint64]:
        """A row in which every column is null."""
        row = np.zeros(self.words, np.uint64)
        row[: len(self.integers)].view(np.int64)[:] = NULL
        row[len(self.integers) : len(self.integers) + len(self.doubles)].view(np.float64)[:] = np.nan
        row[len(self.integers) + len(self.doubles) :].view(np.float32)[:] = np.nan
        return row

    def slot(self, column: str) -> int:
        """Return a column's place, counted in integers, in doubles, or in single floats of the row's last part."""
        if column in self.vectors:
            return sum(len(VECTORS[name]) for name in self.vectors[: self.vectors.index(column)])
        return (self.integers if column in self.integers else self.doubles).index(column)

    def integer(self, rows: NDArray[np.uint64], column: str) -> NDArray[np.int64]:
        """Return an integer column, shape (n,)."""
        return np.ascontiguousarray(rows.view(np.int64)[:, self.integers.index(column)])

    def _singles(self, rows: NDArray[np.uint64], column: str) -> NDArray[np.float32]:
        first = 2 * (len(self.integers) + len(self.doubles)) + self.slot(column)
        return rows.view(np.float32)[:, first : first + len(VECTORS[column])]

    def rows_of(self, table: pa.Table | pa.RecordBatch) -> NDArray[np.uint64]:
        """Return a table's rows as a matrix, shape (n, words); a column it lacks is null."""
        rows = np.tile(self.null_row, (len(table), 1))
        doubles = rows.view(np.float64)[:, len(self.integers) :]
        for name in table.schema.names:
            if name not in self.schema.names:
                continue
            column = table[name]
            if name in self.integers:
                rows.view(np.int64)[:, self.slot(name)] = values_of(column.cast(pa.int64()), NULL)
            elif name in self.doubles:
                doubles[:, self.slot(name)] = values_of(column.cast(pa.float64()), np.nan)
            else:
                flat = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
                known = flags_of(flat.is_valid())
                values = values_of(flat.cast(pa.list_(pa.float32())).flatten(), np.nan)  # NULL in SQL has no type
                self._singles(rows, name)[known] = values.reshape(-1, len(VECTORS[name]))
        return rows

    def table_of(self, rows: NDArray[np.uint64], order: NDArray[np.int64]) -> pa.Table:
        """Return the rows of a matrix, in the order given, as a table of the schema."""
        words = _columns_of(rows, order)
        columns = []
        for field in self.schema:
            if field.name in self.integers:
                whole = words[self.slot(field.name)].view(np.int64)
                array = array_of(whole, whole != NULL).cast(field.type)
            elif field.name in self.doubles:
                values = words[len(self.integers) + self.slot(field.name)].view(np.float64)
                array = array_of(values, ~np.isnan(values))
            else:
                size = len(VECTORS[field.name])
                first = len(self.integers) + len(self.doubles) + self.slot(field.name) // 2
                vectors = np.ascontiguousarray(words[first : first + size // 2 + 1].T).view(np.float32)
                vectors = vectors[:, self.slot(field.name) % 2 :][:, :size]
                known = ~np.isnan(vectors[:, 0])
                ends = np.concatenate([[0], np.cumsum(known, dtype=np.int32) * np.int32(size)]).astype(np.int32)
                array = pa.Array.from_buffers(
                    field.type, len(order), [bits_of(known), pa.py_buffer(ends)],
                    children=[array_of(np.ascontiguousarray(vectors[known]).ravel())],
                )  # fmt: skip
            columns.append(array)
        return pa.table(columns, schema=self.schema)


@numba.njit(**CACHED)
def _columns_of(rows: Any, order: Any) -> Any:
    """Return the words of the rows in the order given, column by column; shape (words, n)."""
    out = np.empty((rows.shape[1], len(order)), np.uint64)
    for begin in range(0, len(order), _TILE):
        end = min(begin + _TILE, len(order))
        for row in range(begin, end):
            for word in range(rows.shape[1]):
                out[word, row] = rows[order[row], word]
    return out


@numba.njit(**CACHED)
def buckets_of(collection: Any, index: Any, buckets: Any) -> Any:
    """Return the bucket of each task, uint16, shape (n,)."""
    out = np.empty(len(collection), np.uint16)
    for row in range(len(collection)):
        key = (collection[row] & 0x7FFFFFFFFFFFFFFF) % _FIRST_PRIME * _FIRST_PRIME
        out[row] = (key + (index[row] & 0x7FFFFFFFFFFFFFFF) % _FIRST_PRIME) % _SECOND_PRIME % buckets
    return out


Packed = tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]
"""Rows of each bucket, their chunks, and where each ends."""


class RowsWriter:
    """Writes rows of usage into a folder, bucket by bucket; a context manager."""

    def __init__(self, folder: Path, layout: Layout, buckets: int) -> None:
        self._folder = folder
        self.layout = layout
        self._buckets = buckets
        self._file = (folder / ROWS_FILE).open("wb")
        self._chunks: list[tuple[int, int, int, int]] = []
        self._place = 0
        self.rows = 0

    def __enter__(self) -> RowsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            save_chunks(self._folder, np.array(self._chunks, np.int64).reshape(-1, 4))

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows of a table."""
        self.write(self.pack(self.layout.rows_of(batch)))

    def pack(self, rows: NDArray[np.uint64]) -> Packed:
        """Return the rows by bucket, packed. May run in any thread."""
        collection, index = (self.layout.integer(rows, name) for name in s.TASK_KEY)
        bucket = buckets_of(collection, index, self._buckets)
        counts = np.bincount(bucket, minlength=self._buckets)
        return counts, *pack(rows, np.argsort(bucket, kind="stable"), counts)

    def write(self, packed: Packed) -> None:
        """Append what ``pack`` returned."""
        counts, content, ends = packed
        begins = np.concatenate([[0], ends[:-1]])
        for k in np.flatnonzero(counts).tolist():
            self._chunks.append((k, self._place + int(begins[k]), int(ends[k] - begins[k]), int(counts[k])))
        self._file.write(content.data)
        self._place += len(content)
        self.rows += int(counts.sum())


def read_rows(folders: Sequence[Path], layout: Layout, bucket: int) -> NDArray[np.uint64]:
    """Return a bucket's rows out of all folders, in the folders' order, shape (n, words)."""
    whole = np.empty((count_rows(folders, bucket), layout.words), np.uint64)
    filled = 0

    def room(count: int) -> NDArray[np.uint64]:
        nonlocal filled
        filled += count
        return whole[filled - count : filled]

    for _ in _read_chunks(folders, bucket, room):
        pass
    return whole


def read_chunks(folders: Iterable[Path], layout: Layout, bucket: int) -> Iterator[NDArray[np.uint64]]:
    """Yield a bucket's rows out of all folders, in the folders' order; arrays of shape (n, words)."""
    return _read_chunks(folders, bucket, lambda count: np.empty((count, layout.words), np.uint64))


def _read_chunks(
    folders: Iterable[Path], bucket: int, room: Callable[[int], NDArray[np.uint64]]
) -> Iterator[NDArray[np.uint64]]:
    """Yield a bucket's rows, chunk by chunk, each in the room for that many rows."""
    for folder in folders:
        chunks = chunks_of(folder, bucket)
        if not len(chunks):
            continue
        content = np.empty(int(chunks[:, 2].max()) + SPARE, np.uint8)
        with (folder / ROWS_FILE).open("rb", buffering=0) as file:
            for _, place, size, count in chunks.tolist():
                rows = room(count)
                file.seek(place)
                file.readinto(content[:size].data)
                unpack(content, rows)
                yield rows


def count_rows(folders: Iterable[Path], bucket: int) -> int:
    """Return how many rows of a bucket all folders hold."""
    return sum(int(chunks_of(folder, bucket)[:, 3].sum()) for folder in folders)


def save_chunks(folder: Path, chunks: NDArray[np.int64]) -> None:
    """Write the list of a folder's chunks, each with its bucket first, by bucket and otherwise in their order."""
    content = io.BytesIO()  # of a full disk, numpy has an error of its own
    np.save(content, chunks[np.argsort(chunks[:, 0], kind="stable")])
    (folder / CHUNKS_FILE).write_bytes(content.getvalue())


def chunks_of(folder: Path, bucket: int) -> NDArray[np.int64]:
    """Return a bucket's chunks in a folder; of ``RowsWriter``: bucket, place, bytes and rows.

    The file is not read whole.
    """
    chunks = np.load(folder / CHUNKS_FILE, mmap_mode="r")
    first, last = np.searchsorted(chunks[:, 0], [bucket, bucket + 1])
    return np.array(chunks[first:last])
