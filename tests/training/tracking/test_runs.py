"""The record: everything stays in the store's own folder, and a model is found again by name."""

from __future__ import annotations

import atexit
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from matplotlib.figure import Figure
from sqlalchemy.engine import make_url

from reclaim.data.core.files import folder_of_process
from reclaim.data.errors import ConfigError, ModelAbsentError, ModelError
from reclaim.features.registry import FEATURE_NAMES
from reclaim.training.bundle import Bundle, load_bundle, output_names, save_bundle
from reclaim.training.margins.price import Price, three_prices
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.settings import QUANTILE_LEVELS
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.client import default_store, default_tracking_uri, missing, sqlite_file, store_client
from reclaim.training.tracking.runs import ModelVersion


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working folder that the tests of this module share: making a store takes seconds."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(autouse=True)
def _in_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(store)


@pytest.fixture
def bundle(random_forecaster: NetworkForecaster) -> Bundle:
    """Return a bundle of the random network."""
    prices = three_prices(Price("baseline", (40.0, 200.0)), Price("aggressive", (4.0, 2.0)))
    return Bundle("network", random_forecaster, 3_600, prices, dataset_fingerprint="abc")


def _register(run: tracking.Run, bundle: Bundle, folder: Path, name: str, alias: str | None) -> tracking.ModelVersion:
    save_bundle(bundle, folder / "bundle")
    outputs = output_names(bundle.forecaster)
    registered = tracking.register_bundle(run, folder / "bundle", name, inputs=FEATURE_NAMES, outputs=outputs)
    if alias is not None:
        tracking.move_alias(registered, alias)
    return registered


def test_what_a_run_logs_is_found_again(store: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("what was seen")
    with tracking.start_run("round trip", "borg/baseline", tags={"reclaim.key": "k1"}) as run:
        run.log_params({"seed": 1, "fit": {"width": 128, "levels": (0.5, 0.9)}})
        run.log_metrics({"valid": {"cpu": {"pinball": 0.25, "unknown": float("nan")}}})
        run.log_history([{"loss": 3.0}, {"loss": 2.0}])
        run.log_dict({"answer": [1, 2]}, "report.json")
        run.log_figure(Figure(figsize=(1, 1)), "figure.png")
        run.log_artifact(tmp_path / "notes.txt")
    (found,) = tracking.find_runs("round trip", tags={"reclaim.key": "k1"})
    assert found.run_id == run.run_id
    assert found.name == "borg/baseline"
    assert found.status == "FINISHED"
    assert found.params == {"seed": "1", "fit.width": "128", "fit.levels": "[0.5, 0.9]"}
    assert found.metrics == {"valid.cpu.pinball": 0.25, "loss": 2.0}
    assert found.tags == {"reclaim.key": "k1"}
    assert tracking.find_run(run.run_id) == found
    assert tracking.load_dict(run.run_id, "report.json") == {"answer": [1, 2]}
    assert tracking.find_runs("round trip", tags={"reclaim.key": "other"}) == []
    assert tracking.find_runs("no such experiment") == []
    assert sorted(p.name for p in store.iterdir()) == ["mlruns"]
    assert sorted(p.name for p in (store / "mlruns").iterdir()) == ["artifacts", "mlflow.db"]


def test_a_run_and_a_store_of_the_caller_stay_what_they_were(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store_client()  # MLflow warns of its own parts the first time
    own = mlflow.get_tracking_uri()  # MLflow's own default
    with mlflow.start_run() as mine:
        with tracking.start_run("within", "network") as run:
            registered = _register(run, bundle, tmp_path, "within", None)
        tracking.fetch_bundle(f"{registered.name}/{registered.version}")
        mlflow.log_metric("loss", 0.5)
        assert own == mlflow.get_tracking_uri() != default_tracking_uri()
        assert mlflow.active_run() == mine
        with monkeypatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", own)
            with tracking.start_run("within", "network") as child:
                pass
            with tracking.start_run("within", "network", tags={tracking.PARENT: child.run_id}) as grandchild:
                pass
        with tracking.start_run("within", "network", tags={tracking.PARENT: run.run_id}) as other:
            pass
    client = mlflow.MlflowClient(own)
    assert client.get_run(mine.info.run_id).data.metrics == {"loss": 0.5}
    assert client.get_run(child.run_id).data.tags["mlflow.parentRunId"] == mine.info.run_id
    assert client.get_run(grandchild.run_id).data.tags["mlflow.parentRunId"] == child.run_id
    assert "mlflow.parentRunId" not in store_client().get_run(run.run_id).data.tags
    assert store_client().get_run(other.run_id).data.tags["mlflow.parentRunId"] == run.run_id


def test_mlflow_prints_no_address_of_a_run_into_the_output_of_a_command() -> None:
    with tracking.start_run("silent", "network"):
        assert os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] == "true"
    assert "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT" not in os.environ  # those of the caller are printed


def test_a_run_that_breaks_is_kept_as_failed_and_can_be_gone_on_with() -> None:
    def break_off() -> None:
        with tracking.start_run("breaks", "network"):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        break_off()
    (failed,) = tracking.find_runs("breaks")
    assert failed.status == "FAILED"
    with tracking.start_run("breaks", "network", run_id=failed.run_id):
        pass
    (finished,) = tracking.find_runs("breaks")
    assert finished.status == "FINISHED"


def test_a_run_is_continued_where_the_caller_has_set_an_experiment_and_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tracking.start_run("theirs", "network") as run:
        pass
    monkeypatch.setenv("MLFLOW_TRACKING_URI", default_tracking_uri())
    monkeypatch.setattr("mlflow.tracking.fluent._active_experiment_id", None)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "")  # MLflow sets both
    mine = mlflow.set_experiment("mine").experiment_id
    with tracking.start_run("theirs", "network", run_id=run.run_id) as again:
        pass
    assert again.run_id == run.run_id
    with mlflow.start_run() as active:
        assert active.info.experiment_id == mine


