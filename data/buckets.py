"""One bucket's pieces in, its canonical tables out: sorted, each once, and joined with the limits in force."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reclaim.data import schema as s
from reclaim.data.shards import Shard
from reclaim.data.source import Source

_KEY = f"{s.COLLECTION_ID}, {s.INSTANCE_INDEX}"
_POLICY = (s.CPU_LIMIT, s.MEMORY_LIMIT, s.PRIORITY, s.TIER, s.SCHEDULING_CLASS)


@dataclass(frozen=True)
class Bucket:
    """The canonical tables of one bucket, and how many repeated windows were dropped."""

    usage: pa.Table
    events: pa.Table
    constraints: pa.Table
    tasks: pa.Table
    duplicates: int


def make_bucket(connection: duckdb.DuckDBPyConnection, bucket: int, shards: list[Shard], source: Source) -> Bucket:
    """Return the tables of a bucket, out of the pieces of all shards.

    A window carries the last start (SCHEDULE) before its end. Its limit, priority and class are those of the last
    event at or before its start; where there is none, or the task was started inside the window (its first window,
    or a restart), of the last event before its end. All are known by the window's end. A limit of zero is no limit
    and becomes null. Where a source says so, a task without limits of its own has those of its collection.
    """
    has_events = any(table.name == "events" for table in source.tables)
    schema = {name: s.with_extras(name, source.extras.get(name, ())) for name in ("usage", "events", "collections")}
    pieces = {name: [p for shard in shards if shard.table == name for p in shard.pieces(bucket)]
              for name in s.BUCKETED}  # fmt: skip
    _view(connection, "events_of_bucket", pieces["events"], schema["events"])
    events = _select(connection, schema["events"], "events_of_bucket")
    events = _unique(events.sort_by([(name, "ascending") for name in _sort_columns(schema["events"], s.TIME_US)]))
    connection.register("events_in_order", events)
    _view(connection, "constraints_of_bucket", pieces["constraints"], s.CONSTRAINTS)
    constraints = _select(connection, s.CONSTRAINTS, _constraints(connection))
    staged = schema["usage"] if not has_events else _without(schema["usage"], (*_POLICY, s.SCHEDULED_US))
    _view(connection, "usage_of_bucket", pieces["usage"], staged)
    joined = _JOIN if has_events else "usage_of_bucket"
    if source.collection_limits:
        _view(connection, "collections_of_trace", [p for x in shards if x.table == "collections" for p in x.pieces(0)],
              schema["collections"])  # fmt: skip
        joined = f"(SELECT u.* REPLACE ({_OF_COLLECTION}) FROM {joined} u LEFT JOIN {_COLLECTION_LIMITS} c USING ({s.COLLECTION_ID}))"
    if source.derived:
        derived = ", ".join(f"{sql} AS {name}" for name, sql in source.derived.items())
        joined = f"(SELECT * REPLACE ({derived}) FROM {joined})"
    usage = _select(connection, schema["usage"], joined).sort_by(
        [(name, "ascending") for name in _sort_columns(schema["usage"], s.START_US, s.END_US)]
    )
    rows = len(usage)
    usage = _unique(usage, (*s.TASK_KEY, s.START_US, s.END_US))
    connection.register("usage_in_order", usage)
    tasks = _select(connection, _without(s.TASKS, (s.USER_ID, s.LOGICAL_NAME_ID)), _TASKS)
    for view in ("events_in_order", "usage_in_order"):
        connection.unregister(view)
    return Bucket(
        usage, events, constraints, tasks.sort_by([(name, "ascending") for name in s.TASK_KEY]), rows - len(usage)
    )


_LIMITS = (s.CPU_LIMIT, s.MEMORY_LIMIT)
_OF_COLLECTION = ", ".join(f"coalesce(u.{name}, nullif(c.{name}, 0)) AS {name}" for name in _LIMITS)
_COLLECTION_LIMITS = f"""(
    SELECT {s.COLLECTION_ID}, {", ".join(f"arg_max({n}, ({s.TIME_US}, {n})) AS {n}" for n in _LIMITS)}
    FROM collections_of_trace GROUP BY 1
)"""
_FILLED = ", ".join(
    f"last_value({name} IGNORE NULLS) OVER task_so_far AS {name}"
    for name in (s.CPU_LIMIT, s.MEMORY_LIMIT, s.PRIORITY, s.TIER, s.SCHEDULING_CLASS)
)
_SCHEDULED = (
    f"last_value(CASE WHEN {s.EVENT_TYPE} = {s.EventType.SCHEDULE} THEN {s.TIME_US} END IGNORE NULLS) "
    f"OVER task_so_far AS {s.SCHEDULED_US}"
)


def _in_force(name: str) -> str:
    """Return SQL for a policy column: of the window's end after a restart inside the window, else of its start."""
    value = f"CASE WHEN b.{s.SCHEDULED_US} > u.{s.START_US} THEN b.{name} ELSE coalesce(a.{name}, b.{name}) END"
    return f"nullif({value}, 0) AS {name}" if name in _LIMITS else f"{value} AS {name}"


