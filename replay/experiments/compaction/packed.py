"""Sets margins of machines on the machines that a packing makes, at moments of the validation period.

A packing prefers sets of tasks that look smaller than they are. So a margin that keeps its budget on the machines of
the trace does not keep it on packed ones: each is set on the machines that the same rules pack under it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.windows import with_demand
from reclaim.features.splits import TEST, VALID, in_period
from reclaim.replay.closed_loop.constraints import Constraints
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.compaction.checkpoint import Checkpoint, EmptyCheckpointError, take_bare
from reclaim.replay.experiments.compaction.packing import (
    MOST_CLONES,
    Booked,
    Foreseen,
    MachineSet,
    Packer,
    TaskSet,
    not_held,
)
from reclaim.replay.open_loop.estimates import Estimates
from reclaim.replay.open_loop.history import current_reservations
from reclaim.replay.open_loop.machines import MachineContenders, least_score
from reclaim.training.machines.curve import margin_of
from reclaim.training.machines.fit import MachineRows
from reclaim.training.margins.answers import scores_of
from reclaim.training.margins.margin import Margin, guarded_amounts
from reclaim.training.margins.price import Price
from reclaim.training.margins.violation import violates

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

Packing = Callable[[Floats], tuple[NDArray[np.bool_], Floats]]
"""Packs under a margin or a price, shape (n_resources,). Says by resource whether the machines that come out keep the
budget, and the least margin or price that keeps it on these very machines."""

Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""Yields the result of a function for every job, in the jobs' order, as ``map`` and ``Workers.each`` do."""

