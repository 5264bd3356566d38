"""Snapshots are made from copies in memory that was touched before, or elsewhere where they do not fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.serving.settings import ServingSettings
from reclaim.serving.storage.store import Store
from reclaim.serving.writing.snapshotter import CopyBuffer, Snapshotter

Arrays = dict[str, NDArray[Any]]

RECORD = np.dtype([("a", "i8"), ("b", "f4", 3)])


class Memory:
    """Replaces a tracker: arrays that change, and copies of them by name."""

    def __init__(self) -> None:
        self.arrays: Arrays = {"few": np.arange(3), "records": np.ones(700_000, RECORD), "none": np.zeros((0, 2))}
        self.copies: Arrays = {}
        self.bytes_per_task = RECORD.itemsize

    def __len__(self) -> int:
        return len(self.arrays["records"])

    def memory(self, copied: Callable[[NDArray[Any]], NDArray[Any]]) -> Arrays:
        """Return what ``Tracker.memory`` would."""
        self.copies = {name: copied(array) for name, array in self.arrays.items()}
        return self.copies


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Give a store whose log is longer than it may be."""
    store = Store.open(tmp_path / "store", state_version=1)
    store.append("kind", b"x" * 2_000)
    return store


def make(store: Store, memory: Memory, wake: Callable[[], object] = lambda: None) -> Snapshotter:
    settings = ServingSettings().model_copy(update={"snapshot_mib": 0})
    return Snapshotter(store, memory, settings, wake)  # type: ignore[arg-type]  # all that is asked of a tracker


def check(made: Snapshotter) -> None:
    """Look after the store, and wait for what that begins."""
    made.check()
    if made.busy is not None:
        made.busy.result()


def has_buffer(made: Snapshotter) -> bool:
    return made._buffer is not None


def has_saved(made: Snapshotter) -> bool:
    return made.saved_at is not None


def saved(store: Store, tmp_path: Path) -> Arrays:
    """Close the store, and return what another one finds in its folder."""
    store.close()
    again = Store.open(tmp_path / "store", state_version=1)
    arrays = again.recovered.arrays
    again.close()
    assert arrays is not None
    return dict(arrays)


def assert_tried_again_later(made: Snapshotter) -> None:
    """Look at a snapshotter that was put off: it begins again after some seconds, and saves."""
    check(made)
    assert made._buffer is None  # not at once
    made._again_at = 0.0
    check(made)
    check(made)
    made.close()
    assert has_saved(made)


def test_the_memory_of_the_copies_is_taken_before_they_are_made(store: Store, memory: Memory, tmp_path: Path) -> None:
    made = make(store, memory)
    check(made)
    assert not has_saved(made)
    buffer = made._buffer
    assert buffer is not None
    memory.arrays["records"]["a"][5] = 17  # what is saved is what there is when it is copied
    check(made)
    assert has_saved(made)
    assert not made._buffer
    for name, array in memory.arrays.items():
        assert not np.shares_memory(memory.copies[name], array)
        assert len(array) == 0 or np.shares_memory(memory.copies[name], buffer._bytes)
    made.close()
    found = saved(store, tmp_path)
    assert list(found) == list(memory.arrays)
    for name, array in memory.arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_the_log_grows_to_its_least_size_and_to_a_quarter_of_the_last_snapshot(store: Store, memory: Memory) -> None:
    made = make(store, memory)
    made.settings = made.settings.model_copy(update={"snapshot_mib": 1})
    for grows, begins in ((2**20 - 4_000, False), (3_000, True), (3 * 2**20, False), (2**20, True)):  # the last: 14 MB
        store.append("kind", bytes(grows))
        before = made.busy
        check(made)
        assert (made.busy is not before) is begins
        if begins:
            check(made)
            assert not has_buffer(made)
    made.close()
    store.close()


def test_an_array_that_outgrew_the_buffer_is_copied_elsewhere(store: Store, memory: Memory, tmp_path: Path) -> None:
    made = make(store, memory)
    check(made)
    memory.arrays |= {"records": np.ones(1_000_000, RECORD), "new": np.arange(4.0)}
    check(made)
    made.close()
    found = saved(store, tmp_path)
    np.testing.assert_array_equal(found["records"], np.ones(1_000_000, RECORD))
    np.testing.assert_array_equal(found["few"], np.arange(3))
    np.testing.assert_array_equal(found["new"], np.arange(4.0))


