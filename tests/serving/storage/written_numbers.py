"""Writes the simplest state into a store, and reads it back: numbers from 1, one record each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from reclaim.data.errors import StoreError
from reclaim.serving.storage.store import Store


class Numbers:
    """The simplest state: the list of the written numbers 1, 2, …, one record each."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = Store.open(folder, state_version=1, **options)
        arrays = self.store.recovered.arrays
        self.taken: list[int] = [] if arrays is None else arrays["taken"].tolist()
        for record in self.store.records():
            assert record.kind == "number"
            self.taken.append(int(bytes(record.payload)))
            assert record.sequence == self.taken[-1]

    def write(self, count: int = 1) -> None:
        """Append that many numbers, each of them durable."""
        for _ in range(count):
            number = len(self.taken) + 1
            self.store.append("number", str(number).encode())
            self.taken.append(number)
            self.store.sync()

    def save(self) -> None:
        """Save a snapshot of the numbers."""
        self.store.save(self.store.roll(), {"taken": np.array(self.taken, np.int64)}, {"count": len(self.taken)})


def written(folder: Path, *runs: int) -> None:
    """Write so many numbers, with a snapshot between one run and the next."""
    numbers = Numbers(folder)
    for k, count in enumerate(runs):
        if k:
            numbers.save()
        numbers.write(count)
    numbers.store.close()


def after(folder: Path, **options: Any) -> tuple[list[int], list[str]]:
    """Return the numbers and the notes that a folder opens with."""
    numbers = Numbers(folder, **options)
    numbers.store.close()
    return numbers.taken, numbers.store.recovered.notes


def attempt(folder: Path) -> tuple[list[int], list[str], str]:
    """Return the same, or why it is refused."""
    try:
        return *after(folder), ""
    except StoreError as error:
        return [], [], str(error)


def upto(last: int) -> list[int]:
    return list(range(1, last + 1))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}
