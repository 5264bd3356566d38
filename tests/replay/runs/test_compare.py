"""Recorded replays: recorded once, completed when interrupted, and tabulated side by side."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from reclaim.cli import app as cli
from reclaim.data.core.nested import flatten
from reclaim.data.errors import ConfigError, ModelError
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import Column
from reclaim.replay.experiments.compaction.measure import CompactionConfig
from reclaim.replay.experiments.margins.measure import EXPERIMENT, MarginsConfig, against_best
from reclaim.replay.experiments.what_if.measure import WhatIfConfig
from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.paired import Paired
from reclaim.replay.report.page import ReplayReport
from reclaim.replay.report.units import UNITS, read_units
from reclaim.replay.runs import compare as module
from reclaim.replay.runs.catalogue import EXPERIMENTS, load_experiment
from reclaim.replay.runs.compare import Chosen, choose
from reclaim.replay.runs.differences import differences
from reclaim.replay.runs.record import TAG_PARENT, TAG_PLACE, TAG_WORDS, record
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.client import store_client
from reclaim.training.tracking.runs import RunRecord


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
    estimators = [of["borg"], learned, of["oracle"]]
    config = MarginsConfig(draws=inputs["config"]["draws"], seed=seed)
    results = dict(report.results) | {
        "estimators": estimators,
        "against_best": against_best(estimators, read_units(report.folder / UNITS), {}, config),
        "inputs": inputs | {"config": inputs["config"] | {"seed": seed}},
    }
    return replace(report, results=results)


def compare(*runs: str) -> list[dict[str, Any]]:
    """Return the rows of the one table there is."""
    (table,) = module.compare(choose(runs)).values()
    return table.as_records()


def record_margins(report: ReplayReport) -> str:
    return record(EXPERIMENT, report)


NAMES = {"borg/baseline", "borg/medium", "borg/aggressive", "percentile/medium", "oracle/none"}


def test_replays_are_recorded_once_completed_when_cut_off_and_compared(
    report: ReplayReport, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"no finished replay in sqlite.*`reclaim replay margins DATASET --out DIR`"):
        compare()

    logged = []

    def cut_off(_: tracking.Run, metrics: dict[str, Any]) -> None:
        logged.append(metrics)
        if len(logged) == 4:  # the third of the single runs
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tracking.Run, "log_metrics", cut_off)
        with pytest.raises(KeyboardInterrupt):
            record_margins(small(report))
    first = record_margins(small(report))
    recorded = tracking.find_runs("margins")
    assert {r.status for r in recorded} == {"FINISHED"}  # the one that was cut off is completed, and none is left over
    assert sorted(r.name for r in recorded) == sorted(["margins raw", *NAMES])
    assert {r.tags[TAG_PARENT] for r in recorded if r.name in NAMES} == {first}

    assert record_margins(small(report)) == first
    assert len(tracking.find_runs("margins")) == 6

    second = record_margins(small(report, seed=2))
    assert second != first
    rows = compare()
    assert [(r["estimator"], r["margin"]) for r in rows] == [
        ("percentile", "medium"), ("borg", "baseline"), ("borg", "medium"), ("borg", "aggressive"), ("oracle", "none"),
    ]  # fmt: skip
    newest = {r.run_id for r in tracking.find_runs("margins") if r.tags.get(TAG_PARENT) == second}
    assert {r["run"] for r in rows} == newest
    aggressive = report.results["estimators"][0]["results"]["aggressive"]
    assert rows[3]["CPU reclaimed"] == aggressive["all"]["reclaimed_share"]["cpu"]["value"]
    assert rows[3]["memory violation"] == aggressive["all"]["violation_rate"]["memory"]["value"]
    assert rows[3]["would-be OOM"] == aggressive["oom"]["events"]
    assert (rows[0]["dataset"], rows[0]["horizon"]) == ("raw", "3600 s")

    units = read_units(report.folder / UNITS)
    paired = Paired({n: units.sums[n, "medium"] for n in ("percentile", "borg")}, Bootstrap(50, 2, 0.95))
    learned = next(r for r in tracking.find_runs("margins") if r.run_id == rows[0]["run"])
    for r, resource in enumerate(RESOURCES):
        expected = paired.difference("percentile", "borg", r)
        assert learned.metrics[f"against_best.{resource}.reclaimed_share"] == pytest.approx(expected.reclaimed.value)
        assert learned.metrics[f"against_best.{resource}.violation_rate_high"] == pytest.approx(expected.violation.high)
        assert learned.tags[f"against_best.{resource}"] == f"{expected.verdict}, against borg"
        assert learned.metrics[f"{resource}.reclaimed_share_low"] <= learned.metrics[f"{resource}.reclaimed_share_high"]
    beside = differences(choose()).as_records()
    assert [(r["estimator"], r["against"], r["margin"]) for r in beside[:2]] == [("percentile", "borg", "medium")] * 2
    assert beside[0]["reclaimed difference"] == pytest.approx(learned.metrics["against_best.cpu.reclaimed_share"])
    for row, resource in zip(beside, RESOURCES, strict=False):  # to the bit what the page of that replay says
        for what, metric in (("reclaimed", "reclaimed_share"), ("violation", "violation_rate")):
            found = [row[f"{what} {part}"] for part in ("difference", "low", "high")]
            kept = [f"against_best.{resource}.{metric}{part}" for part in ("", "_low", "_high")]
            assert found == [learned.metrics[name] for name in kept]
        assert f"{row['verdict']}, against borg" == learned.tags[f"against_best.{resource}"]
    with tracking.find_file(second, "none.txt") as none:
        assert none is None
    with tracking.find_file(second, UNITS) as copy:
        assert copy is not None
        assert copy.read_bytes() == (report.folder / UNITS).read_bytes()
    assert not copy.parent.exists()

    of_one = compare(first)
    assert len(of_one) == 5
    assert not {r["run"] for r in of_one} & newest
    both = compare(first, str(rows[2]["run"]))
    assert [(r["estimator"], r["margin"]) for r in both].count(("borg", "medium")) == 2
    with pytest.raises(ModelError, match="no run 0123"):
        compare("0123")

    whole = next(r for r in recorded if r.run_id == first)
    assert whole.tags["dataset_fingerprint"] == report.results["dataset"]["fingerprint"]
    assert whole.params["config.horizon_s"] == "3600"
    assert tracking.load_dict(first, "results.json")["dataset"] == report.results["dataset"]
    one = next(r for r in recorded if r.name == "borg/medium")
    assert float(one.params["margin_share.cpu"]) == report.results["estimators"][0]["margins"]["medium"]["cpu"]
    assert store.exists()


def test_a_run_that_was_cut_off_after_its_metrics_has_each_of_them_once(
    report: ReplayReport, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_metrics, logged = tracking.Run.log_metrics, []

    def cut_off(run: tracking.Run, metrics: dict[str, Any]) -> None:
        log_metrics(run, metrics)
        logged.append(run.run_id)
        if len(logged) == 2:  # the first of the single runs
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tracking.Run, "log_metrics", cut_off)
        with pytest.raises(KeyboardInterrupt):
            record_margins(small(report, seed=4))
    record_margins(small(report, seed=4))
    run = tracking.find_run(logged[1])
    assert run.status == "FINISHED"
    assert run.metrics
    assert {len(store_client().get_metric_history(run.run_id, name)) for name in list(run.metrics)[:5]} == {1}
    assert store.exists()


def test_a_replay_that_two_processes_record_at_once_is_recorded_once(
    report: ReplayReport, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_metrics, second = tracking.Run.log_metrics, Thread(target=record_margins, args=(small(report, seed=3),))

    def begin_second(run: tracking.Run, metrics: dict[str, Any]) -> None:
        if second.ident is None:
            second.start()
        log_metrics(run, metrics)

    before = {run.run_id for run in tracking.find_runs("margins")}
    monkeypatch.setattr(tracking.Run, "log_metrics", begin_second)
    record_margins(small(report, seed=3))
    second.join()
    recorded = [run.name for run in tracking.find_runs("margins") if run.run_id not in before]
    assert sorted(recorded) == sorted(["margins raw", *NAMES])
    assert store.exists()


def test_a_replay_whose_models_are_named_in_another_order_is_the_same_on_record(
    report: ReplayReport, store: Path
) -> None:
    models = {name: {"kind": "network", "name": name} for name in ("one", "other")}
    as_named, reversed_ = ({**report.results, "models": dict(of)} for of in (models.items(), [*models.items()][::-1]))
    whole = record_margins(small(replace(report, results=as_named), seed=5))
    recorded = tracking.find_runs("margins")
    assert record_margins(small(replace(report, results=reversed_), seed=5)) == whole
    assert tracking.find_runs("margins") == recorded
    assert store.exists()


def test_a_deleted_replay_is_not_compared_and_is_recorded_again(
    report: ReplayReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    deleted = record_margins(small(report))
    of_deleted = {run.run_id for run in tracking.find_runs("margins")} - {deleted}
    store_client().delete_run(deleted)  # as in MLflow's interface: the runs of its contenders stay
    with pytest.raises(ModelError, match="no finished replay in"):
        compare()
    for run_id in (deleted, *of_deleted):
        with pytest.raises(ModelError, match=f"run {run_id} .* is not a finished replay$"):
            compare(run_id)
    again = record_margins(small(report))
    assert again != deleted
    assert {row["run"] for row in compare()}.isdisjoint(of_deleted)
    assert [row["run"] for row in compare(again)] == [row["run"] for row in compare()]


def test_a_run_that_is_not_finished_or_of_another_experiment_is_refused_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, done = single("ratios", "0", {}, estimator="borg"), single("compaction", "1", {}, estimator="borg")
    on_record(monkeypatch, ratios=[replace(running, status="RUNNING")], compaction=[done])
    monkeypatch.setattr(tracking, "find_run", {"0": running, "1": done}.__getitem__)
    with pytest.raises(ModelError, match=r"run 0 \(ratios/\) is not a finished replay$"):
        choose(["0"])
    assert [run.run_id for run in choose(["1"]).runs] == ["1"]
    with pytest.raises(ModelError, match=r"run 1 \(compaction/\) is not a finished replay of ratios$"):
        choose(["1"], "ratios")


def single(experiment: str, run_id: str, metrics: dict[str, float], **words: str) -> RunRecord:
    tags = {"dataset": "cell", TAG_PARENT: f"whole of {experiment}", TAG_WORDS: ",".join(words), TAG_PLACE: run_id}
    return RunRecord(run_id, "", experiment, "FINISHED", 0, {"horizon_s": "300"}, metrics, tags | words)


def test_each_experiment_has_a_table_of_its_own_words_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {
        "compaction": (Column("machines", "machines"), Column("saved", "saved", percent=True)),
        "frontier": (Column("reclaimed", "cpu", percent=True),),
    }
    config = CompactionConfig
    monkeypatch.setattr(module, "load_experiment", lambda name: SimpleNamespace(columns=columns[name], config=config))
    runs = (
        single("frontier", "2", {"cpu": 0.5}, estimator="borg", rate="1 %"),
        single("compaction", "1", {"machines": 30.0}, estimator="vpa"),
        single("compaction", "0", {"machines": 20.0, "saved": 0.25}, estimator="borg", margin="medium"),
    )
    tables = module.compare(Chosen(runs, {}, runs))
    assert list(tables) == ["compaction", "frontier"]
    common = {"dataset": "cell", "horizon": "300 s", "started (UTC)": "1970-01-01 00:00"}
    assert tables["compaction"].as_records() == [
        common | {"estimator": "vpa", "margin": None, "machines": 30.0, "saved": None, "run": "1"},
        common | {"estimator": "borg", "margin": "medium", "machines": 20.0, "saved": 0.25, "run": "0"},
    ]
    assert tables["frontier"].as_records() == [
        common | {"estimator": "borg", "rate": "1 %", "reclaimed": 0.5, "run": "2"}
    ]
    assert tables["compaction"].as_strings()[1][5] == "25.00 %"


def on_record(monkeypatch: pytest.MonkeyPatch, **recorded: list[RunRecord]) -> None:
    """Let these runs be on record, newest first, by the name of their experiment, and those of their experiments."""

    def found(name: str) -> list[RunRecord]:
        runs = recorded.get(name.replace("-", "_"), [])
        return runs + [
            replace(runs[0], run_id=whole, status="FINISHED", tags={})
            for whole in {run.tags[TAG_PARENT] for run in runs}
        ]

    monkeypatch.setattr(tracking, "find_runs", found)


def test_runs_stand_in_the_order_of_their_experiment_and_can_be_of_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compaction = [single("compaction", str(i), {}, estimator=f"e{9 - i}") for i in (2, 0, 1)]
    on_record(monkeypatch, compaction=compaction, ratios=[single("ratios", "9", {}, estimator="borg")])
    assert [(r.experiment, r.run_id) for r in choose().runs] == [
        ("ratios", "9"),
        *(("compaction", str(i)) for i in range(3)),
    ]
    assert [r.experiment for r in choose(experiment="ratios").runs] == ["ratios"]
    with pytest.raises(ModelError, match="`reclaim replay frontier DATASET --out DIR` makes one"):
        choose(experiment="frontier")
    with pytest.raises(ConfigError, match=r"--experiment: expected one of margins, .*, got 'margin'"):
        choose(experiment="margin")


def test_named_runs_have_the_place_in_which_they_were_named_first_and_a_whole_experiment_stands_for_its_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [single("ratios", k, {}, estimator=f"e{k}") for k in "012"]
    parents = ("whole", "whole", "other")
    runs = [replace(run, tags={**run.tags, TAG_PARENT: of}) for run, of in zip(runs, parents, strict=True)]
    on_record(monkeypatch, ratios=runs)
    chosen = choose(["2", "whole", "0"])
    assert chosen.named == {"2": 0, "0": 1, "1": 1}
    assert {run.run_id for run in chosen.runs} == {"0", "1", "2"}
    assert choose(["0"]).named == {"0": 0}
    assert choose().named == {}


def test_the_order_of_contenders_is_that_of_their_own_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = [single("ratios", k, {}, estimator="borg", margin=m) for k, m in (("0", "baseline"), ("1", "medium"))]
    compaction = [replace(single("compaction", "3", {}, estimator="borg", margin="medium"), started_ms=9)]
    on_record(monkeypatch, ratios=ratios, compaction=compaction)
    assert [r.run_id for r in choose().runs] == ["0", "1", "3"]


def ratios(run_id: str, started_ms: int, *, whole: str = "", place: int = 0, **tags: str) -> RunRecord:
    """Return a run on record of the ratios, of the contender ``e`` and an hour unless given."""
    one, horizon_s = single("ratios", run_id, {}, estimator=tags.pop("estimator", "e")), tags.pop("horizon_s", "3600")
    tags = {**one.tags, TAG_PARENT: whole or run_id * 2, TAG_PLACE: str(place), **tags}
    return replace(one, started_ms=started_ms, params={"horizon_s": horizon_s}, tags=tags)


def test_rows_are_in_the_order_of_dataset_horizon_the_newest_replays_contenders_and_age(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest_first = [
        ratios("1", 9, dataset="z"),
        ratios("2", 8, dataset="a", horizon_s="86400"),
        ratios("3", 7, dataset="a", whole="new", place=10, estimator="later"),
        ratios("4", 7, dataset="a", whole="new", place=2, estimator="first"),
        ratios("5", 6, dataset="a", whole="old", place=0, estimator="later"),
        ratios("6", 6, dataset="a", whole="old", place=1, estimator="first"),
    ]
    on_record(monkeypatch, ratios=newest_first)
    assert "".join(run.run_id for run in choose(["1", "2", "old", "new"]).runs) == "463521"


def test_a_dataset_is_known_by_its_fingerprint_under_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    newest_first = [
        ratios("1", 9, dataset="moved", dataset_fingerprint="x"),
        ratios("2", 8, dataset="cell", dataset_fingerprint="y"),
        ratios("3", 7, dataset="cell", dataset_fingerprint="z"),
        ratios("4", 6, dataset="before", dataset_fingerprint="x"),  # of no other dataset than the newer 1
    ]
    on_record(monkeypatch, ratios=newest_first)
    assert {run.run_id for run in choose().runs} == {"1", "2", "3"}


def test_datasets_of_one_name_are_told_apart_by_their_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    newest_first = [
        ratios("1", 9, dataset="moved", dataset_fingerprint="0123456789"),
        ratios("2", 8, dataset="cell", dataset_fingerprint="abcdefabcdef"),
        ratios("3", 7, dataset="cell", dataset_fingerprint="fedcbafedcba"),
    ]
    on_record(monkeypatch, ratios=newest_first)
    table = module.compare(choose())["ratios"]
    assert [row[0] for row in table.rows] == ["cell (abcdefab)", "cell (fedcbafe)", "moved"]


def what_if(
    run_id: str, started_ms: int, name: str = "borg", margin: str = "medium", asked: str = "medium", **settings: object
) -> RunRecord:
    """Return a run on record of the what-if experiment, of its default settings but for those given."""
    params = {k: str(v) for k, v in flatten(asdict(WhatIfConfig(margin=asked))).items()}
    params |= {"horizon_s": "3600", **{k: str(v) for k, v in settings.items()}}
    one = single("what-if", run_id, {"fewest": 20.0}, estimator=name, margin=margin)
    return replace(one, params=params, started_ms=started_ms)


def test_answers_to_different_questions_have_rows_and_columns_that_separate_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest_first = [
        what_if("6", 9, growth=1.2, draws=50, estimators="['borg', 'vpa']"),
        what_if("5", 8, machines="[30, 40]"),
        what_if("4", 7),
        what_if("3", 6, draws=7, seed=2, confidence=0.9),  # no other question than the newer 4
        what_if("2", 5, growth=1.2),
        what_if("1", 4, name="vpa"),
    ]
    on_record(monkeypatch, what_if=newest_first)
    assert [run.run_id for run in choose().recorded] == list("654321")
    table = module.compare(choose())["what-if"]
    rows = {row["run"]: (row["estimator"], row["growth"], row["machines"]) for row in table.as_records()}
    assert rows == {
        "6": ("borg", "1.2", "()"), "5": ("borg", "1.0", "[30, 40]"), "4": ("borg", "1.0", "()"),
        "1": ("vpa", "1.0", "()"),
    }  # fmt: skip
    assert table.columns[:6] == ("dataset", "horizon", "machines", "growth", "estimator", "margin")
    assert not {"draws", "estimators", "oom_budget", "policy", "seed"} & set(table.columns)


def test_a_setting_that_is_among_the_words_has_no_second_column(monkeypatch: pytest.MonkeyPatch) -> None:
    newest_first = [
        what_if("3", 9, name="limit", margin="none", asked="aggressive"),
        what_if("2", 9, margin="aggressive", asked="aggressive"),
        what_if("1", 8, name="limit", margin="none"),
        what_if("0", 8),
    ]
    on_record(monkeypatch, what_if=newest_first)
    table = module.compare(choose())["what-if"]
    assert table.columns.count("margin") == 1
    assert {r["run"]: (r["estimator"], r["margin"]) for r in table.as_records()} == {
        "0": ("borg", "medium"), "2": ("borg", "aggressive"), "3": ("limit", "none"),
    }  # fmt: skip


def test_replays_of_two_horizons_have_them_in_the_one_column_of_the_horizon(monkeypatch: pytest.MonkeyPatch) -> None:
    hour, five_minutes = (
        replace(single("margins", k, {}, estimator="borg"), params={"horizon_s": horizon_s})
        for k, horizon_s in (("0", "3600"), ("1", "300"))
    )
    on_record(monkeypatch, margins=[hour, five_minutes])
    table = module.compare(choose())["margins"]
    assert table.columns[:3] == ("dataset", "horizon", "estimator")
    assert [(row["run"], row["horizon"]) for row in table.as_records()] == [("1", "300 s"), ("0", "3600 s")]


def test_no_setting_has_the_name_of_a_column() -> None:
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        settings = set(flatten(asdict(experiment.config()))) - {"margin"}  # among the words
        assert not settings & {column.heading for column in experiment.columns}, name


def test_compare_prints_the_numbers_that_the_replay_printed(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    out = tmp_path / "out"
    settings = ["--set", "draws=20", "--set", 'estimators=["borg", "limit"]']
    words = ["replay", "margins", str(dataset), "--out", str(out), "--no-model", *settings]

    def told(*words: str) -> Any:
        done = CliRunner().invoke(cli.app, list(words))
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout) if "--json" in words else done.stdout

    first = told(*words)
    assert first.splitlines()[-1] == f"{out / 'report.html'}"
    assert len(first.splitlines()) <= 12
    assert "statistical" in first
    listed = told(*words, "--verbose")
    assert first.splitlines()[0] == listed.splitlines()[0]
    again = told(*words, "--json")
    assert again["already_there"]
    assert [(r["estimator"], r["margin"]) for r in again["results"]] == [
        *((name, margin) for name in ("borg", "borg-online") for margin in ("baseline", "medium", "aggressive")),
        ("limit", "none"), ("oracle", "none"),
    ]  # fmt: skip
    recorded = told("compare", "--json")["runs"]["margins"]
    around = ("dataset", "horizon", "started (UTC)", "run")
    assert [{k: v for k, v in row.items() if k not in around} for row in recorded] == again["results"]
    printed = told("compare", "--experiment", "margins")
    assert printed.startswith("margins: dataset raw, horizon 3600 s, started (UTC) ")
    runs = listed.split("\n\n")[1].splitlines()
    assert runs[2].split()[1:9] == printed.split("\n")[3].split()[1:9]  # borg, baseline
