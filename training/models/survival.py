"""Defines the survival curve S(r) = P(demand > r) of a task: its thresholds, and what is read off it."""

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
from reclaim.data.core.parallel import in_parts
from reclaim.data.core.vectors import LANES, bounds_of, in_llvm, number_above
from reclaim.features.registry import AT, SIGNALS
from reclaim.features.targets import TARGETS
from reclaim.training.estimators.base import Forecast

FLOOR: Final = 0.005
"""Least share of the limit that counts as used now, also where nothing is known: thresholds are even in the logarithm,
which has no zero."""
BELOW: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Thresholds below what is used now, as shares of it: a peak that has passed."""
ABOVE: Final = (0.0, 0.004, 0.008, 0.016, 0.03, 0.05, 0.08, *(0.12 + 0.84 * k / 18 for k in range(19)), 1.0)
"""Thresholds from what is used now, at 0, to ``LAST``, at 1, as shares of the way by the logarithm: close together near
current usage, where most tasks stay, and even from there on, because only thresholds are reserved."""
LAST: Final = 0.999
"""Last threshold, as a share of the limit. What exceeds it reaches the limit, where throttled CPU stays in half of the
windows of a composed cell: a threshold at the limit itself would be exceeded by none of them."""
CEILING: Final = 0.98
"""Largest share of the limit that thresholds go from."""
N_BELOW: Final = len(BELOW)
N_THRESHOLDS: Final = len(BELOW) + len(ABOVE)
NOW: Final = np.array([AT[f"{signal}_last"] for signal in SIGNALS])
"""Columns of what is used now, in the order of ``TARGETS``."""
EVER: Final = np.array([AT[f"{signal}_max_ever"] for signal in SIGNALS])
"""Columns of the statistic that is known from the first measurement on, in the order of ``TARGETS``."""
assert SIGNALS == TARGETS
Curves = Callable[[slice, NDArray[np.float32]], None]
_LEAST: Final = 1e-7
"""Least probability in a loss: curves are float32."""
TABLE: Final = np.array(
    [
        (*BELOW, 1.0, *(0.0 for _ in ABOVE[1:])),  # 1: what is used now is a threshold itself, to the bit
        (*(0.0 for _ in BELOW), *(1 - u for u in ABOVE)),
        (*(0.0 for _ in BELOW), *(u * math.log(LAST) for u in ABOVE)),
    ],
    np.float32,
)
"""Coefficients of the thresholds, a column each: row 0 times what is used now, or where that is 0, the exponential of
row 1 times its logarithm plus row 2."""
assert N_THRESHOLDS % LANES == 0


def used_now(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the share of the limit from which the thresholds of each target go; (n, n_features) to (n, n_targets)."""
    now = x[:, NOW]
    return np.clip(np.where(np.isnan(now), np.float32(FLOOR), now), np.float32(FLOOR), np.float32(CEILING))


