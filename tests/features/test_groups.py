"""Groups that rows are split by: tiers, ages, and the tasks of several buckets told apart."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from reclaim.data.dataset import Dataset
from reclaim.data.windows import concatenate, empty_windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.groups import AGES, TIER_LABELS, age_key, join_keys, keys_of, known_seconds, row_keys, tier_key

WINDOW_US = 300_000_000


def test_ages_and_tiers_fall_into_their_classes() -> None:
    ages = [AGES[k] for k in age_key(np.array([60.0, 300.0, 301.0, 7200.0, 7201.0, 86_400.0, 86_401.0]))]
    assert ages == ["up to 5 min"] * 2 + ["up to 2 h"] * 2 + ["up to 24 h"] * 2 + ["older"]
    assert [TIER_LABELS[k] for k in tier_key(np.array([-1, 0, 3], np.int8))] == ["unknown", "free", "prod"]


def test_the_age_of_a_chosen_row_counts_from_the_first_window_of_its_task_chosen_or_not() -> None:
    windows = empty_windows(4)
    windows.collection_id[:] = [7, 7, 7, 8]
    windows.start_us[:] = [WINDOW_US, 2 * WINDOW_US, 3 * WINDOW_US, 9 * WINDOW_US]
    windows.end_us[:] = windows.start_us + WINDOW_US
    windows.tier[:] = [3, 3, 3, -1]
    keys = keys_of(windows, np.array([2, 3]))
    assert known_seconds(windows).tolist() == [300, 600, 900, 300]
    assert keys.age.tolist() == [1, 0]
    assert keys.tier.tolist() == [4, 0]
    assert keys.task.tolist() == [0, 1]
    both = join_keys([keys, keys])
    assert both.task.tolist() == [0, 1, 2, 3]
    assert both.end_us.tolist() == [4 * WINDOW_US, 10 * WINDOW_US] * 2
    assert both.take(np.array([3])).tier.tolist() == [0]
    assert len(join_keys([])) == 0


def test_the_keys_of_chosen_rows_are_those_of_their_buckets(
    synthetic_cell: Dataset, fold: Callable[..., FeatureSet]
) -> None:
    buckets = [synthetic_cell.windows(bucket) for bucket in range(synthetic_cell.n_buckets)]
    start = np.cumsum([0, *map(len, buckets)])
    rows = np.arange(5, start[-1], 7)
    # nothing else is asked of it
    features = replace(fold(buckets[0].take(slice(0, 1))), bucket_start=start, row=rows)
    keys = row_keys(synthetic_cell, features, np.arange(len(rows)))
    every = concatenate(buckets)
    assert keys.end_us.tolist() == every.end_us[rows].tolist()
    assert keys.age.tolist() == age_key(known_seconds(every)[rows]).tolist()
    same = every.task_numbers()[rows]
    assert (np.unique(keys.task, return_inverse=True)[1] == np.unique(same, return_inverse=True)[1]).all()
