"""A small trace of every format, all of the same windows: what the contract suite of traces reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq

from reclaim.data.ingest.job import IngestConfig
from reclaim.data.traces.history import PIECE_S
from reclaim.data.traces.recorded import file_name, windows_table
from reclaim.data.traces.schema_csv import SCHEMA_FILE
from reclaim.data.windows import empty_windows
from tests.data.traces.kubernetes.histories import APP, T0, beat, counter, one, write_history
from tests.data.traces.test_alibaba_2017 import schema_text
from tests.data.traces.test_google_v2 import schema_csv, write_table
from tests.series import write_raw

N_TASKS: Final = 3
N_WINDOWS: Final = 24
"""Of each task, 300 s long, one after another."""
CPU_LIMIT, MEMORY_LIMIT = 0.5, 0.25
_START_S: Final = 900
ROWS: Final = [(_START_S + 300 * k, task, 0.0625 * (1 + k % 5)) for k in range(N_WINDOWS) for task in range(N_TASKS)]
"""Start in seconds, task, and CPU usage of each window; memory usage is half of it."""


def parts_of(lines: Sequence[str], parts: int) -> list[list[str]]:
    """Return the lines of so many files: backwards, and each file with a line of the next, so that rows repeat."""
    turned = list(lines)[::-1]
    return [turned[k::parts] + turned[(k + 1) % parts :: parts][:1] for k in range(parts)]


def google_v3(folder: Path, parts: int) -> IngestConfig:
    """Write usage and one event of each task as JSON lines."""
    of = [{"collection_id": "7", "instance_index": str(task), "machine_id": "1"} for task in range(N_TASKS)]
    request = {"cpus": CPU_LIMIT, "memory": MEMORY_LIMIT}
    events = [{"time": "0", "type": "3", "priority": "200", "resource_request": request} | task for task in of]
    usage = [
        {
            "start_time": str(start * 1_000_000), "end_time": str((start + 300) * 1_000_000),
            "average_usage": {"cpus": cpu, "memory": cpu / 2}, "maximum_usage": {"cpus": cpu, "memory": cpu / 2},
        } | of[task]
        for start, task, cpu in ROWS
    ]  # fmt: skip
    files = {"instance_events": [[json.dumps(row) for row in events]]}
    files["instance_usage"] = parts_of([json.dumps(row) for row in usage], parts)
    for table, contents in files.items():
        for k, lines in enumerate(contents):
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{table}-{k:012d}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    return IngestConfig()


def google_v2(folder: Path, parts: int) -> IngestConfig:
    """Write usage and one event of each task as CSV, and the schema that names their columns."""
    (folder / SCHEMA_FILE).write_text(schema_csv())
    events = [f"0,,7,{task},1,1,u,2,9,{CPU_LIMIT},{MEMORY_LIMIT},0.1,0" for task in range(N_TASKS)]
    write_table(folder, "task_events", events)
    usage = [
        f"{start * 1_000_000},{(start + 300) * 1_000_000},7,{task},1,{cpu},{cpu / 2},,,,{cpu / 2},,,{cpu},,,,,,"
        for start, task, cpu in ROWS
    ]
    for k, lines in enumerate(parts_of(usage, parts)):
        write_table(folder, "task_usage", lines, part=k)
    return IngestConfig(trace="google-v2.1")


def alibaba_2017(folder: Path, parts: int) -> IngestConfig:
    """Write containers, whose usage is a percentage of their size, and the schema that names the columns."""
    (folder / "schema.csv").write_text(schema_text())
    events = [f"0,Create,{task},1,4,{MEMORY_LIMIT},0.125,0|1" for task in range(N_TASKS)]
    (folder / "container_event.csv").write_text("".join(f"{line}\n" for line in events))
    usage = [f"{start},{task},{100 * cpu / CPU_LIMIT},50,25,0.5,0.25,0.125,,,," for start, task, cpu in ROWS]
    for k, lines in enumerate(parts_of(usage, parts)):
        (folder / f"container_usage-{k}.csv").write_text("".join(f"{line}\n" for line in lines))
    return IngestConfig(trace="alibaba-2017")


def series(folder: Path, parts: int) -> IngestConfig:
    """Write plain CSV files next to a mapping."""
    usage = [f"{task},{start},1,{cpu},{cpu}" for start, task, cpu in ROWS]
    for k, lines in enumerate(parts_of(usage, parts)):
        write_raw(folder / str(k), ["task,time_s,machine,cpu,memory", *lines])
        (folder / str(k) / "cell.csv").rename(folder / f"{k}.csv")
    return IngestConfig(trace="series", mapping=str(folder / "0" / "mapping.toml"))


def recorded(folder: Path, parts: int) -> IngestConfig:
    """Write windows as a service records them, some of them twice."""
    windows = empty_windows(len(ROWS))
    windows.collection_id[:], windows.percentiles[:] = 7, 0.25
    windows.limit[:] = CPU_LIMIT, MEMORY_LIMIT
    windows.tier[:] = 3
    for row, (start, task, cpu) in enumerate(ROWS):
        windows.instance_index[row], windows.usage[row] = task, cpu / 2
        windows.start_us[row], windows.end_us[row] = start * 1_000_000, (start + 300) * 1_000_000
    for k, rows in enumerate(parts_of([str(row) for row in range(len(ROWS))], parts)):
        table = windows_table(windows.take(np.array(rows, np.int64)))
        pq.write_table(table, folder / file_name("usage", ROWS[-1][0] * 1_000_000, k))
    return IngestConfig(trace="recorded")


def kubernetes(folder: Path, parts: int) -> IngestConfig:
    """Write two hours of counters and gauges, as a Prometheus has them; a history has pieces of its own."""
    del parts
    folder.rmdir()
    of = [APP | {"container": f"app-{task}"} for task in range(N_TASKS)]
    write_history(
        folder,
        {
            "cpu": [one(labels, counter(0, PIECE_S, 0.25)) for labels in of],
            "memory": [one(labels, beat(0, PIECE_S, 0.125)) for labels in of],
            "limit": [
                one(labels | {"resource": resource}, beat(0, PIECE_S, limit))
                for labels in of
                for resource, limit in (("cpu", CPU_LIMIT), ("memory", MEMORY_LIMIT))
            ],
        },
    )
    return IngestConfig(trace="kubernetes")


Write = Callable[[Path, int], IngestConfig]

SMALL: Final[dict[str, tuple[Write, int]]] = {
    "google-v3": (google_v3, _START_S),
    "google-v2.1": (google_v2, _START_S),
    "alibaba-2017": (alibaba_2017, _START_S),
    "kubernetes": (kubernetes, T0),
    "recorded": (recorded, _START_S),
    "series": (series, _START_S),
}
"""Trace → a writer of so many files of usage into an empty folder, and the start of the first window in seconds.

The windows are those of ``ROWS``: ``N_WINDOWS`` of each of ``N_TASKS`` tasks, within their limits.
"""
