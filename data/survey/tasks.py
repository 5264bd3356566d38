"""Queries facts about tasks: the order of their windows, their events, lifetimes and collections."""

from __future__ import annotations

from typing import Any, Final

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.oom import oom_columns, oom_events
from reclaim.data.survey.query import IN_TRACE, KEY, ROW, Tables, percentiles, ratio, rounded

EVENT_NAMES: Final = {code: name for name, code in s.codes_of(s.EventType).items()}
MACHINE_EVENT_NAMES: Final = {code: name for name, code in s.codes_of(s.MachineEventType).items()}
SIZES: Final = ((1, 1), (2, 10), (11, 100), (101, 1000), (1001, None))
"""Bands of a collection's number of tasks."""
LIFETIME_EDGES_S: Final = (0, 60, 300, 900, 3_600, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800, 1_209_600)
"""Lower edges of the bands of lifetime."""
_LEVELS: Final = (5, 25, 50, 75, 95, 100)

_CHANGED = " OR ".join(
    f"{name} <> lag({name} IGNORE NULLS) OVER task" for name in (s.CPU_LIMIT, s.MEMORY_LIMIT)
)  # null limits change nothing
_BEFORE = "ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"
_OF_BUCKET = f"""
    WITH w AS (
        SELECT {KEY}, {s.START_US}, {s.END_US}, max({s.END_US}) OVER (task {_BEFORE}) AS until,
               coalesce({s.SCHEDULED_US} <> lag({s.SCHEDULED_US}) OVER task, false) AS restarted,
               coalesce({_CHANGED}, false) AS changed
        FROM usage_of_bucket WINDOW task AS (PARTITION BY {KEY} ORDER BY {s.START_US}, {s.END_US})
    ), u AS (
        SELECT {KEY}, count(*) AS windows, min({s.START_US}) AS first_us, max({s.END_US}) AS last_us,
               count(*) FILTER ({s.START_US} > until) AS gaps,
               count(*) FILTER ({s.START_US} > until AND restarted) AS gaps_between_runs,
               coalesce(sum({s.START_US} - until) FILTER ({s.START_US} > until), 0)::BIGINT AS gap_us,
               max({s.START_US} - until) AS longest_us, count(*) FILTER ({s.START_US} < until) AS overlapping,
               count(*) FILTER (restarted) AS restarts, count(*) FILTER (changed) AS changes
        FROM w GROUP BY {KEY}
    ), e AS (
        SELECT {KEY}, count(*) AS events, min({s.TIME_US}) FILTER ({IN_TRACE}) AS first_us,
               max({s.TIME_US}) FILTER ({IN_TRACE}) AS last_us, count(*) FILTER (changed) AS changes
        FROM (SELECT {KEY}, {s.TIME_US}, coalesce({_CHANGED}, false) AS changed FROM events_of_bucket
              WINDOW task AS (PARTITION BY {KEY} ORDER BY {s.TIME_US}, {ROW}))
        GROUP BY {KEY}
    )
    SELECT u.* EXCLUDE ({KEY}, first_us, last_us, changes), e.events, u.changes AS window_changes,
           e.changes AS event_changes,
           round((greatest(u.last_us, e.last_us) - least(u.first_us, e.first_us)) / 1e6)::BIGINT AS lifetime_s
    FROM u FULL JOIN e USING ({KEY})
"""


def make_task_facts(tables: Tables) -> None:
    """Create ``task_facts``, a table with one row per task, for the functions below."""
    for bucket in tables.each_bucket():
        made = "CREATE OR REPLACE TEMP TABLE task_facts AS" if bucket == 0 else "INSERT INTO task_facts"
        tables.execute(f"{made} {_OF_BUCKET}")


def order(tables: Tables) -> dict[str, Any]:
    """Return counts of gaps, overlaps, restarts and changes of limit between a task's windows."""
    found = tables.row(
        "SELECT count(windows) AS tasks, sum(windows)::BIGINT AS windows, sum(gaps)::BIGINT AS gaps, "
        "sum(gaps_between_runs)::BIGINT AS gaps_between_runs, count(*) FILTER (gaps > 0) AS tasks_with_gaps, "
        "sum(gap_us)::BIGINT AS gap_us, max(longest_us) AS longest_us, sum(overlapping)::BIGINT AS overlapping, "
        "sum(restarts)::BIGINT AS restarts, count(*) FILTER (restarts > 0) AS tasks_restarted, "
        "sum(window_changes)::BIGINT AS limit_changes FROM task_facts"
    )
    windows = found.pop("windows")
    return {
        **{name: value or 0 for name, value in found.items() if not name.endswith("_us")},
        "gap_share": ratio(found["gaps"], windows),
        "missing_hours": rounded((found["gap_us"] or 0) / s.HOUR_US),
        "longest_gap_hours": rounded(max(found["longest_us"] or 0, 0) / s.HOUR_US),
        "windows_per_task": _of_tasks(tables, "windows"),
    }


