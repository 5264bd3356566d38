"""Movement that tasks of the synthetic cell have in common: one factor for all, one for each collection.

With shares ``common`` and ``service`` a task's deviation from its level becomes ``sqrt(1 - common - service)`` times
its own, plus ``sqrt(common)`` times the cell's factor and ``sqrt(service)`` times its collection's. All three have the
same variance, so the shares are correlations of demand, of tasks whose own movements are independent. Usage that a full
machine throttles moves less together.
"""

from __future__ import annotations

import numpy as np

from reclaim.data.synthetic.shapes import FloatArray, IntArray

# Assumed, all of it. A factor is a walk back to its mean with bursts on top; half of the cell's variance is the day's.
KEEP_CELL, KEEP_COLLECTION = 0.985, 0.95  # autocorrelation of the walks from window to window: hours, an hour
BURSTS_CELL, BURSTS_COLLECTION = 1 / 288, 0.5 / 288  # by window: one and half a one a day
KEEP_BURST = 0.85  # half an hour
BURST = (1.5, 4.0)  # height, in standard deviations of the walk
DAY_SHARE = 0.5  # its wave peaks a quarter of a day off those of tasks, which are independent of it that way


class _Walk:
    """Walks of mean 0 and variance 1, with bursts."""

    def __init__(self, shape: tuple[int, ...], keep: float, bursts: float, rng: np.random.Generator) -> None:
        self._rng, self._keep, self._bursts = rng, keep, bursts
        low, high = BURST
        height, squared = (low + high) / 2, (low * low + low * high + high * high) / 3
        self._mean = bursts * height / (1 - KEEP_BURST)
        variance = (bursts * squared - (bursts * height) ** 2) / (1 - KEEP_BURST**2)
        self._scale = 1 / np.sqrt(1 + variance)
        self._walk, self._burst = rng.standard_normal(shape), np.full(shape, self._mean)

    def step(self) -> FloatArray:
        """Return the next value of each walk."""
        rng, keep, shape = self._rng, self._keep, self._walk.shape
        self._walk = keep * self._walk + np.sqrt(1 - keep * keep) * rng.standard_normal(shape)
        self._burst = KEEP_BURST * self._burst + (rng.random(shape) < self._bursts) * rng.uniform(*BURST, shape)
        return np.asarray((self._walk + self._burst - self._mean) * self._scale)


class SharedMovement:
    """Factors that move many tasks at once, of one window after the other.

    Parameters
    ----------
    common, service
        Shares of a task's movement that are the cell's and its collection's; at least 0, below 1 together.
    groups
        Number of collections' factors.
    rng
        Its draws are not those of any other part of the cell.
    """

    def __init__(self, common: float, service: float, groups: int, rng: np.random.Generator) -> None:
        self._common, self._service = np.sqrt(common), np.sqrt(service)
        self.own = float(np.sqrt(1 - common - service))
        """Factor on a task's own movement; 1 where none is shared."""
        self._cell = _Walk((2,), KEEP_CELL, BURSTS_CELL, rng)
        self._collections = _Walk((2, groups), KEEP_COLLECTION, BURSTS_COLLECTION, rng)
        self._factors = np.zeros((2, groups))

    def step(self, day_share: float) -> None:
        """Draw the factors of the next window, if any are shared; it begins at ``day_share`` of a day, in [0, 1)."""
        if self.own < 1:
            day = np.sqrt(2.0) * np.cos(2 * np.pi * day_share)
            cell = np.sqrt(DAY_SHARE) * day + np.sqrt(1 - DAY_SHARE) * self._cell.step()
            self._factors = self._common * cell[:, None] + self._service * self._collections.step()

    def of(self, resource: int, group: IntArray) -> FloatArray:
        """Return the part of tasks' movement that is shared, in standard deviations of all of it; shape (n,)."""
        return np.asarray(self._factors[resource, group])
