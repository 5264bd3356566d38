"""A closed loop whose machines are foreseen together: cells worked by hand, and what sums of reservations say, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.replay.closed_loop.foreseen import ByMachine, Placing, add_terms
from reclaim.replay.closed_loop.preemption import preemption_cost
from reclaim.replay.closed_loop.records import PENDING, PRODUCTION, RUNNING
from reclaim.replay.closed_loop.rooms import could_fit
from reclaim.replay.closed_loop.simulate import SETTINGS, Outcome, Scheduling, simulate
from reclaim.replay.open_loop.machines import MachineContenders
from reclaim.training.machines.curve import INPUTS, MachineCurve
from reclaim.training.machines.estimator import BOUND, Curves, MachineEstimator
from reclaim.training.machines.following import AT_ONCE
from reclaim.training.machines.terms import N_TERMS, RATES, T_BAND, T_HELD, T_LIMIT, T_MEAN, T_SQUARES, T_USAGE
from tests.replay.small_cells import SLOT_US, Change, SmallCell, Task, cells, killed, machines, states, workload

MEAN: Curves = (MachineCurve(tuple(0.01 * k for k in range(38)), tuple(float(name == "mean") for name in INPUTS)),) * 2
"""Reserves the sum of means; at the first budget nothing on top."""
HALF = 0.5
"""The first budget."""


def run_together(
    *tasks: Task, means: Sequence[float | list[float]], slots: int = 10, gives_way: bool = False
) -> Outcome:
    """Run tasks, foreseen by a mean each, which is the reservation of its rows; its first row counts the limit."""
    made, _ = workload(*tasks, slots=slots)
    estimator = MachineEstimator(MEAN, 3_600, (1.0, 1.0))
    by = ByMachine(terms_of(made, tasks, means), estimator, (HALF,))
    scheduling = Scheduling(checkpoint_s=0.0, gives_way=gives_way)
    return simulate(made, machines((1.0, 1.0)), by.alone(), scheduling=scheduling, by_machine=by)


def terms_of(made: Any, tasks: Sequence[Task], means: Sequence[float | list[float]]) -> np.ndarray:
    terms = np.zeros((len(made.tape), 2, N_TERMS))
    for run, task, mean in zip(made.runs, tasks, means, strict=True):
        rows = terms[run["first"] : run["stop"]]
        rows[..., T_LIMIT] = made.tape["limit"][run["first"] : run["stop"]]
        rows[..., T_MEAN] = np.broadcast_to(mean, len(rows))[:, None]
        rows[..., T_BAND:] = rows[..., T_MEAN, None]
        rows[..., T_SQUARES] = rows[..., T_LIMIT] ** 2
        if not task.carried:
            held = rows[0, :, T_LIMIT].copy()
            rows[0] = 0.0
            rows[0, :, T_HELD] = held
    return terms


def test_a_new_run_counts_its_limit_beside_what_is_foreseen_and_then_its_share() -> None:
    first = Task([(0.1, 0.1)] * 9, limit=(0.8, 0.8), carried=True)
    second = Task([(0.1, 0.1)] * 9, limit=(0.6, 0.6), at=0.5)
    outcome = run_together(first, second, means=[0.2, 0.3])
    assert outcome.runs["first_placed_us"].tolist() == [0, 0.5 * SLOT_US]  # 0.2 and 0.6 fit
    assert outcome.ticks["reserved"][:4, 0].tolist() == pytest.approx([0.2, 0.2 + 0.6, 0.2 + 0.3, 0.5])
    refused = run_together(first, replace(second, limit=(0.81, 0.81)), means=[0.2, 0.3], slots=5)
    assert refused.runs["state"][1] == PENDING


def test_a_machine_reserves_no_less_than_its_runs_use() -> None:
    use = [(0.1, 0.1), (0.5, 0.1), (0.1, 0.6), (0.1, 0.1)]
    outcome = run_together(Task(use, (0.8, 0.8), carried=True), means=[0.2])
    np.testing.assert_allclose(outcome.ticks["reserved"][:4], [(0.2, 0.2), (0.5, 0.2), (0.2, 0.6), (0.2, 0.2)])


@pytest.mark.parametrize("curves", [BOUND, MEAN], ids=["bound", "fitted"])
def test_the_cell_reserves_to_the_same_bits_as_the_estimator(curves: Curves) -> None:
    rng = np.random.default_rng(2)
    tasks = [Task([(0.01, 0.01)] * 6, (0.2, 0.3), carried=True) for _ in range(3)]
    made, _ = workload(*tasks, slots=5)
    terms = rng.random((len(made.tape), 2, N_TERMS)) * 0.1
    terms[..., T_HELD] = 0.0
    terms[..., T_LIMIT], terms[..., T_USAGE] = 0.3, 0.01
    terms[..., T_BAND:] = np.sort(terms[..., T_BAND:], axis=-1)
    estimator = MachineEstimator(curves, 3_600, (1.0, 1.0))
    by = ByMachine(terms, estimator, (0.3, 0.02))
    plan = np.array([0, 0, 1, 1, 0], np.int8)
    outcome = simulate(made, machines((1.0, 1.0)), by.alone(), plan, by_machine=by)
    assert states(outcome) == [RUNNING] * 3
    assert len(RATES) == N_TERMS - T_BAND
    for slot, k in enumerate(plan.tolist()):
        sums = np.zeros((1, 2, N_TERMS))
        chain = sorted(range(3), reverse=True)  # the newest is preempted first, and counted first
        for i in chain:
            sums[0] += terms[made.runs["first"][i] + slot]
        expected = estimator.peak(sums, (0.3, 0.02)[k])[0]
        assert outcome.ticks["reserved"][slot].tolist() == expected.tolist()


def test_runs_from_before_are_foreseen_by_the_margin_of_the_first_slot() -> None:
    tasks = [Task([(0.1, 0.1)] * 6, (0.9, 0.9), carried=True) for _ in range(2)]
    made, _ = workload(*tasks, slots=5)
    by = ByMachine(terms_of(made, tasks, [0.45, 0.45]), MachineEstimator(MEAN, 3_600, (1.0, 1.0)), (1e-4, HALF))
    tight, wide = (
        simulate(made, machines((1.0, 1.0)), by.alone(), np.full(5, row, np.int8), by_machine=by) for row in (1, 0)
    )
    # of both 0.9 at the second budget; at the first one 0.37 of the spread, log(10,000) / 16, on top of that
    assert tight.ticks["running"][0] == 2
    assert wide.ticks["running"][0] == 1


def test_production_preempts_what_is_foreseen_until_it_fits() -> None:
    # of 0.2 + 0.3 + 0.4 for the three; 0.5 fits next to the last two only without the 0.4, of the lowest rank
    low = [Task([(0.01, 0.01)] * 9, (0.6, 0.6), rank=r, carried=True) for r in (2, 1, 0)]
    asking = Task([(0.01, 0.01)] * 4, (0.5, 0.5), at=1.5, band=PRODUCTION, rank=9)
    outcome = run_together(*low, asking, means=[0.2, 0.3, 0.4, 0.1])
    assert killed(outcome) == [(2, "preempted")]
    assert outcome.runs["first_placed_us"][3] == 1.5 * SLOT_US
    assert outcome.ticks["reserved"][2, 0] == pytest.approx(0.2 + 0.3 + 0.5)


@pytest.mark.parametrize(("asked", "preempted"), [(0.4, True), (0.5, False)])
def test_a_run_preempts_only_where_what_is_foreseen_without_the_victims_leaves_room(
    asked: float, preempted: bool
) -> None:
    production = Task([(0.6, 0.6)] * 9, (0.7, 0.7), band=PRODUCTION, rank=9, carried=True)
    low = Task([(0.1, 0.1)] * 9, (0.5, 0.5), carried=True)
    asking = Task([(0.1, 0.1)] * 4, (asked, asked), at=1.5, rank=3)
    outcome = run_together(production, low, asking, means=[0.2, 0.3, 0.1], slots=3)
    # the two reserve the 0.7 that they use, not 0.2 + 0.3; without the second, alone 0.3, it is 0.6 rather than 0.4
    assert killed(outcome) == [(1, "preempted")] * preempted


def test_contenders_of_a_model_share_what_it_foresees_and_what_runs_reserve_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[str] = []
    alone = ByMachine.alone

    def counted(by: ByMachine) -> np.ndarray:
        computed.append("alone")
        return alone(by)

    monkeypatch.setattr(ByMachine, "alone", counted)

    def model(name: str) -> Any:
        def current_terms(rows: np.ndarray) -> np.ndarray:
            computed.append(name)
            return np.full((len(rows), 2, N_TERMS), 0.1)

        return SimpleNamespace(current_terms=current_terms), MachineEstimator(BOUND, 3_600, (1.0, 1.0))

    placing = Placing(
        MachineContenders(machines={f"{m} (machine)": model(m) for m in ("a", "b")}), np.arange(3), (0.1, 0.5)
    )
    assert placing.by_machine("a (sum)") is None
    ways: dict[str, Any] = {"machine": None, "machine, following": 1.0, "machine, held": AT_ONCE}
    for m in ("a", "b"):
        for way, at_once in ways.items():
            placed = placing.by_machine(f"{m} ({way})")
            assert placed is not None
            assert placed[0].at_once == at_once
            np.testing.assert_array_equal(placed[1], alone(placed[0]))
    assert computed == ["a", "alone", "b", "alone"]


def in_reservations(cell: SmallCell) -> SmallCell:
    """Return a cell whose tasks use no more than is reserved for them, and have one limit."""
    tasks = []
    for t in cell.tasks:
        limit = np.array(t.limit).reshape(-1, 2)[:1]
        reserved = np.minimum(np.broadcast_to(np.array(t.reserved).reshape(-1, 2), (len(t.use), 2)), limit)
        use = np.minimum(np.array(t.use), reserved)
        pairs = [tuple(map(tuple, of.tolist())) for of in (use, reserved)]
        tasks.append(replace(t, use=pairs[0], reserved=pairs[1], limit=tuple(limit[0].tolist())))
    return replace(cell, tasks=tasks)


@settings(max_examples=60, deadline=None)
@given(cells())
def test_tasks_without_a_forecast_are_placed_as_by_the_sum_of_what_they_hold(cell: SmallCell) -> None:
    cell = in_reservations(cell)
    expected = cell.run()
    made, reserved = workload(
        *cell.tasks, slots=cell.slots, masks=cell.masks, machines=len(cell.on), predecessors=cell.predecessors
    )
    terms = np.zeros((len(made.tape), 2, N_TERMS))
    terms[..., T_HELD] = reserved[0]
    by = ByMachine(terms, MachineEstimator(BOUND, 3_600, (1.0, 1.0)), (HALF,))
    found = simulate(made, cell.on, by.alone(), scheduling=Scheduling(checkpoint_s=0.0), by_machine=by)
    for name in ("state", "machine", "first_placed_us", "ended_us", "ran_us", "waited_us", "lost_us"):
        np.testing.assert_array_equal(found.runs[name], expected.runs[name], name)
    assert found.kills.tolist() == expected.kills.tolist()
    np.testing.assert_allclose(found.ticks["reserved"], expected.ticks["reserved"], atol=1e-9)


def test_best_effort_work_gives_way_before_the_memory_runs_out() -> None:
    # at slot 2 the memory reserved for the first grows to 0.9, next to 0.3; it uses that much at slot 3
    held = [(0.2, 0.2), (0.2, 0.2), (0.2, 0.9), (0.2, 0.9)]
    first = Task([(0.1, 0.1)] * 3 + [(0.1, 0.9)], (0.95, 0.95), rank=1, band=PRODUCTION, carried=True, reserved=held)
    second = Task([(0.1, 0.3)] * 5, (0.3, 0.3), carried=True)
    made, reserved = workload(first, second, slots=4)
    for gives_way, cause, at in ((False, "machine", 3), (True, "preempted", 2)):
        how = Scheduling(checkpoint_s=0.0, gives_way=gives_way)
        outcome = simulate(made, machines((1.0, 1.0)), reserved, scheduling=how)
        assert killed(outcome) == [(1, cause)]
        assert outcome.kills["at_us"].tolist() == [at * SLOT_US]
    shrinks = machines((1.0, 1.0), changes=[Change(1.5, 0, capacity=(1.0, 0.8))])
    alone, reserved = workload(first, slots=3)  # production does not give way for the 0.9
    assert killed(simulate(alone, shrinks, reserved, scheduling=Scheduling(gives_way=True))) == []
    for gives_way in (False, True):  # the same where the need is foreseen
        calm, grown = replace(first, use=[(0.1, 0.1)] * 4), [of for _, of in held]
        outcome = run_together(calm, second, means=[grown, 0.3], gives_way=gives_way, slots=4)
        assert killed(outcome) == [(1, "preempted")] * gives_way


@pytest.mark.parametrize(("grown", "gone"), [(0.5, [2]), (0.7, [2, 1])])
def test_work_gives_way_from_the_lowest_priority_up_and_only_as_much_as_is_reserved_too_much(
    grown: float, gone: list[int]
) -> None:
    held = [(0.2, 0.2), (0.2, 0.2), (0.2, grown)]
    first = Task([(0.1, 0.1)] * 3, (0.95, 0.95), rank=9, band=PRODUCTION, carried=True, reserved=held)
    others = [Task([(0.1, 0.1)] * 5, (0.1, 0.2), rank=rank, carried=True) for rank in (2, 1, 3)]
    made, reserved = workload(first, *others, slots=3)
    outcome = simulate(made, machines((1.0, 1.0)), reserved, scheduling=Scheduling(gives_way=True))
    # at slot 2 the others reserve 0.6 next to 0.5, of which 0.2 have to go, or next to 0.7
    assert killed(outcome) == [(i, "preempted") for i in gone]
    assert outcome.kills["at_us"].tolist() == [2 * SLOT_US] * len(gone)


FALLING: Curves = (
    MachineCurve(
        tuple(0.01 * k for k in range(38)),
        tuple({"mean": 1.5, "size": -0.8, "newcomers": -0.5}.get(name, 0.0) for name in INPUTS),
    ),
) * 2
"""Reserves less for many tasks than the sum of what each one would alone, and more once some of them are gone."""


@pytest.mark.parametrize("curves", [BOUND, MEAN, FALLING], ids=["bound", "mean", "falling"])
@settings(max_examples=60, deadline=None)
@given(cell=cells(), seed=st.integers(0, 2**32 - 1))
def test_sums_pass_over_no_machine_on_which_preemption_makes_room(curves: Curves, cell: SmallCell, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made, _ = workload(
        *cell.tasks, slots=cell.slots, masks=cell.masks, machines=len(cell.on), predecessors=cell.predecessors
    )
    limit = made.tape["limit"]
    terms = rng.random((len(limit), 2, N_TERMS)) * limit[..., None]  # usage and quantiles of at most the limit
    terms[..., T_LIMIT], terms[..., T_SQUARES], terms[..., T_HELD] = limit, limit**2, 0.0
    terms[..., T_BAND:] = np.sort(terms[..., T_BAND:], axis=-1)
    by = ByMachine(terms, MachineEstimator(curves, 3_600, (1.0, 1.0)), (HALF,))
    outcome = simulate(made, cell.on, by.alone(), scheduling=Scheduling(checkpoint_s=0.0), by_machine=by)
    foreseen = by.state(len(cell.on))
    how = np.zeros(1, SETTINGS)[0]
    for m, machine in enumerate(outcome.machines):
        i = machine["head"]
        while i >= 0:
            add_terms(foreseen.sums[m], outcome.runs[i], foreseen, 1.0)
            i = outcome.runs["next"][i]
        for asking in outcome.runs[outcome.runs["state"] != RUNNING]:
            asked = asking["first_limit"]
            rank, _ = preemption_cost(asking, machine, outcome.runs, asked, how, cell.slots * SLOT_US, m, foreseen)
            assert rank < 0 or all(could_fit(asking, machine, r, asked[r]) for r in range(2))
