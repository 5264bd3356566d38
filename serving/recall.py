"""Brings back what a service remembered: its snapshot, then what the log says was done since, done again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reclaim.data.errors import StoreError
from reclaim.serving import records

if TYPE_CHECKING:
    from reclaim.serving.settings import ServingSettings
    from reclaim.serving.store import Store
    from reclaim.serving.tracker import Tracker


def facts_of(settings: ServingSettings) -> dict[str, Any]:
    """Return what the state means, beside its version: the settings that it came about under."""
    return {
        "lateness_s": settings.lateness_s,
        "units": {"cpu": settings.cpu_unit, "memory": settings.memory_unit},
    }


def recall(store: Store, tracker: Tracker, settings: ServingSettings) -> int:
    """Let a tracker go on from where the store stands, under the settings of now; return how many windows were folded.

    Raises
    ------
    StoreError
        The state is of amounts in other units, or of another release.
    ConfigError
        It is of another cell.
    """
    found, rows = store.recovered, 0
    last = _go_on_under(found.facts, tracker, settings)
    if found.arrays is not None:
        tracker.recall(found.arrays)
        found.arrays.clear()
    for record in store.records():
        if record.kind == records.WINDOWS:
            windows = records.read_windows(record.payload)
            tracker.publish(tracker.take(windows), None)
            rows += len(windows)
        elif record.kind == records.FACTS:
            tracker.tell(records.read_facts(record.payload))
        elif record.kind == records.GONE:
            tracker.leave(tracker.find(records.read_names(record.payload)))
        else:
            last = _go_on_under(json.loads(bytes(record.payload)), tracker, settings)
    now = facts_of(settings)
    if last != now:
        store.append(records.SETTINGS, json.dumps(now).encode())
        store.sync()
        _go_on_under(now, tracker, settings)
    return rows


def _go_on_under(facts: Mapping[str, Any], tracker: Tracker, settings: ServingSettings) -> Mapping[str, Any]:
    """Take what follows as it was first taken: windows that were not too late then may be by the settings of now."""
    if facts:
        theirs, ours = facts["units"], facts_of(settings)["units"]
        if theirs != ours:
            raise StoreError(
                f"the state's amounts are in {theirs['cpu']} and {theirs['memory']}, the settings say {ours['cpu']} "
                f"and {ours['memory']}: put RECLAIM_CPU_UNIT and RECLAIM_MEMORY_UNIT back, or take another --state"
            )
        tracker.tolerate(facts["lateness_s"])
    return facts
