"""Windows: what a reservation had to cover in each, and where its rows belong."""

from __future__ import annotations

import numpy as np

from reclaim.data.windows import (
    CPU_MAX,
    CPU_MEAN,
    CPU_P90,
    MEMORY_MAX,
    MEMORY_MEAN,
    demand,
    empty_windows,
    measured_by_mean,
    peak_cpu,
)


def test_demand_takes_the_best_that_is_known_caps_cpu_alone_and_leaves_the_unknown_unknown() -> None:
    windows = empty_windows(5)
    windows.limit[:] = 1.0
    windows.limit[3] = np.nan
    windows.usage[0, [CPU_MEAN, CPU_P90, CPU_MAX, MEMORY_MEAN, MEMORY_MAX]] = [0.2, 0.5, 3.0, 0.4, 0.6]
    windows.usage[1, [CPU_MEAN, CPU_P90, MEMORY_MAX]] = [0.2, 1.5, 2.0]
    windows.usage[2, [CPU_MEAN, MEMORY_MEAN]] = [0.2, 0.4]
    windows.usage[3, [CPU_P90, MEMORY_MAX]] = [7.0, 7.0]
    expected = [[0.5, 0.6], [1.0, 2.0], [0.2, 0.4], [7.0, 7.0], [np.nan, np.nan]]
    assert np.array_equal(demand(windows), np.array(expected), equal_nan=True)
    by_mean, measured = measured_by_mean(windows)
    assert by_mean.tolist() == [[False, False], [False, False], [True, True], [False, False], [False, False]]
    assert measured.sum(axis=0).tolist() == [4, 4]
    assert np.array_equal(peak_cpu(windows), [3.0, 0.2, 0.2, np.nan, np.nan], equal_nan=True)


def test_tasks_are_numbered_in_the_order_they_stand() -> None:
    windows = empty_windows(5)
    windows.collection_id[:] = [1, 1, 1, 2, 2]
    windows.instance_index[:] = [0, 0, 7, 7, 7]
    assert windows.task_starts().tolist() == [0, 2, 3, 5]
    assert windows.task_numbers().tolist() == [0, 0, 1, 2, 2]
    assert empty_windows(0).task_starts().tolist() == [0]
