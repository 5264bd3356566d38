"""Margins that follow the machines of a closed loop: what is judged, computed again run by run, and what moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.replay.closed_loop.following import BEGINS, HeldMachines, _see
from reclaim.replay.closed_loop.foreseen import ByMachine
from reclaim.replay.closed_loop.records import RUNNING
from reclaim.replay.closed_loop.simulate import Outcome, Scheduling, simulate
from reclaim.training.machines.estimator import MachineEstimator
from reclaim.training.machines.following import AT_ONCE, OnlineMachines
from reclaim.training.margins.violation import violates
from tests.replay.closed_loop.test_foreseen import MEAN, terms_of
from tests.replay.small_cells import SmallCell, Task, cells, machines, workload

HORIZON_S, SLOT_S = 1_200, 300
BUDGETS = (0.02, 0.3)


def estimator() -> MachineEstimator:
    return MachineEstimator(MEAN, HORIZON_S, (1.0, 1.0))


def placing(made: Any, tasks: list[Task], mean: float = 0.05) -> ByMachine:
    """Return what foresees a mean of each run, and follows with the second budget."""
    return ByMachine(terms_of(made, tasks, [mean] * len(tasks)), estimator(), BUDGETS, AT_ONCE)


class Spied:
    """What a closed loop gave its margins to see, slot by slot, and the margins that it took."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.margins: list[np.ndarray] = []
        see, margins = HeldMachines.see, HeldMachines.margins

        def look(one: HeldMachines, slot: int, runs: np.ndarray, machines: np.ndarray, sums: np.ndarray) -> None:
            self.seen.append((slot, runs.copy(), machines["reserved"].copy(), machines["use"].copy(), sums.copy()))
            see(one, slot, runs, machines, sums)

        def take(one: HeldMachines, slot: int) -> np.ndarray:
            found = margins(one, slot)
            assert found is not None
            self.margins.append(found.copy())
            return found

        patch.setattr(HeldMachines, "see", look)
        patch.setattr(HeldMachines, "margins", take)


def again(spied: Spied, demand: np.ndarray) -> tuple[list[np.ndarray], list[Any]]:
    """Compute the margins of each slot again, run by run and machine by machine, and how often all were passed.

    The latter as answers, those passed, times, and those at which more than a tenth and more than two were.
    """
    online, of = OnlineMachines(MEAN, BUDGETS, HORIZON_S, SLOT_S, begins=BEGINS), estimator()
    slots = HORIZON_S // SLOT_S
    expected, n, over, times, at_once = [], 0, np.zeros(2, np.int64), 0, np.zeros(2, np.int64)
    for at, slot in enumerate([*(slot for slot, *_ in spied.seen), spied.seen[-1][0] + 1]):
        if at >= slots:  # the answers whose horizon ended with the slot before this one
            first, runs, reserved, use, sums = spied.seen[at - slots]
            judged, violated, before = 0, np.zeros((2, 2), np.int64), over
            held = [np.maximum(of.at(margins, sums), use) for margins in spied.margins[at - slots].tolist()]
            np.testing.assert_array_equal(held[0], reserved)  # one of them is what the loop reserves
            for m in range(len(sums)):
                mine = [i for i, run in enumerate(runs) if run["state"] == RUNNING and run["machine"] == m]
                if not mine:
                    continue
                peak = np.zeros(2)
                for _, later, *_ in spied.seen[at - slots : at]:
                    there = [
                        i for i in mine
                        if later[i]["state"] == RUNNING and later[i]["machine"] == m
                        and later[i]["placed_us"] == runs[i]["placed_us"]
                    ]  # fmt: skip
                    total = sum((np.minimum(demand[later[i]["cursor"]], runs[i]["limit"]) for i in there), np.zeros(2))
                    peak = np.maximum(peak, total)
                judged += 1
                violated += np.array([violates(peak, of_budget[m]) for of_budget in held])
                n, over = n + 1, over + violates(peak, reserved[m])
            times, at_once = times + 1, at_once + (over - before > max(0.1 * judged, 2))
            online.count(first, np.full(2, judged), violated)
        online.reach(slot)
        expected.append(online.margins.copy())
    return expected[:-1], [n, over.tolist(), times, at_once.tolist()]


