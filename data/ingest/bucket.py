"""Writes the tables of a dataset from the pieces of all shards: sorted, without repeats, joined with limits.

Tables of tasks are written bucket by bucket; machines, attributes, collections and machine usage in one file each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.columns import array_of, flags_of, values_of
from reclaim.data.core.arrays import is_first
from reclaim.data.core.duck import connect, file_sql
from reclaim.data.core.files import write_json
from reclaim.data.core.parquet import TableWriter
from reclaim.data.dataset import bucket_name
from reclaim.data.ingest.defects import DEFECTS, count_defects
from reclaim.data.ingest.limits import POLICY, policy_of
from reclaim.data.ingest.order import machine_events_in_order, task_events_in_order
from reclaim.data.ingest.readers.pieces import read_pieces
from reclaim.data.ingest.readers.staging import Layout, count_rows, read_chunks, read_rows
from reclaim.data.ingest.shard import Shard, check_shared
from reclaim.data.ingest.tasks import tasks_of
from reclaim.data.traces.source import Source

ROWS_AT_ONCE: Final = 400_000
"""Windows sorted at once, about 0.5 KiB each; a larger bucket is made in ranges of tasks."""
FORM: Final = 5
"""Raised when the same rows get other bytes or counts: a run that continues another one's makes its buckets again."""
_STATISTICS: Final = (s.COLLECTION_ID, s.START_US, s.TIME_US)
_UNLIKE: Final = (s.CPI, s.MAI)
"""Columns whose values hardly repeat: a dictionary of them takes three times as long, and more bytes."""
_Range = tuple[int, int]
"""A task: its collection and index."""


@dataclass(frozen=True)
class BucketJob:
    """A bucket to make.

    Attributes
    ----------
    bucket : int
        Its number.
    identity : str
        Hash of everything that decides its tables.
    shards : tuple of Shard
        Results of reading the raw files.
    source : Source
        The trace's format.
    staged : pyarrow.Schema
        Columns of usage before limits are joined.
    out, staging : str
        The dataset being made, and the folder for temporary files.
    memory_mib, rows_at_once : int
        Memory of the process's query engine; windows sorted at once.
    """

    bucket: int
    identity: str
    shards: tuple[Shard, ...]
    source: Source
    staged: pa.Schema
    out: str
    staging: str
    memory_mib: int
    rows_at_once: int = ROWS_AT_ONCE


def staged_schema(source: Source) -> pa.Schema:
    """Return the columns that a source's usage rows have before limits are joined."""
    schema = s.with_extras("usage", source.extras.get("usage", ()))
    return schema if not _joins_limits(source) else _without(schema, (*POLICY, s.SCHEDULED_US))


def tasks_piece(staging: str, bucket: int) -> Path:
    """Return the file of a bucket's tasks, which do not have their names yet."""
    return Path(staging) / "tasks" / bucket_name(bucket)


