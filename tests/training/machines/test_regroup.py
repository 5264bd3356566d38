"""Tests that regrouped machines hold the same tasks, each half its own, and come to the peaks of what they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import CPU_MEAN, Windows, demand, empty_windows
from reclaim.training.machines.regroup import SIZES, regroup
from reclaim.training.machines.snapshots import Snapshots, lay_out_cell

SLOT_US, HORIZON_S = 300_000_000, 3_600
TASKS, TIMES, MACHINES = 12, 30, 4


@pytest.fixture(scope="module")
def windows() -> Windows:
    """Return the windows of twelve tasks on four machines, one of which moves."""
    rng = np.random.default_rng(5)
    task, slot = np.repeat(np.arange(TASKS), TIMES), np.tile(np.arange(TIMES), TASKS)
    machine = task % MACHINES
    machine[(task == 0) & (slot >= 10)] = 3
    windows = empty_windows(TASKS * TIMES)
    windows.collection_id[:], windows.machine_id[:] = task, machine
    windows.start_us[:], windows.end_us[:] = slot * SLOT_US, (slot + 1) * SLOT_US
    windows.usage[:, CPU_MEAN], windows.limit[:] = rng.uniform(0.1, 0.9, len(task)), 1.0
    return windows


def found(windows: Windows, most: int = 10**9) -> tuple[Snapshots, list[tuple[Snapshots, NDArray[np.int64]]]]:
    at = lay_out_cell(windows, 0, SLOT_US, HORIZON_S)
    assert at is not None
    return at, list(regroup(windows, at, SLOT_US, HORIZON_S, most))


def test_every_task_is_on_one_drawn_machine_for_life_and_halves_stay_apart(windows: Windows) -> None:
    _, others = found(windows)
    assert len(others) == len(SIZES)
    for at, machine in others:
        of_task: dict[int, set[int]] = {}
        for row, snapshot in zip(at.rows.tolist(), at.snapshot.tolist(), strict=True):
            of_task.setdefault(int(windows.collection_id[row]), set()).add(int(machine[snapshot]))
        assert set(of_task) == set(range(TASKS))
        for task, on in of_task.items():
            (number,) = on
            assert number % 2 == task % 2  # of machines 0 to 3; the one that moved counts to its first


def test_tasks_are_drawn_to_as_many_machines_twice_and_to_half_and_to_twice_as_many(windows: Windows) -> None:
    _, others = found(windows)
    drawn = [set(machine.tolist()) for _, machine in others]
    assert [on <= set(range(n)) for on, n in zip(drawn, (4, 4, 2, 8), strict=True)] == [True] * 4
    assert drawn[2] == {0, 1}
    assert max(drawn[3]) > 3  # of twelve tasks all would be on half of the eight one time in 4,096


def test_a_task_that_was_on_no_machine_is_put_on_none(windows: Windows) -> None:
    somewhere = windows.collection_id != 5
    _, others = found(replace(windows, machine_id=np.where(somewhere, windows.machine_id, UNKNOWN_ID)))
    for at, _ in others:
        assert set(windows.collection_id[at.rows].tolist()) == set(range(TASKS)) - {5}


def test_nothing_is_lost_and_peaks_are_those_of_the_tasks_together(windows: Windows) -> None:
    own, others = found(windows)
    usage = demand(windows)[:, 0].reshape(TASKS, TIMES)
    for at, machine in others:
        assert at.limit.sum() == own.limit.sum()
        for k in range(len(at)):
            tasks = windows.collection_id[at.rows[at.snapshot == k]]
            slot = int(at.start_us[k] // SLOT_US)
            assert at.peak[k] == pytest.approx(usage[tasks, slot + 1 : slot + 13].sum(axis=0).max())
            assert len({*machine[at.snapshot[at.snapshot == k]].tolist()}) == 1


def test_of_more_snapshots_than_are_wanted_every_few_slots_are_left_out_and_the_draw_is_the_same(
    windows: Windows,
) -> None:
    own, others = found(windows)
    _, fewer = found(windows, most=round(len(own) * sum(SIZES) / 3))
    for (at, _), (some, _) in zip(others, fewer, strict=True):
        slots = at.start_us // SLOT_US % 3 == 0
        np.testing.assert_array_equal(some.peak, at.peak[slots])


def test_two_regroupings_on_as_many_machines_are_drawn_apart(windows: Windows) -> None:
    assert SIZES[:2] == (1.0, 1.0)
    _, others = found(windows)
    on = [np.empty(TASKS, np.int64) for _ in others]
    for of_task, (at, machine) in zip(on, others, strict=True):
        of_task[windows.collection_id[at.rows]] = machine[at.snapshot]
    assert (on[0] != on[1]).any()
