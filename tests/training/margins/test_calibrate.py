"""Margins: worked by hand, checked against a plain search, and clear about what cannot be met."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from reclaim.data.errors import ConfigError, HistoryTooShortError
from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, P90, Windows, empty_windows
from reclaim.training.estimators.base import MODEL, Estimate
from reclaim.training.estimators.fixed import LimitEstimator
from reclaim.training.margins.answers import Priced, Widened, scores_of
from reclaim.training.margins.calibrate import (
    Calibration,
    calibrate,
    choose_best,
    guarded_reservations,
    known_rows,
    merit,
    needed_reservation,
    reclaimed_share,
    violation_share,
)
from reclaim.training.margins.ladder import N_RUNGS, TOP_RUNG, price_of, rung_of
from reclaim.training.margins.margin import HIGHEST_SHARE, LOWEST_SHARE, MARGIN_NAMES, Budgets, Guarded, Margin
from reclaim.training.margins.price import Price


def _windows(n: int, limit: float = 10.0) -> Windows:
    windows = empty_windows(n)
    windows.limit[:] = limit
    windows.percentiles[:, P90] = 0.0
    windows.end_us[:] = 1
    return windows


def _estimate(reservation: NDArray[np.float64]) -> Estimate:
    return Estimate(reservation, np.full(reservation.shape, MODEL, np.uint8))


def _both(reservation: NDArray[np.float64]) -> Widened:
    """Return one bare estimate under both margins."""
    return Widened.alike(_estimate(reservation))


def _margins(found: Calibration) -> dict[str, Margin]:
    return {name: of for name, of in found.settings.items() if isinstance(of, Margin)}


def _prices(found: Calibration) -> dict[str, Price]:
    return {name: of for name, of in found.settings.items() if isinstance(of, Price)}


def test_margins_of_ten_rows_worked_by_hand() -> None:
    # limit 10, estimate 2 each; demands over the horizon 1.0, 1.2, … 2.8, so lifting all to 2.8 takes 40 %.
    # A budget of one row in ten leaves the worst out: 2.6 / 2 - 1 = 30 %; of a half, 1.8 / 2 - 1 = -10 %.
    demand = np.linspace(1.0, 2.8, 10)
    target = np.stack([demand, demand], axis=1) / 10
    budgets = Budgets(baseline=0.1, aggressive=0.5)
    found = calibrate(_both(np.full((10, 2), 2.0)), _windows(10), target, budgets)
    assert _margins(found)["baseline"].share == pytest.approx((0.3, 0.3))
    assert _margins(found)["aggressive"].share == pytest.approx((-0.1, -0.1))
    assert _margins(found)["medium"].share == pytest.approx((0.1, 0.1))
    assert found.violation["baseline"] == (0.1, 0.1)
    assert found.violation["aggressive"] == (0.5, 0.5)
    assert found.reclaimed["baseline"] == pytest.approx((0.74, 0.74))  # 1 - 2 * 1.3 / 10
    assert found.rows == (10, 10)
    assert found.notes == ()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.sampled_from([0.01, 0.05, 0.3]))
def test_a_narrower_margin_breaks_the_budget_and_this_one_keeps_it(seed: int, budget: float) -> None:
    rng = np.random.default_rng(seed)
    n = 80
    windows = _windows(n)
    windows.usage[:, MEMORY_MAX] = rng.random(n) * 10  # the jump protects some rows
    windows.limit[rng.random(n) < 0.1] = np.nan
    windows.end_us[:] = 1_000_000_000
    windows.scheduled_us[:] = np.where(rng.random(n) < 0.2, 900_000_000, 1)  # the start-up hold protects others
    base = _estimate(0.1 + rng.random((n, 2)) * 10)
    base.reservation[rng.random((n, 2)) < 0.1] = np.nan
    target = rng.random((n, 2)) * 1.2
    target[rng.random((n, 2)) < 0.1] = np.nan
    found = calibrate(Widened.alike(base), windows, target, Budgets(baseline=budget, aggressive=budget))

    def violation(share: tuple[float, ...]) -> NDArray[np.float64]:
        held = Guarded(LimitEstimator(), Margin("tried", share)).adjust(base, windows).reservation
        return violation_share(held, windows.limit, target)

    share = _margins(found)["baseline"].share
    assert (violation(share) <= budget).all()
    for r in range(2):
        if share[r] > LOWEST_SHARE:
            narrower = tuple((1 + s) * (1 - 1e-4) - 1 for s in share)
            assert violation(narrower)[r] > budget


def test_what_the_guards_prevent_is_not_paid_for() -> None:
    # memory of the row's own window is 5 already: the jump reserves 5, whatever the margin
    windows = _windows(4)
    windows.usage[:, MEMORY_MAX] = 5.0
    target = np.full((4, 2), 0.5)
    found = calibrate(_both(np.full((4, 2), 1.0)), windows, target, Budgets(0.001, 0.01))
    assert _margins(found)["baseline"].share == pytest.approx((4.0, LOWEST_SHARE))


def test_a_budget_that_no_margin_can_meet_is_noted() -> None:
    # an estimate of zero stays zero under any margin
    found = calibrate(_both(np.zeros((2000, 2))), _windows(2000), np.full((2000, 2), 0.5))
    assert _margins(found)["baseline"].share == (HIGHEST_SHARE, HIGHEST_SHARE)
    assert found.violation["baseline"] == (1.0, 1.0)
    assert any("cpu, baseline: even the highest setting violates in 100% of 2000 rows" in note for note in found.notes)


def test_a_small_share_that_no_margin_can_meet_is_shown_with_three_digits() -> None:
    # an estimate of zero stays zero under any margin: one row of 250,000 is 0.0004 %
    n = 250_000
    estimate = np.ones((n, 2))
    estimate[0] = 0.0
    found = calibrate(_both(estimate), _windows(n), np.full((n, 2), 0.5), Budgets(0.000001, 0.01))
    assert any("violates in 0.0004% of 250000 rows, above the budget of 0.0001%" in note for note in found.notes)


def test_rows_that_no_margin_can_help_are_no_note_where_the_budget_allows_as_many() -> None:
    # an estimate of zero stays zero under any margin, in one row of four
    found = calibrate(
        _both(np.array([0.0, 2.0, 2.0, 2.0])[:, None].repeat(2, axis=1)), _windows(4), np.full((4, 2), 0.5),
        Budgets(baseline=0.25, aggressive=0.25),
    )  # fmt: skip
    assert found.violation["baseline"] == (0.25, 0.25)
    assert found.notes == ()


def test_what_is_reclaimed_is_of_the_rows_that_are_judged() -> None:
    reservation, target = np.full((20, 2), 2.0), np.full((20, 2), 0.2)
    reservation[10:], target[10:] = 9.0, np.nan
    found = calibrate(_both(reservation), _windows(20), target, Budgets(baseline=0.1, aggressive=0.1))
    assert found.reclaimed["baseline"] == pytest.approx((0.8, 0.8))


def test_too_few_rows_for_the_budget_are_noted_and_none_may_violate() -> None:
    target = np.linspace(0.1, 0.4, 20)[:, None].repeat(2, axis=1)
    found = calibrate(_both(np.full((20, 2), 2.0)), _windows(20), target)
    assert _margins(found)["baseline"].share == pytest.approx((1.0, 1.0))
    assert found.violation["baseline"] == (0.0, 0.0)
    assert any("of 0.1% of 20 rows is less than one row" in note for note in found.notes)
    rare = calibrate(_both(np.full((20, 2), 2.0)), _windows(20), target, Budgets(1e-6, 0.01))
    assert "cpu, baseline: a budget of 0.0001% of 20 rows is less than one row; none may violate" in rare.notes


def test_a_target_above_the_limit_counts_as_the_limit() -> None:
    limit, target = np.full((1, 2), 10.0), np.full((1, 2), 3.0)
    assert violation_share(np.full((1, 2), 10.0), limit, target).tolist() == [0.0, 0.0]
    assert violation_share(np.full((1, 2), 9.9), limit, target).tolist() == [1.0, 1.0]


def test_shares_leave_out_what_is_unknown() -> None:
    limit = np.array([[10.0, np.nan], [10.0, 4.0], [10.0, np.nan]])
    reservation = np.array([[5.0, np.nan], [10.0, 3.0], [np.nan, 3.0]])
    assert reclaimed_share(reservation, limit).tolist() == [0.25, 0.25]
    assert np.isnan(reclaimed_share(reservation, np.full((3, 2), np.nan))).all()
    assert np.isnan(violation_share(reservation, limit, np.full((3, 2), np.nan))).all()


def test_a_row_whose_limit_is_zero_judges_no_setting() -> None:
    windows, target = _windows(3), np.full((3, 2), 0.5)
    windows.limit[0, 1] = 0.0
    assert known_rows(windows, target).tolist() == [[True, False], [True, True], [True, True]]
    assert np.isnan(needed_reservation(windows, target)).tolist() == [[False, True], [False, False], [False, False]]
    # memory: one of the two rows that are left violates
    held = np.array([[5.0, 0.0], [5.0, 5.0], [5.0, 4.0]])
    assert violation_share(held, windows.limit, target).tolist() == [0.0, 0.5]
    assert calibrate(_both(held), windows, target).rows == (3, 2)


def test_the_base_that_reclaims_most_is_chosen_for_each_resource() -> None:
    target = np.linspace(0.1, 0.4, 2000)[:, None].repeat(2, axis=1)
    low = calibrate(_both(np.full((2000, 2), 2.0)), _windows(2000), target)
    high = replace(low, reclaimed={k: (v[0] + 0.1, v[1] - 0.1) for k, v in low.reclaimed.items()})
    assert choose_best({"low": low, "high": high}, "aggressive", 0.01) == ["high", "low"]
    assert choose_best({"first": low, "second": low}, "baseline", 0.001) == ["first", "first"]


def test_a_candidate_that_loses_just_the_budget_keeps_it_and_one_that_reclaims_nothing_known_comes_last() -> None:
    assert merit(0.01, 0.3, 0.01) == (0.0, 0.3)
    assert merit(0.011, 0.3, 0.01) == (-0.011, 0.3)
    assert merit(0.0, np.nan, 0.01) == (0.0, -np.inf)


def test_as_many_rows_may_violate_as_the_budget_says_where_its_product_is_rounded_down() -> None:
    # 0.29 * 100 is 28.999999999999996
    target = np.linspace(0.01, 1.0, 100)[:, None].repeat(2, axis=1)
    found = calibrate(_both(np.full((100, 2), 1.0)), _windows(100), target, Budgets(0.29, 0.29))
    assert found.violation["baseline"] == (0.29, 0.29)


def test_under_medium_the_answers_are_lost_of_the_budget_that_loses_more() -> None:
    # one row of four has nothing reserved for the baseline, two of four for the aggressive margin
    held = [np.array(of)[:, None].repeat(2, axis=1) for of in ([0.0, 2.0, 2.0, 2.0], [0.0, 0.0, 2.0, 2.0])]
    bases = Widened({name: _estimate(of) for name, of in zip(("baseline", "aggressive"), held, strict=True)})
    found = calibrate(bases, _windows(4), np.full((4, 2), 0.5), Budgets(0.5, 0.5))
    assert found.lost == {"baseline": (0.25, 0.25), "aggressive": (0.5, 0.5), "medium": (0.5, 0.5)}


def test_a_candidate_that_no_margin_brings_within_the_budget_is_not_chosen_however_much_it_reclaims() -> None:
    target = np.full((1000, 2), 0.5)
    kept, idle = np.full((1000, 2), 4.0), np.full((1000, 2), 10.0)
    kept[:20] = 2.5  # so that all reserve eight of ten
    idle[:300] = 0.0  # three in ten used nothing so far, and need half of their limit
    made = {name: calibrate(_both(of), _windows(1000), target) for name, of in (("idle", idle), ("kept", kept))}
    assert made["idle"].reclaimed["aggressive"] == pytest.approx((0.3, 0.3))
    assert made["kept"].reclaimed["aggressive"] == pytest.approx((0.206, 0.206))
    assert choose_best(made, "aggressive", 0.01) == ["kept", "kept"]
    worse = np.full((1000, 2), 10.0)
    worse[:400] = 0.0
    made["kept"] = calibrate(_both(worse), _windows(1000), target)
    assert choose_best(made, "aggressive", 0.01) == ["idle", "idle"]  # 40 % violate for 30
    assert made["kept"].lost["aggressive"] == made["kept"].lost["medium"] == (0.4, 0.4)


def test_a_candidate_whose_small_tiers_violate_more_than_the_budget_is_chosen_by_what_it_reclaims() -> None:
    """Tiers of too few rows have the setting of all: that is no answer of nothing."""
    target, tier = np.full((20_000, 2), 0.5), np.zeros(20_000, np.int8)
    answer = np.full((20_000, 2), 8.0)
    tier[:150], answer[:150] = 1, 2.0
    windows = replace(_windows(20_000), tier=tier)
    more, less = (calibrate(_both(of), windows, target, by_tier=True) for of in (answer, np.full((20_000, 2), 9.0)))
    more = replace(more, reclaimed={k: (v[0] + 0.5, v[1] + 0.5) for k, v in more.reclaimed.items()})
    assert more.lost["aggressive"] == (0.0, 0.0)
    assert choose_best({"less": less, "more": more}, "aggressive", 1e-4) == ["more", "more"]


@pytest.mark.parametrize(("baseline", "aggressive"), [(0.0, 0.1), (0.2, 0.1), (0.1, 1.0)])
def test_budgets_out_of_order_are_refused(baseline: float, aggressive: float) -> None:
    with pytest.raises(ConfigError, match="0 < baseline <= aggressive < 1"):
        Budgets(baseline, aggressive)


def test_a_resource_the_trace_has_no_limits_of_gets_no_margin_and_a_note_and_does_not_stop_the_other() -> None:
    windows = _windows(5)
    windows.limit[:, 1] = np.nan
    target = np.full((5, 2), 0.5)
    target[:, 1] = np.nan
    estimate = _both(windows.limit * 0.25)
    made = calibrate(estimate, windows, target)
    assert _margins(made)["aggressive"].share == pytest.approx((1.0, 0.0))
    assert any(note.startswith("memory: no row has a limit") for note in made.notes)
    assert made.lost["aggressive"] == (0.0, 0.0)
    windows.limit[:] = np.nan
    with pytest.raises(
        HistoryTooShortError, match=r"cpu: 0 of 5 validation rows .*, expected at least 1; no row has a limit"
    ):
        calibrate(estimate, windows, target)


def test_no_known_row_is_an_error_that_names_the_resource_and_the_cause() -> None:
    windows = _windows(5)
    windows.usage[:, CPU_MEAN] = 1.0
    target = np.full((5, 2), 0.5)
    target[:, 1] = np.nan
    with pytest.raises(HistoryTooShortError, match=r"memory: 0 of 5 validation rows .*; no row has a usage of it"):
        known_rows(windows, target)
    windows.usage[:, MEMORY_MAX] = 1.0
    with pytest.raises(
        HistoryTooShortError, match=r"memory: 0 of 5 .*; their period or .*; set a shorter horizon_s, or in"
    ):
        known_rows(windows, target)
    with pytest.raises(HistoryTooShortError, match=r"cpu: 0 of 0 .*; the validation period has no .*a wrong time"):
        known_rows(_windows(0), target[:0])


def test_each_margin_rests_on_its_own_base_and_medium_is_half_way_between_their_reservations() -> None:
    # limit 10, every row needs 3: from a base of 4 that takes a quarter less, from a base of 2 half as much again
    target = np.full((50, 2), 0.3)
    bases = Widened({"baseline": _estimate(np.full((50, 2), 4.0)), "aggressive": _estimate(np.full((50, 2), 2.0))})
    found = calibrate(bases, _windows(50), target)
    assert _margins(found)["baseline"].share == pytest.approx((-0.25, -0.25))
    assert _margins(found)["aggressive"].share == pytest.approx((0.5, 0.5))
    wide = {name: replace(margin, share=(1.0, 0.0)) for name, margin in _margins(found).items()}
    held = guarded_reservations(bases, _windows(50), wide)
    assert held["medium"][0].tolist() == [6.0, 3.0]
    crossed = Widened({"baseline": bases.of["aggressive"], "aggressive": bases.of["baseline"]})
    held = guarded_reservations(crossed, _windows(50), wide)
    assert held["baseline"].tolist() == held["aggressive"].tolist()  # a wider margin never reserves less


def test_tiers_with_rows_enough_keep_the_budget_for_themselves_and_small_ones_together() -> None:
    # tiers 0 and 1 have 1,000 rows each and a budget of 2 %: 20 rows to spend; tiers 2 and 3 have 500, so 20 together.
    # All 3,000 rows would have the 5.0 of tier 1
    windows = _windows(3_000)
    windows.tier[:] = np.repeat([0, 1, 2, 3], [1_000, 1_000, 500, 500])
    need = np.concatenate([np.full(1_000, 0.1), np.full(1_000, 0.5), np.full(500, 0.3), np.full(500, 0.4)])
    target = np.stack([need, need], axis=1)
    target[[0, 1_000, 2_000], 0] = 0.9  # one row of three groups: within the budget, wherever it is
    found = calibrate(_both(np.full((3_000, 2), 1.0)), windows, target, Budgets(0.02, 0.02), by_tier=True)
    margin = _margins(found)["baseline"]
    assert margin.by_tier is not None
    factor = margin.factor(windows)
    assert factor[[0, 1_000, 2_000, 2_500], 0].tolist() == pytest.approx([1.0, 5.0, 4.0, 4.0])
    assert _margins(found)["medium"].by_tier == margin.by_tier


def test_small_tiers_that_have_too_few_rows_even_together_get_the_margin_of_all() -> None:
    # 2 % of the 300 rows of tiers 1 and 2 are 6; all 2,300 may spend 46, which the rows in need of 0.4 and 0.3 do
    windows = _windows(2_300)
    windows.tier[:] = np.repeat([0, 1, 2], [2_000, 100, 200])
    need = np.concatenate(
        [np.full(1_990, 0.2), np.full(10, 0.3), np.full(10, 0.4), np.full(90, 0.1), np.full(200, 0.1)]
    )
    found = calibrate(
        _both(np.full((2_300, 2), 1.0)), windows, need[:, None].repeat(2, axis=1), Budgets(0.02, 0.02), by_tier=True
    )
    factor = _margins(found)["baseline"].factor(windows)
    assert factor[[0, 2_000, 2_100], 0].tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_a_margin_for_each_tier_keeps_every_tiers_budget_where_one_for_all_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reclaim.training.margins.calibrate.TIER_ROWS", 2_000)
    rng = np.random.default_rng(0)
    windows = _windows(4_000)
    windows.tier[:] = np.repeat([0, 1], 2_000)
    spread = np.repeat([0.05, 0.5], 2_000)
    need = np.clip(0.2 * np.exp(spread * rng.normal(size=4_000)), 0.0, 1.0)
    target = np.stack([need, need], axis=1)
    for by_tier in (False, True):
        bases = _both(np.full((4_000, 2), 2.0))
        found = calibrate(bases, windows, target, Budgets(0.01, 0.01), by_tier=by_tier)
        held = guarded_reservations(bases, windows, found.settings)["baseline"]
        rates = [violation_share(held[t], windows.limit[t], target[t])[0] for t in (slice(2_000), slice(2_000, None))]
        assert (max(rates) <= 0.01) == by_tier
        told = found.violation_by_tier["baseline"]
        assert list(told) == ["free", "beb"]
        assert [told[tier][0] for tier in told] == rates


def test_the_rate_of_a_tier_of_few_rows_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reclaim.training.margins.calibrate.TIER_ROWS", 3)
    windows = _windows(7)
    windows.tier[:] = [-1, -1, -1, 1, 1, 1, 1]
    windows.limit[3:5, 1] = np.nan
    found = calibrate(_both(np.full((7, 2), 2.0)), windows, np.full((7, 2), 0.1))
    told = found.violation_by_tier["baseline"]
    assert told["unknown"] == (0.0, 0.0)
    assert told["beb"][0] == 0.0
    assert np.isnan(told["beb"][1])


def _ladders(low: NDArray[np.float64]) -> Priced:
    """Return ladders from these shares of the limit, shape (n, n_resources), evenly up to the limit."""
    steps = np.linspace(0.0, 1.0, N_RUNGS)
    return Priced((low[..., None] + (1 - low[..., None]) * steps).astype(np.float32))


def test_prices_of_ten_rows_worked_by_hand() -> None:
    # limit 10, ladders from 0 to it in even steps, so rung k of TOP_RUNG reserves 10 k / TOP_RUNG; demands 1, 2, … 10
    target = np.linspace(0.1, 1.0, 10)[:, None].repeat(2, axis=1)
    found = calibrate(_ladders(np.zeros((10, 2))), _windows(10), target, Budgets(baseline=0.1, aggressive=0.5))
    rungs = {name: rung_of(np.array(price.value)) for name, price in _prices(found).items()}
    assert rungs["baseline"] == pytest.approx([0.9 * TOP_RUNG] * 2, rel=1e-5)  # all but the one in need of 10
    assert rungs["aggressive"] == pytest.approx([0.5 * TOP_RUNG] * 2, rel=1e-5)
    assert rungs["medium"] == pytest.approx([0.7 * TOP_RUNG] * 2, rel=1e-5)
    assert found.violation["baseline"] == (0.1, 0.1)
    assert found.violation["aggressive"] == (0.5, 0.5)
    assert found.reclaimed["baseline"] == pytest.approx((0.1, 0.1), rel=1e-4)
    assert found.lost["baseline"] == (0.0, 0.0)  # the highest price reserves what the last row needs


@pytest.mark.parametrize("by_tier", [False, True])
@pytest.mark.parametrize("without", [np.nan, 0.0])
def test_a_resource_that_no_row_has_a_limit_of_gets_the_highest_price_or_the_one_that_is_given(
    by_tier: bool, without: float
) -> None:
    windows = _windows(10)
    windows.limit[:, 1] = without
    target = np.linspace(0.1, 1.0, 10)[:, None].repeat(2, axis=1)
    answers, limited = _ladders(np.zeros((10, 2))), _windows(10)
    made = calibrate(answers, windows, target, by_tier=by_tier)
    assert any(note.startswith("memory: no row has a limit") for note in made.notes)
    for held in guarded_reservations(answers, limited, made.settings).values():
        np.testing.assert_array_equal(held[:, 1], limited.limit[:, 1])
    given = scores_of((float("nan"), 8.0))
    for price in _prices(calibrate(answers, windows, target, by_tier=by_tier, given=given)).values():
        assert price.rung(limited)[0, 1] == pytest.approx(rung_of(np.array(8.0)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.sampled_from([0.01, 0.05, 0.3]), by_tier=st.booleans())
def test_a_lower_price_breaks_the_budget_and_this_one_keeps_it(seed: int, budget: float, by_tier: bool) -> None:
    rng = np.random.default_rng(seed)
    n = 80
    windows = _windows(n)
    windows.usage[:, MEMORY_MAX] = rng.random(n) * 10  # the jump protects some rows
    windows.limit[rng.random(n) < 0.1] = np.nan
    ladder = np.sort(rng.random((n, 2, N_RUNGS)).astype(np.float32), axis=-1)
    ladder[..., -1] = 1.0
    ladder[rng.random((n, 2)) < 0.1] = np.nan
    target = rng.random((n, 2)) * 1.2
    target[rng.random((n, 2)) < 0.1] = np.nan
    answers = Priced(ladder)
    found = calibrate(answers, windows, target, Budgets(budget, budget), by_tier=by_tier)

    def violation(rung: NDArray[np.float64]) -> NDArray[np.float64]:
        price = Price("tried", tuple(price_of(rung).tolist()))
        held = guarded_reservations(answers, windows, dict.fromkeys(MARGIN_NAMES, price))["baseline"]
        return violation_share(held, windows.limit, target)

    rung = rung_of(np.array(_prices(found)["baseline"].value))
    assert (violation(rung) <= budget).all()
    for r in range(2):
        if rung[r] > 0:
            assert violation(np.maximum(rung - 2e-3, 0.0))[r] > budget  # the search ends within that of a rung


def test_prices_of_tiers_reserve_what_each_needs() -> None:
    windows = _windows(3_000)
    windows.tier[:] = np.repeat([0, 1, 2], 1_000)
    target = np.repeat([2 / TOP_RUNG, 5 / TOP_RUNG, 10 / TOP_RUNG], 1_000)[:, None].repeat(2, axis=1)
    found = calibrate(_ladders(np.zeros((3_000, 2))), windows, target, Budgets(0.02, 0.02), by_tier=True)
    rungs = _prices(found)["baseline"].rung(windows)
    assert rungs[[0, 1_000, 2_000], 0] == pytest.approx([2, 5, 10], rel=1e-4)
    assert found.violation["medium"] == (0.0, 0.0)


def test_a_price_that_is_given_is_that_of_all_margins_and_the_other_resource_keeps_its_budget() -> None:
    target = np.linspace(0.1, 1.0, 10)[:, None].repeat(2, axis=1)
    answers, budgets = _ladders(np.zeros((10, 2))), Budgets(baseline=0.1, aggressive=0.5)
    given = scores_of((8.0, float("nan")))
    for by_tier in (False, True):
        found = calibrate(answers, _windows(10), target, budgets, by_tier=by_tier, given=given)
        alone = calibrate(answers, _windows(10), target, budgets, by_tier=by_tier)
        for name, price in _prices(found).items():
            assert price.value[0] == pytest.approx(8.0)
            assert price.given == (True, False)
            assert price.value[1] == _prices(alone)[name].value[1]
            assert price.rung(_windows(10))[0, 0] == pytest.approx(rung_of(np.array(8.0)))
        assert found.violation["aggressive"][0] == found.violation["baseline"][0]
