"""The closed loop on cells small enough to work out by hand: every rule, and what must hold whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.errors import ConfigError
from reclaim.replay.closedloop import Outcome, Scheduling, simulate
from reclaim.replay.closedloop_state import (
    AHEAD,
    CAUSES,
    CHANGE,
    CONSTRAINTS,
    CPU,
    DONE,
    MACHINE,
    MACHINE_GONE,
    MACHINE_STATE,
    MEMORY,
    MONITORING,
    NON_PRODUCTION,
    OWN_LIMIT,
    PENDING,
    PREEMPTED,
    PRODUCTION,
    REASONS,
    RUN,
    RUNNING,
    SPREAD,
    TAPE,
    TOO_LARGE,
)
from reclaim.replay.outcome import balance, over_time, summary
from reclaim.replay.placement import could_fit, price
from reclaim.replay.workload import Machines, Workload

SLOT_US = 300_000_000


@dataclass(frozen=True)
class Task:
    """A run for tests: one (cpu, memory) for each slot, a limit, and when it is submitted, in slots."""

    use: Sequence[tuple[float, float]]
    limit: tuple[float, float] = (0.5, 0.5)
    at: float = 0.0
    band: int = NON_PRODUCTION
    rank: int = 0
    held: tuple[float, float] | None = None
    carried: bool = False
    latency: bool = False
    mask: int = 0
    collection: int = 0
    per_machine: int = 0
    after: int = -1


def workload(*tasks: Task, slots: int = 10, masks: np.ndarray | None = None, machines: int = 1) -> tuple[Workload, Any]:
    """Return the workload of these runs and the reservations they are held to; the limit in their first slot."""
    lengths = [len(t.use) for t in tasks]
    tape = np.zeros(sum(lengths), TAPE)
    stops = np.cumsum(lengths)
    firsts = stops - lengths
    held = np.zeros((1, len(tape), 2))
    runs = np.zeros(len(tasks), RUN)
    for i, (t, a, b) in enumerate(zip(tasks, firsts, stops, strict=True)):
        tape["from_us"][a:b] = np.arange(b - a) * SLOT_US
        tape["use"][a:b], tape["limit"][a:b] = t.use, t.limit
        held[0, a:b] = t.held or t.limit
        if not t.carried:
            held[0, a] = t.limit
        run = runs[i]
        run["first"], run["stop"], run["cursor"], run["asked"] = a, b, a, t.limit
        run["arrival_us"], run["duration_us"] = int(t.at * SLOT_US), (b - a) * SLOT_US
        run["collection"], run["rank"], run["mask"], run["per_machine"] = t.collection, t.rank, t.mask, t.per_machine
        run["band"], run["service"], run["latency"] = t.band, t.band > NON_PRODUCTION, t.latency
        run["carried"], run["after"], run["then"] = t.carried, t.after, -1
        if t.after >= 0:
            runs[t.after]["then"] = i
        run["state"], run["machine"], run["next"], run["previous"] = AHEAD, -1, -1, -1
        run["first_placed_us"] = run["ready_us"] = -1
    made = Workload(
        runs=runs,
        tape=tape,
        row=np.arange(len(tape)),
        masks=np.ones((1, machines), np.bool_) if masks is None else masks,
        start_us=0,
        stop_us=slots * SLOT_US,
        slot_s=300,
        ends_out_of_memory=np.zeros(len(tasks), np.bool_),
    )
    assert (np.diff(runs["arrival_us"]) >= 0).all(), "tests give their tasks in the order of arrival"
    return made, held


def machines(*capacities: tuple[float, float], changes: Sequence[tuple[float, int, bool]] = ()) -> Machines:
    """Return machines in service from the start, and changes (slot, machine, up)."""
    state = np.zeros(len(capacities), MACHINE_STATE)
    state["capacity"], state["up"], state["open"], state["head"] = capacities, True, True, -1
    made = np.zeros(len(changes), CHANGE)
    for i, (at, machine, up) in enumerate(changes):
        made[i]["at_us"], made[i]["machine"], made[i]["up"], made[i]["open"] = int(at * SLOT_US), machine, up, up
        made[i]["capacity"] = capacities[machine]
    return Machines(np.arange(len(capacities)), state, made)


def run(*tasks: Task, on: Machines | None = None, slots: int = 10, **how: Any) -> Outcome:
    """Run tasks on machines, one of (1, 1) unless told."""
    on = on or machines((1.0, 1.0))
    masks = how.pop("masks", None)
    made, held = workload(*tasks, slots=slots, masks=masks, machines=len(on))
    return simulate(made, on, held, how=Scheduling(**{"checkpoint_s": 0.0, **how}))


def states(outcome: Outcome) -> list[int]:
    return [int(state) for state in outcome.runs["state"]]


def killed(outcome: Outcome) -> list[tuple[int, str]]:
    return [(int(k["run"]), CAUSES[k["cause"]]) for k in outcome.kills]


QUIET = [(0.1, 0.1)] * 4


def test_a_run_is_placed_when_it_is_submitted_and_ends_when_its_tape_does() -> None:
    one = run(Task(QUIET, at=1.5)).runs[0]
    assert one["first_placed_us"] == 1.5 * SLOT_US
    assert one["ended_us"] == 5.5 * SLOT_US
    assert one["state"] == DONE
    assert one["ran_us"] == 4 * SLOT_US


def test_non_production_goes_into_what_reservations_leave_free_and_not_before_they_do() -> None:
    first = Task([(0.1, 0.1)] * 8, limit=(0.8, 0.8), held=(0.2, 0.2))
    outcome = run(first, Task(QUIET, limit=(0.6, 0.6), at=0.5))
    # the first holds its limit for its first slot; from the tick of slot 1 on 0.2, and 0.2 + 0.6 fits
    assert outcome.runs["first_placed_us"].tolist() == [0, SLOT_US]
    assert outcome.ticks["limit"][2, 0] == pytest.approx(1.4)
    assert outcome.ticks["in_reclaimed"][2].tolist() == pytest.approx([0.4, 0.4])


def test_without_reclamation_it_waits_until_the_limit_is_free_and_says_for_what() -> None:
    first = Task([(0.1, 0.1)] * 8, limit=(0.8, 0.3))
    outcome = run(first, Task(QUIET, limit=(0.6, 0.6), at=0.5), slots=13)
    assert outcome.runs["first_placed_us"].tolist() == [0, 8 * SLOT_US]
    assert outcome.ticks["reasons"][3].tolist() == [int(r == CPU) for r in range(len(REASONS))]


def test_production_never_relies_on_reclaimed_resources() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 9, limit=(0.6, 0.6), held=(0.2, 0.2), band=PRODUCTION, rank=5),
        Task(QUIET, limit=(0.6, 0.6), at=2, band=PRODUCTION, rank=5),
        slots=8,
    )
    assert states(outcome) == [RUNNING, DONE]  # a service follows the clock: its time passed while it waited
    assert outcome.runs["first_placed_us"].tolist() == [0, -1]
    assert balance(outcome)["missed_h"] == pytest.approx(4 * 300 / 3600)


def test_production_preempts_the_lowest_and_newest_work_first_and_only_as_much_as_needed() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 9, limit=(0.3, 0.3), rank=1),
        Task([(0.1, 0.1)] * 9, limit=(0.3, 0.3), rank=0),
        Task([(0.1, 0.1)] * 9, limit=(0.3, 0.3), at=1, rank=0),
        Task([(0.1, 0.1)] * 3, limit=(0.4, 0.4), at=2, band=PRODUCTION, rank=5),
        slots=4,
    )
    assert killed(outcome) == [(2, "preempted")]
    assert outcome.runs["lost_us"].tolist() == [0, 0, SLOT_US, 0]
    assert states(outcome) == [RUNNING, RUNNING, PENDING, RUNNING]


def test_non_production_preempts_only_what_is_lower_and_production_not_production() -> None:
    same = run(Task([(0.1, 0.1)] * 9, (0.8, 0.8), rank=1), Task(QUIET, (0.8, 0.8), at=1, rank=1), slots=5)
    higher = run(Task([(0.1, 0.1)] * 9, (0.8, 0.8), rank=1), Task(QUIET, (0.8, 0.8), at=1, rank=2), slots=5)
    production = run(
        Task([(0.1, 0.1)] * 9, (0.8, 0.8), band=PRODUCTION, rank=1),
        Task(QUIET, (0.8, 0.8), at=1, band=PRODUCTION, rank=2),
        slots=5,
    )
    monitoring = run(
        Task([(0.1, 0.1)] * 9, (0.8, 0.8), band=PRODUCTION, rank=1),
        Task(QUIET, (0.8, 0.8), at=1, band=MONITORING, rank=2),
        slots=5,
    )
    assert [killed(o) for o in (same, higher, production, monitoring)] == [
        [], [(0, "preempted")], [], [(0, "preempted")],
    ]  # fmt: skip


def test_preemption_takes_the_machine_whose_victims_are_lowest_then_least_is_lost() -> None:
    on = machines((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    low = Task([(0.1, 0.1)] * 9, (0.5, 0.5), rank=1)
    outcome = run(
        replace(low, mask=0, limit=(0.9, 0.9), rank=2), replace(low, mask=1), replace(low, mask=1),
        replace(low, mask=2, limit=(0.9, 0.9)),
        Task(QUIET, (0.8, 0.8), at=1, band=PRODUCTION, rank=5, mask=3),
        on=on, slots=3, masks=np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], np.bool_),
    )  # fmt: skip
    assert killed(outcome) == [(3, "preempted")]
    later = run(
        replace(low, limit=(0.9, 0.9)), replace(low, mask=1, at=0.5), replace(low, mask=1, at=0.75),
        Task(QUIET, (0.8, 0.8), at=1, band=PRODUCTION, rank=5, mask=2),
        on=machines((1.0, 1.0), (1.0, 1.0)), slots=3, masks=np.array([[1, 0], [0, 1], [1, 1]], np.bool_),
    )  # fmt: skip
    assert killed(later) == [(2, "preempted"), (1, "preempted")]  # 225 s of work lost rather than 300


def test_production_leaves_what_is_lent_where_reservations_leave_room_for_it() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 9, (0.4, 0.4), held=(0.1, 0.1), band=PRODUCTION, rank=5, carried=True),
        Task([(0.1, 0.1)] * 9, (0.5, 0.5), held=(0.3, 0.3), carried=True),
        Task(QUIET, (0.6, 0.6), at=1, band=PRODUCTION, rank=5),
        slots=3,
    )
    # limits of production 0.4 + 0.6, reservations 0.1 + 0.3 + 0.6: both fit, although all limits together are 1.5
    assert states(outcome) == [RUNNING, RUNNING, RUNNING]
    assert killed(outcome) == []


def test_out_of_memory_kills_from_the_lowest_priority_up_until_the_rest_fits() -> None:
    burst = [(0.1, 0.1), (0.1, 0.1), (0.1, 0.45), (0.1, 0.1)]
    small = Task(burst, limit=(0.3, 0.5), held=(0.1, 0.1))
    outcome = run(
        replace(small, rank=3, band=PRODUCTION),
        replace(small, rank=2),
        replace(small, rank=1, at=1),
        slots=4,
    )
    # tick 2: runs 0 and 1 are at 0.45 and run 2 at 0.1: it fits. Tick 3: run 2 bursts alone.
    assert killed(outcome) == []
    outcome = run(
        replace(small, rank=3, band=PRODUCTION, carried=True),
        replace(small, rank=2, carried=True),
        replace(small, rank=1, carried=True),
        slots=3,
    )
    assert killed(outcome) == [(2, "machine")]
    assert outcome.ticks["out_of_memory"].tolist() == [0, 0, 1]


def test_a_task_above_its_own_limit_dies_first_whatever_its_priority() -> None:
    quiet, burst = [(0.1, 0.4)] * 4, [(0.1, 0.4), (0.1, 0.7), (0.1, 0.4), (0.1, 0.4)]
    outcome = run(
        Task(burst, (0.5, 0.5), band=PRODUCTION, rank=9, carried=True),
        Task(quiet, (0.5, 0.5), rank=0, carried=True),
        slots=2,
    )
    assert killed(outcome) == [(0, "own_limit")]


def test_a_task_above_its_reservation_takes_the_room_that_it_uses_at_once() -> None:
    burst = [(0.1, 0.1), (0.6, 0.6), (0.1, 0.1), (0.1, 0.1)]
    outcome = run(
        Task(burst, (0.8, 0.8), held=(0.1, 0.1), carried=True),
        Task([(0.1, 0.1)] * 2, (0.5, 0.5), at=1.5),
        slots=4,
    )
    assert outcome.ticks["reserved"][:2].tolist() == [pytest.approx([0.1, 0.1]), pytest.approx([0.6, 0.6])]
    assert outcome.runs["first_placed_us"].tolist() == [0, 2 * SLOT_US]


def test_a_task_above_its_own_limit_lives_while_there_is_memory() -> None:
    outcome = run(Task([(0.1, 0.7)] * 4, (0.5, 0.5)), slots=3)
    assert killed(outcome) == []


def test_production_dies_only_when_nothing_else_is_left() -> None:
    burst = [(0.1, 0.1), (0.1, 0.6), (0.1, 0.1)]
    on = machines((1.0, 1.0), changes=[])
    outcome = run(
        Task(burst, (0.5, 0.7), band=PRODUCTION, rank=1, carried=True),
        Task(burst, (0.5, 0.3), band=PRODUCTION, rank=2, carried=True),
        Task([(0.1, 0.05)] * 3, (0.1, 0.1), rank=0, held=(0.0, 0.0), carried=True),
        on=on, slots=2,
    )  # fmt: skip
    # 0.6 + 0.6 + 0.05: run 1 is above its own limit and goes first; then 0.65 fits
    assert killed(outcome) == [(1, "own_limit")]
    both = run(
        Task([(0.1, 0.6)] * 3, (0.5, 0.6), band=PRODUCTION, rank=2, at=0),
        Task([(0.1, 0.3)] * 3, (0.1, 0.3), rank=0, at=0, carried=True),
        on=machines((1.0, 1.0), changes=[]), slots=3,
    )  # fmt: skip
    assert killed(both) == []


def test_killed_batch_work_begins_again_and_what_it_had_done_is_lost() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 3 + [(0.1, 0.7)], (0.8, 0.8), held=(0.1, 0.1), band=PRODUCTION, rank=9, carried=True),
        Task([(0.1, 0.4)] * 5, (0.5, 0.5), rank=0),
        slots=12,
    )
    assert killed(outcome) == [(1, "machine")]
    second = outcome.runs[1]
    # killed at tick 3, after 3 slots; the other has ended when it is tried again, at tick 4
    assert second["lost_us"] == 3 * SLOT_US
    assert second["ended_us"] == 9 * SLOT_US
    assert second["ran_us"] == 8 * SLOT_US
    work = balance(outcome)
    assert work["executed_h"] == pytest.approx(work["done_h"] + work["lost_h"])


def test_killed_batch_work_goes_back_to_its_last_checkpoint() -> None:
    crowd = (
        Task([(0.1, 0.1)] * 3 + [(0.1, 0.7)], (0.8, 0.8), held=(0.1, 0.1), band=PRODUCTION, rank=9, carried=True),
        Task([(0.1, 0.4)] * 3 + [(0.2, 0.35)] + [(0.1, 0.4)], (0.5, 0.5), rank=0),
    )
    outcome = run(*crowd, slots=12, checkpoint_s=600.0)
    second = outcome.runs[1]
    # killed at tick 3 with 900 s done, 600 of them safe; goes on at tick 4 in its third window
    assert second["lost_us"] == SLOT_US
    assert second["ended_us"] == 7 * SLOT_US
    assert outcome.ticks["use"][5, 0] == pytest.approx(0.2)
    assert balance(outcome)["executed_h"] == pytest.approx(6 * 300 / 3600)
    assert balance(outcome)["done_h"] == pytest.approx(5 * 300 / 3600)


def test_a_service_goes_on_where_the_clock_is_and_misses_what_it_missed() -> None:
    on = machines((1.0, 1.0), changes=[(2, 0, False), (4.5, 0, True)])
    outcome = run(Task([(0.1, 0.1)] * 8, band=PRODUCTION, rank=3), on=on, slots=10)
    assert killed(outcome) == [(0, "machine_gone")]
    one = outcome.runs[0]
    assert one["ended_us"] == 8 * SLOT_US
    assert one["ran_us"] == (2 + 3) * SLOT_US
    assert summary(outcome)["missed"] == pytest.approx(3 / 8)


def test_cpu_is_throttled_of_batch_first_and_of_latency_sensitive_work_only_what_is_left() -> None:
    mild = run(
        Task([(0.7, 0.1)] * 3, (0.5, 0.5), latency=True, band=PRODUCTION, rank=5),
        Task([(0.5, 0.1)] * 3, (0.5, 0.5)),
        slots=3,
    )
    # 1.2 asked of 1.0 in three slots
    assert mild.ticks["throttled_s"].sum(axis=0).tolist() == pytest.approx([3 * 0.2 * 300, 0.0])
    hard = run(
        Task([(1.3, 0.1)] * 3, (0.5, 0.5), latency=True, band=PRODUCTION, rank=5),
        Task([(0.5, 0.1)] * 3, (0.5, 0.5)),
        slots=2,
    )
    assert hard.ticks["throttled_s"].sum(axis=0).tolist() == pytest.approx([2 * 0.5 * 300, 2 * 0.3 * 300])
    assert hard.ticks["use"][1, 0] == pytest.approx(1.0)


def test_constraints_spread_and_size_are_told_apart_as_reasons_for_waiting() -> None:
    on = machines((1.0, 1.0), (0.5, 0.5))
    masks = np.array([[True, True], [False, False], [False, True]])
    outcome = run(
        Task([(0.1, 0.1)] * 9, (0.4, 0.4), collection=7, per_machine=1),
        Task([(0.1, 0.1)] * 9, (0.4, 0.4), collection=7, per_machine=1),
        Task(QUIET, (0.01, 0.01), at=1, mask=1),
        Task(QUIET, (0.8, 0.8), at=1, mask=2),
        Task(QUIET, (0.05, 0.05), at=1, collection=7, per_machine=1),
        on=on, masks=masks, slots=4,
    )  # fmt: skip
    assert sorted(outcome.runs["machine"][:2].tolist()) == [0, 1]
    assert outcome.runs["reason"][2:].tolist() == [CONSTRAINTS, TOO_LARGE, SPREAD]


def test_what_most_machines_lack_is_told_as_the_reason() -> None:
    on = machines((1.0, 1.0), (1.0, 1.0))
    masks = np.array([[True, False], [False, True], [True, True]])
    outcome = run(
        Task([(0.1, 0.1)] * 9, (0.9, 0.1)), Task([(0.1, 0.1)] * 9, (0.1, 0.9), mask=1),
        Task(QUIET, (0.5, 0.5), at=1, mask=2), Task(QUIET, (0.1, 0.5), at=1, mask=1),
        on=on, masks=masks, slots=4,
    )  # fmt: skip
    assert outcome.runs["reason"][2:].tolist() == [CPU, MEMORY]


@pytest.mark.parametrize(("policy", "machine"), [("best-fit", 0), ("worst-fit", 2), ("hybrid", 1)])
def test_the_policies_choose_as_they_say(policy: str, machine: int) -> None:
    on = machines((0.5, 1.0), (0.7, 0.9), (2.0, 2.0))
    outcome = run(Task(QUIET, (0.4, 0.6)), on=on, slots=2, policy=policy)
    # free shares after: (0.2, 0.4), (0.43, 0.33), (0.8, 0.7); mean 0.30, 0.38, 0.75; apart 0.2, 0.1, 0.1
    expected = {"best-fit": 0.30, "worst-fit": 0.75, "hybrid": 0.38}
    assert expected[policy] > 0
    assert outcome.runs["machine"][0] == machine


def test_the_hybrid_prefers_even_leftovers_to_full_machines() -> None:
    on = machines((0.4, 1.2), (0.8, 1.0))
    assert run(Task(QUIET, (0.4, 0.6)), on=on, slots=2, policy="best-fit").runs["machine"][0] == 0
    assert run(Task(QUIET, (0.4, 0.6)), on=on, slots=2, policy="hybrid").runs["machine"][0] == 1


def test_a_task_is_never_run_twice_at_a_time() -> None:
    first = Task([(0.1, 0.1)] * 4, (0.9, 0.9))
    blocker = Task([(0.1, 0.1)] * 3, (0.9, 0.9), rank=5)
    outcome = run(blocker, replace(first, rank=0), replace(first, at=4, after=1), on=machines((1.0, 1.0)), slots=16)
    a, b = outcome.runs[1], outcome.runs[2]
    assert a["ended_us"] <= b["first_placed_us"]
    assert states(outcome) == [DONE, DONE, DONE]


def test_the_next_run_of_a_task_goes_on_at_the_moment_the_one_before_has_ended() -> None:
    brief = Task([(0.1, 0.1)], at=1.98, after=0, band=PRODUCTION, rank=2)
    outcome = run(Task([(0.1, 0.1)] * 2, band=PRODUCTION, rank=2), brief, slots=6)
    # submitted 6 s before the other ends; ready, and placed, as it does; a service, so 6 s of its 300 are missed
    assert outcome.runs["first_placed_us"].tolist() == [0, 2 * SLOT_US]
    assert outcome.runs["ready_us"].tolist() == [0, 2 * SLOT_US]
    assert balance(outcome)["missed_h"] == pytest.approx(6 / 3600)
    assert summary(outcome)["delay_p99_s_production"] == 0.0


def test_a_service_that_never_ran_waited_until_its_time_had_passed_and_not_longer() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 20, (0.8, 0.8), band=PRODUCTION, rank=2),
        Task([(0.1, 0.1)] * 2, (0.8, 0.8), at=1, band=PRODUCTION, rank=2),
        slots=20,
    )
    found = summary(outcome)
    assert found["delay_p99_s_production"] == pytest.approx(np.percentile([0.0, 600.0], 99))
    assert found["never_placed"] == 1
    assert found["finished"] == 1
    assert found["waiting_production"] == pytest.approx(2 / 22)


def test_a_run_whose_limit_changed_is_tried_for_what_it_asks_now() -> None:
    made, held = workload(
        Task([(0.1, 0.1)] * 3, (0.9, 0.9), rank=3),
        Task([(0.1, 0.1)] * 3, (0.65, 0.65), at=0.25, rank=2),
        Task([(0.1, 0.1)] * 3, (0.7, 0.7), at=0.5, rank=1),
        slots=10,
    )
    made.tape["limit"][6] = held[0, 6] = 0.2  # its first window asks for less than the rest of it
    made.runs["varies"][2] = True
    on = machines((0.9, 0.9), (0.25, 0.25))
    assert (
        simulate(replace(made, masks=np.ones((1, 2), np.bool_)), on, held).runs["first_placed_us"][2] == 0.5 * SLOT_US
    )


def test_what_is_preempted_is_where_least_is_lost_since_the_last_checkpoint() -> None:
    masks = np.array([[1, 0], [0, 1], [1, 1]], np.bool_)
    outcome = run(
        Task([(0.1, 0.1)] * 9, (0.9, 0.9)),
        Task([(0.1, 0.1)] * 9, (0.9, 0.9), at=0.5, mask=1),
        Task(QUIET, (0.8, 0.8), at=3.25, band=PRODUCTION, rank=5, mask=2),
        on=machines((1.0, 1.0), (1.0, 1.0)), slots=4, masks=masks, checkpoint_s=900.0,
    )  # fmt: skip
    assert killed(outcome) == [(0, "preempted")]  # 75 s since its checkpoint; the other one has done 825 s
    assert outcome.runs["lost_us"].tolist() == [75_000_000, 0, 0]


def test_an_unknown_limit_is_not_exceeded() -> None:
    outcome = run(
        Task([(0.1, 0.6)] * 3, (0.1, 0.0), held=(0.1, 0.0), band=PRODUCTION, rank=5, carried=True),
        Task([(0.1, 0.6)] * 3, (0.1, 0.6), held=(0.1, 0.1), rank=1, carried=True),
        slots=2,
    )
    assert killed(outcome)[0] == (1, "machine")


def test_a_bounded_job_does_not_keep_others_of_its_kind_from_being_tried() -> None:
    on = machines((1.0, 1.0), (1.0, 1.0))
    bounded = Task([(0.1, 0.1)] * 9, (0.3, 0.3), collection=7, per_machine=1)
    outcome = run(bounded, bounded, replace(bounded, at=1), replace(bounded, at=1, collection=8), on=on, slots=4)
    assert outcome.runs["reason"][2] == SPREAD
    assert states(outcome) == [RUNNING, RUNNING, PENDING, RUNNING]


def test_a_machine_that_goes_takes_its_work_along_and_one_that_comes_is_used() -> None:
    on = machines((1.0, 1.0), (1.0, 1.0), changes=[(0, 1, False), (2.5, 0, False), (3.5, 1, True)])
    outcome = run(Task([(0.1, 0.1)] * 4), on=on, slots=10)
    assert killed(outcome) == [(0, "machine_gone")]
    assert outcome.runs["ended_us"].tolist() == [8 * SLOT_US]
    assert outcome.ticks["capacity"][:5, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_reservations_follow_the_margin_of_the_slot() -> None:
    made, held = workload(Task([(0.1, 0.1)] * 6, (0.8, 0.8), held=(0.4, 0.4)), slots=6)
    both = np.concatenate([held, held / 2])
    outcome = simulate(made, machines((1.0, 1.0)), both, np.array([0, 0, 1, 1, 0, 0], np.int8))
    assert outcome.ticks["reserved"][:, 0].tolist() == pytest.approx([0.8, 0.4, 0.2, 0.2, 0.4, 0.4])


def test_a_run_from_before_keeps_its_reservation_and_a_new_one_holds_its_limit_at_first() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 5, (0.8, 0.8), held=(0.3, 0.3), carried=True),
        Task([(0.1, 0.1)] * 5, (0.5, 0.5), held=(0.2, 0.2), at=0.5),
        slots=3,
    )
    # the second was placed at 0.5: at tick 1 it is younger than 300 s
    assert outcome.ticks["reserved"][1:, 0].tolist() == pytest.approx([0.3 + 0.5, 0.3 + 0.2])


def test_scheduling_is_checked() -> None:
    with pytest.raises(ConfigError, match="policy must be one of best-fit, worst-fit, hybrid, got 'first'"):
        Scheduling(policy="first")
    with pytest.raises(ConfigError, match="enough must be at least 1, got 0"):
        Scheduling(enough=0)


@st.composite
def cells(draw: st.DrawFn) -> tuple[list[Task], Machines, int]:
    """Draw a crowded cell of up to 4 machines and 25 runs."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    n, m, slots = int(rng.integers(1, 26)), int(rng.integers(1, 5)), int(rng.integers(3, 15))
    tasks = []
    for at in np.sort(rng.uniform(0, slots, n)):
        band = int(rng.choice([0, 0, 0, 1, 2]))
        limit = rng.uniform(0.05, 0.7, 2)
        length = int(rng.integers(1, 12))
        use = limit * rng.uniform(0.1, 1.3, (length, 2))
        tasks.append(
            Task(
                use=[tuple(u) for u in use], limit=tuple(limit), at=0.0 if rng.random() < 0.3 else float(at),
                band=band, rank=int(rng.integers(0, 4)) + 4 * band, held=tuple(limit * rng.uniform(0.1, 1.0, 2)),
                latency=bool(rng.random() < 0.3), collection=int(rng.integers(0, 5)),
                per_machine=int(rng.choice([0, 0, 2])),
            )
        )  # fmt: skip
    tasks.sort(key=lambda t: t.at)
    changes = [(float(t), int(rng.integers(0, m)), bool(rng.random() < 0.6)) for t in np.sort(rng.uniform(0, slots, 3))]
    on = machines(*[tuple(rng.uniform(0.5, 1.5, 2)) for _ in range(m)], changes=changes)
    return tasks, on, slots


