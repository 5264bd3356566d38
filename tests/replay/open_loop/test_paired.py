"""Paired differences: by hand, narrower than unpaired ones, and what the verdict rests on."""

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reclaim.replay.open_loop.bootstrap import Bootstrap, resampled_sums
from reclaim.replay.open_loop.metrics import POSITION, STATS, evaluate
from reclaim.replay.open_loop.paired import (
    ALONE,
    BETTER,
    EXCEEDS,
    LESS,
    MORE,
    NOISE,
    UNKNOWN,
    WORSE,
    Difference,
    Interval,
    Paired,
)


def paired(**sums: NDArray[np.float64]) -> Paired:
    return Paired(sums, Bootstrap(draws=200, seed=1, confidence=0.9))


def sums_of(
    reclaimed: NDArray[np.float64], violations: NDArray[np.float64], rows: float = 100.0
) -> NDArray[np.float64]:
    """Return the sums of units that were granted 1 each, both resources alike."""
    sums = np.zeros((len(reclaimed), len(STATS), 2))
    for name, values in (("granted", 1.0), ("rows", rows), ("reclaimed", reclaimed), ("violations", violations)):
        sums[:, POSITION[name]] = np.broadcast_to(values, len(reclaimed))[:, None]
    return sums


def test_two_units_by_hand() -> None:
    one = sums_of(np.array([0.5, 0.3]), np.array([1.0, 3.0]))
    other = sums_of(np.array([0.4, 0.2]), np.array([0.0, 0.0]))
    found = paired(one=one, other=other).difference("one", "other", 0)
    assert found.reclaimed.value == pytest.approx(0.1)
    assert (found.reclaimed.low, found.reclaimed.high) == pytest.approx((0.1, 0.1))  # the same in every unit: no noise
    assert found.violation.value == pytest.approx(4 / 200)
    # a draw holds the first unit twice, both, or the second twice: 1, 2 or 3 of 100 rows
    assert (found.violation.low, found.violation.high) == pytest.approx((0.01, 0.03))
    assert found.verdict == MORE
    assert paired(one=one, other=other).difference("other", "one", 0).verdict == LESS


def test_the_bounds_are_those_of_every_draw_subtracted_one_by_one() -> None:
    rng = np.random.default_rng(3)
    one, other = (sums_of(rng.random(30), rng.integers(0, 5, 30).astype(float)) for _ in range(2))
    found = paired(one=one, other=other).difference("one", "other", 1)
    drawn = [
        evaluate(resampled_sums(s.reshape(30, -1), draws=200, seed=1).reshape(200, len(STATS), 2)) for s in (one, other)
    ]
    for name, interval in (("reclaimed_share", found.reclaimed), ("violation_rate", found.violation)):
        subtracted = drawn[0][name][:, 1] - drawn[1][name][:, 1]
        np.testing.assert_allclose((interval.low, interval.high), np.quantile(subtracted, [0.05, 0.95]))


def test_what_is_equal_but_for_the_units_is_told_apart_only_when_paired() -> None:
    rng = np.random.default_rng(4)
    unit = rng.normal(0.5, 0.2, 50)  # units differ far more than the two estimators do
    one, other = sums_of(unit + 0.01, np.zeros(50)), sums_of(unit + rng.normal(0, 0.005, 50), np.zeros(50))
    both = paired(one=one, other=other)
    assert both.difference("one", "other", 0).verdict == BETTER
    assert both.difference("other", "one", 0).verdict == WORSE
    shuffled = paired(one=one, other=rng.permutation(other))
    assert shuffled.difference("one", "other", 0).verdict == NOISE
    assert both.difference("one", "one", 0).verdict == NOISE


@pytest.mark.parametrize("silent", [0, 5])
def test_one_collection_is_no_proof_whatever_it_shows(silent: int) -> None:
    one, other = (
        np.concatenate([sums_of(np.array([share]), np.zeros(1)), np.zeros((silent, len(STATS), 2))])
        for share in (0.5, 0.4)
    )
    both = paired(one=one, other=other)
    found = both.difference("one", "other", 0)
    assert found.reclaimed.value == pytest.approx(0.1)
    assert all(np.isnan(n) for i in (found.reclaimed, found.violation) for n in (i.low, i.high))
    assert found.verdict == both.difference("other", "one", 0).verdict == UNKNOWN
    assert both.best_against("other", ["one"], 0) == "one"


