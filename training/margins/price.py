"""Reserves by the price of a violation: what a task reserves at every price, and at a given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.training.margins.margin import MARGIN_NAMES

LOWEST_PRICE: Final = 0.25
"""Price of the first rung, in limits of a task of mean size per violated task-window. Below a tenth of what budgets of
1 % ask for little more is reclaimed."""
DOUBLED: Final = 4
"""Rungs in which the price doubles. Many tasks go from a small reservation straight to the limit, and what lies between
two rungs is half of either, which is cheap for none: with one rung instead of four Bitbrains lost a point at 1 %."""
N_RUNGS: Final = 15 * DOUBLED + 1
"""Rungs of a ladder: 60 prices, and at the last one the limit, which nothing violates. Budgets of 1 % ask for 3 to 60,
those of 0.1 % for 100 to 4,000."""
TOP_RUNG: Final = N_RUNGS - 1
_PRICES: Final = LOWEST_PRICE * 2.0 ** (np.arange(TOP_RUNG) / DOUBLED)
_LANES: Final = 16
_in_llvm: Final[Any] = intrinsic
_numba: Final[Any] = cgutils
"""Typed as anything: numba's own types say too little."""
_PADDED: Final = -(-TOP_RUNG // _LANES) * _LANES
_PADDED_PRICES: Final = np.resize(_PRICES, _PADDED).astype(np.float32)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
FOLLOWED_DOWN: Final = 6.0 * DOUBLED
"""Rungs by which a price that follows may fall below the one that was set: a 64th of it."""
_LOG: Final = math.log(2.0) / DOUBLED
"""Logarithm of the ratio of two neighbouring prices."""
_IN_ORDER: Final = np.zeros(0, np.int64)
_WEIGHT_RANGE: Final = (0.03, 30.0)
"""Bounds of a limit over the mean limit, so that one giant of a cell does not live by another rule than the rest."""

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
    """Speed at which one follows the workload (``online.OnlineMargins``). On validation rows of Azure, Google machines
    and a composed cell violations came nearer to the budget with it than with 1 and 2, for a tenth of a point of the
    limits."""

    def __post_init__(self) -> None:
        if self.by_tier is not None and len(self.by_tier) != len(TIER_LABELS):
            raise ConfigError(f"price {self.name!r}: expected {len(TIER_LABELS)} tiers, got {len(self.by_tier)}")
        for values in (self.value, *(self.by_tier or ())):
            if len(values) != len(RESOURCES):
                raise ConfigError(f"price {self.name!r}: expected one value for each of {RESOURCES}, got {values}")
            for resource, value in zip(RESOURCES, values, strict=True):
                if not 0 <= value < math.inf:
                    raise ConfigError(f"price {self.name!r}: the {resource} price must be at least 0, got {value}")

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

        Down to a part of what was set, so that a quiet week does not leave a task bare; up to the limit. A price that
        was given does not move.
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


def rung_of(price: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return where prices stand on a ladder, from 0 to ``TOP_RUNG``; between two rungs by the logarithm."""
    with np.errstate(divide="ignore"):
        place: NDArray[np.float64] = np.clip(DOUBLED * np.log2(np.asarray(price) / LOWEST_PRICE), 0.0, TOP_RUNG)
    return place


def price_of(rung: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the prices that stand there on a ladder."""
    return LOWEST_PRICE * np.exp2(np.clip(rung, 0.0, TOP_RUNG) / DOUBLED)


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


def size_weight(limit: NDArray[np.float64], mean_limit: tuple[float, ...]) -> NDArray[np.float64]:
    """Return what a share of each task's limit weighs: its limit over the mean one, within bounds; 1 where unknown."""
    weight = np.clip(limit / np.array(mean_limit), *_WEIGHT_RANGE)
    return np.where(np.isnan(weight), 1.0, weight)


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


def ladder_of(
    survival: NDArray[np.float32], thresholds: NDArray[np.float32], weight: NDArray[np.float64], threads: int = 1
) -> Ladder:
    """Return the ladders of tasks.

    What is reserved is one of the thresholds or the limit. A point between two thresholds would be reserved for what
    the curve is believed to be there, and belief errs on the low side.

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
    points = np.empty((2, survival.shape[2] + 1), np.float32)

    def fill(part: int, parts: int) -> None:
        rows = slice(n * part // parts, n * (part + 1) // parts)
        room = np.empty((2, _PADDED), np.float32)
        _fill(survival[rows], thresholds[rows], weight[rows], _PADDED_PRICES, np.empty_like(points), room, out[rows])

    in_parts(fill, n, threads)
    return out


@_in_llvm
def _cheapest(_: Any, share: Any, risk: Any, price: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
    """Write for each price the first share of least ``share + price * risk``; all are C-contiguous float32.

    In registers, sixteen prices at a time: a walk along the lower convex hull, which is the same in principle, takes
    three times as long, as no core foresees where it turns.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of, at, cost, to = (
            context.make_array(t)(context, builder, v) for t, v in zip(signature.args, args, strict=True)
        )
        (n,) = _numba.unpack_tuple(builder, of.shape)
        vector = ir.VectorType(ir.FloatType(), _LANES)
        first = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        fma = _numba.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{_LANES}f32"
        )

        def place(array: Any, lane: int) -> Any:
            return builder.bitcast(builder.gep(array.data, [n.type(lane)]), vector.as_pointer())

        def spread(array: Any, j: Any) -> Any:
            value = builder.load(builder.gep(array.data, [j]))
            undefined = ir.Constant(vector, ir.Undefined)
            return builder.shuffle_vector(builder.insert_element(undefined, value, ir.IntType(32)(0)), undefined, first)

        lanes = range(0, _PADDED, _LANES)
        prices = [builder.load(place(cost, lane), align=4) for lane in lanes]
        least, held = (
            [_numba.alloca_once_value(builder, ir.Constant(vector, [value] * _LANES)) for _ in lanes]
            for value in (math.inf, 1.0)
        )
        with _numba.for_range(builder, n) as loop:
            reserved, risked = spread(of, loop.index), spread(at, loop.index)
            for price, low, kept in zip(prices, least, held, strict=True):
                total = builder.call(fma, [price, risked, reserved])
                less = builder.fcmp_ordered("<", total, builder.load(low))
                builder.store(builder.select(less, total, builder.load(low)), low)
                builder.store(builder.select(less, reserved, builder.load(kept)), kept)
        for lane, kept in zip(lanes, held, strict=True):
            builder.store(builder.load(kept), place(to, lane), align=4)
        return context.get_dummy_value()

    return types.void(share, risk, price, out), generate


@numba.njit(**LENT)
def _fill(
    survival: Any,  # (n, R, J) float32
    thresholds: Any,  # (n, R, J) float32
    weight: Any,  # (n, R) float64
    prices: Any,  # (_PADDED,) float32, rising
    points: Any,  # (2, J + 1) float32, overwritten
    room: Any,  # (2, _PADDED) float32, overwritten
    out: Any,  # (n, R, N_RUNGS) float32, written
) -> None:
    """Write the points of least cost at each price, never one of a lower price that reserves more."""
    share, risk, price, held = points[0], points[1], room[0], room[1]
    n_thresholds = survival.shape[2]
    for i in range(len(out)):
        for c in range(out.shape[1]):
            s, r, to = survival[i, c], thresholds[i, c], out[i, c]
            if np.isnan(s[0]):
                for k in range(len(to)):
                    to[k] = np.float32(math.nan)
                continue
            for j in range(n_thresholds):
                share[j], risk[j] = r[j], s[j]
            share[-1] = _ONE
            for j in range(len(share)):
                risk[j] = risk[j] if share[j] < _ONE else _ZERO  # the limit, which nothing violates
            for k in range(len(price)):
                price[k] = prices[k] * np.float32(1.0 / weight[i, c])
            _cheapest(share, risk, price, held)
            most = _ZERO
            for k in range(len(to) - 1):
                most = max(most, held[k])
                to[k] = most
            to[len(to) - 1] = _ONE
