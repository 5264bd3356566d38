"""Opens an ingested dataset on disk: names its files and reads its tables and windows."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data import windows as w
from reclaim.data.columns import flags_of, values_of, whole
from reclaim.data.core.arrays import is_first
from reclaim.data.core.stores.places import arrow_place, content_of, home_of, in_store, location, reached
from reclaim.data.errors import ConfigError, SchemaError, TraceError
from reclaim.data.oom import oom_columns, oom_is_recorded, recorded_failures

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
"""Raised when the meaning of a dataset's files changes; an older dataset is then refused, not misread."""

_INTEGERS: Final = tuple(name for name in w.COLUMNS if name in s.USAGE.names)
"""Columns of usage that ``Windows`` has under the same name."""
_OF_TASKS: Final = (*_INTEGERS, s.ALLOC_COLLECTION_ID)
"""Columns of usage that name the task and the time of a window."""
_OF_WINDOWS: Final = (
    *_OF_TASKS, *w.CHANNELS, s.CPU_PERCENTILES, s.CPU_TAIL_PERCENTILES, s.CPU_LIMIT, s.MEMORY_LIMIT,
)  # fmt: skip
"""Columns of usage that windows are made of."""
_TAIL: Final = slice(w.LEVELS.index(s.TAIL_PERCENTILES[0]), w.LEVELS.index(s.TAIL_PERCENTILES[-1]) + 1)
"""Places of the tail percentiles among the levels."""


def bucket_name(bucket: int) -> str:
    """Return the file name of a bucket."""
    return f"bucket={bucket:03d}.parquet"


