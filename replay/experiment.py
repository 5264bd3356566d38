"""Runs a replay experiment on a dataset: fold, judge, draw, write, record; run again, it finds its work done."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from tqdm import tqdm

from reclaim.data.errors import ConfigError
from reclaim.data.schema import MACHINES
from reclaim.data.store import Dataset, remove_left_behind, replaced_folder, write_json
from reclaim.features.registry import FEATURE_NAMES
from reclaim.features.store import FeatureSet
from reclaim.features.targets import HORIZONS_S, OOM_DEFINITION
from reclaim.replay import figures, margins
from reclaim.replay.cell import Cell, lay_out_cell, set_margins
from reclaim.replay.fold import fold_dataset
from reclaim.replay.metrics import METRICS
from reclaim.replay.openloop import oracle
from reclaim.replay.record import record_margins
from reclaim.replay.report import ReplayReport, render_page
from reclaim.replay.scoring import Bootstrap
from reclaim.replay.timeline import EVENT_DEFINITION, OVER_DEFINITION
from reclaim.replay.units import UnitSums, write_units
from reclaim.training.calibrate import Budgets, guarded_reservations
from reclaim.training.estimators.base import Estimator
from reclaim.training.estimators.registry import ESTIMATORS, build_estimator

if TYPE_CHECKING:
    from reclaim.training.bundle import Bundle

log = logging.getLogger(__name__)

RESULTS: Final = "results.json"
PAGE: Final = "report.html"
RESULTS_VERSION: Final = 3
"""Raised when the meaning of the results changes; results of another version are not taken for this one's."""

ONLINE: Final = "-online"
"""Behind the name of an estimator: under margins that follow the workload (``estimators.online``)."""
_LIMIT: Final = "limit"
_ORACLE: Final = "oracle"


@dataclass(frozen=True)
class ReplayConfig:
    """How a replay is run."""

    horizon_s: int = 3_600
    """The horizon a reservation is promised for, in seconds; one of ``features.targets.HORIZONS_S``."""
    estimators: tuple[str, ...] = (
        "borg", "percentile", "max-nsigma-percentile", "moving-max", "autopilot-percentile", "vpa", "koordinator",
        "limit",
    )  # fmt: skip
    """Estimators without a model, by their names in ``training.estimators.registry``; learned ones come as bundles. By
    default Borg's, Resource Central's, the EuroSys'21 study's, Autopilot's, VPA's and Koordinator's."""
    budgets: Budgets = field(default_factory=Budgets)
    """Shares of validation task-windows that may violate, for the baseline and the aggressive margin."""
    by_group: bool = False
    """Whether each group of tasks (tier, age) keeps the budgets for itself, with a margin of its own."""
    online: bool = True
    """Whether learned estimators are replayed a second time, under margins that follow the workload."""
    draws: int = 1_000
    """Bootstrap resamples behind each interval."""
    confidence: float = 0.95
    """Share of the resamples within an interval."""
    seed: int = 1
    """Seed of the bootstrap."""

    def __post_init__(self) -> None:
        if self.horizon_s not in HORIZONS_S:
            raise ConfigError(f"horizon_s must be one of {HORIZONS_S} seconds, got {self.horizon_s}")
        unknown = sorted(set(self.estimators) - set(ESTIMATORS))
        if unknown or len(set(self.estimators)) != len(self.estimators):
            known = ", ".join(sorted(ESTIMATORS))
            raise ConfigError(f"estimators must be different ones of {known}, got {', '.join(self.estimators)}")
        if self.draws < 1:
            raise ConfigError(f"draws must be at least 1, got {self.draws}")
        if not 0 < self.confidence < 1:
            raise ConfigError(f"confidence must be between 0 and 1, got {self.confidence}")


