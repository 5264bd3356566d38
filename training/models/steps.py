"""Keeps the reservations at every price as the rungs at which they rise: an eighth of a ladder, to the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray

from reclaim.data.core import vectors
from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.core.vectors import INTEGERS, LANES, LOOKS_UP_WORDS, WIDE_REGISTERS, in_llvm, numba_tools
from reclaim.data.schema import RESOURCES
from reclaim.training.estimators.base import Forecast
from reclaim.training.margins.ladder import FIRST_RUNGS, N_RUNGS, PRICES, TOP_RUNG, size_weight
from reclaim.training.margins.own_price import UNIT, UNKNOWN, Risk
from reclaim.training.models.survival import N_BELOW, N_THRESHOLDS, TABLE, rise

N_RISES: Final = N_THRESHOLDS - N_BELOW
"""Thresholds that may be reserved: from current usage on. After the last one comes the limit."""
NOTHING: Final = 255
"""First number of rungs of a task without a forecast."""
_WIDTH: Final = 64
"""Rungs of a vector of bytes; those beyond the last one count for no threshold."""
_TABLE: Final = 32
"""Room for the risk at each threshold and at the limit: what a register holds."""
_BYTES: Final = ir.VectorType(ir.IntType(8), _WIDTH)
_BITS: Final = ir.IntType(_WIDTH)
assert LANES <= N_RISES < _TABLE <= N_RUNGS
_AT_ONCE: Final = len(FIRST_RUNGS) if WIDE_REGISTERS else 1
"""Vectors of rungs whose thresholds of least cost are searched together: as many as stay in registers."""


class Steps(NamedTuple):
    """Reservations of ``n`` tasks at every price: what ``ladder_at`` gives, as the rungs at which they rise.

    A ladder rises from threshold to threshold of its curve, and these follow from what is used now.

    Attributes
    ----------
    rises : uint8, shape (n, n_resources, N_RISES)
        Number of rungs that reserve no more than each threshold; ``NOTHING`` first where nothing is forecast.
    now : float32, shape (n, n_resources)
        What is used now (``survival.used_now``).
    """

    rises: NDArray[np.uint8]
    now: NDArray[np.float32]

    def take(self, rows: NDArray[np.int64]) -> Steps:
        """Return the chosen rows."""
        return Steps(self.rises[rows], self.now[rows])


def steps_at(
    forecast: Forecast,
    horizon_s: int,
    limit: NDArray[np.float64],
    mean_limit: tuple[float, ...],
    used: NDArray[np.float64] | None = None,
    threads: int = 1,
) -> tuple[Steps, Risk | None]:
    """Return what is reserved at every price of a forecast, as ``estimator.ladder_at``, and the risk of each price.

    Parameters
    ----------
    forecast : Forecast
    horizon_s : int
    limit : float64, shape (n, n_resources)
    mean_limit : tuple of float
    used : float64, shape (n, n_resources), or None
        What is used now, over the limit, for the risks (``own_price.risk_of``); None: they are not wanted.
    threads : int
        For large calls; the answers do not depend on it.
    """
    n, of_resources = len(limit), slice(len(RESOURCES))
    survival = forecast.survival[:, of_resources, forecast.horizons_s.index(horizon_s), N_BELOW:]
    thresholds = forecast.thresholds[:, of_resources, N_BELOW:]
    weight = size_weight(limit, mean_limit)
    rises = np.empty((n, len(RESOURCES), N_RISES), np.uint8)
    risk = np.empty((0 if used is None else n, len(RESOURCES), N_RUNGS), np.uint16)
    of_used = np.empty((0, len(RESOURCES))) if used is None else np.ascontiguousarray(used)

    def fill(part: int, parts: int) -> None:
        rows = slice(n * part // parts, n * (part + 1) // parts)
        points, places = np.empty((2, N_RISES + 1), np.float32), np.empty(_WIDTH, np.uint8)
        at_each = np.empty(_TABLE, np.uint16)
        _fill(
            survival[rows], thresholds[rows], weight[rows], PRICES, of_used[rows], points, places, at_each, rises[rows],
            risk[rows],
        )  # fmt: skip

    in_parts(fill, n, threads)
    return Steps(rises, np.ascontiguousarray(thresholds[:, :, 0])), None if used is None else risk


def reserved_at(steps: Steps, rung: NDArray[np.float64], limit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what is reserved at places of ladders, to the bits of ``ladder.reserved_at``; (n, n_resources) each."""
    out = np.empty(limit.shape)
    at = np.ascontiguousarray(np.broadcast_to(rung, limit.shape))
    _reserve(*steps, at, np.ascontiguousarray(limit), TABLE, np.empty(N_THRESHOLDS, np.float32), out)
    return out


@numba.njit(**LENT)
def _reserve(rises: Any, now: Any, rung: Any, limit: Any, table: Any, thresholds: Any, out: Any) -> None:
    for i in range(len(out)):
        for r in range(out.shape[1]):
            if np.isnan(rung[i, r]) or rises[i, r, 0] == NOTHING:
                out[i, r] = math.nan
            else:
                rise(now[i, r], table, thresholds)
                out[i, r] = share_at(rises[i, r], thresholds, rung[i, r]) * limit[i, r]


