"""Sums of the cell over time: usage, reservations and limits in each slot, and would-be out-of-memory events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from reclaim.data import schema
from reclaim.data.core.arrays import is_last
from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import Windows
from reclaim.replay.open_loop.rows import sums_by
from reclaim.training.machines.snapshots import slot_s_of
from reclaim.training.margins.violation import violates

EVENT_DEFINITION: Final = (
    "A would-be out-of-memory event is a machine and a slot of time in which the memory used by the tasks on the "
    "machine exceeds the sum of the reservations that they had when their windows began: had everything "
    "reclaimed been lent out and used there, the machine would have run out. Used memory is each task's largest within "
    "its window, weighted by the share of the slot that the window covers. It is derived from the trace, not observed "
    "in it. A task whose machine is unknown is judged alone, as if it had a machine to itself."
)
OVER_DEFINITION: Final = (
    "A task over its reservation is a task-window in which the task's largest memory passes the reservation that it "
    "had when the window began. Where the rest of the machine has room to spare nothing happens; where it "
    "has not, this is the task at fault."
)


@dataclass(frozen=True)
class SlotGrid:
    """Position of each of ``n`` rows on a grid of machines and slots.

    Attributes
    ----------
    first_us : int
        Start of the first slot, on the trace's clock.
    slot_s : int
        Length of a slot in seconds.
    count : int
        Number of slots.
    slot : int64, shape (n,)
        The slot in which the row's window begins.
    weight : float64, shape (n,)
        Length of the window over that of the slot.
    place : int64, shape (n,)
        Machine of the row; a task without one is a place of its own.
    n_machines : int
        How many places are machines.
    """

    first_us: int
    slot_s: int
    count: int
    slot: NDArray[np.int64]
    weight: NDArray[np.float64]
    place: NDArray[np.int64]
    n_machines: int

    @property
    def slot_us(self) -> int:
        """Length of a slot, in µs."""
        return self.slot_s * 1_000_000

    @property
    def stop_us(self) -> int:
        """End of the last slot, on the trace's clock."""
        return self.first_us + self.count * self.slot_us

    @cached_property
    def occupied(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The pair of a place and a slot of each row, shape (n,), and the slot of each pair, shape (n_pairs,).

        Pairs without a row are left out: where tasks are short and each is a place of its own, almost all are.
        """
        pairs, pair = np.unique(self.place * self.count + self.slot, return_inverse=True)
        return pair.astype(np.int64, copy=False), pairs % max(self.count, 1)

    def hours_at(self, slot: int) -> float:
        """Return the hours from the first slot's start to another slot's."""
        return slot * self.slot_s / 3600

    @property
    def hours(self) -> NDArray[np.float64]:
        """Start of each slot, in hours since the first; shape (count,)."""
        return np.arange(self.count, dtype=np.float64) * (self.slot_s / 3600)


def lay_out(windows: Windows) -> SlotGrid:
    """Lay windows on a grid of five-minute slots, or of the usual window where that is longer."""
    lengths_us = windows.end_us - windows.start_us
    slot_s = slot_s_of(windows)
    first_us = int(windows.start_us.min()) if len(windows) else 0
    slot = (windows.start_us - first_us) // (slot_s * 1_000_000)
    on_machine = windows.machine_id != UNKNOWN_ID
    machines, machine = np.unique(windows.machine_id[on_machine], return_inverse=True)
    place = np.empty(len(windows), np.int64)
    place[on_machine] = machine
    _alone, number = np.unique(windows.task_numbers()[~on_machine], return_inverse=True)
    place[~on_machine] = len(machines) + number
    return SlotGrid(
        first_us=first_us,
        slot_s=slot_s,
        count=int(slot.max()) + 1 if len(windows) else 0,
        slot=slot.astype(np.int64),
        weight=lengths_us / (slot_s * 1e6),
        place=place,
        n_machines=len(machines),
    )


def cell_sums(values: NDArray[np.float64], slots: SlotGrid) -> NDArray[np.float64]:
    """Sum values over the whole cell, slot by slot; from shape (n, n_resources) to (count, n_resources).

    Unknown values count as zero.
    """
    weighted = np.nan_to_num(values) * slots.weight[:, None]
    return sums_by(slots.slot, weighted, slots.count)


def oom_events(used: NDArray[np.float64], reserved: NDArray[np.float64], slots: SlotGrid) -> NDArray[np.int64]:
    """Count would-be out-of-memory events in each slot; see ``EVENT_DEFINITION``.

    Parameters
    ----------
    used, reserved : float64, shape (n,)
        Memory of each row; a row in which one of them is unknown counts in neither sum.
    slots : SlotGrid
        Of the same rows.

    Returns
    -------
    int64, shape (count,)
    """
    known = known_memory(used, reserved)
    pair, slot_of_pair = slots.occupied
    weight = slots.weight[known]
    used_sum, reserved_sum = (
        np.bincount(pair[known], weights=of[known] * weight, minlength=len(slot_of_pair)) for of in (used, reserved)
    )
    events = slot_of_pair[violates(used_sum, reserved_sum)]
    return np.bincount(events, minlength=slots.count).astype(np.int64)


def tasks_over(used: NDArray[np.float64], reserved: NDArray[np.float64], slots: SlotGrid) -> NDArray[np.int64]:
    """Count tasks over their reservation in each slot; see ``OVER_DEFINITION``. Arguments as of ``oom_events``."""
    over = known_memory(used, reserved) & violates(used, reserved)
    return np.bincount(slots.slot[over], minlength=slots.count).astype(np.int64)


def known_memory(used: NDArray[np.float64], reserved: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which task-windows are judged: those whose usage and reservation are known. Arguments as above."""
    return np.isfinite(used) & np.isfinite(reserved)


def cell_capacity(machines: Mapping[str, NDArray[Any]], until_us: int) -> NDArray[np.float64] | None:
    """Return the capacity of the machines in service at a time; shape (n_resources,), None where it is unknown.

    A change without a capacity leaves it as it was.

    Parameters
    ----------
    machines : mapping of str to array
        The columns of the dataset's ``machines`` table.
    until_us : int
        Changes after this time do not count.
    """
    time_us, machine = machines[schema.TIME_US], machines[schema.MACHINE_ID]
    order = np.lexsort((time_us, machine))
    order = order[time_us[order] <= until_us]
    columns = {name: machines[name][order] for name in (schema.CPU_CAPACITY, schema.MEMORY_CAPACITY)}
    known = pd.DataFrame(columns, dtype=np.float64).groupby(machine[order]).ffill()
    in_service = is_last(machine[order]) & (machines[schema.EVENT_TYPE][order] != schema.MachineEventType.REMOVE)
    capacity = np.nansum(known[in_service].to_numpy(), axis=0)
    return capacity if bool((capacity > 0).all()) else None


def rebin(values: NDArray[np.float64], slots_per_bin: int) -> NDArray[np.float64]:
    """Return means over runs of slots; from shape (count, k) to (ceil(count / slots_per_bin), k)."""
    starts = np.arange(0, len(values), slots_per_bin)
    lengths = np.minimum(len(values) - starts, slots_per_bin)
    return np.asarray(np.add.reduceat(values, starts, axis=0) / lengths[:, None])
