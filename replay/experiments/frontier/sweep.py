"""Sweeps an estimator over every margin at once: compiled guards of ``margins.margin`` over rows and factors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.replay.open_loop.rows import sums_by
from reclaim.training.margins.calibrate import HIGHEST_SHARE, LOWEST_SHARE
from reclaim.training.margins.margin import guard, young_runs
from reclaim.training.margins.violation import needed, violates, violates_in_kernel

Floats = NDArray[np.float64]

FACTORS: Final = np.unique(
    np.concatenate(
        [np.geomspace(1 + LOWEST_SHARE, 0.5, 13), np.geomspace(0.5, 4.0, 70), np.geomspace(4.0, 1 + HIGHEST_SHARE, 21)]
    )
)
"""Factors of a bare answer, rising: one plus the margin, from the narrowest to the widest that calibration tries; in
steps of 3 % where the margins of good estimators lie."""

UNGUARDED: Final = np.inf
"""In place of an unknown bare answer; it is capped to the limit, as in ``margin.guarded``."""


@dataclass(frozen=True)
class Guards:
    """Bounds of the guards for ``n`` rows: a bare answer becomes ``max(low, answer)``, and then at most ``high``.

    Attributes
    ----------
    low, high : float64, shape (n, n_resources), unit of the limit
        Demand of the row's own window, and the limit; both the limit while the task's run is young. ``low`` is minus
        infinity where nothing was measured, ``high`` NaN where the limit is unknown.
    """

    low: Floats
    high: Floats

    @classmethod
    def from_windows(cls, windows: Windows) -> Guards:
        """Return the guards of windows, those of ``margins.margin.Guarded``."""
        now, limit = demand(windows), windows.limit
        return cls(np.where(young_runs(windows)[:, None], limit, np.where(np.isnan(now), -np.inf, now)), limit)

    def take(self, rows: NDArray[np.int64]) -> Guards:
        """Return those of the chosen rows."""
        return Guards(self.low[rows], self.high[rows])

    def reservation(self, bare: Floats, factor: float) -> Floats:
        """Return the reservations for bare answers times the factor, shape (n, n_resources); NaN without a limit."""
        answer = np.where(np.isnan(bare), UNGUARDED, bare) * factor
        return np.minimum(np.maximum(answer, self.low), self.high)


@dataclass(frozen=True)
class TaskRows:
    """Rows of the test period, laid out for the sweeps of all estimators.

    Attributes
    ----------
    guards : Guards
    need : float64, shape (n, n_resources), unit of the limit
        The least reservation that does not violate (``violation.needed``); NaN for a row that does not count.
    seconds : float64, shape (n,)
    unit : int64, shape (n,)
        Collection of the row, from 0.
    n_units : int
    """

    guards: Guards
    need: Floats
    seconds: Floats
    unit: NDArray[np.int64]
    n_units: int

    @classmethod
    def lay_out(
        cls, guards: Guards, target: Floats, seconds: Floats, unit: NDArray[np.int64], n_units: int
    ) -> TaskRows:
        """Lay out rows: their guards, targets over the limit, (n, n_resources), lengths in seconds and units, (n,)."""
        limit = guards.high
        need = np.where((limit > 0) & np.isfinite(limit), needed(target, limit), np.nan)
        return cls(guards, need, seconds, unit, n_units)

    def totals(self) -> Floats:
        """Return rows, granted volume and oracle's reclaimed volume per unit; shape (n_units, 3, n_resources)."""
        known = np.isfinite(self.need)
        granted = np.where(known, self.guards.high, 0.0) * self.seconds[:, None]
        spared = np.where(known, self.guards.high - self.need, 0.0) * self.seconds[:, None]
        return np.stack([self._by_unit(v) for v in (known.astype(np.float64), granted, spared)], axis=1)

    def at(self, reservation: Floats) -> Floats:
        """Return violations and volume reclaimed by reservations, (n, n_resources); (n_units, 2, n_resources)."""
        above = violates(self.need, reservation)
        spared = np.where(np.isfinite(self.need), self.guards.high - reservation, 0.0) * self.seconds[:, None]
        return np.stack([self._by_unit(above.astype(np.float64)), self._by_unit(spared)], axis=1)

    def sweep(self, bare: Floats, factors: Floats = FACTORS) -> tuple[Floats, Floats]:
        """Return violations and the volume reclaimed at every factor, shape (n_units, n_factors, n_resources) each.

        Parameters
        ----------
        bare : float64, shape (n, n_resources)
            Answers before margin and guards.
        factors : float64, shape (n_factors,)
            Rising.
        """
        violations = np.zeros((len(RESOURCES), self.n_units, len(factors)))
        reclaimed = np.zeros_like(violations)

        def one(r: int) -> None:
            _sweep_rows(
                bare[:, r], self.guards.low[:, r], self.guards.high[:, r], self.need[:, r], self.seconds, self.unit,
                factors, violations[r], reclaimed[r],
            )  # fmt: skip

        _for_each_resource(one)
        return np.moveaxis(violations, 0, -1), np.moveaxis(reclaimed, 0, -1)

    def _by_unit(self, values: Floats) -> Floats:
        return sums_by(self.unit, values, self.n_units)


