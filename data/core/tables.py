"""Formats rows under named columns as aligned text, as Markdown or as records for a script."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Attributes
    ----------
    columns : tuple of str
    rows : tuple of tuple of (str, float, int or None)
        Shares as fractions of one; None where unknown.
    percent : frozenset of str
        Columns to print in percent.
    caption : str
        Stands above the table.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    percent: frozenset[str] = frozenset()
    caption: str = ""

    def as_records(self) -> list[dict[str, Cell]]:
        """Return one dict per row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def as_strings(self) -> list[list[str]]:
        """Return the cells as they are printed."""
        return [
            [show(value, percent=column in self.percent) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def of(self, columns: Iterable[int]) -> Table:
        """Return the table of the columns at these places."""
        kept = list(columns)
        rows = tuple(tuple(row[k] for k in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[k] for k in kept), rows=rows)

    def without(self, *columns: str) -> Table:
        """Return the table without the columns of these headings."""
        return self.of(k for k, column in enumerate(self.columns) if column not in columns)

    def silent_on(self, subject: re.Pattern[str], names: Container[str] = ()) -> Table:
        """Return the table without the columns whose heading names a subject, and the rows of which a cell does.

        Cells that are one of ``names`` speak of no subject.
        """

        def speaks(cell: Cell) -> bool:
            return isinstance(cell, str) and cell not in names and subject.search(cell) is not None

        rows = tuple(row for row in self.rows if not any(map(speaks, row)))
        columns = (k for k, column in enumerate(self.columns) if not subject.search(column))
        return replace(self, rows=rows).of(columns)

    def known(self) -> Table:
        """Return the table without the columns that are null in all rows."""
        return self.of(k for k in range(len(self.columns)) if any(row[k] is not None for row in self.rows))

    def common(self) -> tuple[str, Table]:
        """Return the text columns that are the same in all rows, as words, and the table without them."""
        first = self.rows[0] if self.rows else ()
        same = [k for k, cell in enumerate(first) if isinstance(cell, str) and len({row[k] for row in self.rows}) == 1]
        words = ", ".join(f"{self.columns[k]} {first[k]}" for k in same)
        return words, self.of(k for k in range(len(self.columns)) if k not in same)

    def as_text(self, width: int | None = None) -> str:
        """Return the table in aligned columns, numbers to the right.

        A table wider than ``width`` comes in parts, one below the other; each begins with the first columns, which name
        the rows.
        """
        parts = (self.of(columns)._lines("  ", lambda width, _: "-" * width) for columns in self._parts(width))
        text = "\n\n".join("\n".join(line.rstrip() for line in lines) for lines in parts)
        return f"{self.caption}\n{text}\n" if self.caption else f"{text}\n"

    def as_markdown(self) -> str:
        """Return the table as GitHub shows it."""
        lines = self._lines(" | ", lambda width, right: "-" * (width - 1) + (":" if right else "-"), _escaped)
        return "".join(f"| {line} |\n" for line in lines)

    def are_text(self) -> list[bool]:
        """Return for each column whether it holds text, which is aligned to the left."""
        return [any(isinstance(row[k], str) for row in self.rows) for k in range(len(self.columns))]

    def _parts(self, width: int | None) -> list[list[int]]:
        """Return the columns of each part of a table of at most ``width``."""
        cells, n = self.as_strings(), len(self.columns)
        widths = [2 + max(2, *(len(row[k]) for row in [self.columns, *cells])) for k in range(n)]
        if width is None or sum(widths) - 2 <= width:
            return [list(range(n))]
        names = next((k for k, text in enumerate(self.are_text()) if not text), n)
        while names > 1 and 2 * sum(widths[:names]) > width:
            names -= 1
        first = list(range(names))
        parts = [first]
        for k in range(names, n):
            if len(parts[-1]) > names and sum(widths[i] for i in [*parts[-1], k]) - 2 > width:
                parts.append(first)
            parts[-1] = [*parts[-1], k]
        return parts

    def _lines(
        self, separator: str, rule: Callable[[int, bool], str], written: Callable[[str], str] = str
    ) -> list[str]:
        """Return the lines.

        ``rule`` gives what stands below a heading, by the column's width and its alignment; ``written`` gives the form
        of a heading or a cell in a line.
        """
        headings, *cells = [list(map(written, row)) for row in [self.columns, *self.as_strings()]]
        widths = [max(2, *(len(row[i]) for row in [headings, *cells])) for i in range(len(headings))]
        right = [not text for text in self.are_text()]

        def line(row: Sequence[str]) -> str:
            padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
            return separator.join(padded)

        return [line(headings), line(list(map(rule, widths, right))), *(line(row) for row in cells)]


def show(value: Cell, *, percent: bool = False) -> str:
    """Return the text of a table cell; a dash for None.

    >>> show(0.00123, percent=True), show(None), show("borg"), show(12345)
    ('0.12 %', '-', 'borg', '12,345')
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value if value.isprintable() else "".join(_shown(character) for character in value)
    if percent:
        return f"{100 * value:.2f} %"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 9_999.5 else f"{value:.4g}"  # four digits of more are 1e+04


def _escaped(text: str) -> str:
    """Return a text for a cell of Markdown, in which a bare ``|`` would begin the next cell."""
    return text.replace("|", r"\|")


def _shown(character: str) -> str:
    """Return a character of a name; a replacement for controls, line ends and marks of text direction."""
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") else character
