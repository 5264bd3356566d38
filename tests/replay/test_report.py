"""What people read of a replay: tables and the page."""

import re
from html.parser import HTMLParser

import pytest
from jinja2 import UndefinedError

from reclaim.replay.report import (
    ReplayReport,
    Table,
    detail_table,
    margins_table,
    render_page,
    results_table,
    sequence_table,
    show,
    split_table,
)

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


def test_the_main_table_has_a_row_per_estimator_and_margin_and_the_numbers_of_the_results(report: ReplayReport) -> None:
    table = results_table(report)
    records = table.as_records()
    assert [(r["estimator"], r["margin"]) for r in records] == [
        *((name, margin) for name in ("borg", "percentile") for margin in ("baseline", "medium", "aggressive")),
        ("limit", "none"),
        ("oracle", "none"),
    ]
    assert table.columns[2:] == (
        "CPU reclaimed", "CPU violation", "CPU of oracle", "memory reclaimed", "memory violation", "memory of oracle",
        "would-be OOM",
    )  # fmt: skip
    medium = report.results["estimators"][0]["results"]["medium"]
    assert records[1]["memory violation"] == medium["all"]["violation_rate"]["memory"]["value"]
    assert records[1]["CPU reclaimed"] == medium["all"]["reclaimed_share"]["cpu"]["value"]
    unseen = results_table(report.results, subset="unseen").as_records()
    assert "would-be OOM" not in unseen[1]
    assert unseen[1]["CPU reclaimed"] == medium["unseen"]["reclaimed_share"]["cpu"]["value"]


def test_the_other_tables_follow_the_results(report: ReplayReport) -> None:
    results = report.results
    assert len(detail_table(results).rows) == 2 * 8  # two resources of each row of the main table
    assert len(margins_table(results).rows) == 2 * 3
    assert [r["margin"] for r in sequence_table(results).as_records()] == 2 * [
        "baseline",
        "aggressive",
        "medium",
        "baseline",
    ]
    ages = split_table(results, "ages", "medium").as_records()
    assert {r["age"] for r in ages} == {"older"}
    assert all(isinstance(r["CPU task-windows"], int) for r in ages)


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
        "derived from the trace", "percentile interval of 50 bootstrap resamples", "3.0 hours",
    ):  # fmt: skip
        assert text in page, text
    assert not re.search(r"/(root|tmp|home|work)/", page)


def test_names_from_the_data_cannot_become_markup(report: ReplayReport) -> None:
    dataset = report.results["dataset"] | {"name": "<script>alert(1)</script>"}
    page = render_page(
        dict(report.results) | {"dataset": dataset},
        {name: report.folder / f"{name}.svg" for name in ("margins_over_time", "reclaimed_at_margins")},
    )
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_missing_figure_is_an_error_and_no_hole_in_the_page(report: ReplayReport) -> None:
    with pytest.raises(UndefinedError, match="has no attribute"):
        render_page(report.results, {})