_TAKEN = ", ".join([*map(_in_force, _POLICY), f"b.{s.SCHEDULED_US}"])
_JOIN = f"""(
    WITH state AS (
        SELECT {_KEY}, {s.TIME_US}, {_FILLED}, {_SCHEDULED}
        FROM events_in_order WHERE {s.TIME_US} < {s.AFTER_TRACE_US}
        WINDOW task_so_far AS (PARTITION BY {_KEY} ORDER BY {s.TIME_US}, {s.EVENT_TYPE} ROWS UNBOUNDED PRECEDING)
        QUALIFY row_number() OVER (PARTITION BY {_KEY}, {s.TIME_US} ORDER BY {s.EVENT_TYPE} DESC) = 1
    )
    SELECT u.*, {_TAKEN}
    FROM usage_of_bucket u
    ASOF LEFT JOIN state a ON u.{s.COLLECTION_ID} = a.{s.COLLECTION_ID} AND u.{s.INSTANCE_INDEX} = a.{s.INSTANCE_INDEX}
        AND u.{s.START_US} >= a.{s.TIME_US}
    ASOF LEFT JOIN state b ON u.{s.COLLECTION_ID} = b.{s.COLLECTION_ID} AND u.{s.INSTANCE_INDEX} = b.{s.INSTANCE_INDEX}
        AND u.{s.END_US} > b.{s.TIME_US}
)"""
_LAST = ", ".join(
    f"coalesce(u.{n}, e.{n}) AS {n}" for n in (s.COLLECTION_ID, s.INSTANCE_INDEX, s.TIER, s.SCHEDULING_CLASS,
                                                 s.COLLECTION_TYPE)
)  # fmt: skip
_TASKS = f"""(
    WITH u AS (
        SELECT {_KEY}, arg_max({s.TIER}, {s.START_US}) AS {s.TIER},
               arg_max({s.SCHEDULING_CLASS}, {s.START_US}) AS {s.SCHEDULING_CLASS},
               arg_max({s.COLLECTION_TYPE}, {s.START_US}) AS {s.COLLECTION_TYPE},
               min({s.START_US}) AS {s.FIRST_SEEN_US}, max({s.END_US}) AS {s.LAST_SEEN_US}
        FROM usage_in_order GROUP BY ALL
    ), e AS (
        SELECT {_KEY}, arg_max({s.TIER}, {s.TIME_US}) AS {s.TIER},
               arg_max({s.SCHEDULING_CLASS}, {s.TIME_US}) AS {s.SCHEDULING_CLASS},
               arg_max({s.COLLECTION_TYPE}, {s.TIME_US}) AS {s.COLLECTION_TYPE}
        FROM events_in_order GROUP BY ALL
    )
    SELECT {_LAST}, {s.FIRST_SEEN_US}, {s.LAST_SEEN_US}
    FROM u FULL JOIN e ON u.{s.COLLECTION_ID} = e.{s.COLLECTION_ID} AND u.{s.INSTANCE_INDEX} = e.{s.INSTANCE_INDEX}
)"""


def _constraints(connection: duckdb.DuckDBPyConnection) -> str:
    """Return SQL for a bucket's constraints: those that stand alone, and those that came with an event."""
    names = ", ".join(s.CONSTRAINTS.names)
    sql = f"SELECT {names} FROM constraints_of_bucket"
    if s.CONSTRAINTS_LIST in {
        row[0] for row in connection.execute("DESCRIBE SELECT * FROM events_of_bucket").fetchall()
    }:
        sql += (f" UNION ALL SELECT {_KEY}, {s.TIME_US}, c.{s.ATTRIBUTE_NAME}, c.{s.ATTRIBUTE_VALUE}, c.{s.RELATION} "
                f"FROM (SELECT {_KEY}, {s.TIME_US}, unnest({s.CONSTRAINTS_LIST}) AS c FROM events_of_bucket)")  # fmt: skip
    return f"(SELECT DISTINCT {names} FROM ({sql}) ORDER BY ALL)"


def _view(connection: duckdb.DuckDBPyConnection, name: str, pieces: list[str], schema: pa.Schema) -> None:
    """Name the rows of all pieces; with no piece, an empty table of the schema."""
    if pieces:
        files = ", ".join("'" + p.replace("'", "''") + "'" for p in pieces)
        connection.execute(
            f"CREATE OR REPLACE TEMP VIEW {name} AS SELECT * EXCLUDE (bucket, {s.REJECT_REASON}, reclaim_line) "
            f"FROM read_parquet([{files}], union_by_name = true, hive_partitioning = true)"
        )
    else:
        connection.register(f"{name}_empty", schema.empty_table())
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS SELECT * FROM {name}_empty")


def _select(connection: duckdb.DuckDBPyConnection, schema: pa.Schema, relation: str) -> pa.Table:
    """Return a relation's columns in the schema's order and types; a column it lacks becomes null."""
    present = {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()}
    columns = ", ".join(name if name in present else f"NULL AS {name}" for name in schema.names)
    table = connection.sql(f"SELECT {columns} FROM {relation}").to_arrow_table()
    return pa.table([table[field.name].cast(field.type) for field in schema], schema=schema)


def _sort_columns(schema: pa.Schema, *first: str) -> list[str]:
    """Return the columns of a total order: the task, the times, then every other plain column."""
    leading = [*s.TASK_KEY, *first]
    return leading + [f.name for f in schema if f.name not in leading and not pa.types.is_nested(f.type)]


def _unique(table: pa.Table, key: tuple[str, ...] = ()) -> pa.Table:
    """Return the sorted table with, of the rows equal in ``key`` (default: all plain columns), the first."""
    if len(table) < 2:
        return table
    same = np.ones(len(table) - 1, np.bool_)
    for name in key or [f.name for f in table.schema if not pa.types.is_nested(f.type)]:
        column = table[name].combine_chunks()
        left, right = column[:-1], column[1:]
        equal = pc.fill_null(pc.equal(left, right), False)
        both_null = pc.and_(left.is_null(), right.is_null())
        same &= pc.or_(equal, both_null).to_numpy(zero_copy_only=False)
    return table if not same.any() else table.filter(pa.array(np.concatenate([[True], ~same])))


def _without(schema: pa.Schema, names: tuple[str, ...]) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in names])
