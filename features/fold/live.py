"""Features of tasks that are served live: windows may come late within a bound, and tasks come and go."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import (
    blank_records,
    blank_rows,
    lent,
    room_for,
)
from reclaim.data.core.parallel import in_parts, parts_of
from reclaim.data.core.state import MADE_BY, adopt
from reclaim.data.errors import ConfigError
from reclaim.data.windows import Cell, Windows, empty_windows
from reclaim.features.fold.batch import check_slots, fold_columns, made_by
from reclaim.features.fold.collection_ooms import CollectionOoms
from reclaim.features.fold.live_kernel import (
    LATE,
    PENDING,
    REPEATED,
    advance_tasks,
    classify,
    settle_all,
)
from reclaim.features.fold.live_record import KEPT, MOST_ROWS, ROW, Histograms, words_of
from reclaim.features.fold.task_record import STATE
from reclaim.features.fold.task_update import N_LEVELS
from reclaim.features.registry import N_FEATURES, PIPELINE_VERSION, SLOT_S

_SLOTS_A_DAY: Final = 86_400 // SLOT_S
_OF_CELL: Final = re.compile(r"largest_machine=\([^)]*\), monday_us=-?\d+, ")
"""The cell in ``batch.made_by``: features are read by it, and no record depends on it."""
_TASKS_TO_A_ROW: Final = 8
"""Number of tasks for which a row of histograms is reserved at once: few need a new one, except in a cell's first
hour."""
HELD: Final = np.dtype(
    [*((name, a.dtype, a.shape[1:]) for name, a in fold_columns(empty_windows())._asdict().items()), ("held", "?")]
)
"""A window that is held, or room for one: what a fold reads of it. There are ``PENDING`` of a task, and none where no
window is taken late."""

Slots = NDArray[np.int64]


class TolerantState:
    """The features of any number of tasks, kept up to date with windows in any order that a bound allows.

    In time order it gives what ``FeatureState`` gives, to the bit. A window that comes after a later one of its own
    task counts for the task as if it had come in time, to the bit, and for others from the current slot of the clock
    on. Therefore the record of a task lacks its last few windows, which are held next to it. The record after all of
    them is computed for each window and not kept: it would double the memory of a task.

    Parameters
    ----------
    cell : Cell
        Facts of the tasks' cell.
    lateness_s : float
        How much earlier than its task's last window a window may end to be taken, in seconds, as long as no more than
        ``PENDING`` windows came before it that end later; 0 takes none and spends no memory on it.
    threads : int
        Threads for large calls; the numbers do not depend on it.
    """

    def __init__(self, cell: Cell, lateness_s: float, threads: int = 1) -> None:
        self._cell = cell
        self._lateness_us = int(lateness_s * 1_000_000)
        self._threads = threads
        self._begin()

    def _begin(self) -> None:
        self._tasks = 0  # slots ever seen
        self._day = 0
        self._settled = blank_records((0,), KEPT)  # without the windows that are held
        self._histograms = Histograms()
        self._pending = blank_records((0,), HELD)
        self._collections = CollectionOoms()

    def classify(self, slot: Slots, windows: Windows) -> NDArray[np.uint8]:
        """Return the kind of each window for its task, without changing anything; uint8, shape (n,).

        ``NEW``: it ends after the task's last one. ``LATE``: before it, within the bound. Both will be taken.
        ``REPEATED``: one that ends at the same µs is among the last 24 taken, or precedes it in this call and will
        be taken. ``TOO_LATE``: it is beyond the bound, or more than ``PENDING`` windows that end later came before it.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row, from 0; it need not have been seen.
        windows : Windows
            In any order, any number of a task.
        """
        check_slots(slot, windows)
        kind = np.empty(len(slot), np.uint8)
        tasks, end_us = lent(slot, windows.end_us)
        classify(self._settled, self._pending, self._tasks, tasks, end_us, self._lateness_us, kind)
        order = _in_time(slot, end_us)
        ours, ends = slot[order], end_us[order]
        again = order[1:][(np.diff(ours) == 0) & (np.diff(ends) == 0)]
        kind[again[kind[again] <= LATE]] = REPEATED
        return kind

    def advance(self, slot: Slots, windows: Windows) -> tuple[Slots, NDArray[np.float32], NDArray[np.int64], Slots]:
        """Take windows that ``classify`` called new or late.

        Parameters
        ----------
        slot, windows
            As for ``classify``. How they are cut into calls makes no difference as long as calls come in time order, as
            for ``FeatureState.advance``; nor does their order within a call.

        Returns
        -------
        slots : int64, shape (k,)
            The tasks, in rising order.
        x : float32, shape (k, n_features)
            The features of each after its last window.
        end_us : int64, shape (k,)
            The end of that window.
        row : int64, shape (k,)
            Its row in this call; -1 where it came in an earlier one.

        Raises
        ------
        ValueError
            A row is one that ``classify`` refuses; the state must not be used any more.
        """
        check_slots(slot, windows)
        order = _in_time(slot, windows.end_us)
        first = np.flatnonzero(np.diff(slot[order], prepend=-1))
        slots, edges = slot[order[first]], np.append(first, len(slot))
        n, k = len(slot), len(slots)
        self._make_room(int(slots[-1]) + 1 if k else 0)
        x = np.empty((k, N_FEATURES), np.float32)
        end_us, row, refused = np.empty(k, np.int64), np.empty(k, np.int64), np.zeros(k, np.bool_)
        place, moment, died = np.empty(n, np.int64), np.empty(n, np.int32), np.empty(n, np.int32)
        columns, largest = fold_columns(windows), np.array(self._cell.largest_machine)

        def advance(low: int, high: int, *rows: NDArray[Any]) -> int:
            room = np.zeros(2, STATE)
            done: int = advance_tasks(
                *rows, self._pending, room, words_of(room), slots, edges, order, low, high, columns,
                self._lateness_us, largest, self._cell.monday_us, x, end_us, row, refused, place, moment, died,
                np.empty(N_LEVELS),
            )  # fmt: skip
            return done

        self._in_rounds(advance, k)
        if refused.any():
            raise ValueError(
                f"windows of {refused.sum()} tasks are repeated or too late: pass those that classify accepts"
            )
        self._collections.advance(windows.collection_id, moment, died, x, order, place)
        day = int(moment.max(initial=0)) // _SLOTS_A_DAY
        if day > self._day:
            self._day = day
            self._collections.drop_idle(day * _SLOTS_A_DAY)
        return slots, x, end_us, row

    def _in_rounds(self, work: Callable[..., int], n: int) -> None:
        """Call ``work`` for all of n tasks in threads, with rows for new octaves, again until no task lacked them."""
        parts = parts_of(n, self._threads)
        ends = [(part + 1) * n // parts for part in range(parts)]
        begun = [part * n // parts for part in range(parts)]
        while begun != ends:
            numbers = self._histograms.lend(parts * (n // parts // _TASKS_TO_A_ROW + MOST_ROWS))
            stacks, taken = np.split(numbers, parts), np.zeros((parts, 1), np.int64)
            in_parts(partial(self._round, work, begun, ends, stacks, taken), n, parts)
            left = [stack[n_taken:] for stack, (n_taken,) in zip(stacks, taken.tolist(), strict=True)]
            self._histograms.take_back(np.concatenate(left))

    def _round(
        self, work: Callable[..., int], begun: list[int], ends: list[int], stacks: list[NDArray[np.int32]],
        taken: NDArray[np.int64], part: int, _: int,
    ) -> None:  # fmt: skip
        """Continue one part from where it stopped, as far as its stack of free rows lasts."""
        records, rows = self._settled, self._histograms.rows
        begun[part] = work(begun[part], ends[part], words_of(records), records, rows, stacks[part], taken[part])

    def forget(self, slots: Slots) -> None:
        """Release the slots of tasks that have ended; their ends out of memory still count for their collections."""
        slots = slots[slots < self._tasks]
        numbers = self._settled["rows"][slots].reshape(-1)
        self._histograms.release(numbers[numbers > 0])
        blank_rows(self._settled, slots)
        if self._lateness_us:
            self._pending.reshape(-1, PENDING)["held"][slots] = False

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return all that is remembered, by name, without a copy: the next ``advance`` or ``forget`` changes it.

        Records are copied fast only as bytes (``data.core.arrays.raw``).
        """
        late = self._tasks * PENDING if self._lateness_us else 0
        octaves, free = self._histograms.memory()
        return {
            MADE_BY: np.array(self._made_by),
            "day": np.array(self._day),
            "task": self._settled[: self._tasks],
            "histograms": octaves,
            "histograms_free": free,
            "pending": self._pending[:late],
            **self._collections.memory(),
        }

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Go on from what another one remembered, to the bit; its bound of lateness and its cell may have been others.

        Features are those of this cell from the next window of a task on. The arrays are kept, not copied: the caller
        gives them up.

        Raises
        ------
        ConfigError
            It was made by other code.
        """
        theirs = str(memory[MADE_BY]) if MADE_BY in memory else "something unknown"
        if _OF_CELL.sub("", theirs) != _OF_CELL.sub("", self._made_by):
            raise ConfigError(
                f"this memory was saved by {theirs}, and {self._made_by} cannot continue it: start afresh"
            )
        like = TolerantState(self._cell, 0.0).memory()  # the expected layout of each array
        ours = {name: adopt(name, array, memory) for name, array in like.items() if name != MADE_BY}
        self._begin()
        self._settled, self._day = ours["task"], int(ours["day"])
        self._histograms.recall(ours["histograms"], ours["histograms_free"])
        if self._lateness_us:
            self._pending = ours["pending"]
        elif len(pending := ours["pending"]):

            def settle(low: int, high: int, *rows: NDArray[Any]) -> int:
                room = np.zeros(2, STATE)
                done: int = settle_all(*rows, pending, room, words_of(room), np.empty(N_LEVELS), low, high)
                return done

            self._in_rounds(settle, len(self._settled))
        self._make_room(len(self._settled))
        self._collections.recall(ours)

    @property
    def bytes_per_task(self) -> int:
        """Bytes that a task takes, without its share of what is kept of its collection.

        Histograms count with their mean.
        """
        late = PENDING * HELD.itemsize if self._lateness_us else 0
        of_histograms = len(self._histograms) * ROW.itemsize // max(self._tasks, 1)
        return KEPT.itemsize + of_histograms + late

    def _make_room(self, tasks: int) -> None:
        self._tasks = max(self._tasks, tasks)
        self._settled = room_for(self._settled, tasks)
        if self._lateness_us:
            self._pending = room_for(self._pending, tasks * PENDING)

    @property
    def _made_by(self) -> str:
        return f"tolerant {made_by(self._cell)} of pipeline {PIPELINE_VERSION}, holding {PENDING}"


def _in_time(slot: Slots, end_us: NDArray[np.int64]) -> Slots:
    """Return the rows task by task in rising order, those of a task in time order, else as they stand."""
    if (np.diff(slot) > 0).all():
        return np.arange(len(slot))
    order = np.argsort(slot, kind="stable")
    return order if (np.diff(slot[order]) > 0).all() else np.lexsort((end_us, slot))
