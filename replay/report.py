"""What a replay found, for people: the table of its runs, and one page that stands alone."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

import jinja2
from markupsafe import Markup, escape

from reclaim.data.table import Table
from reclaim.replay.kinds import Column, Experiment, Results, Run

PAGE: Final = "report.html"
"""The page's file, and its template's."""


@dataclass(frozen=True)
class ReplayReport:
    """A finished replay.

    Attributes
    ----------
    folder : Path
        Where ``results.json``, ``report.html`` and the figures are.
    results : mapping
        What ``results.json`` holds.
    already_there : bool
        Whether an earlier run had made it, so that this one had nothing to do.
    seconds : mapping of str to float
        Wall time of the parts of it; empty when there was nothing to do.
    """

    folder: Path
    results: Results
    already_there: bool
    seconds: Mapping[str, float]

    @property
    def page(self) -> Path:
        """The page for people."""
        return self.folder / PAGE


def runs_table(runs: Sequence[Run], columns: Sequence[Column]) -> Table:
    """Return one row per run: the words that tell it from the others, and its numbers; None where it lacks one."""
    words = list(dict.fromkeys(word for run in runs for word in run.words))
    rows = (
        (*(run.words.get(word) for word in words), *(run.metrics.get(column.metric) for column in columns))
        for run in runs
    )
    return Table(
        (*words, *(c.heading for c in columns)), tuple(rows), frozenset(c.heading for c in columns if c.percent)
    )


def render_page(experiment: Experiment, results: Results, figures: Mapping[str, Path]) -> str:
    """Return the page of an experiment: one file that needs no other, the figures inside it.

    Parameters
    ----------
    experiment : Experiment
    results : mapping
        What ``results.json`` holds.
    figures : mapping of str to Path
        SVG file of each figure by its name.

    Raises
    ------
    KeyError
        A section shows a figure that is not among them.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["prose"] = _prose
    template = environment.from_string((resources.files("reclaim.replay") / PAGE).read_text(encoding="utf-8"))
    sections = list(experiment.sections(results))
    images = {s.figure: base64.b64encode(figures[s.figure].read_bytes()).decode() for s in sections if s.figure}
    return template.render(
        title=experiment.title,
        judged=experiment.judged(results),
        results=results,
        says=experiment.says(results),
        sections=sections,
        images=images,
    )


def _prose(text: str) -> Markup:
    """Return a paragraph as HTML: what stands in `backquotes` as code, no number parted from its percent sign."""
    unbroken = str(escape(text)).replace(" %", "&nbsp;%")
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", unbroken))
