"""Predictors of a machine's peak, the largest usage of all that runs on it now, as in EuroSys'21.

"Take it to the Limit: Peak Prediction-driven Resource Overcommitment in Datacenters" (Bashir et al., EuroSys'21)
predicts for each machine and time the largest usage to come of the tasks that are there; its simulator is the reference
for what follows, and these agree with it. One resource at a time; usage and limit in any unit that they share.

A **snapshot** is all that a machine ran at one time. History is counted in snapshots, not in seconds. A task that is
missing from one has left: its history is dropped, and begins again should it come back. Usage counts up to its
limit of that time. A task is cold, and counts with its limit, until it has been there for ``warm_up`` snapshots in
a row (two at least: the simulator does not look at a task in its first).

Left out: Koordinator's predictors of machines, which need each task's priority class and the system's own usage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.replay.machine_peaks.kernels import (
    add_histories,
    mean_and_sigmas,
    moving_percentiles,
    percentiles,
    so_far,
)
from reclaim.training.machines.samples import TaskSamples

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MachineSamples(TaskSamples):
    """Samples of one machine, with what predictors share of them."""

    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def warm(self, warm_up: int) -> NDArray[np.bool_]:
        """Return which samples are of warm tasks, shape (n,)."""
        return self.age >= max(warm_up, 2)

    def peak(self, predictor: Predictor) -> Floats:
        """Return the predicted peak of each snapshot, shape (T,); NaN where undefined. Computed once."""
        if predictor not in self._known:
            self._known[predictor] = predictor.peak(self)
        known: Floats = self._known[predictor]
        return known

    def ratios(self, history: int, warm_up: int) -> tuple[Floats, NDArray[np.int64]]:
        """Return usage over limit of the warm tasks together over the last snapshots, and of how many there is one.

        Shapes (T, history), the newest last, and (T,): only so many at the end of a row say something. A task that was
        not yet there is left out of both sums; 0 where no limit is left. Computed once.
        """
        key = ("ratios", history, warm_up)
        if key not in self._known:
            shape = len(self.times_us), history
            usage, limit, counts = np.zeros(shape), np.zeros(shape), np.zeros(len(self.times_us), np.int64)
            add_histories(self.snapshot, self.age, self.warm(warm_up), self.capped, self.limit, usage, limit, counts)
            np.divide(usage, limit, out=usage, where=limit > 0)
            self._known[key] = usage, counts
        ratios: tuple[Floats, NDArray[np.int64]] = self._known[key]
        return ratios


class Predictor(ABC):
    """Predicts a machine's peak; frozen and comparable, so that equal ones are computed once."""

    @abstractmethod
    def peak(self, samples: MachineSamples) -> Floats:
        """Return the predicted peak of each snapshot, shape (T,); NaN where undefined."""


def _check_history(history: int, warm_up: int, least: int = 1) -> None:
    if history < least or warm_up < 1:
        raise ConfigError(f"expected history >= {least} and warm_up >= 1, got {history=}, {warm_up=}")


def _check_percentile(percentile: float) -> None:
    if not 0 <= percentile <= 100:
        raise ConfigError(f"percentile must be between 0 and 100, got {percentile}")


@dataclass(frozen=True)
class Limit(Predictor):
    """The sum of the limits: no overcommitment."""

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        return samples.total(samples.limit)


@dataclass(frozen=True)
class FixedShare(Predictor):
    """A share of the sum of the limits ("borg-default"; 0.9 in EuroSys'21, 1 / 1.1 in Koordinator's proposal)."""

    share: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must be above 0 and at most 1, got {self.share}")

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        return self.share * samples.total(samples.limit)


@dataclass(frozen=True)
class NSigma(Predictor):
    """Mean plus ``n`` sample standard deviations of the warm tasks' usage over limit, at most 1, times their limit."""

    n: float = 5.0
    history: int = 120
    warm_up: int = 24

    def __post_init__(self) -> None:
        _check_history(self.history, self.warm_up, least=2)
        if not self.n >= 0:
            raise ConfigError(f"n must be at least 0, got {self.n}")

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        share = np.zeros(len(samples.times_us))
        mean_and_sigmas(*samples.ratios(self.history, self.warm_up), self.n, share)
        return _of_warm_limits(samples, share, self.warm_up)


