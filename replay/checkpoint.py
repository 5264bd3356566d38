"""A cell at one moment of the test period: what runs, on which machines, and what will be used from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.schema import PRIORITY, RESOURCES, TIERS, UNKNOWN_ID
from reclaim.data.store import Dataset
from reclaim.data.windows import demand
from reclaim.features.store import FeatureSet
from reclaim.replay.cell import Cell
from reclaim.replay.constants import DAY_US
from reclaim.replay.constraints import Constraints, most_per_machine
from reclaim.replay.folded import LIMIT, Folded
from reclaim.replay.kinds import ORACLE, Source
from reclaim.replay.openloop import in_force, oracle
from reclaim.replay.packing import Machines, Workload
from reclaim.replay.workload import machines_of

HOUR_OF_DAY: Final = 14.0
"""When Borg's checkpoints were taken, in the cell's own time (EuroSys'15, section 5.1)."""
HANDFUL: Final = 5
"""A task is picky if no more machines of the whole cell could take it; Borg's paper says "a handful"."""


@dataclass(frozen=True)
class Checkpoint:
    """The tasks that run at a moment, alloc instances among them, and the cell that they run in.

    Attributes
    ----------
    time_us : int
        On the trace's clock.
    workload : Workload
        ``n`` tasks; a task that runs inside an alloc instance lives off that, and is not among them.
    machines : Machines
        Of the cell, those that take work.
    held : mapping of (estimator, margin) to float64, shape (n, n_resources)
        The reservations in force; the limit where nothing else is known.
    used : float64, shape (n, n_slots, n_resources)
        What each task really needed in each slot of the horizon that begins now: ``data.windows.demand``; 0 once it
        has ended.
    too_large : int
        Tasks left out because no machine that they may run on is as large as their limit.
    """

    time_us: int
    workload: Workload
    machines: Machines
    held: Mapping[tuple[str, str], NDArray[np.float64]]
    used: NDArray[np.float64]
    too_large: int


def checkpoint_times(cell: Cell, count: int, horizon_s: int, monday_us: int) -> list[int]:
    """Return moments spread over the test period, at ``HOUR_OF_DAY`` where their part of it has that hour; µs.

    Each begins a slot of its own, so that the horizon measured is the one that reservations were promised for.

    Raises
    ------
    ConfigError
        There are fewer slots than moments.
    HistoryTooShortError
        The test period is no longer than the horizon.
    """
    first, last = period(cell)
    last -= horizon_s * 1_000_000
    if last <= first:
        raise HistoryTooShortError(
            f"the test period is {(last - first) // 1_000_000 + horizon_s} s long, a checkpoint needs the "
            f"{horizon_s} s of its horizon after it and more; replay a longer trace or a shorter horizon"
        )
    slot_us = cell.slots.slot_s * 1_000_000
    slots = -(-(last - first) // slot_us)
    if count > slots:
        raise ConfigError(f"checkpoints must be at most {slots}, as many as begin a slot of their own, got {count}")
    edges = [first + slots * i // count * slot_us for i in range(count + 1)]
    times = []
    for begin, end in pairwise(edges):
        middle = (begin + end) // 2
        hour = int(HOUR_OF_DAY * 3_600_000_000)
        at_hour = (middle - monday_us - hour + DAY_US // 2) // DAY_US * DAY_US + monday_us + hour  # the nearest
        time = at_hour if begin <= at_hour < end else middle
        times.append(first + (time - first) // slot_us * slot_us)
    return times


def check_times(cell: Cell, times: Sequence[int], horizon_s: int) -> None:
    """Check that the horizon of every moment ends within the test period; µs on the trace's clock.

    Raises
    ------
    HistoryTooShortError
        One does not: what is used after the period is not known, and would count as nothing.
    """
    _, end = period(cell)
    latest = end - horizon_s * 1_000_000
    if late := [time for time in times if time > latest]:
        raise HistoryTooShortError(
            f"at_us: {max(late)} is {(end - max(late)) // 1_000_000} s before the end of the test period, its horizon "
            f"takes {horizon_s} s; name moments up to {latest}, or a shorter horizon"
        )


def period(cell: Cell) -> tuple[int, int]:
    """Return the start and the end of the test period, µs on the trace's clock."""
    return cell.slots.first_us, cell.slots.first_us + cell.slots.count * cell.slots.slot_s * 1_000_000


def take_checkpoint(
    source: Source, folded: Folded, constraints: Constraints, time_us: int, horizon_s: int
) -> Checkpoint:
    """Take a checkpoint of the test period, with what every estimator reserves under each of its margins.

    Raises
    ------
    ConfigError
        No task of the test period runs at the time, no machine takes work then, none is large enough for any of the
        tasks, or the trace does not tell of machines.
    """
    history, test = folded.history, folded.cell.test
    windows = history.windows
    rows = test[(windows.start_us[test] <= time_us) & (time_us < windows.end_us[test])]
    number = windows.task_numbers()
    rows = rows[np.append(np.diff(number[rows]) != 0, True)] if len(rows) else rows  # of two at once, the later one
    if not len(rows):
        first, last = period(folded.cell)
        raise ConfigError(f"no task runs at {time_us} µs; the test period is {first} to {last} µs on the trace's clock")
    machines = _machines_at(source.dataset, constraints, time_us)
    if not len(machines):
        raise ConfigError(f"no machine takes work at {time_us} µs; name other moments: `--set 'at_us=[...]'`")
    workload = _workload_at(source, folded, constraints, rows, machines, time_us)
    hosts = hosts_of(workload, machines)
    kept = hosts > 0
    if not kept.any():
        raise ConfigError(
            f"none of the {len(kept)} tasks at {time_us} µs fits any machine that it may run on; look at the trace's "
            "capacities and placement constraints, or name other moments: `--set 'at_us=[...]'`"
        )
    workload, rows = replace(workload, picky=hosts <= HANDFUL).take(kept), rows[kept]
    return Checkpoint(
        time_us=time_us,
        workload=workload,
        machines=machines,
        held={key: _known(held, workload.limit) for key, held in _held(folded, rows).items()},
        used=_used(folded, rows, number, time_us, horizon_s),
        too_large=int((~kept).sum()),
    )


def hosts_of(workload: Workload, machines: Machines) -> NDArray[np.int64]:
    """Return how many machines are allowed to take each task and, were they empty, have room for its limit; (n,)."""
    kinds, kind = np.unique(
        np.column_stack([workload.limit, workload.constraint_set]), axis=0, return_inverse=True
    )  # siblings are alike
    hosts = np.array(
        [
            np.count_nonzero((machines.capacity >= limit).all(axis=1) & machines.allowed[int(of)])
            for *limit, of in kinds.tolist()
        ],
        np.int64,
    )
    return hosts[kind.reshape(-1)]


def _machines_at(dataset: Dataset, constraints: Constraints, time_us: int) -> Machines:
    found = machines_of(dataset, time_us, time_us + 1)
    takes_work = found.state["up"] & found.state["open"]
    return Machines(
        np.ascontiguousarray(found.state["capacity"][takes_work], np.float64),
        constraints.allowed(found.ids[takes_work], time_us),
    )


def _workload_at(
    source: Source, folded: Folded, constraints: Constraints, rows: NDArray[np.int64], machines: Machines, time_us: int
) -> Workload:
    """Return the tasks of rows; constraints are soft for jobs of more tasks than half the cell has machines."""
    windows = folded.history.windows
    collection = windows.collection_id[rows]
    jobs, job, size = np.unique(collection, return_inverse=True, return_counts=True)
    return Workload(
        limit=np.nan_to_num(windows.limit[rows]),
        production=windows.tier[rows] >= TIERS.index("prod"),
        priority=_priority(source.dataset, source.features, folded.history.source_row[rows]),
        constraint_set=constraints.set_of(collection, windows.instance_index[rows], time_us),
        job=job.astype(np.int64),
        most=most_per_machine(source.dataset, jobs)[job],
        soft=size[job] > len(machines) / 2,
        picky=np.zeros(len(rows), np.bool_),
    )


def _priority(dataset: Dataset, features: FeatureSet, source_row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the priority of rows of the dataset's usage, -1 unknown; read bucket by bucket."""
    out = np.empty(len(source_row), np.int64)
    bucket = np.searchsorted(features.bucket_start, source_row, side="right") - 1
    for b in np.unique(bucket).tolist():
        column = dataset.usage(b, [PRIORITY])[PRIORITY].fill_null(UNKNOWN_ID).to_numpy()
        out[bucket == b] = column[source_row[bucket == b] - features.bucket_start[b]]
    return out


def _held(folded: Folded, rows: NDArray[np.int64]) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Return the reservations in force when the windows of rows began; of those windows and the ones before alone."""
    before = folded.history.previous[rows]
    around = np.union1d(rows, before[before >= 0])
    history = folded.history.take(around)
    few = replace(
        folded,
        history=history,
        bases={name: {m: base.take(around) for m, base in both.items()} for name, both in folded.bases.items()},
    )
    at = np.searchsorted(around, rows)
    held = {
        (ORACLE, "none"): in_force(oracle(history).reservation, history)[at],
        (LIMIT, "none"): folded.history.windows.limit[rows],
    }
    for name in folded.bases:
        for margin, reservation in few.reservations(name).items():
            held[name, margin] = in_force(reservation, history)[at]
    return held


def _known(held: NDArray[np.float64], limit: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isnan(held), limit, held)


def _used(
    folded: Folded, rows: NDArray[np.int64], number: NDArray[np.int64], time_us: int, horizon_s: int
) -> NDArray[np.float64]:
    """Return the demand of the tasks of rows in the slots of the horizon; shape (n, n_slots, n_resources).

    A window counts in the slot in which it begins, and in as many more as it is long.
    """
    slot_us = folded.cell.slots.slot_s * 1_000_000
    n_slots = -(-horizon_s * 1_000_000 // slot_us)
    windows = folded.history.windows
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
