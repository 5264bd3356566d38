"""Tests that a model answers for a workload with the largest of its recent tasks, at every price, looking back only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import Dataset
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import TEST
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.recommend import series
from reclaim.replay.experiments.recommend.answers import RECENT_US, ask_model
from reclaim.replay.experiments.recommend.decisions import NOW, Decisions, lay_out
from reclaim.replay.experiments.recommend.measure import EXPERIMENT
from reclaim.replay.experiments.recommend.policy import RecommendConfig
from reclaim.replay.experiments.recommend.series import TaskRows, largest_task, read_rows
from reclaim.replay.runs.run import by_name, run_experiment
from reclaim.training.bundle import load_model
from reclaim.training.margins.answers import Priced

CONFIG = RecommendConfig(estimators=("max-so-far",), hold_days=0.25, draws=20)
Asked = tuple[Source, TaskRows, Decisions, Priced]


@pytest.fixture(scope="module")
def asked(dataset: Path) -> Asked:
    """Ask the built-in model about ten services of three tasks."""
    features = FeatureSet.open(dataset)
    source = Source(Dataset.open(dataset), features, by_name([load_model("builtin")]))
    rows = read_rows(features)
    decisions = lay_out(rows, largest_task(rows), features.cuts_us, hold_days=0.25, seen_days=1)
    (name,) = source.bundles
    return source, rows, decisions, ask_model(source, CONFIG, name, rows, decisions)


def test_a_model_is_asked_about_each_recent_task_and_the_largest_answer_counts(asked: Asked) -> None:
    source, rows, decisions, said = asked
    (bundle,) = source.bundles.values()
    mean_limit = source.features.mean_limit
    for one in [0, 7, len(decisions) - 1]:
        workload, at = decisions.workload[one], decisions.time_us[one]
        mine = [k for k in rows.last_at(int(at)) if rows.workload[k] == workload]
        assert len(mine) == 3
        assert all(at - RECENT_US < rows.end_us[k] <= at for k in mine)
        ladders = []
        for row in rows.source_row[mine]:
            bucket = int(np.searchsorted(source.features.bucket_start, row, side="right")) - 1
            place, here = np.array([row - source.features.bucket_start[bucket]]), source.features.bucket(bucket)
            estimator = bundle.bare_estimator(horizon_s=CONFIG.horizon_s, mean_limit=mean_limit)
            ladders.append(estimator.ladder(here.features(place), here.windows.take(place))[0][0])
        np.testing.assert_allclose(said.ladder[one], np.max(ladders, axis=0), rtol=1e-6)


def test_a_dearer_violation_never_reserves_less(asked: Asked) -> None:
    ladder = asked[3].ladder
    assert np.isfinite(ladder).all()
    assert (np.diff(ladder, axis=-1) >= 0).all()
    assert 0 < ladder.min() < ladder.max() <= 1


@pytest.mark.parametrize("engine", [Engine(workers=3), pytest.param(Engine("processes", 2), marks=pytest.mark.slow)])
def test_the_recommendation_does_not_depend_on_the_engine_nor_on_the_number_of_workers(
    dataset: Path, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    monkeypatch.setattr(series, "_AT_ONCE", 1_000)
    found = [
        run_experiment(
            EXPERIMENT, dataset, tmp_path / name, replace(CONFIG, estimators=("max-so-far", "vpa")),
            bundles=asked[0].bundles, tracking=False, engine=on,
        ).results
        for name, on in {"one": Engine(workers=1), "several": engine}.items()
    ]  # fmt: skip
    assert found[0] == found[1]


def test_a_model_takes_part_in_the_recommendation(dataset: Path, asked: Asked, tmp_path: Path) -> None:
    source = asked[0]
    report = run_experiment(EXPERIMENT, dataset, tmp_path / "out", CONFIG, bundles=source.bundles, tracking=False)
    (name,) = source.bundles
    by_kind = {e["name"]: e for e in report.results["estimators"]}
    assert {e["kind"] for e in by_kind.values()} == {"learned", "statistical"}
    of = by_kind[name]["resources"]
    for r in ("cpu", "memory"):
        assert of[r]["margin"] > 0  # a price
        assert of[r]["chosen_by"]["violation_rate"] <= report.results["budget"][r]
        assert 0 < of[r]["chosen_by"]["reclaimed_share"] < 1
        winner = next(e for e in by_kind.values() if e["resources"][r]["won"])
        words = report.results["workloads"][0][r]["words"]
        assert winner["name"] in words
        assert ("the largest of the tasks' quantiles" in words) == (winner["name"] == name)


def test_the_end_of_the_history_is_asked_about_once_more_than_the_test(asked: Asked) -> None:
    decisions = asked[2]
    assert len(decisions.of(NOW)) == 10
    assert decisions.time_us[decisions.of(NOW)].min() >= decisions.time_us[decisions.of(TEST)].max()
