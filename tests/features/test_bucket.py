"""A bucket folded when it is asked for has the bits of one that was kept, whichever of its rows are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reclaim.data import schema as s
from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.data.windows import Cell, Windows
from reclaim.features.bucket import Folding, Labels
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import JOURNAL, FeatureSet
from reclaim.features.registry import AT
from reclaim.features.sample import SampleConfig, Shares
from reclaim.features.splits import TRAIN, VALID, SplitConfig, in_period, permitted

S = 1_000_000
FEW = SampleConfig(train=2_000, valid=1_000, test=500)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(np.ascontiguousarray(one).view(np.uint32), np.ascontiguousarray(other).view(np.uint32))


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of a day of tasks that run out of memory, in three buckets."""
    folder = tmp_path_factory.mktemp("folded")
    write_cell(folder / "cell", SyntheticCellConfig(machines=8, days=1.0, tasks_per_machine=20.0, seed=4))
    return ingest(folder / "cell", folder / "dataset", IngestConfig(buckets=3)).dataset.path


@pytest.fixture(scope="module")
def kept(cell: Path) -> tuple[np.ndarray, Labels, np.ndarray]:
    """Return the features and the labels of every row as they are kept, and the limits' means."""
    features, _ = build_features(Dataset.open(cell), FeatureConfig(rows="all"))
    every = np.arange(len(features))
    return np.array(features.x), features.labels(every), np.array(features.mean_limit)


@pytest.fixture
def sampled(cell: Path) -> FeatureSet:
    """Return the feature set of the same dataset that keeps few rows."""
    return build_features(Dataset.open(cell), FeatureConfig(sample=FEW))[0]


def test_some_collections_end_out_of_memory_or_these_tests_say_little(kept: tuple[np.ndarray, ...]) -> None:
    assert (kept[0][:, AT.collection_ooms] > 0).sum() > 100


@pytest.mark.parametrize("step", [1, 3, 500])
@pytest.mark.parametrize("threads", [1, 2])
def test_folded_rows_are_those_that_were_kept(
    step: int, threads: int, sampled: FeatureSet, kept: tuple[np.ndarray, Labels, np.ndarray]
) -> None:
    x, labels, _ = kept
    for number in range(sampled.dataset.n_buckets):
        bucket = sampled.bucket(number)
        rows = np.arange(0, len(bucket.windows), step)
        assert same_bits(bucket.features(rows, threads), x[bucket.first + rows])
        for name, column in bucket.labels._asdict().items():
            mine = getattr(labels, name)[bucket.first : bucket.first + len(bucket.windows)]
            assert np.array_equal(column, mine, equal_nan=column.dtype.kind == "f"), name


