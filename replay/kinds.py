"""What an experiment is: how it measures, what it says, and how its page, its figures and its runs are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reclaim.data.store import Dataset
from reclaim.data.table import Table
from reclaim.features.store import FeatureSet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from reclaim.training.bundle import Bundle

LEARNED: Final = "learned"
STATISTICAL: Final = "statistical"
COMPARED: Final = (LEARNED, STATISTICAL)
"""Kinds of estimators that are measured by each other; the limit and the oracle are the ends of the scale."""
ORACLE: Final = "oracle"
"""Kind and name of the one that sees the future."""
ONLINE: Final = "-online"
"""Behind the name of an estimator: under margins that follow the workload (``estimators.online``)."""

Results = Mapping[str, Any]
"""What ``results.json`` holds: plain JSON, None for what is not known."""


@dataclass(frozen=True)
class Source:
    """What an experiment is run on.

    Attributes
    ----------
    dataset, features : Dataset, FeatureSet
        The features are the dataset's, and have a test period.
    bundles : mapping of str to Bundle
        Learned estimators by the name they go under.
    progress : bool
        Whether to show progress on a terminal.
    seconds : dict of str to float
        Filled with the wall time of the parts, as ``fold/<estimator>``.
    """

    dataset: Dataset
    features: FeatureSet
    bundles: Mapping[str, Bundle]
    progress: bool = True
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What came of an experiment.

    Attributes
    ----------
    results : dict
        The experiment's own part of ``results.json``; inputs, dataset, command and definitions are added by the caller.
        What it holds under ``dataset`` is added to what is said of the dataset: ``cell.period_facts``, by custom.
    definitions : mapping of str to str
        Term to meaning: of every number in the results that does not explain itself.
    write : callable or None
        Writes further files into the folder of the results.
    """

    results: dict[str, Any]
    definitions: Mapping[str, str]
    write: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Section:
    """A part of the page: a title, and any of a text, a figure with a caption, and a table below it."""

    title: str
    text: str = ""
    """Paragraphs, with an empty line between them."""
    figure: str = ""
    """Key of ``Experiment.figures``."""
    caption: str = ""
    table: Table | None = None


@dataclass(frozen=True)
class Column:
    """A number of a run that tables show: its heading and the key of ``Run.metrics``."""

    heading: str
    metric: str
    percent: bool = False


@dataclass(frozen=True)
class Run:
    """What goes on record of one contender: an estimator under a margin, on a number of machines, ….

    Attributes
    ----------
    name : str
        Unique in the experiment, as ``borg/medium``.
    words : mapping of str to str
        What tells it from its neighbours, in the order tables show it: ``estimator``, ``margin``, ….
    metrics : mapping of str to float or None
        By key; the keys of all columns, and any others worth keeping.
    params : mapping
        What it was set to; nested names are joined with dots, beside those of the configuration.
    tags : mapping of str to str
        Further words on record, which no table shows: ``kind``, ….
    """

    name: str
    words: Mapping[str, str]
    metrics: Mapping[str, float | None]
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


def judged_ahead(results: Results) -> str:
    """Say how reservations are judged where each is held against what its own task came to use."""
    return (
        "Margins are set on the validation period; every number below is measured on the later test period, each "
        f"reservation made from the past alone and judged against the {results['inputs']['config']['horizon_s']} "
        "seconds it was promised for."
    )


@dataclass(frozen=True)
class Experiment:
    """One question that a replay answers: one command, one page, one MLflow experiment.

    Attributes
    ----------
    name : str
        Verb and MLflow experiment: ``margins``, ``frontier``, ….
    title : str
        Heading of the page, without the dataset's name.
    version : int
        Raised when the meaning of its results changes.
    config : type
        A frozen dataclass that extends ``replay.settings.ReplayConfig``.
    measure : callable
        From a source and a configuration.
    says : callable
        From the results to the paragraphs that say what they show, in words and in their own numbers.
    sections : callable
        From the results to the parts of the page after those paragraphs.
    figures : mapping of str to callable
        From the results to a figure, by file name; None where there is nothing to draw. The first one is the
        experiment's own.
    runs : callable
        From the results to what goes on record.
    columns : tuple of Column
        What the table of a terminal and ``reclaim compare`` show of every run: the same numbers.
    judged : callable
        From the results to what the head of the page says of how its numbers came about: on which period, and what
        reservations are held against.
    """

    name: str
    title: str
    version: int
    config: type[Any]
    measure: Callable[[Source, Any], Measured]
    says: Callable[[Results], Sequence[str]]
    sections: Callable[[Results], Sequence[Section]]
    figures: Mapping[str, Callable[[Results], Figure | None]]
    runs: Callable[[Results], Sequence[Run]]
    columns: tuple[Column, ...]
    judged: Callable[[Results], str] = judged_ahead
