"""Measures the drift of the model's inputs: how far current features are from those of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # it imports torch, which this file does not need
    from reclaim.training.models.forecaster import InputRanges

SAMPLE_ROWS: Final = 2_048
"""Largest number of rows measured per call: enough to know a share of 1 % to within 0.2 %, in 2 ms."""
FADE_S: Final = 86_400.0
"""After this time of the cell's clock a row weighs 1/e of a new one, in seconds: a day's cycle stays visible."""
_SHOWN: Final = 5
"""Features shown as those that drifted most."""
_BLOCK_ROWS: Final = 256
"""Rows standardised at once, so that they stay in the cache."""


@dataclass(frozen=True)
class FeatureDrift:
    """One feature's drift.

    Attributes
    ----------
    name : str
        One of the model's inputs.
    mean : float
        Mean of the feature as the model sees it, as its distance from the mean of training in standard deviations.
    outside : float
        Share of the values outside the range of training.
    """

    name: str
    mean: float
    outside: float


@dataclass(frozen=True)
class DriftNumbers:
    """Drift over about the last day; NaN before the first row.

    Attributes
    ----------
    rows : float
        Rows, older ones with less weight.
    outside : float
        Share of the values of all features outside the range of training.
    mean : float
        Of the feature that drifted most, the size of ``FeatureDrift.mean``.
    most : tuple of FeatureDrift
        The five features that drifted most, the worst first.
    """

    rows: float
    outside: float
    mean: float
    most: tuple[FeatureDrift, ...]


class Drift:
    """Measures the drift over a sample of rows; one thread writes, any may read.

    Parameters
    ----------
    ranges : InputRanges
        Of ``Forecaster.input_ranges``. Features whose ``low`` equals their ``high`` are left out, as in the model.
    names : sequence of str
        Of the model's inputs.
    """

    def __init__(self, ranges: InputRanges, names: Sequence[str]) -> None:
        self._watched = np.flatnonzero(ranges.low < ranges.high)
        self._names = [names[k] for k in self._watched.tolist()]
        self._mean, self._scale, self._low, self._high = (np.asarray(r)[self._watched] for r in ranges)
        self._fade_us = FADE_S * 1e6
        self._known, self._outside, self._sum = (np.zeros(len(self._watched)) for _ in range(3))
        self._rows = 0.0
        self._clock_us: int | None = None
        self._turn = 0
        self._lock = Lock()

    def observe(self, x: NDArray[np.float32], clock_us: int) -> None:
        """Add the features of rows that were just answered.

        Parameters
        ----------
        x : float32, shape (k, n_features)
            As from ``FeatureState``; values that are not finite are left out.
        clock_us : int, µs
            The cell's clock.
        """
        if len(x) == 0:
            return
        step = -(-len(x) // SAMPLE_ROWS)
        sample = x[self._turn % step :: step]
        self._turn += 1
        known, outside, total = (np.zeros(len(self._watched)) for _ in range(3))
        for start in range(0, len(sample), _BLOCK_ROWS):
            block = sample[start : start + _BLOCK_ROWS, self._watched]
            z = (np.sign(block) * np.sqrt(np.sqrt(np.abs(block))) - self._mean) / self._scale
            z[~np.isfinite(z)] = np.nan
            seen = np.fmin(np.fmax(z, self._low), self._high)  # one extreme value must not dominate the mean of a day
            seen[np.isnan(z)] = 0.0
            known += (~np.isnan(z)).sum(axis=0)
            outside += ((z < self._low) | (z > self._high)).sum(axis=0)
            total += seen.sum(axis=0, dtype=np.float64)
        with self._lock:
            before = clock_us if self._clock_us is None else self._clock_us
            fade = float(np.exp(-max(clock_us - before, 0) / self._fade_us))
            self._clock_us = max(clock_us, before)
            weight = len(x) / len(sample)  # a row counts the same, alone or within a whole cell
            self._rows = self._rows * fade + len(x)
            for kept, new in ((self._known, known), (self._outside, outside), (self._sum, total)):
                kept *= fade
                kept += new * weight

    def numbers(self) -> DriftNumbers:
        """Return the drift over about the last day."""
        with self._lock, np.errstate(invalid="ignore"):
            mean, outside = self._sum / self._known, self._outside / self._known
            share = float(np.float64(self._outside.sum()) / self._known.sum())
            rows = self._rows
        size = np.nan_to_num(np.abs(mean), nan=-1.0)  # never seen: last
        worst = [k for k in np.argsort(-size, kind="stable")[:_SHOWN] if size[k] >= 0]
        most = tuple(FeatureDrift(self._names[k], float(mean[k]), float(outside[k])) for k in worst)
        return DriftNumbers(rows, share, abs(most[0].mean) if most else float("nan"), most)
