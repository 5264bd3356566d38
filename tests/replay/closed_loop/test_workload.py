"""Workload of a closed loop, from a hand-made v3 trace: runs, arrivals, tapes, and the machines."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.schema import MACHINES, EventType
from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, MEMORY_MEAN, demand
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import SplitConfig
from reclaim.replay.closed_loop import workload as workload_module
from reclaim.replay.closed_loop.records import MONITORING, NON_PRODUCTION, PRODUCTION
from reclaim.replay.closed_loop.simulate import simulate
from reclaim.replay.closed_loop.workload import CellMachines, machines_of, workload_of
from reclaim.replay.experiment import Source
from reclaim.replay.open_loop.fold import fold_dataset
from reclaim.replay.open_loop.period import Period, lay_out_period
from tests.replay.small_cells import QUIET, SLOT_US, Change, Task, machines, workload

BATCH, SERVICE, ALLOC, INNER = "11", "22", "33", "44"


def at(slot: float) -> int:
    return int(600 + slot * 300)


@pytest.fixture
def source(
    tmp_path: Path, window: Callable[..., dict[str, Any]], event: Callable[..., dict[str, Any]], write_shard: Any
) -> Source:
    """Return a trace of 100 slots: a service throughout, batch work run twice, an alloc instance and a task inside."""
    batch = {"collection_id": BATCH, "priority": "103", "scheduling_class": "0"}
    service = {"collection_id": SERVICE, "priority": "200"}
    alloc = {"collection_id": ALLOC, "priority": "400", "collection_type": "1"}
    inner = {"collection_id": INNER, "priority": "200", "alloc_collection_id": ALLOC, "alloc_instance_index": "0"}
    of = {name: {k: v for k, v in one.items() if k not in ("priority", "scheduling_class")}
          for name, one in (("batch", batch), ("service", service), ("alloc", alloc), ("inner", inner))}  # fmt: skip
    rows = [window(at(k), **of["service"]) for k in range(100)]
    rows += [window(at(k), **of["batch"]) for k in range(40, 60)]
    last = {"maximum_usage": {"cpus": 0.4, "memory": 0.5}}
    rows += [window(at(k), **of["batch"], **(last if k == 83 else {})) for k in range(64, 84)]
    rows += [window(at(k), **of[name]) for name in ("alloc", "inner") for k in range(30, 50)]
    events = [event(0, EventType.SUBMIT, **service), event(0, EventType.SCHEDULE, **service)]
    events += [
        event(at(38), EventType.SUBMIT, **batch), event(at(39), EventType.ENABLE, **batch),
        event(at(40), EventType.SCHEDULE, **batch), event(at(60), EventType.EVICT, **batch),
        event(at(61), EventType.SUBMIT, **batch), event(at(64), EventType.SCHEDULE, **batch),
        event(at(84), EventType.FAIL, **batch),
        event(0, EventType.SUBMIT, **alloc),  # before the trace, at no time that is known
        event(at(30), EventType.SCHEDULE, **alloc), event(at(30), EventType.SCHEDULE, **inner),
    ]  # fmt: skip
    machine = {"machine_id": "7", "capacity": {"cpus": 0.75, "memory": 1.0}}
    changes = [
        {"time": "0", "type": "1", **machine},
        {"time": "0", "type": "1", **machine, "machine_id": "8"},
        {"time": str(at(50) * 1_000_000), "type": "2", **machine},
        {"time": str(at(55) * 1_000_000), "type": "1", **machine},
        {"time": str(at(2) * 1_000_000), "type": "2", "machine_id": "8"},
    ]
    write_shard(tmp_path / "raw", "instance_usage-000000000000", rows)
    write_shard(tmp_path / "raw", "instance_events-000000000000", events)
    write_shard(tmp_path / "raw", "machine_events-000000000000", changes)
    made = ingest(tmp_path / "raw", tmp_path / "cell", IngestConfig(buckets=2)).dataset
    build_features(made, FeatureConfig(split=SplitConfig(role="test", valid_share=0.2)))
    return Source(made, FeatureSet.open(made.path), {})


@pytest.fixture
def wishes(
    tmp_path: Path, window: Callable[..., dict[str, Any]], event: Callable[..., dict[str, Any]], write_shard: Any
) -> Source:
    """Return a trace of 100 slots and two machines: a service, two jobs of batch work, one out of sight for a while."""
    jobs = {"22": "200", "11": "103", "12": "110", "13": "103"}  # priorities
    seen = {"22": range(100), "11": range(40, 60), "12": range(40, 60), "13": (*range(5, 15), *range(30, 40))}
    east = [{"name": "zone", "value": "east", "relation": "0"}]
    rows = [window(at(k), collection_id=job) for job, slots in seen.items() for k in slots]
    events = [
        event(at(seen[job][0]), EventType.SCHEDULE, collection_id=job, priority=priority,
              **({"constraint": east} if job == "12" else {}))
        for job, priority in jobs.items()
    ]  # fmt: skip
    added = {"time": "0", "type": "1", "capacity": {"cpus": 1.0, "memory": 1.0}}
    zone = {"time": "0", "machine_id": "8", "name": "zone", "value": "east", "deleted": False}
    asked = {"time": "0", "collection_id": "11", "type": "0", "collection_type": "0", "max_per_machine": "2"}
    after = {**asked, "collection_id": "12", "max_per_machine": None, "start_after_collection_ids": ["13", "11", "99"]}
    write_shard(tmp_path / "raw", "instance_usage-000000000000", rows)
    write_shard(tmp_path / "raw", "instance_events-000000000000", events)
    write_shard(tmp_path / "raw", "machine_events-000000000000", [{"machine_id": m, **added} for m in ("7", "8")])
    write_shard(tmp_path / "raw", "machine_attributes-000000000000", [zone])
    write_shard(
        tmp_path / "raw", "collection_events-000000000000", [{**asked, "priority": "103"}, {**after, "priority": "110"}]
    )
    made = ingest(tmp_path / "raw", tmp_path / "cell", IngestConfig(trace="google-v3", buckets=2)).dataset
    build_features(made, FeatureConfig(split=SplitConfig(role="test", valid_share=0.2)))
    return Source(made, FeatureSet.open(made.path), {})


def period_of(source: Source) -> Period:
    history, _ = fold_dataset(source.features, 300, {}, {})
    table = source.dataset.table("machines")
    return lay_out_period(history, {name: table[name].to_numpy() for name in MACHINES.names})


def machines_in(source: Source, period: Period) -> CellMachines:
    slots = period.slots
    return machines_of(source.dataset, slots.first_us, slots.first_us + slots.count * 300_000_000)


def test_runs_are_those_of_the_trace_and_come_when_they_were_ready(source: Source) -> None:
    period = period_of(source)
    made = workload_of(source, period, machines_in(source, period))
    runs = made.runs
    start_us = made.start_us
    assert start_us == pytest.approx(at(20) * 1e6, abs=300e6)
    # the service goes on; then the alloc instance; then the two runs of the batch task; the task inside is left out
    assert runs["arrival_us"].tolist() == [start_us, *(int(at(k) * 1e6) for k in (30, 39, 61))]
    assert runs["carried"].tolist() == [True, False, False, False]
    assert runs["band"].tolist() == [PRODUCTION, MONITORING, NON_PRODUCTION, NON_PRODUCTION]
    assert runs["service"].tolist() == [True, True, False, False]
    assert runs["latency"].tolist() == [True, True, False, False]
    assert runs["rank"].tolist() == [1, 2, 0, 0]
    assert (runs["duration_us"] / 300e6).tolist()[1:] == [20.0, 20.0, 20.0]
    assert runs["after"].tolist() == [-1, -1, -1, 2]
    assert runs["then"].tolist() == [-1, -1, 3, -1]
    assert made.ends_out_of_memory.tolist() == [False, False, False, True]


def test_a_tape_plays_what_the_task_used_and_was_granted(source: Source) -> None:
    period = period_of(source)
    made = workload_of(source, period, machines_in(source, period))
    second = made.runs[3]
    tape = made.tape[second["first"] : second["stop"]]
    assert (tape["from_us"] / 300e6).tolist() == list(range(20))
    assert tape["use"][0].tolist() == [0.1, 0.25]  # mean CPU, largest memory
    assert tape["use"][-1].tolist() == [0.1, 0.5]
    assert tape["limit"][0].tolist() == [0.3, 0.5]
    assert second["first_limit"].tolist() == [0.3, 0.5]
    windows = period.history.windows
    assert (windows.collection_id[made.row[second["first"] : second["stop"]]] == int(BATCH)).all()


def test_what_is_unknown_of_a_run_is_taken_from_what_is_known_of_it(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    period = period_of(source)
    windows = period.history.windows
    of_second = np.flatnonzero((windows.collection_id == int(BATCH)) & (windows.start_us >= at(64) * 1_000_000))
    usage, limit, of_class = windows.usage.copy(), windows.limit.copy(), windows.scheduling_class.copy()
    usage[of_second[3:5], MEMORY_MAX] = np.nan
    usage[of_second[4], MEMORY_MEAN] = np.nan
    limit[of_second[5], 0] = 0.4  # of CPU alone
    of_class[windows.collection_id != int(ALLOC)] = s.UNKNOWN_ID
    seen = replace(windows, usage=usage, limit=limit, scheduling_class=of_class)
    monkeypatch.setattr(workload_module, "priorities", lambda _, rows: np.full(len(rows), np.nan))
    made = workload_of(
        source, replace(period, history=replace(period.history, windows=seen)), machines_in(source, period)
    )
    assert made.tape["use"][made.runs["first"][3] :][2:5, 1].tolist() == [0.25, 0.2, 0.0]  # the largest, the mean, none
    assert made.runs["varies"].tolist() == [False, False, False, True]
    assert made.runs["latency"].tolist() == [True, True, False, False]  # services are, unless their class says no
    assert made.runs["rank"].tolist() == [1, 2, 0, 0]  # of their tiers


def test_a_run_without_a_submission_since_the_end_before_it_comes_when_it_was_scheduled(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Dataset.events

    def without_one(dataset: Dataset, *asked: Any) -> pa.Table:
        table = recorded(dataset, *asked)
        return table.filter(pc.not_equal(table[s.TIME_US], at(61) * 1_000_000))

    monkeypatch.setattr(Dataset, "events", without_one)
    period = period_of(source)
    made = workload_of(source, period, machines_in(source, period))
    assert made.runs["arrival_us"][2:].tolist() == [at(39) * 1_000_000, at(64) * 1_000_000]


def test_a_run_that_was_submitted_again_inside_a_window_comes_as_that_window_begins(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, window_us = Dataset.events, at(64) * 1_000_000
    # the first run is evicted, submitted and scheduled again within the window that begins the second
    moved = {at(60) * 1_000_000: window_us + 1, at(61) * 1_000_000: window_us + 2, window_us: window_us + 3}

    def in_one_window(dataset: Dataset, *asked: Any) -> pa.Table:
        table = recorded(dataset, *asked)
        times = pa.array([moved.get(time, time) for time in table[s.TIME_US].to_pylist()], pa.int64())
        return table.set_column(table.schema.get_field_index(s.TIME_US), s.TIME_US, times)

    monkeypatch.setattr(Dataset, "events", in_one_window)
    period = period_of(source)
    windows = period.history.windows
    scheduled_us = np.where(windows.scheduled_us == window_us, window_us + 3, windows.scheduled_us)
    seen = replace(period.history, windows=replace(windows, scheduled_us=scheduled_us))
    made = workload_of(source, replace(period, history=seen), machines_in(source, period))
    assert made.runs["arrival_us"][2:].tolist() == [at(39) * 1_000_000, window_us]


def test_windows_of_a_run_from_before_begin_when_they_were_recorded_though_the_first_is_within_the_first_slot(
    source: Source,
) -> None:
    period = period_of(source)
    windows = period.history.windows
    later = 100_000_000 * (windows.collection_id == int(SERVICE))
    seen = replace(windows, start_us=windows.start_us + later, end_us=windows.end_us + later)
    made = workload_of(
        source, replace(period, history=replace(period.history, windows=seen)), machines_in(source, period)
    )
    run = made.runs[0]
    rows = made.row[run["first"] : run["stop"]]
    assert (bool(run["carried"]), int(run["arrival_us"])) == (True, made.start_us)
    assert seen.start_us[rows[0]] == made.start_us + 100_000_000
    at_us = run["arrival_us"] + made.tape["from_us"][run["first"] : run["stop"]]
    np.testing.assert_array_equal(at_us, seen.start_us[rows])
    assert run["arrival_us"] + run["duration_us"] == seen.end_us[rows[-1]]


def test_of_windows_shorter_than_a_slot_none_is_skipped(source: Source) -> None:
    period = period_of(source)
    history, slots = period.history, replace(period.slots, slot_s=1500)  # five windows each
    windows = history.windows
    of_second = np.flatnonzero((windows.collection_id == int(BATCH)) & (windows.start_us >= at(64) * 1_000_000))
    usage, end_us = windows.usage.copy(), windows.end_us.copy()
    usage[of_second, CPU_MEAN] = np.arange(20) / 10
    usage[of_second[7], MEMORY_MAX] = 1.5  # in the middle of the second slot
    end_us[of_second[0]] -= 150_000_000
    seen = replace(windows, usage=usage, end_us=end_us)
    finer = replace(period, history=replace(history, windows=seen), slots=slots)
    made = workload_of(source, finer, machines_in(source, period))
    run = made.runs[3]
    tape = made.tape[run["first"] : run["stop"]]
    # (0 / 2 + 0.1 + 0.2 + 0.3 + 0.4) / 4.5; (0.5 + ... + 0.9) / 5; and so on
    cpu, memory = [1.0 / 4.5, 0.7, 1.2, 1.7], [0.25, 1.5, 0.25, 0.5]
    assert tape["use"][:, 0] == pytest.approx(np.repeat(cpu, 5))
    assert tape["use"][:, 1] == pytest.approx(np.repeat(memory, 5))
    assert (tape["from_us"] / 300e6).tolist() == list(range(20))
    of_each = demand(seen.take(made.row[run["first"] : run["stop"]]))  # what a machine is held against
    held = made.demand[run["first"] : run["stop"]]
    np.testing.assert_array_equal(held, np.repeat(of_each.reshape(4, 5, 2).max(axis=1), 5, axis=0))
    assert held[5, 1] == 1.5
    reserved = np.full((1, len(made.tape), 2), 0.1)
    out_of_memory = simulate(made, machines_in(source, period), reserved)
    assert out_of_memory.ticks["out_of_memory"].sum() > 0


def test_runs_have_their_jobs_constraints_bounds_and_priorities(wishes: Source) -> None:
    period = period_of(wishes)
    on = machines_in(wishes, period)
    made = workload_of(wishes, period, on)
    assert on.ids.tolist() == [7, 8]
    job = period.history.windows.collection_id[made.row[made.runs["first"]]]
    of = dict(zip(job.tolist(), made.runs, strict=True))
    assert {j: int(run["per_machine"]) for j, run in of.items()} == {22: 0, 11: 2, 12: 0, 13: 0}
    allowed = {j: made.masks[run["mask"]].tolist() for j, run in of.items()}
    assert allowed == {22: [True, True], 11: [True, True], 12: [False, True], 13: [True, True]}  # 8 alone is east
    users = period.history.windows.user[made.row[made.runs["first"]]]
    assert len(np.unique(made.runs["user"])) == len(np.unique(users))
    # 103 and 110 are of one tier, and still not alike
    assert {j: int(run["rank"]) for j, run in of.items()} == {22: 2, 11: 0, 12: 1, 13: 0}


def test_a_run_has_the_constraints_it_was_submitted_with_though_its_first_window_begins_before(
    wishes: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    window_us = at(40) * 1_000_000  # times of windows are whole seconds, and those of events are not

    def within_the_second(table: pa.Table) -> pa.Table:
        times = [time + 400_000 * (time == window_us) for time in table[s.TIME_US].to_pylist()]
        return table.set_column(table.schema.get_field_index(s.TIME_US), s.TIME_US, pa.array(times, pa.int64()))

    recorded, asked_for = Dataset.events, Dataset.constraints
    monkeypatch.setattr(Dataset, "events", lambda *asked: within_the_second(recorded(*asked)))
    monkeypatch.setattr(Dataset, "constraints", lambda *asked: within_the_second(asked_for(*asked)))
    period = period_of(wishes)
    windows = period.history.windows
    scheduled_us = windows.scheduled_us + 400_000 * (windows.scheduled_us == window_us)
    seen = replace(period.history, windows=replace(windows, scheduled_us=scheduled_us))
    made = workload_of(wishes, replace(period, history=seen), machines_in(wishes, period))
    job = windows.collection_id[made.row[made.runs["first"]]]
    of = dict(zip(job.tolist(), made.runs, strict=True))
    assert int(of[12]["arrival_us"]) == window_us
    assert made.masks[of[12]["mask"]].tolist() == [False, True]


def test_a_collection_starts_after_those_that_had_ended_when_it_did(wishes: Source) -> None:
    period = period_of(wishes)
    made = workload_of(wishes, period, machines_in(wishes, period))
    job = period.history.windows.collection_id[made.row[made.runs["first"]]]
    number = dict(zip(job.tolist(), made.runs["collection"].tolist(), strict=True))
    # 12 came with 11, which it claims to follow, so that holds for 13 alone; 99 is unknown
    assert made.predecessors.tolist() == [[number[12], number[13]]]
    copies = 1 + made.runs["collection"].max()
    assert made.grown(2.0, seed=1).predecessors.tolist() == [
        [number[12], number[13]], [number[12] + copies, number[13] + copies]
    ]  # fmt: skip


def test_what_was_out_of_sight_when_the_period_began_comes_when_it_is_seen_again(wishes: Source) -> None:
    period = period_of(wishes)
    made = workload_of(wishes, period, machines_in(wishes, period))
    job = period.history.windows.collection_id[made.row[made.runs["first"]]]
    hidden, service = made.runs[job == 13][0], made.runs[job == 22][0]
    assert (bool(service["carried"]), int(service["arrival_us"])) == (True, made.start_us)
    assert (bool(hidden["carried"]), int(hidden["arrival_us"])) == (False, int(at(30) * 1e6))


def test_a_run_comes_after_the_one_before_of_its_own_task_not_of_another_of_its_collection(
    tmp_path: Path, window: Callable[..., dict[str, Any]], event: Callable[..., dict[str, Any]], write_shard: Any
) -> None:
    of = {index: {"collection_id": BATCH, "instance_index": index} for index in ("0", "1")}
    seen = {"0": (range(30, 40), range(50, 60)), "1": (range(35, 45), range(70, 80))}
    rows = [window(at(k), collection_id=SERVICE) for k in range(100)]
    events = [event(0, EventType.SCHEDULE, collection_id=SERVICE, priority="200")]
    for index, twice in seen.items():
        rows += [window(at(k), **of[index]) for run in twice for k in run]
        for run in twice:
            events += [
                event(at(run[0]), EventType.SCHEDULE, **of[index]), event(at(run[-1] + 1), EventType.EVICT, **of[index])
            ]  # fmt: skip
    machine = {"time": "0", "type": "1", "machine_id": "7", "capacity": {"cpus": 1.0, "memory": 1.0}}
    write_shard(tmp_path / "raw", "instance_usage-000000000000", rows)
    write_shard(tmp_path / "raw", "instance_events-000000000000", events)
    write_shard(tmp_path / "raw", "machine_events-000000000000", [machine])
    made = ingest(tmp_path / "raw", tmp_path / "cell", IngestConfig(buckets=1)).dataset
    build_features(made, FeatureConfig(split=SplitConfig(role="test", valid_share=0.2)))
    source = Source(made, FeatureSet.open(made.path), {})
    period = period_of(source)
    runs = workload_of(source, period, machines_in(source, period)).runs  # by arrival: 0, 1, 0 again, 1 again
    assert runs["arrival_us"][1:].tolist() == [int(at(k) * 1e6) for k in (30, 35, 50, 70)]
    assert runs["after"].tolist() == [-1, -1, -1, 1, 2]
    assert runs["then"].tolist() == [-1, 3, 4, -1, -1]


def test_machines_are_as_they_stand_when_the_period_begins_and_change_within_it(source: Source) -> None:
    period = period_of(source)
    on = machines_in(source, period)
    assert on.ids.tolist() == [7]  # the other one had gone before
    assert on.state["capacity"].tolist() == [[0.75, 1.0]]
    assert on.state["up"].tolist() == [True]
    assert on.changes["at_us"].tolist() == [int(at(50) * 1e6), int(at(55) * 1e6)]
    assert on.changes["up"].tolist() == [False, True]
    assert on.changes["capacity"].tolist() == [[0.75, 1.0]] * 2


def test_a_change_that_tells_no_capacity_leaves_each_machine_its_own() -> None:
    told = {
        s.TIME_US: [0, 0, 5, 20, 30, 40], s.MACHINE_ID: [8, 7, 7, 7, 8, 8], s.EVENT_TYPE: [1, 1, 2, 1, 2, 3],
        s.CPU_CAPACITY: [None, 0.5, None, None, 0.25, None], s.MEMORY_CAPACITY: [1.0, 0.75, None, 0.6, None, None],
    }  # fmt: skip
    table = pa.table(told, pa.schema([s.MACHINES.field(name) for name in told]))
    on = machines_of(cast("Dataset", SimpleNamespace(path=Path("cell"), table=lambda _: table)), 10, 50)
    assert on.ids.tolist() == [7, 8]
    assert on.state["capacity"].tolist() == [[0.5, 0.75], [0.0, 1.0]]
    assert on.state["up"].tolist() == [False, True]
    assert on.changes["machine"].tolist() == [0, 1, 1]
    assert on.changes["capacity"].tolist() == [[0.5, 0.6], [0.25, 1.0], [0.25, 1.0]]


def test_a_change_at_the_very_start_has_been_made_and_an_ill_machine_takes_no_new_work() -> None:
    kind = s.MachineEventType
    told = {
        s.TIME_US: [0, 0, 5, 10, 20, 30, 50], s.MACHINE_ID: [7, 8, 8, 7, 7, 7, 7],
        s.EVENT_TYPE: [
            kind.ADD, kind.ADD, kind.HARD_ERROR, kind.UPDATE, kind.SOFT_ERROR, kind.UPDATE, kind.REMOVE
        ],
        s.CPU_CAPACITY: [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5], s.MEMORY_CAPACITY: [1.0] * 7,
    }  # fmt: skip
    table = pa.table(told, pa.schema([s.MACHINES.field(name) for name in told]))
    on = machines_of(cast("Dataset", SimpleNamespace(path=Path("cell"), table=lambda _: table)), 10, 50)
    assert on.state["capacity"].tolist() == [[0.5, 1.0], [1.0, 1.0]]
    assert (on.state["up"].tolist(), on.state["open"].tolist()) == ([True, True], [True, False])
    assert on.changes["at_us"].tolist() == [20, 30]
    assert (on.changes["up"].tolist(), on.changes["open"].tolist()) == ([True, True], [False, True])


def test_a_trace_without_machines_says_what_it_lacks(dataset: Path) -> None:
    with pytest.raises(ConfigError, match="no machine with a capacity of CPU and memory"):
        machines_of(Dataset.open(dataset), 0, 10**12)


def test_a_grown_workload_has_clones_of_whole_collections_and_one_cut_down_has_fewer(source: Source) -> None:
    period = period_of(source)
    made = workload_of(source, period, machines_in(source, period))
    twice = made.grown(2.0, seed=1)
    assert len(twice.runs) == 2 * len(made.runs)
    assert len(np.unique(twice.runs["collection"])) == 6
    for i, run in enumerate(twice.runs):
        if run["after"] >= 0:
            before = twice.runs[run["after"]]
            assert before["collection"] == run["collection"]
            assert before["then"] == i
    assert (np.diff(twice.runs["arrival_us"]) >= 0).all()
    fewer = made.grown(0.4, seed=1)
    assert len(np.unique(fewer.runs["collection"])) == 1
    batch = next(part for seed in range(99) if len((part := made.grown(0.4, seed=seed)).runs) == 2)
    assert (batch.runs["after"].tolist(), batch.runs["then"].tolist()) == ([-1, 0], [1, -1])
    with pytest.raises(ConfigError, match="growth must be above 0, got 0"):
        made.grown(0.0, seed=1)
    with pytest.raises(ConfigError, match=r"growth=0\.1 leaves none of 3 collections"):
        made.grown(0.1, seed=1)


def test_a_cell_several_times_over_has_its_runs_and_machines_as_often_and_none_of_another_copy() -> None:
    masks = np.array([[True, True], [False, True]])
    made, _ = workload(
        Task(QUIET), Task(QUIET, at=1, after=0, mask=1, collection=1), masks=masks, machines=2, predecessors=[(1, 0)]
    )
    twice = made.tiled(2)
    assert (twice.runs["arrival_us"] // SLOT_US).tolist() == [0, 0, 1, 1]
    assert twice.runs["collection"].tolist() == [0, 2, 1, 3]
    assert (twice.runs["after"].tolist(), twice.runs["then"].tolist()) == ([-1, -1, 0, 1], [2, 3, -1, -1])
    assert twice.masks.tolist() == [[True] * 4, [False, True, False, True]]
    assert twice.predecessors.tolist() == [[1, 0], [3, 2]]
    on = machines((1.0, 1.0), (2.0, 2.0), changes=[Change(1, 1), Change(2, 0)]).tiled(2)
    assert on.state["capacity"][:, 0].tolist() == [1.0, 2.0, 1.0, 2.0]
    assert (on.changes["at_us"] // SLOT_US).tolist() == [1, 1, 2, 2]
    assert on.changes["machine"].tolist() == [1, 3, 0, 2]


def test_runs_that_arrive_together_come_by_priority_and_then_the_largest_first() -> None:
    of = [(0, 0.5), (1, 0.2), (1, 0.4)]
    made, _ = workload(*(Task(QUIET, (limit, limit), rank=rank) for rank, limit in of))
    ordered = made.in_order().runs
    assert [(int(run["rank"]), float(run["first_limit"][0])) for run in ordered] == [(1, 0.4), (1, 0.2), (0, 0.5)]


def test_what_a_drawn_part_of_a_workload_waits_for_is_in_it_or_need_not_end() -> None:
    made, _ = workload(*(Task(QUIET, collection=c) for c in range(3)), predecessors=[(1, 0), (2, 1)])
    for seed in range(6):
        for growth in (2 / 3, 5 / 3):  # of the three, and of them and two clones
            part = made.grown(growth, seed)
            there = part.runs["collection"].tolist()
            assert len(there) == round(3 * growth)
            pairs = [(1 + k, k) for k in (0, 1, 3, 4)]
            assert part.predecessors.tolist() == [[a, b] for a, b in pairs if a in there and b in there]


def test_a_part_of_the_machines_is_a_part_of_every_larger_part() -> None:
    state = np.zeros(5, [("capacity", "f8", (2,))])
    changes = np.zeros(2, [("at_us", "i8"), ("machine", "i4")])
    changes["machine"] = [0, 4]
    all_of_them = CellMachines(np.arange(5) * 10, state, changes)
    parts = [all_of_them.subset(n, seed=2) for n in (1, 2, 3, 4, 5)]
    for (small, at_small), (large, at_large) in pairwise(parts):
        assert large.ids[: len(small)].tolist() == small.ids.tolist()
        assert at_large[: len(at_small)].tolist() == at_small.tolist()
    for part, where in parts:
        assert (part.ids == where * 10).all()
        assert {int(part.ids[m]) for m in part.changes["machine"]} == {0, 40} & set(part.ids.tolist())
    with pytest.raises(ConfigError, match="expected 1 to 5 machines, got 6"):
        all_of_them.subset(6, seed=2)
