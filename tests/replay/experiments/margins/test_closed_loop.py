"""The margins experiment in the closed loop: each margin throughout, all in turn, and its tables."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.closed_loop.foreseen import ByMachine
from reclaim.replay.closed_loop.outcome import mean_of, summary
from reclaim.replay.closed_loop.records import TICK
from reclaim.replay.closed_loop.simulate import Outcome, Scheduling, simulate
from reclaim.replay.closed_loop.workload import CellMachines, Workload, machines_of, workload_of
from reclaim.replay.experiment import LEARNED_MACHINE, SUM_OF_TASKS, Source
from reclaim.replay.experiments.margins.closed_loop import (
    IN_TURN,
    _of_estimator,
    _weeks,
    most_reclaiming,
    run_cells,
)
from reclaim.replay.experiments.margins.figures import cell_in_turn
from reclaim.replay.experiments.margins.runs import COLUMNS, runs
from reclaim.replay.experiments.margins.tables import cells_table, kills_table, parts_table, waiting_table
from reclaim.replay.open_loop.estimates import Estimates, estimate_all
from reclaim.replay.open_loop.machines import MachineContenders
from reclaim.replay.settings import ReplayConfig
from reclaim.training.bundle import Bundle
from reclaim.training.margins.margin import MARGIN_NAMES, Budgets


def source_of(path: Path) -> Source:
    return Source(Dataset.open(path), FeatureSet.open(path), {})


@pytest.fixture(scope="module")
def estimates(cell_dataset: Path) -> Estimates:
    return estimate_all(source_of(cell_dataset), ReplayConfig(estimators=("borg", "percentile", "limit")))


@pytest.fixture(scope="module")
def loop(cell_dataset: Path, estimates: Estimates) -> dict[str, Any]:
    return run_cells(source_of(cell_dataset), estimates, Scheduling(), ["borg"])


def test_every_margin_is_run_throughout_and_all_of_them_in_turn(loop: dict[str, Any]) -> None:
    assert [e["name"] for e in loop["estimators"]] == ["limit", "borg", "oracle"]
    assert [list(e["runs"]) for e in loop["estimators"]] == [["none"], ["baseline", "medium", "aggressive"], ["none"]]
    weeks = loop["estimators"][1]["sequence"]
    assert [week["margin"] for week in weeks] == ["baseline", "aggressive", "medium", "baseline"]
    assert [e["sequence"] for e in loop["estimators"] if e["name"] != "borg"] == [None, None]
    assert loop["machines"] == 4
    assert loop["runs"] == loop["runs_from_before"] == 30


def test_a_narrower_margin_reserves_less_of_the_same_cell(loop: dict[str, Any]) -> None:
    limit, borg, oracle = (e["runs"] for e in loop["estimators"])
    reserved = [borg[m]["reserved_cpu"] for m in ("baseline", "medium", "aggressive")]
    assert limit["none"]["reserved_cpu"] >= reserved[0] >= reserved[1] >= reserved[2] >= oracle["none"]["reserved_cpu"]
    assert limit["none"]["in_reclaimed_cpu"] == 0.0


def test_tasks_are_held_to_the_answer_to_the_window_before_under_the_margin_whose_turn_it_is(
    cell_dataset: Path, estimates: Estimates, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = len(estimates.history)
    marks = {m: (np.arange(1, n + 1) + k * n)[:, None] * [1e-9, 1e-9] for k, m in enumerate(MARGIN_NAMES)}
    told: list[tuple[Workload, np.ndarray, list[int]]] = []

    def remember(
        work: Workload, on: CellMachines, reserved: np.ndarray, plan: np.ndarray, how: Scheduling, by_machine: None,
        horizon_s: int,
    ) -> Outcome:  # fmt: skip
        assert by_machine is None
        assert horizon_s == 3600
        told.append((work, reserved, plan.tolist()))
        return simulate(work, on, reserved, plan, how)

    def answers(of: Estimates, name: str) -> dict[str, np.ndarray]:  # to each row its own number
        return dict(marks) if name == "borg" else {"none": of.history.windows.limit}

    monkeypatch.setattr(Estimates, "reservations", answers)
    monkeypatch.setattr("reclaim.replay.experiments.margins.closed_loop.simulate", remember)
    run_cells(source_of(cell_dataset), estimates, Scheduling(), ["borg"])
    borg = [(work, reserved, plan) for work, reserved, plan in told if len(reserved) == 3]
    baseline, medium, aggressive = range(3)
    work, reserved, _ = borg[0]
    for k in range(3):
        np.testing.assert_allclose(reserved[k, :, 0] * 1e9, k * n + work.row, atol=0.1)  # of the row before: from 1 on
    slots = estimates.period.slots.count
    edges = [-(-slots * quarter // 4) for quarter in range(5)]
    order = (baseline, aggressive, medium, baseline)
    turns = [margin for margin, a, b in zip(order, edges, edges[1:], strict=False) for _ in range(a, b)]
    assert sorted(plan for *_, plan in borg) == sorted([*([k] * slots for k in range(3)), turns])


def test_each_quarter_of_the_sequence_says_its_own_task_time(loop: dict[str, Any]) -> None:
    limit, borg, _ = loop["estimators"]
    assert limit["runs"]["none"]["task_days"] == pytest.approx(30 * loop["length_hours"] / 24)  # no task waits
    hours = [part["end_hours"] - part["start_hours"] for part in loop["segments"]]
    days = [week["task_days"] for week in borg["sequence"]]
    assert days == pytest.approx([30 * h / 24 for h in hours], rel=0.01)  # except for a task that is placed again


def test_every_number_of_a_part_of_the_sequence_is_of_its_own_slots() -> None:
    ticks = np.zeros(4, TICK)
    ticks["running"] = 100, 188, 276, 300  # of five minutes: a day, and two
    ticks["kills"] = [[1, 0, 2, 0], [0, 2, 0, 5], [0, 0, 0, 7], [1, 1, 4, 0]]  # above the limit, machine, preempted
    ticks["pending"] = [[1, 2, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    for name, cpu, memory in (("capacity", 8, 16), ("limit", 10, 12), ("reserved", 6, 4), ("use", 4, 2)):
        ticks[name] = cpu, memory
    ticks["in_reclaimed"] = [[2, 0], [3, 6], [0, 3], [0, 0]]
    outcome: Any = SimpleNamespace(ticks=ticks, workload=SimpleNamespace(slot_s=300))
    first, second, empty = _weeks(outcome, [("baseline", (0, 2)), ("medium", (2, 4)), ("aggressive", (4, 4))])
    of_cell = {
        "granted_cpu": 10 / 8, "granted_memory": 12 / 16, "reserved_cpu": 6 / 8, "reserved_memory": 4 / 16,
        "utilisation_cpu": 4 / 8, "utilisation_memory": 2 / 16,
    }  # fmt: skip
    assert first == {
        "margin": "baseline", "task_days": 1.0, "oom_kills": 3, "oom_kills_per_1000_task_days": 3000.0,
        "preempted_per_1000_task_days": 2000.0, "waiting_tasks": 2.0,
        "in_reclaimed_cpu": 5 / 20, "in_reclaimed_memory": 6 / 24, **of_cell,
    }  # fmt: skip
    assert second == {
        "margin": "medium", "task_days": 2.0, "oom_kills": 2, "oom_kills_per_1000_task_days": 1000.0,
        "preempted_per_1000_task_days": 2000.0, "waiting_tasks": 1.5,
        "in_reclaimed_cpu": 0.0, "in_reclaimed_memory": 3 / 24, **of_cell,
    }  # fmt: skip
    nothing = dict.fromkeys(first)
    assert empty == nothing | {"margin": "aggressive", "task_days": 0.0, "oom_kills": 0}


def test_of_an_estimator_the_course_is_that_of_the_margins_in_turn_and_kills_are_those_of_each_order() -> None:
    def ran(kills: int) -> dict[str, Any]:
        return {"summary": {"oom_kills": kills}, "weeks": [{"oom_kills": kills}], "over_time": {"use_cpu": [kills]}}

    under = {"baseline": [ran(1), ran(3)], "medium": [ran(4), ran(8)]}
    found = _of_estimator("a", "learned", {**under, IN_TURN: [ran(10), ran(30)]})
    assert found["runs"] == {"baseline": {"oom_kills": 2.0}, "medium": {"oom_kills": 6.0}}
    assert found["kills_by_order"] == {"baseline": [1, 3], "medium": [4, 8]}
    assert (found["sequence"], found["over_time"]) == ([{"oom_kills": 20.0}], {"use_cpu": [20.0]})
    alone = _of_estimator("limit", "limit", under)
    assert (alone["sequence"], alone["over_time"]) == (None, {"use_cpu": [2.0]})


def test_a_cell_run_in_several_orders_is_their_mean(
    loop: dict[str, Any], cell_dataset: Path, estimates: Estimates
) -> None:
    source = source_of(cell_dataset)
    other = run_cells(source, estimates, Scheduling(seed=2), ["borg"])
    both = run_cells(source, estimates, Scheduling(), ["borg"], orders=2)
    assert both["orders"] == 2
    for a, b, ab in zip(loop["estimators"], other["estimators"], both["estimators"], strict=True):
        assert ab["runs"] == mean_of([a["runs"], b["runs"]])
        assert ab["sequence"] == (mean_of([a["sequence"], b["sequence"]]) if a["sequence"] else None)
        assert ab["over_time"] == mean_of([a["over_time"], b["over_time"]])
        assert ab["kills_by_order"] == {m: a["kills_by_order"][m] + b["kills_by_order"][m] for m in a["runs"]}


def test_a_mean_keeps_words_and_is_unknown_where_one_of_its_numbers_is() -> None:
    a, b = {"margin": "medium", "x": [1, None], "y": 2.0}, {"margin": "medium", "x": [2, 3.0], "y": 4.0}
    assert mean_of([a, b]) == {"margin": "medium", "x": [1.5, None], "y": 3.0}


def test_the_same_seed_gives_the_same_numbers(loop: dict[str, Any], cell_dataset: Path, estimates: Estimates) -> None:
    assert run_cells(source_of(cell_dataset), estimates, Scheduling(), ["borg"]) == loop


@pytest.mark.parametrize("engine", [Engine(workers=1), pytest.param(Engine("processes", 2), marks=pytest.mark.slow)])
def test_the_runs_do_not_depend_on_the_engine_nor_on_the_number_of_workers(
    loop: dict[str, Any], cell_dataset: Path, estimates: Estimates, engine: Engine
) -> None:
    source = replace(source_of(cell_dataset), engine=engine)
    assert run_cells(source, estimates, Scheduling(), ["borg"]) == loop
    assert set(source.seconds) == {f"closed_loop/{e['name']}" for e in loop["estimators"]}


def test_what_follows_runs_the_cell_by_what_it_reserves(
    loop: dict[str, Any], cell_dataset: Path, estimates: Estimates
) -> None:
    asked = []

    def follow(name: str) -> Mapping[str, NDArray[np.float64]]:
        asked.append(name)
        return estimates.reservations(name)

    followed = run_cells(source_of(cell_dataset), estimates, Scheduling(), ["borg-online"], 1, follow)
    assert asked == ["borg"]
    ran = {e["name"]: e for e in followed["estimators"]}
    assert ran["borg-online"]["kind"] == "statistical"
    assert ran["borg-online"]["runs"] == {e["name"]: e for e in loop["estimators"]}["borg"]["runs"]


def test_a_trace_without_machines_is_not_run_and_says_why(dataset: Path) -> None:
    source = source_of(dataset)
    none = run_cells(source, estimate_all(source, ReplayConfig(estimators=("borg", "limit"))), Scheduling(), ["borg"])
    assert none["estimators"] == []
    assert cell_in_turn({"closed_loop": none}) is None
    assert "no machine with a capacity" in " ".join(none["notes"])
    assert cells_table(none).rows == kills_table(none).rows == ()


def test_only_a_lack_of_machines_becomes_a_note(
    cell_dataset: Path, estimates: Estimates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("another setting is wrong")

    monkeypatch.setattr("reclaim.replay.experiments.margins.closed_loop.machines_of", refuse)
    with pytest.raises(ConfigError, match="another setting"):
        run_cells(source_of(cell_dataset), estimates, Scheduling(), ["borg"])


def test_the_estimators_beside_are_those_that_reclaim_most_on_validation_rows(estimates: Estimates) -> None:
    reclaimed = {n: sum(estimates.calibrations[n].reclaimed["medium"]) for n in ("borg", "percentile")}
    assert most_reclaiming(estimates, ["borg", "percentile", "limit"], 1) == [
        max(reclaimed, key=lambda n: reclaimed[n])
    ]
    assert len(most_reclaiming(estimates, ["borg", "percentile", "limit"], 9)) == 2


@pytest.mark.parametrize(
    ("rates", "order"),
    [((1.0, 2.0, 3.0), "rising"), ((1.0, 3.0, 2.0), "not rising"), ((0.0, 2.0, 2.0), "not rising"), ((0,) * 3, "none")],
)
def test_the_table_of_kills_has_rates_at_each_margin_and_in_each_part_and_their_order(
    loop: dict[str, Any], rates: tuple[float, float, float], order: str
) -> None:
    borg = loop["estimators"][1]
    key = "oom_kills_per_1000_task_days"
    runs = {m: borg["runs"][m] | {key: rate} for m, rate in zip(MARGIN_NAMES, rates, strict=True)}
    parts = [part | {key: float(i)} for i, part in enumerate(borg["sequence"])]
    kills = {"baseline": [1.0, 2.0], "medium": [2.0, 2.0], "aggressive": [3.0, 2.0]}
    changed = borg | {"runs": runs, "sequence": parts, "kills_by_order": kills}
    (row,) = kills_table(loop | {"orders": 2, "estimators": [loop["estimators"][0], changed]}).as_records()
    assert row["estimator"] == "borg"
    assert tuple(row[m] for m in MARGIN_NAMES) == rates
    assert row["order"] == order
    assert row["rising in simulations"] == "1 of 2"
    assert row["kills"] == 12
    assert [row[f"part {i}"] for i in (1, 2, 3, 4)] == [0.0, 1.0, 2.0, 3.0]


def test_the_tables_have_a_row_for_every_run_and_every_part(loop: dict[str, Any]) -> None:
    runs = [
        ("limit", "none"), ("borg", "baseline"), ("borg", "medium"), ("borg", "aggressive"), ("oracle", "none"),
    ]  # fmt: skip
    assert [row[:2] for row in cells_table(loop).rows] == runs
    assert [row[:2] for row in waiting_table(loop).rows] == runs
    assert len(parts_table(loop).rows) == 4
    of_cpu = {"judged": ["cpu"], "lacks": ["memory_mean", "memory_max"]}
    for dataset, panels in (({}, 4), (of_cpu, 2)):  # where memory is not measured nothing runs out of it
        figure = cell_in_turn({"closed_loop": loop, "dataset": dataset})
        assert figure is not None
        assert len(figure.axes) == panels


def test_models_foresee_machines_together_next_to_sums_at_the_same_budgets(cell_dataset: Path, bundle: Bundle) -> None:
    source = replace(source_of(cell_dataset), bundles={"network": bundle})
    config = ReplayConfig(estimators=("borg", "percentile", "limit"), budgets=Budgets(0.02, 0.1))
    estimates = estimate_all(source, config)
    contenders = MachineContenders.set_on_validation(source, estimates, config, ["network", "borg"])
    found = run_cells(source, estimates, Scheduling(), ["borg"], contenders=contenders)
    ran = {e["name"]: e for e in found["estimators"]}
    by_machine = ["network (machine)", "network (machine, following)", "network (machine, held)"]
    assert list(ran) == ["limit", "borg", "network (sum)", "borg (sum)", *by_machine, "oracle"]
    assert [ran[name]["kind"] for name in list(ran)[2:7]] == [SUM_OF_TASKS] * 2 + [LEARNED_MACHINE] * 3
    assert [ran[name]["sequence"] is None for name in list(ran)[1:7]] == [False, True, True, False, False, False]
    machine = ran["network (machine)"]["runs"]
    reserved = [machine[m]["reserved_memory"] for m in MARGIN_NAMES]
    assert reserved == sorted(reserved, reverse=True)
    assert ran["network (sum)"]["runs"] != ran["borg (sum)"]["runs"]
    # the cell is large enough for all, so each slot reserves what is foreseen of the tasks that the scheduler put
    # together: less than their limits, and no less than they use
    for run in machine.values():
        assert run["utilisation_cpu"] <= run["reserved_cpu"] <= run["granted_cpu"]
    workload = workload_of(source, estimates.period, machines_of(source.dataset, *_period(estimates)))
    foreseer, estimator = contenders.machines["network (machine)"]
    by = ByMachine(foreseer.current_terms(workload.row), estimator, (config.budgets.baseline,))
    outcome = simulate(workload, machines_of(source.dataset, *_period(estimates)), by.alone(), by_machine=by,
                       horizon_s=config.horizon_s)  # fmt: skip
    assert machine["baseline"] == summary(outcome)
    assert len(cells_table(found).rows) == 1 + 3 * 6 + 1
    recorded = {
        run.name: run
        for run in runs({"dataset": {}, "estimators": [{"name": "borg", "results": {}}], "closed_loop": found})
    }
    assert "borg/medium" not in recorded  # here without results of its tasks, which its own runs would have
    machine_run = recorded["network (machine)/medium"]
    assert machine_run.tags["kind"] == LEARNED_MACHINE
    assert machine_run.metrics["closed_loop.in_reclaimed_cpu"] == machine["medium"]["in_reclaimed_cpu"]
    assert {column.metric for column in COLUMNS} <= set(machine_run.metrics)


def _period(estimates: Estimates) -> tuple[int, int]:
    return estimates.period.slots.first_us, estimates.period.slots.stop_us
