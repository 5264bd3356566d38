"""Reads a folder of raw trace files into a dataset; a run that was killed can be repeated, with the same bytes."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from reclaim.data import schema as s
from reclaim.data.core.duck import connect, file_sql, literal, mismatch, release
from reclaim.data.core.engine.workers import ENGINES, Workers, plan_workers
from reclaim.data.core.files import discard_folder, locked, partial_of, retired_of, write_json
from reclaim.data.core.stores.places import check_folder, home_of, in_store, reached
from reclaim.data.core.stores.transfer import is_taken, marked, publish_folder, remove_mark
from reclaim.data.dataset import MANIFEST, Dataset, bucket_name
from reclaim.data.errors import ConfigError, SchemaError, TraceError
from reclaim.data.ingest.bucket import FORM, BucketJob, TableJob, make_bucket, make_table, staged_schema, tables_of
from reclaim.data.ingest.defects import DEFECTS, LEGITIMATE, warnings_of
from reclaim.data.ingest.manifest import check_there, fingerprint_of, manifest_of
from reclaim.data.ingest.shard import LOCK, REJECTS, Damaged, Shard, ShardJob, take_shard
from reclaim.data.traces.alibaba_2017 import alibaba_2017
from reclaim.data.traces.google_v2 import google_v2
from reclaim.data.traces.google_v3 import google_v3
from reclaim.data.traces.recorded import recorded
from reclaim.data.traces.series import NO_TIER, NOT_ISO, series
from reclaim.data.traces.series_mapping import ENDINGS, PUBLISHED, load_mapping, shipped_mappings
from reclaim.data.traces.source import RawTable, Source, find_files

Job = TypeVar("Job")
Result = TypeVar("Result")
log = logging.getLogger(__name__)

TRACES: Final = ("google-v3", "google-v2.1", "alibaba-2017", "kubernetes", "recorded", "series")
"""Trace formats that can be read."""

_BYTES_PER_ROW: Final = {".json.gz": 130, ".json": 600, ".csv.gz": 35, ".csv": 100, ".parquet": 40, "": 40}
"""Approximate bytes of a window in a raw file, by its ending: for planning only. JSON as in a synthetic v3 cell."""
_ROWS_PER_BUCKET: Final = 100_000
_REMEDIES: Final = {
    mismatch("", "double"): "values of a series are plain numbers, not 5%, 0,5, 1,234.5 or 250m, and a missing "
    'one is an empty field, not null or -; dates and timestamps are read with time_unit = "iso"',
    NOT_ISO: "a time is like 2026-11-28T02:00:00Z, 2026-11-28 02:00:00.5 or 2026-11-28T03:00:00+01:00; one without a "
    'zone is UTC; numbers take time_unit "s", "ms" or "us"',
    NO_TIER: 'give each word its tier: tier = { column = "class", batch = "free" }',
    " is past the last time there can be": "the times are in a finer unit than the mapping says: time_unit "
    "takes s, ms or us, and nanoseconds are divided by 1000 first",
    " must be above 0 to serve as a limit": "rows without a limit, such as those of a machine that is off, are left "
    "out with a larger --max-reject-share",
    " is negative or not finite": "a missing value is a null of parquet or an empty field, not NaN (in polars "
    "`fill_nan(None)`)",
}
"""Ends of the reasons of a series' rejects, and what to do."""
_COMPANIONS: Final = frozenset({
    "COMPOSED.json", "SYNTHETIC.json", "truth.parquet", "README", "README.txt", "README.md", "schema.csv",
    "fetch.jsonl", "history.json", "made.json", "feed.json", "feed.lock", "feed.fold", "MD5SUM", "SHA1SUM", "SHA256SUM",
})  # fmt: skip
"""Files next to a trace's tables that are not tables."""
_REJECTS_AT_ONCE: Final = 50_000
_FEWEST_BUCKETS, _MOST_BUCKETS = 16, 9999


