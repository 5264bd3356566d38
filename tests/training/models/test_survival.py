"""Survival curves: thresholds that rise through what is used now, and what is read off a curve, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from reclaim.features.registry import N_FEATURES
from reclaim.features.targets import TARGETS
from reclaim.training.models.network import survival_loss, thresholds_from
from reclaim.training.models.survival import (
    ABOVE,
    BELOW,
    CEILING,
    FLOOR,
    LAST,
    N_BELOW,
    N_THRESHOLDS,
    NOW,
    crps,
    exceedance,
    log_loss,
    quantiles_of,
    thresholds_of,
    used_now,
)

NAN = float("nan")
SHARES = st.floats(0.0, 1.0, width=32)


def using(*now: float) -> NDArray[np.float32]:
    """Return the features of tasks that use this share of each limit now."""
    x = np.full((len(now), N_FEATURES), np.nan, np.float32)
    x[:, NOW] = np.array(now, np.float32)[:, None]
    return x


def curve(*survival: float) -> NDArray[np.float32]:
    """Return one curve as a forecast has it, of one task, target and horizon."""
    return np.array(survival, np.float32)[None, None, None]


def at(*thresholds: float) -> NDArray[np.float32]:
    """Return its thresholds."""
    return np.array(thresholds, np.float32)[None, None]


def test_the_thresholds_of_a_task_by_hand() -> None:
    assert N_THRESHOLDS == 32
    (of_task,) = thresholds_of(using(0.25))
    assert of_task.shape == (len(TARGETS), N_THRESHOLDS)
    expected = [0.025, 0.0625, 0.125, 0.1875, 0.225, 0.25]  # a tenth, a quarter, … of what is used now, and that
    np.testing.assert_array_equal(of_task[:, :6], np.tile(np.array(expected, np.float32), (len(TARGETS), 1)))
    # the first step up is 0.4 % of the way from 0.25 to the last threshold by the logarithm, the next one twice that
    np.testing.assert_allclose(
        of_task[0, 6:8], [0.25**share * LAST ** (1 - share) for share in (0.996, 0.992)], rtol=1e-6
    )
    np.testing.assert_allclose(of_task[:, -1], LAST, rtol=1e-6)


def test_thresholds_go_from_the_floor_where_nothing_is_used_or_known_and_from_the_ceiling_at_and_above_the_limit() -> (
    None
):
    expected = np.array([FLOOR, FLOOR, 0.3, CEILING], "f4")
    np.testing.assert_array_equal(used_now(using(0.0, NAN, 0.3, 7.0))[:, 0], expected)


def test_a_demand_at_the_limit_exceeds_every_threshold() -> None:
    assert (thresholds_of(using(0.0, 0.3, 1.0)) < 1.0).all()


@given(arrays(np.float32, 5, elements=st.floats(0.0, 2.0, width=32)))
def test_thresholds_rise_to_the_limit_and_what_is_used_now_is_exactly_one_of_them(now: NDArray[np.float32]) -> None:
    x = using(*now)
    thresholds = thresholds_of(x)
    assert (np.diff(thresholds, axis=-1) >= 0).all()
    assert (thresholds > 0).all()
    np.testing.assert_allclose(thresholds[..., -1], LAST, rtol=1e-6)
    np.testing.assert_array_equal(thresholds[:, :, N_BELOW], used_now(x))
    stays = (now >= np.float32(FLOOR)) & (now <= np.float32(CEILING))
    assert not (now[stays] > thresholds[stays, 0, N_BELOW]).any()  # a demand that stays the same does not exceed it


@given(arrays(np.float32, 4, elements=st.floats(0.0, 2.0, width=32)))
def test_the_thresholds_that_are_trained_on_are_those_of_the_curve_but_for_rounding(now: NDArray[np.float32]) -> None:
    of_task = used_now(using(*now))
    trained = thresholds_from(torch.from_numpy(of_task)).numpy()
    np.testing.assert_allclose(trained, thresholds_of(using(*now)), rtol=1e-6)
    np.testing.assert_array_equal(trained[..., N_BELOW], of_task)


def test_quantiles_and_exceedance_by_hand() -> None:
    s, r = curve(0.8, 0.4, 0.1, 0.02), at(0.2, 0.4, 0.8, 1.0)
    # 0.9 of the tasks exceed half of 0.2; 0.25 is half way from 0.4 to 0.1; beyond the limit there is no quantile
    found = quantiles_of(s, r, (0.1, 0.2, 0.6, 0.75, 0.9, 0.99))
    np.testing.assert_allclose(found[0, 0, 0], [0.1, 0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    shares = np.array([0.0, 0.1, 0.2, 0.6, 0.8, 0.9, 1.0, 3.0])
    every = np.repeat(s[0, 0], len(shares), 0), np.repeat(r[0], len(shares), 0)
    expected = [1.0, 0.9, 0.8, 0.25, 0.1, 0.06, 0.02, 0.02]
    np.testing.assert_allclose(exceedance(*every, shares), expected, rtol=1e-6)


@given(
    arrays(np.float32, 20, elements=SHARES), st.lists(st.floats(0.01, 0.9999), min_size=1, max_size=20, unique=True),
    st.integers(0, 16), st.sampled_from([-np.inf, np.inf, None]),
)  # fmt: skip
def test_a_quantile_lies_before_the_first_threshold_that_no_more_than_the_rest_exceed(
    survival: NDArray[np.float32], levels: list[float], k: int, way: float | None
) -> None:
    levels = sorted(levels)
    near = np.float32(1.0 - levels[0])  # float32 cannot tell it from the level, and the curve stays there
    survival[k : k + 4] = near if way is None else np.nextafter(near, np.float32(way))
    s, r = -np.sort(-survival), np.linspace(0.05, 1.0, 20, dtype=np.float32)
    found = quantiles_of(s[None, None, None], r[None, None], tuple(levels))[0, 0, 0]
    for level, quantile in zip(levels, found, strict=True):
        left = [k for k in range(20) if np.float64(s[k]) <= 1.0 - level]  # of the thresholds, those exceeded seldom
        if not left:
            assert quantile == 1.0
        else:
            before = float(r[left[0] - 1]) if left[0] else 0.0
            assert before <= quantile <= float(r[left[0]])


@given(arrays(np.float32, (40, 3), elements=st.floats(0.0, 2.0, width=32)))
def test_thresholds_of_a_task_have_the_same_bits_alone_and_among_others(now: NDArray[np.float32]) -> None:
    x = using(*np.zeros(40))
    x[:, NOW] = now
    whole = thresholds_of(x)
    for i in (0, 17, 39):
        assert thresholds_of(x[i : i + 1]).tobytes() == whole[i].tobytes()


def test_of_a_curve_or_a_share_that_is_not_known_nothing_is_read() -> None:
    s, r = curve(NAN, NAN), at(0.5, 1.0)
    assert np.isnan(quantiles_of(s, r, (0.5,))).all()
    assert np.isnan(exceedance(s[0, 0], r[0], np.array([0.5]))).all()
    assert np.isnan(exceedance(curve(0.5, 0.1)[0, 0], r[0], np.array([NAN]))).all()
    for loss in (log_loss, crps):
        assert np.isnan(loss(s, r, np.full((1, 1, 1), 0.5, np.float32))).all()
        assert np.isnan(loss(curve(0.5, 0.1), r, np.full((1, 1, 1), NAN, np.float32))).all()


STEPS = arrays(np.float64, 8, elements=st.floats(0.2, 0.9))


@given(STEPS, STEPS, st.floats(0.001, 0.999))
def test_quantiles_and_exceedance_are_inverse_to_each_other(
    steps: NDArray[np.float64], gaps: NDArray[np.float64], level: float
) -> None:
    s = np.cumprod(steps).astype(np.float32)
    r = (np.cumsum(gaps) / gaps.sum()).astype(np.float32)
    quantile = quantiles_of(s[None, None, None], r[None, None], (level,))[0, 0, 0, 0]
    back = exceedance(s[None], r[None], np.array([quantile]))[0]
    if 1 - level >= s[-1]:
        assert back == pytest.approx(1 - level, rel=1e-5)
    else:
        assert quantile == 1.0
        assert back == pytest.approx(s[-1])


@given(STEPS, st.floats(0.0, 1.5, width=32))
def test_the_likelihood_of_a_demand_is_what_the_network_is_trained_by(steps: NDArray[np.float64], y: float) -> None:
    r = np.linspace(0.125, 1.0, 8, dtype=np.float32)
    s = np.cumprod(steps)
    demand = np.full((1, 1, 1), y, np.float32)
    logits = torch.from_numpy(np.log(steps / (1 - steps)).astype(np.float32))[None, None, None]
    trained = survival_loss(logits, torch.from_numpy(demand), torch.from_numpy(r)[None, None]).item()
    assert log_loss(s.astype(np.float32)[None, None, None], r[None, None], demand).item() == pytest.approx(
        trained, rel=1e-3
    )


def test_the_likelihood_by_hand() -> None:
    s, r = curve(0.8, 0.4, 0.1), at(0.2, 0.5, 1.0)
    for y, probability in ((0.2, 0.2), (0.3, 0.4), (0.5, 0.4), (1.0, 0.3), (1.1, 0.1)):
        found = log_loss(s, r, np.full((1, 1, 1), y, np.float32))
        assert found.item() == pytest.approx(-np.log(probability), rel=1e-5), y


@given(STEPS, SHARES)
def test_the_crps_is_the_squared_distance_from_what_came(steps: NDArray[np.float64], y: float) -> None:
    s, r = np.cumprod(steps).astype(np.float32), np.linspace(0.125, 1.0, 8, dtype=np.float32)
    grid = (np.arange(4_000) + 0.5) / 4_000
    expected = np.mean((np.interp(grid, [0, *r], [1, *s]) - (y > grid)) ** 2)
    found = crps(s[None, None, None], r[None, None], np.full((1, 1, 1), y, np.float32))
    assert found.item() == pytest.approx(expected, abs=5e-4)


def test_a_curve_that_is_sure_and_right_costs_nothing() -> None:
    s, r = curve(1.0, 0.0, 0.0), at(0.5, 0.500001, 1.0)
    assert crps(s, r, np.full((1, 1, 1), 0.5, np.float32)).item() == pytest.approx(0.0, abs=1e-6)
    assert log_loss(s, r, np.full((1, 1, 1), 0.500001, np.float32)).item() == pytest.approx(0.0)


def test_thresholds_lie_densest_just_above_what_is_used_now() -> None:
    assert sorted(BELOW) == list(BELOW)
    steps = np.diff(ABOVE)
    assert (steps > 0).all()
    assert steps[0] == steps.min()
    assert (steps[:6] < steps[7:].min()).all()
    assert steps.sum() == pytest.approx(1.0)
