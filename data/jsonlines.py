"""JSON lines: read at once where every line is good, line by line where one is not."""

from __future__ import annotations

import json
import re
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.errors import SchemaError
from reclaim.data.jsonrows import plain_rows
from reclaim.data.jsontext import NEWLINE, PAD
from reclaim.data.records import RowsWriter
from reclaim.data.rows import (
    BUCKET,
    CAST_REASON,
    ENGINE_ERRORS,
    GZIP_ERRORS,
    INTEGERS,
    LINE,
    DamagedFileError,
    Stage,
    Taken,
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
from reclaim.data.strictjson import only_json

_HEADER_LINES: Final = 200
"""Lines whose keys are looked at: a field of another format is in most lines; one odd line must not cost the file."""
_BLOCK_BYTES: Final = 8 << 20
"""Text read at once: a few thousand lines, so that the rows made of it stay in a processor's cache."""
_READ_BYTES: Final = 1 << 20
"""Text unpacked at once: a gzip reader makes it elsewhere first, and then copies it."""
_LAST_LINE_BYTES: Final = 1 << 16
_LONGEST_LINE_BYTES: Final = 64 << 20
_FLOAT_END: Final = 2.0**128 - 2.0**103
"""The first number that is rounded to a single float's infinity."""
_NUMBER: Final = re.compile(
    r"\s*-?((0|[1-9]\d*)(\.\d*)?(e[-+]?\d+)?|\.\d+(e[-+]?\d+)?|nan|inf|infinity)", re.ASCII | re.IGNORECASE
)
"""What the query engine reads as a number where it stands in quotes."""


def take_json(stage: Stage, table: RawTable, file: Path) -> Taken:
    """Write the canonical rows of JSON lines; return what was taken.

    Raises
    ------
    DamagedFileError
        The file is truncated or corrupt.
    SchemaError
        It has fields the format does not.
    """
    if stage.writer is None or not table.plain:
        _check_keys(table, file)
        return _by_law(stage, table, file)
    doubtful = stage.work / "doubtful.json"
    numbers = _take_plain(stage, stage.writer, table, file, doubtful)
    taken = Taken(stage.writer.rows, [], {})
    if len(numbers):  # else all keys are known
        _check_keys(table, file)
        rest = _by_law(stage, table, doubtful, named=file)
        rejects = [{**reject, s.REJECT_LINE: int(numbers[reject[s.REJECT_LINE] - 1])} for reject in rest.rejects]
        taken = Taken(stage.writer.rows, rejects, rest.defects)
    doubtful.unlink()
    return taken


def _take_plain(stage: Stage, writer: RowsWriter, table: RawTable, file: Path, doubtful: Path) -> NDArray[np.int64]:
    """Write the rows of plain lines, copy the other lines to ``doubtful`` and return their numbers, from 1."""

    def read(block: NDArray[np.uint8]) -> tuple[list[tuple[int, int, bytes]], NDArray[np.int64], list[bytes], int]:
        rows, others = plain_rows(block, table, writer.layout)
        text = [block[begin:end].tobytes() + b"\n" for _, begin, end in others.tolist()]
        return writer.pack(rows), others[:, 0], text, int(np.count_nonzero(block[:-PAD] == NEWLINE))

    numbers = [np.empty(0, np.int64)]
    line = 1
    waiting: deque[Future[tuple[list[tuple[int, int, bytes]], NDArray[np.int64], list[bytes], int]]] = deque()

    def finish() -> int:
        packed, others, text, lines = waiting.popleft().result()
        writer.write(packed)
        left.writelines(text)
        numbers.append(others + line)
        return lines

    with doubtful.open("wb") as left, ThreadPoolExecutor(stage.threads) as pool:
        for block in _blocks(file):
            waiting.append(pool.submit(read, block))
            if len(waiting) > stage.threads:
                line += finish()
        while waiting:
            line += finish()
    return np.concatenate(numbers)


def _blocks(file: Path) -> Iterator[NDArray[np.uint8]]:
    """Yield a file in blocks of whole lines, each followed by ``PAD`` bytes; a damaged one raises, naming it."""
    rest = b""
    size = _BLOCK_BYTES
    try:
        with open_bytes(file) as raw:
            readinto = raw.readinto  # type: ignore[attr-defined]  # IO[bytes] lacks it, both kinds of file have it
            while True:
                block = np.empty(len(rest) + size + 1 + PAD, np.uint8)
                block[: len(rest)] = np.frombuffer(rest, np.uint8)
                filled = len(rest)
                while filled < len(rest) + size:
                    got = readinto(block[filled : min(filled + _READ_BYTES, len(rest) + size)].data)
                    if not got:
                        break
                    filled += got
                at_end = filled < len(rest) + size
                if at_end and filled and block[filled - 1] != NEWLINE:
                    block[filled] = NEWLINE
                    filled += 1
                tail = block[max(filled - _LAST_LINE_BYTES, 0) : filled]
                newlines = np.flatnonzero(tail == NEWLINE)
                if not at_end and not len(newlines):
                    newlines = np.flatnonzero(block[:filled] == NEWLINE)
                    tail = block[:filled]
                if not at_end and not len(newlines):
                    if filled > _LONGEST_LINE_BYTES:
                        raise DamagedFileError(f"{file}: a line of more than {_LONGEST_LINE_BYTES >> 20} MiB")
                    rest, size = block[:filled].tobytes(), 2 * size
                    continue
                end = filled if at_end else filled - len(tail) + int(newlines[-1]) + 1
                rest, size = block[end:filled].tobytes(), _BLOCK_BYTES
                if end:
                    block[end : end + PAD] = 0
                    yield block[: end + PAD]
                if at_end:
                    return
    except GZIP_ERRORS as error:
        raise DamagedFileError(f"{file}: truncated or corrupt gzip ({error})") from error


def _by_law(stage: Stage, table: RawTable, file: Path, *, named: Path | None = None) -> Taken:
    """Write the canonical rows of JSON lines by the table's SQL: at once where all are good, else line by line."""
    before = stage.writer.rows if stage.writer else 0
    try:
        taken = copy_rows(stage, table, _relation(table, file)) if _only_json(table, file) else None
        if taken is not None and not taken.rejects:
            return taken
    except ENGINE_ERRORS as error:
        cause = unreadable(file, error)
        if not isinstance(cause, DamagedFileError):  # else the careful reader below says which line
            raise cause from error
    if stage.writer is not None:
        stage.writer.forget_after(before)
    for piece in stage.work.glob(f"{BUCKET}=*"):
        shutil.rmtree(piece)
    clean = stage.work / "clean.json"
    rejects = list(_sift(table, file, clean))
    try:
        taken = copy_rows(stage, table, _relation(table, clean, line=True))
    except ENGINE_ERRORS as error:
        raise unreadable(named or file, error) from error
    clean.unlink()
    return taken.with_rejects(rejects)


def _only_json(table: RawTable, file: Path) -> bool:
    """Read a file to its end; return whether the query engine and the careful reader take all of it the same way."""
    deepest = 3 if any(type_.startswith("STRUCT") and type_.endswith("[]") for type_ in table.columns.values()) else 2
    flags = "BOOLEAN" in table.columns.values()
    return all([
        only_json(block.ctypes.data, block.ctypes.data + len(block) - PAD, deepest, flags) for block in _blocks(file)
    ])  # fmt: skip


def _relation(table: RawTable, file: Path, *, line: bool = False) -> str:
    """Return SQL for the typed raw rows.

    Integers and flags come as text, which alone shows what was written. What is nested comes as text, too, where text
    is asked for: it counts as no text, until the careful reader has seen the ``line``.
    """
    read, typed, checks = dict(table.columns), {}, {}
    for name, type_ in table.columns.items():
        column, element = quoted(name), type_.removesuffix("[]")
        if element in INTEGERS:
            read[name] = type_.replace(element, "VARCHAR")
            typed[column], checks[mismatch(name, type_)] = f"TRY_CAST({column} AS {type_})", fits_sql(column, type_)
            if element != type_:
                checks[mismatch(name, type_)] = (
                    f"len(list_filter({column}, lambda x: NOT ({fits_sql('x', element)}))) = 0"
                )
        elif type_ == "BOOLEAN":
            read[name] = "VARCHAR"
            typed[column], checks[mismatch(name, type_)] = f"{column} = 'true'", f"{column} IN ('true', 'false')"
        elif type_ == "VARCHAR" and not line:
            checks[mismatch(name, type_)] = f"left({column}, 1) NOT IN ('[', '{{')"
    read |= {LINE: "BIGINT"} if line else {}
    declared = ", ".join(f"{literal(name)}: {literal(type_)}" for name, type_ in read.items())
    replaced = f" REPLACE ({', '.join(f'{sql} AS {name}' for name, sql in typed.items())})" if typed else ""
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
        except (ValueError, RecursionError):
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
    """Yield the lines of a file, without their ends; a damaged one raises, naming it."""
    for block in _blocks(file):
        yield from block[: -PAD - 1].tobytes().split(b"\n")


def _sift(table: RawTable, file: Path, clean: Path) -> Iterator[dict[str, Any]]:
    """Copy the lines that parse to ``clean``, each with its number; yield a reject for every other."""
    with clean.open("wb") as out:
        for number, line in enumerate(_lines(file), start=1):
            if not line.strip(b" \t\r"):
                continue
            reason, text = None, b""
            try:
                row = json.loads(line.decode("utf-8-sig"), parse_constant=_no_number)
                if not isinstance(row, dict):
                    reason = "not a JSON object"
                else:
                    reason = next((mismatch(c, t) for c, t in table.columns.items() if not _fits(row.get(c), t)), None)
                    row = {LINE: number} | {column: row[column] for column in table.columns if column in row}
                    text = json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
            except (ValueError, RecursionError):
                reason = "not valid JSON"
            if reason is None:
                out.write(text + b"\n")
            else:
                yield {s.REJECT_LINE: number, s.REJECT_REASON: reason}


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
        return type_ == "BOOLEAN" and (isinstance(value, bool) or value in ("true", "false"))
    if not isinstance(value, str | int | float):
        return False
    if isinstance(value, str) and type_ not in INTEGERS and not _NUMBER.fullmatch(value):
        return False
    try:
        if type_ in INTEGERS:
            low, high = INTEGERS[type_]
            return not isinstance(value, float) and low <= int(value) <= high and str(int(value)) == str(value)
        number = float(value)
    except (ValueError, OverflowError):
        return False
    return type_ != "FLOAT" or not _FLOAT_END <= abs(number) < float("inf")
