"""Tests of margins of machines that follow: two budgets, of times and of machines at once, and their bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError
from reclaim.training.machines import following
from reclaim.training.machines.curve import EXCEEDED, MachineCurve
from reclaim.training.machines.fit import MachineRows
from reclaim.training.machines.following import (
    AT_ONCE,
    SMALLEST,
    TIMES,
    OnlineMachines,
    follow_all,
    margin_beyond,
    times_of,
)
from reclaim.training.machines.terms import N_TERMS, RATES, T_BAND, T_LIMIT
from reclaim.training.margins.violation import violates

BUDGETS = (0.001, math.sqrt(1e-5), 0.01)
SLOT_US = 300_000_000
HOUR = 12
"""Slots of an hour."""


def moving_together(days: int, seed: int = 2) -> tuple[MachineRows, NDArray[np.int64]]:
    """Return snapshots of 50 machines whose peaks have most in common, which is another each hour."""
    rng, slots = np.random.default_rng(seed), 288 * days
    common = 0.7 * rng.random(slots // HOUR).repeat(HOUR) ** 6
    peak = common[:, None] + 0.3 * rng.random((slots, 50))
    n = slots * 50
    sums = np.zeros((n, N_TERMS))
    sums[:, T_LIMIT] = 1.0
    sums[:, T_BAND:] = np.linspace(0.1, 0.3, len(RATES))
    time = np.repeat(np.arange(slots), 50) * SLOT_US
    return MachineRows(sums, peak.reshape(-1), np.arange(n) % 50, 1.0), time


def crowded(rows: MachineRows, time: NDArray[np.int64], reserved: NDArray[np.float64]) -> float:
    """Return the share of the times at which more than a tenth of the machines pass."""
    return float((np.bincount(time // SLOT_US, violates(rows.peak, reserved)) > AT_ONCE * 50).mean())


def test_machines_that_move_together_pass_together_at_no_more_than_one_time_in_a_hundred_where_that_is_held() -> None:
    rows, time = moving_together(20)
    curve = MachineCurve().with_margins(MachineCurve().score(rows.sums[:50_000], rows.peak[:50_000], 1.0))
    free, held = (follow_all(curve, rows, time, 3_600, SLOT_US, BUDGETS, at_once=share) for share in (1.0, AT_ONCE))
    assert 0.8 * 0.01 <= violates(rows.peak, free[2]).mean() <= 1.25 * 0.01
    assert crowded(rows, time, free[2]) > 1.5 * TIMES
    assert crowded(rows, time, held[2]) <= TIMES
    assert violates(rows.peak, held[2]).mean() <= 0.01
    assert (np.diff(held, axis=0) <= 0).all()  # a smaller budget never reserves less
    assert (held <= 1.0).all()


def test_machines_that_are_alone_are_not_held_any_tighter() -> None:
    rng, n = np.random.default_rng(1), 288 * 10 * 50
    rows, time = moving_together(10)
    rows = MachineRows(rows.sums, rng.random(n) ** 4, rows.machine, 1.0)
    curve = MachineCurve().with_margins(MachineCurve().score(rows.sums[:50_000], rows.peak[:50_000], 1.0))
    free, held = (follow_all(curve, rows, time, 3_600, SLOT_US, BUDGETS, at_once=share) for share in (1.0, AT_ONCE))
    np.testing.assert_array_equal(held, free)


def counted(online: OnlineMachines, slots: range, machines: int, passed: Any) -> None:
    """Let as many of the machines pass at each slot as ``passed`` says, under every margin."""
    for slot in slots:
        online.reach(slot)
        if online.is_time(slot):
            violated = np.full((len(BUDGETS), 1), passed(slot))
            online.count(slot, np.array([machines]), np.minimum(violated, machines))


def test_the_first_outcomes_move_the_margins_by_hand() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600)
    counted(online, range(14), 100, lambda slot: 3 if slot == 0 else 0)
    assert online.asked[:, 0].tolist() == list(BUDGETS)  # slot 0 is known when 14 begins: after 12, and a slot late
    assert online.reach(14)
    # a day has 288 * 100 answers: at 1 % 288 violations, at 0.1 % 28.8, and the full rate of 4 is of 640; 3 violations
    # for 1 and for 0.1
    assert online.asked[2, 0] == pytest.approx(0.01 * math.exp(-4 * math.sqrt(288 / 640) * (3 - 1) / 288))
    assert online.asked[0, 0] == pytest.approx(0.001 * math.exp(-4 * math.sqrt(28.8 / 640) * (3 - 0.1) / 28.8))
    assert online.judged.tolist() == [100]
    assert online.violated[:, 0].tolist() == [3, 3, 3]
    assert online.at_once[:, 0].tolist() == [0.03] * 3
    assert (online.lowered == 1).all()  # 3 of 100 at once are no tenth
    online.reach(15)  # of slot 1, in which none passed
    assert online.at_once[:, 0].tolist() == [0.0] * 3
    assert online.most_at_once[:, 0].tolist() == [0.03] * 3


def test_too_many_at_once_lower_what_is_asked_until_that_is_made_good_by_hand() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600)
    counted(online, range(15), 100, lambda slot: 11 if slot == 0 else 0)
    # one time of the twelve a day that count: (1 - 0.01) / 12; and a hundredth of that less at each later time
    assert online.lowered[2, 0] == pytest.approx(math.exp(-0.99 / 12))
    first = online.asked[2, 0]
    counted(online, range(15, 15 + 98), 100, lambda _: 0)
    assert online.lowered[2, 0] == pytest.approx(math.exp(-(0.99 - 0.98) / 12))
    own = 0.01 * math.exp(-4 * math.sqrt(288 / 640) * (11 - 1) / 288)  # the first budget has raised nothing meanwhile
    assert online.asked[2, 0] == pytest.approx(own * online.lowered[2, 0])
    assert online.asked[2, 0] > first
    counted(online, range(113, 130), 100, lambda _: 0)
    assert online.lowered[2, 0] == 1
    assert online.asked[2, 0] > own


def test_what_is_asked_stays_within_its_bounds() -> None:
    for passed, bound in ((100, SMALLEST), (0, 0.5)):
        online = OnlineMachines([MachineCurve()], BUDGETS, 3_600)
        counted(online, range(288 * 20), 100, lambda _, n=passed: n)
        assert online.asked[2, 0] == pytest.approx(bound)
        assert (online.asked <= 0.5).all()
        assert (online.asked >= SMALLEST * (1 - 1e-9)).all()
        assert (online.lowered[:, 0] >= SMALLEST / np.array(BUDGETS) * (1 - 1e-9)).all()  # so that it is made good
        assert np.isfinite(online.margins).all()


@pytest.mark.parametrize("horizon_s", [300, 3_600, 86_400])
def test_it_goes_on_to_the_bit_from_its_arrays(horizon_s: int) -> None:
    rng = np.random.default_rng(2)
    drawn = rng.integers(0, 30, 2_000)
    ours, theirs = (OnlineMachines([MachineCurve()], BUDGETS, horizon_s) for _ in range(2))
    counted(ours, range(1_000), 100, lambda slot: drawn[slot])
    theirs.recall(ours.memory())  # of which it makes copies
    np.testing.assert_array_equal(ours.margins, theirs.margins)
    for online in (ours, theirs):
        counted(online, range(1_000, 2_000), 100, lambda slot: drawn[slot])
    np.testing.assert_array_equal(ours.margins, theirs.margins)
    for name, array in ours.memory().items():
        np.testing.assert_array_equal(array, theirs.memory()[name], name)
    assert (ours.asked != np.array(BUDGETS)[:, None]).all()
    with pytest.raises(ConfigError, match="start afresh"):
        theirs.recall({})


def test_no_more_than_twelve_answers_of_a_machine_are_waited_for_within_a_horizon() -> None:
    assert [times_of(horizon_s, 300) for horizon_s in (300, 301, 3_600, 7_200, 86_400)] == [
        (1, 1), (2, 1), (12, 1), (24, 2), (288, 24),
    ]  # fmt: skip


def test_a_margin_beyond_the_last_probability_goes_on_as_steeply_as_the_curve_is_on_average() -> None:
    last = EXCEEDED[-1]
    bound = MachineCurve()  # whose margin is the logarithm throughout
    for probability in (0.3, last, 1e-9, SMALLEST):
        assert margin_beyond(bound, probability) == pytest.approx(-math.log(probability))
    flat = MachineCurve((2.0, *(5.0,) * (len(EXCEEDED) - 1)))  # rises from 0.5 to the next one alone
    assert margin_beyond(flat, last) == 5
    assert margin_beyond(flat, last * last / EXCEEDED[0]) == pytest.approx(5 + 3)  # as far again in the logarithm


def test_machines_are_crowded_above_a_share_of_them_and_more_than_two() -> None:
    passed, n = np.array([2, 3, 10, 11]), np.array([10, 10, 100, 100])
    assert following.crowded(passed, n, 0.1).tolist() == [False, True, False, True]


def test_what_is_asked_at_first_is_that_share_of_the_budgets() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600, begins=0.5)
    np.testing.assert_allclose(online.asked[:, 0], 0.5 * np.array(BUDGETS))
    np.testing.assert_allclose(online.margins[:, 0], -np.log(0.5 * np.array(BUDGETS)))


def test_a_day_ahead_two_hours_lie_between_answers_and_the_rate_is_a_half_by_hand() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 86_400)
    assert [slot for slot in range(100) if online.is_time(slot)] == [0, 24, 48, 72, 96]
    counted(online, range(290), 100, lambda slot: 3 if slot == 0 else 0)
    assert online.asked[:, 0].tolist() == list(BUDGETS)
    assert online.reach(290)  # a day, and a slot late
    # a day has 12 * 100 answers: at 1 % 12 violations
    assert online.asked[2, 0] == pytest.approx(0.01 * math.exp(-0.5 * math.sqrt(12 / 640) * (3 - 1) / 12))


def test_after_a_gap_of_a_day_the_outcomes_before_it_weigh_as_much_less_by_hand() -> None:
    online = OnlineMachines([MachineCurve()] * 2, BUDGETS, 3_600)

    def count(slot: int, machines: list[int], passed: list[int]) -> float:
        """Record outcomes and let them count; return the logarithm of what is asked of the first resource."""
        online.count(slot, np.array(machines), np.tile(passed, (len(BUDGETS), 1)))
        assert online.reach(slot + 14)
        return math.log(online.asked[2, 0] / online.lowered[2, 0])

    first = count(0, [1_000, 1_000], [90, 400])
    assert online.most_at_once[0].tolist() == [0.09, 0.4]
    second = count(288, [1_000, 0], [0, 0])
    left = (1 - 1 / 288) ** 288
    assert online.recent[0].tolist() == pytest.approx([90 * left / (1_000 * left + 1_000), 0.4])
    times = left + 288 * (1 - left)  # the one before, and those of the day that came to nothing
    allowed = 0.01 * (1_000 * left + 1_000) / times * 288
    assert second - first == pytest.approx(4 * math.sqrt(allowed / 640) * 10 / allowed)
    assert online.at_once[0].tolist() == [0.0, 0.0]  # of the time a day ago nothing is left
    assert online.most_at_once[0].tolist() == [0.0, 0.0]


def test_the_first_time_at_which_machines_are_judged_is_the_first_that_weighs() -> None:
    late, early = OnlineMachines([MachineCurve()], BUDGETS, 3_600), OnlineMachines([MachineCurve()], BUDGETS, 3_600)
    for slot in range(5):
        late.count(slot, np.array([0]), np.zeros((len(BUDGETS), 1), np.int64))
        late.reach(slot + 14)
    for online, slot in ((late, 5), (early, 0)):
        online.count(slot, np.array([100]), np.full((len(BUDGETS), 1), 3))
        online.reach(slot + 14)
    np.testing.assert_array_equal(late.asked, early.asked)


def test_outcomes_that_are_known_at_once_count_in_the_order_of_their_times() -> None:
    ours, theirs = (OnlineMachines([MachineCurve()], BUDGETS, 3_600) for _ in range(2))
    for slot in range(14, 18):  # the ring of 16 times begins again within them
        for online in (ours, theirs):
            online.count(slot, np.array([100]), np.full((len(BUDGETS), 1), slot))
    for slot in range(28, 40):
        ours.reach(slot)
    theirs.reach(40)
    np.testing.assert_array_equal(ours.asked, theirs.asked)
    assert theirs.at_once[:, 0].tolist() == [0.17] * len(BUDGETS)


def test_what_was_said_of_the_outcomes_stays_as_it_was() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600)
    counted(online, range(20), 100, lambda _: 5)
    said = online.judged, online.violated, online.at_once, online.margins
    before = [of.copy() for of in said]
    counted(online, range(20, 20 + 288), 100, lambda _: 7)  # a day, in which every place of a time is written again
    for was, of in zip(before, said, strict=True):
        np.testing.assert_array_equal(of, was)
    assert online.judged[0] > said[0][0]


def test_snapshots_of_any_distance_are_followed_by_the_first_budget_alone_unless_the_second_is_asked_for() -> None:
    # of 100 machines 11 pass at the first of six hours, which is known when the fourth begins
    slots, hour_us = 6, 3_600_000_000
    sums = np.zeros((slots * 100, N_TERMS))
    sums[:, T_LIMIT] = 1.0
    peak = np.zeros(slots * 100)
    peak[:11] = 1.0
    rows = MachineRows(sums, peak, np.arange(slots * 100) % 100, 1.0)
    time = np.repeat(np.arange(slots), 100) * hour_us
    one = following.follow(MachineCurve(), rows, time, 3_600, hour_us, 0.01).reshape(slots, 100)
    two = follow_all(MachineCurve(), rows, time, 3_600, hour_us, (0.01,))[0].reshape(slots, 100)
    more = -math.log(0.01) / RATES[-1]
    np.testing.assert_allclose(one[:3], more)
    # a day has 24 * 100 answers: at 1 % 24 violations
    moved = 4 * math.sqrt(24 / 640) * (11 - 1) / 24
    np.testing.assert_allclose(one[3], more + moved / RATES[-1])
    np.testing.assert_allclose(two[:3], one[:3])
    np.testing.assert_allclose(two[3], one[3] + 0.99 / 12 / RATES[-1])


def test_before_the_first_outcome_nothing_is_known_of_them() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600)
    for share in (online.recent, online.at_once, online.most_at_once):
        assert np.isnan(share).all()


def test_a_time_at_which_no_machine_is_judged_spends_nothing_and_makes_nothing_good() -> None:
    online = OnlineMachines([MachineCurve()] * 2, BUDGETS, 3_600)
    for slot in range(40):
        online.reach(slot)
        passed = np.tile([11 if slot == 0 else 0, 0], (len(BUDGETS), 1))
        online.count(slot, np.array([100 if slot == 0 else 0, 100]), passed)
    assert online.lowered[:, 0] == pytest.approx([math.exp(-0.99 / 12)] * 3)
    assert online.judged.tolist() == [100, 26 * 100]
    assert (online.lowered[:, 1] == 1).all()
    assert (online.at_once == 0).all()


def test_switched_off_it_counts_and_moves_nothing() -> None:
    online = OnlineMachines([MachineCurve()], BUDGETS, 3_600, moves=False)
    counted(online, range(100), 100, lambda _: 50)
    assert online.asked[:, 0].tolist() == list(BUDGETS)
    assert online.recent[:, 0].tolist() == pytest.approx([0.5] * 3)
    assert online.most_at_once[:, 0].tolist() == [0.5] * 3
    assert online.judged.tolist() == [8_600]  # of slots 0 to 85
