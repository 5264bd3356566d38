"""Windows that a model learned from, recognised in another dataset that holds them, too."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from reclaim.data.windows import CPU_MEAN, Windows, concatenate, empty_windows
from reclaim.features.seen import SAMPLED, sample_windows
from reclaim.features.seen import holds as hold

W = 300_000_000


def windows(tasks: range, slots: range, seed: int = 1) -> Windows:
    """Return windows of tasks at five-minute slots, whose usage follows from the task, the time and a seed."""
    rows = empty_windows(len(tasks) * len(slots))
    rows.collection_id[:] = np.repeat(np.array(tasks), len(slots))
    rows.instance_index[:] = 0
    rows.end_us[:] = np.tile(np.array(slots) + 1, len(tasks)) * W
    rows.usage[:, CPU_MEAN] = np.random.default_rng((seed, 7)).random(len(rows))
    return rows


def features(*buckets: Windows, tuned_until: int = 0) -> Any:
    def read(number: int, *, measured: bool = True, owned: bool = True) -> Windows:
        assert not (measured and owned)
        return (
            buckets[number] if measured else replace(buckets[number], usage=np.full_like(buckets[number].usage, np.nan))
        )

    cuts_us = (0, tuned_until * W)
    return SimpleNamespace(n_buckets=len(buckets), cuts_us=cuts_us, dataset=SimpleNamespace(windows=read))


def holds(sample: list[str], of: Any, begin_us: int, end_us: int | None = None) -> bool:
    ((held,),) = hold([sample], of, [(begin_us, end_us)])
    return held


def test_a_sample_is_of_what_a_model_learned_from_alone_and_bounded() -> None:
    many = windows(range(20), range(100))
    more = windows(range(20, 22), range(100), seed=2)
    sample = sample_windows(features(many, more, tuned_until=60))
    assert 128 < len(sample) == len(set(sample)) <= SAMPLED
    for of in (many, more):
        assert holds(sample, features(of), 0, 60 * W)
        assert not holds(sample, features(of), 60 * W)
        for task in np.unique(of.collection_id):
            assert holds(sample, features(of.take(np.flatnonzero(of.collection_id == task))), 0)
    assert len(sample_windows(features(windows(range(1), range(5)), tuned_until=4))) == 3


def test_a_dataset_with_more_tasks_and_days_is_recognised_by_the_windows_that_it_shares() -> None:
    first = windows(range(5), range(100))
    sample = sample_windows(features(first, tuned_until=80))
    more = concatenate([windows(range(90, 99), range(200), seed=2), first])
    assert holds(sample, features(more), 0)
    assert not holds(sample, features(more), 80 * W + 1)  # judged on later windows alone
    assert holds(sample, features(more), 75 * W + 1)


def test_tasks_of_another_cell_with_the_same_numbers_and_times_are_not_the_same() -> None:
    mine, other = windows(range(5), range(20)), windows(range(5), range(20), seed=2)
    sample = sample_windows(features(mine, tuned_until=30))
    assert len(sample) == len(mine)
    assert not holds(sample, features(other), 0)
    assert not holds([], features(other), 0)
    idle = other.usage.copy()
    for rows, found in ((range(30), False), (range(50), False), (range(51), True)):  # half of them may be idle
        other.usage[:] = idle
        other.usage[list(rows)] = mine.usage[list(rows)]
        assert holds(sample, features(other), 0) == found
    assert not holds(sample, features(mine.take(np.array([7]))), 0)  # a single one may be chance
    assert holds(sample, features(mine.take(np.array([7, 9]))), 0)


def test_windows_without_usage_and_with_that_of_the_window_before_are_in_no_sample() -> None:
    first = windows(range(3), range(10))
    first.usage[::2, CPU_MEAN], first.usage[1::6, CPU_MEAN] = np.nan, 0.0
    sample = sample_windows(features(first, tuned_until=20))
    assert len(sample) == 10
    assert holds(sample, features(first.take(np.flatnonzero(first.usage[:, CPU_MEAN] > 0))), 0)
    first.usage[:, CPU_MEAN] = np.repeat([0.5, 0.25, 0.5], 10)
    assert len(sample_windows(features(first, tuned_until=20))) == 3


def test_two_cells_whose_usage_is_mostly_the_same_whole_percent_are_told_apart() -> None:
    mine, other = (windows(range(50), range(40), seed=seed) for seed in (1, 2))
    for of in (mine, other):  # four of five windows use one percent
        of.usage[:, CPU_MEAN] = np.where(of.usage[:, CPU_MEAN] < 0.8, 0.01, of.usage[:, CPU_MEAN].round(2))
    sample = sample_windows(features(mine, tuned_until=60))
    assert len(sample) == SAMPLED
    assert not holds(sample, features(other), 0)
    assert holds(sample, features(mine), 0)


def test_a_sample_tells_neither_names_nor_usage() -> None:
    first = windows(range(3), range(4))
    told = "".join(sample_windows(features(first, tuned_until=20)))
    assert set(told) <= set("0123456789abcdef")
    assert len(told) == 12 * 32
    assert not any(f"{end:x}" in told for end in first.end_us.tolist())


def test_windows_of_a_sample_add_up_over_the_buckets_that_hold_them() -> None:
    mine, other = windows(range(2), range(9)), windows(range(2), range(9), seed=2)
    sample = sample_windows(features(mine, tuned_until=30))
    one, another = mine.take(np.array([0])), mine.take(np.array([10]))
    assert not holds(sample, features(one), 0)
    assert holds(sample, features(one, another), 0)
    assert not holds(sample, features(other.take(np.array([3, 5])), one, another), 0)  # as many have another usage
    assert holds(sample, features(other.take(np.array([3])), one, another), 0)


def test_a_sample_is_of_evenly_spaced_buckets_alike_where_there_are_many() -> None:
    # of buckets 0 to 8 those at 0, 8/3, 16/3 and 8; of the 65 windows of each a quarter of 256
    of_buckets = [windows(range(bucket, bucket + 1), range(65)) for bucket in range(9)]
    sample = sample_windows(features(*of_buckets, tuned_until=99))
    assert [k for k, of in enumerate(of_buckets) if holds(sample, features(of), 0)] == [0, 3, 5, 8]
    assert len(sample) == len(set(sample)) == SAMPLED


def test_a_period_has_the_windows_that_end_as_it_begins_and_not_those_that_end_as_it_does() -> None:
    first = windows(range(2), range(10))  # two end at each of W to 10 W, which are enough
    sample = sample_windows(features(first, tuned_until=30))
    assert len(sample) == len(first)
    assert holds(sample, features(first), 10 * W)
    assert not holds(sample, features(first), 10 * W + 1)
    assert holds(sample, features(first), 0, W + 1)
    assert not holds(sample, features(first), 0, W)


def test_measurements_are_read_of_buckets_alone_with_a_collection_of_the_sample_at_one_of_its_times() -> None:
    first = windows(range(10, 12), range(10))
    sample = sample_windows(features(first, tuned_until=30))
    others = windows(range(5, 10), range(10)), windows(range(12, 15), range(10)), windows(range(10, 12), range(20, 30))
    early = replace(first, end_us=first.end_us - 1)  # at none of its times
    of = features(*others, first, early)
    read, measured = of.dataset.windows, []

    def recorded(number: int, **how: bool) -> Windows:
        if how.get("measured", True):
            measured.append(number)
        found: Windows = read(number, **how)
        return found

    of.dataset.windows = recorded
    assert holds(sample, of, 0)
    assert measured == [3]


def test_all_windows_of_a_period_are_looked_at_and_no_others() -> None:
    first, more = windows(range(5), range(100)), windows(range(90, 99), range(100), seed=2)
    sample = sample_windows(features(first, tuned_until=60))
    assert holds(sample, features(more, first), 50 * W, 80 * W)
    assert not holds(sample, features(more, first), 61 * W, 80 * W)
    assert not holds(sample, features(more, more), 50 * W, 80 * W)
    assert not holds([], features(more, first), 50 * W, 80 * W)


def test_each_of_several_samples_has_its_own_answer_for_each_period_in_one_pass() -> None:
    first, second, third = (windows(range(10 * k, 10 * k + 5), range(100), seed=k) for k in (1, 2, 3))
    samples = [sample_windows(features(of, tuned_until=80)) for of in (first, second, third)]
    both = features(concatenate([first, third]), windows(range(1), range(3)))
    periods = [(0, None), (0, 81 * W), (81 * W, None)]
    (every, early, late) = zip(*hold([*samples, [], samples[0]], both, periods), strict=True)
    assert every == early == (True, False, True, False, True)
    assert not any(late)
    assert hold([], both, periods) == []
