"""Describes what a service recorded (``reclaim serve --record``) as a trace: it is already canonical."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.traces.source import RawTable, Source, measured, present
from reclaim.data.windows import CHANNELS, VECTORS, Windows

_TYPES: Final = {
    pa.int8(): "TINYINT", pa.int32(): "INTEGER", pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.string(): "VARCHAR",
    pa.list_(pa.float32()): "FLOAT[]", pa.bool_(): "BOOLEAN",
}  # fmt: skip
_LACKS: Final = (s.ALLOC_INSTANCE_INDEX, s.CPU_SAMPLE, s.MEMORY_ASSIGNED, s.SAMPLE_RATE_HZ, s.PRIORITY)
_EXTRAS: Final = {"events": (s.OUT_OF_MEMORY,)}
_SOME_ALLOC: Final = 0
"""Alloc set of a task inside one: a service knows only that there is one."""
RECORDED: Final = {
    "usage": s.USAGE,
    "events": pa.schema(
        [
            s.with_extras("events", _EXTRAS["events"]).field(name)
            for name in (*s.TASK_KEY, s.TIME_US, s.EVENT_TYPE, s.COLLECTION_TYPE, s.OUT_OF_MEMORY)
        ]
    ),
    "collections": pa.schema(
        [
            s.COLLECTIONS.field(name)
            for name in (s.COLLECTION_ID, s.TIME_US, s.EVENT_TYPE, s.COLLECTION_TYPE, s.USER_ID, s.LOGICAL_NAME_ID)
        ]
    ),
}
"""Columns of each table that is recorded."""
_CHECKS: Final = {
    "usage": {
        **present(*s.TASK_KEY, s.START_US, s.END_US),
        f"{s.END_US} is not after {s.START_US}": f"{s.END_US} > {s.START_US}",
        **measured(*CHANNELS, s.CPU_LIMIT, s.MEMORY_LIMIT),
        **{
            f"{name} has not {len(levels)} elements": f"len({name}) = {len(levels)}" for name, levels in VECTORS.items()
        },
    },
    "events": present(*s.TASK_KEY, s.TIME_US, s.EVENT_TYPE),
    "collections": present(s.COLLECTION_ID),
}
"""Checks of the rows of each: files that were changed by hand, or damaged, may hold other values."""


def file_name(table: str, end_us: int, number: int = 0) -> str:
    """Return the name of a file: the end of the last window, and a number where there are several."""
    return f"{table}-{max(end_us, 0):020d}{f'-{number}' if number else ''}.parquet"


def recorded() -> Source:
    """Return the source of a folder of the tables of ``RECORDED`` in parquet."""
    tables = tuple(
        RawTable(
            name=name,
            patterns=(f"{name}-*.parquet",),
            columns={f.name: _TYPES[f.type] for f in schema},
            select=", ".join(
                column if column in schema.names else f"NULL AS {column}"
                for column in s.with_extras(name, _EXTRAS.get(name, ())).names
            ),
            needs=tuple(column for column in schema.names if column != s.OUT_OF_MEMORY),  # older services had none
            checks=_CHECKS[name],
        )
        for name, schema in RECORDED.items()
    )
    return Source(trace="recorded", tables=tables, lacks=_LACKS, extras=_EXTRAS, limits_in_usage=True)


def ends_table(
    key: NDArray[np.int64], ended_us: NDArray[np.int64], failed: NDArray[np.int64], failed_us: NDArray[np.int64],
    out_of_memory: NDArray[np.int64],
) -> pa.Table:  # fmt: skip
    """Return ends and failures of tasks as events; times of -1 are none. key (n, 2), all others (n,).

    For a task that ended by failing, ``out_of_memory`` describes that end, else the failure before; -1 where it is not
    given.
    """
    ended, met = ended_us >= 0, (failed_us >= 0) & (failed_us != ended_us)
    types = np.where(failed[ended] > 0, s.EventType.FAIL, s.EventType.FINISH)
    rows = np.concatenate([np.flatnonzero(ended), np.flatnonzero(met)])
    of_end = (failed > 0) | (failed_us < 0)
    of_which = np.concatenate([of_end[ended], ~of_end[met] | ~ended[met]])
    said = np.where(of_which, out_of_memory[rows], s.UNKNOWN_ID)
    columns = (
        key[rows, 0], key[rows, 1], np.concatenate([ended_us[ended], failed_us[met]]),
        np.concatenate([types, np.full(int(met.sum()), s.EventType.FAIL)]), np.zeros(len(rows)), said > 0,
    )  # fmt: skip
    schema = RECORDED["events"]
    arrays = [
        pa.array(c.astype(f.type.to_pandas_dtype()), mask=said < 0 if f.name == s.OUT_OF_MEMORY else None)
        for c, f in zip(columns, schema, strict=True)
    ]
    return pa.table(arrays, schema)


def owners_table(windows: Windows) -> pa.Table:
    """Return user and logical name of the collections of windows that have them; the numbers stand for the strings.

    All rows of one collection are equal, so that an ingest keeps one: its time is that of a collection from before the
    trace.
    """
    known = (windows.user >= 0) | (windows.name >= 0)
    owner = np.column_stack([of[known] for of in (windows.collection_id, windows.user, windows.name)])
    collection, user, name = np.unique(owner, axis=0).T
    n = len(collection)
    columns = (
        pa.array(collection), pa.array(np.full(n, s.BEFORE_TRACE_US)),
        pa.array(np.full(n, s.EventType.SUBMIT, np.int8)), pa.array(np.zeros(n, np.int8)),
        *(pa.array([None if of < 0 else str(of) for of in column.tolist()], pa.string()) for column in (user, name)),
    )  # fmt: skip
    return pa.table(list(columns), schema=RECORDED["collections"])


def windows_table(windows: Windows) -> pa.Table:
    """Return windows as rows of usage; what is unknown is null."""
    columns: dict[str, pa.Array] = {}
    usage = {name: windows.usage[:, k] for k, name in enumerate(CHANNELS)}
    usage |= {name: windows.limit[:, r] for r, name in enumerate((s.CPU_LIMIT, s.MEMORY_LIMIT))}
    for field in s.USAGE:
        name = field.name
        if name in VECTORS:
            vectors = windows.percentiles[:, VECTORS[name]]
            columns[name] = pa.array([None if np.isnan(row).any() else row for row in vectors], field.type)
        elif name in usage:
            columns[name] = pa.array(usage[name], field.type, from_pandas=True)
        elif name == s.COLLECTION_TYPE:
            columns[name] = pa.array(np.zeros(len(windows), np.int8))
        elif name == s.ALLOC_COLLECTION_ID:
            columns[name] = pa.array(np.full(len(windows), _SOME_ALLOC), field.type, mask=~windows.in_alloc)
        elif name in _LACKS:
            columns[name] = pa.nulls(len(windows), field.type)
        else:
            whole_numbers = getattr(windows, name)
            never = name in (s.COLLECTION_ID, s.INSTANCE_INDEX, s.START_US, s.END_US)
            columns[name] = pa.array(whole_numbers, field.type, mask=None if never else whole_numbers < 0)
    return pa.table(columns, schema=s.USAGE)
