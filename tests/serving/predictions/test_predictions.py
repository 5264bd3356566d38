"""Predictions in a file are the answers of the service and of the replay to the same histories."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from reclaim.cli.results import of_predict
from reclaim.data import schema as s
from reclaim.data.core.engine import workers
from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, ModelError, SchemaError, TraceError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.traces.series import task_id
from reclaim.data.windows import VECTORS, Windows, concatenate
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.targets import TARGETS
from reclaim.serving.answers.stateless import answer
from reclaim.serving.models.loader import LoadedModel, load_model
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.predictions import dataset as predicted
from reclaim.serving.predictions import job
from reclaim.serving.predictions.columns import NAMES, schema_of
from reclaim.serving.predictions.dataset import predictions
from reclaim.serving.predictions.histories import histories_of, predict_histories
from reclaim.serving.predictions.job import predict
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.schemas import ReservationRequest
from reclaim.training.bundle import Bundle, save_bundle
from reclaim.training.estimators.base import RULES
from reclaim.training.margins.own_price import Risk

KEY = list(s.TASK_KEY)


def frame_of(tables: Iterator[pa.Table] | pa.Table) -> pd.DataFrame:
    table = tables if isinstance(tables, pa.Table) else pa.concat_tables(tables)
    frame: pd.DataFrame = table.sort_by([(name, "ascending") for name in (*KEY, s.END_US)]).to_pandas()
    return frame


def test_the_latest_predictions_of_a_dataset_are_the_services_answers_to_the_same_histories(
    dataset: Dataset, model: LoadedModel
) -> None:
    histories = histories_of(dataset)
    assert not histories["cpu_limit"].null_count  # the service takes no window without a limit
    cell = FeatureSet.open(dataset.path).folding.cell
    for margin in ("baseline", "aggressive"):
        file = frame_of(predictions(model, dataset.path, margin=margin))
        answered = frame_of(predict_histories(model, histories, margin=margin, cell=cell))
        assert len(file) == len(dataset.table("tasks")) > 20
        pd.testing.assert_frame_equal(file, answered, check_exact=True)
        assert {"model"} < set(file["cpu_rule"]) <= set(RULES)


def test_the_latest_predictions_are_the_answers_to_a_json_request(dataset: Dataset, model: LoadedModel) -> None:
    cell = FeatureSet.open(dataset.path).folding.cell
    request = ReservationRequest.model_validate({
        "tasks": tasks_of(histories_of(dataset)), "margin": "medium",
        "cell": {"largest_machine": dict(zip(s.RESOURCES, cell.largest_machine, strict=True)),
                 "monday_us": cell.monday_us % (7 * s.DAY_US)},
    })  # fmt: skip
    answers = answer(model, request, ServingSettings()).tasks
    file = frame_of(predictions(model, dataset.path, margin="medium"))
    levels = model.bundle.forecaster.quantile_levels
    for task, row in zip(answers, file.to_dict("records"), strict=True):
        assert (task.collection_id, task.instance_index) == (row[s.COLLECTION_ID], row[s.INSTANCE_INDEX])
        assert (task.reservation.cpu, task.reservation.memory) == (row["cpu_reservation"], row["memory_reservation"])
        assert (task.rule.cpu, task.rule.memory) == (row["cpu_rule"], row["memory_rule"])
        assert (task.history.windows, task.history.age_s) == (row["windows"], row["age_s"])
        (forecast,) = (f for f in task.forecast if f.horizon_s == model.bundle.horizon_s)
        assert (forecast.oom_probability, forecast.peak_cpu) == (row["oom_probability"], row["peak_cpu"])
        for target in TARGETS:
            assert getattr(forecast.quantiles, target) == [row[f"{target}_q{level:g}"] for level in levels]


def tasks_of(histories: pa.Table) -> list[dict[str, Any]]:
    """Return histories as the tasks of a JSON request, by collection and index."""
    tasks: dict[tuple[int, int], dict[str, Any]] = {}
    for row in histories.to_pylist():
        known = {name: value for name, value in row.items() if value is not None}
        limit = {"cpu": known.pop(s.CPU_LIMIT), "memory": known.pop(s.MEMORY_LIMIT)}
        known.pop(s.MACHINE_ID, None)
        facts = {name: known.pop(name) for name in (*KEY, "user", "logical_name", "in_alloc") if name in known}
        facts |= {s.TIER: s.TIERS[known.pop(s.TIER)], s.SCHEDULING_CLASS: known.pop(s.SCHEDULING_CLASS)}
        task = tasks.setdefault((row[KEY[0]], row[KEY[1]]), facts | {"windows": []})
        task["limit"] = limit
        task["windows"].append(known | {"limit": limit})
    return [tasks[key] for key in sorted(tasks)]


def test_predictions_of_every_window_are_the_replays_answers(dataset: Dataset, model: LoadedModel) -> None:
    windows = concatenate([dataset.windows(bucket) for bucket in range(dataset.n_buckets)])
    cell = FeatureSet.open(dataset.path).folding.cell
    made = model.bundle.estimator("medium", cell).update(windows.task_numbers(), windows)
    file = pa.concat_tables(predictions(model, dataset.path, margin="medium", every_window=True))
    assert file[s.END_US].to_pylist() == windows.end_us.tolist()
    reservation = np.column_stack([file[f"{r}_reservation"].to_numpy() for r in s.RESOURCES])
    np.testing.assert_array_equal(reservation, made.reservation)
    assert made.forecast is not None
    quantiles, oom = made.forecast.at(model.bundle.horizon_s)
    np.testing.assert_array_equal(file["oom_probability"].to_numpy(), oom)
    memory = file["memory_q0.9"].to_numpy() / windows.limit[:, 1]
    np.testing.assert_allclose(memory, quantiles[:, 1, model.bundle.forecaster.quantile_levels.index(0.9)])


def test_tasks_have_the_names_of_their_dataset(bundle_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = [f"{vm},{300 * k},{0.1 + k % 3 / 10}" for vm in ("web-1", "17", "db-2") for k in range(60)]
    (tmp_path / "in" / "a.csv").write_text("\n".join(["vm,t,used", *rows]))
    mapping = tmp_path / "mapping.toml"
    mapping.write_text(
        'task = "vm"\ntime = "t"\ntime_unit = "s"\nwindow_s = 300\n[columns]\ncpu_mean = "used"\ncpu_limit = 1.0\n'
    )
    made = ingest(tmp_path / "in", tmp_path / "out", IngestConfig(trace="series", mapping=str(mapping))).dataset
    build_features(made, FeatureConfig())
    report = predict(made.path, tmp_path / "p.parquet", model=str(bundle_folder), every_window=True)
    table = pq.read_table(tmp_path / "p.parquet")
    assert table.schema.equals(schema_of(report.levels, named=True))
    names = table.select([s.COLLECTION_ID, "workload", "task", "namespace"]).to_pylist()
    expected = {(task_id(name), name, name, None) for name in ("web-1", "db-2")} | {(17, None, None, None)}
    assert {tuple(row.values()) for row in names} == expected
    bare = table.drop_columns([*NAMES])
    assert bare.schema.equals(schema_of(report.levels))


def test_both_formats_hold_the_same_numbers_and_the_same_bytes_each_time(
    dataset: Dataset, bundle_folder: Path, tmp_path: Path
) -> None:
    said: list[float] = []
    files = [tmp_path / "new" / name for name in ("a.parquet", "b.parquet", "a.csv", "b.csv")]
    for file in files:
        report = predict(dataset.path, file, model=str(bundle_folder), every_window=True, progress=said.append)
        assert (report.rows, report.tasks) == (dataset.n_windows, len(dataset.table("tasks")))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[2].read_bytes() == files[3].read_bytes()
    table, text = pq.read_table(files[0]), pd.read_csv(files[2])
    assert table.schema.equals(schema_of(report.levels))
    assert table.schema.metadata[b"margin"] == b"baseline"
    expected = table.to_pandas()
    assert list(text.columns) == list(expected.columns)
    for name in expected.columns:
        assert (text[name].fillna(-1).to_numpy() == expected[name].fillna(-1).to_numpy()).all(), name
    assert said[-1] == 1.0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in files)


def test_every_window_of_a_portable_model_is_said_to_have_a_price_that_was_not_known_then(
    dataset: Dataset, bundle_folder: Path, tmp_path: Path
) -> None:
    for model, every_window in (("builtin", True), ("builtin", False), (str(bundle_folder), True)):
        report = predict(dataset.path, tmp_path / "p.parquet", model=model, every_window=every_window)
        notes = of_predict(report, tmp_path / "p.parquet")[1][1:]
        assert len(notes) == (model == "builtin" and every_window)
        assert all("the price of the latest ones, which was not known then" in note for note in notes)


def test_a_dataset_in_another_unit_than_the_models_is_refused_and_a_table_said_to_be(
    dataset: Dataset, bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = FeatureSet.open(dataset.path).mean_limit
    for times, apart in ((1.0, 0), (1_000.0, 1)):
        folder = tmp_path / f"model-{times}"
        save_bundle(replace(bundle, mean_limit=(own[0] / times, own[1])), folder)
        out = tmp_path / f"p-{times}.parquet"
        with pytest.raises(ConfigError, match="the mean cpu limit is 1,000 times that") if apart else nullcontext():
            predict(dataset.path, out, model=str(folder))
        assert out.exists() == (not apart)
        model = load_model(str(folder))
        with pytest.raises(ConfigError, match="the mean cpu limit is 1,000 times that") if apart else nullcontext():
            predictions(model, dataset.path)  # as `Model.predict` of Python calls it
        caplog.clear()
        predict_histories(model, histories_of(dataset))
        assert sum("the mean cpu limit is" in record.getMessage() for record in caplog.records) == apart


@pytest.mark.parametrize("engine", [Engine(workers=3), pytest.param(Engine("processes", 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("builtin", [False, True], ids=["trained", "builtin"])
def test_the_bytes_do_not_depend_on_the_engine_nor_on_the_number_of_workers(
    dataset: Dataset, bundle_folder: Path, tmp_path: Path, engine: Engine, builtin: bool
) -> None:
    of = {"model": "builtin" if builtin else str(bundle_folder), "every_window": not builtin}
    reports = [
        predict(dataset.path, tmp_path / f"{name}.parquet", engine=on, **of)  # type: ignore[arg-type]  # by name
        for name, on in {"one": Engine(workers=1), "several": engine}.items()
    ]
    assert reports[0] == reports[1]
    assert (tmp_path / "several.parquet").read_bytes() == (tmp_path / "one.parquet").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 1.0], ids=["in work", "waiting"])
def test_a_process_that_is_killed_in_the_middle_is_one_clear_error_and_leaves_no_file(
    dataset: Dataset, bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    monkeypatch.setattr(workers, "_AHEAD", 1)
    assert dataset.n_buckets > 2  # more than are begun ahead

    def kill(_share: float) -> None:
        time.sleep(after)
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()

    on = Engine("processes", 2)
    with pytest.raises(TraceError, match="a worker was killed"):
        predict(dataset.path, tmp_path / "out.csv", model=str(bundle_folder), progress=kill, engine=on)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.parquet", "out.csv"])
def test_an_interrupted_prediction_leaves_the_file_as_it_was(
    dataset: Dataset, bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def halted(*args: Any, **options: Any) -> Iterator[pa.Table]:
        yield next(predicted.predictions(*args, **options))
        raise KeyboardInterrupt

    out = tmp_path / name
    predict(dataset.path, out, model=str(bundle_folder))
    whole = out.read_bytes()
    monkeypatch.setattr(job, "predictions", halted)
    with pytest.raises(KeyboardInterrupt):
        predict(dataset.path, out, model=str(bundle_folder), margin="medium")
    assert out.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("inside", ["some", "all"])
def test_tasks_inside_an_alloc_instance_are_predicted_and_are_no_part_of_the_built_in_models_price(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    if inside == "all":
        made = Dataset.windows

        def windows(self: Dataset, bucket: int, **how: bool) -> Windows:
            of = made(self, bucket, **how)
            of.in_alloc[:] = True
            return of

        monkeypatch.setattr(Dataset, "windows", windows)
    priced, seen = Scorer.priced_for, []

    def noted(self: Scorer, windows: Windows, risk: Risk, age_us: int) -> Scorer:
        seen.append(windows)
        return priced(self, windows, risk, age_us)

    monkeypatch.setattr(Scorer, "priced_for", noted)
    table = pa.concat_tables(predictions(load_model("builtin"), dataset.path))
    assert len(table) == len(dataset.table("tasks"))
    assert not table["cpu_reservation"].null_count
    buckets = [dataset.windows(bucket) for bucket in range(dataset.n_buckets)]
    top = sum(int((~of.in_alloc[of.task_starts()[1:] - 1]).sum()) for of in buckets)
    assert [len(of) for of in seen] == [top]
    assert not seen[0].in_alloc.any()
    assert 0 < top < len(table) if inside == "some" else top == 0


def test_a_window_without_a_limit_has_no_reservation_and_leaves_the_others_as_they_are(
    dataset: Dataset, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = frame_of(predictions(model, dataset.path))
    read, odd = Dataset.windows, before["collection_id"] % 2 == 1
    assert 0 < odd.sum() < len(odd)

    def without_memory_limits(self: Dataset, bucket: int) -> Any:
        windows = read(self, bucket)
        windows.limit[windows.collection_id % 2 == 1, 1] = math.nan
        return windows

    monkeypatch.setattr(Dataset, "windows", without_memory_limits)
    after = frame_of(predictions(model, dataset.path))
    assert after["memory_reservation"][odd].isna().all()
    assert set(after["memory_rule"][odd]) == {"unknown"}
    assert after["cpu_reservation"].notna().all()
    pd.testing.assert_frame_equal(after[~odd], before[~odd])


def test_a_wrong_file_margin_or_model_is_refused_and_nothing_is_written(
    dataset: Dataset, bundle_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"expected the name of a file that ends in .parquet or .csv, got the suffix"):
        predict(dataset.path, tmp_path / "out.xlsx", model=str(bundle_folder))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigError, match=r"got a folder"):
        predict(dataset.path, tmp_path / "folder.csv", model=str(bundle_folder))
    with pytest.raises(ConfigError, match=r"margin must be one of baseline, medium, aggressive, got 'wide'"):
        predict(dataset.path, tmp_path / "out.csv", model=str(bundle_folder), margin="wide")
    with pytest.raises(ModelError, match=r"no model 'nosuch'"):
        predict(dataset.path, tmp_path / "out.csv", model="nosuch")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.csv"]


def test_histories_that_cannot_be_used_are_refused_with_the_first_reason(dataset: Dataset, model: LoadedModel) -> None:
    histories = histories_of(dataset, dataset.read("tasks").slice(0, 1))
    with pytest.raises(SchemaError, match=r"absent: start_us; columns are"):
        predict_histories(model, histories.drop_columns(s.START_US))
    bare = histories.drop_columns([s.CPU_LIMIT, s.MEMORY_LIMIT])
    with pytest.raises(SchemaError, match=r"rows cannot be used, the first: row 0: every window needs a limit"):
        predict_histories(model, bare)
    extra = histories.append_column("note", pa.nulls(len(histories)))
    assert predict_histories(model, extra).equals(predict_histories(model, histories))
    seconds = histories
    for name in (s.START_US, s.END_US):
        at = seconds.column_names.index(name)
        seconds = seconds.set_column(at, name, pc.divide(seconds[name], 1_000_000))
    with pytest.raises(SchemaError, match="the longest window has 300 µs; start_us and end_us are in µs"):
        predict_histories(model, seconds)


def test_categories_of_pandas_may_be_more_than_the_rows_and_change_no_answer(
    dataset: Dataset, model: LoadedModel
) -> None:
    histories = histories_of(dataset, dataset.read("tasks").slice(0, 1)).slice(0, 3)
    frame = histories.to_pandas().assign(tier="prod", user="someone")
    among = {"tier": ["free", "beb", "mid", "prod"], "user": ["someone", "others"]}
    categorical = frame.astype({name: pd.CategoricalDtype(words) for name, words in among.items()})
    assert sum(map(len, among.values())) > len(frame)
    plain, coded = (
        predict_histories(model, pa.Table.from_pandas(of, preserve_index=False)) for of in (frame, categorical)
    )
    assert coded.equals(plain)


def test_histories_of_chosen_tasks_are_theirs_alone_with_owners(dataset: Dataset) -> None:
    everyone = histories_of(dataset)
    chosen = dataset.read("tasks").take([5, 2])
    some = histories_of(dataset, chosen)
    mask = [key in set(zip(*(chosen[k].to_pylist() for k in KEY), strict=True))
            for key in zip(*(everyone[k].to_pylist() for k in KEY), strict=True)]  # fmt: skip
    assert some.equals(everyone.filter(pa.array(mask)))
    assert set(VECTORS) < set(some.column_names)
    owner = dict(zip(chosen[s.COLLECTION_ID].to_pylist(), chosen[s.USER_ID].to_pylist(), strict=True))
    assert dict(zip(some[s.COLLECTION_ID].to_pylist(), some["user"].to_pylist(), strict=True)) == owner
    assert pc.all(pc.is_valid(some["user"])).as_py()
