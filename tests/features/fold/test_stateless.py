"""The last features of whole histories: equal, to the bit, to those of a state that was fed slot by slot."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.windows import Cell, Windows, empty_windows
from reclaim.features.fold.batch import FeatureState
from reclaim.features.fold.stateless import features_of_histories
from reclaim.features.registry import FEATURE_NAMES, N_FEATURES, SLOT_S

CELL = Cell((4.0, 8.0), 12_345_000_000)
Make = Callable[..., Windows]


def fed_slot_by_slot(windows: Windows) -> NDArray[np.float32]:
    """Return the features after the last row of each task, given in the order of the clock."""
    task, starts = windows.task_numbers(), windows.task_starts()
    known_us = np.concatenate([np.maximum.accumulate(windows.end_us[a:b]) for a, b in pairwise(starts)])
    moment = -(-known_us // (SLOT_S * 1_000_000))
    state = FeatureState(CELL)
    x = np.full((len(starts) - 1, N_FEATURES), np.inf, np.float32)
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
        assert_same_bits(features_of_histories(some, CELL), fed_slot_by_slot(some))


def test_neither_threads_nor_blocks_matter(random_histories: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = random_histories(4, 50)
    expected = features_of_histories(windows, CELL)
    monkeypatch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 1)
    monkeypatch.setattr("reclaim.features.fold.stateless._TASKS_AT_ONCE", 3)
    assert_same_bits(features_of_histories(windows, CELL, threads=2), expected)


def test_no_window_is_no_task() -> None:
    assert features_of_histories(empty_windows(0)).shape == (0, N_FEATURES)
