"""Draws a cluster's workloads, pods and container runs: deployments, sets, jobs, restarts, kills and a scaler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

DAY_S: Final = 86_400
GIB: Final = 2**30
MIB: Final = 2**20
_ALPHABET: Final = np.array(list("bcdfghjklmnpqrstvwxz2456789"))
"""Letters of the random parts of names: those that Kubernetes draws from."""
_RESTART_S: Final = 12
"""Seconds between the end of a container and its next start."""


@dataclass(frozen=True)
class Container:
    """A container of a workload.

    Attributes
    ----------
    name : str
    cpu : float
        Mean usage, in cores.
    memory : float
        Usage at rest, in bytes.
    requests, limits : dict of str to float
        By resource, ``cpu`` and ``memory``; a resource without one is left out.
    leak : float
        Bytes that memory grows by in an hour, until the limit kills the container.
    errors : float
        Ends with an error a day.
    """

    name: str
    cpu: float
    memory: float
    requests: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    leak: float = 0.0
    errors: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A workload: ``kind`` is Deployment, StatefulSet, DaemonSet, CronJob or Pod; ``replicas`` where it has some."""

    namespace: str
    kind: str
    name: str
    containers: tuple[Container, ...]
    replicas: int = 1
    priority_class: str = ""
    scaled: bool = False

    @property
    def quality(self) -> str:
        """Class of service, as Kubernetes derives it."""
        if not any(c.requests or c.limits for c in self.containers):
            return "BestEffort"
        both = all(c.limits and c.limits == c.requests and len(c.limits) == 2 for c in self.containers)
        return "Guaranteed" if both else "Burstable"


@dataclass(frozen=True)
class Run:
    """One run of a container, in seconds of Unix time; ``reason`` is empty while it runs at the end of the history."""

    container: Container
    start_s: float
    end_s: float
    reason: str = ""


@dataclass(frozen=True)
class Pod:
    """A pod: its place, its life in seconds of Unix time, the name of its direct owner, and runs by container."""

    workload: Workload
    name: str
    uid: str
    node: int
    owner: str
    start_s: float
    end_s: float
    level: float
    evicted: bool
    runs: dict[str, list[Run]]


def workloads(size: float) -> list[Workload]:
    """Return the workloads of a cluster, with replicas times ``size``."""

    def n(replicas: int) -> int:
        return max(1, round(replicas * size))

    proxy = Container("proxy", 0.02, 40 * MIB, {"cpu": 0.1, "memory": 128 * MIB}, {"memory": 256 * MIB})
    return [
        Workload("shop", "Deployment", "cart", (
            Container("app", 0.25, 300 * MIB, {"cpu": 1.0, "memory": GIB}, {"cpu": 2.0, "memory": GIB}), proxy,
        ), n(6)),
        Workload("shop", "Deployment", "search", (
            Container("app", 0.6, 900 * MIB, {"cpu": 2.0, "memory": 2 * GIB}),
        ), n(4), scaled=True),
        Workload("shop", "Deployment", "thumbnails", (
            Container("app", 0.05, 150 * MIB, {"cpu": 0.2, "memory": 256 * MIB}, {"memory": 512 * MIB}, leak=30 * MIB),
        ), n(3)),
        Workload("pay", "StatefulSet", "ledger", (
            Container("postgres", 0.4, 1.5 * GIB, {"cpu": 2.0, "memory": 4 * GIB}, {"cpu": 2.0, "memory": 4 * GIB}),
            Container("backup", 0.01, 30 * MIB),
        ), n(3), priority_class="payments"),
        Workload("pay", "Deployment", "gateway", (
            Container("app", 0.1, 200 * MIB, {"cpu": 0.5, "memory": 512 * MIB}, {"cpu": 1.0, "memory": 512 * MIB},
                      errors=0.7),
        ), n(3), priority_class="payments"),
        Workload("kube-system", "DaemonSet", "agent", (
            Container("agent", 0.02, 80 * MIB, {"cpu": 0.1, "memory": 128 * MIB}),
        ), priority_class="system-node-critical"),
        Workload("batch", "CronJob", "report", (
            Container("report", 0.4, 600 * MIB, {"cpu": 1.0, "memory": GIB}, {"memory": 2 * GIB}),
        ), n(2)),
        Workload("batch", "Deployment", "scratch", (Container("app", 0.2, 250 * MIB),), n(2)),
        Workload("default", "Pod", "debug", (Container("shell", 0.002, 10 * MIB),)),
    ]  # fmt: skip


def pods(
    all_workloads: list[Workload], nodes: int, start_s: int, end_s: int, rng: np.random.Generator
) -> Iterator[Pod]:
    """Yield every pod that lives between two times, those of one workload together."""
    for workload in all_workloads:
        for name, owner, node, begin_s, finish_s, ends in _lives(workload, nodes, start_s, end_s, rng):
            level = float(rng.lognormal(0, 0.35))
            alive = finish_s >= end_s
            runs = {c.name: list(_runs(c, begin_s, finish_s, end_s, ends, rng)) for c in workload.containers}
            yield Pod(workload, name, _uid(rng), node, owner, begin_s, finish_s, level,
                      evicted=ends == "Evicted" and not alive, runs=runs)  # fmt: skip


