"""Recorded replays compared pairwise: which runs are paired, and by which numbers."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.metrics import POSITION, STATS
from reclaim.replay.open_loop.paired import BETTER, EXCEEDS, NOISE, UNKNOWN, USUAL, WORSE, Paired
from reclaim.replay.report.units import UnitSums, write_equal, write_units
from reclaim.replay.runs.compare import Chosen, compare
from reclaim.replay.runs.differences import differences
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.runs import RunRecord

N_UNITS = 20
RECLAIMED = {"borg": 0.3, "borg-online": 0.35, "vpa": 0.4, "network": 0.5, "network-online": 0.6, "trees": 0.7,
             "oracle": 0.9}  # fmt: skip
"""Of every unit, at margin medium; a tenth more at aggressive."""
KINDS = dict.fromkeys(("network", "network-online", "trees"), "learned") | {"oracle": "oracle"}

Experiment = Callable[..., list[RunRecord]]


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """Return a maker of recorded replays: their runs, and the files of numbers by unit where they were kept."""
    files: dict[str, Path | None] = {}
    monkeypatch.setattr(tracking, "find_file", lambda run_id, file: nullcontext(files[run_id] and files[run_id] / file))

    def make(
        whole: str,
        *estimators: str,
        margins: tuple[str, ...] = ("medium", "aggressive"),
        horizon_s: int = 3_600,
        dataset: str = "cell",
        rows: float = 10.0,
        kept: bool = True,
        afterwards: Mapping[str, float] | None = None,
        violations: Mapping[str, float] | None = None,
        **params: str,
    ) -> list[RunRecord]:
        sums, runs = {}, []
        for name in estimators:
            for margin in margins:
                one = np.zeros((N_UNITS, len(STATS), 2))
                one[:, POSITION["rows"]], one[:, POSITION["granted"]] = rows, 1.0
                one[:, POSITION["reclaimed"]] = RECLAIMED[name] + 0.1 * (margin == "aggressive")
                one[:, POSITION["violations"]] = rows * (violations or {}).get(name, 0.0)
                sums[name, margin] = one
                tags = {"dataset": dataset, "dataset_fingerprint": f"#{dataset}", "whole_experiment": whole}
                tags |= {"estimator": name, "margin": margin, "kind": KINDS.get(name, "statistical")}
                runs.append(
                    RunRecord(f"{whole}-{name}-{margin}", "", "margins", "FINISHED", 0,
                              {"horizon_s": str(horizon_s), **params}, {}, tags)
                )  # fmt: skip
        folder = tmp_path / whole
        folder.mkdir()
        write_units(UnitSums(np.arange(N_UNITS), np.zeros(N_UNITS, np.bool_), sums), folder)
        equal = {name: dict.fromkeys(margins, np.full((101, 2), at)) for name, at in (afterwards or {}).items()}
        write_equal(equal, folder)
        files[whole] = folder if kept else None
        return runs

    return make


def pairs(runs: list[RunRecord], named: dict[str, int] | None = None, also: list[RunRecord] | None = None) -> list[str]:
    """Return ``margin: estimator - other`` of every CPU row."""
    table = differences(Chosen(tuple(runs), named or {}, tuple(runs + (also or []))))
    rows = [r for r in table.as_records() if r["resource"] == "CPU"]
    assert len(rows) == len(table.rows) / 2
    return [f"{r['margin']}: {r['estimator']} - {r['against']}" for r in rows]


def test_a_learned_estimator_is_compared_with_the_best_statistical_one_at_the_same_margin(
    experiment: Experiment,
) -> None:
    runs = experiment("a", "network", "borg", "vpa", "oracle")
    assert pairs(runs) == ["medium: network - vpa", "aggressive: network - vpa"]
    row = differences(Chosen(tuple(runs), {}, tuple(runs))).as_records()[0]
    assert row["dataset"] == "cell"
    assert row["horizon"] == "3600 s"
    assert [row[f"reclaimed {what}"] for what in ("difference", "low", "high")] == pytest.approx([0.1] * 3)
    assert [row[f"violation {what}"] for what in ("difference", "low", "high")] == [0, 0, 0]
    assert row["verdict"] == BETTER


def test_without_a_learned_estimator_each_statistical_one_is_compared_with_the_best_other(
    experiment: Experiment,
) -> None:
    assert pairs(experiment("a", "borg", "vpa", margins=("medium",))) == ["medium: borg - vpa", "medium: vpa - borg"]


def test_a_statistical_one_is_not_compared_with_itself_under_margins_that_follow(experiment: Experiment) -> None:
    assert pairs(experiment("a", "vpa", "borg-online", "borg", margins=("medium",))) == [
        "medium: vpa - borg-online", "medium: borg-online - vpa", "medium: borg - vpa",
    ]  # fmt: skip
    assert pairs(experiment("b", "borg-online", "borg", margins=("medium",))) == []


def test_models_are_compared_with_the_first_one_and_none_with_itself_under_margins_that_follow(
    experiment: Experiment,
) -> None:
    of: Any = {"margins": ("medium",), "draws": "100", "seed": "1", "confidence": "0.9"}
    runs = experiment("a", "network", "network-online", "trees", afterwards={"network": 0.5, "trees": 0.4}, **of)
    assert pairs(runs) == ["medium: trees - network"]
    row = differences(Chosen(tuple(runs), {}, tuple(runs))).as_records()[0]
    expected: tuple[Any, ...] = ("network", pytest.approx(-0.1), WORSE)
    assert tuple(row.values())[-3:] == expected


def test_a_run_alone_is_compared_with_the_others_of_its_replay(experiment: Experiment) -> None:
    runs = experiment("a", "network", "borg", "vpa", margins=("medium",))
    assert pairs(runs[:1], {runs[0].run_id: 0}, also=runs[1:]) == ["medium: network - vpa"]


def test_the_others_of_its_replay_are_those_at_the_same_margin(experiment: Experiment) -> None:
    network, at_aggressive, *others = experiment("a", "network", "vpa")
    recorded = (others[1], network, at_aggressive, others[0])  # vpa at aggressive first
    row = differences(Chosen((network,), {network.run_id: 0}, recorded)).as_records()[0]
    assert row["reclaimed difference"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("violations", "against", "verdict"),
    [
        ({"network": 0.008, "vpa": 0.005}, "vpa", BETTER),  # not more of both
        ({"network": 0.008, "vpa": 0.009}, "vpa", BETTER),  # though it violates more, which borg does not
        ({"network": 0.008, "vpa": 0.02}, "borg", BETTER),
        ({"network": 0.02, "vpa": 0.005}, "vpa", EXCEEDS),
    ],
)
def test_at_a_margin_with_a_budget_estimators_are_judged_by_it(
    experiment: Experiment, violations: dict[str, float], against: str, verdict: str
) -> None:
    of: Any = {"budgets.aggressive": "0.01", "margins": ("aggressive",)}
    runs = experiment("a", "network", "borg", "vpa", violations=violations, **of)
    row = differences(Chosen(tuple(runs), {}, tuple(runs))).as_records()[0]
    assert (row["against"], row["verdict"]) == (against, verdict)


def test_runs_named_later_are_compared_with_the_first(experiment: Experiment) -> None:
    network, borg, vpa = experiment("a", "network", "borg", "vpa", margins=("medium",))
    assert pairs([network, borg, vpa], {borg.run_id: 0, network.run_id: 1, vpa.run_id: 2}) == [
        "medium: network - vpa", "medium: network - borg", "medium: vpa - borg",
    ]  # fmt: skip


def test_whole_replays_are_compared_estimator_by_estimator(experiment: Experiment) -> None:
    first = experiment("1111111111", "network", "borg", margins=("medium",))
    second = experiment("2222222222", "network", "borg", margins=("medium",))
    named = {r.run_id: place for place, runs in enumerate((first, second)) for r in runs}
    assert pairs(first + second, named) == [
        "medium: network 11111111 - borg 11111111",
        "medium: network 22222222 - borg 11111111",
        "medium: network 22222222 - network 11111111",
        "medium: borg 22222222 - borg 11111111",
    ]
    rows = differences(Chosen((*first, *second), named, (*first, *second))).as_records()
    assert {r["verdict"] for r in rows[-2:]} == {NOISE}


def test_without_named_runs_only_the_newest_replay_is_compared(experiment: Experiment) -> None:
    newer = experiment("1111111111", "network", "borg", margins=("medium",))
    older = experiment("2222222222", "network", "borg", margins=("medium",))
    assert pairs([*newer, *older]) == ["medium: network - borg"]


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 11.0}, {"horizon_s": 300}, {"dataset": "elsewhere"}, {"kept": False},
        {"budgets.baseline": "0.1"}, {"budgets.aggressive": "0.1"}, {"by_tier": "true"}, {"value.core_hour": "0.05"},
        {"value.memory_hour": "0.01"}, {"value.violation": "3.0"},
    ],
)  # fmt: skip
def test_only_runs_that_judged_the_same_task_windows_by_the_same_promise_are_paired(
    experiment: Experiment, other: dict[str, Any]
) -> None:
    one, another = experiment("a", "network"), experiment("b", "vpa", "borg", margins=("medium",), **other)
    statistical = [] if other == {"kept": False} else ["medium: vpa - borg", "medium: borg - vpa"]
    assert pairs(one + another) == statistical
    assert len(compare(Chosen((*one, *another), {}, ()))["margins"].rows) == 4


def test_replays_at_prices_of_money_are_not_hidden_behind_a_newer_one_by_budgets(experiment: Experiment) -> None:
    newer = experiment("a", "network", "borg", margins=("medium",), **{"value.core_hour": "null"})
    older = experiment("b", "network", "borg", margins=("medium",), **{"value.core_hour": "0.05"})
    rows = differences(Chosen((*newer, *older), {}, (*newer, *older))).as_records()
    assert [row["value.core_hour"] for row in rows] == ["null", "null", "0.05", "0.05"]


def test_a_budget_in_which_replays_differ_is_a_column_and_no_other_is(experiment: Experiment) -> None:
    held: dict[str, Any] = {"margins": ("medium",), "by_tier": "false"}
    one = experiment("a", "network", "borg", **held, **{"budgets.aggressive": "0.01"})
    other = experiment("b", "network", "borg", **held, **{"budgets.aggressive": "0.02"})
    both = differences(Chosen((*one, *other), {}, ()))
    budgets = [(r["budgets.aggressive"], r["resource"]) for r in both.as_records()]
    assert budgets == [(b, r) for b in ("0.01", "0.02") for r in ("CPU", "memory")]
    assert set(both.columns) - set(differences(Chosen(tuple(one), {}, ())).columns) == {"budgets.aggressive"}


def test_replays_of_two_horizons_have_them_in_the_column_that_any_table_has(experiment: Experiment) -> None:
    one = experiment("a", "network", "borg", margins=("medium",))
    other = experiment("b", "network", "borg", margins=("medium",), horizon_s=300)
    both = differences(Chosen((*one, *other), {}, ()))
    assert both.columns == differences(Chosen(tuple(one), {}, ())).columns
    assert [row["horizon"] for row in both.as_records()] == ["3600 s", "3600 s", "300 s", "300 s"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"draws": "50", "seed": "2", "confidence": "0.9"}, {"draws": "50", "seed": "2", "confidence": "0.9"},
         Bootstrap(50, 2, 0.9)),
        ({"draws": "50", "seed": "2", "confidence": "0.9"}, {"draws": "50", "seed": "3", "confidence": "0.9"}, USUAL),
        ({"draws": "50", "seed": "2", "confidence": "0.9"}, {}, USUAL),
        ({}, {}, USUAL),
    ],
)  # fmt: skip
def test_intervals_are_drawn_as_in_the_replays_where_these_agree(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch,
    one: dict[str, str], other: dict[str, str], expected: Bootstrap,
) -> None:  # fmt: skip
    asked: list[Bootstrap] = []

    def spy(sums: dict[str, Any], how: Bootstrap) -> Paired:
        asked.append(how)
        return Paired(sums, how)

    monkeypatch.setattr("reclaim.replay.runs.differences.Paired", spy)
    runs = experiment("a", "network", margins=("medium",), **one) + experiment("b", "vpa", margins=("medium",), **other)
    assert pairs(runs) == ["medium: network - vpa"]
    assert asked == [expected]


@pytest.mark.parametrize(
    ("afterwards", "expected"),
    [
        # at equal violation borg is the best of the others, and better
        ({"network": 0.5, "vpa": 0.4, "borg": 0.55}, ("borg", pytest.approx(-0.05), WORSE)),
        ({"network": 0.5, "vpa": 0.4, "borg": np.nan}, ("vpa", pytest.approx(0.1), BETTER)),  # borg never comes so low
        ({"vpa": 0.4, "borg": 0.55}, (None, None, None)),  # as of prices that follow, which are not swept
    ],
)
def test_at_equal_violation_the_opponent_is_the_best_one_there_of_those_that_reach_it(
    experiment: Experiment, afterwards: dict[str, float], expected: tuple[Any, ...]
) -> None:
    alike = {"draws": "100", "seed": "1", "confidence": "0.9"}
    runs = experiment("a", "network", "borg", "vpa", margins=("medium",), afterwards=afterwards, **alike)
    row = differences(Chosen(tuple(runs), {}, tuple(runs))).as_records()[0]
    assert (row["estimator"], row["against"], row["verdict"]) == ("network", "vpa", BETTER)
    assert tuple(row.values())[-3:] == expected


def test_replays_of_other_resamples_are_not_compared_at_equal_violation(experiment: Experiment) -> None:
    of: Any = {"margins": ("medium",), "draws": "100", "confidence": "0.9"}
    mine = experiment("a", "network", afterwards={"network": 0.5}, seed="1", **of)
    for seed, expected in (("1", ("vpa", pytest.approx(0.1), BETTER)), ("2", (None, None, None))):
        other = experiment(f"b{seed}", "vpa", afterwards={"vpa": 0.4}, seed=seed, **of)
        row = differences(Chosen((*mine, *other), {}, (*mine, *other))).as_records()[0]
        assert tuple(row.values())[-3:] == expected


def test_an_unknown_difference_is_an_empty_cell(experiment: Experiment) -> None:
    runs = experiment("a", "network", "borg", margins=("medium",), rows=0.0)
    row = differences(Chosen(tuple(runs), {}, tuple(runs))).as_records()[0]
    assert row["violation difference"] is None
    assert row["verdict"] == UNKNOWN
