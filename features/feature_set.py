"""Opens the feature set of a dataset: the rows that are kept, and any bucket of all rows, folded when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.stores.places import in_store
from reclaim.data.core.stores.transfer import fetch_folder
from reclaim.data.dataset import MANIFEST, Dataset, read_manifest
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.features.bucket import Bucket, Folding, Labels, known_targets
from reclaim.features.fold.collection_ooms import OomJournal
from reclaim.features.registry import FEATURE_NAMES, N_FEATURES, PIPELINE_VERSION
from reclaim.features.splits import (
    GROUPS,
    PERIODS,
    PERMITTED,
    TEST,
    TRAIN,
    VALID,
    SplitConfig,
    in_period,
)
from reclaim.features.targets import HORIZONS_S, TARGETS

FOLDER: Final = "features"
"""Folder of a dataset that holds its feature set."""

JOURNAL: Final = "ooms.npz"
"""File of the collections' ends out of memory (``OomJournal``)."""

_ARRAYS: Final[dict[str, tuple[Any, tuple[int, ...]]]] = {
    "row": (np.int64, ()),
    "first": (np.int64, ()),
    "weight": (np.float32, ()),
    "y": (np.float32, (len(TARGETS), len(HORIZONS_S))),
    "oom": (np.float32, (len(HORIZONS_S),)),
    "inside": (np.bool_, (len(HORIZONS_S),)),
    s.END_US: (np.int64, ()),
    "period": (np.uint8, ()),
    "group": (np.uint8, ()),
    "limit": (np.float32, (len(RESOURCES),)),
}
"""File name → type, and shape of one row, of all arrays of fixed width."""


