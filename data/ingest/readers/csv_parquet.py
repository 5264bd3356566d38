"""Reads CSV and parquet files: one query numbers, casts and checks the rows."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.duck import (
    INTEGERS,
    DamagedFileError,
    check_gzip,
    file_sql,
    fits_sql,
    literal,
    mismatch,
    open_bytes,
    quoted,
    readable,
    reason_sql,
)
from reclaim.data.errors import SchemaError, TraceError
from reclaim.data.ingest.readers.rejects import CR_ALONE, HOPELESS, HOPELESS_SHARE, RejectsWriter
from reclaim.data.ingest.readers.rows import CAST_REASON, LINE, Stage, Taken, copy_rows
from reclaim.data.traces.source import RawTable

_LONGEST_HEADER_BYTES: Final = 1 << 20
_FIRST_LINES: Final = 1_000
_INVALID_STATE: Final = "invalid state"
"""Words of the query engine's error for, among others, lines that end in different ways."""
_ENDS_DIFFER: Final = "some lines end in a carriage return and others do not; end all in a line feed"
_DELIMITERS: Final = ",;\t|"
_BLANKS: Final = " \t"
_NO_CSV: Final = {
    b"\x1f\x8b": "gzipped, which the name does not say; add .gz to it",
    b"PK\x03\x04": "a zip file or a workbook; unpack it, or export it as CSV",
    b"\xff\xfe": "UTF-16; write it as UTF-8",
    b"\xfe\xff": "UTF-16; write it as UTF-8",
}
"""First bytes of what is often called CSV by mistake, and the remedy."""
_ROW_NUMBER: Final = "file_row_number"
_REJECTS, _SCANS = "reclaim_csv_rejects", "reclaim_csv_scans"


def stem_of(file: str) -> str:
    """Return the name of a file without its folder and ending: that of a task that has a file of its own."""
    return Path(file.removesuffix(".gz")).stem


def take_csv(stage: Stage, table: RawTable, file: Path) -> Taken:
    """Write the canonical rows of a CSV file, and the rejects; return the counts.

    The header line decides the delimiter and the columns; the table's ``order`` does if its files have no header. A row
    with another number of fields is a reject.

    Raises
    ------
    DamagedFileError
        The file is truncated or corrupt.
    SchemaError
        Its columns are not the format's.
    """
    check_gzip(file)
    delimiter, named, headed = _layout(table, file)
    present = named if table.closed else _without_padding(named, set(table.columns))
    names = _engine_names(file, present, set(table.named_as(set(present)).columns))
    declared = ", ".join(f"{literal(name)}: 'VARCHAR'" for name in names)
    _check_fields(file, delimiter, len(present), stage.rejects.most)
    plain = bool(table.order) and table.closed  # a quote is an ordinary character
    within = np.empty(0, np.int64) if plain else _lines_within_rows(file, delimiter, len(present))
    mark = "" if plain else '"'
    reader = (
        f"read_csv({file_sql(file)}, delim = {literal(delimiter)}, quote = '{mark}', escape = '{mark}', "
        f"compression = {literal('gzip' if file.name.endswith('.gz') else 'none')}, "
        f"header = {str(headed).lower()}, auto_detect = false, columns = {{{declared}}}, parallel = false, "
        f"hive_partitioning = false, store_rejects = true, rejects_table = '{_REJECTS}', rejects_scan = '{_SCANS}')"
    )
    for name in (_REJECTS, _SCANS):
        stage.connection.execute(f"DROP TABLE IF EXISTS {name}")
    numbered = RejectsWriter(stage.work / "numbered.parquet", stage.rejects.file, stage.rejects.most)
    with numbered:
        of_rows = replace(stage, rejects=numbered)
        try:
            trimmed = set() if table.closed else {name for name in present if name == name.strip()}
            taken = _take(of_rows, table, file, reader, f"row_number() OVER () + {int(headed)}", present, trimmed)
        except DamagedFileError as error:
            if _INVALID_STATE in str(error) and _ends_differ(file):
                raise DamagedFileError(f"{file}: {_ENDS_DIFFER}") from error
            raise
    scanned = f"SELECT 1 FROM duckdb_tables() WHERE table_name = {literal(_REJECTS)}"
    if not stage.connection.execute(scanned).fetchall():  # no row is wanted: nothing was read
        numbered.path.unlink()
        return taken
    broken = stage.connection.sql(
        f"SELECT line::BIGINT AS line, 'row is malformed: ' || lower(min(error_type::VARCHAR)) AS reason "
        f"FROM {_REJECTS} GROUP BY line ORDER BY line"
    ).to_arrow_reader()
    malformed = [within]
    for batch in broken:
        malformed.append(_renumbered(np.asarray(batch.column(0)), within))
        stage.rejects.add(malformed[-1], batch.column(1))
    if numbered.count:  # rows were numbered without the malformed and the empty lines before them
        missed = np.union1d(np.concatenate(malformed), _empty_lines(file))
        for lines, reasons in numbered.batches():
            stage.rejects.add(_renumbered(lines, missed), reasons)
    numbered.path.unlink()
    return taken


