"""Every experiment: found by its verb, complete, and with the promised summary and page."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from reclaim.data.ingest.job import IngestConfig, ingest
from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell
from reclaim.features.build import build_features
from reclaim.replay.report.page import ReplayReport
from reclaim.replay.runs.catalogue import EXPERIMENTS, load_experiment
from reclaim.replay.runs.run import run_experiment
from reclaim.replay.settings import ReplayConfig

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
        return run_experiment(experiment, made.path, folder / name, config, tracking=False, progress=False)

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
    assert page.count("<img ") == len(experiment.figures)
    assert 2 <= page.count('class="card"') <= 5
    assert 1 <= len(experiment.summary(report.results).rows) <= 10
    assert report.results["dataset"]["test_task_windows"] > 0
    assert f"reclaim replay {name} cell --out DIR --no-model" in html.unescape(page)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SEE = """<script>addEventListener("load", () => {
  const seen = document.createElement("pre");
  const images = [...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width]);
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.id = "seen"; seen.textContent = JSON.stringify({images, wide}); document.body.append(seen);
})</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")
@pytest.mark.parametrize("width", [1920, 1200, 500])  # the narrowest window that headless chromium opens
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_browser_shows_the_page_whole_and_no_wider_than_its_window(
    name: str, run: Run, tmp_path: Path, width: int
) -> None:
    experiment, report = load_experiment(name), run(name)
    page = tmp_path / "page.html"
    page.write_text(report.page.read_text().replace("</body>", f"{SEE}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(CHROMIUM), *options, f"--window-size={width},900", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    seen = json.loads(re.findall('<pre id="seen">(.*?)</pre>', dom)[0])
    assert len(seen["images"]) == len(experiment.figures)
    assert all(natural > 300 and shown > 0.6 * min(width, 1000) for natural, shown in seen["images"])
    assert seen["wide"] <= 0
    headings = re.findall("<h2>(.*?)</h2>", dom)
    assert headings[-3:] == ["How the numbers were measured", "Definitions", "Settings and command"]
    assert len(set(headings)) == len(headings)
