"""Targets: what each horizon holds, what the end of a task and of the trace leave unknown, and the OOM label."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.oom import OOM_SHARE, oom_columns, oom_definition, oom_events, recorded_failures
from reclaim.data.windows import CHANNELS, LEVELS, Windows, concatenate, demand, peak_cpu
from reclaim.features.registry import LARGEST
from reclaim.features.targets import HORIZONS_S, TARGETS, measured_by, targets

History = Callable[..., Windows]
S = 1_000_000
CPU, MEMORY, PEAK = (TARGETS.index(name) for name in ("cpu", "memory", "peak_cpu"))
FIVE_MINUTES, HOUR, DAY = range(len(HORIZONS_S))
NEVER = 10**15
NONE = np.zeros(0, np.int64)


class Targets(NamedTuple):
    """Arrays that ``targets`` has written."""

    value: NDArray[np.float32]
    oom: NDArray[np.float32]


def of(windows: Windows, trace_end_us: int = NEVER, at: NDArray[np.int64] = NONE) -> Targets:
    """Return the targets of every row; the events are the first task's."""
    out = Targets(
        np.full((len(windows), len(TARGETS), len(HORIZONS_S)), np.inf, np.float32),  # what is never written would show
        np.full((len(windows), len(HORIZONS_S)), np.inf, np.float32),
    )
    targets(windows, np.zeros(len(at), np.int64), at, trace_end_us, *out)
    return out


def fail(time_s: float, task: int = 1, how: int = s.EventType.FAIL) -> pa.Table:
    row = {s.COLLECTION_ID: task, s.INSTANCE_INDEX: 0, s.TIME_US: int(time_s * S), s.EVENT_TYPE: how}
    return pa.Table.from_pylist([row], schema=s.EVENTS)


def test_a_horizon_holds_the_windows_that_begin_in_it_and_never_the_present_one(history: History) -> None:
    y = of(history([0.9, 0.1, 0.3, 0.2] + [0.05] * 20 + [0.7])).value[:, CPU]
    assert y[0].tolist() == pytest.approx([0.1, 0.3, 0.7])
    assert y[1].tolist() == pytest.approx([0.3, 0.3, 0.7])
    assert y[11, HOUR] == pytest.approx(0.05)
    assert y[12, HOUR] == pytest.approx(0.7)  # twelve windows of five minutes are the hour


def test_the_end_of_the_trace_leaves_the_target_unknown_and_the_end_of_the_task_does_not(history: History) -> None:
    windows = history([0.1, 0.2, 0.3])
    last_us = int(windows.end_us[-1])
    running = of(windows, trace_end_us=last_us).value[:, CPU]
    assert running[0, FIVE_MINUTES] == pytest.approx(0.2)
    assert np.isnan(running[:, HOUR]).all()
    ended = of(windows, trace_end_us=last_us + 3600 * S).value[:, CPU]
    assert ended[0].tolist() == pytest.approx([0.2, 0.3, 0.3])
    assert np.isnan(ended[2]).all()  # nothing was left to cover


def test_whether_a_task_runs_out_of_memory_is_unknown_where_the_trace_ends_first_and_nothing_came_before(
    history: History,
) -> None:
    windows = history([0.1, 0.2, 0.3])
    last_us = int(windows.end_us[-1])
    running = of(windows, trace_end_us=last_us).oom
    assert running[:2, FIVE_MINUTES].tolist() == [0.0, 0.0]  # that of the second ends as the trace does
    assert np.isnan(running[2]).all()
    assert np.isnan(running[:, HOUR:]).all()
    failed = of(windows, trace_end_us=last_us, at=windows.end_us[1:2]).oom
    assert failed[0, HOUR] == 1.0
    assert np.isnan(failed[1:, HOUR]).all()
    assert (of(windows, trace_end_us=last_us + 3600 * S).oom == 0.0).all()  # it ended otherwise


