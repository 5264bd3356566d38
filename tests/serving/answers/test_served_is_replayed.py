"""Served answers are those of a replay: the same history, sent in any way, gives the same bits."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.schema import RESOURCES
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.data.windows import Cell, Windows, concatenate
from reclaim.features.targets import TARGETS
from reclaim.serving.cell.task_record import key_of
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.arrow import MEDIA_TYPE
from reclaim.training.bundle import Bundle
from reclaim.training.estimators.base import RULES
from reclaim.training.margins.margin import MARGIN_NAMES
from tests.serving.cell_fixtures import (
    HEAD,
    TAIL,
    Json,
    Memory,
    assert_same_bits,
    by_slot,
    in_time,
    usage_arrow,
    usage_json,
)

if TYPE_CHECKING:
    from tests.serving.conftest import History

CELL = Cell((8.0, 16e9), 345_600_000_000)
SETTINGS = ServingSettings(
    clock="trace",
    largest_cpu=8.0, largest_memory=16e9, monday_us=345_600_000_000, stale_s=1e9, forget_s=1e9, ahead_s=1e9,
    cpu_unit="NCU", memory_unit="NMU", follow=False,
)  # fmt: skip
"""Of a cell whose tasks may be silent for as long as they like, as a replay lets them."""


@dataclass(frozen=True)
class Replayed:
    """A history in time order, and what a replay answers after each of its windows."""

    windows: Windows
    slot: NDArray[np.int64]
    reservation: dict[str, NDArray[np.float64]]
    rule: dict[str, NDArray[np.uint8]]
    quantiles: NDArray[np.float32]
    oom: NDArray[np.float64]

    def last_rows(self, end_us: int) -> NDArray[np.int64]:
        """Return the row of the last window of each task that ends by a time, tasks in order."""
        rows = np.flatnonzero(self.windows.end_us <= end_us)
        return rows[::-1][np.unique(self.slot[rows][::-1], return_index=True)[1]]


def replayed(windows: Windows, bundle: Bundle) -> Replayed:
    """Let the estimator that a replay runs take a history, under every margin."""
    windows = in_time(tellable(windows))
    slot = np.unique(key_of(windows), axis=0, return_inverse=True)[1].reshape(-1)
    made = {margin: bundle.estimator(margin, CELL).update(slot, windows) for margin in MARGIN_NAMES}
    forecast = made["baseline"].forecast
    assert forecast is not None
    quantiles, oom = forecast.at(bundle.horizon_s)
    return Replayed(
        windows, slot, {name: e.reservation for name, e in made.items()}, {name: e.rule for name, e in made.items()},
        quantiles, oom,
    )  # fmt: skip


def tellable(windows: Windows) -> Windows:
    """Return the windows that a body can tell as they are, and that come in the order of their tasks."""
    percentiles = windows.percentiles.copy()
    for levels in (HEAD, TAIL):
        part = percentiles[:, levels]
        wrong = np.isnan(part).any(axis=1) | (np.diff(part, axis=1) < 0).any(axis=1)
        percentiles[np.ix_(np.flatnonzero(wrong), np.array(levels))] = np.nan
    windows = replace(windows, percentiles=percentiles)
    task = windows.task_numbers()
    late = np.zeros(len(windows), np.bool_)
    for rows in np.split(np.arange(len(windows)), windows.task_starts()[1:-1]):
        late[rows[1:]] = windows.end_us[rows[1:]] <= np.maximum.accumulate(windows.end_us[rows])[:-1]
    strange = ~(windows.limit > 0).all(axis=1)
    for column in (windows.tier, windows.scheduling_class, windows.scheduled_us, windows.machine_id):
        known = np.bincount(task, column >= 0)
        strange |= (known > 0)[task] & (column < 0)  # a service would remember it
    good = ~np.isin(task, task[strange]) & ~late
    return windows.take(good)


@pytest.fixture
def history_replayed(history: History, bundle: Bundle) -> Replayed:
    return replayed(history.windows, bundle)


@pytest.fixture(scope="module")
def synthetic(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    """Return six hours of some 200 tasks, several of a collection among them."""
    folder = tmp_path_factory.mktemp("synthetic")
    write_cell(folder / "cell", SyntheticCellConfig(machines=4, days=0.25, tasks_per_machine=40.0))
    return replayed(ingested(folder / "cell", folder), bundle)


def ingested(trace: Path, folder: Path) -> Windows:
    dataset = ingest(trace, folder / "dataset", IngestConfig(buckets=2, max_reject_share=1.0)).dataset
    return concatenate([dataset.windows(bucket) for bucket in range(dataset.n_buckets)])


def pieces(windows: Windows, how: str, random: np.random.Generator) -> Iterator[list[Windows]]:
    """Yield the calls that each moment of the clock sees: a slot whole, in parts, row by row, or several at once."""
    if how == "several slots":
        parts = list(by_slot(windows))
        for low in range(0, len(parts), 5):
            yield [concatenate(parts[low : low + 5])]
        return
    for part in by_slot(windows):
        n = len(part)
        if how == "whole":
            yield [part]
        elif how == "shuffled":
            yield [part.take(random.permutation(n))]
        else:
            cuts = np.sort(random.integers(0, n + 1, 3))
            yield [part.take(np.arange(low, high)) for low, high in zip([0, *cuts], [*cuts, n], strict=True)]


def check(memory: Memory, theirs: Replayed, end_us: int) -> int:
    """Compare all that is served now with what a replay answers then; return how many tasks there are."""
    rows = theirs.last_rows(end_us)
    for margin in MARGIN_NAMES:
        found = memory.answers(margin=margin)
        assert_same_bits(found.known.key[:, 0], theirs.windows.collection_id[rows])
        assert_same_bits(found.known.key[:, 1], theirs.windows.instance_index[rows])
        assert_same_bits(found.estimate.reservation, theirs.reservation[margin][rows], margin)
        assert_same_bits(found.estimate.rule, theirs.rule[margin][rows], margin)
    assert_same_bits(found.known.scores.quantiles, theirs.quantiles[rows])
    assert_same_bits(found.known.scores.oom, theirs.oom[rows])
    return len(rows)


def serve_and_check(theirs: Replayed, bundle: Bundle, how: str) -> int:
    """Serve a history cut in one way, compare after every slot of the clock, and return how many answers were equal."""
    memory, equal, last_us = Memory(SETTINGS, bundle), 0, -1
    random = np.random.default_rng(1)
    for calls in pieces(theirs.windows, how, random):
        for windows in calls:
            assert set(memory.write(windows)) <= {0}
        last_us = max(last_us, *(int(windows.end_us.max(initial=-1)) for windows in calls))
        equal += check(memory, theirs, last_us)
    return equal


@pytest.mark.parametrize("how", ["whole", "shuffled", "in parts", "several slots"])
def test_a_drawn_history_is_served_as_it_is_replayed(how: str, history: History, bundle: Bundle) -> None:
    assert serve_and_check(replayed(history.windows, bundle), bundle, how) > (100 if how == "several slots" else 500)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "shuffled", "in parts", "several slots"])
def test_a_synthetic_cell_is_served_as_it_is_replayed(how: str, synthetic: Replayed, bundle: Bundle) -> None:
    assert len(synthetic.windows) > 3_000
    assert synthetic.slot.max() > 100
    assert serve_and_check(synthetic, bundle, how) > 1_000


@pytest.mark.slow
def test_the_real_windows_of_google_2019_are_served_as_they_are_replayed(
    real_data: Path, bundle: Bundle, tmp_path: Path
) -> None:
    theirs = replayed(ingested(real_data / "google_2019", tmp_path), bundle)
    assert len(theirs.windows) > 2_000  # nearly half of the excerpt's windows are of tasks whose limit it does not tell
    assert serve_and_check(theirs, bundle, "several slots") > 10_000


@pytest.fixture
def client(make_app: Any, at_url: Any, tmp_path: Path) -> Iterator[httpx.Client]:
    """Give what asks a server on loopback whose memory is kept on the disk."""
    settings = SETTINGS.model_dump(exclude_unset=True) | {"state": tmp_path / "state"}
    with make_app(**settings) as (app, _), at_url(app) as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


def assert_json_is_replayed(answer: Json, theirs: Replayed, margin: str) -> None:
    """Compare a cell's answer in JSON with what a replay answers at its clock; limits and ids as they were told."""
    rows = theirs.last_rows(answer["clock_us"])
    tasks = answer["tasks"]
    keys = [[task["collection_id"], task["instance_index"]] for task in tasks]
    wanted = key_of(theirs.windows)[rows]
    assert keys == wanted.tolist()
    reservation = np.array([[task["reservation"][r] for r in RESOURCES] for task in tasks])
    assert_same_bits(reservation, theirs.reservation[margin][rows])
    assert [[task["rule"][r] for r in RESOURCES] for task in tasks] == [
        [RULES[rule] for rule in row] for row in theirs.rule[margin][rows].tolist()
    ]
    oom = [np.nan if task["oom_probability"] is None else task["oom_probability"] for task in tasks]
    assert_same_bits(np.array(oom), theirs.oom[rows])
    over = theirs.windows.limit[rows][:, [0, 1, 0], None]
    expected = theirs.quantiles[rows] * over
    nothing = [np.nan] * expected.shape[-1]
    quantiles = [[task["quantiles"][name] or nothing for name in TARGETS] for task in tasks]
    assert_same_bits(np.array(quantiles), expected)


