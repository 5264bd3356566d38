"""Features of related tasks: against the registry's words, taken literally for every pair of rows, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import Event, Thread
from time import sleep
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.core.parallel import ROWS_WORTH_A_THREAD, in_parts
from reclaim.data.windows import CHANNELS, LEVELS, Windows, concatenate, demand, peak_cpu
from reclaim.features.fold.batch import FeatureState
from reclaim.features.fold.related_record import KEEP_IDLE_DAYS
from reclaim.features.registry import FEATURE_NAMES, FIRST_RELATED, GROUP_KINDS, SIGNALS, SLOT_S

History = Callable[..., Windows]
Fold = Callable[..., Any]
MOST: Final = 2000.0
"""Times the limit: what others used above it counts as this much."""


def value(x: NDArray[np.float32], name: str, row: int) -> float:
    return float(x[row, FEATURE_NAMES.index(name)])


def oracle(windows: Windows) -> NDArray[np.float64]:
    """Return the features about others, each row against every other row; shape (n, n_features - FIRST_RELATED)."""
    n, task = len(windows), windows.task_numbers().tolist()
    seen_us: list[int] = []
    taken: list[bool] = []
    for i in range(n):  # a late window is told of when the last one before it was
        late = i > 0 and task[i] == task[i - 1] and windows.end_us[i] <= seen_us[-1]
        seen_us.append(seen_us[-1] if late else int(windows.end_us[i]))
        taken.append(not late)
    slot = [math.ceil(us / 1e6 / SLOT_S) - 1 for us in seen_us]  # a window that ends with a slot lies in it
    limit = windows.limit[:, [0, 1, 0]]
    with np.errstate(divide="ignore", invalid="ignore"):
        used = np.column_stack([demand(windows), peak_cpu(windows)]) / limit
    used[~(limit > 0) | ~np.array(taken)[:, None]] = np.nan
    used = np.minimum(used, MOST)
    of = list(zip(windows.collection_id.tolist(), windows.user.tolist(), windows.name.tolist(), strict=True))
    out: list[list[float]] = []
    for i in range(n):
        collection, user, name = of[i]
        row: list[float] = []
        for kind in GROUP_KINDS:
            others = [
                k
                for k in range(n)
                if slot[k] < slot[i]
                and {
                    "sibling": of[k][0] == collection and task[k] != task[i],
                    "name": of[k][0] != collection and of[k][1:] == (user, name) and name >= 0,
                    "user": of[k][0] != collection and of[k][1] == user and user >= 0,
                }[kind]
            ]
            row.append(math.log2(1 + len({task[k] for k in others if not np.isnan(used[k]).all()})))
            for j in range(len(SIGNALS)):
                known = [k for k in others if not math.isnan(used[k, j])]
                values = [float(used[k, j]) for k in known]
                peaks = [max(float(used[k, j]) for k in known if task[k] == t) for t in {task[k] for k in known}]
                row += [_mean(values), _mean(peaks), max(values, default=math.nan)]
                if kind == "sibling":
                    now = [float(used[k, j]) for k in known if slot[k] == slot[i] - 1]
                    row += [_mean(now), max(now, default=math.nan)]
        out.append(row)
    return np.array(out)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), n_tasks=st.sampled_from([3, 8]))
def test_every_feature_about_others_is_what_its_words_say(
    seed: int, n_tasks: int, random_histories: History, fold: Fold
) -> None:
    windows = random_histories(seed, n_tasks, longest=25)
    got, expected = fold(windows).x[:, FIRST_RELATED:], oracle(windows)
    for k, name in enumerate(FEATURE_NAMES[FIRST_RELATED:]):
        np.testing.assert_allclose(got[:, k], expected[:, k], rtol=1e-6, atol=1e-6, err_msg=name)


def owned(windows: Windows, *, user: int = -1, name: int = -1, instance: int = 0) -> Windows:
    windows.user[:], windows.name[:], windows.instance_index[:] = user, name, instance
    return windows


def together(*parts: Windows) -> Windows:
    """Return the parts one after another; each is one task, and they stand in the order of tasks."""
    return concatenate(list(parts))


def test_a_lone_task_has_no_others_however_long_it_runs(history: History, fold: Fold) -> None:
    x = fold(owned(history([0.5] * 30), user=3, name=4)).x[:, FIRST_RELATED:]
    counts = [FEATURE_NAMES.index(f"{kind}_tasks") - FIRST_RELATED for kind in GROUP_KINDS]
    assert (x[:, counts] == 0).all()
    assert np.isnan(np.delete(x, counts, axis=1)).all()


def test_a_sibling_is_seen_one_slot_later_and_never_in_its_own(history: History, fold: Fold) -> None:
    mine, other = history([0.5, 0.5, 0.5]), owned(history([0.2, 0.6]), instance=1)
    x = fold(together(mine, other)).x
    assert value(x, "sibling_tasks", 0) == 0
    assert math.isnan(value(x, "sibling_cpu_mean", 0))
    assert value(x, "sibling_tasks", 1) == 1
    assert value(x, "sibling_cpu_mean", 1) == pytest.approx(0.2)
    assert value(x, "sibling_cpu_now", 1) == pytest.approx(0.2)
    assert value(x, "sibling_cpu_mean", 2) == pytest.approx(0.4)
    assert value(x, "sibling_cpu_peak", 2) == pytest.approx(0.6)
    assert value(x, "sibling_cpu_max", 2) == pytest.approx(0.6)
    assert value(x, "sibling_cpu_now", 2) == pytest.approx(0.6)


def test_a_window_that_ends_with_a_slot_lies_in_it_and_a_moment_later_in_the_next(history: History, fold: Fold) -> None:
    mine, other = history([0.5], start_s=600), owned(history([0.2], start_s=300), instance=1)
    assert value(fold(together(mine, other)).x, "sibling_tasks", 0) == 1  # ended at 600 s: the slot before
    other.end_us[:] += 1
    assert value(fold(together(mine, other)).x, "sibling_tasks", 0) == 0  # in the same slot as 900 s


def test_now_is_the_one_slot_before_and_no_older_one(history: History, fold: Fold) -> None:
    mine, other = history([0.5] * 4), owned(history([0.2]), instance=1)
    x = fold(together(mine, other)).x
    assert value(x, "sibling_memory_now", 1) == pytest.approx(0.2)
    assert value(x, "sibling_memory_now_max", 1) == pytest.approx(0.2)
    for row in (2, 3):
        assert math.isnan(value(x, "sibling_memory_now", row))
        assert math.isnan(value(x, "sibling_memory_now_max", row))
        assert value(x, "sibling_memory_mean", row) == pytest.approx(0.2)
    x = fold(together(mine.take(np.array([0, 3])), other)).x  # nor where no row lies in between
    assert math.isnan(value(x, "sibling_memory_now", 1))
    assert value(x, "sibling_memory_mean", 1) == pytest.approx(0.2)


def test_the_first_window_of_a_new_collection_sees_the_earlier_runs_of_its_name_and_user(
    history: History, fold: Fold
) -> None:
    run = owned(history([0.2, 0.4], task=1), user=3, name=4)
    other_name = owned(history([0.8], task=2), user=3, name=5)
    other_user = owned(history([0.9], task=3), user=6, name=4)
    new = owned(history([0.1], task=4, start_s=90_000), user=3, name=4)
    x = fold(together(run, other_name, other_user, new)).x
    assert value(x, "sibling_tasks", 4) == 0
    assert value(x, "name_tasks", 4) == 1
    assert value(x, "name_cpu_mean", 4) == pytest.approx(0.3)
    assert value(x, "name_memory_peak", 4) == pytest.approx(0.4)
    assert value(x, "user_tasks", 4) == pytest.approx(math.log2(3))
    assert value(x, "user_cpu_mean", 4) == pytest.approx((0.2 + 0.4 + 0.8) / 3)
    assert value(x, "user_cpu_peak", 4) == pytest.approx((0.4 + 0.8) / 2)
    assert value(x, "user_peak_cpu_max", 4) == pytest.approx(0.8)


def test_a_name_without_a_user_is_a_group_and_an_unknown_one_is_none(history: History, fold: Fold) -> None:
    for name, user, expected in ((4, -1, (1, 0)), (-1, 3, (0, 1)), (-1, -1, (0, 0))):
        first, then = history([0.2], task=1), history([0.1], task=2, start_s=9_000)
        x = fold(together(owned(first, user=user, name=name), owned(then, user=user, name=name))).x
        assert (value(x, "name_tasks", 1), value(x, "user_tasks", 1)) == expected


def test_the_tasks_of_the_own_collection_never_count_among_the_runs_of_its_name_or_user(
    history: History, fold: Fold
) -> None:
    mine = owned(history([0.1] * 3, task=2), user=3, name=4)
    sibling = owned(history([0.9] * 3, task=2), user=3, name=4, instance=1)
    x = fold(together(mine, sibling)).x
    assert value(x, "sibling_cpu_max", 2) == pytest.approx(0.9)
    for kind in ("name", "user"):
        assert value(x, f"{kind}_tasks", 2) == 0
        assert math.isnan(value(x, f"{kind}_cpu_max", 2))
    elder = owned(history([0.3], task=1), user=3, name=4)
    x = fold(together(elder, mine, sibling)).x
    for kind in ("name", "user"):
        assert value(x, f"{kind}_tasks", 3) == 1
        for what in ("mean", "peak", "max"):
            assert value(x, f"{kind}_cpu_{what}", 3) == pytest.approx(0.3)


@pytest.mark.parametrize("order", [(0.9, 0.9, 0.4), (0.9, 0.4, 0.9), (0.4, 0.9, 0.9)])
def test_of_a_shared_maximum_each_still_sees_the_others(order: tuple[float, ...], history: History, fold: Fold) -> None:
    tasks = [owned(history([v, 0.1, 0.1]), instance=k) for k, v in enumerate(order)]
    x = fold(together(*tasks)).x
    for k in range(3):
        for name in ("sibling_cpu_max", "sibling_cpu_now_max"):
            assert value(x, name, 3 * k + 1) == pytest.approx(0.9)
        assert value(x, "sibling_cpu_max", 3 * k + 2) == pytest.approx(0.9)


def test_who_had_the_maximum_alone_sees_the_next(history: History, fold: Fold) -> None:
    one, two = history([0.9, 0.1, 0.1, 0.1]), owned(history([0.4, 0.5, 0.95, 0.1]), instance=1)
    x = fold(together(one, two)).x
    assert [value(x, "sibling_cpu_max", k) for k in (1, 2, 3)] == pytest.approx([0.4, 0.5, 0.95])
    assert [value(x, "sibling_cpu_max", 4 + k) for k in (1, 2, 3)] == pytest.approx([0.9, 0.9, 0.9])


def test_the_peak_is_a_mean_over_tasks_and_the_mean_one_over_windows(history: History, fold: Fold) -> None:
    many, few = owned(history([0.2] * 9 + [0.4]), instance=1), owned(history([0.8], start_s=3300), instance=2)
    x = fold(together(history([0.5], start_s=3600), many, few)).x
    assert value(x, "sibling_cpu_mean", 0) == pytest.approx((9 * 0.2 + 0.4 + 0.8) / 11)
    assert value(x, "sibling_cpu_peak", 0) == pytest.approx((0.4 + 0.8) / 2)
    assert value(x, "sibling_cpu_now", 0) == pytest.approx((0.4 + 0.8) / 2)
    assert value(x, "sibling_cpu_now_max", 0) == pytest.approx(0.8)


def test_each_counts_over_its_own_limit_and_one_without_a_limit_not_at_all(history: History, fold: Fold) -> None:
    mine = history([0.5, 0.5], limit=1.0)
    half = owned(history([0.2, 0.2], limit=0.5), instance=1)
    for limit in (math.nan, 0.0):
        unknown = owned(history([0.9, 0.9], limit=limit), instance=2)
        x = fold(together(mine, half, unknown)).x
        assert value(x, "sibling_tasks", 1) == 1
        assert value(x, "sibling_cpu_mean", 1) == pytest.approx(0.4)
        assert value(x, "sibling_cpu_max", 1) == pytest.approx(0.4)
        assert value(x, "sibling_tasks", 5) == pytest.approx(math.log2(3))  # it sees the others all the same


def test_a_repeated_window_counts_once_and_a_missing_value_not_at_all(history: History, fold: Fold) -> None:
    mine, other = history([0.5] * 4), owned(history([0.2, 0.9, 0.4]), instance=1)
    repeated = other.take(np.array([0, 0, 1, 2]))
    repeated.usage[2, CHANNELS.index("cpu_mean")] = math.nan
    x = fold(together(mine, repeated)).x
    assert value(x, "sibling_cpu_mean", 3) == pytest.approx(0.3)
    assert value(x, "sibling_memory_mean", 3) == pytest.approx(0.5)
    assert math.isnan(value(x, "sibling_cpu_now", 2))  # nothing was measured in that slot
    assert value(x, "sibling_memory_now", 2) == pytest.approx(0.9)


def test_the_demand_is_capped_at_the_limit_and_the_peak_at_two_thousand_of_them(history: History, fold: Fold) -> None:
    mine, other = history([0.5, 0.5]), owned(history([0.2, 0.2]), instance=1)
    other.percentiles[:, LEVELS.index(90)] = 3.0
    other.usage[:, CHANNELS.index("cpu_max")] = 1e9
    x = fold(together(mine, other)).x
    assert value(x, "sibling_cpu_max", 1) == pytest.approx(1.0)
    assert value(x, "sibling_peak_cpu_max", 1) == pytest.approx(MOST)


def test_parts_that_call_for_parts_of_their_own_from_all_threads_at_once_are_all_done() -> None:
    rows, done = ROWS_WORTH_A_THREAD, []

    def outer(part: int, parts: int) -> None:
        in_parts(lambda p, n: done.append((part, p, n)), rows, parts)

    callers = [Thread(target=in_parts, args=(outer, rows, 2), daemon=True) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert sorted(done) == sorted([(a, b, 2) for a in range(2) for b in range(2)] * 8)


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_in_a_part_is_told_when_all_that_had_begun_is_done(failing: int) -> None:
    begun, done = Event(), []

    def work(part: int, _parts: int) -> None:
        if part == 1:
            begun.set()
            sleep(0.05)
        else:
            begun.wait(120)
        if part == failing:
            raise ValueError("broken")
        done.append(part)

    with pytest.raises(ValueError, match="broken"):
        in_parts(work, ROWS_WORTH_A_THREAD, 2)
    assert done == [1 - failing]


@pytest.mark.parametrize(("days", "known"), [(KEEP_IDLE_DAYS - 1, True), (KEEP_IDLE_DAYS + 1, False)])
def test_a_group_without_a_window_for_a_month_begins_again_in_batch_and_live_alike(
    days: int, known: bool, history: History, fold: Fold
) -> None:
    def run(task: int, start_s: int, instance: int = 0) -> Windows:
        return owned(history([0.2, 0.4], task=task, start_s=start_s), user=3, name=4, instance=instance)

    again_s = 600 + days * 86_400
    # a task and its sibling, silent in between; a later run of their name; the task itself once more
    mine = concatenate([run(1, 0), run(1, again_s)])
    cell = together(mine, run(1, 0, instance=1), run(2, again_s))
    x = fold(cell).x
    for name in ("sibling_tasks", "name_tasks", "user_tasks"):
        row = 2 if name == "sibling_tasks" else 6
        assert (value(x, name, row) > 0) is known
        assert math.isnan(value(x, name.replace("tasks", "cpu_mean"), row)) is not known
    assert value(x, "sibling_tasks", 3) == (1 if known else 0)  # its own earlier windows do not become another's
    state, task = FeatureState(related=True), cell.task_numbers()
    order = np.argsort(cell.end_us, kind="stable")
    live = np.empty_like(x)
    for part in np.split(order, np.flatnonzero(np.diff(cell.end_us[order])) + 1):
        live[part] = state.advance(task[part], cell.take(part))
    np.testing.assert_array_equal(live, x)
