"""Out-of-memory ends of collections, and the features read off them; kept only for collections with one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import is_first, lent
from reclaim.data.core.jit import LENT
from reclaim.data.windows import Windows
from reclaim.features.fold.task_oom import LIVES, NOT_TAKEN, write_no_history
from reclaim.features.fold.task_update import slots_of
from reclaim.features.registry import AT, SLOT_S
from reclaim.features.targets import known_by

KEEP_DAYS: Final = 14
"""Days for which a collection's history counts after its last out-of-memory end."""
KEEP_SLOTS: Final = KEEP_DAYS * 86_400 // SLOT_S
"""The same in slots of the clock."""
MOST: Final = 100_000
"""Largest number of collections kept; beyond it those whose last end is longest ago are forgotten."""
_DROP_SHARE: Final = 8
"""Collections above the bound are forgotten together with an eighth of it, so that they are rarely looked for."""

_SLOTS_PER_HOUR: Final = 3_600.0 / SLOT_S
_NEVER: Final = np.iinfo(np.int64).max
"""Age of no end: larger than any."""

RECORD: Final = np.dtype(
    [
        ("at", "i8"),  # the slot that is being filled; what is pending belongs to it
        ("last", "i8"),  # slot of the last end
        ("n", "i8"),  # ends
        ("age", "i8"),  # sum of the ages of their runs, s
        ("least", "i8"),  # least of them, s
        ("windows", "i8"),  # of all its tasks since the slot of the first end
        ("new_n", "i8"),  # the same, pending
        ("new_age", "i8"),
        ("new_least", "i8"),
        ("new_windows", "i8"),
    ],
    align=True,
)
"""Record of a collection. Sums are of integers, so the order of the windows of one slot makes no difference."""


