"""Workload of a closed loop: the runs of a test period with their tapes, and the machines that come and go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.oom import oom_columns, oom_events
from reclaim.data.schema import TIER_FLOORS, TIERS, UNKNOWN_ID
from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, MEMORY_MEAN, Windows, demand
from reclaim.replay.closed_loop.constraints import Constraints, most_per_machine
from reclaim.replay.closed_loop.records import (
    AHEAD,
    CHANGE,
    MACHINE_STATE,
    MONITORING,
    NON_PRODUCTION,
    PRODUCTION,
    RUN,
    TAPE,
)
from reclaim.replay.experiment import Source
from reclaim.replay.open_loop.period import Period
from reclaim.replay.open_loop.share import WHOLE, Share

LATENCY_SENSITIVE: Final = 2
"""Scheduling class from which on work is latency-sensitive: the traces' classes go from 0 to 3, "most sensitive"."""

RUN_DEFINITION: Final = (
    "A run is what the trace recorded of a task from one scheduling to the end of it. It is submitted when the trace "
    "says the task was, and its tape, the recorded windows, begins to play when it is placed. Non-production work is "
    "batch: stopped before its end, it goes back to its last checkpoint, and what it had done since is lost. "
    "Production and monitoring are services: their tape follows the clock, so that what is missed is missed. Runs that "
    "were going on when the period began are placed at its first moment, with the reservations of their history. "
    "Machines' attributes are those of that moment."
)

_READY: Final = (s.EventType.SUBMIT, s.EventType.QUEUE, s.EventType.ENABLE)
"""Events after which a task may be scheduled."""
_MACHINE_COLUMNS: Final = (s.TIME_US, s.MACHINE_ID, s.EVENT_TYPE, s.CPU_CAPACITY, s.MEMORY_CAPACITY)


class NoMachinesError(ConfigError):
    """No machine with a capacity is judged, or none is in service, so nothing can be placed."""


