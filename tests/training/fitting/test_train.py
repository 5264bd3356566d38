"""The training job on a small cell: what it registers is what it calibrated, and running it again does nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient

from reclaim.data.core.engine.workers import Engine
from reclaim.data.core.files import locked
from reclaim.data.core.stores.places import location
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError, ModelError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.oom import OOM_DEFINITION
from reclaim.data.schema import AFTER_TRACE_US, RESOURCES
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.groups import TIER_LABELS
from reclaim.features.seen import SAMPLED, SEEN, sample_windows
from reclaim.features.splits import TRAIN, SplitConfig
from reclaim.features.targets import HORIZONS_S
from reclaim.training.bundle import BUNDLE_FILE, load_bundle
from reclaim.training.fitting import held_out, train
from reclaim.training.fitting import network as fit
from reclaim.training.fitting.oom_fit import rows_of
from reclaim.training.fitting.sources import Source
from reclaim.training.fitting.train import SCORES, TrainReport, run_training
from reclaim.training.margins.calibrate import violation_share
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.value import Value
from reclaim.training.models.prior import quarters_of
from reclaim.training.settings import FitConfig, TrainConfig, TreeConfig
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.client import store_client
from reclaim.training.tracking.references import BUILTIN_FOLDER
from reclaim.training.tracking.runs import RunRecord
from tests.folders import contents
from tests.object_store import Bucket
from tests.series import MAPPING, dataset_of, write_cell, write_raw

pytestmark = pytest.mark.usefixtures("blank_figures")

CONFIG = TrainConfig(
    against_builtin=False,  # which these networks of a second lose to
    budgets=Budgets(0.01, 0.05),
    fit=FitConfig(width=16, depth=1, epochs=3, batch_size=256),
    trees=TreeConfig(iterations=5, max_pairs=20_000),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working folder that holds a dataset with features; the runs of this module are recorded there."""
    folder = tmp_path_factory.mktemp("train")
    write_cell(folder / "raw", tasks=30, windows=300)
    dataset_of(folder / "raw", folder / "dataset", buckets=3)
    return folder


@pytest.fixture(scope="module")
def other(place: Path) -> Path:
    """Return a dataset of another cell, with features."""
    write_cell(place / "other_raw", tasks=20, windows=300, seed=2)
    return dataset_of(place / "other_raw", place / "other", buckets=2).path


@pytest.fixture(autouse=True)
def _in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(place)


@pytest.fixture
def trained(place: Path) -> TrainReport:
    """Return a finished run of the network; the first test that asks makes it, the others find it."""
    return run_training(place / "dataset", CONFIG)


@pytest.mark.slow
def test_a_dataset_in_a_store_trains_the_model_of_the_same_dataset_here_and_keeps_its_work_here(
    place: Path, bucket: Bucket, trained: TrainReport
) -> None:
    stored = location(bucket.put(place / "dataset", "cells/dataset"))
    before = bucket.contents()
    assert run_training(stored, CONFIG).version == trained.version
    again = run_training(stored, replace(CONFIG, experiment="stored", model_name="stored"))
    assert again.run_id != trained.run_id
    assert again.scores == trained.scores
    assert bucket.contents() == before


def test_the_registered_model_keeps_the_budgets_it_was_calibrated_to(place: Path, trained: TrainReport) -> None:
    folder, version = tracking.fetch_bundle("reclaim@champion")
    assert version == trained.version
    bundle = load_bundle(folder)
    dataset, features = Dataset.open(place / "dataset"), FeatureSet.open(place / "dataset")
    assert bundle.dataset_fingerprint == dataset.fingerprint
    assert bundle.mean_limit == features.mean_limit
    rows = features.valid_rows()
    at = features.row[rows]
    target = features.targets(rows)[0][:, :2, HORIZONS_S.index(3_600)].astype(np.float64)
    for name, budget in (("baseline", 0.01), ("aggressive", 0.05)):
        # the served object over whole histories, bucket by bucket
        reservation, limit = [], []
        for bucket in range(dataset.n_buckets):
            windows = dataset.windows(bucket)
            judged = replace(bundle, forecaster=bundle.held_out) if bundle.held_out else bundle
            reservation.append(judged.estimator(name).update(windows.task_numbers(), windows).reservation)
            limit.append(windows.limit)
        violation = violation_share(np.concatenate(reservation)[at], np.concatenate(limit)[at], target)
        assert (violation <= budget).all()
        assert violation.tolist() == pytest.approx(list(trained.violation[name].values()))
    for resource in ("cpu", "memory"):
        reclaimed = [trained.reclaimed[name][resource] or 0.0 for name in ("baseline", "medium", "aggressive")]
        assert reclaimed == sorted(reclaimed)


