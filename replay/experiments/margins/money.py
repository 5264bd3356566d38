"""Computes what the reclaimed resources earn and the violations cost, where their value is given."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import Results
from reclaim.replay.open_loop.bootstrap import number
from reclaim.replay.open_loop.history import window_seconds
from reclaim.replay.open_loop.metrics import RECLAIMED, VIOLATING_S
from reclaim.replay.open_loop.period import Period
from reclaim.replay.open_loop.rows import ratio
from reclaim.replay.report.units import UnitSums
from reclaim.replay.settings import ReplayConfig

MONEY_DEFINITIONS: Final = {
    "earned": "Reclaimed volume (unit-hours) times what a unit earns in an hour, over the days of the test period that "
    "are judged: a task-window whose horizon is not known counts in neither.",
    "cost": "Time of the tasks whose answers turn out violated, over the horizon, times what a violation costs: a "
    "shortage violates all answers within whose horizon it lies.",
    "price by value": "violation / (core_hour * mean limit * horizon in hours): limits of a task of mean size per "
    "violated task-window. It is the same under all three margins.",
}


def money(units: UnitSums, config: ReplayConfig, period: Period) -> list[dict[str, Any]]:
    """Return what each estimator earns and costs a day, by margin and resource, in the currency of ``config.value``."""
    days = period.slots.hours_at(period.slots.count) / 24 * _judged_share(period)
    found = []
    for (name, margin), sums in units.sums.items():
        total = sums.sum(axis=0)
        for r, (resource, hour) in enumerate(zip(RESOURCES, config.value.hours, strict=True)):
            if hour is None or config.value.violation is None:
                continue
            earned = float(ratio(total[RECLAIMED, r] / 3_600 * hour, days[r]))
            cost = float(ratio(total[VIOLATING_S, r] / config.horizon_s * config.value.violation, days[r]))
            found.append(
                {"estimator": name, "margin": margin, "resource": resource, "earned": number(earned),
                 "cost": number(cost), "net": number(earned - cost)}
            )  # fmt: skip
    return found


def _judged_share(period: Period) -> NDArray[np.float64]:
    """Return the share of the tasks' time, where they have a limit, that is judged; shape (n_resources,)."""
    history, rows = period.history, period.rows
    granted = np.where(history.windows.limit[rows] > 0, window_seconds(history.windows)[rows, None], 0.0)
    judged = np.where(np.isfinite(history.target[rows]), granted, 0.0)
    return ratio(judged.sum(axis=0), granted.sum(axis=0))


def money_table(results: Results) -> Table:
    """Return what each estimator earns and costs a day, the best of each resource first."""
    rows: list[tuple[Cell, ...]] = [
        (RESOURCE_WORDS[of["resource"]], of["estimator"], of["margin"], of["earned"], of["cost"], of["net"])
        for of in sorted(results.get("money", ()), key=lambda of: (of["resource"], -(of["net"] or 0.0)))
    ]
    return Table(("resource", "estimator", "margin", "earned", "cost", "net"), tuple(rows))
