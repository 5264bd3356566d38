"""Builds the feature set of a dataset: each bucket is a job of its own, and their results are joined in order."""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.lib.format import dtype_to_descr, open_memmap, write_array_header_1_0
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data import schema as s
from reclaim.data.core.engine.workers import HERE, Engine, Workers
from reclaim.data.core.files import content_sha256, remove_left_behind, replaced_folder, write_json
from reclaim.data.core.stores.places import in_store
from reclaim.data.core.stores.transfer import publish_folder
from reclaim.data.dataset import MANIFEST, Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError, TraceError
from reclaim.data.oom import oom_definition
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import measured_by_mean
from reclaim.features.bucket import Folding, Rows
from reclaim.features.feature_set import FOLDER, JOURNAL, FeatureSet, array_path, array_shapes, write_journal
from reclaim.features.fold.collection_ooms import OomJournal
from reclaim.features.registry import FEATURE_NAMES, N_FEATURES, PIPELINE_VERSION
from reclaim.features.sample import ROWS, SAMPLING, RowCounts, SampleConfig, Shares
from reclaim.features.splits import VALID, SplitConfig, SplitCounts, cuts_us, in_period
from reclaim.features.targets import AN_HOUR, HORIZONS_S, TARGETS

_SPARE: Final = 8
"""An array is made an eighth larger, so that the next bucket, of about as many rows, fits into it."""


@dataclass(frozen=True)
class FeatureConfig:
    """Settings of the feature build."""

    split: SplitConfig = field(default_factory=SplitConfig)
    """Periods and groups."""
    monday_s: int = 0
    """A midnight that begins a Monday, in the cell's own zone: seconds on the trace's clock."""
    rows: str = "sample"
    """``sample`` keeps the features of a bounded number of rows, those that training reads, and computes others again
    when they are asked for; ``all`` keeps those of every row, 464 bytes each, for study."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Rows that are kept."""

    def __post_init__(self) -> None:
        latest_s = s.LATEST_US // 1_000_000
        if abs(self.monday_s) > latest_s:
            raise ConfigError(
                f"monday_s is seconds on the trace's clock, at most {latest_s} either way; got {self.monday_s}"
            )
        if self.rows not in ROWS:
            raise ConfigError(f"rows must be one of {', '.join(ROWS)}, got {self.rows!r}")

    @property
    def whole(self) -> bool:
        """True if the features of every row are kept."""
        return self.rows == "all"


@dataclass(frozen=True)
class _Job:
    """One bucket to fold; ``shares`` is None where every row is kept."""

    folding: Folding
    bucket: int
    first: int
    shares: Shares | None
    room: _Room


class _Room:
    """Memory of features that were written, reused for the next buckets of this process.

    Clearing the pages of new arrays of this size took a tenth of the time.
    """

    def __init__(self) -> None:
        self._free: deque[NDArray[np.float32]] = deque()
        self._lent: set[int] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Send nothing to another process: no memory comes back from it."""
        return _Room, ()

    def features(self, rows: int) -> NDArray[np.float32]:
        """Return an array from the free ones, or a new one; shape (rows, n_features), uninitialised."""
        size = rows * N_FEATURES
        try:
            memory = self._free.popleft()
        except IndexError:
            memory = np.empty(0, np.float32)
        if memory.size < size:
            memory = np.empty(size + size // _SPARE, np.float32)
        self._lent.add(id(memory))
        return memory[:size].reshape(rows, N_FEATURES)

    def free(self, x: NDArray[np.float32]) -> None:
        """Take back the memory of an array of ``features``; one from another process is ignored."""
        memory = x.base
        if isinstance(memory, np.ndarray) and id(memory) in self._lent:
            self._lent.remove(id(memory))
            self._free.append(memory)


class _Facts(NamedTuple):
    """Facts of all rows of a bucket, kept or not.

    Attributes
    ----------
    ends : OomJournal
        Only of the windows that reveal an end out of memory.
    counts : SplitCounts
    n_oom : int
        OOM events by the label, recorded or derived.
    by_mean, measured : int64, shape (n_resources,)
        Windows whose demand rests on the mean, and windows with any demand.
    granted, limits : int64 and float64, shape (n_resources,)
        Validation rows that have a limit, and the sum of these limits.
    """

    ends: OomJournal
    counts: SplitCounts
    n_oom: int
    by_mean: NDArray[np.int64]
    measured: NDArray[np.int64]
    granted: NDArray[np.int64]
    limits: NDArray[np.float64]


_PASSING: Final[dict[str, tuple[Any, tuple[int, ...]]]] = {"collection": (np.int64, (0,)), "moment": (np.int32, (0,))}
"""Columns of the rows that are kept until the features of their collections are written."""


def build_features(
    dataset: Dataset,
    config: FeatureConfig | None = None,
    *,
    engine: Engine = HERE,
) -> tuple[FeatureSet, bool]:
    """Build the feature set of a dataset, or find it built; return it and whether it existed.

    Parameters
    ----------
    dataset : Dataset
    config : FeatureConfig or None
    engine : Engine
        The result does not depend on it, to the byte.

    Raises
    ------
    HistoryTooShortError
        The trace is too short to be cut into training, validation and test.
    ConfigError
        Another process is building the features of this dataset, or Ray is asked for and not installed.
    OSError
        The disk has no room for them; nothing is kept of the attempt.
    """
    config = config or FeatureConfig()
    fingerprint = content_sha256(
        {
            "dataset": dataset.fingerprint,
            "pipeline": PIPELINE_VERSION,
            "config": dataclasses.asdict(config),
            "labels": [TARGETS, HORIZONS_S, oom_definition(dataset.manifest)],
            "gap": "by the reach of each row",
            "sampling": SAMPLING,
        }
    )
    folder = dataset.home / FOLDER
    present = built_features(dataset)
    if present is not None and present.manifest.get("fingerprint") == fingerprint:
        remove_left_behind(folder)
        return present, True
    span_us = _span_us(dataset)
    folding = Folding(
        dataset, config.split, dataset.cell(config.monday_s * 1_000_000), cuts_us(*span_us, config.split), span_us[1]
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replaced_folder(folder) as work, engine.pool() as pool:
        facts = _fill(folding, config, work, pool)
        manifest = {
            "fingerprint": fingerprint,
            "dataset": dataset.fingerprint,
            "pipeline": PIPELINE_VERSION,
            "config": dataclasses.asdict(config),
            "features": list(FEATURE_NAMES),
            "horizons_s": list(HORIZONS_S),
            "oom_definition": oom_definition(dataset.manifest),
            "cuts_us": list(folding.cuts_us),
            "span_us": list(span_us),
            "whole": config.whole,
            **facts,
        }
        write_json(work / MANIFEST, manifest)
    if in_store(dataset.path):
        publish_folder(folder, dataset.path / FOLDER, MANIFEST)
    return FeatureSet.open(dataset.path), False


def built_features(dataset: Dataset) -> FeatureSet | None:
    """Return the dataset's feature set if it has one that can be used, of whatever configuration."""
    try:
        features = FeatureSet.open(dataset.path)
        _ = features.journal
        return features
    except (ConfigError, TraceError):  # there is none, or it is damaged or of another pipeline: it has to be built
        return None


