"""Predictors of a machine's peak, the largest usage of all that runs on it now: EuroSys'21's, and later ones.

"Take it to the Limit: Peak Prediction-driven Resource Overcommitment in Datacenters" (Bashir et al., EuroSys'21)
predicts for each machine and time the largest usage to come of the tasks that are there; its simulator is the reference
for what follows, and its predictors here agree with it. One resource at a time; usage and limit in any unit that they
share.

A **snapshot** is all that a machine ran at one time. History is counted in snapshots, not in seconds. A task that is
missing from one has left: its history is dropped, and begins again should it come back (but see ``Bridged``). Usage
counts up to its limit of that time. A task is cold, and counts with its limit, until it has been there for ``warm_up``
snapshots in a row (two at least: the simulator does not look at a task in its first).

Left out: Koordinator's predictors of machines, which need each task's priority class and the system's own usage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from reclaim.data.errors import ConfigError
from reclaim.data.schema import DAY_US
from reclaim.replay.machine_peaks.kernels import (
    add_histories,
    moments,
    moving_percentiles,
    needs_by_window,
    percentiles,
    so_far,
)
from reclaim.training.machines.samples import TaskSamples

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MachineSamples(TaskSamples):
    """Samples of one machine, with values that predictors share."""

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

    def shares(self) -> Floats:
        """Return the capped usage of each sample over its limit, shape (n,); 0 where there is no limit."""
        return np.divide(self.capped, self.limit, out=np.zeros(len(self.age)), where=self.limit > 0)

    def bridged(self, gap: int) -> MachineSamples:
        """Return the samples with stand-ins where a task misses at most ``gap`` snapshots between two records.

        The record before a gap stands in for those missing, in the histories and ages of the records after it alone: in
        no total, and not at the times of the gap, when its end is not known yet. Computed once.
        """
        key = ("bridged", gap)
        if key not in self._known:
            missing = np.zeros(len(self.task), np.int64)
            missing[:-1] = np.where(self.task[1:] == self.task[:-1], np.diff(self.snapshot) - 1, 0)
            copies = 1 + np.where(missing <= gap, missing, 0)
            records, of = np.cumsum(copies) - copies, np.repeat(np.arange(len(copies)), copies)
            time_us = self.times_us[self.snapshot[of] + np.arange(len(of)) - records[of]]
            filled = TaskSamples.lay_out(time_us, self.task[of], self.usage[of], self.limit[of])
            recorded = TaskSamples(**{f.name: getattr(self, f.name) for f in fields(TaskSamples)})  # no cycle by self
            self._known[key] = _BridgedSamples(**vars(filled), recorded=recorded, records=records)
        bridged: MachineSamples = self._known[key]
        return bridged

    def ratios(self, history: int, warm_up: int) -> tuple[Floats, Ids]:
        """Return usage over limit of the warm tasks together over the last snapshots, and of how many there is one.

        Shapes (T, history), the newest last, and (T,): only that many at the end of a row are valid. A task that was
        not yet there is left out of both sums; 0 where no limit is left. Computed once.
        """
        key = ("ratios", history, warm_up)
        if key not in self._known:
            shape = len(self.times_us), history
            usage, limit, counts = np.zeros(shape), np.zeros(shape), np.zeros(len(self.times_us), np.int64)
            add_histories(self.snapshot, self.age, self.warm(warm_up), self.capped, self.limit, usage, limit, counts)
            np.divide(usage, limit, out=usage, where=limit > 0)
            self._known[key] = usage, counts
        ratios: tuple[Floats, Ids] = self._known[key]
        return ratios


@dataclass(frozen=True, eq=False)
class _BridgedSamples(MachineSamples):
    """Samples of which some stand in for missing ones: they are never warm, and in no total.

    Attributes
    ----------
    recorded : TaskSamples
        The ``n_recorded`` samples without stand-ins.
    records : int64, shape (n_recorded,)
        Places of these.
    """

    recorded: TaskSamples = field(kw_only=True)
    records: Ids = field(kw_only=True)

    def warm(self, warm_up: int) -> NDArray[np.bool_]:
        warm = np.zeros(len(self.age), np.bool_)
        warm[self.records] = super().warm(warm_up)[self.records]
        return warm

    def total(self, of_samples: Floats) -> Floats:
        return self.recorded.total(of_samples[self.records])

    def peak_within(self, horizon_s: int) -> Floats:
        return self.recorded.peak_within(horizon_s)

    def bridged(self, gap: int) -> MachineSamples:
        return MachineSamples(**vars(self.recorded)).bridged(gap)


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
        mean, deviation = np.zeros((2, len(samples.times_us)))
        moments(*samples.ratios(self.history, self.warm_up), mean, deviation)
        return _of_warm_limits(samples, mean + self.n * deviation, self.warm_up)


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
        share = np.zeros(len(samples.age))
        moving_percentiles(samples.age, samples.shares(), self.percentile, np.empty(self.history), share)
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
class Bridged(Predictor):
    """A predictor that forgives a task ``gap`` missing snapshots in a row: its record before them stands in.

    To the simulator a task that misses one snapshot has left, and counts with its limit for ``warm_up`` snapshots after
    it is back. A record lost on its way to the predictor does not mean that the task has left.
    """

    of: Predictor
    gap: int = 2

    def __post_init__(self) -> None:
        if self.gap < 1:
            raise ConfigError(f"gap must be at least 1 snapshot, got {self.gap}")

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        return samples.bridged(self.gap).peak(self.of)


@dataclass(frozen=True)
class BetaQuantile(Predictor):
    """A quantile of a beta distribution of usage over limit, times the warm tasks' limit (Trimaran's load risk).

    Kubernetes' scheduler plugin LowRiskOverCommitment (kubernetes-sigs/scheduler-plugins, ``pkg/trimaran/
    lowriskovercommitment``) scores a node by the probability that its utilisation passes a threshold. It fits a beta
    distribution to mean and standard deviation by moments (``beta.go``, ``MatchMoments``) after it has multiplied the
    deviation by the square root of the number of windows that the metrics are smoothed over (``smoothing``;
    ``DefaultSmoothingWindowSize`` is 5, in ``apis/config/v1/defaults.go``) and bounded the variance by 99 % of the
    largest that the mean allows (``MaxVarianceAllowance``, in ``lowriskovercommitment.go``).

    Assumed here: the quantile, which turns the probability around, and its level; in place of a node's recent
    utilisation of its capacity, the ratios of N-sigma over a shorter history. Level and history are among the better of
    a few on composed cells. The plugin's other half, the limit risk (``DefaultRiskLimitWeight``, 0.5), compares limits
    with capacity, and does not predict usage.
    """

    level: float = 0.99
    smoothing: float = 5.0
    history: int = 24
    warm_up: int = 24

    MOST_VARIANCE: ClassVar[float] = 0.99
    """Largest variance, over that which the mean allows (``MaxVarianceAllowance``)."""
    LEAST_VARIANCE: ClassVar[float] = 1e-12
    """Smallest, of the same: below it all usage is taken to be at the mean, as the plugin does without a deviation."""

    def __post_init__(self) -> None:
        _check_history(self.history, self.warm_up, least=2)
        if not 0 < self.level < 1:
            raise ConfigError(f"level must be above 0 and below 1, got {self.level}")
        if not 1 <= self.smoothing < np.inf:
            raise ConfigError(f"smoothing must be at least 1 window and finite, got {self.smoothing}")

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        mean, deviation = np.zeros((2, len(samples.times_us)))
        moments(*samples.ratios(self.history, self.warm_up), mean, deviation)
        most = mean * (1 - mean)
        variance = np.minimum(self.smoothing * deviation**2, self.MOST_VARIANCE * most)
        share = mean.copy()
        wide = variance > self.LEAST_VARIANCE * most
        size = most[wide] / variance[wide] - 1
        share[wide] = betaincinv(mean[wide] * size, (1 - mean[wide]) * size, self.level)
        return _of_warm_limits(samples, share, self.warm_up)


@dataclass(frozen=True)
class Coach(Predictor):
    """Guaranteed parts of the tasks, and oversubscribed parts that share the machine by time of the day.

    "Coach: Exploiting Temporal Patterns for All-Resource Oversubscription in Cloud Platforms" (Reidys et al.,
    ASPLOS'25) splits the day into 6 ``windows`` of 4 hours. A virtual machine is guaranteed the largest, over the
    windows, of a percentile of its utilisation in each (95), and has beyond that, window by window, what its maximum
    in the window exceeds the guarantee by. A server holds the sum of the guarantees and the largest, over the windows,
    of the sum of what exceeds them.

    The split, the windows and the percentile are the paper's, recalled beyond its abstract, not verified. Assumed here:
    each task is predicted from its own past (Coach learns from earlier virtual machines, and predicts in steps of 5 %),
    by all its usage over limit in the window so far, times its limit now; a window in which it was not seen on an
    earlier day has all its usage. Guarantees are over all windows. Of what exceeds them, only the window of now and the
    ``ahead`` next ones count, in which a peak within some hours lies; with 5 of them it is the whole day, as where
    Coach places a virtual machine. A ``guaranteed`` percentile of 0 leaves next to nothing guaranteed, and the windows
    alone with ``oversubscribed``.
    """

    guaranteed: float = 95.0
    oversubscribed: float = 100.0
    windows: int = 6
    ahead: int = 1
    warm_up: int = 24

    def __post_init__(self) -> None:
        _check_history(1, self.warm_up)
        _check_percentile(self.guaranteed)
        _check_percentile(self.oversubscribed)
        if not 0 <= self.ahead < self.windows:
            raise ConfigError(f"expected ahead >= 0 and windows > ahead, got ahead={self.ahead}, {self.windows=}")

    def peak(self, samples: MachineSamples) -> Floats:
        """Return the peak of each snapshot."""
        day, into_day_us = np.divmod(samples.times_us[samples.snapshot], DAY_US)
        room = np.empty((self.windows + 1, samples.age.max(initial=1)))
        needs = np.empty((self.ahead + 1, len(samples.age)))
        needs_by_window(
            samples.age, into_day_us * self.windows // DAY_US, day, samples.shares(), self.guaranteed,
            self.oversubscribed, room, needs,
        )  # fmt: skip
        warm = samples.warm(self.warm_up)
        largest: Floats = np.maximum.reduce([samples.total(np.where(warm, n, 1.0) * samples.limit) for n in needs])
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
    "nsigma5_bridged": Bridged(NSigma()),
    "rc_p99_bridged": Bridged(TaskPercentile()),
    "max_n5_rc99_bridged": Bridged(Largest((NSigma(), TaskPercentile()))),
    "machine_p100_bridged": Bridged(MachinePercentile()),
    "peak_max_bridged": Bridged(TaskMaximum()),
    "trimaran_p99": Bridged(BetaQuantile()),
    "coach_p95": Bridged(Coach()),
    "coach_shared_p95": Bridged(Coach(guaranteed=0.0, oversubscribed=95.0)),
    "coach_shared_p99": Bridged(Coach(guaranteed=0.0, oversubscribed=99.0)),
    "coach_day_p95": Bridged(Coach(guaranteed=0.0, oversubscribed=95.0, ahead=5)),
    "coach_day_p99": Bridged(Coach(guaranteed=0.0, oversubscribed=99.0, ahead=5)),
}
"""Predictors by the name that reports use. With samples every 5 minutes: a history of 10 hours, where the name says
nothing else, and 2 hours until a task is warm (the paper's settings as recalled, not verified); Trimaran's
has 2 hours of both. Coach's of the day take all its windows, for a horizon of 24 hours. Neither Trimaran nor Coach
forgets a task for a lost record, so theirs are bridged."""