@dataclass(frozen=True)
class IngestConfig:
    """Settings of an ingest."""

    trace: str = "google-v3"
    """Trace format, one of ``TRACES``."""
    mapping: str | None = None
    """For ``series``: a mapping file, or the name of a shipped one."""
    anonymise: bool = False
    """For ``kubernetes``: puts numbers in the place of names, so that the dataset can be shared."""
    buckets: int | None = None
    """Files the tasks are spread over, one of which must fit in memory; by default as many as the input needs."""
    max_reject_share: float = 0.001
    """Largest share of rejected lines before the run fails."""
    skip_damaged: bool = False
    """Leaves out files that are truncated or corrupt; the manifest names them."""
    memory_limit_mib: int = 1024
    """Memory that all processes of the run may take together, in MiB; more allows more workers."""
    workers: int = 1
    """Number of workers, as far as the memory allows; 0: one for each core."""
    engine: str = "local"
    """Engine that runs them, one of ``ENGINES``."""

    def __post_init__(self) -> None:
        if self.trace not in TRACES:
            raise ConfigError(f"trace must be one of {', '.join(TRACES)}, got {self.trace!r}")
        if (self.trace == "series") != (self.mapping is not None):
            raise ConfigError("a mapping goes with trace 'series', and 'series' needs one (--mapping FILE)")
        if self.anonymise and self.trace != "kubernetes":
            raise ConfigError(f"--anonymise is for trace 'kubernetes': {self.trace!r} is read as it is")
        if self.buckets is not None and not 1 <= self.buckets <= _MOST_BUCKETS:
            raise ConfigError(f"buckets must be between 1 and {_MOST_BUCKETS}, got {self.buckets}")
        if self.workers < 0:
            raise ConfigError(f"workers must be 0 (one for each core) or more, got {self.workers}")
        if self.engine not in ENGINES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")
        if not 0 <= self.max_reject_share <= 1:
            raise ConfigError(f"max_reject_share must be between 0 and 1, got {self.max_reject_share}")
        if self.memory_limit_mib < 512:
            raise ConfigError(f"memory_limit_mib must be at least 512, got {self.memory_limit_mib}")


@dataclass(frozen=True)
class IngestReport:
    """The result of an ingest: the dataset, whether it existed already, and what a reader must know about its input."""

    dataset: Dataset
    already_there: bool
    findings: tuple[str, ...] = ()


def ingest(source_folder: Path, out: Path, config: IngestConfig) -> IngestReport:
    """Read a trace into a dataset.

    The source is a folder, or for ``series`` a single file.

    Objects of a trace in a store are copied next to the unfinished dataset, one for each worker, while they are read.

    Works in ``OUT.partial`` and renames it at the end; for a dataset in a store, works in the cache of this machine and
    writes the dataset at the end, its manifest last. Files already read there are not read again, so a run that was
    killed, or stopped at a damaged file that has been replaced since, continues where it was.

    Raises
    ------
    ConfigError
        The source is missing, or ``out`` holds something else.
    SchemaError
        A file's columns are not the format's.
    TraceError
        Files are damaged, too many lines are bad, or the trace is empty.
    DataError
        The store of the trace or of the dataset cannot be reached or broke off.
    """
    alone = None
    if config.trace == "series" and not in_store(source_folder) and source_folder.is_file():
        source_folder, alone = source_folder.parent, source_folder.name
    check_folder(source_folder)
    out = out.resolve()
    if not out.name:
        raise ConfigError(f"{out}: no place for a dataset; name a folder in it")
    with reached(source_folder):
        source = _source(source_folder, config, alone)
        files = _files(source_folder, source)
    made = _made_as(out)
    staging, retired = partial_of(made), retired_of(made)
    buckets = config.buckets or plan_buckets(files)

    def there() -> IngestReport:
        paths = [file for _, file in files]
        dataset = check_there(out, source_folder, source, buckets, paths, skip_damaged=config.skip_damaged)
        return IngestReport(dataset, already_there=True, findings=source.findings)

    if _is_taken(out) and not staging.exists() and not retired.exists():
        return there()
    busy = ConfigError(f"{out}: another ingest is writing it; wait for it or choose another folder")
    with locked(staging / LOCK, busy):
        shutil.rmtree(retired, ignore_errors=True)
        if not _is_taken(out):
            if in_store(out):
                with marked(out):  # a bucket that cannot be written to is found before the trace is read
                    pass
            try:
                return _make(source_folder, out, staging, source, files, buckets, config)
            except SchemaError as error:
                if f"{config.mapping}{PUBLISHED}" not in shipped_mappings():
                    raise
                published = f"--mapping {config.mapping}{PUBLISHED} reads the files as they are published"
                raise SchemaError(f"{error}; {published}") from error
            finally:
                release()
        report = there()
        if in_store(out):
            remove_mark(out)
        discard_folder(staging, retired)  # left by a run killed after its last rename
        return report


