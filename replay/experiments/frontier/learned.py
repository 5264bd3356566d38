"""Foresees the peaks of machines by a model's estimator of machines, with margins set on validation peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.experiments.frontier.machines import MachinePeaks
from reclaim.replay.open_loop.estimates import ROWS_PER_CALL
from reclaim.replay.open_loop.period import Period
from reclaim.training.bundle import Bundle
from reclaim.training.machines.curve import MachineCurve
from reclaim.training.machines.estimator import BOUND, MachineEstimator
from reclaim.training.machines.fit import MachineRows, join_rows
from reclaim.training.machines.following import follow
from reclaim.training.machines.snapshots import Snapshots, lay_out_cell
from reclaim.training.machines.terms import N_TERMS
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]

FITTED, UNFITTED = KINDS = ("machine", "bound")
"""Of a model's two estimators of machines, what stands behind its name: the one it comes with, and the bound that needs
no fit, on the same forecasts."""
_STEPS: Final = 200


@dataclass(frozen=True)
class ForeseenMachines:
    """One estimator's view of the machines, one resource.

    Attributes
    ----------
    curve : MachineCurve
        Its margins are those of validation peaks.
    rows : MachineRows
        The judged times.
    at : Snapshots
        Of the same times.
    warm_up : tuple of MachineRows and int64 array, or None
        The validation period's snapshots and their times.
    """

    curve: MachineCurve
    rows: MachineRows
    at: Snapshots
    warm_up: tuple[MachineRows, NDArray[np.int64]] | None

    def peak(self, budget: float) -> Floats:
        """Return what is reserved at each time within a budget; shape (n_snapshots,)."""
        return self.curve.peak(self.rows.sums, self.curve.margin(budget), self.rows.mean_limit)

    def following(self, budget: float, horizon_s: int, slot_s: int) -> Floats:
        """Return the same where the margin follows the peaks that came, from the first validation snapshot on."""
        parts = [*([self.warm_up] if self.warm_up is not None else []), (self.rows, self.at.start_us)]
        rows, time_us = join_rows([rows for rows, _ in parts]), np.concatenate([times for _, times in parts])
        return follow(self.curve, rows, time_us, horizon_s, slot_s * 1_000_000, budget)[-len(self.rows) :]

    def sweep(self, limit: Floats) -> tuple[Floats, Floats]:
        """Return violations and reclaimed volume at margin after margin, rising; shape (n_machines, n_steps) each.

        ``limit`` is the sum of the limits at each time. The margins are those that the judged peaks would have asked
        for: all that a curve can show lies between them.
        """
        scores = self.rows.scores(self.curve)
        shares = np.concatenate([np.geomspace(1.0, 1e-5, _STEPS - 1), [0.0]])
        steps = np.unique(np.quantile(scores, 1.0 - shares))
        violations, reclaimed = np.empty((2, self.at.n_machines, len(steps)))
        for k, margin in enumerate(steps):
            peak = self.curve.peak(self.rows.sums, margin, self.rows.mean_limit)
            above = violates(self.rows.peak, peak)
            violations[:, k] = np.bincount(self.rows.machine, above, self.at.n_machines)
            reclaimed[:, k] = np.bincount(self.rows.machine, limit - peak, self.at.n_machines)
        return violations, reclaimed


def foresee_machines(
    bundle: Bundle,
    features: FeatureSet,
    period: Period,
    machines: Mapping[str, MachinePeaks],
    horizon_s: int,
    budgets: Budgets,
) -> dict[str, dict[str, ForeseenMachines]]:
    """Return, by ``KINDS`` and resource, what a model foresees of the machines laid out for the test period.

    Margins are those of the validation peaks of the same machines, whose tasks are those of collections that are not
    kept for the test; the model's own where there are too few for the smallest budget.
    """
    history, own = period.history, bundle.machine_estimator(horizon_s=horizon_s, mean_limit=features.mean_limit)
    terms = _terms(bundle, own, features, period, horizon_s)
    valid = np.flatnonzero(np.isin(history.source_row, features.valid_rows()))
    windows = history.windows.take(valid)
    found: dict[str, dict[str, ForeseenMachines]] = {kind: {} for kind in KINDS}
    for r, resource in enumerate(RESOURCES):
        if resource not in machines:
            continue
        judged, mean_limit = machines[resource].at, own.mean_limit[r]
        rows = MachineRows(judged.total(terms[judged.rows, r]), judged.peak, judged.machine, mean_limit)
        before = lay_out_cell(windows, r, period.slots.slot_us, horizon_s)
        seen = None
        if before is not None:
            sums = before.total(terms[valid[before.rows], r])
            seen = MachineRows(sums, before.peak, before.machine, mean_limit), before.start_us
        for kind, curve in ((FITTED, own.curves[r]), (UNFITTED, BOUND[r])):
            if seen is not None and len(seen[0]) * budgets.baseline >= 1:
                curve = curve.with_margins(seen[0].scores(curve))
            found[kind][resource] = ForeseenMachines(curve, rows, judged, seen)
    return found


def _terms(bundle: Bundle, estimator: MachineEstimator, features: FeatureSet, period: Period, horizon_s: int) -> Floats:
    """Return the terms of every row of the history; shape (n, n_resources, N_TERMS)."""
    history = period.history
    terms = np.empty((len(history), len(RESOURCES), N_TERMS))
    for start in range(0, len(history), ROWS_PER_CALL):
        part = np.arange(start, min(start + ROWS_PER_CALL, len(history)))
        x = features.x[history.source_row[part]]
        forecast = bundle.forecaster.predict(x[:, : len(bundle.features)], horizon_s)
        terms[part] = estimator.terms(forecast, x, history.windows.take(part))
    return terms
