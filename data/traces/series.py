"""Describes a plain series, one row per (task, window) in CSV or parquet, as a trace: by its mapping."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import md5
from typing import Final

from reclaim.data import schema as s
from reclaim.data.core.duck import INTEGERS, fits_sql, literal, mismatch, quoted
from reclaim.data.errors import ConfigError
from reclaim.data.traces.series_mapping import CAPACITIES, ENDINGS, ISO, TIME_UNITS_US, VECTORS, WORDS_OF, SeriesMapping
from reclaim.data.traces.source import RawTable, Source, tier_sql

_MEASURED: Final = (
    s.CPU_MEAN, s.CPU_MAX, s.MEMORY_MEAN, s.MEMORY_MAX, s.PAGE_CACHE, s.CPI, s.MAI, s.CPU_LIMIT, s.MEMORY_LIMIT,
)  # fmt: skip
_INTEGERS: Final = {s.MACHINE_ID: "BIGINT", s.PRIORITY: "INTEGER", s.SCHEDULING_CLASS: "TINYINT"}
"""Mapped columns that are not measurements: read as integers, because a double cannot hold a large one exactly."""
NO_LIMIT: Final = (
    "no limit: the mapping names no cpu_limit; the series can be looked at, and nothing be learned from it"
)
"""Note in the manifest of such a dataset."""
NOT_ISO: Final = " is not a time by ISO 8601"
"""End of the reason of a reject."""
NO_TIER: Final = " is no word of the mapping's tier"
"""End of the reason of a reject."""
NEGATIVE_ID: Final = " is negative, which the id of a machine is not"
_ISO_FORM: Final = (
    r"\s*(\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?)(?: ?(Z|UTC|[+-](?:0\d|1[0-4])(?::?[0-5]\d)?))?\s*"
)
"""A date with or without a time of the day, its first group; and its zone, the second."""


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


def _iso_us_sql(column: str) -> str:
    """Return SQL of a date by ISO 8601, or of a timestamp as text, in µs since 1970; without a zone it is UTC."""
    local, zone = (f"regexp_extract({column}, {literal(f'^{_ISO_FORM}$')}, {group})" for group in (1, 2))
    # cast at once, the engine would ignore the zone, or take the machine's where there is none
    moment = f"CAST(TRY_CAST({local} AS TIMESTAMP) AS VARCHAR) || coalesce(nullif(nullif({zone}, ''), 'UTC'), 'Z')"
    return f"epoch_us(TRY_CAST({moment} AS TIMESTAMPTZ))"


def _time(columns: dict[str, float], unit: str, last_us: int, missing: str = "") -> tuple[str, dict[str, str]]:
    """Return SQL of a time in µs, null where it is not between 0 and the last there can be; and its checks.

    Parameters
    ----------
    columns : dict of str to float
        Raw columns and their weights, which are added up.
    unit : str
        Their unit.
    last_us : int
        The last time, in µs.
    missing : str
        Beginning of the reason where every row must have them; empty: a null is none.
    """
    past = f"{' + '.join(columns)} is past the last time there can be"
    there = {c: f"{quoted(c)} IS NOT NULL AND " if missing else "" for c in columns}
    if unit == ISO:
        (column,) = columns
        time = _iso_us_sql(quoted(column))
        checks = {f"{column} is missing": f"{quoted(column)} IS NOT NULL"} if missing else {}
        checks[f"{column}{NOT_ISO}"] = f"{quoted(column)} IS NULL OR {time} IS NOT NULL"
        checks |= {f"{column} is before 1970": f"{time} >= 0", past: f"{time} <= {last_us}"}
        return f"CASE WHEN {time} BETWEEN 0 AND {last_us} THEN {time} END", checks
    time = "(" + " + ".join(f"{quoted(part)} * {weight!r}" for part, weight in columns.items()) + ")"
    unit_us = TIME_UNITS_US[unit]
    last = last_us // unit_us
    checks = {f"{c} is {missing}negative": f"{there[c]}{quoted(c)} >= 0" for c in columns}
    sql = f"CAST(CASE WHEN {time} BETWEEN 0 AND {last} THEN round({time} * {unit_us}) END AS BIGINT)"
    return sql, checks | {past: f"{time} <= {last}"}


def _tier(mapping: SeriesMapping, priority: str) -> tuple[str, dict[str, str]]:
    """Return SQL of the tier's position in ``schema.TIERS``, which without a key of its own is that of the priority."""
    if mapping.tier is None:
        return tier_sql(priority), {}
    if isinstance(mapping.tier, str):
        return f"CAST({s.TIERS.index(mapping.tier)} AS TINYINT)", {}
    words = {word: own for word, own in mapping.tier.items() if word != WORDS_OF} or {own: own for own in s.TIERS}
    column = quoted(mapping.tier[WORDS_OF])
    cases = " ".join(f"WHEN {literal(word)} THEN {s.TIERS.index(own)}" for word, own in words.items())
    sql = f"CAST(CASE {column} {cases} END AS TINYINT)"
    return sql, {f"{mapping.tier[WORDS_OF]}{NO_TIER}": f"{column} IS NULL OR {sql} IS NOT NULL"}


