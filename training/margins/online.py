"""Adapts a margin to the workload: it widens where violations exceed the budget, and narrows again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import room_for
from reclaim.data.core.jit import LENT
from reclaim.data.core.state import memory_of, state_of
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.features.registry import SLOT_S
from reclaim.training.estimators.base import Estimate, Estimator
from reclaim.training.margins.margin import Margin, guarded
from reclaim.training.margins.violation import violates_in_kernel

_TAKEN: Final = 12
"""Answers of a task that are waited for within one horizon, at even distances: at 1 hour every 5-minute window's."""
PENDING: Final = 16
"""Room for answers of a task whose outcome is not counted yet: those of a horizon, and of the slots after it."""
RATE: Final = 0.5
"""By how much the logarithm of a reservation rises for a day's budget of violations that are too many. At 0.1 a drift
took weeks to be followed, at 1 the margin swung and reclaimed 2 to 3 points of the limit less."""
_DAY_SLOTS: Final = 86_400 // SLOT_S
_BOUNDS: Final = (np.log(0.05), np.log(1e3))
"""Of the logarithm: those of a margin (``calibrate.LOWEST_SHARE``, ``HIGHEST_SHARE``)."""
_TASK: Final = np.dtype(
    [
        ("last_us", "i8"),  # end of the task's last window
        ("taken_us", "i8"),  # end of the window whose answer was the last one to be waited for
        ("tier", "i8"),
        ("end_us", "i8", PENDING),  # 0: free
        ("held", "f8", (PENDING, len(RESOURCES))),  # infinite: cannot be violated; NaN: not to be counted
        ("known", "u1", (PENDING, len(RESOURCES))),  # whether any demand within the horizon was measured
        ("violated", "u1", (PENDING, len(RESOURCES))),
    ]
)
_CELL: Final = np.dtype(
    [
        ("log", "f8", len(RESOURCES)),  # of what reservations are multiplied with
        ("per_day", "f8", len(RESOURCES)),  # outcomes of a day, by the last days
        ("rows", "i8", len(RESOURCES)),  # outcomes of the slots just passed
        ("violated", "i8", len(RESOURCES)),
    ]
)


class OnlineMargin(Estimator):
    """Keeps a violation budget as the workload drifts, for each tier by itself.

    Every answer is held against what its task then demands. A slot of the trace's clock (``features.registry.SLOT_S``)
    after its horizon it counts as kept or violated, whether its task is still there or not, unless nothing was measured
    of it; and the reservations of all tasks of the tier are multiplied with ``exp(g)``, where g sums up
    ``rate * (violated - budget * answers) / (budget * answers a day)``. So in the long run the share of answers that
    are violated is the budget, as long as g stays within its bounds: adaptive conformal inference (Gibbs and Candes,
    NeurIPS 2021) on the scale of a margin. Outcomes are a horizon late, so a budget at 24 hours is followed by days.

    Answers of one slot rest on outcomes in the slots before it, so the order of tasks within one makes no difference.

    Parameters
    ----------
    base : Estimator
        A bare one.
    margin : Margin
        Where it begins, set on validation rows.
    budget : float
        Share of answers that may be violated within the horizon.
    horizon_s : int
        In seconds.
    rate : float
    """

    def __init__(
        self, base: Estimator, margin: Margin, budget: float, horizon_s: int = 3_600, rate: float = RATE
    ) -> None:
        if not 0 < budget < 1:
            raise ConfigError(f"budget must be between 0 and 1, got {budget}")
        if not rate > 0:
            raise ConfigError(f"rate must be above 0, got {rate}")
        self.base = base
        self.margin = margin
        self.budget = budget
        self.horizon_s = horizon_s
        self.rate = rate
        self._tasks = np.zeros(0, _TASK)
        self._tiers = np.zeros(len(TIER_LABELS), _CELL)
        self._slot = np.full(1, -1, np.int64)  # of the clock, under way

    def update(self, slot: NDArray[np.int64], windows: Windows) -> Estimate:
        """Take windows, ask the base, and hold what it says."""
        return self.hold(slot, self.base.update(slot, windows), windows)

    def hold(self, slot: NDArray[np.int64], bare: Estimate, windows: Windows) -> Estimate:
        """Return guarded answers under the margin of the moment, and wait for their outcomes.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row.
        bare : Estimate
            What the base says.
        windows : Windows
            ``n`` rows, those of one task in time order; calls come in time order.
        """
        self._tasks = room_for(self._tasks, int(slot.max(initial=-1)) + 1)
        moment = windows.end_us // (SLOT_S * 1_000_000)
        order = np.argsort(moment, kind="stable")
        starts = np.flatnonzero(np.diff(moment[order], prepend=-1))
        factor = np.broadcast_to(self.margin.factor(windows), windows.limit.shape)
        tier, now = tier_key(windows.tier), demand(windows)
        reservation, rule = np.empty_like(windows.limit), np.empty(windows.limit.shape, np.uint8)
        for rows in np.split(order, starts[1:]) if len(order) else ():
            self._reach(int(moment[rows[0]]))
            some = windows.take(rows)
            follow = np.exp(self._tiers["log"])[tier[rows]]
            wanted = Estimate(bare.reservation[rows] * factor[rows] * follow, bare.rule[rows])
            held = guarded(wanted, some)
            reservation[rows], rule[rows] = held.reservation, held.rule
            _wait(
                self._tasks, slot[rows], some.start_us, some.end_us, tier[rows], now[rows],
                held.reservation, some.limit, self.horizon_s * 1_000_000,
            )  # fmt: skip
        return Estimate(reservation, rule, bare.forecast)

    def _reach(self, moment: int) -> None:
        """Let the outcomes of the slot under way count, when a later one begins."""
        if moment <= self._slot[0]:
            return
        passed, tiers = moment - self._slot[0], self._tiers
        self._slot[0] = moment
        _settle(self._tasks, tiers, (moment - 1) * SLOT_S * 1_000_000 - self.horizon_s * 1_000_000)
        n = tiers["rows"].astype(np.float64)
        # a mean over the last day or so, in which each slot weighs a little less than the one after it
        fade = 1 - 1 / _DAY_SLOTS
        first = np.where(tiers["per_day"] > 0, tiers["per_day"] * fade**passed, n * _DAY_SLOTS * fade)
        tiers["per_day"] = first + n * _DAY_SLOTS * (1 - fade)
        spent = tiers["violated"] - self.budget * n
        with np.errstate(invalid="ignore", divide="ignore"):
            step = self.rate * spent / (self.budget * np.maximum(tiers["per_day"], n * _DAY_SLOTS))
        tiers["log"] = np.clip(tiers["log"] + np.where(n > 0, step, 0.0), *_BOUNDS)
        tiers["rows"] = 0
        tiers["violated"] = 0

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what it and its base remember."""
        base = {f"base.{name}": array for name, array in self.base.state().items()}
        return state_of(self._made_by, self._arrays()) | base

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from there; ``ConfigError`` where another kind, other parameters or other code made it."""
        arrays = memory_of(self._made_by, self._arrays(), state)
        base = {name.removeprefix("base."): array for name, array in state.items() if name.startswith("base.")}
        self.base.restore(base)
        self._tasks, self._tiers, self._slot = (arrays[name] for name in ("tasks", "tiers", "slot"))

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {"tasks": self._tasks, "tiers": self._tiers, "slot": self._slot}

    @property
    def _made_by(self) -> str:
        return f"OnlineMargin({self.margin}, budget={self.budget}, horizon_s={self.horizon_s}, rate={self.rate})"


