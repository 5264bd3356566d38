"""Features of the same hour one, two and seven days ago: each the formula by a plain loop, and a case by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.windows import CHANNELS, Windows, demand, peak_cpu
from reclaim.features.fold.batch import FeatureState
from reclaim.features.registry import AT, FEATURE_NAMES, SAME_HOUR_DAYS, SIGNALS

History = Callable[..., Windows]
S = 1_000_000
HOUR_US = 3_600 * S
NAMES = [f"same_hour_{days}d" for days in SAME_HOUR_DAYS]


def same_hour(windows: Windows, signal: str = "cpu") -> NDArray[np.float32]:
    x = FeatureState().advance(windows.task_numbers(), windows)
    return x[:, [FEATURE_NAMES.index(f"{signal}_{name}") for name in NAMES]]


def rounded_up(share: float) -> float:
    """Return the least (1 + k / 16) * 2^e no less than a share of the first limit, within 2^-10 and 60."""
    if math.isnan(share):
        return math.nan
    share = max(share, 2.0**-10)
    octave = 2.0 ** math.floor(math.log2(share))
    return min(octave * (1 + math.ceil((share / octave - 1) * 16) / 16), 60.0)


def test_the_same_hour_is_the_two_clock_hours_that_hold_the_one_to_come_that_many_days_ago(history: History) -> None:
    hours = 9 * 24
    per_hour = [0.0625 * (1 + h % 7) for h in range(hours)]  # sixteenths: already whole steps
    x = same_hour(history([v for v in per_hour for _ in range(12)], start_s=0))
    for h in range(hours):
        for k, days in enumerate(SAME_HOUR_DAYS):
            then = [per_hour[b] for b in (h - 24 * days, h - 24 * days + 1) if b >= 0]
            for row in (12 * h, 12 * h + 5, 12 * h + 11):  # ends at h:05, h:30 and at the full hour
                assert x[row, k] == pytest.approx(max(then)) if then else math.isnan(x[row, k])


def test_a_share_is_rounded_up_by_at_most_a_sixteenth_and_kept_between_a_thousandth_and_sixty(history: History) -> None:
    for share, kept in ((0.5, 0.5), (0.501, 0.53125), (0.53126, 0.5625), (1e-5, 2.0**-10), (0.0, 2.0**-10)):
        assert rounded_up(share) == kept
        x = same_hour(history([share] * 12 * 25, start_s=0), "memory")
        assert x[-1, 0] == pytest.approx(kept)
    windows = history([0.5] * 12 * 25, start_s=0)
    windows.usage[:, CHANNELS.index("cpu_max")] = 1e6
    assert same_hour(windows, "peak_cpu")[-1, 0] == 60.0


def test_a_changed_limit_changes_the_feature_and_not_what_is_kept(history: History) -> None:
    windows = history([0.5] * 12 * 25, start_s=0)
    windows.limit[-1:] = 4.0
    assert same_hour(windows)[-2:, 0].tolist() == [0.5, 0.125]


def test_what_is_known_before_any_limit_is_not_kept(history: History) -> None:
    windows = history([0.5] * 12 * 26, start_s=0)
    windows.limit[: 12 * 2] = np.nan
    x = same_hour(windows)
    assert np.isnan(x[12 * 24 + 11, 0])  # in the hours 0 and 1 no limit was known
    assert x[12 * 25, 0] == 0.5  # in hour 2 one was


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_same_hour_of_random_histories_is_the_formula_and_it_and_the_largest_of_a_week_never_understate(
    seed: int, random_histories: History
) -> None:
    windows = random_histories(seed, n_tasks=4, longest=160)  # gaps of hours, of a day and of three weeks
    signals = np.column_stack([demand(windows), peak_cpu(windows)])
    got = np.stack([same_hour(windows, signal) for signal in SIGNALS], axis=1)  # (n, signals, days)
    of_week = FeatureState().advance(windows.task_numbers(), windows)[:, [AT[f"{signal}_max_7d"] for signal in SIGNALS]]
    for first, stop in zip(windows.task_starts()[:-1], windows.task_starts()[1:], strict=True):
        largest: list[dict[int, float]] = [{} for _ in SIGNALS]  # by clock hour
        reference, last_us = [math.nan, math.nan], -1
        for i in range(first, stop):
            hour = (int(windows.end_us[i]) - 1) // HOUR_US
            if windows.end_us[i] > last_us:
                last_us = int(windows.end_us[i])
                for r in range(2):
                    if not reference[r] > 0 and windows.limit[i, r] > 0:
                        reference[r] = windows.limit[i, r]
                        for of in largest[r::2]:  # what was over before any limit was known is not kept
                            for past in of.keys() - {hour}:
                                del of[past]
                for of, v in zip(largest, signals[i].tolist(), strict=True):
                    if v == v:
                        of[hour] = max(v, of.get(hour, -1.0))
            now = (last_us - 1) // HOUR_US
            for j, of in enumerate(largest):
                limit, first_limit = windows.limit[i, j % 2], reference[j % 2]
                for k, days in enumerate(SAME_HOUR_DAYS):
                    then = max(of.get(now - 24 * days + b, -1.0) for b in (0, 1))
                    if limit > 0 and first_limit > 0 and then >= 0:
                        expected = min(rounded_up(then / first_limit) * first_limit / limit, 1e6)
                        assert got[i, j, k] == pytest.approx(expected, rel=1e-6)
                        assert got[i, j, k] >= min(then, 60 * first_limit) / limit * (1 - 1e-6)
                    else:
                        assert math.isnan(got[i, j, k])
                kept = max((of[b] for b in range(now - 24 * 7, now + 1) if b in of), default=-1.0)
                if limit > 0 and first_limit > 0 and kept >= 0:
                    assert of_week[i, j] >= min(kept, 60 * first_limit, 1e6 * limit) / limit * (1 - 1e-6)
