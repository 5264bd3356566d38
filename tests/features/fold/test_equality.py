"""Batch equals live, to the bit: whole histories folded at once against windows given as they come."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.windows import Cell, Windows, concatenate, empty_windows
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.fold import batch as state_fold
from reclaim.features.fold.batch import FeatureState
from reclaim.features.registry import AT, FEATURE_NAMES, N_FEATURES, SLOT_S

Rows = NDArray[np.int64]
CELL: Final = Cell((4.0, 8.0), 12_345_000_000)
SLOT_US: Final = SLOT_S * 1_000_000


def known_us(windows: Windows) -> NDArray[np.int64]:
    """Return when each row is known: at its own end, or that of an earlier row of its task that ended later."""
    out = windows.end_us.copy()
    for first, stop in pairwise(windows.task_starts()):
        out[first:stop] = np.maximum.accumulate(out[first:stop])
    return out


def taken(windows: Windows) -> NDArray[np.bool_]:
    """Return which rows are neither late nor repeated."""
    out = np.ones(len(windows), bool)
    out[1:] = (np.diff(known_us(windows)) != 0) | (np.diff(windows.task_numbers()) != 0)
    return out


def calls_by_slot(windows: Windows) -> list[Rows]:
    """Return the rows of each call: one call for each slot of the clock."""
    slot = (known_us(windows) - 1) // SLOT_US
    order = np.argsort(slot, kind="stable")
    return [part for part in np.split(order, np.flatnonzero(np.diff(slot[order])) + 1) if len(part)]


def calls_at_random(windows: Windows, seed: int) -> list[Rows]:
    """Return calls that begin anywhere in a slot and hold several, tasks in any order, each task's rows in time's."""
    rng = np.random.default_rng(seed)
    task = windows.task_numbers()

    def shuffled(rows: Rows) -> Rows:
        return rows[np.argsort(rng.permutation(int(task.max()) + 1)[task[rows]], kind="stable")]

    order = np.concatenate([shuffled(rows) for rows in calls_by_slot(windows)])
    cuts = np.flatnonzero(rng.random(len(order)) < rng.choice([0.02, 0.2, 0.9]))
    return [shuffled(np.sort(part)) for part in np.split(order, cuts) if len(part)]


def live(windows: Windows, calls: list[Rows], cell: Cell, threads: int = 1) -> tuple[NDArray[np.float32], FeatureState]:
    """Return the features of each row given call by call, and the state after the last."""
    state, task = FeatureState(cell, threads), windows.task_numbers()
    x = np.full((len(windows), N_FEATURES), np.inf, np.float32)  # a row never given would show
    for rows in calls:
        x[rows] = state.advance(task[rows], windows.take(rows))
    return x, state


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return where two arrays agree, a zero's sign included; one NaN is as good as another."""
    same: NDArray[np.bool_] = np.array(a).view(np.int32) == np.array(b).view(np.int32)
    return same | (np.isnan(a) & np.isnan(b))


def assert_same_bits(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert got.shape == expected.shape
    same = same_bits(got, expected)
    assert same.all(), f"{(~same).sum()} values differ: {[FEATURE_NAMES[k] for k in np.flatnonzero(~same.all(axis=0))]}"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), n_tasks=st.sampled_from([1, 7, 20]))
def test_slot_by_slot_a_random_cell_has_the_features_of_the_batch(
    seed: int, n_tasks: int, random_histories: Callable[..., Windows], fold: Callable[..., FeatureSet]
) -> None:
    windows = random_histories(seed, n_tasks)
    assert_same_bits(live(windows, calls_by_slot(windows), CELL)[0], fold(windows, CELL).x)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_neither_cuts_within_a_slot_nor_several_slots_a_call_nor_the_order_of_tasks_matter(
    seed: int, random_histories: Callable[..., Windows], fold: Callable[..., FeatureSet]
) -> None:
    windows = random_histories(seed)
    assert_same_bits(live(windows, calls_at_random(windows, seed), CELL)[0], fold(windows, CELL).x)
    everything: Rows = np.arange(len(windows), dtype=np.int64)
    assert_same_bits(live(windows, [everything], CELL)[0], fold(windows, CELL).x)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_two_threads_give_the_bits_of_one(
    seed: int, random_histories: Callable[..., Windows], fold: Callable[..., FeatureSet]
) -> None:
    windows = random_histories(seed, n_tasks=30)
    expected = fold(windows, CELL).x
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 1)
        calls = np.array_split(np.concatenate(calls_by_slot(windows)), 5)
        assert_same_bits(live(windows, calls, CELL, threads=2)[0], expected)


