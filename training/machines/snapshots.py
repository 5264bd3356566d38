"""Lays the machines of a cell out by time, with the tasks on each and the peak that these reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import is_first
from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import Windows, demand
from reclaim.features.registry import SLOT_S
from reclaim.training.machines.following import LATE
from reclaim.training.machines.samples import TaskSamples

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Foresee = Callable[[TaskSamples], Mapping[str, Floats]]
"""Predicts the peaks of one machine's snapshots, by the name of the predictor."""


@dataclass(frozen=True)
class Snapshots:
    """Machines of a cell, one resource, at every time that is judged.

    Attributes
    ----------
    resource : int
    rows : int64, shape (n,)
        Rows of the windows with known usage and limit on a machine, in order of (machine, time).
    snapshot : int64, shape (n,)
        Machine and time of each, from 0, rising.
    machine : int64, shape (n_snapshots,)
        From 0.
    start_us : int64, shape (n_snapshots,)
    peak, limit : float64, shape (n_snapshots,)
        Largest usage within the horizon of the tasks that are there, each up to its limit now; sum of the limits.
    foreseen : mapping of predictor to float64, shape (n_snapshots,)
    n_machines : int
    """

    resource: int
    rows: Ids
    snapshot: Ids
    machine: Ids
    start_us: Ids
    peak: Floats
    limit: Floats
    foreseen: Mapping[str, Floats]
    n_machines: int

    def __len__(self) -> int:
        return len(self.machine)

    def total(self, of_rows: Floats) -> Floats:
        """Sum values of the rows, shape (n,) or (n, k), at each time; shape (n_snapshots,) or (n_snapshots, k)."""
        columns = of_rows.reshape(len(self.rows), -1).T
        sums = [np.bincount(self.snapshot, column, len(self)) for column in columns]
        return np.stack(sums, axis=1).reshape(len(self), *of_rows.shape[1:]).astype(np.float64, copy=False)


def slot_s_of(windows: Windows) -> int:
    """Return the time from one snapshot to the next in seconds: five minutes, or the usual window if it is longer."""
    if len(windows) == 0:
        return SLOT_S
    return max(SLOT_S, int(np.median(windows.end_us - windows.start_us) / 1e6))


def lay_out_cell(
    windows: Windows,
    resource: int,
    slot_us: int,
    horizon_s: int,
    *,
    judged: NDArray[np.bool_] | None = None,
    foresee: Foresee | None = None,
    kind: type[TaskSamples] = TaskSamples,
    engine: Engine = HERE,
) -> Snapshots | None:
    """Return the machines of a cell with their peaks; None where no time can be judged.

    Usage is ``demand``. Of a task's windows in one slot the largest demand counts, and the first one's limit. A peak is
    unknown, and not judged, where the machine has no window within the horizon, or none at its end, up to
    ``following.LATE`` slots later: as in a service (``serving.cell.machine_peaks``).

    Parameters
    ----------
    windows : Windows
        Rows of a task together and in time order.
    resource : int
    slot_us : int
        Time from one snapshot to the next.
    horizon_s : int
    judged : bool, shape (n,), or None
        Rows at whose times machines are judged, where all their rows are; None: all. The others are a machine's record.
    foresee : callable or None
        Called once for each machine; its result is kept in ``Snapshots.foreseen``.
    kind : type of TaskSamples
        The argument of ``foresee``.
    engine : Engine
        Runs a job for each machine.
    """
    usage, limit = demand(windows)[:, resource], windows.limit[:, resource]
    known = np.flatnonzero((windows.machine_id != UNKNOWN_ID) & np.isfinite(usage) & np.isfinite(limit))
    machines, machine = np.unique(windows.machine_id[known], return_inverse=True)
    by_machine = np.argsort(machine.astype(np.int32), kind="stable")
    rows, cuts = known[by_machine], np.searchsorted(machine[by_machine], np.arange(len(machines) + 1))
    task, slot = windows.task_numbers()[rows], windows.start_us[rows] // slot_us

    def jobs() -> Iterator[_Rows]:
        for low, high in pairwise(cuts.tolist()):
            here = np.flatnonzero(is_first(task[low:high], slot[low:high]))
            used = np.maximum.reduceat(usage[rows[low:high]], here)
            here += low
            mine = rows[here]
            of = None if judged is None else judged[mine]
            yield _Rows(mine, slot[here] * slot_us, task[here], used, limit[mine], of)

    lay_out = partial(_lay_out, kind, horizon_s, slot_us, foresee)
    with engine.pool() as pool, closing(pool.each(lay_out, jobs())) as found:
        parts = [m for m in found if m is not None]
    if not parts:
        return None
    offsets = np.cumsum([0, *(len(m.start_us) for m in parts)])
    return Snapshots(
        resource=resource,
        rows=np.concatenate([m.rows for m in parts]),
        snapshot=np.concatenate([m.snapshot + first for m, first in zip(parts, offsets, strict=False)]),
        machine=np.repeat(np.arange(len(parts)), np.diff(offsets)),
        start_us=np.concatenate([m.start_us for m in parts]),
        peak=np.concatenate([m.peak for m in parts]),
        limit=np.concatenate([m.limit for m in parts]),
        foreseen={name: np.concatenate([m.foreseen[name] for m in parts]) for name in parts[0].foreseen},
        n_machines=len(parts),
    )


