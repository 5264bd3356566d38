"""Compares recorded replays of the margins pairwise: which estimator is better, and whether by more than the noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.equal_violation.compare import EqualViolation
from reclaim.replay.experiment import COMPARED, LEARNED, ONLINE, STATISTICAL, rests_on
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.paired import USUAL, Comparison, Paired
from reclaim.replay.report.units import EQUAL, UNITS, UnitSums, read_equal, read_units
from reclaim.replay.runs.compare import Chosen
from reclaim.replay.runs.record import TAG_PARENT, dataset_of, horizon_of, shown_datasets
from reclaim.training.margins.value import Value
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.runs import RunRecord

_MARGINS: Final = "margins"
"""The experiment whose runs keep their sums by unit."""
_PROMISE: Final = (
    "horizon_s", "budgets.baseline", "budgets.aggressive", "by_tier", *(f"value.{of.name}" for of in fields(Value))
)  # fmt: skip
"""Settings that runs must share to be comparable: horizon, budgets, whether each tier keeps them, and the money that
sets prices in their place."""
_RESAMPLING: Final = ("draws", "seed", "confidence")
"""Settings of a replay that are those of its ``Bootstrap``."""
_NUMBERS: Final = tuple(f"{of} {what}" for of in ("reclaimed", "violation") for what in ("difference", "low", "high"))
_EQUAL: Final = "reclaimed at equal violation"
_COLUMNS: Final = ("margin", "resource", "estimator", "against", *_NUMBERS, "verdict",
                   "at equal violation, against", _EQUAL, "at equal violation")  # fmt: skip


@dataclass(frozen=True)
class _Group:
    """Runs of one dataset, promise and margin that judged the same task-windows, and the sums of each by its id.

    ``equal`` has what each reclaims at equal violation, (1 + draws, n_resources), of the runs that have that.
    """

    members: tuple[RunRecord, ...]
    rivals: tuple[RunRecord, ...]
    sums: Mapping[str, NDArray[np.float64]]
    equal: Mapping[str, NDArray[np.float64]]


def differences(chosen: Chosen) -> Table:
    """Return the differences between estimators at the same margin, with intervals and a verdict.

    The learned ones (the statistical ones where there is none) are compared with the best statistical one
    (``Paired.best_against``). Where several runs are named, those named later are also compared with the first; runs of
    a whole experiment with its run of the same estimator. Where none is named, a learned one is also compared with the
    learned one that stands first: the first model of a replay, or of the newest.

    Both of a pair are resampled on the same collections, so only runs that judged the same task-windows are paired. The
    draws, seed and confidence are those of the replays, so the numbers equal those of their pages; where the replays
    differ in them, ``paired.USUAL`` are used, and nothing is compared at equal violation. A replay recorded without
    its sums by unit has no row. A statistical estimator is not compared with its own other margins. A setting of the
    promise in which the replays differ is a column.
    """
    groups = list(_groups(chosen))
    promises = [{name: group.members[0].params.get(name) for name in _PROMISE} for group in groups]
    differing = [name for name in _PROMISE if name != "horizon_s" and len({one[name] for one in promises}) > 1]
    rows = [row for group in groups for row in _rows(group, chosen, differing)]
    return Table(("dataset", "horizon", *differing, *_COLUMNS), tuple(rows), percent=frozenset((*_NUMBERS, _EQUAL)))


def _rows(group: _Group, chosen: Chosen, settings: Sequence[str]) -> Iterator[tuple[Cell, ...]]:
    everyone = (*group.members, *group.rivals)
    names, dataset = _names(everyone), shown_datasets(chosen.runs)[group.members[0].run_id]
    how = _resampling(everyone)
    paired = Paired({names[run_id]: of for run_id, of in group.sums.items()}, how or USUAL)
    equal = EqualViolation(
        {} if how is None else {names[run_id]: of for run_id, of in group.equal.items()}, (how or USUAL).confidence
    )
    margin = group.members[0].tags["margin"]
    budget = None if (asked := group.members[0].params.get(f"budgets.{margin}")) is None else float(asked)
    learned = [m for m in group.members if m.tags["kind"] != STATISTICAL]
    for member in group.members:
        name, first = names[member.run_id], _first(member, group.members, chosen.named)
        own = rests_on(member.tags["estimator"])
        rivals = [names[r.run_id] for r in group.rivals if rests_on(r.tags["estimator"]) != own]
        for r, resource in enumerate(RESOURCES):
            best = paired.best_against(name, rivals, r, budget) if member in (learned or group.members) else None
            opponents = [best, None if first is None else names[first.run_id]]
            for opponent in dict.fromkeys(o for o in opponents if o is not None):
                compared = paired.compare(name, opponent, r, budget)
                found = compared.difference
                numbers = [n for i in (found.reclaimed, found.violation) for n in (i.value, i.low, i.high)]
                afterwards = None
                if opponent == best:
                    afterwards = equal.compare_best(name, rivals, r)
                elif name in equal.reclaimed and opponent in equal.reclaimed:
                    afterwards = equal.compare(name, opponent, r)
                yield (
                    dataset,
                    horizon_of(member),
                    *(member.params.get(name) for name in settings),
                    member.tags["margin"],
                    RESOURCE_WORDS[resource],
                    name,
                    opponent,
                    *(n if np.isfinite(n) else None for n in numbers),
                    compared.verdict,
                    *_afterwards(afterwards),
                )


def _afterwards(compared: Comparison | None) -> tuple[Cell, ...]:
    """Return opponent, difference of what is reclaimed and verdict at equal violation."""
    if compared is None:
        return None, None, None
    gain = compared.difference.reclaimed.value
    return compared.against, gain if np.isfinite(gain) else None, compared.verdict


def _resampling(records: Sequence[RunRecord]) -> Bootstrap | None:
    """Return the resampling of replays; None where they differ in it or it is unknown."""
    first, *others = [[record.params.get(name, "") for name in _RESAMPLING] for record in records]
    if "" in first or any(other != first for other in others):
        return None
    draws, seed, confidence = first
    return Bootstrap(int(draws), int(seed), float(confidence))


def _first(member: RunRecord, members: Sequence[RunRecord], named: Mapping[str, int]) -> RunRecord | None:
    """Return the run, of those named first, that a member is compared with; None for those themselves.

    Where none is named it is the first learned one.
    """
    if not named:
        learned = [m for m in members if m.tags["kind"] == LEARNED and not m.tags["estimator"].endswith(ONLINE)]
        return learned[0] if member in learned[1:] else None
    first = min((named[m.run_id] for m in members if m.run_id in named), default=0)
    if named.get(member.run_id, first) == first:
        return None
    of_first = [m for m in members if named[m.run_id] == first]
    alike = [m for m in of_first if m.tags["estimator"] == member.tags["estimator"]]
    return of_first[0] if len(of_first) == 1 else next(iter(alike), None)


def _names(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return the name of each run by its id: its estimator's, with the run's id where several have it."""
    estimators = {record.run_id: record.tags["estimator"] for record in records}
    several = list(estimators.values())
    return {run_id: name if several.count(name) == 1 else f"{name} {run_id[:8]}" for run_id, name in estimators.items()}


