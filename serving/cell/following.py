"""Moves the served model's prices and its margins of machines by the outcomes of its answers, as in a replay."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numba
import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.jit import LENT
from reclaim.data.core.parallel import in_parts
from reclaim.data.core.state import part_of
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows, demand
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.features.registry import SLOT_S
from reclaim.serving.cell.machine_peaks import MachineMargins, MachinePeaks
from reclaim.training.bundle import price_facts
from reclaim.training.machines.following import AT_ONCE, times_of
from reclaim.training.margins.ladder import price_of
from reclaim.training.margins.margin import Budgets, guard, young_runs
from reclaim.training.margins.online import BUDGETED, OnlineMargins
from reclaim.training.margins.price import Price
from reclaim.training.models.steps import NOTHING, Steps, share_at
from reclaim.training.models.survival import N_THRESHOLDS, TABLE, rise

if TYPE_CHECKING:
    from reclaim.serving.cell.task_record import Ids, Taken
    from reclaim.serving.models.scorer import Scorer, Scores


_OF: Final = "of"
_MACHINES: Final = "machines."


@dataclass(frozen=True)
class Prices:
    """Prices of the three margins, and margins of machines, at one moment; never changed.

    Attributes
    ----------
    now : mapping of name to Price
        Those that answers are made at.
    start : mapping of name to Price
        Where those began: the model's, set on validation rows, or as a model of other cells set it itself.
    budgets : Budgets
    machines : mapping of int to MachineMargins
        By horizon, in seconds: of those whose outcomes are counted, that of the reservations among them.
    violated : float64, shape (len(BUDGETED), n_tiers, n_resources), or None
        Share of the answers whose horizon ended in the last day or so that were violated; NaN where none has counted.
        None: the prices do not follow.
    own : float64, shape (len(BUDGETED), n_tiers, n_resources), or None
        Prices at which the model itself expects the budgets, solved at the last hour; NaN until known. None: the
        prices do not follow.
    """

    now: Mapping[str, Price]
    start: Mapping[str, Price]
    budgets: Budgets
    machines: Mapping[int, MachineMargins]
    violated: NDArray[np.float64] | None = None
    own: NDArray[np.float64] | None = None

    @classmethod
    def of(cls, scorer: Scorer) -> Prices:
        """Return a model's own prices and margins."""
        machines = {scorer.horizon_s: MachineMargins.of(scorer.machines, scorer.budgets.by_margin)}
        return cls(scorer.prices, scorer.prices, scorer.budgets, machines)


def followed_horizons(scorer: Scorer) -> tuple[int, ...]:
    """Return the horizons over which margins of machines follow: that of the reservations, and those far ahead.

    An answer far ahead counts at ``TAKEN`` times within its horizon, so tasks are scored for it in one of many slots;
    over a short horizon they would be scored twice in each.
    """
    far = [horizon_s for horizon_s in scorer.horizons_s if times_of(horizon_s, SLOT_S)[1] > 1]
    return tuple(dict.fromkeys((scorer.horizon_s, *far)))


def whose(scorer: Scorer, at_once: float = AT_ONCE) -> str:
    """Return the model and the settings that prices begin with, in one line."""
    model = scorer.model
    facts = {name: price_facts(price) for name, price in scorer.prices.items()}
    settings = {"prices": facts, "budgets": asdict(scorer.budgets), "horizon_s": scorer.horizon_s, "at_once": at_once}
    return f"{model.name}/{model.version} {json.dumps(settings, sort_keys=True)}"


def named_in(memory: Mapping[str, NDArray[Any]]) -> str | None:
    """Return ``Following.of`` of saved arrays; None where there are none."""
    return None if _OF not in memory else memory[_OF].tobytes().decode()


def of_same(scorer: Scorer, of: str | None, threads: int = 1, at_once: float = AT_ONCE) -> Following | None:
    """Return what ``Following`` resumes from where ``Following.of`` names this model and these settings, else None."""
    number, _, begun = (of or "").partition(" ")
    return Following(scorer, int(number), threads, at_once) if begun == whose(scorer, at_once) else None


