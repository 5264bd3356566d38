"""Writes a seeded synthetic Kubernetes history as OpenMetrics text, with its true windows and ends.

``promtool tsdb create-blocks-from openmetrics`` makes Prometheus blocks of each day's file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data.core.files import remove_left_behind, replaced_folder
from reclaim.data.errors import ConfigError
from reclaim.data.synthetic.job import LONGEST_DAYS
from reclaim.data.synthetic.kubernetes.cluster import DAY_S, GIB, pods, workloads
from reclaim.data.synthetic.kubernetes.openmetrics import DayFiles, cluster_lines, owner_lines, state_lines, usage_lines
from reclaim.data.synthetic.kubernetes.scrapes import TrueWindow, scrape, true_windows
from reclaim.data.traces.history import moment_s

MANIFEST: Final = "SYNTHETIC.json"
TRUE_WINDOWS, TRUE_ENDS = "true-windows.parquet", "true-ends.parquet"
GENERATION: Final = 1
"""Raised when the same options give other bytes."""
END: Final = "2026-11-02"
"""End of a synthetic history, unless another is asked for: the same options give the same bytes."""
CAPACITY: Final = {"cpu": 16.0, "memory": 64.0 * GIB}
"""Resources that a node allots to pods."""
_LEAST_S: Final = 3_600
"""Shortest history: some pods begin 1,000 s after it does."""
_CONTAINERS: Final = 33
"""Containers of the workloads at size 1, without those of the daemon set."""


@dataclass(frozen=True)
class SyntheticHistoryConfig:
    """Size and length of a synthetic Kubernetes history."""

    machines: int = 6
    """Nodes."""
    days: float = 2.0
    """Length."""
    seed: int = 1
    """The same options and seed give the same bytes."""
    tasks_per_machine: float = 8.0
    """Containers per node at a time, on average."""
    scrape_s: int = 30
    """Seconds between two scrapes of a kubelet."""
    state_s: int = 120
    """Seconds between two scrapes of kube-state-metrics."""
    end: str = END
    """Its end, as 2026-11-02 or 2026-11-02T14:00 (UTC)."""

    def __post_init__(self) -> None:
        moment_s(self.end)
        for name in ("machines", "days", "tasks_per_machine", "scrape_s", "state_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")
        if self.days * DAY_S < _LEAST_S:
            raise ConfigError(f"days must be at least {_LEAST_S / DAY_S:.6g}, got {self.days!r}")
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed!r}")
        if self.days > LONGEST_DAYS:
            raise ConfigError(f"days must be at most {LONGEST_DAYS}, got {self.days!r}")


@dataclass(frozen=True)
class SyntheticHistoryReport:
    """Contents of a synthetic history's folder; ``wrote`` is False if it existed and nothing was written."""

    out: Path
    options: dict[str, Any]
    pods: int
    containers: int
    series: int
    samples: int
    ends: dict[str, int]
    wrote: bool


def write_history(
    out: Path, config: SyntheticHistoryConfig, *, progress: Callable[[float], None] | None = None
) -> SyntheticHistoryReport:
    """Write a synthetic history into the folder ``out``, which must be absent, or hold the same history.

    Raises
    ------
    ConfigError
        ``out`` holds other content.
    """
    wanted = asdict(config) | {"generation": GENERATION}
    if out.exists() and any(out.iterdir()):
        try:
            manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            manifest = {}
        found = manifest if isinstance(manifest, dict) else {}
        if found.get("options") != wanted or found.get("layout") != "kubernetes":
            raise ConfigError(f"{out}: holds something other than this history; name another folder or remove it")
        remove_left_behind(out)
        return SyntheticHistoryReport(out, **{k: found[k] for k in _FACTS}, wrote=False)
    with replaced_folder(out) as folder:
        facts = _write(folder, config, progress) | {"options": wanted}
        manifest = facts | {"layout": "kubernetes", "statement": "Made up: no real cluster ever ran these pods."}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return SyntheticHistoryReport(out, **facts, wrote=True)


_FACTS: Final = ("options", "pods", "containers", "series", "samples", "ends")


def _write(folder: Path, config: SyntheticHistoryConfig, progress: Callable[[float], None] | None) -> dict[str, Any]:
    rng = np.random.default_rng(config.seed)
    past_s = moment_s(config.end)
    start_s = past_s - round(config.days * DAY_S)
    size = max(config.machines * config.tasks_per_machine - config.machines, 1) / _CONTAINERS
    all_pods = list(pods(workloads(size), config.machines, start_s, past_s, rng))
    ends: list[tuple[str, str, str, float, str]] = []
    by_name: dict[tuple[str, str, str], list[Any]] = {}
    with DayFiles(folder, start_s, past_s) as files:
        for k, pod in enumerate(all_pods):
            for container, runs in pod.runs.items():
                key = (pod.workload.namespace, pod.name, container)
                for number, run in enumerate(runs):
                    scrapes = scrape(pod, run, start_s, config.scrape_s, rng)
                    if run.end_s > start_s and run.reason in ("Error", "OOMKilled"):
                        ends.append((*key, run.end_s, run.reason))
                    if not len(scrapes.time_ms):
                        continue
                    by_name.setdefault(key, []).append(scrapes)  # a pod of a stateful set comes again
                    for line in usage_lines(pod, container, number, scrapes):
                        files.write(line)
            for line in state_lines(pod, start_s, past_s, config.state_s):
                files.write(line)
            if progress is not None:
                progress((k + 1) / len(all_pods))
        for line in owner_lines(all_pods, start_s, past_s, config.state_s):
            files.write(line)
        for line in cluster_lines(all_pods, config.machines, CAPACITY, start_s, past_s, config.state_s):
            files.write(line)
    windows = [_table(key, true_windows(runs)) for key, runs in by_name.items()]
    pq.write_table(pa.concat_tables(windows), folder / TRUE_WINDOWS)
    names = ("namespace", "pod", "container", "time_s", "reason")
    columns = list(zip(*ends, strict=True)) if ends else [()] * len(names)
    pq.write_table(pa.table({n: list(c) for n, c in zip(names, columns, strict=True)}), folder / TRUE_ENDS)
    return {
        "pods": sum(pod.end_s > start_s for pod in all_pods),
        "containers": len(by_name),
        "series": files.series,
        "samples": files.samples,
        "ends": {reason: sum(e[-1] == reason for e in ends) for reason in ("Error", "OOMKilled")},
    }


def _table(key: tuple[str, str, str], windows: TrueWindow) -> pa.Table:
    named = zip(("namespace", "pod", "container"), key, strict=True)
    measured = {name: getattr(windows, name) for name in TrueWindow.__dataclass_fields__}
    return pa.table({**{name: pa.repeat(value, len(windows.slot)) for name, value in named}, **measured})
