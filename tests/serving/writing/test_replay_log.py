"""State after a restart: that of a service that never stopped, to the bit, or none."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reclaim.features.fold import live
from reclaim.features.fold.live_kernel import LATE, NEW, REPEATED
from reclaim.features.registry import AT
from reclaim.serving.answers.encode import cell_prices
from reclaim.serving.cell.claims import PERIOD_S
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.models.scorer import Scorer
from reclaim.serving.wire.errors import UNAVAILABLE
from reclaim.serving.wire.rows import FactRows
from reclaim.serving.writing import log_records, writer
from reclaim.training.bundle import Bundle
from tests.serving.cell_fixtures import (
    Json,
    Memory,
    W,
    assert_same,
    assert_same_bits,
    fact_rows,
    loaded,
    told_by,
    windows_of,
)
from tests.serving.patience import soon
from tests.serving.writing.running import SETTINGS, Service, crashed, refused_with

if TYPE_CHECKING:
    from tests.serving.conftest import History


def test_a_state_of_another_release_is_not_answered_from(
    scorer: Scorer, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    service.snapshotter.settings = SETTINGS.model_copy(update={"snapshot_mib": 0})
    service.told({"task": 1})
    soon(lambda: service.snapshotter.saved_at is not None)
    service.close()
    monkeypatch.setattr(live, "PIPELINE_VERSION", "another")
    other = start()
    assert "start afresh with another --state folder" in other.writer.state
    error = refused_with(UNAVAILABLE, "not_ready", lambda: other.told({"task": 1}))
    assert "start afresh" in error.body.error.message
    other.writer.promote(scorer)  # no caller is answered, and none waits


def test_a_state_goes_on_in_a_cell_that_is_described_otherwise(start: Callable[..., Service]) -> None:
    service = start()
    service.snapshotter.settings = SETTINGS.model_copy(update={"snapshot_mib": 0})
    service.told({"task": 1})
    soon(lambda: service.snapshotter.saved_at is not None)
    service.close()
    other = start(largest_cpu=2.0, monday_us=3_600_000_000)
    assert other.told({"task": 1, "at": 1}).taken == 1
    assert other.tracker.look(other.tracker.names()).task["windows"].tolist() == [2]


def test_windows_and_facts_come_back_from_the_log_to_the_bit(history: History) -> None:
    windows = history.windows
    back = log_records.read_windows(memoryview(log_records.write_windows(windows)))
    for name, column in vars(windows).items():
        assert_same_bits(getattr(back, name), column, name)
    facts = fact_rows(
        {"task": 2**62, "limit": 0.1, "since_us": 5, "user": "a", "logical_name": "b", "in_alloc": True},
        {"task": 3, "index": 4, "ended_us": 9, "failed": True, "tier": "mon", "machine_id": 0},
        {"task": 4, "failed_us": 8, "out_of_memory": True},
        {"task": 4, "failed_us": 9, "out_of_memory": False},
        estimation={2**62: False, 5: True},
    )
    told: FactRows = log_records.read_facts(memoryview(log_records.write_facts(facts)))
    assert told.estimation == facts.estimation
    assert told.columns.keys() == facts.columns.keys()
    for name, column in facts.columns.items():
        assert_same_bits(told.columns[name], column, name)
    no_task = log_records.read_facts(memoryview(log_records.write_facts(fact_rows(estimation={1: True}))))
    assert (len(no_task.row), no_task.estimation) == (0, {1: True})


def window(task: int, at: int, cpu: float, told: dict[str, Any]) -> Json:
    return {"task": 1 + task % 4, "index": task // 4, "at": at, "cpu": cpu, **told}


def fact(task: int, told: dict[str, Any]) -> Json:
    return {"task": 1 + task % 4, "index": task // 4, **told}


TASK = st.integers(0, 6)
TOLD = st.fixed_dictionaries({}, optional={
    "limit": st.sampled_from([None, 0.5]), "user": st.integers(1, 2), "name": st.integers(1, 2),
    "scheduled_us": st.integers(0, 3), "tier": st.integers(0, 4), "machine_id": st.integers(0, 2),
})  # fmt: skip
FAILURE = st.sampled_from([
    {}, {}, {"failed_us": 4 * W}, {"failed_us": 2 * W, "out_of_memory": True},
    {"failed_us": 7 * W, "out_of_memory": False},
])  # fmt: skip
FACTS = st.fixed_dictionaries({}, optional={
    "limit": st.floats(0.1, 2.0), "since_us": st.integers(0, 10**9), "ended_us": st.just(5), "machine_id": TASK,
    "scheduled_us": st.integers(0, 3), "in_alloc": st.booleans(), "scheduling_class": st.integers(0, 3),
})  # fmt: skip
STEP = st.one_of(
    st.lists(st.builds(window, TASK, st.integers(0, 14), st.floats(0.01, 0.9), TOLD), min_size=1, max_size=6),
    st.tuples(
        st.lists(st.builds(fact, TASK, st.builds(operator.or_, FACTS, FAILURE)), max_size=3).map(
            lambda told: sorted(told, key=lambda of: "ended_us" in of)
        ),
        st.dictionaries(st.integers(1, 4), st.booleans(), max_size=2),
    ),
    st.sampled_from(["snapshot", "crash", "crash in the middle of a record"]),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEP, min_size=3, max_size=14))
def test_a_history_with_crashes_ends_as_one_without_to_the_bit(
    steps: list[Any], scorer: Scorer, bundle: Bundle, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("crashes")
    options = {"max_tracked": 6}
    running: list[Service] = []

    def start(name: str = "cell") -> Service:
        running.append(Service(folder / name, scorer, **options))
        return running[-1]

    service, whole = start(), Memory(SETTINGS.model_copy(update=options), bundle)
    for step in (*steps, "crash"):
        if step == "snapshot":
            service.save()
        elif isinstance(step, str):
            service = crashed(service, start, b"" if step == "crash" else b"torn" * 10)
            assert_same(told_by(service.tracker, SETTINGS), told_by(whole.tracker, SETTINGS))
        elif isinstance(step, list):
            outcome = whole.write(windows_of(*step))
            answer = service.told(*step)
            assert answer.taken == sum(k <= LATE for k in outcome)
            assert answer.repeated == outcome.count(REPEATED)
        else:
            facts = fact_rows(*step[0], estimation=step[1])
            whole.tell(facts.keep(whole.tracker.judge(facts) == NEW))
            service.facts(*step[0], estimation=step[1])
    for each in running:
        each.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("saved", [False, True])
def test_a_failure_that_was_recorded_decides_after_a_crash_as_before(
    start: Callable[..., Service], *, saved: bool
) -> None:
    """Task 1 is killed at 30 % of its limit, task 2 fails otherwise at all of it; then a crash comes."""
    service = start()
    service.told({"task": 1, "scheduled_us": 0}, {"task": 2, "scheduled_us": 0, "memory": 1.0})
    service.facts({"task": 1, "failed_us": W + 5, "out_of_memory": True},
                  {"task": 2, "failed_us": W + 5, "out_of_memory": False})  # fmt: skip
    if saved:
        service.save()
    after = crashed(service, start)
    after.told(*({"task": task, "at": 1, "scheduled_us": W + 9} for task in (1, 2)))
    last = crashed(after, start)
    for one in (after, last):
        known = one.tracker.look(np.array([(1, 0), (2, 0)]), with_x=True)
        assert known.x is not None
        assert known.x[:, AT.ooms].tolist() == [1.0, 0.0]
        assert known.task["failed_us"].tolist() == [W + 5] * 2
    assert_same(told_by(last.tracker, SETTINGS), told_by(after.tracker, SETTINGS))


@pytest.mark.parametrize("lateness_s", [0.0, 300.0, 3_600.0])
def test_state_is_restored_under_other_settings_of_lateness(start: Callable[..., Service], lateness_s: float) -> None:
    service = start()
    service.told({"task": 1, "at": 0}, {"task": 1, "at": 3})
    assert service.told({"task": 1, "at": 1}).late == 1
    after = crashed(service, start, lateness_s=lateness_s)
    assert after.writer.state == "ok"
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))
    assert after.told({"task": 1, "at": 2}).late == (1 if lateness_s >= 300.0 else 0)
    again = crashed(after, start)
    assert again.writer.state == "ok"
    assert_same(told_by(again.tracker, SETTINGS), told_by(after.tracker, SETTINGS))


def test_a_state_of_other_units_is_not_answered_from(start: Callable[..., Service]) -> None:
    service = start()
    service.told({"task": 1})
    service.close()
    other = start(cpu_unit="millicores")
    assert "amounts are in cores and bytes" in other.writer.state
    assert "RECLAIM_CPU_UNIT" in other.writer.state


def test_evicted_tasks_stay_evicted_after_a_restart_under_other_settings(start: Callable[..., Service]) -> None:
    service = start(forget_s=3_600.0, ahead_s=1e6)
    service.told({"task": 1, "at": 0}, {"task": 2, "at": 0})
    service.told({"task": 2, "at": 10})
    service.told({"task": 2, "at": 20})
    service.writer._evict_at = 0.0
    service.told({"task": 2, "at": 21})
    soon(lambda: len(service.tracker) == 1)
    service.told({"task": 1, "at": 1})
    after = crashed(service, start, forget_s=1e6, ahead_s=1e6)
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))


def test_a_clock_that_went_on_with_the_tasks_that_replaced_all_others_stands_there_after_a_crash(
    start: Callable[..., Service],
) -> None:
    service, now_s = start(), 0.0
    service.tracker.clock = CellClock(service.settings, lambda: -1, passed_s=lambda: now_s)
    service.told(*({"task": task} for task in range(100)))
    now_s = 2 * PERIOD_S
    few = range(200, 210)  # no more than a tenth of those of before
    assert service.told(*({"task": task, "at": 48} for task in few)).taken == 0
    now_s += PERIOD_S
    assert service.told(*({"task": task, "at": 50} for task in few)).taken == len(few)
    now_s += 50 * PERIOD_S  # a trace may be sent slower than its clock runs
    service.told(*({"task": task, "at": 51} for task in few))
    after = crashed(service, start)
    assert after.tracker.clock_us == service.tracker.clock_us == 51 * W
    assert after.told(*({"task": task, "at": 52} for task in few)).taken == len(few)


def test_a_clock_that_few_tasks_were_ahead_of_after_a_silence_stands_where_it_stood_after_a_crash(
    start: Callable[..., Service],
) -> None:
    service, now_s = start(), 0.0
    service.tracker.clock = CellClock(service.settings, lambda: -1, passed_s=lambda: now_s)
    service.told(*({"task": task} for task in range(100)))
    now_s = 4 * PERIOD_S
    assert service.told({"task": 1, "at": 8}).taken == 1
    assert service.tracker.clock_us == W
    assert crashed(service, start).tracker.clock_us == W


def test_a_task_that_was_ahead_by_itself_does_not_move_the_clock_after_a_crash_under_a_smaller_bound(
    start: Callable[..., Service],
) -> None:
    service = start()
    service.told(*({"task": task} for task in range(100)))
    assert service.told({"task": 7, "at": 9}).taken == 1
    after = crashed(service, start, ahead_s=300.0)
    assert after.tracker.clock_us == service.tracker.clock_us == W


def test_facts_that_came_after_refused_windows_had_moved_the_clock_of_a_trace_are_not_older_after_a_restart(
    start: Callable[..., Service],
) -> None:
    """Of a window whose run begins after it nothing is taken, but it says what time its task has."""
    service = start()
    service.told(*({"task": task} for task in range(10)))
    later = [{"task": task, "at": 2_000, "scheduled_us": 3_000 * W} for task in range(10)]
    assert service.told(*later).refused == {"run_to_come": 10}
    assert service.tracker.clock.latest_us == 2_001 * W
    service.facts({"task": 11, "limit": 1.0})
    after = crashed(service, start)
    assert after.tracker.clock.latest_us == 2_001 * W
    heard_us = [of.tracker.look(np.array([[11, 0]])).task["heard_us"].tolist() for of in (service, after)]
    assert heard_us == [[2_001 * W]] * 2


def test_a_restart_is_no_news_of_a_task(start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> None:
    hour_us = 12 * W
    unix: dict[str, Any] = {"clock": "unix", "forget_s": 86_400.0}

    def at(hour: float) -> None:
        monkeypatch.setattr(Service, "now_us", int((1_000 + hour) * hour_us))

    def tell(service: Service, hour: int) -> None:
        at(hour)
        windows = [{"task": 1}] if hour else [{"task": 1}, {"task": 2}]
        service.told(*({**window, "at": (1_000 + hour) * 12 - 1} for window in windows))

    monkeypatch.setattr(writer, "_EVICT_EVERY_S", 1e9)  # but once after a start
    at(0)
    service = start(**unix)
    tell(service, 0)
    service.facts({"task": 3, "limit": 1.0})
    for hour in range(1, 26):
        if hour in (10, 20):
            service = crashed(service, start, **unix)
        tell(service, hour)
    assert service.tracker.expired()[:, 0].tolist() == [2, 3]
    at(48.9)  # a day after hour 25 is not over
    service = crashed(service, start, **unix)
    service.told({"task": 4, "at": 1_048 * 12})
    soon(lambda: service.tracker.names()[:, 0].tolist() == [1, 4])


def test_a_restart_before_this_machines_time_is_set_forgets_no_task(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    unix: dict[str, Any] = {"clock": "unix", "forget_s": 3_600.0}
    monkeypatch.setattr(Service, "now_us", 1_000 * W)
    service = start(**unix)
    service.told({"task": 1, "at": 999}, {"task": 2, "at": 999})
    service.facts({"task": 3, "limit": 1.0})  # it has no window that says when it was there
    monkeypatch.setattr(Service, "now_us", W)  # the machine has no clock of its own
    after = crashed(service, start, **unix)
    monkeypatch.setattr(Service, "now_us", 1_001 * W)
    after.told({"task": 1, "at": 1_000})
    assert after.tracker.expired().tolist() == []
    assert after.tracker.names()[:, 0].tolist() == [1, 2, 3]


def test_facts_are_as_old_after_a_restart_as_before(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "now_us", 1_000 * W)
    service = start(clock="unix")
    service.told({"task": 1, "at": 997})  # two windows ago
    service.facts({"task": 2, "limit": 1.0})
    monkeypatch.setattr(Service, "now_us", 1_001 * W)
    for of in (service, crashed(service, start, clock="unix")):
        assert of.tracker.look(np.array([[2, 0]])).task["heard_us"].tolist() == [1_000 * W]


def test_facts_that_come_while_no_window_does_move_no_clock_of_the_windows_after_a_crash(
    start: Callable[..., Service],
) -> None:
    service, now_s = start(), 0.0
    service.tracker.clock = CellClock(service.settings, lambda: -1, passed_s=lambda: now_s)
    service.told({"task": 1})
    now_s = 600.0
    service.facts({"task": 2, "limit": 1.0})
    assert crashed(service, start).tracker.clock_us == service.tracker.clock_us == W


def follow_some(service: Service, slots: range) -> None:
    """Tell windows of two tiers whose usage goes up and down, so that some answers are violated."""
    for at in slots:
        cpu = 0.1 if at % 3 else 0.7
        service.told(*({"task": t, "at": at, "cpu": cpu, "memory": cpu, "tier": t % 2} for t in range(8)))


def prices_of(service: Service) -> list[float]:
    return [price.now for price in cell_prices(service.tracker.prices)]


@pytest.mark.parametrize("saved_at", [None, 5, 17, 29])
def test_prices_that_follow_come_back_to_the_bit_from_a_snapshot_and_the_log_behind_it(
    service: Service, start: Callable[..., Service], saved_at: int | None
) -> None:
    follow_some(service, range(saved_at or 0))
    if saved_at is not None:
        service.save()
    follow_some(service, range(saved_at or 0, 30))
    assert prices_of(service) != [price.start for price in cell_prices(service.tracker.prices)]
    after = crashed(service, start)
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))
    ours, theirs = service.tracker.memory(), after.tracker.memory()
    for name in ours:
        if name.startswith("following."):
            assert_same_bits(ours[name], theirs[name], name)
    follow_some(service, range(30, 50))
    follow_some(after, range(30, 50))
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))


def test_prices_begin_again_with_another_model_and_those_of_each_stretch_of_the_log_stay_apart(
    service: Service, start: Callable[..., Service], scorer: Scorer, bundle: Bundle
) -> None:
    other = Scorer(loaded(bundle, "2"), SETTINGS.cell)
    follow_some(service, range(30))
    moved = prices_of(service)
    service.writer.promote(other)
    assert prices_of(service) == pytest.approx([price.start for price in cell_prices(service.tracker.prices)])
    service.writer.promote(scorer)  # no window was taken under the other
    assert prices_of(service) != moved
    follow_some(service, range(30, 50))
    after = crashed(service, start)
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))
    service.writer.promote(other)
    follow_some(service, range(50, 70))
    of_another = crashed(service, start)  # is started with the first model
    assert prices_of(of_another) == pytest.approx([p.start for p in cell_prices(of_another.tracker.prices)])


def test_a_model_that_came_back_without_a_window_between_begins_again_after_a_crash_too(
    service: Service, start: Callable[..., Service], scorer: Scorer, bundle: Bundle
) -> None:
    follow_some(service, range(30))
    moved = prices_of(service)
    service.writer.promote(Scorer(loaded(bundle, "2"), SETTINGS.cell))
    service.writer.promote(scorer)
    assert prices_of(service) != moved
    after = crashed(service, start)
    assert prices_of(after) == prices_of(service)
    follow_some(service, range(30, 50))
    follow_some(after, range(30, 50))
    assert_same(told_by(after.tracker, SETTINGS), told_by(service.tracker, SETTINGS))


def test_prices_of_windows_taken_while_they_did_not_follow_are_not_made_up(
    service: Service, start: Callable[..., Service]
) -> None:
    follow_some(service, range(20))
    fixed = crashed(service, start, follow=False)
    assert prices_of(fixed) == [price.start for price in cell_prices(fixed.tracker.prices)]
    follow_some(fixed, range(20, 40))
    again = crashed(fixed, start)
    assert prices_of(again) == pytest.approx([price.start for price in cell_prices(again.tracker.prices)])
    follow_some(again, range(40, 60))
    assert_same(told_by(crashed(again, start).tracker, SETTINGS), told_by(again.tracker, SETTINGS))
