"""The benchmark of short histories cuts a record where recording would have begun; days it lacks are refused."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from benchmarks.short_history import cut


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return the file of a record of ten days, four rows a day, whose clock begins at day 3."""
    frame = pd.DataFrame({"vm": "a", "time_s": [(3 + k / 4) * 86_400 for k in range(41)], "cpu": range(41)})
    frame.to_parquet(tmp_path / "usage.parquet")
    return tmp_path / "usage.parquet"


def test_a_cut_keeps_all_rows_from_its_first_day_on_and_their_columns(record: Path, tmp_path: Path) -> None:
    target = tmp_path / "cut" / "usage.parquet"
    assert cut(record, target, "time_s / 86400", 6.0, 8.0) == 4.0
    kept = pd.read_parquet(target)
    assert list(kept.columns) == ["vm", "time_s", "cpu"]
    assert sorted(kept["cpu"]) == list(range(24, 41))


@pytest.mark.parametrize(("first", "test"), [(-1.0, 8.0), (6.0, 10.0)])
def test_a_history_before_the_record_and_a_test_after_it_are_refused(
    record: Path, tmp_path: Path, first: float, test: float
) -> None:
    with pytest.raises(SystemExit, match=rf"10\.0 days hold no history from {first:g} and a test from {test:g}"):
        cut(record, tmp_path / "cut.parquet", "time_s / 86400", first, test)
