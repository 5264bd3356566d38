"""Restores the task state of a service: loads the snapshot, then applies the records of the log again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from reclaim.data.core.state import part_of
from reclaim.data.errors import StoreError
from reclaim.serving.cell.following import Following, named_in, of_same
from reclaim.serving.writing import log_records

if TYPE_CHECKING:
    from reclaim.serving.cell.tracker import Tracker
    from reclaim.serving.models.scorer import Scorer
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.storage.store import Store
    from reclaim.serving.writing.recorder import Recorder

_PRICES: Final = "prices"
"""In a record of settings: ``Following.of``, or null."""
_SAVED: Final = "following."
"""In the names of the arrays of a snapshot."""


def facts_of(settings: ServingSettings) -> dict[str, Any]:
    """Return the settings that the state depends on."""
    return {
        "lateness_s": settings.lateness_s,
        "units": {"cpu": settings.cpu_unit, "memory": settings.memory_unit},
    }


def recorded(settings: ServingSettings, following: Following | None) -> dict[str, Any]:
    """Return what the next records of the log depend on: the settings, and the model whose prices follow outcomes."""
    return {**facts_of(settings), _PRICES: None if following is None else following.of}


def replay_log(
    store: Store, tracker: Tracker, settings: ServingSettings, scorer: Scorer, threads: int = 1,
    recorder: Recorder | None = None,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Restore a tracker from a store, under the current settings.

    Returns the number of windows folded, and what the log has last of ``recorded``.

    The recorder receives what a process before this one did not write.

    Prices that followed the outcomes of the same model resume there, to the bit: the windows since the snapshot are
    scored again. Those of another model start at that model's own.

    Raises
    ------
    StoreError
        The amounts of the state have other units, or another release wrote it.
    """
    found, rows = store.recovered, 0
    saved = named_in(part_of(found.arrays or {}, _SAVED))
    last: Mapping[str, Any] = {**found.facts, _PRICES: saved} if found.facts else {}

    def apply(facts: Mapping[str, Any]) -> None:
        _apply(facts, tracker, settings)
        if facts.get(_PRICES) != last.get(_PRICES):
            tracker.follow(of_same(scorer, facts.get(_PRICES), threads, settings.at_once))

    _apply(last, tracker, settings)
    tracker.follow(of_same(scorer, saved, threads, settings.at_once))
    if found.arrays is not None:
        tracker.recall(found.arrays)
        found.arrays.clear()
    if scorer.of_cell_size:
        scorer = scorer.resized(tracker.size.mean_limit)
        if tracker.following is not None:
            tracker.following.resize(scorer)
    for record in store.records():
        if record.kind in (log_records.WINDOWS, log_records.FACTS):
            tracker.clock.read(*log_records.times_of(record.payload))
        if record.kind == log_records.WINDOWS:
            windows = log_records.read_windows(record.payload)
            if recorder is not None:
                recorder.take(windows)
            taken = tracker.take(windows)
            scorer = tracker.sized(scorer, taken)
            tracker.publish(taken, None if tracker.following is None else scorer.score(taken.x, taken.last))
            rows += len(taken.windows)
        elif record.kind in (log_records.FACTS, log_records.REPORTED):
            given = log_records.read_facts(record.payload)
            if recorder is not None:
                recorder.take_facts(given)
            if record.kind == log_records.FACTS:
                tracker.store_facts(given)
        elif record.kind == log_records.GONE:
            tracker.remove(tracker.find(log_records.read_names(record.payload)))
        elif record.kind == log_records.RECORDED:
            if recorder is not None:
                recorder.forget()
        else:
            facts = json.loads(bytes(record.payload))
            apply(facts)
            last = facts
    if not settings.follow:
        tracker.follow(None)
    elif tracker.following is None:
        tracker.follow(Following(scorer, _number(last.get(_PRICES)) + 1, threads, settings.at_once))
    _apply(recorded(settings, tracker.following), tracker, settings)
    return rows, dict(last)


def _number(of: str | None) -> int:
    return 0 if of is None else int(of.partition(" ")[0])


def _apply(facts: Mapping[str, Any], tracker: Tracker, settings: ServingSettings) -> None:
    """Apply recorded settings to the records that follow: windows in time then may be too late by today's."""
    if facts:
        theirs, ours = facts["units"], facts_of(settings)["units"]
        if theirs != ours:
            raise StoreError(
                f"the state's amounts are in {theirs['cpu']} and {theirs['memory']}, the settings say {ours['cpu']} "
                f"and {ours['memory']}: put RECLAIM_CPU_UNIT and RECLAIM_MEMORY_UNIT back, or choose another --state"
            )
        tracker.tolerate(facts["lateness_s"])
