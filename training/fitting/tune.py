"""Searches settings: fits each trial and judges it by its loss on validation rows."""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from reclaim.data.core.engine.workers import HERE, Engine
from reclaim.data.core.files import content_sha256, locked, write_text
from reclaim.data.errors import ConfigError, HistoryTooShortError, ModelError
from reclaim.features.registry import PIPELINE_VERSION
from reclaim.training.fitting.held_out import held_out, less_reclaimed, mean_limit_of, set_prices, validation_rows
from reclaim.training.fitting.learner import FITTING, Fitted, Objective, learner_of
from reclaim.training.fitting.sources import Source, open_sources
from reclaim.training.fitting.tune_space import (
    Ranges,
    as_toml,
    ranges_of,
    rounded,
    searchable,
    with_settings,
)
from reclaim.training.margins.calibrate import Calibration
from reclaim.training.settings import TrainConfig
from reclaim.training.tracking import runs as tracking
from reclaim.training.tracking.client import sqlite_uri

log = logging.getLogger(__name__)

EXPERIMENT: Final = "reclaim-tune"
_STEPS: Final = 10
"""Parts of a fit's schedule, at the ends of which trials are compared: epoch by epoch would set a short schedule's end
against the middle of a long one."""
_PRUNE_AFTER: Final = 3
"""Parts of the schedule in which no trial is stopped: while the rate climbs, the loss says little."""
_JUDGES: Final = 5
"""Trials that are completed before any is stopped early."""
_RANDOM: Final = 10
"""Trials at random places of the ranges, before their results choose the next (Optuna's own default)."""
_TRIAL_TAG: Final = "reclaim.tune.trial"
_COMPARED: Final = "compared"
"""Attribute of a study: number of the best trial, and where its settings reclaim less."""
_DONE: Final = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class TuneReport:
    """Result of a search.

    Attributes
    ----------
    run_id : str
        MLflow's, of the run above those of the trials.
    estimator : str
    trials, pruned, new : int
        Trials in all; of those, stopped early, or diverged; and made by this call.
    first_loss : float or None
        Validation loss of the first trial, that of the settings as given; None where it diverged, or one of them lies
        outside its range, so that no trial was of them.
    best_loss : float
    best : dict
        The searched settings of the best trial, by dotted name.
    less : list of str
        Where the best settings reclaim less of validation rows than those as given, at the same budget: a loss is of
        the whole curve, a budget of its tail.
    config_file, trials_file : str
        The best settings as TOML, and Optuna's record of the trials.
    seconds : float
    """

    run_id: str
    estimator: str
    trials: int
    pruned: int
    new: int
    first_loss: float | None
    best_loss: float
    best: dict[str, Any]
    less: list[str]
    config_file: str
    trials_file: str
    seconds: float

    def assignments(self) -> list[str]:
        """Return the best settings as words of ``reclaim train``."""
        return [word for name, value in self.best.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def tune(
    datasets: Sequence[Path],
    config: TrainConfig,
    *,
    trials: int,
    config_file: Path,
    held: Collection[str] = (),
    progress: Callable[[str], None] | None = None,
    at_once: int = 1,
    engine: Engine = HERE,
) -> TuneReport:
    """Search the settings of an estimator.

    Fits training rows and judges by validation rows, as ``run_training`` does; rows and targets of the test period are
    never read. The first trial is of the settings as they are given. Trials are in the folder of the first dataset
    (by fingerprint), as ``tune/<key>.db``, under a key of settings, data, ranges and code: killed anywhere and run
    again, the search continues after the last finished trial and ends the same; with more trials, it also continues.

    Parameters
    ----------
    datasets : sequence of Path
        Dataset folders with features.
    config : TrainConfig
        What is not searched stays as it is here.
    trials : int
        In all, with those of earlier calls.
    config_file : Path
        TOML to write, for ``reclaim train --config``.
    held : collection of str
        Dotted names of settings that stay as they are though the learner's ``space`` has them.
    progress : callable or None
        Called with one line as each stage begins.
    at_once : int
        Trials that are chosen before the results of any of them are known. What is tried depends on it; it is a part of
        the key.
    engine : Engine
        Runs these trials, those of a local one in turn: a fit seeds the generators of its process. What is tried does
        not depend on it.

    Raises
    ------
    ReclaimError
        As ``run_training``.
    ConfigError
        ``trials`` or ``at_once`` is below 1, ``config_file`` is a folder, every searched setting is held, or another
        process is at the same search.
    ModelError
        No trial could be completed.
    """
    started = time.perf_counter()
    for name, count in (("trials", trials), ("at_once", at_once)):
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}")
    if config_file.is_dir():
        raise ConfigError(f"{config_file}: expected the name of a TOML file to write, got a folder")
    say = progress or log.info
    ranges = ranges_of(config.estimator, held)
    sources = open_sources(datasets)
    config.value.prices(mean_limit_of(sources), config.horizon_s)  # raises here rather than after the search
    validation_rows(sources, config.horizon_s)  # likewise
    learner_of(config.estimator).rests_on(sources, config)  # likewise
    key = _key(sources, config, ranges, at_once)
    file = sources[0].dataset.home / "tune" / f"{key[:16]}.db"
    busy = ConfigError(f"{file}: another process is running this search; wait for it")
    with locked(file.with_suffix(".lock"), busy), _quiet(), _recorded(file, key) as study:
        run_id = _parent(key, config, ranges, sources)
        done = _count(study)
        say(f"{done} of {trials} trials are there; {file} holds them")
        if done < trials:
            search = _Search(key, tuple(sources), config, ranges)
            try:
                _search(study, search, trials, at_once, Engine(workers=1) if engine.name == "local" else engine, run_id)
            finally:
                _kept.clear()
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if not complete:
            raise ModelError(
                f"none of {_count(study)} trials could be completed: each diverged, as where the learning rate is too "
                "high; --set fixes a lower one"
            )
        best = min(complete, key=lambda trial: (trial.value, trial.number))
        settings = rounded(best.params)
        config_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(config_file, as_toml(asdict(with_settings(config, settings))))
        first = study.get_trials(deepcopy=False, states=_DONE)[0]
        as_given = len(searchable(config, ranges)) == len(ranges)
        number, less = study.user_attrs.get(_COMPARED, (None, []))
        if number != best.number:
            say("comparing what the best settings reclaim with those as given")
            found = with_settings(config, settings)
            less = [] if as_given and best.number == first.number else compared(sources, config, found)
            study.set_user_attr(_COMPARED, (best.number, less))
        report = TuneReport(
            run_id=run_id, estimator=config.estimator, trials=_count(study), pruned=_count(study) - len(complete),
            new=max(_count(study) - done, 0),
            first_loss=first.value if as_given and first.state == TrialState.COMPLETE else None,
            best_loss=float(best.value or 0.0), best=settings, less=less,
            config_file=str(config_file), trials_file=str(file), seconds=time.perf_counter() - started,
        )  # fmt: skip
        with tracking.start_run(EXPERIMENT, config.estimator, run_id=run_id) as run:
            metrics = {"valid_loss": report.best_loss, "trials": report.trials, "pruned": report.pruned}
            run.log_metrics(metrics, step=report.trials)
            run.log_dict(asdict(report), "report.json")
            run.log_artifact(config_file)
    return report