@dataclass(frozen=True)
class MachinePercentile(Predictor):
    """A percentile, linearly interpolated, of the same ratios as N-sigma's, at most 1, times the warm tasks' limit."""

    percentile: float = 100.0
    history: int = 120
    warm_up: int = 24

    def __post_init__(self) -> None:
        _check_history(self.history, self.warm_up)
        _check_percentile(self.percentile)

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        share = np.zeros(len(samples.times_us))
        percentiles(*samples.ratios(self.history, self.warm_up), self.percentile, share)
        return _of_warm_limits(samples, share, self.warm_up)


def _of_warm_limits(samples: MachineSamples, share: Floats, warm_up: int) -> Floats:
    warm = samples.warm(warm_up)
    granted = samples.total(np.where(warm, samples.limit, 0.0))
    return np.minimum(share, 1.0) * granted + samples.total(np.where(warm, 0.0, samples.limit))


@dataclass(frozen=True)
class TaskPercentile(Predictor):
    """Per task, a percentile of its usage over limit times its limit now, summed (Resource Central style)."""

    percentile: float = 99.0
    history: int = 120
    warm_up: int = 24

    def __post_init__(self) -> None:
        _check_history(self.history, self.warm_up)
        _check_percentile(self.percentile)

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        ratio = np.divide(samples.capped, samples.limit, out=np.zeros(len(samples.age)), where=samples.limit > 0)
        share = np.zeros(len(samples.age))
        moving_percentiles(samples.age, ratio, self.percentile, np.empty(self.history), share)
        return samples.total(np.where(samples.warm(self.warm_up), share, 1.0) * samples.limit)


@dataclass(frozen=True)
class _TaskSoFar(Predictor):
    warm_up: int = 24
    mean: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_history(1, self.warm_up)

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        usage = samples.capped.copy()
        so_far(samples.age, usage, mean=self.mean)
        return samples.total(np.where(samples.warm(self.warm_up), usage, samples.limit))


@dataclass(frozen=True)
class TaskMaximum(_TaskSoFar):
    """Per task, the largest usage so far, summed."""


@dataclass(frozen=True)
class TaskMean(_TaskSoFar):
    """Per task, the mean usage so far, summed."""

    mean: ClassVar[bool] = True


@dataclass(frozen=True)
class Largest(Predictor):
    """The largest of what several predict."""

    of: tuple[Predictor, ...]

    def __post_init__(self) -> None:
        if not self.of:
            raise ConfigError("the largest of several predictors needs at least 1, got 0")

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        largest: Floats = np.maximum.reduce([samples.peak(predictor) for predictor in self.of])
        return largest


@dataclass(frozen=True)
class Oracle(Predictor):
    """The largest usage within the horizon of the tasks that are there now, each up to its limit now: clairvoyant.

    Tasks that come later do not count. The sum of the limits where the machine has no snapshot within the horizon.
    Undefined where the machine's samples end within the horizon.
    """

    horizon_s: int = 86_400

    def __post_init__(self) -> None:
        if self.horizon_s < 1:
            raise ConfigError(f"horizon_s must be at least 1 second, got {self.horizon_s}")

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        return samples.peak_within(self.horizon_s)


PREDICTORS: Final[Mapping[str, Predictor]] = {
    "limit": Limit(),
    "borg_default": FixedShare(),
    "nsigma5": NSigma(),
    "nsigma2_h24": NSigma(n=2.0, history=24),
    "rc_p99": TaskPercentile(),
    "rc_p95_h24": TaskPercentile(percentile=95.0, history=24),
    "max_n5_rc99": Largest((NSigma(), TaskPercentile())),
    "machine_p100": MachinePercentile(),
    "peak_max": TaskMaximum(),
    "mean": TaskMean(),
    "oracle_24h": Oracle(),
}
"""Predictors by the name that reports use. With samples every 5 minutes: a history of 10 hours, where the name says
nothing else, and 2 hours until a task is warm (the paper's settings as they are remembered, not verified)."""
