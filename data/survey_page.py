"""The page of a dataset: one HTML file that needs no other, sections and figures of its facts."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jinja2

from reclaim.data.errors import ConfigError
from reclaim.data.survey_figures import draw
from reclaim.data.survey_sections import sections, title

_TEMPLATE: Final = "survey.html"


def render_page(facts: Mapping[str, Any]) -> str:
    """Return the page, its figures inside it; the same text for the same facts."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((resources.files("reclaim.data") / _TEMPLATE).read_text(encoding="utf-8"))
    images = {name: base64.b64encode(svg).decode() for name, svg in draw(facts).items()}
    return template.render(title=title(facts), sections=sections(facts), images=images)


def write_page(facts: Mapping[str, Any], file: Path) -> None:
    """Write the page under a temporary name, then rename: readers see all of it or none.

    Raises
    ------
    ConfigError
        ``file`` is a folder, or its folder is missing.
    """
    check_target(file)
    temporary = file.with_name(file.name + ".partial")
    temporary.write_text(render_page(facts), encoding="utf-8")
    os.replace(temporary, file)


def check_target(file: Path) -> None:
    """Raise ConfigError where no page can be written at ``file``."""
    if file.is_dir():
        raise ConfigError(f"{file}: is a folder; name a file for the page")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: no such folder {file.parent}; make it first")
