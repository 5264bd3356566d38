"""The resamples that settings ask for, and the intervals that are taken from them."""

import numpy as np
import pytest

from reclaim.replay.open_loop.bootstrap import Bootstrap, bounds
from reclaim.replay.settings import ComparisonConfig


def test_the_settings_give_number_seed_and_confidence_of_the_resamples_each_in_its_place() -> None:
    of = Bootstrap.of(ComparisonConfig(draws=40, seed=3, confidence=0.8))
    assert of == Bootstrap(draws=40, seed=3, confidence=0.8)


def test_an_interval_is_of_the_resamples_without_the_value_itself() -> None:
    # of 0, 1, … 10 the levels are 10 % and 90 %
    values = np.array([100.0, *range(11)])
    found = Bootstrap(draws=11, seed=0, confidence=0.8).interval(values)
    assert found == {"value": 100.0, "low": pytest.approx(1.0), "high": pytest.approx(9.0)}


@pytest.mark.parametrize("unknown", [np.nan, np.inf])
def test_an_interval_needs_nine_of_ten_resamples_and_what_is_unknown_or_infinite_is_left_out(unknown: float) -> None:
    nine = np.array([unknown, *range(9)])
    assert bounds(nine, 0.5) == (2.0, 6.0)
    assert np.isnan(bounds(nine[:9], 0.5)).all()  # 8 of 9
    found = Bootstrap(draws=9, seed=0, confidence=0.5).interval(np.array([unknown, *nine[:9]]))
    assert found == {"value": None, "low": None, "high": None}
