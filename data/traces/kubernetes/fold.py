"""Folds a history into windows and events, piece by piece in the order of time, looking back only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.samples import SampledWindows, windows_of
from reclaim.data.traces.dialect import USAGE, Dialect
from reclaim.data.traces.history import RawSeries
from reclaim.data.traces.kubernetes.owners import GONE_MS, Facts, Owners, PodKey, Workload, machine_id
from reclaim.data.traces.kubernetes.series import (
    UNSAID,
    AsOf,
    ContainerKey,
    Labels,
    Said,
    Tails,
    by_container,
    while_said,
)
from reclaim.data.traces.series import task_id

USAGE_EXTRAS: Final = (s.CPU_REQUEST, s.MEMORY_REQUEST, s.CPU_ENFORCED, s.MEMORY_ENFORCED)
EVENT_EXTRAS: Final = (s.OUT_OF_MEMORY, s.EVENT_DETAIL)
MACHINE_EXTRAS: Final = (s.MACHINE_NAME,)
NAME_EXTRAS: Final = (s.CONTAINER_KIND,)
OOM_REASON: Final = "OOMKilled"
_OF_INIT: Final = ("request", "limit", "restarts", "ended_reason")
"""Roles in which init containers have series of their own."""
GONE_US: Final = GONE_MS * 1_000
"""Time without a sample after which a container has ended."""
_SKEW_US: Final = 60_000_000
"""Time by which recorded starts and ends may differ from those of samples: clocks and scrapes differ."""
_LARGEST_US: Final = 35 * s.DAY_US
"""Time for which the largest usage of a collection outlives its tasks: a job of every month is back by then."""
_CGROUP: Final = ("id", "name")
"""Labels by which cAdvisor names a container that runs: another run has others."""
_RATIO: Final = 2.0
"""Limit of a container without one, over the largest usage so far."""
TaskKey = tuple[int, int]
"""Collection and instance index."""
_ENDS: Final = {"Completed": s.EventType.FINISH, "Evicted": s.EventType.EVICT}
"""Recorded reason of an end → event; any other is a failure."""
_JOBS: Final = ("Job", "CronJob")


@dataclass
class Task:
    """One container of one pod, as far as it is known.

    Attributes
    ----------
    collection, index, tier : int
    key : ContainerKey
    workload : Workload
    starts_us : list of int
        Starts of its runs, rising.
    told_by : dict of str by int
        Role of the series that gave each start; empty where its usage did.
    series : set
        Its last usage series, each by its cgroup and name, else by its labels without those of the scraper.
    seen_us : int
        End of its last window; 0 for none.
    ends_us : list of int
        Times of its ends, in the order in which they were found.
    kills : int
        Number of its ends out of memory.
    restarts : Said by uid
        Last samples, the largest value so far where there is a uid.
    told_at : float by uid
        Count of restarts at the last end that was recorded by the state `terminated`.
    request, enforced : Said by resource
        Last samples.
    requested, limited : float by resource
        Request and enforced limit of its last window; NaN for none, as of one that was removed.
    listed : Said or None
        Last sample that lists the pod; None for none.
    container_kind : str
        ``schema.INIT`` or ``SIDECAR``; empty for any other, and where nothing says so.
    places : list of (int, str)
        Times from which it was on a node, rising, and the node's name.
    twice : str
        Labels in which copies of its usage differ, of which one counts; empty where there are none.
    """

    collection: int
    index: int
    tier: int
    key: ContainerKey
    workload: Workload
    starts_us: list[int] = field(default_factory=list)
    told_by: dict[int, str] = field(default_factory=dict)
    series: set[Labels] = field(default_factory=set)
    seen_us: int = 0
    ends_us: list[int] = field(default_factory=list)
    kills: int = 0
    restarts: dict[str, Said] = field(default_factory=dict)
    told_at: dict[str, float] = field(default_factory=dict)
    request: dict[str, Said] = field(default_factory=lambda: dict.fromkeys(s.RESOURCES, UNSAID))
    enforced: dict[str, Said] = field(default_factory=lambda: dict.fromkeys(s.RESOURCES, UNSAID))
    requested: dict[str, float] = field(default_factory=lambda: dict.fromkeys(s.RESOURCES, np.nan))
    limited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(s.RESOURCES, np.nan))
    listed: Said | None = None
    container_kind: str = ""
    places: list[tuple[int, str]] = field(default_factory=list)
    twice: str = ""

    @property
    def ended_us(self) -> int:
        """Time of its last end; 0 for none."""
        return max(self.ends_us, default=0)

    def forget(self, before_us: int) -> None:
        """Forget runs, nodes and counts that were over before a time, except the last of each."""
        self.starts_us = self.starts_us[max(bisect_right(self.starts_us, before_us) - 1, 0) :]
        self.told_by = {us: self.told_by[us] for us in self.starts_us}
        self.ends_us = [us for us in self.ends_us if us >= min(before_us, self.ended_us)]
        self.places = self.places[max(bisect_right(self.places, before_us, key=itemgetter(0)) - 1, 0) :]
        self.restarts = {uid: said for uid, said in self.restarts.items() if said[1] >= before_us}
        self.told_at = {uid: count for uid, count in self.told_at.items() if uid in self.restarts}

    def places_at(self, times_us: NDArray[np.int64]) -> list[tuple[str, NDArray[np.int64]]]:
        """Return the names of its nodes at times, (n,) in µs, each with the positions of the times when it was there.

        Before its first node it counts as on it; the name is empty where none is known.
        """
        if not self.places:
            return [("", np.arange(len(times_us)))]
        from_us = np.array([us for us, _ in self.places])
        at = np.maximum(np.searchsorted(from_us, times_us, side="right") - 1, 0)
        return [(self.places[k][1], np.flatnonzero(at == k)) for k in np.unique(at).tolist()]

    def place_at(self, time_us: int) -> str:
        """Return the name of its node at a time, as ``places_at``."""
        return self.places_at(np.array([time_us]))[0][0]


@dataclass(frozen=True)
class _OfPods:
    """Series that say something of pods.

    Attributes
    ----------
    amounts, later_amounts : dict of role to dict of (container, resource) to list of RawSeries
        Requests and limits of a piece, and of what follows it, which new pods may be said of first.
    listings : dict of pod to list of RawSeries
    """

    amounts: dict[str, dict[tuple[ContainerKey, str], list[RawSeries]]]
    later_amounts: dict[str, dict[tuple[ContainerKey, str], list[RawSeries]]]
    listings: dict[PodKey, list[RawSeries]]


@dataclass(frozen=True)
class _Filled:
    """Columns of a piece's windows that are filled in task by task, each of shape (n,)."""

    columns: dict[str, NDArray[np.float64]]
    scheduled: NDArray[np.int64]
    machine: NDArray[np.int64]


