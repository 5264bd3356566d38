"""A folder with cuts, changed bytes, missing files or another version gives back what is whole, or says what is not."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from reclaim.data.errors import StoreError
from reclaim.serving.storage import snapshot
from reclaim.serving.storage.log_format import segment_name
from reclaim.serving.storage.snapshot import snapshot_name
from reclaim.serving.storage.store import Store
from tests.serving.storage.written_numbers import Numbers, after, attempt, names, upto, written


def test_an_unfinished_last_record_is_cut_off_and_said(tmp_path: Path) -> None:
    written(tmp_path, 2, 3)
    log = tmp_path / segment_name(3)
    os.truncate(log, log.stat().st_size - 5)
    note = f"{log.name}: record 5 is cut short; the last 34 bytes, never finished, were cut off."
    assert after(tmp_path) == (upto(4), [note])
    assert after(tmp_path) == (upto(4), [])


@pytest.mark.slow
@pytest.mark.usefixtures("instant")
def test_every_cut_of_the_last_segment_leaves_the_whole_records(tmp_path: Path) -> None:
    written(tmp_path / "whole", 2, 3)
    size = (tmp_path / "whole" / segment_name(3)).stat().st_size
    record = 28 + len("number") + 1 + 4
    for cut in range(size + 1):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "whole", copy)
        os.truncate(copy / segment_name(3), cut)
        taken, notes = after(copy)
        assert taken == upto(2 + max(cut - 36, 0) // record)
        assert bool(notes) == (cut < 36 or (cut - 36) % record > 0)
        numbers = Numbers(copy)
        numbers.write(2)
        numbers.store.close()
        assert after(copy) == (upto(len(taken) + 2), [])
        shutil.rmtree(copy)


def changed_bytes(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :]


@pytest.mark.slow
@pytest.mark.usefixtures("instant")
def test_every_changed_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    written(tmp_path / "whole", 2, 3, 4)
    files = [path for path in (tmp_path / "whole").rglob("*") if path.is_file() and path.name != "lock"]
    copy = tmp_path / "copy"
    met = set()
    for path in files:
        whole = path.read_bytes()
        for at in range(len(whole)):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(tmp_path / "whole", copy)
            changed = copy / path.relative_to(tmp_path / "whole")
            changed.write_bytes(changed_bytes(whole, at))
            taken, notes, refusal = attempt(copy)
            if refusal:
                assert path.name in refusal
                met.add("refused")
                repaired, notes = after(copy, repair=True)
                assert repaired == upto(len(repaired))
                assert path.name in "".join(notes)
                assert (copy / "damaged-1" / path.name).read_bytes() == changed_bytes(whole, at)
                assert after(copy) == (repaired, [])
                continue
            assert taken == upto(9) or (taken == upto(8) and "the last 39 bytes, " in notes[0])
            met.add("cut" if len(taken) == 8 else "went around" if notes else "not needed")
    assert met == {"refused", "cut", "went around", "not needed"}


def test_a_damaged_snapshot_is_put_aside_for_the_one_before_it(tmp_path: Path) -> None:
    written(tmp_path, 2, 3, 4)
    newest = tmp_path / snapshot_name(5) / "taken.npy"
    newest.write_bytes(newest.read_bytes()[:-1])
    taken, notes = after(tmp_path)
    assert taken == upto(9)
    assert notes == [
        f"{snapshot_name(5)}/taken.npy has a wrong length or checksum: the snapshot was moved to damaged-1."
    ]
    assert (tmp_path / "damaged-1" / snapshot_name(5) / "taken.npy").exists()
    numbers = Numbers(tmp_path)
    numbers.save()
    numbers.store.close()
    assert {snapshot_name(2), snapshot_name(9), segment_name(3)} <= names(tmp_path), (
        "the damaged one counts for nothing"
    )
    assert after(tmp_path) == (upto(9), [])


def unreadable(monkeypatch: pytest.MonkeyPatch, file: Path, number: int) -> None:
    """Let reading a file fail with an error of the system."""
    opened = Path.open

    def refuse(path: Path, *how: Any, **options: Any) -> Any:
        if path == file:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *how, **options)

    monkeypatch.setattr(Path, "open", refuse)


@pytest.mark.parametrize("name", ["taken.npy", "manifest.json"])
def test_a_snapshot_that_the_disk_cannot_read_is_put_aside_for_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    written(tmp_path, 2, 3, 4)
    with monkeypatch.context() as patch:
        unreadable(patch, tmp_path / snapshot_name(5) / name, errno.EIO)
        taken, notes = after(tmp_path)
    assert taken == upto(9)
    assert notes == [f"{snapshot_name(5)}/{name}: Input/output error: the snapshot was moved to damaged-1."]


@pytest.mark.parametrize("name", ["taken.npy", "manifest.json"])
def test_a_snapshot_that_this_user_may_not_read_is_named_and_nothing_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    written(tmp_path, 2, 3, 4)
    before, file = names(tmp_path), tmp_path / snapshot_name(5) / name
    with monkeypatch.context() as patch:
        unreadable(patch, file, errno.EACCES)
        with pytest.raises(StoreError, match=f"^{file}: cannot be opened: Permission denied$"):
            Store.open(tmp_path, state_version=1, repair=True)
    assert names(tmp_path) == before
    assert after(tmp_path) == (upto(9), [])


def test_damage_of_the_log_before_the_newest_snapshot_holds_nothing_up(tmp_path: Path) -> None:
    written(tmp_path, 2, 3, 4)
    older = tmp_path / segment_name(3)
    older.write_bytes(changed_bytes(older.read_bytes(), 60))
    assert after(tmp_path) == (upto(9), [])


def test_a_damaged_header_of_a_segment_without_records_is_cut_off_and_said(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(2)
    numbers.store.roll()
    numbers.store.close()
    empty = tmp_path / segment_name(3)
    empty.write_bytes(changed_bytes(empty.read_bytes(), 30))
    taken, notes = after(tmp_path)
    assert (taken, len(notes)) == (upto(2), 1)
    assert f"{empty.name}: its header is damaged; the last 36 bytes" in notes[0]
    assert after(tmp_path) == (upto(2), [])


def test_a_segment_of_one_record_between_two_snapshots_is_kept_for_the_older_one(tmp_path: Path) -> None:
    written(tmp_path, 3, 1, 2)
    newest = tmp_path / snapshot_name(4) / "taken.npy"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert after(tmp_path)[0] == upto(6)


def test_a_file_that_may_not_be_read_is_named_and_nothing_is_moved(tmp_path: Path) -> None:
    file = tmp_path / segment_name(1)
    file.mkdir()
    with pytest.raises(StoreError, match=f"^{file}: cannot be opened: Is a directory$"):
        Store.open(tmp_path, state_version=1, repair=True)
    assert file.exists()


def test_a_snapshot_under_another_name_is_not_used(tmp_path: Path) -> None:
    written(tmp_path, 2, 3, 4)
    shutil.rmtree(tmp_path / snapshot_name(5))
    shutil.copytree(tmp_path / snapshot_name(2), tmp_path / snapshot_name(5))
    taken, notes = after(tmp_path)
    assert (taken, len(notes)) == (upto(9), 1)
    assert f"{snapshot_name(5)} says that it is {snapshot_name(2)}" in notes[0]


def test_when_no_snapshot_is_whole_the_log_alone_is_enough_while_it_reaches_back(tmp_path: Path) -> None:
    written(tmp_path, 2, 3)
    shutil.rmtree(tmp_path / snapshot_name(2))
    (tmp_path / snapshot_name(2)).mkdir()
    assert after(tmp_path)[0] == upto(5)
    shutil.rmtree(tmp_path)
    written(tmp_path, 2, 3, 4)
    for sequence in (2, 5):
        (tmp_path / snapshot_name(sequence) / "manifest.json").unlink()
    with pytest.raises(
        StoreError, match=f"{snapshot_name(5)}/manifest.json: No such .* record 1 is in no segment; restor"
    ):
        Store.open(tmp_path, state_version=1)
    taken, notes = after(tmp_path, repair=True)
    assert (taken, len(notes)) == ([], 3)
    assert names(tmp_path / "damaged-1") == {snapshot_name(2), snapshot_name(5), segment_name(3), segment_name(6)}


def test_a_segment_is_cut_only_once_the_whole_of_it_is_durable_in_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 2, 3, 4)
    cut = max(tmp_path.glob("log-*.bin"))
    whole = cut.read_bytes()
    cut.write_bytes(changed_bytes(whole, 60))  # in its first record
    synced = {}

    def fsync(fd: int) -> None:
        synced[Path(os.readlink(f"/proc/self/fd/{fd}"))] = cut.stat().st_size

    monkeypatch.setattr(os, "fsync", fsync)
    Store.open(tmp_path, state_version=1, repair=True).close()
    copy = tmp_path.resolve() / "damaged-1" / cut.name
    assert copy.read_bytes() == changed_bytes(whole, 60)
    assert synced[copy] == len(whole) > cut.stat().st_size
    assert copy.parent in synced, "the name of the copy outlives a power cut, too"


@pytest.mark.parametrize(("lost", "missing"), [(3, 3), (5, 5), (7, 7)])
def test_a_missing_segment_is_refused_and_repair_keeps_what_stands_before(
    tmp_path: Path, lost: int, missing: int
) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(2)
    numbers.save()
    for _ in range(3):  # three segments behind the snapshot
        numbers.write(2)
        numbers.store.roll()
    numbers.write(1)
    numbers.store.close()
    (tmp_path / segment_name(lost)).unlink()
    with pytest.raises(
        StoreError, match=rf"{segment_name(lost)} is missing|record {missing} is in no segment"
    ) as refusal:
        Store.open(tmp_path, state_version=1)
    assert "start with --repair (RECLAIM_REPAIR=true)" in str(refusal.value)
    taken, notes = after(tmp_path, repair=True)
    assert taken == upto(lost - 1)
    assert segment_name(9) in notes[0]
    assert (tmp_path / "damaged-1" / segment_name(9)).exists()
    assert after(tmp_path) == (taken, [])


def test_a_missing_last_segment_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 2, 3)
    (tmp_path / segment_name(3)).unlink()
    with pytest.raises(StoreError, match=f"{segment_name(3)} is missing"):
        Store.open(tmp_path, state_version=1)
    assert after(tmp_path, repair=True)[0] == upto(2)


def test_swapped_segments_are_refused(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path)
    for _ in range(3):
        numbers.write(2)
        numbers.store.roll()
    numbers.store.close()
    one, other, between = tmp_path / segment_name(1), tmp_path / segment_name(3), tmp_path / "between"
    for source, target in ((one, between), (other, one), (between, other)):
        source.rename(target)
    with pytest.raises(StoreError, match=rf"{segment_name(1)}, byte 0: its header is that of {segment_name(3)}"):
        Store.open(tmp_path, state_version=1)


def test_a_segment_that_lost_its_end_in_the_middle_of_the_log_is_refused(tmp_path: Path) -> None:
    numbers = Numbers(tmp_path)
    numbers.write(2)
    numbers.store.roll()
    numbers.write(2)
    numbers.store.close()
    log = tmp_path / segment_name(1)
    os.truncate(log, log.stat().st_size - 1)
    with pytest.raises(StoreError, match=f"{segment_name(1)}, byte 75: record 2 is cut short"):
        Store.open(tmp_path, state_version=1)
    os.truncate(log, 75)
    with pytest.raises(StoreError, match=f"{segment_name(3)} begins with record 3, and record 2 is in no segment"):
        Store.open(tmp_path, state_version=1)
    assert after(tmp_path, repair=True)[0] == upto(1)


def test_state_of_another_version_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "saved", 2, 3)
    with pytest.raises(StoreError, match=rf"{snapshot_name(2)} was written by state version 1, this code has 3: start"):
        Store.open(tmp_path / "saved", state_version=3)
    written(tmp_path / "log", 2)
    with pytest.raises(StoreError, match=rf"{segment_name(1)} was written by state version 1, this code has 2: start"):
        Store.open(tmp_path / "log", state_version=2, repair=True)


def test_an_unknown_format_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "FORMAT", 5)
        written(tmp_path, 2, 3)
    with pytest.raises(StoreError, match="has format 5, this code knows 1"):
        Store.open(tmp_path, state_version=1)
