"""Reserves at every price at once: the ladder of a task, and the reservation at a place on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray

from reclaim.data.core import vectors
from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.core.vectors import LANES, in_llvm, numba_tools

LOWEST_PRICE: Final = 0.25
"""Price of the first rung, in limits of a task of mean size per violated task-window. Below a tenth of the price for
budgets of 1 %, little more is reclaimed."""
DOUBLED: Final = 4
"""Rungs in which the price doubles. Many tasks go from a small reservation straight to the limit, and a value between
two rungs is half of either, which is the cheapest for no task: with one rung instead of four Bitbrains lost a point at
1 %."""
N_RUNGS: Final = 15 * DOUBLED + 1
"""Rungs of a ladder: 60 prices, and at the last one the limit, which nothing violates. Budgets of 1 % need prices of 3
to 60, those of 0.1 % of 100 to 4,000."""
TOP_RUNG: Final = N_RUNGS - 1
PRICES: Final = np.append(LOWEST_PRICE * 2.0 ** (np.arange(TOP_RUNG) / DOUBLED), 0.0).astype(np.float32)
"""Price of each rung; the last one is the limit, whatever the price."""
FIRST_RUNGS: Final = (*range(0, N_RUNGS - LANES, LANES), N_RUNGS - LANES)
"""First rung of each vector of sixteen; the last of them begins among the rungs of the one before it."""
_WEIGHT_RANGE: Final = (0.03, 30.0)
"""Bounds of a limit over the mean limit, so that one huge task does not follow another rule than the rest."""
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_IN_ORDER: Final = np.zeros(0, np.int64)

Ladder = NDArray[np.float32]
"""Reservations of ``n`` tasks at each rung, over the limit; float32, shape (n, n_resources, N_RUNGS), rising along
the last axis; NaN where nothing is forecast.

The reservation at a price is the r that makes ``weight * r + price * S(r)`` least: what is reserved, and what the
violations that are expected would cost, where ``S(r) = P(demand > r)`` and the weight is the task's limit over the mean
limit. The price is the same for all tasks, so the next violation buys as much reclaimed limit of one task as of any
other: that is how most is reclaimed of all of them together for a given number of violations (Lagrange). A price
between two rungs reserves what lies between their reservations, in proportion to its logarithm. So a higher price never
reserves less, for any task.
"""


def rung_of(price: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return where prices stand on a ladder, from 0 to ``TOP_RUNG``; between two rungs by the logarithm."""
    with np.errstate(divide="ignore"):
        place: NDArray[np.float64] = np.clip(DOUBLED * np.log2(np.asarray(price) / LOWEST_PRICE), 0.0, TOP_RUNG)
    return place


