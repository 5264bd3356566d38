"""Writes reservations with the names of their containers into a file: a table, or metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from reclaim.data import schema as s
from reclaim.data.core.files import replaced_file
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.data.traces.kubernetes.fold import Task, TaskKey
from reclaim.data.traces.kubernetes.owners import machine_id
from reclaim.serving.feed.metrics import NamedMetrics, text_of

METRICS: Final = ".prom"
"""Ending of a file that the textfile collector of node exporter reads."""
SUFFIXES: Final = (".csv", ".parquet", METRICS)
"""Endings of a file of reservations, one for each format."""
_NAMES: Final = (s.CLUSTER, s.NAMESPACE, s.WORKLOAD_KIND, s.WORKLOAD, s.CONTAINER, s.POD, s.MACHINE_NAME)


def check_out(out: Path) -> None:
    """Raise ConfigError where a file has no known suffix, or is a folder."""
    if out.suffix not in SUFFIXES or out.is_dir():
        what = "a folder" if out.is_dir() else f"the suffix {out.suffix!r}"
        raise ConfigError(f"{out}: expected the name of a file that ends in {', '.join(SUFFIXES)}, got {what}")


def with_names(reservations: pa.Table, tasks: Mapping[TaskKey, Task]) -> pa.Table:
    """Return the reservations of known tasks with their names, requests and enforced limits, by name.

    Where no limit is enforced, it is null, and the one that reservations are up to instead is the assumed limit.

    Parameters
    ----------
    reservations : pyarrow.Table
        As the service answers them.
    tasks : mapping of TaskKey to Task
    """
    keys = list(zip(*(reservations[n].to_pylist() for n in (s.COLLECTION_ID, s.INSTANCE_INDEX)), strict=True))
    rows = [k for k, key in enumerate(keys) if key in tasks]
    of = [tasks[keys[k]] for k in rows]
    found = reservations.take(pa.array(rows, pa.int64()))  # a list of none has no type
    names = [
        (t.key.cluster, t.key.namespace, t.workload.kind, t.workload.name, t.key.container, t.key.pod,
         t.place_at(t.seen_us)) for t in of
    ]  # fmt: skip
    columns: dict[str, Any] = {
        name: pa.array([row[k] or None for row in names], pa.string()) for k, name in enumerate(_NAMES)
    }
    columns[s.TIER] = found[s.TIER].cast(pa.string())
    for resource in RESOURCES:
        columns[f"{resource}_request"] = pa.array([t.requested[resource] for t in of], pa.float64(), from_pandas=True)
        enforced = pa.array([t.limited[resource] for t in of], pa.float64(), from_pandas=True)
        columns[f"{resource}_limit"] = enforced
        columns[f"{resource}_assumed_limit"] = pc.if_else(pc.is_null(enforced), found[f"{resource}_limit"], None)
        columns[f"{resource}_reservation"] = found[f"{resource}_reservation"]
        columns[f"{resource}_rule"] = found[f"{resource}_rule"].cast(pa.string())
    for name in ("oom_probability", s.END_US, s.COLLECTION_ID, s.INSTANCE_INDEX):
        columns[name] = found[name]
    return pa.table(columns).sort_by([(name, "ascending") for name in _NAMES])


def nodes_with_names(machines: pa.Table, tasks: Mapping[TaskKey, Task], margin: str) -> pa.Table:
    """Return the limits and the reservations at a margin of the nodes of known tasks, by name.

    Parameters
    ----------
    machines : pyarrow.Table
        As the service answers them: reservations are of all tasks of a machine together.
    tasks : mapping of TaskKey to Task
    margin : str
    """
    places = {machine_id(place): (t.key.cluster, place) for t in tasks.values() if (place := t.place_at(t.seen_us))}
    ids = machines[s.MACHINE_ID].to_pylist()
    rows = [k for k, machine in enumerate(ids) if machine in places]
    of, found = [places[ids[k]] for k in rows], machines.take(pa.array(rows, pa.int64()))
    columns: dict[str, Any] = {
        s.CLUSTER: pa.array([cluster or None for cluster, _ in of], pa.string()),
        s.MACHINE_NAME: pa.array([place.removeprefix(f"{cluster}/") for cluster, place in of], pa.string()),
    }
    for resource in RESOURCES:
        columns[f"{resource}_limit"] = found[f"{resource}_limit"]
        columns[f"{resource}_reservation"] = found[f"{resource}_peak_{margin}"]
    return pa.table(columns).sort_by([(name, "ascending") for name in (s.CLUSTER, s.MACHINE_NAME)])


def write_named(metrics: NamedMetrics, out: Path) -> None:
    """Write the table of metrics in the format of the suffix; the file is replaced as a whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(out) as partial:
        if out.suffix == ".parquet":
            pq.write_table(metrics.table, partial)
        elif out.suffix == ".csv":
            csv.write_csv(metrics.table, partial)
        else:
            partial.write_bytes(text_of(metrics))
