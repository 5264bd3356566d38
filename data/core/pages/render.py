"""Renders a page from a room's template: one HTML file that needs no other, with its figures inline."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import jinja2
from markupsafe import Markup, escape

from reclaim.data.core.prose import duration, interval, number, percent, points
from reclaim.data.core.style import INK, RESOURCE_WORDS

_HUES: Final = {"#0072b2": "blue", "#d55e00": "vermilion", "#009e73": "green", "#8c6bb1": "purple"}
"""Colours of figures that are too dark on a dark ground, and their names in the style sheet."""

_LEGIBLE: Final = 0.93
"""Pixels of the page for a point of a figure, at least: text of 9.5 points has 9 pixels; a narrow window scrolls."""


def render(
    package: str,
    template: str,
    values: Mapping[str, Any],
    figures: Mapping[str, str],
    filters: Mapping[str, Callable[..., Any]] | None = None,
) -> str:
    """Return the page of a template that extends ``pages/base.html``.

    Parameters
    ----------
    package : str
        Package whose folder holds the template.
    template : str
        Path of the template within it.
    values : mapping
        Values that the template names; ``title`` and ``name`` among them.
    figures : mapping of str to str
        SVG of each figure by its name; the template finds them in ``images``.
    filters : mapping of str to callable or None
        Filters of the template besides those of every page.

    Raises
    ------
    jinja2.UndefinedError
        The template names something that is not there, as a figure.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, ".") for name in (package, "reclaim.data.core")]),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= _FILTERS | dict(filters or {})
    images = {name: inline_svg(svg, name) for name, svg in figures.items()}
    return environment.get_template(template).render({**values, "images": images})


def inline_svg(svg: str, name: str) -> Markup:
    """Return an SVG of matplotlib as an element of a page that takes its colours from the page's style.

    Greys become mixtures of the page's ink and ground, so that a figure is legible on a dark ground; ids begin with the
    figure's name, so that two figures share none. A window too narrow for its text scrolls within it.
    """
    element = svg[svg.index("<svg") :]
    element = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>|<!--.*?-->", "", element, flags=re.S
    )
    element = re.sub(r'<svg [^>]*?(viewBox="0 0 ([\d.]+) [^"]*")[^>]*>', _root, element, count=1)
    element = re.sub(r"#([0-9a-f]{2})\1\1\b", _grey, element)
    element = re.sub("|".join(_HUES), lambda found: f"var(--{_HUES[found[0]]})", element)
    return Markup(re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element))


def _root(found: re.Match[str]) -> str:
    return f'<svg {found[1]} style="min-width: {_LEGIBLE * float(found[2]):.0f}px">'


def _grey(found: re.Match[str]) -> str:
    ink = round(100 * (255 - int(found[1], 16)) / (255 - int(INK[1:3], 16)))
    if ink in (0, 100) or ink > 100:
        return "var(--ink)" if ink else "var(--ground)"
    return f"color-mix(in srgb, var(--ink) {ink}%, var(--ground))"


def _share(value: float | None, digits: int = 1) -> str:
    return percent(value, digits).replace(" ", "\N{NO-BREAK SPACE}")


def _prose(text: str) -> Markup:
    """Return a paragraph as HTML: text in `backquotes` as code, a number and its percent sign on one line."""
    unbroken = str(escape(text)).replace(" %", "&nbsp;%")
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", unbroken))


_FILTERS: Final = {
    "prose": _prose,
    "share": _share,
    "points": points,
    "interval": interval,
    "amount": number,
    "thousands": "{:,}".format,
    "duration": duration,
    "resource": RESOURCE_WORDS.get,
}
"""Filters of every page, by name."""
