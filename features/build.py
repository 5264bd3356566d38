"""Builds the feature set of a dataset: each bucket on its own, then, if wanted, the features of related tasks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from tqdm import tqdm

from reclaim.data import schema as s
from reclaim.data.core.files import content_sha256, remove_left_behind, replaced_folder, write_json
from reclaim.data.dataset import MANIFEST, Dataset, bucket_name
from reclaim.data.errors import ConfigError, HistoryTooShortError, TraceError
from reclaim.data.oom import oom_columns, oom_definition, oom_events
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Cell, measured_by_mean
from reclaim.features.feature_set import FOLDER, FeatureSet, array_path, array_shapes
from reclaim.features.fold.batch import fold_tasks
from reclaim.features.fold.collection_ooms import fold_collection_ooms
from reclaim.features.fold.related import Tasks, fold_related
from reclaim.features.registry import PIPELINE_VERSION, SIGNALS, feature_names
from reclaim.features.splits import SplitConfig, cuts_us, groups, inside_period, periods, split_counts
from reclaim.features.targets import HORIZONS_S, TARGETS, measured_by, targets

_ROWS_AT_ONCE: Final = 4_096
"""Rows of features held before they are written: 2 MB, which a core's own cache holds."""

_LATEST_S: Final = 2**59 // 1_000_000
"""Eighteen thousand years."""


@dataclass(frozen=True)
class FeatureConfig:
    """Settings of the feature build."""

    split: SplitConfig = field(default_factory=SplitConfig)
    """Periods and groups."""
    monday_s: int = 0
    """A midnight that begins a Monday, in the cell's own zone: seconds on the trace's clock."""
    related: bool = False
    """Adds the features of related tasks to each row: those of its collection, its user and its logical name."""

    def __post_init__(self) -> None:
        if abs(self.monday_s) > _LATEST_S:
            raise ConfigError(
                f"monday_s is seconds on the trace's clock, at most {_LATEST_S} either way; got {self.monday_s}"
            )


@dataclass(frozen=True)
class _Bucket:
    """Result of a bucket's worker.

    Attributes
    ----------
    tasks : Tasks
    n_oom : int
        OOM events by the label, recorded or derived.
    by_mean, measured : int64, shape (n_resources,)
        Windows whose demand had only the mean to go by, and those that had any.
    """

    tasks: Tasks
    n_oom: int
    by_mean: NDArray[np.int64]
    measured: NDArray[np.int64]


def build_features(
    dataset: Dataset, config: FeatureConfig | None = None, *, workers: int = 0
) -> tuple[FeatureSet, bool]:
    """Build the feature set of a dataset, or find it built; return it and whether it had been there.

    Parameters
    ----------
    dataset : Dataset
    config : FeatureConfig or None
    workers : int
        Threads; 0: one for each core. The result is the same to the byte.

    Raises
    ------
    HistoryTooShortError
        The trace is too short to be cut into training, validation and test.
    ConfigError
        Another process is building the features of this dataset.
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
        }
    )
    folder = dataset.path / FOLDER
    present = built_features(dataset)
    if present is not None and present.manifest.get("fingerprint") == fingerprint:
        remove_left_behind(folder)
        return present, True
    span_us = _span_us(dataset)
    cuts = cuts_us(*span_us, config.split)
    with replaced_folder(folder) as work:
        facts = _fill(dataset, config, work, cuts, span_us[1], workers or len(os.sched_getaffinity(0)))
        manifest = {
            "fingerprint": fingerprint,
            "dataset": dataset.fingerprint,
            "pipeline": PIPELINE_VERSION,
            "config": dataclasses.asdict(config),
            "features": list(feature_names(related=config.related)),
            "horizons_s": list(HORIZONS_S),
            "oom_definition": oom_definition(dataset.manifest),
            "cuts_us": list(cuts),
            "span_us": list(span_us),
            **facts,
        }
        write_json(work / MANIFEST, manifest)
    return FeatureSet.open(dataset.path), False


def built_features(dataset: Dataset) -> FeatureSet | None:
    """Return the dataset's feature set if it has one that can be used, of whatever configuration."""
    try:
        return FeatureSet.open(dataset.path)
    except (ConfigError, TraceError):  # there is none, or it is damaged or of another pipeline: to be built
        return None


