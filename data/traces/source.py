"""Describes a trace format: its tables, their files, and the SQL that makes canonical rows of raw ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from reclaim.data import schema as s
from reclaim.data.core.duck import quoted


@dataclass(frozen=True)
class Field:
    """A raw field whose value is a usage column, as the compiled reader of JSON lines takes it.

    Attributes
    ----------
    path, column : str
        The field, ``a`` or ``a.b``, and the column.
    needed : bool
        Whether every row must have it.
    zero_is_null : bool
        Whether 0 means null.
    only_with : str or None
        An integer field without which this one is null; -1 means null, too.
    mean : str or None
        For maxima: the path of the mean; where that is above 0, a maximum of 0 means null.
    most : int or None
        For enums: the largest code. Names are left to the careful reader.
    """

    path: str
    column: str
    needed: bool = False
    zero_is_null: bool = False
    only_with: str | None = None
    mean: str | None = None
    most: int | None = None


@dataclass(frozen=True)
class RawTable:
    """One table of a trace format.

    Attributes
    ----------
    name : str
        The canonical table that its rows become, one of ``schema.TABLES``.
    raw : str
        The trace's own name of the table. One raw table may be read more than once, for several canonical ones.
    patterns : tuple of str
        Globs that find its files in a source folder.
    columns : mapping of str to str
        The raw columns and their duckdb types.
    select : str
        SQL expressions, comma-separated, that make a canonical row of a raw one. A column left out is null.
    checks : mapping of str to str
        Reason → SQL condition over the raw row that a good row meets (a null result counts as met).
    needs : tuple of str
        Columns without which a closed CSV or parquet file is refused (JSON leaves a null field out).
    order : tuple of str
        Columns of a CSV file in their order, for traces whose files have no header line; a first line that does not
        fit them but names columns is skipped. Empty: the file's own header line names the columns. In a closed table,
        rows without a header are split at commas, and a quote is an ordinary character.
    defects : mapping of str to str
        Known defect of rows that are accepted → SQL condition over the raw row that finds them; the manifest counts
        them.
    where : str
        SQL condition over the raw row; a good row that does not meet it is left out and not counted as a reject.
    fields : tuple of Field
        For usage as JSON lines: all fields. Empty: the compiled reader cannot read this table.
    aliases : mapping of str to str
        Another name of a column that files may have → the column.
    closed : bool
        Whether a column that is not listed is counted as a defect (it is not where users bring their own files).
    repeated : bool
        Whether it is read off files of another table, whose rows repeat it, as the machines of windows.
    apart : tuple of str
        Globs of files that are of another table, though a pattern finds them.
    file_column : str or None
        Name of a column that files do not have: the file's own name, without folder and ending.
    """

    name: str
    patterns: tuple[str, ...]
    columns: Mapping[str, str]
    select: str
    checks: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    raw: str = ""
    order: tuple[str, ...] = ()
    defects: Mapping[str, str] = field(default_factory=dict)
    where: str = "true"
    fields: tuple[Field, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    closed: bool = True
    repeated: bool = False
    apart: tuple[str, ...] = ()
    file_column: str | None = None

    @property
    def key(self) -> str:
        """Name that tells this reading of a raw table from every other."""
        return f"{self.raw}-{self.name}" if self.raw else self.name

    def named_as(self, present: Set[str]) -> RawTable:
        """Return the table with the names of columns that a file has, of which some may be aliases."""
        table = self
        for alias, column in self.aliases.items():
            if alias in present and column not in present:

                def named(text: str, column: str = column, alias: str = alias) -> str:
                    return re.sub(rf"\b{column}\b", alias, text)

                table = replace(
                    table,
                    columns={named(name): type_ for name, type_ in table.columns.items()},
                    select=named(table.select),
                    checks={named(reason): named(sql) for reason, sql in table.checks.items()},
                    fields=tuple(replace(f, path=named(f.path)) for f in table.fields),
                )
        return table

    def passed_over(self, column: str) -> str:
        """Return the defect of a row that has a column which the format does not have."""
        return f"{self.raw or self.name}: unknown column {column}, passed over"


@dataclass(frozen=True)
class Source:
    """A trace format.

    Attributes
    ----------
    trace : str
        Its name on the command line.
    tables : tuple of RawTable
        Its raw tables.
    lacks : tuple of str
        Canonical columns that this source never has; named in the manifest.
    options : mapping of str to str
        Anything else that decides the rows (a mapping file's text): part of the dataset's fingerprint.
    extras : mapping of str to tuple of str
        Table → its columns out of ``schema.EXTRAS``.
    derived : mapping of str to str
        Usage column → SQL over the row once its limits are known (a share becomes a usage).
    longest_window_us : int or None
        The longest window by the trace's own document; a longer one is counted as a defect.
    collection_limits : bool
        Whether a task whose events have no limits gets those of its collection.
    machines_of_events : bool
        Whether a window that names no machine ran on that of its task's events.
    limits_in_usage : bool
        Whether rows of usage have their limits and the start of their run, though there are events.
    notes : tuple of str
        Facts that a reader of the dataset must know; kept in the manifest.
    alone : str or None
        The one file of the folder that is read; None: all that the tables match.
    findings : tuple of str
        Such facts about this input, in numbers; ingest prints them, and keeps them after the notes.
    """

    trace: str
    tables: tuple[RawTable, ...]
    lacks: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    longest_window_us: int | None = None
    collection_limits: bool = False
    machines_of_events: bool = False
    limits_in_usage: bool = False
    notes: tuple[str, ...] = ()
    alone: str | None = None
    findings: tuple[str, ...] = ()


def find_files(folder: Path, table: RawTable) -> list[Path]:
    """Return the table's files in ``folder``, sorted by name."""
    found, apart = ({path for glob in globs for path in folder.glob(glob)} for globs in (table.patterns, table.apart))
    return sorted(path for path in found - apart if path.is_file())


def tier_sql(priority: str, floors: Sequence[int | None] = s.TIER_FLOORS) -> str:
    """Return SQL that gives the tier's position in ``schema.TIERS`` for a priority.

    ``floors`` holds the lowest priority of each tier, None for a tier the trace does not have.
    """
    cases = " ".join(f"WHEN {priority} >= {floor} THEN {tier}" for tier, floor in [*enumerate(floors)][::-1]
                     if floor is not None)  # fmt: skip
    return f"CAST(CASE {cases} END AS TINYINT)"


ZERO_MAXIMUM: Final = {"maximum_of_0": "missing"}
"""Option of the sources that use ``maximum_sql``; datasets made before it was there hold other rows."""


def maximum_sql(highest: str, mean: str) -> str:
    """Return SQL of a maximum: null where it is 0 and the mean is not, for that is no measurement."""
    return f"CASE WHEN {highest} <> 0 OR {mean} IS NULL OR {mean} <= 0 THEN {highest} END"


def code_sql(column: str, names: Sequence[str], prefix: str = "") -> str:
    """Return SQL that reads an enum given as a number or as one of ``names``, the first of which is 0.

    A name may carry ``prefix``. Any other value is null.
    """
    cases = " ".join(f"WHEN '{name}' THEN {k}" for k, name in enumerate(names))
    cases += "".join(f" WHEN '{prefix}{name}' THEN {k}" for k, name in enumerate(names) if prefix)
    cases += "".join(f" WHEN '{k}' THEN {k}" for k in range(len(names)))
    return f"CAST(CASE upper({column}) {cases} END AS TINYINT)"


def present(*columns: str) -> dict[str, str]:
    """Return the checks that each column has a value."""
    return {f"{column} is missing": f"{quoted(column)} IS NOT NULL" for column in columns}


def good(value: str) -> str:
    """Return SQL: whether a measurement, given as SQL, that is not null is finite and not negative."""
    return f"{value} >= 0 AND isfinite({value})"


def measured(*columns: str) -> dict[str, str]:
    """Return the checks that measurements are good."""
    return {f"{column} is negative or not finite": good(quoted(column)) for column in columns}


def recoded_sql(column: str, codes: Mapping[int, int]) -> str:
    """Return SQL that turns a trace's own integer codes into canonical ones; a code it does not have is null."""
    cases = " ".join(f"WHEN {own} THEN {canonical}" for own, canonical in codes.items())
    return f"CAST(CASE {column} {cases} END AS TINYINT)"
