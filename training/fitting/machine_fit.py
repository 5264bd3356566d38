"""Fits the estimator of machines to validation rows, which the forecaster was not fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.training.fitting.held_out import HeldOut
from reclaim.training.machines.estimator import BOUND, Curves, MachineEstimator
from reclaim.training.machines.fit import FEWEST, MOST, MachineRows, fit_curve, join_rows
from reclaim.training.machines.regroup import regroup
from reclaim.training.machines.snapshots import Snapshots, lay_out_cell, slot_s_of
from reclaim.training.machines.terms import PAST
from reclaim.training.margins.margin import Budgets

Ids = NDArray[np.int64]


def fit_machines(valid: HeldOut, horizons_s: Sequence[int], budgets: Budgets, placed_s: int) -> dict[int, Curves]:
    """Return the curves of each horizon; those of no peak seen where no machine is known.

    Parameters
    ----------
    valid : HeldOut
        Rows of whole sources, each in its own unit or in that of its mean limit.
    horizons_s : sequence of int
    budgets : Budgets
        Shares of machines' times that may violate.
    placed_s : int
        The horizon that tasks are placed by, in seconds: the one that reservations are promised for. Curves of longer
        ones may look at the past of the tasks.
    """
    fitted = {}
    for horizon_s in horizons_s:
        seen, regrouped = machine_rows(valid, horizon_s)
        allowed, pasts = (budgets.baseline, budgets.aggressive), PAST if horizon_s > placed_s else ()
        fitted[horizon_s] = tuple(
            fit_curve(rows, allowed, others, placed=horizon_s == placed_s, pasts=pasts) if rows else bound
            for rows, others, bound in zip(seen, regrouped, BOUND, strict=True)
        )
    return fitted


def machine_rows(valid: HeldOut, horizon_s: int) -> tuple[list[MachineRows | None], list[MachineRows | None]]:
    """Return, by resource, the snapshots of the machines of all sources, and those of the same tasks regrouped.

    None where there is none, and where nothing is fitted to those regrouped. A machine's tasks are those of the rows:
    where some collections are kept for the test, it is judged as if it ran the others alone.
    """
    estimator = MachineEstimator(BOUND, horizon_s, valid.mean_limit)
    terms = estimator.terms(valid.forecast, valid.x, valid.windows)
    sources = [np.arange(low, high) for low, high in pairwise(np.cumsum([0, *valid.rows]))]

    def laid_out(r: int) -> tuple[MachineRows | None, MachineRows | None]:
        def seen(rows: Ids, at: Snapshots, machine: Ids) -> MachineRows:
            return MachineRows(at.total(terms[rows[at.rows], r]), at.peak, machine, estimator.mean_limit[r])

        cells = []
        for rows in sources:
            windows = valid.windows.take(rows)
            slot_us = slot_s_of(windows) * 1_000_000
            if (at := lay_out_cell(windows, r, slot_us, horizon_s)) is not None:
                cells.append((rows, windows, slot_us, at))
        # every other source begins with an odd number: sources of one machine are spread over both halves
        own = [seen(rows, at, at.machine + k % 2) for k, (rows, _, _, at) in enumerate(cells)]
        if sum(map(len, own)) < FEWEST:
            return (join_rows(own) if own else None), None
        others = [
            seen(rows, other, machine + k % 2)
            for k, (rows, windows, slot_us, at) in enumerate(cells)
            for other, machine in regroup(windows, at, slot_us, horizon_s, MOST)
        ]
        return join_rows(own), join_rows(others) if others else None

    each = [laid_out(r) for r in range(len(RESOURCES))]
    return [own for own, _ in each], [others for _, others in each]