def run_margins(
    dataset: Path,
    out: Path,
    config: ReplayConfig | None = None,
    *,
    bundles: Mapping[str, Bundle] | None = None,
    tracking: bool = True,
    progress: bool = True,
) -> ReplayReport:
    """Replay every estimator at every margin (EuroSys'15, Figure 12) and write what came of it.

    Margins are set on the validation rows, everything reported is measured on the test rows. Writes ``results.json``,
    ``report.html`` and the figures into ``out``, all at once. Where ``out`` holds the same experiment already, nothing
    is computed again; only the tracking runs are made up for where they are missing.

    Parameters
    ----------
    dataset : Path
        An ingested dataset with its features.
    out : Path
        Folder to write; must not exist, or hold this very experiment.
    config : ReplayConfig or None
        The defaults when None.
    bundles : mapping of str to Bundle or None
        Learned estimators by the name they go under.
    tracking : bool
        Whether to record the runs in MLflow.
    progress : bool
        Whether to show progress on a terminal.

    Raises
    ------
    ConfigError
        There is no dataset or no features, they have no test period, or ``out`` holds something else.
    HistoryTooShortError
        The validation or the test period is shorter than the horizon.
    """
    config, bundles = config or ReplayConfig(), bundles or {}
    reserved = {_ORACLE, *ESTIMATORS, *(name + ONLINE for name in bundles)} & set(bundles)
    if reserved:
        raise ConfigError(f"a learned estimator cannot be called {', '.join(sorted(reserved))}: the name is taken")
    opened, features = Dataset.open(dataset), FeatureSet.open(dataset)
    if features.role == "train":
        raise ConfigError(
            f"{dataset}: its features were built with split.role=train, so it has no test period; build them for one: "
            f"`reclaim features {dataset} --set split.role=all`, or `test` where it was never trained on"
        )
    inputs = _inputs(opened, features, config, bundles)
    results = _already_there(out, inputs)
    seconds: dict[str, float] = {}
    if already_there := results is not None:
        remove_left_behind(out)
        log.info("%s: holds this experiment already, nothing to do", out)
    else:
        measured, units = _measure(opened, features, config, bundles, seconds, progress=progress)
        results = measured | {"inputs": inputs}
        with replaced_folder(out) as folder:
            write_folder(results, folder)
            write_units(units, folder)
    report = ReplayReport(folder=out, results=results, already_there=already_there, seconds=seconds)
    if tracking:
        record_margins(report)
    return report


def write_folder(results: Mapping[str, Any], folder: Path) -> None:
    """Write the results, their figures and the page into an existing folder."""
    drawn = {}
    for name, draw in figures.FIGURES.items():
        drawn[name] = figures.save_figure(draw(results), folder / name)[1]
    (folder / PAGE).write_text(render_page(results, drawn), encoding="utf-8")
    write_json(folder / RESULTS, results)


def _inputs(
    dataset: Dataset, features: FeatureSet, config: ReplayConfig, bundles: Mapping[str, Bundle]
) -> dict[str, Any]:
    """Return all that decides the results."""
    return {
        "experiment": "margins",
        "results_version": RESULTS_VERSION,
        "dataset_fingerprint": dataset.fingerprint,
        "features_fingerprint": features.fingerprint,
        "config": json.loads(json.dumps(asdict(config))),
        "bundles": {name: _bundle_facts(bundle, dataset) for name, bundle in sorted(bundles.items())},
    }


def _bundle_facts(bundle: Bundle, dataset: Dataset) -> dict[str, Any]:
    # a model is named by what it answers: its files may differ from one saving to the next
    asked = np.random.default_rng(0).random((256, len(FEATURE_NAMES)), np.float32)
    answered = bundle.forecaster.predict(asked)
    digest = hashlib.sha256(answered.quantiles.tobytes() + answered.oom_probability.tobytes())
    return {
        "kind": bundle.kind,
        "plans": {name: [asdict(basis) for basis in plan] for name, plan in bundle.plans.items()},
        "answers_sha256": digest.hexdigest(),
        "pipeline_version": bundle.pipeline_version,
        "trained_on_fingerprint": bundle.dataset_fingerprint,
        "trained_on_this_dataset": _trained_on(bundle, dataset),
    }


