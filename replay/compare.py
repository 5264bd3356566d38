"""Lays recorded replays side by side: one row per dataset, horizon, estimator and margin, the newest run of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from reclaim.data.errors import ModelError
from reclaim.data.schema import RESOURCES
from reclaim.replay.record import COMPARED, EXPERIMENT, FINISHED, TAG_PARENT
from reclaim.replay.report import RESOURCE_TITLES, Cell, Table
from reclaim.training import tracking
from reclaim.training.estimators.margin import MARGIN_NAMES
from reclaim.training.mlstore import default_tracking_uri
from reclaim.training.tracking import RunRecord

_KINDS: Final = (*COMPARED, "limit", "oracle")
_MARGINS: Final = (*MARGIN_NAMES, "none")
_METRICS: Final = {"reclaimed": "reclaimed_share", "violation": "violation_rate", "of oracle": "efficiency"}


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


def choose(runs: Sequence[str] = ()) -> Chosen:
    """Return the runs to compare.

    Parameters
    ----------
    runs : sequence of str
        Ids of runs to show: of single ones, or of whole experiments, which stand for all of theirs. None given shows
        the newest run of every dataset, horizon, estimator and margin.

    Raises
    ------
    ModelError
        Nothing is recorded, or a run does not exist or is none of a replay.
    """
    records = [r for r in tracking.find_runs(EXPERIMENT) if r.status == FINISHED]
    single = [r for r in records if TAG_PARENT in r.tags]
    named: dict[str, int] = {}
    if runs:
        chosen = {r.run_id: r for r in _named(runs, single, records, named)}
    else:
        chosen = {r.run_id: r for r in _newest(single)}
    if not chosen:
        store = default_tracking_uri()
        raise ModelError(f"no finished replay in {store}; `reclaim replay margins DATASET --out DIR` makes one")
    return Chosen(tuple(sorted(chosen.values(), key=_order)), named, tuple(single))


def compare(runs: Sequence[str] | Chosen = ()) -> Table:
    """Return the recorded replays as a table; arguments and errors as in ``choose``."""
    chosen = runs if isinstance(runs, Chosen) else choose(runs)
    names = [f"{RESOURCE_TITLES[r]} {label}" for r in RESOURCES for label in _METRICS]
    rows = [_row(record) for record in chosen.runs]
    columns = ("dataset", "horizon", "estimator", "margin", *names, "would-be OOM", "started (UTC)", "run")
    return Table(columns, tuple(rows), percent=frozenset(names))


def horizon_of(record: RunRecord) -> str:
    """Return the horizon that a run's reservations are promised for, as ``3600 s``."""
    return f"{record.params.get('horizon_s', '-')} s"


def promise_of(record: RunRecord) -> tuple[str, ...]:
    """Return all that runs must share to stand beside each other: horizon, budgets, and who keeps them."""
    names = ("horizon_s", "budgets.baseline", "budgets.aggressive", "by_group")
    return tuple(record.params.get(name, "") for name in names)


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
    newest: dict[tuple[str, ...], RunRecord] = {}
    for record in single:  # newest first
        key = tuple(record.tags.get(tag, "") for tag in ("dataset_fingerprint", "estimator", "margin"))
        newest.setdefault((*key, *promise_of(record)), record)
    return list(newest.values())


def _order(record: RunRecord) -> tuple[str, str, int, int, str, int, int]:
    tags = record.tags
    return (
        tags.get("dataset", ""),
        tags.get("dataset_fingerprint", ""),
        int(record.params.get("horizon_s", 0)),
        _position(tags.get("kind", ""), _KINDS),
        tags.get("estimator", ""),
        _position(tags.get("margin", ""), _MARGINS),
        -record.started_ms,
    )


def _position(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _row(record: RunRecord) -> tuple[Cell, ...]:
    tags, metrics = record.tags, record.metrics
    events = metrics.get("oom.events")
    started = datetime.fromtimestamp(record.started_ms / 1000, UTC)
    return (
        tags.get("dataset", "-"),
        horizon_of(record),
        tags.get("estimator", record.name),
        tags.get("margin", "-"),
        *(metrics.get(f"{r}.{metric}") for r in RESOURCES for metric in _METRICS.values()),
        None if events is None else int(events),
        f"{started:%Y-%m-%d %H:%M}",
        record.run_id,
    )
