"""What of a forecast is reserved: a level of each task's distribution, chosen by what a violation may cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.features.compiled import LENT
from reclaim.features.kin import in_parts
from reclaim.features.registry import FEATURE_NAMES

ANCHORS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights that the task's own past may have beside the quantile. Quarters, because square roots are exactly rounded
everywhere and other powers are not: the same history must give the same bits."""

PASTS: Final = ("24h", "ever")
"""How far back the task's own past reaches: its last 24 hours, or all since it was first seen."""

PRICES: Final = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Prices to choose from, in limits of a task of mean size per violated task-window. The best one for a budget of 1 %
was 1 to 10, for 0.1 % it was 0.3 to 100."""

SAFEST: Final = 0.9
"""Lowest level that spending may go down to unless told otherwise: before the margin, no task is held where more
than a tenth of its windows is expected to violate, whatever that would reclaim."""

_STEPS: Final = 6
"""Steps between two quantile levels at which spending looks."""
_WEIGHT_RANGE: Final = (0.03, 30.0)
"""Bounds of a limit over the mean limit, so that one giant of a cell does not live by another rule than the rest."""

_LARGEST: Final = {past: [FEATURE_NAMES.index(f"{resource}_max_{past}") for resource in RESOURCES] for past in PASTS}
_SEEN: Final = FEATURE_NAMES.index("seen")
_YOUNG_SEEN: Final = 3.7
"""log2(1 + 12 windows): with less than an hour of history, the limit stands in for the largest demand."""


@dataclass(frozen=True)
class Basis:
    """How much of one resource is reserved, before any margin, given a task's predicted distribution.

    The reservation is the quantile at the level q, at least ``level``, that makes

        (limit / mean limit) * quantile(q) + price * (1 - q)

    least: what is reserved, and what the violations that are expected would cost. The price is the same for all tasks,
    so the next violation buys as much reclaimed limit of one task as of any other: that is how most is reclaimed of
    all of them together for a given number of violations (Lagrange). A task whose usage is foreseen well is held at a
    high level, for there the quantiles lie close; one that may reach its limit at any time is held at the limit or let
    go far below it, whichever is cheaper, but never below ``level``; only the margin, added later, may.

    Attributes
    ----------
    level : float
        A quantile level: the one reserved where there is no price, else the lowest that may be.
    price : float or None
        Limits of a task of mean size that one violated task-window costs. None reserves ``level`` for all tasks.
    anchor : float
        Weight of the task's own past beside the quantile, one of ``ANCHORS``; see ``_lean``. At 1 it is the past
        alone that is reserved, or the floor where that is more.
    past : str
        One of ``PASTS``.
    """

    level: float = SAFEST
    price: float | None = None
    anchor: float = 0.0
    past: str = PASTS[0]

    def __post_init__(self) -> None:
        if self.price is not None and not 0 < self.price < float("inf"):
            raise ConfigError(f"price must be above 0, got {self.price}")
        if self.anchor not in ANCHORS:
            raise ConfigError(f"anchor must be one of {ANCHORS}, got {self.anchor}")
        if self.past not in PASTS:
            raise ConfigError(f"past must be one of {PASTS}, got {self.past!r}")

    def check(self, levels: tuple[float, ...]) -> None:
        """Raise ConfigError where a forecaster of these levels cannot serve it."""
        if self.level not in levels:
            raise ConfigError(f"level must be one of {levels}, got {self.level}")


Plan = tuple[Basis, ...]
"""A ``Basis`` for each of ``schema.RESOURCES``."""


def plan_for_all(basis: Basis) -> Plan:
    """Return the plan that treats every resource alike."""
    return (basis,) * len(RESOURCES)


def reserved_share(
    plan: Plan,
    quantiles: NDArray[np.float64],
    levels: tuple[float, ...],
    x: NDArray[np.float32],
    weight: NDArray[np.float64],
    threads: int = 1,
) -> NDArray[np.float64]:
    """Return what the plan reserves of each row's limit; float64, shape (n, n_resources), NaN where not forecast.

    Parameters
    ----------
    plan : Plan
    quantiles : float64, shape (n, n_resources, n_levels)
        Over the limit.
    levels : tuple of float, increasing
        Those of the last axis.
    x : float32, shape (n, n_features)
        The features they were made from.
    weight : float64, shape (n, n_resources)
        From ``size_weight``.
    threads : int
        For large calls; the numbers do not depend on it.
    """
    share = np.empty(weight.shape)
    how = [
        (levels.index(b.level), np.nan if b.price is None else b.price, *_grid(levels[levels.index(b.level) :]))
        for b in plan
    ]

    def fill(part: int, parts: int) -> None:
        rows = slice(len(share) * part // parts, len(share) * (part + 1) // parts)
        for r, basis in enumerate(plan):
            _fill(
                quantiles[rows, r], weight[rows, r], *how[r], x[rows], _LARGEST[basis.past][r],
                int(4 * basis.anchor), share[rows, r],
            )  # fmt: skip

    in_parts(fill, len(share), threads)
    return share


def size_weight(limit: NDArray[np.float64], mean_limit: tuple[float, ...]) -> NDArray[np.float64]:
    """Return what a reserved share of each task's limit weighs: its limit over the mean one, within bounds.

    1 where either is unknown; float64, shape (n, n_resources).
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        weight = np.clip(limit / np.array(mean_limit), *_WEIGHT_RANGE)
    return np.where(np.isfinite(weight), weight, 1.0)