def _trained_on(bundle: Bundle, dataset: Dataset) -> bool:
    several = (source["fingerprint"] for source in bundle.trained.get("datasets", ()))
    return dataset.fingerprint in {bundle.dataset_fingerprint, *several}


def _already_there(out: Path, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the results at ``out`` if they are those of this very experiment; None where there is nothing yet."""
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
        results = json.loads(path.read_text())
        there = results["inputs"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the results of a replay; {remedy}") from error
    if there != inputs:
        differing = sorted(key for key in inputs.keys() | there.keys() if inputs.get(key) != there.get(key))
        raise ConfigError(f"{out}: holds a replay that differs in {', '.join(differing)}; {remedy}")
    return dict(results)


def estimator_makers(
    config: ReplayConfig, bundles: Mapping[str, Bundle], mean_limit: tuple[float, ...]
) -> dict[str, Callable[[], Estimator]]:
    """Return what makes each bare estimator afresh; a learned one is as served, but for the horizon asked.

    ``mean_limit`` is that of the dataset replayed: what is large or small there. A model of several datasets, whose
    units differ, knows no sizes.
    """
    makers: dict[str, Callable[[], Estimator]] = {
        name: partial(
            b.bare_estimator,
            horizon_s=config.horizon_s,
            mean_limit=b.mean_limit if np.isnan(b.mean_limit).all() else mean_limit,
        )
        for name, b in bundles.items()
    }
    return makers | {name: partial(build_estimator, name) for name in config.estimators}


def _measure(
    dataset: Dataset,
    features: FeatureSet,
    config: ReplayConfig,
    bundles: Mapping[str, Bundle],
    seconds: dict[str, float],
    *,
    progress: bool,
) -> tuple[dict[str, Any], UnitSums]:
    """Return the results, without the inputs, and the sums behind them; ``seconds`` gets each estimator's wall time."""
    makers = estimator_makers(config, bundles, features.mean_limit)
    history, bases = fold_dataset(dataset, features, config.horizon_s, makers, seconds, progress=progress)
    table = dataset.table("machines")
    machines = {name: table[name].to_numpy() for name in MACHINES.names}
    cell = lay_out_cell(history, machines)
    bootstrap = Bootstrap(config.draws, config.seed, config.confidence)
    drawn = _drawn(config, bundles)
    judged = []
    for name, both in tqdm(bases.items(), desc="judging", unit="estimator", disable=None if progress else True):
        started = time.perf_counter()
        if name == _LIMIT:
            judged.append(margins.judge_fixed(name, _LIMIT, both["baseline"], cell, bootstrap=bootstrap))
        else:
            kind = "learned" if name in bundles else "statistical"
            made = set_margins(both, cell, config.budgets, by_group=config.by_group)
            ways = {name: guarded_reservations(both, history.windows, made.margins)}
            if name in bundles and config.online:
                ways[name + ONLINE] = margins.follow(both, cell, made.margins, config.budgets, config.horizon_s)
            judged += [
                margins.judge(way, kind, made, held, cell, bootstrap=bootstrap, drawn=way in drawn)
                for way, held in ways.items()
            ]
        seconds[f"judge/{name}"] = time.perf_counter() - started
    judged.append(margins.judge_fixed(_ORACLE, _ORACLE, oracle(history), cell, bootstrap=bootstrap))
    units = UnitSums(
        unit=np.unique(history.windows.collection_id[cell.test]),
        unseen=cell.unseen_units,
        sums={(e["name"], margin): sums for e in judged for margin, sums in e.pop("units").items()},
    )
    results = {
        "dataset": _dataset_facts(dataset, features, cell),
        "definitions": _definitions(config),
        "command": _command(dataset, config, bundles),
        "timeline": margins.cell_over_time(cell),
        "estimators": judged,
    }
    return results, units


def _drawn(config: ReplayConfig, bundles: Mapping[str, Bundle]) -> list[str]:
    """Return the estimators of the figure over time: the learned ones and Borg's, or the first two there are."""
    others = [name for name in config.estimators if name != _LIMIT]
    chosen = [*bundles, *(name for name in others if name == "borg")]
    return chosen if len(chosen) > 1 else list(dict.fromkeys([*chosen, *others]))[:2]


def _command(dataset: Dataset, config: ReplayConfig, bundles: Mapping[str, Bundle]) -> str:
    """Return what repeats this on a command line; which model stands for a bundle, only its user knows."""
    changed = {
        one.name: getattr(config, one.name)
        for one in fields(config)
        if getattr(config, one.name) != getattr(ReplayConfig(), one.name)
    }
    words = ["reclaim replay margins", dataset.path.name, "--out DIR"]
    words += ["--model NAME@ALIAS" for _ in bundles] or ["--no-model"]
    words += [f"--set {k}={_setting(v)}" for k, v in changed.items() if not isinstance(v, Budgets)]
    if config.budgets != Budgets():
        words += [f"--set budgets.{k}={v}" for k, v in asdict(config.budgets).items()]
    return " ".join(words)


def _setting(value: object) -> str:
    return "'" + json.dumps(value) + "'" if isinstance(value, tuple) else str(value)


def _dataset_facts(dataset: Dataset, features: FeatureSet, cell: Cell) -> dict[str, Any]:
    manifest = dataset.manifest
    return {
        "name": manifest.get("name", dataset.path.name),
        "folder": dataset.path.name,
        "nature": manifest.get("nature", "not stated"),
        "trace": manifest.get("options", {}).get("trace", "not stated"),
        "lacks": list(manifest.get("lacks", [])),
        "fingerprint": dataset.fingerprint,
        "features_fingerprint": features.fingerprint,
        "task_windows": int(features.bucket_start[-1]),
        "test_task_windows": len(cell.test),
        "test_collections": len(cell.unseen_units),
        "unseen_collections": int(cell.unseen_units.sum()),
        "test_hours": cell.slots.count * cell.slots.slot_s / 3600,
        "machines": cell.slots.n_machines,
        "measured_by_mean": features.manifest["measured_by_mean"],
    }


def _definitions(config: ReplayConfig) -> dict[str, str]:
    budgets = config.budgets
    return {
        **{name: metric.meaning for name, metric in METRICS.items()},
        "what a reservation must cover": (
            f"Within the next {config.horizon_s} s: of CPU the largest 90th percentile of any window, capped at the "
            "limit; of memory the largest usage. Where the trace has neither, the mean of the window stands in."
        ),
        "margin": (
            "A share of the estimate that is added to it, per resource. It is the narrowest with which at most "
            f"{budgets.baseline:.3%} (baseline) or {budgets.aggressive:.3%} (aggressive) of the validation "
            "task-windows violate; medium reserves exactly half way between the two. Nothing is set on test rows."
        ),
        "online": (
            "Begins with the same margins on the first validation row and then follows the workload: as answers turn "
            "out violated or kept, each tier's margin moves so that the share violated stays at the budget. Unseen "
            "collections are among the tasks that it follows."
        ),
        "oracle": "Reserves exactly what will be used within the horizon; it sees the future and only bounds the rest.",
        "would-be out-of-memory event": EVENT_DEFINITION,
        "task over its reservation": OVER_DEFINITION,
        "out-of-memory label of the features (not used in these numbers)": OOM_DEFINITION,
        "interval": (
            f"{config.confidence:.0%} percentile interval of {config.draws} bootstrap resamples of whole collections, "
            f"seed {config.seed}."
        ),
        "age": "Time since the task's first window began: all that an estimator can have seen of it.",
    }
