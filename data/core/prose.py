"""Formats numbers for people: amounts, durations, shares and intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from reclaim.data.core.tables import Cell

_KINDS: Final = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
}


def kind_in_words(kind: type) -> str:
    """Return what a value of a TOML file of a Python type is called there."""
    return _KINDS.get(kind, kind.__name__)


def number(value: float | None) -> str:
    """Return a number as text for a sentence; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def counted(n: float, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{n:g} {noun}{'s' * (n != 1)}"


def duration(hours: float) -> str:
    """Return a duration given in hours, as text in a suitable unit."""
    size, unit = next((u for u in ((24.0, "days"), (1.0, "h"), (1 / 60, "min")) if hours >= 2 * u[0]), (1 / 3600, "s"))
    return f"{number(hours / size)} {unit}"


def amount(value: float) -> Cell:
    """Return an amount for a table: to four digits, or whole where that is more."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")


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
