"""Arguments and options that several verbs of the command line share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DatasetFolder = Annotated[Path, typer.Argument(help="Dataset folder, made by `reclaim ingest`.", metavar="DATASET")]
DatasetFolders = Annotated[
    list[Path],
    typer.Argument(help="Dataset folders with features; the rows of several are put together.", metavar="DATASET"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings, as TOML.", metavar="FILE")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="One setting, `key=value`; may be given often.", metavar="KEY=VALUE")
]
