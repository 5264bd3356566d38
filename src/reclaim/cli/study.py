"""Commands for the study of estimators: search their settings, predict machine peaks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reclaim.cli import results
from reclaim.cli.console import (
    AsJson,
    Assignments,
    DatasetFolders,
    EngineName,
    EngineWorkers,
    LearnedEstimator,
    Progress,
    TrainConfigFile,
    here,
    print_result,
    print_status,
)


def tune(
    datasets: DatasetFolders,
    trials: Annotated[int, typer.Option(help="Total trials, including those of an interrupted search.")] = 50,
    estimator: LearnedEstimator = None,
    out: Annotated[
        Path, typer.Option(help="TOML to write the best settings into.", metavar="FILE", parser=here)
    ] = Path("best.toml"),
    at_once: Annotated[
        int, typer.Option(help="Trials chosen without each other's results, for several workers. Changes the trials.")
    ] = 1,
    config: TrainConfigFile = None,
    assignments: Assignments = None,
    workers: EngineWorkers = 0,
    engine: Annotated[
        str, typer.Option(help="`local`: one trial after another; `processes` or `ray`: --at-once of them together.")
    ] = "local",
    as_json: AsJson = False,
) -> None:
    """Search an estimator's settings by its validation loss; an interrupted search continues when run again.

    Settings given by `--set` stay fixed.
    """
    from reclaim.config import load_config
    from reclaim.data.core.engine.workers import Engine
    from reclaim.training.fitting.tune import tune as run
    from reclaim.training.settings import TrainConfig, config_file

    settings = [*(assignments or ()), *([f'estimator="{estimator}"'] if estimator else [])]
    loaded = load_config(TrainConfig, config_file(config), settings)
    held = [setting.partition("=")[0].strip() for setting in settings]
    report = run(
        datasets, loaded, trials=trials, config_file=out, held=held, progress=print_status, at_once=at_once,
        engine=Engine(engine, workers),
    )  # fmt: skip
    given = [*(("--config", str(config)) if config else ()), *(word for a in settings for word in ("--set", a))]
    print_result(results.of_tune(report, datasets, given, out), as_json)


def peaks(
    samples: Annotated[
        Path,
        typer.Argument(
            help="Parquet of (machine, time_us, task, usage, limit), by machine and time.", metavar="SAMPLES"
        ),
    ],
    out: Annotated[Path, typer.Option(help="Parquet file to write.", metavar="FILE", parser=here)],
    predictor: Annotated[
        list[str] | None,
        typer.Option(help="Predictor; repeatable. Default: all; an unknown name lists them.", metavar="NAME"),
    ] = None,
    no_oracle: Annotated[bool, typer.Option("--no-oracle", help="Without the oracle, which uses the future.")] = False,
    workers: EngineWorkers = 0,
    engine: EngineName = "local",
    as_json: AsJson = False,
) -> None:
    """Predict each machine's peak usage over time with the predictors of EuroSys'21, Trimaran and Coach."""
    from reclaim.data.core.engine.workers import Engine
    from reclaim.replay.machine_peaks.job import choose_predictors, predict_peaks

    chosen = choose_predictors(tuple(predictor or ()), oracle=not no_oracle)
    with Progress("predicting") as progress:
        report = predict_peaks(samples, out, chosen, progress=progress, engine=Engine(engine, workers))
    print_result(results.of_peaks(report, out), as_json)
