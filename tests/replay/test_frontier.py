"""The frontier of a small cell: curves in order, contenders compared, the page and the figures of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.ingest import IngestConfig, ingest
from reclaim.data.schema import RESOURCES
from reclaim.data.store import Dataset
from reclaim.features.build import FeatureConfig, build_features
from reclaim.features.splits import SplitConfig
from reclaim.features.store import FeatureSet
from reclaim.replay.experiment import run_experiment
from reclaim.replay.figures import PALETTE
from reclaim.replay.frontier import EXPERIMENT, FrontierConfig, definitions
from reclaim.replay.frontier_figures import contender_colours
from reclaim.replay.frontier_page import AS_PUBLISHED
from reclaim.replay.kinds import Source
from reclaim.replay.metrics import FEW
from reclaim.training.estimators.margin import MARGIN_NAMES
from tests.replay.conftest import write_series

Results = dict[str, Any]

CONFIG = FrontierConfig(estimators=("borg", "percentile", "limit"), draws=30, predictors=("nsigma5", "borg_default"))


@pytest.fixture(scope="module")
def results(dataset: Path) -> Results:
    source = Source(Dataset.open(dataset), FeatureSet.open(dataset), {}, progress=False)
    return EXPERIMENT.measure(source, CONFIG).results


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


def test_predictors_of_machines_stand_as_published_beside_the_margins(results: Results) -> None:
    margins = results["machines"]["margins"]
    assert list(margins["borg"]) == list(MARGIN_NAMES)
    assert list(margins["nsigma5"]) == [AS_PUBLISHED]
    assert margins["borg_default"][AS_PUBLISHED]["cpu"]["savings"]["value"] == pytest.approx(0.1)


def test_the_page_says_in_its_own_numbers_who_is_ahead(results: Results) -> None:
    paragraphs = EXPERIMENT.says(results)
    assert len(paragraphs) == 2 * len(RESOURCES) * 2 + 1
    at = {n: c["cpu"]["at"][0] for n, c in results["tasks"]["contenders"].items()}
    first = min(at, key=lambda name: at[name]["rank"])
    count = results["tasks"]["count"]["cpu"]
    assert paragraphs[0].startswith(
        f"Where 0.10 % of the {count:,} task-windows violate ({count / 1000:,.0f} of them), `{first}` comes first in "
        f"CPU: it reclaims {100 * at[first]['value']:.1f} % ("
    )
    assert " comes first in memory: " in paragraphs[2]
    titles = [section.title for section in EXPERIMENT.sections(results)]
    assert titles == ["Task by task", "Machine by machine", "Machines: CPU", "Machines: memory"]


def test_the_page_speaks_of_who_does_not_get_there_and_of_the_learned_one(results: Results) -> None:
    changed = json.loads(json.dumps(results))
    for contender in ("borg", "percentile"):
        changed["tasks"]["contenders"][contender]["cpu"]["at"][0]["rank"] = None
    assert len(EXPERIMENT.says(changed)) == len(EXPERIMENT.says(results)) - 1
    changed = json.loads(json.dumps(results))
    at = {n: c["cpu"]["at"][0] for n, c in changed["tasks"]["contenders"].items()}
    last = max(at, key=lambda name: at[name]["rank"])
    at[last].update(rank=None, value=None)
    assert f"`{last}` violates more often under any margin" in EXPERIMENT.says(changed)[0]


def test_the_first_is_held_against_the_next_and_a_tie_is_said_to_be_one(results: Results) -> None:
    changed = json.loads(json.dumps(results))
    at = {n: c["cpu"]["at"][0] for n, c in changed["tasks"]["contenders"].items()}
    first, second = sorted(at, key=lambda name: at[name]["rank"])
    assert at[first]["lead"]["of"] == second
    assert at[first]["lead"]["value"] == pytest.approx(at[first]["value"] - at[second]["value"])
    at[first]["lead"] = {"of": second, "value": 0.02, "low": 0.01, "high": 0.03}
    assert f". It reclaims 2.0 points more (1.0 to 3.0) than `{second}`, the next (" in EXPERIMENT.says(changed)[0]
    at[first]["lead"]["low"] = -0.01
    assert ". It does not differ beyond the noise (2.0 points, -1.0 to 3.0) from" in EXPERIMENT.says(changed)[0]
    at[second]["ahead"] = {"of": first, "value": -0.02, "low": -0.03, "high": -0.01}
    assert f"`{second}` reclaims" not in EXPERIMENT.says(changed)[0]  # the same pair, said already
    at[first]["lead"] |= {"low": None, "high": None}
    assert ". It reclaims 2.0 points more (with no interval, so it may be noise) than" in EXPERIMENT.says(changed)[0]
    at[second]["ahead"]["of"] = "a third"
    assert f"`{second}` reclaims 2.0 points less (-3.0 to -1.0) than `a third`" in EXPERIMENT.says(changed)[0]


def test_of_one_collection_there_are_numbers_and_no_intervals(dataset: Path, tmp_path: Path) -> None:
    write_series(tmp_path / "raw", tasks=1, windows=300, seed=3)
    ingest_config = IngestConfig(trace="series", mapping=str(tmp_path / "raw" / "mapping.toml"), buckets=1)
    opened = ingest(tmp_path / "raw", tmp_path / "cell", ingest_config).dataset
    build_features(opened, FeatureConfig(SplitConfig(valid_unseen_share=0.01, test_unseen_share=0.01)))
    config = FrontierConfig(estimators=("borg", "percentile"), draws=30, predictors=("nsigma5",))
    report = run_experiment(EXPERIMENT, opened.path, tmp_path / "out", config, tracking=False, progress=False)
    for side in ("tasks", "machines"):
        for contender in report.results[side]["contenders"].values():
            line = contender["cpu"]["at"][1]
            assert line["value"] is not None
            assert line["low"] is line["high"] is None
    assert "has 1, and" in report.results["definitions"]["few collections"]
    page = (report.folder / "report.html").read_text()
    assert "(no interval)" in page
    assert "beyond the noise" not in page
    usual = run_experiment(EXPERIMENT, dataset, tmp_path / "usual", config, tracking=False, progress=False)
    assert usual.results["dataset"]["test_collections"] >= FEW
    assert "few collections" not in usual.results["definitions"]


def test_where_no_machine_is_passed_nobody_is_named_and_where_nobody_has_a_margin_nothing_is_said(
    results: Results,
) -> None:
    changed = json.loads(json.dumps(results))
    rates = {"borg": (0.25, 0.0), "percentile": (0.5, 0.0)}
    for name, of_machines in rates.items():
        for r, rate in zip(RESOURCES, of_machines, strict=True):
            changed["machines"]["margins"][name]["aggressive"][r]["violation_rate"]["value"] = rate
    changed["tasks"]["margins"]["percentile"]["aggressive"]["cpu"]["violation_rate"] = 0.125
    assert EXPERIMENT.says(changed)[-1] == (
        "Under the aggressive margin, which was set for tasks, machines pass the CPU reservations of `percentile` most "
        "often, by 50.00 % of the machine peaks (12.50 % of the task-windows) and nobody's memory reservations."
    )
    published = {n: of for n, of in changed["machines"]["margins"].items() if "aggressive" not in of}
    changed["machines"]["margins"] = published
    paragraphs = EXPERIMENT.says(changed)
    assert len(paragraphs) == len(EXPERIMENT.says(results)) - 1
    assert all(paragraphs)


def test_definitions_are_those_of_what_the_page_shows_and_say_what_they_rest_on() -> None:
    with_machines, without = (definitions(CONFIG, machines=known) for known in (True, False))
    assert set(with_machines) - set(without) == {
        "machine peak", "machine violation rate", "machine severity", "machine savings", "predictors of machines"
    }  # fmt: skip
    assert "machine" not in without["interval"]
    assert "conditional on reaching it" in without["interval"]
    assert "bounds what never violates" in without["oracle"]
    peak = with_machines["machine peak"]
    assert "`--set horizon_s=86400` makes it the study's" in peak
    assert "begins with the validation period" in peak


def test_the_head_of_the_page_does_not_claim_that_its_rates_were_set_beforehand(results: Results) -> None:
    said = EXPERIMENT.judged({**results, "inputs": {"config": {"horizon_s": 3600}}})
    assert said.startswith("The curves sweep the margin over the test period itself")
    assert "3600 seconds to come" in said


def test_a_contender_has_one_colour_in_both_figures() -> None:
    def side(**strength: float) -> Results:
        return {"contenders": {n: {"cpu": {"at": [{"of_oracle": v}]}} for n, v in strength.items()}}

    estimators = [{"name": name, "kind": "statistical"} for name in ("a", "b", "c", "d")]
    tasks, machines = side(a=0.1, b=0.5, c=0.9, d=0.2), side(a=0.6, b=0.5, c=0.4, d=0.3)
    results = {"estimators": estimators, "tasks": tasks, "machines": machines}
    assert contender_colours(results) == dict(zip(("c", "b", "a"), PALETTE, strict=False))
    assert list(contender_colours({**results, "machines": None})) == ["c", "b"]


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
    without = EXPERIMENT.runs({**results, "machines": None})
    assert not any(k.startswith("machines.cpu.aggressive") for run in without for k in run.metrics)


def test_the_figures_are_drawn_with_machines_and_without(results: Results) -> None:
    for draw in EXPERIMENT.figures.values():
        figure = draw(results)
        assert figure is not None
        assert [ax.get_title(loc="left") for ax in figure.axes] == ["CPU", "Memory"]
    empty = EXPERIMENT.figures["frontier_machines"]({**results, "machines": None})
    assert empty is not None
    assert "no machines" in empty.axes[0].texts[0].get_text()
    assert len(EXPERIMENT.sections({**results, "machines": None})) == 1


def test_a_predictor_that_sees_the_future_or_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"predictors must be some of .* got oracle_24h, what"):
        FrontierConfig(predictors=("nsigma5", "what", "oracle_24h"))
