"""The table of an experiment's runs, and its page."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import Environment, PackageLoader, UndefinedError

from reclaim.data.core.prose import duration, interval, percent
from reclaim.data.core.tables import Table, show
from reclaim.replay.experiment import Column, Run
from reclaim.replay.experiments.margins.measure import EXPERIMENT
from reclaim.replay.experiments.margins.page import best
from reclaim.replay.open_loop.paired import BETTER, LESS, MORE, NOISE, UNKNOWN, WORSE
from reclaim.replay.report import page
from reclaim.replay.report.page import ReplayReport, render_page, runs_table, settings_table, verdict_of
from reclaim.replay.runs.catalogue import EXPERIMENTS

SMALL = Table(
    ("estimator", "reclaimed", "events"), (("borg", 0.0512, 12), ("limit", None, 0)), frozenset({"reclaimed"})
)


def test_a_table_as_text_has_words_to_the_left_and_numbers_to_the_right() -> None:
    assert SMALL.as_text() == (
        "estimator  reclaimed  events\n"
        "---------  ---------  ------\n"
        "borg          5.12 %      12\n"
        "limit              -       0\n"
    )  # fmt: skip


def test_a_table_as_markdown_is_one_that_github_shows() -> None:
    assert SMALL.as_markdown() == (
        "| estimator | reclaimed | events |\n"
        "| --------- | --------: | -----: |\n"
        "| borg      |    5.12 % |     12 |\n"
        "| limit     |         - |      0 |\n"
    )


def test_a_table_as_records_keeps_fractions_for_scripts() -> None:
    assert SMALL.as_records()[0] == {"estimator": "borg", "reclaimed": 0.0512, "events": 12}


def test_a_table_without_rows_still_has_its_columns() -> None:
    assert Table(("a", "b"), ()).as_text().splitlines()[0].split() == ["a", "b"]


def test_cells_read_well() -> None:
    assert [show(v) for v in (None, "borg", 7, 0.000123456)] == ["-", "borg", "7", "0.0001235"]
    assert show(0.00049, percent=True) == "0.05 %"


def test_a_row_per_run_has_its_words_and_the_numbers_of_the_columns() -> None:
    runs = [
        Run({"estimator": "borg", "margin": "medium"}, {"cpu": 0.5, "oom": 3.0, "kept": 1.0}),
        Run({"estimator": "limit"}, {"cpu": None}),
    ]
    table = runs_table(runs, [Column("CPU", "cpu", percent=True), Column("OOM", "oom")])
    assert table.columns == ("estimator", "margin", "CPU", "OOM")
    assert table.as_strings() == [["borg", "medium", "50.00 %", "3"], ["limit", "-", "-", "-"]]


class Tags(HTMLParser):
    """Collects what a page asks for from elsewhere, and its open tags."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: D102 - the base's
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_settings_are_shown_as_the_option_takes_them_and_money_where_it_sets_prices() -> None:
    money: dict[str, float | None] = {"core_hour": None, "violation": None}
    config = {"budgets": {"baseline": 0.001}, "tune": True, "estimators": ["borg"], "most": None, "value": money}
    shown = {"budgets.baseline": "0.001", "tune": "true", "estimators": '["borg"]', "most": "none"}
    assert page._chosen(config) == shown
    money |= {"violation": 3.0}
    assert page._chosen(config) == shown | {"value.core_hour": "none", "value.violation": "3.0"}


def test_a_setting_without_a_value_is_told_as_the_published_one() -> None:
    chosen = {"cpu": {"half_life_s": 86_400.0, "level": None}, "memory": {"half_life_s": 10_800.0, "level": 0.8}}
    rows = settings_table({"settings": {"vpa": {"baseline": chosen}}}).rows
    assert [row[-1] for row in rows] == ["half_life_s 86400.0, level published", "half_life_s 10800.0, level 0.8"]


def test_the_page_is_self_contained_and_names_its_inputs(report: ReplayReport) -> None:
    page = report.page.read_text()
    parsed = Tags()
    parsed.feed(page)
    assert page.count("<svg") == 2
    assert not re.search(r"""(src|href)=(?!"#)|https?://""", page)
    assert parsed.tags.count("table") == page.count("<table data-sortable>") == 11
    assert parsed.tags.count("script") == 1
    dataset = report.results["dataset"]
    for text in (
        dataset["fingerprint"], dataset["nature"], "reclaim replay margins cell --out DIR --no-model",
        "derived from the trace", "percentile interval of 50 bootstrap resamples",
        f"<dt>test period</dt><dd>{duration(dataset['test_hours'])}</dd>", "numpy 2",
        f"<dt>in the test period</dt><dd>{dataset['test_task_windows']:,}</dd>", "<dt>machines</dt><dd>4</dd>",
        "not in the trace", "budgets.baseline = <code>0.001</code>", "tune = <code>",
    ):  # fmt: skip
        assert text in page, text
    assert not re.search(r"/(root|tmp|home|work)/", page)


