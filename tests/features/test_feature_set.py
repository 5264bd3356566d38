"""The feature set: rows line up with the dataset, splits do not leak, and a second run does nothing."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.cli.results import of_features
from reclaim.data.core.files import write_json
from reclaim.data.dataset import FORMAT_VERSION, MANIFEST, Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.features import build
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FOLDER, FeatureSet, array_path, array_shapes
from reclaim.features.fold.batch import FeatureState
from reclaim.features.registry import FEATURE_NAMES, N_FEATURES, PIPELINE_VERSION
from reclaim.features.splits import GROUPS, IN_ALLOC, PERIODS, SEEN, TEST_UNSEEN, TRAIN, VALID, SplitConfig
from reclaim.features.targets import HORIZONS_S
from tests.folders import contents
from tests.series import dataset_of, write_cell

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
    features, there = build_features(dataset, FeatureConfig(rows="all"))
    assert not there
    assert len(features) == dataset.n_windows
    for bucket in range(dataset.n_buckets):
        windows = dataset.windows(bucket)
        rows = slice(*features.bucket_start[bucket : bucket + 2])
        assert np.array_equal(features.end_us[rows], windows.end_us)
        live = FeatureState().advance(windows.task_numbers(), windows)
        assert np.array_equal(features.x[rows], live, equal_nan=True)


def test_periods_follow_time_groups_follow_collections_and_targets_stop_a_horizon_short(dataset: Dataset) -> None:
    features, _ = build_features(dataset, FeatureConfig(rows="all"))
    train_us, valid_us = features.cuts_us
    train, valid, test = features.train_rows(), features.valid_rows(), features.test_rows()
    assert features.end_us[train].max() < train_us <= features.end_us[valid].min()
    assert features.end_us[valid].max() < valid_us <= features.end_us[test].min()
    collections = np.concatenate([dataset.windows(b).collection_id for b in range(dataset.n_buckets)])
    in_alloc = np.concatenate([dataset.windows(b).in_alloc for b in range(dataset.n_buckets)])
    assert in_alloc.any()
    assert not in_alloc[np.concatenate([train, valid, test])].any()
    unseen = set(collections[test[features.group[test] == TEST_UNSEEN]])
    assert unseen
    assert not unseen & set(collections[train])
    assert not unseen & set(collections[valid])
    for rows, until in ((train, train_us), (valid, valid_us)):
        y, oom = features.targets(rows)
        for h, horizon_s in enumerate(HORIZONS_S):
            beyond = features.end_us[rows] + horizon_s * S > until
            assert beyond.any() or h == 0  # a cut on the grid of the windows
            assert np.isnan(y[beyond, :, h]).all()
            assert np.isnan(oom[beyond, h]).all()
            before = features.end_us[rows] + (horizon_s + 300) * S <= until  # no window is longer than 300 s
            assert np.array_equal(y[before, :, h], features.y[rows][before, :, h], equal_nan=True)
    counted = features.manifest["rows"]
    assert counted[PERIODS[TRAIN]][GROUPS[SEEN]] == len(train)
    assert sum(sum(groups.values()) for groups in counted.values()) == len(features)
    assert counted[PERIODS[VALID]][GROUPS[IN_ALLOC]] > 0
    assert counted[PERIODS[VALID]][GROUPS[TEST_UNSEEN]] > 0


def test_no_target_rests_on_a_window_that_ends_after_its_period_however_long_windows_are(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Callable[..., Path]
) -> None:
    rows, events = [], []
    for task in range(20):  # each on a grid of its own, so some window lies across the end of every period
        ids, first_s = {"collection_id": str(1000 + task)}, 600 + 47 * task
        events.append(event(0, 3, **ids))
        for start_s in range(first_s, first_s + 36_000, 900):
            rows.append(window(start_s, end_time=str((start_s + 900) * S), **ids))
    write_shard(tmp_path / "cell", "instance_usage-000000000000", rows)
    write_shard(tmp_path / "cell", "instance_events-000000000000", events)
    dataset = ingest(tmp_path / "cell", tmp_path / "dataset", IngestConfig(buckets=1)).dataset
    features, windows = build_features(dataset, FeatureConfig(rows="all"))[0], dataset.windows(0)
    number = windows.task_numbers()
    periods = (features.train_rows(), features.valid_rows())
    for rows_of, cut_us, period in zip(periods, features.cuts_us, PERIODS, strict=False):
        y = features.targets(rows_of)[0][:, 0]
        for h, horizon_s in enumerate(HORIZONS_S[:2]):
            told = rows_of[np.isfinite(y[:, h])]
            assert len(told) == features.manifest["targets"][period]["cpu"][f"{horizon_s}s"]["known"] > 0
            for row in told:
                t = windows.end_us[row]
                later = (number == number[row]) & (windows.start_us >= t) & (windows.start_us < t + horizon_s * S)
                assert windows.end_us[later].max() <= cut_us


def test_one_long_window_takes_the_targets_of_the_rows_that_rest_on_it_and_no_others(
    tmp_path: Path, window: Maker, event: Maker, write_shard: Callable[..., Path]
) -> None:
    rows = [window(600 + 300 * k, collection_id=str(task)) for task in range(1, 21) for k in range(400)]
    whole_day = window(600, end_time=str((600 + 86_400) * S), collection_id="21")
    for name, more in (("usual", []), ("long", [whole_day])):
        write_shard(tmp_path / name, "instance_usage-000000000000", rows + more)
        write_shard(
            tmp_path / name, "instance_events-000000000000", [event(0, 3, collection_id=str(k)) for k in range(1, 22)]
        )
    known = []
    for name in ("usual", "long"):
        dataset = ingest(tmp_path / name, tmp_path / f"{name}-dataset", IngestConfig(buckets=1)).dataset
        features = build_features(dataset)[0]
        known.append([features.manifest["targets"][p]["cpu"]["3600s"]["known"] for p in ("train", "valid")])
    assert known[0] == known[1]
    assert min(known[0]) > 1000


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


def test_a_process_that_opens_features_again_takes_no_others_in_their_place(dataset: Dataset) -> None:
    features = build_features(dataset)[0]
    sent = pickle.dumps(features)
    assert pickle.loads(sent).fingerprint == features.fingerprint
    build_features(dataset, FeatureConfig(monday_s=300))
    with pytest.raises(ConfigError, match=r"features: built with other settings while it was read; run again"):
        pickle.loads(sent)


def _killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_killed_half_way_the_old_features_stay_and_a_second_run_ends_the_same(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, _ = build_features(dataset)
    whole = contents(reference.path)
    config = FeatureConfig(SplitConfig(train_share=0.4))
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_journal", _killed)  # all buckets are done
        with pytest.raises(KeyboardInterrupt):
            build_features(dataset, config)
    assert contents(reference.path) == whole
    build_features(dataset, config)
    build_features(dataset)
    assert contents(reference.path) == whole


@pytest.mark.parametrize(("windows", "said"), [(1_600, []), (150, ["86400s"]), (50, ["3600s", "86400s"])])
def test_the_command_says_at_which_horizons_no_margin_can_be_set(tmp_path: Path, windows: int, said: list[str]) -> None:
    write_cell(tmp_path / "raw", tasks=6, windows=windows)
    built = dataset_of(tmp_path / "raw", tmp_path / "dataset", buckets=1)
    features = FeatureSet.open(built.path)
    y, _ = features.targets(features.valid_rows())
    assert [f"{h}s" for h, of in zip(HORIZONS_S, np.moveaxis(y, 2, 0), strict=True) if np.isnan(of).all()] == said
    lines = [line for line in of_features(features, False)[1] if line.startswith("no row for margins has a known")]
    assert [line.split(": ")[0].rpartition("over ")[2] for line in lines] == ([" or ".join(said)] if said else [])


def test_where_no_row_has_a_limit_a_longer_history_is_no_remedy(tmp_path: Path) -> None:
    write_cell(tmp_path / "raw", tasks=6, windows=1_600)
    mapping = tmp_path / "raw" / "mapping.toml"
    mapping.write_text("".join(f"{line}\n" for line in mapping.read_text().splitlines() if "_limit" not in line))
    features = FeatureSet.open(dataset_of(tmp_path / "raw", tmp_path / "dataset", buckets=1).path)
    (line,) = [line for line in of_features(features, False)[1] if line.startswith("no row for margins has a known")]
    assert line.endswith("; a row needs a limit, and a later window of its task")


def test_where_all_windows_for_margins_are_of_collections_kept_for_the_test_the_command_says_so(tmp_path: Path) -> None:
    write_cell(tmp_path / "raw", tasks=6, windows=400)
    built = dataset_of(tmp_path / "raw", tmp_path / "dataset", buckets=1)
    features, _ = build_features(built, FeatureConfig(SplitConfig(test_unseen_share=0.98, valid_unseen_share=0.01)))
    (line,) = [line for line in of_features(features, False)[1] if line.startswith("no row for margins has a known")]
    assert line.endswith("--set split.test_unseen_share=0.01 keeps fewer")


def test_the_command_says_where_one_wrong_time_leaves_periods_empty(tmp_path: Path) -> None:
    write_cell(tmp_path / "raw", tasks=6, windows=100)
    for name, rows, said in (
        ("right", "", []),
        ("wrong", "3,4000000000,1,0.1,0.1\n",
         ["0 in the validation period and 1 in the test period, of 601 windows, as periods divide the time from "
          "1970-01-01 00:10 to 2096-10-02 07:11 UTC: where the trace is shorter, "
          "a row has a wrong time; correct it and ingest again (the first window is of task 0, 0, the last of 3, 0)"]),
        ("named", "odd,5000000000,1,0.1,0.1\n",
         ["0 in the validation period, of 602 windows, as periods divide the time from "
          "1970-01-01 00:10 to 2128-06-11 08:58 UTC: where the trace is shorter, "
          "a row has a wrong time; correct it and ingest again (the first window is of task 0, 0, the last of odd)"]),
    ):  # fmt: skip
        with (tmp_path / "raw" / "cell.csv").open("a") as file:
            file.write(rows)
        features = FeatureSet.open(dataset_of(tmp_path / "raw", tmp_path / name, buckets=1).path)
        assert [line for line in of_features(features, False)[1] if "a wrong time" in line] == said


def test_a_dataset_without_features_says_which_command_makes_them(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reclaim features .*dataset"):
        FeatureSet.open(dataset.path)
    with pytest.raises(ConfigError, match=r"nowhere: no such folder; `reclaim ingest SOURCE"):
        FeatureSet.open(tmp_path / "nowhere")


def test_features_of_another_pipeline_are_refused(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    build_features(dataset)
    monkeypatch.setattr("reclaim.features.feature_set.PIPELINE_VERSION", "another")
    with pytest.raises(ConfigError, match="made by another feature pipeline"):
        FeatureSet.open(dataset.path)


def test_a_feature_set_with_features_that_have_gone_is_refused_and_built_again(dataset: Dataset) -> None:
    built, _ = build_features(dataset)
    manifest = json.loads((built.path / MANIFEST).read_text())
    with_more = manifest | {"fingerprint": "of then", "features": [*FEATURE_NAMES, "sibling_tasks"]}
    write_json(built.path / MANIFEST, with_more)
    with pytest.raises(
        ConfigError, match=rf"has {N_FEATURES + 1} features that are not .*; run `reclaim features .*` again"
    ):
        FeatureSet.open(dataset.path)
    _, there = build_features(dataset)
    assert not there
    assert len(FeatureSet.open(dataset.path)) == len(built)


def test_a_trace_too_short_to_split_says_both_lengths(
    tmp_path: Path, window: Maker, write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "cell", "instance_usage-000000000000", [window(600 + 300 * k) for k in range(5)])
    dataset = ingest(tmp_path / "cell", tmp_path / "short", IngestConfig(buckets=1)).dataset
    with pytest.raises(HistoryTooShortError, match=r"spans 1500 s; .* at least 14400 s"):
        build_features(dataset)


def test_a_dataset_without_usage_is_refused_with_what_is_missing(
    tmp_path: Path, event: Maker, write_shard: Callable[..., Path]
) -> None:
    write_shard(tmp_path / "cell", "instance_events-000000000000", [event(0, 3)])
    dataset = ingest(tmp_path / "cell", tmp_path / "dataset", IngestConfig(buckets=1)).dataset
    with pytest.raises(HistoryTooShortError, match="no usage windows, and features are made of usage"):
        build_features(dataset)


def test_a_dataset_held_out_for_tests_is_never_trained_on(dataset: Dataset) -> None:
    features, _ = build_features(dataset, FeatureConfig(SplitConfig(role="test")))
    assert features.role == "test"
    assert len(features.train_rows()) == 0
    valid, test = features.valid_rows(), features.test_rows()
    assert features.end_us[valid].max() < features.cuts_us[1] <= features.end_us[test].min()
    assert SEEN not in features.group
    counted = features.manifest["targets"]
    assert counted["train"]["cpu"]["3600s"]["known"] == 0
    known = np.isfinite(features.targets(valid)[0][:, 1, HORIZONS_S.index(3_600)]).sum()
    assert counted["valid"]["memory"]["3600s"]["known"] == known > 0
    assert counted["valid"]["memory"]["3600s"]["gap"] > 0


def test_a_dataset_only_trained_on_has_no_test(dataset: Dataset) -> None:
    features, _ = build_features(dataset, FeatureConfig(SplitConfig(role="train")))
    assert len(features.test_rows()) == 0
    rows = features.valid_rows()
    assert features.end_us[rows].max() == features.end_us.max()
    assert np.array_equal(features.targets(rows)[0], features.y[rows], equal_nan=True)


def _write_feature_set(folder: Path, n: int) -> FeatureSet:
    """Write by hand what ``build_features`` would of ``n`` rows, in a dataset of that name alone: all zero."""
    (folder / FOLDER).mkdir(parents=True)
    write_json(folder / MANIFEST, {"format_version": FORMAT_VERSION, "fingerprint": "abc"})
    manifest = {
        "pipeline": PIPELINE_VERSION, "dataset": "abc", "bucket_start": [0, n], "kept": n,
        "features": FEATURE_NAMES,
    }  # fmt: skip
    write_json(folder / FOLDER / MANIFEST, manifest)
    for name, (dtype, shape) in array_shapes(n).items():
        np.save(array_path(folder / FOLDER, name), np.zeros(shape, dtype))
    return FeatureSet.open(folder)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _fewer_rows(path: Path) -> None:
    np.save(path, np.load(path)[:-1])


def _other_type(path: Path) -> None:
    np.save(path, np.load(path).astype(np.float64))


@pytest.mark.parametrize("name", ["x", "first"])
@pytest.mark.parametrize("damage", [Path.unlink, _cut, _empty, _fewer_rows, _other_type])
def test_a_damaged_array_is_one_error_that_names_the_file_and_the_command(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    folder = _write_feature_set(tmp_path / "dataset", 3).path
    damage(folder / f"{name}.npy")
    with pytest.raises(ConfigError, match=rf"features/{name}\.npy: .*; run `reclaim features .*dataset` again"):
        FeatureSet.open(tmp_path / "dataset")


@pytest.mark.parametrize("key", ["pipeline", "dataset", "bucket_start", "features", "kept"])
def test_a_manifest_that_lacks_something_is_refused_with_the_command(tmp_path: Path, key: str) -> None:
    path = _write_feature_set(tmp_path / "dataset", 1).path / MANIFEST
    write_json(path, {k: v for k, v in json.loads(path.read_text()).items() if k != key})
    with pytest.raises(ConfigError, match=r"run `reclaim features .*dataset` again"):
        FeatureSet.open(tmp_path / "dataset")


def test_the_arrays_of_a_built_feature_set_are_those_declared(dataset: Dataset) -> None:
    features, _ = build_features(dataset)
    for name, (dtype, shape) in array_shapes(len(features)).items():
        array = getattr(features, name)
        assert (array.dtype, array.shape) == (dtype, shape)
        assert isinstance(array, np.memmap)
