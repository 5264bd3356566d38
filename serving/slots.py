"""Which slot a task has: the two halves of its name, looked up by the hundred thousand at a time."""

from __future__ import annotations

import secrets
from heapq import heapify, heappop, heappush
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.features.arrays import room_for
from reclaim.features.compiled import LENT

Ids = NDArray[np.int64]

_FREE, _GONE = 0, -1
"""What the table holds where no task is, and where one was: a search goes on past the second."""
_LEAST: Final = 1_024
"""Places of the smallest table; a power of two, as all are."""


class Slots:
    """A number for each task, from 0; those of tasks that have left are given again, the least first.

    An open-addressing hash table: 250,000 tasks are found in a few milliseconds, where a dictionary takes a hundred.
    Where in it a task is looked for depends on a number drawn anew for each table, so that nobody can choose names that
    all meet in one place; which slot a task gets depends on nothing but what came before.

    Attributes
    ----------
    key : int64, shape (capacity, 2)
        Collection and instance index of each slot, whatever was there before where it is free.
    used : bool, shape (capacity,)
    """

    def __init__(self) -> None:
        self.key = np.zeros((0, 2), np.int64)
        self.used = np.zeros(0, np.bool_)
        self._table = np.zeros(_LEAST, np.int64)
        self._filled = 0  # places of the table that are not free
        self._spare: list[int] = []  # a heap
        self._seed = np.uint64(secrets.randbits(64))
        self._next = 0

    def __len__(self) -> int:
        return self._next - len(self._spare)

    def find(self, key: Ids) -> Ids:
        """Return the slot of each task, -1 where it has none; key (n, 2) to (n,)."""
        slot = np.empty(len(key), np.int64)
        _find(self._table, self._seed, self.key, self.used, np.ascontiguousarray(key), slot)
        return slot

    def give(self, key: Ids) -> Ids:
        """Return the slot of each task, a new one for every task that had none; key (n, 2) to (n,)."""
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
        if 2 * (self._filled + len(given)) > len(self._table):
            self._rebuild()
        else:
            _insert(self._table, self._seed, self.key, given)
            self._filled += len(given)
        slot[unknown] = self.find(key[unknown])
        return slot

    def free(self, slot: Ids) -> None:
        """Let go of slots, each once, all in use."""
        _remove(self._table, self._seed, self.key, slot)
        self.used[slot] = False
        for number in slot.tolist():
            heappush(self._spare, number)

    def all(self) -> Ids:
        """Return the slots in use, ascending."""
        return np.flatnonzero(self.used[: self._next])

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return what must be kept of it."""
        return {"key": self.key[: self._next], "used": self.used[: self._next]}

    def recall(self, memory: dict[str, NDArray[Any]]) -> None:
        """Go on from there."""
        self.key, self.used = memory["key"].copy(), memory["used"].copy()
        self._next = len(self.key)
        self._spare = np.flatnonzero(~self.used).tolist()
        heapify(self._spare)
        self._rebuild()

    def _rebuild(self) -> None:
        """Lay out a new table, of a quarter in use at most, without the places of those that left."""
        slots = self.all()
        self._table = np.zeros(max(_LEAST, 1 << (4 * len(slots)).bit_length()), np.int64)
        _insert(self._table, self._seed, self.key, slots)
        self._filled = len(slots)


@numba.njit(**LENT)
def _place(collection: int, index: int, seed: np.uint64, mask: int) -> int:
    """Return where in the table a search begins: all bits of both numbers matter, each mixed by itself."""
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
        # who tells of many mostly tells of them in the same order: no search through all of the table then
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
