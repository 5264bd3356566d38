"""The closed loop on cells small enough to work out by hand: every rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.replay.closed_loop.outcome import balance, over_time, summary
from reclaim.replay.closed_loop.records import (
    AHEAD,
    CAUSES,
    CPU,
    DONE,
    MONITORING,
    PENDING,
    PRODUCTION,
    REASONS,
    RUNNING,
)
from reclaim.replay.closed_loop.simulate import Outcome, Scheduling, simulate
from tests.replay.small_cells import (
    QUIET,
    SLOT_US,
    Change,
    SmallCell,
    Task,
    cells,
    killed,
    machines,
    run,
    states,
    workload,
)


def test_a_run_is_placed_when_it_is_submitted_and_ends_when_its_tape_does() -> None:
    one = run(Task(QUIET, at=1.5)).runs[0]
    assert one["first_placed_us"] == 1.5 * SLOT_US
    assert one["ended_us"] == 5.5 * SLOT_US
    assert one["state"] == DONE
    assert one["ran_us"] == 4 * SLOT_US


def test_non_production_goes_into_what_reservations_leave_free_and_not_before_they_do() -> None:
    first = Task([(0.1, 0.1)] * 8, limit=(0.8, 0.8), reserved=(0.2, 0.2))
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
        Task([(0.1, 0.1)] * 9, limit=(0.6, 0.6), reserved=(0.2, 0.2), band=PRODUCTION, rank=5),
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
    both = run(  # the limits of both have to go
        *[Task([(0.1, 0.1)] * 9, (0.4, 0.4), band=PRODUCTION, rank=1)] * 2,
        Task(QUIET, (0.8, 0.8), at=1, band=MONITORING, rank=2),
        slots=5,
    )
    next_to_batch = run(  # of a rank between the two: what is lowest comes first, but for production
        Task([(0.1, 0.1)] * 9, (0.4, 0.4), band=PRODUCTION, rank=1),
        Task([(0.1, 0.1)] * 9, (0.4, 0.4), rank=2),
        Task(QUIET, (0.4, 0.4), at=1, band=PRODUCTION, rank=3),
        slots=5,
    )
    assert [killed(o) for o in (same, higher, production, monitoring, both, next_to_batch)] == [
        [], [(0, "preempted")], [], [(0, "preempted")], [(1, "preempted"), (0, "preempted")], [(1, "preempted")],
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
        Task([(0.1, 0.1)] * 9, (0.4, 0.4), reserved=(0.1, 0.1), band=PRODUCTION, rank=5, carried=True),
        Task([(0.1, 0.1)] * 9, (0.5, 0.5), reserved=(0.3, 0.3), carried=True),
        Task(QUIET, (0.6, 0.6), at=1, band=PRODUCTION, rank=5),
        slots=3,
    )
    # limits of production 0.4 + 0.6, reservations 0.1 + 0.3 + 0.6: both fit, although all limits together are 1.5
    assert states(outcome) == [RUNNING, RUNNING, RUNNING]
    assert killed(outcome) == []


def test_out_of_memory_kills_from_the_lowest_priority_up_until_the_rest_fits() -> None:
    burst = [(0.1, 0.1), (0.1, 0.1), (0.1, 0.45), (0.1, 0.1)]
    small = Task(burst, limit=(0.3, 0.5), reserved=(0.1, 0.1))
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


def test_out_of_memory_kills_until_the_remaining_reservations_can_be_met_and_production_only_for_usage() -> None:
    def soon(memory: float) -> list[tuple[float, float]]:
        return [(0.1, 0.1), (0.1, memory), (0.1, memory)]

    def crowd(production: float, middle: float) -> Outcome:
        burst = [(0.1, 0.1), (0.1, 0.35), (0.1, 0.1)]
        return run(
            Task(burst, (0.5, 0.6), reserved=soon(production), rank=3, band=PRODUCTION, carried=True),
            Task(burst, (0.3, 0.6), reserved=soon(middle), rank=2, carried=True),
            Task(burst, (0.3, 0.6), reserved=(0.1, 0.1), rank=1, carried=True),
            on=machines((1.0, 1.0), changes=[]), slots=2,
        )  # fmt: skip

    # tick 1: each uses 0.35, 1.05 of 1.0. Without run 2 usage is 0.7, and 0.4 + 0.4 is reserved: that can be met.
    assert killed(crowd(0.4, 0.4)) == [(2, "machine")]
    # 0.6 + 0.45 cannot, although usage fits, so run 1 goes as well
    assert killed(crowd(0.6, 0.45)) == [(2, "machine"), (1, "machine")]
    both = replace(Task([(0.1, 0.1), (0.1, 0.45)], (0.5, 0.6), reserved=[(0.1, 0.1), (0.1, 0.6)]), carried=True)
    outcome = run(
        *[replace(both, rank=3, band=PRODUCTION)] * 2, Task([(0.1, 0.2)] * 3, (0.1, 0.2), carried=True),
        on=machines((1.0, 1.2), changes=[Change(0.5, 0, capacity=(1.0, 1.0))]), slots=2,
    )  # fmt: skip
    # 0.45 + 0.45 + 0.2 of 1.0: run 2 goes. Production reserves 1.2 of 1.0 and stays, as it uses 0.9.
    assert killed(outcome) == [(2, "machine")]


def test_a_task_above_its_own_limit_dies_first_whatever_its_priority() -> None:
    quiet, burst = [(0.1, 0.4)] * 4, [(0.1, 0.4), (0.1, 0.7), (0.1, 0.4), (0.1, 0.4)]
    outcome = run(
        Task(burst, (0.5, 0.5), band=PRODUCTION, rank=9, carried=True),
        Task(quiet, (0.5, 0.5), rank=0, carried=True),
        slots=2,
    )
    assert killed(outcome) == [(0, "own_limit")]
    lower = run(
        Task(burst, (0.5, 0.5), band=PRODUCTION, rank=1, carried=True),
        Task(quiet, (0.5, 0.5), rank=9, carried=True),
        slots=2,
    )
    assert killed(lower) == [(0, "own_limit")]  # not production is killed before production, but only within its limit


def test_a_task_above_its_reservation_takes_the_room_that_it_uses_at_once() -> None:
    burst = [(0.1, 0.1), (0.6, 0.6), (0.1, 0.1), (0.1, 0.1)]
    outcome = run(
        Task(burst, (0.8, 0.8), reserved=(0.1, 0.1), carried=True),
        Task([(0.1, 0.1)] * 2, (0.5, 0.5), at=1.5),
        slots=4,
    )
    assert outcome.ticks["reserved"][:2].tolist() == [pytest.approx([0.1, 0.1]), pytest.approx([0.6, 0.6])]
    assert outcome.runs["first_placed_us"].tolist() == [0, 2 * SLOT_US]


def test_memory_runs_out_at_the_moment_a_task_is_placed_that_uses_too_much() -> None:
    outcome = run(Task([(0.1, 0.45)] * 4), Task([(0.1, 0.7)] * 4, at=0.5), slots=1)
    assert killed(outcome) == [(1, "own_limit")]
    assert outcome.kills["at_us"].tolist() == [SLOT_US // 2]


def test_a_task_above_its_own_limit_lives_while_there_is_memory() -> None:
    outcome = run(Task([(0.1, 0.7)] * 4, (0.5, 0.5)), slots=3)
    assert killed(outcome) == []


def test_production_dies_only_when_nothing_else_is_left() -> None:
    burst = [(0.1, 0.1), (0.1, 0.6), (0.1, 0.1)]
    on = machines((1.0, 1.0), changes=[])
    outcome = run(
        Task(burst, (0.5, 0.7), band=PRODUCTION, rank=1, carried=True),
        Task(burst, (0.5, 0.3), band=PRODUCTION, rank=2, carried=True),
        Task([(0.1, 0.05)] * 3, (0.1, 0.1), rank=0, reserved=(0.0, 0.0), carried=True),
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
        Task([(0.1, 0.1)] * 3 + [(0.1, 0.7)], (0.8, 0.8), reserved=(0.1, 0.1), band=PRODUCTION, rank=9, carried=True),
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
        Task([(0.1, 0.1)] * 3 + [(0.1, 0.7)], (0.8, 0.8), reserved=(0.1, 0.1), band=PRODUCTION, rank=9, carried=True),
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
    first = run(Task(QUIET, after=1), Task(QUIET), slots=6)  # as of a task whose runs came before the period
    assert first.runs["first_placed_us"].tolist() == [4 * SLOT_US, 0]


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
        Task([(0.1, 0.6)] * 3, (0.1, 0.0), reserved=(0.1, 0.0), band=PRODUCTION, rank=5, carried=True),
        Task([(0.1, 0.6)] * 3, (0.1, 0.6), reserved=(0.1, 0.1), rank=1, carried=True),
        slots=2,
    )
    assert killed(outcome)[0] == (1, "machine")


def test_a_machine_that_goes_takes_its_work_along_and_one_that_comes_is_used() -> None:
    on = machines((1.0, 1.0), (1.0, 1.0), changes=[(0, 1, False), (2.5, 0, False), (3.5, 1, True)])
    outcome = run(Task([(0.1, 0.1)] * 4), on=on, slots=10)
    assert killed(outcome) == [(0, "machine_gone")]
    assert outcome.runs["ended_us"].tolist() == [8 * SLOT_US]
    assert outcome.ticks["capacity"][:5, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 1.0]


def test_at_one_moment_runs_end_then_machines_change_then_runs_arrive() -> None:
    on = machines((1.0, 1.0), (1.0, 1.0), changes=[(1, 1, False), (2.5, 0, False), (2.5, 1, True)])
    one = Task([(0.1, 0.1)] * 2, (0.9, 0.9), at=0.5)
    outcome = run(Task(QUIET[:1], (0.9, 0.9)), one, replace(one, at=2.5), on=on, slots=6)
    assert killed(outcome) == []
    assert (outcome.runs["ended_us"] / SLOT_US).tolist() == [1, 2.5, 4.5]


def test_a_machine_that_is_closed_keeps_its_work_and_takes_none() -> None:
    on = machines((1.0, 1.0), changes=[Change(1, 0, open=False), Change(3.25, 0)])
    outcome = run(Task([(0.1, 0.1)] * 6), Task(QUIET, (0.2, 0.2), at=1.5), on=on, slots=8)
    assert killed(outcome) == []
    assert outcome.runs["first_placed_us"].tolist() == [0, 4 * SLOT_US]  # open again, it takes work at the next tick
    assert outcome.runs["ended_us"].tolist() == [6 * SLOT_US, 8 * SLOT_US]
    # what it has and what runs on it count while it is closed, too, at ticks 1 to 3
    assert outcome.ticks["capacity"][:, 0].tolist() == [1.0] * 8
    assert outcome.ticks["running"].tolist() == [1, 1, 1, 1, 1, 2, 1, 1]


def test_a_machine_that_loses_memory_is_relieved_at_that_moment() -> None:
    on = machines((1.0, 1.0), changes=[Change(1.5, 0, capacity=(1.0, 0.5))])
    half = Task([(0.1, 0.4)] * 4, (0.45, 0.45))
    outcome = run(replace(half, rank=1), half, on=on, slots=4)
    assert killed(outcome) == [(1, "machine")]
    assert outcome.kills["at_us"].tolist() == [1.5 * SLOT_US]
    assert outcome.kills["lost_us"].tolist() == [1.5 * SLOT_US]


def test_reservations_follow_the_margin_of_the_slot() -> None:
    made, reserved = workload(Task([(0.1, 0.1)] * 6, (0.8, 0.8), reserved=(0.4, 0.4)), slots=6)
    both = np.concatenate([reserved, reserved / 2])
    outcome = simulate(made, machines((1.0, 1.0)), both, np.array([0, 0, 1, 1, 0, 0], np.int8))
    assert outcome.ticks["reserved"][:, 0].tolist() == pytest.approx([0.8, 0.4, 0.2, 0.2, 0.4, 0.4])


def test_runs_from_before_are_placed_by_the_margin_of_the_first_slot() -> None:
    tasks = [Task([(0.1, 0.1)] * 6, (0.8, 0.8), reserved=(0.8, 0.8), carried=True) for _ in range(2)]
    made, reserved = workload(*tasks, slots=6)
    both = np.concatenate([reserved, reserved / 2])
    tight, wide = (
        simulate(made, machines((1.0, 1.0)), both, np.full(6, row, np.int8)).ticks["running"][0] for row in (1, 0)
    )
    assert (tight, wide) == (2, 1)  # 0.4 each, and 0.8


def test_a_period_that_ends_within_a_slot_ends_there() -> None:
    made, reserved = workload(
        Task(QUIET), Task(QUIET[:2]), Task(QUIET, (0.9, 0.9), at=0.25), Task([(0.1, 0.1)] * 9, at=2.75), slots=5
    )
    until_us = int(2.5 * SLOT_US)
    outcome = simulate(replace(made, stop_us=until_us), machines((1.0, 1.0)), reserved)
    assert len(outcome.ticks) == 3
    assert states(outcome) == [RUNNING, DONE, PENDING, AHEAD]
    assert outcome.runs["ran_us"].tolist() == [until_us, 2 * SLOT_US, 0, 0]
    assert outcome.runs["waited_us"].tolist() == [0, 0, 2.25 * SLOT_US, 0]
    assert outcome.machines["busy_us"].tolist() == [until_us + 2 * SLOT_US]
    assert outcome.machines["changed_us"].tolist() == [until_us]
    ending = replace(made, stop_us=int(1.5 * SLOT_US))  # the second would end in the slot, after the period
    assert states(simulate(ending, machines((1.0, 1.0)), reserved)) == [RUNNING, RUNNING, PENDING, AHEAD]


@settings(max_examples=10, deadline=None)
@given(cell=cells(), seed=st.integers(0, 9))
def test_the_same_arguments_which_stay_as_they_are_give_the_same_outcome(cell: SmallCell, seed: int) -> None:
    made, reserved = workload(*cell.tasks, slots=cell.slots, masks=cell.masks, predecessors=cell.predecessors)
    given_to = (made.runs, made.tape, made.masks, made.predecessors, cell.on.state, cell.on.changes, reserved)
    before = [array.copy() for array in given_to]
    first, second = (simulate(made, cell.on, reserved, scheduling=Scheduling(seed=seed)) for _ in range(2))
    for array, was in zip(given_to, before, strict=True):
        np.testing.assert_array_equal(array, was)
    for one, other in zip(
        (first.runs, first.machines, first.ticks, first.kills),
        (second.runs, second.machines, second.ticks, second.kills),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(6))
def test_in_whatever_order_machines_are_searched_they_are_told_by_their_own_places(seed: int) -> None:
    # each run may be on one machine alone, of which the third goes with its work, and the fourth is out of memory
    masks = np.eye(5, dtype=np.bool_)
    tasks = [Task([(0.1, 0.1)] * 9, mask=k) for k in range(5)]
    tasks.append(Task([(0.1, 0.1), (0.1, 2.0), (0.1, 2.0)], mask=3, rank=1))
    on = machines(*((1.0 + k, 1.0) for k in range(5)), changes=[(1.5, 2, False)])
    outcome = run(*tasks, on=on, slots=3, masks=masks, seed=seed)
    assert outcome.machines["capacity"][:, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert outcome.machines["up"].tolist() == [True, True, False, True, True]
    assert outcome.runs["machine"][:5].tolist() == [0, 1, -1, 3, 4]
    assert {(int(k["machine"]), CAUSES[k["cause"]]) for k in outcome.kills} == {(2, "machine_gone"), (3, "own_limit")}


def test_a_collection_waits_for_all_that_must_end_before_it_in_whatever_order_they_are_given() -> None:
    tasks = [Task(QUIET[:length], (0.1, 0.1), collection=k) for k, length in enumerate((1, 2, 3, 1))]
    for pairs in ([(3, 2), (3, 1), (2, 0), (1, 0)], [(1, 0), (3, 1), (2, 0), (3, 2)]):
        outcome = run(*tasks, slots=8, predecessors=pairs)
        assert outcome.runs["first_placed_us"].tolist() == [0, SLOT_US, SLOT_US, 4 * SLOT_US]
        assert states(outcome) == [DONE] * 4


def test_the_seed_is_that_of_the_order_in_which_machines_are_searched() -> None:
    on = machines(*[(1.0, 1.0)] * 64)
    first = [run(Task(QUIET), on=on, slots=2, enough=1, seed=seed).runs["machine"][0] for seed in range(8)]
    assert len(set(first)) > 4  # machines that are alike


def test_there_is_room_for_every_stop_however_often_runs_are_stopped() -> None:
    # each is on its own machine, above its limit and the machine's memory at its first, second or third slot, where it
    # is stopped, and begins again
    tasks = [Task([(0.1, 0.1)] * k + [(0.1, 2.0)] * 40, (0.5, 0.5), mask=k) for k in range(3)]
    outcome = run(*tasks, on=machines(*[(1.0, 1.0)] * 3), masks=np.eye(3, dtype=np.bool_), slots=40)
    kills = outcome.kills
    assert np.bincount(kills["run"]).tolist() == outcome.runs["kills"].sum(axis=1).tolist()
    assert len(kills) > 60
    assert (kills["machine"] == kills["run"]).all()
    assert (np.diff(kills["at_us"]) >= 0).all()


def test_a_run_from_before_keeps_its_reservation_and_a_new_one_holds_its_limit_at_first() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 5, (0.8, 0.8), reserved=(0.3, 0.3), carried=True),
        Task([(0.1, 0.1)] * 5, (0.5, 0.5), reserved=(0.2, 0.2), at=0.5),
        slots=3,
    )
    # the second was placed at 0.5: at tick 1 it is younger than 300 s
    assert outcome.ticks["reserved"][1:, 0].tolist() == pytest.approx([0.3 + 0.5, 0.3 + 0.2])


def test_each_slot_counts_the_runs_that_go_on_as_it_begins_and_those_that_end_in_it() -> None:
    ticks = run(Task(QUIET), Task(QUIET[:2], at=1), slots=6).ticks
    assert ticks["running"].tolist() == [1, 1, 2, 1, 0, 0]  # the second is placed after slot 1 has been settled
    assert ticks["ended"].tolist() == [0, 0, 1, 1, 0, 0]  # at 3 and at 4, which belong to the slots before


def test_the_summary_counts_what_a_small_cell_did() -> None:
    outcome = run(
        Task([(0.1, 0.1)] * 3 + [(0.1, 0.7)], (0.8, 0.8), reserved=(0.1, 0.1), band=PRODUCTION, rank=9, carried=True),
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
