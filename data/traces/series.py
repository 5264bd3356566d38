"""Reads a plain series, one row per (task, window), in CSV or parquet, with a small TOML that maps its columns.

::

    task = "vm"              # column that names the task; any name but an integer is hashed to 63 bits
    collection = "service"   # optional: column that names the collection; without it, each task has one of its own
    time = "time_s"          # column with the window's start; or columns and their seconds, which are added up:
                             # { day = 86400, slot = 300 }
    time_unit = "s"          # s | ms | us; left out, or s, where times are added up
    window_s = 300           # length of a window
    files = ["*.parquet"]    # optional globs below the source folder; default *.parquet, *.csv, *.csv.gz

    [columns]                # canonical column = raw column, or a number that holds for every row
    cpu_mean = "cpu_used_mhz"
    cpu_limit = 100.0        # optional: without limits a series can be looked at, and nothing be learned from it
"""

from __future__ import annotations

import glob
import math
import re
import tomllib
from dataclasses import dataclass
from hashlib import md5
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, Final

from reclaim.data import schema as s
from reclaim.data.core.duck import INTEGERS, fits_sql, mismatch, quoted
from reclaim.data.errors import ConfigError
from reclaim.data.traces.source import RawTable, Source, tier_sql

TIME_UNITS_US: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
"""Microseconds in each unit of time a mapping may name."""
_MAPPED: Final = (
    s.CPU_MEAN, s.CPU_MAX, s.MEMORY_MEAN, s.MEMORY_MAX, s.PAGE_CACHE, s.CPI, s.MAI, s.CPU_LIMIT, s.MEMORY_LIMIT,
    s.PRIORITY, s.SCHEDULING_CLASS, s.MACHINE_ID,
)  # fmt: skip
_REQUIRED: Final = (s.CPU_MEAN,)
_KEYS: Final[dict[str, tuple[type, ...]]] = {
    "task": (str,), "collection": (str,), "time": (str, dict), "time_unit": (str,), "window_s": (int,),
    "columns": (dict,), "files": (list,),
}  # fmt: skip
_OPTIONAL: Final = ("collection", "files")
_INTEGERS: Final = {s.MACHINE_ID: "BIGINT", s.PRIORITY: "INTEGER", s.SCHEDULING_CLASS: "TINYINT"}
"""Mapped columns that are not measurements: read as integers, because a double cannot hold a large one exactly."""
NO_LIMIT: Final = (
    "no limit: the mapping names no cpu_limit; the series can be looked at, and nothing be learned from it"
)
"""Note in the manifest of such a dataset."""


@dataclass(frozen=True)
class SeriesMapping:
    """The mapping file, checked.

    Attributes
    ----------
    task : str
        Raw column of the task's name.
    time : str or dict of str to float
        Raw column of the window's start, or raw columns and the seconds of one of each, which add up to it.
    time_unit : str
        ``s``, ``ms`` or ``us``.
    window_s : int
        Length of a window, in seconds.
    columns : dict of str to (str or float)
        Canonical column → raw column or constant.
    files : tuple of str
        Globs of the files to read.
    text : str
        The file itself, for the manifest.
    collection : str or None
        Raw column of the name of what the task is one of.
    """

    task: str
    time: str | dict[str, float]
    time_unit: str
    window_s: int
    columns: dict[str, str | float]
    files: tuple[str, ...]
    text: str
    collection: str | None = None


def shipped_mappings() -> list[str]:
    """Return the names of the mappings that come with the package."""
    folder = resources.files("reclaim.data.traces") / "mappings"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_mapping(name_or_path: str | Path) -> SeriesMapping:
    """Read a mapping: the name of a shipped one, or a file.

    Raises
    ------
    ConfigError
        No such mapping, or it is no UTF-8 or TOML, or a key, unit, column or glob in it is wrong or missing; names all.
    """
    path = Path(name_or_path)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"mapping {name_or_path}: not UTF-8 ({error})") from error
    elif str(name_or_path) in shipped_mappings():
        text = (resources.files("reclaim.data.traces") / "mappings" / f"{name_or_path}.toml").read_text()
    else:
        raise ConfigError(f"mapping {name_or_path}: no such file, and shipped are only {', '.join(shipped_mappings())}")
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"mapping {name_or_path}: not valid TOML: {error}") from error
    problems = _problems(raw)
    if problems:
        raise ConfigError(f"mapping {name_or_path}: {'; '.join(problems)}")
    files = tuple(raw.get("files", ("*.parquet", "*.csv", "*.csv.gz")))
    return SeriesMapping(**{"time_unit": "s", **raw, "files": files, "text": text})