def price_of(rung: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the prices that stand there on a ladder."""
    return LOWEST_PRICE * np.exp2(np.clip(rung, 0.0, TOP_RUNG) / DOUBLED)


def size_weight(limit: NDArray[np.float64], mean_limit: tuple[float, ...]) -> NDArray[np.float64]:
    """Return the weight of each task: its limit over the mean one, within bounds; 1 where unknown."""
    weight = np.clip(limit / np.array(mean_limit), *_WEIGHT_RANGE)
    return np.where(np.isnan(weight), 1.0, weight)


def ladder_of(
    survival: NDArray[np.float32], thresholds: NDArray[np.float32], weight: NDArray[np.float64], threads: int = 1
) -> Ladder:
    """Return the ladders of tasks.

    What is reserved is one of the thresholds or the limit. A point between two thresholds would rest on the
    interpolated curve, which errs on the low side.

    Parameters
    ----------
    survival : float32, shape (n, n_resources, n_thresholds)
        Probability that the demand exceeds each threshold, falling; NaN where nothing is forecast.
    thresholds : float32, shape (n, n_resources, n_thresholds)
        Rising, over the limit; those that a guard would lift anyway need not be there.
    weight : float64, shape (n, n_resources)
        From ``size_weight``.
    threads : int
        For large calls; the answers do not depend on it.
    """
    n = len(survival)
    out = np.empty((n, survival.shape[1], N_RUNGS), np.float32)

    def fill(part: int, parts: int) -> None:
        rows = slice(n * part // parts, n * (part + 1) // parts)
        points = np.empty((2, survival.shape[2] + 1), np.float32)
        _fill(survival[rows], thresholds[rows], weight[rows], PRICES, points, out[rows])

    in_parts(fill, n, threads)
    return out


def reserved_at(
    ladder: Ladder, rung: NDArray[np.float64], limit: NDArray[np.float64], rows: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Return what is reserved at places of ladders, in the unit of the limit; NaN where either is unknown.

    Parameters
    ----------
    ladder : Ladder
    rung, limit : float64, shape (n, n_resources)
    rows : int64, shape (n,), or None
        The ladder of each, where they are not the ladders in order; so a few of many need not be copied.
    """
    out = np.empty(limit.shape)
    _reserve(ladder, _rows(rows), np.ascontiguousarray(np.broadcast_to(rung, limit.shape)), _plain(limit), out)
    return out


def rung_for(
    ladder: Ladder, need: NDArray[np.float64], limit: NDArray[np.float64], rows: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Return the lowest place on each ladder that reserves what is needed; shape (n, n_resources) each.

    Minus infinity where every place does or nothing is forecast, infinity where none does. ``rows`` as in
    ``reserved_at``.
    """
    out = np.empty(limit.shape)
    _climb(ladder, _rows(rows), _plain(need), _plain(limit), out)
    return out


def _rows(rows: NDArray[np.int64] | None) -> NDArray[np.int64]:
    return _IN_ORDER if rows is None else np.ascontiguousarray(rows)


def _plain(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.ascontiguousarray(values, np.float64)


@numba.njit(inline="always")
def at_rung(rungs: Any, rung: float) -> Any:
    """Return the share reserved at a place of one ladder, for kernels."""
    below = min(int(rung), TOP_RUNG - 1)
    low, high = np.float64(rungs[below]), np.float64(rungs[below + 1])
    return min(low + (rung - below) * (high - low), high)


@numba.njit(**LENT)
def _reserve(ladder: Any, rows: Any, rung: Any, limit: Any, out: Any) -> None:
    for i in range(len(out)):
        row = rows[i] if len(rows) else i
        for r in range(out.shape[1]):
            out[i, r] = math.nan if np.isnan(rung[i, r]) else at_rung(ladder[row, r], rung[i, r]) * limit[i, r]


@numba.njit(**LENT)
def _climb(ladder: Any, rows: Any, need: Any, limit: Any, out: Any) -> None:
    for i in range(len(out)):
        row = rows[i] if len(rows) else i
        for r in range(out.shape[1]):
            rungs, wanted = ladder[row, r], need[i, r] / limit[i, r]
            out[i, r] = -math.inf
            if np.isnan(rungs[0]) or not wanted > rungs[0]:
                continue
            out[i, r] = math.inf
            for k in range(1, N_RUNGS):
                low, high = np.float64(rungs[k - 1]), np.float64(rungs[k])
                if wanted <= high:
                    out[i, r] = k - 1 + (wanted - low) / (high - low)
                    break


@in_llvm
def _cheapest(_: Any, share: Any, risk: Any, price: Any, size: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
    """Write one ladder: the first share of least ``share + price * size * risk``, or that of a lower price if larger.

    All are float32, the arrays C-contiguous; points and rungs in their order. In registers, sixteen prices at a time: a
    walk along the lower convex hull, which is the same in principle, takes three times as long, as no core can predict
    its branches.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of, at, cost, to = vectors.arrays(context, builder, signature, args)
        (n,) = vectors.shape_of(builder, of)
        weight = vectors.spread(builder, args[3])
        first_rungs = [n.type(rung) for rung in FIRST_RUNGS]
        prices = [builder.fmul(vectors.load(builder, cost.data, rung), weight) for rung in first_rungs]
        least, held = (
            [numba_tools.alloca_once_value(builder, vectors.constant(value)) for _ in prices]
            for value in (math.inf, 1.0)
        )
        with numba_tools.for_range(builder, n) as loop:
            reserved, risked = (
                vectors.spread(builder, builder.load(builder.gep(array.data, [loop.index]))) for array in (of, at)
            )
            for price, low, kept in zip(prices, least, held, strict=True):
                total = vectors.fma(builder, price, risked, reserved)
                less = builder.fcmp_ordered("<", total, builder.load(low))
                builder.store(builder.select(less, total, builder.load(low)), low)
                builder.store(builder.select(less, reserved, builder.load(kept)), kept)
        before = vectors.constant(0.0)
        for rung, following, kept in zip(FIRST_RUNGS, (*FIRST_RUNGS[1:], N_RUNGS), held, strict=True):
            shares = builder.load(kept)
            for step in (1, 2, 4, 8):  # the largest of the two, four, eight, sixteen up to each lane
                lower = [lane - step if lane >= step else lane for lane in range(LANES)]
                shares = vectors.larger(builder, vectors.lanes(builder, shares, lower), shares)
            shares = vectors.larger(builder, before, shares)
            if following == N_RUNGS:
                shares = builder.insert_element(shares, ir.Constant(ir.FloatType(), 1.0), ir.IntType(32)(LANES - 1))
            else:
                before = vectors.lanes(builder, shares, [following - rung - 1] * LANES)
            builder.store(shares, vectors.at(builder, to.data, n.type(rung)), align=4)
        return context.get_dummy_value()

    return types.void(share, risk, price, size, out), generate


@numba.njit(**LENT)
def _fill(
    survival: Any,  # (n, R, J) float32
    thresholds: Any,  # (n, R, J) float32
    weight: Any,  # (n, R) float64
    prices: Any,  # (N_RUNGS,) float32, rising but for the last
    points: Any,  # (2, J + 1) float32, overwritten
    out: Any,  # (n, R, N_RUNGS) float32, written
) -> None:
    """Write the shares of least cost at each price, and the limit."""
    share, risk = points[0], points[1]
    n_thresholds = survival.shape[2]
    share[n_thresholds], risk[n_thresholds] = _ONE, _ZERO  # the limit: no threshold at or above it is cheaper
    for i in range(len(out)):
        for c in range(out.shape[1]):
            s, r, to = survival[i, c], thresholds[i, c], out[i, c]
            if np.isnan(s[0]):
                for k in range(len(to)):
                    to[k] = np.float32(math.nan)
                continue
            for j in range(n_thresholds):
                share[j], risk[j] = r[j], s[j]
            _cheapest(share, risk, prices, np.float32(1.0 / weight[i, c]), to)
