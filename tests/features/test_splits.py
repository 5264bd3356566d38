"""Splits: what one period, one collection or one dataset may teach never stands in what it is tested on."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data import schema as s
from reclaim.data.errors import ConfigError
from reclaim.data.windows import empty_windows
from reclaim.features import splits
from reclaim.features.splits import (
    GROUPS,
    IN_ALLOC,
    PERIODS,
    ROLES,
    SEEN,
    TEST,
    TEST_UNSEEN,
    TRAIN,
    VALID,
    VALID_UNSEEN,
    SplitConfig,
    SplitCounts,
    cuts_us,
    drawn,
    groups,
    in_period,
    inside_period,
    periods,
    permitted,
)
from reclaim.features.targets import HORIZONS_S, TARGETS

S = 1_000_000


def _groups(ids: list[int], config: SplitConfig) -> list[int]:
    windows = empty_windows(len(ids))
    windows.collection_id[:] = ids
    group: list[int] = groups(windows, config).tolist()
    return group


def test_a_dataset_held_out_for_tests_has_nothing_to_train_on_and_sets_margins_on_its_first_part() -> None:
    cuts = cuts_us(1000 * S, 2000 * S, SplitConfig(role="test", valid_share=0.3))
    assert cuts == (1000 * S, 1300 * S)
    end_us = np.array([1000, 1001, 1299, 1300, 2000]) * S  # a window ends at the start of the trace at the earliest
    assert periods(end_us, cuts).tolist() == [VALID, VALID, VALID, TEST, TEST]


def test_a_dataset_trained_on_and_tested_has_three_periods_one_after_another() -> None:
    cuts = cuts_us(1000 * S, 2000 * S, SplitConfig(train_share=0.55, valid_share=0.2))
    assert cuts == (1550 * S, 1750 * S)
    end_us = np.array([1001, 1549, 1550, 1749, 1750, 2000]) * S
    assert periods(end_us, cuts).tolist() == [TRAIN, TRAIN, VALID, VALID, TEST, TEST]


def test_a_dataset_only_trained_on_is_filled_by_training_and_validation_in_their_proportion() -> None:
    cuts = cuts_us(1000 * S, 2000 * S, SplitConfig(role="train", train_share=0.45, valid_share=0.15))
    assert cuts[0] == 1750 * S
    end_us = np.array([1001, 1749, 1750, 2000]) * S
    assert periods(end_us, cuts).tolist() == [TRAIN, TRAIN, VALID, VALID]
    measured_us = end_us[:, None] + np.array(HORIZONS_S) * S
    inside = inside_period(periods(end_us, cuts), measured_us, cuts)
    assert inside[:, 0].tolist() == [True, False, True, True]
    assert inside[2:].all()  # no test comes after, so nothing is taken away for one


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**62), min_size=1, max_size=50, unique=True),
    st.sampled_from(ROLES),
    st.sampled_from(ROLES),
    st.floats(0.01, 0.45),
    st.floats(0.01, 0.45),
    st.randoms(),
)
def test_a_collection_falls_into_the_same_group_in_every_dataset_and_no_role_trains_on_what_another_tests(
    ids: list[int], role: str, other_role: str, valid: float, test: float, random: Any
) -> None:
    config = SplitConfig(role=role, valid_unseen_share=valid, test_unseen_share=test)
    here = dict(zip(ids, _groups(ids, config), strict=True))
    elsewhere = random.sample(ids, random.randint(1, len(ids)))  # another dataset has others of them, in another order
    assert _groups(elsewhere, config) == [here[i] for i in elsewhere]
    other = SplitConfig(role=other_role, valid_unseen_share=valid, test_unseen_share=test)
    for mine, theirs in zip(here.values(), _groups(ids, other), strict=True):
        assert {mine, theirs} != {SEEN, TEST_UNSEEN}
    if role == "test":
        assert SEEN not in here.values()
    if role == "train":
        assert TEST_UNSEEN not in here.values()


@pytest.mark.parametrize("role", ROLES)
def test_all_tasks_of_a_collection_are_of_one_group_but_for_those_inside_an_alloc(role: str) -> None:
    windows = empty_windows(40)
    windows.collection_id[:], windows.instance_index[:] = np.divmod(np.arange(40), 2)
    alone = groups(windows, SplitConfig(role=role))
    assert np.array_equal(alone[::2], alone[1::2])
    assert len(set(alone.tolist())) > 1
    windows.in_alloc[::2] = True
    group = groups(windows, SplitConfig(role=role))
    assert (group[::2] == IN_ALLOC).all()
    assert np.array_equal(group[1::2], alone[1::2])


def test_groups_have_the_shares_asked_for() -> None:
    ids = list(range(1, 20_001))
    shares = {role: np.bincount(_groups(ids, SplitConfig(role=role)), minlength=4) / len(ids) for role in ROLES}
    assert shares["all"] == pytest.approx([0.7, 0.1, 0.2, 0.0], abs=0.01)
    assert shares["train"] == pytest.approx([0.7, 0.3, 0.0, 0.0], abs=0.01)
    assert shares["test"] == pytest.approx([0.0, 0.8, 0.2, 0.0], abs=0.01)


def test_each_period_permits_its_groups_and_none_the_tasks_inside_an_alloc() -> None:
    every = np.array([SEEN, VALID_UNSEEN, TEST_UNSEEN, IN_ALLOC], np.uint8)
    assert permitted(TRAIN, every).tolist() == [True, False, False, False]
    assert permitted(VALID, every).tolist() == [True, True, False, False]
    assert permitted(TEST, every).tolist() == [True, True, True, False]
    assert in_period(VALID, np.array([VALID, VALID, VALID, TRAIN], np.uint8), every).tolist() == [
        True, True, False, False,
    ]  # fmt: skip
    assert not in_period(TEST, np.full(4, VALID, np.uint8), every).any()


def test_the_number_drawn_for_an_id_is_that_of_splitmix64_so_groups_stay_what_they_were() -> None:
    # the first outputs of its reference for the seeds 0 and 1, of which the upper 53 bits count
    first = [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]
    assert drawn(np.array([0, 1])).tolist() == [(x >> 11) / 2**53 for x in first]
    pairs = drawn(*np.divmod(np.arange(400), 20))
    assert len(set(pairs.tolist())) == 400  # each of several ids counts, and in which place it stands
    assert pairs.mean() == pytest.approx(0.5, abs=0.05)


def test_a_target_is_known_when_all_it_rests_on_was_measured_by_the_end_of_its_own_period() -> None:
    measured_us = np.array([10_000, 10_001, 10_001, 20_001, 10**6]) * S
    period = np.array([TRAIN, TRAIN, VALID, VALID, TEST], np.uint8)
    inside = inside_period(period, measured_us[:, None], (10_000 * S, 20_000 * S))
    assert inside[:, 0].tolist() == [True, False, True, False, True]


def _arrays() -> dict[str, np.ndarray[Any, Any]]:
    """Return six rows of a trace whose training ends at 100,000 s, validation at 200,000 s, and all at 300,000 s."""
    known, none = 0.5, np.nan
    rows = [  # t, period, group, targets and OOM label at 300, 3600 and 86400 s
        (99_000, TRAIN, SEEN, (known, known, known), (0, 0, 0)),  # 300 s after t all is known, 3600 s after t is later
        (10_000, TRAIN, SEEN, (none, known, known), (0, 1, 1)),  # nothing was measured just after t
        (10_000, TRAIN, TEST_UNSEEN, (known, known, known), (1, 1, 1)),
        (150_000, VALID, VALID_UNSEEN, (known, known, known), (0, 0, 1)),  # the day after t reaches into the test
        (250_000, TEST, IN_ALLOC, (known, known, none), (0, 0, none)),
        (299_000, TEST, TEST_UNSEEN, (known, none, none), (0, 1, none)),  # the trace ends within the hour
    ]
    t, period, group, y, oom = zip(*rows, strict=True)
    end_us = np.array(t, np.int64) * S
    return {
        s.END_US: end_us,
        "inside": inside_period(np.array(period, np.uint8), end_us[:, None] + (np.array(HORIZONS_S) + 300) * S, CUTS),
        "period": np.array(period, np.uint8),
        "group": np.array(group, np.uint8),
        "y": np.repeat(np.array(y, np.float32)[:, None], len(TARGETS), axis=1),
        "oom": np.array(oom, np.float32),
    }


CUTS = (100_000 * S, 200_000 * S)


def test_the_manifest_counts_what_is_known_and_what_was_taken_away() -> None:
    counted = SplitCounts.of(_arrays(), 300_000 * S).facts()
    assert counted["rows"]["train"] == {"seen": 2, "valid-unseen": 0, "test-unseen": 1, "in-alloc": 0}
    assert counted["rows"]["test"] == {"seen": 0, "valid-unseen": 0, "test-unseen": 1, "in-alloc": 1}

    def of(period: str, target: str, horizon: str) -> list[int]:
        return list(counted["targets"][period][target][horizon].values())

    for target in TARGETS:  # known, gap, censored, unmeasured
        assert of("train", target, "300s") == [1, 0, 0, 1]
        assert of("train", target, "3600s") == [1, 1, 0, 0]
        assert of("train", target, "86400s") == [1, 1, 0, 0]
        assert of("valid", target, "3600s") == [1, 0, 0, 0]
        assert of("valid", target, "86400s") == [0, 1, 0, 0]
        assert of("test", target, "300s") == [1, 0, 0, 0]
        assert of("test", target, "3600s") == [0, 0, 1, 0]
    assert of("train", "oom", "3600s") == [1, 1, 0, 0, 1]  # and, last, the positive among the known
    assert of("train", "oom", "300s") == [2, 0, 0, 0, 0]
    assert of("valid", "oom", "86400s") == [0, 1, 0, 0, 0]
    assert of("test", "oom", "3600s") == [1, 0, 0, 0, 1]
    assert of("test", "oom", "86400s") == [0, 0, 1, 0, 0]


def test_what_becomes_of_the_rows_adds_up() -> None:
    rng = np.random.default_rng(1)
    n = 1000
    end_us = rng.integers(0, 300_000, n) * S
    arrays: dict[str, np.ndarray[Any, Any]] = {
        s.END_US: end_us,
        "period": periods(end_us, CUTS),
        "inside": rng.random((n, 3)) < 0.8,
        "group": rng.integers(0, 4, n).astype(np.uint8),
        "y": np.where(rng.random((n, 3, 3)) < 0.3, np.nan, rng.random((n, 3, 3))).astype(np.float32),
        "oom": rng.choice([0.0, 1.0, np.nan], (n, 3)).astype(np.float32),
    }
    whole = SplitCounts.of(arrays, 300_000 * S).facts()
    halves = [{name: column[part] for name, column in arrays.items()} for part in (slice(400), slice(400, None))]
    assert SplitCounts.added([SplitCounts.of(half, 300_000 * S) for half in halves]).facts() == whole
    for p, period in enumerate(PERIODS):
        rows = sum(whole["rows"][period][GROUPS[g]] for g in splits.PERMITTED[p])
        for of_target in whole["targets"][period].values():
            for fates in of_target.values():
                assert fates["known"] + fates["gap"] + fates["censored"] + fates["unmeasured"] == rows
                assert fates.get("positive", 0) <= fates["known"]


def test_a_horizon_that_ends_with_the_trace_is_not_censored() -> None:
    end_us = np.array([400, 401]) * S  # of a trace of 700 s
    arrays: dict[str, np.ndarray[Any, Any]] = {
        s.END_US: end_us, "inside": np.ones((2, 3), bool), "period": np.full(2, TRAIN, np.uint8),
        "group": np.full(2, SEEN, np.uint8),
        "y": np.full((2, len(TARGETS), 3), np.nan, np.float32), "oom": np.full((2, 3), np.nan, np.float32),
    }  # fmt: skip
    fates = SplitCounts.of(arrays, 700 * S).facts()["targets"]["train"]["cpu"]["300s"]
    assert fates == {"known": 0, "gap": 0, "censored": 1, "unmeasured": 1}


def test_shares_and_roles_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train_share must be between 0 and 1, got 1.5"):
        SplitConfig(train_share=1.5)
    for name in ("train_share", "valid_share", "valid_unseen_share", "test_unseen_share"):
        for end in (0.0, 1.0):
            with pytest.raises(ConfigError, match=f"{name} must be between 0 and 1, got {end}"):
                SplitConfig(**cast(Any, {name: end}))
    with pytest.raises(ConfigError, match="must leave time to test"):
        SplitConfig(train_share=0.7, valid_share=0.3)
    with pytest.raises(ConfigError, match="must leave collections to train on"):
        SplitConfig(valid_unseen_share=0.5, test_unseen_share=0.5)
    with pytest.raises(ConfigError, match=r"role must be one of all, train, test, got 'holdout'"):
        SplitConfig(role="holdout")