class Fold:
    """Makes the rows of usage and events; one piece after the other."""

    def __init__(self, dialect: Dialect, owners: Owners) -> None:
        self._dialect, self._owners = dialect, owners
        self.tasks: dict[ContainerKey, Task] = {}
        self.first_seen_us: dict[int, tuple[int, Task]] = {}
        self.machines: list[dict[str, Any]] = []
        self._largest: dict[int, tuple[NDArray[np.float64], int]] = {}
        self._tails = {role: Tails() for role in USAGE}
        self._nodes: dict[str, dict[str, AsOf]] = {}
        self._start_us = -1

    def piece(
        self,
        piece: dict[str, list[RawSeries]],
        start_us: int,
        end_us: int,
        later: Mapping[str, list[RawSeries]] = MappingProxyType({}),
    ) -> tuple[pa.Table, list[dict[str, Any]]]:
        """Return the windows and the events that a piece adds; of later samples, the first amounts of its new pods."""
        if self._start_us < 0:
            self._start_us = start_us
        self._allot(piece, start_us)
        piece, later = _with_init(piece), _with_init(later)
        grouped: dict[str, dict[ContainerKey, list[RawSeries]]] = {}
        twice: dict[ContainerKey, str] = {}
        for role, tails in self._tails.items():
            grouped[role], copied = tails.measured_once(by_container(piece.get(role, ()), self._dialect))
            twice |= copied
        keys = sorted({key for series in grouped.values() for key in series})
        numbers = {key: k for k, key in enumerate(keys)}
        samples = {role: self._tails[role].samples(grouped[role], numbers, start_us, end_us) for role in self._tails}
        found = windows_of(
            samples["cpu"], samples["memory"], samples[s.PAGE_CACHE],
            n_tasks=len(keys), start_us=start_us, end_us=end_us,
        )  # fmt: skip
        tasks = [self._task(key) for key in keys]
        for key, differ in twice.items():
            self.tasks[key].twice = differ
        facts = {role: by_container(piece.get(role, ()), self._dialect) for role in (
            "restarts", "started", "started_usage", "ended_reason", "ended_time", "terminated")}  # fmt: skip
        first = any(not task.seen_us for task in tasks)
        amounts, later_amounts = (
            {role: self._amounts(of.get(role, ())) for role in ("request", "limit")}
            for of in (piece, later if first else {})
        )
        said = _OfPods(amounts, later_amounts, self._listings(piece.get("pod", ())))
        events: list[dict[str, Any]] = []
        edges = np.searchsorted(found.task, np.arange(len(keys) + 1))
        filled = _Filled(
            {name: np.full(len(found), np.nan) for name in (*USAGE_EXTRAS, "node_cpu", "node_memory")},
            scheduled=np.zeros(len(found), np.int64), machine=np.zeros(len(found), np.int64),
        )  # fmt: skip
        for k, (key, task) in enumerate(zip(keys, tasks, strict=True)):
            rows = slice(int(edges[k]), int(edges[k + 1]))
            usage = [grouped[role].get(key, []) for role in s.RESOURCES]
            self._place(task, usage[0] or usage[1])
            of = {role: facts[role].get(key, []) for role in facts}
            events += self._starts(task, of, usage[0] or usage[1])
            task.series = {self._run(one) for series in usage for one in series} or task.series
            events += self._recorded_ends(task, of)
            if rows.start == rows.stop:
                continue
            first_us = int(found.start_us[rows][0])
            begun_us = None if task.seen_us else first_us
            events += self._gaps(task, found.start_us[rows], found.end_us[rows])
            self._fill(task, found, rows, said, filled, begun_us)
            earliest_us, _ = self.first_seen_us.get(task.collection, (s.LATEST_US, task))
            if first_us < earliest_us:
                self.first_seen_us[task.collection] = (first_us, task)
        for key in sorted({key for of in facts.values() for key in of} - numbers.keys()):
            if key in self.tasks:  # it has ended, and its end is recorded later
                of = {role: facts[role].get(key, []) for role in facts}
                events += self._recorded_ends(self.tasks[key], of)
        for key, series in by_container(piece.get("init", ()), self._dialect).items():
            if key in self.tasks:
                always = any(one.named.get("restart_policy") == "Always" for one in series)
                self.tasks[key].container_kind = s.SIDECAR if always else s.INIT
        limits = self._limits(found, tasks, filled.columns)
        return _usage(found, tasks, filled, limits), events

    def _fill(
        self, task: Task, found: SampledWindows, rows: slice, said: _OfPods, filled: _Filled, begun_us: int | None
    ) -> None:
        """Fill in a task's windows: the starts of its runs, its machines, their sizes, its requests and limits.

        ``begun_us`` is the start of its first window, where that is among them.
        """
        ends = found.end_us[rows]
        starts = np.array(task.starts_us, np.int64)
        run = np.searchsorted(starts, ends, side="left") - 1
        filled.scheduled[rows] = np.where(run >= 0, starts[run], found.start_us[rows])
        places = task.places_at(ends)
        for place, there in places:
            filled.machine[rows][there] = machine_id(place) if place else s.UNKNOWN_ID
        listed = said.listings.get(task.key[:3], [])
        listing = AsOf(listed, task.listed or UNSAID) if listed or task.listed else None
        task.listed = listing.last if listing is not None else None
        for resource, request, enforced in zip(s.RESOURCES, USAGE_EXTRAS[:2], USAGE_EXTRAS[2:], strict=True):
            for role, column, known, last in (
                ("request", request, task.request, task.requested),
                ("limit", enforced, task.enforced, task.limited),
            ):
                series = said.amounts[role].get((task.key, resource), [])
                amount = AsOf(series, known[resource])
                later = [] if series or begun_us is None else said.later_amounts[role].get((task.key, resource), [])
                said_here = while_said(AsOf(later, amount.last) if later else amount, listing, ends, begun_us)
                if role == "limit":  # "0" is no limit in Kubernetes
                    said_here = np.where(said_here > 0, said_here, np.nan)
                filled.columns[column][rows] = said_here
                known[resource], last[resource] = amount.last, float(said_here[-1])
            for place, there in places:
                amount = self._nodes.get(place, {}).get(resource, AsOf([]))
                filled.columns[f"node_{resource}"][rows][there] = amount.at(ends[there])

    def ends(self) -> Iterator[dict[str, Any]]:
        """Yield the ends of the tasks that are gone at the history's end: others of their cluster were seen after them.

        Where none was, the cluster may not have been scraped.
        """
        last_us: dict[str, int] = {}
        for task in self.tasks.values():
            last_us[task.key.cluster] = max(last_us.get(task.key.cluster, 0), task.seen_us)
        for task in self.tasks.values():
            if task.seen_us and last_us[task.key.cluster] - task.seen_us > GONE_US:
                yield from self._gone(task, task.seen_us, s.LATEST_US)

    def seen(self) -> dict[TaskKey, Task]:
        """Return the tasks with a window, by their keys: a pod of a set that came again is the same task."""
        found: dict[TaskKey, Task] = {}
        for task in self.tasks.values():
            key = (task.collection, task.index)
            if task.seen_us and (key not in found or task.seen_us > found[key].seen_us):
                found[key] = task
        return found

    def over(self, task: Task) -> bool:
        """Return whether a task is known to have ended and not to have started since."""
        facts = self._owners.pods.get(task.key[:3], Facts())
        ended_us = max(task.ended_us, round(facts.completed_s * 1e6), max(facts.evicted_us, default=0))
        return bool(ended_us) and ended_us >= max(task.starts_us, default=0)

    def forget(self, before_us: int) -> None:
        """Forget tasks that were last seen, or never seen and last started, before a time, and their pods.

        Of the others, what was over before then is forgotten, as are nodes without a task that were last listed before,
        and events of machines so far. The largest usage of a collection stays for ``_LARGEST_US``: limits depend on it.
        """
        self.tasks = {
            key: task
            for key, task in self.tasks.items()
            if (task.seen_us or max(task.starts_us, default=before_us)) >= before_us
        }
        self.first_seen_us = {k: first for k, first in self.first_seen_us.items() if first[1].key in self.tasks}
        for task in self.tasks.values():
            task.forget(before_us)
        places = {task.places[-1][1] for task in self.tasks.values() if task.places}
        self._nodes = {
            node: of for node, of in self._nodes.items()
            if node in places or any(amount.last[1] >= before_us for amount in of.values())
        }  # fmt: skip
        self._largest = {k: of for k, of in self._largest.items() if of[1] >= before_us - _LARGEST_US}
        self.machines = []
        self._owners.keep({key[:3] for key in self.tasks})

    def _task(self, key: ContainerKey) -> Task:
        """Return the task of a container. Of a live one, owner and tier may be known only after the first samples."""
        pod: PodKey = (key.cluster, key.namespace, key.pod)
        workload, tier = self._owners.workload(pod), self._owners.tier(pod)
        task = self.tasks.get(key)
        if task is None or task.workload != workload:
            collection, index = task_id(workload.collection_name(key.container)), self._owners.index(pod, workload)
            if task is None:
                task = self.tasks[key] = Task(collection, index, tier, key, workload)
            task.collection, task.index, task.workload = collection, index, workload
        task.tier = tier
        return task

    def _place(self, task: Task, series: list[RawSeries]) -> None:
        """Add the nodes of a task's series, each from its first sample on: by its label, else that of its pod then."""
        for one in sorted(series, key=lambda one: (int(one.time_ms[0]), int(one.time_ms[-1]))):
            pod = self._owners.pods.get(task.key[:3], Facts())
            node = self._dialect.named(one.named, "node") or pod.node_at(int(one.time_ms[-1]))
            node = node or one.named.get("instance", "")
            place = _machine(task.key.cluster, node)
            if place and (not task.places or task.places[-1][1] != place):
                task.places.append((int(one.time_ms[0]) * 1000, place))

    def _run(self, one: RawSeries) -> Labels:
        """Return the identity of a usage series' container: cgroup and name, else labels except the scraper's."""
        of = one.named
        return tuple((name, of[name]) for name in _CGROUP if of.get(name)) or tuple(
            (name, value) for name, value in one.labels if name not in self._dialect.scraper
        )

    def _allot(self, piece: dict[str, list[RawSeries]], start_us: int) -> None:
        """Record what nodes allot to pods, and each change at the time of the sample that shows it."""
        found: dict[str, dict[str, list[RawSeries]]] = {}
        for one in piece.get("allocatable", ()):
            of = one.named
            resource = of.get("resource", "")
            node = _machine(self._dialect.named(of, "cluster"), self._dialect.named(of, "node"))
            if resource in s.RESOURCES and node:
                found.setdefault(node, {}).setdefault(resource, []).append(one)
        for node, series in sorted(found.items()):
            before = self._nodes.get(node, {})
            now = {resource: AsOf(rows, before[resource].last if resource in before else UNSAID)
                   for resource, rows in series.items()}  # fmt: skip
            known = {resource: of.last[0] for resource, of in before.items()}
            self._nodes[node] = {resource: AsOf([], of.last) for resource, of in before.items()} | now
            for time_us in sorted({int(time) for of in now.values() for time in of.time_us[of.changes()]}):
                event = s.MachineEventType.UPDATE if known else s.MachineEventType.ADD
                known |= {resource: float(of.at(np.array([time_us]))[0]) for resource, of in now.items()
                          if of.time_us[1] <= time_us}  # fmt: skip
                at_start = start_us == self._start_us and time_us - start_us < GONE_US
                self.machines.append({
                    s.TIME_US: s.BEFORE_TRACE_US if at_start and event == s.MachineEventType.ADD else time_us,
                    s.MACHINE_ID: machine_id(node), s.EVENT_TYPE: event, s.CPU_CAPACITY: known.get("cpu"),
                    s.MEMORY_CAPACITY: known.get("memory"), s.MACHINE_NAME: node,
                })  # fmt: skip

    def _listings(self, series: Iterable[RawSeries]) -> dict[PodKey, list[RawSeries]]:
        """Return the series that list each pod."""
        found: dict[PodKey, list[RawSeries]] = {}
        for one in series:
            of = one.named
            cluster, namespace, pod = (self._dialect.named(of, thing) for thing in ("cluster", "namespace", "pod"))
            found.setdefault((cluster, namespace, pod), []).append(one)
        return found

    def _amounts(self, series: Any) -> dict[tuple[ContainerKey, str], list[RawSeries]]:
        """Return the series of requests, or of limits, by container and resource."""
        found: dict[tuple[ContainerKey, str], list[RawSeries]] = {}
        for resource in s.RESOURCES:
            of_it = [one for one in series if one.named.get("resource") == resource]
            for key, rows in by_container(of_it, self._dialect).items():
                found[key, resource] = rows
        return found

    def _starts(
        self, task: Task, facts: dict[str, list[RawSeries]], usage: list[RawSeries]
    ) -> Iterator[dict[str, Any]]:
        """Add the starts of a task's container, and yield an event for each new one."""
        first_us = min((int(one.time_ms[0]) * 1000 for one in usage), default=0)
        role = next((role for role in ("started", "started_usage") if facts[role]), "")
        if role:
            starts = {
                round(value) * 1_000_000 for one in facts[role] for value in np.unique(one.value).tolist() if value > 0
            }
        else:  # a series that begins after the last window is a container that was started, unless it only continues
            begun: dict[Labels, int] = {}  # of a run that a scraper under another name continues
            for one in usage:
                begun[self._run(one)] = min(int(one.time_ms[0]) * 1000, begun.get(self._run(one), s.LATEST_US))
            starts = {us for run, us in begun.items() if us > task.seen_us + (GONE_US if run in task.series else 0)}
            times_us = AsOf(usage).time_us[1:]  # an absence within a piece is a start as well
            starts |= set(times_us[1:][np.diff(times_us) > GONE_US].tolist())
        if usage and not task.starts_us and min(starts, default=first_us + 2 * _SKEW_US) > first_us + _SKEW_US:
            starts.add(first_us)  # nothing is known of the first run that was seen
        for start_us in sorted(starts):
            near = task.starts_us[
                bisect_left(task.starts_us, start_us - _SKEW_US) : bisect_right(task.starts_us, start_us + _SKEW_US)
            ]
            if start_us in near or any(task.told_by[known] != role for known in near):
                continue  # two series give one start, whose clocks differ
            insort(task.starts_us, start_us)
            task.told_by[start_us] = role
            yield _event(task, start_us, s.EventType.SCHEDULE)

    def _recorded_ends(self, task: Task, facts: dict[str, list[RawSeries]]) -> Iterator[dict[str, Any]]:
        """Yield the ends that the history records: restarts with their reasons, and ends without a restart."""
        ended, started = AsOf(facts["ended_time"]), AsOf(facts["started"])
        by_uid: dict[str, list[RawSeries]] = {}
        for one in facts["restarts"]:  # an exporter that moved, or has a copy, reports the same in another series
            by_uid.setdefault(one.named.get("uid", ""), []).append(one)
        counted: dict[str, AsOf] = {}
        for uid, series in by_uid.items():
            said = counted[uid] = AsOf(series, task.restarts.get(uid, UNSAID))
            if uid:  # a pod's own count never falls; under a name alone it may be another pod's
                said.value = np.fmax.accumulate(said.value)
            if uid not in task.restarts and said.value[1] > 0:
                yield from self._end_before(task, facts, uid, int(said.time_us[1]))
            task.restarts[uid] = said.last
            for k in np.flatnonzero(np.diff(said.value) > 0).tolist():
                if said.value[k + 1] == task.told_at.get(uid, np.nan) + 1:
                    continue  # the state gave this end in an earlier piece
                sample_us, earliest_us = int(said.time_us[k + 1]), int(said.time_us[k]) - _SKEW_US
                times = [float(a.at(np.array([sample_us]))[0]) * 1e6 for a in (ended, started)]
                # a container may wait long for its start; its end is the one reported after the count before
                fresh = ended.said_at(np.array([sample_us]))[0] > said.time_us[k]
                earliest = (self._start_us if fresh else earliest_us, earliest_us)
                found = (round(t) for t, low in zip(times, earliest, strict=True) if low <= t <= sample_us)
                time_us = next(found, sample_us)
                yield self._end(task, time_us, _reason(facts["ended_reason"], sample_us))
        for one in facts["terminated"]:  # old exporters report 0 for every reason until one is 1
            uid = one.named.get("uid", "")
            count = counted.get(uid, AsOf([], task.restarts.get(uid, UNSAID)))
            shown_us = one.time_ms[one.value == 1] * 1000
            shown_us = shown_us[~(count.at(shown_us) < count.last[0])]  # the restart that follows gives the others
            if len(shown_us) and (seen := self._ended_at(task, int(shown_us[0]))):
                task.told_at[uid] = float(count.at(shown_us[:1])[0])
                yield self._end(task, seen, one.named.get("reason", ""))

    def _end_before(
        self, task: Task, facts: dict[str, list[RawSeries]], uid: str, sample_us: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the last end before the first sample of restarts, at its time, else that of the start after it.

        There is none where that time is unknown or before the history, or where an end as late is known.
        """
        own = ([one for one in facts[role] if one.named.get("uid", "") == uid] for role in ("ended_time", "started"))
        times = [float(AsOf(series).at(np.array([sample_us]))[0]) * 1e6 for series in own]
        time_us = next((t for t in times if not np.isnan(t)), -1.0)
        if max(self._start_us, task.ended_us + 1) <= time_us <= sample_us:
            yield self._end(task, round(time_us), _reason(facts["ended_reason"], sample_us))

    def _ended_at(self, task: Task, sample_us: int) -> int:
        """Return when a task that a sample shows to have ended did so, without a restart; 0 if its end is known."""
        completed_s = self._owners.pods.get(task.key[:3], Facts()).completed_s
        run = bisect_right(task.starts_us, sample_us) - 1
        if task.ended_us and (run < 0 or task.ended_us >= task.starts_us[run]):
            return 0
        return round(completed_s * 1e6) if 0 < completed_s * 1e6 <= sample_us else sample_us

    def _gaps(self, task: Task, start_us: NDArray[np.int64], end_us: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """Yield the ends before long gaps in a task's windows, which are in the order of time.

        Where the same run is there after a gap, it was not scraped, and has not ended.
        """
        before = np.concatenate([[task.seen_us or start_us[0]], end_us[:-1]])
        starts = np.array(task.starts_us, np.int64)
        another = np.searchsorted(starts, before) < np.searchsorted(starts, end_us)
        for k in np.flatnonzero((start_us - before > GONE_US) & another).tolist():
            yield from self._gone(task, int(before[k]), int(start_us[k]))
        task.seen_us = int(end_us[-1])

    def _gone(self, task: Task, time_us: int, past_us: int) -> Iterator[dict[str, Any]]:
        """Yield the end of a task that was last seen at a time and not until another, unless it is recorded."""

        def then(*times_us: float) -> bool:
            return any(time_us - GONE_US <= at_us < past_us for at_us in times_us)

        if then(*task.ends_us):
            return
        facts = self._owners.pods.get(task.key[:3], Facts())
        if then(*facts.evicted_us):  # a pod of a set may be another one by then
            kind = s.EventType.EVICT
        elif then(facts.completed_s * 1e6) or task.workload.kind in _JOBS:
            kind = s.EventType.FINISH
        else:
            kind = s.EventType.KILL
        task.ends_us.append(time_us)
        yield _event(task, time_us, kind, oom=False)

    def _end(self, task: Task, time_us: int, reason: str) -> dict[str, Any]:
        task.ends_us.append(time_us)
        task.kills += reason == OOM_REASON
        kind = _ENDS.get(reason, s.EventType.FAIL)
        return _event(task, time_us, kind, oom=reason == OOM_REASON if reason else None, detail=reason or None)

    def _limits(
        self, found: SampledWindows, tasks: list[Task], columns: dict[str, NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """Return the limit of each window, (n, n_resources): the enforced one, else a power of two by what was seen."""
        collection = np.array([task.collection for task in tasks], np.int64)[found.task]
        usage = np.stack([found.cpu_max, found.memory_max], axis=1)
        order = np.lexsort((found.end_us, collection))
        largest = np.full(usage.shape, np.nan)
        edges = np.flatnonzero(np.diff(collection[order], prepend=-1, append=-1)).tolist() if len(order) else []
        for low, high in pairwise(edges):
            rows = order[low:high]
            known, _ = self._largest.get(int(collection[rows[0]]), (np.zeros(2), 0))
            so_far = np.maximum.accumulate(np.fmax(np.nan_to_num(usage[rows]), known), axis=0)
            # windows that end together see each other
            last = np.searchsorted(found.end_us[rows], found.end_us[rows], side="right") - 1
            largest[rows] = so_far[last]
            # a view would keep all of it
            self._largest[int(collection[rows[0]])] = so_far[-1].copy(), int(found.end_us[rows[-1]])
        request = np.stack([columns[name] for name in USAGE_EXTRAS[:2]], axis=1)
        enforced = np.stack([columns[name] for name in USAGE_EXTRAS[2:]], axis=1)
        node = np.stack([columns[f"node_{resource}"] for resource in s.RESOURCES], axis=1)
        of_open = open_limit(request, largest)
        return np.where(np.isnan(enforced), np.where(of_open > node, node, of_open), enforced)


def _with_init(piece: Mapping[str, list[RawSeries]]) -> dict[str, list[RawSeries]]:
    """Return a piece with the series of init containers among those of the others: in a pod no two share a name."""
    return {**piece, **{role: [*piece.get(role, ()), *piece.get(f"init_{role}", ())] for role in _OF_INIT}}


def _machine(cluster: str, node: str) -> str:
    """Return the name of a node, prefixed by its cluster's where the dialect names one."""
    return f"{cluster}/{node}" if cluster and node else node


def open_limit(request: NDArray[np.float64], largest: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the limit of a container without one: a power of two at or above request and twice the largest usage.

    NaN where there is neither; same shapes.
    """
    least = np.fmax(request, _RATIO * largest)
    exponent = np.ceil(np.log2(np.where(least > 0, least, np.nan)))
    power = np.exp2(exponent)
    return np.where(power < least, 2 * power, np.where(power / 2 >= least, power / 2, power))  # log2 may be off by one


def _reason(series: list[RawSeries], sample_us: int) -> str:
    """Return the reason at a time, from the latest sample at or before it; empty for none."""
    best, found = -1, ""
    for one in series:
        at = int(np.searchsorted(one.time_ms * 1000, sample_us, side="right")) - 1
        if at >= 0 and one.value[at] == 1 and int(one.time_ms[at]) > best:
            best, found = int(one.time_ms[at]), one.named.get("reason", "")
    return found


def _event(task: Task, time_us: int, kind: int, oom: bool | None = None, detail: str | None = None) -> dict[str, Any]:
    return {
        s.COLLECTION_ID: task.collection, s.INSTANCE_INDEX: task.index, s.TIME_US: time_us, s.EVENT_TYPE: kind,
        s.MACHINE_ID: machine_id(place) if (place := task.place_at(time_us)) else None, s.COLLECTION_TYPE: 0,
        s.TIER: task.tier, s.OUT_OF_MEMORY: oom, s.EVENT_DETAIL: detail,
    }  # fmt: skip


def _usage(found: SampledWindows, tasks: list[Task], filled: _Filled, limits: NDArray[np.float64]) -> pa.Table:
    """Return windows as rows of usage."""
    n = len(found)
    own = {name: np.array([getattr(t, name) for t in tasks], np.int64) for name in ("collection", "index", "tier")}
    seconds = (found.end_us - found.start_us) / 1e6
    known: dict[str, Any] = {
        s.COLLECTION_ID: own["collection"][found.task],
        s.INSTANCE_INDEX: own["index"][found.task],
        s.TIER: own["tier"][found.task].astype(np.int8),
        s.START_US: found.start_us,
        s.END_US: found.end_us,
        s.MACHINE_ID: pa.array(filled.machine, mask=filled.machine == s.UNKNOWN_ID),
        s.COLLECTION_TYPE: np.zeros(n, np.int8),
        s.SCHEDULED_US: filled.scheduled,
        s.CPU_PERCENTILES: _vectors(found.percentiles),
        s.CPU_TAIL_PERCENTILES: _vectors(found.tail),
        **{name: _nullable(getattr(found, name)) for name in (
            s.CPU_MEAN, s.CPU_MAX, s.MEMORY_MEAN, s.MEMORY_MAX, s.PAGE_CACHE)},
        s.SAMPLE_RATE_HZ: _nullable(np.where(found.rates > 0, found.rates / seconds, np.nan)),
        s.CPU_LIMIT: _nullable(limits[:, 0]),
        s.MEMORY_LIMIT: _nullable(limits[:, 1]),
        **{name: _nullable(filled.columns[name]) for name in USAGE_EXTRAS},
    }  # fmt: skip
    schema = s.with_extras("usage", USAGE_EXTRAS)
    return pa.table([
        pa.nulls(n, f.type) if f.name not in known else
        (known[f.name] if isinstance(known[f.name], pa.Array) else pa.array(known[f.name])).cast(f.type)
        for f in schema
    ], schema=schema)  # fmt: skip


def _nullable(values: NDArray[np.float64]) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def _vectors(values: NDArray[np.float64]) -> pa.Array:
    """Return percentile vectors, (n, levels), as lists; null where unknown."""
    known = ~np.isnan(values[:, 0])
    ends = np.concatenate([[0], np.cumsum(known)]).astype(np.int32) * np.int32(values.shape[1])
    flat = pa.array(np.ascontiguousarray(values[known]).ravel().astype(np.float32))
    return pa.ListArray.from_arrays(pa.array(ends), flat, mask=pa.array(~known))