def _vector(column: str, raw: str | list[str]) -> tuple[str, dict[str, str]]:
    """Return SQL of percentiles, null where all are missing, and their checks."""
    size = len(VECTORS[column])
    values = quoted(raw) if isinstance(raw, str) else f"[{', '.join(map(quoted, raw))}]"
    name = raw if isinstance(raw, str) else f"{raw[0]}, {raw[1]} … {raw[-1]}"
    return f"CASE WHEN list_count({values}) = {size} THEN CAST({values} AS FLOAT[]) END", {
        f"{name}: has not {size} values": f"len({values}) = {size}",
        f"{name}: a value is missing": f"list_count({values}) IN (0, {size})",
        f"{name}: a value is negative or not finite": f"list_min({values}) >= 0 AND isfinite(list_max({values}))",
        f"{name}: a percentile is below a lower one": f"list_sort({values}) = {values}",
    }


def series(mapping: SeriesMapping, alone: str | None = None) -> Source:
    """Return the source that a mapping describes; of all files that it names, or of one alone.

    Raises
    ------
    ConfigError
        The one file is neither CSV nor parquet, by its name.
    """
    if alone is not None and not alone.endswith(ENDINGS):
        raise ConfigError(f"{alone}: a file of a series ends in .parquet, .csv or .csv.gz")
    patterns = mapping.files if alone is None else (glob.escape(alone),)
    names = [mapping.task] if mapping.collection is None else [mapping.collection, mapping.task]
    ids = [*(_id_sql(quoted(name)) for name in names), "CAST(0 AS BIGINT)"]  # without a collection the index is 0
    checks = {f"{name} is missing": f"{quoted(name)} IS NOT NULL" for name in names}
    machine = "CAST(NULL AS BIGINT)"
    if mapping.machine is not None:
        machine = _id_sql(quoted(mapping.machine))
        checks[f"{mapping.machine}{NEGATIVE_ID}"] = f"{machine} >= 0"
    window_us = mapping.window_s * 1_000_000
    parts: dict[str, float] = {mapping.time: 1} if isinstance(mapping.time, str) else mapping.time
    start, of_time = _time(parts, mapping.time_unit, s.LATEST_US - window_us, "missing or ")
    checks |= of_time
    types = _types(mapping, parts, names)
    value = partial(_value_sql, mapping)
    checks |= _checks_of_numbers(mapping, types)
    tier, of_tier = _tier(mapping, value(s.PRIORITY, "INTEGER"))
    checks |= of_tier
    scheduled, vectors = "CAST(NULL AS BIGINT)", dict.fromkeys(VECTORS, "CAST(NULL AS FLOAT[])")
    if isinstance(run := mapping.columns.get(s.SCHEDULED_US), str):
        scheduled, of_run = _time({run: 1}, mapping.time_unit, s.LATEST_US)
        checks |= of_run | {f"{run} is after the window's end": f"{scheduled} <= {start} + {window_us}"}
    for column in vectors:
        if isinstance(percentiles := mapping.columns.get(column), str | list):
            vectors[column], of_vector = _vector(column, percentiles)
            checks |= of_vector
    if s.MACHINE_ID in mapping.columns:
        machine = value(s.MACHINE_ID, "BIGINT")
    select = f"""
        {ids[0]} AS {s.COLLECTION_ID}, {ids[1]} AS {s.INSTANCE_INDEX},
        {start} AS {s.START_US}, {start} + {window_us} AS {s.END_US},
        {machine} AS {s.MACHINE_ID}, CAST(0 AS TINYINT) AS {s.COLLECTION_TYPE},
        CAST(NULL AS BIGINT) AS {s.ALLOC_COLLECTION_ID}, CAST(NULL AS BIGINT) AS {s.ALLOC_INSTANCE_INDEX},
        CAST(NULL AS DOUBLE) AS {s.CPU_SAMPLE}, CAST(NULL AS DOUBLE) AS {s.MEMORY_ASSIGNED},
        CAST(NULL AS DOUBLE) AS {s.SAMPLE_RATE_HZ}, {", ".join(f"{sql} AS {c}" for c, sql in vectors.items())},
        {scheduled} AS {s.SCHEDULED_US}, {value(s.PRIORITY, "INTEGER")} AS {s.PRIORITY}, {tier} AS {s.TIER},
        {value(s.SCHEDULING_CLASS, "TINYINT")} AS {s.SCHEDULING_CLASS},
        {", ".join(f"{value(c, 'DOUBLE')} AS {c}" for c in _MEASURED)}
    """
    apart = tuple(name for name in [mapping.machines.get("file")] if isinstance(name, str))
    table = RawTable(
        name="usage", patterns=patterns, columns=types, select=select, checks=checks, closed=False, apart=apart,
        order=mapping.header, file_column=mapping.file_column,
    )  # fmt: skip
    named = RawTable(
        name="names",
        patterns=patterns,
        columns=dict.fromkeys(names, "VARCHAR"),
        select=_names_sql(ids[0], ids[1], quoted(names[0]), quoted(names[-1])),
        where=" OR ".join(f"NOT ({fits_sql(quoted(name), 'BIGINT')})" for name in names),  # a number names itself
        closed=False,
        apart=apart,
        order=mapping.header,
        file_column=mapping.file_column,
    )
    machines = (_machines(mapping, patterns),) if mapping.machines else ()
    return Source(
        trace="series",
        tables=(table, named, *machines),
        lacks=_lacks(mapping),
        options={"mapping": mapping.text},
        extras={"machines": (s.MACHINE_NAME,)} if machines else {},
        notes=() if s.CPU_LIMIT in mapping.columns else (NO_LIMIT,),
        alone=alone,
    )


