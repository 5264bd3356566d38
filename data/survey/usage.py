"""Queries facts about the usage table: limits and usage by tier, lengths of windows, missing values."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from reclaim.data import schema as s
from reclaim.data.survey.query import Tables, percentiles, ratio, rounded, tier_name

MEAN: Final = {"cpu": s.CPU_MEAN, "memory": s.MEMORY_MEAN}
LIMIT: Final = {"cpu": s.CPU_LIMIT, "memory": s.MEMORY_LIMIT}
TOP_LEVEL: Final = f"{s.ALLOC_COLLECTION_ID} IS NULL"
"""SQL: condition that a window counts in sums over the cell. A task in an alloc instance uses the resources of that
instance, whose own windows include all its tasks (Google cluster-usage traces v3, section "Resource usage")."""

LEVELS: Final = (5, 25, 50, 75, 95, 99)
"""Percentiles of usage over limit."""
STEPS: Final = 1000
"""Steps of usage over limit, a thousandth of the limit each …"""
MOST_STEPS: Final = 10_000
"""… up to ten times the limit; larger values count as that."""
CURVE: Final = tuple(range(0, 1501, 10))
"""Points of the distribution function, in thousandths of the limit."""
EXPECTED_US: Final = 300_000_000
"""Length of a measurement window in the Google traces."""


def tiers(tables: Tables) -> list[dict[str, Any]]:
    """Return tasks, windows, task-hours and, of each resource, the integrals of limit and usage over time, by tier."""
    hours = f"({s.END_US} - {s.START_US}) / {s.HOUR_US}"
    sums = [f"count(*) AS windows, sum({hours}) AS task_hours"]
    for r in s.RESOURCES:
        limit, usage = f"{LIMIT[r]} * {hours}", f"{MEAN[r]} * {hours}"
        both = f"{TOP_LEVEL} AND {LIMIT[r]} IS NOT NULL AND {MEAN[r]} IS NOT NULL"
        sums.append(f"sum({limit}) FILTER ({TOP_LEVEL}) AS {r}_limit, sum({usage}) FILTER ({TOP_LEVEL}) AS {r}_usage")
        sums.append(f"sum({limit}) FILTER ({both}) AS {r}_limit_both, sum({usage}) FILTER ({both}) AS {r}_usage_both")
    found = {row[s.TIER]: row for row in tables.rows(f"SELECT {s.TIER}, {', '.join(sums)} FROM usage GROUP BY ALL")}
    tasks = {row[s.TIER]: row["n"] for row in tables.rows(f"SELECT {s.TIER}, count(*) AS n FROM tasks GROUP BY ALL")}
    order = [tier for tier in (*range(len(s.TIERS)), None) if tier in found or tier in tasks]
    total = {
        f"{r}_{kind}": sum(found[t][f"{r}_{kind}"] or 0.0 for t in order if t in found)
        for r in s.RESOURCES for kind in ("limit", "usage")
    }  # fmt: skip
    made = []
    for tier in order:
        row = found.get(tier, {})
        facts = {"tier": tier_name(tier), "tasks": tasks.get(tier, 0), "windows": row.get("windows", 0)}
        facts["task_hours"] = rounded(row.get("task_hours", 0.0))
        for r in s.RESOURCES:
            facts[r] = {
                "limit_hours": rounded(row.get(f"{r}_limit")),
                "limit_share": ratio(row.get(f"{r}_limit"), total[f"{r}_limit"]),
                "usage_hours": rounded(row.get(f"{r}_usage")),
                "usage_share": ratio(row.get(f"{r}_usage"), total[f"{r}_usage"]),
                "usage_of_limit": ratio(row.get(f"{r}_usage_both"), row.get(f"{r}_limit_both")),
            }
        made.append(facts)
    return made


def used_of_limits(tables: Tables) -> dict[str, float | None]:
    """Return mean usage over limit of each resource, both integrated over the top-level windows that have both."""
    length = f"({s.END_US} - {s.START_US})"
    sums = ", ".join(
        f"sum({MEAN[r]} * {length}) FILTER ({LIMIT[r]} IS NOT NULL) AS {r}_usage, "
        f"sum({LIMIT[r]} * {length}) FILTER ({MEAN[r]} IS NOT NULL) AS {r}_limit"
        for r in s.RESOURCES
    )
    found = tables.row(f"SELECT {sums} FROM usage WHERE {TOP_LEVEL}")
    return {r: ratio(found[f"{r}_usage"], found[f"{r}_limit"]) for r in s.RESOURCES}


def ratios(tables: Tables) -> dict[str, list[dict[str, Any]]]:
    """Return, for each resource, the distribution of mean usage over limit per window, by tier and of all.

    Percentiles and curve are exact to a thousandth of the limit.
    """
    made: dict[str, list[dict[str, Any]]] = {}
    for r in s.RESOURCES:
        share = f"{MEAN[r]} / {LIMIT[r]}"
        counted = tables.arrays(
            f"SELECT coalesce({s.TIER}, {len(s.TIERS)})::BIGINT AS tier, "
            f"least(round({STEPS} * {share}), {MOST_STEPS})::BIGINT AS step, count(*) AS n, "
            f"count(*) FILTER ({MEAN[r]} > {LIMIT[r]})::BIGINT AS above, max({share}) AS largest "
            f"FROM usage WHERE {LIMIT[r]} > 0 AND {MEAN[r]} IS NOT NULL GROUP BY 1, 2 ORDER BY 2, 1"
        )
        present = np.unique(counted["tier"]).tolist()
        groups = [(tier_name(t if t < len(s.TIERS) else None), counted["tier"] == t) for t in present]
        if len(groups) > 1:
            groups.append(("all", counted["tier"] >= 0))
        made[r] = [_distribution(name, *(counted[k][rows] for k in ("step", "n", "above", "largest")))
                   for name, rows in groups]  # fmt: skip
    return made


def _distribution(name: str, step: Any, n: Any, above: Any, largest: Any) -> dict[str, Any]:
    windows = int(n.sum())
    so_far = np.append(0, np.cumsum(n))
    return {
        "tier": name,
        "windows": windows,
        "percentiles": percentiles(step, n, LEVELS, 1 / STEPS),
        "share_above_1": ratio(int(above.sum()), windows),
        "largest": rounded(float(largest.max()), 4),
        "curve": [rounded(float(x) / windows, 5) for x in so_far[np.searchsorted(step, CURVE, side="right")]],
    }


def nulls(tables: Tables, table: str) -> dict[str, float]:
    """Return the share of nulls of every column of a table; empty for a table without rows."""
    counts = ", ".join(f"count({name}) AS {name}" for name in tables.columns[table])
    found = tables.row(f"SELECT count(*) AS n_rows, {counts} FROM {table}")
    total = found.pop("n_rows")
    return {name: round(1 - known / total, 9) for name, known in found.items()} if total else {}


def null_means(table: str, column: str) -> str | None:
    """Return the meaning of a null in a column; None if it is an unknown value."""
    known = [f for f in s.TABLES[table] if f.name == column]
    _, found, meaning = known[0].metadata[b"meaning"].decode().partition("; null ") if known else ("", "", "")
    return meaning if found else None


def lengths(tables: Tables) -> dict[str, Any]:
    """Return lengths of windows, and counts of those in an alloc instance or before time zero."""
    length = f"({s.END_US} - {s.START_US})"
    counted = tables.row(
        f"SELECT count(*) AS windows, count(*) FILTER ({length} = {EXPECTED_US}) AS exact, "
        f"count(*) FILTER ({length} < {EXPECTED_US}) AS shorter, count(*) FILTER ({length} > {EXPECTED_US}) AS longer, "
        f"count(*) FILTER (NOT {TOP_LEVEL}) AS in_alloc, count(*) FILTER ({s.START_US} < 0) AS before_zero, "
        f"count(*) - count({s.CPU_LIMIT}) AS no_cpu_limit, count(*) - count({s.MEMORY_LIMIT}) AS no_memory_limit, "
        f"count(*) - count({s.TIER}) AS no_tier, count(DISTINCT {s.MACHINE_ID}) AS machines FROM usage"
    )
    by = tables.arrays(
        f"SELECT round({length} / 1e6)::BIGINT AS length, count(*) AS n FROM usage GROUP BY 1 ORDER BY 1"
    )
    return {**counted, "length_s": percentiles(by["length"], by["n"], (0, 1, 5, 50, 95, 99, 100))}