def make_bucket(job: BucketJob) -> dict[str, int]:
    """Write the tables of a bucket from the pieces of all shards; a finished bucket is not made again.

    Limits are joined as ``limits.policy_of`` says. If the source says so, a task without limits gets those of its
    collection.

    Returns
    -------
    dict of str to int
        Rows of each table, windows and events that were dropped as repeated, how many of these windows differ from the
        one that is kept, windows without a limit, and those with each of ``DEFECTS``.
    """
    check_shared(Path(job.staging))
    done = Path(job.staging) / "buckets" / f"{job.bucket}.json"
    files = [Path(job.out) / name / bucket_name(job.bucket) for name in s.BUCKETED]
    if done.is_file() and all(file.is_file() for file in (*files, tasks_piece(job.staging, job.bucket))):
        record = json.loads(done.read_text(encoding="utf-8"))
        if record["identity"] == job.identity:
            return dict(record["counts"])
    source, usage_schema = job.source, s.with_extras("usage", job.source.extras.get("usage", ()))
    events_schema = s.with_extras("events", source.extras.get("events", ()))
    dropped = ("duplicate_windows", "contradicting_windows", "duplicate_events", "windows_without_limit")
    counts = dict.fromkeys((*s.BUCKETED, "tasks", *dropped, *DEFECTS), 0)
    folders = partial(_folders_of, job.shards)
    layout = Layout.of(job.staged)
    with ExitStack() as stack:

        def writer(path: Path, schema: pa.Schema) -> TableWriter:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept, unlike = (tuple(n for n in names if n in schema.names) for names in (_STATISTICS, _UNLIKE))
            return stack.enter_context(TableWriter(path, schema, kept, unlike))

        out = {name: writer(Path(job.out) / name / bucket_name(job.bucket), schema)
               for name, schema in (("usage", usage_schema), ("events", events_schema),
                                    ("constraints", s.CONSTRAINTS))}  # fmt: skip
        tasks_schema = _without(s.TASKS, _NAMES)
        tasks = writer(tasks_piece(job.staging, job.bucket), tasks_schema)
        for first, past, rows in _ranges(folders("usage"), layout, job.bucket, job.rows_at_once):
            of_events = pa.schema([*events_schema, _LIST])
            raw = _pieces_of(folders("events"), job.bucket, of_events, first, past)
            events = task_events_in_order(_distinct(raw.select(events_schema.names), _EVENTS_BY))
            order, contradicting = _order_once(rows, layout)
            counts["contradicting_windows"] += contradicting
            counts["duplicate_events"] += len(raw) - len(events)
            counts["duplicate_windows"] += len(rows) - len(order)
            usage = _usage(job, layout.table_of(rows, order), usage_schema, events)
            counts["windows_without_limit"] += usage[s.CPU_LIMIT].null_count
            for name, count in count_defects(usage, source.longest_window_us).items():
                counts[name] += count
            out["usage"].write(usage)
            out["events"].write(events)
            constraints = _pieces_of(folders("constraints"), job.bucket, s.CONSTRAINTS, first, past)
            out["constraints"].write(_distinct(pa.concat_tables([constraints, _constraints_of(raw)])))
            tasks.write(tasks_of(usage, events, tasks_schema))
        counts |= {name: table.rows for name, table in out.items()} | {"tasks": tasks.rows}
    done.parent.mkdir(parents=True, exist_ok=True)
    write_json(done, {"identity": job.identity, "counts": counts})
    return counts


def _ranges(
    folders: list[Path], layout: Layout, bucket: int, rows_at_once: int
) -> Iterator[tuple[_Range | None, _Range | None, NDArray[np.uint64]]]:
    """Yield a bucket's windows in ranges of tasks that fit in memory: first task, the one past the last, their rows.

    None means no bound; together the ranges cover every task, including those without a window.
    """
    if count_rows(folders, bucket) <= rows_at_once:
        yield None, None, read_rows(folders, layout, bucket)
        return
    tasks = np.concatenate([_tasks_of(rows, layout) for rows in read_chunks(folders, layout, bucket)])
    tasks = tasks[np.lexsort((tasks[:, 1], tasks[:, 0]))]
    starts = np.flatnonzero(is_first(*tasks.T))
    cuts: list[_Range | None] = [None]
    begin = 0
    for start, end in zip(starts.tolist(), [*starts.tolist()[1:], len(tasks)], strict=True):
        if end - begin > rows_at_once and start > begin:
            cuts.append((int(tasks[start, 0]), int(tasks[start, 1])))
            begin = start
    del tasks
    for first, past in zip(cuts, [*cuts[1:], None], strict=True):
        chunks = read_chunks(folders, layout, bucket)
        yield first, past, np.concatenate([rows[_within(_tasks_of(rows, layout), first, past)] for rows in chunks])


def _tasks_of(rows: NDArray[np.uint64], layout: Layout) -> NDArray[np.int64]:
    return np.stack([layout.integer(rows, name) for name in s.TASK_KEY], axis=1)


def _folders_of(shards: tuple[Shard, ...], table: str) -> list[Path]:
    return [Path(shard.folder) for shard in shards if shard.table == table]


def _pieces_of(
    folders: list[Path], bucket: int, schema: pa.Schema, first: _Range | None, past: _Range | None
) -> pa.Table:
    """Return a bucket's rows of a range of tasks, in the folders' order."""
    batches = []
    for batch in read_pieces(folders, bucket, schema):
        if first is not None or past is not None:
            task = np.stack([values_of(batch.column(name)) for name in s.TASK_KEY], axis=1)
            batch = batch.filter(array_of(_within(task, first, past)))
        batches.append(batch)
    return pa.Table.from_batches(batches, schema).combine_chunks()


