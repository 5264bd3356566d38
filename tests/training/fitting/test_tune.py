"""The search for settings: judged by validation rows alone, resumed to the same end, recorded, ready for training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from typer.testing import CliRunner

from reclaim.cli import app as cli
from reclaim.config import load_config
from reclaim.data.core.engine.workers import Engine
from reclaim.data.core.files import locked
from reclaim.data.errors import ConfigError, HistoryTooShortError, ModelError
from reclaim.features.feature_set import FeatureSet
from reclaim.features.targets import TARGETS
from reclaim.training.estimators.registry import LEARNED
from reclaim.training.fitting import tune as tuning
from reclaim.training.fitting.learner import FITTING, Objective, Space, learner_of
from reclaim.training.fitting.sources import Source, hidden_features, open_sources
from reclaim.training.fitting.trees import TreeLearner
from reclaim.training.fitting.tune import EXPERIMENT, TuneReport, objective_of, tune
from reclaim.training.fitting.tune_space import (
    as_toml,
    ranges_of,
    rounded,
    searchable,
    with_settings,
)
from reclaim.training.margins.value import Value
from reclaim.training.models.trees import Rows
from reclaim.training.settings import FitConfig, TrainConfig, TreeConfig
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.client import sqlite_uri, store_client
from tests.series import CPU, dataset_of, write_raw

TREES = TrainConfig(estimator="trees", trees=TreeConfig(iterations=50, max_samples=400), fit=FitConfig(epochs=2))
NETWORK = TrainConfig(fit=FitConfig(epochs=2, batch_size=512, max_samples=600, max_valid_samples=200))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset with features; each test searches settings of its own seed in it."""
    folder = tmp_path_factory.mktemp("50%20")  # as a URI, "50 "
    rng = np.random.default_rng(1)
    lines = ["task,time_s,cpu,memory"]
    for task in range(8):
        usage = rng.uniform(0.1, 0.5, 2) * rng.lognormal(0, 0.2, (200, 2))
        lines += [f"{task},{600 + 300 * i},{c:.6g},{m:.6g}" for i, (c, m) in enumerate(usage)]
    write_raw(folder / "raw", lines, CPU + 'memory_mean = "memory"\nmemory_limit = 1.0\n')
    return dataset_of(folder / "raw", folder / "dataset", buckets=1).path


@pytest.fixture(scope="module", autouse=True)
def _in_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep one tracking store for the module: making one takes longer than a search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(tmp_path_factory.mktemp("store"))
        yield


def bowl(_: list[Source], config: TrainConfig) -> Objective:
    """Return a loss with its lowest point at 64 leaves and a rate of 0.1, in place of a fit."""

    def loss(tried: TrainConfig, on_epoch: Callable[[int, float], None]) -> float:
        value = abs(np.log(tried.trees.leaves / 64)) + abs(np.log(tried.trees.learning_rate / 0.1))
        for epoch in range(config.fit.epochs):
            on_epoch(epoch, float(value))
        return float(value)

    return loss


def space(estimator: str) -> Space:
    """Return the settings of an estimator that are searched."""
    return learner_of(estimator).space()


@pytest.fixture
def unpriced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Price neither the settings given nor those found: a fit of each that trials do not need."""
    nothing = SimpleNamespace(reclaimed={"aggressive": (0.0, 0.0), "baseline": (0.0, 0.0)})
    monkeypatch.setattr(tuning, "priced", lambda *_: (None, {3_600: nothing}))


@pytest.fixture
def quick(unpriced: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Search the bowl instead of fitting, and learn from the second trial on."""
    monkeypatch.setattr(tuning, "objective_of", bowl)
    monkeypatch.setattr(tuning, "_JUDGES", 2)
    monkeypatch.setattr(tuning, "_RANDOM", 2)


class Unrecorded:
    """A tracking store that keeps nothing, for tests that look at the trials alone: writing takes half their time."""

    run_id = "none"

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_args, **_options: None

    @contextmanager
    def start_run(self, *_: object, **__: object) -> Iterator[Unrecorded]:
        """Give a run that keeps nothing."""
        yield self

    def find_runs(self, *_: object, **__: object) -> list[tracking.RunRecord]:
        """Find none."""
        return []


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record nothing with MLflow."""
    monkeypatch.setattr(tuning, "tracking", Unrecorded())


def trials_of(report: TuneReport) -> list[tuple[str, float | None, dict[str, Any]]]:
    """Return state, value and settings of the finished trials, as Optuna's record has them."""
    storage = sqlite_uri(Path(report.trials_file))
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    return [(t.state.name, t.value, t.params) for t in study.trials if t.state.name in ("COMPLETE", "PRUNED")]