def table_of(content: bytes) -> pa.Table:
    with pa.ipc.open_stream(io.BytesIO(content)) as reader:
        return reader.read_all()


def assert_table_is_replayed(table: pa.Table, theirs: Replayed, margin: str) -> None:
    """Compare a cell's answer as a table with what a replay answers at its clock."""
    rows = theirs.last_rows(int(table.schema.metadata[b"clock_us"]))
    order = np.lexsort((table[s.INSTANCE_INDEX].to_numpy(), table[s.COLLECTION_ID].to_numpy()))
    table = table.take(order)
    assert_same_bits(table[s.COLLECTION_ID].to_numpy(), theirs.windows.collection_id[rows])
    for r, resource in enumerate(RESOURCES):
        assert_same_bits(table[f"{resource}_reservation"].to_numpy(), theirs.reservation[margin][rows, r])
        names = [RULES[rule] for rule in theirs.rule[margin][rows, r]]
        assert table[f"{resource}_rule"].to_pylist() == names
    assert_same_bits(table["oom_probability"].to_numpy(), theirs.oom[rows])


def test_windows_told_slot_by_slot_as_json_are_served_as_they_are_replayed(
    client: httpx.Client, history_replayed: Replayed
) -> None:
    for k, part in enumerate(by_slot(history_replayed.windows)):
        margin = MARGIN_NAMES[k % 3]
        answer = client.post(
            f"/v1/usage?answer=cell&margin={margin}", content=json.dumps({"windows": usage_json(part)})
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["taken"] == len(part)
        assert_json_is_replayed(answer.json()["reservations"], history_replayed, margin)


def test_windows_told_slot_by_slot_as_arrow_are_served_as_they_are_replayed(
    client: httpx.Client, history_replayed: Replayed
) -> None:
    for k, part in enumerate(by_slot(history_replayed.windows)):
        margin = MARGIN_NAMES[k % 3]
        url = f"/v1/usage?answer=cell&margin={margin}"
        answer = client.post(url, content=usage_arrow(part), headers={"content-type": MEDIA_TYPE})
        assert answer.status_code == 200, answer.text
        table = table_of(answer.content)
        assert json.loads(table.schema.metadata[b"write"])["taken"] == len(part)
        assert_table_is_replayed(table, history_replayed, margin)


def stateless_task(windows: Windows) -> Json:
    """Return one task's windows as the stateless route takes them."""
    rows = usage_json(windows)
    facts: dict[str, Any] = {k: rows[-1][k] for k in rows[-1] if k in _FACTS}
    kept = ("start_us", "end_us", "limit", "scheduled_us")
    told = [{k: v for k, v in row.items() if k in kept or k not in _FACTS} for row in rows]
    return {**facts, "limit": rows[-1]["limit"], "windows": told}


_FACTS = (
    "collection_id", "instance_index", "tier", "scheduling_class", "in_alloc", "user", "logical_name", "scheduled_us",
    "machine_id",
)  # fmt: skip


@pytest.mark.parametrize("margin", MARGIN_NAMES)
def test_the_stateless_routes_agree_with_each_other_and_with_a_replay(
    client: httpx.Client, history: History, bundle: Bundle, margin: str
) -> None:
    windows = tellable(history.windows)
    expected = bundle.estimator(margin, CELL).update(windows.task_numbers(), windows)
    edges = windows.task_starts()
    last = edges[1:] - 1
    told_as = {"content-type": MEDIA_TYPE}
    answer = client.post(
        f"/v1/reservations?margin={margin}&quantiles=true", content=usage_arrow(windows), headers=told_as
    )
    table = table_of(answer.content)
    tasks = [stateless_task(windows.take(slice(low, high))) for low, high in pairwise(edges)]
    cell = {"largest_machine": {"cpu": 8.0, "memory": 16e9}, "monday_us": 345_600_000_000}
    answer = client.post("/v1/reservations", content=json.dumps({"tasks": tasks, "cell": cell, "margin": margin}))
    told = answer.json()["tasks"]
    rules = {r: [RULES[rule] for rule in expected.rule[last, k]] for k, r in enumerate(RESOURCES)}
    for r, resource in enumerate(RESOURCES):
        assert_same_bits(table[f"{resource}_reservation"].to_numpy(), expected.reservation[last, r])
        assert_same_bits(np.array([task["reservation"][resource] for task in told]), expected.reservation[last, r])
        assert table[f"{resource}_rule"].to_pylist() == rules[resource]
        assert [task["rule"][resource] for task in told] == rules[resource]
    forecast = [next(f for f in task["forecast"] if f["horizon_s"] == bundle.horizon_s) for task in told]
    assert table["oom_probability"].to_pylist() == [f["oom_probability"] for f in forecast]
    for name in TARGETS:
        assert table[f"{name}_quantiles"].to_pylist() == [f["quantiles"][name] for f in forecast]
