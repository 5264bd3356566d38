"""The feature set on disk: one contiguous array per kind, rows aligned with the dataset's usage, memory-mapped."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data import schema as s
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.schema import RESOURCES
from reclaim.data.store import MANIFEST, Dataset, content_sha256, read_manifest, replaced_folder, write_json
from reclaim.data.windows import measured_by_mean
from reclaim.features.registry import FEATURE_NAMES, PIPELINE_VERSION
from reclaim.features.splits import (
    GROUPS,
    IN_ALLOC,
    PERIODS,
    SEEN,
    TEST,
    TEST_UNSEEN,
    TRAIN,
    VALID,
    VALID_UNSEEN,
    SplitConfig,
    cuts_us,
    groups,
    periods,
)
from reclaim.features.state import FeatureState
from reclaim.features.targets import HORIZONS_S, OOM_DEFINITION, TARGETS, oom_events, targets

FOLDER: Final = "features"
"""Where a dataset keeps its feature set."""

_LAST_WINDOW_US: Final = 300_000_000
"""How far a window that begins within a horizon may reach beyond it: the longest window of the traces."""

_ARRAYS: Final[dict[str, tuple[Any, tuple[int, ...]]]] = {
    "x": (np.float32, (len(FEATURE_NAMES),)),
    "y": (np.float32, (len(TARGETS), len(HORIZONS_S))),
    "oom": (np.float32, (len(HORIZONS_S),)),
    s.END_US: (np.int64, ()),
    "period": (np.uint8, ()),
    "group": (np.uint8, ()),
}
"""File name → type, and shape of one row."""


@dataclass(frozen=True)
class FeatureConfig:
    """How features are built."""

    split: SplitConfig = field(default_factory=SplitConfig)
    """Periods and groups."""


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
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
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


def build_features(dataset: Dataset, config: FeatureConfig | None = None) -> tuple[FeatureSet, bool]:
    """Build the feature set of a dataset, or find it built; return it and whether it had been there.

    Raises
    ------
    HistoryTooShortError
        The trace is too short to be cut into training, validation and test.
    """
    config = config or FeatureConfig()
    fingerprint = content_sha256(
        {"dataset": dataset.fingerprint, "pipeline": PIPELINE_VERSION, "config": dataclasses.asdict(config)}
    )
    folder = dataset.path / FOLDER
    if (folder / MANIFEST).is_file() and read_manifest(folder, made_by="")["fingerprint"] == fingerprint:
        return FeatureSet.open(dataset.path), True
    if dataset.n_windows == 0:
        raise HistoryTooShortError(
            f"{dataset.path}: no usage windows, and features are made of usage; ingest the trace's usage files, too "
            f"(`reclaim inspect {dataset.path}` says what is there)"
        )
    first_us, last_us = _span_us(dataset)
    needed_s, span_s = 4 * HORIZONS_S[1], (last_us - first_us) // 1_000_000
    if span_s < needed_s:
        raise HistoryTooShortError(
            f"{dataset.path}: the trace spans {span_s} s; training, validation and test with a horizon of "
            f"{HORIZONS_S[1]} s need at least {needed_s} s"
        )
    cuts = cuts_us(first_us, last_us, config.split)
    n = dataset.n_windows
    with replaced_folder(folder) as work:
        arrays = {
            name: open_memmap(work / f"{name}.npy", mode="w+", dtype=dtype, shape=(n, *shape))
            for name, (dtype, shape) in _ARRAYS.items()
        }
        bucket_start = [0]
        n_oom, by_mean, measured = 0, np.zeros(len(RESOURCES)), np.zeros(len(RESOURCES))
        for bucket in tqdm(range(dataset.n_buckets), desc="features", unit="bucket", disable=None, leave=False):
            windows = dataset.windows(bucket)
            rows = slice(bucket_start[-1], bucket_start[-1] + len(windows))
            bucket_start.append(rows.stop)
            oom_task, oom_us = oom_events(windows, dataset.events(bucket))
            n_oom += len(oom_us)
            made = targets(windows, oom_task, oom_us, last_us)
            mean_alone, known = measured_by_mean(windows)
            by_mean += mean_alone.sum(axis=0)
            measured += known.sum(axis=0)
            arrays["x"][rows] = FeatureState().advance(windows.task_numbers(), windows)
            arrays["y"][rows] = made.value
            arrays["oom"][rows] = made.oom if dataset.manifest["counts"]["events"] else np.nan
            arrays[s.END_US][rows] = windows.end_us
            arrays["period"][rows] = periods(windows.end_us, cuts)
            arrays["group"][rows] = groups(windows, config.split)
        split = np.zeros((len(PERIODS), len(GROUPS)), np.int64)
        np.add.at(split, (arrays["period"], arrays["group"]), 1)
        manifest = {
            "fingerprint": fingerprint,
            "dataset": dataset.fingerprint,
            "pipeline": PIPELINE_VERSION,
            "config": dataclasses.asdict(config),
            "features": list(FEATURE_NAMES),
            "targets": list(TARGETS),
            "horizons_s": list(HORIZONS_S),
            "oom_definition": OOM_DEFINITION,
            "oom_events": n_oom,
            "measured_by_mean": dict(zip(RESOURCES, (by_mean / np.maximum(measured, 1)).tolist(), strict=True)),
            "cuts_us": list(cuts),
            "span_us": [first_us, last_us],
            "bucket_start": bucket_start,
            "rows": {p: dict(zip(GROUPS, split[k].tolist(), strict=True)) for k, p in enumerate(PERIODS)},
        }
        for array in arrays.values():
            array.flush()
        write_json(work / MANIFEST, manifest)
    return FeatureSet.open(dataset.path), False


def _span_us(dataset: Dataset) -> tuple[int, int]:
    """Return the start of the first and the end of the last window of the trace."""
    seen = dataset.table("tasks").select([s.FIRST_SEEN_US, s.LAST_SEEN_US]).to_pandas()
    return int(seen[s.FIRST_SEEN_US].min()), int(seen[s.LAST_SEEN_US].max())
