"""Clock of a cell: moved by its tasks together, by no few of them, and never stuck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reclaim.serving.cell import claims, clock
from reclaim.serving.cell.claims import MOST_CLAIMS, PERIOD_S, Claims
from reclaim.serving.cell.clock import CellClock
from reclaim.serving.cell.outcomes import OUTCOMES
from reclaim.serving.settings import ServingSettings
from reclaim.training.bundle import Bundle
from tests.serving.cell_fixtures import Memory, W, windows_of

TAKEN, IN_THE_FUTURE = OUTCOMES.index("taken"), OUTCOMES.index("in_the_future")
HOUR = 12
"""Windows of an hour."""


class TimedMemory(Memory):
    """A tracker whose monotonic time is set by hand."""

    def __init__(self, settings: ServingSettings, bundle: Bundle, now_us: int = -1) -> None:
        super().__init__(settings, bundle, now_us)
        self.passed_s = 0.0
        self.tracker.clock = CellClock(settings, lambda: self.now_us, passed_s=lambda: self.passed_s)

    def send(self, tasks: range, at: int) -> set[int]:
        """Write a window of each task at once; return the outcomes."""
        return set(self.write(windows_of(*({"task": task, "at": at} for task in tasks))))

    @property
    def clock(self) -> CellClock:
        """Its clock."""
        return self.tracker.clock


Start = Callable[..., TimedMemory]


@pytest.fixture
def start(bundle: Bundle) -> Start:
    def make(now_us: int = -1, **changes: Any) -> TimedMemory:
        return TimedMemory(ServingSettings(**({"clock": "trace"} | changes)), bundle, now_us)

    return make


def test_one_client_of_one_task_moves_the_clock_of_a_cell_not_at_all(start: Start) -> None:
    memory = start()
    assert memory.send(range(100), 0) == {TAKEN}
    outcomes = [memory.send(range(7, 8), at) for at in range(1, 40 * HOUR)]
    assert outcomes[:HOUR] == [{TAKEN}] * HOUR  # within the bound, for itself
    assert all(outcome == {IN_THE_FUTURE} for outcome in outcomes[HOUR:])
    assert memory.clock.latest_us == W
    for at in range(40 * HOUR):
        memory.send(range(7, 17), HOUR + at)  # nor does a tenth of the tasks
    assert memory.clock.latest_us == W
    assert memory.send(range(20, 100), 1) == {TAKEN}
    assert memory.clock.latest_us == 2 * W


def test_the_first_write_may_bring_days_of_history(start: Start) -> None:
    memory = start()
    told = [{"task": task, "at": at} for task in range(10) for at in range(48 * HOUR)]
    assert set(memory.write(windows_of(*told))) == {TAKEN}
    assert memory.clock.latest_us == 48 * HOUR * W


def test_in_the_first_write_a_task_far_ahead_of_most_others_is_refused_and_moves_no_clock(start: Start) -> None:
    memory = start()
    told = [*({"task": task, "at": 0} for task in range(9)), {"task": 9, "at": 40 * HOUR}]
    assert list(memory.write(windows_of(*told))) == [TAKEN] * 9 + [IN_THE_FUTURE]
    assert memory.clock.latest_us == W


@pytest.mark.parametrize("at_once", [1, 3, 40])
def test_a_cell_whose_tasks_come_and_go_moves_its_own_clock_in_writes_of_any_size(start: Start, at_once: int) -> None:
    memory, random = start(), np.random.default_rng(1)
    tasks = list(range(40))
    for at in range(3 * HOUR):
        for low in range(0, 40, at_once):
            told = [{"task": task, "at": at} for task in tasks[low : low + at_once]]
            assert set(memory.write(windows_of(*told))) == {TAKEN}
        tasks = [task if random.random() < 0.7 else task + 40 for task in tasks]  # the others are silent from now on
        random.shuffle(tasks)
        assert memory.clock.latest_us == (at + 1) * W


def test_after_a_gap_agents_that_send_their_own_tasks_are_taken_once_most_of_them_have_come(start: Start) -> None:
    memory = start()
    memory.send(range(100), 0)
    agents = [range(low, low + 10) for low in range(0, 100, 10)]
    first = [memory.send(agent, 2 * HOUR) for agent in agents]
    assert first == [{IN_THE_FUTURE}] * 5 + [{TAKEN}] * 5
    assert all(memory.send(agent, 2 * HOUR) == {TAKEN} for agent in agents[:5])  # sent again
    assert all(memory.send(agent, 2 * HOUR + 1) == {TAKEN} for agent in agents)
    assert memory.clock.problem is None


@pytest.mark.parametrize("order", [1, -1])
def test_a_write_of_a_long_history_after_a_gap_is_taken_whole_in_any_order(start: Start, order: int) -> None:
    memory = start()
    memory.send(range(100), 0)
    told = [{"task": task, "at": at} for at in range(2 * HOUR, 12 * HOUR) for task in range(100)]
    assert len(told) > MOST_CLAIMS
    assert set(memory.write(windows_of(*told[::order]))) == {TAKEN}
    assert memory.clock.latest_us == 12 * HOUR * W


@pytest.mark.parametrize("at_once", [1, 110])
def test_new_tasks_among_those_of_a_large_cell_do_not_keep_it_from_going_on_after_a_gap(
    start: Start, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    for module in (claims, clock):
        monkeypatch.setattr(module, "MOST_CLAIMS", 10)
    memory = start()
    memory.send(range(10, 110), 0)
    outcomes = [memory.send(range(low, low + at_once), 2 * HOUR) for low in range(0, 110, at_once)]
    assert outcomes[-1] == {TAKEN}
    assert memory.clock.latest_us == (2 * HOUR + 1) * W


def test_tasks_that_were_refused_once_and_taken_since_do_not_count_as_a_gap(start: Start) -> None:
    memory = start()
    memory.send(range(100), 0)
    for agent in range(10):
        tasks = range(10 * agent, 10 * agent + 10)
        assert memory.send(tasks, 2 * HOUR) == {IN_THE_FUTURE}
        assert memory.send(tasks, 1) == {TAKEN}
    assert memory.clock.latest_us == 2 * W


def test_after_a_gap_in_which_all_tasks_were_replaced_the_new_ones_are_taken_after_ten_minutes(start: Start) -> None:
    memory = start()
    memory.send(range(100), 0)
    memory.passed_s = 2 * PERIOD_S  # nothing comes any more
    assert memory.send(range(200, 210), 4 * HOUR) == {IN_THE_FUTURE}
    assert "windows of 10 tasks were refused recently for their time, and those of 0 taken" in str(memory.clock.problem)
    memory.passed_s += PERIOD_S - 1
    assert memory.send(range(200, 210), 4 * HOUR + 2) == {IN_THE_FUTURE}
    memory.passed_s += 1
    assert memory.send(range(200, 210), 4 * HOUR + 2) == {TAKEN}
    assert memory.clock.problem is None
    assert memory.send(range(200, 206), 8 * HOUR) == {TAKEN}  # the next gap is over for most of these ten


def test_a_task_counts_once_by_its_latest_outcome_for_one_to_two_periods() -> None:
    now_s = 0.0
    claims = Claims(lambda: now_s)

    def counts() -> tuple[int, int, int]:
        return claims.taken, claims.too_late, claims.refused

    claims.refuse(np.array([[9, 0]]), np.array([W]), np.array([-1]))
    assert claims.refused_share == 1
    claims.take(np.array([0]))
    assert claims.refused_share == 0.5
    claims.take(np.arange(3))
    claims.miss(np.array([5]))
    assert counts() == (3, 1, 1)
    now_s = PERIOD_S
    assert counts() == (3, 1, 1)
    claims.take(np.array([0, 5, 9]))
    assert counts() == (5, 0, 1)
    claims.refuse(np.array([[9, 0]]), np.array([2 * W]), np.array([-1]))
    assert counts() == (5, 0, 1)
    assert [values.tolist() for values in claims.claims()] == [[[9, 0]], [2 * W], [-1]]
    now_s = 2 * PERIOD_S  # the first period is over
    assert counts() == (3, 0, 1)
    now_s = 4 * PERIOD_S
    assert counts() == (0, 0, 0)


def test_the_latest_claim_of_a_task_counts_though_no_more_tasks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reclaim.serving.cell.claims.MOST_CLAIMS", 1)  # so two tasks are
    claims = Claims(lambda: 0.0)
    for end_us in (W, 2 * W):
        claims.refuse(np.array([[task, 0] for task in (7, 8, 9)]), np.full(3, end_us), np.full(3, -1))
    assert [values.tolist() for values in claims.claims()] == [[[7, 0], [8, 0]], [2 * W] * 2, [-1] * 2]


def test_a_majority_that_moved_the_clock_does_not_count_towards_how_long_the_next_one_lasts() -> None:
    now_s = 0.0
    claims = Claims(lambda: now_s)
    claims.refuse(np.array([[7, 0]]), np.array([W]), np.array([-1]))
    now_s = PERIOD_S
    assert claims.lasting
    claims.clear()
    claims.refuse(np.array([[7, 0]]), np.array([W]), np.array([-1]))
    assert not claims.lasting


def test_tasks_whose_windows_do_not_end_at_the_same_time_all_count_as_sending(start: Start) -> None:
    memory = start()
    later = 100_000_000
    told = [{"task": task, "start_us": task % 2 * later, "end_us": W + task % 2 * later} for task in range(20)]
    assert set(memory.write(windows_of(*told))) == {TAKEN}
    assert memory.clock.latest_us == W + later
    # of the 20 tasks three are more than a tenth: the clock stands where three are, not where two of ten would be
    ahead = [{"task": task, "start_us": W + later, "end_us": 2 * W + task * 10_000_000} for task in (1, 3, 5)]
    assert set(memory.write(windows_of(*ahead))) == {TAKEN}
    assert memory.clock.latest_us == 2 * W + 10_000_000


def test_a_client_that_is_wrong_for_hours_is_not_believed_while_the_cell_goes_on(start: Start) -> None:
    memory = start()
    for at in range(4 * HOUR):
        memory.passed_s = 300.0 * at
        assert memory.send(range(100), at) == {TAKEN}
        assert memory.send(range(300, 340), at + 30 * HOUR) == {IN_THE_FUTURE}
        assert memory.clock.problem is None
        assert memory.clock.claims.refused_share == pytest.approx(40 / 140)


def test_two_wrong_windows_in_two_silences_of_a_healthy_cell_are_no_lasting_majority(start: Start) -> None:
    memory = start()
    memory.send(range(100), 0)
    memory.passed_s = 3 * PERIOD_S  # of those taken none counts any more
    assert memory.send(range(500, 501), 500 * 24 * HOUR) == {IN_THE_FUTURE}
    for at in range(1, 20):
        memory.passed_s += 300.0
        assert memory.send(range(100), at) == {TAKEN}
    memory.passed_s += 3 * PERIOD_S
    assert memory.send(range(501, 502), 400 * 24 * HOUR) == {IN_THE_FUTURE}
    assert memory.clock.latest_us == 20 * W


def test_with_this_machines_clock_a_refused_majority_is_named_and_not_believed(start: Start) -> None:
    memory = start(now_us=10 * W, clock="unix")
    memory.send(range(3), 9)
    for seconds in (0, 599, 1_201):
        memory.passed_s = seconds
        assert memory.send(range(10, 20), 11 * HOUR) == {IN_THE_FUTURE}
        assert "refused recently" in str(memory.clock.problem)
    memory.passed_s = 3_000
    assert memory.clock.problem is None  # none came for long


def test_with_this_machines_clock_the_windows_of_a_trace_are_named(start: Start) -> None:
    memory = start(now_us=2 * 10**15, clock="unix")
    assert memory.clock.problem is None
    assert memory.send(range(3), 9) == {OUTCOMES.index("in_the_past")}
    assert str(memory.clock.problem) == (
        "windows of 3 tasks were refused recently for their time, and those of 0 taken. This machine's clock says "
        "2033-05-18 03:33:20 UTC; set it, or the sender's, where it is wrong. Times of a trace need RECLAIM_CLOCK=trace"
    )
    old = start(now_us=2 * 10**15, clock="unix")
    assert old.send(range(3), 10**15 // W) == {TAKEN}  # of 2001, played in 2033
    assert "11574 days before this machine's time" in str(old.clock.problem)
    assert "RECLAIM_CLOCK=trace" in str(old.clock.problem)


@pytest.mark.parametrize(("more_us", "named"), [(0, False), (1, True)])
def test_windows_more_than_a_day_before_this_machines_time_are_named(start: Start, more_us: int, named: bool) -> None:
    memory = start(now_us=2 * 10**15 // W * W + more_us, clock="unix")
    assert memory.send(range(3), memory.now_us // W - 1 - 24 * HOUR) == {TAKEN}
    assert ("1 days before this machine's time" in str(memory.clock.problem)) == named


def test_windows_taken_while_this_machines_time_was_ahead_are_named_once_it_is_set_back(start: Start) -> None:
    memory = start(now_us=10 * W, clock="unix")
    assert memory.send(range(10), 9) == {TAKEN}
    memory.now_us += 24 * HOUR * W
    assert memory.send(range(10), 9 + 24 * HOUR) == {TAKEN}
    assert memory.clock.problem is None
    memory.now_us -= 24 * HOUR * W
    assert memory.send(range(10), 10) == {OUTCOMES.index("too_late")}
    assert "ends 86,400 s after this machine's time, which was set back: until then" in str(memory.clock.problem)
    assert memory.tracker.clock_us == memory.now_us  # callers see no time that has not come
    memory.now_us += 24 * HOUR * W
    assert memory.clock.problem is None


def test_a_task_is_not_forgotten_sooner_where_this_machines_time_was_behind_when_its_window_came(start: Start) -> None:
    memory = start(now_us=1_000 * W, clock="unix", forget_s=3_600, ahead_s=3_600)
    assert memory.send(range(1), 1_009) == {TAKEN}  # ends in 50 minutes
    for minutes, forgotten in ((109, []), (111, [0])):  # by this machine's time, an hour after the window or more
        memory.now_us = 1_000 * W + minutes * 60_000_000
        assert memory.send(range(1, 2), memory.now_us // W) == {TAKEN}
        assert memory.expire() == forgotten


def test_a_trace_that_is_sent_again_is_named_until_its_tasks_go_on(start: Start) -> None:
    memory = start()
    for at in range(4 * HOUR):
        memory.send(range(10), at)
    assert memory.send(range(2), 0) == {OUTCOMES.index("too_late")}
    assert memory.clock.problem is None  # two of ten
    assert memory.send(range(2, 10), 0) == {OUTCOMES.index("too_late")}
    assert memory.clock.problem is None  # as many as were taken
    memory.passed_s = 2 * PERIOD_S
    assert memory.send(range(10), 0) == {OUTCOMES.index("too_late")}
    assert "windows of 10 tasks were refused recently as too late, and those of 0 taken" in str(memory.clock.problem)
    assert "another --state folder" in str(memory.clock.problem)
    memory.send(range(10), 4 * HOUR)
    assert memory.clock.problem is None


def test_while_the_log_is_read_this_machines_clock_shows_when_a_record_was_written_but_never_a_time_to_come() -> None:
    now_us = 1_700_000_000_000_000
    shown_by = CellClock(ServingSettings(clock="unix"), lambda: now_us)
    shown = []
    for written_us in (now_us - 5, now_us + 5, -1):  # the second before this machine's time was set back
        shown_by.read(written_us, -1)
        shown.append(shown_by.present_us - now_us)
    assert shown == [-5, 0, 0]
    shown_by.read(now_us - 5, -1)
    shown_by.start()
    assert shown_by.present_us == now_us


def test_the_clock_of_windows_stands_at_the_latest_time_in_the_log_and_no_window_read_there_counts_as_sent() -> None:
    read = CellClock(ServingSettings(clock="trace"), lambda: -1)
    for latest_us in (5 * W, 3 * W, -1):  # a record without a time is the last
        read.read(-1, latest_us)
    assert read.latest_us == 5 * W
    read.claims.take(np.arange(2))
    assert read.claims.taken == 2
    read.start()
    assert read.claims.taken == 0


def test_the_clock_goes_on_where_it_stood_after_a_restart(start: Start) -> None:
    memory, other = start(), start()
    memory.send(range(100), 0)
    memory.send(range(7, 8), 9)
    other.tracker.recall(memory.tracker.memory())
    assert other.clock.latest_us == memory.clock.latest_us == W
    assert other.send(range(7, 8), HOUR + 1) == {IN_THE_FUTURE}
    assert other.send(range(100), 1) == {TAKEN, OUTCOMES.index("too_late")}
    assert other.clock.latest_us == 2 * W


def test_after_a_gap_the_clock_moves_to_where_most_tasks_are_and_one_far_ahead_of_them_is_refused(start: Start) -> None:
    memory = start()
    memory.send(range(10), 0)
    sent = [*({"task": task, "at": 2 * HOUR} for task in range(9)), {"task": 9, "at": 40 * HOUR}]
    assert list(memory.write(windows_of(*sent))) == [TAKEN] * 9 + [IN_THE_FUTURE]
    assert memory.clock.latest_us == (2 * HOUR + 1) * W


def test_tasks_whose_windows_moved_the_clock_no_longer_count_as_refused(start: Start) -> None:
    memory = start()
    memory.send(range(10), 0)
    assert memory.send(range(10), 2 * HOUR) == {TAKEN}
    assert (memory.clock.claims.refused, memory.clock.claims.taken) == (0, 10)


def test_a_cell_resumes_for_a_period_after_a_silence_in_which_tasks_would_be_forgotten_and_at_no_other_move(
    start: Start,
) -> None:
    memory = start(forget_s=24 * 3_600)
    resumes = []
    for at in (0, 1, 1 + 24 * HOUR, 2 + 48 * HOUR):  # the last after one window more than a day
        memory.send(range(10), at)
        resumes.append(memory.clock.resumes)
    assert resumes == [False, False, False, True]
    memory.passed_s += PERIOD_S
    assert not memory.clock.resumes


def test_a_clock_of_the_windows_runs_on_from_its_last_move(start: Start) -> None:
    memory = start()
    shown_us = []
    for at in (0, 1):
        memory.passed_s += 60
        memory.send(range(10), at)
        shown_us.append(memory.clock.present_us)
        memory.passed_s += 60
        shown_us.append(memory.clock.present_us)
    assert shown_us == [W, W + 60_000_000, 2 * W, 2 * W + 60_000_000]
