"""Defines what a task adds to the sums of its machine: limit, usage, its past, and how its peak is distributed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from reclaim.data.core import vectors
from reclaim.data.core.jit import LENT, straight
from reclaim.data.core.vectors import bounds_of, number_above
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES

Floats = NDArray[np.float64]

RATES: Final = tuple(0.25 * 2.0**k for k in range(7))
"""Rates t of the effective bandwidths, over the cell's mean limit; each the double of the one before. A small one
describes the mean, a large one the largest that may come. Machines of a dozen tasks take those from 1 to 8; closer ones
reclaimed no more, and ones twice as far apart half a point less at 0.1 %."""
PASSED: Final = (0.2, 0.05, 0.01, 0.002, 0.0003)
"""Probabilities of the quantiles. Eleven of them, from 0.5 to 0.0001, reclaimed no more of recorded VMs; three or four
lost a point where the VMs of a machine move alike."""
PAST: Final = ("p98_48h", "p99_12h", "max_7d")
"""Features of a task's resource that say how large its usage was over a long time. Where a load returns that the last
day did not have, their sums know more of the day ahead than the curves (``benchmarks/LOG.md``, 2026-11-29)."""
TERMS: Final = (
    "limit", "usage", "mean", "newcomers", "squares", "held", *PAST,
    *(f"passed{p:g}" for p in PASSED), *(f"bandwidth{rate:g}" for rate in RATES),
)  # fmt: skip
"""Names of the terms of a task, in the unit of the limit, or its square.

``usage`` is up to the limit; ``mean`` that of its peak X within the horizon by its survival curve, where X lies in the
middle between two thresholds, at the first one, or at the limit; ``passed…`` the amount that X passes with that
probability, straight between the thresholds and from 0 to the first: those of tasks that peak at the same time add up.
``bandwidth…`` is ``log(E[exp(t X)]) / t`` (Kelly, "Notes on effective bandwidths", 1996): from the mean to the limit as
t rises, and it adds up where peaks are independent; it is right to two millionths of the mean limit and of the task's
own, but never more than 85 / t below the limit of the task, which reserves too much if anything. ``newcomers`` is the
limit of a task seen for less than ``NEWCOMER_WINDOWS``; ``squares`` the square of the limit, by which one large task
differs from many small ones; those of ``PAST`` are up to the limit. A task without a forecast has ``held`` alone: its
limit.
"""
N_TERMS: Final = len(TERMS)
(T_LIMIT, T_USAGE, T_MEAN, T_NEW, T_SQUARES, T_HELD, T_PAST) = range(7)
T_PASSED: Final = T_PAST + len(PAST)
T_BAND: Final = N_TERMS - len(RATES)
N_SHARES: Final = 2 + len(PAST) + len(PASSED) + len(RATES)
"""Numbers that are kept of a task, in place of its terms: ``shares_of``."""
(S_MEAN, S_NEW, S_PAST) = range(3)
S_PASSED: Final = S_PAST + len(PAST)
S_BAND: Final = N_SHARES - len(RATES)
_PADDED: Final = 3 * vectors.LANES
"""Places of a curve that are computed at once: the thresholds' (``survival.N_THRESHOLDS``), the limit, and zeros."""
_BOUNDS: Final = bounds_of(np.array(PASSED))
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
NEWCOMER_WINDOWS: Final = 12
"""Windows, of five minutes mostly, from which on a task is no newcomer: an hour."""


