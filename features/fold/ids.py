"""Reuses small integer ids after release."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any


class Numbering:
    """A number from 1 on for each key; the smallest free one is given first.

    Parameters
    ----------
    keys : iterable of key
        Those that have the numbers 1, 2, …; None where a number is free.
    """

    def __init__(self, keys: Iterable[Any] = ()) -> None:
        self._keys = list(keys)
        self._numbers = {key: number for number, key in enumerate(self._keys, 1) if key is not None}
        self._free = [number for number, key in enumerate(self._keys, 1) if key is None]
        heapify(self._free)

    def __len__(self) -> int:
        """Return how many keys have a number."""
        return len(self._numbers)

    @property
    def keys(self) -> list[Any]:
        """The key of each number up to the largest ever given; None where it is free."""
        return self._keys

    def of(self, key: Any) -> int:
        """Return the number of a key, a new one where it has none."""
        number = self._numbers.get(key)
        if number is None:
            if self._free:
                number = heappop(self._free)
                self._keys[number - 1] = key
            else:
                self._keys.append(key)
                number = len(self._keys)
            self._numbers[key] = number
        return number

    def release(self, number: int) -> None:
        """Free the number of a key."""
        del self._numbers[self._keys[number - 1]]
        self._keys[number - 1] = None
        heappush(self._free, number)
