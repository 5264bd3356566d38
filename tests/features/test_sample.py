"""The sample: bounded, decided row by row, weighted so that it counts for the whole, and no rare row left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.errors import ConfigError
from reclaim.data.schema import UNKNOWN_ID
from reclaim.data.windows import Windows
from reclaim.features.groups import AGES, TIER_LABELS, age_key, known_seconds, tier_key
from reclaim.features.sample import RowCounts, SampleConfig, Shares
from reclaim.features.splits import IN_ALLOC, SEEN, TEST, TEST_UNSEEN, TRAIN, VALID
from reclaim.features.targets import HORIZONS_S

Maker = Callable[..., Windows]


@pytest.fixture(scope="module")
def windows(random_histories: Maker) -> Windows:
    """Return some 8,000 windows of 150 tasks on forty machines."""
    found = random_histories(3, n_tasks=150, longest=110)
    found.machine_id[:] = np.random.default_rng(1).integers(0, 40, len(found))
    return found


def everywhere(period: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return period, group and labels of rows all alike."""
    return np.full(n, period, np.uint8), np.full(n, SEEN, np.uint8), np.zeros((n, len(HORIZONS_S)), np.float32)


def test_where_all_rows_fit_all_are_kept_and_count_alike(windows: Windows) -> None:
    n = len(windows)
    for period in (TRAIN, VALID, TEST):
        of = everywhere(period, n)
        shares = Shares.within([RowCounts.of(windows, *of[:2])], SampleConfig(train=n, valid=n, test=n))
        rows, weight = shares.choose(windows, *of)
        assert rows.tolist() == list(range(n))
        assert (weight == 1).all()


def test_training_rows_are_about_as_many_as_asked_for_and_weigh_as_much_as_all(windows: Windows) -> None:
    n, of = len(windows), everywhere(TRAIN, len(windows))
    shares = Shares.within([RowCounts.of(windows, *of[:2])], SampleConfig(train=2_000))
    rows, weight = shares.choose(windows, *of)
    assert len(rows) == pytest.approx(2_000, rel=0.06)
    assert weight.sum() == pytest.approx(n, rel=0.1)
    stratum = tier_key(windows.tier) * 4 + age_key(known_seconds(windows))
    for one in np.unique(stratum):
        mine = stratum[rows] == one
        assert weight[mine].sum() == pytest.approx((stratum == one).sum(), rel=0.35, abs=20)
        assert len(np.unique(weight[mine])) == 1


def test_training_rows_are_drawn_each_by_itself_and_not_by_task_nor_by_time(windows: Windows) -> None:
    of = everywhere(TRAIN, len(windows))
    rows, _ = Shares(np.full((len(TIER_LABELS), len(AGES)), 0.5), 1.0, 1.0).choose(windows, *of)
    kept = np.isin(np.arange(len(windows)), rows)
    for column in (windows.task_numbers(), windows.start_us):
        _, of_one, count = np.unique(column, return_inverse=True, return_counts=True)
        share = np.bincount(of_one, kept)[count >= 20] / count[count >= 20]
        assert len(share) > 20
        assert ((share > 0) & (share < 1)).all()


def test_half_of_the_training_rows_go_to_all_tiers_and_ages_alike_and_half_by_how_many_more_each_has() -> None:
    train = np.zeros((len(TIER_LABELS), len(AGES)), np.int64)
    train[0, 0], train[1, 2] = 1_000, 100
    share = Shares.within([RowCounts(train, 0, 0, 1.0)], SampleConfig(train=220)).train
    # 55 of each; of 110 more 945/990 and 45/990: 160 of 1,000 and 60 of 100
    assert (share[0, 0], share[1, 2]) == (pytest.approx(0.16), pytest.approx(0.6))
    assert (share[train == 0] == 1).all()


def test_a_rare_tier_or_age_has_more_rows_than_its_share(windows: Windows) -> None:
    of, stratum = everywhere(TRAIN, len(windows)), age_key(known_seconds(windows))
    counts = RowCounts.of(windows, *of[:2])
    rows, _ = Shares.within([counts], SampleConfig(train=2_000)).choose(windows, *of)
    fewest = np.argmin(np.where(np.bincount(stratum) > 0, np.bincount(stratum), len(stratum)))
    assert (stratum[rows] == fewest).mean() > 1.2 * (stratum == fewest).mean()


def test_every_row_that_meets_an_end_out_of_memory_within_the_hour_is_kept_and_counts_once(windows: Windows) -> None:
    period, group, oom = everywhere(TRAIN, len(windows))
    oom[::100, 1] = 1
    oom[50::100, 0], oom[50::100, 1] = 1, np.nan  # whether within the hour is unknown
    oom[7::50, 2] = 1  # within the day
    shares = Shares.within([RowCounts.of(windows, period, group)], SampleConfig(train=500))
    rows, weight = shares.choose(windows, period, group, oom)
    assert np.isin(np.arange(0, len(windows), 50), rows).all()
    assert (weight[np.isin(rows, np.arange(0, len(windows), 50))] == 1).all()
    assert not np.isin(np.arange(7, len(windows), 50), rows).all()


def test_of_a_machine_all_validation_rows_are_kept_or_none(windows: Windows) -> None:
    of = everywhere(VALID, len(windows))
    shares = Shares.within([RowCounts.of(windows, *of[:2])], SampleConfig(valid=3_000))
    rows, weight = shares.choose(windows, *of)
    assert 0 < len(rows) < len(windows)
    kept = np.isin(np.arange(len(windows)), rows)
    for machine in np.unique(windows.machine_id):
        assert len(set(kept[windows.machine_id == machine])) == 1
    assert (weight == 1).all()