def _within(task: NDArray[np.int64], first: _Range | None, past: _Range | None) -> NDArray[np.bool_]:
    """Return which tasks, shape (n, 2), a range holds; shape (n,)."""
    within = np.ones(len(task), np.bool_)
    if first is not None:
        within &= (task[:, 0] > first[0]) | ((task[:, 0] == first[0]) & (task[:, 1] >= first[1]))
    if past is not None:
        within &= (task[:, 0] < past[0]) | ((task[:, 0] == past[0]) & (task[:, 1] < past[1]))
    return within


def _order_once(rows: NDArray[np.uint64], layout: Layout) -> tuple[NDArray[np.int64], int]:
    """Return the order of rows by task, start and end, and how many are left out that differ from the one that is kept.

    Of rows equal in these only the first by their words is kept.
    """
    keys = [layout.integer(rows, name) for name in (s.END_US, s.START_US, s.INSTANCE_INDEX, s.COLLECTION_ID)]
    order: NDArray[np.int64] = np.lexsort(keys)
    first = is_first(*(key[order] for key in keys))
    if first.all():
        return order, 0
    words = [rows[order, k] for k in range(layout.words - 1, -1, -1)]
    by_words = order[np.lexsort([*words, np.cumsum(first)])]  # rows equal in their key share a number
    kept = np.asarray(by_words[first], np.int64)
    of_dropped = kept[(np.cumsum(first) - 1)[~first]]
    return kept, int((rows[by_words[~first]] != rows[of_dropped]).any(axis=1).sum())


def _usage(job: BucketJob, usage: pa.Table, schema: pa.Schema, events: pa.Table) -> pa.Table:
    """Return sorted windows with their limits."""
    source = job.source
    if _joins_limits(source):
        keys = (values_of(usage[name]) for name in (*s.TASK_KEY, s.START_US, s.END_US))
        policy = policy_of(events, *keys, machine=source.machines_of_events)
        for name in policy.column_names:
            if name == s.MACHINE_ID:
                known = pc.coalesce(usage[name], policy[name])
                usage = usage.set_column(usage.schema.get_field_index(name), name, known)
            else:
                usage = usage.append_column(name, policy[name])
    if source.collection_limits or source.derived:
        with closing(connect(job.memory_mib, Path(job.staging) / "spill")) as connection:
            connection.register("joined", usage.append_column("row", array_of(np.arange(len(usage)))))
            sql = "joined"
            if source.collection_limits:
                register_pieces(connection, job.shards, "collections", source)
                sql = (f"(SELECT u.* REPLACE ({_OF_COLLECTION}) FROM joined u "
                       f"LEFT JOIN {_COLLECTION_LIMITS} c USING ({s.COLLECTION_ID}))")  # fmt: skip
            if source.derived:
                derived = ", ".join(f"{expression} AS {name}" for name, expression in source.derived.items())
                sql = f"(SELECT * REPLACE ({derived}) FROM {sql})"
            usage = connection.sql(f"SELECT * FROM {sql} ORDER BY row").to_arrow_table()
    return pa.table([usage[f.name].cast(f.type) for f in schema], schema=schema)


_LIMITS: Final = (s.CPU_LIMIT, s.MEMORY_LIMIT)
_OF_COLLECTION: Final = ", ".join(f"coalesce(u.{name}, nullif(c.{name}, 0)) AS {name}" for name in _LIMITS)
_COLLECTION_LIMITS: Final = f"""(
    SELECT {s.COLLECTION_ID}, {", ".join(f"arg_max({n}, ({s.TIME_US}, {n})) AS {n}" for n in _LIMITS)}
    FROM collections GROUP BY 1
)"""


def _joins_limits(source: Source) -> bool:
    """Return whether limits and starts of windows are those of events."""
    return not source.limits_in_usage and any(table.name == "events" for table in source.tables)


_EVENTS_BY: Final = (*s.TASK_KEY, s.TIME_US, s.EVENT_TYPE)
_LIST: Final = pa.field(
    s.CONSTRAINTS_LIST,
    pa.list_(pa.struct([s.CONSTRAINTS.field(name) for name in (s.ATTRIBUTE_NAME, s.ATTRIBUTE_VALUE, s.RELATION)])),
)
"""Constraints that an event carries."""


def _constraints_of(events: pa.Table) -> pa.Table:
    """Return the constraints that events carry."""
    lists = events[s.CONSTRAINTS_LIST].combine_chunks()
    carried = lists.flatten()
    events = events.select([*s.TASK_KEY, s.TIME_US]).take(pc.list_parent_indices(lists))
    return pa.table([*events.columns, *carried.flatten()], schema=s.CONSTRAINTS)


