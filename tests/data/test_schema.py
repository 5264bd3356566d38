"""Columns of a dataset: each is read by some part of the project, or said not to be."""

from __future__ import annotations

import re
from pathlib import Path

from reclaim.data import schema

ROOT = Path(__file__).parents[2]
READERS = (
    "features",
    "training",
    "replay",
    "serving",
    "data/survey",
    "data/dataset.py",
    "data/windows.py",
    "data/oom.py",
)
"""All that reads datasets."""
WRITES_NAMES = ROOT / "serving" / "feed"
"""It reads no dataset, and has the names of a live cluster in its answers."""


def test_a_column_is_read_or_its_reason_is_stated() -> None:
    files = [
        file
        for place in READERS
        for file in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
        if WRITES_NAMES not in file.parents
    ]
    text = "\n".join(file.read_text() for file in files)
    words = set(re.findall(r"\b[A-Z][A-Z_0-9]+\b", text)) | set(re.findall(r"\"(\w+)\"", text))
    columns = {column for table in schema.TABLES.values() for column in table.names} | set(schema.EXTRAS)
    named = {value: name for name, value in vars(schema).items() if name.isupper() and isinstance(value, str)}
    unread = {column for column in columns if not words & {column, named[column]}}
    assert unread == set(schema.UNREAD)


def test_codes_of_events_are_what_a_kind_names_and_nothing_that_python_adds_to_a_class() -> None:
    later = type("MachineEventType", (schema.MachineEventType,), {"GONE": 9, "ENDS": (9,), "__firstlineno__": 165})
    assert schema.codes_of(later) == {"GONE": 9}
    assert schema.codes_of(schema.MachineEventType) == {
        "ADD": 1, "REMOVE": 2, "UPDATE": 3, "SOFT_ERROR": 4, "HARD_ERROR": 5,
    }  # fmt: skip
