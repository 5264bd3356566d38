"""Features about related tasks: the rest of a collection, and earlier runs of a logical name and of a user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import lent, room_for
from reclaim.data.core.jit import CACHED, LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import Windows
from reclaim.features.fold.ids import Numbering
from reclaim.features.fold.related_record import GROUP, MEMBER, leave, step
from reclaim.features.registry import GROUP_KINDS

_NEVER: Final = 2**31 - 1
"""Later than any slot; ``task_update.publish_to_group`` goes no further."""
_UNUSED: Final = -1
"""Size at a number that no group has."""
_FREE: Final = UNKNOWN_ID
"""Marks a free number among saved keys; no name and no user has it."""


_KEY_BYTES: Final = 228
"""Memory of the key and the number of a group, measured over a million names (bytes)."""
_DROP_SHARE: Final = 8
"""Groups above the bound are forgotten together with an eighth of the bound, so that they are rarely looked for."""


class RelatedState:
    """The features of related tasks, for any number of tasks, kept up to date slot by slot.

    Parameters
    ----------
    threads : int
        The numbers do not depend on it.
    most_idle : int
        Names, and users, without a task that are kept at most, once ``forget`` has been called.
    """

    def __init__(self, threads: int = 1, *, most_idle: int = 500_000) -> None:
        self._threads, self._most_idle = threads, most_idle
        self.forgotten = 0
        """Names and users forgotten since the start because of ``most_idle``."""
        self._members = np.zeros(0, MEMBER)
        self._groups = [np.zeros(0, GROUP) for _ in GROUP_KINDS]
        self._numbers = [Numbering() for _ in GROUP_KINDS]
        self._sizes = [np.zeros(0, np.int64) for _ in GROUP_KINDS]  # members of each group; _UNUSED where none is
        self._groups_of: dict[int, tuple[int, ...]] = {}

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
        """Write the features of related tasks as of each row's slot, then add the rows.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row.
        windows : Windows
            Collection, user and name of each row count.
        moment : int32, shape (n,)
            Slot of the clock in which each row lies.
        share : int32, shape (n, n_signals)
            Signals over the limit, in parts of ``SCALE``; -1 unknown, or not to be counted.
        out : float32, shape (n, n_features)
            Its columns from ``FIRST_RELATED`` on are written.
        order : int64, shape (n,), optional
            The rows, those of each task in time order; as they stand if not given.
        place : int64, shape (n,), optional
            The row of ``out`` for each row; its own if not given. Of several the last one stays.
        """
        own = np.arange(len(slot))
        order, place = own if order is None else order, own if place is None else place
        self._members = room_for(self._members, int(slot.max(initial=-1)) + 1)
        new = order[self._members["group"][slot[order], 0] == 0]
        if len(new):  # else all of the next costs a small write 3 % of its time
            tasks, first = np.unique(slot[new], return_index=True)
            rows = new[first]
            self.introduce(tasks, windows.collection_id[rows], windows.user[rows], windows.name[rows])
        if (np.diff(moment[order]) < 0).any():
            order = order[np.argsort(moment[order], kind="stable")]
        collections, names, users = self._groups
        (task,) = lent(slot)

        def advance(part: int, parts: int) -> None:
            _advance(self._members, collections, names, users, order, task, part, parts, moment, share, place, out)

        in_parts(advance, len(slot), self._threads)

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Release the slots of tasks; a collection is removed with the last of its tasks.

        Their past still counts: among the tasks of their collection while it is there, and for its name and user.
        """
        slots = np.unique(slots[slots < len(self._members)])
        groups = self._members["group"][slots].astype(np.int64)
        slots, groups = slots[groups[:, 0] > 0], groups[groups[:, 0] > 0]
        self._members[slots] = np.zeros((), MEMBER)
        left = self._leave(0, groups[:, 0], slots + 1)
        empty, first = np.unique(groups[left, 0], return_index=True)
        owners = groups[left][first]
        for k in (1, 2):
            self._leave(k, owners[owners[:, k] > 0, k], empty[owners[:, k] > 0])
        for number in empty.tolist():
            del self._groups_of[self._numbers[0].keys[number - 1]]
        self._drop(0, empty)
        for k in (1, 2):
            self._bound(k)

    def drop_idle(self, before: int) -> None:
        """Remove the names and users that have no task and had no window since ``before``, a slot of the clock."""
        for k in (1, 2):
            idle = self._idle(k)
            self._drop(k, idle[self._groups[k]["at"][idle - 1] < before])

    def _bound(self, k: int) -> None:
        """Remove those without a window for longest where more than ``most_idle`` have no task."""
        if len(self._numbers[k]) <= self._most_idle:
            return
        idle = self._idle(k)
        if len(idle) > self._most_idle:
            over = len(idle) - self._most_idle + self._most_idle // _DROP_SHARE
            oldest = np.argsort(self._groups[k]["at"][idle - 1], kind="stable")[:over]
            self._drop(k, idle[oldest])
            self.forgotten += over

    def _idle(self, k: int) -> NDArray[np.int64]:
        """Return the numbers of the groups of a kind that have no task, in rising order."""
        return 1 + np.flatnonzero(self._sizes[k][: len(self._numbers[k].keys)] == 0)

    @property
    def n_groups(self) -> dict[str, int]:
        """Number of groups of each kind: collections, names, users."""
        return {kind: len(numbers) for kind, numbers in zip(GROUP_KINDS, self._numbers, strict=True)}

    @property
    def nbytes(self) -> int:
        """Memory of the groups (bytes); that of the members is in ``TolerantState.bytes_per_task``."""
        return sum(groups.nbytes + _KEY_BYTES * len(n) for groups, n in zip(self._groups, self._numbers, strict=True))

    def _leave(self, k: int, number: NDArray[np.int64], member: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Take members, by number, out of their groups of a kind; return which groups are empty then."""
        leave(self._groups[k], number - 1, member)
        np.subtract.at(self._sizes[k], number - 1, 1)
        return np.asarray(self._sizes[k][number - 1] == 0)

    def _drop(self, k: int, numbers: NDArray[np.int64]) -> None:
        self._groups[k][numbers - 1] = np.zeros((), GROUP)
        self._sizes[k][numbers - 1] = _UNUSED
        for number in numbers.tolist():
            self._numbers[k].release(number)

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return all that is remembered, by name."""
        _, names, users = (numbers.keys for numbers in self._numbers)
        collections = [(collection, *groups) for collection, groups in self._groups_of.items()]
        return {
            "member": self._members,
            **{k: g[: len(n.keys)] for k, g, n in zip(GROUP_KINDS, self._groups, self._numbers, strict=True)},
            "collections": np.array(collections, np.int64).reshape(-1, 1 + len(GROUP_KINDS)),
            "names": np.array([(_FREE, _FREE) if key is None else key for key in names], np.int64).reshape(-1, 2),
            "users": np.array([_FREE if key is None else key for key in users], np.int64),
        }

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Go on from the memory of another one, which is kept, not copied."""
        self._members = memory["member"]
        self._groups = [memory[kind] for kind in GROUP_KINDS]
        self._groups_of = {collection: tuple(groups) for collection, *groups in memory["collections"].tolist()}
        collections: list[int | None] = [None] * len(self._groups[0])
        for collection, (number, *_) in self._groups_of.items():
            collections[number - 1] = collection
        names = [None if name == _FREE else (user, name) for user, name in memory["names"].tolist()]
        users = [None if user == _FREE else user for user in memory["users"].tolist()]
        self._numbers = [Numbering(keys) for keys in (collections, names, users)]
        own = (self._members["group"][:, 0], *memory["collections"][:, 2:].T)
        self._sizes = [
            np.bincount(numbers, minlength=len(groups) + 1)[1:].astype(np.int64)
            for numbers, groups in zip(own, self._groups, strict=True)
        ]
        for sizes, n in zip(self._sizes, self._numbers, strict=True):
            sizes[[key is None for key in n.keys]] = _UNUSED

    def introduce(
        self, tasks: NDArray[np.int64], collection: NDArray[np.int64], user: NDArray[np.int64], name: NDArray[np.int64]
    ) -> None:
        """Give new tasks their records; a new collection has the user and the name that its first task gives.

        Parameters
        ----------
        tasks : int64, shape (n,)
            Slots, each once.
        collection, user, name : int64, shape (n,)
            -1 unknown.
        """
        self._members = room_for(self._members, int(tasks.max(initial=-1)) + 1)
        _, first, which = np.unique(collection, return_index=True, return_inverse=True)
        groups = np.empty((len(first), len(GROUP_KINDS)), np.int64)
        for k in np.argsort(first).tolist():
            key = int(collection[first[k]])
            if key not in self._groups_of:
                self._groups_of[key] = self._numbered(key, int(user[first[k]]), int(name[first[k]]))
            groups[k] = self._groups_of[key]
        self._members["group"][tasks] = groups[which]
        np.add.at(self._sizes[0], groups[which, 0] - 1, 1)

    def _numbered(self, collection: int, user: int, name: int) -> tuple[int, ...]:
        """Return the numbers of a new collection's groups."""
        keys = (collection, (user, name) if name >= 0 else None, user if user >= 0 else None)
        numbers = tuple(0 if key is None else n.of(key) for key, n in zip(keys, self._numbers, strict=True))
        for k, number in enumerate(numbers):
            if number > len(self._groups[k]):
                self._groups[k], self._sizes[k] = room_for(self._groups[k], number), room_for(self._sizes[k], number)
            if number > 0 and self._sizes[k][number - 1] == _UNUSED:
                self._sizes[k][number - 1] = 0
            if k > 0 and number > 0:
                self._sizes[k][number - 1] += 1
        return numbers


class Tasks(NamedTuple):
    """Tasks of a whole dataset, and their rows; each int64, shape (n_tasks,), -1 unknown."""

    collection: NDArray[np.int64]
    user: NDArray[np.int64]
    name: NDArray[np.int64]
    start: NDArray[np.int64]  # first row
    stop: NDArray[np.int64]  # one past the last row; there is at least one


def fold_related(
    tasks: Tasks,
    moment: NDArray[np.int32],
    share: NDArray[np.int32],
    out: NDArray[np.float32],
    threads: int = 1,
    *,
    last_only: bool = False,
) -> None:
    """Write the features of related tasks of a whole dataset: what ``RelatedState`` would, fed slot by slot.

    Rows are walked through in time order. Only the tasks that run at the time are read, so arrays on disk are read from
    front to back.

    Parameters
    ----------
    tasks : Tasks
    moment, share, out
        Of all rows, as for ``RelatedState.advance``; the moments of a task never fall.
    threads : int
        The numbers do not depend on it.
    last_only : bool
        Whether ``out`` has a row for each task, for its last row, instead of one for each row.
    """
    order = np.argsort(moment[tasks.start], kind="stable")
    state = RelatedState()
    state.introduce(order, tasks.collection[order], tasks.user[order], tasks.name[order])
    members, (collections, names, users) = state._members, state._groups

    def fold(part: int, parts: int) -> None:
        _fold(
            members, collections, names, users, order, tasks.start, tasks.stop, part, parts, moment, share, out,
            last_only,
        )  # fmt: skip

    in_parts(fold, len(moment), threads)


@numba.njit(**LENT)
def _is_of(
    m: Any,  # a record of MEMBER
    part: int,
    parts: int,
) -> bool:
    """Return whether a task is of a part; tasks with a group in common are of the same one."""
    group = m.group[2] if m.group[2] > 0 else m.group[1] if m.group[1] > 0 else m.group[0]
    return bool(group % parts == part)


@numba.njit(**CACHED, error_model="numpy")
def _advance(
    members: Any,  # (n_tasks,) MEMBER, changed
    collections: Any,  # (n_collections,) GROUP, changed
    names: Any,  # (n_names,) GROUP, changed
    users: Any,  # (n_users,) GROUP, changed
    order: Any,  # (n,) int64
    slot: Any,  # (n,) int64
    part: int,
    parts: int,
    moment: Any,  # (n,) int32
    share: Any,  # (n, N_SIGNALS) int32
    place: Any,  # (n,) int64
    out: Any,  # (n, n_features) float32, written
) -> None:
    for k in range(len(order)):
        i = order[k]
        task = slot[i]
        if _is_of(members[task], part, parts):
            step(members[task], task, collections, names, users, moment[i], share, i, out, place[i])


@numba.njit(**CACHED, error_model="numpy")
def _fold(
    members: Any,  # (n_tasks,) MEMBER, changed
    collections: Any,  # (n_collections,) GROUP, changed
    names: Any,  # (n_names,) GROUP, changed
    users: Any,  # (n_users,) GROUP, changed
    order: Any,  # (n_tasks,) int64, by first slot of the clock
    start: Any,  # (n_tasks,) int64
    stop: Any,  # (n_tasks,) int64
    part: int,
    parts: int,
    moment: Any,  # (n,) int32
    share: Any,  # (n, N_SIGNALS) int32
    out: Any,  # (n, n_features) float32, written
    last_only: bool,
) -> None:
    running = np.empty(len(order), np.int64)  # tasks that have rows left
    at = np.empty(len(order), np.int64)  # the next of them
    following, n, now = 0, 0, 0
    while n > 0 or following < len(order):
        while following < len(order) and moment[start[order[following]]] == now:
            task = order[following]
            following += 1
            if _is_of(members[task], part, parts):
                running[n], at[n] = task, start[task]
                n += 1
        coming = moment[start[order[following]]] if following < len(order) else _NEVER
        k = 0
        while k < n:
            task, row = running[k], at[k]
            while row < stop[task] and moment[row] == now:
                place = row if not last_only else task if row == stop[task] - 1 else -1
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
