"""Predicts the peaks of machines with a model's estimator of machines, with margins set on validation peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.experiments.frontier.machines import MachinePeaks
from reclaim.replay.open_loop.machines import KINDS, Foreseer, ValidationMachines, curves_of, not_learned
from reclaim.replay.open_loop.period import Period
from reclaim.training.bundle import Bundle
from reclaim.training.machines.curve import MachineCurve
from reclaim.training.machines.fit import MachineRows, join_rows
from reclaim.training.machines.following import follow, follow_all
from reclaim.training.machines.snapshots import Snapshots
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]

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
        The validation period's snapshots and their times, but for those that the location was fitted to: peaks lie too
        near it, and a margin that followed them would begin the test too small.
    """

    curve: MachineCurve
    rows: MachineRows
    at: Snapshots
    warm_up: tuple[MachineRows, NDArray[np.int64]] | None

    def peak(self, budget: float) -> Floats:
        """Return what is reserved at each time within a budget; shape (n_snapshots,)."""
        return self.curve.peak(self.rows.sums, self.curve.margin(budget), self.rows.mean_limit)

    def following(self, budget: float, horizon_s: int, slot_s: int) -> Floats:
        """Return the same where the margin follows the peaks that came, from the first snapshot of ``warm_up`` on."""
        rows, time_us = self._from_validation()
        return follow(self.curve, rows, time_us, horizon_s, slot_s * 1_000_000, budget)[-len(self.rows) :]

    def held(self, budgets: Sequence[float], horizon_s: int, slot_s: int) -> Floats:
        """Return the same for rising budgets as a service does, which keeps the second budget; (B, n_snapshots)."""
        rows, time_us = self._from_validation()
        return follow_all(self.curve, rows, time_us, horizon_s, slot_s * 1_000_000, budgets)[:, -len(self.rows) :]

    def _from_validation(self) -> tuple[MachineRows, NDArray[np.int64]]:
        parts = [*([self.warm_up] if self.warm_up is not None else []), (self.rows, self.at.start_us)]
        return join_rows([rows for rows, _ in parts]), np.concatenate([times for _, times in parts])

    def sweep(self, limit: Floats) -> tuple[Floats, Floats]:
        """Return violations and reclaimed volume at margin after margin, rising; shape (n_machines, n_steps) each.

        ``limit`` is the sum of the limits at each time. The margins are those that the judged peaks would have needed:
        everything that a curve can show lies between them.
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
    """Return, by ``KINDS`` and resource, a model's predictions for the machines laid out for the test period.

    Margins are those of the validation peaks of the same machines (``open_loop.machines.curves_of``).
    """
    history = period.history
    foreseer = Foreseer(bundle, features, history, horizon_s)
    own, terms = foreseer.estimator, foreseer.terms(np.arange(len(history)))
    before = ValidationMachines.lay_out(history, period.slots.slot_us, horizon_s)
    seen = before.seen(terms[before.rows], own)
    found: dict[str, dict[str, ForeseenMachines]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        curves = curves_of(kind, own, seen, budgets, bundle.learned_until_us)
        for r, resource in enumerate(RESOURCES):
            if resource in machines:
                at = machines[resource].at
                rows = MachineRows(at.total(terms[at.rows, r]), at.peak, at.machine, own.mean_limit[r])
                warm_up = not_learned(curves[r], seen[r], bundle.learned_until_us)
                found[kind][resource] = ForeseenMachines(curves[r], rows, at, warm_up)
    return found
