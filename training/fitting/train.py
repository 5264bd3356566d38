"""Runs the training job: features in; a fitted, calibrated, recorded and registered model out."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.core.files import content_sha256, working_folder
from reclaim.data.errors import ConfigError, ModelError
from reclaim.data.schema import RESOURCES
from reclaim.features.registry import FEATURE_NAMES, PIPELINE_VERSION
from reclaim.features.seen import SEEN, sample_windows
from reclaim.features.targets import TARGETS
from reclaim.training.bundle import FORMAT, Bundle, load_bundle, output_names, pipeline_of, price_facts, save_bundle
from reclaim.training.estimators.registry import LEARNED
from reclaim.training.evaluation.importance import columns_alone, importance_figure, permutation_importance
from reclaim.training.evaluation.model_card import OOM_NOTE, model_card
from reclaim.training.evaluation.scores import Scores, coverage_figure, overall, reliability_figure
from reclaim.training.fitting.devices.on_ray import fit_on_ray
from reclaim.training.fitting.held_out import mean_limit_of, own_price_notes, validation_rows
from reclaim.training.fitting.learner import FITTING, Fitted, Learner, OnEpoch, learner_of, unlearned_notes
from reclaim.training.fitting.oom_fit import fit_oom
from reclaim.training.fitting.sources import Source, open_sources
from reclaim.training.fitting.trained import (
    Scored,
    Trained,
    add_machines,
    calibrate_fit,
    compare_with_builtin,
    score,
)
from reclaim.training.models.oom_model import OomModel
from reclaim.training.settings import NO_PRIOR, TrainConfig
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.references import BUILTIN, find_model

log = logging.getLogger(__name__)

_REPORT: Final = "report.json"
SCORES: Final = "scores.json"
"""File of a run with every score of validation and test rows, of tiers and ages, too (``scores.Scores``)."""
_COMPARED: Final = {"oom": ("average_precision", "brier_skill")} | dict.fromkeys(
    TARGETS, ("log_loss", "pinball_over_usage", "coverage_error")
)
"""Scores at the promised horizon that are metrics of the run; thousands would make MLflow's comparison useless."""


@dataclass(frozen=True)
class TrainReport:
    """Result of a training run.

    Attributes
    ----------
    run_id : str
        MLflow's.
    model, version : str
        Registered name and version.
    estimator : str
    horizon_s : int
    prices : dict of margin name to dict
        ``value`` and ``by_tier`` of each price (``margins.price.Price``), by resource.
    violation, reclaimed : dict of margin name to dict of resource to float
        The share of validation rows that violate, and the share of limits reclaimed, at that price: None for a resource
        without limits.
    scores, test_scores : dict
        See ``scores.Scores``, without those of tiers and ages; of validation and of test rows. Nothing is chosen by the
        latter, which are empty where there is no test period.
    rows : dict
        ``train``, ``valid`` and ``test``: rows used.
    datasets : list of dict
        Of each dataset, in the order of their fingerprints: ``name``, ``fingerprint``, its ``train`` and ``valid``
        rows, and what of it was kept from them (``sources.Source.split_facts``).
    notes : list of str
        What a reader of the numbers must know.
    seconds : float
        Time the run took.
    reused : bool
        Whether a finished run of the same settings and data was found and nothing was done.
    champion : str or None
        Version of the model that is served after the run; None for none.
    """

    run_id: str
    model: str
    version: str
    estimator: str
    horizon_s: int
    prices: dict[str, dict[str, Any]]
    violation: dict[str, dict[str, float | None]]
    reclaimed: dict[str, dict[str, float | None]]
    scores: dict[str, Any]
    test_scores: dict[str, Any]
    rows: dict[str, int]
    datasets: list[dict[str, Any]]
    notes: list[str]
    seconds: float
    reused: bool = False
    champion: str | None = None


