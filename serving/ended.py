"""Tasks that were told to have ended, and when, so that a window from before its end raises nobody from the dead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.features.arrays import room_for
from reclaim.serving.slots import Slots

Ids = NDArray[np.int64]

KEPT_US: Final = 3_600_000_000
"""For how long an end is remembered at least, in µs of the cell's clock: collectors hold back an hour at worst."""


class Ended:
    """When tasks ended that have left; the oldest go when there is no room.

    Parameters
    ----------
    most : int
        Ends remembered at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._slots = Slots()
        self._at_us = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, key: Ids, ended_us: Ids) -> None:
        """Remember ends, shapes (n, 2) and (n,); the later one stands."""
        slot = self._slots.give(key)
        self._at_us = room_for(self._at_us, len(self._slots.key))
        np.maximum.at(self._at_us, slot, ended_us)
        if len(self) > self._most:
            used = self._slots.all()
            self._drop(used[np.argsort(self._at_us[used], kind="stable")[: len(self) - self._most]])

    def before(self, key: Ids, start_us: Ids) -> NDArray[np.bool_]:
        """Return which windows began before their task ended, shape (n,); key (n, 2)."""
        if len(self) == 0:
            return np.zeros(len(key), np.bool_)
        slot = self._slots.find(key)
        return (slot >= 0) & (start_us < self._at_us[slot])

    def forget(self, before_us: int) -> None:
        """Let go of ends from before a time."""
        used = self._slots.all()
        self._drop(used[self._at_us[used] < before_us])

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return what must be kept of it."""
        used = self._slots.all()
        return {"key": self._slots.key[used], "at_us": self._at_us[used]}

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Go on from there."""
        self._slots, self._at_us = Slots(), np.zeros(0, np.int64)
        self.add(memory["key"], memory["at_us"])

    def _drop(self, slot: Ids) -> None:
        self._at_us[slot] = 0
        self._slots.free(slot)