def _distinct(table: pa.Table, leading: tuple[str, ...] = ()) -> pa.Table:
    """Return the distinct rows by the leading columns, and then by the others; nulls come last."""
    by = [*leading, *(name for name in table.schema.names if name not in leading)]
    table = table.take(pc.sort_indices(table, sort_keys=[(name, "ascending") for name in by])).combine_chunks()
    if len(table) < 2:
        return table
    same = np.ones(len(table) - 1, np.bool_)
    for column in (table[name].combine_chunks() for name in table.schema.names):
        same &= _repeats(column)
    return table.filter(array_of(np.concatenate([[True], ~same]))) if same.any() else table


def _repeats(column: pa.Array) -> NDArray[np.bool_]:
    """Return which values equal the one before, from the second one on; two nulls are equal."""
    left, right = column[:-1], column[1:]
    equal = flags_of(pc.equal(left, right))
    return equal | flags_of(pc.and_(left.is_null(), right.is_null())) if column.null_count else equal


def register_pieces(
    connection: duckdb.DuckDBPyConnection, shards: tuple[Shard, ...], name: str, source: Source
) -> None:
    """Name the staged rows of a table that is one file; they can be read only once."""
    schema = s.with_extras(name, source.extras.get(name, ()))
    rows = read_pieces(_folders_of(shards, name), 0, schema)
    connection.register(name, pa.RecordBatchReader.from_batches(schema, rows))


def _without(schema: pa.Schema, names: tuple[str, ...]) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in names])


_TABLES: Final = ("tasks", "collections", "machines", "attributes", "machine_usage")
_BATCH_ROWS: Final = 50_000
_NAMES: Final = (s.USER_ID, s.LOGICAL_NAME_ID)


def tables_of(source: Source) -> tuple[str, ...]:
    """Return the tables of a source's datasets that are one file."""
    read = {table.name for table in source.tables}
    return (*_TABLES, *(name for name in s.OPTIONAL if name in read))


@dataclass(frozen=True)
class TableJob:
    """A table to make; the attributes are those of a ``BucketJob``, except its name."""

    name: str
    shards: tuple[Shard, ...]
    source: Source
    buckets: int
    out: str
    staging: str
    memory_mib: int


def make_table(job: TableJob) -> int:
    """Write a table and return its number of rows. The table of tasks needs all buckets to be made."""
    check_shared(Path(job.staging))
    schema = s.with_extras(job.name, job.source.extras.get(job.name, ()))
    name = "collections" if job.name == "tasks" else job.name
    with closing(connect(job.memory_mib, Path(job.staging) / "spill")) as connection:
        register_pieces(connection, job.shards, name, job.source)
        columns = ", ".join(schema.names)
        sql = f"SELECT DISTINCT {columns} FROM {name} ORDER BY ALL"
        if job.name == "tasks":
            pieces = ", ".join(file_sql(tasks_piece(job.staging, bucket)) for bucket in range(job.buckets))
            named = ", ".join(f"arg_max({n}, ({s.TIME_US}, {s.EVENT_TYPE}, {n})) AS {n}" for n in _NAMES)
            columns = ", ".join(f"n.{name}" if name in _NAMES else f"t.{name}" for name in schema.names)
            sql = f"""
                SELECT {columns} FROM read_parquet([{pieces}], hive_partitioning = false) t
                LEFT JOIN (SELECT {s.COLLECTION_ID}, {named} FROM collections GROUP BY 1) n USING ({s.COLLECTION_ID})
                ORDER BY t.{s.COLLECTION_ID}, t.{s.INSTANCE_INDEX}
            """
        with TableWriter(Path(job.out) / f"{job.name}.parquet", schema, (s.COLLECTION_ID,)) as writer:
            if name == "machines":
                sql = f"SELECT * FROM ({sql}) ORDER BY {s.MACHINE_ID}, {columns}"
                writer.write(machine_events_in_order(connection.sql(sql).to_arrow_table()))
            else:
                for batch in connection.sql(sql).to_arrow_reader(_BATCH_ROWS):
                    writer.write(batch)
    return int(pq.read_metadata(Path(job.out) / f"{job.name}.parquet").num_rows)
