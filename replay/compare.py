"""Lays recorded replays side by side: one row per dataset, estimator and margin, the newest run of each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from reclaim.data.errors import ModelError
from reclaim.data.schema import RESOURCES
from reclaim.replay.record import EXPERIMENT, FINISHED, TAG_PARENT
from reclaim.replay.report import RESOURCE_TITLES, Cell, Table
from reclaim.training import tracking
from reclaim.training.estimators.margin import MARGIN_NAMES
from reclaim.training.tracking import RunRecord

_KINDS: Final = ("learned", "statistical", "limit", "oracle")
_MARGINS: Final = (*MARGIN_NAMES, "none")
_METRICS: Final = {"reclaimed": "reclaimed_share", "violation": "violation_rate", "of oracle": "efficiency"}


def compare(runs: Sequence[str] = ()) -> Table:
    """Return the recorded replays as a table.

    Parameters
    ----------
    runs : sequence of str
        Ids of runs to show: of single ones, or of whole experiments, which stand for all of theirs. None given shows
        the newest run of every dataset, estimator and margin.

    Raises
    ------
    ModelError
        Nothing is recorded, or a run does not exist or is none of a replay.
    """
    records = [r for r in tracking.find_runs(EXPERIMENT) if r.status == FINISHED]
    single = [r for r in records if TAG_PARENT in r.tags]
    chosen = _named(runs, single, records) if runs else _newest(single)
    if not chosen:
        store = tracking.default_tracking_uri()
        raise ModelError(f"no finished replay in {store}; `reclaim replay margins DATASET --out DIR` makes one")
    names = [f"{RESOURCE_TITLES[r]} {label}" for r in RESOURCES for label in _METRICS]
    rows = [_row(record) for record in sorted(chosen, key=_order)]
    columns = ("dataset", "estimator", "margin", *names, "would-be OOM", "started (UTC)", "run")
    return Table(columns, tuple(rows), percent=frozenset(names))


def _named(runs: Sequence[str], single: Sequence[RunRecord], records: Sequence[RunRecord]) -> list[RunRecord]:
    by_id = {r.run_id: r for r in records}
    chosen: dict[str, RunRecord] = {}
    for run_id in runs:
        record = by_id.get(run_id) or tracking.find_run(run_id)
        members = [record] if TAG_PARENT in record.tags else [r for r in single if r.tags[TAG_PARENT] == run_id]
        if not members:
            raise ModelError(
                f"run {run_id} ({record.experiment}/{record.name}) is no finished replay, nothing to compare"
            )
        chosen |= {r.run_id: r for r in members}
    return list(chosen.values())


def _newest(single: Sequence[RunRecord]) -> list[RunRecord]:
    newest: dict[tuple[str, ...], RunRecord] = {}
    for record in single:  # newest first
        key = tuple(record.tags.get(tag, "") for tag in ("dataset_fingerprint", "estimator", "margin"))
        newest.setdefault(key, record)
    return list(newest.values())


def _order(record: RunRecord) -> tuple[str, str, int, str, int, int]:
    tags = record.tags
    return (
        tags.get("dataset", ""),
        tags.get("dataset_fingerprint", ""),
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
        tags.get("estimator", record.name),
        tags.get("margin", "-"),
        *(metrics.get(f"{r}.{metric}") for r in RESOURCES for metric in _METRICS.values()),
        None if events is None else int(events),
        f"{started:%Y-%m-%d %H:%M}",
        record.run_id,
    )