ROUNDS: Final = 10
"""Largest number of packings of the moments for one margin: each margin changes the packing."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sets:
    """Machines that a packing of some moments made.

    Attributes
    ----------
    machine : int64, shape (n,)
        Machine of each task of all moments, from 0; ``len(peak)`` where it is not placed.
    peak : float64, shape (n_machines, n_resources)
        Largest usage of the machine's tasks together within the horizon, each up to its limit now, as in
        ``machines.snapshots``.
    """

    machine: Ids
    peak: Floats

    def total(self, of_tasks: Floats) -> Floats:
        """Sum values of the tasks, shape (n, ...), on each machine; shape (n_machines, ...)."""
        sums = np.zeros((len(self.peak) + 1, *of_tasks.shape[1:]))
        np.add.at(sums, self.machine, of_tasks)
        return sums[:-1]


class PackedMoments:
    """Moments of the validation period that are packed.

    Parameters
    ----------
    estimates : Estimates
    moments : sequence of Checkpoint
        At least one; their reservations are not read.
    policy : str
    seed : int
        Of the order in which machines are removed, one for each moment.
    each : Each
        Packs the moments, one after the other or next to each other.

    Attributes
    ----------
    not_held : set of int
        Times of the moments, in µs, that were left out for some estimator: ``MOST_CLONES`` of the cell do not hold the
        tasks.
    not_kept : list of str
        Contenders, each with a margin for which no value was found that keeps its budget on what is packed under it.
    """

    def __init__(
        self, estimates: Estimates, moments: Sequence[Checkpoint], policy: str, seed: int, each: Each = map
    ) -> None:
        self._estimates, self._moments, self._each = estimates, moments, each
        self._fewest = partial(_fewest, policy, seed)
        self.not_held: set[int] = set()
        self.not_kept: list[str] = []
        self._rows = np.concatenate([at.rows for at in moments])
        self._limit = np.concatenate([at.workload.limit for at in moments])
        before = estimates.history.previous[self._rows]
        self._around = np.union1d(self._rows, before[before >= 0])
        few = estimates.history.take(self._around)
        self._few = replace(few, windows=with_demand(few.windows))
        self._of = np.searchsorted(self._around, self._rows)

    def set_sum(self, name: str, contenders: MachineContenders) -> Mapping[str, Price | Margin]:
        """Return the least settings found with which an estimator's sum keeps the budgets on what it packs."""
        mine = self._estimates.answers[name].take(self._around)
        settings = contenders.sums[name]

        def reserved(under: Mapping[str, Price | Margin], margin: str) -> Floats:
            after = guarded_amounts(mine.under(under, margin, self._few.windows), self._few.windows)
            current = current_reservations(after, self._few)[self._of]
            return np.where(np.isnan(current), self._limit, current)

        def packed(
            pair: Mapping[str, Floats], margin: str, budget: float, score: Floats
        ) -> tuple[NDArray[np.bool_], Floats]:
            under = mine.settings({**pair, margin: score}, None)
            sets = self._pack(reserved(under, margin))

            def kept(under: Mapping[str, Price | Margin]) -> NDArray[np.bool_]:
                share: Floats = violates(sets.peak, sets.total(reserved(under, margin))).mean(axis=0)
                return share <= budget

            return kept(under), least_score(mine, kept, {other: pair[other] for other in pair if other != margin})

        budgets = contenders.budgets
        pair = {margin: _score(settings[margin]) for margin in ("baseline", "aggressive")}
        for margin, budget in (("aggressive", budgets.aggressive), ("baseline", budgets.baseline)):
            # the aggressive one first, as the baseline reserves at least what that does
            packing = partial(packed, pair, margin, budget)
            pair = {**pair, margin: self._least(f"{name} (sum), {margin}", pair[margin], packing)}
        return mine.settings(pair, None)

    def set_machine(self, name: str, contenders: MachineContenders) -> Mapping[str, tuple[float, ...]]:
        """Return the least margins found with which an estimator of machines keeps the budgets on what it packs.

        A safer margin is at least the other.
        """
        foreseer, estimator = contenders.machines[name]
        terms = foreseer.current_terms(self._rows)
        margins = dict(contenders.margins_of(name))

        def packed(budget: float, of: Floats) -> tuple[NDArray[np.bool_], Floats]:
            booked = Foreseen(terms, estimator, tuple(of.tolist()))
            sets = self._pack(booked)
            sums = sets.total(terms)
            seen = [
                MachineRows(sums[:, r], sets.peak[:, r], np.arange(len(sums)), mean_limit)
                for r, mean_limit in enumerate(estimator.mean_limit)
            ]
            curves = zip(estimator.curves, seen, strict=True)
            kept = violates(sets.peak, booked.of_sets(sums)).mean(axis=0) <= budget
            return kept, np.array([margin_of(rows.scores(curve), budget) for curve, rows in curves])

        least = np.full(len(estimator.curves), -np.inf)
        for margin, budget in reversed([*contenders.budgets.by_margin.items()]):  # the largest budget first
            first = np.maximum(margins[margin], least)
            least = self._least(f"{name}, {margin}", first, partial(packed, budget), least)
            margins[margin] = tuple(least.tolist())
        return margins

    def _least(self, what: str, first: Floats, packed: Packing, floor: float | Floats = -np.inf) -> Floats:
        found, kept = _least_kept(first, packed, floor)
        if not kept:
            self.not_kept.append(what)
            log.warning("%s: no margin was found that keeps its budget on the machines packed under it", what)
        return found

    def _pack(self, booked: Booked) -> Sets:
        """Pack every moment onto the fewest machines; ConfigError where none of them can be packed."""
        ends = np.cumsum([len(at.rows) for at in self._moments]).tolist()
        mine = [slice(end - len(at.rows), end) for at, end in zip(self._moments, ends, strict=True)]
        jobs = [
            (
                at.time_us, at.workload, at.machines,
                replace(booked, terms=booked.terms[its]) if isinstance(booked, Foreseen) else booked[its],
            )
            for at, its in zip(self._moments, mine, strict=True)
        ]  # fmt: skip
        packed = self._each(self._fewest, jobs)
        machine, peaks, first = np.full(len(self._rows), -1, np.int64), [], 0
        for at, its, found in zip(self._moments, mine, packed, strict=True):
            if found is None:
                self.not_held.add(at.time_us)
                continue
            n, placed = found
            used = np.zeros((n, *at.used.shape[1:]))
            here = placed >= 0
            np.add.at(used, placed[here], at.within_limits[here])
            taken = np.unique(placed[here])
            number = np.full(n + 1, -1, np.int64)
            number[taken] = first + np.arange(len(taken))
            machine[its] = number[placed]  # the last one for -1
            peaks.append(used[taken].max(axis=1))
            first += len(taken)
        if not peaks:
            raise not_held(f"at any of {len(self._moments)} moments of the validation period")
        machine[machine < 0] = first
        return Sets(machine, np.concatenate(peaks))


