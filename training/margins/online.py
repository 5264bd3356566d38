"""Moves prices and margins with the workload: up where violations exceed the budget, and down again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final, cast

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.arrays import blank_rows, copy_of, room_for
from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts, parts_of
from reclaim.data.core.state import adopt
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.features.registry import SLOT_S, SLOT_US
from reclaim.training.margins.answers import Answers, Priced, Setting, three_of
from reclaim.training.margins.calibrate import guarded_reservations
from reclaim.training.margins.ladder import N_RUNGS, price_of
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.own_price import Risk, add_risk, mean_risk, risk_at, rungs_within, share_at, teaches
from reclaim.training.margins.price import Price
from reclaim.training.margins.violation import violates_in_kernel

BUDGETED: Final = ("baseline", "aggressive")
"""Margins that have a budget, in the order of their axis; ``medium`` lies between the two."""
LOOP: Final = 1.5
"""Largest rate, per horizon in days: an answer is violated a part of its horizon after it was given, on average, and a
faster one overshoots."""
ENOUGH: Final = 640.0
"""Violations a day that a budget must allow for the full rate. Below, the rate falls with their root, as
the gain of a Kalman filter does: the level that a cell needs wanders, by about half of its logarithm a day, and a spike
of one task violates twelve answers at 1 hour, so few violations say little about it."""
LEAST: Final = 3.6
"""Violations a day by which those of a tier with a smaller budget are measured: at the rate of a price, one spike then
moves its logarithm by one at most."""
_TAKEN: Final = 12
"""Number of a task's answers within one horizon whose outcome counts, at even distances: at 1 hour every 5-minute
window's."""
PENDING: Final = _TAKEN + 1
"""Room for answers of a task whose horizon is not over."""
_ARRIVED: Final = 4
"""Room for slots of windows that wait to be counted: the one under way, in which late ones count, too, and the next,
where windows do not end with a slot."""
_DAY_SLOTS: Final = 86_400 // SLOT_S
_FADE: Final = 1 - 1 / _DAY_SLOTS
"""Weight of a slot relative to the next one in what counts as the answers of a day."""
_HOUR_SLOTS: Final = 3_600 // SLOT_S
_HOUR_FADE: Final = 1 - 1 / 24
"""Weight of an hour's answers relative to those of the next one in what an own price is solved from."""
_FADES: Final = 1_000
"""Most hours by which answers fade: weights of zero would forget which tiers and resources had any."""
_UNKNOWN_US: Final = np.iinfo(np.int64).min
"""Begin of a cell that is not known yet. A cell may have begun before the clock of its trace."""
_VIOLATED: Final = len(RESOURCES)
"""First bit of what was violated, in ``came``."""
assert _VIOLATED + len(BUDGETED) * len(RESOURCES) <= np.iinfo(np.uint8).bits
_TASK: Final = np.dtype(
    [
        ("last_us", "i8"),  # end of the task's last window
        ("taken_us", "i8"),  # end of the last window whose answer counts
        ("end_us", "i8", PENDING),  # 0: free
        ("held", "f4", (PENDING, len(BUDGETED), len(RESOURCES))),  # infinite: the limit; NaN: not to be counted
        ("tier", "u1", PENDING),
        # bits of each resource r: whether any demand within the horizon was measured, and from _VIOLATED on, of each
        # margin, whether it was violated
        ("came", "u1", PENDING),
    ]
)


def risen(
    violated: NDArray[np.int64], answers: NDArray[np.int64], budget: NDArray[np.float64], a_day: NDArray[np.float64],
    rate: float,
) -> NDArray[np.float64]:  # fmt: skip
    """Return by how much the logarithm of a price rises for outcomes that have come; shape (B, …).

    Parameters
    ----------
    violated, answers : int64, shapes (B, …) and (…)
        Of B budgets: outcomes that are violations, and all.
    budget : float64, shape (B, 1, …)
    a_day : float64, shape (…)
        Answers of a day.
    rate : float
        That of a budget that allows ``ENOUGH`` violations a day.
    """
    allowed = budget * a_day
    slowed = rate * np.sqrt(np.clip(allowed, LEAST, ENOUGH) / ENOUGH)
    step: NDArray[np.float64] = slowed * (violated - budget * answers) / np.maximum(allowed, LEAST)
    return step


