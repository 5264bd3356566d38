"""Reservations by name: what a table says of each container besides the service's answer."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.traces.history import PIECE_S
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
