"""What others did up to now: the rest of a task's collection, and earlier runs of its logical name and of its user."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows
from reclaim.features.registry import FIRST_KIN, KINSHIPS, SIGNALS

SCALE: Final = float(2**20)
"""Signals over the limit are summed in whole parts of this: sums of integers do not depend on their order and lose
nothing when a task's own part is taken away, so a cell folded in any order gives the same bits."""

_N: Final = len(SIGNALS)

GROUP: Final = np.dtype(
    [
        ("at", "i8"),  # the slot that is being filled; what is pending belongs to it
        ("seen", "i8"),  # tasks
        ("tasks", "i8", _N),  # those of them with a known value
        ("n", "i8", _N),  # values
        ("sum", "i8", _N),
        ("peaks", "i8", _N),  # sum over tasks of the largest of each
        ("top", "i4", _N),  # largest value, plus one; 0 is none
        ("who", "i4", _N),  # whose it is, plus one
        ("next", "i4", _N),  # largest of anybody else, plus one
        ("new_seen", "i8"),  # the same, pending
        ("new_tasks", "i8", _N),
        ("new_n", "i8", _N),
        ("new_sum", "i8", _N),
        ("new_peaks", "i8", _N),
        ("new_top", "i4", _N),
        ("new_who", "i4", _N),
        ("new_next", "i4", _N),
        ("now_n", "i8", _N),  # of the slot just before the one being filled
        ("now_sum", "i8", _N),
        ("now_top", "i4", _N),
        ("now_who", "i4", _N),
        ("now_next", "i4", _N),
    ],
    align=True,
)
"""What is kept of a collection (its members are tasks), of a logical name of a user and of a user (their members are
collections): ``GROUP.itemsize`` bytes each."""

MEMBER: Final = np.dtype(
    [
        ("at", "i8"),
        (
            "group",
            "i4",
            len(KINSHIPS),
        ),  # collection, logical name, user: position among their records, plus one; 0 none
        ("seen", "i4"),
        ("n", "i4", _N),
        ("peak", "i4", _N),
        ("sum", "i8", _N),
        ("new_sum", "i8", _N),
        ("now_sum", "i8", _N),
        ("new_n", "i4", _N),
        ("new_peak", "i4", _N),
        ("now_n", "i4", _N),
    ],
    align=True,
)
"""A task's own part of that, to be taken away again: ``MEMBER.itemsize`` bytes."""


class KinState:
    """The features about others, for any number of tasks, kept up to date slot by slot."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._members = np.zeros(0, MEMBER)
        self._groups = [np.zeros(0, GROUP) for _ in KINSHIPS]
        self._numbers: list[dict[Any, int]] = [{} for _ in KINSHIPS]

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
        parts = self._threads if len(slot) >= _ROWS_WORTH_A_THREAD else 1

        def advance(part: int) -> None:
            _advance(
                self._members,
                self._groups[0],
                self._groups[1],
                self._groups[2],
                order,
                slot,
                part,
                parts,
                moment,
                share,
                out,
            )

        if parts == 1:
            advance(0)
        else:
            with ThreadPoolExecutor(parts) as pool:
                list(pool.map(advance, range(parts)))

    def _introduce(self, slot: NDArray[np.int64], windows: Windows) -> None:
        """Give every new task its record and find those it belongs to."""
        need = int(slot.max()) + 1 if len(slot) else 0
        self._members = _room(self._members, need)
        new = np.flatnonzero(self._members["group"][slot, 0] == 0)
        _, first = np.unique(slot[new], return_index=True)
        rows = new[first]
        columns = (windows.collection_id[rows], windows.user[rows], windows.name[rows])
        for task, collection, user, name in zip(slot[rows].tolist(), *(c.tolist() for c in columns), strict=True):
            keys = (collection, (user, name) if name >= 0 else None, user if user >= 0 else None)
            for k, key in enumerate(keys):
                if key is not None:
                    self._members["group"][task, k] = self._numbers[k].setdefault(key, len(self._numbers[k]) + 1)
        self._groups = [_room(g, len(n)) for g, n in zip(self._groups, self._numbers, strict=True)]


_ROWS_WORTH_A_THREAD: Final = 8_192
"""Rows of a call from which a second thread is done sooner than it is started."""


def _room(records: NDArray[Any], need: int) -> NDArray[Any]:
    if need <= len(records):
        return records
    grown = np.zeros(max(need, 2 * len(records)), records.dtype)
    grown[: len(records)] = records
    return grown


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
    tasks: Tasks, moment: NDArray[np.int32], share: NDArray[np.int32], out: NDArray[np.float32], threads: int = 1
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
    """
    collection, user, name, start, stop = (getattr(tasks, f.name) for f in fields(tasks))
    if len(start) == 0:
        return
    collections = np.unique(collection, return_inverse=True)[1]
    users = np.unique(user, return_inverse=True)[1]
    pair = np.unique(np.stack([users, name], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
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

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fold, range(len(bounds) - 1)))


