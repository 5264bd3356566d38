"""Permutation importance of a forecaster whose every dependence is known."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from reclaim.features.registry import CALENDAR, FEATURE_NAMES, FIRST_SHAPE, FIRST_SINGLE
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.evaluation.importance import (
    Importance,
    columns_alone,
    columns_by_group,
    group_of,
    importance_figure,
    permutation_importance,
)
from reclaim.training.models.forecaster import ALL_HEADS
from reclaim.training.models.network_forecaster import NetworkForecaster
from reclaim.training.models.survival import quantiles_of

T, H, F = len(TARGETS), len(HORIZONS_S), len(FEATURE_NAMES)
SINGLE, GROUPS = columns_alone(FEATURE_NAMES), columns_by_group(FEATURE_NAMES)


class Copies:
    """Is sure of the first feature for every target."""

    quantile_levels = (0.5, 0.9)
    horizons_s = HORIZONS_S
    heads = ALL_HEADS
    threads = 1

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:  # noqa: D102 - the protocol's
        horizons_s = HORIZONS_S if horizon_s is None else (horizon_s,)
        first = x[:, 0].astype(np.float32)
        thresholds = np.stack([first, first * np.float32(1 + 1e-6), np.ones_like(first)], axis=-1)
        thresholds = np.repeat(thresholds[:, None], T, axis=1)
        survival = np.tile(np.array([1.0, 0.0, 0.0], np.float32), (len(x), T, len(horizons_s), 1))
        quantiles = quantiles_of(survival, thresholds, self.quantile_levels)
        return Forecast(survival, thresholds, quantiles, np.zeros((len(x), len(horizons_s))), horizons_s)

    def input_ranges(self) -> None:
        """Return None: there are none."""

    def save(self, folder: Path) -> None:
        """Nothing to keep."""


def rows(n: int, seed: int = 1) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    x = rng.random((n, F)).astype(np.float32)
    y = np.broadcast_to((x[:, 0] + 0.1)[:, None, None], (n, T, H)).astype(np.float32)
    return x, y


def test_only_what_the_forecast_rests_on_is_important() -> None:
    x, y = rows(500)
    found = permutation_importance(Copies(), x, y, horizon_s=3_600, columns=SINGLE)
    assert found.names == FEATURE_NAMES
    assert found.loss == pytest.approx(np.full(T, np.minimum(0.1, 1 - x[:, 0]).mean()), rel=1e-4)
    assert (found.rise[0] > 0.5).all()
    assert (found.rise[1:] == 0).all()
    assert found.top(1).names == (FEATURE_NAMES[0],)
    assert next(iter(found.to_dict())) == FEATURE_NAMES[0]


def test_the_importance_of_two_permuted_rows_by_hand() -> None:
    # who is sure pays the distance: 0.2 and 0.8 of the truths 0.3 and 0.9 are 0.1 off; dealt, 0.5 and 0.7
    x = np.zeros((2, F), np.float32)
    x[:, 0] = [0.2, 0.8]
    y = np.broadcast_to(np.array([0.3, 0.9], np.float32)[:, None, None], (2, T, H)).copy()
    seed = next(s for s in range(50) if np.random.default_rng([s, 0]).permutation(2).tolist() == [1, 0])
    found = permutation_importance(Copies(), x, y, horizon_s=300, columns={"first": [0]}, seed=seed)
    assert found.rise[0] == pytest.approx(np.full(T, (0.5 + 0.7) / (0.1 + 0.1) - 1), rel=1e-4)


def test_the_loss_and_the_known_rows_are_those_of_the_horizon_asked_for() -> None:
    x, y = rows(100)
    y = y.copy()
    y[:, :, 0], y[:50, :, 2] = x[:, :1] + 0.4, np.nan
    by_horizon = [
        permutation_importance(Copies(), x, y, horizon_s=horizon_s, columns={"first": [0]}) for horizon_s in HORIZONS_S
    ]
    assert [found.rows for found in by_horizon] == [100, 100, 50]
    off = [
        np.minimum(d, 1 - x[of, 0]).mean() for d, of in ((0.4, slice(None)), (0.1, slice(None)), (0.1, slice(50, 100)))
    ]
    np.testing.assert_allclose([found.loss[0] for found in by_horizon], off, rtol=1e-4)


def test_every_feature_is_in_one_group_and_a_group_is_permuted_together() -> None:
    assert sorted(k for group in GROUPS.values() for k in group) == list(range(F))
    x, y = rows(300)
    groups = permutation_importance(Copies(), x, y, horizon_s=3_600, columns=GROUPS)
    important = [name for name, rise in zip(groups.names, groups.rise, strict=True) if rise.any()]
    assert important == ["usage statistics"]


class Differences(Copies):
    """Is sure of what the first feature is above the second one."""

    def predict(self, x: NDArray[np.float32], horizon_s: int | None = None) -> Forecast:  # noqa: D102 - the protocol's
        return super().predict(x[:, :1] - x[:, 1:2], horizon_s)


def test_features_that_are_dealt_together_come_from_the_same_row() -> None:
    x, y = rows(100)
    x[:, 1] = x[:, 0] - np.float32(0.25)
    apart = {"first": [0], "second": [1], "both": [0, 1]}
    found = permutation_importance(Differences(), x, np.full_like(y, 0.5), horizon_s=3_600, columns=apart)
    first, second, both = found.rise[:, 0]
    assert first > 0.1
    assert second > 0.1
    assert both == pytest.approx(0, abs=1e-5)


def test_the_seed_chooses_rows_and_threads_and_neighbours_change_nothing() -> None:
    x, y = rows(400)
    found = permutation_importance(Copies(), x, y, horizon_s=3_600, columns=SINGLE, rows=100, repeats=2)
    assert found.rows == 100
    again = permutation_importance(
        Copies(), x, y, horizon_s=3_600, rows=100, repeats=2, threads=2, columns={"one": [0]}
    )
    np.testing.assert_array_equal(again.rise[0], found.rise[0])
    once = permutation_importance(Copies(), x, y, horizon_s=3_600, rows=100, columns={"one": [0]})
    assert found.rise[0] == pytest.approx(once.rise[0], rel=0.3)  # a mean of two, no sum


def test_targets_and_rows_that_are_not_known_do_not_count() -> None:
    x, y = rows(200)
    y[:, 2] = np.nan
    y[100:] = np.nan
    found = permutation_importance(Copies(), x, y, horizon_s=3_600, columns={"first": [0]})
    assert found.rows == 100
    assert np.isnan(found.rise[0, 2])
    assert found.mean[0] == pytest.approx(found.rise[0, :2].mean())
    assert found.to_dict()["first"][TARGETS[2]] is None
    nothing = permutation_importance(Copies(), x, np.full_like(y, np.nan), horizon_s=3_600, columns={"first": [0]})
    assert nothing.rows == 0
    assert np.isnan(nothing.mean).all()


def test_no_row_is_drawn_twice_and_a_target_without_a_loss_has_no_rise() -> None:
    # who is sure pays the distance: rows are off by 1/2, 1/4, 1/8, ..., so that a sum says which of them are in it
    off = 0.5 ** np.arange(1, 9)
    x = np.zeros((8, F), np.float32)
    y = np.broadcast_to(off[:, None, None], (8, T, H)).astype(np.float32)
    for seed in range(5):
        found = permutation_importance(Copies(), x, y, horizon_s=300, columns={"a": [0]}, rows=7, seed=seed)
        left_out = off.sum() - 7 * found.loss[0]
        assert np.isclose(off, left_out, rtol=1e-4).sum() == 1
    never_off = permutation_importance(Copies(), x, np.zeros_like(y), horizon_s=300, columns={"a": [0]})
    assert (never_off.loss == 0).all()
    assert np.isnan(never_off.rise).all()


def test_the_highest_rises_come_first_unknown_ones_last_and_the_widest_is_of_any_target() -> None:
    rise = np.array([[np.nan] * T, [0.1] * T, [-0.5] + [0.9] * (T - 1), [0.2] * T])
    found = Importance(("unknown", "low", "high", "middle"), rise, np.ones(T), 10)
    assert found.top(4).names == ("high", "middle", "low", "unknown")
    assert found.top(2).names == ("high", "middle")
    assert found.widest == 0.9
    assert Importance(("unknown",), rise[:1], np.ones(T), 10).widest == 0


@pytest.mark.parametrize(
    ("name", "group"),
    [
        (CALENDAR[0], "calendar"), ("age", "task facts"), ("tier_prod", "task facts"),
        ("memory_limit_change", "task facts"), (FEATURE_NAMES[FIRST_SHAPE], "shape"),
        (FEATURE_NAMES[FIRST_SINGLE - 1], "shape"), ("memory_last", "usage statistics"),
    ],
)  # fmt: skip
def test_a_feature_is_in_the_group_that_its_name_says(name: str, group: str) -> None:
    assert group_of(name) == group


def test_a_network_without_calibration_is_measured(random_forecaster: NetworkForecaster) -> None:
    x, y = rows(300)
    columns = columns_alone(FEATURE_NAMES[:5])
    found = permutation_importance(random_forecaster, x, y, horizon_s=3_600, columns=columns)
    assert (found.rise != 0).any(axis=1).all()


def test_the_figure_shows_the_top_in_percent_a_bar_the_mean_and_a_mark_each_target() -> None:
    rise = np.linspace(0, 0.5, 20)[:, None] * np.linspace(0.5, 1.5, T)
    (axis,) = importance_figure(Importance(FEATURE_NAMES[:20], rise, np.ones(T), 100)).axes
    assert [t.get_text() for t in axis.get_yticklabels()] == [
        name.replace("_", " ") for name in reversed(FEATURE_NAMES[5:20])
    ]
    shown = 100 * rise[:4:-1]
    widths = [bar.get_width() for bar in axis.patches if isinstance(bar, Rectangle)]
    np.testing.assert_allclose(widths, shown.mean(axis=1))
    for t, marks in enumerate(axis.lines):
        np.testing.assert_allclose(np.asarray(marks.get_xdata(), np.float64), shown[:, t])
    assert axis.get_xlim()[1] > shown.max()
