"""Packs tasks onto machines from scratch, by Borg's rules, and finds the fewest machines that hold them all.

Production is placed by its limits and never relies on reclaimed resources: on no machine do these limits sum to more
than the capacity. What is booked of all tasks sums to no more than the capacity either: of each its reservation, or its
limit without reclamation. An estimator of machines books for all tasks on a machine together (``Foreseen``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.replay.closed_loop.placement import POLICIES, POLICY, score
from reclaim.training.machines.curve import COMPILED, reserve
from reclaim.training.machines.estimator import MachineEstimator
from reclaim.training.machines.terms import N_TERMS, T_HELD, T_USAGE
from reclaim.training.margins.violation import room as room_of

PENDING_SHARE: Final = 0.002
"""Share of the tasks that may go pending, if picky (EuroSys'15, section 5.1)."""
MOST_CLONES: Final = 8
"""Most clones of a cell that is too small for its own tasks; Borg's paper says "a few times"."""
_ROUNDING: Final = 1e-9
"""More than the rounding of a score, which is a few units at most."""
LOOK_BELOW: Final = 3
"""Numbers below the answer of a bisection that are tried as well: packing is not monotone, so fewer machines may fit
where more do not."""


@dataclass(frozen=True)
class TaskSet:
    """``n`` tasks to place.

    Attributes
    ----------
    limit : float64, shape (n, n_resources)
    production : bool, shape (n,)
        Placed by limit.
    priority : int64, shape (n,)
        Higher is placed first.
    constraint_set : int64, shape (n,)
        Row of ``MachineSet.allowed``.
    job : int64, shape (n,)
        Collection, from 0.
    most : int64, shape (n,)
        Tasks of the job that may share a machine; 0 for any number.
    soft : bool, shape (n,)
        Whether constraints and ``most`` are preferences.
    picky : bool, shape (n,)
        Whether the task may go pending.
    """

    limit: NDArray[np.float64]
    production: NDArray[np.bool_]
    priority: NDArray[np.int64]
    constraint_set: NDArray[np.int64]
    job: NDArray[np.int64]
    most: NDArray[np.int64]
    soft: NDArray[np.bool_]
    picky: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.priority)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> TaskSet:
        """Return the chosen tasks, in the order given."""
        return TaskSet(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def order(self, booked: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the order of placement: by priority from high to low, then from large to small.

        Borg goes round-robin through the users of a priority, for fairness in its queue. Here all tasks must fit, and
        large ones first pack best (first fit decreasing).
        """
        size = np.where(self.production[:, None], np.maximum(self.limit, booked), booked)
        whole = size.sum(axis=0)
        share = (size / np.where(whole > 0, whole, 1.0)).max(axis=1, initial=0.0)
        return np.lexsort((-share, -self.priority))


@dataclass(frozen=True)
class MachineSet:
    """``m`` machines; the first ``n`` of them are a smaller cell.

    Attributes
    ----------
    capacity : float64, shape (m, n_resources)
    allowed : bool, shape (n_sets, m)
        Machines that the tasks of each constraint set may use.
    """

    capacity: NDArray[np.float64]
    allowed: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.capacity)

    @cached_property
    def kind(self) -> NDArray[np.int64]:
        """Number of each machine's capacity among those that differ; shape (m,)."""
        return np.unique(self.capacity, axis=0, return_inverse=True)[1].reshape(-1)

    def take(self, rows: NDArray[np.int64]) -> MachineSet:
        """Return the chosen machines, in the order given; one chosen twice is cloned."""
        return MachineSet(np.ascontiguousarray(self.capacity[rows]), np.ascontiguousarray(self.allowed[:, rows]))


@dataclass(frozen=True)
class Foreseen:
    """Books for the tasks of a machine together what an estimator of machines reserves for them.

    Attributes
    ----------
    terms : float64, shape (n, n_resources, N_TERMS)
        What each task adds to the sums of its machine.
    estimator : MachineEstimator
    margins : tuple of float, in the order ``schema.RESOURCES``
    """

    terms: NDArray[np.float64]
    estimator: MachineEstimator
    margins: tuple[float, ...]

    def of_sets(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what is booked for sets, shape (n, n_resources, N_TERMS); shape (n, n_resources)."""
        return self.estimator.at(self.margins, sums)

    def compiled(self) -> tuple[NDArray[np.float64], NDArray[Any]]:
        """Return margins and curves by resource, as kernels take them; shape (n_resources,) each."""
        curves = zip(self.estimator.curves, self.estimator.mean_limit, strict=True)
        return np.array(self.margins), np.concatenate([curve.compiled(mean_limit) for curve, mean_limit in curves])


Booked = NDArray[np.float64] | Foreseen
"""Resources booked for each task, shape (n, n_resources), without NaN; or for the tasks of a machine together."""


def booked_on(booked: Booked, placed: NDArray[np.int64], n: int) -> NDArray[np.float64]:
    """Return what is booked on ``n`` machines for the tasks placed there, -1 for nowhere; shape (n, n_resources)."""
    here = placed >= 0
    each = booked.terms if isinstance(booked, Foreseen) else booked
    sums = np.zeros((n, *each.shape[1:]))
    np.add.at(sums, placed[here], each[here])
    return booked.of_sets(sums) if isinstance(booked, Foreseen) else sums


def not_held(when: str) -> ConfigError:
    """Return the error of a cell whose tasks ``MOST_CLONES`` of it do not hold."""
    return ConfigError(
        f"{MOST_CLONES} times the cell's machines do not hold the tasks that ran {when}; "
        "the trace's machines table does not fit its tasks: look at the capacities and the placement constraints"
    )


class _Queue(NamedTuple):
    """Tasks in the order of placement, ``n`` of them; fields without a description are those of ``TaskSet``."""

    limit: NDArray[np.float64]
    booked: NDArray[np.float64]
    """Booked for each task alone, shape (n, n_resources)."""
    production: NDArray[np.bool_]
    constraint_set: NDArray[np.int64]
    bounded_job: NDArray[np.int64]
    """Number of the job among those with a bound, -1 for one without; shape (n,)."""
    most: NDArray[np.int64]
    soft: NDArray[np.bool_]
    picky: NDArray[np.bool_]
    terms: NDArray[np.float64]
    """Terms that each adds to the sums of its machine, shape (n, n_resources, N_TERMS); (0, n_resources, N_TERMS) where
    resources are booked for each task by itself."""
    margins: NDArray[np.float64]
    curves: NDArray[Any]
    """Of ``Foreseen.compiled``, shape (n_resources,) each; without terms (0,)."""


class _Machines(NamedTuple):
    """Machines and what they have left, ``n`` of them; all but the first three change with every task."""

    capacity: NDArray[np.float64]
    """Shape (n or more, n_resources)."""
    allowed: NDArray[np.bool_]
    """Shape (n_sets, n or more)."""
    kind: NDArray[np.int64]
    """Of ``MachineSet``, shape (n or more,): empty machines of a kind are alike to a task that may run on both."""
    seen: NDArray[np.int64]
    """Last task for which an empty machine of each kind was looked at, shape (n_kinds or more,)."""
    empty: NDArray[np.bool_]
    """Shape (n,)."""
    room: NDArray[np.float64]
    """Capacity left after all that is booked, shape (n, n_resources)."""
    limit_room: NDArray[np.float64]
    """Capacity left after the limits of production, shape (n, n_resources)."""
    together: NDArray[np.int32]
    """Tasks of each bounded job, shape (n_bounded, n)."""
    sums: NDArray[np.float64]
    """Sums of the terms of their tasks, shape (n, n_resources, N_TERMS)."""


class Packer:
    """Packs a workload under one set of reservations onto any number of machines.

    Parameters
    ----------
    workload : TaskSet
    booked : Booked
    policy : str
        One of ``placement.POLICIES``: which of the machines with room takes a task.

    Raises
    ------
    ConfigError
        The policy is unknown.
    """

    def __init__(self, workload: TaskSet, booked: Booked, policy: str = "hybrid") -> None:
        if policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {policy}")
        self._policy = np.zeros(1, POLICY)
        self._policy["stranding"], self._policy["leftover"] = POLICIES[policy]
        alone = booked.of_sets(booked.terms) if isinstance(booked, Foreseen) else booked
        self._order = workload.order(alone)
        jobs, job = np.unique(workload.job[self._order], return_inverse=True)
        bounded = np.unique(job[workload.most[self._order] > 0])
        bounded_job = np.full(len(jobs), -1, np.int64)
        bounded_job[bounded] = np.arange(len(bounded))
        self._n_bounded = len(bounded)
        if isinstance(booked, Foreseen):
            each, together = np.zeros_like(alone), (np.ascontiguousarray(booked.terms[self._order]), *booked.compiled())
            least = booked.terms[..., T_USAGE] + booked.terms[..., T_HELD]
        else:
            each = booked[self._order]
            together = np.zeros((0, alone.shape[1], N_TERMS)), np.zeros(0), np.zeros(0, COMPILED)
            least = booked
        self._queue = _Queue(
            np.ascontiguousarray(workload.limit[self._order]),
            np.ascontiguousarray(each),
            workload.production[self._order],
            workload.constraint_set[self._order],
            bounded_job[job],
            workload.most[self._order],
            workload.soft[self._order],
            workload.picky[self._order],
            *together,
        )
        must, by_limit = ~workload.picky, ~workload.picky & workload.production
        self._least = np.stack([least[must].sum(axis=0), workload.limit[by_limit].sum(axis=0)])  # (2, R)
        self._pending = int(PENDING_SHARE * len(workload))

    def place(self, machines: MachineSet, n: int) -> NDArray[np.int64] | None:
        """Return which of the first ``n`` machines takes each task, (n_tasks,), -1 for pending; None without a fit."""
        room = room_of(machines.capacity[:n])
        together = np.zeros((self._n_bounded, n), np.int32)
        sums = np.zeros((n, *self._queue.terms.shape[1:]))
        kind, empty = machines.kind, np.ones(n, np.bool_)
        seen = np.full(len(kind), -1, np.int64)
        left = _Machines(machines.capacity, machines.allowed, kind, seen, empty, room, room.copy(), together, sums)
        placed = np.full(len(self._order), -1, np.int64)
        fits = _place(self._queue, left, self._policy[0], self._pending, np.empty(N_TERMS), placed)
        if not fits:
            return None
        out = np.empty_like(placed)
        out[self._order] = placed
        return out

    def fewest(self, machines: MachineSet) -> tuple[int, NDArray[np.int64]] | None:
        """Return the smallest number of machines found that fits, with the machine of each task; None without a fit.

        The ``LOOK_BELOW`` numbers below it do not fit. Smaller numbers were not all tried.
        """
        placed = self.place(machines, len(machines))
        if placed is None:
            return None
        high, low = len(machines), self._too_few(machines)
        while high - low > 1:
            middle = (low + high) // 2
            tried = self.place(machines, middle)
            if tried is None:
                low = middle
            else:
                high, placed = middle, tried
        below = 2  # one below does not fit
        while below <= LOOK_BELOW and high - below > 0:
            tried = self.place(machines, high - below)
            if tried is None:
                below += 1
            else:
                high, placed, below = high - below, tried, 1
        return high, placed

    def _too_few(self, machines: MachineSet) -> int:
        """Return a number of machines whose capacity is less than what must be booked, or 0."""
        total = room_of(np.cumsum(machines.capacity, axis=0)[:, None, :])  # (m, 1, R)
        return int((total < self._least).any(axis=(1, 2)).sum())


@numba.njit(**LENT)
def _place(
    queue: Any,  # _Queue
    machines: Any,  # _Machines, changed
    policy: Any,  # record of placement.POLICY
    may_wait: int,
    both: Any,  # (N_TERMS,) float64, changed
    placed: Any,  # (n,) int64, written
) -> bool:
    """Place tasks in their order; return False as soon as a task that must fit does not."""
    for i in range(len(placed)):
        at = _best(i, queue, machines, policy, both, True)
        if at < 0 and queue.soft[i]:
            at = _best(i, queue, machines, policy, both, False)
        if at < 0:
            may_wait -= 1
            if may_wait < 0 or not queue.picky[i]:
                return False
            continue
        placed[i] = at
        machines.empty[at] = False
        if queue.bounded_job[i] >= 0:
            machines.together[queue.bounded_job[i], at] += 1
        for r in range(machines.room.shape[1]):
            machines.room[at, r] -= queue.booked[i, r]
            if queue.production[i]:
                machines.limit_room[at, r] -= queue.limit[i, r]
            if len(queue.terms):
                for k in range(machines.sums.shape[2]):
                    machines.sums[at, r, k] += queue.terms[i, r, k]
    return True


@numba.njit(**LENT)
def _best(
    i: int,
    queue: Any,  # _Queue
    machines: Any,  # _Machines
    policy: Any,  # record of placement.POLICY
    both: Any,  # (N_TERMS,) float64, changed
    hard: bool,
) -> int:
    """Return the machine that takes one task, -1 for none; constraints and ``most`` count only if ``hard``."""
    limit, booked, production = queue.limit[i], queue.booked[i], queue.production[i]
    job, most, terms, margins, curves = queue.bounded_job[i], queue.most[i], queue.terms, queue.margins, queue.curves
    capacity, allowed = machines.capacity, machines.allowed[queue.constraint_set[i]]
    room, limit_room, together, sums = machines.room, machines.limit_room, machines.together, machines.sums
    kind, seen, empty = machines.kind, machines.seen, machines.empty
    best, least = -1, np.inf
    for m in range(room.shape[0]):
        cpu, memory = room[m, 0] - booked[0], room[m, 1] - booked[1]
        if cpu < 0 or memory < 0:
            continue
        if production:
            limit_cpu, limit_memory = limit_room[m, 0] - limit[0], limit_room[m, 1] - limit[1]
            if limit_cpu < 0 or limit_memory < 0:
                continue
            cpu, memory = min(cpu, limit_cpu), min(memory, limit_memory)
        if hard and (not allowed[m] or (most > 0 and together[job, m] >= most)):
            continue
        if empty[m]:
            if seen[kind[m]] == i:  # another one like it came first
                continue
            seen[kind[m]] = i
        if len(terms):
            cpu = min(cpu, room[m, 0] - _with(sums[m, 0], terms[i, 0], margins[0], curves[0], both))
            if cpu < 0 or _scores_more(cpu / capacity[m, 0], memory / capacity[m, 1], policy, least):
                continue
            memory = min(memory, room[m, 1] - _with(sums[m, 1], terms[i, 1], margins[1], curves[1], both))
            if memory < 0:
                continue
        its_score = score(cpu / capacity[m, 0], memory / capacity[m, 1], policy.stranding, policy.leftover)
        if its_score < least:
            best, least = m, its_score
    return best


@numba.njit(**LENT)
def _scores_more(cpu: float, most: float, policy: Any, least: float) -> bool:
    """Say whether a machine with this share of CPU left certainly scores more, with memory from 0 to a share left.

    The score is straight in the memory left, on either side of the CPU left.
    """
    for memory in (0.0, min(cpu, most), most):
        if score(cpu, memory, policy.stranding, policy.leftover) <= least + _ROUNDING:
            return False
    return True


@numba.njit(inline="always")
def _with(sums: Any, terms: Any, margin: float, curve: Any, both: Any) -> Any:
    """Return what is reserved for a machine's tasks and one more."""
    for k in range(len(both)):
        both[k] = sums[k] + terms[k]
    return reserve(both, margin, curve)
