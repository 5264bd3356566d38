"""Tests that a model answers for a workload with the largest of its recent tasks, at every price, looking back only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import Dataset
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import TEST
from reclaim.replay.experiment import LEARNED, STATISTICAL, Source
from reclaim.replay.experiments.recommend import series
from reclaim.replay.experiments.recommend.answers import (
    RECENT_US,
    Contender,
    _chosen,
    _recent_tasks,
    _target,
    ask_all,
    ask_model,
    ask_statistics,
    settings_in_words,
)
from reclaim.replay.experiments.recommend.decisions import NOW, Decisions, lay_out
from reclaim.replay.experiments.recommend.measure import EXPERIMENT
from reclaim.replay.experiments.recommend.policy import RecommendConfig
from reclaim.replay.experiments.recommend.series import TaskRows, largest_task, read_rows
from reclaim.replay.runs.run import by_name, run_experiment
from reclaim.training.bundle import load_model
from reclaim.training.estimators.base import STATISTIC, Estimate
from reclaim.training.estimators.registry import candidates
from reclaim.training.margins.answers import Priced, Widened
from reclaim.training.margins.value import Value
from tests.replay.experiments.recommend.test_series import DAY, HOUR, rows_of

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


def test_a_model_is_asked_about_the_tasks_of_the_last_day_on_which_the_workload_ran() -> None:
    # a workload that ran on the first of four days alone; its tasks ended at 23, 24 and, a day earlier, 0 hours
    tasks = [(0, 0, [1.0] * 23 * 12), (0, 0, [1.0] * 24 * 12), (0, -12, [1.0] * 12), (1, 0, [1.0] * 96 * 12)]
    rows, cuts = rows_of(tasks, cuts=(2 * DAY, 3 * DAY)), (2 * DAY, 3 * DAY)
    decisions = lay_out(rows, largest_task(rows), cuts, hold_days=1, seen_days=7)
    of, row = _recent_tasks(rows, decisions)
    now = [k for k in decisions.of(NOW) if decisions.workload[k] == 0]
    assert len(now) == 1
    assert rows.task[row[of == now[0]]].tolist() == [0, 1]  # the third one ended a whole day before the last


def test_a_model_reserves_no_more_than_the_limit_of_the_workload_now(asked: Asked) -> None:
    source, rows, decisions, said = asked
    (name,) = source.bundles
    lower = replace(decisions, limit=decisions.limit / 4)
    found = ask_model(source, CONFIG, name, rows, lower)
    np.testing.assert_allclose(found.ladder, np.minimum(4 * said.ladder, 1.0), rtol=1e-6)
    assert found.ladder.max() == 1.0


def test_a_model_has_the_price_that_follows_from_money(asked: Asked) -> None:
    source, rows, decisions, _ = asked
    config = replace(CONFIG, value=Value(core_hour=0.5, memory_hour=0.01, violation=3.0))
    withheld = np.zeros(decisions.limit.shape, np.bool_)
    found = ask_all(source, config, config.margins, rows, largest_task(rows), decisions, withheld)
    (model,) = (one for one in found if one.kind == LEARNED)
    cpu, memory = source.features.mean_limit
    assert model.margin == pytest.approx((3.0 / (0.5 * cpu * 24), 3.0 / (0.01 * memory * 24)), rel=0.02)  # a step


def chosen_of(rows: TaskRows, *answers: Sequence[tuple[float, float]]) -> tuple[Contender, Decisions]:
    """Return the contender of candidates, each with an answer for each workload, and the decisions."""
    cuts = (HOUR, 3 * HOUR)
    decisions = lay_out(rows, largest_task(rows), cuts, hold_days=1 / 24, seen_days=1)
    n = len(decisions)
    rule = np.full((n, 2), STATISTIC, np.uint8)
    given = [Widened.alike(Estimate(np.array(one)[decisions.workload], rule)) for one in answers]
    target = _target(rows, decisions, np.zeros((n, 2), np.bool_))
    settings = [{"level": k} for k in range(len(answers))]
    return _chosen("one", STATISTICAL, settings, given, CONFIG, CONFIG.margins, target, decisions), decisions


def test_each_resource_has_the_candidate_that_reclaims_most_of_it() -> None:
    # the workloads need 1 and 4 cores of 8, and ten times that of memory; the first candidate says so of the CPU and
    # the second one of the memory, and each says the larger need of both workloads for the other resource
    rows = rows_of([(0, 0, [1.0] * 60), (1, 0, [4.0] * 60)], cuts=(HOUR, 3 * HOUR))
    found, decisions = chosen_of(rows, [(1.0, 40.0), (4.0, 40.0)], [(4.0, 10.0), (4.0, 40.0)])
    assert found.settings == ({"level": 0}, {"level": 1})
    np.testing.assert_allclose(found.answer, np.array([(1.0, 10.0), (4.0, 40.0)])[decisions.workload], rtol=1e-3)
    np.testing.assert_allclose(found.reclaimed, [11 / 16, 11 / 16], rtol=1e-3)
    assert found.margin == pytest.approx((1.0, 1.0), rel=1e-3)  # what the answers are multiplied with


def test_a_resource_without_a_known_demand_has_no_answer_and_that_alone_is_said_of_it() -> None:
    rows = rows_of([(0, 0, [1.0] * 60)], cuts=(HOUR, 3 * HOUR))
    rows.demand[:, 1] = np.nan
    found, _ = chosen_of(rows, [(1.0, 10.0)])
    assert np.isnan(found.answer[:, 1]).all()
    assert np.isfinite(found.answer[:, 0]).all()
    assert [note for note in found.notes if note.startswith("memory")] == [
        "memory: no validation window has a limit and a known demand, so requests stay as they are"
    ]


def test_a_setting_of_zero_is_said_and_one_that_is_left_to_the_estimator_is_not() -> None:
    assert settings_in_words({"level": 98, "lag": 0, "n": None}) == "level 98, lag 0"


def test_without_tuning_a_statistic_has_its_first_candidate_alone() -> None:
    rows, cuts = rows_of([(0, 0, [1.0] * 60)], cuts=(HOUR, 3 * HOUR)), (HOUR, 3 * HOUR)
    decisions = lay_out(rows, largest_task(rows), cuts, hold_days=1 / 24, seen_days=1)
    source = Source(None, None, {})  # type: ignore[arg-type]  # neither is read
    config = RecommendConfig(estimators=("max-so-far", "percentile"))
    assert len(candidates("percentile")) > 1
    for tune in (True, False):
        found = ask_statistics(source, replace(config, tune=tune), largest_task(rows), decisions)
        assert [len(found[name]) for name in config.estimators] == [
            len(candidates(name)) if tune else 1 for name in config.estimators
        ]