def test_a_label_rests_on_the_time_a_row_was_known_and_on_when_all_within_its_horizon_was_measured(
    history: Callable[..., Windows],
) -> None:
    windows = history([0.1, 0.2, 0.3, 0.4])  # they begin at 600 s
    begin_us = windows.start_us[0].item()
    windows.end_us[1] = begin_us + 3_000 * S  # begins within five minutes of the first, and ends long after
    windows.end_us[2] = begin_us + 900 * S
    cuts = (begin_us + 1_000 * S, begin_us + 5_000 * S)
    dataset: Any = SimpleNamespace(
        events=lambda *_: s.EVENTS.empty_table(), manifest={"counts": {"events": 1}, "extras": {}}
    )
    folding = Folding(dataset, SplitConfig(), Cell(), cuts, end_us=begin_us + 90_000 * S)
    labels, ends = folding.labels(0, windows)
    assert ends == 0
    known_s = [300, 3_000, 3_000, 3_000]  # what comes late is known no earlier than what came before
    assert ((labels.end_us - begin_us) // S).tolist() == known_s
    assert labels.period.tolist() == [TRAIN, VALID, VALID, VALID]
    # five minutes after the first end at 600 s, but a window that begins in them lasts beyond the training period
    assert labels.inside[:, :2].tolist() == [[False, False], [True, False], [True, False], [True, False]]
    assert np.isnan(labels.targets()[0][~labels.inside.any(axis=1)]).all()
    dataset.manifest["counts"]["events"] = 0
    assert np.isnan(folding.labels(0, windows)[0].oom).all()


def test_rows_may_be_asked_for_in_any_order_and_twice(
    sampled: FeatureSet, kept: tuple[np.ndarray, Labels, np.ndarray]
) -> None:
    bucket = sampled.bucket(1)
    rows = np.array([70, 3, 3, 900, 12])
    assert same_bits(bucket.features(rows), kept[0][bucket.first + rows])
    assert bucket.features(rows[:0]).shape == (0, kept[0].shape[1])


def test_the_rows_that_are_kept_are_few_and_have_the_bits_of_all(
    sampled: FeatureSet, kept: tuple[np.ndarray, Labels, np.ndarray]
) -> None:
    x, labels, mean_limit = kept
    assert len(sampled) < 0.6 * len(x)
    assert same_bits(np.array(sampled.x), x[sampled.row])
    for name in Labels._fields:
        mine = np.array(getattr(sampled, name))
        assert np.array_equal(mine, getattr(labels, name)[sampled.row], equal_nan=mine.dtype.kind == "f"), name
    assert sampled.mean_limit == tuple(mean_limit)
    buckets = [sampled.bucket(number) for number in range(sampled.dataset.n_buckets)]
    starts = [of.first + of.windows.task_starts()[of.windows.task_numbers()] for of in buckets]
    assert np.array_equal(sampled.first, np.concatenate(starts)[sampled.row])
    limit = labels.limit[in_period(VALID, labels.period, labels.group)].astype(np.float64)
    assert mean_limit.tolist() == pytest.approx(np.where(limit > 0, limit, np.nan).mean(axis=0).tolist())
    assert len(sampled.test_rows()) < 1_500


def test_no_row_is_kept_for_an_end_out_of_memory_after_its_own_period(
    cell: Path, monkeypatch: pytest.MonkeyPatch, kept: tuple[np.ndarray, Labels, np.ndarray]
) -> None:
    later = ~kept[1].inside & (kept[1].oom == 1)
    assert later[kept[1].period == TRAIN].any()  # or this says nothing
    told: list[tuple[np.ndarray, np.ndarray]] = []
    choose = Shares.choose

    def spied(self: Shares, windows: Windows, period: Any, group: Any, oom: Any) -> Any:
        told.append((period, oom))
        return choose(self, windows, period, group, oom)

    monkeypatch.setattr(Shares, "choose", spied)
    build_features(Dataset.open(cell), FeatureConfig(sample=SampleConfig(train=1_000)), engine=Engine(workers=1))
    period, oom = (np.concatenate(column) for column in zip(*told, strict=True))
    assert np.array_equal(period, kept[1].period)
    assert np.isnan(oom[later]).all()


def test_kept_rows_stand_for_all_rows_of_their_period(cell: Path, kept: tuple[np.ndarray, Labels, np.ndarray]) -> None:
    half = SampleConfig(train=2_000, valid=4_000, test=500)
    sampled, labels = build_features(Dataset.open(cell), FeatureConfig(sample=half))[0], kept[1]
    for period, rows in ((TRAIN, sampled.train_rows()), (VALID, sampled.valid_rows())):
        all_of_it = ((labels.period == period) & permitted(period, labels.group)).sum()
        assert len(rows) < all_of_it
        assert sampled.stands_for(rows).sum() == pytest.approx(all_of_it, rel=0.1 if period == TRAIN else 1e-6)


def test_what_rests_on_every_row_says_how_to_keep_them(sampled: FeatureSet) -> None:
    with pytest.raises(ConfigError, match=r"features of [\d,]+ of [\d,]+ rows.*--set rows=all`"):
        sampled.check_whole()


@pytest.mark.parametrize("damage", [b"", b"PK", b"PK\x03\x04", None])
def test_a_journal_that_is_damaged_is_one_error_and_its_remedy_mends_it(
    sampled: FeatureSet, damage: bytes | None
) -> None:
    path, dataset = sampled.path / JOURNAL, sampled.dataset
    before = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage)
    with pytest.raises(ConfigError, match=rf"ooms\.npz: missing or damaged .*`reclaim features {dataset.path}`"):
        _ = FeatureSet.open(dataset.path).journal
    _, there = build_features(dataset, FeatureConfig(sample=FEW))
    assert not there
    assert path.read_bytes() == before
