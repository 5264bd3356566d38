"""Finds the facts of each pod: its workload, node, tier and scaler, as the history last reports them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

import numpy as np

from reclaim.data import schema as s
from reclaim.data.traces.dialect import Dialect
from reclaim.data.traces.history import RawSeries
from reclaim.data.traces.series import task_id

PodKey = tuple[str, str, str]
"""Cluster, namespace and pod."""

ROLES: Final = (
    "pod", "owner", "replicaset_owner", "job_owner", "quality", "completed", "evicted", "autoscaler",
    "autoscaler_target",
)  # fmt: skip
"""Roles with the facts of a pod."""
_LETTERS: Final = "[bcdfghjklmnpqrstvwxz2456789]"
"""Letters of the random parts of names."""
_OF_DEPLOYMENT: Final = re.compile(rf"(.+)-{_LETTERS}{{6,10}}-{_LETTERS}{{5}}")
_OF_SET: Final = re.compile(r"(.+)-([0-9]+)")
_REPLICASET: Final = re.compile(rf"(.+)-{_LETTERS}{{6,10}}")
_CRON_RUN: Final = re.compile(r"(.+)-[0-9]{8,10}")
_NUMBERS: Final = re.compile(r"(?:[-.]?[0-9]+)+$")
GONE_MS: Final = 600_000
"""Time without a sample after which something has ended: ten minutes, twice what a scrape may be late."""
_PROD, _FREE = s.TIERS.index("prod"), s.TIERS.index("free")


def machine_id(node: str) -> int:
    """Return the id under which a dataset keeps a node."""
    return task_id(f"node/{node}")


@dataclass(frozen=True)
class Workload:
    """Topmost owner of pods."""

    cluster: str
    namespace: str
    kind: str
    name: str

    def collection_name(self, container: str) -> str:
        """Return the full name of a container of it, which is a collection."""
        parts = [self.cluster] if self.cluster else []
        return "/".join((*parts, self.namespace, self.kind, self.name, container))

    @property
    def user(self) -> str:
        """Name of its owner: its namespace, prefixed by the cluster where the dialect names one."""
        return f"{self.cluster}/{self.namespace}" if self.cluster else self.namespace

    def logical_name(self, container: str) -> str:
        """Return the name that runs of one program share: without the number of a job's run."""
        name = (_NUMBERS.sub("", self.name) or self.name) if self.kind == "Job" else self.name
        return "/".join((self.kind, name, container))


@dataclass
class Facts:
    """Statements about one pod; empty where there are none.

    ``owner_said`` is true where a series that names the owner of a pod was there, if only to say that there is none.
    ``evicted_us`` are times of samples that report its eviction, the first one of each piece. ``listed_ms`` is the time
    of the last sample that lists it. ``nodes`` are the times from which it is listed on a node, rising, and its name.
    """

    owner_said: bool = False
    owner_kind: str = ""
    owner_name: str = ""
    nodes: list[tuple[int, str]] = field(default_factory=list)
    priority_class: str = ""
    quality: str = ""
    completed_s: float = 0.0
    evicted_us: list[int] = field(default_factory=list)
    listed_ms: int = 0

    def node_at(self, time_ms: int) -> str:
        """Return the node at a time; before its first one that, and empty where none is known."""
        at = bisect_right(self.nodes, time_ms, key=itemgetter(0))
        return self.nodes[max(at - 1, 0)][1] if self.nodes else ""