@settings(max_examples=150, deadline=None)
@given(cells(), st.sampled_from([0.0, 400.0]))
def test_nothing_is_lost_or_run_twice_and_no_machine_gives_more_than_it_has(
    cell: tuple[Any, Machines, int], checkpoint_s: float
) -> None:
    tasks, on, slots = cell
    outcome = run(*tasks, on=on, slots=slots, checkpoint_s=checkpoint_s)
    runs, ticks = outcome.runs, outcome.ticks
    assert runs["ran_us"].sum() == outcome.machines["busy_us"].sum()  # counted by tasks, and by machines
    assert set(runs["state"].tolist()) <= {DONE, RUNNING, PENDING, AHEAD}
    on_machines: list[int] = []
    for m, machine in enumerate(outcome.machines):
        here, i = [], int(machine["head"])
        while i >= 0:
            here.append(i)
            i = int(runs["next"][i])
        assert all(runs["machine"][i] == m and runs["state"][i] == RUNNING for i in here)
        assert machine["count"] == len(here)
        assert runs["use"][here, 1].sum() <= machine["capacity"][1] * (1 + 1e-6) or not here
        limits = runs["limit"][here][runs["band"][here] > 0].sum(axis=0)
        assert (limits <= machine["capacity"] * (1 + 1e-6)).all() or not (runs["band"][here] > 0).any()
        on_machines += here
    assert sorted(on_machines) == np.flatnonzero(runs["state"] == RUNNING).tolist()
    assert (ticks["use"] <= ticks["capacity"] * (1 + 1e-9)).all()
    assert runs["kills"].sum() == len(outcome.kills) == ticks["kills"].sum()
    work = balance(outcome)
    assert work["asked_h"] == pytest.approx(work["done_h"] + work["left_h"])
    assert work["executed_h"] == pytest.approx(work["done_h"] + work["lost_h"])
    assert work["due_h"] == pytest.approx(work["served_h"] + work["missed_h"])
    assert min(work.values()) >= 0
    lived = (runs["ran_us"] + runs["waited_us"])[runs["state"] != AHEAD]
    until = np.where(runs["state"] == DONE, runs["ended_us"], slots * SLOT_US)[runs["state"] != AHEAD]
    assert (lived == until - runs["arrival_us"][runs["state"] != AHEAD]).all()  # no run depends on another one here
    for kill in outcome.kills:
        assert kill["cause"] in (OWN_LIMIT, MACHINE, PREEMPTED, MACHINE_GONE)