def test_a_task_is_taken_to_run_on_that_was_last_seen_ten_minutes_before_the_end_of_the_trace(history: History) -> None:
    windows = history([0.1, 0.2])
    for after_s, known in ((600, False), (601, True)):
        found = of(windows, trace_end_us=int(windows.end_us[-1]) + after_s * S)
        assert np.isfinite(found.value[0, CPU, HOUR]) == known
        assert np.isfinite(found.oom[0, HOUR]) == known
        assert np.isfinite(found.value[0, CPU, FIVE_MINUTES])


def test_a_measurement_far_beyond_the_limit_is_cut_off(history: History) -> None:
    windows = history([0.1, 1e30], limit=1e-3)
    assert of(windows).value[0, [MEMORY, PEAK], HOUR].max() == LARGEST


def test_a_task_whose_last_window_lies_in_a_longer_one_has_not_ended(history: History) -> None:
    windows = history([0.1, 0.2])
    windows.end_us[0] = windows.start_us[0] + 7200 * S
    assert np.isnan(of(windows, trace_end_us=int(windows.end_us[0])).value[:, CPU]).all()


def test_targets_are_over_the_limit_at_t_not_over_the_later_one(history: History) -> None:
    windows = history([0.4, 0.4, 0.4])
    windows.limit[1:] = 2.0
    y = of(windows).value[:, MEMORY, HOUR]
    assert y[:2].tolist() == pytest.approx([0.4, 0.2])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), censored=st.booleans())
def test_the_sliding_maximum_agrees_with_looking_at_every_pair(
    seed: int, censored: bool, random_histories: History
) -> None:
    windows = random_histories(seed, longest=25)
    end_us = int(windows.end_us.max()) if censored else NEVER
    got, task = of(windows, end_us).value, windows.task_numbers()
    need = np.column_stack([demand(windows), peak_cpu(windows)])
    rows = np.arange(len(windows))
    for i in rows:
        mine = task == task[i]
        now_us = windows.end_us[mine & (rows <= i)].max()
        ended = windows.end_us[mine].max() < end_us - 600 * S
        for h, horizon_s in enumerate(HORIZONS_S):
            until_us = now_us + horizon_s * S
            later = mine & (rows > i) & (windows.start_us < until_us)
            for j in range(len(TARGETS)):
                seen = need[later & ~np.isnan(need[:, j]), j]
                limit = windows.limit[i, 1 if j == MEMORY else 0]
                known = len(seen) and limit > 0 and (ended or until_us <= end_us)
                want = seen.max() / limit if known else np.nan
                assert got[i, j, h] == pytest.approx(want, rel=1e-6, nan_ok=True)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_target_is_measured_by_the_end_of_its_horizon_or_of_the_last_window_that_begins_in_it(
    seed: int, random_histories: History
) -> None:
    windows = random_histories(seed, longest=25)
    windows.end_us[::7] += 50_000 * S
    got, task = measured_by(windows), windows.task_numbers()
    rows = np.arange(len(windows))
    for i in rows:
        mine = task == task[i]
        now_us = windows.end_us[mine & (rows <= i)].max()
        for h, horizon_s in enumerate(HORIZONS_S):
            until_us = now_us + horizon_s * S
            ends_us = windows.end_us[mine & (windows.start_us < until_us)]
            assert got[i, h] == max(until_us, ends_us.max())


def test_the_demand_for_cpu_is_the_90th_percentile_up_to_the_limit_and_the_peak_is_not_capped(history: History) -> None:
    windows = history([0.1] * 3, limit=0.5)
    windows.percentiles[1, LEVELS.index(90)] = 0.3
    windows.percentiles[2, LEVELS.index(90)] = 0.9
    windows.usage[1:, CHANNELS.index("cpu_max")] = 2.0
    y = of(windows).value[0]
    assert y[CPU].tolist() == pytest.approx([0.6, 1.0, 1.0])
    assert y[PEAK].tolist() == pytest.approx([4.0] * 3)


