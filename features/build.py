"""Builds the feature set of a dataset: features, targets and splits of every usage window, bucket by bucket."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.format import open_memmap
from tqdm import tqdm

from reclaim.data import schema as s
from reclaim.data.errors import HistoryTooShortError
from reclaim.data.schema import RESOURCES
from reclaim.data.store import MANIFEST, Dataset, content_sha256, read_manifest, replaced_folder, write_json
from reclaim.data.windows import measured_by_mean
from reclaim.features.registry import FEATURE_NAMES, PIPELINE_VERSION
from reclaim.features.splits import GROUPS, PERIODS, SplitConfig, cuts_us, groups, periods
from reclaim.features.state import FeatureState
from reclaim.features.store import ARRAYS, FOLDER, FeatureSet
from reclaim.features.targets import HORIZONS_S, OOM_DEFINITION, TARGETS, oom_events, targets


@dataclass(frozen=True)
class FeatureConfig:
    """How features are built."""

    split: SplitConfig = field(default_factory=SplitConfig)
    """Periods and groups."""


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
            for name, (dtype, shape) in ARRAYS.items()
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
