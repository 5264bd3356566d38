"""Decaying histograms of a task's usage, as the Vertical Pod Autoscaler keeps them, and their percentiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.histogram import percentile_at
from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.windows import LEVELS

_REBASE: Final = 100
"""Half-lives after which the time that weights refer to is moved; 2 to the power of it is far inside a float32."""
TIE: Final = 1.0 - 1e-9
"""A percentile is reached at this share of its weight, so that sums that tie in exact arithmetic also tie when
rounded."""
SHARES: Final = np.array(LEVELS) / 100.0
"""Levels of the percentile vectors, as shares."""

TASK: Final = np.dtype(
    [
        ("end_us", "i8"),
        ("since_us", "i8"),  # where age is counted from
        ("run_us", "i8"),  # start of the current run; -1 unknown
        ("reference_us", "i8"),  # where a sample weighs 1
        ("total", "f8"),  # sum of all weights
        ("below", "f8"),  # sum of those in the buckets before ``at``
        ("at", "i4"),  # the bucket of the percentile
        ("count", "i4"),  # samples
    ],
    align=True,
)
"""Record kept next to the weights, one line of the cache. The next percentile is a few steps from the last one."""


@dataclass(frozen=True)
class Grid:
    """Buckets of which each is ``ratio`` times as wide as the one before; the last one is open.

    Bucket i begins at first · (ratio^i - 1) / (ratio - 1), as in VPA; at first · i where the ratio is 1.

    Attributes
    ----------
    first : float
        Width of the first bucket.
    largest : float
        Up to where there are buckets.
    ratio : float
    """

    first: float
    largest: float
    ratio: float = 1.05

    def __post_init__(self) -> None:
        if not (0 < self.first < self.largest and self.ratio >= 1):
            raise ConfigError(f"a grid needs 0 < first < largest and a ratio from 1 on, got {self}")

    @cached_property
    def start(self) -> NDArray[np.float64]:
        """Begin of each bucket, shape (n_buckets,)."""
        if self.ratio == 1:
            return self.first * np.arange(math.ceil(self.largest / self.first) + 1, dtype=np.float64)
        power = math.log(self.largest * (self.ratio - 1) / self.first + 1) / math.log(self.ratio)
        powers: NDArray[np.float64] = np.power(self.ratio, np.arange(math.ceil(power) + 1, dtype=np.float64))
        return self.first * (powers - 1) / (self.ratio - 1)

    @cached_property
    def end(self) -> NDArray[np.float64]:
        """End of each bucket; of the last one, which has none, its begin."""
        return np.append(self.start[1:], self.start[-1])


RELATIVE: Final = Grid(0.001, 2.0)
"""Of usage over the limit: VPA's ratio from 0.1 % of the limit on, to twice the limit."""


class DecayingHistograms:
    """One decaying histogram per task, of one resource.

    The weight of a sample is 2 to the power of its time over the half-life, so that no weight has to be updated as time
    passes. The answer is the end of the first bucket at which the sum of the weights reaches ``level`` of all.

    Parameters
    ----------
    name : str
        Of its arrays in the memory of an estimator.
    grid : Grid
    half_life_s : float
    level : float
        In (0, 1].
    by_value : bool
        Weigh each sample with its bucket's end too (Autopilot's load-adjusted histogram).
    per_run : bool
        Forget all when the task's run begins again.
    """

    def __init__(
        self,
        name: str,
        grid: Grid,
        half_life_s: float,
        level: float,
        *,
        by_value: bool = False,
        per_run: bool = False,
    ) -> None:
        if not half_life_s > 0:
            raise ConfigError(f"half_life_s must be above 0, got {half_life_s}")
        if not 0 < level <= 1:
            raise ConfigError(f"level must be above 0 and at most 1, got {level}")
        self._task, self._weight = f"{name} task", f"{name} weight"
        self.blank = {self._task: np.zeros(0, TASK), self._weight: np.zeros((0, len(grid.start)), np.float32)}
        self._grid = grid
        self._end = grid.end
        self._load = self._end if by_value else np.ones(len(self._end))
        self._half_life_us = half_life_s * 1e6
        self._level = level
        self._per_run = per_run

    def fold(
        self,
        memory: Mapping[str, NDArray[Any]],
        r: int,
        slot: NDArray[np.int64],
        start_us: NDArray[np.int64],
        end_us: NDArray[np.int64],
        scheduled_us: NDArray[np.int64],
        value: NDArray[np.float64],
        shape: NDArray[np.float32],
        limit: NDArray[np.float64],
        out: NDArray[np.float64],
    ) -> None:
        """Add values and find the percentile after each.

        Parameters
        ----------
        memory : mapping of str to array
            That of the estimator, with room for every slot; ``blank`` is its initial state.
        r : int
            The resource: which column of ``value`` and ``out``.
        slot, start_us, end_us, scheduled_us : int64, shape (n,)
            As in ``Windows``.
        value : float64, shape (n, n_resources)
            In the unit of the grid; NaN unknown.
        shape : float32, shape (n, len(LEVELS)) or (n, 0)
            Where known, the distribution of CPU within the window is added instead, over its limit: the share of time
            between two known levels at the middle of their usages.
        limit : float64, shape (n, n_resources)
        out : float64, shape (n, n_resources + 2)
            Written: the percentile, NaN for none; in the last two columns the time since the run began, or since the
            end of the first window if ``per_run`` is not asked for, in microseconds, and the windows that counted.
        """
        _fold(
            memory[self._task], memory[self._weight], r, SHARES, self._grid.start, self._grid.first, self._grid.ratio,
            self._load, self._half_life_us, self._level, self._per_run, self._end, slot, start_us, end_us, scheduled_us,
            value, shape, limit, out,
        )  # fmt: skip