class OnlineMargins:
    """Keeps violation budgets as the workload drifts, for each tier by itself: prices or margins that follow it.

    Every answer is compared with what its task then demands. A violation counts in the slot of the trace's clock
    (``features.registry.SLOT_S``) after the one it comes in, and an answer a slot after its horizon, whether its task
    is still there or not, unless nothing was measured of it. So a load that grows is followed before a long horizon is
    over. The logarithm of the tier's price, or of what its reservations are multiplied with, moves by
    ``rate * (violated - budget * answers) / (budget * answers a day)``, by a smaller rate where the budget allows fewer
    than ``ENOUGH`` violations a day. So in the long run the share of answers that are violated is the budget, as long
    as the price stays within its bounds: adaptive conformal inference (Gibbs and Candes, NeurIPS 2021) on the scale of
    a price. Baseline and aggressive keep a budget each, and ``medium`` lies between what they come to.

    Answers of one slot rest on what came in the slots before it, so the order of tasks within one makes no difference.

    A replay calls ``hold``. A service that prices answers when it is asked for them calls ``reach`` with the latest end
    of a write's windows, ``wait`` with what is held at the prices of the moment, and prices by ``settings``.

    Parameters
    ----------
    settings : mapping of name of margin to Setting
        Where the three begin, set on validation rows.
    budgets : Budgets
        Shares of answers that may be violated within the horizon.
    horizon_s : int
        In seconds.
    rate : float or None
        By how much the logarithm rises for a day's budget of violations that are too many, where that is ``ENOUGH``;
        None: the setting's own (``Price.rate``, ``Margin.rate``).
    own : bool
        Whether prices begin at the model's own price (``own_price``), solved at every hour of the clock from the risks
        of the answers of the last day or so, in the first hour at every slot; ``settings`` hold until the first. What
        follows the outcomes is a factor of it.
    since_us : int or None
        When the cell began, by which ``own_price.share_at`` is cautious; None: with the first call of ``reach``.
    """

    threads: int = 1
    """For large calls; the answers do not depend on it."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        budgets: Budgets,
        horizon_s: int = 3_600,
        rate: float | None = None,
        *,
        own: bool = False,
        since_us: int | None = None,
    ) -> None:
        if rate is not None and not rate > 0:
            raise ConfigError(f"rate must be above 0, got {rate}")
        self.start = dict(settings)
        self.horizon_s = horizon_s
        first = self.start[BUDGETED[0]]
        self.rate = min(first.rate if rate is None else rate, LOOP * 86_400 / horizon_s)
        self._budget = np.array([asdict(budgets)[name] for name in BUDGETED])[:, None, None]
        self.own = own
        self._tasks, self._n_slots = np.zeros(0, _TASK), 0
        kept, of_tiers = -(-horizon_s // SLOT_S) + 3, (len(TIER_LABELS), len(RESOURCES))
        self._cells: dict[str, NDArray[Any]] = {
            "log": np.zeros((len(BUDGETED), *of_tiers)),
            # outcomes of the last days, and answers of which a first demand came, with the slots they are of: each slot
            # weighs a little less than the one after it
            "outcomes": np.zeros(of_tiers),
            "exceeded": np.zeros((len(BUDGETED), *of_tiers)),
            "met": np.zeros(of_tiers),
            "slots": np.zeros(of_tiers),
            # outcomes by the slot of their answers, in a ring
            "answered": np.zeros((kept, *of_tiers), np.int64),
            "violated": np.zeros((kept, len(BUDGETED), *of_tiers), np.int64),
            # by the slot of a window, in a ring: answers of which it was the first demand, and those that it violated
            "arrived": np.zeros((_ARRIVED, 1 + len(BUDGETED), *of_tiers), np.int64),
            # of the clock: under way, the last one whose answers have counted, and the last whose windows have
            "clock": np.full(3, -1, np.int64),
            # of the slot under way, and of the hour's before it: risks of answers, in parts of ``own_price.UNIT``, and
            # their number
            "expected_now": np.zeros((*of_tiers, N_RUNGS), np.int64),
            "priced_now": np.zeros(of_tiers, np.int64),
            "expected": np.zeros((*of_tiers, N_RUNGS), np.int64),
            "priced": np.zeros(of_tiers, np.int64),
            # of the hours before it, each of which weighs a little less than the next
            "expected_before": np.zeros((*of_tiers, N_RUNGS)),
            "priced_before": np.zeros(of_tiers),
            # own prices, as places on ladders: those that the factor begins at, and those of the whole budget
            "own": np.full((2, len(BUDGETED), *of_tiers), np.nan),
            # of what own prices held: mean risk by slot, in the ring; and of the cell's first day the violations that
            # these risks expected of answers whose outcomes are known, and those that came
            "held_risk": np.zeros((kept, len(BUDGETED), *of_tiers)),
            "promised": np.zeros((len(BUDGETED), *of_tiers)),
            "violations": np.zeros((len(BUDGETED), *of_tiers)),
            # begin of the cell, and whether an hour has been over, in which own prices were solved
            "begun": np.array([_UNKNOWN_US if since_us is None else since_us, 0]),
        }
        self._settings = self._moved()

    @property
    def settings(self) -> Mapping[str, Setting]:
        """The three prices or margins of the moment, each by tier."""
        return self._settings

    @property
    def log(self) -> NDArray[np.float64]:
        """Logarithm of the settings over where they began; shape (len(BUDGETED), n_tiers, n_resources)."""
        return self._cells["log"].copy()

    @property
    def violated(self) -> NDArray[np.float64]:
        """Share of answers whose horizon ended in the last day or so that were violated, as ``log``; NaN before any."""
        outcomes = self._cells["outcomes"]
        share = np.full(self._cells["exceeded"].shape, np.nan)
        np.divide(self._cells["exceeded"], outcomes, out=share, where=outcomes > 0)
        return share

    @property
    def begin(self) -> Mapping[str, Setting]:
        """The three prices or margins that the factor moves: as set, or the model's own cautious price."""
        begin = self._begin()
        return three_of(*(begin[name] for name in BUDGETED)) if self.own else self.start

    def begin_cell(self, begun_us: int) -> None:
        """Set when the cell began, as ``since_us``; what is known of that may come later than the model."""
        self._cells["begun"][0] = begun_us

    @property
    def own_rungs(self) -> NDArray[np.float64]:
        """Own prices of the whole budget at the last hour, as places on ladders, shape as ``log``; NaN until known."""
        rungs: NDArray[np.float64] = self._cells["own"][1].copy()
        return rungs

    def hold(self, slot: NDArray[np.int64], answers: Answers, windows: Windows) -> dict[str, NDArray[np.float64]]:
        """Return guarded reservations under the settings of the moment, and keep them as pending.

        Parameters
        ----------
        slot : int64, shape (n,)
            The task of each row.
        answers : Answers
            Before any margin or price.
        windows : Windows
            ``n`` rows, those of one task in time order; calls come in time order.

        Returns
        -------
        mapping of name of margin to float64, shape (n, n_resources), unit of the limit
        """
        moment = windows.end_us // SLOT_US
        order = np.argsort(moment, kind="stable")
        starts = np.flatnonzero(np.diff(moment[order], prepend=-1))
        held: dict[str, NDArray[np.float64]] = {name: np.empty(windows.limit.shape) for name in self.start}
        for rows in np.split(order, starts[1:]) if len(order) else ():
            self.reach(int(windows.end_us[rows[0]]))
            here = slice(None) if len(rows) == len(order) else rows
            some = windows if len(rows) == len(order) else windows.take(rows)
            for name, reservation in guarded_reservations(answers.take(here), some, self._settings).items():
                held[name][here] = reservation
            risk = answers.take(here).risk_of_rows() if isinstance(answers, Priced) else None
            self.wait(slot[here], np.stack([held[name][here] for name in BUDGETED], axis=1), some, risk)
        return held

    def wait(
        self,
        slot: NDArray[np.int64],
        held: NDArray[np.float64],
        windows: Windows,
        risk: tuple[Risk, NDArray[np.int64]] | None = None,
    ) -> None:
        """Compare windows with their tasks' earlier answers, and keep these as pending.

        Parameters
        ----------
        slot : int64, shape (n,)
        held : float64, shape (n, len(BUDGETED), n_resources)
            The guarded reservations just given; NaN where none was: such a row is only compared with earlier answers.
        windows : Windows
            Of slots that ``reach`` was called with, or earlier ones.
        risk : tuple of Risk and int64, shape (n,), or None
            Risks of answers, and the place of each row's; negative for a row without an answer.
        """
        if risk is not None:
            add_risk(*risk, tier_key(windows.tier), self._cells["expected_now"], self._cells["priced_now"])
        self._n_slots = max(self._n_slots, int(slot.max(initial=-1)) + 1)
        self._tasks = room_for(self._tasks, self._n_slots)
        columns = slot, windows.start_us, windows.end_us, tier_key(windows.tier), demand(windows), held, windows.limit
        horizon_us, cells, counts = self.horizon_s * 1_000_000, self._cells, ("answered", "violated", "arrived")
        threads = parts_of(len(slot), self.threads)
        if threads == 1 or not (slot[:-1] < slot[1:]).all():  # otherwise two threads could share a task
            _wait(self._tasks, *columns, horizon_us, *(cells[name] for name in counts), cells["clock"])
            return
        counted = [[np.zeros_like(cells[name]) for name in counts] for _ in range(threads)]

        def wait(part: int, parts: int) -> None:
            some = slice(len(slot) * part // parts, len(slot) * (part + 1) // parts)
            cut = (column[some] for column in columns)
            _wait(self._tasks, *cut, horizon_us, *counted[part], cells["clock"])

        in_parts(wait, len(slot), threads)
        for name, parts in zip(counts, zip(*counted, strict=True), strict=True):
            for part in parts:
                cells[name] += part

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Free the slots of tasks that have ended; their answers count by what was measured."""
        blank_rows(self._tasks, slots[slots < len(self._tasks)])

    def reach(self, end_us: int) -> None:
        """Let the outcomes that are known when a slot begins move the settings; nothing where it is under way."""
        moment, cells = end_us // SLOT_US, self._cells
        if moment <= cells["clock"][0]:
            return
        now_us = moment * SLOT_US  # of the slot, as its windows come in any order
        self._close_slot()
        self._solve(now_us, moment)
        passed = moment - cells["clock"][0]
        # an answer given at the end of a window of slot k, at latest just before k + 1, waits for windows that begin
        # within its horizon, of which the last may end a slot later
        settled, kept = moment - 1 - -(-self.horizon_s // SLOT_S), len(cells["answered"])
        done, over = _between(cells["clock"][1], settled, kept), _between(cells["clock"][2], moment - 1, _ARRIVED)
        n, violated = cells["answered"][done].sum(axis=0), cells["violated"][done].sum(axis=0)
        arrived = cells["arrived"][over].sum(axis=0)
        if self.own and teaches(now_us - int(cells["begun"][0])):
            promised = (cells["held_risk"][done] * cells["answered"][done][:, None]).sum(axis=0)
            cells["promised"], cells["violations"] = cells["promised"] + promised, cells["violations"] + violated
        for name, counted in (("answered", done), ("violated", done), ("held_risk", done), ("arrived", over)):
            cells[name][counted] = 0
        cells["clock"][:] = moment, settled, moment - 1
        fade, known = _FADE**passed, cells["slots"] > 0
        for name, more in (("outcomes", n), ("exceeded", violated), ("met", arrived[0])):
            cells[name] = cells[name] * fade + more
        cells["slots"] = np.where(known, cells["slots"] * fade + (1 - fade) / (1 - _FADE), arrived[0] > 0)
        a_day = cells["met"] / np.maximum(cells["slots"], 1.0) * _DAY_SLOTS
        begin = self._begin()
        bounds = np.stack([begin[name].bounds for name in BUDGETED], axis=1)  # (2, n_budgets, n_tiers, R)
        cells["log"] = np.clip(cells["log"] + risen(arrived[1:], n, self._budget, a_day, self.rate), *bounds)
        self._settings = self._moved()

    def _close_slot(self) -> None:
        """Add the risks of the slot under way to those of its hour, and keep what they were at the prices that held."""
        cells = self._cells
        if self.own:
            risk = mean_risk(cells["expected_now"], cells["priced_now"])
            held = [risk_at(risk, cast("Price", self._settings[name]).rungs) for name in BUDGETED]
            # an answer stands in the ring at the slot under way, or at the next where it is not given as one begins
            this, following = (cells["clock"][0] + [0, 1]) % len(cells["held_risk"])
            cells["held_risk"][this] = np.where(cells["priced_now"] > 0, held, cells["held_risk"][this])
            cells["held_risk"][following] = cells["held_risk"][this]
        for name in ("expected", "priced"):
            cells[name] += cells[name + "_now"]
            cells[name + "_now"][:] = 0

    def _solve(self, now_us: int, moment: int) -> None:
        """Solve own prices where hours are over, or in the first one a slot."""
        cells = self._cells
        if cells["begun"][0] == _UNKNOWN_US:
            cells["begun"][0] = now_us
        over = moment // _HOUR_SLOTS - int(cells["clock"][0]) // _HOUR_SLOTS
        expected, priced = (cells[name + "_before"] + cells[name] for name in ("expected", "priced"))
        if cells["priced"].any() and (over or not cells["begun"][1]):
            risks, age_us = (_and_of_all(expected), _and_of_all(priced)), now_us - int(cells["begun"][0])
            for b, budget in enumerate(self._budget.ravel()):
                first_day = (_and_of_all(cells[name][b]) for name in ("promised", "violations"))
                shares = (share_at(age_us, budget, *first_day) if self.own else 1.0, 1.0)
                for k, share in enumerate(shares):
                    found = rungs_within(*risks, share * budget)
                    # before its first answer a tier has the price of all; from then on its answers always weigh
                    cells["own"][k, b] = np.where(priced > 0, found[:-1], found[-1])
            cells["begun"][1] |= over > 0
        if over:
            fade = _HOUR_FADE ** min(over, _FADES)
            cells["expected_before"], cells["priced_before"] = expected * fade, priced * fade
            cells["expected"][:], cells["priced"][:] = 0, 0

    def _begin(self) -> Mapping[str, Setting]:
        """Return where the prices begin that the factor moves: as set, or the model's own."""
        if not self.own:
            return self.start
        return {name: _at_rungs(self.start[name], self._cells["own"][0, b]) for b, name in enumerate(BUDGETED)}

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return its arrays as they are, for a caller that copies them at once and knows the settings."""
        return {"tasks": self._tasks[: self._n_slots], **self._cells}

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Continue from copies of ``memory``, to the bit; ``ConfigError`` where other code made it."""
        found = {name: copy_of(adopt(name, array, memory)) for name, array in self.memory().items()}
        self._tasks = found.pop("tasks")
        self._n_slots, self._cells = len(self._tasks), found
        self._settings = self._moved()

    @property
    def bytes_per_task(self) -> int:
        """Memory of a task."""
        return _TASK.itemsize

    def _moved(self) -> Mapping[str, Setting]:
        begin = self._begin()
        return three_of(*(begin[name].moved(log) for name, log in zip(BUDGETED, self._cells["log"], strict=True)))


def _between(after: int, last: int, kept: int) -> NDArray[np.int64]:
    """Return the places in a ring of the slots after one, up to the last; of more than it keeps, each place once."""
    return np.arange(max(after + 1, last - kept + 1), last + 1) % kept


def _and_of_all(of_tiers: NDArray[Any]) -> NDArray[Any]:
    """Return sums by tier, (n_tiers, …), with that of all tiers as a last row."""
    return np.concatenate([of_tiers, of_tiers.sum(axis=0, keepdims=True)])


def own_prices(
    settings: Mapping[str, Price], budgets: Budgets, tier: NDArray[np.int64], risk: Risk, age_us: int = 2**60
) -> Mapping[str, Price]:
    """Return a model's own prices for the risks of answers to tasks of tiers, (n, …) each, in a cell of an age.

    Without an age the whole budget is spent.
    """
    online = OnlineMargins(settings, budgets, own=True, since_us=0)
    add_risk(risk, np.arange(len(risk)), tier, online._cells["expected"], online._cells["priced"])
    online._solve(age_us, 0)
    return cast("Mapping[str, Price]", online.begin)


def _at_rungs(setting: Setting, rungs: NDArray[np.float64]) -> Setting:
    """Return a price that stands at places on ladders, (n_tiers, n_resources); as it is where they are unknown."""
    assert isinstance(setting, Price)
    kept = np.isnan(rungs) | np.array(setting.given)
    by_tier = np.where(kept, np.array(setting.of_tiers), price_of(rungs))
    return replace(setting, by_tier=tuple(map(tuple, by_tier.tolist())))


@numba.njit(**LENT)
def _wait(
    tasks: Any,  # (n_tasks,) _TASK
    slot: Any,  # (n,) int64
    start_us: Any,  # (n,) int64
    end_us: Any,  # (n,) int64
    tier: Any,  # (n,) int64
    now: Any,  # (n, R) float64, demand of the window
    held: Any,  # (n, B, R) float64, the reservations just given
    limit: Any,  # (n, R) float64
    horizon_us: int,
    answered: Any,  # (n_slots, n_tiers, R) int64, ring
    violated: Any,  # (n_slots, B, n_tiers, R) int64, ring
    arrived: Any,  # (_ARRIVED, 1 + B, n_tiers, R) int64, ring
    clock: Any,  # (3,) int64: slots, of which the second and the third have counted
) -> None:
    """Compare each window with its task's earlier answers, and keep this one as pending.

    An answer counts as soon as any demand within its horizon is known, and as violated as soon as it is; both in the
    ring's place of its slot, and in that of the window's, or of the earliest that has not counted yet.
    """
    for i in range(len(slot)):
        task = tasks[slot[i]]
        if end_us[i] <= task.last_us:  # a repeated or late window changes nothing
            continue
        task.last_us = end_us[i]
        free = -1
        for k in range(PENDING):
            given_us = task.end_us[k]
            if given_us == 0 or start_us[i] >= given_us + horizon_us:
                task.end_us[k] = 0
                free = k
                continue
            before = np.int64(task.came[k])
            came = before
            for r in range(now.shape[1]):
                if np.isnan(now[i, r]) or np.isnan(task.held[k, 0, r]):
                    continue
                came |= 1 << r
                for b in range(held.shape[1]):
                    passed = violates_in_kernel(now[i, r], task.held[k, b, r])
                    came |= np.int64(passed) << (_VIOLATED + b * now.shape[1] + r)
            fresh = came ^ before
            if fresh == 0:
                continue
            task.came[k] = came
            place, of = max(-(-given_us // SLOT_US), clock[1] + 1) % len(answered), task.tier[k]
            at = max(-(-end_us[i] // SLOT_US), clock[2] + 1) % len(arrived)
            for r in range(now.shape[1]):
                answered[place, of, r] += fresh >> r & 1
                arrived[at, 0, of, r] += fresh >> r & 1
                for b in range(held.shape[1]):
                    violates = fresh >> (_VIOLATED + b * now.shape[1] + r) & 1
                    violated[place, b, of, r] += violates
                    arrived[at, 1 + b, of, r] += violates
        given = False
        for r in range(now.shape[1]):
            given = given or not np.isnan(held[i, 0, r])
        if given and free >= 0 and end_us[i] - task.taken_us >= horizon_us // _TAKEN:
            task.taken_us = end_us[i]
            task.end_us[free] = end_us[i]
            task.tier[free], task.came[free] = tier[i], 0
            for r in range(now.shape[1]):
                for b in range(held.shape[1]):
                    if np.isnan(held[i, b, r]) or not limit[i, r] > 0.0:
                        task.held[free, b, r] = np.nan
                    elif held[i, b, r] < limit[i, r]:
                        task.held[free, b, r] = held[i, b, r]
                    else:
                        task.held[free, b, r] = np.inf
