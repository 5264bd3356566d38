"""Mixes the curves of a network of other clusters into those of a network whose own history is short."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.features.targets import HORIZONS_S
from reclaim.training.models.beyond import KEY
from reclaim.training.models.portable import PortableForecaster

_DAY_S: Final = 86_400
MEASURED_S: Final = (300, 3_600, 86_400)
"""Horizons of the quarters in ``QUARTERS``. One between two of them has those of the shorter."""
QUARTERS: Final[tuple[tuple[float, tuple[int, ...]], ...]] = (
    (3.0, (1, 2, 3)),
    (7.0, (1, 1, 2)),
    (14.0, (0, 1, 2)),
    (35.0, (0, 0, 1)),
)
"""Days of history below which so many quarters of the curves come from the other network, by horizon. A day ahead
the cell's own network has few outcomes that do not overlap. No longer history was measured (`benchmarks/LOG.md`,
2026-11-28)."""


def quarters_of(history_s: float) -> tuple[int, ...]:
    """Return how many quarters of each horizon's curve come from the other network, by the own history's length."""
    of = next((quarters for days, quarters in QUARTERS if history_s < days * _DAY_S), (0,) * len(MEASURED_S))
    return tuple(of[max(bisect_right(MEASURED_S, horizon_s) - 1, 0)] for horizon_s in HORIZONS_S)


class Prior(NamedTuple):
    """A network of other clusters and its part in the curves.

    Attributes
    ----------
    forecaster : PortableForecaster
    quarters : tuple of int
        Of the curve of each horizon, from 0 to 3. The curve is the geometric mean, with these weights.
    datasets : tuple of dict
        What the other network was trained on, and until when, as its bundle says; not saved with the curves.
    """

    forecaster: PortableForecaster
    quarters: tuple[int, ...]
    datasets: tuple[dict[str, Any], ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values for the bundle: the digest of the other network, its quarters of each curve, and its datasets.

        The last keeps replays from testing on what the other network was trained on.
        """
        digest, beyond = sha256(), self.forecaster.beyond
        tensors = self.forecaster.tensors | ({} if beyond is None else {KEY: beyond})
        for name, values in sorted(tensors.items()):
            digest.update(name.encode() + np.ascontiguousarray(values).tobytes())
        quarters = {str(h): n for h, n in zip(HORIZONS_S, self.quarters, strict=True)}
        return {"sha256": digest.hexdigest(), "quarters": quarters, "datasets": list(self.datasets)}

    def mixer(self, horizons_s: tuple[int, ...]) -> Callable[..., None]:
        """Return the function that mixes curves of some horizons in place.

        Its arguments are the curves, float32, shape (n, n_targets, n_horizons, N_THRESHOLDS), their thresholds and the
        features of the rows. A task that the other network has no curve for keeps its own.
        """
        mixed = tuple(h for h in horizons_s if self.quarters[HORIZONS_S.index(h)])
        if not mixed:
            return lambda *_: None
        write = self.forecaster.writer(mixed)
        places = np.array([horizons_s.index(h) for h in mixed])
        quarters = np.array([self.quarters[HORIZONS_S.index(h)] for h in mixed])

        def mix(survival: NDArray[np.float32], thresholds: NDArray[np.float32], x: NDArray[np.float32]) -> None:
            others = np.empty((*survival.shape[:2], len(mixed), survival.shape[3]), np.float32)
            write(others, thresholds, x)
            _mix(survival, others, places, quarters)

        return mix


@numba.njit(**LENT)
def _mix(
    survival: Any,  # (n, n_targets, n_horizons, J) float32, changed
    others: Any,  # (n, n_targets, n_mixed, J) float32
    places: Any,  # (n_mixed,) int64: which horizon of the first each of the second is
    quarters: Any,  # (n_mixed,) int64: 1, 2 or 3
) -> None:
    for i in range(len(survival)):
        for t in range(survival.shape[1]):
            for k in range(len(places)):
                own, other = survival[i, t, places[k]], others[i, t, k]
                if np.isnan(other[0]):
                    continue
                for j in range(len(own)):  # by square roots, which are rounded alike everywhere
                    mean = math.sqrt(np.float64(own[j]) * np.float64(other[j]))
                    if quarters[k] != 2:
                        mean = math.sqrt(np.float64(own[j] if quarters[k] == 1 else other[j]) * mean)
                    own[j] = mean