def _problems(raw: dict[str, Any]) -> list[str]:
    """Return the faults of a mapping."""
    optional = (*_OPTIONAL, *(("time_unit",) if isinstance(raw.get("time"), dict) else ()))
    problems = [f"unknown key {key!r}" for key in sorted(raw.keys() - _KEYS.keys())]
    problems += [f"missing key {key!r}" for key in _KEYS if key not in raw and key not in optional]
    right = {key: raw[key] for key in _KEYS if key in raw and isinstance(raw[key], _KEYS[key])}
    right = {key: value for key, value in right.items() if not isinstance(value, bool)}
    problems += [
        f"{key!r} must be {' or '.join(kind.__name__ for kind in kinds)}"
        for key, kinds in _KEYS.items()
        if key in raw and key not in right
    ]
    time, unit = right.get("time"), right.get("time_unit", "s")
    if unit not in TIME_UNITS_US:
        problems.append(f"time_unit must be one of {', '.join(TIME_UNITS_US)}, got {unit!r}")
    if isinstance(time, dict):
        if not time:
            problems.append("time names no column")
        if unit in TIME_UNITS_US and unit != "s":
            problems.append(f"time_unit must be s where time is columns and their seconds, got {unit!r}")
        problems += [f"time.{c} must be a number of seconds above 0, got {v!r}"
                     for c, v in time.items() if not _is_number(v) or v == 0]  # fmt: skip
    if right.get("window_s", 1) <= 0:
        problems.append(f"window_s must be above 0, got {right['window_s']}")
    globs = right.get("files", [])
    if not all(isinstance(glob, str) for glob in globs):
        problems.append(f"files must be globs, got {globs!r}")
    else:
        problems += [f"files must be globs below the source folder, got {g!r}" for g in globs if not _is_below(g)]
    if "columns" in right:
        columns = right["columns"]
        unknown = sorted(columns.keys() - set(_MAPPED))
        problems += [f"unknown canonical column {c!r} (known: {', '.join(_MAPPED)})" for c in unknown]
        problems += [f"columns.{c} is required" for c in _REQUIRED if c not in columns]
        problems += [
            f"columns.{c} must be a column name or a finite number of at least 0, got {v!r}"
            for c, v in columns.items()
            if not isinstance(v, str) and not _is_number(v)
        ]
    return problems


def _is_below(glob: str) -> bool:
    """Return whether a glob is not empty and stays below its folder."""
    path = PurePath(glob)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def task_id(name: str | int) -> int:
    """Return the id under which a dataset keeps a task, or a collection, of a series.

    Parameters
    ----------
    name : str or int
        The value in the mapping's column ``task`` or ``collection``.

    Returns
    -------
    int
        An integer stays. Any other name is hashed to 63 bits.

    Examples
    --------
    >>> import reclaim
    >>> reclaim.task_id("web-1")
    5236600923734212203
    >>> reclaim.task_id("17")
    17
    """
    text = str(name)
    low, high = INTEGERS["BIGINT"]
    if re.fullmatch("0|-?[1-9][0-9]{0,18}", text) and low <= int(text) <= high:
        return int(text)
    return int.from_bytes(md5(text.encode(), usedforsecurity=False).digest()[8:], "little") & 2**63 - 1


def _id_sql(column: str) -> str:
    """Return SQL for ``task_id`` of a column."""
    # md5 is the same on every machine and version, unlike the engine's own hash
    return (
        f"CASE WHEN {fits_sql(column, 'BIGINT')} THEN TRY_CAST({column} AS BIGINT) "
        f"ELSE CAST(md5_number_lower({column}) & {2**63 - 1}::UBIGINT AS BIGINT) END"
    )


def _names_sql(collection_id: str, instance_index: str, workload: str, task: str) -> str:
    """Return SQL of a row of names."""
    known = {s.COLLECTION_ID: collection_id, s.INSTANCE_INDEX: instance_index, s.WORKLOAD: workload, s.POD: task}
    return ", ".join(f"{known.get(name, 'CAST(NULL AS VARCHAR)')} AS {name}" for name in s.NAMES.names)