def _new_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Return a new array on disk with all its room taken: a map that finds the disk full kills the process unheard."""
    try:
        array = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    return array


def _fill(
    dataset: Dataset, config: FeatureConfig, work: Path, cuts: tuple[int, int], trace_end_us: int, workers: int
) -> dict[str, Any]:
    """Write every array into the folder; return what the manifest says of them."""
    bucket_start = np.cumsum([0, *(_n_rows(dataset, b) for b in range(dataset.n_buckets))])
    n = int(bucket_start[-1])
    published = n if config.related else 0
    passing: dict[str, tuple[Any, tuple[int, ...]]] = {name: (np.int32, (n,)) for name in ("moment", "died")}
    passing["share"] = (np.int32, (published, len(SIGNALS)))
    shapes = array_shapes(n, len(feature_names(related=config.related))) | passing
    arrays = {name: _new_array(array_path(work, name), dtype, shape) for name, (dtype, shape) in shapes.items()}
    cell = dataset.cell(config.monday_s * 1_000_000)
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(total=n, desc="features", unit="window", unit_scale=True, disable=None, leave=False) as bar,
    ):

        def fill(bucket: int) -> _Bucket:
            first, stop = bucket_start[bucket : bucket + 2].tolist()
            filled = _fill_bucket(dataset, config, cell, bucket, first, work, arrays, cuts, trace_end_us)
            bar.update(stop - first)
            return filled

        buckets = list(pool.map(fill, range(dataset.n_buckets)))
    tasks = Tasks(*(np.concatenate(column) for column in zip(*(b.tasks for b in buckets), strict=True)))
    fold_collection_ooms(tasks, arrays["moment"], arrays["died"], arrays["x"])
    if config.related:
        fold_related(tasks, arrays["moment"], arrays["share"], arrays["x"], workers)
    for name in passing:
        del arrays[name]
        array_path(work, name).unlink()
    counts = split_counts(arrays, trace_end_us)
    measured = np.maximum(sum(b.measured for b in buckets), 1)
    by_mean = sum(b.by_mean for b in buckets) / measured
    return {
        "bucket_start": bucket_start.tolist(),
        "oom_events": sum(b.n_oom for b in buckets),
        "measured_by_mean": dict(zip(RESOURCES, by_mean.tolist(), strict=True)),
        **counts,
    }


def _fill_bucket(
    dataset: Dataset,
    config: FeatureConfig,
    cell: Cell,
    bucket: int,
    first: int,
    work: Path,
    arrays: Mapping[str, np.memmap[Any, Any]],
    cuts: tuple[int, int],
    trace_end_us: int,
) -> _Bucket:
    """Write the rows of one bucket, which begin at row ``first``: all but the features of related tasks."""
    windows = dataset.windows(bucket)
    rows = slice(first, first + len(windows))
    starts = windows.task_starts()
    with array_path(work, "x").open("r+b") as file:  # half the time that it takes through the memory map
        file.seek(arrays["x"].offset + first * arrays["x"].strides[0])
        x = np.empty((max(_ROWS_AT_ONCE, int(np.diff(starts).max(initial=0))), arrays["x"].shape[1]), np.float32)
        for part in _parts(starts):
            low, high = int(part[0]), int(part[-1])
            here = slice(first + low, first + high)
            fold_tasks(
                windows.take(slice(low, high)), part - low, cell, x[: high - low], arrays[s.END_US][here],
                arrays["moment"][here], arrays["died"][here], arrays["share"][here],
            )  # fmt: skip
            file.write(x[: high - low].data.cast("B"))
    oom_task, oom_us = oom_events(windows, dataset.events(bucket, oom_columns(dataset.manifest)))
    targets(windows, oom_task, oom_us, trace_end_us, arrays["y"][rows], arrays["oom"][rows])
    if not dataset.manifest["counts"]["events"]:
        arrays["oom"][rows] = np.nan
    arrays["limit"][rows] = windows.limit
    arrays["first"][rows] = first + np.repeat(starts[:-1], np.diff(starts))
    arrays["period"][rows] = periods(arrays[s.END_US][rows], cuts)
    arrays["inside"][rows] = inside_period(arrays["period"][rows], measured_by(windows), cuts)
    arrays["group"][rows] = groups(windows, config.split)
    by_mean, measured = measured_by_mean(windows)
    task = starts[:-1]
    tasks = Tasks(
        windows.collection_id[task], windows.user[task], windows.name[task], first + task, first + starts[1:]
    )  # fmt: skip
    return _Bucket(tasks, len(oom_us), by_mean.sum(axis=0), measured.sum(axis=0))


def _parts(starts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Return the starts of whole tasks, and the end of the last, ``_ROWS_AT_ONCE`` rows or one task at a time."""
    low = 0
    while low < len(starts) - 1:
        high = max(int(np.searchsorted(starts, starts[low] + _ROWS_AT_ONCE, side="right")) - 1, low + 1)
        yield starts[low : high + 1]
        low = high


def _n_rows(dataset: Dataset, bucket: int) -> int:
    return int(pq.read_metadata(dataset.path / "usage" / bucket_name(bucket)).num_rows)


def _span_us(dataset: Dataset) -> tuple[int, int]:
    """Return the start of the first and the end of the last window of the trace, in µs on its clock."""
    if dataset.n_windows == 0:
        raise HistoryTooShortError(
            f"{dataset.path}: no usage windows, and features are made of usage; ingest the trace's usage files, too "
            f"(`reclaim inspect {dataset.path}` says what is there)"
        )
    seen = dataset.table("tasks").select([s.FIRST_SEEN_US, s.LAST_SEEN_US]).to_pandas()
    first_us, last_us = int(seen[s.FIRST_SEEN_US].min()), int(seen[s.LAST_SEEN_US].max())
    needed_s, span_s = 4 * HORIZONS_S[1], (last_us - first_us) // 1_000_000
    if span_s < needed_s:
        raise HistoryTooShortError(
            f"{dataset.path}: the trace spans {span_s} s; training, validation and test with a horizon of "
            f"{HORIZONS_S[1]} s need at least {needed_s} s"
        )
    return first_us, last_us
