"""Lays out when requests are set, for which workloads, and which later windows each of them is judged on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from reclaim.data.errors import HistoryTooShortError
from reclaim.data.schema import AFTER_TRACE_US, DAY_US, HOUR_US
from reclaim.features.splits import OTHER_SHARES, TEST, VALID, in_period
from reclaim.replay.experiments.recommend.series import Floats, Integers, Series, TaskRows

NOW: Final = -1
"""Code for the end of the history, for which the recommendation is made, in place of a period."""


@dataclass(frozen=True)
class Decisions:
    """The ``n`` requests that are set: one per workload and time, in the order of time.

    Attributes
    ----------
    workload : int64, shape (n,)
        Position in ``TaskRows.ids``.
    time_us : int64, shape (n,)
        When it is set; nothing that ends later is known.
    period : int64, shape (n,)
        ``VALID``, ``TEST`` or ``NOW``.
    before : int64, shape (n,)
        The workload's decision before it in the same period, -1 for none.
    known : int64, shape (n,)
        Row of the series that is the last one known, -1 for none.
    request, limit, enforced : float64, shape (n, n_resources)
        Those of the workload when it is set.
    age_days : float64, shape (n,)
        Days since the first window of the workload began.
    ran_hours : float64, shape (n,)
        Hours in which a task of it had windows that are known then.
    killed_at : float64, shape (n,)
        Largest memory at which a task of the workload has ended out of memory by then, ``TaskRows.oom_limit``; NaN for
        none. Now that is by the end of the history, and a kill may be later than all windows.
    tier : int8, shape (n,)
    judged : mapping of ``VALID`` and ``TEST`` to int64, shape (n_judged,)
        Rows of ``TaskRows`` that begin while a request holds, and end in its period.
    held : mapping of the same to int64, shape (n_judged,)
        The decision whose request holds then.
    """

    workload: Integers
    time_us: Integers
    period: Integers
    before: Integers
    known: Integers
    request: Floats
    limit: Floats
    enforced: Floats
    age_days: Floats
    ran_hours: Floats
    killed_at: Floats
    tier: NDArray[np.int8]
    judged: Mapping[int, Integers]
    held: Mapping[int, Integers]

    def __len__(self) -> int:
        return len(self.workload)

    def of(self, period: int) -> Integers:
        """Return the decisions of a period."""
        return np.flatnonzero(self.period == period)


def lay_out(
    rows: TaskRows, series: Series, cuts_us: tuple[int, int], *, hold_days: float, seen_days: float
) -> Decisions:
    """Lay out the decisions: one for each stretch of ``hold_days`` of the validation and of the test period, and now.

    Parameters
    ----------
    rows, series
        Of the same dataset.
    cuts_us : tuple of int
        Ends of the training and of the validation period.
    hold_days : float
        Days for which a request holds.
    seen_days : float
        The recommendation is for workloads of which a task ran in this many days before the end.

    Raises
    ------
    HistoryTooShortError
        No window of the validation or of the test period can be judged.
    """
    hold_us = int(hold_days * DAY_US)
    end_us = int(series.end_us.max(initial=0))
    asked, judged, number = [], {}, {}
    for part, begins_us in ((VALID, cuts_us[0]), (TEST, cuts_us[1])):
        inside = in_period(part, rows.period, rows.group) & (rows.start_us >= begins_us)
        judged[part] = np.flatnonzero(inside)
        if not len(judged[part]):
            name = "validation" if part == VALID else "test"
            raise HistoryTooShortError(f"no window begins and ends in the {name} period; {OTHER_SHARES}")
        workload, start = rows.workload[judged[part]], rows.start_us[judged[part]]
        time_us = begins_us + (start - begins_us) // hold_us * hold_us
        keys, number[part] = np.unique(np.stack([time_us, workload]), axis=1, return_inverse=True)
        asked.append((keys[1], keys[0], np.full(keys.shape[1], part)))
    last_us = np.full(series.n_workloads, -1, np.int64)
    last_us[series.workload] = series.end_us  # of several rows the last one counts
    current = np.flatnonzero(last_us >= end_us - seen_days * DAY_US)
    asked.append((current, np.full(len(current), end_us), np.full(len(current), NOW)))
    workload, time_us, period = (np.concatenate(of).astype(np.int64) for of in zip(*asked, strict=True))
    known = series.last_before(workload, time_us)
    first = np.searchsorted(series.workload, workload)
    at = np.where(known >= 0, known, first)  # a new workload is known only by its request
    ran_us = np.concatenate([[0], np.cumsum(series.end_us - series.start_us)])
    offset = {VALID: 0, TEST: len(asked[0][0])}
    return Decisions(
        workload=workload, time_us=time_us, period=period, before=_before(workload, period), known=known,
        request=series.request[at], limit=series.limit[at], enforced=series.enforced[at],
        age_days=(time_us - series.start_us[first]) / DAY_US,
        ran_hours=np.where(known >= 0, ran_us[known + 1] - ran_us[first], 0) / HOUR_US,
        killed_at=_killed_at(rows, workload, np.where(period == NOW, AFTER_TRACE_US, time_us)),
        tier=series.tier[at], judged=judged,
        held={p: (number[p].ravel() + offset[p]).astype(np.int64) for p in judged},
    )  # fmt: skip


def _before(workload: Integers, period: Integers) -> Integers:
    """Return the decision before each of the same workload and period, -1 for none; decisions are in order of time."""
    order = np.lexsort((np.arange(len(workload)), workload, period))
    same = (np.diff(workload[order]) == 0) & (np.diff(period[order]) == 0)
    before = np.full(len(workload), -1, np.int64)
    before[order[1:][same]] = order[:-1][same]
    return before


def _killed_at(rows: TaskRows, workload: Integers, time_us: Integers) -> Floats:
    """Return the largest memory at which a task of each workload has ended out of memory; NaN for none."""
    of = np.concatenate([rows.oom_workload, workload])
    decided = np.arange(len(of)) >= len(rows.oom_workload)
    order = np.lexsort((decided, np.concatenate([rows.oom_us, time_us]), of))  # an end counts from its own time on
    limit = np.concatenate([rows.oom_limit, np.full(len(workload), np.nan)])[order]
    so_far = pd.Series(limit).groupby(of[order], sort=False).cummax().groupby(of[order], sort=False).ffill()
    killed = np.full(len(of), np.nan)
    killed[order] = so_far
    return killed[decided]
