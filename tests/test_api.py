"""The Python interface: light to import, its examples run, its numbers are those of the command line and service."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import reclaim
from reclaim.api.display import frame_of
from reclaim.data.errors import ConfigError, ModelError, SchemaError
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import TEST
from reclaim.serving.predictions.job import predict
from reclaim.training.tracking.runs import fetch_bundle

pytestmark = pytest.mark.slow

MODULES = [import_module(f"reclaim.api.{name}") for name in ("dataset", "display", "model", "replay")]
MODULES.append(import_module("reclaim.data.traces.series"))
EXAMPLES = [test for module in MODULES for test in doctest.DocTestFinder().find(module) if test.examples]
FEW = {"estimators": ["borg", "limit"]}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the folder with a cell, a dataset and a champion of the examples; every test of this file works in it."""
    folder = tmp_path_factory.mktemp("workplace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        reclaim.synth("cell", machines=3, days=0.75)
        dataset = reclaim.ingest("cell", "dataset", settings={"buckets": 2})
        dataset.features(["cpu_last"])
        reclaim.train(dataset, settings={"fit.epochs": 1, "against_builtin": False})
        yield folder


@pytest.fixture
def dataset(workplace: Path) -> reclaim.Dataset:
    return reclaim.open(workplace / "dataset")


@pytest.fixture
def model(workplace: Path) -> reclaim.Model:
    assert (workplace / "mlruns").is_dir()
    return reclaim.load()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name.removeprefix("reclaim.api."))
@pytest.mark.usefixtures("workplace")
def test_an_example_gives_what_it_says(example: doctest.DocTest) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)


def test_every_function_of_the_interface_has_an_example() -> None:
    named = {example.name for example in EXAMPLES}
    for module in MODULES[:1] + MODULES[2:3]:
        for name, value in vars(module).items():
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and name in dir(reclaim):
                methods = [m for m in vars(value) if isinstance(value, type) and m[0] != "_"]
                plain = [m for m in methods if not isinstance(vars(value)[m], property)]
                owners = [f"{module.__name__}.{name}.{m}" for m in plain] or [f"{module.__name__}.{name}"]
                assert set(owners) <= named


