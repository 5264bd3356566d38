"""Trees ask their model at every threshold of a row, and answer without opening a file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reclaim.features.registry import N_FEATURES
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.models.survival import N_THRESHOLDS, thresholds_of
from reclaim.training.models.trees import TreeForecaster
from tests.serving.descriptors import no_descriptors


class Halves:
    """A fitted model of which every step is passed by half of the tasks; keeps what it read."""

    def __init__(self) -> None:
        self.read: list[NDArray[np.float32]] = []

    def predict_proba(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return a half for both classes of each row."""
        self.read.append(x)
        return np.full((len(x), 2), 0.5)


def _forecaster(model: Halves) -> TreeForecaster:
    return TreeForecaster([model] * len(TARGETS), 0.1, horizon_s=HORIZONS_S[0])


def test_a_curve_is_the_product_of_steps_asked_with_their_position_and_the_logarithm_of_their_threshold() -> None:
    x = np.zeros((2, N_FEATURES), np.float32)
    x[1] = 0.5
    model = Halves()
    forecast = _forecaster(model).predict(x, HORIZONS_S[0])
    np.testing.assert_array_equal(forecast.survival[0, 0, 0], 0.5 ** np.arange(1, N_THRESHOLDS + 1))
    assert forecast.oom_probability[:, 0].tolist() == [0.1, 0.1]
    read = model.read[0].reshape(2, N_THRESHOLDS, N_FEATURES + 2)
    assert (read[1, :, :-2] == 0.5).all()
    np.testing.assert_array_equal(read[:, :, -2], np.tile(np.arange(N_THRESHOLDS), (2, 1)))
    np.testing.assert_array_equal(read[:, :, -1], np.log(thresholds_of(x)[:, 0]))


def test_trees_answer_while_no_file_can_be_opened() -> None:
    trees = _forecaster(Halves())
    x = np.zeros((2, N_FEATURES), np.float32)
    first = trees.predict(x)  # the service's warm-up
    with no_descriptors():
        again = trees.predict(x)
    np.testing.assert_array_equal(first.quantiles, again.quantiles)