@settings(max_examples=100, deadline=None)
@given(cells(), st.integers(1, 5))
def test_a_machine_is_passed_over_only_where_no_preemption_makes_room(
    cell: tuple[Any, Machines, int], spread: int
) -> None:
    tasks, on, slots = cell
    outcome = run(*(replace(t, rank=t.rank * spread) for t in tasks), on=on, slots=slots)  # some above ``RANKS``
    runs, how = outcome.runs, np.zeros(1, [("checkpoint_us", "i8")])[0]
    for machine in outcome.machines:
        for asking in runs[runs["state"] != RUNNING]:
            asked = asking["asked"]
            rank, _ = price(asking, machine, runs, asked, how, slots * SLOT_US)
            assert rank < 0 or all(could_fit(asking, machine, r, asked[r]) for r in range(2))


def test_a_machine_whose_lower_work_is_too_little_is_passed_over_without_a_look_at_its_tasks() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 9, (0.3, 0.3), rank=1), Task([(0.1, 0.1)] * 9, (0.6, 0.6), rank=2),
        Task(QUIET, (0.5, 0.3), at=1, rank=2), slots=3,
    )  # fmt: skip
    asking, machine = outcome.runs[2], outcome.machines[0]
    assert [could_fit(asking, machine, r, asking["asked"][r]) for r in range(2)] == [False, True]
    assert [could_fit(asking, machine, r, 0.4) for r in range(2)] == [True, True]  # all of 0.3 and the 0.1 left


