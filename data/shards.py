"""One raw file in, its canonical rows out: typed, checked, spread over buckets; bad lines set aside with a reason."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data import schema as s
from reclaim.data.errors import SchemaError, TraceError
from reclaim.data.source import RawTable
from reclaim.data.store import file_sha256, write_json

DONE: Final = "done.json"
REJECTS: Final = "rejects.parquet"
_LINE: Final = "reclaim_line"
_BUCKET: Final = "bucket"
_BAD_BUCKET: Final = -1
_HEADER_LINES: Final = 200
"""Lines of a JSON shard whose keys are looked at before it is read: an unknown field is in all lines or in none."""
_TASK_TABLES: Final = ("usage", "events")
"""Tables that are bucketed by task; the others are small and keep one bucket."""


@dataclass(frozen=True)
class Shard:
    """What became of one raw file.

    Attributes
    ----------
    table, file, sha256 : str
        Canonical table, file name, checksum of its bytes.
    rows, rejects, n_bytes : int
        Lines taken, lines set aside, size of the file.
    folder : Path
        Where its pieces are: ``bucket=K/*.parquet`` and ``rejects.parquet``.
    """

    table: str
    file: str
    sha256: str
    rows: int
    rejects: int
    n_bytes: int
    folder: Path

    def pieces(self, bucket: int) -> list[str]:
        """Return the files that hold this shard's rows of a bucket."""
        return sorted(str(p) for p in (self.folder / f"{_BUCKET}={bucket}").glob("*.parquet"))


class DamagedFileError(TraceError):
    """A file that cannot be read to its end."""


def connect(memory_limit_mib: int, temporary: Path) -> duckdb.DuckDBPyConnection:
    """Return a duckdb connection that spills to ``temporary`` instead of growing."""
    connection = duckdb.connect()
    connection.execute(f"SET memory_limit = '{memory_limit_mib}MiB'")
    connection.execute(f"SET temp_directory = {_literal(str(temporary))}")
    connection.execute("SET enable_progress_bar = false")
    return connection


def take_shard(
    connection: duckdb.DuckDBPyConnection, table: RawTable, file: Path, staging: Path, buckets: int
) -> Shard:
    """Read one raw file into ``staging``; a file already taken is not read again.

    Raises
    ------
    DamagedFileError
        The file is truncated, corrupt or empty; nothing of it is kept.
    SchemaError
        It has columns the format does not, or lacks some of them.
    """
    folder = staging / table.name / file.name
    stat = file.stat()
    identity = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "buckets": buckets, "select": table.select}
    done = folder / DONE
    if done.is_file():
        record = json.loads(done.read_text())
        if record["identity"] == identity:
            return Shard(table.name, file.name, record["sha256"], record["rows"], record["rejects"],
                         stat.st_size, folder)  # fmt: skip
    if stat.st_size == 0:
        raise DamagedFileError(f"{file}: empty file")
    work = folder.with_name(folder.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        rows, rejects = _READERS[_kind(file)](connection, table, file, work, buckets)
        record = {"identity": identity, "sha256": file_sha256(file), "rows": rows, "rejects": len(rejects)}
        pq.write_table(pa.Table.from_pylist(rejects, schema=s.REJECTS), work / REJECTS)
        write_json(work / DONE, record)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Shard(table.name, file.name, record["sha256"], rows, len(rejects), stat.st_size, folder)


def _kind(file: Path) -> str:
    name = file.name.removesuffix(".gz")
    return name.rsplit(".", 1)[-1]


def _take_json(
    connection: duckdb.DuckDBPyConnection, table: RawTable, file: Path, work: Path, buckets: int
) -> tuple[int, list[dict[str, Any]]]:
    """Read JSON lines: at once where all are good, line by line where one is not."""
    _check_keys(table, file)
    try:
        rows, bad = _copy(connection, table, _json_relation(table, file), work, buckets, file.name)
        if not bad:
            return rows, []
    except (duckdb.InvalidInputException, duckdb.ConversionException, duckdb.IOException):
        pass  # the careful reader below says which line, or that the file is damaged
    for piece in work.iterdir():
        shutil.rmtree(piece)
    clean = work / "clean.json"
    rejects = list(_sift(table, file, clean))
    rows, bad = _copy(connection, table, _json_relation(table, clean, line=True), work, buckets, file.name)
    clean.unlink()
    return rows, sorted(rejects + bad, key=lambda reject: int(reject[s.REJECT_LINE]))


def _take_columns(
    connection: duckdb.DuckDBPyConnection, table: RawTable, file: Path, work: Path, buckets: int
) -> tuple[int, list[dict[str, Any]]]:
    """Read CSV or parquet, whose rows can be numbered and cast one by one in a single pass."""
    path = _literal(str(file))
    if _kind(file) == "csv":
        reader, number = (
            f"read_csv({path}, all_varchar = true, header = true, parallel = false)",
            "row_number() OVER () + 1",
        )
    else:
        reader, number = f"read_parquet({path}, file_row_number = true)", "file_row_number + 1"
    try:
        present = [row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall()]
        _check_columns(table, file, set(present) - {"file_row_number"})
        casts, checks = [], {}
        for column, type_ in table.columns.items():
            name = '"' + column.replace('"', '""') + '"'
            if column not in present:
                casts.append(f"CAST(NULL AS {type_}) AS {name}")
                continue
            casts.append(f"TRY_CAST({name} AS {type_}) AS {name}")
            checks[f"{column} is not a {type_.lower()}"] = f"{name} IS NULL OR TRY_CAST({name} AS {type_}) IS NOT NULL"
        relation = f"SELECT {', '.join(casts)}, {_reason(checks)} AS cast_reason, {number} AS {_LINE} FROM {reader}"
        return _copy(connection, table, relation, work, buckets, file.name, first_reason="cast_reason")
    except (duckdb.InvalidInputException, duckdb.IOException) as error:
        raise DamagedFileError(f"{file}: cannot be read: {_first_line(error)}") from error


_READERS: Final[dict[str, Callable[..., tuple[int, list[dict[str, Any]]]]]] = {
    "json": _take_json, "csv": _take_columns, "parquet": _take_columns,
}  # fmt: skip


def _json_relation(table: RawTable, file: Path, *, line: bool = False) -> str:
    columns = dict(table.columns) | ({_LINE: "BIGINT"} if line else {})
    declared = ", ".join(f"{_literal(name)}: {_literal(type_)}" for name, type_ in columns.items())
    number = "" if line else f", CAST(NULL AS BIGINT) AS {_LINE}"
    return (
        f"SELECT *{number}, NULL AS cast_reason "
        f"FROM read_json({_literal(str(file))}, format = 'newline_delimited', columns = {{{declared}}})"
    )


def _copy(
    connection: duckdb.DuckDBPyConnection,
    table: RawTable,
    relation: str,
    work: Path,
    buckets: int,
    file_name: str,
    first_reason: str = "cast_reason",
) -> tuple[int, list[dict[str, Any]]]:
    """Write canonical rows as ``work/bucket=K/*.parquet``; return their number and the rows that failed a check."""
    spread = 1 if table.name not in _TASK_TABLES else buckets
    # a fixed arithmetic hash: an engine's own may change with its version, and with it every dataset
    key = f"({s.COLLECTION_ID} % 1000003) * 1000003 + {s.INSTANCE_INDEX} % 1000003" if spread > 1 else "0"
    sql = f"""
        SELECT * EXCLUDE ({s.REJECT_REASON}), {s.REJECT_REASON},
               CASE WHEN {s.REJECT_REASON} IS NULL THEN abs({key}) % 998244353 % {spread}
                    ELSE {_BAD_BUCKET} END AS {_BUCKET}
        FROM (SELECT {table.select}, {_LINE}, coalesce({first_reason}, {_reason(dict(table.checks))})
                     AS {s.REJECT_REASON}
              FROM ({relation}))
    """
    count = connection.execute(
        f"COPY ({sql}) TO {_literal(str(work))} (FORMAT parquet, PARTITION_BY ({_BUCKET}), OVERWRITE_OR_IGNORE)"
    ).fetchone()
    bad_folder = work / f"{_BUCKET}={_BAD_BUCKET}"
    bad: list[dict[str, Any]] = []
    if bad_folder.exists():
        for line, reason in connection.execute(
            f"SELECT {_LINE}, {s.REJECT_REASON} FROM read_parquet({_literal(str(bad_folder / '*.parquet'))}) ORDER BY 1"
        ).fetchall():
            bad.append({s.REJECT_FILE: file_name, s.REJECT_LINE: line, s.REJECT_REASON: reason})
        shutil.rmtree(bad_folder)
    return int(count[0] if count else 0) - len(bad), bad


def _reason(checks: dict[str, str]) -> str:
    """Return SQL that names the first check a row fails, or null."""
    cases = " ".join(f"WHEN NOT coalesce({check}, true) THEN {_literal(reason)}" for reason, check in checks.items())
    return f"CASE {cases} END" if cases else "CAST(NULL AS VARCHAR)"


def _check_keys(table: RawTable, file: Path) -> None:
    seen: set[str] = set()
    for _, line in zip(range(_HEADER_LINES), _lines(file), strict=False):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            seen |= row.keys()
    unknown = sorted(seen - table.columns.keys())
    if unknown:
        raise SchemaError(
            f"{file}: unknown field{'s' * (len(unknown) > 1)} {', '.join(unknown)}; "
            f"known are {', '.join(table.columns)}"
        )


def _check_columns(table: RawTable, file: Path, present: set[str]) -> None:
    unknown = sorted(present - table.columns.keys()) if table.closed else []
    missing = [] if table.closed else sorted(table.columns.keys() - present)
    if unknown:
        raise SchemaError(f"{file}: unknown columns {', '.join(unknown)}; known are {', '.join(table.columns)}")
    if missing:
        raise SchemaError(
            f"{file}: the mapping names columns {', '.join(missing)}, the file has {', '.join(sorted(present))}"
        )


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a plain or gzipped file; a damaged one raises, naming it."""
    try:
        if file.name.endswith(".gz"):
            with gzip.open(file, "rb") as packed:
                yield from packed
        else:
            with file.open("rb") as plain:
                yield from plain
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DamagedFileError(f"{file}: truncated or corrupt gzip ({error})") from error


def _sift(table: RawTable, file: Path, clean: Path) -> Iterator[dict[str, Any]]:
    """Copy the lines that parse to ``clean``, each with its number; yield a reject for every other."""
    with clean.open("w") as out:
        for number, line in enumerate(_lines(file), start=1):
            if not line.strip():
                continue
            reason = None
            try:
                row = json.loads(line)
            except ValueError:
                reason = "not valid JSON"
            else:
                if not isinstance(row, dict):
                    reason = "not a JSON object"
                else:
                    reason = next(
                        (f"{c} is not a {t.split('(')[0].lower()}" for c, t in table.columns.items()
                         if not _fits(row.get(c), t)),
                        None,
                    )  # fmt: skip
            if reason is not None:
                yield {s.REJECT_FILE: file.name, s.REJECT_LINE: number, s.REJECT_REASON: reason}
                continue
            row[_LINE] = number
            out.write(json.dumps(row) + "\n")


def _fits(value: object, type_: str) -> bool:
    """Whether duckdb will read ``value`` as ``type_``."""
    if value is None or (type_ == "VARCHAR" and not isinstance(value, dict | list)):
        return True
    if type_.endswith("[]"):
        return isinstance(value, list) and all(_fits(v, type_[:-2]) for v in value)
    if type_.startswith("STRUCT"):
        return isinstance(value, dict) and all(
            _fits(v, "DOUBLE" if "DOUBLE" in type_ else "VARCHAR") for v in value.values()
        )
    if isinstance(value, bool) or type_ == "BOOLEAN":
        return isinstance(value, bool) and type_ == "BOOLEAN"
    if not isinstance(value, str | int | float):
        return False
    try:
        if type_ in _INTEGERS:
            low, high = _INTEGERS[type_]
            return low <= int(value) <= high and not isinstance(value, float)
        float(value)
    except ValueError:
        return False
    return True


_INTEGERS: Final = {
    "TINYINT": (-(2**7), 2**7 - 1),
    "INTEGER": (-(2**31), 2**31 - 1),
    "BIGINT": (-(2**63), 2**63 - 1),
    "UBIGINT": (0, 2**64 - 1),
}


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
