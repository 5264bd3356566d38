"""Several datasets as one training set: which rows are drawn of each, and limits in units that add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, P90, PAGE_CACHE, Windows, demand
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import CALENDAR, FEATURE_NAMES, SIGNALS
from reclaim.features.splits import TEST, TRAIN, VALID
from reclaim.training.fitting import held_out as heldout
from reclaim.training.fitting import sources
from reclaim.training.fitting.sources import Source, choose_rows, chosen_rows, rows_in_memory


class _Part:
    """As much of a feature set and its dataset as knows its rows and windows."""

    def __init__(self, rows: list[int], windows: Windows | None = None) -> None:
        self.rows = np.array(rows, np.int64)
        self.read = windows
        self.path, self.row = Path("part"), np.arange(10_000)

    def by_bucket(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> list[tuple[int, Any]]:
        return [(0, rows)]

    def valid_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.rows

    def windows(self, bucket: int) -> Windows:
        assert bucket == 0
        assert self.read is not None
        return self.read


def _source(rows: list[int], windows: Windows | None = None) -> Source:
    part: Any = _Part(rows, windows)
    return Source(part, part)


def _rows_of(features: FeatureSet) -> np.ndarray[Any, np.dtype[np.int64]]:
    return cast("_Part", features).rows


def test_rows_are_chosen_by_the_seed_and_stay_in_order() -> None:
    rows = np.arange(100, dtype=np.int64) * 3
    chosen = choose_rows(rows, 10, seed=1)
    assert len(set(chosen)) == 10
    assert (np.diff(chosen) > 0).all()
    assert np.array_equal(chosen, choose_rows(rows, 10, seed=1))
    assert not np.array_equal(chosen, choose_rows(rows, 10, seed=2))
    assert np.array_equal(choose_rows(rows, 100, seed=1), rows)


def test_one_source_gives_the_rows_it_would_give_alone() -> None:
    rows = list(range(5, 905, 9))
    (chosen,) = chosen_rows([_source(rows)], _rows_of, 30, seed=4)
    assert np.array_equal(chosen, choose_rows(np.array(rows), 30, seed=4))


def test_of_several_sources_every_row_is_as_likely_and_all_are_taken_where_they_fit() -> None:
    several = [_source(list(range(0, 3000, 3))), _source([]), _source(list(range(7, 9007)))]
    every = chosen_rows(several, _rows_of, 10_000, seed=1)
    assert [len(r) for r in every] == [1000, 0, 9000]
    chosen = chosen_rows(several, _rows_of, 1000, seed=1)
    assert sum(map(len, chosen)) == 1000
    assert len(chosen[0]) == pytest.approx(100, abs=30)
    for some, all_ in zip(chosen, every, strict=True):
        assert set(some) <= set(all_)
        assert (np.diff(some) > 0).all()


def test_limits_of_several_traces_are_counted_in_the_mean_of_each(make_windows: Callable[..., Windows]) -> None:
    # the same two tasks twice: in shares of a machine, and in cores and GiB
    share = make_windows([0.1, 0.2, 0.3], limit=(0.5, 0.25))
    share.limit[1:] = (1.0, 0.5)
    share.percentiles[:, P90] = [0.1, 0.2, 0.3]
    share.usage[:, PAGE_CACHE] = 0.05
    unit = np.array([64.0, 256.0])
    cores = replace(
        share, usage=share.usage * np.array([64, 64, 256, 256, 256, 1, 1]), limit=share.limit * unit,
        percentiles=share.percentiles * np.float32(64),
    )  # fmt: skip
    rows = [0, 1, 2]
    both = sources.windows_of([_source(rows, share), _source(rows, cores)], [np.array(rows)] * 2)
    first, second = both.take(slice(0, 3)), both.take(slice(3, 6))
    np.testing.assert_allclose(first.limit[:, 0], np.array([0.5, 1.0, 1.0]) / (2.5 / 3))
    for mine, theirs in ((first.limit, second.limit), (first.usage, second.usage), (demand(first), demand(second))):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    np.testing.assert_allclose(
        first.usage[:, CPU_MEAN] / first.limit[:, 0], share.usage[:, CPU_MEAN] / share.limit[:, 0]
    )
    np.testing.assert_allclose(first.usage[:, MEMORY_MAX], share.usage[:, MEMORY_MAX] / (1.25 / 3))
    alone = sources.windows_of([_source(rows, cores)], [np.array(rows)])
    assert np.array_equal(alone.limit, cores.limit)  # one trace stays in its own unit


def test_the_mean_limit_of_a_trace_is_that_of_the_rows_that_have_one(make_windows: Callable[..., Windows]) -> None:
    some, none = make_windows([0.1] * 4), make_windows([0.1])
    some.limit[:] = [[2.0, np.nan], [0.0, np.nan], [np.nan, np.nan], [4.0, np.nan]]
    rows = [np.arange(4), np.arange(1)]
    both = sources.windows_of([_source([0, 1, 2, 3], some), _source([0], none)], rows)
    np.testing.assert_allclose(both.limit[:4, 0], [2 / 3, 0.0, np.nan, 4 / 3])  # (2 + 4) / 2 = 3
    np.testing.assert_allclose(both.usage[:4, MEMORY_MAX], 0.1)  # without any limit it stays in its own unit


@pytest.mark.parametrize(
    ("days", "hidden"),
    [
        (14, []),
        (13, [*CALENDAR, "age", "seen", "same_hour_7d"]),
        (4, [*CALENDAR, "age", "seen", "same_hour_7d"]),
        (3, [*CALENDAR, "age", "seen", "same_hour_2d", "same_hour_7d"]),
        (1, [*CALENDAR, "age", "seen", "same_hour_1d", "same_hour_2d", "same_hour_7d"]),
    ],
)
def test_a_feature_is_hidden_where_the_shortest_training_was_shorter_than_twice_its_span(
    days: int, hidden: list[str]
) -> None:
    def trained_for(days: int) -> Source:
        began_us = 40 * 86_400_000_000  # not every trace begins at 0 of its clock
        cut_us = began_us + days * 86_400_000_000
        features = SimpleNamespace(cuts_us=(cut_us, 2**60), manifest={"span_us": [began_us, 2**60]})
        return cast(Source, SimpleNamespace(features=features))

    lags = [name for name in hidden if name.startswith("same_hour")]
    expected = {*hidden, *(f"{signal}_{lag}" for signal in SIGNALS for lag in lags)} - {*lags}
    assert {FEATURE_NAMES[k] for k in sources.hidden_features([trained_for(20), trained_for(days)])} == expected


@pytest.mark.parametrize(("role", "kept"), [("all", 0.2), ("train", 0.0)])
def test_the_collections_that_a_training_kept_unseen_are_none_where_no_test_follows(role: str, kept: float) -> None:
    split = {"role": role, "test_unseen_share": 0.2}
    features = SimpleNamespace(cuts_us=(5, 7), manifest={"config": {"split": split}})
    found = Source(cast(Any, None), cast(FeatureSet, features)).split_facts
    assert found == {"trained_until_us": 5, "tuned_until_us": 7, "kept_unseen": kept}


def test_datasets_are_opened_in_the_order_of_their_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "reclaim.data.dataset.Dataset.open", lambda path: SimpleNamespace(path=path, fingerprint=path.name)
    )
    monkeypatch.setattr(FeatureSet, "open", lambda _: SimpleNamespace(role="all"))
    monkeypatch.setattr(sources, "_check_apart", lambda _: None)
    for order in ("ab", "ba"):
        assert [source.dataset.fingerprint for source in sources.open_sources([Path(k) for k in order])] == ["a", "b"]


def _four_rows(inside: list[bool]) -> Source:
    """Return four rows whose targets over an hour rest on nothing measured after their period, or do."""
    none, small = np.zeros(4, np.int64), np.zeros(4, np.uint8)
    part: Any = None
    features = FeatureSet(
        Path(), {}, part, row=np.arange(4), weight=np.ones(4, np.float32),
        inside=np.array(inside)[:, None].repeat(3, axis=1),
        x=np.zeros((4, 1), np.float32), y=np.ones((4, 1, 3), np.float32), oom=np.ones((4, 3), np.float32),
        end_us=none, limit=np.ones((4, 2), np.float32), first=none,
        period=small, group=small, bucket_start=np.array([0, 4]),
    )  # fmt: skip
    return Source(part, features)


def test_the_samples_of_each_dataset_know_the_targets_that_lie_inside_its_periods() -> None:
    several = [_four_rows([True, False] * 2), _four_rows([True] * 4)]
    early, late = np.array([0, 1]), np.array([2, 3])
    for rows in (early, late):
        copied = rows_in_memory(several, [rows, rows])
        assert np.isfinite(copied.y[:, 0, 1]).tolist() == [True, False, True, True]
        assert np.isfinite(copied.oom[:, 1]).tolist() == [True, False, True, True]


def test_the_newest_rows_are_those_of_training_and_validation_each_for_all_that_it_stands_for() -> None:
    # of 3 training rows one is of a sample, for 4; of 10 validation rows in the dataset 2 are kept, for 5 each
    source = _four_rows([True] * 4)
    counts = {"valid": {"seen": 7, "valid-unseen": 3, "test-unseen": 90, "in-alloc": 9}}
    features = replace(
        source.features, manifest={"rows": counts}, weight=np.array([4, 1, 1, 1], np.float32),
        period=np.array([TRAIN, VALID, TEST, VALID], np.uint8), x=np.arange(4, dtype=np.float32)[:, None],
    )  # fmt: skip
    rows = sources.newest_rows([Source(source.dataset, features)], 100, seed=1)
    assert rows.x[:, 0].tolist() == [0, 1, 3]
    assert rows.weight is not None
    assert rows.weight.tolist() == [4, 5, 5]
    whole = replace(
        features, manifest={"rows": {"valid": {**counts["valid"], "seen": 2, "valid-unseen": 0}}},
        weight=np.ones(4, np.float32),
    )  # fmt: skip
    assert sources.newest_rows([Source(source.dataset, whole)], 100, seed=1).weight is None
    assert len(sources.newest_rows([Source(source.dataset, whole)], 2, seed=1).x) == 2


def test_a_test_sample_is_of_whole_tasks_drawn_by_the_seed_until_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length = np.arange(1, 21)
    task = np.repeat(np.arange(20), length)
    features: Any = SimpleNamespace(first=np.cumsum(length)[task] - length[task], test_rows=lambda: np.arange(210))
    several = [cast(Source, SimpleNamespace(features=features))]
    monkeypatch.setattr(heldout, "TEST_ROWS", 55)
    found = []
    for seed in range(5):
        (rows,) = heldout.sampled_test_rows(several, seed)
        assert sorted(rows) == rows.tolist()
        drawn, count = np.unique(task[rows], return_counts=True)
        assert count.tolist() == length[drawn].tolist()
        assert len(rows) - length[drawn].max() < 55 <= len(rows)  # the last one passes it
        found.append(tuple(drawn))
    assert len(set(found)) == 5
    monkeypatch.setattr(heldout, "TEST_ROWS", 210)
    assert len(heldout.sampled_test_rows(several, seed=1)[0]) == 210
