"""Command line: one command per stage; each parses its options, calls one function of a room and prints the result."""

from __future__ import annotations

import errno
import gc
import io
import logging
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import typer

from reclaim.cli import feeding, fetching, models, results, study
from reclaim.cli import recommend as recommendations
from reclaim.cli import replay as replays
from reclaim.cli.console import (
    AsJson,
    Assignments,
    ConfigFile,
    DatasetFolder,
    DatasetFolders,
    EngineName,
    EngineWorkers,
    LearnedEstimator,
    Progress,
    ServedModel,
    TrainConfigFile,
    Verbose,
    fail,
    here,
    place,
    print_result,
    print_status,
    width,
    with_settings,
)

# Rooms are imported inside the commands: `--help` answers at once, and a command imports only its own room.

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Error that typer raises for wrong arguments; its own copy of click cannot be imported."""

_NEW_OBJECTS = 500_000
"""New objects from which Python looks for garbage. Imports make 200,000 that all stay; collecting over them again and
again took a seventh of the start."""
_RESUMED = ("fetch", "feed", "ingest", "tune")
"""Commands that continue an interrupted run; the others start again."""
_OS_REMEDIES = {
    errno.EACCES: "; give this user the right to it, or name another place",
    errno.ENOTDIR: "; a part of this path is a file, name another place",
}
"""Code of the system's error → what to do about it."""

