"""Predicts the peak of a set of tasks from the sums of their terms: the probability of any amount, and its inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Self

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT, straight
from reclaim.data.errors import ConfigError
from reclaim.training.machines.terms import (
    PASSED,
    PAST,
    RATES,
    T_BAND,
    T_HELD,
    T_LIMIT,
    T_MEAN,
    T_NEW,
    T_PASSED,
    T_PAST,
    T_SQUARES,
    T_USAGE,
)

Floats = NDArray[np.float64]

INPUTS: Final = ("limit", "usage", "mean", "newcomers", "size", *PAST, *(f"bandwidth{rate:g}" for rate in RATES))
"""Sums that a fitted location is linear in, over the sum of limits; ``size`` is the root of ``squares``."""
N_INPUTS: Final = len(INPUTS)
EXCEEDED: Final = tuple(
    float(f"{p:.3g}") for p in (*np.geomspace(0.5, 0.01, 17, endpoint=False), *np.geomspace(0.01, 1e-4, 21))
)
"""Probabilities at which a curve is kept, falling, ten to each decade. The default budgets of ``margins.margin`` are
among them: between two the margin is on a straight line, and more peaks seen may pass than the probability allows."""
_TAIL: Final = -math.log(EXCEEDED[-1])
"""Exponent of the bound that the spread of a set reaches to: that of the smallest probability kept."""
COMPILED: Final = np.dtype([("rate", "f8"), ("together", "f8"), ("fitted", "?"), ("weights", "f8", (N_INPUTS,))])
"""A curve without its margins, for compiled code: first rate, share of peaks together, and the weights of a fit."""
_CERTAIN: Final = 1e-8
"""Probability at which tasks that peak together are assumed to exceed their limits: beyond the last of ``PASSED``."""
_EXPONENTS: Final = -np.log(np.array([1.0, *PASSED, _CERTAIN]))


@dataclass(frozen=True)
class MachineCurve:
    """Distribution of the peak within the horizon of a set of tasks, one resource, by the sums of their terms.

    Without weights an amount lies between two bounds, a share ``together`` of the way from the first to the second. The
    first is Chernoff's for independent tasks: with ``B_t`` the sum of their effective bandwidths at rate t, at an
    exponent the amount is ``min over t of B_t + exponent / t``. The second is of tasks that peak at the same time: the
    sum of what each passes with probability exp(-exponent), straight between ``PASSED``, and of their limits at a
    probability of 1e-8. Either means that the amount is exceeded with that probability. The tasks of a machine do
    neither; so the exponents at ``EXCEEDED`` are of peaks seen.

    With weights the amount is ``location + margin * spread``, the location linear in ``INPUTS``. The spread is the
    first bound at the last of ``EXCEEDED``, less the sum of the means of the tasks. A margin that is a share of the
    location adds as much where little is uncertain (``benchmarks/LOG.md``, 2026-11-27).

    Attributes
    ----------
    margins : tuple of float
        Exponents, or margins, at ``EXCEEDED``; rising.
    weights : tuple of float, in the order ``INPUTS``, or None
    together : float
        From 0, independent tasks, to 1, tasks that peak at the same time; 0 with weights.
    """

    margins: tuple[float, ...] = tuple(-math.log(p) for p in EXCEEDED)
    weights: tuple[float, ...] | None = None
    together: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.together <= (1 if self.weights is None else 0):
            raise ConfigError(f"expected a share from 0 to 1 of peaks together, 0 with weights, got {self.together}")
        if self.weights is not None and not (len(self.weights) == N_INPUTS and all(map(math.isfinite, self.weights))):
            raise ConfigError(f"expected {N_INPUTS} weights, all finite, got {self.weights}")
        rising = all(a <= b for a, b in pairwise(self.margins))
        if len(self.margins) != len(EXCEEDED) or not all(map(math.isfinite, self.margins)) or not rising:
            raise ConfigError(f"expected {len(EXCEEDED)} margins, finite and rising, got {self.margins}")

    def margin(self, probability: float) -> float:
        """Return the margin of an amount that is exceeded with a probability; by its logarithm between ``EXCEEDED``."""
        if not 0 < probability < 1:
            raise ConfigError(f"a budget of machine peaks must be above 0 and below 1, got {probability}")
        return float(np.interp(-math.log(probability), -np.log(EXCEEDED), self.margins))

    def peak(self, sums: Floats, margin: float | Floats, mean_limit: float) -> Floats:
        """Return what is reserved for sets at a margin; shape (n, N_TERMS) to (n,), in the unit of the limits.

        At least their current usage, at most their limits; for tasks without a forecast the limit.

        Parameters
        ----------
        sums : float64, shape (n, N_TERMS)
        margin : float, or float64, shape (n,)
        mean_limit : float
            Of the cell's tasks, as for ``terms_of``.
        """
        out = np.empty(len(sums))
        each = np.ascontiguousarray(np.broadcast_to(np.asarray(margin, np.float64), out.shape))
        _peaks(sums, each, self.compiled(mean_limit)[0], out)
        return out

    def score(self, sums: Floats, amount: Floats, mean_limit: float) -> Floats:
        """Return the margin at which an amount, shape (n,), is reserved for each set, before the guards; shape (n,)."""
        out = np.empty(len(sums))
        _scores(sums, np.ascontiguousarray(amount, np.float64), self.compiled(mean_limit)[0], out)
        return out

    def with_margins(self, scores: Floats) -> Self:
        """Return the same curve with the margins of scores of peaks seen, shape (n,), n at least 1.

        Of ``n`` peaks ``floor(p * n)`` may pass what is reserved at a p of ``EXCEEDED``; between two of these, as many
        as at the larger one.
        """
        return replace(self, margins=tuple(margin_of(scores, p) for p in EXCEEDED))

    def compiled(self, mean_limit: float) -> NDArray[np.void]:
        """Return what ``reserve`` takes, of ``COMPILED``; shape (1,)."""
        made = np.zeros(1, COMPILED)
        made["rate"], made["fitted"] = RATES[0] / mean_limit, self.weights is not None
        made["weights"], made["together"] = self.weights or 0.0, self.together
        return made


def margin_of(scores: Floats, probability: float) -> float:
    """Return the least score of peaks seen, shape (n,), n at least 1, with no more than that share of them above it.

    Of ``n`` peaks ``floor(probability * n)`` may pass what is reserved.
    """
    allowed = min(int(probability * len(scores) * (1 + 1e-12)), len(scores) - 1)
    return float(np.sort(scores)[::-1][allowed])


def inputs_of(sums: Floats) -> Floats:
    """Return the inputs of sets over their limits; shape (n, N_TERMS) to (n, N_INPUTS)."""
    out = np.empty((len(sums), N_INPUTS))
    _inputs(sums, out)
    return out


@numba.njit(inline="always")
def _input(s: Any, k: int) -> Any:
    """Return the k-th input of one set, in the unit of the limits."""
    if k == 0:
        return s[T_LIMIT]
    if k == 1:
        return s[T_USAGE]
    if k == 2:
        return s[T_MEAN]
    if k == 3:
        return s[T_NEW]
    if k == 4:
        return math.sqrt(s[T_SQUARES])
    return s[T_PAST + k - 5] if k < 5 + len(PAST) else s[T_BAND + k - 5 - len(PAST)]


@numba.njit(**LENT)
def _inputs(sums: Any, out: Any) -> None:
    for i in range(len(sums)):
        limit = sums[i, T_LIMIT]
        for k in range(out.shape[1]):
            out[i, k] = _input(sums[i], k) / limit if limit > 0 else 0.0


@numba.njit(inline="always")
def _location(s: Any, of: Any) -> Any:
    total = 0.0
    for k in range(len(of.weights)):
        total += of.weights[k] * _input(s, k)
    return total


@numba.njit(inline="always")
def _independent(s: Any, exponent: float, of: Any) -> Any:
    """Return Chernoff's bound of independent tasks."""
    amount, t = math.inf, of.rate
    for j in range(T_BAND, len(s)):
        amount = min(amount, s[j] + exponent / t)
        t *= 2.0
    return amount


