"""Rules of the tracker, worked by hand: admission, removal, and the view of readers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.core import parallel as pieces
from reclaim.data.errors import StoreError
from reclaim.data.schema import TIERS
from reclaim.features.fold import live
from reclaim.serving.answers.encode import OPT_OUT, SERVED_RULES, STALE
from reclaim.serving.answers.query import margins_of
from reclaim.serving.answers.stateful import answers, stale_after_us
from reclaim.serving.cell.claims import PERIOD_S
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.cell.outcomes import ENDED, IN_THE_FUTURE, IN_THE_PAST, NO_LIMIT, OUTCOMES, TOO_MANY_TASKS, why
from reclaim.serving.cell.task_record import TASK
from reclaim.serving.cell.views import Known
from reclaim.serving.models.scorer import TASK_PARTS, Scorer, Scores
from reclaim.serving.settings import ServingSettings
from reclaim.serving.wire.cell_schemas import CellQuery
from reclaim.serving.wire.errors import RequestError
from reclaim.training.bundle import Bundle
from reclaim.training.estimators.base import UNKNOWN
from reclaim.training.margins.margin import MARGIN_NAMES
from reclaim.training.margins.price import Price, three_prices
from tests.serving.cell_fixtures import (
    Json,
    Memory,
    S,
    W,
    assert_same,
    assert_same_bits,
    by_slot,
    fact_rows,
    facts_of,
    loaded,
    memory_with,
    told_by,
    windows_of,
)

if TYPE_CHECKING:
    from tests.serving.conftest import History

TAKEN, LATE, REPEATED, TOO_LATE = range(4)
DAY = 86_400 * S


def test_windows_are_taken_late_repeated_or_too_late(memory: Memory) -> None:
    assert memory.write(windows_of({"at": 10})) == [TAKEN]
    assert memory.write(windows_of({"at": 11}, {"at": 11}, {"at": 9})) == [TAKEN, REPEATED, LATE]
    assert memory.write(windows_of({"at": 11}, {"at": 9}, {"at": 8}, {"at": 7})) == [REPEATED, REPEATED, LATE, TOO_LATE]
    assert facts_of(memory)["windows"] == 4
    assert facts_of(memory)["first_us"] == 8 * W
    assert facts_of(memory)["end_us"] == memory.tracker.clock_us == 12 * W
    assert "900 s" in why(TOO_LATE, memory.settings, memory.tracker.clock)


def test_a_late_window_counts_as_if_it_had_come_in_time(bundle: Bundle) -> None:
    """But for prices, which follow what comes in the order in which it comes."""
    late, in_time = (memory_with(bundle, follow=False) for _ in range(2))
    told = [windows_of({"at": k, "cpu": 0.1 * k, "limit": 2.0}) for k in range(1, 7)]
    for k in (0, 1, 3, 2, 4, 5):
        late.write(told[k])
    for windows in told:
        in_time.write(windows)
    assert_same(told_by(late.tracker, late.settings), told_by(in_time.tracker, in_time.settings))


@pytest.mark.parametrize("by_facts", [False, True])
def test_a_late_window_of_the_run_before_is_no_part_of_the_new_one(bundle: Bundle, by_facts: bool) -> None:
    """The new run is told by a window of it, or by a fact, before the last window of the old one comes."""
    late, in_time = (memory_with(bundle, follow=False) for _ in range(2))
    told = [{"at": k, "memory": 0.1 * k} | ({"scheduled_us": 1} if k == 0 else {}) for k in range(5)]
    last, begins, next_ = {"at": 5, "memory": 1.0}, {"at": 7, "scheduled_us": 7 * W}, {"at": 8}
    fact = fact_rows({"task": 1, "scheduled_us": 7 * W})
    for memory in (late, in_time):
        for window in told:
            memory.write(windows_of(window))
    if by_facts:
        late.tell(fact)
    late.write(windows_of(begins if not by_facts else last))
    late.write(windows_of(last if not by_facts else begins))
    in_time.write(windows_of(last))
    if by_facts:
        in_time.tell(fact)
    in_time.write(windows_of(begins))
    for memory in (late, in_time):
        memory.write(windows_of(next_))
    assert_same(told_by(late.tracker, late.settings), told_by(in_time.tracker, in_time.settings))


def test_tasks_that_are_there_take_the_room_of_those_that_send_their_first_window(bundle: Bundle) -> None:
    memory = Memory(ServingSettings(max_tracked=3), bundle)
    assert memory.write(windows_of({"task": 1}, {"task": 2})) == [TAKEN] * 2
    sent = [{"task": 1, "at": 1}, {"task": 3, "at": 1}, {"task": 4, "at": 1}]
    assert memory.write(windows_of(*sent)) == [TAKEN, TAKEN, TOO_MANY_TASKS]
    assert len(memory.tracker) == 3


def test_a_new_task_without_room_is_refused_however_often_it_is_named(bundle: Bundle) -> None:
    memory = memory_with(bundle, max_tracked=2)
    memory.write(windows_of({"at": 1}))
    facts = fact_rows(*({"task": task, "machine_id": 3} for task in (3, 2, 3, 2, 1)))
    assert memory.tracker.judge(facts).tolist() == [TAKEN, TOO_MANY_TASKS, TAKEN, TOO_MANY_TASKS, TAKEN]


def test_a_task_known_by_facts_from_before_the_first_window_is_forgotten_in_time_too(memory: Memory) -> None:
    memory.tell(fact_rows({"task": 5, "limit": 1.0}))
    for at in (0, 200, 400):  # less than a day apart
        assert memory.write(windows_of({"at": at})) == [TAKEN]
    assert memory.tracker.expired().tolist() == [[5, 0]]


def test_a_visit_leaves_out_a_task_that_ends_before_its_piece(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.write(windows_of({"task": 1}, {"task": 2}))

    def one_by_one(made: Any, n: int, _: int) -> list[list[int]]:
        return [made(slice(k, k + 1)) for k in range(n)]

    def names(known: Known, piece: slice) -> list[int]:
        if piece.start == 0:
            memory.tell(fact_rows({"task": 2, "ended_us": 2 * W}))
        return list(known.key[:, 0])

    monkeypatch.setattr("reclaim.serving.cell.tracker.in_pieces", one_by_one)
    assert memory.tracker.visit(names) == [[1], []]


def test_repeated_and_refused_windows_change_nothing(memory: Memory) -> None:
    memory.write(windows_of({"at": 10}, {"at": 11}, {"at": 11, "task": 2}))
    before = memory.tracker.memory()
    assert memory.write(windows_of({"at": 11, "cpu": 0.9}, {"at": 2, "cpu": 0.9, "limit": 7.0})) == [REPEATED, TOO_LATE]
    assert memory.write(windows_of({"at": 2_000}, {"task": 3, "limit": None})) == [IN_THE_FUTURE, NO_LIMIT]
    after = memory.tracker.memory()
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert_same_bits(after[name], array, name)


def test_a_window_in_the_future_of_the_clock_is_refused_and_does_not_move_it(bundle: Bundle) -> None:
    memory = memory_with(bundle, ahead_s=600)
    assert memory.write(windows_of({"at": 0})) == [TAKEN]  # any time will do for the first
    assert memory.write(windows_of({"at": 2}, {"at": 3, "task": 2})) == [TAKEN, IN_THE_FUTURE]
    assert memory.tracker.clock_us == 3 * W
    assert memory.write(windows_of({"at": 3, "task": 2})) == [TAKEN]
    assert f"clock, which stands at {4 * W} µs" in why(IN_THE_FUTURE, memory.settings, memory.tracker.clock)


def test_with_the_machines_clock_even_the_first_window_may_be_in_the_future(bundle: Bundle) -> None:
    memory = memory_with(bundle, now_us=100 * DAY, clock="unix", ahead_s=600)
    assert memory.write(windows_of({"end_us": 100 * DAY + 601 * S, "start_us": 100 * DAY})) == [IN_THE_FUTURE]
    assert memory.write(windows_of({"end_us": 100 * DAY + 600 * S, "start_us": 100 * DAY})) == [TAKEN]


def test_with_the_machines_clock_a_time_in_another_unit_is_refused_and_the_cell_has_not_begun(bundle: Bundle) -> None:
    now_us = 1_800_000_000 * S
    memory = memory_with(bundle, now_us=now_us, clock="unix")
    for unit in (S, S // 1_000):  # seconds and milliseconds, called microseconds
        late = {"end_us": now_us // unit, "start_us": now_us // unit - 300}
        assert memory.write(windows_of(late)) == [IN_THE_PAST]
    assert memory.tracker.size.begun_us < 0
    assert memory.write(windows_of({"end_us": now_us, "start_us": now_us - W})) == [TAKEN]
    facts = fact_rows({"task": 1, "ended_us": now_us // S})
    assert memory.tracker.judge(facts).tolist() == [IN_THE_PAST]
    later = {"end_us": now_us + S, "start_us": now_us}
    assert memory.write(windows_of(later | {"scheduled_us": now_us // S})) == [IN_THE_PAST]
    assert memory.write(windows_of(later | {"scheduled_us": 0})) == [TAKEN]  # before the clock began
    of_now, before = fact_rows({"task": 1, "limit": 2.0}), fact_rows({"task": 1, "scheduled_us": 0})
    assert memory.tracker.judge(of_now).tolist() == memory.tracker.judge(before).tolist() == [TAKEN]
    of_a_trace = memory_with(bundle, now_us=now_us, clock="trace")
    assert of_a_trace.write(windows_of({"end_us": W, "start_us": 0})) == [TAKEN]


def test_no_reservation_exceeds_the_current_limit(memory: Memory) -> None:
    memory.write(windows_of({"cpu": 0.9, "memory": 0.9}))
    assert (memory.answers((1, 0)).estimate.reservation > 0.9 - 1e-9).all()
    memory.tell(fact_rows({"task": 1, "limit": 0.1}))
    found = memory.answers((1, 0))
    assert found.estimate.reservation.tolist() == [[0.1, 0.1]]
    assert [SERVED_RULES[rule] for rule in found.estimate.rule[0]] == ["cap", "cap"]


def test_new_tasks_beyond_the_maximum_are_refused_in_order(bundle: Bundle) -> None:
    memory = memory_with(bundle, max_tracked=3)
    told = [{"task": t} for t in (9, 4, 9, 7, 4, 2)] + [{"task": 9, "at": 1}, {"task": 2, "at": 1}]
    assert [OUTCOMES[k] for k in memory.write(windows_of(*told))] == [
        "taken", "taken", "repeated", "taken", "repeated", "too_many_tasks", "taken", "too_many_tasks",
    ]  # fmt: skip
    assert memory.tracker.names()[:, 0].tolist() == [4, 7, 9]
    assert "3 tasks at most" in why(TOO_MANY_TASKS, memory.settings, memory.tracker.clock)
    facts = fact_rows({"task": 1}, {"task": 4}, {"task": 5, "ended_us": 9})
    assert memory.tracker.judge(facts).tolist() == [TOO_MANY_TASKS, TAKEN, TAKEN]
    memory.tell(fact_rows({"task": 7, "ended_us": 9}))
    facts = fact_rows({"task": 1}, {"task": 3}, {"task": 1, "index": 1}, {"task": 1})
    assert memory.tracker.judge(facts).tolist() == [TAKEN, TOO_MANY_TASKS, TOO_MANY_TASKS, TAKEN]
    assert memory.write(windows_of({"task": 2})) == [TAKEN]


def test_tasks_refused_for_another_reason_take_no_room(bundle: Bundle) -> None:
    memory = memory_with(bundle, max_tracked=1)
    assert memory.write(windows_of({"task": 5, "limit": None}, {"task": 6})) == [NO_LIMIT, TAKEN]


def test_windows_that_repeat_refused_ones_are_refused_with_them_in_few_passes(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, passes = memory_with(bundle, max_tracked=1), 0
    classify = memory.tracker._state.classify

    def counted(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        return classify(*given)

    monkeypatch.setattr(memory.tracker._state, "classify", counted)
    bare: Json = {"task": 5, "limit": None}
    told = [*[bare] * 50, {"task": 5}, bare, *[{"task": 6}] * 50, {"task": 5}]
    outcomes = [NO_LIMIT] * 50 + [TAKEN, NO_LIMIT] + [TOO_MANY_TASKS] * 50 + [REPEATED]
    assert memory.write(windows_of(*told)) == outcomes
    assert passes == 3  # without a limit, without room, and what is taken


def test_an_ended_task_is_removed_and_its_slot_is_reused_without_a_trace(bundle: Bundle) -> None:
    memory, fresh = memory_with(bundle), memory_with(bundle)
    memory.write(windows_of(*({"task": 1, "at": k, "cpu": 0.9, "tier": 4, "user": 3, "name": 4, "scheduled_us": 5,
                               "scheduling_class": 3, "machine_id": 8} for k in range(4))))  # fmt: skip
    gone = memory.tell(fact_rows({"task": 1, "ended_us": 4 * W, "limit": 7.0}))
    assert gone.tolist() == [0]
    assert len(memory.tracker) == 0
    known = memory.tracker.look(np.array([[1, 0]]))
    assert not known.there[0]
    assert known.task[0]["end_us"] == known.task[0]["machine"] == -1
    assert np.isnan(known.task[0]["limit"]).all()
    assert np.isnan(known.scores.oom[0])
    assert memory.tracker.names().tolist() == []
    assert memory.tell(fact_rows({"task": 1, "ended_us": 4 * W})).tolist() == []  # said twice
    for either in (memory, fresh):
        either.tracker.store_facts(fact_rows({"task": 7, "limit": 2.0}))
        found = either.answers((7, 0))  # told of, and no window yet
        assert np.isnan(found.known.scores.oom).all()
        assert found.estimate.reservation.tolist() == [[2.0, 2.0]]
        either.write(windows_of({"task": 7, "at": 4}, {"task": 7, "at": 5}))
    ours, theirs = told_by(memory.tracker, memory.settings), told_by(fresh.tracker, fresh.settings)
    ours.facts["limit_us"] = theirs.facts["limit_us"] = 0  # told by either at another time of its clock
    assert_same(ours, theirs)
    assert memory.tracker.memory()["slots.used"].tolist() == [True]


def test_a_failed_task_is_reported_before_it_is_removed(memory: Memory) -> None:
    memory.write(windows_of({"task": 1}, {"task": 2}))
    facts = fact_rows({"task": 1, "ended_us": 7, "failed": True}, {"task": 2, "ended_us": 8}, {"task": 3, "ended_us": 9,
                      "failed": True})  # fmt: skip
    slot, time_us, oom = memory.tracker.failed(facts)
    assert (slot.tolist(), time_us.tolist(), oom.tolist()) == ([0], [7], [-1])
    assert memory.tell(facts).tolist() == [0, 1]


def test_a_failed_run_is_reported_and_its_task_stays(memory: Memory) -> None:
    memory.write(windows_of({"task": 1, "at": 3}))
    facts = fact_rows({"task": 1, "failed_us": 4 * W, "out_of_memory": True}, {"task": 2, "failed_us": 4 * W,
                      "limit": 1.0})  # fmt: skip
    slot, time_us, oom = memory.tracker.failed(facts)
    assert (slot.tolist(), time_us.tolist(), oom.tolist()) == ([0], [4 * W], [1])
    assert memory.tell(facts).tolist() == []
    assert facts_of(memory)["windows"] == 1


def test_a_task_that_ends_in_its_first_write_is_not_tracked(memory: Memory) -> None:
    memory.tell(fact_rows({"task": 1, "limit": 1.0}, {"task": 1, "ended_us": 5}))
    assert len(memory.tracker) == 0


def test_a_task_without_news_expires(bundle: Bundle) -> None:
    memory = memory_with(bundle, forget_s=3_600.0)
    memory.write(windows_of({"task": 1}, {"task": 2}, {"task": 3}))
    memory.write(windows_of({"task": 1, "at": 6}))
    memory.tell(fact_rows({"task": 2, "machine_id": 5}))  # heard of, without a window
    memory.write(windows_of({"task": 1, "at": 12}))
    assert memory.expire() == []  # of task 3 exactly an hour ago
    memory.write(windows_of({"task": 1, "at": 13}))
    assert memory.expire() == [3]
    memory.write(windows_of({"task": 1, "at": 24}))
    assert memory.expire() == [2]
    memory.write(windows_of({"task": 1, "at": 35}))
    assert memory.expire() == []  # it speaks itself
    assert memory.tracker.names()[:, 0].tolist() == [1]


def test_a_cell_that_is_silent_as_a_whole_forgets_no_task_until_others_send_again(bundle: Bundle) -> None:
    memory = memory_with(bundle, now_us=W, clock="unix", forget_s=3_600.0)
    memory.write(windows_of({"task": 1}, {"task": 2}))
    memory.now_us += 30 * DAY  # the collector is down, or this machine's time is wrong
    assert memory.expire() == []
    passed_s = [0.0]
    memory.tracker.clock._passed_s = lambda: passed_s[0]
    memory.write(windows_of({"task": 1, "at": 30 * DAY // W}))
    assert memory.expire() == []  # the other one may be sent by another agent
    passed_s[0] = PERIOD_S
    assert memory.expire() == [2]
    assert facts_of(memory)["windows"] == 2


def test_collections_that_opted_out_keep_their_limits_until_they_opt_in_again(memory: Memory) -> None:
    memory.write(windows_of({"task": 1, "at": 0}, {"task": 2, "at": 0}))
    memory.tell(fact_rows(estimation={1: False, 8: False}))
    assert memory.tracker.n_opted_out == 2
    rules = memory.answers((1, 0), (2, 0), (8, 0)).estimate.rule
    assert (rules[0] == OPT_OUT).all()
    assert (rules[1] != OPT_OUT).all()
    assert memory.answers((1, 0)).estimate.reservation.tolist() == [[1.0, 1.0]]
    key = np.array([[9, 0], [8, 0], [0, 0], [1, 0], [5, 0]])
    assert memory.tracker.look(key).opted_out.tolist() == [False, True, False, True, False]
    memory.tell(fact_rows(estimation={1: True}))
    assert (memory.answers((1, 0)).estimate.rule != OPT_OUT).all()


def test_a_reservation_goes_stale_after_two_horizons(bundle: Bundle) -> None:
    memory = memory_with(bundle, ahead_s=DAY // S)
    memory.write(windows_of({"task": 1, "at": 0}, {"task": 1, "at": 1}, {"task": 2, "at": 1}))
    fresh_us = 2 * bundle.horizon_s * S
    memory.write(windows_of({"task": 2, "start_us": 2 * W, "end_us": 2 * W + fresh_us}))
    assert (memory.answers((1, 0)).estimate.rule != STALE).all()
    memory.write(windows_of({"task": 2, "start_us": 2 * W + fresh_us, "end_us": 2 * W + fresh_us + 1}))
    found = memory.answers((1, 0), (2, 0))
    assert (found.estimate.rule[0] == STALE).all()
    assert (found.estimate.rule[1] != STALE).all()
    assert found.estimate.reservation[0].tolist() == [1.0, 1.0]


def test_with_the_machines_clock_silence_alone_makes_tasks_stale(bundle: Bundle) -> None:
    memory = memory_with(bundle, now_us=W, clock="unix", stale_s=900)

    def counted() -> int:
        return memory.tracker.silent_since(memory.tracker.clock.present_us - stale_after_us(3_600, memory.settings))

    memory.tell(fact_rows({"task": 2, "limit": 1.0}))  # which has sent no window to grow old
    assert counted() == 0
    memory.write(windows_of({"task": 1, "at": 0}))
    memory.now_us = W + 900 * S
    assert (memory.answers((1, 0)).estimate.rule != STALE).all()
    assert counted() == 0
    memory.now_us += 1
    assert (memory.answers((1, 0)).estimate.rule == STALE).all()
    assert counted() == 1
    for tasks in (range(3, 200), range(200, 210)):  # the room for the second ones is for twice as many as the first
        memory.write(windows_of(*({"task": task, "at": 3} for task in tasks)))
    assert counted() == 1
    memory.write(windows_of({"task": 1, "at": 3}))
    assert counted() == 0


def test_each_tier_gets_its_own_margin(memory: Memory) -> None:
    told = [{"task": 1 + tier, "at": k, "tier": tier} for k in range(3) for tier in range(-1, len(TIERS))]
    memory.write(windows_of(*told))
    query = CellQuery.model_validate({"margin": "medium", "margins": {"prod": "aggressive", "free": "baseline"}})
    margin = margins_of(query, memory.scorer, "baseline")
    assert [MARGIN_NAMES[m] for m in margin] == ["medium", "baseline", "medium", "medium", "aggressive", "medium"]
    found = answers(memory.tracker.look(memory.tracker.names()), margin, memory.settings)
    for row, number in enumerate(margin):
        alone = memory.answers((row, 0), margin=MARGIN_NAMES[number])
        assert_same_bits(found.estimate.reservation[row], alone.estimate.reservation[0])
    default = margins_of(CellQuery.model_validate({}), memory.scorer, "aggressive")
    assert (default == MARGIN_NAMES.index("aggressive")).all()


def test_a_budget_selects_the_margin_within_it_that_reclaims_most(bundle: Bundle) -> None:
    kept = {"baseline": {"cpu": 0.001, "memory": 0.002}, "medium": {"cpu": 0.004, "memory": 0.003},
            "aggressive": {"cpu": 0.02, "memory": 0.0}}  # fmt: skip
    scorer = Scorer(loaded(replace(bundle, trained={"violation": kept})), ServingSettings().cell)

    def chosen(**query: Any) -> list[str]:
        return [MARGIN_NAMES[m] for m in margins_of(CellQuery.model_validate(query), scorer, "baseline")]

    assert chosen(budget=0.02) == ["aggressive"] * 6
    assert chosen(budget=0.0199) == ["medium"] * 6
    assert chosen(budget=0.002) == ["baseline"] * 6
    assert chosen(margin="baseline", budgets={"mid": 0.05, "mon": 0.004}) == [
        "baseline", "baseline", "baseline", "aggressive", "baseline", "medium",
    ]  # fmt: skip
    with pytest.raises(RequestError, match=r"budgets\.mid: no margin kept a budget of 0\.0001"):
        chosen(budgets={"mid": 1e-4})
    with pytest.raises(RequestError, match=r"give a margin or a budget, not both"):
        chosen(margin="baseline", budget=0.5)
    with pytest.raises(RequestError, match=r"margins\.mid: expected one of"):
        chosen(margins={"mid": "brave"})
    silent = Scorer(loaded(replace(bundle, trained={})), ServingSettings().cell)
    with pytest.raises(RequestError, match="the model does not say"):
        margins_of(CellQuery.model_validate({"budget": 0.5}), silent, "baseline")


def test_an_unknown_task_gets_the_limit_of_the_query(memory: Memory) -> None:
    memory.write(windows_of({"task": 1}))
    known = memory.tracker.look(np.array([[1, 0], [5, 0], [6, 0]]))
    assert known.there.tolist() == [True, False, False]
    limit = np.array([[9.0, 9.0], [2.0, 3.0], [np.nan, np.nan]])
    found = answers(known, np.zeros(1 + len(TIERS), np.int64), memory.settings, limit)
    assert found.limit[:2].tolist() == [[1.0, 1.0], [2.0, 3.0]]
    assert found.estimate.reservation[1].tolist() == [2.0, 3.0]
    assert np.isnan(found.estimate.reservation[2]).all()
    assert (found.estimate.rule[1:] == UNKNOWN).all()


def test_tasks_are_chosen_by_machine_and_by_collection(memory: Memory) -> None:
    memory.write(windows_of({"task": 3, "machine_id": 1}, {"task": 3, "index": 1, "machine_id": 2},
                            {"task": 1, "machine_id": 2}, {"task": 2}))  # fmt: skip
    assert memory.tracker.names().tolist() == [[1, 0], [2, 0], [3, 0], [3, 1]]
    assert memory.tracker.names(machines=[2]).tolist() == [[1, 0], [3, 1]]
    assert memory.tracker.names(collections=[3, 9]).tolist() == [[3, 0], [3, 1]]
    assert memory.tracker.names([2], [3]).tolist() == [[3, 1]]
    (known,) = memory.tracker.visit(lambda known, _: known, machines=[2])
    assert sorted(known.key.tolist()) == [[1, 0], [3, 1]]
    assert known.tracked == 4


def test_a_task_is_hidden_until_its_first_write_is_whole(memory: Memory) -> None:
    memory.write(windows_of({"task": 1}))
    admitted = memory.tracker.admit(windows_of({"task": 2}), np.zeros(1, np.int8))
    assert memory.tracker.names().tolist() == [[1, 0]]
    taken = memory.tracker.take(admitted.windows)
    assert memory.tracker.names().tolist() == [[1, 0]]
    assert memory.tracker.look(memory.tracker.names()).key.tolist() == [[1, 0]]
    assert not memory.tracker.look(np.array([[2, 0]])).there[0]
    memory.tracker.publish(taken, memory.scorer.score(taken.x, taken.last))
    assert memory.tracker.names().tolist() == [[1, 0], [2, 0]]


def test_saved_state_continues_elsewhere_to_the_bit(bundle: Bundle, history: History) -> None:
    settings = ServingSettings(stale_s=1e9, forget_s=7_200.0)
    ours, theirs = Memory(settings, bundle), Memory(settings, bundle)
    ours.tracker.store_facts(fact_rows(estimation={4: False}))
    theirs.tracker.store_facts(fact_rows(estimation={4: False}))
    for k, windows in enumerate(by_slot(history.windows)):
        ours.write(windows)
        theirs.write(windows)
        if k % 7 == 0:
            copy = Memory(settings, bundle)
            copy.tracker.recall(theirs.tracker.memory())
            copy.tracker.promote(copy.scorer, copy.tracker.following)
            theirs = copy
        if k % 20 == 0:
            task = {"task": int(windows.collection_id[0]), "index": int(windows.instance_index[0]), "ended_us": 1}
            ours.tracker.store_facts(fact_rows(task))
            theirs.tracker.store_facts(fact_rows(task))
        assert_same(told_by(theirs.tracker, settings), told_by(ours.tracker, settings))
    assert theirs.tracker.n_opted_out == 1


def test_state_of_another_release_is_refused(memory: Memory, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.write(windows_of({"task": 1}))
    saved = memory.tracker.memory()
    fresh = Memory(memory.settings, bundle).tracker
    with pytest.raises(StoreError, match="the state lacks 'x'"):
        fresh.recall({name: array for name, array in saved.items() if name != "x"})
    narrower = np.dtype([(name, TASK[name]) for name in TASK.names if name != "machine"])  # type: ignore[union-attr]  # has names
    with pytest.raises(StoreError, match="another release"):
        fresh.recall(saved | {"tasks": np.zeros(1, narrower)})
    monkeypatch.setattr(live, "PIPELINE_VERSION", "another")
    with pytest.raises(StoreError, match="start afresh with another --state folder"):
        Memory(memory.settings, bundle).tracker.recall(saved)


def doubled(bundle: Bundle) -> Bundle:
    """Return a model whose every answer may differ: its prices are twice as high."""
    baseline, aggressive = (
        Price(name, tuple(2 * p for p in bundle.prices[name].value)) for name in ("baseline", "aggressive")
    )
    return replace(bundle, prices=three_prices(baseline, aggressive))


class Told(Scorer):
    """Answers with its number as the OOM probability of whomever it is asked of."""

    def __init__(self, bundle: Bundle, number: float) -> None:
        super().__init__(loaded(bundle, f"{number:g}"), ServingSettings().cell)
        self.number = number

    def score(self, x: NDArray[np.float32], last: Any, *, of_cell: bool = True) -> Scores:
        """Return the scores of the scorer, and the number."""
        scores = super().score(x, last, of_cell=of_cell)
        return replace(scores, oom=np.full(len(x), self.number))


def test_a_promotion_scores_all_tasks_again_at_once(bundle: Bundle) -> None:
    memory = memory_with(bundle)
    memory.write(windows_of(*({"task": t, "at": k} for k in range(4) for t in range(50))))
    other = Scorer(loaded(doubled(bundle), "2"), memory.settings.cell)
    before = memory.answers()
    memory.tracker.promote(other)
    after = memory.answers()
    assert after.known.scorer is other
    assert (after.estimate.reservation >= before.estimate.reservation).all()
    fresh = memory_with(doubled(bundle))
    fresh.write(windows_of(*({"task": t, "at": k} for k in range(4) for t in range(50))))
    assert_same_bits(after.estimate.reservation, fresh.answers().estimate.reservation)
    memory.tracker.promote(memory.scorer)
    assert_same_bits(memory.answers().estimate.reservation, before.estimate.reservation)


def test_readers_get_whole_answers_of_one_model_while_tasks_come_go_and_models_change(bundle: Bundle) -> None:
    memory = memory_with(bundle)
    scorers = [Told(bundle, k) for k in range(4)]
    memory.tracker.promote(scorers[0])
    problems: list[str] = []
    stop = threading.Event()
    key = np.array([[t, 0] for t in range(0, 400, 3)])

    def read() -> None:
        while not stop.is_set():
            for known in (*memory.tracker.visit(lambda known, _: known), memory.tracker.look(key)):
                seen = known.task["end_us"] >= 0
                if not seen[known.there].all():
                    problems.append("a task without a window")
                if set(known.scores.oom[seen].tolist()) - {known.scorer.number}:  # type: ignore[attr-defined]  # Told
                    problems.append("an answer of another model")
                if (known.task["end_us"][seen] > known.clock_us).any():
                    problems.append("a window after the clock")
            memory.tracker.names()

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for k in range(60):
            scorer = scorers[k // 3 % 4]
            if k % 3 == 0:
                memory.tracker.promote(scorer)
            admitted = memory.tracker.admit(
                windows_of(*({"task": t, "at": k} for t in range(k * 7, k * 7 + 40))), np.zeros(40, np.int8)
            )
            taken = memory.tracker.take(admitted.windows)
            memory.tracker.publish(taken, scorer.score(taken.x, taken.last))
            memory.tell(fact_rows(*({"task": t, "ended_us": 5} for t in range(k * 3, k * 3 + 5))))
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not problems, set(problems)


def test_the_bytes_per_task_are_those_of_all_arrays_of_tasks_and_bounded(memory: Memory) -> None:
    for at in range(3):
        memory.write(windows_of(*({"task": task, "at": at, "machine_id": 1} for task in range(64))))
    tracker = memory.tracker
    assert tracker.following is not None
    assert tracker._scores is not None
    following = tracker.following
    holders = (tracker, tracker._state, tracker._scores, following._online, *following._machines.values())
    arrays = [a for held in holders for a in vars(held).values() if isinstance(a, np.ndarray) and len(a) % 64 == 0]
    assert sum(array.nbytes for array in arrays) == 64 * tracker.bytes_per_task
    assert tracker.bytes_per_task < 4_650  # before histograms hold anything


def test_another_model_scores_the_tasks_in_pieces_to_the_same_bits(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pieced = (memory_with(bundle) for _ in range(2))
    for memory in (whole, pieced):
        memory.write(windows_of(*({"task": task, "cpu": 0.01 * task} for task in range(10))))
        memory.tell(fact_rows({"task": 3, "ended_us": 2 * W}, {"task": 20, "limit": 1.0}))
    rows: list[int] = []
    score = Scorer.score

    def counted(scorer: Scorer, x: NDArray[np.float32], *rest: Any, **more: Any) -> Scores:
        rows.append(len(x))
        return score(scorer, x, *rest, **more)

    monkeypatch.setattr(Scorer, "score", counted)
    monkeypatch.setattr("reclaim.serving.cell.tracker.SCORED_AT_ONCE", 4)
    pieced.tracker.promote(pieced.scorer)
    monkeypatch.undo()
    whole.tracker.promote(whole.scorer)
    assert sum(rows) == 9
    assert max(rows) <= 4
    for memory in (whole, pieced):  # a task in the place of the one that ended, and one in a new place
        memory.tell(fact_rows({"task": 30, "limit": 1.0}, {"task": 31, "limit": 1.0}))
    assert_same(told_by(pieced.tracker, pieced.settings), told_by(whole.tracker, whole.settings))
    assert np.isnan(pieced.answers((20, 0), (30, 0), (31, 0)).known.scores.oom).all()  # 20 has no window yet


def test_a_restored_state_is_in_memory_once(memory: Memory, bundle: Bundle) -> None:
    memory.write(windows_of(*({"task": task} for task in range(5))))
    saved, tracker = memory.tracker.memory(), Memory(memory.settings, bundle).tracker
    tracker.recall(saved)
    assert tracker._tasks is saved["tasks"]
    assert tracker._x is saved["x"]
    for name, array in (("task", tracker._state._settled), ("pending", tracker._state._pending)):
        assert np.shares_memory(array, saved[f"state.{name}"])


def test_tasks_of_ever_new_names_leave_a_state_that_does_not_grow(bundle: Bundle) -> None:
    def churned(memory: Memory, at: range) -> int:
        for k in at:
            memory.write(windows_of({"task": k, "at": k, "user": k, "name": k}))
            memory.tell(fact_rows({"task": k, "ended_us": (k + 1) * W}))
        return sum(array.nbytes for array in memory.tracker.memory().values())

    memory, other = (Memory(ServingSettings(max_tracked=8), bundle) for _ in range(2))
    size = churned(memory, range(40))
    other.tracker.recall(memory.tracker.memory())
    assert churned(memory, range(40, 80)) == churned(other, range(40, 80)) == size
    ours, theirs = (m.tracker.memory() for m in (memory, other))
    differ = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    assert [name for name in differ if not name.startswith("ended.")] == []  # ends stand in any order


@pytest.mark.parametrize("clock", ["trace", "unix"])
def test_one_window_from_tomorrow_makes_no_task_stale(bundle: Bundle, clock: str) -> None:
    memory = memory_with(bundle, now_us=11 * W, clock=clock)
    for at in (9, 10):
        memory.write(windows_of(*({"task": t, "at": at} for t in range(20))))
    assert memory.write(windows_of({"task": 3, "start_us": 11 * W, "end_us": 11 * W + DAY - W})) == [IN_THE_FUTURE]
    assert memory.expire() == []
    assert len(memory.tracker) == 20
    assert (memory.answers().estimate.rule != STALE).all()
    if clock == "trace":  # all of them together know better: there was a gap in the trace
        assert set(memory.write(windows_of(*({"task": t, "at": 400} for t in range(11))))) == {TAKEN}


def test_an_absurd_time_among_the_first_windows_does_not_set_the_clock(memory: Memory) -> None:
    told = [{"task": t, "at": 10} for t in range(5)] + [{"task": 9, "start_us": 0, "end_us": 2**58}]
    assert memory.write(windows_of(*told)) == [TAKEN] * 5 + [IN_THE_FUTURE]


def test_without_new_windows_reservations_become_stale_by_any_clock(bundle: Bundle) -> None:
    memory = memory_with(bundle)
    passed = [0.0]
    memory.tracker.clock = CellClock(memory.settings, lambda: -1, passed_s=lambda: passed[0])
    memory.write(windows_of({"at": 0}))
    passed[0] = 2.0 * bundle.horizon_s
    assert (memory.answers((1, 0)).estimate.rule != STALE).all()
    passed[0] += 1
    assert (memory.answers((1, 0)).estimate.rule == STALE).all()


def test_a_window_from_before_the_end_of_its_task_is_refused(memory: Memory) -> None:
    memory.write(windows_of({"at": 4}, {"task": 2, "at": 4}))
    memory.tell(fact_rows({"task": 1, "ended_us": 5 * W + 7}))
    assert memory.write(windows_of({"at": 5}, {"at": 4})) == [ENDED, ENDED]
    assert len(memory.tracker) == 1
    assert memory.write(windows_of({"start_us": 5 * W + 7, "end_us": 6 * W})) == [TAKEN]  # a new run
    assert facts_of(memory)["windows"] == 1


def test_facts_from_before_the_end_of_a_task_do_not_bring_it_back(memory: Memory) -> None:
    memory.write(windows_of({"at": 4}, {"task": 2, "at": 4}))
    memory.tell(fact_rows({"task": 1, "ended_us": 5 * W}))
    before = fact_rows(
        {"task": 1, "limit": 2.0, "since_us": 4 * W}, {"task": 1, "scheduled_us": 3 * W},
        {"task": 1, "failed_us": 5 * W},
        {"task": 1, "failed_us": 5 * W, "limit": 2.0, "since_us": 4 * W}, {"task": 1, "ended_us": 4 * W},
    )  # fmt: skip
    assert memory.tracker.judge(before).tolist() == [ENDED, ENDED, ENDED, ENDED, TAKEN]
    after = fact_rows(
        {"task": 1, "limit": 2.0, "since_us": 5 * W}, {"task": 1, "scheduled_us": 5 * W}, {"task": 1, "limit": 2.0},
        {"task": 1, "failed_us": 5 * W, "scheduled_us": 6 * W}, {"task": 2, "limit": 2.0, "since_us": 0},
    )  # fmt: skip
    assert memory.tracker.judge(after).tolist() == [TAKEN] * 5
    memory.tell(after.keep(np.arange(5) == 0))
    assert memory.tracker.judge(before).tolist() == [TAKEN] * 5  # it is there again


def test_the_end_of_an_earlier_run_does_not_end_a_later_one(memory: Memory) -> None:
    memory.write(windows_of({"at": 4}))
    end = fact_rows({"task": 1, "ended_us": 5 * W, "failed": True})
    assert memory.tell(end).tolist() == [0]
    memory.write(windows_of({"at": 5}, {"at": 6}))
    slot, *_ = memory.tracker.failed(end)
    assert (slot.tolist(), memory.tell(end).tolist()) == ([], [])  # the same end, told again
    assert facts_of(memory)["windows"] == 2


def test_an_end_does_not_end_a_run_of_which_a_window_began_then_in_either_order(memory: Memory) -> None:
    memory.write(windows_of({"at": 4}, {"task": 2, "at": 4}))
    end = fact_rows({"task": 1, "ended_us": 5 * W, "failed": True}, {"task": 2, "ended_us": 5 * W, "failed": True})
    memory.tell(end.keep(np.array([True, False])))
    memory.write(windows_of({"at": 5}, {"task": 2, "at": 5}))
    slot, *_ = memory.tracker.failed(end)
    assert (slot.tolist(), memory.tell(end).tolist()) == ([], [])
    assert len(memory.tracker) == 2


def test_ends_are_dropped_in_time_and_survive_the_process(bundle: Bundle) -> None:
    memory, other = (memory_with(bundle, lateness_s=900.0) for _ in range(2))
    memory.write(windows_of({"at": 4}, {"task": 2, "at": 4}))
    memory.tell(fact_rows({"task": 1, "ended_us": 5 * W}))
    other.tracker.recall(memory.tracker.memory())
    assert other.write(windows_of({"at": 3})) == [ENDED]
    other.write(windows_of({"task": 2, "at": 16}))
    assert other.expire() == []
    assert other.write(windows_of({"at": 3})) == [ENDED]  # an hour ago at most
    other.write(windows_of({"task": 2, "at": 17}))
    assert other.expire() == []
    assert other.write(windows_of({"at": 3})) == [TAKEN]


def test_a_cell_is_visited_in_pieces_and_all_of_one_model(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_with(bundle)
    memory.write(windows_of(*({"task": t} for t in range(10))))
    names = memory.tracker.names()
    whole = memory.tracker.look(names)
    monkeypatch.setattr(pieces, "_PIECE_ROWS", 3)
    for key in (None, names):
        found = memory.tracker.visit(lambda known, piece: (known, piece), key)
        assert [piece for _, piece in found] == [slice(low, low + 3) for low in (0, 3, 6, 9)]
        parts = [known for known, _ in found]
        assert_same_bits(np.concatenate([p.key for p in parts]), whole.key)
        assert b"".join(p.task.tobytes() for p in parts) == whole.task.tobytes()
        for name in TASK_PARTS:
            joined = np.concatenate([getattr(p.scores, name) for p in parts])
            assert_same_bits(joined, getattr(whole.scores, name), name)
    bare = memory.tracker.visit(lambda known, _: known.scores.quantiles.shape, parts=("ladder",))
    assert bare == [(3, 0, 0), (3, 0, 0), (3, 0, 0), (1, 0, 0)]
    (nobody,) = memory.tracker.visit(lambda known, _: known, machines=[77])
    assert len(nobody.key) == 0

    other = Scorer(loaded(bundle, "2"), memory.settings.cell)

    def promoted_meanwhile(known: Known, piece: slice) -> Scorer:
        if piece.start == 3:
            memory.tracker.promote(other)
        return known.scorer

    assert memory.tracker.visit(promoted_meanwhile) == [other] * 4