def _value_sql(mapping: SeriesMapping, column: str, type_: str) -> str:
    """Return SQL of a column of usage, as a type: what the mapping names, its number, or NULL."""
    raw = mapping.columns.get(column)
    expression = quoted(raw) if isinstance(raw, str) else repr(raw) if isinstance(raw, int | float) else "NULL"
    return f"TRY_CAST({expression} AS {type_})"


def _checks_of_numbers(mapping: SeriesMapping, types: Mapping[str, str]) -> dict[str, str]:
    """Return the checks of amounts, limits and small integers: the reason for a reject, and SQL of what is none."""
    checks = {}
    for column, raw in mapping.columns.items():
        if column not in (*_MEASURED, *_INTEGERS):
            continue
        if isinstance(raw, str):
            type_ = _INTEGERS.get(column, "DOUBLE")
            value = _value_sql(mapping, column, type_)
            if types[raw] == "VARCHAR":  # it is something else as well, as the name of the task
                checks[mismatch(raw, type_)] = fits_sql(quoted(raw), type_)
            finite = "true" if column in _INTEGERS else f"isfinite({value})"
            checks[f"{raw} is negative or not finite"] = f"{value} >= 0 AND {finite}"
        if column in (s.CPU_LIMIT, s.MEMORY_LIMIT):
            checks[f"{raw} must be above 0 to serve as a limit"] = f"{_value_sql(mapping, column, 'DOUBLE')} > 0"
    return checks


