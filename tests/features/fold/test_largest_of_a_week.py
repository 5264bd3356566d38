"""The largest of a week: by hand, and between the largest of a day and the largest so far."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.windows import Windows
from reclaim.features.fold.batch import FeatureState
from reclaim.features.registry import AT, SIGNALS

History = Callable[..., Windows]
HOUR_US = 3_600_000_000
WEEK_HOURS = 7 * 24


def largest(windows: Windows, past: str = "7d") -> NDArray[np.float32]:
    """Return the largest of a past of every signal; shape (n, n_signals)."""
    x = FeatureState().advance(windows.task_numbers(), windows)
    return x[:, [AT[f"{signal}_max_{past}"] for signal in SIGNALS]]


def by_hours(shares: dict[int, float], hours: int) -> list[float]:
    """Return twelve windows of each hour: a sixteenth of the limit but in some hours."""
    return [shares.get(hour, 0.0625) for hour in range(hours) for _ in range(12)]


def test_a_peak_counts_for_the_168_hours_behind_its_own(history: History) -> None:
    x = largest(history(by_hours({3: 0.75}, 175), start_s=0))
    last_window = x[11::12]  # of each hour
    assert np.all(last_window[:3] == 0.0625)
    assert np.all(last_window[3 : 3 + WEEK_HOURS + 1] == 0.75)
    assert np.all(last_window[3 + WEEK_HOURS + 1 :] == 0.0625)


def test_a_peak_is_rounded_up_by_a_sixteenth_at_most_and_never_above_the_largest_so_far(history: History) -> None:
    recent = largest(history(by_hours({3: 0.501}, 60), start_s=0))
    assert np.all(recent[-1] == np.float32(0.501))  # 0.53125 is more than was ever used
    older = largest(history(by_hours({0: 0.75, 10: 0.501}, 175), start_s=0))
    assert older[12 * 168, 0] == 0.75
    assert np.all(older[-1] == 0.53125)  # the next of 0.5, 0.53125, 0.5625, …


def test_a_changed_limit_changes_the_feature_and_not_what_is_kept(history: History) -> None:
    windows = history(by_hours({3: 0.5}, 60), start_s=0)
    windows.limit[-1:] = 4.0
    assert largest(windows)[-2:, 0].tolist() == [0.5, 0.125]


def test_a_gap_of_a_week_forgets_what_was_before_it(history: History) -> None:
    windows = history(by_hours({3: 0.75}, 10), start_s=0)
    windows.start_us[-6:] += WEEK_HOURS * HOUR_US
    windows.end_us[-6:] += WEEK_HOURS * HOUR_US
    assert largest(windows)[-7, 0] == 0.75
    assert largest(windows)[-1, 0] == 0.0625


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_of_random_histories_it_lies_between_the_days_and_the_largest_so_far(
    seed: int, random_histories: History
) -> None:
    windows = random_histories(seed, n_tasks=4, longest=160)  # gaps of hours, of a day and of three weeks
    day, week, ever = (largest(windows, past) for past in ("24h", "7d", "ever"))
    known = np.isfinite(day)
    assert (week[known] >= day[known] * (1 - 1e-6)).all()
    known = np.isfinite(week)
    assert (week[known] <= ever[known]).all()