def _fill(folding: Folding, config: FeatureConfig, work: Path, pool: Workers) -> dict[str, Any]:
    """Write every array into the folder; return their entries of the manifest."""
    dataset = folding.dataset
    bucket_start = np.cumsum([0, *(dataset.n_windows_of(b) for b in range(dataset.n_buckets))]).tolist()
    shares = None if config.whole else _shares(folding, config.sample, pool, bucket_start[-1])
    room = _Room()
    jobs = [_Job(folding, b, first, shares, room) for b, first in enumerate(bucket_start[:-1])]
    shapes = array_shapes(0) | _PASSING
    facts: list[_Facts] = []
    with (
        ExitStack() as files,
        tqdm(total=bucket_start[-1], desc="features", unit="window", unit_scale=True, disable=None, leave=False) as bar,
        closing(pool.each(_fold, jobs)) as results,
    ):
        written = {
            name: files.enter_context(_Written(array_path(work, name), dtype, shape[1:]))
            for name, (dtype, shape) in shapes.items()
        }
        for job, (columns, of_bucket) in zip(jobs, results, strict=True):
            for name, column in written.items():
                column.append(columns[name])
            room.free(columns["x"])
            facts.append(of_bucket)
            bar.update(bucket_start[job.bucket + 1] - job.first)
        kept = len(written["row"])
    _write_of_collections(folding, work, pool, [of.ends for of in facts])
    by_mean, measured, granted, limits = (
        np.sum([getattr(of, name) for of in facts], axis=0) for name in ("by_mean", "measured", "granted", "limits")
    )
    return {
        "bucket_start": bucket_start,
        "kept": kept,
        "oom_events": sum(of.n_oom for of in facts),
        "measured_by_mean": dict(zip(RESOURCES, (by_mean / np.maximum(measured, 1)).tolist(), strict=True)),
        "mean_limit": [float(of / k) if k else None for of, k in zip(limits, granted, strict=True)],
        **SplitCounts.added([of.counts for of in facts]).facts(),
    }


def _shares(folding: Folding, config: SampleConfig, pool: Workers, n: int) -> Shares:
    """Return the shares of rows that are kept; where all fit, nothing is counted first."""
    if n <= min(config.train, config.valid, config.test):
        return Shares.whole()
    jobs = [(folding, bucket) for bucket in range(folding.dataset.n_buckets)]
    with closing(pool.each(_count, jobs)) as counts:
        return Shares.within(list(counts), config)


def _count(job: tuple[Folding, int]) -> RowCounts:
    """Count the rows of a bucket that may be kept."""
    folding, bucket = job
    windows = folding.dataset.windows(bucket, measured=False)
    return RowCounts.of(windows, *folding.period_and_group(windows))


