"""The margins experiment: its recorded runs, its tables, the figures its page opens with."""

import copy
import re
from typing import Any

import pytest

from reclaim.data.schema import RESOURCES
from reclaim.replay.experiments.margins.measure import EXPERIMENT, MarginsConfig
from reclaim.replay.experiments.margins.page import best, comparisons, in_reclaimed, orders, summary_table
from reclaim.replay.experiments.margins.runs import COLUMNS, UNSEEN_COLUMNS, runs
from reclaim.replay.experiments.margins.tables import detail_table, margins_table, sequence_table, split_table
from reclaim.replay.report.page import ReplayReport, render_page, runs_table
from reclaim.training.margins.margin import MARGIN_NAMES


def test_the_main_table_has_a_row_per_estimator_and_margin_and_the_numbers_of_the_results(report: ReplayReport) -> None:
    table = runs_table(runs(report.results), COLUMNS)
    records = table.as_records()
    assert [(r["estimator"], r["margin"]) for r in records] == [
        *((name, margin) for name in ("borg", "percentile") for margin in ("baseline", "medium", "aggressive")),
        ("limit", "none"),
        ("oracle", "none"),
    ]
    assert table.columns[2:] == (
        "CPU reclaimed", "CPU violation", "CPU of oracle", "memory reclaimed", "memory violation", "memory of oracle",
        "would-be OOM", "CPU in reclaimed", "OOM kills / 1,000 task-days",
    )  # fmt: skip
    medium = report.results["estimators"][0]["results"]["medium"]
    assert records[1]["memory violation"] == medium["all"]["violation_rate"]["memory"]["value"]
    assert records[1]["CPU reclaimed"] == medium["all"]["reclaimed_share"]["cpu"]["value"]
    unseen = runs_table(runs(report.results), UNSEEN_COLUMNS).as_records()
    assert "would-be OOM" not in unseen[1]
    assert unseen[1]["CPU reclaimed"] == medium["unseen"]["reclaimed_share"]["cpu"]["value"]


def test_the_other_tables_follow_the_results(report: ReplayReport) -> None:
    results = report.results
    assert len(detail_table(results).rows) == 2 * 8  # two resources of each row of the main table
    assert len(margins_table(results).rows) == 2 * 3
    assert [r["margin"] for r in sequence_table(results).as_records()] == 2 * [
        "baseline",
        "aggressive",
        "medium",
        "baseline",
    ]
    ages = split_table(results, "ages", "medium").as_records()
    assert {r["age"] for r in ages} == {"older"}
    assert all(isinstance(r["CPU task-windows"], int) for r in ages)


def with_events(report: ReplayReport, *quarters: tuple[int, int, int, int]) -> Any:
    """Return the results with these tasks over in each quarter, an estimator after another, and no machines."""
    results = copy.deepcopy(dict(report.results))
    results["against_best"] = {}
    results["timeline"]["machines"] = 0
    results["timeline"]["segments"] = [
        {"margin": m, "start_hours": 12.0 * i, "end_hours": 12.0 * (i + 1)}
        for i, m in enumerate(("baseline", "aggressive", "medium", "baseline"))
    ]
    results["estimators"] = results["estimators"][: len(quarters)]
    for estimator, counts in zip(results["estimators"], quarters, strict=True):
        for segment, count in zip(estimator["sequence"]["segments"], counts, strict=True):
            segment["tasks_over"] = count
        for place, margin in enumerate(("baseline", "medium", "aggressive")):
            estimator["results"][margin]["oom"]["tasks_over"] = 7 + place
    return results


@pytest.mark.parametrize(
    ("quarters", "order"),
    [
        ((1, 8, 2, 3), "rising"),  # a day is two quarters: baseline 1 + 3 in a day, medium 2 and aggressive 8 in half
        ((1, 8, 1, 3), "not rising"),
        ((1, 1, 2, 3), "not rising"),
        ((0, 0, 0, 0), "equal"),
    ],
)
def test_the_table_of_events_has_rates_a_day_and_their_order(
    report: ReplayReport, quarters: tuple[int, int, int, int], order: str
) -> None:
    (row,) = orders(with_events(report, quarters)).as_records()
    first, aggressive, medium, last = quarters
    assert (row["events a day"], row["estimator"]) == ("tasks over their reservation", "borg")
    in_turn = [row[f"{margin}, in turn"] for margin in MARGIN_NAMES]
    assert in_turn == [first + last, 2 * medium, 2 * aggressive]
    assert row["order, in turn"] == order
    assert row["order, throughout"] == "rising"


