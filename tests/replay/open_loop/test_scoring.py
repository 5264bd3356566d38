"""Scores of a task on a machine, worked by hand: what was in force is held against what was used then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reclaim.data.windows import Windows
from reclaim.replay.open_loop import scoring, timeline
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.scoring import score
from tests.replay.histories import period_of


def test_memory_runs_out_where_a_window_uses_more_than_was_answered_to_the_window_before(
    make_windows: Callable[..., Windows],
) -> None:
    windows = make_windows([(0.1, m) for m in (0.9, 0.2, 0.6, 0.3)], machines=[7])
    # In force are the limit of 1, then 0.5, 0.5 and 0.4: only the third window, of 0.6, passes what it has. Its own
    # answer comes too late to count; held against their own answers, three windows would pass them.
    answers = np.array([0.5, 0.5, 0.4, 0.1])[:, None].repeat(2, axis=1)
    found = score(answers, period_of(windows), Bootstrap(draws=10, seed=1, confidence=0.9))["oom"]
    assert found == {"events": 1, "rate": 1 / 4, "tasks_over": 1, "tasks_over_rate": 1 / 4}


def test_a_window_of_unknown_memory_counts_in_no_rate_of_tasks(make_windows: Callable[..., Windows]) -> None:
    used, reserved = np.array([0.9, np.nan, 0.6, 0.3]), np.array([1.0, 0.5, 0.5, np.nan])
    slots = timeline.lay_out(make_windows([(0.1, m) for m in used], machines=[7]))
    assert scoring._memory_events(used, reserved, slots)["tasks_over_rate"] == 1 / 2
