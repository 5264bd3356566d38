"""A seeded cell, written in the native Google v3 layout: the trace of the demo, the tests and whoever has no trace.

It is made up, and hard in the ways a real cell is: five tiers, services and batch, siblings that move together, leaks
and jumps that run out of memory and others that only look so, evictions, limit changes, alloc sets, lost windows and
missing fields. `truth.parquet` beside the tables tells why each run ended; no trace has that, it is for scoring only.
"""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data.errors import ConfigError
from reclaim.data.synthetic_cell import Cell
from reclaim.data.synthetic_format import SCHEMAS, USAGE, TableWriter
from reclaim.data.synthetic_shapes import dress
from reclaim.data.synthetic_workload import TRACE_START_S, WINDOW_S

MANIFEST = "SYNTHETIC.json"
TRUTH = "truth.parquet"
# Goes up whenever the same options would give other bytes: a cell of an older making is not mistaken for this one's.
GENERATION = 1
FORMATS = ("json", "parquet")
LEAST_TASKS = 5  # fewer would leave tiers, and at last the cell, empty

_TRUTH_SCHEMA = pa.schema(
    [
        ("collection_id", pa.int64()),
        ("instance_index", pa.int64()),
        ("time", pa.int64()),  # µs, trace clock
        ("cause", pa.string()),
    ]
)
_HOUR_S = 3600
_WINDOWS_PER_DAY = 86_400 // WINDOW_S


@dataclass(frozen=True)
class SyntheticCellConfig:
    """How large a cell, for how long, and in which form.

    Raises
    ------
    ConfigError
        A value is out of range; the message names the field and the value.
    """

    machines: int = 30
    """Machines of the cell, at least 1."""

    days: float = 4.0
    """Length of the trace in days, at least one window of 300 s; cut to whole windows."""

    seed: int = 1
    """The same options and seed give the same bytes; at least 0."""

    tasks_per_machine: float = 12.0
    """Tasks that run at a time, by machine; above 0. Their limits are scaled to fill 1.1 times the machines."""

    format: str = "json"
    """`json` for gzipped JSON lines as in the public buckets, `parquet` as BigQuery exports the same tables."""

    shard_hours: int = 24
    """Hours of the trace in one shard of a table, at least 1. The rows do not depend on it."""

    def __post_init__(self) -> None:
        least = {"machines": 1, "seed": 0, "shard_hours": 1, "days": 1 / _WINDOWS_PER_DAY}
        for name, bound in least.items():
            value = getattr(self, name)
            if not value >= bound or not np.isfinite(value):
                raise ConfigError(f"{name} must be at least {bound:.6g}, but got {name}={value!r}")
        for name in ("machines", "seed", "shard_hours"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} must be a whole number, but got {name}={value!r}")
        tasks = self.tasks_per_machine
        if not 0 < tasks <= 1000:
            raise ConfigError(
                f"tasks_per_machine must be above 0 and at most 1000, but got tasks_per_machine={tasks!r}"
            )
        if self.machines * tasks < LEAST_TASKS:
            raise ConfigError(
                f"machines times tasks_per_machine must be at least {LEAST_TASKS}, "
                f"but got {self.machines} times tasks_per_machine={tasks!r}"
            )
        if self.format not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(FORMATS)}, but got format={self.format!r}")

    @property
    def windows(self) -> int:
        """Windows of 300 s that the trace spans."""
        return max(1, int(self.days * _WINDOWS_PER_DAY + 1e-9))


@dataclass(frozen=True)
class SyntheticCellReport:
    """What lies in the folder of a synthetic cell."""

    out: Path
    options: dict[str, Any]
    rows: dict[str, int]
    """Rows of each table."""
    files: int
    ends: dict[str, int]
    """How many runs of tasks ended for each cause of the truth."""
    collections: int
    tasks: int
    wrote: bool
    """False where the cell was already there and nothing was done."""