def _made_as(out: Path) -> Path:
    """Return the folder of this machine next to which a dataset is made: its own, or one in the cache."""
    return home_of(out) / "dataset" if in_store(out) else out


def _is_taken(out: Path) -> bool:
    """Return whether the dataset's place holds anything besides what a killed run left in a store."""
    return is_taken(out, MANIFEST) if in_store(out) else out.exists()


def _files(source_folder: Path, source: Source) -> list[tuple[RawTable, Path]]:
    """Return the files of a trace with their tables; refuse a folder that has none, or unfinished ones."""
    by_table = [(table, find_files(source_folder, table)) for table in source.tables]
    absent = [table for table, found in by_table if not found]
    if len(absent) == len(by_table) or (absent and source.trace == "series"):  # a mapping names its own files
        patterns = list(dict.fromkeys(pattern for table in absent for pattern in table.patterns))
        there = [path.name for path in sorted(source_folder.iterdir())]
        raise TraceError(
            f"{source_folder}: no files of a {source.trace} trace (looked for {_first(patterns)}; there is "
            f"{_first(there) or 'nothing'}); pass their folder, or name their format by --trace"
        )
    partial = (f"{pattern}.partial" for table in source.tables for pattern in table.patterns)
    unfinished = sorted(path for pattern in partial for path in source_folder.glob(pattern) if path.is_file())
    if unfinished and source.trace != "recorded":  # a service writes those, or was killed: it has the rows still
        raise ConfigError(f"{unfinished[0]}: an unfinished download; finish it (`reclaim fetch` goes on) or remove it")
    files = [(table, file) for table, found in by_table for file in found]
    if odd := [name for _, file in files if not _is_utf_8(name := str(file.relative_to(source_folder)))]:
        raise ConfigError(f"{source_folder}: the name of {odd[0]!a} is not UTF-8; rename it")
    other = [file for _, file in files if source.trace == "series" and not file.name.endswith(ENDINGS)]
    if other:
        raise ConfigError(
            f"{other[0]}: a file of a series ends in .parquet, .csv or .csv.gz; rename it, or name others with 'files' "
            "in the mapping"
        )
    return files


def _is_utf_8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first(names: list[str], n: int = 6) -> str:
    """Return the first names as text, with the number of further ones."""
    more = f" and {len(names) - n} more" if len(names) > n else ""
    return ", ".join(names[:n]) + more


def _make(
    source_folder: Path,
    out: Path,
    staging: Path,
    source: Source,
    files: list[tuple[RawTable, Path]],
    buckets: int,
    config: IngestConfig,
) -> IngestReport:
    staged = staged_schema(source)
    sizes = {file: file.stat().st_size for _, file in files}
    total = sum(sizes.values())
    workers, memory_mib = plan_workers(config.engine, config.workers, config.memory_limit_mib, total)
    with Workers(config.engine, workers, total, preload="reclaim.data.ingest.preload") as pool:
        order = sorted(files, key=lambda entry: (-sizes[entry[1]], entry[0].key, entry[1]))  # the longest first
        shard_jobs = [
            ShardJob(
                table, staged, str(source_folder.resolve()), file.relative_to(source_folder).as_posix(),
                str(staging / "shards"),
                buckets, min(workers, max(1, round(workers * sizes[file] / max(total, 1)))), memory_mib,
                config.max_reject_share,
            )
            for table, file in order
        ]  # fmt: skip
        taken = _run(pool, take_shard, shard_jobs, [sizes[file] for _, file in order], "reading", "B")
        shards, damaged = _whole_and_damaged(taken, config)
        rejects = _check_rejects(shards, staging, config, memory_mib)
        distinct, repeated = _told_apart(shards, source)
        finished = staging / "dataset"
        fingerprint = fingerprint_of(source, buckets, {shard.file: shard.sha256 for shard in shards})
        bucket_jobs = [
            BucketJob(
                bucket, f"{fingerprint} {FORM}", distinct, source, staged, str(finished), str(staging), memory_mib
            )
            for bucket in range(buckets)
        ]
        made = _run(pool, make_bucket, bucket_jobs, [1] * buckets, "sorting", "bucket")
        rest = tables_of(source)
        table_jobs = [
            TableJob(name, distinct, source, buckets, str(finished), str(staging), memory_mib) for name in rest
        ]
        lengths = _run(pool, make_table, table_jobs, [1] * len(rest), "listing", "table")
        counts = {key: sum(part[key] for part in made) for key in made[0]} | dict(zip(rest, lengths, strict=True))
    if not any(counts.values()):
        raise TraceError(f"{source_folder}: not one row in {_first(sorted({x.file for x in shards}))}")
    not_read = _not_read(source_folder, source, {file for _, file in files})
    defects = {name: counts.pop(name) for name in DEFECTS}
    warnings = warnings_of(defects, counts["usage"], mapped=config.mapping is not None)
    for name in LEGITIMATE:
        del defects[name]
    manifest = manifest_of(
        source_folder, source, shards, repeated, damaged, counts, defects, warnings, rejects, not_read, buckets
    )
    _remove_others(finished, buckets, rest)
    write_json(finished / MANIFEST, manifest)
    if in_store(out):
        with marked(out):
            publish_folder(finished, out, MANIFEST)
    else:
        os.replace(finished, out)
    discard_folder(staging, retired_of(_made_as(out)))
    log.info("%s: %d windows of %d tasks", out, counts["usage"], counts["tasks"])
    return IngestReport(Dataset.open(out), already_there=False, findings=source.findings)


