"""Judges requests on the windows in which they held: violations and what is reclaimed, of all and of each workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import DAY_US, RESOURCES
from reclaim.features.splits import TEST
from reclaim.replay.experiments.recommend.decisions import Decisions
from reclaim.replay.experiments.recommend.series import Floats, Integers, TaskRows
from reclaim.replay.open_loop.bootstrap import FEWEST, Bootstrap, bounds, reported, resampled_sums
from reclaim.replay.open_loop.metrics import POSITION, STATS
from reclaim.replay.open_loop.rows import ratio, sums_by
from reclaim.training.margins.violation import violates

_COLUMNS: Final = ("rows", "violations", "granted", "reclaimed")
"""Of ``metrics.STATS``, those that are summed here; ``granted`` and ``reclaimed`` are of the request."""
_AT_ONCE: Final = 2_000
"""Workloads that are resampled at once: with 1,000 draws 130 MB."""


@dataclass(frozen=True)
class Judged:
    """Windows on which requests are judged, ``n`` of them.

    Attributes
    ----------
    workload, held : int64, shape (n,)
        Workload of each, and the decision whose request holds then.
    day : int64, shape (n,)
        Day of the period, from 0.
    need : float64, shape (n, n_resources)
        Demand, at most the limit; NaN unknown.
    request : float64, shape (n, n_resources)
        What the task had requested.
    seconds : float64, shape (n,)
    n_workloads : int
    """

    workload: Integers
    held: Integers
    day: Integers
    need: Floats
    request: Floats
    seconds: Floats
    n_workloads: int

    @classmethod
    def of(cls, rows: TaskRows, decisions: Decisions, period: int, begins_us: int) -> Judged:
        """Lay out the windows of a period that begins at a time."""
        chosen = decisions.judged[period]
        need = np.where(rows.limit[chosen] < rows.demand[chosen], rows.limit[chosen], rows.demand[chosen])
        return cls(
            workload=rows.workload[chosen], held=decisions.held[period],
            day=(rows.start_us[chosen] - begins_us) // DAY_US, need=need, request=rows.request[chosen],
            seconds=rows.seconds[chosen], n_workloads=len(rows.ids),
        )  # fmt: skip

    def without(self, withheld: NDArray[np.bool_]) -> Judged:
        """Return the windows without those of requests that are not set; bool, shape (n_decisions, n_resources)."""
        return replace(self, need=np.where(withheld[self.held], np.nan, self.need))

    def sums(self, request: Floats, key: Integers, n_keys: int) -> Floats:
        """Return ``metrics.STATS`` of windows under requests, shape (n, n_resources), by key; (n_keys, n_stats, R).

        A window counts where demand and request are known. A window's request counts as granted; one without a request
        grants and reclaims nothing.
        """
        out = np.zeros((n_keys, len(STATS), len(RESOURCES)))
        known = np.isfinite(self.need) & np.isfinite(request)
        had = known & np.isfinite(self.request)
        weight = self.seconds[:, None]
        values = {
            "rows": known.astype(np.float64),
            "violations": (known & violates(self.need, request)).astype(np.float64),
            "granted": np.where(had, self.request, 0.0) * weight,
            "reclaimed": np.where(had, self.request - request, 0.0) * weight,
        }
        for stat in _COLUMNS:
            out[:, POSITION[stat]] = sums_by(key, values[stat], n_keys)
        return out

    def by_workload(self, requests: Floats) -> Floats:
        """Return the sums of each workload under the requests of all decisions, shape (n_decisions, n_resources)."""
        return self.sums(requests[self.held], self.workload, self.n_workloads)

    def as_requested(self) -> Floats:
        """Return the sums of each workload under the requests that its windows had."""
        return self.sums(self.request, self.workload, self.n_workloads)

    def most(self, n_decisions: int) -> Floats:
        """Return the largest need while each request held: the oracle's request; (n_decisions, n_resources)."""
        out = np.full((n_decisions, len(RESOURCES)), np.nan)
        np.fmax.at(out, self.held, self.need)
        return out


def shares(sums: Floats) -> tuple[Floats, Floats]:
    """Return violation rate and reclaimed share; from shape (..., n_stats, R) to (..., R) each."""
    rows, violations, granted, reclaimed = (sums[..., POSITION[stat], :] for stat in _COLUMNS)
    return ratio(violations, rows), ratio(reclaimed, granted)


def with_intervals(by_workload: Floats, bootstrap: Bootstrap) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return violation rate and reclaimed share of all, with intervals from resampled workloads."""
    columns = [POSITION[stat] for stat in _COLUMNS]
    drawn = bootstrap.sums(by_workload[:, columns].reshape(len(by_workload), -1))
    full = np.zeros((len(drawn), len(STATS), len(RESOURCES)))
    full[:, columns] = drawn.reshape(len(drawn), len(columns), len(RESOURCES))
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for name, values in zip(("violation_rate", "reclaimed_share"), shares(full), strict=True):
        found[name] = {resource: bootstrap.interval(values[:, r]) for r, resource in enumerate(RESOURCES)}
    return found


def of_each_workload(judged: Judged, requests: Floats, bootstrap: Bootstrap) -> list[dict[str, dict[str, Any]]]:
    """Return violation rate of each workload and resource, an interval from resampled days, its windows and days."""
    days = int(judged.day.max(initial=0)) + 1
    key = judged.workload * days + judged.day
    sums = judged.sums(requests[judged.held], key, judged.n_workloads * days)
    of_days = sums[:, [POSITION["violations"], POSITION["rows"]]].reshape(judged.n_workloads, days, -1)
    found: list[dict[str, dict[str, Any]]] = []
    for first in range(0, judged.n_workloads, _AT_ONCE):
        some = of_days[first : first + _AT_ONCE]
        flat = np.moveaxis(some, 0, 1).reshape(days, -1)
        drawn = resampled_sums(flat, draws=bootstrap.draws, seed=bootstrap.seed)
        found += _reported(some, drawn.reshape(len(drawn), len(some), 2, len(RESOURCES)), bootstrap.confidence)
    return found


def _reported(of_days: Floats, drawn: Floats, confidence: float) -> list[dict[str, dict[str, Any]]]:
    found = []
    for k, mine in enumerate(of_days):
        of_days_here = mine.reshape(len(mine), 2, len(RESOURCES))
        one: dict[str, dict[str, Any]] = {}
        for r, resource in enumerate(RESOURCES):
            violations, rows = of_days_here[..., r].sum(axis=0)
            low, high = np.nan, np.nan
            days = int(np.count_nonzero(of_days_here[:, 1, r]))
            if days >= FEWEST:
                low, high = bounds(ratio(drawn[:, k, 0, r], drawn[:, k, 1, r]), confidence)
            one[resource] = {
                **reported(float(ratio(violations, rows)), low, high),
                "windows": int(rows),
                "violations": int(violations),
                "days": days,
            }
        found.append(one)
    return found


def set_once(requests: Floats, unknown: NDArray[np.bool_], decisions: Decisions) -> Floats:
    """Return the requests if none is set again in the test period after the first one that rests on an answer.

    Parameters
    ----------
    requests : float64, shape (n_decisions, n_resources)
    unknown : bool, shape (n_decisions, n_resources)
        Whether a request was kept for want of an answer.
    decisions : Decisions
    """
    out, waiting = requests.copy(), unknown.copy()
    for one in decisions.of(TEST):  # in the order of time
        before = decisions.before[one]
        if before >= 0:
            out[one] = np.where(waiting[before], requests[one], out[before])
            waiting[one] &= waiting[before]
    return out
