"""The verbs of the replay, one for each experiment, and the one that lays recorded ones side by side."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from reclaim.console import kept, print_table, tell
from reclaim.options import AsJson, Assignments, ConfigFile, DatasetFolder

if TYPE_CHECKING:
    from reclaim.replay.kinds import Experiment
    from reclaim.replay.report import ReplayReport

_WIDTH: Final = 100
"""Characters of a line of prose on a terminal; wider is hard to read."""

app = typer.Typer(help="Replay what estimators would have done on a dataset.", no_args_is_help=True)


def _add(name: str, does: str, *examples: str) -> None:
    """Add the verb of an experiment: what its help says it does, and examples of what follows its name."""

    def verb(
        dataset: DatasetFolder,
        out: Annotated[Path, typer.Option(help="Folder for report.html, figures and results.json.", metavar="DIR")],
        model: Annotated[
            list[str] | None,
            typer.Option(
                help="A registered model; may be given often. Default: reclaim@champion.", metavar="NAME@ALIAS"
            ),
        ] = None,
        no_model: Annotated[bool, typer.Option("--no-model", help="Only the estimators that need no model.")] = False,
        config: ConfigFile = None,
        assignments: Assignments = None,
        as_json: AsJson = False,
    ) -> None:
        from reclaim.config import load_config
        from reclaim.data.errors import ConfigError
        from reclaim.replay.experiment import run_experiment
        from reclaim.replay.experiments import load_experiment
        from reclaim.training.bundle import load_bundle
        from reclaim.training.tracking import fetch_bundle

        experiment = load_experiment(name)
        settings = load_config(experiment.config, config, assignments or ())
        if no_model and model:
            raise ConfigError(f"--no-model and --model {model[0]} contradict each other; leave one of them out")
        references = [] if no_model else (model or ["reclaim@champion"])
        loaded = [load_bundle(fetch_bundle(reference)[0]) for reference in references]
        bundles = {bundle.kind: bundle for bundle in loaded}
        if len(bundles) < len(loaded):
            raise ConfigError(f"--model: {', '.join(references)} are of one kind; replay them one at a time")
        report = run_experiment(experiment, dataset, out, settings, bundles=bundles)
        tell_replay(experiment, report, as_json)

    shown = " · ".join(f"`reclaim replay {name} {example}`" for example in examples)
    app.command(name, help=does, epilog=f"Example{'s' * (len(examples) > 1)}: {shown}")(verb)


def tell_replay(experiment: Experiment, report: ReplayReport, as_json: bool, *lines: str) -> None:
    """Print what a replay found: its table, what it shows, further lines, and last the page."""
    from reclaim.replay.report import runs_table

    table = runs_table(experiment.runs(report.results), experiment.columns)
    says = list(experiment.says(report.results))
    if not as_json:
        print_table(table)
    facts = {"report": str(report.page), "already_there": report.already_there, "says": says}
    tell(
        {**facts, "results": table.as_records()}, as_json,
        *(f"\n{_filled(paragraph)}" for paragraph in says),
        "",
        *lines,
        f"{report.page}{kept(report.already_there)}",
    )  # fmt: skip


def _filled(paragraph: str) -> str:
    unbroken = paragraph.replace(" %", "\N{NO-BREAK SPACE}%")
    return textwrap.fill(unbroken, _WIDTH, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}", " ")


_add(
    "margins",
    "Replay every estimator at every margin, with Borg's sequence of baseline, aggressive, medium, baseline.",
    "dataset --out margins",
    "dataset --out margins --model reclaim@champion --model reclaim-trees/1",
)
_add(
    "ratios",
    "Show how usage and reservations of tasks spread as shares of their limits.",
    "dataset --out ratios --no-model",
)
_add(
    "compaction",
    "Count the machines a workload needs with and without reclamation, per estimator: remove them until it no longer "
    "fits.",
    "dataset --out compaction",
    "dataset --out compaction --no-model --set seed=2",
)
_add(
    "frontier",
    "Sweep the margin of every estimator: what each reclaims at each violation rate, beside the oracle.",
    "dataset --out frontier",
    "dataset --out frontier --model reclaim@champion",
)
_add(
    "what-if",
    "Ask how few machines would carry the workload at your budget of out-of-memory kills, with the estimator and the "
    "margin of your choice.",
    "dataset --out what-if",
    "dataset --out larger --no-model --set growth=1.2 --set oom_budget=2 --set margin=aggressive",
)


def compare(
    runs: Annotated[list[str] | None, typer.Argument(help="MLflow run ids; none: the newest of each.")] = None,
    experiment: Annotated[
        str | None, typer.Option(help="Only this experiment: a verb of `reclaim replay`.", metavar="NAME")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lay recorded replays side by side, and say which estimator is better by more than the noise."""
    from reclaim.replay.compare import choose
    from reclaim.replay.compare import compare as laid_out
    from reclaim.replay.differences import differences

    chosen = choose(runs or (), experiment)
    tables, beside = laid_out(chosen), differences(chosen)
    if as_json:
        records = {name: table.as_records() for name, table in tables.items()}
        tell({"runs": records, "differences": beside.as_records()}, as_json)
        return
    for name, table in tables.items():
        typer.echo(f"{name}:")
        print_table(table)
        typer.echo("")
    if beside.rows:
        typer.echo("margins, differences:")
        print_table(beside)