def _whole_and_damaged(
    taken: Sequence[Shard | Damaged], config: IngestConfig
) -> tuple[list[Shard], list[tuple[str, str]]]:
    """Return the shards in the order of readings and files, and each damaged file with the reason.

    Raises
    ------
    TraceError
        A file is damaged, and ``config`` does not skip those.
    """
    damaged = sorted({x.file: x.reason for x in taken if isinstance(x, Damaged)}.items())
    if damaged and not config.skip_damaged:
        first = "; ".join(message for _, message in damaged[:5])
        raise TraceError(
            f"{len(damaged)} damaged file{'s' * (len(damaged) > 1)}: {first}"
            f"{'; …' * (len(damaged) > 5)}. Replace and run again (what was read is kept), or pass --skip-damaged"
        )
    return sorted((x for x in taken if isinstance(x, Shard)), key=lambda x: (x.reading, x.file)), damaged


def _told_apart(shards: Sequence[Shard], source: Source) -> tuple[tuple[Shard, ...], list[str]]:
    """Return the first shard of each content, and the names of the files that repeat rows of one."""
    named = {table.key for table in source.tables if table.file_column is not None}  # a name makes another task of it
    whose = [(x.reading, x.sha256, x.file if x.reading in named else "") for x in shards]
    firsts = {of: x for of, x in zip(reversed(whose), reversed(shards), strict=True)}
    distinct = tuple(x for of, x in zip(whose, shards, strict=True) if firsts[of] is x)
    others = (x.file for of, x in zip(whose, shards, strict=True) if firsts[of] is not x and x.rows)
    return distinct, list(dict.fromkeys(others))


def _not_read(source_folder: Path, source: Source, matched: set[Path]) -> list[str]:
    """Return the names of other files that lie in the folder of the source, or next to a file of it."""
    return sorted(
        str(file.relative_to(source_folder))
        for folder in {source_folder, *(file.parent for file in matched)}
        for file in folder.iterdir()
        if source.alone is None and file.is_file() and file not in matched and file.name not in _COMPANIONS
    )


def _remove_others(folder: Path, buckets: int, tables: tuple[str, ...]) -> None:
    """Remove from a new dataset what a run with other options left there when it was killed."""
    own = {folder / f"{name}.parquet" for name in tables} | {folder / "rejects" / REJECTS}
    own |= {folder / name / bucket_name(bucket) for name in s.BUCKETED for bucket in range(buckets)}
    for path in folder.rglob("*"):
        if path.is_file() and path not in own:
            path.unlink()


