"""The out-of-memory model answers as its network does, row by row, and reads no more than its inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reclaim.features.registry import FIRST_RELATED
from reclaim.features.targets import HORIZONS_S
from reclaim.training.models.forecaster import NetworkForecaster
from reclaim.training.models.network import squash
from reclaim.training.models.oom_calibration import Calibrated, ProbabilityCalibration
from reclaim.training.models.oom_model import DEPTH, INPUTS, WIDTH, OomModel

H = len(HORIZONS_S)


def model(n_features: int = FIRST_RELATED, fitted: tuple[bool, ...] = (True,) * H) -> OomModel:
    """Return a model of random weights."""
    rng = np.random.default_rng(1)
    read = np.isin(np.arange(n_features), INPUTS)
    tensors = {
        "mean": np.where(read, 0.3, 0.0), "scale": np.ones(n_features),
        "low": np.where(read, -2.0, 0.0), "high": np.where(read, 2.0, 0.0),
        "head.weight": rng.normal(0, 0.3, (H, WIDTH)), "head.bias": rng.normal(0, 1, H),
    }  # fmt: skip
    for k in range(DEPTH):
        tensors[f"body.{3 * k}.weight"] = rng.normal(0, 0.2, (WIDTH, WIDTH if k else n_features))
        tensors[f"body.{3 * k}.bias"] = rng.normal(0, 0.2, WIDTH)
    return OomModel({name: values.astype(np.float32) for name, values in tensors.items()}, np.array(fitted))


def rows(n: int = 130, n_features: int = FIRST_RELATED) -> NDArray[np.float32]:
    """Return features, some unknown."""
    rng = np.random.default_rng(2)
    x = rng.normal(0, 2, (n, n_features)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = np.nan
    return x


def test_it_says_what_a_network_of_its_weights_says() -> None:
    oom, x = model(), rows()
    t = {name: torch.from_numpy(values) for name, values in oom.tensors.items()}
    z = torch.nan_to_num((squash(torch.from_numpy(x)) - t["mean"]) / t["scale"], nan=0.0).clamp(t["low"], t["high"])
    for k in range(DEPTH):
        z = torch.nn.functional.silu(z @ t[f"body.{3 * k}.weight"].T + t[f"body.{3 * k}.bias"])
    expected = torch.sigmoid(z @ t["head.weight"].T + t["head.bias"])
    np.testing.assert_allclose(oom.predict(x), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_and_a_horizon_alone_get_the_same_bits(threads: int) -> None:
    oom, x = model(), rows()
    whole = oom.predict(x, threads=threads)
    for i in (0, 63, 64, 129):
        np.testing.assert_array_equal(oom.predict(x[i : i + 1])[0], whole[i])
    for h, horizon_s in enumerate(HORIZONS_S):
        np.testing.assert_array_equal(oom.predict(x, (horizon_s,))[:, 0], whole[:, h])


def test_other_features_change_nothing() -> None:
    oom, x = model(), rows()
    other = x.copy()
    other[:, ~np.isin(np.arange(x.shape[1]), INPUTS)] += 7
    np.testing.assert_array_equal(oom.predict(other), oom.predict(x))
    other[:, INPUTS[0]] += 7
    assert (oom.predict(other) != oom.predict(x)).any()


def test_a_horizon_that_was_not_fitted_is_unknown() -> None:
    assert np.isnan(model(fitted=(False, True, True)).predict(rows())).all(axis=0).tolist() == [True, False, False]


def test_saved_and_loaded_it_says_the_same_and_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert OomModel.load(tmp_path) is None
    oom = model(fitted=(False, True, True))
    oom.save(tmp_path)
    again = OomModel.load(tmp_path)
    assert again is not None
    np.testing.assert_array_equal(again.predict(rows()), oom.predict(rows()))


def test_a_calibrated_forecaster_takes_the_probability_from_it_and_the_rest_from_the_forecaster(
    random_forecaster: NetworkForecaster, tmp_path: Path
) -> None:
    oom, x = model(), rows()
    calibration = ProbabilityCalibration((2.0,) * H, (0.5,) * H)
    forecaster = Calibrated(random_forecaster, calibration, oom)
    answer, bare = forecaster.predict(x), random_forecaster.predict(x)
    np.testing.assert_array_equal(answer.quantiles, bare.quantiles)
    np.testing.assert_array_equal(answer.oom_probability, calibration.apply(oom.predict(x)))
    alone = forecaster.predict(x, 3_600)
    np.testing.assert_array_equal(alone.oom_probability[:, 0], answer.oom_probability[:, HORIZONS_S.index(3_600)])
    forecaster.save(tmp_path)
    loaded = Calibrated.load(NetworkForecaster.load(tmp_path), tmp_path)
    np.testing.assert_array_equal(loaded.predict(x).oom_probability, answer.oom_probability)
