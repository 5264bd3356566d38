"""Runs an experiment on a dataset: measures, draws, writes and records it, unless its results exist already."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.core.files import remove_left_behind, replaced_folder
from reclaim.data.core.nested import as_set, flatten
from reclaim.data.dataset import Dataset
from reclaim.data.errors import ConfigError
from reclaim.data.schema import RESOURCES
from reclaim.features.feature_set import FeatureSet
from reclaim.features.registry import N_FEATURES
from reclaim.replay.experiment import (
    ONLINE,
    ORACLE,
    Experiment,
    Measured,
    Results,
    Source,
)
from reclaim.replay.open_loop.bootstrap import FEW
from reclaim.replay.report import figures
from reclaim.replay.report.page import PAGE, ReplayReport, render_page
from reclaim.replay.runs.record import record
from reclaim.replay.runs.unseen import judged_on
from reclaim.replay.settings import ComparisonConfig
from reclaim.training.estimators.registry import ESTIMATORS, LEARNED
from reclaim.training.tracking.references import BUILTIN
from reclaim.training.tracking.runs import git_commit

if TYPE_CHECKING:
    from reclaim.training.bundle import Bundle
    from reclaim.training.tracking.references import ModelLocation

log = logging.getLogger(__name__)

RESULTS: Final = "results.json"


def run_experiment(
    experiment: Experiment,
    dataset: Path,
    out: Path,
    config: ComparisonConfig | None = None,
    *,
    bundles: Mapping[str, Bundle] | None = None,
    tracking: bool = True,
    engine: Engine = HERE,
) -> ReplayReport:
    """Run an experiment and write ``results.json``, ``report.html``, its figures and its own files.

    All files appear at once. Where ``out`` holds the same experiment already, nothing is computed again; missing
    tracking runs are recorded.

    Parameters
    ----------
    experiment : Experiment
        See ``catalogue.load_experiment``.
    dataset : Path
        An ingested dataset with its features.
    out : Path
        Folder to write; must not exist, or hold the same experiment.
    config : ComparisonConfig or None
        One of ``experiment.config``; its defaults when None.
    bundles : mapping of str to Bundle or None
        Learned estimators by name, see ``by_name``.
    tracking : bool
        Whether to record the runs in MLflow.
    engine : Engine
        Runs the jobs; the results do not depend on it.

    Raises
    ------
    ConfigError
        The dataset or its features are missing or have no test period, a learned estimator was trained or tuned on
        some of it, or ``out`` holds something else.
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    config, bundles = config or experiment.config(), bundles or {}
    assert isinstance(config, experiment.config), f"{experiment.name} takes a {experiment.config.__name__}"
    reserved = {ORACLE, *ESTIMATORS, *(name + ONLINE for name in (*ESTIMATORS, *bundles))} & set(bundles)
    if reserved:
        raise ConfigError(f"a learned estimator cannot be called {', '.join(sorted(reserved))}: the name is taken")
    opened, features = Dataset.open(dataset), FeatureSet.open(dataset)
    if features.role == "train":
        raise ConfigError(
            f"{dataset}: its features were built with split.role=train, so it has no test period; build them with one, "
            f"`reclaim features {dataset} --set split.role=all`, and train again; or with `test` if no model was "
            f"trained on it"
        )
    bundles = {name: judged_on(name, bundle, features) for name, bundle in bundles.items()}
    inputs = _inputs(experiment, opened, features, config, bundles)
    results = _already_there(out, inputs)
    seconds: dict[str, float] = {}
    if already_there := results is not None:
        remove_left_behind(out)
        log.info("%s: holds this experiment already, nothing to do", out)
    else:
        with replaced_folder(out) as folder:  # before anything is measured: fails here if the place cannot be written
            source = Source(opened, features, bundles, seconds, engine=engine)
            measured = experiment.measure(source, config)
            made = {
                **measured.results,
                "dataset": _dataset_facts(opened, features) | measured.results.get("dataset", {}),
                "definitions": _with_few_collections(measured),
                "settings": source.settings,
                "models": {name: _model_facts(bundle) for name, bundle in bundles.items()},
                "command": _command(experiment, opened, config, bundles),
                "made_with": _made_with(bundles),
                "inputs": inputs,
            }
            if experiment.publish is not None:
                made = experiment.publish(made)
            results = json.loads(json.dumps(made, allow_nan=False))  # equal to what is read back from the file
            write_folder(experiment, results, folder, measured.write)
    report = ReplayReport(folder=out, results=results, already_there=already_there, seconds=seconds)
    if tracking:
        record(experiment, report)
    return report


