"""Calibrated probabilities: what was said wrongly is put right, and no more than the rows can tell."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from reclaim.data.errors import ModelError
from reclaim.features.targets import HORIZONS_S
from reclaim.training.models.oom_calibration import (
    FEW,
    LARGEST_SLOPE,
    SMALLEST_SLOPE,
    ProbabilityCalibration,
    fit_probability,
)

H = len(HORIZONS_S)


def columns(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the same for every horizon."""
    return np.repeat(values[:, None], H, axis=1)


def labels(values: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the same for every horizon."""
    return np.repeat(values[:, None], H, axis=1).astype(np.float32)


def fit_of_tasks_apart(said: NDArray[np.float64], label: NDArray[np.float32]) -> ProbabilityCalibration:
    """Return the calibration by rows each of which is of another task."""
    return fit_probability(said, label, np.arange(len(said)))


def logistic(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-z))


def overconfident(n: int = 200_000, seed: int = 3) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return probabilities whose log-odds are twice the true ones and one too high, and labels drawn by the true."""
    rng = np.random.default_rng(seed)
    true = rng.normal(-3.0, 1.0, n)
    return columns(logistic(2 * true + 1)), labels(rng.random(n) < logistic(true))


def test_a_stretched_and_shifted_probability_is_put_back() -> None:
    said, label = overconfident()
    calibration = fit_of_tasks_apart(said, label)
    assert calibration.notes == ()
    assert calibration.slope == pytest.approx((0.5,) * H, abs=0.02)
    assert calibration.intercept == pytest.approx((-0.5,) * H, abs=0.05)
    after = calibration.apply(said)
    assert after.mean() == pytest.approx(label.mean(), rel=0.01)
    assert np.mean((after - label) ** 2) < np.mean((said - label) ** 2)


def test_two_values_by_hand() -> None:
    # slope 2, intercept log 3: odds of 1/4 become 3/16, and 3/19 is the probability of those odds
    calibration = ProbabilityCalibration((2.0,) * H, (float(np.log(3)),) * H)
    np.testing.assert_allclose(calibration.apply(columns(np.array([0.2, 0.5]))), columns(np.array([3 / 19, 3 / 4])))


def test_each_horizon_has_a_slope_and_an_intercept_of_its_own_whichever_are_asked_for() -> None:
    # odds of 1/4 squared are 1/16, as they are 1/4, and times 3 are 3/4
    calibration = ProbabilityCalibration((2.0, 1.0, 1.0), (0.0, 0.0, float(np.log(3))))
    expected = np.array([1 / 17, 1 / 5, 3 / 7])
    np.testing.assert_allclose(calibration.apply(columns(np.array([0.2])))[0], expected)
    some = [2, 0]
    np.testing.assert_allclose(
        calibration.apply(np.full((1, 2), 0.2), tuple(HORIZONS_S[h] for h in some))[0], expected[some]
    )


def test_each_horizon_is_fitted_to_its_own_rows_alone() -> None:
    rng = np.random.default_rng(5)
    said = rng.uniform(0.01, 0.6, (2_000, H))
    label = (rng.random((2_000, H)) < said ** np.array([0.5, 1.0, 2.0])).astype(np.float32)
    label[rng.random(label.shape) < 0.2] = np.nan
    fitted = fit_of_tasks_apart(said, label)
    assert len(set(fitted.slope)) == H
    for h in range(H):
        known = np.isfinite(label[:, h])
        alone = fit_of_tasks_apart(columns(said[known, h]), labels(label[known, h] > 0))
        assert (fitted.slope[h], fitted.intercept[h]) == (alone.slope[h], alone.intercept[h])


def test_of_a_constant_probability_only_the_level_is_set_as_worked_by_hand() -> None:
    n, k = 1_000, FEW - 1
    calibration = fit_of_tasks_apart(columns(np.full(n, 0.2)), labels(np.arange(n) < k))
    smoothed = (k * (k + 1) / (k + 2) + (n - k) / (n - k + 2)) / n  # Platt's labels
    assert calibration.apply(columns(np.array([0.2])))[0] == pytest.approx([smoothed] * H, rel=1e-9)


def underconfident(n: int = 20_000) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return probabilities whose log-odds are half the true ones, and labels drawn by the true."""
    rng = np.random.default_rng(3)
    true = rng.normal(-3.0, 1.0, n)
    return columns(logistic(true / 2)), labels(rng.random(n) < logistic(true))


def test_few_positive_tasks_may_flatten_the_probability_and_not_sharpen_it() -> None:
    said, label = underconfident()
    task = np.arange(len(said))
    assert fit_probability(said, label, task).slope == pytest.approx((2.0,) * H, rel=0.1)
    positive = label[:, 0] > 0.5
    few = np.where(positive, task % (FEW - 1), task)
    calibration = fit_probability(said, label, few)
    assert calibration.slope == (1.0,) * H
    assert "is 1, not 2.0" in calibration.notes[0]
    assert f"{FEW - 1} positive tasks among 20000 validation rows" in calibration.notes[0]
    assert calibration.apply(said).mean() == pytest.approx(label.mean(), rel=0.01)  # the level is set all the same
    enough = np.where(positive, task % FEW, task)
    assert fit_probability(said, label, enough).slope == pytest.approx((2.0,) * H, rel=0.1)
    sure, label = overconfident(20_000)
    few = np.where(label[:, 0] > 0.5, task % (FEW - 1), task)
    assert fit_probability(sure, label, few) == fit_of_tasks_apart(sure, label)


def test_without_positives_the_probability_is_left_as_it_is_to_the_bit() -> None:
    said = columns(np.random.default_rng(1).random(50))
    calibration = fit_of_tasks_apart(said, np.zeros((50, H), np.float32))
    assert (calibration.slope, calibration.intercept) == ((1.0,) * H, (0.0,) * H)
    assert calibration.apply(said).tobytes() == said.tobytes()
    assert "0 positive among 50" in calibration.notes[0]
    nothing = fit_of_tasks_apart(np.full((5, H), np.nan), np.full((5, H), np.nan, np.float32))
    assert nothing.slope == (1.0,) * H
    assert nothing.notes == ("OOM: no validation row has a label, so the probability is as the model says it",)


def test_where_every_row_is_positive_the_probability_is_left_as_it_is_with_a_note() -> None:
    calibration = fit_probability(columns(np.linspace(0.1, 0.9, 50)), labels(np.ones(50, np.bool_)), np.arange(50) // 2)
    assert (calibration.slope, calibration.intercept) == ((1.0,) * H, (0.0,) * H)
    assert calibration.notes == tuple(
        f"OOM within {horizon_s} s: 25 positive tasks among 50 validation rows, so the probability is as the model "
        "says it"
        for horizon_s in HORIZONS_S
    )


def test_a_note_names_the_horizons_without_a_label_and_those_without_a_forecast() -> None:
    said, label = overconfident(20_000)
    said[:, 0], label[:, -1] = np.nan, np.nan
    unlabelled, unforeseen = fit_of_tasks_apart(said, label).notes
    assert unlabelled.startswith(f"OOM within {HORIZONS_S[-1]} s: no validation row has a label")
    assert unforeseen.startswith(f"OOM within {HORIZONS_S[0]} s: nothing is forecast")
    (alone,) = fit_of_tasks_apart(np.full_like(said, np.nan), labels(label[:, 0] > 0)).notes
    assert alone.startswith("OOM: nothing is forecast")


def test_a_reversed_probability_is_not_turned_around() -> None:
    said, label = overconfident(20_000)
    calibration = fit_of_tasks_apart(1 - said, label)
    assert calibration.slope == (SMALLEST_SLOPE,) * H
    assert "is 0.01, not -" in calibration.notes[0]
    after = calibration.apply(1 - said)
    assert after.mean() == pytest.approx(label.mean(), rel=0.01)
    assert after.max() < 2 * after.min()


def test_labels_that_a_threshold_separates_give_a_finite_fit() -> None:
    said = np.linspace(0.01, 0.99, 400)
    calibration = fit_of_tasks_apart(columns(said), labels(said > 0.5))
    assert 1.0 <= calibration.slope[0] <= LARGEST_SLOPE
    assert np.isfinite(calibration.apply(columns(said))).all()
    near = 0.5 + (said - 0.5) / 20  # log-odds within a tenth of 0, which only a steep slope could part
    assert fit_of_tasks_apart(columns(near), labels(said > 0.5)).slope == (LARGEST_SLOPE,) * H


def test_probabilities_of_0_and_1_stay_probabilities_and_nan_stays_nan() -> None:
    calibration = ProbabilityCalibration((3.0,) * H, (-1.0,) * H)
    after = calibration.apply(columns(np.array([0.0, 1.0, np.nan])))
    assert (after[0] >= 0).all()
    assert (after[0] < 1e-20).all()
    assert (after[1] > 1 - 1e-9).all()
    assert np.isnan(after[2]).all()


@given(
    arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1)),
    st.floats(0.05, 8),
    st.floats(-8, 8),
)
def test_order_is_kept_and_a_row_does_not_depend_on_its_neighbours(
    said: NDArray[np.float64], slope: float, intercept: float
) -> None:
    calibration = ProbabilityCalibration((slope,) * H, (intercept,) * H)
    after = calibration.apply(columns(said))
    assert ((after >= 0) & (after <= 1)).all()
    alone = np.concatenate([calibration.apply(row[None]) for row in columns(said)])
    assert alone.tobytes() == after.tobytes()
    wide = np.zeros((len(said), 3 * H))[:, ::3]  # memory with gaps
    wide[:] = columns(said)
    assert calibration.apply(wide).tobytes() == after.tobytes()
    order = np.argsort(said, kind="stable")
    assert (np.diff(after[order, 0]) >= -1e-15).all()


def test_it_survives_the_bundle_and_a_damaged_one_is_refused() -> None:
    calibration = ProbabilityCalibration((0.5, 1.0, 2.0), (0.1, 0.0, -1 / 3), ("few",))
    facts = json.loads(json.dumps(calibration.to_dict()))
    assert ProbabilityCalibration.from_dict(facts) == calibration
    del facts["horizons"]["300s"]["slope"]
    with pytest.raises(ModelError, match=r"damaged.*train again"):
        ProbabilityCalibration.from_dict(facts)
