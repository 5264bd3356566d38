"""Sweeps an estimator over every margin or price at once: compiled guards of ``margins.margin`` over rows and steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED
from reclaim.data.core.parallel import in_parts
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.replay.open_loop.rows import sums_by
from reclaim.training.margins.answers import Answers, Priced, Widened
from reclaim.training.margins.ladder import TOP_RUNG, Ladder, at_rung
from reclaim.training.margins.margin import HIGHEST_SHARE, LOWEST_SHARE, guard, young_runs
from reclaim.training.margins.violation import needed, violates, violates_in_kernel

Floats = NDArray[np.float64]

FACTORS: Final = np.unique(
    np.concatenate(
        [np.geomspace(1 + LOWEST_SHARE, 0.5, 48), np.geomspace(0.5, 40, 222), np.geomspace(40, 1 + HIGHEST_SHARE, 56)]
    )
)
"""Factors of a bare answer, rising: one plus the margin, from the narrowest to the widest that calibration tries. Steps
are of 2 % where the margins of estimators lie, from a half to 40, and of 5 to 6 % elsewhere: between steps of a third
the straight line lost up to 8 points of a wide margin."""

PLACES: Final = np.arange(TOP_RUNG + 1.0)
"""Places on the ladders of a learned estimator: all rungs."""

UNGUARDED: Final = np.inf
"""Value for an unknown bare answer; it is capped to the limit, as in ``margin.guarded``."""


@dataclass(frozen=True)
class Bare:
    """Answers to rows before margin or price, with the steps that they are swept over.

    Attributes
    ----------
    answers : float64, shape (n, n_resources), or Ladder
    steps : float64, shape (n_steps,)
        Rising: factors of the answers, or places on the ladders.
    """

    answers: Floats | Ladder
    steps: Floats

    @classmethod
    def of(cls, answers: Answers) -> list[Bare]:
        """Return the answers of an estimator, those for the baseline first; one where both budgets share them."""
        if isinstance(answers, Priced):
            assert answers.rows is None
            return [cls(answers.ladder, PLACES)]
        assert isinstance(answers, Widened)
        both = ("baseline",) if answers.is_alike else ("baseline", "aggressive")
        return [cls(answers.of[name].reservation, FACTORS) for name in both]


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
    rows : int64, shape (n,)
        Of the history.
    guards : Guards
    need : float64, shape (n, n_resources), unit of the limit
        The least reservation that does not violate (``violation.needed``); NaN for a row that does not count.
    seconds : float64, shape (n,)
    unit : int64, shape (n,)
        Collection of the row, from 0.
    n_units : int
    """

    rows: NDArray[np.int64]
    guards: Guards
    need: Floats
    seconds: Floats
    unit: NDArray[np.int64]
    n_units: int

    @classmethod
    def lay_out(
        cls, rows: NDArray[np.int64], guards: Guards, target: Floats, seconds: Floats, unit: NDArray[np.int64],
        n_units: int,
    ) -> TaskRows:  # fmt: skip
        """Lay out rows of the history, whose guards, targets over the limit and lengths in seconds are given.

        ``unit``, shape (n,), is of the rows alone.
        """
        mine = guards.take(rows)
        limit = mine.high
        need = np.where((limit > 0) & np.isfinite(limit), needed(target[rows], limit), np.nan)
        return cls(rows, mine, need, seconds[rows], unit, n_units)

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

    def sweep(self, bare: Bare) -> tuple[Floats, Floats]:
        """Return violations and the volume reclaimed at every step, shape (n_units, n_steps, n_resources) each.

        ``bare`` has the answers to every row of the history.

        A sweep is not a job of the engine: sending its rows to workers takes as much processor time as the sweep
        itself, at a million rows almost three times as much (``benchmarks/speed/open_loop.py --jobs``). Nor is it part
        of the fold of a bucket: its sums take 2 to 7 kB per collection and estimator, and those of all estimators would
        be held at once.
        """
        violations = np.zeros((len(RESOURCES), self.n_units, len(bare.steps)))
        reclaimed = np.zeros_like(violations)

        def some(part: int, parts: int) -> None:
            for r in range(part, len(RESOURCES), parts):
                _sweep_rows(
                    bare.answers[:, r], self.rows, self.guards.low[:, r], self.guards.high[:, r], self.need[:, r],
                    self.seconds, self.unit, bare.steps, violations[r], reclaimed[r],
                )  # fmt: skip

        in_parts(some, len(self.rows), len(RESOURCES))
        return np.moveaxis(violations, 0, -1), np.moveaxis(reclaimed, 0, -1)

    def _by_unit(self, values: Floats) -> Floats:
        return sums_by(self.unit, values, self.n_units)


