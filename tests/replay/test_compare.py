"""Replays on record: recorded once, completed when cut off, and laid side by side."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reclaim.data.errors import ModelError
from reclaim.data.schema import RESOURCES
from reclaim.replay import record
from reclaim.replay.compare import compare
from reclaim.replay.differences import differences
from reclaim.replay.paired import Paired
from reclaim.replay.record import EXPERIMENT, TAG_PARENT, record_margins
from reclaim.replay.report import ReplayReport
from reclaim.replay.units import UNITS, read_units
from reclaim.training import tracking


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the record in a store of its own."""
    folder = tmp_path_factory.mktemp("mlruns")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        yield folder


def small(report: ReplayReport, seed: int = 1) -> ReplayReport:
    """Return the replay as of another seed: of borg, the oracle, and percentile as a learned one at one margin."""
    inputs = report.results["inputs"]
    of = {e["name"]: e for e in report.results["estimators"]}
    learned = of["percentile"] | {"kind": "learned", "results": {"medium": of["percentile"]["results"]["medium"]}}
    results = dict(report.results) | {
        "estimators": [of["borg"], learned, of["oracle"]],
        "inputs": inputs | {"config": inputs["config"] | {"seed": seed}},
    }
    return replace(report, results=results)


NAMES = {"borg/baseline", "borg/medium", "borg/aggressive", "percentile/medium", "oracle/none"}


def test_replays_are_recorded_once_completed_when_cut_off_and_compared(
    report: ReplayReport, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"no finished replay in sqlite.*`reclaim replay margins DATASET --out DIR`"):
        compare()

    logged = []

    def cut_off(measured: dict[str, Any]) -> dict[str, Any]:
        logged.append(measured)
        if len(logged) == 3:
            raise KeyboardInterrupt
        return {}

    with monkeypatch.context() as patch:
        patch.setattr(record, "_numbers", cut_off)
        with pytest.raises(KeyboardInterrupt):
            record_margins(small(report))
    first = record_margins(small(report))
    finished = [r for r in tracking.find_runs(EXPERIMENT) if r.status == "FINISHED"]
    assert sorted(r.name for r in finished) == sorted([EXPERIMENT, *NAMES])
    assert {r.tags[TAG_PARENT] for r in finished if r.name != EXPERIMENT} == {first}

    assert record_margins(small(report)) == first
    assert len([r for r in tracking.find_runs(EXPERIMENT) if r.status == "FINISHED"]) == 6

    second = record_margins(small(report, seed=2))
    assert second != first
    table = compare()
    rows = table.as_records()
    assert [(r["estimator"], r["margin"]) for r in rows] == [
        ("percentile", "medium"), ("borg", "baseline"), ("borg", "medium"), ("borg", "aggressive"), ("oracle", "none"),
    ]  # fmt: skip
    newest = {r.run_id for r in tracking.find_runs(EXPERIMENT) if r.tags.get(TAG_PARENT) == second}
    assert {r["run"] for r in rows} == newest
    aggressive = report.results["estimators"][0]["results"]["aggressive"]
    assert rows[3]["CPU reclaimed"] == aggressive["all"]["reclaimed_share"]["cpu"]["value"]
    assert rows[3]["memory violation"] == aggressive["all"]["violation_rate"]["memory"]["value"]
    assert rows[3]["would-be OOM"] == aggressive["oom"]["events"]
    assert (rows[0]["dataset"], rows[0]["horizon"]) == ("raw", "3600 s")

    units = read_units(report.folder / UNITS)
    paired = Paired({n: units.sums[n, "medium"] for n in ("percentile", "borg")}, draws=50, seed=2, confidence=0.95)
    learned = next(r for r in tracking.find_runs(EXPERIMENT) if r.run_id == rows[0]["run"])
    for r, resource in enumerate(RESOURCES):
        expected = paired.difference("percentile", "borg", r)
        assert learned.metrics[f"against_best.{resource}.reclaimed_share"] == pytest.approx(expected.reclaimed.value)
        assert learned.metrics[f"against_best.{resource}.violation_rate_high"] == pytest.approx(expected.violation.high)
        assert learned.tags[f"against_best.{resource}"] == f"{expected.verdict} than borg"
        assert learned.metrics[f"{resource}.reclaimed_share_low"] <= learned.metrics[f"{resource}.reclaimed_share_high"]
    beside = differences().as_records()
    assert [(r["estimator"], r["against"], r["margin"]) for r in beside[:2]] == [("percentile", "borg", "medium")] * 2
    assert beside[0]["reclaimed difference"] == pytest.approx(learned.metrics["against_best.cpu.reclaimed_share"])
    assert tracking.find_file(second, "none.txt") is None

    of_one = compare([first]).as_records()
    assert len(of_one) == 5
    assert not {r["run"] for r in of_one} & newest
    both = compare([first, str(rows[2]["run"])]).as_records()
    assert [(r["estimator"], r["margin"]) for r in both].count(("borg", "medium")) == 2
    with pytest.raises(ModelError, match="no run 0123"):
        compare(["0123"])

    whole = next(r for r in finished if r.run_id == first)
    assert whole.tags["dataset_fingerprint"] == report.results["dataset"]["fingerprint"]
    assert whole.params["config.horizon_s"] == "3600"
    assert tracking.load_dict(first, "results.json")["dataset"] == report.results["dataset"]
    one = next(r for r in finished if r.name == "borg/medium")
    assert float(one.params["margin_share.cpu"]) == report.results["estimators"][0]["margins"]["medium"]["cpu"]
    assert store.exists()