@settings(max_examples=40, deadline=None)
@given(cell=cells(), seed=st.integers(0, 2**32 - 1))
def test_margins_are_those_of_the_peaks_that_each_machine_came_to(cell: SmallCell, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made, _ = workload(*cell.tasks, slots=cell.slots, masks=cell.masks, predecessors=cell.predecessors)
    demand = rng.choice([0.0, 0.05, 0.2, 0.6], (len(made.tape), 2))
    with pytest.MonkeyPatch.context() as patch:
        spied = Spied(patch)
        made, by = replace(made, demand=demand), placing(made, cell.tasks)
        outcome = simulate(made, cell.on, by.alone(), by_machine=by, horizon_s=HORIZON_S)
    expected, held = again(spied, demand)
    np.testing.assert_array_equal(spied.margins, expected)
    found = outcome.held
    assert [found.judged, found.over.tolist(), found.times, found.crowded.tolist()] == held


def beginning(made: Any, slot: int) -> Any:
    """Return a workload whose period begins with a slot of the clock."""
    by_us, runs = slot * SLOT_S * 1_000_000, made.runs.copy()
    runs["arrival_us"] += by_us
    return replace(made, runs=runs, start_us=by_us, stop_us=made.stop_us + by_us)


def run(use: float, *, follow: bool = True, slots: int = 60, begin: int = 0) -> Outcome:
    """Run eight tasks on eight machines for hours: each uses so much every third slot, and is foreseen at 0.05.

    The period begins with a slot of the clock.
    """
    tasks = [Task([(0.01, 0.01), (0.01, 0.01), (use, use)] * (slots // 3), (0.9, 0.9), carried=True) for _ in range(8)]
    made = beginning(workload(*tasks, slots=slots, machines=8)[0], begin)
    by = replace(placing(made, tasks), at_once=AT_ONCE if follow else None)
    return simulate(made, machines(*[(1.0, 1.0)] * 8), by.alone(), scheduling=Scheduling(), by_machine=by,
                    horizon_s=HORIZON_S)  # fmt: skip


def test_what_is_passed_raises_what_is_reserved_and_what_is_not_lowers_it() -> None:
    """A use of 0.2 passes the mean of 0.05 until the margin covers it; one of 0.01 lets the margin sink."""
    with pytest.MonkeyPatch.context() as patch:
        spied = Spied(patch)
        followed = run(0.2)
    assert (spied.margins[-1] > spied.margins[0]).all()
    under = run(0.01)
    assert under.ticks["reserved"][-1, 0] < under.ticks["reserved"][0, 0]
    assert (run(0.2, follow=False).held.over > followed.held.over).all()


def test_what_is_used_now_is_reserved_and_not_passed() -> None:
    """A use of 0.2 that stays is above the mean of 0.05: the machine reserves it, and no margin has to rise."""
    tasks = [Task([(0.2, 0.2)] * 60, (0.9, 0.9), carried=True) for _ in range(8)]
    made, _ = workload(*tasks, slots=60, machines=8)
    with pytest.MonkeyPatch.context() as patch:
        spied = Spied(patch)
        by = placing(made, tasks)
        held = simulate(made, machines(*[(1.0, 1.0)] * 8), by.alone(), by_machine=by, horizon_s=HORIZON_S).held
    assert held.over.tolist() == [0, 0]
    assert (spied.margins[-1] < spied.margins[0]).all()


def test_nothing_moves_before_an_horizon_is_over() -> None:
    """Four slots of the horizon, one for late windows, and the answer's own."""
    moved = np.flatnonzero(np.diff(run(0.01).ticks["reserved"][:, 0]))
    assert moved[0] + 1 == HORIZON_S // SLOT_S + 2


def test_a_run_counts_up_to_its_limit_and_while_it_is_there() -> None:
    tasks = [Task([(0.1, 0.1)] * 3, (0.5, 0.5), carried=True), Task([(0.1, 0.1)] * 9, (0.4, 0.4), carried=True)]
    made, _ = workload(*tasks, slots=9)
    demand = made.demand
    demand[:] = 0.3
    demand[made.runs["first"][1] + 4] = 7.0  # above its limit, after the first has ended
    with pytest.MonkeyPatch.context() as patch:
        judged: list[tuple[int, list[float]]] = []

        def judge(one: HeldMachines, answer: Any) -> None:
            judged.append((answer.slot, one._peak[0, :, answer.place].tolist()))

        patch.setattr(HeldMachines, "_judge", judge)
        simulate(made, machines((1.0, 1.0)), made.tape["limit"][None].copy(), horizon_s=HORIZON_S)
    # the answers of the slots 0 to 2 are of both, of which the second alone comes to 0.4 in slot 4
    assert judged[:4] == [(0, [0.6, 0.6]), (1, [0.6, 0.6]), (2, [0.6, 0.6]), (3, [0.4, 0.4])]


def test_a_run_counts_up_to_the_limit_that_it_had_at_the_time_of_the_answer() -> None:
    limits = [(0.4, 0.4)] * 6 + [(0.8, 0.8)] * 6
    made, _ = workload(Task([(0.1, 0.1)] * 12, limits, carried=True), slots=12)
    made.demand[:] = 0.7
    with pytest.MonkeyPatch.context() as patch:
        judged: list[tuple[int, float]] = []
        patch.setattr(
            HeldMachines, "_judge", lambda one, answer: judged.append((answer.slot, one._peak[0, 0, answer.place]))
        )
        simulate(made, machines((1.0, 1.0)), made.tape["limit"][None].copy(), horizon_s=HORIZON_S)
    assert judged == [(0, 0.4), (1, 0.4), (2, 0.4), (3, 0.4), (4, 0.4), (5, 0.4), (6, 0.7), (7, 0.7), (8, 0.7)]


def test_demand_that_may_not_be_written_to_is_counted_by_the_same_machine_code() -> None:
    made, _ = workload(Task([(0.1, 0.1)] * 6, carried=True), slots=6)
    reserved = made.tape["limit"][None].copy()
    expected = simulate(made, machines((1.0, 1.0)), reserved, horizon_s=HORIZON_S).held
    compiled = len(_see.signatures)
    made.demand.flags.writeable = False
    held = simulate(made, machines((1.0, 1.0)), reserved, horizon_s=HORIZON_S).held
    assert (held.judged, held.over.tolist()) == (expected.judged, expected.over.tolist())
    assert len(_see.signatures) == compiled


def test_sums_of_reservations_are_held_against_the_same_peaks() -> None:
    """0.1 and 0.2 are reserved of 0.4 each; both use 0.15 in every slot, the first is held at its use by a machine."""
    tasks = [Task([(0.15, 0.15)] * 9, (0.4, 0.4), carried=True, reserved=(held, held)) for held in (0.1, 0.2)]
    made, reserved = workload(*tasks, slots=9)
    made.demand[made.runs["first"][1] + 5] = (0.35, 0.2)  # 0.15 + 0.35 is more than 0.15 + 0.2; memory comes to it
    outcome = simulate(made, machines((1.0, 1.0)), reserved, horizon_s=HORIZON_S)
    # of the answers whose horizon ends by slot 8, of slots 0 to 5, those of 2 to 5 see slot 5
    assert (outcome.held.judged, outcome.held.over.tolist()) == (6, [4, 0])
    assert simulate(made, machines((1.0, 1.0)), reserved).held.judged == 0


def test_with_a_horizon_longer_than_an_hour_there_is_an_answer_of_every_so_many_slots() -> None:
    made, reserved = workload(Task([(0.1, 0.1)] * 30, (0.4, 0.4), carried=True), slots=30)
    # 24 slots of horizon are twice the twelve whose answers are waited for: those of slots 0, 2, 4 and 6 end by 30
    held = simulate(made, machines((1.0, 1.0)), reserved, horizon_s=2 * 3_600).held
    assert (held.judged, held.times) == (4, 4)
    held = simulate(made, machines((1.0, 1.0)), reserved, horizon_s=3_600).held
    assert (held.judged, held.times) == (19, 19)  # of every slot up to 18
    # the clock's slots, not those of the period: of the period that begins with slot 1 those of 2, 4 and 6 end by 31
    held = simulate(beginning(made, 1), machines((1.0, 1.0)), reserved, horizon_s=2 * 3_600).held
    assert (held.judged, held.times) == (3, 3)


def test_a_period_that_begins_later_on_the_clock_is_followed_alike() -> None:
    first, later = run(0.2), run(0.2, begin=7)
    np.testing.assert_array_equal(later.ticks, first.ticks)
    assert (later.held.judged, later.held.over.tolist()) == (first.held.judged, first.held.over.tolist())
    assert len(np.unique(first.ticks["reserved"][:, 0])) > 9  # the margins moved
