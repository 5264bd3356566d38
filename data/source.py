"""What a trace format has to tell ingest: its tables, their files, and the query that makes canonical rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reclaim.data import schema as s


@dataclass(frozen=True)
class RawTable:
    """One table of a trace format.

    Attributes
    ----------
    name : str
        Which canonical table its rows become: ``usage``, ``events``, ``collections``, ``machines`` or ``attributes``.
    patterns : tuple of str
        Globs that find its files in a source folder.
    columns : mapping of str to str
        The raw columns and their duckdb types.
    select : str
        SQL expressions, comma-separated, that make a canonical row of a raw one.
    checks : mapping of str to str
        Reason → SQL condition over the raw row that a good row meets (a null result counts as met).
    needs : tuple of str
        Columns without which a closed CSV or parquet file is refused (JSON leaves a null field out).
    required : bool
        Whether a source without any such file is an error.
    closed : bool
        Whether a column that is not listed is an error (it is not where users bring their own files).
    """

    name: str
    patterns: tuple[str, ...]
    columns: Mapping[str, str]
    select: str
    checks: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    required: bool = False
    closed: bool = True


@dataclass(frozen=True)
class Source:
    """A trace format.

    Attributes
    ----------
    trace : str
        Its name on the command line.
    tables : tuple of RawTable
        What it consists of.
    lacks : tuple of str
        Canonical columns that this source can never give; named in the manifest.
    options : mapping of str to str
        What else decides the rows (a mapping file's text): part of the dataset's fingerprint.
    """

    trace: str
    tables: tuple[RawTable, ...]
    lacks: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


def find_files(folder: Path, table: RawTable) -> list[Path]:
    """Return the table's files in ``folder``, sorted by name."""
    return sorted({path for pattern in table.patterns for path in folder.glob(pattern) if path.is_file()})


def tier_sql(priority: str) -> str:
    """Return SQL that gives the tier's position in ``schema.TIERS`` for a priority."""
    floors = list(enumerate(s.TIER_FLOORS))[::-1]
    cases = " ".join(f"WHEN {priority} >= {floor} THEN {tier}" for tier, floor in floors)
    return f"CAST(CASE {cases} END AS TINYINT)"


def code_sql(column: str, names: tuple[str, ...], first: int = 0) -> str:
    """Return SQL that reads an enum given as a number or as one of ``names``, the first of which is ``first``."""
    cases = " ".join(f"WHEN '{name}' THEN {first + k}" for k, name in enumerate(names))
    return f"CAST(CASE upper({column}) {cases} ELSE TRY_CAST({column} AS TINYINT) END AS TINYINT)"
