"""Describes a fetched Kubernetes history as a trace; its tables are made from the raw samples unless they exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from tqdm import tqdm

from reclaim.data import schema as s
from reclaim.data.core.files import content_sha256, file_sha256, replaced_folder, write_json
from reclaim.data.core.parquet import TableWriter
from reclaim.data.errors import TraceError
from reclaim.data.samples import WINDOW_US
from reclaim.data.traces.dialect import Dialect
from reclaim.data.traces.history import PIECE_S, History, read_piece
from reclaim.data.traces.kubernetes.anonymous import anonymise
from reclaim.data.traces.kubernetes.fold import (
    EVENT_EXTRAS,
    MACHINE_EXTRAS,
    NAME_EXTRAS,
    USAGE_EXTRAS,
    Fold,
)
from reclaim.data.traces.kubernetes.owners import ROLES, Facts, Owners, owners_of
from reclaim.data.traces.kubernetes.series import copies_in_words
from reclaim.data.traces.source import RawTable, Source

FOLDER: Final = "tables"
ANONYMOUS: Final = "anonymous"
"""Folder of the tables without names, and the option that a dataset's manifest has for them."""
DONE: Final = "made.json"
GENERATION: Final = 12
"""Raised when the same samples give other tables."""
_PIECES_PER_FILE: Final = 12
"""A day of usage in a file."""

_EXTRAS: Final = {"usage": USAGE_EXTRAS, "events": EVENT_EXTRAS, "machines": MACHINE_EXTRAS, "names": NAME_EXTRAS}
_KINDS_BY_NAME: Final = ("Deployment", "StatefulSet")
"""Kinds of owners that can be read off the form of a pod's name."""
_TYPES: Final = {
    pa.int8(): "TINYINT", pa.int32(): "INTEGER", pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN", pa.list_(pa.float32()): "FLOAT[]", pa.list_(pa.int64()): "BIGINT[]",
}  # fmt: skip
NOTES: Final = (
    "Times are microseconds of Unix time; windows are slots of five minutes of it, made of raw samples.",
    "A limit is the enforced one; where there is none, the smallest power of two that is at least the request and "
    "twice the largest usage of the collection so far, no more than the node allots. Requests are apart from limits.",
    "Out-of-memory kills are recorded (restarts whose reason is OOMKilled), not derived.",
    "Usage between two scrapes is averaged: spikes shorter than a scrape are not seen.",
)


def kubernetes(folder: Path, *, anonymous: bool = False) -> Source:
    """Return the source of a history in ``folder``; makes its tables in ``tables/`` there, unless they are made.

    Those without names (``anonymous.anonymise``) are made in ``anonymous/``.

    Raises
    ------
    ConfigError
        There is no history, it is not complete, or its dialect is of another version.
    TraceError
        A piece cannot be read, or there is no usage in it.
    """
    history = History.open(folder)
    dialect = history.dialect
    pieces = [[path.name, file_sha256(path)] for path in history.pieces()]
    identity = content_sha256([GENERATION, WINDOW_US, history.record["dialect"], pieces])
    tables = ANONYMOUS if anonymous else FOLDER
    made = folder / tables / DONE
    if not (made.is_file() and identity in made.read_text(encoding="utf-8")):
        with replaced_folder(folder / tables) as work:
            counts, findings = _make(history, dialect, work)
            if anonymous:
                anonymise(work)
            write_json(work / DONE, {"identity": identity, "counts": counts, "findings": findings})
    return Source(
        trace="kubernetes",
        tables=tuple(_table(tables, name) for name in ("usage", "events", "collections", "machines", "names")),
        lacks=(
            s.ALLOC_COLLECTION_ID, s.ALLOC_INSTANCE_INDEX, s.CPU_SAMPLE, s.MEMORY_ASSIGNED, s.CPI, s.MAI, s.PRIORITY,
            s.SCHEDULING_CLASS,
        ),
        options={"history": identity, **({ANONYMOUS: "yes"} if anonymous else {})},
        extras=_EXTRAS,
        limits_in_usage=True,
        longest_window_us=WINDOW_US,
        notes=NOTES,
        findings=tuple(json.loads((folder / tables / DONE).read_text(encoding="utf-8"))["findings"]),
    )  # fmt: skip


def _table(folder: str, name: str) -> RawTable:
    """Return the reading of a table that is already canonical."""
    schema = s.with_extras(name, _EXTRAS.get(name, ()))
    return RawTable(
        name=name,
        patterns=(f"{folder}/{name}-*.parquet",),
        columns={field.name: _TYPES[field.type] for field in schema},
        select=", ".join(schema.names),
        needs=tuple(schema.names),
    )


