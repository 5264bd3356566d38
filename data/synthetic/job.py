"""Writes a seeded synthetic cell in the Google v3 layout, for the demo, the tests and users without a trace.

The cell has the difficulties of a real one: five tiers, services and batch, correlated siblings, leaks and jumps that
run out of memory and others that only resemble them, evictions, limit changes, alloc sets, lost windows and missing
fields. ``truth.parquet`` holds the cause of each run's end, for scoring only; no real trace has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reclaim.data.core.files import remove_left_behind, replaced_folder
from reclaim.data.errors import ConfigError
from reclaim.data.synthetic.cell import Cell
from reclaim.data.synthetic.google_v3_writer import SCHEMAS, USAGE, TableWriter
from reclaim.data.synthetic.shapes import usage_rows
from reclaim.data.synthetic.workload import TRACE_START_S, WINDOW_S

MANIFEST = "SYNTHETIC.json"
TRUTH = "truth.parquet"
GENERATION: Final = 1
"""Raised when the same options give other bytes, so that an older cell is not taken for a current one."""
FORMATS = ("json", "parquet")
LONGEST_DAYS: Final = 3_660
"""Ten years; a mistyped length would fill the disk."""
LEAST_TASKS: Final = 5
"""Fewer tasks would leave tiers, or the cell, empty."""

_TRUTH_SCHEMA = pa.schema(
    [
        ("collection_id", pa.int64()),
        ("instance_index", pa.int64()),
        ("time", pa.int64()),  # µs, trace clock
        ("cause", pa.string()),
    ]
)
_SHARES = ("common", "service")
_HOUR_S = 3600
_WINDOWS_PER_DAY = 86_400 // WINDOW_S


@dataclass(frozen=True)
class SyntheticCellConfig:
    """Size, length and format of a cell.

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
    """``json`` for gzipped JSON lines as in the public buckets, ``parquet`` as BigQuery exports the same tables."""

    shard_hours: int = 24
    """Hours of the trace in one shard of a table, at least 1. The rows do not depend on it."""

    common: float = 0.0
    """Share of each task's movement that the whole cell has in common, at least 0."""

    service: float = 0.0
    """Share that the tasks of a collection have in common beyond that, at least 0. Both together are below 1."""

    def __post_init__(self) -> None:
        least = {"machines": 1, "seed": 0, "shard_hours": 1, "days": 1 / _WINDOWS_PER_DAY}
        for name, bound in least.items():
            value = getattr(self, name)
            if not bound <= value < math.inf:
                raise ConfigError(f"{name} must be at least {bound:.6g}, but got {name}={value!r}")
        if self.days > LONGEST_DAYS:
            raise ConfigError(f"days must be at most {LONGEST_DAYS}, but got days={self.days!r}")
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
        for name in _SHARES:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, but got {name}={getattr(self, name)!r}")
        if not self.common + self.service < 1:
            raise ConfigError(
                f"common and service must be below 1 together, but got common={self.common!r}, service={self.service!r}"
            )
        if self.format not in FORMATS:
            raise ConfigError(
                f"format must be one of {', '.join(FORMATS)}, or openmetrics for a Kubernetes history, but got "
                f"format={self.format!r}"
            )

    @property
    def recorded(self) -> dict[str, Any]:
        """Options as the manifest has them: shares of movement only where there are any, as before they existed."""
        options = {name: v for name, v in asdict(self).items() if name not in _SHARES or v}
        return {**options, "generation": GENERATION}

    @property
    def windows(self) -> int:
        """Windows of 300 s that the trace spans."""
        return max(1, int(self.days * _WINDOWS_PER_DAY + 1e-9))


@dataclass(frozen=True)
class SyntheticCellReport:
    """Contents of a synthetic cell's folder."""

    out: Path
    options: dict[str, Any]
    rows: dict[str, int]
    """Rows of each table."""
    files: int
    ends: dict[str, int]
    """Ended runs by cause of the truth."""
    collections: int
    tasks: int
    wrote: bool
    """False if the cell existed and nothing was written."""


def write_cell(
    out: Path, config: SyntheticCellConfig, *, progress: Callable[[float], None] | None = None
) -> SyntheticCellReport:
    """Write a synthetic cell into the folder ``out``, which must be absent or empty, or hold the same cell.

    Memory does not grow with the cell's length. The folder is written under a temporary name and renamed when complete:
    a run after a kill gives the same bytes.

    Parameters
    ----------
    out
        Folder of the cell; parents are created.
    config
        The cell's options.
    progress
        Called with the share done, in (0, 1], after every hour of the trace.

    Raises
    ------
    ConfigError
        ``out`` holds other content.
    """
    out = Path(out)
    there = _existing(out, config)
    if there is not None:
        remove_left_behind(out)
        return there
    with replaced_folder(out) as folder:
        manifest = _write_tables(folder, config, progress)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return _report(out, manifest, wrote=True)


def _existing(out: Path, config: SyntheticCellConfig) -> SyntheticCellReport | None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        there = dict(manifest["options"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ConfigError(f"{out} exists and is not a synthetic cell: name another folder or remove it") from None
    unshared = dict.fromkeys(_SHARES, 0.0)
    wanted, found = unshared | config.recorded, unshared | there
    other = [f"{k}={found.get(k)!r} instead of {v!r}" for k, v in wanted.items() if found.get(k) != v]
    if other:
        raise ConfigError(f"{out} holds another synthetic cell ({', '.join(other)}): name another folder or remove it")
    return _report(out, manifest, wrote=False)


def _write_tables(
    folder: Path, config: SyntheticCellConfig, progress: Callable[[float], None] | None
) -> dict[str, Any]:
    cell = Cell(
        config.machines,
        config.windows,
        config.tasks_per_machine,
        config.seed,
        common=config.common,
        service=config.service,
    )
    end_s = TRACE_START_S + config.windows * WINDOW_S
    with ExitStack() as files:
        writers = {table: files.enter_context(TableWriter(folder, table, config.format)) for table in SCHEMAS}
        truth = files.enter_context(pq.ParquetWriter(folder / TRUTH, _TRUTH_SCHEMA, compression="zstd"))
        for hour, simulated in cell.hours():
            # Each hour has its own noise, so that the length of a shard changes no value.
            rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(1000, hour)))
            writers[USAGE].write_windows(usage_rows(simulated, rng))
            done_s = min(TRACE_START_S + (hour + 1) * _HOUR_S, end_s)
            if (hour + 1) % config.shard_hours == 0 or done_s == end_s:
                for table, writer in writers.items():
                    if table != USAGE:
                        rows = cell.journal.drain(table, done_s)
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
        "options": config.recorded,
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
    recorded = {name: manifest[name] for name in ("options", "rows", "ends", "collections", "tasks")}
    return SyntheticCellReport(out=out, files=sum(manifest["shards"].values()), wrote=wrote, **recorded)
