"""Reads JSON lines by a compiled reader, and every line that it declines carefully."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reclaim.data.core.duck import (
    ENGINE_ERRORS,
    GZIP_ERRORS,
    INTEGERS,
    DamagedFileError,
    mismatch,
    open_bytes,
    quoted,
    unreadable,
)
from reclaim.data.errors import SchemaError
from reclaim.data.ingest.readers.json_fast import SHORTEST, fields_of, plain_batches, plain_rows, room_for
from reclaim.data.ingest.readers.json_kernel import NEWLINE, PAD
from reclaim.data.ingest.readers.rejects import CR_ALONE, RejectsWriter
from reclaim.data.ingest.readers.rows import CAST_REASON, LINE, Stage, Taken, copy_rows
from reclaim.data.ingest.readers.staging import Packed, RowsWriter
from reclaim.data.traces.source import RawTable

_HEADER_LINES: Final = 200
"""Lines whose keys are checked: a field of another format is in most lines; one odd line must not cost the file."""
_BLOCK_BYTES: Final = 8 << 20
"""Text read at once: a few thousand lines, so that the rows made of it stay in a processor's cache."""
_READ_BYTES: Final = 1 << 20
"""Text unpacked at once: a gzip reader unpacks into a buffer of its own first."""
_LAST_LINE_BYTES: Final = 1 << 16
_LONGEST_LINE_BYTES: Final = 64 << 20
_MOST_DECLINED: Final = 1_000_000
"""Lines set aside for the careful reader before it reads them."""
_BATCH_LINES: Final = 10_000
"""Lines that the careful reader holds at once."""
_FLOAT_END: Final = 2.0**128 - 2.0**103
"""The first number that is rounded to a single float's infinity."""
_NUMBER: Final = re.compile(
    r"\s*-?((0|[1-9]\d*)(\.\d*)?(e[-+]?\d+)?|\.\d+(e[-+]?\d+)?|nan|inf|infinity)", re.ASCII | re.IGNORECASE
)
"""A number in quotes."""
_DIGITS: Final = bytes.maketrans(b"123456789", b"000000000")
_MANY_DIGITS: Final = b"0" * 19
"""An integer of more than 64 bits has at least as many digits. A search by a pattern takes four times as long."""
_MOST_UNKNOWN: Final = 50
"""Unknown fields that are named; further ones are counted together."""
_OTHERS: Final = "…"
_VIEW: Final = "reclaim_lines"


def take_json(stage: Stage, table: RawTable, file: Path) -> Taken:
    """Write the canonical rows of JSON lines, and the rejects; return the counts.

    Raises
    ------
    DamagedFileError
        The file is truncated or corrupt.
    SchemaError
        It has fields that the format does not, and lacks some that it has.
    """
    table = _checked(table, file)
    if not isinstance(stage.writer, RowsWriter):
        return _copied(stage, table, partial(_plain_first, stage, table, file), file)
    if not table.fields:
        return _read_carefully(stage, table, enumerate(_lines(file), start=1), file)
    declined, numbers = stage.work / "declined.json", stage.work / "declined.numbers"
    defects = Counter[str]()
    for _ in _read_fast(stage, stage.writer, table, file, (declined, numbers)):
        lines = zip(_numbers(numbers), _lines(declined), strict=False)
        defects.update(_read_carefully(stage, table, lines, file).defects)
    declined.unlink()
    numbers.unlink()
    return Taken(stage.writer.rows, dict(defects))


