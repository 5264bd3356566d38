"""Records a finished experiment in MLflow: a run of each contender under one of the whole experiment, with tags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from reclaim.data.core.files import content_sha256, locked_folder
from reclaim.replay.experiment import BY_MACHINE, ONLINE, Experiment, Results, rests_on
from reclaim.replay.report.page import ReplayReport
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.runs import FINISHED, DatasetFacts, RunRecord

TAG_INPUTS: Final = "inputs_sha256"
"""Tag that identifies everything that decided a run's results."""
TAG_PARENT: Final = "whole_experiment"
"""Tag of a run of one contender: id of the run of the whole experiment."""
TAG_WORDS: Final = "told_apart_by"
"""Tag of a run of one contender: names of the tags that distinguish it from its neighbours, with commas between
them."""
TAG_PLACE: Final = "place"
"""Tag of a run of one contender: its place in the table of the experiment, from 0."""
TAG_TASKS: Final = "estimator_of_tasks"
"""Tag of a run of a contender whose margins keep budgets of machines: the estimator of tasks that it rests on."""
_SHOWN_DIGITS: Final = 8
"""Digits of a fingerprint that follow the name of a dataset."""
_NOT_ALLOWED: Final = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow does not allow in the name of a metric or a parameter."""


def record(experiment: Experiment, report: ReplayReport) -> str:
    """Record a replay that is not recorded yet; returns the id of the run of the whole experiment.

    The store itself is searched for runs of the same inputs: an interrupted recording is completed, its last run
    included, and another store gets a recording of its own. Where the run of the whole experiment was deleted,
    everything is recorded again. A process that records the same folder is waited for.
    """
    with locked_folder(report.folder):
        return _record(experiment, report)


def _record(experiment: Experiment, report: ReplayReport) -> str:
    results = report.results
    shared = _shared_tags(results)
    before = tracking.find_runs(experiment.name, tags={TAG_INPUTS: shared[TAG_INPUTS]})
    # the oldest of several, and not by name, in which models stand in the order in which they were named
    wholes = {run.status == FINISHED: run.run_id for run in before if TAG_PARENT not in run.tags}
    whole = wholes.get(True) or _record_whole(experiment, report, shared, wholes.get(False))
    known = {run.name for run in before if run.status == FINISHED and run.tags.get(TAG_PARENT) == whole}
    cut_off = {run.name: run.run_id for run in before if run.status != FINISHED}
    for place, one in enumerate(experiment.runs(results)):
        if one.name in known:
            continue
        apart = {TAG_WORDS: ",".join(one.words), TAG_PLACE: str(place)}
        name = one.words.get("estimator", "")
        model = model_tags(results, name)
        if one.tags.get("kind") in BY_MACHINE:
            model[TAG_TASKS] = rests_on(name)
        tags = {**shared, **model, **one.tags, **one.words, **apart, TAG_PARENT: whole, tracking.PARENT: whole}
        with tracking.start_run(experiment.name, one.name, tags=tags, run_id=cut_off.get(one.name)) as run:
            run.log_params({**results["inputs"]["config"], **one.params})
            run.log_datasets([_dataset_input(results)], context="evaluation")
            run.log_metrics(one.metrics)
    return whole


def words_of(run: RunRecord) -> dict[str, str]:
    """Return ``Run.words`` of a recorded run."""
    return {name: run.tags[name] for name in run.tags.get(TAG_WORDS, "estimator,margin").split(",") if name in run.tags}


def dataset_of(run: RunRecord) -> tuple[str, str]:
    """Return name and fingerprint of the dataset of a recorded run."""
    return run.tags.get("dataset", "-"), run.tags.get("dataset_fingerprint", "")


def shown_datasets(runs: Sequence[RunRecord]) -> dict[str, str]:
    """Return the name of the dataset of each run, by run id: with its fingerprint where others have the same name."""
    of_name: dict[str, set[str]] = {}
    for run in runs:
        name, fingerprint = dataset_of(run)
        of_name.setdefault(name, set()).add(fingerprint)
    return {
        run.run_id: name if len(of_name[name]) == 1 else f"{name} ({fingerprint[:_SHOWN_DIGITS]})"
        for run in runs
        for name, fingerprint in [dataset_of(run)]
    }


def horizon_of(run: RunRecord) -> str:
    """Return the horizon of a recorded run, as ``3600 s``."""
    return f"{run.params.get('horizon_s', '-')} s"


def model_tags(results: Results, estimator: str) -> dict[str, str]:
    """Return which model a contender is, or depends on, under fixed or online margins; nothing where there is none."""
    models = results.get("models", {})
    facts = models.get(estimator.removesuffix(ONLINE), models.get(rests_on(estimator), {}))
    return {f"model.{name}": value for name, value in facts.items() if value is not None}


def _whole_name(experiment: Experiment, results: Results) -> str:
    """Return the name of the run of a whole experiment: what was replayed, and on what."""
    return " ".join([experiment.name, results["dataset"]["name"], *results.get("models", {})])


def _dataset_input(results: Results) -> DatasetFacts:
    dataset = results["dataset"]
    return DatasetFacts(dataset["name"], dataset["fingerprint"], dataset["folder"])


def _record_whole(experiment: Experiment, report: ReplayReport, tags: Mapping[str, str], cut_off: str | None) -> str:
    results = report.results
    with tracking.start_run(experiment.name, _whole_name(experiment, results), tags=tags, run_id=cut_off) as run:
        run.log_datasets([_dataset_input(results)], context="evaluation")
        inputs = {k: v for k, v in report.results["inputs"].items() if k != "version"}
        run.log_params(inputs | {"bundles": {_allowed(name): of for name, of in inputs["bundles"].items()}})
        if commit := tracking.git_commit():
            run.set_tags({"git_commit": commit})
        run.log_metrics({"seconds": {_allowed(part): of for part, of in report.seconds.items()}})
        for path in sorted(report.folder.iterdir()):
            if path.is_file():
                run.log_artifact(path)
        return run.run_id


def _allowed(name: str) -> str:
    """Return a name without what MLflow refuses: some characters, and parts of a path that lead elsewhere."""
    return "/".join(part for part in _NOT_ALLOWED.sub("", name).split("/") if part not in ("", ".", ".."))


def _shared_tags(results: Results) -> dict[str, str]:
    dataset = results["dataset"]
    return {
        TAG_INPUTS: content_sha256(results["inputs"]),
        "dataset": dataset["name"],
        "dataset_fingerprint": dataset["fingerprint"],
        "nature": dataset["nature"],
    }