@pytest.mark.slow  # a few seconds: three trials of a network, an MLflow store
def test_a_search_of_the_network_records_every_trial_and_writes_what_training_takes(
    dataset: Path, tmp_path: Path
) -> None:
    report = tune([dataset], NETWORK, trials=3, config_file=tmp_path / "best.toml")
    assert (report.trials, report.new) == (3, 3)
    loaded = load_config(TrainConfig, tmp_path / "best.toml")
    assert loaded == with_settings(NETWORK, report.best)
    options, words = report.assignments()[::2], report.assignments()[1::2]
    assert set(options) == {"--set"}
    few = ["fit.max_samples=600", "fit.max_valid_samples=200"]
    assert load_config(TrainConfig, None, [*few, *words]) == loaded
    runs = tracking.find_runs(EXPERIMENT)
    (parent,) = [run for run in runs if run.run_id == report.run_id]
    children = sorted((run for run in runs if run is not parent), key=lambda run: run.name)
    assert [run.name for run in children] == ["network/0", "network/1", "network/2"]
    assert {run.status for run in runs} == {"FINISHED"}
    assert parent.metrics["valid_loss"] == report.best_loss
    assert report.best_loss == min(run.metrics["valid_loss"] for run in children if run.tags["state"] == "complete")
    assert report.first_loss == children[0].metrics["valid_loss"]
    assert json.loads(children[0].params["fit.width"]) == NETWORK.fit.width
    assert set(children[1].params) == set(space("network"))
    # the loss is that of a fit of these settings
    objective = objective_of(open_sources([dataset]), NETWORK)
    assert objective(loaded, lambda _epoch, _loss: None) == report.best_loss