def test_what_one_collection_alone_has_a_limit_for_is_no_proof_beside_what_all_have_one_for() -> None:
    one, other = (sums_of(np.full(30, share), np.zeros(30)) for share in (0.5, 0.4))
    one[1:, :, 1] = other[1:, :, 1] = 0.0
    both = paired(one=one, other=other)
    assert [both.difference("one", "other", r).verdict for r in (0, 1)] == [BETTER, UNKNOWN]


UP, DOWN, FLAT = Interval(1, 0.5, 2), Interval(-1, -2, -0.5), Interval(0.1, -1, 1)


@pytest.mark.parametrize(
    ("reclaimed", "violation", "verdict"),
    [
        (UP, FLAT, BETTER), (UP, DOWN, BETTER), (FLAT, DOWN, BETTER),
        (DOWN, FLAT, WORSE), (DOWN, UP, WORSE), (FLAT, UP, WORSE),
        (FLAT, FLAT, NOISE), (UP, UP, MORE), (DOWN, DOWN, LESS),
    ],
)  # fmt: skip
def test_more_reclaimed_only_counts_where_no_more_is_violated(
    reclaimed: Interval, violation: Interval, verdict: str
) -> None:
    assert Difference(reclaimed, violation).verdict == verdict
    unknown = Interval(float("nan"), float("nan"), float("nan"))
    assert Difference(unknown, unknown).verdict == Difference(UP, unknown).verdict == UNKNOWN
    assert Difference(UP, Interval(0, float("nan"), float("nan"))).verdict == UNKNOWN


def test_the_best_opponent_reclaims_most_of_those_that_do_not_violate_more() -> None:
    none, some = np.zeros(40), np.full(40, 2.0)
    four = paired(
        mine=sums_of(np.full(40, 0.5), none),
        careful=sums_of(np.full(40, 0.3), none),
        fair=sums_of(np.full(40, 0.4), none),
        reckless=sums_of(np.full(40, 0.9), some),
    )
    others = ["careful", "fair", "reckless"]
    assert four.best_against("mine", others, 0) == "fair"
    assert four.best_against("mine", ["reckless"], 0) == "reckless"
    assert four.best_against("fair", ["fair"], 0) is None
    assert four.best_against("reckless", others, 0) == "fair"
    three = paired(
        mine=sums_of(np.full(40, 0.5), some),
        fair=sums_of(np.full(40, 0.4), some),
        careful=sums_of(np.full(40, 0.3), none),
    )
    assert three.best_against("mine", ["careful", "fair"], 0) == "fair"  # it violates as much


def test_where_no_opponent_keeps_the_budget_the_one_that_violates_least_is_the_nearest_to_it() -> None:
    three = paired(
        mine=sums_of(np.full(40, 0.5), np.zeros(40)),
        nearest=sums_of(np.full(40, 0.4), np.full(40, 1.0)),
        alike=sums_of(np.full(40, 0.3), np.full(40, 1.0)),
        reckless=sums_of(np.full(40, 0.9), np.full(40, 2.0)),
    )
    assert three.best_against("mine", ["alike", "reckless", "nearest"], 0, 1e-6) == "nearest"
    compared = three.compare_best("mine", ["alike", "reckless", "nearest"], 0, 1e-6)
    assert compared is not None
    assert compared.verdict == ALONE


