"""Reserves by the price of a violation: what a task reserves at every price, and at a given one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.training.margins.ladder import DOUBLED, TOP_RUNG, price_of, rung_of
from reclaim.training.margins.margin import MARGIN_NAMES, check_values

FOLLOWED_DOWN: Final = 6.0 * DOUBLED
"""Rungs by which a price that follows may fall below the one that was set: a 64th of it."""
_LOG: Final = math.log(2.0) / DOUBLED
"""Logarithm of the ratio of two neighbouring prices."""


@dataclass(frozen=True)
class Price:
    """Cost of a violation, per resource: the one number between a forecast and a reservation.

    Attributes
    ----------
    name : str
    value : tuple of float, in the order ``schema.RESOURCES``
        Limits of a task of mean size that one violated task-window costs; at least 0.
    by_tier : tuple of tuple of float, or None
        The same for each of ``groups.TIER_LABELS``; None: ``value`` holds for all tasks.
    given : tuple of bool, by resource
        Whether the price was given (``value.Value``): then it follows no budget.
    """

    name: str
    value: tuple[float, ...]
    by_tier: tuple[tuple[float, ...], ...] | None = None
    given: tuple[bool, ...] = (False,) * len(RESOURCES)
    rate: ClassVar[float] = 4.0
    """Rate at which a price follows the workload where a budget allows many violations a day
    (``online.OnlineMargins``): a composed cell that is changed on purpose keeps a budget of 1 % again within a day."""

    def __post_init__(self) -> None:
        check_values(f"price {self.name!r}", "price", self.value, self.by_tier, least=0)

    def rung(self, windows: Windows) -> NDArray[np.float64]:
        """Return where the price stands on the ladders of tasks; float64, shape (n, n_resources)."""
        of_tiers: NDArray[np.float64] = self.rungs[tier_key(windows.tier)]
        return of_tiers

    @property
    def of_tiers(self) -> tuple[tuple[float, ...], ...]:
        """The values of each of ``groups.TIER_LABELS``."""
        return (self.value,) * len(TIER_LABELS) if self.by_tier is None else self.by_tier

    @property
    def bounds(self) -> NDArray[np.float64]:
        """Least and largest logarithm that ``moved`` is for; shape (2, n_tiers, n_resources).

        Down to a part of what was set, so that a quiet week does not leave tasks unprotected; up to the limit. A price
        that was given does not move.
        """
        rungs = self.rungs
        bounds: NDArray[np.float64] = _LOG * np.stack([np.maximum(-rungs, -FOLLOWED_DOWN), TOP_RUNG - rungs])
        return np.where(self.given, 0.0, bounds)

    def moved(self, log: NDArray[np.float64]) -> Price:
        """Return it with its logarithm raised, shape (n_tiers, n_resources)."""
        return replace(self, by_tier=tuple(map(tuple, price_of(self.rungs + log / _LOG).tolist())))

    @property
    def rungs(self) -> NDArray[np.float64]:
        """Its places on ladders; shape (n_tiers, n_resources)."""
        return rung_of(np.array(self.of_tiers))


def three_prices(baseline: Price, aggressive: Price) -> Mapping[str, Price]:
    """Return the three named prices: the baseline's is at least the other's, ``medium`` is their geometric mean."""
    baseline = replace(baseline, name="baseline", **_of_both(max, baseline, aggressive))
    medium = replace(baseline, name="medium", **_of_both(lambda x, y: math.sqrt(x * y), baseline, aggressive))
    return dict(zip(MARGIN_NAMES, (baseline, medium, aggressive), strict=True))


def _of_both(rule: Any, a: Price, b: Price) -> dict[str, Any]:
    both = a.by_tier is not None and b.by_tier is not None
    tiers = zip(a.of_tiers, b.of_tiers, strict=True)
    return {
        "value": tuple(map(rule, a.value, b.value)),
        "by_tier": tuple(tuple(map(rule, x, y)) for x, y in tiers) if both else None,
    }
