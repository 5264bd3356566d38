"""Puts a finished replay on record: one MLflow run per estimator and margin, under one run for the whole experiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from reclaim.data.schema import RESOURCES
from reclaim.data.store import content_sha256
from reclaim.replay.report import ReplayReport
from reclaim.training import tracking

EXPERIMENT: Final = "margins"
"""Name of the MLflow experiment."""

FINISHED: Final = "FINISHED"
TAG_INPUTS: Final = "inputs_sha256"
"""Tag that ties a run to all that decided its results."""
TAG_PARENT: Final = "whole_experiment"
"""Tag of a run of one estimator and margin: id of the run of the whole experiment."""
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


def _numbers(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of one estimator at one margin, as ``cpu.violation_rate`` and so on."""
    numbers: dict[str, Any] = {"oom": measured["oom"]}
    for r in RESOURCES:
        numbers[r] = {m: of[r]["value"] for m, of in measured["all"].items()}
        numbers[r] |= {f"{m}_{end}": of[r][end] for m, of in measured["all"].items() for end in ("low", "high")}
        numbers[f"unseen.{r}"] = {m: of[r]["value"] for m, of in measured["unseen"].items()}
    return numbers
