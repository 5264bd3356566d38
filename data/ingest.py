"""The ingest job: a folder of raw trace files in, a dataset out; killed anywhere and run again, the same bytes."""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from reclaim.data import schema as s
from reclaim.data.alibaba_2017 import alibaba_2017
from reclaim.data.buckets import make_bucket
from reclaim.data.errors import ConfigError, TraceError
from reclaim.data.google_v2 import google_v2
from reclaim.data.google_v3 import google_v3
from reclaim.data.rows import DamagedFileError
from reclaim.data.series import load_mapping, series
from reclaim.data.shards import REJECTS, Shard, connect, take_shard
from reclaim.data.source import Source, find_files
from reclaim.data.store import FORMAT_VERSION, MANIFEST, Dataset, bucket_name, content_sha256, file_sha256, write_json

log = logging.getLogger(__name__)

TRACES: Final = ("google-v3", "google-v2.1", "alibaba-2017", "series")
"""Trace formats that can be read."""

_NATURES: Final = {"COMPOSED.json": "composed of parts of real traces (semi-synthetic)", "SYNTHETIC.json": "synthetic"}
"""Marker file in a source folder → what its dataset must be called in every report."""


@dataclass(frozen=True)
class IngestConfig:
    """How to read a trace."""

    trace: str = "google-v3"
    """Trace format, one of ``TRACES``."""
    mapping: str | None = None
    """For ``series``: a mapping file, or the name of a shipped one."""
    buckets: int = 16
    """Files the tasks are spread over: one must fit in memory."""
    max_reject_share: float = 0.001
    """Largest share of lines that may be set aside before the run fails."""
    skip_damaged: bool = False
    """Go on without files that are truncated or corrupt; the manifest names them."""
    memory_limit_mib: int = 1024
    """Memory the query engine may use before it spills to disk, in MiB."""

    def __post_init__(self) -> None:
        if self.trace not in TRACES:
            raise ConfigError(f"trace must be one of {', '.join(TRACES)}, got {self.trace!r}")
        if (self.trace == "series") != (self.mapping is not None):
            raise ConfigError("a mapping goes with trace 'series', and 'series' needs one (--mapping FILE)")
        if not 1 <= self.buckets <= 999:
            raise ConfigError(f"buckets must be between 1 and 999, got {self.buckets}")
        if not 0 <= self.max_reject_share <= 1:
            raise ConfigError(f"max_reject_share must be between 0 and 1, got {self.max_reject_share}")
        if self.memory_limit_mib < 128:
            raise ConfigError(f"memory_limit_mib must be at least 128, got {self.memory_limit_mib}")


@dataclass(frozen=True)
class IngestReport:
    """What an ingest made: the dataset, and whether it had been there already."""

    dataset: Dataset
    already_there: bool


def ingest(source_folder: Path, out: Path, config: IngestConfig) -> IngestReport:
    """Read a trace into a dataset.

    Works in ``OUT.partial`` and renames it at the end. Files already taken there are not read again, so a run that
    was killed, or stopped at a damaged file since replaced, goes on where it was.

    Raises
    ------
    ConfigError
        The source is missing, or ``out`` holds something made otherwise.
    SchemaError
        A file's columns are not the format's.
    TraceError
        Files are damaged, too many lines are bad, or there is nothing in it.
    """
    if not source_folder.is_dir():
        raise ConfigError(f"{source_folder}: no such folder")
    source = _source(source_folder, config)
    files = [(table, file) for table in source.tables for file in find_files(source_folder, table)]
    if not files:
        patterns = ", ".join(dict.fromkeys(table.patterns[0] for table in source.tables))
        raise TraceError(f"{source_folder}: no files of a {source.trace} trace (looked for {patterns})")
    if out.exists():
        return _already_there(out, source_folder, source, config, [file for _, file in files])
    staging = _staging(out)
    (staging / "spill").mkdir(parents=True, exist_ok=True)
    connection = connect(config.memory_limit_mib, staging / "spill")
    shards: list[Shard] = []
    damaged: list[tuple[Path, str]] = []
    total = sum(file.stat().st_size for _, file in files)
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for table, file in files:
            try:
                name = file.relative_to(source_folder).as_posix()
                shards.append(take_shard(connection, table, source_folder, name, staging / "shards", config.buckets))
            except DamagedFileError as error:
                damaged.append((file, str(error)))
            bar.update(file.stat().st_size)
    if damaged and not config.skip_damaged:
        raise TraceError(
            f"{len(damaged)} damaged file{'s' * (len(damaged) > 1)}: {'; '.join(message for _, message in damaged[:5])}"
            f"{'; …' * (len(damaged) > 5)}. Replace and run again (what was read is kept), or pass --skip-damaged"
        )
    rejects = _check_rejects(shards, staging, config)
    finished = staging / "dataset"
    shutil.rmtree(finished, ignore_errors=True)
    counts = _write_tables(connection, source, shards, finished, config.buckets)
    if not any(counts.values()):
        raise TraceError(f"{source_folder}: not one row in {len(shards)} files")
    (finished / "rejects").mkdir()
    pq.write_table(rejects, finished / "rejects" / "rejects.parquet")
    write_json(finished / MANIFEST, _manifest(source_folder, source, shards, damaged, counts, rejects, config))
    connection.close()
    os.replace(finished, out)
    shutil.rmtree(staging)
    log.info("%s: %d windows of %d tasks", out, counts["usage"], counts["tasks"])
    return IngestReport(Dataset.open(out), already_there=False)


