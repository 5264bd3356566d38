"""One raw file in, its canonical rows out: typed, checked, spread over buckets; bad lines set aside with a reason."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data import schema as s
from reclaim.data.columnar import take_csv, take_parquet
from reclaim.data.jsonlines import take_json
from reclaim.data.rows import BUCKET, DamagedFileError, literal
from reclaim.data.source import RawTable
from reclaim.data.store import content_sha256, file_sha256, write_json

DONE: Final = "done.json"
REJECTS: Final = "rejects.parquet"
_Reader = Callable[[duckdb.DuckDBPyConnection, RawTable, Path, Path, int], tuple[int, list[dict[str, Any]]]]
_READERS: Final[dict[str, _Reader]] = {"json": take_json, "csv": take_csv, "parquet": take_parquet}


@dataclass(frozen=True)
class Shard:
    """What became of one raw file.

    Attributes
    ----------
    table, file, sha256 : str
        Canonical table, file name, checksum of its bytes.
    rows, rejects, n_bytes : int
        Lines taken, lines set aside, size of the file.
    folder : Path
        Where its pieces are: ``bucket=K/*.parquet`` and ``rejects.parquet``.
    """

    table: str
    file: str
    sha256: str
    rows: int
    rejects: int
    n_bytes: int
    folder: Path

    def pieces(self, bucket: int) -> list[str]:
        """Return the files that hold this shard's rows of a bucket."""
        return sorted(str(p) for p in (self.folder / f"{BUCKET}={bucket}").glob("*.parquet"))


def connect(memory_limit_mib: int, temporary: Path) -> duckdb.DuckDBPyConnection:
    """Return a duckdb connection that spills to ``temporary`` instead of growing."""
    connection = duckdb.connect()
    connection.execute(f"SET memory_limit = '{memory_limit_mib}MiB'")
    connection.execute(f"SET temp_directory = {literal(str(temporary))}")
    connection.execute("SET enable_progress_bar = false")
    return connection


def take_shard(
    connection: duckdb.DuckDBPyConnection, table: RawTable, file: Path, staging: Path, buckets: int
) -> Shard:
    """Read one raw file into ``staging``; a file already taken is not read again.

    Raises
    ------
    DamagedFileError
        The file is truncated, corrupt or empty, or holds usage without a row; nothing of it is kept.
    SchemaError
        It has columns the format does not, or lacks some of them.
    """
    folder = staging / table.name / file.name
    stat = file.stat()
    identity = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "buckets": buckets,
                "rules": content_sha256([table.select, dict(table.columns), dict(table.checks)])}  # fmt: skip
    done = folder / DONE
    if done.is_file():
        record = json.loads(done.read_text())
        if record["identity"] == identity:
            return Shard(table.name, file.name, record["sha256"], record["rows"], record["rejects"],
                         stat.st_size, folder)  # fmt: skip
    if stat.st_size == 0:
        raise DamagedFileError(f"{file}: empty file")
    work = folder.with_name(folder.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        rows, rejects = _READERS[_kind(file)](connection, table, file, work, buckets)
        if table.name == "usage" and not rows and not rejects:
            raise DamagedFileError(f"{file}: no rows")
        record = {"identity": identity, "sha256": file_sha256(file), "rows": rows, "rejects": len(rejects)}
        pq.write_table(pa.Table.from_pylist(rejects, schema=s.REJECTS), work / REJECTS)
        write_json(work / DONE, record)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Shard(table.name, file.name, record["sha256"], rows, len(rejects), stat.st_size, folder)


def _kind(file: Path) -> str:
    return file.name.removesuffix(".gz").rsplit(".", 1)[-1]