@dataclass(frozen=True)
class _Search:
    """Everything that the trials of a search share.

    Attributes
    ----------
    key : str
    sources : tuple of Source
    config : TrainConfig
    ranges : Ranges
    """

    key: str
    sources: tuple[Source, ...]
    config: TrainConfig
    ranges: Ranges


def _key(sources: Sequence[Source], config: TrainConfig, ranges: Ranges, at_once: int) -> str:
    """Return what two searches must share for one to continue the other."""
    data = [[source.dataset.fingerprint, source.features.fingerprint] for source in sources]
    where = {name: repr(range_) for name, range_ in ranges.items()}
    several = [at_once] if at_once > 1 else []
    versions = [PIPELINE_VERSION, FITTING]
    return content_sha256([config.settings(), config.fit.max_valid_samples, data, *versions, where, *several])


def compared(sources: Sequence[Source], given: TrainConfig, found: TrainConfig) -> list[str]:
    """Return where settings reclaim less of validation rows than others, in words; each is fitted once.

    Settings as given that diverge have nothing to compare with.
    """
    _, mine = priced(sources, found)
    try:
        _, others = priced(sources, given)
    except ModelError as error:
        log.warning("the settings as given diverged, so nothing is compared with them: %s", error)
        return []
    return [
        f"{less}, {horizon_s:,} s ahead"
        for horizon_s in mine
        for less in less_reclaimed(mine[horizon_s], others[horizon_s], given.budgets)
    ]


