"""Reservations by name: what a table says of each container besides the service's answer."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.traces.history import PIECE_S
from reclaim.serving.feed.metrics import NamedMetrics, text_of
from reclaim.serving.feed.named import with_names
from tests.data.traces.kubernetes.histories import APP, POD, beat, counter, fold, one


def test_a_request_that_was_removed_is_none() -> None:
    """A pod of a set came again under its name without the request that it had; its other one stays."""
    request = {r: APP | {"resource": r} for r in s.RESOURCES}
    series = {
        "cpu": [one(APP, counter(0, PIECE_S, 0.3))],
        "pod": [one(POD, beat(0, PIECE_S))],
        "request": [one(request["cpu"], beat(0, 3600, 0.5)), one(request["memory"], beat(0, PIECE_S, 5e8))],
    }
    tasks = fold(series)[2].seen()
    ((collection, index),) = tasks
    answer: dict[str, Any] = {
        s.COLLECTION_ID: [collection], s.INSTANCE_INDEX: [index], s.TIER: ["prod"], "oom_probability": [0.0],
        s.END_US: [0],
    }  # fmt: skip
    for r in s.RESOURCES:
        answer |= {f"{r}_limit": [1.0], f"{r}_reservation": [0.4], f"{r}_rule": ["model"]}
    (row,) = with_names(pa.table(answer), tasks).to_pylist()
    assert (row["cpu_request"], row["memory_request"]) == (None, 5e8)


def test_a_limit_that_nothing_enforces_is_no_limit_of_the_table_nor_of_the_metrics() -> None:
    """A container has a limit of memory, of which its pod lost the one of CPU, and another one has none."""
    other = {**APP, "pod": "cart-7d9f8b6c5x-other"}
    limit = {r: APP | {"resource": r} for r in s.RESOURCES}
    series = {
        "cpu": [one(APP, counter(0, PIECE_S, 0.3)), one(other, counter(0, PIECE_S, 0.3))],
        "pod": [one(POD, beat(0, PIECE_S)), one({**POD, "pod": other["pod"]}, beat(0, PIECE_S))],
        "limit": [one(limit["cpu"], beat(0, 3600, 0.5)), one(limit["memory"], beat(0, PIECE_S, 5e8))],
    }
    windows, _, made = fold(series)
    tasks = made.seen()
    last = {(row[s.COLLECTION_ID], row[s.INSTANCE_INDEX]): row for row in windows}  # what the service is sent
    answer = pa.Table.from_pylist([
        {s.COLLECTION_ID: key[0], s.INSTANCE_INDEX: key[1], s.TIER: "prod", "oom_probability": 0.0, s.END_US: 0,
         **{f"{r}_limit": row[f"{r}_limit"] for r in s.RESOURCES}, **{f"{r}_reservation": 0.2 for r in s.RESOURCES},
         **{f"{r}_rule": "model" for r in s.RESOURCES}}
        for key, row in last.items()
    ])  # fmt: skip
    table = with_names(answer, tasks)
    first, second = table.to_pylist()
    assert (first["cpu_limit"], first["memory_limit"]) == (None, 5e8)
    assert (first["cpu_assumed_limit"], first["memory_assumed_limit"]) == (1.0, None)
    assert (second["cpu_limit"], second["memory_limit"]) == (None, None)
    assert second["cpu_assumed_limit"] == 1.0
    text = text_of(NamedMetrics(table)).decode().splitlines()
    assert [line.split()[-1] for line in text if line.startswith("reclaim_container_memory_limit_bytes{")] == ["5e+08"]
    assert not [line for line in text if line.startswith("reclaim_container_cpu_limit_cores{")]
    assert len([line for line in text if line.startswith("reclaim_container_cpu_reservation_cores{")]) == 2
    rules = [line for line in text if line.startswith("reclaim_container_memory_reservation_rule{")]
    assert [line.rpartition("rule=")[2] for line in rules] == ['"model"} 1.0'] * 2
    ends = [line for line in text if line.startswith("reclaim_container_window_end_timestamp_seconds{")]
    assert [float(line.split()[-1]) for line in ends] == [0.0] * 2