def by_name(bundles: Sequence[Bundle]) -> dict[str, Bundle]:
    """Return learned estimators by the names that a replay gives them, in the order given.

    ``reclaim/2`` for a registered model; the name of its folder for another, the path as given where several folders
    share it; the kind for one that was not loaded.

    Raises
    ------
    ConfigError
        Two are the same model.
    """
    labels = [bundle.kind if bundle.origin is None else bundle.origin.label for bundle in bundles]
    named: dict[str, Bundle] = {}
    folders: dict[Path, str] = {}
    for label, bundle in zip(labels, bundles, strict=True):
        of = bundle.origin
        name = label if of is None or of.registered or labels.count(label) == 1 else str(Path(of.source))
        if of is not None and not of.registered:  # one folder may be named by several paths
            name = folders.setdefault(of.folder, name)
        if name in named:
            sources = [b.origin.source for b in (named[name], bundle) if b.origin is not None]
            raise ConfigError(f"{' and '.join(sources) or label}: both are {name}; name models that differ")
        named[name] = bundle
    return named


def write_folder(experiment: Experiment, results: Results, folder: Path, write: Callable[[Path], None] | None) -> None:
    """Write results, figures, page and the experiment's own files into an existing folder."""
    drawn = {}
    for name, draw in experiment.figures.items():
        figure = draw(results)
        if figure is not None:
            drawn[name] = figures.save_figure(figure, folder / name)[1]
    (folder / PAGE).write_text(render_page(experiment, results, drawn), encoding="utf-8")
    (folder / RESULTS).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")  # in the order of the page
    if write is not None:
        write(folder)


def _with_few_collections(measured: Measured) -> dict[str, str]:
    """Return the definitions, with one about few collections where intervals depend on few."""
    definitions, count = dict(measured.definitions), measured.results.get("dataset", {}).get("test_collections")
    if "interval" not in definitions or count is None or count >= FEW:
        return definitions
    why = f"The test period has {count}, and intervals rest on how they differ. Of fewer than {FEW} "
    return definitions | {"few collections": why + "they come out too narrow; of 1 alone there are none."}


def _inputs(
    experiment: Experiment,
    dataset: Dataset,
    features: FeatureSet,
    config: ComparisonConfig,
    bundles: Mapping[str, Bundle],
) -> dict[str, Any]:
    """Return all inputs that determine the results, as they are read back from a file."""
    inputs = {
        "experiment": experiment.name,
        "version": experiment.version,
        "dataset_fingerprint": dataset.fingerprint,
        "features_fingerprint": features.fingerprint,
        "config": asdict(config),
        "bundles": {name: _bundle_facts(bundle, dataset) for name, bundle in sorted(bundles.items())},
    }
    return dict(json.loads(json.dumps(inputs)))


def _bundle_facts(bundle: Bundle, dataset: Dataset) -> dict[str, Any]:
    from reclaim.training.bundle import price_facts  # already loaded

    # a model is identified by its answers: its files may differ from one saving to the next
    asked = np.random.default_rng(0).random((256, N_FEATURES), np.float32)
    digest = hashlib.sha256()
    for forecaster in (bundle.forecaster, *([] if bundle.held_out is None else [bundle.held_out])):
        answered = forecaster.predict(asked)
        digest.update(answered.quantiles.tobytes() + answered.oom_probability.tobytes())
    return {
        "kind": bundle.kind,
        "prices": {name: price_facts(price) for name, price in bundle.prices.items()},
        "answers_sha256": digest.hexdigest(),
        "machines": {str(h): [asdict(curve) for curve in of] for h, of in sorted(bundle.machines.items())},
        "mean_limit": [limit if math.isfinite(limit) else None for limit in bundle.mean_limit],
        "learned_until_us": bundle.learned_until_us,
        "pipeline_version": bundle.pipeline_version,
        "trained_on_fingerprint": bundle.dataset_fingerprint,
        "trained_on_this_dataset": _trained_on(bundle, dataset),
    }