@cache
def _grid(levels: tuple[float, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return where spending looks: position of the level below, way to the next, expected violations.

    Steps are even in -log(1 - level), in which the tail of an exponential distribution is a straight line.
    """
    depth = -np.log1p(-np.array(levels))
    at = np.arange(_STEPS * (len(levels) - 1) + 1)
    low = np.minimum(at // _STEPS, max(len(levels) - 2, 0))
    way = (at - _STEPS * low) / _STEPS
    reached = depth[low] + way * (depth[np.minimum(low + 1, len(levels) - 1)] - depth[low])
    return low, way, np.exp(-reached)


@numba.njit(**LENT)
def _fill(
    quantiles: Any, weight: Any, first: int, price: float, low: Any, way: Any, violating: Any, x: Any, largest: int,
    quarters: int, out: Any,
) -> None:  # fmt: skip
    """Write what a basis reserves of one resource's limit; a price of NaN is none."""
    for i in range(len(out)):
        least = quantiles[i, first]
        share = least if np.isnan(price) else _spend(quantiles[i], weight[i], price, low, way, violating, first)
        if quarters > 0:
            share = _lean(share, x[i, largest], x[i, _SEEN], quarters)
        if not np.isnan(price) and min(least, 1.0) > share:
            share = min(least, 1.0)
        out[i] = share


@numba.njit(**LENT)
def _spend(quantiles: Any, weight: float, price: float, low: Any, way: Any, violating: Any, first: int) -> float:
    best, chosen = weight, 1.0  # the limit, which nothing violates
    for k in range(len(low)):
        below = quantiles[first + low[k]]
        above = quantiles[min(first + low[k] + 1, len(quantiles) - 1)]
        share = below + way[k] * (above - below)
        if not share < 1.0:
            return math.nan if np.isnan(share) else chosen
        cost = weight * share + price * violating[k]
        if cost < best:
            best, chosen = cost, share
    return chosen


@numba.njit(**LENT)
def _lean(share: float, largest: float, seen: float, quarters: int) -> float:
    """Return the weighted geometric mean of a share and the largest demand of the task's past, over the limit.

    A network is too sure of tasks unlike those it learned from, and a margin in proportion to its quantile carries the
    fault on; what the task itself has done does not depend on what was learned.
    """
    if np.isnan(share):
        return math.nan
    past = 1.0 if np.isnan(largest) or largest > 1.0 or seen < _YOUNG_SEEN else np.float64(largest)
    if quarters == 4:
        return past
    half = math.sqrt(share * past)
    if quarters == 1:
        return math.sqrt(share * half)
    return half if quarters == 2 else math.sqrt(half * past)
