"""Compares estimators at each budget: what one reclaims there, less what another does, in the same resamples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.replay.equal_violation.curves import JudgedUnits, draw_curve
from reclaim.replay.equal_violation.sweep import Bare, Guards, TaskRows
from reclaim.replay.open_loop.bootstrap import LEAST_KNOWN, Bootstrap, bounds
from reclaim.replay.open_loop.history import window_seconds
from reclaim.replay.open_loop.paired import Comparison, Difference, Interval
from reclaim.replay.open_loop.period import Period
from reclaim.training.margins.answers import Answers
from reclaim.training.margins.margin import Budgets

Floats = NDArray[np.float64]

EQUAL_DEFINITION: Final = (
    "The same comparison where both violate exactly the budget: at the one margin or price of all tasks and tiers at "
    "which the test rows come to it, found again in each resample. No service can set it. Resamples in which a curve "
    f"does not reach the budget are left out; of fewer than {LEAST_KNOWN:.0%} there is no interval and no verdict."
)
_ALIKE: Final = Interval(0.0, 0.0, 0.0)
"""Difference of violation rates that are equal by design."""


@dataclass(frozen=True)
class SweptPeriod:
    """The test rows of a period, laid out for the sweeps of all estimators, and what they are judged on.

    Attributes
    ----------
    rows : TaskRows
    units : tuple of JudgedUnits, one for each resource
    margins : tuple of str
        Names of the budgets, in the order of the rates of ``units``.
    """

    rows: TaskRows
    units: tuple[JudgedUnits, ...]
    margins: tuple[str, ...]

    @classmethod
    def lay_out(cls, period: Period, budgets: Budgets, bootstrap: Bootstrap) -> Self:
        """Lay out the test rows of a period, its collections as units."""
        history = period.history
        return cls.of_rows(history.windows, history.target, period.rows, period.unit, budgets, bootstrap)

    @classmethod
    def of_rows(
        cls, windows: Windows, target: Floats, rows: NDArray[np.int64], unit: NDArray[np.int64], budgets: Budgets,
        bootstrap: Bootstrap,
    ) -> Self:  # fmt: skip
        """Lay out some rows of windows, whose targets are shares of the limit; ``unit`` is of these rows, from 0."""
        of, n_units = asdict(budgets), int(unit.max(initial=-1)) + 1
        rows_of = TaskRows.lay_out(rows, Guards.from_windows(windows), target, window_seconds(windows), unit, n_units)
        totals, rates = rows_of.totals(), tuple(of.values())
        units = tuple(JudgedUnits.from_totals(totals[..., r], rates, bootstrap) for r in range(len(RESOURCES)))
        return cls(rows_of, units, tuple(of))

    def reclaimed(self, answers: Answers) -> dict[str, Floats]:
        """Return what an estimator reclaims at each budget, by its name: of all units, then of each resample.

        Shape (1 + draws, n_resources) each, shares of the limits; NaN where the curve does not reach the budget.
        """
        sweeps = [self.rows.sweep(one) for one in Bare.of(answers)]
        at = np.stack(
            [
                draw_curve([(v[..., r], spared[..., r]) for v, spared in sweeps], of).at
                for r, of in enumerate(self.units)
            ],
            axis=-1,
        )
        return dict(zip(self.margins, at, strict=True))


@dataclass(frozen=True)
class EqualViolation:
    """Estimators at one budget.

    Attributes
    ----------
    reclaimed : mapping of name to float64, shape (1 + draws, n_resources)
        As ``SweptPeriod.reclaimed`` gives it, of the same units and resamples.
    confidence : float
        Share of the resamples within an interval.
    """

    reclaimed: Mapping[str, Floats]
    confidence: float

    def compare(self, name: str, against: str, resource: int) -> Comparison:
        """Return the comparison of an estimator with another."""
        values = self.reclaimed[name][:, resource] - self.reclaimed[against][:, resource]
        gained = Interval(float(values[0]), *bounds(values[1:], self.confidence))
        return Comparison(against, Difference(gained, _ALIKE), gained.verdict)

    def compare_best(self, name: str, others: Sequence[str], resource: int) -> Comparison | None:
        """Return the comparison with the one of the others that reclaims most; None where none reaches the budget."""
        values = {o: of[0, resource] for o in others if o != name and (of := self.reclaimed.get(o)) is not None}
        known = {other: value for other, value in values.items() if np.isfinite(value)}
        if name not in self.reclaimed or not known:
            return None
        return self.compare(name, max(known, key=lambda other: float(known[other])), resource)
