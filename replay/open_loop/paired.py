"""Compares estimators by the paired bootstrap: both are resampled on the same units, and subtracted.

Two estimators err on the same task-windows, so their difference is far less uncertain than either of them (Efron and
Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 16).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.replay.open_loop.bootstrap import FEWEST, Bootstrap, bounds, reported, resampled_sums
from reclaim.replay.open_loop.metrics import METRICS, POSITION
from reclaim.replay.open_loop.rows import ratio

RECLAIMED: Final = "reclaimed_share"
VIOLATION: Final = "violation_rate"

USUAL: Final = Bootstrap(draws=1_000, seed=1, confidence=0.95)
"""Resampling for comparisons of recorded replays that were run with different ones."""

BETTER: Final = "better"
WORSE: Final = "worse"
NOISE: Final = "within the noise"
MORE: Final = "more of both"
LESS: Final = "less of both"
EXCEEDS: Final = "exceeds the budget"
ALONE: Final = "alone within the budget"
UNKNOWN: Final = "unknown"
"""Verdicts, by what lies beyond the noise.

At a budget: ``exceeds the budget`` where the contender violates more than it. Of two that keep it, ``better`` is the
one that reclaims more. ``alone within the budget``: the contender keeps it and the other does not.

Without a budget: ``better`` and ``worse`` where one of reclaimed share and violation rate is, and the other is not the
other way. ``more of both`` and ``less of both``: it reclaims more and violates more, or less and less, so that a
margin, not the estimator, makes the difference.

