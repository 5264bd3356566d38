"""Raw rows in, canonical rows out: the rules that hold for every kind of file, and the query that applies them."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from isal import igzip, isal_zlib

from reclaim.data import schema as s
from reclaim.data.errors import TraceError
from reclaim.data.records import RowsWriter, bucket_sql
from reclaim.data.source import RawTable

LINE: Final = "reclaim_line"
CAST_REASON: Final = "cast_reason"
BUCKET: Final = "bucket"
_BAD_BUCKET: Final = -1
_BATCH_ROWS: Final = 50_000
"""Rows handed over by the query engine at once."""
_DEFECT: Final = "reclaim_defect_"
INTEGERS: Final = {
    "TINYINT": (-(2**7), 2**7 - 1),
    "INTEGER": (-(2**31), 2**31 - 1),
    "BIGINT": (-(2**63) + 1, 2**63 - 1),  # the lowest stands for null in staged rows, see records.py
    "UBIGINT": (0, 2**64 - 1),
}
"""Integer types, and what they hold."""
_ISAL_ERROR: Final[type[Exception]] = isal_zlib.IsalError  # type: ignore[assignment]  # its stub says an instance
GZIP_ERRORS: Final = (EOFError, gzip.BadGzipFile, _ISAL_ERROR)
_CHUNK_BYTES: Final = 1 << 20
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where no more can be written: the disk is full, or one's share of it, or a file is too large."""


_FAULTS_OF_INPUT: Final = ("Invalid Input Error", "IO Error", "Conversion Error")
"""How messages of ``ENGINE_ERRORS`` begin."""
ENGINE_ERRORS: Final = (duckdb.DataError, duckdb.InvalidInputException, duckdb.IOException)
"""What the query engine raises when it cannot read a file, or write what it read."""


class DamagedFileError(TraceError):
    """A file that cannot be read to its end."""


def open_bytes(file: Path) -> IO[bytes]:
    """Open a plain or gzipped file; reading a damaged one raises one of ``GZIP_ERRORS``."""
    if file.name.endswith(".gz"):
        packed: IO[bytes] = igzip.open(file, "rb")  # type: ignore[no-untyped-call]  # the one it leaves untyped
        return packed
    return file.open("rb")


def unreadable(file: Path, error: duckdb.Error) -> OSError | DamagedFileError:
    """Return what a failed query over a file means: damage, or a disk that is full, which is no fault of the file."""
    for code in NO_ROOM:
        if os.strerror(code) in str(error):
            return OSError(code, f"{os.strerror(code)}, while reading {file}")
    return DamagedFileError(f"{file}: cannot be read: {first_line(error)}")


def check_gzip(file: Path) -> None:
    """Read a gzipped file to its end, for its checksum and length: the query engine looks at neither.

    Raises
    ------
    DamagedFileError
        It is truncated or corrupt.
    """
    if not file.name.endswith(".gz"):
        return
    try:
        with open_bytes(file) as packed:
            while packed.read(_CHUNK_BYTES):
                pass
    except GZIP_ERRORS as error:
        raise DamagedFileError(f"{file}: truncated or corrupt gzip ({error})") from error


def fits_sql(column: str, type_: str) -> str:
    """Return SQL: whether a raw value, read as text for an integer type, is one of ``type_``.

    An integer is written as that integer alone is: 7.6, 1e3, 007 and true are none, and no id is ever rounded.
    """
    if type_ in INTEGERS:
        lowest = f" AND {column} <> '{-(2**63)}'" if type_ == "BIGINT" else ""
        return f"{column} IS NULL OR coalesce(CAST(TRY_CAST({column} AS {type_}) AS VARCHAR) = {column}, false){lowest}"
    return f"{column} IS NULL OR TRY_CAST({column} AS {type_}) IS NOT NULL"


@dataclass(frozen=True)
class Taken:
    """What one raw file gave: rows taken, rejects (line and reason) in the file's order, defects counted."""

    rows: int
    rejects: list[dict[str, Any]]
    defects: dict[str, int]

    def with_rejects(self, more: Iterable[dict[str, Any]]) -> Taken:
        """Return the same with further rejects."""
        return replace(self, rejects=sorted([*self.rejects, *more], key=_line))


