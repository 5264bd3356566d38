"""Writes the tables of a dataset from the pieces of all shards: sorted, without repeats, joined with limits.

Tables of tasks are written bucket by bucket; machines, attributes, collections and machine usage in one file each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.core.duck import connect, literal
from reclaim.data.core.files import write_json
from reclaim.data.core.parquet import TableWriter
from reclaim.data.dataset import bucket_name
from reclaim.data.ingest.defects import DEFECTS, count_defects
from reclaim.data.ingest.limits import POLICY, policy_of
from reclaim.data.ingest.readers.staging import Layout, array_of, count_rows, empty_table, read_chunks
from reclaim.data.ingest.shard import Shard, check_shared
from reclaim.data.traces.source import Source

ROWS_AT_ONCE: Final = 400_000
"""Windows sorted at once, about 0.5 KiB each; a larger bucket is made in ranges of tasks."""
_KEY: Final = f"{s.COLLECTION_ID}, {s.INSTANCE_INDEX}"
_STATISTICS: Final = (s.COLLECTION_ID, s.START_US, s.TIME_US)
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
        Rows of each table, windows and events that were dropped as repeated, windows without a limit, and those with
        each of ``DEFECTS``.
    """
    check_shared(Path(job.staging))
    done = Path(job.staging) / "buckets" / f"{job.bucket}.json"
    files = [Path(job.out) / name / bucket_name(job.bucket) for name in s.BUCKETED]
    if done.is_file() and all(file.is_file() for file in (*files, tasks_piece(job.staging, job.bucket))):
        record = json.loads(done.read_text())
        if record["identity"] == job.identity:
            return dict(record["counts"])
    source, usage_schema = job.source, s.with_extras("usage", job.source.extras.get("usage", ()))
    events_schema = s.with_extras("events", source.extras.get("events", ()))
    dropped = ("duplicate_windows", "duplicate_events", "windows_without_limit")
    counts = dict.fromkeys((*s.BUCKETED, "tasks", *dropped, *DEFECTS), 0)
    folders = [Path(shard.folder) for shard in job.shards if shard.table == "usage"]
    layout = Layout.of(job.staged)
    with ExitStack() as stack:
        connection = stack.enter_context(closing(connect(job.memory_mib, Path(job.staging) / "spill")))

        def writer(path: Path, schema: pa.Schema) -> TableWriter:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = tuple(name for name in _STATISTICS if name in schema.names)
            return stack.enter_context(TableWriter(path, schema, kept))

        out = {name: writer(Path(job.out) / name / bucket_name(job.bucket), schema)
               for name, schema in (("usage", usage_schema), ("events", events_schema),
                                    ("constraints", s.CONSTRAINTS))}  # fmt: skip
        tasks = writer(tasks_piece(job.staging, job.bucket), _without(s.TASKS, (s.USER_ID, s.LOGICAL_NAME_ID)))
        for name, schema in (("events", events_schema), ("constraints", s.CONSTRAINTS)):
            view(connection, name, [p for x in job.shards if x.table == name for p in x.pieces(job.bucket)], schema)
        if source.collection_limits:
            collections = [p for x in job.shards if x.table == "collections" for p in x.pieces(0)]
            view(connection, "collections", collections,
                  s.with_extras("collections", source.extras.get("collections", ())))  # fmt: skip
        for first, past, rows in _ranges(folders, layout, job.bucket, job.rows_at_once):
            events = _events(connection, events_schema, first, past)
            counts["duplicate_events"] += len(events)
            counts["duplicate_windows"] += len(rows)
            events, order = _unique(events), _order_once(rows, layout)
            counts["duplicate_events"] -= len(events)
            counts["duplicate_windows"] -= len(order)
            usage = _usage(connection, source, layout.table_of(rows, order), usage_schema, events)
            counts["windows_without_limit"] += usage[s.CPU_LIMIT].null_count
            for name, count in count_defects(usage, source.longest_window_us).items():
                counts[name] += count
            out["usage"].write(usage)
            out["events"].write(events)
            out["constraints"].write(_constraints(connection, first, past))
            connection.register("events_in_order", events)
            connection.register("usage_in_order", usage.select([*_OF_TASKS]))
            tasks.write(connection.sql(_TASKS).to_arrow_table())
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
        chunks = [*read_chunks(folders, layout, bucket)]
        yield None, None, np.concatenate(chunks) if chunks else np.empty((0, layout.words), np.uint64)
        return
    tasks = np.concatenate([_tasks_of(rows, layout) for rows in read_chunks(folders, layout, bucket)])
    tasks = tasks[np.lexsort((tasks[:, 1], tasks[:, 0]))]
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(tasks, axis=0) != 0).any(axis=1)]))
    cuts: list[_Range | None] = [None]
    begin = 0
    for start, end in zip(starts.tolist(), [*starts.tolist()[1:], len(tasks)], strict=True):
        if end - begin > rows_at_once and start > begin:
            cuts.append((int(tasks[start, 0]), int(tasks[start, 1])))
            begin = start
    del tasks
    for first, past in zip(cuts, [*cuts[1:], None], strict=True):
        found = []
        for rows in read_chunks(folders, layout, bucket):
            task = _tasks_of(rows, layout)
            within = np.ones(len(rows), np.bool_)
            if first is not None:
                within &= (task[:, 0] > first[0]) | ((task[:, 0] == first[0]) & (task[:, 1] >= first[1]))
            if past is not None:
                within &= (task[:, 0] < past[0]) | ((task[:, 0] == past[0]) & (task[:, 1] < past[1]))
            found.append(rows[within])
        yield first, past, np.concatenate(found)


