"""The house: rooms are top-level folders under one package, and every source file says what it is for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from reclaim.data import schema

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("data", "features", "training", "replay", "serving")
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
SOURCES += sorted((ROOT / "src" / "reclaim").glob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_of_the_package_is_the_top_level_folder(room: str) -> None:
    assert (ROOT / "src" / "reclaim" / room).resolve() == ROOT / room


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_says_in_one_sentence_what_it_is_for(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = docstring.splitlines()[0] if docstring else ""
    assert first.endswith((".", "::")), f"{path.name}: {first!r}"
    assert len(path.read_text().splitlines()) <= 400, f"{path.name} holds more than one idea"


COLUMNS = {name for table in schema.TABLES.values() for name in table.names}
WORDS = {"name", "value", "deleted", "file", "line", "reason", "priority", "tier"}
"""Columns that are plain words: those may stand in quotes for something else."""
WIRE = ("serving/schemas.py", "data/synthetic", "data/alibaba", "data/google_v3.py", "data/series.py", "data/schema.py")
"""Files that spell another format's names: the wire's and the traces' own."""


def _is_feature(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in ("Feature", "Channel")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_column_name_is_spelled_in_the_schema_alone(path: Path) -> None:
    if str(path.relative_to(ROOT)).startswith(WIRE):
        pytest.skip("spells the names of another format")
    tree = ast.parse(path.read_text())
    own = [t.elts[0] for t in ast.walk(tree) if isinstance(t, ast.Tuple) and t.elts]  # fields of a record of ours
    own += [key for d in ast.walk(tree) if isinstance(d, ast.Dict) for key in d.keys if key is not None]
    own += [c.args[0] for c in ast.walk(tree) if isinstance(c, ast.Call) and c.args and _is_feature(c)]
    spelled = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value in COLUMNS - WORDS
        and node not in own
    }
    assert not spelled, f"{path.name} spells {', '.join(sorted(spelled))}"


def test_every_column_has_a_unit_and_a_meaning() -> None:
    for table in schema.TABLES.values():
        for field in table:
            assert field.metadata[b"unit"], field.name
            assert field.metadata[b"meaning"], field.name
