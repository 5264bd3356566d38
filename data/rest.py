"""The tables of a dataset that are no folders of buckets: out of the pieces of all shards, sorted, each row once."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

from reclaim.data import schema as s
from reclaim.data.buckets import tasks_piece, view
from reclaim.data.shards import Shard, connect
from reclaim.data.source import Source
from reclaim.data.writer import TableWriter

TABLES: Final = ("tasks", "collections", "machines", "attributes", "machine_usage")
_BATCH_ROWS: Final = 50_000
_NAMES: Final = (s.USER_ID, s.LOGICAL_NAME_ID)


@dataclass(frozen=True)
class TableJob:
    """A table to make; the attributes are those of a ``buckets.BucketJob``, but for its name."""

    name: str
    shards: tuple[Shard, ...]
    source: Source
    buckets: int
    out: str
    staging: str
    memory_mib: int


def make_table(job: TableJob) -> int:
    """Write a table, and return how many rows it has. The tasks are those of all buckets, which must be made."""
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