def test_two_threads_give_the_bits_of_one_in_a_call_that_is_worth_them(
    random_histories: Callable[..., Windows], fold: Callable[..., FeatureSet]
) -> None:
    windows = random_histories(5, n_tasks=600)
    assert len(windows) > 2 * 8_192
    calls = [np.sort(half) for half in np.array_split(np.concatenate(calls_by_slot(windows)), 2)]
    assert_same_bits(live(windows, calls, CELL, threads=2)[0], fold(windows, CELL).x)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_late_and_repeated_windows_given_at_any_time_leave_every_other_row_as_it_was(
    seed: int, random_histories: Callable[..., Windows], fold: Callable[..., FeatureSet]
) -> None:
    windows, rng = random_histories(seed), np.random.default_rng(seed)
    expected, task, calls = fold(windows, CELL).x, windows.task_numbers(), calls_by_slot(windows)
    state = FeatureState(CELL)
    given: list[Rows] = []
    for rows in calls:
        assert_same_bits(state.advance(task[rows], windows.take(rows)), expected[rows])
        given.append(rows)
        again = rng.choice(np.concatenate(given), 5)  # all of them end no later than the last one seen
        stale = state.advance(task[again], windows.take(again))
        assert not np.isinf(stale).any()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_windows_of_a_slot_that_is_over_leave_a_whole_state_and_the_lonely_untouched(
    seed: int, random_histories: Callable[..., Windows], fold: Callable[..., FeatureSet]
) -> None:
    windows, rng = random_histories(seed), np.random.default_rng(seed)
    alone = windows.task_numbers() % 2 == 0
    windows.collection_id[alone] = 10_000 + windows.task_numbers()[alone]
    task, expected = windows.task_numbers(), fold(windows, CELL).x
    delay = rng.integers(0, 20, int(task.max()) + 1)[task] * SLOT_US  # whole tasks are told late, some by an hour
    order = np.argsort(known_us(windows) + delay, kind="stable")
    x, _ = live(windows, np.array_split(order, max(len(order) // 9, 1)), CELL)
    assert not np.isinf(x).any()
    assert_same_bits(
        x[:, : AT.collection_ooms], expected[:, : AT.collection_ooms]
    )  # a task's own features ask for its own order alone
    assert_same_bits(x[alone], expected[alone])


def test_a_call_without_a_window_is_answered_with_no_row() -> None:
    nothing = np.zeros(0, np.int64)
    assert FeatureState(CELL).advance(nothing, empty_windows(0)).shape == (0, N_FEATURES)


def compare(dataset: Dataset, threads: int = 1) -> tuple[int, int]:
    """Return rows, and how many of them have equal features, slot by slot against the batch."""
    config = FeatureConfig(monday_s=86_400, rows="all")
    features, _ = build_features(dataset, config)
    windows = concatenate([dataset.windows(b) for b in range(dataset.n_buckets)])
    cell, task = dataset.cell(config.monday_s * 1_000_000), windows.task_numbers()
    state = FeatureState(cell, threads)
    same = 0
    for rows in calls_by_slot(windows):
        x = state.advance(task[rows], windows.take(rows))
        same += int(same_bits(x, features.x[rows]).all(axis=1).sum())
    return len(windows), same


SERIES: Final = {
    "azure_2017": ("azure", "time_s"),
    "bitbrains_faststorage": ("bitbrains", "time_s"),
    "google_2011_machines": ("google-2011-machines", "time_s"),
    "google_2011_jobs": (
        'task = "job_id"\ntime = { day = 86400, slot = 300 }\nwindow_s = 300\n[columns]\ncpu_mean = "cpu_pct"\n'
        'memory_mean = "mem_pct"\ncpu_limit = 100.0\nmemory_limit = 100.0\n',
        "day",
    ),
}
"""Mapping of each real series (a name, or the content of a file), and its column of time."""


def ingest_series(folder: Path, name: str, work: Path, most_tasks: int | None = None) -> Dataset:
    """Ingest a real series, or the first tasks of it for four days."""
    mapping, time = SERIES[name]
    source = folder / name
    if "\n" in mapping:
        (work / "mapping.toml").write_text(mapping)
        mapping = str(work / "mapping.toml")
    if most_tasks is not None:
        table = pq.read_table(source / "usage.parquet")
        chosen = pc.unique(table[table.column_names[0]])[:most_tasks]
        table = table.filter(pc.is_in(table[table.column_names[0]], chosen))
        span = 4 * (1 if time == "day" else 86_400)
        table = table.filter(pc.less(table[time], pc.add(pc.min(table[time]), span)))
        (work / "part").mkdir()
        pq.write_table(table, work / "part" / "usage.parquet")
        source = work / "part"
    return ingest(source, work / "dataset", IngestConfig(trace="series", mapping=mapping, buckets=3)).dataset


@pytest.mark.parametrize("name", SERIES)
def test_a_real_series_slot_by_slot_equals_the_batch(name: str, real_data: Path, tmp_path: Path) -> None:
    n, same = compare(ingest_series(real_data, name, tmp_path, most_tasks=12))
    assert n > 5_000
    assert same == n


@pytest.mark.slow
def test_the_real_windows_of_google_2019_slot_by_slot_equal_the_batch(real_data: Path, tmp_path: Path) -> None:
    dataset = ingest(real_data / "google_2019", tmp_path / "dataset", IngestConfig(buckets=3)).dataset
    n, same = compare(dataset)
    assert n > 4_000
    assert same == n


def test_a_synthetic_cell_slot_by_slot_equals_the_batch(synthetic_cell: Dataset) -> None:
    n, same = compare(synthetic_cell, threads=2)
    assert n > 5_000
    assert same == n
    features = FeatureSet.open(synthetic_cell.path)
    assert (features.x[:, AT.collection_ooms] > 0).any()  # or the test would say nothing of them


def test_windows_that_may_not_be_written_to_are_folded_by_the_same_machine_code(
    random_histories: Callable[..., Windows],
) -> None:
    windows = random_histories(2)
    task = windows.task_numbers()
    expected = FeatureState(CELL).advance(task, windows)
    compiled = len(state_fold._advance.signatures)
    for column in (task, *vars(windows).values()):
        column.flags.writeable = False
    assert_same_bits(FeatureState(CELL).advance(task, windows), expected)
    assert len(state_fold._advance.signatures) == compiled
