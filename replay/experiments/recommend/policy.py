"""Makes a request of an estimator's answer: whole steps, the floor, the limit, out-of-memory ends, the least change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import is_first
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiments.recommend.decisions import Decisions
from reclaim.replay.experiments.recommend.series import Floats
from reclaim.training.margins.violation import ROUNDING

RULES: Final = (
    "estimate", "floor", "limit", "out of memory", "small change", "unknown", "autoscaler", "no request", "over budget",
)  # fmt: skip
"""Rules that make a request.

``estimate``: the estimator's answer with its margin; ``floor``: the least request; ``limit``: a request may not pass
the limit; ``out of memory``: a task ended out of memory, so more than the limit that it had; ``small change``: the
answer is so near the present request that this one stays; ``unknown``: too little is known, so the present one stays;
``autoscaler``: a horizontal autoscaler scales on the request, so it stays; ``no request``: none is set, and nothing
was measured; ``over budget``: the workload's own back-test violated so much that its request is not lowered.
"""
ESTIMATE, FLOOR, LIMIT, OOM, SMALL, UNKNOWN, AUTOSCALER, NONE, OVER = range(len(RULES))
_OF_A_LIMIT: Final = 1e-12
"""Rounding of a multiple of a limit, as a share. Answers are rounded more, to single precision."""
_MEMORY: Final = RESOURCES.index("memory")


@dataclass(frozen=True)
class Policy:
    """Rules that an answer goes through.

    Attributes
    ----------
    least : tuple of float, in the order ``schema.RESOURCES``
        Least request, in the dataset's unit; 0 for none.
    step : tuple of float
        Requests are whole multiples of it, rounded up; 0 leaves them as they are.
    min_change : float
        Share of the present request below which a change is not worth it.
    history_days : float
        Days of history below which a request is not lowered.
    oom_bump : float
        What the memory is multiplied with at which a task ended out of memory.
    oom_bump_by : float
        What is added to it at least, in the dataset's unit.
    largest_memory : float
        Memory of the largest machine, which no task can have more of; NaN unknown.
    """

    least: tuple[float, ...]
    step: tuple[float, ...]
    min_change: float
    history_days: float
    oom_bump: float
    oom_bump_by: float
    largest_memory: float

    def after_kill(self, limit: Floats) -> Floats:
        """Return the least memory request after an end out of memory at a limit, in whole steps; NaN for none.

        A request above the largest machine would never be placed.
        """
        wanted = self._whole(np.maximum(limit * self.oom_bump, limit + self.oom_bump_by), _MEMORY, _OF_A_LIMIT)
        step = self.step[_MEMORY]
        most = np.floor(self.largest_memory / step) * step if step else self.largest_memory
        return np.where(wanted > most, most, wanted)

    def requests(
        self, answer: Floats, decisions: Decisions, withheld: NDArray[np.bool_]
    ) -> tuple[Floats, NDArray[np.int64]]:
        """Return the requests that are set, and the rule that made each; shape (n, n_resources) each.

        Parameters
        ----------
        answer : float64, shape (n, n_resources)
            Of an estimator, its margin within; NaN unknown.
        decisions : Decisions
            In the order of time: a small change is measured from the request that was set before.
        withheld : bool, shape (n, n_resources)
            Whether an autoscaler uses the request.
        """
        request, rule = np.empty(answer.shape), np.empty(answer.shape, np.int64)
        edges = np.flatnonzero(is_first(decisions.time_us, decisions.period))[1:]
        for r in range(len(RESOURCES)):
            none = np.full(len(decisions), np.nan)
            killed = self.after_kill(decisions.killed_at) if r == _MEMORY else none
            wanted, why = self._wanted(answer[:, r], self._most(decisions, r), killed, r)
            for at in np.split(np.arange(len(decisions)), edges):
                before = decisions.before[at]
                present = np.where(before < 0, decisions.request[at, r], request[before, r])
                request[at, r], rule[at, r] = self._set(
                    wanted[at], why[at], present, killed[at], decisions.age_days[at], withheld[at, r]
                )
        return request, rule

    def _most(self, decisions: Decisions, resource: int) -> Floats:
        """Return the most that may be requested: the enforced limit; where there is none, the limit or the floor."""
        enforced, limit = decisions.enforced[:, resource], decisions.limit[:, resource]
        return np.where(np.isnan(enforced), np.maximum(limit, self._least(resource)), enforced)

    def _least(self, resource: int) -> float:
        return float(self._whole(np.array(self.least[resource]), resource))

    def _wanted(self, answer: Floats, limit: Floats, killed: Floats, resource: int) -> tuple[Floats, NDArray[np.int64]]:
        """Return what would be requested whatever is requested now, NaN unknown; shape (n,) each."""
        rule = np.where(np.isnan(answer), UNKNOWN, ESTIMATE)
        wanted, least = self._whole(answer, resource), self._least(resource)
        rule = np.where(wanted < least, FLOOR, rule)
        wanted = np.where(wanted < least, least, wanted)
        rule = np.where(wanted > limit, LIMIT, rule)
        wanted = np.where(wanted > limit, limit, wanted)
        more = np.isfinite(killed) & ~(wanted >= killed)
        return np.where(more, killed, wanted), np.where(more, OOM, rule)

    def _set(
        self, wanted: Floats, rule: NDArray[np.int64], present: Floats, killed: Floats, age_days: Floats,
        withheld: NDArray[np.bool_],
    ) -> tuple[Floats, NDArray[np.int64]]:  # fmt: skip
        """Return the requests that are set in place of the present ones; shape (n,) each."""
        small = (np.abs(wanted - present) < self.min_change * present) & ~(present < killed)
        rule = np.where(small, SMALL, rule)
        rule = np.where((age_days < self.history_days) & (wanted < present), UNKNOWN, rule)
        rule = np.where(np.isnan(wanted), np.where(np.isnan(present), NONE, UNKNOWN), rule)
        rule = np.where(withheld & np.isfinite(present), AUTOSCALER, rule)
        return np.where(np.isin(rule, (ESTIMATE, FLOOR, LIMIT, OOM)), wanted, present), rule

    def _whole(self, amount: Floats, resource: int, rounding: float = ROUNDING) -> Floats:
        """Return amounts rounded up to whole steps; what is a whole number but for rounding, a share, stays."""
        step = self.step[resource]
        return np.ceil(amount / step * (1 - rounding)) * step if step else amount


def held_back(
    requests: Floats, rules: NDArray[np.int64], present: Floats, over: NDArray[np.bool_]
) -> tuple[Floats, NDArray[np.int64]]:
    """Return requests and rules of which none that ``over`` marks is lower than the present one; all of one shape."""
    held = over & (requests < present)
    return np.where(held, present, requests), np.where(held, OVER, rules)
