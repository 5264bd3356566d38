"""Drift of the inputs: nothing on what was trained on, and it names the feature that moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reclaim.features.registry import FEATURE_NAMES
from reclaim.serving.monitoring.drift import FADE_S, SAMPLE_ROWS, Drift
from reclaim.training.models.forecaster import InputRanges
from reclaim.training.models.network import squash

S = 1_000_000
NAMES = ("a", "b", "c")


def _ranges(mean: float = 0.0, scale: float = 1.0, low: float = -1.0, high: float = 1.0) -> InputRanges:
    return InputRanges(*(np.full(3, v, np.float32) for v in (mean, scale, low, high)))


def _x(*rows: tuple[float, float, float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_means_and_shares_are_of_the_squashed_features_in_standard_deviations() -> None:
    drift = Drift(_ranges(mean=0.5, scale=0.5, low=-2.0, high=2.0), NAMES)
    # a: the root is 0.5, z = 0; b: 1, z = 1, and unknown; c: 3, z = 5, outside and seen as 2; -1, z = -3, seen as -2
    drift.observe(_x((0.0625, 1.0, 81.0), (0.0625, np.nan, -1.0)), 0)
    n = drift.numbers()
    assert (n.rows, n.mean) == (2.0, 1.0)
    assert n.outside == pytest.approx(2 / 5)
    assert [(f.name, f.mean, f.outside) for f in n.most] == [("b", 1.0, 0.0), ("a", 0.0, 0.0), ("c", 0.0, 1.0)]


def test_squashed_as_the_network_does() -> None:
    x = np.random.default_rng(1).normal(0, 3, (500, 3)).astype(np.float32)
    drift = Drift(_ranges(low=-50, high=50), NAMES)
    drift.observe(x, 0)
    wanted = {name: float(m) for name, m in zip(NAMES, squash(torch.from_numpy(x)).mean(0), strict=True)}
    assert {f.name: f.mean for f in drift.numbers().most} == pytest.approx(wanted, abs=1e-6)


def test_one_absurd_value_moves_no_mean_beyond_the_range_of_training() -> None:
    drift = Drift(_ranges(), NAMES)
    drift.observe(_x((1e6, np.inf, 0.0), *[(0.0, 0.0, 0.0)] * 99), 0)
    n = drift.numbers()
    assert n.mean == pytest.approx(0.01)
    assert n.most[0].outside == pytest.approx(0.01)


def test_the_share_outside_is_of_the_values_of_all_features() -> None:
    drift = Drift(_ranges(), NAMES)
    drift.observe(_x((16.0, 16.0, 0.0), (16.0, np.nan, 0.0)), 0)  # their roots are 2 and 0
    assert drift.numbers().outside == pytest.approx(3 / 5)
    assert {f.name: f.outside for f in drift.numbers().most} == {"a": 1.0, "b": 1.0, "c": 0.0}


def test_older_rows_fade_with_the_cell_clock_and_a_clock_that_jumps_back_changes_nothing() -> None:
    drift = Drift(_ranges(), NAMES)
    drift.observe(_x((1, 0, 0)), 0)
    drift.observe(_x((0, 0, 0)), int(FADE_S) * S)
    assert drift.numbers().mean == pytest.approx(np.exp(-1) / (1 + np.exp(-1)))
    drift.observe(_x((0, 0, 0)), 0)
    assert drift.numbers().rows == pytest.approx(2 + np.exp(-1))
    drift.observe(_x((0, 0, 0)), int(FADE_S) * S)  # the clock is back where it was
    assert drift.numbers().rows == pytest.approx(3 + np.exp(-1))


def test_a_sample_of_a_large_call_stands_for_all_of_it() -> None:
    many, few = Drift(_ranges(), NAMES), Drift(_ranges(), NAMES)
    few.observe(_x((0, 0, 0)), 0)
    many.observe(_x((0, 0, 0)), 0)
    few.observe(np.full((10, 3), 1, np.float32), 0)
    many.observe(np.full((10 * SAMPLE_ROWS, 3), 1, np.float32), 0)
    assert few.numbers().mean == pytest.approx(10 / 11)
    assert many.numbers().mean == pytest.approx(10 * SAMPLE_ROWS / (10 * SAMPLE_ROWS + 1))
    assert many.numbers().rows == 10 * SAMPLE_ROWS + 1


def test_of_one_row_too_many_for_a_sample_every_second_is_measured() -> None:
    drift, x = Drift(_ranges(), NAMES), np.zeros((SAMPLE_ROWS + 1, 3), np.float32)
    x[1::2] = 16.0
    drift.observe(x, 0)
    assert drift.numbers().outside == 0.0
    drift.observe(x, 0)  # and now the others
    assert drift.numbers().outside == pytest.approx(0.5)


def test_the_five_features_that_drifted_most_are_named() -> None:
    ranges = InputRanges(*(np.full(7, v, np.float32) for v in (0.0, 1.0, -1.0, 1.0)))
    drift = Drift(ranges, "abcdefg")
    drift.observe(np.array([[0.1, 0.5, 0.2, 0.0, 0.4, 0.3, 0.6]], np.float32), 0)
    assert [f.name for f in drift.numbers().most] == list("gbefc")


def test_samples_go_round_all_rows_of_a_cell() -> None:
    drift, x = Drift(_ranges(), NAMES), np.zeros((2 * SAMPLE_ROWS, 3), np.float32)
    x[1::2] = 1.0
    for _ in range(2):
        drift.observe(x, 0)
    assert drift.numbers().mean == 0.5


def test_features_that_the_model_does_not_look_at_are_not_watched() -> None:
    ranges = _ranges()
    ranges.low[1] = ranges.high[1] = 0.0
    drift = Drift(ranges, NAMES)
    drift.observe(_x((0.1, 100, 0.1)), 0)
    assert {f.name for f in drift.numbers().most} == {"a", "c"}
    assert drift.numbers().outside == 0.0


def test_nothing_is_known_before_the_first_row() -> None:
    drift = Drift(_ranges(), NAMES)
    drift.observe(np.zeros((0, 3), np.float32), 0)
    n = drift.numbers()
    assert (n.rows, n.most) == (0.0, ())
    assert np.isnan([n.outside, n.mean]).all()


def test_a_feature_that_moved_is_named() -> None:
    ranges = InputRanges(*(np.full(len(FEATURE_NAMES), v, np.float32) for v in (0.5, 0.2, -3.0, 3.0)))
    x = np.random.default_rng(2).normal(0.5, 0.2, (5_000, len(FEATURE_NAMES))).clip(0).astype(np.float32) ** 4
    drift = Drift(ranges, FEATURE_NAMES)
    drift.observe(x, 0)
    still = drift.numbers()
    assert still.outside < 0.01
    assert still.mean < 0.2
    x[:, FEATURE_NAMES.index("memory_last")] *= 16
    drift.observe(x, 10 * int(FADE_S) * S)
    assert drift.numbers().most[0].name == "memory_last"
    assert drift.numbers().mean > 1.0
