"""The design that all pages share: figures inline, tables that a small script sorts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from reclaim.data.core.pages.render import inline_svg
from reclaim.data.core.tables import Table
from tests.browser import found_in

SVG = """<?xml version="1.0"?><!DOCTYPE svg>
<svg xmlns="http://www.w3.org/2000/svg" width="72pt" height="36pt" viewBox="0 0 72 36">
<metadata><x href="http://elsewhere"/></metadata><defs><style>*{x: y}</style></defs><!-- said -->
<g id="a"><path id="m" style="fill: #ffffff; stroke: #222222"/><path style="stroke: #888888; fill: #0072b2"/></g>
<use href="#m" clip-path="url(#p)" style="stroke: #000000; fill: #e69f00"/></svg>"""
GROUPED = Table(
    ("resource", "estimator", "reclaimed", "interval", "tasks"),
    (
        ("CPU", "vpa", 0.1349, "8.78 to 19.82 %", 1234),
        ("CPU", "borg", 0.0738, "3.91 to 10.80 %", 98),
        ("memory", "network", 0.2481, "19.09 to 30.55 %", None),
        ("memory", "borg", None, "-", 20000),
    ),
    frozenset({"reclaimed"}),
)
PARTS = jinja2.Environment(loader=jinja2.PackageLoader("reclaim.data.core", "."), autoescape=True)


def sortable(table: Table) -> str:
    parts: Any = PARTS.get_template("pages/parts.html").module
    script = PARTS.get_template("pages/sort.js").render()
    return f"<!doctype html><html><body>{parts.table(table)}<script>{script}</script></body></html>"


def test_a_figure_within_a_page_takes_its_greys_from_the_page_and_shares_no_id() -> None:
    shown = inline_svg(SVG, "one")
    assert shown.startswith('<svg viewBox="0 0 72 36" style="min-width: 67px">')
    assert "fill: var(--ground); stroke: var(--ink)" in shown
    assert re.search(r"stroke: color-mix\(in srgb, var\(--ink\) 54%, var\(--ground\)\); fill: var\(--blue\)", shown)
    assert "stroke: var(--ink); fill: #e69f00" in shown
    assert re.findall(r'(?:id="|href="#|url\(#)([^")]+)', shown) == ["one-a", "one-m", "one-m", "one-p"]
    for gone in ("http", "metadata", "<style", "said"):
        assert gone not in shown


def test_a_table_has_what_its_script_looks_for_and_is_whole_without_it() -> None:
    page = sortable(GROUPED)
    assert "<table data-sortable>" in page
    assert 'querySelectorAll("table[data-sortable]")' in page
    assert page.count('<th scope="col"') == len(GROUPED.columns)
    assert "<button" not in page
    assert page.count('<tr class="first">') == 1


def test_the_rows_of_a_table_are_read_once_for_the_alignment_of_its_cells_and_not_again_for_each() -> None:
    class Rows(tuple[tuple[int, ...], ...]):
        """Rows that count how often all of them are read."""

        reads = 0

        def __iter__(self) -> Iterator[tuple[int, ...]]:
            Rows.reads += 1
            return super().__iter__()

    sortable(Table(("a", "b"), Rows((k, k) for k in range(200))))
    assert Rows.reads < 10


PRESS = """() => {
  const column = (k) => [...document.querySelectorAll("tbody tr")].map((row) => row.cells[k].textContent);
  const heads = [...document.querySelectorAll("th")], buttons = heads.map((head) => head.querySelector("button"));
  const press = (k) => {
    buttons[k].click();
    const sorted = heads.map((head) => head.getAttribute("aria-sort"));
    return [column(k), sorted, document.querySelectorAll("tr.first").length];
  };
  return {tags: buttons.map((b) => [b.tagName, b.type, b.tabIndex]), presses: [2, 2, 2, 3, 4, 1, 0].map(press)};
}"""


@pytest.mark.slow
def test_a_browser_sorts_by_number_or_word_with_the_missing_last_and_the_groups_of_the_page_back(
    tmp_path: Path,
) -> None:
    found = found_in(sortable(GROUPED), PRESS, tmp_path)
    assert found["tags"] == [["BUTTON", "button", 0]] * 5  # a button takes the keyboard
    shares, again, back, intervals, tasks, words, groups = found["presses"]
    assert shares == [["24.81 %", "13.49 %", "7.38 %", "-"], [None, None, "descending", None, None], 0]
    assert again[:2] == [["7.38 %", "13.49 %", "24.81 %", "-"], [None, None, "ascending", None, None]]
    assert back == [["13.49 %", "7.38 %", "24.81 %", "-"], [None] * 5, 1]
    assert intervals[0] == ["19.09 to 30.55 %", "8.78 to 19.82 %", "3.91 to 10.80 %", "-"]
    assert tasks[0] == ["20,000", "1,234", "98", "-"]
    assert words[0] == ["borg", "borg", "network", "vpa"]
    assert words[1] == [None, "ascending", None, None, None]
    assert groups == [["CPU", "CPU", "memory", "memory"], ["ascending", None, None, None, None], 1]