@pytest.mark.parametrize("period", [VALID, TEST])
def test_without_machines_and_in_the_test_whole_tasks_are_kept_or_left(period: int, windows: Windows) -> None:
    of, machine = everywhere(period, len(windows)), windows.machine_id.copy()
    windows.machine_id[:] = UNKNOWN_ID
    shares = Shares.within([RowCounts.of(windows, *of[:2])], SampleConfig(valid=3_000, test=3_000))
    rows, _ = shares.choose(windows, *of)
    windows.machine_id[:] = machine
    kept, task = np.isin(np.arange(len(windows)), rows), windows.task_numbers()
    assert 0 < len(rows) < len(windows)
    assert all(len(set(kept[task == k])) == 1 for k in range(task[-1] + 1))
    assert any(len(set(kept[windows.collection_id == one])) == 2 for one in np.unique(windows.collection_id))


def test_what_is_kept_of_the_validation_is_no_likelier_to_be_kept_of_the_test(windows: Windows) -> None:
    machine, task = windows.machine_id.copy(), windows.task_numbers()
    windows.machine_id[:] = UNKNOWN_ID  # both are drawn by task
    half = Shares(np.ones((len(TIER_LABELS), len(AGES))), 0.5, 0.5)
    valid, test = (set(task[half.choose(windows, *everywhere(one, len(task)))[0]]) for one in (VALID, TEST))
    windows.machine_id[:] = machine
    assert len(valid & test) / len(valid) == pytest.approx(0.5, abs=0.15)


def test_rows_that_no_period_may_use_are_left_out_but_for_those_that_are_only_warned_of(windows: Windows) -> None:
    period, group, oom = everywhere(TRAIN, len(windows))
    group[::3], group[1::3] = TEST_UNSEEN, IN_ALLOC
    rows, _ = Shares.whole().choose(windows, period, group, oom)
    assert np.array_equal(rows, np.flatnonzero(group != TEST_UNSEEN))
    assert RowCounts.of(windows, period, group).train.sum() == len(rows)
    period[: len(rows) // 2] = VALID
    counts = RowCounts.of(windows, period, group)
    assert counts.train.sum() + counts.valid == len(rows)


@settings(max_examples=25, deadline=None)
@given(train=st.integers(1, 10_000), cut=st.integers(1, 39), seed=st.integers(0, 99))
def test_how_a_dataset_is_cut_into_buckets_decides_nothing(
    train: int, cut: int, seed: int, random_histories: Maker
) -> None:
    windows = random_histories(seed, n_tasks=40)
    edge = windows.task_starts()[min(cut, len(windows.task_starts()) - 1)]
    halves = [windows.take(slice(0, edge)), windows.take(slice(edge, None))]
    counts = [RowCounts.of(w, *everywhere(TRAIN, len(w))[:2]) for w in halves]
    config = SampleConfig(train=train)
    shares = Shares.within(counts, config)
    whole = Shares.within([RowCounts.of(windows, *everywhere(TRAIN, len(windows))[:2])], config)
    assert np.array_equal(shares.train, whole.train)
    parts = [shares.choose(w, *everywhere(TRAIN, len(w))) for w in halves]
    rows, weight = whole.choose(windows, *everywhere(TRAIN, len(windows)))
    assert np.array_equal(np.concatenate([parts[0][0], parts[1][0] + edge]), rows)
    assert np.array_equal(np.concatenate([parts[0][1], parts[1][1]]), weight)


def test_the_share_of_the_validation_and_of_the_test_is_that_of_all_parts_together(windows: Windows) -> None:
    edge, n = windows.task_starts()[50], len(windows)
    for period, config in ((VALID, SampleConfig(valid=1_000)), (TEST, SampleConfig(test=1_000))):
        counts = [
            RowCounts.of(w, *everywhere(period, len(w))[:2])
            for w in (windows.take(slice(0, edge)), windows.take(slice(edge, None)))
        ]
        shares = Shares.within(counts, config)
        assert (shares.valid, shares.test) == pytest.approx((1_000 / n, 1.0) if period == VALID else (1.0, 1_000 / n))


@settings(max_examples=30, deadline=None)
@given(machines=st.integers(1, 5), first=st.integers(0, 1_000), wanted=st.integers(1, 200))
def test_however_few_the_machines_one_is_kept_of_the_validation(
    machines: int, first: int, wanted: int, windows: Windows
) -> None:
    few = replace(windows, machine_id=first + windows.machine_id % machines)
    of = everywhere(VALID, len(few))
    halves = [
        RowCounts.of(few.take(part), *(a[part] for a in of[:2])) for part in (slice(0, 4_000), slice(4_000, None))
    ]
    shares = Shares.within(halves, SampleConfig(valid=wanted))
    kept = np.unique(few.machine_id[shares.choose(few, *of)[0]])
    assert len(kept) >= 1
    by_share = Shares(shares.train, wanted / len(few), 1.0).choose(few, *of)[0]
    if len(by_share):  # otherwise nothing changes
        assert kept.tolist() == np.unique(few.machine_id[by_share]).tolist()
    else:
        assert len(kept) == 1


def test_no_more_than_one_machine_is_kept_for_want_of_rows_wherever_in_the_dataset_it_is() -> None:
    none = np.zeros((len(TIER_LABELS), len(AGES)), np.int64)
    # the last part has no validation row, and so no machine
    counts = [RowCounts(none, 500, 0, 0.9), RowCounts(none, 500, 0, 0.2), RowCounts(none, 0, 0, 1.0)]
    assert Shares.within(counts, SampleConfig(valid=1)).valid == np.nextafter(0.2, 1.0)
    assert Shares.within(counts, SampleConfig(valid=300)).valid == 0.3


def test_a_sample_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"valid must be at least 1, got 0"):
        SampleConfig(valid=0)