def test_the_run_holds_settings_fingerprint_losses_scores_and_figure(place: Path, trained: TrainReport) -> None:
    run = tracking.find_run(trained.run_id)
    assert run.status == "FINISHED"
    assert run.params["fit.width"] == "16"
    assert run.params["seed"] == "1"
    assert not any(name.startswith("trees.") for name in run.params)
    assert run.tags["oom_definition"] == OOM_DEFINITION
    assert len(run.tags["dataset"]) == 64
    assert run.name == "network dataset budgets.baseline=0.01 budgets.aggressive=0.05 against_builtin=False " + (
        "fit.width=16 fit.depth=1 fit.epochs=3 fit.batch_size=256"
    )
    assert 0 < run.metrics["valid.memory.pinball_over_usage"] < 1
    assert 0 < run.metrics["test.cpu.log_loss"] < 32
    assert len(run.metrics) <= 45
    scores = tracking.load_dict(trained.run_id, SCORES)
    assert scores["valid"]["memory"]["3600s"]["pinball_over_usage"] == run.metrics["valid.memory.pinball_over_usage"]
    assert 0.3 < scores["valid"]["cpu"]["300s"]["coverage_0.9"] <= 1.0
    assert {"valid_loss", "train_loss", "violation.baseline.cpu", "reclaimed.aggressive.memory"} <= set(run.metrics)
    assert [note for note in trained.notes if "OOM" in note] == [
        "OOM: no validation row has a label, so the probability is as the model says it"
    ]
    assert 0 < run.metrics["test.memory.pinball_over_usage"] < 1
    assert "tiers" in scores["valid"]
    assert "ages" in scores["test"]
    inputs = store_client().get_run(trained.run_id).inputs
    assert inputs is not None
    (read,) = inputs.dataset_inputs
    assert (read.dataset.name, read.dataset.digest) == ("dataset", run.tags["dataset"][:36])
    assert json.loads(read.dataset.source) == {"uri": str(place / "dataset")}
    for file in ("model_card.md", "coverage.png", "oom_reliability.png", "importance.png", "importance.json"):
        with tracking.find_file(trained.run_id, file) as found:
            assert found is not None, file


def test_running_it_again_finds_the_finished_run(
    place: Path, trained: TrainReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit.NetworkLearner, "fit", None)  # fitting again would fail
    again = run_training(place / "dataset", CONFIG)
    assert again == replace(trained, reused=True)
    assert not (place / "dataset" / "checkpoints").exists()


def test_a_training_that_another_process_ends_before_the_lock_is_found_and_its_run_stays_as_it_is(
    place: Path, trained: TrainReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,), looked = [r for r in tracking.find_runs(CONFIG.experiment) if r.run_id == trained.run_id], list[str]()

    def find_runs(*args: Any, **given: Any) -> list[RunRecord]:
        looked.append(args[0])
        if len(looked) == 1:
            return [replace(run, status="RUNNING")]
        (lock,) = (place / "dataset" / "checkpoints").glob("*/lock")
        with pytest.raises(ConfigError, match=r"^held$"), locked(lock, ConfigError("held")):
            pass
        return find(*args, **given)

    find = tracking.find_runs
    monkeypatch.setattr(tracking, "find_runs", find_runs)
    monkeypatch.setattr(fit.NetworkLearner, "fit", None)
    assert run_training(place / "dataset", CONFIG) == replace(trained, reused=True)
    assert len(looked) == 2
    assert tracking.find_run(run.run_id) == run
    assert not (place / "dataset" / "checkpoints").exists()


