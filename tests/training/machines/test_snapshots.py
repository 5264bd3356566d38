"""Tests of machines laid out by time: which of their peaks are known, and what of several windows in a slot counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, Windows, concatenate, demand, empty_windows
from reclaim.training.machines.samples import TaskSamples
from reclaim.training.machines.snapshots import Floats, Snapshots, lay_out_cell, slot_s_of

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
    at_the_end = peaks(windows_of((1, 0, 0.1), *((1, slot, 0.2) for slot in range(HOUR, 40))))
    assert at_the_end[0] == 0.2  # the hour's last moment is within it


def test_of_several_windows_in_a_slot_the_largest_counts_and_the_first_ones_limit() -> None:
    windows = windows_of(*((1, slot + part / 5, 0.9 if part == 2 else 0.1) for slot in range(20) for part in range(5)),
                         length_s=60)  # fmt: skip
    windows.limit[2::5] = 2.0
    cell = lay_out_cell(windows, 0, SLOT_US, 3_600)
    assert cell is not None
    assert cell.peak.tolist() == [0.9] * (20 - HOUR)
    assert cell.limit.tolist() == [1.0] * (20 - HOUR)


@pytest.mark.parametrize(("resource", "peak", "limit"), [(0, 0.25, 1.0), (1, 0.5, 2.0)])
def test_peaks_and_limits_are_those_of_the_resource(resource: int, peak: float, limit: float) -> None:
    windows = windows_of(*((1, slot, 0.25) for slot in range(16)))
    windows.usage[:, MEMORY_MAX], windows.limit[:, 1] = 0.5, 2.0
    cell = lay_out_cell(windows, resource, SLOT_US, 3_600)
    assert cell is not None
    assert (set(cell.peak.tolist()), set(cell.limit.tolist())) == ({peak}, {limit})


def test_a_machine_is_judged_at_times_whose_rows_all_are_and_the_others_stay_its_record() -> None:
    windows = windows_of(*((1, slot, slot / 100) for slot in range(30)), *((2, slot, 0.2) for slot in range(30)))
    judged = (windows.start_us >= 4 * SLOT_US) & (windows.start_us < 10 * SLOT_US)
    judged[windows.task_starts()[1] + 6] = False  # one of the two rows of slot 6
    cell, whole = (lay_out_cell(windows, 0, SLOT_US, 3_600, judged=of) for of in (judged, None))
    assert cell is not None
    assert whole is not None
    assert (cell.start_us // SLOT_US).tolist() == [4, 5, 7, 8, 9]
    assert cell.peak.tolist() == [whole.peak[slot] for slot in (4, 5, 7, 8, 9)]
    assert cell.peak[0] == pytest.approx(0.16 + 0.2)  # of slot 16, which is not judged


def test_machines_laid_out_together_are_those_laid_out_alone_and_rows_of_which_something_is_unknown_are_left_out() -> (
    None
):
    alone = [windows_of(*((task, slot, task / 10) for slot in range(16 + task))) for task in range(1, 7)]
    for k, windows in enumerate(alone):
        windows.machine_id[:] = 10 - k
    alone[3].machine_id[:], alone[4].usage[:], alone[5].limit[:] = UNKNOWN_ID, np.nan, np.nan
    short = windows_of((8, 0, 0.1))  # of a machine of which no peak is known
    short.machine_id[:] = 99
    cell = lay_out_cell(concatenate([*alone, short]), 0, SLOT_US, 3_600)
    assert cell is not None
    assert cell.n_machines == 3
    offsets = np.cumsum([0, *map(len, alone)])
    for machine, k in enumerate((2, 1, 0)):  # by their ids
        mine = lay_out_cell(alone[k], 0, SLOT_US, 3_600)
        assert mine is not None
        here = cell.machine == machine
        assert cell.peak[here].tolist() == mine.peak.tolist() == [(k + 1) / 10] * (5 + k)
        assert cell.start_us[here].tolist() == mine.start_us.tolist()
        assert cell.rows[here[cell.snapshot]].tolist() == (mine.rows + offsets[k]).tolist()


def test_values_of_rows_add_up_at_each_time_column_by_column() -> None:
    cell = lay_out_cell(windows_of(*((task, slot, 0.1) for task in (1, 2) for slot in range(16))), 0, SLOT_US, 3_600)
    assert cell is not None
    values = np.stack([cell.rows, np.ones(len(cell.rows)), 10.0 * cell.rows], axis=1)
    both = np.arange(4) * 2 + 16.0  # rows k of one task and 16 + k of the other
    np.testing.assert_array_equal(cell.total(values), np.stack([both, np.full(4, 2.0), 10 * both], axis=1))
    np.testing.assert_array_equal(cell.total(values[:, 0]), both)


def test_a_slot_is_five_minutes_or_the_usual_window_where_that_is_longer() -> None:
    for length_s, slot_s in ((60, 300), (300, 300), (3_600, 3_600)):
        assert slot_s_of(windows_of((1, 0, 0.1), (1, 20, 0.1), length_s=length_s)) == slot_s
    assert slot_s_of(empty_windows()) == 300
    lengths_s = [windows_of((1, k, 0.1), length_s=length_s) for k, length_s in enumerate((60, 600, 86_400))]
    assert slot_s_of(concatenate(lengths_s)) == 600  # a single long one is not the usual one


def test_what_a_predictor_foresees_is_kept_of_the_times_that_are_judged() -> None:
    windows = windows_of(*((1, slot, slot / 100) for slot in range(30)), *((2, slot, 0.2) for slot in range(30)))
    judged = (windows.start_us >= 4 * SLOT_US) & (windows.start_us < 7 * SLOT_US)
    asked = []

    def foresee(samples: TaskSamples) -> dict[str, Floats]:
        asked.append(len(samples.times_us))
        return {"now": samples.total(samples.usage), "tasks": samples.total(np.ones(len(samples.task)))}

    cell = lay_out_cell(windows, 0, SLOT_US, 3_600, judged=judged, foresee=foresee)
    assert cell is not None
    assert asked == [30]  # once, of all times
    assert cell.foreseen["now"].tolist() == pytest.approx([0.24, 0.25, 0.26])
    assert cell.foreseen["tasks"].tolist() == [2.0] * 3


@st.composite
def moving_tasks(draw: st.DrawFn) -> Windows:
    """Draw tasks that move between machines, with gaps, overlaps, other lengths, and unknown or changed limits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length = int(rng.choice([60, 300, 900]))
    lengths = rng.integers(5, 40, int(rng.integers(2, 7)))
    windows = empty_windows(int(lengths.sum()))
    windows.collection_id[:] = np.repeat(np.arange(len(lengths)), lengths)
    for rows in np.split(np.arange(len(windows)), np.cumsum(lengths)[:-1]):
        steps = rng.choice([0.5, 1.0, 1.0, 1.0, 1.0, 2.0, 5.0], len(rows)) * length
        windows.start_us[rows] = (rng.integers(0, 12) * length + rng.choice([0, 17]) + np.cumsum(steps)) * S
        changed = np.cumsum(rng.random((2, len(rows))) < 0.1, axis=1)
        windows.machine_id[rows] = rng.integers(-1, 3, len(rows))[changed[0]]
        windows.limit[rows, 0] = rng.choice([0.0, 0.5, 1.0, 1.0, np.nan], len(rows))[changed[1]]
    windows.end_us[:] = windows.start_us + (rng.choice([0.3, 1.0, 1.0, 2.0], len(windows)) * length * S).astype(int)
    windows.usage[:, CPU_MEAN] = rng.choice([0.0, 0.1, 0.4, 1.3, np.nan], len(windows))
    return windows