def priced(sources: Sequence[Source], config: TrainConfig) -> tuple[Fitted, dict[int, Calibration]]:
    """Fit to training rows, and keep the budgets on validation rows, by horizon in seconds.

    A horizon for which the trace is too short, as a day often is, has no entry.
    """
    once = replace(config, fit=replace(config.fit, refit=False))
    with tempfile.TemporaryDirectory() as folder:
        fitted = learner_of(config.estimator).fit(sources, once, Path(folder))
    valid = held_out(sources, fitted.forecaster, [s.features.valid_rows() for s in sources])
    found = {}
    for horizon_s in fitted.forecaster.horizons_s:
        with suppress(HistoryTooShortError):
            found[horizon_s] = set_prices(valid, replace(config, horizon_s=horizon_s))
    return fitted, found


def objective_of(sources: Sequence[Source], config: TrainConfig) -> Objective:
    """Return the loss that is searched; the rows are chosen and made ready once, for all trials."""
    return learner_of(config.estimator).objective(sources, config)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from reporting each trial: the bar does."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _recorded(file: Path, key: str) -> Iterator[optuna.Study]:
    """Give the study that a file holds, which is made where it is missing, and close the file behind it."""
    storage = optuna.storages.RDBStorage(sqlite_uri(file))
    try:
        yield optuna.create_study(storage=storage, study_name=key, load_if_exists=True)
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _parent(key: str, config: TrainConfig, ranges: Ranges, sources: Sequence[Source]) -> str:
    """Return the run above those of the trials, made where the store has none, and completed where it was cut off."""
    before = [run for run in tracking.find_runs(EXPERIMENT, tags={tracking.KEY_TAG: key}) if _TRIAL_TAG not in run.tags]
    if before and before[0].status == tracking.FINISHED:
        return before[0].run_id
    cut_off = before[0].run_id if before else None
    tags = {tracking.KEY_TAG: key, "dataset": ",".join(source.dataset.fingerprint for source in sources)}
    name = config.run_name(source.name for source in sources)
    with tracking.start_run(EXPERIMENT, name, tags=tags, run_id=cut_off) as run:
        run.log_datasets([source.facts for source in sources], context="training")
        run.log_params(config.settings())
        run.log_params({f"range.{name}": repr(range_) for name, range_ in ranges.items()})
        return run.run_id


def _count(study: optuna.Study) -> int:
    return len(study.get_trials(deepcopy=False, states=_DONE))


