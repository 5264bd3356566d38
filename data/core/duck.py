"""Runs the query engine, duckdb: its connections, its errors, and pieces of SQL that several readers share."""

from __future__ import annotations

import glob
import gzip
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import duckdb
from isal import igzip, isal_zlib

from reclaim.data.core.files import FULL_DISK
from reclaim.data.errors import TraceError

INTEGERS: Final = {
    "TINYINT": (-(2**7), 2**7 - 1),
    "INTEGER": (-(2**31), 2**31 - 1),
    "BIGINT": (-(2**63) + 1, 2**63 - 1),  # the lowest means null in staged rows
    "UBIGINT": (0, 2**64 - 1),
}
"""Integer types → their smallest and largest values."""
_ISAL_ERROR: Final[type[Exception]] = isal_zlib.IsalError  # type: ignore[assignment]  # its stub says an instance
GZIP_ERRORS: Final = (EOFError, gzip.BadGzipFile, _ISAL_ERROR)
_CHUNK_BYTES: Final = 1 << 20
INPUT_FAULTS: Final = ("Invalid Input Error", "IO Error", "Conversion Error", "Invalid Error")
"""Beginnings of the messages of errors that ``readable`` turns into one that names the file."""
ENGINE_ERRORS: Final = (duckdb.DataError, duckdb.InvalidInputException, duckdb.IOException)
"""Errors of the query engine when it cannot read a file, or write the rows it read."""


class DamagedFileError(TraceError):
    """A file that cannot be read to its end."""


def open_bytes(file: Path) -> IO[bytes]:
    """Open a plain or gzipped file; reading a damaged one raises one of ``GZIP_ERRORS``."""
    if file.name.endswith(".gz"):
        packed: IO[bytes] = igzip.open(file, "rb")  # type: ignore[no-untyped-call]  # the one it leaves untyped
        return packed
    return file.open("rb")


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raise what ``unreadable`` returns where the query engine cannot read a file."""
    try:
        yield
    except duckdb.Error as error:
        if not isinstance(error, ENGINE_ERRORS) and type(error) is not duckdb.Error:  # of a damaged parquet page
            raise
        raise unreadable(file, error) from error


def unreadable(file: Path, error: duckdb.Error) -> OSError | DamagedFileError:
    """Return the error that a failed query over a file means: a damaged file, or a full disk."""
    for code in FULL_DISK:
        if os.strerror(code) in str(error):
            return OSError(code, f"{os.strerror(code)}, while reading {file}")
    return DamagedFileError(f"{file}: cannot be read: {first_line(error)}")


def check_gzip(file: Path) -> None:
    """Read a gzipped file to its end to check its checksum and length, which the query engine ignores.

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

    An integer is accepted in its canonical form alone, not as 7.6, 1e3, 007 or true, so no id is ever rounded; a double
    not as 1_0, which the engine reads as 10.
    """
    if type_ in INTEGERS:
        lowest = f" AND {column} <> '{-(2**63)}'" if type_ == "BIGINT" else ""
        return f"{column} IS NULL OR coalesce(CAST(TRY_CAST({column} AS {type_}) AS VARCHAR) = {column}, false){lowest}"
    plain = f" AND NOT contains(CAST({column} AS VARCHAR), '_')" if type_ == "DOUBLE" else ""
    return f"{column} IS NULL OR (TRY_CAST({column} AS {type_}) IS NOT NULL{plain})"


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


def file_sql(file: Path | str) -> str:
    """Return SQL for the file of a query to read, in whose name the engine would else find a pattern of others."""
    return literal(glob.escape(str(file)))


def quoted(column: str) -> str:
    """Return SQL for a column's name."""
    return '"' + column.replace('"', '""') + '"'


def first_line(error: Exception) -> str:
    """Return the first line of an engine's message."""
    return str(error).splitlines()[0]


_starting = threading.Lock()
_database: tuple[tuple[int, str], duckdb.DuckDBPyConnection] | None = None
"""The process's query engine and its settings; one is kept because a start is slow."""


def connect(memory_mib: int, temporary: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection to the process's query engine, which spills to ``temporary`` instead of growing.

    The engine uses one thread: parallel jobs fill the cores, and sums are made in one order. Temporary views and tables
    belong to one connection.
    """
    global _database
    key = (memory_mib, str(temporary))
    with _starting:
        if _database is None or _database[0] != key:
            release()
            temporary.mkdir(parents=True, exist_ok=True)
            database = duckdb.connect()
            database.execute(f"SET memory_limit = '{memory_mib}MiB'")
            database.execute("SET threads = 1")
            database.execute(f"SET temp_directory = {literal(str(temporary / str(os.getpid())))}")
            shown = database.execute("SELECT current_setting('enable_progress_bar')").fetchone()
            if shown != (False,):  # in a notebook, setting it needs ipywidgets even where it is off
                database.execute("SET enable_progress_bar = false")
            _database = key, database
        return _database[1].cursor()


def release() -> None:
    """Stop the process's query engine."""
    global _database
    if _database is not None:
        _database[1].close()
        _database = None