def test_what_is_still_to_come_of_a_task_without_a_limit_has_no_target(history: History) -> None:
    windows = history([0.1] * 3)
    windows.limit[0] = 0.0
    windows.limit[1] = np.nan
    assert np.isnan(of(windows).value[:2]).all()
    assert of(windows).oom[:2].tolist() == [[0.0] * len(HORIZONS_S)] * 2  # whether it fails is known all the same


def test_oom_is_a_failure_with_memory_at_the_limit_and_no_other_failure(history: History) -> None:
    for memory, expected in ((OOM_SHARE, 1), (OOM_SHARE - 0.01, 0)):
        windows = history([0.1] * 3, [0.2, 0.3, memory])
        task, _ = oom_events(windows, fail(1500))
        assert len(task) == expected
    assert len(oom_events(history([0.1] * 3, [0.2, 0.3, 1.0]), fail(1500, task=2))[0]) == 0
    assert len(oom_events(history([0.1] * 3, [0.2, 0.3, 1.0]), fail(90_000))[0]) == 0  # long after the last window
    missing = history([0.1] * 3, [0.2, 0.3, 1.0])
    missing.usage[:, CHANNELS.index("memory_mean")] = np.nan
    assert len(oom_events(missing, fail(1500))[0]) == 0


def test_memory_at_a_failure_is_the_largest_of_the_last_window_that_began_before_it_up_to_ten_minutes_old(
    history: History,
) -> None:
    def ends(windows: Windows, *times_us: int) -> list[int]:
        """Return which of some failures are out of memory."""
        failures = pa.concat_tables([fail(time_us / S) for time_us in times_us])
        return [time_us - windows.start_us[0].item() for time_us in oom_events(windows, failures)[1].tolist()]

    windows = history([0.1] * 3, [0.1, 0.5, 0.1])
    windows.limit[:] = 9.0, 0.5  # of CPU, and of memory
    first, second, third = windows.start_us.tolist()
    assert ends(windows, second, second + 1, third, third + 1) == [second + 1 - first, third - first]
    mean, most = (windows.usage[:, CHANNELS.index(name)] for name in ("memory_mean", "memory_max"))
    last_us = windows.end_us[-1].item()
    for mean[2], most[2], expected in ((0.1, 0.5, 1), (0.5, 0.1, 0), (0.5, np.nan, 1), (0.1, np.nan, 0)):
        assert len(ends(windows, last_us)) == expected
    most[2] = 0.5
    assert len(ends(windows, last_us + 600 * S)) == 1
    assert len(ends(windows, last_us + 600 * S + 1)) == 0


def test_a_record_of_an_oom_is_taken_at_its_word(history: History) -> None:
    windows = history([0.1] * 3, [0.2, 0.3, 0.5])  # half of the limit when last seen: a derived label says no
    for recorded, expected in ((True, 1), (False, 0), (None, 0)):
        said = fail(1500).append_column(s.OUT_OF_MEMORY, pa.array([recorded], pa.bool_()))
        assert len(oom_events(windows, said)[0]) == expected
    full = history([0.1] * 3, [0.2, 0.3, 1.0])
    silent = fail(1500).append_column(s.OUT_OF_MEMORY, pa.array([None], pa.bool_()))
    assert len(oom_events(full, silent)[0]) == 1  # then it is derived, as where no history says
    denied = fail(1500).append_column(s.OUT_OF_MEMORY, pa.array([False]))
    assert len(oom_events(full, denied)[0]) == 0
    manifest = {"extras": {"events": [s.OUT_OF_MEMORY]}}
    assert "recorded" in oom_definition(manifest)
    assert "derived" in oom_definition({"extras": {}})
    assert oom_columns(manifest) == [*oom_columns({}), s.OUT_OF_MEMORY]


