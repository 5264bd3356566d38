"""Out-of-memory ends of collections, and the features read off them; kept for collections that met one alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import lent
from reclaim.data.core.jit import LENT
from reclaim.features.fold.related import Tasks
from reclaim.features.fold.task_oom import NOT_TAKEN, write_no_history
from reclaim.features.fold.task_record import CODE
from reclaim.features.registry import AT, SLOT_S

KEEP_DAYS: Final = 14
"""Days after its last out-of-memory end for which a collection's history counts."""
KEEP_SLOTS: Final = KEEP_DAYS * 86_400 // SLOT_S
"""The same in slots of the clock."""
MOST: Final = 100_000
"""Collections that are kept at most; beyond it those whose last end is longest ago are forgotten."""
_DROP_SHARE: Final = 8
"""Collections above the bound are forgotten together with an eighth of it, so that they are rarely looked for."""

_SLOTS_PER_HOUR: Final = 3_600.0 / SLOT_S

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
        CODE,
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
        """Write the features of rows of collections with a history, as of each row's slot, then add the rows.

        Parameters
        ----------
        collection : int64, shape (n,)
        moment : int32, shape (n,)
            Slot of the clock in which each row lies.
        died : int32, shape (n,)
            Age in seconds that a run of the row's task had reached when it ended out of memory, where the row brings
            that to light; else ``task_oom.LIVES`` or ``NOT_TAKEN``.
        out : float32, shape (n, n_features)
            With the task's own features, and those of its collection as of one without a history.
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
        """Go on from the memory of another one, which is kept, not copied."""
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


def fold_collection_ooms(
    tasks: Tasks,
    moment: NDArray[np.int32],
    died: NDArray[np.int32],
    out: NDArray[np.float32],
    *,
    last_only: bool = False,
) -> None:
    """Write the features of a whole dataset's collections: what ``CollectionOoms`` would, fed slot by slot.

    Parameters
    ----------
    tasks : Tasks
        In the order of their rows.
    moment, died, out
        Of all rows, as for ``CollectionOoms.advance``; the moments of a task never fall.
    last_only : bool
        Whether ``out`` has a row for each task, for its last row, instead of one for each row.
    """
    ends = np.flatnonzero(died >= 0)
    met = np.unique(tasks.collection[np.searchsorted(tasks.start, ends, side="right") - 1])
    mine = np.flatnonzero(np.isin(tasks.collection, met))
    if not len(mine):
        return
    length = tasks.stop[mine] - tasks.start[mine]
    task = np.repeat(mine, length)
    rows = np.arange(length.sum()) + np.repeat(tasks.start[mine] - np.cumsum(length) + length, length)
    place = rows if not last_only else np.where(rows == tasks.stop[task] - 1, task, -1)
    number = np.searchsorted(met, tasks.collection[task])
    order = np.lexsort((moment[rows], number))
    records = np.zeros(len(met), RECORD)
    _step_rows(records, *lent(number[order], rows[order], moment, died, place[order]), out)


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