@settings(max_examples=60, deadline=None)
@given(moving_tasks(), st.sampled_from([300, 900, 3_600]), st.integers(0, 2**32 - 1))
def test_machines_laid_out_are_those_of_a_plain_look_at_every_window(
    windows: Windows, horizon_s: int, seed: int
) -> None:
    slot_us, used = slot_s_of(windows) * S, demand(windows)[:, 0]
    judged = np.random.default_rng(seed).random(len(windows)) < 0.97
    there: dict[int, dict[int, dict[int, list[int]]]] = {}  # rows by machine, slot and task
    for i, (machine, start_us, task) in enumerate(
        zip(windows.machine_id.tolist(), windows.start_us.tolist(), windows.collection_id.tolist(), strict=True)
    ):
        if machine != UNKNOWN_ID and np.isfinite(used[i]) and np.isfinite(windows.limit[i, 0]):
            there.setdefault(machine, {}).setdefault(start_us // slot_us, {}).setdefault(task, []).append(i)
    expected, rows_there = [], []
    for _, slots in sorted(there.items()):
        for now, tasks in sorted(slots.items()):
            until_us = now * slot_us + horizon_s * S
            within = [slot for slot in slots if now < slot and slot * slot_us <= until_us]
            if not within or not any(until_us <= slot * slot_us <= until_us + slot_us for slot in slots):
                continue
            limit = {task: windows.limit[rows[0], 0] for task, rows in tasks.items()}
            peak = max(
                sum(min(used[slots[slot][task]].max(), limit[task]) for task in tasks if task in slots[slot])
                for slot in within
            )
            if all(judged[rows[0]] for rows in tasks.values()):
                expected.append((now * slot_us, pytest.approx(peak), pytest.approx(sum(limit.values()))))
                rows_there.append([tasks[task][0] for task in sorted(tasks)])
    found = lay_out_cell(windows, 0, slot_us, horizon_s, judged=judged)
    of = () if found is None else (found.start_us.tolist(), found.peak.tolist(), found.limit.tolist())
    assert list(zip(*of, strict=True)) == expected
    if found is not None:  # rows stand by machine and time
        assert found.rows.tolist() == [row for rows in rows_there for row in rows]
        assert found.snapshot.tolist() == [k for k, rows in enumerate(rows_there) for _ in rows]
