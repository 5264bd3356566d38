"""The own price is the one at which the curves themselves expect the budget, solved from whole numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reclaim.data.windows import Windows, empty_windows
from reclaim.features.groups import TIER_LABELS, tier_key
from reclaim.training.margins.answers import Priced
from reclaim.training.margins.ladder import N_RUNGS, ladder_of, price_of, rung_of
from reclaim.training.margins.margin import Budgets
from reclaim.training.margins.online import BUDGETED, OnlineMargins
from reclaim.training.margins.own_price import (
    UNIT,
    UNKNOWN,
    add_risk,
    mean_risk,
    risk_at,
    risk_of,
    rungs_within,
    share_at,
)
from reclaim.training.margins.price import Price, three_prices

DAY_US = 86_400_000_000
SLOT_US = 300_000_000
TIER = int(tier_key(np.array([3]))[0])
THRESHOLDS = np.array([0.25, 0.3, 0.4, 0.6], np.float32)
SURVIVAL = np.array([0.3, 0.1, 0.03, 0.008], np.float32)
BEGIN = three_prices(Price("baseline", (500.0, 500.0)), Price("aggressive", (3.0, 3.0)))


def _curves(n: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.tile(of, (n, 2, 1)) for of in (SURVIVAL, THRESHOLDS))  # type: ignore[return-value]


def test_the_risk_of_a_rung_is_that_of_what_it_reserves() -> None:
    # by hand, as in docs/how-it-works.md: at price 1 the task reserves 0.3, exceeded with 0.1; at 10 0.6, with 0.008;
    # at the last rung the limit, which nothing violates
    survival, thresholds = _curves()
    ladder = ladder_of(survival, thresholds, np.ones((1, 2)))
    risk = risk_of(ladder, survival, thresholds, np.array([[0.25, np.nan]])) / UNIT
    price = price_of(np.arange(float(N_RUNGS)))
    for at, expected in ((1.0, 0.1), (16.0, 0.008)):
        assert risk[0, :, np.flatnonzero(price == at)[0]] == pytest.approx(expected, abs=1e-5)
    assert risk[0, :, -1].tolist() == [0, 0]
    assert (np.diff(risk, axis=-1) <= 0).all()


def test_a_guard_that_lifts_a_reservation_lowers_its_risk() -> None:
    # 0.35 is used now: half way from 0.3 to 0.4, so S lies half way from 0.1 to 0.03
    survival, thresholds = _curves()
    ladder = ladder_of(survival, thresholds, np.ones((1, 2)))
    risk = risk_of(ladder, survival, thresholds, np.array([[0.35, 1.2]])) / UNIT
    assert risk[0, 0, 0] == pytest.approx(0.065, abs=1e-5)
    assert risk[0, 1].tolist() == [0] * N_RUNGS  # nothing within the limit helps, and nothing is violated


def test_the_place_is_where_the_mean_risk_is_the_budget() -> None:
    # two answers of risk 0.2 up to rung 9 and 0.1 from rung 10 on, and 0 at the last
    risk = np.full((2, 2, N_RUNGS), round(0.2 * UNIT), np.uint16)
    risk[:, :, 10:] = round(0.1 * UNIT)
    risk[:, :, -1] = 0
    expected, answered = np.zeros((1, 2, N_RUNGS), np.int64), np.zeros((1, 2), np.int64)
    add_risk(risk, np.array([0, 1, -1]), np.zeros(3, np.int64), expected, answered)
    assert answered.tolist() == [[2, 2]]  # the third row had no answer
    assert rungs_within(expected, answered, 0.15)[0] == pytest.approx([9.5, 9.5], abs=1e-3)
    assert rungs_within(expected, answered, 0.3)[0].tolist() == [0, 0]
    assert rungs_within(expected, answered, 0.01)[0] == pytest.approx([N_RUNGS - 1.1] * 2, abs=1e-3)
    assert np.isnan(rungs_within(expected * 0, answered * 0, 0.1)).all()
    # where the mean risk is the budget over many rungs, it is the first one
    assert rungs_within(expected, answered, int(risk[0, 0, 10]) / UNIT)[0].tolist() == [10, 10]


def test_the_mean_risk_between_two_rungs_is_straight_and_that_of_no_answers_0() -> None:
    expected = np.zeros((2, N_RUNGS))
    expected[0, :3] = 4 * UNIT * np.array([0.9, 0.5, 0.4])
    mean = mean_risk(expected, np.array([4.0, 0.0]))
    for place, risk in ((0.0, 0.9), (0.25, 0.8), (0.75, 0.6), (1.5, 0.45), (2.75, 0.1), (N_RUNGS - 1.0, 0.0)):
        assert risk_at(mean, np.full(2, place)) == pytest.approx([risk, 0.0])


def test_answers_without_a_forecast_do_not_count() -> None:
    survival, thresholds = _curves()
    survival[0, 1] = np.nan
    ladder = ladder_of(survival, thresholds, np.ones((1, 2)))
    risk = risk_of(ladder, survival, thresholds, np.full((1, 2), 0.25))
    assert (risk[0, 1] == UNKNOWN).all()
    expected, answered = np.zeros((1, 2, N_RUNGS), np.int64), np.zeros((1, 2), np.int64)
    add_risk(risk, np.zeros(1, np.int64), np.zeros(1, np.int64), expected, answered)
    assert answered.tolist() == [[1, 0]]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(1e-4, 0.5))
def test_the_order_of_answers_makes_no_difference(risks: list[float], budget: float) -> None:
    falling = np.linspace(1, 0, N_RUNGS)
    risk = (np.array(risks)[:, None, None] * falling * UNIT).astype(np.uint16).repeat(2, axis=1)
    found = []
    for order in (np.arange(len(risks)), np.random.default_rng(1).permutation(len(risks))):
        expected, answered = np.zeros((1, 2, N_RUNGS), np.int64), np.zeros((1, 2), np.int64)
        add_risk(risk, order, np.zeros(len(order), np.int64), expected, answered)
        found.append(rungs_within(expected, answered, budget).tobytes())
    assert found[0] == found[1]


def test_a_third_of_the_budget_is_spent_on_the_first_day_and_half_to_the_fourth() -> None:
    nothing = np.zeros(())
    shares = [float(share_at(int(days * DAY_US), 0.01, nothing, nothing)) for days in (0, 0.99, 1, 3.99, 4, 400)]
    assert shares == pytest.approx([1 / 3, 1 / 3, 0.5, 0.5, 1, 1])


def test_of_small_budgets_less_is_spent_on_the_first_day() -> None:
    nothing = np.zeros(())
    of_first_day = [float(share_at(0, budget, nothing, nothing)) for budget in (0.1, 0.01, 0.0025, 0.001, 0.0001)]
    assert of_first_day == pytest.approx([1 / 3, 1 / 3, 1 / 6, 0.1054, 1 / 30], abs=1e-4)
    assert float(share_at(DAY_US, 0.001, nothing, nothing)) == 0.5


def test_outcomes_raise_the_share_where_curves_are_too_careful_and_never_lower_it() -> None:
    promised, came = np.array([0.0, 20, 80, 80, 80, 1e6]), np.array([0.0, 0, 0, 80, 1e4, 0])
    # twenty violations in doubt, of which a third of the budget says that sixty come: (20 + 20) / 60, (80 + 20) / 60
    # and (80 + 20) / (80 + 60); many more that came change nothing, and none at all do not raise it beyond eight
    assert share_at(0, 0.01, promised, came) == pytest.approx([1 / 3, 2 / 3, 5 / 3, 5 / 7, 1 / 3, 8])
    assert share_at(5 * DAY_US, 0.01, promised, came) == pytest.approx([1, 2, 5, 1, 1, 8])


def test_a_day_without_the_violations_that_curves_expect_raises_the_share_and_the_second_day_teaches_nothing() -> None:
    ran = {hours: _held(own=True, hours=hours) for hours in (1, 3, 12, 24, 30)}
    begin = {hours: _price_of(of) for hours, of in ran.items()}
    assert begin[1] > begin[3] > begin[12] > begin[24]  # 0.1 is used, far below what the curve says
    promised, came = (
        np.array([of._cells[name][1, TIER] for of in ran.values()]) for name in ("promised", "violations")
    )
    assert (came == 0).all()
    assert (np.diff(promised, axis=0)[:-1] > 0).all()
    assert (promised[-1] == promised[-2]).all()


def test_what_was_promised_is_the_risk_at_the_price_that_held() -> None:
    # two hours: the answers to the first eleven windows are known. The first had the price that is given, at which 0.03
    # is expected; a third of 0.3 was expected of each of the others
    promised = _held(own=True, hours=2)._cells["promised"][1, TIER]
    assert promised == pytest.approx([0.03 + 10 * 0.1] * 2, abs=1e-3)


def test_what_was_promised_of_windows_that_end_between_slots_and_an_hour_apart_is_known() -> None:
    promised = _held(own=True, hours=1, every_us=12 * SLOT_US, from_us=SLOT_US // 3)._cells["promised"][1, TIER]
    # the answers of ten windows are known, the first at the price that is given, the others at a third of 0.3 or, as
    # nothing is violated, more
    assert (promised > 0.03 + 9 * 0.1 - 1e-3).all()
    assert (promised < 10 * 0.3).all()


def test_a_price_that_was_given_does_not_begin_at_the_models_own() -> None:
    price = _held(own=True, hours=1, given=(True, False)).begin["aggressive"]
    assert isinstance(price, Price)
    cpu, memory = price.of_tiers[TIER]
    assert cpu == 3.0
    assert memory == _price_of(_held(own=True, hours=1)) != 3.0


def test_a_cell_that_began_before_the_clock_of_its_trace_is_as_old_as_that() -> None:
    young, old = (_held(own=True, hours=1, since_us=since_us) for since_us in (0, -30 * DAY_US))
    assert _price_of(young) > _price_of(old) == price_of(old.own_rungs[1, TIER])[0]


def test_a_cell_of_which_it_is_known_later_when_it_began_is_from_then_on_as_old_as_that() -> None:
    young, old = (_held(own=True, hours=1) for _ in range(2))
    old.begin_cell(-30 * DAY_US)
    for online in (young, old):
        online.reach(24 * SLOT_US)
    assert _price_of(young) > _price_of(old) == price_of(old.own_rungs[1, TIER])[0]


def test_the_own_price_is_of_the_answers_of_a_tier_and_of_all_before_its_first_and_stays_while_none_comes() -> None:
    other = int(tier_key(np.array([1]))[0])
    windows = _slots([1, 1, 13], [3, 1, 1])
    risk = np.zeros((3, 2, N_RUNGS), np.uint16)
    risk[0, :, :20] = risk[1, :, :40] = risk[2, :, :30] = round(0.48 * UNIT)
    online = OnlineMargins(BEGIN, Budgets(0.024, 0.3), own=True)
    online.hold(np.array([0, 1, 1]), Priced(np.ones((3, 2, N_RUNGS), np.float32), None, risk), windows)
    # 0.3 lies 0.18 / 0.48 of the way from rung 19 to 20, and from 39 to 40; of both 0.48 are left to rung 19, then 0.24
    places = online.own_rungs[1, :, 0]
    assert places[[TIER, other]] == pytest.approx([19.375, 39.375], abs=1e-3)
    assert np.delete(places, [TIER, other]) == pytest.approx(19.75, abs=1e-3)
    online.reach(24 * SLOT_US)  # an hour later, of answers of the other tier: 23 / 24 of the old one to rung 39
    after = online.own_rungs[1, :, 0]
    assert after[other] == pytest.approx(29 + (0.48 - 0.3) / (0.48 - 0.48 * 23 / 47), abs=1e-3)
    assert after[TIER] == pytest.approx(places[TIER], abs=1e-6)
    # of all, 23 / 24 of two and one: rungs 20 to 29 are left at 0.48 to the new and an old one, then to the old one
    assert np.delete(after, [TIER, other]) == pytest.approx(29 + (0.48 * 47 / 70 - 0.3) / (0.48 * 24 / 70), abs=1e-3)


def test_in_the_first_hour_the_own_price_is_solved_again_at_every_slot() -> None:
    risk = np.zeros((3, 2, N_RUNGS), np.uint16)
    risk[0, :, :20] = risk[1, :, :40] = round(0.48 * UNIT)
    online = OnlineMargins(BEGIN, Budgets(0.024, 0.3), own=True)
    windows = _slots([1, 2, 3], [3, 3, 3])
    online.hold(np.zeros(3, np.int64), Priced(np.ones((3, 2, N_RUNGS), np.float32), None, risk), windows)
    # of the first answer alone it was 19.375; of both 0.48 are left to rung 19, then 0.24
    assert online.own_rungs[1, TIER, 0] == pytest.approx(19.75, abs=1e-3)


def test_the_own_price_rests_on_no_answer_of_the_slot_under_way() -> None:
    risk = np.zeros((1, 2, N_RUNGS), np.uint16)
    risk[0, :, :20] = round(0.48 * UNIT)
    online = OnlineMargins(BEGIN, Budgets(0.024, 0.3), own=True)
    online.hold(np.zeros(1, np.int64), Priced(np.ones((1, 2, N_RUNGS), np.float32), None, risk), _slots([1], [3]))
    online.reach(SLOT_US + SLOT_US // 2)
    assert np.isnan(online.own_rungs).all()
    online.reach(2 * SLOT_US)
    assert online.own_rungs[1, TIER, 0] == pytest.approx(19.375, abs=1e-3)


def test_what_was_promised_of_an_answer_between_slots_stays_while_other_tiers_answer() -> None:
    # the answer in slot 1 counts in slot 2, in which the tier gives none; the next one comes within its horizon
    at = [1, 13, *range(1, 17)]
    windows = _slots(at, [3] * 2 + [1] * 16, from_us=SLOT_US // 3)
    survival, thresholds = _curves(len(at))
    ladder = ladder_of(survival, thresholds, np.ones((len(at), 2)))
    risk = risk_of(ladder, survival, thresholds, np.full((len(at), 2), 0.25))
    online = OnlineMargins(BEGIN, Budgets(0.024, 0.3), own=True)
    online.hold(np.array([0] * 2 + [1] * 16), Priced(ladder, None, risk), windows)
    assert online._cells["promised"][1, TIER] == pytest.approx([0.03, 0.03], abs=1e-3)  # at the price that is given


def test_outcomes_teach_the_budget_and_the_tier_that_they_are_of() -> None:
    windows, falling = _slots([1, 1], [3, 1]), np.linspace(1, 0, N_RUNGS)
    risk = np.broadcast_to((falling * UNIT).round().astype(np.uint16), (2, 2, N_RUNGS))
    online = OnlineMargins(BEGIN, Budgets(0.024, 0.3), own=True)
    online.hold(np.arange(2), Priced(np.ones((2, 2, N_RUNGS), np.float32), None, risk), windows)
    online._cells["promised"][1, TIER] = 80.0
    online.reach(2 * SLOT_US)
    # none of 80 violations came: (80 + 20) / 60 of 0.3 may be spent, so a half; else a third
    price = {name: [float(rung_of(np.array(p[0]))) for p in _tiers_of(online, name)] for name in BUDGETED}
    assert price["aggressive"][TIER] == pytest.approx(60 * (1 - 0.5), abs=0.01)
    assert price["aggressive"][int(tier_key(np.array([1]))[0])] == pytest.approx(60 * (1 - 0.1), abs=0.01)
    assert price["baseline"] == pytest.approx([60 * (1 - 0.008)] * len(TIER_LABELS), abs=0.01)


def _slots(at: list[int], tier: list[int], from_us: int = 0) -> Windows:
    """Return windows that end with slots of the clock, or a little later."""
    windows = empty_windows(len(at))
    windows.end_us[:] = from_us + SLOT_US * np.array(at)
    windows.start_us[:] = windows.end_us - SLOT_US
    windows.limit[:] = 1.0
    windows.usage[:] = 0.1
    windows.tier[:] = tier
    return windows


def _tiers_of(online: OnlineMargins, name: str) -> tuple[tuple[float, ...], ...]:
    price = online.begin[name]
    assert isinstance(price, Price)
    return price.of_tiers


def _price_of(online: OnlineMargins) -> float:
    price = online.begin["aggressive"]
    assert isinstance(price, Price)
    return price.of_tiers[TIER][0]


def _held(
    own: bool,
    hours: int,
    since_us: int | None = None,
    every_us: int = SLOT_US,
    from_us: int = 0,
    given: tuple[bool, bool] = (False, False),
) -> OnlineMargins:
    """Return what one task of the curve above comes to, which never changes."""
    n = hours * 12
    windows = empty_windows(n)
    windows.end_us[:] = from_us + every_us * (1 + np.arange(n))
    windows.start_us[:] = windows.end_us - SLOT_US
    windows.limit[:] = 1.0
    windows.usage[:] = 0.1
    windows.tier[:] = 3
    survival, thresholds = _curves(n)
    ladder = ladder_of(survival, thresholds, np.ones((n, 2)))
    risk = risk_of(ladder, survival, thresholds, np.full((n, 2), 0.25))
    begin = three_prices(Price("baseline", (500.0, 500.0), given=given), Price("aggressive", (3.0, 3.0), given=given))
    online = OnlineMargins(begin, Budgets(0.024, 0.3), own=own, since_us=since_us)
    online.hold(np.zeros(n, np.int64), Priced(ladder, None, risk), windows)
    return online


def test_prices_begin_where_the_curves_expect_a_third_of_the_budget_and_none_looks_ahead() -> None:
    own, fixed = _held(own=True, hours=1), _held(own=False, hours=1)
    # a third of 0.024 is S(0.6) and a third of 0.3 is S(0.3): the least prices at which those are reserved
    begin = {name: own.begin[name] for name in BUDGETED}
    assert begin["baseline"].by_tier != fixed.begin["baseline"].by_tier
    of_tiers = begin["aggressive"].by_tier
    assert of_tiers is not None
    assert len(set(of_tiers)) == 1  # tiers without an answer have the price of all
    assert len(of_tiers) == len(TIER_LABELS)
    assert 0.25 <= of_tiers[0][0] <= 1.0
    assert fixed.own_rungs.shape == own.own_rungs.shape
    assert np.array_equal(fixed.own_rungs, own.own_rungs)  # those of the whole budget are known of any model
    assert (price_of(own.own_rungs[1]) <= np.array(of_tiers)).all()


@pytest.mark.parametrize("gap_hours", [0, 5])
def test_the_own_price_is_of_the_answers_of_a_day_of_which_each_hour_weighs_a_little_less_than_the_next(
    gap_hours: int,
) -> None:
    n = 25  # an hour, another one, and the first slot of the third
    windows = empty_windows(n)
    windows.end_us[:] = SLOT_US * (1 + np.arange(n))
    windows.end_us[11:] += gap_hours * 12 * SLOT_US  # the second hour, and what follows
    windows.start_us[:] = windows.end_us - SLOT_US
    windows.limit[:] = 1.0
    windows.usage[:] = 0.1
    windows.tier[:] = 3
    risk = np.zeros((n, 2, N_RUNGS), np.uint16)
    risk[windows.end_us < 12 * SLOT_US, :, :20] = round(0.48 * UNIT)  # the first hour of the clock ends at slot 12
    risk[windows.end_us >= 12 * SLOT_US, :, :40] = round(0.24 * UNIT)
    online = OnlineMargins(BEGIN, Budgets(0.024, 0.3), own=True)
    online.hold(np.zeros(n, np.int64), Priced(np.ones((n, 2, N_RUNGS), np.float32), None, risk), windows)
    # eleven answers of the first hour at 23 / 24 for each hour since, twelve of the second: without a gap below rung 20
    # the mean risk is (11 * 23 / 24 * 0.48 + 12 * 0.24) / (11 * 23 / 24 + 12), from there to rung 40 without the first
    weight = 11 * (23 / 24) ** (1 + gap_hours)
    low, high = (weight * 0.48 + 12 * 0.24) / (weight + 12), 12 * 0.24 / (weight + 12)
    place = 19 + (low - 0.3) / (low - high)
    assert online.own_rungs[1, tier_key(windows.tier)[0]] == pytest.approx([place, place], abs=1e-3)


def test_hours_in_which_no_answer_is_given_weigh_as_much_less_whether_windows_come_in_them_or_not() -> None:
    risk = np.zeros((2, 2, N_RUNGS), np.uint16)
    risk[0, :, :20] = risk[1, :, :40] = round(0.48 * UNIT)
    for between in ((), (13, 30, 60)):  # an answer in the first hour and one in the sixth, and windows without any
        online = OnlineMargins(BEGIN, Budgets(0.024, 0.3), own=True)
        for slot, row in sorted([(1, 0), *((slot, -1) for slot in between), (61, 1)]):
            online.reach(slot * SLOT_US)
            online.wait(np.zeros(1, np.int64), np.ones((1, 2, 2)), _slots([slot], [3]), (risk, np.array([row])))
        online.reach(72 * SLOT_US)
        assert online.memory()["priced_before"][TIER] == pytest.approx([(23 / 24) ** 6 + 23 / 24] * 2)


def test_of_windows_that_end_within_a_slot_the_first_one_does_not_decide_how_old_the_cell_is() -> None:
    # the cell is a day old between the ends of two windows of the slot
    windows = _slots([288, 288, 289, 289], [3] * 4)
    windows.end_us[1::2] += SLOT_US // 2
    risk = np.broadcast_to((np.linspace(1, 0, N_RUNGS) * UNIT).round().astype(np.uint16), (4, 2, N_RUNGS))
    begins = []
    for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
        online = OnlineMargins(BEGIN, Budgets(0.024, 0.3), own=True, since_us=SLOT_US // 4 + SLOT_US)
        online.hold(
            np.arange(4) % 2, Priced(np.ones((4, 2, N_RUNGS), np.float32), None, risk), windows.take(np.array(order))
        )
        begins.append(_price_of(online))
    assert begins[0] == begins[1]
