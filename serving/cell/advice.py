"""Advises what to do about the model of a cell: train one, or train again."""

from __future__ import annotations

from typing import Final

import numpy as np

from reclaim.data.schema import RESOURCES
from reclaim.features.groups import TIER_LABELS
from reclaim.serving.cell.following import Prices
from reclaim.training.margins.online import BUDGETED
from reclaim.training.margins.own_price import FAR

ENOUGH_DAYS: Final = 2.0
"""Days of history from which a model of the cell's own may be better than the built-in one: lags reach a day back."""
ENOUGH_TASK_DAYS: Final = 700.0
"""Days of history times tasks: a week of 100, or two days of 400. From there on, a network trained on each recorded
series itself was better than one trained on the others (`docs/builtin.md`)."""


def worth_training(days: float, tasks: int) -> str | None:
    """Return the advice to train, for a history of so many days and tasks; None where it is too short."""
    if days < ENOUGH_DAYS or days * tasks < ENOUGH_TASK_DAYS:
        return None
    return (
        f"{days:.1f} days of {tasks} tasks are worth training on: a model of this cell is likely to reclaim more than "
        "the built-in one; `reclaim train` compares the two"
    )


def prices_apart(prices: Prices) -> list[str]:
    """Return where the price that was set and the one at which the model expects the budget differ by much."""
    if prices.own is None:
        return []
    found = []
    for b, margin in enumerate(BUDGETED):
        start = np.array(prices.start[margin].of_tiers)
        ratio = start / prices.own[b]
        for r, resource in enumerate(RESOURCES):
            known = np.isfinite(ratio[:, r])
            far = known & ((ratio[:, r] > FAR) | (ratio[:, r] < 1 / FAR)) & (not prices.start[margin].given[r])
            if known.any() and far[known].all():  # of every tier
                tier = int(np.flatnonzero(known)[0])
                found.append(
                    f"{resource}, {margin}: the price of validation is {ratio[tier, r]:.2g} times the one at which the "
                    f"model expects the budget here ({TIER_LABELS[tier]}): the load has changed, or the training "
                    "was too short; train again"
                )
    return found