def test_a_run_that_the_environment_names_is_not_recorded_into_and_stays_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with tracking.start_run("theirs", "network") as theirs:
        pass
    monkeypatch.setenv("MLFLOW_RUN_ID", theirs.run_id)  # as `mlflow run` does
    with tracking.start_run("ours", "network") as run:
        pass
    assert [found.run_id for found in tracking.find_runs("ours")] == [run.run_id]
    assert os.environ["MLFLOW_RUN_ID"] == theirs.run_id


def test_an_experiment_that_was_deleted_is_recorded_into_again_and_its_newest_run_comes_first() -> None:
    with tracking.start_run("thrown away", "one") as run:
        pass
    client = store_client()
    client.delete_experiment(client.get_run(run.run_id).info.experiment_id)
    assert tracking.find_runs("thrown away") == []
    time.sleep(0.002)
    with tracking.start_run("thrown away", "other"):
        pass
    assert [run.name for run in tracking.find_runs("thrown away")] == ["other", "one"]  # restored with the experiment


def test_runs_of_several_pages_are_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        with tracking.start_run("pages", name):
            pass
    search = mlflow.MlflowClient.search_runs

    def two_at_once(*of: Any, **how: Any) -> object:
        return search(*of, **how | {"max_results": 2})

    monkeypatch.setattr(mlflow.MlflowClient, "search_runs", two_at_once)
    assert sorted(run.name for run in tracking.find_runs("pages")) == ["a", "b", "c"]


def test_a_registered_bundle_is_fetched_by_alias_and_by_version(bundle: Bundle, tmp_path: Path) -> None:
    with tracking.start_run("models", "network") as run:
        first = _register(run, bundle, tmp_path, "cell", tracking.CHAMPION)
    with tracking.start_run("models", "network") as run:
        second = _register(run, replace(bundle, dataset_fingerprint="def"), tmp_path, "cell", None)
    assert (first.version, second.version) == ("1", "2")
    folder, version = tracking.fetch_bundle("cell@champion")
    assert version == "1"
    assert load_bundle(folder).dataset_fingerprint == "abc"
    folder, version = tracking.fetch_bundle("cell/2")
    assert version == "2"
    assert load_bundle(folder).dataset_fingerprint == "def"
    assert tracking.resolve_model("cell/2") == second


def test_registering_again_after_being_killed_before_the_alias_makes_no_other_version(
    bundle: Bundle, tmp_path: Path
) -> None:
    with tracking.start_run("models", "network") as run:
        version = _register(run, bundle, tmp_path, "killed", None)
    with pytest.raises(ModelError, match="killed@champion"):
        tracking.fetch_bundle("killed@champion")
    with tracking.start_run("models", "network", run_id=run.run_id) as again:
        assert _register(again, bundle, tmp_path, "killed", tracking.CHAMPION) == version
    assert tracking.fetch_bundle("killed@champion")[1] == version.version


