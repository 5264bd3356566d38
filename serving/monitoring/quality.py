"""Measures the quality of live answers against the demand that followed, by tier and resource."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import room_for
from reclaim.data.core.jit import LENT
from reclaim.data.oom import is_last, near_limit
from reclaim.data.schema import MEMORY_AT, RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.features.registry import SLOT_S
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.violation import violates_in_kernel

MOST_WANTED: Final = 8_192
"""Answers that one call asks for, at most: those of a whole cell would otherwise begin and end in the same call."""
_SETTLE_US: Final = 30_000_000
"""Interval of ``settle``, µs of the clock: it reads every task, 4 ms for 250,000, too long for each small write."""
_SPREAD: Final = 40_503
"""Odd, and 2^16 over the golden ratio: its multiples spread evenly from 0 to 2^16 (Knuth, volume 3, 6.4)."""
_TASK: Final = np.dtype(
    [
        ("answer_us", "i8"),  # end of the window whose answer is pending; 0: none
        ("from_us", "i8"),  # no answer is pending before this time; 0: not seen yet
        ("last_start_us", "i8"),  # of the task's last window
        ("last_end_us", "i8"),
        ("failed_us", "i8"),  # the latest failure that has counted
        ("limit", "f8", len(RESOURCES)),  # at the time of the answer
        ("peak", "f8", len(RESOURCES)),  # largest demand within the horizon so far; NaN: not measured
        ("oom", "f4"),  # probability of an OOM within the horizon
        ("tier", "i1"),  # position in TIER_LABELS
        ("near", "u1"),  # whether the task's last window had its memory at the limit
        ("failed", "u1"),  # whether it met an OOM within the horizon
    ],
    align=True,
)


@dataclass(frozen=True)
class QualityNumbers:
    """Counts of judged answers since the start; T tiers of ``TIER_LABELS``, R resources, M margins, Q levels.

    Attributes
    ----------
    levels : tuple of float
        Quantile levels, the axis Q.
    margins : tuple of str
        The axis M.
    judged : int64, shape (T, R)
        Answers of a known limit whose horizon has passed with something measured in it.
    forecast : int64, shape (T, R)
        Those among them with quantiles.
    covered : int64, shape (T, R, Q)
        Those whose largest demand was at or below the quantile.
    violated : int64, shape (T, M, R)
        Judged answers whose largest demand was above the reservation.
    limit : float64, shape (T, R), unit of the limit
        Sum over the judged answers.
    reserved : float64, shape (T, M, R), unit of the limit
        The same.
    oom_judged : int64, shape (T,)
        Answers with an OOM probability whose horizon has passed with the task seen in it, or ended.
    oom_met : int64, shape (T,)
        Those that met an OOM (``data.oom``), as far as ends were reported.
    oom_predicted : float64, shape (T,)
        Sum of their probabilities: equal to ``oom_met`` in the long run where the probability is calibrated.
    oom_brier : float64, shape (T,)
        Sum of the squared differences between probability and outcome.
    failures : int64, shape (1,)
        Failures reported, OOM or not, each once; with none of them the four numbers above mean nothing.
    """

    levels: tuple[float, ...]
    margins: tuple[str, ...]
    judged: NDArray[np.int64]
    forecast: NDArray[np.int64]
    covered: NDArray[np.int64]
    violated: NDArray[np.int64]
    limit: NDArray[np.float64]
    reserved: NDArray[np.float64]
    oom_judged: NDArray[np.int64]
    oom_met: NDArray[np.int64]
    oom_predicted: NDArray[np.float64]
    oom_brier: NDArray[np.float64]
    failures: NDArray[np.int64]

    @property
    def reclaimed(self) -> NDArray[np.float64]:
        """Reclaimed share of the limits over all tiers, shape (M, R); NaN before the first judged answer."""
        limit = self.limit.sum(axis=0)
        with np.errstate(invalid="ignore"):
            return np.asarray(1.0 - self.reserved.sum(axis=0) / limit)


def _no_numbers(levels: tuple[float, ...], margins: tuple[str, ...]) -> QualityNumbers:
    tiers, resources = len(TIER_LABELS), len(RESOURCES)
    by_tier, of_margin = (tiers, resources), (tiers, len(margins), resources)
    return QualityNumbers(
        levels, margins,
        judged=np.zeros(by_tier, np.int64), forecast=np.zeros(by_tier, np.int64),
        covered=np.zeros((*by_tier, len(levels)), np.int64), violated=np.zeros(of_margin, np.int64),
        limit=np.zeros(by_tier), reserved=np.zeros(of_margin),
        oom_judged=np.zeros(tiers, np.int64), oom_met=np.zeros(tiers, np.int64),
        oom_predicted=np.zeros(tiers), oom_brier=np.zeros(tiers), failures=np.zeros(1, np.int64),
    )  # fmt: skip


class LiveQuality:
    """Compares answers with the demand that follows: one answer of a task at a time, so about one per horizon.

    An answer is violated as in ``training.margins.online``: a window that ends after the answer and begins within
    its horizon demands more than was reserved, and that was less than the limit. Each model has an object of
    its own. All is in memory alone: a restart loses pending answers, and the counts begin at 0 again, which Prometheus
    takes for a restart.

    One thread writes; any thread may call ``numbers``.

    Parameters
    ----------
    levels : tuple of float
        Levels of the forecast's quantiles.
    horizon_s : int
        Horizon of the answers, in seconds.
    margins : sequence of str
        Margins of the reservations.
    grace_s : float
        How long after its horizon an answer stays pending, in seconds, so that the last window that began within it can
        arrive. By default as in the replay, for windows of one slot that are never late.
    """

    def __init__(
        self,
        levels: tuple[float, ...],
        horizon_s: int,
        margins: Sequence[str] = MARGIN_NAMES,
        *,
        grace_s: float = SLOT_S,
    ) -> None:
        self.horizon_us = horizon_s * 1_000_000
        self.grace_us = int(grace_s * 1e6)
        self._numbers = _no_numbers(tuple(levels), tuple(margins))
        self._lock = Lock()  # readers see a call counted whole or not at all
        self._next_slot = 0  # the slot that is first in the next call
        self._settled_us = 0
        self._tasks = np.zeros(0, _TASK)
        self._held = np.zeros((0, len(margins), len(RESOURCES)))
        self._quantiles = np.zeros((0, len(RESOURCES), len(levels)), np.float32)

    def observe(self, slot: NDArray[np.int64], windows: Windows) -> None:
        """Compare windows with pending answers; call it before ``expect`` of the same write.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row.
        windows : Windows
            ``n`` rows, those of one task in time order. A late one counts for what it covers; one that is repeated
            changes nothing.
        """
        self._make_room(slot)
        now = demand(windows)
        near = near_limit(now[:, MEMORY_AT], windows.limit[:, MEMORY_AT])
        start_us, end_us = np.ascontiguousarray(windows.start_us), np.ascontiguousarray(windows.end_us)
        _observe(self._tasks, np.ascontiguousarray(slot), start_us, end_us, now, near, self.horizon_us)

    def wanted(self, slot: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tasks that have no pending answer: rising positions in ``slot``, ``MOST_WANTED`` at most, in turn.

        Answers under every margin are needed for them alone. Call it after ``observe``: the first answers of a cell are
        spread over a horizon, or all would be of the same hours.
        """
        self._make_room(slot)
        from_us, last_end_us = (self._tasks[name][slot] for name in ("from_us", "last_end_us"))
        fresh = from_us == 0
        wait = (slot[fresh] * _SPREAD % 2**16 * self.horizon_us) // 2**16
        self._tasks["from_us"][slot[fresh]] = from_us[fresh] = last_end_us[fresh] + wait
        rows = np.flatnonzero((self._tasks["answer_us"][slot] == 0) & (last_end_us >= from_us))
        if len(rows) > MOST_WANTED:
            after = slot[rows] >= self._next_slot
            rows = np.concatenate([rows[after], rows[~after]])[:MOST_WANTED]
            self._next_slot = int(slot[rows[-1]]) + 1
        return np.sort(rows)

    def expect(
        self, slot: NDArray[np.int64], end_us: NDArray[np.int64], tier: NDArray[np.int8], limit: NDArray[np.float64],
        quantiles: NDArray[Any], reservation: NDArray[np.float64], oom: NDArray[Any],
    ) -> None:  # fmt: skip
        """Add answers just given as pending, except for tasks that have one already.

        Parameters
        ----------
        slot : int64, shape (k,)
            Each task once.
        end_us : int64, shape (k,), µs
            Of the task's last window, where the horizon of the answer begins.
        tier : int8, shape (k,)
            -1 unknown.
        limit : float64, shape (k, n_resources)
            NaN unknown: not judged.
        quantiles : float, shape (k, n_resources, n_levels)
            As a share of the limit, at the horizon; NaN where the model has none.
        reservation : float64, shape (k, n_margins, n_resources), unit of the limit
        oom : float, shape (k,)
            Probability at the horizon; NaN where the model has none.
        """
        self._make_room(slot)
        rows = np.flatnonzero(self._tasks["answer_us"][slot] == 0)
        # of one layout, so that the kernel is compiled once
        amounts = (np.ascontiguousarray(given, np.float64) for given in (limit, quantiles, reservation, oom))
        _expect(
            rows, np.ascontiguousarray(slot), self._tasks, self._held, self._quantiles, np.ascontiguousarray(end_us),
            tier_key(tier), *amounts,
        )  # fmt: skip

    def failed(
        self, slot: NDArray[np.int64], time_us: NDArray[np.int64], out_of_memory: NDArray[np.int64]
    ) -> None:  # fmt: skip
        """Record failed tasks before ``forget``.

        A failure that is reported again, or after a later one of its task, does not count.

        Parameters
        ----------
        slot, time_us : int64, shape (n,)
        out_of_memory : int64, shape (n,)
            1 for one that is recorded as out of memory, 0 for one that is recorded as another one; -1 where it is not
            recorded: then it was out of memory if the task's last memory was at the limit (``data.oom``).
        """
        self._make_room(slot)
        slot, time_us, said = np.unique(np.stack([slot, time_us, out_of_memory]), axis=1)
        task = self._tasks[slot]
        derived = is_last(task["last_start_us"], task["last_end_us"], time_us) & (task["near"] != 0)
        answer_us = task["answer_us"]
        within = (answer_us > 0) & (answer_us < time_us) & (time_us <= answer_us + self.horizon_us)
        self._tasks["failed"][slot[within & np.where(said < 0, derived, said > 0)]] = 1
        with self._lock:
            fresh = time_us > task["failed_us"]
            fresh[1:] &= (slot[1:] != slot[:-1]) | (time_us[1:] != time_us[:-1])  # given twice in one call
            self._numbers.failures[0] += np.count_nonzero(fresh)
        np.maximum.at(self._tasks["failed_us"], slot, time_us)

    def settle(self, clock_us: int) -> None:
        """Count the answers whose horizon and grace have passed; done every 30 s of the clock."""
        clock_us -= clock_us % _SETTLE_US
        if clock_us <= self._settled_us:
            return
        self._settled_us = clock_us
        end_us = self._tasks["answer_us"]
        due = np.flatnonzero((end_us > 0) & (end_us <= clock_us - self.horizon_us - self.grace_us))
        self._count(due, ended=False)
        end_us[due] = 0

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Release tasks: their answers count for the time that they were there, and their slots are free."""
        known = slots[slots < len(self._tasks)]
        self._count(known[self._tasks["answer_us"][known] > 0], ended=True)
        self._tasks[known] = np.zeros((), _TASK)

    def numbers(self) -> QualityNumbers:
        """Return a copy of the counts."""
        with self._lock:
            return deepcopy(self._numbers)

    def _count(self, slots: NDArray[np.int64], *, ended: bool) -> None:
        n = self._numbers
        with self._lock:
            _count(
                slots, self._tasks, self._held, self._quantiles, ended, n.judged, n.forecast, n.covered, n.violated,
                n.limit, n.reserved, n.oom_judged, n.oom_met, n.oom_predicted, n.oom_brier,
            )  # fmt: skip

    def _make_room(self, slot: NDArray[np.int64]) -> None:
        need = int(slot.max(initial=-1)) + 1
        self._tasks = room_for(self._tasks, need)
        self._held = room_for(self._held, need)
        self._quantiles = room_for(self._quantiles, need)


@numba.njit(**LENT)
def _observe(tasks: Any, slot: Any, start_us: Any, end_us: Any, now: Any, near: Any, horizon_us: int) -> None:
    for i in range(len(slot)):
        task = tasks[slot[i]]
        if end_us[i] >= task.last_end_us:
            task.last_start_us = start_us[i]
            task.last_end_us = end_us[i]
            task.near = near[i]
        if task.answer_us > 0 and end_us[i] > task.answer_us and start_us[i] < task.answer_us + horizon_us:
            for r in range(now.shape[1]):
                if not now[i, r] <= task.peak[r] and not np.isnan(now[i, r]):
                    task.peak[r] = now[i, r]


@numba.njit(**LENT)
def _expect(
    rows: Any, slot: Any, tasks: Any, held: Any, quantiles: Any, end_us: Any, tier: Any, limit: Any,
    new_quantiles: Any, reservation: Any, oom: Any,
) -> None:  # fmt: skip
    for i in rows:
        s = slot[i]
        task = tasks[s]
        task.answer_us = end_us[i]
        task.tier = tier[i]
        task.oom = oom[i]
        task.failed = 0
        for r in range(limit.shape[1]):
            task.limit[r] = limit[i, r]
            task.peak[r] = np.nan
            for m in range(held.shape[1]):
                held[s, m, r] = reservation[i, m, r]
            for q in range(quantiles.shape[2]):
                quantiles[s, r, q] = new_quantiles[i, r, q]


@numba.njit(**LENT)
def _count(
    slots: Any, tasks: Any, held: Any, quantiles: Any, ended: bool, judged: Any, forecast: Any, covered: Any,
    violated: Any, limit: Any, reserved: Any, oom_judged: Any, oom_met: Any, oom_predicted: Any, oom_brier: Any,
) -> None:  # fmt: skip
    n_margins, n_resources, n_levels = held.shape[1], held.shape[2], quantiles.shape[2]
    for i in range(len(slots)):
        slot = slots[i]
        task = tasks[slot]
        t = task.tier
        seen = ended
        for r in range(n_resources):
            peak, most = task.peak[r], task.limit[r]
            if np.isnan(peak):
                continue
            seen = True
            if not most > 0.0:
                continue
            judged[t, r] += 1
            limit[t, r] += most
            for m in range(n_margins):
                below = held[slot, m, r] < most
                reserved[t, m, r] += held[slot, m, r] if below else most
                violated[t, m, r] += below and violates_in_kernel(peak, held[slot, m, r])
            if np.isnan(quantiles[slot, r, n_levels - 1]):
                continue
            forecast[t, r] += 1
            for q in range(n_levels):
                covered[t, r, q] += not violates_in_kernel(peak, quantiles[slot, r, q] * most)
        if not np.isnan(task.oom) and (seen or task.failed):
            p, met = np.float64(task.oom), np.float64(task.failed)
            oom_judged[t] += 1
            oom_met[t] += task.failed
            oom_predicted[t] += p
            oom_brier[t] += (p - met) * (p - met)