def _lacks(mapping: SeriesMapping) -> tuple[str, ...]:
    """Return the columns of usage that a mapping says nothing of."""
    given = set(mapping.columns) | {s.COLLECTION_ID, s.INSTANCE_INDEX, s.START_US, s.END_US, s.COLLECTION_TYPE}
    given |= {s.MACHINE_ID} if mapping.machine is not None else set()
    given |= {s.TIER} if s.PRIORITY in mapping.columns or mapping.tier is not None else set()
    return tuple(name for name in s.USAGE.names if name not in given)


def _text_sql(column: str) -> str:
    """Return SQL of a name; a number names itself."""
    return f"CASE WHEN NOT ({fits_sql(column, 'BIGINT')}) THEN {column} END"


def _machines(mapping: SeriesMapping, patterns: tuple[str, ...]) -> RawTable:
    """Return the machines of a file of their own, or of windows."""
    file, capacity = mapping.machines.get("file"), [mapping.machines[name] for name in CAPACITIES]
    column = str(mapping.machines.get("machine") or mapping.machine or mapping.columns[s.MACHINE_ID])
    name = quoted(column)
    sql = [quoted(raw) if isinstance(raw, str) else f"CAST({float(raw)!r} AS DOUBLE)" for raw in capacity]
    types = {raw: "DOUBLE" for raw in capacity if isinstance(raw, str)} | {column: "VARCHAR"}
    exact = file is None and mapping.machine is None  # a column of integers alone, as ``machine_id``
    types |= {column: "BIGINT"} if exact else {}
    machine, text = (name, "CAST(NULL AS VARCHAR)") if exact else (_id_sql(name), _text_sql(name))
    checks = {f"{column} is missing": f"{name} IS NOT NULL", f"{column}{NEGATIVE_ID}": f"{machine} >= 0"}
    for raw, value in zip(capacity, sql, strict=True):
        checks[f"{raw} is not a capacity above 0"] = f"{value} IS NOT NULL AND {value} > 0 AND isfinite({value})"
    return RawTable(
        name="machines",
        patterns=patterns if file is None else (str(file),),
        columns=types,
        select=f"""
            CAST({s.BEFORE_TRACE_US} AS BIGINT) AS {s.TIME_US}, {machine} AS {s.MACHINE_ID},
            CAST({s.MachineEventType.ADD} AS TINYINT) AS {s.EVENT_TYPE},
            {", ".join(f"{value} AS {name}" for name, value in zip(CAPACITIES, sql, strict=True))},
            {text} AS {s.MACHINE_NAME}
        """,
        checks=checks if file is not None else {},
        where="true" if file is not None else f"{machine} >= 0",
        closed=False,
        repeated=file is None,
        order=mapping.header if file is None else (),
        file_column=mapping.file_column if file is None else None,
    )


def _types(mapping: SeriesMapping, times: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return the raw columns and their types; one that is read in two ways has the type of the last."""
    types = dict[str, str]()
    for column, raw in mapping.columns.items():
        if isinstance(raw, list):
            types |= dict.fromkeys(raw, "DOUBLE")
        elif isinstance(raw, str):
            types[raw] = "DOUBLE[]" if column in VECTORS else _INTEGERS.get(column, "DOUBLE")
    run = mapping.columns.get(s.SCHEDULED_US)
    times = [*times, *([run] if isinstance(run, str) else [])]
    types |= dict.fromkeys(times, "VARCHAR" if mapping.time_unit == ISO else "DOUBLE")
    texts = [*names, *([mapping.tier[WORDS_OF]] if isinstance(mapping.tier, dict) else [])]
    return types | dict.fromkeys([*texts, *([mapping.machine] if mapping.machine is not None else [])], "VARCHAR")
