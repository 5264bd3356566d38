"""Histories made by hand and by chance for the tests of this room."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.data.windows import CHANNELS, P90, P100, Cell, Windows, empty_windows, sort_windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.fold.batch import fold_tasks
from reclaim.features.fold.collection_ooms import OomJournal
from reclaim.features.registry import N_FEATURES

S = 1_000_000


def _history(
    cpu: list[float], memory: list[float] | None = None, *, start_s: int = 600, limit: float = 1.0, task: int = 1
) -> Windows:
    """Return the 5-minute windows of one task; what is not given is unknown."""
    windows = empty_windows(len(cpu))
    windows.collection_id[:] = task
    windows.start_us[:] = (start_s + 300 * np.arange(len(cpu))) * S
    windows.end_us[:] = windows.start_us + 300 * S
    windows.limit[:] = limit
    windows.usage[:, CHANNELS.index("cpu_mean")] = cpu
    windows.usage[:, CHANNELS.index("memory_mean")] = cpu if memory is None else memory
    return windows


def _random(seed: int, n_tasks: int = 7, longest: int = 60) -> Windows:
    """Return tasks of a few collections, users and names that overlap in time, with all that a trace does to them.

    Gaps up to weeks, short, long, late and repeated windows, restarts, ends out of memory, changed, unknown and zero
    limits, missing values and percentiles, usage far above the limit; half of the tasks are off the 5-minute grid.
    """
    rng = np.random.default_rng(seed)
    length = rng.integers(1, longest, n_tasks)
    task = np.repeat(np.arange(n_tasks), length)
    n = len(task)
    windows = empty_windows(n)
    collection = rng.integers(0, max(n_tasks // 2, 1), n_tasks)  # some have several tasks
    windows.collection_id[:] = 100 + collection[task]
    windows.instance_index[:] = task
    for owner, known in ((windows.user, [-1, 7, 7, 8]), (windows.name, [-1, 20, 20, 21])):
        owner[:] = rng.choice(known, n_tasks)[collection[task]]
    began_s = 600 + 300 * (rng.integers(0, 24, n_tasks)[collection] + rng.integers(0, 4, n_tasks))
    began_s += np.where(rng.random(n_tasks) < 0.5, 0, rng.integers(1, 300, n_tasks))
    steps = rng.choice([0, 1, 2, 13, 280, 2010, 2016 * 3], n, p=[0.04, 0.85, 0.06, 0.03, 0.01, 0.005, 0.005])
    step_s = steps * 300 + rng.choice([0, 7], n, p=[0.97, 0.03])
    run = np.cumsum(rng.random(n) < 0.06)
    limits = rng.choice([0.5, 1.0, 1.0, 2.5, 0.0, np.nan], (n, 2))
    change = np.cumsum(rng.random(n) < 0.15)
    for k in range(n_tasks):
        rows = np.flatnonzero(task == k)
        windows.start_us[rows] = (began_s[k] + np.cumsum(step_s[rows]) - step_s[rows[0]]) * S
        windows.limit[rows] = limits[rows[0] + change[rows] - change[rows[0]]]
        first_of_run = rows[np.searchsorted(run[rows], run[rows])]
        windows.scheduled_us[rows] = np.where(
            rng.random(n + 1)[run[rows]] < 0.3, -1, windows.start_us[first_of_run] // 2
        )
    windows.end_us[:] = windows.start_us + rng.choice([300, 41, 900], n, p=[0.9, 0.06, 0.04]) * S
    windows.usage[:] = rng.gamma(0.6, 0.4, windows.usage.shape)
    windows.usage[rng.random(n) < 0.02] *= 1e5
    windows.percentiles[:] = np.sort(rng.gamma(0.6, 0.4, windows.percentiles.shape), axis=1)
    windows.percentiles[rng.random(n) < 0.1] = 0.25  # a flat one
    windows.percentiles[rng.random(n) < 0.5, P90 + 1 : P100] = np.nan
    windows.percentiles[rng.random(n) < 0.2] = np.nan
    windows.usage[rng.random(windows.usage.shape) < 0.1] = np.nan
    last_of_run = (np.diff(run, append=-1) != 0) & (rng.random(n) < 0.7)  # out of memory
    windows.usage[last_of_run, CHANNELS.index("memory_max")] = windows.limit[last_of_run, 1]
    windows.tier[:] = rng.integers(-1, 5, n)
    windows.scheduling_class[:] = rng.integers(-1, 4, n)
    windows.in_alloc[:] = rng.random(n) < 0.2
    return sort_windows(windows)


def _fold(windows: Windows, cell: Cell = Cell()) -> FeatureSet:  # noqa: B008 - frozen
    """Return whole histories folded as ``build`` does, in memory; features, no targets and no splits."""
    n, starts, none = len(windows), windows.task_starts(), np.zeros(0, np.uint8)
    dataset: Any = None
    features = FeatureSet(
        path=Path(), manifest={}, dataset=dataset, row=np.arange(n), weight=np.ones(n, np.float32),
        end_us=np.empty(n, np.int64), limit=windows.limit.astype(np.float32),
        x=np.empty((n, N_FEATURES), np.float32),
        first=np.repeat(starts[:-1], np.diff(starts)),
        y=none.astype(np.float32), oom=none.astype(np.float32), inside=none.astype(bool), period=none, group=none,
        bucket_start=np.array([0, n]),
    )  # fmt: skip
    moment, died = np.empty(n, np.int32), np.empty(n, np.int32)
    fold_tasks(windows, starts, cell, features.x, features.end_us, moment, died)
    OomJournal.of_rows(windows.collection_id, moment, died).write(windows.collection_id, moment, features.x)
    return features


@pytest.fixture(scope="session")
def history() -> Callable[..., Windows]:
    """Return a maker of one task's history."""
    return _history


@pytest.fixture(scope="session")
def random_histories() -> Callable[..., Windows]:
    """Return a maker of awkward histories by seed."""
    return _random


@pytest.fixture(scope="session")
def fold() -> Callable[..., FeatureSet]:
    """Return what folds whole histories as ``build`` does."""
    return _fold


@pytest.fixture(scope="session")
def _cell_made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    write_cell(folder / "cell", SyntheticCellConfig(machines=3, days=0.5, tasks_per_machine=30.0))
    return ingest(folder / "cell", folder / "dataset", IngestConfig(buckets=3)).dataset.path


@pytest.fixture
def synthetic_cell(_cell_made_once: Path, tmp_path: Path) -> Dataset:
    """Return a dataset of half a day of some 150 tasks, several to a collection; the test may write into it."""
    return Dataset.open(shutil.copytree(_cell_made_once, tmp_path / "synthetic"))
