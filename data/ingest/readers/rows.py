"""Turns raw rows of any kind of file into canonical rows, by the SQL of their table, and collects rejects."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reclaim.data import schema as s
from reclaim.data.core.duck import INPUT_FAULTS, literal, reason_sql
from reclaim.data.ingest.readers.rejects import RejectsWriter
from reclaim.data.ingest.readers.staging import RowsWriter, bucket_sql
from reclaim.data.traces.source import RawTable

LINE: Final = "reclaim_line"
CAST_REASON: Final = "cast_reason"
BUCKET: Final = "bucket"
_BAD_BUCKET: Final = -1
_BATCH_ROWS: Final = 50_000
"""Rows handed over by the query engine at once."""
_DEFECT: Final = "reclaim_defect_"


@dataclass(frozen=True)
class Taken:
    """The result of reading one raw file: number of rows, and of rows with each defect."""

    rows: int
    defects: dict[str, int]


@dataclass(frozen=True)
class Stage:
    """The destination of the canonical rows of one raw file.

    Attributes
    ----------
    connection : duckdb.DuckDBPyConnection
        The query engine.
    work : Path
        Folder for the pieces: ``bucket=K/*.parquet``, or the files of ``writer``.
    buckets : int
        Number of buckets of a bucketed table.
    threads : int
        Number of threads the reader may use.
    writer : RowsWriter or None
        For usage: the writer of the rows.
    rejects : RejectsWriter
        The writer of the rejects.
    """

    connection: duckdb.DuckDBPyConnection
    work: Path
    buckets: int
    threads: int
    writer: RowsWriter | None
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
    if stage.writer is not None:
        return _to_rows(stage, stage.writer, table, canonical, flags)
    return _to_pieces(stage, table, canonical, flags)


def _to_rows(stage: Stage, writer: RowsWriter, table: RawTable, canonical: str, flags: list[str]) -> Taken:
    before, defects = writer.rows, Counter[str]()
    for batch in _batches(stage.connection, canonical):
        reasons = batch.column(s.REJECT_REASON)
        if reasons.null_count < len(batch):
            refused = batch.filter(reasons.is_valid())
            stage.rejects.add(np.asarray(refused.column(LINE)), refused.column(s.REJECT_REASON))
            batch = batch.filter(reasons.is_null())
        for name, flag in zip(table.defects, flags, strict=True):
            defects[name] += pc.sum(batch.column(flag)).as_py() or 0
        writer.write(writer.pack(writer.layout.rows_of(batch)))
    return Taken(writer.rows - before, dict(+defects))


def _batches(connection: duckdb.DuckDBPyConnection, sql: str) -> Iterator[pa.RecordBatch]:
    """Yield a query's rows; an error of the query engine is raised as such, not as Arrow's OSError."""
    try:
        yield from connection.sql(sql).to_arrow_reader(_BATCH_ROWS)
    except OSError as error:
        if str(error).startswith(INPUT_FAULTS):
            raise duckdb.InvalidInputException(str(error)) from error
        raise


def _to_pieces(stage: Stage, table: RawTable, canonical: str, flags: list[str]) -> Taken:
    bucket = bucket_sql(stage.buckets) if table.name in s.BUCKETED else "0"
    count = stage.connection.execute(
        f"COPY (SELECT *, CASE WHEN {s.REJECT_REASON} IS NULL THEN {bucket} ELSE {_BAD_BUCKET} END AS {BUCKET} "
        f"FROM ({canonical})) TO {literal(str(stage.work))} "
        f"(FORMAT parquet, PARTITION_BY ({BUCKET}), OVERWRITE_OR_IGNORE)"
    ).fetchall()
    bad = 0
    bad_folder = stage.work / f"{BUCKET}={_BAD_BUCKET}"
    if bad_folder.exists():
        refused = f"SELECT {LINE}, {s.REJECT_REASON} FROM read_parquet({literal(str(bad_folder / '*.parquet'))})"
        for batch in _batches(stage.connection, refused):
            stage.rejects.add(np.asarray(batch.column(LINE)), batch.column(s.REJECT_REASON))
            bad += len(batch)
        shutil.rmtree(bad_folder)
    rows = int(count[0][0]) - bad
    counts: tuple[Any, ...] = ()
    if flags and rows:
        found = stage.connection.execute(
            f"SELECT {', '.join(f'count_if({flag})' for flag in flags)} "
            f"FROM read_parquet({literal(str(stage.work / '*' / '*.parquet'))})"
        ).fetchall()
        counts = found[0]
    return Taken(rows, {name: int(n) for name, n in zip(table.defects, counts, strict=False) if n})
