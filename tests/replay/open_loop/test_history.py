"""Answers rest on the past alone, and margins are laid on afterwards."""

from collections.abc import Callable

import numpy as np
import pytest

from reclaim.data import windows as w
from reclaim.data.windows import Windows
from reclaim.features.groups import known_seconds
from reclaim.replay.open_loop.fold import run_base
from reclaim.replay.open_loop.history import current_reservations, join_histories, oracle, previous_rows
from reclaim.training.estimators.registry import ESTIMATORS, build_estimator
from reclaim.training.margins.margin import Guarded, Margin
from tests.replay.histories import history_of

Maker = Callable[..., Windows]

NARROW = Margin("aggressive", (-0.1, 0.05))


def noisy(make_windows: Maker, *, tasks: int = 5, length: int = 60) -> Windows:
    rng = np.random.default_rng(7)
    made = make_windows(*(rng.uniform(0, 1.2, (length, 2)).tolist() for _ in range(tasks)))
    made.scheduled_us[:] = made.start_us[made.task_starts()[:-1]][made.task_numbers()]
    made.scheduled_us[length // 2 : length] = made.start_us[length // 2]  # the first task was restarted
    unknown = rng.random(len(made)) < 0.1
    made.usage[unknown] = made.percentiles[unknown] = np.nan
    made.limit[rng.random(len(made)) < 0.05] = np.nan
    return made


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_margin_laid_on_a_base_run_equals_the_served_object_fed_one_window_at_a_time(
    name: str, make_windows: Maker
) -> None:
    windows = noisy(make_windows)
    replayed = Guarded(build_estimator(name), NARROW).adjust(run_base(build_estimator(name), windows), windows)
    served = Guarded(build_estimator(name), NARROW)
    slot = windows.task_numbers()
    by_time = np.argsort(windows.end_us, kind="stable")  # all tasks side by side, as a service sees them
    for row in by_time:
        one = np.array([row])
        answer = served.update(slot[one], windows.take(one))
        np.testing.assert_array_equal(answer.reservation[0], replayed.reservation[row], strict=True)
        np.testing.assert_array_equal(answer.rule[0], replayed.rule[row], strict=True)


def test_a_base_run_does_not_depend_on_how_many_rows_go_into_a_call(
    make_windows: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = noisy(make_windows)
    whole = run_base(build_estimator("borg"), windows)
    monkeypatch.setattr("reclaim.replay.open_loop.fold.ROWS_PER_CALL", 7)
    np.testing.assert_array_equal(run_base(build_estimator("borg"), windows).reservation, whole.reservation)


def test_each_row_knows_the_window_before_and_the_time_since_its_task_was_first_seen(make_windows: Maker) -> None:
    windows = make_windows([(0.1, 0.1)] * 3, [(0.1, 0.1)] * 2, first_slots=[0, 5])
    assert previous_rows(windows).tolist() == [-1, 0, 1, -1, 3]
    assert known_seconds(windows).tolist() == [300, 600, 900, 300, 600]


def test_what_is_in_force_is_the_answer_to_the_window_before_and_never_more_than_the_limit(
    make_windows: Maker,
) -> None:
    windows = make_windows([(0.1, 0.1)] * 5)
    windows.scheduled_us[:3] = 1
    windows.scheduled_us[3:] = windows.start_us[3]  # a new run begins with the fourth window
    windows.limit[4] = [0.05, 1.0]
    reservation = np.array([[0.5, 0.4], [0.3, 0.2], [0.6, 0.7], [0.2, 0.1], [9.0, 9.0]])
    expected = [[1.0, 1.0], [0.5, 0.4], [0.3, 0.2], [1.0, 1.0], [0.05, 0.1]]
    assert current_reservations(reservation, history_of(windows)).tolist() == expected


def test_a_task_without_a_limit_has_no_current_reservation_and_is_under_its_limit_once_that_is_known(
    make_windows: Maker,
) -> None:
    windows = make_windows([(0.1, 0.1)] * 4)
    windows.limit[1, 0] = windows.limit[0, 1] = np.nan
    reservation = np.array([[0.5, 0.6], [0.7, 0.2], [0.3, 0.4], [0.1, 0.1]])
    expected = [[1.0, np.nan], [np.nan, 1.0], [1.0, 0.2], [0.3, 0.4]]
    np.testing.assert_array_equal(current_reservations(reservation, history_of(windows)), expected)


def test_taking_rows_keeps_the_thread_of_each_task_where_the_row_before_was_taken(make_windows: Maker) -> None:
    history = history_of(make_windows([(0.1, 0.1)] * 4, [(0.1, 0.1)] * 3))
    taken = history.take(np.array([1, 2, 4, 6]))
    assert taken.previous.tolist() == [-1, 0, -1, -1]
    parts = [taken, taken]
    joined = join_histories(parts)
    assert parts == []  # so that no row is held twice
    assert joined.previous.tolist() == [-1, 0, -1, -1, -1, 4, -1, -1]
    assert joined.windows.end_us.tolist() == [*taken.windows.end_us, *taken.windows.end_us]


def test_the_oracle_reserves_the_target_up_to_the_limit_and_the_limit_where_the_future_is_unknown(
    make_windows: Maker,
) -> None:
    windows = make_windows([(0.1, 0.1)] * 3, limit=(2.0, 4.0))
    target = np.array([[0.25, 0.5], [1.5, np.nan], [0.0, 1.0]])
    assert oracle(history_of(windows, target)).reservation.tolist() == [[0.5, 2.0], [2.0, 4.0], [0.0, 4.0]]


def test_a_base_run_leaves_the_windows_as_they_were(make_windows: Maker) -> None:
    windows = noisy(make_windows)
    before = windows.usage.copy()
    for name in ESTIMATORS:
        Guarded(build_estimator(name), NARROW).adjust(run_base(build_estimator(name), windows), windows)
    np.testing.assert_array_equal(windows.usage, before)
    assert windows.usage.shape[1] == len(w.CHANNELS)
