"""Layout: rooms are top-level folders under one package, and every source file states its purpose."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from reclaim.data import schema

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("data", "features", "training", "replay", "serving")
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
SOURCES += sorted(
    p
    for p in (ROOT / "src" / "reclaim").rglob("*.py")
    if not {*ROOMS} & {*p.relative_to(ROOT / "src" / "reclaim").parts}
)

BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TOPICS = {"What", "How", "Whether", "Where", "Who", "Whose", "Which", "Why", "When"}


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_of_the_package_is_the_top_level_folder(room: str) -> None:
    assert (ROOT / "src" / "reclaim" / room).resolve() == ROOT / room


@pytest.mark.parametrize("path", SOURCES + BENCHMARKS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_states_its_purpose_in_one_sentence(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = docstring.splitlines()[0] if docstring else ""
    assert first.endswith((".", "::")), f"{path.name}: {first!r}"
    assert first.split()[0] not in TOPICS, f"{path.name} names a topic, not a responsibility: {first!r}"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    begun = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value.value.split()[0]}"
        for path in SOURCES + BENCHMARKS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if node.value.value.split()[0] in TOPICS
    ]
    assert begun == []


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in SOURCES + BENCHMARKS}), ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_folder_holds_at_most_thirteen_modules_and_states_its_purpose(folder: Path) -> None:
    modules = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert len(modules) <= 13, f"{folder.name} holds {len(modules)} modules: {', '.join(modules)}"
    assert (folder / "__init__.py").exists(), f"{folder.name} says nowhere what it owns"


def test_tests_mirror_the_tree() -> None:
    folders = {
        path.parent.relative_to(ROOT / "tests") for room in ROOMS for path in (ROOT / "tests" / room).rglob("*.py")
    }
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder / "__init__.py").exists()] == []


FOLDERS = {path.parent.relative_to(ROOT) for path in SOURCES if path.parent.relative_to(ROOT).parts[0] in ROOMS}
NAMED = re.compile(r"``(?:reclaim\.)?([a-z_]+(?:\.\w+)+)(?:\(\))?``|(?<![\w/.])((?:\w+/)+\w+\.py)\b")
"""A dotted name in quotes, or the path of a module."""
SUFFIXES = (".html", ".json", ".csv", ".parquet")


def _texts(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _resolves(folder: Path, parts: list[str]) -> bool:
    """Return whether a folder has a module of that dotted name, or one that has what the name ends with."""
    first, *rest = parts
    if (module := folder / f"{first}.py").is_file():
        return not rest or re.search(rf"\b{rest[0]}\b", module.read_text()) is not None
    return (folder / first).is_dir() and (not rest or _resolves(folder / first, rest))


@pytest.mark.parametrize("path", SOURCES + BENCHMARKS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_that_a_docstring_or_a_comment_names_is_there(path: Path) -> None:
    """Names that begin with a room or one of its folders are of modules; others are of what is at hand."""
    missing = []
    for dotted, slashed in (found for text in _texts(path) for found in NAMED.findall(text)):
        first, *rest = dotted.split(".")
        if slashed:
            there = slashed.split("/")[0] not in ROOMS or (ROOT / slashed).is_file()
        elif not rest or dotted.endswith(SUFFIXES):
            there = True
        elif first in ROOMS:
            there = _resolves(ROOT, [first, *rest])
        else:
            homes = [folder.parent for folder in FOLDERS if folder.name == first]
            here = [path.parent, *(ROOT / home for home in homes)]  # a module may have the name of its folder
            there = not homes or any(_resolves(folder, [first, *rest]) for folder in here)
        missing += [] if there else [dotted or slashed]
    assert not missing


COLUMNS = {name for table in schema.TABLES.values() for name in table.names}
WORDS = {"name", "value", "deleted", "file", "line", "reason", "priority", "tier"}
"""Columns that are plain words: those may stand in quotes for something else."""
WIRE = (
    "serving/wire/schemas.py", "data/synthetic/", "data/schema.py",
    *(f"data/traces/{name}" for name in ("alibaba", "google_v3.py", "series.py")),
)  # fmt: skip
"""Files that spell another format's names: the wire's and the traces' own."""


def _is_feature(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "Feature"


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
