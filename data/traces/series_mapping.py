"""Reads the mapping of a plain series: a small TOML file that says which column is which.

::

    task = "vm"              # column that names the task; any name but an integer is hashed to 63 bits
    collection = "service"   # optional: column that names the collection; without it, each task has one of its own
    time = "time_s"          # column with the window's start; or columns and their seconds, which are added up:
                             # { day = 86400, slot = 300 }
    time_unit = "s"          # s | ms | us | iso (dates by ISO 8601, and timestamps of parquet); left out, or s, where
                             # times are added up
    window_s = 300           # length of a window
    tier = "prod"            # optional: tier of all tasks; or the column that has it, and the tiers of its words:
                             # { column = "class", gold = "prod", batch = "free" }
    machine = "node"         # optional: column that names the task's machine, as a task; or machine_id under [columns],
                             # integers alone
    files = ["*.parquet"]    # optional globs below the source folder; default *.parquet, *.csv, *.csv.gz
    file_column = "vm"       # optional: name of a column that has the file's name, without folder and ending
    header = ["time_s", "vm", "used"]  # optional: all columns, in their order, of CSV files without a header line

    [columns]                # canonical column = raw column, or a number that holds for every row
    cpu_mean = "cpu_used_mhz"
    cpu_limit = 100.0 # optional: a series without limits can be inspected, but not trained on
    scheduled_us = "started" # optional: start of the task's current run, in the unit of the time
    cpu_percentiles = "cpu_deciles"  # optional: a column of lists, or a list of eleven columns

    [machines]               # optional: capacities, by which a closed loop can place tasks
    cpu_capacity = 64.0      # of every machine that a window names
    memory_capacity = 256e9
                             # or, with a file that has one row per machine, its columns, or numbers:
    file = "nodes.csv"       # a glob below the source folder
    machine = "name"         # column that names the machine
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, Final

from reclaim.data import schema as s
from reclaim.data.core.prose import kind_in_words
from reclaim.data.errors import ConfigError

TIME_UNITS_US: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
"""Microseconds in each unit of time that a mapping may name."""
ISO: Final = "iso"
"""The ``time_unit`` of dates and timestamps, which have none."""
VECTORS: Final = {s.CPU_PERCENTILES: s.PERCENTILES, s.CPU_TAIL_PERCENTILES: s.TAIL_PERCENTILES}
"""Columns of percentiles, and the levels of their values."""
MAPPED: Final = (
    s.CPU_MEAN, s.CPU_MAX, s.MEMORY_MEAN, s.MEMORY_MAX, s.PAGE_CACHE, s.CPI, s.MAI, s.CPU_LIMIT, s.MEMORY_LIMIT,
    s.PRIORITY, s.SCHEDULING_CLASS, s.MACHINE_ID, s.SCHEDULED_US, *VECTORS,
)  # fmt: skip
"""Canonical columns that a mapping may name."""
_LARGEST: Final = {s.MACHINE_ID: 2**63 - 1, s.PRIORITY: 2**31 - 1, s.SCHEDULING_CLASS: 2**7 - 1}
"""Columns that are integers, and the largest that each can hold."""
WORDS_OF: Final = "column"
"""The key of a table ``tier`` that names its column; all others are words of that column."""
PUBLISHED: Final = "-csv"
"""End of the name of a shipped mapping of a trace as it is published; that without it reads a cut of it in parquet."""
CAPACITIES: Final = (s.CPU_CAPACITY, s.MEMORY_CAPACITY)
_OF_MACHINES: Final = ("file", "machine", *CAPACITIES)
ENDINGS: Final = (".parquet", ".csv", ".csv.gz")
"""Endings of the files of a series."""
_UNITS: Final = (*TIME_UNITS_US, ISO)
_REQUIRED: Final = (s.CPU_MEAN,)
_KEYS: Final[dict[str, tuple[type, ...]]] = {
    "task": (str,), "collection": (str,), "time": (str, dict), "time_unit": (str,), "window_s": (int,),
    "columns": (dict,), "files": (list,), "tier": (str, dict),
    "machine": (str,), "machines": (dict,), "file_column": (str,), "header": (list,),
}  # fmt: skip
_OPTIONAL: Final = ("collection", "files", "tier", "machine", "machines", "file_column", "header")
_EXAMPLES: Final = {
    "task": 'task = "vm", the column that names the task', "time": 'time = "start", the column of the window\'s start',
    "time_unit": f'time_unit = "s", or ms, us or {ISO}',
    "window_s": "window_s = 300, the length of a window in seconds",
    "columns": 'a table [columns], with cpu_mean = "used" and cpu_limit = 1.0',
}  # fmt: skip
"""Lines to add to a mapping that lacks a key."""


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
        ``s``, ``ms``, ``us`` or ``iso``.
    window_s : int
        Length of a window, in seconds.
    columns : dict of str to (str or float or list of str)
        Canonical column → raw column or constant; of percentiles, raw columns.
    files : tuple of str
        Globs of the files to read.
    text : str
        The file itself, for the manifest.
    collection : str or None
        Raw column of the name of the task's collection.
    tier : str or dict of str to str or None
        Tier of all tasks; or the raw column that has it, as ``WORDS_OF``, and the tiers of its words. Without words,
        they are the tiers' names.
    machine : str or None
        Raw column of the name of the task's machine.
    machines : dict of str to (str or float)
        Facts of machines: ``file`` and its column ``machine``, or neither; raw columns or constants of
        ``CAPACITIES``. Empty: nothing.
    file_column : str or None
        Name of a column that has the name of the file.
    header : tuple of str
        Columns of CSV files without a header line. Empty: they have one.
    """

    task: str
    time: str | dict[str, float]
    time_unit: str
    window_s: int
    columns: dict[str, str | float | list[str]]
    files: tuple[str, ...]
    text: str
    collection: str | None = None
    tier: str | dict[str, str] | None = None
    machine: str | None = None
    machines: dict[str, str | float] = field(default_factory=dict)
    file_column: str | None = None
    header: tuple[str, ...] = ()


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
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"mapping {name_or_path}: not UTF-8 ({error})") from error
    elif str(name_or_path) in shipped_mappings():
        text = (resources.files("reclaim.data.traces") / "mappings" / f"{name_or_path}.toml").read_text(
            encoding="utf-8"
        )
    else:
        raise ConfigError(f"mapping {name_or_path}: no such file; shipped are {', '.join(shipped_mappings())}")
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"mapping {name_or_path}: not valid TOML: {error}") from error
    problems = _problems(raw)
    if problems:
        raise ConfigError(f"mapping {name_or_path}: {'; '.join(problems)}")
    files = tuple(raw.get("files", ("*.parquet", "*.csv", "*.csv.gz")))
    header = tuple(raw.get("header", ()))
    return SeriesMapping(**{"time_unit": "s", **raw, "files": files, "header": header, "text": text})


