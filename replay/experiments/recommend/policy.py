"""Makes a request from an estimator's answer by the settings: steps, floor, limit, out-of-memory, least change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import is_first
from reclaim.data.errors import ConfigError
from reclaim.data.schema import MEMORY_AT, RESOURCES
from reclaim.replay.experiments.recommend.decisions import Decisions
from reclaim.replay.experiments.recommend.series import Floats
from reclaim.replay.settings import ComparisonConfig
from reclaim.training.margins.violation import ROUNDING

RULES: Final = (
    "estimate", "floor", "limit", "out of memory", "small change", "unknown", "autoscaler", "no request", "over budget",
)  # fmt: skip
"""Rules that make a request.

``estimate``: the estimator's answer with its margin; ``floor``: the least request; ``limit``: a request may not pass
the limit; ``out of memory``: a task ended out of memory, so more than the limit that it had; ``small change``: the
answer is so near the present request that this one stays; ``unknown``: too little is known, so the present one stays;
``autoscaler``: a horizontal autoscaler scales on the request, so it stays; ``no request``: none is set, and nothing
was measured; ``over budget``: its own back-test, or that of all, violated so much that its request is not lowered.
"""
ESTIMATE, FLOOR, LIMIT, OOM, SMALL, UNKNOWN, AUTOSCALER, NONE, OVER = range(len(RULES))
_OF_A_LIMIT: Final = 1e-12
"""Rounding of a multiple of a limit, as a share. Answers are rounded more, to single precision."""
_STEPS: Final = (0.001, 2.0**20)
"""Requests in Kubernetes are whole millicores and mebibytes."""
_LEAST: Final = (0.01, 100e6)
"""Least recommendation of Robusta's KRR, in cores and bytes: its ``--cpu-min 10`` (millicores) and ``--mem-min 100``
(megabytes). VPA's, 25 millicores and 250 MiB, are of a whole pod."""
_OOM_BUMP_BYTES: Final = 100 * 2.0**20
"""Least raise after an end out of memory of VPA's recommender, its ``--oom-min-bump-up-bytes``."""


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
    history_days, ran_hours : float
        Days since its first window, and hours of windows, below which a workload's request is not lowered.
    oom_bump : float
        Factor of the memory at which a task ended out of memory.
    oom_bump_by : float
        Least addition to it, in the dataset's unit.
    largest_memory : float
        Memory of the largest machine, the most that a task can have; NaN unknown.
    """

    least: tuple[float, ...]
    step: tuple[float, ...]
    min_change: float
    history_days: float
    ran_hours: float
    oom_bump: float
    oom_bump_by: float
    largest_memory: float

    def after_kill(self, limit: Floats) -> Floats:
        """Return the least memory request after an end out of memory at a limit, in whole steps; NaN for none.

        A request above the largest machine would never be placed.
        """
        wanted = self._whole(np.maximum(limit * self.oom_bump, limit + self.oom_bump_by), MEMORY_AT, _OF_A_LIMIT)
        most = self._whole_below(np.asarray(self.largest_memory), MEMORY_AT)
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
            killed = self.after_kill(decisions.killed_at) if r == MEMORY_AT else none
            wanted, why = self._wanted(answer[:, r], self._most(decisions, r), killed, r)
            young = (decisions.age_days < self.history_days) | (decisions.ran_hours < self.ran_hours)
            for at in np.split(np.arange(len(decisions)), edges):
                before = decisions.before[at]
                present = np.where(before < 0, decisions.request[at, r], request[before, r])
                request[at, r], rule[at, r] = self._set(
                    wanted[at], why[at], present, killed[at], young[at], withheld[at, r]
                )
        return request, rule

    def _most(self, decisions: Decisions, resource: int) -> Floats:
        """Return the most that may be requested: the enforced limit; where there is none, the limit or the floor.

        A limit that the dataset assumed, such as 0.0625 cores, may be no whole number of steps: it is rounded down.
        """
        enforced, whole = decisions.enforced[:, resource], self._whole_below(decisions.limit[:, resource], resource)
        return np.where(np.isnan(enforced), np.maximum(whole, self._least(resource)), enforced)

    def _least(self, resource: int) -> float:
        return float(self._whole(np.array(self.least[resource]), resource))

    def _wanted(self, answer: Floats, limit: Floats, killed: Floats, resource: int) -> tuple[Floats, NDArray[np.int64]]:
        """Return the requests regardless of the current ones, NaN unknown; shape (n,) each."""
        rule = np.full(len(answer), ESTIMATE)  # for an unknown one it depends on the current request
        wanted, least = self._whole(answer, resource), self._least(resource)
        rule = np.where(wanted < least, FLOOR, rule)
        wanted = np.where(wanted < least, least, wanted)
        rule = np.where(wanted > limit, LIMIT, rule)
        wanted = np.where(wanted > limit, limit, wanted)
        more = np.isfinite(killed) & ~(wanted >= killed)
        return np.where(more, killed, wanted), np.where(more, OOM, rule)

    def _set(
        self, wanted: Floats, rule: NDArray[np.int64], present: Floats, killed: Floats, young: NDArray[np.bool_],
        withheld: NDArray[np.bool_],
    ) -> tuple[Floats, NDArray[np.int64]]:  # fmt: skip
        """Return the requests that replace the current ones; shape (n,) each."""
        small = (np.abs(wanted - present) < self.min_change * present) & ~(present < killed)
        rule = np.where(small, SMALL, rule)
        rule = np.where(young & (wanted < present), UNKNOWN, rule)
        rule = np.where(np.isnan(wanted), np.where(np.isnan(present), NONE, UNKNOWN), rule)
        rule = np.where(withheld & np.isfinite(present), AUTOSCALER, rule)
        return np.where(np.isin(rule, (ESTIMATE, FLOOR, LIMIT, OOM)), wanted, present), rule

    def _whole(self, amount: Floats, resource: int, rounding: float = ROUNDING) -> Floats:
        """Return amounts rounded up to whole steps; one that is whole apart from rounding, a share, stays."""
        step = self.step[resource]
        if not step:
            return amount
        # 9 * 0.001 is 0.009000000000000001, which the API server rounds up to 10 millicores
        return np.asarray(np.ceil(amount / step * (1 - rounding)) / (1 / step))

    def _whole_below(self, limit: Floats, resource: int) -> Floats:
        """Return limits rounded down to whole steps."""
        step = self.step[resource]
        return np.asarray(np.floor(limit / step * (1 + _OF_A_LIMIT)) / (1 / step)) if step else limit


@dataclass(frozen=True)
class RecommendConfig(ComparisonConfig):
    """Settings of the recommendation."""

    horizon_s: int = 86_400
    """The horizon of learned estimators, in seconds; a request holds for a day or longer."""
    estimators: tuple[str, ...] = (
        "krr", "vpa", "koordinator", "autopilot-percentile", "percentile", "max-so-far", "moving-max", "seasonal",
    )  # fmt: skip
    """Estimators without a model, by their names in ``training.estimators.registry``: Robusta's KRR, Kubernetes' VPA,
    Koordinator's, Autopilot's, a percentile, the largest so far, that of the last windows, and of the same hour."""
    cpu_margin: str = "aggressive"
    """Margin whose budget CPU requests keep, ``baseline`` or ``aggressive``: CPU that is short slows a task down."""
    memory_margin: str = "baseline"
    """Margin whose budget memory requests keep: a task above its request is among the first to be evicted."""
    hold_days: float = 1.0
    """Days for which a request holds until it is set again."""
    min_change: float = 0.10
    """Least change, as a share of the present request; below it the request stays."""
    cpu_min: float | None = None
    """Least CPU request, in the dataset's unit; none: 0.01 cores for Kubernetes (KRR's), 0 elsewhere."""
    memory_min: float | None = None
    """Least memory request, in the dataset's unit; none: 100 MB for Kubernetes (KRR's), 0 elsewhere."""
    oom_bump: float = 1.2
    """Factor of the memory limit at which a task ended out of memory: the request is at least that product (VPA's
    rule), and, in Kubernetes, at least 100 MiB more than that limit."""
    history_days: float = 1.0
    """Days since a workload's first window below which its requests are not lowered; they may be raised."""
    ran_hours: float = 2.0
    """Hours of windows below which they are not lowered either: a job that ran once, for minutes, says too little. KRR
    asks for 100 points, which are two hours at its step of 75 s."""
    most_over: float = 10.0
    """Times the budget: a request is not lowered where the back-test of its own workload violates more often than this,
    beyond the noise; in a back-test of under four days, of which too little noise is known, the rate itself counts. The
    budget holds for all workloads together, so one of them may be far above it."""
    most_over_in_all: float = 2.0
    """Times the budget: no request of a resource is lowered where all workloads together violated more often than this
    in the back-test, and more often than the budget beyond the noise. The chosen settings do not hold there."""
    seen_days: float = 7.0
    """Days before the end of the history in which a task of the workload must have run."""
    anonymise: bool = False
    """Replaces the names of workloads and of the dataset by numbers, so that the files can be shared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cpu_margin", "memory_margin"):
            if self.budgets.of(getattr(self, name)) is None:
                raise ConfigError(f"{name} must be baseline or aggressive, got {getattr(self, name)!r}")
        for name, least in (
            ("hold_days", 1 / 24),
            ("seen_days", 0.0),
            ("history_days", 0.0),
            ("ran_hours", 0.0),
            ("oom_bump", 1.0),
            ("most_over", 1.0),
            ("most_over_in_all", 1.0),
        ):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be at least {least:.4g}, got {getattr(self, name)}")
        if not 0 <= self.min_change < 1:
            raise ConfigError(f"min_change must be 0 or more and less than 1, got {self.min_change}")
        for name in ("cpu_min", "memory_min"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not self.estimators:
            raise ConfigError("estimators must name one at least")

    @property
    def margins(self) -> tuple[str, ...]:
        """Name of the margin of each resource."""
        return self.cpu_margin, self.memory_margin

    @property
    def of_requests(self) -> tuple[float, ...]:
        """Budget of each resource."""
        return tuple(float(self.budgets.of(margin) or 0.0) for margin in self.margins)

    def policy(self, *, kubernetes: bool, largest_memory: float) -> Policy:
        """Return the rules for an estimator's answer, in the units of a dataset with machines up to a memory."""
        least = _LEAST if kubernetes else (0.0, 0.0)
        given = zip((self.cpu_min, self.memory_min), least, strict=True)
        return Policy(
            least=tuple(default if own is None else own for own, default in given),
            step=_STEPS if kubernetes else (0.0, 0.0),
            min_change=self.min_change,
            history_days=self.history_days,
            ran_hours=self.ran_hours,
            oom_bump=self.oom_bump,
            oom_bump_by=_OOM_BUMP_BYTES if kubernetes else 0.0,
            largest_memory=largest_memory,
        )


def held_back(
    requests: Floats, rules: NDArray[np.int64], present: Floats, kept: NDArray[np.bool_], why: int
) -> tuple[Floats, NDArray[np.int64]]:
    """Return requests and rules in which no request that ``kept`` marks is below the current one; all of one shape."""
    held = kept & (requests < present)
    return np.where(held, present, requests), np.where(held, why, rules)
