"""The margin and the guards around a bare estimate: the one place where a margin is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.training.estimators.base import CAP, JUMP, STARTUP, UNKNOWN, Estimate, Estimator, Wrapper

MARGIN_NAMES: Final = ("baseline", "medium", "aggressive")
"""Widest and safest first, as in Borg's experiment (EuroSys'15, Figure 12)."""

STARTUP_HOLD_S: Final = 300.0
"""How long a new task keeps its limit, in seconds, to let start-up transients pass (EuroSys'15, section 5.5)."""


@dataclass(frozen=True)
class Margin:
    """What is added to a prediction, as a share of it, per resource.

    Attributes
    ----------
    name : str
        One of ``MARGIN_NAMES``.
    share : tuple of float, in the order ``schema.RESOURCES``
        0.15 adds 15 %; below zero where the bare estimator is more careful than the budget asks.
    """

    name: str
    share: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.share) != len(RESOURCES):
            raise ConfigError(f"margin {self.name!r}: expected one share for each of {RESOURCES}, got {self.share}")
        for resource, share in zip(RESOURCES, self.share, strict=True):
            if not -1.0 <= share < float("inf"):
                raise ConfigError(f"margin {self.name!r}: the {resource} share must be at least -1, got {share}")


def three_margins(baseline: tuple[float, ...], aggressive: tuple[float, ...]) -> Mapping[str, Margin]:
    """Return the three named margins; ``medium`` is exactly half way between the other two."""
    medium = tuple((b + a) / 2 for b, a in zip(baseline, aggressive, strict=True))
    return {name: Margin(name, share) for name, share in zip(MARGIN_NAMES, (baseline, medium, aggressive), strict=True)}


class WithMargin(Wrapper):
    """Adds the margin to every reservation."""

    def __init__(self, base: Estimator, margin: Margin) -> None:
        super().__init__(base)
        self.margin = margin
        self._factor = 1.0 + np.array(margin.share)

    def adjust(self, estimate: Estimate, windows: Windows) -> Estimate:  # noqa: ARG002 - the margin knows no window
        """Multiply by one plus the margin."""
        return Estimate(estimate.reservation * self._factor, estimate.rule, estimate.forecast)


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
