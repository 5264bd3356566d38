"""JSON lines: read at once where every line is good, line by line where one is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import duckdb

from reclaim.data import schema as s
from reclaim.data.errors import SchemaError
from reclaim.data.rows import (
    CAST_REASON,
    ENGINE_ERRORS,
    GZIP_ERRORS,
    INTEGERS,
    LINE,
    DamagedFileError,
    Taken,
    check_gzip,
    copy_rows,
    fits_sql,
    literal,
    mismatch,
    open_bytes,
    quoted,
    reason_sql,
    unreadable,
)
from reclaim.data.source import RawTable

_HEADER_LINES: Final = 200
"""Lines whose keys are looked at before a shard is read: an unknown field is in all lines or in none."""
_FLOAT_MAX: Final = 3.4028234e38


def take_json(connection: duckdb.DuckDBPyConnection, table: RawTable, file: Path, work: Path, buckets: int) -> Taken:
    """Write the canonical rows of JSON lines into ``work``; return what was taken.

    Raises
    ------
    DamagedFileError
        The file is truncated or corrupt.
    SchemaError
        It has fields the format does not.
    """
    check_gzip(file)
    _check_keys(table, file)
    try:
        taken = copy_rows(connection, table, _relation(table, file), work, buckets)
        if not taken.rejects:
            return taken
    except ENGINE_ERRORS as error:
        cause = unreadable(file, error)
        if not isinstance(cause, DamagedFileError):  # else the careful reader below says which line
            raise cause from error
    for piece in work.iterdir():
        shutil.rmtree(piece)
    clean = work / "clean.json"
    rejects = list(_sift(table, file, clean))
    try:
        taken = copy_rows(connection, table, _relation(table, clean, line=True), work, buckets)
    except ENGINE_ERRORS as error:
        raise unreadable(file, error) from error
    clean.unlink()
    return taken.with_rejects(rejects)


def _relation(table: RawTable, file: Path, *, line: bool = False) -> str:
    """Return SQL for the typed raw rows: integers come as text, which alone shows what was written."""
    read = {name: "VARCHAR" if type_ in INTEGERS else type_ for name, type_ in table.columns.items()}
    read |= {LINE: "BIGINT"} if line else {}
    declared = ", ".join(f"{literal(name)}: {literal(type_)}" for name, type_ in read.items())
    integers = {quoted(name): type_ for name, type_ in table.columns.items() if type_ in INTEGERS}
    typed = ", ".join(f"TRY_CAST({name} AS {type_}) AS {name}" for name, type_ in integers.items())
    replaced = f" REPLACE ({typed})" if typed else ""
    checks = {mismatch(name.strip('"'), type_): fits_sql(name, type_) for name, type_ in integers.items()}
    number = "" if line else f", CAST(NULL AS BIGINT) AS {LINE}"
    return (
        f"SELECT *{replaced}{number}, {reason_sql(checks)} AS {CAST_REASON} "
        f"FROM read_json({literal(str(file))}, format = 'newline_delimited', columns = {{{declared}}})"
    )


def _check_keys(table: RawTable, file: Path) -> None:
    known = set(table.columns)
    for column, type_ in table.columns.items():
        if type_.startswith("STRUCT") and not type_.endswith("[]"):
            known |= {f"{column}.{field.split()[0]}" for field in type_[len("STRUCT(") : -1].split(", ")}
    nested = {key.split(".")[0] for key in known if "." in key}
    seen: set[str] = set()
    for _, line in zip(range(_HEADER_LINES), _lines(file), strict=False):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            seen |= row.keys()
            seen |= {f"{c}.{key}" for c in nested if isinstance(row.get(c), dict) for key in row[c]}
    unknown = sorted(seen - known)
    if unknown:
        raise SchemaError(
            f"{file}: unknown field{'s' * (len(unknown) > 1)} {', '.join(unknown)}; "
            f"known are {', '.join(table.columns)}"
        )


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file; a damaged one raises, naming it."""
    try:
        with open_bytes(file) as lines:
            yield from lines
    except GZIP_ERRORS as error:
        raise DamagedFileError(f"{file}: truncated or corrupt gzip ({error})") from error


def _sift(table: RawTable, file: Path, clean: Path) -> Iterator[dict[str, Any]]:
    """Copy the lines that parse to ``clean``, each with its number; yield a reject for every other."""
    with clean.open("w") as out:
        for number, line in enumerate(_lines(file), start=1):
            if not line.strip():
                continue
            reason = None
            try:
                row = json.loads(line, parse_constant=_no_number)
            except (ValueError, RecursionError):
                reason = "not valid JSON"
            else:
                if not isinstance(row, dict):
                    reason = "not a JSON object"
                else:
                    reason = next((mismatch(c, t) for c, t in table.columns.items() if not _fits(row.get(c), t)), None)
            if reason is not None:
                yield {s.REJECT_LINE: number, s.REJECT_REASON: reason}
                continue
            row[LINE] = number
            out.write(json.dumps(row) + "\n")


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _fits(value: object, type_: str) -> bool:
    """Whether ``value`` is of ``type_``, by the rules of ``fits_sql``."""
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
        if type_ in INTEGERS:
            low, high = INTEGERS[type_]
            return not isinstance(value, float) and low <= int(value) <= high and str(int(value)) == str(value)
        number = float(value)
    except (ValueError, OverflowError):
        return False
    return type_ != "FLOAT" or not _FLOAT_MAX < abs(number) < float("inf")
