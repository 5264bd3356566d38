"""Reads one raw file into canonical rows: typed, checked, spread over buckets; bad lines are kept as rejects."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.core.duck import DamagedFileError, connect
from reclaim.data.core.files import content_sha256, file_sha256, replaced_folder, write_json
from reclaim.data.core.stores.places import in_store, location, reached, version_of
from reclaim.data.core.stores.transfer import local_copy
from reclaim.data.dataset import FORMAT_VERSION
from reclaim.data.errors import ConfigError
from reclaim.data.ingest.readers.csv_parquet import take_csv, take_parquet
from reclaim.data.ingest.readers.json_lines import take_json
from reclaim.data.ingest.readers.pieces import PiecesWriter
from reclaim.data.ingest.readers.rejects import RejectsWriter
from reclaim.data.ingest.readers.rows import Stage, Taken
from reclaim.data.ingest.readers.staging import Layout, RowsWriter
from reclaim.data.traces.source import RawTable

DONE: Final = "done.json"
LOCK: Final = "lock"
REJECTS: Final = "rejects.parquet"
_STAGED: Final = 2
"""Raised when the form of staged rows changes: a run that continues another one's work reads its files."""
_Reader = Callable[[Stage, RawTable, Path], Taken]
_READERS: Final[dict[str, _Reader]] = {"json": take_json, "csv": take_csv, "parquet": take_parquet}


@dataclass(frozen=True)
class ShardJob:
    """A raw file to read.

    Attributes
    ----------
    table : RawTable
        Its table, which says how to read it.
    staged : pyarrow.Schema
        Columns of usage before limits are joined.
    source_folder, file : str
        Its folder, and its path in there.
    staging : str
        Folder for the result.
    buckets, threads, memory_mib : int
        Buckets to spread it over; threads that may work at once; memory of the process's query engine.
    max_reject_share : float
        Share of rejects that the run allows.
    """

    table: RawTable
    staged: pa.Schema
    source_folder: str
    file: str
    staging: str
    buckets: int
    threads: int
    memory_mib: int
    max_reject_share: float


@dataclass(frozen=True)
class Shard:
    """The result of reading one raw file.

    Attributes
    ----------
    table, reading, file, sha256 : str
        Canonical table, the raw table's ``key``, the file's path in the source folder, checksum of its bytes.
    rows, rejects, n_bytes : int
        Lines accepted, lines rejected, size of the file.
    defects : dict of str to int
        Known defect → accepted rows that have it.
    folder : str
        Folder of its staged rows and ``rejects.parquet``.
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


@dataclass(frozen=True)
class Damaged:
    """A raw file that cannot be read to its end, and why."""

    file: str
    reason: str


def check_shared(staging: Path) -> None:
    """Check that a worker sees the folder of the run's unfinished work, which the run has locked.

    Raises
    ------
    ConfigError
        It does not: it runs on another machine, and would not see what others have read.
    """
    if not (staging / LOCK).is_file():
        raise ConfigError(
            f"{staging}: a worker on another machine does not see this folder; name DATASET in a folder that all "
            "machines share, or, for a dataset in a store, set XDG_CACHE_HOME to one"
        )


def take_shard(job: ShardJob) -> Shard | Damaged:
    """Read one raw file into its staging folder; an unchanged file that was read before is not read again.

    An object of a store is copied into the staging folder while it is read.

    Returns
    -------
    Shard or Damaged
        Damaged: truncated, corrupt or empty, or usage without a row where the file names no columns; nothing of it
        is kept.

    Raises
    ------
    SchemaError
        It has columns the format does not, or lacks some of them.
    TraceError
        Most of its lines are rejects.
    DataError
        The store broke off.
    ConfigError
        The staging folder is on another machine.
    """
    check_shared(Path(job.staging).parent)
    table = job.table
    path, folder = location(job.source_folder) / job.file, Path(job.staging) / table.key / job.file
    with reached(path):
        n_bytes = path.stat().st_size
    rules: list[object] = [
        table.select,
        dict(table.columns),
        dict(table.checks),
        list(table.order),
        dict(table.defects),
        table.where,
        table.file_column,
    ]
    rules += [FORMAT_VERSION, _STAGED, job.staged.to_string()]
    identity = {"bytes": n_bytes, "buckets": job.buckets, "rules": content_sha256(rules), **version_of(path)}
    done = folder / DONE
    if done.is_file():
        record = json.loads(done.read_text(encoding="utf-8"))
        if record["identity"] == identity and (in_store(path) or record["taken"]["sha256"] == file_sha256(path)):
            return Shard(table.name, table.key, job.file, folder=str(folder), **record["taken"])
    try:
        with replaced_folder(folder) as work, local_copy(path, work) as file:
            return _read(job, file, folder, work, identity)
    except DamagedFileError as error:
        return Damaged(job.file, str(error))


def _read(job: ShardJob, path: Path, folder: Path, work: Path, identity: dict[str, object]) -> Shard:
    """Write the rows, rejects and facts of a file into ``work``, which becomes ``folder`` later."""
    table, n_bytes = job.table, path.stat().st_size
    if n_bytes == 0:
        raise DamagedFileError(f"{path}: empty file")
    with ExitStack() as stack:
        connection = stack.enter_context(closing(connect(job.memory_mib, Path(job.staging) / "spill")))
        writer: RowsWriter | PiecesWriter
        if table.name == "usage":
            writer = stack.enter_context(RowsWriter(work, Layout.of(job.staged), job.buckets))
        else:
            buckets = job.buckets if table.name in s.BUCKETED else 1
            repeated = table.repeated or table.name in s.OPTIONAL
            writer = stack.enter_context(PiecesWriter(work, buckets, repeated=repeated))
        checksum = stack.enter_context(ThreadPoolExecutor(1)).submit(file_sha256, path)
        rejects = stack.enter_context(RejectsWriter(work / REJECTS, job.file, job.max_reject_share))
        stage = Stage(connection, work, job.threads, writer, rejects)
        ending = path.name.removesuffix(".gz").rsplit(".", 1)[-1]
        taken = _READERS[ending](stage, table, path)
    named = ending == "parquet" or (ending == "csv" and not table.order)  # its columns: engines write such parts
    if table.name == "usage" and table.where == "true" and not (named or taken.rows or rejects.count):
        raise DamagedFileError(f"{path}: no rows")
    shard = Shard(table.name, table.key, job.file, checksum.result(), taken.rows, rejects.count, n_bytes,
                  taken.defects, str(folder))  # fmt: skip
    facts = {key: value for key, value in asdict(shard).items() if key not in ("table", "reading", "file", "folder")}
    write_json(work / DONE, {"identity": identity, "taken": facts})
    return shard
