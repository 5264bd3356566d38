"""Features of any number of tasks, in batch and live: one fold for whole histories and single windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import lent, room_for
from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.core.state import memory_of, state_of
from reclaim.data.windows import Cell, Windows
from reclaim.features.fold.collection_ooms import CollectionOoms
from reclaim.features.fold.task_read import write
from reclaim.features.fold.task_record import STATE, FoldColumns
from reclaim.features.fold.task_update import N_LEVELS, publish, take, take_life
from reclaim.features.registry import N_FEATURES

_BLOCK_BITS: Final = 6
"""Log2 of how many neighbouring slots go to the same thread: taken one by one in turn, two threads wrote into the same
cache lines, which took two thirds more time."""


class FeatureState:
    """The features of any number of tasks, kept up to date window by window.

    Parameters
    ----------
    cell : Cell
        Facts of the tasks' cell.
    threads : int
        Threads for large calls; the numbers do not depend on it.
    """

    def __init__(self, cell: Cell = Cell(), threads: int = 1) -> None:  # noqa: B008 - frozen
        self._cell = cell
        self._threads = threads
        self._state = np.zeros(0, STATE)
        self._collections = CollectionOoms()

    def advance(self, slot: NDArray[np.int64], windows: Windows) -> NDArray[np.float32]:
        """Take windows and return the features right after each; float32, shape (n, n_features).

        How histories are cut into calls makes no difference, to the bit, as long as calls come in time order: no window
        lies in an earlier slot of the clock (``registry.SLOT_S``) than one that an earlier call held. One that comes
        later than that counts for its own task as if it had come in time, for others from the current slot on.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row, from 0.
        windows : Windows
            Those of one task in time order. One that ends no later than the last one seen is late or repeated: it
            changes nothing, and its row is that of the state as it stands.
        """
        check_slots(slot, windows)
        self._state = room_for(self._state, int(slot.max(initial=-1)) + 1)
        out = np.empty((len(windows), N_FEATURES), np.float32)
        moment, died = np.empty(len(windows), np.int32), np.empty(len(windows), np.int32)
        columns, (task,) = fold_columns(windows), lent(slot)
        largest, monday_us = np.array(self._cell.largest_machine), self._cell.monday_us

        def advance(part: int, parts: int) -> None:
            _advance(
                self._state, task, part, parts, columns, largest, monday_us, out, moment, died, np.empty(N_LEVELS)
            )  # fmt: skip

        in_parts(advance, len(windows), self._threads)
        self._collections.advance(windows.collection_id, moment, died, out)
        return out

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all that is remembered, as plain arrays for ``np.savez``."""
        return state_of(self._made_by, self._memory())

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from what another one remembered, to the bit.

        Raises
        ------
        ConfigError
            It was made for another cell, or by other code.
        """
        memory = memory_of(self._made_by, self._memory(), state)
        self._state = memory["task"]
        self._collections.recall(memory)

    def _memory(self) -> dict[str, NDArray[Any]]:
        return {"task": self._state, **self._collections.memory()}

    @property
    def _made_by(self) -> str:
        return made_by(self._cell)


def made_by(cell: Cell) -> str:
    """Return the mark of a memory of features: the cell.

    It ends as it did when features of related tasks were optional, so that memory without them stays valid.
    """
    machine = ", ".join(str(float(most)) for most in cell.largest_machine)
    return f"features(largest_machine=({machine}), monday_us={cell.monday_us}, related=False)"


def check_slots(slot: NDArray[np.int64], windows: Windows) -> None:
    """Raise ValueError where there is not a slot from 0 on for each window."""
    if len(slot) != len(windows) or (len(slot) and slot.min() < 0):
        raise ValueError(f"expected a slot from 0 on for each of {len(windows)} windows, got {len(slot)} slots")


def fold_columns(windows: Windows) -> FoldColumns:
    """Return the columns that a fold reads."""
    return FoldColumns(*lent(*(getattr(windows, name) for name in FoldColumns._fields)))


def fold_tasks(
    windows: Windows,
    starts: NDArray[np.int64],
    cell: Cell,
    x: NDArray[np.float32],
    known_us: NDArray[np.int64],
    moment: NDArray[np.int32],
    died: NDArray[np.int32],
    place: NDArray[np.int64] | None = None,
) -> None:
    """Fold whole histories, task by task in one record, and write what ``FeatureState`` would give after each window.

    Parameters
    ----------
    windows : Windows
        ``n`` rows, sorted by task, then time.
    starts : int64, shape (n_tasks + 1,)
        ``windows.task_starts()``.
    cell : Cell
    x : float32, shape (m, n_features)
        Written; the features of the collection as of one without a history.
    known_us : int64, shape (n,)
        End of the last window taken: what t is at the row, its own window's end unless that came late.
    moment, died : int32, shape (n,)
        Slot of the clock, and out-of-memory ends, as for ``CollectionOoms.advance``; written.
    place : int64, shape (n,), or None
        Row of ``x`` for each window, below 0 for one whose features are not asked for; None: its own.
    """
    place = np.arange(len(windows)) if place is None else place
    _fold_tasks(
        np.zeros(2, STATE), starts, fold_columns(windows), np.array(cell.largest_machine), cell.monday_us,
        *lent(place), x, known_us, moment, died, np.empty(N_LEVELS),
    )  # fmt: skip


@numba.njit(**LENT)
def _advance(
    state: Any,  # (n_tasks,) STATE, changed
    slot: Any,  # (n,) int64
    part: int,
    parts: int,
    columns: Any,  # FoldColumns of n rows
    largest: Any,  # (R,) float64
    monday_us: int,
    out: Any,  # (n, n_features) float32, written
    moment: Any,  # (n,) int32, written
    died: Any,  # (n,) int32, written
    shape: Any,  # (N_LEVELS,) float64, written
) -> None:
    for i in range(len(slot)):
        if (slot[i] >> _BLOCK_BITS) % parts != part:
            continue
        s = state[slot[i]]
        taken, ooms = s.count == 0 or columns.end_us[i] > s.end_us, s.ooms
        if taken:
            take(s, columns, shape, i)
        write(s, columns, i, largest, monday_us, out, i)
        publish(s, ooms, taken, moment, died, i)


@numba.njit(**LENT)
def _fold_tasks(
    state: Any,  # (2,) STATE: one to work in, one blank
    starts: Any,  # (n_tasks + 1,) int64
    columns: Any,  # FoldColumns of n rows
    largest: Any,  # (R,) float64
    monday_us: int,
    place: Any,  # (n,) int64
    out: Any,  # (m, n_features) float32, written
    known_us: Any,  # (n,) int64, written
    moment: Any,  # (n,) int32, written
    died: Any,  # (n,) int32, written
    shape: Any,  # (N_LEVELS,) float64, written
) -> None:
    for task in range(len(starts) - 1):
        state[0] = state[1]  # a blank one
        s = state[0]
        last = starts[task + 1] - 1  # whose features are asked for
        while last >= starts[task] and place[last] < 0:
            last -= 1
        for i in range(starts[task], starts[task + 1]):
            taken, ooms = s.count == 0 or columns.end_us[i] > s.end_us, s.ooms
            if taken and i <= last:
                take(s, columns, shape, i)
            elif taken:
                take_life(s, columns, i)
            if place[i] >= 0:
                write(s, columns, i, largest, monday_us, out, place[i])
            publish(s, ooms, taken, moment, died, i)
            known_us[i] = s.end_us
