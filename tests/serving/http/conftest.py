"""Fixtures of tests of the guard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.http.guarded import TOKEN


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    return file
