"""Formats rows under named columns as aligned text, as Markdown or as records for a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    percent: frozenset[str] = frozenset()

    def as_records(self) -> list[dict[str, Cell]]:
        """Return one dict per row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def as_strings(self) -> list[list[str]]:
        """Return the cells as they are printed."""
        return [
            [show(value, percent=column in self.percent) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def as_text(self) -> str:
        """Return the table in aligned columns, numbers to the right."""
        return "\n".join(self._lines("  ", lambda widths: ["  ".join("-" * w for w in widths)])) + "\n"

    def as_markdown(self) -> str:
        """Return the table as GitHub shows it."""
        right = [not self.is_text(i) for i in range(len(self.columns))]

        def rule(widths: Sequence[int]) -> list[str]:
            return [
                "| "
                + " | ".join("-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True))
                + " |"
            ]

        return "\n".join(f"| {line} |" if i != 1 else line for i, line in enumerate(self._lines(" | ", rule))) + "\n"

    def is_text(self, column: int) -> bool:
        """Return whether a column holds text, which is aligned to the left."""
        return any(isinstance(row[column], str) for row in self.rows)

    def _lines(self, separator: str, rule: Callable[[Sequence[int]], list[str]]) -> list[str]:
        cells = self.as_strings()
        widths = [max(2, *(len(row[i]) for row in [list(self.columns), *cells])) for i in range(len(self.columns))]
        right = [not self.is_text(i) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
            return separator.join(padded)

        return [line(self.columns), *rule(widths), *(line(row) for row in cells)]


def show(value: Cell, *, percent: bool = False) -> str:
    """Return the text of a table cell; a dash for None.

    >>> show(0.00123, percent=True), show(None), show("borg")
    ('0.12 %', '-', 'borg')
    """
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if percent:
        return f"{100 * value:.2f} %"
    return str(value) if isinstance(value, int) else f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
