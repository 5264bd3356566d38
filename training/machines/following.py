"""Moves the probabilities that curves of machines are read at, so that the share of violations is the budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.state import adopt
from reclaim.features.registry import SLOT_S
from reclaim.training.machines.curve import EXCEEDED, MachineCurve
from reclaim.training.machines.fit import MachineRows
from reclaim.training.margins.online import risen
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

RATE: Final = 4.0
"""Fall of the logarithm of the probability for an excess of one day's budget of violations, where that is
``margins.online.ENOUGH``: that of the prices of tasks (``margins.price.Price.rate``)."""
LOOP: Final = 0.5
"""Largest rate, per horizon in days: outcomes are a horizon late, and a faster one overshoots."""
LARGEST: Final = 0.5
"""Largest probability that is used: that of the first of ``EXCEEDED``."""
SMALLEST: Final = 1e-24
"""Smallest probability that is used, far beyond the peaks seen: the margin continues straight in its logarithm."""
TAKEN: Final = 12
"""Number of a machine's answers within one horizon whose outcome counts, at even distances: at 1 hour those of every
slot."""
LATE: Final = 1
"""Slots after its own in which a window still counts for the peak of its machine: windows of a slot do not all come
before the first one of the next."""
AT_ONCE: Final = 0.1
"""Share of the machines that may pass what was reserved at the same time, but for ``TIMES``."""
ALONE: Final = 2
"""Number of machines that may do so in a cell of any size: as many do by chance."""
TIMES: Final = 0.01
"""Share of the times at which more may, for any margin: a tenth of those that a budget of 1 % leaves, spent at once."""
TIMES_RATE: Final = 1.0
"""Fall of the logarithm of the probability for an excess of one day's times with too many machines at once. A rate of
four left as few such times, and up to three points less were reclaimed (``benchmarks/LOG.md``, 2026-11-26)."""
FEWEST_TIMES: Final = float(TAKEN)
"""Least number of times a day, with too many machines at once, that the excess is divided by: a common spike exceeds
what was reserved in all answers of a horizon."""
_DAY_S: Final = 86_400


def times_of(horizon_s: int, slot_s: int) -> tuple[int, int]:
    """Return the slots of a horizon, and how many lie from one time whose answers are waited for to the next."""
    slots = -(-horizon_s // slot_s)
    return slots, max(1, slots // TAKEN)


def margin_beyond(curve: MachineCurve, probability: float) -> float:
    """Return the margin at a probability; below the last of ``EXCEEDED`` straight on in the logarithm.

    The slope is the average one from the first to the last: the end of a curve may be flat where the peaks had a bound
    that later ones need not have.
    """
    first, last = EXCEEDED[0], EXCEEDED[-1]
    if probability >= last:
        return curve.margin(probability)
    slope = (curve.margins[-1] - curve.margins[0]) / math.log(first / last)
    return curve.margins[-1] + slope * math.log(last / probability)


def crowded(passed: Ids, n: Ids, at_once: float) -> NDArray[np.bool_]:
    """Return whether more than a share ``at_once`` of ``n`` machines, and more than ``ALONE``, were over at a time."""
    many: NDArray[np.bool_] = passed > np.maximum(at_once * n, ALONE)
    return many


class OnlineMachines:
    """Keeps the budgets of machines as the workload drifts: margins that follow the peaks that came.

    The answers of a slot of the clock rest on outcomes of answers whose horizon was over ``LATE`` slots before it. The
    logarithm of the probability that is asked falls as that of a price of tasks rises (``margins.online.risen``).

    Where tasks move together, machines exceed their reservations together, and there is nowhere to move work to. So
    there is a second budget: at no more than ``TIMES`` of the times a share of more than ``at_once`` of the machines
    passes. Overspending it lowers the probability further in the same way. Until that is recovered, the first budget
    raises nothing.

    Parameters
    ----------
    curves : sequence of MachineCurve
        Of R resources. The margins begin at those of the budgets.
    budgets : sequence of float
        Of B margins, rising: shares of machines' times that may be violated. A smaller one never reserves less.
    horizon_s : int
    slot_s : int
        Time from one slot to the next, in seconds.
    at_once : float
        Share of the machines; 1: there is no second budget.
    moves : bool
        False: outcomes are counted, and the margins stay.
    begins : float
        What is asked at first, over the budget.
    """

    def __init__(
        self, curves: Sequence[MachineCurve], budgets: Sequence[float], horizon_s: int, slot_s: int = SLOT_S, *,
        at_once: float = AT_ONCE, moves: bool = True, begins: float = 1.0,
    ) -> None:  # fmt: skip
        self.curves, self.budgets = tuple(curves), tuple(budgets)
        self.horizon_slots, self.step = times_of(horizon_s, slot_s)
        self._budget = np.array(self.budgets)[:, None]
        self._at_once = at_once
        self._rate, self._times_rate = (
            min(rate, LOOP * _DAY_S / horizon_s) if moves else 0.0 for rate in (RATE, TIMES_RATE)
        )
        self._times_a_day = max(_DAY_S // (slot_s * self.step), 1)
        shape, ring = (len(self.budgets), len(self.curves)), self.horizon_slots // self.step + LATE + 3
        self._state: dict[str, NDArray[Any]] = {
            "log": np.full(shape, math.log(begins)),  # of what is asked over the budget, by the first budget
            "lower": np.zeros(shape),  # by which the second one lowers it
            # outcomes of the last days, and the times they are of: each weighs a little less than the one after it
            "answers": np.zeros(shape[1:]), "passed": np.zeros(shape), "times": np.zeros(shape[1:]),
            # of all times that have counted
            "judged": np.zeros(shape[1:], np.int64), "violated": np.zeros(shape, np.int64),
            # outcomes by the time of their answers, in a ring; -1 where none waits
            "waiting": np.full(ring, -1, np.int64), "waiting_judged": np.zeros((ring, *shape[1:]), np.int64),
            "waiting_violated": np.zeros((ring, *shape), np.int64),
            # share of the machines that passed at once, by time, of a day in a ring
            "day": np.full(self._times_a_day, -1, np.int64), "at_once": np.zeros((self._times_a_day, *shape)),
            # slot under way, and the last time that has counted
            "clock": np.full(2, -1, np.int64),
        }  # fmt: skip
        self._margins = self._moved()

    @property
    def margins(self) -> Floats:
        """Margins of the moment for ``MachineCurve.peak``; shape (B, R)."""
        return self._margins

    @property
    def asked(self) -> Floats:
        """Probabilities that are asked of the curves at the moment; shape (B, R)."""
        own = np.maximum(self._budget * np.exp(self._state["log"] - self._state["lower"]), SMALLEST)
        asked: Floats = np.minimum.accumulate(own[::-1])[::-1]
        return asked

    @property
    def lowered(self) -> Floats:
        """Factor by which the second budget lowers what is asked, (B, R); 1: it does not."""
        factor: Floats = np.exp(-self._state["lower"])
        return factor

    @property
    def recent(self) -> Floats:
        """Share of the answers of the last day or so that were violated, (B, R); NaN where none has counted."""
        share = np.full(self._state["passed"].shape, np.nan)
        np.divide(self._state["passed"], self._state["answers"], out=share, where=self._state["answers"] > 0)
        return share

    @property
    def judged(self) -> Ids:
        """Answers that have counted; shape (R,)."""
        return self._state["judged"].copy()

    @property
    def violated(self) -> Ids:
        """Answers that were violated; shape (B, R)."""
        return self._state["violated"].copy()

    @property
    def at_once(self) -> Floats:
        """Share of the machines that passed at the last time that has counted, (B, R); NaN before the first."""
        time = int(self._state["clock"][1])
        if time < 0:
            return np.full(self._state["log"].shape, np.nan)
        known: Floats = self._state["at_once"][time % self._times_a_day]
        return known.copy()

    @property
    def most_at_once(self) -> Floats:
        """The largest such share of the last day, (B, R); NaN before the first."""
        recent = self._state["day"] > self._state["clock"][1] - self._times_a_day
        recent &= self._state["day"] >= 0
        return self._state["at_once"][recent].max(axis=0) if recent.any() else np.full(self._state["log"].shape, np.nan)

    @overload
    def is_time(self, slot: int) -> bool: ...
    @overload
    def is_time(self, slot: Ids) -> NDArray[np.bool_]: ...
    def is_time(self, slot: int | Ids) -> bool | NDArray[np.bool_]:
        """Return whether the answers of a slot count; of each, for an array of slots of any shape."""
        return slot % self.step == 0

    def count(self, slot: int, judged: Ids, violated: Ids) -> None:
        """Record outcomes of a slot's answers, of which ``is_time``; ``reach`` lets them count once they are known.

        Parameters
        ----------
        slot : int
        judged : int64, shape (R,)
            Machines whose peak is known.
        violated : int64, shape (B, R)
            Those of them whose peak exceeded what was reserved.
        """
        at = slot // self.step % len(self._state["waiting"])
        self._state["waiting"][at] = slot // self.step
        self._state["waiting_judged"][at], self._state["waiting_violated"][at] = judged, violated

    def reach(self, slot: int) -> bool:
        """Let the outcomes that are known when a slot begins move the margins; return whether any has."""
        state = self._state
        if slot <= state["clock"][0]:
            return False
        state["clock"][0] = slot
        known = (slot - 1 - LATE - self.horizon_slots) // self.step
        due = np.sort(state["waiting"][(state["waiting"] >= 0) & (state["waiting"] <= known)])
        for time in due.tolist():
            self._settle(time)
        if len(due):
            self._margins = self._moved()
        return len(due) > 0

    def _settle(self, time: int) -> None:
        state, at = self._state, time % len(self._state["waiting"])
        n, violated = state["waiting_judged"][at], state["waiting_violated"][at]
        state["waiting"][at] = -1
        passed = max(time - int(state["clock"][1]), 1) if state["clock"][1] >= 0 else 1
        state["clock"][1] = time
        state["judged"] += n
        state["violated"] += violated
        fade = (1 - 1 / self._times_a_day) ** passed
        each = (1 - fade) * self._times_a_day
        state["answers"] = state["answers"] * fade + n
        state["passed"] = state["passed"] * fade + violated
        state["times"] = np.where(state["times"] > 0, state["times"] * fade + each, n > 0)
        a_day = state["answers"] / np.maximum(state["times"], 1.0) * self._times_a_day
        step = -risen(violated, n, self._budget, a_day, self._rate)
        step = np.where((step > 0) & (state["lower"] > 0), 0.0, step)
        least, most = np.log(SMALLEST / self._budget), np.log(LARGEST / self._budget)
        state["log"] = np.clip(state["log"] + step, least, most)
        if self._at_once < 1:
            spent = (crowded(violated, n, self._at_once) - TIMES * (n > 0)) / max(
                TIMES * self._times_a_day, FEWEST_TIMES
            )
            state["lower"] = np.clip(state["lower"] + self._times_rate * spent, 0.0, -least)
        day = time % self._times_a_day
        state["day"][day] = time
        np.divide(violated, n, out=state["at_once"][day], where=n > 0)
        state["at_once"][day][:, n == 0] = 0.0

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return its arrays as they are, for a caller that copies them at once."""
        return dict(self._state)

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Resume from copies of ``memory``, to the bit; ``ConfigError`` where other code made it."""
        self._state = {name: adopt(name, array, memory).copy() for name, array in self._state.items()}
        self._margins = self._moved()

    def _moved(self) -> Floats:
        asked = self.asked
        return np.array([[margin_beyond(c, p) for c, p in zip(self.curves, of, strict=True)] for of in asked.tolist()])


def follow(
    curve: MachineCurve, rows: MachineRows, time_us: NDArray[np.int64], horizon_s: int, slot_us: int, budget: float
) -> Floats:
    """Return what is reserved at each machine's time as the margin follows the peaks that came; shape (n,).

    Without the second budget.

    Parameters
    ----------
    curve : MachineCurve
        Where it begins: at the margin of the budget.
    rows : MachineRows
        ``n`` snapshots.
    time_us : int64, shape (n,)
        Their times.
    horizon_s : int
    slot_us : int
        Time from one snapshot to the next.
    budget : float
        Share of the times that may be violated.
    """
    reserved: Floats = follow_all(curve, rows, time_us, horizon_s, slot_us, (budget,), at_once=1.0)[0]
    return reserved


def follow_all(
    curve: MachineCurve,
    rows: MachineRows,
    time_us: NDArray[np.int64],
    horizon_s: int,
    slot_us: int,
    budgets: Sequence[float],
    *,
    at_once: float = AT_ONCE,
) -> Floats:
    """Return the same for several budgets, rising, of which a smaller one never reserves less; shape (B, n).

    With the second budget, of machines that pass ``at_once``.
    """
    online = OnlineMachines([curve], budgets, horizon_s, slot_us // 1_000_000, at_once=at_once)
    slot = time_us // slot_us
    order = np.argsort(slot, kind="stable")
    slots, first = np.unique(slot[order], return_index=True)
    reserved = np.empty((len(online.budgets), len(order)))
    for now, here in zip(slots.tolist(), np.split(order, first[1:]), strict=True):
        online.reach(now)
        for b, margin in enumerate(online.margins[:, 0].tolist()):
            reserved[b, here] = curve.peak(rows.sums[here], margin, rows.mean_limit)
        if online.is_time(now):
            violated = violates(rows.peak[here], reserved[:, here]).sum(axis=1)
            online.count(now, np.array([len(here)]), violated[:, None])
    return reserved
