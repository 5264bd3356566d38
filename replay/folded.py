"""What every experiment begins with: all estimators folded over the dataset, their margins set on validation rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import MACHINES
from reclaim.replay.cell import Cell, lay_out_cell, set_margins
from reclaim.replay.fold import Bases, fold_dataset
from reclaim.replay.kinds import Source
from reclaim.replay.openloop import History
from reclaim.replay.settings import ReplayConfig
from reclaim.training.calibrate import Calibration, guarded_reservations
from reclaim.training.estimators.base import Estimator
from reclaim.training.estimators.registry import build_estimator

if TYPE_CHECKING:
    from reclaim.training.bundle import Bundle

LIMIT = "limit"
"""The estimator that takes no margin: it reserves the limit."""


@dataclass(frozen=True)
class Folded:
    """Estimators' answers to every row that is judged.

    Attributes
    ----------
    history : History
        Validation and test rows, and the windows just before them.
    cell : Cell
        The test period of it.
    bases : mapping of estimator to Bases
        Bare answers, learned ones first.
    calibrations : mapping of estimator to Calibration
        The margins of each, set on validation rows; none for ``LIMIT``.
    """

    history: History
    cell: Cell
    bases: Mapping[str, Bases]
    calibrations: Mapping[str, Calibration]

    def reservations(self, name: str) -> Mapping[str, NDArray[np.float64]]:
        """Return what an estimator reserves under each margin, guards included; shape (n, n_resources) each.

        ``LIMIT`` has one answer, under ``none``.
        """
        if name == LIMIT:
            return {"none": self.history.windows.limit}
        return guarded_reservations(self.bases[name], self.history.windows, self.calibrations[name].margins)


def fold(source: Source, config: ReplayConfig) -> Folded:
    """Fold the dataset through every estimator of a configuration and every bundle, and set their margins.

    Raises
    ------
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    makers = estimator_makers(config, source.bundles, source.features.mean_limit)
    history, bases = fold_dataset(
        source.dataset, source.features, config.horizon_s, makers, source.seconds, progress=source.progress
    )
    table = source.dataset.table("machines")
    cell = lay_out_cell(history, {name: table[name].to_numpy() for name in MACHINES.names})
    calibrations = {
        name: set_margins(both, cell, config.budgets, by_group=config.by_group)
        for name, both in bases.items()
        if name != LIMIT
    }
    return Folded(history, cell, bases, calibrations)


def estimator_makers(
    config: ReplayConfig, bundles: Mapping[str, Bundle], mean_limit: tuple[float, ...]
) -> dict[str, Callable[[], Estimator]]:
    """Return what makes each bare estimator afresh; a learned one is as served, but for the horizon asked.

    ``mean_limit`` is that of the dataset replayed: what is large or small there. A model of several datasets, whose
    units differ, knows no sizes.
    """
    makers: dict[str, Callable[[], Estimator]] = {
        name: partial(
            b.bare_estimator,
            horizon_s=config.horizon_s,
            mean_limit=b.mean_limit if np.isnan(b.mean_limit).all() else mean_limit,
        )
        for name, b in bundles.items()
    }
    return makers | {name: partial(build_estimator, name) for name in config.estimators}
