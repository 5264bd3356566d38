"""The site's own code: what a page fetches is found, notebooks become Markdown, references come out of the code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reclaim.serving import client

SITE = Path(__file__).resolve().parents[1] / "docs" / "site"


@pytest.fixture(scope="module")
def pages() -> Iterator[Any]:
    """Give the module that Sphinx loads from the site's folder."""
    sys.path.insert(0, str(SITE))
    try:
        import pages  # type: ignore[import-not-found] # the folder is no package

        yield pages
    finally:
        sys.path.remove(str(SITE))


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/a.css">',
        '<img src="HTTP://example/a.png">',
        '<style>@import "https://example/a.css"</style>',
        "<style>a { background: url(https://example/a.png) }</style>",
    ],
)
def test_a_page_that_needs_another_server_is_found(pages: Any, html: str) -> None:
    assert len(pages.fetched(html)) == 1


def test_links_that_a_reader_follows_are_not_fetched(pages: Any) -> None:
    assert pages.fetched('<a href="https://example"><img src="_static/a.png"></a><link href="_static/a.css">') == []


def test_a_notebook_becomes_its_text_its_code_and_its_outputs(pages: Any) -> None:
    cells: list[dict[str, Any]] = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["1 + 1"], "outputs": [{"data": {"text/plain": ["2"]}}]},
        {"cell_type": "code", "source": ["print(3)"], "outputs": [{"name": "stdout", "text": ["3\n"]}]},
        {"cell_type": "code", "source": ["draw()"], "outputs": [{"data": {"image/png": "QUJD\n", "text/plain": "F"}}]},
        {"cell_type": "code", "source": ["plot"], "outputs": [{"data": {"image/svg+xml": ["<svg>", "</svg>"]}}]},
        {
            "cell_type": "code",
            "source": ["frame"],
            "outputs": [
                {
                    "data": {
                        "text/html": ["<div>\n", "<style scoped>\n\n</style>\n", "<table>\n", "\n", "</table></div>"],
                        "text/plain": "a b",
                    }
                }
            ],
        },
        {"cell_type": "code", "source": [], "outputs": []},
    ]
    assert pages.notebook(json.dumps({"cells": cells})) == (
        "# Title\ntext\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n```python\nprint(3)\n```\n\n```text\n3\n```\n\n"
        "```python\ndraw()\n```\n\n![figure](data:image/png;base64,QUJD)\n\n"
        "```python\nplot\n```\n\n"
        '<img alt="figure" src="data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=">\n\n'
        "```python\nframe\n```\n\n<div>\n<div>\n<table>\n</table></div>\n</div>\n"
    )


def test_the_references_name_every_command_call_and_public_class(pages: Any) -> None:
    commands, http, python = (pages.GENERATED[name]() for name in ("commands", "http", "python"))
    assert "## `reclaim replay margins`" in commands
    assert "| `--trace TEXT` | `google-v3` |" in commands
    assert "### `POST /v1/reservations`" in http
    assert "| `collection_id` | integer | required |" in http
    assert all(f"reclaim.serving.client.{name}\n" in python for name in client.__all__)


def test_every_page_has_its_place_in_the_navigation(pages: Any) -> None:
    placed = {page for names in pages.NAVIGATION.values() for page in names} | {"docs/index"}
    written = {f"docs/{path.stem}" for path in (SITE.parent).iterdir() if path.suffix in (".md", ".ipynb")}
    assert written <= placed
