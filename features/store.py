"""The feature set on disk: one contiguous array per kind, rows aligned with the dataset's usage, memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.errors import ConfigError
from reclaim.data.store import Dataset, read_manifest
from reclaim.features.registry import FEATURE_NAMES, PIPELINE_VERSION
from reclaim.features.splits import (
    IN_ALLOC,
    SEEN,
    TEST,
    TEST_UNSEEN,
    TRAIN,
    VALID,
    VALID_UNSEEN,
)
from reclaim.features.targets import HORIZONS_S, TARGETS

FOLDER: Final = "features"
"""Where a dataset keeps its feature set."""

_LAST_WINDOW_US: Final = 300_000_000
"""How far a window that begins within a horizon may reach beyond it: the longest window of the traces."""

ARRAYS: Final[dict[str, tuple[Any, tuple[int, ...]]]] = {
    "x": (np.float32, (len(FEATURE_NAMES),)),
    "y": (np.float32, (len(TARGETS), len(HORIZONS_S))),
    "oom": (np.float32, (len(HORIZONS_S),)),
    s.END_US: (np.int64, ()),
    "period": (np.uint8, ()),
    "group": (np.uint8, ()),
}
"""File name → type, and shape of one row."""


@dataclass(frozen=True)
class FeatureSet:
    """Features, targets and splits of every usage row, in the order of buckets 0, 1, … and of rows within.

    Attributes
    ----------
    path : Path
    manifest : dict
    x : float32, shape (n, n_features)
        NaN where there is nothing to compute a feature from.
    y : float32, shape (n, n_targets, n_horizons)
        Over the limit; NaN unknown.
    oom : float32, shape (n, n_horizons)
        1, 0 or NaN unknown.
    end_us : int64, shape (n,)
    period, group : uint8, shape (n,)
        Positions in ``splits.PERIODS`` and ``splits.GROUPS``.
    bucket_start : int64, shape (n_buckets + 1,)
        First row of each bucket, and ``n``.
    """

    path: Path
    manifest: dict[str, Any]
    x: NDArray[np.float32]
    y: NDArray[np.float32]
    oom: NDArray[np.float32]
    end_us: NDArray[np.int64]
    period: NDArray[np.uint8]
    group: NDArray[np.uint8]
    bucket_start: NDArray[np.int64]

    @classmethod
    def open(cls, dataset_path: Path | str) -> FeatureSet:
        """Open the feature set of a dataset.

        Raises
        ------
        ConfigError
            There is none, or it was made by another feature pipeline or from another dataset.
        """
        dataset = Dataset.open(dataset_path)
        folder = dataset.path / FOLDER
        command = f"reclaim features {dataset_path}"
        manifest = read_manifest(folder, made_by=command)
        if manifest["pipeline"] != PIPELINE_VERSION or manifest["dataset"] != dataset.fingerprint:
            raise ConfigError(f"{folder}: made by another feature pipeline or dataset; run `{command}` again")
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        return cls(folder, manifest, bucket_start=np.array(manifest["bucket_start"], np.int64), **arrays)

    def __len__(self) -> int:
        return len(self.end_us)

    @property
    def fingerprint(self) -> str:
        """Hash over dataset, pipeline and configuration."""
        return str(self.manifest["fingerprint"])

    @property
    def cuts_us(self) -> tuple[int, int]:
        """Ends of the training and of the validation period."""
        train, valid = self.manifest["cuts_us"]
        return train, valid

    def train_rows(self) -> NDArray[np.int64]:
        """Return the rows to learn from: training period, seen collections."""
        return np.flatnonzero((self.period == TRAIN) & (self.group == SEEN))

    def valid_rows(self) -> NDArray[np.int64]:
        """Return the rows to set margins on: validation period, all collections but those kept for the test."""
        return np.flatnonzero((self.period == VALID) & ((self.group == SEEN) | (self.group == VALID_UNSEEN)))

    def test_rows(self, *, unseen_only: bool = False) -> NDArray[np.int64]:
        """Return the rows to score on: test period, all collections or those never seen before it."""
        allowed = self.group == TEST_UNSEEN if unseen_only else self.group != IN_ALLOC
        return np.flatnonzero((self.period == TEST) & allowed)

    def train_targets(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (y, oom) of rows, NaN where the horizon reaches past the training period: the gap of one horizon."""
        return self._targets_until(rows, self.cuts_us[0])

    def valid_targets(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (y, oom) of rows, NaN where the horizon reaches past the validation period."""
        return self._targets_until(rows, self.cuts_us[1])

    def test_targets(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (y, oom) of rows."""
        return self.y[rows], self.oom[rows]

    def _targets_until(self, rows: NDArray[np.int64], until_us: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        reach_us = np.array(HORIZONS_S, np.int64) * 1_000_000 + _LAST_WINDOW_US
        inside = self.end_us[rows][:, None] + reach_us <= until_us
        y = np.where(inside[:, None, :], self.y[rows], np.float32(np.nan))
        return y, np.where(inside, self.oom[rows], np.float32(np.nan))
