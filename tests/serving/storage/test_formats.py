"""A state keeps each format in a folder of its own, and one lock for all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reclaim.data.errors import StoreError
from reclaim.serving.storage import log_format, snapshot
from reclaim.serving.storage.formats import place_of, version_in
from reclaim.serving.storage.store import Store


def write(folder: Path, version: int, *, save: bool = False, lock_too: Path | None = None) -> None:
    store = Store.open(folder, state_version=version, lock_too=lock_too)
    store.append("number", str(version).encode())
    if save:
        store.save(store.roll(), {"number": np.array([version])}, {})
    store.close()


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a store but its lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if "-" in str(path.relative_to(folder))}


@pytest.mark.parametrize("save", [False, True])
def test_the_version_of_a_store_is_read_from_its_snapshot_or_its_log(tmp_path: Path, save: bool) -> None:
    assert version_in(tmp_path / "none") is None
    (tmp_path / "empty").mkdir()
    assert version_in(tmp_path / "empty") is None
    write(tmp_path / "cell", 7, save=save)
    assert version_in(tmp_path / "cell") == 7


def test_the_version_is_known_of_another_layout_of_files_and_past_damaged_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "cell", 7, save=True)
    for module in (snapshot, log_format):
        monkeypatch.setattr(module, "FORMAT", 2)
    assert version_in(tmp_path / "cell") == 7
    (manifest,) = (tmp_path / "cell").glob("snapshot-*/manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b"7", b"6"))
    assert version_in(tmp_path / "cell") == 7
    for segment in (tmp_path / "cell").glob("log-*"):
        segment.write_bytes(b"\0" * 64)
    assert version_in(tmp_path / "cell") is None


def test_a_changed_byte_in_the_header_of_a_segment_makes_no_other_version(tmp_path: Path) -> None:
    write(tmp_path / "cell", 7)
    (segment,) = (tmp_path / "cell").glob("log-*")
    whole = segment.read_bytes()
    for at in range(36):
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert version_in(tmp_path / "cell") is None


def test_a_format_that_is_not_there_begins_next_to_the_others_and_each_finds_its_own_again(tmp_path: Path) -> None:
    first = tmp_path / "cell"
    write(first, 8, save=True)
    before = contents(first)
    assert before
    for version in (9, 10):
        found = place_of(first, version)
        assert found.folder == tmp_path / f"format-{version}"
        assert not found.folder.exists()
        write(found.folder, version, lock_too=first)
    assert place_of(first, 10).others == {first: 8, tmp_path / "format-9": 9}
    assert place_of(first, 9).others == {first: 8, tmp_path / "format-10": 10}  # a release of before, and a newer one
    assert contents(first) == before


def test_two_formats_of_a_state_are_never_open_at_once(tmp_path: Path) -> None:
    first, newer = tmp_path / "cell", tmp_path / "format-9"
    store = Store.open(newer, state_version=9, lock_too=first)
    with pytest.raises(StoreError, match="is held by another process"):
        Store.open(first, state_version=8)  # as a release that knows no other folder
    with pytest.raises(StoreError, match="is held by another process"):
        Store.open(tmp_path / "format-10", state_version=10, lock_too=first)
    store.close()
    store = Store.open(first, state_version=8)
    with pytest.raises(StoreError, match="is held by another process"):
        Store.open(newer, state_version=9, lock_too=first)
    store.close()


def test_a_damaged_state_of_the_same_format_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    first = tmp_path / "cell"
    folder = place_of(first, 9).folder
    write(folder, 9)
    (segment,) = folder.glob("log-*")
    raw = bytearray(segment.read_bytes())
    raw[0] ^= 1
    segment.write_bytes(bytes(raw))
    found = place_of(first, 9)
    assert (found.folder, found.others) == (folder, {})
    with pytest.raises(StoreError, match="its header is damaged"):
        Store.open(found.folder, state_version=9)
