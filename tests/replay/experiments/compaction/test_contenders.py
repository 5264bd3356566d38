"""Contenders that keep budgets of machine peaks: margins on validation machines, checkpoints, and the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reclaim.replay.closed_loop.constraints import Constraints
from reclaim.replay.experiment import LEARNED_MACHINE, SUM_OF_TASKS, Source
from reclaim.replay.experiments.compaction import measure as measuring
from reclaim.replay.experiments.compaction.checkpoint import take_checkpoint
from reclaim.replay.experiments.compaction.measure import EXPERIMENT
from reclaim.replay.experiments.compaction.packing import Foreseen
from reclaim.replay.experiments.compaction.page import by_machine_table
from reclaim.replay.open_loop.estimates import LIMIT, Estimates
from reclaim.replay.open_loop.machines import Foreseer, MachineContenders, ValidationMachines
from reclaim.replay.report.page import ReplayReport
from reclaim.replay.runs.run import run_experiment
from reclaim.training.bundle import Bundle
from reclaim.training.machines.terms import T_HELD, T_LIMIT
from reclaim.training.margins.answers import Widened
from reclaim.training.margins.calibrate import guarded_reservations
from reclaim.training.margins.margin import Margin
from reclaim.training.margins.violation import violates
from tests.replay.experiments.compaction.conftest import CONFIG


@pytest.fixture(scope="module")
def report(cell_dataset: Path, bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> ReplayReport:
    out = tmp_path_factory.mktemp("out") / "compaction"
    return run_experiment(EXPERIMENT, cell_dataset, out, CONFIG, bundles={"network": bundle}, tracking=False)


def test_results_count_the_validation_moments_that_were_packed(report: ReplayReport) -> None:
    counts = report.results["packed"]
    assert counts["packed"] == counts["asked"] > 0
    assert counts["left_out"] == {}
    machines = report.results["checkpoints"][0]["machines"]
    assert counts["few"] == (counts["packed"] * machines * CONFIG.budgets.aggressive < 1)
    text = f"packed at {counts['packed']} of {counts['asked']} moments"
    assert text in report.page.read_text()


def test_a_sum_has_the_least_margin_that_keeps_the_budget_of_machines(
    source: Source, estimates: Estimates, contenders: MachineContenders
) -> None:
    history, features = estimates.history, source.features
    before = ValidationMachines.lay_out(history, estimates.period.slots.slot_us, CONFIG.horizon_s)
    assert np.isin(history.source_row[before.rows], features.row[features.valid_rows()]).all()
    settings = contenders.sums["borg"]

    def shares(margin: str, change: float) -> list[float]:
        of = settings[margin]
        assert isinstance(of, Margin)
        changed = {name: replace(of, share=tuple(s + change for s in of.share)) for name in settings}
        held = guarded_reservations(estimates.answers["borg"], history.windows, changed)[margin][before.rows]
        found = []
        for r, at in enumerate(before.at):
            assert at is not None
            found.append(float(violates(at.peak, at.total(held[at.rows, r])).mean()))
        return found

    for margin, budget in (("baseline", 0.02), ("aggressive", 0.1)):
        assert max(shares(margin, 1e-6)) <= budget
        assert min(shares(margin, -0.02)) > budget
    # tasks may violate far more often than machines
    own = estimates.calibrations["borg"].settings["aggressive"]
    aggressive = settings["aggressive"]
    assert isinstance(own, Margin)
    assert isinstance(aggressive, Margin)
    assert all(mine < theirs for mine, theirs in zip(aggressive.share, own.share, strict=True))


def test_a_sum_has_the_least_baseline_that_keeps_its_budget_where_each_budget_has_answers_of_its_own(
    estimates: Estimates,
) -> None:
    history, alike = estimates.history, estimates.answers["borg"]
    assert isinstance(alike, Widened)
    said = alike.of["aggressive"]
    chosen = np.random.default_rng(0).uniform(0.2, 1.0, said.reservation.shape)  # by other settings
    answers = Widened({"baseline": replace(said, reservation=said.reservation * chosen), "aggressive": said})
    before = ValidationMachines.lay_out(history, estimates.period.slots.slot_us, CONFIG.horizon_s)
    settings = before.settings_within(answers, history, CONFIG.budgets)

    def shares(margin: str, change: float) -> list[float]:
        of = settings[margin]
        assert isinstance(of, Margin)
        changed = {**settings, margin: replace(of, share=tuple(s + change for s in of.share))}
        held = guarded_reservations(answers, history.windows, changed)[margin][before.rows]
        pairs = [(r, at) for r, at in enumerate(before.at) if at is not None]
        return [float(violates(at.peak, at.total(held[at.rows, r])).mean()) for r, at in pairs]

    for margin, budget in (("baseline", 0.02), ("aggressive", 0.1)):
        assert max(shares(margin, 1e-6)) <= budget
        assert min(shares(margin, -0.05)) > budget


def test_a_task_counts_as_foreseen_after_its_last_window_and_its_limit_before(
    source: Source, estimates: Estimates, bundle: Bundle
) -> None:
    history = estimates.history
    foreseer = Foreseer(bundle, source.features, history, CONFIG.horizon_s)
    rows = np.arange(40, 60)
    current = foreseer.current_terms(rows)
    np.testing.assert_array_equal(current, foreseer.terms(rows - 1))
    assert (current[..., T_LIMIT] > 0).all()
    first = np.flatnonzero(history.previous < 0)[:3]
    limits = foreseer.current_terms(first)
    np.testing.assert_array_equal(limits[..., T_HELD], history.windows.limit[first])
    assert (np.delete(limits, T_HELD, axis=-1) == 0).all()
    windows = history.windows
    scheduled, limit = windows.scheduled_us.copy(), windows.limit.copy()
    scheduled[45:], limit[50] = 1, limit[50] * 2
    changed = replace(foreseer, history=replace(history, windows=replace(windows, scheduled_us=scheduled, limit=limit)))
    held = changed.current_terms(rows)[..., 0, T_HELD] > 0
    assert np.flatnonzero(held).tolist() == [5, 10, 11]  # a new run; another limit, and the old one again


def test_a_task_counts_as_foreseen_where_only_the_limit_of_another_resource_is_unknown(
    source: Source, estimates: Estimates, bundle: Bundle
) -> None:
    history, rows = estimates.history, np.arange(40, 60)
    limit = history.windows.limit.copy()
    limit[:, 1] = np.nan
    without = replace(history, windows=replace(history.windows, limit=limit))
    foreseer = Foreseer(bundle, source.features, history, CONFIG.horizon_s)
    current = replace(foreseer, history=without).current_terms(rows)
    np.testing.assert_array_equal(current[:, 0], foreseer.current_terms(rows)[:, 0])
    assert (current[:, 1] == 0).all()


def test_a_checkpoint_has_what_machines_need_together(
    source: Source, estimates: Estimates, contenders: MachineContenders
) -> None:
    time_us = estimates.period.slots.first_us + 3_600_000_000
    constraints = Constraints.read(source.dataset)
    taken = take_checkpoint(source, estimates, constraints, time_us, CONFIG.horizon_s, contenders)
    windows = estimates.history.windows
    rows = np.flatnonzero(windows.start_us == time_us)
    foreseer, estimator = contenders.machines["network (machine)"]
    for margin, budget in CONFIG.budgets.by_margin.items():
        foreseen = taken.reserved["network (machine)", margin]
        assert isinstance(foreseen, Foreseen)
        np.testing.assert_array_equal(foreseen.terms, foreseer.terms(estimates.history.previous[rows]))
        everyone = foreseen.terms.sum(axis=0)[None]
        np.testing.assert_array_equal(foreseen.of_sets(everyone), estimator.peak(everyone, budget))


def test_the_page_compares_what_keeps_a_budget_of_machines(report: ReplayReport) -> None:
    results = report.results
    assert "At budgets of machine peaks" in (report.folder / "report.html").read_text()
    kinds = {e["name"]: e["kind"] for e in results["estimators"]}
    assert kinds == {
        "network": "learned", "borg": "statistical", "network (sum)": SUM_OF_TASKS, "borg (sum)": SUM_OF_TASKS,
        "network (machine)": LEARNED_MACHINE, LIMIT: LIMIT, "oracle": "oracle",
    }  # fmt: skip
    machine = next(e["results"]["baseline"] for e in results["estimators"] if e["name"] == "network (machine)")
    assert machine["beyond"] == machine["beyond_tasks"] == {"cpu": None, "memory": None}
    assert machine["beyond_alone"] is None
    rows = by_machine_table(results).as_records()
    assert len(rows) == 3 * 3
    for row in rows:
        assert row["trials"] == (None if row["role"] == LEARNED_MACHINE else 3)
        needed = next(e["results"] for e in results["estimators"] if e["name"] == row["estimator"])[row["budget of"]]
        assert row["machines beyond, CPU"] == needed["passed"]["cpu"]["value"]
        assert row["machines out of memory"] == needed["over"]["memory"]["value"]
    summary = [row["role"] for row in EXPERIMENT.summary(results).as_records()]
    assert summary == ["no reclamation", "learned", "statistical", LEARNED_MACHINE, SUM_OF_TASKS, "oracle"]
    assert {"machines beyond", "sum of tasks; learned machine"} <= results["definitions"].keys()


def test_production_may_be_placed_by_what_is_reserved_alone(
    source: Source, estimates: Estimates, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = estimates.history.windows
    upper = replace(windows, tier=np.full(len(windows), 3, np.int8))
    monkeypatch.setattr(
        measuring, "estimate_all", lambda *_: replace(estimates, history=replace(estimates.history, windows=upper))
    )
    alone = replace(source, bundles={})
    needed = {}
    for by_limit in (True, False):
        found = EXPERIMENT.measure(alone, replace(CONFIG, production_by_limit=by_limit)).results
        assert [c["production"] for c in found["checkpoints"]] == [30]
        of = {e["name"]: e["results"] for e in found["estimators"]}
        needed[by_limit] = of["borg"]["aggressive"]["machines"]["value"], of[LIMIT]["none"]["machines"]["value"]
    assert needed[True][0] == needed[True][1] == needed[False][1]
    assert needed[False][0] < needed[False][1]
