"""Output of the command line: results for a person or a script, errors, tables, progress; its shared options."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from reclaim.data.core.tables import Table


def fail(message: str) -> NoReturn:
    """Print one red line and exit with 2: an error that the caller can correct."""
    line = f"error: {' '.join(message.split())}"
    typer.echo(f"\033[31m{line}\033[0m" if sys.stderr.isatty() else line, err=True)
    sys.exit(2)


def print_status(line: str) -> None:
    """Print a line of progress to standard error, apart from the output that a script reads."""
    typer.echo(f"· {line}", err=True)


def print_result(result: tuple[dict[str, Any], list[str]], as_json: bool) -> None:
    """Print a result: its facts as JSON for a script, or its lines for a person."""
    facts, lines = result
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for line in lines:
            typer.echo(line)


def unchanged(already_there: bool) -> str:
    """Return what to append to the line of a stage that was already finished."""
    return " (was there already, nothing to do)" if already_there else ""


class _WithSettings(TyperCommand):
    """A command whose help ends with the settings that ``--set`` takes."""

    config: ClassVar[str]
    """Module and class of the settings, imported when help is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, then a line or two for each setting."""
        super().format_help(ctx, formatter)
        from reclaim.config import settings_of

        module, _, name = self.config.partition(":")
        columns = min(width() or 80, 120)
        typer.echo("Settings, for --set and --config (docs/reference.md has them, too):\n")
        for setting in settings_of(getattr(import_module(module), name)):
            text = f"{setting.name} = {setting.default}: {setting.meaning}"
            typer.echo(textwrap.fill(text, columns, initial_indent="  ", subsequent_indent="      "))
        typer.echo("")


def with_settings(config: str) -> type[TyperCommand]:
    """Return the class of a command that takes settings, given as ``module:class``."""
    return type("_WithSettings", (_WithSettings,), {"config": config})


def width() -> int | None:
    """Return the columns of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(table: Table) -> None:
    """Print a table; one wider than the terminal comes in parts."""
    typer.echo(table.as_text(width()), nl=False)


class Progress:
    """A progress bar on a terminal."""

    def __init__(self, what: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=100, desc=what, unit="%", disable=None, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __call__(self, share: float) -> None:
        """Move the bar to the share done, in [0, 1]."""
        self._bar.update(round(100 * share) - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def place(name: str) -> Path:
    """Return the folder that an argument names, here or in an object store."""
    from reclaim.data.core.stores.places import location

    return _as_argument(location, name)


def here(name: str) -> Path:
    """Return the file or folder of this machine that an argument names; one in an object store is refused."""
    from reclaim.data.core.stores.places import on_this_machine

    return _as_argument(on_this_machine, name)


def _as_argument(of: Callable[[str], Path], name: str) -> Path:
    from reclaim.data.errors import ConfigError

    try:
        return of(name)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def learned(name: str) -> str:
    """Return the name of an estimator that is trained, as an option gives it."""
    from reclaim.training.estimators.registry import LEARNED

    if name not in LEARNED:
        raise typer.BadParameter(f"expected one of {', '.join(LEARNED)}, got {name!r}")
    return name


DatasetFolder = Annotated[
    Path,
    typer.Argument(
        help="Dataset folder, made by `reclaim ingest`, here or in a store.", metavar="DATASET", parser=place
    ),
]
DatasetFolders = Annotated[
    list[Path],
    typer.Argument(
        help="Dataset folders with features, here or in a store; several are joined.", metavar="DATASET", parser=place
    ),
]
EngineName = Annotated[
    str,
    typer.Option("--engine", help="`local` threads, `processes`, or `ray`, the cluster of RAY_ADDRESS."),
]
EngineWorkers = Annotated[
    int, typer.Option("--workers", min=0, help="Workers of the engine; 0: one per core, as memory allows.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print all tables, not the summary alone.")]
LearnedEstimator = Annotated[
    str | None, typer.Option("--estimator", help="`network` or `trees`.", metavar="NAME", parser=learned)
]
NoModel = Annotated[bool, typer.Option("--no-model", help="Only estimators without a model.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings in TOML.", metavar="FILE")]
ServedModel = Annotated[
    str | None,
    typer.Option(
        help="NAME@ALIAS, NAME/VERSION, a bundle's folder or `builtin`.",
        metavar="MODEL",
        envvar="RECLAIM_MODEL",
        show_default="reclaim@champion, or the built-in model until there is one",
    ),
]
TrainConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="Settings in TOML: a file, or `portable`, which the package has.",
        metavar="FILE",
    ),
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="Setting, `key=value`; repeatable.", metavar="KEY=VALUE")
]
