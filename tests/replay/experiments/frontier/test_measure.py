"""The frontier of a small cell: curves in order, contenders compared, the page and the figures of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data.core.style import RESOURCE_WORDS
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.schema import RESOURCES
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.feature_set import FeatureSet
from reclaim.features.splits import SplitConfig
from reclaim.replay.experiment import LEARNED, LEARNED_MACHINE, STATISTICAL, Source
from reclaim.replay.experiments.frontier import measure
from reclaim.replay.experiments.frontier.figures import contender_colours
from reclaim.replay.experiments.frontier.machines import Record, lay_out_machines
from reclaim.replay.experiments.frontier.measure import EXPERIMENT, FrontierConfig, definitions
from reclaim.replay.experiments.frontier.page import (
    AS_PUBLISHED,
    best,
    leaders,
    learned,
    ranked,
    rates_table,
    summary_table,
)
from reclaim.replay.open_loop.bootstrap import FEW
from reclaim.replay.open_loop.share import Share
from reclaim.replay.report.figures import PALETTE
from reclaim.replay.runs.run import run_experiment
from reclaim.training.margins.margin import MARGIN_NAMES
from tests.replay.conftest import write_series

Results = dict[str, Any]

CONFIG = FrontierConfig(
    estimators=("borg", "percentile", "limit"), draws=30, predictors=("nsigma5", "borg_default"), tune=False
)
"""Without settings of its own for each budget an estimator has one curve."""


@pytest.fixture(scope="module")
def results(dataset: Path) -> Results:
    source = Source(Dataset.open(dataset), FeatureSet.open(dataset), {})
    return {**EXPERIMENT.measure(source, CONFIG).results, "dataset": {}}


def test_results_are_plain_json(results: Results) -> None:
    assert json.loads(json.dumps(results, allow_nan=False)) == results


def test_every_contender_but_the_limit_has_a_curve_on_its_side(results: Results) -> None:
    assert list(results["tasks"]["contenders"]) == ["borg", "percentile"]
    assert list(results["machines"]["contenders"]) == ["borg", "percentile", "nsigma5", "borg_default"]
    assert {e["name"]: e["kind"] for e in results["estimators"]}["nsigma5"] == "machine"
    assert results["machines"]["machines"] == 4


@pytest.mark.parametrize("side", ["tasks", "machines"])
def test_along_a_curve_less_is_violated_and_less_reclaimed_and_the_oracle_bounds_what_never_violates(
    results: Results, side: str
) -> None:
    for contender in results[side]["contenders"].values():
        for resource in RESOURCES:
            curve = contender[resource]["curve"]
            for values in curve.values():
                assert values == sorted(values, reverse=True)
            assert curve["violation_rate"][0] > 0.1
            assert curve["violation_rate"][-1] < 0.001
            safe = [y for x, y in zip(curve["violation_rate"], curve["reclaimed_share"], strict=True) if x == 0.0]
            assert max(safe) <= results[side]["oracle"][resource]


def test_at_more_violations_more_is_reclaimed_and_ranks_follow(results: Results) -> None:
    for resource in RESOURCES:
        lines = [c[resource]["at"] for c in results["tasks"]["contenders"].values()]
        for strict, loose in lines:
            assert strict["rate"] < loose["rate"]
            assert strict["low"] <= strict["value"] <= strict["high"]
            assert strict["value"] < loose["value"]
        for k in range(2):
            best = max(lines, key=lambda line: line[k]["value"])
            assert best[k]["rank"] == 1
            assert sorted(line[k]["rank"] for line in lines) == [1, 2]


def test_the_margins_set_on_validation_lie_on_the_curve_but_for_medium(results: Results) -> None:
    for name, margins in results["tasks"]["margins"].items():
        assert list(margins) == list(MARGIN_NAMES)
        for resource in RESOURCES:
            curve = results["tasks"]["contenders"][name][resource]["curve"]
            for margin in ("baseline", "aggressive"):
                point = margins[margin][resource]
                reclaimed = point["reclaimed_share"]
                above = [x for x, y in zip(*curve.values(), strict=True) if y >= reclaimed]
                below = [x for x, y in zip(*curve.values(), strict=True) if y <= reclaimed]
                assert max(below) <= point["violation_rate"] + 1e-12 or not above
                assert min(above) >= point["violation_rate"] - 1e-12 or not below


def test_at_each_budget_an_estimator_is_compared_with_the_other_one_by_the_shares_of_its_margin(
    results: Results,
) -> None:
    points, at_budget = results["tasks"]["margins"], results["tasks"]["at_budget"]
    assert list(at_budget) == ["baseline", "aggressive"]
    for margin, compared in at_budget.items():
        assert list(compared) == ["borg", "percentile"]
        for name, other in (("borg", "percentile"), ("percentile", "borg")):
            for resource in RESOURCES:
                mine, its = points[name][margin][resource], points[other][margin][resource]
                assert compared[name][resource]["against"] == other
                for share in ("reclaimed_share", "violation_rate"):
                    assert compared[name][resource][share]["value"] == pytest.approx(mine[share] - its[share])


def test_predictors_know_each_machine_since_the_dataset_begins(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, records = Source(Dataset.open(dataset), FeatureSet.open(dataset), {}), list[Record]()

    def lay_out(*given: Any, record: Record, **named: Any) -> Any:
        records.append(record)
        return lay_out_machines(*given, record=record, **named)

    monkeypatch.setattr(measure, "lay_out_machines", lay_out)
    EXPERIMENT.measure(source, CONFIG)
    windows = [source.dataset.windows(bucket) for bucket in range(source.features.n_buckets)]
    kept = np.flatnonzero(~np.concatenate([of.in_alloc for of in windows]))
    assert len(records) == len(RESOURCES)
    half = replace(CONFIG, judged_rows=int(source.features.manifest["kept"]) // 4)
    share = Share.within(source.features, half.judged_rows)
    assert 0 < share.of_machines < 1
    EXPERIMENT.measure(source, half)
    assert records[-1].source_row.tolist() == Record.of(source.features, share).source_row.tolist()
    assert len(records[-1].source_row) < len(records[0].source_row)
    for record in records[:2]:
        assert record.source_row.tolist() == kept.tolist()
        np.testing.assert_array_equal(record.windows.end_us, np.concatenate([of.end_us for of in windows])[kept])
    some, whole = Record.of(source.features, Share(0.5)), set(np.unique(records[0].windows.machine_id).tolist())
    assert 0 < len(set(np.unique(some.windows.machine_id).tolist()) & whole) < len(whole)


def test_the_dataset_is_not_read_once_more_for_no_predictor(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> Any:
        raise AssertionError("read")

    source = Source(Dataset.open(dataset), FeatureSet.open(dataset), {})
    monkeypatch.setattr(Record, "of", read)
    assert EXPERIMENT.measure(source, replace(CONFIG, predictors=())).results["machines"] is not None


def test_predictors_of_machines_are_reported_as_published(results: Results) -> None:
    margins = results["machines"]["margins"]
    assert list(margins["borg"]) == list(MARGIN_NAMES)
    assert list(margins["nsigma5"]) == [AS_PUBLISHED]
    assert margins["borg_default"][AS_PUBLISHED]["cpu"]["savings"]["value"] == pytest.approx(0.1)


def test_the_leaders_are_the_first_of_each_rate_and_compared_with_the_next(results: Results) -> None:
    rows = leaders(results).as_records()
    assert len(rows) == 2 * len(RESOURCES) * 2  # of tasks and machines, at two rates
    at = {n: c["cpu"]["at"][0] for n, c in results["tasks"]["contenders"].items()}
    first, second = sorted(at, key=lambda name: at[name]["rank"])
    assert (rows[0]["first"], rows[0]["next"]) == (first, second)
    assert rows[0]["reclaimed"] == at[first]["value"]
    assert rows[0]["difference"] == pytest.approx(at[first]["value"] - at[second]["value"])
    assert rows[0]["violations"] == round(results["tasks"]["count"]["cpu"] / 1000)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.01, 0.03, "better"), (-0.01, 0.03, "within the noise"), (None, None, "unknown"), (-0.03, -0.01, "worse")],
)
def test_a_difference_has_a_verdict(results: Results, low: float | None, high: float | None, verdict: str) -> None:
    changed = json.loads(json.dumps(results))
    ((first, at), *_) = ranked(changed, "tasks", "cpu", 0)
    changed["tasks"]["contenders"][first]["cpu"]["at"][0]["lead"] = at["lead"] | {"low": low, "high": high}
    assert leaders(changed).as_records()[0]["verdict"] == verdict


def test_an_estimator_that_does_not_reach_the_rate_has_no_number_and_does_not_lead(results: Results) -> None:
    changed = json.loads(json.dumps(results))
    for contender in ("borg", "percentile"):
        changed["tasks"]["contenders"][contender]["cpu"]["at"][0] |= {"rank": None, "value": None}
    assert len(leaders(changed).rows) == len(leaders(results).rows) - 1
    assert [row[2] for row in rates_table(changed, "tasks").rows] == [None, None]


def test_a_learned_estimator_is_compared_with_the_best_other_one(results: Results) -> None:
    changed = json.loads(json.dumps(results))
    assert not learned(changed).rows
    changed["estimators"][1]["kind"] = "learned"  # percentile
    line = changed["tasks"]["contenders"]["percentile"]["cpu"]["at"][1]
    line["ahead"] = {"of": "borg", "value": 0.02, "low": 0.01, "high": 0.03}
    (row,) = learned(changed).as_records()
    assert (row["estimator"], row["compared with"], row["difference"], row["verdict"]) == (
        "percentile", "borg", 0.02, "better",
    )  # fmt: skip
    assert [one["name"] for one in best(changed, "cpu")] == ["percentile", "borg"]
    cpu = [row for row in summary_table(changed).as_records() if row["resource"] == "CPU"]
    assert ("learned", "better") in [(row["role"], row["verdict"]) for row in cpu]
    assert cpu[-1]["estimator"] == "oracle"


def test_of_one_collection_there_are_numbers_and_no_intervals(dataset: Path, tmp_path: Path) -> None:
    write_series(tmp_path / "raw", tasks=1, windows=300, seed=3)
    ingest_config = IngestConfig(trace="series", mapping=str(tmp_path / "raw" / "mapping.toml"), buckets=1)
    opened = ingest(tmp_path / "raw", tmp_path / "cell", ingest_config).dataset
    build_features(opened, FeatureConfig(SplitConfig(valid_unseen_share=0.01, test_unseen_share=0.01)))
    config = FrontierConfig(estimators=("borg", "percentile"), draws=30, predictors=("nsigma5",))
    report = run_experiment(EXPERIMENT, opened.path, tmp_path / "out", config, tracking=False)
    for side in ("tasks", "machines"):
        for contender in report.results[side]["contenders"].values():
            line = contender["cpu"]["at"][1]
            assert line["value"] is not None
            assert line["low"] is line["high"] is None
    assert "has 1, and" in report.results["definitions"]["few collections"]
    page = (report.folder / "report.html").read_text()
    assert ">unknown</span>" in page
    assert ">better</span>" not in page
    usual = run_experiment(EXPERIMENT, dataset, tmp_path / "usual", config, tracking=False)
    assert usual.results["dataset"]["test_collections"] >= FEW
    assert "few collections" not in usual.results["definitions"]


def test_definitions_are_those_of_what_the_page_shows_and_say_what_they_rest_on() -> None:
    with_machines, without = (definitions(CONFIG, machines=known) for known in (True, False))
    assert set(with_machines) - set(without) == {
        "machine peak", "machine violation rate", "machine severity", "machine minutes", "machine savings",
        "predictors of machines", "at once",
    }  # fmt: skip
    assert "machine" not in without["interval"]
    assert "conditional on reaching it, and there is none where fewer than 90% do" in without["interval"]
    assert "bounds what never violates" in without["oracle"]
    peak = with_machines["machine peak"]
    assert "`--set horizon_s=86400` makes it the study's" in peak
    assert "from its record since the dataset begins" in peak


def test_a_contender_has_one_colour_in_both_figures() -> None:
    def side(**strength: float) -> Results:
        return {"contenders": {n: {"cpu": {"at": [{"of_oracle": v}]}} for n, v in strength.items()}}

    estimators = [{"name": name, "kind": "statistical"} for name in ("a", "b", "c", "d")]
    tasks, machines = side(a=0.1, b=0.5, c=0.9, d=0.2), side(a=0.6, b=0.5, c=0.4, d=0.3)
    results = {"estimators": estimators, "tasks": tasks, "machines": machines}
    assert contender_colours(results) == dict(zip(("c", "a", "b"), PALETTE, strict=False))
    assert list(contender_colours({**results, "machines": None})) == ["c", "b"]


def test_contenders_of_the_model_have_colours_of_their_own_however_many_rivals_there_are() -> None:
    kinds = {
        "model": LEARNED, **{f"s{k}": STATISTICAL for k in range(9)},
        "fit": LEARNED_MACHINE, "bound": LEARNED_MACHINE, **{f"m{k}": "machine" for k in range(9)},
    }  # fmt: skip
    contenders = {name: {"cpu": {"at": [{"of_oracle": k / len(kinds)}]}} for k, name in enumerate(kinds)}
    tasks = {name: of for name, of in contenders.items() if kinds[name] in (LEARNED, STATISTICAL)}
    results = {
        "estimators": [{"name": name, "kind": kind} for name, kind in kinds.items()],
        "tasks": {"contenders": tasks}, "machines": {"contenders": contenders},
    }  # fmt: skip
    colours = contender_colours(results)
    assert list(colours) == ["model", "fit", "bound", "s8", "m8", "s7", "m7"]
    assert len(set(colours.values())) == len(colours)
    assert PALETTE[-1] not in colours.values()


def test_what_goes_on_record_has_every_column(results: Results) -> None:
    runs = EXPERIMENT.runs(results)
    assert [run.name for run in runs] == ["borg", "percentile", "nsigma5", "borg_default"]
    for run in runs:
        assert {column.metric for column in EXPERIMENT.columns} <= set(run.metrics)
    assert runs[2].metrics["tasks.cpu.reclaimed_at_baseline"] is None
    assert runs[2].metrics["machines.cpu.reclaimed_at_baseline"] is not None


def test_what_came_of_every_margin_goes_on_record_violation_severity_and_duration(results: Results) -> None:
    runs = {run.name: run.metrics for run in EXPERIMENT.runs(results)}
    for name, margins in results["machines"]["margins"].items():
        assert list(margins) == ([AS_PUBLISHED] if name in CONFIG.predictors else list(MARGIN_NAMES))
        for margin, of in margins.items():
            for r in RESOURCES:
                start = f"machines.{r}.{margin.replace(' ', '_')}."
                told = {k.removeprefix(start): v for k, v in runs[name].items() if k.startswith(start)}
                rate, severity = of[r]["violation_rate"], of[r]["severity"]
                assert told["violation_rate"] == rate["value"]
                assert [told[f"violation_rate_{k}"] for k in ("low", "high", "p99")] == [
                    rate[k] for k in ("low", "high", "p99")
                ]
                assert [told["severity"], told["severity_at_violation"], told["severity_p99"]] == [
                    severity[k] for k in ("mean", "at_violation", "p99")
                ]
                assert told["violation_s"] == of[r]["violation_s"]
                assert told["savings"] == of[r]["savings"]["value"]
    assert len({runs[name][f"machines.cpu.{m}.savings"] for name in ("borg", "percentile") for m in MARGIN_NAMES}) == 6
    for margin, by_resource in results["tasks"]["margins"]["borg"].items():
        for r, of in by_resource.items():
            assert runs["borg"][f"tasks.{r}.{margin}.reclaimed_share"] == of["reclaimed_share"]


def test_predictors_of_machines_have_no_run_where_there_are_no_machines(results: Results) -> None:
    without = EXPERIMENT.runs({**results, "machines": None})
    assert [run.name for run in without] == ["borg", "percentile"]
    assert not any(k.startswith("machines.cpu.aggressive") for run in without for k in run.metrics)


def test_the_figures_are_drawn_with_machines_and_without(results: Results) -> None:
    assert EXPERIMENT.figures["machine_day"](results) is None  # no model
    for name in ("frontier", "frontier_machines"):
        figure = EXPERIMENT.figures[name](results)
        assert figure is not None
        assert [ax.get_title(loc="left") for ax in figure.axes] == ["CPU", "Memory"]
    empty = EXPERIMENT.figures["frontier_machines"]({**results, "machines": None})
    assert empty is not None
    assert "no machines" in empty.axes[0].texts[0].get_text()
    assert EXPERIMENT.page({**results, "machines": None})["of_machines"] is None


def test_of_a_dataset_without_memory_neither_the_figures_nor_the_summary_show_it(results: Results) -> None:
    of_cpu = {**results, "dataset": {"judged": ["cpu"]}}
    for name in ("frontier", "frontier_machines"):
        figure = EXPERIMENT.figures[name](of_cpu)
        assert figure is not None
        assert [ax.get_title(loc="left") for ax in figure.axes] == ["CPU"]
    assert {row["resource"] for row in summary_table(of_cpu).as_records()} == {RESOURCE_WORDS["cpu"]}


def test_a_predictor_that_sees_the_future_or_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"predictors must be some of .* got oracle_24h, what"):
        FrontierConfig(predictors=("nsigma5", "what", "oracle_24h"))