def _search(study: optuna.Study, search: _Search, trials: int, at_once: int, engine: Engine, run_id: str) -> None:
    """Add trials to the record, ``at_once`` at a time, each chosen by those before the first of these."""
    tags = {tracking.KEY_TAG: search.key, tracking.PARENT: run_id}
    before = {run.tags[_TRIAL_TAG]: run.run_id for run in tracking.find_runs(EXPERIMENT, tags=tags)}
    bar = tqdm(total=trials, initial=_count(study), desc="tune", unit="trial", disable=None)
    with closing(bar), engine.pool() as pool:
        while (done := _count(study)) < trials:
            first = done - done % at_once
            known = study.get_trials(states=_DONE)[:first]
            numbers = range(done, min(first + at_once, trials))
            jobs = [(number, known) for number in numbers]
            with closing(pool.each(partial(_run_trial, search), jobs)) as results:
                for number, (trial, losses, state, seconds) in zip(numbers, results, strict=True):
                    name, of = f"{search.config.estimator}/{number}", before.get(str(number))
                    with tracking.start_run(EXPERIMENT, name, tags={**tags, _TRIAL_TAG: str(number)}, run_id=of) as run:
                        run.log_params(rounded(trial.params))
                        run.log_history([{"epoch_loss": loss} for loss in losses])
                        complete = trial.state == TrialState.COMPLETE
                        run.log_metrics({"seconds": seconds} | ({"valid_loss": trial.value} if complete else {}))
                        run.set_tags({"state": state})
                    study.add_trial(trial)
                    bar.update()
            best = [t.value for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))]
            bar.set_postfix(best=f"{min(best):.5f}" if best else "none")  # type: ignore[type-var]  # complete: a number


def _run_trial(search: _Search, job: tuple[int, list[FrozenTrial]]) -> tuple[FrozenTrial, list[float], str, float]:
    """Return a trial that depends only on earlier ones, the loss of each epoch, how it ended, and the seconds taken."""
    started, (number, known) = time.perf_counter(), job
    pruner = optuna.pruners.MedianPruner(_JUDGES, n_warmup_steps=_PRUNE_AFTER)
    # seeded by its number, so that earlier results, not the process, decide it
    seed = (search.config.seed * 1_000_003 + number) % 2**32  # the sampler's has 32 bits
    sampler = optuna.samplers.TPESampler(n_startup_trials=_RANDOM, seed=seed)
    with _quiet():
        study = optuna.create_study(sampler=sampler, pruner=pruner)
        study.add_trials(known)
        if number == 0:
            study.enqueue_trial(searchable(search.config, search.ranges))
        trial = study.ask(fixed_distributions=dict(search.ranges))
        tried = with_settings(search.config, rounded(trial.params))
        value, losses, state = _try(_objective(search), tried, trial)
        ended = TrialState.PRUNED if value is None else TrialState.COMPLETE
        return study.tell(trial, value, state=ended), losses, state, time.perf_counter() - started


_kept: Final[dict[str, Objective]] = {}
"""The loss that this process searches, by the key of the search; its rows are chosen and made ready once."""


def _objective(search: _Search) -> Objective:
    """Return the loss of a search."""
    if search.key not in _kept:
        _kept.clear()
        _kept[search.key] = objective_of(search.sources, search.config)
    return _kept[search.key]


def _try(objective: Objective, config: TrainConfig, trial: optuna.Trial) -> tuple[float | None, list[float], str]:
    """Return the validation loss, None where the trial was stopped early; the loss of each epoch; and how it ended."""
    losses: list[float] = []

    def on_epoch(epoch: int, loss: float) -> None:
        if math.isfinite(loss):  # fitting ends by itself where it is not
            losses.append(loss)
            step = _STEPS * (epoch + 1) // config.fit.epochs
            if step > _STEPS * epoch // config.fit.epochs:
                trial.report(loss, step)
                if trial.should_prune():
                    raise optuna.TrialPruned

    try:
        value = objective(config, on_epoch)
    except optuna.TrialPruned:
        return None, losses, "pruned"
    except ModelError as error:
        log.info("a trial diverged: %s", error)
        return None, losses, "diverged"
    return (value, losses, "complete") if math.isfinite(value) else (None, losses, "diverged")
