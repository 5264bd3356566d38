"""Snapshots: made of copies for which the memory is there before, and made all the same where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.serving.saver import Room, Saver
from reclaim.serving.settings import ServingSettings
from reclaim.serving.store import Store

Arrays = dict[str, NDArray[Any]]

RECORD = np.dtype([("a", "i8"), ("b", "f4", 3)])


class Memory:
    """Stands for a tracker: arrays that change, and copies of them by name."""

    def __init__(self) -> None:
        self.arrays: Arrays = {"few": np.arange(3), "records": np.ones(700_000, RECORD), "none": np.zeros((0, 2))}
        self.copies: Arrays = {}
        self.bytes_per_task = 2 * RECORD.itemsize

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


def make(store: Store, memory: Memory, wake: Callable[[], object] = lambda: None) -> Saver:
    settings = ServingSettings().model_copy(update={"snapshot_mib": 0})
    return Saver(store, memory, settings, wake)  # type: ignore[arg-type]  # all that is asked of a tracker


def look(made: Saver) -> None:
    """Look after the store, and wait for what that begins."""
    made.look()
    if made.busy is not None:
        made.busy.result()


def has_saved(made: Saver) -> bool:
    return made.saved_at is not None


def saved(store: Store, tmp_path: Path) -> Arrays:
    """Close the store, and return what another one finds in its folder."""
    store.close()
    again = Store.open(tmp_path / "store", state_version=1)
    arrays = again.recovered.arrays
    again.close()
    assert arrays is not None
    return dict(arrays)


def test_the_memory_of_the_copies_is_taken_before_they_are_made(store: Store, memory: Memory, tmp_path: Path) -> None:
    made = make(store, memory)
    look(made)
    assert not has_saved(made)
    room = made._room
    assert room is not None
    memory.arrays["records"]["a"][5] = 17  # what is saved is what there is when it is copied
    look(made)
    assert has_saved(made)
    assert not made._room
    for name, array in memory.arrays.items():
        assert not np.shares_memory(memory.copies[name], array)
        assert len(array) == 0 or np.shares_memory(memory.copies[name], room._bytes)
    made.close()
    found = saved(store, tmp_path)
    assert list(found) == list(memory.arrays)
    for name, array in memory.arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_what_has_outgrown_its_room_is_copied_elsewhere(store: Store, memory: Memory, tmp_path: Path) -> None:
    made = make(store, memory)
    look(made)
    memory.arrays |= {"records": np.ones(1_000_000, RECORD), "new": np.arange(4.0)}
    look(made)
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
        if broken:  # a snapshot is what mends it, and nobody waits for room
            patch.setattr(Store, "broken", "the disk is full")
            patch.setattr(store, "mend", lambda: False)
        for place in ("reclaim.serving.saver.blank_records", "reclaim.features.arrays.blank_records"):
            patch.setattr(place, none)
        look(made)
        look(made)
    assert made._room is None
    assert not has_saved(made)
    look(made)
    assert made._room is None  # not at once
    made._again_at = 0.0
    look(made)
    look(made)
    made.close()
    assert has_saved(made)
    assert saved(store, tmp_path)["few"].tolist() == [0, 1, 2]


def test_whoever_writes_is_woken_when_the_room_is_there_and_when_it_is_saved(store: Store, memory: Memory) -> None:
    woken: list[tuple[bool, bool]] = []
    made = make(store, memory, lambda: woken.append((made._room is not None, has_saved(made))))
    look(made)
    look(made)
    made.close()
    store.close()
    assert woken == [(True, False), (False, True)]


def test_room_is_made_for_what_the_last_copy_took(store: Store, memory: Memory) -> None:
    memory.bytes_per_task = 10
    made = make(store, memory)
    look(made)
    assert made._room is not None
    first = len(made._room._bytes)
    assert first < sum(array.nbytes for array in memory.arrays.values())
    look(made)
    while store.log_bytes <= store.snapshot_bytes:
        store.append("kind", b"x" * 2**20)
    look(made)
    assert made._room is not None
    assert first < sum(array.nbytes for array in memory.arrays.values()) < len(made._room._bytes)
    made.close()
    store.close()


def test_a_service_that_stops_waits_for_no_room(store: Store, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[Room] = []

    def touch(room: Room) -> bool:
        touched.append(room)
        made._closing = True  # it stops meanwhile
        return True

    made = make(store, memory)
    monkeypatch.setattr(Room, "touch", touch)
    look(made)
    assert len(touched) == 1
    made.close()
    store.close()
