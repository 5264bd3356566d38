"""Renders the page of a dataset: one self-contained HTML file with sections and figures."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2

from reclaim.data.core.files import write_text
from reclaim.data.errors import ConfigError
from reclaim.data.survey.figures import draw
from reclaim.data.survey.sections import sections, title

_TEMPLATE: Final = "page.html"


def render_page(facts: Mapping[str, Any]) -> str:
    """Return the page with embedded figures; the same text for the same facts."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((resources.files("reclaim.data.survey") / _TEMPLATE).read_text(encoding="utf-8"))
    images = {name: base64.b64encode(svg).decode() for name, svg in draw(facts).items()}
    return template.render(title=title(facts), sections=sections(facts), images=images)


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
