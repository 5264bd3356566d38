"""A dataset's facts in words and tables, section by section: what the text prints and the page shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from reclaim.data import schema as s
from reclaim.data.survey_usage import null_means
from reclaim.data.survey_words import WIDTH, Section, amount, counted, duration, known, number, part_of, percent
from reclaim.data.table import Cell, Table

_MIB: Final = 2**20
_SHORT: Final = {"cpu": "CPU", "memory": "mem."}
_HEADINGS: Final = {"cpu": "CPU", "memory": "Memory"}


def title(facts: Mapping[str, Any]) -> str:
    """Return what the dataset is, its nature included."""
    return f"{facts['head']['name']}: {facts['head']['nature']}"


def text(facts: Mapping[str, Any]) -> str:
    """Return all sections as text."""
    head = title(facts)
    return f"{head}\n{'=' * min(len(head), WIDTH)}\n\n" + "\n".join(section.as_text() for section in sections(facts))


def sections(facts: Mapping[str, Any]) -> list[Section]:
    """Return the sections of a dataset in the order they are read."""
    return [make(facts) for make in _SECTIONS]


def _dataset(facts: Mapping[str, Any]) -> Section:
    head, found = facts["head"], facts["span"]["tables"]
    rows: list[tuple[Cell, ...]] = []
    for table in (name for name in s.TABLES if name in head["read"] or head["counts"].get(name)):
        read = head["read"].get(table, {})
        ends = [f"{found[table][end] / 86_400e6:,.2f}" for end in ("first_us", "last_us")] if table in found else ["-"]
        size = max(round(read["bytes"] / _MIB, 2), 0.01) if read else None
        told = (read.get("files"), size, read.get("rows"), read.get("rejects"), head["counts"].get(table))
        rows.append((table, *told, " to ".join(ends)))
    times = facts["span"]
    machines = facts["machines"]["distinct"] or facts["windows"]["machines"]
    lines = [
        f"Read as {head['trace']}; fingerprint {head['fingerprint']}.",
        f"{counted(head['counts']['tasks'], 'task')} in {counted(facts['collections']['distinct'], 'collection')}, "
        f"{counted(facts['windows']['windows'], 'window')} of usage, {counted(machines, 'machine')}.",
    ]
    if found:
        first, last = (f"{times[end] / 1e6:,.0f} s" for end in ("first_us", "last_us"))
        lines.append(
            f"Time, by {next(iter(found))}: {duration(times['hours'])}, from {first} to {last} on the trace's clock."
        )
    columns = ("table", "files", "MiB", "lines taken", "rejected", "rows", "days on the trace's clock")
    return Section("Dataset", tuple(lines), {"": Table(columns, tuple(rows))})


def _tiers(facts: Mapping[str, Any]) -> Section:
    tiers = facts["tiers"]
    if not tiers:
        return Section("Tiers", ("No tasks.",))
    columns = ["tier", "tasks", "windows", "hours"]
    columns += [f"{_SHORT[r]} {kind}" for r in s.RESOURCES for kind in ("limit", "usage", "used")]
    rows: list[tuple[Cell, ...]] = []
    for t in tiers:
        shares = (t[r][key] for r in s.RESOURCES for key in ("limit_share", "usage_share", "usage_of_limit"))
        rows.append((t["tier"], t["tasks"], t["windows"], amount(t["task_hours"]), *shares))
    lines = [f"{_HEADINGS[r]}: {_whole(tiers, r)}" for r in s.RESOURCES if facts["windows"]["windows"]]
    if not facts["windows"]["windows"]:
        lines.append("No usage: tiers are told of tasks alone.")
    else:
        lines.append(
            "Hours are of tasks in their windows. Limit and usage are each tier's share of the whole, integrated over "
            "time; used is usage over limit."
        )
    if all(t["tier"] == "unknown" for t in tiers):
        lines.append("The source has no tiers.")
    if inside := facts["windows"]["in_alloc"]:
        share = percent(inside / facts["windows"]["windows"])
        lines.append(f"{share} of the windows are of tasks inside an alloc instance: its own windows stand for them in "
                     "sums of limits and usage.")  # fmt: skip
    table = known(Table(tuple(columns), tuple(rows), frozenset(columns[4:])))
    caption = "How tasks, their hours, limits and usage divide among the priority tiers."
    return Section("Tiers", tuple(lines), {"": table}, {"tier_shares": caption})


def _whole(tiers: Sequence[Mapping[str, Any]], r: str) -> str:
    limit, usage = (sum(t[r][key] or 0.0 for t in tiers) for key in ("limit_hours", "usage_hours"))
    told = [
        f"limits of {number(limit)}" if limit else "no limits",
        f"usage of {number(usage)}" if usage else "no usage",
    ]
    return " and ".join(told) + (", in the trace's unit times hours." if limit or usage else ".")


def _ratios(facts: Mapping[str, Any]) -> Section:
    if not facts["windows"]["windows"]:
        return Section("Usage over limit", ("No usage.",))
    tables = {}
    for r, groups in facts["usage_of_limit"].items():
        if groups:
            levels = tuple(groups[0]["percentiles"])
            columns = ("tier", "windows", *levels, "above limit", "largest")
            rows = tuple((g["tier"], g["windows"], *g["percentiles"].values(), g["share_above_1"], g["largest"])
                         for g in groups)  # fmt: skip
            tables[_HEADINGS[r]] = Table(columns, rows, frozenset(columns[2:]))
    lines = [
        "Mean usage of a window over the limit in force; percentiles over windows, to a tenth of a percent and up to "
        "ten times the limit."
    ]
    lines += [f"{_HEADINGS[r]}: no window has both." for r, groups in facts["usage_of_limit"].items() if not groups]
    return Section("Usage over limit", tuple(lines), tables,
                   {"usage_of_limit": "How many windows use how much of their limit, by tier."})  # fmt: skip


def _over_time(facts: Mapping[str, Any]) -> Section:
    over_time, shares = facts["timeline"], facts["machines"]["of_capacity"]
    rows: list[tuple[Cell, ...]] = []
    for r in s.RESOURCES:
        for kind in ("usage", "limit", "capacity"):
            if values := over_time[f"{r}_{kind}"]:
                least, mean, most = (amount(v) for v in (min(values), sum(values) / len(values), max(values)))
                rows.append((f"{_HEADINGS[r]} {kind}", least, mean, most, shares[r].get(kind)))
    lines = [f"{over_time['points']:,} steps of {over_time['step_s']:,} s; sums over the cell, in the trace's units."]
    if facts["windows"]["windows"]:
        lines[0] += (
            " A window counts in each step with the share of it that it covers; unknown values count as nothing."
        )
    if not rows:
        lines = ["Neither usage nor limits nor machines over time."]
    captions = {"cell_over_time": "Mean usage and limits, summed over the cell, and what the machines supply.",
                "starts_over_time": "Submissions, starts and ends over time."}  # fmt: skip
    columns = ("sum over the cell", "least", "mean", "most", "of capacity")
    table = known(Table(columns, tuple(rows), frozenset(columns[-1:])))
    return Section("Cell over time", tuple(lines), {"": table} if rows else {}, captions)


def _windows(facts: Mapping[str, Any]) -> Section:
    w = facts["windows"]
    total = w["windows"]
    if not total:
        return Section("Windows", ("No usage.",))
    lengths, per_task = w["length_s"], w["windows_per_task"]
    lines = [
        f"Length: {part_of(w['exact'], total)} last exactly 300 s, {part_of(w['shorter'], total)} less, "
        f"{part_of(w['longer'], total)} more; shortest {number(lengths['p0'])} s, median {number(lengths['p50'])} s, "
        f"longest {number(lengths['p100'])} s.",
        f"Gaps: {part_of(w['gaps'], total)} begin after a gap since the task's window before"
        + (f", {w['gaps_between_runs']:,} of them across a restart" if w["gaps_between_runs"] else "")
        + (
            f"; {number(w['missing_hours'])} h missing in {counted(w['tasks_with_gaps'], 'task')}, the longest gap "
            f"{duration(w['longest_gap_hours'])}."
            if w["gaps"]
            else "."
        ),
        f"Overlaps: {part_of(w['overlapping'], total)} begin before the task's windows before have ended.",
        f"Limits differ from the window before {w['limit_changes']:,} times."
        + (f" Restarts: {w['restarts']:,}, of {counted(w['tasks_restarted'], 'task')}." if w["restarts"] else ""),
        f"Per task: median {number(per_task['p50'])} windows, 5 % have {number(per_task['p5'])} or fewer, the most is "
        f"{number(per_task['p100'])}.",
        f"Without a CPU limit {part_of(w['no_cpu_limit'], total)}, without a memory limit "
        f"{part_of(w['no_memory_limit'], total)}, without a tier {part_of(w['no_tier'], total)}.",
    ]
    if w["before_zero"]:
        lines.append(f"{part_of(w['before_zero'], total)} begin before time 0.")
    return Section("Windows", tuple(lines))


def _missing(facts: Mapping[str, Any]) -> Section:
    lacks = facts["quality"]["lacks"]
    rows: list[tuple[Cell, ...]] = []
    lines = []
    for table, shares in facts["missing"].items():
        gone = {name: share for name, share in shares.items() if share > 0}
        if table == "usage":
            rows = [(name, share, _why(table, name, lacks)) for name, share in gone.items()]
        elif gone := {name: share for name, share in gone.items() if null_means(table, name) is None}:
            lines.append(f"In {table}: {', '.join(f'{name} {percent(share)}' for name, share in gone.items())}.")
    if not facts["missing"]["usage"]:
        lines.insert(0, "No usage." + (f" This source never has {', '.join(lacks)}." if lacks else ""))
    elif not rows:
        lines.insert(0, "Every column of usage is there in every row.")
    tables = (
        {"": known(Table(("column of usage", "missing", "why"), tuple(rows), frozenset({"missing"})))} if rows else {}
    )
    return Section(
        "Missing fields", tuple(lines), tables, {"missing_fields": "Share of rows without a value, by column."}
    )


def _why(table: str, column: str, lacks: Sequence[str]) -> str | None:
    if column in lacks:
        return "the source never has it"
    meaning = null_means(table, column)
    return meaning and f"null {meaning}"


def _tasks(facts: Mapping[str, Any]) -> Section:
    t, total = facts["tasks"], facts["head"]["counts"]["tasks"]
    if not total:
        return Section("Tasks", ("No tasks.",))
    lived = t["lifetime_hours"]
    lines = []
    if lived["p50"] is not None:
        lines.append("Lifetime, first to last seen in windows or events: " + ", ".join(
            f"{'longest' if k == 'p100' else k} {duration(v)}" for k, v in lived.items()) + ".")  # fmt: skip
    if facts["head"]["counts"]["events"]:
        lines += [
            f"Usage without events: {part_of(t['usage_without_events'], total)}; events without usage: "
            f"{part_of(t['events_without_usage'], total)}.",
            f"Limits change {t['limit_changes']:,} times by events, in "
            f"{part_of(t['tasks_with_limit_changes'], total)}; the most in one task is {t['most_limit_changes']:,}.",
        ]
    if constrained := t["constrained"]["tasks"]:
        relations = ", ".join(f"{n:,} {name}" for name, n in t["constrained"]["relations"].items())
        lines.append(f"Placement constraints: {part_of(constrained, total)} have some ({relations}).")
    return Section("Tasks", tuple(lines), figures={"lifetimes": "Tasks by lifetime, first to last seen."})


def _events(facts: Mapping[str, Any]) -> Section:
    of = {kind: {row["event"]: row for row in facts[kind]["types"]} for kind in ("events", "collections")}
    names = dict.fromkeys([*of["events"], *of["collections"]])
    if not names:
        return Section("Events", ("No events, of tasks or of collections.",))
    order = [name for name in vars(s.EventType) if name in names] + ["unknown"] * ("unknown" in names)
    counts = ("events", "before", "after", "synthesised")
    rows = tuple((name.lower().replace("_", " "), *(of[kind].get(name, {}).get(k, 0) if of[kind] else None
                                                   for kind in of for k in counts))
                 for name in order)  # fmt: skip
    columns = ("event", "of tasks", "before", "after", "synth.", "of coll.", "before", "after", "synth.")
    lines = ["Before and after: outside the trace's time. Synth.: records that the trace's makers put in or mark as "
             "incomplete (missing_type)."]  # fmt: skip
    for kind, who in (("events", "tasks"), ("collections", "collections")):
        if why := facts[kind]["synthesised"]:
            lines.append(f"Synthesised, of {who}: " + ", ".join(f"{n:,} {name}" for name, n in why.items()) + ".")
    return Section("Events", tuple(lines), {"": known(Table(columns, rows))}, {"event_types": "Events by type."})


def _collections(facts: Mapping[str, Any]) -> Section:
    c = facts["collections"]
    lines = [
        f"{counted(c['distinct'], 'collection')}, {c['with_tasks']:,} with tasks, the largest of {c['largest']:,}."
    ]
    if c["told"]:
        lines.append(f"{c['told']:,} have events of their own: {counted(c['jobs'], 'job')}, "
                     f"{counted(c['alloc_sets'], 'alloc set')}; {c['in_alloc_sets']:,} run in an alloc set, "
                     f"{c['without_tasks']:,} have no task here.")  # fmt: skip
    if not c["with_tasks"]:
        return Section("Collections", tuple(lines))
    rows = tuple((_band(size["from"], size["to"]), size["collections"]) for size in c["sizes"])
    return Section("Collections", tuple(lines), {"": Table(("tasks", "collections"), rows)})


def _band(low: int, high: int | None) -> str:
    return f"{low:,} or more" if high is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _machines(facts: Mapping[str, Any]) -> Section:
    m, over_time, used = facts["machines"], facts["timeline"]["machines"], facts["machines"]["usage"]
    lines, tables = [], {}
    if m["distinct"]:
        came = ", ".join(f"{e['event']} {e['events']:,} ({e['before']:,} before the trace)" for e in m["events"])
        lines.append(
            f"{counted(m['distinct'], 'machine')} of {m['kinds']:,} capacities (as last told). Events: {came}."
        )
        if over_time:
            lines.append(f"In service: {over_time[0]:,.0f} at first, {over_time[-1]:,.0f} at last, between "
                         f"{min(over_time):,.0f} and {max(over_time):,.0f}.")  # fmt: skip
        rows = tuple((c["cpu"], c["memory"], c["machines"]) for c in m["capacities"])
        tables[""] = Table(("CPU", "memory", "machines"), rows)
        if m["kinds"] > len(rows):
            lines.append(f"The {len(rows)} most common capacities:")
    elif seen := facts["windows"]["machines"]:
        lines.append(f"No machine events; usage names {counted(seen, 'machine')}.")
    else:
        lines.append("No machines are told of.")
    if names := m["attributes"]["names"]:
        lines.append(f"{counted(names, 'attribute')} told of {counted(m['attributes']['machines'], 'machine')}.")
    if used["rows"]:
        shares = "; ".join(f"{name} median {percent(p['p50'])}, p95 {percent(p['p95'])}, most {percent(p['p100'])}"
                           for name, p in used["shares"].items() if p["p50"] is not None)  # fmt: skip
        lines.append(
            f"Usage of whole machines: {used['rows']:,} rows of {counted(used['machines'], 'machine')}: {shares}."
        )
    return Section("Machines", tuple(lines), tables)


def _quality(facts: Mapping[str, Any]) -> Section:
    q = facts["quality"]
    lines = [f"Repeated rows dropped: {', '.join(f'{n:,} {what}' for what, n in q['duplicates'].items())}."]
    if not q["rejects"]:
        lines.append("No line was rejected.")
    lines += [
        f"Rejected: {r['lines']:,} × {r['reason']}, first in {r['file']} line {r['line']:,}." for r in q["rejects"]
    ]
    lines += [f"Given more than once, read once: {file}." for file in q["repeated_files"]]
    lines += [f"Damaged and left out: {d['file']} ({d['reason']})." for d in q["damaged"]] or ["No file was damaged."]
    lines += [f"Known defect, taken all the same: {n:,} × {name}." for name, n in q["defects"].items()]
    if q["lacks"]:
        lines.append(f"The source never has {', '.join(q['lacks'])}.")
    lines += [
        f"Columns of this trace alone, in {table}: {', '.join(names)}." for table, names in q["extras"].items() if names
    ]
    lines += [f"Note: {note.rstrip('.')}." for note in q["notes"]]
    return Section("Quality", tuple(lines))


_SECTIONS: Final[tuple[Callable[[Mapping[str, Any]], Section], ...]] = (
    _dataset, _tiers, _ratios, _over_time, _windows, _missing, _tasks, _events, _collections, _machines, _quality
)  # fmt: skip
