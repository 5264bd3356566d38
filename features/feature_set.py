"""Feature set on disk: one contiguous array per kind, rows aligned with the dataset's usage, memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.dataset import MANIFEST, Dataset, read_manifest
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.features.registry import PIPELINE_VERSION, feature_names
from reclaim.features.splits import TEST, TEST_UNSEEN, TRAIN, VALID, permitted
from reclaim.features.targets import HORIZONS_S, TARGETS

FOLDER: Final = "features"
"""Folder of a dataset that holds its feature set."""

_ARRAYS: Final[dict[str, tuple[Any, tuple[int, ...]]]] = {
    "y": (np.float32, (len(TARGETS), len(HORIZONS_S))),
    "oom": (np.float32, (len(HORIZONS_S),)),
    "inside": (np.bool_, (len(HORIZONS_S),)),
    s.END_US: (np.int64, ()),
    "period": (np.uint8, ()),
    "group": (np.uint8, ()),
    "limit": (np.float32, (len(RESOURCES),)),
    "first": (np.int64, ()),
}
"""File name → type, and shape of one row, of all arrays of fixed width."""


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
    inside : bool, shape (n, n_horizons)
        Whether all that the row's targets and label rest on was measured within its own period.
    end_us : int64, shape (n,), µs on the trace's clock
        The time t of the row: its window's end, or, where that came late, the end of the last one before.
    period, group : uint8, shape (n,)
        Positions in ``splits.PERIODS`` and ``splits.GROUPS``.
    limit : float32, shape (n, n_resources)
        In force at the row, in the trace's unit; NaN unknown.
    first : int64, shape (n,)
        First row of the row's task.
    bucket_start : int64, shape (n_buckets + 1,)
        First row of each bucket, and ``n``.
    """

    path: Path
    manifest: dict[str, Any]
    x: NDArray[np.float32]
    y: NDArray[np.float32]
    oom: NDArray[np.float32]
    inside: NDArray[np.bool_]
    end_us: NDArray[np.int64]
    period: NDArray[np.uint8]
    group: NDArray[np.uint8]
    limit: NDArray[np.float32]
    first: NDArray[np.int64]
    bucket_start: NDArray[np.int64]

    @classmethod
    def open(cls, dataset_path: Path | str) -> FeatureSet:
        """Open the feature set of a dataset.

        Raises
        ------
        ConfigError
            There is none, it is damaged, or it was made by another feature pipeline or from another dataset.
        """
        dataset = Dataset.open(dataset_path)
        folder = dataset.path / FOLDER
        command = f"reclaim features {dataset_path}"
        manifest = read_manifest(folder, made_by=command)
        if manifest.get("pipeline") != PIPELINE_VERSION or manifest.get("dataset") != dataset.fingerprint:
            raise ConfigError(f"{folder}: made by another feature pipeline or dataset; run `{command}` again")
        if missing := {"bucket_start", "features"} - manifest.keys():
            raise ConfigError(f"{folder / MANIFEST}: no {' and no '.join(sorted(missing))}; run `{command}` again")
        bucket_start = np.array(manifest["bucket_start"], np.int64)
        shapes = array_shapes(int(bucket_start[-1]), len(manifest["features"]))
        arrays = {name: _mapped(array_path(folder, name), *of, command) for name, of in shapes.items()}
        return cls(folder, manifest, bucket_start=bucket_start, **arrays)

    def __len__(self) -> int:
        return len(self.end_us)

    @property
    def mean_limit(self) -> tuple[float, ...]:
        """Mean limit of the validation rows per resource, in the trace's unit; NaN where there is none."""
        limit = self.limit[self.valid_rows()].astype(np.float64)
        granted = limit > 0
        n, total = granted.sum(axis=0), np.where(granted, limit, 0.0).sum(axis=0)
        return tuple(float(t / k) if k else float("nan") for t, k in zip(total, n, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns of ``x``."""
        return tuple(self.manifest["features"])

    @property
    def related(self) -> bool:
        """True if the features of related tasks are among them."""
        return self.names == feature_names(related=True)

    def check_holds(self, *, related: bool) -> None:
        """Raise ConfigError where a model reads the features of related tasks and they are not here."""
        if related and not self.related:
            raise ConfigError(
                f"{self.path}: the model reads the features of related tasks, which this feature set lacks; run "
                f"`reclaim features {self.path.parent} --set related=true`"
            )

    @property
    def fingerprint(self) -> str:
        """Hash over dataset, pipeline and configuration."""
        return str(self.manifest["fingerprint"])

    @property
    def role(self) -> str:
        """Use of the dataset, one of ``splits.ROLES``."""
        return str(self.manifest["config"]["split"]["role"])

    @property
    def cuts_us(self) -> tuple[int, int]:
        """Ends of the training and of the validation period."""
        train, valid = self.manifest["cuts_us"]
        return train, valid

    def train_rows(self) -> NDArray[np.int64]:
        """Return the rows to learn from: training period, seen collections."""
        return self._rows_of(TRAIN)

    def valid_rows(self) -> NDArray[np.int64]:
        """Return the rows to set margins on: validation period, all collections but those kept for the test."""
        return self._rows_of(VALID)

    def test_rows(self, *, unseen_only: bool = False) -> NDArray[np.int64]:
        """Return the rows to score on: test period, all collections or those never seen before it."""
        rows = self._rows_of(TEST)
        return rows[self.group[rows] == TEST_UNSEEN] if unseen_only else rows

    def targets(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (y, oom) of rows, NaN where one rests on anything measured after the row's own period."""
        inside = self.inside[rows]  # (n, H)
        y = np.where(inside[:, None, :], self.y[rows], np.float32(np.nan))
        return y, np.where(inside, self.oom[rows], np.float32(np.nan))

    def _rows_of(self, period: int) -> NDArray[np.int64]:
        return np.flatnonzero((self.period == period) & permitted(period, self.group))


def array_shapes(n: int, n_features: int) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return file name → type and shape of every array of ``n`` rows."""
    shapes = {name: (dtype, (n, *row)) for name, (dtype, row) in _ARRAYS.items()}
    return shapes | {"x": (np.float32, (n, n_features))}


def array_path(folder: Path, name: str) -> Path:
    """Return the file of an array of a feature set: one of ``array_shapes``."""
    return folder / f"{name}.npy"


def _mapped(path: Path, dtype: type[np.generic], shape: tuple[int, ...], made_by: str) -> np.memmap[Any, Any]:
    """Return an array of a feature set, mapped into memory; refuse one that is not what it should be."""
    try:
        array = open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: missing or damaged ({error}); run `{made_by}` again") from error
    if array.dtype != dtype or array.shape != shape:
        raise ConfigError(
            f"{path}: expected {np.dtype(dtype)} {shape}, found {array.dtype} {array.shape}; run `{made_by}` again"
        )
    return array
