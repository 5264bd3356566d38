"""Tests that the estimator of machines gives each set and resource its own answer, and counts windows as seen."""

from __future__ import annotations

import numpy as np

from reclaim.data.windows import CPU_MEAN, MEMORY_MAX, demand, empty_windows
from reclaim.features.registry import AT, N_FEATURES
from reclaim.features.targets import TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.machines.curve import MachineCurve
from reclaim.training.machines.estimator import BOUND, MachineEstimator
from reclaim.training.machines.terms import (
    N_SHARES,
    N_TERMS,
    NEWCOMER_WINDOWS,
    S_PASSED,
    S_PAST,
    T_BAND,
    T_LIMIT,
    T_NEW,
    shares_of,
)


def test_each_set_and_resource_is_answered_by_its_own_curve_and_margin() -> None:
    # with bandwidths of 0 the bound is the margin over the largest rate, 16 over the mean limit
    sums = np.zeros((3, 2, N_TERMS))
    sums[..., T_LIMIT] = np.array([[1.0, 1.0], [1.0, 1e-3], [1e-3, 1.0]])
    estimator = MachineEstimator(BOUND, 3_600, (1.0, 2.0))
    reserved = estimator.at([1.6, 3.2], sums)
    np.testing.assert_allclose(reserved, [[0.1, 0.4], [0.1, 1e-3], [1e-3, 0.4]])
    # both curves of no peaks seen have a margin of log(1 / budget)
    np.testing.assert_allclose(estimator.peak(sums, np.exp(-1.6)), [[0.1, 0.2], [0.1, 1e-3], [1e-3, 0.2]])
    assert MachineEstimator((MachineCurve(),) * 2, 300, (np.nan, 0.0)).mean_limit == (1.0, 1.0)


def test_shares_are_of_its_own_horizon_and_the_mean_limits_and_written_where_the_caller_has_them() -> None:
    windows, x, horizons_s = empty_windows(2), np.zeros((2, N_FEATURES), np.float32), (300, 3_600, 86_400)
    windows.usage[:, [CPU_MEAN, MEMORY_MAX]], windows.limit[:] = 0.1, [[1.0, 2.0], [3.0, 4.0]]
    x[:, AT.seen] = np.log2(1.0 + np.array([2, 50]))
    for k, (of_cpu, of_memory) in enumerate((
        (AT.cpu_p98_48h, AT.memory_p98_48h), (AT.cpu_p99_12h, AT.memory_p99_12h), (AT.cpu_max_7d, AT.memory_max_7d),
    )):  # fmt: skip
        x[:, of_cpu], x[:, of_memory] = 0.1 + 0.1 * k, 0.5 + 0.1 * k
    past = np.tile(np.array([[0.1, 0.2, 0.3], [0.5, 0.6, 0.7]]).astype(np.float32), (2, 1, 1))
    survival = np.random.default_rng(1).random((2, len(TARGETS), len(horizons_s), 3)).astype(np.float32)
    survival = np.sort(survival, axis=3)[..., ::-1]
    thresholds = np.tile(np.array([0.25, 0.5, 0.9], np.float32), (2, len(TARGETS), 1))
    forecast = Forecast(survival, thresholds, np.zeros(0, np.float32), np.zeros((2, len(horizons_s))), horizons_s)
    room = np.zeros((2, 2, N_SHARES), np.float32)
    estimator = MachineEstimator(BOUND, 3_600, (0.5, 8.0))
    assert estimator.shares(forecast, x, windows, room) is room
    hour = survival[:, :, 1:2]
    seen = np.array([2, 50])
    expected = shares_of(hour, thresholds, demand(windows), windows.limit, seen, past, (0.5, 8.0))
    np.testing.assert_allclose(room, expected, rtol=1e-6)
    np.testing.assert_allclose(room[..., S_PAST:S_PASSED], past, rtol=1e-6)
    np.testing.assert_array_equal(estimator.shares(forecast, x, windows), room)


def test_a_task_is_a_newcomer_by_the_windows_that_its_features_have_seen() -> None:
    seen = np.arange(1, 40)
    n, horizons_s = len(seen), (300, 3_600)
    windows, x = empty_windows(n), np.zeros((n, N_FEATURES), np.float32)
    windows.usage[:, [CPU_MEAN, MEMORY_MAX]], windows.limit[:] = 0.1, 1.0
    x[:, AT.seen] = np.log2(1.0 + seen)
    survival = np.tile(np.array([0.5, 0.0], np.float32), (n, len(TARGETS), len(horizons_s), 1))
    thresholds = np.tile(np.array([0.25, 0.5], np.float32), (n, len(TARGETS), 1))
    forecast = Forecast(survival, thresholds, np.zeros(0, np.float32), np.zeros((n, len(horizons_s))), horizons_s)
    terms = MachineEstimator(BOUND, 3_600, (1.0, 1.0)).terms(forecast, x, windows)
    np.testing.assert_array_equal(terms[..., T_NEW], np.repeat(seen[:, None] < NEWCOMER_WINDOWS, 2, axis=1))
    assert (terms[..., T_BAND:] > 0).all()