def test_a_model_that_was_not_logged_to_the_end_is_logged_again(bundle: Bundle, tmp_path: Path) -> None:
    client = store_client()
    with tracking.start_run("models", "network") as run:
        experiment = client.get_run(run.run_id).info.experiment_id
        half = client.create_logged_model(experiment, name="model", source_run_id=run.run_id)
        _register(run, bundle, tmp_path, "half", None)
    (whole,) = client.search_logged_models([experiment], f"source_run_id='{run.run_id}'")
    assert whole.model_id != half.model_id
    assert load_bundle(tracking.fetch_bundle("half/1")[0]).dataset_fingerprint == "abc"


def test_a_version_whose_files_are_gone_is_an_error_with_the_remedy(bundle: Bundle, tmp_path: Path) -> None:
    with tracking.start_run("models", "network") as run:
        _register(run, bundle, tmp_path, "gone", None)
    shutil.rmtree(tracking.fetch_bundle("gone/1")[0].parents[1])
    (tmp_path / "copy").mkdir()
    for into in (tmp_path / "copy", None):
        with pytest.raises(ModelError, match=r"gone/1 is version 1, whose files cannot be read \(.*\); train again"):
            tracking.fetch_bundle("gone/1", into)


def test_a_champion_that_is_missing_is_an_error_that_names_the_latest_model(bundle: Bundle, tmp_path: Path) -> None:
    with tracking.start_run("models", "network") as run:
        version = _register(run, bundle, tmp_path, "waiting", tracking.CANDIDATE)
    with pytest.raises(ModelAbsentError) as found:
        tracking.resolve_model("waiting@champion")
    assert f"`reclaim promote DATASET --model waiting/{version.version}` serves the latest" in str(found.value)
    assert "reclaim train" not in str(found.value)
    with pytest.raises(ModelAbsentError, match="train one with `reclaim train`"):
        tracking.resolve_model("waiting/7")


def test_a_candidate_that_was_deleted_is_an_error_that_names_the_newest_version_that_is_left(
    bundle: Bundle, tmp_path: Path
) -> None:
    for _ in range(3):
        with tracking.start_run("models", "network") as run:
            _register(run, bundle, tmp_path, "left", tracking.CANDIDATE)
    store_client().delete_model_version("left", "3")
    for alias in (tracking.CHAMPION, tracking.CANDIDATE):
        with pytest.raises(ModelAbsentError, match=r"`reclaim promote DATASET --model left/2` serves the latest"):
            tracking.resolve_model(f"left@{alias}")


def test_a_model_that_is_downloaded_from_a_server_is_removed_at_the_end_of_the_process(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_end: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", lambda done, *of, **how: at_end.append(lambda: done(*of, **how)))
    monkeypatch.setattr(tracking, "sqlite_file", lambda _: None)  # as of a server
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    folder_of_process.cache_clear()
    with tracking.start_run("models", "network") as run:
        _register(run, bundle, tmp_path, "downloaded", None)
    folders = [tracking.fetch_bundle("downloaded/1")[0] for _ in range(2)]
    assert folders[0] != folders[1]
    assert all(load_bundle(folder).dataset_fingerprint == "abc" for folder in folders)
    for done in at_end:
        done()
    folder_of_process.cache_clear()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_registered_model_is_of_another_kind_where_no_run_of_its_versions_can_be_of_reclaim(
    bundle: Bundle, tmp_path: Path
) -> None:
    client = store_client()
    run = client.create_run(client.create_experiment("of others"))

    def registered(name: str, run_id: str | None) -> None:
        client.create_model_version(name, source=tmp_path.as_uri(), run_id=run_id)

    tracking.check_name("theirs")  # there is none
    client.create_registered_model("theirs")
    tracking.check_name("theirs")  # there is no version
    for _ in range(2):
        registered("theirs", run.info.run_id)
    with pytest.raises(ConfigError, match=r"model theirs in .* another kind: no `reclaim train` made theirs/2; choose"):
        tracking.check_name("theirs")
    registered("theirs", None)
    tracking.check_name("theirs")  # the run is unknown
    with tracking.start_run("models", "network", tags={tracking.KEY_TAG: "key"}) as mine:
        _register(mine, bundle, tmp_path, "ours", None)
    registered("ours", run.info.run_id)
    tracking.check_name("ours")  # a version of another kind is among them


def test_a_version_that_was_registered_without_a_run_has_an_empty_one() -> None:
    client = store_client()
    client.create_registered_model("copied")
    client.create_model_version("copied", source="models:/cell/1")
    assert tracking.resolve_model("copied/1") == ModelVersion("copied", "1", "")


def test_a_registered_bundle_loads_through_the_generic_interface(bundle: Bundle, tmp_path: Path) -> None:
    import numpy as np
    import pandas as pd

    with tracking.start_run("models", "network") as run:
        _register(run, bundle, tmp_path, "generic", tracking.CHAMPION)
    with default_store(default_tracking_uri()):
        model = mlflow.pyfunc.load_model("models:/generic@champion")
    x = np.random.default_rng(0).random((3, len(FEATURE_NAMES))).astype(np.float32)
    answer = model.predict(pd.DataFrame(x, columns=list(FEATURE_NAMES)))
    forecast = bundle.forecaster.predict(x)
    assert np.array_equal(answer["memory_3600s_q0.98"], forecast.quantiles[:, 1, 1, QUANTILE_LEVELS.index(0.98)])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nobody@champion", "no model nobody@champion .* train one with `reclaim train`"),
        ("nobody/3", "no model nobody/3"),
        ("nobody", "expected a model as NAME@ALIAS or NAME/VERSION, got 'nobody'"),
    ],
)
def test_a_model_that_does_not_exist_is_an_error_with_the_remedy(reference: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as found:
        tracking.fetch_bundle(reference)
    assert isinstance(found.value, ModelAbsentError) == (reference != "nobody")


def test_reading_makes_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no model reclaim@champion in sqlite.*mlflow\.db; .* `reclaim train`"):
        tracking.fetch_bundle("reclaim@champion")
    with pytest.raises(ModelError, match="no run 0000"):
        tracking.find_run("0000")
    with pytest.raises(ModelError, match="no run 0000"):
        tracking.load_dict("0000", "report.json")
    assert tracking.find_runs("margins") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["my runs", "my%20runs", "100% sure?", "a#b"])