@dataclass(frozen=True)
class FeatureSet:
    """Features, targets and splits of the rows that are kept, in the order of the dataset: bucket after bucket.

    Attributes
    ----------
    path : Path
    manifest : dict
    dataset : Dataset
    row : int64, shape (n,)
        Row of the dataset's usage, rising.
    first : int64, shape (n,)
        The same of the first window of the row's task.
    weight : float32, shape (n,)
        How many rows of the dataset a training row stands for; other rows stand for equally many each.
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
        That of the row's window, in the trace's unit; NaN unknown.
    bucket_start : int64, shape (n_buckets + 1,)
        First row of each bucket among those of the dataset, and how many these are.
    """

    path: Path
    manifest: dict[str, Any]
    dataset: Dataset
    row: NDArray[np.int64]
    first: NDArray[np.int64]
    weight: NDArray[np.float32]
    x: NDArray[np.float32]
    y: NDArray[np.float32]
    oom: NDArray[np.float32]
    inside: NDArray[np.bool_]
    end_us: NDArray[np.int64]
    period: NDArray[np.uint8]
    group: NDArray[np.uint8]
    limit: NDArray[np.float32]
    bucket_start: NDArray[np.int64]

    @classmethod
    def open(cls, dataset_path: Path | str) -> FeatureSet:
        """Open the feature set of a dataset; one in a store is fetched to the dataset's home unless it is there.

        Raises
        ------
        ConfigError
            There is none, it is damaged, or it was made by another feature pipeline or from another dataset.
        DataError
            The store broke off.
        """
        dataset = Dataset.open(dataset_path)
        folder = dataset.home / FOLDER
        command = _command(dataset_path)
        if in_store(dataset.path):
            try:
                fetch_folder(dataset.path / FOLDER, folder, MANIFEST)
            except FileNotFoundError as error:
                raise ConfigError(f"{dataset.path / FOLDER}: no {MANIFEST} in it; `{command}` makes one") from error
        manifest = read_manifest(folder, made_by=command)
        if manifest.get("pipeline") != PIPELINE_VERSION or manifest.get("dataset") != dataset.fingerprint:
            raise ConfigError(f"{folder}: made by another feature pipeline or dataset; run `{command}` again")
        if missing := {"bucket_start", "features", "kept"} - manifest.keys():
            raise ConfigError(f"{folder / MANIFEST}: no {' and no '.join(sorted(missing))}; run `{command}` again")
        bucket_start = np.array(manifest["bucket_start"], np.int64)
        if manifest["features"] != list(FEATURE_NAMES):
            raise ConfigError(
                f"{folder}: has {len(manifest['features'])} features that are not the {N_FEATURES} of this release; "
                f"run `{command}` again"
            )
        shapes = array_shapes(int(manifest["kept"]))
        arrays = {name: _mapped(array_path(folder, name), *of, command) for name, of in shapes.items()}
        return cls(folder, manifest, dataset, bucket_start=bucket_start, **arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make another process open it again, instead of sending all rows."""
        return _opened_again, (str(self.dataset.path.resolve()), self.fingerprint)

    @property
    def n_buckets(self) -> int:
        """Number of buckets of the dataset."""
        return len(self.bucket_start) - 1

    def __len__(self) -> int:
        """Return how many rows are kept."""
        return len(self.row)

    @property
    def whole(self) -> bool:
        """True if the features of every row are kept."""
        return bool(self.manifest["whole"])

    @property
    def mean_limit(self) -> tuple[float, ...]:
        """Mean limit of all validation rows per resource, in the trace's unit; NaN where there is none."""
        return tuple(float("nan") if mean is None else mean for mean in self.manifest["mean_limit"])

    @cached_property
    def folding(self) -> Folding:
        """The rules by which the rows became features."""
        config = self.manifest["config"]
        return Folding(
            self.dataset, SplitConfig(**config["split"]), self.dataset.cell(config["monday_s"] * 1_000_000),
            self.cuts_us, self.manifest["span_us"][1],
        )  # fmt: skip

    @cached_property
    def journal(self) -> OomJournal:
        """Ends out of memory of the dataset's collections."""
        return read_journal(self.path / JOURNAL, _command(self.dataset.path))

    def bucket(self, number: int) -> Bucket:
        """Return all rows of a bucket, folded as they are asked for."""
        first, stop = self.bucket_start[number : number + 2].tolist()
        stored = self.x[first:stop] if self.whole else None
        return Bucket(self.folding, self.journal, number, first, self.dataset.windows(number), stored)

    def by_bucket(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each bucket that has some of the dataset's rows, and their places in it; ``rows`` rise."""
        edges = np.searchsorted(rows, self.bucket_start)
        for bucket, (low, high) in enumerate(pairwise(edges.tolist())):
            if low < high:
                yield bucket, rows[low:high] - self.bucket_start[bucket]

    def check_whole(self) -> None:
        """Raise ConfigError where the features of some rows are not kept."""
        if not self.whole:
            raise ConfigError(
                f"{self.path}: holds the features of {len(self):,} of {self.bucket_start[-1]:,} rows, and all are "
                f"needed; run `reclaim features {self.dataset.path} --set rows=all`"
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

    @property
    def span(self) -> NDArray[np.datetime64]:
        """Start of the first and end of the last window of the dataset, as moments of a clock in UTC; shape (2,)."""
        return np.array(self.manifest["span_us"], "M8[us]")

    def empty_periods(self) -> dict[str, int]:
        """Return the periods with hardly any windows for their length, and how many: a wrong time stretches a dataset.

        They have less than a hundredth of what windows at a constant rate would be.
        """
        first_us, last_us = self.manifest["span_us"]
        share = np.diff(np.clip([first_us, *self.cuts_us, last_us], first_us, last_us)) / (last_us - first_us)
        rows = {name: sum(of.values()) for name, of in self.manifest["rows"].items()}
        few = share * self.bucket_start[-1] / 100
        return {name: rows[name] for name, least in zip(PERIODS, few, strict=True) if rows[name] < least}

    def outermost(self) -> tuple[str, str]:
        """Return the task of the first window of the dataset, and that of the last one: its name, else its key."""
        tasks = self.dataset.table("tasks", [*s.TASK_KEY, s.FIRST_SEEN_US, s.LAST_SEEN_US]).to_pydict()
        found = []
        for column, at_us in zip((s.FIRST_SEEN_US, s.LAST_SEEN_US), self.manifest["span_us"], strict=True):
            row = tasks[column].index(at_us)
            key = {name: [tasks[name][row]] for name in s.TASK_KEY}
            names = self.dataset.read("names", [s.POD], pa.table(key))[s.POD] if self.dataset.named else []
            found.append(str(names[0]) if len(names) else ", ".join(str(part) for (part,) in key.values()))
        return found[0], found[1]

    def train_rows(self) -> NDArray[np.int64]:
        """Return the places of the rows to learn from: training period, seen collections."""
        return self._rows_of(TRAIN)

    def valid_rows(self) -> NDArray[np.int64]:
        """Return the places of the rows to set margins on: validation period, all but collections kept for the test."""
        return self._rows_of(VALID)

    def stands_for(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return how many rows of the dataset each kept row of training or validation stands for; shape (n,).

        Those of validation stand for as many each, at least 1.
        """
        counts = self.manifest["rows"][PERIODS[VALID]]
        of_valid = sum(counts[GROUPS[g]] for g in PERMITTED[VALID]) / max(len(self.valid_rows()), 1) or 1.0
        return np.asarray(self.weight[rows] * np.where(self.period[rows] == VALID, np.float32(of_valid), np.float32(1)))

    def test_rows(self) -> NDArray[np.int64]:
        """Return the places of the rows to score on: test period, all collections."""
        return self._rows_of(TEST)

    def labels(self, rows: NDArray[np.int64]) -> Labels:
        """Return the labels of rows that are kept."""
        return Labels(*(getattr(self, name)[rows] for name in Labels._fields))

    def targets(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return (y, oom) of rows, NaN where one rests on anything measured after the row's own period."""
        return known_targets(self.y[rows], self.oom[rows], self.inside[rows])

    def _rows_of(self, period: int) -> NDArray[np.int64]:
        return np.flatnonzero(in_period(period, self.period, self.group))


def array_shapes(n: int) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return file name → type and shape of every array of ``n`` rows."""
    shapes = {name: (dtype, (n, *row)) for name, (dtype, row) in _ARRAYS.items()}
    return shapes | {"x": (np.float32, (n, N_FEATURES))}


def array_path(folder: Path, name: str) -> Path:
    """Return the file of an array of a feature set: one of ``array_shapes``."""
    return folder / f"{name}.npy"


def write_journal(path: Path, journal: OomJournal) -> None:
    """Write a journal into a file."""
    np.savez(path, **journal._asdict())


def read_journal(path: Path, made_by: str) -> OomJournal:
    """Return the journal in a file; ConfigError where it is missing or damaged."""
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            return OomJournal(*(file[name] for name in OomJournal._fields))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{path}: missing or damaged ({error}); run `{made_by}` again") from error


def _opened_again(dataset: str, fingerprint: str) -> FeatureSet:
    """Open a feature set in another process; ConfigError where another one is in its place since."""
    features = FeatureSet.open(dataset)
    if features.fingerprint != fingerprint:
        raise ConfigError(f"{features.path}: built with other settings while it was read; run again")
    return features


def _command(dataset: Path | str) -> str:
    """Return the command that builds a dataset's feature set."""
    return f"reclaim features {dataset}"


def _mapped(path: Path, dtype: type[np.generic], shape: tuple[int, ...], made_by: str) -> np.memmap[Any, Any]:
    """Return an array of a feature set, mapped into memory; refuse one of another type or shape."""
    try:
        array = open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: missing or damaged ({error}); run `{made_by}` again") from error
    if array.dtype != dtype or array.shape != shape:
        raise ConfigError(
            f"{path}: expected {np.dtype(dtype)} {shape}, found {array.dtype} {array.shape}; run `{made_by}` again"
        )
    return array