def _problems(raw: dict[str, Any]) -> list[str]:
    """Return the faults of a mapping."""
    optional = (*_OPTIONAL, *(("time_unit",) if isinstance(raw.get("time"), dict) else ()))
    problems = [f"unknown key {key!r}" for key in sorted(raw.keys() - _KEYS.keys())]
    problems += [f"missing key {key!r} ({_EXAMPLES[key]})" for key in _KEYS if key not in raw and key not in optional]
    right = {key: raw[key] for key in _KEYS if key in raw and isinstance(raw[key], _KEYS[key])}
    right = {key: value for key, value in right.items() if not isinstance(value, bool)}
    problems += [
        f"{key!r} must be {' or '.join(map(kind_in_words, kinds))}"
        for key, kinds in _KEYS.items()
        if key in raw and key not in right
    ]
    time, unit = right.get("time"), right.get("time_unit", "s")
    if unit not in _UNITS:
        problems.append(f"time_unit must be one of {', '.join(_UNITS)}, got {unit!r}")
    if isinstance(time, dict):
        if not time:
            problems.append("time names no column")
        if unit in _UNITS and unit != "s":
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
    header = right.get("header", ["one"])
    if not header or not all(isinstance(name, str) for name in header) or len(set(header)) < len(header):
        problems.append(f"header must name each column once, got {header!r}")
    if "tier" in right:
        problems += _problems_of_tier(right["tier"])
    in_windows = [key for key in ("machine",) if key in right]
    in_windows += [f"columns.{c}" for c in (s.MACHINE_ID,) if c in right.get("columns", {})]
    if len(in_windows) > 1:
        problems.append(f"{' and '.join(in_windows)} both name the machine: keep one")
    if "machines" in right:
        of_windows = "machine" in right or isinstance(right.get("columns", {}).get(s.MACHINE_ID), str)
        problems += _problems_of_machines(right["machines"], of_windows=of_windows)
    problems += _problems_of_times(right)
    if "columns" in right:
        columns = right["columns"]
        unknown = sorted(columns.keys() - set(MAPPED))
        problems += [f"unknown canonical column {c!r} (known: {', '.join(MAPPED)})" for c in unknown]
        problems += [f"key {c!r} belongs above [columns]" for c in unknown if c in _KEYS]
        problems += [f"columns.{c} is required" for c in _REQUIRED if c not in columns]
        problems += [
            f"columns.{c} must be {_kind_of(c)}, got {v!r}" for c, v in columns.items() if not _is_of_kind(c, v)
        ]
    return problems