@pytest.fixture
def render(report: ReplayReport) -> Callable[..., str]:
    """Return a renderer of the margins page with other results."""
    figures = {name: file for name in EXPERIMENT.figures if (file := report.folder / f"{name}.svg").exists()}
    return lambda **changed: render_page(EXPERIMENT, {**report.results, **changed}, figures)


def test_the_parts_of_a_page_come_in_one_order(report: ReplayReport) -> None:
    page = report.page.read_text()
    parts = ['class="answer"', 'class="card"', "<svg ", "<table ", ">Definitions<", ">Settings and command<"]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_definitions_may_hold_code_and_no_markup_of_their_own(render: Callable[..., str]) -> None:
    page = render(definitions={"peak": "With `--set x=1` 5 % more.", "slack": "<i>None</i>"})
    assert "<dd>With <code>--set x=1</code> 5&nbsp;% more.</dd>" in page
    assert "<dd>&lt;i&gt;None&lt;/i&gt;</dd>" in page


def test_a_page_without_a_known_test_period_shows_the_facts_there_are(
    report: ReplayReport, render: Callable[..., str]
) -> None:
    dataset = {k: v for k, v in report.results["dataset"].items() if not k.startswith(("test_", "unseen_", "machines"))}
    page = render(dataset=dataset)
    assert "<dt>task-windows</dt><dd>17,280</dd>" in page
    assert "test period</dt>" not in page.split("</header>")[0]
    assert "collections in the test period" not in page


def test_a_verdict_is_a_badge_of_its_tone() -> None:
    parts = Environment(loader=PackageLoader("reclaim.data.core", ".")).get_template("pages/parts.html").module
    badge = parts.badge  # type: ignore[attr-defined] # a macro of the template
    for verdict, tone in ((BETTER, "good"), (WORSE, "bad"), (MORE, "mixed"), (LESS, "mixed"), (NOISE, "even"),
                          (UNKNOWN, "even")):  # fmt: skip
        assert badge(verdict).strip() == f'<span class="badge {tone}">{verdict}</span>'
    assert badge("-").strip() == badge(None).strip() == ""


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.1, 0.2, BETTER), (-0.2, -0.1, WORSE), (-0.1, 0.1, NOISE), (0.0, 0.1, NOISE), (None, None, UNKNOWN)],
)
def test_a_difference_is_beyond_the_noise_where_its_interval_leaves_out_zero(
    low: float | None, high: float | None, verdict: str
) -> None:
    assert verdict_of({"value": 0.1, "low": low, "high": high}) == verdict


def test_an_interval_is_in_percent_or_a_dash() -> None:
    assert interval({"value": 0.2, "low": 0.123, "high": 0.25}) == "12.30 to 25.00 %"
    assert interval({"value": 0.2, "low": None, "high": None}) == "-"


def test_names_from_the_data_cannot_become_markup(report: ReplayReport, render: Callable[..., str]) -> None:
    dataset = report.results["dataset"] | {"name": "<script>alert(1)</script>"}
    page = render(dataset=dataset)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_the_large_figures_are_the_numbers_of_the_results(report: ReplayReport) -> None:
    cards = re.findall(r'<div class="card">.*?</div>', report.page.read_text(), flags=re.S)
    shown = [" ".join(re.sub(r"<[^>]+>", " ", card).replace("\N{NO-BREAK SPACE}", " ").split()) for card in cards]
    measured = {e["name"]: e["results"] for e in report.results["estimators"]}
    for resource in ("cpu", "memory"):
        for one in best(report.results, "aggressive", resource):
            of = measured[one["name"]]["aggressive"]["all"]
            share, rate = (of[metric][resource] for metric in ("reclaimed_share", "violation_rate"))
            card = next(c for c in shown if c.lower().startswith(resource) and f"estimator {one['name']}" in c)
            assert f" {percent(share['value'], 1)} " in card
            assert f" {interval(share)} " in card
            assert f"violation {percent(rate['value'])} " in card


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_page_of_every_experiment_is_of_one_design(name: str) -> None:
    template = Path(__file__).parents[3] / "replay" / "experiments" / EXPERIMENTS[name] / "page.html"
    text = template.read_text()
    assert '{% extends "report/page.html" %}' in text
    assert '{% import "pages/parts.html" as parts %}' in text
    assert not re.search("<(table|img|svg|style|script)", text)  # only by the shared parts


def test_a_missing_figure_is_an_error_and_no_hole_in_the_page(report: ReplayReport) -> None:
    with pytest.raises(UndefinedError, match="reclaimed_at_margins"):
        render_page(EXPERIMENT, report.results, {})
