"""The ratios: means of a task by hand, who passes its reservation, and the page of a small cell."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reclaim.data import windows as w
from reclaim.data.schema import MACHINES, RESOURCES
from reclaim.data.store import Dataset
from reclaim.data.windows import Windows
from reclaim.features.splits import TEST
from reclaim.features.store import FeatureSet
from reclaim.replay.cell import Cell, lay_out_cell
from reclaim.replay.folded import Folded
from reclaim.replay.kinds import Source
from reclaim.replay.openloop import History, known_seconds, previous_rows
from reclaim.replay.ratios import EXPERIMENT, LEVELS, RatiosConfig, TaskMeans, held_of, used_of

Maker = Callable[..., Windows]


def cell_of(windows: Windows) -> Cell:
    n = len(windows)
    history = History(
        windows=windows,
        target=np.zeros((n, 2)),
        next_target=np.zeros((n, 2)),
        period=np.full(n, TEST, np.uint8),
        group=np.zeros(n, np.uint8),
        known_s=known_seconds(windows),
        previous=previous_rows(windows),
        source_row=np.arange(n),
    )
    return lay_out_cell(history, {name: np.zeros(0) for name in MACHINES.names})


def test_a_tasks_mean_weighs_each_window_by_its_length(make_windows: Maker) -> None:
    windows = make_windows([(0.2, 0.4), (0.8, 0.6)], [(1.0, 0.5)], limit=(2.0, 1.0))
    windows.end_us[1] = windows.start_us[1] + 100_000_000  # a third of the other
    means = TaskMeans.of(cell_of(windows))
    np.testing.assert_allclose(means.usage, [[(0.1 * 3 + 0.4) / 4, (0.4 * 3 + 0.6) / 4], [0.5, 0.5]])
    held = np.array([[2.0, 0.5], [1.0, 0.7], [2.0, 0.5]])
    np.testing.assert_allclose(means.mean(held), [[(3 * 1.0 + 0.5) / 4, (3 * 0.5 + 0.7) / 4], [1.0, 0.5]])


def test_tasks_count_by_how_long_they_ran_unless_they_count_alike(make_windows: Maker) -> None:
    cell = cell_of(make_windows([(0.2, 0.4)] * 3, [(0.6, 0.8)]))
    by_time, alike = TaskMeans.of(cell, alike=False), TaskMeans.of(cell)
    np.testing.assert_allclose(by_time.weight, [[900.0, 900.0], [300.0, 300.0]])
    half = np.full((4, 2), 0.9)
    assert held_of(half, by_time)["cpu"]["gap"] == pytest.approx(0.9 - (3 * 0.2 + 0.6) / 4)
    assert held_of(half, alike)["cpu"]["gap"] == pytest.approx(0.9 - (0.2 + 0.6) / 2)
    assert used_of(by_time.usage[:, 0], by_time.granted[:, 0], by_time.weight[:, 0])["q75"] == pytest.approx(0.2)
    assert used_of(alike.usage[:, 0], alike.granted[:, 0], alike.weight[:, 0])["q75"] == pytest.approx(0.6)


def test_what_is_used_beyond_the_limit_takes_nothing_from_the_gap_and_is_told_apart(make_windows: Maker) -> None:
    means = TaskMeans.of(cell_of(make_windows([(0.2, 0.4), (3.0, 0.6)], [(0.5, 0.5)])))
    np.testing.assert_allclose(means.usage, [[1.6, 0.5], [0.5, 0.5]])
    np.testing.assert_allclose(means.granted, [[0.6, 0.5], [0.5, 0.5]])
    found = held_of(np.ones((3, 2)), means)
    assert found["cpu"]["gap"] == pytest.approx((0.4 + 0.5) / 2)  # of the limit itself: never below 0
    used = used_of(means.usage[:, 0], means.granted[:, 0], means.weight[:, 0])
    assert used["over_limit"] == 0.5
    assert used["within_limit"] == pytest.approx(0.55)


def test_windows_of_unknown_usage_or_limit_or_a_limit_of_zero_count_in_no_mean(make_windows: Maker) -> None:
    windows = make_windows([(0.2, 0.4)] * 3, [(0.3, 0.3)])
    windows.usage[1], windows.limit[2, 0], windows.limit[3] = np.nan, np.nan, 0.0
    means = TaskMeans.of(cell_of(windows))
    np.testing.assert_allclose(means.usage, [[0.2, 0.4], [np.nan, np.nan]])


def test_the_maximum_stands_in_for_a_mean_of_memory_that_is_not_known(make_windows: Maker) -> None:
    windows = make_windows([(0.2, 0.4)])
    usage = windows.usage.copy()
    usage[:, w.MEMORY_MEAN] = np.nan
    assert TaskMeans.of(cell_of(replace(windows, usage=usage))).usage[0, 1] == pytest.approx(0.4)


def test_a_task_is_over_where_any_window_demands_more_than_was_in_force(make_windows: Maker) -> None:
    means = TaskMeans.of(cell_of(make_windows([(0.2, 0.4), (0.3, 0.4)], [(0.5, 0.5)])))
    held = np.array([[0.2, 0.4], [0.25, 0.4], [0.6, 0.4]])
    assert means.over(held).tolist() == [[True, False], [False, True]]
    windows = make_windows([(0.2, 0.4), (0.3, 0.4)])
    windows.limit[1] = 0.0  # nothing was granted, so nothing is judged
    assert TaskMeans.of(cell_of(windows)).over(np.array([[0.2, 0.4], [0.0, 0.0]])).tolist() == [[False, False]]


@pytest.fixture(scope="module")
def results(dataset: Path) -> dict[str, Any]:
    source = Source(Dataset.open(dataset), FeatureSet.open(dataset), {}, progress=False)
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
    def answers(folded: Folded, _: str) -> dict[str, np.ndarray]:
        windows = folded.history.windows
        slot = (windows.start_us - windows.start_us[folded.cell.test].min()) // 300_000_000
        return {"medium": np.where((slot >= 10)[:, None], 0.5, 1.0) * windows.limit}

    monkeypatch.setattr(Folded, "reservations", answers)
    source = Source(Dataset.open(dataset), FeatureSet.open(dataset), {}, progress=False)
    found = EXPERIMENT.measure(source, RatiosConfig(estimators=("percentile",))).results
    slots = found["dataset"]["test_hours"] * 12
    for resource in RESOURCES:
        mean = found["estimators"][0]["margins"]["medium"][resource]["mean"]
        assert mean == pytest.approx(1 - 0.5 * (slots - 11) / slots)  # the whole limit in slots 0 to 10


def test_the_page_the_figure_and_the_record_are_made_of_the_results(results: dict[str, Any]) -> None:
    paragraphs = EXPERIMENT.says(results)
    assert len(paragraphs) == len(RESOURCES)
    gap = results["estimators"][0]["margins"]["medium"]["cpu"]["gap"]
    assert f"{100 * gap:.1f} points (medium)" in paragraphs[0]
    assert "`borg`" in paragraphs[0]
    assert "The oracle's reservation lies " in paragraphs[0]
    assert "use more than" not in paragraphs[0]  # nobody uses more than it
    figure = EXPERIMENT.figures["ratios"](results)
    assert figure is not None
    assert [len(ax.lines) for ax in figure.axes] == [1 + 3 + 1] * 2  # usage, borg at three margins, the limit
    assert [section.title for section in EXPERIMENT.sections(results)] == [
        "Usage and reservation over the limit",
        "Memory",
    ]
    runs = EXPERIMENT.runs(results)
    assert len(runs) == 6
    assert {column.metric for column in EXPERIMENT.columns} <= set(runs[0].metrics)


def test_alone_with_the_limit_the_oracle_is_still_held_against_something(results: dict[str, Any]) -> None:
    alone = {**results, "estimators": []}
    for paragraph in EXPERIMENT.says(alone):
        assert paragraph.endswith(" points above usage.")


def test_the_page_says_who_uses_more_than_the_limit_and_where_the_axis_ends(results: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(results))
    changed["usage"]["cpu"]["over_limit"] = 0.25
    assert "On average over their time 25.00 % of them use more than their limit." in EXPERIMENT.says(changed)[0]
    figure = EXPERIMENT.figures["ratios"](results)
    assert figure is not None
    end = figure.axes[0].get_xlim()[1]
    assert f"The axis ends at {end:.0%} of the limit" in EXPERIMENT.sections(results)[0].caption
    said = EXPERIMENT.judged({**results, "inputs": {"config": {"horizon_s": 3600}}})
    assert "held against the one window at whose beginning it was in force" in said