def _read_fast(
    stage: Stage, writer: RowsWriter, table: RawTable, file: Path, declined: tuple[Path, Path]
) -> Iterator[int]:
    """Write the rows of lines that the compiled reader takes; copy the others, and their numbers, to two files.

    Yields how many others there are, when they are many and at the end; then the files begin again.
    """
    blocks: list[NDArray[np.uint8]] = []
    rooms: list[NDArray[np.uint64]] = []

    def read(block: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Packed, NDArray[np.int64], int]:
        room = rooms.pop() if rooms else room_for(len(block) + _BLOCK_BYTES, writer.layout)
        if len(room) * SHORTEST < len(block):
            room = room_for(len(block), writer.layout)
        rows, others, lines = plain_rows(block, table, writer.layout, room)
        packed = writer.pack(rows)
        rooms.append(room)
        return block, packed, others, lines

    n = 0
    line = 1
    waiting: deque[Future[tuple[NDArray[np.uint8], Packed, NDArray[np.int64], int]]] = deque()

    def finish() -> None:
        nonlocal n, line
        block, packed, others, lines = waiting.popleft().result()
        writer.write(packed)
        for begin in range(0, len(others), _BATCH_LINES):
            left.writelines(
                block.data[first : end + 1] for _, first, end in others[begin : begin + _BATCH_LINES].tolist()
            )
        left_numbers.write((others[:, 0] + line).tobytes())
        blocks.append(block)
        n, line = n + len(others), line + lines

    with (
        declined[0].open("wb") as left,
        declined[1].open("wb") as left_numbers,
        ThreadPoolExecutor(stage.threads) as pool,
    ):
        for block in _blocks(file, blocks):
            waiting.append(pool.submit(read, block))
            while len(waiting) > stage.threads:
                finish()
            if n > _MOST_DECLINED:
                left.flush()
                left_numbers.flush()
                yield n
                n = 0
                for written in (left, left_numbers):
                    written.seek(0)
                    written.truncate()
        while waiting:
            finish()
        left.flush()
        left_numbers.flush()
        if n:
            yield n


def _numbers(file: Path) -> Iterator[int]:
    """Yield the numbers of a file of 64-bit integers."""
    with file.open("rb") as content:
        while part := content.read(8 * _BATCH_LINES):
            yield from np.frombuffer(part, np.int64).tolist()


def _blocks(file: Path, done: list[NDArray[np.uint8]] | None = None) -> Iterator[NDArray[np.uint8]]:
    """Yield a file in blocks of whole lines, each followed by ``PAD`` bytes; DamagedFileError if it is damaged.

    The memory of blocks that the caller puts into ``done`` is used again: new memory has to be cleared by the system.
    """
    done = [] if done is None else done
    rest = b""
    size = _BLOCK_BYTES
    try:
        with open_bytes(file) as raw:
            readinto = raw.readinto  # type: ignore[attr-defined]  # IO[bytes] lacks it, both kinds of file have it
            while True:
                block = np.empty(0, np.uint8)
                while done and len(block) < len(rest) + size + 1 + PAD:
                    block = np.asarray(done.pop().base)
                if len(block) < len(rest) + size + 1 + PAD:
                    block = np.empty(len(rest) + size + _LAST_LINE_BYTES, np.uint8)
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
                        wrong = CR_ALONE if b"}\r{" in block[:_READ_BYTES].tobytes() else ""
                        long = f"a line of more than {_LONGEST_LINE_BYTES >> 20} MiB"
                        raise DamagedFileError(f"{file}: {wrong or long}")
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


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends."""
    for block in _blocks(file):
        yield from (line[:-1] for line in BytesIO(block[:-PAD].data))


def _checked(table: RawTable, file: Path) -> RawTable:
    """Return the table with the names that the file uses; SchemaError if it cannot be such a table's.

    A field that the format does not have is passed over, unless a needed one is missing: then it is a misspelling.
    """
    nested = {column: dict(fields).keys() for column, type_ in table.columns.items() if (fields := fields_of(type_))}
    seen: set[str] = set()
    inside: set[str] = set()
    for _, line in zip(range(_HEADER_LINES), _lines(file), strict=False):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            seen |= row.keys()
            inside |= {
                f"{c}.{key}" for c in nested if isinstance(row.get(c), dict) for key in row[c].keys() - nested[c]
            }
    table = table.named_as(seen)
    unknown = sorted(seen - table.columns.keys()) if set(table.needs) - seen else []
    if unknown := sorted([*unknown, *inside]):
        raise SchemaError(
            f"{file}: unknown field{'s' * (len(unknown) > 1)} {', '.join(unknown)}; "
            f"known are {', '.join(table.columns)}"
        )
    return table


def _read_carefully(stage: Stage, table: RawTable, lines: Iterable[tuple[int, bytes]], file: Path) -> Taken:
    """Write the canonical rows of numbered lines, which are those of ``file``."""
    rest = iter(lines)

    def batches(schema: pa.Schema, unknown: Counter[str]) -> Iterator[pa.RecordBatch]:
        while batch := [*islice(rest, _BATCH_LINES)]:
            yield typed(table, schema, batch, stage.rejects, unknown)

    return _copied(stage, table, batches, file)


def _plain_first(
    stage: Stage, table: RawTable, file: Path, schema: pa.Schema, unknown: Counter[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the raw rows of a file: of each block those that the compiled reader takes, then the others."""
    line = 1
    blocks: list[NDArray[np.uint8]] = []
    for block in _blocks(file, blocks):
        for rows, others in plain_batches(block, table, schema, line):
            yield rows
            left = ((number, block.data[begin:end].tobytes()) for number, begin, end in others.tolist())
            while batch := [*islice(left, _BATCH_LINES)]:
                yield typed(table, schema, batch, stage.rejects, unknown)
        line += int(np.count_nonzero(block[:-PAD] == NEWLINE))
        blocks.append(block)


