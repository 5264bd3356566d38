"""Every margin of an estimator at once: the guards of ``estimators.margin`` over rows and margins, compiled."""

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
from reclaim.replay.constants import ROUNDING, SUM_ROUNDING
from reclaim.training.calibrate import HIGHEST_SHARE, LOWEST_SHARE
from reclaim.training.estimators.margin import STARTUP_HOLD_S

Floats = NDArray[np.float64]

FACTORS: Final = np.unique(
    np.concatenate(
        [np.geomspace(1 + LOWEST_SHARE, 0.5, 13), np.geomspace(0.5, 4.0, 70), np.geomspace(4.0, 1 + HIGHEST_SHARE, 21)]
    )
)
"""What a bare answer is multiplied with, rising: one plus the margin, from the narrowest to the widest that calibration
looks at; in steps of 3 % where estimators that mean what they say have theirs."""

UNGUARDED: Final = np.inf
"""Stands for a bare answer that is unknown: capped to the limit, as ``CapToLimit`` fills it in."""


@dataclass(frozen=True)
class Guards:
    """What the guards let pass of any bare answer to ``n`` rows: ``max(low, answer)``, and then at most ``high``.

    Attributes
    ----------
    low, high : float64, shape (n, n_resources), unit of the limit
        The demand of the row's own window and the limit; the limit twice while the task's run is young. ``low`` is
        minus infinity where nothing was measured, ``high`` NaN where no limit is known.
    """

    low: Floats
    high: Floats

    @classmethod
    def of(cls, windows: Windows) -> Guards:
        """Return the guards of windows, those of ``estimators.margin.Guarded``."""
        now, limit = demand(windows), windows.limit
        age_us = windows.end_us - windows.scheduled_us
        young = (windows.scheduled_us > 0) & (age_us < STARTUP_HOLD_S * 1e6)
        return cls(np.where(young[:, None], limit, np.where(np.isnan(now), -np.inf, now)), limit)

    def take(self, rows: NDArray[np.int64]) -> Guards:
        """Return those of the chosen rows."""
        return Guards(self.low[rows], self.high[rows])

    def reservation(self, bare: Floats, factor: float) -> Floats:
        """Return what is reserved of bare answers times the factor, shape (n, n_resources); NaN without a limit."""
        answer = np.where(np.isnan(bare), UNGUARDED, bare) * factor
        return np.minimum(np.maximum(answer, self.low), self.high)


@dataclass(frozen=True)
class TaskRows:
    """The rows of the test period, laid out for the sweeps of all estimators.

    Attributes
    ----------
    guards : Guards
    need : float64, shape (n, n_resources), unit of the limit
        The least that does not violate, the target or the limit where that is less; NaN for a row that does not count.
    seconds : float64, shape (n,)
    unit : int64, shape (n,)
        Whose sums a row adds to, from 0: the collection.
    n_units : int
    """

    guards: Guards
    need: Floats
    seconds: Floats
    unit: NDArray[np.int64]
    n_units: int

    @classmethod
    def of(cls, guards: Guards, target: Floats, seconds: Floats, unit: NDArray[np.int64], n_units: int) -> TaskRows:
        """Lay out rows: their guards, targets over the limit, (n, n_resources), lengths in seconds and units, (n,)."""
        limit = guards.high
        need = np.where((limit > 0) & np.isfinite(limit), np.minimum(target, 1.0) * limit, np.nan)
        return cls(guards, need, seconds, unit, n_units)

    def totals(self) -> Floats:
        """Return rows, granted volume and what the oracle reclaims of it, per unit; shape (n_units, 3, n_resources)."""
        known = np.isfinite(self.need)
        granted = np.where(known, self.guards.high, 0.0) * self.seconds[:, None]
        spared = np.where(known, self.guards.high - self.need, 0.0) * self.seconds[:, None]
        return np.stack([self._by_unit(v) for v in (known.astype(np.float64), granted, spared)], axis=1)

    def at(self, reservation: Floats) -> Floats:
        """Return violations and volume reclaimed by reservations, (n, n_resources); (n_units, 2, n_resources)."""
        above = self.need > reservation * (1 + ROUNDING)
        spared = np.where(np.isfinite(self.need), self.guards.high - reservation, 0.0) * self.seconds[:, None]
        return np.stack([self._by_unit(above.astype(np.float64)), self._by_unit(spared)], axis=1)

    def sweep(self, bare: Floats, factors: Floats = FACTORS) -> tuple[Floats, Floats]:
        """Return violations and the volume reclaimed at every factor, shape (n_units, n_factors, n_resources) each.

        Parameters
        ----------
        bare : float64, shape (n, n_resources)
            What the estimator answered before margin and guards.
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
        columns = [np.bincount(self.unit, values[:, r], self.n_units) for r in range(values.shape[1])]
        return np.stack(columns, axis=1).astype(np.float64)


def sweep_machines(
    bare: Floats, low: Floats, high: Floats, snapshot: NDArray[np.int64], machine: NDArray[np.int64],
    oracle: Floats, n_machines: int, factors: Floats = FACTORS,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return violations of machines' peaks and what is reclaimed at every factor; shape (n_machines, n_factors) each.

    Parameters
    ----------
    bare, low, high : float64, shape (n,)
        Of one resource, the bare answers to rows and their guards.
    snapshot : int64, shape (n,)
        The machine and time of each row, rising; each number from 0 is there.
    machine, oracle : shape (n_snapshots,)
        Of each snapshot: the machine, and the peak that was to come.
    """
    violations = np.zeros((n_machines, len(factors)))
    reclaimed = np.zeros_like(violations)
    _sweep_snapshots(bare, low, high, snapshot, machine, oracle, factors, violations, reclaimed)
    return violations, reclaimed


def at_rate(violation: Floats, reclaimed: Floats, rate: float) -> Floats:
    """Return what is reclaimed where the share of violations is at most a rate; from shape (..., n_factors) to (...).

    Between two factors the curve is a straight line. NaN where even the widest margin violates more often; where the
    narrowest violates less often, what that one reclaims.
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
    bare: Any, low: Any, high: Any, need: Any, seconds: Any, unit: Any, factors: Any, violations: Any, reclaimed: Any
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
            held = min(max(b * factors[k], lo), hi)
            some[k] += wanted > held * (1.0 + ROUNDING)
            spared[k] += (hi - held) * weight


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _sweep_snapshots(
    bare: Any, low: Any, high: Any, snapshot: Any, machine: Any, oracle: Any, factors: Any,
    violations: Any, reclaimed: Any,
) -> None:  # fmt: skip
    total = np.zeros(len(factors))
    limit = 0.0
    for i in range(len(bare)):
        b = np.inf if np.isnan(bare[i]) else bare[i]
        lo, hi = low[i], high[i]
        limit += hi
        for k in range(len(factors)):
            total[k] += min(max(b * factors[k], lo), hi)
        t = snapshot[i]
        if i + 1 == len(bare) or snapshot[i + 1] != t:
            peak = oracle[t]
            some, spared = violations[machine[t]], reclaimed[machine[t]]
            for k in range(len(factors)):
                some[k] += peak > total[k] * (1.0 + SUM_ROUNDING)
                spared[k] += limit - total[k]
            total[:] = 0.0
            limit = 0.0
