"""Bodies of the serving benchmark's requests: an invented cell whose tasks report every five minutes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from benchmarks.serving.callers import ARROW, request
from reclaim.data import schema as s
from reclaim.serving.wire.arrow import write_table

SLOT_US = 300_000_000
PER_COLLECTION = 10
MACHINES = 10_000
USERS, NAMES = 200, 2_000
"""Users and logical names, which collections share."""
_APART = 10**12
"""Collections of tasks that report alone, behind those of the cell."""

README = json.loads("""
{"margin": "medium", "tasks": [{"collection_id": 42, "tier": "prod", "limit": {"cpu": 2, "memory": 4e9}, "windows": [
    {"start_us": 0, "end_us": 300000000, "cpu_mean": 0.41, "cpu_max": 0.78, "memory_max": 1.21e9},
    {"start_us": 300000000, "end_us": 600000000, "cpu_mean": 0.38, "cpu_max": 0.65, "memory_max": 1.24e9}]}]}""")
"""Request of the README."""


class MadeUpCell:
    """``n`` tasks, the same in every run; usage wanders from slot to slot."""

    def __init__(self, n: int) -> None:
        self._random = np.random.default_rng(0)
        self.collection = np.arange(n) // PER_COLLECTION + 1
        self.index = np.arange(n) % PER_COLLECTION
        self._level = self._random.uniform(0.1, 0.7, (2, n))
        self._limit = np.stack([self._random.uniform(0.5, 4.0, n), self._random.uniform(0.5e9, 8e9, n)])

    def usage(self, slot: int) -> pa.Table:
        """Return a window of every task; slots from 0 on."""
        n = len(self.collection)
        share = np.clip(self._level * self._random.lognormal(0.0, 0.1, (2, n)), 0.0, 1.0)
        cpu, memory = share * self._limit
        return pa.table({
            s.COLLECTION_ID: self.collection, s.INSTANCE_INDEX: self.index,
            s.START_US: np.full(n, slot * SLOT_US), s.END_US: np.full(n, (slot + 1) * SLOT_US),
            s.CPU_MEAN: cpu, s.CPU_MAX: np.minimum(cpu * 1.6, self._limit[0] * 1.2),
            s.MEMORY_MEAN: memory * 0.95, s.MEMORY_MAX: memory,
            s.CPU_LIMIT: self._limit[0], s.MEMORY_LIMIT: self._limit[1],
            s.MACHINE_ID: np.arange(n) % MACHINES,
            s.TIER: pa.DictionaryArray.from_arrays((self.collection % len(s.TIERS)).astype(np.int8), list(s.TIERS)),
            "user": _words("user", self.collection % USERS, USERS),
            "logical_name": _words("job", self.collection % NAMES, NAMES),
        })  # fmt: skip

    def renew(self, share: float, slot: int) -> pa.Table:
        """Let some collections end with a slot, and others begin in their place; return the ends, for ``/v1/tasks``."""
        groups = -(-len(self.collection) // PER_COLLECTION)
        some = np.append(self._random.integers(groups), np.flatnonzero(self._random.random(groups) < share))
        ended = np.isin(np.arange(len(self.collection)) // PER_COLLECTION, some)
        table = pa.table({s.COLLECTION_ID: self.collection[ended], s.INSTANCE_INDEX: self.index[ended]})
        table = table.append_column("ended_us", pa.array(np.full(len(table), (slot + 1) * SLOT_US)))
        self.collection = np.where(ended, self.collection + groups, self.collection)
        return table


def _words(prefix: str, number: np.ndarray, most: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(number.astype(np.int32), [f"{prefix}-{k}" for k in range(most)])


def bulk(path: str, table: pa.Table) -> bytes:
    """Return a request that carries a table, and wants one."""
    return request("POST", path, write_table(table).to_pybytes(), ARROW, ARROW)


def candidates(n: int) -> bytes:
    """Return a question for the machines with room for each of ``n`` tasks of growing limits."""
    asked = [{"limit": {"cpu": 0.5 + i / 4, "memory": 1e9 + i * 5e8}} for i in range(n)]
    told = {"margin": "medium", "capacity": {"cpu": 64, "memory": 256e9}, "candidates": asked}
    return request("POST", "/v1/machines/fit", json.dumps(told).encode())


def one_task() -> bytes:
    """Return the README's request."""
    return request("POST", "/v1/reservations", json.dumps(README).encode())


def explained(n: int) -> list[bytes]:
    """Return questions for single tasks of a cell of ``n``, spread over it."""
    rows = range(0, n, max(n // 1_000, 1))
    return [request("GET", f"/v1/tasks/{row // PER_COLLECTION + 1}/{row % PER_COLLECTION}") for row in rows]


def one_window(first_slot: int, tasks: int = 2_000) -> Iterator[bytes]:
    """Give windows one by one, of tasks of their own in turn, slot after slot."""
    limit = {"cpu": 2.0, "memory": 4e9}
    for number in itertools.count():
        slot = first_slot + number // tasks
        window = {
            "collection_id": _APART + number % tasks, "start_us": slot * SLOT_US, "end_us": (slot + 1) * SLOT_US,
            "cpu_mean": 0.41, "cpu_max": 0.78, "memory_max": 1.21e9, "limit": limit, "tier": "prod",
        }  # fmt: skip
        yield request("POST", "/v1/usage", json.dumps({"windows": [window]}).encode())
