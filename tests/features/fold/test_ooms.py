"""Out-of-memory ends that come to light by the windows of the next run, and how fast memory nears the limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.windows import MEMORY_MAX, MEMORY_MEAN, Cell, Windows, concatenate, sort_windows
from reclaim.features.feature_set import FeatureSet
from reclaim.features.fold import collection_ooms
from reclaim.features.fold.collection_ooms import CollectionOoms, OomJournal
from reclaim.features.fold.live import TolerantState
from reclaim.features.registry import AT, N_FEATURES, SLOT_S

S = 1_000_000
DAY_S = 86_400
Maker = Callable[..., Windows]
Fold = Callable[..., FeatureSet]
NONE = [0.0, np.nan, np.nan, np.nan, np.nan]
"""Features of a collection without a history."""


def runs(history: Maker, *memory: list[float], start_s: int = 600, task: int = 1, instance: int = 0) -> Windows:
    """Return the windows of runs that follow each other at once, each from the start of its first window on."""
    windows = history([0.1] * sum(map(len, memory)), [m for run in memory for m in run], start_s=start_s, task=task)
    windows.instance_index[:] = instance
    first = np.repeat(np.cumsum([0, *map(len, memory[:-1])]), [len(run) for run in memory])
    windows.scheduled_us[:] = windows.start_us[first]
    return windows


def column(fold: Fold, windows: Windows, *names: str) -> list[list[float]]:
    """Return features of each window."""
    found: list[list[float]] = fold(windows).x[:, [AT[name] for name in names]].tolist()
    return found


def test_the_first_window_of_the_next_run_brings_an_end_out_of_memory_to_light(history: Maker, fold: Fold) -> None:
    windows = runs(history, [0.5, 0.98], [0.2] * 13)
    x = column(fold, windows, "ooms", "oom_since", "oom_age", "oom_limit")
    assert x[:2] == [pytest.approx([0.0, np.nan, np.nan, np.nan], nan_ok=True)] * 2
    # the run ended at 10 minutes; the first window ends 5 minutes after that, the 12th an hour after that
    lasted = np.log2(1 + 10 / 60)
    assert x[2] == pytest.approx([1.0, np.log2(1 + 5 / 60), np.log2(1 + 5 / 60) - lasted, 0.0], abs=1e-6)
    assert x[13] == pytest.approx([1.0, 1.0, 1.0 - lasted, 0.0], abs=1e-6)


def test_the_last_and_the_least_age_of_several_ends_are_kept(history: Maker, fold: Fold) -> None:
    windows = runs(history, [1.0], [0.3, 0.4, 1.0], [0.2])
    windows.limit[4:] *= 2
    x = column(fold, windows, "ooms", "oom_age", "oom_age_least", "oom_limit")
    age, minutes = np.log2(1 + 5 / 60), np.log2(1 + np.array([15, 5]) / 60)
    assert x[-1] == pytest.approx([np.log2(3), *(age - minutes), 1.0], abs=1e-6)


@pytest.mark.parametrize(
    "memory", [[0.5, 0.97], [0.99, 0.5], [1.2, 1.3, 1.2]], ids=["below 98 %", "before its end", "above the limit"]
)
def test_a_run_that_ends_otherwise_is_no_end_out_of_memory(memory: list[float], history: Maker, fold: Fold) -> None:
    assert column(fold, runs(history, memory, [0.2]), "ooms")[-1] == [0.0]


def failed(windows: Windows, since_row: int, at_s: float, *, oom: bool) -> Windows:
    """Return windows that know from a row on of a failure, seconds after the first window begins."""
    failed_us, failed_oom = windows.failed_us.copy(), windows.failed_oom.copy()
    failed_us[since_row:], failed_oom[since_row:] = windows.start_us[0] + int(at_s * S), oom
    return replace(windows, failed_us=failed_us, failed_oom=failed_oom)


@pytest.mark.parametrize(("memory", "oom", "ooms"), [(0.3, True, 1.0), (0.99, False, 0.0), (0.99, True, 1.0)])
def test_a_failure_that_is_recorded_as_out_of_memory_or_as_not_decides(
    memory: float, oom: bool, ooms: float, history: Maker, fold: Fold
) -> None:
    windows = runs(history, [0.5, memory], [0.2, 0.2])
    assert column(fold, failed(windows, 2, 590, oom=oom), "ooms") == [[0.0], [0.0], [ooms], [ooms]]


def test_a_recorded_kill_counts_where_the_limit_does_not_bind_or_is_not_known(history: Maker, fold: Fold) -> None:
    above, unlimited = (failed(runs(history, [1.2, 1.3, 1.2], [0.2]), 3, 890, oom=True) for _ in range(2))
    unlimited.limit[:, 1] = np.nan
    assert [column(fold, w, "ooms")[-1] for w in (above, unlimited)] == [[1.0], [1.0]]


def test_a_failure_from_before_the_run_or_after_the_window_does_not_decide(history: Maker, fold: Fold) -> None:
    """Three runs from 0, 600 and 1,200 s on; the second ends at its limit, which the third brings to light at 1,500."""
    windows = runs(history, [0.5, 0.5], [0.5, 1.0], [0.2])
    for at_s, ooms in ((590, 1.0), (600, 1.0), (601, 0.0), (1_500, 0.0), (1_501, 1.0)):
        assert column(fold, failed(windows, 4, at_s, oom=False), "ooms")[-1] == [ooms]


def test_one_window_above_the_limit_may_be_the_last(history: Maker, fold: Fold) -> None:
    assert column(fold, runs(history, [0.5, 1.1], [0.2]), "ooms", "memory_above")[-1] == [1.0, 0.0]


def test_a_run_that_lived_above_the_limit_for_two_windows_is_not_bound_by_it(history: Maker, fold: Fold) -> None:
    for above, ooms in ((1, 1.0), (2, 0.0)):
        windows = runs(history, [0.5] + [1.25] * above, [0.25])
        assert column(fold, windows, "ooms")[-1] == [ooms]


def test_a_run_whose_memory_is_unknown_in_its_last_window_did_not_come_near_the_limit(
    history: Maker, fold: Fold
) -> None:
    assert column(fold, runs(history, [0.5, 1.0, np.nan], [0.25]), "ooms")[-1] == [0.0]


def test_a_run_that_ended_before_it_began_by_another_clock_lasted_no_time(history: Maker, fold: Fold) -> None:
    windows = runs(history, [1.0], [0.25])
    windows.scheduled_us[:] = (windows.end_us[0] + 60 * S, windows.end_us[0] + 120 * S)
    x = column(fold, windows, "ooms", "age", "oom_age", "oom_age_least")[-1]
    age = np.log2(1 + 3 / 60)
    assert x == pytest.approx([1.0, age, age, age])


@pytest.mark.parametrize("limit", [0.0, np.nan])
def test_without_a_limit_or_a_run_there_is_no_end(limit: float, history: Maker, fold: Fold) -> None:
    windows = runs(history, [0.5, 1.0], [0.2])
    unlimited, unknown = runs(history, [0.5, 1.0], [0.2]), runs(history, [0.5, 1.0], [0.2])
    unlimited.limit[:, 1] = limit
    unknown.scheduled_us[:2] = -1
    single = runs(history, [1.0], [0.2])  # one window above the limit may be the last
    single.limit[:, 1] = limit
    assert [column(fold, w, "ooms")[-1] for w in (windows, unlimited, single, unknown)] == [[1.0], [0.0], [0.0], [0.0]]


def test_rates_are_slopes_over_what_is_left(history: Maker, fold: Fold) -> None:
    memory = [0.10 + 0.01 * k for k in range(20)]  # 0.12 an hour
    x = fold(runs(history, memory)).x
    for name in ("memory_rate_30m", "memory_rate_2h", "memory_rate_run"):
        assert x[19, AT[name]] == pytest.approx(0.12 / (1 - 0.29), rel=1e-4), name
    # hourly maxima: the run began at 10 minutes, so the 2nd hour is the first whole one; only one yet, so 2 hours
    assert x[19, AT.memory_rate_6h] == pytest.approx(0.12 / (1 - 0.29), rel=1e-4)
    assert x[19, AT.memory_run_max] == np.float32(0.29)


def test_a_rate_of_half_an_hour_is_of_the_last_two_windows_where_it_has_fewer(history: Maker, fold: Fold) -> None:
    windows = runs(history, [0.1, 0.2, 0.5])
    windows.end_us[:] = windows.end_us[0] + 2_400 * S * np.arange(3)  # 40 minutes apart
    x = fold(windows).x
    assert x[2, AT.memory_rate_30m] == pytest.approx(0.3 / (2 / 3) / (1 - 0.5), rel=1e-4)
    assert x[2, AT.memory_rate_2h] == pytest.approx(0.4 / (4 / 3) / (1 - 0.5), rel=1e-4)


def test_a_rate_of_six_hours_is_of_hourly_maxima(history: Maker, fold: Fold) -> None:
    memory = [0.10 + 0.01 * (k // 12) for k in range(72)]  # 0.01 each hour, on the hour
    x = fold(runs(history, memory, start_s=0)).x
    assert x[-1, AT.memory_rate_6h] == pytest.approx(0.01 / (1 - 0.15), rel=1e-4)


def test_a_new_run_begins_its_rates_and_its_maximum_again(history: Maker, fold: Fold) -> None:
    x = fold(runs(history, [0.9] * 30, [0.2, 0.2, 0.3])).x
    names = ["memory_rate_30m", "memory_rate_2h", "memory_rate_6h", "memory_rate_run"]
    assert np.isnan(x[30, [AT[name] for name in names]]).all()
    assert (x[31, [AT[name] for name in names]] == 0).all()
    assert x[32, AT.memory_run_max] == np.float32(0.3)
    assert (x[32, [AT[name] for name in names]] > 0).all()


def test_a_rate_next_to_the_limit_is_finite(history: Maker, fold: Fold) -> None:
    x = fold(runs(history, [0.1, 1.0], [0.3, 1.0, 0.1])).x
    assert x[1, AT.memory_rate_2h] == 64.0
    assert x[4, AT.memory_rate_30m] < 0.0


def test_siblings_know_of_an_end_from_the_next_slot_on(history: Maker, fold: Fold) -> None:
    one = runs(history, [0.5, 0.5, 1.0], [0.2, 0.2, 0.2])  # dies at the end of slot 4, known in slot 5
    other, stranger = runs(history, [0.3] * 6, instance=1), runs(history, [0.3] * 6, task=2, instance=0)
    x = fold(concatenate([one, other, stranger])).x[:, AT.collection_ooms : N_FEATURES]
    known = [1.0, np.log2(1 + 1 / 12), np.log2(1.5) - np.log2(1.25), np.log2(1.5) - np.log2(1.25), 0.0]
    for rows in (x[:4], x[6:10], x[12:]):
        np.testing.assert_array_equal(rows, np.array([NONE] * len(rows), np.float32))
    assert x[10] == pytest.approx([known[0], known[1], *(np.log2(1 + 25 / 60) - np.log2(1.25),) * 2, 0.0], abs=1e-6)
    # one slot later: 2 windows since, one of each task, are 1/6 of an hour
    assert x[11] == pytest.approx([1.0, np.log2(1 + 2 / 12), *known[2:4], -np.log2(1 + 1 / 6)], abs=1e-6)
    assert x[5, 0] == 1.0


def test_of_several_ends_of_a_collection_the_mean_and_the_least_age_count(history: Maker, fold: Fold) -> None:
    one = runs(history, [0.5, 0.5, 1.0], [1.0], [0.2, 0.2])  # runs of 15 and of 5 minutes end out of memory
    other = runs(history, [0.3] * 8, instance=1)
    x, age = fold(concatenate([one, other])).x[-1], np.log2(1 + 40 / 60)
    assert x[AT.collection_ooms] == pytest.approx(np.log2(3))
    assert x[AT.collection_oom_age] == pytest.approx(age - np.log2(1 + 10 / 60), abs=1e-6)
    assert x[AT.collection_oom_age_least] == pytest.approx(age - np.log2(1 + 5 / 60), abs=1e-6)


def test_a_history_counts_up_to_two_weeks_after_its_last_end_and_goes_a_slot_later() -> None:
    ooms, out = CollectionOoms(), np.zeros((1, N_FEATURES), np.float32)
    ooms.advance(np.array([7]), np.array([10], np.int32), np.array([300], np.int32), out)
    ooms.drop_idle(10 + collection_ooms.KEEP_SLOTS)
    assert len(ooms) == 1
    ooms.drop_idle(11 + collection_ooms.KEEP_SLOTS)
    assert len(ooms) == 0


def test_a_window_that_ends_no_later_than_one_before_it_is_not_among_those_that_a_rate_is_over(history: Maker) -> None:
    windows = runs(history, [0.1] * 5)
    windows.end_us[1], windows.end_us[3] = windows.end_us[0], windows.end_us[2] - S
    assert OomJournal.of_windows(windows).taken.sum() == 3


def test_a_collection_forgets_its_ends_after_two_weeks(history: Maker, fold: Fold) -> None:
    died = runs(history, [1.0], [0.2])
    for days, known in ((13.9, 1.0), (15.1, 0.0)):
        late = runs(history, [0.3], start_s=600 + int(days * DAY_S), instance=1)
        assert fold(concatenate([died, late])).x[2, AT.collection_ooms] == known
        state = TolerantState(Cell(), 0.0)
        state.advance(np.zeros(2, np.int64), died)
        between = runs(history, [0.1], start_s=300 + int(days * DAY_S), task=9)
        state.advance(np.ones(1, np.int64), between)  # a new day: what counts no more goes
        assert len(state._collections) == int(known)
        assert state.advance(np.full(1, 2), late)[1][0, AT.collection_ooms] == known


def test_no_more_than_the_bound_is_kept_and_the_oldest_go(history: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection_ooms, "MOST", 16)
    state = TolerantState(Cell(), 0.0)
    for k in range(40):
        state.advance(np.full(2, k), runs(history, [1.0], [0.2], start_s=600 + 600 * k, task=100 - k))
    assert len(state._collections) <= 16
    kept = state.advance(np.array([50]), runs(history, [0.1], start_s=60_000, task=61, instance=1))[1]
    gone = state.advance(np.array([51]), runs(history, [0.1], start_s=60_000, task=100, instance=1))[1]
    assert (kept[0, AT.collection_ooms], gone[0, AT.collection_ooms]) == (1.0, 0.0)


def known_live(state: TolerantState, history: Maker, start_s: int) -> list[float]:
    """Return the ends out of memory that a new task of the collection knows of, and the hours since, as logarithms."""
    _, x, _, _ = state.advance(np.array([9]), history([0.25], start_s=start_s, task=1))
    state.forget(np.array([9]))
    return [float(x[0, AT[name]]) for name in ("collection_ooms", "collection_oom_since")]


def test_a_late_window_of_the_run_that_ended_does_not_count_its_end_again(history: Maker) -> None:
    windows, state = runs(history, [0.5, 1.0, 1.0], [0.25]), TolerantState(Cell(), 900.0)
    state.advance(np.zeros(3, np.int64), windows.take(np.array([0, 1, 3])))
    state.advance(np.zeros(1, np.int64), windows.take(np.array([2])))
    assert known_live(state, history, 7200)[0] == 1.0  # log2 of one more than one end


def test_a_served_collection_knows_of_an_end_for_two_weeks_whatever_the_time_of_day(history: Maker) -> None:
    noon_s, slots_to_two_weeks = DAY_S // 2, 14 * DAY_S // SLOT_S
    for began_s in (0, noon_s):
        windows, state = runs(history, [1.0], [0.25], start_s=began_s), TolerantState(Cell(), 900.0)
        state.advance(np.zeros(2, np.int64), windows)  # the second one brings it to light
        slot = began_s // SLOT_S + 1
        for back, ooms in ((DAY_S // SLOT_S, 1.0), (1, 1.0), (0, 1.0), (-1, 0.0)):
            now = slot + slots_to_two_weeks - back
            assert known_live(state, history, now * SLOT_S)[0] == ooms, (began_s, back)


def test_a_late_last_window_tells_the_others_too(history: Maker) -> None:
    mine, other = runs(history, [0.5, 1.0], [0.2, 0.2]), runs(history, [0.3] * 5, instance=1)
    state = TolerantState(Cell(), 900.0)
    state.advance(np.zeros(2, np.int64), mine.take(np.array([0, 2])))  # the run's last window is missing
    assert state.advance(np.ones(3, np.int64), other.take(slice(0, 3)))[1][0, AT.collection_ooms] == 0.0
    _, x, _, _ = state.advance(np.zeros(1, np.int64), mine.take(np.array([1])))
    assert x[0, AT.ooms] == 1.0
    assert state.advance(np.ones(1, np.int64), other.take(slice(3, 4)))[1][0, AT.collection_ooms] == 1.0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_a_collection_met_is_what_its_tasks_met_in_the_slots_before(
    seed: int, random_histories: Maker, fold: Fold
) -> None:
    rng, windows = np.random.default_rng(seed), random_histories(seed)
    full = rng.random(len(windows)) < 0.5
    windows.usage[full, MEMORY_MAX] = windows.limit[full, 1]
    windows.usage[:, MEMORY_MEAN] = windows.usage[:, MEMORY_MAX]
    windows = sort_windows(windows)
    features = fold(windows)
    slot = (features.end_us - 1) // (SLOT_S * S)
    own = np.rint(2.0 ** features.x[:, AT.ooms]).astype(int) - 1
    new = np.diff(own, prepend=0)
    for first in windows.task_starts()[:-1]:
        new[first] = own[first]
    assert (new[[k for a, b in pairwise(windows.task_starts()) for k in range(a, b)]] >= 0).all()
    for i in range(len(windows)):
        mine = windows.collection_id == windows.collection_id[i]
        at = np.sort(slot[mine & (new > 0) & (slot < slot[i])])
        begins = 0  # after a gap in the collection's windows longer than it is remembered
        for k, (before, after) in enumerate(pairwise([*at, slot[i]])):
            begins = k + 1 if after - before > collection_ooms.KEEP_SLOTS else begins
        counted = new[mine & (slot < slot[i]) & (slot >= (at[begins] if begins < len(at) else slot[i]))].sum()
        assert features.x[i, AT.collection_ooms] == pytest.approx(np.log2(1 + counted), abs=1e-6)
