"""Fits the estimator of machines to validation rows, which the forecaster was not fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from reclaim.data.schema import RESOURCES
from reclaim.training.fitting.held_out import HeldOut
from reclaim.training.machines.estimator import BOUND, Curves, MachineEstimator
from reclaim.training.machines.fit import MachineRows, fit_curve, join_rows
from reclaim.training.machines.snapshots import lay_out_cell, slot_s_of
from reclaim.training.margins.margin import Budgets


def fit_machines(valid: HeldOut, horizons_s: Sequence[int], budgets: Budgets) -> dict[int, Curves]:
    """Return the curves of each horizon; those of no peak seen where no machine is known.

    Parameters
    ----------
    valid : HeldOut
        Rows of whole sources, each in its own unit or in that of its mean limit.
    horizons_s : sequence of int
    budgets : Budgets
        Shares of machines' times that may violate.
    """
    fitted = {}
    for horizon_s in horizons_s:
        seen = machine_rows(valid, horizon_s)
        allowed = (budgets.baseline, budgets.aggressive)
        curves = [fit_curve(rows, allowed) if rows else bound for rows, bound in zip(seen, BOUND, strict=True)]
        fitted[horizon_s] = tuple(curves)
    return fitted


def machine_rows(valid: HeldOut, horizon_s: int) -> list[MachineRows | None]:
    """Return, by resource, the snapshots of the machines of all sources; None where there is none.

    A machine's tasks are those of the rows: where some collections are kept for the test, it is judged as if it ran the
    others alone.
    """
    estimator = MachineEstimator(BOUND, horizon_s, valid.mean_limit)
    terms = estimator.terms(valid.forecast, valid.x, valid.windows)
    parts: list[list[MachineRows]] = [[] for _ in RESOURCES]
    ends = np.cumsum([0, *valid.rows])
    for low, high in pairwise(ends):
        windows = valid.windows.take(np.arange(low, high))
        if not len(windows):
            continue
        slot_us = slot_s_of(windows) * 1_000_000
        for r, mean_limit in enumerate(estimator.mean_limit):
            at = lay_out_cell(windows, r, slot_us, horizon_s)
            if at is not None:
                parts[r].append(MachineRows(at.total(terms[low + at.rows, r]), at.peak, at.machine, mean_limit))
    return [join_rows(of) if of else None for of in parts]
