"""Facts of a task, told by themselves or with windows: limits, owners and runs, however windows are cut into calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reclaim.features.registry import AT
from reclaim.serving.cell.outcomes import ENDED, IN_THE_FUTURE, NO_LIMIT, RUN_TO_COME, why
from reclaim.training.bundle import Bundle
from tests.serving.cell_fixtures import Memory, S, W, assert_same, fact_rows, facts_of, memory_with, told_by, windows_of

TAKEN, LATE = range(2)


def test_a_window_without_a_known_limit_is_refused_and_the_last_limit_fills_in(memory: Memory) -> None:
    assert memory.write(windows_of({"limit": None})) == [NO_LIMIT]
    assert "the limit of its task is not known yet" in why(NO_LIMIT, memory.settings, memory.tracker.clock)
    assert len(memory.tracker) == 0
    memory.tell(fact_rows({"task": 1, "limit": 3.0}))
    assert memory.write(windows_of({"limit": None})) == [TAKEN]
    assert facts_of(memory)["granted"].tolist() == [3.0, 3.0]
    assert memory.write(
        windows_of({"limit": 4.0, "at": 1}),
    ) == [TAKEN]
    assert memory.write(windows_of({"limit": None, "at": 2})) == [TAKEN]
    assert facts_of(memory)["granted"].tolist() == [4.0, 4.0]


def test_facts_missing_in_a_window_are_filled_in_from_earlier_writes(memory: Memory) -> None:
    first = windows_of({"tier": 3, "scheduling_class": 2, "machine_id": 8, "user": 5, "name": 6, "scheduled_us": 7})
    memory.write(first, np.array([1], np.int8))
    memory.write(windows_of({"at": 1}), np.array([-1], np.int8))
    task = facts_of(memory)
    names = ("tier", "scheduling_class", "machine", "user", "name", "scheduled_us", "run_us", "in_alloc")
    assert [int(task[name]) for name in names] == [3, 2, 8, 5, 6, 7, 7, 1]
    memory.write(windows_of({"at": 2, "tier": 1, "machine_id": 9, "user": 50, "name": 60, "scheduled_us": 2 * W}),
                 np.array([0], np.int8))  # fmt: skip
    task = facts_of(memory)
    assert [int(task[name]) for name in names] == [1, 2, 9, 5, 6, 2 * W, 2 * W, 0]  # whose it is stays


def test_facts_written_alone_fill_in_the_next_window(bundle: Bundle) -> None:
    by_window, by_fact = (memory_with(bundle) for _ in range(2))
    by_window.write(windows_of({"tier": 3, "scheduling_class": 1, "machine_id": 4, "scheduled_us": 5, "user": 7}))
    by_fact.tell(fact_rows({"task": 1, "limit": 1.0, "tier": "prod", "scheduling_class": 1, "machine_id": 4,
                                    "scheduled_us": 5}))  # fmt: skip
    by_fact.write(windows_of({"limit": None, "user": 7}))
    theirs = told_by(by_fact.tracker, by_fact.settings)
    theirs.facts["limit_us"] = 0  # told before the first window, of no time
    assert_same(told_by(by_window.tracker, by_window.settings), theirs)


@pytest.mark.parametrize(
    ("since", "told_at", "expected"),
    [
        (None, 5, 3.0),  # from now: a window that began before tells the limit of then
        (None, 6, 9.0),  # one that began since tells that of now
        (5 * W, 5, 9.0),
        (5 * W + 1, 5, 3.0),
        (9 * W, 8, 3.0),  # known ahead
    ],
)
def test_the_current_limit_is_the_latest_of_windows_and_facts(
    memory: Memory, since: int | None, told_at: int, expected: float
) -> None:
    memory.write(windows_of({"at": 5, "task": 2}, {"at": 4}))
    assert memory.tracker.clock_us == 6 * W
    facts = {"task": 1, "limit": 3.0} | ({} if since is None else {"since_us": since})
    memory.tell(fact_rows(facts))
    assert facts_of(memory)["limit"].tolist() == [3.0, 3.0]
    assert facts_of(memory)["granted"].tolist() == [1.0, 1.0]  # the last window had its own
    memory.write(windows_of({"at": told_at, "limit": 9.0}))
    assert facts_of(memory)["limit"].tolist() == [expected, expected]
    assert facts_of(memory)["granted"].tolist() == [9.0, 9.0]


def test_the_first_owner_and_name_of_a_task_stay_told_in_one_call_or_in_two(memory: Memory) -> None:
    memory.tell(
        fact_rows(
            {"task": 1, "user": "ann"}, {"task": 1, "user": "bob", "logical_name": "web"},
            {"task": 1, "logical_name": "db"}, {"task": 2, "user": "ann", "logical_name": "web"},
        )
    )  # fmt: skip
    memory.tell(fact_rows({"task": 1, "user": "eve", "logical_name": "x"}))
    one, other = facts_of(memory), facts_of(memory, 2)
    assert (one["user"], one["name"]) == (other["user"], other["name"])
    assert min(one["user"], one["name"]) >= 0  # known: -1 means unknown


def test_facts_with_the_number_zero_are_stored_as_any_other(memory: Memory) -> None:
    names = ("tier", "scheduling_class", "machine", "in_alloc")
    facts = {"tier": "prod", "scheduling_class": 3, "machine_id": 8, "in_alloc": True}
    memory.tell(fact_rows({"task": 1, **facts}))
    assert [int(facts_of(memory)[name]) for name in names] == [3, 3, 8, 1]
    facts = {"tier": "free", "scheduling_class": 0, "machine_id": 0, "in_alloc": False}
    memory.tell(fact_rows({"task": 1, **facts}))
    assert [int(facts_of(memory)[name]) for name in names] == [0, 0, 0, 0]


@pytest.mark.parametrize("facts", [{"tier": "prod"}, {"since_us": 9 * W}])
def test_facts_without_a_limit_leave_the_known_one_as_it_is(memory: Memory, facts: dict[str, Any]) -> None:
    memory.tell(fact_rows({"task": 1, "limit": 3.0}))  # before the first window
    memory.tell(fact_rows({"task": 1, **facts}))
    assert facts_of(memory)["limit"].tolist() == [3.0, 3.0]


def test_a_limit_that_is_told_late_does_not_replace_one_that_began_later(memory: Memory) -> None:
    memory.write(windows_of({"at": 1}))
    memory.tell(fact_rows({"task": 1, "limit": 4.0, "since_us": 3 * W}))
    memory.tell(fact_rows({"task": 1, "limit": 1.0, "since_us": 2 * W}))
    assert facts_of(memory)["limit"].tolist() == [4.0, 4.0]
    # of one call, too; of those that began at the same time the last one holds
    memory.tell(
        fact_rows(
            {"task": 1, "limit": 5.0, "since_us": 5 * W}, {"task": 1, "limit": 6.0, "since_us": 5 * W},
            {"task": 1, "limit": 7.0, "since_us": 4 * W},
        )
    )  # fmt: skip
    assert facts_of(memory)["limit"].tolist() == [6.0, 6.0]
    assert facts_of(memory)["limit_us"] == 5 * W


def test_windows_that_repeat_a_limit_do_not_hide_a_change_that_is_told_late(memory: Memory) -> None:
    memory.write(windows_of({"at": 0}))
    memory.write(windows_of({"at": 1, "limit": None}, {"at": 2}, {"at": 3, "limit": None}))
    assert facts_of(memory)["limit_us"] == 0  # since then, as nothing has changed
    memory.tell(fact_rows({"task": 1, "limit": 4.0, "since_us": 2 * W}))
    assert facts_of(memory)["limit"].tolist() == [4.0, 4.0]
    memory.write(windows_of({"at": 4, "limit": None}, {"at": 5, "limit": 3.0}, {"at": 6, "limit": 3.0}))
    assert facts_of(memory)["limit"].tolist() == [3.0, 3.0]
    assert facts_of(memory)["limit_us"] == 5 * W
    memory.tell(fact_rows({"task": 1, "limit": 4.0, "since_us": 2 * W}))  # told again
    assert facts_of(memory)["limit"].tolist() == [3.0, 3.0]


def test_a_late_window_does_not_bring_an_old_limit_back(memory: Memory) -> None:
    memory.write(windows_of({"at": 0}, {"at": 2, "limit": 5.0}))
    assert memory.write(windows_of({"at": 1, "limit": 0.5})) == [LATE]
    assert facts_of(memory)["limit"].tolist() == [5.0, 5.0]


def test_the_limit_of_a_late_window_is_not_current_in_one_call_or_in_two_nor_that_of_a_window_that_tells_none(
    bundle: Bundle,
) -> None:
    one, many = (memory_with(bundle) for _ in range(2))
    told: list[dict[str, Any]] = [{"at": 2, "limit": 5.0}, {"at": 1, "limit": 0.5}, {"at": 3, "limit": None}]
    one.write(windows_of(*told))
    assert [many.write(windows_of(window)) for window in told] == [[TAKEN], [LATE], [TAKEN]]
    for memory in (one, many):
        assert facts_of(memory)["limit"].tolist() == facts_of(memory)["granted"].tolist() == [5.0, 5.0]
        memory.tell(fact_rows({"task": 1, "limit": 4.0, "since_us": 5 * W}))
        assert memory.write(windows_of({"at": 5, "limit": None})) == [TAKEN]
        assert memory.write(windows_of({"at": 4, "limit": 7.0})) == [LATE]  # it began before that of the fact, too
        assert facts_of(memory)["limit"].tolist() == facts_of(memory)["granted"].tolist() == [4.0, 4.0]


def test_a_late_window_between_two_of_the_same_limit_changes_no_limit(memory: Memory) -> None:
    memory.write(windows_of({"at": 0}, {"at": 3}))
    assert facts_of(memory)["limit_us"] == 0  # before the late one
    assert memory.write(windows_of({"at": 1, "limit": 4.0}, {"at": 2, "limit": 4.0})) == [LATE, LATE]
    assert facts_of(memory)["limit"].tolist() == [1.0, 1.0]
    assert memory.write(windows_of({"at": 4, "limit": None})) == [TAKEN]
    assert facts_of(memory)["granted"].tolist() == [1.0, 1.0]


def test_facts_from_before_the_first_window_do_not_expire_with_it(memory: Memory) -> None:
    memory.tell(fact_rows({"task": 1, "limit": 1.0}, {"task": 2, "limit": 2.0}))
    begin = 1_800_000_000 * S // W  # a clock that begins long after 0
    assert memory.write(windows_of({"task": 1, "at": begin, "limit": None})) == [TAKEN]
    assert memory.write(windows_of({"task": 2, "at": begin + 1, "limit": None})) == [TAKEN]


def test_facts_filled_in_do_not_depend_on_how_windows_are_cut_into_calls(bundle: Bundle) -> None:
    told: list[dict[str, Any]] = [
        {"at": 0, "limit": 1.0, "tier": 1}, {"at": 1, "limit": None}, {"at": 2, "limit": 2.0, "machine_id": 5},
        {"at": 3, "limit": None}, {"task": 2, "at": 1, "limit": 4.0, "scheduled_us": 9},
        {"task": 2, "at": 3, "limit": None}, {"task": 2, "at": 4, "limit": None, "tier": 3},
    ]  # fmt: skip
    one, many = (memory_with(bundle) for _ in range(2))
    assert set(one.write(windows_of(*reversed(told)))) == {TAKEN}
    for facts in sorted(told, key=lambda facts: facts["at"]):
        assert many.write(windows_of(facts)) == [TAKEN]
    ours, theirs = told_by(one.tracker, one.settings), told_by(many.tracker, many.settings)
    ours.facts["heard_us"] = theirs.facts["heard_us"] = 0  # at another time
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("facts", "told", "name", "expected"),
    [
        ({"limit": 4.0, "since_us": 6 * W}, [{"at": 5}, {"at": 6, "limit": None}], "granted", [4.0, 4.0]),
        ({"limit": 4.0, "since_us": 6 * W}, [{"at": 5}, {"at": 6, "limit": None}], "limit", [4.0, 4.0]),
        ({"scheduled_us": 6 * W}, [{"at": 5}, {"at": 6}], "run_us", 6 * W),
        ({}, [{"at": 5, "scheduled_us": 5 * W}, {"at": 6, "scheduled_us": 4 * W}], "scheduled_us", 5 * W),
        ({"machine_id": 7}, [{"at": 3, "machine_id": 5}, {"at": 6}], "machine", 7),  # the first is late
        ({}, [{"at": 5, "user": 8, "name": 9}, {"at": 6}], "user", 8),
        ({}, [{"at": 5, "user": 8, "name": 9}, {"at": 6, "name": 10}], "name", 9),
    ],
)
def test_facts_hold_for_windows_of_one_call_as_for_those_of_many(
    bundle: Bundle, facts: dict[str, Any], told: list[dict[str, Any]], name: str, expected: Any
) -> None:
    one, many = (memory_with(bundle) for _ in range(2))
    for memory in (one, many):
        memory.write(windows_of({"at": 4}))
        memory.tell(fact_rows({"task": 1, **facts}))
    one.write(windows_of(*told))
    for window in told:
        many.write(windows_of(window))
    assert facts_of(one)[name].tolist() == facts_of(many)[name].tolist() == expected


def test_a_limit_counts_for_windows_that_begin_after_it(memory: Memory) -> None:
    memory.write(windows_of({"at": 19, "limit": 1.0}))
    memory.tell(fact_rows({"task": 1, "limit": 4.0, "since_us": 21 * W}))
    memory.write(windows_of({"at": 20, "limit": None}))
    assert facts_of(memory)["granted"].tolist() == [1.0, 1.0]
    memory.write(windows_of({"at": 21, "limit": None}))
    assert facts_of(memory)["granted"].tolist() == [4.0, 4.0]


def test_facts_and_runs_from_the_future_are_refused(memory: Memory) -> None:
    memory.write(windows_of({"at": 0}))
    far = 2**50
    ahead = f"more than {memory.settings.ahead:g} s ahead of the cell's clock, which stands at {W} µs"
    assert ahead in why(IN_THE_FUTURE, memory.settings, memory.tracker.clock)
    facts = fact_rows({"task": 1, "limit": 2.0, "since_us": far}, {"task": 1, "scheduled_us": far},
                      {"task": 1, "limit": 2.0}, {"task": 1, "ended_us": far})  # fmt: skip
    assert memory.tracker.judge(facts).tolist() == [IN_THE_FUTURE, IN_THE_FUTURE, TAKEN, IN_THE_FUTURE]
    assert memory.write(windows_of({"at": 1, "scheduled_us": 3 * W})) == [RUN_TO_COME]


def test_a_run_may_begin_when_its_first_window_ends_and_end_when_it_began(memory: Memory) -> None:
    assert memory.write(windows_of({"at": 4, "scheduled_us": 5 * W})) == [TAKEN]
    memory.tell(fact_rows({"task": 2, "limit": 1.0, "scheduled_us": 5 * W}))
    gone = memory.tell(fact_rows({"task": 2, "ended_us": 5 * W}))  # it failed at once
    assert len(gone) == 1
    assert memory.tracker.names()[:, 0].tolist() == [1]


def test_an_end_is_remembered_for_as_long_as_windows_may_be_late(bundle: Bundle) -> None:
    memory = memory_with(bundle, lateness_s=7_200.0)
    memory.write(windows_of({"task": 1}, {"task": 2}))
    memory.tell(fact_rows({"task": 1, "ended_us": W}))
    for at in range(1, 20):  # more than an hour and a half
        memory.write(windows_of({"task": 2, "at": at}))
    memory.expire()
    assert memory.write(windows_of({"task": 1})) == [ENDED]


def test_of_failures_in_any_order_the_last_one_that_says_what_it_was_counts(memory: Memory) -> None:
    memory.write(windows_of({"task": 1, "at": 9}))
    for told, expected in (
        ([{"failed_us": 5, "out_of_memory": True}, {"failed_us": 4, "out_of_memory": False}], (5, True)),
        ([{"failed_us": 8}, {"failed_us": 3, "out_of_memory": False}], (5, True)),
        ([{"failed_us": 5, "out_of_memory": False}], (5, True)),
        ([{"failed_us": 6, "out_of_memory": said} for said in (False, True, False)], (6, True)),  # all at one time
        ([{"failed_us": 7, "out_of_memory": False}], (7, False)),
        ([{"failed_us": 7, "out_of_memory": True}], (7, True)),
    ):
        memory.tell(fact_rows(*({"task": 1, **fact} for fact in told)))
        task = facts_of(memory)
        assert (int(task["failed_us"]), bool(task["failed_oom"])) == expected
    memory.write(windows_of({"task": 1, "at": 10}, {"task": 1, "at": 8}))
    assert (int(facts_of(memory)["failed_us"]), bool(facts_of(memory)["failed_oom"])) == (7, True)


@pytest.mark.parametrize("order", [(1, 2, 3), (2, 1, 3), (3, 2, 1), (2, 3, 1)])
def test_a_recorded_kill_counts_once_in_whatever_order_the_next_run_comes(
    memory: Memory, order: tuple[int, ...]
) -> None:
    memory.write(windows_of({"at": 0, "scheduled_us": 0}))
    memory.tell(fact_rows({"task": 1, "failed_us": W + 5, "out_of_memory": True}))
    for at in order:
        assert memory.write(windows_of({"at": at, "scheduled_us": W + 9})) in ([TAKEN], [LATE])
    known = memory.tracker.look(np.array([(1, 0)]), with_x=True)
    assert known.x is not None
    assert known.x[0, AT.ooms] == 1.0
