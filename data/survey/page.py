"""Renders the page of a dataset: one self-contained HTML file of large figures, charts, tables and definitions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from reclaim.data.core.files import write_text
from reclaim.data.core.pages.render import render
from reclaim.data.core.tables import show
from reclaim.data.errors import ConfigError
from reclaim.data.oom import oom_definition
from reclaim.data.schema import has_memory
from reclaim.data.survey.figures import draw
from reclaim.data.survey.tables import oom_label, rejected, tables

_FILTERS: Final = {"seconds": lambda us: f"{us / 1e6:,.0f}", "count_or_dash": show}


def render_page(facts: Mapping[str, Any]) -> str:
    """Return the page with embedded figures; the same text for the same facts."""
    values = {"title": "Dataset", "name": facts["head"]["name"], "facts": facts, "tables": tables(facts),
              "rejected": rejected(facts), "oom": oom_definition(facts["quality"]), "oom_label": oom_label(facts),
              "has_memory": has_memory(facts["quality"]["lacks"])}  # fmt: skip
    figures = {name: svg.decode() for name, svg in draw(facts).items()}
    return render("reclaim.data.survey", "page.html", values, figures, _FILTERS)


def write_page(facts: Mapping[str, Any], file: Path) -> None:
    """Write the page under a temporary name and rename it: readers see all of it or none.

    Raises
    ------
    ConfigError
        ``file`` is a folder, or its folder is missing.
    """
    check_target(file)
    write_text(file, render_page(facts))


def check_target(file: Path) -> None:
    """Raise ConfigError if no page can be written at ``file``."""
    if file.is_dir():
        raise ConfigError(f"{file}: is a folder; name a file for the page")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: no such folder {file.parent}; make it first")