def _problems_of_times(right: dict[str, Any]) -> list[str]:
    """Return the times in numbers whose column is a text, too: one column is read as one type."""
    time, tier = right.get("time", ()), right.get("tier")
    times = [*([time] if isinstance(time, str) else time), right.get("columns", {}).get(s.SCHEDULED_US)]
    texts = [right.get(key) for key in ("task", "collection", "machine")]
    texts += [tier.get(WORDS_OF)] if isinstance(tier, dict) else []
    return [
        f"{column!r} is a time, and the name of a task, collection, machine or tier as well: name two columns"
        for column in times
        if isinstance(column, str) and column in texts and right.get("time_unit") != ISO
    ]


def _problems_of_tier(tier: str | dict[str, Any]) -> list[str]:
    tiers = f"one of {', '.join(s.TIERS)}"
    if isinstance(tier, str):
        remedy = f'a column that has it is {{ {WORDS_OF} = "{tier}" }}'
        return [] if tier in s.TIERS else [f"tier must be {tiers}, got {tier!r} ({remedy})"]
    problems = [] if isinstance(tier.get(WORDS_OF), str) else [f"tier.{WORDS_OF} must name a column"]
    words = {word: own for word, own in tier.items() if word != WORDS_OF}
    return problems + [f"tier.{word} must be {tiers}, got {own!r}" for word, own in words.items() if own not in s.TIERS]


def _problems_of_machines(machines: dict[str, Any], *, of_windows: bool) -> list[str]:
    known = ", ".join(_OF_MACHINES)
    problems = [f"unknown key 'machines.{key}' (known: {known})" for key in sorted(machines.keys() - {*_OF_MACHINES})]
    file = machines.get("file")
    if "file" in machines:
        if not isinstance(file, str) or not _is_below(file) or not file.endswith(ENDINGS):
            problems.append(
                "machines.file must be a glob below the source folder that ends in "
                f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, got {file!r}"
            )
        if not isinstance(machines.get("machine"), str):
            problems.append("machines.machine must name the column of machines.file that names the machine")
    elif "machine" in machines:
        problems.append("machines.machine is a column of machines.file, which is missing")
    elif not of_windows:
        problems.append("machines without a file are those of the windows: name their column with 'machine'")
    for name in CAPACITIES:
        value = machines.get(name)
        if not ((_is_number(value) and value) or ("file" in machines and isinstance(value, str))):
            column = "a column of machines.file or " if "file" in machines else ""
            problems.append(f"machines.{name} must be {column}a finite number above 0, got {value!r}")
    return problems


def _kind_of(column: str) -> str:
    """Return what a mapping may give a canonical column."""
    if column in VECTORS:
        first, second, *_, last = VECTORS[column]
        return f"a column of lists, or {len(VECTORS[column])} columns of the percentiles {first}, {second} … {last}"
    if column in _LARGEST:
        return f"a column name or a whole number from 0 to {_LARGEST[column]}"
    return "a column name" if column == s.SCHEDULED_US else "a column name or a finite number of at least 0"


def _is_of_kind(column: str, value: object) -> bool:
    if column in VECTORS and isinstance(value, list):
        return len(value) == len(VECTORS[column]) and all(isinstance(name, str) for name in value)
    if column in _LARGEST and isinstance(value, int | float):
        return _is_number(value) and value == int(value) <= _LARGEST[column]
    return isinstance(value, str) or (column not in (s.SCHEDULED_US, *VECTORS) and _is_number(value))


def _is_below(glob: str) -> bool:
    """Return whether a glob is not empty and stays below its folder."""
    path = PurePath(glob)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