def test_a_store_lies_where_sqlalchemy_looks_for_it(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    uri = default_tracking_uri()
    assert make_url(uri).database == str(sqlite_file(uri)) == str(tmp_path / folder / "mlruns" / "mlflow.db")


def test_a_blank_of_a_store_may_be_quoted_in_its_uri(tmp_path: Path) -> None:
    (tmp_path / "my runs.db").touch()
    assert not missing(f"sqlite:///{tmp_path}/my%20runs.db?timeout=9")
    assert missing(f"sqlite:///{tmp_path}/my%2520runs.db")


def test_a_store_that_was_not_made_to_the_end_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path /= "in%20here"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)

    def stopped(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mlflow.store.db.utils._upgrade_db", stopped)
        with pytest.raises(KeyboardInterrupt), tracking.start_run("margins", "network"):
            pass
    assert missing(default_tracking_uri())
    for left in ("mlflow.db.partial", "mlflow.db.partial-journal"):  # by a process that could not clean up
        (tmp_path / "mlruns" / left).write_text("half a store " * 100)
    with tracking.start_run("margins", "network"):
        pass
    assert [run.name for run in tracking.find_runs("margins")] == ["network"]
    assert not list(tmp_path.glob("mlruns/*.partial*"))


@pytest.mark.parametrize(
    "uri", ["sqlite:///{}/file/mlflow.db", "sqlite:///{}/folder", "nonsense://x", "sqlite:///{}/file"]
)
def test_a_store_that_cannot_be_used_is_an_error_of_one_line(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no database " * 100)
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(tmp_path))
    expected = r"the tracking store .* cannot be used .* set MLFLOW_TRACKING_URI"
    with pytest.raises(ModelError, match=expected) as refusal, tracking.start_run("nowhere", "network"):
        pass
    assert uri.format(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_server_that_is_not_there_is_an_error_of_one_line_and_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with pytest.raises(ModelError, match=r"the tracking store http://127\.0\.0\.1:9 cannot be used"):
        tracking.find_runs("margins")
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"


def test_a_server_that_is_not_there_is_asked_once_and_says_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, str]] = []

    def refused(*_: object, **__: object) -> None:
        asked.append(
            {name: os.environ[name] for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")}
        )
        raise mlflow.MlflowException("refused")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    monkeypatch.setattr(mlflow.MlflowClient, "search_experiments", refused)
    with pytest.raises(ModelError, match=r"http://127\.0\.0\.1:9 cannot be used \(refused\)"):
        tracking.find_runs("margins")
    assert asked == [{"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}]
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ  # later requests may take their time
    assert capfd.readouterr() == ("", "")


def test_a_store_that_fails_in_the_middle_is_an_error_of_one_line() -> None:
    with (
        pytest.raises(ModelError, match=r"does not record the run \(gone\); run it again"),
        tracking.start_run("gone", "x"),
    ):
        raise mlflow.MlflowException("gone\nTraceback")


@pytest.mark.parametrize(
    ("asked", "call"),
    [
        ("search_runs", lambda: tracking.find_runs("failing")),
        ("get_run", lambda: tracking.find_run("0000")),
        ("get_model_version", lambda: tracking.find_version("failing/1")),
        ("get_model_version", lambda: tracking.resolve_model("failing/1")),
        ("set_registered_model_alias", lambda: tracking.move_alias(ModelVersion("failing", "1", "run"), "champion")),
        ("update_model_version", lambda: tracking.describe_version(ModelVersion("failing", "1", "run"), "text")),
    ],
)
def test_whatever_a_store_fails_to_do_is_an_error_of_one_line(
    asked: str, call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracking.start_run("failing", "network"):
        pass

    def fails(*_: object, **__: object) -> None:
        raise mlflow.MlflowException("database is locked\nTraceback")

    monkeypatch.setattr(mlflow.MlflowClient, asked, fails)
    with pytest.raises(ModelError, match=r" \(database is locked\); run it again$") as refusal:
        call()
    assert type(refusal.value) is ModelError
    assert str(refusal.value).startswith(default_tracking_uri())


def test_a_metric_that_is_logged_again_is_kept_once() -> None:
    with tracking.start_run("again", "network") as run:
        run.log_history([{"loss": 3.0}, {"loss": 2.0}])
    time.sleep(0.002)
    with tracking.start_run("again", "network", run_id=run.run_id) as run:
        run.log_history([{"loss": 3.0}, {"loss": 2.0}])
        run.log_metrics({"loss": 1.0}, step=2)
    points = store_client().get_metric_history(run.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert tracking.find_run(run.run_id).metrics == {"loss": 1.0}


def test_a_run_killed_before_its_model_was_registered_registers_it_where_its_seconds_are_others(
    bundle: Bundle, tmp_path: Path
) -> None:
    with tracking.start_run("models", "network") as run:
        run.log_metrics({"fit_seconds": 2.5})
    with tracking.start_run("models", "network", run_id=run.run_id) as again:
        again.log_metrics({"fit_seconds": 1.5, "price": 3.0})
        assert _register(again, bundle, tmp_path, "slow", None).version == "1"
    assert tracking.find_run(run.run_id).metrics == {"fit_seconds": 2.5, "price": 3.0}


def test_numbers_of_numpy_are_logged_as_others_are() -> None:
    with tracking.start_run("numpy", "network") as run:
        run.log_history([{"loss": np.float32(0.5), "rows": np.int64(3), "none": np.float32("nan")}])
    assert tracking.find_run(run.run_id).metrics == {"loss": 0.5, "rows": 3.0}


def test_a_store_that_takes_no_champion_is_an_error_of_one_line_and_says_nothing_else(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with tracking.start_run("models", "network") as run:
        registered = _register(run, bundle, tmp_path, "unwritable", None)
    shutil.copy("mlruns/mlflow.db", tmp_path)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as file:
        file.execute("DROP TABLE registered_model_aliases")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    with pytest.raises(
        ModelError, match=r"mlflow\.db does not make unwritable/1 the champion \(.*\); run it"
    ) as refusal:
        tracking.move_alias(registered, tracking.CHAMPION)
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", "")


def test_registering_prints_nothing(bundle: Bundle, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with tracking.start_run("models", "network") as run:
        _register(run, bundle, tmp_path, "silent", tracking.CHAMPION)
    assert capfd.readouterr() == ("", "")


def test_a_run_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ModelError, match="no run 0000"):
        tracking.find_run("0000")


def test_the_store_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_tracking_uri() == f"sqlite:///{tmp_path / 'mlruns' / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert default_tracking_uri() == "http://127.0.0.1:5000"


def test_the_commit_is_that_of_the_code_and_not_of_the_folder_that_one_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        name = ["-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.run(["git", *name, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    code, other = tmp_path / "code.py", tmp_path / "venv" / "code.py"
    other.parent.mkdir()
    code.touch()
    git("init", "-q")
    git("add", "code.py")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD").strip()
    assert tracking.git_commit(code) == commit
    other.touch()  # installed inside another repository
    assert tracking.git_commit(other) is None
    code.write_text("changed = True\n")
    assert tracking.git_commit(code) == f"{commit}+"
    monkeypatch.chdir(tmp_path)
    here = tracking.git_commit()
    assert here is None or not here.startswith(commit)
