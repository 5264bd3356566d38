"""Files that a reader finds whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from reclaim.data.core import files
from reclaim.data.core.files import (
    copy_files,
    discard_folder,
    partial_of,
    remove_left_behind,
    replaced_file,
    replaced_folder,
    take_lock,
    write_json,
    write_text,
)
from reclaim.data.errors import ConfigError, StoreError


def test_a_reader_finds_the_old_file_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_text(path, "old")
    with replaced_file(path) as partial:
        partial.write_text("half")
        assert path.read_text() == "old"
        partial.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_raises_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_text(path, "old")
    with suppress(KeyboardInterrupt), replaced_file(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"share": float("nan")})
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device"), "whole"),
        (OSError(errno.ENOSPC, "No space left on device", "source", None, "copy"), "whole"),
        (OSError(errno.ENOSPC, "No space left on device, while reading a.csv"), "whole, while reading a.csv"),
        (OSError(errno.ENOSPC, "No space left on device", "a part of it"), "a part of it"),
        (OSError(errno.EIO, "Input/output error"), None),
    ],
    ids=["arrow", "copy", "reading", "named", "other"],
)
@pytest.mark.parametrize("replaced", [replaced_file, replaced_folder])
def test_the_error_of_a_full_disk_names_what_was_being_written(
    raised: OSError, words: str | None, replaced: Callable[[Path], Any], tmp_path: Path
) -> None:
    with pytest.raises(OSError, match=r"No space|Input") as found, replaced(tmp_path / "whole"):
        raise raised
    name, _, rest = (words or "").partition(",")
    expected = str(tmp_path / name) if name == "whole" else name or None
    assert found.value.filename == expected
    assert found.value.strerror == os.strerror(raised.errno or 0) + ("," + rest if rest else "")
    assert list(tmp_path.iterdir()) == []


def test_files_are_copied_with_their_folders_and_the_first_that_fails_is_the_error(tmp_path: Path) -> None:
    (tmp_path / "of" / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "of" / "a").write_text("first")
    (tmp_path / "of" / "inner" / "deep" / "b").write_text("second")
    (tmp_path / "copy" / "inner").mkdir(parents=True)
    copy_files(tmp_path / "of", tmp_path / "copy")
    assert (tmp_path / "copy" / "a").read_text() == "first"
    assert (tmp_path / "copy" / "inner" / "deep" / "b").read_text() == "second"
    (tmp_path / "copy" / "a").unlink()
    (tmp_path / "copy" / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        copy_files(tmp_path / "of", tmp_path / "copy")


def test_a_second_writer_of_a_file_is_told_to_wait_and_the_first_ends_as_if_alone(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    with replaced_file(path) as partial:
        partial.write_text("mine")
        with pytest.raises(ConfigError, match=r"file\.json: another run is writing it; wait for it"):
            write_text(path, "another's")
    assert path.read_text() == "mine"
    write_text(path, "another's")
    assert path.read_text() == "another's"
    assert list(tmp_path.iterdir()) == [path]


def _write_often(path: Path, letter: str) -> int:
    """Write a file of one letter many times, another run's turns left out; return how often it was written."""
    written = 0
    for _ in range(200):
        with suppress(ConfigError):
            write_text(path, letter * 5_000)
            written += 1
        assert len(set(path.read_text())) == 1
    return written


