"""Scores reservations over the test period: every metric, with intervals, by tier and by age of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.replay import metrics, timeline
from reclaim.replay.cell import Cell
from reclaim.replay.openloop import in_force, window_seconds

_MEMORY: Final = RESOURCES.index("memory")


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are drawn: resamples, seed, share of resamples within."""

    draws: int
    seed: int
    confidence: float


def score(reservation: NDArray[np.float64], cell: Cell, bootstrap: Bootstrap) -> dict[str, Any]:
    """Return every metric of reservations, shape (n, n_resources), over the test rows and over groups of them.

    The result holds ``all`` and ``unseen`` (collections kept for the test), with intervals; ``tiers`` and ``ages``
    without; the would-be out-of-memory events; and ``units``, the sums of each unit that all of it rests on.
    """
    history, groups = cell.history, cell.groups
    windows = history.windows
    scored = metrics.Scored(
        target=history.target,
        next_target=history.next_target,
        reservation=reservation,
        limit=windows.limit,
        duration_s=window_seconds(windows),
        previous=history.previous,
    )
    sums = metrics.sums(scored, groups.key, len(groups.unit))
    units = _joined(sums, groups.unit, len(cell.unseen_units))
    tiers = _joined(sums, groups.tier, len(metrics.TIER_LABELS))
    ages = _joined(sums, groups.age, len(metrics.AGES))
    held = in_force(reservation, history)[cell.test, _MEMORY]
    return {
        "units": units,
        "all": with_intervals(units, bootstrap),
        "unseen": with_intervals(units[cell.unseen_units], bootstrap),
        "tiers": by_group(tiers, metrics.TIER_LABELS),
        "ages": by_group(ages, metrics.AGES),
        "oom": _memory_events(cell.memory_used, held, cell.slots),
    }


def _joined(sums: NDArray[np.float64], group: NDArray[np.int64], n_groups: int) -> NDArray[np.float64]:
    """Add up sums, shape (n, len(STATS), n_resources), by group; shape (n_groups, len(STATS), n_resources)."""
    out = np.zeros((n_groups, *sums.shape[1:]))
    np.add.at(out, group, sums)
    return out


def _memory_events(
    used: NDArray[np.float64], held: NDArray[np.float64], slots: timeline.Slots
) -> dict[str, float | int | None]:
    """Return would-be out-of-memory events and tasks over their reservation, and their rates; None without memory."""
    if not (np.isfinite(used) & np.isfinite(held)).any():
        return dict.fromkeys(("events", "rate", "tasks_over", "tasks_over_rate"))
    events = int(timeline.oom_events(used, held, slots).sum())
    over = int(timeline.tasks_over(used, held, slots).sum())
    places = timeline.occupied(slots)
    return {"events": events, "rate": events / places, "tasks_over": over, "tasks_over_rate": over / len(used)}


def with_intervals(units: NDArray[np.float64], how: Bootstrap) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return every metric of all units together with its interval; from shape (n_units, len(STATS), n_resources)."""
    values = metrics.evaluate(units.sum(axis=0))
    intervals = metrics.bootstrap(units, draws=how.draws, seed=how.seed, confidence=how.confidence)
    return {
        name: {
            resource: {
                "value": number(v[r]),
                "low": number(intervals[name][0, r]),
                "high": number(intervals[name][1, r]),
            }
            for r, resource in enumerate(RESOURCES)
        }
        for name, v in values.items()
    }


def interval_of(values: NDArray[np.float64], how: Bootstrap) -> dict[str, float | None]:
    """Return the first value, and the interval of all others: what a resampling gave.

    Resamples in which it is unknown do not count: where there are such, the interval is conditional on knowing it.
    """
    known = values[1:][np.isfinite(values[1:])]
    low, high = (
        np.quantile(known, [(1 - how.confidence) / 2, (1 + how.confidence) / 2]) if len(known) else (np.nan,) * 2
    )
    return {"value": number(values[0]), "low": number(low), "high": number(high)}


def by_group(totals: NDArray[np.float64], labels: Sequence[str]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return every metric of each group that has rows; from shape (n_groups, len(STATS), n_resources)."""
    rows = totals[:, list(metrics.STATS).index("rows"), :]
    groups = {}
    for g, label in enumerate(labels):
        if rows[g].any():
            values: Mapping[str, NDArray[np.float64]] = metrics.evaluate(totals[g])
            groups[label] = {name: per_resource(v) for name, v in values.items()} | {
                "task_windows": per_resource(rows[g])
            }
    return groups


def per_resource(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Return one number for each resource, shape (n_resources,), by its name."""
    return {name: number(values[r]) for r, name in enumerate(RESOURCES)}


def number(value: float | np.floating[Any]) -> float | None:
    """Return a number that JSON can hold; None for what is not known."""
    return float(value) if np.isfinite(value) else None
