"""The command that recommends requests, its formats and its exit code for a pipeline."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from reclaim.cli.console import (
    AsJson,
    Assignments,
    ConfigFile,
    DatasetFolder,
    EngineName,
    EngineWorkers,
    NoModel,
    Verbose,
    here,
    print_result,
    print_status,
    print_table,
    unchanged,
)
from reclaim.cli.replay import load_bundles

if TYPE_CHECKING:
    from reclaim.replay.report.page import ReplayReport
    from reclaim.training.bundle import Bundle

TOO_MANY = 3
"""Exit code where more requests are to change than ``--fail-above``; 2 means a mistake of the caller."""


def recommend(
    dataset: DatasetFolder,
    out: Annotated[
        Path, typer.Option(help="Folder for report.html and the files of all formats.", metavar="DIR", parser=here)
    ],
    format_: Annotated[
        Literal["table", "csv", "json", "krr-json", "html"],
        typer.Option("--format", "-f", help="What to print; all are in the folder."),
    ] = "table",
    patches: Annotated[
        Path | None,
        typer.Option(help="Folder for kustomize patches, a component per namespace.", metavar="DIR", parser=here),
    ] = None,
    patch_containers: Annotated[
        str | None,
        typer.Option(
            help="Containers to patch, a regular expression of their names. Default: those with a request or a limit.",
            metavar="REGEX",
        ),
    ] = None,
    min_change: Annotated[
        str | None, typer.Option(help="Least change of a request, as `10%`, which is the default.", metavar="SHARE")
    ] = None,
    fail_above: Annotated[
        int | None, typer.Option(min=0, help="Exit with 3 if more workloads than this are to change.", metavar="N")
    ] = None,
    anonymise: Annotated[bool, typer.Option("--anonymise", help="Names become numbers, to share the files.")] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME@ALIAS, NAME/VERSION, a bundle's folder or `builtin`; repeatable. Default: reclaim@champion, "
            "where there is one, and `builtin`.",
            metavar="MODEL",
        ),
    ] = None,
    no_model: NoModel = False,
    config: ConfigFile = None,
    assignments: Assignments = None,
    workers: EngineWorkers = 0,
    engine: EngineName = "local",
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Recommend a CPU and memory request for every workload, by the estimator that won on its own history.

    Needs the dataset's features (`reclaim features`). Every request comes with a back-test: what would have happened in
    the test part of the history had it been set then.
    """
    from reclaim.config import load_config
    from reclaim.data.core.engine.workers import Engine
    from reclaim.data.errors import ConfigError
    from reclaim.replay.runs.catalogue import RECOMMEND, load_experiment
    from reclaim.replay.runs.run import run_experiment

    if as_json and format_ != "table":
        raise ConfigError(f"--json and --format {format_} both say what to print; leave one of them out")
    experiment = load_experiment(RECOMMEND)
    given = [*(assignments or ()), *_given(min_change, anonymise=anonymise)]
    settings = load_config(experiment.config, config, given)
    _check_patches(dataset, out, patches, patch_containers, anonymise=settings.anonymise)
    report = run_experiment(
        experiment, dataset, out, settings,
        bundles=_bundles(dataset, model or [], no_model), tracking=False, engine=Engine(engine, workers),
    )  # fmt: skip
    written = _write_patches(report, patches, patch_containers)
    _print(report, format_, written, as_json=as_json, verbose=verbose)
    _fail_above(report, fail_above)


def _given(min_change: str | None, *, anonymise: bool) -> list[str]:
    """Return settings of the options."""
    from reclaim.data.errors import ConfigError

    found = ["anonymise=true"] if anonymise else []
    if min_change is not None:
        number = min_change.strip()
        with suppress(ValueError):
            share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
            if 0 <= share < 1:
                return [*found, f"min_change={share}"]
        raise ConfigError(f"--min-change: expected a share below one, as 10% or 0.1, got {min_change!r}")
    return found


