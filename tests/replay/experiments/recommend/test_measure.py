"""The recommendation of a small cell: judged on the weeks after, set from what was known, the same again."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from reclaim.cli import app as cli
from reclaim.data import schema as s
from reclaim.data.dataset import Dataset, bucket_name
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.windows import demand
from reclaim.features.build import build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import TEST, TEST_UNSEEN
from reclaim.replay.experiments.recommend import measure, names
from reclaim.replay.experiments.recommend.answers import Contender
from reclaim.replay.experiments.recommend.decisions import lay_out
from reclaim.replay.experiments.recommend.formats import KRR_FILE, changes, records
from reclaim.replay.experiments.recommend.measure import (
    EXPERIMENT,
    _far_over,
    _far_over_in_all,
    _period_facts,
    _winners,
)
from reclaim.replay.experiments.recommend.page import console_table, findings, page, summary_table, workload_table
from reclaim.replay.experiments.recommend.patches import write_patches
from reclaim.replay.experiments.recommend.policy import RecommendConfig
from reclaim.replay.experiments.recommend.series import largest_task
from reclaim.replay.report.page import ReplayReport, render_page
from reclaim.replay.runs.run import run_experiment
from reclaim.training.margins.value import Value
from tests.browser import found_in
from tests.replay.experiments.recommend.test_series import HOUR, first_ends, rows_of

HOLD_DAYS = 0.25
CONFIG = RecommendConfig(estimators=("max-so-far", "percentile", "krr"), hold_days=HOLD_DAYS, draws=50, min_change=0.05)


def recommend(dataset: Path, out: Path, config: RecommendConfig = CONFIG) -> ReplayReport:
    return run_experiment(EXPERIMENT, dataset, out, config, tracking=False)


@pytest.fixture(scope="module")
def report(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> ReplayReport:
    """Make the recommendation of thirty tasks of ten services over two days; to be read only."""
    return recommend(dataset, tmp_path_factory.mktemp("recommend") / "out")


def test_every_workload_has_a_request_and_the_totals_are_their_sums(report: ReplayReport) -> None:
    lines = report.results["workloads"]
    assert len(lines) == 10
    assert {line["tasks"] for line in lines} == {3}
    for r, limit in (("cpu", 1.0), ("memory", 2.0)):
        assert {line[r]["request"] for line in lines} == {limit}  # the request is taken to be the limit
        assert all(line[r]["change"] == pytest.approx(line[r]["recommended"] / limit - 1) for line in lines)
        reclaimable = sum(3 * (limit - line[r]["recommended"]) for line in lines)
        assert report.results["totals"][r]["reclaimable"] == pytest.approx(reclaimable)
        assert report.results["totals"][r]["share"] == pytest.approx(reclaimable / (30 * limit))
        assert 0.1 < report.results["totals"][r]["share"] < 0.9
        # a table counts all tasks of a workload, a file one: both is said
        of_tables = sum(float(str(one["reclaimable"])) for one in workload_table(report.results, r).as_records())
        of_files = sum(one[f"{r}_reclaimable"] for one in records(report.results))
        assert of_tables == pytest.approx(reclaimable) == pytest.approx(3 * of_files)
    meaning = report.results["definitions"]["reclaimable"]
    assert "files for programs of one task, in tables and totals of the tasks that run" in meaning


def test_a_page_that_leaves_workloads_out_says_how_many_and_where_they_are(
    report: ReplayReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "workloads of smaller changes are not on this page; recommendations.csv has all"
    assert note not in render_page(EXPERIMENT, report.results, {})
    monkeypatch.setattr("reclaim.replay.experiments.recommend.page._PAGE_ROWS", 4)
    assert render_page(EXPERIMENT, report.results, {}).count(f"6 {note}") == 2


def test_the_backtest_is_what_happened_while_each_request_held(report: ReplayReport, dataset: Path) -> None:
    # counted once more from the windows: the requests that the pictures show, in force from their times on
    stored, features = Dataset.open(dataset), FeatureSet.open(dataset)
    begins, end = features.cuts_us[1], 0
    counted: dict[tuple[int, str], list[int]] = {}
    windows = [stored.windows(bucket) for bucket in range(stored.n_buckets)]
    end = max(int(of.end_us.max()) for of in windows)
    by_id = {line["collection_id"]: line for line in report.results["workloads"]}
    bin_us = 14 * s.DAY_US // 84
    for of in windows:
        mine = np.flatnonzero((features.folding.period_and_group(of)[0] == TEST) & (of.start_us >= begins))
        need = demand(of)
        for row in mine:
            line = by_id[int(of.collection_id[row])]
            for k, r in enumerate(("cpu", "memory")):
                held = line[r]["picture"]["held"]
                hold = int((of.start_us[row] - begins) // (HOLD_DAYS * s.DAY_US))
                at, value = held[hold]
                assert at == pytest.approx(
                    (begins + hold * HOLD_DAYS * s.DAY_US - (end - 84 * bin_us)) / bin_us, abs=0.01
                )
                top = line[r]["request"] / line[r]["picture"]["request"]
                of_line = counted.setdefault((line["collection_id"], r), [0, 0, 0])
                of_line[0] += 1
                of_line[1] += need[row, k] > (value + 1) * top  # pictures are rounded to a thousandth
                of_line[2] += need[row, k] > (value - 1) * top
    for (collection, r), (n, least, most) in counted.items():
        found = by_id[collection][r]["violation"]
        assert found["windows"] == n
        assert least <= found["violations"] <= most
        assert found["value"] == pytest.approx(found["violations"] / n)
    for r in ("cpu", "memory"):
        total = sum(by_id[c][r]["violation"]["violations"] for c, of_r in counted if of_r == r)
        n = sum(of[0] for (_, of_r), of in counted.items() if of_r == r)
        assert report.results["test"]["recommendation"]["violation_rate"][r]["value"] == pytest.approx(total / n)


def test_the_oracle_never_violates_and_nothing_that_does_not_reclaims_more(report: ReplayReport) -> None:
    test = report.results["test"]
    for r in ("cpu", "memory"):
        assert test["oracle"]["violation_rate"][r]["value"] == 0
        assert test["present request"]["reclaimed_share"][r]["value"] == 0
        assert test["present request"]["violation_rate"][r]["value"] == 0  # the request is taken to be the limit
        assert (
            test["oracle"]["reclaimed_share"][r]["value"] > test["recommendation"]["reclaimed_share"][r]["value"] > 0.1
        )


def test_the_estimator_that_won_reclaims_most_on_the_validation_part_within_the_budget(report: ReplayReport) -> None:
    assert [e["name"] for e in report.results["estimators"]] == list(CONFIG.estimators)
    for r in ("cpu", "memory"):
        of = [e["resources"][r] for e in report.results["estimators"]]
        won = [one for one in of if one["won"]]
        assert len(won) == 1
        assert won[0]["chosen_by"]["reclaimed_share"] == max(one["chosen_by"]["reclaimed_share"] for one in of)
        assert all(one["chosen_by"]["violation_rate"] <= report.results["budget"][r] for one in of)
        assert won[0]["less_reclaimed"] is None
        tested = {one["name"]: one["test"]["reclaimed_share"][r]["value"] for one in report.results["estimators"]}
        (winner,) = (one["name"] for one in report.results["estimators"] if one["resources"][r]["won"])
        for one in report.results["estimators"]:
            if one["name"] != winner:
                less = one["resources"][r]["less_reclaimed"]["value"]
                assert less == pytest.approx(tested[one["name"]] - tested[winner])
                assert less != 0
    assert report.results["budget"] == {"cpu": 0.01, "memory": 0.001}
    cpu, memory = (report.results["estimators"][0]["resources"][r]["chosen_by"] for r in ("cpu", "memory"))
    assert memory["violation_rate"] <= 0.001 < cpu["violation_rate"]  # CPU spends its larger budget


def changed_future(dataset: Path, folder: Path, after_us: int) -> Path:
    """Return a copy of a dataset in which every task uses half after a time."""

    def halved(table: pa.Table) -> dict[str, NDArray[np.float64]]:
        half = np.where(table[s.START_US].to_numpy() >= after_us, 0.5, 1.0)
        return {name: table[name].to_numpy() * half for name in (s.CPU_MEAN, s.MEMORY_MEAN, s.MEMORY_MAX)}

    return changed(dataset, folder, halved)


def test_a_request_rests_on_nothing_after_it_was_set(dataset: Path, report: ReplayReport, tmp_path: Path) -> None:
    features = FeatureSet.open(dataset)
    hold_us = int(HOLD_DAYS * s.DAY_US)
    other = recommend(changed_future(dataset, tmp_path, features.cuts_us[1] + hold_us), tmp_path / "out")
    by_id = {line["collection_id"]: line for line in other.results["workloads"]}
    differ = 0
    for line in report.results["workloads"]:
        for r in ("cpu", "memory"):
            here, there = line[r], by_id[line["collection_id"]][r]
            scale = [one["request"] / one["picture"]["request"] for one in (here, there)]
            first = [one["picture"]["held"][:2] for one in (here, there)]
            for (_, a), (_, b) in zip(*first, strict=True):  # set at the cut and one hold later, from the past alone
                assert a * scale[0] == pytest.approx(b * scale[1], abs=2e-3)
            differ += here["recommended"] != there["recommended"]
    assert differ > 5  # the change is seen, later
    for one, two in zip(report.results["estimators"], other.results["estimators"], strict=True):
        for r in ("cpu", "memory"):
            assert one["resources"][r]["margin"] == two["resources"][r]["margin"]
            assert one["resources"][r]["settings"] == two["resources"][r]["settings"]
            assert one["resources"][r]["valid"] == two["resources"][r]["valid"]


def test_the_same_again_gives_the_same_bytes_and_a_finished_folder_is_left(
    dataset: Path, report: ReplayReport, tmp_path: Path
) -> None:
    again = recommend(dataset, tmp_path / "again")
    for path in sorted(report.folder.iterdir()):
        assert (again.folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert recommend(dataset, report.folder).already_there
    with pytest.raises(ConfigError, match="differs in config"):
        recommend(dataset, report.folder, replace(CONFIG, min_change=0.2))


def test_the_files_agree_with_the_results(report: ReplayReport) -> None:
    lines = report.results["workloads"]
    rows = list(csv.DictReader(io.StringIO((report.folder / "recommendations.csv").read_text())))
    assert [int(row["collection_id"]) for row in rows] == [line["collection_id"] for line in lines]
    assert [float(row["memory_recommended"]) for row in rows] == [line["memory"]["recommended"] for line in lines]
    krr = json.loads((report.folder / KRR_FILE).read_text())
    assert [scan["recommended"]["requests"]["cpu"]["value"] for scan in krr["scans"]] == [
        line["cpu"]["recommended"] for line in lines
    ]
    assert json.loads((report.folder / "recommendations.json").read_text())["totals"] == report.results["totals"]


def test_the_console_tables_fit_eighty_columns(report: ReplayReport) -> None:
    for table in (summary_table(report.results), console_table(report.results)):
        assert max(map(len, table.as_text(80).splitlines())) <= 80
        assert table.as_text(80) == table.as_text()
    assert len(console_table(report.results, None).rows) == sum(
        line[r]["recommended"] != line[r]["request"] for line in report.results["workloads"] for r in ("cpu", "memory")
    )


def test_anonymous_files_name_no_collection_and_no_dataset(dataset: Path, tmp_path: Path) -> None:
    named = tmp_path / "our cluster"
    shutil.copytree(dataset, named)
    found = recommend(named, tmp_path / "out", replace(CONFIG, anonymise=True))
    secret = [str(one) for one in Dataset.open(dataset).read("tasks", [s.COLLECTION_ID])[s.COLLECTION_ID].to_pylist()]
    secret += ["our cluster", str(tmp_path)]
    for path in found.folder.iterdir():
        text = path.read_text()
        assert [one for one in secret if one in text] == [], path.name
    assert [line["name"] for line in found.results["workloads"]][:2] == ["workload-1", "workload-2"]
    assert found.results["dataset"]["name"] == "anonymous"


def test_an_anonymous_command_names_no_folder() -> None:
    made = {
        "inputs": {"config": {"anonymise": True}},
        "dataset": {"name": "ours", "folder": "our cluster"},
        "models": {
            "new": {"version": "local", "reference": "our models/new"},
            "builtin/2": {"version": "2", "reference": "builtin"},
        },
        "command": "reclaim recommend 'our cluster' --out DIR --model 'our models/new' --model builtin --set seed=2",
    }
    published = EXPERIMENT.publish
    assert published is not None
    shown = published(made)["command"]
    assert shown == "reclaim recommend dataset --out DIR --model FOLDER --model builtin --set seed=2"


FILTERED = """() => {
  const field = document.querySelector(".filter input"), rows = [...document.querySelectorAll("tbody")[0].rows];
  const shown = () => rows.filter((row) => row.getClientRects().length > 0).length;
  const before = shown();
  field.value = rows[0].cells[0].textContent;
  field.dispatchEvent(new Event("input"));
  return {before, after: shown(), fields: document.querySelectorAll(".filter input").length,
          wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
          pictures: document.querySelectorAll("td svg").length,
          said: document.querySelector(".filter output").textContent};
}"""


@pytest.mark.slow
def test_a_browser_filters_the_rows_and_shows_a_picture_in_each(report: ReplayReport, tmp_path: Path) -> None:
    seen = found_in(report.page.read_text(), FILTERED, tmp_path)
    assert seen == {"before": 10, "after": 1, "fields": 2, "wide": 0, "pictures": 20, "said": "1 of 10"}


def test_patches_of_a_dataset_without_names_are_refused(report: ReplayReport, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not named"):
        write_patches(report.results, tmp_path / "patches")


def test_patches_are_refused_before_anything_is_computed(dataset: Path, tmp_path: Path) -> None:
    done = run(str(dataset), "--out", str(tmp_path / "out"), "--no-model", "--patches", str(tmp_path / "patches"))
    assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / "out").exists()


def test_patches_that_would_replace_the_results_are_refused_before_anything_is_computed(
    dataset: Path, tmp_path: Path
) -> None:
    patches = tmp_path / "patches"
    patches.mkdir()
    for out in (patches, patches / "out", tmp_path / "other" / ".." / "patches"):
        done = run(str(dataset), "--out", str(out), "--no-model", "--patches", str(patches))
        assert isinstance(done.exception, ConfigError)
        assert "choose another folder" in str(done.exception)
        assert f"--out {out}" in str(done.exception)
    assert not any(patches.iterdir())


def test_containers_to_patch_without_a_folder_for_patches_are_refused(dataset: Path, tmp_path: Path) -> None:
    done = run(str(dataset), "--out", str(tmp_path / "out"), "--no-model", "--patch-containers", "app")
    assert isinstance(done.exception, ConfigError)
    assert "--patches DIR" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", ["10", "1", "-5%", "a tenth", "100%"])
def test_a_least_change_that_is_no_share_is_refused_by_its_option(dataset: Path, tmp_path: Path, share: str) -> None:
    done = run(str(dataset), "--out", str(tmp_path / "out"), "--no-model", f"--min-change={share}")
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"--min-change: expected a share below one, as 10% or 0.1, got '{share}'"


def run(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["recommend", *words])


def test_the_command_prints_a_format_and_ends_with_three_above_the_number(
    dataset: Path, report: ReplayReport, tmp_path: Path
) -> None:
    words = [str(dataset), "--out", str(tmp_path / "out"), "--no-model", "--min-change", "5%", "--set", "draws=50"]
    words += ["--set", f"hold_days={HOLD_DAYS}", "--set", 'estimators=["max-so-far", "percentile", "krr"]']
    done = run(*words, "-f", "csv")
    assert done.exit_code == 0, done.output
    assert done.stdout == (report.folder / "recommendations.csv").read_text()
    n = changes(report.results)
    assert run(*words, "--fail-above", str(n)).exit_code == 0
    above = run(*words, "--fail-above", str(n - 1))
    assert above.exit_code == 3
    assert f"{n} workloads are to change" in above.stderr
    facts = json.loads(run(*words, "--json").stdout)
    assert (facts["changes"], facts["already_there"]) == (n, True)
    assert facts["totals"] == report.results["totals"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cpu_margin": "medium"}, "cpu_margin must be baseline or aggressive"),
        ({"hold_days": 0.0}, "hold_days must be at least"),
        ({"min_change": 1.0}, "min_change must be 0 or more and less than 1"),
        ({"oom_bump": 0.5}, "oom_bump must be at least 1"),
        ({"most_over": 0.5}, "most_over must be at least 1"),
        ({"memory_min": -1.0}, "memory_min must be 0 or more"),
        ({"estimators": ()}, "estimators must name one"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecommendConfig(**change)


def test_far_over_the_budget_is_more_than_ten_times_beyond_the_noise() -> None:
    lows = ((0.101, 0.0101), (0.099, 0.0099), (None, 0.5))  # budgets of 1 % for CPU and 0.1 % for memory
    assert far_over(lows, days=4, of="low") == [[True, True], [False, False], [False, True]]


def test_of_a_backtest_of_under_four_days_the_rate_itself_says_what_is_far_over_the_budget() -> None:
    # of three days, one of 27 resamples has the mildest day alone: more than the 2.5 % below the interval
    rates = ((0.101, 0.0101), (0.099, 0.0099), (None, 0.5))
    for days in (1, 3):
        assert far_over(rates, days=days, of="value") == [[True, True], [False, False], [False, True]]


def far_over(rates: Sequence[tuple[float | None, float]], *, days: int, of: str) -> list[list[bool]]:
    """Return what is far over the budget by one number of each workload's violation, the others unknown or small."""
    others = {"low": None, "value": 0.0, "days": days}
    of_workloads = [{r: others | {of: rate} for r, rate in zip(s.RESOURCES, both, strict=True)} for both in rates]
    found: list[list[bool]] = _far_over(of_workloads, RecommendConfig()).tolist()
    return found


