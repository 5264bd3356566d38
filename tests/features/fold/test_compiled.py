"""Compiled code is never older than its source: the records' types name all the files that are compiled into a fold."""

from __future__ import annotations

import ast
from pathlib import Path

from reclaim.features.fold.related_record import MEMBER
from reclaim.features.fold.task_record import CODE, COMPILED_FILES, STATE

ROOT = Path(__file__).resolve().parents[3]


def imported_by(name: str) -> set[str]:
    """Return the files of ours that a file imports from."""
    tree = ast.parse((ROOT / name).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    modules = {node.module for node in imports} | {f"{node.module}.{a.name}" for node in imports for a in node.names}
    files = {f"{module.removeprefix('reclaim.').replace('.', '/')}.py" for module in modules if module}
    return {file for file in files if (ROOT / file).is_file()}


def test_every_file_that_the_compiled_ones_rest_on_is_among_them() -> None:
    for name in COMPILED_FILES:
        assert imported_by(name) <= set(COMPILED_FILES), name


def test_both_folds_take_a_record_that_names_the_code() -> None:
    assert CODE[0] in (STATE.names or ())
    assert CODE[0] in (MEMBER.names or ())
