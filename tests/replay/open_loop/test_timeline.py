"""The cell over time, and would-be out-of-memory events by hand."""

from collections.abc import Callable

import numpy as np
import pytest

from reclaim.data import schema
from reclaim.data.windows import Windows
from reclaim.replay.open_loop.timeline import (
    cell_capacity,
    cell_sums,
    lay_out,
    oom_events,
    rebin,
    tasks_over,
)

Maker = Callable[..., Windows]


def test_out_of_memory_is_where_a_machines_tasks_use_more_than_all_their_reservations(make_windows: Maker) -> None:
    # machine 7: tasks a and b; machine 9: task c; three slots
    windows = make_windows([(0, 0.3)] * 3, [(0, 0.4)] * 3, [(0, 0.5)] * 3, machines=[7, 7, 9])
    used = np.array([0.3, 0.6, 0.6, 0.4, 0.4, 0.4, 0.5, 0.5, 0.5])
    reserved = np.array([0.4, 0.4, 0.4, 0.5, 0.7, 0.5, 0.6, 0.6, 0.4])
    # slot 0: 0.7 of 0.9 on machine 7; slot 1: 1.0 of 1.1, though a alone is over; slot 2: 1.0 of 0.9, and c 0.5 of 0.4
    slots = lay_out(windows)
    assert (slots.count, slots.n_machines) == (3, 2)
    assert oom_events(used, reserved, slots).tolist() == [0, 0, 2]
    assert tasks_over(used, reserved, slots).tolist() == [0, 1, 2]
    assert len(slots.occupied[1]) == 6


def test_sums_of_reservations_are_held_to_the_tolerance_of_a_violation(make_windows: Maker) -> None:
    windows = make_windows([(0, 0)] * 3, [(0, 0)] * 3, machines=[7, 7])
    used = np.array([0.1, 0.2, 0.3] * 2)
    reserved = used / (1 + np.array([1e-8, 1e-7, 1e-5] * 2))  # below 1e-6, below it, above it
    assert oom_events(used, reserved, lay_out(windows)).tolist() == [0, 0, 1]
    assert tasks_over(used, reserved, lay_out(windows)).tolist() == [0, 0, 2]


def test_a_task_whose_machine_is_unknown_is_judged_alone(make_windows: Maker) -> None:
    windows = make_windows([(0, 0)] * 2, [(0, 0)] * 2, [(0, 0)] * 2, machines=[-1, -1, 7])
    used, reserved = np.array([0.6, 0.6, 0.1, 0.1, 0.5, 0.5]), np.full(6, 0.5)
    slots = lay_out(windows)
    assert (slots.n_machines, slots.place.tolist()) == (1, [1, 1, 2, 2, 0, 0])
    assert oom_events(used, reserved, slots).tolist() == [1, 1]


def test_slots_in_which_nothing_runs_at_a_place_take_no_memory(make_windows: Maker) -> None:
    windows = make_windows(*[[(0, 0)]] * 2_000, machines=[-1] * 2_000, first_slots=[0] * 1_999 + [10**7])
    slots = lay_out(windows)  # 20 billion pairs of a place and a slot
    events = oom_events(np.full(2_000, 0.6), np.full(2_000, 0.5), slots)
    assert (len(events), events[0], events[-1], events.sum()) == (10**7 + 1, 1_999, 1, 2_000)
    assert len(slots.occupied[1]) == 2_000


def test_a_window_counts_for_the_share_of_the_slot_that_it_covers(make_windows: Maker) -> None:
    # in the first slot task a runs a fifth of the time: 0.2 x 2.0 + 0.5 = 0.9 used of 0.2 x 1.0 + 0.8 = 1.0 reserved
    windows = make_windows([(0, 0)], [(0, 0)] * 2, machines=[7, 7])
    windows.end_us[0] = windows.start_us[0] + 60_000_000
    slots = lay_out(windows)
    assert slots.weight.tolist() == pytest.approx([0.2, 1.0, 1.0])
    assert oom_events(np.array([2.0, 0.5, 0.5]), np.array([1.0, 0.8, 0.8]), slots).tolist() == [0, 0]
    assert oom_events(np.array([2.6, 0.5, 0.5]), np.array([1.0, 0.8, 0.8]), slots).tolist() == [1, 0]


