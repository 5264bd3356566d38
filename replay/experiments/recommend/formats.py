"""Writes recommendations for programs: CSV, JSON, and the JSON of Robusta's KRR."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from reclaim.data.core.prose import counted
from reclaim.data.schema import COLLECTION_ID, RESOURCES
from reclaim.replay.experiment import Results
from reclaim.replay.experiments.recommend.lines import is_over

CSV_FILE: Final = "recommendations.csv"
JSON_FILE: Final = "recommendations.json"
KRR_FILE: Final = "krr.json"

_OF_WORKLOAD: Final = (
    "cluster", "namespace", "kind", "name", "container", "sidecar", COLLECTION_ID, "tasks", "running",
    "oom_kills", "autoscaler",
)  # fmt: skip
_OF_RESOURCE: Final = ("request", "limit", "recommended", "change", "reclaimable", "rule", "spread", "as_requested")
_OF_VIOLATION: Final = {"violation": "value", "violation_low": "low", "violation_high": "high"}

_SEVERITIES: Final = ("CRITICAL", "WARNING", "OK", "GOOD", "UNKNOWN")
"""KRR's, the worst first."""
_SEVERE: Final = {"cpu": (0.5, 0.25, 0.1), "memory": (500 * 2.0**20, 250 * 2.0**20, 100 * 2.0**20)}
"""Differences of request and recommendation from which on KRR calls one critical, a warning, or notable, in cores and
bytes (robusta_krr/core/models/severity.py)."""
_COSTS: Final = {"CRITICAL": 1.0, "WARNING": 0.7}
"""Fractions of a point that each subtracts from KRR's score."""


def write(results: Results, folder: Path) -> None:
    """Write all formats into an existing folder."""
    (folder / CSV_FILE).write_text(as_csv(results), encoding="utf-8")
    (folder / JSON_FILE).write_text(as_json(results), encoding="utf-8")
    (folder / KRR_FILE).write_text(as_krr_json(results), encoding="utf-8")


def records(results: Results) -> list[dict[str, Any]]:
    """Return one flat record per workload, without pictures."""
    found = []
    for line in results["workloads"]:
        record = {key: line[key] for key in _OF_WORKLOAD} | {"over": is_over(line)}
        for r in RESOURCES:
            record |= {f"{r}_{key}": line[r][key] for key in _OF_RESOURCE}
            record |= {f"{r}_{key}": line[r]["violation"][of] for key, of in _OF_VIOLATION.items()}
            record[f"{r}_windows"] = line[r]["violation"]["windows"]
            record[f"{r}_words"] = line[r]["words"]
        found.append(record)
    return found


def as_csv(results: Results) -> str:
    """Return one line per workload; unknown values are empty."""
    found = records(results)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(found[0]) if found else list(_OF_WORKLOAD), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _safe(value) for key, value in record.items()} for record in found)
    return out.getvalue()


def as_json(results: Results) -> str:
    """Return totals, estimators and one record per workload."""
    kept = {key: results[key] for key in ("hold_days", "budget", "totals", "test", "estimators", "left_out")}
    return json.dumps({**kept, "workloads": records(results)}, indent=2, allow_nan=False) + "\n"


def as_krr_json(results: Results) -> str:
    """Return the JSON that ``krr simple -f json`` prints, in cores and bytes where the dataset is.

    Numbers of our own are under ``reclaim`` in each scan, which programs for KRR ignore.
    """
    both = zip(results["workloads"], records(results), strict=True)
    scans = [_scan(line, record) for line, record in both if not record["over"]]
    cost = sum(_COSTS.get(scan["severity"], 0.0) for scan in scans)
    report = {
        "scans": scans,
        "score": int((len(scans) - cost) / len(scans) * 100) if scans else 0,
        "resources": list(RESOURCES),
        "description": f"reclaim recommend: requests for {counted(results['hold_days'], 'day')} ahead, set by the "
        "estimator that reclaimed most on the validation part of the history and judged on the test part",
        "strategy": {"name": "reclaim", "settings": {"hold_days": results["hold_days"], "budget": results["budget"]}},
        "errors": [],
        "clusterSummary": {},
        "config": {},
    }
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _scan(line: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    requests, limits = ({r: line[r][which] for r in RESOURCES} for which in ("request", "limit"))
    recommended = {r: _recommended(line, r) for r in RESOURCES}
    raised = {r: {"value": _raised(line, r), "severity": _severity(limits[r], _raised(line, r), r)} for r in RESOURCES}
    severities = [of[r]["severity"] for of in (recommended, raised) for r in RESOURCES]
    return {
        "object": {
            "cluster": line["cluster"],
            "name": line["name"],
            "container": line["container"] or "",
            "pods": [{"name": name, "deleted": False} for name in line["pods"]],
            "hpa": None,
            "namespace": line["namespace"] or "",
            "kind": line["kind"] or "",
            "allocations": {"requests": requests, "limits": limits, "info": {}},
            "warnings": ["HPADetected"] if line["autoscaler"] else [],
            "labels": {},
            "annotations": {},
        },
        "recommended": {
            "requests": recommended, "limits": raised, "info": {r: line[r]["words"] for r in RESOURCES},
        },
        "severity": min(severities, key=_SEVERITIES.index),
        "reclaim": record,
    }  # fmt: skip


def _recommended(line: Mapping[str, Any], r: str) -> dict[str, Any]:
    wanted = line[r]["recommended"]
    if line[r]["rule"] in ("unknown", "no request"):
        return {"value": "?", "severity": "UNKNOWN"}
    severity = "CRITICAL" if r == "memory" and line["oom_kills"] else _severity(line[r]["request"], wanted, r)
    return {"value": wanted, "severity": severity}


def _raised(line: Mapping[str, Any], r: str) -> float | None:
    """Return the limit to set: the current one, or the request where that is higher."""
    limit: float | None = line[r]["limit"]
    wanted: float | None = line[r]["recommended"]
    return wanted if limit is not None and wanted is not None and wanted > limit else limit


def _severity(present: float | None, wanted: float | None, r: str) -> str:
    """Return KRR's severity of a difference."""
    if present is None or wanted is None:
        return "GOOD" if present is None and wanted is None else "WARNING"
    above = [name for name, least in zip(_SEVERITIES, _SEVERE[r], strict=False) if abs(present - wanted) >= least]
    return above[0] if above else "GOOD"


def _safe(value: Any) -> Any:
    """Return a cell that a spreadsheet reads as text if it is text, whatever its first character."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def changes(results: Results) -> int:
    """Return the number of workloads of which a request is to change; one that is over has none to change."""
    return sum(_changed(line) for line in results["workloads"])


def _changed(line: Mapping[str, Any]) -> bool:
    return not is_over(line) and any(line[r]["recommended"] != line[r]["request"] for r in RESOURCES)


FORMATS: Final = {"csv": as_csv, "json": as_json, "krr-json": as_krr_json}
"""Texts for programs, by the name of the option."""
