"""Resamples whole units with replacement, and takes intervals from the resamples.

Tasks of one collection behave alike, so the unit is the collection, or a machine: resampled rows or tasks would make
intervals too narrow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from reclaim.replay.settings import ComparisonConfig

_DRAWN_AT_ONCE: Final = 2_000_000
"""Numbers drawn at once: 16 MB of weights."""
FEWEST: Final = 2
"""Fewest units of an interval: every resample of a single one is the same."""
FEW: Final = 10
"""Of fewer units than these an interval is too narrow: of 9 normal ones, one of 95 % holds the truth in 90 %."""

LEAST_KNOWN: Final = 0.9
"""Least share of the resamples that must have a value: otherwise the interval would describe a selection."""


@dataclass(frozen=True)
class Bootstrap:
    """Number of resamples, seed of their generator, and share of them within an interval."""

    draws: int
    seed: int
    confidence: float

    @classmethod
    def of(cls, config: ComparisonConfig) -> Self:
        """Return the bootstrap of the settings."""
        return cls(config.draws, config.seed, config.confidence)

    def sums(self, unit_sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sums over all units, then over each resample; from shape (n_units, k) to (1 + draws, k)."""
        return np.vstack([unit_sums.sum(axis=0), resampled_sums(unit_sums, draws=self.draws, seed=self.seed)])

    def interval(self, values: NDArray[np.float64]) -> dict[str, float | None]:
        """Return the first of ``1 + draws`` values with the interval of the others, for ``results.json``.

        Resamples in which the value is unknown do not count: the interval is conditional on knowing it.
        """
        return reported(values[0], *bounds(values[1:], self.confidence))


def resampled_sums(unit_sums: NDArray[np.float64], *, draws: int, seed: int) -> NDArray[np.float64]:
    """Return the sums over as many units drawn with replacement, in each draw; from (n_units, k) to (draws, k).

    Draws follow from the number of units, ``draws`` and ``seed`` alone, so different sums of the same units are
    resampled alike. NaN where fewer than ``FEWEST`` units hold anything but zeros.
    """
    n_units = len(unit_sums)
    if np.count_nonzero(unit_sums.any(axis=1)) < FEWEST:
        return np.full((draws, unit_sums.shape[1]), np.nan)
    out = np.zeros((draws, unit_sums.shape[1]))
    rng = np.random.default_rng(seed)
    at_once = max(1, _DRAWN_AT_ONCE // n_units)
    for start in range(0, draws, at_once):
        weights = np.empty((min(at_once, draws - start), n_units))
        for row in weights:
            row[:] = np.bincount(rng.integers(0, n_units, n_units), minlength=n_units)
        out[start : start + at_once] = weights @ unit_sums
    return out


def bounds(values: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """Return the percentile interval of the finite values of resamples; NaN where fewer than ``LEAST_KNOWN`` are."""
    known = values[np.isfinite(values)]
    if not len(known) or len(known) < LEAST_KNOWN * len(values):
        return np.nan, np.nan
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def reported(value: float, low: float, high: float) -> dict[str, float | None]:
    """Return a value and the bounds of its interval for ``results.json``."""
    return {"value": number(value), "low": number(low), "high": number(high)}


def number(value: float | np.floating[Any]) -> float | None:
    """Return a number that JSON can hold; None for NaN and infinity."""
    return float(value) if np.isfinite(value) else None