@pytest.mark.slow
def test_neither_test_rows_nor_their_targets_are_read(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the search looked at the test period")

    tested, targets = FeatureSet.open(dataset).test_rows(), FeatureSet.targets

    def checked(features: FeatureSet, rows: NDArray[np.int64]) -> Any:
        assert not np.isin(rows, tested).any()
        return targets(features, rows)

    monkeypatch.setattr(FeatureSet, "test_rows", refuse)
    monkeypatch.setattr(FeatureSet, "targets", checked)
    for config in (TREES, NETWORK):
        tune([dataset], replace(config, seed=9), trials=1, config_file=tmp_path / "best.toml")


def test_the_network_is_judged_by_the_least_loss_of_validation_rows(dataset: Path) -> None:
    losses: list[float] = []
    objective = objective_of(open_sources([dataset]), NETWORK)
    assert objective(NETWORK, lambda _epoch, loss: losses.append(loss)) == min(losses)


def test_the_trees_are_judged_by_the_likelihood_of_validation_rows(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = open_sources([dataset])
    objective = objective_of(sources, TREES)
    loss = objective(TREES, lambda _epoch, _loss: None)
    again = objective(with_settings(TREES, {"trees.iterations": 1}), lambda _epoch, _loss: None)
    assert loss > 0
    assert loss != again

    (source,) = sources
    features = source.features
    y = features.targets(features.valid_rows())[0][:, :2, 1]

    class Tenths:
        def predict(self, x: Any, horizon_s: int) -> Any:
            assert horizon_s == 3_600
            survival = np.full((len(x), len(TARGETS), 1, 2), np.nan, np.float32)
            survival[:, :2, 0] = 0.1, 0.0  # of CPU and memory a tenth exceed the threshold, none the limit
            survival[50:, 1] = np.nan  # and of most nothing is foreseen of memory
            thresholds = np.tile(np.array([0.5, 1.0], np.float32), (len(x), len(TARGETS), 1))
            np.testing.assert_array_equal(x, features.x[features.valid_rows()])
            return SimpleNamespace(survival=survival, thresholds=thresholds)

    def fit_rows(_: TreeLearner, rows: Rows, __: TrainConfig) -> Tenths:
        hidden = hidden_features(sources)
        assert len(hidden) > 0
        assert np.isnan(rows.x[:, hidden]).all()
        assert np.isfinite(np.delete(rows.x, hidden, axis=1)).any()
        assert len(rows) == TREES.trees.max_samples
        return Tenths()

    monkeypatch.setattr(TreeLearner, "fit_rows", fit_rows)
    losses = np.where(y > 0.5, -np.log(0.1), np.where(np.isnan(y), np.nan, -np.log(0.9)))
    losses[50:, 1] = np.nan
    expected = np.nanmean(losses, axis=0).mean()  # of each resource, then of both
    assert abs(expected - np.nanmean(losses)) > 0.01
    judged = objective_of(sources, TREES)
    assert judged(TREES, lambda _epoch, _loss: None) == pytest.approx(expected)


@pytest.mark.usefixtures("quick", "unrecorded")
def test_the_search_finds_the_bottom_of_a_bowl_and_begins_with_what_is_given(dataset: Path, tmp_path: Path) -> None:
    given = replace(TREES, seed=2, trees=replace(TREES.trees, leaves=7, learning_rate=0.3))
    report = tune([dataset], given, trials=10, config_file=tmp_path / "best.toml")
    trials = trials_of(report)
    assert (trials[0][2]["trees.leaves"], trials[0][2]["trees.learning_rate"]) == (7, 0.3)
    assert report.first_loss is not None
    assert report.first_loss == pytest.approx(np.log(64 / 7) + np.log(3))
    assert report.best_loss < report.first_loss / 2
    assert report.pruned == sum(state == "PRUNED" for state, _, _ in trials) > 0
    assert len(trials) == report.trials == 10


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_search_that_was_killed_goes_on_and_ends_the_same(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TREES, seed=3)
    whole = tune([dataset], config, trials=6, config_file=tmp_path / "whole.toml")
    expected = trials_of(whole)
    Path(whole.trials_file).unlink()

    calls = 0

    def mortal(sources: list[Source], config: TrainConfig) -> Objective:
        fit = bowl(sources, config)

        def killed_now_and_then(tried: TrainConfig, on_epoch: Callable[[int, float], None]) -> float:
            nonlocal calls
            calls += 1
            on_epoch(0, 1.0)
            if calls in (1, 5, 7):
                raise KeyboardInterrupt
            return fit(tried, lambda epoch, loss: None if epoch == 0 else on_epoch(epoch, loss))

        return killed_now_and_then

    for attempt in range(4):
        monkeypatch.setattr(tuning, "objective_of", mortal)
        if attempt < 3:
            with pytest.raises(KeyboardInterrupt):
                tune([dataset], config, trials=6, config_file=tmp_path / "resumed.toml")
        else:
            resumed = tune([dataset], config, trials=6, config_file=tmp_path / "resumed.toml")
    assert [params for _, _, params in trials_of(resumed)] == [params for _, _, params in expected]
    assert (tmp_path / "resumed.toml").read_bytes() == (tmp_path / "whole.toml").read_bytes()
    assert resumed.run_id == whole.run_id
    runs = tracking.find_runs(EXPERIMENT, tags={"mlflow.parentRunId": whole.run_id})
    assert len(runs) == 6
    again = tune([dataset], config, trials=6, config_file=tmp_path / "again.toml")
    assert (again.new, again.best, again.run_id) == (0, whole.best, whole.run_id)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("killed_in", ["log_datasets", "log_params"])
def test_a_search_that_was_killed_before_its_run_had_all_settings_records_them_when_run_again(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    config = replace(TREES, seed=50 + len(killed_in))

    def killed(*_args: object, **_context: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tracking.Run, killed_in, killed)
        with pytest.raises(KeyboardInterrupt):
            tune([dataset], config, trials=1, config_file=tmp_path / "best.toml")
    report = tune([dataset], config, trials=1, config_file=tmp_path / "best.toml")
    searches = [run for run in tracking.find_runs(EXPERIMENT) if run.params.get("seed") == str(config.seed)]
    assert [(run.run_id, run.status) for run in searches] == [(report.run_id, "FINISHED")]
    assert "range.trees.leaves" in searches[0].params
    inputs = store_client().get_run(report.run_id).inputs
    assert inputs is not None
    assert len(inputs.dataset_inputs) == 1


@pytest.mark.usefixtures("quick", "unrecorded")
def test_trials_at_once_rest_on_those_before_them_and_end_the_same_in_however_many_calls(
    dataset: Path, tmp_path: Path
) -> None:
    config, file = replace(TREES, seed=10), tmp_path / "best.toml"
    in_turn = trials_of(tune([dataset], config, trials=7, config_file=file))
    whole = tune([dataset], config, trials=7, config_file=file, at_once=2)
    several = trials_of(whole)
    assert several[:3] == in_turn[:3]  # as given, at random, and by the first two
    assert several[3] != in_turn[3]  # by the first two, and by the first three
    assert len({str(params) for _, _, params in several}) == 7
    Path(whole.trials_file).unlink()
    for trials in (3, 4, 7):
        parts = tune([dataset], config, trials=trials, config_file=file, at_once=2)
    assert trials_of(parts) == several
    with pytest.raises(ConfigError, match="at_once must be at least 1, got 0"):
        tune([dataset], config, trials=1, config_file=file, at_once=0)


@pytest.mark.slow
@pytest.mark.usefixtures("unpriced", "unrecorded")
@pytest.mark.parametrize("given", [TREES, NETWORK], ids=["trees", "network"])
def test_what_is_tried_does_not_depend_on_the_engine_nor_on_the_number_of_workers(
    dataset: Path, tmp_path: Path, given: TrainConfig
) -> None:
    config, found = replace(given, seed=11), []
    for engine in (Engine(), Engine("processes", 2)):
        report = tune([dataset], config, trials=4, config_file=tmp_path / "best.toml", at_once=3, engine=engine)
        found.append((trials_of(report), (tmp_path / "best.toml").read_bytes()))
        Path(report.trials_file).unlink()
    assert found[0] == found[1]


@pytest.mark.usefixtures("quick", "unrecorded")
def test_more_trials_go_on_from_those_that_are_there(dataset: Path, tmp_path: Path) -> None:
    config = replace(TREES, seed=4)
    few = tune([dataset], config, trials=3, config_file=tmp_path / "best.toml")
    more = tune([dataset], config, trials=5, config_file=tmp_path / "best.toml")
    assert (more.trials, more.new, more.trials_file) == (5, 2, few.trials_file)
    other = tune([dataset], replace(config, seed=5), trials=1, config_file=tmp_path / "best.toml")
    assert other.trials_file != few.trials_file


@pytest.mark.usefixtures("quick", "unrecorded")
def test_trials_that_older_code_fitted_are_no_part_of_a_search(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, file = replace(TREES, seed=17), tmp_path / "best.toml"
    before = tune([dataset], config, trials=2, config_file=file)
    monkeypatch.setattr(tuning, "FITTING", FITTING + 1)
    now = tune([dataset], config, trials=2, config_file=file)
    assert now.new == 2
    assert now.trials_file != before.trials_file


@pytest.mark.usefixtures("unpriced")
def test_a_trial_that_diverges_is_given_up_and_a_search_of_such_says_so(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverges(_: list[Source], __: TrainConfig) -> Objective:
        def loss(tried: TrainConfig, on_epoch: Callable[[int, float], None]) -> float:
            on_epoch(0, float("nan"))
            if tried.trees.leaves != 31:
                return 1.0
            raise ModelError("epoch 0: the validation loss is nan")

        return loss

    monkeypatch.setattr(tuning, "objective_of", diverges)
    config = replace(TREES, seed=6)
    with pytest.raises(ModelError, match="none of 1 trials could be completed"):
        tune([dataset], config, trials=1, config_file=tmp_path / "best.toml")
    assert not (tmp_path / "best.toml").exists()
    report = tune([dataset], config, trials=2, config_file=tmp_path / "best.toml")
    assert (report.best_loss, report.first_loss, report.pruned) == (1.0, None, 1)
    states = {
        run.name: run.tags["state"]
        for run in tracking.find_runs(EXPERIMENT, tags={"mlflow.parentRunId": report.run_id})
    }
    assert states == {"trees/0": "diverged", "trees/1": "complete"}


@pytest.mark.parametrize("config", [TREES, NETWORK], ids=["trees", "network"])
def test_a_horizon_over_which_no_validation_row_has_a_known_demand_is_refused_before_a_trial(
    dataset: Path, tmp_path: Path, config: TrainConfig
) -> None:
    with pytest.raises(HistoryTooShortError, match=r"cpu: 0 of \d+ validation rows have a limit and a known demand"):
        tune([dataset], replace(config, horizon_s=86_400), trials=1, config_file=tmp_path / "best.toml")


@pytest.mark.usefixtures("quick", "unrecorded")
def test_a_prior_that_is_not_there_is_refused_before_a_trial(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "objective_of", None)  # a trial would fail
    with pytest.raises(ModelError, match=r"'\./nowhere'"):
        tune([dataset], replace(NETWORK, prior="./nowhere"), trials=1, config_file=tmp_path / "best.toml")


@pytest.mark.usefixtures("quick", "unrecorded")
def test_money_that_no_mean_limit_is_known_for_is_refused_before_a_trial(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeatureSet, "mean_limit", (float("nan"), 1.0))  # as of several datasets
    monkeypatch.setattr(tuning, "objective_of", None)  # a trial would fail
    config = replace(TREES, seed=18, value=Value(core_hour=0.02, violation=5.0))
    with pytest.raises(ConfigError, match="the mean limit of cpu is unknown"):
        tune([dataset], config, trials=1, config_file=tmp_path / "best.toml")


def test_a_trial_is_compared_at_the_ends_of_ten_parts_of_its_schedule_by_losses_that_are_numbers() -> None:
    told: list[tuple[int, float]] = []

    def told_to(trial: Any, epochs: int, last: float, prune_at: int = 99) -> tuple[Any, list[float], str]:
        def objective(_: TrainConfig, on_epoch: Callable[[int, float], None]) -> float:
            for epoch in range(epochs):
                on_epoch(epoch, float(epoch) if epoch < epochs - 1 else last)
            return last

        told.clear()
        trial.report = lambda loss, step: told.append((step, loss))
        trial.should_prune = lambda: told[-1][0] >= prune_at
        return tuning._try(objective, replace(NETWORK, fit=replace(NETWORK.fit, epochs=epochs)), trial)

    trial = SimpleNamespace()
    assert told_to(trial, 3, 0.5) == (0.5, [0.0, 1.0, 0.5], "complete")
    assert told == [(3, 0.0), (6, 1.0), (10, 0.5)]
    assert told_to(trial, 20, 0.5)[2] == "complete"
    assert told == [(k, 2.0 * k - 1) for k in range(1, 10)] + [(10, 0.5)]  # every second epoch
    assert told_to(trial, 3, float("inf")) == (None, [0.0, 1.0], "diverged")
    assert told_to(trial, 3, 0.5, prune_at=6) == (None, [0.0, 1.0], "pruned")


def test_settings_are_priced_on_validation_rows_alone_over_every_horizon_that_they_know(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, fits, priced_for = open_sources([dataset]), list[TrainConfig](), list[int]()
    forecaster = SimpleNamespace(horizons_s=(300, 3_600, 86_400))

    class Stub:
        def fit(self, _: Any, config: TrainConfig, __: Path) -> Any:
            fits.append(config)
            return SimpleNamespace(forecaster=forecaster)

    def held(_: Any, by: Any, rows: list[NDArray[np.int64]]) -> Any:
        assert by is forecaster
        assert [r.tolist() for r in rows] == [sources[0].features.valid_rows().tolist()]

    def set_prices(_: Any, config: TrainConfig) -> Any:
        priced_for.append(config.horizon_s)
        if config.horizon_s == 86_400:
            raise HistoryTooShortError
        return config.horizon_s

    monkeypatch.setattr(tuning, "learner_of", lambda _: Stub())
    monkeypatch.setattr(tuning, "held_out", held)
    monkeypatch.setattr(tuning, "set_prices", set_prices)
    _, found = tuning.priced(sources, NETWORK)
    assert list(found) == [300, 3_600]
    assert priced_for == [300, 3_600, 86_400]
    assert [config.fit.refit for config in fits] == [False]  # what a second fit gains is not judged


def test_another_range_dataset_judge_or_setting_is_another_search(dataset: Path) -> None:
    sources, ranges = open_sources([dataset]), ranges_of("trees")

    def keys_of(config: TrainConfig = TREES, held: Sequence[str] = (), of: Sequence[Source] = sources) -> str:
        return tuning._key(of, config, {k: v for k, v in ranges.items() if k not in held}, 1)

    other: Any = SimpleNamespace(
        dataset=sources[0].dataset, features=SimpleNamespace(fingerprint="of features built otherwise")
    )
    keys = [
        keys_of(), keys_of(replace(TREES, seed=99)), keys_of(held=["trees.leaves"]), keys_of(of=[other]),
        keys_of(replace(TREES, fit=replace(TREES.fit, max_valid_samples=7))),
    ]  # fmt: skip
    assert len(set(keys)) == 5
    assert keys_of(replace(TREES, fit=replace(TREES.fit, width=7))) == keys[0]  # trees have none


@pytest.mark.usefixtures("quick", "unrecorded")
def test_of_equal_losses_the_earlier_trial_is_the_best(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "objective_of", lambda *_: lambda *_: 1.0)
    given = replace(TREES, seed=19, trees=replace(TREES.trees, leaves=7))
    assert tune([dataset], given, trials=2, config_file=tmp_path / "best.toml").best["trees.leaves"] == 7


@pytest.mark.usefixtures("quick", "unrecorded")
def test_a_seed_as_large_as_a_date_is_searched_with_and_another_tries_others(dataset: Path, tmp_path: Path) -> None:
    reports = [
        tune([dataset], replace(TREES, seed=seed), trials=3, config_file=tmp_path / "best.toml")
        for seed in (20_261_126, 20_261_127)
    ]
    (given, *one), (same, *other) = ([tried for _, _, tried in trials_of(report)] for report in reports)
    assert given == same  # the first has the settings as given
    assert one != other


@pytest.mark.usefixtures("quick", "unrecorded")
def test_two_processes_do_not_search_the_same_at_once(dataset: Path, tmp_path: Path) -> None:
    config = replace(TREES, seed=7)
    report = tune([dataset], config, trials=1, config_file=tmp_path / "best.toml")
    with (
        locked(Path(report.trials_file).with_suffix(".lock"), ConfigError()),
        pytest.raises(ConfigError, match="another process is running this search"),
    ):
        tune([dataset], config, trials=2, config_file=tmp_path / "best.toml")
    with pytest.raises(ConfigError, match="trials must be at least 1, got 0"):
        tune([dataset], config, trials=0, config_file=tmp_path / "best.toml")
    with pytest.raises(ConfigError, match="expected the name of a TOML file to write, got a folder"):
        tune([dataset], config, trials=1, config_file=tmp_path)


@pytest.mark.usefixtures("quick", "unrecorded")
def test_the_verb_prints_a_line_that_trains_the_best(dataset: Path, tmp_path: Path) -> None:
    words = ["tune", str(dataset), "--estimator", "trees", "--trials", "2", "--out", str(tmp_path / "b.toml")]
    done = CliRunner().invoke(cli.app, [*words, "--set", "seed=8"])
    assert done.exit_code == 0, done.output
    assert f"reclaim train {dataset} --set seed=8 --set 'estimator=\"trees\"' --set trees.iterations=" in done.stdout
    assert load_config(TrainConfig, tmp_path / "b.toml").seed == 8
    as_json = CliRunner().invoke(cli.app, [*words, "--set", "seed=8", "--json"])
    assert json.loads(as_json.stdout)["new"] == 0


@pytest.mark.parametrize("estimator", [name for name in LEARNED if space(name)])
def test_the_default_settings_lie_in_the_ranges_and_every_range_has_a_reason(estimator: str) -> None:
    config = TrainConfig(estimator=estimator)
    assert set(searchable(config, ranges_of(estimator))) == set(space(estimator))
    assert all(reason for _, reason in space(estimator).values())
    for name, (distribution, _) in space(estimator).items():
        assert isinstance(distribution, IntDistribution | FloatDistribution | CategoricalDistribution)
        ends = (
            distribution.choices
            if isinstance(distribution, CategoricalDistribution)
            else (distribution.low, distribution.high)
        )
        for end in ends:
            with_settings(config, rounded({name: end}))  # which refuses what is out of its own range


def test_an_estimator_of_which_nothing_is_searched_is_named() -> None:
    with pytest.raises(ConfigError, match="estimator 'portable' has no settings that are searched"):
        ranges_of("portable")


def test_settings_outside_the_ranges_are_not_tried() -> None:
    config = TrainConfig(fit=FitConfig(width=100, depth=9, learning_rate=0.5, batch_size=7, warmup_share=0.25))
    held = set(space("network")) - {"fit.width", "fit.depth", "fit.learning_rate", "fit.batch_size", "fit.warmup_share"}
    assert searchable(config, ranges_of("network", held)) == {"fit.warmup_share": 0.25}


@pytest.mark.parametrize(("width", "tried"), [(1, True), (4, True), (10, True), (3, False), (13, False)])
def test_a_setting_is_tried_on_the_steps_of_its_range_from_its_least_to_its_most(width: int, *, tried: bool) -> None:
    config = TrainConfig(fit=FitConfig(width=width))
    assert bool(searchable(config, {"fit.width": IntDistribution(1, 10, step=3)})) is tried
    assert rounded({"a": 0.0123456, "b": 7, "c": "x"}) == {"a": 0.0123, "b": 7, "c": "x"}


@pytest.mark.usefixtures("quick", "unrecorded")
def test_settings_of_less_loss_that_reclaim_less_are_told_and_compared_once(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced: list[TrainConfig] = []

    def priced_as(_: Sequence[Source], config: TrainConfig) -> Any:
        priced.append(config)
        cpu = 0.50 if config == given else 0.47
        same = SimpleNamespace(reclaimed={"aggressive": (0.2, 0.2), "baseline": (0.1, 0.1)})
        less = SimpleNamespace(reclaimed={"aggressive": (cpu, 0.6), "baseline": (cpu, float("nan"))})
        return None, {300: same, 3_600: less}

    monkeypatch.setattr(tuning, "priced", priced_as)
    given = replace(TREES, seed=5, trees=replace(TREES.trees, leaves=7, learning_rate=0.3))
    report = tune([dataset], given, trials=6, config_file=tmp_path / "best.toml")
    assert report.less == [
        "47.0 % of CPU for 50.0 % at a budget of 0.1 %, 3,600 s ahead",
        "47.0 % of CPU for 50.0 % at a budget of 1 %, 3,600 s ahead",
    ]
    assert [c == given for c in priced] == [False, True]
    again = tune([dataset], given, trials=6, config_file=tmp_path / "best.toml")
    assert (again.less, len(priced)) == (report.less, 2)


@pytest.mark.usefixtures("quick", "unrecorded")
def test_a_search_ends_where_the_settings_as_given_diverge_when_they_are_compared(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(TREES, seed=15)

    def priced_as(_: Sequence[Source], config: TrainConfig) -> Any:
        if config == given:
            raise ModelError("epoch 0: the validation loss is nan; lower fit.learning_rate")
        return None, {3_600: SimpleNamespace(reclaimed={"aggressive": (0.2, 0.2), "baseline": (0.1, 0.1)})}

    monkeypatch.setattr(tuning, "priced", priced_as)
    report = tune([dataset], given, trials=3, config_file=tmp_path / "best.toml")
    assert (report.trials, report.less) == (3, [])


@pytest.mark.usefixtures("quick", "unrecorded")
def test_where_settings_as_given_lie_outside_their_ranges_no_loss_is_theirs_and_the_first_trial_is_compared(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, priced = replace(TREES, seed=16, trees=replace(TREES.trees, learning_rate=0.9)), list[TrainConfig]()

    def priced_as(_: Sequence[Source], config: TrainConfig) -> Any:
        priced.append(config)
        return None, {}

    monkeypatch.setattr(tuning, "priced", priced_as)
    report = tune([dataset], given, trials=1, config_file=tmp_path / "best.toml")
    assert report.first_loss is None
    assert [config == given for config in priced] == [False, True]


@pytest.mark.usefixtures("quick", "unrecorded")
def test_what_is_held_stays_as_it_is(dataset: Path, tmp_path: Path) -> None:
    held = [name for name in space("trees") if name != "trees.leaves"]
    report = tune([dataset], TREES, trials=2, config_file=tmp_path / "best.toml", held=held)
    assert set(report.best) == {"trees.leaves"}
    with pytest.raises(ConfigError, match=r"release one of trees.iterations, trees.leaves"):
        tune([dataset], TREES, trials=2, config_file=tmp_path / "best.toml", held=list(space("trees")))


def test_settings_go_through_toml_unchanged(tmp_path: Path) -> None:
    config = TrainConfig(by_tier=True, seed=3, fit=FitConfig(learning_rate=1e-5, bfloat16=True), experiment='a "b"')
    (tmp_path / "c.toml").write_text(as_toml(asdict(config)))
    assert load_config(TrainConfig, tmp_path / "c.toml") == config