def _tasks_of(rows: NDArray[np.uint64], layout: Layout) -> NDArray[np.int64]:
    return np.stack([layout.integer(rows, name) for name in s.TASK_KEY], axis=1)


def _within(first: _Range | None, past: _Range | None) -> str:
    """Return SQL for the tasks of a range."""
    terms = ["true"]
    if first is not None:
        terms.append(f"({s.COLLECTION_ID} > {first[0]} OR ({s.COLLECTION_ID} = {first[0]} AND "
                     f"{s.INSTANCE_INDEX} >= {first[1]}))")  # fmt: skip
    if past is not None:
        terms.append(f"({s.COLLECTION_ID} < {past[0]} OR ({s.COLLECTION_ID} = {past[0]} AND "
                     f"{s.INSTANCE_INDEX} < {past[1]}))")  # fmt: skip
    return " AND ".join(terms)


def _order_once(rows: NDArray[np.uint64], layout: Layout) -> NDArray[np.int64]:
    """Return the order of rows by task, start and end; of rows equal in these, only the first by their words."""
    keys = [layout.integer(rows, name) for name in (s.END_US, s.START_US, s.INSTANCE_INDEX, s.COLLECTION_ID)]
    order: NDArray[np.int64] = np.lexsort(keys)
    same = np.ones(max(len(rows) - 1, 0), np.bool_)
    for key in keys:
        same &= key[order[1:]] == key[order[:-1]]
    if not same.any():
        return order
    run = np.concatenate([[0], np.cumsum(~same)])  # rows equal in their key share a number
    words = [rows[order, k] for k in range(layout.words - 1, -1, -1)]
    by_words = order[np.lexsort([*words, run])]
    return np.asarray(by_words[np.concatenate([[True], ~same])], np.int64)


def _usage(
    connection: duckdb.DuckDBPyConnection, source: Source, usage: pa.Table, schema: pa.Schema, events: pa.Table
) -> pa.Table:
    """Return sorted windows with their limits."""
    if _joins_limits(source):
        policy = policy_of(events, *(usage[name].to_numpy() for name in (*s.TASK_KEY, s.START_US, s.END_US)))
        for name in policy.column_names:
            usage = usage.append_column(name, policy[name])
    if source.collection_limits or source.derived:
        connection.register("joined", usage.append_column("row", array_of(np.arange(len(usage)))))
        sql = "joined"
        if source.collection_limits:
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
_OF_TASKS: Final = (*s.TASK_KEY, s.TIER, s.SCHEDULING_CLASS, s.COLLECTION_TYPE, s.START_US, s.END_US)
_LAST: Final = ", ".join(f"coalesce(u.{n}, e.{n}) AS {n}" for n in _OF_TASKS[:5])
_TASKS: Final = f"""(
    WITH u AS (
        SELECT {_KEY}, {", ".join(f"arg_max({n}, {s.START_US}) AS {n}" for n in _OF_TASKS[2:5])},
               min({s.START_US}) AS {s.FIRST_SEEN_US}, max({s.END_US}) AS {s.LAST_SEEN_US}
        FROM usage_in_order GROUP BY ALL
    ), e AS (
        SELECT {_KEY}, {", ".join(f"arg_max({n}, ({s.TIME_US}, {s.EVENT_TYPE}, {n})) AS {n}" for n in _OF_TASKS[2:5])}
        FROM events_in_order GROUP BY ALL
    )
    SELECT {_LAST}, {s.FIRST_SEEN_US}, {s.LAST_SEEN_US}
    FROM u FULL JOIN e ON u.{s.COLLECTION_ID} = e.{s.COLLECTION_ID} AND u.{s.INSTANCE_INDEX} = e.{s.INSTANCE_INDEX}
    ORDER BY 1, 2
)"""


def _joins_limits(source: Source) -> bool:
    """Return whether limits and starts of windows are those of events."""
    return not source.limits_in_usage and any(table.name == "events" for table in source.tables)


