"""Scores of a task on a machine, worked by hand: what was in force is held against what was used then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reclaim.data.schema import MACHINES
from reclaim.data.windows import Windows
from reclaim.features.groups import known_seconds
from reclaim.features.splits import TEST
from reclaim.replay.open_loop import scoring, timeline
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.history import History, previous_rows
from reclaim.replay.open_loop.period import lay_out_period
from reclaim.replay.open_loop.scoring import score


def test_memory_runs_out_where_a_window_uses_more_than_was_answered_to_the_window_before(
    make_windows: Callable[..., Windows],
) -> None:
    windows = make_windows([(0.1, m) for m in (0.9, 0.2, 0.6, 0.3)], machines=[7])
    history = History(
        windows=windows,
        target=np.zeros((4, 2)),
        next_target=np.zeros((4, 2)),
        period=np.full(4, TEST, np.uint8),
        group=np.zeros(4, np.uint8),
        known_s=known_seconds(windows),
        previous=previous_rows(windows),
        source_row=np.arange(4),
    )
    period = lay_out_period(history, {name: np.zeros(0) for name in MACHINES.names})
    # In force are the limit of 1, then 0.5, 0.5 and 0.4: only the third window, of 0.6, passes what it has. Its own
    # answer comes too late to count; held against their own answers, three windows would pass them.
    answers = np.array([0.5, 0.5, 0.4, 0.1])[:, None].repeat(2, axis=1)
    found = score(answers, period, Bootstrap(draws=10, seed=1, confidence=0.9))["oom"]
    assert found == {"events": 1, "rate": 1 / 4, "tasks_over": 1, "tasks_over_rate": 1 / 4}


def test_a_window_of_unknown_memory_counts_in_no_rate_of_tasks(make_windows: Callable[..., Windows]) -> None:
    used, reserved = np.array([0.9, np.nan, 0.6, 0.3]), np.array([1.0, 0.5, 0.5, np.nan])
    slots = timeline.lay_out(make_windows([(0.1, m) for m in used], machines=[7]))
    assert scoring._memory_events(used, reserved, slots)["tasks_over_rate"] == 1 / 2