def shares_of(
    survival: NDArray[np.float32],
    thresholds: NDArray[np.float32],
    usage: Floats,
    limit: Floats,
    seen: NDArray[np.int64],
    past: NDArray[np.float32],
    mean_limit: tuple[float, ...],
    horizon: int = 0,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Return the shares of a task's terms from its curve, over its limit; float32, shape (n, n_resources, N_SHARES).

    Together with usage and limit, they give the terms to the bit: mean, whether it is a newcomer, its
    past, what is passed, and bandwidths. The mean is NaN where the limit, the usage or the curve is unknown.

    Parameters
    ----------
    survival : float32, shape (n, n_targets, n_horizons, n_thresholds)
    thresholds : float32, shape (n, n_targets, n_thresholds)
        Curves of the peak, over the limit (``estimators.base.Forecast``), of which the first targets are those of the
        resources; NaN where nothing is forecast.
    usage, limit : float64, shape (n, n_resources)
        Demand of the last window, and the limit.
    seen : int64, shape (n,)
        Windows seen of the task.
    past : float32, shape (n, n_resources, len(PAST))
        Features over the limit; one that is unknown counts as the limit.
    mean_limit : tuple of float, in the order ``schema.RESOURCES``
        Of the cell's tasks, which the rates are over; positive.
    horizon : int
        Place of the horizon on its axis.
    out : float32, zeros of the result's shape, or None
        Written and returned where it is given.
    """
    if survival.shape[3] >= _PADDED:
        raise ConfigError(f"expected fewer than {_PADDED} thresholds, got {survival.shape[3]}")
    out = np.zeros((*limit.shape, N_SHARES), np.float32) if out is None else out
    room = np.zeros((2, _PADDED), np.float32)
    rate = RATES[0] / np.array(mean_limit)
    # all in C order, as a single row is, so that no call compiles another kernel
    arrays = (np.ascontiguousarray(array) for array in (survival, thresholds, usage, limit, seen, past))
    _shares(*arrays, rate, horizon, _BOUNDS, room, np.empty(len(RATES), np.float32), out)
    return out


def unknown_shares(n: int) -> NDArray[np.float32]:
    """Return the shares of ``n`` tasks without a forecast."""
    return np.full((n, len(RESOURCES), N_SHARES), np.nan, np.float32)


def terms_of(shares: NDArray[np.float32], usage: Floats, limit: Floats) -> Floats:
    """Return the terms of tasks; float64, shape (n, n_resources, N_TERMS).

    A task of unknown limit adds nothing, one of unknown usage its limit.

    Parameters
    ----------
    shares : float32, shape (n, n_resources, N_SHARES)
    usage, limit : float64, shape (n, n_resources)
        Those that the shares are of.
    """
    out = np.empty((*limit.shape, N_TERMS))
    _terms(*map(np.ascontiguousarray, (shares, usage, limit)), out)
    return out


@vectors.in_llvm
def _moments(_: Any, share: Any, place: Any, t: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
    """Write ``sum(share * exp(2**j * t * (place - 1)))`` for j from 0; share and place of ``_PADDED`` float32.

    One exponential and a square for each further rate, in vectors: ten times as many calls of ``exp`` took three times
    as long. In a fixed order, to the same bits everywhere.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        of, at, to = vectors.arrays(context, builder, signature, args)
        (n,) = vectors.shape_of(builder, of)
        rate, parts = vectors.spread(builder, args[2]), [n.type(k) for k in range(0, _PADDED, vectors.LANES)]
        shares = [vectors.load(builder, of.data, part) for part in parts]
        below = [builder.fsub(vectors.load(builder, at.data, part), vectors.constant(1.0)) for part in parts]
        powers = [vectors.exponential(builder, builder.fmul(rate, x)) for x in below]
        for j in range(len(RATES)):
            total = vectors.constant(0.0)
            for weight, power in zip(shares, powers, strict=True):
                total = vectors.fma(builder, weight, power, total)
            for width in (8, 4, 2, 1):
                other = vectors.lanes(builder, total, [(k + width) % vectors.LANES for k in range(vectors.LANES)])
                total = builder.fadd(total, other)
            first = builder.extract_element(total, n.type(0))
            builder.store(first, builder.gep(to.data, [n.type(j)]))
            powers = [builder.fmul(power, power) for power in powers]
        return context.get_dummy_value()

    return types.void(share, place, t, out), generate


@numba.njit(**LENT)
def _shares(
    survival: Any,  # (n, n_targets, n_horizons, J) float32
    thresholds: Any,  # (n, n_targets, J) float32
    usage: Any,  # (n, R) float64
    limit: Any,  # (n, R) float64
    seen: Any,  # (n,) int64
    past: Any,  # (n, R, n_past) float32
    rate: Any,  # (R,) float64
    horizon: int,
    bounds: Any,  # (n_passed,) float32, those of ``PASSED``
    room: Any,  # (2, _PADDED) float32, zeros behind J
    moments: Any,  # (n_rates,) float32, changed
    out: Any,  # (n, R, N_SHARES) float32, zeros, written
) -> None:
    """Write the shares: the peak lies in the middle between two thresholds, or at the first, or at the limit."""
    share, place = room[0], room[1]
    last = survival.shape[3]
    for i in range(len(out)):
        for r in range(out.shape[1]):
            to, most, s, at = out[i, r], limit[i, r], survival[i, r, horizon], thresholds[i, r]
            if not most > 0 or np.isnan(s[0]) or np.isnan(usage[i, r]):
                to[S_MEAN] = np.nan
                continue
            share[0], place[0] = _ONE - s[0], at[0]
            for k in range(1, last):
                share[k], place[k] = s[k - 1] - s[k], (at[k - 1] + at[k]) * _HALF
            share[last], place[last] = s[last - 1], _ONE
            for j in range(len(PASSED)):
                k = number_above(s, bounds[j])
                amount = 1.0
                if k < last:
                    s0, r0 = (np.float64(s[k - 1]), np.float64(at[k - 1])) if k > 0 else (1.0, 0.0)
                    amount = min(straight(PASSED[j], s0, r0, np.float64(s[k]), np.float64(at[k])), np.float64(at[k]))
                to[S_PASSED + j] = amount
            mean = 0.0
            for k in range(last + 1):
                mean += np.float64(share[k]) * place[k]
            to[S_MEAN], to[S_NEW] = mean, seen[i] < NEWCOMER_WINDOWS
            for j in range(len(PAST)):
                to[S_PAST + j] = past[i, r, j] if past[i, r, j] < _ONE else _ONE
            t = rate[r] * most
            _moments(share, place, np.float32(t), moments)
            for j in range(len(moments)):
                to[S_BAND + j] = 1.0 + math.log(max(np.float64(moments[j]), 1e-37)) / t
                t *= 2.0


@numba.njit(**LENT)
def write_terms(
    share: Any,  # (N_SHARES,) float32
    usage: float,
    limit: float,
    out: Any,  # (N_TERMS,) float64, written
) -> None:
    """Write the terms of one task and resource."""
    out[:] = 0.0
    if not limit > 0:
        return
    if np.isnan(share[S_MEAN]):
        out[T_HELD] = limit
        return
    out[T_LIMIT], out[T_USAGE], out[T_SQUARES] = limit, min(usage, limit), limit * limit
    out[T_MEAN], out[T_NEW] = share[S_MEAN] * limit, share[S_NEW] * limit
    for j in range(N_TERMS - T_PAST):
        out[T_PAST + j] = share[S_PAST + j] * limit


@numba.njit(**LENT)
def _terms(
    shares: Any,  # (n, R, N_SHARES) float32
    usage: Any,  # (n, R) float64
    limit: Any,  # (n, R) float64
    out: Any,  # (n, R, N_TERMS) float64, written
) -> None:
    for i in range(len(out)):
        for r in range(out.shape[1]):
            write_terms(shares[i, r], usage[i, r], limit[i, r], out[i, r])
