"""Scores out-of-memory alerts: the share of events that a limited number of alerts announces, and how early.

An alert is raised at a task's first row whose probability reaches a threshold, and is silent for the horizon
afterwards. An event is an unbroken run of a task's rows with a positive label (each has an out-of-memory within the
horizon after it); one that strikes again and again within the horizon counts once. It is caught by an alert on any of
its rows. Its lead is the time from the first such alert to the end of the event's last row, so less than the true one
by up to a window, and at most the horizon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED
from reclaim.data.schema import DAY_US
from reclaim.features.groups import RowKeys

ALERT_RATES: Final = (1, 10, 100)
"""Alerts per 1,000 task-days that are allowed; at 100, one task in ten alerts once a day."""


@dataclass(frozen=True)
class AlertRows:
    """Rows of known label and probability, sorted by task, then time.

    Attributes
    ----------
    probability : float64, shape (n,)
    label : bool, shape (n,)
    task, end_us : int64, shape (n,)
    task_days : float
        Time that the rows' windows cover.
    """

    probability: NDArray[np.float64]
    label: NDArray[np.bool_]
    task: NDArray[np.int64]
    end_us: NDArray[np.int64]
    task_days: float


def sorted_rows(probability: NDArray[np.float64], label: NDArray[np.bool_], keys: RowKeys) -> AlertRows:
    """Return rows, shape (n,) each, in the order that alerts are counted in."""
    order = np.lexsort((keys.end_us, keys.task))
    return AlertRows(
        np.ascontiguousarray(probability[order]),
        label[order],
        keys.task[order],
        keys.end_us[order],
        float((keys.end_us - keys.start_us).sum()) / DAY_US,
    )


def alerts(rows: AlertRows, threshold: float, horizon_s: int) -> NDArray[np.int64]:
    """Return the rows at which an alert is raised; see the module. Shape (n_alerts,)."""
    candidates = np.flatnonzero(rows.probability >= threshold)
    raised: NDArray[np.bool_] = _raised(rows.task[candidates], rows.end_us[candidates], horizon_s * 1_000_000)
    return candidates[raised]


@numba.njit(**CACHED)
def _raised(task: Any, end_us: Any, silence_us: int) -> Any:
    raised = np.zeros(len(task), np.bool_)
    until = 0
    for i in range(len(task)):
        if i == 0 or task[i] != task[i - 1] or end_us[i] >= until:
            raised[i] = True
            until = end_us[i] + silence_us
    return raised


def lowest_threshold(rows: AlertRows, horizon_s: int, rate: float) -> float:
    """Return the lowest threshold that raises at most ``rate`` alerts per 1,000 task-days; infinity where none does.

    A lower threshold never raises fewer alerts (they are the fewest intervals of one horizon that cover all rows at or
    above it), so bisection over the probabilities finds it.
    """
    allowed = rate / 1_000 * rows.task_days
    offered = np.unique(rows.probability)
    low, high = 0, len(offered)  # the answer is offered[high]; beyond the last there is no alert at all
    while low < high:
        middle = (low + high) // 2
        if len(alerts(rows, offered[middle], horizon_s)) <= allowed:
            high = middle
        else:
            low = middle + 1
    return float(offered[high]) if high < len(offered) else float("inf")


def events(rows: AlertRows, horizon_s: int) -> NDArray[np.int64]:
    """Return for each row the number of its event, from 0; -1 for a row without; shape (n,)."""
    follows = np.zeros(len(rows.task), np.bool_)
    follows[1:] = (
        rows.label[1:]
        & rows.label[:-1]
        & (rows.task[1:] == rows.task[:-1])
        & (np.diff(rows.end_us) <= horizon_s * 1_000_000)
    )
    return np.where(rows.label, np.cumsum(rows.label & ~follows) - 1, -1)


def score_alerts(rows: AlertRows, horizon_s: int) -> dict[str, float]:
    """Return the scores of alerts at each of ``ALERT_RATES``.

    Returns
    -------
    dict of str to float
        ``events`` and ``task_days``; and for each rate k: ``alerts_at_k`` raised, at ``threshold_at_k``;
        ``recall_at_k``, share of the events caught; ``recall_bound_at_k``, the most that as many alerts can catch;
        ``precision_at_k``, share of the alerts before an out-of-memory;
        ``lead_s_at_k``, median lead of the caught events in seconds. What has no denominator is NaN.
    """
    event = events(rows, horizon_s)
    n = int(event.max(initial=-1)) + 1
    last_us = np.zeros(n, np.int64)
    last_us[event[rows.label]] = rows.end_us[rows.label]  # rows rise in time, so the last one stays
    scores = {"events": float(n), "task_days": rows.task_days}
    for rate in ALERT_RATES:
        threshold = lowest_threshold(rows, horizon_s, rate)
        raised = alerts(rows, threshold, horizon_s)
        hits = raised[rows.label[raised]]
        caught, first = np.unique(event[hits], return_index=True)
        lead_s = np.minimum((last_us[caught] - rows.end_us[hits[first]]) / 1e6, horizon_s)
        scores |= {
            f"alerts_at_{rate}": float(len(raised)),
            f"threshold_at_{rate}": threshold,
            f"recall_at_{rate}": len(caught) / n if n else np.nan,
            f"recall_bound_at_{rate}": min(rate / 1_000 * rows.task_days / n, 1.0) if n else np.nan,
            f"precision_at_{rate}": len(hits) / len(raised) if len(raised) else np.nan,
            f"lead_s_at_{rate}": float(np.median(lead_s)) if len(caught) else np.nan,
        }
    return scores
