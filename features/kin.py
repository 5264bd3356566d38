"""What others did up to now: the rest of a task's collection, and earlier runs of its logical name and of its user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows
from reclaim.features.kinship import GROUP, MEMBER, blank, step, write_alone
from reclaim.features.registry import KINSHIPS

_NEVER: Final = 2**31 - 1
"""Later than any slot; ``taking.tell`` goes no further."""
ROWS_WORTH_A_THREAD: Final = 8_192
"""Rows of a call from which a second thread is done sooner than it is started."""


class KinState:
    """The features about others, for any number of tasks, kept up to date slot by slot."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._members = np.zeros(0, MEMBER)
        self._groups = [np.zeros(0, GROUP) for _ in KINSHIPS]
        self._numbers: list[dict[Any, int]] = [{} for _ in KINSHIPS]
        self._kin: dict[int, tuple[int, ...]] = {}

    def advance(
        self,
        slot: NDArray[np.int64],
        windows: Windows,
        moment: NDArray[np.int32],
        share: NDArray[np.int32],
        out: NDArray[np.float32],
    ) -> None:
        """Write the features about others as of each row's slot, then let the rows in.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row.
        windows : Windows
            Tell who belongs together.
        moment : int32, shape (n,)
            Slot of the clock in which each row lies.
        share : int32, shape (n, n_signals)
            Signals over the limit, in parts of ``SCALE``; -1 unknown, or not to be counted.
        out : float32, shape (n, n_features)
            Its columns from ``FIRST_KIN`` on are written.
        """
        self._introduce(slot, windows)
        order = np.arange(len(slot)) if (np.diff(moment) >= 0).all() else np.argsort(moment, kind="stable")
        collections, names, users = self._groups

        def advance(part: int, parts: int) -> None:
            _advance(self._members, collections, names, users, order, slot, part, parts, moment, share, out)

        in_parts(advance, len(slot), self._threads)

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return all that is remembered, by name."""
        collections, names, users = (np.array(list(numbers), np.int64) for numbers in self._numbers)
        kin = [(collection, *groups) for collection, groups in self._kin.items()]
        return {
            "member": self._members,
            **dict(zip(KINSHIPS, self._groups, strict=True)),
            "collections": collections,
            "names": names.reshape(-1, 2),
            "users": users,
            "kin": np.array(kin, np.int64).reshape(-1, 1 + len(KINSHIPS)),
        }

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the memory of another one, which is kept, not copied."""
        self._members = memory["member"]
        self._groups = [memory[kinship] for kinship in KINSHIPS]
        keys = (memory["collections"].tolist(), map(tuple, memory["names"].tolist()), memory["users"].tolist())
        self._numbers = [{key: number for number, key in enumerate(each, 1)} for each in keys]
        self._kin = {collection: tuple(groups) for collection, *groups in memory["kin"].tolist()}

    def _introduce(self, slot: NDArray[np.int64], windows: Windows) -> None:
        """Give every new task its record and find those it belongs to."""
        need = int(slot.max()) + 1 if len(slot) else 0
        self._members = room_for(self._members, need)
        new = np.flatnonzero(self._members["group"][slot, 0] == 0)
        _, first = np.unique(slot[new], return_index=True)
        rows = new[first]
        columns = (windows.collection_id[rows], windows.user[rows], windows.name[rows])
        for task, collection, user, name in zip(slot[rows].tolist(), *(c.tolist() for c in columns), strict=True):
            if collection not in self._kin:  # the first owner told of stands for all its tasks
                keys = (collection, (user, name) if name >= 0 else None, user if user >= 0 else None)
                self._kin[collection] = tuple(
                    0 if key is None else numbers.setdefault(key, len(numbers) + 1)
                    for key, numbers in zip(keys, self._numbers, strict=True)
                )
            self._members["group"][task] = self._kin[collection]
        self._groups = [room_for(g, len(n)) for g, n in zip(self._groups, self._numbers, strict=True)]


def room_for(records: NDArray[Any], need: int) -> NDArray[Any]:
    """Return ``records`` with at least ``need`` rows, doubling; new rows are zero."""
    if need <= len(records):
        return records
    grown = np.zeros((max(need, 2 * len(records)), *records.shape[1:]), records.dtype)
    grown[: len(records)] = records
    return grown


def in_parts(function: Callable[[int, int], object], n_rows: int, threads: int) -> None:
    """Call ``function(part, parts)`` for each part, in threads where there are rows enough to be worth them."""
    parts = threads if n_rows >= ROWS_WORTH_A_THREAD else 1
    if parts == 1:
        function(0, 1)
        return
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(function, range(parts), [parts] * parts))


@dataclass(frozen=True)
class Tasks:
    """Tasks of a whole dataset: who belongs together, and which rows are whose.

    Attributes
    ----------
    collection, user, name : int64, shape (n_tasks,)
        -1 unknown.
    start, stop : int64, shape (n_tasks,)
        First row of each task, and one past its last; at least one row each.
    """

    collection: NDArray[np.int64]
    user: NDArray[np.int64]
    name: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    @classmethod
    def join(cls, parts: Sequence[Tasks]) -> Tasks:
        """Return the tasks of all parts."""
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)})


