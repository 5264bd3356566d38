"""Turns raw rows of any kind of file into canonical rows, by the SQL of their table, and collects rejects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reclaim.data import schema as s
from reclaim.data.core.duck import INPUT_FAULTS, reason_sql
from reclaim.data.ingest.readers.rejects import RejectsWriter
from reclaim.data.traces.source import RawTable

LINE: Final = "reclaim_line"
CAST_REASON: Final = "cast_reason"
_BATCH_ROWS: Final = 50_000
"""Rows handed over by the query engine at once."""
_DEFECT: Final = "reclaim_defect_"


@dataclass(frozen=True)
class Taken:
    """The result of reading one raw file: number of rows, and of rows with each defect."""

    rows: int
    defects: dict[str, int]


class Writer(Protocol):
    """A writer of staged rows."""

    rows: int

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows."""


@dataclass(frozen=True)
class Stage:
    """The destination of the canonical rows of one raw file.

    Attributes
    ----------
    connection : duckdb.DuckDBPyConnection
        The query engine.
    work : Path
        Folder of the writer's files, and of those that are gone at the end.
    threads : int
        Number of threads the reader may use.
    writer : Writer
        The writer of the rows; for usage a ``RowsWriter``.
    rejects : RejectsWriter
        The writer of the rejects.
    """

    connection: duckdb.DuckDBPyConnection
    work: Path
    threads: int
    writer: Writer
    rejects: RejectsWriter


def copy_rows(stage: Stage, table: RawTable, relation: str) -> Taken:
    """Write the canonical rows of raw ones; rows that fail a check become rejects."""
    flags = [f"{_DEFECT}{k}" for k in range(len(table.defects))]
    marked = "".join(
        f", coalesce({sql}, false) AS {flag}" for flag, sql in zip(flags, table.defects.values(), strict=True)
    )
    canonical = f"""
        SELECT {table.select}{marked}, {LINE},
               coalesce({CAST_REASON}, {reason_sql(dict(table.checks))}) AS {s.REJECT_REASON}
        FROM ({relation}) WHERE coalesce({table.where}, false) OR {s.REJECT_REASON} IS NOT NULL
    """
    before, defects = stage.writer.rows, Counter[str]()
    for batch in _batches(stage.connection, canonical):
        reasons = batch.column(s.REJECT_REASON)
        if reasons.null_count < len(batch):
            refused = batch.filter(reasons.is_valid())
            stage.rejects.add(np.asarray(refused.column(LINE)), refused.column(s.REJECT_REASON))
            batch = batch.filter(reasons.is_null())
        for name, flag in zip(table.defects, flags, strict=True):
            defects[name] += pc.sum(batch.column(flag)).as_py() or 0
        stage.writer.add(batch.drop_columns([*flags, LINE, s.REJECT_REASON]))
    return Taken(stage.writer.rows - before, dict(+defects))


def _batches(connection: duckdb.DuckDBPyConnection, sql: str) -> Iterator[pa.RecordBatch]:
    """Yield a query's rows; an error of the query engine is raised as such, not as Arrow's OSError."""
    try:
        yield from connection.sql(sql).to_arrow_reader(_BATCH_ROWS)
    except OSError as error:
        if str(error).startswith(INPUT_FAULTS):
            raise duckdb.InvalidInputException(str(error)) from error
        raise