@in_llvm
def _up_to(_: Any, rises: Any, rung: Any) -> tuple[Any, Callable[..., Any]]:
    """Return how many of the numbers of rungs, (N_RISES,) uint8, are no larger than a rung."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (of,) = vectors.arrays(context, builder, signature, args)
        half = ir.VectorType(ir.IntType(8), LANES)
        bound = ir.Constant(half, ir.Undefined)
        bound = builder.insert_element(bound, builder.trunc(args[1], ir.IntType(8)), ir.IntType(32)(0))
        bound = builder.shuffle_vector(bound, bound, vectors.constant(0, kind=INTEGERS))
        (n,) = vectors.shape_of(builder, of)
        counted = []
        for first, again in ((0, 0), (N_RISES - LANES, 2 * LANES - N_RISES)):  # the second half begins in the first
            part = builder.load(vectors.at(builder, of.data, n.type(first), kind=half), align=1)
            below = builder.bitcast(builder.icmp_unsigned("<=", part, bound), ir.IntType(LANES))
            counted.append(builder.ctpop(builder.lshr(below, below.type(again))))
        return builder.zext(builder.add(*counted), n.type)

    return types.intp(rises, rung), generate


@numba.njit(inline="always")
def share_at(rises: Any, thresholds: Any, rung: float) -> Any:
    """Return the share reserved at a place on a ladder, for kernels; ``thresholds`` are all of ``survival.rise``."""
    below = min(int(rung), TOP_RUNG - 1)
    at_low, at_high = _up_to(rises, below), _up_to(rises, below + 1)
    low = 1.0 if at_low == N_RISES else np.float64(thresholds[N_BELOW + at_low])
    high = 1.0 if at_high == N_RISES else np.float64(thresholds[N_BELOW + at_high])
    return min(low + (rung - below) * (high - low), high)


@in_llvm
def _cheapest(
    _: Any, share: Any, risk: Any, price: Any, size: Any, places: Any, rises: Any
) -> tuple[Any, Callable[..., Any]]:
    """Write the threshold of least cost at each rung, as ``ladder.ladder_of``, and the rungs up to each threshold.

    ``share`` and ``risk`` (N_RISES + 1,), the limit last, ``price`` (N_RUNGS,) and ``size`` are float32, ``places``
    (_WIDTH,) and ``rises`` (N_RISES,) uint8; the arrays C-contiguous.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of, at, cost, to, counted = vectors.arrays(context, builder, signature, args)
        (n,) = vectors.shape_of(builder, of)
        weight = vectors.spread(builder, args[3])
        held: list[Any] = []
        for some in (FIRST_RUNGS[k : k + _AT_ONCE] for k in range(0, len(FIRST_RUNGS), _AT_ONCE)):
            prices = [builder.fmul(vectors.load(builder, cost.data, n.type(rung)), weight) for rung in some]
            least = [numba_tools.alloca_once_value(builder, vectors.constant(math.inf)) for _ in prices]
            places = [numba_tools.alloca_once_value(builder, vectors.constant(N_RISES, kind=INTEGERS)) for _ in prices]
            with numba_tools.for_range(builder, n) as loop:
                reserved, risked = (
                    vectors.spread(builder, builder.load(builder.gep(array.data, [loop.index]))) for array in (of, at)
                )
                place = vectors.spread_integer(builder, builder.trunc(loop.index, ir.IntType(32)))
                for price, low, kept in zip(prices, least, places, strict=True):
                    total = vectors.fma(builder, price, risked, reserved)
                    less = builder.fcmp_ordered("<", total, builder.load(low))
                    builder.store(builder.select(less, total, builder.load(low)), low)
                    builder.store(builder.select(less, place, builder.load(kept)), kept)
            held += places
        rungs = _highest_so_far(builder, _in_bytes(builder, [builder.load(kept) for kept in held]))
        builder.store(rungs, builder.bitcast(to.data, _BYTES.as_pointer()), align=1)
        for j in range(N_RISES):
            up_to = builder.icmp_unsigned("<=", rungs, _constant(*[j] * _WIDTH))
            number = builder.ctpop(builder.bitcast(up_to, _BITS))
            builder.store(builder.trunc(number, ir.IntType(8)), builder.gep(counted.data, [n.type(j)]))
        return context.get_dummy_value()

    return types.void(share, risk, price, size, places, rises), generate


