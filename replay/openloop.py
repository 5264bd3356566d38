"""The open loop: an estimator answers every window of a recorded history, from that task's past alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import Windows
from reclaim.features.groups import known_seconds as known_seconds
from reclaim.training.estimators.base import MODEL, Estimate, Estimator
from reclaim.training.estimators.forecast import ForecastEstimator

ROWS_PER_CALL: Final = 65_536
"""Rows handed to an estimator at once; bounds what a learned one holds beside its answer, 0.5 kB of quantiles a row."""


@dataclass(frozen=True)
class History:
    """The rows of a dataset on which estimators are judged, with what came after each.

    Attributes
    ----------
    windows : Windows
        ``n`` rows, those of one task together and in time order; of what was measured, a fold keeps
        ``data.windows.what_is_judged``.
    target : float64, shape (n, n_resources)
        What a reservation must cover within the horizon, over the limit; NaN unknown.
    next_target : float64, shape (n, n_resources)
        The same for the next five minutes.
    period, group : uint8, shape (n,)
        As in ``features.splits``.
    known_s : float64, shape (n,)
        Time since the task's first window began, in seconds: all that an estimator can have seen of it.
    previous : int64, shape (n,)
        Row of the task's window before; -1 where there is none.
    source_row : int64, shape (n,)
        Row of the feature set, which is that of the dataset's usage, bucket after bucket.
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
        """Return the chosen rows, in rising order; a window before that is not among them is -1."""
        new_number = np.full(len(self) + 1, -1, np.int64)  # one more, for "there is none"
        new_number[rows] = np.arange(len(rows))
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name not in ("windows", "previous")}
        return History(windows=self.windows.take(rows), previous=new_number[self.previous[rows]], **columns)


def join_histories(parts: list[History]) -> History:
    """Return the rows of all parts, in the order given; no task may stand in two of them.

    The list is left empty, and each column of the parts is let go once it is joined: no more than one is held twice.
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


def run_base(estimator: Estimator, windows: Windows) -> Estimate:
    """Fold windows through a fresh estimator and return its answer for each, without the forecasts behind it.

    Parameters
    ----------
    estimator : Estimator
        Without state so far; slots are the tasks' positions in ``windows``. One that looks at a task's siblings wants
        all rows in one call, which has at most ``ROWS_PER_CALL`` here; a replay answers for it from stored features.
    windows : Windows
        Any number of whole tasks, each in time order.

    Returns
    -------
    Estimate
        Before any margin; shape (n, n_resources).
    """
    slot = windows.task_numbers()
    return _in_parts(windows, lambda part: {"": estimator.update(slot[part], windows.take(part))})[""]


def answer_stored(estimator: ForecastEstimator, x: NDArray[np.float32], windows: Windows) -> dict[str, Estimate]:
    """Return what each plan of an estimator would answer to chosen rows only, from their stored features.

    Those are to the bit what the estimator computes as it goes (``features.state``), so the answers are the same.

    Parameters
    ----------
    estimator : ForecastEstimator
    x : float32, shape (n, n_features)
    windows : Windows
        The ``n`` rows.
    """
    return _in_parts(windows, lambda part: estimator.answer_each(x[part], windows.take(part)))


def _in_parts(windows: Windows, answer: Callable[[slice], dict[str, Estimate]]) -> dict[str, Estimate]:
    out: dict[str, Estimate] = {}
    for start in range(0, max(len(windows), 1), ROWS_PER_CALL):
        part = slice(start, start + ROWS_PER_CALL)
        for name, said in answer(part).items():
            if name not in out:
                shape = windows.limit.shape
                out[name] = Estimate(np.empty(shape), np.empty(shape, np.uint8))
            out[name].reservation[part], out[name].rule[part] = said.reservation, said.rule
    return out


def joined(parts: Sequence[Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Return named answers to the rows of all parts, in the order given; at least one part, without forecasts."""
    out = {}
    for name in parts[0]:
        reservation = np.concatenate([part[name].reservation for part in parts])
        out[name] = Estimate(reservation, np.concatenate([part[name].rule for part in parts]))
    return out


def oracle(history: History) -> Estimate:
    """Return the least that never violates, which only the future tells: the target, or the limit where that is less.

    The limit where the future is unknown.
    """
    limit = history.windows.limit
    known = np.isfinite(history.target)
    reservation = np.where(known, np.minimum(history.target, 1.0) * limit, limit)
    return Estimate(reservation, np.full(limit.shape, MODEL, np.uint8))


def previous_rows(windows: Windows) -> NDArray[np.int64]:
    """Return for each row the row of its task's window before, -1 for none; shape (n,)."""
    previous = np.arange(-1, len(windows) - 1, dtype=np.int64)
    previous[windows.task_starts()[:-1]] = -1
    return previous


def window_seconds(windows: Windows) -> NDArray[np.float64]:
    """Return the length of each row's window, in seconds; shape (n,)."""
    return (windows.end_us - windows.start_us) / 1e6


def in_force(reservation: NDArray[np.float64], history: History) -> NDArray[np.float64]:
    """Return the reservation that was in force when each row's window began; shape (n, n_resources).

    It is the answer to the task's window before. A task's first window and the first one of a new run began under the
    limit, and never is more in force than the limit.
    """
    windows = history.windows
    held = np.empty(reservation.shape)
    _in_force(reservation, windows.limit, windows.scheduled_us, history.previous, held)
    return held


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _in_force(reservation: Any, limit: Any, scheduled_us: Any, previous: Any, held: Any) -> None:
    for i in range(len(previous)):
        before = previous[i]
        at_limit = before < 0 or scheduled_us[i] > scheduled_us[before]
        for r in range(limit.shape[1]):
            most = limit[i, r]
            asked = most if at_limit else reservation[before, r]
            held[i, r] = most if np.isnan(asked) or asked > most else asked