@pytest.mark.parametrize("broken", [False, True])
def test_without_memory_for_the_copies_there_is_no_snapshot_now_and_another_try_later(
    store: Store, memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    def none(*_: object) -> Any:
        raise MemoryError("none left")

    made = make(store, memory)
    with monkeypatch.context() as patch:
        if broken:  # a snapshot is what mends it, and no buffer is waited for
            patch.setattr(Store, "broken", "the disk is full")
            patch.setattr(store, "mend", lambda: False)
        for place in ("reclaim.serving.writing.snapshotter.blank_records", "reclaim.data.core.arrays.blank_records"):
            patch.setattr(place, none)
        check(made)
        check(made)
    assert made._buffer is None
    assert not has_saved(made)
    assert_tried_again_later(made)
    assert saved(store, tmp_path)["few"].tolist() == [0, 1, 2]


def test_a_snapshot_that_lacks_memory_while_it_is_saved_is_reported_and_tried_again_later(
    store: Store, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> Any:
        raise MemoryError("none left")

    made = make(store, memory)
    check(made)
    with monkeypatch.context() as patch:
        patch.setattr(store, "save", none)
        check(made)
    assert "no snapshot: none left" in caplog.text
    assert_tried_again_later(made)


def test_the_writer_is_woken_when_the_buffer_is_ready_and_when_the_snapshot_is_saved(
    store: Store, memory: Memory
) -> None:
    woken: list[tuple[bool, bool]] = []
    made = make(store, memory, lambda: woken.append((made._buffer is not None, has_saved(made))))
    check(made)
    check(made)
    made.close()
    store.close()
    assert woken == [(True, False), (False, True)]


def test_the_buffer_has_the_size_of_the_last_copy(store: Store, memory: Memory) -> None:
    memory.bytes_per_task = 10
    made = make(store, memory)
    check(made)
    assert made._buffer is not None
    first = len(made._buffer._bytes)
    assert first < sum(array.nbytes for array in memory.arrays.values())
    check(made)
    while store.log_bytes <= store.snapshot_bytes:
        store.append("kind", b"x" * 2**20)
    check(made)
    assert made._buffer is not None
    assert first < sum(array.nbytes for array in memory.arrays.values()) < len(made._buffer._bytes)
    made.close()
    store.close()


def test_the_log_is_replaced_when_it_is_larger_than_a_fourth_of_the_last_snapshot(store: Store, memory: Memory) -> None:
    made = make(store, memory)
    check(made)
    check(made)
    fourth = store.snapshot_bytes // 4
    store.append("kind", b"x" * (fourth - 2**20))
    check(made)
    assert not has_buffer(made)
    store.append("kind", b"x" * 2**20)
    check(made)
    assert has_buffer(made)
    made.close()
    store.close()


def test_a_service_that_stops_does_not_wait_for_the_buffer(
    store: Store, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[CopyBuffer] = []

    def touch(buffer: CopyBuffer) -> bool:
        touched.append(buffer)
        made._closing = True  # it stops meanwhile
        return True

    made = make(store, memory)
    monkeypatch.setattr(CopyBuffer, "touch", touch)
    check(made)
    assert len(touched) == 1
    made.close()
    store.close()


def test_a_store_that_refuses_writes_is_tried_again_after_some_seconds_not_at_every_write(
    store: Store, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []

    def mend() -> bool:
        tried.append(True)
        return True

    made = make(store, memory)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "broken", "the disk is full")
        patch.setattr(store, "mend", mend)
        check(made)
        check(made)
        assert len(tried) == 1
        made._again_at = 0.0
        check(made)
        assert len(tried) == 2
    made.close()
    store.close()


def test_the_duration_of_a_snapshot_is_that_of_its_saving(store: Store, memory: Memory) -> None:
    made, began = make(store, memory), time.monotonic()
    check(made)
    check(made)
    assert 0 <= made.save_s <= time.monotonic() - began
    made.close()
    store.close()
