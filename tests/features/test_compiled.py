"""Compiled code is never older than its source: numba looks at a function's own file alone."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from reclaim.data import windows
from reclaim.features import compiled, kin, kinship, reading, record, registry, state, taking


@pytest.mark.parametrize(
    ("driver", "parts"),
    [(state, (taking, reading, record, registry, windows, kinship, compiled)), (kin, (kinship, registry, compiled))],
    ids=["state", "kin"],
)
def test_a_file_that_compiles_others_changes_when_they_do(driver: object, parts: tuple[object, ...]) -> None:
    digest = sha256(b"".join(Path(str(part.__file__)).read_bytes() for part in parts)).hexdigest()[:12]  # type: ignore[attr-defined]  # modules
    path = Path(str(driver.__file__))  # type: ignore[attr-defined]  # a module
    assert digest == driver.COMPILED_WITH, f'{path.parent.name}/{path.name}: write COMPILED_WITH: Final = "{digest}"'  # type: ignore[attr-defined]  # a module
