"""The demo, as a newcomer runs it: every room, and the models that a small cell is enough for."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest

from reclaim.cli.app import demo
from reclaim.data.errors import ModelError
from reclaim.demo import MODEL, run_demo
from reclaim.training.bundle import load_bundle
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.models.oom_calibration import Calibrated
from reclaim.training.tracking.runs import fetch_bundle


@pytest.mark.slow
def test_the_demo_ends_with_a_champion_whose_replayed_prices_are_the_ones_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    asked = {name: option.default for name, option in signature(demo).parameters.items()}
    out, size = asked["out"], {name: asked[name] for name in ("machines", "days", "seed")}
    report = run_demo(out, **size, say=print)
    results = {e["name"]: e for e in report.results["estimators"]}
    champion = load_bundle(fetch_bundle(f"{MODEL}@champion")[0])
    assert champion.kind == "network"
    assert isinstance(champion.forecaster, Calibrated)
    assert isinstance(champion.held_out, Calibrated)
    served, first = champion.forecaster.oom, champion.held_out.oom
    assert served is not None
    assert first is not None
    assert (served.trees.value != first.trees.value).any()  # the one that is served learned from validation rows, too
    assert champion.forecaster.calibration == champion.held_out.calibration
    for name in MARGIN_NAMES:
        replayed = results[f"{MODEL}/1"]["prices"][name]
        assert list(replayed.values()) == pytest.approx(champion.prices[name].value, rel=1e-9)
    measured = {name: results[f"{MODEL}/1"]["results"][name]["all"] for name in MARGIN_NAMES}
    for resource in ("cpu", "memory"):
        reclaimed = [measured[name]["reclaimed_share"][resource]["value"] for name in MARGIN_NAMES]
        assert reclaimed == sorted(reclaimed)  # the aggressive margin reclaims most
        assert reclaimed[-1] < results["oracle"]["results"]["none"]["all"]["reclaimed_share"][resource]["value"]
    assert report.page.is_file()
    with pytest.raises(ModelError, match="no model reclaim@champion"):  # which commands would take by default
        fetch_bundle("reclaim@champion")
    again = run_demo(out, **size, say=print)
    assert again.already_there
