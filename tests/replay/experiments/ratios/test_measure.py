"""The ratios: means of a task by hand, who passes its reservation, and the page of a small cell."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data import windows as w
from reclaim.data.dataset import Dataset
from reclaim.data.schema import RESOURCES
from reclaim.data.windows import Windows
from reclaim.features.feature_set import FeatureSet
from reclaim.replay.experiment import Source
from reclaim.replay.experiments.ratios.measure import (
    EXPERIMENT,
    LEVELS,
    RatiosConfig,
    TaskMeans,
    describe_reservations,
    describe_usage,
)
from reclaim.replay.experiments.ratios.page import summary_table
from reclaim.replay.open_loop.estimates import Estimates
from tests.replay.histories import period_of

Maker = Callable[..., Windows]


def test_a_tasks_mean_weighs_each_window_by_its_length(make_windows: Maker) -> None:
    windows = make_windows([(0.2, 0.4), (0.8, 0.6)], [(1.0, 0.5)], limit=(2.0, 1.0))
    windows.end_us[1] = windows.start_us[1] + 100_000_000  # a third of the other
    means = TaskMeans.lay_out(period_of(windows))
    np.testing.assert_allclose(means.usage, [[(0.1 * 3 + 0.4) / 4, (0.4 * 3 + 0.6) / 4], [0.5, 0.5]])
    reserved = np.array([[2.0, 0.5], [1.0, 0.7], [2.0, 0.5]])
    np.testing.assert_allclose(means.mean(reserved), [[(3 * 1.0 + 0.5) / 4, (3 * 0.5 + 0.7) / 4], [1.0, 0.5]])


def test_tasks_count_by_how_long_they_ran_unless_they_count_alike(make_windows: Maker) -> None:
    cell = period_of(make_windows([(0.2, 0.4)] * 3, [(0.6, 0.8)]))
    by_time, alike = TaskMeans.lay_out(cell, alike=False), TaskMeans.lay_out(cell)
    np.testing.assert_allclose(by_time.weight, [[900.0, 900.0], [300.0, 300.0]])
    half = np.full((4, 2), 0.9)
    assert describe_reservations(half, by_time)["cpu"]["gap"] == pytest.approx(0.9 - (3 * 0.2 + 0.6) / 4)
    assert describe_reservations(half, alike)["cpu"]["gap"] == pytest.approx(0.9 - (0.2 + 0.6) / 2)
    assert describe_usage(by_time.usage[:, 0], by_time.granted[:, 0], by_time.weight[:, 0])["q75"] == pytest.approx(0.2)
    assert describe_usage(alike.usage[:, 0], alike.granted[:, 0], alike.weight[:, 0])["q75"] == pytest.approx(0.6)


def test_what_is_used_beyond_the_limit_takes_nothing_from_the_gap_and_is_told_apart(make_windows: Maker) -> None:
    means = TaskMeans.lay_out(period_of(make_windows([(0.2, 0.4), (3.0, 0.6)], [(0.5, 0.5)])))
    np.testing.assert_allclose(means.usage, [[1.6, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(means.granted, [[0.6, 0.5], [0.5, 0.5]])
    found = describe_reservations(np.ones((3, 2)), means)
    assert found["cpu"]["gap"] == pytest.approx((0.4 + 0.5) / 2)  # of the limit itself: never below 0
    used = describe_usage(means.usage[:, 0], means.granted[:, 0], means.weight[:, 0])
    assert used["over_limit"] == 0.5
    assert used["within_limit"] == pytest.approx(0.55)


def test_windows_of_unknown_usage_or_limit_or_a_limit_of_zero_count_in_no_mean(make_windows: Maker) -> None:
    windows = make_windows([(0.2, 0.4)] * 3, [(0.3, 0.3)])
    windows.usage[1], windows.limit[2, 0], windows.limit[3] = np.nan, np.nan, 0.0
    means = TaskMeans.lay_out(period_of(windows))
    np.testing.assert_allclose(means.usage, [[0.2, 0.4], [np.nan, np.nan]])


def test_the_maximum_stands_in_for_a_mean_of_memory_that_is_not_known(make_windows: Maker) -> None:
    windows = make_windows([(0.2, 0.4)])
    usage = windows.usage.copy()
    usage[:, w.MEMORY_MEAN] = np.nan
    assert TaskMeans.lay_out(period_of(replace(windows, usage=usage))).usage[0, 1] == pytest.approx(0.4)


def test_a_task_is_over_where_any_window_demands_more_than_was_in_force(make_windows: Maker) -> None:
    means = TaskMeans.lay_out(period_of(make_windows([(0.2, 0.4), (0.3, 0.4)], [(0.5, 0.5)])))
    reserved = np.array([[0.2, 0.4], [0.25, 0.4], [0.6, 0.4]])
    assert means.over(reserved).tolist() == [[True, False], [False, True]]
    windows = make_windows([(0.2, 0.4), (0.3, 0.4)])
    windows.limit[1] = 0.0  # nothing was granted, so nothing is judged
    assert TaskMeans.lay_out(period_of(windows)).over(np.array([[0.2, 0.4], [0.0, 0.0]])).tolist() == [[False, False]]


@pytest.fixture(scope="module")
def results(dataset: Path) -> dict[str, Any]:
    source = Source(Dataset.open(dataset), FeatureSet.open(dataset), {})
    return EXPERIMENT.measure(source, RatiosConfig(estimators=("borg", "percentile", "limit"))).results


def test_reservations_lie_between_usage_and_limit_and_narrow_with_the_margin(results: dict[str, Any]) -> None:
    assert json.loads(json.dumps(results, allow_nan=False)) == results
    assert [e["name"] for e in results["estimators"]] == ["borg", "percentile"]
    for resource in RESOURCES:
        assert results["tasks"][resource] == 30
        for estimator in results["estimators"]:
            margins = [estimator["margins"][name][resource] for name in ("baseline", "medium", "aggressive")]
            for key in ("mean", "gap"):
                assert margins[0][key] > margins[1][key] > margins[2][key] > 0.0
            assert margins[0]["over"] <= margins[2]["over"]
            for of in margins:
                assert of["gap"] == pytest.approx(of["mean"] - results["usage"][resource]["within_limit"])
                assert of["quantiles"] == sorted(of["quantiles"])
                assert len(of["quantiles"]) == len(LEVELS)
                assert of["quantiles"][-1] <= 1.0
                assert [of["quantiles"][k] for k in (50, 100, 150)] == [of["q25"], of["median"], of["q75"]]
        assert results["oracle"][resource]["over"] == 0.0


def test_the_reservation_of_a_window_is_the_answer_to_the_window_before(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(estimates: Estimates, _: str) -> dict[str, np.ndarray]:
        windows = estimates.history.windows
        slot = (windows.start_us - windows.start_us[estimates.period.rows].min()) // 300_000_000
        return {"medium": np.where((slot >= 10)[:, None], 0.5, 1.0) * windows.limit}

    monkeypatch.setattr(Estimates, "reservations", answers)
    source = Source(Dataset.open(dataset), FeatureSet.open(dataset), {})
    found = EXPERIMENT.measure(source, RatiosConfig(estimators=("percentile",))).results
    slots = found["dataset"]["test_hours"] * 12
    for resource in RESOURCES:
        mean = found["estimators"][0]["margins"]["medium"][resource]["mean"]
        assert mean == pytest.approx(1 - 0.5 * (slots - 11) / slots)  # the whole limit in slots 0 to 10


def test_the_tables_the_figure_and_the_record_are_made_of_the_results(results: dict[str, Any]) -> None:
    closest = min(results["estimators"], key=lambda e: e["margins"]["aggressive"]["cpu"]["gap"])
    rows = [row for row in summary_table(results).as_records() if row["resource"] == "CPU"]
    assert [row["role"] for row in rows][:2] == ["usage", "statistical"]
    assert rows[1]["estimator"] == closest["name"]
    assert rows[1]["mean gap"] == closest["margins"]["aggressive"]["cpu"]["gap"]
    assert rows[-1]["mean gap"] == results["oracle"]["cpu"]["gap"]
    assert len(summary_table(results).rows) <= 10
    figure = EXPERIMENT.figures["ratios"](results)
    assert figure is not None
    assert [len(ax.lines) for ax in figure.axes] == [1 + 3 + 1] * 2  # usage, borg at three margins, the limit
    spread = EXPERIMENT.page(results)["spread"]
    assert list(spread) == ["CPU", "Memory"]
    assert len(spread["CPU"].rows) == 1 + 2 * 3 + 1  # usage, two estimators at three margins, the oracle
    runs = EXPERIMENT.runs(results)
    assert len(runs) == 6
    assert {column.metric for column in EXPERIMENT.columns} <= set(runs[0].metrics)


def test_alone_with_the_limit_there_are_usage_and_the_oracle(results: dict[str, Any]) -> None:
    alone = {**results, "estimators": []}
    assert [row[1] for row in summary_table(alone).rows] == ["usage", "oracle"] * len(RESOURCES)
    assert EXPERIMENT.page(alone)["best"] == {r: [] for r in RESOURCES}


def test_tables_figure_and_cards_leave_out_a_resource_that_no_task_has_a_limit_of(results: dict[str, Any]) -> None:
    cpu_alone = {**results, "dataset": {**results["dataset"], "judged": ["cpu"]}}
    assert {row["resource"] for row in summary_table(cpu_alone).as_records()} == {"CPU"}
    assert [*EXPERIMENT.page(cpu_alone)["best"]] == ["cpu"]
    assert [*EXPERIMENT.page(cpu_alone)["spread"]] == ["CPU"]
    figure = EXPERIMENT.figures["ratios"](cpu_alone)
    assert figure is not None
    assert len(figure.axes) == 1


def test_the_axis_ends_where_the_page_names_its_end(results: dict[str, Any]) -> None:
    figure = EXPERIMENT.figures["ratios"](results)
    assert figure is not None
    assert figure.axes[0].get_xlim()[1] == EXPERIMENT.page(results)["shown_up_to"]