def _copied(
    stage: Stage,
    table: RawTable,
    batches: Callable[[pa.Schema, Counter[str]], Iterator[pa.RecordBatch]],
    file: Path,
) -> Taken:
    """Write the canonical rows of batches of raw ones, which are those of ``file``.

    ``batches`` gets their schema, and a counter of the lines that have a field which the table does not have.
    """
    types = ", ".join(f"CAST(NULL AS {type_}) AS {quoted(name)}" for name, type_ in table.columns.items())
    schema = stage.connection.sql(f"SELECT {types}, CAST(NULL AS BIGINT) AS {LINE}").to_arrow_table().schema
    unknown = Counter[str]()
    errors: list[Exception] = []

    def guarded() -> Iterator[pa.RecordBatch]:
        try:
            yield from batches(schema, unknown)
        except Exception as error:
            errors.append(error)  # the query engine passes on its text alone
            raise

    stage.connection.register(_VIEW, pa.RecordBatchReader.from_batches(schema, guarded()))
    try:
        taken = copy_rows(stage, table, f"SELECT *, CAST(NULL AS VARCHAR) AS {CAST_REASON} FROM {_VIEW}")
    except (*ENGINE_ERRORS, OSError) as error:
        if errors:
            raise errors[0] from None
        if isinstance(error, OSError):
            raise
        raise unreadable(file, error) from error
    finally:
        stage.connection.unregister(_VIEW)
    defects = {table.passed_over(column): lines for column, lines in sorted(unknown.items())}
    return replace(taken, defects=taken.defects | defects)


def typed(
    table: RawTable,
    schema: pa.Schema,
    lines: Iterable[tuple[int, bytes]],
    rejects: RejectsWriter,
    unknown: Counter[str],
) -> pa.RecordBatch:
    """Return the rows of lines that hold an object with values of the columns' types; write rejects of the others.

    ``unknown`` counts the lines that have a field which the table does not have.
    """
    reasons: dict[int, str] = {}
    numbers: list[int] = []
    rows: list[dict[str, Any]] = []
    for number, line in lines:
        if not line.strip(b" \t\r"):
            continue
        try:
            row = decoded(line, table)
        except (ValueError, RecursionError):
            reasons[number] = f"not valid JSON: {CR_ALONE}" if b"}\r{" in line else "not valid JSON"
            continue
        if not isinstance(row, dict):
            reasons[number] = "not a JSON object"
            continue
        if not row.keys() <= table.columns.keys():
            for name in row.keys() - table.columns.keys():
                unknown[name if name in unknown or len(unknown) < _MOST_UNKNOWN else _OTHERS] += 1
        numbers.append(number)
        rows.append(row)
    columns = []
    for column, type_ in table.columns.items():
        values, misfits = _converted([row.get(column) for row in rows], type_, schema.field(column).type)
        columns.append(values)
        for at in misfits:
            reasons.setdefault(numbers[at], mismatch(column, type_))
    rejects.add([*reasons], [*reasons.values()])
    batch = pa.record_batch([*columns, pa.array(numbers, pa.int64())], schema=schema)
    return batch.filter(pa.array([n not in reasons for n in numbers], pa.bool_())) if reasons else batch


