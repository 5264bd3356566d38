"""Foresees the peak of a set of tasks from the sums of their terms: the probability of any amount, and its inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Self

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.training.machines.terms import (
    N_TERMS,
    RATES,
    T_BAND,
    T_HELD,
    T_LIMIT,
    T_MEAN,
    T_NEW,
    T_SQUARES,
    T_USAGE,
)

Floats = NDArray[np.float64]

INPUTS: Final = ("limit", "usage", "mean", "newcomers", "size", *(f"bandwidth{rate:g}" for rate in RATES))
"""Sums that a fitted location is linear in, over the sum of limits; ``size`` is the root of ``squares``."""
N_INPUTS: Final = len(INPUTS)
EXCEEDED: Final = tuple(float(f"{p:.3g}") for p in np.geomspace(0.5, 1e-4, 38))
"""Probabilities at which a curve is kept, falling."""
_FLOOR: Final = 0.01
"""Least location, as a share of the limits, that a margin is a share of."""


@dataclass(frozen=True)
class MachineCurve:
    """Distribution of the peak within the horizon of a set of tasks, one resource, by the sums of their terms.

    Without weights it is Chernoff's bound over independent tasks: with ``B_t`` the sum of their effective bandwidths at
    rate t, an amount r has the exponent ``max over t of t * (r - B_t)``, and at an exponent the least amount is ``min
    over t of B_t + exponent / t``. The bound says that r is passed with probability exp(-exponent). The tasks of a
    machine do not peak at the same time, and are not independent; so the exponents at ``EXCEEDED`` are of peaks seen.

    With weights the amount is ``location * (1 + margin)``, the location linear in ``INPUTS``.

    Attributes
    ----------
    margins : tuple of float
        Exponents, or margins, at ``EXCEEDED``; rising.
    weights : tuple of float, in the order ``INPUTS``, or None
    """

    margins: tuple[float, ...] = tuple(-math.log(p) for p in EXCEEDED)
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and not (len(self.weights) == N_INPUTS and all(map(math.isfinite, self.weights))):
            raise ConfigError(f"expected {N_INPUTS} weights, all finite, got {self.weights}")
        rising = all(a <= b for a, b in pairwise(self.margins))
        if len(self.margins) != len(EXCEEDED) or not all(map(math.isfinite, self.margins)) or not rising:
            raise ConfigError(f"expected {len(EXCEEDED)} margins, finite and rising, got {self.margins}")

    def margin(self, probability: float) -> float:
        """Return the margin of an amount that is passed with a probability; by its logarithm between ``EXCEEDED``."""
        if not 0 < probability < 1:
            raise ConfigError(f"a budget of machine peaks must be above 0 and below 1, got {probability}")
        return float(np.interp(-math.log(probability), -np.log(EXCEEDED), self.margins))

    def peak(self, sums: Floats, margin: float | Floats, mean_limit: float) -> Floats:
        """Return what is reserved for sets at a margin; shape (n, N_TERMS) to (n,), in the unit of the limits.

        At least what they use now, at most their limits; of tasks without a forecast the limit.

        Parameters
        ----------
        sums : float64, shape (n, N_TERMS)
        margin : float, or float64, shape (n,)
        mean_limit : float
            Of the cell's tasks, as for ``terms_of``.
        """
        out = np.empty(len(sums))
        each = np.ascontiguousarray(np.broadcast_to(np.asarray(margin, np.float64), out.shape))
        _peaks(sums, each, self._weights, RATES[0] / mean_limit, out)
        return out

    def score(self, sums: Floats, amount: Floats, mean_limit: float) -> Floats:
        """Return the margin at which an amount, shape (n,), is reserved for each set, before the guards; shape (n,)."""
        out = np.empty(len(sums))
        _scores(sums, np.ascontiguousarray(amount, np.float64), self._weights, RATES[0] / mean_limit, out)
        return out

    def exceedance(self, sums: Floats, amount: Floats, mean_limit: float) -> Floats:
        """Return the probability that the peak of each set passes an amount, shape (n,); 0 from the limits on."""
        log = np.interp(self.score(sums, amount, mean_limit), self.margins, -np.log(EXCEEDED))
        return np.where(amount >= sums[:, T_LIMIT] + sums[:, T_HELD], 0.0, np.exp(-log))

    def with_margins(self, scores: Floats) -> Self:
        """Return the same curve with the margins of scores of peaks seen, shape (n,), n at least 1.

        Of ``n`` peaks ``floor(p * n)`` may pass what is reserved at p.
        """
        falling = np.sort(scores)[::-1]
        allowed = [min(int(p * len(falling) * (1 + 1e-12)), len(falling) - 1) for p in EXCEEDED]
        return replace(self, margins=tuple(float(falling[k]) for k in allowed))

    @property
    def _weights(self) -> Floats:
        return np.array(self.weights or (), np.float64)


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
    return math.sqrt(s[T_SQUARES]) if k == 4 else s[T_BAND + k - 5]


@numba.njit(**LENT)
def _inputs(sums: Any, out: Any) -> None:
    for i in range(len(sums)):
        limit = sums[i, T_LIMIT]
        for k in range(out.shape[1]):
            out[i, k] = _input(sums[i], k) / limit if limit > 0 else 0.0


@numba.njit(inline="always")
def _location(s: Any, weights: Any) -> Any:
    total = 0.0
    for k in range(len(weights)):
        total += weights[k] * _input(s, k)
    return max(total, _FLOOR * s[T_LIMIT])


@numba.njit(**LENT)
def _peaks(sums: Any, margin: Any, weights: Any, rate: float, out: Any) -> None:
    for i in range(len(sums)):
        s = sums[i]
        if len(weights):
            peak = _location(s, weights) * (1.0 + margin[i])
        else:
            peak, t = math.inf, rate
            for j in range(T_BAND, sums.shape[1]):
                peak = min(peak, s[j] + margin[i] / t)
                t *= 2.0
        out[i] = s[T_HELD] + min(max(peak, s[T_USAGE]), s[T_LIMIT])


@numba.njit(**LENT)
def _scores(sums: Any, amount: Any, weights: Any, rate: float, out: Any) -> None:
    for i in range(len(sums)):
        s = sums[i]
        wanted = amount[i] - s[T_HELD]
        if len(weights):
            place = _location(s, weights)
            out[i] = wanted / place - 1.0 if place > 0 else 0.0
        else:
            score, t = -math.inf, rate
            for j in range(T_BAND, sums.shape[1]):
                score = max(score, t * (wanted - s[j]))
                t *= 2.0
            out[i] = score


assert T_BAND + len(RATES) == N_TERMS
