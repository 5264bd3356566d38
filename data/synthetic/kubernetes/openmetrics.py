"""Writes series as OpenMetrics text, a file per day, in the names of cAdvisor and kube-state-metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.synthetic.kubernetes.cluster import DAY_S, Pod
from reclaim.data.synthetic.kubernetes.scrapes import Scrapes

CPU: Final = "container_cpu_usage_seconds_total"
MEMORY: Final = "container_memory_working_set_bytes"
_STATE_JOB: Final = {"job": "kube-state-metrics", "instance": "10.0.0.9:8080"}
_OF_JOB: Final = {"Deployment": "ReplicaSet", "CronJob": "Job"}
"""Kind of a workload → the kind of its pods' direct owner, where that is another."""


@dataclass(frozen=True)
class Line:
    """Series: its metric and labels, its samples' times, and values as text or one for all."""

    metric: str
    labels: dict[str, str]
    time_ms: NDArray[np.int64]
    values: Sequence[str] | str


class DayFiles:
    """One text file per day of Unix time; a context manager. Files get their names once all are complete."""

    def __init__(self, folder: Path, start_s: int, end_s: int) -> None:
        self._first = start_s // DAY_S
        days = (datetime.fromtimestamp(day * DAY_S, UTC) for day in range(self._first, -(-end_s // DAY_S)))
        self._paths = [folder / f"{day.date()}.om" for day in days]
        self._open: list[IO[str]] = []
        self.samples = self.series = 0

    def __enter__(self) -> DayFiles:
        self._open = [path.open("w", encoding="utf-8") for path in self._paths]
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open:
            file.write("# EOF\n")
            file.close()

    def write(self, line: Line) -> None:
        """Write a series' samples into the files of their days."""
        labels = ",".join(f'{name}="{value}"' for name, value in sorted(line.labels.items()))
        day = line.time_ms // (DAY_S * 1000) - self._first
        for k in np.unique(day):
            rows = np.flatnonzero(day == k)
            times = line.time_ms[rows].tolist()
            values = (
                [line.values] * len(rows) if isinstance(line.values, str) else [line.values[r] for r in rows.tolist()]
            )
            self._open[k].writelines(
                f"{line.metric}{{{labels}}} {value} {time / 1000:.3f}\n"
                for value, time in zip(values, times, strict=True)
            )
        self.samples += len(line.time_ms)
        self.series += 1


def usage_lines(pod: Pod, container: str, number: int, scrapes: Scrapes) -> Iterator[Line]:
    """Yield the series of one run: CPU and memory, as the kubelet's cAdvisor names them."""
    labels = {
        "job": "kubelet", "metrics_path": "/metrics/cadvisor", "instance": f"10.0.1.{pod.node}:10250",
        "node": f"node-{pod.node}", "namespace": pod.workload.namespace, "pod": pod.name, "container": container,
        "image": f"registry.example/{pod.workload.name}/{container}:1", "name": f"{pod.uid[:8]}{number:04x}",
        "id": f"/kubepods/burstable/pod{pod.uid}/{pod.uid[:8]}{number:04x}",
    }  # fmt: skip
    yield Line(CPU, labels | {"cpu": "total"}, scrapes.time_ms, [f"{v:.6f}" for v in scrapes.counter_s.tolist()])
    yield Line(MEMORY, labels, scrapes.time_ms, [str(v) for v in scrapes.memory.tolist()])


def state_lines(pod: Pod, start_s: int, end_s: int, step_s: int) -> Iterator[Line]:
    """Yield the series of a pod that kube-state-metrics exports; a completed pod is listed for an hour more."""
    ended = pod.end_s < end_s
    finished = ended and pod.workload.kind == "CronJob"
    listed_s = pod.end_s + (3600.0 if finished or pod.evicted else 0.0)
    times = _beats(max(pod.start_s, start_s), min(listed_s, end_s), step_s)
    if not len(times):
        return
    where = {"namespace": pod.workload.namespace, "pod": pod.name, "uid": pod.uid}
    base = _STATE_JOB | where
    kind = _OF_JOB.get(pod.workload.kind, pod.workload.kind)
    owner = {"owner_kind": "", "owner_name": "", "owner_is_controller": ""} if kind == "Pod" else {
        "owner_kind": kind, "owner_name": pod.owner, "owner_is_controller": "true"}  # fmt: skip
    yield Line("kube_pod_info", base | {
        "node": f"node-{pod.node}", "priority_class": pod.workload.priority_class, "host_ip": f"10.0.1.{pod.node}",
        "created_by_kind": owner["owner_kind"], "created_by_name": owner["owner_name"],
    }, times, "1")  # fmt: skip
    yield Line("kube_pod_owner", base | owner, times, "1")
    yield Line("kube_pod_status_qos_class", base | {"qos_class": pod.workload.quality}, times, "1")
    if finished:
        done = times[times >= pod.end_s * 1000]
        yield Line("kube_pod_completion_time", base, done, f"{pod.end_s:.0f}")
        for container in pod.workload.containers:
            yield Line("kube_pod_container_status_terminated_reason",
                       base | {"container": container.name, "reason": "Completed"}, done, "1")  # fmt: skip
    if pod.evicted:
        yield Line("kube_pod_status_reason", base | {"reason": "Evicted"}, times[times >= pod.end_s * 1000], "1")
    for container in pod.workload.containers:
        of = base | {"container": container.name}
        for what, amounts in (("requests", container.requests), ("limits", container.limits)):
            for resource, amount in amounts.items():
                unit = "core" if resource == "cpu" else "byte"
                yield Line(f"kube_pod_container_resource_{what}",
                           of | {"node": f"node-{pod.node}", "resource": resource, "unit": unit},
                           times, f"{amount:g}" if resource == "cpu" else f"{amount:.0f}")  # fmt: skip
        yield from _container_lines(pod, container.name, of, times)


def _container_lines(pod: Pod, container: str, of: dict[str, str], times: NDArray[np.int64]) -> Iterator[Line]:
    """Yield restarts, the current start, and the last end of a container."""
    runs = pod.runs[container]
    starts = np.array([run.start_s for run in runs])
    current = np.searchsorted(starts * 1000, times, side="right") - 1
    restarts = [str(max(k, 0)) for k in current.tolist()]
    yield Line("kube_pod_container_status_restarts_total", of, times, restarts)
    alive = current >= 0
    begun = [f"{runs[k].start_s:.0f}" for k in current[alive].tolist()]
    yield Line("kube_pod_container_state_started", of, times[alive], begun)
    for k, run in enumerate(runs):
        if run.reason not in ("Error", "OOMKilled"):
            continue
        upto = runs[k + 1].end_s * 1000 if k + 1 < len(runs) else np.inf
        last = times[(times >= run.end_s * 1000) & (times < upto)]
        yield Line("kube_pod_container_status_last_terminated_reason", of | {"reason": run.reason}, last, "1")
        yield Line("kube_pod_container_status_last_terminated_timestamp", of, last, f"{run.end_s:.0f}")
        yield Line("kube_pod_container_status_last_terminated_exitcode", of, last,
                   "137" if run.reason == "OOMKilled" else "1")  # fmt: skip


def owner_lines(pods: Iterable[Pod], start_s: int, end_s: int, step_s: int) -> Iterator[Line]:
    """Yield the owners of replica sets and jobs, once each."""
    lives: dict[tuple[str, str, str], list[Pod]] = {}
    for pod in pods:
        if pod.workload.kind in _OF_JOB:
            lives.setdefault((pod.workload.kind, pod.workload.namespace, pod.owner), []).append(pod)
    for (kind, namespace, owner), owned in lives.items():
        first, last = min(pod.start_s for pod in owned), max(pod.end_s for pod in owned)
        times = _beats(max(first, start_s), min(last + 3600, end_s), step_s)
        of = {"owner_kind": kind, "owner_name": owned[0].workload.name, "owner_is_controller": "true"}
        metric, label = ("kube_replicaset_owner", "replicaset") if kind == "Deployment" else (
            "kube_job_owner", "job_name")  # fmt: skip
        yield Line(metric, _STATE_JOB | {"namespace": namespace, label: owner} | of, times, "1")


def cluster_lines(
    pods: Sequence[Pod], nodes: int, capacity: dict[str, float], start_s: int, end_s: int, step_s: int
) -> Iterator[Line]:
    """Yield what nodes allot, the scalers, and the mark of a synthetic history."""
    times = _beats(start_s, end_s, step_s)
    yield Line("reclaim_synthetic_history", {"job": "reclaim"}, times, "1")
    for node in range(nodes):
        for resource, amount in capacity.items():
            unit = "core" if resource == "cpu" else "byte"
            yield Line("kube_node_status_allocatable",
                       _STATE_JOB | {"node": f"node-{node}", "resource": resource, "unit": unit},
                       times, f"{amount:.0f}")  # fmt: skip
    for workload in {id(pod.workload): pod.workload for pod in pods if pod.workload.scaled}.values():
        yield Line("kube_horizontalpodautoscaler_info", _STATE_JOB | {
            "namespace": workload.namespace, "horizontalpodautoscaler": workload.name,
            "scaletargetref_kind": workload.kind, "scaletargetref_name": workload.name,
        }, times, "1")  # fmt: skip


def _beats(start_s: float, end_s: float, step_s: int) -> NDArray[np.int64]:
    """Return the scrape times of kube-state-metrics within a range, in ms."""
    first = -(-int(start_s) // step_s) * step_s
    return np.arange(first, end_s, step_s).astype(np.int64) * 1000
