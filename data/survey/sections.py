"""Sections of a dataset's description: sentences from the template ``sections.txt``, tables from the facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, Final

import jinja2

from reclaim.data import schema as s
from reclaim.data.core import prose
from reclaim.data.core.prose import WIDTH, Section, amount, known
from reclaim.data.core.style import RESOURCE_TITLES
from reclaim.data.core.tables import Cell, Table
from reclaim.data.survey.usage import null_means

Facts = Mapping[str, Any]
_MIB: Final = 2**20
_SHORT: Final = {"cpu": "CPU", "memory": "mem."}


def title(facts: Facts) -> str:
    """Return the dataset's name and nature."""
    return f"{facts['head']['name']}: {facts['head']['nature']}"


def text(facts: Facts) -> str:
    """Return all sections as text."""
    head = title(facts)
    return f"{head}\n{'=' * min(len(head), WIDTH)}\n\n" + "\n".join(section.as_text() for section in sections(facts))


def sections(facts: Facts) -> list[Section]:
    """Return the sections of a dataset in reading order: the blocks of the template."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= _FILTERS
    template = environment.from_string((resources.files("reclaim.data.survey") / "sections.txt").read_text("utf-8"))
    shared = {"facts": facts, "windows": facts["windows"], "total": facts["windows"]["windows"],
              "counts": facts["head"]["counts"], "resources": s.RESOURCES}  # fmt: skip
    made = []
    for name, block in template.blocks.items():
        tables = _TABLES[name](facts) if name in _TABLES else {}
        said = "".join(block(template.new_context(shared | {"tables": tables})))
        made.append(Section(name.replace("_", " ").capitalize(), tuple(filter(None, said.splitlines())), tables,
                            _CAPTIONS.get(name, {})))  # fmt: skip
    return made


def _dataset(facts: Facts) -> dict[str, Table]:
    head, found = facts["head"], facts["span"]["tables"]
    rows: list[tuple[Cell, ...]] = []
    for table in (name for name in s.TABLES if name in head["read"] or head["counts"].get(name)):
        read = head["read"].get(table, {})
        ends = [f"{found[table][end] / 86_400e6:,.2f}" for end in ("first_us", "last_us")] if table in found else ["-"]
        size = max(round(read["bytes"] / _MIB, 2), 0.01) if read else None
        counts = (read.get("files"), size, read.get("rows"), read.get("rejects"), head["counts"].get(table))
        rows.append((table, *counts, " to ".join(ends)))
    columns = ("table", "files", "MiB", "lines taken", "rejected", "rows", "days on the trace's clock")
    return {"": Table(columns, tuple(rows))}


def _tiers(facts: Facts) -> dict[str, Table]:
    if not facts["tiers"]:
        return {}
    columns = ["tier", "tasks", "windows", "hours"]
    columns += [f"{_SHORT[r]} {kind}" for r in s.RESOURCES for kind in ("limit", "usage", "used")]
    rows: list[tuple[Cell, ...]] = []
    for t in facts["tiers"]:
        shares = (t[r][key] for r in s.RESOURCES for key in ("limit_share", "usage_share", "usage_of_limit"))
        rows.append((t["tier"], t["tasks"], t["windows"], amount(t["task_hours"]), *shares))
    return {"": known(Table(tuple(columns), tuple(rows), frozenset(columns[4:])))}


def _usage_over_limit(facts: Facts) -> dict[str, Table]:
    tables = {}
    for r, groups in facts["usage_of_limit"].items():
        if groups and facts["windows"]["windows"]:
            columns = ("tier", "windows", *groups[0]["percentiles"], "above limit", "largest")
            rows = tuple((g["tier"], g["windows"], *g["percentiles"].values(), g["share_above_1"], g["largest"])
                         for g in groups)  # fmt: skip
            tables[RESOURCE_TITLES[r]] = Table(columns, rows, frozenset(columns[2:]))
    return tables


def _cell_over_time(facts: Facts) -> dict[str, Table]:
    over_time, shares = facts["timeline"], facts["machines"]["of_capacity"]
    rows: list[tuple[Cell, ...]] = []
    for r in s.RESOURCES:
        for kind in ("usage", "limit", "capacity"):
            if values := over_time[f"{r}_{kind}"]:
                least, mean, most = (amount(v) for v in (min(values), sum(values) / len(values), max(values)))
                rows.append((f"{RESOURCE_TITLES[r]} {kind}", least, mean, most, shares[r].get(kind)))
    columns = ("sum over the cell", "least", "mean", "most", "of capacity")
    return {"": known(Table(columns, tuple(rows), frozenset(columns[-1:])))} if rows else {}


def _missing_fields(facts: Facts) -> dict[str, Table]:
    lacks = facts["quality"]["lacks"]
    rows = tuple((name, share, _reason(name, lacks)) for name, share in facts["missing"]["usage"].items() if share > 0)
    return {"": known(Table(("column of usage", "missing", "why"), rows, frozenset({"missing"})))} if rows else {}


def _reason(column: str, lacks: Sequence[str]) -> str | None:
    if column in lacks:
        return "the source never has it"
    meaning = null_means("usage", column)
    return meaning and f"null {meaning}"


def _unexplained(shares: Mapping[str, float], table: str) -> list[tuple[str, float]]:
    """Return the columns with nulls that have no meaning, each with its share of them."""
    return [(name, share) for name, share in shares.items() if share > 0 and null_means(table, name) is None]


def _events(facts: Facts) -> dict[str, Table]:
    of = {kind: {row["event"]: row for row in facts[kind]["types"]} for kind in ("events", "collections")}
    names = dict.fromkeys([*of["events"], *of["collections"]])
    order = [name for name in vars(s.EventType) if name in names] + ["unknown"] * ("unknown" in names)
    counts = ("events", "before", "after", "synthesised")
    rows = tuple((name.lower().replace("_", " "), *(of[kind].get(name, {}).get(k, 0) if of[kind] else None
                                                   for kind in of for k in counts))
                 for name in order)  # fmt: skip
    columns = ("event", "of tasks", "before", "after", "synth.", "of coll.", "before", "after", "synth.")
    return {"": known(Table(columns, rows))} if names else {}


def _collections(facts: Facts) -> dict[str, Table]:
    if not facts["collections"]["with_tasks"]:
        return {}
    rows = tuple((_band(size["from"], size["to"]), size["collections"]) for size in facts["collections"]["sizes"])
    return {"": Table(("tasks", "collections"), rows)}


def _band(low: int, high: int | None) -> str:
    return f"{low:,} or more" if high is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _machines(facts: Facts) -> dict[str, Table]:
    if not facts["machines"]["distinct"]:
        return {}
    rows = tuple((c["cpu"], c["memory"], c["machines"]) for c in facts["machines"]["capacities"])
    return {"": Table(("CPU", "memory", "machines"), rows)}


_TABLES: Final[Mapping[str, Callable[[Facts], dict[str, Table]]]] = {
    "dataset": _dataset, "tiers": _tiers, "usage_over_limit": _usage_over_limit, "cell_over_time": _cell_over_time,
    "missing_fields": _missing_fields, "events": _events, "collections": _collections, "machines": _machines,
}  # fmt: skip
"""Section → its tables by heading."""
_CAPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "tiers": {"tier_shares": "Tasks, their hours, limits and usage, divided among the priority tiers."},
    "usage_over_limit": {"usage_of_limit": "Windows by the share of their limit that they use, by tier."},
    "cell_over_time": {
        "cell_over_time": "Mean usage and limits, summed over the cell, and the machines' capacity.",
        "starts_over_time": "Submissions, starts and ends over time.",
    },
    "missing_fields": {"missing_fields": "Share of rows without a value, by column."},
    "tasks": {"lifetimes": "Tasks by lifetime, first to last seen."},
    "events": {"event_types": "Events by type."},
}
"""Section → caption of each of its figures."""
_FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "number": prose.number,
    "duration": prose.duration,
    "counted": prose.counted,
    "percent": prose.percent,
    "part_of": prose.part_of,
    "counts": lambda counts: ", ".join(f"{n:,} {name}" for name, n in counts.items()),
    "heading": RESOURCE_TITLES.__getitem__,
    "seconds": lambda us: f"{us / 1e6:,.0f}",
    "summed": lambda tiers, resource, key: sum(t[resource][key] or 0.0 for t in tiers),
    "unexplained": _unexplained,
}
"""Filters of the template."""