def _source(source_folder: Path, config: IngestConfig) -> Source:
    match config.trace:
        case "google-v3":
            return google_v3()
        case "google-v2.1":
            return google_v2(source_folder)
        case "alibaba-2017":
            return alibaba_2017(source_folder)
        case _:
            return series(load_mapping(config.mapping or ""))


def _options(source: Source, config: IngestConfig) -> dict[str, Any]:
    """Return all that decides a dataset's bytes, but for its input files."""
    return {"trace": source.trace, "buckets": config.buckets, **source.options}


def _fingerprint(source: Source, config: IngestConfig, checksums: dict[str, str]) -> str:
    return content_sha256({"format": FORMAT_VERSION, "options": _options(source, config), "inputs": checksums})


def _already_there(
    out: Path, source_folder: Path, source: Source, config: IngestConfig, files: list[Path]
) -> IngestReport:
    """Return the dataset at ``out`` if it is the one this run would make."""
    try:
        dataset = Dataset.open(out)
    except ConfigError as error:
        raise ConfigError(f"{out}: exists and is no dataset; choose another folder or remove it") from error
    remedy = "choose another folder or remove it"
    if dataset.manifest["options"] != _options(source, config):
        raise ConfigError(f"{out}: holds a dataset made from other files or options than asked for; {remedy}")
    named = {file.relative_to(source_folder).as_posix(): file for file in files}
    entries = {entry["file"]: entry for part in ("inputs", "damaged") for entry in dataset.manifest[part]}
    changed = sorted(entries.keys() ^ named.keys())
    changed += [name for name, file in named.items() if name in entries and not _is_still(file, entries[name])]
    if changed:
        raise ConfigError(
            f"{out}: holds a dataset made from other files or options than {source_folder} now has "
            f"(changed: {', '.join(changed[:3])}{', …' * (len(changed) > 3)}); {remedy}"
        )
    left_out = [entry["file"] for entry in dataset.manifest["damaged"]]
    if left_out and not config.skip_damaged:
        raise ConfigError(
            f"{out}: holds a dataset made without the damaged {', '.join(left_out[:3])}{', …' * (len(left_out) > 3)}; "
            f"pass --skip-damaged to go on with it, or repair and {remedy}"
        )
    shutil.rmtree(_staging(out), ignore_errors=True)  # litter of a run killed after its last rename
    return IngestReport(dataset, already_there=True)


