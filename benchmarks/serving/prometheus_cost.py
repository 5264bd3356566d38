"""Measures what reading a history costs a Prometheus: CPU time of its process and bytes on the wire, by transport.

    reclaim synth cluster --format openmetrics --machines 6 --days 14 --tasks-per-machine 8
    for day in cluster/*.om; do promtool tsdb create-blocks-from openmetrics $day data; done
    prometheus --storage.tsdb.path=data --storage.tsdb.retention.time=10y --web.listen-address=127.0.0.1:9090 &
    python -m benchmarks.serving.prometheus_cost --url http://127.0.0.1:9090 --pid $! --end 2026-11-02

Next to it stand the four queries that KRR's simple strategy asks for each container of each workload (robusta-dev/krr,
`robusta_krr/core/integrations/prometheus/metrics`), over the same days, of the same server, in one run. Each way reads
the two metrics of usage; `everything` is a whole fetch, probe and the metrics of kube-state-metrics included. The
server must run on this machine, for its CPU time is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import made_by
from reclaim.data.fetch.prometheus.client import Access, Client
from reclaim.data.fetch.prometheus.job import PIECES_AT_ONCE, HistoryConfig, fetch_history
from reclaim.data.fetch.prometheus.reading import read_series
from reclaim.data.fetch.prometheus.transports import TRANSPORTS
from reclaim.data.traces.dialect import load_dialect
from reclaim.data.traces.history import PIECE_S, read_piece
from reclaim.data.traces.kubernetes.owners import ROLES, owners_of

STEP_S = 75
"""KRR's default `--timeframe_duration`, 1.25 minutes."""
BATCH = 50
"""Pods of one workload in one query of KRR."""


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the Prometheus")
    parser.add_argument("--pid", type=int, required=True, help="of its process, on this machine")
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--end", required=True, help="of the history, as in `reclaim fetch prometheus`")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "prometheus-cost.json")
    arguments = parser.parse_args()
    access = Access(arguments.url)
    config = HistoryConfig(access, days=arguments.days, end=arguments.end)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "history"
        fetch_history(config, folder)  # the first time, the server reads from disk, and decoders are compiled
        pieces = sorted((folder / "samples").iterdir())
        containers, asked = krr_queries(pieces, arguments.days)
        ways: dict[str, Callable[[Client], Any]] = {
            **{way: usage_reader(way, config) for way in TRANSPORTS if way != "export"},
            "krr": lambda client: [query(client, text, config.end_s() or 0) for text in asked],
        }
        rows = {
            way: measured(read, access, arguments.pid, arguments.repeat)
            for way, read in ways.items()
        }  # fmt: skip
        rows["everything"] = measured(
            lambda client: whole_fetch(client, config), access, arguments.pid, arguments.repeat
        )
        samples = sum(len(row.value) for path in pieces for role in ("cpu", "memory")
                      for row in read_piece(path, {role}).get(role, ()))  # fmt: skip
        stored = sum(path.stat().st_size for path in pieces)
        every = sum(len(row.value) for path in pieces for rows_ in read_piece(path).values() for row in rows_)
    result = {
        **made_by(f"python -m benchmarks.serving.prometheus_cost --url URL --pid PID --days {arguments.days:g} "
        f"--end {arguments.end} --repeat {arguments.repeat}"), "days": arguments.days, "containers": containers,
        "samples_of_usage": samples, "samples": every, "bytes_stored": stored, "krr_queries": len(asked),
        "repeat": arguments.repeat, "statistic": "median of the repetitions", "rows": rows,
    }  # fmt: skip
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for way, row in rows.items():
        print(f"{way:>12}: server CPU {row['server_cpu_ms']:>9,.0f} ms, {row['received'] / 1e6:8.1f} MB, "
              f"{row['requests']} requests, {row['seconds']:.1f} s")  # fmt: skip


def usage_reader(way: str, config: HistoryConfig) -> Callable[[Client], None]:
    """Return what reads the two metrics of usage, a week at a time."""
    end_s = config.end_s() or 0
    metrics = load_dialect("kubernetes").metrics[:2]

    def read(client: Client) -> None:
        for start_s in range(end_s - round(config.days * 86_400), end_s, PIECE_S * PIECES_AT_ONCE):
            for metric in metrics:
                past_s = min(start_s + PIECE_S * PIECES_AT_ONCE, end_s)
                read_series(client, metric, way, start_s * 1000, past_s * 1000)

    return read


def whole_fetch(client: Client, config: HistoryConfig) -> None:
    """Fetch a history, probe included; add to a client's counts what it took."""
    with tempfile.TemporaryDirectory() as name:
        report = fetch_history(config, Path(name) / "history")
    client.bytes, client.requests = report.received, report.requests


def query(client: Client, text: str, end_s: int) -> Any:
    """Ask one of KRR's queries."""
    return client.json("/api/v1/query", {"query": text, "time": str(end_s)})


def krr_queries(pieces: list[Path], days: float) -> tuple[int, list[str]]:
    """Return the number of containers of pods that ran, and KRR's four queries for each container of each workload."""
    dialect = load_dialect("kubernetes")
    owners = owners_of((read_piece(path, {*ROLES}) for path in pieces), dialect)
    pods: dict[tuple[str, str, str], set[str]] = {}
    for path in pieces:
        for row in read_piece(path, {"cpu"}).get("cpu", ()):
            of = row.named
            workload = owners.workload(("", of["namespace"], of["pod"]))
            key = (of["namespace"], workload.collection_name(of["container"]), of["container"])
            pods.setdefault(key, set()).add(of["pod"])
    span = f"[{round(days * 86_400)}s:{STEP_S}s]"
    asked = []
    for (namespace, _, container), names in pods.items():
        listed = sorted(names)
        for at in range(0, len(listed), BATCH):
            where = f'{{namespace="{namespace}", pod=~"{"|".join(listed[at : at + BATCH])}", container="{container}"}}'
            cpu, memory = f"container_cpu_usage_seconds_total{where}", f"container_memory_working_set_bytes{where}"
            by = "by (container, pod, job)"
            asked += [
                f"quantile_over_time(0.95, max(rate({cpu}[{STEP_S}s])) {by} {span})",
                f"count_over_time(max({cpu}) {by} {span})",
                f"max_over_time(max({memory}) {by} {span})",
                f"count_over_time(max({memory}) {by} {span})",
            ]
    return sum(map(len, pods.values())), asked


def measured(run: Callable[[Client], Any], access: Access, pid: int, repeat: int) -> dict[str, float]:
    """Return the medians of the server's CPU time, the bytes and the requests of a way, and the time that it took."""
    found = []
    for _ in range(repeat):
        with Client(access) as client:
            begun, before = time.perf_counter(), cpu_ms(pid)
            run(client)
            found.append((cpu_ms(pid) - before, time.perf_counter() - begun, client.bytes, client.requests))
    middle = sorted(found)[len(found) // 2]
    return dict(zip(("server_cpu_ms", "seconds", "received", "requests"), middle, strict=True))


def cpu_ms(pid: int) -> float:
    """Return the CPU time that a process has taken, in ms."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) * 1000 / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
