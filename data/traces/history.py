"""Lays out the folder of a fetched history: its record, and pieces of raw samples, one parquet file for each two hours.

::

    history.json                   the range, the dialect, what was asked for; written before the first piece
    samples/2026-11-22T14.parquet  a piece: one row per series of one role, with all samples of it in that time
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reclaim.data.core.files import replaced_file
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.traces.dialect import Dialect, parse_dialect

RECORD: Final = "history.json"
FOLDER: Final = "samples"
PIECE_S: Final = 7200
"""Seconds in a piece: Prometheus' own blocks are as long, and begin at the same times."""
FORMAT: Final = 1
"""Raised when the layout changes; an older history is then refused."""

_SCHEMA: Final = pa.schema(
    [
        ("role", pa.string()),
        ("labels", pa.string()),  # JSON, by name, without the metric's own
        ("time_ms", pa.list_(pa.int64())),
        ("value", pa.list_(pa.float64())),
    ]
)


def moment_s(end: str) -> int:
    """Return a time such as 2026-11-02 or 2026-11-02T14:00 (UTC) in seconds of Unix time; ConfigError if it is none."""
    try:
        moment = datetime.fromisoformat(end)
    except ValueError as error:
        raise ConfigError(f"--end: expected a time such as 2026-11-02 or 2026-11-02T14:00, got {end!r}") from error
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


@dataclass(frozen=True)
class RawSeries:
    """Samples of one series, in ms of Unix time; labels by name, without the metric's."""

    labels: tuple[tuple[str, str], ...]
    time_ms: NDArray[np.int64]
    value: NDArray[np.float64]

    @property
    def named(self) -> dict[str, str]:
        """The labels, by name."""
        return dict(self.labels)


def joined(parts: Iterable[RawSeries], start_ms: int, end_ms: int) -> list[RawSeries]:
    """Return one series per set of labels, by labels: times rise, are in [start, end) and once; no value is NaN.

    The marker of a series' end is a NaN too, and not all ways of reading have it; nor have all of them a negative zero.
    """
    found: dict[tuple[tuple[str, str], ...], list[RawSeries]] = {}
    for part in parts:
        found.setdefault(part.labels, []).append(part)
    out = []
    for labels in sorted(found):
        same = found[labels]
        time = np.concatenate([part.time_ms for part in same])
        value = np.concatenate([part.value for part in same])
        kept = (time >= start_ms) & (time < end_ms) & ~np.isnan(value)
        time, value = time[kept], value[kept] + 0.0
        if len(time) and not (np.diff(time) > 0).all():
            time, first = np.unique(time, return_index=True)
            value = value[first]
        if len(time):
            out.append(RawSeries(labels, time, value))
    return out


def finite(series: RawSeries) -> RawSeries:
    """Return a series without its infinite samples."""
    kept = np.isfinite(series.value)
    return series if kept.all() else RawSeries(series.labels, series.time_ms[kept], series.value[kept])


def cut(piece: Mapping[str, list[RawSeries]], start_ms: int, end_ms: int) -> dict[str, list[RawSeries]]:
    """Return the parts of series by role in [start, end); those without a sample in it are left out."""
    found: dict[str, list[RawSeries]] = {}
    for role, rows in piece.items():
        for row in rows:
            low, high = np.searchsorted(row.time_ms, (start_ms, end_ms)).tolist()
            if high > low:
                found.setdefault(role, []).append(RawSeries(row.labels, row.time_ms[low:high], row.value[low:high]))
    return found


def split(rows: Iterable[RawSeries], starts_s: Sequence[int]) -> list[list[RawSeries]]:
    """Return the parts of ``joined`` series in each of the pieces that begin at ``starts_s``, one after the other."""
    edges = np.array([*starts_s, starts_s[-1] + PIECE_S], np.int64) * 1000
    out: list[list[RawSeries]] = [[] for _ in starts_s]
    for row in rows:
        cuts = np.searchsorted(row.time_ms, edges).tolist()
        for k, (low, high) in enumerate(pairwise(cuts)):
            if high > low:
                out[k].append(RawSeries(row.labels, row.time_ms[low:high], row.value[low:high]))
    return out


def piece_path(folder: Path, start_s: int) -> Path:
    """Return the file of the piece that begins at ``start_s``."""
    return folder / FOLDER / f"{datetime.fromtimestamp(start_s, UTC):%Y-%m-%dT%H}.parquet"


