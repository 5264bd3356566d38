"""Hand-made series of a Kubernetes history, and what a fold or an ingest makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from reclaim.data import schema as s
from reclaim.data.core.files import write_json
from reclaim.data.traces.dialect import load_dialect
from reclaim.data.traces.history import FORMAT, PIECE_S, RECORD, RawSeries, piece_path, write_piece
from reclaim.data.traces.history import cut as part_of
from reclaim.data.traces.kubernetes.fold import Fold
from reclaim.data.traces.kubernetes.owners import owners_of

DIALECT = load_dialect("kubernetes")
T0 = 1_793_520_000
"""Start of every history here, in seconds."""
US = 1_000_000
Samples = Sequence[tuple[float, float]]
Piece = dict[str, list[RawSeries]]
POD = {"namespace": "shop", "pod": "cart-7d9f8b6c5x-abcde"}
APP = POD | {"container": "app"}


def one(labels: Mapping[str, str], samples: Samples) -> RawSeries:
    """Return a series; times in seconds since ``T0``."""
    times = np.array([round((T0 + time) * 1000) for time, _ in samples], np.int64)
    return RawSeries(tuple(sorted(labels.items())), times, np.array([value for _, value in samples], np.float64))


def beat(start_s: float, end_s: float, value: float = 1.0, step_s: float = 30) -> Samples:
    """Return samples of one value."""
    return [(time, value) for time in np.arange(start_s, end_s, step_s).tolist()]


def counter(start_s: float, end_s: float, cores: float, step_s: float = 30) -> Samples:
    """Return samples of a counter that rises by so many seconds a second."""
    return [(time, (time - start_s) * cores) for time in np.arange(start_s, end_s, step_s).tolist()]


def cut(piece: Piece, k: int) -> Piece:
    """Return the part of series in the k-th two hours."""
    low, high = ((T0 + n * PIECE_S) * 1000 for n in (k, k + 1))
    return part_of(piece, low, high)


def fold(series: Piece, pieces: int = 1) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Fold]:
    """Return windows and events by time, and the fold, of a history of so many pieces."""
    parts = [cut(series, k) for k in range(pieces)]
    made = Fold(DIALECT, owners_of(parts, DIALECT))
    tables, events = [], []
    for k, part in enumerate(parts):
        table, found = made.piece(part, (T0 + k * PIECE_S) * US, (T0 + (k + 1) * PIECE_S) * US)
        tables.append(table)
        events += found
    events += made.ends()
    rows = pa.concat_tables(tables).to_pylist()
    return sorted(rows, key=lambda row: row[s.START_US]), sorted(events, key=lambda event: event[s.TIME_US]), made


def told(events: list[dict[str, Any]]) -> list[tuple[float, int, bool | None]]:
    """Return time since ``T0``, type and recorded out-of-memory of events."""
    return [(event[s.TIME_US] / US - T0, event[s.EVENT_TYPE], event[s.OUT_OF_MEMORY]) for event in events]


def write_history(folder: Path, series: Piece, pieces: int = 1) -> Path:
    """Write a history of so many pieces."""
    folder.mkdir()
    for k in range(pieces):
        write_piece(piece_path(folder, T0 + k * PIECE_S), cut(series, k))
    write_json(folder / RECORD, {"format": FORMAT, "start_s": T0, "end_s": T0 + pieces * PIECE_S,
                                 "dialect": DIALECT.text, "asked": {}})  # fmt: skip
    return folder