def series(mapping: SeriesMapping, alone: str | None = None) -> Source:
    """Return the source that a mapping describes; of all files that it names, or of one alone.

    Raises
    ------
    ConfigError
        The one file is neither CSV nor parquet, by its name.
    """
    if alone is not None and not alone.endswith((".parquet", ".csv", ".csv.gz")):
        raise ConfigError(f"{alone}: a file of a series ends in .parquet, .csv or .csv.gz")
    patterns = mapping.files if alone is None else (glob.escape(alone),)
    types = {raw: _INTEGERS.get(c, "DOUBLE") for c, raw in mapping.columns.items() if isinstance(raw, str)}
    parts: dict[str, float] = {mapping.time: 1} if isinstance(mapping.time, str) else mapping.time
    names = [mapping.task] if mapping.collection is None else [mapping.collection, mapping.task]
    types |= dict.fromkeys(parts, "DOUBLE") | dict.fromkeys(names, "VARCHAR")
    ids = [*(_id_sql(quoted(name)) for name in names), "CAST(0 AS BIGINT)"]  # without a collection the index is 0
    time = "(" + " + ".join(f"{quoted(part)} * {weight!r}" for part, weight in parts.items()) + ")"
    unit_us, window_us = TIME_UNITS_US[mapping.time_unit], mapping.window_s * 1_000_000
    last = (s.LATEST_US - window_us) // unit_us
    start = f"CAST(CASE WHEN {time} BETWEEN 0 AND {last} THEN round({time} * {unit_us}) END AS BIGINT)"

    def value(column: str, type_: str) -> str:
        raw = mapping.columns.get(column)
        expression = "NULL" if raw is None else quoted(raw) if isinstance(raw, str) else repr(float(raw))
        return f"TRY_CAST({expression} AS {type_})"

    numbers = [column for column in _MAPPED if column not in _INTEGERS]
    select = f"""
        {ids[0]} AS {s.COLLECTION_ID}, {ids[1]} AS {s.INSTANCE_INDEX},
        {start} AS {s.START_US}, {start} + {window_us} AS {s.END_US},
        {value(s.MACHINE_ID, "BIGINT")} AS {s.MACHINE_ID}, CAST(0 AS TINYINT) AS {s.COLLECTION_TYPE},
        CAST(NULL AS BIGINT) AS {s.ALLOC_COLLECTION_ID}, CAST(NULL AS BIGINT) AS {s.ALLOC_INSTANCE_INDEX},
        CAST(NULL AS DOUBLE) AS {s.CPU_SAMPLE}, CAST(NULL AS FLOAT[]) AS {s.CPU_PERCENTILES},
        CAST(NULL AS FLOAT[]) AS {s.CPU_TAIL_PERCENTILES}, CAST(NULL AS DOUBLE) AS {s.MEMORY_ASSIGNED},
        CAST(NULL AS DOUBLE) AS {s.SAMPLE_RATE_HZ}, {value(s.PRIORITY, "INTEGER")} AS {s.PRIORITY},
        {tier_sql(value(s.PRIORITY, "INTEGER"))} AS {s.TIER},
        {value(s.SCHEDULING_CLASS, "TINYINT")} AS {s.SCHEDULING_CLASS},
        {", ".join(f"{value(c, 'DOUBLE')} AS {c}" for c in numbers)}
    """
    checks = {
        **{f"{name} is missing": f"{quoted(name)} IS NOT NULL" for name in names},
        **{f"{c} is missing or negative": f"{quoted(c)} IS NOT NULL AND {quoted(c)} >= 0" for c in parts},
        f"{' + '.join(parts)} is past the last time there can be": f"{time} <= {last}",
    }
    for column, raw in mapping.columns.items():
        if isinstance(raw, str):
            type_ = _INTEGERS.get(column, "DOUBLE")
            if raw in names:  # read as text, because it names the task as well
                checks[mismatch(raw, type_)] = fits_sql(quoted(raw), type_)
            finite = "true" if column in _INTEGERS else f"isfinite({value(column, type_)})"
            checks[f"{raw} is negative or not finite"] = f"{value(column, type_)} >= 0 AND {finite}"
        if column in (s.CPU_LIMIT, s.MEMORY_LIMIT):
            checks[f"{raw} must be above 0 to serve as a limit"] = f"{value(column, 'DOUBLE')} > 0"
    table = RawTable(name="usage", patterns=patterns, columns=types, select=select, checks=checks, closed=False)
    named = RawTable(
        name="names",
        patterns=patterns,
        columns=dict.fromkeys(names, "VARCHAR"),
        select=_names_sql(ids[0], ids[1], quoted(names[0]), quoted(names[-1])),
        where=" OR ".join(f"NOT ({fits_sql(quoted(name), 'BIGINT')})" for name in names),  # a number names itself
        closed=False,
    )
    given = set(mapping.columns) | {s.COLLECTION_ID, s.INSTANCE_INDEX, s.START_US, s.END_US, s.COLLECTION_TYPE}
    given |= {s.TIER} if s.PRIORITY in mapping.columns else set()
    return Source(
        trace="series",
        tables=(table, named),
        lacks=tuple(name for name in s.USAGE.names if name not in given),
        options={"mapping": mapping.text},
        notes=() if s.CPU_LIMIT in mapping.columns else (NO_LIMIT,),
        alone=alone,
    )