def test_another_setting_fit_format_dataset_or_feature_set_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(config: TrainConfig = CONFIG, dataset: str = "d", features: str = "f", days: int = 40) -> str:
        span = {"span_us": [0, days * 86_400_000_000]}
        of: Any = (
            SimpleNamespace(fingerprint=dataset),
            SimpleNamespace(fingerprint=features, manifest=span, cuts_us=(1, AFTER_TRACE_US)),
        )
        return train._key([Source(*of)], config)

    keys = [key(), key(replace(CONFIG, seed=9)), key(dataset="e"), key(features="g"), key(days=10), key(days=5)]
    for name in ("FITTING", "FORMAT", "PIPELINE_VERSION"):
        with monkeypatch.context() as patch:
            patch.setattr(train, name, "another")
            keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_the_curves_of_a_short_history_are_those_of_the_network_alone_with_their_part_of_the_others(
    place: Path, trained: TrainReport
) -> None:
    alone = run_training(place / "dataset", replace(CONFIG, prior="none"))
    bundles = [load_bundle(tracking.fetch_bundle(f"reclaim/{of.version}")[0]) for of in (trained, alone)]
    x = np.asarray(FeatureSet.open(place / "dataset").x[::50])
    others = load_bundle(BUILTIN_FOLDER).forecaster.predict(x)
    for forecasters in ([b.forecaster for b in bundles], [b.held_out for b in bundles]):
        mixed, own = (forecaster.predict(x) for forecaster in forecasters if forecaster is not None)
        for h, quarters in enumerate(quarters_of(86_400)[:2]):  # a day of training knows no demand of a day
            both = own.survival[:, 0, h].astype(float), others.survival[:, 0, h].astype(float)
            expected = both[0] ** (1 - quarters / 4) * both[1] ** (quarters / 4)
            assert np.allclose(mixed.survival[:, 0, h], expected, rtol=1e-5, atol=1e-9)
            assert not np.allclose(mixed.survival[:, 0, h], both[0], rtol=1e-3)
    said = "the history is short (0.8 days), so curves are in part those of builtin"
    assert [any(said in note for note in of.notes) for of in (trained, alone)] == [True, False]
    facts = [b.trained.get("prior") for b in bundles]
    assert facts[0] is not None
    assert facts[0]["quarters"] == {"300": 1, "3600": 2, "86400": 3}
    assert facts[0]["datasets"] == load_bundle(BUILTIN_FOLDER).trained["datasets"] != []
    assert facts[1] is None


def test_a_prior_of_one_cluster_or_none_at_all_is_refused_before_there_is_a_run(
    place: Path, trained: TrainReport
) -> None:
    config = replace(CONFIG, experiment="elsewhere")
    with pytest.raises(ConfigError, match=r"prior: 'reclaim/\d+' is a model of one cluster; name one of .*portable"):
        run_training(place / "dataset", replace(config, prior=f"reclaim/{trained.version}"))
    with pytest.raises(ModelError, match=r"'\./nowhere'"):
        run_training(place / "dataset", replace(config, prior="./nowhere"))
    assert tracking.find_runs("elsewhere") == []


def test_workers_of_ray_find_a_prior_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    monkeypatch.setattr(train, "fit_on_ray", lambda fit, *_, **__: fit.args[1].prior)
    for prior, expected in (("mine", str(tmp_path / "mine")), ("builtin", "builtin"), ("none", "none")):
        assert train._fitted_on_ray([], replace(CONFIG, prior=prior), "key", 2) == expected  # type: ignore[comparison-overlap]