def test_what_is_unknown_counts_on_neither_side(make_windows: Maker) -> None:
    windows = make_windows([(0, 0)] * 2, [(0, 0)] * 2, machines=[7, 7])
    used, reserved = np.array([np.nan, 0.9, 0.4, 0.4]), np.array([5.0, np.nan, 0.3, 0.5])
    assert oom_events(used, reserved, lay_out(windows)).tolist() == [1, 0]
    assert tasks_over(used, reserved, lay_out(windows)).tolist() == [1, 0]


def test_slots_are_as_long_as_the_usual_window_where_that_is_longer_than_five_minutes(make_windows: Maker) -> None:
    windows = make_windows([(0, 0)] * 4)
    windows.start_us[:] = windows.start_us[0] + np.arange(4) * 3_600_000_000
    windows.end_us[:] = windows.start_us + 3_600_000_000
    slots = lay_out(windows)
    assert (slots.slot_s, slots.count, slots.hours.tolist()) == (3600, 4, [0.0, 1.0, 2.0, 3.0])


def test_the_cell_is_summed_slot_by_slot(make_windows: Maker) -> None:
    windows = make_windows([(0, 0)] * 2, [(0, 0)], first_slots=[0, 1])
    values = np.array([[1.0, 10.0], [2.0, np.nan], [4.0, 40.0]])
    assert cell_sums(values, lay_out(windows)).tolist() == [[1.0, 10.0], [6.0, 40.0]]


def test_bins_are_means_and_the_last_may_be_shorter() -> None:
    assert rebin(np.array([[1.0], [3.0], [5.0], [7.0], [10.0]]), 2).tolist() == [[2.0], [6.0], [10.0]]
    assert rebin(np.array([[1.0], [3.0]]), 1).tolist() == [[1.0], [3.0]]


def machine_changes(*changes: tuple[int, int, int, float, float]) -> dict[str, np.ndarray]:
    names = (schema.TIME_US, schema.MACHINE_ID, schema.EVENT_TYPE, schema.CPU_CAPACITY, schema.MEMORY_CAPACITY)
    return {name: np.array([c[i] for c in changes]) for i, name in enumerate(names)}


def test_capacity_is_that_of_the_machines_in_service() -> None:
    kinds = schema.MachineEventType
    changes = machine_changes(
        (0, 1, kinds.ADD, 1.0, 2.0),
        (50, 1, kinds.UPDATE, 1.5, 2.0),
        (0, 2, kinds.ADD, 1.0, 4.0),
        (60, 2, kinds.REMOVE, 1.0, 4.0),
        (90, 3, kinds.ADD, 8.0, 8.0),
    )
    for until, expected in ((10, [2.0, 6.0]), (55, [2.5, 6.0]), (70, [1.5, 2.0]), (90, [9.5, 10.0])):
        capacity = cell_capacity(changes, until)
        assert capacity is not None
        assert capacity.tolist() == expected


def test_a_change_without_a_capacity_leaves_it_as_it_was() -> None:
    kinds = schema.MachineEventType
    changes = machine_changes(
        (0, 1, kinds.ADD, 1.0, 2.0),
        (0, 2, kinds.ADD, 1.0, 4.0),
        (50, 1, kinds.HARD_ERROR, np.nan, np.nan),
        (60, 2, kinds.UPDATE, 1.5, np.nan),
    )
    capacity = cell_capacity(changes, 90)
    assert capacity is not None
    assert capacity.tolist() == [2.5, 6.0]


def test_without_machines_or_without_their_capacity_there_is_none() -> None:
    assert cell_capacity(machine_changes(), 10) is None
    assert cell_capacity(machine_changes((0, 1, 1, np.nan, np.nan)), 10) is None
    assert cell_capacity(machine_changes((20, 1, 1, 1.0, 1.0)), 10) is None
