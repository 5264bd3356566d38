"""Scores reservations over the test period: every metric, with intervals, by tier and by age of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import MEMORY_AT, RESOURCES
from reclaim.features.groups import AGES, TIER_LABELS
from reclaim.replay.open_loop import metrics, timeline
from reclaim.replay.open_loop.bootstrap import Bootstrap, number, reported
from reclaim.replay.open_loop.history import current_reservations, window_seconds
from reclaim.replay.open_loop.period import Period


def score(reservation: NDArray[np.float64], period: Period, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return every metric of reservations, shape (n, n_resources), over the test rows and over groups of them.

    The result holds ``all`` and ``unseen`` (collections kept for the test) with intervals, ``tiers`` and ``ages``
    without, the would-be out-of-memory events, and ``units``, the sums of each unit.
    """
    history, groups = period.history, period.groups
    sums = _sums(reservation, period)
    units = _joined(sums, groups.unit, len(period.unseen_units))
    tiers = _joined(sums, groups.tier, len(TIER_LABELS))
    ages = _joined(sums, groups.age, len(AGES))
    reserved = current_reservations(reservation, history)[period.rows, MEMORY_AT]
    return {
        "units": units,
        "all": with_intervals(units, bootstrap),
        "unseen": with_intervals(units[period.unseen_units], bootstrap),
        "tiers": by_group(tiers, TIER_LABELS),
        "ages": by_group(ages, AGES),
        "oom": _memory_events(period.memory_used, reserved, period.slots),
    }


def _sums(reservation: NDArray[np.float64], period: Period) -> NDArray[np.float64]:
    """Return the sums of the test rows by ``Period.groups``, shape (n_groups, len(STATS), n_resources)."""
    history = period.history
    scored = metrics.Scored(
        target=history.target,
        next_target=history.next_target,
        reservation=reservation,
        limit=history.windows.limit,
        duration_s=window_seconds(history.windows),
        previous=history.previous,
    )
    return metrics.sums(scored, period.groups.key, len(period.groups.unit))


def _joined(sums: NDArray[np.float64], group: NDArray[np.int64], n_groups: int) -> NDArray[np.float64]:
    """Add up sums, shape (n, len(STATS), n_resources), by group; shape (n_groups, len(STATS), n_resources)."""
    out = np.zeros((n_groups, *sums.shape[1:]))
    np.add.at(out, group, sums)
    return out


def _memory_events(
    used: NDArray[np.float64], reserved: NDArray[np.float64], slots: timeline.SlotGrid
) -> dict[str, float | int | None]:
    """Return would-be out-of-memory events and tasks over their reservation, and their rates; None without memory."""
    known = int(timeline.known_memory(used, reserved).sum())
    if not known:
        return dict.fromkeys(("events", "rate", "tasks_over", "tasks_over_rate"))
    events = int(timeline.oom_events(used, reserved, slots).sum())
    over = int(timeline.tasks_over(used, reserved, slots).sum())
    places = len(slots.occupied[1])  # pairs of a place and a slot with a task
    return {"events": events, "rate": events / places, "tasks_over": over, "tasks_over_rate": over / known}


def with_intervals(units: NDArray[np.float64], bootstrap: Bootstrap) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return every metric of all units together with its interval; from shape (n_units, len(STATS), n_resources)."""
    values = metrics.evaluate(units.sum(axis=0))
    intervals = metrics.bootstrap(units, bootstrap)
    return {
        name: {resource: reported(v[r], *intervals[name][:, r]) for r, resource in enumerate(RESOURCES)}
        for name, v in values.items()
    }


def by_group(totals: NDArray[np.float64], labels: Sequence[str]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return every metric of each group that has rows; from shape (n_groups, len(STATS), n_resources)."""
    rows = totals[:, metrics.ROWS, :]
    groups = {}
    for g, label in enumerate(labels):
        if rows[g].any():
            values: Mapping[str, NDArray[np.float64]] = metrics.evaluate(totals[g])
            groups[label] = {name: per_resource(v) for name, v in values.items()} | {
                "task_windows": per_resource(rows[g])
            }
    return groups


def per_resource(values: NDArray[np.float64] | Sequence[float]) -> dict[str, float | None]:
    """Return one number for each resource, shape (n_resources,), by its name."""
    return {name: number(values[r]) for r, name in enumerate(RESOURCES)}
