"""Sums what the tasks of a cell count for their machines."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.jit import LENT
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import demand
from reclaim.serving.answers.stateful import is_stale
from reclaim.serving.cell.machine_peaks import MachineMargins
from reclaim.serving.cell.task_record import last_windows, machine_of
from reclaim.serving.models.scorer import MACHINE_PARTS
from reclaim.serving.wire.errors import INVALID, ClientLeftError, RequestError
from reclaim.training.machines.terms import N_TERMS, T_HELD, T_LIMIT, T_NEW, T_SQUARES, T_USAGE, terms_of
from reclaim.training.margins.margin import MARGIN_NAMES

if TYPE_CHECKING:
    from reclaim.serving.cell.tracker import Tracker
    from reclaim.serving.cell.views import Known
    from reclaim.serving.models.scorer import Scorer
    from reclaim.serving.settings import ServingSettings
    from reclaim.training.machines.estimator import MachineEstimator

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

KEPT_S: Final = 10.0
"""Age up to which totals are reused, in seconds: Prometheus asks every 15 s or so, and several may ask."""


@dataclass(frozen=True)
class MachineSums:
    """Sums over the tasks of each of ``m`` machines.

    Attributes
    ----------
    scorer : Scorer
        Model of all terms.
    estimator : MachineEstimator
        Of the horizon.
    margins : MachineMargins
        Of the moment; those of the fit where outcomes within the horizon are not counted.
    counted : bool
        Whether outcomes within the horizon are counted.
    machine : int64, shape (m,), ascending
    sums : float64, shape (m, n_resources, N_TERMS)
        Of the terms of its tasks, in the order of their slots.
    usage : float64, shape (m, n_resources)
        Of the last windows of tasks that are not stale, each up to its limit.
    tasks, whole : int64, shape (m,)
        Tasks, and those of them that count their limit whole.
    without_machine : int
        Tasks among those asked for that are on none (``machine_of``).
    clock_us, tracked : int
        As in ``Known``.
    """

    scorer: Scorer
    estimator: MachineEstimator
    margins: MachineMargins
    counted: bool
    machine: Ids
    sums: Floats
    usage: Floats
    tasks: Ids
    whole: Ids
    without_machine: int
    clock_us: int
    tracked: int

    def __len__(self) -> int:
        return len(self.machine)

    @property
    def limit(self) -> Floats:
        """Sum of the limits; shape (m, n_resources)."""
        return self.sums[..., T_LIMIT] + self.sums[..., T_HELD]

    @property
    def unforecast(self) -> Floats:
        """Part of the limits that counts whole; shape (m, n_resources)."""
        return self.sums[..., T_HELD]

    @property
    def newcomers(self) -> Floats:
        """Limits of tasks with a forecast and fewer windows than ``NEWCOMER_WINDOWS``; shape (m, n_resources)."""
        return self.sums[..., T_NEW]

    def peaks(self) -> Floats:
        """Return what is reserved under each margin, in the order ``MARGIN_NAMES``; (n_margins, m, n_resources)."""
        return np.stack([self.estimator.at(margins, self.sums) for margins in self.margins.margins.tolist()])

    def of(self, machine: Ids) -> Floats:
        """Return the sums of named machines, zero for those without tasks; (k,) to (k, n_resources, N_TERMS)."""
        out = np.zeros((len(machine), *self.sums.shape[1:]))
        if len(self):
            at = np.minimum(np.searchsorted(self.machine, machine), len(self) - 1)
            there = self.machine[at] == machine
            out[there] = self.sums[at[there]]
        return out


def sums_of(
    tracker: Tracker, settings: ServingSettings, machines: list[int] | None = None, *, horizon_s: int | None = None,
    left: threading.Event | None = None,
) -> MachineSums:  # fmt: skip
    """Return the sums of all machines that have tasks, or of those among the named ones.

    Each task is read at one moment; tasks that move meanwhile count once.

    Parameters
    ----------
    tracker : Tracker
    settings : ServingSettings
    machines : list of int or None
    horizon_s : int or None
        None: that of the reservations, whose terms are kept. Of another one they are computed.
    left : threading.Event or None
        Set once the client has left.

    Raises
    ------
    RequestError
        The model does not forecast over that horizon.
    ClientLeftError
        The client left meanwhile.
    """
    (found,) = _sums(tracker, settings, machines, lambda _: (horizon_s,), left, with_x=horizon_s is not None)
    return found


def sums_by_horizon(
    tracker: Tracker, settings: ServingSettings, machines: list[int] | None = None, left: threading.Event | None = None
) -> list[MachineSums]:
    """Return the sums over each horizon of the model, each task at the same moment; arguments as for ``sums_of``."""
    return _sums(tracker, settings, machines, lambda scorer: scorer.horizons_s, left, with_x=True)


def _sums(
    tracker: Tracker, settings: ServingSettings, machines: list[int] | None,
    horizons_of: Callable[[Scorer], Sequence[int | None]], left: threading.Event | None, *, with_x: bool,
) -> list[MachineSums]:  # fmt: skip
    def made(known: Known, piece: slice) -> list[_Part]:  # noqa: ARG001
        if left is not None and left.is_set():
            raise ClientLeftError
        machine, stale = machine_of(known.task), is_stale(known, settings)
        parts = []
        for horizon_s in horizons_of(known.scorer):
            terms = own_terms(known, horizon_s)
            used = _used(known, terms)
            used[stale] = 0.0
            asked = known.scorer.horizon_s if horizon_s is None else horizon_s
            of = (known.scorer, asked, known.prices.machines, known.clock_us, known.tracked)
            parts.append(_Part(*of, machine, used, terms, count(known, terms, settings)))
        return parts

    pieces = tracker.visit(made, machines=machines, with_x=with_x, parts=MACHINE_PARTS)
    return [_summed(parts) for parts in zip(*pieces, strict=True)]


def _summed(parts: Sequence[_Part]) -> MachineSums:
    found, place = np.unique(np.concatenate([part.machine for part in parts]), return_inverse=True)
    nowhere = int(np.count_nonzero(found < 0))  # 1 where a task is on none: ids are not negative
    place = place.reshape(-1) - nowhere
    m = len(found) - nowhere
    sums, usage = np.zeros((m, len(RESOURCES), N_TERMS)), np.zeros((m, len(RESOURCES)))
    tasks, whole = np.zeros((2, m), np.int64)
    start = 0
    for part in parts:  # in order: the sums do not depend on the threads
        here = place[start : start + len(part.machine)]
        _add(here, part.terms, part.used, part.whole, sums, usage, tasks, whole)
        start += len(here)
    of = parts[0]
    estimator, counted = of.scorer.machines_over(of.horizon_s), of.horizon_s in of.margins
    margins = of.margins[of.horizon_s] if counted else MachineMargins.of(estimator, of.scorer.budgets.by_margin)
    without = int(np.count_nonzero(place < 0))
    return MachineSums(
        of.scorer, estimator, margins, counted, found[nowhere:], sums, usage, tasks, whole, without, of.clock_us,
        of.tracked,
    )  # fmt: skip


class CellTotals:
    """Totals over all machines of the cell, reused for frequent callers; threads may share one.

    Parameters
    ----------
    tracker : Tracker
    settings : ServingSettings
    """

    def __init__(self, tracker: Tracker, settings: ServingSettings) -> None:
        self._tracker, self._settings = tracker, settings
        self._lock = threading.Lock()
        self._made_s = -math.inf
        self._last = np.zeros(len(RESOURCES)), np.zeros((len(MARGIN_NAMES), len(RESOURCES)))

    def now(self) -> tuple[Floats, Floats]:
        """Return the limits, shape (n_resources,), and what is reclaimable of them, (n_margins, n_resources).

        They are up to ``KEPT_S`` old.
        """
        with self._lock:
            if time.monotonic() - self._made_s >= KEPT_S:
                found = sums_of(self._tracker, self._settings)
                limit = found.limit.sum(axis=0)
                self._last = limit, limit - found.peaks().sum(axis=1)
                self._made_s = time.monotonic()
            return self._last


@dataclass(frozen=True)
class _Part:
    """Counts of ``n`` tasks over one horizon, and the machines that they are on."""

    scorer: Scorer
    horizon_s: int
    margins: Mapping[int, MachineMargins]
    clock_us: int
    tracked: int
    machine: Ids
    used: Floats
    terms: Floats
    whole: NDArray[np.bool_]


def own_terms(known: Known, horizon_s: int | None = None) -> Floats:
    """Return the terms of ``n`` tasks at the limits of their last windows; shape (n, n_resources, N_TERMS).

    Over another horizon than that of the reservations, ``known`` has their features; RequestError where the model does
    not forecast over it.
    """
    used = demand(known.last)
    if horizon_s in (None, known.scorer.horizon_s):
        return terms_of(known.scores.shares, used, known.task["granted"])
    if horizon_s not in known.scorer.horizons_s:
        forecast = " or ".join(map(str, known.scorer.horizons_s))
        message = f"horizon_s: the model forecasts {forecast} s ahead, not {horizon_s}"
        raise RequestError(INVALID, "unknown_horizon", message, field="horizon_s")
    if known.x is None:  # no task is known
        return np.zeros((len(known.task), len(RESOURCES), N_TERMS))
    return terms_of(known.scorer.shares_over(horizon_s, known.x, known.last), used, known.task["granted"])


def _used(known: Known, terms: Floats) -> Floats:
    """Return what tasks used in their last windows, each up to its limit, 0 where unknown; shape (n, n_resources)."""
    used: Floats = np.fmin(terms[..., T_USAGE], known.task["limit"])
    without = ~(terms[..., T_LIMIT] > 0)  # few tasks: terms without a forecast have no usage
    if len(rows := np.flatnonzero(without.any(axis=1))):
        measured = demand(last_windows(known.key[rows], known.task[rows]))
        upto = np.where(np.isnan(measured), 0.0, np.fmin(measured, known.task["limit"][rows]))
        used[rows] = np.where(without[rows], upto, used[rows])
    return used


def count(known: Known, terms: Floats, settings: ServingSettings) -> NDArray[np.bool_]:
    """Change terms to what tasks count for their machines; return which of them count their limit whole, shape (n,).

    A task without a window or a forecast, a stale one, and one whose collection opted out count their limit; one of
    unknown limit counts nothing. Where the limit has changed since the last window, a smaller one bounds each term; a
    larger one adds the difference whole until the next window.
    """
    whole = known.opted_out | is_stale(known, settings) | (known.task[s.END_US] < 0)
    _count(np.ascontiguousarray(known.task["limit"]), whole, terms)
    return whole


@numba.njit(**LENT)
def _count(
    limit: Any,  # (n, R) float64, NaN unknown
    whole: Any,  # (n,) bool, changed
    terms: Any,  # (n, R, N_TERMS) float64, changed
) -> None:
    for i in range(len(terms)):
        all_whole = whole[i]
        for r in range(terms.shape[1]):
            term, now = terms[i, r], limit[i, r]
            if all_whole or not term[T_LIMIT] > 0.0 or not now > 0.0:
                term[:] = 0.0
                term[T_HELD] = now if now > 0.0 else 0.0
                whole[i] = True
            elif now > term[T_LIMIT]:
                term[T_HELD] = now - term[T_LIMIT]
            elif now < term[T_LIMIT]:
                for k in range(len(term)):
                    term[k] = min(term[k], now * now if k == T_SQUARES else now)


@numba.njit(**LENT)
def _add(
    place: Any,  # (n,) int64, of the machine; -1 for none
    terms: Any,  # (n, R, N_TERMS) float64
    used: Any,  # (n, R) float64
    held: Any,  # (n,) bool
    sums: Any,  # (m, R, N_TERMS) float64, changed
    usage: Any,  # (m, R) float64, changed
    tasks: Any,  # (m,) int64, changed
    whole: Any,  # (m,) int64, changed
) -> None:
    for i in range(len(place)):
        m = place[i]
        if m < 0:
            continue
        tasks[m] += 1
        whole[m] += held[i]
        for r in range(sums.shape[1]):
            usage[m, r] += used[i, r]
            for k in range(sums.shape[2]):
                sums[m, r, k] += terms[i, r, k]
