"""Lays recorded experiments side by side: a table of each, a row per dataset, settings and contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

from reclaim.data.errors import ConfigError, ModelError
from reclaim.data.table import Cell, Table
from reclaim.replay.experiments import EXPERIMENTS, load_experiment
from reclaim.replay.kinds import COMPARED, ORACLE, Column
from reclaim.replay.record import FINISHED, TAG_PARENT, TAG_PLACE, TAG_WORDS
from reclaim.training import tracking
from reclaim.training.flat import flatten
from reclaim.training.mlstore import default_tracking_uri
from reclaim.training.tracking import RunRecord

_KINDS: Final = (*COMPARED, "limit", ORACLE)
_ALIKE: Final = ("estimators", "draws", "confidence", "seed")
"""Settings that ask no other question: the newest run stands for all that differ in nothing else."""
_IN_SIGHT: Final = ("horizon_s", "estimators", "draws", "confidence")
"""Settings that no column is made of: the horizon has one, the others say nothing of a contender's numbers."""


@dataclass(frozen=True)
class Chosen:
    """The runs to compare.

    Attributes
    ----------
    runs : tuple of RunRecord
        Each of one estimator and margin, in the order of the table.
    named : mapping of run id to int
        Place of each among the ids that were asked for; empty where none was.
    recorded : tuple of RunRecord
        All there are, newest first.
    """

    runs: tuple[RunRecord, ...]
    named: dict[str, int]
    recorded: tuple[RunRecord, ...]


def choose(runs: Sequence[str] = (), experiment: str | None = None) -> Chosen:
    """Return the runs to compare.

    Parameters
    ----------
    runs : sequence of str
        Ids of runs to show: of single ones, or of whole experiments, which stand for all of theirs. None given shows
        the newest run of every dataset and contender for each of the settings there are on record.
    experiment : str or None
        Name of the one to show; all when None.

    Raises
    ------
    ConfigError
        There is no such experiment.
    ModelError
        Nothing is recorded, or a run does not exist or is none of a replay.
    """
    if experiment is not None and experiment not in EXPERIMENTS:
        raise ConfigError(f"--experiment: expected one of {', '.join(EXPERIMENTS)}, got {experiment!r}")
    names = EXPERIMENTS if experiment is None else [experiment]
    records = [r for name in names for r in tracking.find_runs(name) if r.status == FINISHED]
    single = [r for r in records if TAG_PARENT in r.tags]
    named: dict[str, int] = {}
    if runs:
        chosen = {r.run_id: r for r in _named(runs, single, records, named)}
    else:
        chosen = {r.run_id: r for r in _newest(single)}
    if not chosen:
        store = default_tracking_uri()
        raise ModelError(
            f"no finished replay in {store}; `reclaim replay {experiment or 'margins'} DATASET --out DIR` makes one"
        )
    return Chosen(_ordered(list(chosen.values())), named, tuple(single))


def compare(runs: Sequence[str] | Chosen = ()) -> dict[str, Table]:
    """Return a table of the recorded runs of each experiment, by its name; arguments and errors as in ``choose``.

    A setting in which the runs of a table differ is a column of it.
    """
    chosen = runs if isinstance(runs, Chosen) else choose(runs)
    tables = {}
    for name in EXPERIMENTS:
        records = [r for r in chosen.runs if r.experiment == name]
        if records:
            tables[name] = _table(records, load_experiment(name).columns)
    return tables


def words_of(record: RunRecord) -> dict[str, str]:
    """Return what tells a run from its neighbours, by name."""
    names = record.tags.get(TAG_WORDS, "estimator,margin").split(",")  # what all had, before it was on record
    return {name: record.tags[name] for name in names if name in record.tags}


def horizon_of(record: RunRecord) -> str:
    """Return the horizon that a run's reservations are promised for, as ``3600 s``."""
    return f"{record.params.get('horizon_s', '-')} s"


def promise_of(record: RunRecord) -> tuple[str, ...]:
    """Return all that runs must share to stand beside each other: horizon, budgets, and who keeps them."""
    names = ("horizon_s", "budgets.baseline", "budgets.aggressive", "by_group")
    return tuple(record.params.get(name, "") for name in names)


