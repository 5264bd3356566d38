"""The sweep of all margins at once: to the bit what the guards make of one margin after another."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaim.data.windows import MEMORY_MAX, P90, Windows, demand, empty_windows
from reclaim.replay.equal_violation.sweep import FACTORS, PLACES, Bare, Guards, TaskRows, at_rate, sweep_machines
from reclaim.replay.open_loop.history import window_seconds
from reclaim.training.estimators.base import MODEL, Estimate
from reclaim.training.estimators.fixed import LimitEstimator
from reclaim.training.margins.answers import Priced
from reclaim.training.margins.calibrate import guarded_reservations, needed_reservation, violation_share
from reclaim.training.margins.ladder import N_RUNGS, price_of
from reclaim.training.margins.margin import MARGIN_NAMES, STARTUP_HOLD_S, Guarded, Margin
from reclaim.training.margins.price import Price

Maker = Callable[..., Windows]

HOUR_US = 3_600_000_000


def random_rows(seed: int, n: int = 60) -> tuple[Windows, np.ndarray, np.ndarray]:
    """Return windows, bare answers and targets with all that can be unknown, zero, young or above the limit."""
    rng = np.random.default_rng(seed)
    windows = empty_windows(n)
    windows.end_us[:] = 2 * HOUR_US + np.arange(n) * 300_000_000
    windows.start_us[:] = windows.end_us - rng.integers(1, 300_000_000, n)
    windows.scheduled_us[:] = rng.choice([-1, 0, 1, HOUR_US], n)
    young = rng.random(n) < 0.2
    windows.scheduled_us[young] = windows.end_us[young] - rng.integers(0, 400_000_000, young.sum())
    windows.limit[:] = rng.choice([0.0, 0.3, 1.0, 2.5, np.nan], (n, 2), p=[0.1, 0.3, 0.3, 0.2, 0.1])
    windows.percentiles[:, P90] = rng.uniform(0, 1.5, n)
    windows.usage[:, MEMORY_MAX] = rng.uniform(0, 1.5, n)
    unknown = rng.random(n) < 0.15
    windows.percentiles[unknown] = windows.usage[unknown] = np.nan
    bare = np.where(
        rng.random((n, 2)) < 0.1, np.nan, rng.choice([0.0, 1.0], (n, 2), p=[0.1, 0.9]) * rng.uniform(0, 2, (n, 2))
    )
    target = np.where(rng.random((n, 2)) < 0.2, np.nan, rng.uniform(0, 1.4, (n, 2)))
    return windows, bare, target


def laid_out(windows: Windows, target: np.ndarray, unit: np.ndarray, n_units: int) -> TaskRows:
    every = np.arange(len(windows))
    return TaskRows.lay_out(every, Guards.from_windows(windows), target, window_seconds(windows), unit, n_units)


def guarded(bare: np.ndarray, windows: Windows, share: float) -> np.ndarray:
    served = Guarded(LimitEstimator(), Margin("any", (share, share)))  # adjust asks no base
    return served.adjust(Estimate(bare, np.full(bare.shape, MODEL, np.uint8)), windows).reservation


@given(st.integers(0, 10_000), st.floats(-0.95, 1000.0))
@settings(max_examples=60, deadline=None)
def test_the_guards_laid_out_once_answer_to_the_bit_what_is_served(seed: int, share: float) -> None:
    windows, bare, _ = random_rows(seed)
    known = ~np.isnan(windows.limit)
    ours, served = Guards.from_windows(windows).reservation(bare, 1.0 + share), guarded(bare, windows, share)
    np.testing.assert_array_equal(ours[known], served[known], strict=True)
    assert np.isnan(ours[~known]).all()


@given(st.integers(0, 10_000), st.lists(st.floats(-0.95, 30.0), min_size=1, max_size=5, unique=True))
@settings(max_examples=60, deadline=None)
def test_a_sweep_equals_guarding_and_counting_at_every_margin(seed: int, shares: list[float]) -> None:
    windows, bare, target = random_rows(seed)
    factors = 1.0 + np.sort(shares)
    unit = np.random.default_rng(seed).integers(0, 3, len(windows))
    rows = laid_out(windows, target, unit, 4)
    violations, reclaimed = rows.sweep(Bare(bare, factors))
    assert violations.shape == reclaimed.shape == (4, len(factors), 2)
    seconds = (windows.end_us - windows.start_us) / 1e6
    known = np.isfinite(target) & (windows.limit > 0)
    for k, factor in enumerate(factors):
        reserved = guarded(bare, windows, factor - 1.0)
        above = known & (np.minimum(target, 1.0) * windows.limit > reserved * (1 + 1e-6))
        spared = np.where(known, windows.limit - reserved, 0.0) * seconds[:, None]
        for u in range(4):
            np.testing.assert_array_equal(violations[u, k], above[unit == u].sum(axis=0))
            np.testing.assert_allclose(reclaimed[u, k], spared[unit == u].sum(axis=0), rtol=1e-12, atol=1e-9)
        expected = violation_share(reserved, windows.limit, target)
        np.testing.assert_allclose(violations[:, k].sum(axis=0) / known.sum(axis=0), expected, rtol=1e-12)
        at = rows.at(reserved)
        np.testing.assert_array_equal(at[:, 0], violations[:, k])
        np.testing.assert_allclose(at[:, 1], reclaimed[:, k], rtol=1e-12, atol=1e-9)


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_a_row_violates_below_the_factor_that_lifts_it_to_its_need_and_at_none_above(seed: int) -> None:
    windows, bare, target = random_rows(seed)
    rows = laid_out(windows, target, np.arange(len(windows)), len(windows))
    violations, _ = rows.sweep(Bare(bare, FACTORS))
    needed = needed_reservation(windows, target)
    for i, r in np.argwhere(np.isfinite(rows.need) & np.isfinite(bare)):
        expected = bare[i, r] * FACTORS * (1 + 1e-6) < needed[i, r]
        close = np.isclose(bare[i, r] * FACTORS, needed[i, r], rtol=1e-5)
        np.testing.assert_array_equal(violations[i, ~close, r] > 0, expected[~close])


def random_ladders(seed: int, n: int) -> np.ndarray:
    """Return ladders that rise to the limit; some know nothing."""
    rng = np.random.default_rng(seed)
    ladder = np.sort(rng.random((n, 2, N_RUNGS)).astype(np.float32), axis=-1)
    ladder[..., -1] = 1.0
    ladder[rng.random((n, 2)) < 0.1] = np.nan
    return ladder


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_a_sweep_of_ladders_equals_pricing_guarding_and_counting_at_every_price(seed: int) -> None:
    windows, _, target = random_rows(seed)
    answers = Priced(random_ladders(seed, len(windows)))
    some = np.random.default_rng(seed).permutation(len(windows))[: len(windows) // 2]
    unit = np.random.default_rng(seed).integers(0, 3, len(some))
    rows = TaskRows.lay_out(some, Guards.from_windows(windows), target, window_seconds(windows), unit, 4)
    violations, reclaimed = rows.sweep(*Bare.of(answers))
    for k in range(0, len(PLACES), 7):
        value = float(price_of(PLACES[k]))
        price = dict.fromkeys(MARGIN_NAMES, Price("any", (value, value)))
        at = rows.at(guarded_reservations(answers, windows, price)["medium"][some])
        np.testing.assert_array_equal(at[:, 0], violations[:, k])
        np.testing.assert_allclose(at[:, 1], reclaimed[:, k], rtol=1e-9, atol=1e-6)
    assert not violations[:, -1].any()


def test_machines_add_up_what_ladders_reserve_at_each_price() -> None:
    rng = np.random.default_rng(4)
    ladder, limit = random_ladders(4, 6)[:, 0], np.array([2.0, 4.0, 3.0, 1.0, 1.0, 2.0])
    rows, low = np.array([0, 2, 3, 5]), np.array([0.5, -np.inf, 0.2, 1.9])
    snapshot, machine, peak = np.array([0, 0, 1, 2]), np.array([0, 0, 1]), rng.uniform(0.5, 4.0, 3)
    violations, reclaimed = sweep_machines(
        ladder, rows, low, limit[rows], snapshot, machine, peak, 2, np.array([0.0, 3.5, 19.0])
    )
    for k, place in enumerate((0.0, 3.5, 19.0)):
        share = np.array([np.interp(place, np.arange(N_RUNGS), rungs) for rungs in ladder[rows].astype(np.float64)])
        held = np.minimum(np.maximum(np.where(np.isnan(share), 1.0, share) * limit[rows], low), limit[rows])
        total = np.bincount(snapshot, held)
        assert violations[:, k].tolist() == np.bincount(machine, peak > total, 2).tolist()
        np.testing.assert_allclose(
            reclaimed[:, k], np.bincount(machine, np.bincount(snapshot, limit[rows]) - total, 2), atol=1e-9
        )


def test_totals_by_hand(make_windows: Maker) -> None:
    windows = make_windows([(0.1, 0.1)] * 3, limit=(2.0, 4.0))
    target = np.array([[0.5, 0.25], [np.nan, 2.0], [0.0, 1.0]])
    rows = laid_out(windows, target, np.array([0, 0, 1]), 2)
    assert rows.totals()[:, :, 0].tolist() == [[1, 600, 300], [1, 600, 600]]
    assert rows.totals()[:, :, 1].tolist() == [[2, 2400, 900], [1, 1200, 0]]


def test_a_machines_reservations_are_added_up_before_they_are_held_against_its_peak() -> None:
    # machine 0 at two times: answers 1 and 2 of limits 2 and 4, then one answer that is unknown; machine 1: nothing low
    bare, limit = np.array([1.0, 2.0, np.nan, 0.5]), np.array([2.0, 4.0, 3.0, 1.0])
    violations, reclaimed = sweep_machines(
        bare, np.arange(4), np.full(4, -np.inf), limit, np.array([0, 0, 1, 2]), np.array([0, 0, 1]),
        np.array([3.0, 3.0, 0.9]), 2, np.array([0.5, 1.0, 2.0]),
    )  # fmt: skip
    assert violations.tolist() == [[1, 0, 0], [1, 1, 0]]
    assert reclaimed.tolist() == [[4.5, 3.0, 0.0], [0.75, 0.5, 0.0]]
    # what its window demanded is the least: 2.5 of the first
    violations, _ = sweep_machines(
        bare[:2], np.arange(2), np.array([2.5, -np.inf]), np.array([4.0, 4.0]), np.array([0, 0]), np.zeros(1, np.int64),
        np.array([3.0]), 1, np.array([0.5]),
    )  # fmt: skip
    assert violations.tolist() == [[0]]


def test_what_is_reclaimed_at_a_rate_lies_on_the_line_between_two_factors() -> None:
    violation, reclaimed = np.array([0.3, 0.1, 0.0, 0.0]), np.array([0.8, 0.6, 0.2, 0.0])
    assert at_rate(violation, reclaimed, 0.2) == pytest.approx(0.7)
    assert at_rate(violation, reclaimed, 0.1) == pytest.approx(0.6)
    assert at_rate(violation, reclaimed, 0.025) == pytest.approx(0.3)
    assert at_rate(violation, reclaimed, 0.0) == pytest.approx(0.2)
    assert at_rate(violation, reclaimed, 0.5) == pytest.approx(0.8)  # the narrowest violates less often
    assert np.isnan(at_rate(violation + 0.05, reclaimed, 0.01))
    two = at_rate(np.stack([violation, violation + 0.05]), np.stack([reclaimed] * 2), 0.1)
    np.testing.assert_allclose(two, [0.6, 0.4])


def test_the_factors_rise_and_reach_from_a_twentieth_to_what_is_in_effect_the_limit() -> None:
    assert (np.diff(FACTORS) > 0).all()
    assert FACTORS[0] == pytest.approx(0.05)
    assert FACTORS[-1] == pytest.approx(1001.0)
    steps, begins = FACTORS[1:] / FACTORS[:-1], FACTORS[:-1]
    assert (steps[(begins > 0.49) & (begins < 39)] < 1.0202).all()
    assert (steps < 1.061).all()


def test_of_a_margin_of_several_times_the_answer_the_reclaimed_share_is_not_lost_between_two_steps() -> None:
    """Answers of a tenth of what is needed, and of a fifteenth: both budgets are kept at a factor of 10 or of 15."""
    n = 4_000
    need = np.full((n, 2), 0.3)
    bare = np.where(np.arange(n)[:, None] < n // 200, need / 15, need / 10)
    low, limit = np.full((n, 2), -np.inf), np.ones((n, 2))
    rows = TaskRows(np.arange(n), Guards(low, limit), need, np.ones(n), np.zeros(n, np.int64), 1)
    violations, reclaimed = rows.sweep(Bare(bare, FACTORS))
    found = at_rate(violations[0, :, 0] / n, reclaimed[0, :, 0] / n, 0.01)
    assert found == pytest.approx(1 - 0.3, abs=0.01)


def test_a_run_is_young_until_the_hold_is_over_and_no_longer_at_that_very_moment(make_windows: Maker) -> None:
    windows = make_windows([(0.3, 0.1)], [(0.3, 0.1)])
    windows.scheduled_us[:] = windows.end_us - int(STARTUP_HOLD_S * 1e6) + [0, 1]
    low = Guards.from_windows(windows).low
    np.testing.assert_allclose(low, [[0.3, 0.1], [1.0, 1.0]])
    nothing = np.zeros((2, 2))
    np.testing.assert_array_equal(
        Guards.from_windows(windows).reservation(nothing, 1.0), guarded(nothing, windows, 0.0)
    )


def test_guards_are_those_of_the_rows_taken(make_windows: Maker) -> None:
    windows = make_windows([(0.3, 0.1), (0.2, 1.4)])
    taken = Guards.from_windows(windows).take(np.array([1]))
    np.testing.assert_allclose(taken.low, demand(windows)[[1]])
    assert taken.reservation(np.zeros((1, 2)), 1.0).tolist() == [pytest.approx([0.2, 1.0])]