def run_training(
    datasets: Path | Sequence[Path],
    config: TrainConfig,
    *,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
    engine: Engine = HERE,
) -> TrainReport:
    """Fit, calibrate, record and register a model.

    Of several datasets the rows are put together: every row counts alike, so a dataset counts with all its rows.
    Each keeps its own periods; two parts of one trace whose times overlap are best ingested as one dataset, for the
    later rows of one may be trained on in the other.

    Run again with the same settings on the same data, it finds the finished run and does nothing, unless the files of
    that run or of its model are gone. Killed anywhere and run again, it continues from the last epoch, and ends the
    same.

    Of the processes that torchrun starts, the first calls this and each other one ``assist_training``. On Ray this
    process alone calls it; workers fit, and everything else is done here.

    Parameters
    ----------
    datasets : Path or sequence of Path
        A dataset folder with its features built, or several, in any order.
    config : TrainConfig
    force : bool
        Train even if a finished run exists.
    progress : callable or None
        Called with one line as each stage begins.
    engine : Engine
        ``local``: this process fits, with the others of torchrun where it started them. ``ray``: its workers fit one
        network together, as the processes of torchrun would, to the same bits.

    Raises
    ------
    ReclaimError
        There is no dataset or no features there; the message says which command makes them.
    ConfigError
        The device of the settings is not here, the registered model of that name is of another kind, a dataset is held
        out for tests or named twice, the engine does not fit this estimator, the settings have money and the mean limit
        that it is compared with is unknown, or the prior is a model of one cluster, or was trained or tuned on rows of
        a dataset that set prices or are tested.
    ModelError
        There is no such prior.
    TraceError
        Workers of Ray were lost too often.
    HistoryTooShortError
        The split leaves no rows to fit or to calibrate on.
    """
    started = time.perf_counter()
    say, learner = progress or log.info, learner_of(config.estimator)
    _check_engine(engine, learner, config.estimator)
    sources = open_sources(datasets if isinstance(datasets, Sequence) else [datasets])
    key = _key(sources, config)
    find_runs = partial(tracking.find_runs, config.experiment, tags={tracking.KEY_TAG: key})
    before = find_runs()
    checkpoints = _checkpoints(sources, key)
    busy = ConfigError(f"{checkpoints}: another process is running this training; wait for it")
    reused = None if force else _finished_report(before, say)
    if reused is not None:
        with learner.together(config, go=False):
            say(f"already trained: run {reused.run_id}")
        if checkpoints.exists():  # of a process that was killed once the run had ended
            with suppress(ConfigError), working_folder(checkpoints, busy):
                pass
        return _with_champion(reused)
    if engine.name == "local":
        learner.check(config)
    config.value.prices(mean_limit_of(sources), config.horizon_s)  # raises here rather than after the fit
    rows = validation_rows(sources, config.horizon_s)
    tracking.check_name(_model_name(config))
    with working_folder(checkpoints, busy):
        now = find_runs()
        if now != before and not force:  # of another process, which has ended this very training meanwhile
            reused = _finished_report(now, say)
        if reused is None:
            report = _fit_and_record(sources, config, key, rows, now, engine, started, say)
        else:
            report = reused
            with learner.together(config, go=False):
                say(f"already trained: run {reused.run_id}")
    with suppress(OSError):  # the checkpoint of another run may be next to it
        checkpoints.parent.rmdir()
    return _with_champion(report)


def _fit_and_record(
    sources: Sequence[Source], config: TrainConfig, key: str, rows: Sequence[NDArray[np.int64]],
    before: Sequence[tracking.RunRecord], engine: Engine, started: float, say: Callable[[str], object],
) -> TrainReport:  # fmt: skip
    """Fit, make ready and record, in the run that was cut off before, if any; return the report."""
    learner = learner_of(config.estimator)
    cut_off = [run.run_id for run in before if run.status != tracking.FINISHED]
    run_name = config.run_name(source.name for source in sources)
    with tracking.start_run(
        config.experiment, run_name, tags=_tags(sources, key), run_id=next(iter(cut_off), None)
    ) as run:
        run.log_params(config.settings())
        run.log_datasets([source.facts for source in sources], context="training")
        say(f"fitting the {config.estimator}")
        fitting = time.perf_counter()
        if engine.name == "ray":
            fitted = _fitted_on_ray(sources, config, key, engine.workers)
        else:
            with learner.together(config, go=True):
                fitted = learner.fit(sources, config, _checkpoints(sources, key))
        oom = fit_oom(sources, config.seed)
        fit_seconds = time.perf_counter() - fitting
        trained = _make_ready(fitted, oom, sources, rows, config, say)
        return _record(run, trained, sources, config, fit_seconds, started, say)