def test_all_workloads_together_are_far_over_the_budget_where_they_violate_twice_as_often_beyond_the_noise() -> None:
    def over(*of_cpu: float | None) -> list[bool]:
        of = {"cpu": of_cpu, "memory": (None, None)}  # budgets of 1 % for CPU and 0.1 % for memory
        violation = {r: dict(zip(("value", "low"), both, strict=True)) for r, both in of.items()}
        found: list[bool] = _far_over_in_all(violation, RecommendConfig()).tolist()
        return found

    assert over(0.021, 0.011) == [True, False]
    assert over(0.019, 0.011) == over(0.021, 0.009) == [False, False]
    assert over(0.021, None) == [True, False]  # a single workload: no noise is known


def test_where_all_together_are_far_over_the_budget_of_a_resource_no_request_of_it_is_lowered(
    dataset: Path, report: ReplayReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_far_over_in_all", lambda *_: np.array([True, False]))
    found = recommend(dataset, tmp_path / "out").results
    assert found["failed"] == {"cpu": True, "memory": False}
    for held, free in zip(found["workloads"], report.results["workloads"], strict=True):
        assert free["cpu"]["recommended"] < free["cpu"]["request"]
        assert (held["cpu"]["rule"], held["cpu"]["recommended"]) == ("over budget", held["cpu"]["request"])
        assert held["memory"] == free["memory"]


def test_the_page_of_a_dataset_without_names_says_that_it_is_anonymous(
    dataset: Path, report: ReplayReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not report.results["anonymous"]
    monkeypatch.setattr(names, "is_anonymous", lambda _: True)
    config = replace(CONFIG, estimators=("max-so-far",), tune=False)
    assert recommend(dataset, tmp_path / "out", config).results["anonymous"]


def test_a_value_is_refused_where_no_model_takes_part(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"value\.\* has no effect without a model"):
        recommend(dataset, tmp_path / "out", replace(CONFIG, value=Value(core_hour=0.1, violation=3.0)))


@pytest.mark.parametrize(("decisions", "said"), [(1, "once"), (2, "2 times")])
def test_the_page_says_how_often_requests_were_set(report: ReplayReport, decisions: int, said: str) -> None:
    results = {**report.results, "dataset": {**report.results["dataset"], "test_decisions": decisions}}
    figures = {name: report.folder / f"{name}.svg" for name in EXPERIMENT.figures}
    assert f"requests were set\n{said}, each from" in render_page(EXPERIMENT, results, figures)


def test_the_times_and_collections_of_the_backtest_by_hand() -> None:
    # a history from 1 to 6 h, of which 2 h are for training, 1 for validation and 2 for the test, with requests that
    # hold for an hour; the second collection is new in the last hour, the third is a copy of the first
    cuts = (3 * HOUR, 4 * HOUR)
    rows = rows_of([(0, 12, [1.0] * 60), (1, 60, [1.0] * 12), (2, 12, [1.0] * 60)], cuts=cuts)
    rows.group[rows.workload == 1] = TEST_UNSEEN
    decisions = lay_out(rows, largest_task(rows), cuts, hold_days=1 / 24, seen_days=1)
    assert _period_facts(rows, decisions, cuts) == {
        "test_task_windows": 60, "test_hours": 2.0, "valid_hours": 1.0, "history_hours": 5.0, "test_collections": 3,
        "unseen_collections": 1, "test_decisions": 2,
    }  # fmt: skip


def changed(dataset: Path, folder: Path, change: Callable[[pa.Table], dict[str, NDArray[np.float64]]]) -> Path:
    """Return a copy of a dataset with other columns of usage, and its features."""
    copy = folder / "cell"
    shutil.copytree(dataset, copy)
    shutil.rmtree(copy / "features")
    for path in (copy / "usage").iterdir():
        table = pq.read_table(path)
        for name, values in change(table).items():
            at = table.column_names.index(name)
            table = table.set_column(at, table.schema.field(name), pa.array(values, from_pandas=True))
        pq.write_table(table, path)
    build_features(Dataset.open(copy))
    return copy


def test_a_workload_without_a_window_in_the_backtest_is_not_lowered(dataset: Path, tmp_path: Path) -> None:
    begins = FeatureSet.open(dataset).cuts_us[1]
    silent = int(Dataset.open(dataset).read("tasks", [s.COLLECTION_ID])[s.COLLECTION_ID][0].as_py())

    def stops(table: pa.Table) -> dict[str, NDArray[np.float64]]:
        at = (table[s.COLLECTION_ID].to_numpy() == silent) & (table[s.START_US].to_numpy() >= begins)
        return {name: np.where(at, np.nan, table[name].to_numpy()) for name in (s.MEMORY_MEAN, s.MEMORY_MAX)}

    config = replace(CONFIG, estimators=("percentile",), tune=False)
    before = recommend(dataset, tmp_path / "before", config)
    wanted = {line["collection_id"]: line["memory"] for line in before.results["workloads"]}[silent]
    assert wanted["recommended"] < wanted["request"]
    found = recommend(changed(dataset, tmp_path, stops), tmp_path / "out", config)
    kept = {line["collection_id"]: line["memory"] for line in found.results["workloads"]}[silent]
    assert (kept["rule"], kept["recommended"]) == ("unknown", kept["request"])


def test_each_line_has_the_backtest_of_its_own_workload_where_one_before_it_is_left_out(
    dataset: Path, report: ReplayReport, tmp_path: Path
) -> None:
    gone = first_ends(dataset, tmp_path / "cell")
    found = recommend(tmp_path / "cell", tmp_path / "out", replace(CONFIG, seen_days=0.1)).results
    assert found["left_out"] == 1
    before = {line["collection_id"]: line for line in report.results["workloads"]}
    assert before.keys() - {line["collection_id"] for line in found["workloads"]} == {gone}
    for line in found["workloads"]:
        for r in s.RESOURCES:
            assert line[r]["violation"] == before[line["collection_id"]][r]["violation"]
    assert len({str(line["cpu"]["violation"]) for line in found["workloads"]}) > 5


def test_the_recommendation_does_not_depend_on_how_many_rows_are_laid_out_at_once(
    dataset: Path, report: ReplayReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reclaim.replay.experiments.recommend.series._AT_ONCE", 1_000)  # less than two workloads
    assert recommend(dataset, tmp_path / "out").results["workloads"] == report.results["workloads"]


def test_of_each_resource_the_most_reclaiming_estimator_wins_and_none_by_an_unknown_share() -> None:
    nan, bare = float("nan"), np.zeros((0, 2))
    shares = {"a": (0.2, 0.1), "b": (nan, 0.3), "c": (0.2, nan)}
    of = [Contender(name, "statistical", bare, ({}, {}), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), share, ())
          for name, share in shares.items()]  # fmt: skip
    assert [one.name for one in _winners(of, [0.01, 0.001])] == ["a", "b"]  # the first of equals
    lost = {"a": (0.02, 0.001), "b": (0.0, 0.003), "c": (0.01, 0.002)}
    of = [replace(one, lost=lost[one.name]) for one in of]
    assert [one.name for one in _winners(of, [0.01, 0.001])] == ["c", "a"]  # the others cannot keep the budget
    assert [one.name for one in _winners(of[1:], [0.01, 0.001])] == ["c", "c"]  # none can, of memory: the least lost


def test_the_notes_of_every_estimator_that_won_a_resource_are_on_the_page(report: ReplayReport) -> None:
    first, second, *others = report.results["estimators"]

    def won(one: dict[str, Any], *resources: str) -> dict[str, Any]:
        of = {r: {**one["resources"][r], "won": r in resources} for r in s.RESOURCES}
        return {**one, "resources": of, "notes": ["a note"]}

    estimators = [won(first, "cpu"), won(second, "memory"), *map(won, others)]
    found = page({**report.results, "estimators": estimators})
    assert found["notes"] == [f"{first['name']}: a note", f"{second['name']}: a note"]


def test_a_workload_with_two_days_of_backtest_has_an_interval_and_no_warning(report: ReplayReport) -> None:
    def said(days: int) -> bool:
        lines = [
            {**line, **{r: {**line[r], "violation": {**line[r]["violation"], "days": days}} for r in s.RESOURCES}}
            for line in report.results["workloads"]
        ]
        return any(
            "no workload has more than one day" in one for one in findings({**report.results, "workloads": lines})
        )

    assert (said(1), said(2)) == (True, False)


def test_after_half_a_day_of_backtest_no_workload_is_lowered_that_went_far_over_its_budget(
    dataset: Path, tmp_path: Path
) -> None:
    begins = FeatureSet.open(dataset).cuts_us[1]
    peaked = int(Dataset.open(dataset).read("tasks", [s.COLLECTION_ID])[s.COLLECTION_ID][0].as_py())

    def peaks(table: pa.Table) -> dict[str, NDArray[np.float64]]:
        # 20 minutes of 12 hours, more than ten times 0.1 %, and too few of 48 for the 98th percentile
        start, mine = table[s.START_US].to_numpy(), table[s.COLLECTION_ID].to_numpy() == peaked
        at = mine & (start >= begins) & (start < begins + 4 * 300_000_000)
        return {name: np.where(at, 1.99, table[name].to_numpy()) for name in (s.MEMORY_MEAN, s.MEMORY_MAX)}

    config = replace(CONFIG, estimators=("percentile",), tune=False)
    found = recommend(changed(dataset, tmp_path, peaks), tmp_path / "out", config)
    lines = {line["collection_id"]: line["memory"] for line in found.results["workloads"]}
    assert lines[peaked]["violation"]["value"] > 0.01
    assert lines[peaked]["violation"]["low"] is None
    assert (lines[peaked]["rule"], lines[peaked]["recommended"]) == ("over budget", lines[peaked]["request"])
    free = recommend(found.folder.parent / "cell", tmp_path / "free", replace(config, most_over=1e6))
    wanted = {line["collection_id"]: line["memory"]["recommended"] for line in free.results["workloads"]}
    assert wanted[peaked] < lines[peaked]["request"]  # it would be lowered
    said = findings(found.results)
    assert any(line.startswith("Memory: ") and "not lowered, of workloads" in line for line in said)
    assert said[-1].startswith("no workload has more than one day of back-test")
    every = findings({**found.results, "failed": {"cpu": True, "memory": True}})
    assert any(
        line.startswith("Memory: ") and "not lowered, as all together violate above 2 budgets" in line for line in every
    )
    assert all(line in " ".join(found.page.read_text().split()) for line in said)


def test_a_resource_that_was_never_measured_keeps_its_requests_and_does_not_hinder_the_other(
    dataset: Path, report: ReplayReport, tmp_path: Path
) -> None:
    def unmeasured(table: pa.Table, *more: str) -> dict[str, NDArray[np.float64]]:
        return {name: np.full(len(table), np.nan) for name in (s.MEMORY_MEAN, s.MEMORY_MAX, *more)}

    found = recommend(changed(dataset, tmp_path, unmeasured), tmp_path / "out")
    for one, two in zip(found.results["workloads"], report.results["workloads"], strict=True):
        assert one["cpu"] == two["cpu"]
        assert (one["memory"]["rule"], one["memory"]["recommended"]) == ("unknown", 2.0)
    assert any(line.startswith("Memory: no window of the back-test is known") for line in findings(found.results))
    with pytest.raises(HistoryTooShortError, match=r"none of \d+ validation windows has a limit and a known demand"):
        recommend(changed(dataset, tmp_path / "none", lambda table: unmeasured(table, s.CPU_MEAN)), tmp_path / "no")
    limits = (s.CPU_LIMIT, s.MEMORY_LIMIT)
    with pytest.raises(HistoryTooShortError, match=r"none of \d+ validation windows .*; no row has a limit: a series"):
        recommend(changed(dataset, tmp_path / "free", lambda table: unmeasured(table, *limits)), tmp_path / "no")
    (note, *_) = found.results["estimators"][0]["notes"]
    assert note == "memory: no validation window has a limit and a known demand, so requests stay as they are"


def test_the_recommendation_has_the_buckets_of_the_dataset_read_once_each(dataset: Path, report: ReplayReport) -> None:
    stored = Dataset.open(dataset)
    windows = sum(pq.read_metadata(stored.path / "usage" / bucket_name(b)).num_rows for b in range(stored.n_buckets))
    assert report.results["dataset"]["task_windows"] == windows
