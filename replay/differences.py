"""Says of recorded replays of the margins which estimator is better, and whether by more than the noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from reclaim.data.schema import RESOURCES
from reclaim.data.style import RESOURCE_WORDS
from reclaim.data.table import Cell, Table
from reclaim.replay.compare import Chosen, choose, horizon_of, promise_of
from reclaim.replay.kinds import COMPARED, STATISTICAL
from reclaim.replay.paired import Paired
from reclaim.replay.record import TAG_PARENT
from reclaim.replay.units import UNITS, UnitSums, read_units
from reclaim.training import tracking
from reclaim.training.tracking import RunRecord

_MARGINS: Final = "margins"
"""The experiment whose runs keep their sums by unit."""
_NUMBERS: Final = tuple(f"{of} {what}" for of in ("reclaimed", "violation") for what in ("difference", "low", "high"))
_COLUMNS: Final = ("dataset", "horizon", "margin", "resource", "estimator", "against", *_NUMBERS, "verdict")


@dataclass(frozen=True)
class _Group:
    """Runs of one dataset, horizon and margin that judged the same task-windows, and what they rest on."""

    members: tuple[RunRecord, ...]
    rivals: tuple[RunRecord, ...]
    sums: Mapping[str, NDArray[np.float64]]


class _Resampling(TypedDict, total=False):
    """Options of ``Paired``, by the names of the settings of a replay."""

    draws: int
    seed: int
    confidence: float


def differences(runs: Sequence[str] | Chosen = ()) -> Table:
    """Return what each estimator does less what another does at the same margin, with intervals and a verdict.

    The learned ones (the statistical ones where there is none) stand against the best statistical one
    (``Paired.best_against``); and where several runs are named, those named later against the first: against its run of
    the same estimator where it is a whole experiment.

    Both of a pair are resampled on the same collections, so only runs that judged the same task-windows are paired,
    with the draws, seed and confidence that all of them were run with: what their page says then. Where those differ,
    it is ``paired``'s own. A replay recorded without its sums by unit has no row.

    Parameters
    ----------
    runs : sequence of str or Chosen
        As in ``compare.choose``.
    """
    chosen = runs if isinstance(runs, Chosen) else choose(runs)
    rows = [row for group in _groups(chosen) for row in _rows(group, chosen)]
    return Table(_COLUMNS, tuple(rows), percent=frozenset(_NUMBERS))


def _rows(group: _Group, chosen: Chosen) -> Iterator[tuple[Cell, ...]]:
    everyone = (*group.members, *group.rivals)
    names = _names(everyone)
    paired = Paired({names[run_id]: sums for run_id, sums in group.sums.items()}, **_resampling(everyone))
    rivals = [names[r.run_id] for r in group.rivals]
    learned = [m for m in group.members if m.tags["kind"] != STATISTICAL]
    for member in group.members:
        name = names[member.run_id]
        for r, resource in enumerate(RESOURCES):
            best = paired.best_against(name, rivals, r) if member in (learned or group.members) else None
            first = _first(member, group.members, chosen.named)
            opponents = [best, None if first is None else names[first.run_id]]
            for opponent in dict.fromkeys(o for o in opponents if o is not None):
                found = paired.difference(name, opponent, r)
                numbers = [n for i in (found.reclaimed, found.violation) for n in (i.value, i.low, i.high)]
                yield (
                    member.tags.get("dataset", "-"),
                    horizon_of(member),
                    member.tags["margin"],
                    RESOURCE_WORDS[resource],
                    name,
                    opponent,
                    *(n if np.isfinite(n) else None for n in numbers),
                    found.verdict,
                )


def _resampling(records: Sequence[RunRecord]) -> _Resampling:
    """Return the draws, seed and confidence that replays were run with; nothing where they differ or are unknown."""
    told = {tuple(record.params.get(name) for name in _Resampling.__annotations__) for record in records}
    if len(told) != 1 or None in (one := told.pop()):
        return {}
    draws, seed, confidence = map(str, one)
    return {"draws": int(draws), "seed": int(seed), "confidence": float(confidence)}


def _first(member: RunRecord, members: Sequence[RunRecord], named: Mapping[str, int]) -> RunRecord | None:
    """Return which run of the first that was named a member stands against; None for that one's own."""
    first = min((named[m.run_id] for m in members if m.run_id in named), default=0)
    if named.get(member.run_id, first) == first:
        return None
    of_first = [m for m in members if named[m.run_id] == first]
    alike = [m for m in of_first if m.tags["estimator"] == member.tags["estimator"]]
    return of_first[0] if len(of_first) == 1 else next(iter(alike), None)


def _names(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return what each run goes under: its estimator's name, with the run's id where several have it."""
    by_name: dict[str, set[str]] = {}
    for record in records:
        by_name.setdefault(record.tags["estimator"], set()).add(record.run_id)
    return {
        run_id: name if len(ids) == 1 else f"{name} {run_id[:8]}" for name, ids in by_name.items() for run_id in ids
    }


def _groups(chosen: Chosen) -> Iterator[_Group]:
    """Yield the chosen runs that can be paired, in order, each with the statistical runs to measure it by."""
    cache: dict[str, UnitSums | None] = {}

    def units(record: RunRecord) -> UnitSums | None:
        whole = record.tags[TAG_PARENT]
        if whole not in cache:
            path = tracking.find_file(whole, UNITS)
            cache[whole] = None if path is None else read_units(path)
        return cache[whole]

    def sums(record: RunRecord) -> NDArray[np.float64] | None:
        found = units(record)
        return None if found is None else found.sums.get((record.tags["estimator"], record.tags["margin"]))

    groups: list[tuple[tuple[str, ...], UnitSums, list[RunRecord]]] = []
    for record in chosen.runs:
        comparable = record.experiment == _MARGINS and record.tags.get("kind") in COMPARED
        found = units(record) if comparable else None
        if found is None or sums(record) is None:
            continue
        key = (record.tags["margin"], record.tags.get("dataset_fingerprint", ""), *promise_of(record))
        for other_key, other, members in groups:
            if key == other_key and (found is other or found.same_rows(other)):
                if chosen.named or all(m.tags["estimator"] != record.tags["estimator"] for m in members):
                    members.append(record)  # unasked the newest alone: what else was set changes no sums
                break
        else:
            groups.append((key, found, [record]))
    for (margin, *_), _, members in groups:
        parents = {m.tags[TAG_PARENT] for m in members}
        beside = [r for r in chosen.recorded if r.tags[TAG_PARENT] in parents and r.tags["margin"] == margin]
        rivals: dict[str, RunRecord] = {}
        for record in (*members, *beside):  # a chosen one stands before those of its experiment
            if record.tags.get("kind") == STATISTICAL:
                rivals.setdefault(record.tags["estimator"], record)
        everyone = {r.run_id: r for r in (*members, *rivals.values())}
        known = {run_id: of_run for run_id, r in everyone.items() if (of_run := sums(r)) is not None}
        yield _Group(tuple(members), tuple(r for r in rivals.values() if r.run_id in known), known)