def fold_everyone(
    tasks: Tasks,
    moment: NDArray[np.int32],
    share: NDArray[np.int32],
    out: NDArray[np.float32],
    threads: int = 1,
    done: Callable[[int], object] = lambda _: None,
) -> None:
    """Write the features about others of a whole dataset: what ``KinState`` would, fed slot by slot.

    Kin by kin (a user, or a logical name or collection without one) the rows of all its tasks are walked through in
    time order. Only the tasks that run at the time are looked at, so arrays on disk are read from front to back.

    Parameters
    ----------
    tasks : Tasks
    moment, share, out
        Of all rows, as for ``KinState.advance``; the moments of a task never fall.
    threads : int
        The numbers do not depend on it.
    done : callable
        Told how many rows were finished, now and then.
    """
    collection, user, name, start, stop = (getattr(tasks, f.name) for f in fields(tasks))
    if len(start) == 0:
        return
    collections = np.unique(collection, return_inverse=True)[1]
    users = np.unique(user, return_inverse=True)[1]
    names = np.unique(name, return_inverse=True)[1]
    pair = np.unique(users * (names.max() + 1) + names, return_inverse=True)[1]
    # what nothing else ties together: a user, else a name without one, else a collection
    kin = np.where(user >= 0, users, np.where(name >= 0, len(start) + pair, 2 * len(start) + collections))
    kin = np.unique(kin, return_inverse=True)[1]
    first_moment = moment[start]
    order = np.lexsort((first_moment, kin))
    members = np.zeros(len(start), MEMBER)
    sizes = np.zeros((int(kin.max()) + 1, len(KINSHIPS)), np.int64)
    for k, numbers in enumerate((collections, pair, users)):
        known = (np.ones_like(user, bool), name >= 0, user >= 0)[k]
        within, sizes[:, k] = _number_within(kin, numbers)
        members["group"][:, k] = np.where(known, within + 1, 0)
    edges = np.searchsorted(kin[order], np.arange(len(sizes) + 1))
    rows = np.concatenate([[0], np.cumsum((stop - start)[order])])[edges]
    parts = min(threads * 8, len(sizes))
    cuts = np.searchsorted(rows, np.linspace(0, rows[-1], parts + 1)[1:-1])
    bounds = np.unique(np.concatenate([[0], cuts, [len(sizes)]]))

    def fold(part: int) -> None:
        low, high = bounds[part], bounds[part + 1]
        groups = [np.zeros(int(sizes[low:high, k].max()), GROUP) for k in range(len(KINSHIPS))]
        _fold_kin(
            members, groups[0], groups[1], groups[2], sizes, order, edges, low, high, start, stop, moment, share, out
        )
        done(int(rows[high] - rows[low]))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fold, range(len(bounds) - 1)))


def _number_within(kin: NDArray[np.int64], numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of each task's group within its kin, from 0, and how many groups each kin has."""
    width = int(numbers.max()) + 1
    pairs, place = np.unique(kin * width + numbers, return_inverse=True)
    first = np.searchsorted(pairs, np.arange(int(kin.max()) + 2) * width)
    return place - first[kin], np.diff(first)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _advance(
    members: Any, collections: Any, names: Any, users: Any, order: Any, slot: Any, part: int, parts: int, moment: Any,
    share: Any, out: Any,
) -> None:  # fmt: skip
    for k in range(len(order)):
        i = order[k]
        task = slot[i]
        m = members[task]
        kin = m.group[2] if m.group[2] > 0 else m.group[1] if m.group[1] > 0 else m.group[0]
        if kin % parts == part:
            step(m, task, collections, names, users, moment[i], share, out, i)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _fold_kin(
    members: Any, collections: Any, names: Any, users: Any, sizes: Any, order: Any, edges: Any, low: int, high: int,
    start: Any, stop: Any, moment: Any, share: Any, out: Any,
) -> None:  # fmt: skip
    longest = 0
    for kin in range(low, high):
        longest = max(longest, edges[kin + 1] - edges[kin])
    running = np.empty(longest, np.int64)  # tasks that have rows left
    at = np.empty(longest, np.int64)  # the next of them
    for kin in range(low, high):
        if edges[kin + 1] - edges[kin] == 1:
            task = order[edges[kin]]
            for row in range(start[task], stop[task]):
                write_alone(out, row)
            continue
        blank(collections, sizes[kin, 0])
        blank(names, sizes[kin, 1])
        blank(users, sizes[kin, 2])
        following, n = edges[kin], 0
        now = moment[start[order[following]]]
        while n > 0 or following < edges[kin + 1]:
            while following < edges[kin + 1] and moment[start[order[following]]] == now:
                running[n] = order[following]
                at[n] = start[order[following]]
                n += 1
                following += 1
            coming = moment[start[order[following]]] if following < edges[kin + 1] else _NEVER
            k = 0
            while k < n:
                task, row = running[k], at[k]
                while row < stop[task] and moment[row] == now:
                    step(members[task], task, collections, names, users, now, share, out, row)
                    row += 1
                at[k] = row
                if row == stop[task]:
                    n -= 1
                    running[k], at[k] = running[n], at[n]
                else:
                    coming = min(coming, moment[row])
                    k += 1
            now = coming