def _events(
    connection: duckdb.DuckDBPyConnection, schema: pa.Schema, first: _Range | None, past: _Range | None
) -> pa.Table:
    """Return the events of a range of tasks by task, time, type and every other column."""
    leading = [*s.TASK_KEY, s.TIME_US, s.EVENT_TYPE]
    order = ", ".join(leading + [name for name in schema.names if name not in leading])
    columns = ", ".join(schema.names)
    found = connection.sql(f"SELECT {columns} FROM events WHERE {_within(first, past)} ORDER BY {order}")
    table = found.to_arrow_table()
    return pa.table([table[field.name].cast(field.type) for field in schema], schema=schema)


def _constraints(connection: duckdb.DuckDBPyConnection, first: _Range | None, past: _Range | None) -> pa.Table:
    """Return a range's constraints: those of the constraints table, and those of events."""
    names = ", ".join(s.CONSTRAINTS.names)
    sql = f"SELECT {names} FROM constraints"
    if s.CONSTRAINTS_LIST in _columns(connection, "events"):
        sql += (f" UNION ALL SELECT {_KEY}, {s.TIME_US}, c.{s.ATTRIBUTE_NAME}, c.{s.ATTRIBUTE_VALUE}, c.{s.RELATION} "
                f"FROM (SELECT {_KEY}, {s.TIME_US}, unnest({s.CONSTRAINTS_LIST}) AS c FROM events)")  # fmt: skip
    return connection.sql(
        f"SELECT DISTINCT {names} FROM ({sql}) WHERE {_within(first, past)} ORDER BY ALL"
    ).to_arrow_table()


def _columns(connection: duckdb.DuckDBPyConnection, view: str) -> set[str]:
    return {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {view}").fetchall()}


def view(connection: duckdb.DuckDBPyConnection, name: str, pieces: list[str], schema: pa.Schema) -> None:
    """Name the rows of all pieces; a column that none of them has is null, and without a piece there is no row."""
    if not pieces:
        connection.register(f"no_{name}", empty_table(schema))
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS SELECT * FROM no_{name}")
        return
    files = f"[{', '.join(map(literal, pieces))}]"
    connection.execute(
        f"CREATE OR REPLACE TEMP VIEW staged_{name} AS SELECT * "
        f"FROM read_parquet({files}, union_by_name = true, hive_partitioning = false)"
    )
    missing = [field for field in schema if field.name not in _columns(connection, f"staged_{name}")]
    nulls = "".join(f", NULL AS {field.name}" for field in missing)
    connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS SELECT *{nulls} FROM staged_{name}")


def _unique(table: pa.Table) -> pa.Table:
    """Return the sorted table without the rows that repeat the one before."""
    if len(table) < 2:
        return table
    same = np.ones(len(table) - 1, np.bool_)
    for column in (table[name].combine_chunks() for name in table.column_names):
        left, right = column[:-1], column[1:]
        equal = pc.fill_null(pc.equal(left, right), False)
        same &= pc.or_(equal, pc.and_(left.is_null(), right.is_null())).to_numpy(zero_copy_only=False)
    return table if not same.any() else table.filter(array_of(np.concatenate([[True], ~same])))


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
    with closing(connect(job.memory_mib, Path(job.staging) / "spill")) as connection:
        name = "collections" if job.name == "tasks" else job.name
        extras = job.source.extras.get(name, ())
        view(
            connection,
            name,
            [p for x in job.shards if x.table == name for p in x.pieces(0)],
            s.with_extras(name, extras),
        )
        columns = ", ".join(schema.names)
        sql = f"SELECT DISTINCT {columns} FROM {name} ORDER BY ALL"
        if job.name == "tasks":
            pieces = [str(tasks_piece(job.staging, bucket)) for bucket in range(job.buckets)]
            view(connection, "tasks", pieces, schema)
            named = ", ".join(f"arg_max({n}, ({s.TIME_US}, {s.EVENT_TYPE}, {n})) AS {n}" for n in _NAMES)
            columns = ", ".join(f"n.{name}" if name in _NAMES else f"t.{name}" for name in schema.names)
            sql = f"""
                SELECT {columns} FROM tasks t
                LEFT JOIN (SELECT {s.COLLECTION_ID}, {named} FROM collections GROUP BY 1) n USING ({s.COLLECTION_ID})
                ORDER BY t.{s.COLLECTION_ID}, t.{s.INSTANCE_INDEX}
            """
        with TableWriter(Path(job.out) / f"{job.name}.parquet", schema, (s.COLLECTION_ID,)) as writer:
            for batch in connection.sql(sql).to_arrow_reader(_BATCH_ROWS):
                writer.write(batch)
    return int(pq.read_metadata(Path(job.out) / f"{job.name}.parquet").num_rows)
