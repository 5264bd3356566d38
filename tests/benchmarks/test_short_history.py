"""The benchmark of short histories cuts a record where recording would have begun; days it lacks are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.bar_tables import BEST, HINDSIGHT, MIXED_IN, NETWORK
from benchmarks.short_history import cut

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


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


def test_the_page_says_how_near_eight_mixed_days_of_bitbrains_come_to_its_whole_history() -> None:
    def reclaimed(differences: list[dict[str, Any]], estimator: str) -> dict[tuple[str, str], float]:
        return {
            (d["resource"], d["budget"]): 100 * d["reclaims"][0]
            for d in differences
            if (d["collections"], d["horizon_s"], d["margin_set"]) == ("all", 3_600, HINDSIGHT)
            and (d["estimator"], d["against"]) == (estimator, BEST)
        }

    whole = json.loads((RESULTS / "bar-bitbrains-faststorage.json").read_text())["differences"]
    histories = json.loads((RESULTS / "short-history-bitbrains.json").read_text())["histories"]
    (eight,) = (of["differences"] for of in histories if of["days"] == 8)
    alone, mixed = reclaimed(whole, NETWORK), reclaimed(eight, MIXED_IN)
    less = {budget: [alone[r, b] - mixed[r, b] for r, b in alone if b == budget] for budget in ("1 %", "0.1 %")}
    assert max(map(abs, less["1 %"])) < 0.5
    assert [round(points) for points in sorted(less["0.1 %"])] == [1, 2]
    page = " ".join((ROOT / "docs" / "builtin.md").read_text().split())
    assert "alone at 1 %, and 1 to 2 points less at 0.1 %" in page
