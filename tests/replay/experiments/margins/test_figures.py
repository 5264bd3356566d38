"""The figures: what is in them follows from the results, to the byte."""

import copy
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text

from reclaim.replay.experiments.margins.figures import FIGURES, margins_over_time, reclaimed_at_margins
from reclaim.replay.report.figures import PALETTE, estimator_colours, save_figure
from reclaim.replay.report.page import ReplayReport


def texts(figure: Figure) -> set[str]:
    return {t.get_text() for t in figure.findobj(Text) if isinstance(t, Text)}


def test_the_figure_over_time_draws_usage_limit_and_each_reservation_under_labelled_quarters(
    report: ReplayReport,
) -> None:
    figure = margins_over_time(report.results)
    cpu, memory, events = figure.axes
    assert texts(figure) >= {"usage (mean)", "limit", "reservation, borg", "reservation, percentile"}
    assert [t.get_text() for t in cpu.texts] == ["baseline", "aggressive", "medium", "baseline"]
    assert [ax.get_title(loc="left") for ax in (cpu, memory, events)] == ["CPU", "Memory", "Memory events so far"]
    steps = [p for p in cpu.patches if isinstance(p, StepPatch)]
    drawn = [p.get_data()[0] for p in steps if p.get_label() == "reservation, borg"]
    reserved = report.results["estimators"][0]["sequence"]["reservation"]["cpu"]
    np.testing.assert_allclose(drawn[0], np.array(reserved) * 100)


def test_the_figure_of_margins_draws_a_point_for_each_and_the_violation_beside_it(report: ReplayReport) -> None:
    figure = reclaimed_at_margins(report.results)
    for ax, resource in zip(figure.axes, ("cpu", "memory"), strict=True):
        points = sorted(
            float(np.asarray(line.get_xdata())[0]) for line in ax.lines if line.get_marker() in ("o", "s", "^")
        )
        expected = sorted(
            100 * e["results"][m]["all"]["reclaimed_share"][resource]["value"]
            for e in report.results["estimators"][:2]
            for m in ("baseline", "medium", "aggressive")
        )
        assert points == pytest.approx(expected)
        assert len(ax.texts) == 6
        assert all(t.get_text().endswith(" %") for t in ax.texts)


def test_the_figure_of_margins_has_nine_estimators_the_best_first_and_all_that_the_summary_names(
    report: ReplayReport,
) -> None:
    borg, others = report.results["estimators"][0], report.results["estimators"][1:]
    many = []
    for k in range(12):
        one = copy.deepcopy(borg) | {"name": "borg" if k == 0 else f"e{k}"}
        for r in ("cpu", "memory"):
            one["results"]["aggressive"]["all"]["reclaimed_share"][r]["value"] = k / 100
        many.append(one)
    figure = reclaimed_at_margins({**report.results, "estimators": [*many, *others[1:]]})
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == ["e11", "e10", "e9", "e8", "e7", "e6", "e5", "e4", "borg"]
    exceeding = {name: {key: {"verdict": "exceeds the budget"} for key in ("cpu", "memory")} for name in ("e11", "e9")}
    exceeding["e9"]["memory"] = {"verdict": "better"}
    results = {**report.results, "estimators": [*many, *others[1:]], "against_best": {"aggressive": exceeding}}
    shown = [label.get_text() for label in reclaimed_at_margins(results).axes[0].get_yticklabels()]
    assert shown == ["e10", "e8", "e7", "e6", "e5", "e9", "e4", "e3", "borg"]  # 2 * 8, ..., 2 * 5, 9, 2 * 4, 2 * 3


def test_estimators_keep_their_colour_and_none_share_one(report: ReplayReport) -> None:
    colours = estimator_colours(report.results)
    assert len(set(colours.values())) == len(colours) == 4
    assert set(colours.values()) <= set(PALETTE)


def test_the_limit_takes_no_colour_from_an_estimator() -> None:
    kinds = [*("statistical",) * 6, "limit", "learned machine"]
    colours = estimator_colours({"estimators": [{"name": f"e{k}", "kind": kind} for k, kind in enumerate(kinds)]})
    assert (colours["e7"], colours["e6"]) == PALETTE[-2:]  # the last is grey


def test_figures_of_the_same_results_are_the_same_bytes(report: ReplayReport, tmp_path: Path) -> None:
    for name, draw in FIGURES.items():
        for path in save_figure(draw(report.results), tmp_path / name):
            assert path.read_bytes() == (report.folder / path.name).read_bytes()


def test_the_figures_of_the_limit_and_the_oracle_alone_are_drawn(report: ReplayReport, tmp_path: Path) -> None:
    ends = [e for e in report.results["estimators"] if e["sequence"] is None]
    for name, draw in FIGURES.items():
        save_figure(draw({**report.results, "estimators": ends}), tmp_path / name)


def test_a_name_with_dollars_is_drawn_as_it_is(report: ReplayReport, tmp_path: Path) -> None:
    results = copy.deepcopy(dict(report.results))
    renamed = next(e for e in results["estimators"] if e["sequence"] and e["sequence"]["drawn"])
    renamed["name"] = "a$r_{d$"
    for name, draw in FIGURES.items():
        assert "a$r_{d$" in save_figure(draw(results), tmp_path / name)[1].read_text()


def test_what_is_not_known_is_left_out_and_breaks_nothing(report: ReplayReport, tmp_path: Path) -> None:
    results = copy.deepcopy(dict(report.results))
    timeline = results["timeline"]
    for name in ("usage", "limit"):
        timeline[name]["memory"] = [None] * len(timeline["hours"])
    for estimator in results["estimators"]:
        for measured in estimator["results"].values():
            for metric in measured["all"].values():
                metric["memory"] = {"value": None, "low": None, "high": None}
        if estimator["sequence"]:
            estimator["sequence"]["reservation"]["memory"] = [None] * len(timeline["hours"])
    for name, draw in FIGURES.items():
        png, svg = save_figure(draw(results), tmp_path / name)
        assert png.stat().st_size > 10_000
        assert svg.stat().st_size > 10_000