def _fewest(policy: str, seed: int, moment: tuple[int, TaskSet, MachineSet, Booked]) -> tuple[int, Ids] | None:
    """Return the fewest machines found for a moment, and the machine of each task; None where no clones hold them."""
    time_us, workload, machines, booked = moment
    packer = Packer(workload, booked, policy)
    order = np.random.default_rng([seed, time_us]).permutation(len(machines))
    for clones in range(1, MOST_CLONES + 1):
        found = packer.fewest(machines.take(np.tile(order, clones)))
        if found is not None:
            return found
    return None


def _score(setting: Price | Margin) -> Floats:
    return np.array(setting.share if isinstance(setting, Margin) else scores_of(setting.value))


def _least_kept(first: Floats, packed: Packing, floor: float | Floats = -np.inf) -> tuple[Floats, bool]:
    """Return the least of the margins or prices tried that keeps its budget on what is packed under it, and True.

    They rise from the ``first`` until the budget is kept, then fall, no lower than ``floor``, while it still is. Where
    none of ``ROUNDS`` keeps it: the highest one, and False.
    """
    here, found = first, None
    for _ in range(ROUNDS):
        kept, least = packed(here)
        if kept.all():
            found = here
            following = np.minimum(np.maximum(least, floor), here)
        elif found is None:
            following = np.maximum(least, here)
        else:
            break
        if (following == here).all():
            break
        here = following
    return (here, False) if found is None else (found, True)


def validation_moments(
    source: Source, estimates: Estimates, constraints: Constraints, horizon_s: int, most: int
) -> tuple[list[Checkpoint], Counter[str]]:
    """Return up to ``most`` moments of the validation period, evenly spread, with a horizon each; and the left out.

    Every window that begins in a horizon ends inside the period. Collections that are kept for the test are not on
    them. Moments at which nothing can be placed are left out, and counted by the reason.
    """
    windows, slot_us = estimates.history.windows, estimates.period.slots.slot_us
    rows = np.flatnonzero(in_period(VALID, estimates.history.period, estimates.history.group))
    found: list[Checkpoint] = []
    left_out: Counter[str] = Counter()
    if not len(rows):
        return found, left_out
    first = -(-int(windows.start_us[rows].min()) // slot_us) * slot_us
    later = windows.start_us[estimates.history.period == TEST]
    until = int(later.min(initial=windows.end_us[rows].max()))
    last = until - -(-horizon_s * 1_000_000 // slot_us) * slot_us  # usage counts by whole slots
    times = range(first, last + 1, horizon_s * 1_000_000)
    for i in np.unique(np.linspace(0, len(times) - 1, min(most, len(times))).astype(np.int64)):
        try:
            found.append(take_bare(source, estimates, constraints, times[i], horizon_s, rows))
        except EmptyCheckpointError as error:
            left_out[error.reason] += 1
    return found, left_out


def set_on_packed(contenders: MachineContenders, moments: PackedMoments) -> Iterator[MachineContenders]:
    """Yield the contenders after each of them whose margins were set on what it packs."""
    for name in contenders.sums:
        contenders = replace(contenders, sums={**contenders.sums, name: moments.set_sum(name, contenders)})
        yield contenders
    for name in contenders.machines:
        contenders = replace(contenders, packed={**contenders.packed, name: moments.set_machine(name, contenders)})
        yield contenders