def _bundles(dataset: Path, models: list[str], no_model: bool) -> dict[str, Bundle]:
    """Return name → model of the references; without any, the champion where there is one, and the built-in one."""
    from reclaim.data.errors import ConfigError, ModelError
    from reclaim.features.feature_set import FeatureSet
    from reclaim.replay.runs.run import by_name
    from reclaim.replay.runs.unseen import judged_on
    from reclaim.training.bundle import load_model
    from reclaim.training.tracking.references import BUILTIN, SERVED

    if models or no_model:
        return load_bundles(models, no_model)
    features = FeatureSet.open(dataset)  # before each model says that it is not there
    found: list[Bundle] = []
    for reference in (SERVED, BUILTIN):
        try:
            bundle = load_model(reference)
            if reference == BUILTIN:
                judged_on(reference, bundle, features)
        except (ModelError, ConfigError) as error:
            print_status(f"{reference} takes no part: {error}")
        else:
            found.append(bundle)
    return by_name(found)


def _check_patches(
    dataset: Path, out: Path, folder: Path | None, containers: str | None, *, anonymise: bool
) -> None:  # fmt: skip
    """Raise ConfigError where patches that are asked for cannot be written, before anything is computed."""
    from reclaim.data.errors import ConfigError

    if folder is None:
        if containers is not None:
            raise ConfigError("--patch-containers has no effect without --patches DIR, which writes the patches")
        return
    if out.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"--patches {folder}: is written whole, and --out {out} lies there; choose another folder")
    from reclaim.data.dataset import Dataset
    from reclaim.replay.experiments.recommend.names import is_anonymous, is_kubernetes
    from reclaim.replay.experiments.recommend.patches import check_target

    opened = Dataset.open(dataset)
    check_target(
        folder, kubernetes=is_kubernetes(opened), anonymous=anonymise or is_anonymous(opened), containers=containers
    )


def _write_patches(report: ReplayReport, folder: Path | None, containers: str | None) -> list[str]:
    """Write patches where they are asked for; return the lines about them."""
    from reclaim.replay.experiments.recommend.patches import write_patches

    if folder is None:
        return []
    written = write_patches(report.results, folder, containers=containers)
    lines = [f"{folder}: patches of {written.workloads} workloads"]
    return lines + [f"no patch for {name}" for name in written.left_out]


def _print(report: ReplayReport, format_: str, lines: list[str], *, as_json: bool, verbose: bool) -> None:
    from reclaim.replay.experiments.recommend.formats import FORMATS, changes
    from reclaim.replay.experiments.recommend.page import console_table, findings, summary_table

    said = findings(report.results)
    if format_ != "table" and not as_json:
        for line in [*said, *lines]:
            print_status(line)
    if format_ in FORMATS and not as_json:
        typer.echo(FORMATS[format_](report.results), nl=False)
    elif format_ == "html" and not as_json:
        typer.echo(report.page.read_text(encoding="utf-8"), nl=False)
    else:
        if not as_json:
            print_table(summary_table(report.results))
            typer.echo("\n".join(["", *said, ""]))
            print_table(console_table(report.results, None) if verbose else console_table(report.results))
        facts: dict[str, Any] = {"report": str(report.page), "already_there": report.already_there}
        facts |= {"changes": changes(report.results), "totals": report.results["totals"]}
        facts |= {"findings": said, "patches": lines, "summary": summary_table(report.results).as_records()}
        print_result((facts, [*lines, f"{report.page}{unchanged(report.already_there)}"]), as_json)


def _fail_above(report: ReplayReport, most: int | None) -> None:
    """End with exit code 3 where more workloads are to change than ``most``."""
    from reclaim.replay.experiments.recommend.formats import changes

    if most is not None and changes(report.results) > most:
        typer.echo(f"{changes(report.results)} workloads are to change, more than --fail-above {most}", err=True)
        raise typer.Exit(TOO_MANY)
