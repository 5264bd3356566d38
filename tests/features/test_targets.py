"""Targets: what each horizon holds, what the end of a task and of the trace leave unknown, and the OOM label."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.windows import CHANNELS, Windows, demand
from reclaim.features.targets import HORIZONS_S, OOM_SHARE, TARGETS, Targets, oom_events, targets

History = Callable[..., Windows]
S = 1_000_000
CPU, MEMORY = TARGETS.index("cpu"), TARGETS.index("memory")
FIVE_MINUTES, HOUR, DAY = range(len(HORIZONS_S))
NEVER = 10**15
NONE = np.zeros(0, np.int64)


def of(windows: Windows, trace_end_us: int = NEVER, at: NDArray[np.int64] = NONE) -> Targets:
    return targets(windows, np.zeros(len(at), np.int64), at, trace_end_us)


def fail(time_s: float, task: int = 1) -> pa.Table:
    row = {s.COLLECTION_ID: task, s.INSTANCE_INDEX: 0, s.TIME_US: int(time_s * S), s.EVENT_TYPE: s.EventType.FAIL}
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


def test_targets_are_over_the_limit_at_t_not_over_the_later_one(history: History) -> None:
    windows = history([0.4, 0.4, 0.4])
    windows.limit[1:] = 2.0
    y = of(windows).value[:, MEMORY, HOUR]
    assert y[:2].tolist() == pytest.approx([0.4, 0.2])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_sliding_maximum_agrees_with_looking_at_every_pair(seed: int, random_histories: History) -> None:
    windows = random_histories(seed, longest=40)
    got = of(windows).value  # every task has ended: nothing is censored
    need, task = demand(windows), windows.task_numbers()
    for i in range(len(windows)):
        now_us = windows.end_us[(task == task[i]) & (np.arange(len(windows)) <= i)].max()
        for h, horizon_s in enumerate(HORIZONS_S):
            later = (task == task[i]) & (np.arange(len(windows)) > i)
            later &= windows.start_us < now_us + horizon_s * S
            for resource in range(2):
                seen = need[later, resource]
                seen = seen[~np.isnan(seen)]
                want = seen.max() / windows.limit[i, resource] if len(seen) else np.nan
                assert got[i, resource, h] == pytest.approx(want, rel=1e-6, nan_ok=True)


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


def test_the_last_window_of_a_failure_is_looked_up_within_its_own_task(history: History) -> None:
    full = history([0.1] * 3, [1.0] * 3, task=1)
    other = history([0.1] * 3, [0.1] * 3, task=2, start_s=3000)
    both = Windows(**{k: np.concatenate([getattr(full, k), getattr(other, k)]) for k in full.__dataclass_fields__})
    assert len(oom_events(both, fail(2000, task=2))[0]) == 0  # before task 2 was seen; the row before is task 1's


def test_the_label_looks_ahead_by_the_horizon_and_a_failure_at_t_is_past(history: History) -> None:
    windows = history([0.1] * 30)
    oom = of(windows, trace_end_us=NEVER, at=np.array([windows.end_us[13]])).oom
    assert oom[:, FIVE_MINUTES].tolist() == [0.0] * 12 + [1.0] + [0.0] * 17
    assert oom[:, HOUR].tolist() == [1.0 if 1 <= i <= 12 else 0.0 for i in range(30)]
    assert oom[0, DAY] == 1.0