def _finished_report(runs: Sequence[tracking.RunRecord], say: Callable[[str], object]) -> TrainReport | None:
    """Return the report of the newest finished run whose model can still be read; None where there is none."""
    for run in runs:
        if run.status == tracking.FINISHED:
            try:
                report = TrainReport(**tracking.load_dict(run.run_id, _REPORT))
                load_bundle(tracking.fetch_bundle(f"{report.model}/{report.version}")[0])
            except ModelError as error:
                say(f"run {run.run_id} is finished, but its result is gone: {error}")
            else:
                return replace(report, reused=True)
    return None


def _make_ready(
    fitted: Fitted, oom: OomModel | None, sources: Sequence[Source], rows: Sequence[NDArray[np.int64]],
    config: TrainConfig, say: Callable[[str], object],
) -> Trained:  # fmt: skip
    """Return what was fitted, with its prices, its machines, and the comparison with the built-in model."""
    say("setting prices on the validation rows")
    trained = calibrate_fit(fitted, oom, sources, rows, config)
    if not LEARNED[config.estimator].portable:
        say("fitting the machines")
        trained = add_machines(trained, config)
    if config.against_builtin and learner_of(config.estimator).served and not config.value.known:
        trained = compare_with_builtin(trained, sources, config)
    return trained


def _record(
    run: tracking.Run, trained: Trained, sources: Sequence[Source], config: TrainConfig, fit_seconds: float,
    started: float, say: Callable[[str], object],
) -> TrainReport:  # fmt: skip
    """Score a model, record it in its run and register it; return the report."""
    say("scoring on validation and test rows")
    served = learner_of(config.estimator).served
    scored = score(trained, sources, config)
    name = _model_name(config)
    report = _report(run.run_id, name, trained, scored, sources, config)
    bundle = _bundle(trained, report, sources, config)
    say("recording and registering")
    _log_fit(run, trained, scored, report, fit_seconds)
    if served:  # trees are evaluated at every threshold of every row, which would take minutes
        _log_importance(run, trained, config.horizon_s)
    registered = _register(run, name, bundle)
    _log_scores(run, scored, config.horizon_s)
    report = replace(report, version=registered.version, seconds=time.perf_counter() - started)
    card = model_card(
        asdict(report), settings=config.settings(), test_scores=report.test_scores,
        probability=trained.first.calibration.to_dict(), refitted=trained.fitted.refitted is not None,
    )  # fmt: skip
    tracking.describe_version(registered, card)
    run.log_text(card, "model_card.md")
    run.log_dict(asdict(report), _REPORT)
    tracking.move_alias(registered, tracking.CANDIDATE)
    if not trained.worse and tracking.find_version(f"{name}@{tracking.CHAMPION}") is None:
        tracking.move_alias(registered, tracking.CHAMPION)
    return report


def _model_name(config: TrainConfig) -> str:
    """Return the name that a model of these settings is registered under."""
    return config.model_name + ("" if learner_of(config.estimator).served else f"-{config.estimator}")


def _with_champion(report: TrainReport) -> TrainReport:
    champion = tracking.find_version(f"{report.model}@{tracking.CHAMPION}")
    return replace(report, champion=champion.version if champion else None)


def recorded_report(model: str) -> TrainReport:
    """Return the report of the run that made ``name@alias`` or ``name/version``; ModelError where there is none."""
    return TrainReport(**tracking.load_dict(tracking.resolve_model(model).run_id, _REPORT))


