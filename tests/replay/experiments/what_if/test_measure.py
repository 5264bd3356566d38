"""The what-if experiment: the search by hand, smaller and larger cells, and a whole run on a small cell."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data.core.engine.workers import Engine
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.closed_loop.foreseen import ByMachine
from reclaim.replay.closed_loop.outcome import summary
from reclaim.replay.closed_loop.simulate import Scheduling, simulate
from reclaim.replay.closed_loop.workload import CellMachines, NoMachinesError, Workload, machines_of, workload_of
from reclaim.replay.experiment import LEARNED_MACHINE, SUM_OF_TASKS, Source
from reclaim.replay.experiments.what_if.measure import (
    EXPERIMENT,
    GRID,
    Cells,
    WhatIfConfig,
    definitions,
    fewest_within,
    measure,
    over_orders,
    within,
)
from reclaim.replay.experiments.what_if.page import KILLS, PENDING, summary_table
from reclaim.replay.open_loop.estimates import LIMIT, Estimates, estimate_all
from reclaim.replay.open_loop.machines import MachineContenders
from reclaim.replay.report.page import ReplayReport, render_page
from reclaim.replay.runs.run import run_experiment
from reclaim.training.bundle import Bundle
from reclaim.training.machines.following import AT_ONCE
from reclaim.training.margins.margin import Budgets
from reclaim.training.tracking import runs as tracking

CONFIG = WhatIfConfig(estimators=("borg",), margin="aggressive", orders=1)


def _point(kills: float | None, pending: float | None) -> dict[str, float | None]:
    return {KILLS: kills, PENDING: pending}


def _source(cell: Path) -> Source:
    return Source(Dataset.open(cell), FeatureSet.open(cell), {})


def test_both_budgets_must_be_kept() -> None:
    assert within(_point(5.0, 0.01), CONFIG)
    assert not within(_point(5.1, 0.0), CONFIG)
    assert not within(_point(0.0, 0.011), CONFIG)
    assert not within(_point(None, 0.0), CONFIG)


def test_the_fewest_machines_are_those_from_which_on_all_keep_the_budgets() -> None:
    good, bad = _point(0.0, 0.0), _point(9.0, 0.0)
    assert fewest_within({4: bad, 5: good, 6: good}, CONFIG) == 5
    assert fewest_within({4: good, 5: bad, 6: good}, CONFIG) == 6
    assert fewest_within({4: good, 5: good, 6: bad}, CONFIG) is None


def test_all_machines_are_the_traces_own_cell_and_more_are_clones(cell_dataset: Path) -> None:
    source = _source(cell_dataset)
    estimates = estimate_all(source, CONFIG)
    machines = machines_of(source.dataset, estimates.period.slots.first_us, estimates.period.slots.stop_us)
    workload = workload_of(source, estimates.period, machines)
    reserved = estimates.history.windows.limit[workload.row]
    cells = Cells(workload, machines, CONFIG)
    assert len(machines) == 4
    own = summary(
        simulate(
            workload, machines, reserved[None], scheduling=Scheduling(seed=CONFIG.seed), horizon_s=CONFIG.horizon_s
        )
    )
    here = cells.run(4, reserved)
    assert (here["task_days"], here["utilisation_memory"]) == (own["task_days"], own["utilisation_memory"])
    half, twice = cells.run(2, reserved), cells.run(8, reserved)
    assert twice["utilisation_memory"] == pytest.approx((own["utilisation_memory"] or 0) / 2)
    assert (half[PENDING] or 0) > 0.4
    assert twice[PENDING] == 0.0


def test_the_numbers_of_several_orders_are_their_means_with_the_range_of_those_that_have_a_budget() -> None:
    runs: list[dict[str, float | None]] = [
        {KILLS: 2.0, PENDING: 0.25, "delay": None, "known": 1.0},
        {KILLS: 7.0, PENDING: 0.5, "delay": 3.0, "known": 2.0},
    ]
    assert over_orders(runs) == {
        KILLS: 4.5, f"{KILLS}_low": 2.0, f"{KILLS}_high": 7.0,
        PENDING: 0.375, f"{PENDING}_low": 0.25, f"{PENDING}_high": 0.5,
        "delay": None, "known": 1.5,
    }  # fmt: skip


def test_the_orders_of_a_number_of_machines_are_those_of_the_seed_and_the_next_ones(cell_dataset: Path) -> None:
    source = _source(cell_dataset)
    estimates = estimate_all(source, CONFIG)
    machines = machines_of(source.dataset, estimates.period.slots.first_us, estimates.period.slots.stop_us)
    workload = workload_of(source, estimates.period, machines)
    reserved = estimates.history.windows.limit[workload.row]
    machines.state["capacity"][0] *= 2
    each = [Cells(workload, machines, replace(CONFIG, seed=5 + k)).run(3, reserved) for k in range(3)]
    of_all = Cells(workload, machines, replace(CONFIG, seed=5, orders=3)).run(3, reserved)
    assert len({run[PENDING] for run in each}) > 1
    assert of_all == over_orders([{k: v for k, v in run.items() if k[-4:] not in ("_low", "high")} for run in each])


@pytest.mark.parametrize("experiment", ["what_if", "compaction"])
def test_a_trace_without_machines_is_refused_before_anything_is_estimated(
    experiment: str, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(f"reclaim.replay.experiments.{experiment}.measure")
    monkeypatch.setattr(module, "estimate_all", None)
    with pytest.raises(NoMachinesError, match="no machine with a capacity"):
        module.EXPERIMENT.measure(_source(dataset), module.EXPERIMENT.config())


@pytest.mark.parametrize("n", [2, 4, 6])
def test_masks_and_changes_stay_with_their_machines(
    n: int, cell_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source(cell_dataset)
    estimates = estimate_all(source, CONFIG)
    machines = machines_of(source.dataset, estimates.period.slots.first_us, estimates.period.slots.stop_us)
    changes = np.zeros(4, machines.changes.dtype)
    changes["machine"], changes["capacity"] = np.arange(4), machines.ids[:, None]  # a machine's number, to know it by
    workload = workload_of(source, estimates.period, machines)
    told: list[tuple[Workload, CellMachines]] = []

    def remember(workload: Workload, machines: CellMachines, *_: object, **__: object) -> None:
        told.append((workload, machines))

    monkeypatch.setattr("reclaim.replay.experiments.what_if.measure.simulate", remember)
    monkeypatch.setattr("reclaim.replay.experiments.what_if.measure.summary", lambda _: _point(0.0, 0.0))
    marked = replace(workload, masks=np.eye(4, dtype=np.bool_))
    cells = Cells(marked, replace(machines, changes=changes), replace(CONFIG, seed=3))  # another order
    cells.run(n, np.zeros((0, 2)))
    ((asked, given),) = told
    assert len(given) == n
    np.testing.assert_array_equal(asked.masks, machines.ids[:, None] == given.ids)
    assert sorted(given.changes["machine"].tolist()) == list(range(n))
    np.testing.assert_array_equal(given.changes["capacity"][:, 0], given.ids[given.changes["machine"]])


@pytest.fixture(scope="module")
def report(cell_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> ReplayReport:
    out = tmp_path_factory.mktemp("out") / "what-if"
    return run_experiment(EXPERIMENT, cell_dataset, out, CONFIG, tracking=False)


def test_the_fewest_machines_fit_and_one_fewer_does_not(report: ReplayReport) -> None:
    borg, limit = report.results["estimators"]
    assert (borg["name"], limit["name"], limit["margin"]) == ("borg", LIMIT, "none")
    assert borg["fewest"] < limit["fewest"] <= 4
    for estimator in (borg, limit):
        points = {p["machines"]: p for p in estimator["points"]}
        assert within(points[estimator["fewest"]], CONFIG)
        assert not within(points[estimator["fewest"] - 1], CONFIG)
        assert {max(1, round(4 * share)) for share in GRID} <= points.keys()


def test_the_console_has_the_answers_and_whether_they_fit(report: ReplayReport) -> None:
    borg, limit = report.results["estimators"]
    rows = summary_table(report.results).as_records()
    assert [(row["role"], row["estimator"]) for row in rows] == [
        ("statistical", "borg"),
        ("no reclamation", LIMIT),
    ]
    assert [row["machines"] for row in rows] == [borg["fewest"], limit["fewest"]]
    assert rows[0]["saved"] == pytest.approx(1 - borg["fewest"] / limit["fewest"])
    assert rows[0]["verdict"] == "fits"


def test_the_page_opens_with_the_machines_needed_and_a_verdict(report: ReplayReport) -> None:
    page = report.page.read_text()
    opening = page[page.index('class="answer"') : page.index("<h2>")]
    fewest = report.results["estimators"][0]["fewest"]
    assert re.search(rf'<p class="value">{fewest}\s*<span class="badge good">fits</span>', opening)
    assert "<dt>budget of kills</dt><dd>5 tasks killed" in page
    own = report.results["cell"]["machines"]
    assert f"<dt>verdict</dt><dd>whether the fewest machines are no more than the cell&#39;s own {own}</dd>" in page


def test_runs_that_the_trace_ended_out_of_memory_are_shown_apart_and_not_counted(report: ReplayReport) -> None:
    recorded = {"recorded_oom_per_1000_task_days": 0.5}
    estimators = [
        e | {"points": [p | recorded for p in e["points"]]} for e in report.results["estimators"]
    ]  # fmt: skip
    results = {**report.results, "estimators": estimators}
    assert EXPERIMENT.page(results)["recorded"] == (0.5, 0.5)
    figures = {"against_machines": report.folder / "against_machines.svg"}
    assert "<dd>0.50 per 1,000 task-days</dd>" in render_page(EXPERIMENT, results, figures)
    estimators[0]["points"][0]["recorded_oom_per_1000_task_days"] = 0.75
    assert "<dd>0.50 to 0.75 per 1,000 task-days</dd>" in render_page(EXPERIMENT, results, figures)
    assert "of any cause" not in report.results["definitions"]["fits"]
    for table in EXPERIMENT.page(report.results)["points"].values():
        assert {"above own limit per 1,000", "ended so in the trace per 1,000"} <= set(table.columns) - table.percent


def test_the_page_and_the_runs_show_the_same_numbers(report: ReplayReport) -> None:
    borg, limit = EXPERIMENT.runs(report.results)
    assert borg.name == "borg/aggressive"
    assert borg.metrics["saved_share"] == pytest.approx(
        1 - (borg.metrics["fewest"] or 0) / (limit.metrics["fewest"] or 1)
    )
    assert {column.metric for column in EXPERIMENT.columns} <= borg.metrics.keys()
    page = (report.folder / "report.html").read_text()
    assert "Every size tried: borg, aggressive margin" in page
    assert (report.folder / "against_machines.png").stat().st_size > 0


def _measured(cell: Path, config: WhatIfConfig) -> dict[str, Any]:
    return measure(_source(cell), config).results


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Workload, np.ndarray]]:
    """Return what would be run, workload and reservations, and run nothing; in order of contenders by one worker."""
    runs: list[tuple[Workload, np.ndarray]] = []

    def remember(workload: Workload, _: CellMachines, reserved: np.ndarray, **__: object) -> None:
        runs.append((workload, reserved[0]))

    monkeypatch.setattr("reclaim.replay.experiments.what_if.measure.simulate", remember)
    monkeypatch.setattr("reclaim.replay.experiments.what_if.measure.summary", lambda _: _point(0.0, 0.0))
    return runs


def test_tasks_are_held_to_the_answer_to_the_window_before_and_without_reclamation_to_their_limit(
    cell_dataset: Path, told: list[tuple[Workload, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    estimates = estimate_all(_source(cell_dataset), CONFIG)
    marks = np.arange(1, len(estimates.history) + 1)[:, None] * [1e-9, 1e-9]  # each row's answer is its own number
    monkeypatch.setattr(Estimates, "reservations", lambda *_: {CONFIG.margin: marks})
    measure(replace(_source(cell_dataset), engine=Engine(workers=1)), replace(CONFIG, machines=(4,)))
    (asked, borg), (_, limit) = told
    np.testing.assert_allclose(borg[:, 0] * 1e9, asked.row, atol=0.1)  # of the row before: from 1 on
    np.testing.assert_array_equal(limit, estimates.history.windows.limit[asked.row])


def test_without_reclamation_nothing_is_reserved_where_no_limit_is_known(
    cell_dataset: Path, told: list[tuple[Workload, np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    estimates = estimate_all(_source(cell_dataset), CONFIG)
    estimates.history.windows.limit[estimates.period.rows[:50], 1] = np.nan
    monkeypatch.setattr("reclaim.replay.experiments.what_if.measure.estimate_all", lambda *_: estimates)
    measure(replace(_source(cell_dataset), engine=Engine(workers=1)), replace(CONFIG, machines=(4,)))
    (asked, borg), (_, limit) = told
    unknown = np.isin(asked.row, estimates.period.rows[:50])
    assert np.isfinite(borg).all()
    np.testing.assert_array_equal(limit[:, 1] == 0.0, unknown)
    assert (limit[:, 0] == 1.0).all()  # of CPU it is known


def test_the_same_seed_gives_the_same_answer(report: ReplayReport, cell_dataset: Path) -> None:
    assert _measured(cell_dataset, CONFIG)["estimators"] == report.results["estimators"]


@pytest.mark.parametrize("engine", [Engine(workers=1), pytest.param(Engine("processes", 2), marks=pytest.mark.slow)])
def test_the_answer_does_not_depend_on_the_engine_nor_on_the_number_of_workers(
    report: ReplayReport, cell_dataset: Path, engine: Engine
) -> None:
    results = measure(replace(_source(cell_dataset), engine=engine), CONFIG).results
    assert results["estimators"] == report.results["estimators"]


def test_named_numbers_of_machines_are_tried_and_no_others(cell_dataset: Path) -> None:
    config = replace(CONFIG, machines=(1, 2))
    tried = _measured(cell_dataset, config)
    for estimator in tried["estimators"]:
        assert [p["machines"] for p in estimator["points"]] == [1, 2]
        assert estimator["fewest"] is None
    for row in summary_table(tried).as_records():
        assert (row["machines"], row["saved"], row["verdict"]) == (None, None, "does not fit")
        assert row["waiting"] != 0  # on the largest number tried
    assert EXPERIMENT.runs(tried)[0].metrics["saved_share"] is None


def test_kills_are_unknown_and_not_0_where_memory_was_not_measured(report: ReplayReport) -> None:
    dataset = report.results["dataset"] | {"lacks": ["memory_max", "memory_mean"]}
    unmeasured = {**report.results, "dataset": dataset}
    for run in EXPERIMENT.runs(unmeasured):
        of_memory = (KILLS, "utilisation_memory", "runs_killed", "own_limit_per_1000_task_days", "times_out_of_memory")
        assert [run.metrics[name] for name in of_memory] == [None] * len(of_memory)
        assert None not in (run.metrics["utilisation_cpu"], run.metrics["granted_memory"])
    assert all(run.metrics[KILLS] is not None for run in EXPERIMENT.runs(report.results))
    figures = {"against_machines": report.folder / "against_machines.svg"}
    pages = [render_page(EXPERIMENT, results, figures) for results in (report.results, unmeasured)]
    assert [page.count("<dt>kills<") for page in pages] == [2, 0]
    drawn = [EXPERIMENT.figures["against_machines"](results) for results in (report.results, unmeasured)]
    assert [len(figure.axes) if figure else 0 for figure in drawn] == [2, 1]
    assert "within the budget of waiting" in summary_table(unmeasured).caption


def test_the_lines_of_ten_contenders_look_different(report: ReplayReport) -> None:
    of_tasks, of_machines = ("a/1", "borg", "vpa"), ("a/1 (machine)", "a/1 (machine, following)", "a/1 (machine, held)")
    kinds = dict.fromkeys(of_tasks, "statistical") | {f"{name} (sum)": SUM_OF_TASKS for name in of_tasks}
    kinds |= dict.fromkeys(of_machines, LEARNED_MACHINE) | {LIMIT: LIMIT}
    points = report.results["estimators"][0]["points"]
    named = [{"name": n, "kind": k, "margin": "medium", "fewest": 1, "points": points} for n, k in kinds.items()]
    figure = EXPERIMENT.figures["against_machines"]({**report.results, "estimators": named})
    assert figure is not None
    lines = [line for line in figure.axes[0].get_lines() if not str(line.get_label()).startswith("_")]
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
    assert len(looks) == len(lines) == len(kinds)


def test_the_legend_fits_the_figure_also_with_long_names(report: ReplayReport) -> None:
    for k in (2, 30, 60):
        named = [{**e, "name": f"{e['name']:m<{k}}"} for e in report.results["estimators"]]
        figure = EXPERIMENT.figures["against_machines"]({**report.results, "estimators": named})
        assert figure is not None
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_the_summary_shows_the_fewest_machines_of_those_that_kept_the_budget_of_peaks() -> None:
    def tried(way: str, fewest: int | None, passed: float) -> dict[str, Any]:
        point = {**_point(0.0, 0.0), "machines": 9, "machines_over_cpu": 0.0, "machines_over_memory": passed}
        name, points = f"a/1 (machine{way})", [{**point, "machines": fewest or 9}]
        return {"name": name, "kind": LEARNED_MACHINE, "margin": "aggressive", "fewest": fewest, "points": points}

    def shown(*estimators: dict[str, Any]) -> tuple[object, ...]:
        asked = {"searched": False, "peaks_budget": 0.01}
        results = {"dataset": {}, "cell": {"machines": 9}, "asked": asked, "estimators": estimators}
        row = summary_table(results).as_records()[0]
        return row["estimator"], row["machines"], row["peaks passed"]

    over, kept, wide = tried("", 5, 0.02), tried(", following", 6, 0.0125), tried(", held", 7, 0.0)
    assert shown(over, kept, wide) == ("a/1, following", 6, 0.0125)
    assert shown(over, wide) == ("a/1, held", 7, 0.0)
    assert shown(over, tried(", held", None, 0.0)) == ("a/1", 5, 0.02)  # one that fits on none comes last


def test_of_named_numbers_of_machines_no_more_is_said_than_was_tried(cell_dataset: Path) -> None:
    config = replace(CONFIG, machines=(8, 6))
    found = measure(_source(cell_dataset), config)
    borg, limit = EXPERIMENT.runs(found.results)
    assert (borg.metrics["fewest"], limit.metrics["fewest"]) == (6, 6)
    assert borg.metrics["saved_share"] is limit.metrics["saved_share"] is None
    for row in summary_table(found.results).as_records():
        assert (row["machines"], row["saved"], row["verdict"]) == (6, None, "fits")
    assert "one machine fewer" not in found.definitions["fewest machines"]
    assert "one machine fewer was tried" in definitions(WhatIfConfig())["fewest machines"]


def test_a_larger_workload_needs_more_machines(report: ReplayReport, cell_dataset: Path) -> None:
    grown = _measured(cell_dataset, replace(CONFIG, growth=2.0))
    assert grown["cell"]["runs"] == 2 * report.results["cell"]["runs"]
    for after, before in zip(grown["estimators"], report.results["estimators"], strict=True):
        assert after["fewest"] > before["fewest"]


def test_a_smaller_workload_is_a_part_of_it_and_needs_no_more_machines(
    report: ReplayReport, cell_dataset: Path
) -> None:
    config = replace(CONFIG, growth=0.5)
    smaller = _measured(cell_dataset, config)
    assert 0 < smaller["cell"]["runs"] < report.results["cell"]["runs"]
    for after, before in zip(smaller["estimators"], report.results["estimators"], strict=True):
        assert after["fewest"] <= before["fewest"]
    assert summary_table(smaller).as_records()[0]["verdict"] == "fits"
    with pytest.raises(ConfigError, match=r"growth=0\.001 leaves none of"):
        _measured(cell_dataset, replace(config, growth=0.001))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"margin": "none"}, "margin must be one of baseline, medium, aggressive, got none"),
        ({"oom_budget": -1.0}, "oom_budget must be 0 or more"),
        ({"oom_budget": float("nan")}, "oom_budget must be 0 or more"),
        ({"pending_budget": 1.1}, "pending_budget must be between 0 and 1"),
        ({"machines": (3, 0)}, "machines must be at least 1, got 0"),
        ({"orders": 0}, "orders must be at least 1, got 0"),
        ({"growth": 0.0}, "growth must be above 0, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WhatIfConfig(**setting)


def test_a_model_is_asked_by_machine_too_next_to_sums_at_the_same_budgets(
    cell_dataset: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = replace(_source(cell_dataset), bundles={"network": bundle})
    config = replace(CONFIG, machines=(3, 4), budgets=Budgets(0.02, 0.1), tune=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    report = run_experiment(EXPERIMENT, cell_dataset, tmp_path / "out", config, bundles=dict(source.bundles))
    results = report.results
    recorded = {run.name: run.tags for run in tracking.find_runs("what-if")}
    for name, kind in (("network (machine)", LEARNED_MACHINE), ("network (sum)", SUM_OF_TASKS)):
        tags = recorded[f"{name}/aggressive"]
        assert (tags["kind"], tags["estimator_of_tasks"], tags["model.kind"]) == (kind, "network", bundle.kind)
    assert recorded["borg (sum)/aggressive"]["estimator_of_tasks"] == "borg"
    assert "model.kind" not in recorded["borg (sum)/aggressive"]
    assert "estimator_of_tasks" not in recorded["network/aggressive"]
    assert [(e["name"], e["kind"]) for e in results["estimators"]] == [
        ("network", "learned"), ("borg", "statistical"), ("network (sum)", SUM_OF_TASKS), ("borg (sum)", SUM_OF_TASKS),
        (LIMIT, LIMIT), ("network (machine)", LEARNED_MACHINE), ("network (machine, following)", LEARNED_MACHINE),
        ("network (machine, held)", LEARNED_MACHINE),
    ]  # fmt: skip
    machine, following, held = results["estimators"][-3:]
    estimates = estimate_all(source, config)
    contenders = MachineContenders.set_on_validation(source, estimates, config)
    slots = estimates.period.slots
    machines = machines_of(source.dataset, slots.first_us, slots.stop_us)
    workload = workload_of(source, estimates.period, machines)
    foreseer, estimator = contenders.machines["network (machine)"]
    by = ByMachine(foreseer.current_terms(workload.row), estimator, (config.budgets.aggressive,))
    expected = Cells(workload, machines, config).run(3, by.alone()[0], by)
    assert machine["points"][0] == {"machines": 3, "share": 0.75, **expected}
    for one, at_once in ((following, 1.0), (held, AT_ONCE)):
        expected = Cells(workload, machines, config).run(3, by.alone()[0], replace(by, at_once=at_once))
        assert one["points"][0] == {"machines": 3, "share": 0.75, **expected}
    rows = [row["role"] for row in summary_table(results).as_records()]
    assert rows == ["learned", "statistical", LEARNED_MACHINE, SUM_OF_TASKS, "no reclamation"]
    assert "sum of tasks; learned machine" in definitions(config)