@dataclass
class Owners:
    """Facts of pods and of their owners, of a whole history.

    An identity does not change with time, so the last report of it counts, whenever it came. A pod of a set that comes
    again may be on another node. An autoscaler and its targets count only as long as they are reported: a deleted one
    has no effect.
    """

    dialect: Dialect
    pods: dict[PodKey, Facts] = field(default_factory=dict)
    sets: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)
    jobs: dict[tuple[str, str, str], tuple[str, str]] = field(default_factory=dict)
    scalers: dict[tuple[str, str, str, str], tuple[str, int]] = field(default_factory=dict)
    targets: dict[tuple[str, str, str], dict[str, int]] = field(default_factory=dict)
    last_ms: dict[str, int] = field(default_factory=dict)
    """Time of the last sample of each cluster; scalers and targets have theirs."""

    def add(self, piece: dict[str, list[RawSeries]]) -> None:
        """Add the facts of a later piece."""
        on: dict[PodKey, dict[str, list[RawSeries]]] = {}
        for role in ROLES:
            for series in sorted(piece.get(role, ()), key=lambda one: int(one.time_ms[-1])):  # the last report counts
                of = series.named
                cluster, namespace, pod = (self.dialect.named(of, thing) for thing in ("cluster", "namespace", "pod"))
                at_ms = int(series.time_ms[-1])
                self.last_ms[cluster] = max(self.last_ms.get(cluster, at_ms), at_ms)
                if role in ("replicaset_owner", "job_owner"):
                    kind, label = ("ReplicaSet", "replicaset") if role == "replicaset_owner" else ("Job", "job_name")
                    owned, name = self.sets if role == "replicaset_owner" else self.jobs, of.get(label, "")
                    if of.get("owner_kind") and of.get("owner_name") and of["owner_kind"] != "<none>":
                        owned[cluster, namespace, name] = (of["owner_kind"], of["owner_name"])
                    else:  # it has none, so it is the topmost itself; its name is not read
                        owned.setdefault((cluster, namespace, name), (kind, name))
                    continue
                if role == "autoscaler":
                    target = (cluster, namespace, of.get("scaletargetref_kind", ""), of.get("scaletargetref_name", ""))
                    if at_ms >= self.scalers.get(target, ("", 0))[1]:
                        self.scalers[target] = of.get("horizontalpodautoscaler", ""), at_ms
                    continue
                if role == "autoscaler_target":
                    held = self.targets.setdefault((cluster, namespace, of.get("horizontalpodautoscaler", "")), {})
                    if of.get("metric_target_type") == "utilization" and of.get("metric_name") in s.RESOURCES:
                        held[of["metric_name"]] = max(held.get(of["metric_name"], at_ms), at_ms)
                    continue
                facts = self.pods.setdefault((cluster, namespace, pod), Facts())
                if role == "evicted":
                    facts.evicted_us += (series.time_ms[series.value == 1][:1] * 1000).tolist()
                    continue
                if role in ("pod", "owner"):
                    facts.owner_said = True
                    facts.listed_ms = max(facts.listed_ms, at_ms)
                if role == "pod" and (node := self.dialect.named(of, "node")):
                    on.setdefault((cluster, namespace, pod), {}).setdefault(node, []).append(series)
                _add(facts, role, of, float(series.value[-1]))
        for key, by_node in on.items():
            for from_ms, node in _stays(by_node):
                _insert_node(self.pods[key].nodes, from_ms, node)

    def keep(self, pods: Set[PodKey]) -> None:
        """Forget all pods but these, the sets and jobs that own none of them, and scalers that are gone."""
        self.pods = {pod: facts for pod, facts in self.pods.items() if pod in pods}
        owners = {(cluster, namespace, facts.owner_name) for (cluster, namespace, _), facts in self.pods.items()}
        self.sets = {name: owner for name, owner in self.sets.items() if name in owners}
        self.jobs = {name: owner for name, owner in self.jobs.items() if name in owners}
        self.scalers = {of: said for of, said in self.scalers.items() if self._still(of[0], said[1])}
        scalers = {(cluster, namespace, name) for (cluster, namespace, *_), (name, _) in self.scalers.items()}
        self.targets = {scaler: held for scaler, held in self.targets.items() if scaler in scalers}

    def listed(self, pod: PodKey) -> bool:
        """Return whether a pod is still listed, as far as the exporter that lists pods has reported."""
        return pod in self.pods and self._still(pod[0], self.pods[pod].listed_ms)

    def workload(self, pod: PodKey) -> Workload:
        """Return the topmost owner of a pod; read off its name where its owner is not reported."""
        cluster, namespace, name = pod
        facts = self.pods.get(pod, Facts())
        if facts.owner_kind == "ReplicaSet":
            match = _REPLICASET.fullmatch(facts.owner_name)
            guessed = ("Deployment", match[1]) if match else ("ReplicaSet", facts.owner_name)
            return Workload(cluster, namespace, *self.sets.get((cluster, namespace, facts.owner_name), guessed))
        if facts.owner_kind == "Job":
            match = _CRON_RUN.fullmatch(facts.owner_name)
            guessed = ("CronJob", match[1]) if match else ("Job", facts.owner_name)
            return Workload(cluster, namespace, *self.jobs.get((cluster, namespace, facts.owner_name), guessed))
        if facts.owner_kind:
            return Workload(cluster, namespace, facts.owner_kind, facts.owner_name)
        if facts.owner_said:
            return Workload(cluster, namespace, "Pod", name)
        for kind, form in (("Deployment", _OF_DEPLOYMENT), ("StatefulSet", _OF_SET)):
            if match := form.fullmatch(name):
                return Workload(cluster, namespace, kind, match[1])
        return Workload(cluster, namespace, "Pod", name)

    def index(self, pod: PodKey, workload: Workload) -> int:
        """Return the index of a pod's task: the ordinal of a StatefulSet's pod, else a hash of its name."""
        match = _OF_SET.fullmatch(pod[2])
        if workload.kind == "StatefulSet" and match and len(match[2]) <= 9:
            return int(match[2])
        return task_id(f"pod/{pod[2]}")

    def tier(self, pod: PodKey) -> int:
        """Return the position of a pod's tier in ``schema.TIERS``."""
        facts = self.pods.get(pod, Facts())
        if facts.priority_class in self.dialect.tiers:
            return s.TIERS.index(self.dialect.tiers[facts.priority_class])
        return _FREE if facts.quality == "BestEffort" and not facts.priority_class else _PROD

    def autoscaler(self, workload: Workload) -> str | None:
        """Return the scaler that a workload has at the end of the history; None for none."""
        found = self.scalers.get((workload.cluster, workload.namespace, workload.kind, workload.name))
        return found[0] if found is not None and self._still(workload.cluster, found[1]) else None

    def autoscaled(self, workload: Workload) -> tuple[str, ...]:
        """Return the resources whose share of the request a workload's scaler holds; CPU where nothing is reported."""
        scaler = self.autoscaler(workload)
        if scaler is None:
            return ()
        held = self.targets.get((workload.cluster, workload.namespace, scaler))
        if held is None:
            return (s.RESOURCES[0],)
        return tuple(sorted(name for name, at_ms in held.items() if self._still(workload.cluster, at_ms)))

    def _still(self, cluster: str, at_ms: int) -> bool:
        """Return whether what was last reported at a time still holds at the end of the history."""
        return bool(at_ms) and at_ms >= self.last_ms[cluster] - GONE_MS


