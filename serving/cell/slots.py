"""Maps task names to slots by a hash table, hundreds of thousands at a time; remembers recently ended tasks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import room_for
from reclaim.data.core.jit import LENT

Ids = NDArray[np.int64]

_FREE, _GONE = 0, -1
"""Values of an empty place of the table and of a removed one; a search continues past the second."""
_MIN_PLACES: Final = 1_024
"""Size of the smallest table; a power of two, as all sizes are."""


class Slots:
    """Assigns each task a number from 0; the smallest free one is reused first.

    An open-addressing hash table: it finds 250,000 tasks in a few milliseconds, where a dictionary takes a hundred.
    Each table has a random seed, so that no caller can choose names that collide. Slots do not depend on the seed.

    Attributes
    ----------
    key : int64, shape (capacity, 2)
        Collection and instance index of each slot; undefined where it is free.
    used : bool, shape (capacity,)
    """

    def __init__(self) -> None:
        self.key = np.zeros((0, 2), np.int64)
        self.used = np.zeros(0, np.bool_)
        self._table = np.zeros(_MIN_PLACES, np.int32)
        self._filled = 0  # places of the table that are not empty
        self._spare: list[int] = []  # a heap
        self._seed = np.uint64(secrets.randbits(64))
        self._next = 0

    def __len__(self) -> int:
        return self._next - len(self._spare)

    def find(self, key: Ids) -> Ids:
        """Return the slot of each task, -1 where it has none; key (n, 2), result (n,)."""
        slot = np.empty(len(key), np.int64)
        _find(self._table, self._seed, self.key, self.used, np.ascontiguousarray(key), slot)
        return slot

    def give(self, key: Ids) -> Ids:
        """Return the slot of each task, a new one where it had none; key (n, 2), result (n,)."""
        slot = self.find(key)
        unknown = np.flatnonzero(slot < 0)
        if len(unknown) == 0:
            return slot
        new = np.unique(key[unknown], axis=0)
        reused = [heappop(self._spare) for _ in range(min(len(new), len(self._spare)))]
        fresh = len(new) - len(reused)
        given = np.concatenate([np.array(reused, np.int64), np.arange(self._next, self._next + fresh)])
        self._next += fresh
        self.key, self.used = room_for(self.key, self._next), room_for(self.used, self._next)
        self.key[given], self.used[given] = new, True
        if 3 * (self._filled + len(given)) > 2 * len(self._table):
            self._rebuild()
        else:
            _insert(self._table, self._seed, self.key, given)
            self._filled += len(given)
        slot[unknown] = self.find(key[unknown])
        return slot

    def free(self, slot: Ids) -> None:
        """Release slots; they must be distinct and in use."""
        _remove(self._table, self._seed, self.key, slot)
        self.used[slot] = False
        for number in slot.tolist():
            heappush(self._spare, number)

    def all(self) -> Ids:
        """Return the slots in use, ascending."""
        return np.flatnonzero(self.used[: self._next])

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to save."""
        return {"key": self.key[: self._next], "used": self.used[: self._next]}

    def recall(self, memory: dict[str, NDArray[Any]]) -> None:
        """Restore saved arrays."""
        self.key, self.used = memory["key"].copy(), memory["used"].copy()
        self._next = len(self.key)
        self._spare = np.flatnonzero(~self.used).tolist()
        heapify(self._spare)
        self._rebuild()

    def _rebuild(self) -> None:
        """Build a new table, at most half full, without removed places."""
        slots = self.all()
        self._table = np.zeros(max(_MIN_PLACES, 1 << (2 * len(slots)).bit_length()), np.int32)
        _insert(self._table, self._seed, self.key, slots)
        self._filled = len(slots)


@numba.njit(**LENT)
def _place(collection: int, index: int, seed: np.uint64, mask: int) -> int:
    """Return the first place of a search; every bit of both numbers is mixed in."""
    h = _mixed(_mixed(np.uint64(collection) ^ seed) + np.uint64(index))
    return np.int64(h & np.uint64(mask))  # type: ignore[return-value]  # numba's int


@numba.njit(**LENT)
def _mixed(h: np.uint64) -> np.uint64:
    """Return the finaliser of MurmurHash3 (https://github.com/aappleby/smhasher)."""
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


@numba.njit(**LENT)
def _find(table: Any, seed: np.uint64, key: Any, used: Any, wanted: Any, slot: Any) -> None:
    mask, likely = len(table) - 1, 0
    for i in range(len(wanted)):
        # bulk writes mostly repeat the order of slots: try the next slot before a search
        if likely < len(key) and used[likely] and key[likely, 0] == wanted[i, 0] and key[likely, 1] == wanted[i, 1]:
            slot[i] = likely
            likely += 1
            continue
        slot[i] = -1
        place = _place(wanted[i, 0], wanted[i, 1], seed, mask)
        while table[place] != _FREE:
            s = table[place] - 1
            if s >= 0 and key[s, 0] == wanted[i, 0] and key[s, 1] == wanted[i, 1]:
                slot[i], likely = s, s + 1
                break
            place = (place + 1) & mask


@numba.njit(**LENT)
def _insert(table: Any, seed: np.uint64, key: Any, slot: Any) -> None:
    mask = len(table) - 1
    for i in range(len(slot)):
        place = _place(key[slot[i], 0], key[slot[i], 1], seed, mask)
        while table[place] != _FREE:
            place = (place + 1) & mask
        table[place] = slot[i] + 1


@numba.njit(**LENT)
def _remove(table: Any, seed: np.uint64, key: Any, slot: Any) -> None:
    mask = len(table) - 1
    for i in range(len(slot)):
        place = _place(key[slot[i], 0], key[slot[i], 1], seed, mask)
        while table[place] != slot[i] + 1:
            place = (place + 1) & mask
        table[place] = _GONE


KEPT_US: Final = 3_600_000_000
"""An end is remembered at least this long, in µs of the cell's clock: collectors delay windows by an hour at worst."""


class EndedTasks:
    """Remembers recently ended tasks and finds late windows from before their end; the oldest ends are dropped first.

    Parameters
    ----------
    most : int
        Ends remembered at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots = Slots()
        self._at_us = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, key: Ids, ended_us: Ids) -> None:
        """Remember ends, shapes (n, 2) and (n,); the later end of a task counts."""
        slot = self._slots.give(key)
        self._at_us = room_for(self._at_us, len(self._slots.key))
        np.maximum.at(self._at_us, slot, ended_us)
        if len(self) > self._most:
            used = self._slots.all()
            self._drop(used[np.argsort(self._at_us[used], kind="stable")[: len(self) - self._most]])

    def before_end(self, key: Ids, start_us: Ids) -> NDArray[np.bool_]:
        """Return which windows began before their task ended, shape (n,); key (n, 2)."""
        if len(self) == 0:
            return np.zeros(len(key), np.bool_)
        slot = self._slots.find(key)
        return (slot >= 0) & (start_us < self._at_us[slot])

    def forget(self, before_us: int) -> None:
        """Drop ends from before a time."""
        used = self._slots.all()
        self._drop(used[self._at_us[used] < before_us])

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to save."""
        used = self._slots.all()
        return {"key": self._slots.key[used], "at_us": self._at_us[used]}

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Restore saved arrays."""
        self._slots, self._at_us = Slots(), np.zeros(0, np.int64)
        self.add(memory["key"], memory["at_us"])

    def _drop(self, slot: Ids) -> None:
        self._at_us[slot] = 0
        self._slots.free(slot)
