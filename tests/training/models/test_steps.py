"""Steps: the bits of ladders and of their risks, for any curve, in an eighth of the memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reclaim.data.schema import RESOURCES
from reclaim.features.registry import N_FEATURES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.margins import ladder as of_training
from reclaim.training.margins.ladder import N_RUNGS, TOP_RUNG, ladder_of, size_weight
from reclaim.training.margins.own_price import UNKNOWN, risk_of
from reclaim.training.models import steps as of_serving
from reclaim.training.models.steps import N_RISES, NOTHING, Steps, steps_at
from reclaim.training.models.survival import CEILING, FLOOR, N_BELOW, N_THRESHOLDS, NOW, forecast_of

HORIZON_S = HORIZONS_S[1]
MEAN = (0.1, 0.2)


def forecast(n: int, seed: int) -> Forecast:
    """Return a forecast of drawn curves: steep, flat and with equal steps; of some tasks nothing is known."""
    rng = np.random.default_rng(seed)
    x = np.full((n, N_FEATURES), np.nan, np.float32)
    x[:, NOW] = rng.choice([FLOOR, 0.02, 0.3, 0.97, CEILING, 3.0], (n, len(TARGETS))) * rng.uniform(0.9, 1.1, (n, 1))
    passed = rng.uniform(0, 1, (n, len(TARGETS), 1, N_THRESHOLDS)) ** rng.choice([0.001, 0.1, 1.0, 4.0], (n, 1, 1, 1))
    passed[rng.random(passed.shape) < 0.3] = 1.0
    survival = np.cumprod(passed, axis=-1).astype(np.float32)
    survival[rng.random((n, len(TARGETS))) < 0.1] = np.nan
    return forecast_of(survival, x, np.zeros((n, 1)), (HORIZON_S,), (0.5, 0.9))


@settings(max_examples=25, deadline=None)
@example(seed=0)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_reserved_at_every_place_and_its_risk_are_those_of_the_ladder_to_the_bit(seed: int) -> None:
    rng, n = np.random.default_rng(seed), 60
    of, limit = forecast(n, seed), rng.choice([0.001, 0.1, 2.0], (n, 2))
    used = np.where(
        rng.random((n, 2)) < 0.2, np.nan, of.thresholds[:, :2, N_BELOW] * rng.choice([0.5, 1.0, 1.7], (n, 2))
    )
    survival, thresholds = of.survival[:, :2, 0, N_BELOW:], of.thresholds[:, :2, N_BELOW:]
    rungs = ladder_of(survival, thresholds, size_weight(limit, MEAN))
    steps, risk = steps_at(of, HORIZON_S, limit, MEAN, used)
    for place in (*range(N_RUNGS), rng.uniform(0, TOP_RUNG, limit.shape), np.full(limit.shape, np.nan)):
        at = np.broadcast_to(np.float64(place), limit.shape)
        expected = of_training.reserved_at(rungs, at, limit)
        assert of_serving.reserved_at(steps, at, limit).tobytes() == expected.tobytes()
    assert risk is not None
    assert risk.tobytes() == risk_of(rungs, survival, thresholds, used).tobytes()
    assert ((risk[..., 0] == UNKNOWN) == np.isnan(rungs[..., 0])).all()


def test_equal_thresholds_and_a_use_beyond_the_limit_have_the_risk_of_the_ladder() -> None:
    of = forecast(40, seed=1)
    thresholds = of.thresholds.copy()
    thresholds[:, :, N_BELOW + 5 : N_BELOW + 9] = thresholds[:, :, N_BELOW + 5, None]
    thresholds[:, :, -2:] = 1.0
    tied = Forecast(of.survival, thresholds, of.quantiles, of.oom_probability, of.horizons_s)
    limit = np.ones((40, 2))
    for share in (0.3, 1.0, 1.2):
        used = np.full((40, 2), share)
        survival, at = tied.survival[:, :2, 0, N_BELOW:], thresholds[:, :2, N_BELOW:]
        rungs = ladder_of(survival, at, size_weight(limit, MEAN))
        risk = steps_at(tied, HORIZON_S, limit, MEAN, used)[1]
        assert risk is not None
        assert risk.tobytes() == risk_of(rungs, survival, at, used).tobytes()


def test_steps_count_the_rungs_up_to_each_threshold_by_hand() -> None:
    # the first threshold is used now, 0.25, and never passed: it is the cheapest at every price but the last rung
    survival = np.zeros((1, len(TARGETS), 1, N_THRESHOLDS), np.float32)
    x = np.full((1, N_FEATURES), np.nan, np.float32)
    x[:, NOW] = 0.25
    of = forecast_of(survival, x, np.zeros((1, 1)), (HORIZON_S,), (0.5,))
    steps, risk = steps_at(of, HORIZON_S, np.array([[1.0, 4.0]]), MEAN)
    assert risk is None
    assert (steps.rises == TOP_RUNG).all()
    assert steps.now.tolist() == [[0.25, 0.25]]
    limit = np.array([[1.0, 4.0]])
    assert of_serving.reserved_at(steps, np.full((1, 2), 3.0), limit).tolist() == [[0.25, 1.0]]
    assert of_serving.reserved_at(steps, np.full((1, 2), TOP_RUNG - 0.5), limit).tolist() == [[0.625, 2.5]]
    assert of_serving.reserved_at(steps, np.full((1, 2), float(TOP_RUNG)), limit).tolist() == [[1.0, 4.0]]


def test_nothing_is_reserved_of_a_task_without_a_forecast() -> None:
    nothing = Steps(np.full((1, len(RESOURCES), N_RISES), NOTHING, np.uint8), np.zeros((1, len(RESOURCES)), np.float32))
    assert np.isnan(of_serving.reserved_at(nothing, np.zeros((1, 2)), np.ones((1, 2)))).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_steps_do_not_depend_on_neighbours_or_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reclaim.data.core.parallel.ROWS_WORTH_A_THREAD", 2)
    of, limit = forecast(50, seed=5), np.full((50, 2), 0.3)
    whole, risk = steps_at(of, HORIZON_S, limit, MEAN, limit, threads)
    for row in (0, 17, 49):
        alone, its = steps_at(of.take(slice(row, row + 1)), HORIZON_S, limit[:1], MEAN, limit[:1])
        assert alone.rises.tobytes() == whole.rises[row : row + 1].tobytes()
        assert risk is not None
        assert its is not None
        assert its.tobytes() == risk[row : row + 1].tobytes()


def test_steps_are_those_of_the_horizon_that_is_asked_for() -> None:
    of, other, limit = forecast(30, seed=2), forecast(30, seed=3), np.full((30, 2), 0.3)
    both = Forecast(
        np.concatenate([other.survival, of.survival], axis=2), of.thresholds,
        np.concatenate([other.quantiles, of.quantiles], axis=2), np.zeros((30, 2)), (HORIZONS_S[0], HORIZON_S),
    )  # fmt: skip
    (steps, risk), (expected, its) = (steps_at(a, HORIZON_S, limit, MEAN, limit) for a in (both, of))
    np.testing.assert_array_equal(steps.rises, expected.rises)
    assert risk is not None
    assert its is not None
    np.testing.assert_array_equal(risk, its)