``unknown``: nothing was measured, or a single collection, which has no noise to compare with."""
VERDICT_DEFINITION: Final = (
    "Better or worse: of two estimators that keep the budget, the contender reclaims more or less, by more than the "
    "noise. Exceeds the budget: it violates more than the budget, by more than the noise, whatever it reclaims. Alone "
    "within the budget: the other one does. An estimator is compared with the statistical one that reclaims most of "
    "those that keep the budget. Under the medium margin, which has no budget, it is compared with the one that "
    "reclaims most of those that do not violate more. Where there is none such, it is compared with the one that "
    "violates least. Under the medium margin it can be more (less) of both: it reclaims more (less) and "
    "violates more (less), so that a margin, not the estimator, makes the difference."
)


@dataclass(frozen=True)
class Interval:
    """A number and the bounds of its interval; NaN unknown, the bounds where too few units were measured, too."""

    value: float
    low: float
    high: float

    def report(self) -> dict[str, float | None]:
        """Return it for ``results.json``."""
        return reported(self.value, self.low, self.high)

    @property
    def sign(self) -> int:
        """1 or -1 where the whole interval lies above or below 0, else 0."""
        return int(self.low > 0) - int(self.high < 0)

    @property
    def known(self) -> bool:
        """True if value and bounds are known."""
        return all(map(math.isfinite, (self.value, self.low, self.high)))

    @property
    def verdict(self) -> str:
        """Verdict on more of it, beyond the noise: ``BETTER``, ``WORSE``, ``NOISE`` or ``UNKNOWN``."""
        return {1: BETTER, -1: WORSE, 0: NOISE}[self.sign] if self.known else UNKNOWN


@dataclass(frozen=True)
class Difference:
    """Difference of two estimators, of one resource.

    Attributes
    ----------
    reclaimed, violation : Interval
        Of reclaimed share and of violation rate, as fractions of one.
    """

    reclaimed: Interval
    violation: Interval

    @property
    def verdict(self) -> str:
        """The verdict without a budget: one of ``BETTER``, ``WORSE``, ``NOISE``, ``MORE``, ``LESS``, ``UNKNOWN``."""
        if not (self.reclaimed.known and self.violation.known):
            return UNKNOWN
        more, worse = self.reclaimed.sign, self.violation.sign
        if more and more == worse:
            return MORE if more > 0 else LESS
        gain = more - worse
        return NOISE if gain == 0 else BETTER if gain > 0 else WORSE


@dataclass(frozen=True)
class Comparison:
    """A contender compared with an opponent, of one resource."""

    against: str
    difference: Difference
    verdict: str

    def report(self) -> dict[str, Any]:
        """Return it for ``results.json``."""
        return {
            "against": self.against,
            "verdict": self.verdict,
            RECLAIMED: self.difference.reclaimed.report(),
            VIOLATION: self.difference.violation.report(),
        }


class Paired:
    """Estimators resampled on the same units.

    Parameters
    ----------
    unit_sums : mapping of name to float64, shape (n_units, len(STATS), n_resources)
        As ``metrics.sums`` gives them with the unit as key; the same units, in the same order, for all.
    how : Bootstrap
    """

    def __init__(self, unit_sums: Mapping[str, NDArray[np.float64]], how: Bootstrap = USUAL) -> None:
        self.names = list(unit_sums)
        if not self.names:
            return
        ratios = [METRICS[RECLAIMED], METRICS[VIOLATION]]
        needed = [POSITION[stat] for ratio in ratios for stat in (ratio.numerator, ratio.denominator)]
        stacked = np.stack([unit_sums[name][:, needed] for name in self.names], axis=1)  # (U, E, 4, R)
        self._point = _ratios(stacked.sum(axis=0))
        drawn = resampled_sums(stacked.reshape(len(stacked), -1), draws=how.draws, seed=how.seed)
        enough = np.count_nonzero(stacked[:, :, 1::2], axis=0) >= FEWEST  # (E, 2, R)
        self._draws = np.where(enough, _ratios(drawn.reshape(how.draws, *stacked.shape[1:])), np.nan)  # (D, E, 2, R)
        self._confidence = how.confidence

    def value(self, name: str, resource: int) -> float:
        """Return the reclaimed share of one estimator."""
        return float(self._point[self.names.index(name), 0, resource])

    def violation(self, name: str, resource: int) -> float:
        """Return the violation rate of one estimator."""
        return float(self._point[self.names.index(name), 1, resource])

    def difference(self, name: str, against: str, resource: int) -> Difference:
        """Return the values of ``name`` minus those of ``against``."""
        one, other = self.names.index(name), self.names.index(against)
        intervals = []
        for metric in range(2):
            draws = self._draws[:, one, metric, resource] - self._draws[:, other, metric, resource]
            value = self._point[one, metric, resource] - self._point[other, metric, resource]
            intervals.append(Interval(float(value), *bounds(draws, self._confidence)))
        return Difference(*intervals)

    def keeps(self, name: str, resource: int, budget: float) -> bool:
        """Return whether an estimator violates no more than a budget, or more by no more than the noise."""
        point, draws = (of[..., self.names.index(name), 1, resource] for of in (self._point, self._draws))
        low, _ = bounds(draws, self._confidence)
        return bool((point if math.isnan(low) else low) <= budget)

    def best_against(self, name: str, others: Sequence[str], resource: int, budget: float | None = None) -> str | None:
        """Return the opponent to measure ``name`` by: the one that reclaims most of those that keep the budget.

        Without a budget, of those that do not violate more than ``name``, beyond the noise. Where there are none such,
        the one that violates least; None where there is no other.
        """
        rivals = [other for other in others if other != name]
        if budget is None:
            fair = [other for other in rivals if self.difference(other, name, resource).violation.sign <= 0]
        else:
            fair = [other for other in rivals if self.keeps(other, resource, budget)]
        if fair:
            return max(fair, key=lambda other: self.value(other, resource))
        return min(
            rivals, key=lambda other: (self.violation(other, resource), -self.value(other, resource)), default=None
        )

    def compare(self, name: str, against: str, resource: int, budget: float | None = None) -> Comparison:
        """Return the comparison of ``name`` with another, at a budget where there is one: the rule of all verdicts."""
        difference = self.difference(name, against, resource)
        verdict = difference.verdict
        if budget is not None and verdict != UNKNOWN:
            if not self.keeps(name, resource, budget):
                verdict = EXCEEDS
            elif not self.keeps(against, resource, budget):
                verdict = ALONE
            else:
                verdict = difference.reclaimed.verdict
        return Comparison(against, difference, verdict)

    def compare_best(
        self, name: str, others: Sequence[str], resource: int, budget: float | None = None
    ) -> Comparison | None:
        """Return the comparison of ``name`` with the opponent of ``best_against``; None where there is none."""
        against = self.best_against(name, others, resource, budget)
        return None if against is None else self.compare(name, against, resource, budget)


def _ratios(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return numerators over denominators; from shape (..., 4, n_resources) to (..., 2, n_resources), NaN for none."""
    return ratio(sums[..., 0::2, :], sums[..., 1::2, :])