def _staging(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _is_still(file: Path, entry: dict[str, Any]) -> bool:
    """Whether a file holds the bytes that a manifest's entry recorded."""
    return file.stat().st_size == entry.get("bytes") and file_sha256(file) == entry.get("sha256")


def _check_rejects(shards: list[Shard], staging: Path, config: IngestConfig) -> pa.Table:
    """Return every rejected line of all shards, in order; raise where they are too many."""
    rejects = pa.concat_tables([s.REJECTS.empty_table(), *(pq.read_table(x.folder / REJECTS) for x in shards)])
    lines = sum(shard.rows for shard in shards) + len(rejects)
    if len(rejects) > config.max_reject_share * lines:
        kept = staging / "rejects.csv"
        rejects.to_pandas().to_csv(kept, index=False)
        first = rejects.slice(0, 1).to_pylist()[0]
        reasons = pc.value_counts(rejects[s.REJECT_REASON]).to_pylist()
        most = ", ".join(f"{r['values']} ({r['counts']})" for r in sorted(reasons, key=lambda r: -r["counts"])[:4])
        raise TraceError(
            f"{len(rejects)} of {lines} lines rejected, more than {config.max_reject_share:.3%} (--max-reject-share): "
            f"{most}; first {first[s.REJECT_FILE]} line {first[s.REJECT_LINE]}; all in {kept}"
        )
    return rejects


def _write_tables(
    connection: duckdb.DuckDBPyConnection, source: Source, shards: list[Shard], out: Path, buckets: int
) -> dict[str, int]:
    """Write every table into ``out`` and return the row counts."""
    counts = {"usage": 0, "events": 0, "constraints": 0, "duplicate_windows": 0}
    tasks = []
    for folder in s.BUCKETED:
        (out / folder).mkdir(parents=True)
    for bucket in tqdm(range(buckets), desc="sorting", unit="bucket", disable=None, leave=False):
        made = make_bucket(connection, bucket, shards, source)
        for folder in s.BUCKETED:
            pq.write_table(getattr(made, folder), out / folder / bucket_name(bucket), compression="zstd")
            counts[folder] += len(getattr(made, folder))
        counts["duplicate_windows"] += made.duplicates
        tasks.append(made.tasks)
    small = {name: _small_table(connection, shards, name, s.with_extras(name, source.extras.get(name, ())))
             for name in ("collections", "machines", "attributes", "machine_usage")}  # fmt: skip
    small["tasks"] = _with_names(pa.concat_tables(tasks), small["collections"])
    for name, table in small.items():
        pq.write_table(table, out / f"{name}.parquet")
        counts[name] = len(table)
    return counts


def _small_table(connection: duckdb.DuckDBPyConnection, shards: list[Shard], name: str, schema: pa.Schema) -> pa.Table:
    """Return a table that is not bucketed, sorted by all its columns."""
    pieces = [p for shard in shards if shard.table == name for p in shard.pieces(0)]
    if not pieces:
        return schema.empty_table()
    files = ", ".join("'" + p.replace("'", "''") + "'" for p in pieces)
    staged = f"read_parquet([{files}], union_by_name = true, hive_partitioning = false)"
    present = {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {staged}").fetchall()}
    columns = ", ".join(f.name if f.name in present else f"NULL AS {f.name}" for f in schema)
    table = connection.sql(f"SELECT DISTINCT {columns} FROM {staged} ORDER BY ALL").to_arrow_table()
    return pa.table([table[f.name].cast(f.type) for f in schema], schema=schema)


def _with_names(tasks: pa.Table, collections: pa.Table) -> pa.Table:
    """Return tasks with the user and logical name of their collection, as last told."""
    for name in (s.USER_ID, s.LOGICAL_NAME_ID):
        if len(collections):
            last = collections.sort_by(s.TIME_US).filter(pc.field(name).is_valid())
            named = last.group_by([s.COLLECTION_ID], use_threads=False).aggregate([(name, "last")])
            tasks = tasks.join(named, keys=s.COLLECTION_ID).rename_columns({f"{name}_last": name})
        else:
            tasks = tasks.append_column(name, pa.nulls(len(tasks), pa.string()))
    tasks = pa.table([tasks[field.name] for field in s.TASKS], schema=s.TASKS)
    return tasks.sort_by([(name, "ascending") for name in s.TASK_KEY])


def _manifest(
    source_folder: Path,
    source: Source,
    shards: list[Shard],
    damaged: list[tuple[Path, str]],
    counts: dict[str, int],
    rejects: pa.Table,
    config: IngestConfig,
) -> dict[str, Any]:
    checksums = {shard.file: shard.sha256 for shard in shards}
    nature = [label for marker, label in _NATURES.items() if (source_folder / marker).is_file()]
    reasons = pc.value_counts(rejects[s.REJECT_REASON]).to_pylist()
    return {
        "format_version": FORMAT_VERSION,
        "fingerprint": _fingerprint(source, config, checksums),
        "name": source_folder.resolve().name,
        "nature": nature[0] if nature else "recorded",
        "options": _options(source, config),
        "buckets": config.buckets,
        "inputs": [
            {"table": x.table, "file": x.file, "bytes": x.n_bytes, "sha256": x.sha256, "rows": x.rows,
             "rejects": x.rejects}
            for x in shards
        ],
        "damaged": [
            {"file": file.relative_to(source_folder).as_posix(), "reason": reason.split(": ", 1)[-1], "bytes": file.stat().st_size,
             "sha256": file_sha256(file)}
            for file, reason in damaged
        ],
        "counts": counts,
        "rejects": {r["values"]: r["counts"] for r in reasons},
        "defects": dict(sum((Counter(x.defects) for x in shards), Counter[str]())),
        "lacks": sorted(source.lacks),
        "extras": {table: list(names) for table, names in source.extras.items()},
        "notes": list(source.notes),
    }  # fmt: skip