def write_cell(
    out: Path, config: SyntheticCellConfig, *, progress: Callable[[float], None] | None = None
) -> SyntheticCellReport:
    """Write a synthetic cell into the folder `out`, which must not exist, be empty or hold this very cell.

    The cell is made hour by hour, so that memory does not grow with its length. It is written beside `out` first and
    renamed when whole: killed at any moment and run again, it gives the same bytes.

    Parameters
    ----------
    out
        Folder of the cell; folders above it are made.
    config
        The cell's options.
    progress
        Called with the share done, in (0, 1], after every hour of the trace.

    Raises
    ------
    ConfigError
        `out` holds something else.
    """
    out = Path(out)
    there = _existing(out, config)
    if there is not None:
        return there
    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    manifest = _write_tables(partial, config, progress)
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    if out.exists():
        out.rmdir()
    os.replace(partial, out)
    return _report(out, manifest, wrote=True)


def _existing(out: Path, config: SyntheticCellConfig) -> SyntheticCellReport | None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{out} exists and is not a synthetic cell: name another folder or remove it") from None
    wanted = {**asdict(config), "generation": GENERATION}
    found = manifest.get("options", {})
    other = [f"{k}={found.get(k)!r} instead of {v!r}" for k, v in wanted.items() if found.get(k) != v]
    if other:
        raise ConfigError(f"{out} holds another synthetic cell ({', '.join(other)}): name another folder or remove it")
    return _report(out, manifest, wrote=False)


def _write_tables(
    folder: Path, config: SyntheticCellConfig, progress: Callable[[float], None] | None
) -> dict[str, Any]:
    cell = Cell(config.machines, config.windows, config.tasks_per_machine, config.seed)
    end_s = TRACE_START_S + config.windows * WINDOW_S
    with ExitStack() as files:
        writers = {table: files.enter_context(TableWriter(folder, table, config.format)) for table in SCHEMAS}
        truth = files.enter_context(pq.ParquetWriter(folder / TRUTH, _TRUTH_SCHEMA, compression="zstd"))
        for hour, bare in cell.hours():
            # Every hour has its own noise, so that the length of a shard changes no value.
            rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(1000, hour)))
            writers[USAGE].write_windows(dress(bare, rng))
            done_s = min(TRACE_START_S + (hour + 1) * _HOUR_S, end_s)
            if (hour + 1) % config.shard_hours == 0 or done_s == end_s:
                for table, writer in writers.items():
                    if table != USAGE:
                        rows = cell.journal.take(table, done_s)
                        if rows:
                            writer.write_rows(rows)
                    writer.end_shard()
                _write_truth(truth, cell.journal.truth)
            if progress is not None:
                progress((done_s - TRACE_START_S) / (end_s - TRACE_START_S))
    return {
        "synthetic": True,
        "statement": "This cell is made up. No real cluster ever ran these tasks.",
        "layout": "Google cluster-usage traces v3",
        "fitted_to": "levels of usage over limit, bursts, percentile shapes, page cache, CPI, MAI, sizes, priorities "
        "and rates of missing fields: the Google cluster-usage traces v3 (2019) sample, CC-BY 4.0",
        "assumed": "everything that happens over time: cycles, noise, arrivals, lifetimes, memory behaviour, failures, "
        "limit changes, machine shapes and removals",
        "truth": f"{TRUTH} tells why each run ended; for scoring only, not a table of the format",
        "options": {**asdict(config), "generation": GENERATION},
        "rows": {table: writer.rows for table, writer in writers.items()},
        "shards": {table: writer.shards for table, writer in writers.items()},
        "ends": cell.journal.ends,
        "collections": cell.collections_made,
        "tasks": cell.tasks_made,
    }


def _write_truth(writer: pq.ParquetWriter, truth: list[tuple[int, int, int, str]]) -> None:
    rows = sorted(truth, key=lambda row: (row[2], row[0], row[1]))
    writer.write_table(
        pa.Table.from_pylist([dict(zip(_TRUTH_SCHEMA.names, r, strict=True)) for r in rows], _TRUTH_SCHEMA)
    )
    truth.clear()


def _report(out: Path, manifest: dict[str, Any], *, wrote: bool) -> SyntheticCellReport:
    return SyntheticCellReport(
        out=out,
        options=manifest["options"],
        rows=manifest["rows"],
        files=sum(manifest["shards"].values()),
        ends=manifest["ends"],
        collections=manifest["collections"],
        tasks=manifest["tasks"],
        wrote=wrote,
    )
