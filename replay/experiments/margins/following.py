"""Follows the workload with margins or prices, and reports how well the budgets are kept, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.prose import interval
from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import Results
from reclaim.replay.open_loop import metrics
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.estimates import Estimates
from reclaim.replay.open_loop.paired import RECLAIMED, VIOLATION
from reclaim.replay.open_loop.period import Period
from reclaim.replay.open_loop.rows import ratio, sums_by
from reclaim.replay.settings import ReplayConfig
from reclaim.training.margins.answers import Priced
from reclaim.training.margins.online import OnlineMargins
from reclaim.training.margins.violation import needed, violates

Floats = NDArray[np.float64]

WITHIN: Final = (0.8, 1.25)
"""Multiples of a budget between which it counts as kept."""
_DAY_S: Final = 86_400
_WEEKS: Final = 3
"""Number of weeks from which on a test period is shown by week; a shorter one is shown by day."""

FOLLOWING_DEFINITIONS: Final = {
    "kept, by week": (
        "The share of the task-windows that end in a week of the test period, or in a day where that is shorter than "
        f"{_WEEKS} weeks, and are violated, lies between {WITHIN[0]:g} and {WITHIN[1]:g} times the budget; within the "
        "noise: a part of its interval does. What follows begins on the first validation row, so the validation period "
        "is its warm-up. A week of which less than half the usual windows are known is left out."
    ),
    "cost of following": (
        "What margins or prices that follow reclaim, less what the estimator reclaims at the one of hindsight with "
        "which exactly the budget is violated on the test rows, found again in each resample. No service can set it."
    ),
}


def follow(name: str, estimates: Estimates, config: ReplayConfig) -> dict[str, Floats]:
    """Return reservations whose settings follow the workload from the first validation row on; (n, n_resources) each.

    Baseline and aggressive each keep their own budget over all tasks (``margins.online``).
    """
    windows, answers = estimates.history.windows, estimates.answers[name]
    own = isinstance(answers, Priced) and answers.risk is not None
    online = OnlineMargins(
        estimates.calibrations[name].settings, config.budgets, config.horizon_s, own=own,
        since_us=estimates.began_us,
    )  # fmt: skip
    return online.hold(windows.task_numbers(), answers, windows)


def by_part(
    reserved: Mapping[str, Floats], period: Period, config: ReplayConfig
) -> dict[str, dict[str, list[dict[str, float | None]]]]:
    """Return, by budgeted margin and resource, the violation of each week or day as a multiple of the budget."""
    rows, bootstrap = period.rows, Bootstrap.of(config)
    windows, hours = period.history.windows, period.slots.hours_at(period.slots.count)
    days = 7 if hours >= _WEEKS * 7 * 24 else 1
    part = (windows.end_us[rows] - 1 - period.slots.first_us) // (days * _DAY_S * 1_000_000)
    n_units, count = len(period.unseen_units), int(part.max(initial=-1)) + 1
    limit, target = windows.limit[rows], period.history.target[rows]
    known = np.isfinite(target) & (limit > 0)

    def by_unit(flags: NDArray[np.bool_]) -> Floats:
        sums = sums_by(period.unit * count + part, flags.astype(np.float64), n_units * count)
        return sums.reshape(n_units, count, -1)

    total = by_unit(known)
    usual = np.median(total.sum(axis=0), axis=0)
    found: dict[str, dict[str, list[dict[str, float | None]]]] = {}
    for margin, budget in asdict(config.budgets).items():
        violated = by_unit(known & violates(needed(target, limit), reserved[margin][rows]))
        found[margin] = {
            resource: [
                {"part": k + 1, "days": days}
                | bootstrap.interval(
                    ratio(*bootstrap.sums(np.stack([of[:, k, r] for of in (violated, total)], axis=1)).T) / budget
                )
                for k in range(count)
                if 2 * total[:, k, r].sum() >= usual[r] > 0
            ]
            for r, resource in enumerate(RESOURCES)
        }
    return found


def cost_of_following(
    followed: Mapping[str, Floats], afterwards: Mapping[str, Floats], config: ReplayConfig
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return what following reclaims less what a setting of hindsight does, by budgeted margin and resource.

    Parameters
    ----------
    followed : mapping of margin to float64, shape (n_units, len(STATS), n_resources)
        Sums of each unit, where settings follow.
    afterwards : mapping of margin to float64, shape (1 + draws, n_resources)
        What is reclaimed at equal violation: of all units, then of each resample.
    config : ReplayConfig
    """
    bootstrap, found = Bootstrap.of(config), {}
    for margin in asdict(config.budgets):
        reclaimed, granted = (bootstrap.sums(followed[margin][:, of]) for of in (metrics.RECLAIMED, metrics.GRANTED))
        less = ratio(reclaimed, granted) - afterwards[margin]
        found[margin] = {resource: bootstrap.interval(less[:, r]) for r, resource in enumerate(RESOURCES)}
    return found


def following_table(results: Results) -> Table:
    """Return how well each learned estimator keeps each budget by week, as set and following, and what that costs."""
    measured = {e["name"]: e["results"] for e in results["estimators"]}
    following = results.get("following", {})
    rows: list[tuple[Cell, ...]] = []
    for margin, resource, name, parts in _each(results):
        values = [p["value"] for p in parts]
        low, high = WITHIN
        possible = sum(p["low"] is None or (p["low"] <= high and p["high"] >= low) for p in parts)
        shown = measured[name][margin]["all"]
        cost = following["cost"].get(name, {}).get(margin, {}).get(resource)
        rows.append(
            (margin, RESOURCE_WORDS[resource], name, shown[RECLAIMED][resource]["value"],
             shown[VIOLATION][resource]["value"], "weeks" if parts[0]["days"] == 7 else "days", len(parts), min(values),
             max(values), sum(low <= v <= high for v in values), possible,
             None if cost is None else cost["value"], None if cost is None else interval(cost))
        )  # fmt: skip
    columns = ("margin", "resource", "estimator", "reclaimed", "violation", "by", "number", "least", "most", "kept",
               "kept, within the noise", "reclaimed less hindsight's", "interval")  # fmt: skip
    return Table(columns, tuple(rows), frozenset({"reclaimed", "violation", "reclaimed less hindsight's"}))


def parts_table(results: Results) -> Table:
    """Return the violation of each week or day as a multiple of the budget, with its bounds."""
    rows: list[tuple[Cell, ...]] = [
        (margin, RESOURCE_WORDS[resource], name, int(p["part"]), p["value"], p["low"], p["high"])
        for margin, resource, name, parts in _each(results)
        for p in parts
    ]
    return Table(("margin", "resource", "estimator", "part", "times the budget", "low", "high"), tuple(rows))


def _each(results: Results) -> Iterator[tuple[str, str, str, list[dict[str, Any]]]]:
    """Yield margin, resource, estimator and parts of all that was followed."""
    by_name = results.get("following", {}).get("by_part", {})
    for margin in next(iter(by_name.values()), {}):
        for resource in RESOURCES:
            for name, of in by_name.items():
                if of[margin][resource]:
                    yield margin, resource, name, of[margin][resource]
