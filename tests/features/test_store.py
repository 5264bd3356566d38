"""The feature set: rows line up with the dataset, splits do not leak, and a second run does nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.ingest import IngestConfig, ingest
from reclaim.data.store import Dataset
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.splits import GROUPS, IN_ALLOC, PERIODS, SEEN, TEST_UNSEEN, TRAIN, VALID, SplitConfig
from reclaim.features.state import FeatureState
from reclaim.features.store import FeatureSet
from reclaim.features.targets import HORIZONS_S

Maker = Callable[..., dict[str, Any]]
S = 1_000_000


@pytest.fixture
def dataset(tmp_path: Path, window: Maker, event: Maker, write_shard: Callable[..., Path]) -> Dataset:
    """Return forty tasks over ten hours, a tenth of them inside an alloc instance."""
    rows, events = [], []
    for task in range(40):
        ids = {"collection_id": str(1000 + task), "alloc_collection_id": "5" if task % 10 == 0 else "0"}
        ids |= {"alloc_instance_index": "0"} if task % 10 == 0 else {}
        events.append(event(0, 3, **ids))
        rows += [
            window(600 + 300 * k, **ids, maximum_usage={"cpus": 0.2, "memory": 0.1 + k / 1000}) for k in range(120)
        ]
    write_shard(tmp_path / "cell", "instance_usage-000000000000", rows)
    write_shard(tmp_path / "cell", "instance_events-000000000000", events)
    return ingest(tmp_path / "cell", tmp_path / "dataset", IngestConfig(buckets=3)).dataset


def test_rows_line_up_with_the_usage_of_the_buckets(dataset: Dataset) -> None:
    features, there = build_features(dataset)
    assert not there
    assert len(features) == dataset.n_windows
    for bucket in range(dataset.n_buckets):
        windows = dataset.windows(bucket)
        rows = slice(*features.bucket_start[bucket : bucket + 2])
        assert np.array_equal(features.end_us[rows], windows.end_us)
        live = FeatureState().advance(windows.task_numbers(), windows)
        assert np.array_equal(features.x[rows], live, equal_nan=True)


def test_periods_follow_time_groups_follow_collections_and_targets_stop_a_horizon_short(dataset: Dataset) -> None:
    features, _ = build_features(dataset)
    train_us, valid_us = features.cuts_us
    train, valid, test = features.train_rows(), features.valid_rows(), features.test_rows()
    assert features.end_us[train].max() < train_us <= features.end_us[valid].min()
    assert features.end_us[valid].max() < valid_us <= features.end_us[test].min()
    collections = np.concatenate([dataset.windows(b).collection_id for b in range(dataset.n_buckets)])
    in_alloc = np.concatenate([dataset.windows(b).in_alloc for b in range(dataset.n_buckets)])
    assert in_alloc.any()
    assert not in_alloc[np.concatenate([train, valid, test])].any()
    unseen = set(collections[features.test_rows(unseen_only=True)])
    assert unseen
    assert not unseen & set(collections[train])
    assert not unseen & set(collections[valid])
    for rows, targets_of, until in (
        (train, features.train_targets, train_us),
        (valid, features.valid_targets, valid_us),
    ):
        y, oom = targets_of(rows)
        for h, horizon_s in enumerate(HORIZONS_S):
            beyond = features.end_us[rows] + (horizon_s + 300) * S > until  # its last window may reach beyond it
            assert beyond.any()
            assert np.isnan(y[beyond, :, h]).all()
            assert np.isnan(oom[beyond, h]).all()
            assert np.array_equal(y[~beyond, :, h], features.y[rows][~beyond, :, h], equal_nan=True)
    counted = features.manifest["rows"]
    assert counted[PERIODS[TRAIN]][GROUPS[SEEN]] == len(train)
    assert sum(sum(groups.values()) for groups in counted.values()) == len(features)
    assert counted[PERIODS[VALID]][GROUPS[IN_ALLOC]] > 0
    assert counted[PERIODS[VALID]][GROUPS[TEST_UNSEEN]] > 0


def test_run_again_it_does_nothing_and_other_settings_replace_it(dataset: Dataset) -> None:
    first, _ = build_features(dataset)
    before = {p.name: p.stat().st_mtime_ns for p in first.path.iterdir()}
    again, there = build_features(dataset)
    assert there
    assert {p.name: p.stat().st_mtime_ns for p in again.path.iterdir()} == before
    other, there = build_features(dataset, FeatureConfig(SplitConfig(train_share=0.4)))
    assert not there
    assert other.cuts_us[0] < first.cuts_us[0]
    assert sorted(p.name for p in dataset.path.iterdir() if "partial" in p.name) == []


def test_killed_half_way_the_old_features_stay_and_a_second_run_ends_the_same(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, _ = build_features(dataset)
    whole = {p.name: p.read_bytes() for p in reference.path.iterdir()}
    config = FeatureConfig(SplitConfig(train_share=0.4))
    with monkeypatch.context() as patch:
        patch.setattr(FeatureState, "advance", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_features(dataset, config)
    assert {p.name: p.read_bytes() for p in reference.path.iterdir()} == whole
    build_features(dataset, config)
    build_features(dataset)
    assert {p.name: p.read_bytes() for p in reference.path.iterdir()} == whole


def test_a_dataset_without_features_says_which_command_makes_them(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reclaim features .*dataset"):
        FeatureSet.open(dataset.path)
    with pytest.raises(ConfigError, match=r"nowhere: no such folder; `reclaim ingest SOURCE"):
        FeatureSet.open(tmp_path / "nowhere")


def test_features_of_another_pipeline_are_refused(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    build_features(dataset)
    monkeypatch.setattr("reclaim.features.store.PIPELINE_VERSION", "another")
    with pytest.raises(ConfigError, match="made by another feature pipeline"):
        FeatureSet.open(dataset.path)


def test_a_trace_too_short_to_split_says_both_lengths(
    tmp_path: Path, window: Maker, write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "cell", "instance_usage-000000000000", [window(600 + 300 * k) for k in range(5)])
    dataset = ingest(tmp_path / "cell", tmp_path / "short", IngestConfig(buckets=1)).dataset
    with pytest.raises(HistoryTooShortError, match=r"spans 1500 s; .* at least 14400 s"):
        build_features(dataset)


def test_shares_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train_share must be between 0 and 1, got 1.5"):
        SplitConfig(train_share=1.5)
    with pytest.raises(ConfigError, match="must leave time to test"):
        SplitConfig(train_share=0.7, valid_share=0.3)


def test_a_dataset_without_usage_is_refused_with_what_is_missing(
    tmp_path: Path, event: Maker, write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "cell", "instance_events-000000000000", [event(0, 3)])
    dataset = ingest(tmp_path / "cell", tmp_path / "dataset", IngestConfig(buckets=1)).dataset
    with pytest.raises(HistoryTooShortError, match="no usage windows, and features are made of usage"):
        build_features(dataset)
