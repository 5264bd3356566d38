"""Records of a group of tasks and of each member, and the features of related tasks that are read off them."""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np

from reclaim.data.core.jit import LENT
from reclaim.features.registry import AT, GROUP_KINDS, N_GROUP, N_SIBLING, OF_OTHERS, SIGNALS, SLOT_S

SCALE: Final = float(2**20)
"""Signals over the limit are summed in whole parts of this: sums of integers do not depend on their order and lose
nothing when a task's own part is taken away, so a cell folded in any order gives the same bits."""

_N: Final = len(SIGNALS)

KEEP_IDLE_DAYS: Final = 30
"""Days after its last window for which the past of a group counts: what runs once a month still finds it."""
IDLE_SLOTS: Final = KEEP_IDLE_DAYS * 86_400 // SLOT_S
"""The same in slots of the clock."""

_DEPARTED: Final = -1
"""Owner of a largest value whose member has left the group; distinct from 0, none."""

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
        ("next", "i4", _N),  # largest of any other member, plus one
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
"""Record of a collection (its members are tasks), of a logical name of a user and of a user (their members are
collections): ``GROUP.itemsize`` bytes each."""

MEMBER: Final = np.dtype(
    [
        ("at", "i8"),
        # collection, logical name, user: position among their records, plus one; 0 none
        ("group", "i4", len(GROUP_KINDS)),
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


@numba.njit(**LENT)
def leave(
    groups: Any,  # (n,) GROUP, changed
    number: Any,  # (k,) int64
    member: Any,  # (k,) int64
) -> None:
    """Mark the largest values of members that leave their groups, for their numbers may be given again."""
    for k in range(len(number)):
        g = groups[number[k]]
        for j in range(_N):
            if g.who[j] == member[k]:
                g.who[j] = _DEPARTED
            if g.new_who[j] == member[k]:
                g.new_who[j] = _DEPARTED
            if g.now_who[j] == member[k]:
                g.now_who[j] = _DEPARTED


@numba.njit(**LENT)
def step(
    m: Any,  # a record of MEMBER, changed
    task: int,
    collections: Any,  # (n_collections,) GROUP, changed
    names: Any,  # (n_names,) GROUP, changed
    users: Any,  # (n_users,) GROUP, changed
    moment: int,
    share: Any,  # (n, N_SIGNALS) int32
    row: int,
    out: Any,  # (n, n_features) float32, written
    i: int,
) -> None:
    """Write the features of a row from the slots before its own into row ``i`` of ``out``, then add its values.

    With an ``i`` below 0 no features are written.
    """
    c, name, user = m.group[0] - 1, m.group[1] - 1, m.group[2] - 1
    own = collections[c]
    at = max(moment, own.at, m.at)
    if name >= 0:
        at = max(at, names[name].at)
    if user >= 0:
        at = max(at, users[user].at)
    _close_member(m, at)
    _close(own, at)
    if name >= 0:
        _close(names[name], at)
    if user >= 0:
        _close(users[user], at)
    if i >= 0:
        _write_siblings(own, m, task + 1, out, i)
        if name >= 0:
            _write_earlier_runs(names[name], own, c + 1, out, i, AT.name_tasks)
        else:
            _write_none(out, i, AT.name_tasks)
        if user >= 0:
            _write_earlier_runs(users[user], own, c + 1, out, i, AT.user_tasks)
        else:
            _write_none(out, i, AT.user_tasks)
    first_ever = m.seen == 0
    counted = False
    for j in range(_N):
        v = share[row, j]
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


@numba.njit(**LENT)
def _let_in(
    g: Any,  # a record of GROUP, changed
    j: int,
    v: int,
    rise: int,
    first: bool,
    member: int,
) -> None:
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


@numba.njit(**LENT)
def _close(
    g: Any,  # a record of GROUP, changed
    at: int,
) -> None:
    """Count what is pending of slots before ``at``; a group without a window for ``IDLE_SLOTS`` begins again.

    A group that begins again holds no part of a smaller one that does not: each window of a task is one of its
    collection, name and user, too.
    """
    if g.at >= at:
        return
    if at - g.at > IDLE_SLOTS:
        g.seen = g.new_seen = 0
        for j in range(_N):
            g.tasks[j] = g.n[j] = g.sum[j] = g.peaks[j] = 0
            g.top[j] = g.who[j] = g.next[j] = 0
            g.new_tasks[j] = g.new_n[j] = g.new_sum[j] = g.new_peaks[j] = 0
            g.new_top[j] = g.new_who[j] = g.new_next[j] = 0
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


@numba.njit(**LENT)
def _close_member(
    m: Any,  # a record of MEMBER, changed
    at: int,
) -> None:
    """Count what is pending of slots before ``at``; a task without a window for ``IDLE_SLOTS`` begins again.

    In a group that goes on it is then a new task, and what it did before is that of another one.
    """
    if m.at >= at:
        return
    if at - m.at > IDLE_SLOTS:
        m.seen = 0
        for j in range(_N):
            m.n[j] = m.sum[j] = m.peak[j] = 0
            m.new_n[j] = m.new_sum[j] = m.new_peak[j] = 0
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


@numba.njit(**LENT)
def _write_siblings(
    g: Any,  # a record of GROUP
    m: Any,  # a record of MEMBER
    me: int,
    out: Any,  # (n, n_features) float32, written
    i: int,
) -> None:
    out[i, AT.sibling_tasks] = math.log2(1.0 + g.seen - max(m.seen, 0))
    for j in range(_N):
        o = AT.sibling_tasks + 1 + N_SIBLING * j
        n, now_n = g.n[j] - m.n[j], g.now_n[j] - m.now_n[j]
        tasks = g.tasks[j] - (1 if m.n[j] > 0 else 0)
        top = g.next[j] if g.who[j] == me else g.top[j]
        now_top = g.now_next[j] if g.now_who[j] == me else g.now_top[j]
        out[i, o + OF_OTHERS.mean] = (g.sum[j] - m.sum[j]) / n / SCALE if n > 0 else math.nan
        out[i, o + OF_OTHERS.peak] = (g.peaks[j] - m.peak[j]) / tasks / SCALE if tasks > 0 else math.nan
        out[i, o + OF_OTHERS.max] = (top - 1) / SCALE if top > 0 else math.nan
        out[i, o + OF_OTHERS.now] = (g.now_sum[j] - m.now_sum[j]) / now_n / SCALE if now_n > 0 else math.nan
        out[i, o + OF_OTHERS.now_max] = (now_top - 1) / SCALE if now_top > 0 else math.nan


@numba.njit(**LENT)
def _write_earlier_runs(
    g: Any,  # a record of GROUP
    own: Any,  # the record of GROUP of the task's collection
    collection: int,
    out: Any,  # (n, n_features) float32, written
    i: int,
    o: int,
) -> None:
    """Write what the group did without the task's own collection."""
    out[i, o] = math.log2(1.0 + g.seen - own.seen)
    for j in range(_N):
        n, tasks = g.n[j] - own.n[j], g.tasks[j] - own.tasks[j]
        top = g.next[j] if g.who[j] == collection else g.top[j]
        k = o + 1 + N_GROUP * j
        out[i, k + OF_OTHERS.mean] = (g.sum[j] - own.sum[j]) / n / SCALE if n > 0 else math.nan
        out[i, k + OF_OTHERS.peak] = (g.peaks[j] - own.peaks[j]) / tasks / SCALE if tasks > 0 else math.nan
        out[i, k + OF_OTHERS.max] = (top - 1) / SCALE if top > 0 else math.nan


@numba.njit(**LENT)
def _write_none(
    out: Any,  # (n, n_features) float32, written
    i: int,
    o: int,
) -> None:
    out[i, o] = 0.0
    for k in range(o + 1, o + 1 + N_GROUP * _N):
        out[i, k] = math.nan