class CollectionOoms:
    """The out-of-memory ends of any number of collections, kept up to date slot by slot."""

    def __init__(self) -> None:
        self._collection = np.zeros(0, np.int64)  # rising
        self._records = np.zeros(0, RECORD)

    def __len__(self) -> int:
        """Return how many collections have a history."""
        return len(self._collection)

    @property
    def nbytes(self) -> int:
        """Memory of the histories (bytes)."""
        return self._collection.nbytes + self._records.nbytes

    def advance(
        self,
        collection: NDArray[np.int64],
        moment: NDArray[np.int32],
        died: NDArray[np.int32],
        out: NDArray[np.float32],
        order: NDArray[np.int64] | None = None,
        place: NDArray[np.int64] | None = None,
    ) -> None:
        """Write the features of rows of collections with a history, at each row's slot, then add the rows.

        Parameters
        ----------
        collection : int64, shape (n,)
        moment : int32, shape (n,)
            Slot of the clock in which each row lies.
        died : int32, shape (n,)
            Age in seconds that a run of the row's task had reached when it ended out of memory, where the row reveals
            it; else ``task_oom.LIVES`` or ``NOT_TAKEN``.
        out : float32, shape (n, n_features)
            With the task's own features, and those of its collection as if it had no history.
        order : int64, shape (n,), optional
            The rows, those of each task in time order; as they stand if not given.
        place : int64, shape (n,), optional
            The row of ``out`` for each row; its own if not given. Of several the last one stays.
        """
        ends = died >= 0
        if ends.any():
            self._open(np.setdiff1d(collection[ends], self._collection))
        if not len(self):
            return
        asked = collection if order is None else collection[order]
        number = np.searchsorted(self._collection, asked)
        rows = np.flatnonzero(self._collection[np.minimum(number, len(self) - 1)] == asked)
        if not len(rows):
            return
        number = number[rows]
        rows = rows if order is None else order[rows]
        if (np.diff(moment[rows]) < 0).any():
            by_slot = np.argsort(moment[rows], kind="stable")
            rows, number = rows[by_slot], number[by_slot]
        _step_rows(self._records, number, rows, moment, died, rows if place is None else place[rows], out)
        if len(self) > MOST:
            self._keep(np.sort(np.argsort(self._latest(), kind="stable")[len(self) - MOST + MOST // _DROP_SHARE :]))

    def drop_idle(self, now: int) -> None:
        """Remove the histories that count no more in a slot of the clock."""
        self._keep(np.flatnonzero(self._latest() >= now - KEEP_SLOTS))

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return all that is remembered, by name."""
        return {"oom_collection": self._collection, "oom_record": self._records}

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Continue from the memory of another one, which is kept, not copied."""
        self._collection, self._records = memory["oom_collection"], memory["oom_record"]

    def _latest(self) -> NDArray[np.int64]:
        """Return the slot of each collection's last end."""
        return np.where(self._records["new_n"] > 0, self._records["at"], self._records["last"])

    def _open(self, new: NDArray[np.int64]) -> None:
        places = np.searchsorted(self._collection, new)
        self._collection = np.insert(self._collection, places, new)
        self._records = np.insert(self._records, places, np.zeros((), RECORD))

    def _keep(self, numbers: NDArray[np.int64]) -> None:
        if len(numbers) < len(self):
            self._collection, self._records = self._collection[numbers], self._records[numbers]


class OomJournal(NamedTuple):
    """Windows and ends out of memory of the collections that met one, by slot of the clock; rising by both.

    Sums of whole numbers: journals of parts of a dataset add up to that of the whole, in any order. Shape (k,) each.
    """

    collection: NDArray[np.int64]
    slot: NDArray[np.int32]
    taken: NDArray[np.int64]
    """Windows that counted."""
    ended: NDArray[np.int64]
    """Runs of which a window revealed that they ended out of memory."""
    age: NDArray[np.int64]
    """Sum of the ages that these had reached, s."""
    least: NDArray[np.int64]
    """Least of them, s; ``_NEVER`` where none ended."""

    @classmethod
    def of_rows(cls, collection: NDArray[np.int64], moment: NDArray[np.int32], died: NDArray[np.int32]) -> OomJournal:
        """Return the journal of rows, as of ``CollectionOoms.advance``, all of whose collections are kept."""
        ended = died >= 0
        age = np.where(ended, died, 0).astype(np.int64)
        return cls._added(
            collection, moment, (died != NOT_TAKEN).astype(np.int64), ended.astype(np.int64), age,
            np.where(ended, age, _NEVER),
        )  # fmt: skip

    @classmethod
    def of_windows(cls, windows: Windows) -> OomJournal:
        """Return the journal of whole tasks, sorted by task, then time, that counts their windows alone."""
        known_us = known_by(windows)
        late = np.zeros(len(windows), np.bool_)
        late[1:] = windows.end_us[1:] <= known_us[:-1]
        late[windows.task_starts()[:-1]] = False
        died = np.where(late, NOT_TAKEN, LIVES).astype(np.int32)
        return cls.of_rows(windows.collection_id, slots_of(known_us), died)

    @classmethod
    def joined(cls, parts: Sequence[OomJournal]) -> OomJournal:
        """Return the journal of all parts together."""
        if not parts:
            return cls.of_rows(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))
        return cls._added(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    @classmethod
    def _added(cls, collection: NDArray[np.int64], slot: NDArray[np.int32], *sums: NDArray[np.int64]) -> OomJournal:
        if not len(collection):
            return cls(collection, slot, *sums)
        order = np.lexsort((slot, collection))
        collection, slot = collection[order], slot[order]
        starts = np.flatnonzero(is_first(collection, slot))
        taken, ended, age = (np.add.reduceat(column[order], starts) for column in sums[:3])
        return cls(collection[starts], slot[starts], taken, ended, age, np.minimum.reduceat(sums[3][order], starts))

    def write(
        self,
        collection: NDArray[np.int64],
        moment: NDArray[np.int32],
        out: NDArray[np.float32],
        place: NDArray[np.int64] | None = None,
    ) -> None:
        """Write what ``CollectionOoms`` would, fed slot by slot, for rows of collections of the journal.

        Parameters
        ----------
        collection : int64, shape (n,)
        moment : int32, shape (n,)
            Slot of the clock in which each row lies.
        out : float32, shape (m, n_features)
            With the task's own features, and those of its collection as if it had no history.
        place : int64, shape (n,), optional
            The row of ``out`` for each row; its own if not given.
        """
        met, number = np.unique(self.collection, return_inverse=True)
        if not len(met):
            return
        starts = np.flatnonzero(is_first(collection))  # rows of a collection mostly stand together
        at = np.minimum(np.searchsorted(met, collection[starts]), len(met) - 1)
        length = np.where(met[at] == collection[starts], np.diff(starts, append=len(collection)), 0)
        rows = np.repeat(starts - np.cumsum(length) + length, length) + np.arange(length.sum())
        at = np.repeat(at, length)
        order = np.lexsort((moment[rows], at))
        rows, at = rows[order], at[order]
        _write_rows(
            np.zeros(2, RECORD), *lent(number.reshape(-1), *self[1:]), *lent(at, moment[rows]),
            lent(rows if place is None else place[rows])[0], out,
        )  # fmt: skip


def fold_collection_ooms(
    collection: NDArray[np.int64],
    starts: NDArray[np.int64],
    moment: NDArray[np.int32],
    died: NDArray[np.int32],
    out: NDArray[np.float32],
) -> None:
    """Write the features of collections at the last row of each task: what ``CollectionOoms`` would, fed slot by slot.

    Parameters
    ----------
    collection : int64, shape (n,)
    starts : int64, shape (n_tasks + 1,)
        ``windows.task_starts()``.
    moment, died : int32, shape (n,)
        As for ``CollectionOoms.advance``; the moments of a task never fall.
    out : float32, shape (n_tasks, n_features)
        As for ``OomJournal.write``.
    """
    of_task = collection[starts[:-1]]
    mine = np.flatnonzero(np.isin(of_task, np.unique(collection[died >= 0])))
    if not len(mine):
        return
    length = np.diff(starts)[mine]
    rows = np.arange(length.sum()) + np.repeat(starts[mine] - np.cumsum(length) + length, length)
    journal = OomJournal.of_rows(collection[rows], moment[rows], died[rows])
    journal.write(of_task[mine], moment[starts[mine + 1] - 1], out, mine)


@numba.njit(**LENT)
def _write_rows(
    record: Any,  # (2,) RECORD: one to work in, one blank
    number: Any,  # (k,) int64, of each entry's collection, rising
    slot: Any,  # (k,) int32, rising within a collection
    taken: Any,  # (k,) int64
    ended: Any,  # (k,) int64
    age: Any,  # (k,) int64
    least: Any,  # (k,) int64
    asked: Any,  # (n,) int64, the number of each row's collection, rising
    moment: Any,  # (n,) int32, rising within a collection
    place: Any,  # (n,) int64
    out: Any,  # (m, n_features) float32, written
) -> None:
    e, current, g = 0, -1, record[0]
    for i in range(len(asked)):
        if asked[i] != current:
            current = asked[i]
            record[0] = record[1]  # a blank one
            while e < len(number) and number[e] < current:
                e += 1
        while e < len(number) and number[e] == current and slot[e] < moment[i]:
            _close(g, int(slot[e]))
            if ended[e] > 0:
                g.new_least = least[e] if g.new_n == 0 else min(g.new_least, least[e])
                g.new_n += ended[e]
                g.new_age += age[e]
            if g.n > 0:
                g.new_windows += taken[e]
            e += 1
        _close(g, int(moment[i]))
        _write(g, out, place[i])


@numba.njit(**LENT)
def _step_rows(
    records: Any,  # (n_collections,) RECORD, changed
    number: Any,  # (k,) int64, of each row's collection
    rows: Any,  # (k,) int64
    moment: Any,  # (n,) int32
    died: Any,  # (n,) int32
    place: Any,  # (k,) int64; below 0, no features are written
    out: Any,  # (n, n_features) float32, written
) -> None:
    for k in range(len(rows)):
        g, i = records[number[k]], rows[k]
        at = max(int(moment[i]), g.at)
        _close(g, at)
        if place[k] >= 0:
            _write(g, out, place[k])
        if died[i] >= 0:
            g.new_least = died[i] if g.new_n == 0 else min(g.new_least, died[i])
            g.new_n += 1
            g.new_age += died[i]
        if died[i] != NOT_TAKEN and g.n > 0:
            g.new_windows += 1


@numba.njit(**LENT)
def _close(
    g: Any,  # a record of RECORD, changed
    at: int,
) -> None:
    """Count what is pending of slots before ``at``; a history whose last end is too long ago begins again."""
    if g.at >= at:
        return
    if g.new_n > 0:
        g.least = g.new_least if g.n == 0 else min(g.least, g.new_least)
        g.n += g.new_n
        g.age += g.new_age
        g.last = g.at
    g.windows += g.new_windows
    g.new_n = g.new_age = g.new_least = g.new_windows = 0
    if at - g.last > KEEP_SLOTS:
        g.n = g.age = g.least = g.windows = 0
    g.at = at


@numba.njit(**LENT)
def _write(
    g: Any,  # a record of RECORD
    out: Any,  # (n, n_features) float32, written
    i: int,
) -> None:
    if g.n == 0:
        write_no_history(out, i)
        return
    age = out[i, AT.age]
    out[i, AT.collection_ooms] = math.log2(1.0 + g.n)
    out[i, AT.collection_oom_since] = math.log2(1.0 + (g.at - g.last) / _SLOTS_PER_HOUR)
    out[i, AT.collection_oom_age] = age - math.log2(1.0 + g.age / g.n / 3_600.0)
    out[i, AT.collection_oom_age_least] = age - math.log2(1.0 + g.least / 3_600.0)
    out[i, AT.collection_oom_rate] = math.log2(g.n / (1.0 + g.windows / _SLOTS_PER_HOUR))
