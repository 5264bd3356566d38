"""What people read of an experiment: its table and the page."""

import html
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from reclaim.data.table import Table, show
from reclaim.replay.kinds import Column, Experiment, Run, Section
from reclaim.replay.margins import EXPERIMENT
from reclaim.replay.report import ReplayReport, render_page, runs_table

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
        Run("borg/medium", {"estimator": "borg", "margin": "medium"}, {"cpu": 0.5, "oom": 3.0, "kept": 1.0}),
        Run("all", {"estimator": "limit"}, {"cpu": None}),
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


def test_the_page_stands_alone_and_says_what_it_is_of(report: ReplayReport) -> None:
    page = report.page.read_text()
    parsed = Tags()
    parsed.feed(page)
    assert [s[:26] for s in parsed.sources] == ["data:image/svg+xml;base64,"] * 2
    assert parsed.tags.count("table") == 7
    dataset = report.results["dataset"]
    for text in (
        dataset["fingerprint"], dataset["nature"], "reclaim replay margins cell --out DIR --no-model",
        "derived from the trace", "percentile interval of 50 bootstrap resamples", "3.0 hours", "numpy 2",
        f"{dataset['test_task_windows']:,} in the test period", "on 4 machines", "The trace lacks",
    ):  # fmt: skip
        assert text in page, text
    for paragraph in EXPERIMENT.says(report.results):
        assert paragraph.split("`")[-1].replace(" %", "\N{NO-BREAK SPACE}%") in html.unescape(page)
    assert not re.search(r"/(root|tmp|home|work)/", page)


@pytest.fixture
def plain(report: ReplayReport) -> Callable[..., str]:
    """Return a maker of a page with one paragraph and one section, on the results of the replay."""

    def make(says: str = "", section: Section | None = None) -> str:
        parts = [section or Section("S")]
        experiment: Experiment = replace(EXPERIMENT, says=lambda _: [says], sections=lambda _: parts)
        return render_page(experiment, report.results, {})

    return make


def test_prose_has_paragraphs_and_code_and_no_markup_of_its_own(plain: Callable[..., str]) -> None:
    page = plain("`borg` < `vpa`", Section("Why `y`?", text="One.\n\n<i>Two</i> `x`."))
    assert "<h2>Why <code>y</code>?</h2>" in page
    assert "<p><code>borg</code> &lt; <code>vpa</code></p>" in page
    assert '<p class="note">One.</p>' in page
    assert '<p class="note">&lt;i&gt;Two&lt;/i&gt; <code>x</code>.</p>' in page
    assert "<table>" not in page


def test_definitions_are_prose_too(report: ReplayReport) -> None:
    results = {**report.results, "definitions": {"peak": "With `--set x=1` 5 % more."}}
    page = render_page(replace(EXPERIMENT, sections=lambda _: []), results, {})
    assert "<dd>With <code>--set x=1</code> 5&nbsp;% more.</dd>" in page


def test_an_experiment_says_itself_how_its_numbers_came_about(report: ReplayReport) -> None:
    ahead = "judged against the 3600 seconds it was promised for"
    assert ahead in report.page.read_text()
    page = render_page(replace(EXPERIMENT, sections=lambda _: [], judged=lambda _: "By `lot`."), report.results, {})
    assert '<p class="facts">By <code>lot</code>. In ' in page
    assert ahead not in page
    assert EXPERIMENT.judged(report.results).endswith(f"{ahead}.")
    run = EXPERIMENT.judged({**report.results, "closed_loop": {"estimators": [{}]}})
    assert "The closed loop counts what befell tasks" in run


def test_a_page_without_a_known_test_period_says_what_it_has(report: ReplayReport) -> None:
    dataset = {k: v for k, v in report.results["dataset"].items() if not k.startswith(("test_", "unseen_", "machines"))}
    results = dict(report.results) | {"dataset": dataset}
    page = render_page(replace(EXPERIMENT, sections=lambda _: []), results, {})
    assert "17,280 task-windows." in page


def test_names_from_the_data_cannot_become_markup(report: ReplayReport) -> None:
    dataset = report.results["dataset"] | {"name": "<script>alert(1)</script>"}
    figures = {name: report.folder / f"{name}.svg" for name in EXPERIMENT.figures}
    page = render_page(EXPERIMENT, dict(report.results) | {"dataset": dataset}, figures)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_missing_figure_is_an_error_and_no_hole_in_the_page(report: ReplayReport) -> None:
    with pytest.raises(KeyError, match="margins_over_time"):
        render_page(EXPERIMENT, report.results, {})