@numba.njit(inline="always")
def _spread(s: Any, of: Any) -> Any:
    return _independent(s, _TAIL, of) - s[T_MEAN]


@numba.njit(inline="always")
def reserve(s: Any, margin: float, of: Any) -> Any:
    """Return what is reserved for one set at a margin: the one rule of it, for kernels.

    Parameters
    ----------
    s : float64, shape (N_TERMS,)
        Its sums.
    margin : float
    of : record of COMPILED
    """
    if of.fitted:
        peak = _location(s, of) + margin * _spread(s, of)
    else:
        peak = _independent(s, margin, of)
        if of.together > 0:
            k = 1
            while k < len(_EXPONENTS) - 1 and margin > _EXPONENTS[k]:
                k += 1
            at_once = straight(margin, _EXPONENTS[k - 1], _at_once(s, k - 1), _EXPONENTS[k], _at_once(s, k))
            peak += of.together * (at_once - peak)
    return s[T_HELD] + min(max(peak, s[T_USAGE]), s[T_LIMIT])


@numba.njit(**LENT)
def _peaks(sums: Any, margin: Any, of: Any, out: Any) -> None:
    for i in range(len(sums)):
        out[i] = reserve(sums[i], margin[i], of)


@numba.njit(**LENT)
def _scores(sums: Any, amount: Any, of: Any, out: Any) -> None:
    for i in range(len(sums)):
        s = sums[i]
        wanted = amount[i] - s[T_HELD]
        if of.fitted:
            out[i] = (wanted - _location(s, of)) / _spread(s, of)
        else:
            out[i] = _exponent(s, wanted, of)


@numba.njit(inline="always")
def _at_once(s: Any, k: int) -> Any:
    """Return the sum for tasks that peak together at the k-th of ``_EXPONENTS``: nothing at the first one."""
    if k == 0:
        return 0.0
    return s[T_PASSED + k - 1] if k <= len(PASSED) else s[T_LIMIT]


@numba.njit(inline="always")
def _exponent(s: Any, wanted: float, of: Any) -> Any:
    """Return the least margin at which an amount is reserved: both bounds are straight between ``_EXPONENTS``."""
    score = -math.inf
    for k in range(1, len(_EXPONENTS)):
        e0, e1, low, high = _EXPONENTS[k - 1], _EXPONENTS[k], _at_once(s, k - 1), _at_once(s, k)
        slope = of.together * (high - low) / (e1 - e0)
        level, score, t = of.together * low - slope * e0, -math.inf, of.rate
        for j in range(T_BAND, len(s)):
            rise = (1.0 - of.together) / t + slope
            here = (wanted - (1.0 - of.together) * s[j] - level) / rise if rise > 0 else e0
            score = max(score, here)
            t *= 2.0
        if of.together == 0 or score <= e1:
            break
    return score
