"""The command line: one verb per stage; parse, call one function of a room, print what it wrote."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from reclaim import replays, study
from reclaim.console import Progress, fail, kept, say, tell
from reclaim.options import AsJson, Assignments, ConfigFile, DatasetFolder, DatasetFolders

# Rooms are imported inside the verbs: `--help` answers at once, and a verb pays only for what it uses.

_UsageError: Any = typer.BadParameter.__bases__[0]
"""What typer raises for words it cannot use; it carries a click of its own, which is not there to import from."""

_RESUMED = ("fetch", "ingest", "tune")
"""Verbs that go on where they were stopped; any other does its work anew."""

app = typer.Typer(
    name="reclaim",
    help="Predict what every task in a cluster will need, so that the rest can be lent out.\n\n"
    "The way through: synth (or your own trace) → ingest → features → train → replay → compare, serve. "
    "`reclaim demo` goes all of it on a small synthetic cell.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def _roof(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what goes on.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if not verbose:
        warnings.simplefilter("ignore")


@app.command(epilog="Example: `reclaim synth cell --machines 30 --days 4 --seed 1`")
def synth(
    out: Annotated[Path, typer.Argument(help="Folder to write the cell into.", metavar="OUT")],
    machines: Annotated[int, typer.Option(help="Machines of the cell.")] = 30,
    days: Annotated[float, typer.Option(help="Length of the trace, in days.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Same options and seed, same bytes.")] = 1,
    tasks_per_machine: Annotated[float, typer.Option(help="Tasks running on a machine, on average.")] = 12.0,
    format_: Annotated[str, typer.Option("--format", help="`json` (lines, gzipped) or `parquet`.")] = "json",
    as_json: AsJson = False,
) -> None:
    """Make a synthetic cell in the Google v3 layout."""
    from reclaim.data.synthetic import SyntheticCellConfig, write_cell

    config = SyntheticCellConfig(
        machines=machines, days=days, seed=seed, tasks_per_machine=tasks_per_machine, format=format_
    )
    with Progress("synthesising") as progress:
        report = write_cell(out, config, progress=progress)
    facts = {"cell": str(out), "rows": report.rows, "tasks": report.tasks, "ends": report.ends, "wrote": report.wrote}
    windows = report.rows["instance_usage"]
    tell(facts, as_json, f"{out}: {windows:,} usage windows of {report.tasks:,} tasks{kept(not report.wrote)}")


@app.command(epilog="Example: `reclaim fetch google-v3 cell_a --cell a --table instance_usage --shards 0-3`")
def fetch(
    trace: Annotated[str, typer.Argument(help="`google-v3`, `google-v2.1` or `alibaba-2017`.", metavar="TRACE")],
    out: Annotated[Path, typer.Argument(help="Folder for the trace's files.", metavar="OUT")],
    cell: Annotated[str | None, typer.Option(help="For `google-v3`: cell, `a` to `h`.")] = None,
    table: Annotated[list[str] | None, typer.Option(help="A table; may be given often. Default: all.")] = None,
    shards: Annotated[str | None, typer.Option(help="Shards of each table, as `0-3,7`. Default: all.")] = None,
    base_url: Annotated[str | None, typer.Option(help="A mirror to fetch from instead.", metavar="URL")] = None,
    parallel: Annotated[int, typer.Option(help="Files fetched at once.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Fetch a public trace's files, checked; killed and run again, it goes on where it was."""
    from dataclasses import asdict

    from reclaim.data.fetch import FetchConfig
    from reclaim.data.fetch import fetch as run

    config = FetchConfig(
        trace=trace, cell=cell, tables=tuple(table or ()), shards=shards, base_url=base_url, parallel=parallel
    )
    report = run(config, out)
    tell(
        {"folder": str(out), **asdict(report)}, as_json,
        f"{out}: {len(report.files)} files, {len(report.fetched)} of them new ({report.n_bytes:,} bytes); "
        f"{len(report.unchecked)} without a published checksum{kept(not report.fetched)}",
    )  # fmt: skip