@numba.njit(**LENT)
def _settle(
    tasks: Any,  # (n_tasks,) _TASK
    tiers: Any,  # (n_tiers,) _CELL
    until_us: int,
) -> None:
    """Count every answer given by then: all windows that began within its horizon have come."""
    for i in range(len(tasks)):
        task = tasks[i]
        if task.taken_us == 0:
            continue
        cell = tiers[task.tier]
        for k in range(PENDING):
            if 0 < task.end_us[k] <= until_us:
                task.end_us[k] = 0
                for r in range(len(cell.rows)):
                    if task.known[k, r] and not np.isnan(task.held[k, r]):
                        cell.rows[r] += 1
                        cell.violated[r] += task.violated[k, r]


@numba.njit(**LENT)
def _wait(
    tasks: Any,  # (n_tasks,) _TASK
    slot: Any,  # (n,) int64
    start_us: Any,  # (n,) int64
    end_us: Any,  # (n,) int64
    tier: Any,  # (n,) int64
    now: Any,  # (n, R) float64, demand of the window
    held: Any,  # (n, R) float64, the reservations just given
    limit: Any,  # (n, R) float64
    horizon_us: int,
) -> None:
    """Hold each window against its task's earlier answers, and wait for what comes of this one."""
    for i in range(len(slot)):
        task = tasks[slot[i]]
        if end_us[i] <= task.last_us:  # a repeated or late window changes nothing
            continue
        task.last_us = end_us[i]
        task.tier = tier[i]
        free = -1
        for k in range(PENDING):
            if task.end_us[k] == 0:
                free = k
            elif start_us[i] < task.end_us[k] + horizon_us:
                for r in range(now.shape[1]):
                    if not np.isnan(now[i, r]):
                        task.known[k, r] = 1
                        if violates_in_kernel(now[i, r], task.held[k, r]):
                            task.violated[k, r] = 1
        if free >= 0 and end_us[i] - task.taken_us >= horizon_us // _TAKEN:
            task.taken_us = end_us[i]
            task.end_us[free] = end_us[i]
            for r in range(now.shape[1]):
                task.known[free, r] = 0
                task.violated[free, r] = 0
                if not limit[i, r] > 0.0:
                    task.held[free, r] = np.nan
                else:
                    task.held[free, r] = held[i, r] if held[i, r] < limit[i, r] else np.inf