def read_manifest(folder: Path, *, made_by: str) -> dict[str, Any]:
    """Return the manifest of a stage's output folder.

    Raises
    ------
    ConfigError
        ``folder`` is missing or no such output; the message names the command that makes one.
    DataError
        The store cannot be reached.
    """
    path = folder / MANIFEST
    try:
        content = content_of(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        what = f"no {MANIFEST} in it" if in_store(folder) or folder.is_dir() else "no such folder"
        raise ConfigError(f"{folder}: {what}; `{made_by}` makes one") from error
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise TraceError(f"{path}: not valid JSON ({error}); delete the folder and run `{made_by}` again") from error
    if not isinstance(manifest, dict):
        raise TraceError(f"{path}: expected a JSON object; delete the folder and run `{made_by}` again")
    return manifest


@dataclass(frozen=True)
class Dataset:
    """An ingested trace: its folder, here or in a store, and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Dataset:
        """Open a dataset folder.

        Raises
        ------
        ConfigError
            There is no dataset at ``path``; a file or folder of this machine without one is taken for a trace.
        SchemaError
            It was written in another format version.
        """
        path = location(path)
        if not in_store(path) and path.exists() and not (path / MANIFEST).exists():
            what = f"no {MANIFEST} in it" if path.is_dir() else "a file"
            raise ConfigError(
                f"{path}: {what}, so no dataset; if it is a trace, `reclaim ingest {path} DATASET` reads it"
            )
        manifest = read_manifest(path, made_by=f"reclaim ingest SOURCE {path}")
        version = manifest.get("format_version")
        if version is None:  # it may be dear to its user, as features or a snapshot of a service
            raise ConfigError(f"{path}: its {MANIFEST} is not of a dataset; name a folder that `reclaim ingest` wrote")
        if version != FORMAT_VERSION:
            raise SchemaError(
                f"{path}: dataset format {version}, this version reads {FORMAT_VERSION}; "
                f"delete the folder and run `reclaim ingest SOURCE {path}` again"
            )
        return cls(path, manifest)

    @property
    def folder_name(self) -> str:
        """Name of its folder, of a link its own, also where it was opened as ``.`` or ``..``."""
        return self.path.name if self.path.name not in ("", "..") else self.path.resolve().name

    @property
    def home(self) -> Path:
        """Folder of this machine for what is computed from the dataset; of a local dataset its own."""
        return home_of(self.path)

    @property
    def named(self) -> bool:
        """True if a task has a name: then there are rows in the table ``names``."""
        return bool(self.manifest["counts"].get("names"))

    @property
    def n_buckets(self) -> int:
        """Number of buckets the tasks are spread over."""
        return int(self.manifest["buckets"])

    @property
    def fingerprint(self) -> str:
        """Hash of the inputs' checksums and the options: equal fingerprints mean equal datasets."""
        return str(self.manifest["fingerprint"])

    @property
    def n_windows(self) -> int:
        """Rows of usage, over all buckets."""
        return int(self.manifest["counts"]["usage"])

    def usage(self, bucket: int, columns: list[str] | None = None) -> pa.Table:
        """Return a bucket's usage rows, all columns or those named."""
        return self._read(self.path / "usage" / bucket_name(bucket), columns)

    def n_windows_of(self, bucket: int) -> int:
        """Rows of usage of a bucket."""
        with self._opened(self.path / "usage" / bucket_name(bucket)) as file:
            return int(file.metadata.num_rows)

    def windows(self, bucket: int, *, measured: bool = True, owned: bool = True) -> w.Windows:
        """Return a bucket's usage rows as arrays, sorted by task, then time.

        A window without a start of its run has the last one of its task, as in the service.

        Parameters
        ----------
        bucket : int
        measured : bool
            Whether measurements, limits and owners are read, too; else they are unknown and not read from the file.
        owned : bool
            Whether owners are read with the measurements.

        Raises
        ------
        SchemaError
            A percentile vector is shorter or longer than its levels.
        """
        with self._opened(self.path / "usage" / bucket_name(bucket)) as file:
            out = (w.unwritten_windows if measured else w.empty_windows)(file.metadata.num_rows)
            first = 0
            for group in range(file.num_row_groups):  # one at a time, to hold only one next to the arrays
                table = file.read_row_group(group, columns=list(_OF_WINDOWS if measured else _OF_TASKS))
                here = out.take(slice(first, first + len(table)))
                _fill_tasks(here, table)
                if measured:
                    _fill_measured(here, table, self.owners if owned else None)
                first += len(table)
        _fill_runs(out)
        if measured and oom_is_recorded(self.manifest):
            out.failed_us[:], out.failed_oom[:] = recorded_failures(
                out, self.events(bucket, oom_columns(self.manifest))
            )
        return out

    def windows_of(self, bucket: int, collections: NDArray[np.int64]) -> w.Windows:
        """Return a bucket's windows of some collections, as ``windows`` does; only their task and time are known."""
        names = (*s.TASK_KEY, s.END_US)
        table = self.usage(bucket, list(names))
        collection = _integers(table[s.COLLECTION_ID])
        starts = _run_starts(collection)
        wanted = np.isin(collection[starts], collections)
        rows = np.flatnonzero(np.repeat(wanted, np.diff(starts, append=len(collection))))
        out = w.empty_windows(len(rows))
        for name in names:
            getattr(out, name)[:] = _integers(table[name])[rows]
        return out

    def cell(self, monday_us: int = 0) -> w.Cell:
        """Return the dataset's cell; the caller gives ``monday_us``, which no trace has.

        The largest machine is that of the whole record, as an operator states it once (``RECLAIM_LARGEST_CPU``): sizes
        in early rows are relative to a machine that may have come later.
        """
        machines = self.table("machines")
        cpu, memory = (pc.max(machines[name]).as_py() for name in (s.CPU_CAPACITY, s.MEMORY_CAPACITY))
        return w.Cell((cpu or math.nan, memory or math.nan), monday_us)

    @cached_property
    def owners(self) -> Owners:
        """Owner of each collection, read from the tasks on the first use."""
        names = (s.USER_ID, s.LOGICAL_NAME_ID)
        parts = [np.empty((3, 0), np.int64)]
        with self._opened(self.path / "tasks.parquet", read_dictionary=names) as file:
            for batch in file.iter_batches(columns=[s.COLLECTION_ID, *names]):
                collection = _integers(batch[s.COLLECTION_ID])
                first = _run_starts(collection)
                parts.append(np.stack([collection[first], *(_identities(batch[name])[first] for name in names)]))
        found = np.concatenate(parts, axis=1)
        return Owners(*found[:, _run_starts(found[0])])  # a collection's tasks may be in two batches

    def events(self, bucket: int, columns: list[str] | None = None) -> pa.Table:
        """Return the events of a bucket's tasks, sorted by task, then time; all columns or those named."""
        with self._opened(self.path / "events" / bucket_name(bucket)) as file:
            return file.read(columns)

    def constraints(self, bucket: int) -> pa.Table:
        """Return the placement constraints of a bucket's tasks, sorted by task, then time."""
        return self._read(self.path / "constraints" / bucket_name(bucket))

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Return a table that is one file: ``tasks``, ``collections``, ``machines`` and so on; all columns or some."""
        return self._read(self._file_of(name), columns)

    def _file_of(self, name: str) -> Path:
        """Return the file of a table that is one; rejects are in a folder of their own."""
        return (self.path / name if name == "rejects" else self.path) / f"{name}.parquet"

    @contextmanager
    def _opened(self, file: Path, read_dictionary: Sequence[str] | None = None) -> Iterator[pq.ParquetFile]:
        """Open one of the dataset's files; errors as of ``_readable``."""
        name, files = arrow_place(file)
        with (
            self._readable(file.relative_to(self.path).as_posix()),
            reached(file),
            pq.ParquetFile(name, filesystem=files, read_dictionary=read_dictionary) as parquet,
        ):
            yield parquet

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Turn errors of files that are missing or not parquet into one that gives the remedy; others name the dataset.

        Raises
        ------
        TraceError
            A file is damaged or missing.
        OSError
            The system refuses it.
        ConfigError, DataError
            As of ``stores.places.reached``.
        """
        try:
            yield
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
                raise OSError(error.errno, os.strerror(error.errno), str(self.path / what)) from error
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise TraceError(
                f"{self.path}: is damaged or incomplete; delete it and ingest again ({what}: {reason})"
            ) from error

    def _read(self, file: Path, columns: list[str] | None = None) -> pa.Table:
        with self._opened(file) as opened:  # not by ``read_table``, which imports pandas: a tenth of a second
            table = opened.read(columns)
        return table if columns is None else table.select(columns)

    def read(self, name: str, columns: list[str] | None = None, tasks: pa.Table | None = None) -> pa.Table:
        """Return a table, whole or in part; of a table of tasks, only row groups with the tasks' collections are read.

        Parameters
        ----------
        name : str
            One of ``schema.TABLES``.
        columns : list of str or None
            Columns to read, in this order; None: all.
        tasks : pyarrow.Table or None
            Has the columns ``schema.TASK_KEY``, and a row for each task to read; None: all tasks.

        Raises
        ------
        SchemaError
            The dataset has no such table or column.
        TraceError
            A file is damaged or missing.
        """
        from pyarrow import dataset as files  # takes a tenth of a second, and the stages do without it

        absent = {one for one in s.OPTIONAL if one not in self.manifest["counts"]}
        if name not in s.TABLES or name in absent:
            raise SchemaError(
                f"{self.path}: no table {name!r}; expected one of {', '.join(t for t in s.TABLES if t not in absent)}"
            )
        buckets = [self.path / name / bucket_name(bucket) for bucket in range(self.n_buckets)]
        places = [arrow_place(file) for file in (buckets if name in s.BUCKETED else [self._file_of(name)])]
        with self._readable(name), reached(self.path):
            source = files.dataset([file for file, _ in places], format="parquet", filesystem=places[0][1])
        there = source.schema.names
        if unknown := [column for column in columns or () if column not in there]:
            raise SchemaError(f"{self.path}: {name} has no {', '.join(unknown)}; its columns are {', '.join(there)}")
        if tasks is None:
            with self._readable(name), reached(self.path):
                return source.to_table(columns)
        if not set(s.TASK_KEY) <= set(there):
            raise SchemaError(f"{self.path}: {name} has no rows of single tasks; read it whole")
        wanted = there if columns is None else columns
        keys = _keys(tasks)
        of_them = files.field(s.COLLECTION_ID).isin(pa.array(keys.levels[0]))
        with self._readable(name), reached(self.path):
            table = source.to_table([*wanted, *(key for key in s.TASK_KEY if key not in wanted)], filter=of_them)
        return table.filter(pa.array(_keys(table).isin(keys))).select(wanted)


@dataclass(frozen=True)
class Owners:
    """Owner of each collection: user and logical name as ``windows.identities``, int64 (n,) each.

    ``collection_id`` rises. All tasks of a collection share its user and name, so those of the first one count.
    """

    collection_id: NDArray[np.int64]
    user: NDArray[np.int64]
    name: NDArray[np.int64]

    def of(self, collection_id: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return user and name of each row; -1 where the collection is unknown. Fast if equal ids are adjacent."""
        first = _run_starts(collection_id)
        wanted = collection_id[first]
        at = np.searchsorted(self.collection_id, wanted)
        known = np.append(self.collection_id, s.UNKNOWN_ID)[at] == wanted
        lengths = np.diff(first, append=len(collection_id))
        user, name = (
            np.repeat(np.where(known, np.append(of, s.UNKNOWN_ID)[at], s.UNKNOWN_ID), lengths)
            for of in (self.user, self.name)
        )
        return user, name


def rows_of_tasks(table: pa.Table, tasks: pa.Table) -> NDArray[np.bool_]:
    """Return which rows of a table are of the tasks; both have the columns ``schema.TASK_KEY``.

    Raises
    ------
    SchemaError
        One of those columns is missing.
    """
    return np.asarray(_keys(table).isin(_keys(tasks)), np.bool_)


def _keys(tasks: pa.Table) -> pd.MultiIndex:
    """Return collection and index of each row; SchemaError where there are none."""
    import pandas as pd

    if missing := [name for name in s.TASK_KEY if name not in tasks.column_names]:
        raise SchemaError(f"tasks: no column {' and no '.join(missing)}; expected rows of the dataset's tasks")
    return pd.MultiIndex.from_arrays([tasks[name].to_numpy() for name in s.TASK_KEY])


def _fill_tasks(out: w.Windows, table: pa.Table) -> None:
    """Write task and time of a table's rows into ``out``, which has as many rows."""
    for name in _INTEGERS:
        getattr(out, name)[:] = _integers(table[name])
    out.in_alloc[:] = flags_of(table[s.ALLOC_COLLECTION_ID].is_valid())


def _fill_runs(out: w.Windows) -> None:
    """Write the last start of a run of the same task into each window that has none."""
    unknown = out.scheduled_us == s.UNKNOWN_ID
    if unknown.any() and not unknown.all():
        starts, row = out.task_starts(), np.maximum.accumulate(np.where(unknown, 0, np.arange(len(out))))
        of_task = row >= np.repeat(starts[:-1], np.diff(starts))
        out.scheduled_us[:] = np.where(of_task, out.scheduled_us[row], s.UNKNOWN_ID)


def _fill_measured(out: w.Windows, table: pa.Table, owners: Owners | None) -> None:
    """Write what was measured and granted, and the owners, into ``out``, once its tasks are known."""
    column = {name: whole(table[name]) for name in _OF_WINDOWS if name not in _OF_TASKS}
    for at, name in enumerate(w.CHANNELS):
        out.usage[:, at] = _floats(column[name])
    w.drop_zero_maxima(out.usage)
    for at, name in enumerate((s.CPU_LIMIT, s.MEMORY_LIMIT)):
        out.limit[:, at] = _floats(column[name])
    if any(column[name].null_count for name in w.VECTORS):
        out.percentiles[:] = np.nan
    rows, deciles = _vectors(column[s.CPU_PERCENTILES], s.CPU_PERCENTILES)
    out.percentiles[rows, : _TAIL.start] = deciles[:, :-1]
    out.percentiles[rows, -1] = deciles[:, -1]
    rows, tail = _vectors(column[s.CPU_TAIL_PERCENTILES], s.CPU_TAIL_PERCENTILES)
    out.percentiles[rows, _TAIL] = tail
    out.failed_us[:], out.failed_oom[:] = s.UNKNOWN_ID, False
    out.user[:], out.name[:] = (s.UNKNOWN_ID, s.UNKNOWN_ID) if owners is None else owners.of(out.collection_id)


def _vectors(column: pa.ListArray, name: str) -> tuple[NDArray[np.bool_] | slice, NDArray[np.float32]]:
    """Return which rows have a vector, and the vector of each of them; shapes (n,) and (k, size)."""
    size = len(w.VECTORS[name])
    lengths = column.value_lengths()
    if pc.min(lengths).as_py() not in (None, size) or pc.max(lengths).as_py() not in (None, size):
        raise SchemaError(f"{name}: expected null or {size} values in each row; run `reclaim ingest` again")
    values: NDArray[np.float32] = values_of(column.flatten(), np.nan).reshape(-1, size)
    return flags_of(column.is_valid()) if column.null_count else slice(None), values


def _run_starts(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first row of each run of equal values."""
    return np.flatnonzero(is_first(values))


def _identities(column: pa.DictionaryArray) -> NDArray[np.int64]:
    known = np.append(w.identities(column.dictionary.to_pylist()), s.UNKNOWN_ID)
    return known[_integers(column.indices)]  # a null's index, -1, is the last


def _floats(column: pa.Array) -> NDArray[np.float64]:
    return np.asarray(values_of(column.cast(pa.float64()), np.nan), np.float64)


def _integers(column: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
    return np.asarray(values_of(column, s.UNKNOWN_ID), np.int64)