def _word(rng: np.random.Generator, length: int) -> str:
    return "".join(rng.choice(_ALPHABET, length))


def _uid(rng: np.random.Generator) -> str:
    digits = rng.bytes(16).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _lives(
    workload: Workload, nodes: int, start_s: int, end_s: int, rng: np.random.Generator
) -> Iterator[tuple[str, str, int, float, float, str]]:
    """Yield name, direct owner, node, start, end and way of ending of each pod."""
    away_s = 3 * DAY_S  # long-lived pods began before the history
    match workload.kind:
        case "DaemonSet":
            for node in range(nodes):
                name = f"{workload.name}-{_word(rng, 5)}"
                yield name, workload.name, node, start_s - away_s, end_s, ""
        case "StatefulSet":
            for ordinal in range(workload.replicas):  # one restart of the pod, under the same name
                cut_s = float(np.round(rng.uniform(start_s, end_s), 3))
                node, name = int(rng.integers(nodes)), f"{workload.name}-{ordinal}"
                yield name, workload.name, node, start_s - away_s, cut_s, "Killed"
                yield name, workload.name, int(rng.integers(nodes)), cut_s + 40, end_s, ""
        case "Deployment":
            rollouts = np.sort(np.round(rng.uniform(start_s, end_s, 1 + (end_s - start_s) // (4 * DAY_S)), 3)).tolist()
            edges = [start_s - away_s, *rollouts, end_s]
            for begin_s, finish_s in pairwise(edges):
                owner = f"{workload.name}-{_word(rng, 9)}"
                last = finish_s >= end_s
                for replica in range(workload.replicas):
                    name, node = f"{owner}-{_word(rng, 5)}", int(rng.integers(nodes))
                    lag_s = float(np.round(rng.uniform(0, 90), 3))
                    stop_s = finish_s if last else min(finish_s + lag_s, end_s)
                    ends = "Evicted" if workload.name == "scratch" and replica == 0 and not last else "Killed"
                    yield name, owner, node, begin_s + lag_s, stop_s, "" if last else ends
                if workload.scaled:
                    yield from _scaled(workload, owner, nodes, max(begin_s, start_s), finish_s, rng)
        case "CronJob":
            for hour_s in range(start_s - start_s % 3600, end_s, 3600):
                owner = f"{workload.name}-{hour_s // 60}"
                for _ in range(workload.replicas):
                    begin_s = hour_s + float(np.round(rng.uniform(1, 20), 3))
                    finish_s = begin_s + float(np.round(rng.uniform(600, 2400), 3))
                    if finish_s > start_s:
                        name = f"{owner}-{_word(rng, 5)}"
                        yield name, owner, int(rng.integers(nodes)), begin_s, min(finish_s, end_s), "Completed"
        case _:
            yield workload.name, "", int(rng.integers(nodes)), start_s + 1000.5, end_s, ""


def _scaled(
    workload: Workload, owner: str, nodes: int, start_s: float, end_s: float, rng: np.random.Generator
) -> Iterator[tuple[str, str, int, float, float, str]]:
    """Yield the pods that a scaler adds for the busy hours of each day."""
    for day_s in range(int(start_s) - int(start_s) % DAY_S, int(end_s), DAY_S):
        for _ in range(workload.replicas):
            begin_s = day_s + float(np.round(rng.uniform(8, 10) * 3600, 3))
            finish_s = day_s + float(np.round(rng.uniform(17, 20) * 3600, 3))
            if begin_s >= start_s and finish_s <= end_s:
                name = f"{owner}-{_word(rng, 5)}"
                yield name, owner, int(rng.integers(nodes)), begin_s, finish_s, "Killed"


def _runs(
    container: Container, start_s: float, end_s: float, now_s: int, ends: str, rng: np.random.Generator
) -> Iterator[Run]:
    """Yield the runs of a container in a pod's life: it leaks until it is killed, and fails now and then."""
    begin_s = start_s + 2
    while begin_s < end_s:
        stop_s, reason = end_s, ends if end_s < now_s else ""
        if container.errors:
            fails_s = begin_s + float(np.round(rng.exponential(DAY_S / container.errors), 3))
            if fails_s < stop_s:
                stop_s, reason = fails_s, "Error"
        if container.leak:
            room = container.limits["memory"] - container.memory
            full_s = begin_s + float(np.round(room / container.leak * 3600 * rng.uniform(0.9, 1.1), 3))
            if full_s < stop_s:
                stop_s, reason = full_s, "OOMKilled"
        yield Run(container, begin_s, stop_s, reason)
        if reason not in ("Error", "OOMKilled"):
            return
        begin_s = stop_s + _RESTART_S
