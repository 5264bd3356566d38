"""Renders the page of a finished replay, one self-contained HTML file, and the table of its runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reclaim.data.core.nested import as_set, flatten
from reclaim.data.core.pages.render import render
from reclaim.data.core.style import RESOURCE_WORDS, SUBJECTS
from reclaim.data.core.tables import Cell, Table
from reclaim.data.schema import RESOURCES
from reclaim.replay.experiment import Column, Experiment, Results, Run, judged, measures_memory
from reclaim.replay.open_loop.paired import ALONE, EXCEEDS, NOISE, Interval

PAGE: Final = "report.html"
"""File name of the page."""
_BRIEF: Final = {NOISE: "within noise", EXCEEDS: "over budget", ALONE: "alone within"}


@dataclass(frozen=True)
class ReplayReport:
    """A finished replay.

    Attributes
    ----------
    folder : Path
        Folder of ``results.json``, ``report.html`` and the figures.
    results : mapping
        The content of ``results.json``.
    already_there : bool
        Whether an earlier run had written it, and this one had nothing to do.
    seconds : mapping of str to float
        Wall time of its parts; empty when there was nothing to do.
    """

    folder: Path
    results: Results
    already_there: bool
    seconds: Mapping[str, float]

    @property
    def page(self) -> Path:
        """Path of the page."""
        return self.folder / PAGE


def runs_table(runs: Sequence[Run], columns: Sequence[Column]) -> Table:
    """Return one row per run: its words and the numbers of the columns; None where it has none."""
    words = list(dict.fromkeys(word for run in runs for word in run.words))
    rows = (
        (*(run.words.get(word) for word in words), *(run.metrics.get(column.metric) for column in columns))
        for run in runs
    )
    return Table(
        (*words, *(c.heading for c in columns)), tuple(rows), frozenset(c.heading for c in columns if c.percent)
    )


def render_page(experiment: Experiment, results: Results, figures: Mapping[str, Path]) -> str:
    """Return the page of an experiment as HTML, with its figures embedded.

    The text is the experiment's own template, ``experiments/<name>/page.html``; it extends ``report/page.html``,
    which extends the layout of every page.

    Parameters
    ----------
    experiment : Experiment
    results : mapping
        The content of ``results.json``.
    figures : mapping of str to Path
        SVG file of each figure by its name.

    Raises
    ------
    jinja2.UndefinedError
        The template shows a figure that is not among them.
    """
    shown = judged(results)
    subjects = [SUBJECTS[resource] for resource in RESOURCES if resource not in shown]
    values = {
        "title": experiment.title, "name": results["dataset"]["name"], "settings": settings_table(results),
        "results": {**results, "definitions": _silent_on(subjects, results["definitions"])}, "judged": shown,
        "has_memory": measures_memory(results), "chosen": _chosen(results["inputs"]["config"]),
        **experiment.page(results),
    }  # fmt: skip
    contenders = {estimator["name"] for estimator in results["estimators"]}
    for subject in subjects:
        values |= {name: of.silent_on(subject, contenders) for name, of in values.items() if isinstance(of, Table)}
    template = f"experiments/{experiment.name.replace('-', '_')}/page.html"
    drawn = {name: path.read_text(encoding="utf-8") for name, path in figures.items()}
    return render("reclaim.replay", template, values, drawn, {"verdict": verdict_of})


def _chosen(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a replay by dotted name, as ``--set`` takes them; none of money where it sets no price."""
    free = config.get("value", {}).get("violation") is None
    return {name: as_set(value) for name, value in flatten(config).items() if not (free and name.startswith("value."))}


def _silent_on(subjects: Sequence[re.Pattern[str]], definitions: Mapping[str, str]) -> dict[str, str]:
    """Return definitions without those of a subject, and the others without their clauses about it."""
    kept = {}
    for term, meaning in definitions.items():
        sentences = [
            [clause for clause in sentence.split("; ") if not any(s.search(clause) for s in subjects)]
            for sentence in re.split(r"(?<=[.]) ", meaning)
        ]
        joined = " ".join("; ".join(clauses).rstrip(".") + "." for clauses in sentences if clauses)
        if sentences[0] and not any(s.search(term.replace("_", " ")) for s in subjects):
            kept[term] = joined if subjects else meaning
    return kept


def settings_table(results: Results) -> Table:
    """Return the settings that were chosen for each statistical estimator, budget and resource."""
    rows: list[tuple[Cell, ...]] = [
        (name, budget, RESOURCE_WORDS[r], ", ".join(f"{key} {_told(value)}" for key, value in chosen[r].items()))
        for name, by_budget in results.get("settings", {}).items()
        for budget, chosen in by_budget.items()
        for r in RESOURCES
    ]
    return Table(("estimator", "margin", "resource", "settings"), tuple(rows))


def _told(value: object) -> object:
    """Return a setting for a reader: without a value the estimator takes the published one."""
    return "published" if value is None else value


def brief(verdict: str | None) -> str | None:
    """Return a verdict for a table of a console: in twelve letters at most; None for an empty one."""
    return _BRIEF.get(verdict, verdict) if verdict else None


def verdict_of(difference: Mapping[str, float | None]) -> str:
    """Return whether a difference in what is reclaimed lies beyond the noise; ``unknown`` without an interval."""
    value, low, high = (math.nan if (n := difference[k]) is None else n for k in ("value", "low", "high"))
    return Interval(value, low, high).verdict
