"""Folds the samples of a live cluster slot by slot: windows as they end, facts of tasks, and their ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from reclaim.data import schema as s
from reclaim.data.samples import WINDOW_US
from reclaim.data.traces.dialect import Dialect
from reclaim.data.traces.history import RawSeries, cut
from reclaim.data.traces.kubernetes.fold import GONE_US, Fold, Task, TaskKey
from reclaim.data.traces.kubernetes.owners import Owners, PodKey

_KEPT_US: Final = s.DAY_US
"""Time for which a task that is gone is remembered: its samples may come back."""
_LATER: Final = (
    "started", "started_usage", "restarts", "init_restarts", "ended_reason", "init_ended_reason", "ended_time"
)  # fmt: skip
"""Roles of starts and ends, which are scraped later than usage: a window may be the first after an end."""


@dataclass(frozen=True)
class Slot:
    """Windows, failures and ends that became known with the end of a slot.

    Attributes
    ----------
    end_us : int
    windows : pyarrow.Table
        Rows of usage that end in it, as an ingest of the same samples makes them.
    failed : list of (TaskKey, int, bool or None)
        Tasks of which a run failed, when, µs, and whether it was out of memory; None where nothing says.
    ended : list of (TaskKey, int)
        Tasks that are gone, and when they were last seen, µs.
    """

    end_us: int
    windows: pa.Table
    failed: list[tuple[TaskKey, int, bool | None]]
    ended: list[tuple[TaskKey, int]]


class LiveFold:
    """Fold of a history and of what follows it, in the order of time.

    It differs from an ingest in facts that become known late: the owner of a pod, its tier and the start of a run count
    from the samples that show them, not for the whole history. The largest usage of a collection is kept for a month
    after its last task; an ingest keeps it for good.

    Attributes
    ----------
    dialect : Dialect
        By which the samples are named.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._owners = Owners(dialect)
        self._fold = Fold(dialect, self._owners)
        self._gone: dict[TaskKey, int] = {}  # tasks whose end was given, and when they were last seen
        self._ahead: list[tuple[TaskKey, int, bool | None]] = []  # failures of a slot to come, or of one that is gone

    def take(self, series: dict[str, list[RawSeries]], start_us: int, end_us: int) -> list[Slot]:
        """Return the slots of a range; samples after it give facts, starts and ends of tasks.

        Parameters
        ----------
        series : dict of role to list of RawSeries
            Samples from ``start_us`` to now.
        start_us, end_us : int
            The range, µs; whole multiples of ``WINDOW_US``. It begins where the one before ended.
        """
        self._owners.add(series)
        before = {(task.collection, task.index): task.seen_us for task in self._fold.tasks.values() if task.seen_us}
        part = cut(series, start_us // 1000, end_us // 1000)
        given = part | {role: series.get(role, []) for role in _LATER}
        windows, events = self._fold.piece(given, start_us, end_us, later=series)
        tasks = self.tasks()
        gone = self._gone = {
            key: seen_us for key, seen_us in self._gone.items() if key in tasks and tasks[key].seen_us == seen_us
        }
        ended = [(key, seen_us) for key, seen_us in before.items() if key not in tasks]  # their owner is known now
        ended += self._ended(tasks)
        self._fold.forget(end_us - _KEPT_US)
        ends = pc.multiply(pc.divide(pc.add(windows[s.END_US], WINDOW_US - 1), WINDOW_US), WINDOW_US)
        failures = [
            *(failure for failure in self._ahead if failure[0] in tasks),
            *(((event[s.COLLECTION_ID], event[s.INSTANCE_INDEX]), event[s.TIME_US], event[s.OUT_OF_MEMORY])
              for event in events if event[s.EVENT_TYPE] == s.EventType.FAIL),
        ]  # fmt: skip
        # a failure that is recorded after the end would make a task without a window: it waits for the next run
        self._ahead = [failure for failure in failures if failure[0] in gone or failure[1] > end_us]
        slots = []
        for slot_us in range(start_us + WINDOW_US, end_us + WINDOW_US, WINDOW_US):
            since_us = 0 if slot_us == start_us + WINDOW_US else slot_us - WINDOW_US
            failed = [of for of in failures if of[0] not in gone and since_us < of[1] <= slot_us]
            last = slot_us == end_us
            slots.append(Slot(slot_us, windows.filter(pc.equal(ends, slot_us)), failed, ended if last else []))
        return slots

    def tasks(self) -> dict[TaskKey, Task]:
        """Return the tasks that are there, or were within a day, by their keys."""
        return self._fold.seen()

    def _ended(self, tasks: dict[TaskKey, Task]) -> list[tuple[TaskKey, int]]:
        """Return the tasks that are gone since the last call: others of their cluster were seen ten minutes later.

        A task whose pod is still listed counts as not scraped for a while, unless it is known to have ended, or another
        container of its pod was seen ten minutes later.
        """
        last_us: dict[str, int] = {}
        of_pod_us: dict[PodKey, int] = {}
        for task in tasks.values():
            cluster, pod = task.key.cluster, task.key[:3]
            last_us[cluster] = max(last_us.get(cluster, 0), task.seen_us)
            of_pod_us[pod] = max(of_pod_us.get(pod, 0), task.seen_us)

        def over(task: Task) -> bool:
            pod = task.key[:3]
            without = of_pod_us[pod] - task.seen_us > GONE_US
            return without or self._fold.over(task) or not self._owners.listed(pod)

        gone = {
            key: task.seen_us
            for key, task in tasks.items()
            if last_us[task.key.cluster] - task.seen_us > GONE_US and over(task)
        }
        fresh = [(key, seen_us) for key, seen_us in gone.items() if self._gone.get(key) != seen_us]
        self._gone = self._gone | gone
        return fresh
