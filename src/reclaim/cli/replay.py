"""Commands of the replay: one per experiment, and the comparison of recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    print_table,
    unchanged,
)

if TYPE_CHECKING:
    from reclaim.replay.experiment import Experiment, Results
    from reclaim.replay.report.page import ReplayReport
    from reclaim.training.bundle import Bundle

app = typer.Typer(
    help="Replay estimators on a dataset.",
    epilog="Examples: `reclaim replay margins dataset --out margins` · "
    "`reclaim replay frontier dataset --out frontier`",
    no_args_is_help=True,
)


def _add(name: str, does: str, *examples: str) -> None:
    """Add the command of an experiment, with the sentence and the examples of its help."""

    def command(
        dataset: DatasetFolder,
        out: Annotated[
            Path, typer.Option(help="Folder for report.html, figures and results.json.", metavar="DIR", parser=here)
        ],
        model: Annotated[
            list[str] | None,
            typer.Option(
                help="NAME@ALIAS, NAME/VERSION, a bundle's folder or `builtin`; repeatable, each is compared with the "
                "first. Default: reclaim@champion, or `builtin` where there is none.",
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
        from reclaim.config import load_config
        from reclaim.data.core.engine.workers import Engine
        from reclaim.replay.runs.catalogue import load_experiment
        from reclaim.replay.runs.run import run_experiment

        experiment = load_experiment(name)
        settings = load_config(experiment.config, config, assignments or ())
        bundles = load_bundles(model or [], no_model)
        report = run_experiment(experiment, dataset, out, settings, bundles=bundles, engine=Engine(engine, workers))
        print_replay(experiment, report, as_json=as_json, verbose=verbose)

    shown = " · ".join(f"`reclaim replay {name} {example}`" for example in examples)
    app.command(name, help=does, epilog=f"Example{'s' * (len(examples) > 1)}: {shown}")(command)


def load_bundles(models: list[str], no_model: bool) -> dict[str, Bundle]:
    """Return name → model of the references; without any, the champion, or the built-in model until there is one."""
    from reclaim.data.errors import ConfigError
    from reclaim.replay.runs.run import by_name
    from reclaim.training.bundle import load_model

    if no_model and models:
        raise ConfigError(f"--no-model and --model {models[0]} contradict each other; leave one of them out")
    if no_model:
        return {}
    return by_name([load_model(reference) for reference in models] or [load_model()])


def _of_another_dataset(results: Results) -> list[str]:
    """Return a line that names the models that were trained on another dataset, unless they are portable."""
    from reclaim.training.estimators.registry import LEARNED

    bundles = results["inputs"]["bundles"].items()
    names = [name for name, of in bundles if not of["trained_on_this_dataset"] and not LEARNED[of["kind"]].portable]
    return [f"trained on another dataset: {', '.join(names)} (--model names others)"] if names else []


def print_replay(
    experiment: Experiment, report: ReplayReport, *lines: str, as_json: bool = False, verbose: bool = False
) -> None:
    """Print the summary of a replay and the path of its page; with ``verbose`` also all runs and further lines."""
    from reclaim.replay.report.page import runs_table

    summary, runs = experiment.summary(report.results), runs_table(experiment.runs(report.results), experiment.columns)
    models = experiment.models(report.results) if experiment.models else None
    if not as_json:
        print_table(summary)
        if models is not None and models.rows:
            print_table(models)
        if verbose:
            typer.echo("")
            print_table(runs)
    facts: dict[str, Any] = {"report": str(report.page), "already_there": report.already_there}
    facts |= {"summary": summary.as_records(), "models": models.as_records() if models else []}
    facts |= {"results": runs.as_records()}
    page = f"{report.page}{unchanged(report.already_there)}"
    print_result((facts, [*(["", *lines] if verbose else []), *_of_another_dataset(report.results), page]), as_json)


_add(
    "margins",
    "Replay every estimator at every margin, with Borg's sequence of baseline, aggressive, medium, baseline.",
    "dataset --out margins",
    "dataset --out new-or-old --model reclaim@champion --model reclaim@candidate",
)
_add(
    "ratios",
    "Show the distribution of usage and reservations of tasks as shares of their limits.",
    "dataset --out ratios --no-model",
)
_add(
    "compaction",
    "Count the machines that a workload needs with and without reclamation, per estimator, by removing machines.",
    "dataset --out compaction",
    "dataset --out compaction --no-model --set seed=2",
)
_add(
    "frontier",
    "Sweep the margin of every estimator and show its reclaimed share at each violation rate, next to the oracle.",
    "dataset --out frontier",
    "dataset --out frontier --model reclaim@champion",
)
_add(
    "what-if",
    "Find the fewest machines for the workload within a budget of out-of-memory kills, for one estimator and margin.",
    "dataset --out what-if",
    "dataset --out larger --no-model --set growth=1.2 --set oom_budget=2 --set margin=aggressive",
)


def compare(
    runs: Annotated[list[str] | None, typer.Argument(help="MLflow run ids. Default: the newest of each.")] = None,
    experiment: Annotated[
        str | None, typer.Option(help="Only this experiment of `reclaim replay`.", metavar="NAME")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare recorded replays and name the estimators that are better by more than the noise."""
    from reclaim.replay.runs.compare import choose
    from reclaim.replay.runs.compare import compare as tables_of
    from reclaim.replay.runs.differences import differences

    chosen = choose(runs or (), experiment)
    tables, differing = tables_of(chosen), differences(chosen)
    if as_json:
        records = {name: table.as_records() for name, table in tables.items()}
        print_result(({"runs": records, "differences": differing.as_records()}, []), as_json)
        return
    named = [(f"{name}:", table) for name, table in tables.items()]
    if differing.rows:
        named.append(("margins, differences:", differing))
    for k, (title, table) in enumerate(named):
        words, rest = table.known().common() if len(table.rows) > 1 else ("", table)
        typer.echo("\n" * (k > 0) + f"{title} {words}".rstrip())
        print_table(rest)