def _groups(chosen: Chosen) -> Iterator[_Group]:
    """Yield the chosen runs that can be paired, in order, each with the statistical runs it is compared with."""

    @cache
    def units(whole: str) -> UnitSums | None:
        with tracking.find_file(whole, UNITS) as path:
            return None if path is None else read_units(path)

    @cache
    def at_equal(whole: str) -> Mapping[tuple[str, str], NDArray[np.float64]]:
        with tracking.find_file(whole, EQUAL) as path:
            return {} if path is None else read_equal(path)

    def sums(record: RunRecord) -> NDArray[np.float64] | None:
        found = units(record.tags[TAG_PARENT])
        return None if found is None else found.sums.get((record.tags["estimator"], record.tags["margin"]))

    def reclaimed(record: RunRecord) -> NDArray[np.float64] | None:
        return at_equal(record.tags[TAG_PARENT]).get((record.tags["estimator"], record.tags["margin"]))

    groups: list[tuple[tuple[str, ...], UnitSums, list[RunRecord]]] = []
    for record in chosen.runs:
        if record.experiment != _MARGINS or record.tags.get("kind") not in COMPARED or sums(record) is None:
            continue
        found = units(record.tags[TAG_PARENT])
        assert found is not None
        key = (record.tags["margin"], dataset_of(record)[1], *(record.params.get(name, "") for name in _PROMISE))
        same = (m for k, other, m in groups if k == key and (found is other or found.same_rows(other)))
        members = next(same, None)
        if members is None:
            groups.append((key, found, [record]))
        elif chosen.named or all(m.tags["estimator"] != record.tags["estimator"] for m in members):
            members.append(record)  # of unnamed runs only the newest: their other settings change no sums
    for (margin, *_), _, members in groups:
        parents = {m.tags[TAG_PARENT] for m in members}
        beside = [r for r in chosen.recorded if r.tags[TAG_PARENT] in parents and r.tags["margin"] == margin]
        rivals: dict[str, RunRecord] = {}
        for record in (*members, *beside):  # a chosen run comes before others of its experiment
            if record.tags.get("kind") == STATISTICAL and sums(record) is not None:
                rivals.setdefault(record.tags["estimator"], record)
        known, equal = (
            {r.run_id: of for r in (*members, *rivals.values()) if (of := read(r)) is not None}
            for read in (sums, reclaimed)
        )
        yield _Group(tuple(members), tuple(rivals.values()), known, equal)