app = typer.Typer(
    name="reclaim",
    help="Predict what every task in a cluster will need, so that the rest can be lent out.\n\n"
    "Order of the commands: synth (or your own trace) → ingest → features → train → replay → compare, promote, "
    "predict, recommend, serve. "
    "`reclaim demo` runs all of them on a small synthetic cell.",
    epilog="Examples: `reclaim demo` · `reclaim ingest usage dataset --trace series --mapping my.toml` · "
    "`reclaim features dataset` · `reclaim train dataset` · `reclaim replay margins dataset --out margins` · "
    "`reclaim serve` · `reclaim COMMAND --help`, for those of a command",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"reclaim {version('reclaim')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log progress.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if context.invoked_subcommand != "serve":  # which sets the collector itself
        gc.set_threshold(_NEW_OBJECTS)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if not verbose:
        warnings.simplefilter("ignore")


@app.command(
    epilog="Examples: `reclaim synth cell --machines 30 --days 4 --seed 1` · "
    "`reclaim synth cluster --format openmetrics --machines 6 --days 2`"
)
def synth(
    out: Annotated[Path, typer.Argument(help="Folder to write the cell into.", metavar="OUT", parser=here)],
    machines: Annotated[int, typer.Option(help="Machines of the cell.")] = 30,
    days: Annotated[float, typer.Option(help="Length of the trace, in days.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Seed; the same options and seed give the same bytes.")] = 1,
    tasks_per_machine: Annotated[float, typer.Option(help="Tasks running on a machine, on average.")] = 12.0,
    format_: Annotated[
        str, typer.Option("--format", help="`json` (lines, gzipped), `parquet`, or `openmetrics` (Kubernetes).")
    ] = "json",
    common: Annotated[
        float, typer.Option(help="Share of each task's movement that the whole cell has in common, 0 to 1.")
    ] = 0.0,
    service: Annotated[
        float, typer.Option(help="Share that the tasks of a collection have in common beyond that, 0 to 1.")
    ] = 0.0,
    end: Annotated[
        str | None, typer.Option(help="End of a Kubernetes history (UTC). Default: 2026-11-02.", metavar="TIME")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a synthetic cell in the Google v3 layout, or a synthetic Kubernetes history for `promtool`."""
    if format_ == "openmetrics":
        if common or service:
            from reclaim.data.errors import ConfigError

            raise ConfigError(
                "--common and --service apply to a cell: expected --format json or parquet, got openmetrics"
            )
        from reclaim.data.synthetic.kubernetes.job import END, SyntheticHistoryConfig, write_history

        asked = SyntheticHistoryConfig(
            machines=machines, days=days, seed=seed, tasks_per_machine=tasks_per_machine, end=end or END
        )
        with Progress("synthesising") as progress:
            print_result(results.of_synthetic_history(write_history(out, asked, progress=progress)), as_json)
        return
    if end is not None:
        from reclaim.data.errors import ConfigError

        raise ConfigError(f"--end applies to a Kubernetes history: expected --format openmetrics, got {format_}")
    from reclaim.data.synthetic.job import SyntheticCellConfig, write_cell

    config = SyntheticCellConfig(
        machines=machines,
        days=days,
        seed=seed,
        tasks_per_machine=tasks_per_machine,
        format=format_,
        common=common,
        service=service,
    )
    with Progress("synthesising") as progress:
        report = write_cell(out, config, progress=progress)
    print_result(results.of_synth(report), as_json)


app.command(
    epilog="Examples: `reclaim fetch google-v3 cell_a --cell a --table instance_usage --shards 0-3` · "
    "`reclaim fetch prometheus history --url https://prometheus.example --days 14 --namespace 'shop|pay'` · "
    "`reclaim fetch prometheus history --url http://127.0.0.1:9090 --probe`"
)(fetching.fetch)


@app.command(
    epilog="Examples: `reclaim ingest cell dataset` · `reclaim ingest s3://traces/cell_a s3://datasets/cell_a` · "
    "`reclaim ingest fastStorage/2013-8 vms --trace series --mapping bitbrains-csv` · "
    "`reclaim ingest usage.csv dataset --trace series --mapping my.toml` · "
    "`reclaim ingest history dataset --trace kubernetes` · "
    "`reclaim ingest clusterdata-2011-2 dataset --trace google-v2.1 --memory-limit-mib 16384`"
)
def ingest(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder with the trace's files, or `s3://bucket/folder`; a file of a series.",
            metavar="SOURCE",
            parser=place,
        ),
    ],
    dataset: Annotated[
        Path, typer.Argument(help="Dataset folder to write, here or in a store.", metavar="DATASET", parser=place)
    ],
    trace: Annotated[
        str,
        typer.Option(help="Format: `google-v3`, `google-v2.1`, `alibaba-2017`, `kubernetes`, `recorded` or `series`."),
    ] = "google-v3",
    mapping: Annotated[
        str | None,
        typer.Option(
            help="For `series`: mapping TOML; `azure-csv` or `bitbrains-csv`, as these traces are published; `azure`, "
            "`bitbrains` or `google-2011-machines`, cuts in parquet.",
            metavar="FILE",
        ),
    ] = None,
    anonymise: Annotated[
        bool, typer.Option("--anonymise", help="For `kubernetes`: names become numbers, to share the dataset.")
    ] = False,
    buckets: Annotated[
        int | None,
        typer.Option(help="Files per table of tasks. Default: by the size of the trace.", metavar="N"),
    ] = None,
    max_reject_share: Annotated[float, typer.Option(help="Largest accepted share of bad lines.")] = 0.001,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Ignore unreadable files.")] = False,
    memory_limit_mib: Annotated[
        int, typer.Option(help="Memory of all processes together, in MiB; more allows more workers.")
    ] = 1024,
    workers: Annotated[int, typer.Option(help="Parallel processes; 0: one per core, as memory allows.")] = 0,
    engine: Annotated[
        str, typer.Option(help="`local`: processes for a large trace; `processes`, or `ray` (needs the package ray).")
    ] = "local",
    as_json: AsJson = False,
) -> None:
    """Read a trace into a dataset; an interrupted run continues when run again."""
    from reclaim.data.core.jit import begin_lean
    from reclaim.data.core.parallel import keep_one_heap
    from reclaim.data.ingest.job import IngestConfig
    from reclaim.data.ingest.job import ingest as run

    keep_one_heap()
    begin_lean()
    config = IngestConfig(
        trace=trace, mapping=mapping, anonymise=anonymise, buckets=buckets, max_reject_share=max_reject_share,
        skip_damaged=skip_damaged,
        memory_limit_mib=memory_limit_mib, workers=workers, engine=engine,
    )  # fmt: skip
    print_result(results.of_ingest(run(source, dataset, config), dataset), as_json)


@app.command(epilog="Example: `reclaim inspect dataset --html dataset.html`")
def inspect(
    dataset: DatasetFolder,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write one HTML file with figures.", metavar="FILE", parser=here)
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Describe a dataset: its main figures; all tables with --verbose or --html."""
    from reclaim.data.dataset import Dataset
    from reclaim.data.survey.facts import survey
    from reclaim.data.survey.page import check_target, write_page
    from reclaim.data.survey.tables import summary, text

    opened = Dataset.open(dataset)
    if html is not None:
        check_target(html)
    facts = survey(opened)
    if html is not None:
        write_page(facts, html)
    wrote = "no page written; --html FILE writes one" if html is None else str(html)
    shown = summary(facts).as_text() + (f"\n{text(facts, width())}" if verbose else "")
    print_result(({**facts, "page": html and str(html)}, [*shown.splitlines(), wrote]), as_json)


@app.command(
    cls=with_settings("reclaim.features.build:FeatureConfig"),
    epilog="Examples: `reclaim features dataset` · `reclaim features dataset --set split.train_share=0.6` · "
    "`reclaim features other_cell --set split.role=test`, to hold out a dataset for models trained on others · "
    "`reclaim features dataset --set rows=all`, to keep the features of every window",
)
def features(
    dataset: DatasetFolder,
    config: ConfigFile = None,
    assignments: Assignments = None,
    workers: EngineWorkers = 0,
    engine: EngineName = "local",
    as_json: AsJson = False,
) -> None:
    """Compute features, targets and splits of the windows that training reads; others are computed when used."""
    from reclaim.config import load_config
    from reclaim.data.core.engine.workers import Engine
    from reclaim.data.core.jit import begin_lean
    from reclaim.data.core.parallel import keep_one_heap
    from reclaim.data.dataset import Dataset
    from reclaim.features.build import FeatureConfig, build_features

    keep_one_heap()
    begin_lean()
    settings = load_config(FeatureConfig, config, assignments or ())
    built, already_there = build_features(Dataset.open(dataset), settings, engine=Engine(engine, workers))
    print_result(results.of_features(built, already_there), as_json)


@app.command(
    cls=with_settings("reclaim.training.settings:TrainConfig"),
    epilog="Examples: `reclaim train dataset --estimator network --set fit.epochs=5 --set seed=2` · "
    "`reclaim train cell_a cell_b`, then `reclaim replay margins cell_c --out across` with cell_c built by "
    "`reclaim features cell_c --set split.role=test` · "
    "`torchrun --nproc-per-node 2 -m reclaim train dataset`, on two GPUs · "
    "`reclaim train dataset --engine ray --workers 8`, on eight GPUs of a Ray cluster",
)
def train(
    datasets: DatasetFolders,
    estimator: LearnedEstimator = None,
    config: TrainConfigFile = None,
    assignments: Assignments = None,
    force: Annotated[bool, typer.Option("--force", help="Train even if the same run is finished.")] = False,
    workers: Annotated[
        int, typer.Option("--workers", min=0, help="Workers of Ray; 0: one per GPU of its cluster, or per core.")
    ] = 0,
    engine: Annotated[
        str, typer.Option("--engine", help="`local`: this process, or torchrun's; `ray`: Ray Train's workers.")
    ] = "local",
    promote: Annotated[bool, typer.Option("--promote", help="Then promote it, as `reclaim promote` does.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model, set its margins on validation data and register it as `candidate`.

    The first one is served unless it reclaims over a point of the limits less than the built-in model; others wait for
    `reclaim promote`.
    """
    from reclaim.config import load_config
    from reclaim.data.core.engine.workers import Engine
    from reclaim.training.fitting.train import assist_training, assists, run_training
    from reclaim.training.settings import TrainConfig, config_file

    settings = [*(assignments or ()), *([f"estimator='{estimator}'"] if estimator else [])]
    loaded = load_config(TrainConfig, config_file(config), settings)
    if assists():  # of torchrun's processes the first one records the run and prints
        assist_training(datasets, loaded)
        return
    report = run_training(datasets, loaded, force=force, progress=print_status, engine=Engine(engine, workers))
    promotion = models.promoted(datasets, f"{report.model}/{report.version}", as_json=as_json) if promote else None
    print_result(results.of_train(report, datasets, promotion), as_json)
    models.end_if_refused(promotion)


app.command(
    cls=with_settings("reclaim.training.settings:TrainConfig"),
    epilog="Examples: `reclaim tune dataset --trials 50` · "
    "`reclaim tune dataset --estimator trees --trials 30 --out trees.toml` · "
    "`reclaim tune dataset --trials 48 --at-once 8 --engine processes --workers 8`",
)(study.tune)
app.command(
    epilog="Examples: `reclaim peaks samples.parquet --out peaks.parquet` · "
    "`reclaim peaks samples.parquet --out peaks.parquet --predictor max_n5_rc99 --predictor oracle_24h` · "
    "`reclaim peaks samples.parquet --out peaks.parquet --engine processes`"
)(study.peaks)


app.command(
    epilog="Examples: `reclaim promote dataset` · `reclaim promote dataset --model reclaim/3` · "
    "`reclaim promote --model reclaim/2 --force`"
)(models.promote)
app.command(epilog="Example: `reclaim bundle reclaim@champion model`")(models.bundle)
app.command(epilog="Example: `reclaim mlflow --port 5001`")(models.mlflow)


app.add_typer(replays.app, name="replay")
app.command(
    epilog="Examples: `reclaim compare` · `reclaim compare --experiment frontier` · `reclaim compare RUN RUN`, with "
    "run ids from MLflow"
)(replays.compare)


app.command(
    cls=with_settings("reclaim.replay.experiments.recommend.policy:RecommendConfig"),
    epilog="Examples: `reclaim recommend dataset --out recommendations` · "
    "`reclaim recommend dataset --out recommendations -f krr-json > krr.json` · "
    "`reclaim recommend dataset --out recommendations --patches patches --min-change 20%` · "
    "`reclaim recommend dataset --out recommendations --fail-above 0`, in a pipeline",
)(recommendations.recommend)


@app.command(
    epilog="Examples: `reclaim predict dataset --out reservations.parquet` · "
    "`reclaim predict dataset --out reservations.csv --margin medium` · "
    "`reclaim predict dataset --out all.parquet --model reclaim-trees/1 --every-window --engine ray`"
)
def predict(
    dataset: DatasetFolder,
    out: Annotated[Path, typer.Option(help="File to write: `.parquet` or `.csv`.", metavar="FILE", parser=here)],
    model: ServedModel = None,
    margin: Annotated[
        str, typer.Option(help="Safety margin: `baseline` (widest), `medium` or `aggressive`.", metavar="NAME")
    ] = "baseline",
    every_window: Annotated[
        bool, typer.Option("--every-window", help="A row for each window, not for the latest of each task.")
    ] = False,
    workers: EngineWorkers = 0,
    engine: EngineName = "local",
    as_json: AsJson = False,
) -> None:
    """Write reservations, quantiles, peak CPU and out-of-memory risk of every task into a file.

    Needs the dataset's features (`reclaim features`). The numbers are those that `reclaim serve` answers for the same
    histories. Amounts are in the units of the dataset; `docs/predict-to-a-file.md` lists the columns.
    """
    from reclaim.data.core.engine.workers import Engine
    from reclaim.serving.predictions.job import predict as run

    with Progress("predicting") as progress:
        report = run(
            dataset, out, model=model, margin=margin, every_window=every_window, progress=progress,
            engine=Engine(engine, workers),
        )  # fmt: skip
    print_result(results.of_predict(report, out), as_json)


@app.command(
    epilog="Examples: `reclaim serve` · `reclaim serve --model reclaim/3 --shadow reclaim@candidate` · "
    "`reclaim serve --state /var/lib/reclaim` · `reclaim serve --model ./bundle --in-memory` · "
    "`reclaim serve --record seen`, then `reclaim ingest seen dataset --trace recorded` · "
    "`reclaim serve --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem`"
)
def serve(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")] = 3000,
    model: ServedModel = None,
    shadow: Annotated[
        str, typer.Option(help="Second model, compared live and not served.", metavar="MODEL", envvar="RECLAIM_SHADOW")
    ] = "",
    state: Annotated[
        Path, typer.Option(help="Folder of the persistent state.", metavar="DIR", envvar="RECLAIM_STATE", parser=here)
    ] = Path("reclaim-state"),
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record every window in DIR, a trace for training.",
            metavar="DIR",
            envvar="RECLAIM_RECORD",
            parser=here,
        ),
    ] = None,
    in_memory: Annotated[bool, typer.Option("--in-memory", help="Keep no state across restarts.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the required bearer token.", metavar="FILE", envvar="RECLAIM_TOKEN_FILE"),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.", metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key, PEM.", metavar="FILE")] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log one JSON object per line.", envvar="RECLAIM_LOG_JSON")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Use a damaged state up to the damage and move the rest aside.")
    ] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept other machines without a token.")] = False,
    clock: Annotated[
        Literal["unix", "trace"],
        typer.Option(
            help="`unix`: windows carry this machine's time; `trace`: times of a trace.", envvar="RECLAIM_CLOCK"
        ),
    ] = "unix",
) -> None:
    """Serve reservations over HTTP until stopped; further settings are RECLAIM_… variables of the environment."""
    from reclaim.serving.http.process import prepare_process

    if in_memory:
        _check_no_state(context)
    prepare_process()
    scheme, named = "http" if tls_cert is None else "https", model or "the champion"
    print_status(f"loading {named}; then {scheme}://{host}:{port}/ answers, with its documentation at that address")
    print_status("(the first start of an installation compiles for half a minute)")
    from reclaim.serving.launch import serve as run

    run(
        host, port, model or "",
        shadow=shadow, state=None if in_memory else state, record=record, token_file=token_file,
        tls_cert=tls_cert, tls_key=tls_key, log_json=log_json, repair=repair, insecure=insecure, clock=clock,
    )  # fmt: skip


def _check_no_state(context: typer.Context) -> None:
    """Raise ConfigError where options of the state are given with --in-memory, which overrides RECLAIM_STATE."""
    from reclaim.data.errors import ConfigError

    for name in ("state", "repair"):
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE":
            raise ConfigError(f"--in-memory keeps no state, and --{name} needs one; leave one of them out")


app.command(
    epilog="Examples: `reclaim feed history --url http://127.0.0.1:9090 --out reservations.csv` · "
    "`reclaim feed history --url https://prometheus.example --token-file token --out reclaim.prom` · "
    "`reclaim feed history --url http://127.0.0.1:9090 --once`, from a timer"
)(feeding.feed)


@app.command(epilog="Example: `reclaim demo`")
def demo(
    out: Annotated[Path, typer.Option(help="Folder of all output.", metavar="DIR", parser=here)] = Path("demo"),
    machines: Annotated[int, typer.Option(help="Machines of the synthetic cell.")] = 24,
    days: Annotated[float, typer.Option(help="Days of the synthetic cell.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Seed of the synthetic cell and of training.")] = 1,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Run all stages on a small synthetic cell: synth, ingest, features, train, replay."""
    from reclaim.demo import DEMONSTRATED, SERVE, run_demo
    from reclaim.replay.runs.catalogue import EXPERIMENTS, load_experiment

    with Progress("synthesising") as progress:
        report = run_demo(out, machines=machines, days=days, seed=seed, say=print_status, synth_progress=progress)
    replays.print_replay(
        load_experiment(DEMONSTRATED), report,
        "margins set on validation data, all results above measured on later test data of a SYNTHETIC cell",
        *(f"figure  {path}" for path in sorted(report.folder.glob("*.png"))),
        *(f"replay  reclaim replay {name} {out / 'dataset'} --out {out / name}"
          for name in EXPERIMENTS if name != DEMONSTRATED),
        f"serve   {SERVE}",
        as_json=as_json, verbose=verbose,
    )  # fmt: skip


def _end(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def main() -> NoReturn:
    """Run the command line: an error that the caller can correct is one line and exit code 2, any other a traceback."""
    from reclaim.data.errors import ReclaimError

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without an arrow, or the name of a file that is no text
        sys.stdout.reconfigure(errors="replace")
    # what is half written goes, as at Ctrl-C; the first process of a container would ignore a signal without a handler
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup lets it go on when its terminal closes
        signal.signal(signal.SIGHUP, _end)
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except ReclaimError as error:
        fail(str(error))
    except _UsageError as error:
        if not sys.argv[1:] or sys.argv[1:] == ["replay"]:  # a command is missing, and the help is printed
            sys.exit(2)
        verb = error.ctx.command_path if error.ctx else app.info.name  # an option without its value has no command
        fail(f"{error.format_message().rstrip('.')}; see `{verb} --help`")
    except OSError as error:
        from reclaim.data.core.files import FULL_DISK

        if error.errno in FULL_DISK:
            verb = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
            resumed = "; finished work is kept" if verb in _RESUMED else ""
            fail(f"{error.filename or 'output'}: {error.strerror}; make room and run it again{resumed}")
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}{_OS_REMEDIES.get(error.errno or 0, '')}")
    except typer.Abort as error:
        if isinstance(error.__cause__, EOFError):  # of a file that ends too early; typer takes it for the end of input
            raise error.__cause__ from None
        sys.exit(130)
