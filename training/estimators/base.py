"""What an estimator is: windows in, a reservation per row out; the same object in replay and behind HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows

RULES: Final = ("limit", "model", "statistic", "startup", "jump", "cap", "unknown")
"""Which rule made a reservation.

``limit``: it is the limit by policy; ``model``: a learned prediction plus margin; ``statistic``: a statistical
estimate plus margin; ``startup``: the limit is held at first; ``jump``: usage passed the estimate; ``cap``: the
estimate passed the limit; ``unknown``: nothing is known of the task yet, so it keeps its limit.
"""
LIMIT, MODEL, STATISTIC, STARTUP, JUMP, CAP, UNKNOWN = range(len(RULES))


@dataclass(frozen=True)
class Forecast:
    """What a learned estimator foresees, for the caller who wants more than the reservation.

    Attributes
    ----------
    quantiles : float64, shape (n, n_targets, n_horizons, n_levels)
        Over the limit; targets in the order ``features.targets.TARGETS``, non-decreasing along the last axis.
    oom_probability : float64, shape (n, n_horizons)
        Probability of the derived out-of-memory label within each horizon.
    """

    quantiles: NDArray[np.float64]
    oom_probability: NDArray[np.float64]

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Forecast:
        """Return the chosen rows."""
        return Forecast(self.quantiles[rows], self.oom_probability[rows])


@dataclass(frozen=True)
class Estimate:
    """The answer for ``n`` rows.

    Attributes
    ----------
    reservation : float64, shape (n, n_resources), unit of the limit
        In force from the row's ``end_us`` until the task's next window. NaN only where the limit is unknown.
    rule : uint8, shape (n, n_resources)
        Position in ``RULES``.
    forecast : Forecast or None
        None from estimators that make none.
    """

    reservation: NDArray[np.float64]
    rule: NDArray[np.uint8]
    forecast: Forecast | None = None

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Estimate:
        """Return the chosen rows."""
        forecast = None if self.forecast is None else self.forecast.take(rows)
        return Estimate(self.reservation[rows], self.rule[rows], forecast)

    def where(self, mask: NDArray[np.bool_], reservation: NDArray[np.float64], rule: int) -> Estimate:
        """Return a copy in which the masked entries, shape (n, n_resources), are replaced under the given rule."""
        return replace(
            self,
            reservation=np.where(mask, reservation, self.reservation),
            rule=np.where(mask, np.uint8(rule), self.rule),
        )


class Estimator(ABC):
    """A fold over a task's windows: each row's answer rests on that row and the task's earlier rows alone.

    State lives in the estimator, in one slot per task; a slot number is the caller's name for a task. How a history
    is cut into calls makes no difference, to the bit.
    """

    @abstractmethod
    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row, from 0; new numbers make room for themselves.
        windows : Windows
            ``n`` rows, those of one task in time order; never changed.
        """


class Wrapper(Estimator):
    """An estimator around an estimator that changes each answer by a pure function of the answer and its row."""

    def __init__(self, base: Estimator) -> None:
        self.base = base

    @abstractmethod
    def adjust(self, estimate: Estimate, windows: Windows) -> Estimate:
        """Return the changed answers; remembers nothing, so a replay may apply many to one base run."""

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows, ask the base, adjust what it says."""
        return self.adjust(self.base.update(slot, windows), windows)


def room_for(state: NDArray[Any], slot: NDArray[np.int64]) -> NDArray[Any]:
    """Return ``state`` with at least ``max(slot) + 1`` rows, doubling; new rows are zero."""
    need = int(slot.max()) + 1 if len(slot) else 0
    if need <= len(state):
        return state
    grown = np.zeros((max(need, 2 * len(state)), *state.shape[1:]), state.dtype)
    grown[: len(state)] = state
    return grown
