"""Reads a trace's schema.csv: the order of the columns in files that have no header line."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from reclaim.data.errors import SchemaError

SCHEMA_FILE: Final = "schema.csv"
_REMEDY: Final = f"take {SCHEMA_FILE} as published next to the trace"


def read_schema_csv(
    folder: Path,
    file_column: str,
    known: Mapping[str, Collection[str]],
    needs: Mapping[str, Collection[str]],
    present: Collection[str],
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Return the text of a folder's schema.csv, and the columns of each table it names, in the order of their numbers.

    Parameters
    ----------
    folder : Path
        The trace.
    file_column : str
        Name in schema.csv of the column that names a table's files; the others are ``field number`` and ``content``.
    known, needs : mapping of str to collection of str
        Raw table → columns it can have, and those it must have.
    present : collection of str
        Raw tables that have files: those schema.csv must name.

    Raises
    ------
    SchemaError
        There is no schema.csv or it is malformed, names a table or a column that is not the trace's, or leaves out one
        that is needed; the message names all faults.
    """
    path = folder / SCHEMA_FILE
    if not path.is_file():
        raise SchemaError(f"{path}: no such file; it alone states the columns of the trace: {_REMEDY}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SchemaError(f"{path}: is not UTF-8 ({error}); {_REMEDY}") from error
    orders, problems = _orders(text, file_column, known)
    for raw, columns in needs.items():
        missing = [column for column in columns if column not in orders.get(raw, columns)]
        if missing:
            problems.append(f"{raw} lacks columns {', '.join(missing)} (it has {', '.join(orders[raw])})")
        if raw not in orders and raw in present:
            problems.append(f"{raw} is left out, but the trace has files of it")
    if problems:
        raise SchemaError(f"{path}: {'; '.join(problems)}; {_REMEDY}")
    return text, orders


def _orders(
    text: str, file_column: str, known: Mapping[str, Collection[str]]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return each raw table's columns by field number, as schema.csv has them, and what is wrong with it."""
    names = (file_column, "field number", "content")
    lines = [[" ".join(cell.split()) for cell in row] for row in csv.reader(text.splitlines())]
    numbered = [(k, line) for k, line in enumerate(lines, 1) if any(line)]
    header = [cell.lower() for cell in numbered[0][1]] if numbered else []
    if any(header.count(name) != 1 for name in names):
        return {}, [f"the first line must name {', '.join(names)}, got {','.join(header)!r}"]
    problems = []
    fields: dict[str, list[tuple[int, str]]] = {}
    for k, line in numbered[1:]:
        pattern, number, column = (dict(zip(header, line, strict=False)).get(name, "") for name in names)
        raw = pattern.split("/")[0].removesuffix(".gz").removesuffix(".csv")
        if raw not in known:
            problems.append(f"line {k}: unknown table {pattern!r} (known: {', '.join(known)})")
        elif column not in known[raw]:
            problems.append(f"line {k}: unknown column {column!r} of {raw} (known: {', '.join(known[raw])})")
        elif not (number.isascii() and number.isdigit()):
            problems.append(f"line {k}: field number must be a whole number, got {number!r}")
        else:
            fields.setdefault(raw, []).append((int(number), column))
    for raw, found in fields.items():
        numbers = sorted(number for number, _ in found)
        columns = [column for _, column in sorted(found)]
        if numbers != list(range(1, len(numbers) + 1)) and not problems:
            problems.append(f"{raw}: field numbers must be 1 to {len(numbers)}, each once, got {numbers}")
        repeated = sorted({column for column in columns if columns.count(column) > 1})
        if repeated:
            problems.append(f"{raw}: {', '.join(repeated)} appears more than once")
    return {raw: tuple(column for _, column in sorted(found)) for raw, found in fields.items()}, problems
