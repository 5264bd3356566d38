"""Whose turn it is: who is tried first and who at all, who makes room and where, who dies first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reclaim.replay.closed_loop.records import (
    BLOCKED,
    CONSTRAINTS,
    DONE,
    MONITORING,
    PENDING,
    PRODUCTION,
    RUNNING,
    SPREAD,
)
from reclaim.replay.closed_loop.simulate import Outcome
from tests.replay.small_cells import QUIET, SLOT_US, Change, Pair, Task, killed, machines, run, states


def long(limit: float | Pair, **how: Any) -> Task:
    """Return a run that outlasts the cell."""
    return task(limit, 20, **how)


def task(limit: float | Pair, slots: int, **how: Any) -> Task:
    """Return a run that uses little of its limit, one of CPU and memory or two."""
    return Task([(0.05, 0.05)] * slots, limit if isinstance(limit, tuple) else (limit, limit), **how)


def placed(outcome: Outcome) -> list[float]:
    """Return when each run was placed first, in slots; -1 never."""
    return [float(at) / SLOT_US if at >= 0 else -1 for at in outcome.runs["first_placed_us"]]


def test_of_those_that_wait_the_highest_is_placed_first_and_of_equals_the_one_that_waited_longest() -> None:
    one = task(0.6, 1, rank=1)
    outcome = run(
        task(0.8, 3, rank=5), replace(one, at=0.25), replace(one, at=0.5), replace(one, at=0.75, rank=2), slots=8
    )
    assert placed(outcome) == [0, 4, 5, 3]  # there is room for one at a time


def test_within_a_priority_users_take_turns_so_that_one_large_collection_does_not_keep_others_waiting() -> None:
    one = task(0.6, 1, rank=1)
    of_first = [replace(one, at=0.1 * k) for k in (1, 2, 3)]
    outcome = run(
        task(0.8, 3, rank=5), *of_first, replace(one, at=0.5, user=1), replace(one, at=0.6, user=2),
        replace(one, at=0.7, user=1), replace(one, at=0.8, rank=2), slots=12,
    )  # fmt: skip
    # there is room for one at a time: first that of rank 2, of user 0; then of users 1, 2, 0, 1, and 0 alone
    assert placed(outcome) == [0, 6, 8, 9, 4, 5, 7, 3]


def test_a_users_turn_within_a_priority_is_not_used_up_by_one_of_a_higher_priority() -> None:
    one = long(0.4, rank=1)
    outcome = run(
        task(0.8, 2, rank=5), long(0.5, rank=2, at=0.1), replace(one, at=0.2), replace(one, at=0.3, user=1),
        replace(one, at=0.4, user=1), slots=4,
    )  # fmt: skip
    assert placed(outcome) == [0, 2, 2, -1, -1]


def test_a_collection_that_starts_after_another_waits_for_the_last_of_its_runs() -> None:
    first = task(0.6, 1, rank=1, collection=1)
    cell = (
        task(0.8, 3, rank=5), replace(first, at=0.25), replace(first, at=0.5),
        task(0.05, 1, rank=9, collection=2, at=1.5), task(0.05, 1, rank=9, collection=3, at=1.5),
    )  # fmt: skip
    assert placed(run(*cell, slots=9)) == [0, 3, 4, 1.5, 1.5]
    # collection 1 has one place at a time from tick 3 on, and ends at tick 5; collection 2 lacked nothing else then
    late = run(*cell, slots=9, predecessors=[(2, 1)])
    assert placed(late) == [0, 3, 4, 5, 1.5]
    assert late.runs["ready_us"][3] == 5 * SLOT_US
    assert late.runs["waited_us"][3] == 0
    # in a period that ends before, it never starts
    assert states(run(*cell, slots=4, predecessors=[(2, 1)]))[3] == BLOCKED
    # a predecessor without a run has ended; one that went on before waits for none
    assert placed(run(*cell, slots=9, predecessors=[(2, 0)])) == [0, 3, 4, 3, 1.5]
    going_on = run(task(0.8, 3), replace(cell[3], at=0, carried=True), slots=4, predecessors=[(2, 0)])
    assert placed(going_on) == [0, 0]


def test_a_run_after_one_whose_time_passed_waits_for_the_predecessors_of_its_collection() -> None:
    goes_on = Task(use=[(0.1, 0.1)] * 8)
    too_large = Task(use=QUIET, limit=(2.0, 2.0), band=PRODUCTION, carried=True, collection=1)
    following = Task(use=QUIET, collection=1, after=1)
    runs = run(goes_on, too_large, following, slots=12, predecessors=[(1, 0)]).runs
    assert (runs["ended_us"][:2] // SLOT_US).tolist() == [8, 4]
    assert runs["first_placed_us"][2] // SLOT_US == 8


def test_a_service_that_starts_after_another_collection_misses_what_it_waited_and_ends_by_the_clock() -> None:
    late = run(
        task(0.5, 3), task(0.1, 2, collection=1, at=0.5, band=PRODUCTION, rank=9),
        task(0.1, 4, collection=2, at=1, band=PRODUCTION, rank=9), slots=9, predecessors=[(1, 0), (2, 0)],
    )  # fmt: skip
    assert placed(late) == [0, -1, 3]
    assert states(late) == [DONE, DONE, DONE]
    assert late.runs["ran_us"].tolist() == [3 * SLOT_US, 0, 2 * SLOT_US]
    assert late.runs["ended_us"].tolist() == [3 * SLOT_US, 3 * SLOT_US, 5 * SLOT_US]
    assert late.runs["waited_us"].tolist() == [0, 0, 0]  # not for a machine


def test_one_that_waits_preempts_as_soon_as_that_makes_room_for_it() -> None:
    outcome = run(task(0.5, 2, rank=5), long(0.5, rank=0), long(0.8, rank=2, at=0.5), slots=4)
    # 0.5 + 0.8 do not fit next to rank 5, whatever happens to rank 0; from tick 2 on 0.8 fits in place of it
    assert placed(outcome) == [0, 0, 2]
    assert killed(outcome) == [(1, "preempted")]


@pytest.mark.parametrize("how", [{}, {"per_machine": 1}, {"band": PRODUCTION}, {"band": MONITORING}])
def test_what_was_placed_in_this_slot_gives_way_in_it(how: dict[str, Any]) -> None:
    outcome = run(long(0.9, at=0.25), long(0.9, at=0.5, rank=1, collection=1, **how), slots=3)
    assert placed(outcome) == [0.25, 0.5]
    assert killed(outcome) == [(0, "preempted")]


def test_one_that_failed_under_its_constraints_does_not_keep_one_of_others_from_being_tried() -> None:
    masks = np.array([[True, False], [False, True]])
    outcome = run(
        long(0.9, rank=5), task(0.9, 2, rank=5, mask=1),
        long(0.5, rank=3, at=0.5), long(0.5, rank=3, at=0.5, mask=1),
        on=machines((1.0, 1.0), (1.0, 1.0)), masks=masks, slots=4,
    )  # fmt: skip
    assert placed(outcome) == [0, 0, -1, 2]


def test_one_whose_job_is_spread_does_not_keep_one_of_another_job_from_being_tried() -> None:
    outcome = run(
        long(0.3, collection=7, per_machine=1), task(0.6, 2),
        long(0.3, collection=7, per_machine=1, at=0.5), long(0.3, collection=8, at=0.5),
        slots=4,
    )  # fmt: skip
    assert placed(outcome) == [0, 0, -1, 2]
    assert outcome.runs["reason"][2] == SPREAD


def test_production_that_failed_does_not_keep_what_may_use_reclaimed_resources_from_being_tried() -> None:
    outcome = run(
        long(0.8, reserved=(0.1, 0.1), carried=True, band=PRODUCTION, rank=5), task(0.9, 2, carried=True),
        long(0.3, at=0.5, band=PRODUCTION, rank=4), long(0.3, at=0.5),
        slots=4,
    )  # fmt: skip
    # production's limits would be 0.8 + 0.3; the last one fits next to the reservation of 0.1
    assert placed(outcome) == [0, 0, -1, 2]


def test_production_that_failed_does_not_keep_monitoring_of_a_lower_priority_from_preempting_production() -> None:
    outcome = run(
        long(0.5, band=PRODUCTION, rank=1), task(0.5, 2, band=MONITORING, rank=9),
        long(0.6, at=0.5, band=PRODUCTION, rank=5), long(0.6, at=0.5, band=MONITORING, rank=4),
        slots=4,
    )  # fmt: skip
    # from 2 on 0.5 is free; the third may not preempt the first, and is tried before the last, which may
    assert placed(outcome) == [0, 0, -1, 2]
    assert killed(outcome) == [(0, "preempted")]


def test_one_that_asks_for_less_than_one_that_failed_is_tried() -> None:
    masks = np.array([[True, False], [False, True], [True, True]])
    on = machines((1.0, 1.0), (1.0, 1.0))
    outcome = run(
        long((0.1, 0.9), rank=5), task((0.8, 0.05), 2, rank=5), long((0.9, 0.1), rank=5, mask=1),
        long((0.6, 0.6), at=0.5, mask=2), long((0.5, 0.05), at=0.5, mask=2),
        on=on, masks=masks, slots=4,
    )  # fmt: skip
    # from tick 2 on there are 0.9 of CPU on one machine and 0.9 of memory on the other
    assert placed(outcome) == [0, 0, 0, -1, 2]


def test_what_a_run_asks_of_each_resource_is_compared_with_the_most_that_is_left_of_that_one() -> None:
    cells: list[tuple[Pair, Pair, Pair]] = [
        ((0.1, 0.4), (0.1, 0.9), (0.5, 1.0)),
        ((0.4, 0.1), (0.9, 0.1), (1.0, 0.5)),
    ]
    for first, asking, capacity in cells:  # 0.9 of one resource on a machine that never has more than 0.5 of the other
        outcome = run(task(first, 2), long(asking, at=0.5), on=machines(capacity), slots=4)
        assert placed(outcome) == [0, 2]


def test_one_that_asks_for_less_now_than_at_first_is_tried_though_one_that_asks_for_less_than_that_failed() -> None:
    falls = [(0.5, 0.5)] * 2 + [(0.1, 0.1)] * 2
    outcome = run(
        long(0.8, band=PRODUCTION, rank=5), long(0.05), long(0.3, band=PRODUCTION, rank=4, at=0.5),
        Task(QUIET, falls, band=PRODUCTION, rank=3, at=0.5), slots=4,
    )  # fmt: skip
    assert placed(outcome) == [0, 0, -1, 3]  # its third window begins at 2.5


def test_one_that_asks_for_more_now_than_at_first_does_not_keep_one_that_asks_for_less_from_being_tried() -> None:
    rises = [(0.1, 0.1)] + [(0.5, 0.5)] * 3
    outcome = run(
        long(0.7, band=PRODUCTION, rank=5), task(0.3, 2, band=PRODUCTION, rank=5),
        Task(QUIET, rises, band=PRODUCTION, rank=4, at=0.5), long(0.2, band=PRODUCTION, rank=3, at=0.6), slots=4,
    )  # fmt: skip
    assert placed(outcome) == [0, 0, -1, 2]  # of the 0.3 that are free from 2 on


def test_room_that_a_preemption_makes_is_used_at_the_same_tick() -> None:
    outcome = run(
        long(0.9, rank=2), task(0.05, 1, collection=1), long(0.4, rank=1, at=0.2),
        long(0.5, rank=5, at=0.4, collection=2), slots=3, predecessors=[(2, 1)],
    )  # fmt: skip
    assert killed(outcome) == [(0, "preempted")]
    assert placed(outcome) == [0, 0, 1, 1]


def test_nothing_is_preempted_on_a_machine_that_the_constraints_do_not_allow() -> None:
    masks = np.array([[True, False], [False, True]])
    cell = long(0.9, rank=3), long(0.9, rank=0, mask=1)
    on = machines((1.0, 1.0), (1.0, 1.0))
    allowed = run(*cell, long(0.9, rank=2, at=1, mask=1), on=on, masks=masks, slots=3)
    assert killed(allowed) == [(1, "preempted")]
    outcome = run(*cell, long(0.9, rank=2, at=1, mask=0), on=on, masks=masks, slots=3)
    assert killed(outcome) == []
    assert states(outcome) == [RUNNING, RUNNING, PENDING]


@pytest.mark.parametrize("band", [PRODUCTION, MONITORING])
def test_nothing_is_preempted_on_a_machine_that_takes_no_new_work(band: int) -> None:
    on = machines((1.0, 1.0), changes=[Change(1, 0, open=False), Change(3, 0)])
    outcome = run(long(0.9), long(0.5, at=1.5, band=band, rank=9), on=on, slots=3)
    assert killed(outcome) == []
    assert states(outcome) == [RUNNING, PENDING]
    assert outcome.runs["reason"][1] == CONSTRAINTS
    later = run(long(0.9), long(0.5, at=1.5, band=band, rank=9), on=on, slots=5)
    assert placed(later) == [0, 4]  # it is open again from 3 on
    assert killed(later) == [(0, "preempted")]


def test_nothing_is_preempted_on_a_machine_that_holds_as_many_of_the_job_as_may_be_there() -> None:
    cell = long(0.3, rank=5, collection=7, per_machine=1), long(0.6, rank=0)
    asking = long(0.5, rank=5, at=1, collection=7, per_machine=1)
    assert killed(run(*cell, replace(asking, collection=8), slots=3)) == [(1, "preempted")]
    outcome = run(*cell, asking, slots=3)
    assert killed(outcome) == []
    assert states(outcome) == [RUNNING, RUNNING, PENDING]


def test_out_of_memory_production_outlives_work_of_a_higher_priority_that_is_not_production() -> None:
    burst: list[Pair] = [(0.1, 0.4), (0.1, 0.6)]
    outcome = run(
        Task(burst, (0.1, 0.7), reserved=(0.1, 0.4), carried=True, band=PRODUCTION, rank=1),
        Task([(0.1, 0.5)] * 4, (0.1, 0.5), carried=True, rank=9),
        slots=2,
    )
    # at tick 1 0.6 + 0.5, neither above its own limit
    assert killed(outcome) == [(1, "machine")]
    assert outcome.kills["at_us"].tolist() == [SLOT_US]


def test_a_service_whose_time_passes_while_the_run_before_it_goes_on_is_never_placed_and_the_next_one_is() -> None:
    first = task(0.3, 4, band=PRODUCTION, rank=1)
    outcome = run(
        first,
        replace(first, use=QUIET[:3], at=1, after=0),  # until 4, when the first ends
        replace(first, use=QUIET[:1], at=1.5, after=1),  # until 2.5
        replace(first, use=QUIET, at=2, after=2),  # until 6
        slots=8,
    )
    assert placed(outcome) == [0, -1, -1, 4]
    assert outcome.runs["ready_us"].tolist() == [0, 4 * SLOT_US, 4 * SLOT_US, 4 * SLOT_US]
    assert outcome.runs["ended_us"].tolist() == [4 * SLOT_US, 4 * SLOT_US, 4 * SLOT_US, 6 * SLOT_US]
    assert outcome.runs["ran_us"].tolist() == [4 * SLOT_US, 0, 0, 2 * SLOT_US]
    assert outcome.runs["waited_us"].tolist() == [0, 0, 0, 0]


def test_when_a_service_has_waited_until_its_time_had_passed_the_task_s_next_run_is_tried() -> None:
    service = task(0.5, 2, band=PRODUCTION, rank=1)
    outcome = run(
        task(0.8, 4, band=PRODUCTION, rank=1), replace(service, at=0.5), replace(service, use=QUIET, at=1, after=1),
        slots=8,
    )  # fmt: skip
    # from 0.5 to 2.5 it waits in vain; from 4 on there is room for the next one, until 5
    assert placed(outcome) == [0, -1, 4]
    assert outcome.runs["ready_us"].tolist() == [0, 0.5 * SLOT_US, 2.5 * SLOT_US]
    assert outcome.runs["ended_us"].tolist() == [4 * SLOT_US, 2.5 * SLOT_US, 5 * SLOT_US]
    assert outcome.runs["waited_us"].tolist() == [0, 2 * SLOT_US, 1.5 * SLOT_US]


def test_a_service_that_waits_ends_by_the_clock_within_a_slot_and_the_task_s_next_run_is_placed_then() -> None:
    too_large = task(2.0, 2, band=PRODUCTION, rank=1, at=0.25)
    outcome = run(too_large, task(0.5, 4, band=PRODUCTION, rank=1, at=1, after=0), slots=3)
    assert placed(outcome) == [-1, 2.25]
    assert states(outcome) == [DONE, RUNNING]
    assert outcome.runs["waited_us"].tolist() == [2 * SLOT_US, 0]
    brief = run(replace(too_large, use=QUIET[:1], at=0.25), slots=2)  # a slot after it came, which is after a tick
    assert (states(brief), brief.runs["ended_us"].tolist()) == ([DONE], [1.25 * SLOT_US])
