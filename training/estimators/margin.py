"""The margin and the guards around a bare estimate: the one place where a margin is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.training.estimators.base import CAP, JUMP, STARTUP, UNKNOWN, Estimate, Estimator, Wrapper

MARGIN_NAMES: Final = ("baseline", "medium", "aggressive")
"""Widest and safest first, as in Borg's experiment (EuroSys'15, Figure 12)."""

STARTUP_HOLD_S: Final = 300.0
"""How long a new task keeps its limit, in seconds, to let start-up transients pass (EuroSys'15, section 5.5)."""

_AGES_S: Final = (0.0, 7_200.0, 86_400.0)
MARGIN_GROUPS: Final = tuple(
    f"{tier}, {age}" for tier in TIER_LABELS for age in ("age unknown", "up to 2 h", "up to 24 h", "older")
)
"""Groups of tasks that may have a margin of their own: tier, and time since the run began."""


@dataclass(frozen=True)
class Margin:
    """What is added to a prediction, as a share of it, per resource.

    Attributes
    ----------
    name : str
    share : tuple of float, in the order ``schema.RESOURCES``
        0.15 adds 15 %; below zero where the bare estimator is more careful than the budget asks.
    by_group : tuple of tuple of float, or None
        The same for each of ``MARGIN_GROUPS``; None: ``share`` holds for all tasks.
    """

    name: str
    share: tuple[float, ...]
    by_group: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.by_group is not None and len(self.by_group) != len(MARGIN_GROUPS):
            raise ConfigError(f"margin {self.name!r}: expected {len(MARGIN_GROUPS)} groups, got {len(self.by_group)}")
        for shares in (self.share, *(self.by_group or ())):
            if len(shares) != len(RESOURCES):
                raise ConfigError(f"margin {self.name!r}: expected one share for each of {RESOURCES}, got {shares}")
            for resource, share in zip(RESOURCES, shares, strict=True):
                if not -1.0 <= share < float("inf"):
                    raise ConfigError(f"margin {self.name!r}: the {resource} share must be at least -1, got {share}")

    def factor(self, windows: Windows) -> NDArray[np.float64]:
        """Return what a prediction is multiplied with; float64, shape (n_resources,) or (n, n_resources)."""
        if self.by_group is None:
            return 1.0 + np.array(self.share)
        shares: NDArray[np.float64] = 1.0 + np.array(self.by_group)
        return shares[margin_group(windows)]


NO_MARGIN: Final = Margin("none", (0.0,) * len(RESOURCES))
"""Adds nothing."""


def margin_group(windows: Windows) -> NDArray[np.int64]:
    """Return the position in ``MARGIN_GROUPS`` of each row: its tier, and the time since its run began; shape (n,)."""
    age_s = np.where(windows.scheduled_us > 0, (windows.end_us - windows.scheduled_us) / 1e6, -1.0)
    return tier_key(windows.tier) * (len(_AGES_S) + 1) + np.searchsorted(_AGES_S, age_s)


def three_margins(baseline: Margin, aggressive: Margin) -> Mapping[str, Margin]:
    """Return the three named margins; ``medium`` is exactly half way between the other two."""
    groups = None
    if baseline.by_group is not None and aggressive.by_group is not None:
        groups = tuple(map(_half_way, baseline.by_group, aggressive.by_group))
    medium = Margin("medium", _half_way(baseline.share, aggressive.share), groups)
    return dict(zip(MARGIN_NAMES, (baseline, medium, aggressive), strict=True))


def _half_way(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple((x + y) / 2 for x, y in zip(a, b, strict=True))


def under(margin: str, bare: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return what is reserved under a named margin, given what those of ``baseline`` and ``aggressive`` come to.

    A wider margin never reserves less: the baseline is the larger of the two, and ``medium`` lies half way between.
    """
    aggressive = bare["aggressive"]
    baseline = np.maximum(bare["baseline"], aggressive)
    return {"baseline": baseline, "medium": (baseline + aggressive) / 2, "aggressive": aggressive}[margin]


class WithMargin(Wrapper):
    """Adds the margin to every reservation."""

    def __init__(self, base: Estimator, margin: Margin) -> None:
        super().__init__(base)
        self.margin = margin

    def adjust(self, estimate: Estimate, windows: Windows) -> Estimate:
        """Multiply by one plus the margin."""
        return Estimate(estimate.reservation * self.margin.factor(windows), estimate.rule, estimate.forecast)


class JumpOnViolation(Wrapper):
    """Never reserves less than the last window demanded (EuroSys'15: "rapidly increased if the usage exceeds it")."""

    def adjust(self, estimate: Estimate, windows: Windows) -> Estimate:
        """Raise to the demand of the row's own window, where that is more."""
        now = demand(windows)
        return estimate.where(now > estimate.reservation, now, JUMP)


class CapToLimit(Wrapper):
    """Never reserves more than the limit; a task of which nothing can be said gets its limit."""

    def adjust(self, estimate: Estimate, windows: Windows) -> Estimate:
        """Lower to the limit, or fill in the limit."""
        capped = estimate.where(estimate.reservation > windows.limit, windows.limit, CAP)
        return capped.where(np.isnan(capped.reservation), windows.limit, UNKNOWN)


class HoldAtStartup(Wrapper):
    """Holds the limit while the task's run is young.

    A task whose start nobody told of (``scheduled_us`` unknown) is not held: estimators answer with the limit, or from
    its siblings, until they have seen enough.
    """

    def __init__(self, base: Estimator, startup_s: float = STARTUP_HOLD_S) -> None:
        super().__init__(base)
        self.startup_s = startup_s

    def adjust(self, estimate: Estimate, windows: Windows) -> Estimate:
        """Answer with the limit where the run began less than ``startup_s`` ago."""
        age_us = windows.end_us - windows.scheduled_us
        young = (windows.scheduled_us > 0) & (age_us < self.startup_s * 1e6)
        return estimate.where(young[:, None] & ~np.isnan(windows.limit), windows.limit, STARTUP)


class Guarded(Wrapper):
    """Margin, jump, cap and start-up hold around a bare estimator: what is replayed and what is served."""

    def __init__(self, base: Estimator, margin: Margin) -> None:
        super().__init__(base)
        self.margin = margin
        self._chain = (WithMargin(base, margin), JumpOnViolation(base), CapToLimit(base), HoldAtStartup(base))

    def adjust(self, estimate: Estimate, windows: Windows) -> Estimate:
        """Apply the four in order; the later one wins."""
        for wrapper in self._chain:
            estimate = wrapper.adjust(estimate, windows)
        return estimate