@dataclass(frozen=True)
class Stage:
    """Where the canonical rows of one raw file go.

    Attributes
    ----------
    connection : duckdb.DuckDBPyConnection
        The query engine.
    work : Path
        Folder for the pieces: ``bucket=K/*.parquet``, or what ``writer`` writes.
    buckets : int
        Number of buckets of a bucketed table.
    threads : int
        Threads that may work at once.
    writer : RowsWriter or None
        For usage: takes the rows.
    """

    connection: duckdb.DuckDBPyConnection
    work: Path
    buckets: int
    threads: int
    writer: RowsWriter | None


def copy_rows(stage: Stage, table: RawTable, relation: str) -> Taken:
    """Write the canonical rows of raw ones; set those that fail a check aside."""
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
    before, bad, defects = writer.rows, [], Counter[str]()
    for batch in _batches(stage.connection, canonical):
        reasons = batch.column(s.REJECT_REASON)
        if reasons.null_count < len(batch):
            refused = batch.filter(reasons.is_valid()).select([LINE, s.REJECT_REASON])
            bad += [{s.REJECT_LINE: row[LINE], s.REJECT_REASON: row[s.REJECT_REASON]} for row in refused.to_pylist()]
            batch = batch.filter(reasons.is_null())
        for name, flag in zip(table.defects, flags, strict=True):
            defects[name] += pc.sum(batch.column(flag)).as_py() or 0
        writer.write(writer.pack(writer.layout.rows_of(batch)))
    return Taken(writer.rows - before, bad, dict(+defects))


def _batches(connection: duckdb.DuckDBPyConnection, sql: str) -> Iterator[pa.RecordBatch]:
    """Yield a query's rows; where one cannot be read raise what the engine itself would, not Arrow's word for it."""
    try:
        yield from connection.sql(sql).to_arrow_reader(_BATCH_ROWS)
    except OSError as error:
        if str(error).startswith(_FAULTS_OF_INPUT):
            raise duckdb.InvalidInputException(str(error)) from error
        raise


def _to_pieces(stage: Stage, table: RawTable, canonical: str, flags: list[str]) -> Taken:
    bucket = bucket_sql(stage.buckets) if table.name in s.BUCKETED else "0"
    count = stage.connection.execute(
        f"COPY (SELECT *, CASE WHEN {s.REJECT_REASON} IS NULL THEN {bucket} ELSE {_BAD_BUCKET} END AS {BUCKET} "
        f"FROM ({canonical})) TO {literal(str(stage.work))} "
        f"(FORMAT parquet, PARTITION_BY ({BUCKET}), OVERWRITE_OR_IGNORE)"
    ).fetchone()
    bad: list[dict[str, Any]] = []
    bad_folder = stage.work / f"{BUCKET}={_BAD_BUCKET}"
    if bad_folder.exists():
        for line, reason in stage.connection.execute(
            f"SELECT {LINE}, {s.REJECT_REASON} FROM read_parquet({literal(str(bad_folder / '*.parquet'))}) ORDER BY 1"
        ).fetchall():
            bad.append({s.REJECT_LINE: line, s.REJECT_REASON: reason})
        shutil.rmtree(bad_folder)
    rows = int(count[0] if count else 0) - len(bad)
    counts: tuple[Any, ...] = ()
    if flags and rows:
        found = stage.connection.execute(
            f"SELECT {', '.join(f'count_if({flag})' for flag in flags)} "
            f"FROM read_parquet({literal(str(stage.work / '*' / '*.parquet'))})"
        ).fetchone()
        counts = found or ()
    return Taken(rows, bad, {name: int(n) for name, n in zip(table.defects, counts, strict=False) if n})


def _line(reject: dict[str, Any]) -> int:
    return int(reject[s.REJECT_LINE])


def reason_sql(checks: dict[str, str]) -> str:
    """Return SQL that names the first check a row fails, or null."""
    cases = " ".join(f"WHEN NOT coalesce({check}, true) THEN {literal(reason)}" for reason, check in checks.items())
    return f"CASE {cases} END" if cases else "CAST(NULL AS VARCHAR)"


def mismatch(column: str, type_: str) -> str:
    """Return the reason for a value that is not of its column's type."""
    return f"{column} is not a {type_.split('(')[0].lower()}"


def literal(text: str) -> str:
    """Return SQL for a string."""
    return "'" + text.replace("'", "''") + "'"


def quoted(column: str) -> str:
    """Return SQL for a column's name."""
    return '"' + column.replace('"', '""') + '"'


def first_line(error: Exception) -> str:
    """Return the first line of an engine's message."""
    return str(error).splitlines()[0]
