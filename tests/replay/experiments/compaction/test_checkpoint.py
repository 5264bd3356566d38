"""A cell at one moment: when it is taken, who is in it, what was reserved for them, and what they use from then on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.schema import TIERS, MachineEventType
from reclaim.data.windows import demand
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.closed_loop.constraints import Constraints
from reclaim.replay.closed_loop.workload import NoMachinesError, machines_of
from reclaim.replay.experiment import ORACLE, Source
from reclaim.replay.experiments.compaction.checkpoint import (
    HOUR_OF_DAY,
    EmptyCheckpointError,
    check_times,
    checkpoint_times,
    hosts_of,
    take_checkpoint,
)
from reclaim.replay.experiments.compaction.packing import MachineSet, TaskSet
from reclaim.replay.open_loop.estimates import LIMIT, Estimates, estimate_all
from reclaim.replay.open_loop.history import current_reservations
from reclaim.replay.settings import ReplayConfig

HORIZON_S = 3_600
HOUR_US = 3_600_000_000


@pytest.fixture(scope="module")
def source(cell_dataset: Path) -> Source:
    return Source(Dataset.open(cell_dataset), FeatureSet.open(cell_dataset), {})


@pytest.fixture(scope="module")
def estimates(source: Source) -> Estimates:
    return estimate_all(source, ReplayConfig(estimators=("borg",)))


def test_checkpoints_are_taken_at_the_same_hour_where_their_part_of_the_period_has_it(estimates: Estimates) -> None:
    first, last = estimates.period.slots.first_us, estimates.period.slots.stop_us
    latest = last - HORIZON_S * 1_000_000
    monday_us = first + (latest - first) // 2 - int((HOUR_OF_DAY + 1) * HOUR_US)  # 15:00 in the middle of the period
    (time,) = checkpoint_times(estimates.period, 1, HORIZON_S, monday_us)
    assert abs((time - monday_us) / HOUR_US - HOUR_OF_DAY) <= 300 / 3600
    times = checkpoint_times(estimates.period, 4, HORIZON_S, monday_us)
    assert len(set(times)) == 4
    assert first <= min(times) < max(times) <= latest
    assert all((t - first) % 300_000_000 == 0 for t in times)


def test_a_period_no_longer_than_the_horizon_has_no_checkpoint(estimates: Estimates) -> None:
    first, last = estimates.period.slots.first_us, estimates.period.slots.stop_us
    length_s = (last - first) // 1_000_000
    with pytest.raises(HistoryTooShortError, match=f"the test period is {length_s} s long"):
        checkpoint_times(estimates.period, 1, length_s, 0)


@pytest.mark.parametrize("monday_h", [0, 7, 13])
def test_no_two_checkpoints_are_the_same_moment(estimates: Estimates, monday_h: int) -> None:
    first, last = estimates.period.slots.first_us, estimates.period.slots.stop_us
    slots = (last - first) // 300_000_000 - HORIZON_S // 300
    for count in {1, 2, 7, slots // 2 + 1, slots - 1, slots}:
        times = checkpoint_times(estimates.period, count, HORIZON_S, first + monday_h * HOUR_US)
        assert len(set(times)) == count
        assert first <= min(times) <= max(times) < last - HORIZON_S * 1_000_000
        assert all((t - first) % 300_000_000 == 0 for t in times)
    with pytest.raises(ConfigError, match=f"checkpoints must be at most {slots}, .* got {slots + 1}"):
        checkpoint_times(estimates.period, slots + 1, HORIZON_S, first)


def test_a_moment_whose_horizon_passes_the_end_of_the_period_is_refused(estimates: Estimates) -> None:
    last = estimates.period.slots.stop_us
    latest = last - HORIZON_S * 1_000_000
    check_times(estimates.period, [latest], HORIZON_S)
    with pytest.raises(HistoryTooShortError, match=f"at_us: {latest + 10**6} is 3599 s before the end .* takes 3600 s"):
        check_times(estimates.period, [latest, latest + 10**6], HORIZON_S)


def test_a_checkpoint_holds_what_runs_and_what_is_reserved_and_used(source: Source, estimates: Estimates) -> None:
    first = estimates.period.slots.first_us
    time_us = first + HOUR_US
    taken = take_checkpoint(source, estimates, Constraints.read(source.dataset), time_us, HORIZON_S)
    history, windows = estimates.history, estimates.history.windows
    rows = np.flatnonzero(windows.start_us == time_us)
    assert len(taken.workload) == len(rows) == 30
    np.testing.assert_array_equal(taken.workload.limit, windows.limit[rows])
    assert taken.too_large == 0
    for margin, reservation in estimates.reservations("borg").items():
        np.testing.assert_array_equal(taken.reserved["borg", margin], current_reservations(reservation, history)[rows])
    np.testing.assert_array_equal(taken.reserved[LIMIT, "none"], windows.limit[rows])
    task = windows.task_numbers()
    for i, row in enumerate(rows.tolist()):
        soon = (task == task[row]) & (windows.start_us >= time_us) & (windows.start_us < time_us + HORIZON_S * 10**6)
        np.testing.assert_array_equal(taken.used[i], demand(windows.take(soon)))
    oracle = taken.reserved[ORACLE, "none"]
    assert isinstance(oracle, np.ndarray)
    np.testing.assert_allclose(oracle, np.minimum(taken.used.max(axis=1), taken.workload.limit), rtol=1e-6)


def test_a_window_longer_than_a_slot_is_used_in_all_of_its_slots(source: Source, estimates: Estimates) -> None:
    time_us = estimates.period.slots.first_us + HOUR_US
    constraints = Constraints.read(source.dataset)
    whole = take_checkpoint(source, estimates, constraints, time_us, HORIZON_S).used
    finer = replace(estimates, period=replace(estimates.period, slots=replace(estimates.period.slots, slot_s=100)))
    assert estimates.period.slots.slot_s == 300
    used = take_checkpoint(source, finer, constraints, time_us, HORIZON_S).used
    assert used.shape[1] == HORIZON_S // 100
    np.testing.assert_array_equal(used, np.repeat(whole, 3, axis=1))
    later = take_checkpoint(source, finer, constraints, time_us + 100_000_000, HORIZON_S).used
    np.testing.assert_array_equal(later[:, :-1], used[:, 1:])


def test_a_moment_within_windows_counts_what_is_left_of_them_in_the_first_slot(
    source: Source, estimates: Estimates
) -> None:
    windows = estimates.history.windows
    start_us = estimates.period.slots.first_us + HOUR_US
    taken = take_checkpoint(source, estimates, Constraints.read(source.dataset), start_us + 100_000_000, HORIZON_S)
    used, needs = taken.used, demand(windows)
    for i, row in enumerate(np.flatnonzero(windows.start_us == start_us).tolist()):
        # the next window begins 200 s on, still in the first slot; each later one in a slot of its own
        np.testing.assert_array_equal(used[i, 0], np.maximum(needs[row], needs[row + 1]))
        np.testing.assert_array_equal(used[i, 1:], needs[row + 2 : row + 1 + HORIZON_S // 300])


def test_production_is_what_has_its_priority_and_all_above(source: Source, estimates: Estimates) -> None:
    windows = estimates.history.windows
    time_us = estimates.period.slots.first_us
    tier = windows.task_numbers() % len(TIERS)
    tiered = replace(estimates, history=replace(estimates.history, windows=replace(windows, tier=tier.astype(np.int8))))
    taken = take_checkpoint(source, tiered, Constraints.read(source.dataset), time_us, HORIZON_S)
    of_tasks = [TIERS[t] for t in tier[windows.start_us == time_us]]
    assert set(of_tasks) == set(TIERS)
    assert taken.workload.production.tolist() == [name in ("prod", "mon") for name in of_tasks]


def test_machines_that_have_gone_are_not_in_it(source: Source, estimates: Estimates) -> None:
    taken = take_checkpoint(
        source, estimates, Constraints.read(source.dataset), estimates.period.slots.first_us, HORIZON_S
    )
    assert taken.machines.capacity.tolist() == [[8.0, 16.0]] * 4


@pytest.mark.parametrize("faulty_machines", [1, 4])
def test_machines_that_take_no_new_work_are_not_in_it(
    faulty_machines: int, source: Source, estimates: Estimates, tmp_path: Path
) -> None:
    path = tmp_path / "cell"
    shutil.copytree(source.dataset.path, path)
    table = source.dataset.table("machines")
    event = pa.array([MachineEventType.SOFT_ERROR] * len(table), pa.int8())
    machine = table["machine_id"].to_numpy()
    ill = np.isin(machine, np.unique(machine)[:faulty_machines])
    error = table.set_column(2, table.schema.field(2), event).filter(pa.array(ill))
    pq.write_table(pa.concat_tables([table, error]), path / "machines.parquet")
    faulty = replace(source, dataset=Dataset.open(path))
    first = estimates.period.slots.first_us
    if faulty_machines == 4:
        with pytest.raises(ConfigError, match=f"no machine takes work at {first} µs"):
            take_checkpoint(faulty, estimates, Constraints.read(faulty.dataset), first, HORIZON_S)
    else:
        assert len(take_checkpoint(faulty, estimates, Constraints.read(faulty.dataset), first, HORIZON_S).machines) == 3


def test_a_moment_at_which_all_machines_are_away_is_empty(source: Source, estimates: Estimates, tmp_path: Path) -> None:
    path = tmp_path / "cell"
    shutil.copytree(source.dataset.path, path)
    table, first = source.dataset.table("machines"), estimates.period.slots.first_us
    away = table.slice(0, 0)
    for time_us, kind in ((first - 1, MachineEventType.REMOVE), (first + HOUR_US, MachineEventType.ADD)):
        of = table.set_column(0, table.schema.field(0), pa.array([time_us] * len(table), pa.int64()))
        away = pa.concat_tables([away, of.set_column(2, table.schema.field(2), pa.array([kind] * len(of), pa.int8()))])
    pq.write_table(pa.concat_tables([table, away]), path / "machines.parquet")
    emptied = replace(source, dataset=Dataset.open(path))
    constraints = Constraints.read(emptied.dataset)
    with pytest.raises(EmptyCheckpointError, match=f"no machine takes work at {first} µs"):
        take_checkpoint(emptied, estimates, constraints, first, HORIZON_S)
    with pytest.raises(NoMachinesError, match="none of 5 machines is in service from"):
        machines_of(emptied.dataset, first, first + 1)


def test_a_moment_at_which_no_task_fits_any_machine_is_refused(source: Source, estimates: Estimates) -> None:
    windows = estimates.history.windows
    large = replace(estimates, history=replace(estimates.history, windows=replace(windows, limit=100 * windows.limit)))
    with pytest.raises(ConfigError, match=r"none of the 30 tasks at .* fits any machine"):
        take_checkpoint(
            source, large, Constraints.read(source.dataset), estimates.period.slots.first_us + HOUR_US, HORIZON_S
        )


def test_a_job_of_more_tasks_than_half_the_cell_has_machines_is_soft(source: Source, estimates: Estimates) -> None:
    taken = take_checkpoint(
        source, estimates, Constraints.read(source.dataset), estimates.period.slots.first_us, HORIZON_S
    )
    assert taken.workload.soft.all()  # three tasks, four machines
    assert taken.workload.picky.all()  # no more than five machines can take anything here


def test_a_moment_at_which_nothing_runs_is_refused(source: Source, estimates: Estimates) -> None:
    last = estimates.period.slots.stop_us
    with pytest.raises(ConfigError, match=f"no task runs at {last} µs"):
        take_checkpoint(source, estimates, Constraints.read(source.dataset), last, HORIZON_S)


def test_a_trace_without_machines_is_refused(dataset: Path, estimates: Estimates) -> None:
    bare = Source(Dataset.open(dataset), FeatureSet.open(dataset), {})
    with pytest.raises(ConfigError, match="no machine with a capacity"):
        take_checkpoint(bare, estimates, Constraints.read(bare.dataset), estimates.period.slots.first_us, HORIZON_S)


def test_a_task_has_as_many_hosts_as_machines_that_may_and_could_take_it() -> None:
    n = 4
    workload = TaskSet(
        limit=np.array([(0.5, 0.5), (0.5, 0.5), (1.5, 0.5), (3.0, 0.5)]),
        production=np.zeros(n, np.bool_),
        priority=np.zeros(n, np.int64),
        constraint_set=np.array([0, 1, 0, 0]),
        job=np.arange(n),
        most=np.zeros(n, np.int64),
        soft=np.zeros(n, np.bool_),
        picky=np.zeros(n, np.bool_),
    )
    machines = MachineSet(np.array([(1.0, 1.0), (2.0, 1.0), (0.1, 9.0)]), np.array([[True] * 3, [False, True, True]]))
    assert hosts_of(workload, machines).tolist() == [2, 1, 1, 0]
    assert hosts_of(replace(workload, constraint_set=np.ones(n, np.int64)), machines).tolist() == [1, 1, 1, 0]
