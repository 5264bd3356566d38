"""Takes a cell at one moment of the test period: running tasks, their reservations, the machines, and usage to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import is_last
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.schema import DAY_US, RESOURCES, TIERS, UNKNOWN_ID
from reclaim.data.windows import demand
from reclaim.replay.closed_loop.constraints import Constraints, most_per_machine
from reclaim.replay.closed_loop.workload import machines_at, priorities
from reclaim.replay.experiment import ORACLE, Source
from reclaim.replay.experiments.compaction.contenders import Key, foreseen
from reclaim.replay.experiments.compaction.packing import Booked, MachineSet, TaskSet
from reclaim.replay.open_loop.estimates import LIMIT, Estimates
from reclaim.replay.open_loop.history import current_reservations, oracle
from reclaim.replay.open_loop.machines import MachineContenders
from reclaim.replay.open_loop.period import Period
from reclaim.replay.open_loop.share import Share

HOUR_OF_DAY: Final = 14.0
"""Hour of Borg's checkpoints, in the cell's own time (EuroSys'15, section 5.1)."""
HANDFUL: Final = 5
"""A task is picky if no more machines of the whole cell could take it; Borg's paper says "a handful"."""


class EmptyCheckpointError(ConfigError):
    """Nothing can be placed at a moment; ``reason`` is a clause without numbers of that moment."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Checkpoint:
    """Tasks that run at a moment, alloc instances among them, and the cell that they run in.

    Attributes
    ----------
    time_us : int
        On the trace's clock.
    rows : int64, shape (n,)
        Current window of each task, a row of the history.
    workload : TaskSet
        ``n`` tasks, without those inside alloc instances, which use the instance's resources.
    machines : MachineSet
        Of the period, those that take work.
    reserved : mapping of (estimator, margin) to Booked
        The current reservations, the limit where they are unknown; or the prediction of an estimator of machines.
    used : float64, shape (n, n_slots, n_resources)
        Demand of each task in each slot of the horizon that begins now (``data.windows.demand``); 0 after its end.
    too_large : int
        Tasks left out because no machine that they may run on is as large as their limit.
    """

    time_us: int
    rows: NDArray[np.int64]
    workload: TaskSet
    machines: MachineSet
    reserved: Mapping[Key, Booked]
    used: NDArray[np.float64]
    too_large: int

    @property
    def within_limits(self) -> NDArray[np.float64]:
        """``used``, each up to its current limit: no reservation could cover more; 0 where no limit is known."""
        return np.minimum(self.used, self.workload.limit[:, None])


def checkpoint_times(period: Period, count: int, horizon_s: int, monday_us: int) -> list[int]:
    """Return moments spread over the test period, at ``HOUR_OF_DAY`` where their part of it has that hour; µs.

    Each is the start of a slot of its own, so that usage is measured over the very horizon of the reservations.

    Raises
    ------
    ConfigError
        There are fewer slots than moments.
    HistoryTooShortError
        The test period is no longer than the horizon.
    """
    slots = period.slots
    first, last = slots.first_us, slots.stop_us - horizon_s * 1_000_000
    if last <= first:
        raise HistoryTooShortError(
            f"the test period is {(last - first) // 1_000_000 + horizon_s} s long, a checkpoint needs the "
            f"{horizon_s} s of its horizon after it and more; replay a longer trace or a shorter horizon"
        )
    n_slots = -(-(last - first) // slots.slot_us)
    if count > n_slots:
        raise ConfigError(f"checkpoints must be at most {n_slots}, as many as begin a slot of their own, got {count}")
    edges = [first + n_slots * i // count * slots.slot_us for i in range(count + 1)]
    times = []
    for begin, end in pairwise(edges):
        middle = (begin + end) // 2
        hour = int(HOUR_OF_DAY * 3_600_000_000)
        at_hour = (middle - monday_us - hour + DAY_US // 2) // DAY_US * DAY_US + monday_us + hour  # the nearest
        time = at_hour if begin <= at_hour < end else middle
        times.append(first + (time - first) // slots.slot_us * slots.slot_us)
    return times


def check_times(period: Period, times: Sequence[int], horizon_s: int) -> None:
    """Check that the horizon of every moment ends within the test period; µs on the trace's clock.

    Raises
    ------
    HistoryTooShortError
        One does not: usage after the period is not known, and would count as none.
    """
    end = period.slots.stop_us
    latest = end - horizon_s * 1_000_000
    if late := [time for time in times if time > latest]:
        raise HistoryTooShortError(
            f"at_us: {max(late)} is {(end - max(late)) // 1_000_000} s before the end of the test period, its horizon "
            f"takes {horizon_s} s; name moments up to {latest}, or a shorter horizon"
        )


def take_checkpoint(
    source: Source,
    estimates: Estimates,
    constraints: Constraints,
    time_us: int,
    horizon_s: int,
    contenders: MachineContenders | None = None,
) -> Checkpoint:
    """Take a checkpoint of the test period, with what every estimator reserves under each of its margins.

    ``contenders`` are further ones. Errors are those of ``take_bare``.
    """
    bare = take_bare(source, estimates, constraints, time_us, horizon_s, estimates.period.rows)
    contenders = contenders or MachineContenders()
    reserved = _reservations(estimates, bare.rows, contenders)
    return replace(
        bare,
        reserved={
            **{key: np.where(np.isnan(of), bare.workload.limit, of) for key, of in reserved.items()},
            **foreseen(contenders, bare.rows),
        },
    )


def take_bare(
    source: Source,
    estimates: Estimates,
    constraints: Constraints,
    time_us: int,
    horizon_s: int,
    among: NDArray[np.int64],
) -> Checkpoint:
    """Take a checkpoint of some rows of the history, with nothing reserved.

    Raises
    ------
    EmptyCheckpointError
        No task of the rows runs at the time, no machine takes work then, or none is large enough for any of the
        tasks.
    NoMachinesError
        The trace has no machines.
    """
    windows = estimates.history.windows
    rows = among[(windows.start_us[among] <= time_us) & (time_us < windows.end_us[among])]
    number = windows.task_numbers()
    rows = rows[is_last(number[rows])]  # of two at the same time, the later one
    if not len(rows):
        slots = estimates.period.slots
        raise EmptyCheckpointError(
            "no task runs",
            f"no task runs at {time_us} µs; "
            f"the test period is {slots.first_us} to {slots.stop_us} µs on the trace's clock",
        )
    machines = _machines_at(source.dataset, constraints, time_us, estimates.period.share)
    if not len(machines):
        raise EmptyCheckpointError(
            "no machine takes work",
            f"no machine takes work at {time_us} µs; name other moments: `--set 'at_us=[...]'`",
        )
    workload = _workload_at(source, estimates, constraints, rows, machines, time_us)
    hosts = hosts_of(workload, machines)
    kept = hosts > 0
    if not kept.any():
        raise EmptyCheckpointError(
            "no task fits a machine that it may run on",
            f"none of the {len(kept)} tasks at {time_us} µs fits any machine that it may run on; look at the trace's "
            "capacities and placement constraints, or name other moments: `--set 'at_us=[...]'`",
        )
    workload, rows = replace(workload, picky=hosts <= HANDFUL).take(kept), rows[kept]
    return Checkpoint(
        time_us=time_us,
        rows=rows,
        workload=workload,
        machines=machines,
        reserved={},
        used=_used(estimates, rows, number, time_us, horizon_s),
        too_large=int((~kept).sum()),
    )


def hosts_of(workload: TaskSet, machines: MachineSet) -> NDArray[np.int64]:
    """Return the number of machines that may take each task and, when empty, have room for its limit; (n,)."""
    kinds, kind = np.unique(
        np.column_stack([workload.limit, workload.constraint_set]), axis=0, return_inverse=True
    )  # siblings are equal
    hosts = np.array(
        [
            np.count_nonzero((machines.capacity >= limit).all(axis=1) & machines.allowed[int(of)])
            for *limit, of in kinds.tolist()
        ],
        np.int64,
    )
    return hosts[kind.reshape(-1)]


def _machines_at(dataset: Dataset, constraints: Constraints, time_us: int, share: Share) -> MachineSet:
    found = machines_at(dataset, time_us, share)
    return MachineSet(
        np.ascontiguousarray(found.state["capacity"], np.float64), constraints.allowed(found.ids, time_us)
    )


def _workload_at(
    source: Source,
    estimates: Estimates,
    constraints: Constraints,
    rows: NDArray[np.int64],
    machines: MachineSet,
    time_us: int,
) -> TaskSet:
    """Return the tasks of rows; constraints are soft for jobs of more tasks than half the cell has machines."""
    windows = estimates.history.windows
    collection = windows.collection_id[rows]
    jobs, job, size = np.unique(collection, return_inverse=True, return_counts=True)
    return TaskSet(
        limit=np.nan_to_num(windows.limit[rows]),
        production=windows.tier[rows] >= TIERS.index("prod"),
        priority=np.nan_to_num(priorities(source, estimates.history.source_row[rows]), nan=UNKNOWN_ID).astype(np.int64),
        constraint_set=constraints.set_of(collection, windows.instance_index[rows], time_us),
        job=job.astype(np.int64),
        most=most_per_machine(source.dataset, jobs)[job],
        soft=size[job] > len(machines) / 2,
        picky=np.zeros(len(rows), np.bool_),
    )


def _reservations(
    estimates: Estimates, rows: NDArray[np.int64], contenders: MachineContenders
) -> dict[Key, NDArray[np.float64]]:
    """Return the reservations current as the windows of rows began, from these and their previous windows alone."""
    before = estimates.history.previous[rows]
    around = np.union1d(rows, before[before >= 0])
    history = estimates.history.take(around)
    few = replace(
        estimates,
        history=history,
        answers={name: of.take(around) for name, of in estimates.answers.items()},
    )
    at = np.searchsorted(around, rows)
    reserved = {
        (ORACLE, "none"): current_reservations(oracle(history).reservation, history)[at],
        (LIMIT, "none"): estimates.history.windows.limit[rows],
    }
    answered = {(name, margin): of for name in estimates.answers for margin, of in few.reservations(name).items()}
    for key, reservation in (answered | contenders.reserved(few)).items():
        reserved[key] = current_reservations(reservation, history)[at]
    return reserved


def _used(
    estimates: Estimates, rows: NDArray[np.int64], number: NDArray[np.int64], time_us: int, horizon_s: int
) -> NDArray[np.float64]:
    """Return the demand of the tasks of rows in the slots of the horizon; shape (n, n_slots, n_resources).

    A window counts in the slot in which it begins, and in as many more as it is long.
    """
    slot_us = estimates.period.slots.slot_us
    n_slots = -(-horizon_s * 1_000_000 // slot_us)
    windows = estimates.history.windows
    task = np.full(int(number[-1]) + 1, -1, np.int64)
    task[number[rows]] = np.arange(len(rows))
    soon = np.flatnonzero(
        (windows.end_us > time_us) & (windows.start_us < time_us + n_slots * slot_us) & (task[number] >= 0)
    )
    begin_us = np.maximum(windows.start_us[soon] - time_us, 0)
    many = -(-(windows.end_us[soon] - time_us - begin_us) // slot_us)
    window = np.repeat(np.arange(len(soon)), many)
    slot = (begin_us // slot_us - (np.cumsum(many) - many))[window] + np.arange(len(window))
    window, slot = window[slot < n_slots], slot[slot < n_slots]
    used = np.zeros((len(rows), n_slots, len(RESOURCES)))
    np.maximum.at(used, (task[number[soon[window]]], slot), np.nan_to_num(demand(windows.take(soon)))[window])
    return used
