"""Acknowledged records survive crashes, a full disk and a kill."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data.errors import StoreError
from reclaim.serving.storage.log_format import segment_name
from reclaim.serving.storage.snapshot import snapshot_name
from reclaim.serving.storage.store import Store
from tests.serving.storage.written_numbers import Numbers, after, names, upto, written


def test_a_new_store_is_empty_and_gives_back_what_it_took(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "new" / "folder", state_version=1)
    assert (store.recovered.arrays, store.recovered.facts, store.recovered.notes) == (None, {}, [])
    assert (list(store.records()), store.log_bytes, store.snapshot_bytes, store.broken) == ([], 0, 0, None)
    assert [store.append("usage", b"one"), store.append("tasks", b"two")] == [1, 2]
    store.sync()
    store.close()
    again = Store.open(tmp_path / "new" / "folder", state_version=1)
    assert [(r.sequence, r.kind, bytes(r.payload)) for r in again.records()] == [
        (1, "usage", b"one"),
        (2, "tasks", b"two"),
    ]
    assert again.append("usage", b"three") == 3
    again.close()


def test_every_folder_that_is_made_for_a_store_outlives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(Path(os.readlink(f"/proc/self/fd/{fd}"))))
    folder = tmp_path.resolve() / "new" / "folder"
    Store.open(folder, state_version=1).close()
    assert {folder, *folder.parents[:2]} <= synced, "the name of each is in the one above it"
    synced.clear()
    again = Store.open(folder, state_version=1)
    assert folder in synced, "the process that named the log may have been killed before it was durable"
    assert again.recovered.empty
    again.close()


def test_two_snapshots_and_the_log_since_the_older_one_are_kept(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(3)
    numbers.save()
    assert names(tmp_path) == {snapshot_name(3), segment_name(1), segment_name(4)}, "before the first is nothing at all"
    for _ in range(3):
        numbers.write(2)
        numbers.save()
    assert names(tmp_path) == {snapshot_name(7), snapshot_name(9), segment_name(8), segment_name(10)}
    numbers.store.close()
    assert after(tmp_path) == (upto(9), [])


def test_sizes_are_those_since_the_last_snapshot(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(3)
    mark = numbers.store.roll()
    before = numbers.store.log_bytes
    numbers.write(1)
    numbers.store.save(mark, {"taken": np.arange(1, 4)}, {})
    assert numbers.store.log_bytes * 3 == before == 3 * (28 + len("number") + 1 + 4)
    assert numbers.store.snapshot_bytes == 128 + 3 * 8
    numbers.store.close()
    assert after(tmp_path) == (upto(4), [])


def test_a_second_snapshot_at_the_same_record_takes_the_place_of_the_first(tmp_path: Path) -> None:
    written(tmp_path, 2, 3, 0)
    numbers = Numbers(tmp_path)
    numbers.store.save(numbers.store.roll(), {"taken": np.arange(1, 6)}, {"second": True})
    numbers.store.close()
    store = Store.open(tmp_path, state_version=1)
    assert (store.recovered.facts, list(store.records())) == ({"second": True}, [])
    store.close()
    assert names(tmp_path) == {snapshot_name(2), snapshot_name(5), segment_name(3), segment_name(6)}


def test_sizes_go_on_after_a_restart(tmp_path: Path) -> None:
    written(tmp_path, 3, 2)
    numbers = Numbers(tmp_path)
    assert numbers.store.log_bytes >= 2 * (28 + len("number") + 1 + 4), "restarts do not let the log grow"
    assert numbers.store.snapshot_bytes == 128 + 3 * 8
    numbers.store.close()


def test_a_snapshot_after_a_restart_drops_those_before_the_previous_one(tmp_path: Path) -> None:
    written(tmp_path, 2, 3, 4)
    numbers = Numbers(tmp_path)
    numbers.save()
    numbers.store.close()
    assert names(tmp_path) == {snapshot_name(5), snapshot_name(9), segment_name(6), segment_name(10)}


def test_a_file_that_a_user_left_between_those_of_the_store_is_passed_over(tmp_path: Path) -> None:
    written(tmp_path, 2, 3)
    others = {
        "log-old.bin",
        f"{segment_name(3)[:-4]} (copy).bin",
        "log-4.bin",
        "snapshot-old",
        f"{snapshot_name(2)}-copy",
    }
    for name in others:
        (tmp_path / name).write_bytes(b"x")
    numbers = Numbers(tmp_path)
    numbers.save()
    numbers.store.close()
    assert numbers.taken == upto(5)
    assert numbers.store.recovered.notes == []
    assert others <= names(tmp_path)


def test_only_the_user_of_the_service_may_read_its_state(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path, 2, 3, 4)
        (tmp_path / snapshot_name(5) / "taken.npy").unlink()
        after(tmp_path)  # what is put aside is state, too
    finally:
        os.umask(before)
    kept = [path for path in tmp_path.iterdir() if path.name.startswith(("log-", "snapshot-", "damaged-"))]
    assert len(kept) == 4
    assert [path.name for path in kept if path.stat().st_mode & 0o077] == []


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_file_stays_open_of_a_segment_that_was_replaced_or_could_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    closed = open_files()
    numbers = Numbers(tmp_path)
    before = open_files()
    for _ in range(3):
        numbers.write()
        numbers.save()
        numbers.write()
        numbers.store.roll()
    assert open_files() == before
    numbers.write()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        marks = [numbers.store.roll() for _ in range(3)]
    assert open_files() == before
    assert not list(tmp_path.glob("*.partial"))
    numbers.store.save(marks[-1], {"taken": np.array(numbers.taken)}, {})
    numbers.store.close()
    assert open_files() == closed
    log = max(tmp_path.glob("log-*.bin"))
    os.truncate(log, log.stat().st_size - 1)  # the log ends before the snapshot does
    assert after(tmp_path)[0] == numbers.taken
    assert open_files() == closed


def test_no_file_stays_open_of_the_segments_that_a_start_reads(tmp_path: Path) -> None:
    closed, numbers = open_files(), Numbers(tmp_path)
    for _ in range(3):
        numbers.write(2)
        numbers.store.roll()
    numbers.write()
    numbers.store.close()
    assert after(tmp_path) == (upto(7), [])
    assert open_files() == closed


def test_leftovers_are_removed(tmp_path: Path) -> None:
    written(tmp_path, 3)
    (tmp_path / f"{snapshot_name(2)}.partial").mkdir()
    (tmp_path / f"{segment_name(9)}.partial").write_bytes(b"x")
    assert after(tmp_path) == (upto(3), [])
    assert names(tmp_path) == {segment_name(1)}


# Crashes


class Disk:
    """Content of a folder after a power cut: each file and folder as it was last synced."""

    def __init__(self, patch: pytest.MonkeyPatch, each_step: Callable[[], None]) -> None:
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._held: list[int] = []  # an inode that is held is not used again
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._sync)
        for where, name in ((os, "replace"), (os, "ftruncate"), (os, "writev"), (os, "open"), (shutil, "rmtree")):
            patch.setattr(where, name, self._watched(getattr(where, name), each_step))
        for name in ("unlink", "mkdir", "rename"):
            patch.setattr(Path, name, self._watched(getattr(Path, name), each_step))

    def _watched(self, call: Callable[..., Any], each_step: Callable[[], None]) -> Callable[..., Any]:
        def stepped(*values: Any, **options: Any) -> Any:
            result = call(*values, **options)
            each_step()
            return result

        return stepped

    def _sync(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        self._held.append(os.dup(fd))
        inode = os.fstat(fd).st_ino
        if path.is_dir():
            self._folders[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._files[inode] = path.read_bytes()

    def build(self, inode: int, target: Path) -> None:
        """Write the content after a power cut."""
        os.makedirs(target, exist_ok=True)
        for name, inner in self._folders.get(inode, {}).items():
            if inner in self._folders:
                self.build(inner, target / name)
            else:
                with (target / name).open("wb") as file:
                    file.write(self._files.get(inner, b""))

    def close(self) -> None:
        """Release the inodes."""
        for fd in self._held:
            os.close(fd)


def steps_of_a_life(folder: Path, acknowledge: Callable[[int], None]) -> None:
    """Write and save in every order, twice at one record, over unsynced records, with reopenings in between."""
    numbers = Numbers(folder)
    for step in "www s w s s ww o w s uru w s u s w n w o s w":
        if step == "w":
            numbers.write()
            acknowledge(numbers.taken[-1])
        elif step == "u":  # written, and not yet synced when the next step comes
            numbers.taken.append(len(numbers.taken) + 1)
            numbers.store.append("number", str(numbers.taken[-1]).encode())
        elif step == "s":
            numbers.save()
        elif step == "r":
            numbers.store.roll()
        elif step == "o":
            numbers.store.close()
            numbers = Numbers(folder)
        elif step == "n":  # what another run left with the system alone is durable once it was read
            numbers.store.close()
            numbers = Numbers(folder, sync=False)
            numbers.write(2)
            numbers.store.close()
            numbers = Numbers(folder)
            acknowledge(numbers.taken[-1])
    numbers.store.close()


def test_all_that_was_acknowledged_is_there_after_a_crash_or_a_power_cut_between_any_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, acknowledged, busy = tmp_path / "folder", 0, False
    folder.mkdir()
    moments: list[tuple[Path, int]] = []

    def keep() -> None:
        nonlocal busy
        if not busy:
            busy = True  # what follows takes steps of its own
            killed, cut = (tmp_path / f"{how}-{len(moments)}" for how in ("killed", "cut"))
            shutil.copytree(folder, killed)
            disk.build(folder.stat().st_ino, cut)
            moments.extend([(killed, acknowledged), (cut, acknowledged)])
            busy = False

    def acknowledge(number: int) -> None:
        nonlocal acknowledged
        acknowledged = number
        keep()

    with monkeypatch.context() as patch:
        disk = Disk(patch, keep)
        steps_of_a_life(folder, acknowledge)
        disk.close()
    assert acknowledged == 16
    assert len(moments) > 200
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for moment, least in moments:
        taken, notes = after(moment)
        assert not any("header" in note for note in notes), "no segment is seen before it is whole"
        assert taken == upto(len(taken)), moment
        assert least <= len(taken) <= least + 3, moment
        assert after(moment)[0] == taken


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", ["fsync", "fdatasync", "replace", "writev", "posix_fadvise"])
def test_no_failing_step_loses_acknowledged_records_or_stops_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    call = getattr(os, name)
    for failing in range(40):
        folder, left = tmp_path / f"{failing}", failing
        numbers = Numbers(folder)
        numbers.write(2)
        numbers.save()
        numbers.write(1)

        def fail(*values: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise OSError(number, os.strerror(number))
            return call(*values)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            for act in (numbers.save, numbers.write, numbers.save, numbers.write):
                with contextlib.suppress(StoreError):
                    act()
        if left >= 0:
            break
        if not numbers.store.mend():
            numbers.save()
        assert numbers.store.broken is None
        numbers.write(2)
        numbers.store.close()
        assert after(folder) == (numbers.taken, [])
    else:
        pytest.fail("there is no end to the steps")


# A disk that refuses


def test_after_a_failed_sync_nothing_is_appended_until_a_snapshot_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(3)

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    numbers.store.append("number", b"4")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        with pytest.raises(StoreError, match="cannot sync the log: Input/output error"):
            numbers.store.sync()
    assert "Input/output error" in (numbers.store.broken or "")
    assert (numbers.store.full, numbers.store.mend()) == (False, False)
    for again in (numbers.store.sync, lambda: numbers.store.append("number", b"5")):
        with pytest.raises(StoreError, match="Input/output error"):
            again()
    numbers.taken.append(4)
    numbers.save()
    assert numbers.store.broken is None
    numbers.write(2)
    numbers.store.close()
    assert after(tmp_path) == (upto(6), [])
    assert segment_name(5) in names(tmp_path)


def test_a_crash_between_the_snapshot_that_mends_and_the_new_segment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
        with pytest.raises(StoreError, match="gone"):
            numbers.write()
    numbers.save()
    numbers.store.close()
    (tmp_path / segment_name(5)).unlink()
    old = tmp_path / segment_name(1)
    os.truncate(old, old.stat().st_size - 50)  # what was not synced: record 4, and some of 3
    numbers = Numbers(tmp_path)
    assert numbers.taken == upto(4)
    numbers.write(2)
    numbers.store.close()
    assert after(tmp_path) == (upto(6), [])


def test_a_snapshot_from_before_the_log_broke_does_not_mend_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(2)
    mark = numbers.store.roll()
    numbers.write(1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
        with pytest.raises(StoreError, match="gone"):
            numbers.write()
    numbers.store.save(mark, {"taken": np.arange(1, 3)}, {})
    assert "gone" in str(numbers.store.broken)
    numbers.save()
    assert numbers.store.broken is None
    numbers.write()
    numbers.store.close()
    assert after(tmp_path) == (upto(5), [])


def test_nothing_is_appended_to_a_segment_whose_name_may_be_lost_until_a_snapshot_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, fsync = Numbers(tmp_path), os.fsync
    numbers.write(2)

    def refuse(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_dir():
            raise OSError(errno.EIO, "Input/output error")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        mark = numbers.store.roll()
    assert "cannot sync the log: Input/output error" in str(numbers.store.broken)
    assert not numbers.store.mend(), "a later success would not prove that the name is on the disk"
    with pytest.raises(StoreError, match="Input/output error"):
        numbers.store.append("number", b"3")
    numbers.store.save(mark, {"taken": np.array(numbers.taken)}, {})
    numbers.write()
    numbers.store.close()
    assert after(tmp_path) == (upto(3), [])


def test_a_log_that_cannot_be_synced_as_it_is_rolled_is_mended_by_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(2)
    numbers.taken.append(numbers.store.append("number", b"3"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
        mark = numbers.store.roll()
    assert (mark.sequence, mark.rolled) == (3, False)
    assert "gone" in str(numbers.store.broken)
    numbers.store.save(mark, {"taken": np.array(numbers.taken)}, {})
    numbers.write()
    numbers.store.close()
    assert after(tmp_path) == (upto(4), [])


def test_a_snapshot_behind_which_no_segment_can_be_made_is_kept_and_the_next_one_mends_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, replace = Numbers(tmp_path), os.replace
    numbers.write(2)

    def refuse(source: Path, target: Path) -> None:
        if target.name.startswith("log-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    numbers.taken.append(numbers.store.append("number", b"3"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
        patch.setattr(os, "replace", refuse)
        with pytest.raises(StoreError, match="no new segment of the log: the disk is full"):
            numbers.save()
    assert snapshot_name(3) in names(tmp_path)
    assert "gone" in str(numbers.store.broken)
    numbers.save()
    numbers.write()
    numbers.store.close()
    assert after(tmp_path) == (upto(4), [])


def test_a_full_disk_is_named_and_writes_continue_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(2)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for name in ("writev", "posix_fallocate"):
            patch.setattr(os, name, full)
        with pytest.raises(StoreError, match="the disk is full; make room there"):
            numbers.write()
        assert (numbers.store.full, numbers.store.mend()) == (True, False)
        mark = numbers.store.roll()
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(StoreError, match="cannot write the snapshot: the disk is full"):
            numbers.store.save(mark, {"taken": np.arange(1, 3)}, {})
        assert numbers.store.full
    assert numbers.store.mend()
    assert (numbers.store.broken, numbers.store.full) == (None, False)
    numbers.write(2)
    numbers.store.close()
    assert after(tmp_path) == (upto(4), [])
    assert names(tmp_path) == {segment_name(1)}


def test_a_full_disk_that_is_tried_again_and_again_takes_no_file_and_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers(tmp_path)
    before = open_files()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(StoreError, match="the disk is full"):
            numbers.write()
        patch.setattr(os, "posix_fallocate", full)
        assert [numbers.store.mend() for _ in range(3)] == [False] * 3
    assert (open_files(), names(tmp_path)) == (before, {segment_name(1)})
    assert numbers.store.mend()
    assert (open_files(), names(tmp_path)) == (before, {segment_name(1)})
    numbers.store.close()


def test_part_of_a_record_that_could_not_be_cut_off_is_cut_off_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(2)

    def refuse(fd: int, what: Any) -> None:
        if isinstance(what, list):  # a record, of which the disk takes ten bytes
            os.write(fd, bytes(what[0])[:10])
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        for name in ("writev", "ftruncate"):
            patch.setattr(os, name, refuse)
        with pytest.raises(StoreError, match="cannot append to the log"):
            numbers.write()
    numbers.write(2)
    numbers.store.close()
    assert after(tmp_path) == (upto(4), [])


def test_a_record_that_is_appended_during_a_sync_is_made_durable_by_the_next_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, synced = Numbers(tmp_path).store, list[int]()

    def sync(fd: int) -> None:
        synced.append(fd)
        if len(synced) == 1:
            store.append("number", b"2")

    monkeypatch.setattr(os, "fdatasync", sync)
    store.append("number", b"1")
    store.sync()
    store.sync()
    assert len(synced) == 2
    store.sync()
    assert len(synced) == 2  # nothing was appended since
    store.close()


def test_closing_makes_durable_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, synced = Numbers(tmp_path).store, list[int]()
    monkeypatch.setattr(os, "fdatasync", synced.append)
    store.append("number", b"1")
    store.close()
    assert len(synced) == 1


def test_a_real_limit_on_the_size_of_files_is_met_by_short_writes_and_lived_through(tmp_path: Path) -> None:
    code = """