def sweep_machines(
    bare: Floats | Ladder, rows: NDArray[np.int64], low: Floats, high: Floats, snapshot: NDArray[np.int64],
    machine: NDArray[np.int64], oracle: Floats, n_machines: int, steps: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return violations of machines' peaks and reclaimed volume at every step; shape (n_machines, n_steps) each.

    Parameters
    ----------
    bare : float64, shape (n_history,), or float32, shape (n_history, N_RUNGS)
        Of one resource as all below: the bare answers to factors, or the ladders.
    rows, low, high : shape (n,)
        Rows with an answer that count, and their guards.
    snapshot : int64, shape (n,)
        Number of each row's machine and time, from 0, rising without a gap.
    machine, oracle : shape (n_snapshots,)
        Machine of each snapshot, and its peak within the horizon.
    steps : float64, shape (n_steps,)
        As in ``Bare``.
    """
    violations = np.zeros((n_machines, len(steps)))
    reclaimed = np.zeros_like(violations)
    _sweep_snapshots(bare, rows, low, high, snapshot, machine, oracle, steps, violations, reclaimed)
    return violations, reclaimed


def at_rate(violation: Floats, reclaimed: Floats, rate: float) -> Floats:
    """Return the reclaimed share where the violation rate is ``rate``; from shape (..., n_steps) to (...).

    Between two steps the curve is a straight line. NaN where even the last violates more often. Where the first one
    violates less often, its reclaimed share.
    """
    within = violation <= rate
    last = np.argmax(within, axis=-1)[..., None]
    first = np.maximum(last - 1, 0)
    v0, v1 = (np.take_along_axis(violation, k, axis=-1)[..., 0] for k in (first, last))
    r0, r1 = (np.take_along_axis(reclaimed, k, axis=-1)[..., 0] for k in (first, last))
    share = np.divide(v0 - rate, v0 - v1, out=np.ones_like(v0), where=v0 > v1)
    return np.where(within.any(axis=-1), r0 + np.clip(share, 0.0, 1.0) * (r1 - r0), np.nan)


@numba.njit(nogil=True, error_model="numpy")
def _answer(bare: Any, row: int, step: float, limit: float) -> Any:
    """Return the answer of a row at a step; NaN where there is none."""
    if bare.ndim == 1:
        return bare[row] * step
    return at_rung(bare[row], step) * limit


@numba.njit(**CACHED, error_model="numpy")
def _sweep_rows(
    bare: Any,  # (n_history,) float64 or (n_history, N_RUNGS) float32, of one resource as all below
    rows: Any,  # (n,) int64
    low: Any,  # (n,) float64
    high: Any,  # (n,) float64
    need: Any,  # (n,) float64
    seconds: Any,  # (n,) float64
    unit: Any,  # (n,) int64
    steps: Any,  # (F,) float64
    violations: Any,  # (n_units, F) float64, added to
    reclaimed: Any,  # (n_units, F) float64, added to
) -> None:
    for i in range(len(rows)):
        lo, hi, wanted, weight = low[i], high[i], need[i], seconds[i]
        # an unknown answer is the limit: nothing reclaimed, no violation
        if np.isnan(wanted) or np.isnan(_answer(bare, rows[i], steps[0], hi)):
            continue
        some = violations[unit[i]]
        spared = reclaimed[unit[i]]
        for k in range(len(steps)):
            answer = _answer(bare, rows[i], steps[k], hi)
            if answer >= hi:  # and so at every later step
                break
            reserved = guard(answer, lo, hi, False)
            some[k] += violates_in_kernel(wanted, reserved)
            spared[k] += (hi - reserved) * weight


@numba.njit(**CACHED, error_model="numpy")
def _sweep_snapshots(
    bare: Any,  # (n_history,) float64 or (n_history, N_RUNGS) float32, of one resource as all below
    rows: Any,  # (n,) int64
    low: Any,  # (n,) float64
    high: Any,  # (n,) float64
    snapshot: Any,  # (n,) int64
    machine: Any,  # (n_snapshots,) int64
    oracle: Any,  # (n_snapshots,) float64
    steps: Any,  # (F,) float64
    violations: Any,  # (n_machines, F) float64, added to
    reclaimed: Any,  # (n_machines, F) float64, added to
) -> None:
    total = np.zeros(len(steps))
    limit = 0.0
    for i in range(len(rows)):
        lo, hi = low[i], high[i]
        limit += hi
        unknown = np.isnan(_answer(bare, rows[i], steps[0], hi))
        for k in range(len(steps)):
            total[k] += guard(np.inf if unknown else _answer(bare, rows[i], steps[k], hi), lo, hi, False)
        t = snapshot[i]
        if i + 1 == len(rows) or snapshot[i + 1] != t:
            peak = oracle[t]
            some, spared = violations[machine[t]], reclaimed[machine[t]]
            for k in range(len(steps)):
                some[k] += violates_in_kernel(peak, total[k])
                spared[k] += limit - total[k]
            total[:] = 0.0
            limit = 0.0
