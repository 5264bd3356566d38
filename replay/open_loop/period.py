"""Layout of the test period, shared by all estimators: its rows, slots, segments and units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.errors import HistoryTooShortError
from reclaim.data.schema import MEMORY_AT
from reclaim.data.windows import demand
from reclaim.features.groups import AGES, TIER_LABELS, age_key, tier_key
from reclaim.features.splits import IN_ALLOC, TEST, TEST_UNSEEN, WRONG_TIME
from reclaim.replay.open_loop import timeline
from reclaim.replay.open_loop.history import History
from reclaim.replay.open_loop.share import WHOLE, Share

SEQUENCE: Final = ("baseline", "aggressive", "medium", "baseline")
"""The margin of each quarter of the test period; Borg's four weeks."""


@dataclass(frozen=True)
class Groups:
    """The test rows grouped by all keys that scores are split by, so that one pass over the rows serves every split.

    Attributes
    ----------
    key : int64, shape (n,)
        Group of each row of the history; -1 for those not of the test.
    unit, tier, age : int64, shape (n_groups,)
        Of each group: ``Period.unit``, and positions in ``features.groups.TIER_LABELS`` and ``AGES``.
    """

    key: NDArray[np.int64]
    unit: NDArray[np.int64]
    tier: NDArray[np.int64]
    age: NDArray[np.int64]


@dataclass(frozen=True)
class Period:
    """Layout of the test period.

    Attributes
    ----------
    history : History
        Validation and test rows, and the windows just before them.
    rows : int64, shape (n_test,)
        Rows of the test period.
    slots : Slots
        Of the test rows.
    segment : int64, shape (n,)
        Quarter of the test period in which each row of the history ends; 0 before it.
    unit : int64, shape (n_test,)
        Collection of each test row, from 0: what the bootstrap draws.
    unseen_units : bool, shape (n_units,)
        Collections that no estimator was trained or tuned on.
    whole : float64, shape (n_resources,)
        Divisor of the figure over time: the machines' capacity, or the mean sum of limits where that is unknown.
    whole_is_capacity : bool
        Which of the two.
    share : Share
        Machines that the history is of.
    """

    history: History
    rows: NDArray[np.int64]
    slots: timeline.SlotGrid
    segment: NDArray[np.int64]
    unit: NDArray[np.int64]
    unseen_units: NDArray[np.bool_]
    whole: NDArray[np.float64]
    whole_is_capacity: bool
    share: Share = WHOLE

    @cached_property
    def groups(self) -> Groups:
        """The test rows by collection, tier and age."""
        history, rows = self.history, self.rows
        shape = len(self.unseen_units), len(TIER_LABELS), len(AGES)
        code = np.ravel_multi_index(
            (self.unit, tier_key(history.windows.tier[rows]), age_key(history.known_s[rows])), shape
        )
        present = np.bincount(code, minlength=int(np.prod(shape))) > 0
        key = np.full(len(history), -1, np.int64)
        key[rows] = (np.cumsum(present) - 1)[code]
        return Groups(key, *(part.astype(np.int64) for part in np.unravel_index(np.flatnonzero(present), shape)))

    @cached_property
    def memory_used(self) -> NDArray[np.float64]:
        """Memory demand of each test row's own window; shape (n_test,), NaN unknown."""
        used: NDArray[np.float64] = demand(self.history.windows)[self.rows, MEMORY_AT]
        return used


def lay_out_period(history: History, machines: Mapping[str, NDArray[Any]], share: Share = WHOLE) -> Period:
    """Lay out the test period of a history.

    Parameters
    ----------
    history : History
    machines : mapping
        The columns of the dataset's ``machines`` table.
    share : Share
        Machines that the history is of.

    Raises
    ------
    HistoryTooShortError
        The test period has no row that is judged, or none of which a target is known.
    """
    test = np.flatnonzero((history.period == TEST) & (history.group != IN_ALLOC))
    if not len(test):
        raise HistoryTooShortError(
            "the test period has no task-window to judge: all its tasks are in alloc instances, which stand for them, "
            "or none ran then; replay a trace that holds the usage of alloc instances or of other tasks"
            if share.of_machines == 1
            else f"the test period has no task-window to judge on {share.of_machines:.2g} of the machines; "
            "raise judged_rows"
        )
    known = int(np.isfinite(history.target[test]).any(axis=1).sum())
    if known == 0:
        raise HistoryTooShortError(
            f"0 of {len(test)} task-windows of the test period have a whole horizon after them, expected at least 1; "
            f"replay a longer trace or a shorter horizon; {WRONG_TIME}"
        )
    windows = replace(history.windows, usage=history.windows.usage[:, :0]).take(test)  # copies a third less
    slots = timeline.lay_out(windows)
    end_slot = (history.windows.end_us - slots.first_us) // slots.slot_us
    inner_edges = [first for first, _ in segment_slots(slots)[1:]]
    judged = share.machines(np.asarray(machines[s.MACHINE_ID], np.int64))
    judged_machines = {name: column[judged] for name, column in machines.items()}
    capacity = timeline.cell_capacity(judged_machines, int(windows.end_us.max()))
    whole = timeline.cell_sums(windows.limit, slots).mean(axis=0) if capacity is None else capacity
    collections, unit = np.unique(windows.collection_id, return_inverse=True)
    unseen = np.zeros(len(collections), np.bool_)
    unseen[unit] = history.group[test] == TEST_UNSEEN
    return Period(
        history=history,
        rows=test,
        slots=slots,
        segment=np.searchsorted(inner_edges, end_slot, side="right").astype(np.int64),
        unit=unit.astype(np.int64),
        unseen_units=unseen,
        whole=positive(whole),
        whole_is_capacity=capacity is not None,
        share=share,
    )


def period_facts(period: Period) -> dict[str, Any]:
    """Return the length, task-windows, collections and machines of the test period, and its share of the machines."""
    return {
        "test_task_windows": len(period.rows),
        "test_collections": len(period.unseen_units),
        "unseen_collections": int(period.unseen_units.sum()),
        "test_hours": period.slots.hours_at(period.slots.count),
        "machines": period.slots.n_machines,
        "share_of_machines": period.share.of_machines,
    }


def segment_slots(slots: timeline.SlotGrid) -> list[tuple[int, int]]:
    """Return the first slot of each segment of ``SEQUENCE``, and the one after its last."""
    edges = [-(-slots.count * i // len(SEQUENCE)) for i in range(len(SEQUENCE) + 1)]
    return list(pairwise(edges))


def positive(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values, NaN where they are not above 0, as divisors."""
    return np.where(values > 0, values, np.nan)