def test_the_import_is_light_and_names_are_found_when_they_are_used() -> None:
    code = (
        "import sys, reclaim\n"
        "print(sorted(m for m in sys.modules if m.startswith('reclaim')),"
        " [m for m in ('numpy', 'pandas', 'pyarrow', 'torch') if m in sys.modules], 'train' in dir(reclaim))\n"
        "reclaim.open\n"
        "print([m for m in ('torch', 'mlflow', 'numba', 'sklearn', 'matplotlib', 'duckdb') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['reclaim'] [] True\n[]\n"
    with pytest.raises(AttributeError, match="module 'reclaim' has no attribute 'tran'"):
        _ = reclaim.tran  # type: ignore[attr-defined]  # there is none


def test_a_frame_is_predicted_with_the_bits_of_the_command_line(
    dataset: reclaim.Dataset, model: reclaim.Model, tmp_path: Path
) -> None:
    predict(dataset.path, tmp_path / "p.parquet", model=f"reclaim/{model.version}", margin="aggressive")
    file = pq.read_table(tmp_path / "p.parquet").sort_by(
        [("collection_id", "ascending"), ("instance_index", "ascending")]
    )
    whole = model.predict(dataset, margin="aggressive")
    assert pa.Table.from_pandas(whole, preserve_index=False).num_rows == len(file) == len(dataset.tasks())
    histories = dataset.histories()
    mixed = histories.sample(frac=1, random_state=1)
    plain = pd.DataFrame(histories.to_dict("list")).astype({"user": "str", "logical_name": "str"})
    for frame in (histories, mixed, plain.drop(columns="machine_id")):
        answered = model.predict(frame, margin="aggressive", cell=dataset.cell)
        for name in file.column_names:
            if name in frame.columns or name != "machine_id":
                assert answered[name].to_list() == frame_of(file.select([name]))[name].to_list(), name


def test_every_window_of_a_dataset_is_predicted(dataset: reclaim.Dataset, model: reclaim.Model) -> None:
    assert len(model.predict(dataset, every_window=True)) == len(dataset.usage(["end_us"]))


def test_what_a_prediction_would_ignore_is_refused(dataset: reclaim.Dataset, model: reclaim.Model) -> None:
    histories = dataset.histories(dataset.tasks().head(1))
    with pytest.raises(ConfigError, match="every_window is for a dataset, and a frame gives one row per task"):
        model.predict(histories, every_window=True)
    with pytest.raises(ConfigError, match="cell is for a frame: dataset dataset has its own; leave it out"):
        model.predict(dataset, cell=dataset.cell)


def test_a_resource_that_is_not_measured_takes_any_limit(dataset: reclaim.Dataset, model: reclaim.Model) -> None:
    of_memory = dict.fromkeys(("memory_mean", "memory_max", "page_cache"), np.nan)
    histories = dataset.histories(dataset.tasks().head(1)).assign(**of_memory)
    with pytest.raises(SchemaError, match="every resource; for one that is not measured any amount will do"):
        model.predict(histories.assign(memory_limit=np.nan))
    one, other = (model.predict(histories.assign(memory_limit=limit)) for limit in (1.0, 7.0))
    rest = [name for name in one if not str(name).startswith("memory")]
    pd.testing.assert_frame_equal(one[rest], other[rest], check_exact=True)


def test_only_the_columns_and_tasks_asked_for_are_read(dataset: reclaim.Dataset) -> None:
    tasks = dataset.tasks()
    two = tasks.iloc[[1, 4]]
    usage = dataset.usage(["cpu_mean", "collection_id", "instance_index"], tasks=two)
    assert list(usage) == ["cpu_mean", "collection_id", "instance_index"]
    everything = dataset.usage()
    expected = everything.merge(two[["collection_id", "instance_index"]])
    assert usage["cpu_mean"].to_list() == expected["cpu_mean"].to_list()
    assert list(dataset.table("machines", ["machine_id"])) == ["machine_id"]


def test_a_column_has_one_place_however_it_is_named(dataset: reclaim.Dataset) -> None:
    one = dataset.tasks().head(1)
    assert list(dataset.usage("cpu_mean")) == ["cpu_mean"]
    assert list(dataset.usage(["cpu_mean", "cpu_mean"], tasks=one)) == ["cpu_mean"]
    assert list(dataset.features("cpu_last", tasks=one))[4:] == ["cpu_last"]
    assert list(dataset.features(["cpu_last", "cpu_last"], tasks=one))[4:] == ["cpu_last"]


def test_unknown_ids_stay_integers_and_unknown_numbers_are_nan() -> None:
    ids, numbers = pa.array([2**53 + 1, None]), pa.array([0.5, None])
    frame = frame_of(pa.table({"id": ids, "number": numbers, "known": pa.array([2**53 + 1, 1]), "list": [[1.0], None]}))
    assert frame["id"].to_list() == [2**53 + 1, pd.NA]
    assert [str(dtype) for dtype in frame.dtypes] == ["Int64", "float64", "int64", "list<item: double>[pyarrow]"]
    assert pa.Table.from_pandas(frame)["id"].equals(pa.chunked_array([ids]))
    assert frame["number"].isna().to_list() == [False, True]


def test_features_are_those_of_the_feature_set(dataset: reclaim.Dataset) -> None:
    stored = FeatureSet.open(dataset.path)
    names = list(stored.manifest["features"])
    some = dataset.features(["cpu_max_2h", "oom_300s", "memory_3600s"], period="test")
    rows = np.flatnonzero(stored.period == TEST)
    np.testing.assert_array_equal(some["cpu_max_2h"].to_numpy(np.float32), stored.x[rows, names.index("cpu_max_2h")])
    np.testing.assert_array_equal(some["memory_3600s"].to_numpy(np.float32), stored.y[rows, 1, 1])
    np.testing.assert_array_equal(some["oom_300s"].to_numpy(np.float32), stored.oom[rows, 0])
    one = dataset.tasks().head(1)
    whole = dataset.features(tasks=one)
    assert list(whole)[4:] == names
    assert len(whole) == len(dataset.usage(["end_us"], tasks=one))
    assert set(whole["collection_id"]) == set(one["collection_id"])


def test_a_replay_is_the_one_of_the_command_line_and_shows_its_figures(
    dataset: reclaim.Dataset, model: reclaim.Model
) -> None:
    replay = dataset.replay("ratios", "replayed", models=[model], settings=FEW)
    again = dataset.replay("ratios", "replayed", models=[model], settings=FEW)
    results = json.loads((replay.page.parent / "results.json").read_text())
    assert replay.results == again.results == results
    assert list(replay.figures) == ["ratios"]
    assert replay.figures["ratios"]._repr_svg_().count("<svg") == 1
    shown = replay._repr_html_()
    assert "<table" in shown
    assert "<svg" in shown
    assert set(replay.runs["estimator"]) >= {"borg", f"reclaim/{model.version}"}
    assert "oracle" in set(replay.summary.iloc[:, 1])
    assert repr(replay) == "Replay('ratios', 'replayed')"
    assert repr(reclaim.Recommendations(replay._experiment, replay._report)) == "Recommendations('ratios', 'replayed')"


def test_a_model_and_a_dataset_are_shown_with_what_matters(dataset: reclaim.Dataset, model: reclaim.Model) -> None:
    assert repr(model) == f"Model('reclaim/{model.version}')"
    assert "aggressive" in model._repr_html_()
    assert "synthetic" in dataset._repr_html_()
    margins = model.margins()
    assert margins.index.names == ["margin", "resource"]
    assert margins.loc[("aggressive", "cpu"), "reclaimed"] == model.bundle.trained["reclaimed"]["aggressive"]["cpu"]
    scores = model.scores()
    assert scores["rows"].loc["valid", "cpu", 3_600] > 0
    assert scores["base_rate"].loc["valid", "oom", 3_600] >= 0


@pytest.mark.parametrize("call", [reclaim.train, reclaim.open, lambda frame: reclaim.ingest(frame, "new")])
def test_a_frame_in_place_of_a_dataset_is_refused_with_the_way_to_one(call: Callable[[Any], Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"got an object of type DataFrame; a frame is written as CSV .*ingest\(FOLDER"
    ):
        call(pd.DataFrame({"vm": ["a"], "cpu": [0.1]}))


def test_a_frame_that_cannot_be_predicted_is_refused_and_columns_that_are_left_out_do_not_matter(
    dataset: reclaim.Dataset, model: reclaim.Model
) -> None:
    histories = dataset.histories(dataset.tasks().head(1))
    values = pd.Series([1, "x", *[0.5] * (len(histories) - 2)], histories.index, object)
    answered = model.predict(histories.assign(note=values))
    assert answered.equals(model.predict(histories))
    dates = pd.to_datetime(histories["end_us"], unit="us")
    twice = pd.concat([histories, histories[["cpu_mean"]]], axis=1)
    for frame, message in (
        (
            histories.assign(cpu_mean=values),
            "Conversion failed for column cpu_mean .*; a column has values of one type",
        ),
        (histories.assign(end_us=dates), r"end_us \(timestamp\[us\], expected whole numbers\)"),
        (histories.assign(collection_id="vm-1"), r"collection_id \(.*string, expected whole numbers\)"),
        (twice, "columns twice: cpu_mean; each is needed once"),
    ):
        with pytest.raises(SchemaError, match=f"^histories: .*{message}"):
            model.predict(frame)
    assert model.predict(pd.concat([histories, histories])).equals(answered)  # a repeated window changes nothing


def test_what_is_no_model_cell_frame_or_setting_is_named(dataset: reclaim.Dataset, model: reclaim.Model) -> None:
    with pytest.raises(ConfigError, match=r"models must be a list of what reclaim.load or .* got \['builtin'\]"):
        dataset.recommend("out", models=["builtin"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"models must be a list of .*, got Model\('reclaim/"):
        dataset.replay("ratios", "out", models=model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cell must be a Cell, such as Dataset.cell, got 3"):
        model.predict(dataset.histories(), cell=3)  # type: ignore[arg-type]
    for tasks in ([1], pa.table({"collection_id": [1], "instance_index": [0]})):
        with pytest.raises(ConfigError, match=r"tasks must be a frame of pandas, .* type \w+; `.to_pandas\(\)` makes"):
            dataset.usage(tasks=tasks)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="settings: expected a mapping of names to values"):
        dataset.features(settings={1: 2})  # type: ignore[dict-item]
    with pytest.raises(SchemaError, match="names of columns must be text, got 7"):
        dataset.usage([7])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="settings: expected a mapping of names to values"):
        dataset.recommend("out", settings=["hold_days=7"])  # type: ignore[arg-type]
    assert not os.path.exists("out")


def test_tasks_that_are_none_of_a_dataset_are_named_and_other_columns_of_theirs_do_not_matter(
    dataset: reclaim.Dataset,
) -> None:
    tasks = dataset.tasks().head(3)
    expected = dataset.usage(tasks=tasks)
    mixed = pd.Series([1, "x", None], tasks.index, object)
    assert dataset.usage(tasks=tasks.assign(mixed=mixed, sparse=pd.arrays.SparseArray([0, 0, 1]))).equals(expected)
    assert dataset.usage(tasks=tasks.astype({"collection_id": "uint64"})).equals(expected)
    gap = tasks["collection_id"].astype("Int64").where(np.array([True, False, True]))
    for frame, message in (
        (
            tasks.assign(collection_id=gap),
            r"collection_id must be whole numbers, as of .*, got 1 missing",
        ),
        (tasks.astype({"collection_id": float}), "collection_id must be whole numbers, .* got double"),  # a merge's
        (tasks.astype({"collection_id": "str"}), "collection_id must be whole numbers, .* got .*string"),
        (
            tasks.assign(collection_id=np.uint64(2**63)),
            "collection_id must be at most 9223372036854775807, .* got 9223372036854775808",
        ),
        (pd.concat([tasks, tasks], axis=1), "columns twice: collection_id, instance_index; each is needed once"),
        (pd.concat({"of": tasks}, axis=1), "the columns have 2 levels, expected one"),
        (tasks.assign(instance_index=pd.arrays.SparseArray([0, 0, 1])), "Sparse .*; a column has values of one type"),
    ):
        with pytest.raises(SchemaError, match=f"^tasks: .*{message}"):
            dataset.usage(tasks=frame)


def test_a_dataset_and_a_model_have_the_notes_that_the_command_line_prints(
    dataset: reclaim.Dataset, model: reclaim.Model, tmp_path: Path
) -> None:
    assert dataset.notes == []
    assert model.notes == model.bundle.trained["notes"]
    assert "<li>OOM label: OOM is a derived label" in model._repr_html_()
    (tmp_path / "in").mkdir()
    usage = pd.DataFrame({"vm": "a", "t": [0, 300, 600, 600, 900], "cpu": [1.0, 2.0, 1.0, 1.0, -1.0]})
    usage.to_csv(tmp_path / "in" / "a.csv")
    (tmp_path / "map.toml").write_text(
        'task = "vm"\ntime = "t"\ntime_unit = "ms"\nwindow_s = 300\n[columns]\ncpu_mean = "cpu"\n'  # they are s
    )
    with pytest.warns(UserWarning, match=r"read: \d+\.\d% of the windows: a window begins before .*; likely"):
        read = reclaim.ingest(
            tmp_path / "in", tmp_path / "read", trace="series", mapping=tmp_path / "map.toml",
            settings={"max_reject_share": 0.5},
        )  # fmt: skip
    said = "\n".join(read.notes)
    assert "3 windows have no CPU limit: the trace gives them none above 0" in said
    assert "1 windows repeat a task and a time of others; one of each is kept" in said
    assert "have other values than the one" not in said  # they are equal
    assert "warning: " in said
    assert "<th>rejected lines</th><td>1</td>" in read._repr_html_()
    assert "<li>1 windows repeat a task" in reclaim.open(tmp_path / "read")._repr_html_()


def test_a_mistake_is_named_with_its_remedy(dataset: reclaim.Dataset, model: reclaim.Model) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such folder; `reclaim ingest SOURCE nowhere` makes one"):
        reclaim.open("nowhere")
    with pytest.raises(SchemaError, match=r"usage has no cpu_men; its columns are collection_id, "):
        dataset.usage(["cpu_men"])
    with pytest.raises(SchemaError, match=r"no table 'names'; expected one of usage, [a-z_, ]*machine_usage, rejects$"):
        dataset.table("names")
    with pytest.raises(SchemaError, match=r"no table 'task'; expected one of usage, "):
        dataset.table("task")
    with pytest.raises(SchemaError, match=r"machines has no rows of single tasks; read it whole"):
        dataset.table("machines", tasks=dataset.tasks())
    with pytest.raises(SchemaError, match=r"tasks: no column instance_index; expected rows of the dataset's tasks"):
        dataset.usage(tasks=dataset.tasks(["collection_id"]))
    with pytest.raises(SchemaError, match=r"no feature cpu_max_3h; there are cpu_last"):
        dataset.features(["cpu_max_3h"])
    with pytest.raises(ConfigError, match=r"period must be one of train, valid, test, got 'tests'"):
        dataset.features(["cpu_last"], period="tests")
    with pytest.raises(ConfigError, match=r"settings: unknown setting 'fit.epoch'; did you mean 'fit.epochs'"):
        reclaim.train(dataset, settings={"fit.epoch": 3})
    with pytest.raises(ConfigError, match=r"must be a frame of pandas or a Dataset, .* type str; `reclaim.open"):
        model.predict("dataset")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no experiment 'margin'; expected one of margins, "):
        dataset.replay("margin", "out")
    with pytest.raises(ConfigError, match=r"both are reclaim/.*; name models that differ"):
        dataset.replay("ratios", "out", models=[model, model])
    with pytest.raises(ModelError, match=r"no model reclaim@best in "):
        reclaim.load("reclaim@best")
    with pytest.raises(SchemaError, match=r"histories: columns absent: start_us; columns are collection_id, "):
        model.predict(dataset.histories().drop(columns="start_us"))
    folder = reclaim.load(fetch_bundle("reclaim@champion")[0])
    assert folder.version == "local"
    with pytest.raises(ModelError, match=r"a folder has no record of its run; load NAME/VERSION"):
        folder.scores()
    with pytest.raises(ModelError, match=r"the built-in model has no record of a run here; docs/builtin.md has its"):
        reclaim.load("builtin").scores()
    assert not os.path.exists("out")
