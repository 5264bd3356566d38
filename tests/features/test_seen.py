"""Windows that a model learned from, recognised in another dataset that holds them, too."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from reclaim.data.windows import CPU_MEAN, Windows, concatenate, empty_windows
from reclaim.features.seen import SAMPLED, holds, sample_windows

W = 300_000_000


def windows(tasks: range, slots: range, seed: int = 1) -> Windows:
    """Return windows of tasks at five-minute slots, whose usage follows from the task, the time and a seed."""
    rows = empty_windows(len(tasks) * len(slots))
    rows.collection_id[:] = np.repeat(np.array(tasks), len(slots))
    rows.instance_index[:] = 0
    rows.end_us[:] = np.tile(np.array(slots) + 1, len(tasks)) * W
    rows.usage[:, CPU_MEAN] = np.random.default_rng((seed, 7)).random(len(rows))
    return rows


def features(*buckets: Windows, tuned_until: int) -> Any:
    def read(number: int, *, owned: bool) -> Windows:
        assert not owned
        return buckets[number]

    return SimpleNamespace(n_buckets=len(buckets), cuts_us=(0, tuned_until * W), dataset=SimpleNamespace(windows=read))


def every(of: Windows) -> np.ndarray:
    return np.arange(len(of))


def test_a_sample_is_of_what_a_model_learned_from_alone_and_bounded() -> None:
    many = windows(range(20), range(100))
    sample = sample_windows(features(many, windows(range(20, 22), range(100)), tuned_until=60))
    assert 128 < len(sample) <= SAMPLED
    assert all(end < 60 * W for _, _, end, *_ in sample)  # type: ignore[operator]
    assert {collection for collection, *_ in sample} == set(range(22))
    assert len(sample_windows(features(windows(range(1), range(5)), tuned_until=4))) == 3


def test_a_dataset_with_more_tasks_and_days_is_recognised_by_the_windows_that_it_shares() -> None:
    first = windows(range(5), range(100))
    sample = sample_windows(features(first, tuned_until=80))
    more = concatenate([windows(range(90, 99), range(200), seed=2), first])
    assert holds(sample, more, every(more))
    assert not holds(sample, more, np.flatnonzero(more.end_us > 80 * W))  # judged on later windows alone
    assert holds(sample, more, np.flatnonzero(more.end_us > 75 * W))


def test_tasks_of_another_cell_with_the_same_numbers_and_times_are_not_the_same() -> None:
    mine, other = windows(range(5), range(20)), windows(range(5), range(20), seed=2)
    sample = sample_windows(features(mine, tuned_until=30))
    assert len(sample) == len(mine)
    assert not holds(sample, other, every(other))
    assert not holds([], other, every(other))
    for row, found in ((7, False), (50, True)):  # a single one may be chance
        other.usage[row] = mine.usage[row]
        assert holds(sample, other, every(other)) == found


def test_windows_without_a_measurement_are_compared_by_what_they_have() -> None:
    first = windows(range(3), range(10))
    first.usage[::2, CPU_MEAN] = np.nan
    assert holds(sample_windows(features(first, tuned_until=10)), first, every(first))
