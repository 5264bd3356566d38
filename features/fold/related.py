"""Features about related tasks: the rest of a collection, and earlier runs of a logical name and of a user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Final

import numba
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from reclaim.data.core.arrays import lent, room_for
from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import Windows
from reclaim.features.fold.ids import Numbering
from reclaim.features.fold.related_record import (
    GROUP,
    MEMBER,
    blank,
    leave,
    step,
    write_alone,
)
from reclaim.features.registry import KINSHIPS

_NEVER: Final = 2**31 - 1
"""Later than any slot; ``task_update.publish_to_group`` goes no further."""
_FREE: Final = UNKNOWN_ID
"""Stands in saved keys where a number is free: no name and no user has it."""


class KinState:
    """The features about others, for any number of tasks, kept up to date slot by slot."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._members = np.zeros(0, MEMBER)
        self._groups = [np.zeros(0, GROUP) for _ in KINSHIPS]
        self._numbers = [Numbering() for _ in KINSHIPS]
        self._sizes = [np.zeros(0, np.int64) for _ in KINSHIPS]  # how many members each group has
        self._kin: dict[int, tuple[int, ...]] = {}

    def advance(
        self,
        slot: NDArray[np.int64],
        windows: Windows,
        moment: NDArray[np.int32],
        share: NDArray[np.int32],
        out: NDArray[np.float32],
        order: NDArray[np.int64] | None = None,
        place: NDArray[np.int64] | None = None,
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
        order : int64, shape (n,), optional
            The rows, those of each task in time order; as they stand if not given.
        place : int64, shape (n,), optional
            The row of ``out`` for each row; its own if not given. Of several the last one stays.
        """
        own = np.arange(len(slot))
        order, place = own if order is None else order, own if place is None else place
        self._introduce(slot, windows, order)
        if (np.diff(moment[order]) < 0).any():
            order = order[np.argsort(moment[order], kind="stable")]
        collections, names, users = self._groups
        (task,) = lent(slot)

        def advance(part: int, parts: int) -> None:
            _advance(self._members, collections, names, users, order, task, part, parts, moment, share, place, out)

        in_parts(advance, len(slot), self._threads)

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Let tasks go, so that others may have their slots; a collection goes with the last of its tasks.

        What they did still counts: among the tasks of their collection while it is there, and for its name and user.
        """
        slots = np.unique(slots[slots < len(self._members)])
        groups = self._members["group"][slots].astype(np.int64)
        slots, groups = slots[groups[:, 0] > 0], groups[groups[:, 0] > 0]
        self._members[slots] = np.zeros((), MEMBER)
        left = self._leave(0, groups[:, 0], slots + 1)
        empty, first = np.unique(groups[left, 0], return_index=True)
        kin = groups[left][first]
        for k in (1, 2):
            self._leave(k, kin[kin[:, k] > 0, k], empty[kin[:, k] > 0])
        for number in empty.tolist():
            del self._kin[self._numbers[0].keys[number - 1]]
        self._drop(0, empty)

    def drop_idle(self, before: int) -> None:
        """Forget the names and users that have no task and had no window since ``before``, a slot of the clock."""
        for k in (1, 2):
            there = np.array([key is not None for key in self._numbers[k].keys], bool)
            groups = self._groups[k][: len(there)]
            self._drop(k, 1 + np.flatnonzero(there & (self._sizes[k][: len(there)] == 0) & (groups["at"] < before)))

    @property
    def n_groups(self) -> dict[str, int]:
        """How many groups are remembered, by kinship: collections, names, users."""
        return {kinship: len(numbers) for kinship, numbers in zip(KINSHIPS, self._numbers, strict=True)}

    def _leave(self, k: int, number: NDArray[np.int64], member: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Take members, by number, out of their groups of a kinship; return whose group is empty then."""
        leave(self._groups[k], number - 1, member)
        np.subtract.at(self._sizes[k], number - 1, 1)
        return np.asarray(self._sizes[k][number - 1] == 0)

    def _drop(self, k: int, numbers: NDArray[np.int64]) -> None:
        self._groups[k][numbers - 1] = np.zeros((), GROUP)
        for number in numbers.tolist():
            self._numbers[k].let_go(number)

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return all that is remembered, by name."""
        collections, names, users = (numbers.keys for numbers in self._numbers)
        kin = [(collection, *groups) for collection, groups in self._kin.items()]
        return {
            "member": self._members,
            **{k: g[: len(n.keys)] for k, g, n in zip(KINSHIPS, self._groups, self._numbers, strict=True)},
            "collections": np.array([_FREE if key is None else key for key in collections], np.int64),
            "names": np.array([(_FREE, _FREE) if key is None else key for key in names], np.int64).reshape(-1, 2),
            "users": np.array([_FREE if key is None else key for key in users], np.int64),
            "kin": np.array(kin, np.int64).reshape(-1, 1 + len(KINSHIPS)),
        }

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the memory of another one, which is kept, not copied."""
        self._members = memory["member"]
        self._groups = [memory[kinship] for kinship in KINSHIPS]
        self._kin = {collection: tuple(groups) for collection, *groups in memory["kin"].tolist()}
        collections: list[int | None] = [None] * len(memory["collections"])
        for collection, (number, *_) in self._kin.items():
            collections[number - 1] = collection
        names = [None if name == _FREE else (user, name) for user, name in memory["names"].tolist()]
        users = [None if user == _FREE else user for user in memory["users"].tolist()]
        self._numbers = [Numbering(keys) for keys in (collections, names, users)]
        own = (self._members["group"][:, 0], memory["kin"][:, 2], memory["kin"][:, 3])
        self._sizes = [
            np.bincount(numbers, minlength=len(groups) + 1)[1:].astype(np.int64)
            for numbers, groups in zip(own, self._groups, strict=True)
        ]

    def _introduce(self, slot: NDArray[np.int64], windows: Windows, order: NDArray[np.int64]) -> None:
        """Give every new task its record and find those it belongs to."""
        self._members = room_for(self._members, int(slot.max(initial=-1)) + 1)
        new = order[self._members["group"][slot[order], 0] == 0]
        if len(new) == 0:
            return
        tasks, first = np.unique(slot[new], return_index=True)
        rows = new[first]
        collections, first, which = np.unique(windows.collection_id[rows], return_index=True, return_inverse=True)
        kin = np.empty((len(collections), len(KINSHIPS)), np.int64)
        for k in np.argsort(first).tolist():
            collection, row = int(collections[k]), rows[first[k]]
            if collection not in self._kin:  # the first owner told of stands for all its tasks
                self._kin[collection] = self._found(collection, int(windows.user[row]), int(windows.name[row]))
            kin[k] = self._kin[collection]
        self._members["group"][tasks] = kin[which]
        np.add.at(self._sizes[0], kin[which, 0] - 1, 1)

    def _found(self, collection: int, user: int, name: int) -> tuple[int, ...]:
        """Return the numbers of a new collection's groups."""
        keys = (collection, (user, name) if name >= 0 else None, user if user >= 0 else None)
        kin = tuple(0 if key is None else n.of(key) for key, n in zip(keys, self._numbers, strict=True))
        for k, number in enumerate(kin):
            self._groups[k] = room_for(self._groups[k], number)
            self._sizes[k] = room_for(self._sizes[k], number)
            if k > 0 and number > 0:
                self._sizes[k][number - 1] += 1
        return kin


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
    *,
    last_alone: bool = False,
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
    last_alone : bool
        Whether ``out`` has a row for each task, to be that of the task's last, instead of one for each row.
    """
    collection, user, name, start, stop = (getattr(tasks, f.name) for f in fields(tasks))
    if len(start) == 0:
        return
    collections, users, names = (pd.factorize(column)[0] for column in (collection, user, name))
    pair = pd.factorize(users * (names.max() + 1) + names)[0]
    # what nothing else ties together: a user, else a name without one, else a collection
    kin = np.where(user >= 0, users, np.where(name >= 0, len(start) + pair, 2 * len(start) + collections))
    kin = pd.factorize(kin)[0]
    order = np.argsort((kin << 32) + moment[start], kind="stable")
    members = np.zeros(len(start), MEMBER)
    sizes = np.zeros((int(kin.max()) + 1, len(KINSHIPS)), np.int64)
    for k, numbers in enumerate((collections, pair, users)):
        known = (np.ones_like(user, bool), name >= 0, user >= 0)[k]
        within = np.empty(len(start), np.int64)
        _number_within(order, kin, numbers, np.full((len(start), 2), -1), within, sizes[:, k])
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
            members, groups[0], groups[1], groups[2], sizes, order, edges, low, high, start, stop, moment, share, out,
            last_alone,
        )  # fmt: skip
        done(int(rows[high] - rows[low]))

    if threads == 1 or len(bounds) == 2:
        for part in range(len(bounds) - 1):
            fold(part)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fold, range(len(bounds) - 1)))


@numba.njit(**LENT)
def _number_within(order: Any, kin: Any, numbers: Any, found: Any, within: Any, sizes: Any) -> None:
    """Write the number of each task's group within its kin, from 0, and how many groups each kin has.

    ``found``, shape (n, 2), is room for the kin in which a group was last met, -1 for none, and its number there.
    """
    for task in order:
        group = found[numbers[task]]
        if group[0] != kin[task]:
            group[0], group[1] = kin[task], sizes[kin[task]]
            sizes[kin[task]] += 1
        within[task] = group[1]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _advance(
    members: Any, collections: Any, names: Any, users: Any, order: Any, slot: Any, part: int, parts: int, moment: Any,
    share: Any, place: Any, out: Any,
) -> None:  # fmt: skip
    for k in range(len(order)):
        i = order[k]
        task = slot[i]
        m = members[task]
        kin = m.group[2] if m.group[2] > 0 else m.group[1] if m.group[1] > 0 else m.group[0]
        if kin % parts == part:
            step(m, task, collections, names, users, moment[i], share, i, out, place[i])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _fold_kin(
    members: Any, collections: Any, names: Any, users: Any, sizes: Any, order: Any, edges: Any, low: int, high: int,
    start: Any, stop: Any, moment: Any, share: Any, out: Any, last_alone: bool,
) -> None:  # fmt: skip
    longest = 0
    for kin in range(low, high):
        longest = max(longest, edges[kin + 1] - edges[kin])
    running = np.empty(longest, np.int64)  # tasks that have rows left
    at = np.empty(longest, np.int64)  # the next of them
    for kin in range(low, high):
        if edges[kin + 1] - edges[kin] == 1:
            task = order[edges[kin]]
            if last_alone:
                write_alone(out, task)
            else:
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
                    place = row if not last_alone else task if row == stop[task] - 1 else -1
                    step(members[task], task, collections, names, users, now, share, row, out, place)
                    row += 1
                at[k] = row
                if row == stop[task]:
                    n -= 1
                    running[k], at[k] = running[n], at[n]
                else:
                    coming = min(coming, moment[row])
                    k += 1
            now = coming
