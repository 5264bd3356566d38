"""One raw file in, its canonical rows out: typed, checked, spread over buckets; bad lines set aside with a reason."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data import schema as s
from reclaim.data.columnar import take_csv, take_parquet
from reclaim.data.jsonlines import take_json
from reclaim.data.rows import BUCKET, DamagedFileError, Taken, literal
from reclaim.data.source import RawTable
from reclaim.data.store import content_sha256, file_sha256, write_json

DONE: Final = "done.json"
REJECTS: Final = "rejects.parquet"
_Reader = Callable[[duckdb.DuckDBPyConnection, RawTable, Path, Path, int], Taken]
_READERS: Final[dict[str, _Reader]] = {"json": take_json, "csv": take_csv, "parquet": take_parquet}


@dataclass(frozen=True)
class Shard:
    """What became of one raw file.

    Attributes
    ----------
    table, file, sha256 : str
        Canonical table, the file's path in the source folder, checksum of its bytes.
    rows, rejects, n_bytes : int
        Lines taken, lines set aside, size of the file.
    defects : dict of str to int
        Known defect → rows that have it and were taken.
    folder : Path
        Where its pieces are: ``bucket=K/*.parquet`` and ``rejects.parquet``.
    """

    table: str
    file: str
    sha256: str
    rows: int
    rejects: int
    n_bytes: int
    defects: dict[str, int]
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
    connection: duckdb.DuckDBPyConnection, table: RawTable, source_folder: Path, file: str, staging: Path, buckets: int
) -> Shard:
    """Read one raw file into ``staging``; a file already taken is not read again.

    Raises
    ------
    DamagedFileError
        The file is truncated, corrupt or empty, or holds usage without a row; nothing of it is kept.
    SchemaError
        It has columns the format does not, or lacks some of them.
    """
    path, folder = source_folder / file, staging / table.key / file
    stat = path.stat()
    rules = [table.select, dict(table.columns), dict(table.checks), list(table.order), dict(table.defects)]
    identity = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "buckets": buckets, "rules": content_sha256(rules)}
    done = folder / DONE
    if done.is_file():
        record = json.loads(done.read_text())
        if record["identity"] == identity:
            return Shard(table.name, file, folder=folder, **record["taken"])
    if stat.st_size == 0:
        raise DamagedFileError(f"{path}: empty file")
    work = folder.with_name(folder.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        taken = _READERS[_kind(path)](connection, table, path, work, buckets)
        if table.name == "usage" and not taken.rows and not taken.rejects:
            raise DamagedFileError(f"{path}: no rows")
        shard = Shard(table.name, file, file_sha256(path), taken.rows, len(taken.rejects), stat.st_size, taken.defects,
                      folder)  # fmt: skip
        rejects = [{s.REJECT_FILE: file, **reject} for reject in taken.rejects]
        pq.write_table(pa.Table.from_pylist(rejects, schema=s.REJECTS), work / REJECTS)
        facts = {key: getattr(shard, key) for key in ("sha256", "rows", "rejects", "n_bytes", "defects")}
        write_json(work / DONE, {"identity": identity, "taken": facts})
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return shard


def _kind(file: Path) -> str:
    return file.name.removesuffix(".gz").rsplit(".", 1)[-1]