def test_forcing_it_trains_again_to_the_same_prices_and_the_model_that_is_calibrated_saw_no_validation_row(
    place: Path, trained: TrainReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned_from: list[np.ndarray] = []

    def watched(sources: Sequence[Source], _seed: int, periods: Sequence[int] = (TRAIN,)) -> None:
        learned_from.extend(rows_of(source.features, period) for source in sources for period in periods)

    monkeypatch.setattr(train, "fit_oom", watched)
    forced = run_training(place / "dataset", CONFIG, force=True)
    (rows,) = learned_from
    features = FeatureSet.open(place / "dataset")
    assert (features.period[rows] == TRAIN).all()
    assert not forced.reused
    assert forced.run_id != trained.run_id
    assert forced.prices == trained.prices
    assert int(forced.version) > int(trained.version)


def test_a_killed_run_goes_on_under_its_own_id_to_the_same_bytes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, seed=2)
    one_epoch = fit._epoch

    def killed_in_the_second(*args: Any) -> dict[str, float]:
        if args[4] == 1:
            raise KeyboardInterrupt
        return one_epoch(*args)

    with monkeypatch.context() as patched:
        patched.setattr(fit, "_epoch", killed_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            run_training(place / "dataset", config)
    assert len(list((place / "dataset" / "checkpoints").glob("*/checkpoint.safetensors"))) == 1
    (cut_off,) = [r for r in tracking.find_runs(config.experiment) if r.status != "FINISHED"]
    resumed = run_training(place / "dataset", config)
    assert resumed.run_id == cut_off.run_id
    whole = run_training(place / "dataset", config, force=True)
    assert resumed.prices == whole.prices
    assert resumed.scores == whole.scores
    files = [contents(tracking.fetch_bundle(f"reclaim/{report.version}")[0]) for report in (resumed, whole)]
    of_one = {"network.safetensors", "portable.safetensors", "oom.json"}  # a short history: others are mixed in
    assert set(files[0]) == {BUNDLE_FILE, *of_one, *(f"held_out/{name}" for name in of_one)}
    assert files[0] == files[1]
    assert tracking.find_run(resumed.run_id).metrics["fit_seconds"] > 0


def test_killed_in_its_second_fit_a_run_goes_on_to_the_same_bytes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, one_epoch, epochs = replace(CONFIG, seed=8), fit._epoch, 0

    def killed_in_the_last(*args: Any) -> dict[str, float]:
        nonlocal epochs
        epochs += 1
        if epochs == 5:  # three of the first fit, one of the second
            raise KeyboardInterrupt
        return one_epoch(*args)

    with monkeypatch.context() as patched:
        patched.setattr(fit, "_epoch", killed_in_the_last)
        with pytest.raises(KeyboardInterrupt):
            run_training(place / "dataset", config)
    assert list((place / "dataset" / "checkpoints").glob("*/refit/checkpoint.safetensors"))
    resumed = run_training(place / "dataset", config)
    assert not (place / "dataset" / "checkpoints").exists()
    whole = run_training(place / "dataset", config, force=True)
    one, other = (contents(tracking.fetch_bundle(f"reclaim/{report.version}")[0]) for report in (resumed, whole))
    assert one == other


def test_the_network_that_is_served_learned_from_validation_rows_and_prices_did_not(
    place: Path, trained: TrainReport
) -> None:
    without = run_training(place / "dataset", replace(CONFIG, model_name="once", fit=replace(CONFIG.fit, refit=False)))
    assert without.prices == trained.prices
    assert without.violation == trained.violation
    assert without.scores == trained.scores  # of validation rows
    assert without.test_scores != trained.test_scores
    for of, again in ((trained, True), (without, False)):
        with tracking.find_file(of.run_id, "model_card.md") as card:
            assert card is not None
            assert ("fitted once more" in card.read_text()) is again
    bundle, first = (load_bundle(tracking.fetch_bundle(f"{of.model}/{of.version}")[0]) for of in (trained, without))
    assert first.held_out is None
    assert bundle.held_out is not None
    dataset, features = Dataset.open(place / "dataset"), FeatureSet.open(place / "dataset")
    rows = np.flatnonzero(features.row < dataset.n_windows_of(0))
    x, windows = features.x[rows], dataset.windows(0).take(features.row[rows])
    served, replayed, once = (
        of.bare_estimator().answer(x, windows).forecast
        for of in (bundle, replace(bundle, learned_until_us=features.cuts_us[1]), first)
    )
    assert served is not None
    assert replayed is not None
    assert once is not None
    test = windows.end_us > features.cuts_us[1]
    assert test.any()
    assert (~test).any()
    np.testing.assert_array_equal(replayed.survival[test], served.survival[test])
    np.testing.assert_array_equal(replayed.survival[~test], once.survival[~test])
    assert (replayed.survival[~test] != served.survival[~test]).any()


def test_what_was_first_limited_in_the_validation_period_keeps_its_limit_for_no_price_was_set(tmp_path: Path) -> None:
    write_cell(tmp_path / "raw", tasks=10, windows=300)
    head, *lines = (tmp_path / "raw" / "cell.csv").read_text().splitlines()
    since_s = 600 + 300 * 170  # training ends after 165 of 300 windows
    limited = [f"{line},{2.0 if int(line.split(',')[1]) >= since_s else ''}" for line in lines]
    (tmp_path / "raw" / "cell.csv").write_text("\n".join([f"{head},memory_limit", *limited]) + "\n")
    (tmp_path / "mapping.toml").write_text(MAPPING.replace("memory_limit = 2.0", 'memory_limit = "memory_limit"'))
    dataset = dataset_of(tmp_path / "raw", tmp_path / "dataset", mapping=tmp_path / "mapping.toml", buckets=1)
    features = FeatureSet.open(dataset.path)
    report = run_training(dataset.path, replace(CONFIG, model_name="late"))
    assert report.reclaimed["aggressive"]["memory"] == 0.0
    bundle = load_bundle(tracking.fetch_bundle(f"late/{report.version}")[0])
    assert bundle.held_out is not None
    memory = RESOURCES.index("memory")
    assert not bundle.held_out.heads.targets[memory].any()
    assert not bundle.forecaster.heads.targets[memory].any()
    windows, slot = dataset.windows(0), dataset.windows(0).task_numbers()
    reserved = bundle.estimator("aggressive").update(slot, windows).reservation
    test = windows.end_us > features.cuts_us[1]
    np.testing.assert_array_equal(reserved[test, memory], 2.0)
    assert (reserved[test, RESOURCES.index("cpu")] < 1.0).any()


@pytest.mark.parametrize("killed_at", ["describe_version", "move_alias"])
def test_killed_once_the_model_is_registered_a_run_ends_with_that_version_and_the_alias_is_moved_last(
    place: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    config = replace(CONFIG, model_name=killed_at.replace("_", "-"))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tracking, killed_at, killed)
        with pytest.raises(KeyboardInterrupt):
            run_training(place / "dataset", config)
    with pytest.raises(ModelError, match="champion"):
        tracking.resolve_model(f"{config.model_name}@champion")
    report = run_training(place / "dataset", config)
    assert report.version == "1"
    assert tracking.resolve_model(f"{config.model_name}@champion").version == "1"
    with pytest.raises(ModelError):
        tracking.resolve_model(f"{config.model_name}/2")
    metrics = tracking.find_run(report.run_id).metrics
    assert any(name.startswith("valid.") for name in metrics)
    assert run_training(place / "dataset", config) == replace(report, reused=True)


def test_killed_while_it_records_a_run_has_each_metric_once_and_the_model_that_was_logged(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(
        CONFIG, model_name="recorded", experiment="recorded", fit=replace(CONFIG.fit, epochs=2, refit=False)
    )

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for killed_at in ("create_model_version", "set_registered_model_alias"):
        with monkeypatch.context() as patched:
            patched.setattr(MlflowClient, killed_at, killed)
            with pytest.raises(KeyboardInterrupt):
                run_training(place / "dataset", config)
    report = run_training(place / "dataset", config)
    client, run = store_client(), tracking.find_run(report.run_id)
    for name in run.metrics:
        points = [(point.step, point.value) for point in client.get_metric_history(run.run_id, name)]
        assert len(points) == len(set(points)), name
        if name != "fit_seconds":
            assert len(points) == len({step for step, _ in points}), name
    experiment = client.get_experiment_by_name("recorded")
    assert experiment is not None
    assert len(client.search_logged_models([experiment.experiment_id])) == 1


@pytest.mark.parametrize("gone", ["report", "model", "weights", "half of the weights"])
def test_a_finished_run_whose_files_are_gone_or_damaged_is_trained_again(
    place: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(CONFIG, model_name=f"gone-{gone.replace(' ', '-')}", fit=replace(CONFIG.fit, epochs=1))
    lost = run_training(place / "dataset", config)
    if gone == "report":
        (found,) = place.rglob(f"{lost.run_id}/artifacts/report.json")
        found.unlink()
    elif gone == "model":
        shutil.rmtree(tracking.fetch_bundle(f"{lost.model}/{lost.version}")[0].parents[1])
    else:
        weights = tracking.fetch_bundle(f"{lost.model}/{lost.version}")[0] / "network.safetensors"
        content = weights.read_bytes()
        weights.unlink()
        if gone != "weights":
            weights.write_bytes(content[: len(content) // 2])
    again = run_training(place / "dataset", config, progress=print)
    assert f"run {lost.run_id} is finished, but its result is gone" in capsys.readouterr().out
    assert not again.reused
    assert (again.run_id, again.version) != (lost.run_id, lost.version)
    assert again.prices == lost.prices
    assert run_training(place / "dataset", config) == replace(again, reused=True)


def test_checkpoints_of_a_run_that_was_killed_at_its_very_end_are_removed(place: Path, trained: TrainReport) -> None:
    (key,) = [run.tags[tracking.KEY_TAG] for run in [tracking.find_run(trained.run_id)]]
    left = place / "dataset" / "checkpoints" / key[:16]
    left.mkdir(parents=True)
    (left / "checkpoint.safetensors").write_bytes(b"left")
    assert run_training(place / "dataset", CONFIG).reused
    assert not left.exists()


@pytest.mark.parametrize("estimator", ["network", "trees"])
def test_what_the_trace_knows_nothing_of_is_not_foreseen_and_null_in_every_file(
    place: Path, tmp_path: Path, estimator: str
) -> None:
    mapping = (place / "raw" / "mapping.toml").read_text().replace("memory_limit = 2.0\n", "")
    (tmp_path / "mapping.toml").write_text(mapping)
    dataset_of(place / "raw", tmp_path / "dataset", mapping=tmp_path / "mapping.toml", buckets=2)
    features = FeatureSet.open(tmp_path / "dataset")
    config_of_run = replace(CONFIG, estimator=estimator, model_name="unlimited", experiment="unlimited")
    report = run_training(tmp_path / "dataset", config_of_run)
    assert report.violation["baseline"]["cpu"] is not None
    assert report.violation["baseline"]["memory"] is None
    assert report.reclaimed["aggressive"]["memory"] is None
    json.dumps(asdict(report), allow_nan=False)
    assert run_training(tmp_path / "dataset", config_of_run) == replace(report, reused=True)
    folder, _ = tracking.fetch_bundle(f"{report.model}/{report.version}")
    assert "NaN" not in (folder / BUNDLE_FILE).read_text()
    forecast = load_bundle(folder).forecaster.predict(np.asarray(features.x[:50]))
    hour = HORIZONS_S.index(3_600)
    assert np.isfinite(forecast.quantiles[:, 0, hour]).all()
    assert np.isnan(forecast.quantiles[:, 1]).all()
    assert np.isnan(forecast.oom_probability).all()


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_a_device_that_is_not_here_is_refused_before_there_is_a_run(place: Path, device: str) -> None:
    config = replace(CONFIG, fit=replace(CONFIG.fit, device=device), experiment="elsewhere")
    with pytest.raises(ConfigError, match=r"fit\.device"):
        run_training(place / "dataset", config)
    assert tracking.find_runs("elsewhere") == []


def test_a_name_that_a_model_of_another_kind_has_is_refused_before_there_is_a_run(place: Path) -> None:
    client = store_client()
    run = client.create_run(client.create_experiment("of others"))
    client.create_registered_model("taken")
    client.create_model_version("taken", source=place.as_uri(), run_id=run.info.run_id)
    with pytest.raises(ConfigError, match=r"taken/1; choose another name, --set model_name=NAME"):
        run_training(place / "dataset", replace(CONFIG, model_name="taken", experiment="not begun"))
    assert tracking.find_runs("not begun") == []


def test_the_first_model_is_served_and_a_later_one_is_the_candidate(place: Path) -> None:
    config = replace(CONFIG, model_name="in-turn", fit=replace(CONFIG.fit, epochs=1))
    first = run_training(place / "dataset", config)
    assert (first.version, first.champion) == ("1", "1")
    second = run_training(place / "dataset", replace(config, seed=5))
    assert (second.version, second.champion) == ("2", "1")
    versions = [tracking.resolve_model(f"in-turn@{alias}").version for alias in ("champion", "candidate")]
    assert versions == ["1", "2"]


def test_a_model_that_reclaims_less_than_the_built_in_one_is_a_candidate_alone(place: Path) -> None:
    config = replace(CONFIG, model_name="short", against_builtin=True, fit=replace(CONFIG.fit, width=1, epochs=1))
    report = run_training(place / "dataset", config)
    assert (report.version, report.champion) == ("1", None)
    assert any(note.startswith("reclaims less of validation rows than the built-in model") for note in report.notes)
    assert tracking.resolve_model("short@candidate").version == "1"


def test_a_model_is_not_compared_with_a_built_in_one_that_learned_from_the_rows_it_would_be_compared_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = json.loads((BUILTIN_FOLDER / BUNDLE_FILE).read_text())
    features = FeatureSet.open(place / "dataset")
    builtin["trained"]["datasets"][-1][SEEN] = sample_windows(features)
    shutil.copytree(BUILTIN_FOLDER, tmp_path / "builtin")
    (tmp_path / "builtin" / BUNDLE_FILE).write_text(json.dumps(builtin))
    monkeypatch.setattr(held_out, "BUILTIN_FOLDER", tmp_path / "builtin")
    config = replace(CONFIG, model_name="known", against_builtin=True, fit=replace(CONFIG.fit, width=1, epochs=1))
    report = run_training(place / "dataset", config)
    assert "not compared with the built-in model, which learned from windows of dataset" in report.notes
    assert not any(note.startswith("reclaims less") for note in report.notes)
    assert report.champion == "1"


def test_trees_are_registered_under_their_own_name(place: Path, trained: TrainReport) -> None:
    report = run_training(place / "dataset", replace(CONFIG, estimator="trees"))
    assert report.model == "reclaim-trees"
    bundle = load_bundle(tracking.fetch_bundle(f"reclaim-trees/{report.version}")[0])
    assert bundle.kind == "trees"
    assert tracking.resolve_model("reclaim@champion").name == trained.model
    assert tracking.resolve_model("reclaim-trees@champion").version == report.version
    assert "300s" not in report.scores["cpu"]
    assert not any(name.startswith("fit.") for name in tracking.find_run(report.run_id).params)


def test_a_dataset_without_features_is_an_error_with_the_remedy(place: Path, tmp_path: Path) -> None:
    config = IngestConfig(trace="series", mapping=str(place / "raw" / "mapping.toml"), buckets=2)
    ingest(place / "raw", tmp_path / "bare", config)
    with pytest.raises(ConfigError, match="reclaim features"):
        run_training(tmp_path / "bare", CONFIG)
    with pytest.raises(ConfigError, match="reclaim ingest"):
        run_training(tmp_path / "nothing", CONFIG)


def _rows(dataset: Path) -> dict[str, Any]:
    features = FeatureSet.open(dataset)
    counts = {"train": len(features.train_rows()), "valid": len(features.valid_rows())}
    trained_us, tuned_us = features.manifest["cuts_us"]
    kept = {"trained_until_us": trained_us, "tuned_until_us": tuned_us, "kept_unseen": 0.2}
    facts = {"name": dataset.name, "nature": "recorded", "fingerprint": Dataset.open(dataset).fingerprint}
    return {**facts, **counts, **kept}


@pytest.mark.parametrize("estimator", ["network", "trees"])
def test_several_datasets_are_trained_on_together_and_named_with_their_rows(
    place: Path, other: Path, estimator: str
) -> None:
    config = replace(CONFIG, estimator=estimator, model_name="together")
    report = run_training([place / "dataset", other], config)
    expected = sorted([_rows(place / "dataset"), _rows(other)], key=lambda facts: str(facts["fingerprint"]))
    assert report.datasets == expected
    assert report.rows.items() >= {k: sum(facts[k] for facts in expected) for k in ("train", "valid")}.items()
    bundle = load_bundle(tracking.fetch_bundle(f"{report.model}/{report.version}")[0])
    of_bundle = [{k: v for k, v in facts.items() if k != SEEN} for facts in bundle.trained["datasets"]]
    assert of_bundle == expected
    assert all(0 < len(facts[SEEN]) <= SAMPLED for facts in bundle.trained["datasets"])
    told = bundle.trained["violation_by_tier"]
    assert list(told) == list(report.violation)
    assert all(tiers and set(tiers) <= set(TIER_LABELS) for tiers in told.values())
    assert bundle.dataset_fingerprint not in {facts["fingerprint"] for facts in expected}
    assert tracking.find_run(report.run_id).tags["dataset"] == ",".join(facts["fingerprint"] for facts in expected)
    for name, budget in (("baseline", 0.01), ("aggressive", 0.05)):
        assert all(violation is not None and violation <= budget for violation in report.violation[name].values())
    again = run_training([other, place / "dataset"], config)  # the order they are named in decides nothing
    assert again == replace(report, reused=True)


def test_one_dataset_is_the_same_run_alone_or_in_a_list_and_another_run_with_another(place: Path, other: Path) -> None:
    config = replace(CONFIG, model_name="beside")
    for dataset in (place / "dataset", other):
        alone = run_training(dataset, config)
        assert not alone.reused
        assert alone.datasets == [_rows(dataset)]
        assert run_training([dataset], config) == replace(alone, reused=True)
    assert not run_training([place / "dataset", other], config).reused


def test_training_on_a_dataset_held_out_for_tests_is_refused_before_there_is_a_run(
    place: Path, other: Path, tmp_path: Path
) -> None:
    shutil.copytree(other, tmp_path / "held")
    build_features(Dataset.open(tmp_path / "held"), FeatureConfig(SplitConfig(role="test")))
    config = replace(CONFIG, experiment="held-out")
    remedy = (
        r"held: .*split\.role=test, .* nothing of it may be trained on; .*reclaim features .*held --set split\.role"
    )
    with pytest.raises(ConfigError, match=remedy):
        run_training([place / "dataset", tmp_path / "held"], config)
    assert tracking.find_runs("held-out") == []


def test_money_without_one_mean_limit_to_compare_it_with_is_refused_before_there_is_a_run(
    place: Path, other: Path
) -> None:
    config = replace(CONFIG, experiment="money", value=Value(core_hour=0.02, violation=5.0))
    with pytest.raises(ConfigError, match="the mean limit of cpu is unknown"):
        run_training([place / "dataset", other], config)
    assert tracking.find_runs("money") == []


def test_a_dataset_named_twice_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "dataset", tmp_path / "copy")
    with pytest.raises(ConfigError, match="hold the same dataset"):
        run_training([place / "dataset", tmp_path / "copy"], CONFIG)
    with pytest.raises(ConfigError, match="at least 1 dataset"):
        run_training([], CONFIG)


def test_two_datasets_of_the_same_windows_are_refused_as_prices_would_be_set_on_rows_that_are_learned_from(
    place: Path, other: Path, tmp_path: Path
) -> None:
    config = replace(CONFIG, experiment="overlapping")
    lines = (place / "raw" / "cell.csv").read_text().splitlines()
    write_raw(tmp_path / "raw", [line for k, line in enumerate(lines) if k == 0 or (k - 1) % 300 < 200])
    earlier = dataset_of(tmp_path / "raw", tmp_path / "earlier", buckets=2).path
    with pytest.raises(ConfigError, match=r"(dataset and .*earlier|earlier and .*dataset) hold the same windows, so "):
        run_training([place / "dataset", other, earlier], config)
    assert tracking.find_runs("overlapping") == []


def test_a_horizon_that_no_validation_row_spans_is_an_error_before_there_is_a_run(place: Path) -> None:
    # 25 hours of trace: no row of a period sees 24 hours ahead within it
    before = len(tracking.find_runs(CONFIG.experiment))
    with pytest.raises(HistoryTooShortError, match=r"cpu: 0 of \d+ validation rows have a limit and a known demand"):
        run_training(place / "dataset", replace(CONFIG, horizon_s=86_400))
    assert len(tracking.find_runs(CONFIG.experiment)) == before
    assert not (place / "dataset" / "checkpoints").exists()


def test_of_two_processes_at_the_same_training_the_second_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seen = replace(CONFIG, seed=5), list[str]()
    one_epoch = fit._epoch

    def with_another(*args: Any) -> dict[str, float]:
        if not seen:
            with pytest.raises(ConfigError, match="another process is running this training") as refused:
                run_training(place / "dataset", config)
            seen.append(str(refused.value))
        return one_epoch(*args)

    monkeypatch.setattr(fit, "_epoch", with_another)
    assert not run_training(place / "dataset", config).reused
    assert seen
    assert not (place / "dataset" / "checkpoints").exists()


def test_settings_that_no_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="estimator must be one of network, trees, portable, got 'forest'"):
        TrainConfig(estimator="forest")
    with pytest.raises(ConfigError, match="horizon_s must be one of"):
        TrainConfig(horizon_s=60)


@pytest.mark.parametrize(
    ("engine", "estimator", "launched", "message"),
    [
        (
            Engine("processes", 2),
            "network",
            False,
            "--engine processes, --workers 2: a model is fitted by this process",
        ),
        (Engine("local", 2), "network", False, "--engine local, --workers 2: .*`--engine ray`"),
        (Engine("ray", 2), "trees", False, "--engine ray: the trees are fitted by one process"),
        (Engine("ray", 2), "network", True, "run it without torchrun"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_before_anything_is_read(
    engine: Engine, estimator: str, launched: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match=message):
        run_training(Path("nowhere"), replace(CONFIG, estimator=estimator), engine=engine)
