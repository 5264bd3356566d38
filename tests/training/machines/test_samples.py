"""Tests of the tasks of a machine laid out by time: peaks are those of a slow reading of the rule in plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.training.machines.samples import TaskSamples

SLOT_US = 300_000_000
Samples = dict[tuple[int, int], tuple[float, float]]
"""Usage and limit by task and slot."""

samples_of_tasks = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 12)),
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.sampled_from([0.5, 0.5, 0.75])),
    min_size=1, max_size=40,
)  # fmt: skip


def lay_out(samples: Samples) -> TaskSamples:
    keys = sorted(samples)
    usage, limit = (np.array([samples[key][k] for key in keys]) for k in range(2))
    task, slot = np.array(keys).T
    return TaskSamples.lay_out(slot * SLOT_US, task, usage, limit)


def peaks_slowly(samples: Samples, horizon: int) -> NDArray[np.float64]:
    """Return the peak of each slot that has a sample, within a horizon in slots."""
    slots, found = sorted({slot for _, slot in samples}), []
    for now in slots:
        here = {task: limit for (task, slot), (_, limit) in samples.items() if slot == now}
        ahead = [slot for slot in slots if now < slot <= now + horizon]
        totals = [
            sum(min(samples[task, slot][0], limit) for task, limit in here.items() if (task, slot) in samples)
            for slot in ahead
        ]
        peak = max(totals) if totals else sum(here.values())
        found.append(peak if now + horizon <= slots[-1] else np.nan)
    return np.array(found)


@settings(max_examples=150, deadline=None)
@given(samples=samples_of_tasks, horizon=st.integers(1, 4))
def test_the_peak_is_the_largest_sum_of_the_tasks_of_now_each_up_to_its_limit_of_now(
    samples: Samples, horizon: int
) -> None:
    np.testing.assert_array_equal(lay_out(samples).peak_within(horizon * 300), peaks_slowly(samples, horizon))


def test_where_one_task_takes_the_place_of_another_each_slot_has_the_peak_of_its_own_tasks() -> None:
    # task 0 stays, and task 1 gives way to task 2 at slot 3, which uses more; limits are the same
    samples = {(0, slot): (0.1, 1.0) for slot in range(8)} | {(1, slot): (0.2, 1.0) for slot in range(3)}
    samples |= {(2, slot): (0.6, 1.0) for slot in range(3, 8)}
    found = lay_out(samples).peak_within(600)
    np.testing.assert_allclose(found, [0.3, 0.3, 0.1, 0.7, 0.7, 0.7, np.nan, np.nan])


def test_usage_is_capped_at_the_limit_of_its_own_sample() -> None:
    laid_out = lay_out({(0, 0): (0.6, 0.5), (0, 1): (0.6, 0.75), (1, 0): (0.25, 0.5)})
    assert laid_out.usage.tolist() == [0.6, 0.6, 0.25]
    assert laid_out.capped.tolist() == [0.5, 0.6, 0.25]


def test_the_age_counts_snapshots_in_a_row() -> None:
    laid_out = lay_out({(task, slot): (0.1, 1.0) for task, slot in ((0, 0), (0, 1), (0, 3), (1, 1), (1, 2), (1, 3))})
    assert laid_out.age.tolist() == [1, 2, 1, 1, 2, 3]
    assert laid_out.total(np.array([1.0, 2, 4, 8, 16, 32])).tolist() == [1, 10, 16, 36]
