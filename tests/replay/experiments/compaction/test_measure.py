"""The compaction experiment: trials and risk worked by hand, and a whole run on a small cell."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.experiment import LEARNED_MACHINE, Source
from reclaim.replay.experiments.compaction.checkpoint import Checkpoint
from reclaim.replay.experiments.compaction.contenders import Key
from reclaim.replay.experiments.compaction.measure import EXPERIMENT, CompactionConfig, _compacted, measure, summarise
from reclaim.replay.experiments.compaction.packing import MachineSet, TaskSet
from reclaim.replay.experiments.compaction.page import fewest_table, summary_table, unexpected
from reclaim.replay.experiments.compaction.trials import Trial, compact
from reclaim.replay.open_loop.estimates import LIMIT
from reclaim.replay.report.page import ReplayReport, render_page
from reclaim.replay.runs.run import run_experiment

CONFIG = CompactionConfig(estimators=("borg", "percentile"), trials=5, checkpoints=2)


def checkpoint(machines: int, used: list[tuple[float, float]]) -> Checkpoint:
    """Make four tasks of limit 0.5, 0.25 reserved, on machines of 1; ``used`` by all of them in each slot."""
    n = 4
    workload = TaskSet(
        limit=np.full((n, 2), 0.5),
        production=np.zeros(n, np.bool_),
        priority=np.zeros(n, np.int64),
        constraint_set=np.zeros(n, np.int64),
        job=np.arange(n),
        most=np.zeros(n, np.int64),
        soft=np.zeros(n, np.bool_),
        picky=np.zeros(n, np.bool_),
    )
    return Checkpoint(
        time_us=0,
        rows=np.arange(n),
        workload=workload,
        machines=MachineSet(np.ones((machines, 2)), np.ones((1, machines), np.bool_)),
        reserved={("half", "none"): np.full((n, 2), 0.25), (LIMIT, "none"): workload.limit},
        used=np.tile(np.array(used), (n, 1, 1)),
        too_large=0,
    )


def _compact(taken: Checkpoint) -> tuple[int, dict[Key, list[Trial]]]:
    return compact(taken, count=5, policy="hybrid", seed=1)


def test_reclaiming_half_needs_half_the_machines() -> None:
    clones, trials = _compact(checkpoint(3, [(0.1, 0.1)]))
    assert clones == 1
    assert [t.machines for t in trials["half", "none"]] == [1] * 5
    assert [t.machines for t in trials[LIMIT, "none"]] == [2] * 5


def test_a_cell_too_small_for_the_limits_is_cloned() -> None:
    clones, trials = _compact(checkpoint(1, [(0.1, 0.1)]))
    assert clones == 2
    assert [t.machines for t in trials["half", "none"]] == [1] * 5


def test_a_workload_that_no_clones_hold_is_refused() -> None:
    taken = checkpoint(1, [(0.1, 0.1)])
    taken.machines.capacity[:] = 0.4
    with pytest.raises(ConfigError, match="8 times the cell's machines do not hold"):
        _compact(taken)


def test_machines_run_out_where_their_tasks_really_use_more_than_there_is() -> None:
    # one machine of 1 for all four: CPU is passed in the second slot alone, memory just not
    _, trials = _compact(checkpoint(3, [(0.1, 0.2), (0.3, 0.25)]))
    half, limit = trials["half", "none"][0], trials[LIMIT, "none"][0]
    assert half.over.tolist() == [1.0, 0.0]
    assert half.used.tolist() == pytest.approx([0.8, 0.9])
    assert limit.over.tolist() == [0.0, 0.0]
    assert limit.used.tolist() == pytest.approx([0.4, 0.45])


def test_a_machine_is_held_to_the_tolerance_of_sums() -> None:
    for each, over in ((0.25 * (1 + 1e-10), 0.0), (0.25 * (1 + 1e-8), 1.0)):
        _, trials = _compact(checkpoint(3, [(each, 0.1)]))
        assert trials["half", "none"][0].machines == 1
        assert trials["half", "none"][0].over.tolist() == [over, 0.0]


def test_every_trial_removes_machines_in_an_order_of_its_own_and_the_same_for_all_contenders() -> None:
    taken = checkpoint(8, [(0.1, 0.1)])
    taken.machines.capacity[:4] = 0.25  # as good as none for a task of 0.5
    taken = replace(taken, reserved={**taken.reserved, ("other", "none"): taken.workload.limit})
    trials = _compact(taken)[1]
    needed = [t.machines for t in trials[LIMIT, "none"]]
    assert len(set(needed)) > 1
    assert needed == [t.machines for t in trials["other", "none"]]
    assert needed == [t.machines for t in _compact(taken)[1][LIMIT, "none"]]


def test_the_result_of_eleven_trials_is_the_tenth() -> None:
    def trials(*machines: int) -> list[Trial]:
        return [Trial(n, 0, *np.zeros((3, 2))) for n in machines]

    taken = checkpoint(20, [(0.1, 0.3), (0.2, 0.1)])
    both = {("half", "none"): trials(*range(11, 0, -1)), (LIMIT, "none"): trials(*[40] * 11)}
    found = summarise(taken, both)["half", "none"]
    assert found["machines"] == {"value": 10.0, "low": 1, "high": 11}
    assert found["share"] == {"value": 0.5, "low": 0.05, "high": 0.55}
    assert (found["saved_share"], found["additional_share"]) == (0.75, 3.0)
    assert found["beyond"] == {"cpu": 0.0, "memory": 1.0}  # of all four tasks 0.3 is more than the 0.25 reserved
    assert found["beyond_tasks"] == {"cpu": 0, "memory": 4}
    assert found["beyond_alone"] is None


def test_tasks_that_only_one_of_two_fails_are_counted() -> None:
    used = [(0.3, 0.3), (0.1, 0.3)]
    taken = checkpoint(3, used)
    mine, borg = np.full((4, 2), 0.25), np.full((4, 2), 0.4)
    mine[0], borg[3], borg[2, 1] = 0.4, 0.2, 0.2
    reserved = {("mine", "medium"): mine, ("borg", "medium"): borg, (LIMIT, "none"): taken.workload.limit}
    found = summarise(replace(taken, reserved=reserved), {key: [Trial(1, 0, *np.zeros((3, 2)))] for key in reserved})
    assert found["mine", "medium"]["beyond_tasks"] == {"cpu": 3, "memory": 3}
    assert found["mine", "medium"]["beyond_alone"] == {"cpu": [2, 0], "memory": [1, 0]}
    assert found["borg", "medium"]["beyond_alone"] == {"cpu": [0, 0], "memory": [0, 0]}


def test_only_tasks_whose_limit_is_known_can_be_beyond_their_reservation() -> None:
    taken = checkpoint(3, [(0.3, 0.3)])
    limit = taken.workload.limit
    limit[:3, 1] = 0.0  # as where none is known
    trials = {key: [Trial(1, 0, *np.zeros((3, 2)))] for key in taken.reserved}

    def beyond() -> tuple[dict[str, float | None], dict[str, int], dict[str, int]]:
        reserved = {("half", "none"): limit / 2, (LIMIT, "none"): limit}
        half, whole = summarise(replace(taken, reserved=reserved), trials).values()
        return half["beyond"], half["beyond_tasks"], whole["beyond_tasks"]

    nobody = {"cpu": 0, "memory": 0}
    assert beyond() == ({"cpu": 1.0, "memory": 1.0}, {"cpu": 4, "memory": 1}, nobody)
    limit[3, 1] = 0.0
    assert beyond() == ({"cpu": 1.0, "memory": None}, {"cpu": 4, "memory": 0}, nobody)


def test_usage_above_its_own_limit_puts_neither_a_task_nor_its_machine_beyond_what_is_reserved() -> None:
    taken = checkpoint(3, [(0.1, 0.7), (0.1, 0.1)])  # of a limit of 0.5
    _, trials = _compact(taken)
    found = summarise(taken, trials)
    without, half = found[LIMIT, "none"], found["half", "none"]
    assert (without["beyond_tasks"]["memory"], without["passed"]["memory"]["value"]) == (0, 0.0)
    assert (half["beyond_tasks"]["memory"], half["passed"]["memory"]["value"]) == (4, 1.0)  # 0.25 reserved of 0.5
    assert without["over"]["memory"]["value"] == half["over"]["memory"]["value"] == 1.0  # what is used is used


def test_a_cell_without_limits_of_memory_is_compacted_and_the_page_counts_the_tasks_without(
    unlimited: Path, tmp_path: Path
) -> None:
    report = run_experiment(EXPERIMENT, unlimited, tmp_path / "out", CONFIG, tracking=False)
    assert [c["limit_known"] for c in report.results["checkpoints"]] == [{"cpu": 30, "memory": 0}] * 2
    assert _of(report, LIMIT)["beyond"] == _of(report, "oracle")["beyond"] == {"cpu": 0.0, "memory": None}
    assert _of(report, "borg", "aggressive")["beyond_tasks"]["memory"] == 0
    rows = EXPERIMENT.page(report.results)["checkpoints"].as_records()
    assert [(row["no CPU limit"], row["no memory limit"]) for row in rows] == [(0, 30)] * 2
    assert {row["tasks beyond, memory"] for row in fewest_table(report.results).as_records()} == {None}
    assert {row["tasks beyond, memory"] for row in summary_table(report.results).as_records()} == {None}


def test_a_checkpoint_counts_its_tasks_by_what_they_are_and_ask_for_however_production_is_placed() -> None:
    taken = checkpoint(4, [(0.1, 0.1)])  # 2 of 4 are granted
    workload = replace(
        taken.workload,
        production=np.array([True, True, True, False]),
        constraint_set=np.array([1, 2, 2, 0]),
        picky=np.array([True, True, False, False]),
    )
    taken = replace(taken, workload=workload, machines=MachineSet(np.ones((4, 2)), np.ones((3, 4), np.bool_)))
    for by_limit in (True, False):
        _, facts = _compacted((taken, CompactionConfig(trials=1, production_by_limit=by_limit)))
        counts = [facts[name] for name in ("tasks", "production", "constrained", "picky", "machines")]
        assert counts == [4, 3, 3, 2, 4]
        assert facts["limit_share"] == {"cpu": 0.5, "memory": 0.5}


def test_each_checkpoint_has_orders_of_its_own() -> None:
    taken = checkpoint(8, [(0.1, 0.1)])
    taken.machines.capacity[:4] = 0.25

    def needed(time_us: int) -> list[int]:
        at = replace(taken, time_us=time_us)
        return [t.machines for t in compact(at, count=11, policy="hybrid", seed=1)[1][LIMIT, "none"]]

    assert needed(0) != needed(300_000_000)
    assert needed(300_000_000) == needed(300_000_000)


@pytest.fixture(scope="module")
def report(cell_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> ReplayReport:
    out = tmp_path_factory.mktemp("out") / "compaction"
    return run_experiment(EXPERIMENT, cell_dataset, out, CONFIG, tracking=False)


def _of(report: ReplayReport, name: str, margin: str = "none") -> dict[str, Any]:
    found: dict[str, Any] = next(e["results"][margin] for e in report.results["estimators"] if e["name"] == name)
    return found


def test_reclamation_needs_fewer_machines_and_the_oracle_the_fewest(report: ReplayReport) -> None:
    limit, oracle = _of(report, LIMIT), _of(report, "oracle")
    assert limit["saved_share"] == 0.0
    for name in ("borg", "percentile"):
        baseline, medium, aggressive = (_of(report, name, m) for m in ("baseline", "medium", "aggressive"))
        needed = [one["machines"]["value"] for one in (limit, baseline, medium, aggressive, oracle)]
        assert needed == sorted(needed, reverse=True)
        assert aggressive["saved_share"] == pytest.approx(1 - needed[3] / needed[0])
        assert aggressive["additional_share"] == pytest.approx(needed[0] / needed[3] - 1)
    assert oracle["over"]["memory"]["value"] == 0.0
    assert oracle["beyond"] == {"cpu": 0.0, "memory": 0.0}


def test_results_are_the_ninetieth_percentile_over_trials_and_the_mean_over_checkpoints(report: ReplayReport) -> None:
    one = _of(report, "borg", "medium")
    results = [float(np.percentile(at["trials"], 90)) for at in one["checkpoints"]]
    assert [at["machines"]["value"] for at in one["checkpoints"]] == results
    assert one["machines"]["value"] == pytest.approx(np.mean(results))
    every = [n for at in one["checkpoints"] for n in at["trials"]]
    assert (one["machines"]["low"], one["machines"]["high"]) == (min(every), max(every))
    assert one["share"]["value"] == pytest.approx(one["machines"]["value"] / 4)


def _measured(cell: Path, config: CompactionConfig) -> dict[str, Any]:
    return measure(Source(Dataset.open(cell), FeatureSet.open(cell), {}), config).results


def test_the_same_seed_gives_the_same_results(report: ReplayReport, cell_dataset: Path) -> None:
    again = _measured(cell_dataset, CONFIG)
    assert again["estimators"] == report.results["estimators"]
    assert again["checkpoints"] == report.results["checkpoints"]


def test_the_console_has_the_ends_of_the_scale_and_the_best(report: ReplayReport) -> None:
    rows: dict[Any, dict[str, Any]] = {row["role"]: row for row in summary_table(report.results).as_records()}
    assert next(iter(rows)) == "no reclamation"
    assert list(rows)[-1] == "oracle"
    assert len(rows) <= 10
    for role, name in (("no reclamation", LIMIT), ("oracle", "oracle")):
        assert rows[role]["machines"] == _of(report, name)["machines"]["value"]
    best = rows["statistical"]
    needed = [_of(report, name, "aggressive")["machines"]["value"] for name in ("borg", "percentile")]
    assert best["machines"] == min(needed)
    assert best["compared with borg"] in ("no more risk", "more risk")


def test_the_page_shows_every_contender_and_every_term_is_defined(report: ReplayReport) -> None:
    recorded = EXPERIMENT.runs(report.results)
    assert [run.name for run in recorded][:3] == ["borg/baseline", "borg/medium", "borg/aggressive"]
    assert len(recorded) == 2 * 3 + 2
    assert {column.metric for column in EXPERIMENT.columns} <= recorded[0].metrics.keys()
    page = (report.folder / "report.html").read_text()
    assert "Machines needed at each checkpoint" in page
    assert (report.folder / "machines_needed.png").stat().st_size > 0
    assert {"machines needed", "copies of the cell", "risks no more", "rules of the packing"} <= report.results[
        "definitions"
    ].keys()


def test_of_memory_that_was_not_measured_a_run_records_nothing_and_not_0(report: ReplayReport) -> None:
    dataset = report.results["dataset"] | {"lacks": ["memory_max", "memory_mean"]}
    for run, full in zip(
        EXPERIMENT.runs({**report.results, "dataset": dataset}), EXPERIMENT.runs(report.results), strict=True
    ):
        assert {number for name, number in run.metrics.items() if "memory" in name} == {None}
        assert {name: full.metrics[name] for name in run.metrics if "memory" not in name}.items() <= run.metrics.items()
        assert full.metrics["used_memory"] is not None


def _changed(report: ReplayReport, name: str, margin: str, **changed: Any) -> dict[str, Any]:
    """Return the results with other numbers of one contender."""
    estimators = [
        e | {"results": e["results"] | {margin: e["results"][margin] | changed}} if e["name"] == name else e
        for e in report.results["estimators"]
    ]
    return {**report.results, "estimators": estimators}


def _fewer_than_borg(report: ReplayReport, mine: int, its: int, over: float = 0.0) -> dict[str, dict[str, Any]]:
    """Return the rows of the medium margin where percentile needs the fewest machines, by their role."""
    borg = _of(report, "borg", "medium")
    alone = {"cpu": [0, 0], "memory": [mine, its]}
    share = {"value": 0.1, "low": 0.1, "high": 0.1}
    more = {r: {**borg["over"][r], "value": borg["over"][r]["value"] + over} for r in ("cpu", "memory")}
    tasks = {"cpu": 7, "memory": 1234}
    changed = _changed(report, "percentile", "medium", share=share, beyond_alone=alone, over=more, beyond_tasks=tasks)
    return {str(row["role"]): row for row in fewest_table(changed).as_records() if row["margin"] == "medium"}


@pytest.mark.parametrize(
    ("mine", "its", "over", "verdict"),
    [
        (3, 2, 0.0, "no more risk"),
        (58, 42, 0.0, "no more risk"),
        (2, 30, 0.0, "no more risk"),
        (63, 37, 0.0, "more risk"),  # 26 apart, twice the root of 100 is 20
        (5, 0, 0.0, "more risk"),
        (0, 0, 0.004, "no more risk"),
        (0, 0, 0.006, "more risk"),
    ],
)
def test_single_tasks_do_not_decide_which_estimator_risks_more(
    report: ReplayReport, mine: int, its: int, over: float, verdict: str
) -> None:
    rows = _fewer_than_borg(report, mine, its, over)
    assert (rows["fewest"]["estimator"], rows["fewest"]["compared with borg"]) == ("percentile", verdict)
    assert rows["fewest at no more risk"]["estimator"] == ("percentile" if verdict == "no more risk" else "borg")


def test_the_table_counts_tasks_and_trials(report: ReplayReport) -> None:
    row = _fewer_than_borg(report, 0, 0)["fewest"]
    assert row["of the tasks"] == sum(c["tasks"] for c in report.results["checkpoints"])
    assert (row["tasks beyond, CPU"], row["tasks beyond, memory"]) == (7, 1234)
    assert row["trials"] == 10  # 5 orders of removal at each of 2 checkpoints
    assert row["trials with fewer"] + row["trials with more"] <= 10


def test_a_narrower_margin_that_needs_more_machines_is_named(report: ReplayReport) -> None:
    assert "needs more machines at a narrower margin" in unexpected(report.results).columns
    changed = _changed(report, "borg", "aggressive", share={"value": 9.0, "low": 9.0, "high": 9.0})
    assert [row[:2] for row in unexpected(changed).rows if row[0] == "borg"] == [("borg", "yes")]


def test_a_contender_that_needs_more_machines_than_the_limits_shows_more(report: ReplayReport) -> None:
    page = render(report, _changed(report, "oracle", "none", saved_share=-0.03))
    assert re.search(r"<dt>more</dt><dd>3\.0\xa0%</dd>", page)


def test_copies_of_the_cell_are_shown_where_there_are_any(report: ReplayReport) -> None:
    for clones, shown in ((2, True), (1, False)):
        checkpoints = [c | {"clones": clones} for c in report.results["checkpoints"]]
        page = render(report, {**report.results, "checkpoints": checkpoints})
        assert ("<dt>copies of the cell</dt><dd>up to 2," in page) == shown


def test_the_page_says_how_many_validation_moments_were_packed_and_why_others_were_not(report: ReplayReport) -> None:
    assert report.results["packed"] is None  # no contender by machine
    rows = [e | {"kind": LEARNED_MACHINE} if e["name"] == "borg" else e for e in report.results["estimators"]]
    results = {**report.results, "estimators": rows}
    for packed, left_out, not_kept, few, text in (
        (46, {"no task runs": 1, "no machine takes work": 1}, [], False,
         "of the validation period. Left out: 1 where no task runs, 1 where no machine takes work."),
        (48, {}, [], False, "at 48 of 48 moments of the validation period."),
        (48, {}, [], True, "or a shorter horizon has more."),
        (48, {}, ["borg (sum), baseline", "net, medium"], False,
         "period. No margin was found that keeps its budget there for: borg (sum), baseline; net, medium."),
        (0, {"no task runs": 48}, [], False,
         "Left out: 48 where no task runs. So they are those of the machines of the trace."),
    ):  # fmt: skip
        counts = {"asked": 48, "packed": packed, "left_out": left_out, "not_kept": not_kept, "few": few}
        page = " ".join(render(report, {**results, "packed": counts}).split())
        assert re.search(re.escape(text) + " ?</p>", page)
    assert "machines packed at" not in render(report, {**results, "packed": None})


def render(report: ReplayReport, results: dict[str, Any]) -> str:
    return render_page(EXPERIMENT, results, {"machines_needed": report.folder / "machines_needed.svg"})


def test_named_moments_too_late_for_their_horizon_are_refused(cell_dataset: Path, report: ReplayReport) -> None:
    facts = report.results["checkpoints"][0]
    end_us = facts["time_us"] + int((report.results["dataset"]["test_hours"] - facts["hours"]) * 3.6e9)
    with pytest.raises(HistoryTooShortError, match="its horizon takes 3600 s"):
        _measured(cell_dataset, CompactionConfig(estimators=("borg",), trials=1, at_us=(end_us - 300_000_000,)))


def test_moments_may_be_named(cell_dataset: Path, report: ReplayReport) -> None:
    time_us = report.results["checkpoints"][1]["time_us"]
    config = CompactionConfig(estimators=("borg",), trials=1, at_us=(time_us,))
    assert [c["time_us"] for c in _measured(cell_dataset, config)["checkpoints"]] == [time_us]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"trials": 0}, "trials must be at least 1"),
        ({"checkpoints": 0}, "checkpoints must be at least 1"),
        ({"at_us": (5, 7, 5)}, "at_us must be different moments, got 5 more than once"),
        ({"policy": "first-fit"}, "policy must be one of best-fit, worst-fit, hybrid, got first-fit"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompactionConfig(**setting)
