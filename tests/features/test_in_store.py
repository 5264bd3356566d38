"""A dataset in an object store: every stage reads it like a local one, and its features lie next to it."""

from __future__ import annotations

import json
import pickle
import shutil
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from reclaim.data.core.engine.workers import Engine
from reclaim.data.core.stores.places import location
from reclaim.data.dataset import MANIFEST, Dataset
from reclaim.data.errors import ConfigError, DataError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.survey.facts import survey
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet, array_path
from reclaim.features.sample import SampleConfig
from tests.folders import contents
from tests.object_store import Bucket, Killed, breaking_off, dies_after

CONFIG = FeatureConfig(sample=SampleConfig(train=1_000, valid=500, test=300))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small dataset of this machine with its features."""
    folder = tmp_path_factory.mktemp("plain")
    write_cell(folder / "cell", SyntheticCellConfig(machines=4, days=1, seed=5))
    build_features(ingest(folder / "cell", folder / "dataset", IngestConfig(buckets=3)).dataset, CONFIG)
    return folder / "dataset"


@pytest.fixture
def stored(plain: Path, bucket: Bucket, tmp_path: Path) -> Dataset:
    """Return the dataset in a store, without its features."""
    shutil.copytree(plain, tmp_path / "bare", ignore=shutil.ignore_patterns("features"))
    return Dataset.open(bucket.put(tmp_path / "bare", "cells/dataset"))


def test_every_table_of_a_dataset_in_a_store_is_the_one_here(plain: Path, stored: Dataset) -> None:
    here = Dataset.open(plain)
    assert stored.fingerprint == here.fingerprint
    for name in ("tasks", "machines", "usage", "events"):
        assert stored.read(name).equals(here.read(name))
    tasks = here.read("tasks").slice(3, 5)
    assert stored.read("usage", ["cpu_mean"], tasks).equals(here.read("usage", ["cpu_mean"], tasks))
    for bucket in range(here.n_buckets):
        assert stored.usage(bucket).equals(here.usage(bucket))
        assert stored.constraints(bucket).equals(here.constraints(bucket))
        for column, other in zip(
            vars(stored.windows(bucket)).values(), vars(here.windows(bucket)).values(), strict=True
        ):
            np.testing.assert_array_equal(column, other)


@pytest.mark.parametrize("workers", [1, 2])
def test_features_of_a_dataset_in_a_store_are_written_beside_it_with_the_bytes_of_local_ones(
    workers: int, plain: Path, stored: Dataset, bucket: Bucket
) -> None:
    built, already_there = build_features(stored, CONFIG, engine=Engine("local", workers))
    assert not already_there
    assert bucket.contents("cells/dataset/features") == contents(plain / "features")
    assert contents(built.path) == contents(plain / "features")
    assert build_features(stored, CONFIG)[1]


def test_another_machine_fetches_the_features_once_and_again_where_they_have_changed(
    plain: Path, stored: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_features(stored, CONFIG)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    features = FeatureSet.open(str(stored.path))
    assert contents(features.path) == contents(plain / "features")
    assert str(features.path).startswith(str(tmp_path / "other machine"))
    before = array_path(features.path, "x").stat().st_mtime_ns
    sent = pickle.loads(pickle.dumps(features))
    np.testing.assert_array_equal(sent.x, features.x)
    assert array_path(sent.path, "x").stat().st_mtime_ns == before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build_features(stored, FeatureConfig(sample=SampleConfig(train=500, valid=500, test=300)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other machine"))
    assert len(FeatureSet.open(str(stored.path))) < len(features)


def test_a_dataset_or_features_that_are_missing_in_a_store_are_named_with_the_command(
    stored: Dataset, bucket: Bucket
) -> None:
    nowhere = f"{bucket.url}/nowhere"
    with pytest.raises(
        ConfigError, match=rf"^{nowhere}: no manifest\.json in it; `reclaim ingest SOURCE {nowhere}` makes"
    ):
        Dataset.open(nowhere)
    with pytest.raises(
        ConfigError, match=rf"^{stored.path}/features: no .*; `reclaim features {stored.path}` makes one"
    ):
        FeatureSet.open(str(stored.path))


@pytest.mark.slow
def test_features_of_which_the_writing_was_killed_anywhere_are_none_and_the_next_run_makes_them(
    plain: Path, stored: Dataset, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_features(stored, FeatureConfig(sample=SampleConfig(train=500, valid=500, test=300)))
    for survive in count(0, 3):
        with monkeypatch.context() as patch:
            dies_after(patch, survive)
            try:
                build_features(stored, CONFIG)
                break
            except Killed:
                pass
        if survive:
            assert f"features/{MANIFEST}" not in bucket.contents("cells/dataset")
            with pytest.raises(ConfigError, match="makes one"):
                FeatureSet.open(str(stored.path))
        else:
            assert len(FeatureSet.open(str(stored.path))) < len(FeatureSet.open(plain))
    assert survive > 12
    assert bucket.contents("cells/dataset/features") == contents(plain / "features")


def test_a_store_that_stops_while_a_bucket_is_read_is_one_error_that_names_it(
    stored: Dataset, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with breaking_off(bucket.address, after=8_000) as (host, port):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        bucket.files()
        place = location(str(stored.path))
        with pytest.raises(DataError, match=rf"{place}/usage/bucket=000\.parquet: the store could not .*; run again"):
            Dataset.open(str(place)).windows(0)


def test_a_dataset_in_a_store_whose_manifest_is_cut_is_damage(stored: Dataset, bucket: Bucket) -> None:
    bucket.files().pipe(f"{stored.path}/{MANIFEST}", json.dumps(stored.manifest).encode()[:-9])
    with pytest.raises(DataError, match=r"manifest\.json: not valid JSON"):
        Dataset.open(str(stored.path))


def test_inspect_says_the_same_of_a_dataset_in_a_store(plain: Path, stored: Dataset) -> None:
    assert survey(stored) == survey(Dataset.open(plain))


def test_a_store_that_stops_while_a_dataset_is_inspected_is_one_error_that_names_it(
    stored: Dataset, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with breaking_off(bucket.address, after=30_000) as (host, port):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        bucket.files()
        with pytest.raises(DataError, match=rf"{stored.path}: the store could not .*; run again"):
            survey(Dataset.open(str(stored.path)))
