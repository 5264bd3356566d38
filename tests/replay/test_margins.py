"""What the margins experiment puts on record, lays out in tables and says."""

import copy
from typing import Any

import pytest

from reclaim.replay.margins import EXPERIMENT, MarginsConfig
from reclaim.replay.margins_page import says, sections
from reclaim.replay.margins_runs import COLUMNS, UNSEEN_COLUMNS, runs
from reclaim.replay.margins_tables import detail_table, margins_table, sequence_table, split_table
from reclaim.replay.report import ReplayReport, runs_table


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


NO_LEARNED = "In 6 comparisons (a margin and a resource each) of the best statistical estimator with the best other one"


def test_it_says_what_each_quarter_reclaimed_and_cost(report: ReplayReport) -> None:
    paragraphs = says(report.results)
    borg = report.results["estimators"][0]["sequence"]["segments"]
    shares = [f"{100 * s['reclaimed_share']['cpu']:.2f} %" for s in borg]
    assert paragraphs[0].startswith(
        f"`borg` went through baseline, aggressive, medium and baseline, 3.0 hours each, and reclaimed "
        f"{', '.join(shares[:3])} and {shares[3]} of the CPU limits and "
    )
    over = [str(s["tasks_over"]) for s in borg]
    assert f"in {', '.join(over[:3])} and {over[3]} task-windows; had everything" in paragraphs[0]
    assert paragraphs[1].startswith("`percentile` went through")
    assert paragraphs[3].startswith(NO_LEARNED)
    assert [p.split(",")[0] for p in paragraphs[4:]] == [
        f"The {margin} margin" for margin in ("baseline", "medium", "aggressive")
    ]


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
    ("quarters", "said"),
    [
        # a day is two quarters: baseline 1 + 3 in a day, medium 2 and aggressive 8 in half of one
        ([(1, 8, 2, 3)], "between baseline's and aggressive's for 1 of 1 estimator;"),
        ([(1, 8, 1, 3)], "for 0 of 1 estimator, not for `borg` (4, 2 and 16 a day at baseline, medium and aggres"),
        ([(1, 1, 2, 3), (1, 8, 2, 3)], "for 1 of 2 estimators, not for `borg` (4, 4 and 2 a day"),
        ([(0, 0, 0, 0), (1, 8, 2, 3)], "for 2 of 2 estimators (1 of them with the same under all three);"),
        ([(0, 0, 0, 0)], "the same as baseline's and aggressive's for 1 estimator;"),
    ],
)
def test_it_says_plainly_whether_medium_lies_between_its_neighbours(
    report: ReplayReport, quarters: list[tuple[int, int, int, int]], said: str
) -> None:
    paragraph = says(with_events(report, *quarters))[len(quarters)]
    assert said in paragraph
    assert paragraph.endswith(
        f"whole test period, between baseline's and aggressive's for {len(quarters)} of {len(quarters)} "
        f"estimator{'s' * (len(quarters) > 1)}."
    )
    assert "machines would" not in paragraph


def test_memory_that_is_not_known_is_said_to_be(report: ReplayReport) -> None:
    results = with_events(report, (1, 8, 2, 3))
    results["estimators"][0]["results"]["medium"]["oom"]["tasks_over"] = None
    assert says(results)[1].endswith("over the whole test period, unknown, as memory is.")


def difference(verdict: str, reclaimed: float = 0.01) -> dict[str, Any]:
    interval = {"value": reclaimed, "low": reclaimed - 0.005, "high": reclaimed + 0.005}
    return {"against": "vpa", "verdict": verdict, "reclaimed_share": interval, "violation_rate": interval}


def test_it_says_how_the_best_learned_estimator_stands_to_the_best_statistical_one(report: ReplayReport) -> None:
    results = copy.deepcopy(dict(report.results))
    one, two = results["estimators"][:2]
    one["name"], two["name"], one["kind"], two["kind"] = "network", "trees", "learned", "learned"
    one["results"]["medium"]["all"]["reclaimed_share"]["cpu"]["value"] = 0.5
    one["results"]["medium"]["all"]["violation_rate"]["cpu"]["value"] = 0.004
    two["results"]["medium"]["all"]["reclaimed_share"]["cpu"]["value"] = 0.6
    results["against_best"] = {
        "medium": {"network": {"cpu": difference("better")}, "trees": {"cpu": difference("more of both")}}
    }
    assert says(results)[-2:] == [
        "In 1 comparison (a margin and a resource each) of the best learned estimator with the best statistical one, "
        "it is better by more than the noise in 1.",
        "The medium margin, best learned estimator. CPU: `network` reclaims 50.00 % and violates 0.40 %, "
        "+1.00 points (+0.50 to +1.50) and +1.00 points (+0.50 to +1.50) against `vpa`, the best statistical one: "
        "better by more than the noise.",
    ]
    results["against_best"]["medium"]["network"]["cpu"] = difference("within the noise")
    assert "`trees` reclaims 60.00 %" in says(results)[-1]
    assert says(results)[-1].endswith("ahead in what it reclaims and behind in violations.")
    results["against_best"] = {}
    assert len(says(results)) == 3


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
        **{f"against_best.{r}": f"{of['verdict']} than percentile"
           for r, of in report.results["against_best"]["medium"]["borg"].items()},
    }  # fmt: skip
    assert medium.params == {"margin_share": report.results["estimators"][0]["margins"]["medium"]}
    assert recorded["oracle/none"].tags == {"kind": "oracle"}


def test_every_figure_is_shown_and_every_section_has_something(report: ReplayReport) -> None:
    parts = sections(report.results)
    drawn = {name for name, draw in EXPERIMENT.figures.items() if draw(report.results) is not None}
    assert drawn == set(EXPERIMENT.figures) - {"cell_in_turn"}  # this trace has no machines to run anything on
    assert {s.figure for s in parts if s.figure} == drawn
    assert all((s.table is not None and s.table.rows) or "no machine with a capacity" in s.text for s in parts)
    assert MarginsConfig().online
