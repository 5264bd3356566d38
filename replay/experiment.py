"""Defines an experiment: its settings and measurement, its page and figures, and the runs it records."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tqdm import tqdm

from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.core.tables import Table
from reclaim.data.dataset import Dataset
from reclaim.data.schema import RESOURCES, has_memory
from reclaim.features.feature_set import FeatureSet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from reclaim.training.bundle import Bundle

LEARNED: Final = "learned"
STATISTICAL: Final = "statistical"
COMPARED: Final = (LEARNED, STATISTICAL)
"""Kinds of estimators that are compared with each other; the limit and the oracle are the ends of the scale."""
LEARNED_MACHINE: Final = "learned machine"
"""Kind of a model's estimator of machines: of the sums over the forecasts of the tasks on each."""
SUM_OF_TASKS: Final = "sum of tasks"
"""Kind of an estimator of tasks whose margins are set by the sums of its reservations on machines."""
BY_MACHINE: Final = (LEARNED_MACHINE, SUM_OF_TASKS)
"""Kinds whose margins keep a budget of machine peaks."""
ORACLE: Final = "oracle"
"""Kind and name of the estimator that sees the future."""
ONLINE: Final = "-online"
"""Suffix of the name of an estimator whose margins follow the workload (``margins.online``)."""

REFERENCE: Final = "borg"
"""Estimator that every page and summary shows, where it was replayed."""
HEADLINE: Final = "aggressive"
"""Margin of the large figures of a page and of the summary on the console."""

_OF_MEMORY: Final = re.compile(r"memory|oom|runs_killed|own_limit_|machine_per_")
"""In names of numbers of memory: a run is killed for its memory alone."""
_OF_LIMITS: Final = re.compile(r"(?:^|\.)(?:granted|reserved|waiting_for)_")
"""In names of numbers that do not rest on usage."""

Results = Mapping[str, Any]
"""Content of ``results.json``: plain JSON, None for unknown values."""


def rests_on(contender: str) -> str:
    """Return the estimator of tasks behind the name of a contender: ``reclaim/2`` of ``reclaim/2 (machine)``."""
    name, bracket, kind = contender.removesuffix(ONLINE).rpartition(" (")
    return name if bracket and kind.endswith(")") else contender.removesuffix(ONLINE)


def judged(results: Results) -> list[str]:
    """Return the resources for which the dataset of some results has limits; pages and figures show only these."""
    return list(results["dataset"].get("judged") or RESOURCES)


def measures_memory(results: Results) -> bool:
    """Return whether the dataset of some results has the usage of memory."""
    return has_memory(results["dataset"].get("lacks") or ())


def of_measured(results: Results, numbers: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return numbers by name, None for one that rests on the usage of memory where that is not measured."""
    if measures_memory(results):
        return dict(numbers)
    return {
        name: None if _OF_MEMORY.search(name) and not _OF_LIMITS.search(name) else number
        for name, number in numbers.items()
    }


@dataclass(frozen=True)
class Source:
    """The input of an experiment.

    Attributes
    ----------
    dataset, features : Dataset, FeatureSet
        The features are the dataset's, and have a test period.
    bundles : mapping of str to Bundle
        Learned estimators by name.
    seconds : dict of str to float
        Filled with the wall time of the parts, as ``fold/<estimator>``.
    settings : dict
        Filled with the settings that were chosen for each statistical estimator, by budget and resource.
    engine : Engine
        Runs the jobs; the results do not depend on it.
    """

    dataset: Dataset
    features: FeatureSet
    bundles: Mapping[str, Bundle]
    seconds: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    engine: Engine = HERE

    def kind(self, name: str) -> str:
        """Return the kind of an estimator: ``LEARNED`` or ``STATISTICAL``."""
        return LEARNED if name in self.bundles else STATISTICAL

    def each(self, names: Iterable[str], doing: str, part: str) -> Iterator[str]:
        """Yield names under a progress bar, and record how long the caller takes for each as ``<part>/<name>``."""
        for name in tqdm(names, desc=doing, unit="estimator", disable=None):
            with self.timed(f"{part}/{name}"):
                yield name

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Record the wall time of a block."""
        started = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - started


@dataclass(frozen=True)
class Measured:
    """The output of an experiment.

    Attributes
    ----------
    results : dict
        The experiment's own part of ``results.json``; inputs, dataset, command and definitions are added by the caller.
        Its ``estimators`` is a list with the ``name`` and the ``kind`` of each, which the page and its figures read.
        Its ``dataset`` is added to the facts of the dataset: ``open_loop.period.period_facts``, by custom.
    definitions : mapping of str to str
        Term to meaning, for every number in the results that does not explain itself.
    write : callable or None
        Writes further files into the folder of the results.
    """

    results: dict[str, Any]
    definitions: Mapping[str, str]
    write: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Column:
    """A column of tables of runs: its heading and its key in ``Run.metrics``."""

    heading: str
    metric: str
    percent: bool = False


@dataclass(frozen=True)
class Run:
    """The recorded numbers of one contender: an estimator under a margin, on a number of machines, ….

    Attributes
    ----------
    words : mapping of str to str
        Its identity in the experiment, in the order tables show it: ``estimator``, ``margin``, ….
    metrics : mapping of str to float or None
        By key; the keys of all columns, and any others to keep.
    params : mapping
        Its own settings besides those of the configuration; nested names are joined with dots.
    tags : mapping of str to str
        Further recorded words, which no table shows: ``kind``, ….
    """

    words: Mapping[str, str]
    metrics: Mapping[str, float | None]
    params: Mapping[str, Any] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its words, as ``borg/medium``."""
        return "/".join(self.words.values())


@dataclass(frozen=True)
class Experiment:
    """One question that a replay answers: one command, one page, one MLflow experiment.

    The text of its page is a template, ``page.html`` in its folder, which extends ``report/page.html``.

    Attributes
    ----------
    name : str
        Verb and MLflow experiment: ``margins``, ``frontier``, …; with underscores the name of its folder.
    title : str
        Heading of the page, without the dataset's name.
    version : int
        Raised when the meaning of its results changes.
    config : type
        A frozen dataclass that extends ``replay.settings.ComparisonConfig``.
    measure : callable
        From a source and a configuration.
    page : callable
        From the results to the values and tables that the template names besides ``results`` and ``images``.
    summary : callable
        From the results to the table of a console of 80 columns, eight rows at most: the best learned and the best
        statistical estimator, Borg's, the oracle, and a verdict where there is one.
    figures : mapping of str to callable
        From the results to a figure, by file name; None where there is nothing to draw.
    runs : callable
        From the results to the recorded runs.
    columns : tuple of Column
        Numbers of every run that ``reclaim compare`` and the page show.
    models : callable or None
        From the results to the table of the console that compares each model with the first; without rows where there
        is one model. None where the experiment compares none.
    command : str or None
        Words of its command after ``reclaim``; None: ``replay`` and its name.
    publish : callable or None
        From the results to those that are written and shown; None leaves them as they are.
    """

    name: str
    title: str
    version: int
    config: type[Any]
    measure: Callable[[Source, Any], Measured]
    page: Callable[[Results], Mapping[str, Any]]
    summary: Callable[[Results], Table]
    figures: Mapping[str, Callable[[Results], Figure | None]]
    runs: Callable[[Results], Sequence[Run]]
    columns: tuple[Column, ...]
    models: Callable[[Results], Table] | None = None
    command: str | None = None
    publish: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    @property
    def words(self) -> str:
        """Words of its command after ``reclaim``."""
        return self.command or f"replay {self.name}"