def test_of_two_processes_that_write_a_file_at_once_neither_fails_or_mixes_into_the_other(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "0" * 5_000)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        first, second = pool.map(_write_often, [path, path], "ab")
    assert min(first, second) > 0
    assert path.read_text() in ("a" * 5_000, "b" * 5_000)
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_killed_before_the_rename_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    write_text(path, "old")

    def killed(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(os, "replace", killed)
        dying.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            write_text(path, "new")
    assert path.read_text() == "old"
    with replaced_file(path) as partial:
        assert partial.read_text() == ""
        partial.write_text("newer")
    assert path.read_text() == "newer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_another_process_deletes_meanwhile_is_discarded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def twice(folder: Path, **how: Any) -> None:
        rmtree(folder)
        rmtree(folder, **how)

    (tmp_path / "made").mkdir()
    monkeypatch.setattr(shutil, "rmtree", twice)
    discard_folder(tmp_path / "made", tmp_path / "retired")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("absolute", [False, True])
def test_the_working_folder_is_not_replaced_under_the_process_and_is_named(
    absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    working = tmp_path if absolute else Path()
    refused = pytest.raises(ConfigError, match=f"{tmp_path}: the working folder cannot be replaced; name a folder in")
    with refused, replaced_folder(working):
        pass
    left = tmp_path.with_name(tmp_path.name + ".old.partial")
    left.mkdir()
    remove_left_behind(working)
    assert not left.exists()
    with replaced_folder(Path("one")) as fresh:
        (fresh / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_lock_is_of_the_file_that_has_the_name_even_where_that_changes_before_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, calls = tmp_path / "a", files.lock, list[int]()

    def lock(file: IO[Any] | int, busy: Exception | None) -> None:
        if not calls:  # its holder has just ended, and another process begins
            partial_of(path).rename(path)
            partial_of(path).touch()
        calls.append(1)
        real(file, busy)

    monkeypatch.setattr(files, "lock", lock)
    with replaced_file(path), pytest.raises(ConfigError, match="another run is writing it"), replaced_file(path):
        pass


def test_a_folder_whose_holder_deletes_it_just_now_is_made_again_and_a_link_to_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "folder" / "a"
    mkdir, staging = Path.mkdir, partial_of(path)

    def there_a_moment_ago(folder: Path, *mode: Any, **how: Any) -> None:
        if folder == staging:
            monkeypatch.setattr(Path, "mkdir", mkdir)
            raise FileExistsError
        mkdir(folder, *mode, **how)

    monkeypatch.setattr(Path, "mkdir", there_a_moment_ago)
    with replaced_folder(path):
        pass
    assert list(path.parent.iterdir()) == [path]
    staging.symlink_to("nothing")
    with pytest.raises(FileNotFoundError), replaced_folder(path):
        pass


def test_a_lock_that_cannot_be_made_is_an_error_and_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "nothing" / "lock")
    with pytest.raises(FileNotFoundError), files.locked(tmp_path / "lock", None):
        pass
    mkdir, refused = Path.mkdir, tmp_path / "refused"

    def of_another_kind(folder: Path, *mode: Any, **how: Any) -> None:
        if folder == refused:
            raise FileNotFoundError  # as /proc and automounters say
        mkdir(folder, *mode, **how)

    monkeypatch.setattr(Path, "mkdir", of_another_kind)
    with pytest.raises(FileNotFoundError), files.locked(refused / "lock", None):
        pass


def test_a_lock_without_an_error_for_a_busy_one_waits(tmp_path: Path) -> None:
    held = threading.Event()

    def wait() -> None:
        with files.locked(tmp_path / "lock", None):
            held.set()

    other = threading.Thread(target=wait)
    with files.locked(tmp_path / "lock", ConfigError("busy")):
        other.start()
        assert not held.wait(0.05)
    other.join(10)
    assert held.is_set()


def test_what_a_failed_run_left_to_the_next_one_stays_unless_it_is_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "work"

    def fail(*names: str) -> NoReturn:
        for name in names:
            (folder / name).touch()
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"), files.working_folder(folder, ConfigError("busy")):
        fail()
    assert not folder.exists()
    with pytest.raises(ValueError, match="failed"), files.working_folder(folder, ConfigError("busy")):
        fail("part")
    with files.working_folder(folder, ConfigError("busy")):
        assert (folder / "part").exists()
    assert not folder.exists()


def test_a_link_in_the_place_of_a_folder_that_waits_to_be_deleted_is_removed_and_its_target_stays(
    tmp_path: Path,
) -> None:
    path, target = tmp_path / "a", tmp_path / "target"
    for folder in (path, target):
        folder.mkdir()
    (target / "kept").touch()
    files.retired_of(path).symlink_to(target)
    files.recover_folder(path)
    assert not files.retired_of(path).is_symlink()
    assert (target / "kept").exists()


@pytest.mark.parametrize("left", [f"{os.getpid()}12345\n".encode(), b"\xce\xff"], ids=["longer", "damaged"])
def test_what_an_earlier_holder_left_in_the_lock_is_no_part_of_the_next_ones_name(tmp_path: Path, left: bytes) -> None:
    (tmp_path / files._LOCK).write_bytes(left)
    held = take_lock(tmp_path)
    with pytest.raises(StoreError, match=rf"is held by another process \(pid {os.getpid()}\)"):
        take_lock(tmp_path)
    os.close(held)
