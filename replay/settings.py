"""Settings of every comparison of estimators: the horizon, the budgets, the intervals; of replays, rows judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from reclaim.data.errors import ConfigError
from reclaim.features.targets import HORIZONS_S
from reclaim.training.estimators.registry import ESTIMATORS
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.value import Value

_MOST_DRAWS: Final = 100_000
"""Resamples beyond which an interval gains nothing, while the sums of all of them no longer fit in memory."""


@dataclass(frozen=True)
class ComparisonConfig:
    """Settings of every comparison of estimators."""

    horizon_s: int = 3_600
    """The horizon that a reservation must cover, in seconds; one of ``features.targets.HORIZONS_S``."""
    estimators: tuple[str, ...] = (
        "borg", "percentile", "max-nsigma-percentile", "moving-max", "autopilot-percentile", "vpa", "koordinator",
        "limit",
    )  # fmt: skip
    """Estimators without a model, by their names in ``training.estimators.registry``; learned ones come as bundles. By
    default Borg's, Resource Central's, the EuroSys'21 study's, Autopilot's, VPA's and Koordinator's."""
    tune: bool = True
    """Chooses the settings of each estimator without a model on validation rows, of its ``CANDIDATES``, for
    each budget and resource; else they are the published ones."""
    budgets: Budgets = field(default_factory=Budgets)
    """Shares of validation task-windows that may violate, for the baseline and the aggressive margin."""
    by_tier: bool = False
    """Makes each tier keep the budgets for itself, with a margin or price of its own."""
    value: Value = field(default_factory=Value)
    """Money instead of a budget, for learned estimators: what is reclaimed earns it, a violation costs it, and the
    price follows."""
    draws: int = 1_000
    """Bootstrap resamples behind each interval."""
    confidence: float = 0.95
    """Share of the resamples within an interval."""
    seed: int = 1
    """Seed of all random draws."""

    def __post_init__(self) -> None:
        if self.horizon_s not in HORIZONS_S:
            raise ConfigError(f"horizon_s must be one of {HORIZONS_S} seconds, got {self.horizon_s}")
        unknown = sorted(set(self.estimators) - set(ESTIMATORS))
        if unknown or len(set(self.estimators)) != len(self.estimators):
            known = ", ".join(sorted(ESTIMATORS))
            raise ConfigError(f"estimators must be different ones of {known}, got {', '.join(self.estimators)}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, got {self.seed}")
        if not 1 <= self.draws <= _MOST_DRAWS:
            raise ConfigError(f"draws must be between 1 and {_MOST_DRAWS}, got {self.draws}")
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence must be between 0 and 1, got {self.confidence}")


@dataclass(frozen=True)
class ReplayConfig(ComparisonConfig):
    """Settings of a replay."""

    judged_rows: int = 4_000_000
    """Approximate number of task-windows of the validation and the test period that are judged, at 2 kB of memory each:
    all where there are fewer, else all those of some machines, or of some tasks where no machine is known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.judged_rows < 1:
            raise ConfigError(f"judged_rows must be at least 1, got {self.judged_rows}")
