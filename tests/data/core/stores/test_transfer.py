"""Folders on their way to a store and back: what is in a folder of another name is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from upath import UPath

from reclaim.data.core.stores.transfer import fetch_folder, publish_folder
from tests.object_store import Bucket


@pytest.mark.parametrize("name", ["run[12]", "run?", "run*"])
def test_a_folder_that_is_replaced_leaves_those_alone_that_its_name_would_match_as_a_pattern(
    name: str, bucket: Bucket, tmp_path: Path
) -> None:
    def place(folder: str) -> Path:
        return cast(Path, UPath(f"{bucket.url}/{folder}"))

    (tmp_path / "made").mkdir()
    for file in ("manifest.json", "rows"):
        (tmp_path / "made" / file).write_text(file)
    for folder in ("run1", "run2", name, name):
        publish_folder(tmp_path / "made", place(folder), "manifest.json")
    there = {f"{of}/{file}" for of in ("run1", "run2", name) for file in ("manifest.json", "rows")}
    assert set(bucket.contents()) == there
    fetch_folder(place(name), tmp_path / "got", "manifest.json")
    assert sorted(path.name for path in (tmp_path / "got").iterdir()) == ["manifest.json", "rows"]
