"""The settings that come with the package: each loads, says where its values come from, and trains."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from reclaim.cli.app import app
from reclaim.config import config_from, load_config
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import IngestConfig
from reclaim.training.settings import CONFIGS, FitConfig, TrainConfig, TreeConfig, config_file, shipped_configs
from reclaim.training.tracking.runs import find_run
from tests.series import dataset_of, write_cell


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_configuration_loads_and_says_where_each_value_comes_from(name: str) -> None:
    path = config_file(Path(name))
    assert path == CONFIGS / f"{name}.toml"
    load_config(TrainConfig, path)
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            assert re.search(r"# (searched|the default|from the format)", line), line


def test_a_file_is_taken_before_a_shipped_configuration_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("portable").write_text("seed = 7\n")
    assert load_config(TrainConfig, config_file(Path("portable"))).seed == 7


def test_params_are_refused_where_an_estimator_has_settings_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"params are settings of estimators of your own; those of network are fit"):
        load_config(TrainConfig, None, ["params.epochs=1"])
    with pytest.raises(ConfigError, match=r"those of trees are trees"):
        load_config(TrainConfig, None, ["estimator=trees", "params.leaves=4"])


@pytest.mark.parametrize(
    ("name", "within", "beyond"),
    [
        ("seed", (0, 2**31 - 1), (-1, 2**31)),
        ("horizon_s", (300, 3_600, 86_400), (600,)),
        ("fit.dropout", (0.0, 0.99), (-0.01, 1.0, math.nan)),
        ("fit.warmup_share", (0.0, 0.99), (-0.01, 1.0, math.nan)),
        ("fit.weight_decay", (0.0,), (-0.01, math.nan)),
        ("fit.oom_weight", (0.0,), (-0.01, math.nan)),
        ("fit.learning_rate", (1e-9,), (0.0, math.nan)),
        ("trees.learning_rate", (1e-9,), (0.0, math.nan)),
        ("trees.leaves", (2, 2**31 - 1), (1, 2**31)),
        *((f"fit.{f.name}", (1, 2**31 - 1), (0, 2**31)) for f in fields(FitConfig) if type(f.default) is int),
        *((f"trees.{f.name}", (2, 2**31 - 1), (0, 2**31)) for f in fields(TreeConfig) if type(f.default) is int),
    ],
)
def test_a_setting_is_taken_at_its_bounds_and_refused_beyond_them_before_the_fit(
    name: str, within: tuple[float, ...], beyond: tuple[float, ...]
) -> None:
    for value in within:
        load_config(TrainConfig, None, [f"{name}={value}"])
    for value in beyond:
        with pytest.raises(ConfigError, match=rf"{name.rpartition('.')[2]} must be .*, got {value}"):
            load_config(TrainConfig, None, [f"{name}={value}"])


@pytest.mark.parametrize("setting", ["fit.learning_rate", "fit.weight_decay", "fit.oom_weight", "trees.learning_rate"])
def test_a_number_without_an_end_is_refused_before_the_fit(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting.partition('.')[2]} must be .* and finite, got inf"):
        load_config(TrainConfig, None, [f"{setting}=inf"])


@pytest.mark.parametrize("name", ["a/b", "a b", "a:b", "a@b", ".", "..", "builtin"])
def test_a_name_by_which_no_model_can_be_loaded_is_refused_before_the_fit(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model_name must be of letters, digits, .* got '{name}'"):
        load_config(TrainConfig, None, [f"model_name='{name}'"])
    assert load_config(TrainConfig, None, ["model_name=cell-a_2.x"]).model_name == "cell-a_2.x"


def test_an_unknown_configuration_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"google-v9: no such file; shipped are portable"):
        config_file(Path("google-v9"))
    assert config_file(None) is None


def test_reclaim_train_trains_with_a_shipped_configuration_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_cell(Path("raw"), tasks=20, windows=300)
    dataset_of(Path("raw"), Path("dataset"))
    result = CliRunner().invoke(app, ["train", "dataset", "--config", "portable", "--set", "fit.epochs=1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    recorded = find_run(report["run_id"]).params
    expected = load_config(TrainConfig, config_file(Path("portable")))
    assert recorded["estimator"] == expected.estimator == "portable"
    assert recorded["fit.max_samples"] == str(expected.fit.max_samples)


def test_a_table_next_to_dotted_names_of_it_adds_to_them_and_stays_as_it_was() -> None:
    fit = {"dropout": 0.1}
    for settings in ({"fit.epochs": 7, "fit": fit}, {"fit": fit, "fit.epochs": 7}):
        made = config_from(TrainConfig, settings)
        assert (made.fit.epochs, made.fit.dropout) == (7, 0.1)
    assert fit == {"dropout": 0.1}
    assert load_config(TrainConfig, None, ["fit.epochs=7", "fit={dropout=0.1}"]) == made


def test_a_table_of_an_unknown_name_is_refused_even_where_it_is_empty() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'fits'; did you mean 'fit'\?"):
        config_from(TrainConfig, {"fits": {}})


def test_none_is_a_value_of_a_setting_that_has_it_as_its_default_and_of_no_other() -> None:
    assert config_from(IngestConfig, {"buckets": None}) == IngestConfig()
    with pytest.raises(ConfigError, match="seed must be a whole number, got None"):
        config_from(TrainConfig, {"seed": None})
