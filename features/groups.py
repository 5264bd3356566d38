"""Splits rows for reports by the tier and the age of their task, and tells which rows belong to one task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.schema import TIERS
from reclaim.data.windows import Windows
from reclaim.features.feature_set import FeatureSet

AGE_EDGES_S: Final = (300.0, 7_200.0, 86_400.0)
"""Upper edges of the age classes, in seconds, the edge itself within."""
AGES: Final = ("up to 5 min", "up to 2 h", "up to 24 h", "older")
"""Bands of the time for which a task had been known when the answer was given."""

TIER_LABELS: Final = ("unknown", *TIERS)
"""Groups of the split by tier, in the order of ``tier_key``."""


def tier_key(tier: NDArray[np.int8]) -> NDArray[np.int64]:
    """Return the position in ``TIER_LABELS`` of each row's tier; shape (n,)."""
    return tier.astype(np.int64) + 1


def age_key(known_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the position in ``AGES`` of each row's age in seconds; shape (n,)."""
    return np.searchsorted(np.array(AGE_EDGES_S), known_s, side="left").astype(np.int64)


def known_seconds(windows: Windows) -> NDArray[np.float64]:
    """Return the time from the start of each row's task's first window to the row's end, in seconds; shape (n,)."""
    first_us = windows.start_us[windows.task_starts()[:-1]]
    return (windows.end_us - first_us[windows.task_numbers()]) / 1e6


@dataclass(frozen=True)
class RowKeys:
    """Keys of ``n`` rows: tier and age, by which scores are split, and the task.

    Attributes
    ----------
    tier : int64, shape (n,)
        Position in ``TIER_LABELS``.
    age : int64, shape (n,)
        Position in ``AGES``.
    task : int64, shape (n,)
        Number of the row's task; rows of one task have the same, in whatever order they stand.
    start_us, end_us : int64, shape (n,), µs on the trace's clock
        The row's window.
    """

    tier: NDArray[np.int64]
    age: NDArray[np.int64]
    task: NDArray[np.int64]
    start_us: NDArray[np.int64]
    end_us: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.task)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> RowKeys:
        """Return the chosen rows, in the order given."""
        return RowKeys(*(column[rows] for column in vars(self).values()))


def row_keys(dataset: Dataset, features: FeatureSet, rows: NDArray[np.int64]) -> RowKeys:
    """Return the keys of chosen rows of a feature set, in rising order; each bucket of the dataset is read once."""
    parts = [
        keys_of(dataset.windows(bucket, measured=False), here)
        for bucket, here in features.by_bucket(features.row[rows])
    ]
    return join_keys(parts)


def keys_of(windows: Windows, rows: NDArray[np.int64]) -> RowKeys:
    """Return the keys of chosen rows among all windows of their tasks."""
    return RowKeys(
        tier=tier_key(windows.tier[rows]),
        age=age_key(known_seconds(windows)[rows]),
        task=windows.task_numbers()[rows],
        start_us=windows.start_us[rows],
        end_us=windows.end_us[rows],
    )


def join_keys(parts: list[RowKeys]) -> RowKeys:
    """Return the rows of all parts, in the order given; tasks are numbered again, as no task is in two parts."""
    if not parts:
        return RowKeys(*(np.zeros(0, np.int64) for _ in range(5)))
    before = np.cumsum([0, *(p.task.max(initial=-1) + 1 for p in parts)])
    task = np.concatenate([p.task + k for p, k in zip(parts, before, strict=False)])
    columns = {
        name: np.concatenate([getattr(p, name) for p in parts]) for name in ("tier", "age", s.START_US, s.END_US)
    }
    return RowKeys(task=task, **columns)