@dataclass(frozen=True)
class Workload:
    """Runs in the order of their arrival, and their tapes.

    Attributes
    ----------
    runs : structured array of ``records.RUN``, shape (n_runs,)
        As before the period.
    tape : structured array of ``records.TAPE``, shape (n_rows,)
        The windows of each run, one after the other; CPU and memory in the trace's unit. Where windows are usually
        shorter than a slot, each has the mean CPU and the largest memory of all that begin in its slot of the run.
    row : int64, shape (n_rows,)
        Row of the history that each window is.
    demand : float64, shape (n_rows, n_resources)
        What a reservation had to cover in each window, as ``data.windows.demand``; NaN where unknown. Where windows are
        usually shorter than a slot, the largest of all that begin in its slot of the run.
    masks : bool, shape (n_masks, n_machines)
        Machines on which the runs of each mask may be.
    start_us, stop_us : int
        The period, on the trace's clock.
    slot_s : int
        Length of a slot, in seconds: five minutes, or the usual measurement window where that is longer.
    ends_out_of_memory : bool, shape (n_runs,)
        Whether the recorded run ended out of memory (``data.oom``).
    predecessors : int64, shape (n_pairs, 2)
        A collection, and one that must end before it may start; numbers as in ``runs``.
    """

    runs: NDArray[Any]
    tape: NDArray[Any]
    row: NDArray[np.int64]
    demand: NDArray[np.float64]
    masks: NDArray[np.bool_]
    start_us: int
    stop_us: int
    slot_s: int
    ends_out_of_memory: NDArray[np.bool_]
    predecessors: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    def grown(self, growth: float, seed: int) -> Workload:
        """Return it with ``growth`` times as many collections, drawn by the seed: some of them, or all and clones.

        A clone is submitted when its original is and does the same. One period in which a collection occurs twice is
        harder on a cell than a period in which more collections occur.
        """
        if not growth > 0.0:
            raise ConfigError(f"growth must be above 0, got {growth}")
        collections = np.unique(self.runs["collection"])
        if round(len(collections) * growth) < 1:
            raise ConfigError(f"growth={growth:g} leaves none of {len(collections)} collections; ask for more of them")
        drawn = np.random.default_rng(seed).permutation(collections)
        left = round(len(collections) * growth)
        parts: list[tuple[NDArray[Any], NDArray[np.bool_]]] = []
        while left > 0:
            parts.append(self._copy(np.isin(self.runs["collection"], drawn[:left]), len(parts)))
            left -= len(collections)
        return self._joined(parts)

    def tiled(self, times: int) -> Workload:
        """Return it several times over, on as many times its machines; every copy shares the tape."""
        everything = np.ones(len(self.runs), np.bool_)
        joined = self._joined([self._copy(everything, k) for k in range(times)])
        return replace(joined, masks=np.tile(self.masks, (1, times)))

    def _copy(self, chosen: NDArray[np.bool_], number: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        runs = self.runs[chosen].copy()
        place = np.full(len(self.runs) + 1, -1, np.int64)
        place[np.flatnonzero(chosen)] = np.arange(len(runs))
        runs["after"], runs["then"] = place[runs["after"]], place[runs["then"]]
        runs["collection"] += number * self._collections
        return runs, self.ends_out_of_memory[chosen]

    def _joined(self, parts: list[tuple[NDArray[Any], NDArray[np.bool_]]]) -> Workload:
        offsets = np.cumsum([0, *(len(runs) for runs, _ in parts)])
        for (runs, _), offset in zip(parts, offsets, strict=False):
            for link in ("after", "then"):
                runs[link] = np.where(runs[link] >= 0, runs[link] + offset, -1)
        runs = np.concatenate([runs for runs, _ in parts])
        ends = np.concatenate([ends for _, ends in parts])
        predecessors = np.concatenate([self.predecessors + k * self._collections for k in range(len(parts))])
        # a collection without selected runs has no run that would have to end
        predecessors = predecessors[np.isin(predecessors, runs["collection"]).all(axis=1)]
        return replace(self, runs=runs, ends_out_of_memory=ends, predecessors=predecessors).in_order()

    @property
    def _collections(self) -> int:
        return int(self.runs["collection"].max(initial=0)) + 1

    def in_order(self) -> Workload:
        """Return it with the runs in the order of arrival, then priority, then size."""
        size = self.tape["limit"][self.runs["first"]].sum(axis=1)
        order = np.lexsort((-size, -self.runs["rank"].astype(np.int64), self.runs["arrival_us"]))
        place = np.full(len(order) + 1, -1, np.int64)
        place[order] = np.arange(len(order))
        runs = self.runs[order]
        runs["after"], runs["then"] = place[runs["after"]], place[runs["then"]]
        return replace(self, runs=runs, ends_out_of_memory=self.ends_out_of_memory[order])


@dataclass(frozen=True)
class CellMachines:
    """Machines of a cell over a period.

    Attributes
    ----------
    ids : int64, shape (n_machines,)
    state : structured array of ``records.MACHINE_STATE``, shape (n_machines,)
        Empty, as at the period's start.
    changes : structured array of ``records.CHANGE``
        In the order of their times, within the period.
    """

    ids: NDArray[np.int64]
    state: NDArray[Any]
    changes: NDArray[Any]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def in_service(self) -> NDArray[np.bool_]:
        """Machines that are up at the period's start, with a capacity; shape (n_machines,)."""
        up: NDArray[np.bool_] = self.state["up"] & (self.state["capacity"] > 0).all(axis=1)
        return up

    def subset(self, n: int, seed: int) -> tuple[CellMachines, NDArray[np.int64]]:
        """Return the first ``n`` of the machines in an order drawn by the seed, and their positions among all.

        Of the same seed, fewer machines are always some of the more.
        """
        if not 0 < n <= len(self):
            raise ConfigError(f"expected 1 to {len(self)} machines, got {n}")
        chosen = np.random.default_rng(seed).permutation(len(self))[:n].astype(np.int64)
        return self.take(chosen), chosen

    def take(self, chosen: NDArray[np.int64]) -> CellMachines:
        """Return the chosen machines, in the order given."""
        place = np.full(len(self), -1, np.int64)
        place[chosen] = np.arange(len(chosen))
        changes = self.changes[place[self.changes["machine"]] >= 0].copy()
        changes["machine"] = place[changes["machine"]]
        return CellMachines(self.ids[chosen], self.state[chosen], changes)

    def tiled(self, times: int) -> CellMachines:
        """Return them several times over."""
        parts = []
        for k in range(times):
            changes = self.changes.copy()
            changes["machine"] += k * len(self)
            parts.append(changes)
        changes = np.concatenate(parts)
        changes = changes[np.argsort(changes["at_us"], kind="stable")]
        return CellMachines(np.tile(self.ids, times), np.tile(self.state, times), changes)


def workload_of(source: Source, period: Period, machines: CellMachines) -> Workload:
    """Return the workload of the test period of a dataset, without tasks inside alloc instances.

    Unknown limits and usage count as 0. Constraints are those at a run's submission, machines' attributes those at the
    start of the period.
    """
    history, slots = period.history, period.slots
    seen, start_us, rows = history.windows, slots.first_us, period.rows
    previous = history.previous[rows]
    same_run = previous >= 0
    same_run[same_run] = seen.scheduled_us[previous[same_run]] == seen.scheduled_us[rows[same_run]]
    first = np.flatnonzero(~same_run | (np.concatenate([[-1], rows[:-1]]) != previous))
    n, stop = len(first), np.append(first[1:], len(rows))
    windows, last = seen.take(rows[first]), seen.take(rows[stop - 1])  # of each run
    carried = same_run[first] & (windows.start_us < start_us + slots.slot_us)
    began_us = np.where(carried, start_us, windows.start_us)  # origin of the tape's times
    tape = np.zeros(len(rows), TAPE)
    tape["from_us"] = seen.start_us[rows] - np.repeat(began_us, stop - first)
    memory = np.where(
        np.isnan(seen.usage[rows, MEMORY_MAX]), seen.usage[rows, MEMORY_MEAN], seen.usage[rows, MEMORY_MAX]
    )
    tape["use"] = np.nan_to_num(np.stack([seen.usage[rows, CPU_MEAN], memory], axis=1))
    lengths_us = seen.end_us[rows] - seen.start_us[rows]
    demanded = demand(seen.take(rows))
    if len(rows) and np.median(lengths_us) < slots.slot_us:  # the loop looks at one window in a slot
        run, slot = np.repeat(np.arange(n), stop - first), tape["from_us"] // slots.slot_us
        in_slot = np.flatnonzero((np.diff(run, prepend=-1) != 0) | (np.diff(slot, prepend=-1) != 0))
        tape["use"] = _use_by_slot(tape["use"], in_slot, lengths_us)
        demanded = np.repeat(np.fmax.reduceat(demanded, in_slot), np.diff(in_slot, append=len(rows)), axis=0)
    tape["limit"] = np.nan_to_num(seen.limit[rows])
    runs = np.zeros(n, RUN)
    runs["first"], runs["stop"], runs["cursor"] = first, stop, first
    runs["duration_us"] = last.end_us - began_us
    runs["carried"] = carried
    runs["first_limit"] = tape["limit"][first]
    range_of_limit = [np.minimum.reduceat(tape["limit"], first), np.maximum.reduceat(tape["limit"], first)]
    runs["varies"] = (range_of_limit[0] != range_of_limit[1]).any(axis=1)
    runs["collection"] = np.unique(windows.collection_id, return_inverse=True)[1]
    runs["user"] = np.unique(windows.user, return_inverse=True)[1]  # without users all belong to one
    runs["per_machine"] = most_per_machine(source.dataset, windows.collection_id)
    tier = windows.tier.astype(np.int64)
    upper = [tier == TIERS.index("mon"), tier == TIERS.index("prod")]
    runs["band"] = np.select(upper, [MONITORING, PRODUCTION], NON_PRODUCTION)
    runs["service"] = runs["band"] > NON_PRODUCTION
    sensitive = windows.scheduling_class
    runs["latency"] = np.where(sensitive == UNKNOWN_ID, runs["service"], sensitive >= LATENCY_SENSITIVE)
    floors = np.where(tier == UNKNOWN_ID, 0, np.array(TIER_FLOORS)[tier])
    priority = priorities(source, history.source_row[rows[first]])
    runs["rank"] = np.unique(np.where(np.isnan(priority), floors, priority), return_inverse=True)[1]
    runs["state"], runs["machine"], runs["next"], runs["previous"] = AHEAD, -1, -1, -1
    runs["first_placed_us"] = runs["ready_us"] = -1
    dataset = source.dataset
    events = pa.concat_tables(
        [dataset.events(bucket, oom_columns(dataset.manifest)) for bucket in range(dataset.n_buckets)]
    )
    submitted = np.maximum(_submitted_us(events, windows), start_us)
    arrival = np.minimum(submitted, windows.start_us)  # a window may begin before: its times are whole seconds
    runs["arrival_us"] = np.where(same_run[first], began_us, arrival)  # not carried: after a gap in the record
    task = seen.task_numbers()[rows[first]]
    follows = np.append(False, task[1:] == task[:-1])
    runs["after"] = np.where(follows, np.arange(n) - 1, -1)
    runs["then"] = np.append(np.where(follows[1:], np.arange(1, n), -1), -1)
    constraints = Constraints.read(source.dataset)
    asked_us = np.where(same_run[first], began_us, submitted)
    runs["mask"] = constraints.set_of(windows.collection_id, windows.instance_index, asked_us)
    workload = Workload(
        runs=runs,
        tape=tape,
        row=rows,
        demand=demanded,
        masks=constraints.allowed(machines.ids, start_us),
        start_us=start_us,
        stop_us=slots.stop_us,
        slot_s=slots.slot_s,
        ends_out_of_memory=_ends_out_of_memory(events, last),
        predecessors=_predecessors(source.dataset, windows, last, runs["collection"]),
    )
    return workload.in_order()


def _use_by_slot(
    use: NDArray[np.float64], first: NDArray[np.int64], length_us: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return for each window the mean CPU and the largest memory of its slot of its run; shape (n, n_resources).

    ``use`` is of the windows themselves, shape (n, n_resources); ``first`` are the first windows of each slot.
    """
    cpu = np.add.reduceat(use[:, 0] * length_us, first) / np.add.reduceat(length_us, first)
    memory = np.maximum.reduceat(use[:, 1], first)
    return np.repeat(np.stack([cpu, memory], axis=1), np.diff(first, append=len(use)), axis=0)


def _predecessors(dataset: Dataset, first: Windows, last: Windows, collection: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a collection and one that must end before it starts in each row, by number; shape (n_pairs, 2).

    Only those that did in the record, so that none waits for itself. Windows are the first and the last of each run,
    numbers those of its collection.
    """
    table = dataset.table("collections").select([s.COLLECTION_ID, s.START_AFTER])
    lists = table.filter(pc.is_valid(table[s.START_AFTER]))[s.START_AFTER].combine_chunks()
    owners = table.filter(pc.is_valid(table[s.START_AFTER]))[s.COLLECTION_ID].to_numpy()
    owner = np.repeat(owners, pc.list_value_length(lists).to_numpy(zero_copy_only=False))
    pairs = np.unique(np.column_stack([owner, lists.flatten().to_numpy(zero_copy_only=False)]).astype(np.int64), axis=0)
    ids = np.unique(first.collection_id)
    pairs = np.searchsorted(ids, pairs[np.isin(pairs, ids).all(axis=1)])
    began_us = np.full(len(ids), s.AFTER_TRACE_US)
    ended_us = np.zeros(len(ids), np.int64)
    np.minimum.at(began_us, collection, first.start_us)
    np.maximum.at(ended_us, collection, last.end_us)
    return pairs[ended_us[pairs[:, 1]] <= began_us[pairs[:, 0]]]


def priorities(source: Source, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the priority of rows of the dataset's usage, in rising order; shape (n,), NaN unknown."""
    out = np.empty(len(rows))
    edges = source.features.bucket_start
    for bucket, (first, stop) in enumerate(pairwise(np.searchsorted(rows, edges))):
        if first < stop:
            column = source.dataset.usage(bucket, [s.PRIORITY])[s.PRIORITY].to_numpy()
            out[first:stop] = column[rows[first:stop] - edges[bucket]]
    return out


def _submitted_us(events: pa.Table, windows: Windows) -> NDArray[np.int64]:
    """Return when the run of each row, one row for each run, became ready to be scheduled; int64, shape (n,).

    It is the last such event of the task up to its scheduling; without one the scheduling itself, and where that is
    unknown the start of the window.
    """
    scheduled = np.where(windows.scheduled_us > 0, windows.scheduled_us, windows.start_us)
    kinds = pa.array(_READY + s.EventType.ENDS, pa.int8())
    changed = events.filter(pc.is_in(events[s.EVENT_TYPE], kinds)).to_pandas()
    changed = changed[changed[s.TIME_US] > s.BEFORE_TRACE_US]
    scheduled_runs = pd.DataFrame(
        {
            s.COLLECTION_ID: windows.collection_id,
            s.INSTANCE_INDEX: windows.instance_index,
            s.TIME_US: scheduled,
            "row": np.arange(len(windows)),
        }
    )
    found = pd.merge_asof(
        scheduled_runs.sort_values(s.TIME_US, kind="stable"),
        changed.assign(ready_us=changed[s.TIME_US]).sort_values(s.TIME_US, kind="stable"),
        on=s.TIME_US,
        by=list(s.TASK_KEY),
    )
    ready = found[s.EVENT_TYPE].isin(_READY).to_numpy()
    out = scheduled.copy()
    out[found["row"].to_numpy()[ready]] = found["ready_us"].to_numpy()[ready].astype(np.int64)
    return out


def _ends_out_of_memory(events: pa.Table, last: Windows) -> NDArray[np.bool_]:
    """Return which runs end out of memory (``data.oom``), recorded or derived from their last windows."""
    task, time_us = oom_events(last, events)
    starts = last.task_starts()
    ends = np.zeros(len(last), np.bool_)
    for k, at_us in zip(task, time_us, strict=True):  # few
        ends[starts[k] + np.searchsorted(last.start_us[starts[k] : starts[k + 1]], at_us) - 1] = True
    return ends


def machines_of(dataset: Dataset, start_us: int, stop_us: int, share: Share = WHOLE) -> CellMachines:
    """Return the machines of a dataset, or a share of them, at a period's start, and their changes within it.

    Those that are never in service in the period are left out.

    Raises
    ------
    NoMachinesError
        The trace has no machine with a capacity, the share has none of them, or none of those is in
        service in the period.
    """
    recorded = _recorded_machines(dataset, start_us, stop_us, share)
    within = recorded.changes
    kept = recorded.in_service
    kept[within["machine"][within["up"] & (within["capacity"] > 0).all(axis=1)]] = True
    if not kept.any():
        raise NoMachinesError(
            f"{dataset.folder_name}: none of {len(recorded)} machines is in service from {start_us} to {stop_us} µs, "
            "so nothing can be placed; a closed loop needs a trace whose machines table has them then"
        )
    return recorded.take(np.flatnonzero(kept))


def machines_at(dataset: Dataset, time_us: int, share: Share = WHOLE) -> CellMachines:
    """Return the machines of a dataset, or a share of them, that take work at a moment; there may be none.

    Errors are those of ``machines_of``, except the last.
    """
    recorded = _recorded_machines(dataset, time_us, time_us + 1, share)
    return recorded.take(np.flatnonzero(recorded.in_service & recorded.state["open"]))


def _recorded_machines(dataset: Dataset, start_us: int, stop_us: int, share: Share) -> CellMachines:
    """Return the machines of which a capacity is ever recorded, or a share of them; as ``machines_of``."""
    table = dataset.table("machines")
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in _MACHINE_COLUMNS}
    order = np.lexsort((columns[s.TIME_US], columns[s.MACHINE_ID]))
    columns = {name: column[order] for name, column in columns.items()}
    ids, machine = np.unique(columns[s.MACHINE_ID], return_inverse=True)
    state = np.zeros(len(ids), MACHINE_STATE)
    state["head"] = -1
    state["lowest"] = np.iinfo(np.int32).max
    state["changed_us"] = start_us
    changes = np.zeros(len(machine), CHANGE)
    changes["at_us"], changes["machine"] = columns[s.TIME_US], machine
    kind = columns[s.EVENT_TYPE]
    event = s.MachineEventType
    changes["up"] = kind != event.REMOVE
    changes["open"] = (kind == event.ADD) | (kind == event.UPDATE)
    capacity = np.stack([columns[s.CPU_CAPACITY], columns[s.MEMORY_CAPACITY]], axis=1).astype(np.float64)
    # a change without a capacity leaves it as it was
    changes["capacity"] = np.nan_to_num(pd.DataFrame(capacity).groupby(machine).ffill().to_numpy())
    before = changes["at_us"] <= start_us
    known = changes[before]
    for name in ("up", "open", "capacity"):
        state[name][known["machine"]] = known[name]  # of several changes of a machine the last one counts
    within = changes[~before & (changes["at_us"] < stop_us)]
    has_capacity = np.zeros(len(ids), np.bool_)
    has_capacity[changes["machine"][(changes["capacity"] > 0).all(axis=1)]] = True
    if not has_capacity.any():
        raise NoMachinesError(
            f"{dataset.folder_name}: no machine with a capacity of CPU and memory, so nothing can be placed; "
            "a closed loop needs a trace whose machines table has them (the margins, frontier and ratios do without)"
        )
    judged = has_capacity & share.machines(ids)
    if not judged.any():
        raise NoMachinesError(
            f"{dataset.folder_name}: none of {has_capacity.sum()} machines is among the {share.of_machines:.2g} of "
            "them that are judged, so nothing can be placed; raise judged_rows"
        )
    return CellMachines(ids, state, within[np.argsort(within["at_us"], kind="stable")]).take(np.flatnonzero(judged))
