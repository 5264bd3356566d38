"""Histories made by hand and by chance for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from reclaim.data.windows import CHANNELS, Windows, empty_windows, sort_windows

S = 1_000_000


def _history(
    cpu: list[float], memory: list[float] | None = None, *, start_s: int = 600, limit: float = 1.0, task: int = 1
) -> Windows:
    """Return the 5-minute windows of one task; what is not given is unknown."""
    windows = empty_windows(len(cpu))
    windows.collection_id[:] = task
    windows.start_us[:] = (start_s + 300 * np.arange(len(cpu))) * S
    windows.end_us[:] = windows.start_us + 300 * S
    windows.limit[:] = limit
    windows.usage[:, CHANNELS.index("cpu_mean")] = cpu
    windows.usage[:, CHANNELS.index("memory_mean")] = cpu if memory is None else memory
    return windows


def _random(seed: int, n_tasks: int = 4, longest: int = 90) -> Windows:
    """Return tasks with gaps, short windows, changed limits, restarts, missing values, repeated, overlapping rows."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, longest, n_tasks).sum())
    windows = empty_windows(n)
    windows.collection_id[:] = np.sort(rng.integers(0, n_tasks, n))
    step = rng.choice([0, 1, 1, 1, 1, 1, 2, 13, 300], n) * 300 + rng.choice([0, 0, 0, 7], n)
    for task in np.unique(windows.collection_id):
        rows = np.flatnonzero(windows.collection_id == task)
        windows.start_us[rows] = (600 + rng.integers(0, 7200) + np.cumsum(step[rows])) * S
    windows.end_us[:] = windows.start_us + rng.choice([300, 300, 300, 41], n) * S
    windows.usage[:] = rng.gamma(0.6, 0.4, windows.usage.shape)
    windows.usage[rng.random(windows.usage.shape) < 0.1] = np.nan
    windows.limit[:] = rng.choice([0.5, 1.0, 1.0, np.nan], (n, 2))
    windows.scheduled_us[:] = np.where(rng.random(n) < 0.5, -1, windows.start_us // 2)
    windows.tier[:] = rng.integers(-1, 5, n)
    windows.scheduling_class[:] = rng.integers(-1, 4, n)
    windows.in_alloc[:] = rng.random(n) < 0.2
    return sort_windows(windows)


@pytest.fixture(scope="session")
def history() -> Callable[..., Windows]:
    """Return a maker of one task's history."""
    return _history


@pytest.fixture(scope="session")
def random_histories() -> Callable[..., Windows]:
    """Return a maker of awkward histories by seed."""
    return _random
