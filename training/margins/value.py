"""Defines the worth of reclaimed resources and the cost of a violation, from which the price of a violation follows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES


@dataclass(frozen=True)
class Value:
    """Money, in any currency; with it prices are known and need no budget."""

    core_hour: float | None = None
    """Money that one reclaimed unit of the trace's CPU, a core of most traces, earns in an hour; none: the budget sets
    the price of CPU."""
    memory_hour: float | None = None
    """Money that one reclaimed unit of the trace's memory earns in an hour; none: the budget sets the price of
    memory."""
    violation: float | None = None
    """Money that it costs when a task needs more than its reservation within the horizon."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, got {value}")
        if (self.violation is None) != (not self.known):
            raise ConfigError(
                "violation needs core_hour or memory_hour, and each of these needs it: a price is what a violation "
                "costs in reclaimed resources"
            )

    @property
    def hours(self) -> tuple[float | None, ...]:
        """Earnings of a reclaimed unit of each of ``schema.RESOURCES`` in an hour."""
        return self.core_hour, self.memory_hour

    @property
    def known(self) -> bool:
        """True if the price of some resource follows from it."""
        return any(hour is not None for hour in self.hours)

    def prices(self, mean_limit: tuple[float, ...], horizon_s: int) -> tuple[float, ...]:
        """Return the price of a violation by resource, in limits of a task of mean size; NaN where a budget sets it.

        It is ``violation / (core_hour * mean limit * horizon in hours)``. An answer holds for one window. A shortage
        violates all answers within whose horizon it lies, as many as a horizon has windows, so an answer's share of its
        cost and an answer's share of the horizon are the same.

        Raises
        ------
        ConfigError
            The mean limit is not known.
        """
        found = []
        for resource, hour, limit in zip(RESOURCES, self.hours, mean_limit, strict=True):
            if hour is None or self.violation is None:
                found.append(math.nan)
                continue
            if not limit > 0:
                raise ConfigError(
                    f"value: the mean limit of {resource} is unknown, so its price cannot be computed: train and "
                    "replay on one dataset that has limits, or give a budget"
                )
            found.append(self.violation / (hour * limit * horizon_s / 3_600))
        return tuple(found)