class _Rows(NamedTuple):
    """Rows of the windows on one machine; which of them are judged, None for all."""

    rows: Ids
    time_us: Ids
    task: Ids
    usage: Floats
    limit: Floats
    judged: NDArray[np.bool_] | None


@dataclass(frozen=True)
class _Machine:
    """One machine's part of ``Snapshots``, its snapshots numbered from 0."""

    rows: Ids
    snapshot: Ids
    start_us: Ids
    peak: Floats
    limit: Floats
    foreseen: Mapping[str, Floats]


def _lay_out(
    kind: type[TaskSamples], horizon_s: int, slot_us: int, foresee: Foresee | None, of: _Rows
) -> _Machine | None:
    """Return one machine at the times that are judged; None where there is none."""
    samples = kind.lay_out(of.time_us, of.task, of.usage, of.limit)
    peak, whole = samples.peak_within(horizon_s), _reaches(samples.times_us, horizon_s, slot_us)
    if of.judged is not None:
        whole &= samples.total(of.judged.astype(np.float64)) == samples.total(np.ones(len(of.rows)))
    chosen = np.flatnonzero(whole)  # where a window ends the horizon the peak is known
    if len(chosen) == 0:
        return None
    foreseen = {} if foresee is None else foresee(samples)
    number_of = np.full(len(whole), -1, np.int64)
    number_of[chosen] = np.arange(len(chosen))
    by_time = np.argsort(samples.snapshot, kind="stable")
    by_time = by_time[number_of[samples.snapshot[by_time]] >= 0]
    return _Machine(
        of.rows[by_time], number_of[samples.snapshot[by_time]], samples.times_us[chosen], peak[chosen],
        samples.total(samples.limit)[chosen], {name: values[chosen] for name, values in foreseen.items()},
    )  # fmt: skip


def _reaches(times_us: Ids, horizon_s: int, slot_us: int) -> NDArray[np.bool_]:
    """Return at which of a machine's times, (T,), it has a window within the horizon, and one at its end."""
    end_us = times_us + horizon_s * 1_000_000
    within = np.searchsorted(times_us, end_us, side="right") > np.arange(len(times_us)) + 1
    at_end = np.searchsorted(times_us, end_us)
    next_us = np.append(times_us, np.iinfo(np.int64).max)[at_end]
    reaches: NDArray[np.bool_] = within & (next_us <= end_us + LATE * slot_us)
    return reaches
