"""Koordinator's prediction of a pod's peak: percentiles of decaying histograms, plus a safety margin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.training.estimators.base import (
    Estimate,
    Estimator,
    for_each_resource,
    grid,
    known_statistic,
    over_limit,
)
from reclaim.training.estimators.histogram import RELATIVE, DecayingHistograms, Grid

_GRIDS: Final = (Grid(0.025, 1_024.0), Grid(5 * 2.0**20, 2.0**41))
"""Koordinator's own buckets: 158 of CPU, in cores, and 205 of memory, in bytes."""


class KoordinatorEstimator(Estimator):
    """CPU p95 and memory p98 of a decaying histogram of the run, times 1.1; the limit in its first day.

    As Koordinator's node agent does for a pod: a new run of a task is a new pod, so it starts afresh. Its
    sample is the 90th percentile of a minute, here the demand of the window, one sample of weight 1 each. Histograms
    hold usage over the limit in ``histogram.RELATIVE`` buckets, unless ``unit`` gives the unit of usage.

    Parameters
    ----------
    margin : float
        Share added to the percentile; 0.1 in Koordinator.
    half_life_s, level : sequence of float, in the order ``schema.RESOURCES``
        12 h and 24 h; 0.95 and 0.98 in Koordinator.
    cold_s : float
        Age of the run up to which the limit is kept, in seconds; a day in Koordinator.
    unit : sequence of float, in the order ``schema.RESOURCES``, or None
        Cores and bytes that one unit of usage is: gives Koordinator's own buckets.
    """

    CANDIDATES = grid(
        half_life_s=((43_200.0, 86_400.0), (10_800.0, 10_800.0), (172_800.0, 172_800.0)),
        level=((0.95, 0.98), (0.9, 0.9), (0.99, 0.99)),
        cold_s=(86_400.0, 3_600.0),
    )

    def __init__(
        self,
        margin: float = 0.1,
        half_life_s: Sequence[float] = (43_200.0, 86_400.0),
        level: Sequence[float] = (0.95, 0.98),
        cold_s: float = 86_400.0,
        unit: Sequence[float] | None = None,
    ) -> None:
        if not margin > -1:
            raise ConfigError(f"margin must be above -1, got {margin}")
        self.margin = margin
        self.half_life_s = for_each_resource("half_life_s", half_life_s)
        self.level = for_each_resource("level", level)
        self.cold_s = cold_s
        self.unit = None if unit is None else for_each_resource("unit", unit)
        self._histograms = [
            DecayingHistograms(
                resource, RELATIVE if unit is None else _GRIDS[r], self.half_life_s[r], self.level[r], per_run=True
            )
            for r, resource in enumerate(RESOURCES)
        ]
        self._memory = {name: array for h in self._histograms for name, array in h.blank.items()}

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._make_room(slot)
        value = over_limit(windows) if self.unit is None else demand(windows) * self.unit
        out = np.empty((len(slot), len(RESOURCES) + 2))

        def fold(*columns: Any) -> None:
            for r, histograms in enumerate(self._histograms):
                histograms.fold(self._memory, r, *columns)

        columns = (windows.start_us, windows.end_us, windows.scheduled_us, value, windows.percentiles[:, :0],
                   windows.limit)  # fmt: skip
        self._in_parts(fold, slot, columns, out)
        peak = out[:, : len(RESOURCES)] * (1 + self.margin)
        np.copyto(peak, np.nan, where=out[:, -2:-1] <= self.cold_s * 1e6)
        return known_statistic(peak * windows.limit if self.unit is None else peak / self.unit)
