"""The metrics, by hand and on edge cases."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import ArrayLike, NDArray

from reclaim.replay.open_loop.bootstrap import Bootstrap
from reclaim.replay.open_loop.metrics import METRICS, POSITION, STATS, Scored, bootstrap, evaluate, sums
from reclaim.training.margins.calibrate import violation_share

NAN = float("nan")


def scored(
    target: ArrayLike,
    reservation: ArrayLike,
    limit: ArrayLike = 1.0,
    duration_s: ArrayLike = 300.0,
    next_target: ArrayLike | None = None,
    previous: list[int] | None = None,
) -> Scored:
    """Both resources alike, from one number or one per row; reservations over the limit, each row a task of its own."""
    n = np.size(target)

    def two(values: ArrayLike) -> NDArray[np.float64]:
        return np.repeat(np.broadcast_to(np.asarray(values, np.float64), n)[:, None], 2, axis=1)

    return Scored(
        target=two(target),
        next_target=two(target if next_target is None else next_target),
        reservation=two(reservation) * two(limit),
        limit=two(limit),
        duration_s=np.array(np.broadcast_to(np.asarray(duration_s, np.float64), n)),
        previous=np.full(n, -1) if previous is None else np.array(previous),
    )


def measure(s: Scored) -> dict[str, float]:
    """Every metric over all rows, of the first resource; both must agree."""
    totals = sums(s, np.zeros(len(s.target), np.int64), 1)[0]
    values = evaluate(totals)
    for v in values.values():
        np.testing.assert_array_equal(v[0], v[1])
    return {name: float(v[0]) for name, v in values.items()}


def test_metrics_agree_with_three_rows_worked_by_hand() -> None:
    # limit x seconds: 2x300 = 600, 4x300 = 1200, 1x100 = 100; all 1900
    m = measure(
        scored(
            target=[0.5, 0.5, 0.9],
            next_target=[0.4, NAN, 0.7],
            reservation=[0.75, 0.4, 0.6],
            limit=[2.0, 4.0, 1.0],
            duration_s=[300, 300, 100],
        )
    )
    reclaimed = 0.25 * 600 + 0.6 * 1200 + 0.4 * 100  # 910
    best = 0.5 * 600 + 0.5 * 1200 + 0.1 * 100  # 910
    assert m["reclaimed_share"] == pytest.approx(reclaimed / 1900)
    assert m["oracle_reclaimed_share"] == pytest.approx(best / 1900)
    assert m["efficiency"] == pytest.approx(1.0)  # as much as the oracle, and two of three rows pay for it
    assert m["violation_rate"] == pytest.approx(2 / 3)
    assert m["violation_depth"] == pytest.approx((0.1 + 0.3) / 2)
    assert m["overrun_share"] == pytest.approx((0.1 * 1200 + 0.3 * 100) / (0.5 * 600 + 0.5 * 1200 + 0.9 * 100))
    assert m["next_violation_rate"] == pytest.approx(1 / 2)
    assert m["limit_exceeded_rate"] == 0.0


def test_rows_of_unknown_target_or_limit_count_in_nothing() -> None:
    known = scored(target=[0.5, 0.2], reservation=[0.4, 0.4], limit=[2.0, 1.0])
    more = scored(
        target=[0.5, 0.2, NAN, 0.9, 0.9], reservation=[0.4, 0.4, 0.1, NAN, 0.1], limit=[2.0, 1.0, 5.0, 5.0, 0.0]
    )
    np.testing.assert_equal(measure(more), measure(known))


def test_usage_above_the_limit_violates_no_reservation_that_is_the_limit_and_is_told_apart() -> None:
    m = measure(scored(target=[1.5, 0.5], reservation=[1.0, 1.0]))
    assert m["violation_rate"] == 0.0
    assert m["reclaimed_share"] == 0.0
    assert m["limit_exceeded_rate"] == 0.5
    assert m["oracle_reclaimed_share"] == pytest.approx(0.25)
    m = measure(
        scored(target=[1.0, 1 + 1e-7, 1.1], reservation=1.0)
    )  # at the limit, or above it by rounding, is not above
    assert m["limit_exceeded_rate"] == pytest.approx(1 / 3)


def test_usage_above_the_limit_counts_as_the_limit_in_all_but_the_share_of_such_rows() -> None:
    above, at = (sums(scored(t, [0.6, 1.0], limit=2.0), np.zeros(2, np.int64), 1)[0] for t in ([1.5, 3.0], [1.0, 1.0]))
    assert above[POSITION["limit_exceeded"]].tolist() == [2, 2]
    assert at[POSITION["limit_exceeded"]].tolist() == [0, 0]
    above[POSITION["limit_exceeded"]] = 0
    np.testing.assert_array_equal(above, at)


def test_the_limit_is_passed_within_the_horizon_be_it_before_or_after_the_next_five_minutes() -> None:
    m = measure(scored(target=[1.2, 1.2, 0.9], next_target=[0.5, 1.2, 0.5], reservation=1.0))
    assert m["limit_exceeded_rate"] == pytest.approx(2 / 3)


def test_the_next_five_minutes_are_compared_with_the_reservation_by_themselves() -> None:
    m = measure(scored(target=[0.9, 0.9], next_target=[0.1, 0.9], reservation=0.5))
    assert (m["violation_rate"], m["next_violation_rate"]) == (1.0, 0.5)
    # each of a task's rows counts, violated within the horizon or not, but for those of an unknown next five minutes
    m = measure(
        scored([0.9, 0.9, 0.9, 0.2], 0.5, next_target=[0.9, NAN, 0.9, 0.2], previous=[-1, 0, 1, 2]),
    )
    assert m["next_violation_rate"] == pytest.approx(2 / 3)


def test_severity_is_over_the_usage_and_slack_over_the_limit() -> None:
    # of three rows one violates: 0.8 used of 0.6 reserved; the others leave 0.25 of 2 and 0.5 of 1 unused
    m = measure(scored(target=[0.5, 0.8, 0.0], reservation=[0.75, 0.6, 0.5], limit=[2.0, 4.0, 1.0]))
    assert m["violation_severity"] == pytest.approx(0.2 / 0.8)
    assert m["violation_depth"] == pytest.approx(0.2)
    assert m["slack_share"] == pytest.approx((0.25 * 2 + 0.5 * 1) / 7)


def test_time_under_and_the_duration_of_a_violation_by_hand() -> None:
    # a task violates in its rows 1 and 2, and again in 4; the next task begins in violation, right behind it
    m = measure(
        scored(
            target=[0.1, 0.9, 0.9, 0.1, 0.9, 0.9],
            reservation=0.5,
            duration_s=[300, 300, 100, 300, 300, 200],
            previous=[-1, 0, 1, 2, 3, -1],
        )
    )
    violating = 300 + 100 + 300 + 200
    assert m["under_time"] == pytest.approx(violating / 1500)
    assert m["violation_duration_s"] == pytest.approx(violating / 3)


def test_an_episode_begins_anew_behind_a_row_that_is_not_judged() -> None:
    s = scored(target=[0.9, NAN, 0.9, 0.9], reservation=0.5, previous=[-1, 0, 1, 2])
    assert sums(s, np.zeros(4, np.int64), 1)[0, POSITION["episodes"]].tolist() == [2, 2]
    s = scored(target=[0.9, 0.9, 0.9], reservation=0.5, previous=[-1, 0, 1])
    assert sums(s, np.array([-1, 0, 0]), 1)[0, POSITION["episodes"]].tolist() == [1, 1]
    # but one group does not end it for the other: the second counts its time alone
    grouped = sums(s, np.array([0, 1, 1]), 2)
    assert grouped[:, POSITION["episodes"], 0].tolist() == [1, 0]
    assert grouped[:, POSITION["violating_s"], 0].tolist() == [300, 600]


@pytest.mark.parametrize(("before", "limit"), [(0.4, 2.0), (0.6, 0.5)])
def test_an_episode_goes_on_where_the_row_before_violated_by_its_own_limit(before: float, limit: float) -> None:
    # 0.4 of a limit of 1 keeps within 0.5, so the next row begins one; 0.6 begins one that the next row continues
    s = scored(target=[before, 0.6], reservation=0.5, limit=[1.0, limit], previous=[-1, 0])
    assert sums(s, np.zeros(2, np.int64), 1)[0, POSITION["episodes"]].tolist() == [1, 1]


def test_changes_are_counted_per_day_where_they_pass_a_hundredth_of_the_limit() -> None:
    # of 2.0, by 0.1 up, by 0.01 down (half a hundredth: none), by 0.3 up; then another task
    s = scored(
        target=0.1 * np.ones(5),
        reservation=[0.5, 0.55, 0.545, 0.695, 0.2],
        limit=2.0,
        duration_s=21_600,
        previous=[-1, 0, 1, 2, -1],
    )
    m = measure(s)
    assert m["changes_per_day"] == pytest.approx(2 / (5 * 0.25))
    assert m["change_size"] == pytest.approx((0.05 + 0.15) / 2)
    # what came before the judged rows is no row of theirs, but a change from it is a change
    assert sums(s, np.array([-1, 0, 0, 0, 0]), 1)[0, POSITION["changes"], 0] == 2


def test_a_change_is_over_the_limit_of_its_own_row_and_a_hundredth_of_that_is_none() -> None:
    # 1.0 of 2, 1.5 of 4, 49 of 100 and 48 of 100
    s = scored(
        target=0.1 * np.ones(4), reservation=[0.5, 0.375, 0.49, 0.48], limit=[2, 4, 100, 100], previous=[-1, 0, 1, 2]
    )
    assert sums(s, np.zeros(4, np.int64), 1)[0, POSITION["changes"]].tolist() == [2, 2]
    assert measure(s)["change_size"] == pytest.approx((0.5 / 4 + 47.5 / 100) / 2)


def test_an_answer_that_no_limit_bounded_is_no_reservation_to_change_from() -> None:
    # 3 where no limit is known, then half of the limit of 1, then a quarter: one change
    s = scored(target=[0.1, 0.1, 0.1], reservation=[1.0, 0.5, 0.25], limit=[NAN, 1.0, 1.0], previous=[-1, 0, 1])
    s.reservation[0] = 3.0
    m = measure(s)
    assert m["changes_per_day"] == pytest.approx(86_400 / 600)
    assert m["change_size"] == pytest.approx(0.25)


def test_a_limit_of_zero_or_none_counts_in_no_statistic_and_does_not_change() -> None:
    s = scored(target=[0.5, 0.5, 0.5], reservation=[0.1, 0.1, NAN], limit=[0.0, NAN, 1.0], previous=[-1, 0, 1])
    assert not sums(s, np.zeros(3, np.int64), 1).any()
    s = scored(target=0.5, reservation=0.1, limit=np.inf)
    s.reservation[:] = 1.0  # within it, and a share of it is nothing
    assert not sums(s, np.zeros(1, np.int64), 1).any()


SERIES = {
    "unknown": np.full(4, NAN),
    "zeros": np.zeros(4),
    "constant": np.full(4, 0.5),
    "linear": np.linspace(0, 1, 4),
    "partly unknown": np.array([0.2, NAN, 0.8, 1.2]),
}


@pytest.mark.parametrize(("target", "reservation"), list(itertools.product(SERIES, SERIES)))
def test_every_pair_of_edge_series_gives_numbers_in_range_or_nothing(target: str, reservation: str) -> None:
    m = measure(scored(SERIES[target], SERIES[reservation]))
    for rate in ("violation_rate", "next_violation_rate", "limit_exceeded_rate", "violation_depth", "overrun_share"):
        assert np.isnan(m[rate]) or 0.0 <= m[rate] <= 1.0
    if "unknown" in (target, reservation):
        assert all(np.isnan(v) for v in m.values())
    if target == reservation and target in ("zeros", "constant", "linear"):
        assert m["violation_rate"] == 0.0
        assert np.isnan(m["violation_depth"])


def test_a_reservation_equal_to_usage_is_no_violation_though_targets_are_stored_in_single_precision() -> None:
    usage = np.random.default_rng(1).uniform(0, 1, 10_000)
    stored = usage.astype(np.float32).astype(np.float64)
    assert (stored > usage).any()
    assert measure(scored(stored, usage))["violation_rate"] == 0.0
    assert measure(scored(stored, usage * 0.99999))["violation_rate"] == 1.0


unit = st.floats(0, 1.5, allow_subnormal=False)


@settings(deadline=None)
@given(arrays(np.float64, (8, 2), elements=unit), arrays(np.float64, (8, 2), elements=st.floats(0, 1)))
def test_violations_are_counted_as_the_margins_were_set(target: np.ndarray, reservation: np.ndarray) -> None:
    limit = np.ones((8, 2))
    s = Scored(target, target, reservation, limit, np.full(8, 300.0), np.full(8, -1))
    rate = evaluate(sums(s, np.zeros(8, np.int64), 1)[0])["violation_rate"]
    np.testing.assert_allclose(rate, violation_share(reservation, limit, target))


@settings(deadline=None)
@given(
    arrays(np.float64, (6, 2), elements=unit),
    arrays(np.float64, (6, 2), elements=st.floats(0, 1)),
    arrays(np.float64, (6, 2), elements=st.floats(0.125, 8)),
)
def test_the_oracle_never_violates_and_nothing_that_never_violates_reclaims_more(
    target: np.ndarray, above: np.ndarray, limit: np.ndarray
) -> None:
    least = np.minimum(target, 1.0)
    duration, everything, alone = np.full(6, 300.0), np.zeros(6, np.int64), np.full(6, -1)
    best = evaluate(sums(Scored(target, target, least * limit, limit, duration, alone), everything, 1)[0])
    safe = least + (1.0 - least) * above
    other = evaluate(sums(Scored(target, target, safe * limit, limit, duration, alone), everything, 1)[0])
    assert (best["violation_rate"] == 0).all()
    assert (other["violation_rate"] == 0).all()
    np.testing.assert_allclose(best["reclaimed_share"], best["oracle_reclaimed_share"], atol=1e-12)
    assert (other["reclaimed_share"] <= best["reclaimed_share"] + 1e-12).all()


def test_groups_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(2)
    s = scored(rng.uniform(0, 1.2, 50), rng.uniform(0, 1, 50), limit=rng.uniform(1, 3, 50))
    grouped = sums(s, rng.integers(0, 4, 50), 5)
    assert grouped.shape == (5, len(STATS), 2)
    assert not grouped[4].any()
    np.testing.assert_allclose(grouped.sum(axis=0), sums(s, np.zeros(50, np.int64), 1)[0])


def units_of(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    s = scored(rng.uniform(0, 1, n * 20), rng.uniform(0.7, 1, n * 20))
    return sums(s, np.repeat(np.arange(n), 20), n)


def test_an_interval_holds_its_estimate_and_narrows_with_the_number_of_units() -> None:
    width = {}
    for n in (20, 320):
        units = units_of(n)
        point = evaluate(units.sum(axis=0))
        intervals = bootstrap(units, Bootstrap(draws=400, seed=1, confidence=0.95))
        for name in ("reclaimed_share", "violation_rate"):
            low, high = intervals[name]
            assert (low < point[name]).all()
            assert (point[name] < high).all()
            width[n, name] = float((high - low)[0])
    for name in ("reclaimed_share", "violation_rate"):  # sixteen times the units, a quarter of the width
        assert width[320, name] == pytest.approx(width[20, name] / 4, rel=0.4)


def test_an_interval_follows_the_seed_and_the_confidence() -> None:
    units = units_of(20)
    again = [
        bootstrap(units, Bootstrap(draws=100, seed=s, confidence=c))
        for s, c in ((1, 0.95), (1, 0.95), (2, 0.95), (1, 0.5))
    ]
    for name in METRICS:
        np.testing.assert_array_equal(again[0][name], again[1][name])
    assert (again[0]["reclaimed_share"] != again[2]["reclaimed_share"]).all()
    assert np.ptp(again[3]["reclaimed_share"][:, 0]) < np.ptp(again[0]["reclaimed_share"][:, 0])


def test_whole_units_are_drawn_so_that_more_rows_of_the_same_kind_in_each_tell_nothing_new() -> None:
    rng = np.random.default_rng(4)
    target, reservation, unit_ = rng.uniform(0, 1, 60), rng.uniform(0.7, 1, 60), np.repeat(np.arange(6), 10)
    once = sums(scored(target, reservation), unit_, 6)
    thrice = sums(scored(np.tile(target, 3), np.tile(reservation, 3)), np.tile(unit_, 3), 6)
    a, b = (
        bootstrap(units, Bootstrap(draws=50, seed=1, confidence=0.9))["reclaimed_share"] for units in (once, thrice)
    )
    np.testing.assert_allclose(a, b)


def test_one_unit_or_none_gives_no_interval() -> None:
    for units in (units_of(1), units_of(1)[:0], np.concatenate([units_of(1), np.zeros_like(units_of(3))])):
        assert all(np.isnan(v).all() for v in bootstrap(units, Bootstrap(draws=10, seed=1, confidence=0.95)).values())
    two = bootstrap(units_of(2), Bootstrap(draws=10, seed=1, confidence=0.95))
    assert np.isfinite(two["reclaimed_share"]).all()


def test_what_one_unit_alone_knows_has_no_interval_and_what_several_know_keeps_its_own() -> None:
    units, fewer = units_of(20), units_of(20)
    fewer[1:, POSITION["violations"], 0] = 0.0  # of CPU only the first unit violates
    fewer[1:, :, 1] = 0.0  # and of memory only it knows a limit
    before, after = (bootstrap(u, Bootstrap(draws=50, seed=1, confidence=0.9)) for u in (units, fewer))
    assert np.isnan(after["violation_depth"]).all()
    np.testing.assert_array_equal(after["reclaimed_share"][:, 0], before["reclaimed_share"][:, 0])
    assert np.isfinite(before["reclaimed_share"][:, 1]).all()
    assert np.isnan(after["reclaimed_share"][:, 1]).all()