def sweep_machines(
    bare: Floats, low: Floats, high: Floats, snapshot: NDArray[np.int64], machine: NDArray[np.int64],
    oracle: Floats, n_machines: int, factors: Floats = FACTORS,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return violations of machines' peaks and reclaimed volume at every factor; shape (n_machines, n_factors) each.

    Parameters
    ----------
    bare, low, high : float64, shape (n,)
        Of one resource, the bare answers to rows and their guards.
    snapshot : int64, shape (n,)
        Number of each row's machine and time, from 0, rising without a gap.
    machine, oracle : shape (n_snapshots,)
        Machine of each snapshot, and its peak within the horizon.
    """
    violations = np.zeros((n_machines, len(factors)))
    reclaimed = np.zeros_like(violations)
    _sweep_snapshots(bare, low, high, snapshot, machine, oracle, factors, violations, reclaimed)
    return violations, reclaimed


def at_rate(violation: Floats, reclaimed: Floats, rate: float) -> Floats:
    """Return the reclaimed share where the violation rate is ``rate``; from shape (..., n_factors) to (...).

    Between two factors the curve is a straight line. NaN where even the widest margin violates more often. Where the
    narrowest one violates less often, its reclaimed share.
    """
    within = violation <= rate
    last = np.argmax(within, axis=-1)[..., None]
    first = np.maximum(last - 1, 0)
    v0, v1 = (np.take_along_axis(violation, k, axis=-1)[..., 0] for k in (first, last))
    r0, r1 = (np.take_along_axis(reclaimed, k, axis=-1)[..., 0] for k in (first, last))
    share = np.divide(v0 - rate, v0 - v1, out=np.ones_like(v0), where=v0 > v1)
    return np.where(within.any(axis=-1), r0 + np.clip(share, 0.0, 1.0) * (r1 - r0), np.nan)


def _for_each_resource(work: Any) -> None:
    resources: Sequence[int] = range(len(RESOURCES))
    with ThreadPoolExecutor(len(resources)) as pool:
        list(pool.map(work, resources))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _sweep_rows(
    bare: Any,  # (n,) float64, of one resource as all below
    low: Any,  # (n,) float64
    high: Any,  # (n,) float64
    need: Any,  # (n,) float64
    seconds: Any,  # (n,) float64
    unit: Any,  # (n,) int64
    factors: Any,  # (F,) float64
    violations: Any,  # (n_units, F) float64, added to
    reclaimed: Any,  # (n_units, F) float64, added to
) -> None:
    for i in range(len(bare)):
        if np.isnan(need[i]) or np.isnan(bare[i]):  # an unknown answer is the limit: nothing reclaimed, no violation
            continue
        b, lo, hi, wanted, weight = bare[i], low[i], high[i], need[i], seconds[i]
        some = violations[unit[i]]
        spared = reclaimed[unit[i]]
        # beyond, the answer is the limit
        end = np.searchsorted(factors, hi / b, side="right") if b > 0.0 else len(factors)
        for k in range(end):
            reserved = guard(b * factors[k], lo, hi, False)
            some[k] += violates_in_kernel(wanted, reserved)
            spared[k] += (hi - reserved) * weight


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _sweep_snapshots(
    bare: Any,  # (n,) float64, of one resource as all below
    low: Any,  # (n,) float64
    high: Any,  # (n,) float64
    snapshot: Any,  # (n,) int64
    machine: Any,  # (n_snapshots,) int64
    oracle: Any,  # (n_snapshots,) float64
    factors: Any,  # (F,) float64
    violations: Any,  # (n_machines, F) float64, added to
    reclaimed: Any,  # (n_machines, F) float64, added to
) -> None:
    total = np.zeros(len(factors))
    limit = 0.0
    for i in range(len(bare)):
        b = np.inf if np.isnan(bare[i]) else bare[i]
        lo, hi = low[i], high[i]
        limit += hi
        for k in range(len(factors)):
            total[k] += guard(b * factors[k], lo, hi, False)
        t = snapshot[i]
        if i + 1 == len(bare) or snapshot[i + 1] != t:
            peak = oracle[t]
            some, spared = violations[machine[t]], reclaimed[machine[t]]
            for k in range(len(factors)):
                some[k] += violates_in_kernel(peak, total[k])
                spared[k] += limit - total[k]
            total[:] = 0.0
            limit = 0.0