def assists() -> bool:
    """Return whether torchrun started this process in addition to a first one, which records and reports."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["RANK"]) > 0


def assist_training(datasets: Sequence[Path], config: TrainConfig) -> None:
    """Fit the network along with ``run_training`` in the first process; arguments and errors as there.

    Nothing is recorded or written here. A learner that is not ``shared`` fits in the first process alone.
    """
    sources, learner = open_sources(datasets), learner_of(config.estimator)
    with learner.together(config, go=True) as go:
        if go and learner.shared:
            learner.fit(sources, config, _checkpoints(sources, _key(sources, config)))


def _check_engine(engine: Engine, learner: Learner, estimator: str) -> None:
    """Raise ConfigError where an engine does not fit a learner."""
    if engine.name == "processes" or (engine.name == "local" and engine.workers > 1):
        raise ConfigError(
            f"--engine {engine.name}, --workers {engine.workers}: a model is fitted by this process, by those of "
            "torchrun (`torchrun --nproc-per-node N -m reclaim train DATASET`), or by workers of `--engine ray`"
        )
    if engine.name == "ray" and not learner.shared:
        raise ConfigError(f"--engine ray: the {estimator} are fitted by one process; leave the engine out")
    if engine.name == "ray" and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("--engine ray starts its own workers; run it without torchrun")


def _fitted_on_ray(sources: Sequence[Source], config: TrainConfig, key: str, workers: int) -> Fitted:
    """Fit in the workers of Ray, which open the datasets, and a prior that is not in the package, by their paths."""
    if config.prior not in (BUILTIN, NO_PRIOR):
        config = replace(config, prior=str(find_model(config.prior).folder))
    fit = partial(_fit_along, [source.dataset.path.resolve() for source in sources], config, key)
    return fit_on_ray(fit, workers, device=config.fit.device, epochs=config.fit.epochs)


def _fit_along(paths: Sequence[Path], config: TrainConfig, key: str, on_epoch: OnEpoch | None) -> Fitted:
    """Fit in one worker of Ray, along with the others."""
    sources, learner = open_sources(paths), learner_of(config.estimator)
    learner.check(config)
    return learner.fit(sources, config, _checkpoints(sources, key), on_epoch=on_epoch)


def _key(sources: Sequence[Source], config: TrainConfig) -> str:
    """Return what two equal runs have in common."""
    data = [source.dataset.fingerprint for source in sources] + [source.features.fingerprint for source in sources]
    rests_on = learner_of(config.estimator).rests_on(sources, config)
    return content_sha256([config.settings(), *data, PIPELINE_VERSION, FORMAT, FITTING, rests_on])


def _checkpoints(sources: Sequence[Source], key: str) -> Path:
    return sources[0].dataset.home / "checkpoints" / key[:16]


def _oom_definition(sources: Sequence[Source]) -> str:
    return "; ".join(dict.fromkeys(str(source.features.manifest["oom_definition"]) for source in sources))


def _tags(sources: Sequence[Source], key: str) -> dict[str, str]:
    return {
        tracking.KEY_TAG: key,
        "dataset": ",".join(source.dataset.fingerprint for source in sources),
        "features": ",".join(source.features.fingerprint for source in sources),
        "pipeline_version": PIPELINE_VERSION,
        "oom_definition": _oom_definition(sources),
        "git_commit": tracking.git_commit() or "none",
    }


def _report(
    run_id: str, name: str, trained: Trained, scored: Scored, sources: Sequence[Source], config: TrainConfig
) -> TrainReport:
    """Return the report of a model that is not registered yet."""
    prior = trained.fitted.facts.get("prior")
    calibration, valid = trained.calibration, trained.valid
    return TrainReport(
        run_id=run_id,
        model=name,
        version="",
        estimator=config.estimator,
        horizon_s=config.horizon_s,
        prices={name: price_facts(price) for name, price in trained.prices.items()},
        violation={k: _by_resource(v) for k, v in calibration.violation.items()},
        reclaimed={k: _by_resource(v) for k, v in calibration.reclaimed.items()},
        scores=_without_nan(overall(scored.valid)),
        test_scores=_without_nan(overall(scored.test)),
        rows={"train": trained.fitted.facts["rows"], "valid": len(valid), "test": scored.n_test},
        datasets=[
            {
                "name": source.name,
                "nature": source.dataset.manifest.get("nature", "not stated"),
                "fingerprint": source.dataset.fingerprint,
                "train": k_train,
                "valid": k_valid,
                **source.split_facts,
            }
            for source, k_train, k_valid in zip(sources, trained.fitted.train_rows, valid.rows, strict=True)
        ],
        notes=[
            *unlearned_notes(sources, config.horizon_s),
            *calibration.notes,
            *(
                f"reclaims less of validation rows than the built-in model, {one}: the history is short, and "
                "the built-in model is served where there is no champion"
                for one in trained.worse
            ),
            *(
                f"not compared with the built-in model{'' if prior else ', nor mixed with it'}, which learned from "
                f"windows of {name}"
                for name in trained.builtin_saw
            ),
            *([_prior_note(prior, config)] if prior else []),
            *own_price_notes(valid, config, calibration),
            *trained.first.calibration.notes,
            *([f"{OOM_NOTE}{_oom_definition(sources)}"] if np.isfinite(valid.oom).any() else []),
        ],
        seconds=0.0,
    )


def _prior_note(prior: Mapping[str, Any], config: TrainConfig) -> str:
    shares = ", ".join(f"{25 * n} % {horizon_s} s ahead" for horizon_s, n in prior["quarters"].items() if n)
    return (
        f"the history is short ({prior['history_days']:.1f} days), so curves are in part those of {config.prior}, "
        f"which learned from other clusters: {shares}; train again when there is more, or with prior={NO_PRIOR}"
    )


def _bundle(trained: Trained, report: TrainReport, sources: Sequence[Source], config: TrainConfig) -> Bundle:
    fingerprints = [source.dataset.fingerprint for source in sources]
    of_tiers = trained.calibration.violation_by_tier
    return Bundle(
        kind=config.estimator,
        forecaster=trained.served,
        held_out=None if trained.fitted.refitted is None else trained.first,
        horizon_s=config.horizon_s,
        prices=trained.prices,
        dataset_fingerprint=fingerprints[0] if len(fingerprints) == 1 else content_sha256(fingerprints),
        mean_limit=trained.valid.mean_limit,
        machines=trained.machines,
        pipeline_version=pipeline_of(config.estimator),
        trained={
            "settings": dict(config.settings()),
            "datasets": [
                facts | {SEEN: sample_windows(source.features)}
                for facts, source in zip(report.datasets, sources, strict=True)
            ],
            "violation": report.violation,
            "violation_by_tier": {k: {tier: _by_resource(v) for tier, v in of.items()} for k, of in of_tiers.items()},
            "reclaimed": report.reclaimed,
            "oom_definition": _oom_definition(sources),
            "notes": report.notes,
            **trained.fitted.facts,
        },
    )


def _log_fit(run: tracking.Run, trained: Trained, scored: Scored, report: TrainReport, fit_seconds: float) -> None:
    """Log the course of the fit, the prices, and figures of the scores."""
    run.log_history(trained.fitted.history)
    run.log_metrics(
        {
            "price": {name: of["value"] for name, of in report.prices.items()},
            "violation": report.violation,
            "reclaimed": report.reclaimed,
            "fit_seconds": fit_seconds,
        }
    )
    run.log_figure(coverage_figure(scored.valid, trained.first.quantile_levels), "coverage.png")
    shown = {"as forecast": scored.raw_oom, "calibrated": scored.oom}
    run.log_figure(reliability_figure(shown, scored.label), "oom_reliability.png")


def _log_importance(run: tracking.Run, trained: Trained, horizon_s: int) -> None:
    importance = permutation_importance(
        trained.first, trained.valid.x, trained.valid.y, horizon_s=horizon_s, columns=columns_alone(FEATURE_NAMES)
    )
    run.log_figure(importance_figure(importance), "importance.png")
    run.log_dict(importance.to_dict(), "importance.json")


def _register(run: tracking.Run, name: str, bundle: Bundle) -> tracking.ModelVersion:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "bundle"
        save_bundle(bundle, place)
        return tracking.register_bundle(run, place, name, inputs=FEATURE_NAMES, outputs=output_names(bundle.forecaster))


def _log_scores(run: tracking.Run, scored: Scored, horizon_s: int) -> None:
    of_period = {"valid": scored.valid, "test": scored.test}
    run.log_dict(_without_nan(of_period), SCORES)
    run.log_metrics({period: _compared(of, horizon_s) for period, of in of_period.items()})


def _compared(scores: Scores, horizon_s: int) -> dict[str, dict[str, float]]:
    of = {name: scores.get(name, {}).get(f"{horizon_s}s", {}) for name in _COMPARED}
    return {name: {k: of[name][k] for k in kept if k in of[name]} for name, kept in _COMPARED.items()}


def _by_resource(values: tuple[float, ...]) -> dict[str, float | None]:
    return {r: v if math.isfinite(v) else None for r, v in zip(RESOURCES, values, strict=True)}


def _without_nan(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested scores as plain dictionaries, with None for what is not finite: JSON has no NaN."""
    return {
        name: _without_nan(v) if isinstance(v, Mapping) else v if math.isfinite(v) else None
        for name, v in scores.items()
    }
