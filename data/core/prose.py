"""Formats a dataset's facts for people: sections, and numbers in sentences and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from reclaim.data.core.tables import Cell, Table

WIDTH: Final = 100
"""Columns of the text, at most."""


@dataclass(frozen=True)
class Section:
    """A heading with its sentences, tables and figures.

    Attributes
    ----------
    title : str
    lines : tuple of str
        Sentences, one paragraph each.
    tables : mapping of str to Table
        By heading; at most one heading is empty.
    figures : mapping of str to str
        Name → caption; the page leaves out figures that cannot be drawn.
    """

    title: str
    lines: tuple[str, ...] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """Name of the section within the page."""
        return self.title.lower().replace(" ", "-")

    def as_text(self) -> str:
        """Return the section within ``WIDTH`` columns."""
        parts = [f"{self.title}\n{'-' * len(self.title)}"]
        kept = [line.replace(" %", "\u00a0%") for line in self.lines]  # a number and its sign on one line
        parts += ["\n".join(textwrap.wrap(line, WIDTH)).replace("\u00a0", " ") for line in kept]
        if self.tables:
            parts[-1] += "\n"
        parts += ["\n".join(filter(None, (heading, table.as_text()))) for heading, table in self.tables.items()]
        return "\n".join(line.rstrip() for line in "\n".join(parts).splitlines()).rstrip() + "\n"


def number(value: float | None) -> str:
    """Return a number as text for a sentence; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def duration(hours: float) -> str:
    """Return a duration given in hours, as text in a suitable unit."""
    size, unit = next((u for u in ((24.0, "days"), (1.0, "h"), (1 / 60, "min")) if hours >= 2 * u[0]), (1 / 3600, "s"))
    return f"{number(hours / size)} {unit}"


def known(table: Table) -> Table:
    """Return the table without the columns that are null in all rows."""
    kept = [k for k in range(len(table.columns)) if any(row[k] is not None for row in table.rows)]
    return Table(tuple(table.columns[k] for k in kept), tuple(tuple(row[k] for k in kept) for row in table.rows),
                 table.percent)  # fmt: skip


def amount(value: float) -> Cell:
    """Return an amount for a table: to four digits, or whole where that is more."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")


def counted(n: int, what: str) -> str:
    """Return a number with a noun, in the plural where needed."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def percent(share: float | None, digits: int = 2) -> str:
    """Return a share of one in percent; a dash for an unknown one."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def points(difference: float | None) -> str:
    """Return a difference of two shares of one in percentage points; a dash for an unknown one."""
    return "-" if difference is None else f"{100 * difference:+.2f} points"


def interval(of: Mapping[str, float | None]) -> str:
    """Return the bounds ``low`` and ``high`` of a share, as ``1.20 to 3.45 %``; a dash where they are unknown."""
    low, high = of["low"], of["high"]
    return "-" if low is None or high is None else f"{100 * low:.2f} to {100 * high:.2f} %"


def part_of(part: int, whole: int) -> str:
    """Return a count with its share as text, or ``none`` or ``all``."""
    return "none" if not part else f"all {whole:,}" if part == whole else f"{part:,} ({percent(part / whole)})"
