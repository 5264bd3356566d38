"""Fixtures of tests of the task state: windows as request bodies, a tracker without a service, and its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.windows import CHANNELS, LEVELS, Windows, concatenate, empty_windows
from reclaim.features.registry import SLOT_S
from reclaim.serving.answers.encode import cell_prices
from reclaim.serving.answers.stateful import Answers, answers
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.cell.following import Following
from reclaim.serving.cell.outcomes import dated
from reclaim.serving.cell.task_record import Taken
from reclaim.serving.cell.tracker import Tracker
from reclaim.serving.models.loader import LoadedModel
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire import rows
from reclaim.serving.wire.arrow import write_table
from reclaim.training.bundle import Bundle
from reclaim.training.margins.margin import MARGIN_NAMES

Json = dict[str, Any]

S = 1_000_000
"""A second in µs."""
W = 300 * S
"""A whole window in µs."""
HEAD = [LEVELS.index(level) for level in s.PERCENTILES]
TAIL = [LEVELS.index(level) for level in s.TAIL_PERCENTILES]


def windows_of(*told: Json) -> Windows:
    """Return windows of a few facts each, all else unknown: ``task``, ``at`` (number of its window), ``cpu``, …."""
    out = empty_windows(len(told))
    for row, facts in enumerate(told):
        given: Json = {"task": 1, "index": 0, "at": 0, "cpu": 0.2, "memory": 0.3, "limit": 1.0, **facts}
        out.collection_id[row], out.instance_index[row] = given["task"], given["index"]
        out.start_us[row] = given.get("start_us", given["at"] * W)
        out.end_us[row] = given.get("end_us", (given["at"] + 1) * W)
        out.limit[row] = np.nan if given["limit"] is None else given["limit"]
        for channel in ("cpu_mean", "cpu_max"):
            out.usage[row, CHANNELS.index(channel)] = given["cpu"]
        out.usage[row, CHANNELS.index("memory_max")] = given["memory"]
        for name in ("tier", "scheduling_class", "machine_id", "user", "name", "scheduled_us", "in_alloc"):
            if name in given:
                getattr(out, name)[row] = given[name]
    return out


def with_tasks_in_allocs(windows: Windows) -> Windows:
    """Return windows and as many of tasks inside alloc instances, which have eight times the limit and use of it."""
    inside = replace(
        windows, collection_id=windows.collection_id + 1_000, in_alloc=np.ones(len(windows), np.bool_),
        limit=8.0 * windows.limit, usage=9.0 * windows.usage,
    )  # fmt: skip
    return concatenate([inside, windows])


def usage_rows(windows: Windows, in_alloc: NDArray[np.int8] | None = None) -> rows.UsageRows:
    """Return windows as a body that told them is read."""
    n = len(windows)
    told = windows.in_alloc.astype(np.int8) if in_alloc is None else in_alloc
    return rows.UsageRows(windows, told, np.arange(n), n, rows.Refusals())


def fact_rows(*tasks: Json, estimation: dict[int, bool] | None = None) -> rows.FactRows:
    """Return facts as a JSON body that tells them is read; ``task`` and ``index`` name the task."""
    named = [
        {"collection_id": facts["task"], "instance_index": facts.get("index", 0), **facts} for facts in tasks
    ]  # fmt: skip
    for facts in named:
        facts.pop("task")
        facts.pop("index", None)
        if "limit" in facts:
            facts["limit"] = {"cpu": facts["limit"], "memory": facts["limit"]}
    collections = [{"collection_id": k, "estimation": wanted} for k, wanted in (estimation or {}).items()]
    told = rows.facts_from_json(json.dumps({"tasks": named, "collections": collections}).encode(), 1_000)
    assert not told.refusals.counts, told.refusals
    return told


def usage_json(windows: Windows) -> list[Json]:
    """Return windows as a JSON body tells them: what is unknown is absent; those of a vector, all or none."""
    names = ("cpu_mean", "cpu_max", "memory_mean", "memory_max", "page_cache", "cpi", "mai")
    out = []
    for k in range(len(windows)):
        row: Json = {
            "collection_id": int(windows.collection_id[k]), "instance_index": int(windows.instance_index[k]),
            "start_us": int(windows.start_us[k]), "end_us": int(windows.end_us[k]),
            "in_alloc": bool(windows.in_alloc[k]),
        }  # fmt: skip
        row |= {n: float(v) for n, v in zip(names, windows.usage[k], strict=True) if not np.isnan(v)}
        for name, levels in (("cpu_percentiles", HEAD), ("cpu_tail_percentiles", TAIL)):
            if not np.isnan(values := windows.percentiles[k, levels]).any():
                row[name] = values.tolist()
        if not np.isnan(windows.limit[k]).any():
            row["limit"] = {"cpu": float(windows.limit[k, 0]), "memory": float(windows.limit[k, 1])}
        if windows.tier[k] >= 0:
            row["tier"] = s.TIERS[windows.tier[k]]
        for name, column in (("machine_id", windows.machine_id), ("scheduling_class", windows.scheduling_class),
                             ("scheduled_us", windows.scheduled_us)):  # fmt: skip
            if column[k] >= 0:
                row[name] = int(column[k])
        for name, column in (("user", windows.user), ("logical_name", windows.name)):
            if column[k] >= 0:
                row[name] = str(column[k])
        out.append(row)
    return out


def usage_arrow(windows: Windows) -> bytes:
    """Return windows as an Arrow body tells them."""
    schema = pa.schema(
        [(name, _TYPES[kind]) for name, kind in rows.USAGE_COLUMNS.items() if not name.endswith("_limit")]
        + [(s.CPU_LIMIT, pa.float64()), (s.MEMORY_LIMIT, pa.float64())]
    )
    told = usage_json(windows)
    for row in told:
        row[s.CPU_LIMIT], row[s.MEMORY_LIMIT] = row.pop("limit", {"cpu": None, "memory": None}).values()
    return bytes(write_table(pa.Table.from_pylist(told, schema=schema)))


_TYPES = {
    "whole": pa.int64(), "number": pa.float64(), "vector": pa.list_(pa.float32()), "word": pa.string(),
    "tier": pa.string(), "flag": pa.bool_(),
}  # fmt: skip


def in_time(windows: Windows) -> Windows:
    """Return windows in the order in which they end."""
    return windows.take(np.argsort(windows.end_us, kind="stable"))


def by_slot(windows: Windows) -> Iterator[Windows]:
    """Yield the windows of each slot of the clock, in turn."""
    windows = in_time(windows)
    slot = windows.end_us // (SLOT_S * S)
    for part in np.split(np.arange(len(windows)), np.flatnonzero(np.diff(slot)) + 1):
        yield windows.take(part)


def loaded(bundle: Bundle, version: str = "1") -> LoadedModel:
    """Return a model as the loader would."""
    return LoadedModel("reclaim", version, "reclaim@champion", bundle)


class Memory:
    """A tracker and the scorer it answers from, without a disk and without threads."""

    def __init__(self, settings: ServingSettings, bundle: Bundle, now_us: int = -1) -> None:
        self.settings = settings
        self.scorer = Scorer(loaded(bundle), settings.cell)
        self.now_us = now_us
        clock = CellClock(settings, lambda: self.now_us, passed_s=lambda: 0.0)
        self.tracker = Tracker(settings, clock)
        self.tracker.promote(self.scorer, Following(self.scorer) if settings.follow else None)

    @property
    def following(self) -> Following:
        """What follows the outcomes of its answers."""
        assert self.tracker.following is not None
        return self.tracker.following

    def write(self, windows: Windows, in_alloc: NDArray[np.int8] | None = None) -> list[int]:
        """Take windows, and return the outcome of each."""
        told = usage_rows(windows, in_alloc)
        admitted = self.tracker.admit(told.windows, told.in_alloc)
        if len(admitted.windows):
            taken: Taken = self.tracker.take(admitted.windows)
            self.scorer = self.tracker.sized(self.scorer, taken)
            self.tracker.publish(taken, self.scorer.score(taken.x, taken.last))
        return [int(outcome) for outcome in admitted.outcome]

    def tell(self, facts: rows.FactRows) -> NDArray[np.int64]:
        """Take facts as the writer would; return the slots of tasks that have left."""
        return self.tracker.store_facts(dated(facts, self.tracker.clock.present_us))

    def expire(self) -> list[int]:
        """Let tasks go of which nothing was heard for long; return their collections."""
        key = self.tracker.expired()
        self.tracker.remove(self.tracker.find(key))
        return [int(collection) for collection in key[:, 0]]

    def answers(self, *key: tuple[int, int], margin: str = "baseline") -> Answers:
        """Return the answers for some tasks under one margin, or for all in order."""
        return answers_of(self.tracker, self.settings, *key, margin=margin)


def answers_of(tracker: Tracker, settings: ServingSettings, *key: tuple[int, int], margin: str = "baseline") -> Answers:
    """Return the answers for some tasks under one margin, or for all in order."""
    known = tracker.look(np.array(key, np.int64).reshape(-1, 2) if key else tracker.names(), with_x=True)
    return answers(known, np.full(1 + len(s.TIERS), MARGIN_NAMES.index(margin)), settings)


@dataclass(frozen=True)
class Told:
    """All that is answered of all tasks, in order, under every margin."""

    key: NDArray[np.int64]
    reservation: NDArray[np.float64]
    rule: NDArray[np.uint8]
    quantiles: NDArray[np.float32]
    oom: NDArray[np.float64]
    x: NDArray[np.float32]
    facts: NDArray[Any]
    prices: NDArray[np.float64]


def told_by(tracker: Tracker, settings: ServingSettings) -> Told:
    """Return all that a tracker answers."""
    every = [answers_of(tracker, settings, margin=margin) for margin in MARGIN_NAMES]
    known = every[0].known
    assert known.x is not None
    seen = known.task["windows"] > 0
    return Told(
        known.key, np.stack([a.estimate.reservation for a in every]), np.stack([a.estimate.rule for a in every]),
        known.scores.quantiles, known.scores.oom, np.where(seen[:, None], known.x, np.nan), known.task,
        np.array([price.now for price in cell_prices(tracker.prices)]),
    )  # fmt: skip


def assert_same(ours: Told, theirs: Told) -> None:
    """Compare to the bit."""
    for field in fields(Told):
        assert_same_bits(getattr(ours, field.name), getattr(theirs, field.name), field.name)


def assert_same_bits(ours: NDArray[Any], theirs: NDArray[Any], what: str = "") -> None:
    """Compare arrays to the bit, but for which of the many NaN one is."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    if ours.dtype.names is not None:
        for name in ours.dtype.names:
            assert_same_bits(np.ascontiguousarray(ours[name]), np.ascontiguousarray(theirs[name]), f"{what}.{name}")
        return
    np.testing.assert_array_equal(ours, theirs, what)
    if np.issubdtype(ours.dtype, np.floating):
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs), what)


def memory_with(bundle: Bundle, now_us: int = -1, **changes: Any) -> Memory:
    """Return a cell with other settings."""
    return Memory(ServingSettings(**changes), bundle, now_us)


def facts_of(memory: Memory, task: int = 1, index: int = 0) -> Any:
    """Return what is kept of a task that is there."""
    known = memory.tracker.look(np.array([[task, index]]))
    assert known.there[0]
    return known.task[0]