def settings_of(record: RunRecord) -> dict[str, str]:
    """Return what a run's experiment was set to, by dotted name; what stands among its words is left to them."""
    names = flatten(asdict(load_experiment(record.experiment).config()))
    apart = words_of(record)
    return {name: record.params[name] for name in names if name in record.params and name not in apart}


def _named(
    runs: Sequence[str], single: Sequence[RunRecord], records: Sequence[RunRecord], place: dict[str, int]
) -> list[RunRecord]:
    by_id = {r.run_id: r for r in records}
    chosen: list[RunRecord] = []
    for i, run_id in enumerate(runs):
        record = by_id.get(run_id) or tracking.find_run(run_id)
        members = [record] if TAG_PARENT in record.tags else [r for r in single if r.tags[TAG_PARENT] == run_id]
        if not members:
            raise ModelError(
                f"run {run_id} ({record.experiment}/{record.name}) is no finished replay, nothing to compare"
            )
        chosen += members
        for member in members:
            place.setdefault(member.run_id, i)
    return chosen


def _newest(single: Sequence[RunRecord]) -> list[RunRecord]:
    newest: dict[tuple[object, ...], RunRecord] = {}
    for record in single:  # newest first
        asked = tuple((name, value) for name, value in settings_of(record).items() if name not in _ALIKE)
        words = tuple(words_of(record).items())
        key = (record.experiment, record.tags.get("dataset_fingerprint", ""), words, asked)
        newest.setdefault(key, record)
    return list(newest.values())


def _ordered(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """Return runs by experiment, dataset, horizon and kind; contenders of the same words next to each other."""
    by_age = sorted(records, key=lambda r: (-r.started_ms, r.run_id))
    wholes = {whole: age for age, whole in enumerate(dict.fromkeys(r.tags[TAG_PARENT] for r in by_age))}
    in_place = sorted(by_age, key=lambda r: (wholes[r.tags[TAG_PARENT]], int(r.tags.get(TAG_PLACE, 0))))
    contenders = list(dict.fromkeys(tuple(words_of(r).items()) for r in in_place))
    names = list(EXPERIMENTS)

    def key(record: RunRecord) -> tuple[object, ...]:
        tags = record.tags
        kind = tags.get("kind", "")
        return (
            names.index(record.experiment) if record.experiment in names else len(names),
            tags.get("dataset", ""),
            tags.get("dataset_fingerprint", ""),
            int(record.params.get("horizon_s", 0)),
            _KINDS.index(kind) if kind in _KINDS else len(_KINDS),
            contenders.index(tuple(words_of(record).items())),
            -record.started_ms,
        )

    return tuple(sorted(in_place, key=key))


def _table(records: Sequence[RunRecord], columns: Sequence[Column]) -> Table:
    words = list(dict.fromkeys(word for record in records for word in words_of(record)))
    headings = tuple(column.heading for column in columns)
    differing = _differing(records)
    rows = tuple(_row(record, differing, words, columns) for record in records)
    percent = frozenset(column.heading for column in columns if column.percent)
    return Table(("dataset", "horizon", *differing, *words, *headings, "started (UTC)", "run"), rows, percent)


def _differing(records: Sequence[RunRecord]) -> list[str]:
    """Return the settings in which runs differ, but for those that say nothing of a contender's numbers."""
    settings = [settings_of(record) for record in records]
    names = dict.fromkeys(name for one in settings for name in one if name not in _IN_SIGHT)
    return [name for name in names if len({one[name] for one in settings if name in one}) > 1]


def _row(
    record: RunRecord, differing: Sequence[str], words: Sequence[str], columns: Sequence[Column]
) -> tuple[Cell, ...]:
    started = datetime.fromtimestamp(record.started_ms / 1000, UTC)
    told_apart = words_of(record)
    return (
        record.tags.get("dataset", "-"),
        horizon_of(record),
        *(record.params.get(name) for name in differing),
        *(told_apart.get(word) for word in words),
        *(record.metrics.get(column.metric) for column in columns),
        f"{started:%Y-%m-%d %H:%M}",
        record.run_id,
    )