def _model_facts(bundle: Bundle) -> dict[str, str | None]:
    """Return which model it was; None for facts that are unknown because it was not loaded."""
    origin, kind = bundle.origin, {"kind": bundle.kind}
    if origin is None:
        return {**kind, **dict.fromkeys(("name", "version", "run_id", "reference"))}
    known = {"name": origin.name, "version": origin.version, "run_id": origin.run_id or None}
    return {**kind, **known, "reference": origin.source}


def _trained_on(bundle: Bundle, dataset: Dataset) -> bool:
    several = (source["fingerprint"] for source in bundle.trained.get("datasets", ()))
    return dataset.fingerprint in {bundle.dataset_fingerprint, *several}


def _already_there(out: Path, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the results at ``out`` if they are of the same inputs; None where there are none yet."""
    if not out.exists():
        return None
    remedy = "choose another folder or remove it"
    if not out.is_dir():
        raise ConfigError(f"{out}: exists and is no folder; {remedy}")
    path = out / RESULTS
    if not path.is_file():
        if any(out.iterdir()):
            raise ConfigError(f"{out}: exists and holds no {RESULTS}; {remedy}")
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        there = {**results["inputs"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the results of a replay; {remedy}") from error
    if there != inputs:
        own, other = ({**of, **flatten({"config": of.get("config", {})}), "config": None} for of in (inputs, there))
        differing = sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
        if "experiment" in differing:  # an older release's settings have other names
            differing = ["experiment"]
        raise ConfigError(f"{out}: holds a replay that differs in {', '.join(differing)}; {remedy}")
    return dict(results)


def _command(experiment: Experiment, dataset: Dataset, config: ComparisonConfig, bundles: Mapping[str, Bundle]) -> str:
    """Return the command that repeats the experiment with the same versions of its models."""
    default = flatten(asdict(experiment.config()))
    words = [f"reclaim {experiment.words}", shlex.quote(dataset.folder_name), "--out DIR"]
    of = [bundle.origin for bundle in bundles.values()]
    words += [f"--model {_reference(origin)}" for origin in of] or ["--no-model"]
    words += [f"--set {k}={shlex.quote(as_set(v))}" for k, v in flatten(asdict(config)).items() if v != default.get(k)]
    return " ".join(words)


def _reference(origin: ModelLocation | None) -> str:
    if origin is None:
        return "NAME@ALIAS"
    if origin.builtin:
        return BUILTIN  # not in a registry
    return origin.label if origin.registered else shlex.quote(origin.source)


def _dataset_facts(dataset: Dataset, features: FeatureSet) -> dict[str, Any]:
    manifest = dataset.manifest
    return {
        "name": manifest.get("name", dataset.folder_name),
        "folder": dataset.folder_name,
        "nature": manifest.get("nature", "not stated"),
        "trace": manifest.get("options", {}).get("trace", "not stated"),
        "lacks": list(manifest.get("lacks", [])),
        "fingerprint": dataset.fingerprint,
        "features_fingerprint": features.fingerprint,
        "task_windows": int(features.bucket_start[-1]),
        "measured_by_mean": features.manifest["measured_by_mean"],
        "judged": [r for r, mean in zip(RESOURCES, features.mean_limit, strict=True) if math.isfinite(mean)],
    }


def _made_with(bundles: Mapping[str, Bundle]) -> dict[str, str | None]:
    """Return the versions of packages that affect the numbers, and the commit of the working folder."""
    packages = dict.fromkeys(["reclaim", "numpy", *(p for b in bundles.values() for p in LEARNED[b.kind].packages)])
    return {name: version(name) for name in packages} | {"git_commit": git_commit()}
