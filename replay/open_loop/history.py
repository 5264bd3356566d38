"""Rows of a recorded history on which estimators are judged, and the reservation current at each."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import CACHED
from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, MEMORY_MEAN, Windows
from reclaim.training.estimators.base import MODEL, Estimate


@dataclass(frozen=True)
class History:
    """Rows of a dataset on which estimators are judged, with the usage after each.

    Attributes
    ----------
    windows : Windows
        ``n`` rows, those of one task together and in time order, reduced to ``data.windows.what_is_judged``.
    target : float64, shape (n, n_resources)
        Usage that a reservation must cover within the horizon, over the limit; NaN unknown.
    next_target : float64, shape (n, n_resources)
        The same for the next five minutes.
    period, group : uint8, shape (n,)
        As in ``features.splits``.
    known_s : float64, shape (n,)
        Seconds since the task's first window began.
    previous : int64, shape (n,)
        Row of the task's previous window, -1 for none.
    source_row : int64, shape (n,)
        Row of the feature set, and of the dataset's usage, bucket after bucket.
    """

    windows: Windows
    target: NDArray[np.float64]
    next_target: NDArray[np.float64]
    period: NDArray[np.uint8]
    group: NDArray[np.uint8]
    known_s: NDArray[np.float64]
    previous: NDArray[np.int64]
    source_row: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.previous)

    def take(self, rows: NDArray[np.int64]) -> History:
        """Return the chosen rows, in rising order; a previous window that is not among them becomes -1."""
        new_number = np.full(len(self) + 1, -1, np.int64)  # the last one for -1
        new_number[rows] = np.arange(len(rows))
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name not in ("windows", "previous")}
        return History(windows=self.windows.take(rows), previous=new_number[self.previous[rows]], **columns)


def join_histories(parts: list[History]) -> History:
    """Return the rows of all parts, in the order given; no task may be in two of them.

    Empties the list and releases each column of the parts once it is joined, so that only one is in memory twice.
    """
    offsets = np.cumsum([0, *(len(p) for p in parts)])
    previous = [np.where(p.previous < 0, -1, p.previous + o) for p, o in zip(parts, offsets, strict=False)]
    names = [f.name for f in fields(History) if f.name not in ("windows", "previous")]
    of_windows = {f.name: [getattr(p.windows, f.name) for p in parts] for f in fields(Windows)}
    of_rows = {name: [getattr(p, name) for p in parts] for name in names}
    parts.clear()
    return History(
        windows=Windows(**{name: np.concatenate(of_windows.pop(name)) for name in list(of_windows)}),
        previous=np.concatenate(previous).astype(np.int64),
        **{name: np.concatenate(of_rows.pop(name)) for name in names},
    )


def oracle(history: History) -> Estimate:
    """Return the least reservation that never violates: the target, at most the limit; the limit where unknown."""
    limit = history.windows.limit
    known = np.isfinite(history.target)
    reservation = np.where(known, np.minimum(history.target, 1.0) * limit, limit)
    return Estimate(reservation, np.full(limit.shape, MODEL, np.uint8))


def previous_rows(windows: Windows) -> NDArray[np.int64]:
    """Return for each row the row of its task's previous window, -1 for none; shape (n,)."""
    previous = np.arange(-1, len(windows) - 1, dtype=np.int64)
    previous[windows.task_starts()[:-1]] = -1
    return previous


def window_seconds(windows: Windows) -> NDArray[np.float64]:
    """Return the length of each row's window, in seconds; shape (n,)."""
    return (windows.end_us - windows.start_us) / 1e6


def mean_usage(windows: Windows) -> NDArray[np.float64]:
    """Return the mean usage of each window, of memory the largest where no mean is known; shape (n, n_resources)."""
    cpu, memory, most = (windows.usage[:, k] for k in (CPU_MEAN, MEMORY_MEAN, MEMORY_MAX))
    return np.stack([cpu, np.where(np.isnan(memory), most, memory)], axis=1)


def current_reservations(reservation: NDArray[np.float64], history: History) -> NDArray[np.float64]:
    """Return the reservation current as each row's window began, from the one after each row; shape (n, n_resources).

    It is the answer to the task's previous window, at most the limit. A task's first window, the first one of a new
    run, and one after a window of unknown limit began under the limit. NaN where the limit is unknown.
    """
    windows = history.windows
    current = np.empty(reservation.shape)
    _current_reservations(reservation, windows.limit, windows.scheduled_us, history.previous, current)
    return current


@numba.njit(**CACHED, error_model="numpy")
def _current_reservations(
    reservation: Any,  # (n, R) float64
    limit: Any,  # (n, R) float64
    scheduled_us: Any,  # (n,) int64
    previous: Any,  # (n,) int64
    current: Any,  # (n, R) float64, written
) -> None:
    for i in range(len(previous)):
        before = previous[i]
        at_limit = before < 0 or scheduled_us[i] > scheduled_us[before]
        for r in range(limit.shape[1]):
            most = limit[i, r]
            unbounded = at_limit or np.isnan(limit[before, r])
            answer = most if unbounded else reservation[before, r]
            current[i, r] = answer if answer <= most else most  # an unknown limit leaves no reservation
