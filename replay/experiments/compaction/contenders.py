"""Books for the tasks of a checkpoint what models' estimators of machines predict."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reclaim.replay.experiments.compaction.packing import Foreseen
from reclaim.replay.open_loop.machines import MachineContenders

Key = tuple[str, str]
"""A contender: estimator and margin."""


def foreseen(contenders: MachineContenders, rows: NDArray[np.int64]) -> dict[Key, Foreseen]:
    """Return the terms for estimators of machines at the beginning of the windows of rows of the history."""
    found: dict[Key, Foreseen] = {}
    for name, (foreseer, estimator) in contenders.machines.items():
        terms = foreseer.current_terms(rows)
        for margin, at in contenders.margins_of(name).items():
            found[name, margin] = Foreseen(terms, estimator, at)
    return found