def write_piece(path: Path, series: Mapping[str, list[RawSeries]]) -> int:
    """Write a piece, a row group per role, and return its bytes. The same samples give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path, durable=True) as partial:  # a Prometheus may no longer have its samples
        with pq.ParquetWriter(
            partial, _SCHEMA, compression="zstd", use_dictionary=["role"], write_statistics=False,
            column_encoding={"time_ms.list.element": "DELTA_BINARY_PACKED", "value.list.element": "BYTE_STREAM_SPLIT"},
            store_schema=False,
        ) as writer:  # fmt: skip
            for role, rows in series.items():
                if rows:
                    writer.write_table(_table(role, rows), row_group_size=len(rows))
        size = partial.stat().st_size
    return size


def _table(role: str, rows: list[RawSeries]) -> pa.Table:
    ends = np.cumsum([0, *(len(row.time_ms) for row in rows)]).astype(np.int32)
    lists = [
        pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate([getattr(row, name) for row in rows])))
        for name in ("time_ms", "value")
    ]
    labels = [json.dumps(row.named, separators=(",", ":"), ensure_ascii=False) for row in rows]
    return pa.table([pa.array([role] * len(rows)), pa.array(labels), *lists], schema=_SCHEMA)


@lru_cache(maxsize=1 << 18)
def _pairs(labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(json.loads(labels).items())


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path}: cannot be read ({error}); delete it and run `reclaim fetch` again") from error


def roles_in(path: Path) -> set[str]:
    """Return the roles of which a piece has a series; TraceError where it cannot be read."""
    with _opened(path) as file:
        return set(file.read(["role"])["role"].unique().to_pylist())


def read_piece(path: Path, roles: Container[str] | None = None) -> dict[str, list[RawSeries]]:
    """Return the series of a piece by role, of all roles or those named, without infinite samples.

    Raises
    ------
    TraceError
        It cannot be read.
    """
    with _opened(path) as file:
        groups = list(range(file.num_row_groups))
        if roles is not None:
            groups = [k for k in groups if file.read_row_group(k, ["role"])["role"][0].as_py() in roles]
        tables = [file.read_row_group(group) for group in groups]
    found: dict[str, list[RawSeries]] = {}
    for table in tables:
        times, values = (table[name].combine_chunks() for name in ("time_ms", "value"))
        ends = times.offsets.to_numpy()
        time, value = times.flatten().to_numpy(), values.flatten().to_numpy()
        for k, (role, labels) in enumerate(zip(table["role"].to_pylist(), table["labels"].to_pylist(), strict=True)):
            rows = slice(ends[k] - ends[0], ends[k + 1] - ends[0])
            series = finite(RawSeries(_pairs(labels), time[rows], value[rows]))
            if len(series.value):
                found.setdefault(role, []).append(series)
    return found


@dataclass(frozen=True)
class History:
    """A history on disk: its folder and its record."""

    folder: Path
    record: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> History:
        """Open a complete history.

        Raises
        ------
        ConfigError
            There is none, it is of another format, or pieces of it are missing.
        """
        history = cls.known(folder)
        if missing := [piece for piece in history.pieces() if not piece.is_file()]:
            raise ConfigError(
                f"{folder}: {len(missing)} of {len(list(history.pieces()))} pieces are missing, the first is "
                f"{missing[0].name}; run `reclaim fetch prometheus {folder}` with the same options again"
            )
        return history

    @classmethod
    def known(cls, folder: Path) -> History:
        """Return the history of a folder, complete or not; ConfigError where it has none."""
        history = cls.begun(folder)
        if history is None:
            raise ConfigError(f"{folder}: no {RECORD} in it; `reclaim fetch prometheus {folder} --url URL` makes one")
        return history

    @classmethod
    def begun(cls, folder: Path) -> History | None:
        """Return the history of a folder, complete or not; None if it has none."""
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{folder / RECORD}: not valid JSON ({error}); choose another folder") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ConfigError(f"{folder / RECORD}: expected format {FORMAT}; fetch into another folder")
        return cls(folder, record)

    @property
    def range_s(self) -> tuple[int, int]:
        """First second, and the one past the last."""
        return int(self.record["start_s"]), int(self.record["end_s"])

    @property
    def dialect(self) -> Dialect:
        """Names of metrics and labels that it was fetched by; ConfigError where they are of another version."""
        return parse_dialect(self.record["dialect"], f"of {self.folder}")

    def until(self, end_s: int) -> History:
        """Return the same history with another end."""
        return replace(self, record={**self.record, "end_s": end_s})

    def since(self, start_s: int) -> History:
        """Return the same history with another beginning."""
        return replace(self, record={**self.record, "start_s": start_s})

    def starts_s(self) -> range:
        """Return the beginnings of the pieces."""
        return range(*self.range_s, PIECE_S)

    def pieces(self) -> Iterator[Path]:
        """Yield the files of the pieces, by time."""
        return (piece_path(self.folder, start_s) for start_s in self.starts_s())