@app.command(
    epilog="Examples: `reclaim ingest cell dataset` · "
    "`reclaim ingest traces/bitbrains vms --trace series --mapping bitbrains` · "
    "`reclaim ingest clusterdata-2011-2 dataset --trace google-v2.1 --memory-limit-mib 16384`"
)
def ingest(
    source: Annotated[Path, typer.Argument(help="Folder with the trace's files.", metavar="SOURCE")],
    dataset: Annotated[Path, typer.Argument(help="Dataset folder to write.", metavar="DATASET")],
    trace: Annotated[
        str, typer.Option(help="Format: `google-v3`, `google-v2.1`, `alibaba-2017` or `series`.")
    ] = "google-v3",
    mapping: Annotated[
        str | None, typer.Option(help="For `series`: mapping TOML, or `azure`, `bitbrains`.", metavar="FILE")
    ] = None,
    buckets: Annotated[
        int | None,
        typer.Option(help="Files the tasks are spread over. Default: as the trace's size asks.", metavar="N"),
    ] = None,
    max_reject_share: Annotated[float, typer.Option(help="Largest share of bad lines to put up with.")] = 0.001,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Go on without unreadable files.")] = False,
    memory_limit_mib: Annotated[
        int, typer.Option(help="Memory of all processes together, in MiB; more lets more workers in.")
    ] = 1024,
    workers: Annotated[int, typer.Option(help="Processes at once; 0: one for each core, as memory allows.")] = 0,
    engine: Annotated[str, typer.Option(help="`local`, or `ray` (needs reclaim[ray]).")] = "local",
    as_json: AsJson = False,
) -> None:
    """Read a trace into a dataset; killed and run again, it goes on where it was."""
    from reclaim.data.ingest import IngestConfig
    from reclaim.data.ingest import ingest as run

    config = IngestConfig(
        trace=trace, mapping=mapping, buckets=buckets, max_reject_share=max_reject_share, skip_damaged=skip_damaged,
        memory_limit_mib=memory_limit_mib, workers=workers, engine=engine,
    )  # fmt: skip
    report = run(source, dataset, config)
    manifest = report.dataset.manifest
    counts, rejected = manifest["counts"], sum(manifest["rejects"].values())
    facts = {"dataset": str(dataset), "already_there": report.already_there}
    facts |= {
        k: manifest[k] for k in ("fingerprint", "nature", "counts", "rejects", "damaged", "defects", "lacks", "notes")
    }
    tell(
        facts, as_json,
        f"{dataset}: {counts['usage']:,} windows of {counts['tasks']:,} tasks, {manifest['nature']}; {rejected} lines "
        f"rejected, {len(manifest['damaged'])} files damaged{kept(report.already_there)}",
        *(["no usage windows: to be inspected, not to be learned from"] if not counts["usage"] else []),
        *([f"{counts['windows_without_limit']:,} windows have no CPU limit: no event tells it"]
          if counts["windows_without_limit"] else []),
        *([f"{len(manifest['not_read'])} files were not read: {', '.join(manifest['not_read'][:3])} …"]
          if manifest["not_read"] else []),
    )  # fmt: skip


