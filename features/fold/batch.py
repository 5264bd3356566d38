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
from reclaim.data.windows import Cell, Windows, demand, peak_cpu
from reclaim.features.fold.related import RelatedState
from reclaim.features.fold.task_read import write
from reclaim.features.fold.task_record import N_CHANNELS, N_SIGNALS, RECENT_LENGTH, STATE, FoldColumns
from reclaim.features.fold.task_update import N_LEVELS, publish_to_group, take
from reclaim.features.registry import CONTEXT, CONTEXT_WINDOWS, feature_names

_BLOCK_BITS: Final = 6
"""Log2 of how many neighbouring slots go to the same thread: taken one by one in turn, two threads wrote into the same
cache lines, which took two thirds more time."""


class FeatureState:
    """The features of any number of tasks, kept up to date window by window.

    Parameters
    ----------
    cell : Cell
        What the tasks' cell is like as a whole.
    threads : int
        Threads for large calls; the numbers do not depend on it.
    related : bool
        Whether a row has the features of related tasks, too.
    """

    def __init__(self, cell: Cell = Cell(), threads: int = 1, *, related: bool = False) -> None:  # noqa: B008 - frozen
        self._cell = cell
        self._threads = threads
        self._state = np.zeros(0, STATE)
        self._related = RelatedState(threads) if related else None
        self._width = len(feature_names(related=related))

    def advance(self, slot: NDArray[np.int64], windows: Windows) -> NDArray[np.float32]:
        """Take windows and return the features right after each; float32, shape (n, n_features).

        How histories are cut into calls makes no difference, to the bit, as long as calls come in time order: no window
        lies in an earlier slot of the clock (``registry.SLOT_S``) than one that an earlier call held. One that comes
        later than that counts for its own task as if it had come in time, for others from the present slot on.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row, from 0.
        windows : Windows
            Those of one task in time order. One that ends no later than the last one seen is late or repeated: it
            changes nothing, and its row is that of the state as it stands.
        """
        if len(slot) != len(windows) or (len(slot) and slot.min() < 0):
            raise ValueError(f"expected a slot from 0 on for each of {len(windows)} windows, got {len(slot)} slots")
        self._state = room_for(self._state, int(slot.max(initial=-1)) + 1)
        out = np.empty((len(windows), self._width), np.float32)
        moment, share = room_to_publish(len(windows), self._related is not None)
        columns, (task,) = fold_columns(windows), lent(slot)
        largest, monday_us = np.array(self._cell.largest_machine), self._cell.monday_us

        def advance(part: int, parts: int) -> None:
            _advance(
                self._state, task, part, parts, columns, largest, monday_us, out, moment, share, np.empty(N_LEVELS)
            )  # fmt: skip

        in_parts(advance, len(windows), self._threads)
        if self._related is not None:
            self._related.advance(slot, windows, moment, share, out)
        return out

    def context(self, slot: NDArray[np.int64], limit: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the recent windows of tasks, oldest first; float32, shape (n, CONTEXT_WINDOWS, len(CONTEXT)).

        NaN before a task's first window, and where the trace has nothing.

        Parameters
        ----------
        slot : int64, shape (n,)
        limit : float64, shape (n, n_resources)
            What to divide by.
        """
        out = np.full((len(slot), CONTEXT_WINDOWS, N_CHANNELS), np.nan, np.float32)
        count = self._state["count"][slot]
        for back in range(CONTEXT_WINDOWS):
            has = count > back
            of, ring = slot[has], (count[has] - 1 - back) % CONTEXT_WINDOWS
            recent, rest = self._state["recent"][of, ring], self._state["context"][of, ring]
            window = np.concatenate([recent[:, :N_SIGNALS], rest, recent[:, N_SIGNALS:]], axis=1)
            out[has, CONTEXT_WINDOWS - 1 - back] = window
        return out / divisors(limit)[:, None, :]

    def state(self) -> dict[str, NDArray[Any]]:
        """Return all that is remembered, as plain arrays for ``np.savez``."""
        return state_of(self._made_by, self._memory())

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what another one remembered, to the bit.

        Raises
        ------
        ConfigError
            It was made for another cell, or by other code.
        """
        memory = memory_of(self._made_by, self._memory(), state)
        self._state = memory["task"]
        if self._related is not None:
            self._related.recall(memory)

    def _memory(self) -> dict[str, NDArray[Any]]:
        return {"task": self._state, **({} if self._related is None else self._related.memory())}

    @property
    def _made_by(self) -> str:
        return made_by(self._cell, related=self._related is not None)


def made_by(cell: Cell, *, related: bool) -> str:
    """Return what memory of features is marked by: the cell and the choice of features."""
    machine = ", ".join(str(float(most)) for most in cell.largest_machine)
    return f"features(largest_machine=({machine}), monday_us={cell.monday_us}, related={related})"


def room_to_publish(n: int, related: bool) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return uninitialised ``moment`` (n,) and ``share`` (n, n_signals); empty where no feature needs them."""
    n = n if related else 0
    return np.empty(n, np.int32), np.empty((n, N_SIGNALS), np.int32)


def divisors(limit: NDArray[Any]) -> NDArray[np.float32]:
    """Return what each channel of the context is divided by; limit (n, n_resources) → float32, (n, len(CONTEXT)).

    1 where ``registry.CONTEXT`` names no limit; NaN where the limit is unknown or, in float32, zero.
    """
    limit = limit.astype(np.float32)
    positive, one = np.where(limit > 0, limit, np.float32(np.nan)), np.ones(len(limit), np.float32)
    return np.stack([one if channel.over is None else positive[:, channel.over] for channel in CONTEXT], axis=1)


def fold_columns(windows: Windows) -> FoldColumns:
    """Return the columns that a fold reads."""
    signals = np.column_stack([demand(windows), peak_cpu(windows)])
    columns = (signals if name == "signals" else getattr(windows, name) for name in FoldColumns._fields)
    return FoldColumns(*lent(*columns))


def fold_tasks(
    windows: Windows,
    starts: NDArray[np.int64],
    cell: Cell,
    first: int,
    x: NDArray[np.float32],
    context: NDArray[np.float32],
    last: NDArray[np.int64],
    known_us: NDArray[np.int64],
    moment: NDArray[np.int32],
    share: NDArray[np.int32],
) -> None:
    """Fold whole histories, task by task in one record, and write what ``FeatureState`` would give after each window.

    Parameters
    ----------
    windows : Windows
        ``n`` rows, sorted by task, then time.
    starts : int64, shape (n_tasks + 1,)
        ``windows.task_starts()``.
    cell : Cell
    first : int
        Where these rows begin among those of the whole dataset.
    x : float32, shape (n, n_features)
        Its first ``FIRST_RELATED`` columns are written.
    context : float32, shape (len(CONTEXT), rows of the whole dataset)
        The windows that were taken, each task's from the place of its first row on; NaN behind them.
    last : int64, shape (n,)
        Column of ``context`` of the last window taken.
    known_us : int64, shape (n,)
        Its end: what t is at the row, its own window's end unless that came late.
    moment, share : int32, shapes (n,) and (n, n_signals)
        Slot of the clock, and the signals for ``related``; not written where they are empty.
    """
    _fold_tasks(
        np.zeros(2, STATE), starts, fold_columns(windows), np.array(cell.largest_machine), cell.monday_us, first,
        x, context, last, known_us, moment, share, np.empty(N_LEVELS),
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
    moment: Any,  # (n,) int32, written; (0,) without related tasks
    share: Any,  # (n, N_SIGNALS) int32, written
    shape: Any,  # (N_LEVELS,) float64, written
) -> None:
    for i in range(len(slot)):
        if (slot[i] >> _BLOCK_BITS) % parts != part:
            continue
        s = state[slot[i]]
        taken = s.count == 0 or columns.end_us[i] > s.end_us
        if taken:
            take(s, columns, shape, i)
        write(s, columns, i, largest, monday_us, out, i)
        publish_to_group(s.end_us, taken, columns, moment, share, i)


@numba.njit(**LENT)
def _fold_tasks(
    state: Any,  # (2,) STATE: one to work in, one blank
    starts: Any,  # (n_tasks + 1,) int64
    columns: Any,  # FoldColumns of n rows
    largest: Any,  # (R,) float64
    monday_us: int,
    first: int,
    out: Any,  # (n, n_features) float32, written
    context: Any,  # (N_CHANNELS, rows of the dataset) float32, written
    last: Any,  # (n,) int64, written
    known_us: Any,  # (n,) int64, written
    moment: Any,  # (n,) int32, written; (0,) without related tasks
    share: Any,  # (n, N_SIGNALS) int32, written
    shape: Any,  # (N_LEVELS,) float64, written
) -> None:
    for task in range(len(starts) - 1):
        state[0] = state[1]  # a blank one
        s = state[0]
        column = first + starts[task] - 1
        for i in range(starts[task], starts[task + 1]):
            taken = s.count == 0 or columns.end_us[i] > s.end_us
            if taken:
                take(s, columns, shape, i)
                column += 1
                ring = (s.count - 1) % CONTEXT_WINDOWS
                for j in range(N_SIGNALS):
                    context[j, column] = s.recent[ring, j]
                for c in range(N_SIGNALS, N_CHANNELS - 1):
                    context[c, column] = s.context[ring, c - N_SIGNALS]
                context[N_CHANNELS - 1, column] = s.recent[ring, RECENT_LENGTH]
            write(s, columns, i, largest, monday_us, out, i)
            publish_to_group(s.end_us, taken, columns, moment, share, i)
            last[i] = column
            known_us[i] = s.end_us
        for c in range(N_CHANNELS):
            context[c, column + 1 : first + starts[task + 1]] = np.nan