def thresholds_of(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the thresholds of each target over the limit; float32, shape (n, n_targets, N_THRESHOLDS), rising."""
    out = np.empty((len(x), len(TARGETS), N_THRESHOLDS), np.float32)
    _thresholds(used_now(x), TABLE, out)
    return out


@in_llvm
def _rise(_: Any, used: Any, log: Any, table: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
    """Write the thresholds from what is used now and its logarithm; all are float32, the arrays C-contiguous."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        coefficients, to = vectors.arrays(context, builder, signature, args)
        integer = vectors.shape_of(builder, to)[0].type
        now, its_log = (vectors.spread(builder, value) for value in args[:2])
        for lane in range(0, N_THRESHOLDS, LANES):
            share, left, covered = (
                vectors.load(builder, coefficients.data, integer(row * N_THRESHOLDS + lane)) for row in range(3)
            )
            above = vectors.exponential(builder, builder.fadd(builder.fmul(its_log, left), covered))
            has_share = builder.fcmp_ordered(">", share, vectors.constant(0.0))
            value = builder.select(has_share, builder.fmul(now, share), above)
            builder.store(value, vectors.at(builder, to.data, integer(lane)), align=4)
        return context.get_dummy_value()

    return types.void(used, log, table, out), generate


@numba.njit(inline="always")
def rise(now: Any, table: Any, out: Any) -> None:
    """Write thresholds from what is used now, for kernels; ``table`` is ``TABLE``, ``out`` (N_THRESHOLDS,) float32."""
    _rise(now, np.float32(math.log(now)), table, out)


@numba.njit(**LENT)
def _thresholds(now: Any, table: Any, out: Any) -> None:
    for i in range(len(out)):
        for t in range(out.shape[1]):
            rise(now[i, t], table, out[i, t])


def forecast_of(
    survival: NDArray[np.float32], x: NDArray[np.float32], oom_probability: NDArray[np.float64],
    horizons_s: tuple[int, ...], levels: tuple[float, ...], threads: int = 1, curves: Curves | None = None,
) -> Forecast:  # fmt: skip
    """Return the forecast of curves, shape (n, n_targets, n_horizons, N_THRESHOLDS), with what is read off them.

    ``curves`` writes the curves and probabilities of some rows before, given their thresholds; None: they are there.
    """
    n = len(x)
    thresholds = np.empty((n, len(TARGETS), N_THRESHOLDS), np.float32)
    quantiles = np.empty((*survival.shape[:3], len(levels)), np.float32)

    def read(part: int, parts: int) -> None:
        rows = slice(n * part // parts, n * (part + 1) // parts)
        _thresholds(used_now(x[rows]), TABLE, thresholds[rows])
        if curves is not None:
            curves(rows, thresholds[rows])
        quantiles_of(survival[rows], thresholds[rows], levels, quantiles[rows])

    in_parts(read, n, threads)
    return Forecast(survival, thresholds, quantiles, oom_probability, horizons_s)


def clear_unmeasured(forecast: Forecast, x: NDArray[np.float32]) -> None:
    """Remove, in place, the curves of targets that were never measured of a task: no model learned from such rows."""
    never = np.isnan(x[:, EVER])
    if never.any():
        forecast.survival[never], forecast.quantiles[never] = np.nan, np.nan


def quantiles_of(
    survival: NDArray[np.float32], thresholds: NDArray[np.float32], levels: tuple[float, ...],
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:  # fmt: skip
    """Return quantiles over the limit, straight between two thresholds; a demand above the limit counts as the limit.

    Parameters
    ----------
    survival : float32, shape (n, n_targets, n_horizons, N_THRESHOLDS)
    thresholds : float32, shape (n, n_targets, N_THRESHOLDS)
    levels : tuple of float
        Rising.
    out : float32, shape (n, n_targets, n_horizons, n_levels), or None
        Where they are written.

    Returns
    -------
    float32, shape (n, n_targets, n_horizons, n_levels), rising; NaN where the curve is.
    """
    out = np.empty((*survival.shape[:3], len(levels)), np.float32) if out is None else out
    above = 1.0 - np.array(levels)
    _quantiles(survival, thresholds, above, bounds_of(above), out)
    return out


@numba.njit(**LENT)
def _quantiles(survival: Any, thresholds: Any, above: Any, bounds: Any, out: Any) -> None:
    for i in range(len(out)):
        for t in range(out.shape[1]):
            r = thresholds[i, t]
            for h in range(out.shape[2]):
                s = survival[i, t, h]
                for q in range(len(above)):
                    k = number_above(s, bounds[q])
                    if np.isnan(s[0]):
                        out[i, t, h, q] = math.nan
                    elif k == len(s):
                        out[i, t, h, q] = 1.0
                    else:
                        s0, r0 = (np.float64(s[k - 1]), np.float64(r[k - 1])) if k > 0 else (1.0, 0.0)
                        s1, r1 = np.float64(s[k]), np.float64(r[k])
                        out[i, t, h, q] = min(straight(above[q], s0, r0, s1, r1), r1)


def exceedance(
    survival: NDArray[np.float32], thresholds: NDArray[np.float32], share: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the probability that the demand exceeds a share of the limit, straight between two thresholds.

    Parameters
    ----------
    survival, thresholds : float32, shape (n, N_THRESHOLDS)
    share : float64, shape (n,)
        From ``LAST`` on the answer is the probability of a demand above it: at the limit, that it is reached.
    """
    out = np.empty(len(share))
    _exceed(survival, thresholds, np.ascontiguousarray(share, np.float64), out)
    return out


@numba.njit(**LENT)
def _exceed(survival: Any, thresholds: Any, share: Any, out: Any) -> None:
    for i in range(len(out)):
        s, r = survival[i], thresholds[i]
        k = 0
        while k < len(r) and r[k] <= share[i]:
            k += 1
        if np.isnan(s[0]) or np.isnan(share[i]):
            out[i] = math.nan
        elif k == len(r):
            out[i] = s[len(r) - 1]
        else:
            s0, r0 = (np.float64(s[k - 1]), np.float64(r[k - 1])) if k > 0 else (1.0, 0.0)
            out[i] = straight(share[i], r0, s0, r[k], s[k])


def log_loss(
    survival: NDArray[np.float32], thresholds: NDArray[np.float32], y: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Return the negative logarithm of the probability that each demand lies between the thresholds where it does.

    It is what ``network.survival_loss`` averages, read off the curve: the loss that models of the same thresholds are
    fitted and compared by. For shapes see ``quantiles_of``; ``y`` (n, n_targets, n_horizons) is over the limit, and the
    result NaN where it or the curve is.
    """
    out = np.empty(y.shape)
    _log_loss(survival, thresholds, y, out)
    return out


@numba.njit(**LENT)
def _log_loss(survival: Any, thresholds: Any, y: Any, out: Any) -> None:
    for i in range(len(out)):
        for t in range(out.shape[1]):
            r = thresholds[i, t]
            for h in range(out.shape[2]):
                s, demand = survival[i, t, h], y[i, t, h]
                if np.isnan(s[0]) or np.isnan(demand):
                    out[i, t, h] = math.nan
                    continue
                k = 0
                while k < len(r) and demand > r[k]:
                    k += 1
                above = np.float64(s[k - 1]) if k > 0 else 1.0
                below = np.float64(s[k]) if k < len(r) else 0.0
                out[i, t, h] = -math.log(max(above - below, _LEAST))


def crps(survival: NDArray[np.float32], thresholds: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the continuous ranked probability score of each demand, in shares of the limit; arguments as ``log_loss``.

    The integral over r, up to the last threshold, of the squared difference between S(r) and the outcome: 1 below the
    demand and 0 from it on. It compares curves of other thresholds, too, which the likelihood does not. A demand above
    the limit counts as the limit (Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation",
    2007).
    """
    out = np.empty(y.shape)
    _crps(survival, thresholds, y, out)
    return out


@numba.njit(**LENT)
def _crps(survival: Any, thresholds: Any, y: Any, out: Any) -> None:
    for i in range(len(out)):
        for t in range(out.shape[1]):
            for h in range(out.shape[2]):
                s, r, demand = survival[i, t, h], thresholds[i, t], min(np.float64(y[i, t, h]), 1.0)
                if np.isnan(s[0]) or np.isnan(demand):
                    out[i, t, h] = math.nan
                    continue
                total, r0, s0 = 0.0, 0.0, 1.0
                for k in range(len(r)):
                    r1, s1 = np.float64(r[k]), np.float64(s[k])
                    if r0 < demand < r1:
                        middle = straight(demand, r0, s0, r1, s1)
                        total += (demand - r0) * _squares(1 - s0, 1 - middle) + (r1 - demand) * _squares(middle, s1)
                    elif r1 <= demand:
                        total += (r1 - r0) * _squares(1 - s0, 1 - s1)
                    else:
                        total += (r1 - r0) * _squares(s0, s1)
                    r0, s0 = r1, s1
                out[i, t, h] = total


@numba.njit(inline="always")
def _squares(a: float, b: float) -> Any:
    """Return the mean square of a line from a to b."""
    return (a * a + a * b + b * b) / 3
