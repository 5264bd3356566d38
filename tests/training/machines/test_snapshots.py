"""Tests of machines laid out by time: which of their peaks are known, and what of several windows in a slot counts."""

from __future__ import annotations

import pytest

from reclaim.data.windows import CPU_MEAN, Windows, empty_windows
from reclaim.training.machines.snapshots import Snapshots, lay_out_cell, slot_s_of

S = 1_000_000
SLOT_US = 300 * S
HOUR = 12
"""Slots of an hour."""


def windows_of(*rows: tuple[int, float, float], length_s: int = 300) -> Windows:
    """Return windows of tasks on one machine: the task, the slot in which each begins, and its CPU of a limit of 1."""
    windows = empty_windows(len(rows))
    for i, (task, slot, cpu) in enumerate(sorted(rows)):
        windows.collection_id[i], windows.instance_index[i], windows.machine_id[i] = task, 0, 7
        windows.start_us[i] = slot * SLOT_US
        windows.usage[i, CPU_MEAN], windows.limit[i] = cpu, 1.0
    windows.end_us[:] = windows.start_us + length_s * S
    return windows


def peaks(windows: Windows) -> dict[int, float]:
    """Return the peaks within an hour that are known, by slot."""
    cell = lay_out_cell(windows, 0, SLOT_US, 3_600)
    assert isinstance(cell, Snapshots)
    return dict(zip((cell.start_us // SLOT_US).tolist(), cell.peak.tolist(), strict=True))


def test_a_machine_that_stands_empty_for_an_hour_has_no_peak_to_be_judged_by() -> None:
    # one task to slot 20, another from slot 40 on: from slot 9 on the hour does not end with a window, but for the slot
    # after it
    found = peaks(windows_of(*((1, slot, 0.1) for slot in range(21)), *((2, slot, 0.3) for slot in range(40, 60))))
    assert sorted(found) == [*range(9), *range(40, 48)]
    assert set(found.values()) == {0.1, 0.3}


def test_a_window_a_slot_after_the_hour_is_enough_where_others_lie_within() -> None:
    slots = [slot for slot in range(30) if slot != HOUR]  # there is none at the end of the hour of slot 0
    found = peaks(windows_of(*((1, slot, slot / 100) for slot in slots)))
    assert found[0] == pytest.approx((HOUR - 1) / 100)
    alone = peaks(windows_of((1, 0, 0.1), *((1, slot, 0.2) for slot in range(HOUR + 1, 40))))
    assert 0 not in alone  # nothing within the hour


def test_of_several_windows_in_a_slot_the_largest_counts_and_the_first_ones_limit() -> None:
    windows = windows_of(*((1, slot + part / 5, 0.9 if part == 2 else 0.1) for slot in range(20) for part in range(5)),
                         length_s=60)  # fmt: skip
    windows.limit[2::5] = 2.0
    cell = lay_out_cell(windows, 0, SLOT_US, 3_600)
    assert cell is not None
    assert cell.peak.tolist() == [0.9] * (20 - HOUR)
    assert cell.limit.tolist() == [1.0] * (20 - HOUR)


def test_a_slot_is_five_minutes_or_the_usual_window_where_that_is_longer() -> None:
    for length_s, slot_s in ((60, 300), (300, 300), (3_600, 3_600)):
        assert slot_s_of(windows_of((1, 0, 0.1), (1, 20, 0.1), length_s=length_s)) == slot_s
    assert slot_s_of(empty_windows()) == 300
