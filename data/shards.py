"""One raw file in, its canonical rows out: typed, checked, spread over buckets; bad lines set aside with a reason."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data import schema as s
from reclaim.data.columnar import take_csv, take_parquet
from reclaim.data.jsonlines import take_json
from reclaim.data.records import Layout, RowsWriter, empty_table
from reclaim.data.rows import BUCKET, DamagedFileError, Stage, Taken, literal
from reclaim.data.source import RawTable
from reclaim.data.store import FORMAT_VERSION, content_sha256, file_sha256, write_json

DONE: Final = "done.json"
REJECTS: Final = "rejects.parquet"
_Reader = Callable[[Stage, RawTable, Path], Taken]
_READERS: Final[dict[str, _Reader]] = {"json": take_json, "csv": take_csv, "parquet": take_parquet}


@dataclass(frozen=True)
class ShardJob:
    """A raw file to read.

    Attributes
    ----------
    table : RawTable
        How to read it.
    staged : pyarrow.Schema
        Columns of usage that its rows have before limits are joined.
    source_folder, file : str
        Where it is; ``file`` is relative.
    staging : str
        Folder for what becomes of it.
    buckets, threads, memory_mib : int
        Buckets to spread it over; threads that may work at once; memory of the process's query engine.
    """

    table: RawTable
    staged: pa.Schema
    source_folder: str
    file: str
    staging: str
    buckets: int
    threads: int
    memory_mib: int


@dataclass(frozen=True)
class Shard:
    """What became of one raw file.

    Attributes
    ----------
    table, reading, file, sha256 : str
        Canonical table, the raw table's ``key``, the file's path in the source folder, checksum of its bytes.
    rows, rejects, n_bytes : int
        Lines taken, lines set aside, size of the file.
    defects : dict of str to int
        Known defect → rows that have it and were taken.
    folder : str
        Where its pieces are: ``bucket=K/*.parquet``, or the rows of usage; and ``rejects.parquet``.
    """

    table: str
    reading: str
    file: str
    sha256: str
    rows: int
    rejects: int
    n_bytes: int
    defects: dict[str, int]
    folder: str

    def pieces(self, bucket: int) -> list[str]:
        """Return the parquet files that hold this shard's rows of a bucket."""
        return sorted(str(p) for p in (Path(self.folder) / f"{BUCKET}={bucket}").glob("*.parquet"))


@dataclass(frozen=True)
class Damaged:
    """A raw file that cannot be read to its end, and why."""

    file: str
    reason: str


_starting = threading.Lock()
_database: tuple[tuple[int, str], duckdb.DuckDBPyConnection] | None = None
"""The process's query engine, and what it was started with: starting one is slow."""


def connect(memory_mib: int, temporary: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection to the process's query engine, which spills to ``temporary`` instead of growing.

    It works in one thread: jobs side by side fill the cores, and sums are made in one order. Views and tables that one
    connection makes as temporary are its own.
    """
    global _database
    key = (memory_mib, str(temporary))
    with _starting:
        if _database is None or _database[0] != key:
            release()
            temporary.mkdir(parents=True, exist_ok=True)
            database = duckdb.connect()
            database.execute(f"SET memory_limit = '{memory_mib}MiB'")
            database.execute("SET threads = 1")
            database.execute(f"SET temp_directory = {literal(str(temporary / str(os.getpid())))}")
            database.execute("SET enable_progress_bar = false")
            _database = key, database
        return _database[1].cursor()


def release() -> None:
    """Stop the process's query engine."""
    global _database
    if _database is not None:
        _database[1].close()
        _database = None


def take_shard(job: ShardJob) -> Shard | Damaged:
    """Read one raw file into its staging folder; a file already taken, the same to the byte, is not read again.

    Returns
    -------
    Shard or Damaged
        Damaged: truncated, corrupt or empty, or usage without a row; nothing of it is kept.

    Raises
    ------
    SchemaError
        It has columns the format does not, or lacks some of them.
    """
    table = job.table
    path, folder = Path(job.source_folder) / job.file, Path(job.staging) / table.key / job.file
    stat = path.stat()
    rules: list[object] = [
        table.select,
        dict(table.columns),
        dict(table.checks),
        list(table.order),
        dict(table.defects),
        table.where,
    ]
    rules += [FORMAT_VERSION, job.staged.to_string()]
    identity = {"bytes": stat.st_size, "buckets": job.buckets, "rules": content_sha256(rules)}
    done = folder / DONE
    if done.is_file():
        record = json.loads(done.read_text())
        if record["identity"] == identity and record["taken"]["sha256"] == file_sha256(path):
            return Shard(table.name, table.key, job.file, folder=str(folder), **record["taken"])
    work = folder.with_name(folder.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        if stat.st_size == 0:
            raise DamagedFileError(f"{path}: empty file")
        with ExitStack() as stack:
            connection = stack.enter_context(closing(connect(job.memory_mib, Path(job.staging) / "spill")))
            writer = None
            if table.name == "usage":
                writer = stack.enter_context(RowsWriter(work, Layout.of(job.staged), job.buckets))
            checksum = stack.enter_context(ThreadPoolExecutor(1)).submit(file_sha256, path)
            taken = _READERS[_kind(path)](Stage(connection, work, job.buckets, job.threads, writer), table, path)
        if table.name == "usage" and table.where == "true" and not taken.rows and not taken.rejects:
            raise DamagedFileError(f"{path}: no rows")
        shard = Shard(table.name, table.key, job.file, checksum.result(), taken.rows, len(taken.rejects), stat.st_size,
                      taken.defects, str(folder))  # fmt: skip
        rejects = [{s.REJECT_FILE: job.file, **reject} for reject in taken.rejects]
        found = pa.Table.from_pylist(rejects, schema=s.REJECTS) if rejects else empty_table(s.REJECTS)
        pq.write_table(found, work / REJECTS)
        facts = {
            key: value for key, value in asdict(shard).items() if key not in ("table", "reading", "file", "folder")
        }
        write_json(work / DONE, {"identity": identity, "taken": facts})
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
    except DamagedFileError as error:
        return Damaged(job.file, str(error))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return shard


def _kind(file: Path) -> str:
    return file.name.removesuffix(".gz").rsplit(".", 1)[-1]
