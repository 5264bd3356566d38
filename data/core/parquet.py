"""Writes parquet files row group by row group: the same rows give the same bytes, in batches of any size."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data.core.files import replaced_file

ROW_GROUP_ROWS: Final = 1 << 16
"""Rows of a row group: a reader holds as many at once."""


class TableWriter:
    """Writes a table under a temporary name and renames it at the end; a context manager.

    Parameters
    ----------
    path : Path
        The file.
    schema : pyarrow.Schema
        Columns of the table.
    statistics : tuple of str
        Columns whose smallest and largest values each row group records, for readers that skip groups.
    unlike : tuple of str
        Columns of numbers that hardly repeat, which get no dictionary.
    durable : bool
        Whether its content is on the disk before it has its name.
    """

    def __init__(
        self, path: Path, schema: pa.Schema, statistics: tuple[str, ...] = (), unlike: tuple[str, ...] = (), *,
        durable: bool = False,
    ) -> None:  # fmt: skip
        self._stack = ExitStack()
        file = self._stack.enter_context(replaced_file(path, durable=durable))
        self._schema = schema
        vectors = [f"{field.name}.list.element" for field in schema if field.type == pa.list_(pa.float32())]
        plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
        repeated = [name for name in plain if name not in unlike]
        writer = pq.ParquetWriter(  # regrouped bytes of numbers that hardly repeat compress well
            file, schema, compression={**dict.fromkeys(plain, "lz4"), **dict.fromkeys(vectors, "zstd")},
            use_dictionary=repeated, use_byte_stream_split=[*vectors, *unlike],
            write_statistics=list(statistics) or False,
        )  # fmt: skip
        self._writer = self._stack.enter_context(writer)
        self._stack.push(self._write_rest)  # if that fails, the file is removed as after any other error
        self._waiting: list[pa.Table] = []
        self._n_waiting = 0
        self.rows = 0

    def __enter__(self) -> TableWriter:
        return self

    def write(self, table: pa.Table | pa.RecordBatch) -> None:
        """Add rows; their columns are cast to the schema's types."""
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        self._waiting.append(pa.table([table[f.name].cast(f.type) for f in self._schema], schema=self._schema))
        self._n_waiting += len(table)
        self.rows += len(table)
        if self._n_waiting >= ROW_GROUP_ROWS:
            whole = pa.concat_tables(self._waiting)
            cut = len(whole) - len(whole) % ROW_GROUP_ROWS
            for first in range(0, cut, ROW_GROUP_ROWS):
                self._write_group(whole.slice(first, ROW_GROUP_ROWS))
            self._waiting, self._n_waiting = [whole.slice(cut)], len(whole) - cut

    def _write_group(self, group: pa.Table) -> None:
        """Write one row group from contiguous columns: the cuts of chunked ones would change the file's bytes."""
        self._writer.write_table(group.combine_chunks(), row_group_size=ROW_GROUP_ROWS)

    def _write_rest(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._n_waiting:
            self._write_group(pa.concat_tables(self._waiting))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