@app.command(epilog="Example: `reclaim inspect dataset --html dataset.html`")
def inspect(
    dataset: DatasetFolder,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with figures, too: one file.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what is in a dataset: tiers, limits and usage, gaps, missing fields, events, machines, rejects."""
    from reclaim.data.store import Dataset
    from reclaim.data.survey import survey
    from reclaim.data.survey_page import check_target, write_page
    from reclaim.data.survey_sections import text

    opened = Dataset.open(dataset)
    if html is not None:
        check_target(html)
    facts = survey(opened)
    if html is not None:
        write_page(facts, html)
    wrote = "no page written; --html FILE writes one" if html is None else f"page  {html}"
    tell({**facts, "page": html and str(html)}, as_json, text(facts), wrote)


@app.command(
    epilog="Examples: `reclaim features dataset` · `reclaim features dataset --set split.train_share=0.6` · "
    "`reclaim features other_cell --set split.role=test`, to hold a dataset out whole for models trained elsewhere"
)
def features(
    dataset: DatasetFolder,
    config: ConfigFile = None,
    assignments: Assignments = None,
    workers: Annotated[int, typer.Option(min=0, help="Threads; 0: one for each core.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compute features, targets and splits of every window of a dataset."""
    from reclaim.config import load_config
    from reclaim.data.store import Dataset
    from reclaim.features.build import FeatureConfig, build_features

    built, there = build_features(
        Dataset.open(dataset), load_config(FeatureConfig, config, assignments or ()), workers=workers
    )
    keys = ("fingerprint", "pipeline", "rows", "targets", "oom_events", "oom_definition")
    facts = {"features": str(built.path), "already_there": there, "role": built.role}
    facts |= {k: built.manifest[k] for k in keys}
    tell(
        facts, as_json,
        f"{built.path}: {len(built):,} rows of {built.x.shape[1]} features; {len(built.train_rows()):,} to train, "
        f"{len(built.valid_rows()):,} to set margins, {len(built.test_rows()):,} to test; "
        f"{built.manifest['oom_events']} OOM events by the derived label{kept(there)}",
        *(["held out whole (split.role=test): for models trained on other datasets"] if built.role == "test" else []),
    )  # fmt: skip


@app.command(
    epilog="Examples: `reclaim train dataset --estimator network --set fit.epochs=5 --set seed=2` · "
    "`reclaim train cell_a cell_b`, then `reclaim replay margins cell_c --out across` with cell_c built by "
    "`reclaim features cell_c --set split.role=test` · "
    "`torchrun --nproc-per-node 2 -m reclaim train dataset`, on two GPUs"
)
def train(
    datasets: DatasetFolders,
    estimator: Annotated[str | None, typer.Option(help="`network` or `trees`.", metavar="NAME")] = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    force: Annotated[bool, typer.Option("--force", help="Train even where this very run has been finished.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fit a model, set its margins on validation data, record and register it; the network becomes `champion`."""
    from dataclasses import asdict

    from reclaim.config import load_config
    from reclaim.training.settings import TrainConfig
    from reclaim.training.train import assist_training, assists, run_training

    settings = [*(assignments or ()), *([f"estimator='{estimator}'"] if estimator else [])]
    loaded = load_config(TrainConfig, config, settings)
    if assists():  # torchrun started several processes, and the first one records and tells
        assist_training(datasets, loaded)
        return
    report = run_training(datasets, loaded, force=force, progress=say)
    tell(
        asdict(report), as_json,
        f"{report.model}/{report.version}: {report.estimator} of {report.rows['train']:,} rows "
        f"in {report.seconds:.0f} s, run {report.run_id}{kept(report.reused)}",
        *(f"{d['name']}: {d['train']:,} rows to train, {d['valid']:,} to set margins"
          for d in report.datasets if len(report.datasets) > 1),
        *report.notes,
    )  # fmt: skip


app.command(
    epilog="Examples: `reclaim tune dataset --trials 50` · "
    "`reclaim tune dataset --estimator trees --trials 30 --out trees.toml`"
)(study.tune)
app.command(
    epilog="Examples: `reclaim peaks samples.parquet --out peaks.parquet` · "
    "`reclaim peaks samples.parquet --out peaks.parquet --predictor max_n5_rc99 --predictor oracle_24h`"
)(study.peaks)


app.add_typer(replays.app, name="replay")
app.command(
    epilog="Example: `reclaim compare`, `reclaim compare --experiment frontier`, or `reclaim compare RUN RUN` with run "
    "ids from MLflow"
)(replays.compare)


@app.command(
    epilog="Examples: `reclaim serve` · `reclaim serve --model reclaim/3 --shadow reclaim@candidate` · "
    "`reclaim serve --state /var/lib/reclaim` · `reclaim serve --model ./bundle --in-memory` · "
    "`reclaim serve --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem`"
)
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 3000,
    model: Annotated[
        str,
        typer.Option(help="NAME@ALIAS, NAME/VERSION or a bundle's folder.", metavar="MODEL", envvar="RECLAIM_MODEL"),
    ] = "reclaim@champion",
    shadow: Annotated[
        str, typer.Option(help="A second model, compared live, never served.", metavar="MODEL", envvar="RECLAIM_SHADOW")
    ] = "",
    state: Annotated[
        Path, typer.Option(help="Folder for what must outlive the process.", metavar="DIR", envvar="RECLAIM_STATE")
    ] = Path("reclaim-state"),
    in_memory: Annotated[bool, typer.Option("--in-memory", help="Keep no state: a restart forgets the cell.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the bearer token to ask for.", metavar="FILE", envvar="RECLAIM_TOKEN_FILE"),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate and its chain, PEM.", metavar="FILE")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key, PEM.", metavar="FILE")] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log one JSON object a line.", envvar="RECLAIM_LOG_JSON")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Use a damaged state up to the damage, and move the rest aside.")
    ] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other machines in without a token, too.")] = False,
) -> None:
    """Serve reservations over HTTP until stopped; settings without an option here are RECLAIM_… in the environment."""
    from reclaim.serving.environment import prepare_process

    prepare_process()
    scheme = "http" if tls_cert is None else "https"
    say(f"loading {model}; then {scheme}://{host}:{port}/ answers, its page there says how")
    from reclaim.serving.launch import serve as run

    run(
        host, port, model,
        shadow=shadow, state=None if in_memory else state, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key,
        log_json=log_json, repair=repair, insecure=insecure,
    )  # fmt: skip