def _run(
    pool: Workers, function: Callable[[Job], Result], jobs: list[Job], sizes: list[int], what: str, unit: str
) -> list[Result]:
    """Return the function's result for every job; show a progress bar that moves by the jobs' sizes."""
    with tqdm(total=sum(sizes), desc=what, unit=unit, unit_scale=unit == "B", disable=None, leave=False) as bar:
        return pool.run(function, jobs, lambda place: bar.update(sizes[place]))


def plan_buckets(files: list[tuple[RawTable, Path]]) -> int:
    """Return the number of buckets for a trace: as many as keep a bucket small enough to be sorted in memory.

    It depends on the files' sizes alone, so the same trace gives the same dataset on every machine.
    """
    rows = sum(
        file.stat().st_size / next(size for ending, size in _BYTES_PER_ROW.items() if file.name.endswith(ending))
        for table, file in files
        if not table.repeated and table.name not in s.OPTIONAL
    )
    return min(max(round(rows / _ROWS_PER_BUCKET), _FEWEST_BUCKETS), _MOST_BUCKETS)


def _source(source_folder: Path, config: IngestConfig, alone: str | None) -> Source:
    match config.trace:
        case "google-v3":
            return google_v3()
        case "google-v2.1":
            return google_v2(source_folder)
        case "alibaba-2017":
            return alibaba_2017(source_folder)
        case "kubernetes":
            if in_store(source_folder):
                raise ConfigError(f"{source_folder}: a history gets tables in its own folder; copy it to this machine")
            from reclaim.data.traces.kubernetes.source import kubernetes  # its compiled code delays every other trace

            return kubernetes(source_folder, anonymous=config.anonymise)
        case "recorded":
            return recorded()
        case _:
            return series(load_mapping(config.mapping or ""), alone)


def _check_rejects(shards: list[Shard], staging: Path, config: IngestConfig, memory_mib: int) -> dict[str, int]:
    """Write the rejected lines of all shards, in order, and return their reasons; TraceError if there are too many.

    A file may be read for several tables: its lines and its bad lines count once.
    """
    out = staging / "dataset" / "rejects" / REJECTS
    out.parent.mkdir(parents=True, exist_ok=True)
    found = [file_sql(Path(x.folder) / REJECTS) for x in shards if x.rejects]
    with (
        closing(connect(memory_mib, staging / "spill")) as connection,
        pq.ParquetWriter(out, s.REJECTS) as writer,
    ):
        if found:
            rows = connection.sql(
                f"SELECT {s.REJECT_FILE}, {s.REJECT_LINE}, min({s.REJECT_REASON}) AS {s.REJECT_REASON} "
                f"FROM read_parquet([{', '.join(found)}], hive_partitioning = false) GROUP BY 1, 2 ORDER BY 1, 2"
            )
            for batch in rows.to_arrow_reader(_REJECTS_AT_ONCE):
                writer.write_table(pa.table(batch).cast(s.REJECTS))
        writer.close()
        kept = f"FROM read_parquet({file_sql(out)}, hive_partitioning = false)"
        reasons = dict(connection.execute(
            f"SELECT {s.REJECT_REASON}, count(*) {kept} GROUP BY 1 ORDER BY 2 DESC, 1"
        ).fetchall())  # fmt: skip
        read: dict[str, int] = {}
        for shard in shards:
            read[shard.file] = max(read.get(shard.file, 0), shard.rows + shard.rejects)
        lines, bad = sum(read.values()), sum(reasons.values())
        if bad <= config.max_reject_share * lines:
            return reasons
        listed = staging / "rejects.csv"
        connection.execute(f"COPY (SELECT * {kept}) TO {literal(str(listed))} (FORMAT csv, HEADER)")
        first = connection.execute(f"SELECT {s.REJECT_FILE}, {s.REJECT_LINE} {kept} ORDER BY 1, 2 LIMIT 1").fetchone()
    file, line = first or ("", 0)
    most = ", ".join(f"{reason} ({count})" for reason, count in [*reasons.items()][:4])
    remedies = [remedy for end, remedy in _REMEDIES.items() if any(reason.endswith(end) for reason in reasons)]
    remedy = "".join(f"; {one}" for one in remedies if config.trace == "series")
    raise TraceError(
        f"{bad} of {lines} lines rejected, more than --max-reject-share={config.max_reject_share:g}: "
        f"{most}; first {file} line {line}; all in {listed}{remedy}"
    )
