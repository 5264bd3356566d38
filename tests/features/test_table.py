"""The table of features: the rows of each period, each with the time at which it was known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.features.build import build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import PERIODS
from reclaim.features.table import feature_table

S = 1_000_000


@pytest.fixture
def built(
    tmp_path: Path, window: Callable[..., dict[str, Any]], write_shard: Callable[..., Path]
) -> tuple[Dataset, FeatureSet]:
    """Return five hours of a task, whose second window ends before the first one does, and their features."""
    rows = [window(600 + 300 * k) for k in range(60)]
    write_shard(tmp_path / "cell", "instance_usage-0", [*rows, window(700, end_time=str(800 * S))])
    dataset = ingest(tmp_path / "cell", tmp_path / "dataset", IngestConfig(buckets=1)).dataset
    return dataset, build_features(dataset)[0]


def test_each_period_has_its_own_rows_and_together_they_are_all(built: tuple[Dataset, FeatureSet]) -> None:
    whole = feature_table(*built, ["cpu_last", "cpu_300s"])
    parts = [feature_table(*built, ["cpu_last", "cpu_300s"], period=period) for period in PERIODS]
    assert all(len(part) > 0 for part in parts)
    for part, period in zip(parts, PERIODS, strict=True):
        assert set(part["period"].to_pylist()) == {period}
    for name in (s.END_US, "cpu_last", "cpu_300s"):
        together = np.concatenate([part[name].to_numpy() for part in parts])
        np.testing.assert_array_equal(together, whole[name].to_numpy())


def test_a_row_that_came_late_has_the_time_at_which_it_was_known(built: tuple[Dataset, FeatureSet]) -> None:
    end_s = feature_table(*built, [])[s.END_US].to_numpy() // S
    assert end_s[:4].tolist() == [900, 900, 1_200, 1_500]
