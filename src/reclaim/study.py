"""The verbs for whoever studies estimators: search their settings, predict machine peaks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reclaim.console import Progress, say, tell
from reclaim.options import AsJson, Assignments, ConfigFile, DatasetFolders


def tune(
    datasets: DatasetFolders,
    trials: Annotated[int, typer.Option(help="Trials in all, with those of a search that was cut off.")] = 50,
    estimator: Annotated[str | None, typer.Option(help="`network` or `trees`.", metavar="NAME")] = None,
    out: Annotated[Path, typer.Option(help="TOML to write the best settings into.", metavar="FILE")] = Path(
        "best.toml"
    ),
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Search an estimator's settings by its loss on validation data; killed and run again, it goes on.

    What `--set` names is held as it is.
    """
    from dataclasses import asdict

    from reclaim.config import load_config
    from reclaim.training.settings import TrainConfig
    from reclaim.training.tune import tune as run

    settings = [*(assignments or ()), *([f"estimator='{estimator}'"] if estimator else [])]
    loaded = load_config(TrainConfig, config, settings)
    held = [setting.partition("=")[0].strip() for setting in settings]
    report = run(datasets, loaded, trials=trials, config_file=out, held=held, progress=say)
    command = f"reclaim train {' '.join(map(str, datasets))}"
    given = [*([f"--config {config}"] if config else []), *(f"--set {a}" for a in settings), report.assignments()]
    as_given = "" if report.first_loss is None else f"; {report.first_loss:.5f} with the settings as given"
    tell(
        {**asdict(report), "assignments": report.assignments()}, as_json,
        f"{report.estimator}: validation loss {report.best_loss:.5f}{as_given}; {report.trials} trials, "
        f"{report.new} of them new, {report.pruned} given up early; run {report.run_id}, {report.seconds:.0f} s",
        f"train   {command} {' '.join(given)}",
        f"or      {command} --config {out}",
    )  # fmt: skip


def peaks(
    samples: Annotated[
        Path,
        typer.Argument(
            help="Parquet of (machine, time_us, task, usage, limit), by machine and time.", metavar="SAMPLES"
        ),
    ],
    out: Annotated[Path, typer.Option(help="Parquet file to write.", metavar="FILE")],
    predictor: Annotated[
        list[str] | None,
        typer.Option(
            help="A predictor by name; may be given often. Default: all; a wrong name lists them.", metavar="NAME"
        ),
    ] = None,
    no_oracle: Annotated[bool, typer.Option("--no-oracle", help="Without the one that sees the future.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict each machine's peak usage at each time, by the predictors of EuroSys'21 and their oracle."""
    from dataclasses import asdict

    from reclaim.replay.peaks import choose_predictors, predict_peaks

    chosen = choose_predictors(tuple(predictor or ()), oracle=not no_oracle)
    with Progress("predicting") as progress:
        report = predict_peaks(samples, out, chosen, progress=progress)
    tell(
        {"peaks": str(out), **asdict(report)}, as_json,
        f"{out}: {report.predictions:,} predictions of {len(report.predictors)} predictors for {report.machines:,} "
        f"machines, from {report.samples:,} samples in {report.seconds:.1f} s",
    )  # fmt: skip
