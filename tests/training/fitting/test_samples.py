"""The rows that are used, on a device: a batch is what the feature set says of them, with the gap kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from reclaim.features.feature_set import FeatureSet, array_path
from reclaim.features.targets import HORIZONS_S
from reclaim.training.fitting.samples import Samples, column_bounds, column_moments
from reclaim.training.fitting.sources import Source, rows_in_memory
from reclaim.training.models.network import squash
from reclaim.training.models.trees import Rows

S = 1_000_000
UNTIL_US = 50_000 * S

Maker = Callable[[int], FeatureSet]


def write_feature_set(folder: Path, seed: int) -> FeatureSet:
    """Write a feature set of random numbers: ten tasks, some hours long."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 60, 10)
    n = int(lengths.sum())
    arrays: dict[str, Any] = {
        "x": rng.normal(size=(n, 5)).astype(np.float32),
        "y": np.where(rng.random((n, 3, 3)) < 0.2, np.nan, rng.random((n, 3, 3))).astype(np.float32),
        "oom": rng.choice([0.0, 1.0, np.nan], (n, 3)).astype(np.float32),
        "end_us": rng.integers(0, 100_000, n) * S,
        "inside": rng.random((n, 3)) < 0.7,
        "period": rng.integers(0, 3, n).astype(np.uint8),
        "group": rng.integers(0, 4, n).astype(np.uint8),
        "limit": rng.choice([0.0, 0.3, 0.7, np.nan], (n, 2)).astype(np.float32),
        "first": np.repeat(np.cumsum(lengths) - lengths, lengths),
        "row": np.arange(n),
        "weight": rng.uniform(1, 9, n).astype(np.float32),
    }
    arrays["x"][rng.random((n, 5)) < 0.1] = np.nan
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        np.save(array_path(folder, name), array)
    mapped = {name: np.load(array_path(folder, name), mmap_mode="r") for name in arrays}
    unused: Any = None
    return FeatureSet(folder, {}, unused, bucket_start=np.array([0, n]), **mapped)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Return a maker of feature sets by seed."""
    folder = tmp_path_factory.mktemp("resident")
    return lambda seed: write_feature_set(folder / str(seed), seed)


def _source(features: FeatureSet) -> Source:
    unused: Any = None
    return Source(unused, features)


def _same(mine: torch.Tensor, theirs: np.ndarray[Any, Any]) -> None:
    assert mine.dtype == torch.float32
    assert theirs.dtype == np.float32
    assert np.array_equal(mine.numpy(), theirs, equal_nan=True)


def test_samples_of_several_feature_sets_stand_one_after_another_and_each_keeps_its_own_gap(make: Maker) -> None:
    of_both = [make(1), make(2)]
    rows = [np.flatnonzero(features.period == 0) for features in of_both]
    samples = Samples.of_rows(rows_in_memory([_source(features) for features in of_both], rows))
    known = [features.targets(r) for features, r in zip(of_both, rows, strict=True)]
    x = np.concatenate([features.x[r] for features, r in zip(of_both, rows, strict=True)])
    y, oom = (np.concatenate(part) for part in zip(*known, strict=True))
    assert np.isnan(y).sum() > sum(np.isnan(f.y[r]).sum() for f, r in zip(of_both, rows, strict=True))
    assert len(samples) == len(x)
    positions = torch.randperm(len(samples))
    batch = samples.take(positions)
    _same(batch.x, x[positions.numpy()])
    _same(batch.y, y[positions.numpy()])
    _same(batch.oom, oom[positions.numpy()])
    weight = np.concatenate([features.weight[r] for features, r in zip(of_both, rows, strict=True)])
    assert batch.weight is not None
    _same(batch.weight, weight[positions.numpy()])
    assert samples.heads().targets.tolist() == np.isfinite(y).any(axis=0).tolist()
    assert samples.heads().oom.tolist() == np.isfinite(oom).any(axis=0).tolist()


def test_only_the_rows_that_are_used_are_placed_and_the_limits_are_not_read(make: Maker) -> None:
    features = replace(make(4), limit=cast(Any, None))
    few = np.flatnonzero(features.period == 0)[:3]
    rows = rows_in_memory([_source(features)], [few])
    assert rows.x.shape == (3, 5)
    assert Samples.of_rows(rows)._x.data_ptr() == rows.x.ctypes.data  # and copied no second time on a CPU


def test_moments_in_pieces_are_those_of_the_whole(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    features = make(5)
    every = Rows(np.array(features.x), np.array(features.y), np.array(features.oom))
    samples = Samples.of_rows(every)
    monkeypatch.setattr(Samples.chunks, "__defaults__", (7,))
    mean, scale = column_moments(samples, lambda positions: squash(samples.features(positions)))
    x = squash(torch.from_numpy(np.array(features.x))).double().numpy()
    np.testing.assert_allclose(mean, np.nanmean(x, axis=0), rtol=1e-6)
    np.testing.assert_allclose(scale, np.nanstd(x, axis=0), rtol=1e-6)
    assert mean.dtype == scale.dtype == torch.float32


def test_a_column_that_varies_by_rounding_alone_has_no_scale_and_what_is_infinite_has_no_part() -> None:
    x = np.array([[np.nan, 0.25, 0.25, np.inf]] * 9, np.float32)  # never known, constant, all but constant, infinite
    x[0, 2] = np.nextafter(x[1, 2], np.float32(1))
    x[:2, 3] = 1, 3  # their mean is 2, and each is 1 from it
    samples = Samples.of_rows(Rows(x, np.zeros((9, 3, 3), np.float32), np.zeros((9, 3), np.float32)))
    mean, scale = column_moments(samples, samples.features)
    assert mean.tolist() == pytest.approx([0.0, 0.25, 0.25, 2.0])
    assert scale.tolist() == [1.0] * 4


def test_bounds_are_the_quantiles_at_both_ends_of_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.arange(1001, dtype=np.float32)  # its quantile at 0.001 is 1, at 0.999 it is 999
    half = np.where(counts < 501, counts * 2, np.nan)  # 0, 2, .. 1000: half way from 0 to 2 at 0.001
    x = np.stack([counts[::-1], half, np.full(1001, np.nan), np.full(1001, 7.0)], axis=1).astype(np.float32)
    samples = Samples.of_rows(Rows(x, np.zeros((1001, 3, 3), np.float32), np.zeros((1001, 3), np.float32)))
    low, high = column_bounds(samples, samples.features, 0.001)
    torch.testing.assert_close(low, torch.tensor([1.0, 1.0, 0.0, 7.0]))
    torch.testing.assert_close(high, torch.tensor([999.0, 999.0, 0.0, 7.0]))
    looked_at: list[int] = []

    def of(positions: torch.Tensor) -> torch.Tensor:
        looked_at.append(len(positions))
        return samples.features(positions)

    for most, looked in ((1001, 1001), (1000, 501), (101, 101)):  # every second, every tenth: 0, 10, .. 1000
        monkeypatch.setattr("reclaim.training.fitting.samples.CHUNK_SAMPLES", most)
        low, _ = column_bounds(samples, of, 0.01)
        torch.testing.assert_close(low[0], torch.tensor(10.0))
        assert looked_at.pop() == looked


def test_rows_in_memory_are_samples_whose_targets_stay_as_they_are() -> None:
    rng = np.random.default_rng(0)
    rows = Rows(*(rng.random(shape).astype(np.float32) for shape in ((8, 4), (8, 3, len(HORIZONS_S)), (8, 3))))
    batch = Samples.of_rows(rows).take(torch.tensor([5, 0]))
    _same(batch.x, rows.x[[5, 0]])
    _same(batch.y, rows.y[[5, 0]])
    _same(batch.oom, rows.oom[[5, 0]])
