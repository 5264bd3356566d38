"""Robusta's Kubernetes Resource Recommender, its "simple" strategy."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.histogram import bucket_of, percentile_at
from reclaim.data.core.jit import LENT
from reclaim.data.errors import ConfigError
from reclaim.data.oom import near_limit
from reclaim.data.schema import DAY_US, RESOURCES
from reclaim.data.windows import Windows
from reclaim.training.estimators.base import Estimate, Estimator, grid, known_statistic, over_limit
from reclaim.training.estimators.histogram import Grid

_GRID: Final = Grid(0.001, 1.0)
"""Of CPU over the limit, which is the most that a window can demand: 0.1 % and wider by 5 % each."""
_near_limit: Final = numba.njit(inline="always")(near_limit)
_DAYS: Final = 14

_TASK: Final = np.dtype(
    [
        ("end_us", "i8"),
        ("run_us", "i8"),  # start of the current run; -1 unknown
        ("day", "i4"),
        ("at", "i4"),  # the bucket of the percentile
        ("below", "i4"),  # samples in the buckets before it
        ("count", "i4", len(RESOURCES)),  # samples of all days
        ("full", "?"),  # whether memory reached the limit in the last window
        ("days", "i4", (_DAYS, len(RESOURCES))),  # samples by day
        ("largest", "f4", _DAYS),  # memory over the limit by day
        ("killed", "u1", _DAYS),  # whether there was an out-of-memory kill
    ],
    align=True,
)


class KrrEstimator(Estimator):
    """CPU: p95 of two weeks; memory: the largest of two weeks times 1.15, or, after an OOM kill, the limit times 1.25.

    The limit until there are enough windows. Weeks are of calendar days, the current one included. CPU is kept over the
    limit in buckets of 0.1 % and wider, by 5 % each, of which the percentile's end is taken: up to 5 % above KRR's own,
    which is exact. Its least recommendations (0.01 cores, 100 MB) are left out, because usage has no unit here.

    An estimator receives no kills, so one is derived: a new run (``scheduled_us`` rises) after a window whose memory
    came as near its limit as in the label (``data.oom``). Unlike in the features (``features.fold.task_oom``), it
    counts where the limit does not bind, too: published numbers rest on that.

    Parameters
    ----------
    level : float
        Percentile of CPU, in percent.
    margin : float
        Share added to the largest memory.
    oom_margin : float
        Share added to the limit a task was killed at.
    min_samples : int
        Windows needed; KRR needs 100 points.
    """

    CANDIDATES = grid(level=(95.0, 90.0, 98.0, 100.0), min_samples=(100, 12))

    def __init__(
        self, level: float = 95.0, margin: float = 0.15, oom_margin: float = 0.25, min_samples: int = 100
    ) -> None:
        if not 0 < level <= 100:
            raise ConfigError(f"level must be above 0 and at most 100 percent, got {level}")
        if not (margin > -1 and oom_margin > -1 and min_samples >= 1):
            raise ConfigError(
                "expected margin > -1, oom_margin > -1 and min_samples >= 1, "
                f"got {margin=}, {oom_margin=}, {min_samples=}"
            )
        self.level = level
        self.margin = margin
        self.oom_margin = oom_margin
        self.min_samples = min_samples
        self._memory = {
            "task": np.zeros(0, _TASK),
            "count": np.zeros((0, len(_GRID.start)), np.int32),
            "daily": np.zeros((0, _DAYS, len(_GRID.start)), np.int32),
        }

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows and answer for each."""
        self._make_room(slot)
        ratio = over_limit(windows)
        out = np.empty_like(ratio)

        def fold(*columns: Any) -> None:
            _fold(
                self._memory["task"], self._memory["count"], self._memory["daily"], self.level / 100, 1 + self.margin,
                1 + self.oom_margin, self.min_samples, _GRID.start, _GRID.end, *columns,
            )  # fmt: skip

        self._in_parts(fold, slot, (windows.end_us, windows.scheduled_us, ratio), out)
        return known_statistic(out * windows.limit)


@numba.njit(**LENT)
def _turn(s: Any, count: Any, daily: Any, task: int, day: int) -> None:
    """Forget the days of two weeks ago."""
    for d in range(max(s.day + 1, day - _DAYS + 1), day + 1):
        at = d % _DAYS
        if s.days[at, 0] > 0:
            for k in range(count.shape[1]):
                count[task, k] -= daily[task, at, k]
                if k < s.at:
                    s.below -= daily[task, at, k]
                daily[task, at, k] = 0
        for r in range(s.days.shape[1]):
            s.count[r] -= s.days[at, r]
            s.days[at, r] = 0
        s.largest[at] = 0
        s.killed[at] = 0
    s.day = day


@numba.njit(**LENT)
def _fold(
    state: Any,  # (n_tasks,) records
    count: Any,  # (n_tasks, n_buckets) integers
    daily: Any,  # (n_tasks, _DAYS, n_buckets) integers
    level: float,
    margin: float,
    oom_margin: float,
    min_samples: int,
    start: Any,  # (n_buckets,)
    end: Any,  # (n_buckets,)
    slot: Any,  # (n,) int64
    end_us: Any,  # (n,) int64
    scheduled_us: Any,  # (n,) int64
    ratio: Any,  # (n, R), demand over the limit
    out: Any,  # (n, R), written
) -> None:
    for i in range(len(slot)):
        task = slot[i]
        s = state[task]
        if end_us[i] > s.end_us:  # a repeated or late window changes nothing
            day = end_us[i] // DAY_US
            if s.end_us == 0:
                s.run_us = -1
                s.day = day
            if day > s.day:
                _turn(s, count, daily, task, day)
            today = day % _DAYS
            if s.run_us >= 0 and scheduled_us[i] > s.run_us and s.full:
                s.killed[today] = 1
            if scheduled_us[i] >= 0:
                s.run_us = scheduled_us[i]
            s.end_us = end_us[i]
            if not np.isnan(ratio[i, 0]):
                k = max(bucket_of(ratio[i, 0], start), 0)
                count[task, k] += 1
                daily[task, today, k] += 1
                s.count[0] += 1
                s.days[today, 0] += 1
                if k < s.at:
                    s.below += 1
            s.full = _near_limit(ratio[i, 1], 1.0)
            if not np.isnan(ratio[i, 1]):
                s.count[1] += 1
                s.days[today, 1] += 1
                s.largest[today] = max(s.largest[today], ratio[i, 1])
            reached = level * s.count[0] - 1e-9
            s.at, s.below = percentile_at(count, task, s.at, s.below, reached)
        out[i, 0] = end[s.at] if s.count[0] >= min_samples else np.nan
        out[i, 1] = np.nan
        if s.count[1] >= min_samples:
            largest, killed = np.float32(0), False
            for d in range(_DAYS):
                largest = max(largest, s.largest[d])
                killed = killed or s.killed[d] > 0
            out[i, 1] = max(largest * margin, oom_margin if killed else 0.0)
