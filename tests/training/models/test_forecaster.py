"""Forecasters: a row's answer is its own alone, to the bit; what is saved comes back; trees know their limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression
from skops import io as skops_io

from reclaim.data.core.files import FULL_DISK
from reclaim.data.errors import HistoryTooShortError, ModelError
from reclaim.features.registry import AT, N_FEATURES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.fitting.trees import fit_trees
from reclaim.training.models.forecaster import Forecaster, Heads
from reclaim.training.models.forward import CHUNK_ROWS
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.oom_calibration import Calibrated, ProbabilityCalibration
from reclaim.training.models.survival import N_THRESHOLDS
from reclaim.training.models.trees import Rows, TreeForecaster
from reclaim.training.settings import QUANTILE_LEVELS, TreeConfig
from tests.folders import full_disk

HOUR = HORIZONS_S.index(3_600)


def _features(n: int, seed: int = 0) -> NDArray[np.float32]:
    x = np.random.default_rng(seed).random((n, N_FEATURES)).astype(np.float32)
    x[::7, 3] = np.nan
    return x


def _same_bits(a: Forecast, b: Forecast) -> bool:
    names = ("survival", "thresholds", "quantiles", "oom_probability")
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in names)


def test_answers_have_their_shape_and_stay_possible(random_forecaster: NetworkForecaster) -> None:
    forecast = random_forecaster.predict(_features(300))
    assert forecast.quantiles.shape == (300, len(TARGETS), len(HORIZONS_S), len(QUANTILE_LEVELS))
    assert forecast.oom_probability.shape == (300, len(HORIZONS_S))
    assert forecast.survival.shape == (300, len(TARGETS), len(HORIZONS_S), N_THRESHOLDS)
    assert forecast.thresholds.shape == (300, len(TARGETS), N_THRESHOLDS)
    assert (np.diff(forecast.survival, axis=-1) <= 0).all()
    assert (np.diff(forecast.quantiles, axis=-1) >= 0).all()
    assert ((forecast.quantiles >= 0) & (forecast.quantiles <= 1)).all()
    assert ((forecast.oom_probability >= 0) & (forecast.oom_probability <= 1)).all()


@pytest.mark.parametrize("batch", [1, 2, 3, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 600])
def test_the_batch_a_row_stands_in_makes_no_difference(random_forecaster: NetworkForecaster, batch: int) -> None:
    x = _features(600)[: max(20 * batch, 50)]
    whole = random_forecaster.predict(x)
    parts = [random_forecaster.predict(x[i : i + batch]) for i in range(0, len(x), batch)]
    joined = Forecast(
        survival=np.concatenate([part.survival for part in parts]),
        thresholds=np.concatenate([part.thresholds for part in parts]),
        quantiles=np.concatenate([part.quantiles for part in parts]),
        oom_probability=np.concatenate([part.oom_probability for part in parts]),
    )
    assert _same_bits(whole, joined)


def test_the_place_of_a_row_makes_no_difference(random_forecaster: NetworkForecaster) -> None:
    x = _features(1000)
    order = np.random.default_rng(1).permutation(1000)
    assert _same_bits(random_forecaster.predict(x).take(order), random_forecaster.predict(x[order]))


def test_no_rows_give_no_answers(random_forecaster: NetworkForecaster) -> None:
    assert random_forecaster.predict(_features(0)).quantiles.shape == (0, 3, 3, len(QUANTILE_LEVELS))


def test_a_full_disk_is_an_error_of_the_system(random_forecaster: NetworkForecaster, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File too large") as refusal, full_disk(after=1_000):
        random_forecaster.save(tmp_path)
    assert refusal.value.errno in FULL_DISK


def test_a_saved_network_comes_back_with_the_same_bits(random_forecaster: NetworkForecaster, tmp_path: Path) -> None:
    random_forecaster.save(tmp_path)
    loaded = NetworkForecaster.load(tmp_path)
    x = _features(500)
    assert _same_bits(random_forecaster.predict(x), loaded.predict(x))


def test_a_network_file_whose_tensors_do_not_fit_its_shape_is_refused(
    random_forecaster: NetworkForecaster, tmp_path: Path
) -> None:
    tensors = random_forecaster.tensors
    NetworkForecaster({**tensors, "head.weight": tensors["head.weight"][1:]}).save(tmp_path)
    with pytest.raises(ValueError, match=r"network\.safetensors: expected tensors of shapes .*head\.weight"):
        NetworkForecaster.load(tmp_path)


def test_a_forecaster_gives_back_the_network_that_it_was_made_of(random_forecaster: NetworkForecaster) -> None:
    again = NetworkForecaster.of(random_forecaster.network)
    x = _features(20)
    assert _same_bits(random_forecaster.predict(x), again.predict(x))


def test_what_was_not_fitted_is_nan_also_when_loaded_and_the_rest_keeps_its_bits(
    random_forecaster: NetworkForecaster, tmp_path: Path
) -> None:
    targets = np.ones((len(TARGETS), len(HORIZONS_S)), np.bool_)
    targets[1], targets[:, 2] = False, False  # no memory, and a trace of less than a day
    heads = Heads(targets, np.array([False, True, False]))
    partly = NetworkForecaster(random_forecaster.tensors, heads)
    partly.save(tmp_path)
    x = _features(300)
    whole = random_forecaster.predict(x)
    for forecaster in (partly, NetworkForecaster.load(tmp_path)):
        forecast = forecaster.predict(x)
        assert forecaster.horizons_s == HORIZONS_S[:2]
        assert np.isnan(forecast.survival[:, ~targets]).all()
        assert np.isnan(forecast.quantiles[:, ~targets]).all()
        assert np.isnan(forecast.oom_probability[:, [0, 2]]).all()
        assert np.array_equal(forecast.quantiles[:, targets], whole.quantiles[:, targets])
        assert np.array_equal(forecast.oom_probability[:, 1], whole.oom_probability[:, 1])
        for h, horizon_s in enumerate(HORIZONS_S):  # asked for alone, each is fitted as it is among the others
            alone = forecaster.predict(x, horizon_s)
            assert np.array_equal(alone.oom_probability[:, 0], forecast.oom_probability[:, h], equal_nan=True)
            assert np.array_equal(alone.survival[:, :, 0], forecast.survival[:, :, h], equal_nan=True)


def test_a_calibrated_forecaster_hands_on_what_it_does_not_change(random_forecaster: NetworkForecaster) -> None:
    calibrated = Calibrated(random_forecaster, ProbabilityCalibration((1.0, 0.5, 2.0), (0.0, -1.0, 0.5)))
    x = _features(50)
    whole, bare = calibrated.predict(x), random_forecaster.predict(x)
    assert whole.quantiles.tobytes() == bare.quantiles.tobytes()
    assert not np.isclose(whole.oom_probability[:, 1:], bare.oom_probability[:, 1:]).any()
    for horizon_s in HORIZONS_S:
        for mine, theirs in zip(calibrated.predict(x, horizon_s).at(horizon_s), whole.at(horizon_s), strict=True):
            assert np.array_equal(mine, theirs)
    ranges = calibrated.input_ranges()
    assert ranges is not None
    assert all(map(np.array_equal, ranges, random_forecaster.input_ranges()))
    calibrated.threads = 2
    assert (calibrated.threads, random_forecaster.threads) == (2, 2)
    calibrated.threads = 1


def test_nothing_is_forecast_of_a_resource_that_was_never_measured_of_a_task(
    random_forecaster: NetworkForecaster,
) -> None:
    x, memory = _features(4), TARGETS.index("memory")
    x[1, AT.memory_max_ever] = np.nan
    bare, forecast = random_forecaster.predict(x), Calibrated(random_forecaster, ProbabilityCalibration()).predict(x)
    never = np.zeros((4, len(TARGETS)), np.bool_)
    never[1, memory] = True
    assert np.isnan(forecast.survival[never]).all()
    assert np.isnan(forecast.quantiles[never]).all()
    assert np.array_equal(forecast.survival[~never], bare.survival[~never])
    assert np.array_equal(forecast.quantiles[~never], bare.quantiles[~never])


def _rows(n: int) -> Rows:
    """Demand is the first feature times a noise; OOM is likely where the second is high."""
    rng = np.random.default_rng(3)
    x = _features(n, 2)
    y = (x[:, 0, None, None] * rng.random((n, 3, 3))).astype(np.float32)
    y[:, 2] = np.nan  # peak CPU is never known
    oom = (rng.random((n, 3)) < 0.5 * (x[:, 1, None] > 0.8)).astype(np.float32)
    return Rows(x, y, oom)


@pytest.fixture(scope="module")
def trees() -> TreeForecaster:
    """Return small trees fitted at one hour."""
    config = TreeConfig(iterations=20, min_leaf=20)
    return fit_trees(_rows(3000), config, horizon_s=3_600, seed=1)


def test_trees_answer_where_they_were_fitted_and_say_nan_elsewhere(trees: TreeForecaster) -> None:
    x = _rows(500).x
    forecast = trees.predict(x)
    assert trees.horizons_s == (3_600,)
    assert forecast.quantiles.shape == (500, len(TARGETS), len(HORIZONS_S), len(QUANTILE_LEVELS))
    fitted = forecast.quantiles[:, :2, HOUR]
    assert (np.diff(fitted, axis=-1) >= 0).all()
    assert (fitted >= 0).all()
    assert (np.diff(forecast.survival[:, :2, HOUR], axis=-1) <= 0).all()
    assert np.isnan(np.delete(forecast.quantiles, HOUR, axis=2)).all()
    assert np.isnan(forecast.quantiles[:, 2]).all()
    assert np.isnan(np.delete(forecast.oom_probability, HOUR, axis=1)).all()
    covered = (_rows(500).y[:, 0, HOUR] <= fitted[:, 0, QUANTILE_LEVELS.index(0.9)]).mean()
    assert 0.8 < covered < 0.98
    likely, unlikely = x[:, 1] > 0.8, x[:, 1] < 0.7
    assert forecast.oom_probability[likely, HOUR].mean() > forecast.oom_probability[unlikely, HOUR].mean() + 0.2


def test_saved_trees_come_back_with_the_same_bits(trees: TreeForecaster, tmp_path: Path) -> None:
    trees.save(tmp_path)
    loaded = TreeForecaster.load(tmp_path)
    x = _features(300)
    assert _same_bits(trees.predict(x), loaded.predict(x))


def test_trees_asked_for_one_horizon_answer_for_it_alone(trees: TreeForecaster) -> None:
    x = _features(100)
    whole = trees.predict(x)
    for horizon_s in HORIZONS_S:
        alone = trees.predict(x, horizon_s)
        assert alone.horizons_s == (horizon_s,)
        for mine, theirs in zip(alone.at(horizon_s), whole.at(horizon_s), strict=True):
            assert np.array_equal(mine, theirs, equal_nan=True)
    forecaster: Forecaster = trees
    assert forecaster.input_ranges() is None


def test_a_tree_file_with_a_strange_type_is_refused(trees: TreeForecaster, tmp_path: Path) -> None:
    trees.save(tmp_path)

    class Strange(LinearRegression):  # type: ignore[misc]  # scikit-learn is untyped
        pass

    skops_io.dump({"steps": [], "classifier": Strange()}, tmp_path / "trees.skops")
    with pytest.raises(ModelError, match="types that no tree model has"):
        TreeForecaster.load(tmp_path)


def test_one_class_of_labels_becomes_a_constant_probability() -> None:
    rows = _rows(200)
    never = Rows(rows.x, rows.y, np.zeros_like(rows.oom))
    forest = fit_trees(never, TreeConfig(iterations=2), horizon_s=300, seed=1)
    assert (forest.predict(rows.x).oom_probability[:, 0] == 0.0).all()


def test_trees_without_a_known_label_foresee_no_probability(tmp_path: Path) -> None:
    rows = _rows(200)
    unknown = Rows(rows.x, rows.y, np.full_like(rows.oom, np.nan))
    forest = fit_trees(unknown, TreeConfig(iterations=2), horizon_s=300, seed=1)
    forest.save(tmp_path)
    for forecaster in (forest, TreeForecaster.load(tmp_path)):
        assert np.isnan(forecaster.predict(rows.x).oom_probability).all()
        assert np.isfinite(forecaster.predict(rows.x).quantiles[:, 0, 0]).all()


def test_trees_need_a_training_row() -> None:
    with pytest.raises(HistoryTooShortError, match="at least 1 training row"):
        fit_trees(_rows(0), TreeConfig(), horizon_s=300, seed=1)