def test_a_rate_of_unknown_events_has_no_order(report: ReplayReport) -> None:
    results = with_events(report, (1, 8, 2, 3))
    results["estimators"][0]["results"]["medium"]["oom"]["tasks_over"] = None
    (row,) = orders(results).as_records()
    assert row["medium, throughout"] is None
    assert row["order, throughout"] == "unknown"


def difference(verdict: str, reclaimed: float = 0.01) -> dict[str, Any]:
    interval = {"value": reclaimed, "low": reclaimed - 0.005, "high": reclaimed + 0.005}
    return {
        "against": "vpa",
        "verdict": verdict,
        "reclaimed_share": interval,
        "violation_rate": interval,
        "at_equal_violation": None,
    }


@pytest.fixture
def with_learned(report: ReplayReport) -> Any:
    """Return the results with two learned estimators and one statistical one, and differences of CPU alone."""
    results = copy.deepcopy(dict(report.results))
    one, two = results["estimators"][:2]
    vpa = copy.deepcopy(one) | {"name": "vpa"}
    results["estimators"].insert(2, vpa)
    one["name"], two["name"], one["kind"], two["kind"] = "network", "trees", "learned", "learned"
    for estimator, reclaimed in ((one, 0.5), (two, 0.6), (vpa, 0.49)):
        estimator["results"]["aggressive"]["all"]["reclaimed_share"]["cpu"]["value"] = reclaimed
        estimator["results"]["aggressive"]["all"]["violation_rate"]["cpu"]["value"] = 0.004
    results["against_best"] = {
        "aggressive": {"network": {"cpu": difference("better")}, "trees": {"cpu": difference("more of both")}}
    }
    return results


def test_the_best_learned_estimator_is_the_one_of_the_best_verdict_and_stands_with_its_opponent(
    with_learned: Any,
) -> None:
    first, other = best(with_learned, "aggressive", "cpu")
    assert (first["name"], first["verdict"], first["against"]) == ("network", "better", "vpa")
    assert (other["name"], other["reclaimed"]["value"]) == ("vpa", 0.49)
    with_learned["against_best"]["aggressive"]["network"]["cpu"] = difference("within the noise")
    assert best(with_learned, "aggressive", "cpu")[0]["name"] == "trees"  # neither better nor worse: it reclaims more
    with_learned["estimators"][1]["name"] = "trees-online"  # as a service has it; the others were not replayed so
    with_learned["against_best"]["aggressive"] |= {"network": {"cpu": difference("better")}}
    assert best(with_learned, "aggressive", "cpu")[0]["name"] == "trees-online"
    with_learned["estimators"][1]["name"] = "trees"
    with_learned["against_best"] = {}
    assert [one["name"] for one in best(with_learned, "aggressive", "cpu")] == ["trees"]


def test_an_estimator_that_follows_stands_at_equal_violation_as_it_does_with_a_price_set_once(
    with_learned: Any,
) -> None:
    with_learned["estimators"][1]["name"] = "network-online"
    differences = with_learned["against_best"]["aggressive"]
    differences["network"]["cpu"]["at_equal_violation"] = difference("worse")
    differences["network-online"] = {"cpu": difference("better")}
    (first, _) = best(with_learned, "aggressive", "cpu")
    assert (first["name"], first["verdict"], first["at_equal_violation"]) == ("network-online", "better", "worse")


def test_the_console_has_the_best_the_oracle_and_a_verdict_in_at_most_ten_rows(with_learned: Any) -> None:
    rows = summary_table(with_learned).as_records()
    assert len(rows) <= 10
    cpu = [row for row in rows if row["resource"] == "CPU"]
    assert [row["role"] for row in cpu] == ["learned", "statistical", "oracle"]
    assert [row["verdict"] for row in cpu] == ["better", None, None]
    assert cpu[0]["reclaimed"] == 0.5


