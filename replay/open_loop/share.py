"""Chooses the task-windows of a large cell that a replay judges: all those of some machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.sample import OF_REPLAY, machine_or_task
from reclaim.features.splits import GROUPS, IN_ALLOC, PERIODS, TEST, VALID, drawn


@dataclass(frozen=True)
class Share:
    """Share of the machines whose task-windows are judged; of the tasks where no machine is known.

    Machines are whole, so what is measured of a machine is measured of all its tasks. The id alone decides, so parts of
    a dataset agree.
    """

    of_machines: float = 1.0

    @classmethod
    def within(cls, features: FeatureSet, rows: int) -> Share:
        """Return the share that leaves about that many rows of the validation and the test period."""
        counts = features.manifest["rows"]
        judged = sum(counts[PERIODS[p]][name] for p in (VALID, TEST) for g, name in enumerate(GROUPS) if g != IN_ALLOC)
        return cls(min(rows / max(judged, 1), 1.0))

    def rows(self, windows: Windows) -> NDArray[np.bool_]:
        """Return which rows belong to it; shape (n,)."""
        return self._drawn(*machine_or_task(windows))

    def machines(self, machine_id: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which machines belong to it; shape (n,)."""
        return self._drawn(machine_id, machine_id)

    def _drawn(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.bool_]:
        return drawn(np.full(len(first), OF_REPLAY), first, second) < self.of_machines


WHOLE: Final = Share()
"""The share that selects everything."""