@in_llvm
def _look_up(_: Any, table: Any, places: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
    """Write what a table, (_TABLE,) uint16, has at places, (_WIDTH,) uint8; ``out`` (N_RUNGS,) uint16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of, at, to = vectors.arrays(context, builder, signature, args)
        (n,) = vectors.shape_of(builder, of)
        words, small = (ir.VectorType(ir.IntType(bits), _TABLE) for bits in (16, 8))
        kind = ir.FunctionType(words, [words, words])
        permute = numba_tools.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
        kept = builder.load(vectors.at(builder, of.data, n.type(0), kind=words), align=2)
        for first in (0, N_RUNGS - _TABLE):  # the second half begins in the first
            place = builder.load(vectors.at(builder, at.data, n.type(first), kind=small), align=1)
            found = builder.call(permute, [kept, builder.zext(place, words)])
            builder.store(found, vectors.at(builder, to.data, n.type(first), kind=words), align=2)
        return context.get_dummy_value()

    return types.void(table, places, out), generate


def _constant(*values: int) -> Any:
    return ir.Constant(_BYTES, list(values))


def _lanes(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    """Return the lanes at some places of two vectors, one behind the other."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places))


def _in_bytes(builder: Any, held: list[Any]) -> Any:
    """Return four vectors of rungs as one of bytes: each rung once, and the limit at the last one and beyond it."""
    small = [builder.trunc(of, ir.VectorType(ir.IntType(8), LANES)) for of in held]
    both = [_lanes(builder, a, b, list(range(2 * LANES))) for a, b in (small[:2], small[2:])]
    again = FIRST_RUNGS[-2] + LANES - FIRST_RUNGS[-1]  # rungs of the last vector that the one before it has, too
    rungs = _lanes(
        builder, both[0], both[1], [k if k < 3 * LANES else min(k + again, _WIDTH - 1) for k in range(_WIDTH)]
    )
    behind = _constant(*(0 if k < TOP_RUNG else N_RISES for k in range(_WIDTH)))
    return builder.select(builder.icmp_unsigned(">", behind, rungs), behind, rungs)


def _highest_so_far(builder: Any, rungs: Any) -> Any:
    """Return the largest byte up to each lane."""
    for step in (1, 2, 4, 8, 16, 32):
        lower = _lanes(builder, rungs, rungs, [lane - step if lane >= step else lane for lane in range(_WIDTH)])
        rungs = builder.select(builder.icmp_unsigned(">", lower, rungs), lower, rungs)
    return rungs


@numba.njit(**LENT)
def _fill(
    survival: Any,  # (n, R, N_RISES) float32
    thresholds: Any,  # (n, R, N_RISES) float32
    weight: Any,  # (n, R) float64
    prices: Any,  # (N_RUNGS,) float32
    used: Any,  # (n, R) float64, or (0, R) without risks
    points: Any,  # (2, N_RISES + 1) float32, overwritten
    places: Any,  # (_WIDTH,) uint8, overwritten
    at_each: Any,  # (_TABLE,) uint16, overwritten
    rises: Any,  # (n, R, N_RISES) uint8, written
    risk: Any,  # (n, R, N_RUNGS) uint16, written; (0, R, N_RUNGS) without risks
) -> None:
    share, passed = points[0], points[1]
    share[N_RISES], passed[N_RISES] = np.float32(1.0), np.float32(0.0)  # the limit, which nothing violates
    for i in range(len(rises)):
        for c in range(rises.shape[1]):
            s, r = survival[i, c], thresholds[i, c]
            if np.isnan(s[0]):
                rises[i, c, :] = NOTHING
                if len(risk):
                    risk[i, c, :] = UNKNOWN
                continue
            for j in range(N_RISES):
                share[j], passed[j] = r[j], s[j] if r[j] < np.float32(1.0) else np.float32(0.0)
            _cheapest(share, passed, prices, np.float32(1.0 / weight[i, c]), places, rises[i, c])
            if len(risk):
                _risk_at_each(passed, s, r, used[i, c], at_each)
                if LOOKS_UP_WORDS:
                    _look_up(at_each, places, risk[i, c])
                else:
                    of_rung = risk[i, c]
                    for k in range(N_RUNGS):
                        of_rung[k] = at_each[places[k]]


@numba.njit(inline="always")
def _risk_at_each(passed: Any, s: Any, r: Any, used: float, out: Any) -> None:
    """Write the risk where each threshold, and the limit, is reserved: that of such a rung by ``own_price.risk_of``."""
    last, equal = len(s) - 1, False
    for j in range(N_RISES + 1):
        out[j] = np.uint16(np.float64(passed[j]) * UNIT + 0.5)
    for j in range(last):
        equal |= r[j] == r[j + 1]
    if equal:  # of equal thresholds the last one counts
        for j in range(last - 1, -1, -1):
            if r[j] == r[j + 1]:
                out[j] = out[j + 1]
    if not used > r[0]:
        return
    j = 0
    while j <= last and np.float64(r[j]) <= used:  # a guard reserves at least what is used now
        j += 1
    lifted = 0.0
    if used < 1.0:
        lifted = np.float64(s[last])
        if j <= last:
            r0, r1 = np.float64(r[j - 1]), np.float64(r[j])
            s0, s1 = np.float64(s[j - 1]), np.float64(s[j])
            lifted = s0 + (used - r0) / (r1 - r0) * (s1 - s0)
    for k in range(j):
        if used > np.float64(r[k]):
            out[k] = np.uint16(lifted * UNIT + 0.5)
