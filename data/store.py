"""The dataset on disk: how its files are named, read, and written so that nothing is ever half there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reclaim.data import schema as s
from reclaim.data import windows as w
from reclaim.data.errors import ConfigError, SchemaError, TraceError

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
"""Raised when the meaning of a dataset's files changes; an older dataset is then refused, not misread."""

_PERCENTILE_CHANNELS = (
    (w.CPU_P50, s.CPU_PERCENTILES, s.PERCENTILES.index(50)),
    (w.CPU_P90, s.CPU_PERCENTILES, s.PERCENTILES.index(90)),
    (w.CPU_P99, s.CPU_TAIL_PERCENTILES, s.TAIL_PERCENTILES.index(99)),
)


def write_json(path: Path, content: object) -> None:
    """Write ``content`` as JSON under a temporary name, then rename: readers see all of it or none."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")
    os.replace(temporary, path)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def content_sha256(content: object) -> str:
    """Return the SHA-256 of a JSON-like value, in hex; key order makes no difference."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def bucket_name(bucket: int) -> str:
    """Return the file name of a bucket."""
    return f"bucket={bucket:03d}.parquet"


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """Give a fresh folder to write into, and put it in the place of ``path`` when the block ends well.

    A block that raises, or a process that is killed, leaves ``path`` as it was.
    """
    temporary, retired = path.with_name(path.name + ".partial"), path.with_name(path.name + ".old.partial")
    for left_behind in (temporary, retired):
        shutil.rmtree(left_behind, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():
        os.replace(path, retired)
        os.replace(temporary, path)
        shutil.rmtree(retired)
    else:
        os.replace(temporary, path)


def read_manifest(folder: Path, *, made_by: str) -> dict[str, Any]:
    """Return the manifest of a stage's output folder.

    Raises
    ------
    ConfigError
        ``folder`` is missing or no such output; the message names the command that makes one.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = "no such folder" if not folder.is_dir() else f"no {MANIFEST} in it"
        raise ConfigError(f"{folder}: {what}; `{made_by}` makes one")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise TraceError(f"{path}: not valid JSON ({error}); delete the folder and run `{made_by}` again") from error
    if not isinstance(manifest, dict):
        raise TraceError(f"{path}: expected a JSON object; delete the folder and run `{made_by}` again")
    return manifest


@dataclass(frozen=True)
class Dataset:
    """An ingested trace. The attributes say where it is and what its manifest holds."""

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Dataset:
        """Open a dataset folder.

        Raises
        ------
        ConfigError
            There is no dataset at ``path``.
        SchemaError
            It was written in another format version.
        """
        path = Path(path)
        manifest = read_manifest(path, made_by=f"reclaim ingest SOURCE {path}")
        version = manifest.get("format_version")
        if version != FORMAT_VERSION:
            raise SchemaError(
                f"{path}: dataset format {version}, this version reads {FORMAT_VERSION}; "
                f"run `reclaim ingest SOURCE {path}` again"
            )
        return cls(path, manifest)

    @property
    def n_buckets(self) -> int:
        """Number of buckets the tasks are spread over."""
        return int(self.manifest["buckets"])

    @property
    def fingerprint(self) -> str:
        """Hash over the inputs' checksums and the options: equal fingerprints mean equal datasets."""
        return str(self.manifest["fingerprint"])

    @property
    def n_windows(self) -> int:
        """Rows of usage, over all buckets."""
        return int(self.manifest["counts"]["usage"])

    def usage(self, bucket: int, columns: list[str] | None = None) -> pa.Table:
        """Return a bucket's usage rows, all columns or those named."""
        return pq.read_table(self.path / "usage" / bucket_name(bucket), columns=columns)

    def windows(self, bucket: int) -> w.Windows:
        """Return a bucket's usage rows as arrays, sorted by task, then time."""
        return windows_from_table(self.usage(bucket))

    def events(self, bucket: int) -> pa.Table:
        """Return the events of a bucket's tasks, sorted by task, then time."""
        return pq.read_table(self.path / "events" / bucket_name(bucket))

    def constraints(self, bucket: int) -> pa.Table:
        """Return the placement constraints of a bucket's tasks, sorted by task, then time."""
        return pq.read_table(self.path / "constraints" / bucket_name(bucket))

    def table(self, name: str) -> pa.Table:
        """Return a table that is no folder of buckets: ``tasks``, ``collections``, ``machines`` and so on."""
        return pq.read_table(self.path / f"{name}.parquet")


def windows_from_table(table: pa.Table) -> w.Windows:
    """Return usage rows as arrays, in the table's order; nulls become NaN or -1."""
    usage = np.full((len(table), len(w.CHANNELS)), np.nan)
    for channel, name in enumerate(w.CHANNELS):
        if name in table.column_names:
            usage[:, channel] = _floats(table[name])
    for channel, column, position in _PERCENTILE_CHANNELS:
        usage[:, channel] = _floats(pc.list_element(table[column], position))
    return w.Windows(
        collection_id=_integers(table[s.COLLECTION_ID], np.int64),
        instance_index=_integers(table[s.INSTANCE_INDEX], np.int64),
        start_us=_integers(table[s.START_US], np.int64),
        end_us=_integers(table[s.END_US], np.int64),
        scheduled_us=_integers(table[s.SCHEDULED_US], np.int64),
        machine_id=_integers(table[s.MACHINE_ID], np.int64),
        usage=usage,
        limit=np.stack([_floats(table[s.CPU_LIMIT]), _floats(table[s.MEMORY_LIMIT])], axis=1),
        tier=_integers(table[s.TIER], np.int8),
        scheduling_class=_integers(table[s.SCHEDULING_CLASS], np.int8),
        in_alloc=table[s.ALLOC_COLLECTION_ID].is_valid().to_numpy(),
    )


def _floats(column: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(column.cast(pa.float64()).fill_null(np.nan).to_numpy(), np.float64)


def _integers(column: pa.ChunkedArray, dtype: type) -> np.ndarray[Any, Any]:
    return np.asarray(column.fill_null(s.UNKNOWN_ID).to_numpy(), dtype)