@numba.njit(**LENT, inline="always")
def _bucket(value: float, start: Any, per_width: float, per_log: float, step: float) -> Any:
    last = len(start) - 1
    if value >= start[last]:
        return last
    if value < start[1]:
        return 0
    k = int(value * per_width) if step == 0.0 else int(np.log(value * per_width * step + 1) * per_log)
    k = min(k, last - 1)
    return k + (value >= start[k + 1]) - (value < start[k])  # rounding


@numba.njit(**LENT, inline="always")
def _add(s: Any, weight: Any, task: int, b: int, amount: float) -> None:
    before = weight[task, b]
    after = before + np.float32(amount)
    weight[task, b] = after
    added = np.float64(after) - np.float64(before)
    s.total += added
    if b < s.at:
        s.below += added


@numba.njit(**LENT, inline="always")
def _take(
    s: Any, weight: Any, task: int, gain: float, value: float, shape: Any, over: float, shares: Any, start: Any,
    per_width: float, per_log: float, step: float, load: Any, i: int,
) -> None:  # fmt: skip
    """Add one window: its shape where two levels or more are known, else its value."""
    known, b, share, per_limit = -1, 0, 0.0, 0.5 / over
    for k in range(shape.shape[1] if over > 0 else 0):
        if np.isnan(shape[i, k]):
            continue
        if known >= 0:
            middle = (np.float64(shape[i, known]) + shape[i, k]) * per_limit
            at = _bucket(middle, start, per_width, per_log, step)
            if at != b and share > 0.0:
                _add(s, weight, task, b, gain * share * load[b])
                share = 0.0
            b = at
            share += shares[k] - shares[known]
        known = k
    if share == 0.0 and not np.isnan(value):
        b, share = _bucket(value, start, per_width, per_log, step), 1.0
    if share > 0.0:
        _add(s, weight, task, b, gain * share * load[b])
        s.count += 1


@numba.njit(**LENT)
def _rebase(
    s: Any,  # a record of TASK
    weight: Any,  # (n_tasks, n_buckets) float32
    task: int,
    now_us: int,
    half_life_us: float,
) -> None:
    """Move the reference time to now by whole half-lives: dividing by a power of two is exact."""
    half_lives = int((now_us - s.reference_us) / half_life_us)
    factor = 0.5**half_lives
    s.reference_us += int(half_lives * half_life_us)
    s.total = s.below = 0.0
    for k in range(weight.shape[1]):
        weight[task, k] = np.float32(weight[task, k] * factor)  # a float32 does not hold every factor
        s.total += weight[task, k]
        if k < s.at:
            s.below += weight[task, k]


@numba.njit(**LENT)
def _fold(
    state: Any,  # (n_tasks,) TASK
    weight: Any,  # (n_tasks, n_buckets) float32
    r: int,
    shares: Any,  # (len(LEVELS),) float64
    start: Any,  # (n_buckets,) float64
    first: float,
    ratio: float,
    load: Any,  # (n_buckets,) float64
    half_life_us: float,
    level: float,
    per_run: bool,
    end: Any,  # (n_buckets,) float64
    slot: Any,  # (n,) int64
    start_us: Any,  # (n,) int64
    end_us: Any,  # (n,) int64
    scheduled_us: Any,  # (n,) int64
    value: Any,  # (n, R) float64
    shape: Any,  # (n, len(LEVELS)) or (n, 0) float32
    limit: Any,  # (n, R) float64
    out: Any,  # (n, R + 2) float64, written
) -> None:
    last = weight.shape[1] - 1
    per_width, step = 1.0 / first, ratio - 1.0
    per_log = 1.0 / np.log(ratio)
    for i in range(len(slot)):
        task = slot[i]
        s = state[task]
        if end_us[i] > s.end_us:  # a repeated or late window changes nothing
            fresh = s.end_us == 0
            if per_run and not fresh and s.run_us >= 0 and scheduled_us[i] > s.run_us:
                fresh = True
                for k in range(last + 1):
                    weight[task, k] = 0
                s.total = s.below = 0.0
                s.at = s.count = 0
            if fresh:
                s.reference_us = s.since_us = end_us[i]
                if per_run:
                    s.since_us = scheduled_us[i] if scheduled_us[i] >= 0 else start_us[i]
            if fresh or scheduled_us[i] >= 0:
                s.run_us = scheduled_us[i]
            s.end_us = end_us[i]
            if end_us[i] - s.reference_us > _REBASE * half_life_us:
                _rebase(s, weight, task, end_us[i], half_life_us)
            gain = 2.0 ** ((end_us[i] - s.reference_us) / half_life_us)
            _take(
                s, weight, task, gain, value[i, r], shape, limit[i, 0], shares, start, per_width, per_log, step, load, i
            )
            reached = level * s.total * TIE
            s.at, s.below = percentile_at(weight, task, s.at, s.below, reached)
        out[i, r] = end[s.at] if s.total > 0 else np.nan
        out[i, -2] = s.end_us - s.since_us
        out[i, -1] = s.count