@app.command(epilog="Example: `reclaim demo`")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for all it makes.", metavar="DIR")] = Path("demo"),
    machines: Annotated[int, typer.Option(help="Machines of the synthetic cell.")] = 24,
    days: Annotated[float, typer.Option(help="Days of the synthetic cell.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Seed of the synthetic cell and of training.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Go the whole way on a small synthetic cell: synth, ingest, features, train, replay."""
    from reclaim.demo import DEMONSTRATED, run_demo
    from reclaim.replay.experiments import EXPERIMENTS, load_experiment

    with Progress("synthesising") as progress:
        report = run_demo(out, machines=machines, days=days, seed=seed, say=say, synth_progress=progress)
    replays.tell_replay(
        load_experiment(DEMONSTRATED), report, as_json,
        "margins set on validation data, everything above measured on later test data of a SYNTHETIC cell",
        *(f"figure  {path}" for path in sorted(report.folder.glob("*.png"))),
        *(f"replay  reclaim replay {name} {out / 'dataset'} --out {out / name}"
          for name in EXPERIMENTS if name != DEMONSTRATED),
        "serve   reclaim serve --model reclaim@champion",
    )  # fmt: skip


def main() -> NoReturn:
    """Run the command line: exit 2 for what the caller can mend, with one line that says so; a traceback otherwise."""
    from reclaim.data.errors import ReclaimError

    try:
        sys.exit(app(standalone_mode=False) or 0)
    except ReclaimError as error:
        fail(str(error))
    except _UsageError as error:
        if not sys.argv[1:] or sys.argv[1:] == ["replay"]:  # a verb was asked for, and its help is the answer
            sys.exit(2)
        verb = error.ctx.command_path if error.ctx else app.info.name  # an option without its value knows no verb
        fail(f"{error.format_message().rstrip('.')}; `{verb} --help` says more")
    except OSError as error:
        from reclaim.data.rows import NO_ROOM

        if error.errno in NO_ROOM:
            verb = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
            resumed = "; what was done is kept" if verb in _RESUMED else ""
            fail(f"{error.filename or 'output'}: {error.strerror}; make room and run it again{resumed}")
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}")
    except typer.Abort:
        sys.exit(130)