def decoded(line: bytes, table: RawTable) -> Any:
    """Return the value that a line holds; ValueError or RecursionError if it is not JSON.

    ``orjson`` reads the usual line in half the time. Python's reader decides on those that it declines, and on those
    with a number that it might round: an integer of more than 64 bits.
    """
    if _MANY_DIGITS not in line.translate(_DIGITS):
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(line)
    row = _DECODER.decode(line.removeprefix(BOM_UTF8).decode())
    if isinstance(row, dict) and b"\\u" in line:  # half a surrogate pair is not text
        json.dumps([row.get(column) for column in table.columns], ensure_ascii=False).encode()
    return row


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_number)
_READY: Final[dict[str, set[type]]] = {"VARCHAR": {str}, "DOUBLE": {float}, "BOOLEAN": {bool}}
"""Type → JSON values that need no conversion."""


def _converted(values: list[Any], type_: str, arrow: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Return values as a column's type, and the positions of those that have another type.

    A column whose values all have the usual form is converted at once, which is several times faster.
    """
    known = [value for value in values if value is not None]
    kinds = set(map(type, known))
    if kinds <= _READY.get(type_, set()):
        return pa.array(values, arrow), []
    if fields_of(type_) and kinds == {dict}:
        element = "DOUBLE" if "DOUBLE" in type_ else "VARCHAR"
        if set(map(type, chain.from_iterable(map(dict.values, known)))) <= _READY[element]:
            return pa.array(values, arrow), []
    if type_ in INTEGERS and kinds == {str}:
        with suppress(pa.ArrowInvalid):
            text = pa.array(values, pa.string())
            numbers = text.cast(arrow)
            low, _ = INTEGERS[type_]
            if pc.min(numbers).as_py() >= low and numbers.cast(pa.string()).equals(text):
                return numbers, []
    convert, out, misfits = _converter(type_), [], []
    for at, value in enumerate(values):
        try:
            out.append(value if value is None else convert(value))
        except (ValueError, OverflowError):
            out.append(None)
            misfits.append(at)
    return pa.array(out, arrow), misfits


@cache
def _converter(type_: str) -> Callable[[Any], Any]:
    """Return the function that converts a JSON value other than null to a column's type.

    It raises ValueError or OverflowError for a value of another type. An integer is written as that integer alone is,
    in quotes or not, by the rule of ``fits_sql``.
    """
    if type_.endswith("[]"):
        return partial(_list, _or_null(_converter(type_.removesuffix("[]"))))
    if type_.startswith("STRUCT"):
        return partial(_struct, _or_null(_converter("DOUBLE" if "DOUBLE" in type_ else "VARCHAR")))
    if type_ in INTEGERS:
        return partial(_integer, *INTEGERS[type_])
    return {"DOUBLE": _double, "FLOAT": _single, "BOOLEAN": _flag, "VARCHAR": _text}[type_]


def _or_null(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _list(convert: Callable[[Any], Any], value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError
    return [convert(element) for element in value]


def _struct(convert: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return {name: convert(field) for name, field in value.items()}


def _integer(low: int, high: int, value: Any) -> int:
    number = int(value) if isinstance(value, str) else value
    if type(number) is not int or not low <= number <= high or str(number) != str(value):
        raise ValueError
    return number


def _double(value: Any) -> float:
    if isinstance(value, bool | list | dict) or (isinstance(value, str) and not _NUMBER.fullmatch(value)):
        raise ValueError
    return float(value)


def _single(value: Any) -> float:
    number = _double(value)
    if _FLOAT_END <= abs(number) < float("inf"):
        raise ValueError
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("true", "false"):
        raise ValueError
    return bool(value == "true")


def _text(value: Any) -> str:
    if isinstance(value, list | dict):
        raise ValueError
    return value if isinstance(value, str) else json.dumps(value)