def test_the_page_opens_with_the_answer_its_interval_and_its_verdict(with_learned: Any, report: ReplayReport) -> None:
    figures = {name: report.folder / f"{name}.svg" for name in EXPERIMENT.figures}
    del figures["cell_in_turn"]
    text = render_page(EXPERIMENT, with_learned, figures)
    opening = text[text.index('class="answer"') : text.index("<h2>")]
    assert opening.count('class="card"') == 3  # CPU with its opponent; of memory no difference is known
    assert re.search(r'50\.0\xa0%\s*<span class="badge good">better</span>', opening)
    low, high = (with_learned["estimators"][0]["results"]["aggressive"]["all"]["reclaimed_share"]["cpu"][end]
                 for end in ("low", "high"))  # fmt: skip
    assert f"{100 * low:.2f} to {100 * high:.2f} %" in opening


def test_the_comparisons_have_a_row_for_every_known_difference(report: ReplayReport) -> None:
    rows = comparisons(report.results).as_records()
    assert len(rows) == 3 * len(RESOURCES) * 2  # margins, resources, estimators
    of = report.results["against_best"]["medium"]["borg"]["memory"]
    (row,) = [r for r in rows if (r["margin"], r["resource"], r["estimator"]) == ("medium", "memory", "borg")]
    assert (row["compared with"], row["verdict"]) == (of["against"], of["verdict"])
    assert row["reclaimed, difference"] == of["reclaimed_share"]["value"]


def test_the_runs_have_the_numbers_of_the_results_and_how_they_stand_to_the_best(report: ReplayReport) -> None:
    recorded = {run.name: run for run in runs(report.results)}
    assert list(recorded)[:4] == ["borg/baseline", "borg/medium", "borg/aggressive", "percentile/baseline"]
    assert list(recorded)[-2:] == ["limit/none", "oracle/none"]
    medium = recorded["borg/medium"]
    measured = report.results["estimators"][0]["results"]["medium"]
    low, high = (measured["all"]["reclaimed_share"]["cpu"][end] for end in ("low", "high"))
    assert low < high
    assert [medium.metrics[f"cpu.reclaimed_share_{end}"] for end in ("low", "high")] == [low, high]
    assert medium.metrics["unseen.memory.efficiency"] == measured["unseen"]["efficiency"]["memory"]["value"]
    assert medium.metrics["oom.tasks_over"] == measured["oom"]["tasks_over"]
    against = report.results["against_best"]["medium"]["borg"]["memory"]
    assert medium.metrics["against_best.memory.reclaimed_share_low"] == against["reclaimed_share"]["low"]
    assert medium.tags == {
        "kind": "statistical",
        **{f"against_best.{r}": f"{of['verdict']}, against percentile"
           for r, of in report.results["against_best"]["medium"]["borg"].items()},
    }  # fmt: skip
    shares = report.results["estimators"][0]["margins"]["medium"]
    assert medium.params == {"margin_share": shares, "price": {}, "settings": {}}
    aggressive = recorded["borg/aggressive"]
    assert set(aggressive.params["settings"]["cpu"]) == {"half_life_s", "margin"}
    equal = report.results["against_best"]["aggressive"]["borg"]["cpu"]["at_equal_violation"]
    assert aggressive.tags["at_equal_violation.cpu"] == f"{equal['verdict']}, against {equal['against']}"
    assert aggressive.metrics["at_equal_violation.cpu.reclaimed_share"] == equal["reclaimed_share"]["value"]
    assert recorded["oracle/none"].tags == {"kind": "oracle"}


def test_every_figure_is_shown(report: ReplayReport) -> None:
    drawn = {name for name, draw in EXPERIMENT.figures.items() if draw(report.results) is not None}
    assert drawn == set(EXPERIMENT.figures) - {"cell_in_turn"}  # this trace has no machines to run anything on
    shown = report.page.read_text()
    assert shown.count("<svg ") == len(drawn)
    assert "no machine with a capacity" in shown
    assert MarginsConfig().online


def test_the_page_begins_with_what_the_closed_loop_did_under_the_estimator_that_it_names_first(
    with_learned: Any,
) -> None:
    def ran(*names: str) -> Any:
        runs = {margin: {"in_reclaimed_cpu": 0.1 * len(margin)} for margin in MARGIN_NAMES}
        return with_learned | {"closed_loop": {"estimators": [{"name": name, "runs": runs} for name in names]}}

    of = in_reclaimed(ran("borg", "vpa", "network"))
    assert of is not None
    assert (of["name"], of["margin"]) == ("network", "aggressive")
    opponent = in_reclaimed(ran("borg", "vpa"))  # where the first one had no run
    assert opponent is not None
    assert opponent["name"] == "vpa"
    assert in_reclaimed(ran("borg")) is None
