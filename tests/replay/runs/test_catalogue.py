"""Every experiment: found by its verb, complete, and with the promised summary and page."""

import html
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from reclaim.data.errors import ConfigError
from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.features.build import build_features
from reclaim.replay.report.page import ReplayReport
from reclaim.replay.runs.catalogue import EXPERIMENTS, RECOMMEND, load_experiment
from reclaim.replay.runs.run import run_experiment
from reclaim.replay.settings import ReplayConfig
from reclaim.training.estimators.registry import ESTIMATORS
from tests.browser import found_in

Run = Callable[[str], ReplayReport]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what runs an experiment on a synthetic cell, whose machines have capacities; each is run once."""
    folder = tmp_path_factory.mktemp("cell")
    write_cell(folder / "raw", SyntheticCellConfig(machines=5, days=1.5, seed=2))
    made = ingest(folder / "raw", folder / "cell", IngestConfig(buckets=2)).dataset
    build_features(made)

    @cache
    def run_once(name: str) -> ReplayReport:
        experiment = load_experiment(name)
        config = experiment.config(estimators=("borg", "percentile", "limit"), draws=20)
        return run_experiment(experiment, made.path, folder / name, config, tracking=False)

    return run_once


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_found_by_its_verb_and_is_complete(name: str) -> None:
    experiment = load_experiment(name)
    assert experiment.name == name
    assert re.fullmatch(r"[A-Z].*[^.]", experiment.title)
    assert issubclass(experiment.config, ReplayConfig)
    assert isinstance(experiment.config(), ReplayConfig)
    assert experiment.figures
    headings = [column.heading for column in experiment.columns]
    assert headings
    assert len(set(headings)) == len(headings)


@pytest.mark.parametrize("name", [*EXPERIMENTS, RECOMMEND])
@pytest.mark.parametrize(
    ("setting", "wrong"),
    [("horizon_s", 7), ("estimators", ("borg", "borg")), ("seed", -1), ("draws", 0), ("draws", 10**12),
     ("confidence", 1.0)],
)  # fmt: skip
def test_every_experiment_checks_the_settings_that_all_share(name: str, setting: str, wrong: object) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} must be "):
        load_experiment(name).config(**{setting: wrong})


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_has_the_numbers_of_all_columns_and_the_page_every_figure(name: str, run: Run) -> None:
    experiment, report = load_experiment(name), run(name)
    runs = experiment.runs(report.results)
    assert runs
    assert len({one.name for one in runs}) == len(runs)
    for one in runs:
        assert {column.metric for column in experiment.columns} <= set(one.metrics), one.name
        assert all(value is None or isinstance(value, int | float) for value in one.metrics.values()), one.name
    page = report.page.read_text()
    drawn = [draw(report.results) for draw in experiment.figures.values()]
    assert page.count("<svg ") == sum(figure is not None for figure in drawn) > 0
    assert 2 <= page.count('class="card"') <= 5
    assert 1 <= len(experiment.summary(report.results).rows) <= 10
    assert report.results["dataset"]["test_task_windows"] > 0
    assert f"reclaim replay {name} cell --out DIR --no-model" in html.unescape(page)


SEEN = """() => ({
  charts: [...document.querySelectorAll(".plot svg")].map((chart) => chart.getBoundingClientRect().width),
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  unsorted: [...document.querySelectorAll("table")].filter(
    (table) => table.tBodies[0].rows.length > 1 && !table.querySelector("th button")).length,
  headings: [...document.querySelectorAll("h2")].map((heading) => heading.textContent),
})"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1920, 1280, 400])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_browser_shows_the_page_whole_and_no_wider_than_its_window(
    name: str, run: Run, tmp_path: Path, width: int
) -> None:
    seen = found_in(run(name).page.read_text(), SEEN, tmp_path, width=width)
    drawn = [figure for figure in load_experiment(name).figures if (run(name).page.parent / f"{figure}.svg").is_file()]
    assert len(seen["charts"]) == len(drawn) > 0  # without a model no machine is foreseen, and no day is drawn
    assert all(shown > 0.9 * min(width, 1200) for shown in seen["charts"])
    assert seen["wide"] <= 0
    assert seen["unsorted"] == 0
    assert seen["headings"][-3:] == ["How the numbers were measured", "Definitions", "Settings and command"]
    assert len(set(seen["headings"])) == len(seen["headings"])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_summary_fits_a_console_of_eighty_columns_and_with_its_page_twelve_lines(name: str, run: Run) -> None:
    table = load_experiment(name).summary(run(name).results)
    names, longest = table.columns.index("estimator"), max(ESTIMATORS, key=len)
    rows = tuple((*row[:names], longest, *row[names + 1 :]) for row in table.rows)
    said = replace(table, rows=rows).as_text().splitlines()
    assert len(said) <= 11
    assert max(map(len, said)) <= 80