def _make(history: History, dialect: Dialect, work: Path) -> tuple[dict[str, int], list[str]]:
    """Write the tables of a history; return their rows, and what a reader must know about this history."""
    pieces = list(history.pieces())
    counts = dict.fromkeys(("usage", "events", "collections", "machines", "names"), 0)
    known = {*ROLES}
    owners = owners_of((read_piece(path, known) for path in pieces), dialect)
    fold = Fold(dialect, owners)
    usage_schema = s.with_extras("usage", USAGE_EXTRAS)
    starts = list(history.starts_s())
    with TableWriter(work / "events-0.parquet", s.with_extras("events", EVENT_EXTRAS)) as events:
        for first in tqdm(range(0, len(pieces), _PIECES_PER_FILE), desc="making windows", disable=None, leave=False):
            rows: list[pa.Table] = []
            for k in range(first, min(first + _PIECES_PER_FILE, len(pieces))):
                begin_us = starts[k] * 1_000_000
                windows, found = fold.piece(read_piece(pieces[k]), begin_us, begin_us + PIECE_S * 1_000_000)
                rows.append(windows)
                events.write(_rows(found, s.with_extras("events", EVENT_EXTRAS)))
            if sum(map(len, rows)):
                with TableWriter(work / f"usage-{first // _PIECES_PER_FILE:04d}.parquet", usage_schema) as usage:
                    usage.write(pa.concat_tables(rows))
                    counts["usage"] += usage.rows
        events.write(_rows(list(fold.ends()), s.with_extras("events", EVENT_EXTRAS)))
        counts["events"] = events.rows
    if not counts["usage"]:
        raise TraceError(f"{history.folder}: not one window in {len(pieces)} pieces")
    for name, found in (
        ("collections", _collections(fold)), ("machines", fold.machines), ("names", _names(fold, owners)),
    ):  # fmt: skip
        schema = s.with_extras(name, _EXTRAS.get(name, ()))
        with TableWriter(work / f"{name}-0.parquet", schema) as writer:
            writer.write(_rows(found, schema))
            counts[name] = len(found)
    return counts, _findings(fold, owners)


def _findings(fold: Fold, owners: Owners) -> list[str]:
    """Return counts of what is missing from the tables, and of what was guessed."""
    seen = [task for task in fold.tasks.values() if task.seen_us]
    pods = {task.key[:3]: task.workload for task in seen}
    guessed = sum(
        of.kind in _KINDS_BY_NAME and not owners.pods.get(pod, Facts()).owner_kind for pod, of in pods.items()
    )
    kills = sum(task.kills for task in fold.tasks.values() if not task.seen_us)
    found = []
    if unseen := len(fold.tasks) - len(seen):
        found.append(
            f"Containers with samples but no window, which are not in the dataset: {unseen} of {len(fold.tasks)}. "
            "A window needs two samples no more than five minutes apart."
            + (f" They had {kills:,} out-of-memory kills, as a container that dies as it starts." if kills else "")
        )
    if copied := [task for task in seen if task.twice]:
        found.append(
            f"Containers measured twice, of which one copy counts: {len(copied)} of {len(seen)}; "
            f"{copies_in_words(copied[0].twice)}."
        )
    if once := sum(task.container_kind == s.INIT for task in seen):
        found.append(f"Init containers that run once, which `recommend` leaves out: {once} of {len(seen)} containers.")
    if guessed:
        found.append(f"Pods whose owner is read off their name, as nothing else says it: {guessed} of {len(pods)}.")
    return found


def _rows(found: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array([row.get(f.name) for row in found], f.type) for f in schema], schema=schema)


def _collections(fold: Fold) -> list[dict[str, Any]]:
    return [
        {
            s.COLLECTION_ID: collection, s.TIME_US: time_us, s.EVENT_TYPE: s.EventType.SUBMIT, s.COLLECTION_TYPE: 0,
            s.TIER: task.tier, s.USER_ID: task.workload.user,
            s.NAME_ID: task.workload.collection_name(task.key.container),
            s.LOGICAL_NAME_ID: task.workload.logical_name(task.key.container),
        }
        for collection, (time_us, task) in sorted(fold.first_seen_us.items())
    ]  # fmt: skip


def _names(fold: Fold, owners: Owners) -> list[dict[str, Any]]:
    return [
        {
            s.COLLECTION_ID: task.collection, s.INSTANCE_INDEX: task.index, s.CLUSTER: task.key.cluster or None,
            s.NAMESPACE: task.key.namespace, s.WORKLOAD_KIND: task.workload.kind, s.WORKLOAD: task.workload.name,
            s.CONTAINER: task.key.container, s.POD: task.key.pod, s.MACHINE_NAME: task.place_at(task.seen_us) or None,
            s.AUTOSCALER: owners.autoscaler(task.workload),
            s.AUTOSCALED: ",".join(owners.autoscaled(task.workload)) or None,
            s.CONTAINER_KIND: task.container_kind or None,
        }
        for _, task in sorted(fold.seen().items())
    ]  # fmt: skip