def _fold(job: _Job) -> tuple[dict[str, NDArray[Any]], _Facts]:
    """Fold one bucket: return the columns of the rows that are kept, and the facts of all."""
    folding = job.folding
    windows = folding.dataset.windows(job.bucket, owned=False)
    labels, n_oom = folding.labels(job.bucket, windows)
    kept: Rows | slice = slice(None)  # every row: nothing is copied
    rows, weight = np.arange(len(windows)), np.ones(len(windows), np.float32)
    if job.shares is not None:
        rows, weight = job.shares.choose(windows, labels.period, labels.group, labels.ooms())
        kept = rows
    x = job.room.features(len(rows))
    moment, died = folding.fold_into(x, windows, rows)
    starts = windows.task_starts()
    limit = labels.limit[in_period(VALID, labels.period, labels.group)].astype(np.float64)
    by_mean, measured = measured_by_mean(windows)
    ends = np.flatnonzero(died >= 0)
    columns = {
        **labels.take(kept)._asdict(),
        "x": x,
        "row": job.first + rows,
        "first": job.first + np.repeat(starts[:-1], np.diff(starts))[kept],
        "weight": weight,
        "collection": windows.collection_id[kept],
        "moment": moment[kept],
    }
    return columns, _Facts(
        ends=OomJournal.of_rows(windows.collection_id[ends], moment[ends], died[ends]),
        counts=SplitCounts.of(labels._asdict(), folding.end_us),
        n_oom=n_oom,
        by_mean=_counts(by_mean),
        measured=_counts(measured),
        granted=_counts(limit > 0),
        limits=np.where(limit > 0, limit, 0.0).sum(axis=0),
    )  # fmt: skip


def _counts(columns: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how often each column is true: takes a twentieth of the time of ``sum``, which goes along the rows."""
    return np.array([np.count_nonzero(column) for column in columns.T], np.int64)


def _write_of_collections(folding: Folding, work: Path, pool: Workers, of_buckets: list[OomJournal]) -> None:
    """Write the features of collections, and the journal from which they can be folded again."""
    ends = OomJournal.joined(of_buckets)
    met = np.unique(ends.collection)
    jobs = [(folding, bucket, met) for bucket in range(folding.dataset.n_buckets if len(met) else 0)]
    with closing(pool.each(_count_windows, jobs)) as counted:
        journal = OomJournal.joined([ends._replace(taken=np.zeros_like(ends.taken)), *counted])
    write_journal(work / JOURNAL, journal)
    opened = {name: array_path(work, name) for name in ("x", *_PASSING)}
    x, collection, moment = (open_memmap(opened[name], mode="r+") for name in ("x", "collection", "moment"))
    journal.write(collection, moment, x)
    del x, collection, moment
    for name in _PASSING:
        opened[name].unlink(missing_ok=True)


def _count_windows(job: tuple[Folding, int, NDArray[np.int64]]) -> OomJournal:
    """Count the windows of a bucket's tasks of some collections."""
    folding, bucket, collections = job
    windows = folding.dataset.windows_of(bucket, collections)
    return OomJournal.of_windows(windows)


class _Written:
    """An array on disk to which rows are appended; a context manager."""

    def __init__(self, path: Path, dtype: Any, row: tuple[int, ...]) -> None:
        self._path, self._dtype, self._row = path, np.dtype(dtype), row
        self._rows = 0

    def __enter__(self) -> _Written:
        self._file = self._path.open("w+b")
        try:
            with self._named():
                self._write_header()
        except OSError:
            with suppress(OSError):  # the same error, for bytes not written yet
                self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._named(), self._file:  # closing writes what a full disk did not take, from Python 3.14 on once more
            if kind is None:
                self._file.seek(0)
                self._write_header()

    def __len__(self) -> int:
        return self._rows

    def append(self, rows: NDArray[Any]) -> None:
        """Write rows behind those that are there; OSError names the file where the disk is full."""
        with self._named():
            self._file.write(np.ascontiguousarray(rows, self._dtype).reshape(-1).view(np.uint8).data)
        self._rows += len(rows)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self._path)) from error

    def _write_header(self) -> None:
        """Write the header; numpy leaves room in it for any number of rows."""
        shape = (self._rows, *self._row)
        header = {"descr": dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        write_array_header_1_0(self._file, header)
        self._file.flush()


def _span_us(dataset: Dataset) -> tuple[int, int]:
    """Return the start of the first and the end of the last window of the trace, in µs on its clock."""
    if dataset.n_windows == 0:
        raise HistoryTooShortError(
            f"{dataset.path}: no usage windows, and features are made of usage; ingest the trace's usage files, too "
            f"(`reclaim inspect {dataset.path}` says what is there)"
        )
    seen = dataset.table("tasks", [s.FIRST_SEEN_US, s.LAST_SEEN_US])
    first_us, last_us = pc.min(seen[s.FIRST_SEEN_US]).as_py(), pc.max(seen[s.LAST_SEEN_US]).as_py()
    needed_s, span_s = 4 * HORIZONS_S[AN_HOUR], (last_us - first_us) // 1_000_000
    if span_s < needed_s:
        raise HistoryTooShortError(
            f"{dataset.path}: the trace spans {span_s} s; training, validation and test with a horizon of "
            f"{HORIZONS_S[AN_HOUR]} s need at least {needed_s} s"
        )
    return first_us, last_us
