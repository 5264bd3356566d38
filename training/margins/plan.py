"""Chooses what is reserved of a forecast: a level of each task's distribution, by the price of a violation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.features.registry import FEATURE_NAMES

ANCHORS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights that the task's own past may have next to the quantile. Quarters, because square roots are exactly rounded
everywhere and other powers are not: the same history must give the same bits."""

PASTS: Final = ("24h", "ever")
"""Reach of the task's own past: its last 24 hours, or all since it was first seen."""

PRICES: Final = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Prices to choose from, in limits of a task of mean size per violated task-window. The best one for a budget of 1 %
was 1 to 10, for 0.1 % it was 0.3 to 100."""

SAFEST: Final = 0.9
"""Lowest level that spending may go down to by default: before the margin, no task is held where more
than a tenth of its windows is expected to violate, whatever that would reclaim."""

_BLOCK_ROWS: Final = 256
"""Rows that are searched together, point by point: what they need stays in a core's own cache."""
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
    """Rule that gives the reservation of one resource, before any margin, from a task's predicted distribution.

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
        Weight of the task's own past next to the quantile, one of ``ANCHORS``; see ``_lean``. At 1 it is the past
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


def reserved(
    plans: tuple[Plan, ...],
    quantiles: NDArray[np.float64],
    levels: tuple[float, ...],
    x: NDArray[np.float32],
    limit: NDArray[np.float64],
    mean_limit: tuple[float, ...],
    threads: int = 1,
) -> NDArray[np.float64]:
    """Return what plans reserve, in the unit of the limit; NaN where nothing is forecast or the limit is unknown.

    Parameters
    ----------
    plans : tuple of Plan
    quantiles : float64, shape (n, n_targets, n_levels)
        Over the limit; the first targets are the resources.
    levels : tuple of float, increasing
        Those of the last axis.
    x : float32, shape (n, n_features)
        The features they were made from.
    limit : float64, shape (n, n_resources)
    mean_limit : tuple of float in the order ``schema.RESOURCES``
        The size that a task's own is compared with (``_size_weight``); NaN unknown.
    threads : int
        For large calls; the numbers do not depend on it.

    Returns
    -------
    float64, shape (n, n_plans, n_resources)
    """
    n = len(quantiles)
    out = np.empty((n, len(plans), len(RESOURCES)))
    bases, mean = _bases(plans, levels), np.array(mean_limit)

    def fill(part: int, parts: int) -> None:
        rows = slice(n * part // parts, n * (part + 1) // parts)
        room = np.empty((len(levels) + 3, max(1, min(n, _BLOCK_ROWS))))
        _fill(quantiles[rows], limit[rows], mean, bases, x[rows], room, out[rows])

    in_parts(fill, n, threads)
    return out


@cache
def _bases(plans: tuple[Plan, ...], levels: tuple[float, ...]) -> tuple[NDArray[Any], ...]:
    """Return what ``_fill`` wants to know of each basis, and the grids that it searches, one after another.

    For each plan and resource: int64, shape (n_plans, n_resources, 5), the position of ``level``, the column of the
    task's past, the quarters of its weight, begin and end of the grid; whether it has a price; for each point of the
    grids what ``_grid`` says, the violations times the price.
    """
    whole, spent, grids, end = [], [], [], 0
    for plan in plans:
        for r, basis in enumerate(plan):
            first = levels.index(basis.level)
            low, way, violating = _grid(levels[first:])
            begin, end = end, end + len(low)
            grids.append((low + first, way, (basis.price or 0.0) * violating))
            whole.append((first, _LARGEST[basis.past][r], int(4 * basis.anchor), begin, end))
            spent.append(basis.price is not None)
    shape = (len(plans), len(RESOURCES))
    points = (np.concatenate(of_all) for of_all in zip(*grids, strict=True))
    return (np.array(whole).reshape(*shape, -1), np.array(spent).reshape(shape), *points)


def _grid(levels: tuple[float, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return where spending looks: position of the level below, way to the next, expected violations.

    Steps are even in -log(1 - level), in which the tail of an exponential distribution is a straight line; as many
    for each level, so the last one, behind which there is no other, comes so often.
    """
    depth = -np.log1p(-np.array(levels))
    at = np.minimum(np.arange(_STEPS * len(levels)), _STEPS * (len(levels) - 1))
    low = np.minimum(at // _STEPS, max(len(levels) - 2, 0))
    way = (at - _STEPS * low) / _STEPS
    reached = depth[low] + way * (depth[np.minimum(low + 1, len(levels) - 1)] - depth[low])
    return low, way, np.exp(-reached)


@numba.njit(**LENT)
def _fill(
    quantiles: Any,  # (n, T, Q) float64, over the limit
    limit: Any,  # (n, R) float64
    mean_limit: Any,  # (R,) float64
    bases: Any,  # what ``_bases`` returns
    x: Any,  # (n, F) float32
    room: Any,  # (Q + 3, block) float64, overwritten
    out: Any,  # (n, P, R) float64, written
) -> None:
    """Write what the plans reserve, a block of rows at a time."""
    whole, spent_on, low, way, charge = bases
    n_levels = quantiles.shape[2]
    of_level, weight, least_cost, chosen = room[:n_levels], room[n_levels], room[n_levels + 1], room[n_levels + 2]
    for start in range(0, len(out), room.shape[1]):
        n = min(room.shape[1], len(out) - start)
        for r in range(out.shape[2]):
            for i in range(n):
                weight[i] = _size_weight(limit[start + i, r], mean_limit[r])
                for q in range(n_levels):
                    of_level[q, i] = quantiles[start + i, r, q]
            for p in range(out.shape[1]):
                first, largest, quarters, begin, end = whole[p, r]
                least, spent = of_level[first], spent_on[p, r]
                if spent:
                    grid = low[begin:end], way[begin:end], charge[begin:end]
                    _spend(of_level, weight, grid, n, least_cost, chosen)
                for i in range(n):
                    share = chosen[i] if spent else least[i]
                    if quarters > 0:
                        share = _lean(share, x[start + i, largest], x[start + i, _SEEN], quarters)
                    if spent and min(least[i], 1.0) > share:
                        share = min(least[i], 1.0)
                    out[start + i, p, r] = share * limit[start + i, r]


@numba.njit(**LENT)
def _size_weight(limit: float, mean_limit: float) -> float:
    """Return what a share of a task's limit weighs: its limit over the mean one, within bounds; 1 where unknown."""
    weight = limit / mean_limit
    return 1.0 if np.isnan(weight) else min(max(weight, _WEIGHT_RANGE[0]), _WEIGHT_RANGE[1])


@numba.njit(**LENT)
def _spend(quantiles: Any, weight: Any, grid: Any, n: int, least_cost: Any, chosen: Any) -> None:
    """Write the share of least cost of ``n`` rows; quantiles of shape (n_levels, n), all rows point by point.

    A row's search ends, with a cost that none is below, where the share reaches the limit or is not known. If it is not
    known at one point between two levels, it is not at the first of them, for 0 * infinity is not a number either.
    """
    low, way, charge = grid
    for i in range(n):
        least_cost[i], chosen[i] = weight[i], 1.0  # the limit, which nothing violates
    for k in range(0, len(low), _STEPS):
        below, above = quantiles[low[k]], quantiles[min(low[k] + 1, len(quantiles) - 1)]
        for i in range(n):
            start, rise, least, best = below[i], above[i] - below[i], least_cost[i], chosen[i]
            unknown = np.isnan(start + way[k] * rise) & (least > -math.inf)
            best = math.nan if unknown else best
            for step in range(_STEPS):
                share = start + way[k + step] * rise
                cost = weight[i] * share + charge[k + step]
                cheaper = (share < 1.0) & (cost < least)  # no "and": a branch would keep rows from being taken together
                best = share if cheaper else best
                least = cost if cheaper else least
                least = least if share < 1.0 else -math.inf
            least_cost[i], chosen[i] = least, best


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
