"""What becomes of what is told: windows that are taken or refused and why, facts that are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.features.lateness import TOO_LATE
from reclaim.serving.rows import IN_ALLOC, LOGICAL_NAME, SINCE_US, USER, FactRows

if TYPE_CHECKING:
    from reclaim.serving.clock import CellClock
    from reclaim.serving.settings import ServingSettings

IN_THE_FUTURE, NO_LIMIT, TOO_MANY_TASKS, ENDED, RUN_TO_COME = range(TOO_LATE + 1, TOO_LATE + 6)
OUTCOMES: Final = (
    "taken", "late", "repeated", "too_late", "in_the_future", "no_limit", "too_many_tasks", "ended", "run_to_come",
)  # fmt: skip
"""What becomes of a row; the first two are taken, the third is there already, the others are refused."""
_TOLD: Final = {
    "machine": s.MACHINE_ID, "tier": s.TIER, s.SCHEDULING_CLASS: s.SCHEDULING_CLASS, "in_alloc": IN_ALLOC,
    s.SCHEDULED_US: s.SCHEDULED_US,
}  # fmt: skip
"""Facts that are replaced when they are told again, by their field in ``tasks.TASK``."""


def why(outcome: int, settings: ServingSettings, clock: CellClock) -> str:
    """Return in words why a row was refused."""
    return {
        TOO_LATE: f"came more than {settings.lateness_s:g} s, or too many windows, after a later one of its task",
        IN_THE_FUTURE: f"lies more than {settings.ahead:g} s ahead of the cell's clock, which stands at "
        f"{clock.present_us} µs",
        NO_LIMIT: "nobody has told the limit of its task yet: send it with the window, or to /v1/tasks before",
        TOO_MANY_TASKS: f"the service remembers {settings.max_tracked} tasks at most (RECLAIM_MAX_TRACKED)",
        ENDED: "its task was told to have ended before that: a new run of it begins later",
        RUN_TO_COME: "scheduled_us: the run that a window is of cannot begin after it",
    }[outcome]


def without_room(slot: NDArray[np.int64], known: int, room: int) -> NDArray[np.bool_]:
    """Return which rows are of tasks that are new, and for whom there is no room; the first told come in.

    Parameters
    ----------
    slot : int64, shape (n,)
        The task of each row.
    known : int
        Slots from here on are of tasks that are new.
    room : int
        So many of them come in.
    """
    over = np.zeros(len(slot), np.bool_)
    new = np.flatnonzero(slot >= known)
    if len(new):
        _, first, task = np.unique(slot[new], return_index=True, return_inverse=True)
        place = np.argsort(np.argsort(first))[task.reshape(-1)]
        over[new] = place >= room
    return over


def dated(facts: FactRows, present_us: int) -> FactRows:
    """Return facts in which every limit says since when it is in force: since now, where nobody told."""
    undated = ~np.isnan(facts.limit[:, 0]) & (facts.columns[SINCE_US] < 0)
    since_us = np.where(undated, present_us, facts.columns[SINCE_US])
    return replace(facts, columns={**facts.columns, SINCE_US: since_us})


def set_facts(tasks: NDArray[Any], at: NDArray[np.int64], rows: NDArray[np.int64], facts: FactRows) -> None:
    """Keep what some rows of facts tell of tasks, in records of ``tasks.TASK``.

    Parameters
    ----------
    tasks : structured array of ``TASK``
    at : int64, shape (n,)
        Where the tasks are.
    rows : int64, shape (n,)
        Which rows of the facts are theirs.
    facts : FactRows
        Every limit says since when it is in force.
    """
    for name, column in _TOLD.items():
        told = facts.columns[column][rows]
        known = told >= 0
        tasks[name][at[known]] = told[known]
    for name, column in (("user", USER), ("name", LOGICAL_NAME)):  # the first that is told stands
        told = facts.columns[column][rows]
        known = (told >= 0) & (tasks[name][at] < 0)
        tasks[name][at[known]] = told[known]
    limited = ~np.isnan(facts.limit[rows, 0])
    tasks["limit"][at[limited]] = facts.limit[rows[limited]]
    tasks["limit_us"][at[limited]] = facts.columns[SINCE_US][rows[limited]]
