"""An experiment from a dataset on disk to a folder of results: causal, repeatable, all or nothing."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import mlflow
import numpy as np
import pytest
from matplotlib.figure import Figure

from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.fold.batch import FeatureState
from reclaim.features.seen import SEEN, sample_windows
from reclaim.features.splits import TEST, SplitConfig
from reclaim.replay.experiments.margins.following import following_table
from reclaim.replay.experiments.margins.measure import EXPERIMENT, MarginsConfig
from reclaim.replay.experiments.margins.models import models_summary
from reclaim.replay.experiments.margins.tables import margins_table
from reclaim.replay.open_loop import estimates
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.estimates import estimator_makers
from reclaim.replay.open_loop.fold import answer_folded
from reclaim.replay.open_loop.metrics import POSITION
from reclaim.replay.open_loop.paired import Paired
from reclaim.replay.report import figures
from reclaim.replay.report.page import ReplayReport, brief
from reclaim.replay.report.units import UNITS, read_units
from reclaim.replay.runs.catalogue import load_experiment
from reclaim.replay.runs.compare import choose, compare
from reclaim.replay.runs.differences import differences
from reclaim.replay.runs.record import model_tags, record
from reclaim.replay.runs.run import _command, _dataset_facts, by_name, run_experiment
from reclaim.replay.runs.unseen import judged_on
from reclaim.replay.settings import ReplayConfig
from reclaim.training.bundle import Bundle
from reclaim.training.estimators.base import Forecast
from reclaim.training.fitting.sources import Source
from reclaim.training.machines.estimator import BOUND
from reclaim.training.margins.calibrate import guarded_reservations
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.price import Price, three_prices
from reclaim.training.margins.value import Value
from reclaim.training.models.estimator import ForecastEstimator
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.references import ModelLocation, builtin_model
from tests.replay.largest_of_the_day import LargestOfTheDay, bundle_of
from tests.series import dataset_of


class HalfOfIt(LargestOfTheDay):
    """One that takes what it read for half of what it is."""

    def predict(self, x: np.ndarray, horizon_s: int | None = None) -> Forecast:  # noqa: D102 - likewise
        forecast = super().predict(x, horizon_s)
        return replace(forecast, thresholds=np.sqrt(forecast.thresholds), quantiles=np.sqrt(forecast.quantiles))


def learned() -> Bundle:
    return bundle_of(LargestOfTheDay(), {})


def test_the_learned_estimator_replayed_is_the_one_served(dataset: Path, bundle: Bundle) -> None:
    windows = Dataset.open(dataset).windows(0)
    cell, slot = Dataset.open(dataset).cell(), windows.task_numbers()
    estimator = estimator_makers(ReplayConfig(), {"network": bundle}, bundle.mean_limit)["network"]()
    assert isinstance(estimator, ForecastEstimator)
    answers = answer_folded(estimator, FeatureState(cell).advance(slot, windows), windows)
    replayed = guarded_reservations(answers, windows, bundle.prices)
    for margin in MARGIN_NAMES:
        served = bundle.estimator(margin, cell).update(slot, windows)
        np.testing.assert_array_equal(replayed[margin], served.reservation)


def test_a_replay_compares_limits_with_their_mean_in_the_dataset_so_that_its_unit_does_not_matter(
    bundle: Bundle,
) -> None:
    cpu, memory = bundle.mean_limit
    estimator = estimator_makers(ReplayConfig(), {"network": bundle}, (1_000 * cpu, memory))["network"]()
    assert isinstance(estimator, ForecastEstimator)
    assert estimator.mean_limit == (1_000 * cpu, memory)


def by_name_of(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {e["name"]: e for e in results["estimators"]}


def test_all_files_are_written_and_name_their_inputs(report: ReplayReport) -> None:
    assert sorted(p.name for p in report.folder.iterdir()) == [

        "equal_violation.parquet", "margins_over_time.png", "margins_over_time.svg", "reclaimed_at_margins.png",
        "reclaimed_at_margins.svg", "report.html", "results.json", "units.parquet",
    ]  # fmt: skip
    assert json.loads((report.folder / "results.json").read_text()) == report.results
    assert (
        report.results["dataset"]["test_task_windows"] == 30 * 145
    )  # the window that ends with validation answers for the test
    assert report.results["dataset"]["machines"] == 4
    assert report.results["timeline"]["length_hours"] == pytest.approx(145 / 12)
    assert not report.already_there
    assert set(report.seconds) >= {"fold/borg", "fold/percentile", "judge/borg"}


def test_every_estimator_is_measured_at_every_margin_and_bounded_by_the_oracle(report: ReplayReport) -> None:
    estimators = by_name_of(report.results)
    assert list(estimators) == ["borg", "percentile", "limit", "oracle"]
    for name in ("borg", "percentile"):
        results = estimators[name]["results"]
        assert tuple(results) == MARGIN_NAMES
        for r in RESOURCES:
            reclaimed = [results[m]["all"]["reclaimed_share"][r]["value"] for m in MARGIN_NAMES]
            assert 0 < reclaimed[0] < reclaimed[1] < reclaimed[2] < 1
    for r in RESOURCES:
        assert estimators["limit"]["results"]["none"]["all"]["reclaimed_share"][r]["value"] == 0.0
        assert estimators["limit"]["results"]["none"]["all"]["violation_rate"][r]["value"] == 0.0
        assert estimators["oracle"]["results"]["none"]["all"]["violation_rate"][r]["value"] == 0.0
        assert estimators["oracle"]["results"]["none"]["oom"]["tasks_over"] == 0
    assert [e["sequence"] is not None for e in estimators.values()] == [True, True, False, False]


def test_the_same_replay_elsewhere_gives_the_same_bytes(
    dataset: Path, config: MarginsConfig, report: ReplayReport, tmp_path: Path
) -> None:
    again = run_experiment(EXPERIMENT, dataset, tmp_path / "again", config, tracking=False)
    for path in report.folder.iterdir():
        assert path.read_bytes() == (again.folder / path.name).read_bytes(), path.name


def test_results_of_a_model_are_none_of_another_that_answers_alike_and_foresees_machines_otherwise(
    dataset: Path, config: MarginsConfig, tmp_path: Path
) -> None:
    bundle = replace(learned(), machines={3600: BOUND})
    out, quick = tmp_path / "out", replace(config, estimators=())
    run_experiment(EXPERIMENT, dataset, out, quick, bundles={"trees": bundle}, tracking=False)
    assert run_experiment(EXPERIMENT, dataset, out, quick, bundles={"trees": bundle}, tracking=False).already_there
    for other in (
        replace(bundle, machines={3600: tuple(replace(curve, together=0.5) for curve in BOUND)}),
        replace(bundle, mean_limit=(0.5, 0.25)),
        replace(bundle, prices=three_prices(Price("baseline", (9.0, 9.0)), Price("aggressive", (3.0, 3.0)))),
        replace(bundle, held_out=LargestOfTheDay(2.0)),
    ):
        with pytest.raises(ConfigError, match="holds a replay that differs in bundles"):
            run_experiment(EXPERIMENT, dataset, out, quick, bundles={"trees": other}, tracking=False)


def test_run_again_it_does_nothing(
    dataset: Path, config: MarginsConfig, report: ReplayReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not(*_: object, **__: object) -> None:
        pytest.fail("computed again")

    monkeypatch.setattr(estimates, "fold_dataset", must_not)
    before = {p: p.stat().st_mtime_ns for p in report.folder.iterdir()}
    again = run_experiment(EXPERIMENT, dataset, report.folder, config, tracking=False)
    assert again.already_there
    assert again.results == report.results
    assert {p: p.stat().st_mtime_ns for p in report.folder.iterdir()} == before


def test_a_folder_that_holds_something_else_is_refused(
    dataset: Path, config: MarginsConfig, report: ReplayReport, tmp_path: Path
) -> None:
    expected = r"holds a replay that differs in config\.seed; choose another folder or remove it"
    with pytest.raises(ConfigError, match=expected):
        run_experiment(EXPERIMENT, dataset, report.folder, replace(config, seed=9), tracking=False)
    with pytest.raises(ConfigError, match="differs in bundles"):
        run_experiment(EXPERIMENT, dataset, report.folder, config, bundles={"trees": learned()}, tracking=False)
    other = load_experiment("ratios")
    with pytest.raises(ConfigError, match="differs in experiment;"):
        run_experiment(other, dataset, report.folder, other.config(), tracking=False)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"exists and holds no results\.json"):
        run_experiment(EXPERIMENT, dataset, tmp_path / "notes", config, tracking=False)
    with pytest.raises(ConfigError, match="exists and is no folder"):
        run_experiment(EXPERIMENT, dataset, tmp_path / "notes" / "thesis.txt", config, tracking=False)
    for of_others in ("[]", '{"inputs": null}', '{"inputs": ["a", "b"]}'):
        (tmp_path / "notes" / "results.json").write_text(of_others)
        with pytest.raises(ConfigError, match="not the results of a replay"):
            run_experiment(EXPERIMENT, dataset, tmp_path / "notes", config, tracking=False)
    assert (tmp_path / "notes" / "thesis.txt").read_text() == "mine"


def test_a_place_that_cannot_be_written_ends_it_before_anything_is_measured(dataset: Path, tmp_path: Path) -> None:
    def measure(*_: object) -> NoReturn:
        raise AssertionError("measured")

    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        run_experiment(replace(EXPERIMENT, measure=measure), dataset, tmp_path / "file" / "out", tracking=False)


def test_killed_half_way_it_leaves_nothing_behind(
    dataset: Path, config: MarginsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = figures.save_figure
    calls = []

    def killed_at_the_second(figure: Figure, stem: Path) -> tuple[Path, Path]:
        calls.append(stem)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(figure, stem)

    monkeypatch.setattr(figures, "save_figure", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(EXPERIMENT, dataset, tmp_path / "out", config, tracking=False)
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


def test_margins_do_not_see_the_test_period(
    dataset: Path, config: MarginsConfig, report: ReplayReport, tmp_path: Path
) -> None:
    shutil.copytree(dataset, tmp_path / "cell")
    y = np.load(tmp_path / "cell" / "features" / "y.npy")
    period = np.load(tmp_path / "cell" / "features" / "period.npy")
    y[period == TEST] = np.float32(0.01)
    np.save(tmp_path / "cell" / "features" / "y.npy", y)
    other = run_experiment(EXPERIMENT, tmp_path / "cell", tmp_path / "out", config, tracking=False)
    for name in ("borg", "percentile"):
        before, after = by_name_of(report.results)[name], by_name_of(other.results)[name]
        assert after["margins"] == before["margins"]
        assert after["results"]["baseline"]["all"]["violation_rate"]["cpu"]["value"] == 0.0
        assert before["results"]["aggressive"]["all"]["violation_rate"]["cpu"]["value"] > 0.0


def test_a_cell_of_tasks_in_alloc_instances_alone_is_refused_with_a_remedy_of_its_own(
    dataset: Path, config: MarginsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Dataset.windows

    def in_alloc(self: Dataset, bucket: int) -> Windows:
        windows = read(self, bucket)
        windows.in_alloc[:] = True
        return windows

    monkeypatch.setattr(Dataset, "windows", in_alloc)
    with pytest.raises(HistoryTooShortError, match=r"no task-window to judge: all its tasks are in alloc .*; replay a"):
        run_experiment(EXPERIMENT, dataset, tmp_path / "out", config, tracking=False)
    assert not (tmp_path / "out").exists()


def test_a_learned_estimator_is_replayed_with_the_others_and_has_its_own_margins(
    dataset: Path, config: MarginsConfig, report: ReplayReport, tmp_path: Path
) -> None:
    config = replace(config, online=True)
    out = run_experiment(EXPERIMENT, dataset, tmp_path / "out", config, bundles={"trees": learned()}, tracking=False)
    estimators = by_name_of(out.results)
    compared = [name + how for name in ("trees", "borg", "percentile") for how in ("", "-online")]
    assert list(estimators) == [*compared, "limit", "oracle"]
    assert estimators["trees-online"]["validation"] == estimators["trees-online"]["margins"] == {}  # nothing was set
    assert estimators["borg-online"]["results"] != estimators["borg"]["results"]
    assert {estimators[name]["kind"] for name in compared[2:]} == {"statistical"}
    rivals = [of[r]["against"] for of in (out.results["against_best"]["medium"][n] for n in compared) for r in of]
    assert rivals == [n for n in rivals if n.startswith(("borg", "percentile"))]
    of_borg = [out.results["against_best"][m]["borg-online"][r]["against"] for m in MARGIN_NAMES for r in RESOURCES]
    assert all(name.startswith("percentile") for name in of_borg)  # never by its own other margins
    assert {r["estimator"] for r in margins_table(out.results).as_records()} == {"trees", "borg", "percentile"}
    assert estimators["trees"]["kind"] == "learned"
    assert not estimators["trees"]["margins"]
    assert estimators["trees"]["prices"]["baseline"] != {"cpu": 8.0, "memory": 8.0}  # set on these validation rows
    assert list(out.results["following"]["by_part"]) == ["trees", "trees-online"]
    kept = following_table(out.results).as_records()
    assert {(row["estimator"], row["by"], row["number"]) for row in kept} == {
        (n, "days", 1) for n in out.results["following"]["by_part"]
    }
    assert [row["interval"] for row in kept if row["estimator"] == "trees"] == [None] * 4
    assert "Budgets kept over time" in (out.folder / "report.html").read_text()
    assert estimators["borg"]["results"] == by_name_of(report.results)["borg"]["results"]
    assert [e["name"] for e in out.results["estimators"] if e["sequence"] and e["sequence"]["drawn"]] == [
        "trees",
        "borg",
    ]
    facts = out.results["inputs"]["bundles"]["trees"]
    assert not facts["trained_on_this_dataset"]
    assert facts["trained_on_fingerprint"] == "another"
    assert out.results["command"].endswith(
        '--model NAME@ALIAS --set estimators=\'["borg", "percentile", "limit"]\' --set draws=50'
    )


def test_with_a_value_the_price_is_known_and_does_not_follow_and_the_report_says_the_money(
    dataset: Path, config: MarginsConfig, tmp_path: Path
) -> None:
    config = replace(config, value=Value(core_hour=0.05, violation=3.0), closed_loop=False, online=True)
    out = run_experiment(EXPERIMENT, dataset, tmp_path / "out", config, bundles={"trees": learned()}, tracking=False)
    estimators = by_name_of(out.results)
    of_cpu, of_memory = (
        [estimators[name]["results"]["aggressive"]["all"]["violation_rate"][r] for name in ("trees", "trees-online")]
        for r in RESOURCES
    )
    assert of_cpu[0] == of_cpu[1]
    assert of_memory[0] != of_memory[1]
    prices = estimators["trees"]["prices"]
    mean_limit = FeatureSet.open(dataset).mean_limit
    assert {margin: price["cpu"] for margin, price in prices.items()} == pytest.approx(
        dict.fromkeys(MARGIN_NAMES, 3.0 / (0.05 * mean_limit[0]))
    )
    assert prices["baseline"]["memory"] > prices["aggressive"]["memory"]
    assert "from that value and from no budget" in out.results["definitions"]["price"]
    money = {(of["estimator"], of["margin"]): of for of in out.results["money"]}
    assert {of["resource"] for of in money.values()} == {"cpu"}
    assert money["oracle", "none"]["cost"] == 0
    assert money["limit", "none"]["earned"] == 0
    measured = read_units(out.folder / UNITS).sums["trees", "medium"].sum(axis=0)
    # of the last hour no horizon is known: it earns nothing, and takes no time
    judged = measured[POSITION["rows"], 0] / out.results["dataset"]["test_task_windows"]
    one, days = money["trees", "medium"], judged * out.results["timeline"]["length_hours"] / 24
    assert judged < 0.95
    assert one["earned"] == pytest.approx(measured[POSITION["reclaimed"], 0] / 3600 * 0.05 / days)
    assert one["cost"] == pytest.approx(measured[POSITION["violating_s"], 0] / 3600 * 3.0 / days)
    assert one["net"] == pytest.approx(one["earned"] - one["cost"])
    assert "Money a day" in (out.folder / "report.html").read_text()


def of_version(version: str, folder: str = "") -> Bundle:
    """Return a model as loaded from the registry, or from a folder."""
    source = folder or f"reclaim@{version}"
    return replace(
        learned(),
        origin=ModelLocation(
            Path(source).name if folder else "reclaim", version, Path(source), source, "" if folder else f"run{version}"
        ),
    )


def test_two_versions_of_a_model_are_replayed_together_and_named_and_compared(
    dataset: Path, config: MarginsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    champion, candidate = of_version("1"), of_version("2")
    bundles = by_name([champion, replace(candidate, forecaster=HalfOfIt())])
    config = replace(config, online=True)
    out = run_experiment(EXPERIMENT, dataset, tmp_path / "out", config, bundles=bundles, tracking=False)
    facts = {"kind": "trees", "name": "reclaim", "version": "2", "run_id": "run2", "reference": "reclaim@2"}
    assert out.results["models"]["reclaim/2"] == facts
    assert list(out.results["models"]) == ["reclaim/1", "reclaim/2"]
    assert {"reclaim/1", "reclaim/2", "reclaim/2-online"} < set(by_name_of(out.results))
    assert " --model reclaim/1 --model reclaim/2 " in out.results["command"]
    units = read_units(out.folder / UNITS)
    for margin in MARGIN_NAMES:
        paired = Paired({n: units.sums[n, margin] for n in ("reclaim/1", "reclaim/2")}, Bootstrap.of(config))
        for r, resource in enumerate(RESOURCES):
            of = out.results["against_first"][margin]["reclaim/2"][resource]
            assert of == paired.compare("reclaim/2", "reclaim/1", r, config.budgets.of(margin)).report()
    assert [row["verdict"] for row in models_summary(out.results).as_records()] == [
        brief(out.results["against_first"]["aggressive"]["reclaim/2"][r]["verdict"]) for r in RESOURCES
    ]
    assert "Models compared with the first" in (out.folder / "report.html").read_text()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    whole = record(EXPERIMENT, out)
    recorded = {run.name: run for run in tracking.find_runs("margins")}
    assert recorded["margins raw reclaim/1 reclaim/2"].run_id == whole
    tags = recorded["reclaim/2/medium"].tags
    assert {name: tags[f"model.{name}"] for name in facts} == facts
    assert recorded["reclaim/2-online/medium"].tags["model.version"] == "2"
    assert not any(name.startswith("model.") for name in recorded["borg/medium"].tags)
    assert tags["against_first.cpu"].endswith(", against reclaim/1")
    inputs = mlflow.get_run(recorded["reclaim/1/medium"].run_id).inputs
    assert inputs is not None
    (read,) = inputs.dataset_inputs
    assert (read.dataset.name, read.dataset.digest) == ("raw", out.results["dataset"]["fingerprint"][:36])
    rows = compare(choose())["margins"].as_records()
    assert {r["estimator"] for r in rows} > {"reclaim/1", "reclaim/2"}
    pairs = {(r["estimator"], r["against"]) for r in differences(choose()).as_records()}
    assert ("reclaim/2", "reclaim/1") in pairs


def test_models_in_folders_of_any_name_are_recorded(
    report: ReplayReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    bundles = {"../new (2)/m=3": {"kind": "trees"}, "/old/m": {"kind": "network"}}
    seconds = {f"fold/{name}": float(k) for k, name in enumerate(bundles)}
    inputs = report.results["inputs"] | {"bundles": bundles}
    whole = record(EXPERIMENT, replace(report, results={**report.results, "inputs": inputs}, seconds=seconds))
    recorded = next(run for run in tracking.find_runs("margins") if run.run_id == whole)
    assert {name: kind for name, kind in recorded.params.items() if name.startswith("bundles")} == {
        "bundles.new 2/m3.kind": "trees",
        "bundles.old/m.kind": "network",
    }
    assert {name: of for name, of in recorded.metrics.items() if name.startswith("seconds")} == {
        "seconds.fold/new 2/m3": 0.0,
        "seconds.fold/old/m": 1.0,
    }


def test_the_command_names_models_as_the_command_line_takes_them(dataset: Path) -> None:
    builtin = replace(learned(), origin=builtin_model("reclaim@champion"))
    bundles = by_name([builtin, of_version("1"), of_version("local", "my models/new")])
    command = _command(EXPERIMENT, Dataset.open(dataset), MarginsConfig(), bundles)
    assert command.endswith(" --out DIR --model builtin --model reclaim/1 --model 'my models/new'")
    config = MarginsConfig(tune=False, value=Value(core_hour=0.05, violation=3.0))
    assert _command(EXPERIMENT, Dataset.open(dataset), config, {}).endswith(
        " --no-model --set tune=false --set value.core_hour=0.05 --set value.violation=3.0"
    )


def test_a_dataset_in_the_working_folder_has_the_name_of_that_folder(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dataset)
    opened, features = Dataset.open(Path()), FeatureSet.open(Path())
    assert _dataset_facts(opened, features)["folder"] == "cell"
    assert _command(EXPERIMENT, opened, MarginsConfig(), {}) == "reclaim replay margins cell --out DIR --no-model"


def test_a_dataset_behind_a_link_has_the_name_of_the_link(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(dataset)
    opened = Dataset.open(tmp_path / "link")
    assert _command(EXPERIMENT, opened, MarginsConfig(), {}) == "reclaim replay margins link --out DIR --no-model"


def test_a_contender_of_machines_has_the_facts_of_the_model_it_rests_on() -> None:
    results = {"models": {"reclaim/2": {"version": "2", "run_id": None}, "old (1)": {"version": "local"}}}
    for name in ("reclaim/2", "reclaim/2-online", "reclaim/2 (machine)", "reclaim/2 (bound)", "reclaim/2 (sum)"):
        assert model_tags(results, name) == {"model.version": "2"}
    assert model_tags(results, "old (1)") == model_tags(results, "old (1) (sum)") == {"model.version": "local"}
    assert model_tags(results, "borg (sum)") == model_tags(results, "borg") == {}


def test_models_have_distinct_names_or_an_error_says_which_are_the_same() -> None:
    assert list(by_name([learned(), of_version("1"), of_version("local", "./old/bundle")])) == [
        "trees",
        "reclaim/1",
        "bundle",
    ]
    folders = [of_version("local", folder) for folder in ("./old/bundle", "new/bundle")]
    assert list(by_name(folders)) == ["old/bundle", "new/bundle"]
    again = replace(of_version("1"), origin=ModelLocation("reclaim", "1", Path(), "reclaim@champion"))
    with pytest.raises(
        ConfigError, match="reclaim@1 and reclaim@champion: both are reclaim/1; name models that differ"
    ):
        by_name([of_version("1"), again])


def test_a_folder_named_by_two_paths_is_one_model(tmp_path: Path) -> None:
    one, other = (
        replace(learned(), origin=ModelLocation("m", "local", tmp_path / "m", source))
        for source in ("m", str(tmp_path / "m"))
    )
    with pytest.raises(ConfigError, match=f"^m and {tmp_path / 'm'}: both are m; name models that differ"):
        by_name([one, other])


@pytest.mark.parametrize(
    ("learned_from", "replayed_on", "message"),
    [
        ({}, {}, None),
        ({"train_share": 0.5}, {}, None),
        ({"role": "train"}, {}, "trees was tuned on this dataset to its end"),
        ({"role": "train"}, {"role": "test"}, "trees was trained on this dataset until .* µs on its clock"),
        ({}, {"role": "test"}, "trees was trained on this dataset until .*and its test period begins at"),
        ({"valid_share": 0.3}, {}, "trees was tuned on this dataset until"),
        ({}, {"test_unseen_share": 0.5}, "50% of the collections are to be unseen .* on all but 20%"),
    ],
)  # fmt: skip
def test_no_model_is_tested_on_what_it_was_trained_or_tuned_on(
    dataset: Path, config: MarginsConfig, tmp_path: Path,
    learned_from: dict[str, Any], replayed_on: dict[str, Any], message: str | None,
) -> None:  # fmt: skip
    shutil.copytree(dataset, tmp_path / "cell")
    opened = Dataset.open(tmp_path / "cell")
    build_features(opened, FeatureConfig(SplitConfig(**learned_from)))
    seen = {"fingerprint": opened.fingerprint, **Source(opened, FeatureSet.open(opened.path)).split_facts}
    build_features(opened, FeatureConfig(SplitConfig(**replayed_on)))

    def replay(trained: dict[str, Any]) -> None:
        bundles = {"trees": replace(learned(), trained={"datasets": [trained]})}
        run_experiment(EXPERIMENT, opened.path, tmp_path / "out", config, bundles=bundles, tracking=False)

    def accepted(*_: object, **__: object) -> NoReturn:
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:  # what is let pass gets to the measuring, and no further
        patch.setattr(estimates, "fold_dataset", accepted)
        with pytest.raises(InterruptedError) if message is None else pytest.raises(ConfigError, match=message) as told:
            replay(seen)
        for passes in ({**seen, "fingerprint": "another"}, {"fingerprint": opened.fingerprint}):  # or keeps no record
            with pytest.raises(InterruptedError):
                replay(passes)
    if message is not None:
        assert "`reclaim train" in str(told.value)
        assert "\n" not in str(told.value)


def test_no_model_is_tested_on_windows_that_it_learned_from_in_another_dataset(
    dataset: Path, config: MarginsConfig, tmp_path: Path
) -> None:
    features = FeatureSet.open(dataset)
    until_us = features.cuts_us[1]
    elsewhere = SimpleNamespace(n_buckets=features.n_buckets, cuts_us=(0, 2 * until_us), dataset=features.dataset)
    facts = {"name": "longer", "fingerprint": "another", SEEN: sample_windows(cast("FeatureSet", elsewhere))}
    bundle = replace(learned(), trained={"datasets": [facts]})
    with pytest.raises(ConfigError, match="trees was trained or tuned on windows that are also to be tested here"):
        run_experiment(EXPERIMENT, dataset, tmp_path / "out", config, bundles={"trees": bundle}, tracking=False)
    with pytest.raises(ConfigError, match=r"name another with --model, or none with --no-model"):
        judged_on("builtin/2", replace(bundle, origin=builtin_model()), features)
    by_prior = replace(learned(), trained={"datasets": [], "prior": {"datasets": [facts]}})
    with pytest.raises(ConfigError, match=r"the prior of trees was trained or tuned on windows .* `--set prior=none`"):
        run_experiment(EXPERIMENT, dataset, tmp_path / "out", config, bundles={"trees": by_prior}, tracking=False)
    assert not (tmp_path / "out").exists()
    facts[SEEN] = sample_windows(features)  # of the days before the test
    run_experiment(EXPERIMENT, dataset, tmp_path / "out", config, bundles={"trees": bundle}, tracking=False)


def test_a_learned_estimator_may_not_take_the_name_of_another(dataset: Path, tmp_path: Path) -> None:
    for names, taken in ((["borg"], "borg"), (["borg-online"], "borg-online"), (["m", "m-online"], "m-online")):
        with pytest.raises(ConfigError, match=f"cannot be called {taken}: the name is taken"):
            run_experiment(
                EXPERIMENT, dataset, tmp_path / "out", bundles=dict.fromkeys(names, learned()), tracking=False
            )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"horizon_s": 60}, "horizon_s must be one of"),
        ({"estimators": ("borg", "crystal-ball")}, "estimators must be different ones of autopilot-mean, "),
        ({"estimators": ("borg", "borg")}, "estimators must be different ones of"),
        ({"draws": 0}, "draws must be between 1 and 100000, got 0"),
        ({"confidence": 1.0}, "confidence must be between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayConfig(**setting)


def test_the_page_of_a_dataset_without_memory_does_not_speak_of_it(
    dataset: Path, config: MarginsConfig, tmp_path: Path
) -> None:
    raw = dataset.parent / "raw"
    mapping = [line for line in (raw / "mapping.toml").read_text().splitlines() if "memory" not in line]
    (tmp_path / "mapping.toml").write_text("\n".join(mapping))
    dataset_of(raw, tmp_path / "cell", mapping=tmp_path / "mapping.toml", buckets=1)
    out = run_experiment(EXPERIMENT, tmp_path / "cell", tmp_path / "out", config, tracking=False)
    assert out.results["dataset"]["judged"] == ["cpu"]
    page = re.sub(r"<(script|style).*?</\1>", "", out.page.read_text(), flags=re.DOTALL)
    told = [line for line in re.sub(r"<[^>]+>", " ", page).splitlines() if re.search("[Mm]emory|OOM", line)]
    assert [line.split()[:4] for line in told] == [["not", "in", "the", "trace"]]
    assert "CPU reclaimed" in page