import pathlib, resource, sys
from reclaim.data.errors import StoreError
from reclaim.serving.storage.store import Store
import numpy as np
store = Store.open(pathlib.Path(sys.argv[1]), state_version=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
taken = []
def write(size):
    taken.append(len(taken) + 1)
    try:
        store.append("number", str(taken[-1]).encode().ljust(size)); store.sync()
    except StoreError as error:
        taken.pop()
        return str(error)
while not (why := write(700)): pass
assert "limit on the size of files" in why and store.full, why
assert write(1) is None and not store.broken, "a smaller one still fits"
assert write(9_990) and store.full
store.save(store.roll(), {"taken": np.array(taken)}, {})
assert not store.broken
assert write(5_000) is None
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert write(50_000) is None
print(len(taken))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert after(tmp_path) == (upto(int(done.stdout)), [])


# Other processes

LIFE = """
import pathlib, sys, threading
import numpy as np
from reclaim.serving.storage.store import Store
store = Store.open(pathlib.Path(sys.argv[1]), state_version=1)
taken = [] if store.recovered.arrays is None else store.recovered.arrays["taken"].tolist()
taken += [int(bytes(record.payload)) for record in store.records()]
saving = threading.Thread(target=int)
saving.start()
while True:
    taken.append(len(taken) + 1)
    store.append("number", str(taken[-1]).encode().ljust(taken[-1] * 7919 % 50_000))
    store.sync()
    print(taken[-1], flush=True)
    if taken[-1] % 10 == 0 and not saving.is_alive():
        saving = threading.Thread(target=store.save, args=(store.roll(), {"taken": np.array(taken)}, {}))
        saving.start()
"""


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Give a function that starts a process which writes numbers and prints each written one."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        started.append(subprocess.Popen([sys.executable, "-c", LIFE, str(tmp_path)], stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_second_process_gets_the_pid_of_the_holder(tmp_path: Path, life: Callable[[], subprocess.Popen[str]]) -> None:
    holder = life()
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(StoreError, match=rf"is held by another process \(pid {holder.pid}\)"):
        Store.open(tmp_path, state_version=1)
    holder.kill()
    holder.communicate()
    after(tmp_path)


def test_the_same_process_cannot_open_it_twice(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path)
    with pytest.raises(StoreError, match=rf"\(pid {os.getpid()}\)"):
        Numbers(tmp_path)
    numbers.store.close()
    after(tmp_path)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_nothing_that_was_acknowledged(
    tmp_path: Path, life: Callable[[], subprocess.Popen[str]]
) -> None:
    rng, before = np.random.default_rng(7), 0
    for _ in range(20):
        process = life()
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(rng.integers(1, 30))]
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        told = [int(line) for line in (*lines, *process.stdout)]
        process.wait()
        assert told == list(range(before + 1, before + 1 + len(told))) or told[0] == before + 2
        taken, notes = after(tmp_path)
        assert taken == upto(len(taken))
        assert len(taken) in (told[-1], told[-1] + 1)
        assert all("cut short" in note for note in notes)
        before = len(taken)
    assert before > 100
