"""Outcomes of written rows: codes and reasons of windows, and the facts that are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.arrays import is_first
from reclaim.features.fold.live_kernel import NEW, TOO_LATE
from reclaim.serving.wire.rows import FAILED_OOM, FAILED_US, IN_ALLOC, LOGICAL_NAME, SINCE_US, USER, FactRows

if TYPE_CHECKING:
    from reclaim.data.windows import Windows
    from reclaim.serving.cell.clock import CellClock
    from reclaim.serving.settings import ServingSettings

IN_THE_FUTURE, NO_LIMIT, TOO_MANY_TASKS, ENDED, RUN_TO_COME, IN_THE_PAST = range(TOO_LATE + 1, TOO_LATE + 7)
OUTCOMES: Final = (
    "taken", "late", "repeated", "too_late", "in_the_future", "no_limit", "too_many_tasks", "ended", "run_to_come",
    "in_the_past",
)  # fmt: skip
"""Outcomes of a row; the first two are taken, the third is known already, the others are refused."""
_REPLACED: Final = {
    "machine": s.MACHINE_ID, "tier": s.TIER, s.SCHEDULING_CLASS: s.SCHEDULING_CLASS, "in_alloc": IN_ALLOC,
    s.SCHEDULED_US: s.SCHEDULED_US,
}  # fmt: skip
"""Facts that a later value replaces, by their field in ``task_record.TASK``."""


def why(outcome: int, settings: ServingSettings, clock: CellClock) -> str:
    """Return the reason of a refusal in words."""
    return {
        TOO_LATE: f"came more than {settings.lateness_s:g} s, or too many windows, after a later one of its task",
        IN_THE_FUTURE: f"lies more than {settings.ahead:g} s ahead of the cell's clock, which stands at "
        f"{clock.present_us} µs",
        NO_LIMIT: "the limit of its task is not known yet: send it with the window, or to /v1/tasks first",
        TOO_MANY_TASKS: f"the service tracks {settings.max_tracked} tasks at most (RECLAIM_MAX_TRACKED)",
        ENDED: "its task ended later than this window or fact began: a new run begins after the end",
        RUN_TO_COME: "scheduled_us: the run of a window cannot begin after the window",
        IN_THE_PAST: "it or its scheduled_us lies before the year 2000: times are µs since 1970; those of a trace need "
        "RECLAIM_CLOCK=trace",
    }[outcome]


def without_room(slot: NDArray[np.int64], known: int, room: int) -> NDArray[np.bool_]:
    """Return which rows are of new tasks without room; the first tasks in the call get it. Shape (n,).

    Parameters
    ----------
    slot : int64, shape (n,)
        Slot of each row's task.
    known : int
        Slots from here on are of new tasks.
    room : int
        Number of new tasks that fit.
    """
    over = np.zeros(len(slot), np.bool_)
    new = np.flatnonzero(slot >= known)
    if len(new):
        _, first, task = np.unique(slot[new], return_index=True, return_inverse=True)
        place = np.argsort(np.argsort(first))[task.reshape(-1)]
        over[new] = place >= room
    return over


def refuse_repeats(outcome: NDArray[np.uint8], slot: NDArray[np.int64], windows: Windows) -> None:
    """Refuse with windows without room or limit those that fare alike, each of which would take a pass of its own.

    These are the other windows of a task without room, and those of the same task and end that have no limit either.

    Parameters
    ----------
    outcome : uint8, shape (n,), changed
        ``NEW`` where it is open.
    slot : int64, shape (n,)
    windows : Windows
        As they came.
    """
    outcome[(outcome == NEW) & np.isin(slot, slot[outcome == TOO_MANY_TASKS])] = TOO_MANY_TASKS
    rows = np.flatnonzero((outcome == NO_LIMIT) | (outcome == NEW) & np.isnan(windows.limit[:, 0]))
    rows = rows[np.lexsort((windows.end_us[rows], slot[rows]))]
    group = np.cumsum(is_first(slot[rows], windows.end_us[rows])) - 1
    outcome[rows[np.isin(group, group[outcome[rows] == NO_LIMIT])]] = NO_LIMIT


def dated(facts: FactRows, present_us: int) -> FactRows:
    """Return facts in which every limit has a start: now where none was given."""
    undated = ~np.isnan(facts.limit[:, 0]) & (facts.columns[SINCE_US] < 0)
    since_us = np.where(undated, present_us, facts.columns[SINCE_US])
    return replace(facts, columns={**facts.columns, SINCE_US: since_us})


def set_facts(tasks: NDArray[Any], at: NDArray[np.int64], rows: NDArray[np.int64], facts: FactRows) -> None:
    """Store some rows of facts in the records of their tasks.

    Parameters
    ----------
    tasks : structured array of ``TASK``
    at : int64, shape (n,)
        Slots of the tasks.
    rows : int64, shape (n,)
        Their rows of the facts.
    facts : FactRows
        Every limit has a start.
    """
    for name, column in _REPLACED.items():
        new = facts.columns[column][rows]
        known = new >= 0
        tasks[name][at[known]] = new[known]
    for name, column in (("user", USER), ("name", LOGICAL_NAME)):
        new = facts.columns[column][rows]
        first = np.flatnonzero((new >= 0) & (tasks[name][at] < 0))[::-1]  # the first value stays, also within one call
        tasks[name][at[first]] = new[first]
    failed_us, oom = facts.columns[FAILED_US][rows], facts.columns[s.OUT_OF_MEMORY][rows]
    said = np.flatnonzero((failed_us >= 0) & (oom >= 0))
    said = said[np.lexsort((oom[said], failed_us[said]))]  # the last failure with a known cause counts, in any order
    of, before_us = at[said], tasks[FAILED_US][at[said]]
    said = said[(failed_us[said] > before_us) | (failed_us[said] == before_us) & (oom[said] > tasks[FAILED_OOM][of])]
    tasks[FAILED_US][at[said]], tasks[FAILED_OOM][at[said]] = failed_us[said], oom[said] > 0
    since_us = facts.columns[SINCE_US][rows]
    # the limit that began last is the current one, whatever the order in which limits come
    limited = np.argsort(since_us, kind="stable")
    limited = limited[~np.isnan(facts.limit[rows[limited], 0])]
    limited = limited[since_us[limited] >= tasks["limit_us"][at[limited]]]
    tasks["limit"][at[limited]], tasks["limit_us"][at[limited]] = facts.limit[rows[limited]], since_us[limited]
