"""Chooses recorded runs and tabulates them side by side: a table per experiment, a row per dataset and contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

from reclaim.data.core.nested import flatten
from reclaim.data.core.tables import Cell, Table
from reclaim.data.errors import ConfigError, ModelError
from reclaim.replay.experiment import COMPARED, ORACLE, Column
from reclaim.replay.runs.catalogue import EXPERIMENTS, load_experiment
from reclaim.replay.runs.record import TAG_PARENT, TAG_PLACE, dataset_of, horizon_of, shown_datasets, words_of
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.client import store_shown
from reclaim.training.tracking.runs import FINISHED, RunRecord

_KINDS: Final = (*COMPARED, "limit", ORACLE)
"""Order of the contenders in a table; other kinds come last."""
_SAME_QUESTION: Final = ("estimators", "draws", "confidence", "seed")
"""Settings that do not change the question: of runs that differ only in these the newest is shown."""
_NO_COLUMN: Final = ("horizon_s", "estimators", "draws", "confidence")
"""Settings without a column: the horizon has one already, the others do not affect a contender's numbers."""


@dataclass(frozen=True)
class Chosen:
    """The runs to compare.

    Attributes
    ----------
    runs : tuple of RunRecord
        Each of one estimator and margin, in the order of the table.
    named : mapping of run id to int
        Place of each among the given ids; empty where none was given.
    recorded : tuple of RunRecord
        All finished runs of contenders whose whole experiment is recorded, not deleted, newest first.
    """

    runs: tuple[RunRecord, ...]
    named: dict[str, int]
    recorded: tuple[RunRecord, ...]


def choose(runs: Sequence[str] = (), experiment: str | None = None) -> Chosen:
    """Return the runs to compare.

    Parameters
    ----------
    runs : sequence of str
        Ids of single runs, or of whole experiments for all of their runs. None given: the newest run of every dataset,
        contender and question.
    experiment : str or None
        Name of the only experiment to show; all when None.

    Raises
    ------
    ConfigError
        There is no such experiment.
    ModelError
        Nothing is recorded, or a run does not exist, is not finished, or is not of a replay that is asked for.
    """
    if experiment is not None and experiment not in EXPERIMENTS:
        raise ConfigError(f"--experiment: expected one of {', '.join(EXPERIMENTS)}, got {experiment!r}")
    names = EXPERIMENTS if experiment is None else [experiment]
    records = {r.run_id: r for name in names for r in tracking.find_runs(name) if r.status == FINISHED}
    single = [r for r in records.values() if r.tags.get(TAG_PARENT) in records]
    named: dict[str, int] = {}
    chosen: dict[object, RunRecord] = {}
    for place, run_id in enumerate(runs):
        for record in _members(run_id, single, f"replay of {experiment}" if experiment else "replay"):
            named.setdefault(record.run_id, place)
            chosen[record.run_id] = record
    if not runs:
        for record in single:  # newest first
            chosen.setdefault(_question(record), record)
    if not chosen:
        raise ModelError(
            f"no finished replay in {store_shown()}; "
            f"`reclaim replay {experiment or 'margins'} DATASET --out DIR` makes one"
        )
    return Chosen(_ordered(list(chosen.values())), named, tuple(single))


def compare(chosen: Chosen) -> dict[str, Table]:
    """Return a table of the chosen runs of each experiment, by its name.

    A setting in which the runs of a table differ is a column of it.
    """
    by_name = {name: [r for r in chosen.runs if r.experiment == name] for name in EXPERIMENTS}
    datasets = shown_datasets(chosen.runs)
    return {
        name: _table(records, load_experiment(name).columns, datasets) for name, records in by_name.items() if records
    }


def _members(run_id: str, single: Sequence[RunRecord], wanted: str) -> list[RunRecord]:
    """Return a run of one contender, or all runs of contenders of a whole experiment."""
    members = [r for r in single if run_id in (r.run_id, r.tags[TAG_PARENT])]
    if not members:
        record = tracking.find_run(run_id)
        raise ModelError(f"run {run_id} ({record.experiment}/{record.name}) is not a finished {wanted}")
    return members


def _settings(record: RunRecord) -> dict[str, str]:
    """Return the settings of a run's experiment by dotted name, except those among its words."""
    names = flatten(asdict(load_experiment(record.experiment).config()))
    return {name: record.params[name] for name in names if name in record.params and name not in words_of(record)}


def _question(record: RunRecord) -> tuple[object, ...]:
    """Return everything that distinguishes a run from other runs, except its age and ``_SAME_QUESTION``."""
    asked = tuple((name, value) for name, value in _settings(record).items() if name not in _SAME_QUESTION)
    return record.experiment, dataset_of(record)[1], tuple(words_of(record).items()), asked


def _ordered(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """Return runs by experiment, dataset, horizon and kind; contenders of the same words next to each other."""
    by_age = sorted(records, key=lambda r: (-r.started_ms, r.run_id))
    wholes = list(dict.fromkeys(r.tags[TAG_PARENT] for r in by_age))
    in_place = sorted(by_age, key=lambda r: (wholes.index(r.tags[TAG_PARENT]), int(r.tags.get(TAG_PLACE, 0))))
    contenders = list(dict.fromkeys((r.experiment, *words_of(r).items()) for r in in_place))

    def key(record: RunRecord) -> tuple[object, ...]:
        return (
            _place(record.experiment, list(EXPERIMENTS)),
            *dataset_of(record),
            int(record.params.get("horizon_s", 0)),
            _place(record.tags.get("kind"), _KINDS),
            contenders.index((record.experiment, *words_of(record).items())),
            -record.started_ms,
        )

    return tuple(sorted(in_place, key=key))


def _place(name: str | None, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _table(records: Sequence[RunRecord], columns: Sequence[Column], datasets: Mapping[str, str]) -> Table:
    """Return a row of each run; ``datasets`` has the name of its dataset by run id."""
    words = list(dict.fromkeys(word for record in records for word in words_of(record)))
    settings = [_settings(record) for record in records]
    names = dict.fromkeys(name for one in settings for name in one if name not in _NO_COLUMN)
    differing = [name for name in names if len({one[name] for one in settings if name in one}) > 1]

    def row(record: RunRecord) -> tuple[Cell, ...]:
        of_words = words_of(record)
        return (
            datasets[record.run_id],
            horizon_of(record),
            *(record.params.get(name) for name in differing),
            *(of_words.get(word) for word in words),
            *(record.metrics.get(column.metric) for column in columns),
            f"{datetime.fromtimestamp(record.started_ms / 1000, UTC):%Y-%m-%d %H:%M}",
            record.run_id,
        )

    headings = ("dataset", "horizon", *differing, *words, *(c.heading for c in columns), "started (UTC)", "run")
    return Table(headings, tuple(map(row, records)), frozenset(c.heading for c in columns if c.percent))
