"""Restores the task state of a service: loads the snapshot, then applies the records of the log again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reclaim.data.errors import StoreError
from reclaim.serving.writing import log_records

if TYPE_CHECKING:
    from reclaim.serving.cell.tracker import Tracker
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.storage.store import Store


def facts_of(settings: ServingSettings) -> dict[str, Any]:
    """Return the settings that the state depends on."""
    return {
        "lateness_s": settings.lateness_s,
        "units": {"cpu": settings.cpu_unit, "memory": settings.memory_unit},
    }


def replay_log(store: Store, tracker: Tracker, settings: ServingSettings) -> int:
    """Restore a tracker from a store, under the current settings; return the number of windows folded.

    Raises
    ------
    StoreError
        The amounts of the state have other units, or another release wrote it.
    ConfigError
        It belongs to another cell.
    """
    found, rows = store.recovered, 0
    last = _apply(found.facts, tracker, settings)
    if found.arrays is not None:
        tracker.recall(found.arrays)
        found.arrays.clear()
    for record in store.records():
        if record.kind == log_records.WINDOWS:
            windows = log_records.read_windows(record.payload)
            tracker.publish(tracker.take(windows), None)
            rows += len(windows)
        elif record.kind == log_records.FACTS:
            tracker.store_facts(log_records.read_facts(record.payload))
        elif record.kind == log_records.GONE:
            tracker.remove(tracker.find(log_records.read_names(record.payload)))
        else:
            last = _apply(json.loads(bytes(record.payload)), tracker, settings)
    now = facts_of(settings)
    if last != now:
        store.append(log_records.SETTINGS, json.dumps(now).encode())
        store.sync()
        _apply(now, tracker, settings)
    return rows


def _apply(facts: Mapping[str, Any], tracker: Tracker, settings: ServingSettings) -> Mapping[str, Any]:
    """Apply recorded settings to the records that follow: windows that were in time then may be too late by today's."""
    if facts:
        theirs, ours = facts["units"], facts_of(settings)["units"]
        if theirs != ours:
            raise StoreError(
                f"the state's amounts are in {theirs['cpu']} and {theirs['memory']}, the settings say {ours['cpu']} "
                f"and {ours['memory']}: put RECLAIM_CPU_UNIT and RECLAIM_MEMORY_UNIT back, or take another --state"
            )
        tracker.tolerate(facts["lateness_s"])
    return facts
