"""Margins and prices that follow the workload: worked by hand, budgets held under drift, alike however they are fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reclaim.data.errors import ConfigError
from reclaim.data.windows import Windows, concatenate, demand
from reclaim.training.estimators.base import STATISTIC, Estimate
from reclaim.training.margins.answers import Answers, Priced, Setting, Widened, three_of
from reclaim.training.margins.ladder import N_RUNGS, TOP_RUNG, price_of
from reclaim.training.margins.margin import MARGIN_NAMES, Budgets, Margin
from reclaim.training.margins.online import ENOUGH, LEAST, PENDING, OnlineMargins, risen
from reclaim.training.margins.price import Price
from reclaim.training.margins.violation import violates

Maker = Callable[..., Windows]
NONE = three_of(*(Margin(name, (0.0, 0.0)) for name in ("baseline", "aggressive")))
MIDDLE = three_of(*(Price(name, (value, value)) for name, value in (("baseline", 16.0), ("aggressive", 1.0))))
PROD = 4


def _online(
    budget: float = 0.01, horizon_s: int = 300, start: Mapping[str, Setting] = NONE, rate: float | None = None
) -> OnlineMargins:
    return OnlineMargins(start, Budgets(budget, budget), horizon_s, rate)


def _flat(windows: Windows, share: float = 0.15) -> Widened:
    """Return answers of a share of the limit."""
    return Widened.alike(Estimate(share * windows.limit, np.full(windows.limit.shape, STATISTIC, np.uint8)))


def _ladders(windows: Windows) -> Priced:
    """Return ladders that rise to the limit, from a twentieth of it, ever faster."""
    rungs = (0.05 + 0.95 * np.linspace(0.0, 1.0, N_RUNGS) ** 2).astype(np.float32)
    return Priced(np.broadcast_to(rungs, (*windows.limit.shape, N_RUNGS)))


def _hold(online: OnlineMargins, windows: Windows, answers: Answers | None = None) -> dict[str, np.ndarray]:
    return online.hold(windows.task_numbers(), _flat(windows) if answers is None else answers, windows)


def _of_prod(online: OnlineMargins, name: str) -> tuple[float, ...]:
    """Return the shares or prices of the moment of production tasks."""
    by_tier = online.settings[name].by_tier
    assert by_tier is not None
    return by_tier[PROD]


def _tasks(make_windows: Maker, *usage: list[tuple[float, float]] | np.ndarray) -> Windows:
    """Return tasks of these demands, CPU and memory of each window."""
    columns = [np.array(of_task).T for of_task in usage]
    return concatenate([make_windows(cpu, memory, task=k) for k, (cpu, memory) in enumerate(columns)])


def _noisy(make_windows: Maker, n: int, tasks: int, seed: int, drift: float = 0.0) -> Windows:
    rng = np.random.default_rng(seed)
    level = np.exp(drift * np.minimum(np.arange(n) / (n / 3), 1.0))[:, None]  # over the first third
    return _tasks(make_windows, *(np.clip(rng.lognormal(-2.5, 0.3, (n, 2)) * level, 0, 1) for _ in range(tasks)))


def test_what_is_returned_to_be_looked_at_is_a_copy() -> None:
    online = _online()
    online.log[:], online.own_rungs[:], online.violated[:] = 1.0, 1.0, 1.0
    assert (online.log == 0).all()
    assert np.isnan(online.own_rungs).all()
    assert np.isnan(online.violated).all()


def test_the_share_that_was_violated_is_of_the_outcomes_of_each_budget_tier_and_resource() -> None:
    online = _online()
    sums = online.memory()
    sums["outcomes"][PROD] = 4.0, 8.0
    sums["exceeded"][:, PROD] = [[1.0, 4.0], [2.0, 6.0]]
    assert online.violated[:, PROD].tolist() == [[1 / 4, 4 / 8], [2 / 4, 6 / 8]]
    assert np.isnan(np.delete(online.violated, PROD, axis=1)).all()


def test_what_came_fades_by_a_day_of_slots_for_each_slot_that_passed() -> None:
    online, slot_us = _online(), 300_000_000
    online.reach(10 * slot_us)
    for name in ("outcomes", "exceeded", "met"):
        online.memory()[name][:] = 4.0
    online.reach(13 * slot_us)
    for name in ("outcomes", "exceeded", "met"):
        np.testing.assert_allclose(online.memory()[name], 4.0 * (1 - 1 / 288) ** 3)
    online.memory()["slots"][:] = 4.0
    online.reach(16 * slot_us)  # each of the three slots counts, and fades like those before it
    fade = 1 - 1 / 288
    np.testing.assert_allclose(online.memory()["slots"], 4.0 * fade**3 + fade**2 + fade + 1)


def test_a_violation_raises_the_logarithm_and_each_kept_answer_lowers_it(make_windows: Maker) -> None:
    # one task, horizon one window: the answer to a window is held against the next and counts two slots later.
    # 0.15 is reserved; the third window demands a CPU of 0.2, so the second answer is violated.
    windows = _tasks(make_windows, [(0.1, 0.1), (0.1, 0.1), (0.2, 0.1), (0.2, 0.1), (0.2, 0.1)])
    online = _online(budget=0.25)
    _hold(online, windows)
    # a day has 288 answers, of which 72 may be violated; outcomes that count at the fifth window: kept, violated, and
    # kept, for the third answer was 0.2 (the jump). So of CPU 1 - 3 * 0.25 too many, of memory 0.75 too few. The full
    # rate of a margin, 0.5, is for 640 violations a day; of 72 it is the root of 72 / 640
    rate, spent = 0.5 * np.sqrt(72 / 640), 1 - 3 * 0.25
    assert online.log[:, PROD] == pytest.approx(np.array([[rate * spent / 72, -rate * 0.75 / 72]] * 2))
    assert _of_prod(online, "baseline") == pytest.approx(np.expm1(online.log[0, PROD]))


def test_an_answer_that_is_kept_counts_a_slot_after_its_horizon(make_windows: Maker) -> None:
    # horizon two windows: of the first answer the second window is met and the third is the last, in whose slot another
    # window within the horizon may still come; so nothing counts before the fourth
    windows = _tasks(make_windows, [(0.1, 0.1)] * 4)
    online, logs = _online(budget=0.25, horizon_s=600), []
    for k in range(len(windows)):
        _hold(online, windows.take(np.array([k])))
        logs.append(online.log[0, PROD, 0])
    assert logs[:3] == [0.0] * 3
    assert logs[3] < 0.0


def test_a_budget_of_few_violations_a_day_is_followed_slowly(make_windows: Maker) -> None:
    windows = _tasks(make_windows, [(0.1, 0.1), (0.1, 0.1), (0.2, 0.1), (0.2, 0.1), (0.2, 0.1)])
    online = _online(budget=0.001)
    _hold(online, windows)
    # 0.288 violations a day: one of them moves as if 3.6 were allowed
    rate = 0.5 * np.sqrt(LEAST / ENOUGH)
    assert online.log[0, PROD] == pytest.approx([rate * (1 - 0.003) / LEAST, -rate * 0.003 / LEAST])


def test_a_spike_of_twelve_answers_raises_the_smallest_price_by_e_at_most() -> None:
    assert 12 * Price.rate * np.sqrt(LEAST / ENOUGH) / LEAST == pytest.approx(1.0)


def test_the_full_rate_is_that_of_a_budget_of_enough_violations_a_day(make_windows: Maker) -> None:
    # the same windows of ten and of forty tasks, of whose memory every answer is kept: 10 * 288 / 4 = 720 are enough
    # a day, and more of them move no faster
    logs = []
    for tasks in (10, 40):
        online = _online(budget=0.25)
        _hold(online, _tasks(make_windows, *[[(0.1, 0.1)] * 5] * tasks))
        logs.append(online.log[0, PROD, 1])
    assert logs == pytest.approx([-0.5 * 3 / 288] * 2)


@pytest.mark.parametrize("start", [NONE, MIDDLE])
def test_the_budget_is_held_under_a_drift_that_a_fixed_setting_does_not_follow(
    make_windows: Maker, start: Mapping[str, Setting]
) -> None:
    windows = _noisy(make_windows, 1_500, 12, seed=3, drift=1.5)
    late = windows.start_us > np.quantile(windows.start_us, 2 / 3)
    ahead = np.roll(windows.usage, -1, axis=0)  # of the same task, but for its last row
    ahead[windows.task_starts()[1:] - 1] = 0.0

    def violated(reservation: np.ndarray) -> float:
        return float((ahead[late, 3] > reservation[late, 1] * (1 + 1e-6)).mean())

    answers = _ladders(windows) if start is MIDDLE else _flat(windows, 0.24)
    fixed = _hold(_online(0.02, 300, start, rate=1e-12), windows, answers)
    followed = _hold(_online(0.02, 300, start), windows, answers)
    assert abs(np.log(violated(fixed["aggressive"]) / 0.02)) > 1.0
    assert violated(followed["aggressive"]) == pytest.approx(0.02, rel=0.25)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), horizon_s=st.sampled_from([300, 3_600]), data=st.data())
def test_how_a_stream_is_cut_into_calls_makes_no_difference(
    seed: int, horizon_s: int, data: st.DataObject, make_windows: Maker
) -> None:
    windows = _noisy(make_windows, 40, 5, seed)
    slot, answers = windows.task_numbers(), _ladders(windows)
    online = _online(0.1, horizon_s, MIDDLE)
    whole = _hold(online, windows, answers)
    order = np.lexsort((slot, windows.end_us))
    cuts = data.draw(st.lists(st.integers(1, len(order)), max_size=6).map(sorted))
    parts = _online(0.1, horizon_s, MIDDLE)
    for rows in np.split(order, cuts):
        if len(rows):
            saved = parts.memory()
            parts = _online(0.1, horizon_s, MIDDLE)
            parts.recall(saved)
            for name, reservation in parts.hold(slot[rows], answers.take(rows), windows.take(rows)).items():
                assert reservation.tobytes() == whole[name][rows].tobytes()
    assert {k: v.tobytes() for k, v in parts.memory().items()} == {k: v.tobytes() for k, v in online.memory().items()}
    assert parts.settings == online.settings


def test_what_comes_later_never_changes_an_answer(make_windows: Maker) -> None:
    windows = _noisy(make_windows, 60, 4, seed=5)
    future = windows.start_us >= np.quantile(windows.start_us, 0.6)
    usage = np.where(future[:, None], windows.usage * 9, windows.usage)
    before = _hold(_online(0.1), windows)["medium"][~future]
    after = _hold(_online(0.1), replace(windows, usage=usage))["medium"][~future]
    assert before.tobytes() == after.tobytes()


def test_a_repeated_or_late_window_counts_once(make_windows: Maker) -> None:
    windows = _noisy(make_windows, 50, 1, seed=6)
    once, twice = _online(0.1), _online(0.1)
    whole = _hold(once, windows)["baseline"]
    rows = np.arange(len(windows))
    first = _hold(twice, windows.take(rows[:30]))["baseline"]
    late = windows.take(rows[10:20])
    _hold(twice, replace(late, usage=late.usage * 50))
    rest = _hold(twice, windows.take(rows[30:]))["baseline"]
    assert np.concatenate([first, rest]).tobytes() == whole.tobytes()


def test_a_slot_that_is_under_way_or_over_moves_nothing_when_it_is_reached_again(make_windows: Maker) -> None:
    windows = _noisy(make_windows, 40, 3, seed=6)
    online, last_us = _online(0.1, 3_600), int(windows.end_us.max())
    _hold(online, windows)
    before = {name: array.copy() for name, array in online.memory().items()}
    for slots in (0, 1, 12):  # within the horizon, whose answers still wait
        online.reach(last_us - slots * 300_000_000)
        assert {k: v.tobytes() for k, v in online.memory().items()} == {k: v.tobytes() for k, v in before.items()}


def test_tiers_spend_their_own_budgets(make_windows: Maker) -> None:
    calm, wild = _noisy(make_windows, 300, 1, seed=7), _noisy(make_windows, 300, 1, seed=8)
    calm.tier[:] = 0
    wild.tier[:] = 1
    wild.usage[:] *= np.random.default_rng(9).choice([0.2, 3.0], (300, 1))
    alone = _online(0.05)
    _hold(alone, calm)
    both = _online(0.05)
    for row in range(300):
        for number, windows in enumerate((calm, wild)):
            one = windows.take(np.array([row]))
            both.hold(np.array([number]), _flat(one), one)
    assert both.log[:, 1].tolist() == alone.log[:, 1].tolist()
    assert (both.log[:, 2, 1] > both.log[:, 1, 1]).all()  # memory


def test_baseline_and_aggressive_keep_a_budget_each_and_medium_lies_between(make_windows: Maker) -> None:
    windows = _noisy(make_windows, 1_500, 12, seed=3)
    online = OnlineMargins(MIDDLE, Budgets(0.01, 0.1), 300)
    held = _hold(online, windows, _ladders(windows))
    ahead = np.roll(windows.usage, -1, axis=0)
    ahead[windows.task_starts()[1:] - 1] = 0.0
    rates = [float((ahead[:, 3] > held[name][:, 1] * (1 + 1e-6)).mean()) for name in MARGIN_NAMES]
    assert rates[0] == pytest.approx(0.01, rel=0.25)
    assert rates[2] == pytest.approx(0.1, rel=0.25)
    value = {name: _of_prod(online, name)[1] for name in MARGIN_NAMES}
    assert value["medium"] == pytest.approx(np.sqrt(value["baseline"] * value["aggressive"]))


def test_a_price_stays_within_its_bounds(make_windows: Maker) -> None:
    quiet = _noisy(make_windows, 3_000, 4, seed=12)
    quiet.usage[:] *= 0.01
    wild = replace(quiet, usage=np.random.default_rng(1).choice([1e-4, 0.999], quiet.usage.shape))
    start = three_of(*(Price(name, (value, value)) for name, value in (("baseline", 64.0), ("aggressive", 1.0))))
    low, high = (_online(0.01, 300, start) for _ in range(2))
    _hold(low, quiet, _ladders(quiet))
    _hold(high, wild, _ladders(wild))
    assert _of_prod(low, "baseline")[1] == pytest.approx(64 / 64)  # above the least of the ladder
    assert _of_prod(high, "baseline")[1] == pytest.approx(price_of(np.array(float(TOP_RUNG))), rel=0.1)
    least, most = start["baseline"].bounds[:, PROD]
    for online in (low, high):  # nor does the logarithm go further, from where it would have to come back
        assert (least <= online.log[0, PROD]).all()
        assert (online.log[0, PROD] <= most).all()


def test_a_long_horizon_is_followed_as_slowly_as_its_outcomes_come() -> None:
    assert _online(0.01, 3_600, MIDDLE).rate == 4.0
    assert _online(0.01, 86_400, MIDDLE).rate == 1.5


def test_a_violation_counts_when_it_comes_and_an_answer_when_its_horizon_is_over(make_windows: Maker) -> None:
    # 0.15 is reserved at the first window for a day, and the third demands a CPU of 0.2; the next answer is waited for
    # two hours later
    windows = make_windows([0.1, 0.1, 0.2], [0.1] * 3, start_us=86_400_000_000)
    online = _online(0.25, 86_400)
    _hold(online, windows)
    assert (online.log == 0.0).all()  # nothing counts in the slot that it comes in
    online.reach(int(windows.end_us[-1]) + 300_000_000)
    # one answer was met in the two slots since the first window's: 144 a day, of which 36 may be violated
    rate = 0.5 * np.sqrt(36 / ENOUGH)
    assert online.log[:, PROD] == pytest.approx(np.array([[rate / 36, 0.0]] * 2), rel=0.01)
    assert np.isnan(online.violated[:, PROD]).all()  # no horizon is over
    online.reach(int(windows.end_us[0]) + 86_700_000_000)
    assert (online.log[:, PROD, 1] < 0.0).all()
    assert online.violated[:, PROD].tolist() == [[1.0, 0.0]] * 2


def test_a_violation_whose_window_comes_late_counts_in_the_slot_after_the_one_under_way(make_windows: Maker) -> None:
    windows = make_windows([0.1, 0.2], [0.1] * 2, start_us=86_400_000_000)
    online, late = _online(0.25, 86_400), windows.take(np.array([1]))
    _hold(online, windows.take(np.array([0])))
    for slots in (3, 4):
        online.reach(int(windows.end_us[1]) + slots * 300_000_000)
        assert (online.log[:, PROD, 0] > 0.0).all() == (slots == 4)
        online.wait(late.task_numbers(), np.full((1, 2, 2), np.nan), late)


@pytest.mark.parametrize("horizon_s", [300, 4_000, 86_400])
def test_every_violation_counts_once_and_so_does_its_answer_however_windows_lie_and_the_clock_jumps(
    make_windows: Maker, monkeypatch: pytest.MonkeyPatch, horizon_s: int
) -> None:
    counted = np.zeros(3)

    def count(violated: np.ndarray, answers: np.ndarray, *others: Any) -> np.ndarray:
        counted[:] += *violated.sum(axis=(1, 2)), answers.sum()
        return risen(violated, answers, *others)

    monkeypatch.setattr("reclaim.training.margins.online.risen", count)
    # 0.15 is reserved, or what the last window demanded; windows end at any time, and after some there is a gap
    rng, n = np.random.default_rng(horizon_s), 60
    windows = _tasks(make_windows, *(rng.choice([0.1, 0.2, 0.3], (n, 2)) for _ in range(5)))
    gaps = np.where(rng.random(n) < 0.1, rng.integers(1, 2 * horizon_s, n), 0) * 1_000_000
    later = np.tile(np.cumsum(gaps), 5) + np.repeat(rng.integers(0, 300_000_000, 5), n) + 86_400_000_000
    windows = replace(windows, start_us=windows.start_us + later, end_us=windows.end_us + later)
    slot, order, online = windows.task_numbers(), np.argsort(windows.end_us, kind="stable"), _online(0.1, horizon_s)
    held = np.empty((len(order), 2))
    for rows in np.array_split(order, 20):
        fresh = _online(0.1, horizon_s)
        fresh.recall(online.memory())
        held[rows] = fresh.hold(slot[rows], _flat(windows.take(rows)), windows.take(rows))["baseline"]
        online = fresh
    online.reach(int(windows.end_us.max()) + 3 * horizon_s * 1_000_000 + 1_200_000_000)
    came, violated, taken_us = 0, 0, -1
    for k in range(len(order)):  # each answer that is waited for, with the windows of its task behind it
        taken_us = taken_us if k % n else -(10**15)
        if windows.end_us[k] - taken_us < horizon_s * 1_000_000 // 12:
            continue
        taken_us = windows.end_us[k]
        behind = np.arange(k + 1, (k // n + 1) * n)
        behind = behind[windows.start_us[behind] < windows.end_us[k] + horizon_s * 1_000_000]
        came += 2 * (len(behind) > 0)
        violated += int(violates(demand(windows.take(behind)), np.float32(held[k])).any(axis=0).sum())
    assert violated > 0
    assert counted.tolist() == [violated, violated, came]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="baseline and aggressive must satisfy"):
        _online(1.0)
    with pytest.raises(ConfigError, match="rate must be above 0"):
        _online(rate=0.0)


def test_an_answer_of_which_nothing_is_known_is_not_counted(make_windows: Maker) -> None:
    known, unknown = (_noisy(make_windows, 200, 3, seed=11) for _ in range(2))
    both = concatenate([known, replace(unknown, collection_id=unknown.collection_id + 9)])
    both.usage[len(known) :, 2:4] = np.nan  # memory of the second half
    alone, beside = _online(0.05), _online(0.05)
    _hold(alone, known)
    _hold(beside, both)
    assert (beside.log[:, PROD, 1] == alone.log[:, PROD, 1]).all()
    assert (beside.log[:, PROD, 0] != alone.log[:, PROD, 0]).all()  # of twice as many


def test_only_an_answer_below_a_limit_is_waited_for_and_from_the_slot_that_begins_after_it(make_windows: Maker) -> None:
    for reserved, limit in ((np.nan, 1.0), (0.15, 0.0), (0.15, np.nan)):  # of memory
        windows = make_windows([0.1] * 2, [0.1] * 2, start_us=86_400_000_000 + 150_000_000)
        windows.limit[:, 1] = limit
        held = np.full((2, 2, 2), 0.15)
        held[..., 1] = reserved
        online = _online()
        online.wait(np.zeros(2, np.int64), held, windows)
        answered = online.memory()["answered"]
        assert answered.sum(axis=(0, 1)).tolist() == [1, 0]
        assert answered[290 % len(answered)].sum() == 1  # the first window ends in the middle of slot 289


def test_a_demand_above_the_limit_violates_no_answer_that_is_the_limit(make_windows: Maker) -> None:
    windows, online = make_windows([0.1, 1.5], [0.1, 1.5]), _online()
    held = np.full((2, 2, 2), 1.0)
    held[:, 1, 1] = 0.9  # but for memory under the aggressive margin
    online.wait(np.zeros(2, np.int64), held, windows)
    assert online.memory()["answered"].sum(axis=(0, 1)).tolist() == [1, 1]
    assert online.memory()["violated"].sum(axis=(0, 2)).tolist() == [[0, 0], [0, 1]]


def test_an_outcome_is_of_the_tier_that_the_task_had_when_it_was_answered(make_windows: Maker) -> None:
    windows, online = make_windows([0.1, 0.2], [0.1, 0.2]), _online()
    windows.tier[1] = 0
    online.wait(np.zeros(2, np.int64), np.full((2, 2, 2), 0.15), windows)
    for name in ("answered", "violated", "arrived"):
        counted = online.memory()[name].sum(axis=-1)
        assert counted[..., PROD].sum() == counted.sum() > 0


def test_the_last_window_of_a_task_counts_once_whatever_is_said_of_it_again(make_windows: Maker) -> None:
    windows, online = make_windows([0.1, 0.1], [0.1, 0.1]), _online(horizon_s=3_600)
    _hold(online, windows)
    last = windows.take(np.array([1]))
    before = {name: array.copy() for name, array in online.memory().items()}
    online.wait(np.zeros(1, np.int64), np.full((1, 2, 2), 0.15), replace(last, usage=last.usage * 9))
    assert {k: v.tobytes() for k, v in online.memory().items()} == {k: v.tobytes() for k, v in before.items()}


def test_tasks_that_end_within_the_horizon_count_too(make_windows: Maker) -> None:
    # tasks of ten windows, one after another, that always double their demand at the end
    short = [make_windows([0.1] * 9 + [0.9], task=k, start_us=600_000_000 + k * 3_000_000_000) for k in range(60)]
    windows = concatenate(short)
    kept, freed = _online(0.01, 3_600), _online(0.01, 3_600)
    _hold(kept, windows)
    assert (kept.log[:, PROD] > 1.0).all()
    for part in short:  # all in one slot, which is freed when a task has ended
        freed.hold(np.zeros(len(part), np.int64), _flat(part), part)
        assert len(part) <= PENDING
        freed.forget(np.zeros(1, np.int64))
    assert (freed.log == kept.log).all()


def test_threads_make_no_difference(make_windows: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 4)
    windows = _noisy(make_windows, 60, 9, seed=2)
    slot, order = windows.task_numbers(), np.argsort(windows.end_us, kind="stable")
    one, three = _online(0.1), _online(0.1)
    three.threads = 3
    for online in (one, three):
        for rows in np.split(order, len(order) // 9):
            online.hold(slot[rows], _flat(windows.take(rows)), windows.take(rows))
    assert {k: v.tobytes() for k, v in one.memory().items()} == {k: v.tobytes() for k, v in three.memory().items()}
