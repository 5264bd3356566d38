"""Puts a finished replay on record: one MLflow run per estimator and margin, under one run for the whole experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from reclaim.data.schema import RESOURCES
from reclaim.data.store import content_sha256
from reclaim.replay.paired import RECLAIMED, VIOLATION, Difference, Paired
from reclaim.replay.report import ReplayReport
from reclaim.replay.units import UNITS, read_units
from reclaim.training import tracking

EXPERIMENT: Final = "margins"
"""Name of the MLflow experiment."""

FINISHED: Final = "FINISHED"
TAG_INPUTS: Final = "inputs_sha256"
"""Tag that ties a run to all that decided its results."""
TAG_PARENT: Final = "whole_experiment"
"""Tag of a run of one estimator and margin: id of the run of the whole experiment."""
STATISTICAL: Final = "statistical"
COMPARED: Final = ("learned", STATISTICAL)
"""Kinds of estimators that are measured by each other; the limit and the oracle are the ends of the scale."""
_MLFLOW_PARENT: Final = "mlflow.parentRunId"


def record_margins(report: ReplayReport) -> str:
    """Record a replay where it is not on record yet; returns the id of the run of the whole experiment.

    The store itself is asked which runs of these inputs it holds, so a recording that was cut off is completed, and
    one into another store is made anew.
    """
    results = report.results
    shared = _shared_tags(results)
    known = {
        run.name: run.run_id
        for run in tracking.find_runs(EXPERIMENT, tags={TAG_INPUTS: shared[TAG_INPUTS]})
        if run.status == FINISHED
    }
    whole = known.get(EXPERIMENT) or _record_whole(report, shared)
    beside = _against_best(report)
    for estimator in results["estimators"]:
        for margin, measured in estimator["results"].items():
            name = f"{estimator['name']}/{margin}"
            if name not in known:
                tags = shared | {"estimator": estimator["name"], "kind": estimator["kind"], "margin": margin}
                with tracking.start_run(
                    EXPERIMENT, name, tags=tags | {TAG_PARENT: whole, _MLFLOW_PARENT: whole}
                ) as run:
                    run.log_params(results["inputs"]["config"] | {"margin_share": estimator["margins"].get(margin, {})})
                    run.log_metrics(_numbers(measured))
                    against = beside.get((estimator["name"], margin), {})
                    run.log_metrics({"against_best": {r: _difference(d) for r, (_, d) in against.items()}})
                    run.set_tags({f"against_best.{r}": f"{d.verdict} than {o}" for r, (o, d) in against.items()})
    return whole


def _record_whole(report: ReplayReport, tags: Mapping[str, str]) -> str:
    with tracking.start_run(EXPERIMENT, EXPERIMENT, tags=tags) as run:
        run.log_params({k: v for k, v in report.results["inputs"].items() if k != "results_version"})
        if commit := tracking.git_commit():
            run.set_tags({"git_commit": commit})
        run.log_metrics({"seconds": report.seconds})
        for path in sorted(report.folder.iterdir()):
            if path.is_file():
                run.log_artifact(path)
        return run.run_id


def _shared_tags(results: Mapping[str, Any]) -> dict[str, str]:
    dataset = results["dataset"]
    return {
        TAG_INPUTS: content_sha256(results["inputs"]),
        "dataset": dataset["name"],
        "dataset_fingerprint": dataset["fingerprint"],
        "nature": dataset["nature"],
    }


def _against_best(report: ReplayReport) -> dict[tuple[str, str], dict[str, tuple[str, Difference]]]:
    """Return, by estimator and margin, the difference to the best statistical other one per resource, and its name."""
    path = report.folder / UNITS
    if not path.is_file():
        return {}
    units = read_units(path)
    config = report.results["inputs"]["config"]
    how = {name: config[name] for name in ("draws", "seed", "confidence")}
    found: dict[tuple[str, str], dict[str, tuple[str, Difference]]] = {}
    judged = [e for e in report.results["estimators"] if e["kind"] in COMPARED]
    for margin in dict.fromkeys(margin for e in judged for margin in e["results"]):
        kinds = {e["name"]: e["kind"] for e in judged if margin in e["results"]}
        paired = Paired({name: units.sums[name, margin] for name in kinds}, **how)
        statistical = [name for name, kind in kinds.items() if kind == STATISTICAL]
        for name in kinds:
            for r, resource in enumerate(RESOURCES):
                opponent = paired.best_against(name, statistical, r)
                if opponent is not None:
                    of_one = found.setdefault((name, margin), {})
                    of_one[resource] = (opponent, paired.difference(name, opponent, r))
    return found


def _difference(difference: Difference) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, interval in ((RECLAIMED, difference.reclaimed), (VIOLATION, difference.violation)):
        numbers |= {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return numbers


def _numbers(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of one estimator at one margin, as ``cpu.violation_rate`` and so on."""
    numbers: dict[str, Any] = {"oom": measured["oom"]}
    for r in RESOURCES:
        numbers[r] = {m: of[r]["value"] for m, of in measured["all"].items()}
        numbers[r] |= {f"{m}_{end}": of[r][end] for m, of in measured["all"].items() for end in ("low", "high")}
        numbers[f"unseen.{r}"] = {m: of[r]["value"] for m, of in measured["unseen"].items()}
    return numbers