def _number_within(kin: NDArray[np.int64], numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of each task's group within its kin, from 0, and how many groups each kin has."""
    pairs, place = np.unique(np.stack([kin, numbers], axis=1), axis=0, return_inverse=True)
    first = np.searchsorted(pairs[:, 0], np.arange(int(kin.max()) + 2))
    return place.reshape(-1) - first[kin], np.diff(first)


@numba.njit(cache=True, nogil=True)
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
            _step(m, task, collections, names, users, moment[i], share, out, i)


@numba.njit(cache=True, nogil=True)
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
        _blank(collections, sizes[kin, 0])
        _blank(names, sizes[kin, 1])
        _blank(users, sizes[kin, 2])
        following, n = edges[kin], 0
        now = 0
        while n > 0 or following < edges[kin + 1]:
            if n == 0:
                now = moment[start[order[following]]]
            while following < edges[kin + 1] and moment[start[order[following]]] <= now:
                running[n] = order[following]
                at[n] = start[order[following]]
                n += 1
                following += 1
            k = 0
            while k < n:
                task, row = running[k], at[k]
                while row < stop[task] and moment[row] == now:
                    _step(members[task], task, collections, names, users, now, share, out, row)
                    row += 1
                at[k] = row
                if row == stop[task]:
                    n -= 1
                    running[k], at[k] = running[n], at[n]
                else:
                    k += 1
            now += 1


@numba.njit(cache=True, nogil=True)
def _blank(groups: Any, n: int) -> None:
    for k in range(n):
        g = groups[k]
        g.at = 0
        g.seen = 0
        g.new_seen = 0
        for j in range(_N):
            g.tasks[j] = g.n[j] = g.sum[j] = g.peaks[j] = g.top[j] = g.who[j] = g.next[j] = 0
            g.new_tasks[j] = g.new_n[j] = g.new_sum[j] = g.new_peaks[j] = 0
            g.new_top[j] = g.new_who[j] = g.new_next[j] = 0
            g.now_n[j] = g.now_sum[j] = g.now_top[j] = g.now_who[j] = g.now_next[j] = 0


@numba.njit(cache=True, nogil=True)
def _step(
    m: Any, task: int, collections: Any, names: Any, users: Any, moment: int, share: Any, out: Any, i: int
) -> None:  # fmt: skip
    """Write one row's features from the slots before its own, then let its values in."""
    c, name, user = m.group[0] - 1, m.group[1] - 1, m.group[2] - 1
    own = collections[c]
    at = max(moment, own.at, m.at)
    if name >= 0:
        at = max(at, names[name].at)
    if user >= 0:
        at = max(at, users[user].at)
    _close_member(m, at)
    _close(own, at)
    _write_siblings(own, m, task + 1, out, i)
    o = FIRST_KIN + 1 + 5 * _N
    if name >= 0:
        _close(names[name], at)
        _write_elders(names[name], own, c + 1, out, i, o)
    else:
        _write_none(out, i, o)
    o += 1 + 3 * _N
    if user >= 0:
        _close(users[user], at)
        _write_elders(users[user], own, c + 1, out, i, o)
    else:
        _write_none(out, i, o)
    first_ever = m.seen == 0
    counted = False
    for j in range(_N):
        v = share[i, j]
        if v < 0:
            continue
        counted = True
        first = m.n[j] + m.new_n[j] == 0
        before = max(m.peak[j], m.new_peak[j])
        m.new_n[j] += 1
        m.new_sum[j] += v
        m.new_peak[j] = max(before, v)
        rise = m.new_peak[j] - before
        _let_in(own, j, v, rise, first, task + 1)
        if name >= 0:
            _let_in(names[name], j, v, rise, first, c + 1)
        if user >= 0:
            _let_in(users[user], j, v, rise, first, c + 1)
    if counted and first_ever:
        m.seen = -1  # pending
        own.new_seen += 1
        if name >= 0:
            names[name].new_seen += 1
        if user >= 0:
            users[user].new_seen += 1


@numba.njit(cache=True, nogil=True)
def _let_in(g: Any, j: int, v: int, rise: int, first: bool, member: int) -> None:
    g.new_n[j] += 1
    g.new_sum[j] += v
    g.new_peaks[j] += rise
    if first:
        g.new_tasks[j] += 1
    if g.new_who[j] == member:
        g.new_top[j] = max(g.new_top[j], v + 1)
    elif v + 1 > g.new_top[j]:
        g.new_next[j] = g.new_top[j]
        g.new_top[j] = v + 1
        g.new_who[j] = member
    else:
        g.new_next[j] = max(g.new_next[j], v + 1)


@numba.njit(cache=True, nogil=True)
def _close(g: Any, at: int) -> None:
    """Let what is pending of slots before ``at`` count."""
    if g.at >= at:
        return
    just_before = g.at == at - 1
    g.seen += g.new_seen
    g.new_seen = 0
    for j in range(_N):
        g.now_n[j] = g.new_n[j] if just_before else 0
        g.now_sum[j] = g.new_sum[j] if just_before else 0
        g.now_top[j] = g.new_top[j] if just_before else 0
        g.now_who[j] = g.new_who[j] if just_before else 0
        g.now_next[j] = g.new_next[j] if just_before else 0
        if g.new_n[j] == 0:
            continue
        g.tasks[j] += g.new_tasks[j]
        g.n[j] += g.new_n[j]
        g.sum[j] += g.new_sum[j]
        g.peaks[j] += g.new_peaks[j]
        top, who, other = g.new_top[j], g.new_who[j], g.new_next[j]
        if g.who[j] == who:
            g.top[j] = max(g.top[j], top)
            g.next[j] = max(g.next[j], other)
        elif top > g.top[j]:
            g.next[j] = max(g.top[j], other)
            g.top[j] = top
            g.who[j] = who
        else:
            g.next[j] = max(g.next[j], top)
        g.new_tasks[j] = g.new_n[j] = g.new_sum[j] = g.new_peaks[j] = 0
        g.new_top[j] = g.new_who[j] = g.new_next[j] = 0
    g.at = at


@numba.njit(cache=True, nogil=True)
def _close_member(m: Any, at: int) -> None:
    if m.at >= at:
        return
    just_before = m.at == at - 1
    if m.seen < 0:
        m.seen = 1
    for j in range(_N):
        m.now_n[j] = m.new_n[j] if just_before else 0
        m.now_sum[j] = m.new_sum[j] if just_before else 0
        m.n[j] += m.new_n[j]
        m.sum[j] += m.new_sum[j]
        m.peak[j] = max(m.peak[j], m.new_peak[j])
        m.new_n[j] = m.new_sum[j] = m.new_peak[j] = 0
    m.at = at


@numba.njit(cache=True, nogil=True)
def _write_siblings(g: Any, m: Any, me: int, out: Any, i: int) -> None:
    out[i, FIRST_KIN] = math.log2(1.0 + g.seen - max(m.seen, 0))
    for j in range(_N):
        o = FIRST_KIN + 1 + 5 * j
        n, now_n = g.n[j] - m.n[j], g.now_n[j] - m.now_n[j]
        tasks = g.tasks[j] - (1 if m.n[j] > 0 else 0)
        top = g.next[j] if g.who[j] == me else g.top[j]
        now_top = g.now_next[j] if g.now_who[j] == me else g.now_top[j]
        out[i, o] = (g.sum[j] - m.sum[j]) / n / SCALE if n > 0 else math.nan
        out[i, o + 1] = (g.peaks[j] - m.peak[j]) / tasks / SCALE if tasks > 0 else math.nan
        out[i, o + 2] = (top - 1) / SCALE if top > 0 else math.nan
        out[i, o + 3] = (g.now_sum[j] - m.now_sum[j]) / now_n / SCALE if now_n > 0 else math.nan
        out[i, o + 4] = (now_top - 1) / SCALE if now_top > 0 else math.nan


@numba.njit(cache=True, nogil=True)
def _write_elders(g: Any, own: Any, collection: int, out: Any, i: int, o: int) -> None:
    """Write what the group did without the task's own collection."""
    out[i, o] = math.log2(1.0 + g.seen - own.seen)
    for j in range(_N):
        n, tasks = g.n[j] - own.n[j], g.tasks[j] - own.tasks[j]
        top = g.next[j] if g.who[j] == collection else g.top[j]
        k = o + 1 + 3 * j
        out[i, k] = (g.sum[j] - own.sum[j]) / n / SCALE if n > 0 else math.nan
        out[i, k + 1] = (g.peaks[j] - own.peaks[j]) / tasks / SCALE if tasks > 0 else math.nan
        out[i, k + 2] = (top - 1) / SCALE if top > 0 else math.nan


@numba.njit(cache=True, nogil=True)
def _write_none(out: Any, i: int, o: int) -> None:
    out[i, o] = 0.0
    for k in range(o + 1, o + 1 + 3 * _N):
        out[i, k] = math.nan
