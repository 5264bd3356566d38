"""Scores of forecasts, each formula by hand; the parts of a split add up to the whole."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from numpy.typing import NDArray

from reclaim.data.schema import DAY_US
from reclaim.features.groups import AGES, TIER_LABELS, RowKeys
from reclaim.features.targets import HORIZONS_S, TARGETS
from reclaim.training.estimators.base import Forecast
from reclaim.training.evaluation.alerts import score_alerts, sorted_rows
from reclaim.training.evaluation.scores import coverage_figure, overall, reliability, reliability_figure, score_forecast
from reclaim.training.models.survival import crps

LEVELS = (0.5, 0.9)
T, H = len(TARGETS), len(HORIZONS_S)
NAN = float("nan")


def forecast_of(quantiles: list[list[float]], probability: list[float]) -> Forecast:
    """Return curves of two quantiles, the same for every target and horizon."""
    of_all = np.broadcast_to(np.array(quantiles)[:, None, None, :], (len(quantiles), T, H, len(LEVELS)))
    return of_quantiles(of_all.copy(), np.repeat(np.array(probability)[:, None], H, axis=1))


def of_quantiles(quantiles: NDArray[np.float64], probability: NDArray[np.float64]) -> Forecast:
    """Return a forecast whose curves go through the quantiles of the first horizon, and reach 0 at the limit."""
    n = len(quantiles)
    survival = np.tile(np.array([*(1 - np.array(LEVELS)), 0.0], np.float32), (n, T, H, 1))
    survival[np.isnan(quantiles[..., 0])] = NAN
    thresholds = np.concatenate([quantiles[:, :, 0], np.ones((n, T, 1))], axis=-1).astype(np.float32)
    return Forecast(survival, thresholds, quantiles.astype(np.float32), probability)


def truth_of(y: list[float], oom: list[float]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    every = np.broadcast_to(np.array(y, np.float32)[:, None, None], (len(y), T, H)).copy()
    return every, np.repeat(np.array(oom, np.float32)[:, None], H, axis=1)


def keys_of(tier: list[int], age: list[int], task: list[int] | None = None) -> RowKeys:
    n = len(tier)
    end_us = np.arange(1, n + 1) * 300_000_000
    return RowKeys(np.array(tier), np.array(age), np.array(task or range(n)), end_us - 300_000_000, end_us)


FORECAST = forecast_of([[0.4, 0.6], [0.2, 0.8], [0.1, 0.3], [NAN, NAN]], [0.1, 0.2, 0.8, NAN])
Y, OOM = truth_of([0.5, 0.1, 0.6, 0.5], [0.0, 0.0, 1.0, 1.0])


def test_the_scores_of_quantiles_by_hand() -> None:
    scores = score_forecast(FORECAST, Y, OOM, LEVELS)["cpu"]["300s"]
    at_50 = (0.5 * 0.1 + 0.5 * 0.1 + 0.5 * 0.5) / 3
    at_90 = (0.1 * 0.1 + 0.1 * 0.7 + 0.9 * 0.3) / 3
    usage = (0.5 + 0.1 + 0.6) / 3
    expected = {
        "rows": 3,
        "pinball": (at_50 + at_90) / 2,
        "pinball_over_usage": (at_50 + at_90) / 2 / usage,
        "log_loss": -np.log(0.4 * 0.5 * 0.1) / 3,  # between the two quantiles, below both, above both
        "crps": crps(FORECAST.survival, FORECAST.thresholds, Y)[:3, 0, 0].mean(),
        "coverage_error": ((0.5 - 1 / 3) + (0.9 - 2 / 3)) / 2,
        "width": (0.2 + 0.6 + 0.2) / 3,
        "pinball_over_usage_0.5": at_50 / usage,
        "pinball_over_usage_0.9": at_90 / usage,
        "coverage_0.5": 1 / 3,
        "coverage_0.9": 2 / 3,
        "coverage_error_0.5": 1 / 3 - 0.5,
        "coverage_error_0.9": 2 / 3 - 0.9,
    }
    assert scores == pytest.approx(expected, rel=1e-6)


def test_the_width_is_the_distance_of_the_highest_from_the_lowest_of_any_number_of_quantiles() -> None:
    highest = FORECAST.quantiles[..., -1:] + np.float32(0.1)
    three = replace(FORECAST, quantiles=np.concatenate([FORECAST.quantiles, highest], axis=-1))
    scores = score_forecast(three, Y, OOM, (*LEVELS, 0.99))["cpu"]["300s"]
    assert scores["width"] == pytest.approx((0.3 + 0.7 + 0.3) / 3)


def test_a_quantile_covers_a_demand_that_is_equal_to_it() -> None:
    forecast = forecast_of([[0.4, 1.0], [0.2, 1.0]], [0.1, 0.1])
    scores = score_forecast(forecast, *truth_of([0.4, 1.0], [0.0, 0.0]), LEVELS)["cpu"]["300s"]
    assert (scores["coverage_0.5"], scores["coverage_0.9"]) == (0.5, 1.0)


def test_a_demand_above_the_limit_counts_as_the_limit() -> None:
    at_the_limit, above = (
        score_forecast(FORECAST, *truth_of([y] * 4, [0.0] * 4), LEVELS)["cpu"]["300s"] for y in (1.0, 9.0)
    )
    del at_the_limit["log_loss"], above["log_loss"]  # beyond the limit is an answer of its own to the curve
    assert at_the_limit == above


def test_the_scores_of_the_probability_by_hand() -> None:
    scores = score_forecast(FORECAST, Y, OOM, LEVELS)["oom"]["300s"]
    brier = (0.1**2 + 0.2**2 + 0.2**2) / 3
    expected = {
        "rows": 3,
        "positives": 1,
        "base_rate": 1 / 3,
        "brier": brier,
        "brier_skill": 1 - brier / (1 / 3 * 2 / 3),
        "log_loss": -(np.log(0.9) + np.log(0.8) + np.log(0.8)) / 3,
        "ece": (2 * 0.15 + 1 * 0.2) / 3,  # 0.1 and 0.2 share a bin
        "average_precision": 1.0,
    }
    assert scores == pytest.approx(expected)


def test_without_positives_there_is_a_base_rate_but_no_precision_and_no_skill() -> None:
    scores = score_forecast(FORECAST, Y, np.zeros_like(OOM), LEVELS)["oom"]["300s"]
    assert scores["base_rate"] == scores["positives"] == 0
    assert not {"average_precision", "brier_skill"} & set(scores)


def test_unknown_targets_and_horizons_that_were_not_forecast_have_no_scores() -> None:
    y = Y.copy()
    y[:, :, 0] = NAN
    probability = FORECAST.oom_probability.copy()
    probability[:, 1] = NAN
    scores = score_forecast(replace(FORECAST, oom_probability=probability), y, OOM, LEVELS)
    assert set(scores["memory"]) == {"3600s", "86400s"}
    assert set(scores["oom"]) == {"300s", "86400s"}


def test_a_certain_probability_that_is_wrong_costs_a_finite_log_loss() -> None:
    scores = score_forecast(forecast_of([[0.1, 0.2]], [0.0]), *truth_of([0.1], [1.0]), LEVELS)
    assert scores["oom"]["300s"]["log_loss"] == pytest.approx(-np.log(1e-15))


def test_every_group_has_the_scores_that_its_rows_have_alone() -> None:
    rng = np.random.default_rng(2)
    n = 300
    q = np.sort(rng.random((n, T, H, 2)), axis=-1)
    forecast = of_quantiles(q, rng.random((n, H)))
    y, oom = rng.random((n, T, H)).astype(np.float32), (rng.random((n, H)) < 0.2).astype(np.float32)
    y[rng.random(y.shape) < 0.1] = NAN
    tier, age = rng.choice([0, 1, 4], n), rng.choice([0, 2, len(AGES) - 1], n)
    keys = keys_of(list(tier), list(age), list(rng.integers(0, 20, n)))
    scores = score_forecast(forecast, y, oom, LEVELS, keys=keys)
    assert list(scores["tiers"]) == [TIER_LABELS[k] for k in (0, 1, 4)]
    assert list(scores["ages"]) == [AGES[0], AGES[2], AGES[-1]]
    for split, key, labels in (("tiers", tier, TIER_LABELS), ("ages", age, AGES)):
        for name, of_group in scores[split].items():
            rows = key == labels.index(name)
            alone = score_forecast(forecast.take(rows), y[rows], oom[rows], LEVELS, keys=keys.take(rows))
            for target, horizons in overall(alone).items():
                for horizon, values in horizons.items():
                    assert of_group[target][horizon] == pytest.approx(values), (name, target, horizon)
    whole = score_forecast(forecast, y, oom, LEVELS)
    assert scores["oom"]["3600s"]["positives"] == whole["oom"]["3600s"]["positives"] == oom[:, 1].sum() > 1
    for target in TARGETS:
        for horizon, values in whole[target].items():
            assert scores[target][horizon] == pytest.approx(values)
    assert {"recall_at_10", "events", "task_days"} <= set(scores["oom"]["3600s"])


def test_every_target_and_horizon_is_scored_by_what_was_forecast_of_it() -> None:
    rng = np.random.default_rng(4)
    n = 200
    survival = np.sort(rng.random((n, T, H, 3)), axis=-1)[..., ::-1].astype(np.float32)
    thresholds = np.sort(rng.random((n, T, 3)), axis=-1).astype(np.float32)
    quantiles = np.sort(rng.random((n, T, H, 2)), axis=-1).astype(np.float32)
    forecast = Forecast(survival, thresholds, quantiles, rng.random((n, H)))
    y, oom = rng.random((n, T, H)).astype(np.float32), (rng.random((n, H)) < 0.3).astype(np.float32)
    y[rng.random(y.shape) < 0.1], oom[rng.random(oom.shape) < 0.1] = NAN, NAN
    keys = keys_of([0] * n, [0] * n, list(np.repeat(np.arange(4), n // 4)))
    keys = replace(keys, start_us=keys.start_us - 10 * DAY_US)  # of so many task-days that some alerts are allowed
    scores = score_forecast(forecast, y, oom, LEVELS, keys=keys)
    for h, horizon_s in enumerate(HORIZONS_S):
        for t, target in enumerate(TARGETS):
            everywhere = Forecast(
                np.broadcast_to(survival[:, t : t + 1, h : h + 1], survival.shape).copy(),
                np.broadcast_to(thresholds[:, t : t + 1], thresholds.shape).copy(),
                np.broadcast_to(quantiles[:, t : t + 1, h : h + 1], quantiles.shape).copy(), forecast.oom_probability,
            )  # fmt: skip
            same = np.broadcast_to(y[:, t : t + 1, h : h + 1], y.shape).copy()
            expected = score_forecast(everywhere, same, oom, LEVELS)["cpu"]["300s"]
            assert scores[target][f"{horizon_s}s"] == expected, (target, horizon_s)
        known, said = np.isfinite(oom[:, h]), forecast.oom_probability[:, h]
        raised = score_alerts(sorted_rows(said[known], oom[known, h] > 0.5, keys.take(known)), horizon_s)
        assert scores["oom"][f"{horizon_s}s"].items() >= {k: v for k, v in raised.items() if np.isfinite(v)}.items()


def test_reliability_bins_are_even_in_the_logarithm_and_hold_every_row() -> None:
    probability = np.array([0.0, 5e-6, 2e-5, 0.05, 0.08, 1.0])
    label = np.array([0, 0, 0, 0, 1, 1], np.bool_)
    points = reliability(probability, label)
    np.testing.assert_allclose(
        points, [[2.5e-6, 0, 2, 0], [2e-5, 0, 1, 0], [0.065, 0.5, 2, 1], [1.0, 1.0, 1, 1]], atol=1e-15
    )


def test_the_figures_have_a_panel_per_horizon_and_a_line_for_each_series() -> None:
    scores = score_forecast(FORECAST, Y, OOM, LEVELS)
    assert [len(ax.lines) for ax in coverage_figure(scores, LEVELS).axes] == [1 + T] * H
    said = {"before": FORECAST.oom_probability, "after": FORECAST.oom_probability / 2}
    figure = reliability_figure(said, OOM)
    assert len(figure.axes) == H
    legend = figure.axes[0].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert sorted(labels) == ["after", "as said", "base rate", "before"]
    assert len(reliability_figure({"before": np.full((3, H), NAN)}, np.zeros((3, H), np.float32)).axes) == H
    only_last = FORECAST.oom_probability.copy()
    only_last[:, :2] = NAN
    assert reliability_figure({"before": only_last}, OOM).axes[2].get_legend() is not None


def test_the_coverage_figure_draws_the_share_of_rows_above_each_quantile_against_the_share_promised() -> None:
    promised, *drawn = coverage_figure(score_forecast(FORECAST, Y, OOM, LEVELS), LEVELS).axes[0].lines
    np.testing.assert_allclose(np.asarray(promised.get_xydata(), np.float64), [[0.5, 0.5], [0.1, 0.1]])
    for line in drawn:  # of three rows two are above the first quantile, one is above the second
        np.testing.assert_allclose(np.asarray(line.get_xydata(), np.float64), [[0.5, 2 / 3], [0.1, 1 / 3]])


def test_an_error_bar_is_the_root_of_the_variance_of_a_share_of_so_few_rows() -> None:
    probability = np.full((4, H), 0.5)
    axis = reliability_figure({"before": probability}, truth_of([0.1] * 4, [1.0, 0.0, 0.0, 0.0])[1]).axes[0]
    (bar,) = (collection for collection in axis.collections if isinstance(collection, LineCollection))
    error = np.sqrt(1 / 4 * 3 / 4 / 4)  # of one in four
    np.testing.assert_allclose(bar.get_segments()[0], [[0.5, 1 / 4 - error], [0.5, 1 / 4 + error]])
