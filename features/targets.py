"""Targets at each window's end t: demand, peak CPU and out-of-memory within each horizon after t.

This is the only module of ``features`` that looks past t.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED
from reclaim.data.windows import Windows, demand, peak_cpu
from reclaim.features.registry import LARGEST, SIGNALS

TARGETS: Final = SIGNALS
"""CPU and memory that a reservation must cover, and peak CPU; each over the limit at t."""

HORIZONS_S: Final = (300, 3_600, 86_400)
"""5 minutes, 1 hour, 24 hours."""
AN_HOUR: Final = HORIZONS_S.index(3_600)
"""Position of the horizon of an hour, by which splits are kept apart and ends out of memory are near."""

_ALIVE_US: Final = 600_000_000
"""A task last seen this close to the end of the trace counts as still running."""


def targets(
    windows: Windows,
    oom_task: NDArray[np.int64],
    oom_us: NDArray[np.int64],
    trace_end_us: int,
    value: NDArray[np.float32],
    oom: NDArray[np.float32],
) -> None:
    """Write the targets of every row.

    Parameters
    ----------
    windows : Windows
        ``n`` rows, sorted by task, then time.
    oom_task, oom_us : int64, shape (n_events,)
        Task number (position in ``windows``) and time of each OOM event, from ``oom.oom_events``; sorted by both.
    trace_end_us : int
        End of the last window of the whole trace.
    value : float32, shape (n, n_targets, n_horizons)
        Written: over the limit; NaN unknown: nothing was measured in the horizon, or the trace ends inside it with the
        task still running. A task that ends inside a horizon had to be covered until then.
    oom : float32, shape (n, n_horizons)
        Written: 1 where the task meets an OOM (``oom.OOM_DEFINITION``) within the horizon, 0 where not, NaN unknown.
    """
    starts = windows.task_starts()
    signals = np.vstack([demand(windows).T, peak_cpu(windows)])
    horizons_us = np.array(HORIZONS_S, np.int64) * 1_000_000
    first_event = np.searchsorted(oom_task, np.arange(len(starts)))
    _targets(
        starts, windows.start_us, windows.end_us, signals, np.ascontiguousarray(windows.limit), first_event, oom_us,
        horizons_us, trace_end_us, value, oom,
    )  # fmt: skip


def known_by(windows: Windows) -> NDArray[np.int64]:
    """Return the time t of each row; int64, shape (n,), µs. Assumes the order of ``targets``.

    That is the end of its window, or, where that came late, of the last one before.
    """
    out = windows.end_us.copy()
    _rise(windows.task_starts(), out)
    return out


@numba.njit(**CACHED)
def _rise(
    starts: Any,  # (n_tasks + 1,) int64
    end_us: Any,  # (n,) int64, changed
) -> None:
    for task in range(len(starts) - 1):
        for i in range(starts[task] + 1, starts[task + 1]):
            end_us[i] = max(end_us[i], end_us[i - 1])


def measured_by(windows: Windows) -> NDArray[np.int64]:
    """Return when all that each row's targets rest on has been measured; int64, shape (n, n_horizons), µs.

    That is the end of the horizon, or, where one that begins within it ends later, of a window. Assumes the order of
    ``targets``.
    """
    out = np.empty((len(windows), len(HORIZONS_S)), np.int64)
    horizons_us = np.array(HORIZONS_S, np.int64) * 1_000_000
    _measured_by(windows.task_starts(), windows.start_us, windows.end_us, horizons_us, out)
    return out


@numba.njit(**CACHED)
def _measured_by(
    starts: Any,  # (n_tasks + 1,) int64
    start_us: Any,  # (n,) int64
    end_us: Any,  # (n,) int64
    horizons_us: Any,  # (H,) int64
    out: Any,  # (n, H) int64, written
) -> None:
    for task in range(len(starts) - 1):
        first, stop = starts[task], starts[task + 1]
        for h in range(len(horizons_us)):
            ahead, now, latest = first, end_us[first], end_us[first]
            for i in range(first, stop):
                now = max(now, end_us[i])
                until = now + horizons_us[h]
                while ahead < stop and start_us[ahead] < until:
                    latest = max(latest, end_us[ahead])
                    ahead += 1
                out[i, h] = max(latest, until)


@numba.njit(**CACHED, error_model="numpy")
def _targets(
    starts: Any,  # (n_tasks + 1,) int64
    start_us: Any,  # (n,) int64
    end_us: Any,  # (n,) int64
    signals: Any,  # (n_targets, n) float64
    limit: Any,  # (n, R) float64
    first_event: Any,  # (n_tasks + 1,) int64
    event_us: Any,  # (n_events,) int64
    horizons_us: Any,  # (H,) int64
    trace_end_us: int,
    value: Any,  # (n, n_targets, H) float32, written
    oom: Any,  # (n, H) float32, written
) -> None:
    longest = 0
    for task in range(len(starts) - 1):
        longest = max(longest, starts[task + 1] - starts[task])
    rest = np.empty(longest)
    for task in range(len(starts) - 1):
        first, stop = starts[task], starts[task + 1]
        ended = end_us[first:stop].max() < trace_end_us - _ALIVE_US
        for h in range(len(horizons_us)):
            horizon = horizons_us[h]
            for j in range(len(signals)):
                future_max(first, stop, stop, start_us, end_us, signals[j], horizon, rest, value[:, j, h])
            event = first_event[task]
            now = end_us[first]
            for i in range(first, stop):
                now = max(now, end_us[i])
                until = now + horizon
                complete = ended or until <= trace_end_us
                for j in range(len(signals)):
                    of = limit[i, j if j < 2 else 0]  # the peak of CPU is over the CPU limit
                    v = value[i, j, h] / of if complete and of > 0.0 else np.nan
                    value[i, j, h] = LARGEST if v > LARGEST else v
                # a failure is often stamped a little before the end of the window it cut short: that is over by t
                while event < first_event[task + 1] and event_us[event] <= now:
                    event += 1
                oom[i, h] = np.nan
                if event < first_event[task + 1] and event_us[event] <= until:
                    oom[i, h] = 1.0
                elif complete:
                    oom[i, h] = 0.0


@numba.njit(**CACHED, error_model="numpy")
def future_max(
    first: int,
    stop: int,
    end: int,
    start_us: Any,  # (n,) int64, rising from first to end
    end_us: Any,  # (n,) int64
    signal: Any,  # (n,) float64
    horizon: int,  # µs
    rest: Any,  # float64, changed; end - first places
    out: Any,  # (n,) float, written
) -> None:
    """Write the largest value of the rows after each, up to ``end``, that begin within the horizon; NaN for none.

    A horizon ends where the one of the row before did or later. So its rows are those up to a ``middle``, of which
    ``rest`` has the largest from each row on, and those behind it, of which the largest so far is kept. Both are made
    again when no row is left before the middle: a fixed number of steps a row on average.
    """
    ahead, middle, newer = first, first, -math.inf
    now = end_us[first]
    for i in range(first, stop):
        now = max(now, end_us[i])  # known time does not decrease where windows overlap
        while ahead < end and (ahead <= i or start_us[ahead] < now + horizon):
            newer = signal[ahead] if signal[ahead] > newer else newer  # no NaN is larger
            ahead += 1
        if middle <= i + 1:
            middle, newer, largest = ahead, -math.inf, -math.inf
            for k in range(ahead - 1, i, -1):
                largest = signal[k] if signal[k] > largest else largest
                rest[k - first] = largest
        largest = newer
        if i + 1 < middle:
            largest = max(largest, rest[i + 1 - first])
        out[i] = largest if largest > -math.inf else math.nan
