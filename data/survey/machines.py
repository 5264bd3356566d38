"""Queries facts about machines, and about the whole cell over time: usage, limits and capacity."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data import schema as s
from reclaim.data.survey.query import IN_TRACE, ROW, Tables, percentiles, ratio, rounded
from reclaim.data.survey.tasks import MACHINE_EVENT_NAMES
from reclaim.data.survey.usage import LIMIT, MEAN, TOP_LEVEL

CAPACITY: Final = {"cpu": s.CPU_CAPACITY, "memory": s.MEMORY_CAPACITY}
MOST_POINTS: Final = 1000
"""Points of the cell over time, at most."""
_STEPS_S: Final = (300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200)
_DAY_S: Final = 86_400
_MOST_KINDS: Final = 10
_BY: Final = f"{s.TIME_US}, {ROW}"
"""Order of a machine's events."""
_STARTS = {"submitted": (s.EventType.SUBMIT,), "started": (s.EventType.SCHEDULE,), "ended": s.EventType.ENDS}


def machines(tables: Tables) -> dict[str, Any]:
    """Return the machines by last recorded capacity, and the counts of their events."""
    capacities = ", ".join(f"arg_max({name}, ({_BY})) AS {name}" for name in CAPACITY.values())
    kinds = tables.rows(
        f"SELECT {', '.join(CAPACITY.values())}, count(*) AS n FROM (SELECT {capacities} FROM machines GROUP BY "
        f"{s.MACHINE_ID}) GROUP BY 1, 2 ORDER BY n DESC, 1, 2"
    )
    found = tables.rows(
        f"SELECT {s.EVENT_TYPE} AS code, count(*) AS events, "
        f"count(*) FILTER ({s.TIME_US} <= {s.BEFORE_TRACE_US}) AS before, count({s.MISSING_TYPE}) AS synthesised "
        "FROM machines GROUP BY 1 ORDER BY 1"
    )
    names = f"count(DISTINCT {s.ATTRIBUTE_NAME}) AS names, count(DISTINCT {s.MACHINE_ID}) AS machines"
    attributes = tables.row(f"SELECT {names} FROM attributes")
    return {
        "distinct": sum(row["n"] for row in kinds),
        "kinds": len(kinds),
        "capacities": [{**{r: row[name] for r, name in CAPACITY.items()}, "machines": row["n"]}
                       for row in kinds[:_MOST_KINDS]],
        "events": [{"event": MACHINE_EVENT_NAMES.get(row.pop("code"), "unknown"), **row} for row in found],
        "attributes": attributes,
    }  # fmt: skip


def machine_usage(tables: Tables) -> dict[str, Any]:
    """Return percentiles of the usage of whole machines, for a trace that records it."""
    found = tables.row(f"SELECT count(*) AS n, count(DISTINCT {s.MACHINE_ID}) AS machines FROM machine_usage")
    shares = {}
    for name in (s.CPU_SHARE, s.MEMORY_SHARE, s.DISK_SHARE):
        by = tables.arrays(f"SELECT round(1000 * {name})::BIGINT AS v, count(*) AS n FROM machine_usage "
                           f"WHERE {name} IS NOT NULL GROUP BY 1 ORDER BY 1")  # fmt: skip
        shares[name] = percentiles(by["v"], by["n"], (5, 50, 95, 100), 1 / 1000)
    return {"rows": found["n"], "machines": found["machines"], "shares": shares}


def span(tables: Tables) -> dict[str, Any]:
    """Return the first and the last time of each table that has times, flags apart, on the trace's clock.

    The dataset's span is that of its windows, or else of the first table below with times.
    """
    ends = {"usage": (s.START_US, s.END_US, "true")}
    ends |= {name: (s.TIME_US, s.TIME_US, IN_TRACE) for name in ("events", "collections", "machines", "machine_usage")}
    found = {}
    for table, (first, last, counts) in ends.items():
        row = tables.row(f"SELECT min({first}) AS first_us, max({last}) AS last_us FROM {table} WHERE {counts}")
        if row["first_us"] is not None:
            found[table] = row
    whole = next(iter(found.values()), {"first_us": 0, "last_us": 0})
    return {**whole, "hours": rounded((whole["last_us"] - whole["first_us"]) / s.HOUR_US), "tables": found}