def test_windows_know_the_last_recorded_failure_of_their_own_task_by_their_end(history: History) -> None:
    one, two, three = (history([0.1] * 3, [0.2] * 3, task=task, start_s=600) for task in (1, 2, 3))
    windows = concatenate([one, two, three])  # they end at 900, 1200 and 1500 s
    said = [(1, 900, True), (1, 1_201, False), (1, 1_400, None), (3, 901, False), (3, 901, True), (3, 5_000, False),
            (4, 700, True)]  # fmt: skip
    events = pa.concat_tables(
        [fail(at_s, task=task).append_column(s.OUT_OF_MEMORY, pa.array([oom], pa.bool_())) for task, at_s, oom in said]
    )
    failed_us, failed_oom = recorded_failures(windows, events)
    known = [
        None if us < 0 else (us // S, oom) for us, oom in zip(failed_us.tolist(), failed_oom.tolist(), strict=True)
    ]
    assert known == [
        (900, True), (900, True), (1_201, False), None, None, None, None, (901, True), (901, True),
    ]  # fmt: skip
    assert recorded_failures(windows, events.slice(0, 0))[0].tolist() == [-1] * 9


def test_the_last_window_of_a_failure_is_looked_up_within_its_own_task(history: History) -> None:
    full = history([0.1] * 3, [1.0] * 3, task=1)
    other = history([0.1] * 3, [0.1] * 3, task=2, start_s=3000)
    both = concatenate([full, other])
    assert len(oom_events(both, fail(2000, task=2))[0]) == 0  # before task 2 was seen; the row before is task 1's


def test_the_share_and_the_ends_that_make_an_oom_are_the_callers_to_set(history: History) -> None:
    windows = history([0.1] * 3, [0.2, 0.3, 0.9])
    assert len(oom_events(windows, fail(1500))[0]) == 0
    assert len(oom_events(windows, fail(1500), share=0.9)[0]) == 1
    evicted = fail(1500, how=s.EventType.EVICT)
    assert len(oom_events(windows, evicted, share=0.9)[0]) == 0
    assert len(oom_events(windows, evicted, share=0.9, ends=(s.EventType.EVICT,))[0]) == 1
    either = (s.EventType.EVICT, s.EventType.FAIL)
    task, time_us = oom_events(windows, pa.concat_tables([fail(1500), evicted]), share=0.9, ends=either)
    assert (task.tolist(), time_us.tolist()) == ([0, 0], [1500 * S] * 2)


def test_events_come_sorted_by_task_then_time_and_those_outside_the_trace_or_of_no_task_are_left_out(
    history: History,
) -> None:
    windows = concatenate([history([0.1] * 3, [1.0] * 3, task=task) for task in (1, 2)])
    times = [(1500, 2), (1300, 1), (1200, 2), (1500, 7)]
    events = [fail(time_s, task) for time_s, task in times]
    when = s.EVENTS.get_field_index(s.TIME_US)
    for flag in (s.BEFORE_TRACE_US, s.AFTER_TRACE_US):
        events.append(fail(0).set_column(when, s.EVENTS.field(when), pa.array([flag], pa.int64())))
    task, time_us = oom_events(windows, pa.concat_tables(events))
    assert list(zip(task.tolist(), (time_us // S).tolist(), strict=True)) == [(0, 1300), (1, 1200), (1, 1500)]


def test_a_failure_is_of_its_own_task_alone_and_later_ones_count_after_it(history: History) -> None:
    windows = concatenate([history([0.1] * 30, task=task) for task in (1, 2)])
    oom = of(windows, at=windows.end_us[[5, 20]]).oom[:, FIVE_MINUTES]
    assert np.flatnonzero(oom).tolist() == [4, 19]


def test_the_label_looks_ahead_by_the_horizon_and_a_failure_at_t_is_past(history: History) -> None:
    windows = history([0.1] * 30)
    oom = of(windows, trace_end_us=NEVER, at=np.array([windows.end_us[13]])).oom
    assert oom[:, FIVE_MINUTES].tolist() == [0.0] * 12 + [1.0] + [0.0] * 17
    assert oom[:, HOUR].tolist() == [1.0 if 1 <= i <= 12 else 0.0 for i in range(30)]
    assert oom[0, DAY] == 1.0
