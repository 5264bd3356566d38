"""Defines what a task adds to the sums of its machine: limit, usage, and its effective bandwidths."""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT

Floats = NDArray[np.float64]

RATES: Final = tuple(0.25 * 2.0**k for k in range(7))
"""Rates t of the effective bandwidths, over the cell's mean limit; each the double of the one before. A small one tells
of the mean, a large one of the largest that may come. Machines of a dozen tasks take those from 1 to 8; closer ones
reclaimed no more, and ones twice as far apart half a point less at 0.1 %."""
TERMS: Final = ("limit", "usage", "mean", "newcomers", "squares", "held", *(f"bandwidth{rate:g}" for rate in RATES))
"""Names of the terms of a task, in the unit of the limit, or its square.

``usage`` is up to the limit; ``mean`` that of its peak X within the horizon by its survival curve; ``bandwidth…`` is
``log(E[exp(t X)]) / t`` (Kelly, "Notes on effective bandwidths", 1996): from the mean to the limit as t rises, and it
adds up where peaks are independent; ``newcomers`` is the limit of a task seen for less than ``NEWCOMER_WINDOWS``;
``squares`` the square of the limit, by which one large task differs from many small ones. A task without a forecast has
``held`` alone: its limit.
"""
N_TERMS: Final = len(TERMS)
(T_LIMIT, T_USAGE, T_MEAN, T_NEW, T_SQUARES, T_HELD, T_BAND) = range(N_TERMS - len(RATES) + 1)
NEWCOMER_WINDOWS: Final = 12
"""Windows, of five minutes mostly, from which on a task is no newcomer: an hour."""


def terms_of(
    survival: NDArray[np.float32],
    thresholds: NDArray[np.float32],
    usage: Floats,
    limit: Floats,
    seen: NDArray[np.int64],
    mean_limit: tuple[float, ...],
) -> Floats:
    """Return the terms of tasks; shape (n, n_resources, N_TERMS).

    Parameters
    ----------
    survival, thresholds : float32, shape (n, n_resources, n_thresholds)
        Curve of the peak within the horizon, over the limit (``estimators.base.Forecast``); NaN where nothing is
        forecast.
    usage, limit : float64, shape (n, n_resources)
        Demand of the last window, and the limit. A task of unknown limit adds nothing, one of unknown usage its limit.
    seen : int64, shape (n,)
        Windows seen of the task.
    mean_limit : tuple of float, in the order ``schema.RESOURCES``
        Of the cell's tasks, which the rates are over; positive.
    """
    out = np.zeros((*limit.shape, N_TERMS))
    room = np.empty((2, survival.shape[2] + 1))
    _terms(survival, thresholds, usage, limit, seen, RATES[0] / np.array(mean_limit), room, out)
    return out


@numba.njit(**LENT)
def _terms(survival: Any, thresholds: Any, usage: Any, limit: Any, seen: Any, rate: Any, room: Any, out: Any) -> None:
    """Write the terms: the peak lies in the middle between two thresholds, or at the first, or at the limit."""
    share, power = room[0], room[1]
    last = survival.shape[2]
    for i in range(len(out)):
        for r in range(out.shape[1]):
            term, most, s, at = out[i, r], limit[i, r], survival[i, r], thresholds[i, r]
            if not most > 0:
                continue
            if np.isnan(s[0]) or np.isnan(usage[i, r]):
                term[T_HELD] = most
                continue
            t, mean = rate[r] * most, 0.0
            for k in range(last + 1):
                before = 1.0 if k == 0 else np.float64(s[k - 1])
                share[k] = before - (0.0 if k == last else np.float64(s[k]))
                place = 1.0 if k == last else np.float64(at[0]) if k == 0 else (at[k - 1] + at[k]) / 2.0
                mean += share[k] * place
                power[k] = math.exp(t * (place - 1.0))  # of the limit at most, so that none overflows
            term[T_LIMIT], term[T_USAGE], term[T_MEAN] = most, min(usage[i, r], most), mean * most
            term[T_NEW] = most if seen[i] < NEWCOMER_WINDOWS else 0.0
            term[T_SQUARES] = most * most
            for j in range(T_BAND, out.shape[2]):
                total = 0.0
                for k in range(last + 1):
                    total += share[k] * power[k]
                    power[k] *= power[k]
                term[j] = most + math.log(max(total, 1e-300)) / t * most
                t *= 2.0
