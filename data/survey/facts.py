"""Computes the facts of a dataset from its files alone, with bounded memory; equal datasets give equal facts."""

from __future__ import annotations

from typing import Any, Final

from reclaim.data import schema as s
from reclaim.data.dataset import Dataset
from reclaim.data.survey import machines as survey_machines
from reclaim.data.survey import tasks as survey_tasks
from reclaim.data.survey import usage as survey_usage
from reclaim.data.survey.query import Tables, open_tables


def survey(dataset: Dataset) -> dict[str, Any]:
    """Return the facts of a dataset, ready for JSON.

    Shares are fractions of one; times are on the trace's clock, in the unit that a name ends with; resources are in the
    trace's unit, ``…_hours`` of them times hours. None means unknown.

    Returns
    -------
    dict
        ``head``, ``span``, ``tiers``, ``used_of_limits``, ``usage_of_limit``, ``timeline``, ``missing``, ``windows``,
        ``tasks``, ``events``, ``collections``, ``machines``, ``quality``.
    """
    with open_tables(dataset) as tables:
        span = survey_machines.span(tables)
        timeline = survey_machines.timeline(tables, span["first_us"], span["last_us"])
        survey_tasks.make_task_facts(tables)
        return {
            "head": _head(dataset),
            "span": span,
            "tiers": survey_usage.tiers(tables),
            "used_of_limits": survey_usage.used_of_limits(tables),
            "usage_of_limit": survey_usage.ratios(tables),
            "timeline": timeline,
            "missing": {table: survey_usage.nulls(tables, table) for table in _WITH_NULLS},
            "windows": {**survey_usage.lengths(tables), **survey_tasks.order(tables)},
            "tasks": {**survey_tasks.lives(tables), "oom_ends": survey_tasks.oom_ends(dataset),
                      "constrained": survey_tasks.constraints(tables)},
            "events": survey_tasks.events(tables),
            "collections": {**survey_tasks.collections(tables), **survey_tasks.events(tables, "collections")},
            "machines": {
                **survey_machines.machines(tables),
                "usage": survey_machines.machine_usage(tables),
                "of_capacity": survey_machines.of_capacity(timeline),
            },
            "quality": _quality(tables),
        }  # fmt: skip


_WITH_NULLS: Final = ("usage", "events", "collections", "machines", "machine_usage")
_COUNTED: Final = ("bytes", "rows", "rejects")
"""Amounts of a file in the manifest, which names it once for each time that it was read for a table."""


def _head(dataset: Dataset) -> dict[str, Any]:
    manifest = dataset.manifest
    read = {}
    for table in dict.fromkeys(entry["table"] for entry in manifest["inputs"]):
        entries = [entry for entry in manifest["inputs"] if entry["table"] == table]
        files: dict[str, dict[str, int]] = {}
        for entry in entries:
            known = files.setdefault(entry["file"], dict.fromkeys(_COUNTED, 0))
            known |= {name: max(known[name], entry[name]) for name in _COUNTED}
        read[table] = {"files": len(files), **{name: sum(known[name] for known in files.values()) for name in _COUNTED}}
    return {
        **{key: manifest[key] for key in ("name", "nature", "fingerprint", "counts")},
        "trace": manifest["options"]["trace"],
        "read": read,
    }


def _quality(tables: Tables) -> dict[str, Any]:
    """Return the faults of the input: rejected lines with an example each, damaged files, known defects."""
    manifest = tables.dataset.manifest
    example = f"min(struct_pack(f := {s.REJECT_FILE}, l := {s.REJECT_LINE})) AS first"
    rejects = tables.rows(
        f"SELECT {s.REJECT_REASON} AS reason, count(*) AS n, {example} FROM rejects GROUP BY 1 ORDER BY n DESC, 1"
    )
    return {
        "rejects": [{"reason": row["reason"], "lines": row["n"], "file": row["first"]["f"], "line": row["first"]["l"]}
                    for row in rejects],
        "damaged": [{"file": entry["file"], "reason": entry["reason"]} for entry in manifest["damaged"]],
        "defects": dict(sorted(manifest["defects"].items(), key=lambda kind: (-kind[1], kind[0]))),
        "duplicates": {k.removeprefix("duplicate_"): n for k, n in manifest["counts"].items() if k.startswith("dupl")},
        "repeated_files": manifest.get("repeated", []),
        **{key: manifest[key] for key in ("lacks", "extras", "notes")},
    }  # fmt: skip
