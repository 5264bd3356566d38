"""The last features of whole histories: equal, to the bit, to those of a state that was fed slot by slot."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.windows import Cell, Windows, concatenate, empty_windows
from reclaim.features.fold.batch import FeatureState
from reclaim.features.fold.stateless import features_of_histories
from reclaim.features.registry import FEATURE_NAMES, FIRST_RELATED, SLOT_S, feature_names

CELL = Cell((4.0, 8.0), 12_345_000_000)
Make = Callable[..., Windows]


def fed_slot_by_slot(windows: Windows, related: bool = True) -> NDArray[np.float32]:
    """Return the features after the last row of each task, given in the order of the clock."""
    task, starts = windows.task_numbers(), windows.task_starts()
    known_us = np.concatenate([np.maximum.accumulate(windows.end_us[a:b]) for a, b in pairwise(starts)])
    moment = -(-known_us // (SLOT_S * 1_000_000))
    state = FeatureState(CELL, related=related)
    x = np.full((len(starts) - 1, len(feature_names(related=related))), np.inf, np.float32)
    for now in np.unique(moment):
        rows = np.flatnonzero(moment == now)
        x[task[rows]] = state.advance(task[rows], windows.take(rows))  # of several rows of a task the last one stays
    return x


def assert_same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    same = (a.view(np.int32) == b.view(np.int32)) | (np.isnan(a) & np.isnan(b))
    assert same.all(), [FEATURE_NAMES[k] for k in np.flatnonzero(~same.all(axis=0))]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), n_tasks=st.sampled_from([7, 20, 40]), longest=st.sampled_from([2, 5, 60]))
def test_a_random_cell_ends_with_the_features_of_a_state_fed_slot_by_slot(
    seed: int, n_tasks: int, longest: int, random_histories: Make
) -> None:
    windows = random_histories(seed, n_tasks, longest)
    alone = windows.take(slice(0, windows.task_starts()[1]))
    for some in (windows, alone):
        for related in (True, False):
            assert_same_bits(features_of_histories(some, CELL, related=related), fed_slot_by_slot(some, related))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_tasks_of_a_collection_that_name_several_owners_have_that_of_the_earliest(
    seed: int, random_histories: Make
) -> None:
    windows, rng = random_histories(seed, 20, 5), np.random.default_rng(seed)
    n_tasks, task = len(windows.task_starts()) - 1, windows.task_numbers()
    windows.user[:] = rng.integers(-1, 4, n_tasks)[task]
    windows.name[:] = rng.integers(-1, 3, n_tasks)[task]
    assert_same_bits(features_of_histories(windows, CELL, related=True), fed_slot_by_slot(windows))


def test_neither_threads_nor_blocks_matter(random_histories: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = random_histories(4, 50)
    expected = features_of_histories(windows, CELL, related=True)
    monkeypatch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 1)
    monkeypatch.setattr("reclaim.features.fold.stateless._TASKS_AT_ONCE", 3)
    assert_same_bits(features_of_histories(windows, CELL, threads=2, related=True), expected)


def test_siblings_count_what_was_known_before_their_last_window(history: Make) -> None:
    # both end at 900 s, and the elder has one window more: each knows of the other's windows before that slot alone
    both = concatenate([history([0.2, 0.3], start_s=300), history([0.5], start_s=600)])
    both.instance_index[:] = [0, 0, 1]
    x = features_of_histories(both, related=True)
    siblings, mean = (FEATURE_NAMES.index(name) for name in ("sibling_tasks", "sibling_cpu_mean"))
    assert x.shape == (2, len(FEATURE_NAMES))
    assert x[:, siblings].tolist() == [0.0, 1.0]  # log2(1 + tasks)
    assert np.isnan(x[0, mean])
    assert x[1, mean] == pytest.approx(0.2, abs=1e-6)
    assert x[:, FEATURE_NAMES.index("cpu_last")].tolist() == pytest.approx([0.3, 0.5])


def test_no_window_is_no_task() -> None:
    assert features_of_histories(empty_windows(0)).shape == (0, FIRST_RELATED)
    assert features_of_histories(empty_windows(0), related=True).shape == (0, len(FEATURE_NAMES))