def timeline(tables: Tables, first_us: int, last_us: int) -> dict[str, Any]:
    """Return the cell over time, in steps of five minutes, or longer ones for at most a thousand points.

    Usage and limit are means over a step, summed over top-level tasks: a window counts with the share of the step that
    it covers. Capacity and machines are those in service when the step ends. Starts and ends are of tasks, or of
    collections where there are no events of tasks.
    """
    step_us = 1_000_000 * _step_s((last_us - first_us) / 1e6)
    first = first_us // step_us
    count = max(-(-last_us // step_us) - first, 1)
    made: dict[str, Any] = {"step_s": step_us // 1_000_000, "first_us": first * step_us, "points": count}
    columns = {f"{r}_{kind}": column[r] for r in s.RESOURCES for kind, column in (("usage", MEAN), ("limit", LIMIT))}
    covered = f"least({s.END_US}, (step + 1) * {step_us}) - greatest({s.START_US}, step * {step_us})"
    sums = ", ".join(f"sum({column} * ({covered})) / {step_us} AS {name}" for name, column in columns.items())
    found = tables.arrays(
        f"SELECT step - {first} AS step, {sums} FROM (SELECT {s.START_US}, {s.END_US}, {', '.join(columns.values())}, "
        f"unnest(range({s.START_US} // {step_us}, ({s.END_US} - 1) // {step_us} + 1)) AS step FROM usage "
        f"WHERE {TOP_LEVEL} AND {s.END_US} > {s.START_US}) GROUP BY 1 ORDER BY 1"
    )
    for name in columns:
        made[name] = _at_steps(found["step"], found[name], count)
    ends = (first + 1 + np.arange(count)) * step_us
    made |= {f"{r}_capacity": _in_service(tables, f"coalesce({_LAST[r]}, 0)", ends) for r in s.RESOURCES}
    made["machines"] = _in_service(tables, "1", ends)
    table = "events" if tables.dataset.manifest["counts"]["events"] else "collections"
    counts = ", ".join(
        f"count(*) FILTER ({s.EVENT_TYPE} IN {(*codes, -1)})::DOUBLE AS {k}" for k, codes in _STARTS.items()
    )
    found = tables.arrays(
        f"SELECT {s.TIME_US} // {step_us} - {first} AS step, {counts} FROM {table} WHERE {IN_TRACE} "
        f"AND {s.TIME_US} BETWEEN {first * step_us} AND {(first + count) * step_us - 1} GROUP BY 1 ORDER BY 1"
    )
    return {**made, "counted": table, **{k: _at_steps(found["step"], found[k], count) for k in _STARTS}}


def _step_s(span_s: float) -> int:
    for step in _STEPS_S:
        if span_s <= step * (MOST_POINTS - 1):
            return step
    return _DAY_S * (1 + int(span_s // (_DAY_S * (MOST_POINTS - 1))))


def _at_steps(step: NDArray[np.int64], values: Any, count: int) -> list[float] | None:
    """Return values at their steps, zero elsewhere; None if all are unknown."""
    known = np.ma.filled(np.ma.asarray(values, np.float64), np.nan)
    if not np.isfinite(known).any():
        return None
    made = np.zeros(count)
    made[step] = np.nan_to_num(known)
    return [float(f"{v:.6g}") for v in made]


_MACHINE = f"(PARTITION BY {s.MACHINE_ID} ORDER BY {_BY})"
_SO_FAR = f"{_MACHINE[:-1]} ROWS UNBOUNDED PRECEDING)"
_LAST: Final = {r: f"last_value({name} IGNORE NULLS) OVER {_SO_FAR}" for r, name in CAPACITY.items()}


def _in_service(tables: Tables, each: str, ends: NDArray[np.int64]) -> list[float] | None:
    """Return the sum of ``each``, SQL over a machine's events so far, over machines in service just before each end."""
    now = f"CASE WHEN {s.EVENT_TYPE} = {s.MachineEventType.REMOVE} THEN 0.0 ELSE ({each})::DOUBLE END AS now"
    found = tables.arrays(
        f"SELECT {s.TIME_US} AS t, sum(now - was) AS change FROM ("
        f"SELECT {s.TIME_US}, now, lag(now, 1, 0) OVER {_MACHINE} AS was FROM ("
        f"SELECT {s.TIME_US}, {s.MACHINE_ID}, {ROW}, {now} FROM machines)) GROUP BY 1 ORDER BY 1"
    )
    total = np.append(0.0, np.cumsum(found["change"]))[np.searchsorted(found["t"], ends)]
    return None if not (total > 0).any() else [float(f"{v:.6g}") for v in np.maximum(total, 0.0)]


def of_capacity(over_time: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return usage and limits over capacity, all integrated over time; None if one is unknown."""

    def share(part: list[float] | None, whole: list[float] | None) -> float | None:
        return ratio(sum(part), sum(whole)) if part and whole else None

    return {r: {kind: share(over_time[f"{r}_{kind}"], over_time[f"{r}_capacity"]) for kind in ("usage", "limit")}
            for r in s.RESOURCES}  # fmt: skip