@settings(max_examples=25, deadline=None)
@given(cells())
def test_the_same_seed_gives_the_same_outcome(cell: tuple[Any, Machines, int]) -> None:
    tasks, on, slots = cell
    a, b = (run(*tasks, on=on, slots=slots, seed=3, enough=1, checkpoint_s=450.0) for _ in range(2))
    assert a.runs.tobytes() == b.runs.tobytes()
    assert a.ticks.tobytes() == b.ticks.tobytes()
    assert a.kills.tobytes() == b.kills.tobytes()


def test_the_summary_counts_what_a_small_cell_did() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 3 + [(0.1, 0.7)], (0.8, 0.8), held=(0.1, 0.1), band=PRODUCTION, rank=9, carried=True),
        Task([(0.1, 0.4)] * 5, (0.5, 0.5), rank=0),
        slots=12,
    )
    found = summary(outcome)
    days = 12 * 300 / 86400  # 4 slots of the first, 8 of the second
    assert found["task_days"] == pytest.approx(days)
    assert found["machine_per_1000_task_days"] == pytest.approx(1000 / days)
    assert found["oom_kills"] == 1
    assert found["production_oom_kills"] == 0
    assert found["wasted"] == pytest.approx(3 / 8)
    assert found["waiting"] == pytest.approx(1 / 13)
    assert found["finished"] == 2
    assert over_time(outcome, 4)["oom_kills"] == [0, 1, 1, 1]