def lives(tables: Tables) -> dict[str, Any]:
    """Return lifetimes of tasks, first to last seen in windows or events, and changes of their limits."""
    found = tables.row(
        "SELECT count(*) FILTER (windows > 0 AND events IS NULL) AS usage_without_events, "
        "count(*) FILTER (events > 0 AND windows IS NULL) AS events_without_usage, "
        "sum(event_changes)::BIGINT AS limit_changes, count(*) FILTER (event_changes > 0) AS tasks_with_limit_changes, "
        "max(event_changes) AS most_limit_changes FROM task_facts"
    )
    band = " + ".join(f"(lifetime_s >= {edge})::BIGINT" for edge in LIFETIME_EDGES_S)
    bands = tables.arrays(
        f"SELECT {band} AS band, count(*) AS n FROM task_facts WHERE lifetime_s IS NOT NULL GROUP BY 1 ORDER BY 1"
    )
    counts = dict(zip(bands["band"].tolist(), bands["n"].tolist(), strict=True))
    return {
        **{name: value or 0 for name, value in found.items()},
        "lifetime_hours": _of_tasks(tables, "lifetime_s", 1 / 3600),
        "lifetimes": [{"from_s": edge, "tasks": counts.get(k + 1, 0)} for k, edge in enumerate(LIFETIME_EDGES_S)],
    }


def oom_ends(dataset: Dataset) -> int | None:
    """Return the number of out-of-memory ends, recorded or derived; None without usage or events."""
    counts = dataset.manifest["counts"]
    if not counts["usage"] or not counts["events"]:
        return None
    return sum(
        len(oom_events(dataset.windows(bucket), dataset.events(bucket, oom_columns(dataset.manifest)))[0])
        for bucket in range(dataset.n_buckets)
    )


def _of_tasks(tables: Tables, column: str, unit: float = 1.0) -> dict[str, float | None]:
    found = tables.arrays(
        f"SELECT {column} AS v, count(*) AS n FROM task_facts WHERE {column} IS NOT NULL GROUP BY 1 ORDER BY 1"
    )
    return percentiles(found["v"], found["n"], _LEVELS, unit)


def events(tables: Tables, table: str = "events") -> dict[str, Any]:
    """Return counts of each event in ``events`` or ``collections``, with those outside the trace or synthesised."""
    found = tables.rows(
        f"SELECT {s.EVENT_TYPE} AS code, count(*) AS events, "
        f"count(*) FILTER ({s.TIME_US} <= {s.BEFORE_TRACE_US}) AS before, "
        f"count(*) FILTER ({s.TIME_US} = {s.AFTER_TRACE_US}) AS after, count({s.MISSING_TYPE}) AS synthesised "
        f"FROM {table} GROUP BY 1 ORDER BY 1"
    )
    why = tables.rows(
        f"SELECT {s.MISSING_TYPE} AS code, count(*) AS n FROM {table} WHERE {s.MISSING_TYPE} IS NOT NULL "
        "GROUP BY 1 ORDER BY 1"
    )
    return {
        "types": [{"event": EVENT_NAMES.get(row.pop("code"), "unknown"), **row} for row in found],
        "synthesised": {s.MISSING_TYPES[row["code"]]: row["n"] for row in why},
    }


def collections(tables: Tables) -> dict[str, Any]:
    """Return the numbers of collections, by kind and by number of tasks."""
    bands = ", ".join(
        f"count(*) FILTER (n >= {low}{f' AND n <= {high}' if high else ''}) AS from_{low}" for low, high in SIZES
    )
    sizes = tables.row(
        f"SELECT count(*) AS with_tasks, max(n) AS largest, {bands} "
        f"FROM (SELECT count(*) AS n FROM tasks GROUP BY {s.COLLECTION_ID})"
    )
    kinds = tables.row(
        f"SELECT count(*) AS known, count(*) FILTER (kind = 0) AS jobs, count(*) FILTER (kind = 1) AS alloc_sets, "
        f"count(*) FILTER (inside) AS in_alloc_sets, count(*) FILTER (NOT tasks) AS without_tasks FROM ("
        f"SELECT max({s.COLLECTION_TYPE}) AS kind, count({s.ALLOC_COLLECTION_ID}) > 0 AS inside, "
        f"{s.COLLECTION_ID} IN (SELECT {s.COLLECTION_ID} FROM tasks) AS tasks FROM collections "
        f"GROUP BY {s.COLLECTION_ID})"
    )
    return {
        "distinct": sizes["with_tasks"] + kinds["without_tasks"],
        **kinds,
        "with_tasks": sizes["with_tasks"],
        "largest": sizes["largest"] or 0,
        "sizes": [{"from": low, "to": high, "collections": sizes[f"from_{low}"]} for low, high in SIZES],
    }


def constraints(tables: Tables) -> dict[str, Any]:
    """Return the number of tasks with placement constraints, and the constraints by relation."""
    tasks = 0
    for _ in tables.each_bucket():
        tasks += tables.row(f"SELECT count(*) AS n FROM (SELECT DISTINCT {KEY} FROM constraints_of_bucket)")["n"]
    found = tables.rows(f"SELECT {s.RELATION} AS code, count(*) AS n FROM constraints GROUP BY 1 ORDER BY 1")
    return {"tasks": tasks, "relations": {_relation(row["code"]): row["n"] for row in found}}


def _relation(code: int | None) -> str:
    return "unknown" if code is None else s.RELATIONS[code]
