"""An estimator of a forecaster answers each window by the one that did not learn from it."""

from __future__ import annotations

import numpy as np
import pytest

from reclaim.data.windows import empty_windows
from reclaim.features.registry import N_FEATURES
from reclaim.training.models.estimator import Earlier, ForecastEstimator
from reclaim.training.models.network_forecaster import NetworkForecaster

CUT_US = 900_000_000


@pytest.mark.parametrize("past_cut_us", [(-1, 0, 1), (-1, 0), (1, 2)])
def test_a_window_is_foreseen_by_the_earlier_forecaster_up_to_the_cut_and_by_the_later_one_after_it(
    past_cut_us: tuple[int, ...], random_forecaster: NetworkForecaster, other_forecaster: NetworkForecaster
) -> None:
    windows, x = empty_windows(len(past_cut_us)), np.full((len(past_cut_us), N_FEATURES), 0.3, np.float32)
    windows.end_us[:] = CUT_US + np.array(past_cut_us)
    estimator = ForecastEstimator(random_forecaster, 3_600, earlier=Earlier(CUT_US, other_forecaster))
    later, earlier = (of.predict(x, 3_600).survival for of in (random_forecaster, other_forecaster))
    assert (later != earlier).any(axis=(1, 2, 3)).all()
    for k, past_us in enumerate(past_cut_us):
        expected = earlier if past_us <= 0 else later
        np.testing.assert_array_equal(estimator.forecast(x, windows, 3_600).survival[k], expected[k])
