"""A snapshot is read back to the bit, or called damaged."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from reclaim.data.errors import StoreError
from reclaim.serving.storage import snapshot
from reclaim.serving.storage.snapshot import (
    DamagedError,
    Manifest,
    load_arrays,
    read_manifest,
    recover_replaced,
    snapshot_name,
    snapshots,
    write_snapshot,
)

TASK = np.dtype([("name", "i4"), ("usage", "f8", 2), ("tier", "u1")], align=True)
ARRAYS: dict[str, NDArray[Any]] = {
    "tracker/x": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
    "tasks": np.array([(1, (0.5, np.nan), 2), (3, (-0.0, np.inf), 4)], TASK),
    "..": np.array(7),
    "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "every other": np.arange(10)[::2],
    "none": np.empty((0, 3), np.float32),
    "words": np.array(["a", "ünï"]),
}
SAID = Manifest(3, 12, followed=True, arrays={}, facts={"clock_us": 2**62, "names": {"ü": [None, 0.1]}})


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_arrays_of_every_kind_come_back_to_the_bit(tmp_path: Path) -> None:
    write_snapshot(tmp_path, SAID, ARRAYS)
    folder = tmp_path / snapshot_name(12)
    manifest = read_manifest(folder)
    assert (manifest.state_version, manifest.sequence, manifest.followed, manifest.facts) == (3, 12, True, SAID.facts)
    back = load_arrays(folder, manifest)
    assert list(back) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        assert back[name].tobytes() == array.tobytes()
    assert manifest.bytes == sum(path.stat().st_size for path in folder.glob("*.npy"))
    assert snapshots(tmp_path) == [folder]
    assert {path.parent for path in tmp_path.rglob("*.npy")} == {folder}, "no name leads out of the folder"


def test_an_array_is_read_once_into_the_memory_that_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_snapshot(tmp_path, SAID, {"x": np.arange(3_000_000)})
    folder = tmp_path / snapshot_name(12)
    read: list[int] = []
    checksum = crc32

    def counted(data: Any, before: int = 0) -> int:
        read.append(len(data))
        return int(checksum(data, before))

    monkeypatch.setattr("reclaim.serving.storage.snapshot.crc32", counted)
    manifest = read_manifest(folder)
    read.clear()
    array = load_arrays(folder, manifest)["x"]
    assert sum(read) == (folder / "x.npy").stat().st_size
    assert max(read) <= 4 * 2**20
    assert array.flags.writeable
    assert array.flags.aligned
    with (folder / "x.npy").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DamagedError, match="wrong length"):
        load_arrays(folder, manifest)


def test_numpy_alone_reads_an_array(tmp_path: Path) -> None:
    write_snapshot(tmp_path, SAID, {"x": ARRAYS["tracker/x"]})
    np.testing.assert_array_equal(np.load(tmp_path / snapshot_name(12) / "x.npy"), ARRAYS["tracker/x"])


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_every_changed_byte_is_noticed(tmp_path: Path, flip: int) -> None:
    write_snapshot(tmp_path, SAID, {"x": np.arange(4)})
    folder = tmp_path / snapshot_name(12)
    for path in folder.iterdir():
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            with pytest.raises(DamagedError, match=path.name):
                load_arrays(folder, read_manifest(folder))
        path.write_bytes(whole)
    load_arrays(folder, read_manifest(folder))


@pytest.mark.parametrize("name", ["manifest.json", "x.npy"])
def test_a_file_that_is_missing_or_cut_is_noticed(tmp_path: Path, name: str) -> None:
    write_snapshot(tmp_path, SAID, {"x": np.arange(4)})
    folder = tmp_path / snapshot_name(12)
    whole = (folder / name).read_bytes()
    for cut in (0, 1, len(whole) - 1):
        (folder / name).write_bytes(whole[:cut])
        with pytest.raises(DamagedError, match=name):
            load_arrays(folder, read_manifest(folder))
    (folder / name).unlink()
    with pytest.raises(DamagedError, match=f"{name}: No such file"):
        load_arrays(folder, read_manifest(folder))


def test_another_format_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_snapshot(tmp_path, SAID, {})
    monkeypatch.setattr(snapshot, "FORMAT", 2)
    with pytest.raises(StoreError, match="has format 1, this code knows 2"):
        read_manifest(tmp_path / snapshot_name(12))


def test_python_objects_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="'x' holds Python objects"):
        write_snapshot(tmp_path, SAID, {"y": np.arange(3), "x": np.array([{}])})
    assert not list(tmp_path.iterdir())


def test_a_snapshot_that_does_not_read_back_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = snapshot.check_arrays

    def rot(folder: Path, manifest: Manifest) -> None:
        path = folder / "x.npy"
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        check(folder, manifest)

    monkeypatch.setattr(snapshot, "check_arrays", rot)
    with pytest.raises(StoreError, match=r"cannot write the snapshot: .*x\.npy has a wrong length or checksum"):
        write_snapshot(tmp_path, SAID, {"x": np.arange(3)})
    assert not list(tmp_path.iterdir())


def test_a_replaced_snapshot_comes_back_when_its_replacement_was_never_finished(tmp_path: Path) -> None:
    for value in (1, 2):
        write_snapshot(tmp_path, SAID, {"x": np.array(value)})
    folder = tmp_path / snapshot_name(12)
    assert load_arrays(folder, read_manifest(folder))["x"] == 2
    assert list(tmp_path.iterdir()) == [folder]
    folder.rename(folder.with_name(folder.name + ".old.partial"))
    (tmp_path / f"{folder.name}.partial").mkdir()
    recover_replaced(tmp_path)
    assert list(tmp_path.iterdir()) == [folder]


def test_the_name_is_durable_before_anything_older_can_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    target = tmp_path / snapshot_name(12)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.readlink(f"/proc/self/fd/{fd}"), target.exists())))
    write_snapshot(tmp_path, SAID, {"x": np.arange(3)})
    partial = f"{target}.partial"
    assert synced == [
        (f"{partial}/x.npy", False), (f"{partial}/manifest.json", False), (partial, False), (str(tmp_path), True)
    ]  # fmt: skip


def test_a_snapshot_is_read_back_from_the_disk_and_not_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []

    def name(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    def advise(fd: int, *range_and_advice: int) -> None:
        assert range_and_advice == (0, 0, os.POSIX_FADV_DONTNEED)
        calls.append(("dropped", name(fd)))

    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("synced", name(fd))))
    monkeypatch.setattr(os, "posix_fadvise", advise)
    write_snapshot(tmp_path, SAID, {"x": np.arange(3)})
    for file in ("x.npy", "manifest.json"):
        assert [what for what, which in calls if which == file] == ["synced", "dropped"], "a dirty page is not dropped"


def test_what_could_not_be_removed_of_a_failed_snapshot_does_not_hold_up_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / f"{snapshot_name(12)}.partial"
    left.mkdir()
    (left / "x.npy").write_bytes(b"cut")
    (left / "old.npy").write_bytes(b"of an array that is no longer there")
    write_snapshot(tmp_path, SAID, {"x": np.arange(3)})
    folder = tmp_path / snapshot_name(12)
    assert {path.name for path in folder.iterdir()} == {"x.npy", "manifest.json"}
    assert load_arrays(folder, read_manifest(folder))["x"].tolist() == [0, 1, 2]


def test_a_large_array_is_written_without_a_copy(tmp_path: Path) -> None:
    array = np.zeros((2, 16 * 2**20), np.float32).T  # 128 MiB, columns first
    tracemalloc.start()
    write_snapshot(tmp_path, SAID, {"x": array})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20