def _stays(by_node: dict[str, list[RawSeries]]) -> list[tuple[int, str]]:
    """Return the times from which a pod is listed on a node, by time; one that comes again may be on an earlier one."""
    if len(by_node) == 1:
        return [(min(int(one.time_ms[0]) for one in series), node) for node, series in by_node.items()]
    listed = {node: np.concatenate([one.time_ms for one in series]) for node, series in by_node.items()}
    at: dict[int, str] = {}
    for node in sorted(listed, key=lambda node: (int(listed[node].min()), node)):
        at |= dict.fromkeys(listed[node].tolist(), node)  # of two at a time the one that is listed since later
    moments = sorted(at.items())
    return [first for first, before in zip(moments, [(0, ""), *moments], strict=False) if first[1] != before[1]]


def _insert_node(nodes: list[tuple[int, str]], from_ms: int, node: str) -> None:
    """Insert the node on which a pod is listed from a time on, unless it is there already."""
    at = bisect_right(nodes, from_ms, key=itemgetter(0))
    if not at or nodes[at - 1][1] != node:
        nodes.insert(at, (from_ms, node))


def _add(facts: Facts, role: str, of: dict[str, str], value: float) -> None:
    """Add a series to the facts of its pod."""
    if role == "pod":
        facts.priority_class = of.get("priority_class", facts.priority_class)
        if not facts.owner_kind and of.get("created_by_kind", "<none>") != "<none>":
            facts.owner_kind, facts.owner_name = of["created_by_kind"], of.get("created_by_name", "")
    elif role == "owner" and of.get("owner_kind", "<none>") not in ("<none>", ""):
        facts.owner_kind, facts.owner_name = of["owner_kind"], of.get("owner_name", "")
    elif role == "quality" and value == 1:
        facts.quality = of.get("qos_class", "")
    elif role == "completed":
        facts.completed_s = value


def owners_of(pieces: Iterable[dict[str, list[RawSeries]]], dialect: Dialect) -> Owners:
    """Return the facts of pods from a whole history."""
    owners = Owners(dialect)
    for piece in pieces:
        owners.add(piece)
    return owners