def _engine_names(file: Path, present: list[str], wanted: Set[str]) -> list[str]:
    """Return names for the query engine, which has no empty names and ignores case; wanted ones stay.

    pandas writes an index as a column without a name.

    Raises
    ------
    SchemaError
        Two wanted columns differ by case alone.
    """
    needed = sorted(wanted & set(present))
    taken = {name.lower(): name for name in needed}
    if len(taken) < len(needed):
        one, other = next((name, taken[name.lower()]) for name in needed if taken[name.lower()] != name)
        raise SchemaError(f"{file}: columns {one} and {other} differ by case alone; rename one of them")
    names = []
    for at, name in enumerate(present):
        free = name if name in wanted or (name and name.lower() not in taken) else f"column {at}"
        while free not in wanted and free.lower() in taken:
            free += "_"
        taken[free.lower()] = free
        names.append(free)
    return names


def _without_padding(names: list[str], wanted: Set[str]) -> list[str]:
    """Return the names of columns; wanted ones are stripped of blanks around them."""
    stripped = [name.strip() for name in names]
    return [
        bare if bare in wanted and name not in wanted and bare not in names and stripped.count(bare) == 1 else name
        for name, bare in zip(names, stripped, strict=True)
    ]


def _renumbered(lines: NDArray[np.int64], missed: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers in the file of lines that were numbered without the missed ones, which rise."""
    return lines + np.searchsorted(missed - np.arange(len(missed)), lines, side="right")


def _lines_of(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file, a longer one than any can be in parts."""
    with open_bytes(file) as content:
        yield from iter(lambda: content.readline(_LONGEST_HEADER_BYTES), b"")


def _check_fields(file: Path, delimiter: str, fields: int, most: float) -> None:
    """Raise TraceError where rows begin with so many of another number of fields that the run would fail.

    The query engine keeps each in memory, and reports them at the end.
    """
    malformed = 0
    for lines, line in enumerate(_lines_of(file), 1):
        malformed += bool(line.strip()) and line.count(delimiter.encode()) + 1 < fields
        if malformed > HOPELESS:
            raise TraceError(
                f"{file}: {malformed} of the first {lines} rows have fewer than {fields} fields, far more than "
                f"--max-reject-share={most:g}, so reading stopped; last line {lines}: {line[:80]!r}"
            )
        if lines % _FIRST_LINES == 0 and malformed <= max(HOPELESS_SHARE, most) * lines:
            return


def _lines_within_rows(file: Path, delimiter: str, fields: int) -> NDArray[np.int64]:
    """Return the lines that continue a row, which the query engine does not number.

    Raises
    ------
    DamagedFileError
        A value in quotes does not end, or ends in a later row. The query engine silently leaves out all that such a
        value holds, even the rest of the file.
    """
    with open_bytes(file) as content:
        if not any(b'"' in part for part in iter(lambda: content.read(_LONGEST_HEADER_BYTES), b"")):
            return np.empty(0, np.int64)
    at_end, within = False, list[int]()

    def text() -> Iterator[str]:
        nonlocal at_end
        for line in _lines_of(file):
            yield line.decode("latin-1").rstrip("\r\n").replace("\r", " ") + "\n"
        at_end = True

    rows, begun = csv.reader(text(), delimiter=delimiter), 1
    try:
        for row in rows:
            if at_end or (rows.line_num > begun and _has_two_rows(row, delimiter, fields)):
                break
            within += range(begun + 1, rows.line_num + 1)
            begun = rows.line_num + 1
        else:
            return np.array(within, np.int64)
    except csv.Error:  # a value that is longer than any name
        pass
    raise DamagedFileError(f"{file}: a quote in the row that begins in line {begun} is not closed in that row")


def _has_two_rows(row: list[str], delimiter: str, fields: int) -> bool:
    """Return whether two of the lines that a row was read from have all fields of one."""
    return sum(line.count(delimiter) >= fields - 1 for line in delimiter.join(row).split("\n")) > 1


def _ends_differ(file: Path) -> bool:
    """Return whether one line has a carriage return, or several, and another line has none, or one."""
    return len({line.count(b"\r") for line in _lines_of(file) if line.endswith(b"\n") or b"\r" in line}) > 1


def _empty_lines(file: Path) -> NDArray[np.int64]:
    numbers, number = [], 1
    for line in _lines_of(file):
        if not line.strip():
            numbers.append(number)
        number += line.endswith(b"\n")
    return np.array(numbers, np.int64)


def take_parquet(stage: Stage, table: RawTable, file: Path) -> Taken:
    """Write the canonical rows of a parquet file, and the rejects; return the counts.

    Raises
    ------
    DamagedFileError
        The file is truncated or corrupt.
    SchemaError
        Its columns are not the format's.
    """
    # a folder named key=value is only a folder: the columns are those in the file
    reader = f"read_parquet({file_sql(file)}, {_ROW_NUMBER} = true, hive_partitioning = false)"
    try:
        with readable(file):
            described = stage.connection.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall()
    except duckdb.BinderException as error:
        raise SchemaError(f"{file}: {_ROW_NUMBER} is a name of the query engine's own; rename the column") from error
    present = [row[0] for row in described if row[0] != _ROW_NUMBER]
    return _take(stage, table, file, reader, f"{_ROW_NUMBER} + 1", present)


def _take(
    stage: Stage,
    table: RawTable,
    file: Path,
    reader: str,
    number: str,
    present: list[str],
    trimmed: Set[str] = frozenset(),
) -> Taken:
    """Write the rows that a reader's SQL gives; values of ``trimmed`` columns are read without blanks around them."""
    table = table.named_as(set(present))
    _check_columns(table, file, set(present))
    casts, checks = [], {}
    for column, type_ in table.columns.items():
        name = quoted(column)
        if column == table.file_column:
            name = literal(stem_of(stage.rejects.file))
        elif column not in present:
            casts.append(f"CAST(NULL AS {type_}) AS {name}")
            continue
        if column in trimmed:
            name = _bare_sql(name)
        raw = f"CAST({name} AS VARCHAR)" if type_ in INTEGERS else name
        casts.append(f"TRY_CAST({raw} AS {type_}) AS {quoted(column)}")
        checks[mismatch(column, type_)] = fits_sql(raw, type_)
    relation = f"SELECT {', '.join(casts)}, {reason_sql(checks)} AS {CAST_REASON}, {number} AS {LINE} FROM {reader}"
    with readable(file):
        taken = copy_rows(stage, table, relation)
    unknown = [column for column in present if table.closed and column not in table.columns]
    return replace(taken, defects=taken.defects | {table.passed_over(column): taken.rows for column in unknown})


def _bare_sql(value: str) -> str:
    """Return SQL of a value without blanks around it; one of blanks alone is null."""
    ends = " OR ".join(f"ends_with({value}, {literal(blank)})" for blank in _BLANKS)
    # a trim takes several times as long as to see that there is none; what begins with a blank is less than '!'
    return f"CASE WHEN {value} < '!' OR {ends} THEN nullif(trim({value}, {literal(_BLANKS)}), '') ELSE {value} END"


def _layout(table: RawTable, file: Path) -> tuple[str, list[str], bool]:
    """Return a CSV file's delimiter and columns, and whether its first line is a header."""
    with open_bytes(file) as lines:
        line = lines.readline(_LONGEST_HEADER_BYTES)
    for begin, what in _NO_CSV.items():
        if line.startswith(begin):
            raise DamagedFileError(f"{file}: {what}")
    if b"\r" in line.rstrip(b"\r\n"):
        raise DamagedFileError(f"{file}: {CR_ALONE}")
    if len(line) == _LONGEST_HEADER_BYTES:
        raise DamagedFileError(f"{file}: the first line is longer than {_LONGEST_HEADER_BYTES >> 20} MiB")
    if table.order and not table.closed:
        return max(_DELIMITERS, key=line.decode("utf-8", "replace").count), list(table.order), False
    if table.order:
        fields = line.decode("utf-8", "replace").split(",")
        integers = [k for k, name in enumerate(table.order) if table.columns[name] in INTEGERS and k < len(fields)]
        return ",", list(table.order), bool(integers) and all(any(c.isalpha() for c in fields[k]) for k in integers)
    if not line:
        raise DamagedFileError(f"{file}: empty file")
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{file}: the header line is not UTF-8 ({error})") from error
    delimiter = max(_DELIMITERS, key=text.count)
    names = next(csv.reader([text], delimiter=delimiter), [])
    if not names or len(set(names)) < len(names):
        raise SchemaError(f"{file}: the first line must name each column once, got {text[:200]!r}")
    return delimiter, names, True


def _check_columns(table: RawTable, file: Path, present: set[str]) -> None:
    if table.file_column in present:
        raise SchemaError(f"{file}: the mapping's file_column {table.file_column} is a column of the file; rename it")
    missing = sorted((set(table.needs) if table.closed else table.columns.keys()) - present - {table.file_column})
    if missing:
        shown = (name if name == name.strip() else repr(name) for name in sorted(present))
        here = f"the file has {', '.join(shown)}"
        which = (
            f"lacks columns {', '.join(missing)}" if table.closed else f"the mapping names columns {', '.join(missing)}"
        )
        raise SchemaError(f"{file}: {which}{';' if table.closed else ','} {here}")
