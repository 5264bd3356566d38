"""A record is there whole or not at all, wherever the file was cut and whatever in it was changed."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.errors import StoreError
from reclaim.serving.storage import log_format
from reclaim.serving.storage.log_format import HEADER_BYTES, read_records, scan
from reclaim.serving.storage.segment import Segment

Records = Sequence[tuple[str, bytes]]
THREE: Records = [("usage", b"first"), ("tasks", b""), ("usage", b"the third, longer than the others")]


@pytest.fixture(autouse=True)
def _skip_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)


def written(folder: Path, records: Records, first: int = 1) -> Path:
    segment = Segment.create(folder, first, state_version=7)
    for kind, payload in records:
        segment.append(kind, payload)
    segment.close()
    return segment.path


def read(path: Path) -> list[tuple[str, bytes]]:
    found = scan(path)
    records = list(read_records(found))
    assert [record.sequence for record in records] == list(range(found.first, found.next))
    return [(record.kind, bytes(record.payload)) for record in records]


def ends(path: Path, records: Records) -> list[int]:
    """Return where the header and each record end: 28 bytes before kind and payload, 4 behind."""
    sizes = [28 + len(kind.encode()) + len(payload) + 4 for kind, payload in records]
    places = [HEADER_BYTES, *(HEADER_BYTES + int(end) for end in np.cumsum(sizes))]
    assert places[-1] == path.stat().st_size
    return places


@given(st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=200)), max_size=8), st.data())
@settings(deadline=None, max_examples=60)
def test_records_come_back_as_they_were_wherever_the_file_ends(
    tmp_path_factory: pytest.TempPathFactory, records: Records, data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("log"), records, first=41)
    assert read(path) == list(records)
    places = ends(path, records)
    cut = data.draw(st.integers(HEADER_BYTES, places[-1]))
    os.truncate(path, cut)
    assert read(path) == list(records[: sum(end <= cut for end in places) - 1])


def test_every_cut_leaves_the_whole_records_before_it(tmp_path: Path) -> None:
    path = written(tmp_path, THREE)
    whole, places = path.read_bytes(), ends(path, THREE)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found = scan(path)
        held = [end for end in places if end <= cut]
        assert (found.end, found.next) == (max(held, default=0), 1 + max(len(held) - 1, 0))
        assert (found.problem is None) == (cut in places)
        assert found.torn == (cut not in places)
        assert read(path) == list(THREE[: found.next - 1])


def test_after_a_cut_the_log_goes_on_behind_the_last_whole_record(tmp_path: Path) -> None:
    path = written(tmp_path, THREE)
    os.truncate(path, path.stat().st_size - 1)
    segment = Segment.reopen(scan(path))
    assert segment.append("usage", b"again") == 3
    segment.close()
    assert read(path) == [*THREE[:2], ("usage", b"again")]


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_changed_byte_is_noticed_and_no_wrong_record_is_read(tmp_path: Path, flip: int) -> None:
    path = written(tmp_path, THREE)
    whole, places = path.read_bytes(), ends(path, THREE)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
        found = scan(path)
        before = sum(end <= at for end in places)  # the header and the records that end before the change
        assert found.problem is not None
        assert read(path) == list(THREE[: max(before - 1, 0)])
        assert found.torn == (before == 3), "the last record may be an unfinished write; another one is damage"


@given(st.binary(min_size=1, max_size=60), st.integers(0, 200))
@settings(deadline=None, max_examples=100)
def test_garbage_written_over_the_log_never_makes_a_record(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, at: int
) -> None:
    path = written(tmp_path_factory.mktemp("log"), THREE)
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + garbage + whole[at + len(garbage) :])
    found = read(path)
    assert found == list(THREE[: len(found)])


def test_a_length_that_points_past_the_end_hides_no_record_behind_it(tmp_path: Path) -> None:
    path = written(tmp_path, THREE)
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 16 + 7] = 0xFF  # highest byte of the first record's length: 2**63 and more
    path.write_bytes(raw)
    found = scan(path)
    assert (found.problem, found.torn, found.next) == ("record 1 is cut short", False, 1)


def test_a_record_that_is_missing_in_between_is_damage_and_not_an_end(tmp_path: Path) -> None:
    path = written(tmp_path, THREE)
    whole, places = path.read_bytes(), ends(path, THREE)
    path.write_bytes(whole[: places[1]] + whole[places[2] :])
    found = scan(path)
    assert (found.problem, found.torn, found.next) == ("record 3 stands where 2 belongs", False, 2)


def test_a_payload_that_looks_like_a_log_is_not_taken_for_one(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    inner = written(other, THREE, first=2).read_bytes()
    path = written(tmp_path, [("usage", inner)])
    os.truncate(path, path.stat().st_size - 1)
    assert (scan(path).torn, read(path)) == (True, [])


def test_a_segment_under_another_name_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, THREE)
    moved = path.rename(tmp_path / log_format.segment_name(4))
    found = scan(moved)
    assert found.problem == "its header is that of log-00000000000000000001.bin"
    assert (found.torn, found.next) == (False, 4)


def test_a_segment_of_another_format_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(log_format, "FORMAT", 9)
        path = written(tmp_path, THREE)
    with pytest.raises(StoreError, match=r"log-0*1\.bin has format 9, this code knows 1"):
        scan(path)


def test_a_record_that_changed_since_it_was_scanned_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, THREE)
    found = scan(path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(StoreError, match="the checksum of record 3 is wrong at byte"):
        list(read_records(found))


def test_arrays_of_any_type_are_payloads(tmp_path: Path) -> None:
    rows = np.array([(1, 2.5), (3, 4.5)], np.dtype([("slot", "i4"), ("cpu", "f8")], align=True))
    segment = Segment.create(tmp_path, 1, 7)
    for payload in (rows, np.empty((0, 3)), bytearray(b"x"), memoryview(b"yz")):
        segment.append("rows", payload)
    segment.close()
    first, *others = [payload for _, payload in read(segment.path)]
    np.testing.assert_array_equal(np.frombuffer(first, rows.dtype), rows)
    assert others == [b"", b"x", b"yz"]


def test_a_write_that_takes_many_calls_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [memoryview(parts[0])[:7]]))
    assert read(written(tmp_path, THREE)) == list(THREE)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full; make room"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EIO, "look at the disk"),
    ],
)
@pytest.mark.parametrize("room", [0, 1, 30, 61])
def test_a_record_for_which_there_is_no_room_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str, room: int
) -> None:
    segment = Segment.create(tmp_path, 1, 7)
    segment.append("usage", b"before")
    size, writev, left = segment.path.stat().st_size, os.writev, room

    def short(fd: int, parts: list[memoryview]) -> int:
        nonlocal left
        if not left:
            raise OSError(number, os.strerror(number))
        taken = writev(fd, [memoryview(b"".join(parts))[:left]])
        left -= taken
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", short)
        with pytest.raises(StoreError, match=words):
            segment.append("usage", b"for this there is no room on the disk")
    assert segment.path.stat().st_size == segment.size == size
    assert segment.append("usage", b"after") == 2
    segment.close()
    assert read(segment.path) == [("usage", b"before"), ("usage", b"after")]


def test_a_partial_record_that_cannot_be_cut_off_is_cut_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = Segment.create(tmp_path, 1, 7)
    writev = os.writev

    def half(fd: int, parts: list[memoryview]) -> int:
        writev(fd, parts[:1])
        raise OSError(errno.EIO, "broken")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", half)
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(StoreError, match="broken"):
            segment.append("usage", b"never")
    assert segment.path.stat().st_size > segment.size
    assert scan(segment.path).torn
    segment.append("usage", b"after")
    segment.close()
    assert read(segment.path) == [("usage", b"after")]
