"""Journal of the synthetic cell: events, simulated windows and the truth, buffered until they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from reclaim.data import schema as s
from reclaim.data.schema import EventType
from reclaim.data.synthetic.google_v3_writer import ATTRIBUTES, COLLECTIONS, INSTANCES, MACHINES, US_PER_S, resources
from reclaim.data.synthetic.shapes import BEB, FloatArray, IntArray, SimulatedWindows, resource_code
from reclaim.data.synthetic.workload import (
    CAUSES,
    EVICT_MACHINE,
    EVICT_PRIORITY,
    FINISHED,
    KILLED,
    OOM_LIMIT,
    OOM_MACHINE,
    PROGRAM_FAILURE,
    Collection,
    TaskArray,
    hashed,
)

EVENT_OF: Final[Mapping[int, int]] = {
    OOM_LIMIT: EventType.FAIL,
    OOM_MACHINE: EventType.EVICT,
    PROGRAM_FAILURE: EventType.FAIL,
    EVICT_PRIORITY: EventType.EVICT,
    EVICT_MACHINE: EventType.EVICT,
    FINISHED: EventType.FINISH,
    KILLED: EventType.KILL,
}
"""Cause → event. No trace distinguishes an out-of-memory kill: it is a FAIL, or an EVICT if the machine ran out."""
MISSING_SHARE: Final = 0.002
"""Share of events marked as reconstructed from snapshots; assumed."""
MACHINES_PER_SWITCH: Final = 20
_RECONSTRUCTED: Final = s.MISSING_TYPES.index("SNAPSHOT_BUT_NO_TRANSITION")

Row = dict[str, Any]


class Journal:
    """Records events at whole seconds and returns them by time."""

    def __init__(self, seed: int, machine_ids: list[int], capacity: FloatArray, rng: np.random.Generator) -> None:
        self._seed, self._ids, self._rng = seed, machine_ids, rng
        self._codes = resource_code(capacity)
        self._platform = np.unique(capacity, axis=0, return_inverse=True)[1].tolist()
        self._rows: dict[str, list[Row]] = {t: [] for t in (MACHINES, ATTRIBUTES, COLLECTIONS, INSTANCES)}
        self._windows: list[tuple[FloatArray | IntArray, ...]] = []
        self.truth: list[tuple[int, int, int, str]] = []  # collection id, index, time in µs, cause
        self.ends = dict.fromkeys(CAUSES[1:], 0)

    def drain(self, table: str, until_s: int) -> list[Row]:
        """Remove and return the rows before a time, by time and then in order of arrival."""
        rows = self._rows[table]
        limit = until_s * US_PER_S
        self._rows[table] = [r for r in rows if r["time"] >= limit]
        return sorted((r for r in rows if r["time"] < limit), key=lambda r: int(r["time"]))

    def machine(self, at_s: int, machine: int, event: int) -> None:
        """Record that a machine was added or removed."""
        self._rows[MACHINES].append(
            {
                "time": at_s * US_PER_S,
                "machine_id": self._ids[machine],
                "type": event,
                "switch_id": hashed(self._seed, "switch", machine // MACHINES_PER_SWITCH),
                "capacity": resources(*self._codes[machine].tolist()),
                "platform_id": hashed(self._seed, "platform", self._platform[machine]),
            }
        )

    def attributes(self, machine: int, trace_s: tuple[int, int]) -> None:
        """Record a machine's attributes: its platform, its clock, a flag that some have, and its kernel."""
        rng = self._rng
        rows = [(0, 0, str(1 + self._platform[machine])), (0, 1, str(1 + int(rng.integers(0, 3))))]
        if rng.random() < 0.4:
            rows.append((0, 2, "1"))
        rows.append((0, 3, hashed("kernel", int(rng.integers(0, 2)))))
        if rng.random() < 0.5:  # a new kernel is rolled out during the trace
            rows.append((int(rng.integers(*trace_s)), 3, hashed("kernel", 2)))
        for at_s, name, value in rows:
            self._rows[ATTRIBUTES].append(
                {
                    "time": at_s * US_PER_S,
                    "machine_id": self._ids[machine],
                    "name": hashed(self._seed, "attribute", name),
                    "value": value,
                    "deleted": False,
                }
            )

    def enter(self, at_s: int, c: Collection) -> None:
        """Record that a collection was submitted."""
        for event in _entry(c):
            self.collection(at_s, c, event)

    def submit(self, at_s: int, t: TaskArray, slot: int, c: Collection) -> None:
        """Record that a task was submitted, for the first time or again."""
        for event in _entry(c):
            self.task(at_s, t, slot, c, event)

    def collection(self, at_s: int, c: Collection, event: int) -> None:
        """Record an event of a collection."""
        self._rows[COLLECTIONS].append(
            {
                **self._event(at_s, c, event),
                "user": c.user,
                "collection_name": c.name,
                "collection_logical_name": c.logical_name,
                "vertical_scaling": c.vertical_scaling,
                "scheduler": c.scheduler,
            }
        )

    def task(self, at_s: int, t: TaskArray, slot: int, c: Collection, event: int, machine: int = -1) -> None:
        """Record an event of a task or an alloc instance, with its limits at that moment."""
        row = t[slot]
        self._rows[INSTANCES].append(
            {
                **self._event(at_s, c, event),
                "instance_index": int(row["index"]),
                "machine_id": self._ids[machine] if machine >= 0 else 0,
                # In an alloc set, the instance of the same index holds the task.
                "alloc_instance_index": int(row["index"]) if c.alloc_id else -1,
                "resource_request": _request(float(row["cpu_limit"]), float(row["memory_limit"])),
            }
        )

    def end(self, t: TaskArray, slot: int, c: Collection) -> None:
        """Record the end of a run and its cause."""
        at_s, cause = int(t["end_s"][slot]), int(t["cause"][slot])
        self.task(at_s, t, slot, c, EVENT_OF[cause], int(t["machine"][slot]))
        self.truth.append((c.id, int(t["index"][slot]), at_s * US_PER_S, CAUSES[cause]))
        self.ends[CAUSES[cause]] += 1

    def windows(
        self,
        t: TaskArray,
        collections: Sequence[Collection],
        span_s: tuple[IntArray, IntArray],
        usage: tuple[FloatArray, ...],
    ) -> None:
        """Record windows of running tasks: their spans, and their mean CPU, mean memory and maximum memory."""
        begins, ends = span_s
        self._windows.append(
            (
                begins,
                ends,
                np.array([c.id for c in collections], np.int64),
                t["index"],
                np.array(self._ids)[t["machine"]],
                np.array([c.alloc_id for c in collections], np.int64),
                t["index"],  # the alloc instance of the same index holds the task
                t["kind"],
                t["tier"],
                *usage,
                t["memory_limit"],
                (t["cause"] == OOM_LIMIT) & (t["end_s"] == ends),
                *(t[name] for name in ("peak_score", "cache_score", "cpi_score", "counters_u", "percentiles_u")),
            )
        )

    def drain_windows(self) -> SimulatedWindows:
        """Remove and return the recorded windows, by start, collection and index."""
        columns = [np.concatenate(c) for c in zip(*self._windows, strict=True)]
        self._windows = []
        order = np.lexsort((columns[3], columns[2], columns[0]))
        return SimulatedWindows(*(c[order] for c in columns))

    def _event(self, at_s: int, c: Collection, event: int) -> Row:
        """Return the fields that events of collections and of tasks share."""
        return {
            "time": at_s * US_PER_S,
            "type": event,
            "collection_id": c.id,
            "scheduling_class": c.scheduling_class,
            "missing_type": _RECONSTRUCTED if at_s and self._rng.random() < MISSING_SHARE else None,
            "collection_type": c.kind,
            "priority": c.priority,
            "alloc_collection_id": c.alloc_id,
        }


@lru_cache(maxsize=4096)
def _request(cpu: float, memory: float) -> dict[str, float]:
    return resources(*resource_code(np.array([cpu, memory])).tolist())


def _entry(c: Collection) -> tuple[int, ...]:
    """Return the events of a submission; only a collection of the batch scheduler passes its queue."""
    queued = (EventType.QUEUE,) if c.tier == BEB and c.scheduler else ()
    return (EventType.SUBMIT, *queued, EventType.ENABLE)