def test_who_wastes_the_budget_is_not_spared_the_rival_that_uses_it() -> None:
    # Azure 2017, CPU, 1 hour, 0.1 %: network 20.6 % at 0.014 %, Borg 46.8 % at 0.106 %, moving-max 15.0 %
    rng = np.random.default_rng(7)
    reclaimed, violations = rng.normal(0, 0.01, 100), rng.permutation(np.repeat([0.0, 1.0], 50))
    network = sums_of(0.206 + reclaimed, 0.28 * violations, rows=1_000.0)
    borg = sums_of(0.468 + reclaimed, 2.12 * violations, rows=1_000.0)
    slow = sums_of(0.150 + reclaimed, 0.0 * violations, rows=1_000.0)
    reckless = sums_of(0.9 + reclaimed, 20.0 * violations, rows=1_000.0)
    all_four = paired(network=network, borg=borg, slow=slow, reckless=reckless)
    others = ["borg", "slow", "reckless"]
    assert all_four.best_against("network", others, 0) == "slow"  # without a budget
    at_budget = all_four.compare_best("network", others, 0, 0.001)
    assert at_budget is not None
    assert (at_budget.against, at_budget.verdict) == ("borg", WORSE)
    assert at_budget.difference.reclaimed.value == pytest.approx(-0.262)
    assert at_budget.difference.violation.value == pytest.approx(0.00014 - 0.00106)
    assert all_four.compare("borg", "network", 0, 0.001).verdict == BETTER
    assert all_four.compare("reckless", "borg", 0, 0.001).verdict == EXCEEDS
    assert all_four.compare("borg", "reckless", 0, 0.001).verdict == ALONE
    assert all_four.compare("network", "network", 0, 0.001).verdict == NOISE
    assert all_four.compare_best("network", ["reckless"], 0, 0.001) == all_four.compare("network", "reckless", 0, 0.001)
    assert all_four.compare_best("network", ["network"], 0, 0.001) is None
    assert not all_four.keeps("borg", 0, 0.0005)


def test_a_single_collection_has_no_verdict_at_a_budget() -> None:
    one = paired(a=sums_of(np.array([0.5]), np.array([90.0])), b=sums_of(np.array([0.4]), np.array([0.0])))
    assert one.compare("a", "b", 0, 0.01).verdict == UNKNOWN


def test_a_rate_that_is_the_budget_itself_keeps_it() -> None:
    one = paired(a=sums_of(np.array([0.5]), np.array([1.0])))  # of 100 rows
    assert one.keeps("a", 0, 0.01)
    assert not one.keeps("a", 0, 0.0099)


def test_a_unit_counts_as_often_as_it_is_drawn_and_parts_are_resampled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(5).random((7, 3))
    whole = resampled_sums(values, draws=20, seed=2)
    counts = resampled_sums(np.eye(7), draws=20, seed=2)
    assert (counts.sum(axis=1) == 7).all()
    np.testing.assert_allclose(whole, counts @ values)
    monkeypatch.setattr(
        "reclaim.replay.open_loop.bootstrap._DRAWN_AT_ONCE", 21
    )  # three draws at a time, and the last two
    np.testing.assert_allclose(resampled_sums(values, draws=20, seed=2), whole)


def test_a_single_unit_among_empty_ones_has_no_resamples() -> None:
    values = np.zeros((5, 2))
    values[3] = 1.0
    assert np.isnan(resampled_sums(values, draws=4, seed=1)).all()
    values[0] = 1.0
    assert np.isfinite(resampled_sums(values, draws=4, seed=1)).all()


def test_units_without_rows_give_no_number() -> None:
    empty = np.zeros((3, len(STATS), 2))
    found = paired(a=empty, b=empty).difference("a", "b", 0)
    assert all(np.isnan(n) for i in (found.reclaimed, found.violation) for n in (i.value, i.low, i.high))


def test_all_estimators_are_resampled_at_once_however_many_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    resampled: list[tuple[int, ...]] = []

    def spy(sums: NDArray[np.float64], **options: Any) -> NDArray[np.float64]:
        resampled.append(sums.shape)
        return resampled_sums(sums, **options)

    monkeypatch.setattr("reclaim.replay.open_loop.paired.resampled_sums", spy)
    rng = np.random.default_rng(6)
    many = Paired({str(k): sums_of(rng.random(50), rng.random(50)) for k in range(4)})
    for one, other in itertools.permutations("0123", 2):
        many.difference(one, other, 0)
    assert resampled == [(50, 4 * 4 * 2)]  # numerators and denominators of both, for each resource
