"""Builds the tables of a dataset from its facts: the summary of the console, and those of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from reclaim.data import schema as s
from reclaim.data.core.prose import amount, duration, percent
from reclaim.data.core.style import RESOURCE_TITLES, RESOURCE_WORDS, SUBJECTS
from reclaim.data.core.tables import Cell, Table, show
from reclaim.data.oom import oom_is_recorded
from reclaim.data.survey.query import ratio
from reclaim.data.survey.usage import null_means

Facts = Mapping[str, Any]
_MIB: Final = 2**20
_WINDOWS: Final = {
    "of exactly 300 s": "exact", "shorter": "shorter", "longer": "longer",
    "after a gap": "gaps", "after a gap and a restart": "gaps_between_runs", "first of a restart": "restarts",
    "before the end of an earlier one": "overlapping", "with a new limit": "limit_changes",
    "without a CPU limit": "no_cpu_limit", "without a memory limit": "no_memory_limit", "without a tier": "no_tier",
    "inside an alloc instance": "in_alloc", "before time 0": "before_zero",
}  # fmt: skip
_TASKS: Final = {
    "with a gap": ("windows", "tasks_with_gaps"), "restarted": ("windows", "tasks_restarted"),
    "with usage, without events": ("tasks", "usage_without_events"),
    "with events, without usage": ("tasks", "events_without_usage"),
    "with a new limit by an event": ("tasks", "tasks_with_limit_changes"),
}  # fmt: skip
_LEVELS: Final = ("p5", "p25", "p50", "p75", "p95", "p99", "p100")


def summary(facts: Facts) -> Table:
    """Return the main figures of a dataset, for a console of 80 columns."""
    head, quality = facts["head"], facts["quality"]
    figures: dict[str, str] = {
        "tasks": show(head["counts"]["tasks"]),
        "collections": show(facts["collections"]["distinct"]),
        "machines": show(facts["machines"]["distinct"] or facts["windows"]["machines"]),
        "time covered": duration(facts["span"]["hours"]),
        **{f"{RESOURCE_WORDS[r]} used, of the limits": percent(facts["used_of_limits"][r]) for r in s.RESOURCES},
        f"out-of-memory ends ({oom_label(facts)})": show(facts["tasks"]["oom_ends"]),
        "rejected lines": show(rejected(facts)),
        "damaged files": show(len(quality["damaged"])),
    }
    return _told(facts, Table(("figure", "value"), tuple(figures.items()), caption=f"{head['name']}: {head['nature']}"))


def oom_label(facts: Facts) -> str:
    """Return where the label of out-of-memory ends comes from."""
    return "recorded" if oom_is_recorded(facts["quality"]) else "derived"


def _told(facts: Facts, table: Table) -> Table:
    """Return a table without its memory entries, where the source does not measure memory."""
    return table if s.has_memory(facts["quality"]["lacks"]) else table.silent_on(SUBJECTS["memory"])


def rejected(facts: Facts) -> int:
    """Return the number of rejected lines."""
    return sum(reject["lines"] for reject in facts["quality"]["rejects"])


def tables(facts: Facts) -> dict[str, list[Table]]:
    """Return the tables of each section with any, in the order of the page; none is empty."""
    made = {
        "Tiers": [_tiers(facts)],
        "Usage over limit": _usage_over_limit(facts),
        "Cell over time": [_cell_over_time(facts)],
        "Windows and tasks": [_windows(facts), _tasks(facts), _distributions(facts)],
        "Missing fields": [_missing_fields(facts)],
        "Events": [_events(facts), _synthesised(facts)],
        "Collections": [_collections(facts)],
        "Machines": _machines(facts),
        "Input": [_input(facts), _faults(facts)],
    }
    given = {title: [_told(facts, table) for table in of] for title, of in made.items()}
    kept = {title: [table for table in of if table.rows] for title, of in given.items()}
    return {title: of for title, of in kept.items() if of}


def text(facts: Facts, width: int | None = None) -> str:
    """Return all tables as text of at most ``width`` columns."""
    return "\n".join(
        "\n".join([title, "-" * len(title), *(table.as_text(width) for table in of)])
        for title, of in tables(facts).items()
    )


def _input(facts: Facts) -> Table:
    head, found = facts["head"], facts["span"]["tables"]
    rows: list[tuple[Cell, ...]] = []
    for table in (name for name in s.TABLES if name in head["read"] or head["counts"].get(name)):
        read = head["read"].get(table, {})
        ends = [f"{found[table][end] / 86_400e6:,.2f}" for end in ("first_us", "last_us")] if table in found else ["-"]
        size = max(round(read["bytes"] / _MIB, 2), 0.01) if read else None
        counts = (read.get("files"), size, read.get("rows"), read.get("rejects"), head["counts"].get(table))
        rows.append((table, *counts, " to ".join(ends)))
    return Table(("table", "files", "MiB", "lines taken", "rejected", "rows", "days on the clock"), tuple(rows))


def _tiers(facts: Facts) -> Table:
    columns = ["tier", "tasks", "windows", "hours"]
    columns += [f"{RESOURCE_WORDS[r]} {kind}" for r in s.RESOURCES for kind in ("limit", "usage", "used")]
    rows: list[tuple[Cell, ...]] = []
    for t in facts["tiers"]:
        shares = (t[r][key] for r in s.RESOURCES for key in ("limit_share", "usage_share", "usage_of_limit"))
        rows.append((t["tier"], t["tasks"], t["windows"], amount(t["task_hours"]), *shares))
    return Table(tuple(columns), tuple(rows), frozenset(columns[4:])).known()


def _usage_over_limit(facts: Facts) -> list[Table]:
    made = []
    for r, groups in facts["usage_of_limit"].items():
        if groups:
            columns = ("tier", "windows", *groups[0]["percentiles"], "above limit", "largest")
            rows = tuple((g["tier"], g["windows"], *g["percentiles"].values(), g["share_above_1"], g["largest"])
                         for g in groups)  # fmt: skip
            made.append(Table(columns, rows, frozenset(columns[2:]), RESOURCE_TITLES[r]))
    return made


def _cell_over_time(facts: Facts) -> Table:
    over_time, shares = facts["timeline"], facts["machines"]["of_capacity"]
    of = {(r, kind): over_time[f"{r}_{kind}"] for r in s.RESOURCES for kind in ("usage", "limit", "capacity")}
    rows: list[tuple[Cell, ...]] = [
        (f"{RESOURCE_TITLES[r]} {kind}", *map(amount, (min(values), sum(values) / len(values), max(values))),
         shares[r].get(kind))
        for (r, kind), values in of.items() if values
    ]  # fmt: skip
    if machines := over_time["machines"]:
        rows.append(("machines in service", *map(amount, (min(machines), sum(machines) / len(machines), max(machines))),
                     None))  # fmt: skip
    columns = ("sum over the cell", "least", "mean", "most", "of capacity")
    return Table(columns, tuple(rows), frozenset(columns[-1:])).known()


def _windows(facts: Facts) -> Table:
    windows = facts["windows"]
    total = windows["windows"]
    rows = tuple((name, windows[key], ratio(windows[key], total)) for name, key in _WINDOWS.items() if total)
    return Table(("windows", "number", "share"), rows, frozenset({"share"}))


def _tasks(facts: Facts) -> Table:
    total = facts["head"]["counts"]["tasks"]
    counts = {name: facts[of][key] for name, (of, key) in _TASKS.items()}
    counts["with placement constraints"] = facts["tasks"]["constrained"]["tasks"]
    counts |= {f"constraints: {name}": n for name, n in facts["tasks"]["constrained"]["relations"].items()}
    rows = tuple((name, n, None if ":" in name else ratio(n, total)) for name, n in counts.items() if total)
    return Table(("tasks", "number", "share"), rows, frozenset({"share"}))


def _distributions(facts: Facts) -> Table:
    windows, tasks = facts["windows"], facts["tasks"]
    of: dict[str, Mapping[str, float | None]] = {
        "length of a window, s": windows["length_s"],
        "windows of a task": windows["windows_per_task"],
        "lifetime of a task, h": tasks["lifetime_hours"],
        **{f"{name} of a machine, %": {level: None if v is None else 100 * v for level, v in shares.items()}
           for name, shares in facts["machines"]["usage"]["shares"].items()},
    }  # fmt: skip
    rows = [
        (name, *(None if (v := levels.get(level)) is None else amount(v) for level in _LEVELS))
        for name, levels in of.items()
    ]
    return Table(("percentiles", *_LEVELS[:-1], "most"), tuple(row for row in rows if any(row[1:])))


def _missing_fields(facts: Facts) -> Table:
    lacks = facts["quality"]["lacks"]
    rows = tuple(
        (table, name, share, _reason(table, name, lacks))
        for table, shares in facts["missing"].items()
        for name, share in shares.items()
        if share > 0 and (table == "usage" or null_means(table, name) is None)
    )
    return Table(("table", "column", "missing", "reason"), rows, frozenset({"missing"})).known()


def _reason(table: str, column: str, lacks: Sequence[str]) -> str | None:
    if table == "usage" and column in lacks:
        return "the source never has it"
    meaning = null_means(table, column)
    return meaning and f"null {meaning}"


def _events(facts: Facts) -> Table:
    of = {kind: {row["event"]: row for row in facts[kind]["types"]} for kind in ("events", "collections")}
    names = dict.fromkeys([*of["events"], *of["collections"]])
    order = [name for name in s.codes_of(s.EventType) if name in names] + ["unknown"] * ("unknown" in names)
    counts = ("events", "before", "after", "synthesised")
    rows = tuple((name.lower().replace("_", " "), *(of[kind].get(name, {}).get(k, 0) if of[kind] else None
                                                   for kind in of for k in counts))
                 for name in order)  # fmt: skip
    columns = ("event", "of tasks", "before", "after", "synth.", "of coll.", "before", "after", "synth.")
    return Table(columns, rows).known()


def _synthesised(facts: Facts) -> Table:
    rows = tuple(
        (of, reason.lower().replace("_", " "), n)
        for of, kind in (("tasks", "events"), ("collections", "collections"))
        for reason, n in facts[kind]["synthesised"].items()
    )
    return Table(("synthesised", "reason", "events"), rows)


def _collections(facts: Facts) -> Table:
    found = facts["collections"]
    kinds = {"jobs": "jobs", "alloc sets": "alloc_sets", "in an alloc set": "in_alloc_sets",
             "without a task": "without_tasks"}  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (_band(size["from"], size["to"]), size["collections"]) for size in found["sizes"] if found["with_tasks"]
    ]
    rows += [(name, found[key]) for name, key in kinds.items() if found["known"]]
    return Table(("collections", "number"), tuple(rows))


def _band(low: int, high: int | None) -> str:
    if high == 1:
        return "of 1 task"
    return f"of {low:,} or more tasks" if high is None else f"of {low:,} to {high:,} tasks"


def _machines(facts: Facts) -> list[Table]:
    machines = facts["machines"]
    capacities = tuple((c["cpu"], c["memory"], c["machines"]) for c in machines["capacities"])
    events = tuple((e["event"].lower(), e["events"], e["before"]) for e in machines["events"])
    return [
        Table(("CPU", "memory", "machines"), capacities, caption="Capacities, the most common first"),
        Table(("event", "machines", "before"), events, caption="Events"),
    ]


def _faults(facts: Facts) -> Table:
    q = facts["quality"]
    rows: list[tuple[Cell, ...]] = [
        *(("rejected lines", r["reason"], r["lines"], f"{r['file']}:{r['line']:,}") for r in q["rejects"]),
        *(("damaged file, left out", d["reason"], None, d["file"]) for d in q["damaged"]),
        *(("known defect, accepted", name, n, None) for name, n in q["defects"].items()),
        *(("repeated rows, dropped", name, n, None) for name, n in q["duplicates"].items() if n),
        *(("file given twice, read once", None, None, file) for file in q["repeated_files"]),
    ]
    return Table(("fault", "kind", "number", "first in"), tuple(rows)).known()
