"""The demo on a very small cell, through every room."""

from __future__ import annotations

from pathlib import Path

import pytest

from reclaim.demo import run_demo
from reclaim.training.bundle import load_bundle
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.tracking.runs import fetch_bundle


@pytest.mark.slow
def test_the_demo_ends_with_a_champion_whose_replayed_prices_are_the_ones_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    said: list[str] = []
    report = run_demo(Path("demo"), machines=6, days=1.5, seed=1, say=said.append)
    results = {e["name"]: e for e in report.results["estimators"]}
    champion = load_bundle(fetch_bundle("reclaim@champion")[0])
    assert champion.kind == "network"
    for name in MARGIN_NAMES:
        replayed = results["reclaim/1"]["prices"][name]
        assert list(replayed.values()) == pytest.approx(champion.prices[name].value, rel=1e-9)
    measured = {name: results["reclaim/1"]["results"][name]["all"] for name in MARGIN_NAMES}
    for resource in ("cpu", "memory"):
        reclaimed = [measured[name]["reclaimed_share"][resource]["value"] for name in MARGIN_NAMES]
        assert reclaimed == sorted(reclaimed)  # the aggressive margin reclaims most
        assert reclaimed[-1] < results["oracle"]["results"]["none"]["all"]["reclaimed_share"][resource]["value"]
    assert report.page.is_file()
    again = run_demo(Path("demo"), machines=6, days=1.5, seed=1, say=said.append)
    assert again.already_there