class Following:
    """Prices, and margins of machines, that follow the answers of one model.

    ``training.margins.online`` and ``training.machines.following`` in the service.

    Nothing here depends on the machine's clock: the same writes in the same order end in the same bits.

    Parameters
    ----------
    scorer : Scorer
    number : int
        Number of this following: a model that comes back begins again, under another one.
    threads : int
        For large writes; nothing depends on it.
    at_once : float
        Share of the machines that may exceed their reservation at once (``machines.following``); 1: any.

    Attributes
    ----------
    of : str
        Number, model and settings in one line, by which the log and a snapshot name the owner of prices.
    prices : Prices
        Of the moment.
    """

    def __init__(self, scorer: Scorer, number: int = 1, threads: int = 1, at_once: float = AT_ONCE) -> None:
        self._scorer, self.number = scorer, number
        self._online = OnlineMargins(scorer.prices, scorer.budgets, scorer.horizon_s, own=scorer.own_price)
        self._online.threads = self._threads = threads
        self._machines = {of: MachinePeaks(scorer, of, at_once=at_once) for of in followed_horizons(scorer)}
        self.of = f"{number} {whose(scorer, at_once)}"
        self._rungs = np.zeros((len(BUDGETED), len(TIER_LABELS), len(RESOURCES)))
        self.prices = self._moved()

    def take(self, taken: Taken, scores: Scores, begun_us: int) -> None:
        """Compare windows with earlier answers, move the prices, and record the answers just made as pending.

        Parameters
        ----------
        taken : Taken
        scores : Scores
            Of the ``k`` tasks that were touched.
        begun_us : int
            Begin of the cell, which may be earlier than that of its model.
        """
        taken = taken.outside_allocs()
        if len(taken.windows) == 0:
            return
        before = self._online.settings, *(of.margins for of in self._machines.values())
        self._online.begin_cell(begun_us)
        self._online.reach(int(taken.windows.end_us[-1]))
        for of in self._machines.values():
            of.take(taken, scores)
        after = self._online.settings, *(of.margins for of in self._machines.values())
        if any(now is not then for now, then in zip(after, before, strict=True)):
            self.prices = self._moved()
        held = self._held(scores.steps, taken.last)
        held[taken.opted_out] = np.nan  # they keep their limit
        slot, windows = taken.touched, taken.last
        rows = np.where(taken.opted_out, -1, np.arange(len(slot)))
        if len(taken.windows) > len(slot) or (taken.row < 0).any():  # only the last window of a task has an answer
            answered, slot, windows = taken.row >= 0, taken.slot, taken.windows
            of_rows = np.full((len(windows), *held.shape[1:]), np.nan)
            of_rows[taken.row[answered]] = held[answered]
            held = of_rows
            rows, of_tasks = np.full(len(windows), -1), rows
            rows[taken.row[answered]] = of_tasks[answered]
        self._online.wait(slot, held, windows, None if scores.risk is None else (scores.risk, rows))

    def _held(self, steps: Steps, last: Windows) -> NDArray[np.float64]:
        """Return the guarded reservations; shape (k, len(BUDGETED), n_resources)."""
        out = np.empty((len(last), len(BUDGETED), last.limit.shape[1]))
        tier, now, limit, young = tier_key(last.tier), demand(last), np.ascontiguousarray(last.limit), young_runs(last)

        def hold(part: int, parts: int) -> None:
            some = slice(len(out) * part // parts, len(out) * (part + 1) // parts)
            _hold(
                steps.rises[some], steps.now[some], self._rungs, tier[some], now[some], limit[some], young[some], TABLE,
                np.empty(N_THRESHOLDS, np.float32), out[some],
            )  # fmt: skip

        in_parts(hold, len(out), self._threads)
        return out

    def resize(self, scorer: Scorer) -> None:
        """Continue with the scorer of the same model for another mean limit."""
        for of in self._machines.values():
            of.resize(scorer)

    def forget(self, slots: Ids) -> None:
        """Free the slots of tasks that have ended; their answers have counted by what was measured."""
        self._online.forget(slots)
        for of in self._machines.values():
            of.forget(slots)

    def memory(self) -> dict[str, NDArray[Any]]:
        """Return its arrays as they are; ``named_in`` reads the model that they belong to."""
        machines = {
            f"{_MACHINES}{horizon_s}.{name}": array
            for horizon_s, of in self._machines.items()
            for name, array in of.memory().items()
        }
        return {_OF: np.frombuffer(self.of.encode(), np.uint8), **self._online.memory(), **machines}

    def recall(self, memory: Mapping[str, NDArray[Any]]) -> None:
        """Resume from saved arrays; ``ConfigError`` where other code made them."""
        self._online.recall(memory)
        for horizon_s, of in self._machines.items():
            of.recall(part_of(memory, f"{_MACHINES}{horizon_s}."))
        self.prices = self._moved()

    @property
    def bytes_per_task(self) -> int:
        """Memory of a task."""
        return self._online.bytes_per_task + sum(of.bytes_per_task for of in self._machines.values())

    def _moved(self) -> Prices:
        now = cast("Mapping[str, Price]", self._online.settings)
        self._rungs[:] = [now[name].rungs for name in BUDGETED]
        machines = {horizon_s: of.margins for horizon_s, of in self._machines.items()}
        begin, own = cast("Mapping[str, Price]", self._online.begin), price_of(self._online.own_rungs)
        return Prices(now, begin, self._scorer.budgets, machines, self._online.violated, own)


@numba.njit(**LENT)
def _hold(
    rises: Any,  # (k, R, N_RISES) uint8
    of_now: Any,  # (k, R) float32, what is used now, over the limit
    rungs: Any,  # (B, tiers, R) float64, of each price on a ladder
    tier: Any,  # (k,) int64
    now: Any,  # (k, R) float64, demand of the last windows
    limit: Any,  # (k, R) float64
    young: Any,  # (k,) bool
    table: Any,  # ``survival.TABLE``
    thresholds: Any,  # (N_THRESHOLDS,) float32, overwritten
    out: Any,  # (k, B, R) float64, written
) -> None:
    """Write the result of ``steps.reserved_at`` and ``margin.guarded`` for all budgets at once."""
    for i in range(len(out)):
        for r in range(out.shape[2]):
            most, known = limit[i, r], rises[i, r, 0] != NOTHING
            if known:
                rise(of_now[i, r], table, thresholds)
            for b in range(out.shape[1]):
                answer = math.nan
                if known:
                    answer = share_at(rises[i, r], thresholds, rungs[b, tier[i], r]) * most
                held = guard(answer, now[i, r], most, young[i] and not np.isnan(most))
                out[i, b, r] = most if np.isnan(held) else held
